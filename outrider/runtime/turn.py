"""One generation, and one of its rounds as it comes about: what the engine and its helpers tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from outrider.contracts import Plan, Proposal
from outrider.power.governor import Directive
from outrider.runtime.catch_up import Caught
from outrider.runtime.context import Context
from outrider.runtime.costs import FAR_BEHIND
from outrider.runtime.judge import Judge
from outrider.runtime.overlap import Worked
from outrider.runtime.request import Request
from outrider.runtime.stats import Stats
from outrider.runtime.trace import TraceWriter
from outrider.runtime.verify import Decision

__all__ = ["NO_DRAFT", "Run", "Turn"]

_NO_TOKENS = np.empty(0, np.int64)

NO_DRAFT = Proposal(_NO_TOKENS, _NO_TOKENS)
_NO_PLAN = Plan(None, 0, "none")
_NOT_JUDGED = Decision((), (), 0, (), False)
_NO_WORK = Worked()


@dataclass
class Run:
    """The state of one generation."""

    request: Request
    context: Context
    judge: Judge
    stats: Stats
    limit: int  # length that the context may reach
    ticket: int
    trace: TraceWriter | None

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.limit - len(self.context)


@dataclass
class Turn:
    """A round, filled in from top to bottom as it is planned, drafted, verified and judged."""

    pending: list[int]  # committed, not in the target's KV cache: the anchor, or a last chunk of the prompt
    directive: Directive | None
    kinds: dict[str, str] = field(default_factory=dict)  # of the possible proposals, by drafter
    backlogs: dict[str, int] = field(default_factory=dict)
    caught: Caught = field(default_factory=Caught)  # up by a drafter, before it drafted
    plan: Plan = _NO_PLAN
    ready: bool = False  # the draft was made beside the last verify
    proposal: Proposal = NO_DRAFT
    beside: bool = False  # assumed work runs beside the verify
    draft_s: float = 0.0
    verify_s: float = 0.0
    decision: Decision = _NOT_JUDGED
    guess: bool | None = None  # whether that of assumed work came true
    worked: Worked = _NO_WORK
    round_s: float = 0.0  # without catching up

    @property
    def backlog(self) -> int:
        """What the plan's drafter had not seen of the text."""
        return self.backlogs.get(self.plan.drafter or "", 0)

    @property
    def is_odd(self) -> bool:
        """Whether it did more than a plan knows: a chunk of the prompt, or a draft that catches up."""
        return len(self.pending) > 1 or self.backlog > FAR_BEHIND
