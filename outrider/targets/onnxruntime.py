"""Run exported ONNX graphs with ONNX Runtime.

`inplace` graphs keep keys and values in one buffer per layer that is past and present at once; `split` graphs
read a cache of static length and return only new rows, which the host copies when they are committed.
Needs numpy and onnxruntime only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from outrider.contracts import BoolArray, Float32Array, IntArray, LogitsRequest, Output, TopK, TopRows
from outrider.errors import BackendError, ContextError

__all__ = ["GraphMeta", "OnnxGraph", "top_rows"]

MASKED = np.float32(-1e4)  # exp(-1e4) is 0 in float32, and it also fits float16
CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class GraphMeta:
    """What the manifest says about a graph; `from_json` reads it."""

    profile: str
    widths: tuple[int, ...] | None
    max_context: int
    vocab_size: int
    hidden_size: int
    layers: int
    kv_heads: int
    head_dim: int
    hidden_layers: tuple[int, ...]
    masks: tuple[str, ...]
    sliding_window: int | None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GraphMeta:
        """Read the record; raises BackendError when a field is missing."""
        try:
            return cls(
                profile=str(values["profile"]),
                widths=tuple(values["widths"]) if values["widths"] is not None else None,
                hidden_layers=tuple(values["hidden_layers"]),
                masks=tuple(values["masks"]),
                sliding_window=values["sliding_window"],
                **{name: int(values[name]) for name in SIZES},
            )
        except KeyError as missing:
            raise BackendError(f"the graph's description lacks {missing}; export the bundle again") from None


SIZES = ("max_context", "vocab_size", "hidden_size", "layers", "kv_heads", "head_dim")


class OnnxGraph:
    """A `contracts.Graph` over an ONNX file. Make one with `load`."""

    hidden_layers: tuple[int, ...]

    def __init__(self, meta: GraphMeta, sessions: _Sessions) -> None:
        self.meta, self._sessions = meta, sessions
        self.vocab_size, self.max_context = meta.vocab_size, meta.max_context
        self.widths, self.hidden_layers = meta.widths, meta.hidden_layers
        self._length = 0
        self._pending = 0  # rows of the last forward that can still be committed
        self._positions = np.zeros(meta.max_context, np.int64)  # of committed rows, then of pending ones
        cache = (1, meta.kv_heads, meta.max_context, meta.head_dim)
        self._cache = [np.zeros(cache, np.float32) for _ in range(2 * meta.layers)]
        self._runner: _Inplace | _Split
        self._runner = (_Inplace if meta.profile == "inplace" else _Split)(meta, sessions, self._cache)

    @classmethod
    def load(
        cls,
        path: str | Path,
        meta: Mapping[str, Any],
        *,
        threads: int | None = None,
        providers: Sequence[str] = (CPU,),
        provider_options: Sequence[Mapping[str, str]] | None = None,
        session_options: Mapping[str, str] | None = None,
    ) -> OnnxGraph:
        """Open a graph. `session_options` are ONNX Runtime's configuration entries by name.

        Raises BackendError when the file is missing or damaged, or a provider is not there.
        """
        record = GraphMeta.from_json(meta)
        if record.profile not in ("inplace", "split"):
            raise BackendError(f"{path}: profile {record.profile!r} is not one of ONNX Runtime's")
        sessions = _Sessions(Path(path), threads, providers, provider_options, session_options or {})
        sessions.get((record.widths[0], 1) if record.widths else None)
        return cls(record, sessions)

    @property
    def length(self) -> int:
        """Tokens committed to the KV cache."""
        return self._length

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers that ONNX Runtime uses, by preference."""
        return tuple(self._sessions.get(None).get_providers())

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
        rows = requested_rows(logits, S)
        self._pending = 0
        values, states = self._runner.run(ids, self._positions[: self._length + S], mask, rows)
        self._pending = S
        found = {layer: states[self.hidden_layers.index(layer)] for layer in hidden}
        if isinstance(logits, TopK):
            return Output(top_rows(values, logits.n), found)
        return Output(None if logits == "none" else values, found)

    def commit(self, rows: Sequence[int] | IntArray) -> None:
        """Keep these rows of the last forward, in this order; raises ValueError for rows it did not have."""
        order = np.asarray(rows, dtype=np.int64)
        if order.size and (order.min() < 0 or order.max() >= self._pending):
            raise ValueError(f"rows {order.tolist()} are not among the {self._pending} of the last forward")
        self._runner.commit(self._length, order)
        start, end = self._length, self._length + len(order)
        self._positions[start:end] = self._positions[start + order]
        self._length, self._pending = end, 0

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate to {length}: the cache holds {self._length} tokens")
        self._length, self._pending = length, 0

    def close(self) -> None:
        """Free sessions and buffers; closing twice is allowed."""
        self._sessions.close()
        self._runner.close()
        self._cache.clear()

    def _check(
        self, S: int, positions: IntArray | None, hidden: tuple[int, ...], features: Float32Array | None
    ) -> None:
        if self._sessions.closed:
            raise BackendError("the graph is closed")
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


