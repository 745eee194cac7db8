"""From the raw trace of a profile to its summary: a pure function, so that a trace can be read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from outrider.power.report.headline import headline, notes
from outrider.power.report.intervals import Interval, interval, paired_ratio, retention
from outrider.power.report.profile_trace import ProfileTrace, RoundLine, Run, Sample
from outrider.power.report.summary import Cell, ErrorBudget, Summary

__all__ = ["summarise"]

CAP_SLACK = 1.03  # mean power may be this much above the cap and still count as held
LIMIT_SLACK_C = 1.0
THROTTLED_CLOCK = 0.95  # of the best clock of the samples: below it the device holds back


def summarise(trace: ProfileTrace) -> Summary:
    """Figures of every cell that decoded anything, the answer, and what to keep in mind with it."""
    runs = [run for run in trace.runs if not run.warm_up and run.tokens_per_s is not None]
    plain = {run.repeat: rate for run in runs if run.label == "plain" and (rate := run.tokens_per_s)}
    summary = Summary(
        headline="",
        simulated=trace.header.simulated,
        partial=trace.partial,
        cells=tuple(_cell(mine, trace, plain) for mine in _by_cell(runs, trace.header.settings.cells)),
        settings=trace.header.settings,
        provenance=trace.header.provenance,
        tool_version=trace.header.tool_version,
        error_budget=_error_budget(runs, trace),
        no_meter="" if trace.end is None else trace.end.no_meter,
        power_seen=any(sample.power_w is not None for sample in trace.samples),
    )
    more = () if trace.end is None else trace.end.notes
    return replace(summary, headline=headline(summary), notes=(*notes(summary), *more))


def _by_cell(runs: Sequence[Run], order: Sequence[str]) -> list[list[Run]]:
    """The runs of each cell, in the order asked for; interrupted ones only where there is no other."""
    ran = {run.label for run in runs}
    cells: dict[str, list[Run]] = {label: [] for label in order if label in ran}
    for run in runs:
        cells.setdefault(run.label, []).append(run)
    return [[run for run in mine if run.whole] or mine for mine in cells.values()]


def _cell(runs: Sequence[Run], trace: ProfileTrace, plain: Mapping[int, float]) -> Cell:
    first, settings = runs[0], trace.header.settings
    numbers = {run.run for run in runs}
    rounds = [line for line in trace.rounds if line.run in numbers]
    samples = [_within(trace.samples, run) for run in runs]
    rates = [(run.repeat, run.tokens_per_s or 0.0) for run in runs]
    rate = interval([value for _, value in rates])
    assert rate is not None, "a cell has at least one run"
    power = interval([e.gross_j / (run.end_s - run.begin_s) for run in runs if (e := run.energy)])
    peak = max((c for part in samples for one in part if (c := one.hottest_c) is not None), default=None)
    return Cell(
        label=first.label,
        drafter=first.drafter,
        k=first.k,
        objective=first.objective,
        precision=first.precision,
        tokens_per_s=rate,
        tokens=sum(run.tokens for run in runs),
        seconds=sum(run.end_s - run.begin_s for run in runs),
        speedup=_speedup(first.label, rates, plain),
        energy_j_per_token=_per_token(runs, _decode_j),
        net_j_per_token=_per_token(runs, partial(_decode_net_j, idle_w=_idle_w(trace))),
        power_w=power,
        peak_c=peak,
        mean_k=_ratio(sum(line.drafted for line in rounds), len(rounds)),
        acceptance=_ratio(sum(run.accepted for run in runs), sum(run.evaluated for run in runs)),
        tokens_per_round=_ratio(sum(run.tokens for run in runs), sum(run.rounds for run in runs)),
        prompt_tokens_per_s=_ratio(sum(r.prompt_tokens for r in runs), sum(r.prefill_s for r in runs)),
        stage_j_per_token=_stages(runs),
        retention=_mean([retention(_events(rounds, run)) for run in runs]),
        throttled_after_s=_first([_throttled_after(a, run) for a, run in zip(samples, runs, strict=True)]),
        over_limit_s=_total([_over_limit_s(part, settings.temp_limit_c) for part in samples]),
        holds_cap=_below(None if power is None else power.mean, settings.power_cap_w, CAP_SLACK, 0.0),
        holds_limit=_below(peak, settings.temp_limit_c, 1.0, LIMIT_SLACK_C),
    )


def _speedup(label: str, rates: Sequence[tuple[int, float]], plain: Mapping[int, float]) -> Interval | None:
    if label == "plain":
        return None
    return paired_ratio([(rate, plain[repeat]) for repeat, rate in rates if repeat in plain])


def _below(value: float | None, bound: float | None, factor: float, slack: float) -> bool | None:
    return None if value is None or bound is None else value <= bound * factor + slack


def _within(samples: Iterable[Sample], run: Run) -> list[Sample]:
    return [sample for sample in samples if run.begin_s <= sample.time_s <= run.end_s]


def _events(rounds: Iterable[RoundLine], run: Run) -> list[tuple[float, float, float]]:
    """(begin, end, tokens) of the rounds of a run, each with the pause before it."""
    return [
        (line.time_s - line.seconds - line.pause_s, line.time_s, float(line.tokens))
        for line in rounds
        if line.run == run.run and line.seconds > 0
    ]


def _throttled_after(samples: Sequence[Sample], run: Run) -> float | None:
    """Seconds into a run until the device held a unit back that ran freely before; None: never, or unknown.

    A power mode may cap clocks for good (nvpmodel does): what counts is the best clock that was seen.
    """
    best = max((sample.clock_ratio or 0.0 for sample in samples), default=0.0)
    free = False
    for sample in samples:
        held = (sample.throttle or 0.0) > 0.0 or (
            sample.clock_ratio is not None and sample.clock_ratio < THROTTLED_CLOCK * best
        )
        if held and free:
            return sample.time_s - run.begin_s
        free |= not held and (sample.throttle is not None or sample.clock_ratio is not None)
    return None


def _over_limit_s(samples: Sequence[Sample], limit_c: float | None) -> float | None:
    """Time above the limit, each sample standing for the time until the next."""
    known = [(sample.time_s, c) for sample in samples if (c := sample.hottest_c) is not None]
    if limit_c is None or not known:
        return None
    return sum(later - now for (now, c), (later, _) in pairwise(known) if c > limit_c)


def _per_token(runs: Sequence[Run], joules: Callable[[Run], float | None]) -> Interval | None:
    found = [(joules(run), run.tokens) for run in runs]
    return interval([j / tokens for j, tokens in found if j is not None and tokens])


def _decode_j(run: Run) -> float | None:
    """Gross joules of a run without its prefill, where that can be told apart."""
    return None if run.energy is None else run.energy.gross_j - run.energy.stages.get("prefill", 0.0)


def _decode_net_j(run: Run, idle_w: float | None) -> float | None:
    """The same above the idle machine; it may be negative."""
    gross = _decode_j(run)
    if gross is None or idle_w is None:
        return None
    seconds = run.end_s - run.begin_s
    if run.energy is not None and "prefill" in run.energy.stages:
        seconds -= run.prefill_s
    return gross - idle_w * seconds


def _idle_w(trace: ProfileTrace) -> float | None:
    """The idle baseline: the mean of before and after, or the one that is known."""
    return None if trace.end is None else _mean([trace.end.idle_before_w, trace.end.idle_after_w])


def _stages(runs: Sequence[Run]) -> dict[str, float] | None:
    metered = [run for run in runs if run.energy is not None and run.energy.stages and run.tokens]
    tokens = sum(run.tokens for run in metered)
    if not metered:
        return None
    names = list(dict.fromkeys(name for run in metered if run.energy for name in run.energy.stages))
    totals = {n: sum(run.energy.stages.get(n, 0.0) for run in metered if run.energy) for n in names}
    return {name: joules / tokens for name, joules in totals.items()}


def _error_budget(runs: Sequence[Run], trace: ProfileTrace) -> ErrorBudget | None:
    """Of all runs together; None without a meter."""
    energies = [run.energy for run in runs if run.energy is not None]
    if not energies:
        return None
    expected = [e.samples_expected for e in energies if e.samples_expected is not None]
    got = [e.samples_got for e in energies if e.samples_got is not None]
    gaps = [e.largest_gap_s for e in energies if e.largest_gap_s is not None]
    first, end = energies[0], trace.end
    return ErrorBudget(
        method=first.method,
        trust=first.trust,
        scope=first.scope,
        source=first.source,
        samples_expected=sum(expected) if expected else None,
        samples_got=sum(got) if got else None,
        fewest_in_a_run=min(got, default=None),
        largest_gap_s=max(gaps, default=None),
        period_s=first.period_s,
        coverage=min(e.coverage for e in energies),
        edge_share=max((e.edge_j / e.gross_j for e in energies if e.edge_j and e.gross_j > 0), default=None),
        sampler_share=None if end is None else end.sampler_share,
        idle_before_w=None if end is None else end.idle_before_w,
        idle_after_w=None if end is None else end.idle_after_w,
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _first(values: Iterable[float | None]) -> float | None:
    return min(_known(values), default=None)


def _total(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
