"""What is known to keep a Core ML program off Apple's Neural Engine, or to cost it there: a table of rules.

Apple publishes no list of what its compiler for the Neural Engine takes. Every rule names the public page or issue
that it comes from; what no page speaks of, no rule speaks of. Only a Mac can say where an operation really runs
(`MLComputePlan`, see `ane_lint.py`). Some sources are about Core AI, Apple's newer framework, or about the older
neural network format, on the same hardware. Read in November 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outrider.targets.coreml_reference.structure import MilOperation
from outrider.targets.coreml_reference.types import MilType, bits_of
from outrider.targets.mil_outline import FunctionOutline

__all__ = ["RULES", "Rule", "Severity", "Spot"]

Severity = Literal["error", "warning", "info"]

MAX_RANK = 5
MAX_AXIS = 16384
LANE = 32  # float16 numbers in the 64 bytes that the last axis is padded to
MIN_LUT_GROUP = 8  # output channels that share one lookup table
DTYPES = ("fp16", "int8", "int16", "uint8", "uint16")
PRODUCTS = ("conv", "conv_transpose", "linear", "matmul", "einsum")
REDUCTIONS = ("softmax", "reduce_mean", "reduce_sum", "reduce_max")
GATHERS = (
    "gather", "gather_along_axis", "gather_nd", "scatter", "scatter_along_axis", "scatter_nd", "embedding",
)  # fmt: skip
DATA_SIZED = ("range_1d", "shape", "non_zero")
RECURRENT = ("lstm", "gru", "rnn")

APPLE_RULES = (
    "https://github.com/apple/coreai-models/blob/main/skills/skills/model-authoring/references/"
    "neural_engine_rules.md"
)
APPLE_ISSUES = "https://github.com/apple/coreai-models/blob/main/skills/skills/model-authoring/references/common_issues.md"
GUIDE = "https://apple.github.io/coremltools/docs-guides/source"


@dataclass(frozen=True)
class Spot:
    """Where a rule applies: an operation by its first output, or an input. `severity` None: the rule's own."""

    place: str
    detail: str
    severity: Severity | None = None


@dataclass(frozen=True)
class Rule:
    """One rule: what it says, how bad that is, who said so, and what finds its places in a function."""

    id: str
    severity: Severity
    says: str
    source: str
    find: Callable[[FunctionOutline], Iterable[Spot]]


def _rank(function: FunctionOutline) -> Iterator[Spot]:
    for name, kind in function.activations():
        if len(kind.shape) > MAX_RANK:
            yield Spot(name, f"has rank {len(kind.shape)}: {kind}")


def _range_shapes(function: FunctionOutline) -> Iterator[Spot]:
    """Ranges of the description, and dimensions that nothing but a range explains."""
    for name, flexibility in function.flexible.items():
        if flexibility == "range":
            yield Spot(name, f"takes a range of shapes: {function.program.inputs[name]}")
    if "enumerated" in function.flexible.values():
        return
    for name, kind in function.activations():
        if None in kind.shape and name not in function.flexible:
            yield Spot(name, f"has a dimension that is known only when it runs: {kind}")


def _enumerated_shapes(function: FunctionOutline) -> Iterator[Spot]:
    for name, flexibility in function.flexible.items():
        if flexibility == "enumerated":
            yield Spot(name, f"takes one of several shapes: {function.program.inputs[name]}")


def _dtype(function: FunctionOutline) -> Iterator[Spot]:
    boundary = _converted_at_the_boundary(function)
    for name, kind in function.activations():
        if kind.dtype not in DTYPES and name not in boundary:
            yield Spot(name, f"is {kind.dtype}: {kind}", "warning" if kind.dtype == "bool" else None)


def _boundary_dtype(function: FunctionOutline) -> Iterator[Spot]:
    for name in sorted(_converted_at_the_boundary(function)):
        yield Spot(name, f"is {function.types[name].dtype} outside and float16 inside")


def _converted_at_the_boundary(function: FunctionOutline) -> set[str]:
    """float32 inputs that are only cast, and outputs that are only the result of a cast."""
    readers: dict[str, set[str]] = {}
    for step in function.steps:
        for name in _read(step):
            readers.setdefault(name, set()).add(step.type)
    given = {
        name
        for name, kind in function.program.inputs.items()
        if kind.dtype == "fp32" and readers.get(name, {"cast"}) == {"cast"}
    }
    made = {step.output for step in function.steps if step.type == "cast"}
    returned = {
        name for name in function.program.outputs if name in made and function.types[name].dtype == "fp32"
    } - readers.keys()
    return given | returned


