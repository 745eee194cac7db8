"""Lower a decoder to ONNX without its weights, then fill them in one matrix at a time.

`torch.onnx` traces the structure: every use of a weight is an `outrider::Linear`, `Embedding` or `Vector`
node that names its slot, so no float copy of the model ever exists. `bind.py` replaces these nodes by what
the recipe says.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.errors import ExportError, UsageError
from outrider.export.bind import bind
from outrider.export.config import ModelConfig
from outrider.export.decoder import Decoder, Step
from outrider.export.onnx_form import HOST, OPSET, GraphForm, add_top, drop_unread_inputs, halve
from outrider.export.onnx_parts import PADDING, PADDING_ROWS, PROFILES, Profile, SymbolicPrimitives, vector
from outrider.export.rope import rope_tables, rotary_size
from outrider.export.slots import SlotWeights, slot_shape
from outrider.quantize.report import SlotReport, check_changed
from outrider.quantize.schemes import DynamicInt8, Recipe

__all__ = ["PROFILES", "GraphReport", "export_graph", "graph_meta"]


@dataclass(frozen=True)
class GraphReport:
    """What an export wrote: graph, weights, what `targets.onnxruntime` needs to run it, every slot."""

    path: Path
    data_path: Path
    meta: Mapping[str, Any]
    slots: tuple[SlotReport, ...]
    operators: Mapping[str, int] = field(default_factory=dict)  # nodes by operator

    @property
    def files(self) -> tuple[Path, Path]:
        """The files that belong together."""
        return self.path, self.data_path

    @property
    def gathered_bytes(self) -> int:
        """Bytes of which a forward reads some rows only: of the embedding, where no head shares them."""
        sizes = {slot.slot: slot.bytes_after for slot in self.slots}
        return sizes["embedding"] if sizes["head"] else 0

    @property
    def weights(self) -> int:
        """Numbers that every token is multiplied with."""
        return sum(slot.shape[0] * slot.shape[1] for slot in self.slots if slot.slot != "embedding")


def export_graph(
    config: ModelConfig,
    weights: SlotWeights,
    recipe: Recipe,
    profile: Profile = "inplace",
    path: str | Path = "graph.onnx",
    *,
    max_context: int,
    widths: Sequence[int] = (),
    hidden_layers: Sequence[int] = (),
    stats: Mapping[str, NDArray[np.float32]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    form: GraphForm = HOST,
    said_zeros: bool = False,
) -> GraphReport:
    """Write `path` and `path`.data and say what became of every slot.

    `form` is for accelerators, and of `inplace` graphs only; `said_zeros` for processors by Arm (see `bind`). `widths`
    are the static widths of a `split` graph (any number of tokens for `inplace`). `stats` are calibration moments by
    slot, for methods that need them.
    `progress(slot, done, total)` is called after every matrix. Raises ExportError when a slot stays unbound or the
    recipe changed nothing.
    """
    check_request(config, profile, max_context, widths, hidden_layers)
    check_form(form, profile, recipe)
    path = Path(path)
    model = shaped(trace(config, profile, max_context, tuple(hidden_layers), form.chains), config, form)
    vectors = constants(config, max_context)
    slots = bind(
        model,
        path,
        weights,
        recipe,
        vectors,
        stats=stats or {},
        progress=progress,
        half=form.half,
        said_zeros=said_zeros,
    )
    check_changed(slots, recipe)
    _check(path)
    operators: dict[str, int] = {}
    for node in model.graph.node:
        operators[node.op_type] = operators.get(node.op_type, 0) + 1
    meta = {**graph_meta(config, profile, max_context, widths, hidden_layers), **form_meta(config, form)}
    return GraphReport(path, path.with_name(path.name + ".data"), meta, tuple(slots), operators)


def graph_meta(
    config: ModelConfig,
    profile: Profile,
    max_context: int,
    widths: Sequence[int] = (),
    hidden_layers: Sequence[int] = (),
) -> dict[str, Any]:
    """What a backend must know to run the graph; JSON values only."""
    kinds = mask_kinds(config, max_context)
    return {
        "profile": profile,
        "widths": sorted(widths) if profile == "split" else None,
        "max_context": max_context,
        "vocab_size": config.num_logits,
        "embedding_rows": config.vocab_size,
        "hidden_size": config.hidden_size,
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_layers": list(hidden_layers),
        "masks": sorted(set(kinds.values())),
        "sliding_window": config.sliding_window if "sliding" in kinds.values() else None,
    }


def shaped(model: Any, config: ModelConfig, form: GraphForm) -> Any:
    """A traced graph in the form of an accelerator."""
    if form.chains:
        drop_unread_inputs(model)
    if form.half:
        halve(model)
    if form.top:
        add_top(model, top_of(config, form))
    return model


def top_of(config: ModelConfig, form: GraphForm) -> int:
    """How many logits of a row are returned apart: there are no more than the row has."""
    return min(form.top, config.num_logits)


def form_meta(config: ModelConfig, form: GraphForm) -> dict[str, Any]:
    """What a backend must know about the form of a graph; nothing about the CPU's."""
    if form == HOST:
        return {}
    meta: dict[str, Any] = {"top": top_of(config, form), "chains": form.chains}
    if form.half:
        meta["dtypes"] = {"past_key_0": "float16"}
    return {**meta, "masks": [], "sliding_window": None} if form.chains else meta


