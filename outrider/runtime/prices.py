"""What a round of a plan is expected to commit, and to cost in seconds and joules.

With conditional acceptance a_j at draft position j, a round of k drafts commits 1 + Σ_{i<=k} Π_{j<=i} a_j tokens
(Leviathan et al., arXiv 2211.17192, section 3.1, without its assumption of one acceptance for all positions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

from outrider.contracts import Costs, Limits, Objective
from outrider.runtime.costs import PRIOR_DRAFT, by_width, snap, verify_time

__all__ = ["LONGEST_PACE_S", "Acceptance", "PlannedRound", "Prices", "expected_tokens"]

LONGEST_PACE_S = 5.0  # a pause after a round; what would need more cannot be held by pacing


@dataclass(frozen=True)
class Acceptance:
    """Conditional acceptance by drafter: entry j is P(draft j accepted | it was drafted, those before accepted).

    `proposed` holds P(draft j is drafted | it was asked for, those before were drafted), for drafters that may
    stop short of k by themselves (absent: they never do). The last entry goes on. `guessed` is P(the draft's next
    token is the target's too | all k before were accepted, and it is sure of one); absent: as the next draft.
    `corrected` is P(the correction that was drafted behind comes true), for drafters that draft behind one.
    """

    conditional: Mapping[str, tuple[float, ...]]
    proposed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    guessed: Mapping[str, float] = field(default_factory=dict)
    corrected: Mapping[str, float] = field(default_factory=dict)


def expected_tokens(conditional: tuple[float, ...], k: int) -> float:
    """Expected committed tokens of a round of k drafts: 1 + Σ Π a_j."""
    reach, total = 1.0, 1.0
    for position in range(k):
        reach *= conditional[min(position, len(conditional) - 1)]
        total += reach
    return total


class PlannedRound(NamedTuple):
    """What a round of a plan is expected to be; `cost` is what the objective wants least of."""

    cost: float
    drafter: str | None
    k: int
    pace_s: float
    overlapped: bool = False
    beside_s: float = 0.0  # of its verify, where what the draft has left of that goes to a correction


class Prices:
    """Seconds and joules of rounds under limits: one verify forward of each width, and its drafts."""

    def __init__(self, costs: Costs, objective: Objective, limits: Limits, k_max: int) -> None:
        self.costs, self.limits = costs, limits
        self.kind = objective.kind if costs.energy else "latency"
        rounds = by_width(costs.verify_s, limits.widths, k_max)
        self.times = [seconds + costs.overhead_s for seconds in rounds]
        self.beside_s = self._beside(costs, limits)
        self.joules = by_width(costs.energy.verify_j, limits.widths, k_max) if costs.energy else None

    def fixed(self, drafter: str | None, k: int) -> tuple[float, float]:
        """Seconds and dynamic joules of a round in which exactly k tokens are drafted."""
        return self._spent(drafter, k, k)

    def _spent(self, drafter: str | None, drafted: int, steps: int) -> tuple[float, float]:
        energy, name = self.costs.energy, drafter or ""
        seconds = self.times[drafted] + (steps * self.step_s(name) if steps else 0.0)
        if energy is None or self.joules is None:
            return seconds, 0.0
        return seconds, self.joules[drafted] + steps * energy.draft_j.get(name, 0.0)

    def pause_s(self, work_s: float, dynamic_j: float) -> float:
        """Seconds to rest after a round, to keep within the limits on power and work."""
        limits, energy = self.limits, self.costs.energy
        pause_s = work_s / limits.duty - work_s
        if energy and limits.power_w is not None:
            excess_j = (energy.static_w - limits.power_w) * work_s + dynamic_j
            spare_w = limits.power_w - energy.pause_w
            if excess_j > 0.0:
                pause_s = max(pause_s, excess_j / spare_w if spare_w > 0.0 else inf)
        return min(pause_s, LONGEST_PACE_S)

    def _beside(self, costs: Costs, limits: Limits) -> list[float]:
        """Seconds of a round's verify, by k, while a draft model works beside it; as alone, until that is measured.

        A width that was not run so is slowed down as the nearest one that was.
        """
        beside = costs.overlapped
        if beside is None or not beside.verify_s:
            return self.times
        verify_s = [seconds - costs.overhead_s for seconds in self.times]
        slowed = {
            width: seconds / verify_time(costs.verify_s, width) for width, seconds in beside.verify_s.items()
        }
        widths = [snap(k + 1, limits.widths) for k in range(len(verify_s))]
        nearest = [min(slowed, key=lambda known: abs(known - width)) for width in widths]
        pairs = zip(verify_s, nearest, strict=True)
        return [seconds * slowed[width] + beside.overhead_s for seconds, width in pairs]

    def round(
        self,
        drafter: str | None,
        k: int,
        tokens: float,
        work_s: float,
        dynamic_j: float,
        beside: bool = False,
    ) -> PlannedRound:
        """A round that is expected to commit so many tokens for so much work."""
        energy, pause_s = self.costs.energy, self.pause_s(work_s, dynamic_j)
        behind = drafter is not None and drafter in self.limits.catch_up_s
        catch_up_s, catch_up_j = self._catch_up(drafter or "") if behind else (0.0, 0.0)
        token_s = (work_s + pause_s) / tokens + catch_up_s
        if self.kind == "latency":
            return PlannedRound(token_s, drafter, k, pause_s, beside)
        token_j = dynamic_j / tokens + catch_up_j
        if energy:
            token_j += (energy.static_w * work_s + energy.pause_w * pause_s) / tokens
        cost = token_j if self.kind == "energy" else token_s * token_j
        return PlannedRound(cost, drafter, k, pause_s, beside)

    def _catch_up(self, drafter: str) -> tuple[float, float]:
        """Seconds and joules a token, of what the drafter must run before its first one."""
        seconds = self.limits.catch_up_s.get(drafter, 0.0) / max(self.limits.horizon, 1)
        energy, step_s = self.costs.energy, self.step_s(drafter)
        if energy is None or step_s <= 0.0:
            return seconds, 0.0
        return seconds, seconds * (energy.static_w + energy.draft_j.get(drafter, 0.0) / step_s)

    def step_s(self, drafter: str) -> float:
        """Seconds of a draft step."""
        return self.costs.draft_s.get(drafter, PRIOR_DRAFT * self.times[0])

    def drafted(self, drafter: str, acceptance: Acceptance) -> Iterator[PlannedRound]:
        """The rounds of every k that a drafter may draft; a draft that stops short has run one step for nothing."""
        conditional = acceptance.conditional[drafter]
        proposed = acceptance.proposed.get(drafter, (1.0,))
        most_s = self.times[0] + self.limits.risk_s.get(drafter, inf)
        tokens, reach, whole = 1.0, 1.0, 1.0  # whole: the chance that k tokens are drafted
        early_s = early_j = 0.0  # of drafts that stopped before k, weighted by their chance
        for k in range(1, len(self.times)):
            full_s, full_j = self._spent(drafter, k, k)
            if full_s > most_s:
                return
            comes = proposed[min(k, len(proposed)) - 1]
            short_s, short_j = self._spent(drafter, k - 1, k)
            early_s += whole * (1.0 - comes) * short_s
            early_j += whole * (1.0 - comes) * short_j
            whole *= comes
            reach *= comes * conditional[min(k, len(conditional)) - 1]
            tokens += reach
            yield self.round(drafter, k, tokens, early_s + whole * full_s, early_j + whole * full_j)

    def overlapped(self, drafter: str, acceptance: Acceptance) -> Iterator[PlannedRound]:
        """The same of rounds beside whose verify the next is drafted, as it goes on average.

        With h = P(all k drafts and the guess after them come true), a round waits for its own draft with 1 - h,
        and with h for what is left of the k + 1 steps that ran beside the verify before it. Where whole steps fit
        into what these leave of a verify, they may draft behind a correction, and are saved where that comes true.
        """
        conditional = acceptance.conditional[drafter]
        proposed = acceptance.proposed.get(drafter, (1.0,))
        guessed, step_s = acceptance.guessed.get(drafter), self.step_s(drafter)
        beside_s = self.costs.overlapped.draft_s.get(drafter, step_s) if self.costs.overlapped else step_s
        most_s = self.times[0] + self.limits.risk_s.get(drafter, inf)
        tokens, reach, whole = 1.0, 1.0, 1.0
        early_s = early_j = steps = 0.0  # verify forwards and draft steps of drafts that stopped before k
        for k in range(1, len(self.times)):
            if self.beside_s[k] + k * step_s > most_s:
                return
            comes = _at(proposed, k - 1)
            stops = whole * (1.0 - comes)
            early_s, early_j = early_s + stops * self.times[k - 1], early_j + stops * self._verify_j(k - 1)
            steps += stops * k
            whole, reach = whole * comes, reach * comes * _at(conditional, k - 1)
            tokens += reach
            goes_on = _at(proposed, k)
            held = reach * goes_on * (_at(conditional, k) if guessed is None else guessed)
            drafting = steps + whole * k
            late_s = max(0.0, (1.0 + drafting) * beside_s - self.beside_s[k])
            in_time = (
                min(1.0 + drafting, ceil(self.beside_s[k] / beside_s)) if beside_s > 0.0 else 1.0 + drafting
            )
            ahead = held * (1.0 + drafting) + (whole * goes_on - held) * in_time
            work_s = early_s + whole * self.beside_s[k] + (1.0 - held) * drafting * step_s + held * late_s
            work_j = early_j + whole * self._verify_j(k)
            work_j += ((1.0 - held) * drafting + ahead) * self._step_j(drafter)
            yield self.round(drafter, k, tokens, work_s, work_j, beside=True)
            fits = min(k, int((self.beside_s[k] - (1.0 + k) * beside_s) / beside_s)) if beside_s > 0.0 else k
            if drafter in acceptance.corrected and fits > 0:
                saved = min(acceptance.corrected[drafter], 1.0 - held) * fits
                work_s -= saved * step_s
                work_j += (whole * goes_on * fits - saved) * self._step_j(drafter)
                cost = self.round(drafter, k, tokens, work_s, work_j, beside=True)
                yield cost._replace(beside_s=self.beside_s[k])

    def _verify_j(self, k: int) -> float:
        return self.joules[k] if self.joules is not None else 0.0

    def _step_j(self, drafter: str) -> float:
        return self.costs.energy.draft_j.get(drafter, 0.0) if self.costs.energy else 0.0


def _at(shares: tuple[float, ...], position: int) -> float:
    """The entry of a position; the last one goes on."""
    return shares[min(position, len(shares) - 1)]
