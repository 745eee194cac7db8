"""What an export cost: each role against its float reference; the pair's acceptance, float and quantized.

The evaluation is 2,048 tokens of WikiText-2 and 512 tokens that the exported target wrote itself. The
float side comes from `reference.py`, one layer in memory at a time; the other side is the shipped graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from outrider.contracts import Float32Array, Graph, IntArray
from outrider.errors import ExportError
from outrider.export.options import WHOLE, Extent
from outrider.export.prove import OwnTexts, Prover, skip_rows, text_rows
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights, Tensors
from outrider.manifest import FileEntry, Manifest, RoleEntry, describe_file
from outrider.quantize.quality import compare, evaluation_text, pair_acceptance
from outrider.runtime.closest import graph_key
from outrider.runtime.doctor import measure_costs, measure_reading
from outrider.runtime.load import draft_ids, load
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.proof import row_independence
from outrider.runtime.timing import timing_of

__all__ = ["PROBE", "evaluate_bundle"]

PROBE = "probe.npz"  # for `outrider check`: tokens [S], rows [R], logits [R, V] of the float reference, twice
SEGMENT = 1024  # tokens in one teacher-forced sequence
PROBE_TOKENS, PROBE_ROWS = 48, 4
SAMPLE_PROMPT = "The lighthouse keeper"
SAMPLE_PREFIX, SAMPLE_TOKENS = 4, 40  # few tokens of the prompt: an emulator needs seconds for each
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Summarize the story of Robinson Crusoe.",
    "List five things to check before a long bicycle tour, with a reason for each.",
)
Progress = Callable[[str, float], None]


def evaluate_bundle(
    folder: Path,
    manifest: Manifest,
    checkpoints: Mapping[str, Tensors],
    progress: Progress | None = None,
    allow_quality: bool = False,
    extent: Extent = WHOLE,
) -> Manifest:
    """Measure the bundle in `folder`, write its probes, and return its manifest with quality, timing and probes.

    Raises ExportError when a graph is below the gate of its recipe, unless `allow_quality`, which is noted.
    """
    with load(folder) as pipeline:
        graphs = _graphs(pipeline)
        shortest = min(entry.max_context for role in manifest.roles.values() for entry in role.graphs)
        wikitext = _segments(pipeline.tokenizer.encode(evaluation_text())[: extent.wikitext], shortest)
        own = _own_texts(pipeline, shortest, extent.own)
        placed = {place.path: graphs[place.role] for place in pipeline.placement}
        prover = Prover(folder, own, graphs["target"], placed, progress)
        quality: dict[str, Any] = {}
        records: dict[str, Any] = {}
        drafts: list[list[Float32Array]] = []
        roles = dict(manifest.roles)
        ids = _draft_ids(folder, pipeline)
        for role, graph in graphs.items():
            reference = FloatReference(SlotWeights(checkpoints[role]))
            report = (
                (lambda part, role=role: progress(f"{role}: float reference", part)) if progress else None
            )
            states = reference.final_states([*wikitext, *own.all], report)
            quality[role] = _against_reference(
                reference, states[: len(wikitext)], graph, wikitext, ids if role == "draft" else None
            )
            quality[role]["row_deviation"] = row_independence(graph, wikitext[0][:64]).width
            own_states = states[len(wikitext) :]
            found = prover.records(role, roles[role], reference, own_states)
            _refuse_below(roles[role], found, allow_quality)
            probe = _write_probe(folder, role, reference, (states[0], wikitext[0]), own, own_states[-1])
            roles[role] = _proven(roles[role], f"{role}/{PROBE}", probe, found)
            records |= found
            if role == "draft":
                drafts = [[rows.copy() for rows in reference.rows([state])] for state in own_states[:-1]]
        if "draft" in graphs:
            quality["pair"] = _acceptance(graphs, own, drafts, ids)
        timing = timing_of(measure_costs(pipeline, repeats=3), pipeline.machine, measure_reading(pipeline))
        quality |= {"graphs": records, "machine": pipeline.machine}
    return replace(manifest, quality=quality, timing=timing, roles=roles)


def _refuse_below(entry: RoleEntry, records: Mapping[str, dict[str, Any]], allow: bool) -> None:
    """Note what was allowed; raises ExportError for what was not."""
    recipes = {graph_key(graph): graph.recipe for graph in entry.graphs}
    below = {key: record["below"] for key, record in records.items() if not record["passed"]}
    if below and not allow:
        lines = [f"{key} ({recipes[key]}): {'; '.join(reasons)}" for key, reasons in below.items()]
        raise ExportError(
            "below the gate of its recipe, beside the float weights:\n  "
            + "\n  ".join(lines)
            + "\nTake a recipe with more bits or overrides, or --allow-quality to ship it as it is"
        )
    for key in below:
        records[key]["allowed"] = True


def _graphs(pipeline: Pipeline) -> dict[str, Graph]:
    graphs: dict[str, Graph] = {"target": pipeline.engine.target}
    model = pipeline.engine.drafters.get("model")
    if model is not None:
        graphs["draft"] = model.graph  # type: ignore[attr-defined]
    return graphs


def _draft_ids(folder: Path, pipeline: Pipeline) -> IntArray | None:
    """The ids of a trimmed draft's columns, None where it is whole or there is no draft."""
    placed = next((place for place in pipeline.placement if place.role == "draft"), None)
    if placed is None or pipeline.manifest is None:
        return None
    entries = pipeline.manifest.roles["draft"].graphs
    return draft_ids(folder, next(entry for entry in entries if entry.path == placed.path))


