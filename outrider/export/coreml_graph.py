"""A forward laid out for the Apple Neural Engine: channels first, 1×1 convolutions, attention head by head.

Every activation is (batch, channels, 1, tokens), which Apple's "Deploying Transformers on the Apple Neural Engine"
(2022) found to suit the engine: a product of keys and queries leaves keys on the channel axis and queries on the
last one, so that the softmax runs over channels and nothing is copied between two products. Shapes are static,
no tensor has more than four axes, and there is neither a gather nor a state: rows of the embedding, cosines and
sines, and the mask come from the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.export.coarse import CoarseLayout, CoarseStep, trace_steps
from outrider.export.config import ModelConfig
from outrider.export.coreml_program import MilFunction
from outrider.export.npu_graph import WeightPart, row_count
from outrider.export.onnx import mask_kinds
from outrider.export.rope import rotary_size
from outrider.export.slots import SlotWeights, slot_shape

__all__ = ["HEAD_ROWS", "CoreMLGraph", "head_pieces", "lay_out"]

HEAD_ROWS = 16384  # no axis of the Neural Engine is longer
WHEN = ("past", "new")
ARITHMETIC = {"Div": "real_div", "Mul": "mul"}


@dataclass
class CoreMLGraph:
    """One function, and what its weights are: parts of slots, biases and multipliers by name."""

    function: MilFunction = field(default_factory=MilFunction)
    weights: dict[str, WeightPart] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)


def head_pieces(config: ModelConfig) -> list[tuple[int, int]]:
    """The rows of the vocabulary head that each of its convolutions computes."""
    rows = config.num_logits
    return [(start, min(start + HEAD_ROWS, rows)) for start in range(0, rows, HEAD_ROWS)]


def lay_out(
    config: ModelConfig,
    weights: SlotWeights,
    *,
    max_context: int,
    width: int,
    hidden_layers: Sequence[int] = (),
    stream: float = 1.0,
) -> CoreMLGraph:
    """The function of one static width: W = `width` tokens over a cache of M = `max_context` rows.

    Inputs `x` [1, D, 1, W], `cos_<kind>`, `sin_<kind>` [1, rotary/2, 1, W], `mask_<kind>` [1, M + W, 1, W],
    `past_key_<l>`, `past_value_<l>` [1, G d, 1, M], and for wide ones `select` [1, 1, W, 1], the one-hot row whose
    logits come out; outputs `logits_<i>` [1, V_i, 1, R], `present_key_<l>`, `present_value_<l>` [1, G d, 1, W] and
    `hidden_<l>` [1, D, 1, W]. The residual stream is kept `stream` times smaller than it is, which norms undo.
    """
    layout = Layout(config, weights, max_context, width, stream)
    layout.declare()
    for step in trace_steps(config, max_context, hidden_layers):
        layout.add(step)
    heads = [f"logits_{index}" for index in range(len(head_pieces(config)))]
    layers = range(config.num_layers)
    caches = [f"present_{part}_{layer}" for layer in layers for part in ("key", "value")]
    layout.f.outputs = [*heads, *caches, *(f"hidden_{layer}" for layer in hidden_layers)]
    return layout.graph


class Layout(CoarseLayout):
    """Turns coarse steps into operations. G KV heads of size d, D channels, M cached rows, W new ones."""

    def __init__(self, config: ModelConfig, weights: SlotWeights, M: int, W: int, stream: float) -> None:
        self.config, self.weights, self.M, self.W, self.stream = config, weights, M, W, stream
        self.R = row_count(W)
        self.graph = CoreMLGraph()
        self.f = self.graph.function
        self.known: dict[str, tuple[str, ...]] = {}  # coarse value -> tensors: several where a slot has parts
        self.shared: dict[str, str] = {}  # inputs in the shape that every layer reads
        self.counts: dict[str, int] = {}

    def declare(self) -> None:
        """The function's inputs."""
        c, f, M, W = self.config, self.f, self.M, self.W
        f.declare("x", (1, c.hidden_size, 1, W))
        for kind in sorted(set(c.layer_types)):
            for part in ("cos", "sin"):
                f.declare(f"{part}_{kind}", (1, rotary_size(c) // 2, 1, W))
        for name in sorted(set(mask_kinds(c, M).values())):
            f.declare(f"mask_{name}", (1, M + W, 1, W))
        for layer in range(c.num_layers):
            for part in ("key", "value"):
                f.declare(f"past_{part}_{layer}", (1, c.num_kv_heads * c.head_dim, 1, M))
        if self.R != W:
            f.declare("select", (1, 1, W, 1))
        self.known["x"] = (f.binary("mul", "x", self.stream, "x_shrunk") if self.stream != 1.0 else "x",)

    def fresh(self, stem: str) -> str:
        """The next name of a stem."""
        self.counts[stem] = self.counts.get(stem, -1) + 1
        return f"{stem}_{self.counts[stem]}"

    def value(self, name: str | float) -> str:
        """The tensor of a coarse value that has one."""
        (tensor,) = self.known.get(str(name), (str(name),))
        return tensor

    def _plain(self, step: CoarseStep) -> None:
        """Elementwise arithmetic of the decoder itself: the residual stream, and the cap on logits."""
        (output,) = step.outputs
        if step.operator == "Add":
            self.known[output] = (self.added(self.value(step.inputs[0]), self.value(step.inputs[1]), output),)
            return
        pieces = self.known[str(step.inputs[0])]
        stem = "logits" if output == "logits" else self.fresh("capped")
        self.known[output] = tuple(
            self.f.unary("tanh", piece, f"{stem}_{index}")
            if step.operator == "Tanh"
            else self.f.binary(ARITHMETIC[step.operator], piece, float(step.inputs[1]), f"{stem}_{index}")
            for index, piece in enumerate(pieces)
        )

    def added(self, x: str, y: str, output: str) -> str:
        """The residual stream with an update, which leaves the function where `output` is a hidden state."""
        if not output.startswith("hidden_"):
            return self.f.binary("add", x, y, self.fresh("residual"))
        if self.stream == 1.0:
            return self.f.binary("add", x, y, output)
        return self.f.binary("mul", self.f.binary("add", x, y, f"{output}_shrunk"), 1 / self.stream, output)

    def _gather(self, step: CoarseStep) -> None:
        """The rows that need logits: all of a narrow function, the selected one of a wide one."""
        x = self.value(step.inputs[0])
        if self.R != self.W:
            if "select" not in self.shared:
                self.shared["select"] = self.f.reshape("select", (1, self.W, 1, 1), "select_column")
            x = self.f.product(x, self.shared["select"], self.fresh("picked"))  # [1, D, 1, 1]
        self.known[step.outputs[0]] = (x,)

    def _norm(self, step: CoarseStep) -> None:
        slot = step.attributes["slot"]
        factor = self.update_factor(slot.rpartition(".")[2])
        x = self.value(step.inputs[0])
        stream = 1.0 if slot.endswith("_post_norm") else self.stream
        self.known[step.outputs[0]] = (self.norm(x, slot, tensor_name(slot), 1, factor, stream),)

    def update_factor(self, part: str) -> float:
        """What the outputs of a product or norm are multiplied with: those that enter the residual stream."""
        last = ("attn_post_norm", "mlp_post_norm") if self.config.sandwich_norms else ("attn_out", "down")
        return self.stream if part in last else 1.0

    def norm(
        self, x: str, slot: str, output: str, axis: int, factor: float = 1.0, stream: float = 1.0
    ) -> str:
        """Root-mean-square norm over an axis whose squares cannot leave half precision.

        Numbers are divided by their largest magnitude before they are squared: in half precision the square of
        256 is infinite, and an attention sink reaches 25,000. `epsilon` shrinks with them. Each number itself is
        rounded twice only, by the product with the inverse root and by that with its multiplier.
        """
        f, root = self.f, math.sqrt(self.config.norm_eps) * stream
        floor = 2.0 ** (math.ceil(math.log2(root)) + 1)  # below it, epsilon is what counts
        peak = f.reduce("reduce_max", f.unary("abs", x, f"{output}_magnitude"), axis, f"{output}_peak")
        peak = f.binary("maximum", peak, floor, f"{output}_scale")
        scaled = f.binary("real_div", x, peak, f"{output}_scaled")
        squares = f.unary("square", scaled, f"{output}_squares")
        mean = f.reduce("reduce_mean", squares, axis, f"{output}_mean")
        # In this order, because a half-precision epsilon would be rounded to 2 digits.
        small = f.unary("square", f.binary("real_div", root, peak, f"{output}_root"), f"{output}_epsilon")
        total = f.binary("add", mean, small, f"{output}_power")
        inverse = f.unary("rsqrt", total, f"{output}_inverse", epsilon=0.0)
        normed = f.binary(
            "mul", x, f.binary("real_div", inverse, peak, f"{output}_factor"), f"{output}_normed"
        )
        multipliers = self.weights.vector(slot) * np.float32(factor)
        shape = tuple(len(multipliers) if place == axis else 1 for place in range(4))
        self.graph.vectors[f"{output}_multipliers"] = multipliers.reshape(shape)
        return f.binary("mul", normed, f.weight(f"{output}_multipliers", shape), output)

    def _linear(self, step: CoarseStep) -> None:
        slot, (output,) = step.attributes["slot"], step.outputs
        x, (layer, _, part) = self.value(step.inputs[0]), slot.rpartition(".")
        if part == "head":
            stem = "logits" if output == "logits" else "head"
            self.known[output] = tuple(
                self.product(x, WeightPart(slot, rows), f"head_{index}", f"{stem}_{index}")
                for index, rows in enumerate(head_pieces(self.config))
            )
            return
        tensors, start = [], 0
        for name, size in self.parts(part, slot_shape(self.config, slot)[0]):
            piece = WeightPart(slot, (start, start + size), self.factor(name))
            tensors.append(self.product(x, piece, tensor_name(f"{layer}.{name}"), self.leaving(layer, name)))
            start += size
        self.known[output] = tuple(tensors)

    def parts(self, part: str, N: int) -> list[tuple[str, int]]:
        """The products that a slot of N rows is made of, and the rows of each."""
        c = self.config
        kv = c.num_kv_heads * c.head_dim
        several = {
            "qkv": [("query", c.num_heads * c.head_dim), ("key", kv), ("value", kv)],
            "gate_up": [("gate", N // 2), ("up", N // 2)],
        }
        return several.get(part, [(part, N)])

    def factor(self, name: str) -> float:
        """What a product's weights are multiplied with; the factor on q·k goes to its norm where it has one."""
        if name == "query" and not self.config.qk_norm:
            return self.config.scale
        return self.update_factor(name)

    def leaving(self, layer: str, part: str) -> str | None:
        """The output of the function that a product is: new values leave it as they are."""
        return f"present_value_{layer.rpartition('.')[2]}" if part == "value" else None

    def product(self, x: str, part: WeightPart, name: str, output: str | None = None) -> str:
        """x Wᵀ + b of a part of a slot: [1, K, 1, R] -> [1, N, 1, R]."""
        N, K = part.rows[1] - part.rows[0], slot_shape(self.config, part.slot)[1]
        weight = self.f.weight(f"{name}_weight", (N, K, 1, 1))
        self.graph.weights[weight] = part
        values, bias = self.weights.bias(part.slot), None
        if values is not None:
            bias = self.f.weight(f"{name}_bias", (N,))
            self.graph.vectors[bias] = values[slice(*part.rows)] * np.float32(part.factor)
        return self.f.convolution(x, weight, bias, output or name)

    def _gate(self, step: CoarseStep) -> None:
        f = self.f
        gate, up = self.known[str(step.inputs[0])]
        stem = gate.removesuffix("_gate")
        if self.config.activation == "silu":
            opened = f.binary("mul", gate, f.unary("sigmoid", gate, f"{gate}_sigmoid"), f"{gate}_opened")
        else:
            opened = f.unary("gelu", gate, f"{gate}_opened", mode="TANH_APPROXIMATION")
        self.known[step.outputs[0]] = (f.binary("mul", opened, up, f"{stem}_gated"),)

    def _attention(self, step: CoarseStep) -> None:
        c, f, layer = self.config, self.f, step.attributes["layer"]
        cos, sin, mask, past_key, past_value = map(str, step.inputs[1:])
        query, key, value = self.known[str(step.inputs[0])]
        query = self.rotated(self.heads(query, layer, "query"), cos, sin)
        key = self.rotated(self.heads(key, layer, "key"), cos, sin)
        present = f.reshape(key, (1, c.num_kv_heads * c.head_dim, 1, self.W), f"present_key_{layer}")
        queries = self.grouped(f.reshape(query, (1, c.num_heads * c.head_dim, 1, self.W), f"{query}_flat"))
        past_keys, new_keys = self.key_rows(past_key), self.key_rows(present)
        past_values, new_values = self.split_heads(past_value, 1), self.split_heads(value, 1)
        contexts: list[str] = []
        for head in range(c.num_kv_heads):
            keys, values = (past_keys[head], new_keys[head]), (past_values[head], new_values[head])
            contexts += self.attended(f"layers_{layer}_head_{head}", queries[head], keys, values, mask)
        self.known[step.outputs[0]] = (f.joined(contexts, 1, f"layers_{layer}_context"),)  # [1, H d, 1, W]

    def heads(self, x: str, layer: int, name: str) -> str:
        """[1, H d, 1, W] -> [1, H, d, W], normed where the family does."""
        c = self.config
        x = self.f.reshape(x, (1, self.f.shapes[x][1] // c.head_dim, c.head_dim, self.W), f"{x}_heads")
        if not c.qk_norm:
            return x
        factor = c.scale if name == "query" else 1.0
        return self.norm(x, f"layers.{layer}.{name[0]}_norm", f"layers_{layer}_{name}_norm", 2, factor)

    def rotated(self, x: str, cos: str, sin: str) -> str:
        """`decoder.apply_rope` of [1, H, d, W]."""
        f, d, half = self.f, self.config.head_dim, rotary_size(self.config) // 2
        for name in (cos, sin):
            if name not in self.shared:
                self.shared[name] = f.reshape(name, (1, 1, half, self.W), f"{name}_rows")
        cos, sin = self.shared[cos], self.shared[sin]
        sizes = [half, half, d - 2 * half] if d > 2 * half else [half, half]
        parts = f.split(x, sizes, 2, [f"{x}_{name}" for name in ("first", "second", "rest")[: len(sizes)]])
        turned = []
        for name, kind, factors in (("low", "sub", (cos, sin)), ("high", "add", (sin, cos))):
            left = f.binary("mul", parts[0], factors[0], f"{x}_{name}_first")
            right = f.binary("mul", parts[1], factors[1], f"{x}_{name}_second")
            turned.append(f.binary(kind, left, right, f"{x}_{name}"))
        return f.joined([*turned, *parts[2:]], 2, f"{x}_rotated")

    def split_heads(self, x: str, axis: int) -> list[str]:
        """The part of every head of [1, H d, 1, n], or of an axis of heads elsewhere."""
        d = self.config.head_dim
        count = self.f.shapes[x][axis] // d
        return self.f.split(x, [d] * count, axis, [f"{x}_head_{head}" for head in range(count)])

    def grouped(self, query: str) -> list[str]:
        """The queries that share a KV head, side by side: G of [1, d, 1, groups * W]."""
        c = self.config
        groups, heads = c.num_heads // c.num_kv_heads, self.split_heads(query, 1)
        return [
            self.f.joined(heads[head * groups : (head + 1) * groups], 3, f"{query}_group_{head}")
            for head in range(c.num_kv_heads)
        ]

    def key_rows(self, keys: str) -> list[str]:
        """[1, G d, 1, n] -> G of [1, n, 1, d], as products read keys."""
        return self.split_heads(self.f.transpose(keys, (0, 3, 2, 1), f"{keys}_rows"), 3)

    def attended(
        self, name: str, query: str, keys: tuple[str, str], values: tuple[str, str], mask: str
    ) -> list[str]:
        """What the query heads of one KV head get: [1, d, 1, W] each. Keys and values are past and new."""
        c, f = self.config, self.f
        parts = [f.product(key, query, f"{name}_{when}") for key, when in zip(keys, WHEN, strict=True)]
        scores = f.joined(parts, 1, f"{name}_scores")  # [1, M + W, 1, groups * W]
        if c.attention_softcap is not None:
            capped = f.binary("real_div", scores, c.attention_softcap, f"{name}_quotient")
            scores = f.binary(
                "mul", f.unary("tanh", capped, f"{name}_tanh"), c.attention_softcap, f"{name}_capped"
            )
        groups = c.num_heads // c.num_kv_heads
        if mask not in self.shared:
            self.shared[mask] = f.joined([mask] * groups, 3, f"{mask}_groups")
        scores = f.binary("add", scores, self.shared[mask], f"{name}_masked")
        weights = f.softmax(scores, 1, f"{name}_weights")
        halves = f.split(weights, [self.M, self.W], 1, [f"{name}_{when}_weights" for when in WHEN])
        mixed = [
            f.product(value, half, f"{name}_{when}_context")
            for value, half, when in zip(values, halves, WHEN, strict=True)
        ]
        context = f.binary("add", mixed[0], mixed[1], f"{name}_context")  # [1, d, 1, groups * W]
        return f.split(context, [self.W] * groups, 3, [f"{name}_query_{group}" for group in range(groups)])


def tensor_name(slot: str) -> str:
    """A slot as an identifier of MIL."""
    return slot.replace(".", "_")