def _axis_length(function: FunctionOutline) -> Iterator[Spot]:
    """Also weights: a head that is not split has an axis as long as the vocabulary."""
    for step in function.steps:
        for name in (*_read(step), *(name for name, _ in step.outputs)):
            longest = max((size or 0 for size in function.types[name].shape), default=0)
            if longest > MAX_AXIS:
                severity: Severity | None = None if step.type in PRODUCTS else "warning"
                yield Spot(step.output, f"{step.type}: {name} has an axis of {longest}", severity)


def _narrow(function: FunctionOutline) -> Iterator[Spot]:
    """A function for one or two tokens cannot do otherwise, which is worth knowing, no more."""
    width = _width(function)
    severity: Severity | None = "info" if width in (1, 2) else None
    for name, kind in function.activations():
        if kind.shape and kind.shape[-1] is not None and kind.shape[-1] < LANE:
            yield Spot(name, f"the last axis holds {kind.shape[-1]} of {LANE} numbers: {kind}", severity)


def _width(function: FunctionOutline) -> int | None:
    """Tokens of a forward: the last axis of the first input that is no state."""
    kinds = (function.program.inputs.get("x"), *function.program.inputs.values())
    shapes = (kind.shape for kind in kinds if kind is not None and not kind.state)
    first = next(shapes, ())
    return first[-1] if first else None


def _alignment(function: FunctionOutline) -> Iterator[Spot]:
    for name in (*function.program.inputs, *function.program.outputs):
        kind = function.types[name]
        last = kind.shape[-1] if kind.shape else None
        if not kind.state and last is not None and last >= LANE and last * bits_of(kind.dtype) % 512:
            yield Spot(name, f"the last axis takes {last * bits_of(kind.dtype) // 8} bytes: {kind}")


def _layout(function: FunctionOutline) -> Iterator[Spot]:
    for step in function.steps:
        if step.type not in (*PRODUCTS, *REDUCTIONS):
            continue
        kind = function.types[step.output]
        if len(kind.shape) < 4:
            yield Spot(step.output, f"{step.type} returns rank {len(kind.shape)}: {kind}")


def _of_types(*names: str) -> Callable[[FunctionOutline], Iterator[Spot]]:
    """Finds operations by their type alone."""

    def find(function: FunctionOutline) -> Iterator[Spot]:
        for step in function.steps:
            if step.type in names:
                yield Spot(step.output, step.type)

    return find


def _state(function: FunctionOutline) -> Iterator[Spot]:
    for name, kind in function.program.inputs.items():
        if kind.state:
            yield Spot(name, str(kind))


def _state_alignment(function: FunctionOutline) -> Iterator[Spot]:
    for name, kind in function.program.inputs.items():
        if kind.state and kind.shape and (kind.shape[-1] is None or kind.shape[-1] % LANE):
            yield Spot(name, f"the last axis of the state holds {kind.shape[-1]}: {kind}")


def _indexed_write(function: FunctionOutline) -> Iterator[Spot]:
    for step in function.steps:
        if step.type == "slice_update" and not function.is_constant(step, "begin"):
            yield Spot(step.output, "slice_update begins where a tensor says")


def _blockwise(function: FunctionOutline) -> Iterator[Spot]:
    """Scales along one axis, one for each index of it, are the Neural Engine's; any others are blocks."""
    for step in function.program.operations:
        scale, data = function.operand(step, "scale"), function.operand(step, "data")
        if step.type != "constexpr_blockwise_shift_scale" or scale is None or data is None:
            continue
        scaled = [axis for axis, count in enumerate(scale.shape) if count != 1]
        if len(scaled) > 1 or any(scale.shape[axis] != data.shape[axis] for axis in scaled):
            yield Spot(step.output, f"{data} has scales {_dims(scale)}")