def _segments(tokens: Sequence[int], longest: int) -> list[IntArray]:
    ids = np.asarray(tokens, np.int64)
    size = min(SEGMENT, longest)
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def _own_texts(pipeline: Pipeline, longest: int, tokens: int) -> OwnTexts:
    """Prompts with the target's own greedy answers, and a sample behind a few plain words."""
    texts, skips = [], []
    budget = max(8, min(tokens // len(PROMPTS), longest // 2))
    for prompt in PROMPTS:
        ids = _prompt_ids(pipeline, prompt)[: longest // 4]
        texts.append(_continued(pipeline, ids, budget))
        skips.append(len(ids) - 1)  # the prompt's last row predicts the first token of the answer
    begin = pipeline.tokenizer.encode(SAMPLE_PROMPT)[:SAMPLE_PREFIX]
    sample = _continued(pipeline, begin, min(SAMPLE_TOKENS, longest) - len(begin))
    return OwnTexts(texts, skips, sample, len(begin) - 1)


def _continued(pipeline: Pipeline, ids: Sequence[int], budget: int) -> IntArray:
    result = pipeline.generate(list(ids), k=0, max_tokens=budget, ignore_eos=True)
    return np.asarray([*ids, *result.tokens], np.int64)


def _prompt_ids(pipeline: Pipeline, prompt: str) -> list[int]:
    if pipeline.template is None:
        return list(pipeline.tokenizer.encode(prompt))
    text = pipeline.template.render([{"role": "user", "content": prompt}])
    return list(pipeline.tokenizer.encode(text))


def _against_reference(
    reference: FloatReference,
    states: Sequence[Any],
    graph: Graph,
    segments: Sequence[IntArray],
    ids: IntArray | None,
) -> dict[str, Any]:
    rows = chain.from_iterable(text_rows(graph, segment) for segment in segments)
    quality = compare(reference.rows(states), rows, np.concatenate(segments), ids)
    return {**asdict(quality), "perplexity_increase": quality.perplexity_increase}


def _acceptance(
    graphs: Mapping[str, Graph],
    texts: OwnTexts,
    float_drafts: Sequence[Sequence[Float32Array]],
    ids: IntArray | None,
) -> dict[str, Any]:
    """Acceptance of the float and of the exported draft by the exported target, on the target's own text.

    `ids` are those of a trimmed draft's columns; the float draft is whole, and counted trimmed as well.
    """

    def own(graph: Graph) -> Iterator[Float32Array]:
        pairs = zip(texts.texts, texts.skips, strict=True)
        return chain.from_iterable(skip_rows(text_rows(graph, text), skip) for text, skip in pairs)

    def exact() -> Iterator[Float32Array]:
        pairs = zip(float_drafts, texts.skips, strict=True)
        return chain.from_iterable(skip_rows(rows, skip) for rows, skip in pairs)

    count = sum(len(text) - skip for text, skip in zip(texts.texts, texts.skips, strict=True))
    quantized = pair_acceptance(own(graphs["target"]), own(graphs["draft"]), count, ids)
    floating = pair_acceptance(own(graphs["target"]), exact(), count)
    trimmed = {}
    if ids is not None:
        fewer = pair_acceptance(own(graphs["target"]), (rows[:, ids] for rows in exact()), count, ids)
        trimmed = {
            "draft_vocab": len(ids),
            "greedy_match_trimmed_float_draft": fewer.greedy_match,
            "sum_min_pq_trimmed_float_draft": fewer.sum_min_pq,
        }
    return {
        "greedy_match": quantized.greedy_match,
        "sum_min_pq": quantized.sum_min_pq,
        "greedy_match_float_draft": floating.greedy_match,
        "sum_min_pq_float_draft": floating.sum_min_pq,
        "tokens": count,
        **trimmed,
    }


def _write_probe(
    folder: Path,
    role: str,
    reference: FloatReference,
    probe: tuple[Any, IntArray],  # states and tokens of a text
    own: OwnTexts,
    own_state: Any,  # of the sample
) -> FileEntry:
    """Store float logits for `outrider check`: a few of a text, and those of the sample."""
    state, tokens = probe
    ids = tokens[:PROBE_TOKENS]
    rows = np.linspace(len(ids) // 4, len(ids) - 1, PROBE_ROWS).astype(np.int64)
    own_rows = np.arange(own.begin, len(own.sample))
    path = folder / role / PROBE
    np.savez(
        path,
        tokens=ids,
        rows=rows,
        logits=next(iter(reference.rows([state[rows]]))),
        own_tokens=own.sample,
        own_rows=own_rows,
        own_logits=np.concatenate([*reference.rows([own_state[own_rows]])]).astype(np.float16),
    )
    return describe_file(path)


def _proven(
    entry: RoleEntry, name: str, probe: FileEntry, records: Mapping[str, Mapping[str, Any]]
) -> RoleEntry:
    """The role with its probe, and with how each graph was proven."""
    graphs = []
    for graph in entry.graphs:
        record = records[graph_key(graph)]
        via, executed = record["via"], record["executed_artifact"]
        graphs.append(replace(graph, files={**graph.files, name: probe}, via=via, executed_artifact=executed))
    return RoleEntry(tuple(graphs))
