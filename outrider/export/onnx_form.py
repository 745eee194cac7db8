"""What an `inplace` graph for an accelerator has otherwise than the CPU's: types, attention inputs, reduced logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import ExportError

__all__ = [
    "CUDA",
    "HOST",
    "MICROSOFT",
    "OPSET",
    "GraphForm",
    "add_top",
    "as_half",
    "drop_unread_inputs",
    "halve",
]

OPSET = 23  # the first with RMSNormalization
MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class GraphForm:
    """How a graph differs from the CPU's.

    `half`: activations, cache and constants are float16, which the CUDA kernel of GroupQueryAttention demands.
    `chains`: attention reads neither mask nor positions, since a mask costs that kernel its fused forms, and releases
    before July 2026 refuse one (onnxruntime#29525); a tree then runs path by path. `top`: beside the logits, so many
    of the largest of every row, their ids and the row's logsumexp, so that a row over the vocabulary need not leave
    the device.
    """

    half: bool = False
    chains: bool = False
    top: int = 0


HOST = GraphForm()
CUDA = GraphForm(half=True, chains=True, top=64)  # 64: the usual top-k of 40 or 50 and what may tie with it


def drop_unread_inputs(model: Any) -> None:
    """Remove inputs that no node reads: positions and masks of a graph of chains."""
    read = {name for node in model.graph.node for name in node.input}
    kept = [value for value in model.graph.input if value.name in read]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def halve(model: Any) -> None:
    """Compute in float16, and give logits and hidden states as float32 all the same."""
    from onnx import TensorProto, helper, numpy_helper

    single, half = TensorProto.FLOAT, TensorProto.FLOAT16
    for tensor in _constants(model):
        if tensor.data_type == single:
            tensor.CopyFrom(numpy_helper.from_array(as_half(numpy_helper.to_array(tensor)), tensor.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == single:
                attribute.i = half
    outside = {value.name for value in model.graph.output if not value.name.startswith("present_")}
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == single and value.name not in outside:
            value.type.tensor_type.elem_type = half
    for node in model.graph.node:
        node.input[:] = [f"{name}.half" if name in outside else name for name in node.input]
        node.output[:] = [f"{name}.half" if name in outside else name for name in node.output]
    model.graph.node.extend(
        helper.make_node("Cast", [f"{name}.half"], [name], name=name, to=single) for name in sorted(outside)
    )


def _constants(model: Any) -> list[Any]:
    inline = [
        attribute.t
        for node in model.graph.node
        for attribute in node.attribute
        if node.op_type == "Constant" and attribute.name == "value"
    ]
    return [*model.graph.initializer, *inline]


def as_half(values: np.ndarray[Any, Any], name: str = "a constant") -> np.ndarray[Any, Any]:
    """The values in float16. Raises ExportError where one is too large for that."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    lost = np.isfinite(values) & ~np.isfinite(half)
    if lost.any():
        raise ExportError(
            f"{name} has a value of {np.abs(values[lost]).max():.4g}, beyond float16; export for the CPU instead"
        )
    return half


def add_top(model: Any, count: int) -> None:
    """Return the `count` largest logits of every row [1, R, n], their ids, and the row's logsumexp [1, R] too.

    The logsumexp is spelled out over the maximum that TopK has found already.
    """
    from onnx import TensorProto, helper, numpy_helper

    wanted = {"top.count": [count], "top.zero": [0], "top.one": [1], "top.last": [-1]}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(values, np.int64), name) for name, values in wanted.items()
    )
    steps: list[tuple[str, list[str], list[str], dict[str, Any]]] = [
        ("TopK", ["logits", "top.count"], ["top_values", "top_ids"], {"axis": -1}),
        ("Slice", ["top_values", "top.zero", "top.one", "top.last"], ["top.peak"], {}),
        ("Sub", ["logits", "top.peak"], ["top.below"], {}),
        ("Exp", ["top.below"], ["top.weights"], {}),
        ("ReduceSum", ["top.weights", "top.last"], ["top.total"], {"keepdims": 1}),
        ("Log", ["top.total"], ["top.log"], {}),
        ("Add", ["top.log", "top.peak"], ["top.sum"], {}),
        ("Squeeze", ["top.sum", "top.last"], ["logsumexp"], {}),
    ]
    model.graph.node.extend(
        helper.make_node(operator, inputs, outputs, name=outputs[0], **attributes)
        for operator, inputs, outputs, attributes in steps
    )
    model.graph.output.extend(
        [
            helper.make_tensor_value_info("top_values", TensorProto.FLOAT, [1, "picked", count]),
            helper.make_tensor_value_info("top_ids", TensorProto.INT64, [1, "picked", count]),
            helper.make_tensor_value_info("logsumexp", TensorProto.FLOAT, [1, "picked"]),
        ]
    )
