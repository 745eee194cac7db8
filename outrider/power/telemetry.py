"""Traces of telemetry: JSON lines, a header first, then one line for each read of a sensor.

The format is in docs/formats.md. A line is written whole or not at all: a full disk ends a trace, it does
not damage it, and a trace that was cut off is read up to there.
"""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_args

from outrider.contracts import Clock, Method, Quantity, Reading, Scope
from outrider.errors import OutriderError

__all__ = ["SCHEMA_VERSION", "Batch", "Telemetry", "TelemetryError", "TelemetryWriter", "read_telemetry"]

SCHEMA_VERSION = 1
_WORDS = {"quantity": get_args(Quantity), "scope": get_args(Scope), "method": get_args(Method)}
_FIELDS = frozenset(("source", "quantity", "value", "scope", "method", "time_s", "reason"))

log = logging.getLogger(__name__)


class TelemetryError(OutriderError):
    """A trace cannot be written, or is unreadable, damaged or of another version."""


@dataclass(frozen=True)
class Batch:
    """One line: the readings, and the periods (s) of sources that are new or changed theirs.

    `time_s` is when the readings were there: at the earliest that of the newest of them.
    """

    readings: list[Reading]
    periods: Mapping[str, float] = field(default_factory=dict)
    time_s: float = -math.inf


