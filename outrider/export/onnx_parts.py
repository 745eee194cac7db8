"""What a decoder is made of when it is traced for ONNX: nodes that `bind` fills with weights, and fused operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outrider.export.config import ModelConfig
from outrider.export.decoder import AddNorm, Gate, SplitAttention, Step, rms_norm
from outrider.export.onnx_form import MICROSOFT, OPSET
from outrider.export.slots import slot_shape

__all__ = ["PADDING", "PADDING_ROWS", "PROFILES", "Profile", "SymbolicPrimitives", "vector"]

Profile = Literal["inplace", "split"]
PROFILES: tuple[Profile, ...] = ("inplace", "split")
PADDING = 1  # rows that attention sees beyond the tokens; see GqaAttention
PADDING_ROWS = "padding"  # the vector with them


def symbolic(
    operator: str, inputs: Sequence[Tensor | None], shape: Sequence[Any], version: int = 1, **attributes: Any
) -> Tensor:
    """One float output of an operator that torch does not know."""
    return torch.onnx.ops.symbolic(
        operator, inputs, attributes, dtype=torch.float32, shape=shape, version=version
    )


def vector(slot: str, shape: Sequence[int]) -> Tensor:
    """A constant that `bind` fills in."""
    return symbolic("outrider::Vector", [], shape, slot=slot)


class SlotEmbedding(nn.Module):
    """A lookup that `bind` expresses."""

    def __init__(self, slot: str, config: ModelConfig) -> None:
        super().__init__()
        self.slot, self.width = slot, config.hidden_size

    def forward(self, tokens: Tensor) -> Tensor:
        """[1, S] -> [1, S, D]"""
        return symbolic("outrider::Embedding", [tokens], [*tokens.shape, self.width], slot=self.slot)


class SlotLinear(nn.Module):
    """A product that `bind` expresses."""

    def __init__(self, slot: str, config: ModelConfig) -> None:
        super().__init__()
        self.slot, (self.N, self.K) = slot, slot_shape(config, slot)

    def forward(self, x: Tensor) -> Tensor:
        """[1, S, K] -> [1, S, N]"""
        return symbolic("outrider::Linear", [x], [*x.shape[:-1], self.N], slot=self.slot)


class PlainNorm(nn.Module):
    """The norm in elementary operators, for any execution provider."""

    def __init__(self, slot: str, config: ModelConfig) -> None:
        super().__init__()
        self.slot, self.eps = slot, config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return rms_norm(x, vector(self.slot, [x.shape[-1]]), self.eps)


class FusedNorm(PlainNorm):
    """The norm as one node."""

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        weight = vector(self.slot, [x.shape[-1]])
        return symbolic("RMSNormalization", [x, weight], x.shape, OPSET, epsilon=self.eps, axis=-1)


class FusedAddNorm(PlainNorm):
    """Addition and norm as one node."""

    def forward(self, residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(norm of the sum, the sum)"""
        outputs = torch.onnx.ops.symbolic_multi_out(
            f"{MICROSOFT}::SkipSimplifiedLayerNormalization",
            [residual, update, vector(self.slot, [residual.shape[-1]])],
            {"epsilon": self.eps},
            dtypes=[torch.float32] * 4,
            shapes=[residual.shape, [1], [1], residual.shape],
            version=1,
        )
        return outputs[0], outputs[3]


