"""Hand-made graphs and devices to place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.manifest import (
    FileEntry,
    GraphEntry,
    KvEntry,
    Manifest,
    RoleEntry,
    TokenizerEntry,
    write_manifest,
)
from outrider.runtime.placement import MemoryLimit, Request
from outrider.runtime.placement_costs import Candidate
from outrider.targets.device import Device, Figure, Unit, load_device
from outrider.targets.model_cost import DRAFT_COST, TARGET_COST

TARGET = Candidate(
    "target", "onnxruntime", "cpu", "inplace", "int4", None, 2048, "float32", TARGET_COST, 1483, 117, 976
)
DRAFT = Candidate(
    "draft", "onnxruntime", "cpu", "inplace", "int4", None, 2048, "float32", DRAFT_COST, 658, 50, 404
)
PLENTY = MemoryLimit(1e6, "of a test")


def on(candidate: Candidate, unit: str, backend: str = "onnxruntime", **changes: Any) -> Candidate:
    return replace(candidate, unit=unit, backend=backend, **changes)


def request(device: str | Device = "raspberry-pi-5", *more: Candidate, **changes: Any) -> Request:
    """A request for the pair on the cpu, and for what more there is; a board of four cores."""
    known = load_device(device) if isinstance(device, str) else device
    fields = {"limit": PLENTY, "acceptance": 0.8, "cores": (0, 1, 2, 3), **changes}
    return Request(known, (TARGET, DRAFT, *more), **fields)


def with_unit(device: Device, name: str, **changes: Any) -> Device:
    unit: Unit = replace(device.units[name], **changes)
    return replace(device, units={**device.units, name: unit})


def with_gpu(device: Device, gb_s: float) -> Device:
    """The device with a second unit like its cpu, of another bandwidth and without a price for starting."""
    cpu = device.units["cpu"]
    gpu = replace(cpu, bandwidth_gb_s=Figure(gb_s, "a test"), launch_ms=Figure(0.0, "a test"))
    return replace(device, units={**device.units, "gpu": gpu})


def write_pair(folder: Path, *, quality: bool = True) -> Path:
    """A manifest of a pair for the CPU; its files are not there."""
    folder.mkdir(exist_ok=True)
    empty = FileEntry("0" * 64, 1000)

    def role(name: str, megabytes: int, layers: int) -> RoleEntry:
        files = {
            f"{name}/graph.onnx": empty,
            f"{name}/graph.onnx.data": FileEntry("1" * 64, 1_000_000 * megabytes),
        }
        kv = KvEntry("float32", "BHSD", layers, 2, 64)
        graph = GraphEntry("onnxruntime", "cpu", "inplace", files, None, 512, kv, 1024, 5000, "int4")
        return RoleEntry((graph,))

    tokenizer = TokenizerEntry("0" * 64, {"tokenizer.json": empty}, (1,))
    manifest = Manifest(
        "0.1.0",
        (),
        {"target": role("target", 400, 24), "draft": role("draft", 60, 12)},
        tokenizer,
        1024,
        "host",
        {"pair": {"greedy_match": 0.9}} if quality else {},
    )
    write_manifest(folder, manifest)
    return folder
