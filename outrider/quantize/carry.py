"""Carry the blocks of a GGUF file into a packed matrix without rounding them again.

A ggml block is value = scale * (code - offset) + minimum. Blocks without a minimum fit `MatMulNBits` as they
are, once their codes are moved to the kernel's middle. A minimum is exact as a correction: y gains
block_sums(x) times (minimum + offset to the middle), because it is the same for every value of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from outrider.errors import ExportError
from outrider.quantize.ggml import Blocks, blocks
from outrider.quantize.layout import concatenate, over_chunks, store_blocks
from outrider.quantize.methods import Codes, middle
from outrider.quantize.schemes import BlockInt, Carry, PackedMatrix, RawBlocks

__all__ = ["carried_scheme", "carry", "rounded_scheme"]


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


def _carry_rows(part: RawBlocks, target: BlockInt, corrected: bool, rows: slice) -> PackedMatrix:
    data = part.data[rows]
    stored = _split(blocks(RawBlocks(part.type_name, (len(data), part.shape[1]), data)), target.block)
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
