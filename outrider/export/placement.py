"""The graphs that an export could make of models for a device, as candidates for a placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from outrider.export.budget import GraphSize, estimate
from outrider.export.config import ModelConfig
from outrider.export.device_plans import plan_graphs
from outrider.export.options import ExportOptions
from outrider.export.slots import matrix_slots, slot_shape
from outrider.runtime.placement_costs import Candidate
from outrider.runtime.role_memory import CHUNK, SHORT_CHUNK, GraphShape, halves, weights_mb
from outrider.targets.device import Device
from outrider.targets.model_cost import ModelCost

__all__ = ["model_candidates"]


def model_candidates(
    device: Device, options: ExportOptions, configs: Mapping[str, ModelConfig]
) -> tuple[Candidate, ...]:
    """Every graph that `outrider export` would make, with the context asked for and with halves of it."""
    found = {
        replace(size.plan, preference=0): _candidate(size, configs[size.plan.role])
        for context in (options.max_context, *halves(options.max_context))
        for size in _sizes(device, replace(options, max_context=context), configs)
    }
    return tuple(found.values())


def _sizes(device: Device, options: ExportOptions, configs: Mapping[str, ModelConfig]) -> Iterator[GraphSize]:
    for role, plans in plan_graphs(device, options).items():
        for plan in plans:
            yield estimate(plan, configs[role], options)


def _candidate(size: GraphSize, config: ModelConfig) -> Candidate:
    """What a graph of this size streams and multiplies: all its weights but rows that are looked up."""
    plan = size.plan
    streamed = 1e6 * (size.weights_mb - size.gathered_mb)
    shapes = (slot_shape(config, slot) for slot in matrix_slots(config)[1:])
    ops = 2.0 * sum(rows * columns for rows, columns in shapes)
    half = plan.backend == "coreml" or plan.lowering == "cuda"
    kv_type = "float16" if half else "int16" if plan.lowering == "npu" else "float32"
    shape = GraphShape(
        plan.role,
        plan.backend,
        plan.unit,
        plan.profile,
        plan.recipe,
        config.num_logits,
        config.hidden_size,
        config.intermediate_size,
        max(plan.widths, default=None),
    )
    stored = weights_mb(size.weights_mb, shape, tied=not size.gathered_mb)
    return Candidate(
        plan.role,
        plan.backend,
        plan.unit,
        plan.profile,
        plan.recipe,
        plan.widths or None,
        plan.max_context,
        kv_type,
        ModelCost(streamed, ops, 1e6 * size.kv_mb / plan.max_context, size.memory_mb),
        (size.binaries_mb or stored) + size.tables_mb,
        size.kv_mb,
        shape.scratch_mb(min(CHUNK, plan.max_context)),
        config.vocab_size,
        loading_mb=shape.loading_mb,
        short_scratch_mb=shape.scratch_mb(min(SHORT_CHUNK, plan.max_context)),
    )
