"""An in-memory stand-in for a model, for tests of anything that drives a `Graph`.

Its next-token logits are a fixed function of the tokens that a row may see, and its KV cache is an
explicit list of (token, position) pairs: a wrong commit, a wrong mask, a wrong position or a
forgotten truncate gives other logits, as it would in a real model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outrider.contracts import (
    BoolArray,
    Float32Array,
    IntArray,
    LogitsRequest,
    Output,
    Proposal,
    Sampling,
    TopK,
    TopRows,
)
from outrider.errors import ContextError
from outrider.targets.lanes import Lanes

__all__ = ["FakeDrafter", "FakeGraph", "LogitsFunction", "VirtualClock", "blend_logits", "random_logits"]

LogitsFunction = Callable[[tuple[int, ...]], Float32Array]
"""Tokens that a row sees, oldest first -> next-token logits [V]."""

_HIDDEN_SIZE = 8
_BANK_ROWS = 64


class VirtualClock:
    """A clock that moves only when told to: `clock()` reads seconds, `advance` adds some.

    Threads that `work` by it at the same time share its time: their seconds pass beside each other. `lanes` is what
    an engine needs as its `timeline` then.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self.lanes: Lanes[_Until] = Lanes(self._first)

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now_s += seconds

    def work(self, seconds: float) -> None:
        """Let `seconds` pass for this thread."""
        self.lanes.run(_Until(self.now_s + seconds))

    def _first(self, jobs: Sequence[_Until]) -> _Until:
        first = min(jobs, key=lambda job: job.end_s)
        self.now_s = max(self.now_s, first.end_s)
        return first


@dataclass(eq=False)
class _Until:
    """What a thread does until a time."""

    end_s: float


def random_logits(
    vocab_size: int, seed: int = 0, order: int | None = 2, scale: float = 2.0
) -> LogitsFunction:
    """A random language model of the last `order` tokens (None: of all of them), fixed by `seed`.

    Small vocabularies get independent normal logits for every context; large ones pick from a bank of
    rows, so that a forward stays cheap.
    """
    bank: Float32Array | None = None
    if vocab_size > 4096:
        rows = np.random.default_rng(seed).standard_normal((_BANK_ROWS, vocab_size), dtype=np.float32)
        bank = np.float32(scale) * rows
    cache: dict[tuple[int, ...], Float32Array] = {}

    def logits(context: tuple[int, ...]) -> Float32Array:
        key = context if order is None else context[max(0, len(context) - order) :]
        if bank is not None:
            row: Float32Array = bank[_digest(key, seed) % _BANK_ROWS]
            return row
        if key not in cache:
            rng = _generator(seed, key)
            cache[key] = np.float32(scale) * rng.standard_normal(vocab_size, dtype=np.float32)
        return cache[key]

    return logits


def _generator(seed: int, key: tuple[int, ...]) -> np.random.Generator:
    """`np.random.default_rng([seed, *(token + 1 for token in key)])`, without its millisecond for a long key."""
    words = np.array((0, *key), np.int64) + 1
    words[0] = seed
    return np.random.default_rng(words.astype(np.uint32) if seed < 2**32 else words.tolist())


def blend_logits(first: LogitsFunction, second: LogitsFunction, share: float) -> LogitsFunction:
    """A model between two others: (1 - share) * first + share * second; a draft of chosen quality."""

    def logits(context: tuple[int, ...]) -> Float32Array:
        mixed: Float32Array = np.float32(1.0 - share) * first(context) + np.float32(share) * second(context)
        return mixed

    return logits


def _digest(tokens: Sequence[int], seed: int) -> int:
    return zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes(), seed & 0xFFFFFFFF)


