"""Means with honest intervals, for few repetitions; and what a run under heat is judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

__all__ = ["Interval", "interval", "mean_between", "paired_ratio", "retention", "students_t"]

# 97.5 % points of Student's t for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z = 1.959964


@dataclass(frozen=True)
class Interval:
    """A mean, its 95 % interval (None for fewer than two values) and how many values are behind it."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def half(self) -> float | None:
        """Half the width: what stands after ±."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def students_t(degrees: int) -> float:
    """The 97.5 % point of Student's t; beyond 30 degrees by Cornish and Fisher's first two terms."""
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom; at least 1 is needed")
    if degrees <= len(_T):
        return _T[degrees - 1]
    z, n = _Z, degrees
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def interval(values: Sequence[float]) -> Interval | None:
    """Mean and 95 % interval by Student's t; None without values."""
    if not values:
        return None
    mean, n = fmean(values), len(values)
    if n < 2:
        return Interval(mean, None, None, n)
    half = students_t(n - 1) * stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Geometric mean of a / b over pairs, with its interval: what both have in common drops out."""
    logs = [math.log(a / b) for a, b in pairs if a > 0 and b > 0]
    found = interval(logs)
    if found is None:
        return None
    low, high = (None if bound is None else math.exp(bound) for bound in (found.low, found.high))
    return Interval(math.exp(found.mean), low, high, found.n)


def mean_between(events: Sequence[tuple[float, float, float]], begin: float, end: float) -> float | None:
    """Rate of tokens in a window, from (begin, end, tokens) of rounds in time; None when nothing ran in it.

    A round on the edge counts by the share of it that lies inside.
    """
    tokens = covered = 0.0
    for first, last, count in events:
        inside = min(last, end) - max(first, begin)
        if inside > 0:
            covered += inside
            tokens += count * inside / (last - first)
    return tokens / covered if covered > 0 else None


def retention(events: Sequence[tuple[float, float, float]], window_s: float = 30.0) -> float | None:
    """Rate in the last `window_s` over the rate in the first; None where the two would overlap."""
    if not events or events[-1][1] - events[0][0] < 2 * window_s:
        return None
    first = mean_between(events, events[0][0], events[0][0] + window_s)
    last = mean_between(events, events[-1][1] - window_s, events[-1][1])
    return last / first if first and last is not None else None
