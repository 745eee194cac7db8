"""Prove a bundle on this machine: files, tokenizer, every graph against its float probe, rows, and the text.

Nothing here trusts the export: hashes are recomputed, graphs are run, and the pair's greedy text is compared
with the target alone, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from outrider.contracts import Graph
from outrider.errors import BackendError
from outrider.manifest import GraphEntry, Via
from outrider.runtime.check_graph import GraphCheck, GraphChecker, Probe
from outrider.runtime.closest import Opened, graph_key, open_closest
from outrider.runtime.load import load
from outrider.runtime.pipeline import Pipeline, Result
from outrider.runtime.placed import Placement

__all__ = ["Check", "GraphCheck", "TextCheck", "check_bundle", "first_difference"]

PROMPTS = (
    "Repeat these lines and add one more of the same kind: one red apple, two red apples, three red apples.",
    "Explain in two sentences what a lighthouse is for.",
    "Write a short Python function that adds two numbers.",
)
DRAFTED = (2, 5)  # tokens a round
QUICK_PROMPT, QUICK_TOKENS = (
    2,
    8,
)  # of a text on an emulator, which takes seconds for one and a minute for a wide forward
UNEVALUATED_TOKENS = 48  # as many as a probe holds
Progress = Callable[[str, float], None]


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
    directory: Path,
    *,
    max_tokens: int = 64,
    quick: bool = False,
    progress: Progress | None = None,
    **loading: Any,
) -> Check:
    """Run every check on every graph. Raises BundleError for damaged files; what fails is in the problems.

    `quick` runs a few steps only of graphs that an emulator runs, and one short text where the text needs them.
    `loading` goes to `load`; with `telemetry` the texts are governed by that trace, and one lets the governor choose k.
    """
    tell = progress or (lambda stage, part: None)
    tell("hashes", 0.0)
    governed = loading.get("telemetry") is not None
    if not governed:
        loading["governor"] = False  # a proof waits for no sensor
    with load(directory, verify="full", **loading) as pipeline:
        graphs = _check_graphs(directory, pipeline, quick, loading.get("threads"), tell)
        problems = [f"{_name(graph, graphs)}: {problem}" for graph in graphs for problem in graph.problems]
        texts: list[TextCheck] = []
        if not any(graph.problems and graph.via is None for graph in graphs):
            try:
                noise = _width_noise(graphs, pipeline)
                texts = _check_texts(pipeline, max_tokens, noise, quick, governed, tell)
            except BackendError as error:
                problems.append(f"greedy text: {error}")
        graphs = [_with_acceptance(graph, texts, pipeline.placement) for graph in graphs]
        problems += [
            _difference(text) for text in texts if text.first_difference is not None and not text.near_tie
        ]
        evaluated = all(graph.evaluated for graph in graphs)
        return Check(
            not problems, tuple(graphs), tuple(texts), tuple(problems), pipeline.placement, evaluated
        )


def _check_graphs(
    directory: Path, pipeline: Pipeline, quick: bool, threads: int | None, tell: Progress
) -> list[GraphCheck]:
    """Every graph of the roles that were loaded, in the order of preference."""
    manifest = pipeline.manifest
    assert manifest is not None
    target = pipeline.engine.target
    records = manifest.quality.get("graphs", {})
    checker = GraphChecker(directory, target, records, _unevaluated(pipeline, target), quick, threads, tell)
    found: list[GraphCheck] = []
    for placed in pipeline.placement:
        role = placed.role
        chosen = _graph(pipeline, role)
        via: Via = getattr(chosen, "via", "artifact")
        open_here = partial(Opened, chosen, via, bool(getattr(chosen, "executed_artifact", True)))
        for entry in manifest.roles[role].by_preference():
            tell(f"{role}: probe", 0.0)
            if (entry.path, entry.unit) == (placed.path, placed.unit):
                found.append(checker.check(role, entry, graph_key(entry), open_here))
            else:
                found.append(_check_another(checker, directory, role, entry, threads))
    return found


def _check_another(
    checker: GraphChecker, directory: Path, role: str, entry: GraphEntry, threads: int | None
) -> GraphCheck:
    """A graph that `load` did not choose."""
    with ExitStack() as stack:

        def open_it() -> Opened:
            opened = open_closest(directory, role, entry, threads)
            stack.callback(opened.graph.close)
            return opened

        return checker.check(role, entry, graph_key(entry), open_it)


def _name(graph: GraphCheck, graphs: Sequence[GraphCheck]) -> str:
    """The role, and which of its graphs where there are several."""
    several = sum(other.role == graph.role for other in graphs) > 1
    return f"{graph.role} ({graph.path}, {graph.unit})" if several else graph.role


def _width_noise(graphs: Sequence[GraphCheck], pipeline: Pipeline) -> float:
    """How far the logits of the target that writes move with the width; a draft's cannot change the text."""
    placed = pipeline.placement[0]
    rows = [
        graph.row_independence
        for graph in graphs
        if (graph.role, graph.path, graph.unit) == ("target", placed.path, placed.unit)
    ]
    return max((found.width for found in rows if found is not None), default=0.0)


