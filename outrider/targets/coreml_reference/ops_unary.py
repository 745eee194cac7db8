"""Elementwise operations of one tensor, and `cast`, `clip` and `threshold`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, refuse, wide
from outrider.targets.coreml_reference.registry import operation

__all__ = ["error_function"]

FUNCTIONS: dict[str, Callable[[Any], Array]] = {
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "cos": np.cos,
    "cosh": np.cosh,
    "exp": np.exp,
    "exp2": np.exp2,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "tan": np.tan,
    "tanh": np.tanh,
}
# Their results are on the grid of the type already: whole numbers, or the value itself with another sign.
EXACT: dict[str, Callable[[Any], Array]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "floor": np.floor,
    "round": np.rint,
    "sign": np.sign,
    "logical_not": np.logical_not,
}
NUMPY_TYPES = {
    "bool": np.bool_,
    "fp16": np.float16,
    "fp32": np.float32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
}


def _of_one_tensor(function: Callable[[Any], Array]) -> Callable[[Any], Array]:
    def compute(x: Any) -> Array:
        return function(wide(x))

    return compute


for _name, _function in FUNCTIONS.items():
    operation(_name)(_of_one_tensor(_function))
for _name, _function in EXACT.items():
    operation(_name, rounds=False)(_of_one_tensor(_function))


@operation("log")
def log(x: Any, epsilon: Any = 1e-45) -> Array:
    """The natural logarithm of x + epsilon."""
    return np.asarray(np.log(wide(x) + np.float32(epsilon)))


@operation("rsqrt")
def rsqrt(x: Any, epsilon: Any = 1e-12) -> Array:
    """1 / sqrt(x + epsilon)."""
    return np.asarray(np.float32(1) / np.sqrt(wide(x) + np.float32(epsilon)))


@operation("inverse")
def inverse(x: Any, epsilon: Any = 1e-4) -> Array:
    """1 / (x + epsilon)."""
    return np.asarray(np.float32(1) / (wide(x) + np.float32(epsilon)))


@operation("clip")
def clip(x: Any, alpha: Any, beta: Any) -> Array:
    """x within [alpha, beta]."""
    if alpha > beta:
        refuse("clip", "alpha", alpha, f"it is above beta = {beta!r}")
    return np.asarray(np.minimum(np.maximum(wide(x), wide(alpha)), wide(beta)))


@operation("threshold", rounds=False)
def threshold(x: Any, alpha: Any) -> Array:
    """x, or alpha where x is below it."""
    return np.asarray(np.maximum(x, alpha))


@operation("cast")
def cast(x: Any, dtype: str) -> Array:
    """x as another type; a float becomes a whole number by dropping its fraction."""
    kind = NUMPY_TYPES.get(dtype)
    if kind is None:
        refuse("cast", "dtype", dtype, f"known are {', '.join(NUMPY_TYPES)}")
    values = np.asarray(x)
    if values.dtype.kind != "b" and np.dtype(kind).kind in "iu":
        _refuse_outside(np.trunc(wide(values)), np.iinfo(kind), dtype)
    return values.astype(kind)


def _refuse_outside(values: Array, limits: np.iinfo[Any], dtype: str) -> None:
    outside = ~((values >= limits.min) & (values <= limits.max))
    if outside.any():
        refuse("cast", "x", values[outside].flat[0], f"{dtype} holds {limits.min} to {limits.max}")


@operation("erf")
def erf(x: Any) -> Array:
    """The Gauss error function."""
    return error_function(wide(x))


STEPS_PER_UNIT = 128
LAST_KNOT = 6  # erf(6) is 1 in float64


def error_function(x: Any) -> Array:
    """erf of float32, by cubic Hermite interpolation between knots 1/128 apart: off by less than 1e-9.

    numpy has no erf, and `math.erf` value by value would take longer than the matrix products around it.
    """
    values, slopes = _error_function_knots()
    position = np.fmin(np.abs(np.asarray(x, np.float64)), LAST_KNOT) * STEPS_PER_UNIT
    left = np.minimum(position.astype(np.int64), LAST_KNOT * STEPS_PER_UNIT - 1)
    t = position - left
    rise = values[left + 1] - values[left]
    bend_left, bend_right = slopes[left] - rise, rise - slopes[left + 1]
    smooth = values[left] + t * (rise + (1 - t) * ((1 - t) * bend_left + t * bend_right))
    return np.asarray(np.where(np.isnan(x), x, np.copysign(smooth, x)).astype(np.float32))


@cache
def _error_function_knots() -> tuple[Array, Array]:
    """Values at the knots, and slopes times the step."""
    knots = np.arange(LAST_KNOT * STEPS_PER_UNIT + 1) / STEPS_PER_UNIT
    values = np.array([math.erf(knot) for knot in knots])
    slopes = 2 / math.sqrt(math.pi) * np.exp(-(knots**2)) / STEPS_PER_UNIT
    return values, slopes
