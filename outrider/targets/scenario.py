"""A scripted day for a device: phases of ambient temperature, charging, other apps, memory, and use.

A scenario is a TOML file; some ship with the package (`SCENARIOS`). It says what happens to the device and
within which constraints it must stay, not what device it is.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.errors import UsageError
from outrider.records import decode

__all__ = ["SCENARIOS", "Constraints", "Phase", "Scenario", "load_scenario", "parse_scenario"]

_FOLDER = Path(__file__).parent / "scenarios"

SCENARIOS = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""Names of the scenarios that ship with the package."""


@dataclass(frozen=True)
class Phase:
    """A stretch of time in which nothing changes from outside.

    `app_w` is what other apps draw, heat included; `app_share` the share of compute and memory bandwidth that
    they take (decoding slows by it); `memory_mb` is what others hold. `use` False: nobody asks for text.
    """

    minutes: float
    ambient_c: float = 25.0
    charging: bool = False
    app_w: float = 0.0
    app_share: float = 0.0
    memory_mb: float = 0.0
    use: bool = True
    label: str = ""

    def __post_init__(self) -> None:
        """Refuse values outside their range, naming the field and the value seen."""
        bounds = {
            "minutes": (self.minutes, 1e-3, 24 * 60.0),
            "ambient_c": (self.ambient_c, -30.0, 60.0),
            "app_w": (self.app_w, 0.0, 100.0),
            "app_share": (self.app_share, 0.0, 0.95),
            "memory_mb": (self.memory_mb, 0.0, 1e6),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise UsageError(f"{name} is {value}; it must be between {low:g} and {high:g}")


@dataclass(frozen=True)
class Constraints:
    """What every policy must keep; None: nothing beyond what the device itself does."""

    objective: Literal["latency", "energy", "balanced"] = "latency"
    power_cap_w: float | None = None
    temp_limit_c: float | None = None
    battery_floor_percent: float | None = None


@dataclass(frozen=True)
class Scenario:
    """Phases in order. `device` is the profile to use where none is named."""

    name: str
    phases: tuple[Phase, ...]
    device: str = "snapdragon-8-gen3"
    battery_percent: float = 80.0
    constraints: Constraints = Constraints()

    def __post_init__(self) -> None:
        """Refuse a scenario in which nothing happens."""
        if not self.phases:
            raise UsageError("there is no [[phases]]; a scenario needs at least one")
        if not any(phase.use for phase in self.phases):
            raise UsageError("no phase has use = true; nothing would ever be decoded")
        if not 0.0 <= self.battery_percent <= 100.0:
            raise UsageError(f"battery_percent is {self.battery_percent}; it must be between 0 and 100")

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return sum(60.0 * phase.minutes for phase in self.phases)


def parse_scenario(text: str, where: str) -> Scenario:
    """Read a scenario from TOML. Raises UsageError naming `where` and the field."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from None
    scenario: Scenario = decode(Scenario, raw, f"{where}: scenario", UsageError)
    return scenario


def load_scenario(name: str | os.PathLike[str]) -> Scenario:
    """A scenario by its name, or by path (ends in .toml).

    Raises UsageError for an unknown name (listing the known ones) or a faulty file.
    """
    text = os.fspath(name)
    if not text.endswith(".toml") and text not in SCENARIOS:
        known = ", ".join(SCENARIOS)
        raise UsageError(f"unknown scenario {text!r}; known: {known}; or a path ending in .toml")
    path = Path(text) if text.endswith(".toml") else _FOLDER / f"{text}.toml"
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"the scenario {path} cannot be read: {reason}") from None
    return parse_scenario(content, path.name)
