"""What the planner believes of a drafter: how often it is right, and how much it may still lose."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outrider.contracts import Plan
from outrider.runtime.costs import FAR_BEHIND, PRIOR_SLOPE

__all__ = [
    "PRIOR_ACCEPTANCE",
    "Account",
    "Evidence",
    "Guesses",
    "Observation",
    "Stint",
    "Text",
    "Trial",
    "prior",
    "promises",
]

PRIOR_ACCEPTANCE = {"": 0.7, "0": 0.1, "1": 0.2, "2": 0.45, "3": 0.55, "4": 0.65, "8": 0.8}
PRIOR_ACCEPTANCE |= {"16": 0.9, "32": 0.95}


def prior(kind: str) -> float:
    """The acceptance that is expected of a kind of proposal that was not seen yet."""
    return PRIOR_ACCEPTANCE.get(kind, 0.5)


def promises(kind: str) -> bool:
    """Whether a proposal of this kind may be drafted without measured costs that say so, or for a trial."""
    return prior(kind) > PRIOR_SLOPE


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


@dataclass(frozen=True)
class Observation:
    """What a round did and took; `cut` rounds (stop token, limit) say nothing about acceptance.

    `width` is the compiled width that the verify ran at, `kind` that of the proposal, `backlog` the tokens
    that the drafter had to run before its first one.

    `ready`: the draft was made beside the last verify, so `draft_s` was a wait for it. `beside`: the next one was
    begun beside this one's; `guess` says whether its first token came true (None: untested). `ahead_steps` draft
    steps that ran beside a verify ended in this round, after `ahead_s`. Of `corrections` that were
    drafted behind and put to the test by now, `corrected` came true.
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
    ready: bool = False
    beside: bool = False
    guess: bool | None = None
    ahead_steps: int = 0
    ahead_s: float = 0.0
    corrections: int = 0
    corrected: int = 0


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
class Text:
    """The text that is being written: how long it is and may get, and what drafts may still lose on it.

    It may end at any token, so what drafts have lost is at no time more than `share` of it: their stakes grow with it.
    Where a drafter has read the text for it, they may lose as much again as that took, up to `most`: it is for nothing
    if the first bad drafts end it. What they won on the text before, up to `credit`, may be lost too: else a drafter
    that pays would sit out the first tokens of every text.
    """

    tokens: int = 1
    won: float = 0.0  # by drafts, in plain steps
    read: float = 0.0  # what drafters took to read it, in plain steps
    _earlier: deque[int] = field(default_factory=lambda: deque(maxlen=8))

    share = 0.03
    most = 1.0
    credit = 1.0
    shortest = 12  # tokens that any text is thought to get

    @property
    def to_come(self) -> int:
        """Tokens that may pay for a catch-up: a quarter as many again, or what the last longer ones all still got."""
        still = [tokens - self.tokens for tokens in self._earlier if tokens > self.tokens]
        return max(self.shortest, self.tokens // 4, min(still, default=0))

    @property
    def purse(self) -> float:
        """What one more draft may lose, in plain steps; below 0 where drafts took longer than was thought."""
        return self.share * max(self.tokens, self.shortest) + self.won + min(self.read, self.most)

    def begin(self) -> None:
        """Another text."""
        if self.tokens > 1:
            self._earlier.append(self.tokens)
        self.tokens, self.won, self.read = 1, min(max(self.won, 0.0), self.credit), 0.0


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


@dataclass
class Guesses:
    """How often the token after a draft that was accepted whole is guessed rightly: decayed counts, with a prior."""

    held: float = 2.1
    made: float = 3.0

    decay = 0.95

    @property
    def share(self) -> float:
        """The estimate."""
        return self.held / self.made

    def add(self, held: bool) -> None:
        """Count a guess that was put to the test."""
        self.held = self.held * self.decay + held
        self.made = self.made * self.decay + 1.0

    def fade(self, weight: float) -> None:
        """Let what was seen count less."""
        self.held, self.made = self.held * weight, self.made * weight


@dataclass
class Trial:
    """When a drafter that drafts before the verify is tried beside it again: a few rounds, ever more seldom."""

    idle_rounds: int = 0
    interval: int = 16
    left: int = 0  # rounds of the trial that runs

    rounds = 4

    @property
    def due(self) -> bool:
        """Whether the next round may be one of a trial."""
        return self.left > 0 or self.idle_rounds >= self.interval

    def begin(self) -> None:
        """Take the next round for a trial."""
        if self.left <= 0:
            self.left, self.interval = self.rounds, min(256, 2 * self.interval)

    def saw(self, overlapped: bool) -> None:
        """Count a round."""
        self.left = max(0, self.left - 1)
        self.idle_rounds = 0 if overlapped else self.idle_rounds + 1