class FakeGraph:
    """A `Graph` in memory over `logits` (default: `random_logits(vocab_size, seed, order)`).

    `costs_s` maps a width to the seconds that a forward of this width takes on `clock` (linear between
    the widths given); nothing sleeps. `forwards` lists the width of every forward so far. `columns` are the ids
    whose logits come out, as of a draft with a trimmed head: `vocab_size` is then their number, and every id below
    the one given can still be read.
    """

    def __init__(
        self,
        vocab_size: int,
        max_context: int = 256,
        widths: tuple[int, ...] | None = None,
        seed: int = 0,
        order: int | None = 2,
        scale: float = 2.0,
        logits: LogitsFunction | None = None,
        hidden_layers: tuple[int, ...] = (),
        costs_s: Mapping[int, float] | None = None,
        clock: VirtualClock | None = None,
        columns: IntArray | None = None,
    ) -> None:
        self.vocab_size = vocab_size if columns is None else len(columns)
        self._known, self._columns = vocab_size, columns
        self.max_context = max_context
        self.widths = widths
        self.hidden_layers = hidden_layers
        self.clock = clock or VirtualClock()
        self.forwards: list[int] = []
        self.closed = False
        self._logits = logits or random_logits(vocab_size, seed, order, scale)
        self._costs_s = dict(costs_s or {})
        self._kv: list[tuple[int, int]] = []  # (token, position), committed
        self._prefix: tuple[int, ...] | None = ()  # their tokens, while every position is that of its row
        self._fresh: list[tuple[int, int]] = []  # rows of the last forward

    @property
    def length(self) -> int:
        """Tokens committed to the KV list."""
        return len(self._kv)

    @property
    def tokens(self) -> list[int]:
        """The committed tokens, in cache order."""
        return [token for token, _ in self._kv]

    @property
    def kv(self) -> list[tuple[int, int]]:
        """A copy of the committed (token, position) pairs."""
        return list(self._kv)

    def forward(
        self,
        tokens: Sequence[int] | IntArray,
        positions: IntArray | None = None,
        mask: BoolArray | None = None,
        logits: LogitsRequest = "all",
        hidden: tuple[int, ...] = (),
        features: Float32Array | None = None,
    ) -> Output:
        """Run S tokens over the committed ones; see `outrider.contracts.Graph`."""
        ids = [int(token) for token in tokens]
        self._check(ids, hidden)
        places = range(self.length, self.length + len(ids)) if positions is None else positions
        self._fresh = [(token, int(place)) for token, place in zip(ids, places, strict=True)]
        self.forwards.append(len(ids))
        if self._costs_s:
            widths = sorted(self._costs_s)
            self.clock.work(float(np.interp(len(ids), widths, [self._costs_s[w] for w in widths])))
        visible = np.tri(len(ids), dtype=np.bool_) if mask is None else np.asarray(mask, dtype=np.bool_)
        views = [self._view(row, visible) for row in range(len(ids))]
        layers = {layer: np.stack([_hidden(view, layer) for view in views]) for layer in hidden}
        return Output(self._answer(views, logits), layers)

    def commit(self, rows: Sequence[int] | IntArray) -> None:
        """Keep these rows of the last forward, in this order."""
        self._append([self._fresh[int(row)] for row in rows])

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        del self._kv[length:]
        prefix, self._prefix = self._prefix, ()
        if prefix is None:
            kept, self._kv = self._kv, []
            self._append(kept)
        else:
            self._prefix = prefix[:length]
        self._fresh = []

    keeps_rows = True

    def keep(self, start: int) -> tuple[int, list[tuple[int, int]]]:
        """A copy of the committed pairs from `start` on, and where they were."""
        if not 0 <= start <= self.length:
            raise ValueError(f"cannot keep rows from {start}: the cache holds {self.length} tokens")
        return start, self._kv[start:]

    def bring_back(self, kept: object) -> None:
        """Commit what `keep` returned again, behind the same pairs as it was."""
        match kept:
            case (int(start), list(pairs)) if start == self.length:
                self._append(pairs)
            case (int(start), list()):
                raise ValueError(
                    f"rows kept from {start} on do not follow the {self.length} that the cache holds"
                )
            case _:
                raise ValueError(f"{kept!r} is not what `keep` returned")

    def close(self) -> None:
        """Mark the graph closed; closing twice is allowed."""
        self.closed = True

    def _check(self, ids: list[int], hidden: tuple[int, ...]) -> None:
        if not ids:
            raise ValueError("a forward needs at least one token")
        if self.widths is not None and len(ids) > max(self.widths):
            raise ValueError(f"{len(ids)} tokens exceed the largest width {max(self.widths)}")
        if self.length + len(ids) > self.max_context:
            raise ContextError(f"{self.length} + {len(ids)} tokens exceed the context of {self.max_context}")
        if not all(0 <= token < self._known for token in ids):
            raise ValueError(f"token ids {ids} exceed the vocabulary of {self._known}")
        if not set(hidden) <= set(self.hidden_layers):
            raise ValueError(f"hidden layers {hidden}: this graph has {self.hidden_layers}")

    def _append(self, pairs: list[tuple[int, int]]) -> None:
        straight = [place for _, place in pairs] == list(range(self.length, self.length + len(pairs)))
        if self._prefix is not None:
            self._prefix = (*self._prefix, *(token for token, _ in pairs)) if straight else None
        self._kv.extend(pairs)
        self._fresh = []

    def _view(self, row: int, visible: BoolArray) -> tuple[int, ...]:
        """The tokens that a row sees, by position; a hole or a repeated position changes them."""
        fresh = [entry for entry, sees in zip(self._fresh, visible[row], strict=True) if sees]
        straight = [place for _, place in fresh] == list(range(self.length, self.length + len(fresh)))
        if straight and self._prefix is not None:  # the usual case, whose time does not grow with the text
            return (*self._prefix, *(token for token, _ in fresh))
        seen = self._kv + fresh
        ordered = sorted(seen, key=lambda entry: entry[1])
        wrong = any(place != index for index, (_, place) in enumerate(ordered))
        tokens = tuple(token for token, _ in ordered)
        return tokens if not wrong else (*tokens, self._known, *(place for _, place in ordered))

    def _answer(self, views: list[tuple[int, ...]], request: LogitsRequest) -> Float32Array | TopRows | None:
        if request == "none":
            return None
        if isinstance(request, TopK):
            return _top_rows(np.stack([self._row(view) for view in views]), request.n)
        chosen = {"all": range(len(views)), "last": [-1]}[request] if isinstance(request, str) else request
        return np.stack([self._row(views[int(row)]) for row in chosen])

    def _row(self, view: tuple[int, ...]) -> Float32Array:
        row = self._logits(view)
        return row if self._columns is None else row[self._columns]


