"""Convolutions. n batch, C channels in, N channels out, D sizes of one to three spatial axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, refuse, wide
from outrider.targets.coreml_reference.ops_window import Pads, per_axis, resolve_pads, windows
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []

Index = tuple[Any, ...]


@operation("conv")
def conv(
    x: Any,  # [n, C, *D]
    weight: Any,  # [N, C / groups, *K]
    bias: Any = None,  # [N]
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    dilations: Any = None,
    groups: Any = 1,
) -> Array:
    """Convolution -> [n, N, *D_out]. With a kernel of ones it is one matrix product on views of x and weight."""
    values, kernels, parts = wide(x), wide(weight), int(groups)
    axes = values.ndim - 2
    _check_channels("conv", values.shape[1], kernels, parts)
    steps = per_axis("conv", "strides", strides, axes, 1)
    rates = per_axis("conv", "dilations", dilations, axes, 1)
    kernel = kernels.shape[2:]
    spans = [(size - 1) * rate + 1 for size, rate in zip(kernel, rates, strict=True)]
    pads = resolve_pads("conv", pad_type, pad, values.shape[2:], spans, steps)
    if parts == 1 and max(*kernel, *steps) == 1 and not any(map(any, pads)):
        result = _pointwise(values, kernels)
    else:
        result = _windowed(_padded(values, pads), kernels, steps, rates, parts)
    if bias is not None:
        result += _by_channel(bias, axes)
    return result


def _pointwise(x: Array, weight: Array) -> Array:
    """[n, C, *D] with [N, C, 1...] -> [n, N, *D]."""
    n, C, *D = x.shape
    product = np.matmul(weight.reshape(-1, C), x.reshape(n, C, -1))  # [N, C] x [n, C, S] -> [n, N, S]
    return np.asarray(product.reshape(n, -1, *D))


def _windowed(
    x: Array, weight: Array, strides: Sequence[int], dilations: Sequence[int], groups: int
) -> Array:
    if any(size < 1 for size in _output_sizes(x, weight, strides, dilations)):
        refuse("conv", "weight", weight.shape, f"the kernel is larger than the padded x {x.shape}")
    n, C, N, axes = x.shape[0], x.shape[1], weight.shape[0], x.ndim - 2
    view = windows(x, weight.shape[2:], strides, dilations)  # [n, C, *D_out, *K]
    D = view.shape[2 : 2 + axes]
    # [g, C / g, *K, n, *D_out]: the order of the weight's columns, so that one product a group remains.
    view = view.reshape(n, groups, C // groups, *view.shape[2:])
    view = view.transpose(1, 2, *range(3 + axes, 3 + 2 * axes), 0, *range(3, 3 + axes))
    columns = view.reshape(groups, weight[0].size, -1)
    product = np.matmul(weight.reshape(groups, N // groups, -1), columns)  # [g, N / g, n * D_out]
    return np.moveaxis(product.reshape(N, n, *D), 0, 1)


def _output_sizes(x: Array, weight: Array, strides: Sequence[int], dilations: Sequence[int]) -> list[int]:
    sizes = zip(x.shape[2:], weight.shape[2:], strides, dilations, strict=True)
    return [(size - (kernel - 1) * rate - 1) // step + 1 for size, kernel, step, rate in sizes]


@operation("conv_transpose")
def conv_transpose(
    x: Any,  # [n, C, *D]
    weight: Any,  # [C, N / groups, *K]
    bias: Any = None,  # [N]
    pad: Any = None,
    output_shape: Any = None,
    pad_type: str = "valid",
    strides: Any = None,
    dilations: Any = None,
    groups: Any = 1,
) -> Array:
    """Transposed convolution -> [n, N, *D_out]: each input adds its kernel, `strides` apart; pads are cut off."""
    values, kernels, parts = wide(x), wide(weight), int(groups)
    axes = values.ndim - 2
    if values.shape[1] != len(kernels) or values.shape[1] % parts:
        refuse("conv_transpose", "weight", kernels.shape, f"x is {values.shape}, in {parts} groups")
    steps = per_axis("conv_transpose", "strides", strides, axes, 1)
    rates = per_axis("conv_transpose", "dilations", dilations, axes, 1)
    full = _spread(values, kernels, steps, rates, parts)
    starts, sizes = _kept(full.shape[2:], values.shape[2:], steps, pad_type, pad)
    if output_shape is not None:
        sizes = per_axis("conv_transpose", "output_shape", output_shape, axes + 2, 0)[2:]
    result = _cut(full, starts, sizes)
    if bias is not None:
        result += _by_channel(bias, axes)
    return result


def _spread(x: Array, weight: Array, strides: Sequence[int], dilations: Sequence[int], groups: int) -> Array:
    """The whole sum, before anything is cut off."""
    n, C, *D = x.shape
    N, kernel = weight.shape[1] * groups, weight.shape[2:]
    sizes = zip(D, kernel, strides, dilations, strict=True)
    full = np.zeros(
        (n, N, *((size - 1) * step + (k - 1) * rate + 1 for size, k, step, rate in sizes)), x.dtype
    )
    inputs = x.reshape(n, groups, C // groups, -1)  # [n, g, C / g, S]
    matrices = weight.reshape(groups, C // groups, weight.shape[1], *kernel).swapaxes(1, 2)
    for place in itertools.product(*map(range, kernel)):
        here: Index = (..., *place)
        added = np.matmul(matrices[here], inputs).reshape(n, N, *D)  # [g, N / g, C / g] x [n, g, C / g, S]
        offsets = [at * rate for at, rate in zip(place, dilations, strict=True)]
        spots = zip(offsets, strides, D, strict=True)
        there: Index = (..., *(slice(at, at + step * (size - 1) + 1, step) for at, step, size in spots))
        full[there] += added
    return full


def _kept(
    full: Sequence[int], inputs: Sequence[int], strides: Sequence[int], pad_type: str, pad: Any
) -> tuple[list[int], list[int]]:
    """First index and size that remain of each axis; `same` keeps input times stride, cutting the odd one after."""
    if pad_type == "same":
        sizes = [size * step for size, step in zip(inputs, strides, strict=True)]
        return [max(0, whole - size) // 2 for whole, size in zip(full, sizes, strict=True)], sizes
    if pad_type not in ("valid", "custom"):
        refuse("conv_transpose", "pad_type", pad_type, "known are valid, same and custom")
    numbers = per_axis("conv_transpose", "pad", pad if pad_type == "custom" else None, 2 * len(full), 0)
    cuts = list(zip(numbers[::2], numbers[1::2], strict=True))
    return [before for before, _ in cuts], [whole - sum(cut) for whole, cut in zip(full, cuts, strict=True)]


def _cut(full: Array, starts: Sequence[int], sizes: Sequence[int]) -> Array:
    """A copy of the part that is kept; zeros where it reaches past the sum, which no input value touches."""
    result = np.zeros((*full.shape[:2], *sizes), full.dtype)
    kept: Index = (..., *(slice(start, start + size) for start, size in zip(starts, sizes, strict=True)))
    there: Index = (..., *map(slice, full[kept].shape[2:]))
    result[there] = full[kept]
    return result


def _padded(x: Array, pads: Pads) -> Array:
    return np.pad(x, [(0, 0), (0, 0), *pads]) if any(map(any, pads)) else x


def _by_channel(bias: Any, axes: int) -> Array:
    """[N] -> [N, 1...]."""
    column: Array = wide(np.asarray(bias)).reshape(-1, *[1] * axes)
    return column


def _check_channels(name: str, channels: int, weight: Array, groups: int) -> None:
    if channels != weight.shape[1] * groups or len(weight) % groups:
        refuse(name, "weight", weight.shape, f"x has {channels} channels, in {groups} groups")
