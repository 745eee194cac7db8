"""Constants of a program: decoded once, shared between functions, and kept only in the form that is used.

A value that linears, convolutions and arithmetic use is kept as float32, so that BLAS takes it as it is: twice the
bytes of fp16 weights, whatever precision they are stored in. A table that is only looked up (`gather`) stays as it is
stored: for fp16 that is a view of the mapped file and takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import BackendError
from outrider.targets.coreml_reference.package import WeightFiles
from outrider.targets.coreml_reference.types import DTYPES, MilType
from outrider.targets.coreml_reference.values import BlobPointer, Literal

__all__ = ["Array", "Constant", "Constants", "computed", "settle", "settle_stored"]

Array = np.ndarray[Any, np.dtype[Any]]
HALF = DTYPES["fp16"]


@dataclass(frozen=True)
class Constant:
    """A value known before the program runs: how to make it in its stored form, and a key equal for equal values."""

    key: tuple[Any, ...]
    type: MilType
    make: Callable[[], Array]


class Constants:
    """What the functions of one program share: each constant is made at most once in each of its two forms."""

    def __init__(self, weights: WeightFiles) -> None:
        self._weights = weights
        self._stored: dict[tuple[Any, ...], Array] = {}
        self._wide: dict[tuple[Any, ...], Array] = {}

    def of(self, literal: Literal) -> Constant:
        """The constant that a literal stands for."""
        content = literal.content
        if isinstance(content, BlobPointer):
            file, offset, declared = self._weights[content.file], content.offset, literal.type
            return Constant(literal.key, declared, lambda: file.read(offset, declared))
        return Constant(literal.key, literal.type, lambda: content)

    def stored(self, constant: Constant) -> Array:
        """The constant in its own element type."""
        if constant.key not in self._stored:
            self._stored[constant.key] = constant.make()
        return self._stored[constant.key]

    def wide(self, constant: Constant) -> Array:
        """The constant as operations compute with it: fp16 as float32, anything else in its own type."""
        if constant.key not in self._wide:
            made = self._stored.get(constant.key)
            made = constant.make() if made is None else made
            self._wide[constant.key] = made.astype(np.float32) if made.dtype == HALF else made
        return self._wide[constant.key]

    def close(self) -> None:
        """Forget what was decoded."""
        self._stored.clear()
        self._wide.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that decoded constants take (views of mapped files are not counted)."""
        kept = {id(array): array for form in (self._stored, self._wide) for array in form.values()}
        return sum(array.nbytes for array in kept.values() if array.base is None)


def computed(
    compute: Callable[..., Any], parameters: Mapping[str, Any], outputs: int, where: str
) -> tuple[Any, ...]:
    """The results of an operation, as many as the program names; BackendError, naming it, for whatever goes wrong."""
    try:
        results = compute(**parameters)
    except BackendError as error:
        raise BackendError(f"{where}: {error}") from error
    except Exception as error:
        given = ", ".join(f"{name} {_shown(value)}" for name, value in parameters.items())
        raise BackendError(f"{where} cannot be computed: {error}. It is given {given}") from error
    results = results if isinstance(results, tuple) else (results,)
    if len(results) != outputs:
        raise BackendError(f"{where} gave {len(results)} results, and the program names {outputs}")
    return results


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "(" + ", ".join(map(_shown, value)) + ")"
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


def settle(result: Any, declared: MilType, rounds: bool, where: str) -> Array:
    """A result as the program's next operation sees it: rounded to the declared element type, fp16 held in float32.

    Raises BackendError for a shape or a kind of number other than declared.
    """
    array = _declared(result, declared, where)
    wanted = DTYPES[declared.dtype]
    if wanted != HALF:
        return array.astype(wanted, copy=False)
    if rounds and array.dtype != HALF:
        array = array.astype(HALF)
    return array.astype(np.float32, copy=False)


def settle_stored(result: Any, declared: MilType, where: str) -> Array:
    """A result in the declared element type itself; raises as `settle` does."""
    return _declared(result, declared, where).astype(DTYPES[declared.dtype], copy=False)


def _declared(result: Any, declared: MilType, where: str) -> Array:
    array = np.asarray(result)
    if array.shape != declared.shape and not declared.fits(array.shape):
        raise BackendError(f"{where} gave shape {list(array.shape)}, and the program declares {declared}")
    kind, wanted = array.dtype.kind, DTYPES[declared.dtype].kind
    if kind != wanted and {kind, wanted} != {"i", "u"}:
        raise BackendError(f"{where} gave {array.dtype}, and the program declares {declared}")
    return array
