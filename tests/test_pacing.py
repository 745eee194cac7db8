"""The engine obeys the governor: pauses, released drafts, logs; and the text stays the target's own."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Costs, Energy, Objective, Reading, Sampling
from outrider.errors import BackendError, TraceError
from outrider.power.governor import Directive, Governor, Level, Policy
from outrider.power.state import State
from outrider.runtime import governed
from outrider.runtime.decision_log import DecisionLog, read_policy, replay_decisions
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.pacing import Pacer
from outrider.runtime.planner import LONGEST_PACE_S, Planner
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeGraph, VirtualClock, blend_logits, random_logits

VOCAB = 17
LOGITS = random_logits(VOCAB, seed=1, order=None)
DRAFT = blend_logits(LOGITS, random_logits(VOCAB, seed=2), 0.1)
PROMPT = [3, 1, 4, 1, 5]
COSTS_S = {1: 0.1, 2: 0.11, 16: 0.2}


class Monitor:
    """States by a function of time."""

    def __init__(self, clock, fields=lambda now_s: {}):
        self.clock, self.fields = clock, fields

    def poll(self):
        return State(self.clock(), **self.fields(self.clock()))


class Scripted:
    """A pacer that gives what it is told, round for round; exceptions are raised."""

    rest_w = 0.0

    def __init__(self, directives):
        self.directives = iter(directives)
        self.state = State(0.0)
        self.odd_w = 0.0
        self.seen = []

    def energy(self, verify_s):
        return None

    def directive(self, costs):
        directive = next(self.directives, Directive())
        if isinstance(directive, Exception):
            raise directive
        return directive

    def observe(self, *work):
        self.seen.append(work)

    def follow(self):
        return self.state


def draft_graph(clock=None):
    costs_s = {1: 0.01} if clock else None
    return FakeGraph(VOCAB, logits=DRAFT, clock=clock, costs_s=costs_s, max_context=2048)


def make(pacer=None, clock=None, reopen=True, **options):
    clock = clock or VirtualClock()
    graph = FakeGraph(VOCAB, logits=LOGITS, clock=clock, costs_s=COSTS_S, max_context=2048)
    opened = []

    def open_draft():
        opened.append(draft_graph(clock))
        return opened[-1]

    model = ModelDrafter(open_draft(), min_confidence=0.0, reopen=open_draft if reopen else None)
    drafters = {"model": model, "lookup": LookupDrafter(min_ngram=1)}
    engine = Engine(graph, drafters, clock=clock, pacer=pacer, sleep=clock.advance, **options)
    engine.opened = opened
    return engine


def text(rounds):
    return [token for part in rounds for token in part.tokens]


def plain(n=40, sampling=None):
    return text(make().decode(PROMPT, Request(sampling or Sampling(), max_new_tokens=n, k=0)))


directive_strategy = st.builds(
    Directive,
    objective=st.sampled_from([Objective("latency"), Objective("energy"), Objective("balanced")]),
    level=st.sampled_from(list(Level)),
    power_w=st.one_of(st.none(), st.floats(0.0, 20.0)),
    duty=st.floats(0.05, 1.0),
    k_max=st.one_of(st.none(), st.integers(0, 20)),
    k_share=st.floats(0.0, 1.0),
    reference=st.one_of(st.none(), st.just(Costs({1: 0.1, 4: 0.12}, {"model": 0.01}))),
    draft_loaded=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    directives=st.lists(st.one_of(directive_strategy, st.just(RuntimeError("sensor"))), max_size=60),
    temperature=st.sampled_from([0.0, 0.8]),
    mode=st.sampled_from(["match", "reject"]),
    seed=st.integers(0, 5),
    k=st.sampled_from(["auto", 0, 3]),
    with_energy=st.booleans(),
)
def test_no_directive_changes_the_text(directives, temperature, mode, seed, k, with_energy):
    sampling = Sampling(temperature=temperature, mode=mode, seed=seed)
    pacer = Scripted(directives)
    if with_energy:
        pacer.energy = lambda verify_s: Energy(1.5, {1: 0.3, 8: 0.9}, {"model": 0.05})
    engine = make(pacer)
    found = text(engine.decode(PROMPT, Request(sampling, max_new_tokens=40, k=k)))
    if mode == "match" or temperature == 0.0:
        assert found == plain(sampling=sampling)
    assert len(found) == 40


def test_reject_mode_keeps_the_distribution_under_a_random_governor():
    """The first two tokens' joint distribution, against enumeration; chi-square under fixed seeds."""
    from scipy.stats import chi2

    vocab, runs = 4, 1500
    logits = random_logits(vocab, seed=3, order=2, scale=1.2)
    rng = np.random.default_rng(5)
    counts = np.zeros((vocab, vocab))
    clock = VirtualClock()
    target = FakeGraph(vocab, logits=logits, clock=clock, costs_s=COSTS_S)
    model = ModelDrafter(
        FakeGraph(vocab, logits=random_logits(vocab, seed=8)),
        min_confidence=0.0,
        reopen=lambda: FakeGraph(vocab, logits=random_logits(vocab, seed=8)),
    )
    directives = (
        Directive(k_max=int(rng.integers(1, 4)), draft_loaded=rng.random() < 0.8) for _ in iter(int, 1)
    )
    engine = Engine(target, {"model": model}, clock=clock, pacer=Scripted(directives), sleep=clock.advance)
    for seed in range(runs):
        sampling = Sampling(temperature=1.0, mode="reject", seed=seed)
        first, second = text(engine.decode([1, 2, 0], Request(sampling, max_new_tokens=2, k=2)))
        counts[first, second] += 1

    def chances(context):
        row = np.exp(logits(tuple(context)).astype(np.float64))
        return row / row.sum()

    expected = runs * np.stack([p * chances([2, 0, a]) for a, p in enumerate(chances([1, 2, 0]))])
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert chi2.sf(statistic, vocab * vocab - 1) > 1e-4


