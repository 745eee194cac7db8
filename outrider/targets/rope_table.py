"""Cosines and sines of every position, for graphs that take them as inputs; numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.contracts import Float32Array

__all__ = ["rope_table"]


def rope_table(record: Mapping[str, Any], max_context: int) -> tuple[Float32Array, Float32Array]:
    """Cosines and sines [M, rotary / 2] of every position, in float64 until they are stored.

    `record` holds `inv_freq`, and `scale` where the model has a factor on both.
    """
    inverse = np.asarray(record["inv_freq"], np.float64)
    angles = np.arange(max_context, dtype=np.float64)[:, None] * inverse
    scale = float(record.get("scale", 1.0))
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)
