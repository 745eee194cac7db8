"""A stand-in for a bundle, from an acceptance trace: the real engine runs without any model's arithmetic.

The vocabulary has four ids. The target's token at answer position i is i % 3; a draft that the trace says was
wrong is id 3. So a round commits exactly what the recorded models would have committed under greedy decoding.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.contracts import BoolArray, Float32Array, IntArray, LogitsRequest, Output, Proposal, Sampling
from outrider.errors import BackendError, ContextError, TraceError, UsageError
from outrider.lines import read_lines
from outrider.records import decode
from outrider.targets.model_cost import ModelCost
from outrider.targets.simulated import Machine

__all__ = ["Stage", "TraceDrafter", "TraceRun", "TraceTarget", "TraceText", "cycle", "read_acceptance"]

WRONG = 3  # the id of a draft that the target does not choose
VOCABULARY = 4
MOST_TOKENS = 1_000_000  # of a text; more is damage, and would fill the memory
_LOGITS = 20.0 * np.eye(VOCABULARY, dtype=np.float32)


@dataclass(frozen=True)
class TraceRun:
    """What one drafter did at every answer position: how many tokens it drafted, how many were right.

    `kind` is what it said of the proposal (`LookupDrafter.kind`); None where the drafter says nothing.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    kind: tuple[str | None, ...] | None = None


@dataclass(frozen=True)
class TraceText:
    """One greedy text: its prompt's length, its own, and every drafter's run over it."""

    category: str
    prompt_tokens: int
    tokens: int
    runs: Mapping[str, TraceRun]

    def __post_init__(self) -> None:
        """Refuse runs of another length than the text, and more accepted than drafted."""
        if not (1 <= self.prompt_tokens <= MOST_TOKENS and 1 <= self.tokens <= MOST_TOKENS):
            raise UsageError(
                f"a text has {self.prompt_tokens} + {self.tokens} tokens; both must be from 1 to {MOST_TOKENS}"
            )
        for name, run in self.runs.items():
            lengths = {
                len(run.drafted),
                len(run.accepted),
                *([len(run.kind)] if run.kind is not None else []),
            }
            if lengths != {self.tokens}:
                raise UsageError(f"run {name!r} has {sorted(lengths)} positions; the text has {self.tokens}")
            if any(not 0 <= a <= d for a, d in zip(run.accepted, run.drafted, strict=True)):
                raise UsageError(f"run {name!r} accepts more than it drafts")


def read_acceptance(path: str | os.PathLike[str]) -> list[TraceText]:
    """The texts of an `acceptance` trace (`docs/formats.md`). Raises TraceError naming file and line."""
    texts: list[TraceText] = [
        decode(TraceText, record, where, TraceError) for where, record in read_lines(path, "acceptance")
    ]
    if not texts:
        raise TraceError(f"{path} holds no text; record one with `outrider acceptance`")
    return texts


def cycle(texts: Sequence[TraceText], category: str | None, start: int = 0) -> Iterator[TraceText]:
    """The texts of a category (None: all) in turn, for ever. Raises UsageError, naming the known ones."""
    chosen = [text for text in texts if category in (None, text.category)]
    if not chosen:
        known = ", ".join(sorted({text.category for text in texts}))
        raise UsageError(f"the acceptance trace has no category {category!r}; known: {known}")
    while True:
        yield chosen[start % len(chosen)]
        start += 1


class Stage:
    """The text that is being decoded, which target and drafters share."""

    def __init__(self) -> None:
        self.text: TraceText | None = None
        self.served = 0

    def begin(self, text: TraceText) -> list[int]:
        """Make `text` the current one; returns its prompt, which shares no prefix with the one before."""
        self.text = text
        self.served += 1
        return [self.served % 3, *([WRONG] * (text.prompt_tokens - 1))]

    @property
    def current(self) -> TraceText:
        """The current text. Raises UsageError before `begin`."""
        if self.text is None:
            raise UsageError("no text has begun; call begin(text) first")
        return self.text


