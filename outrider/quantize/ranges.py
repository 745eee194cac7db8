"""Ranges of activations from calibration runs, and the affine integers that cover them.

A float graph runs in ONNX Runtime with its intermediate tensors exposed, some at a time, and each tensor's
values go into running statistics. With 16-bit activations the observed minimum and maximum are usually the
right range: the step is fine enough even when one value in thousands is huge. Where it is not, a percentile,
the range of least squared error, or leaving out rows helps: the first token of a text (the attention
sink) has activations a thousand times larger than others (Chen et al., "PrefixQuant", 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError, MissingExtraError, UsageError

if TYPE_CHECKING:
    import onnx

__all__ = [
    "Affine",
    "Feed",
    "Range",
    "Statistics",
    "activation_ranges",
    "affine",
    "chosen_range",
    "dequantize",
    "observe",
    "quantize",
    "row_axes",
]

FloatArray = NDArray[np.float32]
Model = str | Path | bytes
Rule = Literal["minmax", "percentile", "mse"]

BINS = 4096  # of a histogram, half of them on either side of 0
CANDIDATES = 64  # edges that the search for the least squared error tries on either side
UNKNOWN_BYTES = 1 << 20  # what a tensor of unknown shape is taken to need
TYPES = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16)}


@dataclass(frozen=True)
class Range:
    """The values from `low` to `high` that a tensor takes."""

    low: float
    high: float

    def __post_init__(self) -> None:
        """Refuse what is no range."""
        if not (isfinite(self.low) and isfinite(self.high) and self.low <= self.high):
            raise ExportError(f"{self.low} to {self.high} is no range of activations")

    def widened(self, by: float) -> Range:
        """Both ends moved outwards by this part of them, for values that calibration did not see."""
        return Range(self.low - abs(self.low) * by, self.high + abs(self.high) * by)

    def joined(self, other: Range) -> Range:
        """The smallest range that holds both, for tensors that have to share a scale."""
        return Range(min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True)
class Affine:
    """An unsigned integer encoding: value = scale * (code - zero_point)."""

    scale: float  # exactly a float32
    zero_point: int
    bits: int = 16

    def __post_init__(self) -> None:
        """Refuse what no integer graph can hold."""
        if self.bits not in TYPES:
            raise ExportError(f"bits is {self.bits}; activations hold 8 or 16 bits")
        if not (isfinite(self.scale) and self.scale > 0) or not 0 <= self.zero_point <= self.top:
            raise ExportError(
                f"scale {self.scale} and zero point {self.zero_point} are no {self.bits}-bit encoding"
            )

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def range(self) -> Range:
        """The values that can be represented."""
        return Range(-self.zero_point * self.scale, (self.top - self.zero_point) * self.scale)


def affine(low: float, high: float, bits: int = 16) -> Affine:
    """The encoding that covers low..high, with 0 exactly representable; the range is widened to hold 0.

    A range that holds only 0 gets a step of 1 / (2^bits - 1): any step represents it.
    """
    within = Range(low, high)
    bottom, peak = min(within.low, 0.0), max(within.high, 0.0)
    top = (1 << bits) - 1
    width = peak - bottom if peak - bottom > 1e-30 else 1.0
    scale = float(np.float32(width / top))
    return Affine(scale, round(-bottom / scale), bits)


def quantize(values: NDArray[np.floating], encoding: Affine) -> NDArray[np.unsignedinteger[Any]]:
    """Codes of values of any shape, rounded half to even and saturated, as QuantizeLinear does."""
    codes = np.rint(np.asarray(values, np.float32) / np.float32(encoding.scale)) + np.float32(
        encoding.zero_point
    )
    saturated: NDArray[np.unsignedinteger[Any]] = np.clip(codes, 0, encoding.top).astype(TYPES[encoding.bits])
    return saturated


def dequantize(codes: NDArray[np.unsignedinteger[Any]], encoding: Affine) -> FloatArray:
    """The float32 values that codes of any shape stand for."""
    return (codes.astype(np.int32) - encoding.zero_point).astype(np.float32) * np.float32(encoding.scale)


@dataclass(frozen=True)
class Statistics:
    """What was seen of one tensor: the extremes, and a histogram over -limit..limit unless it is empty."""

    low: float
    high: float
    limit: float = 0.0  # a power of two; 0 without a histogram
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [BINS]

    @property
    def edges(self) -> NDArray[np.float64]:
        """Where the bins begin and end, [BINS + 1]."""
        return np.linspace(-self.limit, self.limit, BINS + 1)


def observe(seen: Statistics | None, values: NDArray[np.floating], histogram: bool = True) -> Statistics:
    """`seen` together with more values (of any shape, at least one)."""
    low, high = float(values.min()), float(values.max())
    if not (isfinite(low) and isfinite(high)):
        raise ExportError(f"an activation of the calibration run is {low if not isfinite(low) else high}")
    if seen is not None:
        low, high = min(low, seen.low), max(high, seen.high)
    if not histogram:
        return Statistics(low, high)
    limit = float(2 ** np.ceil(np.log2(max(-low, high, 1e-20))))
    limit = 2 * limit if high >= limit else limit
    counts = np.histogram(values, bins=BINS, range=(-limit, limit))[0].astype(np.int64)
    return Statistics(low, high, limit, counts if seen is None else counts + _stretched(seen, limit))


def _stretched(seen: Statistics, limit: float) -> NDArray[np.int64]:
    """The counts over a wider range: as limits are powers of two, whole bins are merged."""
    times = min(round(limit / seen.limit), BINS // 2)
    merged = np.zeros(BINS, np.int64)
    centre = np.arange(BINS) - BINS // 2
    np.add.at(merged, centre // times + BINS // 2, seen.counts)
    return merged


def chosen_range(
    seen: Statistics, rule: Rule = "minmax", *, coverage: float = 0.9999, bits: int = 16
) -> Range:
    """The range of a tensor by a rule.

    `minmax` clips nothing. `percentile` keeps this `coverage` of the values and drops as many on each side.
    `mse` weighs the rounding error inside against the clipping error outside for integers of `bits` bits.
    Raises UsageError for an unknown rule or a coverage outside 0..1.
    """
    if rule not in get_args(Rule):
        raise UsageError(f"rule is {rule!r}; known: {', '.join(get_args(Rule))}")
    if rule == "minmax" or seen.low == seen.high:
        return Range(seen.low, seen.high)
    if not 0 < coverage <= 1:
        raise UsageError(f"coverage is {coverage}; it is a part of the values, above 0 and up to 1")
    found = _percentiles(seen, coverage) if rule == "percentile" else _least_squares(seen, bits)
    return Range(max(found.low, seen.low), min(found.high, seen.high))


def _percentiles(seen: Statistics, coverage: float) -> Range:
    total = int(seen.counts.sum())
    dropped = int(total * (1 - coverage) / 2 + 1e-9)
    below = np.cumsum(seen.counts)
    first = int(np.searchsorted(below, dropped, side="right"))  # the first bin that must stay
    last = int(np.searchsorted(below, total - dropped, side="left"))
    return Range(float(seen.edges[first]), float(seen.edges[last + 1]))


def _least_squares(seen: Statistics, bits: int) -> Range:
    edges, steps = seen.edges, (1 << bits) - 1
    middles = (edges[:-1] + edges[1:]) / 2
    used = np.flatnonzero(seen.counts)
    highs = np.linspace(0, max(edges[used[-1] + 1], 0), CANDIDATES + 1)
    lows = np.linspace(0, min(edges[used[0]], 0), CANDIDATES + 1)
    above = np.maximum(middles[None, :] - highs[:, None], 0) ** 2 @ seen.counts  # [candidates]
    below = np.maximum(lows[:, None] - middles[None, :], 0) ** 2 @ seen.counts
    rounding = (highs[None, :] - lows[:, None]) ** 2 / (12 * steps**2) * seen.counts.sum()
    low, high = np.unravel_index(np.argmin(below[:, None] + above[None, :] + rounding), rounding.shape)
    return Range(float(lows[low]), float(highs[high]))


@dataclass(frozen=True)
class Feed:
    """The inputs of one calibration run, and which of its W rows count (None = all): not padding, not the sink."""

    inputs: Mapping[str, NDArray[Any]]
    rows: NDArray[np.bool_] | None = None  # [W]


def activation_ranges(
    model: Model,
    feeds: Iterable[Feed | Mapping[str, NDArray[Any]]],
    *,
    watch: Sequence[str] | None = None,
    rule: Rule = "minmax",
    coverage: float = 0.9999,
    bits: int = 16,
    margin: float = 0.0,
    axes: Mapping[str, int] | None = None,
    folder: str | Path | None = None,
    memory_mb: float = 512,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Range]:
    """The range of every watched tensor of a float ONNX graph over calibration runs.

    `watch` names tensors (None: every float32 tensor that depends on an input, and the float inputs).
    Tensors are exposed in batches of about `memory_mb`, and each batch runs all `feeds`, so more than one
    batch needs feeds that can be iterated again. Rows that a `Feed` leaves out are dropped from the tensors
    that `axes` names (`row_axes`). `margin` widens what was found. `folder` holds the external data of a
    model given as bytes. `progress` is told the part that is done.
    Raises UsageError for names that the graph does not have, ExportError when a value is not finite.
    """
    proto, place = _opened(model, folder)
    sizes = _watched(proto, watch)
    batches = list(_batches(sizes, memory_mb * 1e6))
    if len(batches) > 1 and iter(feeds) is feeds:
        raise UsageError(
            f"{len(batches)} passes over the calibration runs are needed to stay below {memory_mb:.0f} MB, and an "
            "iterator gives one; pass a sequence, or an object whose __iter__ starts again"
        )
    seen: dict[str, Statistics] = {}
    for done, batch in enumerate(batches):
        _run(_exposed(proto, batch), place, batch, feeds, seen, rule != "minmax", axes or {})
        if progress:
            progress((done + 1) / len(batches))
    if len(seen) < len(sizes):
        raise ExportError("calibration saw no activations; give it at least one run with rows that count")
    return {
        name: chosen_range(found, rule, coverage=coverage, bits=bits).widened(margin)
        for name, found in seen.items()
    }


def row_axes(narrow: Model, wide: Model, widths: tuple[int, int]) -> dict[str, int]:
    """Which axis of each tensor runs over the W tokens of a forward, from one decoder at two static widths.

    The axis is the first whose size is the same multiple of the width in both (a multiple where heads are
    folded into the rows, with tokens innermost). Tensors without such an axis are left out.
    """
    first, second = (_shapes(_opened(model, None)[0]) for model in (narrow, wide))
    found = {}
    for name in first.keys() & second.keys():
        pairs = zip(first[name][1], second[name][1], strict=False)
        axis = [i for i, (a, b) in enumerate(pairs) if a != b and a * widths[1] == b * widths[0]]
        if axis:
            found[name] = axis[0]
    return found


def _run(
    model: bytes,
    place: Path | None,
    batch: Sequence[str],
    feeds: Iterable[Feed | Mapping[str, NDArray[Any]]],
    seen: dict[str, Statistics],
    histogram: bool,
    axes: Mapping[str, int],
) -> None:
    session = _session(model, place)
    names = {value.name for value in session.get_inputs()}
    outputs = [name for name in batch if name not in names]
    for item in feeds:
        feed = item if isinstance(item, Feed) else Feed(item)
        values = {name: feed.inputs[name] for name in batch if name in names}
        values |= zip(outputs, session.run(outputs, dict(feed.inputs)), strict=True) if outputs else {}
        for name, tensor in values.items():
            kept = _kept(tensor, feed.rows, axes.get(name))
            if not kept.size:
                continue
            try:
                seen[name] = observe(seen.get(name), kept, histogram)
            except ExportError as error:
                raise ExportError(f"{name}: {error}; masks need a bounded value, such as -100") from None


def _kept(tensor: NDArray[Any], rows: NDArray[np.bool_] | None, axis: int | None) -> NDArray[Any]:
    """The tensor without the rows that do not count."""
    if rows is None or axis is None or rows.all():
        return tensor
    size = tensor.shape[axis]
    if size % len(rows):
        raise ExportError(f"axis {axis} of a tensor {tensor.shape} does not run over {len(rows)} rows")
    return np.compress(np.tile(rows, size // len(rows)), tensor, axis=axis)


def _session(model: bytes, place: Path | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    if place is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(place))
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _opened(model: Model, folder: str | Path | None) -> tuple[onnx.ModelProto, Path | None]:
    """The model without its external data, and the folder where that lies."""
    try:
        import onnx
    except ImportError as error:
        raise MissingExtraError("onnx", "export") from error
    if isinstance(model, bytes):
        return onnx.load_model_from_string(model), None if folder is None else Path(folder)
    return onnx.load(str(model), load_external_data=False), Path(model).resolve().parent


def _watched(proto: onnx.ModelProto, watch: Sequence[str] | None) -> dict[str, int]:
    """Bytes of every tensor to watch, in the order of the graph."""
    shapes, constants = _shapes(proto), _constants(proto)
    produced = [value.name for value in proto.graph.input if value.name not in constants]
    produced += [name for node in proto.graph.node for name in node.output if name]
    if watch is None:
        float32 = 1  # of onnx.TensorProto.DataType
        floats = {name for name, (kind, _) in shapes.items() if kind == float32} - constants
        watch = [name for name in produced if name in floats]
    missing = sorted(set(watch) - set(produced))
    if missing:
        raise UsageError(
            f"the graph has no tensors {', '.join(missing[:5])} (of {len(missing)} unknown names)"
        )
    wanted = set(watch)
    return {name: _bytes(shapes.get(name)) for name in produced if name in wanted}


def _bytes(shape: tuple[int, tuple[int, ...]] | None) -> int:
    if shape is None or any(size <= 0 for size in shape[1]):
        return UNKNOWN_BYTES
    return 4 * int(np.prod(shape[1], dtype=np.int64))


def _batches(sizes: Mapping[str, int], limit: float) -> Iterator[list[str]]:
    batch: list[str] = []
    total = 0
    for name, size in sizes.items():
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch


def _constants(proto: onnx.ModelProto) -> set[str]:
    """Initializers and everything that is computed from them alone."""
    known = {tensor.name for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if all(name in known for name in node.input if name):
            known.update(node.output)
    return known


def _shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Element type and dimensions (0 = unknown) of the tensors that shape inference knows."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in values
    }


def _exposed(proto: onnx.ModelProto, names: Sequence[str]) -> bytes:
    """The model with these tensors, and no others, as outputs."""
    import onnx

    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    inputs = {value.name for value in proto.graph.input}
    del changed.graph.output[:]
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in inputs)
    if not changed.graph.output:
        changed.graph.output.append(proto.graph.output[0])
    serialized: bytes = changed.SerializeToString()
    return serialized
