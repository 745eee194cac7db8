"""What heat, power, battery and memory ask of the plan: telemetry in, objective and limits out.

Pure: its time is that of the states it is shown, so the same states give the same directives. The levels and
their defaults follow AOSP's thermal status, the kernel's power allocator and a Raspberry Pi's fan; every
constant is a field of `Tuning`. No directive changes the text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import isfinite
from typing import Any, Literal

from outrider.contracts import Costs, Energy, Limits, Objective
from outrider.errors import UsageError
from outrider.power.draft_memory import DraftMemory
from outrider.power.heat import ThermalEstimate, Watch, thermal_prior
from outrider.power.power_cap import PowerCap
from outrider.power.state import State, credible
from outrider.power.thermal_model import ThermalModel
from outrider.power.trip_touch import TripTouch
from outrider.power.tuning import Gains, Tuning
from outrider.records import is_real

__all__ = ["BELOW_REST", "Directive", "Governor", "Level", "Policy"]

BURST_SPARE = 2.0  # times the power that is allowed: what allows that much does not feel a burst
BELOW_REST = "power_cap=below_rest"  # no pause can keep such a cap
_SAVING = Objective("energy")


class Level(IntEnum):
    """How much of the thermal headroom is used."""

    NOMINAL = 0
    WARM = 1
    HOT = 2
    CRITICAL = 3

    def __str__(self) -> str:
        """The name as it is written in traces."""
        return self.name.lower()


@dataclass(frozen=True)
class Policy:
    """What the user wants: an objective, and what must be kept.

    `power_cap_w` bounds mean power, `temp_limit_c` the hottest silicon (or the body, where no sensor sees the
    silicon). At `battery_floor_percent` and below, off the charger, decoding goes on for the fewest joules
    and within sustained power. `memory_limit_mb` bounds what weights and caches take.
    """

    objective: Literal["latency", "energy", "balanced"] = "latency"
    power_cap_w: float | None = None
    temp_limit_c: float | None = None
    battery_floor_percent: float | None = None
    memory_limit_mb: float | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown objective and limits that no machine can keep."""
        Objective(self.objective)
        bounds = {
            "power_cap_w": (self.power_cap_w, 0.01, 10_000.0, "watts"),
            "temp_limit_c": (self.temp_limit_c, 30.0, 120.0, "°C"),
            "battery_floor_percent": (self.battery_floor_percent, 0.0, 100.0, "percent"),
            "memory_limit_mb": (self.memory_limit_mb, 1.0, 1e9, "MB"),
        }
        for name, (value, low, high, unit) in bounds.items():
            if value is not None and not (is_real(value) and low <= value <= high):
                raise UsageError(
                    f"{name} is {value!r}; it must be a number between {low:g} and {high:g} {unit}"
                )


@dataclass(frozen=True)
class Directive:
    """What the planner must respect in the next round, and why.

    `flags` name what is not as one would wish: "energy=unknown", "telemetry=unknown", "limit=assumed", ...
    `cap_w` is the user's cap, where that is what binds `power_w`: it is to be kept over every ten seconds.
    `time_to_throttle_s` is a prediction at the power of now; None: no limit is being approached. `overlap` False
    forbids to draft beside a verify forward, which works for nothing at every rejection. `burst_s` is how long work may
    go on without a pause: silicon feels a second, a body does not.
    """

    objective: Objective = field(default_factory=Objective)
    level: Level = Level.NOMINAL
    power_w: float | None = None
    cap_w: float | None = None
    duty: float = 1.0
    k_max: int | None = None
    k_share: float = 1.0
    reference: Costs | None = None
    draft_loaded: bool = True
    time_to_throttle_s: float | None = None
    flags: tuple[str, ...] = ()
    reason: str = ""
    overlap: bool = True
    burst_s: float = 1.0

    def limit(self, limits: Limits) -> Limits:
        """The limits, narrowed to these."""
        powers = [watts for watts in (limits.power_w, self.power_w) if watts is not None]
        return replace(
            limits,
            k_max=limits.k_max if self.k_max is None else min(limits.k_max, self.k_max),
            power_w=min(powers, default=None),
            duty=min(limits.duty, self.duty),
            reference=self.reference or limits.reference,
            k_share=min(limits.k_share, self.k_share),
            overlap=limits.overlap if self.overlap else frozenset(),
            serial_allowed=limits.serial_allowed or not self.overlap,
        )

    def to_dict(self) -> dict[str, Any]:
        """What a decision log holds of it; costs are left out."""
        return {
            "level": str(self.level),
            "objective": self.objective.kind,
            "power_w": self.power_w,
            "duty": self.duty,
            "k_max": self.k_max,
            "k_share": self.k_share,
            "draft_loaded": self.draft_loaded,
            "overlap": self.overlap,
            "time_to_throttle_s": self.time_to_throttle_s,
            "flags": list(self.flags),
            "reason": self.reason,
        }


