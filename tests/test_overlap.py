"""Overlapped rounds write what serial rounds write, whatever is late and whatever is assumed."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.overlap.soak import FAULTS, Faulty, Unhurried, soak
from outrider.contracts import Proposal, Sampling
from outrider.runtime.corrections import Correction
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.overlap import Ahead
from outrider.runtime.rounds import Engine
from outrider.runtime.verify import Decision
from outrider.targets.fake import FakeGraph
from tests.overlapping import (
    LOGITS,
    PROMPT,
    VOCAB,
    Hurried,
    draft_logits,
    draft_of,
    engine,
    no_thread_is_left,  # noqa: F401
    overlapped,
    refuse_inconsistent,
    serial,
    shape,
    text,
)

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
