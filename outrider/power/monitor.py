"""The sampler: many sensors, each at its own pace, and what they say distilled to one `State`.

What blocks: commands have time limits of their own, so `poll` waits at most for those. A file of the kernel
that never answers would hold whoever reads it; the thread of `start` is therefore left behind when one read
takes longer than `BLOCKED_S`, the sensor is reported and not asked before it answers, and a new thread reads
the rest (whoever asks for `state` starts it).
Python cannot end a blocked thread; it is a daemon and keeps no process alive.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from outrider.contracts import Clock, Quantity, Reading
from outrider.power.sensors.replay import DEFAULT_PERIOD_S, Replay
from outrider.power.sensors.system import Sensor
from outrider.power.state import State
from outrider.power.telemetry import read_telemetry
from outrider.records import is_finite

__all__ = ["BLOCKED_S", "STALE_PERIODS", "Monitor", "choose_power", "distill", "open_telemetry", "plausible"]

BLOCKED_S = 5.0
STALE_PERIODS = 3
_EARLY = 0.125  # of its period a sensor may be read before its time, so that one wake-up of the thread serves several
_RATE_S = 1.0  # power from an energy counter is a mean over at least this long

_RANGES: Mapping[str, tuple[float, float]] = {
    "power": (-2e3, 2e3),
    "energy": (0.0, 1e12),
    "temperature": (-40.0, 125.0),
    "headroom": (0.0, 5.0),
    "throttle": (0.0, 1.0),
    "clock": (0.0, 2e10),
    "clock_limit": (0.0, 2e10),
    "clock_max": (1.0, 2e10),
    "battery": (0.0, 100.0),
    "charging": (0.0, 1.0),
    "memory_available": (0.0, 1e9),
    "memory_limit": (0.0, 1e9),
    "memory_used": (0.0, 1e9),
    "memory_pressure": (0.0, 100.0),
    "memory_events": (0.0, 1e15),
}
_DIE_SCOPES = ("die", "package", "core", "soc")
_POWER_RANKS = {"module": 0, "device": 0, "soc": 1, "package": 2, "battery": 4}
_METHOD_RANKS = {"estimated": 10, "simulated": 20}

log = logging.getLogger(__name__)
Key = tuple[str, Quantity]
Listener = Callable[[Sequence[Reading]], object]


def plausible(reading: Reading) -> bool:
    """True when there is a finite value within what its quantity can be (a die: -40..125 °C)."""
    low, high = _RANGES.get(reading.quantity, (1.0, 0.0))  # of an unknown quantity nothing is plausible
    return reading.value is not None and is_finite(reading.value) and low <= reading.value <= high


def distill(readings: Iterable[Reading], now_s: float, periods: Mapping[str, float] | None = None) -> State:
    """One `State` from the readings of all sources, in any order, several of one source allowed.

    Of each source and quantity the newest plausible reading counts, and only while it is at most 3 of its
    source's `periods` old (s, by source; default 1 s). None, NaN and implausible figures never count.
    `stale` names what was known and is not, since sources fell silent; a source that says why it has no
    value is not silent, it takes its word back.
    """
    readings = list(readings)
    newest = _newest(readings)
    periods = periods or {}
    fresh = [
        reading
        for reading in newest.values()
        if abs(now_s - reading.time_s) <= STALE_PERIODS * periods.get(reading.source, DEFAULT_PERIOD_S) + 1e-9
    ]
    silent = {quantity for _, quantity in newest.keys() - _withdrawn(readings, newest)}
    by = {quantity: [r for r in fresh if r.quantity == quantity] for quantity in _RANGES}
    power = choose_power(by["power"])
    charging = _largest(by["charging"])
    return State(
        time_s=now_s,
        die_c=_largest(by["temperature"], _DIE_SCOPES),
        skin_c=_first(_largest(by["temperature"], ("skin",)), _largest(by["temperature"], ("battery",))),
        headroom=_largest(by["headroom"]),
        throttle=_largest(by["throttle"]),
        clock_ratio=_clock_ratio(fresh),
        power_w=power.value if power else None,
        power_scope=power.scope if power else "",
        power_method=power.method if power else "",
        battery_percent=min(_values(by["battery"]), default=None),
        charging=None if charging is None else charging > 0,
        memory_available_mb=_memory_available(fresh),
        memory_pressure_percent=_largest(by["memory_pressure"]),
        memory_events=_largest(by["memory_events"]),
        stale=tuple(sorted(silent - {reading.quantity for reading in fresh})),
    )


def choose_power(readings: Iterable[Reading]) -> Reading | None:
    """The one power figure to go by: sources are never added, for they overlap.

    Trust falls from the module's or device's input over the chip and a package counter to the battery;
    estimates come after all that is measured, simulated figures last. Equals: by name, so that the choice does
    not flicker, the CPU's before a graphics card's. A charging battery does not show the load, and a rail, a
    core or the memory alone is not the machine: a cap held by it would be no cap.
    """

    def rank(reading: Reading) -> tuple[int, bool, str]:
        trust = _POWER_RANKS[reading.scope] + _METHOD_RANKS.get(reading.method, 0)
        return trust, reading.source.startswith("nvml"), reading.source

    known = [r for r in readings if r.quantity == "power" and r.scope in _POWER_RANKS and plausible(r)]
    usable = [
        r for r in known if r.value is not None and (r.value > 0 or (r.value == 0 and r.scope != "battery"))
    ]
    return min(usable, key=rank, default=None)


def _newest(readings: Iterable[Reading]) -> dict[Key, Reading]:
    """The newest plausible reading of each source and quantity; of two with one time, the later in order."""
    newest: dict[Key, Reading] = {}
    for reading in readings:
        key = (reading.source, reading.quantity)
        if plausible(reading) and (key not in newest or reading.time_s >= newest[key].time_s):
            newest[key] = reading
    return newest


def _withdrawn(readings: Iterable[Reading], newest: Mapping[Key, Reading]) -> set[Key]:
    """What has been said to be unknown since its newest value."""
    keys = (((r.source, r.quantity), r.time_s) for r in readings if not plausible(r))
    return {key for key, time_s in keys if key in newest and time_s >= newest[key].time_s}


def _values(readings: Iterable[Reading], scopes: tuple[str, ...] | None = None) -> list[float]:
    return [r.value for r in readings if r.value is not None and (scopes is None or r.scope in scopes)]


def _largest(readings: Iterable[Reading], scopes: tuple[str, ...] | None = None) -> float | None:
    return max(_values(readings, scopes), default=None)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _by_source(readings: Iterable[Reading]) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for reading in readings:
        if reading.value is not None:
            table.setdefault(reading.source, {})[reading.quantity] = reading.value
    return table


def _clock_ratio(fresh: Iterable[Reading]) -> float | None:
    """The most restricted unit. What a unit may run at says more than what it runs at, which falls at rest."""
    ratios = [
        min(1.0, now / figures["clock_max"])
        for figures in _by_source(fresh).values()
        if "clock_max" in figures and (now := figures.get("clock_limit", figures.get("clock"))) is not None
    ]
    return min(ratios, default=None)


def _memory_available(fresh: Sequence[Reading]) -> float | None:
    """The least of what the machine can give and of what each limit leaves, in MB."""
    free = _values(r for r in fresh if r.quantity == "memory_available")
    for figures in _by_source(fresh).values():
        if "memory_limit" in figures and "memory_used" in figures:
            free.append(max(0.0, figures["memory_limit"] - figures["memory_used"]))
    return min(free, default=None)


class _Rates:
    """Power from energy counters: the mean over the last second or more, never across a reset or a gap."""

    def __init__(self) -> None:
        self._past: dict[str, list[Reading]] = {}

    def power(self, reading: Reading, period_s: float) -> Reading | None:
        """The power that a new counter reading (J) shows with those before it, if they tell."""
        past = self._past.setdefault(reading.source, [])
        value, time_s = reading.value, reading.time_s
        if value is None or (past and time_s <= past[-1].time_s):
            return None
        gap = past and time_s - past[-1].time_s > STALE_PERIODS * period_s
        if gap or (past and value < (past[-1].value or 0.0)):
            past.clear()
        past.append(reading)
        while len(past) > 2 and time_s - past[1].time_s >= _RATE_S:
            past.pop(0)
        first = past[0]
        if len(past) < 2 or time_s - first.time_s < min(_RATE_S, period_s):
            return None
        watts = (value - (first.value or 0.0)) / (time_s - first.time_s)
        return Reading(reading.source, "power", watts, reading.scope, reading.method, time_s)


class _Slot:
    """One sensor with its pace. A read that takes more than half its period doubles the period."""

    def __init__(self, sensor: Sensor, interval_s: float) -> None:
        self.sensor = sensor
        self.least_s = max(float(sensor.period_s), interval_s)
        self.period_s = self.least_s
        self.due_s = -math.inf
        self.blocked = False

    def plan(self, began_s: float, ended_s: float) -> None:
        """Set when to read next: on the grid of the first read, whose points that have passed are left out."""
        spent_s = ended_s - began_s
        if spent_s > self.period_s / 2:
            self.period_s *= 2
        elif self.period_s > self.least_s and spent_s < self.period_s / 8:
            self.period_s = max(self.least_s, self.period_s / 2)
        due_s = self.due_s if math.isfinite(self.due_s) else began_s
        missed = max(0.0, (ended_s - due_s) // self.period_s)
        self.due_s = due_s + (missed + 1.0) * self.period_s


def _report_key(slot: _Slot) -> Key:
    return f"monitor:{slot.sensor.name}", "power"


class Monitor:
    """Reads sensors, each when its period has passed, and keeps the newest readings of each source.

    Either `poll` is called now and then (on any clock), or `start` and `stop` (or a `with` block) sample in
    one thread. `listeners` get the readings of each read as they come; a listener that raises is taken out
    and logged. `interval_s` is the shortest time between two reads of a sensor. A sensor that raises is
    reported as a reading without value, named `monitor:<sensor>`, and asked again.
    """

    def __init__(
        self,
        sensors: Sequence[Sensor],
        clock: Clock = time.monotonic,
        interval_s: float = 0.1,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.periods: dict[str, float] = {}  # s, by source
        self.listeners: list[Listener] = []
        self.failed_listeners: list[tuple[Listener, Exception]] = []
        self.reads = 0
        self._clock = clock
        self._slots = [_Slot(sensor, interval_s) for sensor in sensors]
        self._newest: dict[Key, Reading] = {}  # with or without value
        self._good: dict[Key, Reading] = {}  # the newest plausible
        self._distilled: State | None = None  # None: a reading has come since
        self._holds_until_s = -math.inf
        self._rates = _Rates()
        self._lock = threading.Lock()
        self._watch = threading.Lock()  # held by the one that gives up on a blocked read
        self._stop = threading.Event()
        self._sleep = sleep or self._stop.wait
        self._thread: threading.Thread | None = None
        self._reading: tuple[_Slot, float] | None = None
        self._spent_s = 0.0
        self._began_s: float | None = None

    @property
    def sensors(self) -> list[Sensor]:
        """The sensors, in the order in which they are read."""
        return [slot.sensor for slot in self._slots]

    @property
    def overhead_share(self) -> float:
        """Seconds spent reading over seconds since the first read; 0 before it."""
        if self._began_s is None:
            return 0.0
        elapsed_s = self._clock() - self._began_s
        return self._spent_s / elapsed_s if elapsed_s > 0 else 0.0

    def poll(self) -> State:
        """Read what is due, in this thread unless one was started, and return the state of now."""
        if self._thread is None:
            self._read_due()
        return self.state()

    def state(self) -> State:
        """What the readings so far say about now."""
        self._supervise()
        now_s = self._clock()
        with self._lock:
            if self._distilled is None or not self._distilled.time_s <= now_s < self._holds_until_s:
                readings = [*self._good.values(), *self._newest.values()]
                self._distilled = distill(readings, now_s, self.periods)
                self._holds_until_s = self._next_change(now_s)
            return replace(self._distilled, time_s=now_s)

    def _next_change(self, now_s: float) -> float:
        """Before when the same readings make the same state: one of them becomes stale then, or fresh."""
        ends = (r.time_s + STALE_PERIODS * self.periods[r.source] for r in self._good.values())
        starts = (r.time_s - STALE_PERIODS * self.periods[r.source] for r in self._good.values())
        return min((t - 1e-6 for t in (*ends, *starts) if t >= now_s - 1e-6), default=math.inf)

    def readings(self) -> list[Reading]:
        """The newest reading of each source and quantity, with a value or with the reason why not."""
        with self._lock:
            return list(self._newest.values())

    def start(self) -> Monitor:
        """Sample in a thread of this monitor until `stop`."""
        if self._thread is None:
            self._stop.clear()
            self._spawn()
        return self

    def stop(self) -> None:
        """End the thread and wait for it, and close what sensors hold open (those with a `close`).

        A thread that a blocked read holds is left behind and logged.
        """
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join(BLOCKED_S)
            if thread.is_alive():
                log.warning("a sensor did not return within %g s; its thread is left behind", BLOCKED_S)
        for sensor in self.sensors:
            close = getattr(sensor, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self) -> None:
        self._thread = threading.Thread(target=self._sample, name="outrider-monitor", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        me = threading.current_thread()
        while not self._stop.is_set() and self._thread is me:
            self._read_due()
            due_s = min((slot.due_s for slot in self._slots if not slot.blocked), default=math.inf)
            self._sleep(max(0.0, min(due_s - self._clock(), 1.0)))

    def _read_due(self) -> None:
        owner = self._thread
        for slot in self._slots:
            if self._thread is not owner:
                return  # stopped, or another thread has taken over
            always = owner is None and slot.sensor.period_s == 0  # a replay; only a thread needs a pace
            early_s = 1e-6 if owner is None else _EARLY * slot.period_s
            if not slot.blocked and (always or self._clock() >= slot.due_s - early_s):
                self._read(slot)

    def _read(self, slot: _Slot) -> None:
        began_s = self._clock()
        self._began_s = began_s if self._began_s is None else self._began_s
        self._reading = (slot, began_s)
        try:
            readings = list(slot.sensor.read())
            self._newest.pop(_report_key(slot), None)
        except Exception as error:  # whatever a sensor does, the others go on
            readings = [self._report(slot, f"the sensor failed: {type(error).__name__}: {error}")]
        ended_s = self._clock()
        if slot.blocked:
            slot.blocked = False  # it did come back, too late for this thread
        else:
            self._reading = None
        slot.plan(began_s, ended_s)
        self._spent_s += ended_s - began_s
        self.reads += 1
        self._keep(readings, slot)
        self._tell(readings)

    def _report(self, slot: _Slot, reason: str) -> Reading:
        source, quantity = _report_key(slot)
        if (source, quantity) not in self._newest:
            log.warning("%s: %s", slot.sensor.name, reason)
        return Reading(source, quantity, None, "process", "instant", self._clock(), reason)

    def _keep(self, readings: Sequence[Reading], slot: _Slot) -> None:
        own: Mapping[str, float] = getattr(slot.sensor, "periods", {})
        counters = False
        with self._lock:
            self._distilled = None
            for reading in readings:
                period_s = slot.period_s
                if own:
                    period_s = max(period_s, own.get(reading.source, 0.0))
                self.periods[reading.source] = period_s
                counters |= reading.quantity == "energy"
                self._keep_one(reading)
            if counters:
                self._keep_rates(readings)

    def _keep_rates(self, readings: Sequence[Reading]) -> None:
        """Power from the counters of sources that tell no power themselves."""
        direct = {r.source for r in readings if r.quantity == "power" and plausible(r)}
        for reading in readings:
            if reading.quantity == "energy" and plausible(reading) and reading.source not in direct:
                rate = self._rates.power(reading, self.periods[reading.source])
                if rate is not None:
                    self._keep_one(rate)

    def _keep_one(self, reading: Reading) -> None:
        """Newest wins; a source's time never goes back."""
        key = (reading.source, reading.quantity)
        known = self._newest.get(key)
        if known is not None and reading.time_s < known.time_s:
            return
        self._newest[key] = reading
        if plausible(reading):
            self._good[key] = reading

    def _tell(self, readings: Sequence[Reading]) -> None:
        for listener in list(self.listeners):
            try:
                listener(readings)
            except Exception as error:  # a full disk must not end the sampling
                self.listeners.remove(listener)
                self.failed_listeners.append((listener, error))
                log.warning("a listener of the monitor failed and was taken out: %s", error)

    def _supervise(self) -> None:
        """Give up on a read that holds the thread, and go on in a new one."""
        if self._thread is None or threading.current_thread() is self._thread:
            return
        with self._watch:
            reading = self._reading
            if reading is None or self._clock() - reading[1] < BLOCKED_S:
                return
            slot, self._reading = reading[0], None
            slot.blocked = True
        report = self._report(slot, f"no answer within {BLOCKED_S:g} s; it is not asked before it answers")
        self._keep([report], slot)
        self._tell([report])
        self._spawn()


def open_telemetry(path: str | Path, clock: Clock = time.monotonic, start_s: float | None = None) -> Monitor:
    """A `Monitor` that plays a recorded trace back by its own relative time, from the first poll on.

    Raises TelemetryError when the file is no telemetry trace.
    """
    trace = read_telemetry(path)
    told = trace.header.get("interval_s")
    interval_s = float(told) if isinstance(told, int | float) and told > 0 else 0.1
    return Monitor([Replay(trace, clock, start_s)], clock, interval_s)
