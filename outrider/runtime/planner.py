"""How far to ride ahead: the one place that chooses drafter and draft length.

`choose` is pure: from measured costs and acceptance it takes the plan with the most expected committed
tokens per second, k = 0 (plain decoding) among them. With conditional acceptance a_j at draft position j,
a round of k drafts commits 1 + Σ_{i<=k} Π_{j<=i} a_j tokens (Leviathan et al., arXiv 2211.17192, section
3.1, without its assumption of one acceptance for all positions) and takes k draft steps and one verify
forward of width k + 1, whose cost is measured by width and never assumed flat.

`Planner` keeps the estimates: costs as moving averages, acceptance as decayed counts by drafter, kind of
proposal and position. It also keeps an account for each drafter, in plain steps: what it wins goes in, what
it loses comes out, and no draft may risk more than half of what is left. An empty account fills by one percent of the
time that passes, so that a wrong estimate costs little, and text that turns predictable is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

from outrider.contracts import Costs, Limits, Objective, Plan
from outrider.errors import UsageError

__all__ = [
    "Acceptance",
    "Observation",
    "Planner",
    "choose",
    "expected_tokens",
    "verify_time",
]

_PRIOR_SLOPE = 0.25  # a verify token more, as a share of a plain step, until widths are measured
_PRIOR_DRAFT = 0.25  # a draft step, as a share of a plain step, until it is measured
_CATCH_UP_SHARE = 0.2  # a token of a draft's catch-up, as a share of its draft step, until measured


@dataclass(frozen=True)
class Acceptance:
    """Conditional acceptance by drafter: entry j is P(draft j accepted | those before it were)."""

    conditional: Mapping[str, tuple[float, ...]]


def expected_tokens(conditional: tuple[float, ...], k: int) -> float:
    """Expected committed tokens of a round of k drafts: 1 + Σ Π a_j."""
    reach, total = 1.0, 1.0
    for position in range(k):
        reach *= conditional[min(position, len(conditional) - 1)]
        total += reach
    return total


def verify_time(verify_s: Mapping[int, float], width: int) -> float:
    """Seconds of a verify forward, between the measured widths and beyond them; never falls with width."""
    return _read(_monotone(verify_s), width)


def _read(curve: list[tuple[int, float]], width: int) -> float:
    """Interpolate a monotone curve; one point is continued with the prior slope."""
    if len(curve) == 1:
        ((known, seconds),) = curve
        base = seconds / (1.0 + _PRIOR_SLOPE * (known - 1))
        return base * (1.0 + _PRIOR_SLOPE * (width - 1))
    if width <= curve[0][0]:
        return curve[0][1]
    for (w0, t0), (w1, t1) in pairwise(curve):
        if width <= w1:
            return t0 + (t1 - t0) * (width - w0) / (w1 - w0)
    (w0, t0), (w1, t1) = curve[-2:]
    slope = max((t1 - t0) / (w1 - w0), (t1 - curve[0][1]) / (w1 - curve[0][0]))
    return t1 + slope * (width - w1)


def _monotone(measured: Mapping[int, float]) -> list[tuple[int, float]]:
    """The non-decreasing curve nearest to the measurements (pool adjacent violators)."""
    pools: list[tuple[list[int], float]] = []
    for width in sorted(measured):
        widths, seconds = [width], measured[width]
        while pools and pools[-1][1] > seconds:
            earlier, mean = pools.pop()
            seconds = (mean * len(earlier) + seconds * len(widths)) / (len(earlier) + len(widths))
            widths = earlier + widths
        pools.append((widths, seconds))
    return [(width, seconds) for widths, seconds in pools for width in widths]


def choose(costs: Costs, acceptance: Acceptance, objective: Objective, limits: Limits) -> Plan:
    """The plan with the highest expected rate under `limits`; plain decoding when nothing beats it.

    Draftable are the drafters of `acceptance`. Raises UsageError without a measured verify time.
    """
    if not costs.verify_s:
        raise UsageError("no verify time is measured yet; run a plain round first")
    curve = _monotone(costs.verify_s)
    times = [_read(curve, _snap(k + 1, limits.widths)) + costs.overhead_s for k in range(limits.k_max + 1)]
    rate, drafter, k = max(
        (
            _best(name, conditional, times, costs, limits)
            for name, conditional in acceptance.conditional.items()
        ),
        default=(0.0, "", 0),
    )
    promise = rate * times[0]
    if k == 0 or (limits.plain_allowed and promise < objective.margin):
        return Plan(None, 0, "none", reason=f"drafting promises {promise:.2f} x plain")
    return Plan(drafter, k, reason=f"{promise:.2f} x plain expected")


def _best(
    drafter: str, conditional: tuple[float, ...], times: list[float], costs: Costs, limits: Limits
) -> tuple[float, str, int]:
    """The best rate of one drafter, and its k; `times[k]` is a round without its draft. (0, name, 0): none."""
    step_s = costs.draft_s.get(drafter, _PRIOR_DRAFT * times[0])
    catch_up_s = limits.catch_up_s.get(drafter, 0.0) / max(limits.horizon, 1)  # a token
    most_s = times[0] + limits.risk_s.get(drafter, inf)
    best, best_k, reach, tokens = 0.0, 0, 1.0, 1.0
    for k in range(1, len(times)):
        round_s = k * step_s + times[k]
        if round_s > most_s:
            break
        reach *= conditional[min(k, len(conditional)) - 1]
        tokens += reach
        rate = tokens / (round_s + tokens * catch_up_s)
        if rate > best:
            best, best_k = rate, k
    return best, drafter, best_k


def _snap(width: int, widths: tuple[int, ...] | None) -> int:
    """The compiled width that a forward of `width` tokens runs at."""
    return width if widths is None else min((w for w in widths if w >= width), default=width)


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


_PRIOR_ACCEPTANCE = {"": 0.7, "1": 0.25, "2": 0.45, "3": 0.55, "4": 0.65, "8": 0.8, "16": 0.9, "32": 0.95}


class _Evidence:
    """Decayed counts of accepted and evaluated drafts by position, for one kind of proposal."""

    decay = 0.95
    weight = 3.0  # of the prior, in drafts

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.trials: list[float] = []
        self.hits: list[float] = []

    def conditional(self) -> tuple[float, ...]:
        """Acceptance by position; each position's prior is the estimate of the one before."""
        estimate, out = self.prior, []
        for hits, trials in zip(self.hits, self.trials, strict=True):
            estimate = (hits + self.weight * estimate) / (trials + self.weight)
            out.append(estimate)
        return (*out, estimate)

    def add(self, evaluated: int, accepted: int) -> None:
        missing = evaluated - len(self.trials)
        self.trials.extend([0.0] * missing)
        self.hits.extend([0.0] * missing)
        for position in range(evaluated):
            self.trials[position] = self.trials[position] * self.decay + 1.0
            self.hits[position] = self.hits[position] * self.decay + (position < accepted)

    def fade(self, share: float) -> None:
        self.trials = [count * share for count in self.trials]
        self.hits = [count * share for count in self.hits]


