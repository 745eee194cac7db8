"""Chips that watch a board: temperatures, power, energy, and over-current events.

Format: Linux, Documentation/hwmon/sysfs-interface.rst (m°C, µW, µJ). A chip is known by its name; its number
changes from boot to boot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.contracts import Method, Quantity, Reading, Scope
from outrider.power.sensors.sysfs import (
    PLAUSIBLE_C,
    Spikes,
    is_linux,
    labels,
    list_folder,
    measure,
    read_number,
    read_text,
)
from outrider.power.sensors.system import Sensor, System

__all__ = ["Hwmon"]

_ELSEWHERE = re.compile(r"ina\d|bat\d|ac\d*$|ucsi|cw201|sbs-|bq2")
"""Chips that other sensors read: INA monitors, batteries; and USB ports, which are no rails of the board."""
_SILICON = re.compile(r"coretemp|k10temp|k8temp|zenpower|cpu|gpu|soc|nouveau|i915|xe$")
_UNITS: dict[str, tuple[Quantity, float]] = {
    "temp": ("temperature", 1e-3),
    "power": ("power", 1e-6),
    "energy": ("energy", 1e-6),
}


@dataclass
class _Channel:
    source: str
    path: Path
    kind: str
    scope: Scope
    spikes: Spikes = field(default_factory=Spikes)

    def read(self, system: System) -> Reading:
        quantity, scale = _UNITS[self.kind]
        method: Method = "counter" if self.kind == "energy" else "instant"
        reading = measure(system, self.path, scale, self.source, quantity, self.scope, method)
        return self._plausible(reading) if self.kind == "temp" else reading

    def _plausible(self, reading: Reading) -> Reading:
        low, high = PLAUSIBLE_C
        if reading.value is None:
            self.spikes.forget()
            return reading
        if not low <= reading.value <= high:
            reason = f"reads {reading.value:g} °C, which no working part has; not connected?"
            return replace(reading, value=None, reason=reason)
        return replace(reading, value=self.spikes.settle(reading.value))


@dataclass
class _Counter:
    """A counter of events that each held something back; `count` is what it showed at the last read."""

    source: str
    path: Path
    enabled: Path
    count: float | None = None

    def read(self, system: System) -> Reading:
        now = system.clock()
        count, reason = read_number(system, self.path)
        last, self.count = self.count, count
        if count is None:
            return Reading(self.source, "throttle", None, "module", "counter", now, reason)
        if last is None:
            reason = "the first count since it could not be read"
            return Reading(self.source, "throttle", None, "module", "counter", now, reason)
        armed = read_text(self.enabled) != "0"  # events are counted also where they throttle nothing
        return Reading(self.source, "throttle", float(armed and count > last), "module", "counter", now)


class Hwmon:
    """Temperature, power and energy of every chip, and Jetson's over-current events (`soctherm_oc`).

    An event counter gives `throttle` 1 if it moved since the last read, else 0.
    """

    name = "hwmon"
    period_s = 0.5

    def __init__(self, system: System) -> None:
        self._system = system
        self._channels: list[_Channel] = []
        self._counters: list[_Counter] = []
        chips = _find_chips(system)
        for name, chip in chips:
            self._channels += _find_channels(name, chip)
            self._counters += _find_counters(name, chip)
        for counter in self._counters:
            counter.read(system)

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor if any chip has something that is read here."""
        sensor = cls(system)
        return [sensor] if sensor._channels or sensor._counters else []

    def read(self) -> list[Reading]:
        """Every channel; one that fails gives its reason and stops no other."""
        readings = [channel.read(self._system) for channel in self._channels]
        return readings + [counter.read(self._system) for counter in self._counters]


def _find_chips(system: System) -> list[tuple[str, Path]]:
    """(name, folder) of every chip; chips of one name are told apart by the device that they sit on."""
    if not is_linux(system):
        return []
    named = [
        (name, path)
        for path in list_folder(system.path("/sys/class/hwmon"), "hwmon*")
        if (name := read_text(path / "name")) and not _ELSEWHERE.match(name.lower())
    ]
    names = labels([name for name, _ in named], lambda index: _device(named[index][1]))
    return [(name, path) for name, (_, path) in zip(names, named, strict=True)]


def _device(chip: Path) -> str:
    device = chip / "device"
    return device.resolve().name if device.exists() else chip.name


def _find_channels(chip: str, folder: Path) -> list[_Channel]:
    paths = [path for kind in _UNITS for path in list_folder(folder, f"{kind}[0-9]*_input")]
    have = {path.name for path in paths}
    means = list_folder(folder, "power[0-9]*_average")
    paths += [path for path in means if path.name.replace("average", "input") not in have]
    stems = [path.name.rpartition("_")[0] for path in paths]
    named = labels([read_text(folder / f"{stem}_label") or stem for stem in stems])
    channels = [
        _Channel(f"hwmon:{chip}:{label}", path, kind, _scope(kind, chip, label))
        for path, stem, label in zip(paths, stems, named, strict=True)
        for kind in [stem.rstrip("0123456789")]
    ]
    return _without_offset(channels)


def _without_offset(channels: list[_Channel]) -> list[_Channel]:
    """Drop AMD's Tctl where Tdie is there: some models add 10 to 27 °C to it for the fan's sake."""
    if any(channel.source.endswith(":Tdie") for channel in channels):
        return [channel for channel in channels if not channel.source.endswith(":Tctl")]
    return channels


def _scope(kind: str, chip: str, label: str) -> Scope:
    if kind != "temp":
        return "device" if chip == "power_meter" else "rail"  # ACPI's meter sits at the machine's inlet
    if not _SILICON.search(chip.lower()):
        return "device"
    return "core" if label.startswith("Core ") else "die"


def _find_counters(chip: str, folder: Path) -> list[_Counter]:
    return [
        _Counter(f"hwmon:{chip}:{stem}", path, folder / f"{stem}_throt_en")
        for path in list_folder(folder, "oc[0-9]*_event_cnt")
        for stem in [path.name.split("_")[0]]
    ]
