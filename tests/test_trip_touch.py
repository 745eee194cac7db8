"""A plateau at a device's own trip is begun by touching it once; what does not pay is undone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.contracts import Costs, Energy
from outrider.power.governor import Governor, Policy
from outrider.power.state import State
from outrider.power.trip_touch import TripTouch
from outrider.power.tuning import Tuning
from outrider.targets.device import load_device

TUNING = Tuning()


def walk(
    touch: TripTouch, start_s: float, seconds: int, below_c: float, clock: float, plain_j: float
) -> list[float]:
    return [touch.step(start_s + i, below_c, clock, plain_j) for i in range(seconds)]


def test_far_from_the_limit_nothing_is_shifted():
    assert set(walk(TripTouch(True, TUNING), 0.0, 100, 5.0, 1.0, 0.2)) == {0.0}


def test_the_trip_is_touched_until_the_clock_has_settled_and_then_left_in_peace():
    touch = TripTouch(True, TUNING)
    assert walk(touch, 0.0, 5, 0.2, 1.0, 0.2)[-1] == TUNING.touch_c
    assert walk(touch, 5.0, 4, -0.1, 0.86, 0.2) == [TUNING.touch_c] * 4
    assert walk(touch, 9.0, 6, -0.1, 0.7, 0.2) == [TUNING.touch_c] * 6
    later = walk(touch, 15.0, 200, 0.1, 0.7, 0.15)
    assert later[-1] == 0.0
    assert sum(shift > 0 for shift in later) < 10


def test_a_touch_that_cost_joules_is_undone_and_not_tried_again():
    touch = TripTouch(True, TUNING)
    walk(touch, 0.0, 5, 0.2, 1.0, 0.2)
    walk(touch, 5.0, 20, -0.1, 0.3, 0.3)
    assert walk(touch, 25.0, 80, 0.1, 0.3, 0.3)[-1] == -TUNING.touch_cool_c
    walk(touch, 105.0, 20, 3.1, 1.0, 0.2)
    assert set(walk(touch, 125.0, 300, 0.1, 1.0, 0.2)) == {0.0}


@pytest.mark.parametrize(("below_c", "patience_s"), [(-0.1, 20), (0.1, 300)])
def test_a_clock_that_does_not_fall_is_not_waited_for_for_ever(below_c, patience_s):
    shifts = walk(TripTouch(True, TUNING), 0.0, 500, below_c, 1.0, 0.2)
    assert shifts[patience_s - 5] == TUNING.touch_c
    assert set(shifts[patience_s + 5 :]) == {0.0}


@pytest.mark.parametrize(("clock", "plain_j"), [(None, 0.2), (1.0, None)])
def test_what_cannot_be_judged_is_not_tried(clock, plain_j):
    touch = TripTouch(True, TUNING)
    assert [touch.step(float(i), 0.1, clock, plain_j) for i in range(50)] == [0.0] * 50


COSTS = Costs({1: 0.05}, energy=Energy(1.2, {1: 0.15}))


def target_after(device, skin_c, costs=COSTS):
    governor = Governor(Policy(), device)
    for i in range(10):
        governor.decide(State(float(i), skin_c=skin_c, clock_ratio=1.0, power_w=3.0), costs)
    return governor._skin.target_c


def test_only_a_device_that_throttles_at_the_very_limit_is_let_touch_it():
    phone = load_device("snapdragon-8-gen3")
    assert target_after(phone, 42.9) > 43.0
    assert target_after(phone, 40.0) <= 43.0
    assert target_after(phone, 42.9, Costs({1: 0.05})) <= 43.0
    unknown = SimpleNamespace(temp_limit_c=95.0, skin_limit_c=43.0, sustained_w=3.0, static_w=1.2)
    assert target_after(unknown, 42.9) <= 43.0


def test_the_shift_stays_far_within_the_degree_that_is_promised():
    assert TUNING.touch_c - TUNING.skin.margin_c <= 0.5
