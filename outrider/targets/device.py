"""Device profiles: what a phone, board or laptop can do, draw and shed, each figure with where it is from.

A profile is a TOML file. Every figure is `{ value = 17.1, source = "..." }`, or `{ value = 6.0, assumed = true }`
where nobody published one. In memory a figure is a float that remembers its source. The reader is strict: a
field that is missing, unknown, out of its physical range or without a source is an error that names it.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from outrider.errors import UsageError
from outrider.folders import cache_folder
from outrider.records import decode, is_finite, parsed
from outrider.targets.physics import Network, Rates, ThrottlePolicy, Trip

__all__ = [
    "APP_SHARE",
    "DEVICES",
    "Battery",
    "Device",
    "Figure",
    "Memory",
    "Power",
    "Rate",
    "Sense",
    "Sensors",
    "Soc",
    "Thermal",
    "Throttle",
    "ThrottleTrip",
    "Unit",
    "figures_of",
    "load_device",
    "parse_device",
    "shipped_device",
    "user_profile_path",
]

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "devices"
DEVICES: tuple[str, ...] = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The slugs of the profiles that ship with Outrider."""
APP_SHARE = {"phone": 0.5, "board": 0.8, "laptop": 0.7}
"""Of the memory, what one app may take, by a device's kind; assumed: the system keeps the rest."""


class Figure(float):
    """A float with its `source`, or marked as `assumed`. Arithmetic gives a plain float."""

    source: str
    assumed: bool

    def __new__(cls, value: float, source: str = "", assumed: bool = False) -> Figure:
        """Exactly one of `source` and `assumed` says where the value is from; UsageError otherwise."""
        if bool(source) == assumed:
            raise UsageError('a figure has either a source = "..." or assumed = true, not both and not none')
        figure = super().__new__(cls, value)
        figure.source, figure.assumed = source, assumed
        return figure

    def scaled(self, factor: float, why: str) -> Figure:
        """Another value of the same figure, whose source says why."""
        return Figure(float(self) * factor, why)

    def __reduce__(self) -> tuple[Any, ...]:
        return Figure, (float(self), self.source, self.assumed)


class Series(tuple[float, ...]):
    """A tuple of floats with one source for all."""

    source: str
    assumed: bool

    def __new__(cls, values: tuple[float, ...], source: str = "", assumed: bool = False) -> Series:
        """As `Figure`."""
        if bool(source) == assumed:
            raise UsageError('a figure has either a source = "..." or assumed = true, not both and not none')
        series = super().__new__(cls, values)
        series.source, series.assumed = source, assumed
        return series

    def __reduce__(self) -> tuple[Any, ...]:
        return Series, (tuple(self), self.source, self.assumed)


@dataclass(frozen=True)
class Soc:
    """The chip; the ids are Qualcomm's, as its compiler wants them."""

    name: str
    soc_model: Figure | None = None
    htp_arch: Figure | None = None


@dataclass(frozen=True)
class Memory:
    """Size, and DRAM bandwidth: of the data sheet, and as a program reached it."""

    capacity_gb: Figure
    peak_gb_s: Figure
    measured_gb_s: Figure


@dataclass(frozen=True)
class Power:
    """Watts of the whole device: at rest, at work above what units and memory take, and for ever at 25 °C."""

    idle_w: Figure
    static_w: Figure
    sustained_w: Figure
    dram_pj_per_byte: Figure


@dataclass(frozen=True)
class Rate:
    """Thousand million operations a second (2 a multiply-add): of the data sheet, and in real kernels."""

    peak_gops: Figure
    sustained_gops: Figure


@dataclass(frozen=True)
class Unit:
    """A compute unit: what it reaches at its full clock, and what it draws while it works.

    `cores` are cores of one kind, which can be shared out between roles; None where they differ or are not known.
    An `exclusive` unit holds the program of one role at a time.
    """

    description: str
    backends: tuple[str, ...]
    bandwidth_gb_s: Figure
    clock_mhz: Figure
    launch_ms: Figure
    busy_w: Figure
    pj_per_op: Figure
    voltage_floor: Figure
    rates: Mapping[str, Rate]
    cores: Figure | None = None
    exclusive: bool = False


