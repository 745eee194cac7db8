"""Write an NPU graph as ONNX: in float for calibration, or quantized with one static scale per tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.export.npu_graph import NpuGraph, NpuNode, Value
from outrider.export.npu_scales import Scale, size_of, top_of
from outrider.export.npu_weights import DataStore, StoredWeights, part_values
from outrider.export.slots import SlotWeights

__all__ = ["write_float", "write_quantized"]

OPSET, IR_VERSION = 23, 11


class Writer:
    """Collects nodes and initializers of one file."""

    def __init__(self, graph: NpuGraph, store: DataStore) -> None:
        self.graph, self.store = graph, store
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}

    def constant(self, name: str, values: NDArray[Any], bits: int = 0) -> str:
        """An initializer by name."""
        if name not in self.initializers:
            self.initializers[name] = self.store.add(name, values, bits)
        return name

    def emit(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Append a node; returns its output."""
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, [output], name=f"{output}.node", **attributes))
        return output

    def save(self, path: Path, kind_of: Any) -> None:
        """Write the file; `kind_of(name)` is the ONNX type of an input or output."""
        import onnx
        from onnx import helper

        def values(items: Mapping[str, Value]) -> list[Any]:
            return [helper.make_tensor_value_info(name, kind_of(name), v.shape) for name, v in items.items()]

        graph = helper.make_graph(
            self.nodes,
            path.stem,
            values(self.graph.inputs),
            values(self.graph.outputs),
            list(self.initializers.values()),
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.producer_name, model.ir_version = "outrider", IR_VERSION
        onnx.save(model, path)


def write_float(graph: NpuGraph, weights: SlotWeights, path: Path) -> None:
    """The graph in float32 with its weights in `path`.data; `rows` int32, all else float."""
    from onnx import TensorProto

    with open(path.with_name(path.name + ".data"), "wb") as file:
        writer = Writer(graph, DataStore(file, path.name + ".data"))
        for name, vector in graph.vectors.items():
            writer.constant(name, vector)
        for name, shape in graph.shapes.items():
            writer.constant(name, shape)
        for name, part in graph.weights.items():
            matrix, bias = part_values(weights, part)
            writer.constant(name, matrix[:, :, None, None])
            if bias is not None:
                writer.constant(name.removesuffix(".weight") + ".bias", bias)
        for node in graph.nodes:
            operator = "Identity" if node.operator == "Cache" else node.operator
            writer.emit(operator, list(node.inputs), node.output, **node.attributes)
        for name in graph.masked:
            axes = writer.constant("axes.last", np.asarray([-1], np.int64))
            writer.emit("ReduceMax", [name, axes], top_of(name), keepdims=1)
        for name in sorted(graph.sized):
            writer.emit("ReduceMean", [writer.emit("Abs", [name], f"{name}.magnitude")], size_of(name))
        writer.save(path, lambda name: TensorProto.INT32 if name == "rows" else TensorProto.FLOAT)


class QuantizedWriter(Writer):
    """Every tensor goes through integers: quantized where it is made, dequantized where it is read."""

    def __init__(
        self,
        graph: NpuGraph,
        store: DataStore,
        scales: Mapping[str, Scale],
        stored: StoredWeights,
    ) -> None:
        super().__init__(graph, store)
        self.scales, self.stored = scales, stored
        self.read = {name for node in graph.nodes for name in node.inputs}

    def parameters(self, name: str) -> list[str]:
        """The initializers of a tensor's scale and zero point; tensors that share them share the initializers."""
        scale, root = self.scales[name], self.graph.root(name)
        return [
            self.constant(f"{root}.scale", np.asarray(scale.scale, np.float32)),
            self.constant(f"{root}.zero_point", np.asarray(scale.zero_point, scale.dtype)),
        ]

    def dequantize(self, codes: str, name: str) -> None:
        """Float values of a tensor from its codes, for whoever reads it."""
        if name in self.read:
            self.emit("DequantizeLinear", [codes, *self.parameters(name)], f"{name}.dq")

    def begin(self) -> None:
        """Inputs and small constants."""
        for name, values in self.graph.shapes.items():
            self.constant(name, values)
        for name, vector in self.graph.vectors.items():
            if name in self.graph.floating:
                self.constant(name, vector)
            else:
                self.dequantize(self.constant(f"{name}.q", self.scales[name].encode(vector)), name)
        for name, value in self.graph.inputs.items():
            if value.kind == "activation":
                self.dequantize(name, name)

    def kept(self, name: str) -> str:
        """A tensor that the data file already holds."""
        self.initializers[name] = self.store.protos[name]
        return name

    def weight(self, name: str) -> str:
        """A weight in float, from its integers or from half precision: [N, K, 1, 1], or [K, N] with blocks."""
        if name in self.graph.floating:
            return self.emit("Cast", [self.kept(name)], f"{name}.float", to=1)
        inputs = [self.kept(name + part) for part in ("", ".scales", ".zeros")]
        if name not in self.stored.blocks:
            return self.emit("DequantizeLinear", inputs, f"{name}.dq", axis=0)
        multipliers = [self.kept(name + part) for part in (".multipliers", ".scales", ".multipliers.zeros")]
        steps = self.emit("DequantizeLinear", multipliers, f"{name}.steps", axis=1)
        block = self.stored.blocks[name]
        return self.emit(
            "DequantizeLinear", [inputs[0], steps, inputs[2]], f"{name}.dq", axis=0, block_size=block
        )

    def bias(self, name: str, columns: str) -> str:
        """A dequantized bias [N] in the scale of the product's sums."""
        bias, weight_scales = self.stored.biases[name]
        scales = np.float32(self.scales[columns].scale) * weight_scales
        limits = np.iinfo(np.int32)
        codes = np.clip(np.rint(bias.astype(np.float64) / scales), limits.min, limits.max)
        inputs = [
            self.constant(name, codes.astype(np.int32)),
            self.constant(f"{name}.scales", scales),
            self.constant(f"{name}.zeros", np.zeros(len(scales), np.int32)),
        ]
        return self.emit("DequantizeLinear", inputs, f"{name}.dq", axis=0)

    def node(self, node: NpuNode) -> None:
        """A node between the integers that it reads and writes."""
        name = node.output
        inputs = [self.argument(argument, node) for argument in node.inputs]
        if name in self.graph.floating:
            self.emit(node.operator, inputs, name, **node.attributes)
            return
        if node.operator == "Cache":
            self.emit("QuantizeLinear", [*inputs, *self.parameters(name)], name)
            codes = self.emit("QuantizeLinear", [*inputs, *self.parameters(name)], f"{name}.q")
        else:
            result = self.emit(node.operator, inputs, f"{name}.float", **node.attributes)
            codes = name if name in self.graph.outputs else f"{name}.q"
            self.emit("QuantizeLinear", [result, *self.parameters(name)], codes)
        self.dequantize(codes, name)

    def argument(self, name: str, node: NpuNode) -> str:
        """What a node reads under this name."""
        if name in self.graph.weights or (name.endswith(".bias") and name in self.graph.floating):
            return self.weight(name)
        if name in self.stored.biases:
            return self.bias(name, node.inputs[0])
        plain = name in self.graph.shapes or name in self.graph.floating or name == "rows"
        return name if plain else f"{name}.dq"


def write_quantized(
    graph: NpuGraph, scales: Mapping[str, Scale], stored: StoredWeights, path: Path, store: DataStore
) -> None:
    """The graph with integers on every edge; inputs and outputs are codes."""
    from onnx import TensorProto

    writer = QuantizedWriter(graph, store, scales, stored)
    writer.begin()
    for node in graph.nodes:
        writer.node(node)

    def kind_of(name: str) -> int:
        if name == "rows":
            return int(TensorProto.INT32)
        return int(TensorProto.INT16 if scales[name].signed else TensorProto.UINT16)

    writer.save(path, kind_of)
