"""A streaming reader of GGUF files: header, metadata and tensor table, tensors mapped on demand.

Follows the GGUF specification, versions 2 and 3, little-endian
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The file is memory mapped; nothing of a tensor
is read before it is asked for. Every length is checked against the file before it is used, so a file that is
cut off or damaged gives a CheckpointError that names what was being read and where.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError
from outrider.quantize.ggml import SUPPORTED_TYPES, GgmlType, dequantize, type_by_id
from outrider.quantize.schemes import RawBlocks

__all__ = ["GgufFile", "GgufTensor", "refuse_unsupported"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SMALLEST_PAIR = 8 + 4 + 1  # bytes of the smallest metadata entry and of the smallest tensor entry
SMALLEST_TENSOR = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is in numpy order (GGUF stores it reversed)."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    nbytes: int


class GgufFile:
    """An open GGUF file: `metadata` (key -> value), `tensors` (name -> GgufTensor), and their bytes.

    Raises CheckpointError when the file is not GGUF, is of an unknown version, or is cut off or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _open_map(path)
        try:
            cursor = _Cursor(self._map, path)
            n_tensors, n_pairs = _read_header(cursor)
            self.metadata = _read_metadata(cursor, n_pairs)
            self.tensors = _read_tensors(cursor, n_tensors, _alignment(self.metadata, path))
        except BaseException:
            self._map.close()
            raise

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, in numpy order."""
        return self.tensors[name].shape

    def rows(self, name: str) -> RawBlocks:
        """A tensor's bytes as rows [N, bytes], whatever its type; a vector is one row. A view of the file."""
        tensor = self.tensors[name]
        K = tensor.shape[-1]
        N = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        data = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.start)
        return RawBlocks(tensor.kind.name, (N, K), data.reshape(N, -1))

    def raw(self, name: str) -> RawBlocks | None:
        """The undecoded rows of a matrix in a block format, else None."""
        tensor = self.tensors[name]
        return self.rows(name) if len(tensor.shape) == 2 and tensor.kind.block_elements > 1 else None

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor's values as a new float32 array."""
        return dequantize(self.rows(name)).reshape(self.tensors[name].shape)

    def close(self) -> None:
        """Unmap the file. Arrays from `raw` that are still alive keep it mapped until they go."""
        try:
            self._map.close()
        except BufferError:  # a view is alive; its owner's end unmaps the file
            return

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Cursor:
    """A position in the mapped file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.end = data, path, 0, len(data)

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path.name}: {problem} at byte {self.at}; the file is cut off or damaged"
        )

    def need(self, count: int, what: str) -> int:
        """Reserve `count` bytes and return where they start."""
        start = self.at
        if count > self.end - start:
            raise self.fail(f"{what} needs {count} bytes but {self.end - start} are left")
        self.at += count
        return start

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.need(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        start = self.need(self.scalar("Q", what), what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            self.at = start
            raise self.fail(f"{what} is not UTF-8 ({error.reason})") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what, depth)
        if kind not in SCALARS:
            raise self.fail(f"{what} has unknown value type {kind}")
        return self.scalar(SCALARS[kind], what)

    def array(self, what: str, depth: int) -> list[Any]:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if depth >= MAX_ARRAY_DEPTH:
            raise self.fail(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        if kind in SCALARS:
            code = SCALARS[kind]
            start = self.need(count * struct.calcsize("<" + code), what)
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        if kind == STRING and count * 8 <= self.end - self.at:
            return [self.string(what) for _ in range(count)]
        if kind == ARRAY and count * 12 <= self.end - self.at:
            return [self.array(what, depth + 1) for _ in range(count)]
        raise self.fail(f"{what} claims {count} values of type {kind}")


def _open_map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path.name} is empty; fetch or copy it again") from None
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from None


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata pairs."""
    magic = bytes(cursor.data[:4])
    if magic != MAGIC:
        raise CheckpointError(f"{cursor.path.name} is no GGUF file: it starts with {magic!r}, not {MAGIC!r}")
    cursor.need(4, "the magic")
    version = cursor.scalar("I", "the version")
    if version not in VERSIONS:
        hint = " (big-endian file)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{cursor.path.name} has GGUF version {version}{hint}; known: {VERSIONS}")
    n_tensors, n_pairs = cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the metadata count")
    if n_tensors * SMALLEST_TENSOR + n_pairs * SMALLEST_PAIR > cursor.end:
        raise cursor.fail(f"a header that claims {n_tensors} tensors and {n_pairs} metadata entries")
    return n_tensors, n_pairs


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"the key of metadata entry {index}")
        kind = cursor.scalar("I", f"the type of {key!r}")
        metadata[key] = cursor.value(kind, f"metadata {key!r}")
    return metadata


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path.name}: general.alignment is {alignment!r}; it must be a power of two")
    return alignment


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Read the tensor table and check that every tensor lies within the file."""
    entries = [_read_entry(cursor, index) for index in range(count)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in entries:
        nbytes = int(np.prod(shape, dtype=object)) // kind.block_elements * kind.block_bytes
        cursor.at = data_start + offset
        if offset % alignment or name in tensors:
            raise cursor.fail(f"tensor {name!r} is misaligned or listed twice")
        cursor.need(nbytes, f"tensor {name!r} ({kind.name}, shape {shape})")
        tensors[name] = GgufTensor(name, kind, shape, data_start + offset, nbytes)
    return tensors


def _read_entry(cursor: _Cursor, index: int) -> tuple[str, GgmlType, tuple[int, ...], int]:
    name = cursor.string(f"the name of tensor {index}")
    n_dims = cursor.scalar("I", f"the rank of tensor {name!r}")
    if not 1 <= n_dims <= MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {n_dims} dimensions")
    shape = tuple(cursor.scalar("Q", f"the shape of tensor {name!r}") for _ in range(n_dims))[::-1]
    type_id = cursor.scalar("I", f"the type of tensor {name!r}")
    offset = cursor.scalar("Q", f"the offset of tensor {name!r}")
    try:
        kind = type_by_id(type_id)
    except CheckpointError as error:
        raise CheckpointError(f"{cursor.path.name}: tensor {name!r}: {error}") from None
    if min(shape) < 1 or shape[-1] % kind.block_elements:
        raise cursor.fail(f"tensor {name!r} has shape {shape}, which {kind.name} blocks cannot hold,")
    return name, kind, shape, offset


def refuse_unsupported(file: GgufFile) -> None:
    """Raise CheckpointError when a tensor has a type that cannot be decoded."""
    bad = {tensor.kind.name for tensor in file.tensors.values()} - set(SUPPORTED_TYPES)
    if bad:
        raise CheckpointError(
            f"{file.path.name} holds {', '.join(sorted(bad))} tensors, which cannot be decoded; "
            f"supported types: {', '.join(SUPPORTED_TYPES)}"
        )
