"""Carry the blocks of a GGUF file into a packed matrix without rounding them again.

A ggml block is value = scale * (code - offset) + minimum. Blocks without a minimum fit `MatMulNBits` as they
are, once their codes are moved to the kernel's middle. A minimum is exact as a correction: y gains
block_sums(x) times (minimum + offset to the middle), because it is the same for every value of a block.
A product has most of that for nothing, as a zero point, and the rest as further columns; see `split_minima`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from outrider.errors import ExportError
from outrider.quantize.ggml import Blocks, blocks
from outrider.quantize.layout import (
    concatenate,
    over_chunks,
    pack_nibbles,
    store_blocks,
    to_blocks,
    unpack_nibbles,
    unpack_rows,
)
from outrider.quantize.methods import Codes, middle, quantize_blocks
from outrider.quantize.schemes import BlockInt, Carry, PackedMatrix, RawBlocks

__all__ = ["carried_scheme", "carry", "rounded_scheme", "split_minima", "with_sums"]


FARTHEST = (
    0.5  # of the source's own rounding in a row, which is a step / sqrt(12); at most 0.28 in four real models
)


@dataclass(frozen=True)
class _Format:
    """What a ggml block type needs of a kernel."""

    bits: int  # 4 when the codes fit a nibble
    block: int
    minimum: bool


FORMATS = {
    "Q4_0": _Format(4, 32, False),
    "Q4_1": _Format(4, 32, True),
    "Q5_0": _Format(8, 32, False),
    "Q5_1": _Format(8, 32, True),
    "Q8_0": _Format(8, 32, False),
    "Q4_K": _Format(4, 32, True),
    "Q5_K": _Format(8, 32, True),
    "Q6_K": _Format(8, 16, False),
}


def carried_scheme(types: Sequence[str], scheme: BlockInt | Carry) -> BlockInt | None:
    """The scheme under which parts of these ggml types are held exactly, or None when they are rounded again.

    A `BlockInt` holds types without a minimum when it has the bits and its block divides theirs; `Carry`
    takes whatever bits and block the types need, as far as its fields allow.
    """
    needed = _needed(types)
    if needed is None:
        return None
    if isinstance(scheme, Carry):
        if (needed.minimum and scheme.minimum == "round") or (needed.bits == 8 and scheme.wide == "round"):
            return None
        level = scheme.otherwise.accuracy_level
        return BlockInt(8 if needed.bits == 8 else 4, needed.block, accuracy_level=level)
    if needed.minimum or scheme.bits < needed.bits or needed.block % scheme.block:
        return None
    return replace(scheme, symmetric=True, method="rtn")


def rounded_scheme(types: Sequence[str], scheme: Carry) -> BlockInt:
    """The scheme of parts that `carried_scheme` does not carry."""
    return scheme.otherwise if _needed(types) is None else scheme.eight_bit


def _needed(types: Sequence[str]) -> _Format | None:
    formats = [FORMATS[name] for name in types if name in FORMATS]
    if not formats or len(formats) < len(types):
        return None
    return _Format(
        max(part.bits for part in formats),
        min(part.block for part in formats),
        any(part.minimum for part in formats),
    )


def carry(raw: Sequence[RawBlocks], scheme: BlockInt | Carry) -> PackedMatrix | None:
    """Pack the source's own blocks (row-wise parts of one slot), or None when the scheme cannot hold them.

    Without minima the packed values equal the dequantized ones bit for bit; with them, up to one float32
    rounding. Raises ExportError when the parts differ in width.
    """
    target = carried_scheme([part.type_name for part in raw], scheme)
    if target is None:
        return None
    if len({part.shape[1] for part in raw}) != 1:
        raise ExportError(f"parts of one slot differ in width: {[part.shape for part in raw]}")
    corrected = any(FORMATS[part.type_name].minimum for part in raw)
    chunks: list[PackedMatrix] = []
    for part in raw:
        run = partial(_carry_rows, part, target, corrected)
        chunks += over_chunks(run, part.shape)
    return replace(concatenate(chunks), carried=True)


def split_minima(packed: PackedMatrix) -> tuple[PackedMatrix, PackedMatrix] | None:
    """The matrix with whole zero points in place of most of its correction, and the rest [N, blocks] in few bits.

    What is left of a minimum is at most half a step of its block, so that it takes no more bits than the codes: with
    4, its rounding is a fifteenth of what rounding to whole zero points alone would do. The `correction` of the first
    is what the second holds. None when blocks of a row lie so far from 0 that no zero point reaches, and the rounding
    would be more than half of the source's own there.
    """
    scheme, scales, correction = packed.scheme, packed.scales, packed.correction
    assert isinstance(scheme, BlockInt)
    assert scales is not None
    assert correction is not None
    half = middle(scheme.bits)
    exact = half - np.divide(correction, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros = np.clip(np.rint(exact), 0, 2 * half - 1)  # [N, blocks]
    left = correction - scales * (half - zeros)
    rest = replace(scheme, symmetric=True, method="mse")
    sums = store_blocks(quantize_blocks(to_blocks(left, scheme.block), rest), rest, left.shape)
    held = unpack_rows(sums, slice(None))
    wrong, own = (np.mean(np.square(values), axis=1) for values in (held - left, scales))  # [N]
    if np.any(wrong > FARTHEST**2 * own / 12):
        return None
    zero_points = zeros.astype(np.uint8)
    stored = pack_nibbles(zero_points) if scheme.bits == 4 else zero_points
    return replace(packed, zero_points=stored, correction=held), sums


def with_sums(packed: PackedMatrix, sums: PackedMatrix) -> PackedMatrix:
    """The two of `split_minima` as one matrix, for inputs x with their block sums behind them.

    [N, K + blocks], and columns of zeros up to a whole block. The blocks must divide K, as those of a GGUF file do.
    """
    scheme, zeros = packed.scheme, packed.zero_points
    assert isinstance(scheme, BlockInt)
    assert zeros is not None
    assert packed.scales is not None
    assert sums.scales is not None
    N, blocks, _ = packed.codes.shape
    whole = zeros if scheme.bits == 8 else unpack_nibbles(zeros, blocks)
    whole = np.concatenate([whole, np.full(sums.scales.shape, middle(scheme.bits), np.uint8)], axis=1)
    codes = np.concatenate([packed.codes, sums.codes], axis=1)
    return PackedMatrix(
        scheme,
        (N, codes.shape[1] * scheme.block),
        codes,
        np.concatenate([packed.scales, sums.scales], axis=1),
        whole if scheme.bits == 8 else pack_nibbles(whole),
    )


def _carry_rows(part: RawBlocks, target: BlockInt, corrected: bool, rows: slice) -> PackedMatrix:
    data = part.data[rows]
    stored = _split(blocks(RawBlocks(part.type_name, (len(data), part.shape[1]), data)), target.block)
    if not all(values is None or np.isfinite(values).all() for values in (stored.scales, stored.minimums)):
        raise ExportError(
            f"a {part.type_name} block has a scale that is not finite; the source checkpoint is damaged"
        )
    # Codes move from their own offset to the kernel's; without an offset (minimum types) they are centred,
    # which keeps the int8 activations' rounding error small, and the correction takes up the difference.
    centre = stored.offset if stored.minimums is None else 1 << (_bits_used(part.type_name) - 1)
    codes = stored.codes + np.uint8(middle(target.bits) - centre)
    packed = store_blocks(Codes(codes, stored.scales, None), target, (len(data), part.shape[1]))
    if not corrected:
        return packed
    if stored.minimums is None:
        return replace(packed, correction=np.zeros_like(stored.scales))
    return replace(packed, correction=stored.minimums + stored.scales * np.float32(centre - stored.offset))


def _bits_used(type_name: str) -> int:
    return int(type_name[1])


def _split(stored: Blocks, block: int) -> Blocks:
    """The same values in smaller blocks, each with a copy of its scale."""
    N, count, size = stored.codes.shape
    times = size // block
    if times == 1:
        return stored
    minimums = None if stored.minimums is None else np.repeat(stored.minimums, times, axis=1)
    codes = stored.codes.reshape(N, count * times, block)
    return Blocks(codes, np.repeat(stored.scales, times, axis=1), minimums, stored.offset)
