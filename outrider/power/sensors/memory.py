"""Memory that can still be used, the limits of the process's cgroups, and how much tasks wait for memory.

Formats: Linux, Documentation/filesystems/proc.rst (KiB), accounting/psi.rst, and `cgroups`. MB are 10^6 bytes. Free
swap is never counted: on phones and small boards it is compressed memory (zram), and weights do not compress.
"""

from __future__ import annotations

import re
from pathlib import Path

from outrider.contracts import Method, Quantity, Reading, Scope
from outrider.power.sensors.cgroups import full_stalls, memory_cgroups, reached, stalls, tightest
from outrider.power.sensors.sysfs import Figure, KeptNumber, is_linux, shown
from outrider.power.sensors.system import Sensor, System

__all__ = ["Memory"]


class Memory:
    """Available memory of the machine and of this process, limits, how often they were reached, and pressure.

    `memory:host` is the machine's MemAvailable (scope `device`); `memory:cgroup` is what the tightest cgroup
    limit above this process leaves (scope `process`); pages of files do not count as used, for the kernel drops
    them before it kills anyone, and `MemAvailable` counts the same. What can be used is the lesser of the two.
    """

    name = "memory"
    period_s = 2.0

    def __init__(self, system: System) -> None:
        self._system = system
        self._meminfo = KeptNumber(system, system.path("/proc/meminfo"), 1024 / 1e6, _available)
        self._stalls = KeptNumber(system, system.path("/proc/pressure/memory"), 1.0, full_stalls)
        self._own_cgroup = system.path("/proc/self/cgroup")

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor wherever there is `/proc/meminfo`."""
        return [cls(system)] if is_linux(system) and system.path("/proc/meminfo").exists() else []

    def read(self) -> list[Reading]:
        """Availability, limits and pressure of now."""
        return [self._host(), *self._cgroup(), self._pressure()]

    def _reading(
        self, source: str, quantity: Quantity, figure: Figure, scope: Scope, method: Method = "instant"
    ) -> Reading:
        value, reason = figure
        return Reading(source, quantity, value, scope, method, self._system.clock(), reason)

    def close(self) -> None:
        """Close the files until the next read."""
        self._meminfo.close()
        self._stalls.close()

    def _host(self) -> Reading:
        return self._reading("memory:host", "memory_available", self._meminfo.read(), "device")

    def _cgroup(self) -> list[Reading]:
        if not self._own_cgroup.exists():
            return []
        cgroups = memory_cgroups(self._system)
        limit = tightest(self._system, cgroups)
        figures: dict[Quantity, Figure] = {}
        if limit is None:
            reason = "no cgroup above this process limits its memory (or the kernel has the controller off)"
            figures["memory_limit"] = None, reason
        else:
            figures["memory_limit"] = limit.limit / 1e6, ""
            figures["memory_used"] = limit.used / 1e6, ""
            figures["memory_available"] = max(limit.free, 0.0) / 1e6, ""
        figures["memory_pressure"] = stalls(self._system, cgroups)
        found = [self._reading("memory:cgroup", name, figure, "process") for name, figure in figures.items()]
        events = reached(self._system, cgroups)
        return [*found, self._reading("memory:cgroup", "memory_events", events, "process", "counter")]

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
