"""Batteries of laptops and phones, as the power supply class shows them.

Format: Linux, ABI/testing/sysfs-class-power (µA, µV, µW). Vendors differ in unit and sign, so the sign comes from
`status` and the unit of a phone's current is judged once, from several samples under load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from outrider.contracts import Reading
from outrider.power.sensors.sysfs import Figure, KeptNumber, is_linux, list_folder, read_number, read_text
from outrider.power.sensors.system import Sensor, System

__all__ = ["LOADED_SAMPLES", "Battery", "Unit", "charging", "current_unit", "discharge_w", "volts"]

LOADED_SAMPLES = 3
"""Samples under load that the unit of a current is judged from."""
_LEAST_LOAD_W = 0.02
"""A phone or laptop that works draws more; what looks like less is mA read as µA."""
_MOST_LOAD_W = 250.0


class Unit(NamedTuple):
    """What a current's number is multiplied by to give A, and how that was judged."""

    scale: float
    reason: str


def volts(raw: float) -> float | None:
    """A pack's voltage from µV (as documented) or mV; None when neither gives 2 to 100 V."""
    return next((raw * scale for scale in (1e-6, 1e-3) if 2.0 <= raw * scale <= 100.0), None)


def current_unit(samples: Sequence[tuple[float, float]]) -> Unit | None:
    """The unit of a battery's current from samples (raw current, volts) while it discharges under load.

    None until `LOADED_SAMPLES` are not 0, or when neither µA (as documented) nor mA gives a
    possible power.
    """
    loaded = [(abs(raw), volt) for raw, volt in samples if raw != 0]
    if len(loaded) < LOADED_SAMPLES:
        return None
    for scale, name in ((1e-6, "µA"), (1e-3, "mA")):
        watts = median(raw * scale * volt for raw, volt in loaded)
        if _LEAST_LOAD_W <= watts <= _MOST_LOAD_W:
            return Unit(
                scale, f"current taken for {name}: {len(loaded)} samples under load give {watts:.2f} W"
            )
    return None


def charging(status: str, on_mains: bool | None) -> Figure:
    """1 if the machine is fed from outside, 0 if from this battery; from `status`, else from the mains' `online`."""
    if status in ("Charging", "Full"):
        return 1.0, ""
    if status == "Discharging":
        return 0.0, ""
    if on_mains is not None:
        return float(on_mains), ""
    return None, f"the battery's status is {status!r} and no supply says whether it is connected"


def discharge_w(watts: float, status: str) -> Figure:
    """Power that leaves the battery, signed by `status` alone: vendors do not agree on the sign of a current."""
    if status == "Discharging":
        if watts == 0:
            return None, "reads 0 W while discharging: the gauge has not measured yet or cannot"
        return abs(watts), ""
    if status == "Charging":
        return 0.0 - abs(watts), ""  # not -0.0
    return None, f"status is {status!r}: the battery does not see what the machine draws; unplug to measure"


@dataclass
class _Pack:
    system: System
    folder: Path
    samples: list[tuple[float, float]] = field(default_factory=list)
    unit: Unit | None = None
    files: dict[str, KeptNumber] = field(init=False)

    def __post_init__(self) -> None:
        scales = {"power_now": 1e-6, "current_now": 1.0, "voltage_now": 1.0, "capacity": 1.0, "temp": 0.1}
        self.files = {
            name: KeptNumber(self.system, self.folder / name, scale)
            for name, scale in scales.items()
            if name not in ("power_now", "temp") or (self.folder / name).exists()
        }

    @property
    def name(self) -> str:
        return self.folder.name

    def power(self, status: str) -> Figure:
        watts, reason = self._watts(status)
        if watts is None:
            return None, reason
        value, why = discharge_w(watts, status)
        if value is not None and abs(value) > _MOST_LOAD_W:
            return None, f"{value:.0f} W is not possible; the gauge's unit is unknown"
        return value, why or reason

    def _watts(self, status: str) -> Figure:
        """Watts without a meaningful sign: from `power_now` (always µW), else current times voltage."""
        if "power_now" in self.files:
            return self.files["power_now"].read()
        raw, reason = self.files["current_now"].read()
        raw_volt, reason_volt = self.files["voltage_now"].read()
        volt = None if raw_volt is None else volts(raw_volt)
        if raw is None or volt is None:
            return None, reason or reason_volt or f"voltage_now reads {raw_volt:g}, which is no battery's"
        if self.unit is None and status == "Discharging" and raw != 0:
            self.samples = [*self.samples[-15:], (raw, volt)]
            self.unit = current_unit(self.samples)
        if self.unit is None:
            count = f"{len(self.samples)} of {LOADED_SAMPLES} samples"
            return None, f"whether current_now is µA or mA shows under load on battery ({count} so far)"
        return raw * self.unit.scale * volt, self.unit.reason


