"""From a target row to a distribution to a token; the same code with and without a draft.

Order of processing: logit bias and bans, repetition penalty, presence and frequency penalty,
temperature, top-k, top-p, min-p. Ties go to the lowest id everywhere; a token is drawn by inverse CDF
in id order. Ids beyond the tokenizer (padding of the vocabulary) never get probability.

Nucleus sampling: Holtzman et al., arXiv 1904.09751; min-p: Nguyen et al., arXiv 2407.01082; repetition
penalty: Keskar et al. (CTRL), arXiv 1909.05858.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.contracts import Float32Array, IntArray, Sampling
from outrider.errors import BackendError, UsageError

__all__ = [
    "Distribution",
    "Processor",
    "TokenLogprob",
    "distribution",
    "draw",
    "largest",
    "least_probability",
    "log_probabilities",
    "probability",
    "top_two",
]

Float64Array = NDArray[np.float64]

_NEAR_TIE = 1e-3
_CDF_BLOCK = 512
_CDF_END = 1e-15
_COLUMNS = 2048  # a maximum over rows of this length runs at the speed of memory
_FAR = 1e-4  # of the top's weight: below it a bound is as good as the value
_ROUNDING = 1e-3  # far above what float32 sums and exponentials lose


@dataclass(frozen=True)
class Distribution:
    """Probabilities of the tokens that can come next; all other tokens have probability 0.

    `slack` is the mass that float noise could move at a truncation edge (a near tie of the cut itself).
    """

    ids: IntArray | None  # [n] ascending; None = 0..n-1
    probs: Float64Array  # [n], sums to 1
    slack: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a committed token, and of the most likely ones when asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Processor:
    """Turns rows of logits into processed rows: bias, bans and penalties, for the prefix pushed so far.

    `ids` [V'], ascending and below `vocab_limit`, are those of a row's columns where it lacks some: a trimmed
    draft's. What the sampling says about other ids then has no effect.
    """

    def __init__(
        self, sampling: Sampling, vocab_limit: int, prompt: Iterable[int] = (), ids: IntArray | None = None
    ) -> None:
        unknown = [i for i in (*sampling.logit_bias, *sampling.banned_tokens) if not 0 <= i < vocab_limit]
        if unknown:
            raise UsageError(
                f"logit_bias or banned_tokens names id {unknown[0]}; the vocabulary has {vocab_limit} ids"
            )
        self._limit = vocab_limit if ids is None else len(ids)
        self._column = None if ids is None else _inverse(ids, vocab_limit)
        self._sampling = sampling
        self._bias_ids = np.fromiter(sampling.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float32)
        self._banned = np.array(sampling.banned_tokens, np.int64)
        if self._column is not None:
            places = self._column[self._bias_ids]
            self._bias_ids, self._bias = places[places >= 0], self._bias[places >= 0]
            self._banned = self._column[self._banned]
            self._banned = self._banned[self._banned >= 0]
            prompt = [column for token in prompt if (column := self._place(token)) >= 0]
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self._history = _History(prompt) if penalties != (1.0, 0.0, 0.0) else None
        self._edits = bool(self._history or len(self._bias_ids) or len(self._banned))

    @property
    def edits(self) -> bool:
        """Whether a processed row can differ from the graph's."""
        return self._edits

    def row(self, logits: Float32Array) -> Float32Array:
        """The processed row [vocab_limit]; a view of `logits` [V] when there is nothing to change."""
        row = logits[: self._limit]
        if not self._edits:
            return row
        row = row.copy()
        row[self._bias_ids] += self._bias
        row[self._banned] = -np.inf
        if self._history is not None:
            self._history.penalise(row, self._sampling)
        return row

    def push(self, token: int) -> None:
        """Add an output token to the prefix that the next row sees."""
        if self._history is not None and (place := self._place(token)) >= 0:
            self._history.push(place)

    def pop(self, token: int) -> None:
        """Take back the token pushed last."""
        if self._history is not None and (place := self._place(token)) >= 0:
            self._history.pop(place)

    def _place(self, token: int) -> int:
        """The column of a token's logit, -1 where it has none."""
        if self._column is None:
            return token
        return int(self._column[token]) if token < len(self._column) else -1


def _inverse(ids: IntArray, size: int) -> IntArray:
    """The column of every id below `size`, -1 where it has none. [V'] -> [size]"""
    columns = np.full(size, -1, np.int64)
    columns[ids] = np.arange(len(ids))
    return columns


class _History:
    """Token counts of a prefix, kept up to date token by token; one slot a distinct id."""

    def __init__(self, prompt: Iterable[int]) -> None:
        ids, seen = np.unique(np.fromiter(prompt, np.int64), return_counts=True)
        self._slots = {int(token): slot for slot, token in enumerate(ids)}
        self._ids = ids
        self._seen = seen.astype(np.int64)  # in prompt and output
        self._output = np.zeros_like(self._seen)  # in the output

    def push(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._seen = np.concatenate([self._seen, np.zeros(room, np.int64)])
            self._output = np.concatenate([self._output, np.zeros(room, np.int64)])
        self._ids[slot] = token
        self._seen[slot] += 1
        self._output[slot] += 1

    def pop(self, token: int) -> None:
        slot = self._slots[token]
        self._seen[slot] -= 1
        self._output[slot] -= 1

    def penalise(self, row: Float32Array, sampling: Sampling) -> None:
        n = len(self._slots)
        present = self._seen[:n] > 0
        ids, output = self._ids[:n][present], self._output[:n][present]
        values = row[ids].astype(np.float64)
        penalty = sampling.repetition_penalty
        values = np.where(values > 0, values / penalty, values * penalty)
        values -= sampling.frequency_penalty * output + sampling.presence_penalty * (output > 0)
        row[ids] = values


def top_two(row: Float32Array) -> tuple[int, float]:
    """The most likely id (the lowest of equals) and its lead over the runner-up, in logits."""
    best = int(row.argmax())
    top = _checked_top(row[best])
    second = max(row[:best].max(initial=-np.inf), row[best + 1 :].max(initial=-np.inf))
    return best, top - float(second)


def largest(row: Float32Array, n: int) -> IntArray:
    """Ids of the n largest values, largest first, equals by lower id."""
    ids, _ = _candidates(row, n)
    return ids[np.argsort(-row[ids], kind="stable")[:n]]


def least_probability(row: Float32Array, least: float) -> tuple[int, bool]:
    """The most likely id (the lowest of equals), and whether softmax(row) gives it at least `least`.

    Equals `1 / exp(row - row.max()).sum() >= least`, but takes the exponential of the whole row only where
    bounds leave that open: a column holds between one and all of its rows times its maximum's exponential.
    """
    best = int(row.argmax())
    if least <= 0.0:
        return best, True
    top = row[best]
    grid, tail = _columns(row, _COLUMNS)
    weights = np.exp(grid.max(axis=0) - top)  # [columns]
    low = float(weights.sum())
    if low * least > 1.0 + _ROUNDING:
        return best, False
    near = (weights > _FAR).nonzero()[0]
    inside = float(np.exp(grid.take(near, axis=1) - top).sum())
    if len(tail):
        inside += float(np.exp(tail - top).sum())
    outside = low - float(weights[near].sum())
    if (inside + len(grid) * outside) * least < 1.0 - _ROUNDING:
        return best, True
    return best, bool(1.0 / np.exp(row - top).sum() >= least)


def _columns(row: Float32Array, columns: int) -> tuple[Float32Array, Float32Array]:
    """The row as a grid [rows, columns] whose maxima by column cost one fast pass, and the tail left over."""
    columns = min(len(row), columns)
    whole = len(row) // columns * columns
    return row[:whole].reshape(-1, columns), row[whole:]


def _candidates(row: Float32Array, n: int) -> tuple[IntArray, float]:
    """Ascending ids that hold the n largest values and every tie of the n-th, often not many more; the largest.

    The n-th largest of the column maxima bounds the n-th largest value from below, so that one pass over
    the row leaves a few columns for exact work. Raises as `distribution` does.
    """
    grid, tail = _columns(row, max(_COLUMNS, 8 * n))
    maxima = grid.max(axis=0)  # [columns]
    top = _checked_top(np.maximum(maxima.max(), tail.max(initial=-np.inf)))  # NaN wins, as it must
    last = len(maxima) - min(n, len(maxima))
    floor = np.partition(maxima, last)[last]
    columns = (maxima >= floor).nonzero()[0]
    found = (grid.take(columns, axis=1) >= floor).ravel().nonzero()[0]
    rows, at = np.divmod(found, len(columns))
    ids: IntArray = rows * len(maxima) + columns[at]
    if len(tail):
        ids = np.concatenate([ids, grid.size + (tail >= floor).nonzero()[0]])
    return ids, top


def distribution(row: Float32Array, sampling: Sampling, near_tie: float = _NEAR_TIE) -> Distribution:
    """The distribution that `sampling` (temperature > 0) makes of a processed row [V].

    `near_tie` is the float noise of a logit: a truncation whose edge lies within it adds to `slack`.
    Raises BackendError for a row with NaN, UsageError when no token is left.
    """
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return _untruncated(row, _checked_top(row.max()), sampling, near_tie)
    ids, top, total = _truncation_candidates(row, sampling)
    by_id = np.exp((row[ids].astype(np.float64) - top) / sampling.temperature)
    weights = np.sort(by_id)[::-1]
    if sampling.top_k:
        total = float(weights[: sampling.top_k].sum())
    kept, slack = _truncate(weights, total, sampling, near_tie)
    inside = (by_id >= weights[kept - 1]).nonzero()[0]
    if len(inside) > kept:  # a tie at the cut: the lowest ids stay
        tied = (by_id == weights[kept - 1]).nonzero()[0]
        inside = np.setdiff1d(inside, tied[kept - len(inside) :])
    probs = by_id[inside]
    return Distribution(ids[inside], probs / probs.sum(), slack)


def _untruncated(row: Float32Array, top: float, sampling: Sampling, near_tie: float) -> Distribution:
    """Temperature alone (dense), or with min-p (a threshold in logits)."""
    if sampling.min_p == 0.0:
        weights = _weights(row, top, sampling.temperature).astype(np.float64)
        weights /= weights.sum()
        return Distribution(None, weights)
    floor = top + sampling.temperature * float(np.log(sampling.min_p))
    ids = np.flatnonzero(row >= np.float32(floor - 0.01))  # a little wide; the exact test follows
    values = row[ids].astype(np.float64)
    weights = np.exp((values - top) / sampling.temperature)
    keep = weights >= sampling.min_p
    total = weights[keep].sum()
    slack = float(weights[np.abs(values - floor) < near_tie].sum() / total)
    return Distribution(ids[keep], weights[keep] / total, slack)


def _truncation_candidates(row: Float32Array, sampling: Sampling) -> tuple[IntArray, float, float]:
    """Ascending ids among which truncation decides, the top, and (for top-p alone) the row's whole weight.

    With top-k, the first value that is cut comes along, so that a tie at the edge can be seen.
    """
    if sampling.top_k:
        return *_candidates(row, sampling.top_k + 1), 0.0
    top = _checked_top(row.max())
    weights = _weights(row, top, sampling.temperature)
    total = float(weights.sum())
    for n in (256, 4096):
        if n >= len(row):
            break
        ids, _ = _candidates(row, n)
        if float(weights[ids].sum()) > (sampling.top_p + 1e-4) * total:
            return ids, top, total
    return np.arange(len(row)), top, total


def _truncate(weights: Float64Array, total: float, sampling: Sampling, near_tie: float) -> tuple[int, float]:
    """How many of the descending weights stay, and the share of mass at cuts that noise could move."""
    limit = min(sampling.top_k or len(weights), len(weights))
    kept, at_cut = limit, 0.0
    mass = weights.cumsum()
    if sampling.top_p < 1.0:
        kept = min(limit, 1 + int(mass.searchsorted(sampling.top_p * total)))
    if kept == limit < len(weights):  # top-k decided
        last, cut = float(weights[limit - 1]), float(weights[limit])
        tied = cut > 0.0 and sampling.temperature * (math.log(last) - math.log(cut)) < near_tie
        at_cut = last if tied else 0.0
    elif sampling.top_p < 1.0:
        reach = [abs(below / total - sampling.top_p) for below in mass[max(0, kept - 2) : kept].tolist()]
        at_cut = float(weights[kept - 1]) if min(reach) < near_tie else 0.0
    if weights[kept - 1] < max(sampling.min_p, 1e-300):
        kept = int(np.count_nonzero(weights[:kept] >= max(sampling.min_p, 1e-300)))
    return kept, float(at_cut / mass[kept - 1])


def _weights(row: Float32Array, top: float, temperature: float) -> Float32Array:
    """exp((row - top) / temperature) [V], the largest being 1."""
    with np.errstate(over="ignore", under="ignore"):
        weights = row - np.float32(top)
        weights /= np.float32(temperature)
        np.exp(weights, out=weights)
    return weights


def _checked_top(value: np.floating | float) -> float:
    top = float(value)
    if top == -np.inf:
        raise UsageError("no token is left: every id is banned or biased to minus infinity; ban fewer tokens")
    if not np.isfinite(top):
        raise BackendError(f"the target returned a logit of {top}; run `outrider check` on the bundle")
    return top


def draw(chances: Distribution, uniform: float) -> tuple[int, float]:
    """The token whose CDF interval (in id order) holds `uniform`, and the distance to the nearer edge."""
    probs, base, before = chances.probs, 0, 0.0
    if len(probs) > 4 * _CDF_BLOCK:  # find the block first: a running sum over 150,000 ids is slow
        blocks = np.add.reduceat(probs, np.arange(0, len(probs), _CDF_BLOCK))
        total = float(blocks.sum())
        block, before, _ = _interval(blocks, uniform * total)
        base = block * _CDF_BLOCK
        probs = probs[base : base + _CDF_BLOCK]
    else:
        total = float(probs.sum())
    aim = uniform * total - before
    index, low, high = _interval(probs, aim)
    low, high, index = low + before, high + before, index + base
    margins = [uniform * total - low] if low > _CDF_END else []
    if high < total - _CDF_END:
        margins.append(high - uniform * total)
    token = index if chances.ids is None else int(chances.ids[index])
    return token, max(0.0, min(margins, default=1.0))


def _interval(probs: Float64Array, aim: float) -> tuple[int, float, float]:
    """The index whose interval of the running sum holds `aim`, with the interval's ends."""
    cdf = probs.cumsum()
    index = int(cdf.searchsorted(aim, side="right"))
    if index == len(cdf):  # rounding carried the aim to the very end
        index = int(np.flatnonzero(probs)[-1])
    return index, float(cdf[index] - probs[index]), float(cdf[index])


def probability(chances: Distribution, token: int) -> float:
    """The probability of one token; 0 outside the support."""
    if chances.ids is None:
        return float(chances.probs[token]) if token < len(chances.probs) else 0.0
    index = int(chances.ids.searchsorted(token))
    found = index < len(chances.ids) and chances.ids[index] == token
    return float(chances.probs[index]) if found else 0.0


def log_probabilities(row: Float32Array, token: int, n: int, temperature: float) -> TokenLogprob:
    """Log-probabilities of a processed row, before truncation; temperature 0 counts as 1.

    Truncated tokens keep a finite value this way, and greedy decoding says how sure it was.
    """
    temperature = temperature or 1.0
    top = float(row.max())
    logsumexp = float(np.log(_weights(row, top, temperature).sum()))
    ids = largest(row, n) if n else np.empty(0, np.int64)
    score = (row[np.append(ids, token)].astype(np.float64) - top) / temperature - logsumexp
    return TokenLogprob(token, float(score[-1]), tuple(zip(ids.tolist(), score[:-1].tolist(), strict=True)))
