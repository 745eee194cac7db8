"""Parts of a decoder as ExecuTorch's delegates like them: no slices or concatenations of dynamic width.

XNNPACK takes products, elementary operators, permutations and reshapes with one inferred dimension, also for
a number of tokens that is only known at run time, but no slices of such tensors. So fused slots are cut into
their products when the weights are read, a norm takes its mean by a product with a row of 1/D, and rotary
position embedding turns the halves of a head by a product with a constant matrix of 0, 1 and -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.export.config import ModelConfig
from outrider.export.decoder import AddNorm, Norm, Primitives, SplitAttention, softcap
from outrider.export.rope import rotary_size
from outrider.export.slots import SlotWeights, matrix_slots
from outrider.quantize.executorch import (
    GROUP_UNIT,
    ExecutorchRecipe,
    IntxScheme,
    IntxWeight,
    carry_slot,
    describe_slot,
    quantize,
)
from outrider.quantize.report import SlotReport

__all__ = [
    "ExecutorchPrimitives",
    "PieceAttention",
    "ProductNorm",
    "QuantizedEmbedding",
    "QuantizedProducts",
]

FloatArray = NDArray[np.float32]
Progress = Callable[[str, int, int], None]


def constant(values: FloatArray | Tensor) -> nn.Parameter:
    """A frozen parameter that shares the values' memory."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return nn.Parameter(tensor, requires_grad=False)


