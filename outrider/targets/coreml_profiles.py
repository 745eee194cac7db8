"""How the two Core ML profiles run a forward: what the host computes, what it keeps, and where rows go.

`SplitRunner` drives a function for each static width, channels first, over a cache that the host keeps in half
precision; `StateRunner` one function of flexible width that writes keys and values into states of its own.
S tokens, T committed rows and tokens, M rows of the cache, W columns of a static width, R rows of logits, G KV
heads, d head size, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.contracts import BoolArray, Float32Array, IntArray
from outrider.errors import BackendError, ContextError
from outrider.targets.coreml_programs import Arrays, Program
from outrider.targets.graph_meta import GraphMeta, reading_description
from outrider.targets.masks import fill_static_mask, visible_columns
from outrider.targets.npu_host import EmbeddingTable, HalfTable
from outrider.targets.rope_table import rope_table

__all__ = ["RUNNERS", "STATE_FUNCTION", "CoreMLMeta", "Forward", "SplitRunner", "StateRunner", "forwards"]

HalfArray = NDArray[np.float16]
STATE_FUNCTION = "main"


@dataclass(frozen=True)
class CoreMLMeta:
    """What the manifest says about a package; `from_json` reads it."""

    graph: GraphMeta
    masked: float  # what a mask adds where a row may not look
    rope: Mapping[str, tuple[HalfArray, HalfArray]]  # layer kind -> cosines, sines [M, rotary / 2]
    head: tuple[int, ...]  # columns of each piece of the logits; none: one tensor has all
    functions: Mapping[int, str]  # of static widths
    rows: Mapping[int, int]  # of static widths: rows of logits that a call returns
    most_rows: int | None  # of a flexible width: rows that a call may ask for; None: it returns all
    embedding: Mapping[str, Any] | None
    known_ids: int  # tokens from 0 that the embedding has

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CoreMLMeta:
        """Read the record. Raises BackendError for a field that is missing or impossible."""
        graph = GraphMeta.from_json(values)
        if graph.profile not in RUNNERS:
            raise BackendError(
                f"profile {graph.profile!r} is not one of Core ML's: {', '.join(RUNNERS)}; export the bundle again"
            )
        split = graph.profile == "split"
        with reading_description():
            tables = {kind: rope_table(record, graph.max_context) for kind, record in values["rope"].items()}
            rows = values["rows"]
            made = cls(
                graph=graph,
                masked=float(values["masked"]),
                rope={kind: (cos.astype("f2"), sin.astype("f2")) for kind, (cos, sin) in tables.items()},
                head=tuple(int(size) for size in values["head"]) if split else (),
                functions={int(width): str(name) for width, name in values["functions"].items()}
                if split
                else {},
                rows={int(width): int(count) for width, count in rows.items()} if split else {},
                most_rows=int(rows) if not split and rows is not None else None,
                embedding=values["embedding"] if split else None,
                known_ids=int(values.get("embedding_rows", graph.vocab_size)),
            )
        made._refuse_gaps()
        return made

    def _refuse_gaps(self) -> None:
        """Every static width needs its function and its number of rows, and the head all columns."""
        if self.graph.profile != "split":
            return
        for what, found in {"function": self.functions, "number of rows": self.rows}.items():
            missing = sorted(set(self.widths) - set(found))
            if missing:
                known = ", ".join(map(str, sorted(found))) or "none"
                raise BackendError(
                    f"width {missing[0]} was given no {what} (there are: {known}); export the bundle again"
                )
        if sum(self.head) != self.graph.vocab_size:
            raise BackendError(
                f"the pieces of the head have {sum(self.head)} columns, the vocabulary {self.graph.vocab_size}; "
                "export the bundle again"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that a call may have, ascending; none: any."""
        if self.graph.profile == "split" and not self.graph.widths:
            raise BackendError("the description of a split graph names no widths; export the bundle again")
        return tuple(sorted(self.graph.widths or ()))

    def tensors(self, W: int | None = None) -> dict[str, tuple[int | None, ...]]:
        """Inputs, outputs and states of the function of a static width, or of the flexible one."""
        return self._split_tensors(W) if W is not None else self._state_tensors()

    def _split_tensors(self, W: int) -> dict[str, tuple[int | None, ...]]:
        g, M, R = self.graph, self.graph.max_context, self.rows[W]
        shapes: dict[str, tuple[int | None, ...]] = {"x": (1, g.hidden_size, 1, W)}
        shapes |= {f"mask_{name}": (1, M + W, 1, W) for name in g.masks}
        for kind, (cos, _) in self.rope.items():
            shapes[f"cos_{kind}"] = shapes[f"sin_{kind}"] = (1, cos.shape[1], 1, W)
        for layer in range(g.layers):
            for part in ("key", "value"):
                shapes[f"past_{part}_{layer}"] = (1, g.kv_heads * g.head_dim, 1, M)
                shapes[f"present_{part}_{layer}"] = (1, g.kv_heads * g.head_dim, 1, W)
        if R < W:
            shapes["select"] = (1, 1, W, 1)
        shapes |= {f"logits_{piece}": (1, size, 1, R) for piece, size in enumerate(self.head)}
        return {**shapes, **{f"hidden_{layer}": (1, g.hidden_size, 1, W) for layer in g.hidden_layers}}

    def _state_tensors(self) -> dict[str, tuple[int | None, ...]]:
        g, M = self.graph, self.graph.max_context
        shapes: dict[str, tuple[int | None, ...]] = {"tokens": (1, None), "begin": (1,)}
        for kind, (cos, _) in self.rope.items():
            shapes[f"cos_{kind}"] = shapes[f"sin_{kind}"] = (None, cos.shape[1])
        shapes |= {f"mask_{name}": (1, 1, None, M) for name in g.masks}
        for layer in range(g.layers):
            shapes[f"keys_{layer}"] = shapes[f"values_{layer}"] = (1, g.kv_heads, M, g.head_dim)
        if self.most_rows is not None:
            shapes["rows"] = (None,)
        shapes["logits"] = (1, None, g.vocab_size)
        return {**shapes, **{f"hidden_{layer}": (1, None, g.hidden_size) for layer in g.hidden_layers}}


