"""What a lowering hands to the bundle: files, what the backend must know, and what became of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.quantize.report import SlotReport

__all__ = ["Lowered"]


@dataclass(frozen=True)
class Lowered:
    """What one lowering wrote.

    `files` are all that belong together, the first is the one that a backend opens. `meta` holds JSON values
    only: what the backend must know to run the graph (`export.onnx.graph_meta` and what is its own). `functions`
    names the file or the method per width, where each width has one. `embedding_file` is the table that the host
    looks tokens up in. `notes` are for people: what no delegate took, sizes of compiled binaries.
    """

    files: tuple[Path, ...]
    meta: Mapping[str, Any]
    slots: tuple[SlotReport, ...]
    functions: Mapping[str, str] = field(default_factory=dict)
    embedding_file: Path | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