class Products(nn.Module):
    """The float products of a slot: one tensor, or a tuple of the parts of a fused slot."""

    def __init__(self, weights: Sequence[FloatArray], biases: Sequence[FloatArray | None]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([constant(weight) for weight in weights])
        self.signature = "float"
        for index, bias in enumerate(biases):
            self.register_parameter(f"bias_{index}", None if bias is None else constant(bias))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """[1, S, K] -> [1, S, N] for every part."""
        parts = [
            F.linear(x, weight, getattr(self, f"bias_{index}")) for index, weight in enumerate(self.weights)
        ]
        return parts[0] if len(parts) == 1 else tuple(parts)


class QuantizedProducts(nn.Module):
    """The same with integer weights; every row of x is quantized to int8 by its own range, once for all parts.

    Written in torchao's operators, which the partitioners turn into one integer kernel. The minima of carried
    blocks meet the sums of blocks of the float x.
    """

    def __init__(
        self, parts: Sequence[IntxWeight], biases: Sequence[FloatArray | None], scheme: IntxScheme
    ) -> None:
        super().__init__()
        self.scheme, self.count, self.corrected = scheme, len(parts), parts[0].minima is not None
        for index, (part, bias) in enumerate(zip(parts, biases, strict=True)):
            self.register_buffer(f"codes_{index}", torch.from_numpy(part.codes))
            self.register_buffer(f"scales_{index}", torch.from_numpy(part.scales))
            self.register_buffer(f"zeros_{index}", torch.zeros(part.scales.shape, dtype=torch.int8))
            self.register_parameter(f"bias_{index}", None if bias is None else constant(bias))
            if part.minima is not None:
                self.register_parameter(f"minima_{index}", constant(part.minima))
        if self.corrected:
            self.ones = constant(torch.ones(1, GROUP_UNIT))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """[1, S, K] -> [1, S, N] for every part."""
        rounded = quantized_rows(x)
        weights = [self.weight(index) for index in range(self.count)]
        parts = [
            F.linear(rounded, weight, getattr(self, f"bias_{index}")) for index, weight in enumerate(weights)
        ]
        if self.corrected:
            blocks = x.shape[-1] // GROUP_UNIT
            sums = F.linear(x.reshape(1, -1, blocks, GROUP_UNIT), self.ones).reshape(1, -1, blocks)
            minima = [getattr(self, f"minima_{index}") for index in range(self.count)]
            parts = [part + F.linear(sums, minimum) for part, minimum in zip(parts, minima, strict=True)]
        return parts[0] if len(parts) == 1 else tuple(parts)

    @property
    def signature(self) -> str:
        """What the structure of the lowered products depends on, beside shapes."""
        return f"{self.scheme.bits} bits, groups {self.scheme.group}, minima {self.corrected}"

    def weight(self, index: int) -> Tensor:
        """The float values [N, K] of one part, without minima."""
        codes = getattr(self, f"codes_{index}")
        scales, zeros = getattr(self, f"scales_{index}"), getattr(self, f"zeros_{index}")
        return float_values(codes, scales, zeros, self.scheme.bits)


def torchao_operators() -> Any:
    """torchao's operators; its Python functions around them switch gradients off, which a trace keeps as graphs."""
    import torchao.quantization.quant_primitives  # noqa: F401  (registers them)

    return torch.ops.torchao


def quantized_rows(x: Tensor) -> Tensor:
    """x as int8 with a range and a zero point for every row, and back; a delegate keeps the integers."""
    ao, block, int8 = torchao_operators(), [1] * (x.dim() - 1) + [x.shape[-1]], torch.int8
    scale, zero = ao.choose_qparams_affine(
        x, "ASYMMETRIC", block, int8, -128, 127, None, None, zero_point_dtype=int8
    )
    codes = ao.quantize_affine(x, block, scale, zero, int8, -128, 127)
    back: Tensor = ao.dequantize_affine(codes, block, scale, zero, int8, -128, 127)
    return back


def float_values(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Integer weights as float [N, K]."""
    half, block = 1 << bits - 1, [1, codes.shape[1] // scales.shape[1]]
    values: Tensor = torchao_operators().dequantize_affine(
        codes, block, scales, zeros, torch.int8, -half, half - 1
    )
    return values


class QuantizedEmbedding(nn.Module):
    """A lookup in 8-bit rows."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, table: IntxWeight) -> None:
        super().__init__()
        self.register_buffer("codes", torch.from_numpy(table.codes))
        self.register_buffer("scales", torch.from_numpy(table.scales))
        self.register_buffer("zeros", torch.zeros(table.scales.shape, dtype=torch.int8))

    def forward(self, tokens: Tensor) -> Tensor:
        """[1, S] -> [1, S, D]"""
        return F.embedding(tokens, float_values(self.codes, self.scales, self.zeros, 8))


class ProductNorm(nn.Module):
    """`rms_norm` whose mean is a product with a row of 1/D, which every delegate takes at any rank."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = constant(weight), eps
        self.mean = constant(torch.full((1, len(weight)), 1 / len(weight)))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return x * torch.rsqrt(F.linear(x * x, self.mean) + self.eps) * self.weight


class TupleGate(nn.Module):
    """The gated activation of two tensors, spelled out: XNNPACK's GELU is another than the tanh form."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, gate_up: tuple[Tensor, Tensor]) -> Tensor:
        """(gate, up), each [.., F] -> [.., F]"""
        gate, up = gate_up
        if self.activation == "silu":
            return gate * gate.sigmoid() * up
        inner = (gate + gate * gate * gate * 0.044715) * (2 / math.pi) ** 0.5
        return gate * 0.5 * (torch.tanh(inner) + 1.0) * up


class SplitProductAttention(SplitAttention):
    """`SplitAttention` of a qkv that comes in three parts."""

    def heads(self, qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Queries [1, H, S, d], keys and values [1, G, S, d], normed where the family does."""
        query, key, value = (part.reshape(1, part.shape[1], -1, self.config.head_dim) for part in qkv)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


class PieceAttention(nn.Module):
    """Grouped-query attention over a cache that is updated between its two halves.

    A slot is a row of the cache; positions are only in cos and sin, so that a tree's rows may share one. The
    query heads that share a KV head are folded into the row axis, so the cache is never repeated.
    """

    def __init__(self, layer: int, config: ModelConfig, primitives: Primitives) -> None:
        super().__init__()
        self.config, self.q_norm, self.k_norm = config, None, None
        if config.qk_norm:
            self.q_norm = primitives.norm(f"layers.{layer}.q_norm", config)
            self.k_norm = primitives.norm(f"layers.{layer}.k_norm", config)
        self.turn = constant(half_turn(config))

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding of [1, S, heads, d]; cos and sin are [S, 1, d]."""
        return x * cos + F.linear(x, self.turn) * sin

    def project(
        self, qkv: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Three parts [1, S, heads d] -> scaled queries [1, H, S, d], new keys and values [1, G, S, d]."""
        query, key, value = (part.reshape(1, -1, part.shape[2] // self.d, self.d) for part in qkv)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.rotated(query, cos, sin) * self.config.scale, self.rotated(key, cos, sin)
        return swap_heads(query), swap_heads(key), swap_heads(value)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Queries, the whole cache [1, G, M, d] and a mask [1, S, M] -> [1, S, H d]"""
        c, G, M = self.config, self.config.num_kv_heads, keys.shape[2]
        keys, values = keys.reshape(G, M, self.d), values.reshape(G, M, self.d)
        scores = torch.bmm(query.reshape(G, -1, self.d), keys.transpose(1, 2))  # [G, H/G S, M]
        scores = softcap(scores, c.attention_softcap).reshape(c.num_heads, -1, M) + mask
        weights = torch.softmax(scores, dim=-1).reshape(G, -1, M)
        context = torch.bmm(weights, values).reshape(1, c.num_heads, -1, self.d)
        return swap_heads(context).reshape(1, -1, c.num_heads * self.d)

    @property
    def d(self) -> int:
        """The size of a head."""
        return self.config.head_dim


def swap_heads(x: Tensor) -> Tensor:
    """[1, a, b, d] -> [1, b, a, d], as a copy: a view's strides would tie a dynamic width to 1."""
    swapped: Tensor = torch.ops.aten.permute_copy(x, [0, 2, 1, 3])
    return swapped


def half_turn(config: ModelConfig) -> Tensor:
    """[d, d]: x -> (-second half, first half, 0) of the rotated dimensions."""
    half, turn = rotary_size(config) // 2, torch.zeros(config.head_dim, config.head_dim)
    for index in range(half):
        turn[index, index + half], turn[index + half, index] = -1.0, 1.0
    return turn


class ExecutorchPrimitives:
    """Parts that hold their weights, quantized as a recipe says; collects a report of every slot.

    `pieces` chooses `PieceAttention`, else split attention. `vulkan` chooses the norm that Vulkan has a kernel
    for; `rows` allows 8-bit rows for wide source blocks. A slot is read, quantized and dropped before the next.
    """

    def __init__(
        self,
        weights: SlotWeights,
        recipe: ExecutorchRecipe,
        pieces: bool,
        *,
        vulkan: bool = False,
        rows: bool = True,
        stats: Mapping[str, FloatArray] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.weights, self.recipe, self.pieces = weights, recipe, pieces
        self.vulkan, self.rows = vulkan, rows
        self.stats, self.progress = stats or {}, progress
        self.slots: list[SlotReport] = []
        self.products = 0  # with integer weights
        self._total = len(matrix_slots(weights.config))

    def _matrix(self, slot: str) -> tuple[FloatArray, IntxScheme | None, IntxWeight | None]:
        """The float weight, and what it becomes: the recipe's scheme is not kept for blocks that are carried."""
        weight, raw, packed = self.weights.matrix(slot), self.weights.raw(slot), None
        scheme = self.recipe.scheme_for(slot)
        if scheme is not None:
            carried = carry_slot(weight, scheme, raw, rows=self.rows)
            scheme, packed = carried or (scheme, quantize(weight, scheme, self._importance(slot, scheme)))
        self.slots.append(describe_slot(slot, weight, scheme, packed, raw))
        if self.progress:
            self.progress(slot, len(self.slots), self._total)
        return weight, scheme, packed

    def _importance(self, slot: str, scheme: IntxScheme) -> FloatArray | None:
        return self.stats.get(slot) if scheme.method == "mse" else None

    def embedding(self, slot: str, config: ModelConfig) -> nn.Module:
        """A lookup in float or in 8-bit rows."""
        weight, _, packed = self._matrix(slot)
        if packed is not None:
            return QuantizedEmbedding(packed)
        layer = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
        layer.weight = constant(weight)
        return layer

    def linear(self, slot: str, config: ModelConfig) -> nn.Module:
        """The products of a slot; those of a fused slot apart."""
        weight, scheme, packed = self._matrix(slot)
        cuts = part_cuts(config, slot)
        bias = self.weights.bias(slot)
        biases = [None] * (len(cuts) + 1) if bias is None else np.split(bias, cuts)
        if scheme is None or packed is None:
            return Products([part.copy() for part in np.split(weight, cuts)], biases)
        self.products += len(biases)
        fields = [np.split(field, cuts) for field in packed if field is not None]
        return QuantizedProducts([IntxWeight(*part) for part in zip(*fields, strict=True)], biases, scheme)

    def norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """The norm that the delegate takes."""
        return (Norm if self.vulkan else ProductNorm)(
            torch.from_numpy(self.weights.vector(slot)), config.norm_eps
        )

    def add_norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """Addition and `norm`."""
        return AddNorm(self.norm(slot, config))

    def gate(self, config: ModelConfig) -> nn.Module:
        """The family's gated activation."""
        return TupleGate(config.activation)

    def attention(self, layer: int, config: ModelConfig) -> nn.Module:
        """`PieceAttention`, or `SplitAttention` over three parts."""
        return (PieceAttention if self.pieces else SplitProductAttention)(layer, config, self)


def part_cuts(config: ModelConfig, slot: str) -> list[int]:
    """The rows at which the products that a slot fuses meet."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    cuts = {"qkv": [query, query + kv], "gate_up": [config.intermediate_size]}
    return cuts.get(slot.rpartition(".")[2], [])
