"""How long the governor takes to decide: for a state that it has not seen, and for one that it has.

    python -m benchmarks.power.deciding
    python -m benchmarks.power.deciding --json

The states are those of a phone that warms to its limit and is held there, with all sensors, power and joules
known: the longest way through the code. Every decision is timed by itself, in CPU time, so that other programs do
not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from math import exp, sin
from typing import Any

from benchmarks.summary import machine
from outrider.contracts import Costs, Energy
from outrider.power.governor import Governor, Policy
from outrider.power.state import State
from outrider.targets.device import load_device

__all__ = ["measure"]

COSTS = Costs(
    {width: 0.05 + 0.004 * width for width in (1, 2, 3, 5, 8)},
    {"lookup": 0.0001, "model": 0.02},
    0.0003,
    Energy(1.2, {width: 0.15 + 0.03 * width for width in range(1, 17)}, {"lookup": 0.0, "model": 0.06}, 1.0),
)


def measure(states: int = 6000, hertz: float = 10.0) -> dict[str, Any]:
    """Microseconds of `decide` over a warm-up of `states` readings."""
    governor = Governor(Policy(power_cap_w=5.0), load_device("snapdragon-8-gen3"))
    fresh, again = [], []
    for i in range(states):
        at_s = i / hertz
        warm = 1.0 - exp(-at_s / 150.0)
        state = State(
            at_s,
            die_c=30 + 40 * warm + sin(at_s),
            skin_c=30 + 13 * warm,
            headroom=0.3 + 0.7 * warm,
            throttle=0.0,
            clock_ratio=1.0,
            power_w=4.0 + sin(3 * at_s),
            battery_percent=80.0,
            charging=False,
            memory_available_mb=3000.0,
            memory_pressure_percent=0.0,
        )
        for times in (fresh, again):
            begin = time.thread_time()
            governor.decide(state, COSTS)
            times.append(1e6 * (time.thread_time() - begin))
    return {"machine": machine(), "new_us": _spread(fresh), "repeated_us": _spread(again)}


def _spread(times: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {
        "median": statistics.median(times),
        "p90": cuts[89],
        "p99": cuts[98],
        "mean": statistics.fmean(times),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.power.deciding", description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = measure()
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for name in ("new_us", "repeated_us"):
        parts = ", ".join(f"{key} {value:.0f}" for key, value in found[name].items())
        print(f"{name.removesuffix('_us')} state: {parts} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
