"""Write an NPU graph as ONNX: in float for calibration, or quantized with one static scale per tensor.

Activations are uint16; the cache is int16 around zero, since a second operand of a product that is uint16 would be
computed in 8 bits by the Hexagon compiler (measured: relative error 1e-2, against 2e-4 for int16). Weights have one
scale per output channel. Files of several widths read one data file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.export.npu_graph import NpuGraph, NpuNode, Value, WeightPart
from outrider.export.slots import SlotWeights
from outrider.quantize.channels import pack_channels
from outrider.quantize.layout import pack_nibbles
from outrider.quantize.npu_recipes import NpuRecipe
from outrider.quantize.ranges import Range
from outrider.quantize.report import SlotReport
from outrider.quantize.schemes import RawBlocks

__all__ = [
    "DataStore",
    "Scale",
    "choose_scales",
    "massive_slots",
    "part_values",
    "size_of",
    "stream_scale",
    "top_of",
    "write_float",
    "write_quantized",
]

Ranges = Mapping[str, Range]
Progress = Callable[[str, int, int], None]
OPSET, IR_VERSION = 23, 11
INLINE_BYTES = 256  # smaller tensors stay in the graph file
HIDDEN = 20.0  # logits below a row's largest score at which exp is 0 in 16 bits, with room for error
COARSE = 0.01  # a step that is so much of a tensor's mean magnitude is too coarse
HALF_PEAK = 30000.0  # of calibrated values in half precision, which ends at 65,504
MARGIN = 1.05  # beyond the calibrated range, for texts that were not seen


@dataclass(frozen=True)
class Scale:
    """value = scale * (code - zero_point), codes uint16, or int16 when signed."""

    scale: float
    zero_point: int
    signed: bool = False

    def __post_init__(self) -> None:
        """Refuse what no code can express."""
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise ExportError(
                f"a scale of {self.scale} quantizes nothing; the calibration saw no finite values"
            )

    @property
    def dtype(self) -> Any:
        """The numpy type of codes."""
        return np.int16 if self.signed else np.uint16

    def encode(self, values: NDArray[np.floating]) -> NDArray[Any]:
        """Codes of float values, clipped."""
        limits = np.iinfo(self.dtype)
        codes = np.rint(np.asarray(values, np.float64) / self.scale) + self.zero_point
        return np.clip(codes, limits.min, limits.max).astype(self.dtype)

    @classmethod
    def of_range(cls, low: float, high: float, signed: bool = False) -> Scale:
        """The scale whose codes just cover a range and zero."""
        low, high = min(low, 0.0), max(high, 0.0)
        if signed:
            return cls(float(np.float32(max(-low, high, 1e-6) / 32767)), 0, True)
        scale = float(np.float32(max(high - low, 1e-6) / 65535))
        return cls(scale, int(np.clip(round(-low / scale), 0, 65535)))


def choose_scales(graph: NpuGraph, ranges: Ranges) -> tuple[dict[str, Scale], float]:
    """A scale for every activation, and the value that a mask adds to what must not be seen.

    `ranges` are calibrated, by tensor, and by `top_of` the input of each softmax. Scores far below every row's
    largest are clipped there, and the mask is just large enough to push any score below: a mask of -1e4 would
    take all but a few codes from the scores.
    """
    found = dict(graph.fixed)
    masked = 1.0
    for name, scores in graph.masked.items():
        high = max(MARGIN * ranges[scores].high, 0.0)
        low = MARGIN * min(ranges[top_of(name)].low, 0.0) - HIDDEN
        found[name] = (low, high)
        masked = max(masked, high - low)
    found |= {name: (-masked, 0.0) for name in graph.inputs if name.startswith("mask_")}
    found |= {name: (float(v.min()), float(v.max())) for name, v in graph.vectors.items()}
    members: dict[str, list[str]] = {}
    for name in graph.activations():
        members.setdefault(graph.root(name), []).append(name)
    scales = {}
    for names in members.values():
        parts = [found.get(name) or _wide(ranges[name]) for name in names if name in found or name in ranges]
        if not parts:
            raise ExportError(f"calibration found no range for {names[0]}")
        low, high = min(part[0] for part in parts), max(part[1] for part in parts)
        signed = any(name in graph.symmetric for name in names)
        scales.update(dict.fromkeys(names, Scale.of_range(low, high, signed)))
    return scales, -masked


def massive_slots(graph: NpuGraph, ranges: Ranges) -> list[str]:
    """The `down` products whose inputs or outputs are so far apart that 16-bit steps would drown the usual values.

    A few layers write the huge values of an attention sink into the residual stream ("massive activations", Sun et
    al. 2024): in SmolLM2-135M one of them has 24,900 where other tokens have 1.
    """
    found = []
    for slot in (part.slot for part in graph.weights.values() if part.slot.endswith(".down")):
        tensors = (slot, f"{slot.removesuffix('down')}gated")
        steps = [(ranges[name].high - ranges[name].low) / 65535 for name in tensors]
        usual = [ranges[size_of(name)].low for name in tensors]
        if any(step > COARSE * size for step, size in zip(steps, usual, strict=True)):
            found.append(slot)
    return found


def stream_scale(graph: NpuGraph, ranges: Ranges) -> float:
    """A power of two that brings the residual stream into half precision, 1 where it already fits.

    Gemma's residual streams reach beyond 65,504, the largest number of half precision.
    """
    stream = [node.output for node in graph.nodes if node.operator == "Add" and node.output in graph.floating]
    peak = max(max(-ranges[name].low, ranges[name].high) for name in stream)
    return 1.0 if peak < HALF_PEAK else float(2.0 ** -np.ceil(np.log2(peak / HALF_PEAK)))


def size_of(name: str) -> str:
    """The tensor of a float graph that holds the mean magnitude of another."""
    return f"{name}.size"


def _wide(found: Range) -> tuple[float, float]:
    return MARGIN * found.low, MARGIN * found.high


def top_of(masked: str) -> str:
    """The tensor of a float graph that holds the largest value of each row of a softmax's input."""
    return f"{masked}.top"


