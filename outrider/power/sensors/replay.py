"""A recorded trace, played back by its own relative time on any clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from outrider.contracts import Clock, Method, Reading
from outrider.errors import TraceError
from outrider.power.telemetry import Batch, Telemetry

__all__ = ["Replay"]

DEFAULT_PERIOD_S = 1.0
_BACK_S = 30.0  # a line this much older than the one before it comes from another run; less: a slow sensor
_STAYS: tuple[Method, ...] = ("estimated", "simulated")  # a weak claim is not made stronger by recording it


class Replay:
    """A sensor that gives a trace's readings when their time has come.

    The first line of the trace is due at `start_s` (default: when `read` is first called). What was
    measured is labelled `replayed`; estimated and simulated figures stay what they were. A trace whose time
    goes back by more than half a minute (another boot) goes on from where it was. `done` is True after the
    last line; `periods` are those that the trace tells, by source (1 s where it does not).
    """

    name = "replay"
    period_s = 0.0  # every read may bring something

    def __init__(self, trace: Telemetry, clock: Clock, start_s: float | None = None) -> None:
        self.periods: dict[str, float] = {}
        self.done = False
        self._clock = clock
        self._batches: Iterator[Batch] = trace.batches()
        self._ahead: Batch | None = None  # read from the trace, not due yet
        self._due_s: float | None = None  # when it is due: trace time + offset
        self._offset_s = 0.0  # brings the trace's first line to 0
        self._start_s = start_s
        self._damage: TraceError | None = None  # told when all before it has been given
        self._take()

    def read(self) -> list[Reading]:
        """The readings that came due since the last call, oldest first; TelemetryError at a damaged line."""
        now_s = self._clock()
        if self._start_s is None:
            self._start_s = now_s
        readings: list[Reading] = []
        while self._ahead is not None and self._due_s is not None:
            if self._start_s + self._due_s > now_s + 1e-9:
                break
            self.periods.update(self._ahead.periods)
            for reading in self._ahead.readings:
                self.periods.setdefault(reading.source, DEFAULT_PERIOD_S)
                readings.append(self._shifted(reading, self._start_s))
            self._take()
        if self._damage is not None and not readings:
            damage, self._damage = self._damage, None
            raise damage
        return readings

    def _take(self) -> None:
        """Look at the next line. It is due when it was written, and in its turn."""
        self._ahead = None
        try:
            self._ahead = next((batch for batch in self._batches if batch.readings), None)
        except TraceError as error:
            if self._due_s is None:
                raise
            self._damage = error
        if self._ahead is None:
            self.done = True
            return
        time_s = self._ahead.time_s
        if self._due_s is None:
            self._offset_s = -time_s
            self._due_s = 0.0
        elif time_s + self._offset_s < self._due_s - _BACK_S:
            self._offset_s = self._due_s - time_s
        self._due_s = max(self._due_s, time_s + self._offset_s)

    def _shifted(self, reading: Reading, start_s: float) -> Reading:
        method: Method = reading.method if reading.method in _STAYS else "replayed"
        return replace(reading, method=method, time_s=reading.time_s + self._offset_s + start_s)
