"""Matrix products, convolutions, pools and normalizations of the Core ML evaluator against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.errors import BackendError
from tests.mil_cases import Case, case, check, flags, grid, run, whole

W, B = grid(5, 4), grid(5)
IMAGE, SIGNAL, VOLUME = grid(2, 4, 9, 8), grid(2, 4, 11), grid(1, 2, 5, 6, 4)
Q, K, V = grid(1, 2, 3, 4), grid(1, 2, 7, 4), grid(1, 2, 7, 5)
INTS = np.int32


CASES = [
    case("linear", "a row", lambda x, weight: F.linear(x, weight), x=grid(1, 4), weight=W),
    case("linear", "rank 3 with a bias", F.linear, x=grid(2, 3, 4), weight=W, bias=B),
    case("linear", "a vector", lambda x, weight: F.linear(x, weight), x=grid(4), weight=W),
    case("linear", "whole numbers", lambda x, weight: x @ weight.T, x=whole(2, 4), weight=whole(5, 4)),
    case(
        "linear",
        "sums beyond half precision stay",
        np.float32([[4e6]]),
        x=np.full((1, 4), 1000, np.float32),
        weight=np.full((1, 4), 1000, np.float32),
    ),
    case("matmul", "matrices", lambda x, y: x @ y, x=grid(3, 4), y=grid(4, 5)),
    case("matmul", "batches broadcast", lambda x, y: x @ y, x=grid(2, 1, 3, 4), y=grid(5, 4, 2)),
    case(
        "matmul",
        "y transposed",
        lambda x, y, transpose_y: x @ y.mT,
        x=grid(2, 3, 4),
        y=grid(2, 5, 4),
        transpose_y=True,
    ),
    case(
        "matmul",
        "x transposed",
        lambda x, y, transpose_x: x.mT @ y,
        x=grid(2, 4, 3),
        y=grid(4, 5),
        transpose_x=np.bool_(True),
    ),
    case(
        "matmul",
        "neither",
        lambda x, y, **_: x @ y,
        x=grid(3, 4),
        y=grid(4, 5),
        transpose_x=False,
        transpose_y=False,
    ),
    case("matmul", "two vectors", lambda x, y: x @ y, x=grid(4), y=grid(4)),
    case("matmul", "a vector first", lambda x, y: x @ y, x=grid(4), y=grid(2, 4, 3)),
    case(
        "matmul",
        "a vector last, not transposed",
        lambda x, y, transpose_y: x @ y,
        x=grid(2, 3, 4),
        y=grid(4),
        transpose_y=True,
    ),
    case("matmul", "whole numbers", lambda x, y: x @ y, x=whole(3, 4), y=whole(4, 5)),
    case(
        "einsum",
        "rank 4",
        lambda values, equation: torch.einsum("bchw,bwhu->bchu", *values),
        values=[grid(2, 3, 4, 5), grid(2, 5, 4, 6)],
        equation="nchw,nwhu->nchu",
    ),
    case(
        "einsum",
        "other letters and spaces",
        lambda values, equation: torch.einsum("bchw,bwhu->bchu", *values),
        values=[grid(2, 3, 4, 5), grid(2, 5, 4, 6)],
        equation="a b c d, a d c e -> a b c e",
    ),
    case(
        "einsum",
        "B and H broadcast",
        lambda values, equation: torch.einsum(
            "bchw,bwhu->bchu", values[0].expand(2, 3, 4, 5), values[1].expand(2, 5, 4, 6)
        ),
        values=[grid(1, 3, 4, 5), grid(2, 5, 1, 6)],
        equation="nchw,nwhu->nchu",
    ),
    case(
        "einsum",
        "rank 3",
        lambda values, equation: torch.einsum("chw,whr->chr", *values),
        values=[grid(3, 4, 5), grid(5, 4, 6)],
        equation="chw,whr->chr",
    ),
    case("scaled_dot_product_attention", "no mask", F.scaled_dot_product_attention, query=Q, key=K, value=V),
    case(
        "scaled_dot_product_attention",
        "an additive mask",
        F.scaled_dot_product_attention,
        query=Q,
        key=K,
        value=V,
        attn_mask=grid(1, 1, 3, 7),
    ),
    case(
        "scaled_dot_product_attention",
        "a mask of flags",
        F.scaled_dot_product_attention,
        query=Q,
        key=K,
        value=V,
        attn_mask=flags(3, 7) | (np.arange(7) < 1),
    ),
    case(
        "scaled_dot_product_attention",
        "rank 3",
        F.scaled_dot_product_attention,
        query=Q[0],
        key=K[0],
        value=V[0],
    ),
    case(
        "scaled_dot_product_attention",
        "one mask row",
        lambda query, key, value, attn_mask: F.scaled_dot_product_attention(
            query, key, value, attn_mask[None]
        ),
        query=Q,
        key=K,
        value=V,
        attn_mask=grid(7),
    ),
    case("layer_norm", "the last axis", lambda x, axes: F.layer_norm(x, (8,)), x=IMAGE, axes=INTS([-1])),
    case(
        "layer_norm",
        "two axes, gamma, beta and epsilon",
        lambda x, axes, gamma, beta, epsilon: F.layer_norm(x, (9, 8), gamma, beta, 0.25),
        x=IMAGE,
        axes=INTS([2, 3]),
        gamma=grid(9, 8),
        beta=grid(9, 8),
        epsilon=np.float16(0.25),
    ),
    case("layer_norm", "all axes by default", lambda x: F.layer_norm(x, (2, 3)), x=grid(2, 3)),
    case(
        "layer_norm",
        "an axis of the middle",
        lambda x, axes, gamma: F.layer_norm(x.movedim(1, 3), (4,), gamma).movedim(3, 1),
        x=IMAGE,
        axes=INTS([1]),
        gamma=grid(4),
    ),
    case(
        "layer_norm",
        "large values do not overflow",
        lambda x, axes: F.layer_norm(x, (8,)),
        x=IMAGE * 8192,
        axes=INTS([-1]),
    ),
    case(
        "batch_norm",
        "plain",
        lambda x, mean, variance: F.batch_norm(x, mean, variance),
        x=IMAGE,
        mean=grid(4),
        variance=grid(4, low=0.25),
    ),
    case(
        "batch_norm",
        "gamma, beta, epsilon, one axis",
        lambda x, mean, variance, gamma, beta, epsilon: F.batch_norm(x, mean, variance, gamma, beta, eps=0.5),
        x=SIGNAL,
        mean=grid(4),
        variance=grid(4, low=0.25),
        gamma=grid(4),
        beta=grid(4),
        epsilon=0.5,
    ),
    case("instance_norm", "plain", lambda x: F.instance_norm(x), x=IMAGE),
    case(
        "instance_norm",
        "gamma, beta and epsilon",
        lambda x, gamma, beta, epsilon: F.instance_norm(x, weight=gamma, bias=beta, eps=0.5),
        x=SIGNAL,
        gamma=grid(4),
        beta=grid(4),
        epsilon=np.float32(0.5),
    ),
    case(
        "l2_norm",
        "the last three axes",
        lambda x: x / (x.square().sum((1, 2, 3), True) + 1e-6).sqrt(),
        x=IMAGE,
    ),
    case(
        "l2_norm",
        "rank 3 and an epsilon",
        lambda x, epsilon: x / (x.square().sum() + 2).sqrt(),
        x=grid(2, 3, 4),
        epsilon=np.float32(2),
    ),
    case(
        "local_response_norm",
        "defaults",
        lambda x, size: F.local_response_norm(x, 3),
        x=grid(2, 6, 3, 3),
        size=INTS(3),
    ),
    case(
        "local_response_norm",
        "an even size, all parameters",
        lambda x, **_: F.local_response_norm(x, 4, 0.5, 0.5, 2),
        x=grid(2, 6, 5),
        size=4,
        alpha=np.float32(0.5),
        beta=np.float32(0.5),
        k=np.float32(2),
    ),
]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_it_computes_what_pytorch_does(one: Case) -> None:
    check(one)


def test_a_pointwise_convolution_and_a_linear_do_not_copy_their_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda left, right: given.append((left, right)) or matmul(left, right))
    weight, x = grid(5, 4), grid(1, 4)
    run("linear", x=x, weight=weight)
    run("conv", x=x.reshape(1, 4, 1, 1), weight=weight.reshape(5, 4, 1, 1))
    assert np.shares_memory(given[0][1], weight)
    assert np.shares_memory(given[1][0], weight)


REFUSED = [
    ("linear", {"x": grid(2, 3), "weight": W}, "'linear' with weight"),
    ("matmul", {"x": grid(2, 3), "y": grid(2, 3)}, "'matmul' with y"),
    (
        "einsum",
        {"values": [grid(2, 3), grid(3, 4)], "equation": "ab,bc->ac"},
        "'einsum' with equation = 'ab,bc->ac'",
    ),
    ("einsum", {"values": [grid(2, 3, 4, 5), grid(2, 4, 4, 6)], "equation": "nchw,nwhu->nchu"}, "two sizes"),
    ("scaled_dot_product_attention", {"query": Q, "key": K[:, :1], "value": V[:, :1]}, "leading axes"),
    ("layer_norm", {"x": IMAGE, "axes": INTS([3]), "gamma": grid(9)}, "'layer_norm' with gamma"),
    ("batch_norm", {"x": IMAGE, "mean": grid(3), "variance": grid(4)}, "'batch_norm' with mean"),
    ("l2_norm", {"x": grid(2, 3)}, "'l2_norm' with x"),
]


@pytest.mark.parametrize(("operation", "parameters", "message"), REFUSED)
def test_what_mil_leaves_undefined_is_refused_by_name(
    operation: str, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        run(operation, **parameters)
