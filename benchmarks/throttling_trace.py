"""Make the telemetry trace that the end of `outrider demo` plays back: a small board that overheats and recovers.

    python -m benchmarks.throttling_trace outrider/power/traces/throttling.jsonl

Nothing in it was measured: a simulated Raspberry Pi 4 sits at rest in a warm cabinet (40 °C), another program
loads all its cores until the firmware throttles, ends, and the door is opened (20 °C). The device has no power
sensor, so what is recorded is what the real one would tell: silicon temperature, clocks, throttling.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from outrider.power.monitor import Monitor
from outrider.power.sensors.simulated import Simulated
from outrider.power.telemetry import TelemetryWriter
from outrider.targets.device import shipped_device
from outrider.targets.scenario import Event
from outrider.targets.simulated import Machine

__all__ = ["DEVICE", "main", "make"]

DEVICE = "raspberry-pi-4"
LENGTH_S, STEP_S = 130.0, 1.0
CABINET_C, OUTSIDE_C = 40.0, 20.0
PREHEATED_W = 2.4
EVENTS = (Event(15.0, load_w=7.0), Event(48.0, load_w=0.0, ambient_c=OUTSIDE_C))


def make(path: str | Path) -> None:
    """Write the trace; the same every time."""
    machine = Machine(shipped_device(DEVICE), CABINET_C, events=EVENTS, preheated_w=PREHEATED_W)
    monitor = Monitor([Simulated(machine, only=("die", "clocks"))], machine.clock, STEP_S)
    header = {
        "interval_s": STEP_S,
        "tool": "python -m benchmarks.throttling_trace",
        "machine": f"simulated {machine.device.name}: no device was measured",
    }
    with TelemetryWriter(path, monitor.periods, machine.clock, **header) as writer:
        monitor.listeners.append(writer)
        while machine.elapsed_s < LENGTH_S:
            monitor.poll()
            machine.idle(STEP_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path, help="the trace to write")
    make(parser.parse_args(arguments).path)


if __name__ == "__main__":
    main()