class TraceTarget:
    """A `Graph` that continues the current text, and takes nothing: wrap it in a `SimulatedGraph`."""

    vocab_size = VOCABULARY
    widths: tuple[int, ...] | None = None
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, stage: Stage, max_context: int = 4096, widths: tuple[int, ...] | None = None) -> None:
        self.stage = stage
        self.max_context = max_context
        self.widths = widths
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens committed."""
        return self._length

    def forward(
        self,
        tokens: Sequence[int] | IntArray,
        positions: IntArray | None = None,
        mask: BoolArray | None = None,
        logits: LogitsRequest = "all",
        hidden: tuple[int, ...] = (),
        features: Float32Array | None = None,
    ) -> Output:
        """The answer's next token behind every row, whatever was drafted; chains only."""
        if mask is not None or positions is not None:
            raise UsageError("a trace knows chains only; use a drafter that proposes no tree")
        width = len(tokens)
        if self._length + width > self.max_context:
            raise ContextError(f"{self._length} + {width} tokens exceed the context of {self.max_context}")
        if logits == "none":
            return Output(None)
        first = self._length + 1 - self.stage.current.prompt_tokens
        rows = [width - 1] if logits == "last" else range(width) if logits == "all" else logits
        if not isinstance(rows, Sequence):
            raise UsageError("a trace has no top rows; ask for whole ones")
        return Output(_LOGITS[[(first + int(row)) % 3 for row in rows]])

    def commit(self, rows: Sequence[int] | IntArray) -> None:
        """Keep as many tokens."""
        self._length += len(rows)

    def truncate(self, length: int) -> None:
        """Forget a tail."""
        self._length = min(self._length, length)

    def close(self) -> None:
        """Nothing to free."""


@dataclass
class _Ahead:
    """What was drafted ahead: where in the answer, whether the guess before it is right, and forwards that ran."""

    place: int
    right: bool
    forwards: int = 0


