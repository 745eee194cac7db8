"""Lower a decoder for an Apple GPU: one Core ML package whose function takes any number of tokens and keeps the cache.

The function is put together with coremltools' own builder, which follows shapes and types, and is written without
any of its passes: what is compressed here stays as it is. The embedding is inside, and a head that is tied to it
reads the same bytes.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.errors import ExportError, MissingExtraError
from outrider.export.config import ModelConfig
from outrider.export.coreml import MASKED
from outrider.export.coreml_calibrate import fitted_recipe, slot_moments, stream_scale
from outrider.export.coreml_package import AUTHOR, MODEL, WEIGHT_FILE, WEIGHTS, get_target, manifest
from outrider.export.coreml_target_graph import StateGraph
from outrider.export.lowered import Lowered
from outrider.export.onnx import check_request, graph_meta
from outrider.export.rope import rope_frequencies
from outrider.export.slots import SlotWeights, matrix_slots
from outrider.export.staging import disk_hint
from outrider.quantize.coreml import compress, constexpr
from outrider.quantize.coreml_recipes import CoreMLRecipe, check_compressed, check_tied, scheme_name
from outrider.quantize.report import SlotReport

__all__ = ["export_coreml_target"]

PACKAGE = "model.mlpackage"
SYSTEMS = {"ios18": "iOS18", "ios26": "iOS26"}
ALIGNMENT = 256  # bytes that a weight may cost in its file beyond its own: a record and padding
Progress = Callable[[str, int, int], None]


def export_coreml_target(
    config: ModelConfig,
    weights: SlotWeights,
    recipe: CoreMLRecipe,
    place: Path,
    *,
    max_context: int,
    widths: Sequence[int] = (1, 2, 3, 5, 9, 64),
    hidden_layers: Sequence[int] = (),
    target: str = "ios18",
    metadata: Mapping[str, str] | None = None,
    calibration: Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
) -> Lowered:
    """Write `place`/model.mlpackage with one function `main` over states `keys_<l>`, `values_<l>` [1, G, M, d].

    Inputs `tokens` [1, S] and `begin` [1] (the cache row of the first of them) int32, `cos_<kind>`, `sin_<kind>`
    [S, rotary/2] and `mask_<kind>` [1, 1, S, M] float16, `rows` [R] int32 (whose logits are wanted); outputs `logits`
    [1, R, V] float16 and `hidden_<l>` [1, S, D] float32. S is any number up to the context, R up to the largest of
    `widths`. `calibration` holds token ids of real prompts, `progress(slot, done, total)` is called after every
    weight. Raises UsageError for what cannot be exported, MissingExtraError without coremltools, ExportError where a
    compression changed nothing or a weight would be stored twice.
    """
    check_request(config, "split", max_context, widths, hidden_layers)
    get_target(target)
    recipe = fitted_recipe(weights, recipe, calibration, progress)
    if config.tie_embeddings:
        check_tied(recipe)
    place.mkdir(parents=True, exist_ok=True)
    most_rows = min(max(widths), max_context)
    with _quiet():
        store = _Weights(weights, recipe, slot_moments(weights, recipe, calibration), progress)
        graph = StateGraph(_builder(), config, weights, store.weight, stream_scale(weights, calibration))
        model = _convert(graph, place / PACKAGE, max_context, most_rows, tuple(hidden_layers), target)
    reports = store.reports(config)
    check_compressed(recipe, reports)
    meta = _meta(config, max_context, most_rows, hidden_layers) | {"precision": recipe.name, "target": target}
    described = {
        **(metadata or {}),
        "outrider.widths": ",".join(map(str, sorted(set(widths)))),
        "outrider.meta": json.dumps(meta, sort_keys=True),
    }
    files = _describe(place / PACKAGE, model, described)
    _check_package(model, files[-1], reports)
    return Lowered(
        files=files,
        meta=meta,
        slots=reports,
        notes={
            "operations": _count(model),
            "stream": graph.stream,
            "overrides": {slot: scheme_name(scheme) for slot, scheme in recipe.overrides},
        },
    )


class _Weights:
    """Compresses a slot when the graph asks for it; a tied matrix is one constant."""

    def __init__(
        self,
        weights: SlotWeights,
        recipe: CoreMLRecipe,
        moments: Mapping[str, Any],
        progress: Progress | None,
    ) -> None:
        self.weights, self.recipe, self.moments, self.progress = weights, recipe, moments, progress
        self.made: dict[str, Any] = {}  # slot -> constant
        self.found: dict[str, SlotReport] = {}
        self.total = len(matrix_slots(weights.config)) - weights.config.tie_embeddings

    def weight(self, slot: str, factor: float) -> Any:
        """The constant [N, K] of a slot times a factor."""
        shared = "embedding" if slot == "head" and self.weights.config.tie_embeddings else slot
        if shared not in self.made:
            matrix, raw = self.weights.matrix(slot), self.weights.raw(slot)
            packed = compress(self.recipe, shared, matrix, raw=raw, moment=self.moments.get(shared))
            name = shared.replace(".", "_")
            self.made[shared] = constexpr(_builder(), packed.scaled(factor), name)
            self.found[shared] = packed.report
            if self.progress:
                self.progress(slot, len(self.made), self.total)
        return self.made[shared]

    def reports(self, config: ModelConfig) -> tuple[SlotReport, ...]:
        """A report of every slot, in order. Raises ExportError when one was never asked for."""
        found = dict(self.found)
        if config.tie_embeddings:
            shared = replace(found["embedding"], slot="head", bytes_before=0, bytes_after=0)
            found["head"] = replace(shared, reason="the embedding's own bytes")
        missing = [slot for slot in matrix_slots(config) if slot not in found]
        if missing:
            raise ExportError(f"{len(missing)} slots were left without a weight, one is {missing[0]}")
        return tuple(found[slot] for slot in matrix_slots(config))


def _meta(
    config: ModelConfig, max_context: int, most_rows: int, hidden_layers: Sequence[int]
) -> dict[str, Any]:
    """What a backend must know to run the function; JSON values only."""
    rope = {}
    for kind in sorted(set(config.layer_types)):
        frequencies, factor = rope_frequencies(config, kind, max_context)
        rope[kind] = {"inv_freq": [float(f) for f in frequencies], "scale": float(factor)}
    return {
        **graph_meta(config, "split", max_context, (), hidden_layers),
        "profile": "state",
        "widths": None,
        "rows": most_rows,
        "masked": MASKED,
        "rope": rope,
    }


def _builder() -> Any:
    """coremltools' MIL builder. Raises MissingExtraError where it is not installed."""
    try:
        from coremltools.converters.mil import Builder
    except ImportError as error:
        raise MissingExtraError("coremltools", "coreml") from error
    return Builder


