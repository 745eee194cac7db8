"""Compressed constants (`constexpr_*`): look-up tables, shift and scale, sparsity; decoded once, when a plan is made.

Each function follows the operation of its name (coremltools' MIL operation definitions, iOS 16 and iOS 18) and returns
float32 for floats; the planner rounds to the declared type, so that a weight is what a device decompresses to fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from outrider.errors import BackendError
from outrider.targets.coreml_reference.blob import unpack_bits

__all__ = ["CONSTEXPR"]

Array = np.ndarray[Any, np.dtype[Any]]


def lut_to_dense(indices: Array, lut: Array, vector_axis: int | None = None, shape: Any = None) -> Array:
    """Entries of tables by index: lut [blocks of each axis..., entries, V], V beside each other along `vector_axis`.

    With `shape` (iOS 16): one table [entries], and indices packed into bytes.
    """
    if shape is not None:
        return _packed_lut(indices, lut, tuple(int(size) for size in shape))
    if lut.ndim != indices.ndim + 2:
        raise BackendError(
            f"look-up tables {list(lut.shape)} need two axes more than indices {list(indices.shape)}"
        )
    blocks = _block_sizes(indices.shape, lut.shape[:-2], "indices", "look-up tables")
    size = lut.shape[-1]
    if size > 1 and vector_axis is None:
        raise BackendError(f"look-up tables of vectors of {size} need a vector_axis")
    dense = np.empty((*indices.shape, size), lut.dtype)
    for block in np.ndindex(*lut.shape[:-2]):
        place = tuple(slice(at * step, (at + 1) * step) for at, step in zip(block, blocks, strict=True))
        np.take(lut[block], indices[place], axis=0, out=dense[place], mode="clip")
    if size == 1:
        return dense.reshape(indices.shape)
    return _vectors_along(dense, int(vector_axis or 0) % indices.ndim)


def blockwise_shift_scale(data: Array, scale: Array, offset: Array | None = None) -> Array:
    """scale × (data - offset), one scale and offset for each block: data's size over scale's along every axis."""
    blocks = _block_sizes(data.shape, scale.shape, "data", "scales")
    split = [size for pair in zip(scale.shape, blocks, strict=True) for size in pair]
    spread = [size for pair in zip(scale.shape, (1,) * scale.ndim, strict=True) for size in pair]
    values = data.astype(np.float32).reshape(split)  # [S0, block0, S1, block1, ...]
    if offset is not None:
        if offset.shape != scale.shape:
            raise BackendError(f"offsets {list(offset.shape)} do not match scales {list(scale.shape)}")
        values -= offset.astype(np.float32).reshape(spread)
    values *= scale.astype(np.float32).reshape(spread)
    return values.reshape(data.shape)


def sparse_to_dense(nonzero_data: Array, mask: Array, shape: Any = None) -> Array:
    """Zeros, and the given values where the mask is set. With `shape` (iOS 16) the mask is packed into bytes."""
    if shape is not None:
        sizes = tuple(int(size) for size in shape)
        mask = unpack_bits(mask, 1, int(np.prod(sizes))).reshape(sizes)
    chosen = mask != 0
    if np.count_nonzero(chosen) != nonzero_data.size:
        raise BackendError(
            f"{nonzero_data.size} values are given for {np.count_nonzero(chosen)} set bits of a mask"
        )
    dense = np.zeros(mask.shape, nonzero_data.dtype)
    dense[chosen] = nonzero_data.reshape(-1)
    return dense


def lut_to_sparse(
    indices_mask: Array, indices_nonzero_data: Array, lut: Array, vector_axis: int | None = None
) -> tuple[Array, Array]:
    """The mask and the table entries of a sparse tensor of indices; both longer where entries are vectors."""
    dense = lut_to_dense(sparse_to_dense(indices_nonzero_data, indices_mask), lut, vector_axis)
    mask = indices_mask
    if lut.shape[-1] > 1:
        mask = np.repeat(mask, lut.shape[-1], axis=int(vector_axis or 0))
    return mask, dense[mask != 0]


def sparse_blockwise_shift_scale(
    data_mask: Array, nonzero_data: Array, scale: Array, offset: Array | None = None
) -> tuple[Array, Array]:
    """The mask, and scale × (data - offset) of the values it sets, with the blocks of the dense tensor."""
    dense = blockwise_shift_scale(sparse_to_dense(nonzero_data, data_mask), scale, offset)
    return data_mask, dense[data_mask != 0]


def affine_dequantize(quantized_data: Array, zero_point: Any, scale: Any, axis: int) -> Array:
    """scale × (data - zero point), each a scalar or one value for every index along `axis` (iOS 16)."""
    spread = [1] * quantized_data.ndim
    spread[int(axis)] = -1
    offset, factor = (np.asarray(one, np.float32) for one in (zero_point, scale))
    values = quantized_data.astype(np.float32)
    values -= offset.reshape(spread) if offset.ndim else offset
    values *= factor.reshape(spread) if factor.ndim else factor
    return values


def cast(source_val: Array, output_dtype: str) -> Array:
    """fp16 kept in the file, fp32 in the program."""
    if output_dtype != "fp32":
        raise BackendError(f"constexpr_cast to {output_dtype!r}: only fp32 is defined")
    return source_val.astype(np.float32)


def _block_sizes(shape: tuple[int, ...], blocks: tuple[int, ...], what: str, which: str) -> tuple[int, ...]:
    fits = len(shape) == len(blocks) and all(
        n > 0 and size % n == 0 for size, n in zip(shape, blocks, strict=True)
    )
    if not fits:
        raise BackendError(f"{which} {list(blocks)} do not divide {what} {list(shape)} into blocks")
    return tuple(size // n for size, n in zip(shape, blocks, strict=True))


def _packed_lut(indices: Array, lut: Array, shape: tuple[int, ...]) -> Array:
    bits = max(1, int(lut.size).bit_length() - 1)
    elements = int(np.prod(shape))
    if 1 << bits != lut.size or indices.size != (elements * bits + 7) // 8:
        raise BackendError(
            f"{indices.size} bytes of indices do not fill {list(shape)} from {lut.size} table entries"
        )
    return lut.reshape(-1)[unpack_bits(indices, bits, elements)].reshape(shape)


def _vectors_along(dense: Array, axis: int) -> Array:
    """[..., V] -> the V entries in a row along `axis`."""
    moved = np.moveaxis(dense, -1, axis + 1)
    shape = list(dense.shape[:-1])
    shape[axis] *= dense.shape[-1]
    return moved.reshape(shape)


CONSTEXPR: Mapping[str, Callable[..., Any]] = {
    "constexpr_lut_to_dense": lut_to_dense,
    "constexpr_blockwise_shift_scale": blockwise_shift_scale,
    "constexpr_sparse_to_dense": sparse_to_dense,
    "constexpr_lut_to_sparse": lut_to_sparse,
    "constexpr_sparse_blockwise_shift_scale": sparse_blockwise_shift_scale,
    "constexpr_affine_dequantize": affine_dequantize,
    "constexpr_cast": cast,
}
