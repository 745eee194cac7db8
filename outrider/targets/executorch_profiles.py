"""How the two ExecuTorch profiles run a forward: inputs in the order of the program, and where rows go.

`BufferRunner` drives a program that keeps keys and values in buffers of its own and writes them in place;
`SplitRunner` one with a method for each static width, which reads a cache that the host holds.
S tokens, T committed rows and tokens, M rows of the cache, W columns of a static width, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.contracts import BoolArray, Float32Array, IntArray
from outrider.errors import BackendError
from outrider.targets.executorch_shim.program import TensorSpec
from outrider.targets.graph_meta import GraphMeta
from outrider.targets.masks import MASKED, additive_mask, fill_static_mask
from outrider.targets.rope_table import rope_table

__all__ = ["RUNNERS", "BufferRunner", "Program", "SplitRunner", "described"]

Inputs = dict[str, NDArray[Any]]


class Program(Protocol):
    """A loaded .pte: `executorch_shim.program.ShimProgram` or `executorch_torch.TorchProgram`."""

    runtime: str

    def methods(self) -> tuple[str, ...]:
        """Every method's name."""
        ...

    def tensors(self, method: str) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """dtype and largest sizes of the inputs and outputs of a method."""
        ...

    def load(self, method: str) -> None:
        """Prepare a method."""
        ...

    def run(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Run a method."""
        ...

    def buffer(self, method: str, name: str) -> Float32Array | None:
        """The memory of a mutable buffer, where it can be reached."""
        ...

    def close(self) -> None:
        """Let go of the program."""
        ...


class BufferRunner:
    """Runs a `forward` that writes the rows of its tokens into its own cache, at the slots it is told."""

    METHOD = "forward"

    def __init__(self, meta: GraphMeta, options: Mapping[str, Any], program: Program) -> None:
        self.meta, self.program = meta, program
        self._inputs = input_names(options, self.METHOD) or buffer_inputs(meta)
        program.load(self.METHOD)
        names = options.get("cache", [f"{part}_{n}" for n in range(meta.layers) for part in ("key", "value")])
        self._cache = [program.buffer(self.METHOD, name) for name in names]  # each [1, G, M, d] or None
        self._check_cache()
        self.in_reach = all(part is not None for part in self._cache)
        self._last: tuple[IntArray, IntArray, BoolArray | None] | None = None

    def run(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        """Logits [R, V] and hidden states [S, D] of each exported layer; `positions` of cache and tokens."""
        S, T = len(tokens), len(positions)
        self._last = (tokens, positions.copy(), mask)
        asked = rows if len(rows) else np.array([S - 1])  # a head over no rows is not what delegates expect
        values: Inputs = {
            "tokens": tokens[None],
            "slots": np.arange(T - S, T),
            "positions": positions[-S:].copy(),
            "rows": np.ascontiguousarray(asked),
        }
        for name in self.meta.masks:
            full = values[f"mask_{name}"] = np.full((1, 1, S, self.meta.max_context), MASKED)
            window = self.meta.sliding_window if name == "sliding" else None
            full[0, 0, :, :T] = additive_mask(mask, positions, S, window)
        logits, *states = self.program.run(self.METHOD, [values[name] for name in self._inputs])
        return logits[0, : len(rows)], [state[0] for state in states]

    def _check_cache(self) -> None:
        shape = (1, self.meta.kv_heads, self.meta.max_context, self.meta.head_dim)
        for part in self._cache:
            if part is not None and part.shape != shape:
                raise BackendError(
                    f"the program's cache has the shape {part.shape}, the manifest says {shape}; they do not "
                    "belong together: export the bundle again"
                )

    def commit(self, length: int, rows: IntArray) -> None:
        """Move the kept rows together; where the cache cannot be reached, run the kept path again."""
        if np.array_equal(rows, np.arange(len(rows))):
            return
        if not self.in_reach:
            self._run_again(length, rows)
            return
        for part in self._parts():
            part[:, :, length : length + len(rows)] = part[:, :, length + rows]

    def _parts(self) -> list[Float32Array]:
        return [part for part in self._cache if part is not None]

    def rows(self, start: int, end: int) -> list[Float32Array]:
        """A copy of these rows of every key and value, each [1, G, n, d]."""
        return [part[:, :, start:end].copy() for part in self._parts()]

    def put(self, start: int, rows: list[Float32Array]) -> None:
        """Write them back."""
        for part, kept in zip(self._parts(), rows, strict=True):
            part[:, :, start : start + kept.shape[2]] = kept

    def _run_again(self, length: int, rows: IntArray) -> None:
        """Whole paths give the same rows when they are alone; other selections would not."""
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
        """Let go of the program and the views of its cache."""
        self._cache = []
        self.program.close()


class SplitRunner:
    """Runs the method of the smallest width that holds the tokens, over a cache that the host keeps."""

    in_reach = True

    def __init__(self, meta: GraphMeta, options: Mapping[str, Any], program: Program) -> None:
        self.meta, self.program = meta, program
        self._orders = {
            W: input_names(options, method_of(W)) or split_inputs(meta, options) for W in widths(meta)
        }
        self._rope = {kind: rope_table(record, meta.max_context) for kind, record in options["rope"].items()}
        self._token_dtype = str(options.get("token_dtype", "int64"))
        shape = (2 * meta.layers, 1, meta.kv_heads, meta.max_context, meta.head_dim)
        self.cache: Float32Array = np.zeros(shape, np.float32)
        names = [f"past_{part}_{n}" for n in range(meta.layers) for part in ("key", "value")]
        self._past: Inputs = dict(zip(names, self.cache, strict=True))
        self._present: list[Float32Array] = []  # new rows of the last forward, each [1, G, W, d]
        self._buffers: dict[tuple[str, int], NDArray[Any]] = {}

    def run(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        """Logits [R, V] and hidden states [S, D] of each exported layer; `positions` of cache and tokens."""
        S = len(tokens)
        W = next(width for width in widths(self.meta) if width >= S)
        values: Inputs = {"tokens": self._buffer("tokens", W, (1, W), self._token_dtype)}
        values["tokens"][0] = 0
        values["tokens"][0, :S] = tokens
        for kind, tables in self._rope.items():
            for part, table in zip(("cos", "sin"), tables, strict=True):
                turned = self._buffer(f"{part}_{kind}", W, (1, 1, W, table.shape[1]), "float32")
                turned[0, 0, :S] = table[positions[-S:]]
                values[f"{part}_{kind}"] = turned
        for name in self.meta.masks:
            window = self.meta.sliding_window if name == "sliding" else None
            filled = self._buffer(f"mask_{name}", W, (1, 1, W, self.meta.max_context + W), "float32")
            fill_static_mask(filled[0, 0], additive_mask(mask, positions, S, window))
            values[f"mask_{name}"] = filled
        values |= self._past
        logits, *rest = self.program.run(method_of(W), [values[name] for name in self._orders[W]])
        count = len(self.meta.hidden_layers)
        states, self._present = rest[:count], rest[count:]
        found = logits[0, :S]
        every = len(rows) == S and np.array_equal(rows, np.arange(S))
        return found if every else found[rows], [state[0, :S] for state in states]

    def commit(self, length: int, rows: IntArray) -> None:
        """Copy the kept rows into the cache."""
        for past, present in zip(self.cache, self._present, strict=True):
            past[:, :, length : length + len(rows)] = present[:, :, rows]

    def rows(self, start: int, end: int) -> Float32Array:
        """A copy of these rows of the cache, [2 L, 1, G, n, d]."""
        return self.cache[:, :, :, start:end].copy()

    def put(self, start: int, rows: Float32Array) -> None:
        """Write them back."""
        self.cache[:, :, :, start : start + rows.shape[3]] = rows

    def close(self) -> None:
        """Let go of the program and the cache."""
        self._present, self._past, self._buffers = [], {}, {}
        self.cache = np.zeros(0, self.cache.dtype)  # a view would keep all of it
        self.program.close()

    def _buffer(self, name: str, W: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """The same array for a name and width every time, so that nothing is bound anew."""
        if (name, W) not in self._buffers:
            self._buffers[name, W] = np.zeros(shape, dtype)
        return self._buffers[name, W]


RUNNERS: dict[str, type[BufferRunner] | type[SplitRunner]] = {"buffer": BufferRunner, "split": SplitRunner}
"""Profile -> what runs its programs."""


def described(program: Program, meta: GraphMeta, options: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a program says about itself; names are those of `GraphMeta`.

    Raises BackendError when a method is missing or takes another number of tensors than the manifest says.
    """
    static = meta.profile == "split"
    names = [method_of(width) for width in widths(meta)] if static else [BufferRunner.METHOD]
    there = program.methods()
    missing = [name for name in names if name not in there]
    if missing:
        raise BackendError(
            f"{path} has no method {missing[0]!r}; it has {', '.join(there)}: export the bundle again"
        )
    inputs, outputs = program.tensors(names[-1])
    order = input_names(options, names[-1]) or (
        split_inputs(meta, options) if static else buffer_inputs(meta)
    )
    expected = 1 + len(meta.hidden_layers) + (2 * meta.layers if static else 0)
    for what, found, said in (("inputs", len(inputs), len(order)), ("outputs", len(outputs), expected)):
        if found != said:
            raise BackendError(
                f"{path}: method {names[-1]!r} has {found} {what}, the manifest says {said}; they do not belong "
                "together: export the bundle again"
            )
    shapes = {name: shape for name, (_, shape) in zip(order, inputs, strict=True)}
    sizes: dict[str, Any] = {"vocab_size": outputs[0][1][-1]}
    if meta.hidden_layers:
        sizes["hidden_size"] = outputs[1][1][-1]
    cache = shapes.get("past_key_0")
    if cache is not None:
        sizes |= {"kv_heads": cache[1], "max_context": cache[2], "head_dim": cache[3]}
    elif meta.masks:
        sizes["max_context"] = shapes[f"mask_{meta.masks[0]}"][-1]
    return sizes


def method_of(width: int) -> str:
    """The name of the method of a static width."""
    return f"forward_w{width}"


def widths(meta: GraphMeta) -> tuple[int, ...]:
    """The static widths, ascending."""
    if not meta.widths:
        raise BackendError("the description of a split graph names no widths; export the bundle again")
    return tuple(sorted(meta.widths))


def input_names(options: Mapping[str, Any], method: str) -> list[str]:
    """The inputs of a method in order, as the manifest has them; empty when it has not."""
    return list(options.get("methods", {}).get(method, {}).get("inputs", ()))


def buffer_inputs(meta: GraphMeta) -> list[str]:
    """The inputs of a `buffer` program when nothing else is said."""
    return ["tokens", "slots", "positions", "rows", *(f"mask_{name}" for name in meta.masks)]


def split_inputs(meta: GraphMeta, options: Mapping[str, Any]) -> list[str]:
    """The inputs of a `split` method when nothing else is said."""
    rope = [f"{part}_{kind}" for kind in options["rope"] for part in ("cos", "sin")]
    past = [f"past_{part}_{n}" for n in range(meta.layers) for part in ("key", "value")]
    return ["tokens", *rope, *(f"mask_{name}" for name in meta.masks), *past]
