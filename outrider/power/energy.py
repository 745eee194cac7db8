"""What a round takes in joules, learned while decoding from intervals whose energy was measured.

An interval's energy is linear in what ran in it: static_w · seconds + Σ forwards (e0 + e1 · width) +
Σ draft steps · e_drafter. Bayesian linear regression with forgetting keeps the normal equations of that, on
top of a prior that is never forgotten: where the data say nothing, the prior's split stands. A cost of its own
for each width cannot be told from such sums (widths are few and come mixed): the affine part is learned, and
what a calibrated prior says of a width beyond that is kept as it is. While every round of k drafts is verified
at width k + 1, a row and a draft step come together and only the sum of their costs can be told (the prior
splits it): enough to choose k, not enough to say which of the two is dear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from outrider.contracts import Energy
from outrider.errors import UsageError

__all__ = ["Activity", "EnergyModel", "round_energy", "stage_estimates"]

_NOISE = 0.05  # of an interval's energy: one standard deviation
_OUTLIER = 2.0  # standard deviations from which on an interval counts less (Huber)
_FEW = 8  # intervals with work that are needed where there is no prior
_KNOWN = 0.5  # of a plain forward: how well each cost must be known where there is no prior
_STREAK = 10  # so many intervals beyond the outlier bound on one side: the device changed
_IDLE_STEP = 0.1  # how far an interval at rest moves what a pause is believed to draw
_SLOPE = 0.1  # e1 as a share of a plain forward, where a prior knows one width only


@dataclass(frozen=True)
class Activity:
    """What ran in an interval: its seconds (of which `paused_s` at rest), forwards by width, steps by drafter."""

    seconds: float
    verify: Mapping[int, int] = field(default_factory=dict)
    draft: Mapping[str, int] = field(default_factory=dict)
    paused_s: float = 0.0

    @property
    def idle(self) -> bool:
        """True when nothing ran."""
        return not any(self.verify.values()) and not any(self.draft.values())


def round_energy(
    energy: Energy, seconds: float, width: int, drafter: str | None = None, steps: int = 0
) -> float:
    """Joules of a round: `seconds` awake, one verify forward, `steps` of a drafter."""
    draft_j = steps * energy.draft_j[drafter] if drafter is not None else 0.0
    return energy.static_w * seconds + energy.verify_j[width] + draft_j


def stage_estimates(energy: Energy, work: Mapping[str, Activity]) -> dict[str, float]:
    """Joules by stage from what ran in each; every width and drafter must be one that `energy` knows."""
    return {
        stage: energy.static_w * done.seconds
        + sum(n * energy.verify_j[width] for width, n in done.verify.items())
        + sum(n * energy.draft_j[name] for name, n in done.draft.items())
        for stage, done in work.items()
    }


class EnergyModel:
    """Learns `Energy` from (activity, joules) pairs.

    `uncertainty` is the prior's relative standard deviation (0.5: a device profile, 0.15: a calibration of
    this machine). `memory_s` of work is how long data counts; idle time ages it ten times more slowly. Names
    outside `drafters` are refused.
    """

    def __init__(
        self,
        prior: Energy | None = None,
        drafters: Sequence[str] = (),
        uncertainty: float = 0.5,
        memory_s: float = 60.0,
    ) -> None:
        if not 0.0 < uncertainty < math.inf or not 0.0 < memory_s < math.inf:
            raise UsageError(f"uncertainty {uncertainty} and memory_s {memory_s} must be positive and finite")
        self.drafters = tuple(drafters)
        self._memory_s = memory_s
        self._size = n = 3 + len(self.drafters)
        self._a = [[0.0] * n for _ in range(n)]
        self._b = [0.0] * n
        self._prior = None if prior is None else _affine(prior, self.drafters)
        self._shape = {} if prior is None else _shape(prior, self._prior or [])
        self._pull = [] if self._prior is None else _pulls(self._prior, uncertainty)
        self._idle_w = None if prior is None else prior.idle_w
        self._early: list[tuple[list[float], float]] = []
        self._sums = [0.0] * n
        self._joules = 0.0
        self._streak = 0
        self._used = 0
        self._cached: list[float] | None = None

    @property
    def intervals(self) -> int:
        """Intervals with work that were learned from."""
        return self._used

    def observe(self, activity: Activity, joules: float) -> None:
        """Learn from an interval. One without time, or whose joules are not finite or negative, is left out.

        Raises UsageError for a drafter that was not announced.
        """
        if not (0.0 < activity.seconds < math.inf and 0.0 <= joules < math.inf):
            return
        row = self._row(activity)
        measured = max(joules - sum(n * self._extra(w) for w, n in activity.verify.items()), 0.0)
        if self._idle_w is not None:
            if activity.idle and activity.paused_s >= activity.seconds:
                self._idle_w += _IDLE_STEP * (joules / activity.seconds - self._idle_w)
                return
            row[0] = max(activity.seconds - activity.paused_s, 0.0)
            measured = max(measured - self._idle_w * activity.paused_s, 0.0)
        if self._prior is None and self._used < _FEW:
            self._wait(row, measured, activity.idle)
            return
        self._age(math.exp(-activity.seconds / (self._memory_s * (10.0 if activity.idle else 1.0))))
        self._learn(row, measured)
        self._used += not activity.idle

    def energy(self, widths: Iterable[int]) -> Energy | None:
        """The costs of now, for these widths; None while they are unknown.

        With a prior they are known from the start. Without one it takes some intervals with work, and enough
        variety (idle time, several widths) to tell static power from forwards and rows; a drafter that never
        ran is left out of `draft_j` then.
        """
        asked = sorted(set(widths))
        z = self._solution()
        if z is None or not self._well_known(z, asked):
            return None
        verify_j = {w: max(0.0, z[1] + z[2] * w + self._extra(w)) for w in asked}
        draft_j = {
            name: z[3 + i]
            for i, name in enumerate(self.drafters)
            if self._prior is not None or self._sums[3 + i] > 0.0
        }
        return Energy(z[0], verify_j, draft_j, self._idle_w)

    def clock_changed(self) -> None:
        """Clocks (or the unit) changed: what was measured before counts a twentieth."""
        self._age(0.05)
        self._streak = 0

    def deviation(self, activity: Activity) -> float:
        """Standard deviation of what the model would say an interval takes, in joules."""
        return self._deviation(self._row(activity))

    def _row(self, activity: Activity) -> list[float]:
        """The regressors of an interval."""
        unknown = sorted(set(activity.draft) - set(self.drafters))
        if unknown:
            known = ", ".join(self.drafters) or "none"
            raise UsageError(f"drafter {unknown[0]!r} is not known to the energy model; known: {known}")
        forwards = float(sum(activity.verify.values()))
        rows = float(sum(width * n for width, n in activity.verify.items()))
        steps = [float(activity.draft.get(name, 0)) for name in self.drafters]
        return [activity.seconds, forwards, rows, *steps]

    def _extra(self, width: int) -> float:
        """What the prior says of a width beyond its affine part; 0 outside the widths it knows."""
        return self._shape.get(width, 0.0)

    def _wait(self, row: list[float], joules: float, idle: bool) -> None:
        """Without a prior the first intervals are fitted together, so that an outlier among them shows."""
        self._early.append((row, joules))
        self._tally(row, joules)
        self._used += not idle
        if self._used < _FEW:
            self._early = self._early[-8 * _FEW :]
            return
        z: list[float] | None = [median(j / r[0] for r, j in self._early), *[0.0] * (self._size - 1)]
        for spread in (6.0, 3.0, *[1.0] * 6):
            self._a = [[0.0] * self._size for _ in range(self._size)]
            self._b = [0.0] * self._size
            for known, measured in self._early:
                self._add(known, measured, z, spread)
            self._cached = None
            z = self._solution()
        self._early = []

    def _learn(self, row: list[float], joules: float) -> None:
        z = self._solution()
        self._tally(row, joules)
        off = self._add(row, joules, z)
        self._cached = None
        side = 1 if off > _OUTLIER else -1 if off < -_OUTLIER else 0
        self._streak = self._streak + side if side and self._streak * side >= 0 else side
        if abs(self._streak) >= _STREAK:
            self.clock_changed()

    def _tally(self, row: list[float], joules: float) -> None:
        """What is needed for natural scales: how much of everything there was."""
        self._sums = [s + r for s, r in zip(self._sums, row, strict=True)]
        self._joules += joules

    def _add(self, row: list[float], joules: float, z: list[float] | None, spread: float = 1.0) -> float:
        """Add an interval to the normal equations; returns how many deviations it was off."""
        expected = joules if z is None else sum(r * v for r, v in zip(row, z, strict=True))
        sigma = spread * _NOISE * max(expected, 1e-9)
        off = (joules - expected) / sigma
        weight = min(1.0, _OUTLIER / abs(off)) if off else 1.0
        weight /= sigma * sigma
        for i, r in enumerate(row):
            if r:
                scaled = weight * r
                self._a[i] = [t + scaled * v for t, v in zip(self._a[i], row, strict=True)]
                self._b[i] += scaled * joules
        return off

    def _age(self, share: float) -> None:
        self._a = [[share * v for v in row] for row in self._a]
        self._b = [share * v for v in self._b]
        self._cached = None

    def _anchor(self) -> tuple[list[float], list[float]]:
        """(precision, mean) of the prior; without one, a wide one at 0 in the units of the data."""
        if self._prior is not None:
            return self._pull, self._prior
        scales = [self._joules / s if s > 0.0 else math.inf for s in self._sums]
        return [1.0 / (9.0 * s * s) if 0.0 < s < math.inf else 1e12 for s in scales], [0.0] * self._size

    def _matrix(self) -> list[list[float]]:
        pull, _ = self._anchor()
        return [
            [v + (pull[i] if i == j else 0.0) for j, v in enumerate(row)] for i, row in enumerate(self._a)
        ]

    def _solution(self) -> list[float] | None:
        """The most likely costs, none of them negative; None without prior and data."""
        if self._prior is None and not any(self._b):
            return None
        if self._cached is None:
            pull, mean = self._anchor()
            right = [b + p * m for b, p, m in zip(self._b, pull, mean, strict=True)]
            self._cached = _solve_positive(self._matrix(), right)
        return self._cached

    def _unit(self, z: list[float]) -> float:
        """A plain forward, awake power included: what the others are judged by."""
        mean_s = self._sums[0] / self._sums[1] if self._sums[1] else 1.0
        return max(z[1] + z[2] + z[0] * mean_s, 1e-12)

    def _well_known(self, z: list[float], widths: list[int]) -> bool:
        """With a prior, always; else once static power and a forward of each width are known well enough."""
        if self._prior is not None:
            return True
        if self._used < _FEW or self._sums[1] <= 0.0:
            return False
        most, mean_s, none = _KNOWN * self._unit(z), self._sums[0] / self._sums[1], [0.0] * len(self.drafters)
        drafts = [none, *(_axis(len(none), i) for i in range(len(none)) if self._sums[3 + i] > 0.0)]

        def off(width: int) -> float:
            rounds = ([0.0, 1.0, width, *((width - 1.0) * d for d in draft)] for draft in drafts)
            return min(self._deviation(row) for row in rounds)

        static_off = self._deviation([mean_s, 0.0, 0.0, *none])
        return static_off <= most and all(off(width) <= most for width in widths[:1] + widths[-1:])

    def _deviation(self, row: list[float]) -> float:
        x = _solve(self._matrix(), row)
        return math.sqrt(max(0.0, sum(a * b for a, b in zip(row, x, strict=True))))


def _affine(prior: Energy, drafters: Sequence[str]) -> list[float]:
    """[static_w, e0, e1, drafters...] of a prior: the line through its widths by least squares, not falling."""
    points = sorted(prior.verify_j.items())
    if not points:
        raise UsageError("the energy prior knows no width; give verify_j at least for width 1")
    if len(points) == 1:
        ((width, joules),) = points
        e1 = _SLOPE * joules / (1.0 + _SLOPE * (width - 1))
        line = [joules - e1 * width, e1]
    else:
        mean_w = sum(w for w, _ in points) / len(points)
        mean_j = sum(j for _, j in points) / len(points)
        spread = sum((w - mean_w) ** 2 for w, _ in points)
        e1 = max(0.0, sum((w - mean_w) * (j - mean_j) for w, j in points) / spread)
        line = [max(0.0, mean_j - e1 * mean_w), e1]
    return [prior.static_w, *line, *(prior.draft_j.get(name, line[0] * 0.25) for name in drafters)]


def _shape(prior: Energy, affine: list[float]) -> dict[int, float]:
    return {width: joules - affine[1] - affine[2] * width for width, joules in prior.verify_j.items()}


def _pulls(prior: list[float], uncertainty: float) -> list[float]:
    """Precisions of a prior; a cost of 0 is as unsure as a tenth of a plain forward."""
    forward = max(prior[1] + prior[2], 1e-9)
    floors = [
        0.1 * max(prior[0], forward),
        0.1 * forward,
        0.02 * forward,
        *[0.02 * forward] * (len(prior) - 3),
    ]
    return [1.0 / (uncertainty * max(value, low)) ** 2 for value, low in zip(prior, floors, strict=True)]


def _axis(size: int, index: int) -> list[float]:
    return [float(i == index) for i in range(size)]


def _solve_positive(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Least squares with x >= 0: what comes out negative is held at 0, the worst first."""
    held: set[int] = set()
    while True:
        free = [i for i in range(len(right)) if i not in held]
        solved = _solve([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
        x = [0.0] * len(right)
        for i, value in zip(free, solved, strict=True):
            x[i] = value
        worst = min(free, key=lambda i: x[i] * math.sqrt(matrix[i][i]), default=None)
        if worst is None or x[worst] >= 0.0:
            return x
        held.add(worst)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x of A x = b for a positive definite A, scaled to a unit diagonal first."""
    n = len(right)
    scale = [1.0 / math.sqrt(max(matrix[i][i], 1e-30)) for i in range(n)]
    rows = [[matrix[i][j] * scale[i] * scale[j] for j in range(n)] + [right[i] * scale[i]] for i in range(n)]
    for i in range(n):
        pivot = max(rows[i][i], 1e-12)
        for j in range(i + 1, n):
            factor = rows[j][i] / pivot
            if factor:
                rows[j] = [v - factor * u for u, v in zip(rows[i], rows[j], strict=True)]
        rows[i][i] = pivot
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (rows[i][n] - sum(rows[i][j] * x[j] for j in range(i + 1, n))) / rows[i][i]
    return [v * s for v, s in zip(x, scale, strict=True)]