def _lut_groups(function: FunctionOutline) -> Iterator[Spot]:
    """A table [groups of each axis..., entries, width of an entry]; before iOS 18 there is one for all."""
    for step in function.program.operations:
        lut, indices = function.operand(step, "lut"), function.operand(step, "indices")
        if step.type != "constexpr_lut_to_dense" or lut is None or indices is None:
            continue
        if len(lut.shape) != len(indices.shape) + 2:
            continue
        sizes = zip(indices.shape, lut.shape[:-2], strict=True)
        shared = [size // groups for size, groups in sizes if size and groups and groups > 1]
        if shared and min(shared) < MIN_LUT_GROUP:
            yield Spot(step.output, f"a table for every {min(shared)} channels: {_dims(lut)}")


def _softmax(function: FunctionOutline) -> Iterator[Spot]:
    for step in function.steps:
        kind, axis = function.operand(step, "x"), function.constant(step, "axis")
        if step.type != "softmax" or kind is None:
            continue
        place = axis if isinstance(axis, int) else -1
        if len(kind.shape) != 4 or place % 4 != 1:
            yield Spot(step.output, f"softmax along axis {place} of {kind}")


def _linear(function: FunctionOutline) -> Iterator[Spot]:
    for step in function.steps:
        weight = step.type == "matmul" and any(function.is_constant(step, key) for key in ("x", "y"))
        if step.type == "linear" or weight:
            yield Spot(step.output, f"{step.type} with a weight")


def _infinity(function: FunctionOutline) -> Iterator[Spot]:
    used = {name for step in function.steps for name in _read(step)}
    for name, value in function.constants.items():
        if name in used and value.dtype.kind == "f" and np.isneginf(value).any():
            yield Spot(name, "a constant holds -inf")


def _read(step: MilOperation) -> dict[str, None]:
    """The names that an operation reads, each once and in order."""
    return dict.fromkeys(name for name in step.arguments() if isinstance(name, str))


def _dims(kind: MilType) -> str:
    return " x ".join(str(size) for size in kind.shape)


RULES: tuple[Rule, ...] = (
    Rule("rank", "error", "a tensor has more than five axes",
         "https://github.com/microsoft/onnxruntime/issues/14212", _rank),
    Rule("range-shape", "error", "shapes are known only when it runs",
         "https://developer.apple.com/forums/thread/724930", _range_shapes),
    Rule("enumerated-shape", "warning", "one function takes several shapes; a function for each is safer",
         "https://github.com/apple/coremltools/issues/1909", _enumerated_shapes),
    Rule("dtype", "error", "the Neural Engine computes in float16, int8 and int16", APPLE_RULES, _dtype),
    Rule("boundary-dtype", "warning", "float32 inputs and outputs are converted in every forward",
         f"{GUIDE}/model-input-and-output-types.html", _boundary_dtype),
    Rule("axis-length", "error", f"an axis is longer than {MAX_AXIS}",
         "https://github.com/apple/coremltools/issues/1003", _axis_length),
    Rule("narrow", "warning", "the last axis is padded to 64 bytes", APPLE_RULES, _narrow),
    Rule("alignment", "warning", "the last axis of an input or output is no multiple of 64 bytes",
         APPLE_RULES, _alignment),
    Rule("layout", "warning", "its layout is (batch, channels, 1, sequence)",
         "https://machinelearning.apple.com/research/neural-engine-transformers", _layout),
    Rule("gather", "error", "values that are picked or written by index leave it",
         "https://github.com/apple/coremltools/issues/1103", _of_types(*GATHERS)),
    Rule("topk", "error", "topk and what sorts leave it",
         "https://github.com/roboflow/rf-detr/pull/1495", _of_types("topk", "argsort")),
    Rule("recurrent", "error", "recurrent layers leave it",
         "https://github.com/apple/coremltools/issues/337", _of_types(*RECURRENT)),
    Rule("data-sized", "error", "it runs fully static programs", APPLE_RULES, _of_types(*DATA_SIZED)),
    Rule("state", "warning", "a cache kept in a state is fragile there; pass it in and return the new rows",
         "https://github.com/apple/coremltools/issues/2600", _state),
    Rule("state-alignment", "error", "a state whose last axis is no multiple of 32 fails there",
         "https://github.com/apple/coremltools/issues/2631", _state_alignment),
    Rule("indexed-write", "warning", "a write at a place that a tensor says crashed there",
         "https://github.com/apple/coreai-models/issues/5", _indexed_write),
    Rule("blockwise-scale", "error", "scales for blocks are the GPU's format; for it, Apple recommends one a channel",
         f"{GUIDE}/opt-quantization-perf.html", _blockwise),
    Rule("lut-groups", "warning", f"lookup tables for fewer than {MIN_LUT_GROUP} channels each slow it down",
         f"{GUIDE}/opt-palettization-perf.html", _lut_groups),
    Rule("softmax-axis", "warning", "softmax is split well along channels only", APPLE_RULES, _softmax),
    Rule("silu", "warning", "silu was lowered to float32 there; gate * sigmoid(gate) is not",
         APPLE_ISSUES, _of_types("silu")),
    Rule("linear", "warning", "a product with a weight is a 1x1 convolution there", APPLE_RULES, _linear),
    Rule("fused-attention", "warning", "it has no fused attention; heads are computed one by one",
         APPLE_RULES, _of_types("scaled_dot_product_attention")),
    Rule("infinity", "error", "it does not handle -inf in a softmax; -40000 does the same", APPLE_ISSUES, _infinity),
)  # fmt: skip
"""Every rule, by what it looks at: shapes, types, layout, operations, states, compression, arithmetic."""
