"""A decoder cut where its caches are written, each piece one delegate of XNNPACK, and the `buffer` profile over it.

    embedding | open: norm, qkv, rotation | write | attention, MLP, norm, qkv, rotation | write | ... | head

A delegate cannot write into a cache that outlives it, so ExecuTorch updates the caches between delegates, in
place. Layer by layer, weights are read, quantized and put into a copy of the one delegate that was lowered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.export.config import ModelConfig
from outrider.export.decoder import Layer, softcap
from outrider.export.executorch_delegates import Delegate, Inputs, Template
from outrider.export.executorch_parts import ExecutorchPrimitives
from outrider.export.onnx import mask_kinds
from outrider.export.rope import rope_tables, rotary_size

__all__ = ["BufferProgram", "Lowering", "Pieces", "build_pieces", "whole_tables"]

Rope = Mapping[str, tuple[Tensor, Tensor]]
Update = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def attention_of(layer: Layer) -> Any:
    """The attention of a layer that these primitives made, which comes in two parts."""
    return layer.attention


class Opening(nn.Module):
    """From the embedded tokens to what the first attention reads."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x [1, S, D]; cos, sin [S, 1, d] -> queries [1, H, S, d], keys and values [1, G, S, d]"""
        qkv, _ = self.layer.enter(x, None)
        projected: tuple[Tensor, ...] = attention_of(self.layer).project(qkv, cos, sin)
        return projected

    def products(self) -> list[Any]:
        """The products that are read."""
        return [self.layer.qkv]


class Middle(nn.Module):
    """From a written cache to what the next layer's attention reads."""

    def __init__(self, before: Layer, after: Layer) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(
        self,
        residual: Tensor,  # [1, S, D]
        query: Tensor,  # [1, H, S, d]
        keys: Tensor,  # [1, G, M, d]
        values: Tensor,
        mask: Tensor,  # [1, S, M]
        cos: Tensor,  # [S, 1, d], of the next layer
        sin: Tensor,
    ) -> tuple[Tensor, ...]:
        """The residual stream behind the layer [1, S, D], then the next queries, keys and values."""
        context = attention_of(self.before).attend(query, keys, values, mask)
        qkv, residual = self.after.enter(*self.before.leave(residual, context))
        return (residual, *attention_of(self.after).project(qkv, cos, sin))

    def products(self) -> list[Any]:
        """The products that are read."""
        return [self.before.attn_out, self.before.gate_up, self.before.down, self.after.qkv]


class Closing(nn.Module):
    """From the last written cache to the residual stream behind the last layer."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, residual: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """-> [1, S, D]"""
        residual, update = self.layer.leave(
            residual, attention_of(self.layer).attend(query, keys, values, mask)
        )
        return residual + update

    def products(self) -> list[Any]:
        """The products that are read."""
        return [self.layer.attn_out, self.layer.gate_up, self.layer.down]


class Head(nn.Module):
    """The last norm and the logits of chosen rows."""

    def __init__(self, config: ModelConfig, primitives: ExecutorchPrimitives) -> None:
        super().__init__()
        self.norm, self.head = primitives.norm("norm", config), primitives.linear("head", config)
        self.cap = config.logit_softcap

    def forward(self, x: Tensor) -> Tensor:
        """[1, R, D] -> [1, R, V]"""
        return softcap(self.head(self.norm(x)), self.cap)

    def products(self) -> list[Any]:
        """The products that are read."""
        return [self.head]


class Pieces(nn.Module):
    """The embedding and the delegates of a decoder, to be run around a cache that is somebody else's."""

    def __init__(self, config: ModelConfig, embedding: nn.Module, delegates: Sequence[Delegate]) -> None:
        super().__init__()
        self.config, self.embedding, self.delegates = config, embedding, nn.ModuleList(delegates)

    def forward(
        self, tokens: Tensor, rope: Rope, mask: Mapping[str, Tensor], update: Update
    ) -> tuple[Tensor, ...]:
        """The residual streams [1, S, D] behind every layer.

        By layer type: cos and sin [S, 1, d], and a mask [1, S, M]. `update(layer, key, value)` takes the new
        rows [1, G, S, d] and returns the cache [1, G, M, d] that holds them.
        """
        residual = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            residual = residual * self.config.embedding_scale
        kinds, states = self.config.layer_types, []
        query, key, value = self.delegates[0](residual, *rope[kinds[0]])
        for layer, kind in enumerate(kinds):
            inputs = (residual, query, *update(layer, key, value), mask[kind])
            if layer + 1 < len(kinds):
                residual, query, key, value = self.delegates[layer + 1](*inputs, *rope[kinds[layer + 1]])
            else:
                (residual,) = self.delegates[layer + 1](*inputs)
            states.append(residual)
        return tuple(states)

    def logits(self, residual: Tensor) -> Tensor:
        """[1, R, D] behind the last layer -> [1, R, V]"""
        (logits,) = self.delegates[-1](residual)
        return logits  # type: ignore[no-any-return]


