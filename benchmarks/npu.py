"""What a draft loses on the arithmetic of an NPU, beside its float weights, on the target's own text.

    python -m benchmarks.npu BUNDLE --draft smollm2-135m-q4_1 --precision a16w8 --positions 512

The target of BUNDLE writes greedy answers to prompts of Spec-Bench; the draft is lowered for the NPU and reads
the same texts, teacher-forced, by the emulator of the Hexagon NPU in the onnxruntime-qnn wheel (`--execution
emulator`) or by ONNX Runtime's CPU kernels (`evaluator`). Both see the rows that the float weights see, so
differences are paired; their intervals come from resampling whole texts (2,000 bootstrap samples), because
positions of one text are not independent. Forwards are 8 rows wide: a step of the emulator takes as long for 8
rows as for one. Every figure is *emulated*; nothing here says how fast an NPU is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import outrider
from benchmarks.summary import describe, machine, markdown_table
from outrider.contracts import Float32Array, IntArray
from outrider.export.checkpoint import Checkpoint, open_checkpoint
from outrider.export.lowered import Lowered
from outrider.export.npu import export_npu
from outrider.export.prompts import calibration_sequences
from outrider.export.prove import skip_rows
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights
from outrider.quantize.npu_recipes import get_npu_recipe, parse_npu_overrides, with_npu_overrides
from outrider.quantize.quality import logit_rows
from outrider.runtime.bench import load_prompts
from outrider.targets.qnn import NpuGraph

__all__ = ["Text", "main", "summarize"]

DATA = Path(__file__).with_name("data")
WIDTH = 8  # the widest whose graph returns all rows
OWN_TOKENS, PROMPT_TOKENS = 64, 96
CLEAR_GAP = 0.5  # in logits
SAMPLES = 2000


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer; rows from `begin` on predict the answer. `target` are its logits there."""

    category: str
    tokens: IntArray  # [T]
    begin: int
    target: Float32Array  # [T - begin, V]


@dataclass(frozen=True)
class Figures:
    """One text, per position: ours and the float draft's Σ min(p, q) and choices, KL(float || ours)."""

    overlap: Float32Array
    overlap_float: Float32Array
    match: Float32Array
    match_float: Float32Array
    kl: Float32Array
    same: Float32Array
    clear: Float32Array


def own_texts(bundle: Path, positions: int) -> list[Text]:
    """Answers of the bundle's target to prompts of changing categories, until there are enough positions."""
    prompts = load_prompts(DATA / "spec_bench_dev.jsonl", limit=8)
    texts: list[Text] = []
    with outrider.load(bundle, draft=False, governor=False) as pipeline:
        graph = pipeline.engine.target
        for prompt in _in_turns(prompts):
            if sum(len(text.tokens) - text.begin for text in texts) >= positions:
                break
            ids = pipeline.chat_tokens([{"role": "user", "content": prompt.turns[0]}])
            if len(ids) > PROMPT_TOKENS:
                continue
            answer = pipeline.generate(ids, k=0, max_tokens=OWN_TOKENS).tokens
            tokens, begin = np.asarray([*ids, *answer], np.int64), len(ids) - 1
            rows = np.concatenate([chunk.copy() for chunk in logit_rows(graph, tokens)])[begin:]
            texts.append(Text(prompt.category, tokens, begin, rows))
            pipeline.reset()
    return texts


