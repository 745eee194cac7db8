"""`outrider doctor`: this machine, the extras, and whether speculation pays here for a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import ProgressBar, json_option, loading_options, open_pipeline, print_json
from outrider.cli.paths import BundleFolder
from outrider.cli.record import adb_option, sensors_of
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.contracts import Costs, Reading
    from outrider.power.state import State
    from outrider.runtime.doctor import BreakEven, Machine, Telemetry
    from outrider.runtime.pipeline import Pipeline

__all__ = ["command", "save_costs"]

UNITS = {
    "power": "W",
    "energy": "J",
    "temperature": "°C",
    "headroom": "of 1",
    "throttle": "of 1",
    "clock": "Hz",
    "clock_limit": "Hz",
    "clock_max": "Hz",
    "battery": "%",
    "charging": "of 1",
    "memory_available": "MB",
    "memory_limit": "MB",
    "memory_used": "MB",
    "memory_pressure": "%",
    "memory_events": "times",
}


@click.command(name="doctor")
@click.argument("bundle", required=False, type=BundleFolder())
@loading_options
@adb_option
@click.option(
    "--save",
    is_flag=True,
    help="Keep the measured costs, so that later loads on this machine start from them.",
)
@json_option
def command(bundle: Path | None, adb: str | None, save: bool, as_json_text: bool, **options: Any) -> None:
    """Say what this machine has and what its sensors tell; with a BUNDLE, also at which acceptance each k pays.

    Every source of telemetry is listed with its value, or with why it has none and what would change that.
    """
    from outrider.runtime.doctor import (
        break_even,
        inspect_machine,
        inspect_telemetry,
        measure_costs,
        measure_reading,
    )
    from outrider.runtime.memory_budget import held_mb

    if save and bundle is None:
        raise UsageError("--save keeps the costs of a BUNDLE; give one")
    machine = inspect_machine()
    sensors = sensors_of(adb)
    telemetry = inspect_telemetry(sensors) if adb is None else inspect_telemetry(sensors, kinds=())
    if not as_json_text:
        click.echo("\n".join([describe_machine(machine), "", describe_telemetry(telemetry)]))
    if bundle is None:
        if as_json_text:
            print_json({"machine": machine, "telemetry": telemetry})
        return
    bar = ProgressBar()
    with open_pipeline(bundle, options) as pipeline:
        placement = [str(placed) for placed in pipeline.placement]
        costs = measure_costs(pipeline, progress=bar)
        bar.close()
        resident = held_mb()
        table, saved = break_even(costs), None
        try:
            saved = save_costs(pipeline, costs, measure_reading(pipeline)) if save else None
        finally:  # a full disk must not cost what was measured
            if as_json_text:
                found = {"machine": machine, "telemetry": telemetry, "placement": placement}
                memory = {"plan": pipeline.memory, "resident_mb": resident}
                print_json({**found, "memory": memory, "costs": costs, "break_even": table, "saved": saved})
            else:
                memory_line = f"memory: {pipeline.memory}; {resident:.0f} MB are resident now"
                click.echo("\n".join(["", *placement, memory_line, "", describe_costs(costs, table)]))
    if saved and not as_json_text:
        click.echo(f"\nsaved to {saved}")


def save_costs(pipeline: Pipeline, costs: Costs, catch_up_s: Mapping[str, float]) -> Path:
    """Keep measured costs for later loads of this bundle here; returns the file."""
    from outrider.runtime.timing import store_timing, timing_of

    assert pipeline.manifest is not None
    timing = timing_of(costs, pipeline.machine, catch_up_s)
    return store_timing(pipeline.manifest, pipeline.placement, timing)


def describe_machine(machine: Machine) -> str:
    """The machine as text."""
    memory = "unknown" if machine.memory_gb is None else f"{machine.memory_gb:.1f} GB"
    lines = [
        f"machine      {machine.system}",
        f"processor    {machine.processor}, {machine.cores} cores, memory {memory}",
        f"onnxruntime  {machine.onnxruntime}: {', '.join(machine.providers)}",
    ]
    lines += [f"extra {name:10} {state}" for name, state in machine.extras.items()]
    return "\n".join(lines)


def describe_telemetry(telemetry: Telemetry) -> str:
    """Sources that can be read, those that cannot with the reason, and what follows from all of them."""
    lines = ["telemetry"]
    wide = max((len(reading.source) for reading in telemetry.readings), default=0)
    lines += [f"  {reading.source:{wide}}  {_figure(reading)}" for reading in telemetry.readings]
    if not telemetry.readings:
        lines.append("  no source was found")
    lines.append(f"  seen as: {_seen(telemetry.state)}")
    if telemetry.absent:
        lines.append(f"  not on this machine: {', '.join(telemetry.absent)}")
    return "\n".join(lines)


def _figure(reading: Reading) -> str:
    if reading.value is None:
        return f"{reading.quantity:16} not readable: {reading.reason}"
    value = f"{reading.value:.4g}" if abs(reading.value) < 1e4 else f"{reading.value:.0f}"
    note = f"; {reading.reason}" if reading.reason else ""
    return (
        f"{reading.quantity:16} {value} {UNITS[reading.quantity]} ({reading.scope}, {reading.method}{note})"
    )


def _seen(state: State) -> str:
    """The figures that the governor would go by."""
    figures = {
        "die": (state.die_c, "°C"),
        "skin": (state.skin_c, "°C"),
        "headroom": (state.headroom, "of 1"),
        "throttle": (state.throttle, "of 1"),
        "clock": (state.clock_ratio, "of 1"),
        f"power ({state.power_scope}, {state.power_method})" if state.power_scope else "power": (
            state.power_w,
            "W",
        ),
        "battery": (state.battery_percent, "%"),
        "memory available": (state.memory_available_mb, "MB"),
    }
    known = [f"{name} {value:.5g} {unit}" for name, (value, unit) in figures.items() if value is not None]
    unknown = [name for name, (value, _) in figures.items() if value is None]
    return ", ".join([*known, *([f"unknown {', '.join(unknown)}"] if unknown else [])])


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
