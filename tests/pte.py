"""Tiny models as .pte, exported once a test run: an export takes seconds, whatever the weights."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import families


@dataclass(frozen=True)
class TinyPte:
    """A program, what the manifest would say about it, and the model that it was made from."""

    path: Path
    meta: dict[str, Any]
    notes: dict[str, Any]
    model: Any


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="outrider-pte-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def tiny_pte(
    family: str,
    precision: str = "fp32",
    profile: str = "buffer",
    widths: tuple[int, ...] = (16,),
    hidden_layers: tuple[int, ...] = (),
) -> TinyPte:
    """Export a model of `families` for XNNPACK with its context; the same arguments give the same files."""
    from outrider.export.executorch import export_pte
    from outrider.quantize.executorch import executorch_recipe

    model = families.oracle(family)
    weights = families.weights_of(family, model)
    name = "-".join([family, precision, profile, *map(str, widths), "hidden", *map(str, hidden_layers)])
    lowered = export_pte(
        weights.config,
        weights,
        executorch_recipe(precision),
        _folder() / name,
        profile=profile,
        max_context=families.CONTEXT,
        widths=widths,
        hidden_layers=hidden_layers,
    )
    return TinyPte(lowered.files[0], dict(lowered.meta), dict(lowered.notes), model)
