"""The real engine on a simulated device over a synthetic acceptance trace, shared by tests."""

from __future__ import annotations

import random
from collections.abc import Iterable

from outrider.runtime.rounds import Engine, Request
from outrider.targets.device import load_device
from outrider.targets.model_cost import DRAFT_COST, TARGET_COST
from outrider.targets.physics import Work
from outrider.targets.simulated import Machine, SimulatedGraph
from outrider.targets.trace_model import (
    Stage,
    TraceDrafter,
    TraceRun,
    TraceTarget,
    TraceText,
    cycle,
)

PI = "raspberry-pi-5"
PHONE = "snapdragon-8-gen3"
STEP = Work(1e9, 3e9)


def machine(slug: str = PI, **options: object) -> Machine:
    return Machine(load_device(slug), **{"jitter": 0.0, **options})  # type: ignore[arg-type]


def run_of(right: Iterable[bool], kind: bool = False) -> TraceRun:
    """A drafter that always drafts 15 tokens, of which those before the first wrong one count."""
    hits = list(right)
    drafted = [min(15, len(hits) - i) for i in range(len(hits))]
    accepted = [next((j for j in range(n) if not hits[i + j]), n) for i, n in enumerate(drafted)]
    kinds = tuple("4" if i % 3 else None for i in range(len(hits))) if kind else None
    return TraceRun(tuple(drafted), tuple(accepted), kinds)


def texts_of(category: str, rate: float, count: int = 4, tokens: int = 96, seed: int = 0) -> list[TraceText]:
    rng = random.Random(seed)
    return [
        TraceText(
            category,
            60 + 10 * i,
            tokens,
            {
                "model": run_of([rng.random() < rate for _ in range(tokens)]),
                "lookup": run_of([rng.random() < rate / 2 for _ in range(tokens)], kind=True),
            },
        )
        for i in range(count)
    ]


TEXTS = texts_of("prose", 0.45) + texts_of("code", 0.7, seed=1) + texts_of("edit", 0.92, seed=2)


class Rig:
    """The real engine over a simulated device and a trace."""

    def __init__(self, slug: str = PI, texts: list[TraceText] = TEXTS, **options: object) -> None:
        self.machine = machine(slug, **options)
        self.stage, self.texts, self.tokens = Stage(), texts, 0
        drafters = {
            "lookup": TraceDrafter("lookup", self.stage),
            "model": TraceDrafter("model", self.stage, self.machine, DRAFT_COST),
        }
        target = SimulatedGraph(TraceTarget(self.stage), self.machine, TARGET_COST)
        self.engine = Engine(target, drafters, clock=self.machine.clock)

    def decode(self, text: TraceText, **request: object) -> list[int]:
        prompt = self.stage.begin(text)
        wanted = Request(max_new_tokens=text.tokens, **request)  # type: ignore[arg-type]
        out = [token for round_ in self.engine.decode(prompt, wanted) for token in round_.tokens]
        self.tokens += len(out)
        return out

    def decode_for(self, seconds: float, category: str | None = None, **request: object) -> None:
        source = cycle(self.texts, category)
        while self.machine.elapsed_s < seconds:
            self.decode(next(source), **request)
