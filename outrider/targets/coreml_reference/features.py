"""Inputs, outputs and states that a model describes, with fixed and flexible shapes, and the check of what is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import BackendError
from outrider.targets.coreml_reference.types import DTYPES

__all__ = ["FeatureSpec", "check_inputs", "features_of"]

Array = np.ndarray[Any, np.dtype[Any]]
# ArrayFeatureType.ArrayDataType of FeatureTypes.proto
_ARRAY_TYPES = {65568: "fp32", 65600: "fp64", 131104: "int32", 131080: "int8", 65552: "fp16"}


@dataclass(frozen=True)
class FeatureSpec:
    """One described input, output or state: element type by MIL's name, default shape, and the other shapes it takes.

    `enumerated` lists the shapes that are allowed; `ranges` gives the smallest and largest size of each dimension
    (None: no upper bound). With neither, the default shape is the only one. `default` fills an optional input.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    enumerated: tuple[tuple[int, ...], ...] = ()
    ranges: tuple[tuple[int, int | None], ...] = ()
    optional: bool = False
    default: float = 0.0

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape may be given."""
        if self.enumerated:
            return shape in self.enumerated
        if self.ranges:
            sizes = zip(self.ranges, shape, strict=False)
            return len(shape) == len(self.ranges) and all(
                low <= size and (high is None or size <= high) for (low, high), size in sizes
            )
        return not self.shape or shape == self.shape

    def shapes_text(self) -> str:
        """The shapes it takes, for a message."""
        if self.enumerated:
            return "one of " + ", ".join(str(list(shape)) for shape in self.enumerated)
        if self.ranges:
            dims = (str(low) if low == high else f"{low}..{high or ''}" for low, high in self.ranges)
            return f"[{', '.join(dims)}]"
        return str(list(self.shape))


def features_of(descriptions: Any, where: str) -> dict[str, FeatureSpec]:
    """The features of a list of `FeatureDescription` messages; BackendError for a kind other than a multi-array."""
    return {each.name: _feature(each, where) for each in descriptions}


def check_inputs(
    specs: Mapping[str, FeatureSpec], given: Mapping[str, Array], function: str
) -> dict[str, Array]:
    """The arrays for every input; BackendError for what is missing, unknown, or of another shape or element type."""
    unknown = sorted(given.keys() - specs.keys())
    if unknown:
        raise BackendError(
            f"function {function!r} has no input {unknown[0]!r}; its inputs: {', '.join(specs) or 'none'}"
        )
    return {name: _checked(spec, given.get(name), function) for name, spec in specs.items()}


def _checked(spec: FeatureSpec, array: Array | None, function: str) -> Array:
    where = f"function {function!r}, input {spec.name!r}"
    wanted = DTYPES[spec.dtype]
    if array is None:
        if spec.optional:
            return np.full(spec.shape, spec.default, wanted)
        raise BackendError(f"{where} is not given: an array {wanted.name} {spec.shapes_text()}")
    if not isinstance(array, np.ndarray):
        raise BackendError(f"{where} is a {type(array).__name__}; give a numpy array {wanted.name}")
    if array.dtype != wanted:
        raise BackendError(f"{where} has dtype {array.dtype}; it takes {wanted.name}: convert it with astype")
    if not spec.takes(array.shape):
        raise BackendError(f"{where} has shape {list(array.shape)}; it takes {spec.shapes_text()}")
    return array


def _feature(description: Any, where: str) -> FeatureSpec:
    kind = description.type.WhichOneof("Type")
    if kind == "stateType":
        array = description.type.stateType.arrayType
    elif kind == "multiArrayType":
        array = description.type.multiArrayType
    else:
        raise BackendError(
            f"{where}, feature {description.name!r}: only multi-arrays can be evaluated, not {kind}"
        )
    if array.dataType not in _ARRAY_TYPES:
        raise BackendError(
            f"{where}, feature {description.name!r}: unknown array type number {array.dataType}"
        )
    return FeatureSpec(
        name=description.name,
        dtype=_ARRAY_TYPES[array.dataType],
        shape=tuple(int(size) for size in array.shape),
        enumerated=tuple(tuple(int(n) for n in each.shape) for each in array.enumeratedShapes.shapes),
        ranges=tuple((int(r.lowerBound), _upper(r.upperBound)) for r in array.shapeRange.sizeRanges),
        optional=bool(description.type.isOptional),
        default=_default(array),
    )


def _upper(bound: int) -> int | None:
    return None if bound < 0 or bound >= 2**31 - 1 else int(bound)


def _default(array: Any) -> float:
    kind = array.WhichOneof("defaultOptionalValue")
    return float(getattr(array, kind)) if kind else 0.0
