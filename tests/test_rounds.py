"""The engine commits the target's own text, whatever drafts, and stops where it must."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.contracts import Proposal, Sampling
from outrider.errors import BackendError, ContextError, UsageError
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.planner import Planner
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeDrafter, FakeGraph, VirtualClock, blend_logits, random_logits

VOCAB = 17
LOGITS = random_logits(VOCAB, seed=1, order=None)
OTHER = random_logits(VOCAB, seed=2)
QUALITIES = {"perfect": LOGITS, "good": blend_logits(LOGITS, OTHER, 0.3), "bad": OTHER}
PROMPT = [3, 1, 4, 1, 5]


def target(**options):
    return FakeGraph(VOCAB, logits=LOGITS, **options)


def drafters(quality="good", **options):
    return {
        "model": ModelDrafter(FakeGraph(VOCAB, logits=QUALITIES[quality], **options), min_confidence=0.0),
        "lookup": LookupDrafter(min_ngram=1),
        "tree": FakeDrafter(QUALITIES[quality], (3, 2, 1)),
    }


def text(rounds):
    return [token for part in rounds for token in part.tokens]


def plain(prompt=PROMPT, n=40, **options):
    return text(Engine(target()).decode(prompt, Request(max_new_tokens=n, k=0, **options)))


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("drafter", ["model", "lookup", "tree"])
@pytest.mark.parametrize("k", [1, 2, 4, 7, "auto"])
def test_greedy_text_equals_plain_with_any_drafter_and_any_k(drafter, k, quality):
    engine = Engine(target(), drafters(quality))
    assert text(engine.decode(PROMPT, Request(max_new_tokens=40, k=k, drafter=drafter))) == plain()


@pytest.mark.parametrize("k", [2, "auto"])
def test_all_drafters_together_change_nothing(k):
    assert text(Engine(target(), drafters()).decode(PROMPT, Request(max_new_tokens=40, k=k))) == plain()


def test_trap_8_the_anchor_is_folded_into_the_next_verify():
    graph = target()
    engine = Engine(graph, {"tree": FakeDrafter(LOGITS)})
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=11, k=4)))
    assert graph.forwards == [5, 5, 5]
    assert [len(part.tokens) for part in rounds] == [1, 5, 5]


def test_trap_6_tokens_per_round_are_accepted_plus_one():
    for part in Engine(target(), drafters()).decode(PROMPT, Request(max_new_tokens=30, k=3, drafter="model")):
        assert len(part.tokens) == part.accepted + 1 or part.finish_reason


@pytest.mark.parametrize("place", range(9))
def test_trap_9_the_text_ends_with_the_first_stop_token_inside_a_draft(place):
    whole = plain()
    stop = whole[place]
    graph = target()
    engine = Engine(graph, {"tree": FakeDrafter(LOGITS)})
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=40, k=6, stop_ids=frozenset({stop}))))
    assert text(rounds) == whole[: whole.index(stop) + 1]
    assert rounds[-1].finish_reason == "stop"
    assert list(engine.cached) == graph.tokens == [*PROMPT, *text(rounds)[:-1]]


def test_trap_9_a_stop_token_that_was_only_drafted_does_not_end_the_text():
    wrong = next(token for token in range(VOCAB) if token not in plain())
    drafter = FakeDrafter(lambda context: np.eye(VOCAB, dtype=np.float32)[wrong])
    engine = Engine(target(), {"tree": drafter})
    request = Request(max_new_tokens=20, k=3, stop_ids=frozenset({wrong}))
    assert text(engine.decode(PROMPT, request)) == plain(n=20)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_trap_10_max_new_tokens_is_never_overshot(n):
    graph = target()
    rounds = list(Engine(graph, {"tree": FakeDrafter(LOGITS)}).decode(PROMPT, Request(max_new_tokens=n, k=4)))
    assert text(rounds) == plain(n=n)
    assert rounds[-1].finish_reason == "length"
    assert all(part.drafted <= n - 1 for part in rounds)


@pytest.mark.parametrize("k", [0, 3, "auto"])
def test_the_end_of_the_targets_context_ends_the_text_with_length(k):
    engine = Engine(target(max_context=16), drafters("perfect"))
    rounds = list(engine.decode(PROMPT, Request(k=k)))
    assert text(rounds) == plain(n=11)
    assert rounds[-1].finish_reason == "length"


@pytest.mark.parametrize("max_context", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("quality", QUALITIES)
def test_a_draft_with_a_shorter_context_slides_its_window(max_context, quality):
    engine = Engine(target(), drafters(quality, max_context=max_context))
    assert text(engine.decode(PROMPT, Request(max_new_tokens=40, k=4, drafter="model"))) == plain()


@pytest.mark.parametrize("widths", [(1,), (1, 2), (1, 3, 5), (1, 4, 8)])
def test_trap_20_k_stays_within_the_compiled_widths(widths):
    engine = Engine(target(widths=widths), drafters("perfect"))
    assert text(engine.decode(PROMPT, Request(max_new_tokens=40))) == plain()
    with pytest.raises(UsageError, match="widths"):
        engine.decode(PROMPT, Request(k=max(widths)))


@pytest.mark.parametrize("k", [-1, 128, 999, "many", 2.5])
def test_no_round_drafts_more_than_a_forward_should_verify(k: Any) -> None:
    with pytest.raises(UsageError, match=f"k is {k!r}"):
        Request(k=k)
    assert Request(k=127).k == 127


def test_the_prompt_is_run_in_chunks_with_progress():
    seen = []
    prompt = [token % VOCAB for token in range(21)]
    graph = target()
    engine = Engine(graph, prefill_chunk=8)
    request = Request(max_new_tokens=2, k=0)
    result = text(engine.decode(prompt, request, progress=lambda done, total: seen.append((done, total))))
    assert result == text(Engine(target()).decode(prompt, request))
    assert seen == [(8, 21), (16, 21), (21, 21)]
    assert graph.forwards == [8, 8, 5, 1]


def test_the_next_turn_reuses_the_cached_prefix():
    graph = target()
    engine = Engine(graph, drafters())
    first = text(engine.decode(PROMPT, Request(max_new_tokens=10, k=3)))
    longer = [*PROMPT, *first, 2, 2]
    graph.forwards.clear()
    *_, last = engine.decode(longer, Request(max_new_tokens=10, k=3))
    assert last.stats.reused_tokens == len(PROMPT) + 9
    assert graph.forwards[0] == 3
    assert graph.tokens[: len(longer)] == longer


def test_a_next_prompt_that_differs_in_the_middle_keeps_only_the_common_prefix():
    engine = Engine(target(), drafters())
    list(engine.decode(PROMPT, Request(max_new_tokens=10, k=3)))
    other = [*PROMPT[:3], 9, 9]
    assert text(engine.decode(other, Request(max_new_tokens=20, k=3))) == plain(other, 20)


def test_the_same_prompt_twice_gives_the_same_text():
    engine = Engine(target(), drafters())
    request = Request(Sampling(temperature=1.0, seed=4), max_new_tokens=20, k=3)
    assert text(engine.decode(PROMPT, request)) == text(engine.decode(PROMPT, request))


@pytest.mark.parametrize("after", [1, 2, 4])
def test_trap_22_closing_the_iterator_leaves_the_cache_equal_to_the_committed_text(after):
    graph = target()
    engine = Engine(graph, drafters())
    rounds = engine.decode(PROMPT, Request(max_new_tokens=40, k=4))
    committed = text(next(rounds) for _ in range(after))
    rounds.close()
    assert graph.tokens == [*PROMPT, *committed[:-1]]
    again = text(engine.decode([*PROMPT, *committed], Request(max_new_tokens=40 - len(committed), k=4)))
    assert committed + again == plain()


class Interrupted(FakeGraph):
    """Raises KeyboardInterrupt in a chosen call, as Ctrl-C would."""

    def __init__(self, where, after):
        super().__init__(VOCAB, logits=LOGITS)
        self.where, self.calls = where, after

    def _tick(self, where):
        if where == self.where:
            self.calls -= 1
            if self.calls == 0:
                raise KeyboardInterrupt

    def forward(self, *args, **options):
        self._tick("forward")
        return super().forward(*args, **options)

    def commit(self, rows):
        self._tick("commit")
        super().commit(rows)


@pytest.mark.parametrize("where", ["forward", "commit"])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_ctrl_c_at_any_call_of_the_graph_leaves_an_engine_that_goes_on_rightly(where, after):
    engine = Engine(Interrupted(where, after), drafters(), prefill_chunk=2)
    with pytest.raises(KeyboardInterrupt):
        list(engine.decode(PROMPT, Request(max_new_tokens=40, k=3)))
    assert list(engine.cached) == engine.target.tokens
    assert text(engine.decode(PROMPT, Request(max_new_tokens=40, k=3))) == plain()
    assert list(engine.cached) == engine.target.tokens
    assert len(engine._cached) == engine.target.length


def test_an_older_iterator_refuses_to_go_on_after_a_newer_one_started():
    engine = Engine(target())
    older = engine.decode(PROMPT, Request(max_new_tokens=9))
    next(older)
    next(engine.decode([2, 2], Request(max_new_tokens=9)))
    with pytest.raises(UsageError, match="another generation"):
        next(older)


def test_an_older_iterator_that_has_not_begun_does_not_touch_the_graphs_of_a_newer_one():
    engine = Engine(target())
    older = engine.decode([2, 2, 2], Request(max_new_tokens=9))
    newer = engine.decode(PROMPT, Request(max_new_tokens=40, k=0))
    begun = next(newer)
    with pytest.raises(UsageError, match="another generation"):
        next(older)
    assert [*begun.tokens, *text(newer)] == plain()


def test_a_second_thread_is_refused_while_a_round_runs_and_a_reset_there_waits_for_its_end():
    refused, resets = [], []

    class Visited(FakeGraph):
        def forward(self, *args, **options):
            def visit():
                try:
                    engine.decode([2, 2])
                except UsageError as error:
                    refused.append(str(error))

            thread = threading.Thread(target=visit)
            thread.start()
            thread.join()
            if not resets:
                resets.append(threading.Thread(target=engine.reset))
                resets[0].start()
            assert engine.target.length or len(refused) == 1  # the reset has not come in between
            return super().forward(*args, **options)

    engine = Engine(Visited(VOCAB, logits=LOGITS), prefill_chunk=2)
    rounds = engine.decode(PROMPT, Request(max_new_tokens=9, k=0))
    with pytest.raises(UsageError, match=r"another (generation|thread)"):  # the reset, ended or under way
        list(rounds)
    resets[0].join()
    assert engine.target.length == 0
    assert refused
    assert "another thread" in refused[0]


def test_after_a_fork_nobody_waits_for_a_round_of_a_thread_that_stayed_behind(monkeypatch):
    engine = Engine(target(), drafters())
    with ThreadPoolExecutor(1) as other, engine.at_work:
        monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a child
        other.submit(engine.reset).result(timeout=60)


def test_reset_forgets_everything():
    engine = Engine(target(), drafters())
    list(engine.decode(PROMPT, Request(max_new_tokens=9)))
    engine.reset()
    assert engine.cached == ()
    assert engine.target.length == 0


def test_trap_7_a_fully_accepted_draft_is_one_token_behind_and_catches_up_with_two():
    draft = FakeGraph(VOCAB, logits=LOGITS)
    engine = Engine(target(), {"model": ModelDrafter(draft, min_confidence=0.0)})
    list(engine.decode(PROMPT, Request(max_new_tokens=11, k=4)))
    assert draft.forwards == [len(PROMPT) + 1, 1, 1, 1, 2, 1, 1, 1]


def test_trap_11_each_row_is_penalised_for_the_drafts_before_it():
    sampling = Sampling(repetition_penalty=3.0, frequency_penalty=1.5, presence_penalty=1.0)
    expected = plain(sampling=sampling)
    for drafter in ("model", "tree", "lookup"):
        engine = Engine(target(), drafters("perfect"))
        got = text(engine.decode(PROMPT, Request(sampling, max_new_tokens=40, k=5, drafter=drafter)))
        assert got == expected
    assert expected != plain()


def test_trap_11_a_draft_model_sees_the_penalties_too():
    sampling = Sampling(repetition_penalty=3.0, frequency_penalty=1.5)
    engine = Engine(target(), drafters("perfect"))
    *_, last = engine.decode(PROMPT, Request(sampling, max_new_tokens=40, k=4, drafter="model"))
    assert last.stats.acceptance == 1.0


def test_trap_13_ties_go_to_the_lowest_id_and_are_counted():
    tied = lambda context: np.round(LOGITS(context)).astype(np.float32)  # noqa: E731
    graphs = [FakeGraph(VOCAB, logits=tied) for _ in range(2)]
    one = list(Engine(graphs[0]).decode(PROMPT, Request(max_new_tokens=30, k=0)))
    two = list(Engine(graphs[1], {"tree": FakeDrafter(tied)}).decode(PROMPT, Request(max_new_tokens=30, k=4)))
    assert text(one) == text(two)
    assert one[-1].stats.near_ties == two[-1].stats.near_ties > 0


def test_trap_14_a_padded_vocabulary_never_leaks_an_id():
    padded = lambda context: np.append(LOGITS(context), [50.0, 60.0]).astype(np.float32)  # noqa: E731
    wider = lambda context: np.append(LOGITS(context), [70.0] * 4).astype(np.float32)  # noqa: E731
    draft = ModelDrafter(FakeGraph(VOCAB + 4, logits=wider), vocab_limit=VOCAB, min_confidence=0.0)
    engine = Engine(FakeGraph(VOCAB + 2, logits=padded), {"model": draft}, vocab_limit=VOCAB)
    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, mode="reject")):
        rounds = list(engine.decode(PROMPT, Request(sampling, max_new_tokens=30, k=4)))
        assert max(text(rounds)) < VOCAB
    assert text(engine.decode(PROMPT, Request(max_new_tokens=40, k=4))) == plain()


@pytest.mark.parametrize("mode", ["match", "reject"])
def test_trap_14_a_drafted_id_that_the_target_lacks_is_rejected_not_run(mode):
    alien = FakeDrafter(lambda context: np.eye(VOCAB + 9, dtype=np.float32)[VOCAB + 5] * 9)
    sampling = Sampling(temperature=1.0, seed=2, mode=mode)
    engine = Engine(target(), {"tree": alien})
    rounds = list(engine.decode(PROMPT, Request(sampling, max_new_tokens=20, k=2)))
    assert text(rounds) == plain(n=20, sampling=replace(sampling, mode="match"))
    assert rounds[-1].stats.accepted == 0


def test_trap_17_the_counts_tell_drafted_evaluated_and_accepted_apart():
    *_, last = Engine(target(), drafters("bad")).decode(
        PROMPT, Request(max_new_tokens=30, k=4, drafter="model")
    )
    stats = last.stats
    assert stats.accepted <= stats.evaluated < stats.drafted
    assert sum(stats.evaluated_at) == stats.evaluated
    assert sum(stats.accepted_at) == stats.accepted
    assert stats.accepted_at[0] >= stats.evaluated_at[1]
    assert stats.output_tokens == 30
    assert stats.to_dict()["acceptance"] == stats.accepted / stats.evaluated


class Recorder(Planner):
    """Keeps what it was told."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def observe(self, seen):
        self.seen.append(seen)
        super().observe(seen)


