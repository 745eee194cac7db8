"""The plain answer of a profile, and what to keep in mind with it."""

from __future__ import annotations

from outrider.power.report.intervals import Interval
from outrider.power.report.summary import Cell, Summary

__all__ = ["headline", "notes", "table"]

SUSTAINED_S = 60.0  # shorter runs reach a rate, they do not sustain it
FEW_UPDATES = 20  # of a sensor in one run, below which its mean is not to be trusted


def headline(summary: Summary) -> str:
    """One or two sentences: the fastest setting that keeps cap and limit, beside plain decoding."""
    answer = _answer(summary)
    if not summary.metered:
        answer += f" {_why_time_alone(summary)}, so this is about time alone."
    elif summary.settings.power_cap_w is None:
        answer += _thriftiest(summary)
    if summary.partial:
        answer = f"Interrupted; so far: {answer}"
    return f"SIMULATED: {answer}" if summary.simulated else answer


def _why_time_alone(summary: Summary) -> str:
    if not summary.power_seen:
        return "No power is measured here"
    why = f" ({summary.no_meter})" if summary.no_meter else ""
    return f"Power is measured here, but not enough of any run for joules{why}"


def _answer(summary: Summary) -> str:
    plain = next((cell for cell in summary.cells if cell.label == "plain"), None)
    able = [cell for cell in summary.cells if cell.allowed]
    if not summary.cells:
        return "Nothing was measured."
    if not able:
        return f"Nothing that was tried keeps within {_bounds(summary)}."
    best = max(able, key=lambda cell: cell.tokens_per_s.mean)
    verb = "sustains" if summary.settings.run_s >= SUSTAINED_S else "reaches"
    bounds = _bounds(summary)
    opening = f"Within {bounds} this pair {verb}" if bounds else f"This pair {verb}"
    if best is plain:
        return f"{opening} {_rate(plain)} without speculation{_best_draft(able, plain)}."
    other = "plain decoding as the bundle prefers" if best.k == "0" else "without speculation"
    return f"{opening} {_rate(best)} at {_setting(best)}; {other} {_beside(plain, best)}."


def _bounds(summary: Summary) -> str:
    """The cap and the limit that were set and could be judged."""
    cap, limit = summary.settings.power_cap_w, summary.settings.temp_limit_c
    parts = []
    if cap is not None and any(cell.holds_cap is not None for cell in summary.cells):
        parts.append(f"{cap:g} W")
    if limit is not None and any(cell.holds_limit is not None for cell in summary.cells):
        parts.append(f"{limit:g} °C")
    return " and ".join(parts)


def _rate(cell: Cell) -> str:
    return f"{cell.tokens_per_s.mean:.1f} tokens/s"


def _setting(cell: Cell) -> str:
    precision = f", {cell.precision}" if cell.precision else ""
    if cell.k == "0":
        return f"plain decoding{precision}"
    k = f"k = {cell.k}" + (f" (on average {cell.mean_k:.1f})" if cell.k == "auto" and cell.mean_k else "")
    who = f" with {cell.drafter}" if cell.drafter else ""
    what = f", for {cell.objective}" if cell.objective not in (None, "latency") else ""
    return k + who + what + precision


def _beside(plain: Cell | None, best: Cell) -> str:
    if plain is None:
        return "nothing was measured"
    if not plain.allowed:
        return "it does not keep to that"
    text = f"{plain.tokens_per_s.mean:.1f}"
    low = best.speedup.low if best.speedup else None
    return text + (" (a difference within the interval)" if low is not None and low <= 1.0 else "")


def _best_draft(able: list[Cell], plain: Cell) -> str:
    drafting = [cell for cell in able if cell is not plain]
    if not drafting:
        return ""
    second = max(drafting, key=lambda cell: cell.tokens_per_s.mean)
    return f"; the best that drafts, {_setting(second)}, {second.tokens_per_s.mean:.1f}"


