"""Prove a bundle on this machine: files, tokenizer, every graph against its float probe, rows, and the text.

Nothing here trusts the export: hashes are recomputed, graphs are run, and the pair's greedy text is compared
with the target alone, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.contracts import Float32Array, Graph, IntArray
from outrider.errors import BackendError, BundleError
from outrider.manifest import GraphEntry, bundle_path
from outrider.runtime.load import Placement, draft_ids, load
from outrider.runtime.pipeline import Pipeline, Result
from outrider.runtime.proof import Agreement, RowIndependence, agreement, probe_rows, row_independence

__all__ = ["Check", "GraphCheck", "TextCheck", "check_bundle", "first_difference"]

PROBE_NAME = "probe.npz"
MAX_KL = 0.7  # nats on the probe: above it a graph computes something else than its reference
SUFFIX_NOISE = 1e-5  # of the logits' spread: later rows must not move earlier ones at all
PROMPTS = (
    "Repeat these lines and add one more of the same kind: one red apple, two red apples, three red apples.",
    "Explain in two sentences what a lighthouse is for.",
    "Write a short Python function that adds two numbers.",
)
UNEVALUATED_TOKENS = 48  # as many as a probe holds
Progress = Callable[[str, float], None]
Probe = tuple[IntArray, list[int], Float32Array | None]
"""Tokens [S], rows [R], and the float reference's logits [R, V] where the export stored them."""


@dataclass(frozen=True)
class GraphCheck:
    """What was found about one graph. Errors are against the float reference on the stored probe.

    `evaluated` False: the bundle holds no probe, so nothing is known about them; the rest was proven.
    """

    role: str
    backend: str
    unit: str
    profile: str
    via: str | None  # how it was proven; None = it was not executed
    executed_artifact: bool
    max_abs_error: float | None
    top1_agreement: float | None
    kl: float | None
    row_independence: RowIndependence | None
    acceptance: float | None  # drafts: accepted / evaluated in the greedy runs of this check
    problems: tuple[str, ...] = ()
    evaluated: bool = True


@dataclass(frozen=True)
class TextCheck:
    """Greedy text of one drafter against the target alone. `gap`: the target's own top-1/top-2 gap there."""

    drafter: str
    k: str
    tokens: int
    acceptance: float | None
    first_difference: int | None
    gap: float | None
    near_tie: bool


@dataclass(frozen=True)
class Check:
    """The verdict on a bundle; `evaluated` False: of all but the distance from the float weights."""

    ok: bool
    graphs: tuple[GraphCheck, ...]
    texts: tuple[TextCheck, ...]
    problems: tuple[str, ...] = ()
    placement: tuple[Placement, ...] = field(default=())
    evaluated: bool = True


def check_bundle(
    directory: Path, *, max_tokens: int = 64, progress: Progress | None = None, **loading: Any
) -> Check:
    """Run every check. Raises BundleError for damaged files; what runs but fails is in the result's problems."""
    tell = progress or (lambda stage, part: None)
    tell("hashes", 0.0)
    with load(directory, verify="full", **loading) as pipeline:
        manifest = pipeline.manifest
        assert manifest is not None
        graphs = []
        for placed in pipeline.placement:
            tell(f"{placed.role}: probe", 0.0)
            graph = _graph(pipeline, placed.role)
            entry = next(g for g in manifest.roles[placed.role].graphs if g.path == placed.path)
            probe = _read_probe(directory, entry) or _unevaluated(pipeline, graph)
            ids = draft_ids(directory, entry)
            graphs.append(_check_graph(placed, graph, probe, ids))
        problems = [f"{graph.role}: {problem}" for graph in graphs for problem in graph.problems]
        texts: list[TextCheck] = []
        if all(graph.executed_artifact for graph in graphs):
            try:
                texts = _check_texts(pipeline, max_tokens, _width_noise(graphs), tell)
            except BackendError as error:
                problems.append(f"greedy text: {error}")
        graphs = [_with_acceptance(graph, texts) for graph in graphs]
        problems += [
            _difference(text) for text in texts if text.first_difference is not None and not text.near_tie
        ]
        evaluated = all(graph.evaluated for graph in graphs)
        return Check(
            not problems, tuple(graphs), tuple(texts), tuple(problems), pipeline.placement, evaluated
        )


def _width_noise(graphs: Sequence[GraphCheck]) -> float:
    """How far the target's logits move with the width; what moves in a draft's cannot change the text."""
    rows = [graph.row_independence for graph in graphs if graph.role == "target"]
    return max((found.width for found in rows if found is not None), default=0.0)


def _graph(pipeline: Pipeline, role: str) -> Graph:
    if role == "target":
        return pipeline.engine.target
    graph: Graph = pipeline.engine.drafters["model"].graph  # type: ignore[attr-defined]
    return graph


def _unevaluated(pipeline: Pipeline, graph: Graph) -> Probe:
    """Tokens to run a graph on where the export stored none, and no reference."""
    ids = pipeline.tokenizer.encode(" ".join(PROMPTS))[: min(UNEVALUATED_TOKENS, graph.max_context)]
    return np.asarray(ids, np.int64), [len(ids) - 1], None


