"""Lower a decoder for the Apple Neural Engine: a Core ML package of static functions over a cache that the host keeps.

One function per width in one multifunction package, whose functions read the same weights. The host looks rows of
the embedding up, turns positions into cosines and sines and visibility into a mask, and copies new columns of keys
and values into the cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ExportError
from outrider.export.config import ModelConfig
from outrider.export.coreml_calibrate import fitted_recipe, slot_moments, stream_scale
from outrider.export.coreml_graph import head_pieces, lay_out
from outrider.export.coreml_package import PackageWriter, get_target
from outrider.export.coreml_weights import store_weights
from outrider.export.lowered import Lowered
from outrider.export.npu_embedding import write_embedding, write_half_embedding
from outrider.export.npu_graph import row_count
from outrider.export.onnx import check_request, graph_meta
from outrider.export.rope import rope_frequencies
from outrider.export.slots import SlotWeights, matrix_slots
from outrider.quantize.coreml_recipes import CoreMLRecipe, check_compressed, scheme_name
from outrider.quantize.report import SlotReport

__all__ = ["MASKED", "export_coreml_draft", "split_meta"]

MASKED = -40000.0  # added to a score that must not count: half precision ends at 65,504
PACKAGE = "model.mlpackage"
TABLES = {True: (write_half_embedding, "embedding.f16"), False: (write_embedding, "embedding.i8")}
Progress = Callable[[str, int, int], None]


def export_coreml_draft(
    config: ModelConfig,
    weights: SlotWeights,
    recipe: CoreMLRecipe,
    place: Path,
    *,
    max_context: int,
    widths: Sequence[int] = (1, 2, 64),
    hidden_layers: Sequence[int] = (),
    target: str = "ios18",
    metadata: Mapping[str, str] | None = None,
    calibration: Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
) -> Lowered:
    """Write `model.mlpackage` with a function `w<width>` per width, and the host's embedding table, into `place`.

    Arrays are float16; `coreml_graph.lay_out` has names and shapes. `metadata` goes into the package, beside
    `outrider.widths` and `outrider.meta`. `calibration` holds token ids of real prompts: what weights read there,
    so that errors are compensated for, and how large the residual stream gets. `progress(slot, done, total)` is
    called after every weight. Raises UsageError for what cannot be exported, MissingExtraError without coremltools,
    ExportError when a weight is left out or a compression changed nothing.
    """
    check_request(config, "split", max_context, widths, hidden_layers)
    system = get_target(target)
    with PackageWriter(place / PACKAGE) as writer:
        recipe = fitted_recipe(weights, recipe, calibration, progress)
        stream = stream_scale(weights, calibration)
        write_table, table = TABLES[recipe.scheme_for("embedding") is None]
        _, embedding, embedding_report = write_table(config, weights, place / table)
        graphs = {
            width: lay_out(
                config,
                weights,
                max_context=max_context,
                width=width,
                hidden_layers=hidden_layers,
                stream=stream,
            )
            for width in sorted(set(widths))
        }
        moments = slot_moments(weights, recipe, calibration)
        stored = store_weights(graphs.values(), weights, recipe, writer, moments=moments, progress=progress)
        reports = (embedding_report, *stored)
        check_complete(config, recipe, reports)
        meta = {
            **split_meta(config, max_context, tuple(graphs), hidden_layers),
            "embedding": embedding,
            "functions": {str(width): f"w{width}" for width in graphs},
            "precision": recipe.name,
            "target": target,
        }
        programs = {f"w{width}": graph.function for width, graph in graphs.items()}
        files = writer.finish(programs, system, described(meta, metadata or {}))
    return Lowered(
        files=(*files, place / table),
        meta=meta,
        slots=reports,
        functions=meta["functions"],
        embedding_file=place / table,
        notes={
            "operations": {name: len(program.operations) for name, program in programs.items()},
            "stream": stream,
            "overrides": {slot: scheme_name(scheme) for slot, scheme in recipe.overrides},
        },
    )


def check_complete(config: ModelConfig, recipe: CoreMLRecipe, reports: Sequence[SlotReport]) -> None:
    """Raise ExportError where a slot was left without a weight, or is not what the recipe says."""
    missing = set(matrix_slots(config)) - {report.slot for report in reports}
    if missing:
        raise ExportError(f"{len(missing)} slots were left without a weight, one is {min(missing)}")
    check_compressed(recipe, reports)


def described(meta: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, str]:
    """What the package says of itself: all that a reader of it alone must know."""
    widths = ",".join(map(str, meta["widths"]))
    return {**metadata, "outrider.widths": widths, "outrider.meta": json.dumps(meta, sort_keys=True)}


def split_meta(
    config: ModelConfig, max_context: int, widths: Sequence[int], hidden_layers: Sequence[int] = ()
) -> dict[str, Any]:
    """What a backend must know to run the functions; JSON values only."""
    rope = {}
    for kind in sorted(set(config.layer_types)):
        frequencies, factor = rope_frequencies(config, kind, max_context)
        rope[kind] = {"inv_freq": [float(f) for f in frequencies], "scale": float(factor)}
    return {
        **graph_meta(config, "split", max_context, widths, hidden_layers),
        "rows": {str(width): row_count(width) for width in widths},
        "head": [stop - start for start, stop in head_pieces(config)],
        "masked": MASKED,
        "rope": rope,
    }
