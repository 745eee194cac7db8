"""Tiny models as .pte, exported once a test run: an export takes many seconds, whatever the weights."""

from __future__ import annotations

import fcntl
import functools
import json
import os
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
def tiny_pte(
    family: str,
    precision: str = "fp32",
    profile: str = "buffer",
    widths: tuple[int, ...] = (16,),
    hidden_layers: tuple[int, ...] = (),
) -> TinyPte:
    """Export a model of `families` for XNNPACK with its context; the same arguments give the same files.

    The processes of a run share them: the first one exports, and the others wait for it.
    """
    model = families.oracle(family)
    name = "-".join([family, precision, profile, *map(str, widths), "hidden", *map(str, hidden_layers)])
    folder = Path(os.environ["OUTRIDER_TEST_RUN"], "pte", name)
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / "said.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            made = _export(folder, family, model, precision, profile, widths, hidden_layers)
            said.write_text(json.dumps(made))
    found = json.loads(said.read_text())
    return TinyPte(Path(found["path"]), found["meta"], found["notes"], model)


def _export(
    folder: Path,
    family: str,
    model: Any,
    precision: str,
    profile: str,
    widths: tuple[int, ...],
    hidden_layers: tuple[int, ...],
) -> dict[str, Any]:
    from outrider.export.executorch import export_pte
    from outrider.quantize.executorch import executorch_recipe

    weights = families.weights_of(family, model)
    lowered = export_pte(
        weights.config,
        weights,
        executorch_recipe(precision),
        folder / "exported",
        profile=profile,
        max_context=families.CONTEXT,
        widths=widths,
        hidden_layers=hidden_layers,
    )
    return {"path": str(lowered.files[0]), "meta": dict(lowered.meta), "notes": dict(lowered.notes)}
