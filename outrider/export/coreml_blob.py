"""Writing a MIL weight file as weights come, one in memory at a time.

Blob storage format, version 2 (`StorageFormat.hpp` of coremltools' MILBlob), little-endian, on 64-byte boundaries: a
header with the number of values, then for each value a record and its data. Elements below 8 bits are packed without
gaps, the first one in the lowest bits.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError

__all__ = ["BlobWriter", "pack_bits"]

SENTINEL, VERSION, ALIGNMENT = 0xDEADBEEF, 2, 64
CHUNK = 1 << 20  # codes that are packed at a time, a multiple of 8
# The numbers of `BlobDataType.hpp`, and bits of an element.
KINDS = {
    "fp16": (1, 16), "uint8": (3, 8), "int8": (4, 8), "int4": (8, 4), "uint1": (9, 1), "uint2": (10, 2),
    "uint4": (11, 4), "uint3": (12, 3), "uint6": (13, 6),
}  # fmt: skip


class BlobWriter:
    """A weight file that grows by a value at a time; `close` writes how many there are."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  (closed by `close`)
        self._count = 0
        self._file.write(bytes(ALIGNMENT))

    def add(self, array: NDArray[Any], kind: str) -> int:
        """Append a value of a MIL type; codes of few bits take a byte each here. Returns what a program points at."""
        if kind not in KINDS:
            raise ExportError(f"a weight file holds no {kind!r} here; known: {', '.join(KINDS)}")
        number, bits = KINDS[kind]
        size = -(-array.size * bits // 8)
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        start = self._file.tell()
        record = struct.pack(
            "<IIQQQ", SENTINEL, number, size, start + ALIGNMENT, 8 * size - array.size * bits
        )
        self._file.write(record.ljust(ALIGNMENT, b"\0"))
        flat = np.ascontiguousarray(array).reshape(-1)
        if bits >= 8:
            self._file.write(flat.data.cast("B"))
        else:
            for begin in range(0, flat.size, CHUNK):
                self._file.write(pack_bits(flat[begin : begin + CHUNK], bits).data)
        self._count += 1
        return start

    def close(self) -> None:
        """Finish the file; closing twice is allowed."""
        if self._file.closed:
            return
        self._file.seek(0)
        self._file.write(struct.pack("<II", self._count, VERSION))
        self._file.close()


def pack_bits(codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Integers [n] of few bits, signed ones in two's complement, as packed bytes."""
    planes = (codes.view(np.uint8)[:, None] >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)  # [n, bits]
    return np.packbits(planes.reshape(-1), bitorder="little")
