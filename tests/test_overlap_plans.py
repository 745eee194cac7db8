"""When to overlap: plans, what the planner learns, and what changes them in the middle of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.overlap.soak import Faulty
from outrider.contracts import Costs, Energy, Limits, Objective, Plan
from outrider.errors import UsageError
from outrider.power.governor import Directive
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.overlap import can_overlap
from outrider.runtime.planner import Acceptance, Modes, Observation, Planner, choose
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeDrafter, FakeGraph
from tests.overlapping import (
    LOGITS,
    PLAIN,
    PROMPT,
    VOCAB,
    engine,
    no_thread_is_left,  # noqa: F401
    overlapped,
    text,
    timed,
)

SPEED = Objective()


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
