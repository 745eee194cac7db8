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
time that passes, so that a wrong estimate costs little, and text that turns predictable is noticed. All of them
together may at no time have lost more than three percent of a text, which may end at any token (a machine that hangs,
or a library that loads in such a round, is not held against its draft); and what a draft model must read first is to
be paid back by a quarter of the tokens that the text already has, unless earlier texts say that more will come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any, Literal, NamedTuple, Protocol

from outrider.contracts import Costs, Energy, Limits, Objective, Plan
from outrider.errors import UsageError
from outrider.runtime.costs import FIRST_PIECE, NO_MORE, PRIOR_DRAFT, PRIOR_SLOPE, CostEstimates, verify_time
from outrider.runtime.evidence import (
    Account,
    Evidence,
    Guesses,
    Observation,
    Stint,
    Text,
    Trial,
    prior,
    promises,
)
from outrider.runtime.prices import LONGEST_PACE_S, Acceptance, PlannedRound, Prices, expected_tokens

__all__ = [
    "LONGEST_PACE_S",
    "Acceptance",
    "Directive",
    "Modes",
    "Observation",
    "Planner",
    "choose",
    "expected_tokens",
    "pace",
]


class Modes(NamedTuple):
    """How rounds may draft: the drafters that may do so beside a verify forward, and whether before it is allowed.

    `piecewise` are those that catch up piece by piece: until the first piece is measured, no more is at stake.
    `correcting` are those that can draft behind a correction, beside a verify.
    """

    overlap: frozenset[str] = frozenset()
    serial: bool = True
    piecewise: frozenset[str] = frozenset()
    correcting: frozenset[str] = frozenset()


SERIAL = Modes()


class _Asked(NamedTuple):
    """What a plan was chosen by."""

    costs: Costs
    acceptance: Acceptance
    objective: Objective
    limits: Limits


class Directive(Protocol):
    """What heat and power ask of a plan; `outrider.power.governor` makes them."""

    @property
    def objective(self) -> Objective:
        """What the plan is chosen for."""
        ...

    def limit(self, limits: Limits) -> Limits:
        """Narrow what the text allows to what the machine allows."""
        ...


def choose(costs: Costs, acceptance: Acceptance, objective: Objective, limits: Limits) -> Plan:
    """The plan that serves `objective` best under `limits`; plain decoding when nothing beats it.

    Draftable are the drafters of `acceptance` that the limits allow. Raises UsageError without a measured
    verify time.
    """
    if not costs.verify_s:
        raise UsageError("no verify time is measured yet; run a plain round first")
    prices = Prices(costs, objective, limits, _longest(acceptance, limits))
    plain = prices.round(None, 0, 1.0, *prices.fixed(None, 0))
    best = _best(prices, acceptance, objective, limits)
    promise = plain.cost / best.cost if best else 0.0
    if best is None or (limits.plain_allowed and promise < objective.margin):
        reason = f"drafting promises {promise:.2f} x plain"
        return Plan(None, 0, "none", pace_s=plain.pace_s, reason=reason)
    mode: Literal["serial", "overlapped"] = "overlapped" if best.overlapped else "serial"
    reason = f"{promise:.2f} x plain expected"
    return Plan(best.drafter, best.k, mode, pace_s=best.pace_s, reason=reason, beside_s=best.beside_s)


