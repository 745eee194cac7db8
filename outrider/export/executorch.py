"""Lower a decoder to ExecuTorch: one .pte whose graph, cache and delegates come from our own decoder.

Profile `buffer` (XNNPACK): one method `forward` of any number of tokens up to a limit, whose caches are
mutable buffers inside the program. A runtime has to hand it zeroed memory: what was never written is masked,
but 0 x NaN is NaN. Profile `split` (Vulkan): one method a width, caches as inputs, new rows as outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from outrider.errors import MissingExtraError, UsageError
from outrider.export.config import ModelConfig
from outrider.export.executorch_buffer import BufferProgram, Lowering, build_pieces
from outrider.export.executorch_lower import (
    BACKENDS,
    lower,
    quiet,
    to_edge,
    trace,
    vendor_partitioner,
    write_program,
)
from outrider.export.executorch_parts import ExecutorchPrimitives
from outrider.export.executorch_split import PieceProgram, SplitProgram
from outrider.export.lowered import Lowered
from outrider.export.onnx import check_request, graph_meta, mask_kinds
from outrider.export.rope import rope_frequencies, rotary_size
from outrider.export.slots import SlotWeights, matrix_slots
from outrider.quantize.executorch import ExecutorchRecipe, check_quantized

__all__ = ["PROFILES", "export_pte"]

Profile = Literal["buffer", "split"]
PROFILES: tuple[Profile, ...] = ("buffer", "split")
WIDEST = 64  # tokens of one forward in a `buffer` graph, unless widths ask for more


def export_pte(
    config: ModelConfig,
    weights: SlotWeights,
    recipe: ExecutorchRecipe,
    place: Path,
    *,
    backend: str = "xnnpack",
    profile: Profile = "buffer",
    max_context: int,
    widths: Sequence[int] = (),
    hidden_layers: Sequence[int] = (),
    stand_in_for: str | None = None,
    stats: Mapping[str, NDArray[np.float32]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Lowered:
    """Write `place`/model.pte and say what became of every slot and operator.

    `widths`: of a `split` program, one method each; the largest limits the tokens of a `buffer` forward
    (64 if empty). `meta["methods"]` names the inputs and outputs of every method in order;
    `meta["widths"]` lists the widths that run; `notes["delegation"]` holds the reports of `lower`.
    `stats` are mean squares of the inputs [K] by slot, which weigh the errors of 4-bit scales. `stand_in_for`
    "vulkan" gives an XNNPACK program the integers that Vulkan's would have, to be run in its place.
    Raises UsageError for what cannot be exported, ExportError for a vendor backend without its SDK, when a
    recipe changed nothing or integer products were left outside the delegate.
    """
    _check(config, backend, profile, max_context, widths, hidden_layers)
    _check_kernels(recipe, backend, config)
    place.mkdir(parents=True, exist_ok=True)
    path = place / "model.pte"
    with quiet(), torch.no_grad():
        try:
            import torchao  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("torchao", "executorch") from error
        primitives = ExecutorchPrimitives(
            weights,
            recipe,
            backend == "xnnpack",
            vulkan=backend == "vulkan",
            rows="vulkan" not in (backend, stand_in_for),
            stats=stats,
            progress=progress,
        )
        build = _write_buffer if profile == "buffer" else _write_split
        report, meta = build(path, config, primitives, backend, max_context, widths, hidden_layers)
    for method in report.values():
        taken = {"delegated": method["products"], "left": method["float_products"]}
        if backend != "portable":
            check_quantized(recipe, primitives.slots, primitives.products, taken)
    return Lowered(
        files=(path,),
        meta=meta | {"delegate": backend},
        slots=tuple(primitives.slots),
        functions={name.removeprefix("forward_w"): name for name in report} if profile == "split" else {},
        notes={"delegation": report},
    )


def _check(
    config: ModelConfig,
    backend: str,
    profile: str,
    max_context: int,
    widths: Sequence[int],
    hidden_layers: Sequence[int],
) -> None:
    if profile not in PROFILES:
        raise UsageError(f"profile is {profile!r}; known ExecuTorch profiles: {', '.join(PROFILES)}")
    if backend not in BACKENDS:
        vendor_partitioner(backend)
    if profile == "buffer" and backend != "xnnpack":
        raise UsageError(f"the buffer profile is made of delegates for xnnpack; use split for {backend}")
    if profile == "buffer" and any(not 1 <= width <= max_context for width in widths):
        raise UsageError(f"widths are {tuple(widths)}; a buffer graph takes widths of 1 to {max_context}")
    check_request(
        config, "split", max_context, widths or ((1,) if profile == "buffer" else ()), hidden_layers
    )


def _check_kernels(recipe: ExecutorchRecipe, backend: str, config: ModelConfig) -> None:
    """Refuse products that the delegate would expand to float in every forward."""
    schemes = {slot: recipe.scheme_for(slot) for slot in matrix_slots(config)[1:]}
    rows = [slot for slot, scheme in schemes.items() if scheme is not None and scheme.group is None]
    if backend == "vulkan" and rows:
        raise UsageError(
            f"recipe {recipe.name!r} gives {rows[0]} one scale a row; Vulkan's delegate has integer kernels for "
            "4-bit groups only: choose 8da4w, or fp32"
        )


Written = tuple[dict[str, Any], dict[str, Any]]  # delegation reports by method, meta


def _write_buffer(
    path: Path,
    config: ModelConfig,
    primitives: ExecutorchPrimitives,
    backend: str,
    max_context: int,
    widths: Sequence[int],
    hidden_layers: Sequence[int],
) -> Written:
    limit = max(2, *widths) if widths else min(WIDEST, max_context)  # a range of one width is none
    lowering = Lowering(config, max_context, limit)
    (pieces,) = build_pieces(config, primitives, [lowering])
    module = BufferProgram(config, pieces, max_context, hidden_layers)
    S, R = (torch.export.Dim(name, min=1, max=limit) for name in ("width", "picked"))
    width, rows = min(5, limit), min(3, limit)
    arguments = (
        torch.zeros(1, width, dtype=torch.int64),
        torch.arange(width),
        torch.arange(width),
        torch.arange(rows),
        [torch.zeros(1, 1, width, max_context) for _ in module.masks],
    )
    shapes = ({1: S}, {0: S}, {0: S}, {0: R}, [{2: S} for _ in module.masks])
    program = trace(module.eval(), arguments, shapes)
    left = write_program(to_edge({"forward": program}, "portable"), path, buffers=True)
    names = ["tokens", "slots", "positions", "rows", *(f"mask_{name}" for name in module.masks)]
    outputs = ["logits", *(f"hidden_{layer}" for layer in hidden_layers)]
    meta = graph_meta(config, "split", max_context, range(1, limit + 1), hidden_layers)
    cache = [f"{part}_{layer}" for layer in range(config.num_layers) for part in ("keys", "values")]
    meta |= {
        "profile": "buffer",
        "methods": {"forward": {"inputs": names, "outputs": outputs}},
        "cache": cache,
    }
    return {"forward": dict(lowering.report) | left["forward"]}, meta


def _write_split(
    path: Path,
    config: ModelConfig,
    primitives: ExecutorchPrimitives,
    backend: str,
    max_context: int,
    widths: Sequence[int],
    hidden_layers: Sequence[int],
) -> Written:
    widths, kinds = sorted(set(widths)), sorted(set(config.layer_types))
    masks = sorted(set(mask_kinds(config, max_context).values()))
    kv = [f"{part}_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]
    inputs = ["tokens", *(f"{name}_{kind}" for kind in kinds for name in ("cos", "sin"))]
    inputs += [f"mask_{name}" for name in masks] + [f"past_{name}" for name in kv]
    outputs = ["logits", *(f"hidden_{layer}" for layer in hidden_layers), *(f"present_{name}" for name in kv)]
    lowerings: list[Lowering] = []
    modules: Sequence[nn.Module]
    if backend == "xnnpack":
        lowerings = [Lowering(config, max_context + width, width, static=True) for width in widths]
        pieces = build_pieces(config, primitives, lowerings)
        modules = [PieceProgram(config, part, max_context, hidden_layers) for part in pieces]
    else:
        modules = [SplitProgram(config, primitives, max_context, hidden_layers)] * len(widths)
    programs = {}
    for width, module in zip(widths, modules, strict=True):
        arguments = (
            torch.zeros(1, width, dtype=torch.int64),  # a quantized table's kernel aborts over other integers
            [torch.zeros(1, 1, width, rotary_size(config) // 2) for _ in range(2 * len(kinds))],
            [torch.zeros(1, 1, width, max_context + width) for _ in masks],
            [torch.zeros(1, config.num_kv_heads, max_context, config.head_dim) for _ in kv],
        )
        programs[f"forward_w{width}"] = trace(module.eval(), arguments)
    report = lower(programs, "portable" if lowerings else backend, path)
    for name, lowering in zip(programs, lowerings, strict=False):
        report[name] |= lowering.report
    meta = graph_meta(config, "split", max_context, sorted(set(widths)), hidden_layers)
    names = {"inputs": inputs, "outputs": outputs}
    rope = {}
    for kind in kinds:
        frequencies, scale = rope_frequencies(config, kind, max_context)
        rope[kind] = {"inv_freq": [float(value) for value in frequencies], "scale": float(scale)}
    methods = dict.fromkeys(programs, names)
    return report, meta | {"token_dtype": "int64", "methods": methods, "rope": rope}
