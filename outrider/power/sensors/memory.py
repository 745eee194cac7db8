"""Memory that can still be used, the limits of the process's cgroups, and how much tasks wait for memory.

Formats: Linux, Documentation/filesystems/proc.rst (KiB), admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst
(bytes), accounting/psi.rst. MB are 10^6 bytes. Free swap is never counted: on phones and small boards it is
compressed memory (zram), and weights do not compress.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.contracts import Quantity, Reading, Scope
from outrider.power.sensors.sysfs import Figure, KeptNumber, is_linux, read_number, read_text, shown
from outrider.power.sensors.system import Sensor, System

__all__ = ["Memory"]

_NO_LIMIT = 2**60
"""Version 1 shows no limit as the largest page-aligned number."""
_FILE_PAGES = ("active_file", "inactive_file")
_FULL = re.compile(r"^full avg10=([0-9.]+)", re.MULTILINE)


class Memory:
    """Available memory of the machine and of this process, limits, and pressure.

    `memory:host` is the machine's MemAvailable (scope `device`); `memory:cgroup` is what the tightest cgroup
    limit above this process leaves (scope `process`); pages of files do not count as used, for the kernel drops
    them before it kills anyone, and `MemAvailable` counts the same. What can be used is the lesser of the two.
    """

    name = "memory"
    period_s = 2.0

    def __init__(self, system: System) -> None:
        self._system = system
        self._meminfo = KeptNumber(system, system.path("/proc/meminfo"), 1024 / 1e6, _available)
        self._stalls = KeptNumber(system, system.path("/proc/pressure/memory"), 1.0, _full)
        self._own_cgroup = system.path("/proc/self/cgroup")

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor wherever there is `/proc/meminfo`."""
        return [cls(system)] if is_linux(system) and system.path("/proc/meminfo").exists() else []

    def read(self) -> list[Reading]:
        """Availability, limits and pressure of now."""
        return [self._host(), *self._cgroup(), self._pressure()]

    def _reading(self, source: str, quantity: Quantity, figure: Figure, scope: Scope) -> Reading:
        value, reason = figure
        return Reading(source, quantity, value, scope, "instant", self._system.clock(), reason)

    def close(self) -> None:
        """Close the files until the next read."""
        self._meminfo.close()
        self._stalls.close()

    def _host(self) -> Reading:
        return self._reading("memory:host", "memory_available", self._meminfo.read(), "device")

    def _cgroup(self) -> list[Reading]:
        if not self._own_cgroup.exists():
            return []
        levels = [level for folder in _folders(self._system) if (level := _level(self._system, folder))]
        if not levels:
            reason = "no cgroup above this process limits its memory (or the kernel has the controller off)"
            return [self._reading("memory:cgroup", "memory_limit", (None, reason), "process")]
        tightest = min(levels, key=lambda level: level.free)
        figures: dict[Quantity, float] = {
            "memory_limit": tightest.limit,
            "memory_used": tightest.used,
            "memory_available": max(tightest.free, 0.0),
        }
        return [
            self._reading("memory:cgroup", quantity, (value / 1e6, ""), "process")
            for quantity, value in figures.items()
        ]

    def _pressure(self) -> Reading:
        value, reason = self._stalls.read()
        if "is gone" in reason:
            reason = "/proc/pressure/memory is absent; boot with psi=1 to have it"
        elif "switched off" in reason:
            reason = f"{reason}; boot with psi=1 to have it"
        return self._reading("memory:pressure", "memory_pressure", (value, reason), "device")


def _available(system: System, path: Path, text: str, scale: float) -> Figure:
    match = re.search(r"^MemAvailable:\s+([0-9]+) kB", text, re.MULTILINE)
    if match is None:
        return None, f"{shown(system, path)} has no MemAvailable (Linux before 3.14)"
    return int(match[1]) * scale, ""


def _full(system: System, path: Path, text: str, scale: float) -> Figure:
    match = _FULL.search(text)
    if match is None:
        return None, f"{shown(system, path)} holds {text[:40]!r}, without a line of full stalls"
    return float(match[1]) * scale, ""


@dataclass(frozen=True)
class _Level:
    """Bytes of one cgroup; `used` without the pages of files."""

    limit: float
    used: float

    @property
    def free(self) -> float:
        return self.limit - self.used


def _folders(system: System) -> Iterator[Path]:
    """The process's own memory cgroups and all above them, of version 2 and 1."""
    for line in (read_text(system.path("/proc/self/cgroup")) or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if hierarchy == "0" and not controllers:
            bases = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            bases = ["/sys/fs/cgroup/memory"]
        else:
            continue
        for base in bases:
            yield from _upwards(system.path(base), own)


def _upwards(base: Path, own: str) -> Iterator[Path]:
    """From the process's folder to the mount. In a container the path may be the host's, and not be there."""
    parts = [part for part in own.split("/") if part]
    if ".." in parts or not base.joinpath(*parts).is_dir():
        parts = []
    for depth in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:depth])


def _level(system: System, folder: Path) -> _Level | None:
    """The limit of one cgroup and what counts against it; None where nothing is limited.

    `memory.high` counts as a limit too: above it the kernel stalls the process to take memory back.
    """
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    found = [read_number(system, folder / name)[0] for name in names]
    limits = [limit for limit in found if limit is not None and limit < _NO_LIMIT]
    used = [read_number(system, folder / name)[0] for name in ("memory.current", "memory.usage_in_bytes")]
    in_use = next((value for value in used if value is not None), None)
    if not limits or in_use is None:
        return None
    stat = read_text(folder / "memory.stat") or ""
    listed = re.findall(r"^((?:total_)?(?:in)?active_file) ([0-9]+)", stat, re.MULTILINE)
    pages = {name: float(size) for name, size in listed}
    cache = sum(pages.get(f"total_{name}", pages.get(name, 0.0)) for name in _FILE_PAGES)
    return _Level(min(limits), max(in_use - cache, 0.0))