@dataclass(frozen=True)
class Thermal:
    """The two poles of `physics.Network`, and the limits that a governor should keep."""

    die_c_per_w: Figure
    die_tau_s: Figure
    case_c_per_w: Figure
    case_tau_s: Figure
    die_share: Figure
    die_limit_c: Figure
    skin_limit_c: Figure | None = None


@dataclass(frozen=True)
class ThrottleTrip:
    """See `physics.Trip`."""

    sensor: Literal["die", "skin"]
    at_c: Figure
    hysteresis_c: Figure
    level: int


@dataclass(frozen=True)
class Throttle:
    """See `physics.ThrottlePolicy`."""

    poll_s: Figure
    clock_steps: Series
    memory_steps: Series
    trips: tuple[ThrottleTrip, ...]


@dataclass(frozen=True)
class Battery:
    """What a full battery holds."""

    capacity_wh: Figure


@dataclass(frozen=True)
class Sense:
    """How a sensor shows its quantity: in steps, with Gaussian noise (standard deviation), so often."""

    step: Figure
    noise: Figure
    period_s: Figure


@dataclass(frozen=True)
class Sensors:
    """What this device lets a program read. `meter` names the power source; none: nothing gives power."""

    meter: Literal["none", "battery", "pmic", "rail", "rapl", "model"]
    die: Sense | None = None
    skin: Sense | None = None
    power: Sense | None = None
    headroom: Sense | None = None
    clocks: bool = False

    def __post_init__(self) -> None:
        """Refuse a meter without its precision, and the reverse."""
        if (self.meter == "none") != (self.power is None):
            raise UsageError(
                f"meter is {self.meter!r} but sensors.power is {self.power!r}; give both or none"
            )


@dataclass(frozen=True)
class Device:
    """A deployment target: its memory, units, power, heat, throttling and sensors."""

    slug: str
    name: str
    kind: Literal["phone", "board", "laptop", "host"]
    decode_unit: str
    soc: Soc
    memory: Memory
    power: Power
    thermal: Thermal
    throttle: Throttle
    sensors: Sensors
    units: Mapping[str, Unit]
    battery: Battery | None = None

    def __post_init__(self) -> None:
        """Refuse a profile whose parts contradict each other."""
        if self.decode_unit not in self.units:
            raise UsageError(f"decode_unit is {self.decode_unit!r}; units has {', '.join(self.units)}")
        _check_throttle(self.throttle)
        if self.sensors.meter == "battery" and self.battery is None:
            raise UsageError("sensors.meter is 'battery', but there is no [battery]")

    @property
    def memory_gb(self) -> Figure:
        """Memory, GB."""
        return self.memory.capacity_gb

    @property
    def idle_w(self) -> Figure:
        """The device at rest, W."""
        return self.power.idle_w

    @property
    def static_w(self) -> Figure:
        """Drawn while awake and at work, W, above what units and memory take."""
        return self.power.static_w

    @property
    def sustained_w(self) -> Figure:
        """Power that it can shed for ever at 25 °C, W."""
        return self.power.sustained_w

    @property
    def temp_limit_c(self) -> Figure:
        """The die temperature that a governor should keep below, °C."""
        return self.thermal.die_limit_c

    @property
    def skin_limit_c(self) -> Figure | None:
        """The same of the case; None where nobody touches or measures it."""
        return self.thermal.skin_limit_c

    @property
    def battery_wh(self) -> Figure | None:
        """What a full battery holds, Wh."""
        return self.battery.capacity_wh if self.battery else None

    @property
    def meter(self) -> str:
        """Which power source this device has, or "none"."""
        return self.sensors.meter

    def rates(self, unit: str | None = None, precision: str | None = None) -> Rates:
        """What a unit (default: `decode_unit`) reaches and draws, at the sustained rate of a precision.

        Without a precision the unit's first counts. Raises UsageError for an unknown unit or precision.
        """
        name = unit or self.decode_unit
        if name not in self.units:
            raise UsageError(f"{self.slug} has no unit {name!r}; known: {', '.join(self.units)}")
        found = self.units[name]
        precision = precision or next(iter(found.rates))
        if precision not in found.rates:
            raise UsageError(f"{self.slug}: {name} has no {precision!r}; known: {', '.join(found.rates)}")
        return Rates(
            bytes_s=1e9 * found.bandwidth_gb_s,
            ops_s=1e9 * found.rates[precision].sustained_gops,
            launch_s=1e-3 * found.launch_ms,
            busy_w=float(found.busy_w),
            j_byte=1e-12 * self.power.dram_pj_per_byte,
            j_op=1e-12 * found.pj_per_op,
            voltage_floor=float(found.voltage_floor),
        )

    def network(self) -> Network:
        """Its two thermal poles."""
        names = ("die_c_per_w", "die_tau_s", "case_c_per_w", "case_tau_s", "die_share")
        return Network(*(float(getattr(self.thermal, name)) for name in names))

    def throttle_policy(self) -> ThrottlePolicy:
        """How it protects itself."""
        t = self.throttle
        trips = tuple(Trip(s.sensor, float(s.at_c), float(s.hysteresis_c), s.level) for s in t.trips)
        return ThrottlePolicy(float(t.poll_s), tuple(t.clock_steps), tuple(t.memory_steps), trips)


