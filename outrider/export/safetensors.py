"""A reader of safetensors files, single or sharded: header checked, tensors mapped on demand.

Follows the format's specification (https://github.com/huggingface/safetensors): 8 bytes of header length, a
JSON header with dtype, shape and byte range per tensor, then the bytes.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError
from outrider.quantize.ggml import dequantize
from outrider.quantize.schemes import RawBlocks
from outrider.records import parsed

__all__ = ["SafetensorsStore", "shards_of"]

MAX_HEADER = 100 << 20  # the limit of the reference implementation
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Entry:
    shard: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsStore:
    """Tensors of one or more safetensors files. Raises CheckpointError for damaged or unknown ones."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._maps: list[mmap.mmap] = []
        self._entries: dict[str, _Entry] = {}
        try:
            for shard, path in enumerate(paths):
                self._maps.append(_open_map(path))
                self._entries.update(_read_header(self._maps[-1], shard, path.name))
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        """Every stored tensor."""
        return list(self._entries)

    def shape(self, stored: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._entries[stored].shape

    def tensor(self, stored: str) -> NDArray[np.float32]:
        """A tensor's values as a new float32 array. Raises CheckpointError for a dtype that is no float."""
        entry = self._entries[stored]
        if entry.dtype not in DTYPE_BYTES:
            raise CheckpointError(
                f"tensor {stored!r} has dtype {entry.dtype}; known: {', '.join(DTYPE_BYTES)} "
                "(a checkpoint that is quantized already can be given as GGUF)"
            )
        data = np.frombuffer(self._maps[entry.shard], np.uint8, entry.stop - entry.start, entry.start)
        count = math.prod(entry.shape)
        return dequantize(RawBlocks(entry.dtype, (1, count), data[None])).reshape(entry.shape)

    def raw(self, stored: str) -> RawBlocks | None:
        """Nothing here is stored in blocks."""
        return None

    def close(self) -> None:
        """Unmap the files."""
        for mapped in self._maps:
            mapped.close()


def shards_of(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises CheckpointError when some are missing."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(parsed(json.loads, index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index} is damaged; download the checkpoint again") from None
        missing = [name for name in names if not (folder / Path(name).name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {len(missing)} of {len(names)} shards, first {missing[0]}")
        return [folder / Path(name).name for name in names]
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    hint = "PyTorch .bin weights are not read: convert them" if any(folder.glob("*.bin")) else "copy it whole"
    raise CheckpointError(f"{folder} holds neither model.safetensors nor {INDEX}; {hint}")


def _open_map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path.name} is empty; download the checkpoint again") from None
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from None


def _read_header(data: mmap.mmap, shard: int, name: str) -> dict[str, _Entry]:
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 2 <= size <= min(MAX_HEADER, len(data) - 8):
        raise CheckpointError(
            f"{name} claims a header of {size} bytes in {len(data)} bytes; "
            "it is cut off or no safetensors file"
        )
    try:
        header: Any = parsed(json.loads, data[8 : 8 + size])
    except ValueError as error:
        raise CheckpointError(f"{name} has a damaged header ({error}); download it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{name} has a header that is no table; download it again")
    base = 8 + size
    return {
        key: _read_entry(key, value, shard, base, len(data), name)
        for key, value in header.items()
        if key != "__metadata__"
    }


def _read_entry(key: str, value: Mapping[str, Any], shard: int, base: int, end: int, name: str) -> _Entry:
    try:
        dtype, shape = str(value["dtype"]), tuple(int(size) for size in value["shape"])
        start, stop = (base + int(offset) for offset in value["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{name}: the header's entry for {key!r} is damaged: {value!r}") from None
    if not base <= start <= stop <= end:
        raise CheckpointError(
            f"{name} is cut off: tensor {key!r} ends at byte {stop}, the file at {end}; download it again"
        )
    expected = math.prod(shape) * DTYPE_BYTES.get(dtype, 0)
    if dtype in DTYPE_BYTES and (min(shape, default=1) < 1 or stop - start != expected):
        raise CheckpointError(
            f"{name}: tensor {key!r} {dtype} {shape} has {stop - start} bytes, not {expected}"
        )
    return _Entry(shard, dtype, shape, start, stop)
