"""The graphs of one role: each plan is lowered once, and described for the manifest."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from outrider.export.calibrate import LayerMoments, calibrate, calibration_tokens
from outrider.export.checkpoint import Checkpoint
from outrider.export.config import ModelConfig
from outrider.export.device_plans import PROVIDER_OPTIONS, GraphPlan
from outrider.export.lowered import Lowered
from outrider.export.onnx_form import CUDA, HOST, GraphForm
from outrider.export.options import ExportOptions
from outrider.export.prompts import SEGMENT, calibration_sequences
from outrider.export.slots import SlotWeights, matrix_slots
from outrider.manifest import GraphEntry, KvEntry, RoleEntry, describe_file, token_map_hash
from outrider.runtime.vocab_map import VOCAB_MAP, write_vocab_map
from outrider.targets.ane_lint import lint_package

__all__ = ["LOWERINGS", "Making", "make_role"]

PREFILL_WIDTH = 512
REFERENCE = "reference.pte"  # of the CPU, for a graph whose delegate runs on Android only
STAND_IN_WIDTHS = (
    1,
    5,
)  # of it: a plain step and a verify; each costs as much time as one of the graph itself
ELSEWHERE = (  # of a graph's description: the manifest has fields for these
    "profile",
    "widths",
    "max_context",
    "vocab_size",
    "layers",
    "kv_heads",
    "head_dim",
    "hidden_layers",
    "functions",
)
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Making:
    """What a lowering is given."""

    plan: GraphPlan
    checkpoint: Checkpoint
    weights: SlotWeights  # of the checkpoint, a trimmed head included
    options: ExportOptions
    place: Path  # the folder to write into
    progress: Callable[[str, int, int], None] | None


def make_role(
    folder: Path,
    plans: Sequence[GraphPlan],
    checkpoint: Checkpoint,
    options: ExportOptions,
    progress: Progress | None = None,
) -> tuple[RoleEntry, dict[str, Lowered]]:
    """Lower every plan of a role into `folder`; what was written, by the folder of each lowering."""
    role = plans[0].role
    (folder / role).mkdir()
    weights, vocab_map = _weights(folder, role, checkpoint, options)
    made: dict[tuple[object, ...], Lowered] = {}
    entries = []
    for plan in plans:
        if plan.artifact not in made:
            place = folder / plan.folder
            place.mkdir(exist_ok=True)
            making = Making(plan, checkpoint, weights, options, place, _telling(plan, progress))
            made[plan.artifact] = LOWERINGS[plan.lowering](making)
        entries.append(_entry(folder, plan, weights.config, made[plan.artifact], vocab_map))
    return RoleEntry(tuple(entries)), {plan.folder: made[plan.artifact] for plan in plans}


def _telling(plan: GraphPlan, progress: Progress | None) -> Callable[[str, int, int], None] | None:
    if progress is None:
        return None
    stage = f"{plan.role}: " + (
        "quantize" if plan.lowering in ("onnx", "cuda") else f"{plan.lowering} {plan.recipe}"
    )
    return lambda _, done, total: progress(stage, done / max(total, 1))


def _weights(
    folder: Path, role: str, checkpoint: Checkpoint, options: ExportOptions
) -> tuple[SlotWeights, Path | None]:
    """The weights of a role, and the file that maps the logits of a trimmed head to ids."""
    vocab = options.of(role).vocab
    if vocab is None:
        return SlotWeights(checkpoint), None
    from outrider.export.trim import TrimmedWeights, choose_ids

    ids = choose_ids(checkpoint.tokenizer, vocab, checkpoint.config.vocab_size)
    path = folder / role / VOCAB_MAP
    write_vocab_map(path, ids)
    return TrimmedWeights(checkpoint, ids), path


def _entry(
    folder: Path, plan: GraphPlan, config: ModelConfig, lowered: Lowered, vocab_map: Path | None
) -> GraphEntry:
    def name(path: Path | None) -> str | None:
        return None if path is None else path.relative_to(folder).as_posix()

    paths = [*lowered.files, *(path for path in (lowered.embedding_file, vocab_map) if path is not None)]
    meta = lowered.meta
    widths = meta.get("widths")
    return GraphEntry(
        backend=plan.backend,
        unit=plan.unit,
        profile=plan.profile,
        files={path.relative_to(folder).as_posix(): describe_file(path) for path in dict.fromkeys(paths)},
        widths=None if widths is None else tuple(widths),
        prefill_width=max(widths) if widths else PREFILL_WIDTH,
        kv=KvEntry(
            "float16" if plan.backend == "coreml" else meta.get("dtypes", {}).get("past_key_0", "float32"),
            "BC1S" if plan.backend == "coreml" and plan.profile == "split" else "BHSD",
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
        ),
        max_context=plan.max_context,
        vocab_size=config.num_logits,
        recipe=plan.recipe,
        preference=plan.preference,
        hidden_layers=tuple(meta["hidden_layers"]),
        functions=dict(lowered.functions),
        embedding_file=name(lowered.embedding_file),
        vocab_map=name(vocab_map),
        gathered_bytes=_gathered_bytes(lowered),
        weights=sum(slot.shape[0] * slot.shape[1] for slot in lowered.slots if slot.slot != "embedding"),
        options={**{key: value for key, value in meta.items() if key not in ELSEWHERE}, **_running(plan)},
    )


def _running(plan: GraphPlan) -> Mapping[str, object]:
    """What decides by what a graph can be run, beside its backend."""
    if not plan.providers:
        return {}
    told = {name: PROVIDER_OPTIONS[name] for name in plan.providers if name in PROVIDER_OPTIONS}
    return {"providers": list(plan.providers), **({"provider_options": told} if told else {})}


def _gathered_bytes(lowered: Lowered) -> int:
    """Bytes of which a forward reads some rows only: of the embedding, where no head shares them."""
    if lowered.embedding_file is not None:
        return lowered.embedding_file.stat().st_size
    sizes = {slot.slot: slot.bytes_after for slot in lowered.slots}
    return sizes["embedding"] if sizes.get("head") else 0


def _lower_cuda(making: Making) -> Lowered:
    return _lower_onnx(making, CUDA)


def _lower_onnx(making: Making, form: GraphForm = HOST) -> Lowered:
    from outrider.export.onnx import export_graph

    plan, options = making.plan, making.options
    recipe = options.of(plan.role).recipe(plan.role)
    report = export_graph(
        making.weights.config,
        making.weights,
        recipe,
        "inplace" if making.plan.lowering == "cuda" else options.profile,
        making.place / "graph.onnx",
        max_context=plan.max_context,
        widths=plan.widths,
        hidden_layers=options.hidden_layers if plan.role == "target" else (),
        stats=calibrate(making.weights, recipe, making.checkpoint.tokenizer, plan.max_context),
        progress=making.progress,
        form=form,
        said_zeros=form == HOST and _is_arm(options.device),
    )
    if options.kv_cache == "int8" and form == HOST:
        from outrider.export.cache_int8 import quantize_cache

        segment = min(SEGMENT, plan.max_context)
        report = quantize_cache(report, calibration_tokens(making.checkpoint.tokenizer, segment))
    return Lowered(report.files, report.meta, report.slots, notes={"operators": dict(report.operators)})


def _is_arm(device: str) -> bool:
    """Whether a device has an Arm processor, as all have that are known but the host."""
    return device != "host" or platform.machine().lower() in ("aarch64", "arm64")


def _lower_npu(making: Making) -> Lowered:
    from outrider.export.npu import export_npu
    from outrider.quantize.npu_recipes import get_npu_recipe

    plan, options = making.plan, making.options
    sequences = calibration_sequences(making.checkpoint.tokenizer, plan.max_context, options.calibration)
    lowered = export_npu(
        making.weights.config,
        making.weights,
        get_npu_recipe(plan.recipe),
        making.place,
        max_context=plan.max_context,
        widths=plan.widths,
        calibration=[sequence.tolist() for sequence in sequences],
        progress=making.progress,
    )
    return _compiled(making, lowered)


def _compiled(making: Making, lowered: Lowered) -> Lowered:
    """The graphs with what the device's own compiler makes of them."""
    from outrider.export.npu_context import compile_contexts
    from outrider.targets.device import load_device
    from outrider.targets.qnn_plugin import ids_of

    device = load_device(making.options.device)
    ids = ids_of(device)
    contexts = compile_contexts(making.place, lowered.functions, {device.slug: ids}, making.progress)
    chip = {"soc_model": ids.soc_model, "htp_arch": ids.htp_arch, "contexts": contexts.models}
    return replace(
        lowered,
        files=(*lowered.files, *contexts.files),
        meta={**lowered.meta, **chip},
        notes={**lowered.notes, "compiled": contexts.notes},
    )