def test_without_a_pacer_nothing_pauses_and_nothing_is_governed():
    rounds = list(make().decode(PROMPT, Request(max_new_tokens=20)))
    assert rounds[-1].stats.paced_s == 0.0
    assert rounds[-1].stats.level is None
    assert rounds[-1].directive is None


@pytest.mark.parametrize("k", ["auto", 0, 2])
def test_a_duty_pauses_after_every_round_with_any_k(k):
    clock = VirtualClock()
    engine = make(Scripted([Directive(duty=0.5)] * 500), clock)
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=60, k=k)))
    stats = rounds[-1].stats
    assert stats.paced_s == pytest.approx(stats.decode_s, rel=0.15)
    assert text(rounds) == plain(60)


def test_what_a_draft_catches_up_is_rested_for_once():
    clock = VirtualClock()
    target = FakeGraph(VOCAB, logits=LOGITS, clock=clock, costs_s=COSTS_S)
    draft = FakeGraph(VOCAB, logits=DRAFT, clock=clock, costs_s={1: 0.01, 201: 2.01})
    pacer = Scripted([Directive(duty=0.5)] * 100)
    engine = Engine(target, {"model": ModelDrafter(draft)}, clock=clock, pacer=pacer, sleep=clock.advance)
    rounds = list(engine.decode(PROMPT * 40, Request(max_new_tokens=12, k=2)))
    stats = rounds[-1].stats
    assert stats.draft_s > 0.5 * stats.decode_s  # most of it to catch up
    assert stats.paced_s <= stats.decode_s + rounds[0].verify_s + 1e-9


def test_a_fixed_k_is_the_users_and_only_pauses_obey_the_governor():
    engine = make(Scripted([Directive(level=Level.CRITICAL, k_max=0, duty=0.5)] * 100))
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=40, k=3, drafter="model")))
    assert {part.drafted for part in rounds[1:-2]} == {3}
    assert rounds[-1].stats.paced_s > 0.0


