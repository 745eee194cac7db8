"""Tiny random models of every family: transformers as the oracle, and the same weights as a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from outrider.export.config import ModelConfig
from outrider.export.slots import SlotWeights
from outrider.quantize.schemes import RawBlocks

VOCAB, CONTEXT = 96, 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
WINDOW = {"sliding_window": 12}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILY_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_scaling": LLAMA3}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral": ("Mistral", {"head_dim": 32, **WINDOW}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": ("Gemma2", {**GEMMA, **WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, **WINDOW, "rope_local_base_freq": 500.0, "sliding_window_pattern": 2}),
    "phi3": (
        "Phi3",
        {
            "sliding_window": None,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.5,
        },
    ),
}
FAMILIES = tuple(FAMILY_OPTIONS)


@dataclass
class StateCheckpoint:
    """A transformers model's weights under the names and conventions of a checkpoint."""

    config: ModelConfig
    state: dict[str, np.ndarray]

    def names(self) -> list[str]:
        """Every tensor."""
        return list(self.state)

    def tensor(self, name: str) -> np.ndarray:
        """A copy of a tensor's values."""
        return self.state[name].astype(np.float32)

    def raw(self, name: str) -> RawBlocks | None:
        """Nothing here is quantized."""
        return None


def oracle(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights, norms included, that is far from constant."""
    name, options = FAMILY_OPTIONS[family]
    values = {**COMMON, **options, **changes}
    attention = values.pop("attn_implementation")
    config = getattr(transformers, f"{name}Config")(**values)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * (0.1 if tensor.ndim > 1 else 0.3))
    return model


def checkpoint_of(family: str, model: Any) -> StateCheckpoint:
    """The model's configuration and weights as a checkpoint reader would present them."""
    state = {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
    config = config_of(family, model.config)
    if family == "phi3":
        state = _split_fused(state, config)
    if family.startswith("gemma"):
        state = {name: values + 1 if "norm" in name else values for name, values in state.items()}
    return StateCheckpoint(config, state)


def weights_of(family: str, model: Any) -> SlotWeights:
    """The model's weights by slot."""
    return SlotWeights(checkpoint_of(family, model))


def config_of(family: str, hf: Any) -> ModelConfig:
    """The configuration record of a transformers configuration."""
    gemma = family.startswith("gemma")
    layer_types = getattr(hf, "layer_types", None)
    kinds = tuple("sliding" if t == "sliding_attention" else "full" for t in layer_types or ())
    qwen = family.startswith("qwen")
    return ModelConfig(
        family=family,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        intermediate_size=hf.intermediate_size,
        max_position=hf.max_position_embeddings,
        norm_eps=hf.rms_norm_eps,
        rope_theta=hf.rope_theta,
        rope_scaling=getattr(hf, "rope_scaling", None),
        rope_local_theta=getattr(hf, "rope_local_base_freq", None),
        partial_rotary_factor=getattr(hf, "partial_rotary_factor", 1.0),
        tie_embeddings=hf.tie_word_embeddings,
        qkv_bias=family == "qwen2" or getattr(hf, "attention_bias", False),
        output_bias=getattr(hf, "attention_bias", False) and not qwen,
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        embedding_scale=hf.hidden_size**0.5 if gemma else 1.0,
        activation="gelu_tanh" if gemma else "silu",
        attention_scale=hf.query_pre_attn_scalar**-0.5 if gemma else None,
        attention_softcap=getattr(hf, "attn_logit_softcapping", None),
        logit_softcap=getattr(hf, "final_logit_softcapping", None),
        sliding_window=hf.sliding_window if kinds or family == "mistral" else None,
        layer_types=kinds if "sliding" in kinds or not qwen else (),
    )


def _split_fused(state: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Phi-3 stores query, key and value in one matrix, gate and up in another."""
    kv = config.num_kv_heads * config.head_dim
    query = config.num_heads * config.head_dim
    cuts = {
        "self_attn.qkv_proj": (
            [query, query + kv],
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ),
        "mlp.gate_up_proj": ([config.intermediate_size], ("mlp.gate_proj", "mlp.up_proj")),
    }
    split: dict[str, np.ndarray] = {}
    for name, values in state.items():
        fused = next((stem for stem in cuts if stem in name), None)
        if fused is None:
            split[name] = values
            continue
        places, parts = cuts[fused]
        for part, rows in zip(parts, np.split(values, places), strict=True):
            split[name.replace(fused, part)] = rows
    return split


def reference_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """What transformers computes for a plain sequence, [S, V]."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from a root to `node`, `node` included; parents are -1 for roots."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def tree_mask(parents: list[int]) -> np.ndarray:
    """[S, S] ancestor-or-self."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        mask[node, path_to(parents, node)] = True
    return mask


def depths(parents: list[int]) -> np.ndarray:
    """The depth of every node, 0 for roots."""
    return np.array([len(path_to(parents, node)) - 1 for node in range(len(parents))])


def check_rows_come_back(graph: Any) -> None:
    """What was put aside of a cache is there again bit for bit, whatever ran in its place."""
    graph.forward([1, 2, 3, 4, 5])
    graph.commit(range(5))
    expected = graph.forward([7]).logits.copy()
    assert graph.keeps_rows
    kept = graph.keep(2)
    graph.truncate(2)
    graph.forward([9, 9, 9, 9])
    graph.commit(range(4))
    assert not np.array_equal(graph.forward([7]).logits, expected)
    graph.truncate(2)
    graph.bring_back(kept)
    assert graph.length == 5
    np.testing.assert_array_equal(graph.forward([7]).logits, expected)


def check_decoding(graph: Any, reference: Callable[[list[int]], np.ndarray], tolerance: float) -> None:
    """Drive a graph through prefill, decoding, trees, rollback and path commits; compare with plain forwards.

    Long enough that a window of 12 is crossed within single verifies.
    """
    rng = np.random.default_rng(7)
    tokens = rng.integers(1, VOCAB, 40).tolist()

    def same(found: np.ndarray, sequence: list[int], rows: Any = slice(None)) -> None:
        np.testing.assert_allclose(found, reference(sequence)[rows], atol=tolerance, rtol=0)

    first = graph.forward(tokens[:5])
    same(first.logits, tokens[:5])
    graph.commit(range(5))
    last = graph.forward(tokens[5:9], logits="last")
    same(last.logits, tokens[:9], slice(-1, None))
    graph.commit(range(4))
    for step in range(9, 11):
        same(graph.forward(tokens[step : step + 1]).logits, tokens[: step + 1], slice(-1, None))
        graph.commit([0])

    parents = [-1, 0, 0, 1, 2, 2, 4]
    context = tokens[:11]
    for _ in range(2):
        drafted = rng.integers(1, VOCAB, len(parents)).tolist()
        found = graph.forward(drafted, graph.length + depths(parents), tree_mask(parents)).logits.copy()
        for node in range(len(parents)):
            path = [drafted[i] for i in path_to(parents, node)]
            same(found[node], context + path, -1)
        assert graph.length == len(context)
        accepted = path_to(parents, 6)  # rows 0, 2, 4, 6: not contiguous
        graph.commit(accepted)
        context = context + [drafted[i] for i in accepted]
        same(graph.forward([3]).logits, [*context, 3], slice(-1, None))

    graph.truncate(12)
    context = context[:12]
    same(graph.forward([9, 8, 7]).logits, [*context, 9, 8, 7], slice(-3, None))
    graph.commit([0, 1])
    same(graph.forward([6], logits=[0]).logits, [*context, 9, 8, 6], slice(-1, None))
