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
from torch import Tensor, nn

from outrider.errors import MissingExtraError, UsageError
from outrider.export.config import ModelConfig
from outrider.export.decoder import Decoder, Step
from outrider.export.executorch_lower import BACKENDS, lower, quiet, vendor_partitioner
from outrider.export.executorch_parts import ExecutorchPrimitives
from outrider.export.lowered import Lowered
from outrider.export.onnx import check_request, graph_meta, mask_kinds
from outrider.export.rope import rope_tables, rotary_size
from outrider.export.slots import SlotWeights
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
    stats: Mapping[str, NDArray[np.float32]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Lowered:
    """Write `place`/model.pte and say what became of every slot and operator.

    `widths`: of a `split` program, one method each; the largest limits the tokens of a `buffer` forward
    (64 if empty). `meta["methods"]` names the inputs and outputs of every method in order;
    `meta["widths"]` lists the widths that run; `notes["delegation"]` holds the reports of `lower`.
    `stats` are mean squares of the inputs [K] by slot, which weigh the errors of 4-bit scales.
    Raises UsageError for what cannot be exported, ExportError for a vendor backend without its SDK, when a
    recipe changed nothing or integer products were left outside the delegate.
    """
    _check(config, backend, profile, max_context, widths, hidden_layers)
    place.mkdir(parents=True, exist_ok=True)
    path = place / "model.pte"
    with quiet(), torch.no_grad():
        try:
            import torchao  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("torchao", "executorch") from error
        primitives = ExecutorchPrimitives(
            weights, recipe, max_context if profile == "buffer" else None, stats, progress
        )
        if profile == "buffer":
            programs, meta = _buffer_program(config, primitives, max_context, widths, hidden_layers)
        else:
            programs, meta = _split_programs(config, primitives, max_context, widths, hidden_layers)
        report = lower(programs, backend, path, buffers=profile == "buffer")
    for method in report.values():
        taken = {"delegated": method["products"], "left": method["float_products"]}
        if backend == "xnnpack":
            check_quantized(recipe, primitives.slots, primitives.products, taken)
    return Lowered(
        files=(path,),
        meta=meta | {"delegate": backend},
        slots=tuple(primitives.slots),
        functions={name.removeprefix("forward_w"): name for name in programs} if profile == "split" else {},
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
    if profile == "buffer" and backend == "vulkan":
        raise UsageError("the Vulkan delegate cannot update buffers in place; use the split profile")
    if profile == "buffer" and any(not 1 <= width <= max_context for width in widths):
        raise UsageError(f"widths are {tuple(widths)}; a buffer graph takes widths of 1 to {max_context}")
    check_request(
        config, "split", max_context, widths or ((1,) if profile == "buffer" else ()), hidden_layers
    )


class BufferProgram(nn.Module):
    """The decoder with flat inputs, over caches of its own."""

    def __init__(
        self,
        config: ModelConfig,
        primitives: ExecutorchPrimitives,
        max_context: int,
        hidden_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.kinds = mask_kinds(config, max_context)
        self.masks = sorted(set(self.kinds.values()))
        self.decoder = Decoder(config, primitives, hidden_layers)
        for kind in sorted(self.kinds):
            for name, table in zip(("cos", "sin"), whole_tables(config, kind, max_context), strict=True):
                self.register_buffer(f"{name}_{kind}", table)

    def forward(
        self, tokens: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, masks: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Logits [1, R, V] and hidden states [1, S, D]."""
        rope = {kind: self.rope(kind, positions) for kind in sorted(self.kinds)}
        flat = {name: mask.squeeze(0) for name, mask in zip(self.masks, masks, strict=True)}  # [1, S, M]
        step = Step(rope, {kind: flat[name] for kind, name in self.kinds.items()}, [], {"slots": slots})
        logits, hidden = self.decoder(tokens, rows, step)
        return (logits, *hidden)

    def rope(self, kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [S, 1, d] of these positions."""
        cos, sin = getattr(self, f"cos_{kind}"), getattr(self, f"sin_{kind}")
        return cos.index_select(0, positions).unsqueeze(1), sin.index_select(0, positions).unsqueeze(1)


def whole_tables(config: ModelConfig, kind: str, max_context: int) -> tuple[Tensor, Tensor]:
    """cos and sin [M, 1, d] over every dimension of a head: both halves, then 1 and 0 for those that stay."""
    cos, sin = (torch.from_numpy(table) for table in rope_tables(config, kind, max_context))
    rest = torch.zeros(max_context, config.head_dim - rotary_size(config))
    return torch.cat([cos, cos, rest + 1], dim=1), torch.cat([sin, sin, rest], dim=1)


def _buffer_program(
    config: ModelConfig,
    primitives: ExecutorchPrimitives,
    max_context: int,
    widths: Sequence[int],
    hidden_layers: Sequence[int],
) -> tuple[dict[str, Any], dict[str, Any]]:
    module = BufferProgram(config, primitives, max_context, hidden_layers).eval()
    widest = max(widths) if widths else min(WIDEST, max_context)
    S, R = (torch.export.Dim(name, min=1, max=widest) for name in ("width", "picked"))
    width, rows = min(5, widest), min(3, widest)
    arguments = (
        torch.zeros(1, width, dtype=torch.int64),
        torch.arange(width),
        torch.arange(width),
        torch.arange(rows),
        [torch.zeros(1, 1, width, max_context) for _ in module.masks],
    )
    shapes = ({1: S}, {0: S}, {0: S}, {0: R}, [{2: S} for _ in module.masks])
    names = ["tokens", "slots", "positions", "rows", *(f"mask_{name}" for name in module.masks)]
    outputs = ["logits", *(f"hidden_{layer}" for layer in hidden_layers)]
    meta = graph_meta(config, "split", max_context, range(1, widest + 1), hidden_layers)
    meta |= {"profile": "buffer", "methods": {"forward": {"inputs": names, "outputs": outputs}}}
    return {"forward": _trace(module, arguments, shapes)}, meta


def _trace(module: nn.Module, arguments: tuple[Any, ...], shapes: Any) -> Any:
    program = torch.export.export(
        module,
        arguments,
        dynamic_shapes=shapes,
        strict=False,
        # Reshapes ask whether min(64, 128 S) S == 64 S, which holds for every S, but is not simplified.
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    for node in list(program.graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target):
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    return program


class SplitProgram(nn.Module):
    """The decoder with flat inputs, over caches that come in and new rows that go out."""

    def __init__(
        self,
        config: ModelConfig,
        primitives: ExecutorchPrimitives,
        max_context: int,
        hidden_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.kinds = mask_kinds(config, max_context)
        self.masks = sorted(set(self.kinds.values()))
        self.decoder = Decoder(config, primitives, hidden_layers)

    def forward(
        self, tokens: Tensor, tables: list[Tensor], masks: list[Tensor], past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Logits [1, W, V], hidden states [1, W, D], then new keys and values [1, G, W, d] of every layer."""
        pairs = zip(tables[::2], tables[1::2], strict=True)
        rope = dict(zip(sorted(self.kinds), pairs, strict=True))
        named = dict(zip(self.masks, masks, strict=True))
        mask = {kind: named[name] for kind, name in self.kinds.items()}
        step = Step(rope, mask, list(zip(past[::2], past[1::2], strict=True)))
        logits, hidden = self.decoder(tokens, None, step)
        return (logits, *hidden, *(tensor for pair in step.present for tensor in pair))


def _split_programs(
    config: ModelConfig,
    primitives: ExecutorchPrimitives,
    max_context: int,
    widths: Sequence[int],
    hidden_layers: Sequence[int],
) -> tuple[dict[str, Any], dict[str, Any]]:
    module = SplitProgram(config, primitives, max_context, hidden_layers).eval()
    kinds = sorted(module.kinds)
    kv = [f"{part}_{layer}" for layer in range(config.num_layers) for part in ("key", "value")]
    inputs = ["tokens", *(f"{name}_{kind}" for kind in kinds for name in ("cos", "sin"))]
    inputs += [f"mask_{name}" for name in module.masks] + [f"past_{name}" for name in kv]
    outputs = ["logits", *(f"hidden_{layer}" for layer in hidden_layers), *(f"present_{name}" for name in kv)]
    programs = {}
    for width in sorted(set(widths)):
        arguments = (
            torch.zeros(1, width, dtype=torch.int32),
            [torch.zeros(1, 1, width, rotary_size(config) // 2) for _ in range(2 * len(kinds))],
            [torch.zeros(1, 1, width, max_context + width) for _ in module.masks],
            [torch.zeros(1, config.num_kv_heads, max_context, config.head_dim) for _ in kv],
        )
        programs[f"forward_w{width}"] = torch.export.export(module, arguments, strict=False)
    meta = graph_meta(config, "split", max_context, sorted(set(widths)), hidden_layers)
    names = {"inputs": inputs, "outputs": outputs}
    return programs, meta | {"token_dtype": "int32", "methods": dict.fromkeys(programs, names)}
