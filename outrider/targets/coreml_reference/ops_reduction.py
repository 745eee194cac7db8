"""Reductions, and what orders or accumulates along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, axes_of, axis_of, is_integer, refuse, wide
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []

Reduce = Callable[[Array, tuple[int, ...]], Array]


def _sum(x: Array, axes: tuple[int, ...]) -> Array:
    total: Array = np.sum(x, axes, dtype=x.dtype, keepdims=True)
    return total


def _product(x: Array, axes: tuple[int, ...]) -> Array:
    product: Array = np.prod(x, axes, dtype=x.dtype, keepdims=True)
    return product


def _log_sum_exp(x: Array, axes: tuple[int, ...]) -> Array:
    largest = np.max(x, axes, keepdims=True)
    # An infinite maximum would give inf - inf; the sum is infinite (or the log of zero) by itself.
    anchor = np.where(np.isfinite(largest), largest, 0)
    return np.log(_sum(np.exp(x - anchor), axes)) + anchor


REDUCTIONS: dict[str, Reduce] = {
    "reduce_sum": _sum,
    "reduce_mean": lambda x, axes: np.asarray(np.mean(x, axes, keepdims=True)),
    "reduce_prod": _product,
    "reduce_l1_norm": lambda x, axes: _sum(np.abs(x), axes),
    "reduce_l2_norm": lambda x, axes: np.sqrt(_sum(np.square(x), axes)),
    "reduce_sum_square": lambda x, axes: _sum(np.square(x), axes),
    "reduce_log_sum": lambda x, axes: np.log(_sum(x, axes)),
    "reduce_log_sum_exp": _log_sum_exp,
}
CHOICES: dict[str, Reduce] = {
    "reduce_max": lambda x, axes: np.asarray(np.max(x, axes, keepdims=True)),
    "reduce_min": lambda x, axes: np.asarray(np.min(x, axes, keepdims=True)),
}


def _reduction(name: str, reduce: Reduce) -> Callable[..., Array]:
    def compute(x: Any, axes: Any = None, keep_dims: Any = False) -> Array:
        values = wide(np.asarray(x))
        along = axes_of(name, axes, values.ndim)
        result = reduce(values, along)
        if is_integer(values) and not is_integer(result):
            # A mean or norm of whole numbers is declared whole; coremltools drops the fraction when it folds one.
            result = np.trunc(result).astype(values.dtype)
        return result if keep_dims else result.squeeze(along)

    return compute


for _name, _reduce in REDUCTIONS.items():
    operation(_name)(_reduction(_name, _reduce))
for _name, _reduce in CHOICES.items():
    operation(_name, rounds=False)(_reduction(_name, _reduce))

INDEX_TYPES = {"int32": np.int32, "uint16": np.uint16}


def _index_type(name: str, parameter: str, output_dtype: str) -> Any:
    kind = INDEX_TYPES.get(output_dtype.lower())
    if kind is None:
        refuse(name, parameter, output_dtype, f"known are {', '.join(INDEX_TYPES)}")
    return kind


@operation("reduce_argmax", rounds=False)
def reduce_argmax(x: Any, axis: Any = -1, keep_dims: Any = False, output_dtype: str = "int32") -> Array:
    """Where the largest value along an axis stands; the first of equal ones."""
    along, kind = (
        axis_of("reduce_argmax", axis, np.ndim(x)),
        _index_type("reduce_argmax", "output_dtype", output_dtype),
    )
    return np.asarray(np.argmax(x, along, keepdims=bool(keep_dims))).astype(kind)


@operation("reduce_argmin", rounds=False)
def reduce_argmin(x: Any, axis: Any = -1, keep_dims: Any = False, output_dtype: str = "int32") -> Array:
    """Where the smallest value along an axis stands; the first of equal ones."""
    along, kind = (
        axis_of("reduce_argmin", axis, np.ndim(x)),
        _index_type("reduce_argmin", "output_dtype", output_dtype),
    )
    return np.asarray(np.argmin(x, along, keepdims=bool(keep_dims))).astype(kind)


@operation("argsort", rounds=False)
def argsort(x: Any, axis: Any = -1, ascending: Any = False) -> Array:
    """Positions in the order of their values; equal ones keep their order."""
    along = axis_of("argsort", axis, np.ndim(x))
    return _order(wide(x), along, bool(ascending)).astype(np.int32)


def _order(x: Array, axis: int, ascending: bool) -> Array:
    if ascending:
        return np.argsort(x, axis, kind="stable")
    # Sorting the reversed axis and reading it backwards keeps equal values in order, for every type.
    backwards = np.argsort(np.flip(x, axis), axis, kind="stable")
    return np.asarray(x.shape[axis] - 1 - np.flip(backwards, axis))


@operation("topk", rounds=False)
def topk(
    x: Any,
    k: Any = 1,
    axis: Any = -1,
    ascending: Any = False,
    sort: Any = True,
    return_indices: Any = True,
    output_indices_dtype: str = "int32",
) -> Any:
    """The k largest (or smallest) values along an axis and where they stand; k = -1 means all.

    They come sorted whatever `sort` says: without it no order is promised.
    """
    along, count = axis_of("topk", axis, x.ndim), int(k)
    size = x.shape[along]
    count = size if count == -1 else count
    if not 0 < count <= size:
        refuse("topk", "k", count, f"axis {along} has {size} values")
    kind = _index_type("topk", "output_indices_dtype", output_indices_dtype)
    positions = np.take(_order(wide(x), along, bool(ascending)), np.arange(count), axis=along)
    values = np.take_along_axis(x, positions, along)
    return (values, positions.astype(kind)) if return_indices else values


@operation("cumsum")
def cumsum(x: Any, axis: Any = 0, exclusive: Any = False, reverse: Any = False) -> Array:
    """Running sums along an axis; exclusive ones leave their own element out."""
    values = wide(x)
    along = axis_of("cumsum", axis, values.ndim)
    ordered = np.flip(values, along) if reverse else values
    sums: Array = np.cumsum(ordered, along, dtype=values.dtype)
    if exclusive:
        sums = np.roll(sums, 1, along)
        np.moveaxis(sums, along, 0)[:1] = 0
    return np.flip(sums, along) if reverse else sums
