"""Apple: what `powermetrics` prints, and the thermal state that any process may ask for.

Formats: powermetrics(1) on Apple silicon with `-f plist`: one property list a sample, each ended by NUL; energies
are mJ over the interval, powers mW, `freq_hz` of the GPU is in truth MHz. Names of clusters and the set of
keys change with chips and releases, so nothing is found by a cluster's name and any key may be missing.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import plistlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from xml.parsers.expat import ExpatError

from outrider.contracts import Reading
from outrider.power.sensors.system import Sensor, System

__all__ = ["Powermetrics", "Stream", "ThermalState", "cocoa_thermal_state", "parse_samples", "readings_of"]

_COMMAND = ("powermetrics", "-f", "plist", "--samplers", "cpu_power,gpu_power,thermal", "-i")
_PRESSURES = {"moderate": 0.8, "heavy": 1.0, "trapping": 1.2, "sleeping": 1.3}
"""Headroom at least, 1 where Apple starts to throttle in earnest; nominal proves nothing and is no reading."""
_STATES = ("nominal", "fair", "serious", "critical")
_STATE_HEADROOM = (None, 0.8, 1.0, 1.2)
_UNIT_KEYS = ("cpu", "gpu", "ane")
_BUSY = 0.5
_FIX = "powermetrics needs root: run outrider with sudo, or allow the one command in /etc/sudoers"


class Stream(Protocol):
    """A command that goes on printing."""

    def read(self) -> bytes | None:
        """What it printed since the last call; None when it has ended."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class _Process:
    """A running command whose output is taken without waiting for it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self._descriptor = self._process.stdout.fileno()
        os.set_blocking(self._descriptor, False)

    def read(self) -> bytes | None:
        parts: list[bytes] = []
        while True:
            try:
                part = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return b"".join(parts)
            if not part:
                return b"".join(parts) or None
            parts.append(part)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def parse_samples(data: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """The samples in what was printed so far, and the rest: the start of one that is not complete.

    A sample is complete when its NUL has come or its last tag has (the only one of `-n 1`). One that cannot
    be read is left out.
    """
    *whole, rest = data.split(b"\0")
    if rest.rstrip().endswith(b"</plist>"):
        whole, rest = [*whole, rest], b""
    return [sample for text in whole if (sample := _parse(text)) is not None], rest


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        sample = plistlib.loads(text.strip())
    except (ValueError, ExpatError, plistlib.InvalidFileException, AttributeError, RecursionError):
        return None
    return sample if isinstance(sample, dict) else None


def energy_of(sample: Mapping[str, Any]) -> float | None:
    """Joules of CPU, GPU and neural engine together in a sample's interval; None when it does not say."""
    parts = [_number(_processor(sample).get(f"{unit}_energy")) for unit in _UNIT_KEYS]
    known = [part for part in parts if part is not None]
    if known and parts[0] is not None:
        return sum(known) / 1e3
    power, seconds = _combined_w(sample), _elapsed_s(sample)
    return None if power is None or seconds is None else power * seconds


def readings_of(sample: Mapping[str, Any], time_s: float) -> list[Reading]:
    """Power of the chip and of its units, clocks, and thermal pressure as a bound of headroom."""
    return [*_powers(sample, time_s), *_clocks(sample, time_s), _pressure(sample, time_s)]


def _powers(sample: Mapping[str, Any], time_s: float) -> list[Reading]:
    processor, seconds = _processor(sample), _elapsed_s(sample)
    combined, energy = _combined_w(sample), energy_of(sample)
    if combined is None and energy is not None and seconds is not None:
        combined = energy / seconds
    known = ", ".join(sorted(processor)) or "nothing"
    reason = "" if combined is not None else f"this release of powermetrics tells no power; it tells {known}"
    readings = [Reading("powermetrics:chip", "power", combined, "soc", "estimated", time_s, reason)]
    for unit in _UNIT_KEYS:
        millijoules = _number(processor.get(f"{unit}_energy"))
        if millijoules is not None and seconds is not None:
            watts = millijoules / 1e3 / seconds
            readings.append(Reading(f"powermetrics:{unit}", "power", watts, "rail", "estimated", time_s))
    return readings


