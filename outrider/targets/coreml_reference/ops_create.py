"""Operations that make tensors: filled, counted, from a shape, or of positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, axis_of, check_indices, refuse, whole_numbers
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []

ZERO = np.float32(0)


@operation("shape", rounds=False)
def shape(x: Any) -> Array:
    """The sizes of x as a vector."""
    return np.array(np.shape(x), np.int32)


@operation("fill", rounds=False)
def fill(shape: Any, value: Any = ZERO) -> Array:
    """A tensor of one value, of its type."""
    return np.full(whole_numbers(shape), value)


@operation("fill_like", rounds=False)
def fill_like(ref_tensor: Any, value: Any = ZERO) -> Array:
    """A tensor of one value, of its type, in the shape of another."""
    return np.full(np.shape(ref_tensor), value)


@operation("range_1d")
def range_1d(end: Any, start: Any, step: Any) -> Array:
    """start, start + step, ... before end."""
    first, last, stride = (np.asarray(value).reshape(()).item() for value in (start, end, step))
    if stride == 0:
        refuse("range_1d", "step", stride, "it never gets to the end")
    return np.arange(first, last, stride).astype(np.asarray(start).dtype)


@operation("one_hot", rounds=False)
def one_hot(
    indices: Any, one_hot_vector_size: Any, axis: Any = -1, on_value: Any = 1, off_value: Any = 0
) -> Array:
    """A new axis that holds on_value at the index and off_value elsewhere."""
    places, size = np.asarray(indices), int(np.asarray(one_hot_vector_size).reshape(()))
    along = axis_of("one_hot", axis, places.ndim + 1)
    check_indices("one_hot", places, [size], True)
    hot = np.expand_dims(places, along) == np.arange(size).reshape(-1, *[1] * (places.ndim - along))
    return np.where(hot, np.asarray(on_value), np.asarray(off_value))


@operation("non_zero", rounds=False)
def non_zero(x: Any) -> Array:
    """[N, rank]: where x is not zero, in order."""
    return np.argwhere(x).astype(np.int32)


@operation("band_part", rounds=False)
def band_part(x: Any, lower: Any = -1, upper: Any = -1) -> Array:
    """x with zeros outside a band of the last two axes; -1 keeps a whole triangle."""
    rows, columns = np.ogrid[: x.shape[-2], : x.shape[-1]]
    below, above = int(lower), int(upper)
    kept = ((below < 0) | (rows - columns <= below)) & ((above < 0) | (columns - rows <= above))
    return np.where(kept, x, np.zeros((), x.dtype))
