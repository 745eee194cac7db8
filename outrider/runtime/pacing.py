"""Joins a monitor, the governor and the energy model for the engine: one question a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from outrider.contracts import Clock, Costs, Energy, Reading
from outrider.power.energy import Activity
from outrider.power.governor import Directive, Governor
from outrider.power.monitor import choose_power
from outrider.power.state import State
from outrider.runtime.decision_log import DecisionLog

__all__ = ["Pacer", "Telemetry", "Work"]

WINDOW_S = 1.0  # of activity and joules that the energy model is shown at once
LONGEST_WINDOW_S = 5.0  # a window that grew longer held a silence, and is thrown away
CLOCK_CHANGE = 0.05  # of the clock: joules change with it
CLOCK_HOLD_S = 5.0  # between two changes that are heeded


class Telemetry(Protocol):
    """What a pacer asks of a monitor (`power.monitor.Monitor`)."""

    def poll(self) -> State:
        """The machine now."""
        ...


class EnergyEstimate(Protocol):
    """What a pacer asks of an energy model (`power.energy.EnergyModel`)."""

    def observe(self, activity: Activity, joules: float) -> None:
        """Learn what an activity took."""
        ...

    def energy(self, widths: Sequence[int]) -> Energy | None:
        """Joules of rounds; None until enough is known."""
        ...


class _Sample(NamedTuple):
    """Of a power source: when it was read, watts, its counter where it has one, its name."""

    time_s: float
    power_w: float
    counter_j: float | None
    source: str


@dataclass
class Work:
    """What ran in a window: verify forwards by width, draft steps by drafter; `odd` work has no model."""

    seconds: float = 0.0
    verify: dict[int, int] = field(default_factory=dict)
    draft: dict[str, int] = field(default_factory=dict)
    odd: bool = False

    def add(self, width: int, drafter: str | None, steps: int) -> None:
        """Count a round."""
        self.verify[width] = self.verify.get(width, 0) + 1
        if drafter is not None and steps:
            self.draft[drafter] = self.draft.get(drafter, 0) + steps


class Pacer:
    """Asks the sensors, the governor and the energy model on behalf of the engine.

    Every call looks at the monitor first, so that heat and power are followed through pauses too. Power
    readings are integrated into windows of about a second, which teach the energy model what rounds take.
    With a `clock` the monitor is looked at no more often than every `least_s`.
    """

    def __init__(
        self,
        monitor: Telemetry,
        governor: Governor,
        energy_model: EnergyEstimate | None = None,
        log: DecisionLog | None = None,
        clock: Clock | None = None,
        least_s: float = 0.0,
    ) -> None:
        self.monitor, self.governor, self.energy_model, self.log = monitor, governor, energy_model, log
        self.state = State(float("-inf"))
        self._clock, self._least_s = clock, least_s
        self._looked_s = float("-inf")
        self.odd_w = 0.0  # what chunks of prompts drew lately
        self._ratio: float | None = None  # of the clock, when joules were last learned afresh
        self._clock_s = float("-inf")  # when that was
        self._energy: Energy | None = None
        self._widths: tuple[int, ...] = ()
        self._fresh = True  # the energy model has learnt since it was last asked
        self._sample: _Sample | None = None
        self._work = Work()
        self._joules = 0.0

    def directive(self, costs: Costs) -> Directive:
        """What the next round must respect."""
        state = self.poll()
        directive = self.governor.decide(state, costs)
        if self.log is not None:
            self.log.add(state, costs, directive)
        return directive

    def energy(self, verify_s: Mapping[int, float]) -> Energy | None:
        """Joules of rounds of any width up to 16, and of those measured; None where nothing tells them."""
        widths = tuple(sorted({*range(1, 17), *verify_s}))
        if self.energy_model is not None and (self._fresh or widths != self._widths):
            self._energy = self.energy_model.energy(widths)
            self._fresh, self._widths = False, widths
        return self._energy

    def observe(self, width: int, drafter: str | None, steps: int, odd: bool = False) -> None:
        """Count a round that ran: a verify forward of `width` and so many draft steps.

        `odd` marks work that is neither (a chunk of a prompt, a draft that catches up).
        """
        self._work.add(width, drafter, steps)
        self._work.odd |= odd
        self.poll()

    def poll(self) -> State:
        """Look at the monitor, and integrate power up to now."""
        if self._clock is not None:
            looked_s = self._clock()
            if looked_s - self._looked_s < self._least_s:
                return self.state
            self._looked_s = looked_s
        self.state = state = self.monitor.poll()
        self._see_clock(state)
        self._integrate(self._sample_of(state))
        return state

    def _sample_of(self, state: State) -> _Sample | None:
        """The newest figure of the power source that the state goes by, with the time when it was true."""
        if state.power_w is None:
            return None
        told = getattr(self.monitor, "readings", None)
        readings: Sequence[Reading] = told() if told is not None else ()
        power = choose_power(readings)
        if power is None or power.value is None:
            return _Sample(state.time_s, state.power_w, None, "")
        counters = (r.value for r in readings if r.source == power.source and r.quantity == "energy")
        return _Sample(power.time_s, power.value, next(counters, None), power.source)

    def _integrate(self, sample: _Sample | None) -> None:
        """Add the joules since the last sample: a counter's difference, else the power that led up to this one."""
        before, self._sample = self._sample, sample
        dt_s = sample.time_s - before.time_s if sample and before else -1.0
        if (
            sample is None
            or before is None
            or sample.source != before.source
            or not 0.0 <= dt_s <= LONGEST_WINDOW_S
        ):
            self._restart()
        elif dt_s > 0.0:
            counted = before.counter_j is not None and sample.counter_j is not None
            joules = (
                (sample.counter_j or 0.0) - (before.counter_j or 0.0) if counted else sample.power_w * dt_s
            )
            self._joules += max(joules, 0.0)
            if self._work.odd:
                self.odd_w = max(0.8 * self.odd_w, sample.power_w)
            self._work.seconds += dt_s
            if self._work.seconds >= WINDOW_S:
                self._teach()

    def _restart(self) -> None:
        self._work, self._joules = Work(), 0.0

    def _see_clock(self, state: State) -> None:
        """Joules that were learned at another clock count little."""
        ratio = state.clock_ratio
        if ratio is None or state.time_s - self._clock_s < CLOCK_HOLD_S:
            return
        if self._ratio is not None and abs(ratio - self._ratio) > CLOCK_CHANGE * self._ratio:
            forget = getattr(self.energy_model, "clock_changed", None)
            if forget is not None:
                forget()
                self._clock_s, self._fresh = state.time_s, True
                self._restart()
        self._ratio = ratio

    def _teach(self) -> None:
        work, joules = self._work, self._joules
        self._restart()
        if self.energy_model is not None and not work.odd and work.seconds <= LONGEST_WINDOW_S:
            self.energy_model.observe(Activity(work.seconds, work.verify, work.draft), joules)
            self._fresh = True

    def close(self) -> None:
        """End the decision log."""
        if self.log is not None:
            self.log.close()
