"""What sampling telemetry costs: CPU time of the process over time that passed, as a share of one core.

    python -m benchmarks.power.sampler               # this machine's sensors, and a made-up phone's files
    python -m benchmarks.power.sampler --seconds 20 --json

The process does nothing but sample in the monitor's thread, with and without a trace being written, so all its
CPU time is the sampler's. What a wake-up finds in the caches depends on what else runs; "without pauses" is the CPU
time of the same reads one after the other, times the rate. The made-up phone is a folder of ordinary files in the
shape of sysfs: its readers do the work that they would do there, the kernel's drivers do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.summary import machine
from outrider.power.monitor import Monitor
from outrider.power.sensors import discover
from outrider.power.sensors.system import Sensor, System
from outrider.power.telemetry import TelemetryWriter

__all__ = ["Cost", "make_phone", "measure"]


@dataclass(frozen=True)
class Cost:
    """`core_share` is CPU seconds a second; `reading_share` is what the monitor itself counts, in elapsed time.

    `warm_share` is the CPU time of reading without pauses, times `hz`: None where sensors keep a pace of their own.
    """

    what: str
    hz: float
    trace: bool
    sources: int
    seconds: float
    core_share: float
    reading_share: float
    warm_share: float | None = None


def measure(what: str, sensors: Sequence[Sensor], hz: float, seconds: float, trace: Path | None) -> Cost:
    """Sample for so many seconds."""
    monitor = Monitor(sensors, interval_s=1 / hz)
    writer = TelemetryWriter(trace, monitor.periods) if trace else None
    if writer:
        monitor.listeners.append(writer)
    monitor.poll()  # imports and first looks are not what sampling costs
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    with monitor:
        time.sleep(seconds)
        spent_s, passed_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    warm_s = _warm_s(monitor) if all(sensor.period_s == 0 for sensor in sensors) else None
    if writer:
        writer.close()
    sources = len({reading.source for reading in monitor.readings()})
    share = monitor.overhead_share
    warm = None if warm_s is None else hz * warm_s
    return Cost(what, hz, trace is not None, sources, passed_s, spent_s / passed_s, share, warm)


def _warm_s(monitor: Monitor, rounds: int = 50, repeats: int = 5) -> float:
    """CPU seconds of one read of every sensor, listeners included: the least of some means."""
    found = []
    for _ in range(repeats):
        began_s = time.thread_time()
        for _ in range(rounds):
            monitor._read_due()  # in this thread, without the state that `poll` would make of it
        found.append((time.thread_time() - began_s) / rounds)
    return min(found)


def make_phone(root: Path) -> System:
    """A phone with 40 zones, 8 coolers, 3 CPU clusters, a GPU and a battery."""
    files: dict[str, object] = {"/proc/meminfo": "MemAvailable:    4096000 kB"}
    for number in range(40):
        zone = f"/sys/class/thermal/thermal_zone{number}"
        files |= {f"{zone}/type": f"cpu-{number}", f"{zone}/temp": 41000 + 100 * number}
    for number in range(8):
        cooler = f"/sys/class/thermal/cooling_device{number}"
        files |= {
            f"{cooler}/type": f"cpufreq-cpu{number}",
            f"{cooler}/cur_state": 0,
            f"{cooler}/max_state": 9,
        }
    for number in (0, 3, 7):
        policy = f"/sys/devices/system/cpu/cpufreq/policy{number}"
        names = ("scaling_cur_freq", "scaling_max_freq", "cpuinfo_max_freq")
        files |= {f"{policy}/{name}": 2_400_000 for name in names}
    gpu, battery = "/sys/class/kgsl/kgsl-3d0", "/sys/class/power_supply/battery"
    files |= {f"{gpu}/gpuclk": 5e8, f"{gpu}/max_gpuclk": 9e8, f"{gpu}/gpu_available_frequencies": "900000000"}
    figures = {"type": "Battery", "status": "Discharging", "capacity": 70, "current_now": 800_000}
    files |= {f"{battery}/{name}": value for name, value in {**figures, "voltage_now": 3_900_000}.items()}
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n", encoding="utf-8")
    return System(root, platform="linux")


class _Hurried:
    """A sensor at the monitor's own rate, whatever pace it keeps by itself."""

    def __init__(self, sensor: Sensor) -> None:
        self.name, self.period_s, self.read = sensor.name, 0.0, sensor.read


def _warm(cost: Cost) -> str:
    return "" if cost.warm_share is None else f"; without pauses {100 * cost.warm_share:.2f} % of a core"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line, or JSON, for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--hz", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        phone = make_phone(Path(folder) / "phone")
        trace = Path(folder) / "trace.jsonl"
        cases = [
            ("this machine", discover(), None),
            ("this machine", discover(), trace),
            ("a made-up phone", discover(phone), None),
            ("a made-up phone", discover(phone), trace),
            ("a made-up phone, all at full rate", [_Hurried(sensor) for sensor in discover(phone)], trace),
        ]
        for what, sensors, path in cases:
            costs.append(measure(what, sensors, chosen.hz, chosen.seconds, path))
    if chosen.json:
        print(json.dumps({"machine": machine(), "costs": [asdict(cost) for cost in costs]}, indent=2))
        return
    for cost in costs:
        written = "with a trace" if cost.trace else "no trace"
        print(
            f"{cost.what}, {cost.sources} sources, {cost.hz:g} Hz, {written}: {100 * cost.core_share:.2f} % of a core"
            f" (reading {100 * cost.reading_share:.2f} % of the time{_warm(cost)})"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