def test_pauses_are_no_part_of_the_measured_costs():
    free, paced = make(), make(Scripted([Directive(duty=0.25)] * 500))
    for engine in (free, paced):
        list(engine.decode(PROMPT, Request(max_new_tokens=60, k=0)))
    assert paced.planner.costs.verify_s == pytest.approx(free.planner.costs.verify_s)
    assert paced.planner.costs.overhead_s == pytest.approx(free.planner.costs.overhead_s, abs=1e-9)


def test_the_rate_counts_the_pauses():
    free, paced = make(), make(Scripted([Directive(duty=0.5)] * 500))
    rates = []
    for engine in (free, paced):
        rounds = list(engine.decode(PROMPT, Request(max_new_tokens=60, k=0)))
        rates.append(rounds[-1].stats.decode_tokens_per_s)
    assert rates[1] == pytest.approx(rates[0] / 2, rel=0.02)


def test_the_time_of_the_consumer_counts_as_pause():
    clock = VirtualClock()
    engine = make(Scripted([Directive(duty=0.5)] * 500), clock)
    slept = []
    for part in engine.decode(PROMPT, Request(max_new_tokens=20, k=0)):
        clock.advance(0.06)
        slept.append(part.stats.paced_s)
    # the first two rounds are paced by what they took: the prompt's 0.13 s, then 0.1 s
    assert part.stats.paced_s == pytest.approx(0.04 * (len(slept) - 2) + 0.07, rel=0.01)


def test_a_power_cap_is_held_in_the_mean():
    """8 W of dynamic power over 2 W: a mean of 4 W leaves one part work to three parts pause."""
    clock = VirtualClock()
    pacer = Scripted([Directive(power_w=4.0)] * 500)
    pacer.energy = lambda verify_s: Energy(2.0, {width: 8.0 * s for width, s in verify_s.items()})
    engine = make(pacer, clock)
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=60, k=0)))
    stats = rounds[-1].stats
    joules = 2.0 * (stats.decode_s + stats.paced_s) + 8.0 * stats.decode_s
    assert joules / (stats.decode_s + stats.paced_s) == pytest.approx(4.0, rel=0.1)


def test_the_prompt_is_paced_between_its_chunks():
    clock = VirtualClock()
    engine = make(Scripted([Directive(duty=0.5)] * 100), clock, prefill_chunk=16)
    prompt = [token % VOCAB for token in range(64)]
    part = next(engine.decode(prompt, Request(max_new_tokens=4, k=0)))
    worked = sum(np.interp(16, list(COSTS_S), list(COSTS_S.values())) for _ in range(4))
    assert part.stats.ttft_s == pytest.approx(worked + 3 * worked / 4)
    assert part.stats.paced_s == 0.0


def test_a_prompt_rests_by_what_a_pause_draws_and_by_what_the_meter_says_of_prompts():
    """3 W while it runs, 1 W in a pause, 2 W allowed: as much rest as work, whatever rounds and waking draw."""
    clock = VirtualClock()
    pacer = Scripted([Directive(power_w=2.0)] * 100)
    pacer.rest_w, pacer.prompt_w = 1.0, 2.0
    pacer.energy = lambda verify_s: Energy(1.8, {w: 8.0 * s for w, s in verify_s.items()}, idle_w=1.0)
    engine = make(pacer, clock, prefill_chunk=16)
    part = next(engine.decode([token % VOCAB for token in range(64)], Request(max_new_tokens=4, k=0)))
    worked = sum(np.interp(16, list(COSTS_S), list(COSTS_S.values())) for _ in range(4))
    assert part.stats.ttft_s == pytest.approx(worked + 3 * worked / 4)


