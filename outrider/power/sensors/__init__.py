"""Sources of telemetry, one small file each."""

from __future__ import annotations

import logging
from typing import Protocol

from outrider.power.sensors.android import Kgsl, ThermalService
from outrider.power.sensors.apple import Powermetrics, ThermalState
from outrider.power.sensors.battery import Battery
from outrider.power.sensors.cpufreq import Cpufreq, IntelThrottle
from outrider.power.sensors.hwmon import Hwmon
from outrider.power.sensors.ina import Ina
from outrider.power.sensors.memory import Memory
from outrider.power.sensors.nvml import Nvml
from outrider.power.sensors.rapl import Rapl
from outrider.power.sensors.raspberrypi import RaspberryPi
from outrider.power.sensors.system import Sensor, System
from outrider.power.sensors.tegrastats import Tegrastats
from outrider.power.sensors.thermal import Thermal

__all__ = ["SOURCES", "discover"]

_log = logging.getLogger(__name__)


class _Source(Protocol):
    def find(self, system: System) -> list[Sensor]: ...


SOURCES: tuple[_Source, ...] = (
    Rapl,
    Ina,
    Tegrastats,
    RaspberryPi,
    Hwmon,
    Thermal,
    Cpufreq,
    IntelThrottle,
    Memory,
    Battery,
    ThermalService,
    Kgsl,
    Powermetrics,
    ThermalState,
    Nvml,
)
"""Every kind of source; `find` gives the sensors of one that this machine has, readable or not."""


def discover(system: System | None = None) -> list[Sensor]:
    """Every source of telemetry that exists on a machine (default: this one).

    A source that exists but cannot be read is among them: its readings hold the reason. At most one power reading
    of a sensor has scope `device`, `module` or `soc`: the figure for the machine. What has scope `package`,
    `core`, `memory` or `rail` is a part of it, never to be added up. Raises nothing.
    """
    system = system or System()
    found: list[Sensor] = []
    for source in SOURCES:
        try:
            found += source.find(system)
        except (OSError, ValueError) as error:
            _log.warning("looking for %s failed: %s", source, error)
    return found
