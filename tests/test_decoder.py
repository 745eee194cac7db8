"""The decoder against transformers, in float32, family by family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.contracts import Output
from outrider.errors import CheckpointError, ExportError
from outrider.export.config import ModelConfig
from outrider.export.decoder import Conv1x1, Decoder, EagerPrimitives, Step
from outrider.export.rope import rope_tables
from outrider.export.slots import SlotWeights, matrix_slots, slot_shape, vector_slots
from tests import families

torch.set_num_threads(1)


class EagerGraph:
    """A decoder in PyTorch behind the graph protocol: as plain as it can be, an oracle."""

    def __init__(self, weights: SlotWeights, hidden_layers: Sequence[int] = (), linear: Any = None) -> None:
        self.config = config = weights.config
        self.decoder = Decoder(config, EagerPrimitives(weights, linear), hidden_layers)
        shape = (1, config.num_kv_heads, 0, config.head_dim)
        self.cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
        self.positions = np.zeros(0, np.int64)
        self.hidden_layers = tuple(hidden_layers)

    @property
    def length(self) -> int:
        return len(self.positions)

    def forward(
        self, tokens: Any, positions: Any = None, mask: Any = None, logits: Any = "all", hidden: Any = ()
    ) -> Output:
        S, P = len(tokens), self.length
        self.new = np.arange(P, P + S) if positions is None else np.asarray(positions)
        everywhere = np.concatenate([self.positions, self.new])
        visible = np.concatenate(
            [np.ones((S, P), bool), np.tri(S, dtype=bool) if mask is None else mask], axis=1
        )
        near = everywhere[P:, None] - everywhere[None] < (self.config.sliding_window or 10**9)
        bias = {
            kind: torch.from_numpy(np.where(seen, 0, -1e9).astype(np.float32))[None, None]
            for kind, seen in {"full": visible, "sliding": visible & near}.items()
        }
        tables = {kind: rope_tables(self.config, kind, families.CONTEXT) for kind in ("full", "sliding")}
        rope = {
            kind: tuple(torch.from_numpy(table[self.new]) for table in pair) for kind, pair in tables.items()
        }
        rows = {"all": range(S), "last": [S - 1]}.get(logits, logits) if isinstance(logits, str) else logits
        step = Step(rope, bias, self.cache)
        with torch.no_grad():
            found, states = self.decoder(torch.tensor([list(tokens)]), torch.tensor(list(rows)), step)
        self.present = step.present
        return Output(
            found[0].numpy(), dict(zip(self.hidden_layers, [s[0].numpy() for s in states], strict=True))
        )

    def commit(self, rows: Any) -> None:
        index = torch.tensor(list(rows))
        self.cache = [
            tuple(torch.cat([old, new[:, :, index]], dim=2) for old, new in zip(past, rows_, strict=True))
            for past, rows_ in zip(self.cache, self.present, strict=True)
        ]
        self.positions = np.concatenate([self.positions, self.new[list(rows)]])

    def truncate(self, length: int) -> None:
        self.cache = [(key[:, :, :length], value[:, :, :length]) for key, value in self.cache]
        self.positions = self.positions[:length]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_decoder_equals_transformers_through_prefill_decode_tree_rollback_and_window(family: str) -> None:
    model = families.oracle(family)
    graph = EagerGraph(families.weights_of(family, model))
    families.check_decoding(graph, lambda tokens: families.reference_logits(model, tokens), 1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hidden_states_are_the_residual_stream_after_a_layer(family: str) -> None:
    model = families.oracle(family, num_hidden_layers=3)  # transformers norms its last hidden state
    graph = EagerGraph(families.weights_of(family, model), hidden_layers=(0, 1))
    tokens = list(range(1, 9))
    found = graph.forward(tokens).hidden
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for layer in (0, 1):
        np.testing.assert_allclose(found[layer], expected[layer + 1][0].numpy(), atol=1e-4)


def test_a_convolution_computes_what_a_linear_layer_computes() -> None:
    model = families.oracle("qwen2")
    weights = families.weights_of("qwen2", model)
    plain, convolved = EagerGraph(weights), EagerGraph(weights, linear=Conv1x1)
    tokens = [5, 6, 7]
    np.testing.assert_allclose(convolved.forward(tokens).logits, plain.forward(tokens).logits, atol=1e-5)


def test_every_slot_has_the_shape_that_its_weight_has() -> None:
    for family in families.FAMILIES:
        weights = families.weights_of(family, families.oracle(family))
        for slot in matrix_slots(weights.config):
            assert weights.matrix(slot).shape == slot_shape(weights.config, slot), (family, slot)
        for slot in vector_slots(weights.config):
            assert weights.vector(slot).ndim == 1
    with pytest.raises(ExportError, match="known: embedding"):
        slot_shape(weights.config, "layers.0.q")


def config(**changes: Any) -> ModelConfig:
    base = ModelConfig("llama", 96, 64, 2, 4, 2, 16, 96, 4096, rope_theta=10000.0)
    return replace(base, **changes)


def transformers_tables(scaling: dict[str, Any], max_context: int) -> tuple[np.ndarray, np.ndarray]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rope_scaling=scaling
    )
    if scaling["rope_type"] == "longrope":  # a top-level field in the configurations that have it
        hf.original_max_position_embeddings = scaling["original_max_position_embeddings"]
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1, dtype=torch.float32), torch.arange(max_context)[None])
    return cos[0, :, :8].numpy(), sin[0, :, :8].numpy()


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5},
    {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0],
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_scaled_tables_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    long = 1400 if scaling["rope_type"] == "longrope" else 300
    cos, sin = rope_tables(config(rope_scaling=scaling), "full", long)
    expected_cos, expected_sin = transformers_tables(scaling, long)
    np.testing.assert_allclose(cos, expected_cos, atol=2e-4)  # transformers multiplies in float32
    np.testing.assert_allclose(sin, expected_sin, atol=2e-4)


def test_longrope_takes_the_short_factors_within_the_original_context() -> None:
    scaling = SCALINGS[-1]
    cos, _ = rope_tables(config(rope_scaling=scaling), "full", 512)
    np.testing.assert_allclose(cos, transformers_tables(scaling, 512)[0], atol=2e-4)


def test_factors_divide_the_frequencies_of_gguf_files() -> None:
    linear = rope_tables(config(rope_scaling={"rope_type": "linear", "factor": 4.0}), "full", 50)
    factors = rope_tables(config(rope_scaling={"rope_type": "factors", "factors": [4.0] * 8}), "full", 50)
    np.testing.assert_array_equal(linear[0], factors[0])


def test_local_layers_take_their_own_theta_without_scaling() -> None:
    scaled = config(
        rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_local_theta=500.0, sliding_window=8
    )
    np.testing.assert_array_equal(
        rope_tables(scaled, "sliding", 20)[0], rope_tables(config(rope_theta=500.0), "full", 20)[0]
    )


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "known: default, factors"),
        ({"rope_type": "linear"}, "lacks 'factor'"),
        ({"rope_type": "factors", "factors": [1.0]}, "1 rope factors for 8"),
    ],
)
def test_a_scaling_that_cannot_be_computed_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_tables(config(rope_scaling=scaling), "full", 16)