def test_the_governor_sees_a_pause_every_second():
    clock, seen = VirtualClock(), []

    class Watcher(Governor):
        def decide(self, state, costs=None):
            seen.append(state.time_s)
            return super().decide(state, costs)

    pacer = Pacer(Monitor(clock), Watcher(), None, None, clock)
    pacer.follow()
    assert seen == [], "nothing was asked yet"
    pacer.directive(Costs({1: 0.1}))
    for _ in range(20):
        clock.advance(0.25)
        pacer.follow()
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_pause_is_bounded_and_slept_in_slices_in_which_the_sensors_are_read():
    clock = VirtualClock()
    pacer = Scripted([Directive(power_w=2.0)] * 50)
    pacer.energy = lambda verify_s: Energy(2.0, dict.fromkeys(verify_s, 1.0))
    polls, naps = [], []
    pacer.follow = lambda: polls.append(clock())
    engine = make(pacer, clock)
    engine._governed._sleep = lambda s: (naps.append(s), clock.advance(s))
    list(engine.decode(PROMPT, Request(max_new_tokens=6, k=0)))
    assert max(naps) <= 0.25
    assert len(polls) == len(naps) > 10
    assert sum(naps) <= 5 * LONGEST_PACE_S + 1e-9


def test_a_released_draft_is_closed_and_comes_back_without_changing_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed: list[bool] = []
    monkeypatch.setattr(governed, "return_freed_memory", lambda: trimmed.append(engine.opened[0].closed))
    away, there = Directive(draft_loaded=False), Directive()
    engine = make(Scripted([there] * 6 + [away] * 6 + [there] * 500))
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=80, k=2)))
    assert text(rounds) == plain(80)
    assert engine.opened[0].closed
    assert trimmed == [True]
    assert len(engine.opened) == 2
    assert not engine.opened[1].closed
    assert all(part.plan.drafter != "model" for part in rounds[6:12])
    assert any(part.plan.drafter == "model" for part in rounds[13:])


def test_lookup_goes_on_drafting_while_the_draft_model_is_away():
    engine = make(Scripted([Directive(draft_loaded=False)] * 500))
    rounds = list(engine.decode(PROMPT * 4, Request(max_new_tokens=60, k=2)))
    assert {part.plan.drafter for part in rounds} == {"lookup", None}


def test_a_released_draft_refuses_to_draft_and_forgets_safely():
    drafter = make().drafters["model"]
    drafter.release()
    drafter.release()
    assert not drafter.loaded
    with pytest.raises(BackendError, match="released"):
        drafter.propose(PROMPT, 2, Sampling(), np.random.default_rng(0))
    drafter.reset()
    drafter.restore()
    drafter.restore()
    assert len(drafter.propose(PROMPT, 2, Sampling(), np.random.default_rng(0))) == 2


def test_a_draft_that_cannot_be_opened_again_is_kept():
    engine = make(Scripted([Directive(draft_loaded=False)] * 500), reopen=False)
    list(engine.decode(PROMPT, Request(max_new_tokens=20, k=2)))
    assert engine.drafters["model"].loaded


def test_a_draft_that_fails_to_open_is_tried_again_later_and_loses_no_text(caplog):
    engine = make(Scripted([Directive(draft_loaded=False)] * 3))
    drafter, tries = engine.drafters["model"], []

    def refuse():
        tries.append(1)
        raise BackendError("no memory")

    drafter._reopen = refuse
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=60, k=2)))
    assert text(rounds) == plain(60)
    assert len(tries) == 1
    assert "no memory" in caplog.text


def test_a_pacer_that_raises_is_logged_once_and_loses_no_text(caplog):
    engine = make(Scripted([RuntimeError("the bus is gone")] * 500))
    with caplog.at_level(logging.WARNING):
        rounds = list(engine.decode(PROMPT, Request(max_new_tokens=60)))
    assert text(rounds) == plain(60)
    assert caplog.text.count("the governor failed") == 1
    assert "governor=failed" in rounds[-1].directive.flags
    assert max(part.drafted for part in rounds) <= 1


def test_sensors_that_vanish_mid_run_leave_the_text_and_are_flagged():
    clock = VirtualClock()
    monitor = Monitor(clock, lambda now_s: {"die_c": 40.0} if now_s < 2.0 else {})
    engine = make(Pacer(monitor, Governor()), clock)
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=80)))
    assert text(rounds) == plain(80)
    assert "telemetry=unknown" not in rounds[2].directive.flags
    assert "telemetry=unknown" in rounds[-1].directive.flags
    assert rounds[-1].stats.level == "warm"