def _lower_xnnpack(making: Making) -> Lowered:
    return _lower_pte(making, making.place, "xnnpack", "buffer", ())


def _lower_vulkan(making: Making) -> Lowered:
    """The program for the GPU, and beside it the same one for the CPU: what is run in its place where no GPU is."""
    widths = making.plan.widths
    lowered = _lower_pte(making, making.place, "vulkan", "split", widths)
    few = tuple(width for width in widths if width in STAND_IN_WIDTHS) or widths[:1]
    with tempfile.TemporaryDirectory(dir=making.place) as place:
        stand_in = _lower_pte(making, Path(place), "xnnpack", "split", few, stand_in_for="vulkan")
        path = making.place / REFERENCE
        stand_in.files[0].replace(path)
    reference = {"file": REFERENCE, "widths": list(few), "methods": stand_in.meta["methods"]}
    return replace(lowered, files=(*lowered.files, path), meta={**lowered.meta, "reference": reference})


def _lower_pte(
    making: Making,
    place: Path,
    backend: str,
    profile: Literal["buffer", "split"],
    widths: tuple[int, ...],
    stand_in_for: str | None = None,
) -> Lowered:
    from outrider.export.executorch import export_pte
    from outrider.quantize.executorch import executorch_recipe

    plan, config = making.plan, making.weights.config
    recipe = executorch_recipe(plan.recipe)
    slots = [
        slot for slot in matrix_slots(config)[1:] if getattr(recipe.scheme_for(slot), "method", "") == "mse"
    ]
    sequences = (
        calibration_tokens(making.checkpoint.tokenizer, min(SEGMENT, plan.max_context)) if slots else []
    )
    moments = LayerMoments(making.weights, dict.fromkeys(slots, False), sequences)
    return export_pte(
        config,
        making.weights,
        recipe,
        place,
        backend=backend,
        profile=profile,
        max_context=plan.max_context,
        widths=widths,
        hidden_layers=making.options.hidden_layers if plan.role == "target" else (),
        stand_in_for=stand_in_for,
        stats=moments,
        progress=making.progress,
    )


