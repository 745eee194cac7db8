"""A cap on power holds over every ten seconds: the ledger, and the engine that waits by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Energy, Reading
from outrider.power.governor import Governor, Policy
from outrider.power.ledger import Ledger
from outrider.power.state import State
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.pacing import Pacer
from outrider.runtime.profiling.simulate import run_policy
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeGraph, VirtualClock, random_logits
from outrider.targets.scenario import Scenario
from tests.acceptance_texts import made_up_texts

REST_W, WORK_W, CAP_W = 1.5, 8.0, 4.8


def run(ledger, works, cap_w=CAP_W, steady=True):
    """Works of so many seconds, waiting as the ledger says; (time, joules) at every change of power."""
    now, joules, course = 0.0, 0.0, [(0.0, 0.0)]

    def spend(seconds, watts):
        nonlocal now, joules
        ledger.add(now, now + seconds, watts)
        ledger.meter(now, now + seconds, seconds * watts)
        now, joules = now + seconds, joules + seconds * watts
        course.append((now, joules))

    spend(0.1, REST_W)
    for seconds in works:
        while (wait := ledger.wait_s(cap_w, seconds, WORK_W, REST_W)) > 0.002:
            spend(min(wait, 0.25), REST_W)
        spend(seconds, WORK_W)
        if steady:
            spend(min(ledger.pace_s(cap_w, seconds, WORK_W, REST_W), 2.0) + 1e-9, REST_W)
    return np.array(course).T


def worst_w(course, window_s=10.0):
    times, joules = course
    ends = times[times >= window_s]
    return (np.interp(ends, times, joules) - np.interp(ends - window_s, times, joules)).max() / window_s


@settings(max_examples=20, deadline=None)
@given(
    works=st.lists(st.floats(0.01, 1.0), min_size=60, max_size=100),
    steady=st.booleans(),
    cap_w=st.floats(3.0, 7.5),
)
def test_no_window_is_over_the_cap_whatever_runs(works, steady, cap_w):
    course = run(Ledger(), works, cap_w, steady)
    if course[0][-1] > 10.0:
        assert worst_w(course) <= cap_w * 1.005


def test_the_room_below_the_cap_is_used():
    times, joules = run(Ledger(), [0.15] * 600)
    late = times > 20.0
    mean_w = (joules[-1] - joules[late][0]) / (times[-1] - times[late][0])
    assert 0.98 * CAP_W <= mean_w <= 1.005 * CAP_W


def test_a_start_after_rest_may_use_the_room_that_rest_left():
    """Ten seconds at rest left 33 J: five seconds of full work, which a pace at the cap would make ten."""
    ledger = Ledger()
    ledger.add(0.0, 10.0, REST_W)
    assert ledger.wait_s(CAP_W, 4.5, WORK_W, REST_W) == 0.0
    assert ledger.wait_s(CAP_W, 5.5, WORK_W, REST_W) > 0.5


def test_pauses_after_a_burst_are_spread_not_saved_up():
    ledger = Ledger()
    ledger.add(0.0, 10.0, REST_W)
    ledger.add(10.0, 14.9, WORK_W)
    after = ledger.pace_s(CAP_W, 0.1, WORK_W, REST_W)
    ledger.add(14.9, 60.0, CAP_W)
    steady = ledger.pace_s(CAP_W, 0.1, WORK_W, REST_W)
    assert steady == pytest.approx(0.1 * (WORK_W - CAP_W) / (CAP_W - REST_W))
    assert steady < after < 10 * steady


def test_a_meter_replaces_what_was_estimated():
    ledger = Ledger()
    ledger.add(0.0, 4.0, 5.0)
    ledger.meter(1.0, 2.0, 9.0)
    assert ledger.joules(0.0, 4.0) == pytest.approx(24.0)
    assert ledger.joules(1.0, 2.0) == pytest.approx(9.0)
    assert ledger.joules(2.0, 4.0) == pytest.approx(10.0)


def test_what_the_meter_shows_beyond_the_estimate_counts_for_what_comes():
    ledger = Ledger()
    for second in range(8):
        ledger.add(second, second + 1.0, 3.0)
        ledger.meter(second, second + 1.0, 5.0)
    assert ledger.extra_w == pytest.approx(2.0, abs=0.2)


def test_what_is_off_to_one_side_again_and_again_is_no_noise():
    """Sixty noisy seconds, then half a watt more: the estimate has most of it within ten seconds, not forty."""
    noise = np.random.default_rng(5).normal(0.0, 0.15, 75)
    ledger = Ledger()
    for second, off in enumerate(noise):
        ledger.add(second, second + 1.0, 4.0)
        ledger.meter(second, second + 1.0, 4.0 + off + (0.5 if second >= 60 else 0.0))
        if second == 59:
            assert abs(ledger.extra_w) < 0.12
        if second == 69:
            assert ledger.extra_w > 0.3
    assert ledger.mean_w(10.0) == pytest.approx(4.5 + noise[-10:].mean(), abs=0.08)


def test_a_prompt_that_drew_less_than_estimated_says_nothing_of_rounds():
    ledger = Ledger()
    for second in range(60):
        ledger.add(second, second + 1.0, 4.0)
        ledger.meter(second, second + 1.0, 4.0 + 0.1 * (-1) ** second)
    usual_w, extra_w = ledger._noise_w, ledger.extra_w
    for second in (60, 61):
        ledger.add(second, second + 1.0, 8.0)
        ledger.meter(second, second + 1.0, 6.0, learn=0.0)
    assert (ledger._noise_w, ledger.extra_w) == (usual_w, extra_w)
    assert ledger.joules(60.0, 62.0) == pytest.approx(12.0)
    ledger.add(62.0, 63.0, 4.0)
    ledger.meter(62.0, 63.0, 3.6)  # off once: the prompts before it were no first time
    assert abs(ledger.extra_w - extra_w) < 0.05


def test_noise_of_a_meter_moves_the_ledger_less_than_its_own_mean():
    told = 4.0 + np.random.default_rng(3).normal(0.0, 0.15, 400)
    ledger, found = Ledger(), []
    for second, watts in enumerate(told):
        ledger.add(second, second + 1.0, 4.0)
        ledger.meter(second, second + 1.0, watts)
        found.append(ledger.mean_w(10.0))
    own = np.convolve(told, np.ones(10) / 10.0, "valid")
    assert np.std(found[40:]) < 0.85 * np.std(own[31:])
    assert np.mean(found[40:]) == pytest.approx(4.0, abs=0.02)


def test_a_meter_that_speaks_of_what_is_not_written_down_is_left_out():
    ledger = Ledger()
    ledger.meter(0.0, 1.0, 5.0)
    ledger.add(0.0, 1.0, 3.0)
    ledger.meter(0.5, 3.0, 50.0)
    assert ledger.joules(0.0, 1.0) == pytest.approx(3.0)


class MeteredMachine:
    """Draws REST_W at rest and WORK_W while a forward runs; a meter tells the mean of every second."""

    def __init__(self):
        self.clock = VirtualClock()
        self.course = [(0.0, 0.0)]
        self._told = None

    def sleep(self, seconds):
        self._spend(seconds, REST_W)

    def work(self, seconds):
        self._spend(seconds, WORK_W)

    def _spend(self, seconds, watts):
        self.clock.advance(seconds)
        self.course.append((self.clock(), self.course[-1][1] + watts * seconds))

    def readings(self):
        end = float(np.floor(self.clock()))
        if end < 1.0:
            return []
        joules = np.interp([end - 1.0, end], *np.array(self.course).T)
        return [Reading("meter", "power", float(joules[1] - joules[0]), "module", "instant", end)]

    def poll(self):
        told = self.readings()
        return State(self.clock(), power_w=told[0].value if told else None)


class Figures:
    """Energy figures that are right about rounds."""

    def observe(self, activity, joules):
        pass

    def energy(self, widths):
        dynamic_w = WORK_W - REST_W
        return Energy(REST_W, {width: dynamic_w * seconds(width) for width in widths})


def seconds(width):
    return max(0.1, 0.0125 * width)


def engine_of(machine, widths=None, cap_w=CAP_W):
    graph = FakeGraph(31, logits=random_logits(31, seed=1, order=None), max_context=4096, widths=widths)
    forward = graph.forward
    ran = []

    def timed(tokens, *rest, **options):
        ran.append(len(tokens))
        machine.work(seconds(len(tokens)))
        return forward(tokens, *rest, **options)

    graph.forward = timed
    pacer = Pacer(machine, Governor(Policy(power_cap_w=cap_w)), Figures(), None, machine.clock, 0.05)
    return Engine(graph, {}, clock=machine.clock, pacer=pacer, sleep=machine.sleep), ran


def test_a_long_prompt_keeps_the_cap_and_its_text():
    machine = MeteredMachine()
    engine, ran = engine_of(machine)
    prompt = [token % 31 for token in range(900)]
    rounds = list(engine.decode(prompt, Request(max_new_tokens=60, k=0)))
    assert worst_w(np.array(machine.course).T) <= CAP_W * 1.03
    assert max(ran) <= 80
    assert sum(ran[: -len(rounds) + 1]) == 900
    plain = Engine(FakeGraph(31, logits=random_logits(31, seed=1, order=None), max_context=4096))
    expected = [t for part in plain.decode(prompt, Request(max_new_tokens=60, k=0)) for t in part.tokens]
    assert [t for part in rounds for t in part.tokens] == expected


def test_the_first_token_comes_as_soon_as_the_cap_allows():
    """11.25 s of work; each ten seconds have room for 5.1 s of it, the first of them at once."""
    machine = MeteredMachine()
    engine, _ = engine_of(machine)
    machine.sleep(12.0)
    begin = machine.clock()
    engine._governed.pacer.poll()
    part = next(engine.decode([token % 31 for token in range(900)], Request(max_new_tokens=4, k=0)))
    work_s = 11.25
    each_s = 10.0 * (CAP_W - REST_W) / (WORK_W - REST_W)
    least_s = 10.0 * (work_s // each_s) + work_s % each_s
    assert least_s <= part.stats.ttft_s <= 1.05 * least_s
    assert machine.clock() - begin == pytest.approx(part.stats.ttft_s)


def test_a_draft_reads_a_long_prompt_in_pieces_with_rests_between():
    machine = MeteredMachine()
    logits = random_logits(31, seed=1, order=None)
    target = engine_of(machine)[0].target
    draft, ran = FakeGraph(31, 1024, logits=logits), []
    forward = draft.forward

    def timed(tokens, *rest, **options):
        ran.append((machine.clock(), len(tokens)))
        machine.work(max(0.03, 0.009 * len(tokens)))
        return forward(tokens, *rest, **options)

    draft.forward = timed
    pacer = Pacer(machine, Governor(Policy(power_cap_w=CAP_W)), Figures(), None, machine.clock, 0.05)
    drafters = {"model": ModelDrafter(draft, min_confidence=0.0)}
    engine = Engine(target, drafters, clock=machine.clock, pacer=pacer, sleep=machine.sleep)
    prompt = [token % 31 for token in range(900)]
    rounds = list(engine.decode(prompt, Request(max_new_tokens=40, k=2)))
    plain = Engine(FakeGraph(31, 1024, logits=logits)).decode(prompt, Request(max_new_tokens=40, k=0))
    assert [t for part in rounds for t in part.tokens] == [t for part in plain for t in part.tokens]
    assert worst_w(np.array(machine.course).T) <= CAP_W * 1.03
    pieces = [(at, n) for at, n in ran if n > 4]
    assert sum(n for _, n in pieces) >= 896
    assert max(n for _, n in pieces) * 0.009 <= 1.0
    assert max(after - at - 0.009 * n for (at, n), (after, _) in pairwise(pieces)) > 0.1


def test_a_prompt_on_compiled_widths_runs_in_one_that_fits():
    machine = MeteredMachine()
    engine, ran = engine_of(machine, widths=(1, 8, 32, 256))
    list(engine.decode([token % 31 for token in range(900)], Request(max_new_tokens=4, k=0)))
    assert 256 not in ran[1:]
    assert worst_w(np.array(machine.course).T) <= CAP_W * 1.03


def test_without_a_limit_a_prompt_runs_in_whole_chunks():
    machine = MeteredMachine()
    engine, ran = engine_of(machine, cap_w=None)
    list(engine.decode([token % 31 for token in range(900)], Request(max_new_tokens=4, k=0)))
    assert ran[0] == 512


@pytest.mark.parametrize("device", ["raspberry-pi-5", "snapdragon-8-gen3"])
def test_a_simulated_day_of_long_prompts_keeps_its_cap(device):
    scenario = Scenario(name="long", device=device, duration_s=240.0, seed=5, power_cap_w=4.6, ambient_c=15.0)
    long = [replace(text, prompt_tokens=600) for text in made_up_texts()]
    found = run_policy(scenario, "governed", long)
    assert 0.0 <= found.cap_violation <= 0.03
    assert found.energy_j / found.seconds >= 0.9 * 4.6


def filled(metered_s: int, noise_w: float = 0.0) -> Ledger:
    """Eighty seconds at 4 W, of which the last ones were metered, give or take some noise."""
    ledger = Ledger()
    for second in range(80):
        ledger.add(second, second + 1.0, 4.0)
        if second >= 80 - metered_s:
            ledger.meter(second, second + 1.0, 4.0 + noise_w * (-1) ** second)
    return ledger


def test_estimates_that_no_meter_has_confirmed_are_kept_further_below_the_cap() -> None:
    waits = [filled(metered_s).wait_s(4.0, 1.0, 4.5, 1.0) for metered_s in (0, 10, 20, 40, 80)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > waits[2] > waits[3] == pytest.approx(waits[4])


def test_a_noisy_meter_is_kept_further_below_the_cap() -> None:
    waits = [filled(80, noise_w).wait_s(4.0, 1.0, 4.5, 1.0) for noise_w in (0.0, 0.2, 0.6)]
    assert waits[0] < waits[1] < waits[2]
