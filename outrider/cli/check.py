"""`outrider check`: prove a bundle on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import ProgressBar, json_option, print_json
from outrider.cli.paths import bundle_argument, telemetry_option
from outrider.contracts import as_json

if TYPE_CHECKING:
    from outrider.quantize.quality import GraphQuality
    from outrider.runtime.check import Check
    from outrider.runtime.check_graph import GraphCheck
    from outrider.targets.ane_lint import LintReport

__all__ = ["command", "describe"]


@click.command(name="check")
@bundle_argument
@click.option(
    "--max-tokens",
    "-n",
    type=click.IntRange(min=8),
    default=64,
    show_default=True,
    help="Compare texts of so many tokens.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Run each graph on this many threads (default: all cores)."
)
@click.option(
    "--quick", is_flag=True, help="Run a few steps only of graphs whose unit is emulated here, which is slow."
)
@click.option(
    "--target-unit",
    type=click.Choice(["cpu", "gpu", "npu"]),
    help="Compare texts of the target on this unit.",
)
@click.option(
    "--draft-unit",
    type=click.Choice(["cpu", "gpu", "npu"]),
    help="Compare texts with the draft on this unit.",
)
@telemetry_option
@json_option
@click.pass_context
def command(ctx: click.Context, /, bundle: Path, as_json_text: bool, **options: Any) -> None:
    """Prove a bundle: hashes, tokenizer, logits of each graph, row independence, and the pair's greedy text.

    Every graph is run the closest way there is here: as it is, on an emulator of its unit, or as the same program
    lowered for the CPU; the report says which. With --telemetry the texts are written under the governor, which sees
    that trace, and one more lets it choose k.
    """
    from outrider.runtime.check import check_bundle

    bar = ProgressBar()
    try:
        result = check_bundle(bundle, progress=bar, **_given(options))
    finally:
        bar.close()
    if as_json_text:
        print_json({**as_json(result), "placement": [str(placed) for placed in result.placement]})
    else:
        click.echo(describe(result))
    ctx.exit(0 if result.ok else 1)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options without the units that were left to the bundle."""
    return {name: value for name, value in options.items() if value is not None or name == "threads"}


def describe(result: Check) -> str:
    """The verdict as text."""
    lines = [str(placed) for placed in result.placement]
    for graph in result.graphs:
        lines += _graph_lines(graph)
    lines += [f"greedy text with {text.drafter} k={text.k}: {_same(text)}" for text in result.texts]
    lines += [f"PROBLEM {problem}" for problem in result.problems]
    return "\n".join([*lines, _verdict(result)])


HOW = {
    "artifact": "executed as it is",
    "emulator": "executed on an EMULATED unit",
    "evaluator": "executed by the evaluator, not on its unit",
    "reference-lowering": "NOT executed itself; the same model lowered for this CPU was",
}


def _graph_lines(graph: GraphCheck) -> list[str]:
    """How a graph was proven, and what was found."""
    done = HOW[graph.via] if graph.via else "NOT executed"
    name = f"{graph.role}: {graph.path}, {graph.recipe}, {graph.backend} on {graph.unit}, {graph.profile}"
    lines = [f"{name}: {done}" + (f" ({graph.note})" if graph.note else "")]
    if graph.via and not graph.evaluated:
        lines.append("  not evaluated: the bundle holds no logits of the float reference")
    if graph.kl is not None:
        lines.append(
            f"  against the float reference: KL {graph.kl:.4f} nats, top-1 agreement "
            f"{graph.top1_agreement:.2f}, largest error {graph.max_abs_error:.3f} logits"
        )
    if graph.quality is not None:
        lines.append(f"  {_quality(graph.quality)}")
    rows = graph.row_independence
    if rows is not None:
        lines.append(f"  a row moves by {rows.suffix:.1e} logits with later rows, {_width(rows.width)}")
    if graph.acceptance is not None:
        lines.append(f"  acceptance in the texts below: {graph.acceptance:.2f}")
    if graph.lint is not None:
        lines += _lint_lines(graph.lint)
    return lines


def _lint_lines(lint: LintReport) -> list[str]:
    """Every error of a lint, its warnings and notes by rule."""
    lines = [f"  Neural Engine: {lint.headline()}", *(f"    {error}" for error in lint.errors())]
    for rule in lint.rules:
        if rule.severity != "error":
            kind = "note" if rule.severity == "info" else rule.severity
            where = ", ".join(rule.functions)
            lines.append(f"    {rule.count} x {kind} {rule.rule} in {where}: {rule.says} ({rule.source})")
            lines.append(f"      as {rule.examples[0]}")
    asked = f"Core ML was not asked: {lint.plan_note}"
    if lint.planned:
        asked = "Core ML's own plan is among them" + (f"; {lint.plan_note}" if lint.plan_note else "")
    return [*lines, f"    {asked}"]


def _quality(quality: GraphQuality) -> str:
    """The sample of the target's own text, in a line."""
    text = f"on {quality.positions} positions of the target's own text: KL {quality.kl:.4f}, "
    if quality.top1_agreement_clear is not None:
        text += f"top-1 {quality.top1_agreement_clear:.3f} where it is clear ({quality.clear}), "
    if quality.sum_min_pq is not None:
        text += (
            f"Σ min(p, q) {quality.sum_min_pq:.3f} (float draft {quality.sum_min_pq_float:.3f}), greedy match "
            f"{quality.greedy_match:.2f} ({quality.greedy_match_float:.2f}), "
        )
    return text.removesuffix(", ")


def _verdict(result: Check) -> str:
    if not result.ok:
        return "NOT ok"
    absent = [graph for graph in result.graphs if graph.via is None]
    if absent:
        names = ", ".join(f"{graph.role} {graph.path} ({graph.unit})" for graph in absent)
        return f"ok, but not executed here, so not proven here: {names}"
    left = sum(graph.lint.count("error") for graph in result.graphs if graph.lint is not None)
    if left:
        return f"ok, but {left} places of a graph for the Neural Engine are known to leave it"
    if result.evaluated:
        return "ok"
    return (
        "ok, but not evaluated: it was exported with --no-evaluate, so how far its logits are from the "
        "float weights is unknown"
    )


def _width(moved: float) -> str:
    if moved == 0.0:
        return "not at all with the width: text is identical bit for bit"
    return f"by up to {moved:.2g} with the width"


def _same(text: Any) -> str:
    accepted = "" if text.acceptance is None else f", acceptance {text.acceptance:.2f}"
    if text.first_difference is None:
        return f"the same {text.tokens} tokens as without{accepted}"
    kind = "near-tie" if text.near_tie else "DIFFERENT"
    gap = "" if text.gap is None else f" (gap {text.gap:.3f})"
    return f"{kind} at token {text.first_difference} of {text.tokens}{gap}{accepted}"
