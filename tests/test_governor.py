"""Levels, limits and flags that the governor makes of telemetry."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Costs, Energy, Limits
from outrider.errors import UsageError
from outrider.power.governor import Directive, Governor, Level, Policy
from outrider.power.state import State
from outrider.power.tuning import Tuning
from outrider.targets.device import load_device
from outrider.targets.model_cost import ModelCost
from outrider.targets.simulated import Machine, perturbed

TUNING = Tuning()
TIMES = Costs({1: 0.1, 4: 0.15}, {"model": 0.02})
JOULES = replace(TIMES, energy=Energy(1.5, {1: 0.3, 4: 0.6}, {"model": 0.05}))


@dataclass(frozen=True)
class Board:
    slug: str = "board"
    temp_limit_c: float | None = 80.0
    skin_limit_c: float | None = None
    sustained_w: float | None = 5.0
    static_w: float | None = 1.5


def at(used, limit_c=80.0, ambient_c=25.0):
    """The temperature at which so much of the headroom is used."""
    return ambient_c + used * (limit_c - ambient_c)


def states(temps, step_s=1.0, start_s=0.0, **fields):
    return [State(start_s + i * step_s, die_c=temp, **fields) for i, temp in enumerate(temps)]


def run(governor, sequence, costs=TIMES):
    return [governor.decide(state, costs) for state in sequence]


def levels(directives):
    return [directive.level for directive in directives]


@pytest.mark.parametrize(
    ("used", "level"),
    [
        (0.0, Level.NOMINAL),
        (0.74, Level.NOMINAL),
        (0.76, Level.WARM),
        (0.87, Level.WARM),
        (0.89, Level.HOT),
        (0.99, Level.HOT),
        (1.0, Level.CRITICAL),
        (1.4, Level.CRITICAL),
    ],
)
def test_the_level_follows_the_headroom_used_at_once(used, level):
    governor = Governor(Policy(temp_limit_c=80.0))
    first, second = run(governor, states([25.0, at(used)]))
    assert first.level == Level.NOMINAL
    assert second.level == level


@pytest.mark.parametrize(
    ("headroom", "level"), [(0.5, Level.NOMINAL), (0.8, Level.WARM), (0.9, Level.HOT), (1.0, Level.CRITICAL)]
)
def test_the_vendors_headroom_raises_the_level_too(headroom, level):
    assert Governor().decide(State(0.0, headroom=headroom), TIMES).level == level


def test_the_hotter_of_silicon_and_body_decides():
    governor = Governor(Policy(), Board(temp_limit_c=90.0, skin_limit_c=45.0))
    governor.decide(State(0.0, die_c=25.0, skin_c=25.0), TIMES)
    assert governor.decide(State(1.0, die_c=30.0, skin_c=43.0), TIMES).level == Level.HOT


def test_the_limit_is_the_users_or_the_devices_whichever_is_lower():
    assert Governor(Policy(temp_limit_c=70.0), Board())._die.limit_c == 70.0
    assert Governor(Policy(temp_limit_c=95.0), Board())._die.limit_c == 80.0
    careful = Governor(Policy(), Board(), tuning=Tuning(trip_margin_c=2.0))
    assert careful._die.limit_c == 78.0


def test_an_assumed_limit_warms_but_never_more_and_is_flagged():
    directives = run(Governor(), states([30.0, 70.0, 99.0]))
    assert levels(directives) == [Level.NOMINAL, Level.WARM, Level.WARM]
    assert all("limit=assumed" in directive.flags for directive in directives)
    assert all(directive.duty == 1.0 and directive.k_share == 1.0 for directive in directives)


def test_levels_fall_one_at_a_time_after_the_dwell():
    governor = Governor(Policy(temp_limit_c=80.0))
    seen = levels(run(governor, states([25.0, 85.0] + [30.0] * 60)))
    assert seen[1] == Level.CRITICAL
    falls = [i for i, (before, after) in enumerate(pairwise(seen)) if after < before]
    assert [seen[i + 1] for i in falls] == [Level.HOT, Level.WARM, Level.NOMINAL]
    assert all(later - earlier >= TUNING.dwell_s for earlier, later in pairwise([0, *falls]))


def test_a_level_does_not_fall_within_the_hysteresis():
    governor = Governor(Policy(temp_limit_c=80.0))
    just_below = at(TUNING.hot_at) - TUNING.hysteresis_c + 0.2
    seen = levels(run(governor, states([25.0, at(0.89)] + [just_below] * 100)))
    assert seen[-1] == Level.HOT
    lower = states([just_below - 0.5] * 100, start_s=200.0)
    assert levels(run(governor, lower))[-1] == Level.WARM


@pytest.mark.parametrize("noise_c", [0.3, 1.0, 2.5, 5.0])
@pytest.mark.parametrize("threshold", [TUNING.warm_at, TUNING.hot_at, TUNING.critical_at])
def test_a_noisy_plateau_at_a_threshold_changes_level_at_most_four_times_a_minute(threshold, noise_c):
    rng = random.Random(7)
    governor = Governor(Policy(temp_limit_c=80.0))
    temps = [at(threshold) + rng.gauss(0.0, noise_c) for _ in range(6000)]
    seen = levels(run(governor, states([25.0] * 10 + temps, step_s=0.1)))
    changes = [i * 0.1 for i, (before, after) in enumerate(pairwise(seen)) if after != before]
    settled = [time for time in changes if time > 10.0]
    assert all(later - earlier > 60.0 for earlier, later in zip(settled, settled[4:], strict=False))


def test_constant_telemetry_below_the_thresholds_changes_nothing():
    directives = run(Governor(Policy(temp_limit_c=80.0)), states([55.0] * 600, power_w=4.0))
    assert {directive.level for directive in directives} == {Level.NOMINAL}
    assert {(d.k_share, d.k_max, d.power_w, d.duty) for d in directives} == {(1.0, None, None, 1.0)}
    assert all(directive.reference is None for directive in directives)


def test_a_throttle_bit_counts_whatever_the_temperature_says():
    governor = Governor(Policy(temp_limit_c=80.0))
    assert governor.decide(State(0.0, die_c=30.0, throttle=0.2), TIMES).level == Level.WARM
    assert governor.decide(State(1.0, die_c=30.0, throttle=1.0), TIMES).level == Level.HOT


def test_a_lasting_clock_drop_counts_and_a_short_one_does_not():
    governor = Governor(Policy(temp_limit_c=80.0))
    governor.decide(State(0.0, die_c=60.0, clock_ratio=1.0), TIMES)
    assert governor.decide(State(1.0, die_c=60.0, clock_ratio=0.5), TIMES).level == Level.NOMINAL
    assert governor.decide(State(3.1, die_c=60.0, clock_ratio=0.5), TIMES).level == Level.HOT


def test_a_machine_that_always_runs_below_its_top_clock_is_not_throttled():
    directives = run(Governor(), states([40.0] * 30, clock_ratio=0.55))
    assert {directive.level for directive in directives} == {Level.NOMINAL}


def test_a_low_clock_on_cool_silicon_is_warm_only():
    governor = Governor(Policy(temp_limit_c=80.0))
    directives = run(governor, [State(0.0, die_c=30.0, clock_ratio=1.0)])
    directives += run(governor, states([30.0] * 10, start_s=1.0, clock_ratio=0.3))
    assert directives[-1].level == Level.WARM


def test_shares_of_k_without_energy_figures():
    governor = Governor(Policy(temp_limit_c=80.0))
    nominal, warm, hot, critical = run(governor, states([25.0, at(0.8), at(0.9), at(1.01)]))
    assert (warm.k_share, hot.k_share, critical.k_share) == (1.0, 0.5, 0.5)
    assert (warm.k_max, hot.k_max, critical.k_max) == (None, None, 1)
    assert all("energy=unknown" in directive.flags for directive in (nominal, warm, hot, critical))
    assert nominal.reference is None
    assert warm.reference == hot.reference == critical.reference == TIMES


def test_the_reference_is_what_the_last_cool_round_cost():
    governor = Governor(Policy(temp_limit_c=80.0))
    slower = replace(TIMES, verify_s={1: 0.3, 4: 0.31})
    governor.decide(State(0.0, die_c=30.0), TIMES)
    governor.decide(State(1.0, die_c=at(0.8)), slower)
    assert governor.decide(State(2.0, die_c=at(0.9)), slower).reference == TIMES


def test_what_was_first_measured_under_heat_joins_the_reference_as_the_cool_machine_would_have_it():
    governor = Governor(Policy(temp_limit_c=80.0))
    governor.decide(State(0.0, die_c=30.0), Costs({1: 0.1}))
    hot = Costs({1: 0.2, 4: 0.3}, {"model": 0.04})
    reference = governor.decide(State(1.0, die_c=at(0.9)), hot).reference
    assert reference == Costs({1: 0.1, 4: 0.15}, {"model": 0.02})


def test_a_machine_that_never_was_cool_is_judged_by_its_costs_of_now():
    governor = Governor(Policy(temp_limit_c=80.0))
    slower = replace(TIMES, verify_s={1: 0.3, 4: 0.31})
    assert governor.decide(State(0.0, die_c=78.0), Costs({})).reference is None
    assert governor.decide(State(1.0, die_c=78.0), TIMES).reference == TIMES
    assert governor.decide(State(2.0, die_c=78.0), slower).reference == slower


def test_objectives_and_power_by_level_with_energy_figures():
    governor = Governor(Policy(), Board())
    temps = [temp for temp in (25.0, at(0.76), at(0.89), at(1.01)) for _ in range(30)]
    settled = run(governor, states(temps, power_w=5.0), JOULES)[29::30]
    nominal, warm, hot, critical = settled
    kinds = [directive.objective.kind for directive in (nominal, warm, hot, critical)]
    assert kinds == ["latency", "latency", "latency", "energy"]
    assert warm.power_w > hot.power_w > critical.power_w
    assert warm.power_w <= TUNING.boost * 5.0
    assert critical.power_w < 5.0
    assert all(d.k_share == 1.0 and d.k_max is None for d in (nominal, warm, hot, critical))
    assert not any("energy=unknown" in d.flags for d in (nominal, warm, hot, critical))


def test_a_power_cap_is_passed_on_and_the_measured_mean_corrects_it():
    governor = Governor(Policy(power_cap_w=4.0))
    kept = run(governor, [State(float(i), die_c=40.0, power_w=3.9) for i in range(20)], JOULES)
    assert kept[-1].power_w == pytest.approx(4.0)
    over = run(governor, [State(20.0 + i, die_c=40.0, power_w=4.6) for i in range(20)], JOULES)
    assert over[-1].power_w < 3.7


def test_what_a_heat_limit_forbids_is_no_reason_to_distrust_a_cap_that_was_kept():
    governor = Governor(Policy(power_cap_w=6.0), Board(temp_limit_c=95.0, skin_limit_c=43.0))
    hot = [State(float(i), die_c=60.0, skin_c=43.4, power_w=5.0) for i in range(60)]
    bound = run(governor, hot, JOULES)[-1]
    assert bound.power_w < 5.0
    assert bound.cap_w is None
    cool = run(governor, [State(60.0 + i, die_c=40.0, skin_c=25.0, power_w=5.0) for i in range(120)], JOULES)
    first = next(directive for directive in cool if directive.cap_w is not None)
    assert first.power_w == pytest.approx(6.0)


@pytest.mark.parametrize(("die_c", "skin_c", "gains"), [(50.0, 42.9, TUNING.skin), (94.5, 30.0, TUNING.die)])
def test_work_may_go_on_for_longer_where_only_a_slow_body_limits_it(die_c, skin_c, gains):
    governor = Governor(Policy(), Board(temp_limit_c=95.0, skin_limit_c=43.0))
    told = run(
        governor, [State(float(i), die_c=die_c, skin_c=skin_c, power_w=5.0) for i in range(20)], JOULES
    )
    assert told[-1].burst_s == gains.burst_s
    assert TUNING.skin.burst_s > TUNING.die.burst_s


def test_a_power_cap_without_energy_figures_becomes_a_duty():
    governor = Governor(Policy(power_cap_w=4.0))
    duty, power = 1.0, []
    for i in range(600):
        power.append(1.5 + 6.5 * duty)  # 8 W of full work over 1.5 W of idling
        duty = governor.decide(State(0.1 * i, die_c=40.0, power_w=power[-1]), TIMES).duty
    assert sum(power[-100:]) / 100 == pytest.approx(4.0, rel=0.02)


def test_a_cap_that_nothing_measures_is_flagged():
    assert "power_cap=unmeasured" in Governor(Policy(power_cap_w=4.0)).decide(State(0.0), TIMES).flags


@pytest.mark.parametrize(
    ("cap_w", "idle_w", "flagged"),
    [(1.4, None, True), (1.6, None, False), (1.4, 1.0, False), (0.9, 1.0, True)],
)
def test_a_cap_below_what_is_drawn_at_rest_is_flagged(cap_w, idle_w, flagged):
    costs = replace(JOULES, energy=replace(JOULES.energy, idle_w=idle_w))
    state = State(0.0, die_c=40.0, power_w=2.0)
    directive = Governor(Policy(power_cap_w=cap_w), Board()).decide(state, costs)
    assert ("power_cap=below_rest" in directive.flags) is flagged
    assert "power_cap=below_rest" not in Governor(Policy(power_cap_w=cap_w)).decide(state, TIMES).flags


def test_no_sensor_at_all_leaves_speculation_alone_and_says_so():
    directive = Governor().decide(State(0.0), TIMES)
    assert (directive.level, directive.k_share, directive.duty) == (Level.NOMINAL, 1.0, 1.0)
    assert "telemetry=none" in directive.flags


def test_telemetry_that_vanishes_is_unknown_not_nominal():
    governor = Governor()
    run(governor, states([40.0] * 5))
    directives = run(governor, [State(5.0 + i) for i in range(60)])
    assert {directive.level for directive in directives} == {Level.WARM}
    assert all("telemetry=unknown" in directive.flags for directive in directives)
    back = run(governor, states([40.0] * 20, start_s=65.0))
    assert back[-1].level == Level.NOMINAL
    assert "telemetry=unknown" not in back[-1].flags


def test_stale_readings_from_the_start_are_unknown():
    assert Governor().decide(State(0.0, stale=("temperature",)), TIMES).level == Level.WARM


def test_a_limit_without_a_reading_is_conservative():
    directive = Governor(Policy(temp_limit_c=70.0)).decide(State(0.0), TIMES)
    assert directive.level == Level.WARM
    assert "telemetry=unknown" in directive.flags


def test_a_battery_at_its_floor_saves_energy_until_it_has_recovered():
    governor = Governor(Policy(battery_floor_percent=20.0), Board())
    kinds = []
    for i, (percent, charging) in enumerate(
        [(21, False), (20, False), (20.5, False), (21.5, False), (19, False), (19, True)]
    ):
        state = State(float(i), die_c=30.0, battery_percent=percent, charging=charging)
        directive = governor.decide(state, JOULES)
        kinds.append(directive.objective.kind)
        assert ("battery=floor" in directive.flags) == (kinds[-1] == "energy")
        assert directive.power_w == (5.0 if kinds[-1] == "energy" else None)
    assert kinds == ["latency", "energy", "energy", "latency", "energy", "latency"]


def test_memory_pressure_releases_the_draft_and_room_for_a_while_brings_it_back():
    governor = Governor(draft_mb=400.0)
    assert governor.decide(State(0.0, memory_available_mb=900.0), TIMES).draft_loaded
    low = governor.decide(State(1.0, memory_available_mb=100.0), TIMES)
    assert not low.draft_loaded
    assert "memory=low" in low.flags
    silent = [State(2.0 + i) for i in range(60)]
    assert not any(d.draft_loaded for d in run(governor, silent))  # nobody says that there is room now
    room = 400.0 + TUNING.memory_reserve_mb + TUNING.memory_return_mb
    not_yet = [State(62.0 + i, memory_available_mb=room - 1.0) for i in range(60)]
    assert not any(d.draft_loaded for d in run(governor, not_yet))
    enough = [State(122.0 + i, memory_available_mb=room + 1.0) for i in range(40)]
    back = [d.draft_loaded for d in run(governor, enough)]
    assert back.index(True) == TUNING.memory_return_s


def test_waiting_for_memory_releases_the_draft():
    governor = Governor(draft_mb=400.0)
    directive = governor.decide(State(0.0, memory_available_mb=9000.0, memory_pressure_percent=12.0), TIMES)
    assert not directive.draft_loaded
    assert "memory=pressure" in directive.flags


def test_a_limit_that_is_reached_again_releases_the_draft_until_it_is_no_more():
    """What was counted before the first look is not now's, nor a limit that only the pages of files reach."""
    room = 400.0 + TUNING.memory_reserve_mb + TUNING.memory_return_mb
    for available_mb in (TUNING.memory_reserve_mb + 1.0, None):
        governor = Governor(draft_mb=400.0)

        def look(time_s, events, available_mb=available_mb, governor=governor):
            state = State(time_s, memory_available_mb=available_mb, memory_events=events)
            return governor.decide(state, TIMES)

        assert look(0.0, 7.0).draft_loaded
        assert look(1.0, None).draft_loaded
        assert look(2.0, 7.0).draft_loaded
        assert look(3.0, 2.0).draft_loaded  # in another cgroup
        assert "memory=pressure" in look(4.0, 3.0).flags
        roomy = None if available_mb is None else room
        times = [5.0 + i for i in range(60)]
        back = [look(t, 3.0 if t < 20.0 or available_mb else 4.0, roomy).draft_loaded for t in times]
        since_s = 5.0 if available_mb else 21.0  # reached at 20 s once more
        assert times[back.index(True)] == since_s + TUNING.memory_return_s
    ample = TUNING.memory_reserve_mb + TUNING.memory_return_mb
    governor = Governor(draft_mb=400.0)
    cached = [State(float(i), memory_available_mb=ample, memory_events=float(i)) for i in range(9)]
    assert all(directive.draft_loaded for directive in run(governor, cached))


