"""What every backend with a KV cache on the host's side shares: committed positions, checks, which rows to return.

A backend brings a `Runner`, which knows buffers and one library; `CachedGraph` around it is a `contracts.Graph`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from outrider.contracts import BoolArray, Float32Array, IntArray, LogitsRequest, Output, TopK, TopRows
from outrider.errors import BackendError, ContextError
from outrider.targets.core_sets import pinned
from outrider.targets.graph_meta import GraphMeta

__all__ = ["CachedGraph", "Runner", "TopRunner", "requested_rows", "top_rows"]


class Runner(Protocol):
    """Runs one graph. What it returns may be views that its next run overwrites."""

    def run(
        self,
        tokens: IntArray,  # [S]
        positions: IntArray,  # [T], of the committed rows and then of the tokens
        mask: BoolArray | None,  # [S, S] ancestor-or-self; None = causal
        rows: IntArray,  # [R]
    ) -> tuple[Float32Array, list[Float32Array]]:
        """Logits [R, V] and the hidden states [S, D] of each exported layer."""
        ...

    def commit(self, length: int, rows: IntArray) -> None:
        """Keep these rows of the last run from row `length` of the cache on."""
        ...

    def close(self) -> None:
        """Release everything; closing twice is allowed."""
        ...


class TopRunner(Runner, Protocol):
    """A runner whose graph picks the largest logits of every row itself, up to `top` of them."""

    top: int

    def run_top(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, n: int
    ) -> tuple[TopRows, list[Float32Array]]:
        """As `run` for all rows, with the n largest logits of each, equals by lower id, in place of all."""
        ...


@runtime_checkable
class RowRunner(Protocol):
    """A runner whose cache is in reach, where `in_reach` says so: rows of it can be put aside."""

    in_reach: bool

    def rows(self, start: int, end: int) -> Any:
        """A copy of these rows of the cache, as it keeps them."""
        ...

    def put(self, start: int, rows: Any) -> None:
        """Write them back."""
        ...


@dataclass(frozen=True)
class _KeptRows:
    start: int
    positions: IntArray  # [n]
    rows: Any


class CachedGraph:
    """A `contracts.Graph` around a `Runner`; `library` is named in errors. `cores` keep its caller there, if set."""

    cores: tuple[int, ...] | None = None
    hidden_layers: tuple[int, ...]

    def __init__(self, meta: GraphMeta, runner: Runner, library: str) -> None:
        self.meta, self._runner, self.library = meta, runner, library
        self.vocab_size, self.max_context = meta.vocab_size, meta.max_context
        self.widths, self.hidden_layers = meta.widths, meta.hidden_layers
        self.top = int(getattr(runner, "top", 0))  # a `TopK` up to this is cheaper than the rows
        self._closed = False
        self._process = os.getpid()
        self._length = 0
        self._pending = 0  # rows of the last forward that can still be committed
        self._positions = np.zeros(meta.max_context, np.int64)  # of committed rows, then of pending ones

    @property
    def length(self) -> int:
        """Tokens committed to the KV cache."""
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
        """Run S tokens after the committed prefix; see `contracts.Graph`. The next one reuses `logits`."""
        ids = np.asarray(tokens, dtype=np.int64)
        S = len(ids)
        self._check(S, positions, hidden, features)
        straight = np.arange(self._length, self._length + S)
        self._positions[self._length : self._length + S] = straight if positions is None else positions
        if mask is not None and np.array_equal(mask, np.tri(S, dtype=np.bool_)):
            mask = None
        seen = self._positions[: self._length + S]
        rows = requested_rows(logits, S)
        self._pending = 0
        values: Float32Array | TopRows
        try:
            with pinned(self.cores):
                if isinstance(logits, TopK) and logits.n <= self.top:
                    values, states = cast(TopRunner, self._runner).run_top(ids, seen, mask, logits.n)
                else:
                    values, states = self._runner.run(ids, seen, mask, rows)
        except RuntimeError as error:
            raise BackendError(
                f"{self.library} failed in a forward of {S} tokens after {self._length}: {error}; the graph and its "
                "manifest may not belong together (run `outrider check`)"
            ) from error
        self._pending = S
        found = {layer: states[self.hidden_layers.index(layer)] for layer in hidden}
        if isinstance(logits, TopK) and isinstance(values, np.ndarray):
            return Output(top_rows(values, logits.n), found)
        return Output(None if logits == "none" else values, found)

    def commit(self, rows: Sequence[int] | IntArray) -> None:
        """Keep these rows of the last forward, in this order.

        Raises ValueError for rows it did not have, BackendError where the library fails: it may have to run them again.
        """
        order = np.asarray(rows, dtype=np.int64)
        if order.size and (order.min() < 0 or order.max() >= self._pending):
            raise ValueError(f"rows {order.tolist()} are not among the {self._pending} of the last forward")
        try:
            with pinned(self.cores):
                self._runner.commit(self._length, order)
        except RuntimeError as error:
            raise BackendError(
                f"{self.library} failed to keep {len(order)} rows after {self._length}: {error}"
            ) from error
        start, end = self._length, self._length + len(order)
        self._positions[start:end] = self._positions[start + order]
        self._length, self._pending = end, 0

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate to {length}: the cache holds {self._length} tokens")
        self._length, self._pending = length, 0

    @property
    def keeps_rows(self) -> bool:
        """Whether its cache is in reach of `keep`."""
        return isinstance(self._runner, RowRunner) and self._runner.in_reach

    def keep(self, start: int) -> object:
        """A copy of the committed rows from `start` on, for `bring_back`. Raises BackendError where there is no way."""
        if not isinstance(self._runner, RowRunner) or not self._runner.in_reach:
            raise BackendError(f"the cache of this graph is out of reach: {self.library} holds it")
        if not 0 <= start <= self._length:
            raise ValueError(f"cannot keep rows from {start}: the cache holds {self._length} tokens")
        positions = self._positions[start : self._length].copy()
        return _KeptRows(start, positions, self._runner.rows(start, self._length))

    def bring_back(self, kept: object) -> None:
        """Commit what `keep` returned again, behind the same rows as it was."""
        if not isinstance(kept, _KeptRows) or not isinstance(self._runner, RowRunner):
            raise ValueError(f"{type(kept).__name__} is not what `keep` of this graph returned")
        if kept.start != self._length:
            raise ValueError(
                f"rows kept from {kept.start} on do not follow the {self._length} that the cache holds"
            )
        end = self._length + len(kept.positions)
        self._runner.put(self._length, kept.rows)
        self._positions[self._length : end] = kept.positions
        self._length, self._pending = end, 0

    def close(self) -> None:
        """Free the graph; closing twice is allowed."""
        self._closed = True
        self._runner.close()

    def _check(
        self, S: int, positions: IntArray | None, hidden: tuple[int, ...], features: Float32Array | None
    ) -> None:
        if self._closed:
            raise BackendError("the graph is closed")
        if self._process != os.getpid():  # the library's threads stayed behind: a forward would wait for ever
            raise BackendError("the graph was opened before a fork; open it again in this process")
        if S < 1:
            raise ValueError("a forward needs at least one token")
        if self.widths is not None and max(self.widths) < S:
            raise ValueError(f"{S} tokens exceed the largest width of this graph, {self.widths[-1]}")
        top = self._length + S if positions is None else int(np.max(positions)) + 1
        if max(top, self._length + S) > self.max_context:
            raise ContextError(
                f"{S} tokens after {self._length} (up to position {top - 1}) exceed the context of "
                f"{self.max_context}; truncate, or export with a larger --max-context"
            )
        if features is not None:
            raise ValueError("this graph does not read features of another model")
        unknown = [layer for layer in hidden if layer not in self.hidden_layers]
        if unknown:
            raise ValueError(f"hidden layers {unknown} were not exported; exported: {self.hidden_layers}")


def requested_rows(request: LogitsRequest, S: int) -> IntArray:
    """The row indices that a request stands for; none becomes no rows."""
    if isinstance(request, TopK) or (isinstance(request, str) and request == "all"):
        return np.arange(S)
    if isinstance(request, str):
        return np.arange(S - 1, S) if request == "last" else np.zeros(0, np.int64)
    rows = np.asarray(request, dtype=np.int64)
    if rows.size and (rows.min() < 0 or rows.max() >= S):
        raise ValueError(f"logits of rows {rows.tolist()} were asked for, but there are {S} tokens")
    return rows


def top_rows(
    logits: Float32Array,  # [R, V]
    n: int,
) -> TopRows:
    """The n largest logits of every row, the lower id first among equals, and each row's logsumexp."""
    n = min(n, logits.shape[1])
    if n == 1:
        ids = logits.argmax(axis=1)[:, None]  # numpy takes the first of equals
    else:
        ids = np.stack([_top_ids(row, n) for row in logits]) if len(logits) else np.zeros((0, n), np.int64)
    values = np.take_along_axis(logits, ids, axis=1)
    peak = logits.max(axis=1, keepdims=True, initial=-np.inf)
    total = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
    return TopRows(ids.astype(np.int64), values, total.astype(np.float32))


def _top_ids(row: Float32Array, n: int) -> IntArray:
    edge = np.partition(row, -n)[-n]
    above, equal = np.flatnonzero(row > edge), np.flatnonzero(row == edge)
    ids = np.concatenate([above, equal[: n - len(above)]])
    return cast(IntArray, ids[np.lexsort((ids, -row[ids]))])
