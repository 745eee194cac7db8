"""A comparison of policies on a simulated device as one HTML file; every title says SIMULATED."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from outrider.power.report import svg
from outrider.power.report.html import definitions, document, figure, section, table
from outrider.power.report.profile_trace import ProfileError
from outrider.power.report.simulation import PolicyRun, Simulation, TimelinePoint, headline
from outrider.records import replaced
from outrider.targets.scenario import Event, Scenario

__all__ = ["render_simulation", "write_simulation_report"]

RATE_S = 10.0  # a timeline's tokens a second are means over at least this


def render_simulation(simulation: Simulation) -> str:
    """The report: the answer, speed against energy against heat, every figure, and the course of each policy."""
    title = f"SIMULATED: {simulation.scenario.name} on {simulation.device}"
    sections = [_opening(simulation, title)]
    if simulation.runs:
        sections += [_trade_off(simulation), _table(simulation.runs)]
    sections += [_course(number, run, simulation.scenario) for number, run in enumerate(simulation.runs)]
    return document(title, [*sections, _provenance(simulation)])


def write_simulation_report(path: str | os.PathLike[str], simulation: Simulation) -> None:
    """Write the report, whole or not at all. Raises ProfileError when it cannot be written."""
    try:
        with replaced(path) as stream:
            stream.write(render_simulation(simulation).encode())
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror or error}; free some space") from None


def _opening(simulation: Simulation, title: str) -> str:
    return (
        f'<header><h1>{escape(title)}</h1><p class="answer">{escape(headline(simulation))}</p>'
        '<p class="simulated">SIMULATED: time, energy and heat come from a model of the device, not from the device.'
        " Acceptance is as recorded.</p></header>"
    )


def _trade_off(simulation: Simulation) -> str:
    title = "Speed against energy against heat (SIMULATED)"
    runs = [run for run in simulation.runs if run.j_per_token is not None]
    if not runs:
        return section(title, "<p>No policy made a token.</p>")
    peaks = [run.peak_c for run in runs]
    span = max(10.0, max(peaks) - min(peaks))
    marks = [
        svg.Mark(
            run.policy,
            run.j_per_token or 0.0,
            run.tokens_per_s,
            heat=(run.peak_c - min(peaks)) / span,
            detail=_detail(run),
            hollow=not run.holds,
        )
        for run in runs
    ]
    described = "; ".join(f"{run.policy}: {_detail(run)}" for run in runs)
    drawing = svg.scatter(marks, "J/token (gross)", "tokens/s", title, described, "pareto")
    caption = (
        "Up is faster, left is thriftier; the dashed line joins what nothing else beats in both. Redder and larger: a"
        " higher peak temperature of the silicon. A dashed rim: it broke a limit."
    )
    return section(title, figure(drawing, caption))


def _detail(run: PolicyRun) -> str:
    return f"{run.tokens_per_s:.2f} tokens/s, {run.j_per_token:.3g} J/token, peak {run.peak_c:.1f} °C"


def _table(runs: Sequence[PolicyRun]) -> str:
    head = ["policy", "tokens", "tokens/s", "J/token", "mean k", "peak °C", "case °C", "s over limit"]
    head += ["cap broken by", "battery %", "level changes"]
    rows = [
        [
            run.policy + ("" if run.holds else " (breaks a limit)"),
            f"{run.tokens:,}",
            f"{run.tokens_per_s:.2f}",
            _plain(run.j_per_token, ".3f"),
            _plain(run.mean_k, ".1f"),
            f"{run.peak_c:.1f}",
            f"{run.peak_case_c:.1f}",
            f"{run.over_limit_s:.0f}",
            f"{run.cap_violation:.1%}",
            _plain(run.battery_percent, ".1f"),
            str(run.level_changes),
        ]
        for run in runs
    ]
    caption = (
        "By the machine's true state, not its sensors. The cap is judged by the worst mean of ten seconds."
    )
    return section("Every policy (SIMULATED)", table(head, rows), f'<p class="dim">{escape(caption)}</p>')


def _plain(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _course(number: int, run: PolicyRun, scenario: Scenario) -> str:
    """Temperatures, power, clock, k and tokens a second of one policy over time."""
    points = run.timeline
    if not points:
        return ""
    lines = [
        svg.Line("silicon", "°C", [(p.time_s, p.die_c) for p in points], scenario.temp_limit_c),
        svg.Line("case", "°C", [(p.time_s, p.case_c) for p in points], scenario.skin_limit_c),
        svg.Line("power", "W", [(p.time_s, p.power_w) for p in points], scenario.power_cap_w),
        svg.Line("clock", "of full", [(p.time_s, p.clock_ratio) for p in points]),
        svg.Line("k", "drafted", [(p.time_s, p.k) for p in points], steps=True),
        svg.Line("tokens/s", f"means of {RATE_S:g} s", _rates(points)),
    ]
    shown = [line for line in lines if any(value is not None for _, value in line.points)]
    title = f"The course of {run.policy} (SIMULATED)"
    names = ", ".join(line.name for line in shown)
    bands = _bands(scenario)
    drawing = svg.timeline(shown, bands, title, f"{names} over time", f"course{number}")
    caption = "Dashed: a limit." + (" Shaded in turn: between two events of the scenario." if bands else "")
    return section(title, figure(drawing, caption))


def _rates(points: Sequence[TimelinePoint]) -> list[tuple[float, float | None]]:
    found: list[tuple[float, float | None]] = []
    begin_s, tokens = points[0].time_s, 0
    for point in points[1:]:
        tokens += point.tokens
        if (seconds := point.time_s - begin_s) >= RATE_S:
            found.append(((begin_s + point.time_s) / 2, tokens / seconds))
            begin_s, tokens = point.time_s, 0
    return found


def _bands(scenario: Scenario) -> list[tuple[float, float, str]]:
    """The time between two events, with what holds from the first of them on."""
    if not scenario.events:
        return []
    told: dict[float, list[str]] = {0.0: []}
    for event in scenario.events:
        told.setdefault(event.at_s, []).extend(_told(event))
    times = [*told, scenario.duration_s]
    return [(begin, end, ", ".join(told[begin]) or "the beginning") for begin, end in pairwise(times)]


def _told(event: Event) -> list[str]:
    values = {name: value for name, value in vars(event).items() if name != "at_s" and value is not None}
    return [f"{name} {value}" for name, value in values.items()]


def _provenance(simulation: Simulation) -> str:
    known = [(name, value) for name, value in vars(simulation.scenario).items() if name != "events"]
    asked = [(name, "–" if value is None else str(value)) for name, value in known]
    events = [(f"from {event.at_s:g} s", ", ".join(_told(event))) for event in simulation.scenario.events]
    tool = [("tool", f"outrider {simulation.tool_version}"), *simulation.provenance.items()]
    return section("Where this comes from (SIMULATED)", definitions([*tool, *asked, *events]))
