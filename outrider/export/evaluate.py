"""What an export cost: each role against its float reference; the pair's acceptance, float and quantized.

The fixed evaluation is 2,048 tokens of WikiText-2 and 512 tokens that the exported target wrote itself. The
float side comes from `reference.py`, one layer in memory at a time; the other side is the shipped graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from outrider.contracts import Float32Array, Graph, IntArray
from outrider.export.reference import ROWS, FloatReference
from outrider.export.slots import SlotWeights, Tensors
from outrider.manifest import GraphEntry, Manifest, RoleEntry, describe_file
from outrider.quantize.quality import compare, evaluation_text, logit_rows, pair_acceptance
from outrider.runtime.doctor import measure_costs
from outrider.runtime.load import draft_ids, load
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.proof import row_independence
from outrider.runtime.timing import timing_of

__all__ = ["PROBE", "evaluate_bundle"]

PROBE = "probe.npz"  # tokens [S], rows [R], logits [R, V] of the float reference, for `outrider check`
WIKITEXT_TOKENS = 2048
OWN_TOKENS = 512
SEGMENT = 1024  # tokens in one teacher-forced sequence
PROBE_TOKENS, PROBE_ROWS = 48, 4
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Summarize the story of Robinson Crusoe.",
    "List five things to check before a long bicycle tour, with a reason for each.",
)
Progress = Callable[[str, float], None]


def evaluate_bundle(
    folder: Path, manifest: Manifest, checkpoints: Mapping[str, Tensors], progress: Progress | None = None
) -> Manifest:
    """Measure the bundle in `folder`, write its probes, and return its manifest with quality, timing and probes."""
    with load(folder) as pipeline:
        graphs = _graphs(pipeline)
        wikitext = _segments(pipeline.tokenizer.encode(evaluation_text()), graphs["target"])
        own, skips = _own_texts(pipeline)
        quality: dict[str, Any] = {}
        drafts: list[list[Float32Array]] = []
        roles = dict(manifest.roles)
        ids = _draft_ids(folder, pipeline)
        for role, graph in graphs.items():
            reference = FloatReference(SlotWeights(checkpoints[role]))
            report = (
                (lambda part, role=role: progress(f"{role}: float reference", part)) if progress else None
            )
            states = reference.final_states([*wikitext, *own], report)
            quality[role] = _against_reference(
                reference, states[: len(wikitext)], graph, wikitext, ids if role == "draft" else None
            )
            quality[role]["row_deviation"] = row_independence(graph, wikitext[0][:64]).width
            entry = _write_probe(folder, role, roles[role], reference, states[0], wikitext[0])
            roles[role] = entry
            if role == "draft":
                drafts = [
                    [rows.copy() for rows in reference.rows([state])] for state in states[len(wikitext) :]
                ]
        if "draft" in graphs:
            quality["pair"] = _acceptance(graphs, own, skips, drafts, ids)
        timing = timing_of(measure_costs(pipeline, repeats=3), pipeline.machine)
        quality["machine"] = pipeline.machine
    return replace(manifest, quality=quality, timing=timing, roles=roles)


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


def _segments(tokens: Sequence[int], graph: Graph) -> list[IntArray]:
    ids = np.asarray(tokens[:WIKITEXT_TOKENS], np.int64)
    size = min(SEGMENT, graph.max_context)
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def _own_texts(pipeline: Pipeline) -> tuple[list[IntArray], list[int]]:
    """Prompts with the target's own greedy answers, and the length of each prompt."""
    texts, skips = [], []
    budget = max(8, min(OWN_TOKENS // len(PROMPTS), pipeline.engine.target.max_context // 2))
    for prompt in PROMPTS:
        ids = _prompt_ids(pipeline, prompt)[: pipeline.engine.target.max_context // 4]
        result = pipeline.generate(ids, k=0, max_tokens=budget, ignore_eos=True)
        texts.append(np.asarray([*ids, *result.tokens], np.int64))
        skips.append(len(ids) - 1)  # the prompt's last row predicts the first token of the answer
    return texts, skips


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
    rows = chain.from_iterable(_rows(graph, segment) for segment in segments)
    quality = compare(reference.rows(states), rows, np.concatenate(segments), ids)
    return {**asdict(quality), "perplexity_increase": quality.perplexity_increase}


def _acceptance(
    graphs: Mapping[str, Graph],
    texts: Sequence[IntArray],
    skips: Sequence[int],
    float_drafts: Sequence[Sequence[Float32Array]],
    ids: IntArray | None,
) -> dict[str, Any]:
    """Acceptance of the float and of the exported draft by the exported target, on the target's own text.

    `ids` are those of a trimmed draft's columns; the float draft is whole, and counted trimmed as well.
    """

    def own(graph: Graph) -> Iterator[Float32Array]:
        return chain.from_iterable(
            _skip(_rows(graph, text), skip) for text, skip in zip(texts, skips, strict=True)
        )

    def exact() -> Iterator[Float32Array]:
        return chain.from_iterable(_skip(rows, skip) for rows, skip in zip(float_drafts, skips, strict=True))

    count = sum(len(text) - skip for text, skip in zip(texts, skips, strict=True))
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


def _rows(graph: Graph, text: IntArray) -> Iterator[Float32Array]:
    """Logits in the chunks of `FloatReference.rows`, whatever the widths of the graph are."""
    widest = min(ROWS, max(graph.widths or (ROWS,)))
    width = 1 << (widest.bit_length() - 1)  # divides ROWS
    chunks = logit_rows(graph, text, width)
    while held := [rows.copy() for rows in islice(chunks, ROWS // width)]:
        yield np.concatenate(held)


def _skip(chunks: Iterable[Float32Array], skip: int) -> Iterator[Float32Array]:
    for rows in chunks:
        yield rows[min(skip, len(rows)) :]
        skip -= min(skip, len(rows))


def _write_probe(
    folder: Path, role: str, entry: RoleEntry, reference: FloatReference, state: Any, tokens: IntArray
) -> RoleEntry:
    """Store a few float logits beside the graph that was run, and name the file in its entry."""
    ids = tokens[:PROBE_TOKENS]
    rows = np.linspace(len(ids) // 4, len(ids) - 1, PROBE_ROWS).astype(np.int64)
    logits = next(iter(reference.rows([state[rows]])))
    path = folder / role / PROBE
    np.savez(path, tokens=ids, rows=rows, logits=logits)
    graph: GraphEntry = entry.graphs[0]
    files = {**graph.files, f"{role}/{PROBE}": describe_file(path)}
    proven = replace(graph, files=files, via="artifact", executed_artifact=True)
    return RoleEntry((proven, *entry.graphs[1:]))
