"""Operations of the Core ML evaluator that rearrange, cut, fill and index, against PyTorch or values made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.errors import BackendError
from tests.mil_cases import Case, case, check, flags, grid, run, whole

X, IMAGE, Z, FLAGS = grid(2, 3, 4), grid(2, 4, 4, 6), whole(2, 3, 4), flags(2, 3, 4)
ONES = grid(1, 3, 1, 4)
INTS = np.int32
BOOLS = np.bool_

CASES = [
    case("identity", "whole numbers", Z, x=Z),
    case("shape", "three axes", INTS([2, 3, 4]), x=X),
    case("shape", "a scalar", np.zeros(0, INTS), x=np.float32(3)),
    case("reshape", "known sizes", lambda x, shape: x.reshape(4, 6), x=X, shape=INTS([4, 6])),
    case("reshape", "one -1", lambda x, shape: x.reshape(3, 8), x=X, shape=INTS([3, -1])),
    case(
        "reshape",
        "a 0 keeps its size",
        lambda x, shape: x.reshape(2, 3, 4, 1).flatten(2),
        x=X,
        shape=INTS([0, 0, -1]),
    ),
    case(
        "reshape",
        "zeros count from the last axis",
        np.arange(100.0).reshape(1, 1, 2, 50),
        x=np.arange(100, dtype=np.float32).reshape(2, 50),
        shape=INTS([1, 0, -1, 0]),
    ),
    case("reshape", "flags to a scalar", np.bool_(True), x=BOOLS([[True]]), shape=np.zeros(0, INTS)),
    case(
        "reshape_like",
        "two references",
        lambda x, **_: x.reshape(2, 3, 5, 6),
        x=grid(6, 30),
        ref_tensors=[grid(2, 3, 4), grid(1, 5, 6)],
        begins=[INTS(0), INTS(1)],
        ends=[INTS(2), INTS(0)],
        end_masks=[False, True],
    ),
    case("transpose", "a permutation", lambda x, perm: x.permute(2, 0, 1), x=X, perm=INTS([2, 0, 1])),
    case("transpose", "negative axes", lambda x, perm: x.permute(0, 2, 1), x=Z, perm=INTS([0, -1, -2])),
    case(
        "expand_dims",
        "two axes of the result",
        lambda x, axes: x[:, None, :, :, None],
        x=X,
        axes=INTS([1, -1]),
    ),
    case("expand_dims", "a scalar", [2.0], x=np.float32(2), axes=INTS([0])),
    case("squeeze", "all by default", lambda x: x.squeeze(), x=ONES),
    case(
        "squeeze",
        "named axes; one that is not 1 stays",
        lambda x, axes: x.squeeze(-2),
        x=ONES,
        axes=INTS([-2, 1]),
    ),
    case("flatten2d", "the first axis by default", lambda x: x.flatten(1), x=X),
    case("flatten2d", "a negative axis", lambda x, axis: x.reshape(6, 4), x=X, axis=-1),
    case(
        "concat",
        "an axis",
        lambda values, axis: torch.cat(values, 1),
        values=[X, grid(2, 1, 4)],
        axis=INTS(1),
    ),
    case("concat", "scalars", INTS([3, 4]), values=[INTS(3), INTS(4)], axis=0),
    case(
        "concat",
        "a vector and scalars",
        INTS([1, 2, 3]),
        values=[INTS([1, 2]), INTS([3])],
        axis=-1,
        interleave=False,
    ),
    case(
        "concat",
        "in turns",
        INTS([[1, 2], [7, 8], [3, 4], [9, 10]]),
        values=[INTS([[1, 2], [3, 4]]), INTS([[7, 8], [9, 10]])],
        axis=0,
        interleave=True,
    ),
    case("concat", "flags", lambda values, axis: torch.cat(values, 2), values=[FLAGS, FLAGS], axis=-1),
    case(
        "stack",
        "the last axis",
        lambda values, axis: torch.stack(values, -1),
        values=[X, X[::-1].copy()],
        axis=-1,
    ),
    case("stack", "scalars", INTS([3, 4]), values=[INTS(3), INTS(4)], axis=0),
    case("split", "equal parts", lambda x, axis, num_splits: x.chunk(2, 2), x=X, axis=2, num_splits=INTS(2)),
    case(
        "split",
        "given sizes",
        lambda x, axis, split_sizes: x.split([1, 2], 1),
        x=X,
        axis=-2,
        split_sizes=INTS([1, 2]),
    ),
    case(
        "split",
        "both given",
        lambda x, axis, **_: x.split([3, 1], 2),
        x=Z,
        axis=2,
        split_sizes=INTS([3, 1]),
        num_splits=2,
    ),
    case("tile", "each axis", lambda x, reps: x.repeat(2, 1, 3), x=X, reps=INTS([2, 1, 3])),
    case(
        "concat",
        "in turns along a later axis",
        lambda values, **_: torch.stack(values, 2).flatten(1, 2),
        values=[X, X[::-1].copy(), 2 * X],
        axis=1,
        interleave=True,
    ),
    case(
        "reverse_sequence",
        "batches on the first axis by default",
        [[2, 1], [3, 4]],
        x=INTS([[1, 2], [3, 4]]),
        lengths=INTS([2, 1]),
        seq_axis=1,
    ),
    case("pad", "every axis", lambda x, pad: F.pad(x, [0, 2, 1, 0, 0, 1]), x=X, pad=INTS([0, 1, 1, 0, 0, 2])),
    case(
        "slice_by_index",
        "a squeezed axis with its begin left out",
        lambda x, **_: x[0, :2, :],
        x=X,
        begin=INTS([1, 0, 0]),
        end=INTS([2, 2, 4]),
        begin_mask=BOOLS([1, 0, 0]),
        squeeze_mask=BOOLS([1, 0, 0]),
    ),
    case("tile", "no times", np.zeros((2, 0, 4), np.float32), x=X, reps=INTS([1, 0, 1])),
    case("pad", "zeros on the last axes", lambda x, pad: F.pad(x, [2, 0, 0, 1]), x=X, pad=INTS([0, 1, 2, 0])),
    case(
        "pad",
        "a constant",
        lambda x, **_: F.pad(x, [1, 1], value=0.5),
        x=X,
        pad=INTS([1, 1]),
        mode="constant",
        constant_val=np.float16(0.5),
    ),
    case(
        "pad",
        "reflect",
        lambda x, **_: F.pad(x, [2, 3], "reflect"),
        x=X,
        pad=INTS([0, 0, 2, 3]),
        mode="reflect",
    ),
    case(
        "pad",
        "replicate",
        lambda x, **_: F.pad(x, [2, 4], "replicate"),
        x=X,
        pad=INTS([2, 4]),
        mode="replicate",
    ),
    case("reverse", "all axes by default", lambda x: x.flip(0, 1, 2), x=X),
    case("reverse", "two axes", lambda x, axes: x.flip(0, 2), x=Z, axes=INTS([0, -1])),
    case(
        "reverse_sequence",
        "lengths",
        [[2, 1, 3], [6, 5, 4], [7, 8, 9]],
        x=INTS([[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        lengths=INTS([2, 3, 0]),
        seq_axis=1,
        batch_axis=0,
    ),
    case(
        "reverse_sequence",
        "a sequence axis before",
        [[2, 4], [1, 3]],
        x=INTS([[1, 3], [2, 4]]),
        lengths=INTS([2, 2]),
        batch_axis=-1,
    ),
    case("sliding_windows", "stride 1", lambda x, **_: x.unfold(1, 2, 1).movedim(-1, 2), x=X, axis=1, size=2),
    case(
        "sliding_windows",
        "a stride and a negative axis",
        lambda x, **_: x.unfold(2, 2, 2),
        x=Z,
        axis=-1,
        size=INTS(2),
        stride=INTS(2),
    ),
    case(
        "slice_by_index",
        "begin and end",
        lambda x, **_: x[0:1, 1:3, -3:4],
        x=X,
        begin=INTS([0, 1, -3]),
        end=INTS([1, 3, 4]),
    ),
    case(
        "slice_by_index",
        "strides, one negative",
        X[::2, 2:0:-1, 1:4:2],
        x=X,
        begin=INTS([0, 2, 1]),
        end=INTS([2, 0, 4]),
        stride=INTS([2, -1, 2]),
    ),
    case(
        "slice_by_index",
        "masks",
        lambda x, **_: x[:1, 1:, 2],
        x=X,
        begin=INTS([9, 1, 2]),
        end=INTS([1, 0, 0]),
        begin_mask=BOOLS([1, 0, 0]),
        end_mask=BOOLS([0, 1, 0]),
        squeeze_mask=BOOLS([0, 0, 1]),
    ),
    case(
        "slice_by_index",
        "everything squeezed",
        lambda x, **_: x[1, -1, 0],
        x=Z,
        begin=INTS([1, -1, 0]),
        end=INTS([0, 0, 0]),
        squeeze_mask=BOOLS([1, 1, 1]),
    ),
    case(
        "slice_by_index",
        "backwards over a whole axis",
        X[:, :, ::-1],
        x=X,
        begin=INTS([0, 0, 0]),
        end=INTS([2, 3, 0]),
        stride=INTS([1, 1, -1]),
        begin_mask=BOOLS([0, 0, 1]),
        end_mask=BOOLS([0, 0, 1]),
    ),
    case(
        "slice_by_size",
        "sizes, one -1",
        lambda x, **_: x[1:2, 0:2, 1:],
        x=X,
        begin=INTS([1, 0, -3]),
        size=INTS([1, 2, -1]),
    ),
    case("fill", "zero by default", np.zeros((2, 3), np.float32), shape=INTS([2, 3])),
    case("fill", "a whole number", np.full((2, 3), 7, INTS), shape=INTS([2, 3]), value=INTS(7)),
    case("fill", "a flag", np.ones(3, BOOLS), shape=INTS([3]), value=True),
    case("fill_like", "zero by default", np.zeros((2, 3, 4), np.float32), ref_tensor=Z),
    case("fill_like", "a value", np.full((2, 3, 4), 1.5, np.float32), ref_tensor=Z, value=np.float32(1.5)),
    case("range_1d", "whole numbers", INTS([2, 5, 8]), end=INTS(9), start=INTS(2), step=INTS(3)),
    case("range_1d", "backwards", INTS([3, 2, 1]), end=INTS(0), start=INTS(3), step=INTS(-1)),
    case(
        "range_1d",
        "floats",
        np.float32([0.5, 1.25]),
        end=np.float32(1.5),
        start=np.float32(0.5),
        step=np.float32(0.75),
    ),
    case("range_1d", "a length of a shape", INTS([0, 1, 2]), end=np.array(3, INTS), start=0, step=1),
    case(
        "one_hot",
        "the last axis by default",
        lambda indices, **_: F.one_hot(indices.long(), 4).int(),
        indices=INTS([[0, 3], [1, 1]]),
        one_hot_vector_size=INTS(4),
    ),
    case(
        "one_hot",
        "values and an axis",
        lambda indices, **_: (1.5 * F.one_hot(indices.long(), 3) - 1).movedim(-1, 0),
        indices=INTS([0, 2]),
        one_hot_vector_size=INTS(3),
        axis=0,
        on_value=np.float32(0.5),
        off_value=np.float32(-1),
    ),
    case(
        "one_hot",
        "the axis of the middle",
        lambda indices, **_: F.one_hot(indices.long(), 3).int().movedim(-1, 1),
        indices=INTS([[0, 2], [1, 0]]),
        one_hot_vector_size=3,
        axis=-2,
    ),
    case("non_zero", "flags", lambda x: x.nonzero().int(), x=FLAGS),
    case("non_zero", "floats", INTS([[1], [2]]), x=np.float32([0, 2, -1])),
    case("band_part", "all by default", lambda x: x, x=X),
    case("band_part", "the lower triangle", lambda x, **_: x.tril(), x=X, lower=-1, upper=0),
    case("band_part", "the upper triangle", lambda x, **_: x.triu(), x=Z, lower=INTS(0), upper=INTS(-1)),
    case("band_part", "a band", lambda x, **_: x.tril(2).triu(-1), x=X, lower=1, upper=2),
    case("band_part", "flags", lambda x, **_: x.tril(), x=FLAGS, upper=0),
]

SLICE = {"begin": INTS([1, 0, 1]), "end": INTS([2, 3, 4])}


def written(x: torch.Tensor, index: tuple[object, ...], update: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result[index] = update
    return result


CASES += [
    case(
        "slice_update",
        "begin and end",
        lambda x, update, **_: written(x, (slice(1, 2), slice(0, 3), slice(1, 4)), update),
        x=X,
        update=grid(1, 3, 3),
        **SLICE,
    ),
    case(
        "slice_update",
        "masks and a stride",
        lambda x, update, **_: written(x, (slice(None), slice(0, 3, 2), slice(2, None)), update),
        x=X,
        update=grid(2, 2, 2),
        begin=INTS([5, 0, 2]),
        end=INTS([5, 3, 0]),
        stride=INTS([1, 2, 1]),
        begin_mask=BOOLS([1, 0, 0]),
        end_mask=BOOLS([1, 0, 1]),
    ),
    case(
        "slice_update",
        "a squeezed axis",
        lambda x, update, **_: written(x, (slice(None), -1, slice(None)), update),
        x=Z,
        update=whole(2, 4),
        begin=INTS([0, -1, 0]),
        end=INTS([2, 0, 4]),
        squeeze_mask=BOOLS([0, 1, 0]),
    ),
]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_it_gives_the_same_values_in_the_same_places(one: Case) -> None:
    check(one)


def test_a_slice_update_leaves_what_it_was_given_alone() -> None:
    before = X.copy()
    run("slice_update", x=X, update=np.zeros((1, 3, 3), np.float32), **SLICE)
    np.testing.assert_array_equal(X, before)


REFUSED = [
    ("reshape", {"x": X, "shape": INTS([5, 5])}, r"'reshape' with shape = \[5, 5\]: x is \(2, 3, 4\)"),
    ("reshape", {"x": X, "shape": INTS([2, 3])}, "'reshape' with shape"),
    ("reshape", {"x": X, "shape": INTS([-2, -12])}, "one -1 at most"),
    ("reshape", {"x": X, "shape": INTS([-1, -1])}, "one -1 at most"),
    ("reshape", {"x": X, "shape": INTS([7, -1])}, r"x is \(2, 3, 4\)"),
    (
        "reshape_like",
        {"x": X, "ref_tensors": [X], "begins": [0], "ends": [2], "end_masks": [False]},
        "ref_tensors",
    ),
    ("transpose", {"x": X, "perm": INTS([0, 1])}, "'transpose' with perm"),
    ("transpose", {"x": X, "perm": INTS([0, 1, 1])}, "an axis is named twice"),
    ("flatten2d", {"x": X, "axis": 4}, "'flatten2d' with axis = 4"),
    ("concat", {"values": [X, grid(2, 3, 5)], "axis": 1}, "'concat' with values"),
    ("concat", {"values": [X, grid(2, 1, 4)], "axis": 1, "interleave": True}, "in turns"),
    ("stack", {"values": [X, grid(2, 3, 5)], "axis": 0}, "they must have one shape"),
    ("split", {"x": X, "axis": 1, "num_splits": 2}, "'split' with num_splits = 2: it does not divide 3"),
    ("split", {"x": X, "axis": 1, "split_sizes": INTS([1, 1])}, "axis 1 has 3 values"),
    ("split", {"x": X, "axis": 1}, "num_splits = None"),
    ("tile", {"x": X, "reps": INTS([1, 2])}, "'tile' with reps"),
    ("tile", {"x": X, "reps": INTS([1, -1, 1])}, "none negative"),
    ("pad", {"x": X, "pad": INTS([1, 1]), "mode": "circular"}, "mode = 'circular'"),
    ("pad", {"x": X, "pad": INTS([4, 0]), "mode": "reflect"}, "no more values"),
    ("pad", {"x": X, "pad": INTS([-1, 0])}, "'pad' with pad"),
    ("reverse_sequence", {"x": X, "lengths": INTS([5, 0]), "seq_axis": 1}, "'reverse_sequence' with lengths"),
    ("sliding_windows", {"x": X, "axis": 1, "size": 4}, "axis 1 of x has 3 values"),
    ("slice_by_index", {"x": X, "begin": INTS([0, 0]), "end": INTS([1, 1])}, "'slice_by_index' with begin"),
    (
        "slice_by_index",
        {"x": X, "begin": INTS([2, 0, 0]), "end": INTS([1, 1, 1]), "squeeze_mask": BOOLS([1, 0, 0])},
        "begin = 2: the axis has 2",
    ),
    (
        "slice_by_size",
        {"x": X, "begin": INTS([0, 2, 0]), "size": INTS([1, 2, 1])},
        "'slice_by_size' with size",
    ),
    ("slice_update", {"x": X, "update": grid(1, 3, 2), **SLICE}, r"'slice_update' with update = \(1, 3, 2\)"),
    ("range_1d", {"end": 3, "start": 0, "step": 0}, "'range_1d' with step"),
    ("one_hot", {"indices": INTS([4]), "one_hot_vector_size": 4}, "'one_hot' with indices = 4"),
    ("one_hot", {"indices": INTS([-1]), "one_hot_vector_size": 4}, "'one_hot' with indices = -1"),
]


@pytest.mark.parametrize(("operation", "parameters", "message"), REFUSED)
def test_what_mil_leaves_undefined_is_refused_by_name(
    operation: str, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        run(operation, **parameters)
