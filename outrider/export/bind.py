"""Fill a traced graph with weights: every slot node becomes the nodes and initializers of its scheme.

One matrix is in memory at a time: it is read, packed, and written to the external data file before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.export.config import ModelConfig
from outrider.export.onnx_form import MICROSOFT, OPSET, as_half
from outrider.export.slots import SlotWeights, matrix_slots, slot_shape
from outrider.quantize.calibration import calibrated_scheme
from outrider.quantize.carry import split_minima, with_sums
from outrider.quantize.pack import pack, relative_error
from outrider.quantize.report import SlotReport, describe
from outrider.quantize.schemes import (
    AnyScheme,
    BlockInt,
    Carry,
    DynamicInt8,
    Float,
    PackedMatrix,
    Recipe,
    Scheme,
)

__all__ = ["bind", "slot_scheme", "with_carried_minima"]

PAGE = 4096  # large tensors start on a page, so that a runtime can map them
INLINE_BYTES = 256  # smaller tensors stay in the graph file

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Stored:
    """A packed matrix in the data file: what is left in memory once it is written."""

    scheme: Scheme
    shape: tuple[int, int]
    tensors: Mapping[str, Any]  # part -> TensorProto
    report: SlotReport
    tied: bool = False  # the tensors are the embedding's, [N, K] also when they are float
    sums: bool = False  # columns for the block sums of the input follow those of the input


class DataFile:
    """Appends tensors to the external data file and returns the protos that point at them."""

    def __init__(self, file: BinaryIO, name: str, half: bool = False) -> None:
        self.file, self.name, self.half = file, name, half  # half: float32 is written as float16

    def add(self, name: str, values: NDArray[Any]) -> Any:
        """The proto of a tensor, its bytes in the graph when it is tiny."""
        from onnx import TensorProto, helper, numpy_helper

        values = np.ascontiguousarray(values)
        if self.half and values.dtype == np.float32:
            values = as_half(values, name)
        if values.nbytes <= INLINE_BYTES:
            return numpy_helper.from_array(values, name)
        self.file.write(b"\0" * (-self.file.tell() % (PAGE if values.nbytes >= PAGE else 64)))
        tensor = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(values.dtype),
            dims=values.shape,
            data_location=TensorProto.EXTERNAL,
        )
        place = {"location": self.name, "offset": self.file.tell(), "length": values.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self.file.write(values.data.cast("B"))
        return tensor


class Binder:
    """Collects the new nodes and initializers of a graph."""

    def __init__(
        self,
        weights: SlotWeights,
        recipe: Recipe,
        vectors: Mapping[str, NDArray[np.float32]],
        data: DataFile,
        stats: Mapping[str, NDArray[np.float32]],
        said_zeros: bool = False,
    ) -> None:
        self.weights, self.recipe, self.vectors, self.data, self.stats = weights, recipe, vectors, data, stats
        self.said_zeros = said_zeros
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}
        self.stored: dict[str, Stored] = {}
        self.replaced: dict[str, str] = {}  # output of a vector node -> its initializer

    def node(
        self, operator: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any
    ) -> str:
        """Append a node; returns its output."""
        from onnx import helper

        self.nodes.append(
            helper.make_node(operator, inputs, [output], name=output, domain=domain, **attributes)
        )
        return output

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """An initializer by name, written once."""
        if name not in self.initializers:
            self.initializers[name] = self.data.add(name, values)
        return name

    def part(self, stored: Stored, part: str, shape: Sequence[int] | None = None) -> str:
        """An initializer over a stored part, in another shape if asked; the bytes are the same."""
        from onnx import TensorProto

        tensor = TensorProto()
        tensor.CopyFrom(stored.tensors[part])
        if shape is not None and list(tensor.dims) != list(shape):
            tensor.name += ".flat"
            tensor.dims[:] = shape
        self.initializers.setdefault(tensor.name, tensor)
        return str(tensor.name)

    def replace(self, node: Any) -> None:
        """Put what a slot node stands for in its place; other nodes stay."""
        if node.domain != "outrider":
            node.input[:] = [self.replaced.get(name, name) for name in node.input]
            self.nodes.append(node)
            return
        slot = next(a.s.decode() for a in node.attribute if a.name == "slot")
        if node.op_type == "Vector":
            values = self.vectors[slot] if slot in self.vectors else self.weights.vector(slot)
            self.replaced[node.output[0]] = self.constant(slot, values)
        elif node.op_type == "Embedding":
            lookup(self, self.store(slot), node.input[0], node.output[0])
        else:
            product(self, self.store(slot), slot, node.input[0], node.output[0])

    def store(self, slot: str) -> Stored:
        """Pack a slot and write it, or point at the tied slot that holds the same bytes."""
        config = self.weights.config
        scheme = slot_scheme(self.recipe, config, slot)
        if slot == "head" and config.tie_embeddings:
            twin = self.stored["embedding"]
            same = scheme == slot_scheme(self.recipe, config, "embedding")
            if same and "correction" not in twin.tensors:  # which a product has in another form
                report = replace(
                    twin.report,
                    slot=slot,
                    bytes_before=0,
                    bytes_after=0,
                    reason="tied: shares the embedding's bytes",
                )
                self.stored[slot] = replace(twin, report=report, tied=True)
                return self.stored[slot]
        stored = self.write(slot, scheme)
        if slot == "head" and config.tie_embeddings:  # the source is counted with the embedding
            stored = replace(stored, report=replace(stored.report, bytes_before=0))
        self.stored[slot] = stored
        return stored

    def write(self, slot: str, scheme: AnyScheme) -> Stored:
        """Pack a slot and append its parts to the data file."""
        weight, raw, stats = self.weights.matrix(slot), self.weights.raw(slot), self.stats.get(slot)
        packed = stored = pack(weight, scheme, raw=raw, stats=stats)
        if packed.correction is not None and slot != "embedding":
            packed, stored = with_carried_minima(weight, packed, scheme)
        report = describe(slot, weight, packed, self.recipe.scheme_for(slot), raw, stats is not None)
        parts = {
            "weight": kernel_layout(stored, slot),
            "scales": stored.scales,
            "zero_points": stored.zero_points,
            "correction": None if stored.correction is None else stored.correction.T,  # [blocks, N]
        }
        arrays = {name: values for name, values in parts.items() if values is not None}
        tensors = {name: self.data.add(f"{slot}.{name}", values) for name, values in arrays.items()}
        report = replace(report, bytes_after=sum(values.nbytes for values in arrays.values()))
        return Stored(packed.scheme, packed.shape, tensors, report, sums=stored.shape != packed.shape)


def slot_scheme(recipe: Recipe, config: ModelConfig, slot: str) -> AnyScheme:
    """The scheme of a slot: the recipe's, as far as it can be had.

    An embedding takes the scheme of an 8-bit head with which it is tied. `mse` stands in for `gptq` where
    the inputs cannot be calibrated.
    """
    own, head = recipe.scheme_for(slot), recipe.scheme_for("head")
    tied = slot == "embedding" and config.tie_embeddings
    if tied and isinstance(head, BlockInt) and head.bits == 8 and isinstance(own, BlockInt):
        own = head
    inputs = None if slot == "embedding" else slot_shape(config, slot)[1]
    return calibrated_scheme(own, inputs)


def with_carried_minima(
    weight: NDArray[np.float32], packed: PackedMatrix, scheme: AnyScheme
) -> tuple[PackedMatrix, PackedMatrix]:
    """A product's matrix with minima, and what the kernel reads of it; rounded again where they cannot be carried."""
    split = split_minima(packed)
    if split is None:
        assert isinstance(scheme, Carry)
        rounded = pack(weight, scheme.eight_bit)
        return rounded, rounded
    kept, sums = split
    kept = replace(kept, details={"relative_error": relative_error(weight, kept)})
    return kept, with_sums(kept, sums)