class BufferProgram(nn.Module):
    """Pieces around mutable buffers that ExecuTorch's own kernels update in place."""

    def __init__(
        self, config: ModelConfig, pieces: Pieces, max_context: int, hidden_layers: Sequence[int]
    ) -> None:
        super().__init__()
        self.pieces, self.hidden_layers = pieces, tuple(hidden_layers)
        self.kinds = mask_kinds(config, max_context)
        self.masks = sorted(set(self.kinds.values()))
        shape = (1, config.num_kv_heads, max_context, config.head_dim)
        for layer in range(config.num_layers):
            self.register_buffer(f"keys_{layer}", torch.zeros(shape))
            self.register_buffer(f"values_{layer}", torch.zeros(shape))
        for kind in sorted(self.kinds):
            tables = map(torch.from_numpy, rope_tables(config, kind, max_context))
            for name, table in zip(("cos", "sin"), whole_tables(config, *tables), strict=True):
                self.register_buffer(f"{name}_{kind}", table)

    def forward(
        self, tokens: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, masks: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Logits [1, R, V] and hidden states [1, S, D]."""

        def update(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = getattr(self, f"keys_{layer}"), getattr(self, f"values_{layer}")
            return keys.index_copy_(2, slots, key), values.index_copy_(2, slots, value)

        rope = {kind: self.rope(kind, positions) for kind in sorted(self.kinds)}
        flat = dict(zip(self.masks, (mask.squeeze(0) for mask in masks), strict=True))  # [1, S, M]
        mask = {kind: flat[name] for kind, name in self.kinds.items()}
        states = self.pieces(tokens, rope, mask, update)
        logits = self.pieces.logits(states[-1].index_select(1, rows))
        return (logits, *(states[layer] for layer in self.hidden_layers))

    def rope(self, kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [S, 1, d] of these positions."""
        cos, sin = getattr(self, f"cos_{kind}"), getattr(self, f"sin_{kind}")
        return cos.index_select(0, positions).unsqueeze(1), sin.index_select(0, positions).unsqueeze(1)


def whole_tables(config: ModelConfig, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[M, rotary/2] -> [M, d], over every dimension of a head: both halves, then 1 and 0 for those that stay."""
    rest = torch.zeros(len(cos), config.head_dim - rotary_size(config))
    return torch.cat([cos, cos, rest + 1], dim=1), torch.cat([sin, sin, rest], dim=1)


class Lowering:
    """Lowers each kind of piece once and fills the others of its kind.

    `columns` is the length of the cache; `limit` tokens fit a forward, or are all that does if `static`.
    """

    def __init__(self, config: ModelConfig, columns: int, limit: int, *, static: bool = False) -> None:
        self.templates: dict[tuple[str, ...], Template] = {}
        self.report: Counter[str] = Counter()
        c, S = config, limit if static else min(5, limit)
        residual, table = torch.zeros(1, S, c.hidden_size), torch.zeros(S, 1, c.head_dim)
        query = torch.zeros(1, c.num_heads, S, c.head_dim)
        cache = torch.zeros(1, c.num_kv_heads, columns, c.head_dim)
        attention = (residual, query, cache, cache.clone(), torch.zeros(1, S, columns))
        tables, counted = (table, table.clone()), (1, 2, None, None, 1)
        self.inputs = {
            "Opening": Inputs((residual, *tables), (1, 0, 0), limit),
            "Middle": Inputs((*attention, *tables), (*counted, 0, 0), limit),
            "Closing": Inputs(attention, counted, limit),
            "Head": Inputs((residual,), (1,), limit),
        }
        if static:
            self.inputs = {
                kind: replace(inputs, dynamic=(None,) * len(inputs.examples))
                for kind, inputs in self.inputs.items()
            }

    def delegate(self, part: Opening | Middle | Closing | Head) -> Delegate:
        """The delegate of a part; parts of the same structure share a template."""
        kind = type(part).__name__
        key = (kind, *(products.signature for products in part.products()))
        if key not in self.templates:
            self.templates[key] = Template(part, self.inputs[kind])
        template = self.templates[key]
        self.report.update(template.report)
        return template.fill(part)


def build_pieces(
    config: ModelConfig, primitives: ExecutorchPrimitives, lowerings: Sequence[Lowering]
) -> list[Pieces]:
    """The decoder's pieces by each lowering; every weight is read and quantized once."""
    embedding = primitives.embedding("embedding", config)
    delegates: list[list[Delegate]] = [[] for _ in lowerings]

    def add(part: Opening | Middle | Closing | Head) -> None:
        for lowering, found in zip(lowerings, delegates, strict=True):
            found.append(lowering.delegate(part))

    layer = Layer(0, config, primitives)
    add(Opening(layer))
    for index in range(1, config.num_layers):
        following = Layer(index, config, primitives)
        add(Middle(layer, following))
        layer = following
    add(Closing(layer))
    add(Head(config, primitives))
    return [Pieces(config, embedding, found) for found in delegates]
