"""Gather, scatter and quantization of the Core ML evaluator against PyTorch or plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import BackendError
from tests.mil_cases import Case, case, check, grid, run, whole

X, Z = grid(3, 4, 5), whole(3, 4, 5)
INTS = np.int32
MODES = ("update", "add", "sub", "mul", "div", "max", "min")
COMBINE = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "mul": lambda old, new: old * new,
    "div": lambda old, new: old / new,
    "max": max,
    "min": min,
}


def gathered(x: np.ndarray, indices: np.ndarray, batch_dims: int) -> np.ndarray:
    """TensorFlow's gather of the axis after the batch, in loops."""
    shape = (*indices.shape, *x.shape[batch_dims + 1 :])
    result = np.empty(shape, x.dtype)
    for at in np.ndindex(indices.shape):
        result[at] = x[(*at[:batch_dims], indices[at])]
    return result


def scattered_along(
    data: np.ndarray, indices: np.ndarray, updates: np.ndarray, axis: int, mode: str
) -> np.ndarray:
    result = data.copy()
    for at in np.ndindex(indices.shape):
        place = (*at[:axis], int(indices[at]), *at[axis + 1 :])
        result[place] = COMBINE[mode](result[place], updates[at])
    return result


def scattered_slices(data: np.ndarray, indices: np.ndarray, updates: np.ndarray, mode: str) -> np.ndarray:
    result = data.copy()
    for at in np.ndindex(indices.shape[:-1]):
        for inner in np.ndindex(data.shape[indices.shape[-1] :]):
            place = (*map(int, indices[at]), *inner)
            result[place] = COMBINE[mode](result[place], updates[(*at, *inner)])
    return result


