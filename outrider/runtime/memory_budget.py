"""What a bundle will take in memory, before any of it is opened, and the largest plan that there is room for.

All MB are 10^6 bytes of resident memory. A plan counts the process itself, its tokenizer, and of each role weights,
the KV cache at its context and scratch; `peak_mb` is the most that is held for a moment while a role is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from outrider.errors import UsageError
from outrider.manifest import GraphEntry
from outrider.power.tuning import Tuning
from outrider.runtime.backends import held_context
from outrider.targets.graph_meta import reading_description
from outrider.targets.model_cost import KV_BYTES, resident_mb

__all__ = [
    "CHUNK",
    "CODE_MB",
    "LEAST_CONTEXT",
    "PROCESS_MB",
    "SESSION_MB",
    "TOKENIZER_BYTES",
    "MemoryLimit",
    "MemoryPlan",
    "RoleMemory",
    "Room",
    "available_here",
    "choose_memory",
    "held_mb",
    "logits_mb",
    "room_here",
]

PROCESS_MB = 85.0
"""Python with ONNX Runtime's code and a small tokenizer, as measured on x86 Linux (resident, a bundle of 1 MB)."""
CODE_MB = 34.0
"""The part of it that a process which has imported the libraries does not hold before they have run."""
TOKENIZER_BYTES = 950.0
"""An entry of a tokenizer's vocabulary: what SmolLM2-135M (49k entries) and Qwen2.5-Coder-1.5B (152k) take beyond
weights, cache and process, 50 and 137 MB on the same machine."""
LEAST_CONTEXT = 256  # tokens; a model that remembers less is of little use
WIDEST_VERIFY = 16  # tokens of the widest verify forward
CHUNK = 512  # tokens of a prompt that are run at once, where the graph does not say
SHORT_CHUNK = 128  # the same where memory is short: prompts take little longer
SESSION_MB = 15.0  # of a second session, beyond its weights (measured); that of the first is in PROCESS_MB
PROMPT_FLOATS = 10
"""Floats for each row of a gate or up projection that a token of a prompt takes: SmolLM2-135M 10.2 (1,536 rows),
Qwen2.5-Coder-1.5B 9.9 (8,960 rows), 0.5B 7.6 (4,864 rows), measured after a prompt in chunks of 512."""


@dataclass(frozen=True)
class MemoryLimit:
    """MB that a plan may take, and what says so."""

    mb: float
    how: str

    def __post_init__(self) -> None:
        """Refuse what is no amount of memory."""
        if not 0.0 < self.mb < 1e12:
            raise UsageError(f"memory_limit is {self.mb:g}; it must be above 0 MB and finite")


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
class MemoryPlan:
    """What is opened and what it takes; `notes` say what is smaller than it could be, so that it fits.

    `chunk` is the most tokens of a prompt that are run at once.
    """

    process_mb: float
    tokenizer_mb: float
    target: RoleMemory
    draft: RoleMemory | None
    chunk: int = CHUNK
    notes: tuple[str, ...] = ()

    @property
    def without_draft_mb(self) -> float:
        """All but the draft model, at its full context."""
        return self.process_mb + self.tokenizer_mb + self.target.memory_mb

    @property
    def steady_mb(self) -> float:
        """All of it, at the full contexts."""
        return self.without_draft_mb + (self.draft.memory_mb if self.draft else 0.0)

    @property
    def peak_mb(self) -> float:
        """The most at any time. The target is opened first; the draft again later, beside a full cache."""
        alone_mb = self.process_mb + self.tokenizer_mb + self.target.weights_mb + self.target.loading_mb
        if self.draft is None:
            return max(alone_mb, self.steady_mb)
        opening_mb = self.without_draft_mb + self.draft.weights_mb + self.draft.loading_mb
        return max(alone_mb, opening_mb, self.steady_mb)

    def __str__(self) -> str:
        """One line."""
        draft = "no draft model" if self.draft is None else f"draft {self.draft}"
        return (
            f"{self.peak_mb:.0f} MB at most: process {self.process_mb:.0f}, tokenizer {self.tokenizer_mb:.0f}, "
            f"target {self.target}, {draft}"
        )