def _check_throttle(throttle: Throttle) -> None:
    clocks, memory = throttle.clock_steps, throttle.memory_steps
    if len(clocks) != len(memory) or not clocks:
        raise UsageError(
            f"throttle: {len(clocks)} clock_steps and {len(memory)} memory_steps; each level needs one of both"
        )
    for name, steps in (("clock_steps", clocks), ("memory_steps", memory)):
        if steps[0] != 1.0 or list(steps) != sorted(steps, reverse=True) or steps[-1] <= 0:
            raise UsageError(f"throttle.{name} is {list(steps)}; expected shares that fall from 1, above 0")
    for trip in throttle.trips:
        if not 1 <= trip.level < len(clocks):
            raise UsageError(
                f"throttle: a trip's level is {trip.level}; the ladder has 1 to {len(clocks) - 1}"
            )


_RANGES: dict[str, tuple[float, float, str]] = {
    "capacity_gb": (0.1, 2048, "GB"),
    "peak_gb_s": (0.5, 10_000, "GB/s"),
    "measured_gb_s": (0.1, 10_000, "GB/s"),
    "bandwidth_gb_s": (0.1, 10_000, "GB/s"),
    "idle_w": (0, 500, "W"),
    "static_w": (0, 500, "W"),
    "sustained_w": (0.05, 2000, "W"),
    "busy_w": (0, 2000, "W"),
    "dram_pj_per_byte": (0, 2000, "pJ"),
    "pj_per_op": (0, 1000, "pJ"),
    "peak_gops": (0.1, 1e7, "thousand million operations a second"),
    "sustained_gops": (0.1, 1e7, "thousand million operations a second"),
    "clock_mhz": (50, 10_000, "MHz"),
    "launch_ms": (0, 1000, "ms"),
    "voltage_floor": (0.1, 1, "share"),
    "die_share": (0.05, 1, "share"),
    "die_c_per_w": (0.01, 200, "°C/W"),
    "case_c_per_w": (0.01, 200, "°C/W"),
    "die_tau_s": (0.1, 1000, "s"),
    "case_tau_s": (1, 20_000, "s"),
    "die_limit_c": (30, 125, "°C"),
    "skin_limit_c": (30, 125, "°C"),
    "at_c": (30, 125, "°C"),
    "hysteresis_c": (0, 30, "°C"),
    "poll_s": (0.01, 600, "s"),
    "capacity_wh": (0.1, 1000, "Wh"),
    "step": (0, 10, "the quantity's unit"),
    "noise": (0, 10, "the quantity's unit"),
    "period_s": (0.01, 600, "s"),
    "soc_model": (1, 10_000, "Qualcomm's number"),
    "htp_arch": (60, 200, "Qualcomm's number"),
    "cores": (1, 1024, "cores of one kind"),
}


def parse_device(text: str, slug: str, where: str) -> Device:
    """Read a profile from TOML. Raises UsageError naming `where` and the field."""
    try:
        raw = parsed(tomllib.loads, text)
    except ValueError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from None
    if "slug" in raw:
        raise UsageError(f"{where}: slug is the file's name ({slug}); leave the field out")
    known = _with_figures(raw, where, "")
    device: Device = decode(Device, {"slug": slug, **known}, where, UsageError)
    return device


