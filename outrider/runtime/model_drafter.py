"""Drafting with a small model over the same tokens (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np

from outrider.contracts import Float32Array, Graph, IntArray, Output, Proposal, Sampling, TopRows
from outrider.errors import BackendError, UsageError
from outrider.runtime.context import common_prefix
from outrider.runtime.corrections import Correction, Doubt, KeepsRows, doubt, likeliest
from outrider.runtime.leading import forward_rows, leading, named, needed
from outrider.runtime.sampling import Distribution, Processor, distribution, draw, least_probability
from outrider.runtime.uniforms import Uniforms

__all__ = ["ModelDrafter"]


@dataclass
class _Chain:
    """A draft as it grows: all of its tokens but the last have run, and so has what is before `head`."""

    start: int  # the position in the text of its first token
    head: list[int]  # must run before the first draft
    rng: np.random.Generator
    assumed: list[int] = field(default_factory=list)  # between the context it was begun in and `start`
    tokens: list[int] = field(default_factory=list)
    drawn_from: list[Distribution] = field(default_factory=list)
    doubts: list[Doubt | None] = field(default_factory=list)  # of the tokens, once they are asked for
    ended: bool = False  # the draft was not sure enough, or lacks an id

    def is_behind(self, context: Sequence[int]) -> bool:
        """Whether what it assumed came true."""
        return len(context) == self.start and list(context[-len(self.assumed) :]) == self.assumed


@dataclass(frozen=True)
class _Displaced:
    """Rows of the cache that gave way to those behind a correction, and their tokens; the first is row `base`."""

    base: int
    kept: object
    tokens: list[int]


class ModelDrafter:
    """Drafts a chain with `graph`, processing its rows as the target's are.

    `vocab_limit` is the tokenizer's size: padding ids are never drafted. Drafting stops early where the
    draft's most likely token has less than `min_confidence`; that looks at the row before the draw, so it
    does not bias `reject`. In `match` mode the draft draws with the target's own uniform of each position:
    the closer the two distributions, the more often both land on the same token. In `reject` mode it
    draws from its own stream, and q is exactly what it drew from.

    When the text outgrows the draft's context, the window slides: the older half is dropped.

    `reopen` opens the graph again after `release` gave its memory back; without it, it is never released.

    `vocab_ids` are the ids of the columns of a trimmed head: other tokens are never proposed, q is 0 for them.
    `known_ids` is how many ids such a graph can read (its embedding's rows), for one that is not trimmed as many
    as it has columns.

    Beside a verify forward it can draft the round after it (`assume`); all else must wait until that has ended.
    """

    name = "model"

    def __init__(
        self,
        graph: Graph,
        vocab_limit: int | None = None,
        min_confidence: float = 0.3,
        prefill_chunk: int = 512,
        reopen: Callable[[], Graph] | None = None,
        vocab_ids: IntArray | None = None,
        known_ids: int | None = None,
    ) -> None:
        if not 0.0 <= min_confidence <= 1.0:
            raise UsageError(f"min_confidence is {min_confidence}; it must be between 0 and 1")
        if graph.max_context < 2:
            raise UsageError(
                f"a draft needs a context of at least 2 tokens; this one has {graph.max_context}"
            )
        if vocab_ids is not None and len(vocab_ids) != graph.vocab_size:
            raise UsageError(f"{len(vocab_ids)} vocab_ids for a graph with {graph.vocab_size} logits")
        self._graph: Graph | None = graph
        self._can_keep = isinstance(graph, KeepsRows)  # once: to check a protocol is slow
        self._reopen = reopen
        columns = graph.vocab_size if vocab_ids is None else int(vocab_ids[-1]) + 1
        self.known_ids = known_ids or columns
        self.vocab_limit = min(vocab_limit or self.known_ids, self.known_ids)
        if vocab_ids is not None and vocab_ids[0] >= self.vocab_limit:
            raise UsageError(f"vocab_ids begin at {vocab_ids[0]}; the vocabulary ends at {self.vocab_limit}")
        self.vocab_ids = None if vocab_ids is None else vocab_ids[vocab_ids < self.vocab_limit]
        self.min_confidence = min_confidence
        self._chunk = min(prefill_chunk, max(graph.widths) if graph.widths else prefill_chunk)
        self._processor: Processor | None = None
        self._uniforms = Uniforms(0)
        self._sampling: Sampling | None = None
        self._start = 0  # of the window: the context index of the first KV row
        self._cached: list[int] = []  # tokens of the KV rows
        self._source: Sequence[int] | None = None
        self._pushed = 0  # how much of the context the penalties have seen
        self._checked = 0  # how much of the window is known to agree with the context
        self._proposed: _Chain | None = None  # the last proposal
        self._ahead: _Chain | None = None  # what follows it, if all that was assumed comes true
        self._begun: tuple[_Chain, _Chain] | None = None  # proposal and guess that assumed work began with
        self._corrected: _Chain | None = None  # what follows a correction
        self._displaced: _Displaced | None = None  # of the cache, by that
        self._doubting = False  # whether drafts note their runners-up

    @property
    def graph(self) -> Graph:
        """The draft's graph. Raises BackendError while it is released."""
        if self._graph is None:
            raise BackendError("the draft model was released to free memory; call `restore` first")
        return self._graph

    @property
    def loaded(self) -> bool:
        """Whether the draft's graph is open."""
        return self._graph is not None

    def release(self) -> None:
        """Close the graph and free its memory, if it can be opened again."""
        if self._graph is not None and self._reopen is not None:
            self._graph.close()
            self._graph = None
            self._forget()

    def restore(self) -> None:
        """Open the graph again, if it was released; the next draft runs the whole context."""
        if self._graph is None and self._reopen is not None:
            self._graph = self._reopen()

    def close(self) -> None:
        """Close the graph; closing twice is allowed."""
        if self._graph is not None:
            self._graph.close()

    def reset(self) -> None:
        """Forget all context."""
        self._forget()
        if self._graph is not None:
            self._graph.truncate(0)

    def _forget(self) -> None:
        self._start, self._cached, self._source, self._checked = 0, [], None, 0
        self._processor = self._proposed = self._displaced = None
        self._drop_assumed()

    def _drop_assumed(self) -> None:
        """Forget what was assumed; rows that a correction displaced come back, for more of them may be committed."""
        self._put_back()
        self._ahead = self._begun = self._corrected = None

    def backlog(self, context: Sequence[int], k: int = 1) -> int:
        """How many tokens the draft must run before the first of k; at least 1.

        Near the end of its context that depends on k: where so long a draft does not fit, the window slides.
        """
        cached, aside = self._cached[: self.graph.length], self._displaced
        if aside is not None:  # rows that the next draft has back
            cached = [*cached[: aside.base], *aside.tokens]
        start, keep = self._kept(cached, context, k)
        return len(context) - start - keep

    def catch_up(self, context: Sequence[int], k: int, sampling: Sampling, most: int) -> int:
        """Run at most so many tokens of what is before a draft of k, all but the last; returns how many ran.

        0 where nothing is left, or an id among them is not the draft's. With `most` 1 a row of logits is made too,
        as in a draft step.
        """
        self._proposed = None
        self._drop_assumed()
        self._begin(context, sampling, k)
        behind = context[self._start + len(self._cached) : len(context) - 1][:most]
        if behind and max(behind) >= self.known_ids:
            return 0
        for start in range(0, len(behind), self._chunk):
            self._extend(behind[start : start + self._chunk], "last" if most == 1 else "none")
        self._checked = len(self._cached)
        return len(behind)

    def propose(
        self, context: Sequence[int], k: int, sampling: Sampling, rng: np.random.Generator
    ) -> Proposal:
        """Draft at most k tokens; fewer at low confidence, none behind an id that the draft lacks.

        Where everything that `assume` went by came true, its tokens are the first: the same that are drafted now.
        """
        self._proposed, chain = None, self._come_true(context, sampling)
        if chain is None:
            self._begin(context, sampling, k)
            chain = _Chain(len(context), list(context[self._start + len(self._cached) :]), rng)
        window = len(context) - self._start
        k = min(k, self.graph.max_context - window + 1)
        for _ in self._grow(chain, k, []):
            pass
        self._checked = min(len(self._cached), window)
        self._shorten(chain, k)
        self._proposed = chain
        one_hot = sampling.greedy or sampling.mode == "match"
        return _chain(chain.tokens, None if one_hot else chain.drawn_from, self.vocab_ids)

    def assume(self, k: int, rng: np.random.Generator) -> Generator[int, None, None]:
        """Draft the round after the last proposal, as if the target took all of it and then this draft's next token.

        Yields that guess and then up to k drafts, each after one forward; nothing where the draft is not sure of a
        guess or its window would slide. `rng` is that of the round assumed. It reads no context, so another thread
        may run it while the proposal is verified. What it left is used by the next `propose` if it came true, and
        dropped otherwise; closing it early drops it too.
        """
        chain, self._proposed = self._proposed, None
        self._drop_assumed()
        if chain is None or chain.ended or not chain.tokens:
            return
        drafted = list(chain.tokens)
        place = chain.start + len(drafted)
        if place + 1 - self._start + k - 1 > self.graph.max_context:
            return
        shared = cast(np.random.Generator, _Shared(self._uniforms, place))  # the target draws its own by this
        guess = _Chain(place, drafted[-1:], shared)
        yield from self._grow(guess, 1, drafted)
        if not guess.tokens:
            return
        assumed = [*drafted, *guess.tokens]
        self._begun = chain, guess
        self._ahead = ahead = _Chain(place + 1, guess.tokens, rng, assumed)
        complete = False
        try:
            yield from self._grow(ahead, k, assumed)
            complete = True
        finally:
            if not complete:
                self._ahead = None

    @property
    def corrects(self) -> bool:
        """Whether it can draft behind a correction: that needs a graph whose rows can be put aside."""
        return self._graph is not None and self._can_keep and cast(KeepsRows, self._graph).keeps_rows

    def correct(self, k: int) -> Generator[Correction | int, None, None]:
        """Draft behind the likeliest correction of the last proposal, or of the guess after it.

        Yields it before any work, and then up to k drafts, each after one forward. Nothing where `assume` did not end,
        before drafts note their runners-up (as they do from the first call on), and in `reject` mode, where the draft's
        runner-up is not what a target takes. Rows of the cache that are in the way are put aside.
        """
        begun, sampling = self._begun, self._sampling
        self._doubting = (
            self.corrects and sampling is not None and (sampling.greedy or sampling.mode == "match")
        )
        if begun is None or self._ahead is None or not self._doubting:
            return
        proposal, guess = begun
        doubts = [*proposal.doubts, *guess.doubts]
        place = likeliest(doubts)
        if place is None or len(doubts) != len(proposal.tokens) + 1:
            return
        column = cast(Doubt, doubts[place]).runner_up
        token = column if self.vocab_ids is None else int(self.vocab_ids[column])
        start = proposal.start + place + 1
        if start - self._start + k - 1 > self.graph.max_context:
            return
        yield Correction(place, token)
        self._put_aside(start - 1 - self._start)
        assumed = [*proposal.tokens[:place], token]
        self._corrected = chain = _Chain(start, [token], proposal.rng, assumed)
        try:
            yield from self._grow(chain, k, assumed)
        except Exception:  # but not when closed: what was drafted until then is kept
            self._corrected = None
            raise

    def _put_aside(self, base: int) -> None:
        """Take the rows from `base` on out of the cache."""
        kept = cast(KeepsRows, self.graph).keep(base)
        self._displaced = _Displaced(base, kept, self._cached[base:])
        self.graph.truncate(base)
        del self._cached[base:]

    def _put_back(self) -> None:
        """Have the cache hold again what was put aside."""
        aside, self._displaced = self._displaced, None
        if aside is not None:
            self.graph.truncate(aside.base)
            del self._cached[aside.base :]
            self._cached.extend(aside.tokens)
            cast(KeepsRows, self.graph).bring_back(aside.kept)

    def observe(self, committed: Sequence[int], output: Output | None, rows: Sequence[int]) -> None:
        """Nothing to do: the cache is compared with the context when the next draft begins."""

    def _grow(self, chain: _Chain, k: int, behind: Sequence[int]) -> Iterator[int]:
        """Draft until the chain has k tokens or ends, one forward each; yields each token.

        Penalties see `behind`, the tokens between the context and the chain, only while this runs.
        """
        processor, sampling = self._processor, self._sampling
        assert processor is not None
        assert sampling is not None
        pushed = [*behind, *chain.tokens[:-1]]
        for token in pushed:
            processor.push(token)
        try:
            while len(chain.tokens) < k and not chain.ended:
                if chain.tokens:
                    pushed.append(chain.tokens[-1])
                    processor.push(chain.tokens[-1])
                row = self._run(chain.tokens[-1:] or chain.head)
                place = chain.start + len(chain.tokens)
                if isinstance(row, np.ndarray):
                    row = processor.row(row)
                choice = None if row is None else self._choose(row, sampling, chain.rng, place)
                if choice is None:
                    chain.ended = True
                    return
                column, chances = choice
                if self._doubting:
                    chain.doubts.append(doubt(cast(Float32Array | TopRows, row), column))
                chain.tokens.append(column if self.vocab_ids is None else int(self.vocab_ids[column]))
                chain.drawn_from.append(chances)
                yield chain.tokens[-1]
        finally:
            for token in reversed(pushed):
                processor.pop(token)

    def _come_true(self, context: Sequence[int], sampling: Sampling) -> _Chain | None:
        """The chain that was drafted ahead, if the context is the one assumed; it lies within the window."""
        ahead, corrected = self._ahead, self._corrected
        try:
            if context is not self._source or sampling is not self._sampling:
                return None
            if ahead is None or not ahead.is_behind(context):
                if corrected is None or not corrected.is_behind(context):
                    return None
                ahead, self._displaced = corrected, None
            self._push(context)
            return ahead
        finally:
            self._drop_assumed()

    def _push(self, context: Sequence[int]) -> None:
        """Show the penalties what was committed."""
        assert self._processor is not None
        for token in context[self._pushed :]:
            self._processor.push(token)
        self._pushed = len(context)

    def _shorten(self, chain: _Chain, k: int) -> None:
        """Forget what a chain holds beyond k tokens, in the cache too."""
        if len(chain.tokens) <= k:
            return
        del chain.tokens[k:], chain.drawn_from[k:], chain.doubts[k:]
        chain.ended = False
        keep = self._checked + k - 1
        if keep < len(self._cached):
            self.graph.truncate(keep)
            del self._cached[keep:]

    def _begin(self, context: Sequence[int], sampling: Sampling, k: int) -> None:
        """Bring cache, window and penalties in line with the context, all but the tokens not run yet."""
        del self._cached[self.graph.length :]
        if context is not self._source or sampling is not self._sampling or self._processor is None:
            prompt = getattr(context, "prompt_length", len(context))
            self._processor = Processor(sampling, self.vocab_limit, context[:prompt], self.vocab_ids)
            self._uniforms = Uniforms(sampling.seed)
            self._pushed = prompt
            self._checked = 0
            self._source, self._sampling = context, sampling
        self._push(context)
        self._start, keep = self._kept(self._cached, context, k)
        if keep < self.graph.length:  # rows of our own, or of who had the graph before
            self.graph.truncate(keep)
            del self._cached[keep:]

    def _kept(self, cached: list[int], context: Sequence[int], k: int) -> tuple[int, int]:
        """Where the window begins for k drafts behind a context, and how many of the cached rows stay in it."""
        known = context[self._start : self._start + len(cached)]
        checked = self._checked if context is self._source else 0
        keep = common_prefix(cached, known, min(checked, len(known), len(cached)))
        keep = min(keep, len(context) - self._start - 1)
        if keep <= 0 or len(context) - self._start + k - 1 > self.graph.max_context:
            return max(0, len(context) - self._window(len(context) + k - 1)), 0
        return self._start, keep

    def _window(self, needed: int) -> int:
        """Tokens to keep when the cache is filled anew: all that fit, or half of the context."""
        return needed if needed <= self.graph.max_context else max(1, self.graph.max_context // 2)

    def _run(self, tokens: Sequence[int]) -> Float32Array | TopRows | None:
        """Run tokens behind the cache; the logits [V] after the last, or the largest; None for an unknown id."""
        if max(tokens) >= self.known_ids:
            return None
        rows: Float32Array | TopRows | None = None
        for start in range(0, len(tokens), self._chunk):
            final = start + self._chunk >= len(tokens)
            rows = self._extend(tokens[start : start + self._chunk], "last" if final else "none")
        return rows[-1] if isinstance(rows, np.ndarray) else rows

    def _extend(
        self, tokens: Sequence[int], logits: Literal["last", "none"]
    ) -> Float32Array | TopRows | None:
        """One forward over tokens that stay in the cache; the list goes first, so that an interrupt is seen later."""
        rows: Float32Array | TopRows | None = None
        if logits == "none":
            self.graph.forward(tokens, logits="none")
        else:
            limit = self.vocab_limit if self.vocab_ids is None else len(self.vocab_ids)
            _, rows = forward_rows(self.graph, self._needed, limit, tokens)
        self._cached.extend(tokens)
        self.graph.commit(range(len(tokens)))
        return rows

    @property
    def _needed(self) -> int:
        """How many of the largest logits decide a draft; 0 where whole rows do."""
        if self._sampling is None or self._processor is None or self._processor.edits:
            return 0
        return needed(self._sampling)

    def _choose(
        self, row: Float32Array | TopRows, sampling: Sampling, rng: np.random.Generator, position: int
    ) -> tuple[int, Distribution] | None:
        """The next drafted column and the columns it was drawn from; None below the confidence."""
        ids: IntArray | None = None
        if isinstance(row, TopRows):
            if sampling.greedy:
                sure = math.exp(row.values[0, 0] - row.logsumexp[0]) >= self.min_confidence
                return (int(row.ids[0, 0]), _ONE) if sure else None
            ids, row = leading(row, 0, self._needed)
        if self.vocab_ids is not None and row.max(initial=-np.inf) == -np.inf:
            return None  # every token of a trimmed head is banned: the target has others
        if sampling.greedy:
            token, sure = least_probability(row, self.min_confidence)
            return (token, _ONE) if sure else None
        chances = distribution(row, sampling)
        if ids is not None:
            chances = named(chances, ids)
        if chances.probs.max() < self.min_confidence:
            return None
        shared = sampling.mode == "match"
        token, _ = draw(chances, self._uniforms(position) if shared else rng.random())
        return token, chances


_ONE = Distribution(None, np.ones(1))


class _Shared:
    """The part of a generator that drawing needs: the target's own uniform of a position."""

    def __init__(self, uniforms: Uniforms, position: int) -> None:
        self._uniforms, self._position = uniforms, position

    def random(self) -> float:
        return self._uniforms(self._position)


def _chain(
    tokens: list[int], drawn_from: list[Distribution] | None, vocab_ids: IntArray | None = None
) -> Proposal:
    """A chain proposal; q over the union of the supports, or over all columns if one is dense.

    `vocab_ids` are the ids of the columns that the distributions are over; None where a column is an id.
    """
    ids = np.array(tokens, np.int64)
    parents = np.arange(-1, len(tokens) - 1)
    if not drawn_from:
        return Proposal(ids, parents)
    probs = [chances.probs for chances in drawn_from]
    supports = [chances.ids for chances in drawn_from if chances.ids is not None]
    if len(supports) < len(drawn_from):
        return Proposal(ids, parents, np.stack(probs).astype(np.float32), vocab_ids, "iid")
    union, columns = np.unique(np.concatenate(supports), return_inverse=True)
    q = np.zeros((len(tokens), len(union)), np.float32)
    q[np.repeat(np.arange(len(tokens)), [len(support) for support in supports]), columns] = np.concatenate(
        probs
    )
    return Proposal(ids, parents, q, union if vocab_ids is None else vocab_ids[union], "iid")
