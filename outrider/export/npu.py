"""Lower a decoder for the Hexagon NPU through ONNX Runtime QNN: static QDQ graphs over a cache that the host keeps.

One ONNX file per width, all reading one data file. The host looks rows of the embedding up, turns positions into
cosines and sines and visibility into a bounded mask, and copies new rows of keys and values into the cache as
the integers that they are: past and present of a tensor have one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.export.calibrate import LayerMoments
from outrider.export.config import ModelConfig
from outrider.export.damage import slot_damages
from outrider.export.lowered import Lowered
from outrider.export.npu_calibrate import calibrate_ranges
from outrider.export.npu_embedding import extremes, write_embedding
from outrider.export.npu_graph import NpuGraph, Numerics, lay_out, row_count
from outrider.export.npu_qdq import write_quantized
from outrider.export.npu_scales import Scale, choose_scales, massive_slots, stream_scale
from outrider.export.npu_weights import DataStore, pack_slot, store_weights
from outrider.export.onnx import check_request, graph_meta
from outrider.export.rope import rope_frequencies
from outrider.export.slots import SlotWeights, has_bias, matrix_slots, slot_shape
from outrider.quantize.channels import ChannelMatrix
from outrider.quantize.npu_recipes import NpuRecipe, with_npu_overrides
from outrider.quantize.ranges import Range
from outrider.quantize.sensitivity import choose_overrides
from outrider.targets.npu_host import EmbeddingTable

__all__ = ["export_npu", "npu_meta"]

DATA, EMBEDDING = "weights.data", "embedding.i8"
DAMAGE_TEXTS, DAMAGE_TOKENS = 3, 64  # that slots are ranked on
RANKING_TOKENS = 2048  # that errors are compensated for while slots are ranked
Progress = Callable[[str, int, int], None]


def export_npu(
    config: ModelConfig,
    weights: SlotWeights,
    recipe: NpuRecipe,
    place: Path,
    *,
    max_context: int,
    widths: Sequence[int] = (1, 2, 64),
    calibration: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> Lowered:
    """Write `w<width>.onnx`, their data file and the host's embedding table into the folder `place`.

    `calibration` holds token ids of real prompts, which give every activation its range and every weight what it
    reads. `progress(what, done, total)` is called as work goes on. Raises UsageError for what cannot be exported,
    ExportError when a weight is left out.
    """
    check_request(config, "split", max_context, widths, ())
    place.mkdir(parents=True, exist_ok=True)
    table, embedding, embedding_report = write_embedding(config, weights, place / EMBEDDING)
    ranges, numerics = calibrated(config, weights, table, calibration, max_context, progress, place)
    recipe = with_npu_overrides(
        recipe, sensitive_slots(weights, recipe, calibration, numerics.massive, progress)
    )
    numerics = replace(numerics, blocked=blocked_slots(config, recipe) - numerics.massive)
    graphs = {
        width: lay_out(
            config,
            weights,
            max_context=max_context,
            width=width,
            rows=row_count(width),
            numerics=numerics,
        )
        for width in sorted(widths)
    }
    first = next(iter(graphs.values()))
    scales, masked = choose_scales(first, ranges)
    moments = slot_moments(weights, recipe, calibration)
    with open(place / DATA, "wb") as file:
        store = DataStore(file, DATA)
        stored = store_weights(first, weights, recipe, store, moments=moments, progress=progress)
        for width, graph in graphs.items():
            write_quantized(graph, scales, stored, place / f"w{width}.onnx", store)
    reports = (embedding_report, *stored.reports)
    missing = set(matrix_slots(config)) - {report.slot for report in reports}
    if missing:
        raise ExportError(f"{len(missing)} slots were left without a weight, one is {min(missing)}")
    functions = {str(width): f"w{width}.onnx" for width in graphs}
    meta = npu_meta(config, first, scales, masked, max_context, tuple(graphs))
    return Lowered(
        files=(*(place / name for name in functions.values()), place / DATA, place / EMBEDDING),
        meta={**meta, "embedding": embedding, "precision": recipe.name},
        slots=reports,
        functions=functions,
        embedding_file=place / EMBEDDING,
        notes={
            "massive": sorted(numerics.massive),
            "stream": numerics.stream,
            "overrides": dict(recipe.overrides),
        },
    )


def calibrated(
    config: ModelConfig,
    weights: SlotWeights,
    table: EmbeddingTable,
    texts: Sequence[Sequence[int]],
    max_context: int,
    progress: Progress | None,
    scratch: Path | None = None,
) -> tuple[dict[str, Range], Numerics]:
    """Ranges of all activations, and what of the model cannot be left to 16-bit integers.

    The float model that tells them is written below the folder `scratch`, and removed.
    """
    report = (lambda part: progress("calibration", round(100 * part), 100)) if progress else None

    def run(numerics: Numerics) -> dict[str, Range]:
        found = calibrate_ranges(
            config,
            weights,
            table.rows,
            texts,
            max_context=max_context,
            numerics=numerics,
            progress=report,
            scratch=scratch,
        )
        return {**found, **host_ranges(config, max_context, extremes(table))}

    shape = lay_out(config, weights, max_context=max_context, width=1, rows=1)
    numerics, ranges = Numerics(), run(Numerics())
    stream = stream_scale(shape, ranges)
    if stream != 1.0:
        numerics = Numerics(stream=stream)
        ranges = run(numerics)
    return ranges, replace(numerics, massive=frozenset(massive_slots(shape, ranges)))


def blocked_slots(config: ModelConfig, recipe: NpuRecipe) -> frozenset[str]:
    """The slots whose weights have multipliers in blocks: products with a bias take none."""
    slots = [slot for slot in matrix_slots(config)[1:] if not has_bias(config, slot)]
    return frozenset(slot for slot in slots if recipe.block_for(slot, slot_shape(config, slot)[1]))


def sensitive_slots(
    weights: SlotWeights,
    recipe: NpuRecipe,
    sequences: Sequence[Sequence[int]],
    spared: Collection[str],
    progress: Progress | None = None,
) -> tuple[tuple[str, int], ...]:
    """The slots that have to keep 8 bits for the recipe's `max_damage`, as overrides; none where it sets no limit.

    `spared` slots are not rounded at all, and what the recipe's overrides say stands. Each of the others is rounded
    alone, and what that costs is measured on the beginnings of a few calibration texts. Errors are compensated for
    the other texts: on those that they were compensated for, they look smaller than they are.
    """
    config = weights.config
    told = [pattern for pattern, _ in recipe.overrides]
    slots = [
        slot
        for slot in matrix_slots(config)[1:]
        if recipe.bits_for(slot) == 4
        and slot not in spared
        and not any(fnmatchcase(slot, pattern) for pattern in told)
    ]
    if recipe.max_damage is None or not slots:
        return ()
    held = list(sequences[1::4]) or list(sequences)
    seen = _first_tokens([ids for i, ids in enumerate(sequences) if i % 4 != 1], RANKING_TOKENS)
    moments = slot_moments(weights, recipe, seen)

    def pack(slot: str, weight: NDArray[np.float32]) -> ChannelMatrix:
        return pack_slot(slot, weight, recipe, moments, blocked=not has_bias(config, slot))

    longest = sorted(held, key=len, reverse=True)[:DAMAGE_TEXTS]
    texts = [np.asarray(ids[:DAMAGE_TOKENS], np.int64) for ids in longest]
    report = (lambda part: progress("sensitivity", round(100 * part), 100)) if progress else None
    damages = slot_damages(weights, pack, texts, slots=slots, progress=report)
    return choose_overrides(damages, max_damage=recipe.max_damage)


def _first_tokens(sequences: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Whole sequences from the first on, until they hold so many tokens."""
    kept: list[Sequence[int]] = []
    for sequence in sequences:
        if sum(map(len, kept)) >= count:
            break
        kept.append(sequence)
    return kept