def kernel_layout(packed: PackedMatrix, slot: str) -> NDArray[Any]:
    """Codes as the operator reads them: [N, blocks, bytes] in blocks, [N, K] for lookups, else [K, N]."""
    if isinstance(packed.scheme, BlockInt) or slot == "embedding":
        return packed.codes
    return packed.codes.T


def bind(
    model: Any,
    path: Path,
    weights: SlotWeights,
    recipe: Recipe,
    vectors: Mapping[str, NDArray[np.float32]],
    *,
    stats: Mapping[str, NDArray[np.float32]],
    progress: Progress | None = None,
    half: bool = False,
    said_zeros: bool = False,
) -> list[SlotReport]:
    """Replace the slot nodes of `model` in place and save it to `path` with its data file beside it.

    `half`: in a graph that computes in float16. `said_zeros`: symmetric blocks of 4 bits say their zero point.

    Raises ExportError when a slot of the decoder is left without a weight.
    """
    import onnx

    slots = matrix_slots(weights.config)
    with open(path.with_name(path.name + ".data"), "wb") as file:
        binder = Binder(
            weights, recipe, vectors, DataFile(file, path.name + ".data", half), stats, said_zeros
        )
        for node in model.graph.node:
            before = len(binder.stored)
            binder.replace(node)
            if progress and len(binder.stored) > before:
                progress(list(binder.stored)[-1], len(binder.stored), len(slots))
    missing = [slot for slot in slots if slot not in binder.stored]
    if missing:
        raise ExportError(f"{len(missing)} slots were left without a weight, the first is {missing[0]}")
    del model.graph.node[:], model.opset_import[:]
    model.graph.node.extend(binder.nodes)
    model.graph.initializer.extend(binder.initializers.values())
    domains = {node.domain for node in binder.nodes} - {""}
    model.opset_import.extend(
        [onnx.helper.make_opsetid("", OPSET)] + [onnx.helper.make_opsetid(d, 1) for d in sorted(domains)]
    )
    onnx.save(model, path)
    return [stored.report for stored in binder.stored.values()]


