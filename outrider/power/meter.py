"""Energy over named windows, from whatever source is there, with what may be wrong about it.

Readings come in as a monitor's listener (or by `feed`); `begin` and `end` mark windows, which may nest and
overlap. A window's energy comes from one source, the most trusted that covers it; scopes are never summed.

* A counter is read at the edges of the window, interpolated between its true timestamps. It goes on counting
  through a gap inside, so only a gap at an edge costs coverage.
* Power is integrated by trapezoids over true timestamps. A gap of more than 3 periods is not bridged.

`covered_j` is what was seen. `energy_j` is that, scaled by 1 / coverage to the whole window, which assumes
that the part not seen drew the same mean power; below a coverage of 0.9 there is no total, with a reason.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from outrider.contracts import Clock, Reading
from outrider.errors import UsageError
from outrider.power.monitor import plausible

__all__ = [
    "TRUST",
    "CounterFacts",
    "ErrorBudget",
    "Integral",
    "Measured",
    "Meter",
    "Series",
    "Window",
    "integrate",
    "trust_rank",
]

LEAST_COVERAGE = 0.9
GAP_PERIODS = 3.0
FEW_SAMPLES = 20
_MOST_W = 1000.0  # no device of this kind draws more: faster counters wrapped twice, were reset, or err

TRUST = {
    1: "external analyser",
    2: "module or device input",
    3: "package counter",
    4: "rail or core subset",
    5: "battery",
    6: "estimate",
    7: "simulated",
}
"""How far a figure is trusted, best first."""

_SCOPE_RANK = {"module": 2, "device": 2, "package": 3, "soc": 3, "battery": 5}
_METHOD_RANK = {"estimated": 6, "simulated": 7}


def trust_rank(reading: Reading) -> int:
    """Where a reading stands in `TRUST`; a replayed one as its scope, since its method is lost."""
    if reading.method in _METHOD_RANK:
        return _METHOD_RANK[reading.method]
    return 1 if reading.source.startswith("external:") else _SCOPE_RANK.get(reading.scope, 4)


@dataclass(frozen=True)
class CounterFacts:
    """What is known of an energy counter: J at which it wraps (None: the sensor undoes that), J of a step."""

    wrap_j: float | None = None
    resolution_j: float | None = None


@dataclass(frozen=True)
class Integral:
    """Energy over [start, end]: J that were seen and the seconds they were seen in.

    `edge_j` bounds what interpolation at the edges may be wrong by: of power, the energy in the intervals that
    they cut; of a counter, its largest rise at both, since it may publish more slowly than it is read.
    """

    joules: float
    covered_s: float
    largest_gap_s: float
    gaps: int
    edge_j: float


@dataclass
class Series:
    """All readings of one quantity of one source, in the order of time."""

    latest: Reading
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)  # when readings came that had to be dropped

    @property
    def counter(self) -> bool:
        """True for a counter of energy, False for power."""
        return self.latest.quantity == "energy"

    def add(self, reading: Reading, value: float) -> None:
        """Append; a repeated timestamp is the same reading again, an earlier one is dropped."""
        if self.times and reading.time_s <= self.times[-1]:
            if reading.time_s < self.times[-1]:
                self.late.append(self.times[-1])
            return
        self.latest = reading
        self.times.append(reading.time_s)
        self.values.append(value)

    def forget(self, before_s: float) -> None:
        """Drop what is older, but for one reading."""
        first = max(0, bisect_left(self.times, before_s) - 1)
        self.times, self.values = self.times[first:], self.values[first:]
        self.late = [at for at in self.late if at >= before_s]


def integrate(
    times: list[float],
    values: list[float],
    start_s: float,
    end_s: float,
    gap_s: float,
    counter: CounterFacts | None = None,
) -> Integral:
    """Energy between two times, of a counter (J) when facts are given, else of power (W)."""
    joules = covered = edge = largest = 0.0
    gaps = 0
    first = max(1, bisect_right(times, start_s))
    last = min(len(times) - 1, bisect_left(times, end_s))
    for i in range(first, last + 1):
        t0, t1 = times[i - 1], times[i]
        low, high = max(t0, start_s), min(t1, end_s)
        inside = low == t0 and high == t1
        largest = max(largest, t1 - t0)
        if counter is None:
            part = _trapezoid(t0, values[i - 1], t1, values[i], low, high)
            seen = t1 - t0 <= gap_s
        else:
            rise = _rise(values[i - 1], values[i], t1 - t0, counter)
            part = (rise or 0.0) * (high - low) / (t1 - t0)
            edge = max(edge, 2.0 * (rise or 0.0))
            seen = rise is not None and (inside or t1 - t0 <= gap_s)
        gaps += not seen
        if seen:
            joules += part
            covered += high - low
            edge += 0.0 if inside or counter is not None else abs(part)
    outside = _outside(times, start_s, end_s)
    return Integral(joules, covered, max(largest, outside), gaps + (outside > gap_s), edge)


def _trapezoid(t0: float, p0: float, t1: float, p1: float, low: float, high: float) -> float:
    """Energy from low to high under the line from (t0, p0) to (t1, p1)."""
    slope = (p1 - p0) / (t1 - t0)
    return (high - low) * (p0 + slope * (0.5 * (low + high) - t0))


def _rise(before: float, after: float, seconds: float, facts: CounterFacts) -> float | None:
    """What a counter rose by, a wrap undone; None where that cannot be known or cannot be true."""
    rise = after - before
    if facts.wrap_j is not None:
        if seconds > facts.wrap_j / _MOST_W:
            return None
        rise += facts.wrap_j if rise < 0.0 else 0.0
    return rise if 0.0 <= rise <= _MOST_W * seconds else None


def _outside(times: list[float], start_s: float, end_s: float) -> float:
    """The longest part of a window before the first or after the last reading."""
    if not times:
        return end_s - start_s
    return min(max(times[0] - start_s, end_s - times[-1], 0.0), end_s - start_s)


@dataclass(frozen=True)
class Window:
    """A named stretch of monotonic time."""

    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class ErrorBudget:
    """What stands behind a figure, to be printed next to it.

    `edge_j` bounds what interpolation at the window's edges may be wrong by; `dropped` counts readings that
    came out of order; `sampler_share` is the sampler's share of one core, where it was measured.
    """

    quantity: str
    method: str
    source: str
    scope: str
    rank: int
    trust: str
    period_s: float | None
    samples_expected: int
    samples_got: int
    largest_gap_s: float
    gaps: int
    uncovered_s: float
    coverage: float
    edge_j: float
    dropped: int = 0
    resolution_j: float | None = None
    sampler_share: float | None = None


@dataclass(frozen=True)
class Measured:
    """The energy of a window; None with a `reason` where nothing says.

    `energy_j` is gross; `net_j` is what remains above `idle_w`, and may be negative. `idle_drift_w` is idle
    power after minus before. `warnings` say what to keep in mind.
    """

    name: str
    start_s: float
    end_s: float
    energy_j: float | None
    covered_j: float | None = None
    mean_w: float | None = None
    idle_w: float | None = None
    idle_drift_w: float | None = None
    net_j: float | None = None
    budget: ErrorBudget | None = None
    warnings: tuple[str, ...] = ()
    reason: str = ""

    @property
    def seconds(self) -> float:
        """How long the window was."""
        return self.end_s - self.start_s


class Meter:
    """Named windows over readings; itself a listener of a `Monitor`.

    `periods` (s, by source) may be a monitor's own mapping; a source without one gets the median spacing of
    its readings. `counters` holds facts of raw counters. Readings older than `keep_s` are forgotten, except
    what the open windows and the one closed last need. `sampler_share` is put into every error budget.
    """

    def __init__(
        self,
        clock: Clock = time.monotonic,
        periods: Mapping[str, float] | None = None,
        counters: Mapping[str, CounterFacts] | None = None,
        keep_s: float = math.inf,
        sampler_share: float | None = None,
    ) -> None:
        self.sampler_share = sampler_share
        self._clock = clock
        self._periods = {} if periods is None else periods
        self._counters = {} if counters is None else counters
        self._keep_s = keep_s
        self._series: dict[tuple[str, str], Series] = {}
        self._missing: dict[str, str] = {}
        self._open: dict[str, float] = {}
        self._windows: dict[str, list[Window]] = {}
        self._closed_from_s = math.inf  # where the window that was closed last began
        self._lock = threading.Lock()

    def feed(self, readings: Iterable[Reading]) -> None:
        """Take readings of power and energy, ignore others; None and what cannot be are noted as missing."""
        with self._lock:
            for reading in readings:
                if reading.quantity in ("power", "energy"):
                    self._take(reading)

    __call__ = feed

    def _take(self, reading: Reading) -> None:
        value = reading.value
        if value is None or not plausible(reading) or not math.isfinite(reading.time_s):
            self._missing[reading.source] = reading.reason or f"it read {value}"
            return
        key = (reading.source, reading.quantity)
        series = self._series.setdefault(key, Series(reading))
        series.add(reading, value)
        horizon = min((reading.time_s, self._closed_from_s, *self._open.values())) - self._keep_s
        if len(series.times) % 512 == 0 and horizon > series.times[0]:
            series.forget(horizon)

    def begin(self, name: str) -> None:
        """Open a window. Raises UsageError when one of this name is open."""
        if name in self._open:
            raise UsageError(f"the window {name!r} is open already; end it first, or take another name")
        self._open[name] = self._clock()

    def end(self, name: str) -> Window:
        """Close a window; measure it once the readings after its end are in. Raises UsageError if not open."""
        if name not in self._open:
            raise UsageError(f"no window {name!r} is open; open: {', '.join(self._open) or 'none'}")
        window = Window(name, self._open.pop(name), self._clock())
        self._windows.setdefault(name, []).append(window)
        self._closed_from_s = window.start_s
        return window

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """The block as a window, closed also when it fails."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def windows(self, name: str) -> tuple[Window, ...]:
        """All closed windows of a name, oldest first."""
        return tuple(self._windows.get(name, ()))

    def measure(
        self,
        window: str | Window,
        idle_before: str | Window | None = None,
        idle_after: str | Window | None = None,
        source: str | None = None,
    ) -> Measured:
        """The energy of a closed window (of a name: the latest), net of the idle windows that are given.

        `source` overrides the choice. Raises UsageError for a window or source that is not known.
        """
        chosen = self._window(window)
        with self._lock:
            gross = self._gross(chosen, source)
            idle = [
                self._gross(self._window(w), gross.budget.source) if w and gross.budget else None
                for w in (idle_before, idle_after)
            ]
        asked = idle_before is not None or idle_after is not None
        return _net(gross, *idle) if asked and gross.budget else gross

    def energy_between(self, source: str, start_s: float, end_s: float) -> Integral | None:
        """What one source says of any stretch of time; None when it is not known."""
        with self._lock:
            found = [s for (name, _), s in sorted(self._series.items()) if name == source]
            return self._integral(found[0], start_s, end_s) if found else None

    def _window(self, window: str | Window) -> Window:
        if isinstance(window, Window):
            return window
        if window not in self._windows:
            known = ", ".join(self._windows) or "none"
            raise UsageError(f"no window {window!r} was closed; closed: {known}")
        return self._windows[window][-1]

    def _gross(self, window: Window, source: str | None) -> Measured:
        """From the most trusted source that covers the window, else from the one that covers most of it."""
        known = sorted({name for name, _ in self._series})
        if source is not None and source not in known:
            raise UsageError(f"no energy or power came from {source!r}; known: {', '.join(known) or 'none'}")
        found = [
            self._of(window, series)
            for (name, _), series in sorted(self._series.items())
            if source in (None, name)
        ]
        if not found or window.seconds <= 0.0:
            return _nothing(window, self._why_nothing(window))
        return min(found, key=_preference)

    def _why_nothing(self, window: Window) -> str:
        if window.seconds <= 0.0:
            return "the window is empty"
        told = "; ".join(f"{source}: {reason}" for source, reason in sorted(self._missing.items()))
        return f"no source of power or energy gave a figure{': ' + told if told else ''}"

    def _period(self, series: Series) -> float:
        known = self._periods.get(series.latest.source)
        steps = [after - before for before, after in pairwise(series.times[-256:])]
        return known or (median(steps) if steps else math.inf)

    def _facts(self, series: Series) -> CounterFacts | None:
        return self._counters.get(series.latest.source, CounterFacts()) if series.counter else None

    def _integral(self, series: Series, start_s: float, end_s: float) -> Integral:
        gap_s = GAP_PERIODS * self._period(series)
        return integrate(series.times, series.values, start_s, end_s, gap_s, self._facts(series))

    def _of(self, window: Window, series: Series) -> Measured:
        period, facts, latest = self._period(series), self._facts(series), series.latest
        seen = self._integral(series, window.start_s, window.end_s)
        got = _updates(series, window)
        rank = trust_rank(latest)
        coverage = min(1.0, seen.covered_s / window.seconds) if window.seconds > 0.0 else 0.0
        budget = ErrorBudget(
            quantity=latest.quantity,
            method=latest.method,
            source=latest.source,
            scope=latest.scope,
            rank=rank,
            trust=TRUST[rank],
            period_s=period if math.isfinite(period) else None,
            samples_expected=round(window.seconds / period),
            samples_got=got,
            largest_gap_s=seen.largest_gap_s,
            gaps=seen.gaps,
            uncovered_s=max(0.0, window.seconds - seen.covered_s),
            coverage=coverage,
            edge_j=seen.edge_j,
            dropped=sum(window.start_s <= at <= window.end_s for at in series.late),
            resolution_j=facts.resolution_j if facts else None,
            sampler_share=self.sampler_share,
        )
        return _measured(window, seen, budget)