@dataclass(frozen=True)
class Room:
    """What a plan must fit into: a limit on all that the process holds, and what is free beyond `held_mb`."""

    held_mb: float
    limit: MemoryLimit | None
    free: MemoryLimit | None

    def what_refuses(self, plan: MemoryPlan) -> str | None:
        """What the plan exceeds; None where it fits. A draft that would be released at once does not fit."""
        if self.limit is not None and plan.peak_mb > self.limit.mb:
            return f"{self.limit.mb:.0f} MB {self.limit.how}"
        reserve_mb = Tuning().memory_reserve_mb if plan.draft is not None else 0.0
        if self.free is not None and plan.peak_mb - self.held_mb + reserve_mb > self.free.mb:
            return (
                f"{self.free.mb:.0f} MB {self.free.how}, beside {self.held_mb:.0f} MB that it holds already"
            )
        return None


def choose_memory(
    graphs: Mapping[str, GraphEntry], wishes: Mapping[str, int | None], room: Room
) -> MemoryPlan:
    """The largest plan that fits: prompts in shorter chunks, the draft's context halved, no draft, the target's halved.

    `graphs` are those that will be opened, by role; `wishes` the contexts that were asked for, which are kept.

    Raises UsageError where none fits, with the smallest plan that would work.
    """
    asked = _plan(graphs, wishes, room)
    too_large = room.what_refuses(asked)
    if too_large is None:
        return asked
    smallest = asked
    for plan in _smaller(graphs, wishes, room):
        if room.what_refuses(plan) is None:
            return replace(plan, notes=_notes(asked, plan, too_large))
        smallest = plan
    raise UsageError(
        f"this bundle does not fit into the {room.what_refuses(smallest)}. The smallest plan that would work: "
        f"{smallest}{_hint(wishes)}"
    )


def _smaller(
    graphs: Mapping[str, GraphEntry], wishes: Mapping[str, int | None], room: Room
) -> Iterator[MemoryPlan]:
    """Plans in the order in which they are tried, without the one that was asked for; the last is the smallest."""
    yield _plan(graphs, wishes, room, SHORT_CHUNK)
    alone = {"target": graphs["target"]}
    if "draft" in graphs:
        if wishes.get("draft") is None:
            for context in _halves(held_context(graphs["draft"], wishes.get("target"))):
                yield _plan(graphs, {**wishes, "draft": context}, room, SHORT_CHUNK)
        yield _plan(alone, wishes, room)
        yield _plan(alone, wishes, room, SHORT_CHUNK)
    if wishes.get("target") is None:
        for context in _halves(graphs["target"].max_context):
            yield _plan(alone, {"target": context}, room, SHORT_CHUNK)


def _halves(context: int) -> Iterator[int]:
    while context // 2 >= LEAST_CONTEXT:
        context //= 2
        yield context


def _plan(
    graphs: Mapping[str, GraphEntry], wishes: Mapping[str, int | None], room: Room, chunk: int = CHUNK
) -> MemoryPlan:
    target, draft = graphs["target"], graphs.get("draft")
    longest = wishes.get("target")
    return MemoryPlan(
        max(PROCESS_MB, room.held_mb + CODE_MB),
        1e-6 * TOKENIZER_BYTES * target.vocab_size,
        _of_role("target", target, longest, chunk),
        None if draft is None else _of_role("draft", draft, _least(wishes.get("draft"), longest), chunk),
        chunk,
    )


def _least(*contexts: int | None) -> int | None:
    return min((context for context in contexts if context is not None), default=None)


def _of_role(role: str, graph: GraphEntry, wanted: int | None, chunk: int) -> RoleMemory:
    cached = held_context(graph, wanted)
    context = min(wanted or cached, graph.max_context)
    kv = graph.kv
    row = 2 * kv.layers * kv.heads * kv.head_dim * KV_BYTES.get(kv.dtype, 4)
    scratch = logits_mb(role, graph.vocab_size) + _prompt_mb(graph, min(chunk, context))
    scratch += SESSION_MB if role == "draft" else 0.0
    return RoleMemory(context, _weights_mb(graph), 1e-6 * row * cached, scratch, _loading_mb(graph))


def _weights_mb(graph: GraphEntry) -> float:
    """The weights, or the context binaries of one device that an NPU loads in their place, whichever are more.

    An embedding that shares its bytes with the head is there twice: the head packed, the table as rows are looked up.
    """
    compiled: dict[str, int] = {}
    for name, file in graph.files.items():
        if graph.unit == "npu" and name.endswith(".bin"):
            folder = str(PurePosixPath(name).parent)
            compiled[folder] = compiled.get(folder, 0) + file.bytes
    tied = graph.weights is not None and not graph.gathered_bytes  # where the manifest tells
    return max(resident_mb(graph) + tied * _loading_mb(graph), 1e-6 * max(compiled.values(), default=0))


