"""A forward laid out for an Apple GPU: any number of tokens, and a cache that the program keeps as its state.

The function writes keys and values of new tokens into their rows of the cache and attends to the whole of it under a
mask from the host, so a tree is only another mask and rows are taken back by writing over them. Products are in half
precision; the residual stream and its norms are in single precision, where no square and no attention sink overflows.
S tokens, R rows of logits, G KV heads, H heads of size d, M rows of cache, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from outrider.export.coarse import CoarseLayout, CoarseStep, trace_steps
from outrider.export.config import ModelConfig
from outrider.export.onnx import mask_kinds
from outrider.export.rope import rotary_size
from outrider.export.slots import SlotWeights

__all__ = ["StateGraph", "cache_names"]

Var = Any  # a value of coremltools' MIL builder
Weight = Callable[[str, float], Var]  # slot, factor -> the constant [N, K]
UPDATES = ("attn_out", "down")  # products that enter the residual stream


def cache_names(config: ModelConfig) -> list[str]:
    """The states, in order."""
    return [f"{part}_{layer}" for layer in range(config.num_layers) for part in ("keys", "values")]


class StateGraph(CoarseLayout):
    """Builds the function; `mb` is coremltools' builder. `stream` shrinks products that might leave half precision."""

    def __init__(
        self, mb: Any, config: ModelConfig, weights: SlotWeights, weight: Weight, stream: float = 1.0
    ) -> None:
        self.mb, self.config, self.weights, self.weight, self.stream = mb, config, weights, weight, stream
        self.known: dict[str, Var] = {}  # coarse value -> its Var
        self.halves: dict[str, Var] = {}  # single-precision values in half precision, by name
        self.masks: dict[str, Var] = {}  # mask input -> the mask of the heads that share a KV head

    def placeholders(self, max_context: int, types: Any, symbols: tuple[Any, Any]) -> dict[str, Var]:
        """The function's inputs and states, over the symbols S and R."""
        c, mb, (S, R) = self.config, self.mb, symbols
        made = {
            "tokens": mb.placeholder(shape=(1, S), dtype=types.int32),
            "begin": mb.placeholder(shape=(1,), dtype=types.int32),
            "rows": mb.placeholder(shape=(R,), dtype=types.int32),
        }
        for kind in sorted(set(c.layer_types)):
            for part in ("cos", "sin"):
                rows = (S, rotary_size(c) // 2)
                made[f"{part}_{kind}"] = mb.placeholder(shape=rows, dtype=types.fp16)
        for name in sorted(set(mask_kinds(c, max_context).values())):
            made[f"mask_{name}"] = mb.placeholder(shape=(1, 1, S, max_context), dtype=types.fp16)
        shape = (1, c.num_kv_heads, max_context, c.head_dim)
        return made | {
            name: mb.state_tensor_placeholder(shape=shape, dtype=types.fp16) for name in cache_names(c)
        }

    def build(self, inputs: Mapping[str, Var], max_context: int, hidden_layers: tuple[int, ...]) -> list[Var]:
        """Lay the operations out inside of an open function; returns its outputs."""
        c, mb = self.config, self.mb
        self.inputs = inputs
        width = mb.slice_by_index(x=mb.shape(x=inputs["tokens"]), begin=[1], end=[2])
        none = np.zeros(1, np.int32)
        end = mb.add(x=inputs["begin"], y=width)
        self.place = [mb.concat(values=[none, none, edge, none], axis=0) for edge in (inputs["begin"], end)]
        picked = mb.gather(
            x=self.weight("embedding", 1.0), indices=inputs["tokens"], axis=0, validate_indices=False
        )
        x = mb.cast(x=picked, dtype="fp32")  # [1, S, D]
        if c.embedding_scale != 1.0:
            x = mb.mul(x=x, y=np.float32(c.embedding_scale))
        self.known = {"x": x, **inputs}
        for step in trace_steps(c, max_context, hidden_layers):
            self.add(step)
        outputs = [mb.cast(x=self.known["logits"], dtype="fp16", name="logits")]
        return outputs + [
            mb.identity(x=self.known[f"hidden_{layer}"], name=f"hidden_{layer}") for layer in hidden_layers
        ]

    def half(self, name: str) -> Var:
        """A value in half precision."""
        if name not in self.halves:
            self.halves[name] = self.mb.cast(x=self.known[name], dtype="fp16")
        return self.halves[name]

    def _plain(self, step: CoarseStep) -> None:
        """Arithmetic of the decoder itself, in single precision: the residual stream, and the cap on logits."""
        mb = self.mb
        x, y = (self._operand(name) for name in (*step.inputs, None)[:2])
        made = {
            "Add": lambda: mb.add(x=x, y=y),
            "Mul": lambda: mb.mul(x=x, y=y),
            "Div": lambda: mb.real_div(x=x, y=y),
            "Tanh": lambda: mb.tanh(x=x),
        }[step.operator]()
        self.known[step.outputs[0]] = made

    def _operand(self, name: str | float | None) -> Any:
        return self.known[name] if isinstance(name, str) else np.float32(name or 0.0)

    def _gather(self, step: CoarseStep) -> None:
        """The rows that need logits."""
        x, rows = self.known[str(step.inputs[0])], self.inputs["rows"]
        self.known[step.outputs[0]] = self.mb.gather(x=x, indices=rows, axis=1, validate_indices=False)

    def _norm(self, step: CoarseStep) -> None:
        slot = step.attributes["slot"]
        self.known[step.outputs[0]] = self.norm(self.known[str(step.inputs[0])], slot)

    def norm(self, x: Var, slot: str) -> Var:
        """Root-mean-square norm over the last axis, in single precision."""
        mb = self.mb
        mean = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True)
        inverse = mb.rsqrt(x=mean, epsilon=np.float32(self.config.norm_eps))
        return mb.mul(x=mb.mul(x=x, y=inverse), y=self.weights.vector(slot).astype(np.float32))

    def _linear(self, step: CoarseStep) -> None:
        """x Wᵀ + b in half precision; the result is single precision where the stream or the cap reads it."""
        mb, slot = self.mb, step.attributes["slot"]
        part = slot.rpartition(".")[2]
        factor = self.stream if part in UPDATES else 1.0
        bias = self.weights.bias(slot)
        extra = {} if bias is None else {"bias": (bias * np.float32(factor)).astype(np.float16)}
        product = mb.linear(x=self.half(str(step.inputs[0])), weight=self.weight(slot, factor), **extra)
        (output,) = step.outputs
        if part in ("qkv", "gate_up"):
            self.known[output] = self.halves[output] = product
            return
        wide = mb.cast(x=product, dtype="fp32")
        self.known[output] = wide if factor == 1.0 else mb.mul(x=wide, y=np.float32(1 / factor))

    def _gate(self, step: CoarseStep) -> None:
        mb, size = self.mb, self.config.intermediate_size
        gate, up = mb.split(x=self.known[str(step.inputs[0])], split_sizes=[size, size], axis=-1)
        if self.config.activation == "silu":
            opened = mb.silu(x=gate)
        else:
            opened = mb.gelu(x=gate, mode="TANH_APPROXIMATION")
        self.known[step.outputs[0]] = self.halves[step.outputs[0]] = mb.mul(x=opened, y=up)

    def _attention(self, step: CoarseStep) -> None:
        c, mb, layer = self.config, self.mb, step.attributes["layer"]
        cos, sin, mask = (str(name) for name in step.inputs[1:4])
        G, d, heads = c.num_kv_heads, c.head_dim, c.num_heads * c.head_dim
        parts = mb.split(
            x=self.known[str(step.inputs[0])], split_sizes=[heads, G * d, G * d], axis=-1
        )  # queries, keys, values
        query, key, value = (
            self.heads(part, count, f"layers.{layer}.{norm}")
            for part, count, norm in zip(parts, (c.num_heads, G, G), ("q_norm", "k_norm", ""), strict=True)
        )
        query, key = self.rotated(query, cos, sin), self.rotated(key, cos, sin)
        keys, values = self.cached(f"keys_{layer}", key), self.cached(f"values_{layer}", value)
        query = mb.reshape(x=query, shape=[1, G, -1, d])  # [1, G, H / G * S, d]
        context = self.attended(query, keys, values, self.shared_mask(mask))
        context = mb.transpose(x=mb.reshape(x=context, shape=[1, c.num_heads, -1, d]), perm=[0, 2, 1, 3])
        output = step.outputs[0]
        self.known[output] = self.halves[output] = mb.reshape(x=context, shape=[1, -1, heads])

    def heads(self, x: Var, count: int, norm: str) -> Var:
        """[1, S, count d] -> [1, count, S, d], normed where the family does."""
        mb = self.mb
        x = mb.reshape(x=x, shape=[1, -1, count, self.config.head_dim])
        if self.config.qk_norm and norm.endswith("_norm"):
            x = mb.cast(x=self.norm(mb.cast(x=x, dtype="fp32"), norm), dtype="fp16")
        return mb.transpose(x=x, perm=[0, 2, 1, 3])

    def rotated(self, x: Var, cos: str, sin: str) -> Var:
        """`decoder.apply_rope` of [1, heads, S, d]."""
        mb, d, half = self.mb, self.config.head_dim, rotary_size(self.config) // 2
        cosines, sines = self.inputs[cos], self.inputs[sin]
        sizes = [half, half] + ([d - 2 * half] if d > 2 * half else [])
        first, second, *rest = mb.split(x=x, split_sizes=sizes, axis=-1)
        low = mb.sub(x=mb.mul(x=first, y=cosines), y=mb.mul(x=second, y=sines))
        high = mb.add(x=mb.mul(x=second, y=cosines), y=mb.mul(x=first, y=sines))
        return mb.concat(values=[low, high, *rest], axis=-1)

    def cached(self, name: str, new: Var) -> Var:
        """The whole cache [1, G, M, d] with the new rows [1, G, S, d] written from row `begin` on."""
        mb, state = self.mb, self.inputs[name]
        ends = [True, True, False, True]  # only the rows have bounds
        begin, end = self.place
        written = mb.slice_update(
            x=mb.read_state(input=state), update=new, begin=begin, end=end, begin_mask=ends, end_mask=ends
        )
        return mb.coreml_update_state(state=state, value=written)

    def shared_mask(self, name: str) -> Var:
        """The mask [1, 1, H / G * S, M] of the query heads of one KV head."""
        groups = self.config.num_heads // self.config.num_kv_heads
        if name not in self.masks:
            mask = self.inputs[name]
            self.masks[name] = mask if groups == 1 else self.mb.concat(values=[mask] * groups, axis=2)
        return self.masks[name]

    def attended(self, query: Var, keys: Var, values: Var, mask: Var) -> Var:
        """What queries [1, G, H / G * S, d] read from the cache."""
        c, mb = self.config, self.mb
        if c.attention_softcap is None:
            factor = c.scale * math.sqrt(c.head_dim)  # the operation itself divides by that root
            if not math.isclose(factor, 1.0, rel_tol=1e-6):
                query = mb.mul(x=query, y=np.float16(factor))
            return mb.scaled_dot_product_attention(query=query, key=keys, value=values, attn_mask=mask)
        query = mb.mul(x=query, y=np.float16(c.scale))
        scores = mb.matmul(x=query, y=keys, transpose_y=True)
        cap = np.float16(c.attention_softcap)
        capped = mb.mul(x=mb.tanh(x=mb.real_div(x=scores, y=cap)), y=cap)
        return mb.matmul(x=mb.softmax(x=mb.add(x=capped, y=mask), axis=-1), y=values)
