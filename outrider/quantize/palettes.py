"""Palettes: a few rows of a weight share a table of 2^bits values, and every weight is an index into it.

One-dimensional k-means over sorted values, in which the error of a cluster follows from cumulative sums at its two
edges. Lloyd's iterations (Lloyd 1982) lead to a local optimum, so the edges are then moved all at once, by dynamic
programming over a few places for each (all places would be the exact method, Wang & Song 2011). Many palettes are
fitted together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.quantize.channels import ordered_inverse
from outrider.quantize.layout import over_chunks

__all__ = ["Palettes", "compensate_palettes", "fit_palettes", "look_up"]

FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
CELLS = 8  # of equally many values, per entry of a table, that the first tables are spread over
LLOYD_STEPS = 12
OVERSHOOT = 1.8  # of Lloyd's steps, which are far too short where many clusters have to move the same way
PASSES = 12
SHARES = np.array([1.0, 0.5, 0.25, 0.1])  # places for an edge: parts of the way to its neighbours,
STEPS = np.array([-4, -1, 0, 1, 4])  # and a few values to the left and right
COLUMNS = 64  # whose errors are passed on to the rest in one product


class Palettes(NamedTuple):
    """value[n, k] = tables[n // group, indices[n, k]]"""

    indices: NDArray[np.uint8]  # [N, K]
    tables: NDArray[np.float16]  # [N / group, 2^bits], ascending


def look_up(palettes: Palettes) -> FloatArray:
    """The float32 values [N, K]."""
    N, K = palettes.indices.shape
    groups, size = palettes.tables.shape
    flat = palettes.indices.reshape(groups, -1).astype(np.int32)
    flat += np.arange(0, groups * size, size, dtype=np.int32)[:, None]
    values: FloatArray = palettes.tables.reshape(-1).astype(np.float32)[flat].reshape(N, K)
    return values


def fit_palettes(
    weight: FloatArray,  # [N, K]
    bits: int,
    group: int,
    importance: FloatArray | None = None,  # [K], mean squares of the inputs
) -> Palettes:
    """A table for every `group` rows that makes the (weighed) squared error small.

    Raises ExportError when the groups do not divide N.
    """
    N, K = weight.shape
    if N % group:
        raise ExportError(
            f"palettes of {group} rows do not divide the {N} rows of a weight; choose a divisor"
        )
    values = np.ascontiguousarray(weight, np.float32).reshape(N // group, group * K)
    weights = None if importance is None else np.maximum(importance, importance.mean() * np.float32(1e-6))

    def run(rows: slice) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
        return _fit(values[rows], 1 << bits, weights)

    parts = over_chunks(run, values.shape)
    indices, tables = (np.concatenate([part[field] for part in parts]) for field in (0, 1))
    return Palettes(indices.reshape(N, K), tables)


class _Sorted(NamedTuple):
    """Values of a few palettes in order, on one common scale so that one search serves all."""

    values: FloatArray  # [G, n] ascending
    keys: DoubleArray  # [G * n] ascending over all palettes
    shift: DoubleArray  # [G, 1]: key = shift + value * factor
    factor: DoubleArray  # [G, 1]
    mass: DoubleArray  # [G * (n + 1)] cumulative weights, 0 first
    moment: DoubleArray  # the same of weight * value
    square: DoubleArray  # the same of weight * value²

    def ranks(self, edges: DoubleArray) -> NDArray[np.int64]:
        """How many values of each palette lie below its edges [G, e]."""
        G, n = self.values.shape
        found = np.searchsorted(self.keys, (edges * self.factor + self.shift).reshape(-1)).reshape(G, -1)
        ranks: NDArray[np.int64] = np.clip(found - np.arange(0, G * n, n)[:, None], 0, n)
        return ranks

    def sums(self, ranks: NDArray[np.int64]) -> tuple[DoubleArray, DoubleArray, DoubleArray]:
        """Weight, first and second moment below each rank [G, e]."""
        G, n = self.values.shape
        places = ranks + np.arange(0, G * (n + 1), n + 1)[:, None]
        return self.mass[places], self.moment[places], self.square[places]


def _sort(values: FloatArray, order: NDArray[np.intp], importance: FloatArray | None) -> _Sorted:
    ordered = np.take_along_axis(values, order, axis=1)
    G, n = ordered.shape
    if importance is None:
        weights = np.ones((G, n))
    else:
        weights = importance.astype(np.float64)[order % len(importance)]

    def total(parts: DoubleArray) -> DoubleArray:
        sums = np.zeros((G, n + 1))
        np.cumsum(parts, axis=1, out=sums[:, 1:])
        return sums.reshape(-1)

    wide = ordered.astype(np.float64)
    factor: DoubleArray = 1.0 / np.maximum(np.abs(wide[:, [0, -1]]).max(axis=1, keepdims=True), 1e-30)
    shift = 4.0 * np.arange(G, dtype=np.float64)[:, None]
    keys = (wide * factor + shift).reshape(-1)
    first = weights * wide
    return _Sorted(ordered, keys, shift, factor, total(weights), total(first), total(first * wide))


def _fit(
    values: FloatArray, size: int, importance: FloatArray | None
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    order = np.argsort(values, axis=1)
    found = _sort(values, order, importance)
    centres = _lloyd(found, _spread_out(found, size), LLOYD_STEPS)
    ranks = found.ranks(_edges(centres))
    for _ in range(PASSES):
        before, ranks = ranks, _moved(found, ranks)
        if np.array_equal(before, ranks):
            break
    tables = np.sort(_means(_between(found, ranks), centres).astype(np.float16), axis=1)
    ranks = found.ranks(_edges(tables.astype(np.float64)))
    G, n = values.shape
    steps = np.zeros((G, n + 1), np.uint8)
    np.add.at(steps, (np.arange(G)[:, None], ranks), 1)
    indices = np.empty((G, n), np.uint8)
    np.put_along_axis(indices, order, np.cumsum(steps[:, :-1], axis=1, dtype=np.uint8), axis=1)
    return indices, tables


def _spread_out(found: _Sorted, size: int) -> DoubleArray:
    """First tables [G, size]: as dense as the cube root of the values, best for many entries (Panter & Dite 1951)."""
    G, n = found.values.shape
    ranks = np.unique(np.linspace(0, n - 1, CELLS * size + 1).round().astype(np.int64))
    ends = found.values[:, ranks].astype(np.float64)  # [G, cells + 1]
    mass = np.diff(found.sums(np.broadcast_to(ranks, (G, len(ranks))))[0], axis=1)
    dense = np.cumsum(np.cbrt(mass * np.diff(ends, axis=1) ** 2), axis=1)
    dense = np.concatenate([np.zeros((G, 1)), dense / np.maximum(dense[:, -1:], 1e-30)], axis=1)
    wanted = (np.arange(size) + 0.5) / size
    cells = np.clip((dense[:, 1:, None] < wanted).sum(axis=1), 0, dense.shape[1] - 2)  # [G, size]
    rows = np.arange(G)[:, None]
    part = _share(wanted - dense[rows, cells], dense[rows, cells + 1] - dense[rows, cells])
    centres: DoubleArray = ends[rows, cells] + part * (ends[rows, cells + 1] - ends[rows, cells])
    return centres


def _edges(centres: DoubleArray) -> DoubleArray:
    return (centres[:, 1:] + centres[:, :-1]) / 2


def _between(found: _Sorted, ranks: NDArray[np.int64]) -> tuple[DoubleArray, DoubleArray]:
    """Weight and first moment [G, size] of what falls between edges of these ranks [G, size - 1]."""
    G, n = found.values.shape
    ends = np.concatenate([np.zeros((G, 1), np.int64), ranks, np.full((G, 1), n)], axis=1)
    mass, moment, _ = (np.diff(part, axis=1) for part in found.sums(ends))
    return mass, moment


def _means(clusters: tuple[DoubleArray, DoubleArray], centres: DoubleArray) -> DoubleArray:
    """The means of clusters; a cluster without anything keeps its centre."""
    mass, moment = clusters
    means: DoubleArray = np.where(mass > 0, _share(moment, mass), centres)
    return means


def _share(top: DoubleArray, bottom: DoubleArray) -> DoubleArray:
    quotient: DoubleArray = np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)
    return quotient


def _lloyd(found: _Sorted, centres: DoubleArray, steps: int) -> DoubleArray:
    """Centres moved to the means of what is nearest to them; one without anything stays."""
    for _ in range(steps):
        moved = _means(_between(found, found.ranks(_edges(centres))), centres)
        if np.array_equal(moved, centres):
            break
        centres = np.sort(centres + OVERSHOOT * (moved - centres), axis=1)
    return centres


def _moved(found: _Sorted, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The best ranks [G, size - 1] of the edges among the places around them, by dynamic programming.

    The error of a cluster depends on its two edges only, so all edges are chosen at once.
    """
    places = _places(ranks, found.values.shape[1])
    G, inner, D = len(ranks), ranks.shape[1], places.shape[2]
    mass, moment, square = (part.reshape(places.shape) for part in found.sums(places.reshape(G, -1)))
    best = np.zeros((G, D))
    came = np.empty((inner + 1, G, D), np.int64)
    for edge in range(inner + 1):
        lower, upper = (slice(None), edge, slice(None), None), (slice(None), edge + 1, None, slice(None))
        mean = _share((moment[upper] - moment[lower]) ** 2, mass[upper] - mass[lower])
        cost = square[upper] - square[lower] - mean
        cost = np.where(places[upper] < places[lower], np.inf, cost) + best[:, :, None]  # [G, D, D]
        came[edge] = cost.argmin(axis=1)
        best = np.take_along_axis(cost, came[edge][:, None], axis=1)[:, 0]
    rows, choice = np.arange(G), best.argmin(axis=1)
    found_ranks = np.empty_like(ranks)
    for edge in range(inner, 0, -1):
        choice = came[edge][rows, choice]
        found_ranks[:, edge - 1] = places[rows, edge, choice]
    return found_ranks


def _places(ranks: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Where each edge may go [G, size + 1, D], the two outermost among them, which stay."""
    G, inner = ranks.shape
    ends = np.zeros((G, inner + 2), np.int64)
    ends[:, 1:-1], ends[:, -1] = ranks, n
    gaps = np.diff(ends, axis=1)[:, :, None]
    near = np.broadcast_to(STEPS, (G, inner, len(STEPS)))
    back, on = ((gaps[:, part] * SHARES).astype(np.int64) for part in (slice(None, -1), slice(1, None)))
    moves = np.concatenate([-back, near, on], axis=2)
    places = np.repeat(ends[:, :, None], moves.shape[2], axis=2)
    places[:, 1:-1] = np.clip(places[:, 1:-1] + moves, 0, n)
    return places


def compensate_palettes(
    weight: FloatArray,  # [N, K]
    bits: int,
    group: int,
    moment: FloatArray,  # [K, K], the second moment of the inputs
) -> Palettes:
    """`fit_palettes`, and indices that make later weights of a row compensate the errors of earlier ones.

    Frantar et al., "GPTQ" (2022), with tables in place of steps; tables are fitted before anything is compensated.
    """
    inverse, order = ordered_inverse(moment)
    importance = np.empty(len(order), np.float32)
    importance[order] = (1 / np.diagonal(inverse) ** 2).astype(np.float32)
    fitted = fit_palettes(weight, bits, group, importance)
    chosen = np.arange(len(weight)) // group

    def run(rows: slice) -> NDArray[np.uint8]:
        tables = fitted.tables.astype(np.float32)[chosen[rows]]  # [n, size]
        indices = np.empty((len(tables), len(order)), np.uint8)
        indices[:, order] = _compensated(np.ascontiguousarray(weight[rows][:, order]), tables, inverse)
        return indices

    return Palettes(np.concatenate(over_chunks(run, weight.shape)), fitted.tables)


def _compensated(work: FloatArray, tables: FloatArray, inverse: FloatArray) -> NDArray[np.uint8]:
    n, K = work.shape
    nearest = _Nearest(tables)
    indices = np.empty((n, K), np.uint8)
    for start in range(0, K, COLUMNS):
        columns = slice(start, min(start + COLUMNS, K))
        part, square = work[:, columns].T.copy(), inverse[columns, columns]  # [b, n]: rows contiguous
        errors = np.empty_like(part)
        for j in range(len(part)):
            index, value = nearest(part[j])
            indices[:, start + j] = index
            errors[j] = (part[j] - value) / square[j, j]
            part[j + 1 :] -= square[j, j + 1 :, None] * errors[j]
        work[:, columns.stop :] -= errors.T @ inverse[columns, columns.stop :]
    return indices


class _Nearest:
    """The nearest entry of a table of one's own, for one value a row."""

    def __init__(self, tables: FloatArray) -> None:
        self.n, self.size = tables.shape
        edges = np.full(tables.shape, np.inf, np.float32)
        edges[:, :-1] = (tables[:, 1:] + tables[:, :-1]) / 2
        self.edges, self.values = edges.reshape(-1), tables.reshape(-1)
        self.first = np.arange(0, self.n * self.size, self.size)

    def __call__(self, x: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
        """Indices and values [n] of x [n], by bisection."""
        place, step = self.first.copy(), self.size // 2
        while step:
            place += step * (x > self.edges[place + step - 1])
            step //= 2
        return place - self.first, self.values[place]
