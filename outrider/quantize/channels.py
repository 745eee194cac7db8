"""Weights with one scale per output channel: the form that integer accelerators multiply with.

Codes are signed and symmetric around a zero point of 0: -128..127 or -8..7, as ONNX and QNN store them; every
scale is positive. A row of a large matrix has one scale for hundreds of weights, so rounding to nearest is
rarely good enough at 4 bits: `mse` searches where to clip, `gptq` makes later weights of the row
compensate the errors of earlier ones, and tries several scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError, UsageError
from outrider.quantize.layout import over_chunks
from outrider.quantize.methods import compensate_rows, inverse_factor, middle

__all__ = ["ChannelMatrix", "ChannelMethod", "code_range", "pack_channels"]

FloatArray = NDArray[np.float32]
ChannelMethod = Literal["rtn", "mse", "gptq"]

CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
GPTQ_RATIOS = (1.0, 0.9, 0.8, 1.1, 1.25)  # of the scale that the search without compensation finds


@dataclass(frozen=True)
class ChannelMatrix:
    """A weight [N, K] as value = scales[n] * codes[n, k]; 4-bit codes take a byte each here."""

    bits: int
    codes: NDArray[np.int8]  # [N, K]
    scales: FloatArray  # [N], positive
    method: ChannelMethod
    relative_error: float  # ||W - Ŵ|| / ||W||, Frobenius

    def __post_init__(self) -> None:
        """Refuse what no accelerator reads."""
        low, high = code_range(self.bits)
        if self.codes.dtype != np.int8 or self.codes.ndim != 2 or self.scales.shape != self.codes.shape[:1]:
            raise ExportError(
                f"codes {self.codes.dtype}{self.codes.shape} and scales {self.scales.shape} do not make a matrix"
            )
        if self.codes.min() < low or self.codes.max() > high or not (self.scales > 0).all():
            raise ExportError(f"codes leave {low}..{high} or a scale is not positive")

    @property
    def nbytes(self) -> int:
        """Bytes that ship: codes packed, and a float32 scale a row."""
        return -(-self.codes.size * self.bits // 8) + self.scales.nbytes

    def values(self) -> FloatArray:
        """The float32 weight [N, K] that the codes stand for."""
        return self.codes.astype(np.float32) * self.scales[:, None]


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
    moment: FloatArray | None = None,
    threads: int | None = None,
) -> ChannelMatrix:
    """Round a weight [N, K] to integers with one scale per row.

    `rtn` rounds to nearest with the row's peak as the largest code; `mse` searches the scale with the least
    squared error; `gptq` compensates errors as well (Frantar et al. 2022). `moment` is the second moment of
    the inputs: its diagonal [K] (or all of it) weighs the errors of `mse`, `gptq` needs [K, K].
    Raises ExportError for a weight that is no finite matrix or a moment that does not fit.
    """
    low, high = code_range(bits)
    if method not in get_args(ChannelMethod):
        raise UsageError(f"method is {method!r}; known: {', '.join(get_args(ChannelMethod))}")
    values = _matrix(weight)
    _check_moment(moment, values.shape[1], method)
    importance = (
        None if moment is None else np.ascontiguousarray(moment if moment.ndim == 1 else moment.diagonal())
    )
    inverse, order = _ordered_inverse(moment) if method == "gptq" and moment is not None else (None, None)

    def run(rows: slice) -> tuple[NDArray[np.int8], FloatArray]:
        part = values[rows]
        scales = _peak_scales(part, bits) if method == "rtn" else search_scales(part, bits, importance)
        if inverse is None or order is None:
            return _round(part, scales, low, high), scales
        return _compensated(part, scales, bits, inverse, order)

    parts = over_chunks(run, values.shape, threads)
    codes = np.concatenate([part[0] for part in parts])
    scales = np.concatenate([part[1] for part in parts])
    return ChannelMatrix(bits, codes, scales, method, _relative_error(values, codes, scales))


def search_scales(
    rows: FloatArray,  # [n, K]
    bits: int,
    importance: FloatArray | None = None,  # [K]
) -> FloatArray:
    """The scale [n] of each row with the least (weighed) squared error: clip at several places, refit each.

    Without `importance`, larger weights count more, as in `methods.quantize_blocks`.
    """
    low, high = code_range(bits)
    weights = _by_magnitude(rows) if importance is None else importance[None, :]
    peak = _peak_scales(rows, bits)
    best_scale, best_error = peak, _error(rows, peak, low, high, weights)
    for ratio in CLIP_RATIOS:
        codes = np.clip(np.rint(rows / (peak * np.float32(ratio))[:, None]), low, high)
        weighed = codes * weights
        fitted = _positive(
            np.einsum("nk,nk->n", rows, weighed) / np.maximum(np.einsum("nk,nk->n", codes, weighed), 1e-30)
        )
        error = _error(rows, fitted, low, high, weights)
        better = error < best_error
        best_scale, best_error = np.where(better, fitted, best_scale), np.where(better, error, best_error)
    return best_scale


def _compensated(
    rows: FloatArray, scales: FloatArray, bits: int, inverse: FloatArray, order: NDArray[np.intp]
) -> tuple[NDArray[np.int8], FloatArray]:
    """GPTQ at several scales a row; the one with the least output error wins."""
    sorted_rows = np.ascontiguousarray(rows[:, order])
    best_codes = np.zeros(rows.shape, np.int8)
    best_loss, best_scale = np.full(len(rows), np.inf, np.float32), scales
    for ratio in GPTQ_RATIOS:
        tried = scales * np.float32(ratio)
        codes, loss = compensate_rows(sorted_rows, tried, inverse, bits)
        better = loss < best_loss
        best_codes[better] = codes[better]
        best_loss, best_scale = np.where(better, loss, best_loss), np.where(better, tried, best_scale)
    restored = np.empty_like(best_codes)
    restored[:, order] = best_codes
    return restored, best_scale


def _ordered_inverse(moment: FloatArray) -> tuple[FloatArray, NDArray[np.intp]]:
    """The factor that GPTQ needs, over inputs from the strongest to the weakest, and their order.

    What is rounded last has nothing left to compensate it: that should be the inputs that matter least.
    With one scale a row, the order is free.
    """
    order = np.argsort(-moment.diagonal(), kind="stable")
    return inverse_factor(moment[np.ix_(order, order)]), order


def _peak_scales(rows: FloatArray, bits: int) -> FloatArray:
    """Scales at which no weight of a row is clipped; the negative side has one code more."""
    low, high = code_range(bits)
    return _positive(np.maximum(rows.max(axis=1) / np.float32(high), rows.min(axis=1) / np.float32(low)))


def _positive(scales: NDArray[np.floating]) -> FloatArray:
    """Scales with 1 for rows of zeros, and for numbers too small to divide by."""
    return np.where(scales > 1e-30, scales, 1).astype(np.float32)


def _round(rows: FloatArray, scales: FloatArray, low: int, high: int) -> NDArray[np.int8]:
    codes: NDArray[np.int8] = np.clip(np.rint(rows / scales[:, None]), low, high).astype(np.int8)
    return codes


def _error(rows: FloatArray, scales: FloatArray, low: int, high: int, weights: FloatArray) -> FloatArray:
    wrong = rows - np.clip(np.rint(rows / scales[:, None]), low, high) * scales[:, None]
    total: FloatArray = np.einsum("nk,nk->n", wrong, wrong * weights)
    return total


def _by_magnitude(rows: FloatArray) -> FloatArray:
    squares = rows * rows
    weights: FloatArray = np.sqrt(squares + squares.mean(axis=1, keepdims=True))
    return weights


def _relative_error(values: FloatArray, codes: NDArray[np.int8], scales: FloatArray) -> float:
    lost = total = 0.0
    for start in range(0, len(values), 1024):
        rows = slice(start, start + 1024)
        wrong = values[rows] - codes[rows] * scales[rows, None]
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