def test_a_process_that_grows_close_to_its_limit_gives_the_draft_up_until_there_is_room_for_it():
    governor = Governor(Policy(memory_limit_mb=1000.0), target_mb=500.0, draft_mb=200.0)
    assert governor.decide(State(0.0, memory_resident_mb=970.0), TIMES).draft_loaded
    near = governor.decide(State(1.0, memory_resident_mb=971.0), TIMES)
    assert "memory=near_limit" in near.flags
    silent = [State(1.5 + 0.01 * i) for i in range(10)] + [State(41.5)]
    assert not any(d.draft_loaded for d in run(governor, silent))
    not_yet = [State(42.0 + i, memory_resident_mb=741.0) for i in range(60)]
    assert not any(
        d.draft_loaded for d in run(governor, not_yet)
    )  # with it 941 of 1000, and 3 % are not to spare twice
    back = [
        d.draft_loaded for d in run(governor, [State(102.0 + i, memory_resident_mb=740.0) for i in range(40)])
    ]
    assert back.index(True) == TUNING.memory_return_s


def test_a_draft_that_does_not_fit_the_memory_limit_is_never_loaded():
    governor = Governor(Policy(memory_limit_mb=1000.0), target_mb=800.0, draft_mb=300.0)
    directives = run(governor, [State(float(i), memory_available_mb=1e6) for i in range(100)])
    assert not any(d.draft_loaded for d in directives)
    assert "memory=limit" in directives[0].flags


