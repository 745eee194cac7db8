"""Linear quantization of activations (iOS 17)."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, axis_of, refuse, wide
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []

TYPES = {"int8": np.int8, "uint8": np.uint8}


@operation("quantize", rounds=False)
def quantize(input: Any, scale: Any, output_dtype: str, zero_point: Any = None, axis: Any = None) -> Array:
    """round(input / scale) + zero_point, kept within the type; one scale, or one for each index of an axis."""
    kind = TYPES.get(output_dtype)
    if kind is None:
        refuse("quantize", "output_dtype", output_dtype, f"known are {', '.join(TYPES)}")
    values, limits = wide(input), np.iinfo(kind)
    steps = np.rint(values / _aligned("quantize", scale, values, axis))
    if zero_point is not None:
        steps = steps + _aligned("quantize", zero_point, values, axis).astype(np.float32)
    return np.asarray(np.clip(steps, limits.min, limits.max).astype(kind))


@operation("dequantize")
def dequantize(input: Any, scale: Any, zero_point: Any = None, axis: Any = None) -> Array:
    """scale * (input - zero_point)."""
    values = np.asarray(input, np.float32)
    if zero_point is not None:
        values = values - _aligned("dequantize", zero_point, values, axis).astype(np.float32)
    return values * _aligned("dequantize", scale, values, axis)


def _aligned(name: str, parameter: Any, values: Array, axis: Any) -> Array:
    """A scalar as it is; a vector along the axis."""
    numbers: Array = wide(np.asarray(parameter))
    if numbers.ndim == 0:
        return numbers
    if axis is None or numbers.ndim != 1:
        refuse(name, "axis", axis, f"the scale or zero point has the shape {numbers.shape}")
    along = axis_of(name, axis, values.ndim)
    if len(numbers) != values.shape[along]:
        refuse(name, "axis", int(axis), f"input is {values.shape}, the scale or zero point {numbers.shape}")
    return numbers.reshape(-1, *[1] * (values.ndim - 1 - along))
