"""What a bundle will take in memory, before any of it is opened, and the largest plan that there is room for.

All MB are 10^6 bytes of resident memory. A plan counts the process itself, its tokenizer, and of each role weights,
the KV cache at its context and scratch; `peak_mb` is the most that is held for a moment while a role is opened.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.errors import UsageError
from outrider.manifest import GraphEntry
from outrider.power.tuning import Tuning
from outrider.records import is_real
from outrider.runtime.backends import held_context
from outrider.runtime.role_memory import CHUNK, LEAST_CONTEXT, SHORT_CHUNK, RoleMemory, halves, role_memory

__all__ = [
    "CODE_MB",
    "PROCESS_MB",
    "MemoryLimit",
    "MemoryPlan",
    "Room",
    "asked_limit",
    "available_here",
    "choose_memory",
    "held_mb",
    "room_here",
    "tokenizer_mb",
]

PROCESS_MB = 85.0
"""Python with ONNX Runtime's code and a small tokenizer, as measured on x86 Linux (resident, a bundle of 1 MB)."""
CODE_MB = 34.0
"""The part of it that a process which has imported the libraries does not hold before they have run."""
TOKENIZER_BYTES = 950.0
"""An entry of a tokenizer's vocabulary: what SmolLM2-135M (49k entries) and Qwen2.5-Coder-1.5B (152k) take beyond
weights, cache and process, 50 and 137 MB on the same machine."""


