"""`outrider profile`: sweep k, drafters and objectives; raw trace, summary and report."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import (
    Finite,
    FiniteRange,
    ProgressBar,
    json_option,
    listed,
    loading_from,
    loading_options,
    open_pipeline,
    parse_k,
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
from outrider.errors import OutriderError, UsageError

if TYPE_CHECKING:
    from outrider.power.report.profile_trace import ProfileTrace
    from outrider.power.report.summary import Summary
    from outrider.runtime.pipeline import Pipeline
    from outrider.runtime.profiling.profile import Options
    from outrider.runtime.profiling.rig import Rig

__all__ = ["command"]

OBJECTIVES = ("latency", "energy", "balanced")


@click.command(name="profile")
@click.argument("bundle", type=BundleFolder(), required=False)
@click.option(
    "--device",
    help="Simulate this device profile (see `outrider devices`); without it, or with host, measure this machine.",
)
@click.option(
    "--acceptance",
    type=InputFile(),
    help="Simulate with this trace of `outrider acceptance` in place of a bundle.",
)
@click.option(
    "--power-cap", "power_cap_w", type=FiniteRange(min=0.01), help="Keep mean power below so many watts."
)
@click.option(
    "--temp-limit", "temp_limit_c", type=Finite(), help="Keep the hottest silicon below so many °C."
)
@click.option(
    "--minutes",
    type=Finite(),
    default=10.0,
    show_default=True,
    help="Decode for so many minutes in all runs together.",
)
@click.option(
    "--repeats",
    "-r",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Run every setting so many times, in random order.",
)
@click.option(
    "--k",
    "ks",
    default="0,1,2,4,auto",
    show_default=True,
    help="Run these k, with commas between; plain decoding (0) is always among them.",
)
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    help="Draft by model or lookup only; may be given several times (default: all there are).",
)
@click.option(
    "--objective",
    "objectives",
    multiple=True,
    type=click.Choice(OBJECTIVES),
    help="Let auto choose for this; may be given several times (default: latency).",
)
@click.option(
    "--precisions",
    type=click.Choice(["all", "first"]),
    default="all",
    show_default=True,
    help="Sweep every precision of a role that the bundle holds and this machine can run, or the preferred one.",
)
@click.option(
    "--ambient",
    "ambient_c",
    type=Finite(),
    help="Simulate this ambient temperature in °C (default: 25); on a real machine it is only noted.",
)
@click.option(
    "--cool-down",
    "cool_down_s",
    type=FiniteRange(min=0),
    help="Wait at most so many seconds for the machine to cool between runs (default: 120; simulated: 1800).",
)
@click.option(
    "--trace",
    type=InputFile(),
    help="Run nothing; make summary and report again from this profile.jsonl.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Draw the order of runs, and what a simulated device leaves to chance, from this.",
)
@click.option(
    "--output",
    "-o",
    type=OutputFolder(),
    default=Path("profile"),
    show_default=True,
    help="Write the results into this folder.",
)
@telemetry_option
@overwrite_option
@loading_options
@json_option
def command(bundle: Path | None, as_json_text: bool, **options: Any) -> None:
    """Measure what BUNDLE sustains here: tokens per second, joules per token, heat; or simulate a device.

    Writes profile.jsonl, summary.json and report.html into the output folder. Ctrl-C keeps what was measured.
    """
    from importlib.metadata import version

    from outrider.power.report.profile_trace import read_profile
    from outrider.runtime.profiling.profile import TRACE, profile

    folder, bar, recorded = options.pop("output"), ProgressBar(), options.pop("trace")
    overwrite = options.pop("overwrite")
    if recorded is not None:
        if options["telemetry"] is not None:
            raise UsageError("--trace runs nothing that could see --telemetry; leave one of them out")
        if bundle is not None:
            raise UsageError("--trace reads what was measured before; leave the bundle out")
        if not _same(recorded, folder / TRACE):
            _refuse_replacing(folder, overwrite)
        _finish(read_profile(recorded), folder, as_json_text)
        return
    _refuse_replacing(folder, overwrite)
    with ExitStack() as stack:
        (rig, precisions), telemetry = _rig(bundle, options, stack), options.pop("telemetry")
        rig = rig if telemetry is None else rig.played_back(telemetry)
        wanted = _options(rig, options)
        if not rig.simulated:
            stack.enter_context(rig.monitor)
        trace = profile(rig, wanted, folder, version("outrider"), bar, precisions)
        bar.close()
    _finish(trace, folder, as_json_text)
    if trace.partial:
        click.get_current_context().exit(130)


def _refuse_replacing(folder: Path, overwrite: bool) -> None:
    from outrider.runtime.profiling.profile import FILES

    for name in FILES:
        refuse_existing(folder / name, overwrite)


def _same(trace: Path, other: Path) -> bool:
    return trace.exists() and other.exists() and trace.samefile(other)


def _finish(trace: ProfileTrace, folder: Path, as_json_text: bool) -> None:
    from outrider.runtime.profiling.profile import finish

    summary = finish(trace, folder)
    print_json(summary) if as_json_text else _print(summary, folder)


def _rig(bundle: Path | None, options: dict[str, Any], stack: ExitStack) -> tuple[Rig, dict[str, Rig]]:
    """The machine and models that the options name, and the bundle's other precisions."""
    name, acceptance = options.pop("device"), options.pop("acceptance")
    ambient_c, seed = options.pop("ambient_c"), options["seed"]
    if bundle is None and acceptance is None:
        raise UsageError("give a bundle, or an acceptance trace with --acceptance and a device with --device")
    if bundle is not None and acceptance is not None:
        raise UsageError("give either a bundle or --acceptance, not both")
    if name in (None, "host"):
        if bundle is None:
            raise UsageError("an acceptance trace can only be simulated; name a device with --device")
        return _real(bundle, ambient_c, options, stack)
    return _simulated(
        name, bundle, acceptance, 25.0 if ambient_c is None else ambient_c, seed, options, stack
    )


