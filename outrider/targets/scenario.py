"""What happens around a simulated device: ambient temperature, chargers, other apps, and what the user asks for.

A scenario is a frozen record, or a TOML file with the same fields and `[[events]]`; see `read_scenario`.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import UsageError
from outrider.records import decode, parsed

__all__ = ["SCENARIOS", "Event", "Scenario", "load_scenario", "read_scenario"]

_FOLDER = Path(__file__).parent / "scenarios"

SCENARIOS = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""Names of the scenarios that ship with Outrider."""

AMBIENT_C = (-40.0, 70.0)
"""What the air around a simulated device can have."""


@dataclass(frozen=True)
class Event:
    """From `at_s` on, what is given here holds; None leaves it as it was.

    `load_w` and `bandwidth_taken` (a share of DRAM bandwidth) are other apps'; `charge_w` goes into the
    battery; `memory_taken_mb` and `memory_pressure_percent` are of other apps too. `category` is the kind of
    text that is asked for. `ask` False: nobody asks for text, and the device rests.
    """

    at_s: float
    ambient_c: float | None = None
    load_w: float | None = None
    bandwidth_taken: float | None = None
    charge_w: float | None = None
    memory_taken_mb: float | None = None
    memory_pressure_percent: float | None = None
    category: str | None = None
    ask: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        bounds = {
            "at_s": (self.at_s, 0.0, 1e7),
            "ambient_c": (self.ambient_c, *AMBIENT_C),
            "load_w": (self.load_w, 0.0, 1000.0),
            "bandwidth_taken": (self.bandwidth_taken, 0.0, 0.95),
            "charge_w": (self.charge_w, 0.0, 500.0),
            "memory_taken_mb": (self.memory_taken_mb, 0.0, 1e7),
            "memory_pressure_percent": (self.memory_pressure_percent, 0.0, 100.0),
        }
        for name, (value, low, high) in bounds.items():
            if value is not None and not low <= value <= high:
                raise UsageError(f"event: {name} is {value}; it must be between {low:g} and {high:g}")


@dataclass(frozen=True)
class Scenario:
    """One simulated run: a device in a place, for a while, with a goal and what happens meanwhile.

    `device` is a slug or a path. `spread` is how far the specimen differs from its profile (0.15: each rate, energy
    and thermal constant by up to 15 %), drawn by `seed`, which also draws noise. The device starts at rest in
    `ambient_c`, plus `preheated_w` for ever before. `temp_limit_c` bounds the die, `skin_limit_c` the case.
    """

    name: str
    device: str
    duration_s: float
    ambient_c: float = 25.0
    seed: int = 0
    spread: float = 0.15
    category: str | None = None  # of the acceptance trace; None: all of it in turn
    objective: str = "latency"
    power_cap_w: float | None = None
    temp_limit_c: float | None = None
    skin_limit_c: float | None = None
    battery_percent: float = 100.0
    battery_floor_percent: float | None = None
    preheated_w: float = 0.0
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values outside their range, and events out of order."""
        bounds = {
            "duration_s": (self.duration_s, 1e-3, 1e7),
            "ambient_c": (self.ambient_c, *AMBIENT_C),
            "spread": (self.spread, 0.0, 0.9),
            "power_cap_w": (self.power_cap_w, 1e-3, 10_000.0),
            "temp_limit_c": (self.temp_limit_c, 0.0, 150.0),
            "skin_limit_c": (self.skin_limit_c, 0.0, 150.0),
            "battery_percent": (self.battery_percent, 0.0, 100.0),
            "battery_floor_percent": (self.battery_floor_percent, 0.0, 100.0),
            "preheated_w": (self.preheated_w, 0.0, 1000.0),
        }
        for name, (value, low, high) in bounds.items():
            if value is not None and not low <= value <= high:
                raise UsageError(f"scenario {self.name}: {name} is {value}; expected {low:g} to {high:g}")
        if self.objective not in ("latency", "energy", "balanced"):
            raise UsageError(f"objective {self.objective!r} is not known; known: latency, energy, balanced")
        times = [event.at_s for event in self.events]
        if times != sorted(times):
            raise UsageError(f"scenario {self.name}: events are at {times} s; put them in order of time")
        late = [time_s for time_s in times if time_s >= self.duration_s]
        if late:
            raise UsageError(
                f"scenario {self.name}: an event is at {late[0]:g} s, but duration_s is {self.duration_s:g}; it would"
                " never happen"
            )

    def category_at(self, time_s: float) -> str | None:
        """The kind of text that is asked for at a time since the start."""
        named = [e.category for e in self.events if e.at_s <= time_s and e.category is not None]
        return named[-1] if named else self.category

    def asked_at(self, time_s: float) -> bool:
        """Whether text is asked for at a time since the start."""
        told = [event.ask for event in self.events if event.at_s <= time_s and event.ask is not None]
        return told[-1] if told else True


def read_scenario(path: str | os.PathLike[str]) -> Scenario:
    """A scenario from a TOML file. Raises UsageError naming the file and the field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the scenario {path} cannot be read: {error}") from None
    try:
        raw = parsed(tomllib.loads, text)
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    scenario: Scenario = decode(Scenario, {"name": Path(path).stem, **raw}, str(path), UsageError)
    return scenario


def load_scenario(name: str | os.PathLike[str]) -> Scenario:
    """A scenario by its name, or by path (ends in .toml). Raises UsageError, listing the known names."""
    text = os.fspath(name)
    if text.endswith(".toml"):
        return read_scenario(text)
    if text not in SCENARIOS:
        known = ", ".join(SCENARIOS)
        raise UsageError(f"unknown scenario {text!r}; known: {known}; or a path ending in .toml")
    return read_scenario(_FOLDER / f"{text}.toml")
