"""Pools over the spatial axes of [n, C, *D]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, refuse, wide
from outrider.targets.coreml_reference.ops_window import Pads, per_axis, resolve_pads, windows
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []


@operation("max_pool", rounds=False)
def max_pool(
    x: Any, kernel_sizes: Any, pad_type: str, strides: Any = None, pad: Any = None, ceil_mode: Any = False
) -> Array:
    """The largest value of each window; padding never wins."""
    pool = _Pool.of("max_pool", x, kernel_sizes, pad_type, strides, pad, ceil_mode)
    return np.asarray(pool.windows(pool.padded(wide(x), -np.inf)).max(axis=pool.kernel_axes))


@operation("avg_pool")
def avg_pool(
    x: Any,
    kernel_sizes: Any,
    pad_type: str,
    strides: Any = None,
    pad: Any = None,
    exclude_padding_from_average: Any = False,
    ceil_mode: Any = False,
) -> Array:
    """The mean of each window. Zeros of the padding count unless excluded; what `ceil_mode` appends never counts."""
    pool = _Pool.of("avg_pool", x, kernel_sizes, pad_type, strides, pad, ceil_mode)
    counted = np.ones((1, 1, *x.shape[2:]), np.float32)
    counted = pool.padded(counted, 0 if exclude_padding_from_average else 1)
    return np.asarray(pool.sums(pool.padded(wide(x), 0)) / pool.sums(counted))


@operation("l2_pool")
def l2_pool(
    x: Any, kernel_sizes: Any, pad_type: str, strides: Any = None, pad: Any = None, ceil_mode: Any = False
) -> Array:
    """The root of the sum of squares of each window."""
    pool = _Pool.of("l2_pool", x, kernel_sizes, pad_type, strides, pad, ceil_mode)
    return np.sqrt(pool.sums(pool.padded(np.square(wide(x)), 0)))


@dataclass(frozen=True)
class _Pool:
    """Where the windows lie. `appended` values come after the padding, so that the last window is whole."""

    kernel: list[int]
    strides: list[int]
    pads: Pads
    appended: list[int]

    @classmethod
    def of(
        cls, name: str, x: Any, kernel_sizes: Any, pad_type: str, strides: Any, pad: Any, ceil_mode: Any
    ) -> _Pool:
        axes, kind = x.ndim - 2, pad_type.lower()
        kernel = per_axis(name, "kernel_sizes", kernel_sizes, axes, 1)
        steps = per_axis(name, "strides", strides, axes, 1)
        pads = resolve_pads(name, kind, pad, x.shape[2:], kernel, steps)
        if ceil_mode and (kind.startswith("same") or any(before != after for before, after in pads)):
            refuse(name, "ceil_mode", True, f"the padding must be custom and symmetric; it is {kind} {pads}")
        sizes = [size + sum(pair) for size, pair in zip(x.shape[2:], pads, strict=True)]
        if any(size < span for size, span in zip(sizes, kernel, strict=True)):
            refuse(name, "kernel_sizes", kernel, f"a window is larger than the padded x {sizes}")
        appended = [0] * axes
        if ceil_mode:
            outside = [size - after for size, (_, after) in zip(sizes, pads, strict=True)]
            appended = list(map(_appended, sizes, outside, kernel, steps))
        return cls(kernel, steps, pads, appended)

    @property
    def kernel_axes(self) -> tuple[int, ...]:
        return tuple(range(-len(self.kernel), 0))

    def padded(self, x: Array, padding: float) -> Array:
        """x with its padding; what is appended is zero in a sum and padding in a maximum."""
        last = padding if np.isinf(padding) else 0
        x = np.pad(x, [(0, 0), (0, 0), *self.pads], constant_values=padding)
        return np.pad(x, [(0, 0), (0, 0), *((0, more) for more in self.appended)], constant_values=last)

    def windows(self, x: Array) -> Array:
        """[n, C, *D_out, *K]."""
        return windows(x, self.kernel, self.strides, [1] * len(self.kernel))

    def sums(self, x: Array) -> Array:
        """[n, C, *D_out]."""
        return np.asarray(self.windows(x).sum(axis=self.kernel_axes))


def _appended(size: int, inside: int, span: int, stride: int) -> int:
    """How much one more window, cut short by the end, lacks; a window that would start in the padding is left out."""
    steps = -(-(size - span) // stride)
    if steps * stride >= inside:
        steps -= 1
    return max(0, steps * stride + span - size)