class Recorder:
    """An energy model that only keeps what it is shown."""

    def __init__(self):
        self.shown = []

    def observe(self, activity, joules):
        self.shown.append((activity, joules))

    def energy(self, widths):
        return Energy(1.0, dict.fromkeys(widths, 0.5)) if self.shown else None


def test_power_is_integrated_into_windows_with_what_ran_in_them():
    clock, model = VirtualClock(), Recorder()
    pacer = Pacer(Monitor(clock, lambda now_s: {"power_w": 4.0}), Governor(), model)
    engine = make(pacer, clock)
    list(engine.decode(PROMPT, Request(max_new_tokens=100, k=0)))
    assert len(model.shown) >= 5
    for activity, joules in model.shown:
        assert joules == pytest.approx(4.0 * activity.seconds)
        assert sum(activity.verify.values()) * 0.1 == pytest.approx(activity.seconds, abs=0.11)
    assert engine.planner.energy is not None


def test_windows_with_chunks_of_a_prompt_teach_nothing():
    clock, model = VirtualClock(), Recorder()
    pacer = Pacer(Monitor(clock, lambda now_s: {"power_w": 4.0}), Governor(), model)
    prompt = [token % VOCAB for token in range(200)]
    next(make(pacer, clock, prefill_chunk=16).decode(prompt, Request(max_new_tokens=2, k=0)))
    assert model.shown == []


def hot_spell(now_s):
    """Cool, then throttled from 20 s to 40 s, then cool again."""
    throttled = 20.0 <= now_s < 40.0
    return {"die_c": 82.0 if throttled else 45.0, "throttle": 1.0 if throttled else 0.0}


def governed_rounds(fields, n=1500, log=None):
    clock = VirtualClock()
    governor = Governor(Policy(temp_limit_c=90.0))
    pacer = Pacer(Monitor(clock, fields), governor, log=log and DecisionLog(log, governor, every_s=0))
    engine = make(pacer, clock, planner=Planner(k_max=8))
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=n, drafter="model")))
    pacer.close()
    return rounds


def mean_k(rounds, levels):
    return np.mean([part.plan.k for part in rounds if part.directive.level in levels])


def test_k_falls_while_the_machine_is_hot_and_comes_back():
    rounds = governed_rounds(hot_spell)
    cool = {Level.NOMINAL}
    hot = [i for i, part in enumerate(rounds) if part.directive.level == Level.HOT]
    before, after = rounds[10 : hot[0]], rounds[hot[-1] + 1 :]
    during = mean_k(rounds, {Level.HOT})
    assert during <= 0.7 * mean_k(before, cool)
    assert mean_k(after, cool) > 1.3 * during
    assert text(rounds) == plain(1500)


def test_k_does_not_fall_under_constant_telemetry():
    rounds = governed_rounds(lambda now_s: {"die_c": 45.0, "throttle": 0.0})
    free = list(make(planner=Planner(k_max=8)).decode(PROMPT, Request(max_new_tokens=1500, drafter="model")))
    assert [part.plan.k for part in rounds] == [part.plan.k for part in free]


def test_a_decision_log_of_every_state_is_decided_again_to_the_same(tmp_path):
    governed_rounds(hot_spell, log=tmp_path / "log.jsonl")
    header = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert (header["kind"], header["schema_version"]) == ("governor", 1)

    def governor_of(header):
        policy, tuning = read_policy(header)
        return Governor(policy, tuning=tuning)

    assert list(replay_decisions(tmp_path / "log.jsonl", governor_of)) == []
    other = list(replay_decisions(tmp_path / "log.jsonl", lambda header: Governor(Policy(temp_limit_c=60.0))))
    assert other


