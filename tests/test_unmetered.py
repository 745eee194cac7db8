"""Where nothing meters: power and body temperature estimated from the profile, bounded, and flagged."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from outrider.errors import UsageError
from outrider.power.body_estimate import BodyEstimate
from outrider.power.governor import Governor, Policy
from outrider.power.state import State
from outrider.runtime.profiling.simulate import run_policy
from outrider.runtime.unmetered import Unmetered, ladder_of, unmetered
from outrider.targets.device import load_device
from outrider.targets.model_cost import TARGET_COST
from outrider.targets.scenario import Scenario
from tests.acceptance_texts import made_up_texts

PLAIN = TARGET_COST.work(1, 256)
R, TAU, REST_W = 6.2, 260.0, 0.9


def body_course(air_c, path, watts, seconds):
    """The true temperature of every second, from rest."""
    temp, found = air_c + path * REST_W, []
    for _ in range(seconds):
        end = air_c + path * watts
        temp = end + (temp - end) * np.exp(-1.0 / TAU)
        found.append(temp)
    return found


@pytest.mark.parametrize("air_c", [15.0, 25.0, 35.0])
@pytest.mark.parametrize("path", [0.9 * R, 1.1 * R])
def test_a_coarse_step_pins_down_a_body_that_crosses_it(air_c, path):
    estimate = BodyEstimate(R, TAU, REST_W)
    crossed_c = air_c + path * (REST_W + 1.2)
    for second, temp in enumerate(body_course(air_c, path, 3.5, 400)):
        estimate.step(float(second), 3.5)
        estimate.bound(*((-inf, crossed_c) if temp < crossed_c else (crossed_c, inf)))
    assert estimate.temp_c == pytest.approx(temp, abs=2.0)
    assert estimate.spread_c < 2.0


def test_without_any_bound_the_estimate_says_how_unsure_it_is():
    estimate = BodyEstimate(R, TAU, REST_W)
    estimate.step(0.0, REST_W)
    assert estimate.spread_c > 6.0


def test_a_bound_that_no_guess_keeps_moves_them_to_it():
    estimate = BodyEstimate(R, TAU, REST_W)
    estimate.step(0.0, REST_W)
    estimate.bound(90.0, 95.0)
    assert 90.0 - 1e-9 <= estimate.temp_c <= 95.0 + 1e-9


def test_equal_readings_give_equal_estimates():
    found = []
    for _ in range(2):
        estimate = BodyEstimate(R, TAU, REST_W)
        for second in range(200):
            estimate.step(float(second), 3.0)
            estimate.bound(30.0, 38.0)
        found.append(estimate.temp_c)
    assert found[0] == found[1]


def test_constants_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="tau_s"):
        BodyEstimate(R, 0.0, REST_W)


def test_a_ladder_tells_the_level_by_the_time_of_rounds_and_joules_fall_with_it():
    ladder = ladder_of(load_device("iphone-16-pro"), PLAIN)
    assert [ladder.level(t) for t in ladder.times] == list(range(len(ladder.times)))
    assert ladder.level((ladder.times[1] + ladder.times[2]) / 2.0) is None
    assert list(ladder.joules) == sorted(ladder.joules, reverse=True)
    assert ladder.share(0.5) == 1.0
    assert ladder.share(99.0) == ladder.joules[-1]
    assert ladder.bounds[0] == (-inf, 38.0)
    assert ladder.bounds[3] == (41.0 - 1.9, 41.0)


def stand_in() -> Unmetered:
    return unmetered(load_device("iphone-16-pro"), PLAIN)


def test_what_a_sensor_gives_is_never_replaced():
    measured = State(1.0, power_w=3.0, power_method="instant", skin_c=33.0)
    assert stand_in().filled(measured, lambda seconds: 9.0) == measured
    filled = stand_in().filled(State(1.0, skin_c=33.0), lambda seconds: 3.0)
    assert (filled.power_w, filled.power_method) == (3.0, "estimated")
    assert (filled.skin_c, filled.skin_method) == (33.0, "")


def test_an_estimate_is_flagged():
    state = stand_in().filled(State(1.0, headroom=0.34), lambda seconds: 3.0)
    directive = Governor(Policy(), load_device("iphone-16-pro")).decide(state)
    assert {"power=estimated", "temperature=estimated"} <= set(directive.flags)


def test_the_body_is_warmed_by_all_that_was_drawn_since_it_was_last_followed():
    """4 W for a second after three at rest: looked at then, the last second says four times too much."""
    often, late = stand_in(), stand_in()
    for i in range(1, 601):
        drawn = [4.0 if second % 4 == 0 else 0.7 for second in range(i - 3, i + 1)]
        often_state = often.filled(State(float(i)), lambda seconds, now=drawn: now[-1])
        if i % 4 == 0:
            late_state = late.filled(
                State(float(i)), lambda seconds, now=drawn: sum(now[-int(seconds) :]) / seconds
            )
    assert late_state.power_w == 4.0
    assert late_state.skin_c == pytest.approx(often_state.skin_c, abs=0.3)


def test_slower_rounds_show_that_clocks_are_held_back():
    found = stand_in()
    for seconds in (0.03, 0.0301, 0.0299):
        found.saw(1, None, 0, seconds)
    assert found.share == pytest.approx(1.0, abs=0.02)
    for _ in range(40):
        found.saw(1, None, 0, 0.03 * found.ladder.times[4])
    assert found.slowdown == pytest.approx(found.ladder.times[4], rel=0.02)
    assert found.share == pytest.approx(found.ladder.joules[4], rel=0.03)


def test_a_width_first_seen_while_throttled_is_not_taken_for_full_speed():
    found = stand_in()
    found.saw(1, None, 0, 0.03)
    for _ in range(40):
        found.saw(1, None, 0, 0.045)
    found.saw(4, "model", 3, 0.09)
    assert found.slowdown == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize(("ambient_c", "skin_limit_c"), [(15.0, 39.0), (25.0, 42.0)])
def test_a_phone_without_meter_and_thermometer_holds_its_skin_limit_and_works_near_it(
    ambient_c, skin_limit_c
):
    scenario = Scenario(
        name="blind",
        device="iphone-16-pro",
        duration_s=600.0,
        ambient_c=ambient_c,
        seed=11,
        skin_limit_c=skin_limit_c,
    )
    found = run_policy(scenario, "governed", made_up_texts())
    assert found.peak_over_c <= 1.0
    assert found.peak_case_c >= skin_limit_c - 2.5
