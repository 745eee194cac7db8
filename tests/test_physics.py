"""Time, energy, heat and throttling: against numerical integration, conservation and the kernel's rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.targets.physics import (
    Network,
    Rates,
    Temperatures,
    ThrottlePolicy,
    Trip,
    Work,
    battery_percent,
    dynamic_power,
    next_level,
    propagator,
    roofline_time,
    steady_state,
    step_temperatures,
    stored_heat,
    sustainable_power,
    voltage_ratio,
)

PHONE = Network(die_c_per_w=4.0, die_tau_s=8.0, case_c_per_w=5.5, case_tau_s=300.0, die_share=0.85)
RATES = Rates(
    bytes_s=10e9, ops_s=200e9, launch_s=1e-3, busy_w=3.0, j_byte=25e-12, j_op=15e-12, voltage_floor=0.6
)
LADDER = ThrottlePolicy(
    1.0,
    (1.0, 0.9, 0.8, 0.7, 0.6),
    (1.0, 1.0, 1.0, 0.9, 0.8),
    (Trip("skin", 39.0, 2.0, 2), Trip("die", 90.0, 5.0, 4)),
)
networks = st.builds(
    Network,
    die_c_per_w=st.floats(0.2, 20),
    die_tau_s=st.floats(0.5, 60),
    case_c_per_w=st.floats(0.2, 20),
    case_tau_s=st.floats(20, 2000),
    die_share=st.floats(0.1, 1.0),
)
temperatures = st.builds(Temperatures, st.floats(0, 100), st.floats(0, 60))


def derivative(
    network: Network, now: np.ndarray, power_w: float, ambient_c: float, case_w: float
) -> list[float]:
    """Heat balance of each node, written from the circuit and not from the module under test."""
    die, case = now
    flow = (die - case) / network.die_c_per_w
    shed = (case - ambient_c) / network.case_c_per_w
    die_capacity = network.die_tau_s / network.die_c_per_w
    case_capacity = network.case_tau_s / network.case_c_per_w
    into_die = network.die_share * power_w
    into_case = (1 - network.die_share) * power_w + case_w
    return [(into_die - flow) / die_capacity, (into_case + flow - shed) / case_capacity]


@pytest.mark.parametrize("seconds", [0.1, 3.0, 60.0, 1500.0])
@pytest.mark.parametrize("case_w", [0.0, 1.5])
def test_a_step_of_constant_power_equals_a_numerical_solution(seconds: float, case_w: float) -> None:
    from scipy.integrate import solve_ivp

    start = Temperatures(55.0, 31.0)
    solved = solve_ivp(
        lambda _, now: derivative(PHONE, now, 5.0, 22.0, case_w),
        (0.0, seconds),
        [start.die_c, start.case_c],
        rtol=1e-10,
        atol=1e-10,
    )
    found = step_temperatures(PHONE, start, 5.0, 22.0, seconds, case_w)
    assert [found.die_c, found.case_c] == pytest.approx(solved.y[:, -1], abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    networks, temperatures, st.floats(0, 20), st.floats(-10, 45), st.floats(0.01, 2000), st.floats(0.01, 0.99)
)
def test_two_steps_are_one_long_step(
    network: Network, start: Temperatures, power: float, ambient: float, seconds: float, cut: float
) -> None:
    whole = step_temperatures(network, start, power, ambient, seconds)
    first = step_temperatures(network, start, power, ambient, cut * seconds)
    both = step_temperatures(network, first, power, ambient, (1 - cut) * seconds)
    assert both.die_c == pytest.approx(whole.die_c, abs=1e-6)
    assert both.case_c == pytest.approx(whole.case_c, abs=1e-6)


def test_heat_stored_and_shed_is_all_the_energy_that_went_in() -> None:
    now, shed_j, span = Temperatures(30.0, 25.0), 0.0, 0.01
    before = stored_heat(PHONE, now, 20.0)
    for _ in range(60_000):
        later = step_temperatures(PHONE, now, 6.0, 20.0, span)
        shed_j += span * ((now.case_c + later.case_c) / 2 - 20.0) / PHONE.case_c_per_w
        now = later
    assert stored_heat(PHONE, now, 20.0) - before + shed_j == pytest.approx(6.0 * 600.0, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(networks, temperatures, st.floats(0, 20), st.floats(-10, 45))
def test_every_start_ends_in_the_steady_state(
    network: Network, start: Temperatures, power: float, ambient: float
) -> None:
    end = steady_state(network, power, ambient)
    assert step_temperatures(network, start, power, ambient, 1e6).die_c == pytest.approx(end.die_c, abs=1e-6)
    kept = step_temperatures(network, end, power, ambient, 123.0)
    assert kept.case_c == pytest.approx(end.case_c, abs=1e-9)


def test_no_time_changes_nothing() -> None:
    assert propagator(PHONE, 0.0) == pytest.approx((1.0, 0.0, 0.0, 1.0))


@settings(max_examples=50, deadline=None)
@given(networks, st.floats(-10, 45), st.floats(50, 110))
def test_sustainable_power_ends_at_the_limit(network: Network, ambient: float, limit: float) -> None:
    power = sustainable_power(network, ambient, limit)
    assert steady_state(network, power, ambient).die_c == pytest.approx(limit)


def test_the_tighter_of_die_and_case_bounds_power() -> None:
    assert sustainable_power(PHONE, 25.0, 95.0, 43.0) == pytest.approx((43.0 - 25.0) / 5.5)
    assert sustainable_power(PHONE, 25.0, 40.0, 43.0) == pytest.approx(15.0 / (5.5 + 0.85 * 4.0))
    assert sustainable_power(PHONE, 25.0, None) == math.inf


def test_a_narrow_forward_waits_for_memory_and_a_wide_one_for_arithmetic() -> None:
    narrow, wide = Work(1e9, 3e9), Work(1e9, 60e9)
    assert roofline_time(narrow, RATES) == pytest.approx(0.1 + 1e-3)
    assert roofline_time(wide, RATES) == pytest.approx(0.3 + 1e-3)


def test_a_slower_clock_slows_arithmetic_and_a_slower_memory_clock_memory() -> None:
    narrow, wide = Work(1e9, 3e9), Work(1e9, 60e9)
    assert roofline_time(narrow, RATES, clock=0.5) == pytest.approx(0.1 + 2e-3)
    assert roofline_time(narrow, RATES, memory_clock=0.5) == pytest.approx(0.2 + 1e-3)
    assert roofline_time(narrow, RATES, bandwidth_share=0.8) == pytest.approx(0.125 + 1e-3)
    assert roofline_time(wide, RATES, clock=0.5) == pytest.approx(0.6 + 2e-3)


@given(st.floats(0.2, 1.0), st.floats(0.2, 1.0), st.integers(1, 16))
def test_time_never_falls_when_a_clock_does(clock: float, memory: float, width: int) -> None:
    work = Work(1e9, 3e9 * width)
    assert roofline_time(work, RATES, clock, memory) >= roofline_time(work, RATES) - 1e-12


def test_energy_an_operation_falls_with_the_square_of_the_voltage_down_to_its_floor() -> None:
    work = Work(0.0, 1e9)
    only_ops = Rates(1e9, 1e9, 0.0, 0.0, 0.0, 10e-12, 0.6)

    def joules(clock: float) -> float:
        return 2.0 * dynamic_power(work, 2.0, only_ops, clock)

    assert joules(0.8) == pytest.approx(0.64 * joules(1.0))
    assert joules(0.3) == pytest.approx(0.36 * joules(1.0))
    assert voltage_ratio(0.3, 0.6) == 0.6


def test_busy_power_goes_with_clock_and_voltage_squared_and_bytes_cost_the_same() -> None:
    only_busy = Rates(1e9, 1e9, 0.0, 3.0, 0.0, 0.0, 0.5)
    assert dynamic_power(Work(1e9, 1e9), 1.0, only_busy, 0.8) == pytest.approx(3.0 * 0.8**3)
    only_bytes = Rates(1e9, 1e9, 0.0, 0.0, 25e-12, 0.0, 0.5)
    assert dynamic_power(Work(1e9, 0.0), 1.0, only_bytes, 0.5) == pytest.approx(0.025)


def levels(policy: ThrottlePolicy, readings: list[tuple[float, float]], level: int = 0) -> list[int]:
    seen = []
    for die, case in readings:
        level = next_level(policy, level, Temperatures(die, case))
        seen.append(level)
    return seen


def test_throttling_goes_one_level_a_poll_and_no_deeper_than_its_trip() -> None:
    assert levels(LADDER, [(50, 41)] * 4) == [1, 2, 2, 2]
    assert levels(LADDER, [(91, 41)] * 6) == [1, 2, 3, 4, 4, 4]


def test_throttling_holds_within_the_hysteresis_and_lets_go_below_it() -> None:
    assert levels(LADDER, [(50, 39), (50, 38.9), (50, 37.1), (50, 37.0), (50, 36)]) == [1, 1, 1, 0, 0]


def test_a_shallow_trip_does_not_hold_a_deeper_level() -> None:
    assert levels(LADDER, [(70, 40), (70, 40), (70, 40)], level=4) == [3, 2, 2]


def test_no_throttling_below_all_trips() -> None:
    assert levels(LADDER, [(89.9, 38.9)] * 3) == [0, 0, 0]


def test_a_battery_is_between_empty_and_full() -> None:
    assert [battery_percent(x, 100.0) for x in (-5.0, 0.0, 25.0, 200.0)] == [0.0, 0.0, 25.0, 100.0]
