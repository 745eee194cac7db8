"""Energy counters of x86 processors (RAPL), as the powercap framework shows them.

Format: Linux, Documentation/power/powercap/powercap.rst. Counters are µJ and wrap at `max_energy_range_uj`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from outrider.contracts import Reading, Scope
from outrider.power.sensors.sysfs import is_linux, list_folder, read_number, read_text
from outrider.power.sensors.system import Sensor, System

__all__ = ["Rapl"]

_FIX = (
    "since Linux 5.10 only root may read it; until the next boot allow it with: "
    "sudo chmod a+r /sys/class/powercap/intel-rapl*/energy_uj"
)
_MAX_W = 1000.0
"""No domain of one socket draws more: what looks like more is a counter that was reset."""
_MIN_STEP_S = 0.002
"""Counters move about once in a millisecond; over less than two of these a quotient says nothing."""
_MIRROR_J = 0.25
"""Two dies that show the counter of their socket differ by what is drawn between the two reads."""


@dataclass
class _Counter:
    """One domain: the raw counter as last read, and the joules since then and before, without wraps."""

    source: str
    kind: str  # "package", "core", "uncore", "dram", "psys" or another name that the kernel gives
    path: Path
    range_j: float | None
    raw_j: float | None = None
    total_j: float = 0.0
    power_w: float | None = None
    time_s: float = 0.0
    reason: str = ""

    def update(self, system: System) -> None:
        """Read once. Afterwards `reason` is empty if `total_j` is true at `time_s`."""
        now = system.clock()
        raw, self.reason = read_number(system, self.path, 1e-6, _FIX)
        if raw is None:
            self.power_w = None
            return
        last, seconds = self.raw_j, now - self.time_s
        if last is not None and seconds < _MIN_STEP_S:
            return
        self.raw_j, self.time_s, self.power_w = raw, now, None
        if last is None:
            self.total_j = raw
            return
        step, self.reason = _step_j(last, raw, seconds, self.range_j)
        if step is not None:
            self.total_j += step
            self.power_w = step / seconds


def _step_j(last: float, now: float, seconds: float, range_j: float | None) -> tuple[float | None, str]:
    """Joules between two raw values, one wrap undone; None and the reason when they cannot be known."""
    if range_j is not None and seconds * _MAX_W > range_j:
        limit = range_j / _MAX_W
        return (
            None,
            f"{seconds:.0f} s since the last read: the counter may have wrapped twice; read it every {limit:.0f} s",
        )
    step = now - last
    if step < 0 and range_j is not None:
        step += range_j
    if step < 0:
        return None, "the counter went backwards and its range cannot be read; sample dropped"
    if step > seconds * _MAX_W:
        return None, "the counter was reset (suspend, or the driver was loaded again); sample dropped"
    return step, ""


class Rapl:
    """Every RAPL domain by itself, and one figure for the machine, `rapl:total`.

    Domains overlap (psys holds the packages, a package holds core and uncore), so nothing should be added
    up but by `rapl:total`: psys (scope `device`) where it works and is not less than the packages, else packages and
    dram together (scope `soc`). Dies that show their socket's counter count once. Power is the mean between
    two reads and comes from the second read on.
    """

    name = "rapl"
    period_s = 0.1

    def __init__(self, system: System) -> None:
        self._system = system
        self._counters = _find_counters(system)
        self._differ: set[tuple[str, str]] = set()
        self._total: _Total | None = None

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor if the machine has any domain, readable or not."""
        sensor = cls(system)
        return [sensor] if sensor._counters else []

    def read(self) -> list[Reading]:
        """Energy and power of each domain, and of the machine."""
        for counter in self._counters:
            counter.update(self._system)
        mirrors = self._mirrors()
        readings = []
        for counter in self._counters:
            readings += _domain_readings(counter, mirrors.get(counter.source, ""))
        own = [counter for counter in self._counters if counter.source not in mirrors]
        return readings + self._total_readings(own)

    def _mirrors(self) -> dict[str, str]:
        """Packages whose counter is another's -> that other. Counters once seen apart never count as one."""
        packages = [c for c in self._counters if c.kind == "package" and c.raw_j is not None and not c.reason]
        found: dict[str, str] = {}
        for first, second in combinations(packages, 2):
            pair = (first.source, second.source)
            if abs((first.raw_j or 0.0) - (second.raw_j or 0.0)) > _MIRROR_J:
                self._differ.add(pair)
            if pair not in self._differ and first.source not in found:
                found[second.source] = first.source
        return found

    def _total_readings(self, counters: Sequence[_Counter]) -> list[Reading]:
        if self._total is None:
            self._total = _choose_total(counters)
        if self._total is None:
            return []
        return self._total.readings(counters)