def test_trap_17_a_round_cut_by_a_stop_token_or_a_limit_is_marked_so():
    whole = plain()
    for request in (Request(max_new_tokens=8, k=4), Request(k=4, stop_ids=frozenset({whole[7]}))):
        planner = Recorder()
        list(Engine(target(), {"tree": FakeDrafter(LOGITS)}, planner).decode(PROMPT, request))
        assert [seen.cut for seen in planner.seen] == [False] * (len(planner.seen) - 1) + [True]


def test_a_miss_is_a_plain_step():
    rising = FakeGraph(64, logits=lambda context: np.eye(64, dtype=np.float32)[(context[-1] + 1) % 64])
    engine = Engine(rising, {"lookup": LookupDrafter()})
    rounds = list(engine.decode([1, 2, 3], Request(max_new_tokens=20, k=4)))
    assert all(part.drafted == 0 and part.plan.drafter is None for part in rounds)
    assert set(rising.forwards[1:]) == {1}


@pytest.mark.parametrize("mode", ["match", "reject"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_come_from_the_processed_row_of_their_own_position(temperature, mode):
    sampling = Sampling(temperature=temperature, frequency_penalty=0.5, seed=3, mode=mode)
    engine = Engine(target(), {"tree": FakeDrafter(LOGITS, rule="iid")})
    rounds = list(engine.decode(PROMPT, Request(sampling, max_new_tokens=15, k=3, logprobs=2)))
    entries = [entry for part in rounds for entry in part.logprobs]
    tokens = text(rounds)
    assert [entry.token for entry in entries] == tokens
    for i, entry in enumerate(entries):
        row = LOGITS((*PROMPT, *tokens[:i])).astype(np.float64)
        for token in tokens[:i]:
            row[token] -= 0.5
        row /= temperature or 1.0
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-5)
        assert len(entry.top) == 2
        assert entry.top[0][1] == pytest.approx(expected.max(), abs=1e-5)


def test_drafters_observe_what_was_committed():
    drafter = FakeDrafter(LOGITS)
    rounds = list(Engine(target(), {"tree": drafter}).decode(PROMPT, Request(max_new_tokens=12, k=3)))
    assert drafter.observed == [part.tokens for part in rounds if part.plan.drafter]


def test_times_are_those_of_the_clock_without_the_consumers():
    clock = VirtualClock()
    graph = target(costs_s={1: 1.0, 5: 2.0}, clock=clock)
    draft = ModelDrafter(FakeGraph(VOCAB, logits=LOGITS, costs_s={1: 0.125}, clock=clock), min_confidence=0.0)
    engine = Engine(graph, {"model": draft}, clock=clock)
    rounds = engine.decode(PROMPT, Request(max_new_tokens=11, k=4))
    stats = next(rounds).stats
    for _ in rounds:
        clock.advance(100.0)
    assert (stats.ttft_s, stats.verify_s, stats.draft_s, stats.overhead_s) == (2.0, 4.0, 1.0, 0.0)
    assert stats.decode_tokens_per_s == 2.0
    assert stats.prompt_tokens_per_s == 2.5


class Greedy(FakeDrafter):
    """Proposes more than it was asked for."""

    def propose(self, context, k, sampling, rng):
        return super().propose(context, k + 1, sampling, rng)


def test_a_drafter_that_proposes_too_much_is_an_error_with_its_name():
    with pytest.raises(BackendError, match="'tree' proposed 4 tokens"):
        list(Engine(target(), {"tree": Greedy(LOGITS)}).decode(PROMPT, Request(max_new_tokens=12, k=3)))


@pytest.mark.parametrize(
    ("prompt", "request_options", "error", "words"),
    [
        ([], {}, UsageError, "empty"),
        ([99], {}, UsageError, "99"),
        ([1] * 256, {}, ContextError, "256"),
        ([1] * 300, {}, ContextError, "300"),
        ([1], {"drafter": "nobody"}, UsageError, "model, lookup, tree"),
        ([1], {"sampling": Sampling(banned_tokens=(99,))}, UsageError, "99"),
    ],
)
def test_what_cannot_be_decoded_is_refused_before_the_first_round(prompt, request_options, error, words):
    with pytest.raises(error, match=words):
        Engine(target(), drafters()).decode(prompt, Request(**request_options))


@pytest.mark.parametrize("options", [{"k": -1}, {"k": "many"}, {"max_new_tokens": 0}, {"logprobs": -1}])
def test_a_request_outside_its_range_is_refused(options):
    with pytest.raises(UsageError):
        Request(**options)


def test_an_empty_chain_counts_as_a_chain():
    assert Proposal(np.empty(0, np.int64), np.empty(0, np.int64)).is_chain