def _with_figures(record: Mapping[str, Any], where: str, path: str) -> dict[str, Any]:
    """The same record, with every table that has a `value` turned into a figure."""
    found: dict[str, Any] = {}
    for name, part in record.items():
        place = f"{path}.{name}" if path else name
        if isinstance(part, dict) and ("value" in part or "source" in part or "assumed" in part):
            found[name] = _figure(part, name, f"{where}: {place}")
        elif isinstance(part, dict):
            found[name] = _with_figures(part, where, place)
        elif isinstance(part, list) and part and all(isinstance(item, dict) for item in part):
            found[name] = [_with_figures(item, where, f"{place}[{i}]") for i, item in enumerate(part)]
        elif isinstance(part, int | float) and not isinstance(part, bool) and name in _RANGES:
            raise UsageError(
                f'{where}: {place} is {part}; write {{ value = {part}, source = "..." }} or assumed = true'
            )
        else:
            found[name] = part
    return found


def _figure(part: Mapping[str, Any], name: str, place: str) -> Figure | Series:
    unknown = sorted(set(part) - {"value", "source", "assumed"})
    if unknown:
        raise UsageError(f"{place}.{unknown[0]} is an unknown field; a figure has value, source or assumed")
    if "value" not in part:
        raise UsageError(f"{place}.value is missing")
    value, source, assumed = part["value"], part.get("source", ""), part.get("assumed", False)
    if not isinstance(source, str) or not isinstance(assumed, bool):
        raise UsageError(f"{place}: source is text and assumed is true; found {source!r} and {assumed!r}")
    try:
        if isinstance(value, list):
            return Series(tuple(_number(item, place) for item in value), source, assumed)
        return Figure(_in_range(_number(value, place), name, place), source, assumed)
    except UsageError as error:
        raise error if str(error).startswith(place) else UsageError(f"{place}: {error}") from None


def _number(value: Any, place: str) -> float:
    if not is_finite(value):
        raise UsageError(f"{place} is {value!r:.80}; expected a finite number")
    return float(value)


def _in_range(value: float, name: str, place: str) -> float:
    if name in _RANGES:
        low, high, unit = _RANGES[name]
        if not low <= value <= high:
            raise UsageError(
                f"{place} is {value:g}; expected {low:g} to {high:g} ({unit}): is the unit right?"
            )
    return value


def user_profile_path(slug: str) -> Path:
    """Where `outrider calibrate` keeps what it measured of a device, below OUTRIDER_HOME."""
    return cache_folder() / "devices" / f"{slug}.toml"


def load_device(name: str | os.PathLike[str]) -> Device:
    """A profile by slug, or by path (ends in .toml).

    A profile that `outrider calibrate` measured wins over the shipped one of the same slug, and a log line
    says so. Raises UsageError for an unknown slug (listing the known ones) or a faulty file.
    """
    text = os.fspath(name)
    if text.endswith(".toml"):
        return _read(Path(text))
    own = user_profile_path(text) if text and Path(text).name == text else None
    if own is not None and own.is_file():
        _log.info("device %s: the profile measured here, %s, wins over the shipped one", text, own)
        return _read(own)
    if text not in DEVICES:
        raise UsageError(f"unknown device {text!r}; known: {', '.join(DEVICES)}; or a path ending in .toml")
    return shipped_device(text)


@lru_cache(maxsize=64)
def shipped_device(slug: str) -> Device:
    """The profile that ships with Outrider, whatever was measured here; `slug` is one of `DEVICES`."""
    return _read(_FOLDER / f"{slug}.toml")


def _read(path: Path) -> Device:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"the device profile {path} cannot be read: {reason}") from None
    return parse_device(text, path.stem, str(path))


def figures_of(record: Any, path: str = "") -> dict[str, Figure | Series]:
    """Every figure of a profile, by its place ("units.cpu.busy_w"), in the order of the fields."""
    if isinstance(record, Figure | Series):
        return {path: record}
    parts: list[tuple[str, Any]] = []
    if is_dataclass(record) and not isinstance(record, type):
        parts = [(f"{path}.{f.name}" if path else f.name, getattr(record, f.name)) for f in fields(record)]
    elif isinstance(record, Mapping):
        parts = [(f"{path}.{key}", value) for key, value in record.items()]
    elif isinstance(record, tuple):
        parts = [(f"{path}[{i}]", value) for i, value in enumerate(record)]
    return {place: figure for name, part in parts for place, figure in figures_of(part, name).items()}
