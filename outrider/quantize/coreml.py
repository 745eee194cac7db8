"""Weights as Core ML stores them: palettes, and integers per row or block, with half-precision tables and scales.

`compress` is the one way from a float matrix to what a package holds; `constexpr` writes it into a MIL program as
`constexpr_lut_to_dense` or `constexpr_blockwise_shift_scale` (MIL opset of iOS 18): value = scale * (code - offset).

Where blocks of 32 are asked for, a GGUF file's own 4-bit blocks are carried, codes as they are: a negative scale
(Q4_0) turns its codes around, a minimum (Q4_1, Q4_K) becomes an offset in half precision. Wider sources become blocks
of 8 bits, which hold those of Q8_0 exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.quantize.carry import FORMATS
from outrider.quantize.channels import ChannelMethod, pack_channels
from outrider.quantize.coreml_recipes import Blocks, CoreMLRecipe, CoreMLScheme, Palette, scheme_name
from outrider.quantize.executorch import IntxScheme, quantize
from outrider.quantize.ggml import blocks
from outrider.quantize.layout import over_chunks
from outrider.quantize.methods import quantize_blocks
from outrider.quantize.palettes import Palettes, compensate_palettes, fit_palettes, look_up
from outrider.quantize.report import SlotReport
from outrider.quantize.schemes import BlockInt, RawBlocks

__all__ = ["Compressed", "check_divides", "compress", "constexpr"]

FloatArray = NDArray[np.float32]
CARRIED = 32  # inputs of a block that is carried
HALF_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Compressed:
    """A weight [N, K] as a package holds it.

    Half precision (`scheme` None): `codes` float16 [N, K]. `Palette`: `codes` uint8 [N, K] into `tables` float16
    [N / group, 2^bits]. `Blocks`: `codes` int8 [N, K], or uint8 where there are `offsets` (uint8 or float16), with
    `scales` float16 [N, K / block]; both offsets and scales are [N, 1] for whole rows.
    """

    scheme: CoreMLScheme | None
    codes: NDArray[Any]
    report: SlotReport
    tables: NDArray[np.float16] | None = None
    scales: NDArray[np.float16] | None = None
    offsets: NDArray[Any] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes in the package."""
        bits = 16 if self.scheme is None else self.scheme.bits
        size = -(-self.codes.size * bits // 8)
        for part in (self.tables, self.scales):
            size += 0 if part is None else part.nbytes
        if self.offsets is not None:
            size += -(-self.offsets.size * (bits if self.offsets.dtype == np.uint8 else 16) // 8)
        return size

    def values(self) -> FloatArray:
        """The float32 weight [N, K] that a runtime computes with, before it rounds it to half precision."""
        if self.tables is not None:
            return look_up(Palettes(self.codes, self.tables))
        if self.scales is None:
            return self.codes.astype(np.float32)
        N, K = self.shape
        parts = self.codes.reshape(N, self.scales.shape[1], -1).astype(np.float32)
        if self.offsets is not None:
            parts -= self.offsets.astype(np.float32)[..., None]
        parts *= self.scales.astype(np.float32)[..., None]
        values: FloatArray = parts.reshape(N, K)
        return values

    @property
    def operation(self) -> str:
        """The MIL operation that makes the weight of what is stored."""
        if self.scheme is None:
            return "const"
        return "constexpr_blockwise_shift_scale" if self.tables is None else "constexpr_lut_to_dense"

    def parameters(self, convolution: bool = False) -> dict[str, tuple[NDArray[Any], str]]:
        """What that operation reads: arrays and their MIL types by parameter; codes of few bits take a byte each.

        Shapes are those of a matrix [N, K], or of the weight of a 1×1 `convolution` [N, K, 1, 1].
        """

        def shaped(array: NDArray[Any]) -> NDArray[Any]:
            return array[:, :, None, None] if convolution else array

        if self.scheme is None:
            return {"val": (shaped(self.codes), "fp16")}
        bits = self.scheme.bits
        if self.tables is not None:
            tables = shaped(self.tables[:, None])[..., None]  # [N / group, 1, (1, 1,) 2^bits, 1]
            return {"indices": (shaped(self.codes), f"uint{bits}"), "lut": (tables, "fp16")}
        assert self.scales is not None
        kind = f"{'int' if self.offsets is None else 'uint'}{bits}"
        found = {"data": (shaped(self.codes), kind), "scale": (shaped(self.scales), "fp16")}
        if self.offsets is not None:
            found["offset"] = (shaped(self.offsets), kind if self.offsets.dtype == np.uint8 else "fp16")
        return found

    def rows(self, start: int, stop: int) -> Compressed:
        """Some rows of the weight. Raises ExportError where they cut through the rows of a palette."""
        whole = slice(start, stop)
        if isinstance(self.scheme, Palette) and self.tables is not None:
            group = self.scheme.group
            if start % group or stop % group:
                raise ExportError(
                    f"rows {start} to {stop} of {self.report.slot} cut through palettes of {group} rows"
                )
            tables = self.tables[start // group : stop // group]
            return replace(self, codes=self.codes[whole], tables=tables)
        scales, offsets = (None if part is None else part[whole] for part in (self.scales, self.offsets))
        return replace(self, codes=self.codes[whole], scales=scales, offsets=offsets)

    def scaled(self, factor: float) -> Compressed:
        """The weight times a factor, which goes into the tables or scales."""
        if factor == 1.0:
            return self
        name = "tables" if self.tables is not None else "scales" if self.scales is not None else "codes"
        values = getattr(self, name).astype(np.float32) * np.float32(factor)
        scaled: dict[str, Any] = {name: _half(values, self.report.slot)}
        return replace(self, **scaled)


def compress(
    recipe: CoreMLRecipe,
    slot: str,
    matrix: FloatArray,  # [N, K]
    *,
    raw: Sequence[RawBlocks] | None = None,
    moment: FloatArray | None = None,
) -> Compressed:
    """What the recipe makes of a slot's matrix; `raw` are the source's own blocks, row-wise parts of it.

    `moment` is the second moment of what the slot reads: [K, K] lets later weights of a row compensate the errors
    of earlier ones, its diagonal [K] weighs errors. Raises ExportError where a block or a group does not divide the
    weight, or its values do not fit half precision.
    """
    scheme = recipe.scheme_for(slot)
    matrix = np.ascontiguousarray(matrix, np.float32)
    if not np.isfinite(matrix).all():
        raise ExportError(f"{slot} holds values that are not finite; the source checkpoint is damaged")
    check_divides(scheme, slot, matrix.shape)
    if scheme is None:
        found = _Parts(None, _half(matrix, slot))
    elif isinstance(scheme, Palette):
        found = _palettes(scheme, matrix, moment)
    else:
        found = _blocks(scheme, slot, matrix, raw, moment)
    report = _report(slot, matrix, scheme, found.scheme, raw, moment)
    made = Compressed(found.scheme, found.codes, report, found.tables, found.scales, found.offsets)
    lost, total = np.linalg.norm(matrix - made.values()), np.linalg.norm(matrix)
    error = float(lost / total) if total else float(lost)
    return replace(made, report=replace(report, bytes_after=made.nbytes, relative_error=error))


class _Parts(NamedTuple):
    scheme: CoreMLScheme | None
    codes: NDArray[Any]
    tables: NDArray[np.float16] | None = None
    scales: NDArray[np.float16] | None = None
    offsets: NDArray[Any] | None = None


def check_divides(scheme: CoreMLScheme | None, slot: str, shape: tuple[int, ...]) -> None:
    """Raise ExportError where palettes or blocks of a scheme do not divide a slot's matrix [N, K]."""
    N, K = shape
    if isinstance(scheme, Palette) and N % scheme.group:
        raise ExportError(
            f"{slot} has {N} rows, and a palette for every {scheme.group} does not divide them: "
            f"give the slot lut{scheme.bits}-g<divisor>, or int8"
        )
    if isinstance(scheme, Blocks) and scheme.block is not None and K % scheme.block:
        raise ExportError(
            f"{slot} has {K} inputs, and blocks of {scheme.block} do not divide them (coremltools would leave "
            "such a weight as it is, without a word): give the slot another block, or int8"
        )


def _half(values: FloatArray, slot: str) -> NDArray[np.float16]:
    peak = float(np.abs(values).max(initial=0.0))
    if peak > HALF_MAX:
        raise ExportError(f"{slot} holds {peak:g}; half precision ends at {HALF_MAX:g}")
    return values.astype(np.float16)


def _diagonal(moment: FloatArray | None) -> FloatArray | None:
    return moment if moment is None or moment.ndim == 1 else np.ascontiguousarray(moment.diagonal())


def _palettes(scheme: Palette, matrix: FloatArray, moment: FloatArray | None) -> _Parts:
    if moment is not None and moment.ndim == 2:
        made = compensate_palettes(matrix, scheme.bits, scheme.group, moment)
    else:
        made = fit_palettes(matrix, scheme.bits, scheme.group, moment)
    return _Parts(scheme, made.indices, tables=made.tables)


def _blocks(
    scheme: Blocks,
    slot: str,
    matrix: FloatArray,
    raw: Sequence[RawBlocks] | None,
    moment: FloatArray | None,
) -> _Parts:
    if raw and scheme.block == CARRIED and all(part.type_name in FORMATS for part in raw):
        if all(FORMATS[part.type_name].bits == 4 for part in raw):
            return _carried(raw)  # exact, so it serves where 8 bits were asked for
        scheme = Blocks(8, CARRIED)
    if raw and scheme == Blocks(8, CARRIED) and all(part.type_name == "Q8_0" for part in raw):
        parts = [blocks(part) for part in raw]
        codes = np.concatenate([part.codes.astype(np.int16) - part.offset for part in parts])
        scales = np.concatenate([part.scales for part in parts])
        held = np.abs(scales), np.where(scales < 0, -1, 1)[..., None]
        return _Parts(
            replace(scheme, carried=True),
            np.clip(codes * held[1], -128, 127).astype(np.int8).reshape(matrix.shape),
            scales=_half(held[0], slot),
        )
    if scheme.block is None:
        method: ChannelMethod = "gptq" if moment is not None and moment.ndim == 2 else "mse"
        packed = pack_channels(matrix, 8, method, moment=moment)
        return _Parts(scheme, packed.codes, scales=_half(packed.scales[:, None], slot))
    if scheme.bits == 8:
        return _rounded(scheme, slot, matrix)
    if scheme.symmetric:
        weight = quantize(matrix, IntxScheme(4, scheme.block, "mse"), _diagonal(moment))
        return _Parts(scheme, weight.codes, scales=_half(weight.scales, slot))
    return _offset(scheme, slot, matrix, _diagonal(moment))


def _rounded(scheme: Blocks, slot: str, matrix: FloatArray) -> _Parts:
    """8-bit codes to nearest, under scales that are half precision before the codes are chosen."""
    assert scheme.block is not None
    parts = matrix.reshape(len(matrix), -1, scheme.block)
    scales = _half(np.maximum(np.abs(parts).max(axis=-1) / np.float32(127), np.float32(2.0**-24)), slot)
    codes = np.rint(parts / scales.astype(np.float32)[..., None])
    return _Parts(scheme, np.clip(codes, -127, 127).astype(np.int8).reshape(matrix.shape), scales=scales)


def _offset(scheme: Blocks, slot: str, matrix: FloatArray, importance: FloatArray | None) -> _Parts:
    """4-bit codes between the searched ends of a block."""
    assert scheme.block is not None
    N, K = matrix.shape
    method = BlockInt(4, scheme.block, symmetric=False, method="mse")
    weights = None if importance is None else importance.reshape(-1, scheme.block)
    parts = over_chunks(
        lambda rows: quantize_blocks(
            matrix[rows].reshape(-1, K // method.block, method.block), method, weights
        ),
        matrix.shape,
    )
    codes, scales, offsets = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return _Parts(scheme, codes.reshape(N, K), scales=_half(scales, slot), offsets=offsets)


def _carried(raw: Sequence[RawBlocks]) -> _Parts:
    """A source's own 4-bit blocks: value = |d| (c - offset), where a negative d turns c around to 15 - c.

    Offsets are whole, packed with the codes, unless a block has a minimum.
    """
    parts = [blocks(part) for part in raw]
    codes = np.concatenate([part.codes for part in parts])  # [N, B, 32]
    scales = np.concatenate([part.scales for part in parts])
    offsets = np.concatenate([np.full(part.scales.shape, part.offset, np.float32) for part in parts])
    minima = np.concatenate(
        [np.zeros_like(part.scales) if part.minimums is None else part.minimums for part in parts]
    )
    negative = scales < 0
    codes = np.where(negative[..., None], np.uint8(15) - codes, codes)
    offsets = np.where(negative, np.float32(15) - offsets, offsets)
    scales = np.abs(scales)
    shape = (len(codes), -1)
    scheme = Blocks(4, CARRIED, symmetric=False, carried=True)
    if all(part.minimums is None for part in parts):
        whole = offsets.astype(np.uint8)
        return _Parts(scheme, codes.reshape(shape), scales=_half(scales, "a carried slot"), offsets=whole)
    scales, offsets, codes = _with_minima(codes, scales, offsets, minima)
    return _Parts(
        scheme,
        codes.reshape(shape),
        scales=_half(scales, "a carried slot"),
        offsets=_half(offsets, "a carried slot"),
    )


def _with_minima(
    codes: NDArray[np.uint8], scales: FloatArray, offsets: FloatArray, minima: FloatArray
) -> tuple[FloatArray, FloatArray, NDArray[np.uint8]]:
    """Minima as offsets; a block that is nothing but its minimum gets that as its scale."""
    held = scales.astype(np.float16).astype(np.float32)  # what the offset will be multiplied with
    flat = held <= np.abs(minima) * np.float32(1e-4)
    offsets = offsets - np.divide(minima, held, out=np.zeros_like(held), where=~flat)
    offsets = np.where(flat, -np.sign(minima), offsets)
    codes = np.where(flat[..., None], np.uint8(0), codes)
    return np.where(flat, np.abs(minima), scales), offsets, codes


def _report(
    slot: str,
    matrix: FloatArray,
    asked: CoreMLScheme | None,
    made: CoreMLScheme | None,
    raw: Sequence[RawBlocks] | None,
    moment: FloatArray | None,
) -> SlotReport:
    """The report line of a weight; sizes and error of what was made are filled in afterwards."""
    return SlotReport(
        slot=slot,
        shape=(matrix.shape[0], matrix.shape[1]),
        before="+".join(dict.fromkeys(part.type_name for part in raw)) if raw else str(matrix.dtype),
        after=scheme_name(made),
        bytes_before=sum(part.data.nbytes for part in raw) if raw else matrix.nbytes,
        bytes_after=0,
        relative_error=0.0,
        carried=isinstance(made, Blocks) and made.carried,
        reason=_reason(asked, made, raw, moment),
    )


def _reason(
    asked: CoreMLScheme | None,
    made: CoreMLScheme | None,
    raw: Sequence[RawBlocks] | None,
    moment: FloatArray | None,
) -> str:
    if made is None:
        return "left in float16: the recipe says so"
    if isinstance(made, Blocks) and made.carried:
        return "the source's own blocks, scales and minima in half precision"
    how = "quantized"
    if isinstance(made, Blocks) and isinstance(asked, Blocks) and made.bits != asked.bits:
        how = f"8 bits, as the source has more than {asked.bits}"
    elif raw and any(part.type_name.startswith("Q") for part in raw):
        how = f"rounded a second time: {scheme_name(made)} cannot hold these blocks"
    if moment is None or made == Blocks(8, CARRIED):
        return how
    return how + ("; errors compensated" if moment.ndim == 2 and not _blocked(made) else "; calibrated")


def _blocked(scheme: CoreMLScheme) -> bool:
    return isinstance(scheme, Blocks) and scheme.block is not None


def constexpr(mb: Any, weight: Compressed, name: str, *, convolution: bool = False) -> Any:
    """The weight as a constant of a MIL program under construction: a Var [N, K], or [N, K, 1, 1].

    `mb` is coremltools' builder.
    """
    from coremltools.converters.mil.mil import types

    values = {}
    for key, (array, kind) in weight.parameters(convolution).items():
        dtype = types.type_mapping.nptype_from_builtin(types.string_to_builtin(kind))
        values[key] = array.astype(dtype, copy=False)
        if (
            values[key].dtype.metadata != np.dtype(dtype).metadata
        ):  # a cast to the same size keeps no metadata
            values[key] = values[key].view(dtype)
    return getattr(mb, weight.operation)(**values, name=name)
