"""The sampler keeps going whatever one sensor does, and distills what is fresh, plausible and most to be trusted."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.contracts import Reading
from outrider.power import monitor as module
from outrider.power.monitor import Monitor, choose_power, distill
from outrider.targets.fake import VirtualClock


def reading(
    quantity: Any, value: float | None, scope: Any = "die", source: str = "a", **more: Any
) -> Reading:
    fields = {"method": "instant", "time_s": 10.0, **more}
    return Reading(source, quantity, value, scope, **fields)


def heat(value: float | None, scope: str = "die", source: str = "a", **more: Any) -> Reading:
    return reading("temperature", value, scope, source, **more)


class Scripted:
    """A sensor that gives one temperature each time, from a function of the number of the read."""

    def __init__(
        self, clock: Callable[[], float], value: Callable[[int], Any], period_s: float = 1.0, name: str = "s"
    ) -> None:
        self.clock, self.value, self.period_s, self.name, self.reads = clock, value, period_s, name, 0

    def read(self) -> list[Reading]:
        self.reads += 1
        value = self.value(self.reads)
        return [heat(value, source=f"{self.name}:x", time_s=self.clock())]


# distill


def test_the_hottest_silicon_counts_and_other_places_do_not() -> None:
    state = distill(
        [
            heat(50, "core", "c"),
            heat(61, "package", "p"),
            heat(70, "rail", "vrm"),
            heat(80, "device", "nvme"),
        ],
        10.0,
    )
    assert state.die_c == 61
    assert state.skin_c is None


def test_skin_is_the_case_and_only_without_it_the_battery() -> None:
    assert distill([heat(38, "skin"), heat(41, "battery", "b")], 10.0).skin_c == 38
    assert distill([heat(41, "battery", "b")], 10.0).skin_c == 41


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, None, -650788.984, 32768.0, 126.0, -41.0])
def test_nan_and_rubbish_never_win_a_maximum(rubbish: float | None) -> None:
    for order in ([heat(rubbish), heat(41, source="b")], [heat(41, source="b"), heat(rubbish)]):
        assert distill(order, 10.0).die_c == 41
    assert distill([heat(rubbish)], 10.0).die_c is None


def test_a_rubbish_reading_does_not_hide_the_good_one_just_before_it() -> None:
    good, bad = heat(41, time_s=9.0), heat(math.nan, time_s=10.0)
    assert distill([good, bad], 10.0).die_c == 41


def test_nothing_known_is_nothing_said() -> None:
    state = distill([], 3.0)
    assert replace(state, time_s=0.0) == module.State(0.0)


def test_a_reading_counts_for_three_periods_of_its_source_and_is_then_named_stale() -> None:
    periods = {"a": 2.0}
    assert distill([heat(50, time_s=4.0)], 10.0, periods).die_c == 50
    old = distill([heat(50, time_s=3.9)], 10.0, periods)
    assert (old.die_c, old.stale) == (None, ("temperature",))


def test_one_stale_source_is_not_flagged_while_another_answers() -> None:
    state = distill([heat(90, time_s=0.0), heat(50, source="b")], 10.0)
    assert (state.die_c, state.stale) == (50, ())


def test_a_source_that_says_why_it_has_no_value_is_unknown_not_stale() -> None:
    state = distill([heat(90, time_s=0.0), heat(None, time_s=9.0, reason="powered down")], 10.0)
    assert (state.die_c, state.stale) == (None, ())


def test_the_order_of_readings_does_not_matter() -> None:
    """A first word without value, before the value, takes nothing back."""
    early, value, late = heat(None, time_s=1.0), heat(50, time_s=2.0), heat(None, time_s=3.0)
    for order in ([early, value], [value, early]):
        assert distill(order, 10.0).stale == ("temperature",)
    for order in ([early, value, late], [late, value, early], [late, early, value]):
        assert distill(order, 10.0).stale == ()


def test_a_reading_from_the_future_does_not_stay_fresh_for_ever() -> None:
    assert distill([heat(50, time_s=1000.0)], 10.0).die_c is None


def test_vendors_headroom_and_throttling_are_the_worst_of_all() -> None:
    state = distill(
        [
            reading("headroom", 0.4, "skin"),
            reading("headroom", 0.9, "skin", "b"),
            reading("throttle", 0.0),
            reading("throttle", 0.25, source="b"),
        ],
        10.0,
    )
    assert (state.headroom, state.throttle) == (0.9, 0.25)


def test_what_a_unit_may_run_at_says_more_than_what_it_runs_at_while_idle() -> None:
    idle = [reading("clock", 0.6e9), reading("clock_limit", 2.4e9), reading("clock_max", 2.4e9)]
    assert distill(idle, 10.0).clock_ratio == 1.0
    capped = [reading("clock", 0.6e9), reading("clock_limit", 1.2e9), reading("clock_max", 2.4e9)]
    assert distill(capped, 10.0).clock_ratio == 0.5
    real = [reading("clock", 1.5e9, source="pi"), reading("clock_max", 2.5e9, source="pi")]
    assert distill([*idle, *real], 10.0).clock_ratio == 0.6


def test_a_clock_above_the_design_is_no_ratio_above_one() -> None:
    assert distill([reading("clock_limit", 3e9), reading("clock_max", 2e9)], 10.0).clock_ratio == 1.0


def test_available_memory_is_the_least_of_machine_and_limit() -> None:
    host = reading("memory_available", 8000.0, "device", "memory:host")
    limit = reading("memory_limit", 2000.0, "process", "memory:cgroup")
    used = reading("memory_used", 1500.0, "process", "memory:cgroup")
    assert distill([host, limit, used], 10.0).memory_available_mb == 500
    assert distill([host, limit], 10.0).memory_available_mb == 8000
    over = replace(used, value=2100.0)
    assert distill([host, limit, over], 10.0).memory_available_mb == 0


def test_charging_is_a_fact_or_unknown() -> None:
    assert distill([reading("charging", 1.0, "battery")], 10.0).charging is True
    assert distill([reading("charging", 0.0, "battery")], 10.0).charging is False
    assert distill([reading("battery", 40.0, "battery")], 10.0).charging is None


TRUST = [
    ("module", "instant"), ("soc", "counter"), ("package", "counter"), ("battery", "instant"),
    ("module", "estimated"), ("module", "simulated"),
]  # fmt: skip


def test_one_power_source_is_chosen_by_trust_and_none_is_added() -> None:
    powers = [
        reading("power", 1.0 + index, scope, f"s{index}", method=method)
        for index, (scope, method) in enumerate(TRUST)
    ]
    for index, (scope, method) in enumerate(TRUST):
        state = distill(list(reversed(powers[index:])), 10.0)
        assert (state.power_w, state.power_scope, state.power_method) == (1.0 + index, scope, method)


@pytest.mark.parametrize("scope", ["rail", "core", "memory", "die"])
def test_a_part_is_not_taken_for_the_machine(scope: str) -> None:
    assert distill([reading("power", 4.0, scope)], 10.0).power_w is None


def test_the_choice_between_equals_does_not_flicker() -> None:
    for a, b in ((5.0, 6.0), (6.0, 5.0)):
        chosen = choose_power([reading("power", b, "package", "b"), reading("power", a, "package", "a")])
        assert chosen is not None
        assert chosen.source == "a"


def test_a_card_is_not_taken_for_the_machine_while_a_package_tells() -> None:
    chosen = choose_power([reading("power", 30.0, "package", s) for s in ("nvml:0", "rapl:package-0")])
    assert chosen is not None
    assert chosen.source == "rapl:package-0"


@pytest.mark.parametrize("value", [-7.0, 0.0])
def test_a_charging_or_resting_battery_does_not_show_the_load(value: float) -> None:
    assert distill([reading("power", value, "battery")], 10.0).power_w is None


quantities = st.sampled_from(["temperature", "power", "headroom", "throttle", "battery", "memory_available"])
values = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 100))


@given(st.lists(st.tuples(quantities, values, st.sampled_from("abc"), st.floats(0, 20))))
def test_whatever_sensors_say_the_state_holds_numbers_or_nothing(rows: list[tuple[Any, ...]]) -> None:
    readings = [
        heat(v, source=s, time_s=t) if q == "temperature" else reading(q, v, source=s, time_s=t)
        for q, v, s, t in rows
    ]
    state = distill(readings, 10.0)
    figures = [state.die_c, state.power_w, state.headroom, state.throttle, state.battery_percent]
    assert all(figure is None or math.isfinite(figure) for figure in figures)
    assert state == distill(list(readings), 10.0)


# Monitor under a virtual clock


def test_each_sensor_is_read_at_its_own_pace() -> None:
    clock = VirtualClock()
    fast, slow = Scripted(clock, lambda n: 40, 0.1, "fast"), Scripted(clock, lambda n: 40, 2.0, "slow")
    monitor = Monitor([fast, slow], clock)
    for _ in range(100):
        monitor.poll()
        clock.advance(0.1)
    assert 98 <= fast.reads <= 101
    assert slow.reads == 5


def test_no_sensor_is_read_more_often_than_the_interval() -> None:
    clock = VirtualClock()
    sensor = Scripted(clock, lambda n: 40, 0.01)
    monitor = Monitor([sensor], clock, interval_s=1.0)
    for _ in range(100):
        monitor.poll()
        clock.advance(0.1)
    assert 10 <= sensor.reads <= 11


def failing(n: int) -> float:
    raise ZeroDivisionError("no such bus")


def test_a_sensor_that_raises_is_reported_and_stops_no_other() -> None:
    clock = VirtualClock()
    monitor = Monitor([Scripted(clock, failing, name="bad"), Scripted(clock, lambda n: 40 + n)], clock)
    assert [monitor.poll().die_c, clock.advance(1), monitor.poll().die_c] == [41, None, 42]
    (report,) = [r for r in monitor.readings() if r.value is None]
    assert report.source == "monitor:bad"
    assert "ZeroDivisionError: no such bus" in report.reason


def test_the_report_goes_when_the_sensor_recovers() -> None:
    clock = VirtualClock()
    monitor = Monitor([Scripted(clock, lambda n: failing(n) if n == 1 else 40)], clock)
    monitor.poll()
    clock.advance(1)
    assert monitor.poll().die_c == 40
    assert [r.source for r in monitor.readings()] == ["s:x"]


def test_a_sensor_that_vanishes_is_bridged_for_three_periods_and_then_unknown() -> None:
    clock = VirtualClock()
    monitor = Monitor([Scripted(clock, lambda n: 40 if n <= 2 else None)], clock)
    seen = []
    for _ in range(8):
        seen.append(monitor.poll().die_c)
        clock.advance(1.0)
    assert seen == [40, 40, 40, 40, 40, None, None, None]


def test_a_sensor_that_raises_for_good_leaves_its_quantity_stale() -> None:
    clock = VirtualClock()
    monitor = Monitor([Scripted(clock, lambda n: 40 if n <= 2 else failing(n))], clock)
    for _ in range(8):
        state = monitor.poll()
        clock.advance(1.0)
    assert (state.die_c, state.stale) == (None, ("temperature",))


def test_a_jump_of_the_clock_makes_everything_stale_until_it_is_read_again() -> None:
    clock = VirtualClock()
    monitor = Monitor([Scripted(clock, lambda n: 40 + n)], clock)
    monitor.poll()
    clock.advance(3600.0)
    assert monitor.state().stale == ("temperature",)
    assert monitor.poll().die_c == 42


def test_after_a_jump_a_sensor_is_read_once_not_once_for_each_missed_period() -> None:
    clock = VirtualClock()
    sensor = Scripted(clock, lambda n: 40)
    monitor = Monitor([sensor], clock)
    monitor.poll()
    clock.advance(3600.0)
    for _ in range(5):
        monitor.poll()
        clock.advance(0.1)
    assert sensor.reads == 2


@pytest.mark.parametrize("round_s", [0.04, 0.23, 0.31, 0.7])
def test_polls_that_come_late_do_not_make_a_sensor_slower(round_s: float) -> None:
    """Rounds of any length end somewhere between two due times."""
    clock = VirtualClock()
    slow = Scripted(clock, lambda n: 40.0, period_s=1.0)
    monitor = Monitor([slow], clock)
    while clock() < 100.0:
        monitor.poll()
        clock.advance(round_s)
    assert 99 <= slow.reads <= 101


def test_time_of_a_source_never_goes_back() -> None:
    clock = VirtualClock(100.0)
    times = iter([100.0, 90.0, 101.0])

    class Back(Scripted):
        def read(self) -> list[Reading]:
            time_s = next(times)
            return [heat(time_s / 2, time_s=time_s)]

    monitor = Monitor([Back(clock, lambda n: 0)], clock)
    seen = []
    for _ in range(3):
        seen.append((monitor.poll().die_c, monitor.readings()[0].time_s))
        clock.advance(1.0)
    assert seen == [(50, 100), (50, 100), (50.5, 101)]


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.9, 3.0, 3.1, 40.0]), max_size=40), st.integers(0, 9))
def test_a_state_is_always_what_the_readings_say_of_its_time(steps: list[float], lag: int) -> None:
    """Between two reads the state is not worked out again, unless a reading has become stale."""
    clock = VirtualClock(100.0)

    class Lagging(Scripted):
        def read(self) -> list[Reading]:
            (found,) = super().read()
            return [replace(found, time_s=found.time_s - lag + 4)]

    ahead, exact = Lagging(clock, lambda n: 40 + n, 1.0, "b"), Scripted(clock, lambda n: 30 + n, 0.5, "c")
    monitor = Monitor([ahead, exact], clock)
    for index, step in enumerate(steps):
        if index % 3 == 0:
            monitor.poll()
        assert monitor.state() == distill(monitor.readings(), clock(), monitor.periods)
        clock.advance(step)


def test_a_slow_sensor_is_asked_less_and_is_not_stale_for_that() -> None:
    clock = VirtualClock()

    def slow(n: int) -> float:
        clock.advance(0.8)
        return 40.0

    sensor = Scripted(clock, slow, 0.5)
    monitor = Monitor([sensor], clock)
    for _ in range(200):
        assert monitor.poll().die_c == 40
        clock.advance(0.1)
    assert monitor.periods["s:x"] == 2.0
    assert monitor.overhead_share < 0.5


def test_overhead_is_the_time_spent_reading_over_the_time_that_passed() -> None:
    clock = VirtualClock()

    def read(n: int) -> float:
        clock.advance(0.002)
        return 40.0

    monitor = Monitor([Scripted(clock, read, 0.1)], clock)
    assert monitor.overhead_share == 0.0
    for _ in range(100):
        monitor.poll()
        clock.advance(0.098)
    assert monitor.overhead_share == pytest.approx(0.02, rel=0.05)


def counter(clock: VirtualClock, joules: Callable[[float], float]) -> Any:
    class Counter:
        name, period_s = "counter", 0.1

        def read(self) -> list[Reading]:
            return [reading("energy", joules(clock()), "package", "rapl", method="counter", time_s=clock())]

    return Counter()


def test_power_of_an_energy_counter_is_its_mean_over_the_last_second() -> None:
    clock = VirtualClock()
    monitor = Monitor([counter(clock, lambda t: 5 * min(t, 4) + 9 * max(0.0, t - 4))], clock)
    seen = {}
    for step in range(80):
        seen[step / 10] = monitor.poll().power_w
        clock.advance(0.1)
    assert seen[0.0] is None
    assert seen[3.9] == pytest.approx(5.0)
    assert seen[4.5] == pytest.approx(7.0, abs=0.25)
    assert seen[5.5] == pytest.approx(9.0)


def test_a_counter_that_starts_again_gives_no_negative_power() -> None:
    clock = VirtualClock()
    monitor = Monitor([counter(clock, lambda t: 5 * (t if t < 3 else t - 3))], clock)
    for _ in range(80):
        power = monitor.poll().power_w
        assert power is None or power == pytest.approx(5.0)
        clock.advance(0.1)
    assert power == pytest.approx(5.0)


def test_power_is_not_averaged_over_a_gap() -> None:
    clock = VirtualClock()
    monitor = Monitor([counter(clock, lambda t: 5 * t if t < 3 else 15 + 1.0 * (t - 3))], clock)
    for _ in range(20):
        monitor.poll()
        clock.advance(0.1)
    clock.advance(60.0)
    assert monitor.poll().power_w is None
    clock.advance(0.1)
    assert monitor.poll().power_w == pytest.approx(1.0)


def test_listeners_get_every_batch_and_a_broken_one_is_taken_out() -> None:
    clock = VirtualClock()
    heard: list[Sequence[Reading]] = []

    def broken(batch: Sequence[Reading]) -> None:
        raise OSError("no space")

    monitor = Monitor([Scripted(clock, lambda n: 40 + n)], clock)
    monitor.listeners += [broken, heard.append]
    for _ in range(3):
        monitor.poll()
        clock.advance(1.0)
    assert [batch[0].value for batch in heard] == [41, 42, 43]
    assert [(listener, str(error)) for listener, error in monitor.failed_listeners] == [(broken, "no space")]


# Monitor in its thread


def eventually(condition: Callable[[], bool], looks: int = 12_000) -> bool:
    """Whether it comes true within a minute, or longer on a machine that is busy."""
    for _ in range(looks):
        if condition():
            return True
        time.sleep(0.005)
    return condition()


def test_the_thread_samples_until_its_owner_joins_it() -> None:
    sensor = Scripted(time.monotonic, lambda n: 40, 0.01)
    before = threading.active_count()
    with Monitor([sensor], interval_s=0.01) as monitor:
        assert eventually(lambda: sensor.reads > 5)
        assert [reading.value for reading in monitor.readings()] == [40]
    assert threading.active_count() == before
    reads = sensor.reads
    time.sleep(0.05)
    assert sensor.reads == reads


def test_a_monitor_can_be_started_again() -> None:
    sensor = Scripted(time.monotonic, lambda n: 40, 0.01)
    monitor = Monitor([sensor], interval_s=0.01)
    for _ in range(2):
        reads = sensor.reads
        monitor.start()
        assert eventually(lambda start=reads: sensor.reads > start + 1)
        monitor.stop()


def test_stop_closes_what_sensors_hold_open() -> None:
    sensor: Any = Scripted(time.monotonic, lambda n: 40)
    closed = []
    sensor.close = lambda: closed.append(True)
    Monitor([sensor]).start().stop()
    assert closed == [True]


def test_a_read_that_blocks_is_reported_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCKED_S", 0.05)
    release = threading.Event()

    def hang(n: int) -> float:
        if n == 2:
            release.wait(120)
        return 50.0

    stuck, fine = (
        Scripted(time.monotonic, hang, 0.01, "stuck"),
        Scripted(time.monotonic, lambda n: 40, 0.01, "fine"),
    )
    monitor = Monitor([stuck, fine], interval_s=0.01).start()
    try:
        assert eventually(lambda: stuck.reads == 2)
        reads = fine.reads
        assert eventually(lambda: monitor.state() is not None and fine.reads > reads + 5)
        reports = [r.reason for r in monitor.readings() if r.source == "monitor:stuck"]
        assert reports == ["no answer within 0.05 s; it is not asked before it answers"]
        assert stuck.reads == 2
        release.set()
        assert eventually(lambda: stuck.reads > 3), "it is asked again once it has answered"
    finally:
        release.set()
        monitor.stop()
    assert eventually(lambda: not any(t.name == "outrider-monitor" for t in threading.enumerate()))


def test_the_sleep_is_injected() -> None:
    slept = []
    clock = VirtualClock()
    done = threading.Event()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)
        if len(slept) >= 20:
            done.set()
            time.sleep(0.01)

    sensor = Scripted(clock, lambda n: 40, 0.5)
    monitor = Monitor([sensor], clock, sleep=sleep).start()
    assert done.wait(60)
    monitor.stop()
    assert slept[:20] == pytest.approx([0.5] * 20)


@pytest.mark.parametrize(
    "wrong",
    [{"value": "5"}, {"value": 10**400}, {"quantity": "bogus"}, {"scope": "bogus"}],
    ids=["text", "digits", "quantity", "scope"],
)
def test_a_sensor_of_someone_else_that_breaks_the_contract_does_not_end_the_sampling(
    wrong: dict[str, Any],
) -> None:
    class Odd:
        name, period_s = "odd", 1.0

        def read(self) -> list[Reading]:
            return [replace(Reading("odd", "power", 5.0, "module", "instant", 0.0), **wrong)]

    clock = VirtualClock()
    monitor = Monitor([Odd(), Scripted(clock, lambda _: 50.0)], clock)
    assert monitor.poll().die_c == 50.0
    assert monitor.state().power_w is None