def _updates(series: Series, window: Window) -> int:
    """Readings within a window; of a counter those that brought a new value."""
    first, last = bisect_left(series.times, window.start_s), bisect_right(series.times, window.end_s)
    if not series.counter:
        return last - first
    values = series.values
    return sum(values[i] != values[i - 1] for i in range(max(first, 1), last)) + (first == 0 < last)


def _measured(window: Window, seen: Integral, budget: ErrorBudget) -> Measured:
    place = (window.name, window.start_s, window.end_s)
    if budget.coverage <= 0.0:
        reason = f"{budget.source} gave nothing in the window that could be used"
        return Measured(*place, None, budget=budget, reason=reason)
    if budget.coverage < LEAST_COVERAGE:
        reason = f"{budget.source} covers only {budget.coverage:.0%} of the window, too little for a total"
        return Measured(*place, None, seen.joules, budget=budget, reason=reason)
    total = seen.joules / budget.coverage
    mean_w = total / window.seconds
    return Measured(*place, total, seen.joules, mean_w, budget=budget, warnings=_cautions(budget))


def _cautions(budget: ErrorBudget) -> tuple[str, ...]:
    said = []
    if budget.samples_got < FEW_SAMPLES:
        said.append(f"only {budget.samples_got} samples; below {FEW_SAMPLES} a figure is rough")
    if budget.gaps:
        said.append(
            f"{budget.gaps} gaps, {budget.uncovered_s:.2f} s not seen and taken as the mean of the rest"
        )
    return tuple(said)


