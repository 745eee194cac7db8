"""Matrix products: the operations that take nearly all the time, so each is one BLAS call on views, without copies.

N outputs, K inputs, C channels, S spatial positions.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_activation import softmax
from outrider.targets.coreml_reference.ops_support import Array, refuse, wide
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []


@operation("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Array:
    """x [..., K] times the transpose of weight [N, K], plus bias [N] -> [..., N]."""
    values, matrix = wide(x), wide(weight)
    if values.shape[-1] != matrix.shape[-1]:
        refuse("linear", "weight", matrix.shape, f"x is {values.shape}: their last axes differ")
    rows = values.reshape(-1, values.shape[-1])  # one product instead of one a batch
    product = np.matmul(rows, matrix.T).reshape(*values.shape[:-1], len(matrix))
    if bias is not None:
        product += wide(bias)
    return np.asarray(product)


@operation("matmul")
def matmul(x: Any, y: Any, transpose_x: Any = False, transpose_y: Any = False) -> Array:
    """Matrix product of the last two axes with numpy's rules for vectors and batches; a vector is never transposed."""
    left, right = wide(x), wide(y)
    left = left.swapaxes(-1, -2) if transpose_x and left.ndim > 1 else left
    right = right.swapaxes(-1, -2) if transpose_y and right.ndim > 1 else right
    inner = right.shape[-2] if right.ndim > 1 else right.shape[0]
    if left.shape[-1] != inner:
        refuse("matmul", "y", right.shape, f"it does not follow on x of {left.shape}")
    return np.asarray(np.matmul(left, right))


EQUATIONS = {"abcd,adce->abce": 4, "abc,cbd->abd": 3}  # in letters of their first appearance


@operation("einsum")
def einsum(values: Any, equation: str) -> Array:
    """[B, C, H, W] with [B, W, H, U] -> [B, C, H, U], or the same without B; B and H broadcast.

    MIL defines no other equation; coremltools lowers the others to transposes and matmul.
    """
    rank, ranks = EQUATIONS.get(_canonical(equation)), [value.ndim for value in values]
    if ranks != [rank, rank]:
        refuse(
            "einsum", "equation", equation, f"MIL has nchw,nwhu->nchu and chw,whr->chr; the ranks are {ranks}"
        )
    left, right = (wide(value).swapaxes(-3, -2) for value in values)  # [B, H, C, W], [B, H, W, U]
    if left.shape[-1] != right.shape[-2]:
        refuse("einsum", "values", [value.shape for value in values], "the axis they share has two sizes")
    return np.asarray(np.matmul(left, right).swapaxes(-3, -2))


@cache
def _canonical(equation: str) -> str:
    """The equation with its letters renamed in order of appearance."""
    names: dict[str, str] = {}
    letters = equation.replace(" ", "")
    return "".join(
        names.setdefault(letter, chr(ord("a") + len(names))) if letter.isalpha() else letter
        for letter in letters
    )


@operation("scaled_dot_product_attention")
def scaled_dot_product_attention(query: Any, key: Any, value: Any, attn_mask: Any = None) -> Array:
    """softmax(query [..., L, E] key [..., S, E]^T / sqrt(E) + mask [..., L, S]) value [..., S, EV] -> [..., L, EV].

    A mask of bool says where to look. The leading axes must be equal: MIL does not broadcast grouped heads.
    """
    batches = [one.shape[:-2] for one in (query, key, value)]
    if len(set(batches)) > 1:
        refuse(
            "scaled_dot_product_attention", "key", key.shape, f"the leading axes of the three are {batches}"
        )
    scaled = wide(query) * np.float32(1 / math.sqrt(query.shape[-1]))
    scores: Array = np.matmul(scaled, wide(key).swapaxes(-1, -2))  # [..., L, S]
    if attn_mask is not None:
        added = wide(np.asarray(attn_mask))
        scores = np.where(added, scores, -np.inf) if added.dtype == np.bool_ else scores + added
    return np.asarray(np.matmul(softmax(scores), wide(value)))
