"""Runs `inplace` graphs of chains: cache, logits and hidden states live in the memory of the device that computes them.

Tokens go there, and what was asked for comes back: whole rows of logits, or only the largest of each, which the graph
picks out itself. On the CPU's provider all of it works the same, in the memory of the host.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from outrider.contracts import BoolArray, Float32Array, IntArray, TopRows
from outrider.targets.graph_meta import GraphMeta
from outrider.targets.onnx_session import Sessions

__all__ = ["PADDING", "DeviceRunner"]

MEMORY = {"CUDAExecutionProvider": "cuda"}  # provider -> where its tensors are; others: the host's
PADDING = 1  # rows that attention in an `inplace` graph reads beyond the tokens; see export/onnx_parts.py
LOGITS = ("logits",)
REDUCED = ("top_ids", "top_values", "logsumexp")
Found = dict[str, NDArray[Any]]  # output -> [R, ...], of hidden states [S, D]


class DeviceRunner:
    """Runs chains at once and trees path by path, over a cache that stays bound."""

    def __init__(self, meta: GraphMeta, sessions: Sessions) -> None:
        self.meta, self.top, self.session = meta, meta.top, sessions.get(None)
        self.memory = MEMORY.get(sessions.providers[0], "cpu")
        self.hidden = tuple(f"hidden_{layer}" for layer in meta.hidden_layers)
        shape = (1, meta.kv_heads, meta.max_context + PADDING, meta.head_dim)
        self.cache = {
            f"{part}_{layer}": ort.OrtValue.ortvalue_from_numpy(
                np.zeros(shape, meta.cache_dtype), self.memory, 0
            )
            for layer in range(meta.layers)
            for part in ("key", "value")
        }
        self._bindings: dict[tuple[str, ...], Any] = {}
        self._last: tuple[IntArray, bool] = (np.zeros(0, np.int64), True)  # tokens, and whether a chain

    def run(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        """Logits [R, V] and hidden states [S, D] of each exported layer; `positions` of cache and tokens."""
        found = self._run(tokens, positions, mask, rows, LOGITS)
        return found["logits"], [found[name] for name in self.hidden]

    def run_top(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, n: int
    ) -> tuple[TopRows, list[Float32Array]]:
        """The n <= `top` largest logits of every row, and hidden states; no whole row leaves the device."""
        found = self._run(tokens, positions, mask, np.arange(len(tokens)), REDUCED)
        ids, values = found["top_ids"], found["top_values"]
        order = np.lexsort((ids, -values))[:, :n]  # a device may order equals as it likes
        ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
        return TopRows(ids, values, found["logsumexp"]), [found[name] for name in self.hidden]

    def commit(self, length: int, rows: IntArray) -> None:
        """Keep these rows of the last forward: those of a chain's beginning are in place, others run again."""
        tokens, chain = self._last
        if not len(rows) or (chain and np.array_equal(rows, np.arange(len(rows)))):
            return
        self._forward(tokens[rows], length, np.zeros(0, np.int64), ())

    def close(self) -> None:
        """Release the bindings, the cache and the session."""
        self._bindings.clear()
        self.cache.clear()
        self.session = None

    def _run(
        self,
        tokens: IntArray,
        positions: IntArray,
        mask: BoolArray | None,
        rows: IntArray,
        wanted: tuple[str, ...],
    ) -> Found:
        S, length = len(tokens), len(positions) - len(tokens)
        self._last = (tokens.copy(), mask is None)
        visible = np.tri(S, dtype=np.bool_) if mask is None else mask
        paths = [np.arange(S)] if mask is None else leaf_paths(mask)
        refuse_gaps(visible, positions, paths)
        if len(paths) == 1:
            return self._forward(tokens, length, rows, (*wanted, *self.hidden))
        everything: Found = {}
        for path in paths:
            part = self._forward(tokens[path], length, np.arange(len(path)), (*wanted, *self.hidden))
            for name, values in part.items():
                whole = everything.setdefault(name, np.zeros((S, *values.shape[1:]), values.dtype))
                whole[path] = values
        return {name: values if name in self.hidden else values[rows] for name, values in everything.items()}

    def _forward(self, tokens: IntArray, length: int, rows: IntArray, outputs: tuple[str, ...]) -> Found:
        """Run a chain behind `length` rows of the cache."""
        S = len(tokens)
        asked = rows if len(rows) else np.array([S - 1])  # nothing over no rows: not every kernel takes it
        total = length + S + PADDING
        inputs = {
            "tokens": tokens[None],
            "rows": asked,
            "seqlens_k": np.array([total - 1], np.int32),
            "total": np.array(total, np.int32),
        }
        binding = self._binding(outputs)
        for name, values in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(values))
        for name in outputs:
            binding.bind_output(name, self.memory)  # anew: what the last run left there has its shape
        self.session.run_with_iobinding(binding)
        values = binding.get_outputs()[len(self.cache) :]
        found = {name: value.numpy()[0] for name, value in zip(outputs, values, strict=True)}
        return {name: value if name in self.hidden else value[: len(rows)] for name, value in found.items()}

    def _binding(self, outputs: tuple[str, ...]) -> Any:
        """A binding of the cache, for runs with these outputs."""
        if outputs not in self._bindings:
            binding = self.session.io_binding()
            for name, value in self.cache.items():
                binding.bind_ortvalue_input(f"past_{name}", value)
                binding.bind_ortvalue_output(f"present_{name}", value)
            self._bindings[outputs] = binding
        return self._bindings[outputs]


def leaf_paths(mask: BoolArray) -> list[IntArray]:
    """For every row that no other sees, the rows that it sees, itself last. [S, S] -> [[P], ...]"""
    seen = mask & ~np.eye(len(mask), dtype=np.bool_)
    return [cast(IntArray, np.flatnonzero(mask[row])) for row in np.flatnonzero(~seen.any(axis=0))]


def refuse_gaps(visible: BoolArray, positions: IntArray, paths: list[IntArray]) -> None:
    """Raise ValueError for what such a graph cannot run: positions with gaps, and masks that are no trees."""
    S = len(visible)
    length = len(positions) - S
    new = positions[length:]
    if not np.array_equal(positions[:length], np.arange(length)) or any(
        not np.array_equal(new[path], np.arange(length, length + len(path))) for path in paths
    ):
        raise ValueError(
            f"this graph knows positions by itself: {new.tolist()} do not follow from {length} rows of the cache; "
            "export the graph of the CPU for such positions"
        )
    for path in paths:
        if not np.array_equal(visible[np.ix_(path, path)], np.tri(len(path), dtype=np.bool_)):
            raise ValueError("this graph runs trees only: a row must see just its ancestors and itself")
