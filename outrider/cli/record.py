"""`outrider record`: telemetry of this machine, or of a phone, into a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.options import FiniteRange, json_option, print_json
from outrider.cli.paths import OutputFile, overwrite_option, refuse_existing
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.power.recorder import Recorded
    from outrider.power.sensors.system import Sensor

__all__ = ["adb_option", "command", "sensors_of"]

ANY_PHONE = "any"
adb_option = click.option(
    "--adb",
    metavar="[SERIAL]",
    is_flag=False,
    flag_value=ANY_PHONE,
    help="Look at a phone through adb instead of this machine; SERIAL chooses one of several.",
)


@click.command("record")
@click.option(
    "--output",
    "-o",
    type=OutputFile(),
    required=True,
    help="Write the trace to this file.",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=0, min_open=True),
    help="Record for so many seconds (default: until Ctrl-C).",
)
@click.option(
    "--interval",
    type=FiniteRange(min=0.01),
    default=0.1,
    show_default=True,
    help="Read no sensor again within so many seconds; slow ones keep their own pace.",
)
@adb_option
@overwrite_option
@json_option
def command(
    output: Path,
    seconds: float | None,
    interval: float,
    adb: str | None,
    overwrite: bool,
    as_json_text: bool,
) -> None:
    """Record power, heat, clocks and memory into a trace, to be played back with --telemetry.

    `outrider doctor` lists what can be read. Ctrl-C ends the recording; the trace is valid whenever it ends.
    """
    import platform
    from datetime import UTC, datetime
    from importlib.metadata import version

    from outrider.power.monitor import Monitor
    from outrider.power.recorder import record

    refuse_existing(output, overwrite)
    sensors = sensors_of(adb)
    if not sensors:
        raise OutriderError(
            "no source of telemetry was found on this machine; `outrider doctor` lists all kinds"
        )
    done = record(
        Monitor(sensors, interval_s=interval),
        output,
        seconds,
        tool=f"outrider {version('outrider')}",
        machine="a phone through adb" if adb else f"{platform.system()} {platform.machine()}",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if as_json_text:
        print_json(done)
    elif done.readings:
        click.echo(describe(done))
    if not done.readings:
        why = "; ".join(f"{source}: {reason}" for source, reason in done.silent.items())
        raise OutriderError(
            f"nothing could be read, {output} holds only reasons: {why or 'no sensor answered'}"
        )


def sensors_of(adb: str | None) -> list[Sensor]:
    """The sensors of this machine, or of the phone that `--adb` asks for."""
    from outrider.power.sensors import discover
    from outrider.power.sensors.adb import AdbPhone

    if adb is None:
        return discover()
    return [AdbPhone(None if adb == ANY_PHONE else adb)]


def describe(done: Recorded) -> str:
    """One line about a recording."""
    gaps = "no gaps"
    if done.gaps:
        gaps = f"{done.gaps} gaps, the longest {done.longest_gap_s:.1f} s ({done.longest_gap})"
    silent = f", {len(done.silent)} more without any value" if done.silent else ""
    return (
        f"{done.path}: {done.readings} readings of {done.sources} sources{silent} in {done.seconds:.1f} s,"
        f" {gaps}; reading took {100 * done.overhead_share:.2f} % of the time"
    )
