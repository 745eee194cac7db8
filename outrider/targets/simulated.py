"""A simulated device: work takes the time, energy and heat that physics says, on a virtual clock.

Nothing that comes from here was measured: whatever shows such a figure says "simulated".
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

from outrider.contracts import (
    BoolArray,
    Float32Array,
    Graph,
    IntArray,
    LogitsRequest,
    Output,
)
from outrider.errors import UsageError
from outrider.targets.device import Device, Figure
from outrider.targets.fake import VirtualClock
from outrider.targets.lanes import Lanes
from outrider.targets.model_cost import ModelCost
from outrider.targets.physics import (
    Rates,
    Temperatures,
    Work,
    battery_percent,
    dynamic_power,
    next_level,
    roofline_time,
    steady_state,
    step_temperatures,
)
from outrider.targets.scenario import AMBIENT_C, Event

__all__ = [
    "HeldGraph",
    "Machine",
    "SimulatedGraph",
    "perturbed",
]

CHARGE_LOSS = 0.1  # of a charger's power: heats the case
SYSTEM_MEMORY_SHARE = 0.3  # of all memory: the system and what it always runs
LOAD_MB_PER_S = 400.0
"""Assumed: how fast a model that was released is there again, from storage to its first forward."""
DRAM_SHARE = 0.8
"""Assumed: what units reach together, of the bandwidth on the data sheet."""
_TINY = 1e-9  # s; float noise of adding up times
_SPECIMEN = {
    *("bandwidth_gb_s", "sustained_gops", "busy_w", "pj_per_op", "launch_ms"),
    *("idle_w", "static_w", "dram_pj_per_byte"),
    *("die_c_per_w", "die_tau_s", "case_c_per_w", "case_tau_s"),
}


def perturbed(device: Device, seed: int, spread: float = 0.15) -> Device:
    """One specimen of a device: its rates, energies and thermal constants each off by up to `spread`.

    Whoever controls the specimen knows only the profile. Limits, trips and clocks are as designed.
    """
    if not 0.0 <= spread < 1.0:
        raise UsageError(f"spread is {spread}; it must be from 0 to below 1")
    rng = random.Random(seed)

    def vary(name: str, figure: Figure) -> Figure:
        if name not in _SPECIMEN:
            return figure
        return figure.scaled(1.0 + rng.uniform(-spread, spread), f"simulated specimen {seed}")

    changed: Device = _map_figures(device, "", vary)
    return changed


def _map_figures(record: Any, name: str, change: Callable[[str, Figure], Figure]) -> Any:
    if isinstance(record, Figure):
        return change(name, record)
    if is_dataclass(record) and not isinstance(record, type):
        parts = {f.name: _map_figures(getattr(record, f.name), f.name, change) for f in fields(record)}
        return replace(record, **parts)
    if isinstance(record, dict):
        return {key: _map_figures(part, key, change) for key, part in record.items()}
    return record


@dataclass(eq=False)
class _Job:
    """A forward under way; what is left of it is a share."""

    work: Work
    rates: Rates
    unit: str
    slower: float
    left: float = 1.0


@dataclass(eq=False)
class _Wait:
    """A time that passes at a constant power."""

    end_s: float
    power_w: float


def _turns(forwards: Sequence[_Job]) -> list[int]:
    """How many forwards share the unit of each."""
    return [sum(other.unit == job.unit for other in forwards) for job in forwards]


class Machine:
    """One device that works, warms, throttles and drains on a `VirtualClock`.

    `device` holds its true figures (see `perturbed`). It starts at rest in `ambient_c`, or where
    `preheated_w` would have brought it. `events` come at their times since the start. `jitter` is the
    relative standard deviation of how long a forward takes. Everything is fixed by `seed`.

    Work is done in steps that end at throttle polls and events; power is constant within a step, so heat is
    exact. Time that passes on the clock by other hands counts as rest.

    Threads may work at once, with `lanes` as the engine's `timeline`. Forwards on one unit then take turns, and
    those on several share the memory: what they ask for beyond its bandwidth is cut by the same factor (assumed).
    """

    def __init__(
        self,
        device: Device,
        ambient_c: float = 25.0,
        seed: int = 0,
        clock: VirtualClock | None = None,
        events: Sequence[Event] = (),
        battery: float = 100.0,
        preheated_w: float = 0.0,
        jitter: float = 0.01,
    ) -> None:
        low_c, high_c = AMBIENT_C
        if not low_c <= ambient_c <= high_c:
            raise UsageError(f"ambient is {ambient_c:g} °C; it must be between {low_c:g} and {high_c:g} °C")
        self.device = device
        self.clock = clock or VirtualClock()
        self.ambient_c = ambient_c
        self.load_w = self.bandwidth_taken = self.charge_w = 0.0
        self.memory_taken_mb = self.memory_pressure_percent = 0.0
        self.level = 0
        self.energy_j = 0.0
        self.busy_s = 0.0
        self.idle_w, self.static_w = float(device.idle_w), float(device.static_w)
        self.network, self.policy = device.network(), device.throttle_policy()
        self.temperatures = steady_state(self.network, max(self.idle_w, preheated_w), ambient_c)
        self.peak = self.temperatures
        capacity_wh = device.battery_wh
        self.battery_capacity_j = 3600.0 * capacity_wh if capacity_wh is not None else math.inf
        self.battery_j = battery / 100.0 * self.battery_capacity_j
        self.on_step: Callable[[], object] | None = None  # called after every step
        self._held: dict[str, float] = {}
        self._rates: dict[tuple[str | None, str | None], Rates] = {}
        self._events = list(events)
        self.lanes: Lanes[_Job | _Wait] = Lanes(self._step)
        self._rngs = {
            True: random.Random(seed),
            False: random.Random(seed + 1),
        }  # of our thread, and of others
        self._jitter = jitter
        self._start_s = self._time_s = self.clock()
        self._polls = 0
        self._power_w = self.idle_w
        self._settle()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the machine was made."""
        return self.clock() - self._start_s

    @property
    def power_w(self) -> float:
        """What is drawn in the latest step, other apps included."""
        return self._power_w

    @property
    def clock_ratio(self) -> float:
        """The units' clock, as a share of the full one."""
        return self.policy.clock_steps[self.level]

    @property
    def memory_clock_ratio(self) -> float:
        """The memory's clock, as a share of the full one."""
        return self.policy.memory_steps[self.level]

    @property
    def battery(self) -> float | None:
        """How full the battery is, %; None without one."""
        if math.isinf(self.battery_capacity_j):
            return None
        return battery_percent(self.battery_j, self.battery_capacity_j)

    @property
    def memory_available_mb(self) -> float:
        """What is left after the system, other apps and what is held."""
        own = 1e3 * self.device.memory_gb * (1.0 - SYSTEM_MEMORY_SHARE)
        return max(0.0, own - self.memory_taken_mb - sum(self._held.values()))

    def hold(self, name: str, megabytes: float) -> None:
        """Take memory, for a model that is loaded."""
        self._held[name] = megabytes

    def load(self, name: str, megabytes: float) -> None:
        """Read a model back from storage: it takes memory, and time at the power of an awake device."""
        self.hold(name, megabytes)
        self.catch_up()
        self.lanes.run(_Wait(self.clock() + megabytes / LOAD_MB_PER_S, self.static_w))

    def copy(self, nbytes: float) -> None:
        """Copy so much within memory, on behalf of a thread that waits: nothing is launched."""
        self.catch_up()
        moved_s = 2.0 * nbytes / (DRAM_SHARE * 1e9 * self.device.memory.peak_gb_s)
        self.lanes.run(_Wait(self.clock() + moved_s, self.static_w))

    def release(self, name: str) -> None:
        """Give back what `name` holds; nothing happens when it holds nothing."""
        self._held.pop(name, None)

    def rates(self, unit: str | None = None, precision: str | None = None) -> Rates:
        """The unit's true rates at its full clock."""
        key = (unit, precision)
        if key not in self._rates:
            self._rates[key] = self.device.rates(unit, precision)
        return self._rates[key]

    def execute(self, unit: str | None, work: Work, precision: str | None = None) -> float:
        """Do one forward on a unit (None: the device's decode unit); returns the seconds that it took."""
        self.catch_up()
        rates = self.rates(unit, precision)
        slower = math.exp(self._rngs[self.lanes.mine].gauss(0.0, self._jitter)) if self._jitter else 1.0
        begin = self.clock()
        self.lanes.run(_Job(work, rates, unit or self.device.decode_unit, slower))
        self.busy_s += self.clock() - begin
        return self.clock() - begin

    def idle(self, seconds: float) -> None:
        """Rest; this is the `sleep` of whoever paces itself."""
        self.catch_up()
        self.lanes.run(_Wait(self.clock() + seconds, self.idle_w))

    def _step(self, jobs: Sequence[_Job | _Wait]) -> _Job | _Wait:
        """Let time pass until one of the jobs is done."""
        while True:
            forwards = [job for job in jobs if isinstance(job, _Job)]
            seconds = self._seconds(forwards)
            left_s = [
                job.left * span for job, span in zip(forwards, seconds, strict=True) if job.left > _TINY
            ]
            waits = [job for job in jobs if isinstance(job, _Wait)]
            left_s += [left for job in waits if (left := job.end_s - self.clock()) > _TINY]
            if len(left_s) < len(jobs):
                break
            span = min(*left_s, self._until_next())
            self._advance(span, self._own_w(forwards, seconds, waits))
            for job, whole_s in zip(forwards, seconds, strict=True):
                job.left -= span / whole_s
        return next(
            job for job in jobs if (job.left if isinstance(job, _Job) else job.end_s - self.clock()) <= _TINY
        )

    def _seconds(self, forwards: Sequence[_Job]) -> list[float]:
        """How long whole forwards take at this moment, beside each other."""
        ours = 1.0 - self.bandwidth_taken
        alone = [self._roofline(job, ours) for job in forwards]
        if len(forwards) < 2:
            return alone
        turns = _turns(forwards)
        asked = sum(job.work.bytes / (span * n) for job, span, n in zip(forwards, alone, turns, strict=True))
        most = max(DRAM_SHARE * 1e9 * self.device.memory.peak_gb_s, *(job.rates.bytes_s for job in forwards))
        there = most * self.memory_clock_ratio * ours
        share = ours * min(1.0, there / asked)
        return [n * self._roofline(job, share) for job, n in zip(forwards, turns, strict=True)]

    def _roofline(self, job: _Job, bandwidth_share: float) -> float:
        ratios = (self.clock_ratio, self.memory_clock_ratio)
        return job.slower * roofline_time(job.work, job.rates, *ratios, bandwidth_share)

    def _own_w(self, forwards: Sequence[_Job], seconds: Sequence[float], waits: Sequence[_Wait]) -> float:
        """What is drawn while all this goes on."""
        if not forwards:
            return max(job.power_w for job in waits)
        each = zip(forwards, seconds, _turns(forwards), strict=True)
        dynamic = [
            dynamic_power(job.work, span / n, job.rates, self.clock_ratio) / n for job, span, n in each
        ]
        return self.static_w + sum(dynamic)

    def catch_up(self) -> None:
        """Count time that others let pass on the clock as rest."""
        behind = self.clock() - self._time_s
        if behind > _TINY:
            self.clock.now_s = self._time_s
            end = self._time_s + behind
            while (left := end - self.clock()) > _TINY:
                self._advance(min(left, self._until_next()), self.idle_w)

    def _until_next(self) -> float:
        """Seconds to the next throttle poll or event, whichever is first; above 0."""
        next_s = (self._polls + 1) * self.policy.poll_s
        if self._events:
            next_s = min(next_s, self._events[0].at_s)
        return max(next_s - (self._time_s - self._start_s), _TINY)

    def _advance(self, seconds: float, own_w: float) -> None:
        """Let time pass at constant power."""
        total_w = own_w + self.load_w
        self._power_w = total_w
        lost_w = CHARGE_LOSS * self.charge_w
        now = step_temperatures(
            self.network, self.temperatures, total_w, self.ambient_c, seconds, case_w=lost_w
        )
        self.temperatures = now
        self.energy_j += total_w * seconds
        gained_j = (self.charge_w - lost_w - total_w) * seconds
        self.battery_j = min(self.battery_capacity_j, max(0.0, self.battery_j + gained_j))
        self.clock.advance(seconds)
        self._time_s = self.clock()
        if now.die_c > self.peak.die_c or now.case_c > self.peak.case_c:
            self.peak = Temperatures(max(now.die_c, self.peak.die_c), max(now.case_c, self.peak.case_c))
        self._settle()
        if self.on_step is not None:
            self.on_step()

    def _settle(self) -> None:
        """What happens at this very moment: events first, then the throttle poll."""
        elapsed = self._time_s - self._start_s + _TINY
        while self._events and self._events[0].at_s <= elapsed:
            self._apply(self._events.pop(0))
        while (self._polls + 1) * self.policy.poll_s <= elapsed:
            self._polls += 1
            self.level = next_level(self.policy, self.level, self.temperatures)

    def _apply(self, event: Event) -> None:
        names = ("ambient_c", "load_w", "bandwidth_taken", "charge_w", "memory_taken_mb")
        for name in (*names, "memory_pressure_percent"):
            value = getattr(event, name)
            if value is not None:
                setattr(self, name, value)


