"""What a draft loses as a Core ML package, beside its float weights, on the target's own text.

    python -m benchmarks.coreml BUNDLE --draft smollm2-135m-q4_1 --precision fp16 lut6 lut4 lut4-mix --positions 1000

The target of BUNDLE writes greedy answers to prompts of Spec-Bench; the draft is lowered by each recipe and reads the
same texts, teacher-forced, by the evaluator of Core ML programs. All see the rows that the float weights see, so
differences are paired; their intervals come from resampling whole texts (2,000 bootstrap samples), because positions
of one text are not independent. Forwards are 8 rows wide. The first recipe also runs what decoding is made of
(steps, pairs, chunks of a prompt, a tree, a scattered commit, a rollback), each beside the float weights. Every figure
is *evaluated*: the shipped file in numpy, half precision stored and single precision summed. Nothing here says how
fast a Neural Engine is, or what its own kernels round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.npu import Figures, Text, float_rows, measured, own_texts, summarize
from benchmarks.summary import describe, machine, markdown_table
from outrider.contracts import Float32Array, Graph
from outrider.export.checkpoint import Checkpoint, open_checkpoint
from outrider.export.coreml import export_coreml_draft
from outrider.export.lowered import Lowered
from outrider.export.prompts import calibration_sequences
from outrider.export.prove import skip_rows
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights
from outrider.quantize.coreml_recipes import coreml_recipe, parse_coreml_overrides, with_coreml_overrides
from outrider.quantize.quality import logit_rows
from outrider.targets.coreml import CoreMLGraph

__all__ = ["main", "paths"]

WIDTH, WIDTHS = 8, (1, 2, 8, 64)
PARENTS = (-1, 0, 0, 1, 2, 2, 4)  # of the tree that is verified
ACCEPTED = (0, 2, 4, 6)


def lowered(
    checkpoint: Checkpoint, place: Path, precision: str, widths: Sequence[int], arguments: Any
) -> Lowered:
    """The draft's package."""
    recipe = with_coreml_overrides(coreml_recipe(precision), parse_coreml_overrides(arguments.override or ""))
    sequences = calibration_sequences(checkpoint.tokenizer, arguments.max_context, None)
    return export_coreml_draft(
        checkpoint.config,
        SlotWeights(checkpoint),
        recipe,
        place,
        max_context=arguments.max_context,
        widths=widths,
        target=arguments.deployment_target,
        calibration=[sequence.tolist() for sequence in sequences],
    )


def opened(made: Lowered) -> CoreMLGraph:
    """The package, run by the evaluator."""
    package = next(path for path in made.files if path.name == "Manifest.json").parent
    described = {**made.meta, "functions": dict(made.functions)}
    return CoreMLGraph.load(package, described, embedding=made.embedding_file, execution="evaluator")


def package_bytes(made: Lowered) -> int:
    """Bytes of the package, without the table that the host keeps."""
    return sum(path.stat().st_size for path in made.files if path != made.embedding_file)


def paths(graph: Graph, text: Text, reference: FloatReference) -> dict[str, float]:
    """The largest error of a logit in each thing that decoding does, from a text of at least 80 tokens."""
    tokens = [int(token) for token in text.tokens[:80]]
    sequences: list[list[int]] = []
    found: list[tuple[str, Float32Array]] = []

    def note(what: str, rows: Any, *expected: list[int]) -> None:
        """Rows of logits, and the sequences whose last rows they should be."""
        found.extend((what, row.copy()) for row in rows)
        sequences.extend(expected)

    graph.truncate(0)
    note("prompt in a chunk of 64", graph.forward(tokens[:64], logits="last").logits, tokens[:64])
    graph.commit(range(64))
    note("step", graph.forward(tokens[64:65]).logits, tokens[:65])
    graph.commit([0])
    note("pair", graph.forward(tokens[65:67]).logits, tokens[:66], tokens[:67])
    graph.commit([0, 1])
    tree = tokens[67 : 67 + len(PARENTS)]
    ways = [_way(node) for node in range(len(PARENTS))]
    mask = np.array([[other in way for other in range(len(PARENTS))] for way in ways])
    depths = np.array([graph.length + len(way) - 1 for way in ways])
    rows = graph.forward(tree, depths, mask).logits
    note("tree", rows, *([*tokens[:67], *(tree[i] for i in way)] for way in ways))
    graph.commit(ACCEPTED)
    context = [*tokens[:67], *(tree[i] for i in ACCEPTED)]
    note("step after a scattered commit", graph.forward([tokens[75]]).logits, [*context, tokens[75]])
    graph.truncate(40)
    note(
        "verify after a rollback",
        graph.forward(tokens[40:45]).logits,
        *(tokens[: i + 1] for i in range(40, 45)),
    )
    graph.truncate(0)
    states = reference.final_states([np.asarray(sequence, np.int64) for sequence in sequences])
    worst: dict[str, float] = {}
    for (what, row), state in zip(found, states, strict=True):
        exact = next(iter(reference.rows([state[-1:]])))[0]
        worst[what] = max(worst.get(what, 0.0), float(np.abs(row[: len(exact)] - exact[: len(row)]).max()))
    return worst


def _way(node: int) -> list[int]:
    """The nodes from the root of the tree to one of them."""
    return [*([] if PARENTS[node] < 0 else _way(PARENTS[node])), node]


