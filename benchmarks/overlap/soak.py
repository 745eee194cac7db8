"""Randomized overlapped rounds with injected faults: no deadlock, no thread left, no wrong token.

    python -m benchmarks.overlap.soak [--rounds 10000] [--seed 0] [--seconds S]

Every text is decoded serially first, on graphs that are never late and never fail; the overlapped one must then be
the same, token by token, however late or broken its units are, or end where it was ended. `fake` graphs notice every
wrong commit, position or mask. Half of the texts draft behind corrections too, without looking at the time; in most of
them the draft's window slides. A watchdog prints all stacks and ends the process when a text takes a minute.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from outrider.contracts import Output, Plan, Proposal, Sampling
from outrider.errors import BackendError
from outrider.power.governor import Directive
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.planner import Planner
from outrider.runtime.rounds import Engine, Request, Round
from outrider.targets.fake import FakeGraph, blend_logits, random_logits

__all__ = ["FAULTS", "Faulty", "Report", "Unhurried", "soak"]

VOCAB = 13
STUCK_S = 60
Fault = Literal[
    "none",
    "slow draft",
    "slow target",
    "slow both",
    "failing draft",
    "failing target",
    "interrupted target",
    "cancellation",
    "reset",
    "another text",
    "an exception thrown in",
    "abandoned",
    "memory pressure",
    "a draft that cannot return",
    "forbidden overlap",
]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]


class Faulty(FakeGraph):
    """A fake graph that is late by up to `late_s` a forward, and raises `error` in the forward number `fails_at`.

    It refuses to be entered by two threads at once.
    """

    def __init__(
        self,
        *args: Any,
        late_s: float = 0.0,
        fails_at: int | None = None,
        error: type[BaseException] = BackendError,
        rng: np.random.Generator | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.late_s, self.fails_at, self.error = late_s, fails_at, error
        self.entered_twice = False
        self._delays = rng or np.random.default_rng(0)
        self._calls = 0
        self._busy = threading.Lock()

    def forward(self, *args: Any, **options: Any) -> Output:
        """Run, late or not at all."""
        if not self._busy.acquire(blocking=False):
            self.entered_twice = True
            raise AssertionError("two threads are in one graph")
        try:
            if self.late_s:
                time.sleep(float(self._delays.random()) * self.late_s)
            self._calls += 1
            if self._calls == self.fails_at:
                raise self.error("injected")
            return super().forward(*args, **options)
        finally:
            self._busy.release()


class Whims:
    """A governor that takes the draft model away, or forbids to overlap, at random."""

    def __init__(self, rng: np.random.Generator, fault: Fault) -> None:
        self._rng, self._fault = rng, fault

    def directive(self, costs: object) -> Directive:
        """The next whim."""
        whim = bool(self._rng.random() < 0.3)
        if self._fault in ("memory pressure", "a draft that cannot return"):
            return Directive(draft_loaded=not whim)
        return Directive(overlap=not whim)

    def energy(self, verify_s: object) -> None:
        """Nothing is known."""

    def observe(self, *what: object) -> None:
        """Nothing is learned."""

    def poll(self) -> None:
        """Nothing is read."""


class Unhurried(Planner):
    """Lets every overlapped round draft behind a correction too, however long that takes."""

    def with_mode(self, plan: Plan, *rest: Any, **more: Any) -> Plan:
        """The plan, with all the time that there is beside its verify."""
        return replace(super().with_mode(plan, *rest, **more), beside_s=float("inf"))


class Counting(ModelDrafter):
    """Counts how often its window slid, and how often it was released and came back, unless it `must_stay` away."""

    slid = released = returned = 0
    must_stay = False

    def propose(self, *args: Any) -> Proposal:
        """The proposal, which may have moved the window."""
        start = self._start
        proposal = super().propose(*args)
        self.slid += self._start > start
        return proposal

    def release(self) -> None:
        """Give the memory back."""
        super().release()
        self.released += 1

    def restore(self) -> None:
        """Load it again, if that can be."""
        away = not self.loaded
        super().restore()
        self.returned += away and self.loaded


@dataclass
class Report:
    """What a soak went through: rounds, those that overlapped, texts by fault, and what was wrong."""

    rounds: int = 0
    overlapped: int = 0
    held: int = 0
    corrections: int = 0
    corrections_held: int = 0
    window_slides: int = 0
    draft_releases: int = 0
    draft_returns: int = 0
    wasted_steps: int = 0
    texts: Counter[str] = field(default_factory=Counter)
    ended_early: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class _Case:
    """One text and the fault that befalls it."""

    seed: int
    fault: Fault
    prompt: tuple[int, ...]
    request: Request
    quality: float
    min_confidence: float
    draft_context: int
    target_context: int
    late_s: float
    unhurried: bool
    at: int  # when the fault happens: a forward or a round


def _case(seed: int, late_s: float) -> _Case:
    rng = np.random.default_rng(seed)
    temperature = float(rng.choice([0.0, 0.0, 0.8]))
    sampling = Sampling(
        temperature=temperature,
        seed=seed,
        mode="reject" if rng.random() < 0.4 else "match",
        repetition_penalty=float(rng.choice([1.0, 1.3])),
    )
    tokens = int(rng.integers(20, 120))
    stop = frozenset({int(rng.integers(VOCAB))}) if rng.random() < 0.3 else frozenset[int]()
    request = Request(sampling, tokens, stop, int(rng.integers(1, 6)), "model", drafting="overlapped")
    return _Case(
        seed=seed,
        fault=FAULTS[seed % len(FAULTS)],
        prompt=tuple(int(token) for token in rng.integers(0, VOCAB, int(rng.integers(1, 12)))),
        request=request,
        quality=float(rng.choice([0.0, 0.1, 0.3, 1.0])),
        min_confidence=float(rng.choice([0.0, 0.2])),
        draft_context=int(rng.choice([8, 24, 256])),
        target_context=int(rng.choice([40, 256])),
        late_s=late_s,
        unhurried=bool(rng.random() < 0.5),
        at=int(rng.integers(1, 25)),
    )


def _engine(case: _Case, faults: bool) -> Engine:
    """The case's pair; without `faults` on sound and punctual units."""
    logits = random_logits(VOCAB, seed=case.seed % 7, order=3)
    other = random_logits(VOCAB, seed=100 + case.seed % 5)
    fault, late = case.fault if faults else "none", case.late_s
    rng = np.random.default_rng(case.seed)
    target = Faulty(
        VOCAB,
        case.target_context,
        logits=logits,
        late_s=late if fault in ("slow target", "slow both") else 0.0,
        fails_at=case.at if fault in ("failing target", "interrupted target") else None,
        error=KeyboardInterrupt if fault == "interrupted target" else BackendError,
        rng=rng,
    )
    options: dict[str, Any] = {
        "logits": blend_logits(logits, other, case.quality),
        "late_s": late if fault in ("slow draft", "slow both") else 0.0,
        "rng": np.random.default_rng(case.seed + 1),
    }
    fails_at = case.at if fault == "failing draft" else None
    draft = Faulty(VOCAB, case.draft_context, fails_at=fails_at, **options)

    def reopen() -> Faulty:
        if model.must_stay:
            raise MemoryError("injected")
        return Faulty(VOCAB, case.draft_context, **options)

    model = Counting(draft, min_confidence=case.min_confidence, reopen=reopen)
    model.must_stay = fault == "a draft that cannot return"
    governed = fault in ("memory pressure", "a draft that cannot return", "forbidden overlap")
    pacer: Any = Whims(rng, fault) if governed else None
    planner = Unhurried() if case.unhurried else None
    return Engine(target, {"model": model, "lookup": LookupDrafter()}, planner, pacer=pacer)