def test_the_same_states_give_the_same_directives():
    rng = random.Random(3)
    sequence = [
        State(
            0.1 * i,
            die_c=None if rng.random() < 0.05 else 60.0 + 25.0 * rng.random(),
            skin_c=30.0 + 15.0 * rng.random(),
            throttle=rng.choice([None, 0.0, 0.3, 1.0]),
            clock_ratio=rng.choice([None, 0.4, 1.0]),
            power_w=rng.choice([None, 3.0, 9.0]),
            memory_available_mb=1000.0 * rng.random(),
        )
        for i in range(2000)
    ]
    policy = Policy(power_cap_w=5.0, temp_limit_c=75.0)
    costs = [rng.choice([TIMES, JOULES]) for _ in sequence]
    first, second = Governor(policy, Board(), draft_mb=100.0), Governor(policy, Board(), draft_mb=100.0)
    for state, cost in zip(sequence, costs, strict=True):
        assert first.decide(state, cost) == second.decide(state, cost)


def test_a_state_shown_twice_changes_nothing():
    once, twice = Governor(Policy(temp_limit_c=70.0)), Governor(Policy(temp_limit_c=70.0))
    for state in states([68.0 + 0.01 * i for i in range(200)], step_s=0.1):
        twice.decide(state, TIMES)
        assert once.decide(state, TIMES) == twice.decide(state, TIMES)


