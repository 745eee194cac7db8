"""What the operations of the evaluator share: widening, axes, and refusing what no device defines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from outrider.errors import BackendError

__all__ = ["Array", "axes_of", "axis_of", "check_indices", "is_integer", "refuse", "whole_numbers", "wide"]

Array = NDArray[Any]
HALF = np.dtype(np.float16)


def wide(value: Any) -> Any:
    """float32 for what is stored as float16, anything else as it is: arithmetic is never done in half precision."""
    if getattr(value, "dtype", None) == HALF:
        return value.astype(np.float32)
    return value


def refuse(operation: str, parameter: str, value: Any, why: str) -> NoReturn:
    """Raise the BackendError of a parameter whose value has no defined result, or is not supported here."""
    raise BackendError(f"the evaluator cannot run {operation!r} with {parameter} = {value!r}: {why}")


def is_integer(value: Any) -> bool:
    """Whether a tensor or scalar holds whole numbers (bool does not count)."""
    return np.asarray(value).dtype.kind in "iu"


def whole_numbers(values: Any) -> list[int]:
    """A vector parameter (axes, shape, pads) as plain ints."""
    return values.ravel().tolist() if isinstance(values, np.ndarray) else [int(value) for value in values]


def axis_of(operation: str, axis: Any, rank: int) -> int:
    """The axis counted from the front. Raises BackendError when the tensor has no such axis."""
    position = int(axis)
    if not -rank <= position < rank:
        refuse(operation, "axis", position, f"the tensor has {rank} axes")
    return position % rank


def axes_of(operation: str, axes: Any, rank: int) -> tuple[int, ...]:
    """Axes counted from the front; None stands for all. Raises BackendError for one absent or named twice."""
    if axes is None:
        return tuple(range(rank))
    positions = tuple(axis_of(operation, axis, rank) for axis in whole_numbers(axes))
    if len(set(positions)) != len(positions):
        refuse(operation, "axes", positions, "an axis is named twice")
    return positions


def check_indices(operation: str, indices: Any, sizes: Iterable[int], validate_indices: Any) -> None:
    """Refuse an index outside the tensor; the last axis of `indices` runs over `sizes` when there are several.

    Up to iOS 16 a negative index counts from the end. Since iOS 17 (which brought `validate_indices`, so its presence
    tells) a negative index is out of bounds, and what an index out of bounds reads is undefined, checked or not.
    """
    bounds = np.array(list(sizes))
    lowest = 0 if validate_indices is not None else -bounds
    values = np.asarray(indices)
    wrong = (values < lowest) | (values >= bounds)
    if wrong.any():
        shown = values[wrong].ravel()[0]
        refuse(operation, "indices", int(shown), f"the axes they point into have sizes {bounds.tolist()}")
