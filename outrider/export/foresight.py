"""What would end an export after minutes of work, looked for before the first of them.

A lowering finds its own mistakes, but the graphs of an NPU come last: behind the target, and behind calibration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from outrider.errors import UsageError
from outrider.export.checkpoint import Checkpoint
from outrider.export.device_plans import GraphPlan
from outrider.export.options import ExportOptions
from outrider.export.prompts import calibration_sequences
from outrider.export.slots import matrix_slots, slot_shape
from outrider.quantize.coreml import check_divides
from outrider.quantize.coreml_recipes import coreml_recipe
from outrider.quantize.executorch import executorch_recipe
from outrider.quantize.npu_recipes import get_npu_recipe
from outrider.runtime.backends import has_coreml
from outrider.targets.device import Device

__all__ = ["check_shapes", "check_texts", "check_tools", "refuse_unmeasurable", "refuse_unused"]

COREML = ("coreml_draft", "coreml_target", "coreml_split")
CALIBRATED = ("npu", *COREML)
"""Lowerings that round weights, or set ranges, by `ExportOptions.calibration`."""

READ_BY: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "precision": (("target",), ("onnx",)),
    "overrides": (("target",), ("onnx",)),
    "draft_precision": (("draft",), ("onnx",)),
    "draft_overrides": (("draft",), ("onnx",)),
    "profile": (("target", "draft"), ("onnx",)),
    "kv_cache": (("target", "draft"), ("onnx",)),
    "npu_precision": (("target", "draft"), ("npu",)),
    "npu_target": (("target",), ("npu",)),
    "calibration": (("target", "draft"), CALIBRATED),
    "executorch_precision": (("target", "draft"), ("xnnpack", "vulkan")),
}
"""Option -> the roles and lowerings that read it; options that are not here are read by every export."""


def refuse_unused(given: Collection[str], plans: Mapping[str, Sequence[GraphPlan]]) -> None:
    """Raise UsageError for an option that was given although no planned graph reads it."""
    every = [plan for graphs in plans.values() for plan in graphs]
    for option, (roles, lowerings) in READ_BY.items():
        if option in given and not any(plan.role in roles and plan.lowering in lowerings for plan in every):
            made = "; ".join(dict.fromkeys(map(str, every)))
            raise UsageError(
                f"{option} was given, but no graph of this export reads it (they are: {made}); leave it out, or "
                "change --device or --backends"
            )


def refuse_unmeasurable(plans: Mapping[str, Sequence[GraphPlan]]) -> None:
    """Raise UsageError where nothing here can write the target's text, by which every graph is measured."""
    elsewhere = ("npu", "vulkan", *(() if has_coreml() else COREML))
    if all(plan.lowering in elsewhere for plan in plans["target"]):
        made = "; ".join(map(str, plans["target"]))
        raise UsageError(
            f"the target gets no graph that can be measured on this computer ({made}); add onnxruntime to --backends, "
            "or ship it unmeasured with --no-evaluate"
        )


def check_tools(plans: Sequence[GraphPlan], device: Device) -> None:
    """Open the compilers that plans need and look their recipes up.

    Raises BackendError for an onnxruntime-qnn that is too old or cannot be opened here and for a chip that it does not
    compile for, UsageError for an unknown recipe.
    """
    for plan in plans:
        if plan.backend == "executorch":
            executorch_recipe(plan.recipe)
        if plan.backend == "coreml":
            coreml_recipe(plan.recipe)  # raises for an unknown name
        if plan.lowering == "npu":
            from outrider.targets.qnn_plugin import ids_of, qnn_plugin

            get_npu_recipe(plan.recipe)
            ids_of(device)
            qnn_plugin()


def check_shapes(
    plans: Sequence[GraphPlan], checkpoints: Mapping[str, Checkpoint], options: ExportOptions
) -> None:
    """Raise ExportError where palettes or blocks of a Core ML recipe do not divide a weight of its model."""
    for plan in plans:
        if plan.backend != "coreml":
            continue
        role = options.of(plan.role)
        config = checkpoints[plan.role].config
        if role.vocab is not None:
            config = replace(config, tie_embeddings=False, head_rows=role.vocab)
        scheme_for = role.coreml_scheme(plan.role).scheme_for
        for slot in matrix_slots(config)[1:]:
            check_divides(scheme_for(slot), slot, slot_shape(config, slot))


def check_texts(
    plans: Sequence[GraphPlan], checkpoints: Mapping[str, Checkpoint], options: ExportOptions
) -> None:
    """Read the calibration file as each lowering will. Raises UsageError for one that says too little."""
    for plan in plans:
        if plan.lowering in CALIBRATED and options.calibration is not None:
            tokenizer = checkpoints[plan.role].tokenizer
            calibration_sequences(tokenizer, plan.max_context, options.calibration)
