"""The one chooser: argmax from measured costs, plain decoding as a normal state, losses bounded."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Costs, Energy, Limits, Objective, Plan, Proposal
from outrider.errors import UsageError
from outrider.runtime.costs import CostEstimates, verify_time
from outrider.runtime.evidence import Stint, Text
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.planner import (
    Acceptance,
    Observation,
    Planner,
    choose,
    expected_tokens,
)
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeGraph, VirtualClock
from outrider.targets.trace_model import Stage, TraceDrafter, TraceTarget, read_acceptance

ACCEPTANCE = Path(__file__).parents[1] / "benchmarks/power/data/acceptance.jsonl"
CPU = {1: 0.042, 2: 0.051, 3: 0.064, 5: 0.088, 8: 0.126}  # a 1.5B model on two cores
FLAT = {1: 0.042, 16: 0.045}
SPEED = Objective()


def plan_for(acceptance, costs=CPU, k_max=7, draft_s=0.0, **limits):
    given_costs = Costs(costs, {"d": draft_s})
    return choose(given_costs, Acceptance({"d": (acceptance,)}), SPEED, Limits(k_max, **limits))


def test_expected_tokens_is_the_geometric_sum_for_one_acceptance():
    assert expected_tokens((0.5,), 3) == 1 + 0.5 + 0.25 + 0.125
    assert expected_tokens((0.9, 0.5), 2) == 1 + 0.9 + 0.45
    assert expected_tokens((0.9,), 0) == 1


def test_trap_18_verify_time_is_measured_by_width_and_interpolated():
    assert verify_time(CPU, 2) == 0.051
    assert verify_time(CPU, 4) == pytest.approx((0.064 + 0.088) / 2)
    assert verify_time(CPU, 11) > verify_time(CPU, 8)


def test_verify_time_never_falls_with_width_in_spite_of_noise():
    noisy = {1: 0.05, 2: 0.04, 4: 0.08, 5: 0.07}
    times = [verify_time(noisy, width) for width in range(1, 9)]
    assert times == sorted(times)


@given(st.dictionaries(st.integers(1, 20), st.floats(0.01, 1.0), min_size=1), st.integers(1, 25))
def test_verify_time_is_positive_and_monotone_for_any_measurements(measured, width):
    assert 0 < verify_time(measured, width) <= verify_time(measured, width + 1) + 1e-12


def test_speculation_pays_on_a_cpu_only_at_high_acceptance():
    assert plan_for(0.1).k == 0
    assert plan_for(0.4).k == 1
    assert plan_for(0.95).k >= 4


def test_a_flat_verify_makes_long_drafts_pay():
    assert plan_for(0.8, FLAT, k_max=15).k > plan_for(0.8, CPU, k_max=15).k


def test_a_costly_draft_is_drafted_less():
    assert plan_for(0.8, FLAT, draft_s=0.03).k < plan_for(0.8, FLAT, draft_s=0.001).k


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    st.floats(0.0, 0.05),
    st.lists(st.floats(0.01, 0.3), min_size=5, max_size=5),
    st.integers(1, 8),
)
@settings(deadline=None)
def test_choose_is_the_argmax_over_every_k(conditional, draft_s, times, k_max):
    verify_s = dict(zip((1, 2, 3, 5, 8), sorted(times), strict=True))
    costs, acceptance = Costs(verify_s, {"d": draft_s}, 0.001), tuple(conditional)
    plan = choose(costs, Acceptance({"d": acceptance}), SPEED, Limits(k_max))
    rates = [
        expected_tokens(acceptance, k) / (k * draft_s + verify_time(verify_s, k + 1) + 0.001)
        for k in range(k_max + 1)
    ]
    assert rates[plan.k] >= max(rates) / SPEED.margin - 1e-12
    assert plan.k == 0 or rates[plan.k] == pytest.approx(max(rates))


def test_trap_20_unused_columns_of_a_compiled_width_are_filled():
    costs = {1: 0.04, 8: 0.05}
    assert plan_for(0.6, costs, k_max=7, widths=(1, 8)).k == 7


def test_trap_19_a_slower_target_drafts_more_and_a_slower_draft_less():
    usual = plan_for(0.8, FLAT, draft_s=0.01).k
    hot_target = plan_for(0.8, {w: 2 * s for w, s in FLAT.items()}, draft_s=0.01).k
    hot_draft = plan_for(0.8, FLAT, draft_s=0.02).k
    assert hot_draft < usual < hot_target


def test_a_catch_up_must_be_earned_back_within_the_horizon():
    assert plan_for(0.7, FLAT, draft_s=0.005, catch_up_s={"d": 1.0}, horizon=512).k > 0
    assert plan_for(0.7, FLAT, draft_s=0.005, catch_up_s={"d": 1.0}, horizon=4).k == 0


def test_no_draft_risks_more_than_its_account_holds():
    assert plan_for(0.95, risk_s={"d": 0.010}).k == 1
    assert plan_for(0.95, risk_s={"d": 0.001}).k == 0


def test_the_better_drafter_is_chosen():
    costs = Costs(CPU, {"cheap": 0.0, "sure": 0.002})
    better = Acceptance({"cheap": (0.4,), "sure": (0.9,)})
    assert choose(costs, better, SPEED, Limits(4)).drafter == "sure"


def test_choosing_needs_a_measurement():
    with pytest.raises(UsageError, match="plain round"):
        choose(Costs({}), Acceptance({}), SPEED, Limits(4))


def test_an_unknown_objective_is_refused():
    with pytest.raises(UsageError, match="latency, energy, balanced"):
        Objective("joy")


def observe(planner, plan, drafted, accepted, seconds, **options):
    evaluated = min(drafted, accepted + 1)
    planner.observe(
        Observation(
            plan, drafted, evaluated, accepted, accepted + 1, seconds, 0.0, seconds, 1 + drafted, **options
        )
    )


def test_a_fresh_planner_measures_a_plain_step_first_then_the_drafter():
    planner = Planner()
    plan = planner.plan({"d": "4"}, 7)
    assert (plan.k, plan.drafter) == (0, None)
    observe(planner, plan, 0, 0, 0.042)
    assert planner.plan({"d": "4"}, 7) == Plan("d", 1, reason="measuring the drafter")


def test_proposals_that_are_seldom_right_are_drafted_only_where_measured_costs_speak_for_it():
    fresh = Planner()
    observe(fresh, Plan(None, 0, "none"), 0, 0, 0.042)
    assert fresh.plan({"d": "1"}, 7).k == 0
    assert fresh.plan({"d": "2"}, 7).reason == "measuring the drafter"
    dear, cheap = (Planner({"verify_s": v, "draft_s": {"d": 0.0}}) for v in (CPU, {1: 0.042, 16: 0.045}))
    for _ in range(100):
        plan = dear.plan({"d": "1"}, 7)
        assert plan.k == 0
        observe(dear, plan, 0, 0, 0.042)
    assert cheap.plan({"d": "1"}, 7).k > 0


def test_a_fixed_k_is_not_spent_on_proposals_that_are_seldom_right():
    tokens, clock = random_tokens(120, 3), VirtualClock()
    drafts = {}
    for kind in ("1", "2"):
        drafter = Guess(tokens, [True] * 120, 0.0, clock)
        drafter.kind = lambda context, kind=kind: kind
        engine = Engine(Script(tokens, CPU, clock), {"d": drafter}, clock=clock)
        drafts[kind] = sum(r.drafted for r in engine.decode(tokens[:100], Request(max_new_tokens=20, k=3)))
    assert drafts["1"] == 0 < drafts["2"]


def test_a_machine_that_hangs_in_a_round_with_a_draft_does_not_end_drafting():
    planner = Planner({"verify_s": CPU, "draft_s": {"d": 0.0}})
    observe(planner, Plan("d", 1), 1, 1, 5.0, kind="8")
    assert planner.plan({"d": "8"}, 7).k > 0


def test_what_a_draft_model_takes_is_measured_once_that_leaves_something_for_drafts_that_need_no_reading():
    planner = Planner({"draft_s": {"lookup": 0.0}})
    observe(planner, Plan(None, 0, "none"), 0, 0, 0.042)
    assert planner.wants_price("model")
    assert not planner.wants_price("model", alone=False)
    for _ in range(20):
        observe(planner, Plan(None, 0, "none"), 0, 0, 0.042)
    assert planner.wants_price("model", alone=False)
    planner.price_step("model", 0.5)  # its first forward loads the weights
    for _ in range(20):
        observe(planner, Plan(None, 0, "none"), 0, 0, 0.042)
    assert planner.plan({"lookup": "8"}, 7).k > 0


def test_trap_17_cut_rounds_and_misses_do_not_train_acceptance():
    planner = Planner({"verify_s": CPU, "draft_s": {"d": 0.0}})
    before = planner.acceptance({"d": "4"})
    planner.plan({"d": "4"}, 7)
    observe(planner, Plan("d", 4), 4, 0, 0.088, kind="4", cut=True)
    observe(planner, Plan("d", 4), 0, 0, 0.042)
    assert planner.acceptance({"d": "4"}) == before


def test_trap_17_only_evaluated_positions_are_trained():
    planner = Planner({"verify_s": CPU, "draft_s": {"d": 0.0}})
    for _ in range(30):
        planner.plan({"d": "4"}, 7)
        observe(planner, Plan("d", 4), 4, 1, 0.088, kind="4")
    first, second, *_ = planner.acceptance({"d": "4"}).conditional["d"]
    assert first > 0.9
    assert second < 0.2


def test_acceptance_is_kept_apart_by_the_kind_of_proposal():
    planner = Planner({"verify_s": CPU, "draft_s": {"d": 0.0}})
    for _ in range(60):
        observe(planner, Plan(None, 0, "none"), 0, 0, 0.042)
    for _ in range(6):
        planner.plan({"d": "2"}, 7)
        observe(planner, Plan("d", 1), 1, 0, 0.051, kind="2")
    assert planner.plan({"d": "2"}, 7).k == 0
    assert planner.plan({"d": "32"}, 7).k > 0


def test_an_account_stops_a_drafter_whose_every_estimate_is_too_hopeful():
    planner, drafts = Planner({"verify_s": CPU, "draft_s": {"d": 0.0}}), 0
    for i in range(200):
        plan = planner.plan({"d": f"never seen {i}"}, 7)
        drafts += plan.k > 0
        observe(planner, plan, plan.k, 0, verify_time(CPU, plan.k + 1), kind=f"never seen {i}")
    assert 0 < drafts < 40


def test_probes_are_rare_and_bring_drafting_back_when_they_succeed():
    planner = Planner({"verify_s": CPU, "draft_s": {"d": 0.0}})
    for _ in range(10):
        planner.plan({"d": "4"}, 7)
        observe(planner, Plan("d", 1), 1, 0, CPU[2], kind="4")
    seen = []
    for _ in range(2000):
        plan = planner.plan({"d": "4"}, 7)
        seen.append(plan.reason)
        observe(planner, plan, plan.k, 0, verify_time(CPU, plan.k + 1), kind="4")
    assert 3 <= sum(reason == "probe" for reason in seen) <= 20
    assert all(reason == "probe" or "promises" in reason for reason in seen)
    for _ in range(1500):
        plan = planner.plan({"d": "4"}, 7)
        observe(planner, plan, plan.k, plan.k, verify_time(CPU, plan.k + 1), kind="4")
    assert plan.k > 1


def test_costs_survive_a_round_trip_through_json():
    planner = Planner()
    observe(planner, Plan(None, 0, "none"), 0, 0, 0.042)
    planner.plan({"d": "4"}, 7)
    observe(planner, Plan("d", 1), 1, 1, 0.051)
    stored = json.loads(json.dumps(planner.to_dict()))
    assert Planner(stored).to_dict() == stored
    assert Planner(stored).plan({"d": "32"}, 7).k > 0


def test_a_single_outlier_moves_a_cost_little():
    planner = Planner({"verify_s": {1: 0.04}, "draft_s": {}})
    observe(planner, Plan(None, 0, "none"), 0, 0, 4.0)
    assert planner.costs.verify_s[1] < 0.05


def test_widths_not_run_for_long_follow_a_machine_that_slows_down():
    planner = Planner({"verify_s": {1: 0.04, 4: 0.06}, "draft_s": {}})
    for _ in range(300):
        observe(planner, Plan(None, 0, "none"), 0, 0, 0.08)
    assert planner.costs.verify_s[1] == pytest.approx(0.08, rel=0.01)
    assert planner.costs.verify_s[4] > 0.08


VOCAB = 2000


class Script(FakeGraph):
    """A target whose text is given; forwards take the time of their width."""

    def __init__(self, tokens, costs_s, clock):
        row = np.zeros(VOCAB, np.float32)
        rows = {}

        def logits(context):
            token = tokens[min(len(context), len(tokens) - 1)]
            if token not in rows:
                rows[token] = row.copy()
                rows[token][token] = 9.0
            return rows[token]

        super().__init__(VOCAB, 600, logits=logits, costs_s=costs_s, clock=clock)


class Guess:
    """A drafter that knows the script and is right as often as it is told."""

    name = "guess"

    def __init__(self, tokens, right, step_s, clock):
        self.tokens, self.right, self.step_s, self.clock = tokens, right, step_s, clock

    def propose(self, context, k, sampling, rng):
        self.clock.advance(k * self.step_s)
        places = [min(len(context) + i, len(self.tokens) - 1) for i in range(k)]
        tokens = [self.tokens[p] if self.right[p] else (self.tokens[p] + 1) % VOCAB for p in places]
        return Proposal(np.array(tokens), np.arange(-1, k - 1))

    def observe(self, committed, output, rows):
        pass

    def reset(self):
        pass


def seconds(tokens, k, costs_s, drafter=None, planner=None):
    """Decode time of a scripted text on the virtual clock."""
    clock = VirtualClock()
    made = drafter(clock) if drafter else LookupDrafter()
    engine = Engine(Script(tokens, costs_s, clock), {"d": made}, planner, clock=clock)
    *_, last = engine.decode(tokens[:100], Request(max_new_tokens=len(tokens) - 100, k=k))
    return last.stats.decode_s


def random_tokens(n, seed, common=40):
    return np.random.default_rng(seed).integers(0, common, n).tolist()


@pytest.mark.parametrize("common", [12, 40, 2000])
def test_auto_never_loses_more_than_three_percent_where_nothing_repeats(common):
    planner, plain, auto = Planner(), 0.0, 0.0
    for seed in range(4):
        tokens = random_tokens(400, seed, common)
        plain += seconds(tokens, 0, CPU)
        auto += seconds(tokens, "auto", CPU, planner=planner)
    assert plain / auto > 0.97


@pytest.mark.parametrize("step_s", [0.0, 0.004, 0.02])
def test_wherever_a_text_ends_drafts_that_were_all_wrong_cost_it_three_percent(step_s):
    tokens, clock = random_tokens(300, 6, 2000), VirtualClock()
    planner = Planner({"verify_s": CPU, "draft_s": {"d": step_s}})
    wrong = Guess(tokens, [False] * 300, step_s, clock)
    late, drafted = [], 0
    engine = Engine(Script(tokens, CPU, clock), {"d": wrong}, planner, clock=clock)
    for part in engine.decode(tokens[:100], Request(max_new_tokens=150)):
        late.append(part.stats.decode_s / (CPU[1] * max(1, part.stats.output_tokens - 1)))
        drafted += part.drafted
    assert max(late[Text.shortest :]) < 1 / 0.97
    assert drafted >= 3


def test_what_was_paid_to_read_a_text_is_not_lost_to_the_first_bad_drafts():
    planner = Planner({"verify_s": CPU, "draft_s": {"d": 0.004}, "catch_up_s": {"d": 0.001}})
    for _ in range(2):
        observe(planner, Plan("d", 1), 1, 0, 0.055)
    assert planner.plan({"d": ""}, 7).k == 0
    planner.saw_catch_up("d", 200, 0.2, 200)
    assert planner.plan({"d": ""}, 7).k > 0


def test_what_drafts_won_on_a_text_may_be_lost_on_the_next_up_to_a_plain_step():
    text, first = Text(), Text().purse
    for won, credit in ((5.0, Text.credit), (0.4, 0.4), (-3.0, 0.0)):
        text.won = won
        text.begin()
        assert text.purse == pytest.approx(first + credit)


class RecordedTarget(TraceTarget):
    """The target of an acceptance trace, whose forwards take time."""

    def __init__(self, stage, clock):
        super().__init__(stage)
        self.clock = clock

    def forward(self, tokens, *arguments, **options):
        self.clock.advance(verify_time(CPU, min(len(tokens), 16)))
        return super().forward(tokens, *arguments, **options)


class RecordedDraft(TraceDrafter):
    """The draft model of one: a step takes 0.3 of a plain one, a token of a prompt a fifth of that."""

    def __init__(self, stage, clock):
        super().__init__("model", stage)
        self._machine = self._cost = clock

    def _execute(self, width, length):
        self._machine.advance(0.0126 + 0.0025 * (width - 1))


def recorded_seconds(text, k):
    """Decode time of a recorded answer by a process that has written nothing before."""
    clock, stage = VirtualClock(), Stage()
    prompt = stage.begin(text)
    drafters = {"lookup": TraceDrafter("lookup", stage), "model": RecordedDraft(stage, clock)}
    planner = Planner({"verify_s": CPU, "draft_s": {"lookup": 6e-5, "model": 0.0126}})
    engine = Engine(RecordedTarget(stage, clock), drafters, planner, clock=clock)
    *_, last = engine.decode(prompt, Request(max_new_tokens=text.tokens, k=k))
    return last.stats.decode_s


def test_auto_loses_no_three_percent_of_any_short_answer_of_a_real_pair():
    """A draft that reads the prompt of an answer of 16 tokens takes as long as twelve of them: nobody says how long."""
    short = [text for text in read_acceptance(ACCEPTANCE) if text.tokens <= 40]
    assert len(short) == 13
    gains = [recorded_seconds(text, 0) / recorded_seconds(text, "auto") for text in short]
    assert min(gains) > 0.97
    assert sum(gains) / len(gains) > 1.04


def test_auto_reaches_the_best_fixed_k_where_the_text_copies():
    tokens = random_tokens(100, 1, 2000)
    for start in (10, 40, 0, 25, 5, 50):
        tokens += [*tokens[start : start + 45], *random_tokens(2, start, 2000)]
    best = min(seconds(tokens, k, CPU) for k in (1, 2, 3, 4, 7))
    assert best < 0.8 * seconds(tokens, 0, CPU)
    assert best / seconds(tokens, "auto", CPU) > 0.98


@pytest.mark.parametrize("figures", [(0.02, 0.05), (0.05, 0.02)])
def test_of_the_first_two_figures_the_lesser_counts(figures):
    estimates = CostEstimates({})
    for seconds in figures:
        estimates.learn_verify(1, seconds, 0.0)
        estimates.learn_draft("model", 1, 0.1 * seconds, 0)
    assert estimates.verify_s == {1: 0.02}
    assert estimates.draft_s == {"model": pytest.approx(0.002)}


@pytest.mark.parametrize("first_s", [0.042, 0.4])
def test_what_runs_for_the_first_time_and_loads_something_is_not_taken_for_slow(first_s):
    """The first draft loaded a library, for as long as a plain step of a small model; lookup was never used again."""

    class Cold(Script):
        def forward(self, tokens, *arguments, **options):
            if 1 < len(tokens) < 20 and len(tokens) not in warm:
                clock.advance(first_s)
            warm.add(len(tokens))
            return super().forward(tokens, *arguments, **options)

    class ColdLookup(LookupDrafter):
        cold = True

        def propose(self, *arguments):
            if self.cold:
                clock.advance(first_s)
            self.cold = False
            return super().propose(*arguments)

    copied = random_tokens(100, 1, 2000)
    for start in (10, 40, 0, 25, 5, 50):
        copied += [*copied[start : start + 45], *random_tokens(2, start, 2000)]
    clock, planner, drafter, warm = VirtualClock(), Planner(), ColdLookup(), set()
    for tokens in (random_tokens(150, 7, 12), copied, copied):  # the first text gives no reason to draft
        engine = Engine(Cold(tokens, CPU, clock), {"d": drafter}, planner, clock=clock)
        *_, last = engine.decode(tokens[:100], Request(max_new_tokens=len(tokens) - 100))
        drafter.reset()
    assert last.stats.decode_s < 0.6 * seconds(copied, 0, CPU)


def test_auto_recovers_when_text_turns_predictable_after_a_long_bad_stretch():
    tokens = random_tokens(300, 3, 12)
    tokens += tokens[20:280]
    good = slice(300, None)
    alone = tokens[:100] + tokens[good]
    tail_alone = seconds(alone, "auto", CPU)
    whole, bad = seconds(tokens, "auto", CPU), seconds(tokens[:300], "auto", CPU)
    assert whole - bad < 1.3 * tail_alone + 5 * CPU[1]


@pytest.mark.parametrize(("right", "step_s"), [(0.1, 0.004), (0.5, 0.012), (0.7, 0.02)])
def test_a_draft_model_that_does_not_pay_is_switched_off(right, step_s):
    tokens = random_tokens(500, 5, 2000)
    hits = np.random.default_rng(1).random(len(tokens)) < right
    auto = seconds(tokens, "auto", CPU, lambda clock: Guess(tokens, hits, step_s, clock))
    assert seconds(tokens, 0, CPU) / auto > 0.96


def test_a_draft_model_that_pays_is_used():
    tokens = random_tokens(500, 5, 2000)
    hits = np.random.default_rng(1).random(len(tokens)) < 0.85
    drafter = lambda clock: Guess(tokens, hits, 0.004, clock)  # noqa: E731
    fixed = min(seconds(tokens, k, FLAT, drafter) for k in (1, 2, 4, 7))
    assert fixed / seconds(tokens, "auto", FLAT, drafter) > 0.95


def test_the_same_observations_give_the_same_plans():
    def plans():
        planner, out = Planner(), []
        for i in range(60):
            plan = planner.plan({"d": "4"} if i % 3 else {}, 7)
            out.append(plan)
            observe(planner, plan, plan.k, plan.k * (i % 2), 0.04 + 0.01 * plan.k, kind="4")
        return out

    assert plans() == plans()


def test_limits_can_forbid_plain_decoding_for_a_probe():
    limits = Limits(3, plain_allowed=False)
    costs = Costs(CPU, {"d": 0.0})
    assert choose(costs, Acceptance({"d": (0.01,)}), SPEED, limits).k == 1
    assert choose(costs, Acceptance({"d": (0.01,)}), SPEED, replace(limits, plain_allowed=True)).k == 0


ENERGY = Energy(1.5, {1: 0.32, 2: 0.42, 3: 0.52, 5: 0.72, 8: 1.02}, {"d": 0.05})
PI = {1: 0.072, 6: 0.072, 9: 0.108}  # the toy of a Raspberry Pi 5: flat until compute binds


def brute_force(costs, conditional, limits, kind):
    """(k, tokens/s, J/token, W) of every k, by the formulas alone."""
    rows, energy = [], costs.energy
    for k in range(limits.k_max + 1):
        work = verify_time(costs.verify_s, k + 1) + k * costs.draft_s["d"]
        dynamic = verify_time(energy.verify_j, k + 1) + k * energy.draft_j["d"]
        seconds = work / limits.duty
        if limits.power_w is not None:
            seconds = max(seconds, dynamic / (limits.power_w - energy.static_w))
        tokens, joules = expected_tokens(conditional, k), energy.static_w * seconds + dynamic
        per = {"latency": seconds / tokens, "energy": joules / tokens}
        per["balanced"] = per["latency"] * per["energy"]
        rows.append((per[kind], k, seconds - work, joules / seconds))
    return rows


@given(
    st.floats(0.05, 0.98),
    st.sampled_from(["latency", "energy", "balanced"]),
    st.one_of(st.none(), st.floats(3.0, 8.0)),
    st.floats(0.3, 1.0),
)
@settings(deadline=None)
def test_choose_is_the_argmax_of_every_objective_under_caps(a, kind, power_w, duty):
    costs = Costs(PI, {"d": 0.012}, energy=ENERGY)
    limits = Limits(8, power_w=power_w, duty=duty)
    plan = choose(costs, Acceptance({"d": (a,)}), Objective(kind), limits)
    rows = brute_force(costs, (a,), limits, kind)
    best, chosen = min(rows), rows[plan.k]
    assert chosen[0] <= best[0] * 1.02 + 1e-12
    assert plan.pace_s == pytest.approx(chosen[2], abs=1e-9)
    assert power_w is None or chosen[3] <= power_w + 1e-9


def plan_of(kind, a, **limits):
    costs = Costs(PI, {"d": 0.012}, energy=ENERGY)
    return choose(costs, Acceptance({"d": (a,)}), Objective(kind), Limits(8, **limits))


def test_the_plan_for_energy_drafts_no_more_than_the_plan_for_speed():
    ks = [(plan_of("energy", a).k, plan_of("latency", a).k) for a in (0.3, 0.5, 0.7, 0.85, 0.95)]
    assert all(energy <= speed for energy, speed in ks)
    assert any(energy < speed for energy, speed in ks)


def test_a_power_cap_is_held_by_shorter_drafts_and_a_pause():
    free, capped = plan_of("latency", 0.85), plan_of("latency", 0.85, power_w=4.0)
    assert 0 < capped.k <= free.k
    assert capped.pace_s > free.pace_s == 0.0


def test_a_cap_below_what_the_device_draws_anyway_is_paced_but_never_for_ever():
    assert plan_of("latency", 0.85, power_w=1.0).pace_s == pytest.approx(5.0)


def test_without_energy_every_objective_is_latency_and_a_power_cap_is_left_to_the_duty():
    costs, likely = Costs(PI, {"d": 0.012}), Acceptance({"d": (0.85,)})
    first, *others = [choose(costs, likely, Objective(kind), Limits(8, power_w=3.0)) for kind in KINDS]
    assert all(plan == first for plan in others)
    assert first.pace_s == 0.0
    assert choose(costs, likely, SPEED, Limits(8, duty=0.5)).pace_s > 0.0


def test_a_pause_draws_what_the_device_draws_at_rest():
    resting = replace(ENERGY, idle_w=0.5)
    costs, likely = Costs(PI, {"d": 0.012}, energy=resting), Acceptance({"d": (0.85,)})
    plan = choose(costs, likely, SPEED, Limits(8, power_w=1.2))
    work_s = PI[1] + plan.k * 0.012
    joules = 1.5 * work_s + verify_time(ENERGY.verify_j, plan.k + 1) + plan.k * 0.05
    assert plan.k > 0
    assert (joules + 0.5 * plan.pace_s) / (work_s + plan.pace_s) == pytest.approx(1.2)


KINDS = ("latency", "energy", "balanced")


@given(st.floats(0.2, 0.98), st.floats(0.5, 4.0), st.sampled_from(KINDS), st.sampled_from([1.0, 0.5]))
@settings(deadline=None)
def test_heat_never_raises_k_above_a_share_of_what_the_cool_machine_would_draft(a, slower, kind, share):
    hot = Costs({w: slower * s if w > 3 else s for w, s in PI.items()}, {"d": 0.002}, energy=ENERGY)
    cool, likely = Costs(PI, {"d": 0.012}), Acceptance({"d": (a,)})
    bound = math.ceil(share * choose(cool, likely, SPEED, Limits(8)).k)
    limits = Limits(8, reference=cool, k_share=share)
    assert choose(hot, likely, Objective(kind), limits).k <= bound


def test_a_drafter_that_is_not_allowed_is_not_chosen():
    costs = Costs(CPU, {"cheap": 0.0, "sure": 0.002})
    likely = Acceptance({"cheap": (0.7,), "sure": (0.95,)})
    assert choose(costs, likely, SPEED, Limits(4, drafters=frozenset({"cheap"}))).drafter == "cheap"


class Asked:
    """A directive: the objective and the limits that a test wants."""

    def __init__(self, kind="latency", **limits):
        self.objective, self.limits = Objective(kind), limits

    def limit(self, limits):
        return replace(limits, **self.limits)


def test_a_directive_shapes_the_plan_and_its_pauses():
    planner = Planner({"verify_s": PI, "draft_s": {"d": 0.012}})
    planner.energy = ENERGY
    free = planner.plan({"d": "4"}, 8)
    capped = planner.plan({"d": "4"}, 8, directive=Asked(power_w=4.0))
    assert 0 < capped.k <= free.k
    assert capped.pace_s > 0.0
    assert planner.plan({"d": "32"}, 8, directive=Asked(k_max=1)).k == 1
    assert planner.plan({"d": "32"}, 8, directive=Asked(drafters=frozenset())).k == 0
    assert planner.plan({}, 8, directive=Asked(duty=0.5)).pace_s == pytest.approx(PI[1])


def test_a_plan_fixed_by_its_user_keeps_its_k_and_is_paced():
    planner = Planner({"verify_s": PI, "draft_s": {"d": 0.012}})
    planner.energy = ENERGY
    plan = planner.paced(Plan("d", 4), Asked(power_w=4.0, k_max=1))
    assert plan.k == 4
    assert plan.pace_s > 0.0


@given(
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4),
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4),
    st.floats(0.0, 0.03),
)
@settings(deadline=None)
def test_drafts_that_stop_short_are_priced_by_their_chances(right, comes, step_s):
    costs, k_max = Costs(CPU, {"d": step_s}), 5
    at = lambda values, j: values[min(j, len(values) - 1)]  # noqa: E731
    scores = [1 / CPU[1]]
    for k in range(1, k_max + 1):
        seconds, tokens, whole, reach = 0.0, 1.0, 1.0, 1.0
        for d in range(k):
            seconds += whole * (1 - at(comes, d)) * (verify_time(CPU, d + 1) + (d + 1) * step_s)
            whole *= at(comes, d)
            reach *= at(comes, d) * at(right, d)
            tokens += reach
        seconds += whole * (verify_time(CPU, k + 1) + k * step_s)
        scores.append(tokens / seconds)
    likely = Acceptance({"d": tuple(right)}, {"d": tuple(comes)})
    plan = choose(costs, likely, SPEED, Limits(k_max))
    assert scores[plan.k] >= max(scores) / SPEED.margin - 1e-9


def test_a_drafter_that_seldom_proposes_what_it_is_asked_for_is_switched_off():
    planner, drafts = Planner({"verify_s": CPU, "draft_s": {"d": 0.03}}), []
    for i in range(300):
        plan = planner.plan({"d": ""}, 7)
        gives = plan.k if i % 5 == 0 else 0
        seconds = verify_time(CPU, gives + 1) + min(plan.k, gives + 1) * 0.03
        planner.observe(
            Observation(plan, gives, gives, gives, gives + 1, seconds, 0.03 * plan.k, seconds, 1 + gives)
        )
        drafts.append(plan.k > 0)
    assert sum(drafts[100:]) < 20


def test_a_catch_up_must_be_paid_for_by_the_tokens_until_the_next_one():
    stint = Stint()
    for _ in range(20):
        stint.add(3, 100)
        stint.add(3, 1)
    assert stint.tokens == pytest.approx(6, abs=0.5)
    for _ in range(20):
        stint.add(3, 2)
    assert stint.tokens == pytest.approx(6, abs=0.5), "what goes on is not counted before it ends"


def test_a_forward_that_took_no_time_by_a_coarse_clock_is_survived():
    planner = Planner()
    for _ in range(3):
        observe(planner, Plan(None, 0, "none"), 0, 0, 0.0)
    assert planner.plan({"d": "4"}, 7).k == 1


def test_a_draft_that_must_catch_up_again_and_again_is_asked_only_while_that_pays():
    """Each stint of the draft ends after one round (a lookup takes over), and 60 tokens then wait for it."""

    def drafts_after(stints, planner):
        for _ in range(stints):
            plan = Plan("d", 2)
            seconds = verify_time(FLAT, 3) + 0.01 + 60 * 0.002
            planner.observe(Observation(plan, 2, 2, 2, 3, seconds, 0.01 + 0.12, 0.043, 3, backlog=60))
        return planner.plan({"d": ""}, 7, {"d": 60}).k

    costs = {"verify_s": FLAT, "draft_s": {"d": 0.005}, "catch_up_s": {"d": 0.002}}
    assert drafts_after(0, Planner(costs)) > 0, "nothing says yet that the draft will not be used for long"
    assert drafts_after(25, Planner(costs)) == 0


def test_a_pause_costs_joules_at_the_power_of_rest():
    """Two plans under one duty: the longer pause of the slower one weighs what rest draws, not what work does."""
    likely = Acceptance({"d": (0.6,)})
    verify_j, draft_j = {1: 0.30, 2: 0.315}, {"d": 0.0}
    frugal = Costs({1: 0.1, 2: 0.2}, {"d": 0.0}, energy=Energy(0.05, verify_j, draft_j, idle_w=0.0))
    greedy = Costs({1: 0.1, 2: 0.2}, {"d": 0.0}, energy=Energy(0.05, verify_j, draft_j, idle_w=8.0))
    assert choose(frugal, likely, Objective("energy"), Limits(1, duty=0.5)).k == 1
    assert choose(greedy, likely, Objective("energy"), Limits(1, duty=0.5)).k == 0
