"""What a pair will take on a device, before any work: weights, caches, compiled binaries, host tables.

All sizes are estimates from shapes and recipes, in MB (10^6 bytes). A device holds one graph of each role at a
time, so the most preferred one of each must fit together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage

from outrider.errors import ExportError, UsageError
from outrider.export.config import ModelConfig
from outrider.export.device_plans import GraphPlan, device_backends, plan_graphs
from outrider.export.options import ExportOptions
from outrider.export.slots import matrix_slots, slot_shape
from outrider.quantize.coreml_recipes import CoreMLRecipe, CoreMLScheme, Palette
from outrider.quantize.npu_recipes import get_npu_recipe
from outrider.quantize.schemes import AnyScheme, BlockInt, Carry, DynamicInt8, Float
from outrider.runtime.role_memory import LEAST_CONTEXT
from outrider.targets.device import APP_SHARE, Device

__all__ = ["Budget", "GraphSize", "estimate", "fit_budget", "refuse_full_disk", "with_free_space"]

HTP_CONTEXT_MB = (
    4000  # what one context of a Hexagon NPU addresses (ExecuTorch's Qualcomm backend, its readme)
)
DISK_MARGIN = 1.25  # compiled binaries and blocks of 4 bits take more than their weights
SMALL_FILES_MB = 50.0  # tokenizer, probes, graphs without weights
Plans = Mapping[str, tuple[GraphPlan, ...]]


@dataclass(frozen=True)
class GraphSize:
    """Estimated MB of one graph."""

    plan: GraphPlan
    weights_mb: float
    kv_mb: float
    binaries_mb: float = 0.0  # compiled for an accelerator, loaded in place of the weights
    tables_mb: float = 0.0  # that the host looks tokens up in
    scratch_mb: float = 0.0  # on disk while it is made
    gathered_mb: float = 0.0  # of the weights: an embedding of which a forward reads some rows only

    @property
    def memory_mb(self) -> float:
        """What is in memory while the graph is open."""
        return (self.binaries_mb or self.weights_mb) + self.kv_mb + self.tables_mb

    @property
    def disk_mb(self) -> float:
        """What its files take; a program for Vulkan comes with a stand-in for computers."""
        copies = 2 if self.plan.lowering == "vulkan" else 1
        return copies * self.weights_mb + self.binaries_mb + self.tables_mb


@dataclass(frozen=True)
class Budget:
    """The sizes of all graphs against what an app may take; `notes` say what was changed to make them fit."""

    device: str
    capacity_mb: float | None  # None: the device that the export runs on, whose bundle may go anywhere
    share: float
    sizes: tuple[GraphSize, ...]
    notes: tuple[str, ...] = ()
    free_mb: float | None = None  # on the disk that the bundle is written to, where that is known

    @property
    def disk_mb(self) -> float:
        """What the export takes on disk at its largest; plans that share their files count once."""
        written = {(size.plan.role, size.plan.artifact): size for size in self.sizes}.values()
        files, scratch = (sum(size.disk_mb for size in written), max(size.scratch_mb for size in written))
        return DISK_MARGIN * (files + scratch) + SMALL_FILES_MB

    @property
    def limit_mb(self) -> float | None:
        """What an app may take."""
        return None if self.capacity_mb is None else self.share * self.capacity_mb

    @property
    def preferred(self) -> dict[str, GraphSize]:
        """The graph of each role that the device would open first."""
        first: dict[str, GraphSize] = {}
        for size in self.sizes:
            first.setdefault(size.plan.role, size)
        return first

    @property
    def memory_mb(self) -> float:
        """Of the preferred graph of each role together."""
        return sum(size.memory_mb for size in self.preferred.values())

    @property
    def fits(self) -> bool:
        """Whether the preferred graphs fit together, and each NPU graph into a context."""
        small = all(size.binaries_mb <= HTP_CONTEXT_MB for size in self.sizes)
        return small and (self.limit_mb is None or self.memory_mb <= self.limit_mb)

    def __str__(self) -> str:
        """The table."""
        heads = ("weights", "KV", "compiled", "tables", "in memory")
        lines = [f"{'MB, estimated':58}" + "".join(f"{head:>11}" for head in heads)]
        preferred = [id(size) for size in self.preferred.values()]
        for size in self.sizes:
            figures = (size.weights_mb, size.kv_mb, size.binaries_mb, size.tables_mb, size.memory_mb)
            name = f"{size.plan}, {size.plan.max_context} tokens" + (" *" if id(size) in preferred else "")
            lines.append(f"{name:58}" + "".join(f"{figure:11.0f}" for figure in figures))
        total = f"* together {self.memory_mb:.0f} MB"
        if self.limit_mb is not None and self.capacity_mb is not None:
            total += (
                f" of {self.limit_mb:.0f} MB that an app may take on {self.device} (assumed: {self.share:.0%} of "
                f"{self.capacity_mb / 1e3:g} GB)"
            )
        over = [
            f"{size.plan}: {size.binaries_mb:.0f} MB compiled, more than the {HTP_CONTEXT_MB} MB of one NPU context"
            for size in self.sizes
            if size.binaries_mb > HTP_CONTEXT_MB
        ]
        if self.free_mb is not None:
            total += f"\non disk up to {self.disk_mb:.0f} MB, {self.free_mb:.0f} MB are free"
        return "\n".join([*lines, total, *over, *self.notes])


def with_free_space(budget: Budget, folder: Path) -> Budget:
    """The budget with what the disk of a folder has left."""
    return replace(budget, free_mb=disk_usage(folder).free / 1e6)


def refuse_full_disk(budget: Budget, output: Path) -> None:
    """Raise ExportError where the bundle will not fit on its disk."""
    if budget.free_mb is not None and budget.disk_mb > budget.free_mb:
        raise ExportError(
            f"this export needs up to {budget.disk_mb:.0f} MB on the disk of {output.absolute().parent}, which "
            f"has {budget.free_mb:.0f} MB free; free space there, choose another --output, or make fewer graphs with "
            "--backends"
        )


def fit_budget(
    device: Device, options: ExportOptions, configs: Mapping[str, ModelConfig]
) -> tuple[ExportOptions, dict[str, tuple[GraphPlan, ...]], Budget]:
    """Plans that fit the device: as asked for, or with a shorter draft context where none was given.

    Raises UsageError with the table and with what would fit.
    """
    plans = plan_graphs(device, options)
    budget = _budget(device, plans, configs, options)
    adapted, notes = options, []
    while not budget.fits and (shorter := _shorter_draft(adapted, options, plans)) is not None:
        adapted, plans = shorter, plan_graphs(device, shorter)
        notes = [f"the draft remembers {shorter.draft_context} tokens only, so that the pair fits"]
        budget = replace(_budget(device, plans, configs, adapted), notes=tuple(notes))
    if budget.fits:
        return adapted, plans, budget
    asked = _budget(device, plan_graphs(device, options), configs, options)
    raise UsageError(
        f"this does not fit {device.slug}:\n{asked}\n{_what_would_fit(device, options, configs)}"
    )


def _shorter_draft(adapted: ExportOptions, asked: ExportOptions, plans: Plans) -> ExportOptions | None:
    if "draft" not in plans or asked.draft_context is not None:
        return None
    context = plans["draft"][0].max_context // 2
    return replace(adapted, draft_context=context) if context >= LEAST_CONTEXT else None


def _what_would_fit(device: Device, options: ExportOptions, configs: Mapping[str, ModelConfig]) -> str:
    """The changes, each by itself, that make it fit."""
    found: list[str] = []
    for name, changed in _changes(device, options):
        smaller_still = name.startswith("--max-context") and found
        if not smaller_still and _budget(device, plan_graphs(device, changed), configs, changed).fits:
            found.append(name)
    if found:
        return f"What would fit: {'; or '.join(found)}"
    return "Nothing of this size fits; take a smaller model or a recipe with fewer bits"


def _changes(device: Device, options: ExportOptions) -> Iterator[tuple[str, ExportOptions]]:
    """What one could ask for instead, from the least to the largest change."""
    context = options.max_context // 2
    while context >= LEAST_CONTEXT:
        draft = options.draft_context and min(options.draft_context, context)
        yield f"--max-context {context}", replace(options, max_context=context, draft_context=draft)
        context //= 2
    default, _ = device_backends(device)
    backends = options.backends or default
    if options.draft is not None and "qnn" in backends and options.draft.npu_precision != "a16w4":
        smaller = replace(options.draft, npu_precision="a16w4")
        yield "--npu-precision a16w4", replace(options, draft=smaller)
    if "coreml" in backends and options.draft is not None and options.draft.coreml_recipe("draft") != "lut4":
        smaller = replace(options.draft, coreml_precision="lut4")
        yield "--coreml-draft-precision lut4", replace(options, draft=smaller)
    if "coreml" in backends and options.target.coreml_recipe("target") != "int4-b32":
        smaller = replace(options.target, coreml_precision="int4-b32")
        yield "--coreml-precision int4-b32", replace(options, target=smaller)
    without = tuple(name for name in backends if name != "qnn")
    if "qnn" in backends and without:
        yield f"no graph for the NPU, --backends {','.join(without)}", replace(options, backends=without)
    if options.draft is not None:
        yield "the target without --draft-model", replace(options, draft=None, draft_context=None)


def _budget(
    device: Device, plans: Plans, configs: Mapping[str, ModelConfig], options: ExportOptions
) -> Budget:
    sizes = tuple(
        estimate(plan, _trimmed(configs[role], options.of(role).vocab), options)
        for role, graphs in plans.items()
        for plan in graphs
    )
    if device.kind == "host":
        return Budget(device.slug, None, 1.0, sizes)
    return Budget(device.slug, 1e3 * float(device.memory_gb), APP_SHARE[device.kind], sizes)


def _trimmed(config: ModelConfig, vocab: int | None) -> ModelConfig:
    if vocab is None or vocab >= config.vocab_size:
        return config
    return replace(config, tie_embeddings=False, head_rows=vocab)


def estimate(plan: GraphPlan, config: ModelConfig, options: ExportOptions) -> GraphSize:
    """What a graph will take."""
    values = config.num_layers * config.num_kv_heads * config.head_dim * plan.max_context
    kv = 2 * values * _kv_bytes(plan, options) / 1e6
    table = config.vocab_size * config.hidden_size / 1e6
    if plan.lowering == "npu":
        recipe = get_npu_recipe(plan.recipe)
        weights = _weights_mb(config, {slot: recipe.bits_for(slot) for slot in _products(config)})
        floats = _weights_mb(config, dict.fromkeys(_products(config), 32.0))  # what calibration runs
        return GraphSize(plan, weights, kv, binaries_mb=weights, tables_mb=table, scratch_mb=floats)
    if plan.backend == "coreml":
        return _coreml_size(plan, config, options.of(plan.role).coreml_scheme(plan.role), kv)
    if plan.lowering in ("onnx", "cuda"):
        scheme_for = options.of(plan.role).recipe(plan.role).scheme_for
        shared = config.tie_embeddings and scheme_for("head") == scheme_for("embedding")
        slots = [slot for slot in matrix_slots(config) if not (shared and slot == "embedding")]
        embedding = slots[:1] if slots[0] == "embedding" else []
        gathered, weights = (
            _weights_mb(config, {slot: _bits(scheme_for(slot)) for slot in part})
            for part in (embedding, slots)
        )
        return GraphSize(plan, weights, kv, gathered_mb=gathered)
    bits = _executorch_bits(plan.recipe)
    weights = _weights_mb(config, {slot: 8 if slot == "head" else bits for slot in _products(config)})
    return GraphSize(plan, weights + table, kv, gathered_mb=table)


def _kv_bytes(plan: GraphPlan, options: ExportOptions) -> int:
    """16 bits in static graphs of an NPU, in Core ML and on CUDA; elsewhere float32, or int8 where it was asked for."""
    if plan.lowering in ("npu", "cuda") or plan.backend == "coreml":
        return 2
    return 1 if plan.lowering == "onnx" and options.kv_cache == "int8" else 4


def _coreml_size(plan: GraphPlan, config: ModelConfig, recipe: CoreMLRecipe, kv: float) -> GraphSize:
    """A split graph's embedding is a table of the host; a stateful one's is in the package, or is its head."""
    slots = list(_products(config))
    table = 0.0
    if plan.profile == "split":
        table = config.vocab_size * config.hidden_size * (1 if recipe.scheme_for("embedding") else 2) / 1e6
    weights = _weights_mb(config, {slot: _coreml_bits(recipe.scheme_for(slot)) for slot in slots})
    gathered = scratch = 0.0
    if plan.profile != "split" and not config.tie_embeddings:
        gathered = _weights_mb(config, {"embedding": _coreml_bits(recipe.scheme_for("embedding"))})
    if plan.lowering == "coreml_target":
        scratch = weights + gathered  # coremltools writes them twice
    return GraphSize(plan, weights + gathered, kv, tables_mb=table, scratch_mb=scratch, gathered_mb=gathered)


def _coreml_bits(scheme: CoreMLScheme | None) -> float:
    """Bits a weight, half-precision scales included; palettes take next to nothing."""
    if scheme is None:
        return 16
    if isinstance(scheme, Palette) or scheme.block is None:
        return scheme.bits
    return scheme.bits + (16 + (0 if scheme.symmetric else scheme.bits)) / scheme.block


def _products(config: ModelConfig) -> Sequence[str]:
    return matrix_slots(config)[1:]


def _weights_mb(config: ModelConfig, bits: Mapping[str, float]) -> float:
    shapes = {slot: slot_shape(config, slot) for slot in bits}
    return sum(bits[slot] * rows * columns / 8 for slot, (rows, columns) in shapes.items()) / 1e6


def _bits(scheme: AnyScheme) -> float:
    """Bits a weight, scales included."""
    if isinstance(scheme, Float):
        return 32 if scheme.dtype == "float32" else 16
    if isinstance(scheme, BlockInt):
        return scheme.bits + 32 / scheme.block + (0 if scheme.symmetric else 8 / scheme.block)
    if isinstance(scheme, Carry):
        return _bits(scheme.otherwise) + 9 / 32  # a zero point and a correction for 32 weights
    assert isinstance(scheme, DynamicInt8)
    return 8


def _executorch_bits(recipe: str) -> float:
    """Bits of the layers' weights; groups of 32 share a scale where there are 4."""
    return 4.5 if "4w" in recipe else 8 if "8w" in recipe else 32