class SimulatedGraph:
    """A real graph for its tokens, a `Machine` for its time, energy and heat.

    `cost` is what a forward takes; a narrower forward runs at the compiled width above it.
    """

    def __init__(
        self,
        inner: Graph,
        machine: Machine,
        cost: ModelCost,
        unit: str | None = None,
        precision: str | None = None,
    ) -> None:
        machine.rates(unit, precision)
        self.inner = inner
        self.machine = machine
        self.cost = cost
        self.unit = unit
        self.precision = precision
        self.vocab_size = inner.vocab_size
        self.max_context = inner.max_context
        self.widths = inner.widths
        self.hidden_layers = inner.hidden_layers

    @property
    def length(self) -> int:
        """Tokens committed to the KV cache."""
        return self.inner.length

    def forward(
        self,
        tokens: Sequence[int] | IntArray,
        positions: IntArray | None = None,
        mask: BoolArray | None = None,
        logits: LogitsRequest = "all",
        hidden: tuple[int, ...] = (),
        features: Float32Array | None = None,
    ) -> Output:
        """Run the real graph, and let the machine spend what it would take there."""
        output = self.inner.forward(tokens, positions, mask, logits, hidden, features)
        width = min((w for w in self.widths or () if w >= len(tokens)), default=len(tokens))
        self.machine.execute(self.unit, self.cost.work(width, self.inner.length), self.precision)
        return output

    def commit(self, rows: Sequence[int] | IntArray) -> None:
        """Keep these rows of the last forward, in this order."""
        self.inner.commit(rows)

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        self.inner.truncate(length)

    @property
    def keeps_rows(self) -> bool:
        """Whether the real graph can hand out rows of its cache."""
        return bool(getattr(self.inner, "keeps_rows", False))

    def keep(self, start: int) -> object:
        """A copy of the real graph's rows from `start` on, in the time that the device takes to copy its own."""
        self.machine.copy(self.cost.kv_bytes * (self.length - start))
        kept: object = cast(Any, self.inner).keep(start)
        return kept

    def bring_back(self, kept: object) -> None:
        """Commit what `keep` returned again."""
        before = self.length
        cast(Any, self.inner).bring_back(kept)
        self.machine.copy(self.cost.kv_bytes * (self.length - before))

    def close(self) -> None:
        """Close the real graph."""
        self.inner.close()


class HeldGraph(SimulatedGraph):
    """A simulated graph that holds memory of its machine as `role`, and can be closed and opened again there.

    The real graph stays open, and stays its owner's to close.
    """

    def __init__(self, inner: Graph, machine: Machine, cost: ModelCost, role: str) -> None:
        super().__init__(inner, machine, cost)
        self.role = role
        machine.hold(role, cost.resident_mb)

    def close(self) -> None:
        """Give the memory back."""
        self.machine.release(self.role)

    def reopen(self) -> HeldGraph:
        """Load it again, with an empty cache."""
        self.inner.truncate(0)
        self.machine.load(self.role, self.cost.resident_mb)
        return self