class TelemetryWriter:
    """Writes a telemetry trace to a path or an open binary file; a context manager and a monitor's listener.

    `periods` is looked at, not copied: a `Monitor`'s own mapping of source to period (s), which grows. With a
    `clock`, a line says when it was written, which may be later than its readings were true. A source that
    stays unreadable for the same reason is written once. Raises TelemetryError when the disk refuses; the
    trace then ends with its last whole line, further calls do nothing, and `error` says why.
    """

    def __init__(
        self,
        target: str | Path | BinaryIO,
        periods: Mapping[str, float] | None = None,
        clock: Clock | None = None,
        **header: Any,
    ) -> None:
        self.error: TelemetryError | None = None
        self.batches = 0
        self.readings = 0
        self._periods: Mapping[str, float] = {} if periods is None else periods
        self._clock = clock
        self._told: dict[str, float] = {}
        self._silent: dict[tuple[str, str], str] = {}
        self._owned = isinstance(target, str | Path)
        self._name = str(target) if isinstance(target, str | Path) else "the telemetry trace"
        if isinstance(target, str | Path):
            try:
                self._file: BinaryIO = Path(target).open("wb", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise self._refused(error) from None
        else:
            self._file = target
        self._size = 0
        try:
            self._append({"schema_version": SCHEMA_VERSION, "kind": "telemetry", **header})
        except TelemetryError:
            self.close()
            raise

    def __enter__(self) -> TelemetryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, readings: Sequence[Reading]) -> None:
        """Append one batch; readings that only repeat why a source is silent are left out."""
        news = [reading for reading in readings if self._is_news(reading)]
        if self.error is not None or not news:
            return
        sources = {reading.source for reading in news} & self._periods.keys()
        periods = {
            name: self._periods[name] for name in sources if self._told.get(name) != self._periods[name]
        }
        line: dict[str, Any] = {} if self._clock is None else {"time_s": self._clock()}
        line["readings"] = [_record(reading) for reading in news]
        self._append(line | {"periods": dict(sorted(periods.items()))} if periods else line)
        self._told.update(periods)
        self.batches += 1
        self.readings += len(news)

    def close(self) -> None:
        """Close the file, if this writer opened it."""
        if self._owned:
            self._file.close()

    def _is_news(self, reading: Reading) -> bool:
        key = (reading.source, reading.quantity)
        if reading.value is not None:
            self._silent.pop(key, None)
            return True
        known = self._silent.get(key) == reading.reason
        self._silent[key] = reading.reason
        return not known

    def _append(self, record: Mapping[str, Any]) -> None:
        data = memoryview((json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode())
        done = 0
        try:
            while done < len(data):  # an unbuffered file may take a part
                done += self._file.write(data[done:]) or 0
        except OSError as error:
            if done:
                self._cut()
            self.error = self._refused(error)
            raise self.error from None
        self._size += len(data)

    def _cut(self) -> None:
        """Drop the part of a line that still went in."""
        try:
            self._file.truncate(self._size)
        except (OSError, ValueError):
            log.warning("%s may end in the middle of a line", self._name)

    def _refused(self, error: OSError) -> TelemetryError:
        written = f"; what was written before is whole ({self.batches} reads)" if self.batches else ""
        fix = (
            "make room on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another file"
        )
        return TelemetryError(f"cannot write {self._name}: {error.strerror or error}{written}; {fix}")


def _record(reading: Reading) -> dict[str, Any]:
    value, reason = reading.value, reading.reason
    if value is not None and not math.isfinite(value):
        value, reason = None, reason or f"the sensor gave {value}"
    record = {
        "source": reading.source,
        "quantity": reading.quantity,
        "value": value,
        "scope": reading.scope,
        "method": reading.method,
        "time_s": reading.time_s,
    }
    return record | {"reason": reason} if reason else record


@dataclass(frozen=True)
class Telemetry:
    """A trace on disk: its header, and its batches from the first each time it is iterated."""

    path: Path
    header: Mapping[str, Any]

    def __iter__(self) -> Iterator[list[Reading]]:
        """The readings of each line. Raises TelemetryError for a damaged line that is not the last."""
        return (batch.readings for batch in self.batches())

    def batches(self) -> Iterator[Batch]:
        """The lines after the header, one at a time; a last line that was cut off is left out, with a warning."""
        with self.path.open("rb") as lines:
            next(lines, None)
            for number, line in enumerate(lines, 2):
                whole = line.endswith(b"\n")
                if not whole and not _is_json(line):
                    log.warning("%s is cut off in line %d; what comes before is used", self.path, number)
                    return
                if line.strip():
                    yield _batch(_parse(line, f"{self.path}, line {number}"), f"{self.path}, line {number}")


def read_telemetry(path: str | Path) -> Telemetry:
    """Open a telemetry trace; iterating it gives the readings of one line after another.

    Raises TelemetryError when the file cannot be read or is no telemetry trace of this version.
    """
    path = Path(path)
    try:
        with path.open("rb") as lines:
            first = lines.readline()
    except OSError as error:
        raise TelemetryError(f"cannot read {path}: {error.strerror or error}") from None
    header = _parse(first, f"{path}, line 1")
    version, kind = header.get("schema_version"), header.get("kind")
    if (version, kind) != (SCHEMA_VERSION, "telemetry"):
        raise TelemetryError(
            f"{path} has schema_version {version!r} and kind {kind!r}; expected version {SCHEMA_VERSION} of"
            " telemetry, as `outrider record` writes it"
        )
    return Telemetry(path, header)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TelemetryError(f"{where} is not JSON ({error}); the file is damaged") from None
    if not isinstance(record, dict):
        raise TelemetryError(f"{where} is {type(record).__name__}, not an object")
    return record


def _batch(record: Mapping[str, Any], where: str) -> Batch:
    readings = record.get("readings")
    if not isinstance(readings, list):
        raise TelemetryError(f"{where} has no list `readings`")
    periods = record.get("periods", {})
    if not isinstance(periods, dict) or not all(_is_number(p) and p > 0 for p in periods.values()):
        raise TelemetryError(f"{where}: periods is {periods!r:.80}; expected seconds above 0 by source")
    parsed = [_reading(item, f"{where}, reading {i}") for i, item in enumerate(readings)]
    time_s = record.get("time_s", -math.inf)
    if "time_s" in record and not _is_number(time_s):
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
    value = record.get("value")
    if not _is_number(record["time_s"]) or not (value is None or _is_number(value)):
        raise TelemetryError(f"{where}: value is {value!r} at time_s {record['time_s']!r}; expected numbers")
    whole: dict[str, Any] = {"value": None, **record}
    return Reading(**whole)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