class Battery:
    """Charge, whether a supply feeds the machine, power and temperature of each pack.

    Power is positive while a pack discharges and negative while it charges. With more than one pack their sum is
    `battery:total`.
    """

    name = "battery"
    period_s = 2.0

    def __init__(self, system: System) -> None:
        self._system = system
        supplies = list_folder(system.path("/sys/class/power_supply")) if is_linux(system) else []
        kinds = {path: read_text(path / "type") or "" for path in supplies}
        self._packs = [
            _Pack(system, path)
            for path in supplies
            # A battery of scope "Device" is a mouse's or a pen's; an empty bay has `present` 0.
            if kinds[path] == "Battery"
            and read_text(path / "scope") != "Device"
            and read_text(path / "present") != "0"
        ]
        self._mains = [path for path in supplies if kinds[path].startswith(("Mains", "USB", "Wireless"))]

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor if the machine has a battery of its own."""
        sensor = cls(system)
        return [sensor] if sensor._packs else []

    def read(self) -> list[Reading]:
        """Every pack, and their sum if there are several."""
        on_mains = self._on_mains()
        powers: list[Reading] = []
        readings: list[Reading] = []
        for pack in self._packs:
            power, *others = self._pack_readings(pack, on_mains)
            powers.append(power)
            readings += [power, *others]
        return readings + (_sum_of(powers) if len(powers) > 1 else [])

    def close(self) -> None:
        """Close the files until the next read."""
        for pack in self._packs:
            for file in pack.files.values():
                file.close()

    def _on_mains(self) -> bool | None:
        states = [read_number(self._system, path / "online")[0] for path in self._mains]
        known = [state for state in states if state is not None]
        return any(state > 0 for state in known) if known else None

    def _pack_readings(self, pack: _Pack, on_mains: bool | None) -> list[Reading]:
        now, source = self._system.clock(), f"battery:{pack.name}"
        status = read_text(pack.folder / "status") or "Unknown"
        power, reason = pack.power(status)
        percent, reason_percent = pack.files["capacity"].read()
        if percent is not None and not 0 <= percent <= 100:
            percent, reason_percent = None, f"capacity reads {percent:g} %"
        fed, reason_fed = charging(status, on_mains)
        readings = [
            Reading(source, "power", power, "battery", "instant", now, reason),
            Reading(source, "battery", percent, "battery", "instant", now, reason_percent),
            Reading(source, "charging", fed, "battery", "instant", now, reason_fed),
        ]
        if "temp" in pack.files:
            temp, reason = pack.files["temp"].read()
            if temp is not None and not -40 <= temp <= 125:
                temp, reason = None, f"temp reads {temp:g} °C"
            readings.append(Reading(source, "temperature", temp, "battery", "instant", now, reason))
        return readings


def _sum_of(powers: Sequence[Reading]) -> list[Reading]:
    """What all packs give. One that rests while another discharges gives nothing, which is no gap."""
    moving = [power for power in powers if power.value is not None]
    resting = [power for power in powers if power.value is None and "does not see" in power.reason]
    time_s = powers[0].time_s
    if not moving or len(moving) + len(resting) < len(powers):
        reason = next((power.reason for power in powers if power.value is None), "")
        return [Reading("battery:total", "power", None, "battery", "instant", time_s, reason)]
    value = sum(power.value or 0.0 for power in moving)
    return [Reading("battery:total", "power", value, "battery", "instant", time_s)]
