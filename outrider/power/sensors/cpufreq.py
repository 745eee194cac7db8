"""Clocks of CPU clusters, GPUs and memory, and Intel's counts of thermal throttling.

Formats: Linux, Documentation/admin-guide/pm/cpufreq.rst (kHz), ABI/testing/sysfs-class-devfreq (Hz),
admin-guide/thermal/intel_thermal_throttle.rst.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.contracts import Quantity, Reading
from outrider.power.sensors.sysfs import (
    Figure,
    KeptNumber,
    Parse,
    is_linux,
    list_folder,
    number_in,
    read_number,
)
from outrider.power.sensors.system import Sensor, System

__all__ = ["Cpufreq", "IntelThrottle"]

_UNITS = re.compile(r"gpu|gv1|gp10|ga10|gb10|gm20|kgsl|mali|g3d|npu|nvdla|dmc|emc|panfrost")
_BANDWIDTH = re.compile(r"bw|memlat|-lat|l3|busmon|icc")
"""Votes for bandwidth of Qualcomm and others: devfreq devices whose numbers are no frequencies."""


class _Choice:
    """Files of one figure, the best first. Which of them are there is looked up again when a read fails."""

    def __init__(self, system: System, paths: list[Path], scale: float) -> None:
        self._files = [KeptNumber(system, path, scale, _parser(path)) for path in paths]
        self._there: list[KeptNumber] = []

    def read(self) -> Figure:
        """The first file that holds a figure; else the reason of the first that is there."""
        self._there = self._there or [file for file in self._files if file.path.exists()] or self._files[-1:]
        reasons = []
        for file in self._there:
            value, reason = file.read()
            if value is not None and value > 0:
                return value, ""
            reasons.append(reason or f"{file.path.name} is {value:g}: the unit is off")
        self._there = []
        return None, reasons[0]

    def close(self) -> None:
        for file in self._files:
            file.close()


class _Unit:
    """A cluster, GPU or memory controller, with the files of its figures."""

    def __init__(
        self,
        system: System,
        source: str,
        folder: Path,
        scale: float,
        files: tuple[tuple[Quantity, tuple[str, ...]], ...],
    ) -> None:
        self.source = source
        self._clock = system.clock
        self._choices = [
            (name, _Choice(system, [folder / file for file in names], scale)) for name, names in files
        ]

    def read(self) -> list[Reading]:
        now = self._clock()
        readings = []
        for quantity, choice in self._choices:
            value, reason = choice.read()
            readings.append(Reading(self.source, quantity, value, "die", "instant", now, reason))
        return readings

    def close(self) -> None:
        for _, choice in self._choices:
            choice.close()


def _parser(path: Path) -> Parse:
    return _highest if path.name == "available_frequencies" else number_in


def _highest(system: System, path: Path, text: str, scale: float) -> Figure:
    steps = [float(word) for word in text.split() if word.isdigit()]
    return (max(steps) * scale, "") if steps else (None, f"{path.name} lists no frequency")


# The hardware's own figure comes first: scaling_cur_freq may be what was asked for, not what runs.
_POLICY: tuple[tuple[Quantity, tuple[str, ...]], ...] = (
    ("clock", ("cpuinfo_cur_freq", "scaling_cur_freq")),
    ("clock_limit", ("scaling_max_freq",)),
    ("clock_max", ("cpuinfo_max_freq",)),
)
_DEVICE: tuple[tuple[Quantity, tuple[str, ...]], ...] = (
    ("clock", ("cur_freq", "target_freq")),
    ("clock_limit", ("max_freq",)),
    ("clock_max", ("available_frequencies",)),
)


class Cpufreq:
    """Clock, allowed clock and highest clock of every CPU cluster, GPU and memory controller that shows them.

    `clock` is also low when a unit has nothing to do; only `clock_limit` below `clock_max` tells of a limit.
    """

    name = "cpufreq"
    period_s = 0.5

    def __init__(self, system: System) -> None:
        self._units = _find_policies(system) + _find_devices(system)

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor if any unit shows a clock."""
        sensor = cls(system)
        return [sensor] if sensor._units else []

    def read(self) -> list[Reading]:
        """Three figures of each unit."""
        return [reading for unit in self._units for reading in unit.read()]

    def close(self) -> None:
        """Close the files until the next read."""
        for unit in self._units:
            unit.close()


def _find_policies(system: System) -> list[_Unit]:
    if not is_linux(system):
        return []
    cpus = system.path("/sys/devices/system/cpu")
    found = list_folder(cpus, "cpufreq/policy[0-9]*")
    if found:
        return [_Unit(system, f"cpufreq:{path.name}", path, 1e3, _POLICY) for path in found]
    old = list_folder(cpus, "cpu[0-9]*/cpufreq")
    return [_Unit(system, f"cpufreq:{path.parent.name}", path, 1e3, _POLICY) for path in old]


def _find_devices(system: System) -> list[_Unit]:
    if not is_linux(system):
        return []
    return [
        _Unit(system, f"devfreq:{path.name}", path, 1.0, _DEVICE)
        for path in list_folder(system.path("/sys/class/devfreq"))
        if _UNITS.search(path.name.lower()) and not _BANDWIDTH.search(path.name.lower())
    ]


@dataclass
class _Count:
    """Files of one kind over all CPUs. Cores of a package share its count, so the largest step tells."""

    source: str
    paths: list[Path]
    timed: bool  # ms spent throttled; otherwise a number of events
    last: list[float | None]
    time_s: float

    def read(self, system: System) -> Reading:
        now = system.clock()
        figures = [read_number(system, path) for path in self.paths]
        values = [value for value, _ in figures]
        steps = [
            new - old
            for old, new in zip(self.last, values, strict=True)
            if old is not None and new is not None and new >= old  # a CPU that went offline starts again
        ]
        seconds = now - self.time_s
        self.last, self.time_s = values, now
        reason = next((reason for _, reason in figures if reason), "")
        share = None if not steps else self._share(max(steps), seconds)
        reason = "" if share is not None else reason or "the counts started again"
        return Reading(self.source, "throttle", share, "die", "counter", now, reason)

    def _share(self, step: float, seconds: float) -> float:
        if not self.timed:
            return float(step > 0)
        return min(step / 1000 / seconds, 1.0) if seconds > 0 else float(step > 0)


class IntelThrottle:
    """Share of time that Intel cores and packages were held back by heat since the last read.

    Without the kernel's times (before 5.6), 1 if any event was counted. Counts of before this sensor was
    made are not told.
    """

    name = "thermal-throttle"
    period_s = 1.0

    def __init__(self, system: System) -> None:
        self._system = system
        self._counts: list[_Count] = []
        if not is_linux(system):
            return
        for kind in ("core", "package"):
            for timed, name in ((True, "total_time_ms"), (False, "count")):
                pattern = f"cpu[0-9]*/thermal_throttle/{kind}_throttle_{name}"
                if paths := list_folder(system.path("/sys/devices/system/cpu"), pattern):
                    last = [read_number(system, path)[0] for path in paths]
                    self._counts.append(_Count(f"throttle:{kind}", paths, timed, last, system.clock()))
                    break

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor on Intel processors whose kernel counts."""
        sensor = cls(system)
        return [sensor] if sensor._counts else []

    def read(self) -> list[Reading]:
        """One figure for the cores, one for the packages."""
        return [count.read(self._system) for count in self._counts]
