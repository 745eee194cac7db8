"""Reading a MIL weight file (blob storage format, version 2) by memory mapping.

Layout (little endian, everything on 64-byte boundaries): a 64-byte header of uint32 count and uint32 version; then
per value a 64-byte record of uint32 sentinel 0xDEADBEEF, uint32 element type, uint64 bytes, uint64 offset of the data
in the file and uint64 padding bits at the data's end. A program points at records. Elements below 8 bits are packed
without gaps, the first element in the lowest bits (`MILBlob/Blob/StorageFormat.hpp` of coremltools).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import BackendError
from outrider.targets.coreml_reference.types import DTYPES, MilType, bits_of

__all__ = ["BlobFile", "unpack_bits"]

SENTINEL = 0xDEADBEEF
VERSION = 2
ALIGNMENT = 64
# the numbers of `BlobDataType.hpp`
BLOB_TYPES = {
    1: "fp16", 2: "fp32", 3: "uint8", 4: "int8", 6: "int16", 7: "uint16", 8: "int4", 9: "uint1", 10: "uint2",
    11: "uint4", 12: "uint3", 13: "uint6", 14: "int32", 15: "uint32",
}  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class _Record:
    dtype: str
    size_bytes: int
    offset: int


class BlobFile:
    """A weight file, mapped: values are read where they lie, and copied only where they are packed below 8 bits.

    Raises BackendError for a file that is absent, cut off or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise BackendError(
                f"{path}: the program keeps weights in this file, and it is not there. "
                "Copy the whole .mlpackage folder"
            ) from None
        except (OSError, ValueError) as error:
            raise BackendError(f"{path}: the weight file cannot be mapped: {error}") from error
        if len(self._bytes) < ALIGNMENT:
            raise BackendError(f"{path}: a weight file of {len(self._bytes)} bytes is cut off")
        _, version = struct.unpack_from("<II", self._bytes, 0)
        if version != VERSION:
            raise BackendError(
                f"{path}: weight file version {version}; the evaluator reads version {VERSION}"
            )

    def check(self, offset: int, declared: MilType) -> None:
        """Refuse a reference that does not lead to a whole value of the declared type (BackendError)."""
        record = self._record(offset)
        where = f"{self.path}: the value at offset {offset}"
        if record.dtype != declared.dtype:
            raise BackendError(f"{where} holds {record.dtype}, and the program declares {declared}")
        expected = (declared.elements * bits_of(declared.dtype) + 7) // 8
        if record.size_bytes != expected:
            raise BackendError(
                f"{where} has {record.size_bytes} bytes, and {declared} needs {expected}: "
                "model and weight file do not belong together"
            )
        if record.offset + record.size_bytes > len(self._bytes):
            raise BackendError(
                f"{where} ends at byte {record.offset + record.size_bytes}, and the file has {len(self._bytes)}: "
                "it is cut off. Copy it again"
            )

    def read(self, offset: int, declared: MilType) -> Array:
        """The value whose record lies at this offset; read-only, a view of the file from 8 bits an element."""
        self.check(offset, declared)
        record = self._record(offset)
        shape = tuple(size for size in declared.shape if size is not None)
        bits = bits_of(declared.dtype)
        if bits >= 8:
            flat = np.frombuffer(self._bytes, DTYPES[declared.dtype], declared.elements, record.offset)
            return flat.reshape(shape)
        packed = np.frombuffer(self._bytes, np.uint8, record.size_bytes, record.offset)
        return unpack_bits(packed, bits, declared.elements, signed=declared.dtype == "int4").reshape(shape)

    def _record(self, offset: int) -> _Record:
        where = f"{self.path}: the program points at offset {offset}"
        if offset % ALIGNMENT or not ALIGNMENT <= offset <= len(self._bytes) - ALIGNMENT:
            raise BackendError(
                f"{where}, where no value can lie (the file has {len(self._bytes)} bytes, records lie on multiples "
                f"of {ALIGNMENT}): it is cut off, or belongs to another model"
            )
        sentinel, number, size, start = struct.unpack_from("<IIQQ", self._bytes, offset)
        if sentinel != SENTINEL:
            raise BackendError(
                f"{where}, where no value begins (sentinel {sentinel:#x}, expected {SENTINEL:#x})"
            )
        if number not in BLOB_TYPES:
            raise BackendError(f"{where}: element type number {number} is none that the evaluator reads")
        return _Record(BLOB_TYPES[number], size, start)


def unpack_bits(packed: Array, bits: int, elements: int, *, signed: bool = False) -> Array:
    """Elements of `bits` bits from packed bytes, lowest bits first, as uint8 (int8 if signed)."""  # [elements]
    common = math.gcd(bits, 8)
    count, size = 8 // common, bits // common  # the fewest elements that fill whole bytes, and those bytes
    groups = -(-elements // count)
    padded = np.zeros(groups * size, np.uint8)
    padded[: len(packed)] = packed
    rows = padded.reshape(groups, size)
    values = np.empty((groups, count), np.uint8)
    for index in range(count):
        byte, shift = divmod(index * bits, 8)
        low = rows[:, byte] >> shift
        if shift + bits > 8:
            low |= rows[:, byte + 1] << (8 - shift)
        np.bitwise_and(low, (1 << bits) - 1, out=values[:, index])
    flat = values.reshape(-1)[:elements]
    if not signed:
        return flat
    half = 1 << (bits - 1)
    return (flat ^ half).view(np.int8) - np.int8(half)
