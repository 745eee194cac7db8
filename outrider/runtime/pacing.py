"""Joins a monitor, the governor and the energy model for the engine: one question a round."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from outrider.contracts import Clock, Costs, Energy, Reading
from outrider.power.energy import Activity
from outrider.power.governor import Directive, Governor
from outrider.power.ledger import Ledger
from outrider.power.monitor import choose_power
from outrider.power.state import State
from outrider.runtime.decision_log import DecisionLog
from outrider.runtime.unmetered import Unmetered

__all__ = ["Pacer", "Telemetry", "Work"]

WINDOW_S = 1.0  # of activity and joules that the energy model is shown at once
LONGEST_WINDOW_S = 5.0  # a window that grew longer held a silence, and is thrown away
MOST_ODD = 0.35  # of a window, that may be prompts for the rest to teach anything
CLOCK_CHANGE = 0.05  # of the clock: joules change with it
PROMPT_SHARE = 0.5  # of a meter's interval, from which on it tells what prompts draw
CLOCK_HOLD_S = 5.0  # between two changes that are heeded
FOLLOW_S = 1.0  # in a pause, between two looks of the governor


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
    busy_s: float = 0.0  # in which that ran; the rest of the window was a pause
    odd: bool = False
    odd_s: float = 0.0  # of odd work whose joules are estimated,
    odd_j: float = 0.0  # so that what is left of the window can be learned from

    def add(self, width: int, drafter: str | None, steps: int) -> None:
        """Count a round."""
        self.verify[width] = self.verify.get(width, 0) + 1
        if drafter is not None and steps:
            self.draft[drafter] = self.draft.get(drafter, 0) + steps


class Pacer:
    """Asks the sensors, the governor and the energy model on behalf of the engine.

    Every call looks at the monitor first, so that heat and power are followed through pauses too. Power
    readings are integrated into windows of about a second, which teach the energy model what rounds take.
    With a `clock` the monitor is looked at no more often than every `least_s`, and a `ledger` is kept of what
    was drawn, so that a cap holds over every window.
    """

    def __init__(
        self,
        monitor: Telemetry,
        governor: Governor,
        energy_model: EnergyEstimate | None = None,
        log: DecisionLog | None = None,
        clock: Clock | None = None,
        least_s: float = 0.0,
        unmetered: Unmetered | None = None,
    ) -> None:
        self.monitor, self.governor, self.energy_model, self.log = monitor, governor, energy_model, log
        self.state = State(float("-inf"))
        self._clock, self._least_s = clock, least_s
        self._unmetered = unmetered if clock is not None else None
        self._estimated = False  # whether power is an estimate of this pacer
        self._looked_s = float("-inf")
        self._costs: Costs | None = None  # of the last question
        self._decided_s = float("-inf")
        self.ledger = Ledger() if clock is not None else None
        self.prompt_w: float | None = None  # beyond static power, as the meter shows it; None: unknown
        self._chunk_w = 0.0  # the estimate of the last one
        self._odd: deque[tuple[float, float, float]] = deque(maxlen=64)  # prompts: from, to, W as estimated
        self._ratio: float | None = None  # of the clock, when joules were last learned afresh
        self._clock_s = float("-inf")  # when that was
        self._energy: Energy | None = None
        self._nominal: Energy | None = None  # the same, as the energy model gave it
        self._widths: tuple[int, ...] = ()
        self._fresh = True  # the energy model has learnt since it was last asked
        self._sample: _Sample | None = None
        self._work = Work()
        self._joules = 0.0
        self._least_w = float("inf")

    def directive(self, costs: Costs) -> Directive:
        """What the next round must respect."""
        state = self.poll()
        directive = self.governor.decide(state, costs)
        self._costs, self._decided_s = costs, state.time_s
        if self.log is not None:
            self.log.add(state, costs, directive)
        return directive

    def follow(self) -> None:
        """Let the governor see a pause too: it would take the power at its end for that of all the time before."""
        state = self.poll()
        if self._costs is not None and state.time_s - self._decided_s >= FOLLOW_S:
            self.directive(self._costs)

    def energy(self, verify_s: Mapping[int, float]) -> Energy | None:
        """Joules of rounds of any width up to 16, and of those measured; None where nothing tells them."""
        widths = tuple(sorted({*range(1, 17), *verify_s}))
        if self.energy_model is not None and (self._fresh or widths != self._widths):
            self._energy = self.energy_model.energy(widths)
            self._fresh, self._widths = False, widths
            self._nominal = self._energy
        learned = getattr(self.energy_model, "intervals", 0) > 0
        if self._estimated and not learned and self._unmetered is not None and self._nominal is not None:
            self._energy = _scaled(self._nominal, self._unmetered.share)
        return self._energy

    def observe(
        self, width: int, drafter: str | None, steps: int, odd: bool = False, seconds: float = 0.0
    ) -> None:
        """Count a round that just ran: a verify forward of `width` and so many draft steps, in `seconds`.

        `odd` marks work that is neither (a chunk of a prompt, a draft that catches up).
        """
        if not odd:
            if self._unmetered is not None and seconds > 0.0:
                self._unmetered.saw(width, drafter, steps, seconds)
            self._work.add(width, drafter, steps)
            self._work.busy_s += seconds
        if self.ledger is not None and self._clock is not None and seconds > 0.0:
            now_s = self._clock()
            self.rest_until(now_s - seconds)
            watts = self.work_w(width, drafter, steps, odd, seconds)
            self.ledger.add(now_s - seconds, now_s, watts)
            if odd:
                self._chunk_w = watts
                self._work.odd_s += seconds
                self._work.odd_j += seconds * watts
                self._odd.append((now_s - seconds, now_s, watts))
        else:
            self._work.odd |= odd
        self.poll()

    def work_w(self, width: int, drafter: str | None, steps: int, odd: bool, seconds: float) -> float:
        """Estimated watts of such a round, all that is drawn included."""
        energy = self._energy
        if not odd and energy is not None and width in energy.verify_j and seconds > 0.0:
            drafts_j = steps * energy.draft_j.get(drafter or "", 0.0)
            return energy.static_w + (energy.verify_j[width] + drafts_j) / seconds
        if self.prompt_w is not None or energy is None or seconds <= 0.0:
            return self.rest_w + (self.prompt_w or 0.0)
        return max(energy.static_w + _wide_j(energy, width) / seconds, self._chunk_w)

    @property
    def now_s(self) -> float:
        """The time of the ledger."""
        return self._clock() if self._clock is not None else self.state.time_s

    @property
    def rest_w(self) -> float:
        """Estimated watts while nothing runs: what energy figures say, else the least that was seen."""
        if self._energy is not None:
            return self._energy.pause_w
        return self._least_w if self._least_w < float("inf") else 0.0

    def rest_until(self, now_s: float) -> None:
        """Write down that nothing ran until now."""
        if self.ledger is not None:
            end_s = self.ledger.end_s
            self.ledger.add(now_s if end_s is None else end_s, now_s, self.rest_w)

    def poll(self) -> State:
        """Look at the monitor, and integrate power up to now."""
        if self._clock is not None:
            looked_s = self._clock()
            if looked_s - self._looked_s < self._least_s:
                return self.state
            self._looked_s = looked_s
            self.rest_until(looked_s)
        state = self.monitor.poll()
        self._see_clock(state)
        self._integrate(self._sample_of(state))
        self.state = self._filled(state)
        return self.state

    def _filled(self, state: State) -> State:
        """The state with estimates in place of what no sensor gives, where there is a profile to estimate by."""
        if self._unmetered is None or self.ledger is None or self._energy is None:
            return state
        self._estimated = state.power_w is None
        return self._unmetered.filled(state, self.ledger.mean_w)

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
            self._least_w = min(self._least_w, max(joules, 0.0) / dt_s)
            self._book(before.time_s, sample.time_s, max(joules, 0.0))
            self._work.seconds += dt_s
            if self._work.seconds >= WINDOW_S:
                self._teach()

    def _book(self, begin_s: float, end_s: float, joules: float) -> None:
        """Let the ledger have what was measured, and learn what prompts draw."""
        if self.ledger is None:
            return
        spans = [(max(min(e, end_s) - max(b, begin_s), 0.0), watts) for b, e, watts in self._odd]
        odd_s = sum(span for span, _ in spans)
        share = odd_s / (end_s - begin_s)
        if share > PROMPT_SHARE:
            usual_j = self.ledger.joules(begin_s, end_s) - sum(span * watts for span, watts in spans)
            found_w = max((joules - usual_j) / odd_s - self.rest_w, 0.0)
            first_w = self._chunk_w - self.rest_w if self._energy is not None else found_w
            known_w = max(first_w, 0.0) if self.prompt_w is None else self.prompt_w
            self.prompt_w = known_w + 0.4 * min(share, 1.0) * (found_w - known_w)
        self.ledger.meter(begin_s, end_s, joules, learn=max(1.0 - share / PROMPT_SHARE, 0.0))

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
        known = not work.odd and work.odd_s <= MOST_ODD * work.seconds <= MOST_ODD * LONGEST_WINDOW_S
        if self.energy_model is not None and known:
            usual_s = work.seconds - work.odd_s
            paused_s = max(usual_s - work.busy_s, 0.0) if self.ledger is not None else 0.0
            usual = Activity(usual_s, work.verify, work.draft, paused_s)
            self.energy_model.observe(usual, max(joules - work.odd_j, 0.0))
            self._fresh = True

    def close(self) -> None:
        """End the decision log."""
        if self.log is not None:
            self.log.close()


def _scaled(energy: Energy, share: float) -> Energy:
    """The same with so much of the dynamic joules."""
    return replace(
        energy,
        verify_j={width: share * joules for width, joules in energy.verify_j.items()},
        draft_j={name: share * joules for name, joules in energy.draft_j.items()},
    )


def _wide_j(energy: Energy, width: int) -> float:
    """Joules of a forward that is wider than the widths that are known: on along the line of the last of them."""
    known = sorted(energy.verify_j)
    if width in energy.verify_j or len(known) < 2:
        return energy.verify_j.get(width, 0.0)
    low, high = known[len(known) // 2 - 1], known[-1]
    slope = (energy.verify_j[high] - energy.verify_j[low]) / (high - low)
    return energy.verify_j[high] + slope * (width - high)
