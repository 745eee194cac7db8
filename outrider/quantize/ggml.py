"""The block formats of ggml tensors, decoded with numpy alone.

Every block format supported here stores, for a block of elements, an integer code per element and one
scale (and for some a minimum) per block:

    value = scale * (code - offset) + minimum

`blocks` returns exactly those parts, `dequantize` the values. The layouts follow the definitions of
ggml (https://github.com/ggml-org/ggml, `ggml-common.h`); K-quants are superblocks of 256 elements whose
block scales and minimums are themselves 6-bit (or 8-bit) integers times one float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError
from outrider.quantize.schemes import RawBlocks

__all__ = ["GGML_TYPES", "SUPPORTED_TYPES", "Blocks", "GgmlType", "blocks", "dequantize", "type_by_id"]

Bytes = NDArray[np.uint8]
FIFTH = np.uint8(4)  # the place of the fifth bit of a code
ROWS_BYTES = 32 << 20  # float32 bytes decoded at a time, so that intermediates stay small


@dataclass(frozen=True)
class GgmlType:
    """One tensor type: `block_bytes` bytes hold `block_elements` elements."""

    name: str
    type_id: int
    block_elements: int
    block_bytes: int


GGML_TYPES: dict[str, GgmlType] = {
    name: GgmlType(name, type_id, elements, size)
    for name, type_id, elements, size in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("BF16", 30, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q4_1", 3, 32, 20),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q2_K", 10, 256, 84),
        ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        ("IQ2_XXS", 16, 256, 66),
        ("IQ2_XS", 17, 256, 74),
        ("IQ3_XXS", 18, 256, 98),
        ("IQ1_S", 19, 256, 50),
        ("IQ4_NL", 20, 32, 18),
        ("IQ3_S", 21, 256, 110),
        ("IQ2_S", 22, 256, 82),
        ("IQ4_XS", 23, 256, 136),
        ("I8", 24, 1, 1),
        ("I16", 25, 1, 2),
        ("I32", 26, 1, 4),
        ("I64", 27, 1, 8),
        ("F64", 28, 1, 8),
        ("IQ1_M", 29, 256, 56),
        ("TQ1_0", 34, 256, 54),
        ("TQ2_0", 35, 256, 66),
        ("MXFP4", 39, 32, 17),
    )
}
"""Every type a GGUF file may name, by name. Only `SUPPORTED_TYPES` can be decoded."""

_BY_ID = {kind.type_id: kind for kind in GGML_TYPES.values()}


@dataclass(frozen=True)
class Blocks:
    """A quantized weight [N, K] in parts: value = scales * (codes - offset) + minimums, K = nb * bs."""

    codes: NDArray[np.uint8]  # [N, nb, bs], from 0
    scales: NDArray[np.float32]  # [N, nb]
    minimums: NDArray[np.float32] | None  # [N, nb]; None = all zero
    offset: int


def type_by_id(type_id: int) -> GgmlType:
    """The type with this number in a GGUF file. Raises CheckpointError for a number nobody knows."""
    if type_id not in _BY_ID:
        raise CheckpointError(
            f"unknown ggml tensor type number {type_id}; supported: {', '.join(SUPPORTED_TYPES)}"
        )
    return _BY_ID[type_id]


def blocks(raw: RawBlocks) -> Blocks:
    """Codes, scales and minimums of a quantized weight, exactly as stored.

    bs is 16 for Q6_K and 32 for the others. Raises CheckpointError for float types (they have no codes)
    and for types that are not supported.
    """
    decoder = _DECODERS.get(raw.type_name)
    if decoder is None:
        raise CheckpointError(
            f"ggml type {raw.type_name} has no integer blocks here; known: {', '.join(_DECODERS)}"
        )
    _check_bytes(raw)
    kind = GGML_TYPES[raw.type_name]
    stored = np.ascontiguousarray(raw.data).reshape(-1, kind.block_bytes)  # [N * stored blocks, bytes]
    part = decoder(stored)
    N, K = raw.shape
    nb = K // part.codes.shape[-1]
    minimums = None if part.minimums is None else part.minimums.reshape(N, nb)
    return Blocks(part.codes.reshape(N, nb, -1), part.scales.reshape(N, nb), minimums, part.offset)


def dequantize(raw: RawBlocks) -> NDArray[np.float32]:
    """The float32 values [N, K] of a weight in any supported type.

    Raises CheckpointError when the type is not supported or the bytes do not fit the shape.
    """
    if raw.type_name not in SUPPORTED_TYPES:
        raise CheckpointError(
            f"ggml type {raw.type_name} cannot be decoded; supported: {', '.join(SUPPORTED_TYPES)}"
        )
    _check_bytes(raw)
    N, K = raw.shape
    values = np.empty((N, K), np.float32)
    step = max(1, ROWS_BYTES // (4 * K))
    for start in range(0, N, step):
        rows = raw.data[start : start + step]
        values[start : start + step] = _values(RawBlocks(raw.type_name, (len(rows), K), rows))
    return values


def _values(raw: RawBlocks) -> NDArray[np.float32]:
    if raw.type_name in _FLOATS:
        return _FLOATS[raw.type_name](np.ascontiguousarray(raw.data)).reshape(raw.shape)
    part = blocks(raw)
    values = part.codes.astype(np.float32)
    values -= part.offset
    values *= part.scales[..., None]
    if part.minimums is not None:
        values += part.minimums[..., None]
    return values.reshape(raw.shape)


def _check_bytes(raw: RawBlocks) -> None:
    kind = GGML_TYPES[raw.type_name]
    N, K = raw.shape
    expected = (N, K // kind.block_elements * kind.block_bytes)
    if K % kind.block_elements or raw.data.shape != expected:
        raise CheckpointError(
            f"a {raw.type_name} weight of shape {raw.shape} needs rows that are multiples of "
            f"{kind.block_elements} and {expected} bytes; got {raw.data.shape}"
        )


def _half(data: Bytes) -> NDArray[np.float32]:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _bfloat(data: Bytes) -> NDArray[np.float32]:
    return (np.ascontiguousarray(data).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 2n]: all low nibbles, then all high ones."""
    return np.concatenate([data & 0x0F, data >> 4], axis=-1)