def _clocks(sample: Mapping[str, Any], time_s: float) -> list[Reading]:
    """Clock of each cluster and of the GPU; the highest clock only of what was busy, for rest is no throttling.

    Slower clusters are left to background work, whose clock the system chooses, so only the family with the
    highest clock is held against it.
    """
    clusters = [part for part in _list(_processor(sample).get("clusters")) if isinstance(part, dict)]
    units = [(f"powermetrics:cluster-{index}", part) for index, part in enumerate(clusters)]
    fastest = max((_highest_hz(part) or 0.0 for part in clusters), default=0.0)
    gpu = sample.get("gpu")
    if isinstance(gpu, dict):
        units.append(("powermetrics:gpu", gpu))
    readings = []
    for source, unit in units:
        clock, most, idle = _hertz(unit.get("freq_hz")), _highest_hz(unit), _number(unit.get("idle_ratio"))
        if clock:
            readings.append(Reading(source, "clock", clock, "die", "instant", time_s))
        compared = unit is gpu or most == fastest
        if clock and most and compared and idle is not None and idle < _BUSY:
            readings.append(Reading(source, "clock_max", most, "die", "instant", time_s))
    return readings


def _pressure(sample: Mapping[str, Any], time_s: float) -> Reading:
    word = sample.get("thermal_pressure")
    value = _PRESSURES.get(word.lower()) if isinstance(word, str) else None
    reason = ""
    if word is None:
        reason = "this release of powermetrics tells no thermal_pressure"
    elif value is None and str(word).lower() == "nominal":
        reason = "thermal pressure nominal proves nothing: Macs slow down below it too"
    elif value is None:
        reason = f"thermal pressure is {word!r}; known: nominal, {', '.join(_PRESSURES)}"
    return Reading("powermetrics:pressure", "headroom", value, "device", "estimated", time_s, reason)


