"""The byte layouts of packed matrices: nibbles, blocks, stacking, and reading back.

Blocks of integers follow ONNX Runtime's `MatMulNBits`. Work goes over chunks of rows, so that the memory
needed beyond a weight and its packed form stays small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError, MissingExtraError
from outrider.quantize.methods import Codes, middle, reconstruct
from outrider.quantize.schemes import BlockInt, PackedMatrix

__all__ = [
    "concatenate",
    "over_chunks",
    "pack_nibbles",
    "row_chunks",
    "store_blocks",
    "to_blocks",
    "unpack_nibbles",
    "unpack_rows",
]

CHUNK_VALUES = 1 << 19  # weights handled at a time by one thread: 2 MB of float32 stays near the cache
FloatArray = NDArray[np.float32]
Result = TypeVar("Result")


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two 4-bit codes a byte along the last axis, low nibble first; an odd tail is padded with 0."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., ::2] | (codes[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """The first `count` 4-bit codes of the last axis."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., ::2] = packed & np.uint8(0x0F)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes[..., :count]


def row_chunks(shape: tuple[int, int]) -> Iterator[slice]:
    """Slices of rows that hold about CHUNK_VALUES values each."""
    rows = max(1, CHUNK_VALUES // max(1, shape[1]))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


def to_blocks(rows: NDArray[np.floating], block: int) -> FloatArray:
    """Rows [n, K] as float32 blocks [n, ceil(K / block), block], the last one padded with zeros."""
    n, K = rows.shape
    padded = np.zeros((n, -(-K // block) * block), np.float32)
    padded[:, :K] = rows
    return padded.reshape(n, -1, block)


def store_blocks(codes: Codes, scheme: BlockInt, shape: tuple[int, int]) -> PackedMatrix:
    """Lay quantized blocks out for `MatMulNBits`."""
    values, zeros = codes.codes, codes.zero_points
    if scheme.bits == 4:
        values = pack_nibbles(values)
        zeros = None if zeros is None else pack_nibbles(zeros)
    return PackedMatrix(scheme, shape, values, codes.scales, zeros)


def concatenate(parts: Sequence[PackedMatrix]) -> PackedMatrix:
    """Stack packed matrices of one scheme along their rows.

    Raises ExportError when the parts are of different schemes or widths.
    """
    first = parts[0]
    if any(part.scheme != first.scheme or part.shape[1] != first.shape[1] for part in parts):
        raise ExportError(
            "packed parts of different schemes or widths cannot be stacked: "
            + ", ".join(f"{part.scheme} {part.shape}" for part in parts)
        )

    def stack(name: str) -> NDArray[Any] | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    shape = (sum(part.shape[0] for part in parts), first.shape[1])
    return replace(
        first,
        shape=shape,
        codes=np.concatenate([part.codes for part in parts]),
        scales=stack("scales"),
        zero_points=stack("zero_points"),
        correction=stack("correction"),
    )


def unpack_rows(packed: PackedMatrix, rows: slice) -> FloatArray:
    """The float32 values of some rows of a packed matrix."""
    scheme, codes = packed.scheme, packed.codes[rows]
    if packed.scales is None or not isinstance(scheme, BlockInt):
        values = codes.astype(np.float32)
        return values if packed.scales is None else values * packed.scales[rows, None]
    zeros = None if packed.zero_points is None else packed.zero_points[rows]
    integers = codes.astype(np.uint8, copy=False)
    if scheme.bits == 4:
        integers = unpack_nibbles(integers, scheme.block)
        zeros = None if zeros is None else unpack_nibbles(zeros, codes.shape[1])
    blocks = reconstruct(Codes(integers, packed.scales[rows], zeros), middle(scheme.bits))
    if packed.correction is not None:
        blocks += packed.correction[rows][..., None]
    return blocks.reshape(len(codes), -1)[:, : packed.shape[1]]


def over_chunks(
    function: Callable[[slice], Result], shape: tuple[int, int], threads: int | None = None
) -> list[Result]:
    """`function` of every chunk of rows, in order, on a few threads that are joined before it returns.

    Matrix products inside run on one thread each: BLAS threads under these would wait for each other, spinning.
    """
    # numpy releases the interpreter lock inside its loops, so threads over chunks scale.
    workers = threads or min(4, os.cpu_count() or 1)
    chunks = list(row_chunks(shape))
    with _blas().limit(limits=1, user_api="blas"):
        if workers == 1 or len(chunks) == 1:
            return [function(rows) for rows in chunks]
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(function, chunks))


@cache
def _blas() -> Any:
    """The handle on numpy's BLAS; finding the library takes milliseconds."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError as error:
        raise MissingExtraError("threadpoolctl", "export") from error
    return ThreadpoolController()
