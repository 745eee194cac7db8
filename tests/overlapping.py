"""Engines whose draft works ahead, and what must hold of their texts and caches."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.contracts import Plan
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.planner import Planner
from outrider.runtime.rounds import Engine, Request, Round
from outrider.targets.fake import FakeGraph, VirtualClock, blend_logits, random_logits

VOCAB = 17
LOGITS = random_logits(VOCAB, seed=1, order=None)
OTHER = random_logits(VOCAB, seed=2)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    if drafting_threads():
        gc.collect()  # an iterator that was dropped in a cycle; seconds, where torch has filled the heap
    assert drafting_threads() == []


def drafting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "outrider-draft"]


def draft_logits(quality: float) -> Any:
    """1 is the target itself, 0 an unrelated model."""
    return blend_logits(LOGITS, OTHER, 1.0 - quality)


def engine(
    quality: float = 0.7,
    target: FakeGraph | None = None,
    draft: FakeGraph | None = None,
    min_confidence: float = 0.0,
    **options: Any,
) -> Engine:
    graph = target or FakeGraph(VOCAB, logits=LOGITS)
    model = ModelDrafter(
        draft or FakeGraph(VOCAB, logits=draft_logits(quality)), min_confidence=min_confidence
    )
    return Engine(graph, {"model": model, "lookup": LookupDrafter()}, **options)


class Hurried(Planner):
    """Leaves no time for corrections."""

    def with_mode(self, plan: Plan, *rest: Any, **more: Any) -> Plan:
        return replace(super().with_mode(plan, *rest, **more), beside_s=0.0)


def draft_of(made: Engine) -> FakeGraph:
    drafter = made.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    assert isinstance(drafter.graph, FakeGraph)
    return drafter.graph


def overlapped(n: int = 60, **options: Any) -> Request:
    return Request(**{"max_new_tokens": n, "k": 3, "drafter": "model", "drafting": "overlapped", **options})


def serial(request: Request) -> Request:
    return replace(request, drafting="serial")


def text(rounds: Sequence[Round] | Iterator[Round]) -> list[int]:
    return [token for part in rounds for token in part.tokens]


def shape(rounds: Iterator[Round]) -> list[tuple[Any, ...]]:
    """All of a text's rounds that must not depend on when they were drafted."""
    return [(r.tokens, r.drafted, r.evaluated, r.accepted, r.finish_reason) for r in rounds]


def refuse_inconsistent(made: Engine, committed: list[int]) -> None:
    """Both caches hold a prefix of what was committed, every position once."""
    target, draft = made.target, draft_of(made)
    assert isinstance(target, FakeGraph)
    assert list(made.cached) == target.tokens == committed[: target.length]
    for graph in (target, draft):
        assert [place for _, place in graph.kv] == list(range(graph.length))


PLAIN = text(Engine(FakeGraph(VOCAB, logits=LOGITS)).decode(PROMPT, Request(max_new_tokens=60, k=0)))


def timed(draft_s: float, verify_s: float, quality: float, **options: Any) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock()
    verify = {1: 0.6 * verify_s, 4: verify_s, 8: 2 * verify_s}
    target = FakeGraph(VOCAB, logits=LOGITS, costs_s=verify, clock=clock)
    draft = FakeGraph(VOCAB, logits=draft_logits(quality), costs_s={1: draft_s}, clock=clock)
    made = engine(target=target, draft=draft, clock=clock, timeline=clock.lanes, **options)
    return made, clock