MATRIX = INTS([[0, 2], [1, 1]])
ALONG = np.random.default_rng(1).permuted(np.tile(np.arange(4), (3, 5, 1)), axis=-1)
ALONG = np.moveaxis(ALONG, -1, 1)[:, :3].astype(INTS)  # [3, 3, 5], different along axis 1
PLACES = INTS([[0, 1], [2, 3], [1, 0]])
CASES: list[Case] = [
    case(
        "scatter_nd",
        "all axes",
        scattered_slices(X, INTS([[0, 1, 4], [2, 3, 0]]), X[0, 0, :2], "add"),
        data=X,
        indices=INTS([[0, 1, 4], [2, 3, 0]]),
        updates=X[0, 0, :2],
    ),
    case(
        "gather",
        "rows of an embedding",
        lambda x, indices: x[indices],
        x=grid(6, 3),
        indices=INTS([[5, 0, 5]]),
    ),
    case(
        "gather",
        "an axis",
        lambda x, indices, axis: x.index_select(1, indices),
        x=X,
        indices=INTS([3, 0]),
        axis=INTS(1),
    ),
    case(
        "gather",
        "a matrix of indices along a negative axis",
        lambda x, indices, axis: x[:, :, indices],
        x=X,
        indices=MATRIX,
        axis=-1,
    ),
    case("gather", "a scalar index", lambda x, indices, axis: x.select(1, 2), x=X, indices=INTS(2), axis=1),
    case(
        "gather",
        "a size out of a shape",
        INTS(4),
        x=INTS([3, 4, 5]),
        indices=INTS(1),
        axis=0,
        batch_dims=0,
        validate_indices=False,
    ),
    case(
        "gather", "a negative index up to iOS 16", lambda x, indices: x[[2, 0]], x=Z, indices=INTS([-1, -3])
    ),
    case(
        "gather",
        "uint16 indices, iOS 17",
        lambda x, indices, **_: x[[2, 0]],
        x=X,
        indices=np.uint16([2, 0]),
        validate_indices=False,
    ),
    case(
        "gather",
        "a batch",
        gathered(X, INTS([[1, 2], [0, 0], [3, 1]]), 1),
        x=X,
        indices=INTS([[1, 2], [0, 0], [3, 1]]),
        axis=1,
        batch_dims=1,
    ),
    case(
        "gather",
        "a batch and a later axis",
        np.stack([X[b][:, [[4, 0], [1, 1], [2, 3]][b]] for b in range(3)]),
        x=X,
        indices=INTS([[4, 0], [1, 1], [2, 3]]),
        axis=2,
        batch_dims=1,
        validate_indices=True,
    ),
    case(
        "gather_along_axis",
        "the first axis by default",
        lambda x, indices: x.gather(0, indices.long()),
        x=X,
        indices=whole(2, 4, 5, low=0, high=3),
    ),
    case(
        "gather_along_axis",
        "a negative axis",
        lambda x, indices, axis: x.gather(1, indices.long()),
        x=X,
        indices=ALONG,
        axis=-2,
    ),
    case(
        "gather_along_axis",
        "a negative index up to iOS 16",
        X[:, :, [-1]],
        x=X,
        indices=np.full((3, 4, 1), -1, INTS),
        axis=2,
    ),
    case(
        "gather_along_axis",
        "whole numbers, iOS 17",
        lambda x, indices, **_: x.gather(1, indices.long()),
        x=Z,
        indices=ALONG,
        axis=1,
        validate_indices=True,
    ),
    case("gather_nd", "points", X[[0, 2, 1], [1, 3, 0]], x=X, indices=PLACES),
    case("gather_nd", "a matrix of points", X[MATRIX][..., 0:4, :], x=X, indices=MATRIX[..., None]),
    case(
        "gather_nd",
        "all axes",
        X[[0, 2], [1, 3], [4, 0]],
        x=X,
        indices=INTS([[0, 1, 4], [2, 3, 0]]),
        batch_dims=0,
    ),
    case("gather_nd", "a negative index up to iOS 16", X[[2]], x=X, indices=INTS([[-1]])),
    case(
        "gather_nd",
        "a batch",
        np.stack([X[b][[[1, 0], [2, 2], [3, 1]][b]] for b in range(3)]),
        x=X,
        indices=INTS([[[1], [0]], [[2], [2]], [[3], [1]]]),
        batch_dims=1,
        validate_indices=False,
    ),
    case(
        "scatter",
        "adds by default",
        lambda data, indices, updates: data.index_add(0, indices, updates),
        data=X,
        indices=INTS([2, 0, 2]),
        updates=grid(3, 4, 5),
    ),
    case(
        "scatter",
        "an axis, whole numbers",
        lambda data, indices, updates, **_: data.index_copy(1, indices.long(), updates),
        data=Z,
        indices=INTS([3, 0]),
        updates=whole(3, 2, 5),
        axis=-2,
        mode="update",
        validate_indices=True,
    ),
    case(
        "scatter",
        "a negative index up to iOS 16",
        lambda data, indices, updates, mode: data.index_copy(0, torch.tensor([2]), updates),
        data=X,
        indices=INTS([-1]),
        updates=grid(1, 4, 5),
        mode="update",
    ),
    case(
        "scatter_along_axis",
        "adds by default",
        lambda data, indices, updates: data.scatter_add(0, indices.long(), updates),
        data=X,
        indices=whole(2, 4, 5, low=0, high=3),
        updates=grid(2, 4, 5),
    ),
    case(
        "scatter_along_axis",
        "update",
        lambda data, indices, updates, **_: data.scatter(1, indices.long(), updates),
        data=X,
        indices=ALONG,
        updates=grid(3, 3, 5),
        axis=-2,
        mode="update",
        validate_indices=False,
    ),
    case(
        "scatter_nd",
        "adds by default, a place named twice",
        scattered_slices(X, INTS([[0], [0]]), X[1:], "add"),
        data=X,
        indices=INTS([[0], [0]]),
        updates=X[1:],
    ),
    case(
        "scatter_nd",
        "whole numbers",
        scattered_slices(Z, PLACES, Z[:, 0], "update"),
        data=Z,
        indices=PLACES,
        updates=Z[:, 0],
        mode="update",
        validate_indices=True,
    ),
    case(
        "quantize",
        "one scale",
        lambda input, **_: torch.round(input / 0.25).to(torch.int8),
        input=X,
        scale=np.float32(0.25),
        output_dtype="int8",
    ),
    case(
        "quantize",
        "a zero point, kept within the type",
        lambda input, **_: (torch.round(input / 0.0078125) + 128).clamp(0, 255).to(torch.uint8),
        input=X,
        scale=np.float32(0.0078125),
        output_dtype="uint8",
        zero_point=np.uint8(128),
    ),
    case(
        "quantize",
        "scales along an axis",
        lambda input, scale, zero_point, **_: (torch.round(input / scale[:, None]) + zero_point[:, None]).to(
            torch.int8
        ),
        input=X,
        scale=np.float32([0.5, 0.25, 0.125, 1]),
        zero_point=np.int8([1, 2, 3, 4]),
        axis=-2,
        output_dtype="int8",
    ),
    case(
        "dequantize", "one scale", np.float32([-32, 0.25]), input=np.int8([-128, 1]), scale=np.float32(0.25)
    ),
    case(
        "dequantize",
        "a zero point below the values",
        np.float32([-32, 31.75]),
        input=np.uint8([0, 255]),
        scale=np.float16(0.25),
        zero_point=np.uint8(128),
    ),
    case(
        "dequantize",
        "scales along an axis",
        np.float32([[0, 0], [-1.5, 1.5]]),
        input=np.int8([[1, 1], [0, 2]]),
        scale=np.float32([0.5, 1.5]),
        zero_point=np.int8([1, 1]),
        axis=0,
    ),
]
for mode in MODES:
    along, slices = grid(3, 3, 5, low=0.5), grid(3, 5, low=0.5)
    CASES += [
        case(
            "scatter_along_axis",
            f"mode {mode}",
            scattered_along(X, ALONG, along, 1, mode),
            data=X,
            indices=ALONG,
            updates=along,
            axis=1,
            mode=mode,
        ),
        case(
            "scatter_nd",
            f"mode {mode}",
            scattered_slices(X, PLACES, slices, mode),
            data=X,
            indices=PLACES,
            updates=slices,
            mode=mode,
        ),
        case(
            "scatter",
            f"mode {mode}",
            scattered_slices(X, INTS([[2], [0], [2]]), X[::-1], mode),
            data=X,
            indices=INTS([2, 0, 2]),
            updates=X[::-1],
            mode=mode,
        ),
    ]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_it_takes_and_puts_the_values_in_the_right_places(one: Case) -> None:
    check(one)


