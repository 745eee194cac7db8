"""One decoder-only transformer for the Llama, Mistral, SmolLM, Qwen2, Qwen3, Gemma 2/3 and Phi-3 families.

The decoder fixes what is computed; *primitives* decide how each part is expressed: with weights (here, for
parity checks and exporters that trace modules) or as nodes of a graph (`onnx.py`). Positions arrive as RoPE
cosines and sines and as full additive masks, so that a tree of tokens is only another mask.
Shapes: S tokens, M cached rows, R rows that need logits, D width, d head size, H heads, G KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.export.config import ModelConfig
from outrider.export.slots import SlotWeights, slot_shape

__all__ = [
    "Conv1x1",
    "Decoder",
    "EagerPrimitives",
    "Primitives",
    "SplitAttention",
    "Step",
    "apply_rope",
    "rms_norm",
]


@dataclass
class Step:
    """What one forward gets from outside, by layer type ("full", "sliding") and by layer.

    `mask` covers the past and the new tokens. `present` collects the new keys and values of every layer.
    `extra` holds what one attention kernel needs besides.
    """

    rope: Mapping[
        str, tuple[Tensor, Tensor]
    ]  # cos, sin: [S, rotary/2], or whole tables for kernels that index
    mask: Mapping[str, Tensor]  # [1, 1, S, M + S] additive
    past: Sequence[tuple[Tensor, Tensor]]  # per layer: keys, values [1, G, M, d]
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    present: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Primitives(Protocol):
    """Makes the parts of a decoder. Every part is a module, so that exporters can name it."""

    def embedding(self, slot: str, config: ModelConfig) -> nn.Module:
        """tokens [1, S] -> [1, S, D]"""
        ...

    def linear(self, slot: str, config: ModelConfig) -> nn.Module:
        """x [1, S, K] -> x Wᵀ + b [1, S, N]"""
        ...

    def norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """x -> its root-mean-square norm over the last axis, times the slot's multipliers."""
        ...

    def add_norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """(residual, update) -> (norm(residual + update), residual + update)"""
        ...

    def gate(self, config: ModelConfig) -> nn.Module:
        """[.., 2 F] -> act(first half) * second half"""
        ...

    def attention(self, layer: int, config: ModelConfig) -> nn.Module:
        """(qkv [1, S, (H + 2 G) d], Step) -> [1, S, H d]; appends to `step.present`."""
        ...