def _in_turns(prompts: Sequence[Any]) -> Iterator[Any]:
    """One prompt of every category, then the next one of every category."""
    by_category: dict[str, list[Any]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    for turn in range(max(map(len, by_category.values()))):
        yield from (group[turn] for group in by_category.values() if turn < len(group))


def float_rows(checkpoint: Checkpoint, texts: Sequence[Text]) -> list[Float32Array]:
    """The float draft's logits where the answers are predicted."""
    reference = FloatReference(SlotWeights(checkpoint))
    states = reference.final_states([text.tokens for text in texts])
    return [
        np.concatenate([rows.copy() for rows in reference.rows([state[text.begin :]])])
        for state, text in zip(states, texts, strict=True)
    ]


def lowered(checkpoint: Checkpoint, place: Path, arguments: argparse.Namespace) -> Lowered:
    """The draft's graph of one width, for the NPU."""
    recipe = with_npu_overrides(
        get_npu_recipe(arguments.precision), parse_npu_overrides(arguments.override or "")
    )
    return export_npu(
        checkpoint.config,
        SlotWeights(checkpoint),
        recipe,
        place,
        max_context=arguments.max_context,
        widths=(WIDTH,),
        calibration=calibration_sequences(checkpoint.tokenizer, arguments.max_context, None),
    )


def measured(text: Text, ours: Float32Array, exact: Float32Array) -> Figures:
    """Compare rows [R, V] of one text; a padded vocabulary is cut to the smallest."""
    V = min(rows.shape[1] for rows in (text.target, ours, exact))
    p, q, r = (_log_softmax(rows[:, :V]) for rows in (text.target, ours, exact))
    top = np.partition(exact[:, :V], -2, axis=1)[:, -2:]
    choice, own, floating = p.argmax(1), q.argmax(1), r.argmax(1)
    return Figures(
        overlap=np.exp(np.minimum(p, q)).sum(1),
        overlap_float=np.exp(np.minimum(p, r)).sum(1),
        match=(choice == own).astype(np.float32),
        match_float=(choice == floating).astype(np.float32),
        kl=(np.exp(r) * (r - q)).sum(1),
        same=(own == floating).astype(np.float32),
        clear=(top[:, 1] - top[:, 0] > CLEAR_GAP).astype(np.float32),
    )


def _log_softmax(logits: Float32Array) -> Any:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def summarize(figures: Sequence[Figures], seed: int = 0) -> dict[str, Any]:
    """Means over all positions, and 95 % intervals of the paired losses by resampling texts."""

    def mean(name: str, which: Sequence[int]) -> float:
        return float(np.concatenate([getattr(figures[i], name) for i in which]).mean())

    def loss(which: Sequence[int]) -> float:
        return mean("overlap_float", which) - mean("overlap", which)

    def agreement(which: Sequence[int]) -> float:
        clear = np.concatenate([figures[i].clear for i in which]) > 0
        return float(np.concatenate([figures[i].same for i in which])[clear].mean())

    every = range(len(figures))
    rng = np.random.default_rng(seed)
    draws = [rng.integers(0, len(figures), len(figures)).tolist() for _ in range(SAMPLES)]
    losses, agreements = ([f(draw) for draw in draws] for f in (loss, agreement))
    return {
        "positions": sum(len(text.kl) for text in figures),
        "texts": len(figures),
        "clear_positions": int(sum(text.clear.sum() for text in figures)),
        "top1_agreement": mean("same", every),
        "top1_agreement_clear": agreement(every),
        "top1_agreement_clear_interval": np.quantile(agreements, [0.025, 0.975]).tolist(),
        "kl": mean("kl", every),
        "sum_min_pq": mean("overlap", every),
        "sum_min_pq_float": mean("overlap_float", every),
        "sum_min_pq_loss": loss(every),
        "sum_min_pq_loss_interval": np.quantile(losses, [0.025, 0.975]).tolist(),
        "greedy_match": mean("match", every),
        "greedy_match_float": mean("match_float", every),
    }


def run(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Everything, as a JSON record."""
    texts = own_texts(arguments.bundle, arguments.positions)
    print(f"{len(texts)} texts, {sum(len(text.target) for text in texts)} positions", file=sys.stderr)
    with open_checkpoint(arguments.draft, mirror=arguments.mirror) as checkpoint:
        exact = float_rows(checkpoint, texts)
        begin = time.monotonic()
        made = lowered(checkpoint, place, arguments)
        export_s = time.monotonic() - begin
    meta = {**made.meta, "functions": made.functions}
    record: dict[str, Any] = {
        "draft": arguments.draft,
        "precision": arguments.precision,
        "override": arguments.override,
        "device": arguments.device,
        "export_s": export_s,
        "weight_bytes": sum(slot.bytes_after for slot in made.slots if slot.slot != "embedding"),
        "machine": machine(),
        "results": {},
    }
    for execution in arguments.execution:
        where = "cpu" if execution == "evaluator" else execution
        path = place / made.functions[str(WIDTH)]
        opened = NpuGraph.load(
            path, meta, embedding=made.embedding_file, execution=where, device=arguments.device
        )
        with closing(opened) as graph:
            figures, step_s = [], []
            for index, (text, floating) in enumerate(zip(texts, exact, strict=True)):
                begin = time.monotonic()
                rows = np.concatenate([*skip_rows(_copies(graph, text.tokens), text.begin)])
                step_s.append((time.monotonic() - begin) / -(-len(text.tokens) // WIDTH))
                figures.append(measured(text, rows, floating))
                print(
                    f"{execution}: text {index + 1}/{len(texts)}, {step_s[-1]:.1f} s a step", file=sys.stderr
                )
        summary = {**summarize(figures), "step_s": float(np.median(step_s))}
        record["results"][execution] = summary
    return record


def _copies(graph: NpuGraph, tokens: IntArray) -> Iterator[Float32Array]:
    for rows in logit_rows(graph, tokens, WIDTH):
        yield rows.copy()


def table(record: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    columns = "draft; recipe; run by; positions; top-1 where clear; KL; Σ min(p, q); float; loss; s/step"
    head = columns.split("; ")
    body = []
    for execution, found in record["results"].items():
        low, high = found["sum_min_pq_loss_interval"]
        least, most = found["top1_agreement_clear_interval"]
        body.append(
            [
                record["draft"],
                record["precision"] + (f" + {record['override']}" if record["override"] else ""),
                execution,
                str(found["positions"]),
                f"{found['top1_agreement_clear']:.3f} [{least:.3f}, {most:.3f}]",
                f"{found['kl']:.4f}",
                f"{found['sum_min_pq']:.4f}",
                f"{found['sum_min_pq_float']:.4f}",
                f"{found['sum_min_pq_loss']:+.4f} [{low:+.4f}, {high:+.4f}]",
                f"{found['step_s']:.1f}",
            ]
        )
    return markdown_table(head, body)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path, help="a bundle whose target writes the text")
    parser.add_argument("--draft", required=True, help="the draft: catalog name, .gguf, folder or hub id")
    parser.add_argument("--precision", default="a16w8")
    parser.add_argument("--override", help="slots with other bits, as layers.0.down=int8")
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--max-context", type=int, default=256)
    parser.add_argument("--device", default="snapdragon-8-gen3")
    parser.add_argument("--mirror", choices=["pypi"])
    parser.add_argument(
        "--execution", nargs="+", choices=["emulator", "evaluator"], default=["emulator", "evaluator"]
    )
    parser.add_argument("--keep", type=Path, help="keep the lowered graph in this folder")
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = run(arguments, arguments.keep or Path(folder))
    print(table(record))
    print(
        f"\n{describe(record['machine'])}; lowered in {record['export_s']:.0f} s;"
        f" weights {record['weight_bytes'] / 1e6:.0f} MB"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
