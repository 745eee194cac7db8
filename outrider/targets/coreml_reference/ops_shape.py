"""Operations that only rearrange: most return a view of what they were given."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from outrider.targets.coreml_reference.ops_support import Array, axes_of, axis_of, refuse, whole_numbers
from outrider.targets.coreml_reference.registry import operation

__all__: list[str] = []


@operation("identity", rounds=False)
def identity(x: Any) -> Any:
    """x itself."""
    return x


@operation("reshape", rounds=False)
def reshape(x: Any, shape: Any) -> Array:
    """x in another shape. -1 takes what remains; 0 takes the size of x, counted from the last axis (1 beyond x).

    Up to iOS 16 a 0 wants equal ranks, for which both rules agree.
    """
    values, wanted = np.asarray(x), whole_numbers(shape)
    sizes = list(wanted)
    for back in range(1, len(sizes) + 1):
        if sizes[-back] == 0:
            sizes[-back] = values.shape[-back] if back <= values.ndim else 1
    if sizes.count(-1) > 1 or min(sizes, default=0) < -1:
        refuse("reshape", "shape", wanted, "one -1 at most, and nothing below it")
    known = math.prod(size for size in sizes if size != -1)
    fits = values.size % known == 0 if -1 in sizes and known else values.size == known
    if not fits:
        refuse("reshape", "shape", wanted, f"x is {values.shape}")
    return values.reshape(sizes)


@operation("reshape_like", rounds=False)
def reshape_like(x: Any, ref_tensors: Any, begins: Any, ends: Any, end_masks: Any) -> Array:
    """x in a shape put together from ranges of the shapes of other tensors."""
    sizes: list[int] = []
    for tensor, begin, end, to_end in zip(ref_tensors, begins, ends, end_masks, strict=True):
        sizes += np.shape(tensor)[int(begin) : None if to_end else int(end)]
    if math.prod(sizes) != np.size(x):
        refuse("reshape_like", "ref_tensors", sizes, f"x is {np.shape(x)}")
    return np.reshape(x, sizes)


@operation("transpose", rounds=False)
def transpose(x: Any, perm: Any) -> Array:
    """x with its axes in another order."""
    if np.ndim(x) == 0:
        return np.asarray(x)
    order = axes_of("transpose", perm, np.ndim(x))
    if len(order) != np.ndim(x):
        refuse("transpose", "perm", order, f"x is {np.shape(x)}")
    return np.transpose(x, order)


@operation("expand_dims", rounds=False)
def expand_dims(x: Any, axes: Any) -> Array:
    """x with axes of size 1 put in; they are counted in the result."""
    rank = np.ndim(x) + len(whole_numbers(axes))
    return np.expand_dims(x, axes_of("expand_dims", axes, rank))


@operation("squeeze", rounds=False)
def squeeze(x: Any, axes: Any = None) -> Array:
    """x without axes of size 1; a named axis of another size stays, as in PyTorch."""
    values = np.asarray(x)
    along = axes_of("squeeze", axes, values.ndim)
    return values.squeeze(tuple(axis for axis in along if values.shape[axis] == 1))


@operation("flatten2d", rounds=False)
def flatten2d(x: Any, axis: Any = 1) -> Array:
    """The axes before one as rows, the others as columns."""
    values, before = np.asarray(x), int(axis)
    if not -values.ndim <= before <= values.ndim:
        refuse("flatten2d", "axis", before, f"x is {values.shape}")
    return values.reshape(math.prod(values.shape[:before]), math.prod(values.shape[before:]))


@operation("concat", rounds=False)
def concat(values: Any, axis: Any, interleave: Any = False) -> Array:
    """Tensors behind one another along an axis (scalars become a vector), or their slices in turns."""
    tensors = [np.atleast_1d(value) for value in values]
    along = axis_of("concat", axis, tensors[0].ndim)
    shapes = [tensor.shape for tensor in tensors]
    others = {(*shape[:along], *shape[along + 1 :]) for shape in shapes}
    if len(others) > 1 or len({len(shape) for shape in shapes}) > 1 or (interleave and len(set(shapes)) > 1):
        refuse(
            "concat", "values", shapes, f"they do not fit along axis {along}" + " in turns" * bool(interleave)
        )
    if not interleave:
        return np.concatenate(tensors, axis=along)
    turns = np.stack(tensors, axis=along + 1)
    return turns.reshape(*shapes[0][:along], -1, *shapes[0][along + 1 :])


@operation("stack", rounds=False)
def stack(values: Any, axis: Any) -> Array:
    """Tensors of one shape along a new axis."""
    along = axis_of("stack", axis, np.ndim(values[0]) + 1)
    shapes = [np.shape(value) for value in values]
    if len(set(shapes)) > 1:
        refuse("stack", "values", shapes, "they must have one shape")
    return np.stack(values, axis=along)


@operation("split", rounds=False)
def split(x: Any, axis: Any, num_splits: Any = None, split_sizes: Any = None) -> tuple[Array, ...]:
    """x cut along an axis into parts of given sizes, or into equal ones."""
    along = axis_of("split", axis, x.ndim)
    total = x.shape[along]
    if split_sizes is None and num_splits is None:
        refuse("split", "num_splits", None, "it or split_sizes is wanted")
    if split_sizes is None and total % int(num_splits):
        refuse("split", "num_splits", int(num_splits), f"it does not divide {total}")
    sizes = (
        whole_numbers(split_sizes)
        if split_sizes is not None
        else [total // int(num_splits)] * int(num_splits)
    )
    if sum(sizes) != total or min(sizes) < 0 or num_splits not in (None, len(sizes)):
        refuse("split", "split_sizes", sizes, f"axis {along} has {total} values, num_splits is {num_splits}")
    ahead = (slice(None),) * along
    ends = itertools.accumulate(sizes)
    return tuple(x[(*ahead, slice(end - size, end))] for size, end in zip(sizes, ends, strict=True))


@operation("tile", rounds=False)
def tile(x: Any, reps: Any) -> Array:
    """x repeated along each axis. Counted at run time it may be 0 times: PyTorch's nan_to_num converts to that."""
    times = whole_numbers(reps)
    if len(times) != np.ndim(x) or min(times, default=0) < 0:
        refuse("tile", "reps", times, f"one number for each axis of x {np.shape(x)} is wanted, none negative")
    return np.tile(x, times)


