"""Thermal zones, their trip points, and the coolers that hold units back.

Format: Linux, Documentation/driver-api/thermal/sysfs-api.rst. Temperatures are m°C by that document; some vendors
give °C or tenths, and rubbish for sensors that are off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from outrider.contracts import Reading, Scope
from outrider.power.sensors.sysfs import (
    PLAUSIBLE_C,
    Figure,
    KeptNumber,
    Spikes,
    is_linux,
    labels,
    list_folder,
    read_number,
    read_text,
)
from outrider.power.sensors.system import Sensor, System

__all__ = ["Thermal", "Trip", "unit_of"]

_NOT_SILICON = re.compile(
    r"pmic|pmu|chg|charg|usb|wifi|wlan|modem|mdm|pa[-_]?therm|xo|board|acpitz|flash|cam|disp|lcd"
)
_SKIN = re.compile(r"skin|shell|case|chassis|back[-_]|front|surface")
_BATTERY = re.compile(r"batt|^bms|^fg")
_SILICON = re.compile(
    r"cpu|gpu|soc|x86_pkg|tcpu|tj|cv\d|npu|nsp|tpu|ddr|big|little|mid|g3d|core|die|bcm|aoss|package|cluster|ao-therm|pll"
)
_NO_TEMPERATURE = re.compile(r"^soc$|^[iv]bat|bcl")
"""Zones of phones for the state of charge in %, currents and voltages."""
_HOLDS_BACK = re.compile(
    r"cpufreq|devfreq|processor|powerclamp|throttle-alert|thermal-idle|cpu-hotplug|cpu-isolate|thermal-pause"
)
"""Coolers that slow or stop a unit. Fans, displays, radios and charging currents do not."""
_MOST_ZONES = 160


@dataclass(frozen=True)
class Trip:
    """A temperature at which the kernel does something: `kind` is passive, active, hot or critical."""

    kind: str
    temp_c: float


def unit_of(raw: float) -> float | None:
    """What a zone's number must be divided by to give °C, judged by its size alone; None for 0 and rubbish.

    Up to 125 is taken for °C, up to 999 for tenths, above for m°C. 0 is what a sensor shows that is off.
    """
    size = abs(raw)
    unit = 1.0 if size <= PLAUSIBLE_C[1] else 10.0 if size < 1000 else 1000.0
    return unit if raw != 0 and _is_plausible(raw / unit) else None


def _is_plausible(temp_c: float) -> bool:
    low, high = PLAUSIBLE_C
    return low <= temp_c <= high


@dataclass
class _Zone:
    system: System
    source: str
    folder: Path
    scope: Scope
    unit: float | None = None
    spikes: Spikes = field(default_factory=Spikes)
    file: KeptNumber = field(init=False)

    def __post_init__(self) -> None:
        self.file = KeptNumber(self.system, self.folder / "temp")

    def read(self) -> Reading:
        now = self.system.clock()
        value, reason = self._temperature()
        return Reading(self.source, "temperature", value, self.scope, "instant", now, reason)

    def _temperature(self) -> Figure:
        raw, reason = self.file.read()
        if raw is None:
            self.spikes.forget()
            return None, reason
        value = self._celsius(raw)
        if value is None:
            return None, f"reads {raw:g}, which is no temperature in m°C, tenths or °C: off or not connected"
        return self.spikes.settle(value), ""

    def _celsius(self, raw: float) -> float | None:
        """°C in the unit that the zone has shown so far, unless that has become impossible."""
        if raw != 0 and self.unit is not None and _is_plausible(raw / self.unit):
            return raw / self.unit
        unit = unit_of(raw)
        if unit is None:
            return None
        self.unit = unit
        return raw / unit

    def trips(self) -> list[Trip]:
        found = []
        for path in list_folder(self.folder, "trip_point_*_temp"):
            raw, _ = read_number(self.system, path)
            kind = read_text(path.with_name(path.name.replace("_temp", "_type")))
            unit = None if raw is None else unit_of(raw)
            temp_c = None if raw is None or unit is None else raw / unit
            if kind and temp_c is not None and temp_c > 0:
                found.append(Trip(kind, temp_c))
        return found


@dataclass
class _Cooler:
    """`most` is the highest state, which stays what it is; it is read again when it cannot be right."""

    system: System
    source: str
    folder: Path
    most: float | None = None
    file: KeptNumber = field(init=False)

    def __post_init__(self) -> None:
        self.file = KeptNumber(self.system, self.folder / "cur_state")

    def read(self) -> Reading:
        now, reason_most = self.system.clock(), ""
        state, reason = self.file.read()
        if self.most is None or state is None or not 0 < self.most >= state:
            self.most, reason_most = read_number(self.system, self.folder / "max_state")
        most, share = self.most, None
        if state is not None and most is not None and most > 0:
            share = min(max(state / most, 0.0), 1.0)  # powerclamp shows -1 when idle
        reason = reason or reason_most or ("" if share is not None else "has no states")
        return Reading(self.source, "throttle", share, "die", "instant", now, reason)


class Thermal:
    """Every zone's temperature, and how far each cooler of a compute unit is turned up (0..1).

    A cooler above 0 means that the kernel throttles now. The throttle of a cooler is its state over its
    highest state, not a share of lost speed.
    """

    name = "thermal"
    period_s = 1.0

    def __init__(self, system: System) -> None:
        self._zones = _find_zones(system)
        self._coolers = _find_coolers(system)
        self._parts: list[_Zone | _Cooler] = [*self._zones, *self._coolers]

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor if there is a zone or a cooler."""
        sensor = cls(system)
        return [sensor] if sensor._zones or sensor._coolers else []

    def read(self) -> list[Reading]:
        """Every zone and cooler; one that fails gives its reason."""
        return [part.read() for part in self._parts]

    def close(self) -> None:
        """Close the files until the next read."""
        for part in self._parts:
            part.file.close()

    def trips(self) -> dict[str, list[Trip]]:
        """Source of a zone -> its trip points, without those that drivers leave at a rubbish value."""
        return {zone.source: found for zone in self._zones if (found := zone.trips())}


