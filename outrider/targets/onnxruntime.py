"""Run exported ONNX graphs with ONNX Runtime.

`inplace` graphs keep keys and values in one buffer per layer that is past and present at once, for an accelerator in
its own memory (`onnx_device.py`); `split` graphs read a cache of static length and return only new rows, which the host
copies when they are committed.
Needs numpy and onnxruntime only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import BackendError
from outrider.targets.cached_graph import CachedGraph, top_rows
from outrider.targets.graph_meta import GraphMeta
from outrider.targets.onnx_profiles import RUNNERS, runner_of
from outrider.targets.onnx_session import CPU, Sessions, affinities, described, roaming

__all__ = ["GraphMeta", "OnnxGraph", "top_rows"]


class OnnxGraph(CachedGraph):
    """A `contracts.Graph` over an ONNX file. Make one with `load`."""

    def __init__(self, meta: GraphMeta, sessions: Sessions, providers: Sequence[str] = (CPU,)) -> None:
        super().__init__(meta, runner_of(meta, sessions), "ONNX Runtime")
        self._sessions = sessions
        self.providers = tuple(providers)  # that ONNX Runtime uses, by preference

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
        cores: Sequence[int] | None = None,
        among: Sequence[int] | None = None,
    ) -> OnnxGraph:
        """Open a graph. `session_options` are ONNX Runtime's configuration entries by name.

        With `cores` it has one thread on each, or `threads` on the first of them; the caller of `forward` is the first.
        `among` are cores that it has as many threads for, each free to move from one to another of them.

        Raises BackendError when the file is missing or damaged, is another graph than `meta` describes, or a
        provider is not there.
        """
        record = GraphMeta.from_json(meta)
        if record.profile not in RUNNERS:
            raise BackendError(
                f"{path}: profile {record.profile!r} is not known; known: {', '.join(RUNNERS)}"
            )
        sessions = Sessions(
            Path(path),
            record.max_context,
            threads or (len(cores or among or ()) or None),
            providers,
            provider_options,
            {**(session_options or {}), **(affinities(cores, threads) if among is None else roaming(among))},
        )
        session = sessions.get((record.widths[0], 1) if record.widths else None)
        record.refuse_another_graph(described(session), sessions.path)
        graph = cls(record, sessions, session.get_providers())
        held = tuple(cores[:1] if cores else among or ())  # of core sets, the other threads have the others
        graph.cores = held or None
        return graph

    def close(self) -> None:
        """Free sessions and buffers; closing twice is allowed."""
        self._sessions.close()
        super().close()
