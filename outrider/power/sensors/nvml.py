"""NVIDIA graphics cards through NVML, where the extra `nvml` (NVIDIA's `nvidia-ml-py`) is installed.

Format: NVML API reference (nvml.h): power mW, energy mJ since the driver was loaded (Volta and later), clocks MHz.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from outrider.contracts import Method, Quantity, Reading, Scope
from outrider.power.sensors.system import Sensor, System

__all__ = ["Nvml"]

_NVML_TEMPERATURE_GPU = 0
_NVML_CLOCK_SM = 1
_HELD_BACK = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
"""Clock event reasons: power cap, hardware slowdown, software and hardware thermal slowdown, power brake."""
_FIX = "install NVIDIA's bindings: pip install 'outrider[nvml]'"
_TEGRA = "a Jetson's power is read from its INA sensors instead"
_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg")


class Nvml:
    """Energy, temperature, clock and throttling of each card; what a card does not support has a reason.

    The energy counter is preferred: `power` is a mean over up to a second on newer cards and is asked for
    only where there is no counter. A card's power is a part of the machine's, so its scope is `package`.
    """

    name = "nvml"
    period_s = 0.2

    def __init__(self, system: System, library: Any = None) -> None:
        self._system = system
        self._library = library
        self._cards: list[Any] | None = None

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor where the machine shows an NVIDIA device, or its driver answers."""
        if str(system.root) != "/" and system.platform != "win32":
            return []  # NVML asks this machine, not the one that `root` stands for
        if any(system.path(node).exists() for node in _NODES):
            return [cls(system)]
        sensor = cls(system)
        return [sensor] if sensor._open() == "" and sensor._cards else []

    def read(self) -> list[Reading]:
        """Four or five figures of each card."""
        reason = self._open()
        if reason:
            return [self._reading("nvml", "power", None, "package", reason)]
        return [
            reading for index, card in enumerate(self._cards or []) for reading in self._card(index, card)
        ]

    def _open(self) -> str:
        """Start NVML once; the reason when that fails, and a new attempt at the next read."""
        if self._cards is not None:
            return ""
        if self._library is None:
            try:
                self._library = importlib.import_module("pynvml")
            except ImportError:
                return _FIX
        try:
            self._library.nvmlInit()
            count = self._library.nvmlDeviceGetCount()
            self._cards = [self._library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except Exception as error:  # NVMLError of a library that may not be there
            return f"NVML cannot be started: {error}; is NVIDIA's driver loaded?"
        return "" if self._cards else "NVML knows no card"

    def _card(self, index: int, card: Any) -> list[Reading]:
        source, nvml = f"nvml:{index}", self._library
        energy, why = self._ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3)
        readings = [self._reading(source, "energy", energy, "package", why)]
        if energy is None:
            power, why = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1e3)
            readings.append(self._reading(source, "power", power, "package", why))
        heat, why = self._ask(lambda: nvml.nvmlDeviceGetTemperature(card, _NVML_TEMPERATURE_GPU))
        readings.append(self._reading(source, "temperature", heat, "die", why))
        clock, why = self._ask(lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(card, _NVML_CLOCK_SM))
        readings.append(self._reading(source, "clock", clock, "die", why))
        held, why = self._ask(lambda: self._held_back(card))
        return [*readings, self._reading(source, "throttle", held, "die", why)]

    def _held_back(self, card: Any) -> float:
        """The share of its highest clock that a card is kept from, while heat or a power cap is the reason."""
        nvml = self._library
        name = "nvmlDeviceGetCurrentClocksEventReasons"
        reasons = getattr(nvml, name, None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        if not reasons(card) & _HELD_BACK:
            return 0.0
        clock = nvml.nvmlDeviceGetClockInfo(card, _NVML_CLOCK_SM)
        most = nvml.nvmlDeviceGetMaxClockInfo(card, _NVML_CLOCK_SM)
        return max(0.0, 1.0 - float(clock) / float(most))

    def _ask(self, question: Callable[[], float]) -> tuple[float | None, str]:
        """A card that starts may still not answer: availability is a successful read."""
        try:
            return float(question()), ""
        except Exception as error:  # NVMLError of a library that may not be there
            if "NotSupported" in type(error).__name__ or "Not Supported" in str(error):
                return None, f"this card does not tell ({error}); {_TEGRA}"
            if any(word in str(error) for word in ("GPU is lost", "Uninitialized")):
                self._cards = None
            return None, f"NVML: {error}"

    def _reading(
        self, source: str, quantity: Quantity, value: float | None, scope: Scope, reason: str
    ) -> Reading:
        method: Method = "counter" if quantity == "energy" else "instant"
        return Reading(source, quantity, value, scope, method, self._system.clock(), reason)
