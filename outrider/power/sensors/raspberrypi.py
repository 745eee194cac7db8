"""What a Raspberry Pi's firmware knows: throttling, the real clock, and on a Pi 5 the rails of its PMIC.

Format: Raspberry Pi documentation, "vcgencmd"; the bits of `get_throttled` are documented there.
"""

from __future__ import annotations

import re

from outrider.contracts import Reading
from outrider.power.sensors.sysfs import Figure, is_linux, list_folder, read_text, try_text
from outrider.power.sensors.system import Sensor, System

__all__ = ["RAILS", "PiFirmware", "PiPmic", "RaspberryPi", "parse_pmic"]

RAILS = (
    "3V7_WL_SW", "3V3_SYS", "1V8_SYS", "DDR_VDD2", "DDR_VDDQ", "1V1_SYS", "0V8_SW", "VDD_CORE", "3V3_DAC",
    "3V3_ADC", "0V8_AON", "HDMI",
)  # fmt: skip
"""The rails of a Pi 5 that have both a current and a voltage."""

_BITS = ("under_voltage", "frequency_capped", "throttled", "soft_temp_limit")
_BINARIES = ("/usr/bin/vcgencmd", "/opt/vc/bin/vcgencmd", "/usr/local/bin/vcgencmd")
_PMIC_BOARDS = re.compile(r"Raspberry Pi (5|500|Compute Module 5)")
_ADC = re.compile(r"([A-Z0-9_]+)_([AV]) (?:current|volt)\([0-9]+\)=([0-9.]+)[AV]")
_NOT_IN_IT = "what draws from 5 V (USB, fan, HAT, NVMe) is not in it, and the converters' losses are not"


_NO_MAILBOX = (
    "; /dev/vcio is missing: a container needs --device /dev/vcio, "
    "and a kernel without the vendor's driver has none"
)


class _Firmware:
    """Asks vcgencmd. Its errors come on standard output with code 0, so only an answer of the right form counts."""

    def __init__(self, system: System) -> None:
        self._system = system
        there = [path for path in _BINARIES if system.path(path).exists()]
        self._program = there[0] if there else "vcgencmd"

    def ask(self, pattern: str, *words: str) -> tuple[str | None, str]:
        """What the pattern's group matches in the answer, or None and the reason."""
        result = self._system.run([self._program, *words], 2.0)
        match = re.search(pattern, result.text)
        if match:
            return match[1], ""
        said = " ".join((result.text.strip() or result.error).split())[:120]
        return None, f"vcgencmd {' '.join(words)}: {said or 'no answer'}{self._advice(said, result.code)}"

    def _advice(self, said: str, code: int | None) -> str:
        if code is None and "not installed" in said:
            return "; install it with: sudo apt install raspi-utils"
        if "not registered" in said or "Invalid" in said:
            return "; this board's firmware does not know it"
        if not any(self._system.path(node).exists() for node in ("/dev/vcio", "/dev/vchiq")):
            return _NO_MAILBOX
        if re.search("VCHI|vcio|ermission|VCHIQ", said):
            return "; add your user to the group video: sudo usermod -aG video $USER, then log in again"
        return ""