def lookup(binder: Binder, stored: Stored, tokens: str, output: str) -> None:
    """The nodes that read rows of a matrix: GatherBlockQuantized for blocks, Gather for floats."""
    if isinstance(stored.scheme, BlockInt):
        _lookup_blocks(binder, stored, tokens, output)
    elif isinstance(stored.scheme, DynamicInt8):
        raise ExportError("an embedding cannot be DynamicInt8: there is no activation to quantize")
    elif stored.scheme.dtype == "float16" and not binder.data.half:
        rows = binder.node("Gather", [binder.part(stored, "weight"), tokens], f"{output}.half")
        binder.node("Cast", [rows], output, to=1)
    else:
        binder.node("Gather", [binder.part(stored, "weight"), tokens], output)


def _lookup_blocks(binder: Binder, stored: Stored, tokens: str, output: str) -> None:
    N, K = stored.shape
    scheme = stored.scheme
    assert isinstance(scheme, BlockInt)
    blocks = -(-K // scheme.block)
    padded, ragged = blocks * scheme.block, K % scheme.block != 0
    corrected = "correction" in stored.tensors
    inputs = [
        binder.part(stored, "weight", [N, padded * scheme.bits // 8]),
        tokens,
        binder.part(stored, "scales"),
    ]
    if "zero_points" in stored.tensors:
        inputs.append(binder.part(stored, "zero_points"))
    rows = binder.node(
        "GatherBlockQuantized",
        inputs,
        f"{output}.padded" if ragged or corrected else output,
        MICROSOFT,
        bits=scheme.bits,
        block_size=scheme.block,
        gather_axis=0,
        quantize_axis=1,
    )
    if corrected:
        rows = _add_block_correction(binder, stored, tokens, rows, padded, output if not ragged else "")
    if ragged:
        bounds = [binder.constant(f"slice.{n}", np.array([n], np.int64)) for n in (0, K, 2)]
        binder.node("Slice", [rows, *bounds], output)


def _add_block_correction(
    binder: Binder, stored: Stored, tokens: str, rows: str, padded: int, output: str
) -> str:
    """Add each block's correction to all its values."""
    scheme = stored.scheme
    assert isinstance(scheme, BlockInt)
    blocks = padded // scheme.block
    shifts = binder.node(
        "Gather", [binder.part(stored, "correction"), tokens], f"{rows}.shift", axis=1
    )  # [blocks, 1, S]
    shifts = binder.node("Transpose", [shifts], f"{rows}.shift_rows", perm=[1, 2, 0])
    last = binder.constant("axis.last", np.array([-1], np.int64))
    shifts = binder.node("Unsqueeze", [shifts, last], f"{rows}.shift_blocks")
    shape = binder.constant(f"shape.blocks.{blocks}.{scheme.block}", np.array([1, -1, blocks, scheme.block]))
    split = binder.node("Reshape", [rows, shape], f"{rows}.blocks")
    total = binder.node("Add", [split, shifts], f"{rows}.corrected")
    flat = binder.constant(f"shape.flat.{padded}", np.array([1, -1, padded]))
    return binder.node("Reshape", [total, flat], output or f"{rows}.flat")


def product(binder: Binder, stored: Stored, slot: str, x: str, output: str) -> None:
    """The nodes of y = x Wᵀ + b under the slot's scheme."""
    bias = binder.weights.bias(slot)
    bias_name = "" if bias is None else binder.constant(f"{slot}.bias", bias)
    if isinstance(stored.scheme, BlockInt):
        _product_blocks(binder, stored, slot, x, output, bias_name)
    elif isinstance(stored.scheme, DynamicInt8):
        inputs = [x, binder.part(stored, "weight"), binder.part(stored, "scales"), "", bias_name]
        while inputs[-1] == "":
            inputs.pop()
        binder.node("DynamicQuantizeMatMul", inputs, output, MICROSOFT)
    else:
        _product_float(binder, stored, slot, x, output, bias_name)


def _product_float(binder: Binder, stored: Stored, slot: str, x: str, output: str, bias: str) -> None:
    weight = binder.part(stored, "weight")
    if isinstance(stored.scheme, Float) and stored.scheme.dtype == "float16" and not binder.data.half:
        weight = binder.node("Cast", [weight], f"{slot}.weight.float32", to=1)
    target = f"{output}.product" if bias else output
    if stored.tied:
        binder.node("FusedMatMul", [x, weight], target, MICROSOFT, transB=1)
    else:
        binder.node("MatMul", [x, weight], target)
    if bias:
        binder.node("Add", [target, bias], output)


def _product_blocks(binder: Binder, stored: Stored, slot: str, x: str, output: str, bias: str) -> None:
    N, K = stored.shape
    scheme = stored.scheme
    assert isinstance(scheme, BlockInt)
    zeros = binder.part(stored, "zero_points") if "zero_points" in stored.tensors else _middle(binder, stored)
    if stored.sums:
        x, K = _with_block_sums(binder, slot, x, K, scheme.block)
    inputs = [x, binder.part(stored, "weight"), binder.part(stored, "scales"), zeros, "", bias]
    while inputs[-1] == "":
        inputs.pop()
    sizes = {"K": K, "N": N, "bits": scheme.bits, "block_size": scheme.block}
    binder.node("MatMulNBits", inputs, output, MICROSOFT, accuracy_level=scheme.accuracy_level, **sizes)


def _middle(binder: Binder, stored: Stored) -> str:
    """The zero points of symmetric blocks, where they must be said: none, or the middle of 4 bits.

    Without them Arm's kernel for symmetric 4-bit blocks (KleidiAI's, on processors with dot products) gives a row of
    activations a single scale and cuts the scales of the weights to bfloat16; with them another of its kernels gives
    every block of activations its own and keeps the weights'. Both give a row the same result in any company.
    """
    scheme = stored.scheme
    assert isinstance(scheme, BlockInt)
    if not binder.said_zeros or scheme.bits != 4:
        return ""
    N, K = stored.shape
    blocks = -(-K // scheme.block)
    columns = -(-blocks // 2)
    return binder.constant(f"middle.{N}.{columns}", np.full((N, columns), 0x88, np.uint8))


def _with_block_sums(binder: Binder, slot: str, x: str, K: int, block: int) -> tuple[str, int]:
    """x with the sums of its blocks behind it and zeros up to a whole block, and the width of all.

    The operator sums a row in the same order in any company, and the product takes the sums as it takes x, so that
    the text cannot depend on the draft. Arm's kernels that keep to that take whole blocks only.
    """
    blocks = K // block
    zeros = -(K + blocks) % block
    shape = binder.constant(f"shape.blocks.{blocks}.{block}", np.array([1, -1, blocks, block]))
    last = binder.constant("axis.last", np.array([-1], np.int64))
    split = binder.node("Reshape", [x, shape], f"{x}.blocks.{block}")
    sums = binder.node("ReduceSum", [split, last], f"{x}.sums.{block}", keepdims=0)
    parts = [x, sums, _zeros(binder, x, zeros, slot == "head")] if zeros else [x, sums]
    return binder.node("Concat", parts, f"{x}.with_sums.{block}", axis=-1), K + blocks + zeros


def _zeros(binder: Binder, x: str, count: int, picked: bool) -> str:
    """Zeros [1, S, count] for the x [1, S, K] of any product, made once; the head's rows are `picked` from all."""
    from onnx import TensorProto, helper

    name = f"zeros.{'picked.' if picked else ''}{count}"
    if f"{name}.width" not in binder.initializers:
        rows = binder.node("Shape", [x], f"{name}.rows", start=0, end=2)
        width = binder.constant(f"{name}.width", np.array([count], np.int64))
        shape = binder.node("Concat", [rows, width], f"{name}.shape", axis=0)
        kind = TensorProto.FLOAT16 if binder.data.half else TensorProto.FLOAT
        binder.node("ConstantOfShape", [shape], name, value=helper.make_tensor("zero", kind, [1], [0]))
    return name
