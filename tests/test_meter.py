"""Energy of windows: right within 1 %, honest about what was not seen, never a made-up zero."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Energy, Reading, as_json
from outrider.errors import UsageError
from outrider.power.meter import CounterFacts, Meter, Window
from outrider.power.stages import Drafted, per_token, split_stages, wasted
from outrider.targets.fake import VirtualClock

WRAP_J = 70.0
RUN = Window("run", 10.0, 70.0)


def power(source, time_s, watts, scope="module", method="instant"):
    return Reading(source, "power", watts, scope, method, time_s)


def counter(source, time_s, joules, scope="package"):
    return Reading(source, "energy", joules, scope, "counter", time_s)


SIGNALS = {
    # name: (watts at t, joules from 0 to t)
    "constant": (lambda t: 4.0, lambda t: 4.0 * t),
    "ramp": (lambda t: 1.0 + 0.1 * t, lambda t: t + 0.05 * t * t),
    "sine": (
        lambda t: 5.0 + 3.0 * math.sin(t / 1.7),
        lambda t: 5.0 * t + 3.0 * 1.7 * (1.0 - math.cos(t / 1.7)),
    ),
    "steps": (
        lambda t: 2.0 if t % 20.0 < 10.0 else 8.0,
        lambda t: 100.0 * (t // 20.0) + 2.0 * min(t % 20.0, 10.0) + 8.0 * max(t % 20.0 - 10.0, 0.0),
    ),
}


def ticks(seed, jitter=0.5, period=0.1, until=80.0, lost=()):
    """Irregular sampling times, with stretches in which the sampler was away."""
    rng, t, out = random.Random(seed), 0.0, []
    while t < until:
        if not any(a < t < b for a, b in lost):
            out.append(t)
        t += period * rng.uniform(1.0 - jitter, 1.0 + jitter)
    return out


def truth(name, window=RUN):
    total = SIGNALS[name][1]
    return total(window.end_s) - total(window.start_s)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SIGNALS)), st.integers(0, 10_000), st.floats(0.0, 0.9))
def test_power_with_jitter_is_integrated_within_one_percent(name, seed, jitter):
    meter = Meter()
    meter.feed(power("ina:VDD_IN", t, SIGNALS[name][0](t)) for t in ticks(seed, jitter))
    measured = meter.measure(RUN)
    assert measured.energy_j == pytest.approx(truth(name), rel=0.01)
    assert measured.budget.coverage == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SIGNALS)), st.integers(0, 10_000), st.floats(11.0, 60.0), st.floats(0.5, 5.0))
def test_a_counter_that_wraps_and_has_gaps_is_read_within_one_percent(name, seed, gap_at, gap_s):
    facts = {"rapl:package-0": CounterFacts(wrap_j=WRAP_J * 100)}
    meter = Meter(counters=facts)
    offset = 0.97 * WRAP_J * 100
    for t in ticks(seed, lost=[(gap_at, gap_at + gap_s)]):
        meter.feed([counter("rapl:package-0", t, (offset + SIGNALS[name][1](t)) % (WRAP_J * 100))])
    measured = meter.measure(RUN)
    assert measured.energy_j == pytest.approx(truth(name), rel=0.01)
    assert measured.budget.method == "counter"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SIGNALS)), st.integers(0, 10_000), st.floats(12.0, 60.0), st.floats(0.6, 5.0))
def test_a_gap_in_power_is_not_bridged_and_what_was_seen_is_right(name, seed, gap_at, gap_s):
    meter = Meter()
    meter.feed(power("pmic", t, SIGNALS[name][0](t)) for t in ticks(seed, lost=[(gap_at, gap_at + gap_s)]))
    measured = meter.measure(RUN)
    unseen = truth(name, Window("gap", gap_at, gap_at + gap_s))
    assert measured.covered_j == pytest.approx(truth(name) - unseen, rel=0.02)
    assert measured.budget.gaps == 1
    assert gap_s - 0.01 <= measured.budget.uncovered_s <= gap_s + 0.35
    assert measured.energy_j == pytest.approx(measured.covered_j / measured.budget.coverage)
    assert any("not seen" in text for text in measured.warnings)


def test_below_nine_tenths_of_coverage_there_is_no_total_but_what_was_seen_stays():
    meter = Meter()
    meter.feed(power("pmic", t, 4.0) for t in ticks(1, lost=[(20.0, 40.0)]))
    measured = meter.measure(RUN)
    assert measured.energy_j is None
    assert measured.covered_j == pytest.approx(4.0 * 40.0, rel=0.02)
    assert "covers only" in measured.reason


def test_a_spike_in_a_gap_would_not_be_invented():
    meter = Meter(periods={"pmic": 0.1})
    meter.feed([power("pmic", 10.0, 100.0), power("pmic", 10.1, 100.0), power("pmic", 19.9, 100.0)])
    measured = meter.measure(Window("w", 10.0, 20.0))
    assert measured.covered_j == pytest.approx(10.0)
    assert measured.energy_j is None


@given(st.lists(st.floats(0.0, 1e5), min_size=2, max_size=60), st.floats(1.0, 1e5))
def test_energy_of_any_counter_is_never_negative(values, wrap_j):
    meter = Meter(counters={"c": CounterFacts(wrap_j=wrap_j)})
    meter.feed(counter("c", 0.1 * i, value) for i, value in enumerate(values))
    measured = meter.measure(Window("w", 0.0, 0.1 * (len(values) - 1)))
    assert measured.covered_j is None or measured.covered_j >= 0.0


def test_a_counter_that_was_reset_costs_coverage_not_energy():
    meter = Meter()
    for i in range(200):
        meter.feed([counter("rapl", 0.1 * i, 5.0 * 0.1 * i - (40.0 if i > 100 else 0.0))])
    measured = meter.measure(Window("w", 1.0, 19.0))
    assert measured.energy_j == pytest.approx(90.0, rel=0.01)
    assert measured.budget.gaps == 1


def test_two_wraps_that_one_interval_could_hide_are_not_believed():
    meter = Meter(counters={"rapl": CounterFacts(wrap_j=100.0)})
    meter.feed([counter("rapl", 0.0, 10.0), counter("rapl", 0.05, 10.5), counter("rapl", 5.0, 30.0)])
    assert meter.measure(Window("w", 0.0, 5.0)).energy_j is None


def test_the_most_trusted_source_is_taken_and_scopes_are_never_summed():
    meter = Meter()
    for t in ticks(3):
        meter.feed(
            [
                power("rail:CPU", t, 3.0, "rail"),
                power("rail:GPU", t, 2.0, "rail"),
                power("tdp", t, 9.0, "package", "estimated"),
                power("ina:VDD_IN", t, 7.0, "module"),
            ]
        )
    measured = meter.measure(RUN)
    assert measured.mean_w == pytest.approx(7.0)
    assert (measured.budget.source, measured.budget.rank) == ("ina:VDD_IN", 2)


def test_a_counter_is_taken_before_the_power_of_the_same_scope():
    meter = Meter()
    for t in ticks(3):
        meter.feed([power("p", t, 7.5, "package"), counter("rapl", t, 7.0 * t)])
    assert meter.measure(RUN).budget.quantity == "energy"


def test_a_trusted_source_that_was_away_gives_way_to_one_that_was_there():
    meter = Meter()
    meter.feed(power("ina", t, 7.0) for t in ticks(3, lost=[(15.0, 60.0)]))
    meter.feed(power("rail", t, 3.0, "rail") for t in ticks(4))
    assert meter.measure(RUN).budget.source == "rail"
    assert meter.measure(RUN, source="ina").energy_j is None


def test_simulated_and_estimated_figures_rank_last_and_say_so():
    meter = Meter()
    meter.feed(power("sim", t, 7.0, "module", "simulated") for t in ticks(3))
    budget = meter.measure(RUN).budget
    assert (budget.rank, budget.trust, budget.method) == (7, "simulated", "simulated")


def test_without_a_source_there_is_no_energy_and_the_reason_is_the_sensors():
    meter = Meter()
    reason = "permission denied: sudo chmod a+r energy_uj"
    meter.feed([Reading("rapl:package-0", "energy", None, "package", "counter", 1.0, reason)])
    measured = meter.measure(RUN)
    assert measured.energy_j is None
    assert reason in measured.reason


def test_nan_and_late_readings_are_dropped_and_counted():
    meter = Meter()
    meter.feed(power("pmic", t, 4.0) for t in ticks(5))
    clean = meter.measure(RUN).energy_j
    meter = Meter()
    for i, t in enumerate(ticks(5)):
        meter.feed([power("pmic", t, 4.0)])
        if i % 50 == 0:
            meter.feed([power("pmic", t, math.nan), power("pmic", t, 4.0), power("pmic", t - 1.0, 900.0)])
    measured = meter.measure(RUN)
    assert measured.energy_j == pytest.approx(clean)
    assert measured.budget.dropped == pytest.approx(12, abs=3)


def test_windows_nest_and_overlap_and_a_name_can_come_again():
    clock = VirtualClock()
    meter = Meter(clock)

    def run(seconds):
        for _ in range(round(seconds / 0.1)):
            clock.advance(0.1)
            meter.feed([power("pmic", clock(), 4.0)])

    run(1.0)
    meter.begin("all")
    with meter.window("part"):
        run(10.0)
        meter.begin("crossing")
        run(5.0)
    run(5.0)
    meter.end("crossing")
    with meter.window("part"):
        run(3.0)
    meter.end("all")
    seconds = [meter.measure(name).energy_j / 4.0 for name in ("all", "crossing", "part")]
    assert seconds == pytest.approx([23.0, 10.0, 3.0])
    assert [w.seconds for w in meter.windows("part")] == pytest.approx([15.0, 3.0])


def test_a_window_is_closed_when_its_block_fails():
    meter = Meter(VirtualClock())
    with pytest.raises(RuntimeError), meter.window("w"):
        raise RuntimeError
    assert len(meter.windows("w")) == 1


def test_wrong_names_are_refused_with_the_known_ones():
    meter = Meter(VirtualClock())
    meter.begin("a")
    with pytest.raises(UsageError, match="'a' is open already"):
        meter.begin("a")
    with pytest.raises(UsageError, match="no window 'b' is open; open: a"):
        meter.end("b")
    meter.end("a")
    with pytest.raises(UsageError, match="no window 'c' was closed; closed: a"):
        meter.measure("c")
    with pytest.raises(UsageError, match="known: none"):
        meter.measure("a", source="x")


def fed(watts_at):
    meter = Meter()
    meter.feed(power("pmic", t, watts_at(t)) for t in ticks(9))
    return meter


def test_net_is_above_the_mean_of_idle_before_and_after_and_drift_is_reported():
    meter = fed(lambda t: 2.0 if t < 10.0 else 6.0 if t < 70.0 else 3.0)
    measured = meter.measure(RUN, Window("before", 1.0, 9.0), Window("after", 71.0, 79.0))
    assert measured.idle_w == pytest.approx(2.5)
    assert measured.idle_drift_w == pytest.approx(1.0)
    assert measured.net_j == pytest.approx((6.0 - 2.5) * 60.0, rel=0.01)
    assert any("idle power moved" in text for text in measured.warnings)


def test_negative_net_keeps_its_sign_and_is_warned_about():
    meter = fed(lambda t: 5.0 if t < 10.0 else 4.0)
    measured = meter.measure(RUN, idle_before=Window("before", 1.0, 9.0))
    assert measured.net_j == pytest.approx(-60.0, rel=0.02)
    assert any("negative" in text for text in measured.warnings)
    assert any("one side only" in text for text in measured.warnings)


def test_few_samples_are_warned_about_and_the_budget_counts_them():
    meter = Meter()
    meter.feed(power("battery", 10.0 * i, 3.0, "battery") for i in range(9))
    measured = meter.measure(RUN)
    assert (measured.budget.samples_expected, measured.budget.samples_got) == (6, 7)
    assert any("only 7 samples" in text for text in measured.warnings)


def test_a_counter_read_faster_than_it_publishes_counts_updates_and_bounds_its_edges():
    meter = Meter()
    meter.feed(counter("ioreport", t, 5.0 * 2.2 * (t // 2.2)) for t in ticks(2))
    measured = meter.measure(RUN)
    assert measured.budget.samples_got == pytest.approx(60 / 2.2, abs=2)
    assert abs(measured.energy_j - 300.0) <= measured.budget.edge_j


def test_old_readings_are_forgotten_but_not_those_of_an_open_window_or_the_one_closed_last():
    clock = VirtualClock()
    meter = Meter(clock, keep_s=5.0)
    meter.begin("long")
    for _ in range(4096):
        clock.advance(0.1)
        meter.feed([power("pmic", clock(), 4.0)])
    meter.end("long")
    for _ in range(1024):
        clock.advance(0.1)
        meter.feed([power("pmic", clock(), 4.0)])
    assert meter.measure("long").energy_j == pytest.approx(4.0 * 409.6, rel=0.001)
    with meter.window("next"):
        clock.advance(0.1)
    for _ in range(4096):
        clock.advance(0.1)
        meter.feed([power("pmic", clock(), 4.0)])
    assert meter.measure("long").energy_j is None


def test_a_result_is_ready_for_json():
    meter = fed(lambda t: 4.0)
    measured = meter.measure(RUN, Window("b", 1.0, 9.0), Window("a", 71.0, 79.0))
    stages = split_stages(measured, [("draft", 20.0, 21.0)])
    told = json.loads(json.dumps(as_json({"run": measured, "stages": stages}), allow_nan=False))
    assert told["run"]["budget"]["trust"] == "module or device input"


COSTS = Energy(1.0, {1: 0.4, 2: 0.5, 3: 0.6, 4: 0.7}, {"model": 0.1})


def decode(prefill_s=20.0, watts=(8.0, 3.0, 6.0, 2.0)):
    """A run: a long prefill, then short drafts and verifies, then a rest; its stretches and its power."""
    stretches, t = [("prefill", 10.0, 10.0 + prefill_s)], 10.0 + prefill_s
    while t < 60.0:
        stretches += [("draft", t, t + 0.03), ("verify", t + 0.03, t + 0.1)]
        t += 0.1
    mean = 0.3 * watts[1] + 0.7 * watts[2]
    meter = fed(lambda t: watts[0] if t < 10.0 + prefill_s else mean if t < 60.0 else watts[3])
    return meter, stretches


def test_stages_add_up_to_the_total_of_the_window_and_say_how():
    meter, stretches = decode()
    measured = meter.measure(RUN)
    estimates = {"draft": 0.09 * 300, "verify": 0.42 * 300, "other": 20.0}
    stages = split_stages(measured, stretches, estimates, meter.energy_between)
    assert sum(stages.joules.values()) == pytest.approx(measured.energy_j)
    assert stages.attribution == {
        "prefill": "timestamps", "draft": "model", "verify": "model", "other": "model"
    }  # fmt: skip
    assert stages.joules["prefill"] == pytest.approx(160.0, rel=0.02)
    assert stages.joules["draft"] / stages.joules["verify"] == pytest.approx(0.09 / 0.42)


def test_short_stages_without_a_model_share_by_time_and_say_so():
    meter, stretches = decode()
    stages = split_stages(meter.measure(RUN), stretches, None, meter.energy_between)
    assert stages.attribution["draft"] == "time"
    assert stages.joules["draft"] / stages.joules["verify"] == pytest.approx(3.0 / 7.0)


def test_stages_of_a_window_without_a_total_have_no_joules():
    stages = split_stages(Meter().measure(RUN), [("draft", 20.0, 30.0)])
    assert stages.total_j is None
    assert stages.joules == {}
    assert stages.seconds["other"] == pytest.approx(50.0)


def test_unknown_and_overlapping_stages_are_refused():
    measured = fed(lambda t: 4.0).measure(RUN)
    with pytest.raises(UsageError, match="stage 'think' is not known; known: prefill"):
        split_stages(measured, [("think", 20.0, 30.0)])
    with pytest.raises(UsageError, match="starts at"):
        split_stages(measured, [("draft", 20.0, 30.0), ("verify", 25.0, 40.0)])


def test_wasted_draft_is_the_steps_not_kept_and_the_marginal_rows():
    measured = fed(lambda t: 4.0).measure(RUN)
    stages = split_stages(measured, [("draft", 10.0, 30.0), ("verify", 30.0, 70.0)])
    rounds = [Drafted("model", 3, 3, 4), Drafted("model", 3, 1, 4), Drafted("model", 2, 0, 3)]
    lost = wasted(stages, rounds, COSTS)
    assert lost.draft_j == pytest.approx(80.0 * 4 / 8)
    assert lost.verify_j == pytest.approx(160.0 * ((0.7 - 0.5) + (0.6 - 0.4)) / (0.7 + 0.7 + 0.6))
    assert wasted(stages, rounds).verify_j is None
    assert wasted(stages, rounds, Energy(1.0, COSTS.verify_j)).draft_j == pytest.approx(40.0)
    with pytest.raises(UsageError, match="width 9"):
        wasted(stages, [Drafted("model", 8, 1, 9)], COSTS)


def test_tokens_get_gross_net_decode_and_accepted_draft_energy():
    meter = fed(lambda t: 4.0)
    measured = meter.measure(RUN, Window("b", 1.0, 9.0), Window("a", 71.0, 79.0))
    stages = split_stages(measured, [("prefill", 10.0, 20.0), ("draft", 20.0, 30.0), ("verify", 30.0, 70.0)])
    each = per_token(measured, 120, accepted=40, stages=stages)
    assert each.gross_j == pytest.approx(2.0)
    assert each.net_j == pytest.approx(0.0, abs=1e-6)
    assert each.decode_j == pytest.approx(200.0 / 120)
    assert each.draft_j_per_accepted == pytest.approx(1.0)
    assert each.tokens_per_wh == pytest.approx(1800.0)
    with pytest.raises(UsageError, match="at least one"):
        per_token(measured, 0)


@pytest.mark.parametrize(
    "absurd", [1e9, -1e6, math.nan, math.inf, 10**400], ids=["huge", "negative", "nan", "inf", "digits"]
)
def test_a_power_that_cannot_be_is_left_out_and_not_integrated(absurd):
    clock = VirtualClock()
    meter = Meter(clock)
    meter.begin("run")
    for step in range(101):
        clock.now_s = 0.1 * step
        meter.feed([power("ina:total", clock.now_s, absurd if step == 50 else 5.0)])
    assert meter.measure(meter.end("run")).energy_j == pytest.approx(50.0)
