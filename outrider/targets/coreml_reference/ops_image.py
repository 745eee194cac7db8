"""Resizing and cropping the last axes, and moving values between channels, space and batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, refuse, whole_numbers, wide
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []


@operation("upsample_nearest_neighbor", rounds=False)
def upsample_nearest_neighbor(x: Any, scale_factor_height: Any = 1, scale_factor_width: Any = 1) -> Array:
    """The last two axes scaled up by repeating their values."""
    height, width = _scaled_sizes(x, scale_factor_height, scale_factor_width)
    return resize_nearest_neighbor(x, height, width)


@operation("resize_nearest_neighbor", rounds=False)
def resize_nearest_neighbor(x: Any, target_size_height: Any, target_size_width: Any) -> Array:
    """The last two axes in other sizes: output i is input floor(i * size / new size)."""
    result = np.asarray(x)
    for axis, size in ((-2, int(target_size_height)), (-1, int(target_size_width))):
        result = np.take(result, np.arange(size) * result.shape[axis] // size, axis=axis)
    return result


@operation("upsample_bilinear")
def upsample_bilinear(
    x: Any,
    scale_factor_height: Any = 1,
    scale_factor_width: Any = 1,
    align_corners: Any = True,
    half_pixel_centers: Any = None,
) -> Array:
    """The last two axes scaled with linear interpolation; the scale is that of the whole output sizes."""
    halves = not align_corners if half_pixel_centers is None else bool(half_pixel_centers)
    if align_corners and halves:
        refuse("upsample_bilinear", "half_pixel_centers", True, "it contradicts align_corners")
    mode = "STRICT_ALIGN_CORNERS" if align_corners else "UNALIGN_CORNERS" if halves else "DEFAULT"
    sizes = _scaled_sizes(x, scale_factor_height, scale_factor_width)
    return _interpolated("upsample_bilinear", wide(x), sizes, mode)


@operation("resize_bilinear")
def resize_bilinear(
    x: Any, target_size_height: Any = 1, target_size_width: Any = 1, sampling_mode: str = "DEFAULT"
) -> Array:
    """The last two axes in other sizes, with linear interpolation."""
    sizes = (int(target_size_height), int(target_size_width))
    return _interpolated("resize_bilinear", wide(x), sizes, sampling_mode)


@operation("resize")
def resize(
    x: Any, shape: Any, resized_dims: Any, interpolation_mode: str = "LINEAR", sampling_mode: str = "DEFAULT"
) -> Array:
    """The last `resized_dims` axes in the sizes that end `shape`; a 0 there keeps the size of x."""
    count, wanted = int(resized_dims), whole_numbers(shape)
    if not 0 <= count <= len(wanted) <= x.ndim:
        refuse("resize", "resized_dims", count, f"the shape is {wanted}, x {x.shape}")
    last = zip(wanted[len(wanted) - count :], x.shape[x.ndim - count :], strict=True)
    sizes = tuple(size or kept for size, kept in last)
    if interpolation_mode == "LINEAR":
        return _interpolated("resize", wide(x), sizes, sampling_mode)
    if interpolation_mode != "NEAREST_NEIGHBOR" or sampling_mode != "DEFAULT":
        why = "known are LINEAR, and NEAREST_NEIGHBOR with the sampling mode DEFAULT"
        refuse("resize", "interpolation_mode", f"{interpolation_mode}, {sampling_mode}", why)
    result = np.asarray(x)
    for axis, size in zip(range(-count, 0), sizes, strict=True):
        result = np.take(result, np.arange(size) * result.shape[axis] // size, axis=axis)
    return result


def _scaled_sizes(x: Any, height: Any, width: Any) -> tuple[int, int]:
    return math.floor(x.shape[-2] * float(height)), math.floor(x.shape[-1] * float(width))


def _interpolated(name: str, x: Array, sizes: tuple[int, ...], mode: str) -> Array:
    """Linear interpolation along the last axes, one after the other."""
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        points = _grid_points(name, x.shape[axis], size, mode)
        left = np.minimum(points.astype(np.int64), max(0, x.shape[axis] - 2))
        part = (points - left).astype(np.float32).reshape(-1, *[1] * (-1 - axis))
        right = np.minimum(left + 1, x.shape[axis] - 1)
        x = np.take(x, left, axis=axis) * (1 - part) + np.take(x, right, axis=axis) * part
    return x


def _grid_points(name: str, size: int, new: int, mode: str) -> Array:
    """Where along an axis each output value is read, as MIL's resize_bilinear defines its sampling modes."""
    i, last = np.arange(new), size - 1
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        if new == 1:
            points = np.array([last / 2 if mode == "ALIGN_CORNERS" else 0.0])
        else:
            points = i * (last / (new - 1))
    elif mode == "DEFAULT":
        points = i * (size / new)
    elif mode == "OFFSET_CORNERS":
        points = (i + 0.5) * (max(1, last) / new)
    elif mode == "UNALIGN_CORNERS":
        points = (i + 0.5) * (size / new) - 0.5
    else:
        known = "STRICT_ALIGN_CORNERS, ALIGN_CORNERS, DEFAULT, OFFSET_CORNERS and UNALIGN_CORNERS"
        refuse(name, "sampling_mode", mode, f"known are {known}")
    return np.asarray(np.clip(points, 0, last))