class FusedGate(nn.Module):
    """The gated activation in three nodes; QuickGelu with alpha 1 is SiLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        silu = config.activation == "silu"
        self.operator = "QuickGelu" if silu else "FastGelu"
        self.attributes: dict[str, Any] = {"alpha": 1.0} if silu else {}

    def forward(self, gate_up: Tensor) -> Tensor:
        """[1, S, 2 F] -> [1, S, F]"""
        shape = [*gate_up.shape[:-1], gate_up.shape[-1] // 2]
        gate, up = torch.onnx.ops.symbolic_multi_out(
            "Split",
            [gate_up],
            {"axis": -1, "num_outputs": 2},
            dtypes=[torch.float32] * 2,
            shapes=[shape] * 2,
            version=18,
        )
        return symbolic(f"{MICROSOFT}::{self.operator}", [gate], shape, **self.attributes) * up


class GqaAttention(SplitAttention):
    """ONNX Runtime's GroupQueryAttention over one buffer that is past and present at once.

    Rotation happens inside, from whole tables and position ids. A sliding window is a mask by position, since
    the operator's own window counts storage rows and is wrong for trees. One more row than there are tokens
    goes in and is cut off again: for a single row the operator multiplies by another kernel, whose sums differ
    in the last bit, and 8-bit activations would carry that bit on until a draft could change the text.
    """

    def forward(self, qkv: Tensor, step: Step) -> Tensor:
        """[1, S, (H + 2 G) d] -> [1, S, H d]"""
        c = self.config
        attributes: dict[str, Any] = {
            "num_heads": c.num_heads,
            "kv_num_heads": c.num_kv_heads,
            "do_rotary": 1,
            "scale": c.scale,
        }
        if c.attention_softcap is not None:
            attributes["softcap"] = c.attention_softcap
        rows = vector(PADDING_ROWS, [1, PADDING, qkv.shape[-1]])
        padded = torch.cat(
            [qkv, rows], dim=1
        )  # [1, S + 1, (H + 2 G) d]; faster than Pad, by 3 % of SmolLM2's step
        key_cache, value_cache = step.past[self.layer]
        cos, sin = step.rope[self.kind]
        cache = [key_cache, value_cache, step.extra["seqlens_k"], step.extra["total"], cos, sin]
        context, key, value = torch.onnx.ops.symbolic_multi_out(
            f"{MICROSOFT}::GroupQueryAttention",
            [*self.inputs(padded), *cache, *self.places(step)],
            {**attributes, **self.window()},
            dtypes=[torch.float32] * 3,
            shapes=[[1, padded.shape[1], c.num_heads * c.head_dim], key_cache.shape, value_cache.shape],
            version=1,
        )
        step.present.append((key, value))
        return context[:, :-PADDING]

    def places(self, step: Step) -> list[Tensor]:
        """What says where tokens are and what they may see."""
        return [step.extra["positions"], step.mask[self.kind]]

    def window(self) -> dict[str, int]:
        """The operator's own sliding window: none, since the mask has it."""
        return {}

    def inputs(self, qkv: Tensor) -> list[Tensor | None]:
        """Packed qkv where nothing happens to its heads before the operator, else three normed parts."""
        if self.q_norm is None or self.k_norm is None:
            return [qkv, None, None]
        c, S = self.config, qkv.shape[1]
        query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        parts = torch.split(qkv, [query, kv, kv], dim=-1)
        normed: list[Tensor | None] = [
            norm(part.reshape(1, S, -1, c.head_dim)).reshape(1, S, -1)
            for part, norm in zip(parts, (self.q_norm, self.k_norm), strict=False)
        ]
        return [*normed, parts[2]]


class ChainAttention(GqaAttention):
    """The same for chains of tokens: a token's row in the cache is its position, so the operator knows both itself."""

    def __init__(
        self, layer: int, config: ModelConfig, primitives: SymbolicPrimitives, max_context: int
    ) -> None:
        super().__init__(layer, config, primitives)
        self.max_context = max_context

    def places(self, step: Step) -> list[Tensor]:
        """Nothing: positions follow from the lengths, and every row sees all before it."""
        return []

    def window(self) -> dict[str, int]:
        """The operator's own, by rows of the cache."""
        size = self.config.sliding_window
        narrow = self.kind == "sliding" and size is not None and size < self.max_context
        return {"local_window_size": size} if narrow and size is not None else {}


class SymbolicPrimitives:
    """Parts without weights: fused nodes for `inplace`, elementary operators for `split`.

    With a `chain_context` the graph runs chains of tokens only, within that many.
    """

    def __init__(self, profile: Profile, chain_context: int | None = None) -> None:
        self.fused, self.chain_context = profile == "inplace", chain_context

    def embedding(self, slot: str, config: ModelConfig) -> nn.Module:
        """A slot node."""
        return SlotEmbedding(slot, config)

    def linear(self, slot: str, config: ModelConfig) -> nn.Module:
        """A slot node."""
        return SlotLinear(slot, config)

    def norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """One node, or elementary operators."""
        return (FusedNorm if self.fused else PlainNorm)(slot, config)

    def add_norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """One node, or elementary operators."""
        return FusedAddNorm(slot, config) if self.fused else AddNorm(PlainNorm(slot, config))

    def gate(self, config: ModelConfig) -> nn.Module:
        """Three nodes, or elementary operators."""
        return FusedGate(config) if self.fused else Gate(config.activation)

    def attention(self, layer: int, config: ModelConfig) -> nn.Module:
        """GroupQueryAttention, or elementary operators."""
        if self.chain_context is not None:
            return ChainAttention(layer, config, self, self.chain_context)
        return (GqaAttention if self.fused else SplitAttention)(layer, config, self)