@pytest.mark.parametrize("idle_w", [None, 1.0, 1.3])
def test_a_cap_near_what_is_drawn_at_rest_is_decided_again_to_the_same(tmp_path, idle_w):
    path, policy = tmp_path / "log.jsonl", Policy(power_cap_w=1.2)
    governor, costs = Governor(policy), Costs({1: 1.0}, energy=Energy(1.5, {1: 0.3}, idle_w=idle_w))
    log = DecisionLog(path, governor, every_s=0.0)
    for i in range(5):
        state = State(0.1 * i, die_c=40.0, power_w=1.4)
        log.add(state, costs, governor.decide(state, costs))
    log.close()
    flags = json.loads(path.read_text().splitlines()[1])["directive"]["flags"]
    assert ("power_cap=below_rest" in flags) is (idle_w != 1.0)
    assert list(replay_decisions(path, lambda header: Governor(policy))) == []


def test_a_sampled_log_keeps_changes_and_refuses_to_be_decided_again(tmp_path):
    path = tmp_path / "log.jsonl"
    governor = Governor(Policy(temp_limit_c=80.0))
    log = DecisionLog(path, governor, every_s=1.0)
    for i in range(100):
        state = State(0.1 * i, die_c=85.0 if i == 55 else 40.0)
        log.add(state, None, governor.decide(state))
    log.close()
    records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert 10 <= len(records) <= 13
    assert "critical" in [record["directive"]["level"] for record in records]
    with pytest.raises(TraceError, match="every_s"):
        list(replay_decisions(path, lambda header: governor))


def test_a_full_disk_ends_the_decision_log_and_not_the_text(caplog):
    class Full:
        def __init__(self):
            self.lines = 0

        def write(self, line):
            self.lines += 1
            if self.lines > 3:
                raise OSError(28, "No space left on device")
            return len(line)

    rounds = governed_rounds(hot_spell, n=200, log=Full())
    assert text(rounds) == plain(200)
    assert caplog.text.count("No space left") == 1


def test_the_level_of_a_generation_is_its_highest():
    rounds = governed_rounds(hot_spell)
    assert rounds[-1].directive.level < Level.HOT
    assert rounds[-1].stats.level == "hot"


def test_energy_figures_reach_the_planner():
    clock = VirtualClock()
    pacer = Scripted([])
    pacer.energy = lambda verify_s: replace(Energy(1.0, {1: 0.1}), static_w=2.0)
    engine = make(pacer, clock)
    list(engine.decode(PROMPT, Request(max_new_tokens=4)))
    assert engine.planner.costs.energy.static_w == 2.0


class Meter:
    """A monitor with readings of its own times: power, and a counter where `counter` gives one."""

    def __init__(self, clock, power, counter=None, source="meter"):
        self.clock, self.power, self.counter, self.source = clock, power, counter, source

    def _sample_s(self):
        return float(np.floor(self.clock() * 2.0)) / 2.0  # every half second

    def readings(self):
        now_s = self._sample_s()
        found = [Reading(self.source, "power", self.power(now_s), "module", "instant", now_s)]
        if self.counter is not None:
            found.append(Reading(self.source, "energy", self.counter(now_s), "module", "counter", now_s))
        return found

    def poll(self):
        return State(self.clock(), power_w=self.power(self._sample_s()))


def shown(meter, clock, until_s=10.0, before_poll=lambda pacer: None):
    model = Recorder()
    pacer = Pacer(meter, Governor(), model)
    while clock() < until_s:
        before_poll(pacer)
        pacer.poll()
        clock.advance(0.05)
    return model.shown


def test_power_counts_for_the_time_that_led_up_to_it_by_the_sensors_own_clock():
    clock = VirtualClock()
    windows = shown(Meter(clock, lambda now_s: 2.0 + now_s), clock)
    assert [activity.seconds for activity, _ in windows] == [1.0] * len(windows)
    ends = [0.5 * (2.0 + t - 0.5) + 0.5 * (2.0 + t) for t in range(1, len(windows) + 1)]
    assert [joules for _, joules in windows] == pytest.approx(ends)


