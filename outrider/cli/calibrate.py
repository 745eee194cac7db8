"""`outrider calibrate`: measure this machine with a bundle, and keep what was measured as its profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import (
    FiniteRange,
    ProgressBar,
    json_option,
    loading_options,
    open_pipeline,
    print_json,
)
from outrider.cli.paths import (
    OutputFile,
    bundle_argument,
    overwrite_option,
    refuse_existing,
    without_telemetry,
)

if TYPE_CHECKING:
    from outrider.runtime.profiling.calibrate import Calibration
    from outrider.targets.device import Device

__all__ = ["command"]


@click.command(name="calibrate")
@bundle_argument
@click.option(
    "--device",
    default="host",
    show_default=True,
    help="Start from this shipped profile, or give a new name for this machine.",
)
@click.option(
    "--output",
    "-o",
    type=OutputFile(),
    help="Write the profile to this .toml file.",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=0.1),
    default=6.0,
    show_default=True,
    help="Measure each width and drafter for so many seconds.",
)
@click.option(
    "--rest",
    type=FiniteRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Measure the machine at rest for so many seconds, before and after.",
)
@without_telemetry("a profile keeps what was measured on this machine, which a recorded trace was not")
@overwrite_option
@loading_options
@json_option
def command(
    bundle: Path,
    device: str,
    output: Path | None,
    seconds: float,
    rest: float,
    overwrite: bool,
    as_json_text: bool,
    **options: Any,
) -> None:
    """Measure this machine with BUNDLE: forwards by width, draft steps, memory, and energy where a meter is.

    The profile goes below OUTRIDER_HOME, where it takes the place of an earlier one and wins over the shipped
    one of the same name; -o writes it elsewhere. Without -o, later loads of BUNDLE start from these times, as after
    `doctor --save`. Leave the machine alone meanwhile.
    """
    from outrider.cli.doctor import save_costs
    from outrider.errors import UsageError
    from outrider.runtime.doctor import measure_reading
    from outrider.runtime.profiling.calibrate import Plan, measured_profile
    from outrider.targets.device import user_profile_path
    from outrider.targets.device_toml import write_device
    from outrider.targets.model_cost import model_cost

    if output is not None and output.suffix != ".toml":
        raise UsageError(f"the profile is TOML; name it {output.name}.toml instead of {output.name}")
    if output is not None:
        refuse_existing(output, overwrite)
    base = _base(device)
    bar = ProgressBar()
    with open_pipeline(bundle, options) as pipeline:
        assert pipeline.manifest is not None
        cost = model_cost(pipeline.manifest.roles["target"].by_preference()[0])
        found = _measure(pipeline, bundle, Plan(rest, seconds), bar)
        catch_up_s = measure_reading(pipeline)
    bar.close()
    profile = measured_profile(found, base, cost)
    path = saved = None
    try:
        path = write_device(profile, output or user_profile_path(base.slug), f"{base.name}; {found.source}.")
        saved = save_costs(pipeline, found.costs, catch_up_s) if output is None else None
    finally:  # a full disk must not cost what was measured
        if as_json_text:
            print_json({"calibration": found, "profile": path, "saved": saved})
        else:
            click.echo(describe(found, profile))
    if not as_json_text:
        click.echo(f"\nprofile: {path}" + (f"\ntimes for later loads: {saved}" if saved else ""))


def _base(slug: str) -> Device:
    """The shipped profile to start from, not one that was measured before; for a new name, `host`."""
    from dataclasses import replace

    from outrider.errors import UsageError
    from outrider.runtime.doctor import inspect_machine
    from outrider.targets.device import DEVICES, Soc, shipped_device

    if not re.fullmatch(r"\w[\w .+-]*", slug) or slug.endswith(".toml"):
        raise UsageError(f"--device is {slug!r}; give a plain name, such as host or my-laptop")
    if slug in DEVICES and slug != "host":
        return shipped_device(slug)
    name = "This machine" if slug == "host" else slug
    return replace(shipped_device("host"), slug=slug, name=name, soc=Soc(inspect_machine().processor))


def _measure(pipeline: Any, bundle: Path, plan: Any, bar: ProgressBar) -> Calibration:
    from datetime import UTC, datetime

    from outrider.power.monitor import Monitor
    from outrider.power.sensors import discover
    from outrider.runtime.doctor import inspect_machine
    from outrider.runtime.profiling.calibrate import calibrate

    with Monitor(discover()) as monitor:
        return calibrate(
            pipeline.engine.target,
            pipeline.engine.drafters,
            monitor,
            bundle=bundle.resolve().name,
            date=datetime.now(UTC).date().isoformat(),
            plan=plan,
            memory_gb=inspect_machine().memory_gb,
            progress=bar,
        )


def describe(found: Calibration, profile: Device) -> str:
    """What was measured, as text."""
    unit = profile.units[profile.decode_unit]
    rate = next(iter(unit.rates.values()))
    lines = [
        f"memory, one thread      {found.bandwidth_gb_s:.1f} GB/s (a lower bound)",
        f"memory, in forwards     {unit.bandwidth_gb_s:.1f} GB/s",
        f"arithmetic, in forwards {rate.sustained_gops:.0f} thousand million operations a second",
    ]
    energy = found.costs.energy
    for width, seconds in sorted(found.costs.verify_s.items()):
        joules = "" if energy is None else f", {energy.verify_j[width]:.3f} J above rest"
        lines.append(f"target forward of {width:2}    {1e3 * seconds:.1f} ms{joules}")
    for name, seconds in found.costs.draft_s.items():
        joules = "" if energy is None else f", {energy.draft_j[name]:.4f} J above rest"
        lines.append(f"draft by {name:14} {1e3 * seconds:.2f} ms a token{joules}")
    if found.idle_w is None:
        lines.append(f"no meter: {found.no_meter}")
    else:
        drift = found.idle_drift_w or 0.0
        lines.append(f"at rest                 {found.idle_w:.2f} W ({drift:+.2f} W after than before)")
        lines.append(f"energy from             {found.energy_from}")
    return "\n".join([*lines, *(f"note: {warning}" for warning in found.warnings)])
