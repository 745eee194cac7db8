"""What only Android has: the thermal service of the system, and the clocks of Qualcomm's GPU driver.

Formats: `dumpsys thermalservice` as Android 10 and later print it (ThermalManagerService), types and levels of
`android.hardware.thermal`; `/sys/class/kgsl` of the msm kernel. Zones, coolers, CPU clocks, battery and
memory are the same files as on any Linux and are read by the sensors for these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outrider.contracts import Quantity, Reading, Scope
from outrider.power.sensors.sysfs import Figure, KeptNumber, is_linux, shown
from outrider.power.sensors.system import CommandResult, Sensor, System

__all__ = ["Kgsl", "ThermalDump", "ThermalService", "is_android", "parse_thermalservice"]

LEVELS = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")
_SEVERE = 3
_STATUS_HEADROOM = (0.8, 0.933, 1.0, 1.05, 1.25, 1.35)
"""From light on, with the thresholds of AOSP's test phone (39, 43, 45, 46.5, 52.5, 55.5 °C)."""
_HEADROOM_SPAN_C = 30.0
"""Android's headroom is 1 at the threshold `severe` and 0 at 30 °C below it."""
_SCOPES: Mapping[int, Scope] = {0: "die", 1: "die", 2: "battery", 3: "skin", 9: "die", 10: "die", 13: "soc"}
_NAMES: tuple[tuple[re.Pattern[str], Scope], ...] = (
    (re.compile(r"skin", re.I), "skin"),
    (re.compile(r"^(type_)?bat", re.I), "battery"),
    (re.compile(r"^(type_)?([cgnt]pu|ap$|big|mid|little|g3d)", re.I), "die"),
)
_NO_TEMPERATURE = re.compile(r"bcl|^(i|v)bat|percentage|current|voltage", re.I)
_ITEM = re.compile(r"^\s*(Temperature|TemperatureThreshold)\{(.*)\}\s*$")
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\[]*)")


@dataclass(frozen=True)
class ThermalDump:
    """What `dumpsys thermalservice` said; `reason` is empty when it could be understood.

    `temperatures`: name -> (°C, scope); `thresholds`: name -> °C of the levels none to shutdown (NaN: unset).
    """

    status: int | None = None
    temperatures: Mapping[str, tuple[float, Scope]] = field(default_factory=dict)
    thresholds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    reason: str = ""


def is_android(system: System) -> bool:
    """Whether the machine is an Android phone (Python in Termux may call it Linux)."""
    return system.platform == "android" or (is_linux(system) and system.path("/system/build.prop").exists())


def parse_thermalservice(text: str) -> ThermalDump:
    """Read a dump. Only temperatures under "from HAL" count: cached ones may be hours old."""
    if "Permission Denial" in text:
        return ThermalDump(
            reason="the thermal service may not be read from here; use adb, or grant the app once:"
            " adb shell pm grant APP android.permission.DUMP"
        )
    if "Can't find service" in text:
        return ThermalDump(reason="this phone has no thermal service (Android 10 and later have)")
    status = re.search(r"^\s*Thermal Status:\s*(-?\d+)", text, re.M)
    ready = re.search(r"^\s*HAL Ready:\s*(\w+)", text, re.M)
    if status is None and ready is None:
        return ThermalDump(reason=f"dumpsys thermalservice printed {text.strip()[:60]!r}: format not known")
    if ready is not None and ready[1] != "true":
        return ThermalDump(reason="the vendor's thermal HAL is not ready: this phone does not support it")
    temperatures, thresholds = _items(text)
    return ThermalDump(int(status[1]) if status else None, temperatures, thresholds)


def _items(text: str) -> tuple[dict[str, tuple[float, Scope]], dict[str, tuple[float, ...]]]:
    temperatures: dict[str, tuple[float, Scope]] = {}
    thresholds: dict[str, tuple[float, ...]] = {}
    section = ""
    for line in text.splitlines():
        item = _ITEM.match(line)
        if item is None:
            section = line.strip().lower()
            continue
        fields = dict(_FIELD.findall(item[2]))
        name, scope = fields.get("mName", ""), _scope(fields)
        if item[1] == "TemperatureThreshold":
            thresholds[name] = tuple(
                map(_number, fields.get("mHotThrottlingThresholds", "")[1:-1].split(","))
            )
        elif "hal" in section and scope is not None and name not in temperatures:
            temperatures[name] = (_number(fields.get("mValue", "")), scope)
    return temperatures, thresholds


