"""A forward laid out for an NPU, in float: named tensors, 1×1 convolutions, keys transposed, static shapes.

Every tensor has a name that says what it is (`layers.3.key.rotated`), the same at every width, so that ranges
found at one width serve all. `npu_qdq.py` writes the graph with or without quantization.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.export.coarse import CoarseLayout, CoarseStep, trace_steps
from outrider.export.config import ModelConfig
from outrider.export.onnx import mask_kinds
from outrider.export.rope import rotary_size
from outrider.export.slots import SlotWeights, slot_shape

__all__ = ["NpuGraph", "NpuNode", "Numerics", "Value", "WeightPart", "lay_out", "row_count"]

WIDE = 8  # widths above return logits of one row: a prefill needs no more


@dataclass(frozen=True)
class NpuNode:
    """One ONNX node; its name is its output's."""

    operator: str
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightPart:
    """Rows of a slot's matrix as the weight of one convolution, times a factor that is part of the model."""

    slot: str
    rows: tuple[int, int]
    factor: float = 1.0

    @property
    def is_whole(self) -> bool:
        """Whether the slot has no other part."""
        return self.slot.rpartition(".")[2] not in ("qkv", "gate_up")


@dataclass(frozen=True)
class Value:
    """A graph input or output."""

    shape: tuple[int, ...]
    kind: Literal["activation", "index"] = "activation"


@dataclass(frozen=True)
class Numerics:
    """How some of a model is computed, found by calibration.

    `massive` slots (of `down`) multiply in half precision, see `npu_scales.massive_slots`. `stream` shrinks the
    residual stream, which norms undo, where it would leave the range of half precision. `blocked` slots are plain
    products, since convolutions take no blocks of weights.
    """

    massive: frozenset[str] = frozenset()
    stream: float = 1.0
    blocked: frozenset[str] = frozenset()


