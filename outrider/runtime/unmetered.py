"""What stands in for a power meter and a thermometer where a device has none: its profile, and what ran.

Joules of rounds are the profile's, fewer when clocks are held back, which shows in the time that rounds take.
What is drawn follows from what ran, and how warm the body is from that, within what the system says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from outrider.power.body_estimate import BodyEstimate
from outrider.power.state import State
from outrider.targets.device import Device
from outrider.targets.physics import Work, dynamic_power, roofline_time

__all__ = ["Ladder", "Unmetered", "ladder_of", "unmetered"]

_CAUTION = 0.3  # standard deviations of the estimated temperature that are added to it
_SPAN_C = 30.0  # from headroom 0 to 1, as Android defines it
_SHORT_S = 1.0  # over which estimated power is averaged, and after which the body is followed
_LONG_S = 10.0  # of the past, of which it is known what was drawn
_COARSE = 0.1  # the step of headroom where the profile tells none
_SETTLED_S = 12.0  # a level that has held for so long is held by a trip
_ALPHA = 0.2  # of the moving average of how slow rounds are


@dataclass(frozen=True)
class Ladder:
    """How a device slows down by levels: times of a forward, and its dynamic joules, as shares of the first.

    `bounds[i]` are the temperatures of the body between which level i is held.
    """

    times: tuple[float, ...]
    joules: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...]

    def share(self, slowdown: float) -> float:
        """Dynamic joules of a forward that takes so many times as long as at full clocks."""
        above = bisect_right(self.times, slowdown)
        if above == 0:
            return self.joules[0]
        if above == len(self.times):
            return self.joules[-1]
        t0, t1 = self.times[above - 1], self.times[above]
        j0, j1 = self.joules[above - 1], self.joules[above]
        return j0 + (j1 - j0) * (slowdown - t0) / (t1 - t0)

    def level(self, slowdown: float) -> int | None:
        """The level that rounds run at; None between two."""
        nearest = min(range(len(self.times)), key=lambda i: abs(self.times[i] - slowdown))
        gap = min(
            (abs(t - self.times[nearest]) for i, t in enumerate(self.times) if i != nearest), default=inf
        )
        return nearest if abs(self.times[nearest] - slowdown) < 0.35 * gap else None


def ladder_of(device: Device, work: Work, unit: str | None = None) -> Ladder:
    """The ladder of a profile, for a forward of `work` on a unit (None: the one that decodes)."""
    policy, rates = device.throttle_policy(), device.rates(unit)
    levels = list(zip(policy.clock_steps, policy.memory_steps, strict=True))
    times = [roofline_time(work, rates, clock, memory) for clock, memory in levels]
    joules = [s * dynamic_power(work, s, rates, clock) for s, (clock, _) in zip(times, levels, strict=True)]
    skin = sorted((t for t in policy.trips if t.sensor == "skin"), key=lambda trip: trip.level)
    bounds = []
    for level in range(len(levels)):
        low = min((t.at_c - t.hysteresis_c for t in skin if t.level >= level), default=-inf)
        high = min((t.at_c for t in skin if t.level > level), default=inf)
        bounds.append((low if level else -inf, high))
    return Ladder(tuple(s / times[0] for s in times), tuple(j / joules[0] for j in joules), tuple(bounds))


@dataclass
class Unmetered:
    """Estimates power and temperature of a device that gives none, for one `Pacer`.

    `limit_c` is where the vendor's headroom is 1, `headroom_step` how coarse it is told.
    """

    ladder: Ladder
    body: BodyEstimate | None = None
    limit_c: float | None = None
    headroom_step: float = _COARSE
    slowdown: float = 1.0
    _fastest: dict[tuple[int, str | None, int], float] = field(default_factory=dict)
    _level: int | None = None
    _since_s: float = -inf
    _stepped_s: float = -inf
    _shown: tuple[float, float] = (0.0, 0.0)

    def saw(self, width: int, drafter: str | None, steps: int, seconds: float) -> None:
        """Learn from the time of a usual round how far clocks are held back."""
        key = (width, drafter, steps)
        fastest = min(
            self._fastest.get(key, inf), seconds / self.slowdown if key not in self._fastest else seconds
        )
        self._fastest[key] = fastest
        self.slowdown += _ALPHA * (max(seconds / fastest, 1.0) - self.slowdown)

    @property
    def share(self) -> float:
        """Of the profile's dynamic joules, what a forward takes at the clocks of now."""
        return self.ladder.share(self.slowdown)

    def filled(self, state: State, mean_w: Callable[[float], float]) -> State:
        """The state with an estimated power, and an estimated body where nothing says how warm it is.

        `mean_w` gives what was drawn on average in the last so many seconds.
        """
        if state.power_w is not None:
            return state
        state = replace(state, power_w=mean_w(_SHORT_S), power_scope="device", power_method="estimated")
        if self.body is None or state.skin_c is not None or state.die_c is not None:
            return state
        past_s = state.time_s - self._stepped_s
        if past_s >= _SHORT_S:
            self._follow(self.body, state, mean_w(min(past_s, _LONG_S)))
            self._shown = (self.body.temp_c, self.body.spread_c)
        return replace(state, skin_c=self._shown[0] + _CAUTION * self._shown[1], skin_method="estimated")

    def _follow(self, body: BodyEstimate, state: State, mean_w: float) -> None:
        body.step(state.time_s, mean_w)
        self._stepped_s = state.time_s
        bounds: list[tuple[float, float]] = []
        if state.headroom is not None and self.limit_c is not None:
            half = 0.5 * self.headroom_step
            low = self.limit_c - _SPAN_C * (1.0 - state.headroom + half)
            high = self.limit_c - _SPAN_C * (1.0 - state.headroom - half)
            bounds.append((low if state.headroom > 0.0 else -inf, high))
        level = self.ladder.level(self.slowdown)
        if level is not None and level != self._level:
            self._level, self._since_s = level, state.time_s
        if self._level is not None and state.time_s - self._since_s >= _SETTLED_S:
            bounds.append(self.ladder.bounds[self._level])
        for low, high in bounds:
            if low > -inf or high < inf:
                body.bound(low, high)


def body_of(device: Device) -> BodyEstimate:
    """An estimate that starts from a device's profile, at rest."""
    thermal = device.thermal
    return BodyEstimate(float(thermal.case_c_per_w), float(thermal.case_tau_s), float(device.idle_w))


def unmetered(device: Device, plain: Work, unit: str | None = None) -> Unmetered:
    """What stands in for the meters of a device, from its profile; `plain` is a plain forward."""
    sense = device.sensors.headroom
    return Unmetered(
        ladder_of(device, plain, unit),
        body_of(device),
        None if device.skin_limit_c is None else float(device.skin_limit_c),
        float(sense.step) if sense is not None and float(sense.step) > 0.0 else _COARSE,
    )