def _go_wrong(case: _Case, engine: Engine, parts: list[Round]) -> str | None:
    """Decode until the end or the fault; says what ended it early. `parts` get the rounds as they come."""
    rounds = engine.decode(case.prompt, case.request)
    try:
        for part in rounds:
            parts.append(part)
            if len(parts) < case.at:
                continue
            if case.fault == "cancellation":
                rounds.close()
                return "cancelled"
            if case.fault == "abandoned":
                return "cancelled"  # nobody holds the iterator any longer
            if case.fault == "an exception thrown in":
                rounds.throw(BackendError("injected"))
            if case.fault == "reset":
                engine.reset()
                return "reset"
            if case.fault == "another text":
                list(engine.decode(case.prompt[:1], replace(case.request, max_new_tokens=5)))
                return "another text"
    except (BackendError, KeyboardInterrupt) as error:
        if str(error) != "injected":
            raise
        return type(error).__name__
    return None


def _text(parts: Sequence[Round]) -> list[int]:
    return [token for part in parts for token in part.tokens]


def _check(case: _Case, report: Report) -> None:
    """Decode one case, and note whatever is not as it must be."""
    sampling = case.request.sampling
    # what is drafted where is not as in the serial run
    changing = case.fault in ("memory pressure", "a draft that cannot return", "failing draft")
    if changing and sampling.mode == "reject":
        case = replace(case, request=replace(case.request, sampling=replace(sampling, mode="match")))
    expected = _text(list(_engine(case, False).decode(case.prompt, replace(case.request, drafting="serial"))))
    engine, parts = _engine(case, True), list[Round]()
    ended = _go_wrong(case, engine, parts)
    got = _text(parts)
    wrong = []
    if got != (expected if ended is None else expected[: len(got)]):
        wrong.append(f"wrong text {got} for {expected}")
    if _left():
        wrong.append("a thread is left")
    wrong += _caches(case, engine, got, ended)
    # After whatever happened, the same engine decodes the text rightly.
    engine.target.fails_at = None  # type: ignore[attr-defined]
    drafter = engine.drafters["model"]
    assert isinstance(drafter, Counting)
    drafter.must_stay = False
    drafter.restore()
    drafter.graph.fails_at = None  # type: ignore[attr-defined]
    if sampling.mode == "reject":
        engine.reset()  # that text depends on where rounds begin, and so on what of the prompt is cached
    again = _text(list(engine.decode(case.prompt, case.request)))
    if again != expected:
        wrong.append(f"wrong text afterwards {again} for {expected}")
    wrong += _caches(case, engine, again, None)
    report.window_slides += drafter.slid
    report.draft_releases += drafter.released
    report.draft_returns += drafter.returned
    report.wrong += [f"case {case.seed} ({case.fault}): {what}" for what in wrong]
    report.texts[case.fault] += 1
    if ended is not None:
        report.ended_early[case.fault] += 1
    if parts:
        stats = parts[-1].stats
        report.rounds += stats.rounds
        report.overlapped += stats.overlapped_rounds
        report.held += stats.guesses_held
        report.corrections += stats.corrections
        report.corrections_held += stats.corrections_held
        report.wasted_steps += stats.wasted_steps


