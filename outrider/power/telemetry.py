"""Traces of telemetry (see `outrider.lines`): one line for each read of a sensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_args

from outrider.contracts import Clock, Method, Quantity, Reading, Scope, as_json
from outrider.errors import TraceError
from outrider.lines import Lines, LineWriter, read_lines
from outrider.records import is_finite

__all__ = ["Batch", "Telemetry", "TelemetryError", "TelemetryWriter", "read_telemetry"]

_WORDS = {"quantity": get_args(Quantity), "scope": get_args(Scope), "method": get_args(Method)}
_FIELDS = frozenset(("source", "quantity", "value", "scope", "method", "time_s", "reason"))


class TelemetryError(TraceError):
    """A trace of telemetry cannot be written, or is unreadable, damaged or of another version."""


@dataclass(frozen=True)
class Batch:
    """One line: the readings, and the periods (s) of sources that are new or changed theirs.

    `time_s` is when the readings were there: at the earliest that of the newest of them.
    """

    readings: list[Reading]
    periods: Mapping[str, float] = field(default_factory=dict)
    time_s: float = -math.inf


class TelemetryWriter(LineWriter):
    """Writes a telemetry trace to a path or an open binary file; a context manager and a monitor's listener.

    `periods` is looked at, not copied: a `Monitor`'s own mapping of source to period (s), which grows. With a
    `clock`, a line says when it was written, which may be later than its readings were true. A source that
    stays unreadable for the same reason is written once. Raises TelemetryError when the disk refuses.
    """

    def __init__(
        self,
        target: str | Path | BinaryIO,
        periods: Mapping[str, float] | None = None,
        clock: Clock | None = None,
        **header: Any,
    ) -> None:
        self.readings = 0
        self._periods: Mapping[str, float] = {} if periods is None else periods
        self._clock = clock
        self._told: dict[str, float] = {}
        self._silent: dict[tuple[str, str], str] = {}
        self._words: dict[tuple[str, ...], tuple[str, str]] = {}  # of a reading, around its two numbers
        super().__init__(target, "telemetry", header, TelemetryError)

    def __call__(self, readings: Sequence[Reading]) -> None:
        """Append one batch; readings that only repeat why a source is silent are left out."""
        news = [reading for reading in readings if self._is_news(reading)]
        if self.error is not None or not news:
            return
        sources = {reading.source for reading in news} & self._periods.keys()
        periods = {
            name: self._periods[name] for name in sources if self._told.get(name) != self._periods[name]
        }
        time_s = "" if self._clock is None else f'"time_s":{json.dumps(self._clock())},'
        told = f',"periods":{json.dumps(dict(sorted(periods.items())))}' if periods else ""
        self.write_text(f'{{{time_s}"readings":[{",".join(map(self._record, news))}]{told}}}')
        self._told.update(periods)
        self.readings += len(news)

    def _is_news(self, reading: Reading) -> bool:
        key = (reading.source, reading.quantity)
        if reading.value is not None:
            self._silent.pop(key, None)
            return True
        known = self._silent.get(key) == reading.reason
        self._silent[key] = reading.reason
        return not known

    def _record(self, reading: Reading) -> str:
        """A reading as JSON. What does not change from one to the next is made once: they come by the thousand."""
        value, reason = reading.value, reading.reason
        if value is not None and not math.isfinite(value):
            value, reason = None, reason or f"the sensor gave {value}"
        key = (reading.source, reading.quantity, reading.scope, reading.method)
        words = self._words.get(key)
        if words is None:
            source, quantity, scope, method = map(json.dumps, key)
            words = self._words[key] = (
                f'{{"source":{source},"quantity":{quantity},"value":',
                f',"scope":{scope},"method":{method},"time_s":',
            )
        end = f',"reason":{json.dumps(reason)}}}' if reason else "}"
        return f"{words[0]}{_number(value)}{words[1]}{_number(reading.time_s)}{end}"


def _number(value: float | None) -> str:
    return repr(value) if type(value) is float else json.dumps(value, default=as_json)


@dataclass(frozen=True)
class Telemetry:
    """A trace on disk: its header, and its batches from the first each time it is iterated."""

    lines: Lines

    @property
    def header(self) -> Mapping[str, Any]:
        """The first line."""
        return self.lines.header

    def __iter__(self) -> Iterator[list[Reading]]:
        """The readings of each line. Raises TelemetryError for a damaged line that is not the last."""
        return (batch.readings for batch in self.batches())

    def batches(self) -> Iterator[Batch]:
        """The lines after the header, one at a time; a last line that was cut off is left out, with a warning."""
        with closing(iter(self.lines)) as lines:
            for where, record in lines:
                yield _batch(record, where)


def read_telemetry(path: str | Path) -> Telemetry:
    """Open a telemetry trace; iterating it gives the readings of one line after another.

    Raises TelemetryError when the file cannot be read or is no telemetry trace of this version.
    """
    return Telemetry(read_lines(path, "telemetry", failure=TelemetryError))


def _batch(record: Mapping[str, Any], where: str) -> Batch:
    readings = record.get("readings")
    if not isinstance(readings, list):
        raise TelemetryError(f"{where} has no list `readings`")
    periods = record.get("periods", {})
    if not isinstance(periods, dict) or not all(is_finite(p) and p > 0 for p in periods.values()):
        raise TelemetryError(f"{where}: periods is {periods!r:.80}; expected seconds above 0 by source")
    parsed = [_reading(item, f"{where}, reading {i}") for i, item in enumerate(readings)]
    time_s = record.get("time_s", -math.inf)
    if "time_s" in record and not is_finite(time_s):
        raise TelemetryError(f"{where}: time_s is {time_s!r}; expected a number of seconds")
    return Batch(parsed, periods, max([time_s, *(reading.time_s for reading in parsed)]))


def _reading(record: Any, where: str) -> Reading:
    if not isinstance(record, dict) or not record.keys() <= _FIELDS:
        raise TelemetryError(f"{where} is {record!r:.80}; known fields: {', '.join(sorted(_FIELDS))}")
    missing = _FIELDS - record.keys() - {"reason", "value"}
    if missing:
        raise TelemetryError(f"{where} lacks {', '.join(sorted(missing))}")
    for name, words in _WORDS.items():
        if record[name] not in words:
            raise TelemetryError(f"{where}: {name} is {record[name]!r}; known: {', '.join(words)}")
    for name in ("source", "reason"):
        if not isinstance(record.get(name, ""), str):
            raise TelemetryError(f"{where}: {name} is {record[name]!r:.80}; expected text")
    value = record.get("value")
    if not is_finite(record["time_s"]) or not (value is None or is_finite(value)):
        raise TelemetryError(
            f"{where}: value is {value!r:.80} at time_s {record['time_s']!r:.80}; expected numbers"
        )
    whole: dict[str, Any] = {"value": None, **record}
    return Reading(**whole)