def _fifth_bits(data: Bytes) -> Bytes:
    """[n, 4] bytes -> [n, 32] of 0 or 16: bit i belongs to element i."""
    return np.unpackbits(data, axis=-1, bitorder="little") << FIFTH


def _q4_0(b: Bytes) -> Blocks:
    return Blocks(_nibbles(b[:, 2:]), _half(b[:, :2]), None, 8)


def _q4_1(b: Bytes) -> Blocks:
    return Blocks(_nibbles(b[:, 4:]), _half(b[:, :2]), _half(b[:, 2:4]), 0)


def _q5_0(b: Bytes) -> Blocks:
    return Blocks(_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), _half(b[:, :2]), None, 16)


def _q5_1(b: Bytes) -> Blocks:
    codes = _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])
    return Blocks(codes, _half(b[:, :2]), _half(b[:, 2:4]), 0)


def _q8_0(b: Bytes) -> Blocks:
    return Blocks(b[:, 2:] ^ np.uint8(128), _half(b[:, :2]), None, 128)  # two's complement -> excess 128


def _k_scales(b: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and (negative) minimums [n, 8] from a K-quant's head: d, dmin, 12 bytes of 6-bit pairs.

    Bytes 0-3 and 4-7 hold the first four scales and minimums in their low six bits; their top two bits
    and the nibbles of bytes 8-11 hold the last four.
    """
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([low & 63, (high & 0x0F) | (low >> 6 << 4)], axis=-1)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=-1)
    return _half(b[:, :2]) * scale, -(_half(b[:, 2:4]) * minimum)


def _q4_k(b: Bytes) -> Blocks:
    scales, minimums = _k_scales(b)
    return Blocks(_nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 32), scales, minimums, 0)


def _q5_k(b: Bytes) -> Blocks:
    scales, minimums = _k_scales(b)
    codes = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    bit = np.arange(8, dtype=np.uint8)[:, None]  # bit i of byte l is the fifth bit of element l of block i
    codes |= (b[:, None, 16:48] >> bit & np.uint8(1)) << FIFTH
    return Blocks(codes, scales, minimums, 0)


def _q6_k(b: Bytes) -> Blocks:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)  # halves of 4 x 32 elements
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> shift & np.uint8(3)
    scales = _half(b[:, 208:210]) * np.ascontiguousarray(b[:, 192:208]).view(np.int8)
    return Blocks((low | high << FIFTH).reshape(-1, 16), scales, None, 32)


_FLOATS: dict[str, Callable[[Bytes], NDArray[np.float32]]] = {
    "F32": lambda data: data.view("<f4"),
    "F16": _half,
    "BF16": _bfloat,
}
_DECODERS: dict[str, Callable[[Bytes], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
SUPPORTED_TYPES = (*_FLOATS, *_DECODERS)
"""Names of the types that `dequantize` decodes."""
