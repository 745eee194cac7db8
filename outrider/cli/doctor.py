"""`outrider doctor`: this machine, the extras, and whether speculation pays here for a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import (
    ProgressBar,
    existing_bundle,
    json_option,
    loading_options,
    open_pipeline,
    print_json,
)

if TYPE_CHECKING:
    from outrider.contracts import Costs
    from outrider.runtime.doctor import BreakEven, Machine

__all__ = ["command"]


@click.command(name="doctor")
@click.argument("bundle", required=False, type=click.Path(path_type=Path), callback=existing_bundle)
@loading_options
@json_option
def command(bundle: Path | None, as_json_text: bool, **options: Any) -> None:
    """Say what this machine has, and for a BUNDLE, the acceptance at which each k starts to pay here."""
    from outrider.runtime.doctor import break_even, inspect_machine, measure_costs

    machine = inspect_machine()
    if not as_json_text:
        click.echo(describe_machine(machine))
    if bundle is None:
        if as_json_text:
            print_json({"machine": machine})
        return
    bar = ProgressBar()
    with open_pipeline(bundle, options) as pipeline:
        placement = [str(placed) for placed in pipeline.placement]
        costs = measure_costs(pipeline, progress=bar)
        bar.close()
    table = break_even(costs)
    if as_json_text:
        print_json({"machine": machine, "placement": placement, "costs": costs, "break_even": table})
    else:
        click.echo("\n".join(["", *placement, "", describe_costs(costs, table)]))


def describe_machine(machine: Machine) -> str:
    """The machine as text."""
    memory = "unknown" if machine.memory_gb is None else f"{machine.memory_gb:.1f} GB"
    lines = [
        f"machine      {machine.system}",
        f"processor    {machine.processor}, {machine.cores} cores, memory {memory}",
        f"onnxruntime  {machine.onnxruntime}: {', '.join(machine.providers)}",
    ]
    lines += [f"extra {name:6} {state}" for name, state in machine.extras.items()]
    return "\n".join(lines)


def describe_costs(costs: Costs, table: list[BreakEven]) -> str:
    """Measured costs and break-even acceptance as text."""
    widths = ", ".join(f"{width}: {1e3 * seconds:.1f}" for width, seconds in sorted(costs.verify_s.items()))
    drafts = ", ".join(f"{name}: {1e3 * seconds:.2f}" for name, seconds in costs.draft_s.items())
    lines = [f"target forward, ms by width   {widths}", f"draft, ms a token             {drafts}", ""]
    lines.append(f"{'drafter':8} {'k':>2} {'round ms':>9}  pays above acceptance")
    for row in table:
        needed = "never" if row.acceptance is None else f"{row.acceptance:.2f}"
        lines.append(f"{row.drafter:8} {row.k:2} {row.round_ms:9.1f}  {needed}")
    return "\n".join(lines)
