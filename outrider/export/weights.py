"""Which weights a decoder has, under one set of names, and how a stored tensor becomes one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError
from outrider.export.config import ModelConfig
from outrider.quantize.schemes import RawBlocks

__all__ = ["MAX_LAYERS", "TensorStore", "View", "apply_view", "check_shapes", "expected_shapes", "view_raw"]


MAX_LAYERS = 1024  # far above any model; a damaged count must not become a loop over billions


class TensorStore(Protocol):
    """A file or folder that holds tensors under its own names."""

    def shape(self, stored: str) -> tuple[int, ...]:
        """The shape of a stored tensor, in numpy order."""
        ...

    def tensor(self, stored: str) -> NDArray[np.float32]:
        """The float32 values of a stored tensor."""
        ...

    def raw(self, stored: str) -> RawBlocks | None:
        """The quantized bytes of a stored matrix, or None when it is stored as floating point."""
        ...

    def close(self) -> None:
        """Release the source."""
        ...


@dataclass(frozen=True)
class View:
    """How a canonical tensor is cut from a stored one.

    `rows`: a range of rows (fused matrices). `interleaved_heads`: the rows of each of this many heads are
    stored as rotated pairs (0, d/2, 1, d/2+1, ...) and must be put back into halves. `add_one`: the stored
    norm weight w means the multiplier 1 + w.
    """

    stored: str
    rows: tuple[int, int] | None = None
    interleaved_heads: int | None = None
    add_one: bool = False

    def shape(self, stored_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The canonical shape, given the stored one."""
        if self.rows is None:
            return stored_shape
        start, stop = self.rows
        return (max(0, min(stop, stored_shape[0]) - start), *stored_shape[1:])


def apply_view(view: View, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cut, reorder and shift the values of a stored tensor."""
    if view.rows is not None:
        values = values[view.rows[0] : view.rows[1]]
    if view.interleaved_heads is not None:
        values = values[half_order(len(values), view.interleaved_heads)]
    return values + np.float32(1) if view.add_one else values


def view_raw(view: View, raw: RawBlocks) -> RawBlocks:
    """The same on undecoded rows: a row is a unit in every block format."""
    data = raw.data
    if view.rows is not None:
        data = data[view.rows[0] : view.rows[1]]
    if view.interleaved_heads is not None:
        data = data[half_order(len(data), view.interleaved_heads)]
    return RawBlocks(raw.type_name, (len(data), raw.shape[1]), data)


def half_order(rows: int, heads: int) -> NDArray[np.int64]:
    """Row indices that turn interleaved pairs (0, d/2, 1, d/2+1, ...) of every head into (0, 1, ..., d-1)."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a decoder of this configuration needs, in order, with its shape."""
    D, V = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (D,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (V, D)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, F = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q, D, config.qkv_bias),
        "self_attn.k_proj": (kv, D, config.qkv_bias),
        "self_attn.v_proj": (kv, D, config.qkv_bias),
        "self_attn.o_proj": (D, q, config.output_bias),
        "mlp.gate_proj": (F, D, config.mlp_bias),
        "mlp.up_proj": (F, D, config.mlp_bias),
        "mlp.down_proj": (D, F, config.mlp_bias),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (D,) for name in norms}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def check_shapes(config: ModelConfig, views: Mapping[str, View], store: TensorStore, where: str) -> None:
    """Raise CheckpointError when a tensor is missing, left over or of another shape than expected.

    A tensor that the decoder would ignore is refused too: it would change what the model computes.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in views]
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} of {len(expected)} tensors, the first is {missing[0]}; "
            "the checkpoint is incomplete or of a variant that is not known"
        )
    for name, view in views.items():
        if name not in expected:
            raise CheckpointError(
                f"{where}: tensor {view.stored!r} has no place in a {config.family} decoder of "
                f"{config.num_layers} layers"
            )
        shape = view.shape(store.shape(view.stored))
        if shape != expected[name]:
            raise CheckpointError(
                f"{where}: {name} has shape {shape}; the configuration says {expected[name]}"
            )