def _find_zones(system: System) -> list[_Zone]:
    paths = _folders(system, "thermal_zone")
    kinds = [(read_text(path / "type") or path.name, path) for path in paths]
    kinds = [(kind, path) for kind, path in kinds if not _NO_TEMPERATURE.search(kind.lower())]
    names = labels([kind for kind, _ in kinds])
    return [
        _Zone(system, f"thermal:{name}", path, _scope(name))
        for name, (_, path) in zip(names, kinds, strict=True)
    ]


def _find_coolers(system: System) -> list[_Cooler]:
    named = [(read_text(path / "type") or "", path) for path in _folders(system, "cooling_device")]
    named = [(name, path) for name, path in named if _HOLDS_BACK.search(name.lower())]
    names = labels([name for name, _ in named])
    return [_Cooler(system, f"cooling:{name}", path) for name, (_, path) in zip(names, named, strict=True)]


def _folders(system: System, stem: str) -> list[Path]:
    """The folders by listing; where listing is denied (Android), by trying their names."""
    if not is_linux(system):
        return []
    for base in ("/sys/class/thermal", "/sys/devices/virtual/thermal"):
        if found := list_folder(system.path(base), f"{stem}[0-9]*"):
            return found
    candidates = (system.path(f"/sys/class/thermal/{stem}{n}") for n in range(_MOST_ZONES))
    return [path for path in candidates if read_text(path / "type") is not None]


def _scope(name: str) -> Scope:
    text = name.lower()
    if _SKIN.search(text):
        return "skin"
    if _BATTERY.search(text):
        return "battery"
    return "die" if _SILICON.search(text) and not _NOT_SILICON.search(text) else "device"
