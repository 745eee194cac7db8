"""The target's verdict on one row after another: processing, choice, acceptance rule, near ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.contracts import (
    BoolArray,
    Float32Array,
    Graph,
    IntArray,
    LogitsRequest,
    Output,
    Proposal,
    Sampling,
    TopRows,
)
from outrider.runtime.leading import forward_rows, leading, named, needed
from outrider.runtime.sampling import (
    Distribution,
    Processor,
    TokenLogprob,
    distribution,
    draw,
    log_probabilities,
    top_two,
)
from outrider.runtime.uniforms import Uniforms
from outrider.runtime.verify import Step, match_child, reject_child

__all__ = ["Judge", "Judged"]


@dataclass(frozen=True)
class Judged:
    """One decided row, kept for a trace: what was decided from, and the verdict."""

    row: int
    processed: Float32Array  # [vocab_limit]
    uniform: float | None
    chances: Distribution | None
    step: Step


class Judge:
    """Decides rows of one generation; `begin` a round, then call it for each row that `walk` reaches.

    The prefix that penalties see grows with every token decided. `logprobs` and `judged` (when asked
    for) hold the rows of the current round.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocab_limit: int,
        prompt: list[int],
        near_tie: float = 1e-3,
        logprobs: int | None = None,
        record: bool = False,
    ) -> None:
        self.logprobs: list[TokenLogprob] = []
        self.judged: list[Judged] = []
        self._sampling = sampling
        self._processor = Processor(sampling, vocab_limit, prompt)
        self._uniforms = Uniforms(sampling.seed)
        self._near_tie = near_tie
        self._top = logprobs
        self._record = record
        self._limit = vocab_limit
        whole = record or logprobs is not None or self._processor.edits
        self.needed = 0 if whole else needed(sampling)
        """How many of the largest logits of a row it decides by; 0: by the whole row."""

    def ask(
        self,
        target: Graph,
        tokens: Sequence[int] | IntArray,
        positions: IntArray | None,
        mask: BoolArray | None,
        logits: LogitsRequest,
    ) -> tuple[Output, Float32Array | TopRows]:
        """A forward of the target, and its rows as far as they are needed (`leading.forward_rows`)."""
        return forward_rows(target, self.needed, self._limit, tokens, positions, mask, logits)

    def begin(self, rows: Float32Array | TopRows, position: int, proposal: Proposal) -> None:
        """Start a round: logits [1 + n, V] of anchor and drafts; `position` is that of the next token."""
        self.logprobs, self.judged = [], []
        self._rows = rows
        self._position = position
        self._proposal = proposal
        self._drafted: list[int] = proposal.tokens.tolist()

    def __call__(self, row: int, candidates: list[int]) -> Step:
        """Decide what follows row `row`, given the drafted nodes that are its children."""
        ids: IntArray | None = None
        if isinstance(self._rows, TopRows):
            ids, processed = leading(self._rows, row, self.needed)
        else:
            processed = self._processor.row(self._rows[row])
        uniform = None if self._sampling.greedy else self._uniforms(self._position)
        chances = None if uniform is None else distribution(processed, self._sampling, self._near_tie)
        if chances is not None and ids is not None:
            chances = named(chances, ids)
        step = self._decide(processed, ids, chances, uniform, candidates)
        self._processor.push(step.token)
        self._position += 1
        if self._top is not None:
            temperature = self._sampling.temperature
            self.logprobs.append(log_probabilities(processed, step.token, self._top, temperature))
        if self._record:
            self.judged.append(Judged(row, np.array(processed), uniform, chances, step))
        return step

    def _decide(
        self,
        processed: Float32Array,
        ids: IntArray | None,
        chances: Distribution | None,
        uniform: float | None,
        candidates: list[int],
    ) -> Step:
        if chances is None or uniform is None:
            token, margin = top_two(processed)
            token = token if ids is None else int(ids[token])
            return Step(token, match_child(token, candidates, self._drafted), margin)
        if self._sampling.mode == "reject":
            step = reject_child(chances, candidates, self._proposal, uniform)
        else:
            token, margin = draw(chances, uniform)
            step = Step(token, match_child(token, candidates, self._drafted), margin)
        scale = min(1.0, self._sampling.temperature)  # a colder softmax amplifies the noise of a logit
        return Step(step.token, step.node, (step.margin - chances.slack) * scale)
