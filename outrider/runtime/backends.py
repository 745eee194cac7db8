"""What opens a graph of a bundle: a backend's name, and why a graph cannot be opened here before it is tried."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from outrider.contracts import Graph
from outrider.errors import BackendError, BundleError, UsageError
from outrider.manifest import GraphEntry, bundle_path
from outrider.records import is_whole
from outrider.targets.core_sets import big_cores, cores_of, unit_kind

__all__ = [
    "BACKENDS",
    "UNITS",
    "Opener",
    "RoleOptions",
    "graph_meta",
    "held_context",
    "open_npu",
    "why_passed_over",
]

UNITS = ("cpu", "gpu", "npu")
CPU_PROVIDER = "CPUExecutionProvider"
QNN_PROVIDER = "QNNExecutionProvider"
MOST_THREADS = 1024  # ONNX Runtime starts as many as it is told: a million fill the memory


@dataclass(frozen=True)
class RoleOptions:
    """How one role is to be run: by which backend, on which execution providers in order, how many threads.

    `provider_options` are by provider name, `unit` is one of `UNITS`, or a core set of this computer as `cpu:2-3`
    (`targets.core_sets`), which says how many threads there are too. `context` is how many tokens it is to hold. None
    leaves the choice to the bundle and the backend.
    """

    backend: str | None = None
    providers: Sequence[str] | None = None
    provider_options: Mapping[str, Mapping[str, Any]] | None = None
    threads: int | None = None
    unit: str | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown backend or unit and an impossible number of threads."""
        if self.backend is not None and self.backend not in BACKENDS:
            raise UsageError(f"unknown backend {self.backend!r}; known: {', '.join(BACKENDS)}")
        if self.unit is not None and unit_kind(str(self.unit)) not in UNITS:
            raise UsageError(f"unknown unit {self.unit!r}; known: {', '.join(UNITS)}, and core sets as cpu:0")
        if self.threads is not None and not (is_whole(self.threads) and 1 <= self.threads <= MOST_THREADS):
            raise UsageError(
                f"threads is {self.threads!r}; it must be a whole number of at least 1 and at most {MOST_THREADS}"
            )
        if self.threads is not None and self.cores is not None and self.threads > len(self.cores):
            raise UsageError(
                f"threads is {self.threads}, but {self.unit!r} has {len(self.cores)} cores; leave threads out"
            )

    @property
    def cores(self) -> tuple[int, ...] | None:
        """The cores of a core set; None where the unit is none. Raises UsageError for cores that are not there."""
        return cores_of(self.unit)


Opener = Callable[[str | os.PathLike[str], GraphEntry, RoleOptions], Graph]


def why_passed_over(role: str, graph: GraphEntry, options: RoleOptions) -> str | None:
    """Why a graph is not even tried under `options`; None = it may be opened."""
    if graph.backend not in BACKENDS:
        return f"this outrider has no backend {graph.backend!r}; known: {', '.join(BACKENDS)}"
    if options.backend not in (None, graph.backend):
        return f"the backend {options.backend!r} was asked for"
    if options.unit is not None and unit_kind(options.unit) != graph.unit:
        return f"the unit {options.unit!r} was asked for"
    if options.providers:
        reason = _unlike_providers(graph, options.providers[0])
        if reason is not None:
            return reason
    elif graph.options.get("providers") and graph.backend == "onnxruntime":
        import onnxruntime

        wanted, there = graph.options["providers"][0], onnxruntime.get_available_providers()
        if wanted not in there:
            return f"this ONNX Runtime has no {wanted}, only {', '.join(there)}"
    if graph.backend == "coreml" and not has_coreml() and options.unit is None and options.backend is None:
        return (
            "no Core ML here; the evaluator runs it, for proof, where it is asked for: "
            f"--{role}-unit {graph.unit}"
        )
    if graph.options.get("delegate") == "vulkan":
        return "its Vulkan delegate is in ExecuTorch's Android library only; no Python package has it"
    if _for_hexagon(graph) and options.unit is None and not may_have_hexagon():
        return (
            "no Hexagon NPU here; the emulator in onnxruntime-qnn runs it, slowly, where it is asked for: "
            f"--{role}-unit npu"
        )
    return None


def _unlike_providers(graph: GraphEntry, first: str) -> str | None:
    """Why execution providers that were named rule a graph out."""
    if graph.backend in ("executorch", "coreml"):
        return f"the execution provider {first} was named, which is ONNX Runtime's"
    made_for = (QNN_PROVIDER,) if graph.unit == "npu" else tuple(graph.options.get("providers", ()))
    if made_for and (first == CPU_PROVIDER or first not in made_for):
        return f"the execution provider {first} was named; this graph is for {made_for[0]}"
    return None


def _for_hexagon(graph: GraphEntry) -> bool:
    return graph.unit == "npu" and graph.backend != "coreml"


def has_coreml() -> bool:
    """Whether this system has Core ML."""
    return sys.platform == "darwin"


def may_have_hexagon() -> bool:
    """Whether this processor can be a Snapdragon; on others onnxruntime-qnn has an emulator at most."""
    return platform.machine().lower() in ("aarch64", "arm64")


def graph_meta(graph: GraphEntry) -> dict[str, Any]:
    """What a backend must know about a graph; what the manifest has no field for is among the options."""
    return {
        **graph.options,
        "profile": graph.profile,
        "widths": graph.widths,
        "max_context": graph.max_context,
        "vocab_size": graph.vocab_size,
        "layers": graph.kv.layers,
        "kv_heads": graph.kv.heads,
        "head_dim": graph.kv.head_dim,
        "hidden_layers": graph.hidden_layers,
    }