def _thriftiest(summary: Summary) -> str:
    """Which setting takes the fewest joules a token, where that can be said."""
    able = [(j.mean, cell) for cell in summary.cells if cell.allowed and (j := cell.energy_j_per_token)]
    if not able:
        return ""
    joules, best = min(able, key=lambda pair: pair[0])
    return f" The fewest joules a token: {joules:.2g} J, at {_setting(best)}."


def notes(summary: Summary) -> tuple[str, ...]:
    """What a reader must know before believing the figures."""
    return tuple(
        text
        for text in (
            _about_meter(summary),
            _about_retention(summary),
            _about_repeats(summary),
            _about_samples(summary),
            _about_idle(summary),
            _about_bounds(summary),
        )
        if text
    )


def _about_meter(summary: Summary) -> str:
    if not summary.no_meter:
        return ""
    if summary.power_seen:
        return f"No joules: {summary.no_meter}; --minutes makes runs longer."
    return f"No power meter: {summary.no_meter}"


def _about_retention(summary: Summary) -> str:
    if summary.settings.run_s >= SUSTAINED_S:
        return ""
    return (
        f"Runs of {summary.settings.run_s:.0f} s are too short for retention (the last 30 s over the first)"
        " and for slow heat; --minutes makes them longer."
    )


def _about_repeats(summary: Summary) -> str:
    few = min((cell.tokens_per_s.n for cell in summary.cells), default=3)
    return "" if few >= 3 else f"Some settings ran only {few} x: their intervals say little or nothing."


def _about_samples(summary: Summary) -> str:
    budget = summary.error_budget
    if budget is None or budget.fewest_in_a_run is None or budget.fewest_in_a_run >= FEW_UPDATES:
        return ""
    return (
        f"The power sensor gave only {budget.fewest_in_a_run} samples in a run; below {FEW_UPDATES} a mean"
        " is not to be trusted. --minutes makes runs longer."
    )


def _about_idle(summary: Summary) -> str:
    budget = summary.error_budget
    if budget is None or budget.idle_before_w is None or budget.idle_after_w is None:
        return ""
    before, after = budget.idle_before_w, budget.idle_after_w
    if abs(after - before) <= 0.1 * max(abs(before), abs(after)):
        return ""
    return f"Idle power moved from {before:.2f} to {after:.2f} W: net figures carry that difference."


def _about_bounds(summary: Summary) -> str:
    cap, limit = summary.settings.power_cap_w, summary.settings.temp_limit_c
    notes = []
    if cap is not None and all(cell.holds_cap is None for cell in summary.cells):
        notes.append(f"Nothing measures power here, so nothing says whether {cap:g} W were kept.")
    if limit is not None and all(cell.holds_limit is None for cell in summary.cells):
        notes.append(f"No thermometer is known here, so nothing says whether {limit:g} °C were kept.")
    return " ".join(notes)


def table(summary: Summary) -> str:
    """Every cell in a line of text: means with half of their 95 % intervals; joules only where measured."""
    head = ["setting", "n", "tokens/s", "x plain", "acceptance"]
    head += ["J/token", "W"] if summary.metered else []
    head += ["peak °C", "retention", "note"]
    rows = [head, *(_line(cell, summary.metered) for cell in summary.cells)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    text = ["  ".join(value.ljust(w) for value, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(text)


def _line(cell: Cell, metered: bool) -> list[str]:
    joules = [_spread(cell.energy_j_per_token, 3), _spread(cell.power_w, 2)] if metered else []
    return [
        cell.label,
        str(cell.tokens_per_s.n),
        _spread(cell.tokens_per_s, 2),
        _spread(cell.speedup, 2),
        "-" if cell.acceptance is None else f"{cell.acceptance:.2f}",
        *joules,
        "-" if cell.peak_c is None else f"{cell.peak_c:.1f}",
        "-" if cell.retention is None else f"{cell.retention:.2f}",
        "" if cell.allowed else "breaks a limit",
    ]


def _spread(found: Interval | None, digits: int) -> str:
    if found is None:
        return "-"
    return f"{found.mean:.{digits}f}" + ("" if found.half is None else f" ± {found.half:.{digits}f}")
