"""How far to ride ahead: the one place that chooses drafter and draft length.

`choose` is pure: from measured costs and acceptance it takes the plan that serves the objective best, k = 0
(plain decoding) among them. With conditional acceptance a_j at draft position j, a round of k drafts commits
1 + Σ_{i<=k} Π_{j<=i} a_j tokens (Leviathan et al., arXiv 2211.17192, section 3.1, without its assumption of
one acceptance for all positions) and takes k draft steps and one verify forward of width k + 1, whose cost is
measured by width and never assumed flat. Under a cap on power a round is stretched by a pause until its mean
power fits, so the fastest plan is then the one with the fewest dynamic joules per token.

`Planner` keeps the estimates: costs as moving averages, acceptance as decayed counts by drafter, kind of
proposal and position. It also keeps an account for each drafter, in plain steps: what it wins goes in, what
it loses comes out, and no draft may risk more than half of what is left. An empty account fills by one percent of the
time that passes, so that a wrong estimate costs little, and text that turns predictable is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any, NamedTuple, Protocol

from outrider.contracts import Costs, Energy, Limits, Objective, Plan
from outrider.errors import UsageError
from outrider.runtime.costs import PRIOR_DRAFT, CostEstimates, by_width
from outrider.runtime.evidence import PRIOR_ACCEPTANCE, Account, Evidence, Stint

__all__ = ["Acceptance", "Directive", "Observation", "Planner", "choose", "expected_tokens", "pace"]

LONGEST_PACE_S = 5.0  # a pause after a round; what would need more cannot be held by pacing


@dataclass(frozen=True)
class Acceptance:
    """Conditional acceptance by drafter: entry j is P(draft j accepted | it was drafted, those before accepted).

    `proposed` holds P(draft j is drafted | it was asked for, those before were drafted), for drafters that may
    stop short of k by themselves (absent: they never do). The last entry goes on.
    """

    conditional: Mapping[str, tuple[float, ...]]
    proposed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class Directive(Protocol):
    """What heat and power ask of a plan; `outrider.power.governor` makes them."""

    @property
    def objective(self) -> Objective:
        """What the plan is chosen for."""
        ...

    def limit(self, limits: Limits) -> Limits:
        """Narrow what the text allows to what the machine allows."""
        ...


def expected_tokens(conditional: tuple[float, ...], k: int) -> float:
    """Expected committed tokens of a round of k drafts: 1 + Σ Π a_j."""
    reach, total = 1.0, 1.0
    for position in range(k):
        reach *= conditional[min(position, len(conditional) - 1)]
        total += reach
    return total


class _Round(NamedTuple):
    """What a round of a plan is expected to be; `cost` is what the objective wants least of."""

    cost: float
    drafter: str | None
    k: int
    pace_s: float


class _Prices:
    """Seconds and joules of rounds under limits: one verify forward of each width, and its drafts."""

    def __init__(self, costs: Costs, objective: Objective, limits: Limits, k_max: int) -> None:
        self.costs, self.limits = costs, limits
        self.kind = objective.kind if costs.energy else "latency"
        rounds = by_width(costs.verify_s, limits.widths, k_max)
        self.times = [seconds + costs.overhead_s for seconds in rounds]
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

    def round(self, drafter: str | None, k: int, tokens: float, work_s: float, dynamic_j: float) -> _Round:
        """A round that is expected to commit so many tokens for so much work."""
        energy, pause_s = self.costs.energy, self.pause_s(work_s, dynamic_j)
        catch_up_s, catch_up_j = self._catch_up(drafter) if drafter else (0.0, 0.0)
        token_s = (work_s + pause_s) / tokens + catch_up_s
        token_j = dynamic_j / tokens + catch_up_j
        if energy:
            token_j += (energy.static_w * work_s + energy.pause_w * pause_s) / tokens
        cost = {"latency": token_s, "energy": token_j, "balanced": token_s * token_j}[self.kind]
        return _Round(cost, drafter, k, pause_s)

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

    def drafted(self, drafter: str, acceptance: Acceptance) -> Iterator[_Round]:
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


def choose(costs: Costs, acceptance: Acceptance, objective: Objective, limits: Limits) -> Plan:
    """The plan that serves `objective` best under `limits`; plain decoding when nothing beats it.

    Draftable are the drafters of `acceptance` that the limits allow. Raises UsageError without a measured
    verify time.
    """
    if not costs.verify_s:
        raise UsageError("no verify time is measured yet; run a plain round first")
    prices = _Prices(costs, objective, limits, _longest(acceptance, limits))
    plain = prices.round(None, 0, 1.0, *prices.fixed(None, 0))
    rounds = [
        drafted
        for name in acceptance.conditional
        if limits.drafters is None or name in limits.drafters
        for drafted in prices.drafted(name, acceptance)
    ]
    best = min(rounds, default=None)
    promise = plain.cost / best.cost if best else 0.0
    if best is None or (limits.plain_allowed and promise < objective.margin):
        reason = f"drafting promises {promise:.2f} x plain"
        return Plan(None, 0, "none", pace_s=plain.pace_s, reason=reason)
    return Plan(best.drafter, best.k, pace_s=best.pace_s, reason=f"{promise:.2f} x plain expected")


def _longest(acceptance: Acceptance, limits: Limits) -> int:
    """The largest k: what the cool machine would draft for speed, or a share of it, bounds a hot one."""
    if limits.reference is None:
        return limits.k_max
    cool = replace(limits, reference=None, power_w=None, duty=1.0)
    k = choose(limits.reference, acceptance, Objective(), cool).k
    return min(limits.k_max, ceil(limits.k_share * k))


def pace(plan: Plan, costs: Costs, limits: Limits) -> Plan:
    """The same plan with the pause that keeps it within the limits on power and work."""
    if not costs.verify_s or (limits.power_w is None and limits.duty >= 1.0):
        return plan
    prices = _Prices(costs, Objective(), limits, plan.k)
    return replace(plan, pace_s=prices.pause_s(*prices.fixed(plan.drafter, plan.k)))


@dataclass(frozen=True)
class Observation:
    """What a round did and took; `cut` rounds (stop token, limit) say nothing about acceptance.

    `width` is the compiled width that the verify ran at, `kind` that of the proposal, `backlog` the tokens
    that the drafter had to run before its first one.
    """

    plan: Plan
    drafted: int
    evaluated: int
    accepted: int
    tokens: int
    round_s: float
    draft_s: float
    verify_s: float
    width: int
    kind: str = ""
    backlog: int = 0
    cut: bool = False


class Planner:
    """Chooses a plan for every round from what the rounds so far have shown.

    `costs` is what `to_dict` returned earlier (a bundle may carry it); without it the first rounds run
    plain to measure. `k_max` bounds the draft length. `energy` may be set to what rounds cost in joules.
    """

    loss_share = 0.01  # of all time: what a drafter may lose in the long run

    def __init__(
        self, costs: Mapping[str, Any] | None = None, objective: Objective | None = None, k_max: int = 15
    ) -> None:
        self.objective = objective or Objective()
        self.k_max = k_max
        self.energy: Energy | None = None
        self._estimates = CostEstimates(costs or {})
        self._evidence: dict[tuple[str, str], Evidence] = {}
        self._accounts: dict[str, Account] = {}
        self._stints: dict[str, Stint] = {}
        self._widths: tuple[int, ...] | None = None

    @property
    def costs(self) -> Costs:
        """The current estimates."""
        return self._estimates.costs(self.energy)

    def to_dict(self) -> dict[str, Any]:
        """The measured costs, to start from next time (json-ready)."""
        return self._estimates.to_dict()

    def acceptance(self, kinds: Mapping[str, str]) -> Acceptance:
        """Estimates for drafters whose next proposals are of these kinds (`""` when unknown)."""
        evidence = {name: self._of(name, kind) for name, kind in kinds.items()}
        return Acceptance(
            {name: seen.conditional() for name, seen in evidence.items()},
            {name: seen.proposed() for name, seen in evidence.items()},
        )

    def begin(self, widths: tuple[int, ...] | None = None) -> None:
        """A new text on a target compiled for `widths` (None: any).

        Old acceptance counts less from here on, and earlier winnings cannot be lost on the new text.
        """
        self._widths = widths
        for evidence in self._evidence.values():
            evidence.fade(0.7)
        for account in self._accounts.values():
            account.interval = min(account.interval, 64)
            account.steps = min(account.steps, account.allowance)

    def plan(
        self,
        kinds: Mapping[str, str],
        k_max: int,
        backlogs: Mapping[str, int] | None = None,
        horizon: int = 128,
        directive: Directive | None = None,
    ) -> Plan:
        """The plan of the next round.

        `kinds` holds the drafters that can propose, with the kind of proposal; `backlogs` the tokens that
        each must run first; `horizon` how many tokens may still come; `directive` what heat and power ask.
        """
        limits = Limits(min(k_max, self.k_max), self._widths, horizon=min(horizon, 128))
        if directive is not None:
            limits = directive.limit(limits)
        if limits.drafters is not None:
            kinds = {name: kind for name, kind in kinds.items() if name in limits.drafters}
        plan = self._first(kinds, limits.k_max)
        if plan is not None:
            return pace(plan, self.costs, limits)
        catch_up_s = self._catch_ups(backlogs or {}, limits.horizon)
        limits = replace(limits, risk_s=self._risks(kinds), catch_up_s=catch_up_s)
        objective = directive.objective if directive is not None else self.objective
        plan = choose(self.costs, self.acceptance(kinds), objective, limits)
        return plan if plan.k else self._probe(plan, kinds, objective, limits)

    def paced(self, plan: Plan, directive: Directive) -> Plan:
        """A plan that was fixed by its user, with the pause that the directive asks for."""
        return pace(plan, self.costs, directive.limit(Limits(plan.k, self._widths)))

    def observe(self, seen: Observation) -> None:
        """Learn from a round of the last plan."""
        estimates = self._estimates
        estimates.learn_verify(seen.width, seen.verify_s, seen.round_s - seen.draft_s - seen.verify_s)
        name, plain_s = seen.plan.drafter, estimates.plain_s(self._widths)
        for other, account in self._accounts.items():
            account.idle_rounds += other != name
            account.heal(self.loss_share * seen.round_s / plain_s)
        if name is None:
            return
        steps = min(seen.plan.k, seen.drafted + 1)
        catch_up_s = estimates.learn_draft(name, steps, seen.draft_s, seen.backlog)
        account = self._account(name)
        account.idle_rounds = 0
        account.book(seen.tokens - (seen.round_s - catch_up_s) / plain_s)
        self._stint(name).add(seen.tokens, seen.backlog)
        if not seen.cut:
            self._of(name, seen.kind).add(seen.plan.k, seen.drafted, seen.evaluated, seen.accepted)

    def _first(self, kinds: Mapping[str, str], k_max: int) -> Plan | None:
        """The plan where there is no choice, or nothing measured to choose by."""
        if k_max < 1 or not kinds:
            return Plan(None, 0, "none", reason="no room" if k_max < 1 else "miss")
        if not self._estimates.verify_s:
            return Plan(None, 0, "none", reason="measuring a plain step")
        untried = next((name for name in kinds if name not in self._estimates.draft_s), None)
        return Plan(untried, 1, reason="measuring the drafter") if untried is not None else None

    def _probe(self, plain: Plan, kinds: Mapping[str, str], objective: Objective, limits: Limits) -> Plan:
        """Now and then, one drafted token where drafting does not promise to pay, if the account allows."""
        due = {
            name: kind
            for name, kind in kinds.items()
            if self._account(name).idle_rounds >= self._account(name).interval
            and limits.catch_up_s.get(name, 0.0) < limits.risk_s[name]
        }
        forced = replace(limits, k_max=1, plain_allowed=False, reference=None)
        probe = choose(self.costs, self.acceptance(due), objective, forced)
        if probe.drafter is None:
            return plain
        account = self._account(probe.drafter)
        account.interval = min(256, 2 * account.interval)
        return replace(probe, reason="probe")

    def _risks(self, kinds: Mapping[str, str]) -> dict[str, float]:
        """Seconds that one draft of each drafter may lose."""
        plain_s = self._estimates.plain_s(self._widths)
        return {name: Account.stake * self._account(name).steps * plain_s for name in kinds}

    def _catch_ups(self, backlogs: Mapping[str, int], horizon: int) -> dict[str, float]:
        """Seconds to catch up, as if all `horizon` tokens paid for it though only a stint of them will."""
        plain_s = self._estimates.plain_s(self._widths)
        token_s = self._estimates.catch_up_token_s
        return {
            name: n * token_s(name, plain_s) * max(1.0, horizon / self._stint(name).tokens)
            for name, n in backlogs.items()
            if n > 1
        }

    def _stint(self, name: str) -> Stint:
        return self._stints.setdefault(name, Stint())

    def _account(self, name: str) -> Account:
        return self._accounts.setdefault(name, Account())

    def _of(self, name: str, kind: str) -> Evidence:
        key = (name, kind)
        if key not in self._evidence:
            self._evidence[key] = Evidence(PRIOR_ACCEPTANCE.get(kind, 0.5))
        return self._evidence[key]