def test_a_counter_is_believed_before_the_power_beside_it():
    clock = VirtualClock()
    windows = shown(Meter(clock, lambda now_s: 99.0, lambda now_s: 3.0 * now_s), clock)
    assert [joules for _, joules in windows] == pytest.approx([3.0] * len(windows))


def test_a_source_that_changes_or_falls_silent_starts_a_new_window():
    clock = VirtualClock()
    meter = Meter(clock, lambda now_s: 4.0)

    def trouble(pacer):
        meter.source = "other" if clock() > 4.7 else "meter"
        meter.power = (lambda now_s: None) if 8.1 < clock() < 8.4 else (lambda now_s: 4.0)

    windows = shown(meter, clock, before_poll=trouble)
    assert all(joules == pytest.approx(4.0 * activity.seconds) for activity, joules in windows)
    untroubled = VirtualClock()
    assert len(windows) < len(shown(Meter(untroubled, lambda now_s: 4.0), untroubled))


def test_joules_are_forgotten_when_the_clock_has_changed():
    clock, forgotten = VirtualClock(), []
    model = Recorder()
    model.clock_changed = lambda: forgotten.append(clock())
    ratios = lambda now_s: {"power_w": 4.0, "clock_ratio": 1.0 if now_s < 3.0 else 0.6}  # noqa: E731
    pacer = Pacer(Monitor(clock, ratios), Governor(), model)
    while clock() < 20.0:
        pacer.poll()
        clock.advance(0.1)
    assert len(forgotten) == 1
    assert forgotten[0] == pytest.approx(3.0, abs=0.2)


def test_sensors_are_looked_at_no_more_often_than_is_asked():
    clock, polls = VirtualClock(), []

    class Counting(Monitor):
        def poll(self):
            polls.append(clock())
            return super().poll()

    pacer = Pacer(Counting(clock), Governor(), clock=clock, least_s=0.05)
    for _ in range(1000):
        pacer.directive(Costs({1: 0.1}))
        clock.advance(0.001)
    assert 18 <= len(polls) <= 21


def test_a_draft_that_stops_short_counts_the_step_that_told_it_to():
    pacer, clock = Scripted([]), VirtualClock()
    engine = make(pacer, clock)
    engine.drafters["model"].min_confidence = 0.4
    rounds = list(engine.decode(PROMPT, Request(max_new_tokens=60, k=4, drafter="model")))
    drafting = [(part.drafted, part.plan.k) for part in rounds if part.plan.drafter]
    assert len({drafted for drafted, _ in drafting}) > 2
    told = [steps for _, drafter, steps, *_ in pacer.seen if drafter == "model"]
    assert told == [min(k, drafted + 1) for drafted, k in drafting]


def test_the_energy_model_is_told_which_part_of_a_window_was_a_pause():
    clock, model = VirtualClock(), Recorder()
    governor = Governor(Policy(power_cap_w=3.0))
    pacer = Pacer(Monitor(clock, lambda now_s: {"power_w": 3.0}), governor, model, None, clock)
    rounds = list(make(pacer, clock).decode(PROMPT, Request(max_new_tokens=120, k=0)))
    shown = [activity for activity, _ in model.shown[3:]]
    assert rounds[-1].stats.paced_s > 5.0
    work_s = sum(0.1 * sum(activity.verify.values()) for activity in shown)
    paused_s, all_s = sum(activity.paused_s for activity in shown), sum(a.seconds for a in shown)
    assert paused_s > 1.0
    assert paused_s + work_s == pytest.approx(all_s, rel=0.1)


def test_rest_is_taken_to_draw_what_the_energy_figures_say_of_a_pause():
    clock = VirtualClock()
    model = Recorder()
    model.energy = lambda widths: Energy(2.0, dict.fromkeys(widths, 0.5), idle_w=0.7)
    pacer = Pacer(Monitor(clock), Governor(), model, None, clock)
    pacer.energy({1: 0.1})
    assert pacer.rest_w == 0.7
