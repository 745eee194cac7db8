"""Gather and scatter."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, axis_of, check_indices, refuse, wide
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []


@operation("gather", rounds=False)
def gather(x: Any, indices: Any, axis: Any = 0, batch_dims: Any = 0, validate_indices: Any = None) -> Array:
    """Slices of x along an axis -> [*x[:axis], *indices[batch_dims:], *x[axis + 1:]], as TensorFlow's gather."""
    values, places = np.asarray(x), np.asarray(indices)
    along, batched = axis_of("gather", axis, values.ndim), int(batch_dims)
    if batched > min(along, places.ndim) or values.shape[:batched] != places.shape[:batched]:
        refuse(
            "gather", "batch_dims", batched, f"x is {values.shape}, indices {places.shape}, the axis {along}"
        )
    check_indices("gather", places, [values.shape[along]], validate_indices)
    if not batched:
        return np.asarray(np.take(values, places, axis=along))
    batch = values.shape[:batched]
    taken = [np.take(values[at], places[at], axis=along - batched) for at in np.ndindex(batch)]
    return np.stack(taken).reshape(*batch, *taken[0].shape)


@operation("gather_along_axis", rounds=False)
def gather_along_axis(x: Any, indices: Any, axis: Any = 0, validate_indices: Any = None) -> Array:
    """One value of x along an axis for each index; both have the same sizes elsewhere."""
    along = axis_of("gather_along_axis", axis, x.ndim)
    _check_other_axes("gather_along_axis", x, indices, along)
    check_indices("gather_along_axis", indices, [x.shape[along]], validate_indices)
    return np.take_along_axis(x, indices, along)


@operation("gather_nd", rounds=False)
def gather_nd(x: Any, indices: Any, batch_dims: Any = 0, validate_indices: Any = None) -> Array:
    """Slices of x that the last axis of indices [*K, depth] points at -> [*K, *x[batch_dims + depth:]]."""
    batched, depth = int(batch_dims), indices.shape[-1]
    if batched + depth > x.ndim or batched >= indices.ndim or x.shape[:batched] != indices.shape[:batched]:
        refuse("gather_nd", "indices", indices.shape, f"x is {x.shape}, of which {batched} axes are batches")
    check_indices("gather_nd", indices, x.shape[batched : batched + depth], validate_indices)
    places = _coordinates(indices)
    batch = np.ogrid[tuple(slice(size) for size in x.shape[:batched])]
    aligned = [axis.reshape(*axis.shape, *[1] * (indices.ndim - 1 - batched)) for axis in batch]
    return np.asarray(x[(*aligned, *places)])


@operation("scatter")
def scatter(
    data: Any, indices: Any, updates: Any, axis: Any = 0, mode: str = "add", validate_indices: Any = None
) -> Array:
    """A copy of data with slices along an axis replaced by, or combined with, those of updates."""
    along, places = axis_of("scatter", axis, data.ndim), np.asarray(indices)
    updates = np.asarray(updates)  # a scalar where data is a vector and the index a scalar
    expected = (*data.shape[:along], *places.shape, *data.shape[along + 1 :])
    if updates.shape != expected:
        refuse("scatter", "updates", updates.shape, f"they must be {expected}")
    check_indices("scatter", places, [data.shape[along]], validate_indices)
    result = wide(data).copy()
    rows = np.moveaxis(updates, range(along, along + places.ndim), range(places.ndim))
    _combine("scatter", np.moveaxis(result, along, 0), (places,), rows, mode)
    return np.asarray(result)


@operation("scatter_along_axis")
def scatter_along_axis(
    data: Any, indices: Any, updates: Any, axis: Any = 0, mode: str = "add", validate_indices: Any = None
) -> Array:
    """A copy of data in which one value along an axis is changed for each index."""
    along = axis_of("scatter_along_axis", axis, data.ndim)
    _check_other_axes("scatter_along_axis", data, indices, along)
    if updates.shape != indices.shape:
        refuse("scatter_along_axis", "updates", updates.shape, f"the indices are {indices.shape}")
    check_indices("scatter_along_axis", indices, [data.shape[along]], validate_indices)
    result = wide(data).copy()
    places = list(np.ogrid[tuple(map(slice, indices.shape))])
    places[along] = indices
    _combine("scatter_along_axis", result, tuple(places), updates, mode)
    return np.asarray(result)


@operation("scatter_nd")
def scatter_nd(
    data: Any, indices: Any, updates: Any, mode: str = "add", validate_indices: Any = None
) -> Array:
    """A copy of data in which the slices that the last axis of indices points at are changed."""
    depth = indices.shape[-1]
    expected = (*indices.shape[:-1], *data.shape[depth:])
    if depth > data.ndim or updates.shape != expected:
        refuse("scatter_nd", "updates", updates.shape, f"they must be {expected}")
    check_indices("scatter_nd", indices, data.shape[:depth], validate_indices)
    result = wide(data).copy()
    _combine("scatter_nd", result, _coordinates(indices), updates, mode)
    return np.asarray(result)


COMBINE = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}


def _combine(name: str, target: Array, places: tuple[Any, ...], updates: Any, mode: str) -> None:
    """Change target in place; a place that is named several times is combined several times."""
    if mode == "update":
        target[places] = updates
    elif mode == "div" and target.dtype.kind in "iu":
        refuse(name, "mode", mode, "MIL does not say how a quotient of whole numbers is rounded")
    elif mode in COMBINE:
        COMBINE[mode].at(target, places, wide(updates))
    else:
        refuse(name, "mode", mode, f"known are update, {', '.join(COMBINE)}")


def _coordinates(indices: Any) -> tuple[Any, ...]:
    """[*K, depth] -> depth arrays [*K]."""
    return tuple(np.moveaxis(indices, -1, 0))


def _check_other_axes(name: str, data: Any, indices: Any, axis: int) -> None:
    others = [size for at, size in enumerate(data.shape) if at != axis]
    if indices.ndim != data.ndim or others != [size for at, size in enumerate(indices.shape) if at != axis]:
        refuse(name, "indices", indices.shape, f"the data is {data.shape}; only axis {axis} may differ")
