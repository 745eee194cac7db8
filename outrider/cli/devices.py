"""`outrider devices`: the profiles that are known, and where each of their figures is from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import json_option, print_json

if TYPE_CHECKING:
    from outrider.targets.device import Device

__all__ = ["command"]


@click.command(name="devices")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json_text: bool) -> None:
    """List device profiles; with a NAME (or a path ending in .toml), its figures and their sources.

    A figure marked "assumed" was never measured: `outrider calibrate` measures this machine.
    """
    from outrider.targets.device import DEVICES, load_device

    if name is not None:
        device = load_device(name)
        if as_json_text:
            print_json(_record(device))
        else:
            click.echo(describe_device(device))
        return
    devices = [load_device(slug) for slug in DEVICES]
    if as_json_text:
        print_json([_summary(device) for device in devices])
    else:
        click.echo(describe_list([_summary(device) for device in devices]))


def _summary(device: Device) -> dict[str, Any]:
    from outrider.targets.device import figures_of, user_profile_path

    figures = figures_of(device).values()
    return {
        "slug": device.slug,
        "name": device.name,
        "kind": device.kind,
        "memory_gb": float(device.memory_gb),
        "units": list(device.units),
        "meter": device.meter,
        "figures": len(figures),
        "assumed": sum(figure.assumed for figure in figures),
        "measured_here": user_profile_path(device.slug).is_file(),
    }


def _record(device: Device) -> dict[str, Any]:
    from outrider.targets.device import figures_of

    figures = {
        place: {
            "value": _value(figure),
            **({"assumed": True} if figure.assumed else {"source": figure.source}),
        }
        for place, figure in figures_of(device).items()
    }
    return {**_summary(device), "decode_unit": device.decode_unit, "soc": device.soc.name, "figures": figures}


def _value(figure: Any) -> Any:
    return list(figure) if isinstance(figure, tuple) else float(figure)


def describe_list(devices: list[dict[str, Any]]) -> str:
    """One line a profile."""
    lines = [f"{'device':20} {'memory':>7}  {'units':14} {'power sensor':13} figures with a source"]
    for device in devices:
        sourced = f"{device['figures'] - device['assumed']} of {device['figures']}"
        here = "  measured here" if device["measured_here"] else ""
        units, memory = ", ".join(device["units"]), f"{device['memory_gb']:.3g} GB"
        lines.append(f"{device['slug']:20} {memory:>7}  {units:14} {device['meter']:13} {sourced}{here}")
    return "\n".join([*lines, "", "outrider devices NAME says where each figure is from"])


def describe_device(device: Device) -> str:
    """Every figure of a profile, with its source."""
    from outrider.targets.device import figures_of, user_profile_path

    figures = figures_of(device)
    widest = max(map(len, figures))
    lines = [
        f"{device.slug}: {device.name} ({device.kind}, {device.soc.name}), decodes on {device.decode_unit}"
    ]
    if user_profile_path(device.slug).is_file():
        lines.append(f"measured here: {user_profile_path(device.slug)}")
    for name, unit in device.units.items():
        lines.append(f"{name}: {unit.description}; {', '.join(unit.backends)}")
    lines.append(f"power sensor: {device.meter}")
    lines.append("")
    for place, figure in figures.items():
        shown = ", ".join(f"{item:g}" for item in figure) if isinstance(figure, tuple) else f"{figure:g}"
        lines.append(f"{place:{widest}}  {shown:>10}  {'assumed' if figure.assumed else figure.source}")
    return "\n".join(lines)