def test_directives_only_narrow_limits():
    cool = Costs({1: 0.1})
    directive = Directive(power_w=4.0, duty=0.5, k_max=3, k_share=0.5, reference=cool)
    narrowed = directive.limit(Limits(8, power_w=3.0, duty=0.9))
    assert (narrowed.k_max, narrowed.power_w, narrowed.duty) == (3, 3.0, 0.5)
    assert (narrowed.k_share, narrowed.reference) == (0.5, cool)
    assert Directive().limit(Limits(8, power_w=3.0)) == Limits(8, power_w=3.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("objective", "speed"),
        ("power_cap_w", 0.0),
        ("power_cap_w", float("nan")),
        ("temp_limit_c", 500.0),
        ("battery_floor_percent", 101.0),
        ("memory_limit_mb", -5.0),
    ],
)
def test_a_policy_refuses_what_cannot_be_kept_naming_the_value(field, value):
    with pytest.raises(UsageError, match=str(value)):
        Policy(**{field: value})


class Plate:
    """One thermal mass: `tau_s` to follow, `rise_c` at full work."""

    def __init__(self, rise_c, tau_s, ambient_c=25.0):
        self.rise_c, self.tau_s, self.ambient_c, self.temp_c = rise_c, tau_s, ambient_c, ambient_c

    def step(self, duty, dt_s):
        settled = self.ambient_c + self.rise_c * duty
        self.temp_c += (settled - self.temp_c) * dt_s / self.tau_s


