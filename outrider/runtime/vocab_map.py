"""The ids of a trimmed head's columns, as a bundle keeps them: raw little-endian int32, ascending."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from outrider.contracts import IntArray
from outrider.errors import BundleError

__all__ = ["VOCAB_MAP", "read_vocab_map", "write_vocab_map"]

VOCAB_MAP = "vocab_ids.i32"  # a map's file name
_DTYPE = np.dtype("<i4")


def write_vocab_map(path: str | os.PathLike[str], ids: IntArray) -> None:
    """Write ids [V'], ascending."""
    Path(path).write_bytes(_checked(ids, len(ids), None, path).astype(_DTYPE).tobytes())


def read_vocab_map(path: str | os.PathLike[str], columns: int, rows: int | None = None) -> IntArray:
    """The id of each of a graph's `columns` logits. [columns]

    `rows` is the number of ids that the draft's embedding knows. Raises BundleError for a file that is missing, cut
    off, of another length, out of order, or that names an id from `rows` on.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BundleError(
            f"the vocabulary map {path} cannot be read: {error.strerror}; export the bundle again"
        ) from None
    if len(data) % _DTYPE.itemsize:
        raise BundleError(
            f"the vocabulary map {path} has {len(data)} bytes, no multiple of 4; it is cut off: copy it again"
        )
    return _checked(np.frombuffer(data, _DTYPE).astype(np.int64), columns, rows, path)


def _checked(ids: IntArray, columns: int, rows: int | None, path: str | os.PathLike[str]) -> IntArray:
    again = "they do not belong together: export the bundle again"
    if len(ids) != columns or not columns:
        raise BundleError(f"the vocabulary map {path} has {len(ids)} ids for {columns} logits; {again}")
    falls = np.flatnonzero(np.diff(ids) <= 0)
    if len(falls):
        pair = ids[falls[0] : falls[0] + 2].tolist()
        raise BundleError(
            f"the vocabulary map {path} is not ascending: {pair[0]} is followed by {pair[1]}; {again}"
        )
    if ids[0] < 0 or (rows is not None and ids[-1] >= rows):
        wrong = int(ids[0] if ids[0] < 0 else ids[-1])
        raise BundleError(f"the vocabulary map {path} names id {wrong}; the draft has {rows} ids: {again}")
    return ids
