"""The weights of Core ML functions in their package: each slot compressed once, its parts written one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.export.coreml_graph import CoreMLGraph
from outrider.export.coreml_package import PackageWriter
from outrider.export.slots import SlotWeights
from outrider.quantize.coreml import Compressed, compress
from outrider.quantize.coreml_recipes import CoreMLRecipe
from outrider.quantize.report import SlotReport

__all__ = ["mil_weight", "store_weights"]

Progress = Callable[[str, int, int], None]
Parameters = dict[str, tuple[NDArray[Any], str]]  # arrays and their MIL types by parameter


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
            writer.store(name, *mil_weight(held))
        reports.append(whole.report)
        if progress:
            progress(slot, done + 1, len(slots))
    for name, vector in {name: v for graph in graphs for name, v in graph.vectors.items()}.items():
        writer.store_half(name, vector)
    return tuple(reports)


def mil_weight(weight: Compressed) -> tuple[str, Parameters]:
    """The MIL operation that holds the weight of a 1×1 convolution, and its parameters.

    `constexpr_lut_to_dense` has a table for every group of rows, `constexpr_blockwise_shift_scale` a scale for every
    block of a row or for the whole of it; half precision is a plain `const`.
    """
    if weight.tables is not None:
        bits = int(weight.tables.shape[1]).bit_length() - 1
        tables = weight.tables[:, None, None, None, :, None]  # [N / group, 1, 1, 1, 2^bits, 1]
        indices = (kernel(weight.codes), f"uint{bits}")
        return "constexpr_lut_to_dense", {"indices": indices, "lut": (tables, "fp16")}
    if weight.scales is None or weight.scheme is None:
        return "const", {"val": (kernel(weight.codes), "fp16")}
    sign = "int" if weight.codes.dtype == np.int8 else "uint"
    kind = f"{sign}{weight.scheme.bits}"
    parameters: Parameters = {"data": (kernel(weight.codes), kind), "scale": (kernel(weight.scales), "fp16")}
    if weight.offsets is not None:
        half = weight.offsets.dtype == np.float16
        parameters["offset"] = (kernel(weight.offsets), "fp16" if half else kind)
    return "constexpr_blockwise_shift_scale", parameters


def kernel(matrix: NDArray[Any]) -> NDArray[Any]:
    """[N, K] as a 1×1 kernel [N, K, 1, 1]."""
    return matrix[:, :, None, None]
