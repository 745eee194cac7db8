"""Open every graph of a bundle the closest way that there is here, and say what that proves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from outrider.contracts import Graph
from outrider.errors import BackendError, BundleError
from outrider.manifest import GraphEntry, Via
from outrider.runtime.backends import BACKENDS, RoleOptions, open_npu, why_passed_over

__all__ = ["Opened", "graph_key", "open_closest", "open_evaluator", "same_file"]


@dataclass(frozen=True)
class Opened:
    """A graph that runs here. `via` and `executed_artifact`: see "How a graph was proven" in `docs/formats.md`."""

    graph: Graph
    via: Via
    executed_artifact: bool
    note: str = ""  # where what ran is not what the device runs


def graph_key(entry: GraphEntry) -> str:
    """What names a graph in `quality["graphs"]`: its path, and its unit where another unit shares the file."""
    return f"{entry.path} ({entry.unit})" if entry.options.get("providers") else entry.path


def same_file(entry: GraphEntry, graphs: Sequence[GraphEntry]) -> GraphEntry | None:
    """The graph that opens the file of `entry` on the CPU, where `entry` is for other providers."""
    if not entry.options.get("providers"):
        return None
    twins = (graph for graph in graphs if graph.path == entry.path and not graph.options.get("providers"))
    return next(twins, None)


def open_closest(
    directory: str | os.PathLike[str], role: str, entry: GraphEntry, threads: int | None = None
) -> Opened:
    """Open a graph on its own unit, else in emulation, else a reference lowering of it on the CPU.

    Raises BackendError or MissingExtraError when nothing here comes close, BundleError for damaged files.
    """
    reference = _reference_of(entry)
    if reference is not None:
        options = RoleOptions(threads=threads)
        graph = BACKENDS[reference.backend](directory, reference, options)
        note = "the same program lowered for the CPU; the delegate itself runs on Android only"
        return Opened(graph, "reference-lowering", False, note)
    options = RoleOptions(unit=entry.unit, threads=threads)
    reason = why_passed_over(role, entry, options)
    if reason is not None and entry.options.get("providers"):
        return _on_the_cpu(directory, entry, threads)
    if reason is not None:
        raise BackendError(reason)
    graph = BACKENDS[entry.backend](directory, entry, options)
    return Opened(graph, getattr(graph, "via", "artifact"), bool(getattr(graph, "executed_artifact", True)))


def open_evaluator(directory: str | os.PathLike[str], entry: GraphEntry, threads: int | None = None) -> Graph:
    """Open an NPU's graph with the kernels of the CPU: not its arithmetic to the last bit, but fast."""
    return open_npu(directory, entry, RoleOptions(threads=threads), execution="cpu")


def _reference_of(entry: GraphEntry) -> GraphEntry | None:
    """The entry of the CPU lowering that stands for a graph whose delegate does not run here."""
    reference = entry.options.get("reference")
    if reference is None:
        return None
    name = (PurePosixPath(entry.path).parent / reference["file"]).as_posix()
    if name not in entry.files:
        raise BundleError(
            f"{name!r} is named by the graph but absent from its files; export the bundle again"
        )
    return replace(
        entry,
        unit="cpu",
        files={name: entry.files[name], **entry.files},
        widths=tuple(reference["widths"]),
        options={**entry.options, "delegate": "xnnpack", "methods": reference["methods"]},
    )


def _on_the_cpu(directory: str | os.PathLike[str], entry: GraphEntry, threads: int | None) -> Opened:
    """A graph for providers that are not here, by the kernels of the CPU."""
    options: Mapping[str, object] = {k: v for k, v in entry.options.items() if k != "providers"}
    plain = replace(entry, unit="cpu", options=options)
    graph = BACKENDS[entry.backend](directory, plain, RoleOptions(threads=threads))
    wanted = entry.options["providers"][0]
    return Opened(graph, "reference-lowering", False, f"the same file by the CPU's kernels, not by {wanted}")
