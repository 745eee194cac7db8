"""Heat, learned while running: what a watt does to the thermometer, how fast, and what that allows.

The die sits on a case that sits in the air: T = T_air + x_die + x_case, and each pole follows
dx/dt = (R P - x) / τ, which over an interval of constant power is exactly
x' = x e^{-dt/τ} + R P (1 - e^{-dt/τ}). The constants are identified from (time, °C, W) by least squares over the last
ten to twenty minutes (`thermal_fit`); what is older counts as the belief that this started from, and less
sure: so a fan, a case or a pocket is followed.

Without watts the same arithmetic runs on a relative load (duty, share of the clock): R is then °C at full
load, and what comes back as power is a load. Use one of them throughout; `LOAD_PRIOR` starts there.

What constant power can never tell apart (T_air from R P) stays as the prior says, and `identified` False.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.errors import UsageError
from outrider.power.thermal_fit import SETTLE_S, Belief, Block, Constants, Sweep, step_to

__all__ = ["LOAD_PRIOR", "Pole", "ThermalModel", "ThermalPrior"]

_PLAUSIBLE_C = (-40.0, 150.0)
_GAP_S = 120.0  # longer silence: what was drawn meanwhile is unknown
_BLOCK_S = (1.0, 4.0)  # the history's grain: fine at first, coarser once it is full
_BLOCKS = 240
_BLOCKS_A_READING = 12
_SPIKE_C = 8.0  # a jump by more than this between readings is not believed,
_STUCK = 5  # unless so many in a row are
_ASTRAY_C, _ASTRAY_S = 5.0, 90.0  # a fit that misses by so much for so long is begun anew
_DAMPING = 1e-2
_UNITS = tuple(tuple(float(i == j) for j in range(6)) for i in range(4))
_IDENTIFIED = 0.15  # relative deviation of °C per watt


@dataclass(frozen=True)
class Pole:
    """One way that heat goes: °C per watt when settled, and seconds to get there (to 63 %)."""

    c_per_w: float
    tau_s: float


@dataclass(frozen=True)
class ThermalPrior:
    """What is believed before a device was seen warming up.

    `spread` is the standard deviation of every constant as a share of it: 1 for a guess, 0.4 for a device
    profile, 0.15 for a calibration. `ambient_c` with `ambient_spread_c` is the air.
    """

    die_c_per_w: float = 2.5
    die_tau_s: float = 12.0
    case_c_per_w: float = 5.0
    case_tau_s: float = 240.0
    spread: float = 1.0
    ambient_c: float = 25.0
    ambient_spread_c: float = 8.0

    def __post_init__(self) -> None:
        """Refuse constants that are not positive and finite."""
        for name in ("die_c_per_w", "die_tau_s", "case_c_per_w", "case_tau_s", "spread", "ambient_spread_c"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise UsageError(f"{name} is {value}; it must be positive and finite")
        if not math.isfinite(self.ambient_c):
            raise UsageError(f"ambient_c is {self.ambient_c}; it must be finite")

    def belief(self, power: float) -> Belief:
        """The same for the fit, for a device first seen at `power`, settled or not."""
        case = self.case_c_per_w * power
        poles = (self.die_c_per_w, self.die_tau_s, self.case_c_per_w, self.case_tau_s)
        spread = (self.spread, 0.7 * self.spread, self.spread, 0.7 * self.spread)
        return Belief(
            (*map(math.log, poles), self.ambient_c, case),
            (*spread, self.ambient_spread_c, 4.0 + self.spread * case),
        )


LOAD_PRIOR = ThermalPrior(die_c_per_w=12.0, case_c_per_w=18.0)
"""For loads of 0..1 in place of watts: a device that warms by some 30 °C when it works all the time."""


class ThermalModel:
    """Identifies the heat path of one thermometer from (time, temperature, power), and predicts with it.

    Feed `observe` as readings come (up to some 10 a second); everything else answers from the state of now,
    None before the first reading. Not thread-safe; plain float arithmetic, tens of microseconds.
    """

    def __init__(self, prior: ThermalPrior | None = None, noise_c: float = 0.2) -> None:
        self.prior = prior or ThermalPrior()
        self._noise_c = noise_c
        self._time_s: float | None = None
        self._power = 0.0
        self._step_c = math.inf  # the smallest difference between readings seen: the thermometer's step
        self._last_c = math.nan
        self._low_c, self._high_c = math.inf, -math.inf
        self._constants = Constants(self.prior.belief(0.0).mean)
        self._spread = self.prior.spread
        self._die = self._case = self._misfit = 0.0

    def observe(self, time_s: float, temp_c: float, power_w: float | None) -> None:
        """Take a reading: °C at `time_s` (monotonic), and the mean watts (or load) since the reading before.

        What cannot be true (NaN, a temperature no silicon survives, negative power, a time that was already
        there) is left out; without a power the last one is taken to go on. A clock that jumps back starts a
        new interval.
        """
        if not (math.isfinite(time_s) and _PLAUSIBLE_C[0] <= temp_c <= _PLAUSIBLE_C[1]):
            return
        known = power_w is not None and 0.0 <= power_w < math.inf
        power = power_w if known and power_w is not None else self._power
        if self._time_s is None:
            if known:
                self._begin(time_s, temp_c, power)
            return
        dt, self._time_s, self._power = time_s - self._time_s, time_s, power
        if dt > _GAP_S:
            self._renew(temp_c)
        elif dt > 0.0:
            self._take(temp_c, power, dt)

    def _begin(self, time_s: float, temp_c: float, power: float) -> None:
        """The first reading: die settled at this power, the case perhaps not."""
        self._time_s, self._power = time_s, power
        self._belief = self.prior.belief(power)
        self._start: tuple[float, float | None] = (power, None)
        *poles, air, case = self._belief.mean
        self._die = self.prior.die_c_per_w * power
        surprise = temp_c - air - self._die - case
        air_share = 1.0 / (1.0 + (self._belief.spread[5] / self._belief.spread[4]) ** 2)
        air, self._case = air + air_share * surprise, case + (1.0 - air_share) * surprise
        self._constants = Constants((*poles, air, self._case))
        self._learn_step(temp_c)
        self._restart(self._constants, [(1e-3, power, temp_c, self._weight(1.0))])

    def _restart(self, constants: Constants, blocks: list[Block]) -> None:
        """A history to fit, from these constants on."""
        self._blocks = blocks
        self._grain_s = _BLOCK_S[1] if blocks else _BLOCK_S[0]
        self._open_s = self._open_j = self._astray_s = 0.0
        self._strangers, self._damping = 0, _DAMPING
        self._accepted: Sweep | None = None
        self._sweep = Sweep(constants, self._belief, *self._start)

    def _take(self, temp_c: float, power: float, dt: float) -> None:
        """Carry the state on, add the reading to the history, and let the fit go on a little."""
        self._carry(power, dt)
        stranger = abs(temp_c - self._last_c) > _SPIKE_C + 0.5 * dt and self._strangers < _STUCK
        self._strangers = self._strangers + 1 if stranger else 0
        if not stranger:
            self._learn_step(temp_c)
            self._low_c, self._high_c = min(self._low_c, temp_c), max(self._high_c, temp_c)
            miss = temp_c - self._constants.theta[4] - self._die - self._case
            self._misfit += (miss - self._misfit) * -math.expm1(-dt / SETTLE_S)
        self._gather(power, dt, None if stranger else temp_c)
        self._work()
        self._astray_s = self._astray_s + dt if abs(self._misfit) > _ASTRAY_C + self._step() else 0.0
        if self._astray_s > _ASTRAY_S:
            self._renew(temp_c)

    def _carry(self, power: float, dt: float) -> None:
        """The state after an interval of constant power."""
        r_die, tau_die, r_case, tau_case = self._constants.poles()
        self._die = r_die * power + (self._die - r_die * power) * math.exp(-dt / tau_die)
        self._case = r_case * power + (self._case - r_case * power) * math.exp(-dt / tau_case)

    def _learn_step(self, temp_c: float) -> None:
        moved = abs(temp_c - self._last_c)
        self._last_c = temp_c
        if 1e-3 < moved < self._step_c:
            self._step_c = moved

    def _step(self) -> float:
        return min(self._step_c, 2.0)

    def _weight(self, seconds: float) -> float:
        """Of a block. Blocks closer together than the thermometer's step lets them differ are no news."""
        step = self._step()
        return 1.0 / ((self._noise_c**2 + step * step / 12.0) * max(1.0, (1.0 + 4.0 * step) / seconds))

    def _gather(self, power: float, dt: float, temp_c: float | None) -> None:
        """Readings close together become one block, with the last of their temperatures."""
        self._open_s += dt
        self._open_j += dt * power
        if self._open_s < 0.7 * self._grain_s:
            return
        weight = 0.0 if temp_c is None else self._weight(self._open_s)
        self._blocks.append((self._open_s, self._open_j / self._open_s, temp_c or 0.0, weight))
        self._open_s = self._open_j = 0.0
        if len(self._blocks) >= _BLOCKS:
            self._thin()

    def _thin(self) -> None:
        """A full history becomes coarser, and when it is coarse, the older half is remembered as belief."""
        if self._grain_s >= _BLOCK_S[1]:
            self._renew()
            return
        self._grain_s *= 2.0
        self._blocks = [_joined(*pair) for pair in zip(self._blocks[::2], self._blocks[1::2], strict=False)]
        self._sweep = Sweep(self._constants, self._belief, *self._start)
        self._accepted = None

    def _work(self) -> None:
        """The fit goes over a few blocks more."""
        sweep, blocks = self._sweep, self._blocks
        for block in blocks[sweep.done : sweep.done + _BLOCKS_A_READING]:
            sweep.take(block)
        if sweep.done == len(blocks):
            self._finish(sweep)

    def _finish(self, sweep: Sweep) -> None:
        """Keep the constants of a whole pass unless they fit worse than the last, and try better ones."""
        last = self._accepted
        again = last is not None and sweep.constants is last.constants
        if last is None or again or sweep.mean_cost <= 1.05 * last.mean_cost + 0.02:
            self._accept(sweep)
            self._damping = max(0.3 * self._damping, 1e-4)
        else:
            self._damping *= 10.0
        best = self._accepted
        assert best is not None
        constants = best.constants if self._damping > 1e3 else step_to(best, self._damping)
        if self._damping > 1e3:
            self._damping = _DAMPING
        self._sweep = Sweep(constants, self._belief, *self._start)

    def _accept(self, sweep: Sweep) -> None:
        self._accepted, self._constants = sweep, sweep.constants
        self._die, self._case, self._misfit = sweep.die, sweep.case, sweep.misfit
        if self._open_s > 0.0:
            self._carry(self._open_j / self._open_s, self._open_s)
        weights = (self.die.c_per_w / self.c_per_w, 0.0, self.case.c_per_w / self.c_per_w, 0.0, 0.0, 0.0)
        self._spread = sweep.deviation(weights)

    def _renew(self, temp_c: float | None = None) -> None:
        """Go on with the newer half of the history, or with a temperature alone; what is known is the belief."""
        theta, fit = self._constants.theta, self._accepted
        most = self.prior.belief(0.0).spread
        known = [1.5 * fit.deviation(unit) for unit in _UNITS] if fit else most
        spread = [min(m, max(d, 0.08)) for m, d in zip(most, known, strict=False)][:4]
        air, power = theta[4] + self._misfit, self._power
        kept = self._blocks[_BLOCKS // 2 :] if temp_c is None else []
        if temp_c is None:
            die, case = self._state_after(len(self._blocks) - len(kept))
            unsure = (1.5, 2.0)
        else:
            die, unsure = self.die.c_per_w * power, (4.0, 8.0)
            case = temp_c - air - die
            self._die, self._case = die, case
        air_spread = min(unsure[0], self.prior.ambient_spread_c)
        self._belief = Belief((*theta[:4], air, case), (*spread, air_spread, unsure[1]))
        self._constants, self._misfit = Constants(self._belief.mean), 0.0
        self._start = (power, die)
        self._restart(self._constants, kept)

    def _state_after(self, blocks: int) -> tuple[float, float]:
        """Die and case, °C above, so many blocks into the history."""
        sweep = Sweep(self._constants, self._belief, *self._start)
        for block in self._blocks[:blocks]:
            sweep.take(block)
        return sweep.die, sweep.case

    @property
    def temp_c(self) -> float | None:
        """The filtered temperature of now."""
        return None if self._time_s is None else self.ambient_c + self._die + self._case

    @property
    def ambient_c(self) -> float:
        """The air as the model sees it: where the thermometer would settle without power."""
        return self._constants.theta[4] + self._misfit

    @property
    def die(self) -> Pole:
        """The fast pole."""
        return Pole(*self._constants.poles()[:2])

    @property
    def case(self) -> Pole:
        """The slow pole."""
        return Pole(*self._constants.poles()[2:])

    @property
    def c_per_w(self) -> float:
        """°C per watt in the long run: both poles."""
        return self.die.c_per_w + self.case.c_per_w

    @property
    def tau_s(self) -> float:
        """Mean time constant of a step, the poles weighted by their share; exact when there is only one."""
        r_die, tau_die, r_case, tau_case = self._constants.poles()
        return (r_die * tau_die + r_case * tau_case) / (r_die + r_case)

    @property
    def uncertainty(self) -> float:
        """Standard deviation of `c_per_w` as a share of it."""
        return self._spread

    @property
    def identified(self) -> bool:
        """True when the data, not the prior, say what a watt does: it moved, and what it did is pinned down."""
        moved = self._high_c - self._low_c >= max(3.0, 3.0 * self._step())
        return moved and self._spread <= _IDENTIFIED

    def predict(self, power_w: float, horizon_s: float) -> float | None:
        """°C after `horizon_s` of constant power from now; None before the first reading."""
        base, per_watt = self._response(_horizon(horizon_s))
        return None if self._time_s is None else base + per_watt * _power(power_w)

    def budget_w(self, limit_c: float, horizon_s: float) -> float | None:
        """The constant power that ends at `limit_c` exactly at the horizon; 0 when none is low enough.

        Over seconds this is more than `sustainable_w` while the case is cool, and less after a burst. None
        before the first reading.
        """
        base, per_watt = self._response(max(_horizon(horizon_s), 1e-3))
        return None if self._time_s is None else max(0.0, (limit_c - base) / per_watt)

    def sustainable_w(self, limit_c: float, horizon_s: float | None = None) -> float | None:
        """The constant power that holds `limit_c` for ever, or up to a horizon (then as `budget_w`)."""
        if horizon_s is not None:
            return self.budget_w(limit_c, horizon_s)
        return None if self._time_s is None else max(0.0, (limit_c - self.ambient_c) / self.c_per_w)

    def time_to(self, limit_c: float, power_w: float) -> float | None:
        """Seconds of constant power until `limit_c` is first reached: 0 when it is, None when it never is.

        None too before the first reading.
        """
        power = _power(power_w)
        if self._time_s is None:
            return None
        r_die, tau_die, r_case, tau_case = self._constants.poles()
        settled = self.ambient_c + power * (r_die + r_case) - limit_c
        fast = (self._die - power * r_die, tau_die)
        return _first_crossing(settled, fast, (self._case - power * r_case, tau_case))

    def _response(self, horizon_s: float) -> tuple[float, float]:
        """(°C at the horizon without power, °C that each watt adds)."""
        r_die, tau_die, r_case, tau_case = self._constants.poles()
        a, b = math.exp(-horizon_s / tau_die), math.exp(-horizon_s / tau_case)
        return self.ambient_c + self._die * a + self._case * b, r_die * (1.0 - a) + r_case * (1.0 - b)


def _joined(first: Block, second: Block) -> Block:
    """Two blocks as one: the mean power of both, the later temperature."""
    seconds = first[0] + second[0]
    joules = first[0] * first[1] + second[0] * second[1]
    return seconds, joules / seconds, second[2] if second[3] else first[2], first[3] + second[3]


def _horizon(seconds: float) -> float:
    if not seconds >= 0.0:
        raise UsageError(f"horizon_s is {seconds}; it must not be negative")
    return seconds


def _power(watts: float) -> float:
    if not 0.0 <= watts < math.inf:
        raise UsageError(f"power_w is {watts}; it must be finite and not negative")
    return watts


def _first_crossing(settled: float, fast: tuple[float, float], slow: tuple[float, float]) -> float | None:
    """The first t >= 0 at which settled + Σ amplitude e^{-t/τ} rises through 0; None if it never does.

    Two exponentials have one extremum at most, so the curve rises through 0 at most once: before a peak, or
    on the way to a positive end.
    """

    def above(t: float) -> float:
        return settled + fast[0] * math.exp(-t / fast[1]) + slow[0] * math.exp(-t / slow[1])

    if above(0.0) >= 0.0:
        return 0.0
    high = 40.0 * slow[1]
    if settled <= 0.0:
        ratio = -(fast[0] * slow[1]) / (slow[0] * fast[1]) if slow[0] else 0.0
        if ratio <= 1.0:
            return None
        high = math.log(ratio) / (1.0 / fast[1] - 1.0 / slow[1])
    if above(high) < 0.0:
        return None
    low = 0.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if above(middle) >= 0.0 else (middle, high)
    return high