def _nothing(window: Window, reason: str) -> Measured:
    return Measured(window.name, window.start_s, window.end_s, None, reason=reason)


def _preference(found: Measured) -> tuple[bool, int, bool, float, str]:
    budget = found.budget
    assert budget is not None
    total = found.energy_j is not None
    rank = budget.rank if total else 0
    return not total, rank, budget.quantity != "energy" and total, -budget.coverage, budget.source


def _net(gross: Measured, before: Measured | None, after: Measured | None) -> Measured:
    """Subtract idle power: the mean of before and after, or the one that is known."""
    known = [idle.mean_w for idle in (before, after) if idle is not None and idle.mean_w is not None]
    if not known or gross.energy_j is None:
        return replace(
            gross, warnings=(*gross.warnings, "no idle baseline was measured: there is no net figure")
        )
    idle_w = sum(known) / len(known)
    net_j = gross.energy_j - idle_w * gross.seconds
    drift = known[1] - known[0] if len(known) == 2 else None
    said = list(gross.warnings)
    if drift is None:
        said.append("idle power was measured on one side only: its drift is not known")
    elif abs(drift) > 0.1 * abs(idle_w):
        said.append(f"idle power moved by {drift:+.3g} W over the run, net is no surer than that")
    if net_j < 0.0:
        said.append("net energy is negative: the run drew less than idle, or the baseline is wrong")
    return replace(gross, idle_w=idle_w, idle_drift_w=drift, net_j=net_j, warnings=tuple(said))
