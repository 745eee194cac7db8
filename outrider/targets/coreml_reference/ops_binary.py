"""Elementwise operations of two tensors, which broadcast as in numpy; and `select`."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, is_integer, refuse, wide
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []


@operation("add")
def add(x: Any, y: Any) -> Array:
    """x + y; whole numbers wrap around."""
    return np.add(wide(x), wide(y))


@operation("sub")
def sub(x: Any, y: Any) -> Array:
    """x - y."""
    return np.subtract(wide(x), wide(y))


@operation("mul")
def mul(x: Any, y: Any) -> Array:
    """x * y."""
    return np.multiply(wide(x), wide(y))


@operation("real_div")
def real_div(x: Any, y: Any) -> Array:
    """x / y. Of whole numbers only where it comes out whole: MIL does not say how it rounds otherwise."""
    if not (is_integer(x) and is_integer(y)):
        return np.true_divide(wide(x), wide(y))
    _refuse_zero("real_div", y)
    quotient, remainder = np.divmod(x, y)
    if np.any(remainder):
        refuse(
            "real_div", "x", x, f"whole numbers that y = {y!r} does not divide; cast them to a float first"
        )
    return np.asarray(quotient)


@operation("floor_div")
def floor_div(x: Any, y: Any) -> Array:
    """x / y, rounded towards minus infinity."""
    if is_integer(y):
        _refuse_zero("floor_div", y)
    return np.floor_divide(wide(x), wide(y))


@operation("mod")
def mod(x: Any, y: Any) -> Array:
    """The remainder of `floor_div`: it has the sign of y."""
    if is_integer(y):
        _refuse_zero("mod", y)
    return np.mod(wide(x), wide(y))


@operation("pow")
def power(x: Any, y: Any) -> Array:
    """x to the power of y."""
    if is_integer(x) and is_integer(y) and np.any(np.less(y, 0)):
        refuse("pow", "y", y, "a whole number to a negative power is not whole")
    return np.power(wide(x), wide(y))


@operation("maximum", rounds=False)
def maximum(x: Any, y: Any) -> Array:
    """The larger of two values."""
    return np.maximum(x, y)


@operation("minimum", rounds=False)
def minimum(x: Any, y: Any) -> Array:
    """The smaller of two values."""
    return np.minimum(x, y)


@operation("equal", rounds=False)
def equal(x: Any, y: Any) -> Array:
    """Where x == y."""
    return np.equal(x, y)


@operation("not_equal", rounds=False)
def not_equal(x: Any, y: Any) -> Array:
    """Where x != y."""
    return np.not_equal(x, y)


@operation("greater", rounds=False)
def greater(x: Any, y: Any) -> Array:
    """Where x > y."""
    return np.greater(x, y)


@operation("greater_equal", rounds=False)
def greater_equal(x: Any, y: Any) -> Array:
    """Where x >= y."""
    return np.greater_equal(x, y)


@operation("less", rounds=False)
def less(x: Any, y: Any) -> Array:
    """Where x < y."""
    return np.less(x, y)


@operation("less_equal", rounds=False)
def less_equal(x: Any, y: Any) -> Array:
    """Where x <= y."""
    return np.less_equal(x, y)


@operation("logical_and", rounds=False)
def logical_and(x: Any, y: Any) -> Array:
    """Where both hold."""
    return np.logical_and(x, y)


@operation("logical_or", rounds=False)
def logical_or(x: Any, y: Any) -> Array:
    """Where at least one holds."""
    return np.logical_or(x, y)


@operation("logical_xor", rounds=False)
def logical_xor(x: Any, y: Any) -> Array:
    """Where exactly one holds."""
    return np.logical_xor(x, y)


@operation("select", rounds=False)
def select(cond: Any, a: Any, b: Any) -> Array:
    """a where cond holds, else b; the three broadcast."""
    return np.where(cond, a, b)


def _refuse_zero(name: str, divisor: Any) -> None:
    if np.any(np.equal(divisor, 0)):
        refuse(name, "y", divisor, "a whole number divided by zero has no value")