def _processor(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    processor = sample.get("processor")
    return processor if isinstance(processor, dict) else {}


def _combined_w(sample: Mapping[str, Any]) -> float | None:
    milliwatts = _number(_processor(sample).get("combined_power", sample.get("combined_power")))
    return None if milliwatts is None else milliwatts / 1e3


def _elapsed_s(sample: Mapping[str, Any]) -> float | None:
    elapsed = _number(sample.get("elapsed_ns"))
    return elapsed / 1e9 if elapsed else None


def _highest_hz(unit: Mapping[str, Any]) -> float | None:
    steps = [_hertz(step.get("freq")) for step in _list(unit.get("dvfm_states")) if isinstance(step, dict)]
    return max((step for step in steps if step), default=None)


def _hertz(value: Any) -> float | None:
    """Hz from a figure that is Hz or, by its size, MHz."""
    number = _number(value)
    return number if number is None or number > 1e6 else number * 1e6


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    return float(value) if good else None


class Powermetrics:
    """Power, clocks and thermal pressure of a Mac, from a `powermetrics` that runs beside. Root only.

    Its powers are the chip's own estimates. `powermetrics:chip` also counts joules, of the samples that
    came. After a pause in reading, samples that waited in the pipe are counted but not told: they are old.
    """

    name = "powermetrics"
    period_s = 1.0

    def __init__(
        self,
        system: System,
        open_stream: Callable[[Sequence[str]], Stream] = _Process,
        is_root: bool | None = None,
    ) -> None:
        self._system = system
        self._open = open_stream
        self._is_root = (hasattr(os, "geteuid") and os.geteuid() == 0) if is_root is None else is_root
        self._stream: Stream | None = None
        self._rest = b""
        self._energy_j = 0.0
        self._last_s: float | None = None

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor on macOS."""
        return [cls(system)] if system.platform == "darwin" else []

    def read(self) -> list[Reading]:
        """What the newest sample says; a reason until the first has come."""
        now_s = self._system.clock()
        if not self._is_root:
            return [_no_power(now_s, _FIX)]
        samples = self._samples()
        if isinstance(samples, str):
            return [_no_power(now_s, samples)]
        waited = self._last_s is not None and now_s - self._last_s > 3 * self.period_s
        self._last_s = now_s
        self._energy_j += sum(energy_of(sample) or 0.0 for sample in samples)
        if waited or not samples:
            return []  # the last readings stand until they are stale
        readings = readings_of(samples[-1], now_s)
        if energy_of(samples[-1]) is not None:
            total = Reading("powermetrics:chip", "energy", self._energy_j, "soc", "estimated", now_s)
            readings.append(total)
        return readings

    def close(self) -> None:
        """End `powermetrics`."""
        if self._stream is not None:
            self._stream.close()
        self._stream, self._rest, self._last_s = None, b"", None

    def _samples(self) -> list[dict[str, Any]] | str:
        """The samples since the last call, or why there are none to come."""
        if self._stream is None:
            try:
                self._stream = self._open([*_COMMAND, str(int(1e3 * self.period_s))])
            except OSError as error:
                return f"powermetrics cannot be started: {error.strerror or error}"
        printed = self._stream.read()
        if printed is None:
            self.close()
            return "powermetrics has ended; it is started again at the next read"
        samples, self._rest = parse_samples(self._rest + printed)
        return samples


def _no_power(time_s: float, reason: str) -> Reading:
    return Reading("powermetrics:chip", "power", None, "soc", "estimated", time_s, reason)


class ThermalState:
    """`ProcessInfo.thermalState`, which needs no root and is coarse: fair spans from warm to throttling.

    It can only raise headroom; nominal is no reading.
    """

    name = "thermalstate"
    period_s = 1.0

    def __init__(self, system: System, ask: Callable[[], int] | None = None) -> None:
        self._system = system
        self._ask = ask or cocoa_thermal_state

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor on macOS."""
        return [cls(system)] if system.platform == "darwin" else []

    def read(self) -> list[Reading]:
        """One bound of headroom, or the reason."""
        value, reason = self._headroom()
        time_s = self._system.clock()
        return [Reading("thermalstate", "headroom", value, "device", "estimated", time_s, reason)]

    def _headroom(self) -> tuple[float | None, str]:
        try:
            state = self._ask()
        except (OSError, AttributeError, ValueError) as error:
            return None, f"the thermal state cannot be asked for: {error}"
        if not 0 <= state < len(_STATES):
            return None, f"thermal state is {state}; known: 0 to {len(_STATES) - 1}"
        reason = "thermal state nominal proves nothing: Macs slow down below it too" if state == 0 else ""
        return _STATE_HEADROOM[state], reason


def cocoa_thermal_state() -> int:
    """0 nominal, 1 fair, 2 serious, 3 critical. Raises OSError where there is no Foundation."""
    foundation = ctypes.util.find_library("Foundation")
    runtime = ctypes.util.find_library("objc")
    if foundation is None or runtime is None:
        raise OSError("Foundation is not on this machine")
    ctypes.CDLL(foundation)  # registers NSProcessInfo
    objc = ctypes.CDLL(runtime)
    objc.objc_getClass.restype = objc.sel_registerName.restype = ctypes.c_void_p
    objc.objc_getClass.argtypes = objc.sel_registerName.argtypes = [ctypes.c_char_p]

    def send(receiver: int, selector: bytes, result: Any) -> Any:
        prototype = ctypes.CFUNCTYPE(result, ctypes.c_void_p, ctypes.c_void_p)
        address = ctypes.cast(objc.objc_msgSend, ctypes.c_void_p).value
        assert address is not None
        return prototype(address)(receiver, objc.sel_registerName(selector))

    info = send(objc.objc_getClass(b"NSProcessInfo"), b"processInfo", ctypes.c_void_p)
    return int(send(info, b"thermalState", ctypes.c_long))
