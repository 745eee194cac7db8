"""Recorded heat played back while a text is decoded: k follows, the text does not."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks import throttling_trace
from outrider.cli import demo
from outrider.contracts import Reading
from outrider.errors import OutriderError, UsageError
from outrider.power.governor import Governor, Level, Policy
from outrider.power.monitor import open_telemetry
from outrider.power.telemetry import TelemetryWriter, read_telemetry
from outrider.power.traces import THROTTLING, THROTTLING_LIMIT_C
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.pacing import Pacer
from outrider.runtime.planner import Planner
from outrider.runtime.profiling.heat_replay import HeatReplay, Stretch, Tempo, replay_heat
from outrider.runtime.rounds import Engine, Request
from outrider.targets.device import shipped_device
from outrider.targets.fake import FakeGraph, VirtualClock

VOCAB = 32
PROMPT = [1, 2, 3]
COSTS_S = {1: 0.05, 2: 0.051, 16: 0.06}
REQUEST = Request(max_new_tokens=120)
UP_AND_DOWN = [Level.NOMINAL, Level.WARM, Level.HOT, Level.CRITICAL, Level.HOT, Level.WARM, Level.NOMINAL]


def counting(seen: tuple[int, ...]) -> np.ndarray:
    """A model that counts up and begins anew: a text that lookup drafts well."""
    logits = np.zeros(VOCAB, np.float32)
    logits[(seen[-1] + 1) % VOCAB] = 8.0
    return logits


def engine_of(clock: VirtualClock, monitor: object | None, logits=counting) -> Engine:
    graph = FakeGraph(VOCAB, logits=logits, clock=clock, costs_s=COSTS_S, max_context=512)
    governor = Governor(Policy(temp_limit_c=THROTTLING_LIMIT_C))
    pacer = None if monitor is None else Pacer(monitor, governor, None)
    planner = Planner(k_max=12)
    return Engine(graph, {"lookup": LookupDrafter()}, planner, clock=clock, pacer=pacer, sleep=clock.advance)


def plain_text() -> list[int]:
    rounds = engine_of(VirtualClock(), None).decode(PROMPT, Request(max_new_tokens=120, k=0))
    return [token for round_ in rounds for token in round_.tokens]


def replay_of(path: Path, logits=counting, plain: list[int] | None = None) -> HeatReplay:
    clock = VirtualClock()
    monitor = open_telemetry(path, clock)
    engine = engine_of(clock, monitor, logits)
    return replay_heat(engine, PROMPT, REQUEST, plain or plain_text(), monitor, now=clock)


def constant_trace(path: Path, celsius: float, seconds: int = 60) -> Path:
    with TelemetryWriter(path) as writer:
        for time_s in range(seconds):
            writer([Reading("made-up", "temperature", celsius, "die", "simulated", float(time_s))])
    return path


def test_the_shipped_trace_says_that_everything_in_it_is_simulated():
    trace = read_telemetry(THROTTLING)
    assert "simulated" in trace.header["machine"]
    assert {reading.method for batch in trace for reading in batch} == {"simulated"}
    assert {reading.source.partition(":")[0] for batch in trace for reading in batch} == {"simulated"}


def test_the_committed_command_still_makes_a_trace_of_the_same_story(tmp_path: Path):
    throttling_trace.make(tmp_path / "made.jsonl")
    made, shipped = read_telemetry(tmp_path / "made.jsonl"), read_telemetry(THROTTLING)
    assert made.header == shipped.header
    assert len(list(made)) == len(list(shipped))
    for trace in (made, shipped):
        heat = [r.value for batch in trace for r in batch if r.quantity == "temperature"]
        limit_c = THROTTLING_LIMIT_C
        assert limit_c == shipped_device(throttling_trace.DEVICE).temp_limit_c
        assert heat[0] < limit_c - 10 < limit_c + 1 < max(heat) < limit_c + 6
        assert heat[-1] <= heat[0]


def test_making_the_trace_twice_gives_the_same_bytes(tmp_path: Path):
    for name in ("a", "b"):
        throttling_trace.main([str(tmp_path / name)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_k_falls_under_the_throttling_trace_and_comes_back_and_the_text_stays():
    replay = replay_of(THROTTLING)
    assert [stretch.level for stretch in replay.stretches] == UP_AND_DOWN
    first, hottest, last = replay.ks
    assert hottest == 1 < first
    assert last == first
    assert replay.fell
    assert replay.came_back
    assert replay.difference is None
    assert replay.texts > 5
    assert replay.tokens == sum(stretch.tokens for stretch in replay.stretches)


def test_stretches_cover_the_trace_without_gaps_and_show_its_temperatures():
    stretches = replay_of(THROTTLING).stretches
    assert stretches[0].begin_s == 0.0
    assert all(a.end_s == b.begin_s for a, b in pairwise(stretches))
    assert stretches[-1].end_s == pytest.approx(throttling_trace.LENGTH_S, abs=3.0)
    hottest = max(stretches, key=lambda stretch: stretch.level)
    assert hottest.high_c == max(stretch.high_c for stretch in stretches)
    assert hottest.tokens_per_s < stretches[0].tokens_per_s


@pytest.mark.parametrize("celsius", [45.0, 60.0])
def test_k_does_not_fall_while_a_machine_stays_cool(tmp_path: Path, celsius: float):
    replay = replay_of(constant_trace(tmp_path / "cool.jsonl", celsius))
    assert [stretch.level for stretch in replay.stretches] == [Level.NOMINAL]
    assert not replay.fell
    assert replay.ks[0] > 1
    assert replay.difference is None
    with pytest.raises(OutriderError, match="should have fallen"):
        demo._judge(replay)


def test_a_trace_that_is_over_before_a_round_proves_nothing(tmp_path: Path):
    replay = replay_of(constant_trace(tmp_path / "short.jsonl", 45.0, seconds=0))
    with pytest.raises(OutriderError, match="ended before anything was decoded"):
        demo._judge(replay, own=True)


def test_k_that_stays_low_has_not_come_back(tmp_path: Path):
    clock_s = [45.0] * 20 + [82.0] * 40
    path = tmp_path / "hot.jsonl"
    with TelemetryWriter(path) as writer:
        for time_s, celsius in enumerate(clock_s):
            writer([Reading("made-up", "temperature", celsius, "die", "simulated", float(time_s))])
    replay = replay_of(path)
    assert replay.fell
    assert not replay.came_back
    with pytest.raises(OutriderError, match="and come back"):
        demo._judge(replay)


def test_a_token_that_differs_is_found_with_its_place():
    plain = plain_text()
    wrong = [*plain[:70], (plain[70] + 1) % VOCAB, *plain[71:]]
    replay = replay_of(THROTTLING, plain=wrong)
    assert replay.difference == (0, 70)
    with pytest.raises(OutriderError, match="text 1 differs from the plain one at token 71"):
        demo._judge(replay)


def test_a_text_that_ends_too_early_differs():
    replay = replay_of(THROTTLING, plain=[*plain_text(), 5])
    assert replay.difference == (0, 120)


def test_a_text_that_goes_on_too_long_differs():
    replay = replay_of(THROTTLING, plain=plain_text()[:100])
    assert replay.difference == (0, 100)


def test_an_engine_that_nothing_governs_is_refused():
    clock = VirtualClock()
    monitor = open_telemetry(THROTTLING, clock)
    with pytest.raises(UsageError, match="nothing governs"):
        replay_heat(engine_of(clock, None), PROMPT, REQUEST, plain_text(), monitor, now=clock)


def test_tempo_stands_until_it_is_started_and_then_runs_faster():
    base = VirtualClock(100.0)
    tempo = Tempo(base)
    base.advance(5.0)
    assert tempo() == 0.0
    tempo.start(6.0)
    base.advance(2.0)
    assert tempo() == pytest.approx(12.0)
    with pytest.raises(UsageError, match="speed is 0"):
        Tempo(base).start(0.0)


def test_a_row_without_drafts_or_temperature_can_be_printed():
    row = demo._row(Stretch(Level.WARM, 0.0, 2.0))
    assert "warm" in row
    assert "?" in row


def test_the_demo_ends_with_k_under_heat_on_an_exported_bundle(quantized_bundle: Path, capsys, monkeypatch):
    """A tiny random model: real files, backend and governor. The trace's time moves by the round, not by the
    clock of this machine, so that no load on it can skip the hottest second."""
    import outrider
    from outrider.runtime.profiling import heat_replay

    class Stepping(Tempo):
        time_s = 0.0

        def __call__(self) -> float:
            return Stepping.time_s

    def add(*arguments) -> None:
        count_round(*arguments)
        Stepping.time_s += 0.25

    count_round = heat_replay._add
    monkeypatch.setattr(demo, "_prompt_tokens", lambda pipeline: list(range(3, 24)) * 3)
    with outrider.load(quantized_bundle, governor=False) as pipeline:
        plain = demo._answer(pipeline, 24, k=0)
    seen = []
    monkeypatch.setattr(demo, "_judge", lambda replay, **_: seen.append(replay))
    monkeypatch.setattr(heat_replay, "Tempo", Stepping)
    monkeypatch.setattr(heat_replay, "_add", add)
    demo._heat(quantized_bundle, 24, plain, None)
    (replay,) = seen
    assert replay.difference is None
    levels = [stretch.level for stretch in replay.stretches]
    assert max(levels) == Level.CRITICAL
    assert levels[0] < Level.CRITICAL > levels[-1]  # how soon it calls itself cool again is estimated
    assert replay.ks[1] <= 1
    out = capsys.readouterr().out
    assert "simulated Raspberry Pi 4" in out
    assert out.count("critical") == levels.count(Level.CRITICAL)


def test_every_line_of_the_shipped_trace_is_one_json_record():
    lines = THROTTLING.read_text().splitlines()
    assert json.loads(lines[0])["kind"] == "telemetry"
    assert len(lines) == 131
