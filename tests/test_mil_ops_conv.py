"""Convolutions and pools of the Core ML evaluator against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.errors import BackendError
from tests.mil_cases import Case, case, check, grid, run

B = grid(5)
IMAGE, SIGNAL, VOLUME = grid(2, 4, 9, 8), grid(2, 4, 11), grid(1, 2, 5, 6, 4)
INTS = np.int32


def same(x: torch.Tensor, size: int, after: bool, value: float = 0) -> torch.Tensor:
    """Padded so that a kernel of this size with stride 1 keeps the sizes; an odd value goes after or before."""
    less, more = (size - 1) // 2, size // 2
    return F.pad(x, [less, more] * 2 if after else [more, less] * 2, value=value)


CASES: list[Case] = [
    case(
        "conv",
        "1x1, one position",
        lambda x, weight: F.conv2d(x, weight),
        x=grid(1, 4, 1, 1),
        weight=grid(5, 4, 1, 1),
    ),
    case("conv", "1x1, several, with a bias", F.conv2d, x=grid(1, 4, 1, 6), weight=grid(5, 4, 1, 1), bias=B),
    case("conv", "1x1, two samples", lambda x, weight: F.conv2d(x, weight), x=IMAGE, weight=grid(5, 4, 1, 1)),
    case(
        "conv",
        "1x1 with a stride",
        lambda x, weight, strides: F.conv2d(x, weight, stride=2),
        x=IMAGE,
        weight=grid(5, 4, 1, 1),
        strides=INTS([2, 2]),
    ),
    case(
        "conv",
        "1x1 in two groups",
        lambda x, weight, groups: F.conv2d(x, weight, groups=2),
        x=IMAGE,
        weight=grid(6, 2, 1, 1),
        groups=INTS(2),
    ),
    case(
        "conv",
        "1x1 with padding",
        lambda x, weight, **_: F.conv2d(x, weight, padding=1),
        x=IMAGE,
        weight=grid(5, 4, 1, 1),
        pad_type="custom",
        pad=INTS([1, 1, 1, 1]),
    ),
    case(
        "conv",
        "3x2, valid",
        lambda x, weight, bias, pad_type: F.conv2d(x, weight, bias),
        x=IMAGE,
        weight=grid(5, 4, 3, 2),
        bias=B,
        pad_type="valid",
    ),
    case(
        "conv",
        "strides, pads and dilations",
        lambda x, weight, **_: F.conv2d(F.pad(x, [0, 1, 2, 1]), weight, stride=(2, 1), dilation=(1, 3)),
        x=IMAGE,
        weight=grid(5, 4, 3, 2),
        strides=INTS([2, 1]),
        pad_type="custom",
        pad=INTS([2, 1, 0, 1]),
        dilations=INTS([1, 3]),
    ),
    case(
        "conv",
        "two groups",
        lambda x, weight, groups: F.conv2d(x, weight, groups=2),
        x=IMAGE,
        weight=grid(6, 2, 3, 3),
        groups=2,
    ),
    case(
        "conv",
        "depthwise",
        lambda x, weight, groups: F.conv2d(x, weight, groups=4),
        x=IMAGE,
        weight=grid(8, 1, 3, 3),
        groups=4,
    ),
    case(
        "conv",
        "same, an odd kernel",
        lambda x, weight, pad_type: F.conv2d(x, weight, padding="same"),
        x=IMAGE,
        weight=grid(5, 4, 3, 3),
        pad_type="same",
    ),
    case(
        "conv",
        "same, an even kernel",
        lambda x, weight, pad_type: F.conv2d(same(x, 4, True), weight),
        x=IMAGE,
        weight=grid(5, 4, 4, 4),
        pad_type="same",
    ),
    case(
        "conv",
        "same_lower, an even kernel",
        lambda x, weight, pad_type: F.conv2d(same(x, 4, False), weight),
        x=IMAGE,
        weight=grid(5, 4, 4, 4),
        pad_type="same_lower",
    ),
    case(
        "conv",
        "same with a stride",
        lambda x, weight, **_: F.conv2d(F.pad(x, [0, 1, 1, 1]), weight, stride=2),
        x=IMAGE,
        weight=grid(5, 4, 3, 3),
        pad_type="same",
        strides=INTS([2, 2]),
    ),
    case("conv", "one axis", F.conv1d, x=SIGNAL, weight=grid(5, 4, 3), bias=B),
    case(
        "conv",
        "three axes",
        lambda x, weight, strides: F.conv3d(x, weight, stride=(1, 2, 1)),
        x=VOLUME,
        weight=grid(3, 2, 2, 3, 2),
        strides=INTS([1, 2, 1]),
    ),
    case(
        "conv_transpose",
        "plain",
        lambda x, weight: F.conv_transpose2d(x, weight),
        x=IMAGE,
        weight=grid(4, 5, 3, 2),
    ),
    case(
        "conv_transpose",
        "strides, dilations and a bias",
        lambda x, weight, bias, **_: F.conv_transpose2d(x, weight, bias, stride=(2, 3), dilation=(2, 1)),
        x=IMAGE,
        weight=grid(4, 5, 3, 2),
        bias=B,
        strides=INTS([2, 3]),
        dilations=INTS([2, 1]),
    ),
    case(
        "conv_transpose",
        "custom pads",
        lambda x, weight, **_: F.conv_transpose2d(x, weight, stride=2, padding=1),
        x=IMAGE,
        weight=grid(4, 5, 3, 3),
        strides=INTS([2, 2]),
        pad_type="custom",
        pad=INTS([1, 1, 1, 1]),
    ),
    case(
        "conv_transpose",
        "uneven pads",
        lambda x, weight, **_: F.conv_transpose2d(x, weight)[:, :, 1:, :-1],
        x=IMAGE,
        weight=grid(4, 5, 3, 3),
        pad_type="custom",
        pad=INTS([1, 0, 0, 1]),
    ),
    case(
        "conv_transpose",
        "groups",
        lambda x, weight, groups: F.conv_transpose2d(x, weight, groups=2),
        x=IMAGE,
        weight=grid(4, 3, 3, 3),
        groups=2,
    ),
    case(
        "conv_transpose",
        "same",
        lambda x, weight, **_: F.conv_transpose2d(x, weight, stride=2)[:, :, :-1, :-1],
        x=IMAGE,
        weight=grid(4, 5, 3, 3),
        strides=INTS([2, 2]),
        pad_type="same",
    ),
    case(
        "conv_transpose",
        "same, a kernel below the stride",
        lambda x, weight, **_: F.conv_transpose2d(x, weight, stride=3, output_padding=2),
        x=IMAGE,
        weight=grid(4, 5, 1, 1),
        strides=INTS([3, 3]),
        pad_type="same",
    ),
    case(
        "conv_transpose",
        "an output shape",
        lambda x, weight, **_: F.conv_transpose2d(x, weight, stride=2, padding=1, output_padding=1),
        x=IMAGE,
        weight=grid(4, 5, 3, 3),
        strides=INTS([2, 2]),
        pad_type="custom",
        pad=INTS([1, 0, 1, 0]),
        output_shape=INTS([2, 5, 18, 16]),
    ),
    case(
        "conv_transpose",
        "one axis",
        lambda x, weight: F.conv_transpose1d(x, weight),
        x=SIGNAL,
        weight=grid(4, 5, 3),
    ),
    case(
        "conv_transpose",
        "three axes",
        lambda x, weight: F.conv_transpose3d(x, weight),
        x=VOLUME,
        weight=grid(2, 3, 2, 3, 2),
    ),
    case(
        "max_pool",
        "valid",
        lambda x, **_: F.max_pool2d(x, (2, 3), 1),
        x=IMAGE,
        kernel_sizes=INTS([2, 3]),
        pad_type="valid",
    ),
    case(
        "max_pool",
        "strides and pads",
        lambda x, **_: F.max_pool2d(x, 3, 2, 1),
        x=IMAGE,
        kernel_sizes=INTS([3, 3]),
        strides=INTS([2, 2]),
        pad_type="custom",
        pad=INTS([1, 1, 1, 1]),
    ),
    case(
        "max_pool",
        "ceil mode",
        lambda x, **_: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        x=IMAGE,
        kernel_sizes=INTS([3, 3]),
        strides=INTS([2, 2]),
        pad_type="custom",
        pad=INTS([1, 1, 1, 1]),
        ceil_mode=True,
    ),
    case(
        "max_pool",
        "same",
        lambda x, **_: F.max_pool2d(same(x, 4, True, -99), 4, 1),
        x=IMAGE,
        kernel_sizes=INTS([4, 4]),
        pad_type="same",
    ),
    case(
        "max_pool",
        "same_lower",
        lambda x, **_: F.max_pool2d(same(x, 4, False, -99), 4, 1),
        x=IMAGE,
        kernel_sizes=INTS([4, 4]),
        pad_type="same_lower",
    ),
    case(
        "max_pool",
        "one axis",
        lambda x, **_: F.max_pool1d(x, 3, 2),
        x=SIGNAL,
        kernel_sizes=INTS([3]),
        strides=INTS([2]),
        pad_type="valid",
        ceil_mode=False,
    ),
    case(
        "max_pool",
        "three axes",
        lambda x, **_: F.max_pool3d(x, 2, 1),
        x=VOLUME,
        kernel_sizes=INTS([2, 2, 2]),
        pad_type="valid",
    ),
    case(
        "avg_pool",
        "valid",
        lambda x, **_: F.avg_pool2d(x, (2, 3), 1),
        x=IMAGE,
        kernel_sizes=INTS([2, 3]),
        pad_type="valid",
    ),
    case(
        "avg_pool",
        "padding counts by default",
        lambda x, **_: F.avg_pool2d(x, 3, 2, 1),
        x=IMAGE,
        kernel_sizes=INTS([3, 3]),
        strides=INTS([2, 2]),
        pad_type="custom",
        pad=INTS([1, 1, 1, 1]),
    ),
    case(
        "avg_pool",
        "padding excluded",
        lambda x, **_: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        x=IMAGE,
        kernel_sizes=INTS([3, 3]),
        strides=INTS([2, 2]),
        pad_type="custom",
        pad=INTS([1, 1, 1, 1]),
        exclude_padding_from_average=True,
    ),
    case(
        "avg_pool",
        "ceil mode",
        lambda x, **_: F.avg_pool2d(x, 3, 2, 1, True),
        x=IMAGE,
        kernel_sizes=INTS([3, 3]),
        strides=INTS([2, 2]),
        pad_type="custom",
        pad=INTS([1, 1, 1, 1]),
        ceil_mode=True,
    ),
    case(
        "avg_pool",
        "ceil mode, padding excluded",
        lambda x, **_: F.avg_pool2d(x, 3, 2, 1, True, False),
        x=IMAGE,
        kernel_sizes=INTS([3, 3]),
        strides=INTS([2, 2]),
        pad_type="custom",
        pad=INTS([1, 1, 1, 1]),
        ceil_mode=True,
        exclude_padding_from_average=True,
    ),
    case(
        "avg_pool",
        "same, padding excluded",
        lambda x, **_: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
        x=IMAGE,
        kernel_sizes=INTS([3, 3]),
        pad_type="same",
        exclude_padding_from_average=True,
    ),
    case(
        "avg_pool",
        "the whole image",
        lambda x, **_: x.mean((2, 3), True),
        x=IMAGE,
        kernel_sizes=INTS([9, 8]),
        pad_type="valid",
    ),
    case(
        "l2_pool",
        "ceil mode, which changes nothing here",
        lambda x, **_: F.lp_pool1d(x, 2, 3, 2),
        x=SIGNAL,
        kernel_sizes=INTS([3]),
        strides=INTS([2]),
        pad_type="valid",
        ceil_mode=True,
    ),
    case(
        "l2_pool",
        "strides",
        lambda x, **_: F.lp_pool2d(x, 2, 3, 2),
        x=IMAGE,
        kernel_sizes=INTS([3, 3]),
        strides=INTS([2, 2]),
        pad_type="valid",
    ),
    case(
        "l2_pool",
        "pads",
        lambda x, **_: F.lp_pool2d(F.pad(x, [1] * 4), 2, 3, 1),
        x=IMAGE,
        kernel_sizes=INTS([3, 3]),
        pad_type="custom",
        pad=INTS([1, 1, 1, 1]),
    ),
]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_it_computes_what_pytorch_does(one: Case) -> None:
    check(one)


REFUSED = [
    ("conv", {"x": IMAGE, "weight": grid(5, 3, 1, 1)}, "'conv' with weight = .*4 channels"),
    ("conv", {"x": IMAGE, "weight": grid(5, 4, 1, 1), "pad_type": "reflect"}, "pad_type = 'reflect'"),
    (
        "conv",
        {"x": IMAGE, "weight": grid(5, 4, 1, 1), "strides": INTS([1])},
        "strides = .*2 numbers are wanted",
    ),
    ("conv", {"x": SIGNAL, "weight": grid(5, 4, 12)}, "the kernel is larger"),
    (
        "conv_transpose",
        {"x": IMAGE, "weight": grid(4, 5, 1, 1), "pad_type": "same_lower"},
        "pad_type = 'same_lower'",
    ),
    ("conv_transpose", {"x": IMAGE, "weight": grid(3, 5, 1, 1)}, "'conv_transpose' with weight"),
    (
        "max_pool",
        {"x": SIGNAL, "kernel_sizes": INTS([3]), "pad_type": "same", "ceil_mode": True},
        "ceil_mode = True",
    ),
    ("avg_pool", {"x": SIGNAL, "kernel_sizes": INTS([13]), "pad_type": "valid"}, "a window is larger"),
]


@pytest.mark.parametrize(("operation", "parameters", "message"), REFUSED)
def test_what_mil_leaves_undefined_is_refused_by_name(
    operation: str, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        run(operation, **parameters)
