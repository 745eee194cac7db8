"""The weights of NPU graphs in one data file that the graphs of all widths read: integers per output channel.

A weight is int8 or int4 with one scale per output channel, or int4 with a whole multiplier for every block of a
row besides, or half precision where a layer feeds an attention sink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from outrider.export.npu_graph import NpuGraph, WeightPart
from outrider.export.slots import SlotWeights
from outrider.quantize.channels import ChannelMatrix, pack_channels
from outrider.quantize.layout import pack_nibbles
from outrider.quantize.npu_recipes import NpuRecipe
from outrider.quantize.report import SlotReport
from outrider.quantize.schemes import RawBlocks

__all__ = ["DataStore", "StoredWeights", "pack_slot", "part_values", "store_weights"]

INLINE_BYTES = 256  # smaller tensors stay in the graph file
Progress = Callable[[str, int, int], None]


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


def part_values(
    weights: SlotWeights, part: WeightPart
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """The float weight [N, K] and bias [N] of a convolution."""
    rows, factor = slice(*part.rows), np.float32(part.factor)
    bias = weights.bias(part.slot)
    return weights.matrix(part.slot)[rows] * factor, None if bias is None else bias[rows] * factor


@dataclass(frozen=True)
class StoredWeights:
    """What the data file holds of the weights, and what their products' biases need: (bias, scales) by bias.

    `blocks` are the inputs that share a multiplier, of the weights that have some.
    """

    reports: tuple[SlotReport, ...]
    blocks: Mapping[str, int]
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
    reports: list[SlotReport] = []
    biases: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    blocks: dict[str, int] = {}
    for done, (slot, names) in enumerate(parts.items()):
        weight, bias, raw = weights.matrix(slot), weights.bias(slot), weights.raw(slot)
        if f"{slot}.weight" in graph.floating:
            factor = np.float32(graph.weights[f"{slot}.weight"].factor)
            scaled = None if bias is None else bias * factor
            reports.append(_store_half(slot, weight * factor, scaled, store, raw))
            continue
        packed = pack_slot(slot, weight, recipe, moments, blocked=bias is None)
        for name in names:
            part = graph.weights[name]
            scales = _store_rows(name, packed, part, store)
            if packed.multipliers is not None:
                blocks[name] = weight.shape[1] // packed.multipliers.shape[1]
            if bias is not None:
                rows = bias[slice(*part.rows)] * np.float32(part.factor)
                biases[name.removesuffix(".weight") + ".bias"] = (rows, scales)
        how = f"quantized per output channel ({packed.method})"
        shared = (
            "channel" if packed.multipliers is None else f"b{weight.shape[1] // packed.multipliers.shape[1]}"
        )
        became = (f"int{packed.bits}-{shared}", packed.nbytes, packed.relative_error, how)
        reports.append(_report(slot, weight, raw, became))
        if progress:
            progress(slot, done + 1, len(parts))
    return StoredWeights(tuple(reports), blocks, biases)


def pack_slot(
    slot: str,
    weight: NDArray[np.float32],
    recipe: NpuRecipe,
    moments: Mapping[str, NDArray[np.float32]],
    *,
    blocked: bool,
) -> ChannelMatrix:
    """A slot's matrix as the recipe wants it; products with a bias take no blocks."""
    inputs = weight.shape[1]
    return pack_channels(
        weight,
        recipe.bits_for(slot),
        recipe.method_for(inputs),
        block=recipe.block_for(slot, inputs) if blocked else None,
        moment=moments.get(slot),
    )


def _store_rows(name: str, packed: ChannelMatrix, part: WeightPart, store: DataStore) -> NDArray[np.float32]:
    """Append the rows of one product: [N, K, 1, 1] for a convolution, [K, N] with blocks. Returns their scales."""
    rows = slice(*part.rows)
    scales = packed.scales[rows] * np.float32(part.factor)
    store.add(f"{name}.scales", scales)
    if packed.multipliers is None:
        store.add(name, packed.codes[rows][:, :, None, None], packed.bits)
        store.add(f"{name}.zeros", np.zeros(len(scales), np.int8), packed.bits)
        return scales
    multipliers = np.ascontiguousarray(packed.multipliers[rows].T)  # [K / block, N]
    store.add(name, np.ascontiguousarray(packed.codes[rows].T), packed.bits)
    store.add(f"{name}.zeros", np.zeros(multipliers.shape, np.int8), packed.bits)
    store.add(f"{name}.multipliers", multipliers)
    store.add(f"{name}.multipliers.zeros", np.zeros(len(scales), np.uint8))
    return scales


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
