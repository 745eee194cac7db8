"""`outrider fetch`: download a model of the catalog, or list the catalog."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.export.catalog import CATALOG, CatalogEntry
from outrider.export.fetch import MIRRORS, Progress, cached, fetch

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["command"]


@click.command("fetch")
@click.argument("name", required=False)
@click.option(
    "--mirror", type=click.Choice(MIRRORS), help="Also allow a mirror that is cut into many wheels."
)
@click.option(
    "--accept-license", metavar="LICENCE", help="Say that you accept this licence (for example: gemma)."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(name: str | None, mirror: str | None, accept_license: str | None, as_json: bool) -> None:
    """Download a model of the catalog and check it; without NAME, list the catalog.

    The hub comes first, then the model's mirror. Size and sha256 are checked, and an interrupted download
    continues where it stopped. OUTRIDER_HOME sets the cache folder.
    """
    if name is None:
        _print_catalog(as_json)
        return
    with progress_bar() as progress:
        path = fetch(name, mirror=mirror, progress=progress, accept_license=accept_license)
    entry = CATALOG[name]
    record = {"name": name, "path": str(path), "bytes": _size(path), "sha256": entry.sha256}
    click.echo(json.dumps(record) if as_json else f"{name}: {path} ({record['bytes']} bytes)")


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A progress bar on a terminal's standard error, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in bars:
            _close(bars)
            bars[what] = tqdm(desc=what, total=total, unit="B", unit_scale=True)
        bar = bars[what]
        bar.total = max(total, done)
        bar.update(done - bar.n)

    try:
        yield progress
    finally:
        _close(bars)


def _close(bars: dict[str, tqdm]) -> None:
    """End the bars on the screen; a phase is not returned to."""
    for bar in bars.values():
        bar.close()


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _print_catalog(as_json: bool) -> None:
    rows = [_row(entry) for entry in CATALOG.values()]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        size = "" if row["bytes"] is None else f"{int(str(row['bytes'])) / 1e6:.0f} MB"
        state = "here" if row["path"] else ""
        click.echo(f"{row['name']:<28}{size:>9}  {state:<5} {row['summary']}  [{row['licence']}]")


def _row(entry: CatalogEntry) -> dict[str, object]:
    path = cached(entry)
    return {
        "name": entry.name,
        "summary": entry.summary,
        "licence": entry.licence,
        "bytes": entry.nbytes,
        "sha256": entry.sha256,
        "hub": entry.hub_repo,
        "mirror": None if entry.mirror is None else list(entry.mirror.requirements),
        "path": None if path is None else str(path),
    }