def _left() -> bool:
    return any(thread.name == "outrider-draft" for thread in threading.enumerate())


def _caches(case: _Case, engine: Engine, text: list[int], ended: str | None) -> list[str]:
    """What is not consistent about the two caches."""
    wrong = []
    target, drafter = engine.target, engine.drafters["model"]
    assert isinstance(target, Faulty)
    assert isinstance(drafter, ModelDrafter)
    whole = [*case.prompt, *text]
    if list(engine.cached) != target.tokens:
        wrong.append("the engine's record of the target's cache is wrong")
    if ended in (None, "cancelled") and target.tokens != whole[: len(whole) - 1]:
        wrong.append("the target's cache is not the committed text")
    if drafter.loaded and isinstance(drafter.graph, Faulty):
        places = [place for _, place in drafter.graph.kv]
        if places != list(range(len(places))):
            wrong.append(f"draft positions alias: {places}")
        if drafter.graph.entered_twice:
            wrong.append("two threads were in the draft's graph")
    if target.entered_twice:
        wrong.append("two threads were in the target's graph")
    return wrong


def soak(rounds: int, seed: int = 0, late_s: float = 0.0005, seconds: float = float("inf")) -> Report:
    """Decode texts until so many rounds have overlapped, or so much time has passed."""
    report, begin = Report(), time.perf_counter()
    quiet = logging.getLogger("outrider")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # every injected failure of a draft is worth a warning elsewhere
    try:
        case = seed
        while report.overlapped < rounds and time.perf_counter() - begin < seconds:
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
            _check(_case(case, late_s), report)
            case += 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        quiet.setLevel(level)
    report.seconds = time.perf_counter() - begin
    return report


def main() -> None:
    """Soak, print the report, and fail where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000, help="overlapped rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument(
        "--late-ms", type=float, default=0.5, help="how late a slow unit is at most, a forward"
    )
    given = parser.parse_args()
    report = soak(given.rounds, given.seed, given.late_ms / 1e3, given.seconds)
    print(json.dumps({**vars(report), "wrong": report.wrong[:20]}, indent=2))
    if report.wrong:
        raise SystemExit(f"{len(report.wrong)} things were wrong")


if __name__ == "__main__":
    main()
