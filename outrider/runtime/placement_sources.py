"""What a placement is chosen from: the graphs of a bundle, the cores of a unit, and the memory that there is now."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.manifest import GraphEntry, Manifest
from outrider.records import is_finite
from outrider.runtime.backends import held_context
from outrider.runtime.evidence import PRIOR_ACCEPTANCE
from outrider.runtime.memory_budget import MemoryLimit, asked_limit, available_here
from outrider.runtime.placed import Placement
from outrider.runtime.placement_costs import Candidate
from outrider.runtime.role_memory import CHUNK, SHORT_CHUNK, halves, role_memory
from outrider.runtime.timing import known_costs, machine_line
from outrider.targets.device import APP_SHARE, Device
from outrider.targets.model_cost import model_cost

__all__ = [
    "available_now",
    "bundle_candidates",
    "limit_on",
    "measured_acceptance",
    "unit_cores",
]


def bundle_candidates(manifest: Manifest, *, here: bool, context: int | None = None) -> tuple[Candidate, ...]:
    """The graphs of a bundle's target and draft; `here` with what was measured of them on this machine.

    A graph whose cache is made at loading is there with the context asked for, else its own, and with halves of it.
    """
    entries = {
        role: manifest.roles[role].by_preference() for role in ("target", "draft") if role in manifest.roles
    }
    measured = _measured(manifest, {role: graphs[0] for role, graphs in entries.items()}) if here else {}
    return tuple(
        _candidate(role, entry, tokens, measured.get(role, ()) if place == 0 else ())
        for role, graphs in entries.items()
        for place, entry in enumerate(graphs)
        for tokens in _contexts(entry, context)
    )


def _contexts(entry: GraphEntry, wanted: int | None) -> Iterator[int]:
    longest = held_context(entry, wanted)
    yield longest
    for shorter in halves(longest):
        if held_context(entry, shorter) == shorter:
            yield shorter


def _candidate(
    role: str, entry: GraphEntry, context: int, measured: tuple[tuple[int, float], ...]
) -> Candidate:
    memory = role_memory(role, entry, context, CHUNK)
    return Candidate(
        role,
        entry.backend,
        entry.unit,
        entry.profile,
        entry.recipe,
        entry.widths,
        context,
        entry.kv.dtype,
        model_cost(entry),
        memory.weights_mb,
        memory.kv_mb,
        memory.scratch_mb,
        entry.vocab_size,
        made=True,
        measured=measured,
        loading_mb=memory.loading_mb,
        short_scratch_mb=role_memory(role, entry, context, SHORT_CHUNK).scratch_mb,
    )


def _measured(
    manifest: Manifest, first: Mapping[str, GraphEntry]
) -> dict[str, tuple[tuple[int, float], ...]]:
    """Seconds of the preferred graphs on all cores of this machine, from the manifest or the cache folder."""
    placement = [
        Placement(
            role,
            entry.backend,
            entry.unit,
            entry.profile,
            entry.path,
            providers=("CPUExecutionProvider",) if entry.backend == "onnxruntime" else (),
        )
        for role, entry in first.items()
        if entry.unit == "cpu"
    ]
    if len(placement) < len(first):
        return {}
    known: Mapping[str, Any] = known_costs(manifest, placement, machine_line(placement, None)) or {}
    verify_s = known.get("verify_s", {})
    found = {"target": tuple(sorted((int(width), float(s)) for width, s in verify_s.items()))}
    if "model" in known.get("draft_s", {}):
        found["draft"] = ((1, float(known["draft_s"]["model"])),)
    return found


def measured_acceptance(manifest: Manifest | None) -> tuple[float, str]:
    """How often the target takes what the draft proposes, and where that is from."""
    pair = manifest.quality.get("pair") if manifest is not None else None
    share = pair.get("greedy_match") if isinstance(pair, dict) else None
    if isinstance(share, int | float) and is_finite(share) and 0 <= share <= 1:
        return float(share), "greedy match, measured at export"
    return PRIOR_ACCEPTANCE[""], "assumed"


def available_now(device: Device) -> MemoryLimit:
    """What an app may take: on this machine what is free now, elsewhere a share of the device's memory."""
    here = available_here() if device.kind == "host" else None
    if here is not None:
        return here
    share = APP_SHARE.get(device.kind, APP_SHARE["laptop"])
    capacity_mb = 1e3 * float(device.memory_gb)
    how = f"that an app may take (assumed: {share:.0%} of {device.memory_gb:g} GB)"
    return MemoryLimit(share * capacity_mb, how)


def limit_on(device: Device, asked_mb: float | None) -> MemoryLimit:
    """The limit that the user asks for, and on this machine no more than is free now; without one, what is there."""
    if asked_mb is None:
        return available_now(device)
    asked = asked_limit(asked_mb, "of --memory-limit")
    here = available_here() if device.kind == "host" else None
    return asked if here is None or asked.mb <= here.mb else here


def unit_cores(device: Device) -> tuple[int, ...] | None:
    """The cores that a device's cpu can share out: of this machine those that may be used; None where not known."""
    if device.kind == "host":
        return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
    cpu = device.units.get("cpu")
    return None if cpu is None or cpu.cores is None else tuple(range(int(cpu.cores)))
