"""Power monitors of the INA family, as boards wire them: INA3221 and INA238 of NVIDIA Jetson, and others.

Formats: Linux, Documentation/hwmon/ina3221.rst (mV and mA, no power file), ina238.rst (power in µW); the IIO driver
of JetPack 4 gives mW. Which rails make a board's total: NVIDIA's Jetson power guides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.contracts import Reading
from outrider.power.sensors.sysfs import Figure, is_linux, labels, list_folder, read_number, read_text
from outrider.power.sensors.system import Sensor, System

__all__ = ["Ina", "board_total"]

_WHOLE = ("VDD_IN", "POM_5V_IN", "VIN")
"""Rails that feed the whole module; the others are then parts of them."""
_PARTS = (
    frozenset({"VDD_GPU_SOC", "VDD_CPU_CV", "VDDQ_VDD2_1V8AO"}),  # AGX Orin
    frozenset({"GPU", "CPU", "SOC", "CV", "VDDRQ"}),  # AGX Xavier
)
"""Rails that together are the module, on boards without an input rail. Rails of 5 V feed the carrier."""
_DRIVERS = ("ina3221", "ina3221x", "ina238", "ina237", "ina2xx", "ina219", "ina226")


def board_total(rails: Mapping[str, Figure]) -> tuple[Figure, str] | None:
    """Watts of the module from those of its rails, and the rails that make it.

    None when no rail feeds the whole module and the set is not one that is known to add up to it.
    """
    whole = next((name for name in _WHOLE if name in rails), None)
    if whole is not None:
        return rails[whole], whole
    parts = next((parts for parts in _PARTS if parts <= rails.keys()), None)
    if parts is None:
        return None
    names = sorted(parts)
    missing = [f"{name}: {rails[name][1]}" for name in names if rails[name][0] is None]
    if missing:
        return (None, "; ".join(missing)), " + ".join(names)
    return (sum(rails[name][0] or 0.0 for name in names), ""), " + ".join(names)


@dataclass(frozen=True)
class _Rail:
    label: str
    address: str  # of the monitor on its bus
    power: Path | None
    power_scale: float
    volt: Path
    amp: Path
    alarms: tuple[Path, ...] = ()

    def watts(self, system: System) -> Figure:
        if self.power is not None:
            return read_number(system, self.power, self.power_scale)
        volt, reason = read_number(system, self.volt, 1e-3)
        if volt is None:
            return None, reason
        amp, reason = read_number(system, self.amp, 1e-3)
        return (None, reason) if amp is None else (volt * amp, "")


class Ina:
    """Watts of each rail, the module's total where the board is known, and over-current alarms.

    The total is `ina:total` (scope `module`). An alarm is a `throttle` of 1: these boards hold back CPU and
    GPU while a rail is above its limit, hot or not.
    """

    name = "ina"
    period_s = 0.1

    def __init__(self, system: System) -> None:
        self._system = system
        rails = _find_rails(system)
        names = labels([rail.label for rail in rails], lambda index: rails[index].address)
        self._rails = dict(zip(names, rails, strict=True))

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor if any monitor of the family has a rail."""
        sensor = cls(system)
        return [sensor] if sensor._rails else []

    def read(self) -> list[Reading]:
        """Power of every rail, of the module, and the alarms."""
        now = self._system.clock()
        figures = {name: rail.watts(self._system) for name, rail in self._rails.items()}
        readings = [
            Reading(f"ina:{name}", "power", value, "rail", "instant", now, reason)
            for name, (value, reason) in figures.items()
        ]
        total = board_total(figures)
        if total is None:
            reason = f"the rails {', '.join(figures)} are not known to make a whole board"
            total = (None, reason), ""
        (value, reason), names = total
        readings.append(Reading("ina:total", "power", value, "module", "instant", now, reason or names))
        return readings + self._alarms(now)

    def _alarms(self, now: float) -> list[Reading]:
        readings = []
        for name, rail in self._rails.items():
            for path in rail.alarms:
                value, reason = read_number(self._system, path)
                held = None if value is None else float(value > 0)
                kind = path.name.split("_", 1)[1]
                readings.append(
                    Reading(f"ina:{name}:{kind}", "throttle", held, "rail", "instant", now, reason)
                )
        return readings