@pytest.mark.parametrize("ambient_c", [15.0, 25.0, 38.0])
@pytest.mark.parametrize(("rise_c", "tau_s"), [(70.0, 8.0), (60.0, 25.0), (90.0, 60.0)])
def test_without_power_figures_the_duty_holds_a_temperature_limit(rise_c, tau_s, ambient_c):
    governor, plate = Governor(Policy(temp_limit_c=70.0)), Plate(rise_c, tau_s, ambient_c)
    duty, highest, late = 1.0, 0.0, []
    for i in range(12000):
        plate.step(duty, 0.1)
        highest = max(highest, plate.temp_c)
        duty = governor.decide(State(0.1 * i, die_c=plate.temp_c), TIMES).duty
        if i > 9000:
            late.append(plate.temp_c)
    assert highest <= 71.0
    assert min(late) > 67.0, "it must not be colder than it has to be"


@pytest.mark.parametrize(("rise_c", "tau_s"), [(25.0, 200.0), (30.0, 500.0)])
def test_without_power_figures_the_duty_holds_a_slow_body(rise_c, tau_s):
    governor, plate = Governor(Policy(), Board(skin_limit_c=42.0)), Plate(rise_c, tau_s)
    duty, highest, late = 1.0, 0.0, []
    for i in range(24000):
        plate.step(duty, 0.25)
        highest = max(highest, plate.temp_c)
        duty = governor.decide(State(0.25 * i, die_c=40.0, skin_c=plate.temp_c), TIMES).duty
        if i > 16000:
            late.append(plate.temp_c)
    assert highest <= 43.0
    assert min(late) > 40.0


