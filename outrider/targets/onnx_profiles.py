"""How the two ONNX profiles run a forward: buffers, masks, bindings, and where committed rows go.

`InplaceRunner` keeps keys and values in one buffer per layer that is past and present at once. `SplitRunner`
reads a cache of static length and gets only new rows, which it copies when they are committed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from outrider.contracts import BoolArray, Float32Array, IntArray
from outrider.targets.graph_meta import GraphMeta
from outrider.targets.masks import additive_mask, fill_static_mask
from outrider.targets.onnx_device import PADDING, DeviceRunner
from outrider.targets.onnx_session import Sessions

__all__ = ["RUNNERS", "InplaceRunner", "SplitRunner", "runner_of"]


class Buffers:
    """Flat buffers that grow, and OrtValues over their beginnings by shape."""

    def __init__(self) -> None:
        self._flat: dict[str, NDArray[Any]] = {}
        self._views: dict[tuple[str, tuple[int, ...]], tuple[NDArray[Any], Any]] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: Any) -> tuple[NDArray[Any], Any]:
        """An array of this shape and the OrtValue that shares its memory."""
        found = self._views.get((name, shape))
        if found is None:
            size = max(1, int(np.prod(shape)))
            flat = self._flat.get(name)
            if flat is None or flat.size < size:
                flat = self._flat[name] = np.zeros(size, dtype)
                self._views = {key: value for key, value in self._views.items() if key[0] != name}
            view = flat[: int(np.prod(shape))].reshape(shape)
            found = self._views[name, shape] = (view, ort.OrtValue.ortvalue_from_numpy(view))
        return found


class InplaceRunner:
    """Runs GroupQueryAttention graphs through one IO binding whose cache buffers stay bound."""

    in_reach = True

    def __init__(self, meta: GraphMeta, sessions: Sessions) -> None:
        self.meta, self.buffers, self.cache = meta, Buffers(), empty_cache(meta, meta.max_context + PADDING)
        self.session = sessions.get(None)
        self.binding = self.session.io_binding()
        self._bound: dict[str, tuple[int, ...]] = {}
        self._masks: dict[str, Float32Array] = {}  # kept alive while they are bound
        self._zeros = np.zeros(0, np.float32)
        self._seqlens, seqlens = self.buffers.get("seqlens_k", (1,), np.int32)
        self._total, total = self.buffers.get("total", (), np.int32)
        self.binding.bind_ortvalue_input("seqlens_k", seqlens)
        self.binding.bind_ortvalue_input("total", total)
        for name, array in zip(cache_names(meta.layers), self.cache, strict=True):
            value = ort.OrtValue.ortvalue_from_numpy(array)
            self.binding.bind_ortvalue_input(f"past_{name}", value)
            self.binding.bind_ortvalue_output(f"present_{name}", value)

    def run(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        """Logits [R, V] and hidden states [S, D] of each exported layer; `positions` of cache and tokens."""
        S = len(tokens)
        if len(positions) == S and not _contiguous(positions):
            return self._run_from_empty(tokens, positions, mask, rows)
        return self._run(tokens, positions, mask, rows)

    def _run_from_empty(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        """The operator ignores position ids on an empty cache, so the first row goes ahead alone."""
        early, late = np.flatnonzero(rows == 0), np.flatnonzero(rows > 0)
        root, states = self._run(tokens[:1], positions[:1], None, np.zeros(1, np.int64))
        root, states = root.copy(), [state.copy() for state in states]
        visible = np.tri(len(tokens), dtype=np.bool_) if mask is None else mask
        rest, more = self._run(tokens[1:], positions, visible[1:], rows[late] - 1)
        logits = np.empty((len(rows), self.meta.vocab_size), np.float32)
        logits[early], logits[late] = root, rest
        return logits, [np.concatenate(pair) for pair in zip(states, more, strict=True)]

    def _run(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        S, T, R = len(tokens), len(positions) + PADDING, len(rows)
        self._seqlens[0] = T - 1
        self._total[...] = T
        self._input("tokens", (1, S), np.int64)[0] = tokens
        seen = self._input("positions", (1, S + PADDING), np.int64)[0]
        seen[:S], seen[S:] = positions[-S:], positions[-1] + 1
        self._input("rows", (R,), np.int64)[:] = rows
        for name in self.meta.masks:
            self._mask(name, positions, S, mask)
        logits = self._output("logits", (1, R, self.meta.vocab_size))
        states = [
            self._output(f"hidden_{layer}", (1, S, self.meta.hidden_size))[0]
            for layer in self.meta.hidden_layers
        ]
        self.session.run_with_iobinding(self.binding)
        return logits[0], states

    def _mask(self, name: str, positions: IntArray, S: int, visible: BoolArray | None) -> None:
        """Bind the additive mask; a chain adds nothing to the operator's own causal mask."""
        window = self.meta.sliding_window if name == "sliding" else None
        shape = (S + PADDING, len(positions) + PADDING)
        if visible is None and (window is None or positions[-S:].max() - positions.min() < window):
            mask = self._zeros = grown(self._zeros, shape[0] * shape[1])
        else:
            mask = self._masks[name] = np.zeros(shape, np.float32)  # the operator is causal: padding is last
            mask[:S, :-PADDING] = additive_mask(visible, positions, S, window)
        self.binding.bind_input(f"mask_{name}", "cpu", 0, np.float32, [1, 1, *shape], mask.ctypes.data)

    def _input(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        array, value = self.buffers.get(name, shape, dtype)
        if self._bound.get(name) != shape:
            self.binding.bind_ortvalue_input(name, value)
            self._bound[name] = shape
        return array

    def _output(self, name: str, shape: tuple[int, ...]) -> Float32Array:
        array, value = self.buffers.get(name, shape, np.float32)
        if self._bound.get(name) != shape:
            self.binding.bind_ortvalue_output(name, value)
            self._bound[name] = shape
        return array

    def commit(self, length: int, rows: IntArray) -> None:
        """Move the kept rows together; a contiguous commit moves nothing."""
        if not np.array_equal(rows, np.arange(len(rows))):
            self.cache[:, :, :, length : length + len(rows)] = self.cache[:, :, :, length + rows]

    def rows(self, start: int, end: int) -> NDArray[Any]:
        """A copy of these rows of the cache, [2 L, 1, G, n, d]."""
        return self.cache[:, :, :, start:end].copy()

    def put(self, start: int, rows: NDArray[Any]) -> None:
        """Write them back."""
        self.cache[:, :, :, start : start + rows.shape[3]] = rows

    def close(self) -> None:
        """Release the binding and the session."""
        self.binding = self.session = None
        self.buffers, self.cache = Buffers(), np.zeros(0, np.float32)  # a view would keep all of it


class SplitRunner:
    """Runs graphs that read a cache of static length and return only the new rows."""

    in_reach = True

    def __init__(self, meta: GraphMeta, sessions: Sessions) -> None:
        self.meta, self.sessions, self.buffers = meta, sessions, Buffers()
        self.cache = empty_cache(meta, meta.max_context)
        self.values = [ort.OrtValue.ortvalue_from_numpy(array) for array in self.cache]
        self.present = self.cache[:, :, :, :0]  # new rows of the last forward

    def run(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        """Logits [R, V] and hidden states [S, D] of each exported layer; `positions` of cache and tokens."""
        S, R = len(tokens), len(rows)
        assert self.meta.widths is not None
        W = next(width for width in self.meta.widths if width >= S)
        slots = (W if R > 1 else 1) if self.sessions.static else R
        session, binding = self._bind(W, slots)
        for name, values in {"tokens": tokens, "positions": positions[-S:]}.items():
            array, _ = self.buffers.get(name, (1, W), np.int64)
            array[:] = 0
            array[0, :S] = values
        array, _ = self.buffers.get("rows", (slots,), np.int64)
        array[:] = 0
        array[:R] = rows
        for name in self.meta.masks:
            array, _ = self.buffers.get(f"mask_{name}", (1, 1, W, self.meta.max_context + W), np.float32)
            window = self.meta.sliding_window if name == "sliding" else None
            fill_static_mask(array[0, 0], additive_mask(mask, positions, S, window))
        session.run_with_iobinding(binding)
        logits, _ = self.buffers.get("logits", (1, slots, self.meta.vocab_size), np.float32)
        shape = (1, W, self.meta.hidden_size)
        states = [self.buffers.get(f"hidden_{n}", shape, np.float32)[0] for n in self.meta.hidden_layers]
        return logits[0, :R], [state[0, :S] for state in states]

    def _bind(self, W: int, R: int) -> tuple[Any, Any]:
        """The session for a width and a number of logits rows, with everything bound to our buffers."""
        session = self.sessions.get((W, R))
        binding = session.io_binding()
        m = self.meta
        inputs = {"tokens": (1, W), "positions": (1, W), "rows": (R,)}
        for name, shape in inputs.items():
            binding.bind_ortvalue_input(name, self.buffers.get(name, shape, np.int64)[1])
        for name in m.masks:
            value = self.buffers.get(f"mask_{name}", (1, 1, W, m.max_context + W), np.float32)[1]
            binding.bind_ortvalue_input(f"mask_{name}", value)
        outputs: dict[str, tuple[int, ...]] = {"logits": (1, R, m.vocab_size)}
        outputs |= {f"hidden_{layer}": (1, W, m.hidden_size) for layer in m.hidden_layers}
        for name, shape in outputs.items():
            binding.bind_ortvalue_output(name, self.buffers.get(name, shape, np.float32)[1])
        shape = (2 * m.layers, 1, m.kv_heads, W, m.head_dim)
        self.present, _ = self.buffers.get("present", shape, np.float32)
        for index, name in enumerate(cache_names(m.layers)):
            binding.bind_ortvalue_input(f"past_{name}", self.values[index])
            rows = ort.OrtValue.ortvalue_from_numpy(self.present[index])
            binding.bind_ortvalue_output(f"present_{name}", rows)
        return session, binding

    def commit(self, length: int, rows: IntArray) -> None:
        """Copy the kept rows into the cache."""
        self.cache[:, :, :, length : length + len(rows)] = self.present[:, :, :, rows]

    def rows(self, start: int, end: int) -> NDArray[Any]:
        """A copy of these rows of the cache, [2 L, 1, G, n, d]."""
        return self.cache[:, :, :, start:end].copy()

    def put(self, start: int, rows: NDArray[Any]) -> None:
        """Write them back."""
        self.cache[:, :, :, start : start + rows.shape[3]] = rows

    def close(self) -> None:
        """Release the buffers."""
        self.values.clear()
        self.buffers = Buffers()
        self.cache = self.present = np.zeros(0, np.float32)


RUNNERS: dict[str, type[InplaceRunner] | type[SplitRunner]] = {
    "inplace": InplaceRunner,
    "split": SplitRunner,
}
"""Profile -> what runs its graphs."""


def runner_of(meta: GraphMeta, sessions: Sessions) -> InplaceRunner | SplitRunner | DeviceRunner:
    """What runs a graph: by its profile, and on the device's memory where it was made for that."""
    return (DeviceRunner if meta.chains else RUNNERS[meta.profile])(meta, sessions)


def empty_cache(meta: GraphMeta, length: int) -> NDArray[Any]:
    """Keys and values of every layer in one array, [2 L, 1, G, length, d], so that a commit is one copy."""
    return np.zeros((2 * meta.layers, 1, meta.kv_heads, length, meta.head_dim), meta.cache_dtype)


def cache_names(layers: int) -> list[str]:
    """The names of the cache tensors in order, without `past_` or `present_`."""
    return [f"{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


def grown(buffer: Float32Array, size: int) -> Float32Array:
    """The buffer, or zeros of twice the size that is needed."""
    return buffer if buffer.size >= size else np.zeros(2 * size, np.float32)


def _contiguous(positions: IntArray) -> bool:
    return bool(np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions))))
