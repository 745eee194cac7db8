"""What a placement is chosen from: the graphs of a bundle, the cores of a unit, and the memory that there is now."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.manifest import GraphEntry, Manifest
from outrider.runtime.evidence import PRIOR_ACCEPTANCE
from outrider.runtime.memory_budget import MemoryLimit, available_here, logits_mb
from outrider.runtime.placed import Placement
from outrider.runtime.placement_costs import Candidate
from outrider.runtime.timing import known_costs, machine_line
from outrider.targets.device import APP_SHARE, Device
from outrider.targets.model_cost import model_cost

__all__ = [
    "available_now",
    "bundle_candidates",
    "measured_acceptance",
    "unit_cores",
]


def bundle_candidates(manifest: Manifest, *, here: bool) -> tuple[Candidate, ...]:
    """The graphs of a bundle's target and draft; `here` with what was measured of them on this machine."""
    entries = {
        role: manifest.roles[role].by_preference() for role in ("target", "draft") if role in manifest.roles
    }
    measured = _measured(manifest, {role: graphs[0] for role, graphs in entries.items()}) if here else {}
    return tuple(_candidates(entries, measured))


def _candidates(
    entries: Mapping[str, tuple[GraphEntry, ...]], measured: Mapping[str, tuple[tuple[int, float], ...]]
) -> Iterator[Candidate]:
    for role, graphs in entries.items():
        for place, entry in enumerate(graphs):
            cost = model_cost(entry)
            kv_mb = 1e-6 * entry.max_context * cost.kv_bytes
            yield Candidate(
                role,
                entry.backend,
                entry.unit,
                entry.profile,
                entry.recipe,
                entry.widths,
                entry.max_context,
                entry.kv.dtype,
                cost,
                cost.resident_mb,
                kv_mb,
                logits_mb(role, entry.vocab_size),
                entry.vocab_size,
                made=True,
                measured=measured.get(role, ()) if place == 0 else (),
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
    pair = manifest.quality.get("pair", {}) if manifest is not None else {}
    if "greedy_match" in pair:
        return float(pair["greedy_match"]), "greedy match, measured at export"
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


def unit_cores(device: Device) -> tuple[int, ...] | None:
    """The cores that a device's cpu can share out: of this machine those that may be used; None where not known."""
    if device.kind == "host":
        return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
    cpu = device.units.get("cpu")
    return None if cpu is None or cpu.cores is None else tuple(range(int(cpu.cores)))
