"""Measured costs that outlive a process, and the machine that they hold for.

`outrider export` writes what it measured into the manifest; `outrider doctor --save` into a file of the cache
folder, since a bundle never changes. `load` starts the planner from either where the machine is the same. That
saves it the first rounds of measuring and no more: it goes on learning from every round.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider.contracts import Costs
from outrider.errors import BundleError
from outrider.folders import cache_folder
from outrider.manifest import Manifest, Timing
from outrider.records import decode, is_finite, parsed, replaced
from outrider.runtime.placed import Placement
from outrider.targets.core_sets import big_cores, is_nice

__all__ = ["TIMING_VERSION", "cores", "known_costs", "machine_line", "processor", "store_timing", "timing_of"]

TIMING_VERSION = 1

_log = logging.getLogger(__name__)


def processor() -> str:
    """The name of the processor, "unknown" where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_line(placement: Sequence[Placement], threads: int | None) -> str:
    """What a time depends on beside the bundle, in one line: two equal lines may share their costs."""
    where = "; ".join(f"{role.role} by {_place(role)}" for role in placement)
    libraries = [_library(name) for name in dict.fromkeys(role.backend for role in placement)]
    used = threads or len(big_cores() or ()) or cores()
    manners = " that yield" if is_nice() else ""  # and never spin
    return (
        f"{processor()}, {platform.machine()}, {cores()} cores, {used} threads{manners}, "
        f"{', '.join(libraries)}; {where}"
    )


def _place(role: Placement) -> str:
    cores = f" on {role.unit}" if ":" in role.unit else ""
    return f"{', '.join(role.providers) or role.unit}{cores}"


def _library(backend: str) -> str:
    """A backend's library with its version; one that is not loaded stays so, ONNX Runtime takes 23 MB."""
    loaded = getattr(sys.modules.get(backend), "__version__", None)
    try:
        return f"{backend} {loaded or version(backend)}"
    except PackageNotFoundError:
        return backend


def timing_of(costs: Costs, machine: str, catch_up_s: Mapping[str, float] | None = None) -> Timing:
    """Measured costs as a record, in the form that `Planner.to_dict` has; `catch_up_s` are of `measure_reading`."""
    verify_s = {str(width): seconds for width, seconds in costs.verify_s.items()}
    measured = {"verify_s": verify_s, "draft_s": dict(costs.draft_s), "catch_up_s": dict(catch_up_s or {})}
    return Timing(machine, measured)


def store_timing(manifest: Manifest, placement: Sequence[Placement], timing: Timing) -> Path:
    """Keep a timing in the cache folder for later loads of these graphs; returns its file."""
    path = _side_file(manifest, placement)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema_version": TIMING_VERSION, "kind": "timing", **asdict(timing)}
    with replaced(path) as stream:
        stream.write(json.dumps(record, indent=2, allow_nan=False).encode("ascii"))
    return path


def known_costs(manifest: Manifest, placement: Sequence[Placement], machine: str) -> Mapping[str, Any] | None:
    """What was measured for these graphs on this machine, the side file first; None when nothing was.

    Costs of another machine, and a side file that cannot be read, are left alone with a line in the log.
    """
    for where, timing in (
        ("the cache folder", _stored(_side_file(manifest, placement))),
        ("the manifest", manifest.timing),
    ):
        if timing is None:
            continue
        if timing.machine != machine:
            _log.info("costs in %s hold for %s, this is %s: not used", where, timing.machine, machine)
        elif not _sound(timing.measured):
            _log.warning("costs in %s are not positive seconds by width and drafter: not used", where)
        else:
            return timing.measured
    return None


def _side_file(manifest: Manifest, placement: Sequence[Placement]) -> Path:
    """Named after the graphs' structures: what they compute decides how long it takes, not the weights."""
    placed = {role.role: role.path for role in placement}
    hashes = []
    for role, entry in sorted(manifest.roles.items(), reverse=True):  # the target first
        graphs = entry.by_preference()
        graph = next((graph for graph in graphs if graph.path == placed.get(role)), graphs[0])
        hashes.append(graph.identity[:16])
    return cache_folder() / "timing" / f"{'-'.join(hashes)}.json"


def _stored(path: Path) -> Timing | None:
    try:
        record = parsed(json.loads, path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise BundleError(f"{path} holds a {type(record).__name__}, not an object")
        version, kind = record.pop("schema_version", None), record.pop("kind", None)
        if (version, kind) != (TIMING_VERSION, "timing"):
            raise BundleError(
                f"{path}: {kind!r} of version {version!r}, expected 'timing' of {TIMING_VERSION}"
            )
        timing: Timing = decode(Timing, record, str(path), BundleError)
        return timing
    except FileNotFoundError:
        return None
    except (OSError, ValueError, BundleError) as error:
        _log.warning("stored costs cannot be read and are not used: %s", error)
        return None


def _sound(measured: Mapping[str, Any]) -> bool:
    """Whether a planner can start from this: it may have been edited by hand."""
    verify_s, beside = measured.get("verify_s"), measured.get("overlapped", {})
    return (
        isinstance(verify_s, Mapping)
        and "1" in verify_s
        and isinstance(measured.get("draft_s"), Mapping)
        and isinstance(beside, Mapping)
        and _are_figures(measured)
        and _are_figures(beside)
    )


def _are_figures(costs: Mapping[str, Any]) -> bool:
    """Whether whatever there is of `CostEstimates.to_dict` is seconds, by width or by drafter."""
    tables = [costs.get(name, {}) for name in ("verify_s", "draft_s", "catch_up_s")]
    if not all(isinstance(table, Mapping) for table in tables):
        return False
    verify_s, draft_s, catch_up_s = tables
    positive = all(is_finite(s) and s > 0 for s in (*verify_s.values(), *draft_s.values()))
    others = all(is_finite(s) and s >= 0 for s in (*catch_up_s.values(), costs.get("overhead_s", 0.0)))
    return positive and others and all(str(width).isdecimal() for width in verify_s)
