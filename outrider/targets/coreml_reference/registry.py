"""The table of MIL operations that the evaluator can compute, and its strict lookup.

An operation is a plain function that takes the parameters of its MIL operation by name: numpy arrays for tensors,
numpy scalars (or Python's) for scalars, `str` and `bool` as such, a list for a variadic parameter such as the
`values` of `concat`. A parameter that a program leaves out is not passed: the function's own default is MIL's
default. It returns an array, or a tuple of arrays in the order of the operation's outputs. Values of a float kind
arrive as float32 arrays that hold fp16 numbers, or as float16 arrays; an operation computes in float32, and the
executor rounds its result to the declared type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, TypeVar

from outrider.errors import BackendError

__all__ = ["Operation", "known_operations", "lookup", "operation"]

Compute = Callable[..., Any]
ComputeT = TypeVar("ComputeT", bound=Compute)


@dataclass(frozen=True)
class Operation:
    """How one type of operation is computed; `rounds` is False where a result holds only values it was given."""

    name: str
    compute: Compute
    rounds: bool = True

    @cached_property
    def _parameters(self) -> tuple[frozenset[str], frozenset[str]]:
        """All parameters, and those without a default."""
        found = inspect.signature(self.compute).parameters.values()
        required = frozenset(one.name for one in found if one.default is inspect.Parameter.empty)
        return frozenset(one.name for one in found), required

    def check_parameters(self, given: Iterable[str], *, function: str, output: str) -> None:
        """Refuse parameters that the operation does not have, or the lack of one that it needs (BackendError)."""
        names, (known, required) = set(given), self._parameters
        where = f"function {function!r}: {self.name!r} ({output})"
        if names - known:
            raise BackendError(
                f"{where} is given {min(names - known)!r}, and the evaluator knows: {', '.join(sorted(known))}"
            )
        if required - names:
            raise BackendError(f"{where} is not given {min(required - names)!r}")


_OPERATIONS: dict[str, Operation] = {}


def operation(*names: str, rounds: bool = True) -> Callable[[ComputeT], ComputeT]:
    """Register a function as what computes the MIL operations of these names.

    `rounds=False` is for operations that only move or pick values (reshape, transpose, gather, select, maximum):
    their results are on the fp16 grid already and need no rounding. Raises ValueError for a name given twice.
    """

    def register(compute: ComputeT) -> ComputeT:
        for name in names:
            if name in _OPERATIONS:
                raise ValueError(f"operation {name!r} is registered twice")
            _OPERATIONS[name] = Operation(name, compute, rounds)
        return compute

    return register


def known_operations() -> tuple[str, ...]:
    """The types of operation that have an entry in the table, sorted."""
    return tuple(sorted(_OPERATIONS))


def lookup(name: str, *, function: str, output: str) -> Operation:
    """The operation of this type; BackendError names the type, the function it stands in, and its output."""
    try:
        return _OPERATIONS[name]
    except KeyError:
        near = get_close_matches(name, _OPERATIONS, n=3)
        raise BackendError(
            f"the evaluator does not know the operation {name!r} (function {function!r}, output {output!r})"
            + (f"; near: {', '.join(near)}" if near else "")
            + f". `known_operations()` lists the {len(_OPERATIONS)} that it knows"
        ) from None