def _find_rails(system: System) -> list[_Rail]:
    if not is_linux(system):
        return []
    rails: list[_Rail] = []
    seen: set[Path] = set()
    for folder, address in _monitor_folders(system):
        where = folder.resolve()
        if where in seen:
            continue
        seen.add(where)
        rails += _iio_rails(folder, address) or _hwmon_rails(folder, address, _input_monitor(system))
    return [rail for rail in rails if not _is_spare(rail.label)]


def _input_monitor(system: System) -> str:
    """The driver whose monitor sits at the board's input although no label says so; "" if there is none.

    Jetson AGX Thor (Tegra264): an INA238, which mainline's driver gives no label.
    """
    compatible = read_text(system.path("/proc/device-tree/compatible")) or ""
    return "ina238" if "nvidia,tegra264" in compatible else ""


def _is_spare(label: str) -> bool:
    return label == "NC" or "sum of shunt" in label.lower()


def _monitor_folders(system: System) -> list[tuple[Path, str]]:
    """Every folder that may hold channels, and the monitor's bus address.

    The class folder first; then the drivers' own, where JetPack releases differ in the driver's name and in how deep
    the channels lie.
    """
    folders = []
    for chip in list_folder(system.path("/sys/class/hwmon"), "hwmon*"):
        if (read_text(chip / "name") or "").startswith("ina"):
            device = chip / "device"
            folders.append((chip, device.resolve().name if device.exists() else chip.name))
    for driver in _DRIVERS:
        for monitor in list_folder(system.path(f"/sys/bus/i2c/drivers/{driver}"), "*-*"):
            inner = [path for pattern in ("hwmon/hwmon*", "iio:device*", "iio_device*")
                     for path in list_folder(monitor, pattern)]  # fmt: skip
            folders += [(path, monitor.name) for path in [*inner, monitor]]
    return folders


def _hwmon_rails(folder: Path, address: str, at_input: str) -> list[_Rail]:
    """Channels that have a current and a voltage, or a power.

    An INA3221 has three: its `in4` to `in6` are shunt voltages, and `in7` and `curr4` sums.
    """
    rails = []
    chip = read_text(folder / "name") or folder.parent.name
    is_input = bool(at_input) and chip == at_input
    last = 3 if chip.startswith("ina3221") else 99
    for number in _channels(folder, "curr*_input", "power*_input"):
        if int(number) > last:
            continue
        power = folder / f"power{number}_input"
        volt, amp = folder / f"in{number}_input", folder / f"curr{number}_input"
        label = _label(folder, number)
        if not power.exists() and not volt.exists():
            continue
        alarms = tuple(
            path for kind in ("crit", "max") if (path := folder / f"curr{number}_{kind}_alarm").exists()
        )
        own = power if power.exists() else None
        name = label or ("VIN" if is_input else f"{address}/{number}")
        rails.append(_Rail(name, address, own, 1e-6, volt, amp, alarms))
    return rails


def _label(folder: Path, number: str) -> str | None:
    """What the board calls a channel. An INA3221's in4 to in6 are shunt voltages, never a rail's."""
    for kind in ("in", "curr", "power"):
        if text := read_text(folder / f"{kind}{number}_label"):
            return text
    return read_text(folder / "label") or None


def _iio_rails(folder: Path, address: str) -> list[_Rail]:
    """Channels of JetPack 4's IIO driver, from 0."""
    rails = []
    for path in list_folder(folder, "rail_name_*"):
        number = path.name.rpartition("_")[2]
        power = folder / f"in_power{number}_input"
        volt, amp = folder / f"in_voltage{number}_input", folder / f"in_current{number}_input"
        label = read_text(path) or f"{address}/{number}"
        rails.append(_Rail(label, address, power if power.exists() else None, 1e-3, volt, amp))
    return rails


def _channels(folder: Path, *patterns: str) -> Sequence[str]:
    """The numbers of channels, each once, in order: curr2_input -> "2"."""
    numbers = {
        "".join(filter(str.isdigit, path.name.split("_")[0]))
        for pattern in patterns
        for path in list_folder(folder, pattern)
    }
    return sorted(numbers, key=int)
