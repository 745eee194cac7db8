"""The weights of Core ML functions in their package: each slot compressed once, its parts written one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from outrider.export.coreml_graph import CoreMLGraph
from outrider.export.coreml_package import PackageWriter
from outrider.export.slots import SlotWeights
from outrider.quantize.coreml import compress
from outrider.quantize.coreml_recipes import CoreMLRecipe
from outrider.quantize.report import SlotReport

__all__ = ["store_weights"]

Progress = Callable[[str, int, int], None]


def store_weights(
    graphs: Iterable[CoreMLGraph],
    weights: SlotWeights,
    recipe: CoreMLRecipe,
    writer: PackageWriter,
    *,
    moments: Mapping[str, NDArray[np.float32]],
    progress: Progress | None = None,
) -> tuple[SlotReport, ...]:
    """Write every weight that the functions read, once; one slot is in memory at a time.

    `moments` are second moments of what a slot reads, for recipes that compensate errors. Raises ExportError where
    a palette does not divide a part.
    """
    parts = {name: part for graph in graphs for name, part in graph.weights.items()}
    slots: dict[str, list[str]] = {}
    for name, part in parts.items():
        slots.setdefault(part.slot, []).append(name)
    reports = []
    for done, (slot, names) in enumerate(slots.items()):
        whole = compress(recipe, slot, weights.matrix(slot), raw=weights.raw(slot), moment=moments.get(slot))
        for name in names:
            held = whole.rows(*parts[name].rows).scaled(parts[name].factor)
            writer.store(name, held.operation, held.parameters(convolution=True))
        reports.append(whole.report)
        if progress:
            progress(slot, done + 1, len(slots))
    for name, vector in {name: v for graph in graphs for name, v in graph.vectors.items()}.items():
        writer.store_half(name, vector)
    return tuple(reports)
