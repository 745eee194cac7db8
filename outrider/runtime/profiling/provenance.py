"""On what, and with what, something was measured: what a figure needs beside it to mean anything."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.power.sensors.system import System
from outrider.targets.device import Device

if TYPE_CHECKING:
    from outrider.runtime.pipeline import Pipeline

__all__ = ["merged", "of_bundle", "of_device", "of_machine"]


def of_machine(threads: int | None = None, system: System | None = None) -> dict[str, str]:
    """This machine: system, kernel, processor, cores, clock governor, and the libraries. No paths, no names."""
    from importlib.metadata import version

    from outrider.runtime.doctor import inspect_machine

    found = inspect_machine()
    usable = threads or found.cores
    return {
        "device": "this machine",
        "processor": found.processor,
        "cores": str(found.cores),
        "memory": "unknown" if found.memory_gb is None else f"{found.memory_gb:.1f} GB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "board": _board(system or System()),
        "clock governor": _clock_governor(system or System()),
        "power mode": _power_mode(system or System()),
        "threads": f"{usable}" + ("" if threads else " (all cores)"),
        "load of the machine before": _load(),
        "ambient": "not measured",
        "Python": platform.python_version(),
        "onnxruntime": version("onnxruntime"),
    }


def of_device(device: Device, ambient_c: float, seed: int) -> dict[str, str]:
    """A simulated device."""
    return {
        "device": f"{device.name} ({device.slug}), SIMULATED",
        "unit": device.decode_unit,
        "ambient": f"{ambient_c:g} °C",
        "seed": str(seed),
        "figures": "device profile; see `outrider devices` for what is sourced and what is assumed",
    }


def of_bundle(pipeline: Pipeline) -> dict[str, str]:
    """The models of a loaded bundle, by name, recipe and hash, and where each runs."""
    manifest = pipeline.manifest
    if manifest is None:
        return {}
    names = {source.role: source.model for source in manifest.sources}
    found = {}
    for placed in pipeline.placement:
        graph = next(g for g in manifest.roles[placed.role].graphs if g.path == placed.path)
        where = ", ".join(placed.providers) or placed.unit
        found[placed.role] = (
            f"{names.get(placed.role, 'unnamed')}, {graph.recipe}, {placed.backend} on {where}"
        )
        found[f"{placed.role} sha256"] = " ".join(entry.sha256 for entry in graph.files.values())
    return found


def _board(system: System) -> str:
    """What the device tree calls the board, as on a Raspberry Pi or a Jetson."""
    return _first_line(system.path("/proc/device-tree/model")) or "unknown"


def _clock_governor(system: System) -> str:
    folder = system.path("/sys/devices/system/cpu/cpufreq")
    named = {_first_line(path) for path in sorted(folder.glob("policy*/scaling_governor"))}
    return ", ".join(sorted(name for name in named if name)) or "unknown"


def _power_mode(system: System) -> str:
    """A Jetson's power mode, from the file in which nvpmodel keeps it; reading it needs no root."""
    return _first_line(system.path("/var/lib/nvpmodel/status")) or "unknown"


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")[0].strip("\x00 \t\r")
    except OSError:
        return ""


def _load() -> str:
    try:
        return f"{os.getloadavg()[0]:.2f} over the last minute"
    except (AttributeError, OSError):
        return "unknown"


def merged(*parts: Mapping[str, str]) -> dict[str, str]:
    """Several parts as one, without what is unknown."""
    return {key: value for part in parts for key, value in part.items() if value and value != "unknown"}
