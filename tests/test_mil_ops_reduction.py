"""Reductions and orderings of the Core ML evaluator against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.errors import BackendError
from tests.mil_cases import Case, case, check, grid, run, whole

X, POSITIVE, Z = grid(2, 3, 4), grid(2, 3, 4, low=0.25, high=2), whole(2, 3, 4)
AXES = np.int32([0, -1])

REDUCTIONS = {
    "reduce_sum": torch.sum,
    "reduce_mean": torch.mean,
    "reduce_max": torch.amax,
    "reduce_min": torch.amin,
    "reduce_l1_norm": lambda x, **how: x.abs().sum(**how),
    "reduce_l2_norm": lambda x, **how: x.square().sum(**how).sqrt(),
    "reduce_sum_square": lambda x, **how: x.square().sum(**how),
    "reduce_log_sum": lambda x, **how: x.sum(**how).log(),
    "reduce_log_sum_exp": torch.logsumexp,
}
CASES: list[Case] = []
for name, function in REDUCTIONS.items():
    CASES += [
        case(name, "all axes", lambda x, f=function: f(x, dim=(0, 1, 2)), x=POSITIVE),
        case(
            name,
            "all axes kept",
            lambda x, f=function, **_: f(x, dim=(0, 1, 2), keepdim=True),
            x=POSITIVE,
            keep_dims=True,
        ),
        case(name, "two axes", lambda x, axes, f=function: f(x, dim=(0, 2)), x=POSITIVE, axes=AXES),
        case(
            name,
            "two axes kept",
            lambda x, axes, keep_dims, f=function: f(x, dim=(0, 2), keepdim=True),
            x=POSITIVE,
            axes=AXES,
            keep_dims=np.bool_(True),
        ),
        case(
            name,
            "one axis, not kept",
            lambda x, axes, keep_dims, f=function: f(x, dim=(1,)),
            x=POSITIVE,
            axes=np.int32([-2]),
            keep_dims=False,
        ),
    ]
WHOLE = {
    "reduce_sum": lambda x, axes: x.sum((0, 2), dtype=torch.int32),
    "reduce_max": lambda x, axes: x.amax((0, 2)),
    "reduce_min": lambda x, axes: x.amin((0, 2)),
    "reduce_l1_norm": lambda x, axes: x.abs().sum((0, 2), dtype=torch.int32),
    "reduce_sum_square": lambda x, axes: x.square().sum((0, 2), dtype=torch.int32),
    "reduce_mean": lambda x, axes: x.double().mean((0, 2)).trunc().int(),
    "reduce_l2_norm": lambda x, axes: x.double().square().sum((0, 2)).sqrt().trunc().int(),
}
for name, function in WHOLE.items():
    CASES.append(case(name, "whole numbers", function, x=Z, axes=AXES))
CASES += [
    case("reduce_prod", "all axes", lambda x: x.prod(), x=POSITIVE),
    case("reduce_prod", "an axis", lambda x, axes: x.prod(1), x=X, axes=np.int32([1])),
    case(
        "reduce_prod",
        "two axes kept",
        lambda x, axes, keep_dims: x.prod(0, True).prod(2, True),
        x=X,
        axes=AXES,
        keep_dims=True,
    ),
    case(
        "reduce_prod", "whole numbers", lambda x, axes: x.prod(1, dtype=torch.int32), x=Z, axes=np.int32([1])
    ),
    case("reduce_sum", "negative values", lambda x, axes: x.sum((0, 2)), x=X, axes=AXES),
    case("reduce_sum", "beyond half precision", np.float32(4 * 60000), x=np.full(4, 60000, np.float32)),
    case(
        "reduce_log_sum_exp", "large values", np.float32(60000 + np.log(2)), x=np.full(2, 60000, np.float32)
    ),
    case("reduce_log_sum_exp", "all minus infinity", np.float32(-np.inf), x=np.full(2, -np.inf, np.float32)),
    case("reduce_argmax", "the last axis by default", lambda x: x.argmax(-1).int(), x=X),
    case(
        "reduce_argmax", "an axis kept", lambda x, **_: x.argmax(1, True).int(), x=X, axis=-2, keep_dims=True
    ),
    case(
        "reduce_argmax",
        "uint16",
        lambda x, **_: x.argmax(0).to(torch.uint16),
        x=X,
        axis=0,
        output_dtype="uint16",
    ),
    case("reduce_argmax", "the first of equals, whole", np.int32(1), x=np.int32([1, 5, 5])),
    case("reduce_argmin", "the last axis by default", lambda x: x.argmin(-1).int(), x=X),
    case(
        "reduce_argmin", "an axis kept", lambda x, **_: x.argmin(1, True).int(), x=X, axis=-2, keep_dims=True
    ),
    case(
        "reduce_argmin",
        "int32",
        lambda x, **_: x.argmin(0).int(),
        x=X,
        axis=np.int32(0),
        output_dtype="int32",
    ),
    case("argsort", "falling by default", lambda x: x.argsort(-1, descending=True).int(), x=X),
    case("argsort", "rising along an axis", lambda x, **_: x.argsort(1).int(), x=X, axis=1, ascending=True),
    case("argsort", "equal ones keep their order", np.int32([1, 0, 2, 3]), x=np.int32([2, 5, 2, 2])),
    case("topk", "one value by default", lambda x: _top(x, 1, -1), x=X),
    case("topk", "two of an axis", lambda x, **_: _top(x, 2, 1), x=X, k=2, axis=-2),
    case(
        "topk",
        "the smallest",
        lambda x, **_: _top(x, 2, 2, False),
        x=X,
        k=np.int32(2),
        axis=2,
        ascending=True,
    ),
    case("topk", "all of them", lambda x, **_: _top(x, 4, 2), x=X, k=-1),
    case("topk", "values only", lambda x, **_: _top(x, 3, 2)[0], x=X, k=3, return_indices=False, sort=False),
    case(
        "topk",
        "uint16 indices",
        lambda x, **_: (_top(x, 3, 2)[0], _top(x, 3, 2)[1].to(torch.uint16)),
        x=X,
        k=3,
        output_indices_dtype="uint16",
        sort=True,
        return_indices=True,
    ),
    case("topk", "whole numbers", (np.int32([9, 7]), np.int32([2, 0])), x=np.int32([7, 1, 9]), k=2),
    case("cumsum", "the first axis by default", lambda x: x.cumsum(0), x=X),
    case("cumsum", "a negative axis", lambda x, axis: x.cumsum(-1), x=X, axis=-1),
    case("cumsum", "exclusive", lambda x, **_: x.cumsum(1) - x, x=X, axis=1, exclusive=True),
    case(
        "cumsum",
        "reverse",
        lambda x, **_: x.flip(1).cumsum(1).flip(1),
        x=X,
        axis=1,
        reverse=True,
        exclusive=False,
    ),
    case(
        "cumsum",
        "exclusive and reverse",
        lambda x, **_: x.flip(1).cumsum(1).flip(1) - x,
        x=X,
        axis=1,
        reverse=True,
        exclusive=True,
    ),
    case("cumsum", "whole numbers", lambda x, axis: x.cumsum(2, dtype=torch.int32), x=Z, axis=2),
]


def _top(x: torch.Tensor, k: int, axis: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    values, positions = x.topk(k, axis, largest)
    return values, positions.int()


@pytest.mark.parametrize("one", CASES, ids=str)
def test_it_computes_what_pytorch_does(one: Case) -> None:
    check(one)


REFUSED = [
    ("reduce_sum", {"x": X, "axes": np.int32([3])}, "'reduce_sum' with axis = 3: the tensor has 3 axes"),
    ("reduce_sum", {"x": X, "axes": np.int32([0, -3])}, "an axis is named twice"),
    ("reduce_argmax", {"x": X, "output_dtype": "int64"}, "'reduce_argmax' with output_dtype = 'int64'"),
    ("topk", {"x": X, "k": 5}, "'topk' with k = 5: axis 2 has 4 values"),
    ("topk", {"x": X, "output_indices_dtype": "int8"}, "output_indices_dtype = 'int8'"),
    ("cumsum", {"x": X, "axis": -4}, "'cumsum' with axis = -4"),
]


@pytest.mark.parametrize(("operation", "parameters", "message"), REFUSED)
def test_what_mil_leaves_undefined_is_refused_by_name(
    operation: str, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        run(operation, **parameters)