def _best(
    prices: Prices, acceptance: Acceptance, objective: Objective, limits: Limits
) -> PlannedRound | None:
    """The best round that drafts; one that overlaps must promise its margin over the best that does not."""
    names = [name for name in acceptance.conditional if limits.drafters is None or name in limits.drafters]
    serial = [r for name in names if limits.serial_allowed for r in prices.drafted(name, acceptance)]
    beside = [r for name in names if name in limits.overlap for r in prices.overlapped(name, acceptance)]
    one, two = (min((r for r in rounds if r.k >= limits.k_min), default=None) for rounds in (serial, beside))
    if one is None or two is None:
        return one or two
    return two if two.cost * objective.margin <= one.cost else one


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
    prices = Prices(costs, Objective(), limits, plan.k)
    return replace(plan, pace_s=prices.pause_s(*prices.fixed(plan.drafter, plan.k)))


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
        self._beside = CostEstimates((costs or {}).get("overlapped", {}))  # of what ran beside each other
        self._guesses: dict[str, Guesses] = {}
        self._corrections: dict[str, Guesses] = {}
        self._trials: dict[str, Trial] = {}
        self._evidence: dict[tuple[str, str], Evidence] = {}
        self._accounts: dict[str, Account] = {}
        self._stints: dict[str, Stint] = {}
        self._text = Text()
        self._widths: tuple[int, ...] | None = None
        self._asked: _Asked | None = None
        self._priced: dict[str, int] = {}  # steps of drafters that ran for their price alone

    @property
    def costs(self) -> Costs:
        """The current estimates."""
        known = bool(self._beside.verify_s)
        beside = self._beside.costs() if known else None
        return replace(self._estimates.costs(self.energy), overlapped=beside)

    def to_dict(self) -> dict[str, Any]:
        """The measured costs, to start from next time (json-ready)."""
        beside = {"overlapped": self._beside.to_dict()} if self._beside.verify_s else {}
        return {**self._estimates.to_dict(), **beside}

    def acceptance(self, kinds: Mapping[str, str], correcting: frozenset[str] = frozenset()) -> Acceptance:
        """Estimates for drafters whose next proposals are of these kinds (`""` when unknown)."""
        evidence = {name: self._of(name, kind) for name, kind in kinds.items()}
        return Acceptance(
            {name: seen.conditional() for name, seen in evidence.items()},
            {name: seen.proposed() for name, seen in evidence.items()},
            {name: self._guesses[name].share for name in kinds if name in self._guesses},
            {name: self._correction(name).share for name in kinds if name in correcting},
        )

    def begin(self, widths: tuple[int, ...] | None = None) -> None:
        """A new text on a target compiled for `widths` (None: any).

        Old acceptance counts less from here on, and of earlier winnings at most a plain step can be lost on the new
        text.
        """
        self._widths = widths
        self._text.begin()
        for evidence in self._evidence.values():
            evidence.fade(0.7)
        for account in self._accounts.values():
            account.interval = min(account.interval, 64)
            account.steps = min(account.steps, account.allowance)
        for guesses in (*self._guesses.values(), *self._corrections.values()):
            guesses.fade(0.7)
        for trial in self._trials.values():
            trial.interval = min(trial.interval, 64)

    def plan(
        self,
        kinds: Mapping[str, str],
        k_max: int,
        backlogs: Mapping[str, int] | None = None,
        horizon: int = 128,
        directive: Directive | None = None,
        modes: Modes = SERIAL,
    ) -> Plan:
        """The plan of the next round.

        `kinds` holds the drafters that can propose, with the kind of proposal; `backlogs` the tokens that
        each must run first; `horizon` how many tokens may still come; `directive` what heat and power ask.
        """
        limits = Limits(
            min(k_max, self.k_max),
            self._widths,
            horizon=min(horizon, 128, self._text.to_come),
            overlap=modes.overlap,
            serial_allowed=modes.serial,
        )
        if directive is not None:
            limits = directive.limit(limits)
        allowed = kinds if limits.drafters is None else limits.drafters
        backlogs = backlogs or {}
        kinds = {
            name: kind
            for name, kind in kinds.items()
            if name in allowed and self._is_ready(name, kind, backlogs.get(name, 0), modes)
        }
        plan = self._first(kinds, limits.k_max)
        if plan is not None:
            return pace(plan, self.costs, limits)
        at_stake = {name: self._at_stake(name, n, modes) for name, n in backlogs.items()}
        catch_up_s = self._catch_ups(at_stake, limits.horizon)
        limits = replace(limits, risk_s=self._risks(kinds), catch_up_s=catch_up_s)
        objective = directive.objective if directive is not None else self.objective
        self._asked = _Asked(self.costs, self.acceptance(kinds, modes.correcting), objective, limits)
        plan = choose(*self._asked)
        hopeful = self._may_measure and any(promises(kind) for kind in kinds.values())
        if not plan.k and hopeful and len(self._estimates.verify_s) == 1:
            plan = self._first_draft(plan, self._asked)
        if not plan.k:
            return self._probe(plan, kinds, objective, limits)
        return self._try_overlap(plan, kinds, objective, limits)

    def with_mode(
        self, plan: Plan, kinds: Mapping[str, str], directive: Directive | None = None, modes: Modes = SERIAL
    ) -> Plan:
        """A plan whose drafter and k its user fixed, in the mode that serves it best."""
        if plan.drafter not in modes.overlap:
            return plan
        limits = Limits(plan.k, self._widths, plain_allowed=False, overlap=modes.overlap, k_min=plan.k)
        limits = replace(limits, serial_allowed=modes.serial)
        if directive is not None:
            k_max, limits = limits.k_max, directive.limit(limits)
            limits = replace(limits, k_max=k_max, reference=None)
        name = plan.drafter
        if name is None or name not in limits.overlap:
            return plan
        if not limits.serial_allowed:
            return replace(plan, mode="overlapped", beside_s=self._left_to_correct(plan, modes))
        if not self._estimates.verify_s or name not in self._estimates.draft_s:
            return plan
        kinds = {name: kinds.get(name, "")}
        objective = directive.objective if directive is not None else self.objective
        best = choose(self.costs, self.acceptance(kinds, modes.correcting), objective, limits)
        best = self._try_overlap(best, kinds, objective, limits)
        return replace(plan, mode=best.mode, beside_s=best.beside_s)

    def _left_to_correct(self, plan: Plan, modes: Modes) -> float:
        """How long the verify of an overlapped plan will take, where its draft may use what is left of that."""
        if plan.drafter not in modes.correcting or not self._estimates.verify_s:
            return 0.0
        return Prices(self.costs, self.objective, Limits(plan.k, self._widths), plan.k).beside_s[plan.k]

    def wants_price(self, name: str, alone: bool = True) -> bool:
        """Whether a draft step of this drafter, without a draft, is what is missing to choose by; twice at most.

        Where it is not `alone`, what a first draft of the others may lose is left to them: they take no reading.
        """
        known_s = self._estimates.draft_s.get(name)
        if not self._estimates.verify_s or not (known_s is None or self._priced.get(name) == 1):
            return False
        price = PRIOR_DRAFT if known_s is None else self._price(known_s)
        return price + (0.0 if alone else PRIOR_SLOPE) <= self._text.purse

    def price_step(self, name: str, seconds: float) -> None:
        """Learn what a draft step takes, without a draft: the lesser of two, since a first forward may load weights."""
        self._text.won -= self._price(seconds)
        times = self._priced[name] = self._priced.get(name, 0) + 1
        known_s = self._estimates.draft_s.get(name, seconds)
        self._estimates.draft_s[name] = min(seconds, known_s) if times > 1 else seconds

    def _price(self, seconds: float) -> float:
        """What such a step took, in plain steps: at most one, since more is for what it loads, or no draft at all."""
        return min(seconds / self._estimates.plain_s(self._widths), 1.0)

    def knows_catch_up(self, name: str) -> bool:
        """Whether it was measured what a token takes that this drafter has not seen."""
        return name in self._estimates.catch_up_s

    def saw_catch_up(self, name: str, tokens: int, seconds: float, backlog: int) -> None:
        """Learn from a piece of a catch-up, of which `backlog` tokens were left before it.

        What it took beyond a draft step is for its tokens: a step reads all weights, and so does a piece of any size.
        """
        self._estimates.learn_catch_up(name, tokens, seconds - self._estimates.draft_s.get(name, 0.0))
        if self._estimates.verify_s:
            self._text.read += seconds / self._estimates.plain_s(self._widths)
        self._stint(name).add(0, backlog)

    def pays_on(self, name: str, backlog: int) -> bool:
        """Whether the last `plan` would still be made, now that the price of so many more tokens is known."""
        if self._asked is None:
            return True
        limits = self._asked.limits
        catch_up_s = self._catch_ups({name: backlog}, limits.horizon)
        if catch_up_s.get(name, 0.0) < limits.risk_s.get(name, 0.0):
            return True
        limits = replace(limits, catch_up_s={**limits.catch_up_s, **catch_up_s})
        return choose(*self._asked._replace(limits=limits)).drafter == name

    def paced(self, plan: Plan, directive: Directive) -> Plan:
        """A plan that was fixed by its user, with the pause that the directive asks for."""
        return pace(plan, self.costs, directive.limit(Limits(plan.k, self._widths)))

    def observe(self, seen: Observation) -> None:
        """Learn from a round of the last plan."""
        estimates, rest_s = self._estimates, seen.round_s - seen.draft_s - seen.verify_s
        ran, idle = (self._beside, estimates) if seen.beside else (estimates, self._beside)
        step = ran.learn_verify(seen.width, seen.verify_s, rest_s)
        if estimates.verify_s:
            idle.follow(step)
        else:  # all rounds so far overlapped: the best guess of a forward that has the machine to itself
            estimates.learn_verify(seen.width, seen.verify_s, rest_s)
        name, plain_s = seen.plan.drafter, estimates.plain_s(self._widths)
        self._text.tokens += seen.tokens
        for other, account in self._accounts.items():
            account.idle_rounds += other != name
            account.heal(self.loss_share * seen.round_s / plain_s)
        if name is None:
            return
        catch_up_s = self._learn_draft(name, seen)
        account = self._account(name)
        account.idle_rounds = 0
        won = seen.tokens - min(seen.round_s - catch_up_s, self._credible_s(name, seen)) / plain_s
        account.book(won)
        self._text.won += won
        self._trial(name).saw(seen.plan.mode == "overlapped")
        self._stint(name).add(seen.tokens, seen.backlog)
        if not seen.cut:
            self._of(name, seen.kind).add(seen.plan.k, seen.drafted, seen.evaluated, seen.accepted)

    def _credible_s(self, name: str, seen: Observation) -> float:
        """The longest that a round can have taken for its drafts' sake: a machine may hang, or load something."""
        estimates = self._estimates
        steps_s = seen.plan.k * estimates.draft_s.get(name, 0.0)
        expected_s = steps_s + verify_time(estimates.verify_s, seen.width) + estimates.overhead_s
        return expected_s if estimates.is_new(seen.width) or estimates.is_new(name) else 2.0 * expected_s

    def _learn_draft(self, name: str, seen: Observation) -> float:
        """Learn what draft steps took, alone and beside a verify; returns seconds that were spent to catch up."""
        if seen.ahead_steps:
            self._beside.learn_draft(name, seen.ahead_steps, seen.ahead_s, 0)
        if seen.guess is not None:
            self._guesses.setdefault(name, Guesses()).add(seen.guess)
        for corrected in range(seen.corrections):
            self._correction(name).add(corrected < seen.corrected)
        if seen.ready:
            return 0.0
        self._priced.pop(name, None)
        steps = min(seen.plan.k, seen.drafted + 1)
        return self._estimates.learn_draft(name, steps, seen.draft_s, seen.backlog)

    @property
    def _may_measure(self) -> bool:
        """Whether the text can bear a draft of which it is not known what it costs."""
        return not self._estimates.verify_s or self._text.purse >= PRIOR_SLOPE

    def _is_ready(self, name: str, kind: str, backlog: int, modes: Modes) -> bool:
        """Whether it is known what a step of this drafter takes, or may be measured by its first draft."""
        if name in self._estimates.draft_s:
            return True
        awaits_price = name in modes.piecewise and backlog > NO_MORE and bool(self._estimates.verify_s)
        return self._may_measure and promises(kind) and not awaits_price

    def _first(self, kinds: Mapping[str, str], k_max: int) -> Plan | None:
        """The plan where there is no choice, or nothing measured to choose by."""
        if k_max < 1 or not kinds:
            return Plan(None, 0, "none", reason="no room" if k_max < 1 else "miss")
        if not self._estimates.verify_s:
            return Plan(None, 0, "none", reason="measuring a plain step")
        untried = next((name for name in kinds if name not in self._estimates.draft_s), None)
        return Plan(untried, 1, reason="measuring the drafter") if untried is not None else None

    def _first_draft(self, plain: Plan, asked: _Asked) -> Plan:
        """One drafted token where only a wider verify, of which nothing is known yet, speaks against drafting."""
        ((width, seconds),) = asked.costs.verify_s.items()
        flat = replace(asked.costs, verify_s={width: seconds, width + 1: seconds})
        self._asked = asked._replace(
            costs=flat, limits=replace(asked.limits, k_max=min(1, asked.limits.k_max))
        )
        hoped = choose(*self._asked)
        return replace(hoped, reason="measuring the drafter") if hoped.k else plain

    def _probe(self, plain: Plan, kinds: Mapping[str, str], objective: Objective, limits: Limits) -> Plan:
        """Now and then, one drafted token where drafting does not promise to pay, if the account allows."""
        due = {
            name: kind
            for name, kind in kinds.items()
            if promises(kind)
            and self._account(name).idle_rounds >= self._account(name).interval
            and limits.catch_up_s.get(name, 0.0) < limits.risk_s[name]
        }
        forced = replace(limits, k_max=1, plain_allowed=False, reference=None)
        probe = choose(self.costs, self.acceptance(due), objective, forced)
        if probe.drafter is None:
            return plain
        account = self._account(probe.drafter)
        account.interval = min(256, 2 * account.interval)
        return replace(probe, reason="probe")

    def _try_overlap(
        self, plan: Plan, kinds: Mapping[str, str], objective: Objective, limits: Limits
    ) -> Plan:
        """Now and then, a few overlapped rounds where measured costs speak against them, and those alone do."""
        if plan.mode != "serial" or plan.drafter not in limits.overlap or not self._beside.verify_s:
            return plan
        trial = self._trial(plan.drafter)
        if not trial.due:
            return plan
        alone = replace(self.costs, overlapped=None)
        hoped = choose(alone, self.acceptance({plan.drafter: kinds[plan.drafter]}), objective, limits)
        if hoped.mode != "overlapped":
            return plan
        trial.begin()
        return replace(hoped, reason="probe of overlap")

    def _risks(self, kinds: Mapping[str, str]) -> dict[str, float]:
        """Seconds that one draft of each drafter may lose."""
        plain_s, purse = self._estimates.plain_s(self._widths), self._text.purse
        return {name: min(Account.stake * self._account(name).steps, purse) * plain_s for name in kinds}

    def _at_stake(self, name: str, backlog: int, modes: Modes) -> int:
        """Tokens that a drafter must run before it is known what they take: a first piece, if the purse has that."""
        if name not in modes.piecewise or self.knows_catch_up(name):
            return backlog
        plain_s = self._estimates.plain_s(self._widths)
        piece_s = FIRST_PIECE * self._estimates.catch_up_token_s(name, plain_s)
        return min(backlog, FIRST_PIECE) if piece_s <= self._text.purse * plain_s else backlog

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

    def _correction(self, name: str) -> Guesses:
        return self._corrections.setdefault(name, Guesses(0.3, 3.0))

    def _trial(self, name: str) -> Trial:
        return self._trials.setdefault(name, Trial())

    def _account(self, name: str) -> Account:
        return self._accounts.setdefault(name, Account())

    def _of(self, name: str, kind: str) -> Evidence:
        key = (name, kind)
        if key not in self._evidence:
            self._evidence[key] = Evidence(prior(kind))
        return self._evidence[key]