def check_form(form: GraphForm, profile: str, recipe: Recipe) -> None:
    """Raise UsageError for a form that a graph cannot have."""
    if form != HOST and profile != "inplace":
        raise UsageError(f"a graph for CUDA has the profile inplace, not {profile!r}")
    schemes = [recipe.linear, recipe.head, *(scheme for _, scheme in recipe.overrides)]
    if form.half and any(isinstance(scheme, DynamicInt8) for scheme in schemes):
        raise UsageError(
            f"recipe {recipe.name!r} quantizes activations (int8-dynamic), which CUDA has no kernel for; choose int8"
        )


def mask_kinds(config: ModelConfig, max_context: int) -> dict[str, str]:
    """Which mask each layer type reads: a window that the context never fills needs none of its own."""
    window = config.sliding_window
    narrow = window is not None and window < max_context
    return {kind: "sliding" if kind == "sliding" and narrow else "full" for kind in set(config.layer_types)}


def check_request(
    config: ModelConfig,
    profile: str,
    max_context: int,
    widths: Sequence[int],
    hidden_layers: Sequence[int],
) -> None:
    """Raise UsageError for what cannot be exported."""
    if profile not in PROFILES:
        raise UsageError(f"profile is {profile!r}; known ONNX profiles: {', '.join(PROFILES)}")
    if profile == "inplace" and rotary_size(config) % 16:
        raise UsageError(
            f"{rotary_size(config)} dimensions of each head are rotated; GroupQueryAttention needs a "
            "multiple of 16: use the split profile"
        )
    if profile == "split" and (not widths or min(widths) < 1):
        raise UsageError(f"widths are {tuple(widths)}; a split graph needs at least one positive width")
    if not 2 <= max_context <= config.max_position:
        raise UsageError(
            f"max_context is {max_context}; this model has positions for 2 to {config.max_position} tokens"
        )
    wrong = [layer for layer in hidden_layers if not 0 <= layer < config.num_layers]
    if wrong:
        raise UsageError(
            f"hidden layers {wrong} do not exist; the model has layers 0..{config.num_layers - 1}"
        )


def constants(config: ModelConfig, max_context: int) -> dict[str, NDArray[np.float32]]:
    """What the graph reads beside weights: tables by position, `rope.<layer type>.cos` and `.sin`, and padding."""
    width = slot_shape(config, "layers.0.qkv")[0]
    tables = {PADDING_ROWS: np.zeros((1, PADDING, width), np.float32)}
    for kind in sorted(set(config.layer_types)):
        cos, sin = rope_tables(config, kind, max_context, PADDING)
        tables[f"rope.{kind}.cos"], tables[f"rope.{kind}.sin"] = cos, sin
    return tables