def test_the_kernels_rule_holds_a_limit_with_a_wrong_sustained_power():
    """5 W is what the profile says; the plate sustains 6.4 W or 3.8 W at its limit."""
    for resistance in (7.0, 12.0):
        governor, plate = Governor(Policy(temp_limit_c=70.0), Board()), Plate(resistance, 10.0)
        power, highest, late = 9.0, 0.0, []
        for i in range(6000):
            plate.step(power, 0.1)
            highest = max(highest, plate.temp_c)
            directive = governor.decide(State(0.1 * i, die_c=plate.temp_c, power_w=power), JOULES)
            power = 9.0 if directive.power_w is None else min(9.0, directive.power_w)
            if i > 4000:
                late.append(plate.temp_c)
        assert highest <= 71.0
        assert min(late) > 66.5


def test_time_to_throttle_is_told_while_a_limit_is_approached():
    governor = Governor(Policy(temp_limit_c=80.0))
    directives = run(governor, states([40.0 + 0.5 * i for i in range(60)]))
    assert directives[-1].time_to_throttle_s == pytest.approx((80.0 - 69.5) / 0.5, rel=0.05)
    assert run(Governor(Policy(temp_limit_c=80.0)), states([40.0] * 60))[-1].time_to_throttle_s is None


figure = st.one_of(st.none(), st.floats(-40.0, 150.0))
share = st.one_of(st.none(), st.floats(0.0, 1.0))


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.floats(-1.0, 100.0),
            st.builds(
                dict,
                die_c=figure,
                skin_c=figure,
                headroom=st.one_of(st.none(), st.floats(0.0, 5.0)),
                throttle=share,
                clock_ratio=share,
                power_w=st.one_of(st.none(), st.floats(0.0, 500.0)),
                battery_percent=st.one_of(st.none(), st.floats(0.0, 100.0)),
                charging=st.one_of(st.none(), st.booleans()),
                memory_available_mb=st.one_of(st.none(), st.floats(0.0, 1e5)),
                memory_pressure_percent=st.one_of(st.none(), st.floats(0.0, 100.0)),
                stale=st.sampled_from([(), ("temperature",)]),
            ),
            st.sampled_from([None, Costs({}), TIMES, JOULES]),
        ),
        max_size=30,
    ),
    policy=st.sampled_from(
        [
            Policy(),
            Policy("energy", 4.0, 70.0, 20.0),
            Policy("balanced", power_cap_w=0.5),
            Policy(memory_limit_mb=100.0),
        ]
    ),
    device=st.sampled_from([None, Board(), Board(skin_limit_c=43.0, sustained_w=None)]),
)
def test_whatever_the_sensors_say_a_directive_is_one_that_can_be_kept(steps, policy, device):
    governor, now_s, level = Governor(policy, device, draft_mb=300.0), 0.0, Level.NOMINAL
    for step_s, fields, costs in steps:
        now_s += step_s
        directive = governor.decide(State(now_s, **fields), costs)
        assert TUNING.least_duty <= directive.duty <= 1.0
        assert directive.power_w is None or 0.0 < directive.power_w <= (policy.power_cap_w or 1e6)
        assert directive.level >= level - 1, "one level down at most"
        assert directive.reference is None or directive.reference.verify_s
        assert directive.time_to_throttle_s is None or directive.time_to_throttle_s >= 0.0
        if costs is None or costs.energy is None:
            assert directive.k_share == (0.5 if directive.level >= Level.HOT else 1.0)
            assert directive.k_max == (1 if directive.level == Level.CRITICAL else None)
        level = directive.level


