"""What the host does around a static graph of an integer accelerator; numpy only.

The graph takes and returns integers with one static scale per tensor: rows of the embedding, cosines and sines, a
mask of two levels, keys and values. Their scales are the graph's own, so what comes out as present goes back as
past without a conversion. S tokens, W columns of a static width, M rows of the cache, G KV heads, d head size,
L layers, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.contracts import BoolArray, Float32Array, IntArray
from outrider.errors import BackendError
from outrider.targets.graph_meta import reading_description
from outrider.targets.masks import fill_static_mask, visible_columns

__all__ = ["EmbeddingTable", "HalfTable", "KvCache", "RopeTable", "Scale", "open_embedding", "static_mask"]

IntegerArray = NDArray[Any]  # of the dtype of its scale
DTYPES = ("uint8", "int8", "uint16", "int16")


@dataclass(frozen=True)
class Scale:
    """How a tensor's integers stand for numbers: value = (integer - zero_point) * scale."""

    scale: float
    zero_point: int
    dtype: str = "uint16"

    def __post_init__(self) -> None:
        """Refuse what no quantized tensor has."""
        if self.dtype not in DTYPES:
            raise BackendError(f"a scale is for {self.dtype!r}; known: {', '.join(DTYPES)}")
        edges = np.iinfo(self.dtype)
        if not 0 < self.scale < float("inf") or not edges.min <= self.zero_point <= edges.max:
            raise BackendError(f"scale {self.scale} with zero point {self.zero_point} is impossible")

    def quantize(self, values: Float32Array) -> IntegerArray:
        """The nearest integers, as ONNX QuantizeLinear rounds and saturates."""
        edges = np.iinfo(self.dtype)
        steps = np.rint(values / np.float32(self.scale)) + self.zero_point
        integers: IntegerArray = np.clip(steps, edges.min, edges.max).astype(self.dtype)
        return integers

    def dequantize(self, integers: IntegerArray) -> Float32Array:
        """float32 of the same shape."""
        return (integers.astype(np.float32) - np.float32(self.zero_point)) * np.float32(self.scale)


def open_embedding(path: Path, meta: Mapping[str, Any]) -> EmbeddingTable | HalfTable:
    """The table of an embedding file, by the dtype that `meta` says. Raises BackendError as the tables do."""
    return HalfTable(path, meta) if meta.get("dtype") == "float16" else EmbeddingTable(path, meta)


class HalfTable:
    """Rows of an embedding file that holds float16 [V, D], little-endian, and nothing else."""

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        """Raises BackendError when the file is missing or is not what `meta` says."""
        _refuse_absent(path)
        V, self.columns = _sizes(meta, "rows", "columns")
        size, needed = path.stat().st_size, 2 * V * self.columns
        if size != needed:
            raise BackendError(
                f"{path} has {size} bytes; a table of {V} x {self.columns} in float16 has {needed}: "
                "fetch or export the bundle again"
            )
        self._rows = np.memmap(path, "<f2", "r", 0, (V, self.columns))

    def __len__(self) -> int:
        """How many ids it knows."""
        return len(self._rows)

    def rows(self, tokens: IntArray) -> Float32Array:
        """[S] -> [S, D]. Raises ValueError for an id that the table does not have."""
        _refuse_unknown(tokens, len(self))
        return np.asarray(self._rows[tokens], np.float32)


def _refuse_absent(path: Path) -> None:
    if not path.is_file():
        raise BackendError(
            f"the embedding file {path} does not exist; export the bundle again or fetch it whole"
        )