class Governor:
    """Turns states into directives under a policy.

    `device` is a profile (`targets.device.Device`, or anything with some of its `temp_limit_c`,
    `skin_limit_c`, `sustained_w` and `thermal`). The machine's heat is identified as it runs, from that
    profile on, by `die_model` and `skin_model`. `target_mb` and `draft_mb` are what weights and caches take.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        device: Any = None,
        *,
        tuning: Tuning | None = None,
        die_model: ThermalEstimate | None = None,
        skin_model: ThermalEstimate | None = None,
        target_mb: float = 0.0,
        draft_mb: float = 0.0,
    ) -> None:
        self.policy, self.device = policy or Policy(), device
        self.tuning = tuning or Tuning()
        self._objective = Objective(self.policy.objective)
        self.target_mb, self.draft_mb = target_mb, draft_mb
        self.level = Level.NOMINAL
        self._sustained_w = _figure(device, "sustained_w")
        self._die = self._watch("temp_limit_c", self.tuning.assumed_die_limit_c, self.tuning.die, die_model)
        self._skin = self._watch(
            "skin_limit_c", self.tuning.assumed_skin_limit_c, self.tuning.skin, skin_model
        )
        self._watched = ((self._die, self.tuning.die), (self._skin, self.tuning.skin))
        self._touch = TripTouch(_trips_at(device, self._skin.limit_c), self.tuning)
        self._cap = PowerCap(self.policy.power_cap_w, self.tuning)
        self._memory = DraftMemory(self.tuning, draft_mb, target_mb, self.policy.memory_limit_mb)
        self._changes: deque[float] = deque(maxlen=8)  # times of level changes
        self._held_s = 0.0  # when the level was last called for
        self._time_s: float | None = None
        self._best_clock = 0.0
        self._slow_s: float | None = None  # since when the clock is low
        self._reference: Costs | None = None  # what rounds cost when last cool
        self._was_cool = False  # until then, what they cost now stands in
        self._told = False  # whether any sensor has ever said how hot it is
        self._at_floor = False
        self._why = "cool"

    def _watch(self, limit: str, assumed_c: float, gains: Gains, model: ThermalEstimate | None) -> Watch:
        """A temperature under the user's limit, else the device's, else an assumed one."""
        named, trip = self.policy.temp_limit_c, _figure(self.device, limit)
        body = limit == "skin_limit_c"
        if trip is not None:
            trip -= 0.0 if body else self.tuning.trip_margin_c
        known = [c for c in (named, trip) if c is not None]
        prior = thermal_prior(self.device, body)
        return Watch(
            min(known, default=assumed_c),
            gains,
            self.tuning,
            assumed=not known,
            sustained_w=self._sustained_w,
            model=model or ThermalModel(prior),
            trusted=prior is not None,
        )

    def decide(self, state: State, costs: Costs | None = None) -> Directive:
        """The directive for the next round. States come in order of time; one shown twice changes nothing."""
        state = credible(state)
        energy = costs.energy if costs is not None else None
        dt_s = 0.0 if self._time_s is None else max(0.0, state.time_s - self._time_s)
        if isfinite(state.time_s) and (self._time_s is None or dt_s > 0.0):
            self._touch_trip(state, costs)
            self._see(state, dt_s, energy is not None)
        if costs is not None and costs.verify_s:
            self._was_cool |= self.level == Level.NOMINAL
            cool = self._reference if self._was_cool and self.level > Level.NOMINAL else None
            self._reference = costs if cool is None else _completed(cool, costs)
        return self._directive(state, energy)

    def _touch_trip(self, state: State, costs: Costs | None) -> None:
        if costs is None or costs.energy is None or state.skin_c is None:
            return
        step_s, step_j = costs.verify_s.get(1), costs.energy.verify_j.get(1)
        plain_j = None if step_s is None or step_j is None else step_j + costs.energy.static_w * step_s
        below_c = self._skin.limit_c - state.skin_c
        self._skin.shift_c = self._touch.step(state.time_s, below_c, state.clock_ratio, plain_j)

    def _see(self, state: State, dt_s: float, energy_known: bool) -> None:
        """Bring everything that remembers up to date with a new state."""
        in_watts = energy_known and state.power_w is not None
        self._time_s = state.time_s
        self._die.see(state.time_s, state.die_c, state.power_w, in_watts)
        self._skin.see(state.time_s, state.skin_c, state.power_w, in_watts)
        self._see_clock(state)
        self._move_level(state)
        self._cap.see(dt_s, state.power_w, energy_known)
        self._memory.see(state)
        self._see_battery(state)

    def _see_clock(self, state: State) -> None:
        if state.clock_ratio is None:
            self._slow_s = None
            return
        self._best_clock = max(self._best_clock, state.clock_ratio)
        if state.clock_ratio >= self.tuning.clock_warm * self._best_clock:
            self._slow_s = None
        elif self._slow_s is None:
            self._slow_s = state.time_s

    def _see_battery(self, state: State) -> None:
        floor, percent = self.policy.battery_floor_percent, state.battery_percent
        if floor is None or percent is None:
            return
        if state.charging:
            self._at_floor = False
        elif percent <= floor:
            self._at_floor = True
        elif percent > floor + self.tuning.battery_hysteresis_percent:
            self._at_floor = False

    def _move_level(self, state: State) -> None:
        """Up at once to what is called for; down one level, after a dwell below the eased thresholds."""
        tuning, now_s = self.tuning, state.time_s
        wanted, why = self._evidence(state)
        if wanted > self.level:
            self._change(wanted, now_s, why)
            return
        if wanted == self.level or self._evidence(state, eased=True)[0] >= self.level:
            self._held_s = now_s
            return
        recent = sum(now_s - then < tuning.changes_window_s for then in self._changes)
        if now_s - self._held_s >= tuning.dwell_s and recent <= tuning.most_changes:
            self._change(Level(self.level - 1), now_s, f"cooler: {why}")

    def _change(self, level: Level, now_s: float, why: str) -> None:
        self.level, self._held_s, self._why = level, now_s, why
        self._changes.append(now_s)

    def _evidence(self, state: State, eased: bool = False) -> tuple[Level, str]:
        """The level that the readings call for; `eased` asks as if they were a little hotter."""
        tuning = self.tuning
        level, why = Level.NOMINAL, "cool"
        ease_c = (tuning.hysteresis_c, tuning.critical_hysteresis_c) if eased else (0.0, 0.0)
        for name, watch in (("die", self._die), ("skin", self._skin)):
            found = self._level_of(watch.used(ease_c[0]), watch.used(ease_c[1]))
            found = min(found, Level.WARM) if watch.assumed else found
            if found > level:
                level, why = found, f"{name} at {watch.temp_c:.1f} of {watch.limit_c:g} °C"
        if state.headroom is not None:
            ease = (tuning.hysteresis_headroom, tuning.critical_hysteresis_headroom) if eased else (0.0, 0.0)
            found = self._level_of(state.headroom + ease[0], state.headroom + ease[1])
            if found > level:
                level, why = found, f"headroom at {state.headroom:.2f} of 1"
        held = self._held_back(state)
        if held > level:
            level, why = held, "the system holds the clock back"
        if level == Level.NOMINAL and self._is_blind(state):
            level, why = Level.WARM, "no reading says how hot it is"
        return level, why

    def _level_of(self, used: float | None, used_for_critical: float | None) -> Level:
        if used is None or used_for_critical is None or used < self.tuning.warm_at:
            return Level.NOMINAL
        if used < self.tuning.hot_at:
            return Level.WARM
        return Level.HOT if used_for_critical < self.tuning.critical_at else Level.CRITICAL

    def _held_back(self, state: State) -> Level:
        """What a throttle bit or a lasting drop of the clock calls for, whatever the temperature says."""
        tuning, throttle = self.tuning, state.throttle or 0.0
        level = (
            Level.NOMINAL if throttle <= 0.0 else Level.WARM if throttle < tuning.throttle_hot else Level.HOT
        )
        if self._slow_s is None or state.time_s - self._slow_s < tuning.clock_hold_s:
            return level
        share = (state.clock_ratio or 0.0) / self._best_clock
        shares = [used for used in (self._die.used(), self._skin.used()) if used is not None]
        warm = max(shares, default=1.0) >= tuning.clock_cool
        return max(level, Level.HOT if share < tuning.clock_hot and warm else Level.WARM)

    def _is_blind(self, state: State) -> bool:
        """Heat was told once and is not now, or must be kept below a limit and never was told."""
        if any(value is not None for value in (state.die_c, state.skin_c, state.headroom)):
            self._told = True
            return False
        return self._told or bool(state.stale) or self.policy.temp_limit_c is not None

    def _bound(self, energy_known: bool) -> float | None:
        """The least of the power limits of now, before the measured power corrects it."""
        bounds = [self.policy.power_cap_w]
        if energy_known:
            bounds += [watch.budget_w for watch in (self._die, self._skin)]
            if self._at_floor:
                bounds.append(self._sustained_w)
        return min((watts for watts in bounds if watts is not None), default=None)

    def _directive(self, state: State, energy: Energy | None) -> Directive:
        level, tuning, energy_known = self.level, self.tuning, energy is not None
        power_w = self._bound(energy_known)
        duty = min(self._die.duty, self._skin.duty, self._cap.duty)
        if level == Level.CRITICAL and duty >= 1.0 and not self._holds():
            duty = tuning.critical_duty
        saving = level >= tuning.saving_level or self._at_floor
        k_share, k_max = 1.0, None
        if not energy_known:
            k_share = tuning.hot_share if level >= Level.HOT else 1.0
            k_max = tuning.critical_k if level == Level.CRITICAL else None
        loaded = self._memory.loaded
        times = [watch.time_to_limit_s for watch in (self._die, self._skin)]
        return Directive(
            objective=_SAVING if saving else self._objective,
            level=level,
            power_w=power_w
            if power_w is None or power_w != self.policy.power_cap_w
            else power_w * self._cap.trim,
            cap_w=power_w if power_w == self.policy.power_cap_w else None,
            duty=duty,
            k_max=k_max,
            k_share=k_share,
            reference=self._reference if level > Level.NOMINAL else None,
            draft_loaded=loaded,
            time_to_throttle_s=min((s for s in times if s is not None), default=None),
            flags=self._flags(state, energy),
            reason=self._why,
            overlap=energy_known or level < Level.HOT,
            burst_s=self._burst_s(power_w),
        )

    def _burst_s(self, power_w: float | None) -> float:
        """How long work may go on without a pause, by what is near to binding it."""
        held = [(watch.budget_w, gains.burst_s) for watch, gains in self._watched]
        near = [s for watts, s in held if watts is not None and watts <= BURST_SPARE * (power_w or 0.0)]
        return min(near, default=self.tuning.die.burst_s)

    def _holds(self) -> bool:
        """Whether a temperature is held by a regulator of its own."""
        return any(watch.temp_c is not None and not watch.assumed for watch in (self._die, self._skin))

    def _flags(self, state: State, energy: Energy | None) -> tuple[str, ...]:
        cap_w, energy_known = self.policy.power_cap_w, energy is not None
        seen = [watch for watch in (self._die, self._skin) if watch.temp_c is not None]
        unmet = cap_w is not None and not energy_known and state.power_w is None
        named = {
            "energy=unknown": not energy_known,
            "power=estimated": state.power_method == "estimated",
            "temperature=estimated": state.skin_method == "estimated",
            "telemetry=unknown": self._is_blind(state),
            "telemetry=none": not self._told and not self._is_blind(state),
            "limit=assumed": bool(seen) and all(watch.assumed for watch in seen),
            "power_cap=unmeasured": unmet,
            BELOW_REST: cap_w is not None and energy is not None and cap_w < energy.pause_w,
            "battery=floor": self._at_floor,
            "memory=" + self._memory.why: not self._memory.loaded,
        }
        return tuple(flag for flag, holds in named.items() if holds)


def _trips_at(device: Any, limit_c: float) -> bool:
    """Whether a device profile has the system throttle at this temperature of the body."""
    throttle = getattr(device, "throttle_policy", None)
    trips = throttle().trips if throttle is not None else ()
    return any(trip.sensor == "skin" and abs(trip.at_c - limit_c) <= 0.1 for trip in trips)


def _completed(cool: Costs, now: Costs) -> Costs:
    """The costs of the cool machine, with what was first measured since, as the cool machine would have it."""
    if cool.verify_s.keys() >= now.verify_s.keys() and cool.draft_s.keys() >= now.draft_s.keys():
        return cool
    both = [width for width in now.verify_s if width in cool.verify_s]
    faster = cool.verify_s[both[0]] / now.verify_s[both[0]] if both else 1.0
    verify_s = {width: faster * seconds for width, seconds in now.verify_s.items()} | dict(cool.verify_s)
    draft_s = {name: faster * seconds for name, seconds in now.draft_s.items()} | dict(cool.draft_s)
    return replace(cool, verify_s=verify_s, draft_s=draft_s)


def _figure(device: Any, name: str) -> float | None:
    """A figure of a device profile: a number, or a record with a `value`; None when there is none."""
    found = getattr(device, name, None)
    found = getattr(found, "value", found)
    return None if found is None else float(found)
