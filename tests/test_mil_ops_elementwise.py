"""Elementwise operations and activations of the Core ML evaluator against PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.errors import BackendError
from outrider.targets.coreml_reference.ops_unary import error_function
from tests.mil_cases import Case, case, check, flags, grid, run, whole

X, ROW, COLUMN = grid(3, 4), grid(4), grid(3, 1)
POSITIVE, SMALL = grid(3, 4, low=0.25, high=3), grid(3, 4, low=-0.99, high=0.99)
Z, J = whole(3, 4), whole(3, 4, low=1, high=5)
HALF, SCALAR = np.float16(0.75), np.float32(0.75)

ARITHMETIC = {
    "add": torch.add,
    "sub": torch.subtract,
    "mul": torch.multiply,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "floor_div": torch.floor_divide,
    "mod": torch.remainder,
}
COMPARISONS = {
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
}
LOGICAL = {"logical_and": torch.logical_and, "logical_or": torch.logical_or, "logical_xor": torch.logical_xor}
UNARY = {
    "abs": torch.abs,
    "atan": torch.atan,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "floor": torch.floor,
    "identity": lambda x: x,
    "relu": torch.relu,
    "relu6": F.relu6,
    "round": torch.round,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": F.silu,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
}
CASES: list[Case] = []
for name, function in ARITHMETIC.items():
    two = lambda x, y, function=function: function(x, y)  # noqa: E731
    CASES += [
        case(name, "a row", two, x=X, y=ROW),
        case(name, "a column and a row", two, x=COLUMN, y=ROW),
        case(name, "whole numbers", two, x=Z, y=J),
    ]
CASES += [
    case("add", "a scalar of a constant", lambda x, y: x + 0.75, x=X, y=SCALAR),
    case("mul", "a half scalar first", lambda x, y: 0.75 * y, x=HALF, y=X),
    case("maximum", "a scalar", lambda x, y: torch.clamp(x, min=0.75), x=X, y=SCALAR),
    case(
        "add",
        "whole numbers wrap",
        np.array([-(2**31)], np.int32),
        x=np.array([2**31 - 1], np.int32),
        y=np.int32(1),
    ),
    case("mul", "products beyond half precision stay", lambda x, y: x * y, x=X * 1024, y=X * 1024),
    case("real_div", "a row", lambda x, y: x / y, x=X, y=ROW),
    case("real_div", "whole numbers that divide", Z, x=Z * J, y=J),
    case("pow", "a row", lambda x, y: torch.pow(x, y), x=POSITIVE, y=ROW),
    case("pow", "a negative base to a whole power", lambda x, y: x**2, x=X, y=np.float32(2)),
    case("pow", "whole numbers", lambda x, y: torch.pow(x, y), x=Z, y=J),
]
for name, function in COMPARISONS.items():
    two = lambda x, y, function=function: function(x, y)  # noqa: E731
    CASES += [
        case(name, "a row, some equal", two, x=np.where(flags(3, 4), ROW, X), y=ROW),
        case(name, "whole numbers", two, x=Z, y=np.roll(Z, 1, 0)),
    ]
for name, function in LOGICAL.items():
    CASES.append(
        case(name, "flags", lambda x, y, function=function: function(x, y), x=flags(3, 4), y=flags(4))
    )
for name, function in UNARY.items():
    CASES.append(case(name, "values", lambda x, function=function: function(x), x=2 * X))
for name, function in {"abs": torch.abs, "sign": torch.sign, "square": torch.square}.items():
    CASES.append(case(name, "whole numbers", lambda x, function=function: function(x), x=Z))
for name, function in {"acos": torch.acos, "asin": torch.asin, "atanh": torch.atanh}.items():
    CASES.append(case(name, "values", lambda x, function=function: function(x), x=SMALL))
CASES += [
    case("relu6", "above six", [0.0, 6.0, 5.5], x=np.float32([-1, 7, 5.5])),
    case(
        "clip", "to one value", [0.5, 0.5], x=np.float32([0, 1]), alpha=np.float32(0.5), beta=np.float32(0.5)
    ),
    case("cast", "the limits of a type", np.uint8([0, 255]), x=np.float32([-0.5, 255.5]), dtype="uint8"),
    case("pow", "a negative power", lambda x, y: x**-2, x=X, y=np.float32(-2)),
    case("logical_not", "flags", lambda x: ~x, x=flags(3, 4)),
    case("round", "halves go to the even number", [0.0, 2.0, 2.0, -0.0], x=np.float32([0.5, 1.5, 2.5, -0.5])),
    case("sqrt", "values", lambda x: torch.sqrt(x), x=POSITIVE),
    case("log", "default epsilon", lambda x: torch.log(x), x=POSITIVE),
    case("log", "an epsilon", lambda x, epsilon: torch.log(x + 0.5), x=POSITIVE, epsilon=np.float32(0.5)),
    case("log", "of zero, the smallest epsilon", np.float32([-103.27893]), x=np.zeros(1, np.float32)),
    case("rsqrt", "default epsilon", lambda x: torch.rsqrt(x), x=POSITIVE),
    case("rsqrt", "an epsilon", lambda x, epsilon: torch.rsqrt(x + 0.5), x=POSITIVE, epsilon=np.float16(0.5)),
    case("rsqrt", "of zero", np.float32([1e6]), x=np.zeros(1, np.float32)),
    case("inverse", "default epsilon", lambda x: 1 / (x + 1e-4), x=X),
    case("inverse", "an epsilon", lambda x, epsilon: 1 / (x + 4), x=X, epsilon=np.float32(4)),
    case(
        "clip", "both sides", lambda x, **_: x.clamp(-0.5, 1), x=X, alpha=np.float32(-0.5), beta=np.float32(1)
    ),
    case("threshold", "values", lambda x, alpha: x.clamp(min=-0.5), x=X, alpha=np.float32(-0.5)),
    case("threshold", "whole numbers", lambda x, alpha: x.clamp(min=-3), x=Z, alpha=np.int32(-3)),
    case("cast", "a float to int32 drops the fraction", lambda x, dtype: x.int(), x=4 * X, dtype="int32"),
    case("cast", "to fp16", lambda x, dtype: x.half(), x=X / 3, dtype="fp16"),
    case("cast", "whole numbers to fp32", lambda x, dtype: x.float(), x=Z, dtype="fp32"),
    case("cast", "to bool", lambda x, dtype: x.bool(), x=Z, dtype="bool"),
    case("cast", "flags to int32", lambda x, dtype: x.int(), x=flags(5), dtype="int32"),
    case("cast", "to uint8", lambda x, dtype: x.to(torch.uint8), x=J, dtype="uint8"),
    case("cast", "to int8", lambda x, dtype: x.to(torch.int8), x=Z, dtype="int8"),
    case("cast", "to int16", lambda x, dtype: x.to(torch.int16), x=Z, dtype="int16"),
    case("cast", "to uint16", lambda x, dtype: x.to(torch.uint16), x=J, dtype="uint16"),
    case("select", "broadcasts", lambda cond, a, b: torch.where(cond, a, b), cond=flags(3, 1), a=X, b=ROW),
    case("select", "whole numbers", lambda cond, a, b: torch.where(cond, a, b), cond=flags(3, 4), a=Z, b=J),
    case(
        "select", "a scalar", lambda cond, a, b: torch.where(cond, a, 0.75), cond=flags(3, 4), a=X, b=SCALAR
    ),
    case("gelu", "exact by default", lambda x: F.gelu(x), x=2 * X),
    case("gelu", "exact", lambda x, mode: F.gelu(x), x=2 * X, mode="EXACT"),
    case("gelu", "tanh", lambda x, mode: F.gelu(x, approximate="tanh"), x=2 * X, mode="TANH_APPROXIMATION"),
    case("gelu", "sigmoid", lambda x, mode: x * torch.sigmoid(1.702 * x), x=X, mode="SIGMOID_APPROXIMATION"),
    case("elu", "values", lambda x, alpha: F.elu(x, 1.5), x=X, alpha=np.float32(1.5)),
    case("leaky_relu", "values", lambda x, alpha: F.leaky_relu(x, 0.25), x=X, alpha=np.float16(0.25)),
    case(
        "clamped_relu",
        "values",
        [-0.5, 0.5, 1.0],
        x=np.float32([-2, 0.5, 3]),
        alpha=np.float32(0.25),
        beta=1.0,
    ),
    case(
        "clamped_relu",
        "a negative beta",
        [-1.0, -1.0],
        x=np.float32([-8, 3]),
        alpha=np.float32(0.125),
        beta=-1.0,
    ),
    case("thresholded_relu", "values", [0.0, 1.0, 2.0], x=np.float32([0.5, 1, 2]), alpha=np.float32(1)),
    case(
        "linear_activation",
        "values",
        lambda x, **_: 0.5 * x + 2,
        x=X,
        alpha=np.float32(0.5),
        beta=np.float32(2),
    ),
    case(
        "scaled_tanh", "values", lambda x, **_: 0.5 * torch.tanh(2 * x), x=X, alpha=np.float32(0.5), beta=2.0
    ),
    case("sigmoid_hard", "values", lambda x, **_: (x * 0.5 + 0.25).clamp(0, 1), x=X, alpha=0.5, beta=0.25),
    case("prelu", "rank 4", lambda x, alpha: F.prelu(x, alpha), x=grid(2, 3, 4, 5), alpha=grid(3)),
    case("prelu", "rank 3", lambda x, alpha: F.prelu(x, alpha), x=grid(2, 3, 4), alpha=grid(3)),
    case(
        "softplus_parametric",
        "rank 4",
        lambda x, alpha, beta: alpha[:, None, None] * F.softplus(x * beta[:, None, None]),
        x=grid(2, 3, 4, 5),
        alpha=grid(3),
        beta=grid(3),
    ),
    case("softmax", "the last axis by default", lambda x: x.softmax(-1), x=X),
    case("softmax", "another axis", lambda x, axis: x.softmax(0), x=4 * X, axis=np.int32(0)),
    case("softmax", "a negative axis", lambda x, axis: x.softmax(1), x=grid(2, 3, 4), axis=-2),
    case("softmax", "large values do not overflow", [0.0, 1.0], x=np.float32([0, 60000])),
    case("softmax", "minus infinity gets nothing", [1.0, 0.0], x=np.float32([3, -np.inf])),
]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_it_computes_what_pytorch_does(one: Case) -> None:
    check(one)


def test_erf_is_off_by_less_than_a_step_of_float32_everywhere() -> None:
    values = np.linspace(-8, 8, 4001, dtype=np.float32)
    wanted = np.array([math.erf(value) for value in values])
    np.testing.assert_allclose(error_function(values), wanted, rtol=0, atol=6e-8)
    edges = np.float32([np.inf, -np.inf, np.nan, 0.0])
    np.testing.assert_array_equal(error_function(edges), np.float32([1, -1, np.nan, 0]))


def test_large_values_of_sigmoid_and_silu_have_their_limits() -> None:
    x = np.float32([-60000, 60000])
    np.testing.assert_array_equal(run("sigmoid", x=x), [0, 1])
    np.testing.assert_array_equal(run("silu", x=x), [0, 60000])
    np.testing.assert_array_equal(run("softplus", x=x), [0, 60000])


REFUSED = [
    ("real_div", {"x": np.int32([7]), "y": np.int32([2])}, r"'real_div' with x = .*whole numbers"),
    ("real_div", {"x": np.int32([7]), "y": np.int32([0])}, "divided by zero"),
    ("floor_div", {"x": np.int32([7]), "y": np.int32([0])}, "divided by zero"),
    ("mod", {"x": np.int32([7]), "y": np.int32([0])}, "divided by zero"),
    ("pow", {"x": np.int32([7]), "y": np.int32([-1])}, "'pow' with y = .*negative power"),
    ("clip", {"x": X, "alpha": np.float32(1), "beta": np.float32(0)}, "'clip' with alpha"),
    ("cast", {"x": X, "dtype": "string"}, "'cast' with dtype = 'string'.*known are"),
    ("cast", {"x": np.float32([np.nan]), "dtype": "int32"}, "int32 holds -2147483648 to 2147483647"),
    ("cast", {"x": np.int32([300]), "dtype": "uint8"}, "uint8 holds 0 to 255"),
    ("gelu", {"x": X, "mode": "FAST"}, "'gelu' with mode = 'FAST'.*known are EXACT"),
    ("prelu", {"x": grid(2, 3, 4), "alpha": grid(4)}, "one number a channel"),
    ("softmax", {"x": X, "axis": 2}, "'softmax' with axis = 2: the tensor has 2 axes"),
]


@pytest.mark.parametrize(("operation", "parameters", "message"), REFUSED)
def test_what_mil_leaves_undefined_is_refused_by_name(
    operation: str, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        run(operation, **parameters)
