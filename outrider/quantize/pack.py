"""Turn one float weight into the bytes that a kernel reads, and back.

Layouts are those of `schemes.PackedMatrix`: ONNX Runtime's `MatMulNBits` for blocks of integers, plain rows
for the rest. Work goes over chunks of rows, on as many threads as asked for, so that the memory needed beyond
the weight and its packed form stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.quantize.calibration import TOKENS
from outrider.quantize.carry import carry, rounded_scheme
from outrider.quantize.layout import (
    concatenate,
    over_chunks,
    row_chunks,
    store_blocks,
    to_blocks,
    unpack_rows,
)
from outrider.quantize.methods import gptq, inverse_factor, quantize_blocks
from outrider.quantize.schemes import (
    AnyScheme,
    BlockInt,
    Carry,
    DynamicInt8,
    Float,
    PackedMatrix,
    RawBlocks,
)

__all__ = ["pack", "relative_error", "unpack"]

FloatArray = NDArray[np.float32]


def pack(
    weight: NDArray[np.floating],  # [N, K]
    scheme: AnyScheme,
    *,
    raw: Sequence[RawBlocks] | None = None,
    stats: FloatArray | None = None,
    threads: int | None = None,
) -> PackedMatrix:
    """Store a weight [N, K] under a scheme.

    `raw` holds the source's own blocks (row-wise parts of a fused slot); where the scheme can hold them
    without a second rounding they are carried over and the result says `carried`. `stats` are the second
    moments of the activations that meet this weight: [K, K] (needed by `gptq`) or their diagonal [K] (which
    then weighs the errors of `mse`). `details["relative_error"]` is ||W - Ŵ|| / ||W||.
    Raises ExportError for a weight that is not a finite, non-empty matrix, or statistics that do not fit.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise ExportError(f"a weight of shape {weight.shape} cannot be packed; it must be a non-empty matrix")
    if raw and isinstance(scheme, BlockInt | Carry):
        carried = carry(raw, scheme)
        if carried is not None:
            return _with_error(weight, carried, threads)
    if isinstance(scheme, Carry):
        scheme = rounded_scheme([part.type_name for part in raw or ()], scheme)
    _check_stats(stats, weight.shape[1], scheme)
    if isinstance(scheme, Float):
        return _with_error(weight, _pack_float(weight, scheme), threads)
    if isinstance(scheme, DynamicInt8):
        return _with_error(weight, _pack_rows_int8(weight, scheme), threads)
    return _with_error(weight, _pack_blocks(weight, scheme, stats, threads), threads)


def unpack(packed: PackedMatrix) -> FloatArray:
    """The float32 weight [N, K] that a packed matrix stands for."""
    out = np.empty(packed.shape, np.float32)
    for rows in row_chunks(packed.shape):
        out[rows] = unpack_rows(packed, rows)
    return out


def relative_error(weight: NDArray[np.floating], packed: PackedMatrix, threads: int | None = None) -> float:
    """||W - Ŵ|| / ||W|| in the Frobenius norm; 0 for a weight of zeros held as zeros."""

    def sums(rows: slice) -> tuple[float, float]:
        exact = np.asarray(weight[rows], dtype=np.float32)
        wrong = exact - unpack_rows(packed, rows)
        return float(np.vdot(wrong, wrong)), float(np.vdot(exact, exact))

    parts = over_chunks(sums, packed.shape, threads)
    lost, total = (sum(column) for column in zip(*parts, strict=True))
    return float(np.sqrt(lost / total)) if total > 0 else float(np.sqrt(lost))


def _check_stats(stats: FloatArray | None, K: int, scheme: AnyScheme) -> None:
    if stats is not None and stats.shape not in ((K,), (K, K)):
        raise ExportError(f"calibration statistics have shape {stats.shape}; this weight needs ({K}, {K})")
    if isinstance(scheme, BlockInt) and scheme.method == "gptq" and (stats is None or stats.ndim != 2):
        raise ExportError(
            "method 'gptq' needs calibration statistics [K, K] for every slot and got none; "
            "collect them first, or choose hqq, mse or rtn"
        )


def _pack_blocks(
    weight: NDArray[np.floating], scheme: BlockInt, stats: FloatArray | None, threads: int | None
) -> PackedMatrix:
    inverse = importance = None
    if scheme.method == "gptq" and stats is not None:
        inverse = inverse_factor(stats, damping=len(stats) / TOKENS)
    elif stats is not None:
        diagonal = np.ascontiguousarray(stats if stats.ndim == 1 else np.diagonal(stats))
        importance = to_blocks(diagonal[None, :], scheme.block)[0]  # [blocks, block]

    def run(rows: slice) -> PackedMatrix:
        values = _finite(weight[rows])
        if inverse is not None:
            codes = gptq(values, scheme, inverse)
        else:
            codes = quantize_blocks(to_blocks(values, scheme.block), scheme, importance)
        return store_blocks(codes, scheme, values.shape)

    return concatenate(over_chunks(run, weight.shape, threads))


def _pack_float(weight: NDArray[np.floating], scheme: Float) -> PackedMatrix:
    _finite(weight)
    with np.errstate(over="ignore"):
        codes = np.asarray(weight, dtype=scheme.dtype)
    if not np.isfinite(codes).all():
        largest = float(np.abs(weight).max())
        raise ExportError(f"a weight of magnitude {largest:g} overflows {scheme.dtype}; keep it in float32")
    return PackedMatrix(scheme, weight.shape, codes)


def _pack_rows_int8(weight: NDArray[np.floating], scheme: DynamicInt8) -> PackedMatrix:
    rows = _finite(weight)
    scales = np.maximum(np.abs(rows).max(axis=1) / np.float32(127), np.finfo(np.float32).tiny)  # [N]
    codes = np.clip(np.rint(rows / scales[:, None]), -127, 127).astype(np.int8)
    return PackedMatrix(scheme, weight.shape, codes, scales.astype(np.float32))


def _finite(rows: NDArray[np.floating]) -> FloatArray:
    values = np.asarray(rows, dtype=np.float32)
    if not np.isfinite(values).all():
        bad = int(np.size(values) - np.isfinite(values).sum())
        raise ExportError(f"{bad} values of a weight are not finite; the source checkpoint is damaged")
    return values


def _with_error(weight: NDArray[np.floating], packed: PackedMatrix, threads: int | None) -> PackedMatrix:
    if packed.shape != weight.shape:
        raise ExportError(f"the source's blocks hold a {packed.shape} matrix, the weight is {weight.shape}")
    error = relative_error(weight, packed, threads)
    return replace(packed, details={**packed.details, "relative_error": error})