def test_limits_of_a_real_profile_are_held_on_a_machine_that_differs_from_it():
    """The simulated board of the same name, 15 % off its profile: nothing here is measured."""
    profile = load_device("raspberry-pi-5")
    plant = Machine(perturbed(profile, 7), ambient_c=33.0, seed=7)
    governor, energy = Governor(Policy(temp_limit_c=70.0), profile), Energy(1.9, {1: 0.43, 4: 0.6})
    costs, work, duty, highest = Costs({1: 0.1, 4: 0.11}, energy=energy), ModelCost(1.2e9, 3e9), 1.0, 0.0
    joules, then_s, late = plant.energy_j, plant.clock(), []
    while plant.clock() < 900.0:
        began_s = plant.clock()
        plant.execute(plant.device.decode_unit, work.work(3))
        plant.idle((plant.clock() - began_s) * (1.0 / duty - 1.0))
        power_w = (plant.energy_j - joules) / (plant.clock() - then_s)
        joules, then_s = plant.energy_j, plant.clock()
        state = State(then_s, die_c=plant.temperatures.die_c, power_w=power_w)
        directive = governor.decide(state, costs)
        busy_w = 0.55 / 0.11
        spare_w = (directive.power_w or 99.0) - energy.static_w
        duty = min(directive.duty, 1.0, max(spare_w / busy_w, 0.05))
        highest = max(highest, plant.temperatures.die_c)
        if plant.clock() > 600.0:
            late.append(plant.temperatures.die_c)
    assert highest <= 71.0
    assert min(late) > 68.0


