"""What a generation counted and timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.contracts import as_json

if TYPE_CHECKING:
    from outrider.runtime.overlap import Worked

__all__ = ["Stats"]


@dataclass
class Stats:
    """Counters of one generation. Drafted tokens after the first rejection were never evaluated.

    `evaluated_at[i]` and `accepted_at[i]` count draft position i (0 = first). Times are seconds of this
    process, without the time that the consumer of the rounds took. `paced_s` was slept between rounds to hold
    a limit on power or heat (pauses in the prompt are part of `prefill_s`); `level` is the governor's
    highest (None: nothing governs), `flags` are those of its last directive.

    `overlapped_rounds` had the next round drafted beside their verify: of `guesses` of the token in between that
    were put to the test `guesses_held` came true, and of `ahead_steps` draft steps `wasted_steps` were dropped.
    In `corrections` of these rounds the likeliest correction was drafted behind too; `corrections_held` came true.
    `draft_s` holds what the engine drafted itself or waited for, not what was drafted beside a verify.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    speculative_rounds: int = 0
    drafted: int = 0
    evaluated: int = 0
    accepted: int = 0
    evaluated_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    near_ties: int = 0
    prefill_s: float = 0.0
    first_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    paced_s: float = 0.0
    overlapped_rounds: int = 0
    guesses: int = 0
    guesses_held: int = 0
    ahead_steps: int = 0
    wasted_steps: int = 0
    corrections: int = 0
    corrections_held: int = 0
    level: str | None = None
    flags: tuple[str, ...] = ()

    @property
    def overhead_s(self) -> float:
        """Decode time spent neither in the drafter nor in the target's forward."""
        return max(0.0, self.decode_s - self.draft_s - self.verify_s)

    @property
    def acceptance(self) -> float | None:
        """accepted / evaluated, or None when nothing was evaluated."""
        return self.accepted / self.evaluated if self.evaluated else None

    @property
    def tokens_per_round(self) -> float | None:
        """Committed tokens per target forward, or None before the first round."""
        return self.output_tokens / self.rounds if self.rounds else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Prompt tokens that were run (not reused) per second until the first token."""
        ran = self.prompt_tokens - self.reused_tokens
        return ran / self.ttft_s if self.ttft_s > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first round per second after the first round, pauses included."""
        tokens = self.output_tokens - self.first_tokens
        return tokens / (self.decode_s + self.paced_s) if self.decode_s > 0 and tokens > 0 else None

    def count_draft(self, drafted: int, evaluated: int, accepted: int) -> None:
        """Add one round's drafted, evaluated and accepted tokens."""
        self.speculative_rounds += drafted > 0
        self.drafted += drafted
        self.evaluated += evaluated
        self.accepted += accepted
        missing = evaluated - len(self.evaluated_at)
        self.evaluated_at.extend([0] * missing)
        self.accepted_at.extend([0] * missing)
        for position in range(evaluated):
            self.evaluated_at[position] += 1
            self.accepted_at[position] += position < accepted

    def count_ahead(self, overlapped: bool, guess: bool | None, worked: Worked) -> None:
        """Add what one round had drafted beside verify forwards; `guess` None was not put to the test."""
        self.overlapped_rounds += overlapped
        self.guesses += guess is not None
        self.guesses_held += bool(guess)
        self.ahead_steps += worked.steps
        self.wasted_steps += worked.wasted
        self.corrections += worked.corrections
        self.corrections_held += worked.held

    def to_dict(self) -> dict[str, Any]:
        """All counters and the derived rates, ready for `json`."""
        derived = (
            "overhead_s",
            "acceptance",
            "tokens_per_round",
            "prompt_tokens_per_s",
            "decode_tokens_per_s",
        )
        return {**as_json(self), **{name: getattr(self, name) for name in derived}}