def _graph(pipeline: Pipeline, role: str) -> Graph:
    if role == "target":
        return pipeline.engine.target
    graph: Graph = pipeline.engine.drafters["model"].graph  # type: ignore[attr-defined]
    return graph


def _unevaluated(pipeline: Pipeline, graph: Graph) -> Probe:
    """Tokens to run a graph on where the export stored none, and no reference."""
    ids = pipeline.tokenizer.encode(" ".join(PROMPTS))[: min(UNEVALUATED_TOKENS, graph.max_context)]
    return Probe(np.asarray(ids, np.int64), (len(ids) - 1,), None)


@dataclass(frozen=True)
class _Text:
    """One text, and the drafters and draft lengths that are to leave it as it is."""

    prompt: str
    prompt_tokens: int | None  # of it; None = as many as fit
    max_tokens: int
    drafted: tuple[tuple[str, int], ...]


def _texts(pipeline: Pipeline, max_tokens: int, quick: bool) -> list[_Text]:
    """Every prompt with every drafter; one short text where an emulator takes part and that is to be quick."""
    widest = max(pipeline.engine.target.widths or (max(DRAFTED) + 1,))
    lengths = sorted({min(k, widest - 1) for k in DRAFTED} - {0})
    emulated = {placed.role for placed in pipeline.placement if placed.emulated and quick}
    drafters = list(pipeline.engine.drafters)
    slow = [name for name in drafters if "target" in emulated or (name == "model" and "draft" in emulated)]
    fast = tuple((name, k) for name in drafters if name not in slow for k in lengths)
    texts = [_Text(prompt, None, max_tokens, fast) for prompt in PROMPTS] if fast else []
    if slow and lengths:
        short = min(max_tokens, QUICK_TOKENS)
        texts.append(_Text(PROMPTS[0], QUICK_PROMPT, short, tuple((name, lengths[0]) for name in slow)))
    return texts


def _check_texts(
    pipeline: Pipeline, max_tokens: int, noise: float, quick: bool, governed: bool, tell: Progress
) -> list[TextCheck]:
    results: list[TextCheck] = []
    texts = _texts(pipeline, max_tokens, quick)
    for index, text in enumerate(texts):
        tell("greedy text", index / len(texts))
        plain = _greedy(pipeline, text, None, 0)
        for drafter, k in text.drafted:
            results.append(_compare(drafter, k, plain, _greedy(pipeline, text, drafter, k), noise))
        if governed and text.drafted:
            chosen = _greedy(pipeline, text, "auto", "auto")
            results.append(_compare("any", "auto", plain, chosen, noise))
    return results


def _greedy(pipeline: Pipeline, text: _Text, drafter: str | None, k: int | Literal["auto"]) -> Result:
    pipeline.reset()
    if pipeline.template is None:
        ids = pipeline.tokenizer.encode(text.prompt)
    else:
        ids = pipeline.chat_tokens([{"role": "user", "content": text.prompt}])
    fitting = ids[: text.prompt_tokens or pipeline.engine.target.max_context // 2]
    return pipeline.generate(fitting, k=k, drafter=drafter, max_tokens=text.max_tokens, logprobs=2)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The index of the first token in which two texts differ, or None when they are equal."""
    for index, (ours, theirs) in enumerate(zip(a, b, strict=False)):
        if ours != theirs:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def _compare(drafter: str, k: int | str, plain: Result, drafted: Result, noise: float) -> TextCheck:
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


def _with_acceptance(
    graph: GraphCheck, texts: Sequence[TextCheck], placement: Sequence[Placement]
) -> GraphCheck:
    """The acceptance in the texts, of the draft that was loaded."""
    found = [text.acceptance for text in texts if text.drafter == "model" and text.acceptance is not None]
    loaded = {(placed.role, placed.path, placed.unit) for placed in placement}
    if graph.role != "draft" or not found or (graph.role, graph.path, graph.unit) not in loaded:
        return graph
    return replace(graph, acceptance=sum(found) / len(found))


def _difference(text: TextCheck) -> str:
    where = f"greedy text with {text.drafter} k={text.k} differs from the target's own at token "
    gap = "" if text.gap is None else f", where its two best tokens are {text.gap:.3f} logits apart"
    return f"{where}{text.first_difference}{gap}"
