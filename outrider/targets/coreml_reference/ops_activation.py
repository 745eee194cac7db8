"""Activations and softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, axis_of, refuse, wide
from outrider.targets.coreml_reference.ops_unary import error_function
from outrider.targets.coreml_reference.registry import operation

__all__ = ["softmax"]


@operation("relu", rounds=False)
def relu(x: Any) -> Array:
    """max(x, 0)."""
    return np.asarray(np.maximum(x, 0))


@operation("relu6", rounds=False)
def relu6(x: Any) -> Array:
    """x within [0, 6]."""
    return np.asarray(np.minimum(np.maximum(x, 0), 6))


@operation("clamped_relu")
def clamped_relu(x: Any, alpha: Any, beta: Any) -> Array:
    """min(beta, x) where x >= 0, else min(beta, alpha * x)."""
    return np.minimum(leaky_relu(x, alpha), np.float32(beta))


@operation("leaky_relu")
def leaky_relu(x: Any, alpha: Any) -> Array:
    """x where x >= 0, else alpha * x."""
    values = wide(x)
    return np.asarray(np.where(values >= 0, values, values * np.float32(alpha)))


@operation("thresholded_relu", rounds=False)
def thresholded_relu(x: Any, alpha: Any) -> Array:
    """x where x >= alpha, else 0."""
    return np.asarray(np.where(np.greater_equal(x, alpha), x, np.zeros_like(x)))


@operation("prelu")
def prelu(x: Any, alpha: Any) -> Array:
    """x where x > 0, else alpha of its channel (axis 1) times x."""
    values, slope = wide(x), wide(np.asarray(alpha))
    if slope.shape != values.shape[1:2]:
        refuse("prelu", "alpha", slope.shape, f"x has {values.shape} and wants one number a channel")
    return np.asarray(np.where(values > 0, values, values * _by_channel(slope, values.ndim)))


@operation("elu")
def elu(x: Any, alpha: Any) -> Array:
    """x where x > 0, else alpha * (exp(x) - 1)."""
    values = wide(x)
    return np.asarray(np.where(values > 0, values, np.float32(alpha) * np.expm1(np.minimum(values, 0))))


@operation("gelu")
def gelu(x: Any, mode: str = "EXACT") -> Array:
    """x times the normal distribution's cumulative probability of x, exact or in one of two approximations."""
    values = wide(x)
    if mode == "EXACT":
        return np.asarray(
            np.float32(0.5) * values * (1 + error_function(values * np.float32(math.sqrt(0.5))))
        )
    if mode == "TANH_APPROXIMATION":
        inner = np.float32(math.sqrt(2 / math.pi)) * (
            values + np.float32(0.044715) * values * values * values
        )
        return np.asarray(np.float32(0.5) * values * (1 + np.tanh(inner)))
    if mode != "SIGMOID_APPROXIMATION":
        refuse("gelu", "mode", mode, "known are EXACT, TANH_APPROXIMATION and SIGMOID_APPROXIMATION")
    result: Array = values * sigmoid(np.float32(1.702) * values)
    return result


@operation("sigmoid")
def sigmoid(x: Any) -> Array:
    """1 / (1 + exp(-x))."""
    return np.asarray(np.float32(1) / (np.float32(1) + np.exp(-wide(x))))


@operation("silu")
def silu(x: Any) -> Array:
    """x * sigmoid(x)."""
    values = wide(x)
    return np.asarray(values / (np.float32(1) + np.exp(-values)))


@operation("sigmoid_hard")
def sigmoid_hard(x: Any, alpha: Any, beta: Any) -> Array:
    """alpha * x + beta within [0, 1]."""
    return np.minimum(np.maximum(linear_activation(x, alpha, beta), 0), 1)


@operation("linear_activation")
def linear_activation(x: Any, alpha: Any, beta: Any) -> Array:
    """alpha * x + beta."""
    return np.asarray(wide(x) * np.float32(alpha) + np.float32(beta))


@operation("scaled_tanh")
def scaled_tanh(x: Any, alpha: Any, beta: Any) -> Array:
    """alpha * tanh(beta * x)."""
    return np.asarray(np.float32(alpha) * np.tanh(wide(x) * np.float32(beta)))


@operation("softsign")
def softsign(x: Any) -> Array:
    """x / (1 + |x|)."""
    values = wide(x)
    return np.asarray(values / (1 + np.abs(values)))


@operation("softplus")
def softplus(x: Any) -> Array:
    """log(1 + exp(x)), without overflow."""
    values = wide(x)
    return np.asarray(np.log1p(np.exp(-np.abs(values))) + np.maximum(values, 0))


@operation("softplus_parametric")
def softplus_parametric(x: Any, alpha: Any, beta: Any) -> Array:
    """alpha * log(1 + exp(beta * x)) with one alpha and one beta a channel (axis 1)."""
    values = wide(x)
    slope, rate = (_by_channel(wide(np.asarray(one)), values.ndim) for one in (alpha, beta))
    result: Array = slope * softplus(values * rate)
    return result


@operation("softmax")
def softmax(x: Any, axis: Any = -1) -> Array:
    """exp(x) over its sum along an axis; the largest value is taken off first, so that nothing overflows."""
    values = wide(x)
    along = axis_of("softmax", axis, values.ndim)
    weights: Array = values - values.max(axis=along, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=along, keepdims=True)
    return weights


def _by_channel(values: Array, rank: int) -> Array:
    """[C] -> [C, 1, ...], which broadcasts along axis 1 of a tensor of this rank."""
    return values.reshape(-1, *[1] * (rank - 2))