def _top_rows(rows: Float32Array, n: int) -> TopRows:
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :n]
    top = rows.max(axis=1)
    logsumexp = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
    return TopRows(ids.astype(np.int64), np.take_along_axis(rows, ids, axis=1), logsumexp)


def _hidden(view: tuple[int, ...], layer: int) -> Float32Array:
    return np.random.default_rng(_digest(view, layer)).standard_normal(_HIDDEN_SIZE, dtype=np.float32)


class FakeDrafter:
    """Drafts chains and trees from `logits`, under any of the rules that a `Proposal` can name.

    `branching[d]` is how many children a node at depth d gets (the last entry goes on); nodes are laid out
    breadth first until k are drafted. q is the softmax of `logits`, or one-hot under `deterministic`, whose
    children are the most likely tokens.
    """

    name = "fake"

    def __init__(
        self,
        logits: LogitsFunction,
        branching: tuple[int, ...] = (1,),
        rule: Literal["iid", "without_replacement", "deterministic"] = "deterministic",
    ) -> None:
        self.logits = logits
        self.branching = branching
        self.rule = rule
        self.observed: list[tuple[int, ...]] = []

    def propose(
        self, context: Sequence[int], k: int, sampling: Sampling, rng: np.random.Generator
    ) -> Proposal:
        """Draft k nodes below the end of `context`."""
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[Float32Array] = []
        paths: list[tuple[int, ...]] = []
        node, start = -1, tuple(context[:])
        while len(tokens) < k and node < len(tokens):
            path = paths[node] if node >= 0 else ()
            breadth = self.branching[min(len(path), len(self.branching) - 1)]
            for token, q in self._children(start + path, min(breadth, k - len(tokens)), rng):
                tokens.append(token)
                parents.append(node)
                rows.append(q)
                paths.append((*path, token))
            node += 1
        q_rows = None if self.rule == "deterministic" else np.stack(rows)
        return Proposal(np.array(tokens, np.int64), np.array(parents, np.int64), q_rows, rule=self.rule)

    def _children(
        self, context: tuple[int, ...], n: int, rng: np.random.Generator
    ) -> list[tuple[int, Float32Array]]:
        logits = self.logits(context).astype(np.float64)
        q = np.exp(logits - logits.max())
        children = []
        for order in np.argsort(-q, kind="stable")[:n]:
            token = int(order)
            if self.rule != "deterministic":
                q = q / q.sum()
                token = int(rng.choice(len(q), p=q))
            children.append((token, q.astype(np.float32)))
            if self.rule == "without_replacement":
                q = np.where(np.arange(len(q)) == token, 0.0, q)
                if not q.any():
                    break
        return children

    def observe(self, committed: Sequence[int], output: Output | None, rows: Sequence[int]) -> None:
        """Remember what was committed, in `observed`."""
        self.observed.append(tuple(committed))

    def reset(self) -> None:
        """Forget what was observed."""
        self.observed.clear()
