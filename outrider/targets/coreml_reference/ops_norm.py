"""Normalizations; x is [n, C, *D] where a channel is meant."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, axes_of, refuse, wide
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []


@operation("layer_norm")
def layer_norm(x: Any, axes: Any = None, gamma: Any = None, beta: Any = None, epsilon: Any = 1e-5) -> Array:
    """gamma * (x - mean) / sqrt(variance + epsilon) + beta over some axes, all by default; gamma has their shape."""
    values = wide(x)
    along = axes_of("layer_norm", axes, values.ndim)
    spread = [size if axis in along else 1 for axis, size in enumerate(values.shape)]
    centred = values - values.mean(axis=along, keepdims=True)
    variance = np.square(centred).mean(axis=along, keepdims=True)
    result: Array = centred / np.sqrt(variance + np.float32(epsilon))
    for name, parameter in (("gamma", gamma), ("beta", beta)):
        if parameter is not None and np.size(parameter) != math.prod(spread):
            refuse(
                "layer_norm", name, np.shape(parameter), f"x is {values.shape}, normalized over axes {along}"
            )
    if gamma is not None:
        result *= wide(np.asarray(gamma)).reshape(spread)
    if beta is not None:
        result += wide(np.asarray(beta)).reshape(spread)
    return result


@operation("batch_norm")
def batch_norm(
    x: Any, mean: Any, variance: Any, gamma: Any = None, beta: Any = None, epsilon: Any = 1e-5
) -> Array:
    """gamma * (x - mean) / sqrt(variance + epsilon) + beta, one number of each a channel."""
    values = wide(x)
    for name, parameter in (("mean", mean), ("variance", variance), ("gamma", gamma), ("beta", beta)):
        if parameter is not None and np.shape(parameter) != values.shape[1:2]:
            refuse(
                "batch_norm", name, np.shape(parameter), f"x is {values.shape} and wants one number a channel"
            )
    deviation = np.sqrt(_by_channel(variance, values.ndim) + np.float32(epsilon))
    return _scaled((values - _by_channel(mean, values.ndim)) / deviation, gamma, beta)


@operation("instance_norm")
def instance_norm(x: Any, gamma: Any = None, beta: Any = None, epsilon: Any = 1e-5) -> Array:
    """As batch_norm, with the mean and variance of each channel of each sample."""
    values = wide(x)
    along = tuple(range(2, values.ndim))
    centred = values - values.mean(axis=along, keepdims=True)
    variance = np.square(centred).mean(axis=along, keepdims=True)
    return _scaled(centred / np.sqrt(variance + np.float32(epsilon)), gamma, beta)


@operation("l2_norm")
def l2_norm(x: Any, epsilon: Any = 1e-6) -> Array:
    """x / sqrt(sum of squares + epsilon) over the last three axes."""
    values = wide(x)
    if values.ndim < 3:
        refuse("l2_norm", "x", values.shape, "three axes are normalized together")
    squares = np.square(values).sum(axis=(-3, -2, -1), keepdims=True)
    result: Array = values / np.sqrt(squares + np.float32(epsilon))
    return result


@operation("local_response_norm")
def local_response_norm(x: Any, size: Any, alpha: Any = 1e-4, beta: Any = 0.75, k: Any = 1.0) -> Array:
    """x / (k + alpha / size * sum of squares of the `size` channels around it) ** beta."""
    values, span = wide(x), int(size)
    pads = [(0, 0)] * values.ndim
    pads[1] = (span // 2, span - 1 - span // 2)  # of an even size the one more stands before, as in PyTorch
    squares = np.pad(np.square(values), pads)
    sums = np.lib.stride_tricks.sliding_window_view(squares, span, axis=1).sum(axis=-1)
    result: Array = values / (np.float32(k) + np.float32(alpha) / span * sums) ** np.float32(beta)
    return result


def _scaled(x: Array, gamma: Any, beta: Any) -> Array:
    if gamma is not None:
        x = x * _by_channel(gamma, x.ndim)
    if beta is not None:
        x = x + _by_channel(beta, x.ndim)
    return x


def _by_channel(values: Any, rank: int) -> Array:
    """[C] -> [C, 1, ...]."""
    column: Array = wide(np.asarray(values)).reshape(-1, *[1] * (rank - 2))
    return column
