"""`outrider simulate`: a scripted day on a simulated device, under several policies."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import (
    ProgressBar,
    json_option,
    listed,
    loading_from,
    loading_options,
    open_pipeline,
    print_json,
    refuse_loading,
)
from outrider.cli.paths import (
    BundleFolder,
    InputFile,
    OutputFolder,
    name_of,
    overwrite_option,
    refuse_existing,
    telemetry_option,
)
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.power.report.simulation import PolicyRun, Simulation
    from outrider.targets.trace_model import TraceText

__all__ = ["command"]

FILES = TRACE, SUMMARY, REPORT = "simulation.jsonl", "summary.json", "report.html"


@click.command(name="simulate")
@click.argument("bundle", type=BundleFolder(), required=False)
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
    type=InputFile(),
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
    type=OutputFolder(),
    help="Write simulation.jsonl (a timeline of every run), summary.json and report.html into this folder.",
)
@telemetry_option
@overwrite_option
@loading_options
@json_option
def command(bundle: Path | None, as_json_text: bool, **options: Any) -> None:
    """Compare policies over a scripted day, all within the same constraints. Everything printed is simulated.

    What drafts get right is real: it comes from an acceptance trace, or is recorded from the bundle first.
    Ctrl-C keeps the policies that are finished.
    """
    from importlib.metadata import version

    from outrider.power.report.simulation import Simulation
    from outrider.runtime.profiling.simulate import Interrupted, compare, format_runs
    from outrider.targets.device import load_device
    from outrider.targets.scenario import load_scenario

    scenario = load_scenario(options.pop("scenario"))
    name, output, overwrite = (options.pop(option) for option in ("device", "output", "overwrite"))
    if output is not None:
        for file in FILES:
            refuse_existing(output / file, overwrite)
    device, telemetry = load_device(name or scenario.device), options.pop("telemetry")
    policies = listed(options.pop("policies"), "--policies", "governed")
    bar = ProgressBar()
    texts, costs, told = _texts(bundle, options, bar)
    partial = False
    try:
        runs = compare(scenario, policies, texts, device=device, progress=bar, telemetry=telemetry, **costs)
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
        about = told | (
            {} if telemetry is None else {"governors see": f"the recorded trace {name_of(telemetry)}"}
        )
        _write(
            output, Simulation(scenario, device.name, tuple(runs), about, version("outrider"), partial)
        )  # last: a full disk must not cost the result
    if partial:
        click.echo(f"Interrupted: partial, with {len(runs)} of {len(policies)} policies finished.", err=True)
        click.get_current_context().exit(130)


def _texts(
    bundle: Path | None, options: dict[str, Any], bar: ProgressBar
) -> tuple[list[TraceText], dict[str, Any], dict[str, str]]:
    """The texts to decode, what the bundle's models cost, and where both are from."""
    from outrider.runtime.profiling.provenance import of_bundle
    from outrider.targets.model_cost import model_cost
    from outrider.targets.trace_model import read_acceptance

    acceptance, max_tokens = options.pop("acceptance"), options.pop("max_tokens")
    if (bundle is None) == (acceptance is None):
        raise UsageError("give either a bundle or an acceptance trace (--acceptance FILE)")
    if acceptance is not None:
        refuse_loading(options, "--acceptance")
        about = f"acceptance trace {name_of(acceptance)}, models' sizes as of Qwen2.5-Coder 1.5B and 0.5B"
        return read_acceptance(acceptance), {}, {"texts": about}
    assert bundle is not None, "one of the two is there"
    with (
        open_pipeline(bundle, loading_from(options), governor=False) as pipeline,
        tempfile.TemporaryDirectory() as folder,
    ):
        path = Path(folder) / "acceptance.jsonl"
        _record(pipeline, path, max_tokens, bar)
        roles = pipeline.manifest.roles if pipeline.manifest else {}
        costs = {f"{role}_cost": model_cost(entry.by_preference()[0]) for role, entry in roles.items()}
        return read_acceptance(path), costs, of_bundle(pipeline)


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


def _write(folder: Path, simulation: Simulation) -> None:
    from outrider.power.report.simulation import write_simulation_summary, write_trace
    from outrider.power.report.simulation_page import write_simulation_report

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {folder} cannot be made: {error.strerror or error}") from None
    write_trace(folder / TRACE, simulation)
    write_simulation_summary(folder / SUMMARY, simulation)
    write_simulation_report(folder / REPORT, simulation)