class DataStore:
    """The data file that the graphs of all widths read; a tensor is written once, by name."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name
        self.protos: dict[str, Any] = {}

    def add(self, name: str, values: NDArray[Any], bits: int = 0) -> Any:
        """The proto of a tensor; `bits` 4 packs int8 codes two a byte."""
        from onnx import TensorProto, helper

        if name in self.protos:
            return self.protos[name]
        kind = TensorProto.INT4 if bits == 4 else helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=values.shape)
        raw = np.ascontiguousarray(values)
        if bits == 4:
            raw = pack_nibbles(raw.reshape(-1).view(np.uint8) & np.uint8(0x0F))
        if raw.nbytes <= INLINE_BYTES:
            tensor.raw_data = raw.tobytes()
        else:
            self._place(tensor, raw)
        self.protos[name] = tensor
        return tensor

    def _place(self, tensor: Any, raw: NDArray[Any]) -> None:
        self.file.write(b"\0" * (-self.file.tell() % 64))
        tensor.data_location = tensor.EXTERNAL
        place = {"location": self.name, "offset": self.file.tell(), "length": raw.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self.file.write(raw.data.cast("B"))


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
        for name, values in {**graph.vectors, **graph.shapes}.items():
            writer.constant(name, values)
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


def part_values(
    weights: SlotWeights, part: WeightPart
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """The float weight [N, K] and bias [N] of a convolution."""
    rows, factor = slice(*part.rows), np.float32(part.factor)
    bias = weights.bias(part.slot)
    return weights.matrix(part.slot)[rows] * factor, None if bias is None else bias[rows] * factor


@dataclass(frozen=True)
class StoredWeights:
    """What the data file holds of the weights, and what their products' biases need: (bias, scales) by bias."""

    reports: tuple[SlotReport, ...]
    biases: Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def store_weights(
    graph: NpuGraph,
    weights: SlotWeights,
    recipe: NpuRecipe,
    store: DataStore,
    *,
    moments: Mapping[str, NDArray[np.float32]],
    progress: Progress | None = None,
) -> StoredWeights:
    """Round every weight of a graph and append it to the data file, one slot in memory at a time."""
    parts: dict[str, list[str]] = {}
    for name, part in graph.weights.items():
        parts.setdefault(part.slot, []).append(name)
    reports, biases = [], {}
    for done, (slot, names) in enumerate(parts.items()):
        weight, bias = weights.matrix(slot), weights.bias(slot)
        if f"{slot}.weight" in graph.floating:
            factor = np.float32(graph.weights[f"{slot}.weight"].factor)
            scaled = None if bias is None else bias * factor
            reports.append(_store_half(slot, weight * factor, scaled, store, weights.raw(slot)))
            continue
        packed = pack_channels(
            weight, recipe.bits_for(slot), recipe.method_for(weight.shape[1]), moment=moments.get(slot)
        )
        for name in names:
            part = graph.weights[name]
            rows, scales = slice(*part.rows), packed.scales[slice(*part.rows)] * np.float32(part.factor)
            store.add(name, packed.codes[rows][:, :, None, None], packed.bits)
            store.add(f"{name}.scales", scales)
            store.add(f"{name}.zeros", np.zeros(len(scales), np.int8), packed.bits)
            if bias is not None:
                biases[name.removesuffix(".weight") + ".bias"] = (
                    bias[rows] * np.float32(part.factor),
                    scales,
                )
        how = f"quantized per output channel ({packed.method})"
        became = (f"int{packed.bits}-channel", packed.nbytes, packed.relative_error, how)
        reports.append(_report(slot, weight, weights.raw(slot), became))
        if progress:
            progress(slot, done + 1, len(parts))
    return StoredWeights(tuple(reports), biases)


def _store_half(
    slot: str,
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    store: DataStore,
    raw: Sequence[RawBlocks] | None,
) -> SlotReport:
    half = weight.astype(np.float16)
    store.add(f"{slot}.weight", half[:, :, None, None])
    if bias is not None:
        store.add(f"{slot}.bias", bias.astype(np.float16))
    lost = np.linalg.norm(weight - half.astype(np.float32)) / max(float(np.linalg.norm(weight)), 1e-30)
    reason = "left in float16: an attention sink makes its values thousands of times larger than the others"
    return _report(slot, weight, raw, ("fp16", half.nbytes, float(lost), reason))


def _report(
    slot: str,
    weight: NDArray[np.float32],
    raw: Sequence[RawBlocks] | None,
    became: tuple[str, int, float, str],  # scheme, bytes, relative error, reason
) -> SlotReport:
    after, nbytes, error, reason = became
    return SlotReport(
        slot=slot,
        shape=(weight.shape[0], weight.shape[1]),
        before="+".join(dict.fromkeys(part.type_name for part in raw)) if raw else str(weight.dtype),
        after=after,
        bytes_before=sum(part.data.nbytes for part in raw) if raw else weight.nbytes,
        bytes_after=nbytes,
        relative_error=error,
        carried=False,
        reason=reason,
    )


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
        """A weight [N, K, 1, 1] in float, from its integers or from half precision."""
        if name in self.graph.floating:
            return self.emit("Cast", [self.kept(name)], f"{name}.float", to=1)
        inputs = [self.kept(name + part) for part in ("", ".scales", ".zeros")]
        return self.emit("DequantizeLinear", inputs, f"{name}.dq", axis=0)

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