class TraceDrafter:
    """Drafts what the recorded drafter `name` drafted at this position, right and wrong tokens alike.

    With a `cost` it is a draft model on a unit of `machine`, whose memory it holds as "draft": a forward over
    what it has not seen yet, then one a token; a draft that ended at low confidence takes one more. Without,
    it is free (lookup).
    """

    def __init__(
        self,
        name: str,
        stage: Stage,
        machine: Machine | None = None,
        cost: ModelCost | None = None,
        unit: str | None = None,
        precision: str | None = None,
    ) -> None:
        if (machine is None) != (cost is None):
            raise UsageError("a draft model needs both a machine and a cost; lookup needs neither")
        self.name = name
        self.stage = stage
        self._machine, self._cost, self._unit, self._precision = machine, cost, unit, precision
        self._source: Sequence[int] | None = None
        self._seen = 0  # tokens of the context that the draft's cache holds
        self._proposed = (0, 0)  # where in the answer the last proposal began, and its length
        self._ahead: _Ahead | None = None
        self.loaded = True
        if machine is not None and cost is not None:
            machine.hold("draft", cost.resident_mb)

    def kind(self, context: Sequence[int]) -> str | None:
        """What the recorded drafter said of its next proposal; None: it had none."""
        kinds, position = self._run.kind, self._position(context)
        return "" if kinds is None else kinds[position]

    def backlog(self, context: Sequence[int], k: int = 1) -> int:
        """Tokens that a draft model must run before the first of k drafts; 0 for lookup. It has room for any k."""
        if self._cost is None:
            return 0
        return len(context) - self._seen if context is self._source else len(context)

    def catch_up(self, context: Sequence[int], k: int, sampling: Sampling, most: int) -> int:
        """Run at most so many tokens that the draft model has not seen, all but the last; returns how many."""
        backlog = self.backlog(context)
        ran = min(most, backlog - 1)
        if ran < 1:
            return 0
        self._ahead = None
        self._execute(ran, len(context) - backlog)
        self._source, self._seen = context, len(context) - backlog + ran
        return ran

    def propose(
        self, context: Sequence[int], k: int, sampling: Sampling, rng: np.random.Generator
    ) -> Proposal:
        """The recorded draft at this position, cut at k."""
        if not self.loaded:
            raise BackendError("the draft model was released to free memory; call `restore` first")
        position = self._position(context)
        drafted = min(k, self._run.drafted[position])
        right = min(drafted, self._run.accepted[position])
        self._spend(context, min(k, self._run.drafted[position] + 1), right)
        self._proposed = (position, drafted)
        tokens = [(position + i) % 3 for i in range(right)] + [WRONG] * (drafted - right)
        return Proposal(np.array(tokens, np.int64), np.arange(-1, drafted - 1))

    def observe(self, committed: Sequence[int], output: Output | None, rows: Sequence[int]) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Forget all context."""
        self._source, self._seen, self._ahead = None, 0, None

    def release(self) -> None:
        """Give the draft model's memory back; lookup has none."""
        if self._machine is not None and self.loaded:
            self._machine.release("draft")
            self.loaded = False
            self.reset()

    def restore(self) -> None:
        """Load the draft model again, if it was released; the next draft runs the whole context."""
        if self._machine is not None and self._cost is not None and not self.loaded:
            self._machine.load("draft", self._cost.resident_mb)
            self.loaded = True

    @property
    def _run(self) -> TraceRun:
        runs = self.stage.current.runs
        if self.name not in runs:
            raise UsageError(f"the trace has no drafter {self.name!r}; known: {', '.join(runs)}")
        return runs[self.name]

    def _position(self, context: Sequence[int]) -> int:
        text = self.stage.current
        position = len(context) - text.prompt_tokens
        if not 0 <= position < text.tokens:
            raise UsageError(f"the text ends after {text.tokens} tokens; position {position} was asked for")
        return position

    def _spend(self, context: Sequence[int], forwards: int, right: int) -> None:
        """Run the forwards; the cache then holds the context and the right drafts that were run."""
        if self._machine is None or self._cost is None:
            return
        ahead, self._ahead = self._ahead, None
        came_true = ahead is not None and ahead.right and ahead.place == self._position(context)
        ran = ahead.forwards if came_true and ahead is not None and context is self._source else 0
        backlog = self.backlog(context)
        for step in range(ran, forwards):
            width = backlog if step == 0 else 1
            length = len(context) - backlog if step == 0 else len(context) + step - 1
            self._execute(width, length)
        self._source = context
        self._seen = len(context) + min(right, forwards - 1)

    def _execute(self, width: int, length: int) -> None:
        assert self._machine is not None
        assert self._cost is not None
        self._machine.execute(self._unit, self._cost.work(width, length), self._precision)


class TraceModelDrafter(TraceDrafter):
    """A `TraceDrafter` with a cost, which can draft beside a verify forward (`runtime.overlap`)."""

    def assume(self, k: int, rng: np.random.Generator) -> Generator[int, None, None]:
        """The recorded draft behind the last proposal and the token that was drafted after it.

        Nothing where the draft stopped there by itself, or the answer ends.
        """
        run, (position, drafted) = self._run, self._proposed
        place = position + drafted + 1
        if run.drafted[position] <= drafted or place >= self.stage.current.tokens:
            return
        right = run.accepted[position] > drafted
        ahead = self._ahead = _Ahead(place, right)
        start = self.stage.current.prompt_tokens + place
        self._execute(1, start - 2)
        yield (place - 1) % 3 if right else WRONG
        done = False
        try:
            for step in range(min(k, run.drafted[place] + 1)):
                self._execute(1, start + step - 1)
                ahead.forwards = step + 1
                if step < run.drafted[place]:
                    yield (place + step) % 3 if step < run.accepted[place] else WRONG
            done = True
        finally:
            if not done:
                self._ahead = None
