"""What `outrider simulate` keeps: a raw trace, a summary, and what a run of one policy came to. All simulated."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from outrider.contracts import as_json
from outrider.lines import SCHEMA_VERSION, LineWriter
from outrider.power.report.profile_trace import ProfileError
from outrider.records import replaced
from outrider.targets.scenario import Scenario

__all__ = ["PolicyRun", "Simulation", "TimelinePoint", "headline", "write_simulation_summary", "write_trace"]


@dataclass(frozen=True)
class TimelinePoint:
    """The true state of the machine at one moment, and what was decoded since the last."""

    time_s: float
    die_c: float
    case_c: float
    power_w: float  # mean since the last point
    clock_ratio: float
    k: float | None  # mean drafted a round since the last point
    tokens: int
    level: str


@dataclass(frozen=True)
class PolicyRun:
    """What a policy came to, by the machine's true figures. Simulated.

    `energy_j`, and `seconds` beside it, count the time in which text was asked for; energy is the whole
    device's, other apps included. `over_limit_s` is time above the limits of `peak_over_c`, the most that
    the die or the case was above its own (below 0: how much was left). `cap_violation` is by how much of
    the cap the worst 10 s mean exceeded it (0: never).
    """

    policy: str
    tokens: int
    energy_j: float
    seconds: float
    peak_c: float
    peak_case_c: float
    peak_over_c: float
    over_limit_s: float
    cap_violation: float
    level_changes: int
    battery_percent: float | None
    mean_k: float | None
    rounds: int
    timeline: tuple[TimelinePoint, ...] = ()
    simulated: bool = True

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the time in which text was asked for."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def j_per_token(self) -> float | None:
        """Gross joules a token; None when there is none."""
        return self.energy_j / self.tokens if self.tokens else None

    @property
    def holds(self) -> bool:
        """Whether it kept the temperature limits within 1 °C and the cap within 3 %."""
        return self.peak_over_c <= 1.0 and self.cap_violation <= 0.03

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for `json`."""
        return {**as_json(self), "tokens_per_s": self.tokens_per_s, "j_per_token": self.j_per_token}


@dataclass(frozen=True)
class Simulation:
    """Policies compared over a scenario. `device` is its name; `provenance` says with what it was simulated."""

    scenario: Scenario
    device: str
    runs: tuple[PolicyRun, ...]
    provenance: Mapping[str, str]
    tool_version: str
    partial: bool = False
    schema_version: int = SCHEMA_VERSION
    kind: Literal["simulation-summary"] = "simulation-summary"
    simulated: Literal[True] = True


def headline(simulation: Simulation) -> str:
    """One sentence: the policy with the most tokens of those that keep the limits, and the others beside it."""
    runs, scenario = simulation.runs, simulation.scenario
    able = [run for run in runs if run.holds]
    bounds = _bounds(scenario)
    seconds = scenario.duration_s
    where = f"Over {seconds / 60:.0f} minutes," if seconds >= 120.0 else f"Over {seconds:.0f} s,"
    if not runs:
        return "SIMULATED: no policy was finished."
    if not able:
        return (
            f"SIMULATED: {where} nothing that was tried keeps within {bounds or 'the limits of the device'}."
        )
    best = max(able, key=lambda run: run.tokens)
    others = "; ".join(_beside(run) for run in runs if run is not best)
    within = f" within {bounds}," if bounds else ""
    begun = "interrupted; so far: " if simulation.partial else ""
    return f"SIMULATED: {begun}{where}{within} {_made(best)}" + (f"; {others}." if others else ".")


def _bounds(scenario: Scenario) -> str:
    limits = (
        (scenario.power_cap_w, "W"),
        (scenario.temp_limit_c, "°C of silicon"),
        (scenario.skin_limit_c, "°C of the case"),
    )
    return " and ".join(f"{value:g} {unit}" for value, unit in limits if value is not None)


def _made(run: PolicyRun) -> str:
    joules = "" if run.j_per_token is None else f" at {run.j_per_token:.3g} J each"
    return f"{run.policy} makes {run.tokens:,} tokens{joules}"


def _beside(run: PolicyRun) -> str:
    joules = "" if run.j_per_token is None else f" at {run.j_per_token:.3g} J"
    broken = "" if run.holds else ", but breaks a limit"
    return f"{run.policy} {run.tokens:,}{joules}{broken}"


def write_trace(path: str | os.PathLike[str], simulation: Simulation) -> None:
    """Write the raw trace: a header, and for each policy its points and its run. Raises ProfileError."""
    header = {
        "simulated": True,
        "tool_version": simulation.tool_version,
        "device": simulation.device,
        "provenance": simulation.provenance,
        "scenario": as_json(simulation.scenario),
    }
    with LineWriter(path, "simulation", header, ProfileError) as writer:
        for run in simulation.runs:
            for point in run.timeline:
                writer.write({"record": "point", "policy": run.policy, **as_json(point)})
            writer.write({"record": "run", **_without_timeline(run)})
        writer.write({"record": "end", "complete": not simulation.partial})


def _without_timeline(run: PolicyRun) -> dict[str, Any]:
    return {name: value for name, value in replace(run, timeline=()).to_dict().items() if name != "timeline"}


def write_simulation_summary(path: str | os.PathLike[str], simulation: Simulation) -> None:
    """Write `summary.json`, whole or not at all. Raises ProfileError when it cannot be written."""
    runs: Sequence[dict[str, Any]] = [_without_timeline(run) for run in simulation.runs]
    record = {"headline": headline(simulation), **as_json(replace(simulation, runs=())), "runs": runs}
    try:
        with replaced(path) as stream:
            stream.write((json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror or error}; free some space") from None
