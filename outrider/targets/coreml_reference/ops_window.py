"""Where the windows of convolutions and pools lie: padding by type, output sizes, and views of every window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, refuse, whole_numbers

__all__ = ["Pads", "per_axis", "resolve_pads", "windows"]

Pads = list[tuple[int, int]]  # before and after, one pair a spatial axis


def per_axis(operation: str, parameter: str, values: Any, count: int, default: int) -> list[int]:
    """A parameter with one number a spatial axis (or a pad's two). Raises BackendError for another length."""
    numbers = [default] * count if values is None else whole_numbers(values)
    if len(numbers) != count:
        refuse(operation, parameter, numbers, f"{count} numbers are wanted")
    return numbers


def resolve_pads(
    operation: str,
    pad_type: str,
    pad: Any,
    sizes: Sequence[int],
    spans: Sequence[int],
    strides: Sequence[int],
) -> Pads:
    """The padding before and after each axis; spans are the kernel's sizes with its dilation.

    `same` and `same_lower` pad so that ceil(size / stride) outputs come out; of an odd number of padding values, `same`
    puts the extra one after, `same_lower` before.
    """
    if pad_type == "valid":
        return [(0, 0)] * len(sizes)
    if pad_type == "custom":
        numbers = per_axis(operation, "pad", pad, 2 * len(sizes), 0)
        return list(zip(numbers[::2], numbers[1::2], strict=True))
    if pad_type not in ("same", "same_lower"):
        refuse(operation, "pad_type", pad_type, "known are valid, same, same_lower and custom")
    pads = []
    for size, span, stride in zip(sizes, spans, strides, strict=True):
        total = max(0, (math.ceil(size / stride) - 1) * stride + span - size)
        less, more = total // 2, total - total // 2
        pads.append((less, more) if pad_type == "same" else (more, less))
    return pads


def windows(
    x: Array,  # [n, C, *D], padded
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Array:
    """[n, C, *D_out, *kernel]: a view of every window."""
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    every = np.lib.stride_tricks.sliding_window_view(x, spans, axis=tuple(range(2, x.ndim)))
    steps = (*strides, *dilations)
    return every[(slice(None), slice(None), *(slice(None, None, step) for step in steps))]
