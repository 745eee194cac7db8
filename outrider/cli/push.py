"""`outrider push`: copy a bundle to an Android phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.options import ProgressBar, json_option, listed, print_json
from outrider.cli.paths import bundle_argument

if TYPE_CHECKING:
    from outrider.runtime.push import Pushed

__all__ = ["command", "describe"]


@click.command(name="push")
@bundle_argument
@click.option("--serial", "-s", help="Copy to this phone, where several are there (`adb devices`).")
@click.option(
    "--folder",
    default="/data/local/tmp/outrider",
    show_default=True,
    help="Copy into a folder of the bundle's name below this one.",
)
@click.option(
    "--graphs",
    default="",
    help="Copy the graphs for these units only, as npu,cpu (default: all).",
)
@json_option
def command(bundle: Path, serial: str | None, folder: str, graphs: str, as_json_text: bool) -> None:
    """Copy what changed of a bundle to a phone through adb, and prove every file there by its SHA-256."""
    from outrider.runtime.push import push_bundle

    units = tuple(dict.fromkeys(listed(graphs, "--graphs", "cpu"))) if graphs else ()
    bar = ProgressBar()
    try:
        pushed = push_bundle(bundle, serial=serial, folder=folder, units=units, progress=bar)
    finally:
        bar.close()
    if as_json_text:
        print_json(pushed)
    else:
        click.echo(describe(pushed))


def describe(pushed: Pushed) -> str:
    """What was done, and what to type next."""
    lines = [
        f"{pushed.folder} on {pushed.serial}: {len(pushed.copied)} files copied "
        f"({pushed.copied_bytes / 1e6:,.1f} MB), {len(pushed.kept)} were there already; every SHA-256 is right"
    ]
    if pushed.strays:
        lines.append(f"not part of the bundle, and left alone: {', '.join(pushed.strays)}")
    lines += ["", "Run it there (Termux with its ssh server, see docs/android.md):", ""]
    return "\n".join([*lines, *(f"  {line}" for line in pushed.commands)])