@dataclass(frozen=True)
class MemoryLimit:
    """MB that a plan may take, and what says so.

    Of it a draft model must leave `reserve_mb`: the governor would release one that does not, as soon as it is full.
    """

    mb: float
    how: str
    reserve_mb: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no amount of memory."""
        if not (is_real(self.mb) and 0.0 < self.mb < 1e12):
            raise UsageError(f"memory_limit is {self.mb!r}; it must be a number of MB, above 0 and finite")

    def what_refuses(self, plan: MemoryPlan, held_mb: float = 0.0) -> str | None:
        """What a plan exceeds, of which the process holds `held_mb` already; None where it fits."""
        beside = f", beside {held_mb:.0f} MB that it holds already" if held_mb else ""
        if plan.peak_mb - held_mb > self.mb:
            return f"{self.mb:.0f} MB {self.how}{beside}"
        if plan.draft is not None and plan.steady_mb - held_mb + self.reserve_mb > self.mb:
            return f"{self.mb:.0f} MB {self.how}{beside}, of which a draft model must leave {self.reserve_mb:.0f} MB"
        return None


def asked_limit(mb: float, how: str) -> MemoryLimit:
    """A limit that the user sets to all that the process holds."""
    limit = MemoryLimit(mb, how)
    return replace(limit, reserve_mb=Tuning().limit_share * limit.mb)


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
        """What the plan exceeds; None where it fits."""
        limits = ((self.limit, 0.0), (self.free, self.held_mb))
        why = (limit.what_refuses(plan, held_mb) for limit, held_mb in limits if limit is not None)
        return next((reason for reason in why if reason is not None), None)


def choose_memory(
    graphs: Mapping[str, GraphEntry], wishes: Mapping[str, int | None], room: Room
) -> MemoryPlan:
    """The largest plan that fits: prompts in shorter chunks, the draft's context halved, no draft, the target's halved.

    `graphs` are those that will be opened, by role; `wishes` the contexts that were asked for, which are kept.

    Raises UsageError where none fits, with the smallest plan that would work.
    """
    asked = smallest = _plan(graphs, wishes, room, CHUNK)
    too_large = room.what_refuses(asked)
    if too_large is None:
        return asked
    for opened, contexts in _cuts(graphs, wishes):
        for chunk in (CHUNK, SHORT_CHUNK):
            smallest = _plan(opened, contexts, room, chunk)
            if room.what_refuses(smallest) is None:
                return replace(smallest, notes=_notes(asked, smallest, too_large))
    raise UsageError(
        f"this bundle does not fit into the {room.what_refuses(smallest)}. The smallest plan that would work: "
        f"{smallest}{_hint(wishes)}"
    )


def _cuts(
    graphs: Mapping[str, GraphEntry], wishes: Mapping[str, int | None]
) -> Iterator[tuple[Mapping[str, GraphEntry], Mapping[str, int | None]]]:
    """What is opened and with which contexts, in the order in which it is tried; the last takes least."""
    yield graphs, wishes
    alone = {"target": graphs["target"]}
    if "draft" in graphs:
        if wishes.get("draft") is None:
            for context in halves(held_context(graphs["draft"], wishes.get("target"))):
                yield graphs, {**wishes, "draft": context}
        yield alone, wishes
    if wishes.get("target") is None:
        for context in halves(graphs["target"].max_context):
            yield alone, {"target": context}


def _plan(
    graphs: Mapping[str, GraphEntry], wishes: Mapping[str, int | None], room: Room, chunk: int
) -> MemoryPlan:
    target, draft = graphs["target"], graphs.get("draft")
    longest = wishes.get("target")
    return MemoryPlan(
        max(PROCESS_MB, room.held_mb + CODE_MB),
        tokenizer_mb(target.vocab_size),
        role_memory("target", target, longest, chunk),
        None if draft is None else role_memory("draft", draft, _least(wishes.get("draft"), longest), chunk),
        chunk,
    )


def tokenizer_mb(vocab_size: int) -> float:
    """What a tokenizer with so many entries takes."""
    return 1e-6 * TOKENIZER_BYTES * vocab_size


def _least(*contexts: int | None) -> int | None:
    return min((context for context in contexts if context is not None), default=None)


def _notes(asked: MemoryPlan, plan: MemoryPlan, too_large: str) -> tuple[str, ...]:
    """What is smaller in a plan than was asked for, and why."""
    found = []
    if asked.draft is not None and plan.draft is None:
        found.append("the draft model is left out, n-gram lookup still drafts")
    elif asked.draft is not None and plan.draft is not None and plan.draft.context < asked.draft.context:
        found.append(f"the draft remembers {plan.draft.context} of {asked.draft.context} tokens")
    if plan.target.context < asked.target.context:
        found.append(f"the context is {plan.target.context} of {asked.target.context} tokens")
    if plan.chunk < asked.chunk:
        found.append(f"prompts are read {plan.chunk} tokens at a time")
    return tuple(f"{note}: all of it would take {asked.peak_mb:.0f} of the {too_large}" for note in found)


def _hint(wishes: Mapping[str, int | None]) -> str:
    longest = wishes.get("target")
    if longest is not None and longest > LEAST_CONTEXT:
        return f"; a max_context below {longest} would take less"
    return "; free memory, raise the limit, or export with fewer bits or a shorter context"


def room_here(limit_mb: float | None) -> Room:
    """The room of this process now, under the user's limit if there is one."""
    limit = None if limit_mb is None else asked_limit(limit_mb, "of the memory limit")
    return Room(held_mb(), limit, available_here())


def held_mb() -> float:
    """Resident memory of this process in MB; 0 where the system does not tell (all but Linux and macOS)."""
    if sys.platform == "darwin":
        return _held_on_macos()
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1e-6 * pages * os.sysconf("SC_PAGE_SIZE")


def _held_on_macos() -> float:
    """`resident_size` of `proc_taskinfo` (libproc.h, sys/proc_info.h: 96 bytes, the second of its 64-bit figures)."""
    figures = (ctypes.c_uint64 * 12)()
    ask = getattr(ctypes.CDLL(None), "proc_pidinfo", None)
    size = ctypes.sizeof(figures)
    told = (
        ask(os.getpid(), 4, ctypes.c_uint64(0), figures, size) if ask is not None else 0
    )  # PROC_PIDTASKINFO
    return 1e-6 * figures[1] if told == size else 0.0


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
    how = f"that the {what} now"
    return MemoryLimit(max(free[tightest], 1e-6), how, Tuning().memory_reserve_mb)
