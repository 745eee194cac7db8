"""What the governor looks at: the readings of many sensors, distilled to one figure for each question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["State", "credible"]

_POSSIBLE = {
    "die_c": (-40.0, 125.0),
    "skin_c": (-40.0, 125.0),
    "headroom": (0.0, 5.0),
    "throttle": (0.0, 1.0),
    "clock_ratio": (0.0, 1.0),
    "power_w": (-2e3, 2e3),
    "battery_percent": (0.0, 100.0),
    "memory_available_mb": (0.0, 1e9),
    "memory_pressure_percent": (0.0, 100.0),
    "memory_events": (0.0, 1e15),
    "memory_resident_mb": (0.0, 1e9),
}


@dataclass(frozen=True)
class State:
    """The machine at `time_s` (monotonic). None: unknown, because no sensor says or what it said is stale.

    `die_c` is the hottest plausible silicon, `skin_c` the slowest body that is watched (case, skin or battery).
    `headroom` is the vendor's: 1 = severe throttling. `throttle` is how far the system holds a unit back now,
    0..1. `clock_ratio` is the lowest of (clock allowed or running / clock by design) over the units that are
    known. `power_w` is gross, of `power_scope`, by `power_method`. `skin_method` is "estimated" where no
    sensor gave `skin_c`. Memory figures are MB and %; `memory_events` counts how often a limit was reached, and
    `memory_resident_mb` is what this process holds. `stale` names quantities that have only old readings.
    """

    time_s: float
    die_c: float | None = None
    skin_c: float | None = None
    headroom: float | None = None
    throttle: float | None = None
    clock_ratio: float | None = None
    power_w: float | None = None
    power_scope: str = ""
    power_method: str = ""
    skin_method: str = ""
    battery_percent: float | None = None
    charging: bool | None = None
    memory_available_mb: float | None = None
    memory_pressure_percent: float | None = None
    memory_events: float | None = None
    memory_resident_mb: float | None = None
    stale: tuple[str, ...] = ()


def credible(state: State) -> State:
    """The same state, with every figure that cannot be true (NaN, infinite, out of range) unknown.

    A `Monitor` gives no such state; one that was made by hand may be one.
    """
    wrong = [
        name
        for name, (low, high) in _POSSIBLE.items()
        if (value := getattr(state, name)) is not None and not low <= value <= high
    ]
    unknown: dict[str, Any] = dict.fromkeys(wrong)
    return replace(state, **unknown) if unknown else state
