"""Overlapped rounds write what serial rounds write, whatever is late or fails, and leave nothing behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.overlap.soak import FAULTS, Faulty, Unhurried, soak
from outrider.contracts import Costs, Energy, Limits, Objective, Plan, Proposal, Sampling
from outrider.errors import BackendError, UsageError
from outrider.power.governor import Directive
from outrider.runtime.corrections import Correction
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.overlap import Ahead, can_overlap
from outrider.runtime.planner import Acceptance, Modes, Observation, Planner, choose
from outrider.runtime.rounds import Engine, Request, Round
from outrider.runtime.stats import Stats
from outrider.runtime.verify import Decision
from outrider.targets.device import load_device
from outrider.targets.fake import FakeDrafter, FakeGraph, VirtualClock, blend_logits, random_logits
from outrider.targets.model_cost import ModelCost
from outrider.targets.simulated import Machine, SimulatedGraph

VOCAB = 17
LOGITS = random_logits(VOCAB, seed=1, order=None)
OTHER = random_logits(VOCAB, seed=2)
PROMPT = [3, 1, 4, 1, 5]
SPEED = Objective()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
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


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(["match", "reject"]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
)


@given(
    sampling=SAMPLINGS,
    quality=st.sampled_from([1.0, 0.9, 0.6, 0.0]),
    k=st.integers(1, 6),
    min_confidence=st.sampled_from([0.0, 0.2, 0.4]),
    window=st.sampled_from([3, 9, 30, 256]),
    context=st.sampled_from([20, 256]),
    widths=st.sampled_from([None, (1, 2, 4, 8)]),
    late=st.tuples(st.booleans(), st.booleans()),
    unhurried=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_rounds_and_text_are_those_of_serial_decoding_whatever_is_late(
    sampling: Sampling,
    quality: float,
    k: int,
    min_confidence: float,
    window: int,
    context: int,
    widths: tuple[int, ...] | None,
    late: tuple[bool, bool],
    unhurried: bool,
) -> None:
    def make(delays: tuple[bool, bool]) -> Engine:
        target_s, draft_s = (0.0005 * delay for delay in delays)
        target = Faulty(VOCAB, context, widths, logits=LOGITS, late_s=target_s)
        draft = Faulty(VOCAB, window, logits=draft_logits(quality), late_s=draft_s)
        planner = Unhurried() if unhurried else None
        return engine(target=target, draft=draft, min_confidence=min_confidence, planner=planner)

    request = overlapped(28, sampling=sampling, k=k)  # beyond the windows of 3 to 30 and the context of 20
    made = make(late)
    rounds = list(made.decode(PROMPT, request))
    assert shape(iter(rounds)) == shape(make((False, False)).decode(PROMPT, serial(request)))
    refuse_inconsistent(made, [*PROMPT, *text(rounds)])
    assert not any(graph.entered_twice for graph in (made.target, draft_of(made)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["match", "reject"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_is_ready_in_every_round(temperature: float, mode: Any) -> None:
    request = overlapped(41, sampling=Sampling(temperature=temperature, seed=5, mode=mode))
    rounds = list(engine(1.0, planner=Hurried()).decode(PROMPT, request))
    stats = rounds[-1].stats
    assert [part.ready for part in rounds] == [False, False] + [True] * (len(rounds) - 2)
    assert (
        stats.guesses == stats.guesses_held == stats.overlapped_rounds == len(rounds) - 2
    )  # not first and last
    assert stats.wasted_steps == 0
    assert stats.ahead_steps > 0


def test_a_draft_that_is_never_right_wastes_all_its_steps_ahead() -> None:
    wrong = FakeGraph(VOCAB, logits=lambda context: -LOGITS(context))
    *_, last = engine(draft=wrong, planner=Hurried()).decode(PROMPT, overlapped())
    assert last.stats.overlapped_rounds > 50
    assert last.stats.guesses == last.stats.guesses_held == last.stats.accepted == 0
    assert 0 < last.stats.wasted_steps == last.stats.ahead_steps


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 5), st.sampled_from(["match", "reject"]))
@settings(max_examples=60, deadline=None)
def test_what_was_assumed_is_proposed_as_if_it_were_drafted_now(
    seed: int, k: int, ran: int, mode: Any
) -> None:
    """Without threads: any part of the assumed work may have run, the proposal is the same, to the last bit of q."""
    sampling = Sampling(temperature=1.0, seed=seed, mode=mode)
    drafters = [ModelDrafter(FakeGraph(VOCAB, logits=LOGITS), min_confidence=0.0) for _ in range(2)]
    from outrider.runtime.context import Context

    contexts = [Context(PROMPT), Context(PROMPT)]
    first = [
        drafter.propose(context, k, sampling, np.random.default_rng(seed))
        for drafter, context in zip(drafters, contexts, strict=True)
    ]
    work = drafters[0].assume(k, np.random.default_rng(seed + 1))
    guess = next(work)
    for _ in zip(range(ran), work, strict=False):
        pass
    for context in contexts:
        context.extend([*first[0].tokens.tolist(), guess])
    for ask in (k, k + 2):
        one, two = (
            drafter.propose(context, ask, sampling, np.random.default_rng(seed + 1))
            for drafter, context in zip(drafters, contexts, strict=True)
        )
        assert one.tokens.tolist() == two.tokens.tolist()
        if one.q is None or two.q is None:
            assert one.q is two.q
        else:
            np.testing.assert_array_equal(one.q, two.q)


@given(
    seed=st.integers(0, 2**32),
    k=st.integers(1, 5),
    ran=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 1.0]),
    comes=st.sampled_from(["the correction", "all that was assumed", "something else"]),
)
@settings(max_examples=80, deadline=None)
def test_behind_a_correction_is_proposed_what_would_be_drafted_now_and_no_row_of_the_cache_aliases(
    seed: int, k: int, ran: int, temperature: float, comes: str
) -> None:
    """Without threads: any part of the work may have run, and then any of the outcomes comes."""
    from outrider.runtime.context import Context

    sampling = Sampling(temperature=temperature, seed=seed, repetition_penalty=1.2)
    graphs = [FakeGraph(VOCAB, logits=LOGITS) for _ in range(2)]
    drafters = [ModelDrafter(graph, min_confidence=0.0) for graph in graphs]
    contexts, rng = [Context(PROMPT), Context(PROMPT)], np.random.default_rng(0)

    def propose() -> list[list[int]]:
        pairs = zip(drafters, contexts, strict=True)
        return [drafter.propose(context, k, sampling, rng).tokens.tolist() for drafter, context in pairs]

    propose()
    assert list(drafters[0].correct(k)) == []  # but from now on drafts are doubted
    for context in contexts:
        context.extend([2])
    drafted, _ = propose()
    assumed = list(drafters[0].assume(k, rng))
    work = drafters[0].correct(k)
    correction = next(work)
    assert isinstance(correction, Correction)
    assert correction.token != [*drafted, assumed[0]][correction.accepted]
    for _ in zip(range(ran), work, strict=False):
        pass
    work.close()
    committed = {
        "the correction": [*drafted[: correction.accepted], correction.token],
        "all that was assumed": [*drafted, assumed[0]],
        "something else": [*drafted[:1], (correction.token + 1) % VOCAB, 3],
    }[comes]
    for context in contexts:
        context.extend(committed)
    before = len(graphs[0].forwards)
    assert drafters[0].backlog(contexts[0]) <= drafters[1].backlog(contexts[1])
    one, two = propose()
    assert one == two
    assert sum(graphs[0].forwards[before:]) <= sum(graphs[1].forwards[-k:])  # no row is run again for it
    assert graphs[0].kv == graphs[1].kv
    if comes != "something else":
        saved = min(ran, k) if comes == "the correction" else k
        assert len(graphs[0].forwards) - before == k - saved


@pytest.mark.parametrize(
    ("accepted", "token", "holds"), [(1, 7, True), (1, 8, False), (0, 7, False), (2, 7, False)]
)
def test_a_correction_holds_with_its_place_and_its_token_only(accepted: int, token: int, holds: bool) -> None:
    class Sure(ModelDrafter):
        corrects = True  # type: ignore[assignment]

        def assume(self, k: int, rng: np.random.Generator) -> Any:
            yield from [4, 5, 6]

        def correct(self, k: int) -> Any:
            yield Correction(1, 7)
            yield 9

    ahead = Ahead()
    assert ahead.start("model", Sure(FakeGraph(VOCAB, logits=LOGITS)), 0, 10, 2, beside_s=60.0)
    piece = ahead._piece
    assert piece is not None
    ahead._wait(piece, lambda: piece.finished)
    proposal = Proposal(np.array([2, 3]), np.array([-1, 0]))
    decision = Decision((*[2, 3][:accepted], token), tuple(range(accepted)), 2, (), False)
    ahead.judge(proposal, decision)
    assert ahead.ready("model", 10 - (2 - accepted)) == holds
    ahead.settle()
    worked = ahead.collect()
    assert (worked.corrections, worked.held) == (1, holds)
    ahead.close()


def test_a_correction_that_the_verdict_overtakes_was_not_put_to_the_test() -> None:
    asked, judged = threading.Event(), threading.Event()

    def clock() -> float:
        if asked.is_set():  # the thread looks for time that is left: the verdict comes now
            judged.wait(10.0)
        return 0.0

    class Sure(ModelDrafter):
        corrects = True  # type: ignore[assignment]

        def assume(self, k: int, rng: np.random.Generator) -> Any:
            yield 4

        def correct(self, k: int) -> Any:
            asked.set()
            yield Correction(1, 7)
            yield 9

    ahead = Ahead(clock)
    assert ahead.start("model", Sure(FakeGraph(VOCAB, logits=LOGITS)), 0, 10, 2, beside_s=60.0)
    assert asked.wait(10.0)
    ahead.judge(Proposal(np.array([2, 3]), np.array([-1, 0])), Decision((2, 7), (0,), 2, (), False))
    judged.set()
    ahead.settle()
    worked = ahead.collect()
    assert (worked.steps, worked.corrections, worked.held) == (1, 0, 0)
    ahead.close()


def test_in_reject_mode_and_without_rows_to_put_aside_there_is_no_correction() -> None:
    class Sealed(FakeGraph):
        keeps_rows = False

    for graph, mode in [(FakeGraph(VOCAB, logits=LOGITS), "reject"), (Sealed(VOCAB, logits=LOGITS), "match")]:
        made = engine(draft=graph, planner=Unhurried())
        sampling = Sampling(temperature=1.0, seed=1, mode=mode)  # type: ignore[arg-type]
        *_, last = made.decode(PROMPT, overlapped(sampling=sampling))
        assert last.stats.overlapped_rounds > 0
        assert last.stats.corrections == 0


@pytest.mark.parametrize("fewer", [1, 2])
def test_a_plan_that_shrinks_takes_the_beginning_of_what_was_assumed(fewer: int) -> None:
    from outrider.runtime.context import Context

    sampling, context = Sampling(temperature=1.0, seed=3), Context(PROMPT)
    graph = FakeGraph(VOCAB, logits=LOGITS)
    drafter = ModelDrafter(graph, min_confidence=0.0)
    proposal = drafter.propose(context, 3, sampling, np.random.default_rng(0))
    tokens = list(drafter.assume(3, np.random.default_rng(1)))
    context.extend([*proposal.tokens.tolist(), tokens[0]])
    short = drafter.propose(context, fewer, sampling, np.random.default_rng(1))
    assert short.tokens.tolist() == tokens[1 : 1 + fewer]
    assert graph.tokens == [*context, *tokens[1:fewer]]


def test_a_plan_that_grows_near_the_end_of_the_draft_s_context_takes_what_was_assumed_and_fits_itself_in() -> (
    None
):
    from outrider.runtime.context import Context

    graph, context, rng = FakeGraph(VOCAB, 12, logits=LOGITS), Context(PROMPT), np.random.default_rng(0)
    drafter, sampling = ModelDrafter(graph, min_confidence=0.0), Sampling()
    drafted = drafter.propose(context, 2, sampling, rng).tokens.tolist()
    guess, *ahead = drafter.assume(2, rng)
    context.extend([*drafted, guess])
    before = len(graph.forwards)
    proposed = drafter.propose(context, 6, sampling, rng).tokens.tolist()
    assert proposed[:2] == ahead
    assert len(proposed) == graph.max_context - len(context) + 1
    assert graph.forwards[before:] == [1] * (len(proposed) - 2)


@pytest.mark.parametrize("place", range(12))
def test_a_stop_token_anywhere_ends_the_text_and_the_work_ahead(place: int) -> None:
    whole = text(engine(1.0).decode(PROMPT, overlapped(k=0, drafter=None, drafting="auto")))
    stop = whole[place]
    made = engine(1.0)
    rounds = list(made.decode(PROMPT, overlapped(stop_ids=frozenset({stop}))))
    assert text(rounds) == whole[: whole.index(stop) + 1]
    assert rounds[-1].finish_reason == "stop"
    refuse_inconsistent(made, [*PROMPT, *text(rounds)])


@pytest.mark.parametrize("limit", range(1, 14))
def test_the_end_of_the_context_and_of_the_allowance_end_the_text_where_serial_does(limit: int) -> None:
    request = overlapped(limit)
    assert shape(engine(1.0).decode(PROMPT, request)) == shape(engine(1.0).decode(PROMPT, serial(request)))
    request = replace(request, max_new_tokens=None)

    def small() -> Engine:
        return engine(1.0, target=FakeGraph(VOCAB, len(PROMPT) + limit, logits=LOGITS))

    assert shape(small().decode(PROMPT, request)) == shape(small().decode(PROMPT, serial(request)))


def rounds_of(made: Engine, n: int, request: Request | None = None) -> tuple[Generator[Round], list[int]]:
    """A text that is under way: its iterator after n rounds, and what they committed."""
    rounds = made.decode(PROMPT, request or overlapped())
    return rounds, text([next(rounds) for _ in range(n)])


def late_engine() -> Engine:
    """Its draft takes 5 ms a step, so that work ahead is under way between two rounds."""
    draft = Faulty(VOCAB, logits=LOGITS, late_s=0.005)
    return engine(draft=draft)


PLAIN = text(Engine(FakeGraph(VOCAB, logits=LOGITS)).decode(PROMPT, Request(max_new_tokens=60, k=0)))


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_closing_the_iterator_in_the_middle_ends_the_thread_and_leaves_both_caches_usable(after: int) -> None:
    made = late_engine()
    rounds, committed = rounds_of(made, after)
    rounds.close()
    refuse_inconsistent(made, [*PROMPT, *committed])
    again = text(made.decode([*PROMPT, *committed], overlapped(60 - len(committed))))
    assert committed + again == PLAIN


def test_an_iterator_that_is_dropped_unclosed_ends_its_thread() -> None:
    made = late_engine()
    rounds, committed = rounds_of(made, 3)
    del rounds
    gc.collect()
    refuse_inconsistent(made, [*PROMPT, *committed])


@pytest.mark.parametrize("how", ["reset", "settle", "another text"])
def test_what_takes_the_engine_over_ends_the_work_ahead_of_the_text_before(how: str) -> None:
    made = late_engine()
    rounds, _ = rounds_of(made, 3)
    if how == "reset":
        made.reset()
        assert draft_of(made).length == 0
    elif how == "settle":
        made.settle()
    else:
        made.decode([2, 2], overlapped(9))  # not even begun
    assert [thread for thread in threading.enumerate() if thread.name == "outrider-draft"] == []
    if how == "settle":  # the text may go on
        assert PLAIN[-8:] == text(rounds)[-8:]
    else:
        with pytest.raises(UsageError, match="another generation"):
            next(rounds)
    assert text(made.decode(PROMPT, overlapped())) == PLAIN


def test_closing_an_older_text_does_not_disturb_the_one_that_took_over() -> None:
    made = late_engine()
    older, _ = rounds_of(made, 3)
    newer, committed = rounds_of(made, 3)
    older.close()
    assert committed + text(newer) == PLAIN


def until_it_fails(rounds: Iterator[Round], into: list[int]) -> None:
    """Take what is committed until an error comes."""
    for part in rounds:
        into.extend(part.tokens)


@pytest.mark.parametrize("at", range(3, 16, 2))
@pytest.mark.parametrize("error", [BackendError, KeyboardInterrupt, MemoryError])
def test_an_error_of_the_target_ends_the_text_and_the_thread_and_the_engine_goes_on(
    at: int, error: Any
) -> None:
    target = Faulty(VOCAB, logits=LOGITS, fails_at=at, error=error)
    made = engine(0.95, target=target, draft=Faulty(VOCAB, logits=draft_logits(0.95), late_s=0.001))
    committed: list[int] = []
    with pytest.raises(error, match="injected"):
        until_it_fails(made.decode(PROMPT, overlapped()), committed)
    assert committed == PLAIN[: len(committed)]
    refuse_inconsistent(made, [*PROMPT, *committed])
    assert text(made.decode(PROMPT, overlapped())) == PLAIN


def test_a_draft_that_fails_while_it_works_ahead_costs_speed_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failure in a step that serial decoding might not have run is no error of the text."""
    ends = set()
    for at in range(1, 24):
        made = engine(draft=Faulty(VOCAB, logits=LOGITS, fails_at=at))
        committed: list[int] = []
        caplog.clear()
        try:
            until_it_fails(made.decode(PROMPT, overlapped()), committed)
        except BackendError:
            ends.add("while it was waited for")
        else:
            assert committed == PLAIN
            assert ["drafted ahead: injected" in record.getMessage() for record in caplog.records] == [True]
            ends.add("ahead")
        refuse_inconsistent(made, [*PROMPT, *PLAIN])
        assert text(made.decode(PROMPT, overlapped())) == PLAIN
    assert ends == {"while it was waited for", "ahead"}


