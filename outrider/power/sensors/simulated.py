"""The sensors of a simulated device: only those that the real one has, as coarse, noisy and slow as there."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from outrider.contracts import Reading
from outrider.targets.device import Sense
from outrider.targets.simulated import Machine

__all__ = ["Simulated", "simulated_sensors"]

_HEADROOM_SPAN_C = 30.0  # Android: headroom 0 is this far below the threshold of severe throttling
_SCOPES = {"battery": "battery", "pmic": "module", "rail": "module", "rapl": "package", "model": "soc"}
_COUNTERS = ("rapl", "model")
_PERIOD_S = 1.0  # of what the system itself keeps: battery, memory, clocks
_NO_INTERVAL = "power is the mean between two reads; this is the first"

Probe = Callable[[], list[Reading]]


class Simulated:
    """A `Sensor` over a `Machine`; every reading's method is "simulated".

    New figures come on a grid of their period; between them a read gives the old one, with its old time. Power
    is the mean since the one before, as its device's meter sees it: nothing where there is none, hidden while
    a battery charges.
    `only` names the figures to give (None: all); `period_s` is the longest of theirs.
    """

    def __init__(self, machine: Machine, seed: int = 0, only: Collection[str] | None = None) -> None:
        self.name = "simulated" if only is None else f"simulated:{'+'.join(only)}"
        self._machine = machine
        self._sensors = machine.device.sensors
        self._rng = random.Random(seed)
        self._last = (machine.clock(), machine.energy_j)
        self._due: dict[str, float] = {}
        self._kept: dict[str, list[Reading]] = {}
        self._probes = {n: found for n, found in self._find().items() if only is None or n in only}
        self.period_s = max(period for period, _ in self._probes.values())

    @property
    def periods(self) -> dict[str, float]:
        """Seconds between new values, by figure."""
        return {name: period for name, (period, _) in self._probes.items()}

    def read(self) -> list[Reading]:
        """The figures of now."""
        self._machine.catch_up()
        now = self._machine.clock()
        for name, (period, probe) in self._probes.items():
            due = self._due.get(name, now)
            if now >= due - 1e-9:
                self._kept[name] = probe()
                self._due[name] = due + period * (1 + (now - due + 1e-9) // period)
        return [reading for name in self._probes for reading in self._kept[name]]

    def _find(self) -> dict[str, tuple[float, Probe]]:
        found: dict[str, tuple[float, Probe]] = {"system": (_PERIOD_S, self._system)}
        senses = self._sensors
        for name, sense, probe in (
            ("die", senses.die, self._die),
            ("skin", senses.skin, self._skin),
            ("headroom", senses.headroom, self._headroom),
            ("power", senses.power, self._power),
        ):
            if sense is not None:
                found[name] = (float(sense.period_s), probe)
        if senses.clocks:
            found["clocks"] = (_PERIOD_S, self._clocks)
        if senses.power is None:
            found["power"] = (_PERIOD_S, self._no_power)
        return found

    def _reading(
        self, name: str, quantity: str, value: float | None, scope: str, reason: str = ""
    ) -> Reading:
        source = f"simulated:{name}"
        return Reading(source, quantity, value, scope, "simulated", self._machine.clock(), reason)  # type: ignore[arg-type]

    def _shown(self, value: float, sense: Sense) -> float:
        """A true value as the sensor shows it."""
        noisy = value + (self._rng.gauss(0.0, sense.noise) if sense.noise else 0.0)
        return round(round(noisy / sense.step) * sense.step, 9) if sense.step else noisy

    def _die(self) -> list[Reading]:
        assert self._sensors.die is not None
        value = self._shown(self._machine.temperatures.die_c, self._sensors.die)
        return [self._reading("die", "temperature", value, "die")]

    def _skin(self) -> list[Reading]:
        assert self._sensors.skin is not None
        value = self._shown(self._machine.temperatures.case_c, self._sensors.skin)
        return [self._reading("skin", "temperature", value, "skin")]

    def _headroom(self) -> list[Reading]:
        assert self._sensors.headroom is not None
        device = self._machine.device
        limit = device.skin_limit_c if device.skin_limit_c is not None else device.temp_limit_c
        hot = self._machine.temperatures
        temperature = hot.case_c if device.skin_limit_c is not None else hot.die_c
        value = max(0.0, 1.0 - (limit - temperature) / _HEADROOM_SPAN_C)
        return [self._reading("headroom", "headroom", self._shown(value, self._sensors.headroom), "device")]

    def _power(self) -> list[Reading]:
        assert self._sensors.power is not None
        meter = self._sensors.meter
        (then, before), now, energy = self._last, self._machine.clock(), self._machine.energy_j
        if now <= then:
            return [self._reading("power", "power", None, _SCOPES[meter], _NO_INTERVAL)]
        self._last = (now, energy)
        if meter == "battery" and self._machine.charge_w > 0:
            reason = "the battery charges, which hides what is drawn; unplug to measure"
            return [self._reading("power", "power", None, "battery", reason)]
        value = max(0.0, self._shown((energy - before) / (now - then), self._sensors.power))
        readings = [self._reading("power", "power", value, _SCOPES[meter])]
        if meter in _COUNTERS:
            readings.append(self._reading("energy", "energy", energy, _SCOPES[meter]))
        return readings

    def _no_power(self) -> list[Reading]:
        reason = f"{self._machine.device.name} has no power sensor"
        return [self._reading("power", "power", None, "device", reason)]

    def _clocks(self) -> list[Reading]:
        machine = self._machine
        full = 1e6 * machine.device.units[machine.device.decode_unit].clock_mhz
        now, deepest = machine.clock_ratio, machine.policy.clock_steps[-1]
        throttle = (1.0 - now) / (1.0 - deepest) if deepest < 1.0 else 0.0
        return [
            self._reading("clocks", "clock", full * now, "core"),
            self._reading("clocks", "clock_limit", full * now, "core"),
            self._reading("clocks", "clock_max", full, "core"),
            self._reading("throttle", "throttle", throttle, "device"),
        ]

    def _system(self) -> list[Reading]:
        machine = self._machine
        readings = [
            self._reading("memory", "memory_available", machine.memory_available_mb, "memory"),
            self._reading("pressure", "memory_pressure", machine.memory_pressure_percent, "memory"),
        ]
        if machine.battery is not None:
            charging = float(machine.charge_w > 0)
            readings.append(self._reading("battery", "battery", float(round(machine.battery)), "battery"))
            readings.append(self._reading("charging", "charging", charging, "battery"))
        return readings


def simulated_sensors(machine: Machine, seed: int = 0) -> list[Simulated]:
    """The same figures as a sensor for each period, so that the quick ones need not wait for the slow."""
    by_period: dict[float, list[str]] = {}
    for name, period in Simulated(machine, seed).periods.items():
        by_period.setdefault(period, []).append(name)
    return [Simulated(machine, seed + i, names) for i, (_, names) in enumerate(sorted(by_period.items()))]
