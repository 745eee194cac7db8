"""Resizing, cropping, and moving values between channels, space and batch: PyTorch, or values made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch.nn.functional as F

from outrider.errors import BackendError
from tests.mil_cases import Case, case, check, grid, run

IMAGE = grid(2, 4, 4, 6)
INTS = np.int32

CASES: list[Case] = [
    case(
        "upsample_nearest_neighbor",
        "the width only",
        lambda x, **_: F.interpolate(x, scale_factor=(1, 2)),
        x=IMAGE,
        scale_factor_width=INTS(2),
    ),
    case(
        "upsample_bilinear",
        "the width only",
        lambda x, **_: F.interpolate(x, scale_factor=(1, 2), mode="bilinear", align_corners=True),
        x=IMAGE,
        scale_factor_width=INTS(2),
    ),
    case(
        "upsample_nearest_neighbor",
        "whole factors",
        lambda x, **_: F.interpolate(x, scale_factor=(2, 3)),
        x=IMAGE,
        scale_factor_height=INTS(2),
        scale_factor_width=INTS(3),
    ),
    case(
        "upsample_nearest_neighbor",
        "a fraction, one factor by default",
        lambda x, **_: F.interpolate(x, size=(6, 6)),
        x=IMAGE,
        scale_factor_height=np.float32(1.5),
    ),
    case(
        "resize_nearest_neighbor",
        "smaller and larger",
        lambda x, **_: F.interpolate(x, size=(3, 7)),
        x=IMAGE,
        target_size_height=3,
        target_size_width=7,
    ),
    case(
        "upsample_bilinear",
        "corners aligned by default",
        lambda x, **_: F.interpolate(x, scale_factor=(2, 1), mode="bilinear", align_corners=True),
        x=IMAGE,
        scale_factor_height=INTS(2),
    ),
    case(
        "upsample_bilinear",
        "not aligned",
        lambda x, **_: F.interpolate(
            x, scale_factor=(2, 1.5), mode="bilinear", align_corners=False, recompute_scale_factor=True
        ),
        x=IMAGE,
        scale_factor_height=np.float32(2),
        scale_factor_width=np.float32(1.5),
        align_corners=False,
    ),
    case(
        "upsample_bilinear",
        "half pixel centres named",
        lambda x, **_: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
        x=IMAGE,
        scale_factor_height=2,
        scale_factor_width=2,
        align_corners=False,
        half_pixel_centers=True,
    ),
    case(
        "upsample_bilinear",
        "no half pixels",
        [[[0, 1 / 3, 2 / 3, 1, 1, 1]]],
        x=np.float32([[[0, 1]]]),
        scale_factor_width=3,
        align_corners=False,
        half_pixel_centers=False,
    ),
    *(
        case(
            "resize_bilinear",
            f"{mode} to {len(points)}",
            [[points]],
            x=np.float32([[[0, 1]]]),
            target_size_height=1,
            target_size_width=len(points),
            sampling_mode=mode,
        )
        for mode, points in (
            ("UNALIGN_CORNERS", [0, 0.1, 0.5, 0.9, 1]),
            ("STRICT_ALIGN_CORNERS", [0, 0.25, 0.5, 0.75, 1]),
            ("ALIGN_CORNERS", [0, 0.25, 0.5, 0.75, 1]),
            ("DEFAULT", [0, 0.4, 0.8, 1, 1]),
            ("OFFSET_CORNERS", [0.1, 0.3, 0.5, 0.7, 0.9]),
            ("UNALIGN_CORNERS", [0, 0, 1 / 3, 2 / 3, 1, 1]),
            ("ALIGN_CORNERS", [0, 0.2, 0.4, 0.6, 0.8, 1]),
            ("DEFAULT", [0, 1 / 3, 2 / 3, 1, 1, 1]),
            ("OFFSET_CORNERS", [1 / 12, 3 / 12, 5 / 12, 7 / 12, 9 / 12, 11 / 12]),
            ("ALIGN_CORNERS", [0.5]),
            ("STRICT_ALIGN_CORNERS", [0.0]),
        )
    ),
    case(
        "resize_bilinear",
        "both axes",
        lambda x, **_: F.interpolate(x, size=(3, 9), mode="bilinear", align_corners=False),
        x=IMAGE,
        target_size_height=3,
        target_size_width=9,
        sampling_mode="UNALIGN_CORNERS",
    ),
    case("resize_bilinear", "one value by default", lambda x: x[..., :1, :1], x=IMAGE),
    case(
        "resize",
        "two axes, linear",
        lambda x, **_: F.interpolate(x, size=(3, 9), mode="bilinear", align_corners=True),
        x=IMAGE,
        shape=INTS([1, 3, 9]),
        resized_dims=np.uint32(2),
        interpolation_mode="LINEAR",
        sampling_mode="STRICT_ALIGN_CORNERS",
    ),
    case(
        "resize",
        "a 0 keeps a size",
        lambda x, **_: F.interpolate(x, size=(4, 9)),
        x=IMAGE,
        shape=INTS([0, 9]),
        resized_dims=2,
        interpolation_mode="NEAREST_NEIGHBOR",
    ),
    case(
        "crop",
        "four sides",
        lambda x, **_: x[..., 1:, 2:5],
        x=IMAGE,
        crop_height=INTS([1, 0]),
        crop_width=INTS([2, 1]),
    ),
    case(
        "pixel_shuffle",
        "factor 2",
        lambda x, upscale_factor: F.pixel_shuffle(x, 2),
        x=grid(2, 8, 3, 2),
        upscale_factor=INTS(2),
    ),
    case(
        "pixel_unshuffle",
        "factor 2",
        lambda x, downscale_factor: F.pixel_unshuffle(x, 2),
        x=IMAGE,
        downscale_factor=np.uint32(2),
    ),
    case(
        "depth_to_space",
        "block 2",
        [[[[1, 3, 2, 4], [5, 7, 6, 8]]]],
        x=INTS([[[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]]]),
        block_size=2,
    ),
    case(
        "depth_to_space",
        "two channels lie together",
        [[[[1, 3], [5, 7]], [[2, 4], [6, 8]]]],
        x=np.arange(1, 9, dtype=INTS).reshape(1, 8, 1, 1),
        block_size=2,
    ),
    case(
        "space_to_depth",
        "block 2",
        np.arange(1, 9).reshape(1, 8, 1, 1),
        x=INTS([[[[1, 3], [5, 7]], [[2, 4], [6, 8]]]]),
        block_size=2,
    ),
    case(
        "space_to_batch",
        "padded",
        [[[[0, 0]]], [[[0, 0]]], [[[1, 3]]], [[[2, 4]]]],
        x=INTS([[[[1, 2, 3, 4]]]]),
        block_shape=INTS([2, 2]),
        paddings=INTS([[1, 0], [0, 0]]),
    ),
    case(
        "batch_to_space",
        "cropped",
        [[[[1, 2, 3, 4]]]],
        x=INTS([[[[0, 0]]], [[[0, 0]]], [[[1, 3]]], [[[2, 4]]]]),
        block_shape=INTS([2, 2]),
        crops=INTS([[1, 0], [0, 0]]),
    ),
]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_it_gives_the_same_values_in_the_same_places(one: Case) -> None:
    check(one)


REFUSED = [
    (
        "space_to_batch",
        {"x": IMAGE, "block_shape": INTS([2, 4]), "paddings": INTS([[0, 0], [0, 0]])},
        "'space_to_batch'",
    ),
    (
        "space_to_batch",
        {"x": IMAGE, "block_shape": INTS([3, 2]), "paddings": INTS([[0, 0], [0, 0]])},
        "'space_to_batch'",
    ),
    (
        "batch_to_space",
        {"x": grid(6, 1, 2, 2), "block_shape": INTS([2, 2]), "crops": INTS([[0, 0], [0, 0]])},
        "'batch_to_space'",
    ),
    (
        "crop",
        {"x": IMAGE, "crop_height": INTS([-1, 0]), "crop_width": INTS([0, 0])},
        "'crop' with crop_height",
    ),
    (
        "crop",
        {"x": IMAGE, "crop_height": INTS([0, 0]), "crop_width": INTS([3, 3])},
        "'crop' with crop_height",
    ),
    ("pixel_shuffle", {"x": IMAGE, "upscale_factor": 0}, "upscale_factor = 0"),
    (
        "resize",
        {"x": IMAGE, "shape": INTS([3, 9]), "resized_dims": 2, "interpolation_mode": "CUBIC"},
        "CUBIC",
    ),
    ("resize_bilinear", {"x": IMAGE, "sampling_mode": "CUBIC"}, "sampling_mode = 'CUBIC'"),
    ("upsample_bilinear", {"x": IMAGE, "half_pixel_centers": True}, "contradicts align_corners"),
    (
        "crop",
        {"x": IMAGE, "crop_height": INTS([2, 2]), "crop_width": INTS([0, 0])},
        "'crop' with crop_height",
    ),
    ("pixel_shuffle", {"x": grid(2, 3, 4, 4), "upscale_factor": 2}, "upscale_factor = 2"),
    ("space_to_depth", {"x": IMAGE, "block_size": 4}, "block_size = 4"),
]


@pytest.mark.parametrize(("operation", "parameters", "message"), REFUSED)
def test_what_mil_leaves_undefined_is_refused_by_name(
    operation: str, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        run(operation, **parameters)