class PiFirmware:
    """Throttling, Arm clock and temperature, once a second.

    Each bit is a `throttle` of 0 or 1. The firmware's "has occurred" bits stay set until the next boot, so only
    one that was set since the last read counts; what happened before this sensor was made does not.
    """

    name = "raspberrypi"
    period_s = 1.0

    def __init__(self, system: System) -> None:
        self._system = system
        self._firmware = _Firmware(system)
        self._last: int | None = None
        self._last = self._throttled()[0]

    def read(self) -> list[Reading]:
        """Four throttle bits, clock and temperature."""
        return [*self._bits(), self._clock(), self._temperature()]

    def _throttled(self) -> tuple[int | None, str]:
        text, reason = self._firmware.ask(r"throttled=(0x[0-9a-fA-F]+)", "get_throttled")
        if text is None:
            text = self._sysfs_throttled()
        try:
            return (int(text, 16), "") if text is not None else (None, reason)
        except ValueError:
            return None, reason

    def _sysfs_throttled(self) -> str | None:
        folders = self._system.path("/sys/devices/platform")
        for path in list_folder(folders, "soc*/soc*firmware/get_throttled"):
            if text := read_text(path):
                return text
        return None

    def _bits(self) -> list[Reading]:
        now = self._system.clock()
        bits, reason = self._throttled()
        last = self._last if self._last is not None else bits
        self._last = bits if bits is not None else self._last
        readings = []
        for number, name in enumerate(_BITS):
            held = None
            if bits is not None and last is not None:
                fresh = bits & ~last
                held = float(bool(bits >> number & 1 or fresh >> (16 + number) & 1))
            readings.append(Reading(f"raspberrypi:{name}", "throttle", held, "soc", "instant", now, reason))
        return readings

    def _clock(self) -> Reading:
        """The clock that runs; the kernel's own figure is what it asked for.

        It falls at rest too, so it is given without a highest clock to compare it with: the bits tell of a limit.
        """
        text, reason = self._firmware.ask(r"frequency\([0-9]+\)=([1-9][0-9]*)", "measure_clock", "arm")
        clock = None if text is None else float(text)
        return Reading("raspberrypi:arm", "clock", clock, "die", "instant", self._system.clock(), reason)

    def _temperature(self) -> Reading:
        text, reason = self._firmware.ask(r"temp=(-?[0-9.]+)'C", "measure_temp")
        value = None if text is None else float(text)
        return Reading(
            "raspberrypi:soc", "temperature", value, "die", "instant", self._system.clock(), reason
        )


def parse_pmic(text: str) -> dict[str, Figure]:
    """Watts of each rail that `pmic_read_adc` shows; None with a reason where current or voltage is missing.

    Rails that only have a voltage (EXT5V, BATT) are left out: nothing measures their current.
    """
    found = {(name, kind): float(value) for name, kind, value in _ADC.findall(text)}
    names = dict.fromkeys([*(name for name, kind in found if kind == "A"), *RAILS])
    rails: dict[str, Figure] = {}
    for name in names:
        amp, volt = found.get((name, "A")), found.get((name, "V"))
        if amp is None or volt is None:
            rails[name] = None, f"pmic_read_adc shows no {'current' if amp is None else 'voltage'} of {name}"
        else:
            rails[name] = amp * volt, ""
    return rails


class PiPmic:
    """Watts of a Pi 5's twelve rails, and their sum as `raspberrypi:pmic` (scope `module`).

    Every read starts a process, so it is read five times a second at most. The 3V7 rail's reading is known to
    drift with the temperature of the PMIC.
    """

    name = "raspberrypi-pmic"
    period_s = 0.2

    def __init__(self, system: System) -> None:
        self._system = system
        self._firmware = _Firmware(system)

    def read(self) -> list[Reading]:
        """The rails and their sum; no sum when one of the twelve is missing."""
        now = self._system.clock()
        text, reason = self._firmware.ask(r"(?s)(.*current\([0-9]+\)=.*)", "pmic_read_adc")
        if text is None:
            return [Reading("raspberrypi:pmic", "power", None, "module", "instant", now, reason)]
        rails = parse_pmic(text)
        readings = [
            Reading(f"raspberrypi:{name}", "power", value, "rail", "instant", now, reason)
            for name, (value, reason) in rails.items()
        ]
        missing = "; ".join(reason for _, reason in rails.values() if reason)
        total = None if missing else sum(value or 0.0 for value, _ in rails.values())
        reason = missing or f"sum of {len(rails)} rails; {_NOT_IN_IT}"
        return [*readings, Reading("raspberrypi:pmic", "power", total, "module", "instant", now, reason)]


class RaspberryPi:
    """Finds the sensors of a Raspberry Pi."""

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """The firmware's sensor on any Pi, and the PMIC's on those of the fifth generation."""
        if not is_linux(system):
            return []
        model = ""
        for path in ("/proc/device-tree/model", "/sys/firmware/devicetree/base/model"):
            model = model or try_text(system, system.path(path))[0] or ""
        if not model.startswith("Raspberry Pi"):
            return []
        found: list[Sensor] = [PiFirmware(system)]
        if _PMIC_BOARDS.match(model):
            found.append(PiPmic(system))
        return found
