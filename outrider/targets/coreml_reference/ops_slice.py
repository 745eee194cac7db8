"""Slices, and writing into one."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, refuse, whole_numbers
from outrider.targets.coreml_reference.registry import operation

__all__ = ["slice_of"]

Index = tuple[int | slice, ...]


@operation("slice_by_index", rounds=False)
def slice_by_index(
    x: Any,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> Array:
    """x[begin:end:stride] on every axis, by numpy's rules. A masked begin or end is left out; a squeezed axis goes."""
    values = np.asarray(x)
    index = slice_of("slice_by_index", values.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    return np.asarray(values[index])


@operation("slice_by_size", rounds=False)
def slice_by_size(x: Any, begin: Any, size: Any) -> Array:
    """`size` values of every axis from `begin` on; a size of -1 means all that follow."""
    starts, sizes = whole_numbers(begin), whole_numbers(size)
    if not len(starts) == len(sizes) == x.ndim:
        refuse(
            "slice_by_size", "begin", starts, f"x is {x.shape}, size {sizes}: one number an axis is wanted"
        )
    slices = []
    for start, count, whole in zip(starts, sizes, x.shape, strict=True):
        first = start + whole if start < 0 else start
        last = whole if count == -1 else first + count
        if not 0 <= first <= last <= whole:
            refuse("slice_by_size", "size", sizes, f"from {starts} on it leaves x {x.shape}")
        slices.append(slice(first, last))
    return np.asarray(x[tuple(slices)])


@operation("slice_update", rounds=False)
def slice_update(
    x: Any,
    update: Any,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> Array:
    """A copy of x whose slice (as slice_by_index takes it) holds `update`."""
    index = slice_of("slice_update", x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    result: Array = x.copy()
    wanted = result[index].shape
    if wanted != np.shape(update):
        refuse("slice_update", "update", np.shape(update), f"the slice of x {x.shape} is {wanted}")
    result[index] = update
    return result


def slice_of(
    operation: str,
    shape: tuple[int, ...],
    begin: Any,
    end: Any,
    stride: Any,
    begin_mask: Any,
    end_mask: Any,
    squeeze_mask: Any,
) -> Index:
    """The numpy index of the parameters. Raises BackendError for lengths that are not the rank, or a stride of 0."""
    rank = len(shape)
    starts, ends = whole_numbers(begin), whole_numbers(end)
    steps = [1] * rank if stride is None else whole_numbers(stride)
    from_edge, to_edge, single = (
        [False] * rank if mask is None else list(mask) for mask in (begin_mask, end_mask, squeeze_mask)
    )
    if {len(part) for part in (starts, ends, steps, from_edge, to_edge, single)} != {rank} or 0 in steps:
        refuse(operation, "begin", starts, f"with end {ends} and stride {steps} it does not fit x {shape}")
    index: list[int | slice] = []
    for axis in range(rank):
        if single[axis]:
            index.append(_single(operation, 0 if from_edge[axis] else starts[axis], shape[axis]))
        else:
            first, last = None if from_edge[axis] else starts[axis], None if to_edge[axis] else ends[axis]
            index.append(slice(first, last, steps[axis]))
    return tuple(index)


def _single(operation: str, place: int, size: int) -> int:
    if not -size <= place < size:
        refuse(operation, "begin", place, f"the axis has {size} values, and one of them is picked")
    return place
