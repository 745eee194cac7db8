"""Two poles from one thermometer: Levenberg-Marquardt over a short history, a few blocks at a time.

The unknowns are ln R and ln τ of die and case, the air, and the case's excess at the start of the history:
T(t) = air + x_die + x_case with x' = x a + R P (1 - a), a = e^{-dt/τ}, exact over irregular intervals.
Fitting the whole response (an output error fit) is what noise and coarse thermometers do not bias; a
recursion on [T, P, 1] takes their noise for fast decay. A pass over the history (`Sweep`) is spread over
many readings, so that each costs little; it carries state and sensitivities along and sums J'J and J'r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SETTLE_S", "Belief", "Block", "Constants", "Sweep", "solve", "step_to"]

Block = tuple[float, float, float, float]
"""(seconds, mean power over them, °C at their end, weight = 1/variance)."""

LOWEST = (-7.0, -0.7, -7.0, 2.7, -40.0, -60.0)  # ln, ln s, ln, ln s, °C, °C
HIGHEST = (5.5, 4.6, 5.5, 7.6, 80.0, 80.0)
_APART = 0.8  # ln: the case is at least this much slower than the die
SETTLE_S = 30.0  # over which the misfit of now is averaged
_OUTLIER = 3.0  # standard deviations from which on residuals count less (Huber)
_LONGEST = (1.0, 0.7, 1.0, 0.7, 8.0, 8.0)  # a step of the fit at most


@dataclass(frozen=True)
class Constants:
    """ln R_die, ln τ_die, ln R_case, ln τ_case, air (°C), excess of the case at the start (°C)."""

    theta: tuple[float, ...]

    def poles(self) -> tuple[float, float, float, float]:
        """R_die, τ_die, R_case, τ_case."""
        a, b, c, d = self.theta[:4]
        return math.exp(a), math.exp(b), math.exp(c), math.exp(d)


@dataclass(frozen=True)
class Belief:
    """Mean and standard deviation of the six unknowns before the data."""

    mean: tuple[float, ...]
    spread: tuple[float, ...]


class Sweep:
    """One pass of one set of constants over a history: state, sensitivities and normal equations.

    `die_c` is the die's excess at the start: None for settled at `power`, which the constants then give.
    """

    def __init__(self, constants: Constants, belief: Belief, power: float, die_c: float | None) -> None:
        self.constants = constants
        self.r_die, self.tau_die, self.r_case, self.tau_case = constants.poles()
        self.die = self.r_die * power if die_c is None else die_c
        self.case = constants.theta[5]
        self.done = 0
        self.air = constants.theta[4]
        self._by = (self.die if die_c is None else 0.0, 0.0, 0.0, 0.0, 1.0)
        self.misfit = 0.0
        pull = [1.0 / (s * s) for s in belief.spread]
        off = [m - t for m, t in zip(belief.mean, constants.theta, strict=True)]
        self.rows = [[0.0] * (7 - i) for i in range(6)]
        for i, (w, d) in enumerate(zip(pull, off, strict=True)):
            self.rows[i][0], self.rows[i][6 - i] = w, w * d
        self.cost = sum(w * d * d for w, d in zip(pull, off, strict=True))
        self.weights = 0.0

    @property
    def mean_cost(self) -> float:
        """Of a reading, prior included."""
        return self.cost / max(self.weights, 1.0)

    def deviation(self, weights: tuple[float, ...]) -> float:
        """Standard deviation of a weighted sum of the unknowns."""
        solved = solve([row[:-1] for row in self.rows], list(weights))
        return math.sqrt(max(0.0, sum(w * x for w, x in zip(weights, solved, strict=True))))

    def take(self, block: Block) -> None:
        """Carry everything over one block, and compare with its reading."""
        dt, power, temp_c, weight = block
        tau_die, tau_case = self.tau_die, self.tau_case
        a, b = math.exp(-dt / tau_die), math.exp(-dt / tau_case)
        die_end, case_end = self.r_die * power, self.r_case * power
        r_d, t_d, r_c, t_c, held = self._by
        die, case = (self.die - die_end) * a, (self.case - case_end) * b
        r_d = die_end + (r_d - die_end) * a
        r_c = case_end + (r_c - case_end) * b
        t_d = t_d * a + die * dt / tau_die
        t_c = t_c * b + case * dt / tau_case
        held *= b
        self._by = (r_d, t_d, r_c, t_c, held)
        self.die, self.case = die_end + die, case_end + case
        self.done += 1
        if weight > 0.0:
            miss = temp_c - self.air - self.die - self.case
            self.misfit += (miss - self.misfit) * min(1.0, dt / SETTLE_S)
            self._add(r_d, t_d, r_c, t_c, held, miss, weight)

    def _add(
        self, r_d: float, t_d: float, r_c: float, t_c: float, held: float, miss: float, weight: float
    ) -> None:
        """Sum J'J and J'r; outliers count less. Written out: this is what a pass spends its time on."""
        squares = weight * miss * miss
        if squares > _OUTLIER * _OUTLIER:
            weight *= _OUTLIER / math.sqrt(squares)
        self.cost += weight * miss * miss
        self.weights += 1.0
        u, v, w, x, y = weight * r_d, weight * t_d, weight * r_c, weight * t_c, weight * held
        one, two, three, four, five, six = self.rows
        one[0] += u * r_d
        one[1] += u * t_d
        one[2] += u * r_c
        one[3] += u * t_c
        one[4] += u
        one[5] += u * held
        one[6] += u * miss
        two[0] += v * t_d
        two[1] += v * r_c
        two[2] += v * t_c
        two[3] += v
        two[4] += v * held
        two[5] += v * miss
        three[0] += w * r_c
        three[1] += w * t_c
        three[2] += w
        three[3] += w * held
        three[4] += w * miss
        four[0] += x * t_c
        four[1] += x
        four[2] += x * held
        four[3] += x * miss
        five[0] += weight
        five[1] += y
        five[2] += weight * miss
        six[0] += y * held
        six[1] += y * miss


def step_to(sweep: Sweep, damping: float) -> Constants:
    """The next constants to try: a damped Gauss-Newton step, kept physical."""
    matrix = [row[:-1] for row in sweep.rows]
    for row in matrix:
        row[0] *= 1.0 + damping
    step = solve(matrix, [row[-1] for row in sweep.rows])
    moved = [
        min(max(t + min(max(d, -most), most), low), high)
        for t, d, most, low, high in zip(sweep.constants.theta, step, _LONGEST, LOWEST, HIGHEST, strict=True)
    ]
    moved[3] = max(moved[3], moved[1] + _APART)
    return Constants(tuple(moved))


def solve(upper: list[list[float]], right: list[float]) -> list[float]:
    """x of A x = b, A symmetric and positive, given by the rows of its upper triangle (L D L')."""
    n = len(right)
    rows, x = [list(row) for row in upper], list(right)
    for i in range(n):
        pivot = rows[i][0] = max(rows[i][0], 1e-12)
        for j in range(i + 1, n):
            factor = rows[i][j - i] / pivot
            if factor:
                rows[j] = [u - factor * v for u, v in zip(rows[j], rows[i][j - i :], strict=True)]
                x[j] -= factor * x[i]
    for i in reversed(range(n)):
        x[i] = (x[i] - sum(u * v for u, v in zip(rows[i][1:], x[i + 1 :], strict=True))) / rows[i][0]
    return x