ABSURD = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e308, -1e308, -1.0, 0.0, 1e-300, 50.0])
FIGURES = (
    *("die_c", "skin_c", "headroom", "throttle", "clock_ratio", "power_w", "battery_percent"),
    *("memory_available_mb", "memory_pressure_percent", "memory_events", "memory_resident_mb"),
)
TIME = st.sampled_from([0.1, 1.0, 0.0, -5.0, 1e6, -1e6, float("nan"), float("inf"), -float("inf")])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(TIME, st.dictionaries(st.sampled_from(FIGURES), ABSURD)), max_size=30),
    st.sampled_from([None, TIMES, JOULES]),
    st.booleans(),
)
def test_states_that_cannot_be_never_make_a_directive_that_cannot_be(steps, costs, known) -> None:
    device = load_device("snapdragon-8-gen3") if known else None
    governor, now_s = Governor(Policy("latency", 5.0, 70.0, 30.0, 1000.0), device), 0.0
    for step_s, figures in steps:
        found = governor.decide(State(now_s + step_s, **figures), costs)
        now_s += step_s if isfinite(step_s) else 0.0
        told = (found.power_w, found.cap_w, found.duty, found.k_share, found.time_to_throttle_s)
        assert all(value is None or (isfinite(value) and value >= 0.0) for value in told)
        assert found.duty <= 1.0


def test_a_time_that_is_no_number_changes_nothing() -> None:
    governor = Governor(Policy(temp_limit_c=80.0))
    run(governor, states([70.0, 71.0, 72.0]))
    before = governor.decide(State(3.0, die_c=73.0), TIMES)
    for time_s in (float("nan"), float("inf"), -float("inf")):
        assert governor.decide(State(time_s, die_c=120.0), TIMES) == before