class Layer(nn.Module):
    """Attention and gated MLP, each behind a norm; Gemma also norms what they return."""

    def __init__(self, index: int, config: ModelConfig, primitives: Primitives) -> None:
        super().__init__()
        name = f"layers.{index}"
        first = primitives.norm if index == 0 else primitives.add_norm
        self.attn_norm = first(f"{name}.attn_norm", config)
        self.qkv = primitives.linear(f"{name}.qkv", config)
        self.attention = primitives.attention(index, config)
        self.attn_out = primitives.linear(f"{name}.attn_out", config)
        self.mlp_norm = primitives.add_norm(f"{name}.mlp_norm", config)
        self.gate_up = primitives.linear(f"{name}.gate_up", config)
        self.gate = primitives.gate(config)
        self.down = primitives.linear(f"{name}.down", config)
        self.attn_post_norm = self.mlp_post_norm = None
        if config.sandwich_norms:
            self.attn_post_norm = primitives.norm(f"{name}.attn_post_norm", config)
            self.mlp_post_norm = primitives.norm(f"{name}.mlp_post_norm", config)

    def forward(self, residual: Tensor, update: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """Take and return the residual stream as (residual, update): the next norm does the addition."""
        qkv, residual = self.enter(residual, update)
        return self.leave(residual, self.attention(qkv, step))

    def enter(self, residual: Tensor, update: Tensor | None) -> tuple[Any, Tensor]:
        """What attention reads, and the residual stream with the update added."""
        if update is None:
            normed = self.attn_norm(residual)
        else:
            normed, residual = self.attn_norm(residual, update)
        return self.qkv(normed), residual

    def leave(self, residual: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream behind attention and MLP, from what attention returned [1, S, H d]."""
        update = self.attn_out(context)
        if self.attn_post_norm is not None:
            update = self.attn_post_norm(update)
        normed, residual = self.mlp_norm(residual, update)
        update = self.down(self.gate(self.gate_up(normed)))
        if self.mlp_post_norm is not None:
            update = self.mlp_post_norm(update)
        return residual, update


class Decoder(nn.Module):
    """tokens, positions and masks in; logits of chosen rows and hidden states of chosen layers out.

    `hidden[l]` is the residual stream after layer l (from 0), before any norm.
    """

    def __init__(
        self, config: ModelConfig, primitives: Primitives, hidden_layers: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.config, self.hidden_layers = config, tuple(hidden_layers)
        self.embedding = primitives.embedding("embedding", config)
        self.layers = nn.ModuleList(Layer(i, config, primitives) for i in range(config.num_layers))
        self.norm = primitives.add_norm("norm", config)
        self.head = primitives.linear("head", config)

    def forward(
        self,
        tokens: Tensor,  # [1, S] int64
        rows: Tensor | None,  # [R] int64; None = all
        step: Step,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [1, R, V] and [1, S, D] for each of `hidden_layers`; new KV rows are in `step.present`."""
        residual: Tensor = self.embedding(tokens)
        update: Tensor | None = None
        if self.config.embedding_scale != 1.0:
            residual = residual * self.config.embedding_scale
        hidden: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            residual, update = layer(residual, update, step)
            if index in self.hidden_layers:
                hidden[index] = residual + update
        assert update is not None
        if rows is not None:
            residual, update = residual.index_select(1, rows), update.index_select(1, rows)
        normed, _ = self.norm(residual, update)
        logits = softcap(self.head(normed), self.config.logit_softcap)
        return logits, [hidden[index] for index in self.hidden_layers]


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x without a cap (Gemma 2)."""
    return x if cap is None else torch.tanh(x / cap) * cap


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def apply_rope(
    x: Tensor,  # [1, H, S, d]
    cos: Tensor,  # [S, rotary/2]
    sin: Tensor,
) -> Tensor:
    """Rotate the pairs (i, i + rotary/2) of every head; dimensions past `rotary` stay (Su et al. 2021)."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(turned if 2 * half == x.shape[-1] else [*turned, rest], dim=-1)


class SplitAttention(nn.Module):
    """Grouped-query attention over a read-only past; only the new keys and values come out.

    Scores against past and new keys are joined before the softmax, so the cache is never copied. The query
    heads that share a KV head are folded into the row axis, so it is never repeated either.
    """

    def __init__(self, layer: int, config: ModelConfig, primitives: Primitives) -> None:
        super().__init__()
        self.layer, self.config, self.kind = layer, config, config.layer_types[layer]
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = primitives.norm(f"layers.{layer}.q_norm", config)
            self.k_norm = primitives.norm(f"layers.{layer}.k_norm", config)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [1, H, S, d], keys and values [1, G, S, d], normed where the family does."""
        c, S = self.config, qkv.shape[1]
        sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        query, key, value = (
            part.reshape(1, S, -1, c.head_dim).transpose(1, 2) for part in torch.split(qkv, sizes, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value

    def forward(self, qkv: Tensor, step: Step) -> Tensor:
        """[1, S, (H + 2 G) d] -> [1, S, H d]"""
        c = self.config
        query, key, value = self.heads(qkv)
        S = query.shape[2]
        cos, sin = step.rope[self.kind]
        query, key = apply_rope(query, cos, sin) * c.scale, apply_rope(key, cos, sin)
        step.present.append((key, value))
        past_key, past_value = step.past[self.layer]
        groups = c.num_heads // c.num_kv_heads
        query = query.reshape(1, c.num_kv_heads, groups * S, c.head_dim)
        scores = torch.cat([query @ past_key.transpose(2, 3), query @ key.transpose(2, 3)], dim=-1)
        mask = step.mask[self.kind].expand(1, groups, -1, -1).reshape(1, 1, groups * S, -1)
        weights = torch.softmax(softcap(scores, c.attention_softcap) + mask, dim=-1)
        M = past_key.shape[2]
        context = weights[..., :M] @ past_value + weights[..., M:] @ value
        context = context.reshape(1, c.num_heads, S, c.head_dim)
        return context.transpose(1, 2).reshape(1, S, c.num_heads * c.head_dim)


class Norm(nn.Module):
    """`rms_norm` with its multipliers."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return rms_norm(x, self.weight, self.eps)


class AddNorm(nn.Module):
    """Addition, then a norm of the sum."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)"""
        total = residual + update
        return self.norm(total), total


class Gate(nn.Module):
    """SiLU or tanh-approximated GELU of the first half times the second (Shazeer 2020)."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, gate_up: Tensor) -> Tensor:
        """[.., 2 F] -> [.., F]"""
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")) * up


class Conv1x1(nn.Module):
    """A linear layer as a 1×1 convolution, the form that some accelerators prefer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None)
        with torch.no_grad():
            self.conv.weight.copy_(linear.weight[:, :, None, None])
            if linear.bias is not None and self.conv.bias is not None:
                self.conv.bias.copy_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[1, S, K] -> [1, S, N]"""
        out: Tensor = self.conv(x.transpose(1, 2).unsqueeze(2))  # [1, N, 1, S]
        return out.squeeze(2).transpose(1, 2)


class EagerPrimitives:
    """Parts that hold their weights, for parity checks and for exporters that trace modules."""

    def __init__(self, weights: SlotWeights, linear: type[nn.Module] | None = None) -> None:
        self.weights, self.wrap = weights, linear

    def embedding(self, slot: str, config: ModelConfig) -> nn.Module:
        """A lookup in the slot's matrix."""
        matrix = torch.from_numpy(self.weights.matrix(slot))
        layer = nn.Embedding(matrix.shape[0], matrix.shape[1], device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        return layer

    def linear(self, slot: str, config: ModelConfig) -> nn.Module:
        """`nn.Linear`, or what it is wrapped in."""
        N, K = slot_shape(config, slot)
        bias = self.weights.bias(slot)
        layer = nn.Linear(K, N, bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(torch.from_numpy(self.weights.matrix(slot)), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(torch.from_numpy(bias), requires_grad=False)
        return layer if self.wrap is None else self.wrap(layer)

    def norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """`rms_norm` with the slot's multipliers."""
        return Norm(torch.from_numpy(self.weights.vector(slot)), config.norm_eps)

    def add_norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """Addition and `norm`."""
        return AddNorm(self.norm(slot, config))

    def gate(self, config: ModelConfig) -> nn.Module:
        """The family's gated activation."""
        return Gate(config.activation)

    def attention(self, layer: int, config: ModelConfig) -> nn.Module:
        """`SplitAttention`."""
        return SplitAttention(layer, config, self)
