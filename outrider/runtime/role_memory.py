"""What one graph takes in memory: weights, cache, scratch, and what is held for a moment while it is opened.

MB are 10^6 bytes of resident memory. Everything that plans memory asks here: loading, `outrider plan` and exports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from outrider.manifest import GraphEntry
from outrider.runtime.backends import held_context
from outrider.targets.graph_meta import reading_description
from outrider.targets.model_cost import KV_BYTES, resident_mb

__all__ = [
    "CHUNK",
    "LEAST_CONTEXT",
    "SESSION_MB",
    "SHORT_CHUNK",
    "GraphShape",
    "RoleMemory",
    "halves",
    "role_memory",
    "weights_mb",
]

LEAST_CONTEXT = 256  # tokens; a model that remembers less is of little use
WIDEST_VERIFY = 16  # tokens of the widest verify forward
CHUNK = 512  # tokens of a prompt that are run at once, where the graph does not say
SHORT_CHUNK = 128  # the same where memory is short: prompts take little longer
SESSION_MB = 15.0  # of a second session, beyond its weights (measured); that of the first is the process's
PROMPT_FLOATS = 10
"""Floats for each row of a gate or up projection that a token of a prompt takes: SmolLM2-135M 10.2 (1,536 rows),
Qwen2.5-Coder-1.5B 9.9 (8,960 rows), 0.5B 7.6 (4,864 rows), measured after a prompt in chunks of 512."""
_HEAD_BYTES = {"fp32": 4, "fp16": 2}
"""Of a weight of the head, by how a recipe's name begins; 1 for all that quantize."""


@dataclass(frozen=True)
class RoleMemory:
    """MB of one role with a context in tokens; `loading_mb` is held beyond the weights while it is opened."""

    context: int
    weights_mb: float
    kv_mb: float
    scratch_mb: float
    loading_mb: float

    @property
    def memory_mb(self) -> float:
        """What it takes once its cache is full."""
        return self.weights_mb + self.kv_mb + self.scratch_mb

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.memory_mb:.0f} MB with {self.context} tokens (weights {self.weights_mb:.0f}, "
            f"KV {self.kv_mb:.0f}, scratch {self.scratch_mb:.0f})"
        )


@dataclass(frozen=True)
class GraphShape:
    """What a graph's memory beside weights and cache depends on; `gate_rows` are a gate or up projection's."""

    role: str
    backend: str
    unit: str
    profile: str
    recipe: str
    vocab_size: int
    hidden_size: int
    gate_rows: float
    prefill_width: int | None

    @property
    def is_packed(self) -> bool:
        """Whether ONNX Runtime packs its weights and keeps its activations in this process."""
        return self.backend == "onnxruntime" and self.unit == "cpu"

    def scratch_mb(self, chunk: int) -> float:
        """What is held beside weights and cache, once prompts have been read in chunks of so many tokens."""
        session_mb = SESSION_MB if self.role == "draft" else 0.0
        return self._logits_mb() + self._prompt_mb(chunk) + session_mb

    def _logits_mb(self) -> float:
        """The float32 logits of the widest verify forward, or of a draft's step and its catch-up."""
        return 4e-6 * (WIDEST_VERIFY if self.role == "target" else 2) * self.vocab_size

    def _prompt_mb(self, chunk: int) -> float:
        """What ONNX Runtime keeps for activations after a chunk of a prompt; attention, tiled, takes little more."""
        if not self.is_packed:
            return 0.0
        if self.profile != "inplace":
            chunk = CHUNK  # static widths stay what they are
        return 4e-6 * min(self.prefill_width or CHUNK, chunk) * PROMPT_FLOATS * self.gate_rows

    @property
    def loading_mb(self) -> float:
        """ONNX Runtime packs one matrix after the other beside its original: the largest, the head, is there twice."""
        if not self.is_packed:
            return 0.0
        bytes_each = next((size for name, size in _HEAD_BYTES.items() if self.recipe.startswith(name)), 1)
        return 1e-6 * bytes_each * self.vocab_size * self.hidden_size


def role_memory(role: str, graph: GraphEntry, wanted: int | None, chunk: int) -> RoleMemory:
    """What a bundle's graph takes with the context wanted (None: all it was made for) and prompts in such chunks."""
    cached, shape = held_context(graph, wanted), _shape(role, graph)
    context = min(wanted or cached, graph.max_context)
    kv = graph.kv
    row = 2 * kv.layers * kv.heads * kv.head_dim * KV_BYTES.get(kv.dtype, 4)
    tied = graph.weights is not None and not graph.gathered_bytes  # where the manifest tells
    stored = max(weights_mb(resident_mb(graph), shape, tied), _binaries_mb(graph))
    scratch = shape.scratch_mb(min(chunk, context))
    return RoleMemory(context, stored, 1e-6 * row * cached, scratch, shape.loading_mb)


def weights_mb(stored_mb: float, shape: GraphShape, tied: bool) -> float:
    """The weights: an embedding that shares its bytes with the head is there twice.

    The head is packed, and the table mapped as rows are looked up.
    """
    return stored_mb + tied * shape.loading_mb


def _binaries_mb(graph: GraphEntry) -> float:
    """The context binaries of one device, that an NPU loads in place of the weights."""
    compiled: dict[str, int] = {}
    for name, file in graph.files.items():
        if graph.unit == "npu" and name.endswith(".bin"):
            folder = str(PurePosixPath(name).parent)
            compiled[folder] = compiled.get(folder, 0) + file.bytes
    return 1e-6 * max(compiled.values(), default=0)


def _shape(role: str, graph: GraphEntry) -> GraphShape:
    with reading_description():
        hidden = int(graph.options.get("hidden_size", 0))  # 0 where it says nothing
    return GraphShape(
        role,
        graph.backend,
        graph.unit,
        graph.profile,
        graph.recipe,
        graph.vocab_size,
        hidden,
        _gate_rows(graph, hidden),
        graph.prefill_width,
    )


def _gate_rows(graph: GraphEntry, hidden: int) -> float:
    """Rows of a gate projection, from the number of weights; with as many query rows as hidden values."""
    kv = graph.kv
    if graph.weights is None or not hidden:
        return 6.0 * hidden
    layer = (graph.weights - graph.vocab_size * hidden) / kv.layers
    attention = 2 * hidden * (hidden + kv.heads * kv.head_dim)
    return max((layer - attention) / (3 * hidden), hidden)


def halves(context: int) -> Iterator[int]:
    """Half a context, and half of that, as long as it is of use."""
    while context // 2 >= LEAST_CONTEXT:
        context //= 2
        yield context
