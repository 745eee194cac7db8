"""Scales of an NPU graph's activations, and where 16 bits are not enough.

Activations are uint16; the cache is int16 around zero, since a second operand of a product that is uint16 would be
computed in 8 bits by the Hexagon compiler (measured: relative error 1e-2, against 2e-4 for int16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.export.npu_graph import NpuGraph
from outrider.quantize.ranges import Range

__all__ = ["Scale", "choose_scales", "massive_slots", "size_of", "stream_scale", "top_of"]

Ranges = Mapping[str, Range]
HIDDEN = 20.0  # logits below a row's largest score at which exp is 0 in 16 bits, with room for error
COARSE = 0.01  # a step that is so much of a tensor's mean magnitude is too coarse
HALF_PEAK = 30000.0  # of calibrated values in half precision, which ends at 65,504
MARGIN = 1.05  # beyond the calibrated range, for texts that were not seen


@dataclass(frozen=True)
class Scale:
    """value = scale * (code - zero_point), codes uint16, or int16 when signed."""

    scale: float
    zero_point: int
    signed: bool = False

    def __post_init__(self) -> None:
        """Refuse what no code can express."""
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise ExportError(
                f"a scale of {self.scale} quantizes nothing; the calibration saw no finite values"
            )

    @property
    def dtype(self) -> Any:
        """The numpy type of codes."""
        return np.int16 if self.signed else np.uint16

    def encode(self, values: NDArray[np.floating]) -> NDArray[Any]:
        """Codes of float values, clipped."""
        limits = np.iinfo(self.dtype)
        codes = np.rint(np.asarray(values, np.float64) / self.scale) + self.zero_point
        clipped: NDArray[Any] = np.clip(codes, limits.min, limits.max).astype(self.dtype)
        return clipped

    @classmethod
    def of_range(cls, low: float, high: float, signed: bool = False) -> Scale:
        """The scale whose codes just cover a range and zero."""
        low, high = min(low, 0.0), max(high, 0.0)
        if signed:
            return cls(float(np.float32(max(-low, high, 1e-6) / 32767)), 0, True)
        scale = float(np.float32(max(high - low, 1e-6) / 65535))
        return cls(scale, int(np.clip(round(-low / scale), 0, 65535)))


def choose_scales(graph: NpuGraph, ranges: Ranges) -> tuple[dict[str, Scale], float]:
    """A scale for every activation, and the value that a mask adds to what must not be seen.

    `ranges` are calibrated, by tensor, and by `top_of` the input of each softmax. Scores far below every row's
    largest are clipped there, and the mask is just large enough to push any score below: a mask of -1e4 would
    take all but a few codes from the scores.
    """
    found = dict(graph.fixed)
    masked = 1.0
    for name, scores in graph.masked.items():
        high = max(MARGIN * ranges[scores].high, 0.0)
        low = MARGIN * min(ranges[top_of(name)].low, 0.0) - HIDDEN
        found[name] = (low, high)
        masked = max(masked, high - low)
    found |= {name: (-masked, 0.0) for name in graph.inputs if name.startswith("mask_")}
    found |= {name: (float(v.min()), float(v.max())) for name, v in graph.vectors.items()}
    members: dict[str, list[str]] = {}
    for name in graph.activations():
        members.setdefault(graph.root(name), []).append(name)
    scales = {}
    for names in members.values():
        parts = [found.get(name) or _wide(ranges[name]) for name in names if name in found or name in ranges]
        if not parts:
            raise ExportError(f"calibration found no range for {names[0]}")
        low, high = min(part[0] for part in parts), max(part[1] for part in parts)
        signed = any(name in graph.symmetric for name in names)
        scales.update(dict.fromkeys(names, Scale.of_range(low, high, signed)))
    return scales, -masked


def massive_slots(graph: NpuGraph, ranges: Ranges) -> list[str]:
    """The `down` products whose inputs or outputs are so far apart that 16-bit steps would drown the usual values.

    A few layers write the huge values of an attention sink into the residual stream ("massive activations", Sun et
    al. 2024): in SmolLM2-135M one of them has 24,900 where other tokens have 1.
    """
    found = []
    for slot in (part.slot for part in graph.weights.values() if part.slot.endswith(".down")):
        tensors = (slot, f"{slot.removesuffix('down')}gated")
        steps = [(ranges[name].high - ranges[name].low) / 65535 for name in tensors]
        usual = [ranges[size_of(name)].low for name in tensors]
        if any(step > COARSE * size for step, size in zip(steps, usual, strict=True)):
            found.append(slot)
    return found


def stream_scale(graph: NpuGraph, ranges: Ranges) -> float:
    """A power of two that brings the residual stream into half precision, 1 where it already fits.

    Gemma's residual streams reach beyond 65,504, the largest number of half precision.
    """
    stream = [node.output for node in graph.nodes if node.operator == "Add" and node.output in graph.floating]
    peak = max(max(-ranges[name].low, ranges[name].high) for name in stream)
    return 1.0 if peak < HALF_PEAK else float(2.0 ** -np.ceil(np.log2(peak / HALF_PEAK)))


def size_of(name: str) -> str:
    """The tensor of a float graph that holds the mean magnitude of another."""
    return f"{name}.size"


def _wide(found: Range) -> tuple[float, float]:
    return MARGIN * found.low, MARGIN * found.high


def top_of(masked: str) -> str:
    """The tensor of a float graph that holds the largest value of each row of a softmax's input."""
    return f"{masked}.top"
