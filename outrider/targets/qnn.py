"""Run static uint16 graphs on the Hexagon NPU of a Snapdragon, or on its emulator, with onnxruntime-qnn.

There is one ONNX file a width, and beside it, for each SoC that was compiled for, a context model that needs no
compiling on the device. Needs numpy, onnxruntime and the onnxruntime-qnn wheel; `execution="cpu"` runs the same
files without that wheel.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from outrider.contracts import BoolArray, Float32Array, IntArray
from outrider.errors import BackendError, UsageError
from outrider.targets.cached_graph import CachedGraph
from outrider.targets.device import DEVICES
from outrider.targets.graph_meta import GraphMeta, reading_description
from outrider.targets.npu_host import EmbeddingTable, KvCache, RopeTable, Scale, static_mask
from outrider.targets.qnn_plugin import (
    QNN,
    SocIds,
    binary_of,
    compiled_for,
    device_here,
    device_of,
    emulator_speaks_on_stderr,
    has_emulator,
    qnn_options,
    qnn_plugin,
    soc_of,
)

__all__ = ["EXECUTIONS", "NpuGraph", "NpuMeta", "NpuRunner", "NpuSessions"]

Execution = Literal["npu", "emulator", "cpu"]
EXECUTIONS: Mapping[str, str] = {"npu": "artifact", "emulator": "emulator", "cpu": "evaluator"}
"""Where a graph can run -> how that proves it (`via` of the manifest)."""

PROVIDERS: Mapping[str, tuple[str, ...]] = {
    "npu": (QNN,),
    "emulator": (f"{QNN} (emulator)",),
    "cpu": ("CPUExecutionProvider",),
}
EMULATED = "snapdragon-8-gen3"
"""What the emulator stands for where nobody says: generations differ in what they take, not in how they round."""
CPU_ENTRIES = {"session.disable_quant_qdq": "1"}
"""Without it ONNX Runtime multiplies 8-bit weights with activations that it rounds to 8 bits by itself."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NpuMeta:
    """What the manifest says about a set of static graphs; `from_json` reads it."""

    graph: GraphMeta
    scales: Mapping[str, Scale]  # of inputs and outputs by name
    masked: float  # what a mask adds where a row may not look
    rope: Mapping[str, tuple[NDArray[np.float64], float]]  # layer kind -> inverse frequencies, factor
    rows: Mapping[int, int]  # width -> rows of logits that a run returns
    files: Mapping[int, str]  # width -> QDQ model, relative to the folder
    contexts: Mapping[str, Mapping[int, str]]  # device -> width -> compiled model
    embedding: Mapping[str, Any]
    soc: SocIds | None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NpuMeta:
        """Read the record. Raises BackendError for a field that is missing or impossible."""
        graph = GraphMeta.from_json(values)
        if graph.profile != "split" or not graph.widths:
            raise BackendError(
                f"profile {graph.profile!r} with widths {graph.widths} is not for an NPU, which takes 'split'"
            )
        if graph.hidden_layers:
            raise BackendError(
                f"hidden_layers is {graph.hidden_layers}, but graphs of an NPU return no hidden states; export the "
                "bundle again"
            )
        with reading_description():
            rope = {
                kind: (np.asarray(table["inv_freq"], np.float64), float(table["scale"]))
                for kind, table in values["rope"].items()
            }
            dtypes = values.get("dtypes", {})
            made = cls(
                graph=graph,
                scales={
                    name: Scale(float(scale), int(zero), dtypes.get(name, "uint16"))
                    for name, (scale, zero) in values["scales"].items()
                },
                masked=float(values["masked"]),
                rope=rope,
                rows={int(width): int(rows) for width, rows in values["rows"].items()},
                files=_by_width(values["functions"]),
                contexts={name: _by_width(files) for name, files in values.get("contexts", {}).items()},
                embedding=values["embedding"],
                soc=SocIds(values["soc_model"], values["htp_arch"]) if values.get("soc_model") else None,
            )
        made._refuse_gaps()
        return made

    def _refuse_gaps(self) -> None:
        """Every tensor needs its scale, and every width its file and its number of rows."""
        assert self.graph.widths is not None
        for what, found in {"file": self.files, "number of rows": self.rows, **self.contexts}.items():
            missing = sorted(set(self.graph.widths) - set(found))
            if missing:
                known = ", ".join(map(str, sorted(found))) or "none"
                where = f"compiled for {what}" if what in self.contexts else f"given a {what}"
                raise BackendError(
                    f"width {missing[0]} was not {where} (there are: {known}); export the bundle again"
                )
        unscaled = sorted(set(self.tensors(self.graph.widths[0])) - {"rows"} - set(self.scales))
        if unscaled:
            raise BackendError(f"the description has no scale for {unscaled[0]!r}; export the bundle again")

    def tensors(self, W: int) -> dict[str, tuple[int, ...]]:
        """Inputs and outputs of the graph of a width, with their shapes."""
        g, M = self.graph, self.graph.max_context
        shapes: dict[str, tuple[int, ...]] = {"x": (1, W, g.hidden_size), "rows": (self.rows[W],)}
        shapes |= {f"mask_{name}": (1, 1, W, M + W) for name in g.masks}
        for kind, (inv_freq, _) in self.rope.items():
            shapes[f"cos_{kind}"] = shapes[f"sin_{kind}"] = (1, 1, W, len(inv_freq))
        for layer in range(g.layers):
            for name, length in (("past", M), ("present", W)):
                shapes[f"{name}_key_{layer}"] = (1, g.kv_heads, g.head_dim, length)
                shapes[f"{name}_value_{layer}"] = (1, g.kv_heads, length, g.head_dim)
        return {**shapes, "logits": (1, self.rows[W], g.vocab_size)}

    def dtype(self, name: str) -> str:
        """The numpy name of a tensor's element type."""
        return "int32" if name == "rows" else self.scales[name].dtype

    def refuse_another_graph(self, session: Any, W: int, path: Path) -> None:
        """Raise BackendError naming the first tensor that an opened graph has otherwise than is said here."""
        found = {
            value.name: (tuple(value.shape), value.type.removeprefix("tensor(").rstrip(")"))
            for value in (*session.get_inputs(), *session.get_outputs())
        }
        said = {name: (shape, self.dtype(name)) for name, shape in self.tensors(W).items()}
        for name in dict.fromkeys((*said, *found)):
            if found.get(name) != said.get(name):
                raise BackendError(
                    f"{path} has {name} {_shown(found.get(name))}, the manifest says {_shown(said.get(name))}; they "
                    "do not belong together: export the bundle again"
                )