NUMPY_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


@operation("pad", rounds=False)
def pad(x: Any, pad: Any, mode: str = "constant", constant_val: Any = 0.0) -> Array:
    """x with values before and after its last axes: a constant, the mirrored inside, or the edge again."""
    numbers = whole_numbers(pad)
    if len(numbers) % 2 or len(numbers) > 2 * x.ndim or min(numbers, default=0) < 0:
        refuse(
            "pad", "pad", numbers, f"two numbers from 0 for each of the last axes of x {x.shape} are wanted"
        )
    pairs = [(0, 0)] * (x.ndim - len(numbers) // 2) + list(zip(numbers[::2], numbers[1::2], strict=True))
    if mode == "constant":
        return np.pad(x, pairs, constant_values=constant_val)
    if mode not in NUMPY_MODES:
        refuse("pad", "mode", mode, f"known are {', '.join(NUMPY_MODES)}")
    spare = 1 if mode == "reflect" else 0
    if any(max(pair) > size - spare for pair, size in zip(pairs, x.shape, strict=True)):
        refuse("pad", "pad", numbers, f"mode {mode} has no more values to take from x {x.shape}")
    return np.pad(x, pairs, mode="reflect" if mode == "reflect" else "edge")


@operation("reverse", rounds=False)
def reverse(x: Any, axes: Any = None) -> Array:
    """x backwards along some axes, all by default."""
    return np.flip(x, axes_of("reverse", axes, np.ndim(x)))


@operation("reverse_sequence", rounds=False)
def reverse_sequence(x: Any, lengths: Any, seq_axis: Any = 0, batch_axis: Any = 0) -> Array:
    """A copy of x in which the first lengths[i] values along one axis are backwards, for each i of another."""
    sequence = axis_of("reverse_sequence", seq_axis, x.ndim)
    batch = axis_of("reverse_sequence", batch_axis, x.ndim)
    counts = whole_numbers(lengths)
    if (
        sequence == batch
        or len(counts) != x.shape[batch]
        or not 0 <= min(counts) <= max(counts) <= x.shape[sequence]
    ):
        refuse(
            "reverse_sequence",
            "lengths",
            counts,
            f"x is {x.shape}, sequences on axis {sequence}, batch {batch}",
        )
    result = x.copy()
    rows = np.moveaxis(result, (batch, sequence), (0, 1))
    for row, count in zip(rows, counts, strict=True):
        row[:count] = row[:count][::-1].copy()
    return np.asarray(result)


@operation("sliding_windows", rounds=False)
def sliding_windows(x: Any, axis: Any, size: Any, stride: Any = 1) -> Array:
    """Every window of `size` values along an axis, whose values become the axis after it."""
    along, span = axis_of("sliding_windows", axis, x.ndim), int(size)
    if not 1 <= span <= x.shape[along]:
        refuse("sliding_windows", "size", span, f"axis {along} of x has {x.shape[along]} values")
    every = np.lib.stride_tricks.sliding_window_view(x, span, axis=along)
    every = every[(*(slice(None),) * along, slice(None, None, int(stride)))]
    return np.moveaxis(every, -1, along + 1)