@dataclass
class _Total:
    """Which domains make the machine's figure, and the joules of all so far.

    Steps are added up, not the domains' sums, so that a domain that comes to count later brings no past with it.
    """

    kinds: tuple[str, ...]
    scope: Scope
    total_j: float | None = None
    last_j: dict[str, float] = field(default_factory=dict)

    def readings(self, counters: Sequence[_Counter]) -> list[Reading]:
        parts = [counter for counter in counters if counter.kind in self.kinds]
        time_s = max(part.time_s for part in parts)
        reason = next((f"{part.source}: {part.reason}" for part in parts if part.reason), "")
        if reason:
            return [Reading("rapl:total", "energy", None, self.scope, "counter", time_s, reason)]
        names = " + ".join(part.source for part in parts)
        energy = self._advance(parts)
        result = [Reading("rapl:total", "energy", energy, self.scope, "counter", time_s, names)]
        powers = [part.power_w for part in parts if part.power_w is not None]
        if len(powers) == len(parts):
            result.append(Reading("rapl:total", "power", sum(powers), self.scope, "counter", time_s, names))
        return result

    def _advance(self, parts: Sequence[_Counter]) -> float:
        if self.total_j is None:
            self.total_j = sum(part.total_j for part in parts)
        else:
            self.total_j += sum(part.total_j - self.last_j.get(part.source, part.total_j) for part in parts)
        self.last_j = self.last_j | {part.source: part.total_j for part in parts}
        return self.total_j


def _choose_total(counters: Sequence[_Counter]) -> _Total | None:
    """psys if it draws what its packages draw at least; None until two reads have told."""
    usable = [counter for counter in counters if counter.power_w is not None]
    packages = [counter for counter in counters if counter.kind == "package"]
    psys = [counter for counter in counters if counter.kind == "psys"]
    inner = sum(counter.power_w or 0.0 for counter in usable if counter.kind == "package")
    if any(counter.kind == "psys" and (counter.power_w or 0.0) > 0.9 * inner for counter in usable):
        return _Total(("psys",), "device")
    waiting = any(counter.power_w is None and not counter.reason for counter in [*packages, *psys])
    if waiting or not (packages or psys):
        return None
    if not packages:
        return _Total(("psys",), "device")
    return _Total(("package", "dram"), "soc")


def _domain_readings(counter: _Counter, mirror_of: str) -> list[Reading]:
    scope = _scope(counter.kind)
    reason = f"shows the same counter as {mirror_of}, once for the socket" if mirror_of else counter.reason
    energy = None if reason else counter.total_j
    result = [Reading(counter.source, "energy", energy, scope, "counter", counter.time_s, reason)]
    if counter.power_w is not None and not reason:
        result.append(Reading(counter.source, "power", counter.power_w, scope, "counter", counter.time_s))
    return result


def _scope(kind: str) -> Scope:
    scopes: dict[str, Scope] = {"psys": "device", "package": "package", "dram": "memory", "core": "core"}
    return scopes.get(kind, "rail")


def _find_counters(system: System) -> list[_Counter]:
    """Every domain once; an MMIO zone is the same counter as the MSR zone of its name, read another way."""
    if not is_linux(system):
        return []
    zones: dict[str, Path] = {}
    for pattern in ("intel-rapl*:*", "intel-rapl*:*/intel-rapl*:*"):
        for path in list_folder(system.path("/sys/class/powercap"), pattern):
            zones.setdefault(path.name, path)
    named = {zone: read_text(path / "name") or zone for zone, path in zones.items()}
    found: dict[str, _Counter] = {}
    for zone in sorted(zones, key=lambda zone: ("mmio" in zone, zone)):
        counter = _counter(system, zone, zones[zone], named)
        if counter.source not in found:
            found[counter.source] = counter
        elif "mmio" not in zone:  # two of one control type are two domains, whatever their name
            counter.source += f"@{zone.partition(':')[2]}"
            found[counter.source] = counter
    return list(found.values())


def _counter(system: System, zone: str, path: Path, named: dict[str, str]) -> _Counter:
    name = named[zone]
    kind = "package" if name.startswith("package") else name
    parent = re.sub(r":[0-9]+$", "", zone)
    source = f"rapl:{named[parent]}/{name}" if parent in named else f"rapl:{name}"
    range_j, _ = read_number(system, path / "max_energy_range_uj", 1e-6)
    return _Counter(source, kind, path / "energy_uj", range_j if range_j and range_j > 0 else None)
