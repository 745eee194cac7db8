"""Energy of a run by stage (prefill, draft, verify, other), and what a token took.

The total is that of the whole window; stages share it, they are never summed up to it. A stage whose stretches
are long beside the sensor's period is read off the sensor by timestamps; the rest of the total is shared out
among the short ones in the proportion of the energy model's estimates, or of their time where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from outrider.contracts import Energy
from outrider.errors import UsageError
from outrider.power.meter import Integral, Measured

__all__ = [
    "Attribution",
    "Drafted",
    "StageEnergy",
    "TokenEnergy",
    "Wasted",
    "per_token",
    "split_stages",
    "wasted",
]

STAGES = ("prefill", "draft", "verify", "other")
DENSE_PERIODS = 5.0  # stretches this long: an edge misplaces a fifth of the difference in power at most
_COVERED = 0.9

Attribution = Literal["timestamps", "model", "time"]
Stretch = tuple[str, float, float]
"""(stage, start s, end s), monotonic."""


@dataclass(frozen=True)
class StageEnergy:
    """Joules and seconds by stage, and how each got its share; None where the window has no total.

    `other` is what no stretch names; the joules add up to `total_j`.
    """

    total_j: float | None
    joules: Mapping[str, float]
    seconds: Mapping[str, float]
    attribution: Mapping[str, Attribution]


@dataclass(frozen=True)
class Drafted:
    """One round: who drafted how many tokens, how many were accepted, and the width of the verify forward."""

    drafter: str
    drafted: int
    accepted: int
    width: int


@dataclass(frozen=True)
class Wasted:
    """Joules of draft steps whose tokens were not kept, and of verify rows that were rejected (marginal).

    `verify_j` is None without an energy model: what a row more costs is not known then.
    """

    draft_j: float
    verify_j: float | None


@dataclass(frozen=True)
class TokenEnergy:
    """Joules a token over the whole window (gross, net of idle) and over decoding alone; None: not known."""

    gross_j: float | None
    net_j: float | None
    decode_j: float | None
    draft_j_per_accepted: float | None
    tokens_per_wh: float | None


def split_stages(
    measured: Measured,
    stretches: Sequence[Stretch],
    estimates: Mapping[str, float] | None = None,
    energy_between: Callable[[str, float, float], Integral | None] | None = None,
) -> StageEnergy:
    """Share a window's total among its stages.

    `estimates` are joules by stage from an energy model (`energy.stage_estimates`, `other` included);
    `energy_between` is the meter's method of that name. Raises UsageError for an unknown stage, and for
    stretches that overlap.
    """
    inside = _within(stretches, measured.start_s, measured.end_s)
    seconds = {stage: sum(e - s for name, s, e in inside if name == stage) for stage in STAGES}
    seconds["other"] = max(0.0, measured.seconds - sum(seconds[stage] for stage in STAGES[:-1]))
    if measured.energy_j is None:
        return StageEnergy(None, {}, seconds, {})
    read = _by_timestamps(measured, inside, energy_between)
    rest = [stage for stage in STAGES if stage not in read and seconds[stage] > 0.0]
    left = measured.energy_j - sum(read.values())
    if not rest or left < 0.0:
        read, left = _scaled(read, measured.energy_j), 0.0
    modelled = estimates is not None and any(estimates.get(s, 0.0) > 0.0 for s in rest)
    weights = {s: max(0.0, estimates.get(s, 0.0)) if modelled and estimates else seconds[s] for s in rest}
    how: dict[str, Attribution] = dict.fromkeys(read, "timestamps")
    how |= dict.fromkeys(rest, "model" if modelled else "time")
    return StageEnergy(measured.energy_j, read | _scaled(weights, left), seconds, how)


def _within(stretches: Sequence[Stretch], start_s: float, end_s: float) -> list[Stretch]:
    """The parts of stretches inside a window, in order."""
    unknown = sorted({stage for stage, _, _ in stretches} - set(STAGES))
    if unknown:
        raise UsageError(f"stage {unknown[0]!r} is not known; known: {', '.join(STAGES)}")
    cut = [(stage, max(s, start_s), min(e, end_s)) for stage, s, e in sorted(stretches, key=lambda x: x[1])]
    inside = [(stage, s, e) for stage, s, e in cut if e > s and stage != "other"]
    for (stage, _, end), (after, start, _) in pairwise(inside):
        if start < end - 1e-9:
            raise UsageError(
                f"stage {after!r} starts at {start:.6f} s, while {stage!r} runs until {end:.6f} s"
            )
    return inside


def _by_timestamps(
    measured: Measured,
    inside: list[Stretch],
    energy_between: Callable[[str, float, float], Integral | None] | None,
) -> dict[str, float]:
    """Joules of the stages whose stretches are long enough for the sensor, read off it."""
    budget = measured.budget
    if energy_between is None or budget is None or budget.period_s is None:
        return {}
    joules: dict[str, float] = {}
    for stage in STAGES[:-1]:
        own = [(s, e) for name, s, e in inside if name == stage]
        if not own or median(e - s for s, e in own) < DENSE_PERIODS * budget.period_s:
            continue
        seen = [energy_between(budget.source, s, e) for s, e in own]
        covered = sum(part.covered_s for part in seen if part)
        total_s = sum(e - s for s, e in own)
        if covered >= _COVERED * total_s:
            joules[stage] = sum(part.joules for part in seen if part) * total_s / covered
    return joules


def _scaled(weights: Mapping[str, float], total: float) -> dict[str, float]:
    """Weights as shares of a total."""
    whole = sum(weights.values())
    return {name: total * weight / whole for name, weight in weights.items()} if whole > 0.0 else {}


def wasted(stages: StageEnergy, rounds: Sequence[Drafted], energy: Energy | None = None) -> Wasted:
    """The part of draft and verify energy that speculation lost.

    Draft steps count by what the model says of their drafter, alike where it does not know every one. A verify
    forward of width w that kept n drafts lost what width w costs beyond width n + 1, as a share of all forwards.
    Raises UsageError for a width that the model does not know.
    """
    lost = used = 0.0
    costs = {r.drafter: energy.draft_j.get(r.drafter, 0.0) if energy else 1.0 for r in rounds if r.drafted}
    if not all(costs.values()):
        costs = dict.fromkeys(costs, 1.0)
    for r in rounds:
        each = costs.get(r.drafter, 0.0)
        lost += each * (r.drafted - r.accepted)
        used += each * r.drafted
    draft_j = stages.joules.get("draft", 0.0) * (lost / used if used > 0.0 else 0.0)
    return Wasted(draft_j, None if energy is None else _wasted_verify(stages, rounds, energy))


def _wasted_verify(stages: StageEnergy, rounds: Sequence[Drafted], energy: Energy) -> float:
    needed = {w for r in rounds for w in (r.width, min(r.accepted + 1, r.width))}
    missing = sorted(needed - set(energy.verify_j))
    if missing:
        raise UsageError(
            f"no energy of a verify forward of width {missing[0]}; ask the model for {sorted(needed)}"
        )
    whole = sum(energy.verify_j[r.width] for r in rounds)
    lost = sum(energy.verify_j[r.width] - energy.verify_j[min(r.accepted + 1, r.width)] for r in rounds)
    return stages.joules.get("verify", 0.0) * (max(0.0, lost) / whole if whole > 0.0 else 0.0)


def per_token(
    measured: Measured, tokens: int, accepted: int = 0, stages: StageEnergy | None = None
) -> TokenEnergy:
    """What each of the `tokens` that came out took; `accepted` of them were drafted.

    Raises UsageError for fewer than one token.
    """
    if tokens < 1:
        raise UsageError(f"tokens is {tokens}; joules a token need at least one")
    total, net = measured.energy_j, measured.net_j
    joules = stages.joules if stages is not None and stages.total_j is not None else None
    draft = joules.get("draft", 0.0) if joules is not None else None
    return TokenEnergy(
        gross_j=None if total is None else total / tokens,
        net_j=None if net is None else net / tokens,
        decode_j=None if total is None or joules is None else (total - joules.get("prefill", 0.0)) / tokens,
        draft_j_per_accepted=draft / accepted if draft is not None and accepted > 0 else None,
        tokens_per_wh=tokens * 3600.0 / total if total is not None and total > 0.0 else None,
    )