def read(
    graph: CoreMLGraph, texts: Sequence[Text], exact: Sequence[Float32Array], label: str
) -> tuple[list[Figures], dict[str, float]]:
    """Every text by a graph: figures per position, and errors of logits and seconds a forward over all of them."""
    figures, errors, step_s = [], [], []
    for index, (text, floating) in enumerate(zip(texts, exact, strict=True)):
        begin = time.monotonic()
        chunks = (rows.copy() for rows in logit_rows(graph, text.tokens, WIDTH))
        rows = np.concatenate([*skip_rows(chunks, text.begin)])
        step_s.append((time.monotonic() - begin) / -(-len(text.tokens) // WIDTH))
        V = min(rows.shape[1], floating.shape[1])
        errors.append(np.abs(rows[:, :V] - floating[:, :V]).ravel())
        figures.append(measured(text, rows, floating))
        print(f"{label}: text {index + 1}/{len(texts)}, {step_s[-1]:.2f} s a forward", file=sys.stderr)
    every = np.concatenate(errors)
    return figures, {
        "logit_error_p999": float(np.quantile(every, 0.999)),
        "logit_error_max": float(every.max()),
        "forward_s": float(np.median(step_s)),
    }


def run(arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Everything, as a JSON record."""
    texts = own_texts(arguments.bundle, arguments.positions)
    print(f"{len(texts)} texts, {sum(len(text.target) for text in texts)} positions", file=sys.stderr)
    record: dict[str, Any] = {
        "draft": arguments.draft,
        "override": arguments.override,
        "deployment_target": arguments.deployment_target,
        "max_context": arguments.max_context,
        "machine": machine(),
        "results": {},
    }
    first: list[Figures] = []
    with open_checkpoint(arguments.draft, mirror=arguments.mirror) as checkpoint:
        exact = float_rows(checkpoint, texts)
        for precision in arguments.precision:
            begin = time.monotonic()
            made = lowered(checkpoint, place / precision, precision, WIDTHS, arguments)
            export_s = time.monotonic() - begin
            with closing(opened(made)) as graph:
                figures, errors = read(graph, texts, exact, precision)
                if not first:
                    longest = max(texts, key=lambda text: len(text.tokens))
                    record["paths"] = paths(graph, longest, FloatReference(SlotWeights(checkpoint)))
            first = first or figures
            beside = [
                replace(mine, overlap_float=theirs.overlap)
                for mine, theirs in zip(figures, first, strict=True)
            ]
            lost = summarize(beside)
            record["results"][precision] = {
                **summarize(figures),
                **errors,
                "loss_to_first": lost["sum_min_pq_loss"],
                "loss_to_first_interval": lost["sum_min_pq_loss_interval"],
                "export_s": export_s,
                "package_bytes": package_bytes(made),
                "notes": {name: note for name, note in made.notes.items() if name == "overrides"},
            }
            if not arguments.keep:
                shutil.rmtree(place / precision)
            _save(record, arguments.json)  # a recipe takes minutes; the others' figures stay if one fails
        record["one_function_bytes"] = _one_function(checkpoint, place / "one", arguments)
    return record


def _save(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def _one_function(checkpoint: Checkpoint, place: Path, arguments: argparse.Namespace) -> int:
    """Bytes of the first recipe's package when it has one width only."""
    made = lowered(checkpoint, place, arguments.precision[0], (1,), arguments)
    size = package_bytes(made)
    shutil.rmtree(place)
    return size


def table(record: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    head = "recipe; MB; positions; logit error p99.9; max; KL; top-1 where clear; Σ min(p, q); loss; to the first"
    body = []
    for precision, found in record["results"].items():
        low, high = found["sum_min_pq_loss_interval"]
        low_first, high_first = found["loss_to_first_interval"]
        body.append(
            [
                precision,
                f"{found['package_bytes'] / 1e6:.1f}",
                str(found["positions"]),
                f"{found['logit_error_p999']:.3f}",
                f"{found['logit_error_max']:.3f}",
                f"{found['kl']:.5f}",
                f"{found['top1_agreement_clear']:.4f} ({found['clear_positions']})",
                f"{found['sum_min_pq']:.4f} (float {found['sum_min_pq_float']:.4f})",
                f"{found['sum_min_pq_loss']:+.4f} [{low:+.4f}, {high:+.4f}]",
                f"{found['loss_to_first']:+.4f} [{low_first:+.4f}, {high_first:+.4f}]",
            ]
        )
    return markdown_table(head.split("; "), body)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path, help="a bundle whose target writes the text")
    parser.add_argument("--draft", required=True, help="the draft: catalog name, .gguf, folder or hub id")
    parser.add_argument("--precision", nargs="+", default=["fp16", "lut6", "lut4", "lut4-mix"])
    parser.add_argument("--override", help="slots with other schemes, as layers.0.down=lut6")
    parser.add_argument("--deployment-target", choices=["ios18", "ios26"], default="ios18")
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--max-context", type=int, default=256)
    parser.add_argument("--mirror", choices=["pypi"])
    parser.add_argument("--keep", type=Path, help="keep the packages in this folder")
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = run(arguments, arguments.keep or Path(folder))
    first = arguments.precision[0]
    print(table(record))
    print(
        f"\n{first}, largest error of a logit: "
        + ", ".join(f"{k} {v:.3f}" for k, v in record["paths"].items())
    )
    whole, one = record["results"][first]["package_bytes"], record["one_function_bytes"]
    print(
        f"{first}: {len(WIDTHS)} functions in {whole / 1e6:.1f} MB, one in {one / 1e6:.1f} MB ({whole / one - 1:+.2%})"
        f"\n{describe(record['machine'])}"
    )
    _save(record, arguments.json)


if __name__ == "__main__":
    main()
