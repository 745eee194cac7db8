"""Types of MIL values: element type, shape with unknown dimensions, states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import BackendError

__all__ = ["DTYPES", "MilType", "bits_of", "type_of"]

# MILSpec.DataType of MIL.proto: number -> (name, numpy's type for one element, bits of a stored element)
_NUMBERS: dict[int, tuple[str, str, int]] = {
    1: ("bool", "bool", 8),
    2: ("string", "object", 0),
    10: ("fp16", "float16", 16),
    11: ("fp32", "float32", 32),
    12: ("fp64", "float64", 64),
    21: ("int8", "int8", 8),
    22: ("int16", "int16", 16),
    23: ("int32", "int32", 32),
    24: ("int64", "int64", 64),
    25: ("int4", "int8", 4),
    31: ("uint8", "uint8", 8),
    32: ("uint16", "uint16", 16),
    33: ("uint32", "uint32", 32),
    34: ("uint64", "uint64", 64),
    35: ("uint4", "uint8", 4),
    36: ("uint2", "uint8", 2),
    37: ("uint1", "uint8", 1),
    38: ("uint6", "uint8", 6),
    39: ("uint3", "uint8", 3),
}
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind, _ in _NUMBERS.values()}
_BITS: dict[str, int] = {name: bits for name, _, bits in _NUMBERS.values()}


@dataclass(frozen=True)
class MilType:
    """The declared type of a value: `dtype` by MIL's name; None in `shape` is a dimension known only when run."""

    dtype: str
    shape: tuple[int | None, ...]
    state: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BackendError(
                f"the evaluator has no element type {self.dtype!r}: it knows {', '.join(DTYPES)}"
            )

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape may stand where this type is declared."""
        if len(shape) != len(self.shape):
            return False
        return all(own is None or own == size for own, size in zip(self.shape, shape, strict=True))

    @property
    def elements(self) -> int:
        """The number of elements; only for a type whose dimensions are all known."""
        count = 1
        for size in self.shape:
            if size is None:
                raise BackendError(f"a stored value of type {self} has an unknown dimension")
            count *= size
        return count

    def __str__(self) -> str:
        dims = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"state<{self.dtype}>[{dims}]" if self.state else f"{self.dtype}[{dims}]"


def bits_of(dtype: str) -> int:
    """Bits that one stored element of this MIL type takes."""
    return _BITS[dtype]


def type_of(value_type: Any, where: str) -> MilType:
    """The type that a `ValueType` message declares; BackendError (naming `where`) for lists, tuples, dictionaries."""
    kind = value_type.WhichOneof("type")
    if kind == "stateType":
        inner = type_of(value_type.stateType.wrappedType, where)
        return MilType(inner.dtype, inner.shape, state=True)
    if kind != "tensorType":
        raise BackendError(
            f"{where}: the evaluator has tensors and states only, not {kind or 'an empty type'}"
        )
    tensor = value_type.tensorType
    if tensor.dataType not in _NUMBERS:
        raise BackendError(
            f"{where}: the evaluator has no element type number {tensor.dataType} of MIL.proto"
        )
    if tensor.rank != len(tensor.dimensions):
        raise BackendError(
            f"{where}: rank {tensor.rank} is declared with {len(tensor.dimensions)} dimensions"
        )
    shape = tuple(_size(dimension) for dimension in tensor.dimensions)
    return MilType(_NUMBERS[tensor.dataType][0], shape)


def _size(dimension: Any) -> int | None:
    return int(dimension.constant.size) if dimension.WhichOneof("dimension") == "constant" else None