def test_an_interrupt_while_the_engine_waits_for_the_draft_is_raised_once_the_draft_is_free() -> None:
    made = engine(draft=Faulty(VOCAB, logits=LOGITS, late_s=0.02))
    made.drafters["model"].graph.late_s = 0.02  # type: ignore[attr-defined]
    seen = 0

    def interrupted(ready: Callable[[], bool]) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            raise KeyboardInterrupt

    class Timeline:
        """Real time, but for a Ctrl-C in the second wait."""

        def begin(self) -> None: ...
        def end(self) -> None: ...
        def notify(self) -> None: ...
        def wait(self, ready: Callable[[], bool]) -> None:
            interrupted(ready)

    made._ahead = made._choosing._ahead = Ahead(timeline=Timeline())
    with pytest.raises(KeyboardInterrupt):
        list(made.decode(PROMPT, overlapped()))
    assert seen >= 2
    assert made._ahead._piece is None
    assert text(made.decode(PROMPT, overlapped())) == PLAIN


def test_an_interrupt_in_the_draft_s_thread_is_raised_where_the_text_is_read() -> None:
    for at in range(3, 9):
        made = engine(draft=Faulty(VOCAB, logits=LOGITS, fails_at=at, error=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(made.decode(PROMPT, overlapped()))
        refuse_inconsistent(made, [*PROMPT, *PLAIN])
        assert text(made.decode(PROMPT, overlapped())) == PLAIN


def test_after_it_was_closed_on_its_own_thread_work_ahead_begins_anew() -> None:
    ahead = Ahead()

    class Collecting(ModelDrafter):
        def assume(self, k: int, rng: np.random.Generator) -> Any:
            ahead.close()  # as a collector of garbage does that runs on this thread
            yield from range(k)

    drafter = Collecting(FakeGraph(VOCAB, logits=LOGITS))
    for _ in range(3):
        assert ahead.start("model", drafter, 0, 10, 3)
        ahead.settle()
    ahead.close()
    assert ahead.collect().steps == 3  # each ends with the step that it is in


def test_two_threads_that_wait_for_the_same_work_both_go_on() -> None:
    """A process ends while a thread of its own, which nobody joins, waits for a draft."""
    ahead, go = Ahead(), threading.Event()

    class Unsure(ModelDrafter):
        def assume(self, k: int, rng: np.random.Generator) -> Any:
            go.wait()
            yield from ()

    assert ahead.start("model", Unsure(FakeGraph(VOCAB, logits=LOGITS)), 0, 10, 3)
    waiting = [threading.Thread(target=end, daemon=True) for end in (ahead.settle, ahead.close)]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)  # in which both come to wait: with less, the test is only weaker
    go.set()
    for thread in waiting:
        thread.join(60)
    assert not any(thread.is_alive() for thread in waiting)


ABANDONED = """
import os, threading
from benchmarks.overlap.soak import Faulty
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.rounds import Engine, Request
drafter = ModelDrafter(Faulty(13, late_s=0.05), min_confidence=0.0)
request = Request(max_new_tokens=60, k=3, drafter="model", drafting="overlapped")
rounds = Engine(Faulty(13), {"model": drafter}).decode([1, 2, 3], request)
for _ in range(3):
    next(rounds)
assert any(thread.name == "outrider-draft" for thread in threading.enumerate())
child = os.fork()
if child == 0:
    rounds.close()
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


def test_a_text_left_in_the_middle_keeps_neither_a_fork_nor_the_end_of_the_process_waiting() -> None:
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", ABANDONED], check=True, timeout=600, cwd=root)


class Scripted:
    """A pacer that says what it is told to."""

    def __init__(self, directives: Iterator[Directive]) -> None:
        self.directives = directives

    def directive(self, costs: object) -> Directive:
        return next(self.directives)

    def energy(self, verify_s: object) -> None: ...
    def observe(self, *what: object) -> None: ...
    def follow(self) -> None: ...


def test_the_draft_model_is_taken_back_before_its_memory_is() -> None:
    def opened() -> FakeGraph:
        return Faulty(VOCAB, logits=LOGITS, late_s=0.003)

    pacer: Any = Scripted(Directive(draft_loaded=n % 4 != 3) for n in range(1000))
    model = ModelDrafter(opened(), min_confidence=0.0, reopen=opened)
    made = Engine(FakeGraph(VOCAB, logits=LOGITS), {"model": model}, pacer=pacer)
    rounds = list(made.decode(PROMPT, overlapped()))
    assert text(rounds) == PLAIN
    assert rounds[-1].stats.overlapped_rounds > 0
    assert any(part.plan.drafter is None for part in rounds[2:])


def test_a_governor_may_forbid_to_overlap_in_the_middle_of_a_text() -> None:
    pacer: Any = Scripted(Directive(overlap=n < 8) for n in range(1000))
    rounds = list(engine(1.0, pacer=pacer).decode(PROMPT, overlapped()))
    assert text(rounds) == PLAIN
    modes = [part.plan.mode for part in rounds]
    assert set(modes[1:7]) == {"overlapped"}
    assert set(modes[8:]) == {"serial"}


def test_lookup_may_take_over_from_a_draft_that_works_ahead() -> None:
    """A plan that changes its drafter drops the work of the other."""

    class Alternating(Planner):
        def plan(self, kinds: Any, k_max: int, *rest: Any, **more: Any) -> Plan:
            self.calls = getattr(self, "calls", 0) + 1
            name = "lookup" if self.calls % 3 == 0 and "lookup" in kinds else "model"
            return Plan(name, min(3, k_max), "serial" if name == "lookup" else "overlapped")

    made = engine(1.0, planner=Alternating())
    made.drafters["lookup"] = LookupDrafter(min_ngram=1)
    rounds = list(made.decode(PROMPT, Request(max_new_tokens=60, k="auto")))
    assert text(rounds) == PLAIN
    assert {part.plan.drafter for part in rounds[1:]} == {"lookup", "model"}


def test_overlapping_is_refused_where_nothing_can() -> None:
    assert can_overlap(engine().drafters["model"])
    assert not can_overlap(LookupDrafter())
    alone = Engine(FakeGraph(VOCAB, logits=LOGITS), {"lookup": LookupDrafter(), "tree": FakeDrafter(LOGITS)})
    for made, name in [(alone, None), (engine(), "lookup")]:
        with pytest.raises(UsageError, match="can draft beside the target"):
            made.decode(PROMPT, overlapped(drafter=name))
    with pytest.raises(UsageError, match="auto, serial, overlapped"):
        overlapped(drafting="sideways")


def timed(draft_s: float, verify_s: float, quality: float, **options: Any) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock()
    verify = {1: 0.6 * verify_s, 4: verify_s, 8: 2 * verify_s}
    target = FakeGraph(VOCAB, logits=LOGITS, costs_s=verify, clock=clock)
    draft = FakeGraph(VOCAB, logits=draft_logits(quality), costs_s={1: draft_s}, clock=clock)
    made = engine(target=target, draft=draft, clock=clock, timeline=clock.lanes, **options)
    return made, clock


@pytest.mark.parametrize(("draft_s", "verify_s"), [(0.125, 1.0), (0.25, 1.0), (0.5, 1.0)])
def test_on_two_units_a_round_takes_the_longer_of_verify_and_draft(draft_s: float, verify_s: float) -> None:
    made, _ = timed(draft_s, verify_s, 1.0)
    rounds = list(made.decode(PROMPT, overlapped(41)))
    full = [part for part in rounds if part.ready and part.drafted == 3][:-1]
    assert len(full) > 5
    for part in full:
        assert part.verify_s == verify_s
        assert part.draft_s == max(0.0, 4 * draft_s - verify_s)  # what was left to wait for


def corrected(draft_s: float, planner: Planner | None = None) -> tuple[Stats, float, list[int]]:
    """A text of overlapped rounds of k=2, whose verify takes 0.87 s."""
    made, clock = timed(draft_s, 1.0, 0.75, planner=planner)
    rounds = list(made.decode(PROMPT, overlapped(120, k=2)))
    return rounds[-1].stats, clock(), text(rounds)


def test_time_that_is_left_beside_a_verify_goes_to_the_likeliest_correction_and_is_won_back() -> None:
    stats, seconds, written = corrected(0.12)
    without, slower_s, expected = corrected(0.12, Hurried())
    assert written == expected
    assert stats.corrections > 20
    assert 5 < stats.corrections_held < stats.corrections
    assert without.corrections == 0
    assert seconds < slower_s - 0.8 * 0.12 * stats.corrections_held  # of the two steps that each has saved


def test_a_draft_without_a_whole_step_to_spare_prepares_for_no_correction() -> None:
    stats, _, _ = corrected(0.27)  # three steps are 0.81 s
    assert stats.overlapped_rounds > 20
    assert stats.corrections == 0


def test_a_simulation_with_threads_has_one_outcome() -> None:
    outcomes = set()
    for _ in range(3):
        made, clock = timed(0.3, 1.0, 0.8)
        rounds = list(made.decode(PROMPT, overlapped()))
        outcomes.add((clock(), tuple(part.draft_s for part in rounds), rounds[-1].stats.ahead_steps))
    assert len(outcomes) == 1
    made, clock = timed(0.3, 1.0, 0.8)
    list(made.decode(PROMPT, serial(overlapped())))
    assert next(iter(outcomes))[0] < clock()


def test_what_a_thread_sees_of_a_verdict_at_the_same_moment_is_not_the_scheduler_s_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft step is longer than the verify: the verdict comes when the guess does, and cancels what follows it."""
    from outrider.runtime.overlap import _Piece

    original, outcomes = _Piece._tell, []
    for late_s in (0.0, 0.01):

        def tell(piece: _Piece, timeline: Any, late_s: float = late_s) -> None:
            original(piece, timeline)
            time.sleep(late_s)

        monkeypatch.setattr(_Piece, "_tell", tell)
        made, clock = timed(1.5, 1.0, 0.8)
        rounds = list(made.decode(PROMPT, overlapped(30)))
        outcomes.append((clock(), rounds[-1].stats.ahead_steps))
    assert rounds[-1].stats.guesses > rounds[-1].stats.guesses_held > 0
    assert outcomes[0] == outcomes[1]


QWEN = Costs({1: 0.073, 2: 0.089, 3: 0.115, 4: 0.134, 5: 0.162}, {"d": 0.024})  # bare graphs, a core each


def plan_for(acceptance: float, costs: Costs = QWEN, **limits: Any) -> Plan:
    given_limits = Limits(4, overlap=frozenset({"d"}), **limits)
    return choose(costs, Acceptance({"d": (acceptance,)}), SPEED, given_limits)


def test_the_plan_overlaps_where_all_of_a_draft_and_its_guess_hold_often() -> None:
    modes = [plan_for(acceptance).mode for acceptance in (0.1, 0.5, 0.94)]
    assert modes[0] == "none"
    assert modes[2] == "overlapped"
    assert plan_for(0.94, costs=replace(QWEN, draft_s={"d": 0.2})).mode != "overlapped"
    assert choose(QWEN, Acceptance({"d": (0.94,)}), SPEED, Limits(4)).mode == "serial"


@given(st.floats(0.3, 0.99), st.floats(0.002, 0.08), st.integers(1, 4))
@settings(deadline=None)
def test_the_promise_of_an_overlapped_round_is_the_formula(a: float, draft_s: float, k: int) -> None:
    """max(verify, k + 1 steps) where all held, k steps and a verify where not: see the issue's figures."""
    costs = replace(QWEN, draft_s={"d": draft_s})
    limits = {"k_min": k, "plain_allowed": False, "serial_allowed": False}
    plan = choose(costs, Acceptance({"d": (a,)}), SPEED, Limits(k, overlap=frozenset({"d"}), **limits))  # type: ignore[arg-type]
    held, verify_s = a ** (k + 1), costs.verify_s[k + 1]
    round_s = held * max(verify_s, (k + 1) * draft_s) + (1 - held) * (k * draft_s + verify_s)
    tokens = (1 - a ** (k + 1)) / (1 - a)
    assert plan.mode == "overlapped"
    assert float(plan.reason.split()[0]) == pytest.approx(costs.verify_s[1] * tokens / round_s, abs=0.006)


def test_a_correction_is_priced_by_how_often_it_holds_and_planned_where_a_step_fits() -> None:
    likely = Acceptance({"d": (0.85,)}, corrected={"d": 0.15})
    limits = Limits(2, overlap=frozenset({"d"}), k_min=2, plain_allowed=False, serial_allowed=False)
    plan, without = (choose(QWEN, likes, SPEED, limits) for likes in (likely, replace(likely, corrected={})))
    assert plan.beside_s == QWEN.verify_s[3]
    assert without.beside_s == 0.0
    held = 0.85**3
    round_s = held * 0.115 + (1 - held) * (2 * 0.024 + 0.115)
    promise, lower = (float(made.reason.split()[0]) for made in (plan, without))
    assert promise / lower == pytest.approx(round_s / (round_s - 0.15 * 0.024), abs=0.01)
    tight = replace(QWEN, draft_s={"d": 0.03})  # three steps leave 25 ms of the 115
    assert choose(tight, likely, SPEED, limits).beside_s == 0.0
    costly = replace(QWEN, energy=Energy(0.1, dict.fromkeys(range(1, 6), 1.0), {"d": 0.8}))
    assert choose(costly, likely, Objective("energy"), limits).beside_s == 0.0


def test_overlapping_must_promise_its_margin_over_drafting_before() -> None:
    close = Acceptance({"d": (0.9,)}, guessed={"d": 0.05})  # guesses hardly ever hold: nothing is won
    limits = Limits(3, overlap=frozenset({"d"}), k_min=3)
    assert choose(QWEN, close, SPEED, limits).mode == "serial"
    sure = replace(close, guessed={"d": 0.9})
    assert choose(QWEN, sure, SPEED, limits).mode == "overlapped"


def test_measured_contention_decides_against_overlapping() -> None:
    slowed = Costs({4: 0.134 * 1.6}, {"d": 0.024 * 1.6})
    assert plan_for(0.94, replace(QWEN, overlapped=slowed)).mode == "serial"
    free = Costs({4: 0.136}, {"d": 0.0245})
    assert plan_for(0.94, replace(QWEN, overlapped=free)).mode == "overlapped"
    costly = Costs({4: 0.134}, {"d": 0.024}, overhead_s=0.06)  # to hand over
    assert plan_for(0.94, replace(QWEN, overlapped=costly)).mode == "serial"


def test_for_joules_the_steps_that_are_wasted_count() -> None:
    energy = Energy(0.1, dict.fromkeys(range(1, 6), 1.0), {"d": 0.8})
    costs = replace(QWEN, energy=energy)
    limits = Limits(3, overlap=frozenset({"d"}), k_min=3, plain_allowed=False)
    acceptance = Acceptance({"d": (0.8,)})
    assert choose(costs, acceptance, Objective("energy"), limits).mode == "serial"
    assert choose(costs, acceptance, SPEED, limits).mode == "overlapped"


MODES = Modes(frozenset({"d"}))


def taught() -> Planner:
    """A planner that has seen plain rounds and a draft step."""
    planner = Planner()
    for width, seconds in QWEN.verify_s.items():
        plan = Plan(None, 0, "none") if width == 1 else Plan("d", width - 1, "serial")
        steps_s = 0.024 * (width - 1)
        planner.observe(
            Observation(
                plan, width - 1, width - 1, width - 1, width, seconds + steps_s, steps_s, seconds, width
            )
        )
    return planner


def play(planner: Planner, rounds: int, contention: float, a: float = 0.94) -> list[Plan]:
    """Rounds as the plans want them, on units that slow each other down by `contention`."""
    rng, plans, ready = np.random.default_rng(0), [], False
    for _ in range(rounds):
        plan = planner.plan({"d": ""}, 4, modes=MODES)
        plans.append(plan)
        k, beside = plan.k, plan.mode == "overlapped"
        accepted = next((i for i in range(k) if rng.random() > a), k)
        guess = bool(rng.random() < a) if accepted == k and beside else None
        slow = contention if beside else 1.0
        verify_s = QWEN.verify_s[k + 1] * slow
        draft_s = 0.0 if ready else 0.024 * k
        planner.observe(
            Observation(
                plan,
                k,
                min(k, accepted + 1),
                accepted,
                accepted + 1,
                verify_s + draft_s + 0.001,
                draft_s,
                verify_s,
                k + 1,
                ready=ready,
                beside=beside,
                guess=guess,
                ahead_steps=(k + 1) * beside,
                ahead_s=0.024 * (k + 1) * slow * beside,
            )
        )
        ready = bool(guess)
    return plans


def share_overlapped(plans: Sequence[Plan]) -> float:
    return sum(plan.mode == "overlapped" for plan in plans) / len(plans)


def test_the_planner_overlaps_where_units_do_not_disturb_each_other() -> None:
    assert share_overlapped(play(taught(), 200, 1.03)[20:]) > 0.9


def test_the_planner_declines_what_it_measures_to_lose_and_tries_again_ever_more_seldom() -> None:
    plans = play(taught(), 600, 1.7)
    tried = [n for n, plan in enumerate(plans) if plan.mode == "overlapped"]
    assert share_overlapped(plans[50:]) < 0.1
    late = [n for n in tried if n > 50]
    assert late  # it does try again
    assert {plans[n].reason for n in late} == {"probe of overlap"}
    starts = [n for n in late if n - 1 not in late]
    gaps = np.diff(starts)
    assert all(gaps[1:] >= gaps[:-1])


def test_the_planner_comes_back_when_units_stop_to_disturb_each_other() -> None:
    planner = taught()
    assert share_overlapped(play(planner, 100, 1.7)[50:]) < 0.2
    assert share_overlapped(play(planner, 700, 1.0)[-200:]) > 0.9


def test_costs_beside_each_other_are_kept_with_the_others() -> None:
    planner = taught()
    play(planner, 60, 1.05)
    again = Planner(planner.to_dict())
    assert again.costs.overlapped is not None
    assert again.costs == planner.costs
    assert "overlapped" not in taught().to_dict()


def test_a_fixed_k_overlaps_as_it_pays() -> None:
    planner, fixed = taught(), Plan("d", 3, "serial", reason="fixed k")
    for _ in range(30):
        planner.observe(Observation(fixed, 3, 3, 3, 4, 0.21, 0.072, 0.134, 4))
    assert planner.with_mode(fixed, {"d": ""}, None, MODES).mode == "overlapped"
    assert planner.with_mode(fixed, {"d": ""}, None, Modes()).mode == "serial"
    planner = Planner()
    for _ in range(60):
        planner.observe(Observation(fixed, 3, 1, 0, 1, 0.21, 0.072, 0.134, 4))
    chosen = planner.with_mode(fixed, {"d": ""}, None, MODES)
    assert chosen == fixed
    assert planner.with_mode(fixed, {"d": ""}, Directive(overlap=False), Modes(MODES.overlap, False)) == fixed


def test_auto_overlaps_on_units_apart_and_nowhere_else() -> None:
    for apart, expected in [(("model",), True), ((), False)]:
        made, _ = timed(0.1, 1.0, 1.0, apart=apart)
        rounds = list(made.decode(PROMPT, Request(max_new_tokens=150, drafter="model")))
        assert (rounds[-1].stats.overlapped_rounds > 10) == expected
        assert any(part.plan.mode == "serial" for part in rounds) or expected


def test_a_directive_that_forbids_to_overlap_leaves_no_way_round_it() -> None:
    limits = Limits(4, overlap=frozenset({"d"}), serial_allowed=False)
    assert Directive(overlap=False).limit(limits) == Limits(4)
    assert Directive().limit(limits) == limits


def test_a_short_soak_with_every_fault_finds_nothing_wrong() -> None:
    report = soak(400, seed=1000, late_s=0.0002)
    assert report.wrong == []
    assert report.overlapped >= 400
    assert set(report.texts) == set(FAULTS)
    assert report.corrections > 0
    assert min(report.window_slides, report.draft_releases, report.draft_returns) > 3


def test_the_soak_would_notice_a_draft_from_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.runtime import overlap

    original = overlap.draft_generator
    monkeypatch.setattr(overlap, "draft_generator", lambda seed, position: original(seed, position + 1))
    assert any("wrong text" in what for what in soak(150, late_s=0.0).wrong)


def test_handing_over_needs_no_polling() -> None:
    """A piece of work is begun and its end noticed without a sleep in between: many in little time."""

    class Quick:
        name = "quick"

        def assume(self, k: int, rng: object) -> Generator[int, None, None]:
            yield from range(k)

    ahead = Ahead(time.perf_counter)
    quick: Any = Quick()
    for _ in range(200):
        assert ahead.start("quick", quick, 0, 5, 3)
        ahead.settle()
    worked = ahead.collect()
    ahead.close()
    assert worked.steps == worked.wasted >= 200  # none came true: each ends with the step that it is in


PHONE_TARGET = ModelCost(1.2e9, 3e9)
PHONE_DRAFT = ModelCost(0.1e9, 0.2e9)


def on_a_phone(
    units: tuple[str, str], drafting: str, draft: ModelCost = PHONE_DRAFT
) -> tuple[Stats, Machine, list[int]]:
    """Decode on two units, target's and draft's, of a simulated phone."""
    machine = Machine(load_device("snapdragon-8-gen3"), seed=3)
    target = SimulatedGraph(FakeGraph(VOCAB, logits=LOGITS), machine, PHONE_TARGET, units[0])
    model = ModelDrafter(
        SimulatedGraph(FakeGraph(VOCAB, logits=draft_logits(0.9)), machine, draft, units[1]),
        min_confidence=0.0,
    )
    made = Engine(target, {"model": model}, clock=machine.clock, sleep=machine.idle, timeline=machine.lanes)
    rounds = list(made.decode(PROMPT, overlapped(80, drafting=drafting)))
    return rounds[-1].stats, machine, text(rounds)


def test_two_simulated_units_work_at_once_with_one_outcome() -> None:
    serial_stats, alone, expected = on_a_phone(("gpu", "npu"), "serial")
    outcomes = {
        (round(machine.clock(), 9), round(machine.energy_j, 6), stats.corrections_held, tuple(written))
        for stats, machine, written in (on_a_phone(("gpu", "npu"), "overlapped") for _ in range(3))
    }
    assert len(outcomes) == 1
    ((seconds, _, held, written),) = outcomes
    assert list(written) == expected
    assert seconds < alone.clock()
    assert held > 0
    assert serial_stats.overlapped_rounds == 0


def test_simulated_units_share_the_bandwidth_of_their_memory() -> None:
    """A draft that streams much slows the target's verify down beside it; one that computes much does not."""
    greedy_for_memory, computing = ModelCost(0.4e9, 1e6), ModelCost(1e6, 40e9)
    verify_s = {}
    for name, draft in [("streams", greedy_for_memory), ("computes", computing)]:
        for drafting in ("serial", "overlapped"):
            stats, _, _ = on_a_phone(("gpu", "npu"), drafting, draft)
            verify_s[name, drafting] = stats.verify_s / (stats.rounds - 1)
    assert verify_s["streams", "overlapped"] > 1.05 * verify_s["streams", "serial"]
    assert verify_s["computes", "overlapped"] == pytest.approx(verify_s["computes", "serial"], rel=0.02)


def test_on_one_simulated_unit_forwards_take_turns_and_draw_no_more_than_one_after_another() -> None:
    machine = Machine(load_device("snapdragon-8-gen3"), jitter=0.0)
    work = PHONE_TARGET.work(4)
    alone_s = machine.execute("gpu", work)
    alone_j = machine.energy_j
    machine = Machine(load_device("snapdragon-8-gen3"), jitter=0.0)
    machine.lanes.begin()

    ended: list[bool] = []

    def beside() -> None:
        machine.execute("gpu", work)
        ended.append(True)
        machine.lanes.end()

    thread = threading.Thread(target=beside)
    thread.start()
    machine.execute("gpu", work)
    machine.lanes.wait(lambda: bool(ended))
    thread.join()
    assert machine.elapsed_s == pytest.approx(2 * alone_s, rel=1e-6)
    assert machine.energy_j == pytest.approx(2 * alone_j, rel=1e-6)