INDEXED: dict[str, dict[str, Any]] = {
    "gather": {"x": X},
    "gather_along_axis": {"x": X},
    "gather_nd": {"x": X},
    "scatter": {"data": X, "updates": grid(1, 4, 5)},
    "scatter_along_axis": {"data": X, "updates": grid(1, 4, 5)},
    "scatter_nd": {"data": X, "updates": grid(1, 4, 5)},
}
SHAPES = {"gather": (1,), "scatter": (1,), "gather_nd": (1, 1), "scatter_nd": (1, 1)}


@pytest.mark.parametrize("since_17", [False, True])
@pytest.mark.parametrize("operation", INDEXED)
def test_an_index_outside_is_refused_and_since_ios_17_a_negative_one_too(
    operation: str, since_17: bool
) -> None:
    version = {"validate_indices": False} if since_17 else {}
    shape = SHAPES.get(operation, (1, 4, 5))
    for index in (3, -4) if not since_17 else (3, -1):
        with pytest.raises(BackendError, match=f"'{operation}' with indices = {index}"):
            run(operation, indices=np.full(shape, index, INTS), **INDEXED[operation], **version)


REFUSED = [
    (
        "gather",
        {"x": X, "indices": INTS([[0], [0]]), "axis": 1, "batch_dims": 1},
        "'gather' with batch_dims = 1",
    ),
    ("gather_nd", {"x": X, "indices": INTS([[0], [0]]), "batch_dims": 1}, "'gather_nd' with indices"),
    ("gather_nd", {"x": X, "indices": INTS([0, 0, 0]), "batch_dims": 1}, "'gather_nd' with indices"),
    ("gather", {"x": X, "indices": INTS([[0]]), "axis": 0, "batch_dims": 1}, "'gather' with batch_dims = 1"),
    ("gather_along_axis", {"x": X, "indices": INTS([[[0]]])}, "only axis 0 may differ"),
    ("gather_nd", {"x": X, "indices": INTS([[0, 0, 0, 0]])}, "'gather_nd' with indices"),
    ("scatter", {"data": X, "indices": INTS([0]), "updates": X}, "'scatter' with updates"),
    ("scatter", {"data": Z, "indices": INTS([0]), "updates": Z[:1], "mode": "div"}, "mode = 'div'"),
    (
        "scatter",
        {"data": Z, "indices": INTS([0]), "updates": Z[:1], "mode": "xor"},
        "mode = 'xor'.*known are update",
    ),
    ("scatter_along_axis", {"data": X, "indices": ALONG, "updates": X, "axis": 1}, "the indices are"),
    ("scatter_nd", {"data": X, "indices": PLACES, "updates": X}, "'scatter_nd' with updates"),
    ("quantize", {"input": X, "scale": np.float32(1), "output_dtype": "int4"}, "output_dtype = 'int4'"),
    ("dequantize", {"input": Z, "scale": np.float32([1, 2])}, "'dequantize' with axis = None"),
    ("dequantize", {"input": Z, "scale": np.float32([1, 2]), "axis": 0}, "'dequantize' with axis = 0"),
]


@pytest.mark.parametrize(("operation", "parameters", "message"), REFUSED)
def test_what_mil_leaves_undefined_is_refused_by_name(
    operation: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        run(operation, **parameters)
