"""What a decoder computes, as a short list of coarse steps: products, norms, gates, attention, additions.

The decoder runs once over symbols instead of tensors, with primitives that leave one step each. Nothing in the
steps depends on the width or on the context: `npu_graph`, `coreml_graph` and `coreml_target_graph` lay the same ones
out, each for its own unit.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from outrider.errors import ExportError
from outrider.export.config import ModelConfig
from outrider.export.decoder import AddNorm, Decoder, Step
from outrider.export.onnx import mask_kinds

__all__ = ["CoarseLayout", "CoarseStep", "trace_steps"]


@dataclass(frozen=True)
class CoarseStep:
    """One step over named values; numbers among the inputs are constants of the model."""

    operator: str  # Linear, Norm, Gate, Attention, Add, Mul, Div, Tanh, Gather
    inputs: tuple[str | float, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)  # what the primitive said: slot, layer


class CoarseLayout(ABC):
    """What turns steps into the operations of one unit."""

    def add(self, step: CoarseStep) -> None:
        """The operations of one step."""
        operations = {
            "Linear": self._linear,
            "Norm": self._norm,
            "Gate": self._gate,
            "Attention": self._attention,
            "Gather": self._gather,
        }
        operations.get(step.operator, self._plain)(step)

    @abstractmethod
    def _linear(self, step: CoarseStep) -> None: ...

    @abstractmethod
    def _norm(self, step: CoarseStep) -> None: ...

    @abstractmethod
    def _gate(self, step: CoarseStep) -> None: ...

    @abstractmethod
    def _attention(self, step: CoarseStep) -> None: ...

    @abstractmethod
    def _gather(self, step: CoarseStep) -> None: ...

    @abstractmethod
    def _plain(self, step: CoarseStep) -> None:
        """Elementwise arithmetic of the decoder itself: the residual stream, and the cap on logits."""


def coarse(name: str, *inputs: Any, **attributes: Any) -> Any:
    """Leave a step in the graph that the inputs are symbols of."""
    return inputs[0].tracer.create_proxy("call_function", coarse, (name, *inputs), attributes)


class Coarse(nn.Module):
    """A part of the decoder that is one step."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__()
        self.name, self.attributes = name, attributes

    def forward(self, x: Tensor) -> Any:
        """One value in, one value out."""
        return coarse(self.name, x, **self.attributes)


class CoarseAttention(nn.Module):
    """Attention as one step, with its own norms inside."""

    def __init__(self, layer: int, config: ModelConfig) -> None:
        super().__init__()
        self.layer, self.kind = layer, config.layer_types[layer]

    def forward(self, qkv: Tensor, step: Step) -> Any:
        """[1, S, (H + 2 G) d] -> [1, S, H d]"""
        inputs = [qkv, *step.rope[self.kind], step.mask[self.kind], *step.past[self.layer]]
        outputs = coarse("Attention", *inputs, layer=self.layer)
        step.present.append((outputs[1], outputs[2]))
        return outputs[0]


class CoarsePrimitives:
    """Parts of a decoder that leave one step each; embedding rows come from the host."""

    def embedding(self, slot: str, config: ModelConfig) -> nn.Module:
        """[1, S, D] as it is."""
        return nn.Identity()

    def linear(self, slot: str, config: ModelConfig) -> nn.Module:
        """One step."""
        return Coarse("Linear", slot=slot)

    def norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """One step."""
        return Coarse("Norm", slot=slot)

    def add_norm(self, slot: str, config: ModelConfig) -> nn.Module:
        """An addition and one step."""
        return AddNorm(Coarse("Norm", slot=slot))

    def gate(self, config: ModelConfig) -> nn.Module:
        """One step."""
        return Coarse("Gate")

    def attention(self, layer: int, config: ModelConfig) -> nn.Module:
        """One step."""
        return CoarseAttention(layer, config)


def trace_steps(config: ModelConfig, max_context: int, hidden_layers: Sequence[int] = ()) -> list[CoarseStep]:
    """The steps of a forward in order; values are named as the graph's inputs and outputs are.

    Inputs `x`, `rows`, `mask_<kind>`, `cos_<kind>`, `sin_<kind>`, `past_key_<l>`, `past_value_<l>`; outputs
    `logits`, `present_key_<l>`, `present_value_<l>`, `hidden_<l>`. `x` already holds the embedding's scale.
    """
    decoder = Decoder(replace(config, embedding_scale=1.0), CoarsePrimitives(), hidden_layers)
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def symbol(name: str) -> Any:
        return fx.Proxy(graph.placeholder(name), tracer)

    masks = {name: symbol(f"mask_{name}") for name in sorted(set(mask_kinds(config, max_context).values()))}
    step = Step(
        rope={
            kind: (symbol(f"cos_{kind}"), symbol(f"sin_{kind}")) for kind in sorted(set(config.layer_types))
        },
        mask={kind: masks[name] for kind, name in mask_kinds(config, max_context).items()},
        past=[(symbol(f"past_key_{i}"), symbol(f"past_value_{i}")) for i in range(config.num_layers)],
    )
    logits, hidden = decoder(symbol("x"), symbol("rows"), step)
    named: dict[Any, str] = {logits.node: "logits"}
    for layer, value in zip(hidden_layers, hidden, strict=True):
        named[value.node] = f"hidden_{layer}"
    for layer, pair in enumerate(step.present):
        for part, value in zip(("key", "value"), pair, strict=True):
            named[value.node] = f"present_{part}_{layer}"  # type: ignore[attr-defined]
    return _steps(graph, named)


OPERATORS = {operator.add: "Add", operator.mul: "Mul", operator.truediv: "Div", torch.tanh: "Tanh"}


def _steps(graph: fx.Graph, named: dict[fx.Node, str]) -> list[CoarseStep]:
    """The graph's calls, in order, over values by name."""

    def value(argument: Any) -> str | float:
        return named.get(argument, argument.name) if isinstance(argument, fx.Node) else float(argument)

    steps = []
    for node in graph.nodes:
        if node.op == "placeholder" or node.target is operator.getitem:
            continue
        output = str(value(node))
        if node.target is coarse and node.args[0] == "Attention":
            parts = {user.args[1]: str(value(user)) for user in node.users}
            outputs = tuple(parts[index] for index in range(3))
            steps.append(CoarseStep("Attention", tuple(map(value, node.args[1:])), outputs, node.kwargs))
        elif node.target is coarse:
            steps.append(CoarseStep(node.args[0], tuple(map(value, node.args[1:])), (output,), node.kwargs))
        elif node.target == "index_select" and node.args[1] == 1:
            steps.append(CoarseStep("Gather", (value(node.args[0]), value(node.args[2])), (output,)))
        elif node.target in OPERATORS:
            steps.append(CoarseStep(OPERATORS[node.target], tuple(map(value, node.args)), (output,)))
        else:
            raise ExportError(f"the decoder computes {node.target}, which is no step that a layout knows")
    return steps