def logits_mb(role: str, vocab_size: int) -> float:
    """The float32 logits of the widest verify forward, or of a draft's step and its catch-up."""
    return 4e-6 * (WIDEST_VERIFY if role == "target" else 2) * vocab_size


def _prompt_mb(graph: GraphEntry, chunk: int) -> float:
    """What ONNX Runtime keeps for activations after a chunk of a prompt; attention is tiled and takes little more."""
    if graph.backend != "onnxruntime" or graph.unit != "cpu":
        return 0.0
    if graph.profile != "inplace":
        chunk = CHUNK  # static widths stay what they are
    return 4e-6 * min(graph.prefill_width or CHUNK, chunk) * PROMPT_FLOATS * _gate_rows(graph)


def _gate_rows(graph: GraphEntry) -> float:
    """Rows of a gate projection, from the number of weights; with as many query rows as hidden values."""
    hidden, kv = _hidden_size(graph), graph.kv
    if graph.weights is None or not hidden:
        return 6.0 * hidden
    layer = (graph.weights - graph.vocab_size * hidden) / kv.layers
    attention = 2 * hidden * (hidden + kv.heads * kv.head_dim)
    return max((layer - attention) / (3 * hidden), hidden)


def _loading_mb(graph: GraphEntry) -> float:
    """ONNX Runtime packs one matrix after the other beside its original: the largest, the head, is there twice."""
    if graph.backend != "onnxruntime" or graph.unit != "cpu":
        return 0.0
    bytes_each = next((size for name, size in _HEAD_BYTES.items() if graph.recipe.startswith(name)), 1)
    return 1e-6 * bytes_each * graph.vocab_size * _hidden_size(graph)


def _hidden_size(graph: GraphEntry) -> int:
    """What the manifest says of it; 0 where it says nothing."""
    with reading_description():
        return int(graph.options.get("hidden_size", 0))


_HEAD_BYTES = {"fp32": 4, "fp16": 2}
"""Of a weight of the head, by how a recipe's name begins; 1 for all that quantize."""


def _notes(asked: MemoryPlan, plan: MemoryPlan, too_large: str) -> tuple[str, ...]:
    """What is smaller in a plan than was asked for, and why."""
    why = f"all of it would take {asked.peak_mb:.0f} of the {too_large}"
    found = []
    if asked.draft is not None and plan.draft is None:
        found.append(f"the draft model is left out, n-gram lookup still drafts: {why}")
    elif asked.draft is not None and plan.draft is not None and plan.draft.context < asked.draft.context:
        found.append(f"the draft remembers {plan.draft.context} of {asked.draft.context} tokens: {why}")
    elif plan.chunk < asked.chunk:
        found.append(f"prompts are read {plan.chunk} tokens at a time: {why}")
    if plan.target.context < asked.target.context:
        found.append(f"the context is {plan.target.context} of {asked.target.context} tokens: {why}")
    return tuple(found)


def _hint(wishes: Mapping[str, int | None]) -> str:
    longest = wishes.get("target")
    if longest is not None and longest > LEAST_CONTEXT:
        return f"; a max_context below {longest} would take less"
    return "; free memory, raise the limit, or export with fewer bits or a shorter context"


def room_here(limit_mb: float | None) -> Room:
    """The room of this process now, under the user's limit if there is one."""
    limit = None if limit_mb is None else MemoryLimit(limit_mb, "of the memory limit")
    return Room(held_mb(), limit, available_here())


def held_mb() -> float:
    """Resident memory of this process in MB; 0 where the system does not tell (all but Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1e-6 * pages * os.sysconf("SC_PAGE_SIZE")


def available_here() -> MemoryLimit | None:
    """The lesser of what this machine and the cgroups of this process have left now; None where neither is known."""
    from outrider.power.sensors.memory import Memory
    from outrider.power.sensors.system import System

    sensors = Memory.find(System())
    readings = [reading for sensor in sensors for reading in sensor.read()]
    for sensor in sensors:
        getattr(sensor, "close", lambda: None)()
    free = {r.source: r.value for r in readings if r.quantity == "memory_available" and r.value is not None}
    if not free:
        return None
    tightest = min(free, key=lambda source: free[source])
    what = "cgroup of this process has left" if tightest == "memory:cgroup" else "machine has free"
    return MemoryLimit(max(free[tightest], 1e-6), f"that the {what} now")
