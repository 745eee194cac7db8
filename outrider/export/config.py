"""What a decoder-only language model is, as one frozen record that every frontend fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.errors import CheckpointError

__all__ = ["FAMILIES", "ModelConfig"]

FAMILIES = ("llama", "mistral", "smollm", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one model. Sizes in elements; norms' weights are the effective multipliers.

    `layer_types[i]` is "full" or "sliding". `rope` holds, per layer type, `theta` and `scaling` (the
    Hugging Face `rope_scaling` dict, or {"rope_type": "factors", "factors": [...]} from GGUF's rope_freqs).
    """

    family: str
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_local_theta: float | None = None  # Gemma 3: theta of its sliding layers, never scaled
    partial_rotary_factor: float = 1.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False  # Gemma: also a norm after attention and after the MLP
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float | None = None  # None = head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = field(default=())
    head_rows: int | None = None  # logits of a head that keeps some rows only (`export.trim`); None = all

    def __post_init__(self) -> None:
        """Fill `layer_types` and refuse shapes that cannot be a decoder."""
        if self.family not in FAMILIES:
            raise CheckpointError(f"unknown model family {self.family!r}; known: {', '.join(FAMILIES)}")
        if not self.layer_types:
            kind = "sliding" if self.sliding_window else "full"
            object.__setattr__(self, "layer_types", (kind,) * self.num_layers)
        if len(self.layer_types) != self.num_layers:
            raise CheckpointError(f"{len(self.layer_types)} layer types for {self.num_layers} layers")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads")
        if self.head_rows is not None and not 1 <= self.head_rows <= self.vocab_size:
            raise CheckpointError(f"a head of {self.head_rows} rows; the vocabulary has {self.vocab_size}")
        if self.head_rows is not None and self.tie_embeddings:
            raise CheckpointError("a head that keeps some rows only cannot be the embedding too")

    @property
    def num_logits(self) -> int:
        """Columns of the logits: the vocabulary, or what is left of it."""
        return self.vocab_size if self.head_rows is None else self.head_rows

    @property
    def scale(self) -> float:
        """The factor on q·k before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