def _convert(
    graph: StateGraph,
    package: Path,
    max_context: int,
    most_rows: int,
    hidden_layers: tuple[int, ...],
    target: str,
) -> Any:
    """Build the function and write the package; returns its specification."""
    import coremltools as ct
    from coremltools.converters.mil.mil import Function, Program, get_new_symbol, types

    system = getattr(ct.target, SYSTEMS[target])
    _builder().name_count.clear()  # it numbers operations for the whole process: the same export, the same names
    inputs = graph.placeholders(max_context, types, (get_new_symbol(), get_new_symbol()))
    program = Program()
    with Function(inputs, opset_version=system) as function:
        function.set_outputs(graph.build(function.inputs, max_context, hidden_layers))
    program.add_function("main", function)
    tokens, rows = ct.RangeDim(1, max_context, default=1), ct.RangeDim(1, most_rows, default=1)
    flexible = {"tokens": (1, tokens), "rows": (rows,)}
    for name, value in function.inputs.items():
        if name.startswith(("cos_", "sin_")):
            flexible[name] = (tokens, value.shape[1])
        elif name.startswith("mask_"):
            flexible[name] = (1, 1, tokens, max_context)
    try:
        with _scratch_in(package.parent):
            converted = ct.convert(
                program,
                convert_to="mlprogram",
                inputs=[ct.TensorType(name=name, shape=shape) for name, shape in flexible.items()],
                minimum_deployment_target=system,
                pass_pipeline=ct.PassPipeline.EMPTY,
                compute_units=ct.ComputeUnit.CPU_AND_GPU,
                skip_model_load=True,
                package_dir=str(package),
            )
    except RuntimeError as error:
        if "writ" not in str(error):
            raise
        raise ExportError(
            f"coremltools cannot write {package.name}: {error} {disk_hint(package.parent)}"
        ) from error
    return converted.get_spec()


def _describe(package: Path, model: Any, metadata: Mapping[str, str]) -> tuple[Path, ...]:
    """Put metadata into the package's specification; returns all files, which hold no date and nothing random."""
    described = model.description.metadata.userDefined
    described.pop("com.github.apple.coremltools.conversion_date", None)
    described.update(metadata)
    data = package / "Data" / AUTHOR
    (data / MODEL).write_bytes(model.SerializeToString(deterministic=True))
    files = (package / "Manifest.json", data / MODEL, data / WEIGHTS / WEIGHT_FILE)
    files[0].write_text(json.dumps(manifest(), indent=4, sort_keys=True) + "\n", encoding="utf-8")
    for path in files:
        path.chmod(0o644)
    return files


def _count(model: Any) -> dict[str, int]:
    """Operations of the function, by kind."""
    (function,) = model.mlProgram.functions.values()
    (block,) = function.block_specializations.values()
    counts: dict[str, int] = {}
    for operation in block.operations:
        counts[operation.type] = counts.get(operation.type, 0) + 1
    return counts


def _check_package(model: Any, blob: Path, reports: Sequence[SlotReport]) -> None:
    """Refuse a package that holds fewer compressed weights than the recipe says, or any weight twice."""
    counts = _count(model)
    held = sum(number for kind, number in counts.items() if kind.startswith("constexpr_"))
    wanted = sum(report.after != "fp16" and report.bytes_after > 0 for report in reports)
    if held != wanted:
        raise ExportError(f"the package holds {held} compressed weights, and {wanted} were compressed")
    vectors = ALIGNMENT * counts["const"] + 8 * sum(report.shape[0] + report.shape[1] for report in reports)
    most = sum(report.bytes_after for report in reports) + vectors
    if blob.stat().st_size > most:
        raise ExportError(
            f"{blob.name} has {blob.stat().st_size:,} bytes for {most:,} of weights: some are stored twice"
        )


@contextmanager
def _scratch_in(folder: Path) -> Iterator[None]:
    """coremltools writes all weights into the system's temporary folder first, which may be small, or be memory."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(dir=folder) as tempfile.tempdir:
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextmanager
def _quiet() -> Iterator[None]:
    """coremltools warns about versions, and draws bars for passes that do nothing here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
