"""What a model's forwards move, compute and draw: from its manifest and a device's profile, before any was run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.contracts import Energy
from outrider.errors import UsageError
from outrider.manifest import GraphEntry
from outrider.targets.device import Device
from outrider.targets.physics import Work, dynamic_power, roofline_time

__all__ = ["DRAFT_COST", "TARGET_COST", "ModelCost", "model_cost", "nominal_energy", "resident_mb"]

WIDTHS = range(1, 17)  # of verify forwards that a prior is given for


@dataclass(frozen=True)
class ModelCost:
    """What a forward of a model moves and computes.

    Every forward streams `weight_bytes`, and `kv_bytes` for every position that it sees; a token takes `ops`
    (2 a weight).
    """

    weight_bytes: float
    ops: float
    kv_bytes: float = 0.0
    resident_mb: float = 0.0

    def work(self, width: int, length: int = 0) -> Work:
        """A forward of `width` tokens behind `length`."""
        return Work(self.weight_bytes + self.kv_bytes * (length + width), self.ops * width)


TARGET_COST = ModelCost(1.220e9, 3.09e9, 57_344, 1483)
"""Qwen2.5-Coder-1.5B as `outrider export` packs it (int4, 8-bit head, float32 cache): bytes of its graph."""
DRAFT_COST = ModelCost(0.505e9, 0.99e9, 24_576, 658)
"""The same of Qwen2.5-Coder-0.5B."""

KV_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of a number in a KV cache."""
_BITS = {"int4": 4.5, "int8": 8.5, "fp16": 16.0, "fp32": 32.0, "carry": 5.0}
"""Bits a weight with its scales, by how a recipe's name begins; `carry` as in common 4-bit GGUF files."""


def model_cost(entry: GraphEntry) -> ModelCost:
    """The cost of a bundle's graph, from its manifest alone.

    Embedding rows are gathered, not streamed: they take memory, but no time. A manifest that does not say how
    many bytes they are counts all as streamed (up to a quarter too many), and its weights are bytes by the
    bits of the recipe. Raises UsageError for a recipe without a known size.
    """
    nbytes, apart = float(sum(_data_files(entry).values())), _table_bytes(entry)
    streamed = nbytes - max(entry.gathered_bytes - apart, 0)
    weights = float(entry.weights) if entry.weights is not None else 8.0 * streamed / _bits(entry.recipe)
    kv_bytes = 2.0 * entry.kv.layers * entry.kv.heads * entry.kv.head_dim * KV_BYTES.get(entry.kv.dtype, 4)
    return ModelCost(streamed, 2.0 * weights, kv_bytes, resident_mb(entry))


def resident_mb(entry: GraphEntry) -> float:
    """MB of a graph's weights in memory, its table of embeddings on the host included; whatever its recipe."""
    return (sum(_data_files(entry).values()) + _table_bytes(entry)) / 1e6


def _table_bytes(entry: GraphEntry) -> int:
    return entry.files[entry.embedding_file].bytes if entry.embedding_file is not None else 0


def _data_files(entry: GraphEntry) -> dict[str, int]:
    """The files that hold weights, and their bytes; the host's table of embeddings is not among them."""
    others = (entry.embedding_file, entry.vocab_map)
    known = {n: f.bytes for n, f in entry.files.items() if n not in others and not n.endswith("probe.npz")}
    reference = entry.options.get("reference", {}).get("file", "\0")  # stands in for it on computers
    known = {n: size for n, size in known.items() if not n.endswith(reference)}
    by_kind = (
        {n: size for n, size in known.items() if n.endswith(".data")} if entry.unit == "npu" else {},
        {n: size for n, size in known.items() if ".onnx" in n},
    )
    return next((files for files in by_kind if files), known)


def _bits(recipe: str) -> float:
    named = next((bits for name, bits in _BITS.items() if recipe.startswith(name)), None)
    if named is None:
        raise UsageError(f"no weight size is known for the recipe {recipe!r}; known: {', '.join(_BITS)}")
    return named


def nominal_energy(
    device: Device,
    target: ModelCost,
    drafts: Mapping[str, ModelCost | None],
    unit: str | None = None,
    draft_unit: str | None = None,
    length: int = 256,
) -> Energy:
    """Joules of rounds as the device's profile has them, at the full clock behind `length` tokens.

    A prior: the specimen at hand differs. A draft without a cost takes nothing.
    """

    def joules(cost: ModelCost, width: int, on: str | None) -> float:
        work, rates = cost.work(width, length), device.rates(on)
        seconds = roofline_time(work, rates, 1.0, 1.0, 1.0)
        return float(seconds * dynamic_power(work, seconds, rates, 1.0))

    return Energy(
        float(device.static_w),
        {width: joules(target, width, unit) for width in WIDTHS},
        {name: 0.0 if cost is None else joules(cost, 1, draft_unit) for name, cost in drafts.items()},
        float(device.idle_w),
    )
