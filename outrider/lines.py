"""Traces: JSON lines, the first a header with `kind` and `schema_version` (docs/formats.md).

A line is written whole or not at all: a full disk ends a trace, it does not damage it. A trace that was cut off
in its last line is read up to there; damage anywhere else is an error that names file and line.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from outrider.contracts import as_json
from outrider.errors import TraceError, UsageError
from outrider.records import parsed

__all__ = ["KINDS", "SCHEMA_VERSION", "LineWriter", "Lines", "check_header", "read_lines"]

SCHEMA_VERSION = 1

KINDS: Mapping[str, str] = {
    "telemetry": "`outrider record`",
    "decode": "`outrider generate --trace`",
    "acceptance": "`outrider acceptance`",
    "governor": "`--governor-log`",
    "profile": "`outrider profile`",
    "simulation": "`outrider simulate`",
}
"""Every kind of trace, and what writes it."""

_log = logging.getLogger(__name__)


class LineWriter:
    """Appends records to a path, or to an open file that stays its owner's; a context manager.

    The folders above a path are made, and what is written to it is on its way to the disk when `write` returns.
    Raises `failure` when the file cannot be opened or the disk refuses; the trace then ends with its last whole
    line, further calls do nothing, and `error` says why. `allow_nan` lets infinities pass as JavaScript writes them.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO | TextIO,
        kind: str,
        header: Mapping[str, Any],
        failure: type[TraceError] = TraceError,
        allow_nan: bool = False,
    ) -> None:
        if kind not in KINDS:
            raise UsageError(f"trace kind {kind!r} is not known; known: {', '.join(KINDS)}")
        self.error: TraceError | None = None
        self.records = 0  # behind the header
        self._failure, self._allow_nan = failure, allow_nan
        self._size = 0
        self._owned = isinstance(target, str | os.PathLike)
        self._name = os.fspath(target) if isinstance(target, str | os.PathLike) else f"the {kind} trace"
        self._file: BinaryIO | TextIO
        if isinstance(target, str | os.PathLike):
            try:
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                self._file = Path(target).open("wb", buffering=0)  # noqa: SIM115  (closed by `close`)
            except OSError as error:
                raise self._refused(error) from None
        else:
            self._file = target
        try:
            self._append(self._text({"schema_version": SCHEMA_VERSION, "kind": kind, **header}))
        except TraceError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self.write_text(self._text(record))

    def write_text(self, text: str) -> None:
        """Append one record that is JSON already, in one line."""
        if self.error is None:
            self._append(text)
            self.records += 1

    def close(self) -> None:
        """Close the file, if this writer opened it; closing twice is allowed."""
        if self._owned:
            self._file.close()

    def _text(self, record: Mapping[str, Any]) -> str:
        return json.dumps(record, separators=(",", ":"), allow_nan=self._allow_nan, default=as_json)

    def _append(self, text: str) -> None:
        data, done = f"{text}\n".encode(), 0
        try:
            if isinstance(self._file, io.TextIOBase):
                self._file.write(f"{text}\n")
                return
            while done < len(data):  # an unbuffered file may take a part
                taken = self._file.write(memoryview(data)[done:])  # type: ignore[arg-type]
                done = len(data) if taken is None else done + taken
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
            _log.warning("%s may end in the middle of a line", self._name)

    def _refused(self, error: OSError) -> TraceError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "make room on the disk" if full else "choose another file"
        kept = f"; what was written before is whole ({self.records} lines)" if self.records else ""
        return self._failure(f"cannot write {self._name}: {error.strerror or error}{kept}; {fix}")


@dataclass(frozen=True)
class Lines:
    """A trace: its header, and its records from the first each time it is iterated."""

    name: str
    header: Mapping[str, Any]
    source: Path | list[str]
    failure: type[TraceError] = TraceError

    def __iter__(self) -> Generator[tuple[str, dict[str, Any]], None, None]:
        """Where a record stands ("a.jsonl, line 2") and the record. Raises `failure` for a damaged line.

        Who stops before the end closes it, or leaves the file open until it is collected.
        """
        with closing(_records(self.source, self.name, self.failure)) as records:
            yield from islice(records, 1, None)


def read_lines(
    source: str | os.PathLike[str] | Iterable[str], *kinds: str, failure: type[TraceError] = TraceError
) -> Lines:
    """Open a trace of one of `kinds`; `source` is a path, or the lines themselves.

    Raises `failure` when it cannot be read, or is of another kind or version.
    """
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else "the trace"
    held = Path(source) if isinstance(source, str | os.PathLike) else list(source)
    try:
        _, header = next(_records(held, name, failure), ("", None))
    except OSError as error:
        raise failure(f"cannot read {name}: {error.strerror or error}") from None
    if header is None:
        raise failure(f"{name} is empty; a trace begins with a header")
    check_header(header, kinds, name, failure)
    return Lines(name, header, held, failure)


def check_header(
    record: Mapping[str, Any], kinds: tuple[str, ...], name: str, failure: type[Exception]
) -> None:
    """Raise `failure` unless a header, or a whole file with the same two fields, is of a kind and version known."""
    version, kind = record.get("schema_version"), record.get("kind")
    if version != SCHEMA_VERSION or kind not in kinds:
        writers = [KINDS[kind] for kind in kinds if kind in KINDS]
        hint = f", as {' or '.join(writers)} writes it" if writers else ""
        raise failure(
            f"{name} has schema_version {version!r} and kind {kind!r}; expected version {SCHEMA_VERSION} of"
            f" {' or '.join(kinds)}{hint}"
        )


def _records(
    source: Path | list[str], name: str, failure: type[TraceError]
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Every line from the first on that is not blank, with where it stands."""
    with _opened(source) as lines:
        for number, line in enumerate(lines, 1):
            where = f"{name}, line {number}"
            if not line.strip():
                continue
            try:
                record = parsed(json.loads, line)
            except ValueError as error:
                broken = line[-1:] in ("\n", b"\n") or next(lines, None) is not None
                if broken or number == 1:
                    raise failure(f"{where} is not JSON ({error}); the file is damaged") from None
                _log.warning("%s is cut off in line %d; what comes before it is used", name, number)
                return
            if not isinstance(record, dict):
                raise failure(f"{where} is {type(record).__name__}, not an object")
            yield where, record


def _opened(source: Path | list[str]) -> AbstractContextManager[Iterator[str | bytes]]:
    return nullcontext(iter(source)) if isinstance(source, list) else source.open("rb")
