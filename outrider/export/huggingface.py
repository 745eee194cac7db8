"""What a Hugging Face `config.json` and its tensor names say about the model.

The configuration classes of transformers fill in what a file leaves out; the defaults that matter are the
tables below, taken from transformers 4.57.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.errors import CheckpointError
from outrider.export.config import ModelConfig
from outrider.export.weights import MAX_LAYERS, View

__all__ = ["MODEL_TYPES", "config_from_json", "weight_map_from_names"]

MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "phi3": "phi3",
}
"""`model_type` of config.json -> model family."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "attention_bias": True},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gemma2": {
        **_GEMMA,
        "num_key_value_heads": 4,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    "gemma3": {
        **_GEMMA,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
}


class _Config:
    """A config.json with the family's defaults behind it."""

    def __init__(self, data: Mapping[str, Any], family: str, where: str) -> None:
        self.data, self.family, self.where = data, family, where

    def __call__(self, key: str, default: Any = None) -> Any:
        if key in self.data:
            return self.data[key]
        return _DEFAULTS.get(self.family, {}).get(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self(key, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.where}: {key} is {value!r}; a positive integer is needed")
        return value

    def number(self, key: str, default: float) -> float:
        value = self(key, default)
        if not isinstance(value, int | float):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; a number is needed")
        return float(value)


def config_from_json(data: Mapping[str, Any], where: str) -> ModelConfig:
    """The model's configuration. Raises CheckpointError, listing the known types, for an unknown one."""
    family = MODEL_TYPES.get(str(data.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"{where}: model_type is {data.get('model_type')!r}; known: {', '.join(MODEL_TYPES)}"
        )
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{where} is quantized already ({method}); give the float checkpoint or a GGUF file"
        )
    config = _Config(_text_part(data), family, where)
    if config("use_bidirectional_attention"):
        raise CheckpointError(f"{where} attends in both directions; it is no decoder")
    gemma = family.startswith("gemma")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if config.integer("num_hidden_layers") > MAX_LAYERS:
        raise CheckpointError(f"{where}: num_hidden_layers is above {MAX_LAYERS}")
    bias = bool(config("attention_bias", False))
    scaling, theta, local_theta = _rope(config)
    return ModelConfig(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // heads),
        intermediate_size=config.integer("intermediate_size"),
        max_position=config.integer("max_position_embeddings", 32768),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_local_theta=local_theta,
        partial_rotary_factor=config.number("partial_rotary_factor", 1.0),
        tie_embeddings=bool(config("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else bias,
        output_bias=False if family == "qwen2" else bias,
        mlp_bias=bool(config("mlp_bias", False)),
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        activation=_activation(config),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5 if gemma else None,
        attention_softcap=config("attn_logit_softcapping"),
        logit_softcap=config("final_logit_softcapping"),
        **_sliding(config),
    )


def _text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration."""
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        return data
    tied = {"tie_word_embeddings": data["tie_word_embeddings"]} if "tie_word_embeddings" in data else {}
    return {**tied, **text}


def _activation(config: _Config) -> Any:
    name = config("hidden_activation") or config("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{config.where}: activation {name!r} is not known; known: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _sliding(config: _Config) -> dict[str, Any]:
    """`sliding_window` and `layer_types` from an explicit list, a period, or Qwen's first full layers."""
    layers, window = config.integer("num_hidden_layers"), config("sliding_window")
    full = {"sliding_window": None, "layer_types": ("full",) * layers}
    if not window or (config.family.startswith("qwen") and not config("use_sliding_window", False)):
        return full
    listed = config("layer_types")
    if listed is not None:
        kinds = {"sliding_attention": "sliding", "full_attention": "full"}
        if not set(listed) <= set(kinds):
            raise CheckpointError(
                f"{config.where}: layer_types are {sorted(set(listed))}; known: {list(kinds)}"
            )
        types = tuple(kinds[kind] for kind in listed)
    elif config.family.startswith("qwen"):
        first = config("max_window_layers", 28)
        types = tuple("sliding" if layer >= first else "full" for layer in range(layers))
    else:
        period = config("sliding_window_pattern", config("_sliding_window_pattern", 0))
        types = tuple(
            "full" if period and (layer + 1) % period == 0 else "sliding" for layer in range(layers)
        )
    return full if "sliding" not in types else {"sliding_window": int(window), "layer_types": types}


def _rope(config: _Config) -> tuple[Mapping[str, Any] | None, float, float | None]:
    """Scaling, theta and Gemma 3's local theta, from the keys of transformers 4 or the table of version 5."""
    table = config("rope_parameters") or {}
    main = table.get("full_attention", table)
    local = table.get("sliding_attention", {})
    theta = float(main.get("rope_theta", config.number("rope_theta", 10000.0)))
    local_theta = None
    if config.family == "gemma3":
        local_theta = float(local.get("rope_theta", config.number("rope_local_base_freq", 1e4)))
    scaling = dict(config("rope_scaling") or main)
    kind = scaling.pop("type", None) or scaling.get("rope_type")
    scaling.pop("rope_theta", None)
    if kind in (None, "default"):
        return None, theta, local_theta
    kind = "longrope" if kind in ("su", "longrope") else kind
    scaling["rope_type"] = kind
    original = config("original_max_position_embeddings")
    if kind in ("longrope", "yarn") and original:
        scaling.setdefault("original_max_position_embeddings", original)
    return scaling, theta, local_theta


_NORMS = re.compile(r"(norm|layernorm)\.weight$")
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)(vision_tower|multi_modal_projector|audio_tower)\.|\.masked_bias$"
)


def weight_map_from_names(names: Iterable[str], config: ModelConfig) -> dict[str, View]:
    """Canonical name -> stored tensor, with Phi-3's fused matrices cut and Gemma's norms shifted."""
    views: dict[str, View] = {}
    for stored in names:
        name = stored
        for prefix, replacement in _PREFIXES:
            if stored.startswith(prefix):
                name = replacement + stored[len(prefix) :]
        if _IGNORED.search(name) or (config.tie_embeddings and name == "lm_head.weight"):
            continue
        views.update(_views(name, stored, config))
    return views


def _views(name: str, stored: str, config: ModelConfig) -> dict[str, View]:
    if ".qkv_proj." in name:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        cuts = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
        return {name.replace("qkv_proj", part): View(stored, rows=rows) for part, rows in cuts.items()}
    if ".gate_up_proj." in name:
        F = config.intermediate_size
        halves = {"gate_proj": (0, F), "up_proj": (F, 2 * F)}
        return {name.replace("gate_up_proj", part): View(stored, rows=rows) for part, rows in halves.items()}
    shifted = config.family.startswith("gemma") and bool(_NORMS.search(name))
    return {name: View(stored, add_one=shifted)}