@dataclass
class NpuGraph:
    """Nodes in order, and what quantization must know about their tensors.

    `alike` joins tensors that must share a scale; `symmetric` ones are signed around zero; `fixed` ranges follow
    from the operator; `floating` tensors stay in floating point, which the NPU holds in 16 bits; weights among them
    too. `masked` maps the input of every softmax to what its rows' largest values are taken from.
    """

    nodes: list[NpuNode] = field(default_factory=list)
    inputs: dict[str, Value] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # small constants, quantized too
    shapes: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # arguments of Reshape and Slice
    weights: dict[str, WeightPart] = field(default_factory=dict)
    alike: dict[str, str] = field(default_factory=dict)
    symmetric: set[str] = field(default_factory=set)
    fixed: dict[str, tuple[float, float]] = field(default_factory=dict)
    floating: set[str] = field(default_factory=set)
    sized: set[str] = field(default_factory=set)  # of which calibration takes the mean magnitude
    masked: dict[str, str] = field(default_factory=dict)  # softmax input -> scores before the mask

    def node(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Append a node; returns its output."""
        self.nodes.append(NpuNode(operator, tuple(inputs), output, attributes))
        return output

    def moved(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """A node that only moves values: its output shares the scale of what it moves."""
        self.join(inputs[0], output)
        return self.node(operator, inputs, output, **attributes)

    def activations(self) -> list[str]:
        """Every tensor that gets a scale: inputs, constants, outputs of nodes."""
        inputs = [name for name, value in self.inputs.items() if value.kind == "activation"]
        names = [*inputs, *self.vectors, *(node.output for node in self.nodes)]
        return [name for name in names if name not in self.floating]

    def join(self, *names: str) -> None:
        """Make tensors share one scale."""
        first = self.root(names[0])
        for name in names[1:]:
            if self.root(name) != first:
                self.alike[self.root(name)] = first

    def root(self, name: str) -> str:
        """The tensor whose scale a tensor has."""
        while name in self.alike:
            name = self.alike[name]
        return name

    def integers(self, values: Sequence[int]) -> str:
        """A shape argument by its values."""
        name = "shape." + ".".join(str(value) for value in values).replace("-", "m")
        self.shapes[name] = np.asarray(values, np.int64)
        return name

    def reshape(self, x: str, shape: Sequence[int], output: str) -> str:
        """The same values in another shape."""
        return self.moved("Reshape", [x, self.integers(shape)], output)

    def transpose(self, x: str, order: Sequence[int], output: str) -> str:
        """The same values with permuted axes."""
        return self.moved("Transpose", [x], output, perm=list(order))

    def cut(self, x: str, start: int, stop: int, axis: int, output: str) -> str:
        """Part of an axis."""
        bounds = [self.integers([number]) for number in (start, stop, axis)]
        return self.moved("Slice", [x, *bounds], output)

    def joined(self, parts: Sequence[str], axis: int, output: str) -> str:
        """Tensors behind one another; all share one scale, so that nothing is computed."""
        self.join(*parts, output)
        return self.node("Concat", parts, output, axis=axis)


def row_count(width: int) -> int:
    """Rows of logits that the graph of a width returns."""
    return width if width <= WIDE else 1


def lay_out(
    config: ModelConfig,
    weights: SlotWeights,
    *,
    max_context: int,
    width: int,
    rows: int,
    cache: int | None = None,
    numerics: Numerics | None = None,
) -> NpuGraph:
    """The graph of one static width: W = `width` tokens over a cache of M = `max_context` (or `cache`) rows.

    Inputs `x` [1, W, D], `rows` [R] int32, `mask_<kind>` [1, 1, W, M + W], `cos_<kind>`, `sin_<kind>`
    [1, 1, W, rotary/2], `past_key_<l>` [1, G, d, M], `past_value_<l>` [1, G, M, d]; outputs `logits` [1, R, V],
    `present_key_<l>` [1, G, d, W], `present_value_<l>` [1, G, W, d].
    """
    builder = Layout(config, weights, numerics or Numerics(), cache or max_context, width, rows)
    builder.kinds = mask_kinds(config, max_context)
    builder.declare()
    for step in trace_steps(config, max_context):
        builder.add(step)
    return builder.graph


class Layout(CoarseLayout):
    """Turns coarse steps into nodes. Activations of a token are [1, 1, W, D], the last axis the channels."""

    def __init__(
        self, config: ModelConfig, weights: SlotWeights, numerics: Numerics, M: int, W: int, R: int
    ) -> None:
        self.config, self.weights, self.numerics = config, weights, numerics
        self.M, self.W, self.R = M, W, R
        self.graph = NpuGraph()
        self.kinds: Mapping[str, str] = {}  # layer type -> mask
        self.known: dict[str, tuple[str, ...]] = {}  # coarse value -> tensors: several where a slot has parts
        self.masks: dict[str, str] = {}  # mask input -> the mask of all heads of a group
        self.counts: dict[str, int] = {}
        self.laid: set[str] = set()  # what products read, channels first

    def declare(self) -> None:
        """The graph's inputs."""
        c, g, M, W = self.config, self.graph, self.M, self.W
        g.inputs["x"] = Value((1, W, c.hidden_size))
        g.inputs["rows"] = Value((self.R,), "index")
        for name in sorted(set(self.kinds.values())):
            g.inputs[f"mask_{name}"] = Value((1, 1, W, M + W))
        for kind in sorted(set(c.layer_types)):
            for part in ("cos", "sin"):
                g.inputs[f"{part}_{kind}"] = Value((1, 1, W, rotary_size(c) // 2))
        for layer in range(c.num_layers):
            g.inputs[f"past_key_{layer}"] = Value((1, c.num_kv_heads, c.head_dim, M))
            g.inputs[f"past_value_{layer}"] = Value((1, c.num_kv_heads, M, c.head_dim))
        self.known["x"] = (g.reshape("x", [1, 1, W, c.hidden_size], "x.rows"),)

    def value(self, name: str | float) -> str:
        """The tensor of a coarse value that has one."""
        if isinstance(name, str):
            (tensor,) = self.known[name]
            return tensor
        constant = f"constant.{name:g}"
        self.graph.vectors[constant] = np.full(1, name, np.float32)
        return constant

    def fresh(self, stem: str) -> str:
        """The next name of a stem."""
        self.counts[stem] = self.counts.get(stem, -1) + 1
        return f"{stem}.{self.counts[stem]}"

    def _plain(self, step: CoarseStep) -> None:
        """Elementwise arithmetic of the decoder itself: the residual stream, and the cap on logits."""
        names = {"Add": "residual", "Div": "capped.quotient", "Tanh": "capped.tanh", "Mul": "capped"}
        inputs = [self.value(name) for name in step.inputs]
        if step.operator == "Add" and "x.rows" in inputs and self.numerics.stream != 1.0:
            inputs[inputs.index("x.rows")] = self.shrunk("x.rows")
        output = self.fresh(names[step.operator])
        self.graph.node(step.operator, inputs, output)
        if step.operator == "Add":
            self.graph.floating.add(output)
        if step.operator == "Tanh":
            self.graph.fixed[output] = (-1.0, 1.0)
        self._finish(step, output)

    def shrunk(self, x: str) -> str:
        """The rows from the host on the scale of the residual stream."""
        self.graph.vectors["stream"] = np.full(1, self.numerics.stream, np.float32)
        self.graph.floating |= {"stream", f"{x}.shrunk"}
        return self.graph.node("Mul", [x, "stream"], f"{x}.shrunk")

    def update_factor(self, part: str) -> float:
        """What the outputs of a product or norm are multiplied with: those that enter the residual stream."""
        last = ("attn_post_norm", "mlp_post_norm") if self.config.sandwich_norms else ("attn_out", "down")
        return self.numerics.stream if part in last else 1.0

    def _finish(self, step: CoarseStep, *tensors: str) -> None:
        """Remember what a step returned; the logits leave the graph."""
        (name,) = step.outputs
        self.known[name] = tensors
        if name == "logits":
            vocab = slot_shape(self.config, "head")[0]
            self.graph.reshape(tensors[0], [1, self.R, vocab], "logits")
            self.graph.outputs["logits"] = Value((1, self.R, vocab))

    def _gather(self, step: CoarseStep) -> None:
        x, picked = self.value(step.inputs[0]), self.fresh("picked")
        if x in self.graph.floating:
            self.graph.floating.add(self.graph.node("Gather", [x, "rows"], picked, axis=2))
        else:
            self.graph.moved("Gather", [x, "rows"], picked, axis=2)
        self._finish(step, picked)

    def _norm(self, step: CoarseStep) -> None:
        slot = step.attributes["slot"]
        factor = self.update_factor(slot.rpartition(".")[2])
        self._finish(step, self.norm(self.value(step.inputs[0]), slot, slot, factor))

    def norm(self, x: str, slot: str, output: str, factor: float = 1.0) -> str:
        """Root-mean-square norm over the channels, in one node."""
        self.graph.vectors[f"{slot}.multipliers"] = self.weights.vector(slot) * np.float32(factor)
        if x in self.graph.floating:
            self.graph.floating.add(f"{slot}.multipliers")
        inputs = [x, f"{slot}.multipliers"]
        epsilon = float(self.config.norm_eps)
        if x in self.graph.floating:
            epsilon *= self.numerics.stream**2
        return self.graph.node("RMSNormalization", inputs, output, axis=-1, epsilon=epsilon)

    def _linear(self, step: CoarseStep) -> None:
        c, slot = self.config, step.attributes["slot"]
        x = self.value(step.inputs[0])
        N = slot_shape(c, slot)[0]
        layer, _, part = slot.rpartition(".")
        if part == "qkv":
            heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
            scale = 1.0 if c.qk_norm else c.scale
            sizes = [("query", heads, scale), ("key", kv, 1.0), ("value", kv, 1.0)]
        elif part == "gate_up":
            sizes = [("gate", N // 2, 1.0), ("up", N // 2, 1.0)]
        else:
            self._finish(step, self.product(x, WeightPart(slot, (0, N), self.update_factor(part)), slot))
            if part == "down":
                self.graph.sized |= {x, slot}
            if slot in self.numerics.massive:
                tensors = (x, f"{x}.columns", f"{slot}.weight", f"{slot}.bias", f"{slot}.product", slot)
                self.graph.floating.update(tensors)
            return
        pieces: list[str] = []
        start = 0
        for name, size, factor in sizes:
            piece = WeightPart(slot, (start, start + size), factor)
            pieces.append(self.product(x, piece, f"{layer}.{name}"))
            start += size
        self._finish(step, *pieces)

    def product(self, x: str, part: WeightPart, output: str) -> str:
        """x Wᵀ + b as a 1×1 convolution over the tokens: [1, 1, R, K] -> [1, 1, R, N]."""
        g = self.graph
        if part.slot in self.numerics.blocked:
            g.weights[f"{output}.weight"] = part
            return g.node("MatMul", [x, f"{output}.weight"], output)
        columns = f"{x}.columns"
        if columns not in self.laid:
            self.laid.add(g.transpose(x, (0, 3, 1, 2), columns))  # [1, K, 1, R]
        weight = f"{output}.weight"
        g.weights[weight] = part
        inputs = [columns, weight]
        if self.weights.bias(part.slot) is not None:
            inputs.append(f"{output}.bias")
        g.node("Conv", inputs, f"{output}.product", kernel_shape=[1, 1])
        return g.transpose(f"{output}.product", (0, 2, 3, 1), output)

    def _gate(self, step: CoarseStep) -> None:
        g = self.graph
        gate, up = self.known[str(step.inputs[0])]
        layer = gate.rpartition(".")[0]
        opened = self.silu(gate) if self.config.activation == "silu" else self.gelu(gate)
        self._finish(step, g.node("Mul", [opened, up], f"{layer}.gated"))

    def silu(self, x: str) -> str:
        """x * sigmoid(x)"""
        g = self.graph
        g.fixed[f"{x}.sigmoid"] = (0.0, 1.0)
        return g.node("Mul", [x, g.node("Sigmoid", [x], f"{x}.sigmoid")], f"{x}.activated")

    def gelu(self, x: str) -> str:
        """The tanh form of GELU, as one node."""
        return self.graph.node("Gelu", [x], f"{x}.activated", approximate="tanh")

    def _attention(self, step: CoarseStep) -> None:
        layer = step.attributes["layer"]
        cos, sin, mask, past_key, past_value = map(str, step.inputs[1:])
        query, key, value = self.heads(layer, self.known[str(step.inputs[0])])
        query, key = self.rotated(query, cos, sin), self.rotated(key, cos, sin)
        c, g = self.config, self.graph
        key = g.transpose(key, (0, 1, 3, 2), f"layers.{layer}.key.columns")
        new_key = self.cached(key, past_key, f"present_key_{layer}", (1, c.num_kv_heads, c.head_dim, self.W))
        shape = (1, c.num_kv_heads, self.W, c.head_dim)
        new_value = self.cached(value, past_value, f"present_value_{layer}", shape)
        weights = self.attended(layer, query, (past_key, new_key), mask)
        context = self.mixed(layer, weights, (past_value, new_value))
        context = g.reshape(context, [1, c.num_heads, self.W, c.head_dim], f"{context}.heads")
        context = g.transpose(context, (0, 2, 1, 3), f"{context}.tokens")
        wide = g.reshape(context, [1, 1, self.W, c.num_heads * c.head_dim], f"{context}.wide")
        self.known[step.outputs[0]] = (wide,)

    def heads(self, layer: int, parts: Sequence[str]) -> tuple[str, str, str]:
        """Queries [1, H, W, d], keys and values [1, G, W, d], normed where the family does."""
        c, g = self.config, self.graph
        found = []
        for part, name in zip(parts, ("query", "key", "value"), strict=True):
            count = c.num_heads if name == "query" else c.num_kv_heads
            tensor = g.reshape(part, [1, self.W, count, c.head_dim], f"{part}.tokens")
            if c.qk_norm and name != "value":
                factor = c.scale if name == "query" else 1.0
                tensor = self.norm(tensor, f"layers.{layer}.{name[0]}_norm", f"{part}.normed", factor)
            found.append(g.transpose(tensor, (0, 2, 1, 3), f"{part}.heads"))
        return found[0], found[1], found[2]

    def rotated(self, x: str, cos: str, sin: str) -> str:
        """`decoder.apply_rope` of [1, H, W, d]."""
        g, d, half = self.graph, self.config.head_dim, rotary_size(self.config) // 2
        first, second = g.cut(x, 0, half, 3, f"{x}.first"), g.cut(x, half, 2 * half, 3, f"{x}.second")
        turned = []
        for name, operator, factors in (("low", "Sub", (cos, sin)), ("high", "Add", (sin, cos))):
            left = g.node("Mul", [first, factors[0]], f"{x}.{name}.first")
            right = g.node("Mul", [second, factors[1]], f"{x}.{name}.second")
            turned.append(g.node(operator, [left, right], f"{x}.{name}"))
        if 2 * half < d:
            turned.append(g.cut(x, 2 * half, d, 3, f"{x}.rest"))
        return g.joined(turned, 3, f"{x}.rotated")

    def cached(self, x: str, past: str, output: str, shape: tuple[int, ...]) -> str:
        """New rows of the cache: the output of the graph, and the same values for use inside."""
        g = self.graph
        g.outputs[output] = Value(shape)
        g.join(past, output)
        g.symmetric.add(g.root(past))
        return g.node("Cache", [x], output)

    def attended(self, layer: int, query: str, keys: tuple[str, str], mask: str) -> str:
        """Attention weights [1, G, groups * W, M + W]; the heads of a group are folded into the rows."""
        c, g, name = self.config, self.graph, f"layers.{layer}.scores"
        G, groups = c.num_kv_heads, c.num_heads // c.num_kv_heads
        folded = g.reshape(query, [1, G, groups * self.W, c.head_dim], f"{query}.folded")
        parts = [
            g.node("MatMul", [folded, key], f"{name}.{when}")
            for key, when in zip(keys, ("past", "new"), strict=True)
        ]
        scores = g.joined(parts, 3, name)
        if c.attention_softcap is not None:
            cap = self.value(c.attention_softcap)
            g.fixed[f"{name}.tanh"] = (-1.0, 1.0)
            scores = g.node("Tanh", [g.node("Div", [scores, cap], f"{name}.quotient")], f"{name}.tanh")
            scores = g.node("Mul", [scores, cap], f"{name}.capped")
        if mask not in self.masks:
            self.masks[mask] = (
                g.joined([mask] * groups, 2, f"{mask}.heads") if groups > 1 else mask
            )  # [1, 1, groups * W, M + W]
        masked = g.node("Add", [scores, self.masks[mask]], f"{name}.masked")
        g.masked[masked] = scores
        g.fixed[f"layers.{layer}.weights"] = (0.0, 1.0)
        return g.node("Softmax", [masked], f"layers.{layer}.weights", axis=-1)

    def mixed(self, layer: int, weights: str, values: tuple[str, str]) -> str:
        """Values by their weights [1, G, groups * W, d]."""
        g, M, total = self.graph, self.M, self.M + self.W
        name = f"layers.{layer}.context"
        past = g.cut(weights, 0, M, 3, f"{weights}.past")
        new = g.cut(weights, M, total, 3, f"{weights}.new")
        left = g.node("MatMul", [past, values[0]], f"{name}.past")
        right = g.node("MatMul", [new, values[1]], f"{name}.new")
        g.join(name, left, right)  # calibration runs over an empty cache and sees nothing of the past's part
        return g.node("Add", [left, right], name)