def additive_mask(
    visible: BoolArray | None,  # [S, E]: which of the last E columns a row may see; None = causal
    positions: IntArray,  # [T], of the committed rows and then the new ones
    S: int,
    window: int | None,
) -> Float32Array:
    """[S, T]: 0 where a row may look, else a large negative number. A window counts positions."""
    T = len(positions)
    allowed = np.ones((S, T), np.bool_)
    recent = np.tri(S, dtype=np.bool_) if visible is None else visible
    allowed[:, T - recent.shape[1] :] = recent
    if window is not None:
        allowed &= positions[T - S :, None] - positions[None, :] < window
    return np.where(allowed, np.float32(0), MASKED)


class _Sessions:
    """The sessions of one file: one for any shape on a CPU, else one for each static shape."""

    def __init__(
        self,
        path: Path,
        threads: int | None,
        providers: Sequence[str],
        provider_options: Sequence[Mapping[str, str]] | None,
        entries: Mapping[str, str],
    ) -> None:
        self.path, self.threads, self.entries = path, threads, entries
        self.providers, self.provider_options = list(providers), provider_options
        self.static = any(name != CPU for name in providers)
        self.closed = False
        self._open: dict[tuple[int, int] | None, Any] = {}
        missing = [name for name in providers if name not in ort.get_available_providers()]
        if missing:
            known = ", ".join(ort.get_available_providers())
            raise BackendError(
                f"execution provider {missing[0]} is not in this ONNX Runtime; it has: {known}"
            )
        if not path.is_file():
            raise BackendError(f"{path} does not exist; export the bundle again or fetch it whole")

    def get(self, shape: tuple[int, int] | None) -> Any:
        """The session for (S, R): the same for any shape unless shapes must be static."""
        shape = shape if self.static else None
        if shape not in self._open:
            self._open[shape] = self._make(shape)
        return self._open[shape]

    def close(self) -> None:
        """Drop every session."""
        self._open.clear()
        self.closed = True

    def _make(self, shape: tuple[int, int] | None) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.inter_op_num_threads = 1
        if self.threads:
            options.intra_op_num_threads = self.threads
        for name, value in self.entries.items():
            options.add_session_config_entry(name, value)
        if shape is not None:
            options.add_free_dimension_override_by_name("S", shape[0])
            options.add_free_dimension_override_by_name("R", shape[1])
        try:
            return ort.InferenceSession(
                str(self.path), options, providers=self.providers, provider_options=self.provider_options
            )
        except Exception as error:
            raise BackendError(
                f"ONNX Runtime {ort.__version__} cannot load {self.path}: {error}; "
                "the file may be damaged (run `outrider check`) or need a newer ONNX Runtime"
            ) from error


class _Buffers:
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


