"""Costs in joules from intervals: recovered where the data tell them apart, the prior's where they do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Energy
from outrider.errors import UsageError
from outrider.power.energy import Activity, EnergyModel, round_energy, stage_estimates

STATIC, E0, E1, DRAFT = 1.5, 0.22, 0.10, 0.05
WIDTHS = (1, 2, 3, 4, 5)
PRIOR = Energy(3.0, {w: 0.1 + 0.2 * w for w in WIDTHS}, {"model": 0.15})


def joules(activity, scale=1.0):
    rows = sum(w * n for w, n in activity.verify.items())
    forwards = sum(activity.verify.values())
    steps = sum(activity.draft.values())
    return STATIC * activity.seconds + scale * (E0 * forwards + E1 * rows + DRAFT * steps)


def intervals(seed, n=200, pause=True, widths=WIDTHS, varied=True):
    """About a second each: rounds of some width, not every one drafted in full, and sometimes a pause."""
    rng = random.Random(seed)
    for _ in range(n):
        width, rounds = rng.choice(widths), rng.randint(6, 12)
        steps = rounds * (width - 1) - (rng.randint(0, rounds) if varied else 0)
        draft = {"model": max(steps, 0)} if width > 1 else {}
        rest = rng.choice([0.0, 0.0, 0.4, 2.0]) if pause else 0.0
        yield Activity(rounds * (0.07 + 0.01 * width) + rest, {width: rounds}, draft)


def taught(model, seed=0, noise=0.03, scale=1.0, **more):
    rng = random.Random(seed + 1)
    for activity in intervals(seed, **more):
        model.observe(activity, joules(activity, scale) * rng.gauss(1.0, noise))
    return model


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_costs_are_recovered_from_noisy_intervals_without_a_prior(seed):
    energy = taught(EnergyModel(None, ["model"]), seed).energy(WIDTHS)
    assert energy.static_w == pytest.approx(STATIC, rel=0.1)
    for width in WIDTHS:
        assert energy.verify_j[width] == pytest.approx(E0 + E1 * width, rel=0.15)
    assert energy.draft_j["model"] == pytest.approx(DRAFT, abs=0.03)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_a_wrong_prior_is_overruled_by_informative_data(seed):
    energy = taught(EnergyModel(PRIOR, ["model"]), seed).energy(WIDTHS)
    assert energy.static_w == pytest.approx(STATIC, rel=0.15)
    for width in WIDTHS:
        assert energy.verify_j[width] == pytest.approx(E0 + E1 * width, rel=0.2)


def test_a_prior_is_the_answer_before_any_data():
    energy = EnergyModel(PRIOR, ["model"]).energy(WIDTHS)
    assert energy.static_w == pytest.approx(PRIOR.static_w)
    assert energy.verify_j == pytest.approx(PRIOR.verify_j)
    assert energy.draft_j == pytest.approx(PRIOR.draft_j)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_rounds_are_right_even_where_rows_and_draft_steps_always_come_together(seed, prior):
    model = taught(EnergyModel(PRIOR if prior else None, ["model"]), seed, varied=False)
    energy = model.energy(WIDTHS)
    for width in WIDTHS:
        true = E0 + E1 * width + DRAFT * (width - 1)
        assert round_energy(energy, 0.0, width, "model", width - 1) == pytest.approx(true, rel=0.15)


def test_one_width_alone_leaves_its_split_to_the_prior_but_gets_its_sum_right():
    activity = Activity(0.8, {3: 10}, {"model": 20})
    model = EnergyModel(PRIOR, ["model"])
    for _ in range(200):
        model.observe(activity, 7.0)
    energy = model.energy(WIDTHS)
    total = round_energy(energy, 0.08, 3, "model", 2)
    assert total == pytest.approx(0.7, rel=0.02)
    ratio = PRIOR.verify_j[3] / PRIOR.static_w
    assert energy.verify_j[3] / energy.static_w == pytest.approx(ratio, rel=0.75)


def test_what_a_calibrated_prior_says_of_single_widths_is_kept():
    bent = Energy(1.5, {1: 0.30, 2: 0.34, 3: 0.60, 4: 0.62}, {})
    energy = EnergyModel(bent).energy(bent.verify_j)
    assert energy.verify_j == pytest.approx(bent.verify_j)


def test_without_a_prior_nothing_is_known_until_the_data_tell_the_costs_apart():
    model = EnergyModel(None, ["model"])
    assert model.energy(WIDTHS) is None
    for activity in list(intervals(1, n=7)):
        model.observe(activity, joules(activity))
    assert model.energy(WIDTHS) is None
    same = EnergyModel(None, ["model"])
    for _ in range(100):
        same.observe(Activity(0.8, {1: 10}), joules(Activity(0.8, {1: 10})))
    assert same.energy([1, 5]) is None
    assert taught(EnergyModel(None, ["model"])).energy(WIDTHS) is not None


def test_a_drafter_that_never_ran_is_not_given_a_cost_without_a_prior():
    energy = taught(EnergyModel(None, ["model", "lookup"])).energy(WIDTHS)
    assert set(energy.draft_j) == {"model"}


def test_heat_that_makes_work_dearer_is_followed():
    model = taught(EnergyModel(PRIOR, ["model"]))
    taught(model, seed=5, scale=1.3, n=150)
    energy = model.energy(WIDTHS)
    for width in WIDTHS:
        assert energy.verify_j[width] == pytest.approx(1.3 * (E0 + E1 * width), rel=0.15)


def test_after_a_clock_change_it_is_followed_faster():
    def off(told):
        model = taught(EnergyModel(PRIOR, ["model"], memory_s=300.0))
        if told:
            model.clock_changed()
        taught(model, seed=7, scale=0.6, n=12)
        return abs(model.energy([3]).verify_j[3] - 0.6 * (E0 + 3 * E1))

    assert off(True) < 0.5 * off(False)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 199), st.sampled_from([0.0, 10.0, 1000.0]), st.booleans())
def test_one_outlier_moves_little_wherever_it_comes(at, factor, prior):
    model = EnergyModel(PRIOR if prior else None, ["model"])
    rng = random.Random(3)
    for i, activity in enumerate(intervals(2)):
        model.observe(activity, joules(activity) * (factor if i == at else rng.gauss(1.0, 0.02)))
    energy = model.energy(WIDTHS)
    for width in WIDTHS:
        assert energy.verify_j[width] == pytest.approx(E0 + E1 * width, rel=0.2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.01, 10.0), st.integers(1, 9), st.integers(0, 50), st.floats(0.0, 1e4)),
        max_size=40,
    ),
    st.booleans(),
)
def test_no_cost_is_ever_negative_or_nan_whatever_was_measured(seen, prior):
    model = EnergyModel(PRIOR if prior else None, ["model"])
    for seconds, width, rounds, measured in seen:
        model.observe(Activity(seconds, {width: rounds}, {"model": rounds * (width - 1)}), measured)
    energy = model.energy(range(1, 10))
    assert energy is not None or not prior
    if energy is not None:
        costs = [energy.static_w, *energy.verify_j.values(), *energy.draft_j.values()]
        assert all(0.0 <= cost < 1e9 for cost in costs)


def test_nonsense_is_left_out():
    model = taught(EnergyModel(PRIOR, ["model"]))
    before = model.energy(WIDTHS)
    for seconds, measured in ((0.0, 1.0), (-1.0, 1.0), (1.0, float("nan")), (1.0, float("inf")), (1.0, -5.0)):
        model.observe(Activity(seconds, {1: 5}), measured)
    assert model.energy(WIDTHS) == before


def test_idle_time_pins_static_power_down():
    model = EnergyModel(PRIOR, ["model"])
    for _ in range(30):
        model.observe(Activity(1.0), STATIC)
    assert model.energy([1]).static_w == pytest.approx(STATIC, rel=0.05)
    assert model.intervals == 0


def test_a_long_pause_does_not_forget_what_work_costs():
    model = taught(EnergyModel(None, ["model"]))
    for _ in range(60):
        model.observe(Activity(1.0), STATIC)
    assert model.energy(WIDTHS).verify_j[3] == pytest.approx(E0 + 3 * E1, rel=0.15)


def test_unknown_drafters_are_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'eagle' is not known to the energy model; known: model"):
        EnergyModel(PRIOR, ["model"]).observe(Activity(1.0, {2: 1}, {"eagle": 1}), 1.0)
    with pytest.raises(UsageError, match="knows no width"):
        EnergyModel(Energy(1.0, {}))


def test_stage_estimates_are_what_the_costs_say():
    energy = Energy(2.0, {1: 0.3, 4: 0.6}, {"model": 0.1})
    work = {
        "draft": Activity(1.0, {}, {"model": 12}),
        "verify": Activity(2.0, {4: 4}),
        "other": Activity(0.5),
    }
    assert stage_estimates(energy, work) == pytest.approx({"draft": 3.2, "verify": 6.4, "other": 1.0})


def test_pauses_are_charged_at_the_power_of_rest_and_not_to_the_work():
    prior = Energy(2.0, {1: 0.5, 2: 0.6}, {}, idle_w=0.8)
    model = EnergyModel(prior)
    for _ in range(200):
        model.observe(Activity(2.0, {1: 4}, {}, paused_s=1.0), 2.0 * 1.0 + 4 * 0.5 + 0.8 * 1.0)
    found = model.energy([1, 2])
    assert found is not None
    assert found.static_w == pytest.approx(2.0, rel=0.02)
    assert found.verify_j[1] == pytest.approx(0.5, rel=0.02)
    assert found.idle_w == 0.8


def test_rest_teaches_what_rest_draws():
    model = EnergyModel(Energy(2.0, {1: 0.5}, {}, idle_w=0.8))
    for _ in range(100):
        model.observe(Activity(1.0, paused_s=1.0), 1.1)
    found = model.energy([1])
    assert found is not None
    assert found.idle_w == pytest.approx(1.1, rel=0.01)
    assert found.static_w == 2.0