def host_ranges(config: ModelConfig, max_context: int, embedding: tuple[float, float]) -> dict[str, Range]:
    """The ranges of what the host computes, whatever the text is."""
    found = {"x": Range(*embedding)}
    for kind in sorted(set(config.layer_types)):
        factor = rope_frequencies(config, kind, max_context)[1]
        found |= {f"{part}_{kind}": Range(-factor, factor) for part in ("cos", "sin")}
    return found


def slot_moments(
    weights: SlotWeights, recipe: NpuRecipe, sequences: Sequence[Sequence[int]]
) -> Mapping[str, NDArray[np.float32]]:
    """Second moments of what each weight reads, computed a layer at a time as they are asked for."""
    config = weights.config
    methods = {slot: recipe.method_for(slot_shape(config, slot)[1]) for slot in matrix_slots(config)[1:]}
    needed = {slot: method == "gptq" for slot, method in methods.items() if method != "rtn"}
    return LayerMoments(weights, needed, [np.asarray(ids, np.int64) for ids in sequences])


def npu_meta(
    config: ModelConfig,
    graph: NpuGraph,
    scales: Mapping[str, Scale],
    masked: float,
    max_context: int,
    widths: tuple[int, ...],
) -> dict[str, Any]:
    """What a backend must know to run the graphs; JSON values only."""
    names = [*(name for name, value in graph.inputs.items() if value.kind == "activation"), *graph.outputs]
    rope = {}
    for kind in sorted(set(config.layer_types)):
        frequencies, factor = rope_frequencies(config, kind, max_context)
        rope[kind] = {"inv_freq": [float(f) for f in frequencies], "scale": float(factor)}
    return {
        **graph_meta(config, "split", max_context, widths),
        "scales": {name: [scales[name].scale, scales[name].zero_point] for name in names},
        "dtypes": {name: np.dtype(scales[name].dtype).name for name in names},
        "rows": {str(width): row_count(width) for width in widths},
        "masked": masked,
        "rope": rope,
    }