def _scope(fields: Mapping[str, str]) -> Scope | None:
    """By name where it is plain, then by type: some vendors count types from 1. None: no temperature for us."""
    name = fields.get("mName", "")
    if _NO_TEMPERATURE.search(name):
        return None
    for pattern, scope in _NAMES:
        if pattern.search(name):
            return scope
    kind = fields.get("mType", "")
    return _SCOPES.get(int(kind)) if kind.isdigit() else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class ThermalService:
    """Temperatures of the vendor's thermal HAL, headroom to severe throttling, and the status as a veto.

    Headroom is that of the skin sensors against their thresholds, as Android itself computes it. The status
    can only raise it: phones were seen to throttle for an hour at status 0, so that 0 is no reading.
    """

    name = "thermalservice"
    period_s = 2.0

    def __init__(self, system: System) -> None:
        self._system = system

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor on Android."""
        return [cls(system)] if is_android(system) else []

    def read(self) -> list[Reading]:
        """One run of `dumpsys`."""
        began_s = self._system.clock()
        result = self._system.run(["dumpsys", "thermalservice"], 4.0)
        time_s = (began_s + self._system.clock()) / 2
        reason = _failure(result)
        dump = ThermalDump(reason=reason) if reason else parse_thermalservice(result.text)
        if dump.reason:
            return [
                Reading("thermalservice:status", "headroom", None, "skin", "instant", time_s, dump.reason)
            ]
        readings = [_temperature(name, *known, time_s) for name, known in dump.temperatures.items()]
        return [*readings, *_headrooms(dump, time_s), _status(dump, time_s)]


def _failure(result: CommandResult) -> str:
    if result.code is None:
        return f"{result.error}; the thermal service can be read through adb"
    if result.code != 0 and not result.text.strip():
        return f"dumpsys failed: {result.error or f'exit code {result.code}'}"
    return ""


def _temperature(name: str, value: float, scope: Scope, time_s: float) -> Reading:
    source = f"thermalservice:{name}"
    if _is_celsius(value):
        return Reading(source, "temperature", value, scope, "instant", time_s)
    return Reading(source, "temperature", None, scope, "instant", time_s, f"reads {value:g}: no temperature")


def _is_celsius(value: float) -> bool:
    """Sensors that are off show 0, NaN, or something far out."""
    return -40 < value < 125 and value != 0


def _headrooms(dump: ThermalDump, time_s: float) -> list[Reading]:
    found = []
    for name, (value, scope) in dump.temperatures.items():
        severe = _severe(dump, name)
        if scope == "skin" and severe is not None and _is_celsius(value):
            headroom = max(0.0, 1 + (value - severe) / _HEADROOM_SPAN_C)
            found.append(Reading(f"thermalservice:{name}", "headroom", headroom, "skin", "instant", time_s))
    return found


def _severe(dump: ThermalDump, name: str) -> float | None:
    levels = dump.thresholds.get(name, ())
    known = len(levels) > _SEVERE and math.isfinite(levels[_SEVERE]) and levels[_SEVERE] > 0
    return levels[_SEVERE] if known else None


def _status(dump: ThermalDump, time_s: float) -> Reading:
    value, reason = None, ""
    if dump.status is None or not 0 <= dump.status < len(LEVELS):
        reason = f"thermal status is {dump.status}; known: 0 to {len(LEVELS) - 1}"
    elif dump.status == 0:
        reason = "thermal status 0 (none) proves nothing: phones throttle below it too"
    else:
        value = _STATUS_HEADROOM[dump.status - 1]
    return Reading("thermalservice:status", "headroom", value, "skin", "instant", time_s, reason)


class Kgsl:
    """Clocks (Hz) and temperature of a Qualcomm GPU, where its driver lets them be read."""

    name = "kgsl"
    period_s = 0.5
    _folder = "/sys/class/kgsl/kgsl-3d0"

    def __init__(self, system: System) -> None:
        self._clock = system.clock
        folder = system.path(self._folder)
        self._files: tuple[tuple[Quantity, KeptNumber], ...] = (
            ("clock", KeptNumber(system, folder / "gpuclk")),
            ("clock_limit", KeptNumber(system, folder / "max_gpuclk")),
            ("clock_max", KeptNumber(system, folder / "gpu_available_frequencies", 1.0, _highest)),
            ("temperature", KeptNumber(system, folder / "temp", 1e-3)),
        )

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor where the driver shows the GPU at all."""
        shown = is_linux(system) and any(
            system.path(f"{cls._folder}/{name}").exists() for name in ("gpuclk", "temp")
        )
        return [cls(system)] if shown else []

    def read(self) -> list[Reading]:
        """What it runs at, what it may run at, what it can run at, and its heat."""
        return [self._reading(quantity, file) for quantity, file in self._files]

    def close(self) -> None:
        """Close the files until the next read."""
        for _, file in self._files:
            file.close()

    def _reading(self, quantity: Quantity, file: KeptNumber) -> Reading:
        now = self._clock()
        value, reason = file.read()
        return Reading("kgsl:gpu", quantity, value, "die", "instant", now, reason)


def _highest(system: System, path: Path, text: str, scale: float) -> Figure:
    steps = [float(word) for word in text.split() if word.isdigit()]
    return (max(steps) * scale, "") if steps else (None, f"{shown(system, path)} lists no frequency")
