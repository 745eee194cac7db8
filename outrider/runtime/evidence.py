"""What the planner believes of a drafter: how often it is right, and how much it may still lose."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRIOR_ACCEPTANCE", "Account", "Evidence"]

PRIOR_ACCEPTANCE = {"": 0.7, "1": 0.25, "2": 0.45, "3": 0.55, "4": 0.65, "8": 0.8, "16": 0.9, "32": 0.95}


class Evidence:
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
class Account:
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