def _by_width(files: Mapping[str, str]) -> dict[int, str]:
    return {int(width): str(name) for width, name in files.items()}


def _shown(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "none" if tensor is None else f"{tensor[1]}{list(tensor[0])}"


class NpuSessions:
    """One session a width, opened when it is first needed: of the compiled model, else of the QDQ model.

    A binary of one width that was compiled for a SoC runs on the emulator too, bit for bit as the QDQ model does
    there. A binary that several widths share opens on the chip only (QNN_COMMON_ERROR_NOT_SUPPORTED elsewhere).
    """

    def __init__(
        self,
        folder: Path,
        meta: NpuMeta,
        execution: Execution,
        device: str | None,
        threads: int | None,
        provider_options: Mapping[str, str],
    ) -> None:
        self.folder, self.meta, self.execution, self.threads = folder, meta, execution, threads
        self.provider_options = provider_options
        self.ids = soc_of(device) if device is not None else meta.soc
        if self.ids is None and execution == "emulator":
            self.ids = soc_of(next(iter(meta.contexts), EMULATED))
        self.compiled = self._compiled(device) if execution != "cpu" else {}
        found = [binary_of(path) for path in self.compiled.values() if path.is_file()]
        binaries = [name for name in found if name is not None]
        self._shared = len(set(binaries)) < len(binaries)  # weights lie in one binary for several widths
        self.ran: dict[int, Path] = {}  # width -> the file that was opened
        self._open: dict[int, Any] = {}
        self._qnn = qnn_plugin() if execution != "cpu" else None
        for path in (*self._qdq().values(), *self.compiled.values()):
            if not path.is_file():
                raise BackendError(f"{path} does not exist; export the bundle again or fetch it whole")

    def _qdq(self) -> dict[int, Path]:
        return {width: self.folder / name for width, name in self.meta.files.items()}

    def _compiled(self, device: str | None) -> dict[int, Path]:
        """The compiled models for the SoC at hand, by width. Raises BackendError for those of another SoC."""
        slug = device or self._slug()
        files = {width: self.folder / name for width, name in self.meta.contexts.get(slug or "", {}).items()}
        for path in filter(Path.is_file, files.values()):
            ids = compiled_for(path)
            if ids is not None and ids != self.ids:
                raise BackendError(
                    f"{path} was compiled for another SoC ({ids}) than {slug} ({self.ids}); export with --device {slug}"
                )
        if not files and self.meta.contexts:
            _log.info("nothing was compiled for %s, only for %s", slug, ", ".join(self.meta.contexts))
        return files

    def _slug(self) -> str | None:
        """Under which name models for the SoC at hand are kept: a profile's, or that of the user's own file."""
        if self.ids is None:
            return None
        known = device_of(self.ids)
        own = [name for name in self.meta.contexts if self.ids == self.meta.soc and name not in DEVICES]
        return known if known in self.meta.contexts or not own else own[0]

    def get(self, W: int) -> Any:
        """The session of a width."""
        if W not in self._open:
            self._open[W] = self._make(W)
        return self._open[W]

    def close(self) -> None:
        """Drop every session."""
        self._open.clear()

    def _make(self, W: int) -> Any:
        """Open the compiled model; where that fails, compile the QDQ model."""
        qdq = self._qdq()[W]
        if self._shared and self.execution == "emulator":
            _log.info("the emulator cannot open a binary that widths share; it compiles %s", qdq)
        elif W in self.compiled:
            try:
                return self._session(W, self.compiled[W])
            except BackendError as error:
                _log.warning("compiling %s on the spot, because: %s", qdq, error)
        return self._session(W, qdq)

    def _session(self, W: int, path: Path) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = 4 if self._qnn else 3
        options.inter_op_num_threads = 1
        if self.threads:
            options.intra_op_num_threads = self.threads
        quiet = emulator_speaks_on_stderr() if self.execution == "emulator" else nullcontext()
        try:
            with quiet:
                session = self._opened(W, path, options)
        except Exception as error:
            raise BackendError(self._why(path, str(error))) from error
        self.meta.refuse_another_graph(session, W, path)
        self.ran[W] = path
        return session

    def _opened(self, W: int, path: Path, options: Any) -> Any:
        if self._qnn is None:
            for name, value in CPU_ENTRIES.items():
                options.add_session_config_entry(name, value)
            return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        module, devices = self._qnn
        ids = self.ids if self.execution == "emulator" else None  # a real chip knows what it is
        options.add_provider_for_devices(devices, qnn_options(module, ids, self.provider_options))
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if self._shared and path == self.compiled.get(W):
            options.add_session_config_entry("ep.share_ep_contexts", "1")
            if max(self.compiled) == W:
                options.add_session_config_entry("ep.stop_share_ep_contexts", "1")
        return ort.InferenceSession(str(path), options)

    def _why(self, path: Path, reason: str) -> str:
        if self._qnn is not None and "fallback to CPU EP has been explicitly disabled" in reason:
            reason = f"QNN does not take the whole graph, or knows no such chip ({self.ids})"
        return (
            f"ONNX Runtime {ort.__version__} cannot open {path} ({self.execution}): {reason}; "
            "the file may be damaged (run `outrider check`) or made by a newer onnxruntime-qnn"
        )


class NpuRunner:
    """Feeds the graphs and keeps the cache. Rows beyond what a run returns are got by running again."""

    in_reach = True

    def __init__(self, meta: NpuMeta, sessions: NpuSessions, embedding: EmbeddingTable) -> None:
        self.meta, self.sessions, self.embedding = meta, sessions, embedding
        g = meta.graph
        self.cache = KvCache(g.layers, g.kv_heads, g.head_dim, g.max_context, meta.scales)
        self.tables = {
            kind: RopeTable(
                inv_freq, factor, g.max_context, meta.scales[f"cos_{kind}"], meta.scales[f"sin_{kind}"]
            )
            for kind, (inv_freq, factor) in meta.rope.items()
        }
        self._bound: dict[int, tuple[Any, dict[str, NDArray[Any]]]] = {}
        self._last: dict[str, NDArray[Any]] = {}  # tensors of the last forward

    def run(
        self, tokens: IntArray, positions: IntArray, mask: BoolArray | None, rows: IntArray
    ) -> tuple[Float32Array, list[Float32Array]]:
        """Logits [R, V]; `positions` are of the cache and of the tokens. There are no hidden states."""
        S, widths = len(tokens), self.meta.graph.widths
        assert widths is not None
        W = next(width for width in sorted(widths) if width >= S)
        binding, tensors = self._bind(W)
        self._fill(tensors, tokens, positions, mask, S)
        logits, scale = tensors["logits"], self.meta.scales["logits"]
        R, found = logits.shape[1], np.empty((len(rows), logits.shape[2]), np.float32)
        for start in range(0, max(1, len(rows)), R):
            part = rows[start : start + R]
            tensors["rows"][:] = 0
            tensors["rows"][: len(part)] = part
            self.sessions.get(W).run_with_iobinding(binding)
            found[start : start + len(part)] = scale.dequantize(logits[0, : len(part)])
        self._last = tensors
        return found, []

    def _fill(
        self,
        tensors: Mapping[str, NDArray[Any]],
        tokens: IntArray,
        positions: IntArray,
        mask: BoolArray | None,
        S: int,
    ) -> None:
        """Padding repeats the last token: it stays within the ranges that the graph was calibrated for."""
        g, scales = self.meta.graph, self.meta.scales
        W = tensors["x"].shape[1]
        padded = np.minimum(np.arange(W), S - 1)
        tensors["x"][0] = scales["x"].quantize(self.embedding.rows(tokens))[padded]
        where = positions[-S:][padded]
        for kind, table in self.tables.items():
            tensors[f"cos_{kind}"][0, 0] = table.cos[where]
            tensors[f"sin_{kind}"][0, 0] = table.sin[where]
        for name in g.masks:
            levels = scales[f"mask_{name}"].quantize(np.array([self.meta.masked, 0], np.float32))
            window = g.sliding_window if name == "sliding" else None
            static_mask(tensors[f"mask_{name}"][0, 0], mask, positions, S, window, (levels[0], levels[1]))

    def _bind(self, W: int) -> tuple[Any, dict[str, NDArray[Any]]]:
        """The binding of a width and its tensors; the cache is shared by all of them."""
        if W not in self._bound:
            binding = self.sessions.get(W).io_binding()
            tensors: dict[str, NDArray[Any]] = {}
            for name, shape in self.meta.tensors(W).items():
                part, _, layer = name.rpartition("_")
                if part.startswith("past"):
                    tensors[name] = (self.cache.keys if "key" in part else self.cache.values)[int(layer)]
                else:
                    tensors[name] = np.zeros(shape, self.meta.dtype(name))
                value = ort.OrtValue.ortvalue_from_numpy(tensors[name])
                returned = name == "logits" or part.startswith("present")
                (binding.bind_ortvalue_output if returned else binding.bind_ortvalue_input)(name, value)
            self._bound[W] = binding, tensors
        return self._bound[W]

    def commit(self, length: int, rows: IntArray) -> None:
        """Copy the kept rows into the cache, as the integers that they are."""
        layers = range(self.meta.graph.layers)
        if len(rows):
            keys = [self._last[f"present_key_{layer}"] for layer in layers]
            self.cache.commit(length, rows, keys, [self._last[f"present_value_{layer}"] for layer in layers])

    def rows(self, start: int, end: int) -> list[NDArray[Any]]:
        """Copies of these rows of the cache."""
        return self.cache.rows(start, end)

    def put(self, start: int, rows: list[NDArray[Any]]) -> None:
        """Write them back."""
        self.cache.put(start, rows)

    def close(self) -> None:
        """Release bindings, sessions and buffers."""
        self._bound.clear()
        self._last = {}
        self.cache.keys.clear()
        self.cache.values.clear()
        self.sessions.close()


class NpuGraph(CachedGraph):
    """A `contracts.Graph` over static integer graphs. Make one with `load`.

    `execution` is where it runs and `via` what that proves: "npu" ("artifact"), "emulator" ("emulator": Qualcomm's
    model of the NPU's arithmetic, slow) or "cpu" ("evaluator": ONNX Runtime's own CPU kernels, in float between
    the graph's roundings; fast enough for many positions, a little off the NPU).
    A width whose graph returns fewer rows of logits than are asked for runs again for the rest, so ask for
    all rows in forwards that are narrow.
    """

    def __init__(self, meta: NpuMeta, sessions: NpuSessions, embedding: EmbeddingTable) -> None:
        super().__init__(meta.graph, NpuRunner(meta, sessions, embedding), "ONNX Runtime QNN")
        self.npu_meta, self._sessions = meta, sessions
        self.execution, self.via = sessions.execution, EXECUTIONS[sessions.execution]
        self.providers = PROVIDERS[sessions.execution]

    @classmethod
    def load(
        cls,
        path: str | Path,
        meta: Mapping[str, Any],
        *,
        embedding: str | Path | None,
        execution: Literal["auto", "npu", "emulator", "cpu"] = "auto",
        device: str | None = None,
        threads: int | None = None,
        provider_options: Mapping[str, Any] | None = None,
    ) -> NpuGraph:
        """Open the graphs whose files lie in the folder of `path`, by the names that `meta` has for them.

        `execution` "auto" takes the NPU, or on x86-64 the emulator. `device` names the SoC whose compiled models
        are wanted; by default it is the one of this machine, or on the emulator the one of `meta`.
        `provider_options` are QNN's own.

        Raises MissingExtraError without onnxruntime-qnn; BackendError when it is too old, a file is missing,
        damaged or of another graph or SoC than `meta` says, or nothing here can run it; UsageError for an option
        that is not known.
        """
        where = chosen(execution)
        record = NpuMeta.from_json(meta)
        if embedding is None:
            raise BackendError(
                "the graph has no embedding file, which the host needs; export the bundle again"
            )
        table = EmbeddingTable(Path(embedding), record.embedding)
        if table.columns != record.graph.hidden_size:
            raise BackendError(
                f"{embedding} has rows of {table.columns}, the graph reads {record.graph.hidden_size}; they do not "
                "belong together: export the bundle again"
            )
        options = {name: str(value) for name, value in (provider_options or {}).items()}
        here = device or (device_here() if where == "npu" else None)
        sessions = NpuSessions(Path(path).parent, record, where, here, threads, options)
        assert record.graph.widths is not None
        opened = record.graph.widths if where == "npu" else record.graph.widths[:1]
        for width in opened:  # an emulator takes long to open one
            sessions.get(width)
        return cls(record, sessions, table)

    @property
    def artifact(self) -> tuple[str, ...]:
        """The files that were opened so far, in the order of their widths."""
        return tuple(str(path) for _, path in sorted(self._sessions.ran.items()))

    @property
    def executed_artifact(self) -> bool:
        """Whether all that was opened is what the device opens: the compiled models, where there are any."""
        if self.execution == "cpu":
            return not self.npu_meta.contexts
        return not self.npu_meta.contexts or set(self._sessions.ran.values()) <= set(
            self._sessions.compiled.values()
        )


def chosen(execution: str) -> Execution:
    """Where to run here. Raises UsageError for an unknown word, BackendError for what this machine is not."""
    if execution == "auto":
        return "emulator" if has_emulator() else "npu"
    if execution not in EXECUTIONS:
        raise UsageError(f"execution is {execution!r}; known: auto, {', '.join(EXECUTIONS)}")
    if execution != "cpu" and (execution == "emulator") != has_emulator():
        there = "an emulator" if has_emulator() else "no emulator"
        raise BackendError(f"the NPU was asked for as {execution!r}, but onnxruntime-qnn has {there} here")
    return execution  # type: ignore[return-value]
