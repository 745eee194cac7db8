"""The table that the host looks tokens up in: 8-bit blocks in a plain file that any app can map into memory.

The file holds codes int8 [V, D], then scales float16 [V, D / block], little-endian, without a header; the value of
column j is code * scale[j // block], and the model's embedding scale is already in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.export.config import ModelConfig
from outrider.export.slots import SlotWeights
from outrider.quantize.report import SlotReport
from outrider.targets.npu_host import EmbeddingTable, HalfTable

__all__ = ["extremes", "write_embedding", "write_half_embedding"]

BLOCK = 32
CHUNK = 4096  # rows at a time


def extremes(table: EmbeddingTable) -> tuple[float, float]:
    """The smallest and the largest value of any row, and 0."""
    low = high = 0.0
    for start in range(0, len(table), CHUNK):
        rows = table.rows(np.arange(start, min(start + CHUNK, len(table))))
        low, high = min(low, float(rows.min())), max(high, float(rows.max()))
    return low, high


def write_embedding(
    config: ModelConfig, weights: SlotWeights, path: Path
) -> tuple[EmbeddingTable, dict[str, Any], SlotReport]:
    """Write the table; returns it, how to read it, and what became of the weights."""
    matrix = weights.matrix("embedding")
    V, D = matrix.shape
    block = BLOCK if D % BLOCK == 0 else D
    scales = np.empty((V, D // block), "<f2")
    lost = 0.0
    with open(path, "wb") as file:
        for start in range(0, V, CHUNK):
            rows = matrix[start : start + CHUNK] * np.float32(config.embedding_scale)
            blocks = rows.reshape(len(rows), -1, block)
            # The half-precision scale is rounded up, so that no code leaves the int8 range.
            exact = np.maximum(np.abs(blocks).max(axis=2) / 127, 2**-20)
            half = np.nextafter(exact.astype(np.float16), np.float16(np.inf))
            step = half.astype(np.float32)[..., None]
            codes = np.rint(blocks / step)
            lost += float(np.square(blocks - codes * step, dtype=np.float64).sum())
            file.write(codes.astype(np.int8).tobytes())
            scales[start : start + CHUNK] = half
        file.write(scales.tobytes())
    meta = {
        "dtype": "int8",
        "rows": V,
        "columns": D,
        "block": block,
        "scale_dtype": "float16",
        "scales_offset": V * D,
    }
    report = _report(config, matrix, f"int8-b{block}", path, lost)
    return EmbeddingTable(path, meta), meta, report


def write_half_embedding(
    config: ModelConfig, weights: SlotWeights, path: Path
) -> tuple[HalfTable, dict[str, Any], SlotReport]:
    """Write the table in float16, without scales; returns what `write_embedding` does.

    Raises ExportError for a row that half precision cannot hold.
    """
    matrix = weights.matrix("embedding")
    lost = 0.0
    with open(path, "wb") as file:
        for start in range(0, len(matrix), CHUNK):
            rows = matrix[start : start + CHUNK] * np.float32(config.embedding_scale)
            largest = float(np.abs(rows).max())
            if not largest <= np.finfo(np.float16).max:
                raise ExportError(f"an embedding row reaches {largest:g}; float16 ends at 65504")
            half = rows.astype("<f2")
            lost += float(np.square(rows - half.astype(np.float32), dtype=np.float64).sum())
            file.write(half.tobytes())
    meta = {"dtype": "float16", "rows": matrix.shape[0], "columns": matrix.shape[1]}
    return HalfTable(path, meta), meta, _report(config, matrix, "fp16", path, lost)


def _report(
    config: ModelConfig, matrix: NDArray[np.float32], after: str, path: Path, lost: float
) -> SlotReport:
    """`lost` is the sum of squares of what rounding changed."""
    total = float(np.square(matrix, dtype=np.float64).sum()) * config.embedding_scale**2
    return SlotReport(
        slot="embedding",
        shape=(matrix.shape[0], matrix.shape[1]),
        before=str(matrix.dtype),
        after=after,
        bytes_before=matrix.nbytes,
        bytes_after=path.stat().st_size,
        relative_error=float(np.sqrt(lost / total)) if total else 0.0,
        carried=False,
        reason="looked up on the host",
    )