def _real(
    bundle: Path, ambient_c: float | None, options: dict[str, Any], stack: ExitStack
) -> tuple[Rig, dict[str, Rig]]:
    from outrider.runtime.profiling.provenance import merged, of_bundle, of_machine
    from outrider.runtime.profiling.rig import host_rig

    threads = options["threads"]
    pipelines, notes = _pipelines(bundle, options, stack)
    rigs = {name: host_rig(pipeline) for name, pipeline in pipelines.items()}
    noted = {} if ambient_c is None else {"ambient": f"{ambient_c:g} °C, as told"}
    about = merged(of_machine(threads), noted, of_bundle(pipelines[""]), _others(pipelines))
    return replace(rigs.pop(""), provenance=about, notes=notes), rigs


def _pipelines(
    bundle: Path, options: dict[str, Any], stack: ExitStack
) -> tuple[dict[str, Pipeline], tuple[str, ...]]:
    """The bundle as it prefers to run ("") and in its other precisions, all loaded; and why one is not."""
    from outrider.runtime.profiling.precisions import other_precisions

    loading, sweep = loading_from(options), options.pop("precisions") == "all"
    first = stack.enter_context(open_pipeline(bundle, dict(loading), governor=False))
    found, notes = {"": first}, []
    for precision in other_precisions(first, loading) if sweep else ():
        try:
            pipeline = open_pipeline(bundle, {**loading, **precision.options}, governor=False)
        except OutriderError as error:
            notes.append(f"{precision.name} is in the bundle, but was not swept: {error}")
        else:
            found[precision.name] = stack.enter_context(pipeline)
    return found, tuple(notes)


def _others(pipelines: dict[str, Pipeline]) -> dict[str, str]:
    names = ", ".join(name for name in pipelines if name)
    return {"other precisions": names} if names else {}


def _simulated(
    name: str,
    bundle: Path | None,
    acceptance: Path | None,
    ambient_c: float,
    seed: int,
    options: dict[str, Any],
    stack: ExitStack,
) -> tuple[Rig, dict[str, Rig]]:
    from outrider.runtime.profiling.provenance import merged, of_bundle, of_device
    from outrider.runtime.profiling.rig import bundle_rig, trace_rig
    from outrider.targets.device import load_device
    from outrider.targets.simulated import Machine
    from outrider.targets.trace_model import read_acceptance

    device = load_device(name)
    machine = Machine(device, ambient_c, seed)
    about = of_device(device, ambient_c, seed)
    if bundle is not None:
        pipelines, notes = _pipelines(bundle, options, stack)
        rigs = {
            name: bundle_rig(device, pipeline, machine, seed=seed, placed=bool(name))
            for name, pipeline in pipelines.items()
        }
        about = merged(about, of_bundle(pipelines[""]), _others(pipelines))
        return replace(rigs.pop(""), provenance=about, notes=notes), rigs
    assert acceptance is not None, "one of the two is there"
    del options["precisions"]  # an acceptance trace has no weights
    refuse_loading(options, "--acceptance")
    texts = {
        "texts": f"acceptance trace {name_of(acceptance)}, models' sizes as of Qwen2.5-Coder 1.5B and 0.5B"
    }
    rig = trace_rig(device, read_acceptance(acceptance), machine, seed=seed)
    return replace(rig, provenance=merged(about, texts)), {}


def _options(rig: Rig, options: dict[str, Any]) -> Options:
    from outrider.runtime.profiling.profile import Options

    wait_s = options["cool_down_s"]
    return Options(
        ks=tuple(parse_k(part) for part in listed(options["ks"], "--k", "2 or auto")),  # type: ignore[misc]
        drafters=options["drafters"],
        objectives=options["objectives"] or ("latency",),
        minutes=options["minutes"],
        repeats=options["repeats"],
        seed=options["seed"],
        power_cap_w=options["power_cap_w"],
        temp_limit_c=options["temp_limit_c"],
        cool_down_s=wait_s if wait_s is not None else 1800.0 if rig.simulated else 120.0,
    )


def _print(summary: Summary, folder: Path) -> None:
    from outrider.power.report.headline import table
    from outrider.runtime.profiling.profile import FILES

    click.echo(summary.headline)
    click.echo()
    click.echo(table(summary))
    for note in summary.notes:
        click.echo(f"- {note}")
    made = [name for name in FILES if (folder / name).exists()]
    click.echo(f"In {folder}: " + ", ".join(made))