@operation("crop", rounds=False)
def crop(x: Any, crop_height: Any, crop_width: Any) -> Array:
    """x without values at both ends of its last two axes."""
    (top, bottom), (left, right) = whole_numbers(crop_height), whole_numbers(crop_width)
    height, width = x.shape[-2:]
    if min(top, bottom, left, right) < 0 or top + bottom >= height or left + right >= width:
        refuse("crop", "crop_height", [top, bottom, left, right], f"x is {x.shape}")
    return np.asarray(x[..., top : height - bottom, left : width - right])


@operation("pixel_shuffle", rounds=False)
def pixel_shuffle(x: Any, upscale_factor: Any) -> Array:
    """[n, C f^2, H, W] -> [n, C, H f, W f]; a channel's f^2 values lie next to each other."""
    n, C, H, W = x.shape
    f = _factor("pixel_shuffle", "upscale_factor", upscale_factor, C, square=True)
    return np.asarray(x.reshape(n, -1, f, f, H, W).transpose(0, 1, 4, 2, 5, 3).reshape(n, -1, H * f, W * f))


@operation("pixel_unshuffle", rounds=False)
def pixel_unshuffle(x: Any, downscale_factor: Any) -> Array:
    """[n, C, H, W] -> [n, C f^2, H / f, W / f]; undoes pixel_shuffle."""
    n, C, H, W = x.shape
    f = _factor("pixel_unshuffle", "downscale_factor", downscale_factor, H, W)
    blocks = x.reshape(n, C, H // f, f, W // f, f).transpose(0, 1, 3, 5, 2, 4)
    return np.asarray(blocks.reshape(n, C * f * f, H // f, W // f))


@operation("depth_to_space", rounds=False)
def depth_to_space(x: Any, block_size: Any) -> Array:
    """[n, C b^2, H, W] -> [n, C, H b, W b]; the place in a block is the slower part of the channel."""
    n, C, H, W = x.shape
    b = _factor("depth_to_space", "block_size", block_size, C, square=True)
    return np.asarray(x.reshape(n, b, b, -1, H, W).transpose(0, 3, 4, 1, 5, 2).reshape(n, -1, H * b, W * b))


@operation("space_to_depth", rounds=False)
def space_to_depth(x: Any, block_size: Any) -> Array:
    """[n, C, H, W] -> [n, C b^2, H / b, W / b]; undoes depth_to_space."""
    n, C, H, W = x.shape
    b = _factor("space_to_depth", "block_size", block_size, H, W)
    blocks = x.reshape(n, C, H // b, b, W // b, b).transpose(0, 3, 5, 1, 2, 4)
    return np.asarray(blocks.reshape(n, C * b * b, H // b, W // b))


@operation("space_to_batch", rounds=False)
def space_to_batch(x: Any, block_shape: Any, paddings: Any) -> Array:
    """[n, C, H, W] padded with zeros -> [n bh bw, C, H / bh, W / bw]; the place in a block is the slower part."""
    bh, bw = whole_numbers(block_shape)
    padded = np.pad(x, [(0, 0), (0, 0), *np.asarray(paddings).tolist()])
    n, C, H, W = padded.shape
    if H % bh or W % bw:
        refuse("space_to_batch", "block_shape", [bh, bw], f"the padded x is {padded.shape}")
    blocks = padded.reshape(n, C, H // bh, bh, W // bw, bw).transpose(3, 5, 0, 1, 2, 4)
    return blocks.reshape(-1, C, H // bh, W // bw)


@operation("batch_to_space", rounds=False)
def batch_to_space(x: Any, block_shape: Any, crops: Any) -> Array:
    """[n bh bw, C, H, W] -> [n, C, H bh, W bw] less what is cut off both ends; undoes space_to_batch."""
    bh, bw = whole_numbers(block_shape)
    batch, C, H, W = x.shape
    if batch % (bh * bw):
        refuse("batch_to_space", "block_shape", [bh, bw], f"x is {x.shape}")
    blocks = x.reshape(bh, bw, -1, C, H, W).transpose(2, 3, 4, 0, 5, 1)
    whole = blocks.reshape(-1, C, H * bh, W * bw)
    (top, bottom), (left, right) = np.asarray(crops).tolist()
    return np.asarray(whole[..., top : H * bh - bottom, left : W * bw - right])


def _factor(name: str, parameter: str, value: Any, *sizes: int, square: bool = False) -> int:
    factor = int(value)
    divisor = factor * factor if square else factor
    if factor < 1 or any(size % divisor for size in sizes):
        refuse(name, parameter, factor, f"it does not divide {sizes}")
    return factor
