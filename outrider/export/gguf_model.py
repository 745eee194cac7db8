"""What a GGUF file's metadata and tensor names say about the model: its configuration and weight map.

GGUF names architectures and tensors in its own way, permutes the q and k rows of llama models (pairs of
rotated elements interleaved instead of split in halves), stores Gemma's norms as effective multipliers and
keeps RoPE factors as a tensor. This module undoes all of it, as llama.cpp's converter documents it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outrider.errors import CheckpointError
from outrider.export.config import ModelConfig
from outrider.export.gguf import GgufFile
from outrider.export.weights import MAX_LAYERS, View

__all__ = ["ARCHITECTURES", "config_from_gguf", "weight_map_from_gguf"]

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
}
"""GGUF architecture -> model family."""

PERMUTED = ("llama",)  # architectures whose q and k rows are stored interleaved
SLIDING_PATTERN = {"gemma2": 2, "gemma3": 6}  # every n-th layer is full where the file does not say
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # these scale attention by hidden/heads, not by head_dim

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class _Keys:
    """Metadata of one architecture: `keys("rope.freq_base")` reads `llama.rope.freq_base`."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file, self.arch = file, arch

    def __call__(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self(key, default)
        if isinstance(value, list) and value and value == [value[0]] * len(value):
            value = value[0]  # some writers list one equal value per layer
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self.file.path.name}: metadata {self.arch}.{key} is {value!r}; "
                "a positive integer is needed"
            )
        return value


