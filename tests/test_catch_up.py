"""What a draft model has not seen of a text is run piece by piece, at a price that is known before it is paid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.contracts import Drafter, Sampling
from outrider.runtime.costs import FIRST_PIECE
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.planner import Planner
from outrider.runtime.rounds import Engine, Request, Round
from outrider.targets.fake import FakeGraph, LogitsFunction, VirtualClock, random_logits

VOCAB = 31
LOGITS = random_logits(VOCAB, seed=1, order=None)
PROMPT = [token % VOCAB for token in range(400)]
VERIFY_S = {1: 0.018, 16: 0.018, 512: 0.2}


def decoded(k: Any, step_s: float, token_s: float, n: int = 48) -> tuple[list[Round], FakeGraph, Engine]:
    """A text whose draft is the target itself, with a step and a token of a prompt that take so long."""
    clock = VirtualClock()
    target = FakeGraph(VOCAB, 1024, logits=LOGITS, costs_s=VERIFY_S, clock=clock)
    costs_s = {1: step_s, 512: step_s + 511 * token_s}
    draft = FakeGraph(VOCAB, 1024, logits=LOGITS, costs_s=costs_s, clock=clock)
    engine = Engine(target, {"model": ModelDrafter(draft, min_confidence=0.0)}, clock=clock)
    return list(engine.decode(PROMPT, Request(max_new_tokens=n, k=k))), draft, engine


def text(rounds: list[Round]) -> list[int]:
    return [token for part in rounds for token in part.tokens]


def per_token_s(rounds: list[Round]) -> float:
    stats = rounds[-1].stats
    return stats.decode_s / (stats.output_tokens - stats.first_tokens)


PLAIN = decoded(0, 1.0, 1.0)[0]


def test_a_draft_step_that_is_too_slow_is_found_out_without_reading_the_prompt() -> None:
    rounds, draft, _ = decoded("auto", 0.0145, 0.0033)
    assert draft.forwards == [1]
    assert text(rounds) == text(PLAIN)
    assert per_token_s(rounds) < 1.03 * per_token_s(PLAIN)


@pytest.mark.parametrize(("others", "forwards"), [({}, [1]), ({"lookup": LookupDrafter()}, [])])
def test_the_price_of_a_draft_model_is_not_paid_by_the_first_drafts_of_others(others, forwards) -> None:
    clock = VirtualClock()
    target, draft = (FakeGraph(VOCAB, 1024, logits=LOGITS, costs_s=VERIFY_S, clock=clock) for _ in range(2))
    drafters = {**others, "model": ModelDrafter(draft)}
    list(Engine(target, drafters, clock=clock).decode(PROMPT, Request(max_new_tokens=6)))
    assert draft.forwards == forwards


def test_a_prompt_that_is_too_slow_to_read_is_found_out_by_its_first_piece() -> None:
    rounds, draft, engine = decoded("auto", 0.004, 0.004, n=160)
    assert draft.forwards[:3] == [1, 1, FIRST_PIECE]
    assert sum(draft.forwards) < 60
    assert text(rounds)[:48] == text(PLAIN)
    assert sum(part.plan.reason.startswith("catching up is too slow") for part in rounds) == 1
    assert engine.planner.to_dict()["catch_up_s"]["model"] == pytest.approx(0.004, rel=0.05)


def test_the_first_price_of_a_step_has_no_prompt_in_it_and_all_of_what_ran_is_counted() -> None:
    rounds, draft, engine = decoded("auto", 0.004, 0.0001, n=160)
    read = int(np.argmax(draft.forwards)) + 1
    assert draft.forwards[: read - 1] == [1, 1, FIRST_PIECE]
    assert draft.forwards[read - 1] > 300  # the rest of the prompt and of the text so far
    assert engine.planner.costs.draft_s["model"] == pytest.approx(0.004, rel=0.02)
    assert engine.planner.to_dict()["catch_up_s"]["model"] == pytest.approx(0.0001, rel=0.1)
    assert text(rounds)[:48] == text(PLAIN)
    stats = rounds[-1].stats
    assert stats.decode_s == pytest.approx(engine._clock() - stats.ttft_s)
    assert stats.draft_s + stats.verify_s == pytest.approx(stats.decode_s)
    assert per_token_s(rounds) < 0.7 * per_token_s(PLAIN)


def test_a_fixed_k_is_its_users_whatever_the_prompt_costs() -> None:
    rounds, draft, _ = decoded(2, 0.0145, 0.0033)
    assert draft.forwards[0] == 400
    assert all(part.plan.k == 2 for part in rounds[1:-1])


def test_a_short_prompt_is_not_in_the_price_of_a_step_either() -> None:
    clock = VirtualClock()
    costs_s = {1: 0.004, 6: 0.024}
    target = FakeGraph(VOCAB, 1024, logits=LOGITS, costs_s=VERIFY_S, clock=clock)
    draft = FakeGraph(VOCAB, 1024, logits=LOGITS, costs_s=costs_s, clock=clock)
    engine = Engine(target, {"model": ModelDrafter(draft, min_confidence=0.0)}, clock=clock)
    rounds = engine.decode(PROMPT[:5], Request(max_new_tokens=48))
    while not engine.planner.costs.draft_s:
        next(rounds)
    assert engine.planner.costs.draft_s["model"] <= 0.0065  # a step of 4 ms, and a first one with more tokens


def test_what_cannot_be_read_for_an_id_that_the_draft_lacks_teaches_no_price() -> None:
    clock, ids = VirtualClock(), np.arange(20)
    target = FakeGraph(VOCAB, 1024, logits=LOGITS, costs_s=VERIFY_S, clock=clock)
    draft = FakeGraph(VOCAB, 1024, logits=LOGITS, columns=ids, clock=clock)
    drafter = ModelDrafter(draft, VOCAB, vocab_ids=ids, known_ids=20)

    def ticking() -> float:
        clock.advance(1e-7)
        return clock()

    engine = Engine(target, {"model": drafter}, clock=ticking)
    rounds = list(engine.decode([25] * 100, Request(max_new_tokens=24)))
    assert len(rounds) == 24
    assert engine.planner.costs.draft_s == engine.planner.to_dict()["catch_up_s"] == {}


def test_lookup_drafts_where_the_text_holds_an_id_that_the_draft_model_lacks() -> None:
    clock = VirtualClock()

    def counting(width: int) -> LogitsFunction:
        return lambda seen: np.eye(width, dtype=np.float32)[(seen[-1] + 1) % 8] * 9

    target = FakeGraph(VOCAB, 512, logits=counting(VOCAB), costs_s=VERIFY_S, clock=clock)
    draft = FakeGraph(20, 512, logits=counting(20), costs_s={1: 1e-4, 512: 1e-4}, clock=clock)
    for costs in (None, {"verify_s": {1: 0.02, 8: 0.02}, "draft_s": {"model": 1e-4}}):
        drafters: dict[str, Drafter] = {"lookup": LookupDrafter(), "model": ModelDrafter(draft)}
        engine = Engine(target, drafters, clock=clock, planner=Planner(costs))
        engine.reset()
        rounds = list(engine.decode([25, *(i % 8 for i in range(64))], Request(max_new_tokens=64)))
        assert {part.plan.drafter for part in rounds} == {None, "lookup"}
        assert sum(part.accepted for part in rounds) > 32


def test_of_a_prompt_that_its_context_cannot_hold_a_draft_is_only_behind_by_what_it_will_run() -> None:
    draft = FakeGraph(VOCAB, 64, logits=LOGITS)
    drafter, sampling = ModelDrafter(draft, min_confidence=0.0), Sampling()
    behind = drafter.backlog(PROMPT)
    drafter.propose(PROMPT, 1, sampling, np.random.default_rng(0))
    assert draft.forwards == [behind] == [32]


def test_tokens_that_run_again_when_a_window_slides_are_a_catch_up_and_not_in_the_price_of_a_step() -> None:
    clock = VirtualClock()
    target = FakeGraph(VOCAB, 1024, logits=LOGITS, costs_s=VERIFY_S, clock=clock)
    draft = FakeGraph(VOCAB, 256, logits=LOGITS, costs_s={1: 0.004, 256: 0.029}, clock=clock)
    drafter = ModelDrafter(draft, min_confidence=0.0)
    engine = Engine(target, {"model": drafter}, clock=clock)
    starts, steps_s = set(), []
    for _ in engine.decode(PROMPT[:20], Request(max_new_tokens=600)):
        starts.add(drafter._start)
        steps_s += engine.planner.costs.draft_s.values()
    assert len(starts) >= 4
    assert max(steps_s) < 0.0045  # no window is in the price of a step
    assert engine.planner.to_dict()["catch_up_s"]["model"] == pytest.approx(1e-4, rel=0.3)
