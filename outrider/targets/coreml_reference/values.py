"""Values that a MIL program holds itself: numbers, strings, small tensors, and pointers into weight files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import BackendError
from outrider.targets.coreml_reference.blob import unpack_bits
from outrider.targets.coreml_reference.types import DTYPES, MilType, bits_of, type_of

__all__ = ["BlobPointer", "Literal", "literal_of", "plain"]

Array = np.ndarray[Any, np.dtype[Any]]
_LISTS = ("floats", "doubles", "ints", "longInts", "bools", "strings")


@dataclass(frozen=True)
class BlobPointer:
    """Where a value lies: the file as the program names it, and the offset of its record."""

    file: str
    offset: int


@dataclass(frozen=True, eq=False)
class Literal:
    """A constant of a program: its type, and either its elements or where they lie."""

    type: MilType
    content: Array | BlobPointer

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for literals that hold the same value, so that functions can share what is made of it."""
        if isinstance(self.content, BlobPointer):
            return ("blob", self.type, self.content)
        if self.type.dtype == "string":
            return ("text", self.type, tuple(self.content.reshape(-1).tolist()))
        return ("value", self.type, self.content.tobytes())


def literal_of(value: Any, where: str) -> Literal:
    """The constant that a `Value` message holds; BackendError, naming `where`, for one that cannot be read."""
    declared = type_of(value.type, where)
    if value.WhichOneof("value") == "blobFileValue":
        return Literal(declared, BlobPointer(value.blobFileValue.fileName, int(value.blobFileValue.offset)))
    if value.WhichOneof("value") != "immediateValue" or value.immediateValue.WhichOneof("value") != "tensor":
        raise BackendError(f"{where}: a constant that holds no tensor")
    flat = _elements(value.immediateValue.tensor, declared, where)
    if flat.size != declared.elements:
        raise BackendError(f"{where}: {flat.size} elements are given for a constant of type {declared}")
    array = flat.reshape(tuple(size for size in declared.shape if size is not None))
    array.flags.writeable = False
    return Literal(declared, array)


def plain(array: Array) -> Any:
    """A rank-0 tensor as Python's own bool, int, float or str; any other array as it is."""
    return array.item() if array.ndim == 0 else array


def _elements(tensor: Any, declared: MilType, where: str) -> Array:
    kind = tensor.WhichOneof("value")
    if kind == "bytes":
        return _from_bytes(tensor.bytes.values, declared, where)
    if kind not in _LISTS:
        if declared.elements == 0:
            return np.empty(0, DTYPES[declared.dtype])
        raise BackendError(f"{where}: a constant of type {declared} without elements")
    return np.array(list(getattr(tensor, kind).values), DTYPES[declared.dtype])


def _from_bytes(data: bytes, declared: MilType, where: str) -> Array:
    bits = bits_of(declared.dtype)
    expected = (declared.elements * bits + 7) // 8
    if bits == 0 or len(data) != expected:
        raise BackendError(f"{where}: {len(data)} bytes are given for a constant of type {declared}")
    if bits >= 8:
        return np.frombuffer(data, DTYPES[declared.dtype]).copy()
    packed = np.frombuffer(data, np.uint8)
    return unpack_bits(packed, bits, declared.elements, signed=declared.dtype == "int4")
