"""The places of a decoder that hold a weight, and where a checkpoint keeps what belongs there.

Matrix slots: `embedding`, `layers.N.qkv`, `layers.N.attn_out`, `layers.N.gate_up`, `layers.N.down`, `head`;
`qkv` and `gate_up` are row-wise concatenations. Vector slots: `norm`, `layers.N.attn_norm`,
`layers.N.mlp_norm`, with sandwich norms `layers.N.attn_post_norm` and `layers.N.mlp_post_norm`, with
query/key norms `layers.N.q_norm` and `layers.N.k_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.export.config import ModelConfig
from outrider.quantize.schemes import RawBlocks

__all__ = ["SlotWeights", "has_bias", "matrix_slots", "slot_shape", "vector_slots"]

MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
PLAIN_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


class Tensors(Protocol):
    """What is read from a checkpoint; see `outrider.export.checkpoint.Checkpoint`."""

    config: ModelConfig

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The float32 values of a tensor."""
        ...

    def raw(self, name: str) -> RawBlocks | None:
        """The quantized bytes of a matrix, or None."""
        ...


def matrix_slots(config: ModelConfig) -> list[str]:
    """Every slot that holds a matrix, in the order of the forward pass; `head` also when it is tied."""
    layers = [f"layers.{layer}.{part}" for layer in range(config.num_layers) for part in MATRICES]
    return ["embedding", *layers, "head"]


def vector_slots(config: ModelConfig) -> list[str]:
    """Every slot that holds a norm's multipliers."""
    parts = list(SANDWICH_NORMS if config.sandwich_norms else PLAIN_NORMS)
    parts += HEAD_NORMS if config.qk_norm else ()
    return [f"layers.{layer}.{part}" for layer in range(config.num_layers) for part in parts] + ["norm"]


def slot_shape(config: ModelConfig, slot: str) -> tuple[int, int]:
    """(N, K) of a matrix slot: output and input features; for the embedding, vocabulary and width."""
    D, heads, kv_heads, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    shapes = {
        "embedding": (config.vocab_size, D),
        "head": (config.num_logits, D),
        "qkv": ((heads + 2 * kv_heads) * d, D),
        "attn_out": (D, heads * d),
        "gate_up": (2 * config.intermediate_size, D),
        "down": (D, config.intermediate_size),
    }
    part = slot.rpartition(".")[2]
    if part not in shapes:
        raise ExportError(f"{slot!r} is not a matrix slot; known: {', '.join(shapes)}")
    return shapes[part]


class SlotWeights:
    """The weights of a decoder by slot, read from a checkpoint one at a time."""

    def __init__(self, checkpoint: Tensors) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        sandwich = self.config.sandwich_norms
        self._norms = (SANDWICH_NORMS if sandwich else PLAIN_NORMS) | HEAD_NORMS

    def parts(self, slot: str) -> tuple[str, ...]:
        """The stems of the checkpoint's tensors that make up a slot, in row order."""
        if slot == "embedding" or (slot == "head" and self.config.tie_embeddings):
            return ("model.embed_tokens",)
        if slot == "head":
            return ("lm_head",)
        if slot == "norm":
            return ("model.norm",)
        layer, _, part = slot.rpartition(".")
        stems = MATRICES.get(part) or (self._norms[part],)
        return tuple(f"model.{layer}.{stem}" for stem in stems)

    def matrix(self, slot: str) -> NDArray[np.float32]:
        """The float32 weight [N, K] of a slot."""
        return _rows([self._checkpoint.tensor(f"{stem}.weight") for stem in self.parts(slot)])

    def raw(self, slot: str) -> list[RawBlocks] | None:
        """The source's own blocks of every part; None unless all parts have some."""
        found = [self._checkpoint.raw(f"{stem}.weight") for stem in self.parts(slot)]
        blocks = [part for part in found if part is not None]
        return blocks if len(blocks) == len(found) else None

    def bias(self, slot: str) -> NDArray[np.float32] | None:
        """The bias [N] of a slot, or None when the architecture has none there."""
        if not has_bias(self.config, slot):
            return None
        return _rows([self._checkpoint.tensor(f"{stem}.bias") for stem in self.parts(slot)])

    def vector(self, slot: str) -> NDArray[np.float32]:
        """The effective multipliers of a norm."""
        return np.ascontiguousarray(self._checkpoint.tensor(f"{self.parts(slot)[0]}.weight"))


def has_bias(config: ModelConfig, slot: str) -> bool:
    """Whether the architecture adds a bias after this slot's product."""
    part = slot.rpartition(".")[2]
    flags = {"qkv": config.qkv_bias, "attn_out": config.output_bias}
    return flags.get(part, config.mlp_bias if part in ("gate_up", "down") else False)


def _rows(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))