@dataclass
class _Account:
    """What a drafter may still lose, in plain steps, and when it may be probed again."""

    steps: float = 2.0
    idle_rounds: int = 0
    interval: int = 16

    allowance = 2.0  # to start a text with: three percent of 64 tokens
    stake = (
        0.5  # of the account: what one draft may lose, so that a first failure leaves room for shorter drafts
    )
    most = 10.0

    def book(self, won: float) -> None:
        """Add what a round won (or lost) against plain steps."""
        self.steps = min(self.steps + won, self.most)

    def heal(self, share: float) -> None:
        """Let a little of the time that passes refill an account that is low."""
        self.steps = max(self.steps, min(self.steps + share, self.allowance))


class Planner:
    """Chooses a plan for every round from what the rounds so far have shown.

    `costs` is what `to_dict` returned earlier (a bundle may carry it); without it the first rounds run
    plain to measure. `k_max` bounds the draft length.
    """

    loss_share = 0.01  # of all time: what a drafter may lose in the long run
    _alpha = 0.2
    _coupling = 0.7  # how far widths that were not run follow one that was

    def __init__(
        self, costs: Mapping[str, Any] | None = None, objective: Objective | None = None, k_max: int = 15
    ) -> None:
        stored = costs or {}
        self.objective = objective or Objective()
        self.k_max = k_max
        self._verify_s = {int(width): float(s) for width, s in stored.get("verify_s", {}).items()}
        self._draft_s = {str(name): float(s) for name, s in stored.get("draft_s", {}).items()}
        self._catch_up_s = {str(name): float(s) for name, s in stored.get("catch_up_s", {}).items()}
        self._overhead_s = float(stored.get("overhead_s", 0.0))
        self._measured_at: dict[int, int] = {}
        self._evidence: dict[tuple[str, str], _Evidence] = {}
        self._accounts: dict[str, _Account] = {}
        self._rounds = 0
        self._widths: tuple[int, ...] | None = None

    @property
    def costs(self) -> Costs:
        """The current estimates."""
        return Costs(dict(self._verify_s), dict(self._draft_s), self._overhead_s)

    def to_dict(self) -> dict[str, Any]:
        """The measured costs, to start from next time (json-ready)."""
        return {
            "verify_s": {str(width): s for width, s in sorted(self._verify_s.items())},
            "draft_s": dict(self._draft_s),
            "catch_up_s": dict(self._catch_up_s),
            "overhead_s": self._overhead_s,
        }

    def acceptance(self, kinds: Mapping[str, str]) -> Acceptance:
        """Estimates for drafters whose next proposals are of these kinds (`""` when unknown)."""
        return Acceptance({name: self._of(name, kind).conditional() for name, kind in kinds.items()})

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
    ) -> Plan:
        """The plan of the next round.

        `kinds` holds the drafters that can propose, with the kind of proposal; `backlogs` the tokens that
        each must run first; `horizon` how many tokens may still come.
        """
        k_max = min(k_max, self.k_max)
        if k_max < 1 or not kinds:
            return Plan(None, 0, "none", reason="no room" if k_max < 1 else "miss")
        if not self._verify_s:
            return Plan(None, 0, "none", reason="measuring a plain step")
        untried = next((name for name in kinds if name not in self._draft_s), None)
        if untried is not None:
            return Plan(untried, 1, reason="measuring the drafter")
        plain_s = self._plain_s()
        risk_s = {name: _Account.stake * self._account(name).steps * plain_s for name in kinds}
        catch_up_s = {name: n * self._catch_up_token_s(name) for name, n in (backlogs or {}).items() if n > 1}
        limits = Limits(k_max, self._widths, catch_up_s, min(horizon, 128), risk_s)
        plan = choose(self.costs, self.acceptance(kinds), self.objective, limits)
        return plan if plan.k else self._probe(plan, kinds, limits)

    def observe(self, seen: Observation) -> None:
        """Learn from a round of the last plan."""
        self._rounds += 1
        self._learn_verify(seen.width, seen.verify_s)
        self._overhead_s = self._ema(self._overhead_s, seen.round_s - seen.draft_s - seen.verify_s)
        name, plain_s = seen.plan.drafter, self._plain_s()
        for other, account in self._accounts.items():
            account.idle_rounds += other != name
            account.heal(self.loss_share * seen.round_s / plain_s)
        if name is None:
            return
        catch_up_s = self._learn_draft(name, seen)
        account = self._account(name)
        account.idle_rounds = 0
        account.book(seen.tokens - (seen.round_s - catch_up_s) / plain_s)
        if seen.evaluated and not seen.cut:
            self._of(name, seen.kind).add(seen.evaluated, seen.accepted)

    def _probe(self, plain: Plan, kinds: Mapping[str, str], limits: Limits) -> Plan:
        """Now and then, one drafted token where drafting does not promise to pay, if the account allows."""
        due = {
            name: kind
            for name, kind in kinds.items()
            if self._account(name).idle_rounds >= self._account(name).interval
            and limits.catch_up_s.get(name, 0.0) < limits.risk_s[name]
        }
        forced = replace(limits, k_max=1, plain_allowed=False)
        probe = choose(self.costs, self.acceptance(due), self.objective, forced)
        if probe.drafter is None:
            return plain
        account = self._account(probe.drafter)
        account.interval = min(256, 2 * account.interval)
        return replace(probe, reason="probe")

    def _plain_s(self) -> float:
        return verify_time(self._verify_s, _snap(1, self._widths)) + self._overhead_s

    def _account(self, name: str) -> _Account:
        return self._accounts.setdefault(name, _Account())

    def _of(self, name: str, kind: str) -> _Evidence:
        key = (name, kind)
        if key not in self._evidence:
            self._evidence[key] = _Evidence(_PRIOR_ACCEPTANCE.get(kind, 0.5))
        return self._evidence[key]

    def _catch_up_token_s(self, name: str) -> float:
        step_s = self._draft_s.get(name, _PRIOR_DRAFT * self._plain_s())
        return self._catch_up_s.get(name, _CATCH_UP_SHARE * step_s)

    def _learn_verify(self, width: int, seconds: float) -> None:
        """Move the estimate of a width, and the others with it, the more the longer they were not run.

        So heat, a longer context or a busy machine, seen at one width, reach them all.
        """
        known = self._verify_s.setdefault(width, seconds)
        self._measured_at[width] = self._rounds
        step = self._alpha * (min(max(seconds / known, 0.5), 2.0) - 1.0)
        for other in self._verify_s:
            age = self._rounds - self._measured_at.get(other, 0)
            share = 1.0 if other == width else self._coupling * age / (age + 2)
            self._verify_s[other] *= 1.0 + share * step

    def _learn_draft(self, name: str, seen: Observation) -> float:
        """Learn the draft step, or the catch-up of a drafter that was far behind; returns its seconds."""
        steps = max(seen.drafted, 1)
        if seen.backlog <= 8:
            self._draft_s[name] = self._ema(self._draft_s.get(name, 0.0), seen.draft_s / steps)
            return 0.0
        catch_up_s = max(0.0, seen.draft_s - steps * self._draft_s.get(name, 0.0))
        self._catch_up_s[name] = self._ema(self._catch_up_s.get(name, 0.0), catch_up_s / seen.backlog)
        return catch_up_s

    def _ema(self, known: float, seconds: float) -> float:
        """Moving average that a single outlier moves little; the first value is taken as it is."""
        seconds = max(seconds, 0.0)
        if known <= 0.0:
            return seconds
        return known + self._alpha * (min(max(seconds, 0.5 * known), 2.0 * known) - known)
