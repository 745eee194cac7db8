"""`outrider check`: prove a bundle on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import ProgressBar, bundle_argument, json_option, print_json
from outrider.contracts import as_json

if TYPE_CHECKING:
    from outrider.runtime.check import Check

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
@json_option
@click.pass_context
def command(
    ctx: click.Context, bundle: Path, max_tokens: int, threads: int | None, as_json_text: bool
) -> None:
    """Prove a bundle: hashes, tokenizer, logits of each graph, row independence, and the pair's greedy text."""
    from outrider.runtime.check import check_bundle

    bar = ProgressBar()
    try:
        result = check_bundle(bundle, max_tokens=max_tokens, threads=threads, progress=bar)
    finally:
        bar.close()
    if as_json_text:
        print_json({**as_json(result), "placement": [str(placed) for placed in result.placement]})
    else:
        click.echo(describe(result))
    ctx.exit(0 if result.ok else 1)


def describe(result: Check) -> str:
    """The verdict as text."""
    lines = [str(placed) for placed in result.placement]
    for graph in result.graphs:
        done = f"executed {graph.via}" if graph.executed_artifact else "NOT executed"
        lines.append(f"{graph.role}: {done} by {graph.backend} on {graph.unit}, {graph.profile}")
        if graph.executed_artifact and not graph.evaluated:
            lines.append("  not evaluated: the bundle holds no logits of the float reference")
        if graph.kl is not None:
            lines.append(
                f"  against the float reference: KL {graph.kl:.4f} nats, top-1 agreement "
                f"{graph.top1_agreement:.2f}, largest error {graph.max_abs_error:.3f} logits"
            )
        rows = graph.row_independence
        if rows is not None:
            lines.append(f"  a row moves by {rows.suffix:.1e} logits with later rows, {_width(rows.width)}")
        if graph.acceptance is not None:
            lines.append(f"  acceptance in the texts below: {graph.acceptance:.2f}")
    lines += [f"greedy text with {text.drafter} k={text.k}: {_same(text)}" for text in result.texts]
    lines += [f"PROBLEM {problem}" for problem in result.problems]
    return "\n".join([*lines, _verdict(result)])


def _verdict(result: Check) -> str:
    if not result.ok:
        return "NOT ok"
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
