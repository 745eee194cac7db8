"""What one generation asks of the round engine, and what one of its rounds was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outrider.contracts import Plan, Sampling
from outrider.errors import UsageError
from outrider.power.governor import Directive
from outrider.runtime.sampling import TokenLogprob
from outrider.runtime.stats import Stats

__all__ = ["Drafting", "FinishReason", "Request", "Round", "refuse_k"]

Drafting = Literal["auto", "serial", "overlapped"]
FinishReason = Literal["stop", "length"]

MOST_K = 127  # drafted tokens in one verify of 128; a longer guess never pays, and is a slip of the finger


def refuse_k(k: int) -> None:
    """Raise UsageError for a k that is no draft length, or more than any round should verify."""
    if not isinstance(k, int) or k < 0:
        raise UsageError(f"k is {k!r}; it must be a number >= 0 or 'auto'")
    if k > MOST_K:
        raise UsageError(
            f"k is {k}; a round verifies at most {MOST_K} drafted tokens, so k can be at most that"
        )


@dataclass(frozen=True)
class Request:
    """What one generation wants.

    `k` is the draft length of every round, or "auto" for the planner's choice; 0 is plain decoding. A fixed k
    is kept whatever the governor says; pauses that hold a limit come with any k.
    `drafter` names one drafter (None: any). `drafting` says when it drafts: `serial` before each verify forward,
    `overlapped` beside it too (`runtime.overlap`), `auto` as it pays. `stop_ids` end the text; the stop token
    itself is the last one committed. `logprobs` None is off, 0 gives each token's own, n the n most likely as well.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    k: int | Literal["auto"] = "auto"
    drafter: str | None = None
    logprobs: int | None = None
    drafting: Drafting = "auto"

    def __post_init__(self) -> None:
        """Refuse values outside their range, naming the option and the value seen."""
        if self.k != "auto":
            refuse_k(self.k)
        if self.drafting not in ("auto", "serial", "overlapped"):
            raise UsageError(f"drafting is {self.drafting!r}; known: auto, serial, overlapped")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.logprobs is not None and self.logprobs < 0:
            raise UsageError(f"logprobs is {self.logprobs}; it must be at least 0")


@dataclass(frozen=True)
class Round:
    """What one round committed: 1..k+1 tokens, cut after the first stop token and at the limits.

    `finish_reason` is None while more can come. `stats` are the generation's counters, updated in place.
    `directive` is what the governor asked for (None: nothing governs); the pause of `plan` follows the round.
    `ready`: the draft was made beside the last round's verify, and `draft_s` is what was left to wait for it. `guess`:
    whether the token after the draft was guessed rightly for the next round (None: not put to the test).
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    plan: Plan
    drafted: int
    evaluated: int
    accepted: int
    near_ties: int
    logprobs: tuple[TokenLogprob, ...] | None
    draft_s: float
    verify_s: float
    stats: Stats
    directive: Directive | None = None
    ready: bool = False
    guess: bool | None = None
