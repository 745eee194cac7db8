"""Attention masks from a tree, committed positions and a sliding window; numpy only.

S new tokens, T = committed and new ones, M rows of a static cache, W columns of a static width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.contracts import BoolArray, Float32Array, IntArray

__all__ = ["MASKED", "additive_mask", "fill_static_mask", "visible_columns"]

MASKED = np.float32(-1e4)  # exp(-1e4) is 0 in float32, and it also fits float16


def visible_columns(
    visible: BoolArray | None,  # [S, E]: which of the last E columns a row may see; None = causal
    positions: IntArray,  # [T], of the committed rows and then the new ones
    S: int,
    window: int | None,
) -> BoolArray:
    """[S, T]: where a row may look. A window counts positions, not columns."""
    T = len(positions)
    allowed = np.ones((S, T), np.bool_)
    recent = np.tri(S, dtype=np.bool_) if visible is None else visible
    allowed[:, T - recent.shape[1] :] = recent
    if window is not None:
        allowed &= positions[T - S :, None] - positions[None, :] < window
    return allowed


def additive_mask(
    visible: BoolArray | None,  # [S, E]
    positions: IntArray,  # [T]
    S: int,
    window: int | None,
) -> Float32Array:
    """[S, T]: 0 where `visible_columns` lets a row look, else a large negative number."""
    return np.where(visible_columns(visible, positions, S, window), np.float32(0), MASKED)


def fill_static_mask(
    out: NDArray[Any],  # [W, M + W]
    mask: NDArray[Any],  # [S, P + S]
    masked: Any = MASKED,
    free: Any = 0,
) -> None:
    """Spread a mask over a cache of static length; padding rows see only themselves."""
    S, W, M = len(mask), len(out), out.shape[1] - len(out)
    P = mask.shape[1] - S
    out[:] = masked
    out[:S, :P], out[:S, M : M + S] = mask[:, :P], mask[:, P:]
    padding = np.arange(S, W)
    out[padding, M + padding] = free
