"""What the planner believes of a drafter: how often it is right, and how much it may still lose."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.runtime.costs import FAR_BEHIND

__all__ = ["PRIOR_ACCEPTANCE", "Account", "Evidence", "Stint"]

PRIOR_ACCEPTANCE = {"": 0.7, "1": 0.25, "2": 0.45, "3": 0.55, "4": 0.65, "8": 0.8, "16": 0.9, "32": 0.95}


class _Shares:
    """Decayed counts of hits among trials by draft position; each position's prior is the one before it."""

    decay = 0.95
    weight = 3.0  # of the prior, in drafts

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.trials: list[float] = []
        self.hits: list[float] = []

    def shares(self) -> tuple[float, ...]:
        estimate, out = self.prior, []
        for hits, trials in zip(self.hits, self.trials, strict=True):
            estimate = (hits + self.weight * estimate) / (trials + self.weight)
            out.append(estimate)
        return (*out, estimate)

    def add(self, trials: int, hits: int) -> None:
        """Count a draft: its first `trials` positions were tried, the first `hits` of them hit."""
        missing = trials - len(self.trials)
        self.trials.extend([0.0] * missing)
        self.hits.extend([0.0] * missing)
        for position in range(trials):
            self.trials[position] = self.trials[position] * self.decay + 1.0
            self.hits[position] = self.hits[position] * self.decay + (position < hits)

    def fade(self, share: float) -> None:
        self.trials = [count * share for count in self.trials]
        self.hits = [count * share for count in self.hits]


class Evidence:
    """What one kind of proposal has shown: how many of the tokens asked for came, and how many were right."""

    def __init__(self, prior: float) -> None:
        self._right = _Shares(prior)
        self._came = _Shares(1.0)

    def conditional(self) -> tuple[float, ...]:
        """Acceptance by position, of what was drafted and evaluated."""
        return self._right.shares()

    def proposed(self) -> tuple[float, ...]:
        """The chance by position that a token that is asked for is drafted."""
        return self._came.shares()

    def add(self, asked: int, drafted: int, evaluated: int, accepted: int) -> None:
        """Count a round: drafts after the first rejection were never evaluated."""
        self._came.add(min(asked, drafted + 1), drafted)
        self._right.add(evaluated, accepted)

    def fade(self, share: float) -> None:
        """Let what was seen count less."""
        self._right.fade(share)
        self._came.fade(share)


@dataclass
class Stint:
    """How many tokens a drafter is good for between two catch-ups, which must pay for them."""

    tokens: float = 128.0
    _now: float = 0.0

    def add(self, committed: int, backlog: int) -> None:
        """Count a round; one that began far behind ends the stint before it."""
        if backlog > FAR_BEHIND and self._now:
            self.tokens += 0.3 * (self._now - self.tokens)
            self._now = 0.0
        self._now += committed


@dataclass
class Account:
    """What a drafter may still lose, in plain steps, and when it may be probed again."""

    steps: float = 2.0
    idle_rounds: int = 0
    interval: int = 16

    allowance = 2.0  # to start a text with: three percent of 64 tokens
    stake = 0.5  # of it may be lost by one draft, so that a first failure leaves room for shorter ones
    most = 10.0

    def book(self, won: float) -> None:
        """Add what a round won (or lost) against plain steps."""
        self.steps = min(self.steps + won, self.most)

    def heal(self, share: float) -> None:
        """Let a little of the time that passes refill an account that is low."""
        self.steps = max(self.steps, min(self.steps + share, self.allowance))