class _Inplace:
    """Runs GroupQueryAttention graphs through one IO binding whose cache buffers stay bound."""

    def __init__(self, meta: GraphMeta, sessions: _Sessions, cache: list[Float32Array]) -> None:
        self.meta, self.cache, self.buffers = meta, cache, _Buffers()
        self.session = sessions.get(None)
        self.binding = self.session.io_binding()
        self._bound: dict[str, tuple[int, ...]] = {}
        self._masks: dict[str, Float32Array] = {}  # kept alive while they are bound
        self._zeros = np.zeros(0, np.float32)
        self._seqlens, seqlens = self.buffers.get("seqlens_k", (1,), np.int32)
        self._total, total = self.buffers.get("total", (), np.int32)
        self.binding.bind_ortvalue_input("seqlens_k", seqlens)
        self.binding.bind_ortvalue_input("total", total)
        for name, array in zip(cache_names(meta.layers), cache, strict=True):
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
        S, T, R = len(tokens), len(positions), len(rows)
        self._seqlens[0] = T - 1
        self._total[...] = T
        self._input("tokens", (1, S), np.int64)[0] = tokens
        self._input("positions", (1, S), np.int64)[0] = positions[-S:]
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
        T = len(positions)
        if visible is None and (window is None or positions[-S:].max() - positions.min() < window):
            mask = self._zeros = grown(self._zeros, S * T)
        else:
            mask = additive_mask(visible, positions, S, window)
            self._masks[name] = mask
        self.binding.bind_input(f"mask_{name}", "cpu", 0, np.float32, [1, 1, S, T], mask.ctypes.data)

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
        if np.array_equal(rows, np.arange(len(rows))):
            return
        for array in self.cache:
            array[:, :, length : length + len(rows)] = array[:, :, length + rows]

    def close(self) -> None:
        """Release the binding and the session."""
        self.binding = self.session = None
        self.buffers = _Buffers()


class _Split:
    """Runs graphs that read a cache of static length and return only the new rows."""

    def __init__(self, meta: GraphMeta, sessions: _Sessions, cache: list[Float32Array]) -> None:
        self.meta, self.sessions, self.cache, self.buffers = meta, sessions, cache, _Buffers()
        self.values = [ort.OrtValue.ortvalue_from_numpy(array) for array in cache]
        self.bindings: dict[tuple[int, int], Any] = {}
        self.present: list[Float32Array] = []  # new rows of the last forward

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
        self.present = []
        for index, name in enumerate(cache_names(m.layers)):
            binding.bind_ortvalue_input(f"past_{name}", self.values[index])
            rows, value = self.buffers.get(f"present_{name}", (1, m.kv_heads, W, m.head_dim), np.float32)
            binding.bind_ortvalue_output(f"present_{name}", value)
            self.present.append(rows)
        return session, binding

    def commit(self, length: int, rows: IntArray) -> None:
        """Copy the kept rows into the cache."""
        for array, present in zip(self.cache, self.present, strict=True):
            array[:, :, length : length + len(rows)] = present[:, :, rows]

    def close(self) -> None:
        """Release the bindings and buffers."""
        self.bindings.clear()
        self.values.clear()
        self.present.clear()
        self.buffers = _Buffers()


def fill_static_mask(
    out: Float32Array,  # [W, M + W]
    mask: Float32Array,  # [S, P + S]
) -> None:
    """Spread a mask over a cache of static length; padding rows see only themselves."""
    S, W, M = len(mask), len(out), out.shape[1] - len(out)
    P = mask.shape[1] - S
    out[:] = MASKED
    out[:S, :P], out[:S, M : M + S] = mask[:, :P], mask[:, P:]
    padding = np.arange(S, W)
    out[padding, M + padding] = 0


def cache_names(layers: int) -> list[str]:
    """The names of the cache tensors in order, without `past_` or `present_`."""
    return [f"{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


def grown(buffer: Float32Array, size: int) -> Float32Array:
    """The buffer, or zeros of twice the size that is needed."""
    return buffer if buffer.size >= size else np.zeros(2 * size, np.float32)


def _contiguous(positions: IntArray) -> bool:
    return bool(np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions))))
