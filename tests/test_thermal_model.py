"""Heat identified online: constants within bounds, time to throttle, and no input that breaks it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import UsageError
from outrider.power.thermal_model import LOAD_PRIOR, ThermalModel, ThermalPrior
from outrider.targets.physics import Network, Temperatures, steady_state, step_temperatures


def trace(poles, ambient_c, power, seconds, step_c=0.1, noise_c=0.1, seed=0, period_s=1.0):
    """(time, reading, power, truth) of poles [(R, τ)] under power(t), settled at first, sampled unevenly."""
    rng, t = random.Random(seed), 0.0
    x = [r * power(0.0) for r, _ in poles]
    while t < seconds:
        dt = period_s * rng.uniform(0.5, 1.5)
        watts = power(t + 0.5 * dt)
        x = [r * watts + (e - r * watts) * math.exp(-dt / tau) for e, (r, tau) in zip(x, poles, strict=True)]
        t += dt
        true = ambient_c + sum(x)
        seen = true + rng.gauss(0.0, noise_c)
        yield t, (round(seen / step_c) * step_c if step_c else seen), watts, true


def pulses(high, low=None, period_s=120.0):
    return lambda t: (high * 0.2 if low is None else low) if t % period_s < 0.4 * period_s else high


def taught(readings, prior=None):
    model = ThermalModel(prior)
    for t, seen, watts, _ in readings:
        model.observe(t, seen, watts)
    return model


DEVICES = {
    # name: (poles, ambient, watts)
    "phone": ([(4.0, 12.0), (6.0, 300.0)], 25.0, 5.0),
    "board": ([(3.0, 8.0), (5.0, 180.0)], 22.0, 7.0),
    "module": ([(0.5, 6.0), (0.9, 240.0)], 30.0, 28.0),
}


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("seed", range(3))
def test_two_poles_are_recovered_through_noise_and_tenths_of_a_degree(name, seed):
    poles, ambient, watts = DEVICES[name]
    model = taught(trace(poles, ambient, pulses(watts), 1500.0, seed=seed))
    assert model.identified
    assert model.c_per_w == pytest.approx(sum(r for r, _ in poles), rel=0.12)
    assert model.ambient_c == pytest.approx(ambient, abs=3.0)
    for found, (c_per_w, tau_s) in zip((model.die, model.case), poles, strict=True):
        assert found.c_per_w == pytest.approx(c_per_w, rel=0.2)
        assert found.tau_s == pytest.approx(tau_s, rel=0.25)


@pytest.mark.parametrize("seed", range(4))
def test_a_thermometer_of_whole_degrees_is_enough(seed):
    poles, ambient, watts = DEVICES["phone"]
    model = taught(trace(poles, ambient, pulses(watts), 1500.0, step_c=1.0, seed=seed))
    assert model.c_per_w == pytest.approx(10.0, rel=0.2)
    assert model.die.tau_s == pytest.approx(12.0, rel=0.25)
    assert model.case.tau_s == pytest.approx(300.0, rel=0.35)


@pytest.mark.parametrize("tau_s", [20.0, 60.0, 150.0])
@pytest.mark.parametrize("step_c", [0.1, 1.0])
def test_one_pole_is_recovered(tau_s, step_c):
    model = taught(trace([(6.0, tau_s)], 25.0, pulses(6.0, period_s=200.0), 1500.0, step_c=step_c))
    assert model.c_per_w == pytest.approx(6.0, rel=0.15)
    now = model.temp_c
    for horizon_s in (5.0, 20.0, 60.0):
        rise = (25.0 + 36.0 - now) * (1.0 - math.exp(-horizon_s / tau_s))
        assert model.predict(6.0, horizon_s) == pytest.approx(now + rise, abs=2.0)


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.5, 8.0),
    st.floats(1.0, 12.0),
    st.floats(5.0, 30.0),
    st.floats(150.0, 500.0),
    st.sampled_from([15.0, 25.0, 38.0]),
    st.sampled_from([0.1, 1.0]),
    st.integers(0, 1000),
)
def test_what_holds_a_limit_for_ever_is_known_within_a_sixth_on_any_device(
    r_die, r_case, tau_die, tau_case, ambient, step_c, seed
):
    poles, watts = [(r_die, tau_die), (r_case, tau_case)], 45.0 / (r_die + r_case)
    model = taught(trace(poles, ambient, pulses(watts, period_s=200.0), 1500.0, step_c, 0.2, seed))
    assert model.sustainable_w(ambient + 40.0) == pytest.approx(40.0 / (r_die + r_case), rel=1 / 6)


def test_the_ladder_of_the_simulated_device_is_predicted():
    network = Network(die_c_per_w=3.0, die_tau_s=10.0, case_c_per_w=6.0, case_tau_s=300.0)
    now, model, watts = steady_state(network, 0.6, 25.0), ThermalModel(), pulses(5.0)
    for t in range(1200):
        now = step_temperatures(network, now, watts(t), 25.0, 1.0)
        model.observe(t + 1.0, round(now.die_c, 1), watts(t))
    for horizon_s in (10.0, 60.0, 600.0):
        true = step_temperatures(network, Temperatures(now.die_c, now.case_c), 4.0, 25.0, horizon_s).die_c
        assert model.predict(4.0, horizon_s) == pytest.approx(true, abs=2.0)


@pytest.mark.parametrize("step_c", [0.1, 1.0])
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("seed", range(3))
def test_half_way_to_the_limit_the_time_left_is_known_within_a_fifth(name, step_c, seed):
    """From rest, with a device profile that is wrong by a quarter, at constant power."""
    poles, ambient, watts = DEVICES[name]
    (r_die, tau_die), (r_case, tau_case) = poles
    limit = ambient + 0.85 * watts * (r_die + r_case)
    readings = list(
        trace(poles, ambient, lambda t: watts if t > 60.0 else 0.1 * watts, 2500.0, step_c, 0.1, seed)
    )
    hit = next(t for t, _, _, true in readings if true >= limit)
    half = 60.0 + 0.5 * (hit - 60.0)
    prior = ThermalPrior(
        1.25 * r_die, 0.8 * tau_die, 0.8 * r_case, 1.2 * tau_case, spread=0.4, ambient_c=ambient + 2.0,
        ambient_spread_c=4.0,
    )  # fmt: skip
    model = taught([r for r in readings if r[0] <= half], prior)
    assert model.time_to(limit, watts) == pytest.approx(hit - half, rel=0.2)


def test_constant_power_identifies_nothing_and_says_so():
    prior = ThermalPrior()
    model = taught(trace(DEVICES["phone"][0], 25.0, lambda t: 4.0, 1200.0, noise_c=0.2), prior)
    assert not model.identified
    assert model.predict(4.0, 600.0) == pytest.approx(65.0, abs=2.0)


def test_a_plateau_does_not_forget_what_was_learned():
    poles, ambient, watts = DEVICES["phone"]
    pattern = pulses(watts)
    model = taught(trace(poles, ambient, lambda t: pattern(t) if t < 1200 else watts, 4800.0))
    assert model.c_per_w == pytest.approx(10.0, rel=0.2)
    assert model.sustainable_w(75.0) == pytest.approx(5.0, rel=0.05)


def test_a_fan_that_starts_is_followed():
    poles, ambient, watts = DEVICES["phone"]
    model = taught(trace(poles, ambient, pulses(watts), 1200.0))
    cooled = [(4.0, 12.0), (2.0, 120.0)]
    for t, seen, power, _ in trace(cooled, ambient, pulses(watts), 2400.0, seed=1):
        model.observe(1200.0 + t, seen, power)
    assert model.c_per_w == pytest.approx(6.0, rel=0.2)


def cold_phone():
    """Identified, then at rest: die and case near the air."""
    poles, ambient, watts = DEVICES["phone"]
    pattern = pulses(watts)
    return taught(trace(poles, ambient, lambda t: pattern(t) if t < 1200 else 0.3, 2700.0))


def test_a_budget_for_seconds_is_more_than_what_holds_for_ever():
    model = cold_phone()
    for_ever = model.sustainable_w(60.0)
    budgets = [model.budget_w(60.0, h) for h in (5.0, 10.0, 60.0, 600.0, 5000.0)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[1] > 1.5 * for_ever
    assert budgets[-1] == pytest.approx(for_ever, rel=0.01)
    assert model.sustainable_w(60.0, 10.0) == budgets[1]


def test_a_budget_ends_at_the_limit_and_time_to_agrees():
    model = cold_phone()
    for horizon_s in (5.0, 40.0, 300.0):
        watts = model.budget_w(60.0, horizon_s)
        assert model.predict(watts, horizon_s) == pytest.approx(60.0)
        assert model.time_to(60.0, watts) == pytest.approx(horizon_s, rel=1e-3)


def test_time_to_a_limit_that_is_passed_or_out_of_reach():
    model = cold_phone()
    assert model.time_to(10.0, 0.0) == 0.0
    assert model.time_to(120.0, 1.0) is None
    assert model.budget_w(10.0, 10.0) == 0.0


def test_a_hot_case_is_told_from_a_cold_one_at_the_same_die_temperature():
    poles, ambient, watts = DEVICES["phone"]
    pattern = pulses(watts)
    model = taught(trace(poles, ambient, lambda t: pattern(t) if t < 1500 else watts, 2400.0))
    hot = model.predict(1.0, 30.0)
    assert hot > ambient + 4.0 + 0.6 * 6.0 * watts


def test_load_takes_the_place_of_watts():
    duty = lambda t: 1.0 if t % 150.0 > 60.0 else 0.2  # noqa: E731
    model = taught(trace([(14.0, 9.0), (20.0, 220.0)], 24.0, duty, 1500.0), LOAD_PRIOR)
    assert model.c_per_w == pytest.approx(34.0, rel=0.15)
    assert model.sustainable_w(24.0 + 17.0) == pytest.approx(0.5, rel=0.15)


def test_before_the_first_reading_nothing_is_known():
    model = ThermalModel()
    assert (model.temp_c, model.predict(1.0, 1.0), model.budget_w(60.0, 10.0)) == (None, None, None)
    assert (model.sustainable_w(60.0), model.time_to(60.0, 5.0), model.identified) == (None, None, False)
    model.observe(0.0, 40.0, None)
    assert model.temp_c is None
    model.observe(1.0, 40.0, 2.0)
    assert model.temp_c == pytest.approx(40.0, abs=1e-6)


def test_bogus_readings_once_in_a_while_do_not_move_it():
    """A zone that reads 85 or -40 °C now and then (raspberrypi/firmware#133), and NaN."""
    poles, ambient, watts = DEVICES["board"]
    model = ThermalModel()
    for i, (t, seen, power, _) in enumerate(trace(poles, ambient, pulses(watts), 1500.0)):
        bogus = {0: 125.0, 17: -40.0, 33: float("nan"), 41: -650788.984}.get(i % 50)
        model.observe(t, seen if bogus is None else bogus, power)
    assert model.c_per_w == pytest.approx(8.0, rel=0.15)


def test_duplicates_and_a_clock_that_jumps_back_are_survived():
    poles, ambient, watts = DEVICES["board"]
    model = ThermalModel()
    for i, (t, seen, power, _) in enumerate(trace(poles, ambient, pulses(watts), 1500.0)):
        model.observe(t - (5000.0 if i > 800 else 0.0), seen, power)
        model.observe(t - (5000.0 if i > 800 else 0.0), seen, power)
    assert model.c_per_w == pytest.approx(8.0, rel=0.15)


def test_a_long_silence_keeps_the_constants_and_takes_the_temperature_anew():
    model = cold_phone()
    before = model.c_per_w
    model.observe(20_000.0, 50.0, 0.3)
    assert model.c_per_w == pytest.approx(before)
    assert model.temp_c == pytest.approx(50.0, abs=0.5)


def test_a_missing_power_is_taken_to_go_on():
    poles, ambient, watts = DEVICES["board"]
    model = ThermalModel()
    for i, (t, seen, power, _) in enumerate(trace(poles, ambient, lambda t: watts, 300.0)):
        model.observe(t, seen, power if i % 3 == 0 else None)
    assert model.predict(watts, 60.0) == pytest.approx(ambient + 8.0 * watts, abs=2.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.floats(-10.0, 500.0), st.sampled_from([0.0, float("nan"), float("inf"), 1e12])),
            st.one_of(st.floats(-60.0, 200.0), st.sampled_from([float("nan"), float("inf"), 0.0, 1e-9])),
            st.one_of(st.none(), st.floats(-5.0, 60.0), st.sampled_from([float("nan"), 1e6, 0.0])),
        ),
        max_size=120,
    ),
    st.floats(-20.0, 120.0),
    st.floats(0.0, 1e4),
)
def test_whatever_comes_in_nothing_is_nan_or_negative(seen, limit_c, horizon_s):
    model, t = ThermalModel(), 0.0
    for dt, temp_c, power in seen:
        t = t + dt if abs(dt) < 1e9 else t
        model.observe(t if abs(dt) < 1e9 else dt, temp_c, power)
    for pole in (model.die, model.case):
        assert 0.0 < pole.c_per_w < 1e4
        assert 0.0 < pole.tau_s < 1e4
    assert 0.0 <= model.uncertainty < 100.0
    if model.temp_c is None:
        return
    answers = [
        model.budget_w(limit_c, horizon_s),
        model.sustainable_w(limit_c),
        model.time_to(limit_c, 5.0) or 0.0,
    ]
    assert all(0.0 <= value < math.inf for value in answers)
    assert math.isfinite(model.predict(5.0, horizon_s))


@pytest.mark.parametrize("values", [(40.0, 5.0), (0.0, 0.0), (25.0, 0.0), (90.0, 1000.0)])
def test_constant_input_is_survived(values):
    model = ThermalModel()
    for i in range(3000):
        model.observe(0.5 * i, *values)
    assert math.isfinite(model.predict(values[1], 100.0))
    assert not model.identified


def test_wrong_arguments_are_refused():
    model = cold_phone()
    with pytest.raises(UsageError, match="horizon_s is -1"):
        model.predict(1.0, -1.0)
    with pytest.raises(UsageError, match="power_w is -2"):
        model.time_to(60.0, -2.0)
    with pytest.raises(UsageError, match="die_tau_s is 0"):
        ThermalPrior(die_tau_s=0.0)
    with pytest.raises(UsageError, match="ambient_c is nan"):
        ThermalPrior(ambient_c=float("nan"))
