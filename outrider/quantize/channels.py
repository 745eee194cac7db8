"""Weights with one scale per output channel: the form that integer accelerators multiply with.

Codes are signed and symmetric around a zero point of 0: -128..127 or -8..7, as ONNX and QNN store them; every
scale is positive. A row of a large matrix has one scale for hundreds of weights, so rounding to nearest is
rarely good enough at 4 bits: `mse` searches where to clip, `gptq` makes later weights of the row
compensate the errors of earlier ones, and tries several scales.

The Hexagon NPU also takes a small whole multiplier for every block of a row (QNN's "low-power block
quantization"): the accumulators of a block are multiplied by 1..16 before they are summed, and one float scale
a channel remains. That costs 8 bits a block and makes 4-bit weights considerably better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError, UsageError
from outrider.quantize.layout import over_chunks
from outrider.quantize.methods import compensate_rows, inverse_factor, middle

__all__ = ["ChannelMatrix", "ChannelMethod", "code_range", "ordered_inverse", "pack_channels"]

FloatArray = NDArray[np.float32]
ChannelMethod = Literal["rtn", "mse", "gptq"]

CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
GPTQ_RATIOS = (1.0, 0.9, 0.8, 1.1)  # of the scale that the search without compensation finds
BLOCK_SIZES = (16, 32, 64)
MULTIPLIERS = 16  # the largest of a block
DAMPING = 0.05  # of GPTQ: more than a hundredth, as a few thousand tokens are little for a thousand inputs


@dataclass(frozen=True)
class ChannelMatrix:
    """A weight [N, K] as value = scales[n] * multipliers[n, k // block] * codes[n, k].

    Without blocks every multiplier is 1. 4-bit codes take a byte each here.
    """

    bits: int
    codes: NDArray[np.int8]  # [N, K]
    scales: FloatArray  # [N], positive
    method: ChannelMethod
    relative_error: float  # ||W - Ŵ|| / ||W||, Frobenius
    multipliers: NDArray[np.uint8] | None = None  # [N, K / block], 1..16

    def __post_init__(self) -> None:
        """Refuse what no accelerator reads."""
        low, high = code_range(self.bits)
        if self.codes.dtype != np.int8 or self.codes.ndim != 2 or self.scales.shape != self.codes.shape[:1]:
            raise ExportError(
                f"codes {self.codes.dtype}{self.codes.shape} and scales {self.scales.shape} do not make a matrix"
            )
        if self.codes.min() < low or self.codes.max() > high or not (self.scales > 0).all():
            raise ExportError(f"codes leave {low}..{high} or a scale is not positive")
        if self.multipliers is not None:
            _check_multipliers(self.multipliers, self.codes.shape)

    @property
    def block(self) -> int | None:
        """Weights that share a multiplier, or None without any."""
        return None if self.multipliers is None else self.codes.shape[1] // self.multipliers.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that ship: codes packed, a float32 scale a row, a byte a multiplier."""
        extra = 0 if self.multipliers is None else self.multipliers.nbytes
        return -(-self.codes.size * self.bits // 8) + self.scales.nbytes + extra

    def values(self) -> FloatArray:
        """The float32 weight [N, K] that the codes stand for."""
        return self.codes * _spread(self.scales, self.multipliers, self.codes.shape[1])


def _check_multipliers(multipliers: NDArray[np.uint8], shape: tuple[int, ...]) -> None:
    fits = multipliers.dtype == np.uint8 and multipliers.ndim == 2 and len(multipliers) == shape[0]
    if not fits or shape[1] % multipliers.shape[1]:
        raise ExportError(f"multipliers {multipliers.dtype}{multipliers.shape} do not fit codes {shape}")
    if multipliers.min() < 1 or multipliers.max() > MULTIPLIERS:
        raise ExportError(f"a multiplier of a block is outside 1..{MULTIPLIERS}")


def _spread(scales: FloatArray, multipliers: NDArray[np.uint8] | None, K: int) -> FloatArray:
    """The scale of every weight [n, K], or [n, 1] where a row has only one."""
    if multipliers is None:
        return scales[:, None]
    steps: FloatArray = scales[:, None] * multipliers.astype(np.float32)
    return np.repeat(steps, K // multipliers.shape[1], axis=1)


def code_range(bits: int) -> tuple[int, int]:
    """The lowest and the highest code. Raises UsageError unless bits is 4 or 8."""
    if bits not in (4, 8):
        raise UsageError(f"bits is {bits}; weights per channel hold 4 or 8 bits")
    return -middle(bits), middle(bits) - 1


def pack_channels(
    weight: NDArray[np.floating],  # [N, K]
    bits: int,
    method: ChannelMethod = "mse",
    *,
    block: int | None = None,
    moment: FloatArray | None = None,
    threads: int | None = None,
) -> ChannelMatrix:
    """Round a weight [N, K] to integers with one scale per row, and a multiplier per `block` where asked for.

    `rtn` rounds to nearest with the row's peak as the largest code; `mse` searches the scale with the least
    squared error; `gptq` compensates errors as well (Frantar et al. 2022). `moment` is the second moment of
    the inputs: its diagonal [K] (or all of it) weighs the errors of `mse`, `gptq` needs [K, K].
    Raises ExportError for a weight that is no finite matrix, a moment that does not fit, or a block that does
    not divide K.
    """
    code_range(bits)
    if method not in get_args(ChannelMethod):
        raise UsageError(f"method is {method!r}; known: {', '.join(get_args(ChannelMethod))}")
    values = _matrix(weight)
    _check_moment(moment, values.shape[1], method)
    _check_block(block, values.shape[1])
    importance = None
    if moment is not None:
        importance = np.ascontiguousarray(moment if moment.ndim == 1 else moment.diagonal())
    inverse, order = ordered_inverse(moment) if method == "gptq" and moment is not None else (None, None)

    def run(rows: slice) -> _Rows:
        part = values[rows]
        scales, multipliers = _scales(part, bits, method, block, importance)
        if inverse is None or order is None:
            return _Rows(_round(part, _spread(scales, multipliers, part.shape[1]), bits), scales, multipliers)
        return _compensated(part, scales, multipliers, bits, inverse, order)

    parts = over_chunks(run, values.shape, threads)
    codes, scales = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    multipliers = None if block is None else np.concatenate([part.multipliers for part in parts])
    packed = ChannelMatrix(bits, codes, scales, method, 0.0, multipliers)
    return replace(packed, relative_error=_relative_error(values, packed))


class _Rows(NamedTuple):
    codes: NDArray[np.int8]  # [n, K]
    scales: FloatArray  # [n]
    multipliers: NDArray[np.uint8] | None  # [n, K / block]


def _scales(
    rows: FloatArray, bits: int, method: str, block: int | None, importance: FloatArray | None
) -> tuple[FloatArray, NDArray[np.uint8] | None]:
    """The scale of every row, and the multipliers of its blocks."""
    width = rows.shape[1] if block is None else block
    blocks = rows.reshape(-1, width)  # [n * B, width]
    weights = None if importance is None else np.tile(importance.reshape(-1, width), (len(rows), 1))
    found = _peak_scales(blocks, bits) if method == "rtn" else search_scales(blocks, bits, weights)
    if block is None:
        return found, None
    used = (blocks != 0).any(axis=1)
    steps = np.where(used, found, 0).reshape(len(rows), -1)  # [n, B]
    scales = _positive(steps.max(axis=1) / np.float32(MULTIPLIERS))
    multipliers = np.clip(np.rint(steps / scales[:, None]), 1, MULTIPLIERS).astype(np.uint8)
    return scales, multipliers


def search_scales(
    rows: FloatArray,  # [n, K]
    bits: int,
    importance: FloatArray | None = None,  # [n, K] or [1, K]
) -> FloatArray:
    """The scale [n] of each row with the least (weighed) squared error: clip at several places, refit each.

    Without `importance`, larger weights count more, as in `methods.quantize_blocks`.
    """
    low, high = code_range(bits)
    weights = _by_magnitude(rows) if importance is None else importance
    peak = _peak_scales(rows, bits)
    best_scale, best_error = peak, _error(rows, peak, bits, weights)
    for ratio in CLIP_RATIOS:
        codes = np.clip(np.rint(rows / (peak * np.float32(ratio))[:, None]), low, high)
        weighed = codes * weights
        squares = np.maximum(np.einsum("nk,nk->n", codes, weighed), np.float32(1e-30))
        fitted = _positive(np.einsum("nk,nk->n", rows, weighed) / squares)
        error = _error(rows, fitted, bits, weights)
        better = error < best_error
        best_scale, best_error = np.where(better, fitted, best_scale), np.where(better, error, best_error)
    return best_scale


def _compensated(
    rows: FloatArray,
    scales: FloatArray,
    multipliers: NDArray[np.uint8] | None,
    bits: int,
    inverse: FloatArray,
    order: NDArray[np.intp],
) -> _Rows:
    """GPTQ at several scales a row; the one with the least output error wins."""
    steps = _spread(scales, multipliers, rows.shape[1])
    steps = steps if multipliers is None else steps[:, order]
    sorted_rows = np.ascontiguousarray(rows[:, order])
    best_codes = np.zeros(rows.shape, np.int8)
    best_loss, best_ratio = np.full(len(rows), np.inf, np.float32), np.ones(len(rows), np.float32)
    for ratio in GPTQ_RATIOS if bits == 4 else (1.0,):  # 8 bits clip nothing that matters
        codes, loss = compensate_rows(sorted_rows, steps * np.float32(ratio), inverse, bits)
        better = loss < best_loss
        best_codes[better] = codes[better]
        best_loss, best_ratio = np.where(better, loss, best_loss), np.where(better, ratio, best_ratio)
    restored = np.empty_like(best_codes)
    restored[:, order] = best_codes
    return _Rows(restored, scales * best_ratio.astype(np.float32), multipliers)


def ordered_inverse(moment: FloatArray) -> tuple[FloatArray, NDArray[np.intp]]:
    """The factor that GPTQ needs, over inputs from the strongest to the weakest, and their order.

    What is rounded last has nothing left to compensate it: that should be the inputs that matter least.
    With one scale a row, the order is free.
    """
    order = np.argsort(-moment.diagonal(), kind="stable")
    return inverse_factor(moment[np.ix_(order, order)], DAMPING), order


def _peak_scales(rows: FloatArray, bits: int) -> FloatArray:
    """Scales at which no weight of a row is clipped; the negative side has one code more."""
    low, high = code_range(bits)
    return _positive(np.maximum(rows.max(axis=1) / np.float32(high), rows.min(axis=1) / np.float32(low)))


def _positive(scales: NDArray[np.floating]) -> FloatArray:
    """Scales with 1 for rows of zeros, and for numbers too small to divide by."""
    return np.where(scales > 1e-30, scales, 1).astype(np.float32)


def _round(rows: FloatArray, steps: FloatArray, bits: int) -> NDArray[np.int8]:
    low, high = code_range(bits)
    codes: NDArray[np.int8] = np.clip(np.rint(rows / steps), low, high).astype(np.int8)
    return codes


def _error(rows: FloatArray, scales: FloatArray, bits: int, weights: FloatArray) -> FloatArray:
    wrong = rows - _round(rows, scales[:, None], bits) * scales[:, None]
    total: FloatArray = np.einsum("nk,nk->n", wrong, wrong * weights)
    return total


def _by_magnitude(rows: FloatArray) -> FloatArray:
    squares = rows * rows
    weights: FloatArray = np.sqrt(squares + squares.mean(axis=1, keepdims=True))
    return weights


def _relative_error(values: FloatArray, packed: ChannelMatrix) -> float:
    lost = total = 0.0
    for start in range(0, len(values), 1024):
        rows = slice(start, start + 1024)
        multipliers = None if packed.multipliers is None else packed.multipliers[rows]
        wrong = values[rows] - packed.codes[rows] * _spread(packed.scales[rows], multipliers, values.shape[1])
        lost += float(np.vdot(wrong, wrong))
        total += float(np.vdot(values[rows], values[rows]))
    return float(np.sqrt(lost / total)) if total > 0 else float(np.sqrt(lost))


def _matrix(weight: NDArray[np.floating]) -> FloatArray:
    if weight.ndim != 2 or 0 in weight.shape:
        raise ExportError(f"a weight of shape {weight.shape} cannot be packed; it must be a non-empty matrix")
    values = np.ascontiguousarray(weight, dtype=np.float32)
    if not np.isfinite(values).all():
        raise ExportError(
            f"{int((~np.isfinite(values)).sum())} values of a weight are not finite; the source checkpoint is damaged"
        )
    return values


def _check_moment(moment: FloatArray | None, K: int, method: str) -> None:
    if moment is not None and moment.shape not in ((K,), (K, K)):
        raise ExportError(f"a second moment has shape {moment.shape}; this weight needs ({K}, {K})")
    if method == "gptq" and (moment is None or moment.ndim != 2):
        raise ExportError(
            f"method 'gptq' needs the second moment [{K}, {K}] of the inputs and got "
            f"{'none' if moment is None else moment.shape}; collect it first, or choose mse"
        )


def _check_block(block: int | None, K: int) -> None:
    if block is not None and (block not in BLOCK_SIZES or K % block):
        raise ExportError(
            f"blocks of {block} do not fit rows of {K} weights; known: {', '.join(map(str, BLOCK_SIZES))}, and the "
            "block has to divide the row"
        )