def _check_graph(placed: Placement, graph: Graph, probe: Probe, ids: IntArray | None = None) -> GraphCheck:
    found: Agreement | None = None
    rows: RowIndependence | None = None
    executed = False
    try:
        found, rows, problems = _prove(placed.role, graph, probe, ids)
        executed = True
    except Exception as error:  # whatever its library raises, a graph that does not run is a finding
        problems = [f"cannot be run as the manifest describes it ({_first_line(error)}); export it again"]
    return GraphCheck(
        role=placed.role,
        backend=placed.backend,
        unit=placed.unit,
        profile=placed.profile,
        via="artifact" if executed else None,
        executed_artifact=executed,
        max_abs_error=found.max_abs_error if found else None,
        top1_agreement=found.top1_agreement if found else None,
        kl=found.kl if found else None,
        row_independence=rows,
        acceptance=None,
        problems=tuple(problems),
        evaluated=probe[2] is not None,
    )


def _prove(
    role: str, graph: Graph, probe: Probe, ids: IntArray | None
) -> tuple[Agreement | None, RowIndependence | None, list[str]]:
    tokens, wanted, reference = probe
    ours = probe_rows(graph, tokens, wanted)
    if not np.isfinite(ours).all():
        return None, None, ["logits are not finite: the weights are damaged; export the bundle again"]
    found = None if reference is None else agreement(ours, reference, ids)
    rows = row_independence(graph, tokens)
    return found, rows, _judge(role, found, rows)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _judge(role: str, found: Agreement | None, rows: RowIndependence) -> list[str]:
    problems = []
    if found is not None and found.kl > MAX_KL:
        problems.append(f"logits are {found.kl:.2f} nats from the float reference, more than {MAX_KL}")
    if rows.suffix > SUFFIX_NOISE * rows.spread and role == "target":
        problems.append(f"verify rows feel later rows (by {rows.suffix:.1e}): this target is not lossless")
    return problems


def _read_probe(directory: Path, entry: GraphEntry) -> Probe | None:
    name = next((name for name in entry.files if name.endswith(PROBE_NAME)), None)
    if name is None:
        return None
    try:
        with np.load(bundle_path(directory, name)) as stored:
            return stored["tokens"], [int(row) for row in stored["rows"]], stored["logits"]
    except (OSError, ValueError, KeyError) as error:
        raise BundleError(f"{name} cannot be read ({error}); export the bundle again") from error


def _check_texts(pipeline: Pipeline, max_tokens: int, noise: float, tell: Progress) -> list[TextCheck]:
    results: list[TextCheck] = []
    for index, prompt in enumerate(PROMPTS):
        tell("greedy text", index / len(PROMPTS))
        plain = _greedy(pipeline, prompt, None, 0, max_tokens)
        for drafter in pipeline.engine.drafters:
            for k in (2, 5):
                drafted = _greedy(pipeline, prompt, drafter, k, max_tokens)
                results.append(_compare(drafter, k, plain, drafted, noise))
    return results


def _greedy(pipeline: Pipeline, prompt: str, drafter: str | None, k: int, max_tokens: int) -> Result:
    pipeline.reset()
    if pipeline.template is None:
        ids = pipeline.tokenizer.encode(prompt)
    else:
        ids = pipeline.chat_tokens([{"role": "user", "content": prompt}])
    fitting = ids[: pipeline.engine.target.max_context // 2]
    return pipeline.generate(fitting, k=k, drafter=drafter, max_tokens=max_tokens, logprobs=2)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The index of the first token in which two texts differ, or None when they are equal."""
    for index, (ours, theirs) in enumerate(zip(a, b, strict=False)):
        if ours != theirs:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _compare(drafter: str, k: int, plain: Result, drafted: Result, noise: float) -> TextCheck:
    """`noise` is how far a logit moves with the width; two of them can swap when their gap is below twice that."""
    index = first_difference(plain.tokens, drafted.tokens)
    gap = None
    if index is not None and plain.logprobs is not None and index < len(plain.logprobs):
        top = [value for _, value in plain.logprobs[index].top[:2]]
        gap = float(top[0] - top[1]) if len(top) == 2 else None
    return TextCheck(
        drafter=drafter,
        k=str(k),
        tokens=len(drafted.tokens),
        acceptance=drafted.stats.acceptance,
        first_difference=index,
        gap=gap,
        near_tie=gap is not None and gap <= 2 * noise,
    )


def _with_acceptance(graph: GraphCheck, texts: Sequence[TextCheck]) -> GraphCheck:
    found = [text.acceptance for text in texts if text.drafter == "model" and text.acceptance is not None]
    if graph.role != "draft" or not found:
        return graph
    return replace(graph, acceptance=sum(found) / len(found))


def _difference(text: TextCheck) -> str:
    where = f"greedy text with {text.drafter} k={text.k} differs from the target's own at token "
    gap = "" if text.gap is None else f", where its two best tokens are {text.gap:.3f} logits apart"
    return f"{where}{text.first_difference}{gap}"
