"""Run every graph of a role the closest way there is here, beside its float reference, on the target's own text.

What a CPU runs sees all of that text. An emulator of an NPU needs a second or more for a token, so it sees a short
sample; the same file run by our evaluator, which is close to it and fast, sees the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from outrider.contracts import Float32Array, Graph, IntArray
from outrider.errors import BackendError, MissingExtraError
from outrider.export.reference import ROWS, FloatReference
from outrider.manifest import GraphEntry, RoleEntry
from outrider.quantize.gates import gate_for, shortfalls
from outrider.quantize.quality import GraphQuality, graph_quality, logit_rows
from outrider.runtime.closest import Opened, graph_key, open_closest, open_evaluator, same_file
from outrider.runtime.load import draft_ids
from outrider.runtime.proof import narrow_widths, sample_rows

__all__ = ["OwnTexts", "Prover", "text_rows"]

EMULATED_TOKENS = 12  # of the sample that an emulator runs during an export
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class OwnTexts:
    """Texts that the target wrote. Row `skips[i]` of a text predicts its first own token.

    `sample` is a short one behind a short prompt, whose rows from `begin` on count.
    """

    texts: Sequence[IntArray]
    skips: Sequence[int]
    sample: IntArray
    begin: int

    @property
    def all(self) -> list[IntArray]:
        """Every text, the sample last."""
        return [*self.texts, self.sample]


@dataclass(frozen=True)
class Prover:
    """Measures the graphs of a bundle; `target` is its target as it runs here, `placed` what is open already."""

    folder: Path
    own: OwnTexts
    target: Graph
    placed: Mapping[str, Graph]  # path of the graph -> the graph
    progress: Progress | None = None

    def records(
        self, role: str, entry: RoleEntry, reference: FloatReference, states: Sequence[Any]
    ) -> dict[str, dict[str, Any]]:
        """What was found about each graph, by `graph_key`, as `quality["graphs"]` of the manifest has it.

        `states` are the reference's final states of `own.all`.
        """
        found: dict[str, dict[str, Any]] = {}
        for graph in sorted(entry.graphs, key=lambda graph: bool(graph.options.get("providers"))):
            twin = same_file(graph, entry.graphs)
            if twin is not None and graph_key(twin) in found:
                found[graph_key(graph)] = _by_the_cpu(found[graph_key(twin)], graph)
            else:
                found[graph_key(graph)] = self._record(role, graph, reference, states)
        return {graph_key(graph): found[graph_key(graph)] for graph in entry.by_preference()}

    def _record(
        self, role: str, entry: GraphEntry, reference: FloatReference, states: Sequence[Any]
    ) -> dict[str, Any]:
        try:
            opened = self._open(role, entry)
        except (BackendError, MissingExtraError) as error:
            reason = f"it could not be run here: {error}"
            return {
                "via": None,
                "executed_artifact": False,
                "positions": 0,
                "passed": False,
                "below": [reason],
            }
        try:
            slow = opened.via == "emulator"
            figures = self._sampled if slow else self._figures
            quality = figures(role, entry, opened.graph, reference, states)
        finally:
            if entry.path not in self.placed:
                opened.graph.close()
        below = shortfalls(quality, gate_for(entry.recipe))
        more: dict[str, Any] = {}
        if slow:
            whole = self._evaluated(role, entry, reference, states)
            below += [f"by the evaluator: {found}" for found in shortfalls(whole, gate_for(entry.recipe))]
            more = {"evaluator": _known(whole)}
        proven = {"via": opened.via, "executed_artifact": opened.executed_artifact, "note": opened.note}
        record = {**proven, **_known(quality), **more, "passed": not below, "below": below}
        return {name: value for name, value in record.items() if value not in ("", [])}

    def _open(self, role: str, entry: GraphEntry) -> Opened:
        self._tell(f"{role}: {entry.path}", 0.0)
        if entry.path in self.placed:
            return Opened(self.placed[entry.path], "artifact", True)
        return open_closest(self.folder, role, entry)

    def _figures(
        self, role: str, entry: GraphEntry, graph: Graph, reference: FloatReference, states: Sequence[Any]
    ) -> GraphQuality:
        """Over all texts but the sample."""

        def rows(graph: Graph) -> Iterator[Float32Array]:
            pairs = zip(self.own.texts, self.own.skips, strict=True)
            return chain.from_iterable(skip_rows(text_rows(graph, text), skip) for text, skip in pairs)

        exact = chain.from_iterable(
            skip_rows(reference.rows([state]), skip)
            for state, skip in zip(states[:-1], self.own.skips, strict=True)
        )
        target = rows(self.target) if role == "draft" else None
        return graph_quality(exact, rows(graph), target, draft_ids(self.folder, entry))

    def _sampled(
        self, role: str, entry: GraphEntry, graph: Graph, reference: FloatReference, states: Sequence[Any]
    ) -> GraphQuality:
        """Over the beginning of the sample."""
        tokens, begin = self.own.sample[:EMULATED_TOKENS], self.own.begin
        wanted = range(begin, len(tokens))
        ours = sample_rows(graph, tokens, wanted, lambda stage, part: self._tell(f"{role}: {stage}", part))
        exact = np.concatenate([*reference.rows([states[-1][begin : len(tokens)]])])
        target = sample_rows(self.target, tokens, wanted) if role == "draft" else None
        return graph_quality(
            [exact], [ours], None if target is None else [target], draft_ids(self.folder, entry)
        )

    def _evaluated(
        self, role: str, entry: GraphEntry, reference: FloatReference, states: Sequence[Any]
    ) -> GraphQuality:
        graph = open_evaluator(self.folder, entry)
        try:
            return self._figures(role, entry, graph, reference, states)
        finally:
            graph.close()

    def _tell(self, stage: str, part: float) -> None:
        if self.progress:
            self.progress(stage, part)


def _known(quality: GraphQuality) -> dict[str, Any]:
    return {name: value for name, value in asdict(quality).items() if value is not None}


def _by_the_cpu(twin: Mapping[str, Any], graph: GraphEntry) -> dict[str, Any]:
    """The record of a graph that shares its file with one that the CPU ran."""
    note = f"the same file by the CPU's kernels, not by {graph.options['providers'][0]}"
    return {**twin, "via": "reference-lowering", "executed_artifact": False, "note": note}


def text_rows(graph: Graph, text: IntArray) -> Iterator[Float32Array]:
    """Logits in the chunks of `FloatReference.rows`, whatever the widths of the graph are."""
    widest = min(ROWS, max(narrow_widths(graph) or (ROWS,)))
    width = 1 << (widest.bit_length() - 1)  # divides ROWS
    chunks = logit_rows(graph, text, width)
    while held := [rows.copy() for rows in islice(chunks, ROWS // width)]:
        yield np.concatenate(held)


def skip_rows(chunks: Iterable[Float32Array], skip: int) -> Iterator[Float32Array]:
    """The chunks without their first `skip` rows."""
    for rows in chunks:
        yield rows[min(skip, len(rows)) :]
        skip -= min(skip, len(rows))