def _sizes(meta: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    """Positive whole numbers of an embedding's description."""
    try:
        sizes = tuple(int(meta[name]) for name in names)
    except KeyError as missing:
        raise BackendError(
            f"the description of the embedding lacks {missing}; export the bundle again"
        ) from None
    except (TypeError, ValueError) as error:
        raise BackendError(
            f"the description of the embedding cannot be read ({error}); export the bundle again"
        ) from None
    if min(sizes) < 1:
        shown = ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
        raise BackendError(f"an embedding of {shown} is impossible; export the bundle again")
    return sizes


def _refuse_unknown(tokens: IntArray, rows: int) -> None:
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < rows:
        raise ValueError(
            f"token ids {tokens.min()} to {tokens.max()} were given; the embedding has {rows} rows"
        )


class EmbeddingTable:
    """Rows of an embedding file, which stays on disk until they are asked for.

    The file has no header: codes int8 [V, D], then at `scales_offset` scales float16 [V, D / block], both
    little-endian; column j is code * scale[j // block].
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        """Raises BackendError when the file is missing or is not what `meta` says."""
        _refuse_absent(path)
        V, D, self.block = _sizes(meta, "rows", "columns", "block")
        with reading_description():
            kinds, offset = (meta["dtype"], meta["scale_dtype"]), int(meta["scales_offset"])
        if kinds != ("int8", "float16"):
            raise BackendError(
                f"the embedding holds {kinds[0]} with {kinds[1]} scales; known: int8 with float16, float16 alone"
            )
        size, needed = path.stat().st_size, offset + 2 * V * (D // self.block)
        if size != needed or offset != V * D:
            raise BackendError(
                f"{path} has {size} bytes; a table of {V} x {D} in blocks of {self.block} has {needed}: "
                "fetch or export the bundle again"
            )
        self.columns = D
        self._codes = np.memmap(path, np.int8, "r", 0, (V, D))
        self._scales = np.memmap(path, "<f2", "r", offset, (V, D // self.block))

    def __len__(self) -> int:
        """How many ids it knows."""
        return len(self._codes)

    def rows(self, tokens: IntArray) -> Float32Array:
        """[S] -> [S, D]. Raises ValueError for an id that the table does not have."""
        _refuse_unknown(tokens, len(self))
        scales = np.repeat(self._scales[tokens].astype(np.float32), self.block, axis=1)
        return self._codes[tokens].astype(np.float32) * scales


class RopeTable:
    """Quantized cosines and sines of every position, by row: [max_context, rotary / 2] each."""

    def __init__(
        self, inv_freq: NDArray[np.float64], factor: float, max_context: int, cos: Scale, sin: Scale
    ) -> None:
        angles = np.arange(max_context, dtype=np.float64)[:, None] * inv_freq
        self.cos = cos.quantize((np.cos(angles) * factor).astype(np.float32))
        self.sin = sin.quantize((np.sin(angles) * factor).astype(np.float32))


def static_mask(
    out: IntegerArray,  # [W, M + W]
    visible: BoolArray | None,  # [S, S] ancestor-or-self; None = causal
    positions: IntArray,  # [P + S], of the committed rows and then the new ones
    S: int,
    window: int | None,
    levels: tuple[int, int],
) -> None:
    """Fill a mask with its two integers: `levels` are those of a masked and of a visible column."""
    masked, free = (out.dtype.type(level) for level in levels)
    allowed = visible_columns(visible, positions, S, window)
    fill_static_mask(out, np.where(allowed, free, masked), masked, free)


class KvCache:
    """Keys [1, G, d, M] (transposed) and values [1, G, M, d] of every layer as the graph's own integers.

    An empty row holds zero points, so that it stands for zeros.
    """

    def __init__(
        self, layers: int, heads: int, head_dim: int, length: int, scales: Mapping[str, Scale]
    ) -> None:
        self.keys: list[IntegerArray] = []
        self.values: list[IntegerArray] = []
        for layer in range(layers):
            key, value = scales[f"past_key_{layer}"], scales[f"past_value_{layer}"]
            self.keys.append(np.full((1, heads, head_dim, length), key.zero_point, key.dtype))
            self.values.append(np.full((1, heads, length, head_dim), value.zero_point, value.dtype))

    def commit(
        self,
        length: int,
        rows: IntArray,
        present_keys: list[IntegerArray],  # L of [1, G, d, W]
        present_values: list[IntegerArray],  # L of [1, G, W, d]
    ) -> None:
        """Copy these rows of a forward behind the first `length`, in this order."""
        end = length + len(rows)
        for cache, present in zip(self.keys, present_keys, strict=True):
            cache[..., length:end] = present[..., rows]
        for cache, present in zip(self.values, present_values, strict=True):
            cache[..., length:end, :] = present[..., rows, :]

    def rows(self, start: int, end: int) -> list[IntegerArray]:
        """Copies of these rows of every layer's keys, then of its values."""
        keys = [cache[..., start:end].copy() for cache in self.keys]
        return keys + [cache[..., start:end, :].copy() for cache in self.values]

    def put(self, start: int, rows: list[IntegerArray]) -> None:
        """Write them back."""
        end = start + rows[0].shape[-1]
        for cache, kept in zip(self.keys, rows, strict=False):
            cache[..., start:end] = kept
        for cache, kept in zip(self.values, rows[len(self.keys) :], strict=True):
            cache[..., start:end, :] = kept
