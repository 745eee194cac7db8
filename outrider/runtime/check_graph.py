"""What `check` proves about one graph: its logits beside the float reference, its rows, and a draft's acceptance."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.contracts import Float32Array, Graph, IntArray
from outrider.errors import BackendError, BundleError, MissingExtraError
from outrider.manifest import GraphEntry, bundle_path
from outrider.quantize.gates import gate_for, shortfalls
from outrider.quantize.quality import GraphQuality, graph_quality
from outrider.runtime.closest import Opened, open_evaluator
from outrider.runtime.load import draft_ids
from outrider.runtime.proof import (
    Agreement,
    RowIndependence,
    agreement,
    probe_rows,
    row_independence,
    sample_rows,
)
from outrider.targets.ane_lint import LintReport, lint_package

__all__ = ["GraphCheck", "GraphChecker", "Probe", "read_probe"]

PROBE_NAME = "probe.npz"
MAX_KL = 0.7  # nats on the probe: above it a graph computes something else than its reference
SUFFIX_NOISE = 1e-5  # of the logits' spread: later rows must not move earlier ones at all
QUICK_STEPS = 12  # of the sample, for graphs that an emulator runs
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Probe:
    """Tokens [S], rows [R], and the float reference's logits [R, V] where the export stored them."""

    tokens: IntArray
    rows: tuple[int, ...]
    logits: Float32Array | None

    def first(self, tokens: int) -> Probe:
        """The probe of the first so many tokens."""
        rows = tuple(row for row in self.rows if row < tokens)
        logits = None if self.logits is None else self.logits[: len(rows)]
        return Probe(self.tokens[:tokens], rows, logits)


@dataclass(frozen=True)
class GraphCheck:
    """What was found about one graph. Errors are against the float reference on the stored probe.

    `via` None: it was not executed here, and `note` says why. `quality` is measured on a short text of the target's
    own; of drafts it holds their acceptance on the device's arithmetic. `evaluated` False: the bundle holds no
    probe, so nothing is known about errors; the rest was proven.
    """

    role: str
    backend: str
    unit: str
    profile: str
    path: str
    recipe: str
    via: str | None
    executed_artifact: bool
    max_abs_error: float | None = None
    top1_agreement: float | None = None
    kl: float | None = None
    quality: GraphQuality | None = None
    row_independence: RowIndependence | None = None
    acceptance: float | None = None  # drafts: accepted / evaluated in the greedy runs of this check
    problems: tuple[str, ...] = ()
    evaluated: bool = True
    note: str = ""
    lint: LintReport | None = None  # of packages for Apple's Neural Engine


def read_probe(directory: str | os.PathLike[str], entry: GraphEntry, own: bool = False) -> Probe | None:
    """The probe of a graph's role, or its sample of the target's own text; None where the export stored none.

    Raises BundleError for a file that cannot be read.
    """
    name = next((name for name in entry.files if name.endswith(PROBE_NAME)), None)
    if name is None:
        return None
    prefix = "own_" if own else ""
    try:
        with np.load(bundle_path(directory, name)) as stored:
            if own and "own_tokens" not in stored:
                return None
            tokens, rows, logits = (stored[prefix + part] for part in ("tokens", "rows", "logits"))
            return Probe(tokens, tuple(int(row) for row in rows), logits.astype(np.float32))
    except (OSError, ValueError, KeyError) as error:
        raise BundleError(f"{name} cannot be read ({error}); export the bundle again") from error