class SplitRunner:
    """Runs the function of the smallest width that holds the tokens, over a cache that the host keeps.

    A wide function returns the logits of one row; where more are asked for, it runs again for each.
    """

    def __init__(
        self, meta: CoreMLMeta, program: Program, embedding: EmbeddingTable | HalfTable | None
    ) -> None:
        if embedding is None:
            raise BackendError(
                "the graph has no embedding file, which the host needs; export the bundle again"
            )
        self.meta, self.program, self.embedding = meta, program, embedding
        g = meta.graph
        shape = (1, g.kv_heads * g.head_dim, 1, g.max_context)
        names = [f"past_{part}_{layer}" for layer in range(g.layers) for part in ("key", "value")]
        self.cache: dict[str, HalfArray] = {name: np.zeros(shape, np.float16) for name in names}
        self._inputs: dict[int, dict[str, HalfArray]] = {}  # width -> what a call is given, the cache aside
        self._last: Arrays = {}  # outputs of the last forward

    def run(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        """Logits [R, V] and hidden states [S, D] of each exported layer; `positions` of cache and tokens."""
        S = len(tokens)
        W = next(width for width in self.meta.widths if width >= S)
        inputs = self._filled(W, tokens, positions, mask)
        if self.meta.rows[W] < W:
            found = self._row_by_row(W, inputs, rows)
        else:
            self._call(W, inputs)
            found = self._logits(rows)
        layers = self.meta.graph.hidden_layers
        return found, [np.asarray(self._last[f"hidden_{n}"][0, :, 0, :S].T, np.float32) for n in layers]

    def _filled(
        self, W: int, tokens: IntArray, positions: IntArray, mask: BoolArray | None
    ) -> dict[str, HalfArray]:
        """Padding repeats the last token, and sees only itself."""
        g, S = self.meta.graph, len(tokens)
        inputs = self._inputs_of(W)
        padded = np.minimum(np.arange(W), S - 1)
        inputs["x"][0, :, 0] = self.embedding.rows(tokens)[padded].T
        where = positions[-S:][padded]
        for kind, (cos, sin) in self.meta.rope.items():
            inputs[f"cos_{kind}"][0, :, 0], inputs[f"sin_{kind}"][0, :, 0] = cos[where].T, sin[where].T
        for name in g.masks:
            window = g.sliding_window if name == "sliding" else None
            allowed = visible_columns(mask, positions, S, window)
            masked = np.float16(self.meta.masked)
            levels = np.where(allowed, np.float16(0), masked)
            fill_static_mask(inputs[f"mask_{name}"][0, :, 0].T, levels, masked)
        return inputs

    def _inputs_of(self, W: int) -> dict[str, HalfArray]:
        """The same arrays for a width every time."""
        if W not in self._inputs:
            given = ("x", "mask", "cos", "sin", "select")
            self._inputs[W] = {
                name: np.zeros(shape, np.float16)  # type: ignore[arg-type]
                for name, shape in self.meta.tensors(W).items()
                if name.split("_")[0] in given
            }
        return self._inputs[W]

    def _row_by_row(self, W: int, inputs: dict[str, HalfArray], rows: IntArray) -> Float32Array:
        found = np.empty((len(rows), self.meta.graph.vocab_size), np.float32)
        for index, row in enumerate(rows if len(rows) else [0]):
            inputs["select"][:] = 0
            inputs["select"][0, 0, row, 0] = 1
            self._call(W, inputs)
            if len(rows):
                found[index] = self._logits(np.zeros(1, np.int64))[0]
        return found

    def _call(self, W: int, inputs: dict[str, HalfArray]) -> None:
        self._last = self.program.run(self.meta.functions[W], {**inputs, **self.cache})

    def _logits(self, rows: IntArray) -> Float32Array:
        """[R, V] of these rows of the last call."""
        found = np.empty((len(rows), self.meta.graph.vocab_size), np.float32)
        begin = 0
        for piece, size in enumerate(self.meta.head):
            found[:, begin : begin + size] = self._last[f"logits_{piece}"][0, :, 0][:, rows].T
            begin += size
        return found

    def commit(self, length: int, rows: IntArray) -> None:
        """Copy the kept rows into the cache."""
        for name, past in self.cache.items() if len(rows) else ():
            past[..., length : length + len(rows)] = self._last[name.replace("past", "present")][..., rows]

    def close(self) -> None:
        """Let go of the package and the cache."""
        self._last, self.cache = {}, {}
        self._inputs.clear()
        self.program.close()


@dataclass(frozen=True)
class Forward:
    """One call: `count` tokens from `start` on, padded to `width`."""

    start: int
    count: int
    width: int


def forwards(S: int, room: int, widths: Sequence[int]) -> Iterator[Forward]:
    """Calls that run S tokens where the cache has `room` rows left: one, except near the end of the cache.

    A call writes all its rows, padding too, so there the tokens go in widths that fit without any.
    Raises ContextError where none does.
    """
    start = 0
    while start < S:
        left = S - start
        whole = next((width for width in widths if left <= width <= room - start), None)
        if not widths:
            whole = left
        if whole is not None:
            yield Forward(start, left, whole)
            return
        part = max((width for width in widths if width <= min(left, room - start)), default=None)
        if part is None:
            raise ContextError(
                f"{room - start} rows of the cache are left; the smallest width of this graph is {min(widths)}"
            )
        yield Forward(start, part, part)
        start += part


class StateRunner:
    """Runs the one function, which writes the rows of its tokens into its own states."""

    def __init__(
        self, meta: CoreMLMeta, program: Program, embedding: EmbeddingTable | HalfTable | None
    ) -> None:
        self.meta, self.program = meta, program
        self._last: tuple[IntArray, IntArray, BoolArray | None] | None = None

    def run(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        """Logits [R, V] and hidden states [S, D] of each exported layer; `positions` of cache and tokens."""
        S, g = len(tokens), self.meta.graph
        if not 0 <= tokens.min() <= tokens.max() < self.meta.known_ids:
            raise ValueError(
                f"token ids {tokens.min()} to {tokens.max()} were given; the embedding has {self.meta.known_ids} rows"
            )
        self._last = (tokens, positions.copy(), mask)
        found = np.empty((len(rows), g.vocab_size), np.float32)
        states: list[list[Float32Array]] = [[] for _ in g.hidden_layers]
        for part in forwards(S, g.max_context - len(positions) + S, self.meta.widths):
            inside = (rows >= part.start) & (rows < part.start + part.count)
            outputs, logits = self._call(part, tokens, positions, mask, rows[inside] - part.start)
            found[inside] = logits
            for layer, kept in zip(g.hidden_layers, states, strict=True):
                kept.append(np.asarray(outputs[f"hidden_{layer}"][0, : part.count], np.float32))
        return found, [np.concatenate(kept) for kept in states]

    def _call(
        self, part: Forward, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Arrays, Float32Array]:
        """Outputs, and logits of these rows of the part; more rows than a call takes are got by calling again."""
        inputs = self._inputs(part, tokens, positions, mask)
        if self.meta.most_rows is None:
            outputs = self.program.run(STATE_FUNCTION, inputs)
            return outputs, np.asarray(outputs["logits"][0, rows], np.float32)
        asked = (
            rows if len(rows) else np.zeros(1, np.int64)
        )  # a head over no rows is not what Core ML expects
        pieces = []
        for begin in range(0, len(asked), self.meta.most_rows):
            inputs["rows"] = asked[begin : begin + self.meta.most_rows].astype(np.int32)
            outputs = self.program.run(STATE_FUNCTION, inputs)
            pieces.append(np.asarray(outputs["logits"][0], np.float32))
        return outputs, np.concatenate(pieces)[: len(rows)]

    def _inputs(
        self, part: Forward, tokens: IntArray, positions: IntArray, mask: BoolArray | None
    ) -> dict[str, NDArray[Any]]:
        g, S = self.meta.graph, len(tokens)
        P = len(positions) - S
        begin = P + part.start
        taken = part.start + np.minimum(np.arange(part.width), part.count - 1)
        inputs: dict[str, NDArray[Any]] = {
            "tokens": tokens[taken][None].astype(np.int32),
            "begin": np.array([begin], np.int32),
        }
        for kind, (cos, sin) in self.meta.rope.items():
            inputs[f"cos_{kind}"], inputs[f"sin_{kind}"] = (
                cos[positions[P + taken]],
                sin[positions[P + taken]],
            )
        end = part.start + part.count
        for name in g.masks:
            window = g.sliding_window if name == "sliding" else None
            allowed = visible_columns(mask, positions, S, window)[part.start : end, : P + end]
            full = np.full((1, 1, part.width, g.max_context), self.meta.masked, np.float16)
            full[0, 0, : part.count, : P + end][allowed] = 0
            padding = np.arange(part.count, part.width)
            full[0, 0, padding, begin + padding] = 0
            inputs[f"mask_{name}"] = full
        return inputs

    def commit(self, length: int, rows: IntArray) -> None:
        """Rows stay where they are; those that are not the first ones are run again without the others."""
        if np.array_equal(rows, np.arange(len(rows))):
            return
        assert self._last is not None
        tokens, positions, mask = self._last
        seen = np.tri(len(tokens), dtype=np.bool_) if mask is None else mask
        if seen[rows].sum() != seen[np.ix_(rows, rows)].sum():
            raise ValueError(
                f"rows {rows.tolist()} are not whole paths from a root; this graph can keep no others"
            )
        kept = np.concatenate([positions[:length], positions[length + rows]])
        self.run(tokens[rows], kept, seen[np.ix_(rows, rows)], np.zeros(0, np.int64))

    def close(self) -> None:
        """Let go of the package."""
        self.program.close()


RUNNERS: dict[str, type[SplitRunner] | type[StateRunner]] = {"split": SplitRunner, "state": StateRunner}
"""Profile -> what runs its packages."""
