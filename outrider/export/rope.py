"""Rotary position tables: cosines and sines for every position, computed in float64.

Follows Su et al. 2021 and the scalings in use: linear (Chen et al. 2023), llama3, per-frequency factors (GGUF
`rope_freqs`), YaRN (Peng et al. 2023) and LongRoPE (Ding et al. 2024). Tables are stored in float32: in half
precision a cosine is off by 0.5 at position 1500.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError
from outrider.export.config import ModelConfig

__all__ = ["rope_frequencies", "rope_tables", "rotary_size"]

Frequencies = NDArray[np.float64]
Scaled = tuple[Frequencies, float]  # frequencies and the factor on cosines and sines


def rotary_size(config: ModelConfig) -> int:
    """How many dimensions of each head are rotated."""
    return int(config.head_dim * config.partial_rotary_factor)


def rope_tables(
    config: ModelConfig, layer_type: str, max_context: int, padding: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin [max_context + padding, rotary/2] of a layer type ("full" or "sliding").

    Raises CheckpointError for a scaling that is not known.
    """
    frequencies, factor = rope_frequencies(config, layer_type, max_context)
    angles = np.arange(max_context + padding, dtype=np.float64)[:, None] * frequencies  # [M, rotary/2]
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def rope_frequencies(config: ModelConfig, layer_type: str, max_context: int) -> tuple[Frequencies, float]:
    """Radians per position [rotary/2] of a layer type, and the factor on cosines and sines.

    Raises CheckpointError for a scaling that is not known.
    """
    local = layer_type == "sliding" and config.rope_local_theta is not None
    theta = config.rope_local_theta if local else config.rope_theta
    rotary = rotary_size(config)
    base = float(theta or config.rope_theta) ** (-np.arange(0, rotary, 2, dtype=np.float64) / rotary)
    return _scaled(base, None if local else config.rope_scaling, config, max_context)


def _scaled(
    base: Frequencies, scaling: Mapping[str, Any] | None, config: ModelConfig, max_context: int
) -> Scaled:
    kind = "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in SCALINGS:
        raise CheckpointError(f"rope scaling {kind!r} is not known; known: {', '.join(sorted(SCALINGS))}")
    try:
        return SCALINGS[kind](base, scaling or {}, config, max_context)
    except KeyError as missing:
        raise CheckpointError(
            f"rope scaling {kind!r} lacks {missing}; it holds {', '.join(sorted(scaling or {}))}"
        ) from None


def _default(base: Frequencies, scaling: Mapping[str, Any], config: ModelConfig, max_context: int) -> Scaled:
    return base, 1.0


def _linear(base: Frequencies, scaling: Mapping[str, Any], config: ModelConfig, max_context: int) -> Scaled:
    return base / float(scaling["factor"]), 1.0


def _factors(base: Frequencies, scaling: Mapping[str, Any], config: ModelConfig, max_context: int) -> Scaled:
    return base / _per_frequency(scaling["factors"], base), float(scaling.get("attention_factor") or 1.0)


def _llama3(base: Frequencies, scaling: Mapping[str, Any], config: ModelConfig, max_context: int) -> Scaled:
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = original * base / (2 * math.pi)  # full turns within the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (keep + (1 - keep) / factor), 1.0


def _yarn(base: Frequencies, scaling: Mapping[str, Any], config: ModelConfig, max_context: int) -> Scaled:
    factor = float(scaling["factor"])
    original = float(scaling.get("original_max_position_embeddings") or config.max_position)
    rotary, theta = 2 * len(base), config.rope_theta

    def dimension(turns: float) -> float:
        return rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    ramp = np.clip((np.arange(len(base)) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return base * ((1 - ramp) + ramp / factor), _yarn_attention(scaling, factor)


def _yarn_attention(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(float(over)) / grown(float(under)) if over and under else grown(1.0)


def _longrope(base: Frequencies, scaling: Mapping[str, Any], config: ModelConfig, max_context: int) -> Scaled:
    original = float(scaling.get("original_max_position_embeddings") or config.max_position)
    factors = scaling["long_factor"] if max_context > original else scaling["short_factor"]
    stretch = float(scaling.get("factor") or config.max_position / original)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return base / _per_frequency(factors, base), float(attention)


def _per_frequency(factors: Any, base: Frequencies) -> Frequencies:
    values = np.asarray(factors, dtype=np.float64)
    if values.shape != base.shape:
        raise CheckpointError(f"{values.size} rope factors for {base.size} frequencies")
    return values


SCALINGS: dict[str, Callable[[Frequencies, Mapping[str, Any], ModelConfig, int], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "factors": _factors,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