@dataclass
class GraphChecker:
    """Checks the graphs of one bundle; `target` is its target as it runs here, `records` what the export found."""

    directory: str | os.PathLike[str]
    target: Graph
    records: Mapping[str, Mapping[str, Any]]  # `quality["graphs"]` of the manifest
    stand_in: Probe  # tokens to run where the export stored none
    quick: bool
    threads: int | None
    tell: Progress

    def check(self, role: str, entry: GraphEntry, key: str, open_it: Callable[[], Opened]) -> GraphCheck:
        """Open a graph and prove it; what its library raises is a finding. `key` is its name among `records`."""
        blank = GraphCheck(
            role, entry.backend, entry.unit, entry.profile, entry.path, entry.recipe, None, False
        )
        blank = self._linted(blank, entry)
        probe = read_probe(self.directory, entry)
        try:
            opened = open_it()
        except (BackendError, MissingExtraError) as error:
            return replace(blank, note=_first_line(error), evaluated=probe is not None)
        blank = replace(blank, note=opened.note)
        try:
            found = self._prove(blank, entry, opened, probe)
        except Exception as error:  # whatever its library raises, a graph that does not run is a finding
            reason = f"cannot be run as the manifest describes it ({_first_line(error)}); export it again"
            return replace(blank, problems=(reason,))
        allowed = bool(self.records.get(key, {}).get("allowed"))
        below = [] if found.quality is None else shortfalls(found.quality, gate_for(entry.recipe))
        if below and not found.problems and not allowed:
            found = replace(found, problems=(f"below the gate of {entry.recipe}: {'; '.join(below)}",))
        return replace(
            found,
            via=opened.via,
            executed_artifact=opened.executed_artifact,
            evaluated=probe is not None,
        )

    def _linted(self, blank: GraphCheck, entry: GraphEntry) -> GraphCheck:
        """What is known to keep a Core ML package off the Neural Engine, where it is meant for it."""
        if (entry.backend, entry.unit) != ("coreml", "npu"):
            return blank
        self.tell(f"{blank.role}: rules of the Neural Engine", 0.0)
        try:
            return replace(blank, lint=lint_package(bundle_path(self.directory, entry.path).parent))
        except (BackendError, MissingExtraError):  # opening the graph will say so
            return blank

    def _prove(self, blank: GraphCheck, entry: GraphEntry, opened: Opened, probe: Probe | None) -> GraphCheck:
        role, slow, ids = blank.role, opened.via == "emulator", draft_ids(self.directory, entry)
        probe = probe or self.stand_in
        found: Agreement | None = None
        if not slow:
            ours = probe_rows(opened.graph, probe.tokens, probe.rows)
            if not np.isfinite(ours).all():
                return replace(blank, problems=(DAMAGED,))
            found = None if probe.logits is None else agreement(ours, probe.logits, ids)
        quality = self._quality(role, entry, opened.graph, slow, ids)
        if quality is not None and not np.isfinite(quality.kl):
            return replace(blank, problems=(DAMAGED,))
        rows = self._rows(role, entry, opened.graph, slow, probe.tokens)
        known = found or quality
        return replace(
            blank,
            max_abs_error=known.max_abs_error if known else None,
            top1_agreement=known.top1_agreement if known else None,
            kl=known.kl if known else None,
            quality=quality,
            row_independence=rows,
            problems=tuple(_judge(role, found, rows)),
        )

    def _quality(
        self, role: str, entry: GraphEntry, graph: Graph, slow: bool, ids: IntArray | None
    ) -> GraphQuality | None:
        """On the sample; an emulator that is told to be quick, or has no reference, runs its first steps."""
        sample = read_probe(self.directory, entry, own=True)
        probe = sample or self.stand_in.first(QUICK_STEPS)
        if sample is None and not slow:
            return None
        probe = probe.first(QUICK_STEPS if slow and self.quick else graph.max_context)
        stage = f"{role} on the emulated {entry.unit}: " if slow else f"{role}: {entry.path}: "
        ours = sample_rows(
            graph, probe.tokens, probe.rows, lambda steps, part: self.tell(stage + steps, part)
        )
        if probe.logits is None:
            return None
        target = [sample_rows(self.target, probe.tokens, probe.rows)] if role == "draft" else None
        return graph_quality([probe.logits], [ours], target, ids)

    def _rows(
        self, role: str, entry: GraphEntry, graph: Graph, slow: bool, tokens: IntArray
    ) -> RowIndependence | None:
        """A target that is emulated shows its rows by our evaluator; an emulated draft's need no proof."""
        if not slow:
            return row_independence(graph, tokens)
        if role != "target":
            return None
        fast = open_evaluator(self.directory, entry, self.threads)
        try:
            return row_independence(fast, tokens)
        finally:
            fast.close()


DAMAGED = "logits are not finite: the weights are damaged; export the bundle again"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _judge(role: str, found: Agreement | None, rows: RowIndependence | None) -> list[str]:
    problems = []
    if found is not None and found.kl > MAX_KL:
        problems.append(f"logits are {found.kl:.2f} nats from the float reference, more than {MAX_KL}")
    if rows is not None and rows.suffix > SUFFIX_NOISE * rows.spread and role == "target":
        problems.append(f"verify rows feel later rows (by {rows.suffix:.1e}): this target is not lossless")
    return problems
