"""Recording telemetry into a trace, with an account of what came and what is missing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.contracts import Clock, Reading
from outrider.power.monitor import BLOCKED_S, STALE_PERIODS, Monitor, plausible
from outrider.power.telemetry import TelemetryWriter

__all__ = ["Coverage", "Recorded", "record"]

_LOOK_S = 0.2  # how often the recording looks whether it should end
_SOON_S = 0.01  # the same when it should, and some sensor has not been asked yet


@dataclass(frozen=True)
class Recorded:
    """What a recording holds. A gap is a time without a value of a source longer than 3 of its periods."""

    path: str
    seconds: float
    readings: int  # with a value
    sources: int  # that ever gave a value
    silent: Mapping[str, str]  # sources that never did, and why
    gaps: int
    longest_gap_s: float
    longest_gap: str  # the source that had it
    overhead_share: float  # of the recording's time, spent reading sensors


class Coverage:
    """Counts, as a monitor's listener, what comes from each source and the gaps in it."""

    def __init__(self, periods: Mapping[str, float]) -> None:
        self.readings = 0
        self.gaps = 0
        self.longest_gap = (0.0, "")
        self._periods = periods
        self._silent: dict[str, str] = {}
        self._last: dict[tuple[str, str], float] = {}

    def __call__(self, readings: Sequence[Reading]) -> None:
        """Count one batch."""
        for reading in readings:
            if not plausible(reading):
                self._silent[reading.source] = reading.reason or f"{reading.quantity} reads {reading.value}"
                continue
            self.readings += 1
            key = (reading.source, reading.quantity)
            self._look_for_gap(key, reading.time_s)
            self._last[key] = reading.time_s

    def end(self, time_s: float) -> None:
        """Count the gaps that last until the end."""
        for key in list(self._last):
            self._look_for_gap(key, time_s)

    @property
    def sources(self) -> frozenset[str]:
        """Those that gave a value."""
        return frozenset(source for source, _ in self._last)

    @property
    def silent(self) -> dict[str, str]:
        """Those that gave none, with the last reason."""
        return {source: self._silent[source] for source in sorted(self._silent.keys() - self.sources)}

    def _look_for_gap(self, key: tuple[str, str], time_s: float) -> None:
        gap_s = time_s - self._last.get(key, time_s)
        if gap_s > STALE_PERIODS * self._periods.get(key[0], 1.0):
            self.gaps += 1
            self.longest_gap = max(self.longest_gap, (gap_s, key[0]))


def record(
    monitor: Monitor,
    path: str | Path,
    seconds: float | None = None,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    **header: Any,
) -> Recorded:
    """Write what a monitor reads to a trace for `seconds`, or until Ctrl-C, which is a normal end.

    However short the time is, every sensor is asked once, unless one does not answer within `BLOCKED_S`.
    Raises TelemetryError when the file cannot be written; what was written before stays a valid trace.
    """
    coverage = Coverage(monitor.periods)
    began_s = clock()
    with TelemetryWriter(path, monitor.periods, clock, interval_s=monitor.interval_s, **header) as writer:
        monitor.listeners += [coverage, writer]
        try:
            with monitor:
                _wait(monitor, writer, seconds, clock, sleep)
        finally:
            monitor.listeners = [known for known in monitor.listeners if known not in (coverage, writer)]
        if writer.error is not None:
            raise writer.error
    coverage.end(clock())
    gap_s, gap_source = coverage.longest_gap
    return Recorded(
        path=str(path),
        seconds=clock() - began_s,
        readings=coverage.readings,
        sources=len(coverage.sources),
        silent=coverage.silent,
        gaps=coverage.gaps,
        longest_gap_s=gap_s,
        longest_gap=gap_source,
        overhead_share=monitor.overhead_share,
    )


def _wait(
    monitor: Monitor,
    writer: TelemetryWriter,
    seconds: float | None,
    clock: Clock,
    sleep: Callable[[float], object],
) -> None:
    end_s = math.inf if seconds is None else clock() + seconds
    try:
        while writer.error is None and (left_s := end_s - clock()) > -BLOCKED_S:
            if left_s <= 0.0 and monitor.reads >= len(monitor.sensors):
                return
            sleep(min(_LOOK_S, left_s if left_s > 0.0 else _SOON_S))
            monitor.state()  # notices a blocked sensor
    except KeyboardInterrupt:
        return