def held_context(graph: GraphEntry, wanted: int | None) -> int:
    """Tokens that a graph has a cache for: an `inplace` one of those wanted, any other one of all it was made for."""
    if wanted is None or (graph.backend, graph.profile) != ("onnxruntime", "inplace"):
        return graph.max_context
    return min(wanted, graph.max_context)


def _open_onnxruntime(directory: str | os.PathLike[str], graph: GraphEntry, options: RoleOptions) -> Graph:
    """Open a graph with ONNX Runtime: on the providers named, or those it was made for, or the CPU."""
    if graph.unit == "npu":
        return open_npu(directory, graph, options)
    from outrider.targets.onnxruntime import OnnxGraph

    providers = tuple(options.providers or graph.options.get("providers") or (CPU_PROVIDER,))
    _refuse_unknown_providers(providers)
    given = options.provider_options or {}
    stray = sorted(set(given) - set(providers))
    if stray:
        raise UsageError(f"provider options for {stray[0]!r}, which is not among {', '.join(providers)}")
    return OnnxGraph.load(
        bundle_path(directory, graph.path),
        {**graph_meta(graph), "max_context": held_context(graph, options.context)},
        threads=options.threads,
        providers=providers,
        provider_options=[
            _told(name, graph.options.get("provider_options", {}), given) for name in providers
        ],
        session_options=graph.options.get("session_options"),
        cores=options.cores,
        among=_big_cores(options) if providers == (CPU_PROVIDER,) else None,
    )


def _big_cores(options: RoleOptions) -> tuple[int, ...] | None:
    """The strong cores where there are weak ones too, unless cores or threads were asked for."""
    return big_cores() if options.unit in (None, "cpu") and options.threads is None else None


def _told(name: str, made_with: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The options of a provider: what was given goes before what the graph was made with."""
    return {key: str(value) for key, value in {**made_with.get(name, {}), **given.get(name, {})}.items()}


def _refuse_unknown_providers(providers: Sequence[str]) -> None:
    """A name that no build of ONNX Runtime has is a mistake; one that this build lacks is the machine's."""
    import onnxruntime

    known = dict.fromkeys([*onnxruntime.get_all_providers(), *onnxruntime.get_available_providers()])
    for name in providers:
        if name not in known:
            raise UsageError(f"unknown execution provider {name!r}; known: {', '.join(known)}")


def open_npu(
    directory: str | os.PathLike[str],
    graph: GraphEntry,
    options: RoleOptions,
    execution: Literal["auto", "cpu"] = "auto",
) -> Graph:
    """Open the static graphs of a Hexagon NPU through the QNN plugin of ONNX Runtime, or by the CPU's kernels."""
    from outrider.targets.qnn import NpuGraph

    _refuse_unlisted(graph)
    opened: Graph = NpuGraph.load(
        bundle_path(directory, graph.path),
        {**graph_meta(graph), "functions": dict(graph.functions)},
        embedding=None if graph.embedding_file is None else bundle_path(directory, graph.embedding_file),
        execution=execution,
        threads=options.threads,
        provider_options=(options.provider_options or {}).get(QNN_PROVIDER),
    )
    return opened


def _refuse_unlisted(graph: GraphEntry) -> None:
    """Raise BundleError for a model that is not among the graph's files: nothing checks it, wherever it is."""
    contexts = graph.options.get("contexts", {})
    compiled = [name for by_width in contexts.values() for name in by_width.values()]
    folder = PurePosixPath(graph.path).parent
    for name in map(str, (*graph.functions.values(), *compiled)):
        if (folder / name).as_posix() not in graph.files:
            raise BundleError(
                f"{name!r} is named by {graph.path} but absent from its files; export the bundle again"
            )


def _open_executorch(directory: str | os.PathLike[str], graph: GraphEntry, options: RoleOptions) -> Graph:
    """Open a .pte with ExecuTorch."""
    from outrider.targets.executorch import ExecutorchGraph

    cores = options.cores
    if cores is not None and len(cores) > 1:
        raise BackendError(
            f"ExecuTorch's threads belong to the whole process and cannot be kept on {options.unit}; name one core, or"
            " a graph for ONNX Runtime"
        )
    opened = ExecutorchGraph.load(
        bundle_path(directory, graph.path),
        {**graph_meta(graph), "functions": dict(graph.functions)},
        threads=1 if cores is not None else options.threads or len(_big_cores(options) or ()) or None,
    )
    opened.cores = cores
    return opened


def _open_coreml(directory: str | os.PathLike[str], graph: GraphEntry, options: RoleOptions) -> Graph:
    """Open a Core ML package: by Core ML on macOS, by the evaluator of its program elsewhere.

    Both share out work as they see fit, so a number of threads says nothing to them.
    """
    from outrider.targets.coreml import CoreMLGraph

    opened: Graph = CoreMLGraph.load(
        bundle_path(directory, graph.path).parent,  # its first file is the package's manifest
        {**graph_meta(graph), "functions": dict(graph.functions)},
        embedding=None if graph.embedding_file is None else bundle_path(directory, graph.embedding_file),
        unit=graph.unit,
    )
    return opened


BACKENDS: dict[str, Opener] = {
    "onnxruntime": _open_onnxruntime,
    "executorch": _open_executorch,
    "coreml": _open_coreml,
}
"""Backend name -> what opens one of its graphs; raises BackendError or MissingExtraError if it cannot."""
