"""A profile as one HTML file: no network, no scripts, readable in light and dark, and on a phone.

Whatever comes from a file is escaped. Figures of a simulated device say SIMULATED in the title, in the
answer and in every plot. Where nothing measures power there are no joules, not zeros.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from itertools import groupby

from outrider.power.report import svg
from outrider.power.report.html import definitions, document, figure, section, table
from outrider.power.report.intervals import Interval
from outrider.power.report.profile_trace import ProfileError, ProfileTrace, RoundLine
from outrider.power.report.summary import Cell, ErrorBudget, Summary
from outrider.records import replaced

__all__ = ["render", "write_report"]

LEAST_HEAT_SPAN_C = 10.0  # of the colour scale: noise of a degree is no red


def render(summary: Summary, trace: ProfileTrace | None = None) -> str:
    """The report of a profile; without its raw trace there is no timeline."""
    mark = "SIMULATED: " if summary.simulated else ""
    device = summary.provenance.get("device", "this machine")
    title = f"{mark}Outrider profile of {device}"
    sections = [
        _opening(summary, title),
        _trade_off(summary),
        _table(summary),
        _stages(summary),
        _over_time(summary, trace) if trace is not None else "",
        _budget(summary),
        _provenance(summary),
    ]
    return document(title, sections)


def write_report(path: str | os.PathLike[str], summary: Summary, trace: ProfileTrace | None = None) -> None:
    """Write the report, whole or not at all. Raises ProfileError when it cannot be written."""
    try:
        with replaced(path) as stream:
            stream.write(render(summary, trace).encode())
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror or error}; free some space") from None


def _opening(summary: Summary, title: str) -> str:
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="answer">{escape(summary.headline)}</p>']
    if summary.simulated:
        parts.append(
            '<p class="simulated">SIMULATED: time, energy and heat come from a model of the device, not from'
            " the device. Acceptance is as recorded or decoded.</p>"
        )
    if not summary.metered:
        why = "No run has joules" if summary.power_seen else "No power meter answered"
        parts.append(f"<p>{why}: this report is about time only.</p>")
    if summary.notes:
        parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in summary.notes) + "</ul>")
    return f"<header>{''.join(parts)}</header>"


def _marked(summary: Summary, title: str) -> str:
    return f"{title} (SIMULATED)" if summary.simulated else title


def _trade_off(summary: Summary) -> str:
    """Rate against joules against peak temperature; rates alone where no joules are known."""
    if not summary.cells:
        return ""
    heats = _heats(summary.cells)
    if not summary.metered:
        title = _marked(summary, "Tokens per second")
        marks = [_rate_mark(cell, heats) for cell in summary.cells]
        drawing = svg.bars(marks, "tokens/s", title, _described(summary.cells), "rates")
        return section(title, figure(drawing, _interval_caption(heats)))
    title = _marked(summary, "Speed against energy against heat")
    marks = [mark for cell in summary.cells if (mark := _pareto_mark(cell, heats))]
    drawing = svg.scatter(marks, "J/token (gross)", "tokens/s", title, _described(summary.cells), "pareto")
    caption = "Up is faster, left is thriftier; the dashed line joins what nothing else beats in both. "
    if not all(cell.allowed for cell in summary.cells):
        caption += "A dashed rim: this setting broke the power cap or the temperature limit. "
    return section(title, figure(drawing, caption + _interval_caption(heats)))


def _heats(cells: Sequence[Cell]) -> dict[str, float]:
    """Peak temperatures on a scale from the coolest cell (0) up, at least 10 °C long."""
    peaks = {cell.label: cell.peak_c for cell in cells if cell.peak_c is not None}
    if not peaks:
        return {}
    low, span = min(peaks.values()), max(LEAST_HEAT_SPAN_C, max(peaks.values()) - min(peaks.values()))
    return {label: (peak - low) / span for label, peak in peaks.items()}


def _interval_caption(heats: dict[str, float]) -> str:
    colour = " Redder and larger: a higher peak temperature." if heats else " No temperature is known."
    return "Whiskers: 95 % interval over repetitions." + colour


def _bounds(found: Interval | None) -> tuple[float, float] | None:
    return None if found is None or found.low is None or found.high is None else (found.low, found.high)


def _rate_mark(cell: Cell, heats: dict[str, float]) -> svg.Mark:
    rate = cell.tokens_per_s
    return svg.Mark(
        cell.label,
        rate.mean,
        0.0,
        _bounds(rate),
        None,
        heats.get(cell.label),
        _detail(cell),
        not cell.allowed,
    )


def _pareto_mark(cell: Cell, heats: dict[str, float]) -> svg.Mark | None:
    joules, rate = cell.energy_j_per_token, cell.tokens_per_s
    if joules is None:
        return None
    return svg.Mark(
        cell.label,
        joules.mean,
        rate.mean,
        _bounds(joules),
        _bounds(rate),
        heats.get(cell.label),
        _detail(cell),
        not cell.allowed,
    )


def _detail(cell: Cell) -> str:
    parts = [f"{cell.tokens_per_s.mean:.2f} tokens/s"]
    if cell.energy_j_per_token:
        parts.append(f"{cell.energy_j_per_token.mean:.3g} J/token")
    if cell.peak_c is not None:
        parts.append(f"peak {cell.peak_c:.1f} °C")
    return ", ".join(parts)


def _described(cells: Sequence[Cell]) -> str:
    return "; ".join(f"{cell.label}: {_detail(cell)}" for cell in cells)


def _spread(found: Interval | None, digits: int = 2) -> str:
    if found is None:
        return "–"
    half = "" if found.half is None else f" ± {found.half:.{digits}f}"
    return f"{found.mean:.{digits}f}{half}"


def _plain(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _table(summary: Summary) -> str:
    """Every setting; energy columns only where there is energy."""
    if not summary.cells:
        return ""
    head = ["setting", "n", "tokens/s", "× plain", "acceptance", "mean k"]
    head += ["J/token", "net J/token", "W"] if summary.metered else []
    head += ["peak °C", "retention", "throttled after", "s over limit"]
    rows = [_row(cell, summary.metered) for cell in summary.cells]
    caption = "Mean ± half of the 95 % interval. Retention: the rate of the last 30 s over the first 30 s."
    return section(
        _marked(summary, "Every setting"), table(head, rows), f'<p class="dim">{escape(caption)}</p>'
    )


def _row(cell: Cell, metered: bool) -> list[str]:
    row = [
        cell.label + ("" if cell.allowed else " (breaks a limit)"),
        str(cell.tokens_per_s.n),
        _spread(cell.tokens_per_s),
        _spread(cell.speedup),
        _plain(cell.acceptance),
        _plain(cell.mean_k, ".1f"),
    ]
    if metered:
        row += [
            _spread(cell.energy_j_per_token, 3),
            _spread(cell.net_j_per_token, 3),
            _spread(cell.power_w),
        ]
    return [
        *row,
        _plain(cell.peak_c, ".1f"),
        _plain(cell.retention),
        _plain(cell.throttled_after_s, ".0f", " s"),
        _plain(cell.over_limit_s, ".0f"),
    ]


def _stages(summary: Summary) -> str:
    """Where the joules of a token went."""
    split = [(cell, cell.stage_j_per_token) for cell in summary.cells if cell.stage_j_per_token]
    if not split:
        return ""
    names = list(dict.fromkeys(name for _, stages in split for name in stages))
    rows = [[cell.label, *(_plain(stages.get(name), ".4f") for name in names)] for cell, stages in split]
    caption = (
        "Gross joules a decoded token, by the time in which they were drawn. Wasted draft: a part of draft."
    )
    return section(
        _marked(summary, "Energy by stage"),
        table(["setting", *(name.replace("_", " ") for name in names)], rows),
        f'<p class="dim">{escape(caption)}</p>',
    )


def _over_time(summary: Summary, trace: ProfileTrace) -> str:
    lines = [line for line in _lines(trace) if any(value is not None for _, value in line.points)]
    if not lines:
        return ""
    title = _marked(summary, "The course of it")
    bands = [
        (run.begin_s, run.end_s, f"{run.label}, {'warm-up' if run.warm_up else f'run {run.repeat + 1}'}")
        for run in trace.runs
    ]
    names = ", ".join(line.name for line in lines)
    drawing = svg.timeline(lines, bands, title, f"{names} over time, {len(bands)} runs", "timeline")
    return section(title, figure(drawing, "Shaded: one run each; between them the device idles."))


def _lines(trace: ProfileTrace) -> list[svg.Line]:
    samples, settings = trace.samples, trace.header.settings
    by_run = [list(group) for _, group in groupby(trace.rounds, key=lambda line: line.run)]
    k = _joined([[(line.time_s, float(line.drafted)) for line in rounds] for rounds in by_run])
    rates = _joined([_rates(rounds) for rounds in by_run])
    return [
        svg.Line("temperature", "°C", [(s.time_s, s.hottest_c) for s in samples], settings.temp_limit_c),
        svg.Line("power", "W", [(s.time_s, s.power_w) for s in samples], settings.power_cap_w),
        svg.Line("clock", "of full", [(s.time_s, s.clock_ratio) for s in samples]),
        svg.Line("k", "drafted", k, steps=True),
        svg.Line("tokens/s", "", rates),
    ]


def _joined(parts: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float | None]]:
    """One line of several, with nothing drawn between them."""
    joined: list[tuple[float, float | None]] = []
    for part in parts:
        if joined:
            joined.append((joined[-1][0], None))
        joined.extend(part)
    return joined


def _rates(rounds: Sequence[RoundLine], bins: int = 40) -> list[tuple[float, float]]:
    """Tokens per second of one run in as many equal stretches of time, of 2 s at least."""
    begin = rounds[0].time_s - rounds[0].seconds - rounds[0].pause_s
    width = max((rounds[-1].time_s - begin) / bins, 2.0)
    found = []
    for index, group in groupby(rounds, key=lambda line: int((line.time_s - begin) / width)):
        part = list(group)
        busy_s = sum(line.seconds + line.pause_s for line in part)
        if busy_s > 0:
            found.append((begin + (index + 0.5) * width, sum(line.tokens for line in part) / busy_s))
    return found


METHODS = {
    "counter": "the hardware counts joules",
    "integrated": "means of power, integrated over their own times",
    "instant": "samples of power, integrated over their own times",
    "estimated": "an estimate, not a measurement",
    "simulated": "a model of the device, not a measurement",
    "replayed": "read from a recorded trace",
}
"""How the joules were found, in words."""


def _budget(summary: Summary) -> str:
    budget = summary.error_budget
    if budget is None:
        text = summary.no_meter or "no source of power or energy answered"
        return section("Error budget", f"<p>No joules were measured: {escape(text)}.</p>")
    return section(_marked(summary, "Error budget"), definitions(_budget_lines(budget)))


def _budget_lines(budget: ErrorBudget) -> list[tuple[str, str]]:
    expected, got = budget.samples_expected, budget.samples_got
    counted = "–" if got is None else f"{got} of {expected} expected" if expected else str(got)
    idle = f"{_plain(budget.idle_before_w)} W before, {_plain(budget.idle_after_w)} W after"
    known_idle = budget.idle_before_w is not None or budget.idle_after_w is not None
    return [
        ("method", f"{METHODS.get(budget.method, budget.method)}; trust: {budget.trust or 'unknown'}"),
        ("part that is metered", budget.scope),
        ("source", budget.source or "–"),
        ("samples", counted),
        ("fewest samples in a run", "–" if budget.fewest_in_a_run is None else str(budget.fewest_in_a_run)),
        ("largest gap", _plain(budget.largest_gap_s, ".2f", " s")),
        ("covered, at least", f"{budget.coverage:.1%} of a run"),
        (
            "edges of a run",
            "–" if budget.edge_share is None else f"at most {budget.edge_share:.1%} of its joules",
        ),
        ("period of the sensor", _plain(budget.period_s, ".2f", " s")),
        (
            "cost of sampling",
            "–" if budget.sampler_share is None else f"{budget.sampler_share:.1%} of a core",
        ),
        ("idle baseline", idle if known_idle else "not taken: no net figures"),
    ]


def _provenance(summary: Summary) -> str:
    settings = summary.settings
    known = list(summary.provenance.items())
    asked = [
        ("tool", f"outrider {summary.tool_version}"),
        (
            "runs",
            f"{settings.repeats} of {settings.run_s:.0f} s a setting, random order, seed {settings.seed}",
        ),
        ("power cap", _plain(settings.power_cap_w, "g", " W")),
        ("temperature limit", _plain(settings.temp_limit_c, "g", " °C")),
        ("cool-down gate", f"at most {settings.cool_down_s:.0f} s"),
    ]
    return section("Where this comes from", definitions([*known, *asked]))
