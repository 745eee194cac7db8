"""Elementwise operations of two tensors, which broadcast as in numpy; and `select`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, is_integer, refuse, wide
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []

Two = Callable[[Any, Any], Array]
ARITHMETIC: dict[str, Two] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
}  # whole numbers wrap around
# What these give is a truth value, or one of the two values.
EXACT: dict[str, Two] = {
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
DIVISIONS: dict[str, Two] = {"floor_div": np.floor_divide, "mod": np.mod}  # a remainder has the sign of y


def _arithmetic(function: Two) -> Two:
    def compute(x: Any, y: Any) -> Array:
        return function(wide(x), wide(y))

    return compute


def _exact(function: Two) -> Two:
    def compute(x: Any, y: Any) -> Array:
        return function(x, y)

    return compute


def _division(name: str, function: Two) -> Two:
    def compute(x: Any, y: Any) -> Array:
        if is_integer(y):
            _refuse_zero(name, y)
        return function(wide(x), wide(y))

    return compute


for _name, _function in ARITHMETIC.items():
    operation(_name)(_arithmetic(_function))
for _name, _function in EXACT.items():
    operation(_name, rounds=False)(_exact(_function))
for _name, _function in DIVISIONS.items():
    operation(_name)(_division(_name, _function))


@operation("real_div")
def real_div(x: Any, y: Any) -> Array:
    """x / y. Of whole numbers only where it comes out whole: MIL does not say how it rounds otherwise."""
    if not (is_integer(x) and is_integer(y)):
        return np.asarray(np.true_divide(wide(x), wide(y)))
    _refuse_zero("real_div", y)
    quotient, remainder = np.divmod(x, y)
    if np.any(remainder):
        refuse(
            "real_div", "x", x, f"whole numbers that y = {y!r} does not divide; cast them to a float first"
        )
    return np.asarray(quotient)


@operation("pow")
def power(x: Any, y: Any) -> Array:
    """x to the power of y."""
    if is_integer(x) and is_integer(y) and np.any(np.less(y, 0)):
        refuse("pow", "y", y, "a whole number to a negative power is not whole")
    return np.asarray(np.power(wide(x), wide(y)))


@operation("select", rounds=False)
def select(cond: Any, a: Any, b: Any) -> Array:
    """a where cond holds, else b; the three broadcast."""
    return np.asarray(np.where(cond, a, b))


def _refuse_zero(name: str, divisor: Any) -> None:
    if np.any(np.equal(divisor, 0)):
        refuse(name, "y", divisor, "a whole number divided by zero has no value")