def _lower_coreml_split(making: Making) -> Lowered:
    """Static widths over a cache that the app keeps: a draft for the Neural Engine, or a target without states."""
    from outrider.export.coreml import export_coreml_draft

    return _lower_coreml(making, export_coreml_draft)


def _lower_coreml_target(making: Making) -> Lowered:
    from outrider.export.coreml_target import export_coreml_target

    return _lower_coreml(making, export_coreml_target)


def _lower_coreml(making: Making, export: Callable[..., Lowered]) -> Lowered:
    plan, tokenizer = making.plan, making.checkpoint.tokenizer
    sequences = calibration_sequences(tokenizer, plan.max_context, making.options.calibration)
    lowered = export(
        making.weights.config,
        making.weights,
        making.options.of(plan.role).coreml_scheme(plan.role),
        making.place,
        max_context=plan.max_context,
        widths=plan.widths,
        hidden_layers=making.options.hidden_layers if plan.role == "target" else (),
        target=making.options.deployment_target or "ios18",
        metadata={
            "outrider.role": plan.role,
            "outrider.tokenizer_sha256": token_map_hash(json.loads(tokenizer.tokenizer_json)),
        },
        calibration=[sequence.tolist() for sequence in sequences],
        progress=making.progress,
    )
    first = [path for path in lowered.files if path.name == "Manifest.json"]
    notes = dict(lowered.notes)
    if plan.unit == "npu":
        looked_over = lint_package(first[0].parent, ask=False)
        notes["neural_engine"] = [looked_over.headline(), *looked_over.errors()]
    return replace(
        lowered, files=(*first, *(path for path in lowered.files if path not in first)), notes=notes
    )


LOWERINGS: dict[str, Callable[[Making], Lowered]] = {
    "onnx": _lower_onnx,
    "cuda": _lower_cuda,
    "npu": _lower_npu,
    "xnnpack": _lower_xnnpack,
    "vulkan": _lower_vulkan,
    "coreml_draft": _lower_coreml_split,
    "coreml_target": _lower_coreml_target,
    "coreml_split": _lower_coreml_split,
}
"""What writes the files of a plan."""