def architecture(file: GgufFile) -> str:
    """The file's architecture. Raises CheckpointError, listing the known ones, for any other."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file.path.name} holds architecture {arch!r}; known: {known}")
    return str(arch)


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The model's configuration. Raises CheckpointError when it is unknown or contradicts the tensors."""
    arch = architecture(file)
    _refuse_variants(file, arch)
    keys = _Keys(file, arch)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path.name} has no token_embd.weight matrix; it is no whole model")
    hidden, heads, layers = (
        keys.integer(key) for key in ("embedding_length", "attention.head_count", "block_count")
    )
    if layers > MAX_LAYERS:
        raise CheckpointError(f"{file.path.name}: block_count is {layers}; at most {MAX_LAYERS} are read")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    rotary = keys.integer("rope.dimension_count", head_dim)
    gemma = arch.startswith("gemma")
    return ModelConfig(
        family=ARCHITECTURES[arch],
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=keys.integer("feed_forward_length"),
        max_position=keys.integer("context_length"),
        norm_eps=float(keys("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(keys("rope.freq_base", 1e6 if arch == "gemma3" else 10000.0)),
        rope_scaling=_rope_scaling(file, keys),
        rope_local_theta=float(keys("rope.freq_base_swa", 10000.0)) if arch == "gemma3" else None,
        partial_rotary_factor=rotary / head_dim,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sandwich_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        activation="gelu_tanh" if gemma else "silu",
        attention_scale=_attention_scale(keys, hidden, heads, layers),
        attention_softcap=keys("attn_logit_softcapping", 50.0 if arch == "gemma2" else None),
        logit_softcap=keys("final_logit_softcapping", 30.0 if arch == "gemma2" else None),
        **_sliding(keys, layers),
    )


def _refuse_variants(file: GgufFile, arch: str) -> None:
    """Mixtures of experts, split files and repeated layouts share names with what is known but are not."""
    if file.metadata.get(f"{arch}.expert_count", 0):
        raise CheckpointError(f"{file.path.name} is a mixture of experts, which Outrider does not export")
    parts = file.metadata.get("split.count", 0)
    if parts > 1:
        raise CheckpointError(
            f"{file.path.name} is one of {parts} parts; join them with llama.cpp's gguf-split --merge first"
        )


def _attention_scale(keys: _Keys, hidden: int, heads: int, layers: int) -> float | None:
    stored = keys("attention.scale")
    if stored:
        return float(stored)
    if LAYERS_OF_27B.get(keys.arch) == layers:
        return float((hidden / heads) ** -0.5)
    return None


def _sliding(keys: _Keys, layers: int) -> dict[str, Any]:
    """`sliding_window` and `layer_types`; a pattern is a period or one truth value per layer."""
    window = keys("attention.sliding_window")
    if not window:
        return {"sliding_window": None, "layer_types": ("full",) * layers}
    pattern = keys("attention.sliding_window_pattern", SLIDING_PATTERN.get(keys.arch, 0))
    if isinstance(pattern, list):
        sliding = [bool(value) for value in pattern]
    else:
        sliding = [pattern == 0 or (layer + 1) % pattern != 0 for layer in range(layers)]
    return {
        "sliding_window": int(window),
        "layer_types": tuple("sliding" if value else "full" for value in sliding),
    }


def _rope_scaling(file: GgufFile, keys: _Keys) -> Mapping[str, Any] | None:
    """Frequency factors where the file stores them as tensors, else `rope.scaling.*` in the hub's terms."""
    original = keys("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": file.tensor("rope_factors_long.weight").tolist(),
            "short_factor": file.tensor("rope_factors_short.weight").tolist(),
            "original_max_position_embeddings": original or keys.integer("context_length"),
        }
        if keys("rope.scaling.attn_factor"):
            scaling["attention_factor"] = float(keys("rope.scaling.attn_factor"))
        return scaling
    if "rope_freqs.weight" in file.tensors:
        return {"rope_type": "factors", "factors": file.tensor("rope_freqs.weight").tolist()}
    kind, factor = keys("rope.scaling.type", "none"), keys("rope.scaling.factor", keys("rope.scale_linear"))
    if kind == "none" and factor in (None, 0.0, 1.0):
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": float(factor)} if factor else None
    if kind == "yarn" and factor and original:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise CheckpointError(f"{file.path.name}: rope.scaling.type {kind!r} with factor {factor!r} is not known")


def weight_map_from_gguf(file: GgufFile, config: ModelConfig) -> dict[str, View]:
    """Canonical name -> where it lies in the file. Raises CheckpointError for tensors nobody can place."""
    arch = architecture(file)
    views: dict[str, View] = {}
    for name, tensor in file.tensors.items():
        if name in _ROPE_TENSORS:
            continue
        matched = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if name in _TOP_NAMES:
            views[_TOP_NAMES[name]] = View(name)
        elif matched:
            layer, slot, kind = matched.groups()
            views.update(_layer_views(arch, config, name, f"model.layers.{layer}.", slot, kind))
        else:
            raise CheckpointError(f"{file.path.name}: tensor {name!r} {tensor.shape} is unknown in {arch}")
    return views


def _layer_views(
    arch: str, config: ModelConfig, stored: str, prefix: str, slot: str, kind: str
) -> dict[str, View]:
    """The canonical tensors that one stored tensor of a layer holds (several when it is fused)."""
    q, kv, ff = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
    )
    if slot == "attn_qkv":
        cuts = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
        return {f"{prefix}self_attn.{name}.{kind}": View(stored, rows=cut) for name, cut in cuts.items()}
    if slot == "ffn_up" and arch == "phi3":
        return {
            f"{prefix}mlp.gate_proj.{kind}": View(stored, rows=(0, ff)),
            f"{prefix}mlp.up_proj.{kind}": View(stored, rows=(ff, 2 * ff)),
        }
    if slot == "ffn_norm":
        norm = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
        return {f"{prefix}{norm}.{kind}": View(stored)}
    if slot not in _LAYER_NAMES:
        raise CheckpointError(f"tensor {stored!r} is unknown in architecture {arch}")
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(slot)
    interleaved = heads if arch in PERMUTED else None
    return {f"{prefix}{_LAYER_NAMES[slot]}.{kind}": View(stored, interleaved_heads=interleaved)}