class GraphModule(nn.Module):
    """A decoder with flat inputs and outputs, as a graph has them."""

    def __init__(
        self,
        config: ModelConfig,
        profile: Profile,
        max_context: int,
        hidden_layers: tuple[int, ...],
        chains: bool,
    ) -> None:
        super().__init__()
        self.config, self.profile, self.max_context = config, profile, max_context
        self.kinds = mask_kinds(config, max_context)
        self.decoder = Decoder(
            config, SymbolicPrimitives(profile, max_context if chains else None), hidden_layers
        )

    def rope(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Whole tables for an operator that indexes them itself, else the rows of these positions."""
        shape = [self.max_context + PADDING, rotary_size(self.config) // 2]
        tables = {}
        for kind in sorted(self.kinds):
            cos, sin = (vector(f"rope.{kind}.{name}", shape) for name in ("cos", "sin"))
            if self.profile == "split":
                cos, sin = cos.index_select(0, positions[0]), sin.index_select(0, positions[0])
            tables[kind] = (cos, sin)
        return tables

    def forward(
        self,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        masks: dict[str, Tensor],
        extra: dict[str, Tensor],
        past: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Logits, hidden states, then key and value of every layer."""
        step = Step(
            rope=self.rope(positions),
            mask={kind: masks[name] for kind, name in self.kinds.items()},
            past=list(zip(past[::2], past[1::2], strict=True)),
            extra={**extra, "positions": positions},
        )
        logits, hidden = self.decoder(tokens, rows, step)
        return (logits, *hidden, *(tensor for pair in step.present for tensor in pair))


def trace(
    config: ModelConfig,
    profile: Profile,
    max_context: int,
    hidden_layers: tuple[int, ...],
    chains: bool = False,
) -> Any:
    """The ONNX model with slot nodes in place of weights; a graph of `chains` reads no masks and positions."""
    module = GraphModule(config, profile, max_context, hidden_layers, chains).eval()
    S, R, T = (torch.export.Dim(name, min=1, max=1 << 20) for name in ("width", "picked", "columns"))
    inplace, width, rows = profile == "inplace", 5, 3
    columns = max_context + 2 if inplace else max_context + width  # + 2: T must not look like max_context
    seen = width + PADDING if inplace else width
    masks = {name: torch.zeros(1, 1, seen, columns) for name in sorted(set(module.kinds.values()))}
    extra = {"seqlens_k": torch.zeros(1, dtype=torch.int32), "total": torch.zeros((), dtype=torch.int32)}
    cache = [1, config.num_kv_heads, max_context, config.head_dim]
    arguments = (
        torch.zeros(1, width, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(1, seen, dtype=torch.int64),
        masks,
        extra if inplace else {},
        [torch.zeros(1).expand(cache) for _ in range(2 * config.num_layers)],
    )
    rows_seen = S + PADDING if inplace else S
    mask_dims = {2: rows_seen, 3: T if inplace else S + max_context}
    cache_dims = {2: torch.export.Dim("context", min=2, max=1 << 20)} if inplace else {}
    shapes: tuple[Any, ...] = (
        {1: S},
        {0: R},
        {1: rows_seen},
        dict.fromkeys(masks, mask_dims),
        {name: {} for name in arguments[4]},
        [cache_dims] * (2 * config.num_layers),
    )
    model = _export(module, arguments, shapes, _names(config, module, inplace, hidden_layers))
    name_columns(model)
    return model


def _names(
    config: ModelConfig, module: GraphModule, inplace: bool, hidden_layers: tuple[int, ...]
) -> tuple[list[str], list[str]]:
    kv = [(layer, part) for layer in range(config.num_layers) for part in ("key", "value")]
    inputs = ["tokens", "rows", "positions"]
    inputs += [f"mask_{name}" for name in sorted(set(module.kinds.values()))]
    inputs += ["seqlens_k", "total"] if inplace else []
    inputs += [f"past_{part}_{layer}" for layer, part in kv]
    outputs = ["logits", *(f"hidden_{layer}" for layer in hidden_layers)]
    return inputs, outputs + [f"present_{part}_{layer}" for layer, part in kv]


def _export(
    module: nn.Module, arguments: tuple[Any, ...], shapes: Any, names: tuple[list[str], list[str]]
) -> Any:
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            module,
            arguments,
            dynamo=True,
            opset_version=OPSET,
            optimize=True,
            verbose=False,
            dynamic_shapes=shapes,
            input_names=names[0],
            output_names=names[1],
        )
    if program is None:
        raise ExportError("torch.onnx returned no program")
    return strip(program.model_proto)


def name_columns(model: Any) -> None:
    """Give the masks' last dimension one name, also where it was derived from the width."""
    for value in model.graph.input:
        if value.name.startswith("mask_"):
            value.type.tensor_type.shape.dim[3].dim_param = "columns"


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs and warns about operators that are not its own; they are the point here."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def strip(model: Any) -> Any:
    """Remove the exporter's traces: they hold source paths of the machine that ran it."""
    model.producer_name, model.doc_string = "outrider", ""
    for holder in (model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output):
        del holder.metadata_props[:]
    for node in model.graph.node:
        node.doc_string = ""
    del model.graph.value_info[:]
    return model


def _check(path: Path) -> None:
    import onnx

    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ExportError(f"{path.name} is not a valid ONNX model: {error}") from error
