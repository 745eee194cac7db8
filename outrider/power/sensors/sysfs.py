"""Small files of the kernel, read so that every failure becomes a reason instead of a figure."""

from __future__ import annotations

import errno
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from outrider.contracts import Method, Quantity, Reading, Scope
from outrider.power.sensors.system import System

__all__ = [
    "PLAUSIBLE_C",
    "Figure",
    "KeptFile",
    "KeptNumber",
    "Spikes",
    "is_linux",
    "labels",
    "list_folder",
    "load",
    "measure",
    "number_in",
    "read_number",
    "read_text",
    "shown",
    "try_text",
]

Figure = tuple[float | None, str]
"""A value and "", or None and the reason."""

Parse = Callable[[System, Path, str, float], Figure]
"""Of a file's text: (machine, path, text, scale) -> figure."""

PLAUSIBLE_C = (-40.0, 125.0)
"""What a working part can have; outside are sentinels of sensors that are off, and faults."""

_SHORT = 64  # bytes: a line shorter than this, alone in the first part, is all that there is
_MOST_READS = 256  # of a file; what goes on and on is no small file of the kernel
_PAGE = 4096  # bytes: the most that an attribute of the kernel shows
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC

_FIXES = {
    errno.ENOENT: "is gone, or this kernel does not have it",
    errno.ENODEV: "is gone: its driver was unloaded or the device was unplugged",
    errno.EAGAIN: "has nothing to say now: the unit that it watches is powered down",
    errno.ENODATA: "has no data now: the unit that it watches is powered down or not connected",
    errno.EIO: "cannot be read: the bus did not answer (a channel that is not connected, or one asleep)",
    errno.EOPNOTSUPP: "is switched off in this kernel",
}


def is_linux(system: System) -> bool:
    """Whether the machine has `/sys` and `/proc` as Linux has them (Android too)."""
    return system.platform in ("linux", "android")


def load(path: Path) -> bytes:
    """Everything in a small file. Raises OSError, for EAGAIN too, which Python's files turn into None."""
    descriptor = os.open(path, _FLAGS)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
            if len(part) < _SHORT and part.endswith(b"\n") and len(parts) == 1:
                break
            if len(parts) > _MOST_READS:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str | None:
    """The text of a file without spaces, newline or NUL at its ends; None when it cannot be read."""
    return try_text(System(), path)[0]


def try_text(system: System, path: Path, fix: str = "") -> tuple[str | None, str]:
    """The text of a file, or None and the reason. `fix` says what to do when permission is missing."""
    try:
        return _stripped(load(path)), ""
    except OSError as error:
        return None, _explain(system, path, error, fix)


def read_number(system: System, path: Path, scale: float = 1.0, fix: str = "") -> Figure:
    """The number in a file times `scale`, or None and the reason."""
    text, reason = try_text(system, path, fix)
    return (None, reason) if text is None else number_in(system, path, text, scale)


def number_in(system: System, path: Path, text: str, scale: float = 1.0) -> Figure:
    """The number that a file's text is times `scale`, or None and the reason."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        return None, f"{shown(system, path)} holds {text[:40]!r}, which is no number"
    return value * scale, ""


class KeptFile:
    """One attribute of the kernel that is read again and again, and stays open: opening it costs most of a read.

    A read from its start makes the kernel show what is true now; of a device that is gone it fails. After a failure
    it is opened anew. It is closed by `close`, and with the object; a later read opens it again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._descriptor: int | None = None

    def load(self) -> bytes:
        """Its first page. Raises OSError."""
        if self._descriptor is None:
            self._descriptor = os.open(self._name, _FLAGS)
        try:
            return os.pread(self._descriptor, _PAGE, 0)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptor back."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = close


class KeptNumber:
    """A `KeptFile` of one figure; `parse` makes it of the text, unless that is still the same."""

    def __init__(self, system: System, path: Path, scale: float = 1.0, parse: Parse | None = None) -> None:
        self.path = path
        self._file = KeptFile(path)
        self._system, self._scale, self._parse = system, scale, parse or number_in
        self._data: bytes | None = None
        self._figure: Figure = None, ""

    def read(self) -> Figure:
        """The figure of now, or None and the reason."""
        try:
            data = self._file.load()
        except OSError as error:
            return None, _explain(self._system, self.path, error, "")
        if data != self._data:
            self._data = data
            self._figure = self._parse(self._system, self.path, _stripped(data), self._scale)
        return self._figure

    def close(self) -> None:
        """Close the file until the next read."""
        self._file.close()


def _stripped(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip().strip("\0").strip()


class Spikes:
    """Takes out single values that are far off, as some drivers now and then give: the median of the last three.

    With two values it is the lower one, so a true rise is told one sample late.
    """

    def __init__(self) -> None:
        self._recent: list[float] = []

    def settle(self, value: float) -> float:
        """What to tell after one more value."""
        self._recent = [*self._recent[-2:], value]
        return sorted(self._recent)[1] if len(self._recent) > 2 else min(self._recent)

    def forget(self) -> None:
        """Start again: what was read before a gap says nothing about now."""
        self._recent.clear()


def measure(
    system: System,
    path: Path,
    scale: float,
    source: str,
    quantity: Quantity,
    scope: Scope,
    method: Method = "instant",
) -> Reading:
    """A reading of one file that holds one number."""
    value, reason = read_number(system, path, scale)
    return Reading(source, quantity, value, scope, method, system.clock(), reason)


def shown(system: System, path: Path) -> str:
    """A path as the machine itself calls it, whatever stands for its root."""
    try:
        return f"/{path.relative_to(system.root)}"
    except ValueError:
        return str(path)


def _explain(system: System, path: Path, error: OSError, fix: str) -> str:
    name = shown(system, path)
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{name}: permission denied; {_permission(system, name, fix)}"
    return f"{name} {_FIXES.get(error.errno or 0, f'cannot be read: {error.strerror}')}"


def _permission(system: System, name: str, fix: str) -> str:
    if system.path("/system/build.prop").exists():
        return "Android keeps it from apps; over a cable adb can read it"
    if name.startswith("/sys/"):
        return fix or f"until the next boot allow it with: sudo chmod a+r {name}"
    return fix or "only root may read it here"


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """What matches a glob pattern, zone2 before zone10; nothing when the folder cannot be listed."""
    try:
        found = list(folder.glob(pattern))
    except OSError:
        return []
    return sorted(found, key=lambda path: _natural(str(path)))


def _natural(text: str) -> list[tuple[int, int, str]]:
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"([0-9]+)", text) if part
    ]


def labels(names: Iterable[str], tie_breaker: Callable[[int], str] | None = None) -> list[str]:
    """The names made unique: those that occur more than once get `@` and a tie breaker, or their rank."""
    names = list(names)
    seen: Counter[str] = Counter()
    count = Counter(names)
    result = []
    for index, name in enumerate(names):
        tail = tie_breaker(index) if tie_breaker else str(seen[name])
        seen[name] += 1
        result.append(name if count[name] == 1 else f"{name}@{tail}")
    return result if tie_breaker is None else labels(result)
