"""A phone on a cable: its files are copied into a folder here, and the sensors for Linux read them there."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.contracts import Reading
from outrider.power.sensors.system import CommandResult, Sensor, System

__all__ = ["AdbPhone", "parse_files"]

_FILES = {
    "/sys/class/thermal/thermal_zone*": ("type", "temp"),
    "/sys/class/thermal/cooling_device*": ("type", "cur_state", "max_state"),
    "/sys/devices/system/cpu/cpufreq/policy*": (
        "cpuinfo_cur_freq",
        "scaling_cur_freq",
        "scaling_max_freq",
        "cpuinfo_max_freq",
    ),
    "/sys/class/devfreq/*": ("cur_freq", "max_freq", "available_frequencies"),
    "/sys/class/kgsl/kgsl-3d0": ("gpuclk", "max_gpuclk", "gpu_available_frequencies", "temp"),
    "/sys/class/power_supply/*": (
        "type",
        "scope",
        "present",
        "online",
        "status",
        "capacity",
        "current_now",
        "voltage_now",
        "power_now",
        "temp",
    ),
    "/proc": ("meminfo",),
    "/proc/pressure": ("memory",),
    "/sys/block/zram0": ("disksize", "mm_stat"),
}
_NAMES = sorted({name for names in _FILES.values() for name in names})
_LINE = re.compile(rf"(?P<path>/(?:proc|sys)/(?:.*?/)?(?:{'|'.join(_NAMES)})):(?P<text>.*)")
_TIMEOUT_S = 4.0
_FIXES = (
    ("unauthorized", "unlock the phone and allow USB debugging for this computer"),
    ("offline", "unplug the phone and plug it in again"),
    ("more than one", "choose one with --adb SERIAL; adb devices lists them"),
    ("no devices", "plug a phone in and switch on USB debugging in its developer options"),
    ("not found", "adb devices lists the phones that are there"),
    ("not installed", "install Android's platform tools"),
)


def parse_files(text: str) -> dict[str, str]:
    """Path -> content from what `grep -H '' FILE...` printed; for a file that it could not read, why not.

    A missing file is left out. Names of devices may hold colons, so a path ends at a file name that is known.
    """
    found: dict[str, list[str]] = {}
    for line in text.replace("\r\n", "\n").split("\n"):
        complaint = line.startswith("grep: ")
        match = _LINE.fullmatch(line.removeprefix("grep: "))
        if match is None or (complaint and "No such file" in match["text"]):
            continue
        found.setdefault(match["path"], []).append(match["text"].strip() if complaint else match["text"])
    return {path: "\n".join(lines) + "\n" for path, lines in found.items()}


class AdbPhone:
    """Everything that a phone shows through `adb`, by the sensors that read the same on the phone itself.

    `serial` chooses one of several phones. One `adb shell` a period copies all files; what the copy could
    not read is a file that holds the reason, so that it becomes a reading without a value.
    """

    name = "adb"
    period_s = 1.0

    def __init__(self, serial: str | None = None, system: System | None = None) -> None:
        host = system or System()
        self._host = host
        self._adb = ["adb", *([] if serial is None else ["-s", serial])]
        folder = Path(tempfile.mkdtemp(prefix="outrider-adb-"))
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._phone = replace(host, root=folder, run=self._shell, platform="android")
        self._sensors: list[Sensor] | None = None  # None: the phone has not answered yet
        self._due_s: list[float] = []
        self.periods: dict[str, float] = {}  # s, by source

    def close(self) -> None:
        """Remove the copy; a later read makes it again, to be removed with this object."""
        self._close_files()
        shutil.rmtree(self._phone.root, ignore_errors=True)

    def read(self) -> list[Reading]:
        """Copy the files, then read each sensor whose period has passed."""
        began_s = self._host.clock()
        reason = self._copy()
        if reason:
            return [Reading("adb:phone", "temperature", None, "device", "instant", began_s, reason)]
        if self._sensors is None:
            from outrider.power.sensors import discover

            self._sensors = discover(self._phone)
            self._due_s = [began_s] * len(self._sensors)
        readings: list[Reading] = []
        for index, sensor in enumerate(self._sensors):
            if began_s >= self._due_s[index] - 1e-6:
                found = _readings(sensor, began_s)
                self._due_s[index] = began_s + sensor.period_s
                self.periods.update((reading.source, sensor.period_s) for reading in found)
                readings += found
        return readings

    def _copy(self) -> str:
        """Bring the copy up to date; the reason when the phone does not answer."""
        patterns = [f"{folder}/{name}" for folder, names in _FILES.items() for name in names]
        result = self._run([f"grep -H '' {' '.join(patterns)} 2>&1"], _TIMEOUT_S)
        files = parse_files(result.text)
        if not files:
            return _explain(result)
        root = self._phone.root
        for old in [path for path in root.rglob("*") if path.is_file()]:
            if f"/{old.relative_to(root)}" not in files:
                old.unlink()
                self._close_files()
        for path, text in files.items():
            copy = self._phone.path(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")
        return ""

    def _close_files(self) -> None:
        """Have the sensors look for their files anew: one that was removed stays readable while it is open."""
        for sensor in self._sensors or ():
            close = getattr(sensor, "close", None)
            if close is not None:
                close()

    def _shell(self, command: Sequence[str], timeout_s: float) -> CommandResult:
        """Run a command on the phone."""
        result = self._run([shlex.join(command)], timeout_s)
        if result.code == 127 or "inaccessible or not found" in result.error + result.text:
            return CommandResult(None, b"", f"{command[0]} is not on the phone")
        return result

    def _run(self, words: Sequence[str], timeout_s: float) -> CommandResult:
        return self._host.run([*self._adb, "shell", *words], timeout_s)


def _readings(sensor: Sensor, time_s: float) -> list[Reading]:
    try:
        return sensor.read()
    except Exception as error:  # one that fails on a strange copy must not hide the others
        reason = f"the sensor failed: {type(error).__name__}: {error}"
        return [Reading(f"adb:{sensor.name}", "power", None, "device", "instant", time_s, reason)]


def _explain(result: CommandResult) -> str:
    said = (result.error or result.text).strip().splitlines()
    message = said[-1] if said else f"adb ended with code {result.code} and said nothing"
    fix = next((fix for word, fix in _FIXES if word in message), "")
    return f"{message}; {fix}" if fix else message
