"""`outrider simulate`: a scripted day on a simulated device, under several policies."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import (
    ProgressBar,
    json_option,
    loading_from,
    loading_options,
    open_pipeline,
    overwrite_option,
    print_json,
    refuse_existing,
    refuse_loading,
)
from outrider.errors import OutriderError, UsageError

if TYPE_CHECKING:
    from outrider.runtime.profiling.simulate import PolicyRun
    from outrider.targets.scenario import Scenario
    from outrider.targets.trace_model import TraceText

__all__ = ["command"]

FILE = "simulation.json"


@click.command(name="simulate")
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@click.option(
    "--scenario",
    required=True,
    help="Play this scenario: hot-phone, phone-day, board-cap, or a TOML file of your own.",
)
@click.option(
    "--device",
    help="Take this device in place of the scenario's: a name of `outrider devices`, or a TOML file.",
)
@click.option(
    "--acceptance",
    type=click.Path(path_type=Path),
    help="Decode the texts of this trace of `outrider acceptance`, in place of a bundle, with models of the sizes"
    " of Qwen2.5-Coder 1.5B and 0.5B.",
)
@click.option(
    "--policies",
    default="plain,best-fixed,governed",
    show_default=True,
    help="Compare these, with commas between: plain, best-fixed (every fixed k is tried), governed,"
    " auto (not governed), k=N, DRAFTER k=N; 'unpaced' behind one leaves its pauses out.",
)
@click.option(
    "--max-tokens",
    "-n",
    type=click.IntRange(min=8),
    default=128,
    show_default=True,
    help="Record at most so many tokens a text from a bundle.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Write simulation.json, with a timeline of every run, into this folder.",
)
@overwrite_option
@loading_options
@json_option
def command(bundle: Path | None, as_json_text: bool, **options: Any) -> None:
    """Compare policies over a scripted day, all within the same constraints. Everything printed is simulated.

    What drafts get right is real: it comes from an acceptance trace, or is recorded from the bundle first.
    Ctrl-C keeps the policies that are finished.
    """
    from outrider.runtime.profiling.simulate import Interrupted, compare, format_runs
    from outrider.targets.device import load_device
    from outrider.targets.scenario import load_scenario

    scenario = load_scenario(options.pop("scenario"))
    name, output, overwrite = (options.pop(option) for option in ("device", "output", "overwrite"))
    if output is not None:
        refuse_existing(output / FILE, overwrite)
    device = load_device(name) if name else None
    policies = [part.strip() for part in options.pop("policies").split(",") if part.strip()]
    if not policies:
        raise UsageError("no policy is given; give at least one, such as governed")
    bar = ProgressBar()
    texts, costs = _texts(bundle, options, bar)
    partial = False
    try:
        runs = compare(scenario, policies, texts, device=device, progress=bar, **costs)
    except Interrupted as interrupted:
        runs, partial = interrupted.runs, True
        if not runs:
            raise
    finally:
        bar.close()
    if as_json_text:
        print_json([_without_timeline(run) for run in runs])
    else:
        click.echo(format_runs(scenario, runs))
    if output is not None:
        _write(output, scenario, runs, partial)  # last: a full disk must not cost the result
    if partial:
        click.echo(f"Interrupted: partial, with {len(runs)} of {len(policies)} policies finished.", err=True)
        click.get_current_context().exit(130)


def _texts(
    bundle: Path | None, options: dict[str, Any], bar: ProgressBar
) -> tuple[list[TraceText], dict[str, Any]]:
    """The texts to decode, and what the bundle's models cost."""
    from outrider.targets.model_cost import model_cost
    from outrider.targets.trace_model import read_acceptance

    acceptance, max_tokens = options.pop("acceptance"), options.pop("max_tokens")
    if (bundle is None) == (acceptance is None):
        raise UsageError("give either a bundle or an acceptance trace (--acceptance FILE)")
    if acceptance is not None:
        refuse_loading(options, "--acceptance")
        return read_acceptance(acceptance), {}
    assert bundle is not None, "one of the two is there"
    with (
        open_pipeline(bundle, loading_from(options), governor=False) as pipeline,
        tempfile.TemporaryDirectory() as folder,
    ):
        path = Path(folder) / "acceptance.jsonl"
        _record(pipeline, path, max_tokens, bar)
        roles = pipeline.manifest.roles if pipeline.manifest else {}
        costs = {f"{role}_cost": model_cost(entry.by_preference()[0]) for role, entry in roles.items()}
        return read_acceptance(path), costs


def _record(pipeline: Any, path: Path, max_tokens: int, bar: ProgressBar) -> None:
    from outrider.lines import LineWriter
    from outrider.runtime.acceptance import record_acceptance
    from outrider.runtime.profiling.rig import fitting_prompts

    def tell(done: int, total: int) -> None:
        bar("recording acceptance", done / total)

    with LineWriter(path, "acceptance", {"max_tokens": max_tokens}) as trace:
        for record in record_acceptance(pipeline, fitting_prompts(pipeline), max_tokens, tell):
            trace.write(record)


def _without_timeline(run: PolicyRun) -> dict[str, Any]:
    return {name: value for name, value in run.to_dict().items() if name != "timeline"}


def _write(folder: Path, scenario: Scenario, runs: Sequence[PolicyRun], partial: bool) -> None:
    from outrider.contracts import as_json
    from outrider.records import replaced

    record = {
        "schema_version": 1,
        "kind": "simulation",
        "simulated": True,
        "partial": partial,
        "scenario": as_json(scenario),
        "runs": [run.to_dict() for run in runs],
    }
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(path) as stream:
            stream.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise OutriderError(f"{path} cannot be written: {error.strerror or error}") from None
