"""A telemetry trace survives full disks and cuts, refuses what it is not, and plays back as it was seen."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Reading
from outrider.power.monitor import Monitor, open_telemetry
from outrider.power.sensors.replay import Replay
from outrider.power.state import State
from outrider.power.telemetry import TelemetryError, TelemetryWriter, read_telemetry
from outrider.targets.fake import VirtualClock
from tests.full_disk import FullDisk


def heat(value: float | None, time_s: float, reason: str = "", source: str = "thermal:cpu") -> Reading:
    return Reading(source, "temperature", value, "die", "instant", time_s, reason)


def write(
    path: Path, *batches: list[Reading], periods: dict[str, float] | None = None, **header: Any
) -> Path:
    with TelemetryWriter(path, periods, **header) as writer:
        for batch in batches:
            writer(batch)
    return path


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    first = [heat(41.5, 3.0), Reading("rapl:total", "energy", 12.0, "soc", "counter", 3.0, "package + dram")]
    second = [heat(None, 3.1, "permission denied")]
    path = write(tmp_path / "t.jsonl", first, second, interval_s=0.1, tool="outrider 0.1.0")
    trace = read_telemetry(path)
    assert list(trace) == [first, second]
    assert list(trace) == [first, second], "a trace can be gone through again"
    assert trace.header == {
        "schema_version": 1,
        "kind": "telemetry",
        "interval_s": 0.1,
        "tool": "outrider 0.1.0",
    }


def test_a_period_is_told_with_its_source_and_again_when_it_changes(tmp_path: Path) -> None:
    periods: dict[str, float] = {}
    with TelemetryWriter(tmp_path / "t.jsonl", periods) as writer:
        writer([heat(40, 0.0)])
        periods["thermal:cpu"] = 0.5
        writer([heat(40, 0.5)])
        writer([heat(40, 1.0)])
        periods["thermal:cpu"] = 1.0
        writer([heat(40, 2.0)])
    told = [dict(batch.periods) for batch in read_telemetry(tmp_path / "t.jsonl").batches()]
    assert told == [{}, {"thermal:cpu": 0.5}, {}, {"thermal:cpu": 1.0}]


def test_why_a_source_is_silent_is_written_once_until_it_changes(tmp_path: Path) -> None:
    silent, other = heat(None, 0.0, "off"), heat(None, 0.0, "gone")
    path = write(tmp_path / "t.jsonl", [silent], [silent], [other], [heat(40, 1.0)], [other])
    assert list(read_telemetry(path)) == [[silent], [other], [heat(40, 1.0)], [other]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_becomes_a_reason_not_broken_json(tmp_path: Path, value: float) -> None:
    path = write(tmp_path / "t.jsonl", [heat(value, 1.0)])
    ((reading,),) = read_telemetry(path)
    assert reading.value is None
    assert str(value) in reading.reason
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()


def test_a_trace_cut_off_mid_line_is_read_up_to_there_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "t.jsonl", [heat(40, 0.0)], [heat(41, 0.1)])
    data = path.read_bytes()
    whole = data.rindex(b"\n", 0, -1) + 1
    for end in range(whole + 1, len(data) - 1):
        path.write_bytes(data[:end])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert list(read_telemetry(path)) == [[heat(40, 0.0)]]
        assert "cut off in line 3" in caplog.text
    path.write_bytes(data[:-1])  # only the newline is missing: the line is whole
    assert len(list(read_telemetry(path))) == 2


def test_a_character_cut_in_two_is_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, [heat(None, 0.0, "à 5 °C")])
    data = path.read_bytes().decode().encode().replace(b"\\u00b0", "°".encode())
    path.write_bytes(data[: data.index("°".encode()) + 1])
    assert list(read_telemetry(path)) == []


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [heat(40, 0.0)], [heat(41, 0.1)])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(TelemetryError, match="line 2 is not JSON"):
        list(read_telemetry(path))


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("", "is empty"),
        ("[]\n", "line 1 is list"),
        ('{"schema_version":2,"kind":"telemetry"}\n', "schema_version 2"),
        ('{"schema_version":1,"kind":"decode"}\n', "kind 'decode'"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, first: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(first)
    with pytest.raises(TelemetryError, match=message):
        read_telemetry(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TelemetryError, match=r"nothing\.jsonl: No such file"):
        read_telemetry(tmp_path / "nothing.jsonl")


GOOD = {"source": "a", "quantity": "power", "value": 1.0, "scope": "soc", "method": "instant", "time_s": 0.0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"readings": 3}, "no list `readings`"),
        ({"readings": [{**GOOD, "unit": "W"}]}, "known fields"),
        ({"readings": [{**GOOD, "quantity": "watts"}]}, "quantity is 'watts'; known: power, energy"),
        ({"readings": [{**GOOD, "value": "1"}]}, "value is '1'"),
        ({"readings": [{**GOOD, "value": True}]}, "value is True"),
        ({"readings": [{key: GOOD[key] for key in GOOD if key != "time_s"}]}, "lacks time_s"),
        ({"readings": [GOOD], "periods": {"a": 0}}, "above 0"),
        ({"readings": [GOOD], "time_s": None}, "time_s is None"),
    ],
)
def test_a_line_of_another_shape_names_what_is_wrong(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "t.jsonl")
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    with pytest.raises(TelemetryError, match=message):
        list(read_telemetry(path))


def fill(writer: TelemetryWriter) -> None:
    for step in range(20):
        writer([heat(40 + step, float(step))])


def test_a_full_disk_ends_the_trace_with_a_whole_line(tmp_path: Path) -> None:
    for room in range(60, 500, 7):
        disk = FullDisk(room)
        writer = TelemetryWriter(disk)
        with pytest.raises(TelemetryError, match=r"No space left on device.*make room"):
            fill(writer)
        assert writer.error is not None
        writer([heat(99, 99.0)])  # does nothing
        path = tmp_path / "t.jsonl"
        path.write_bytes(disk.getvalue())
        assert disk.getvalue().endswith(b"\n")
        assert [reading.time_s for (reading,) in read_telemetry(path)] == list(range(writer.records))


def test_a_full_disk_from_the_start_is_a_clear_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(TelemetryError, match="/dev/full: No space left on device"):
        TelemetryWriter("/dev/full")


def test_a_folder_in_place_of_a_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TelemetryError, match="Is a directory"):
        TelemetryWriter(tmp_path)


class Warming:
    """A machine that warms up, with a counter, a battery that is slow, and a zone that vanishes."""

    def __init__(self, clock: Callable[[], float], what: str, period_s: float) -> None:
        self.clock, self.name, self.period_s = clock, what, period_s

    def read(self) -> list[Reading]:
        now = self.clock()
        if self.name == "battery":
            return [Reading("battery:b", "battery", 90 - now / 60, "battery", "instant", now - 0.7)]
        if self.name == "counter":
            return [Reading("rapl:total", "energy", 4 * now + (now % 3) ** 2, "soc", "counter", now)]
        gone = 8 <= now < 14
        return [heat(None if gone else 40 + now, now, "is gone" if gone else "")]


def machine(clock: VirtualClock) -> Monitor:
    return Monitor(
        [Warming(clock, "zone", 0.5), Warming(clock, "counter", 0.1), Warming(clock, "battery", 2.0)], clock
    )


def states(monitor: Monitor, clock: VirtualClock, steps: list[float]) -> list[State]:
    seen = []
    for step in steps:
        seen.append(monitor.poll())
        clock.advance(step)
    return seen


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0.05, 0.1, 0.13, 0.4, 2.5]), min_size=30, max_size=120))
def test_replay_gives_the_same_states_whenever_it_is_asked(
    tmp_path_factory: pytest.TempPathFactory, steps: list[float]
) -> None:
    path = tmp_path_factory.mktemp("replay") / "t.jsonl"
    clock = VirtualClock()
    live = machine(clock)
    with TelemetryWriter(path, live.periods, clock, interval_s=live.interval_s) as writer:
        live.listeners.append(writer)
        seen = states(live, clock, steps)
    again = VirtualClock()
    played = states(open_telemetry(path, again), again, steps)
    assert [replace(s, power_method="replayed" if s.power_method else "") for s in seen] == played
    assert any(s.power_w is not None for s in seen)


def test_a_replay_keeps_relative_time_on_a_clock_of_another_time(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [heat(40, 5000.0)], [heat(50, 5002.0)])
    clock = VirtualClock(7.0)
    monitor = open_telemetry(path, clock)
    assert monitor.poll().die_c == 40
    clock.advance(1.9)
    assert monitor.poll().die_c == 40
    clock.advance(0.1)
    assert monitor.poll().die_c == 50
    assert monitor.readings()[0].time_s == pytest.approx(9.0)


def test_the_clock_of_a_trace_that_jumps_back_goes_on_from_where_it_was(tmp_path: Path) -> None:
    """Another boot in the same file: its clock starts again near 0."""
    path = write(tmp_path / "t.jsonl", [heat(40, 900.0)], [heat(41, 901.0)], [heat(60, 2.0)], [heat(61, 3.0)])
    clock = VirtualClock()
    monitor = open_telemetry(path, clock)
    seen = [state.die_c for state in states(monitor, clock, [1.0] * 3)]
    assert seen == [40, 60, 61]


def test_the_clock_of_a_trace_that_jumps_ahead_leaves_a_stale_gap(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [heat(40, 0.0)], [heat(41, 100.0)], periods={"thermal:cpu": 0.5})
    clock = VirtualClock()
    monitor = open_telemetry(path, clock)
    seen = states(monitor, clock, [1.0] * 101)
    assert [s.die_c for s in seen[:3]] == [40, 40, None]
    assert seen[50].stale == ("temperature",)
    assert seen[100].die_c == 41


def test_a_figure_that_is_older_than_its_line_does_not_look_like_another_boot(tmp_path: Path) -> None:
    slow = Reading("battery:b", "battery", 50.0, "battery", "instant", 95.0)
    path = write(tmp_path / "t.jsonl", [heat(40, 100.0)], [slow], [heat(41, 100.5)])
    clock = VirtualClock()
    monitor = open_telemetry(path, clock)
    assert [s.die_c for s in states(monitor, clock, [0.4, 0.1, 0.1])] == [40, 40, 41]


def test_replayed_figures_are_labelled_and_weak_ones_stay_weak(tmp_path: Path) -> None:
    methods = ["counter", "integrated", "instant", "estimated", "simulated", "replayed"]
    batch = [Reading(m, "power", 1.0, "soc", m, 0.0) for m in methods]  # type: ignore[arg-type]
    monitor = open_telemetry(write(tmp_path / "t.jsonl", batch), VirtualClock())
    monitor.poll()
    labels = {reading.source: reading.method for reading in monitor.readings()}
    assert labels == {m: m if m in ("estimated", "simulated") else "replayed" for m in methods}


def test_damage_met_during_a_replay_is_reported_and_never_repeats_old_figures_as_new(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "t.jsonl", [heat(40, 0.0)], [heat(41, 1.0)])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1] + "rubbish\n" + lines[2])
    clock = VirtualClock()
    with pytest.raises(TelemetryError, match="line 3"):
        list(read_telemetry(path))
    monitor = open_telemetry(path, clock)
    seen = states(monitor, clock, [1.0] * 6)
    assert seen[-1].die_c is None
    assert any("line 3" in reading.reason for reading in monitor.readings()) or "line 3" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("41.5", "1" + 400 * "0", "expected numbers"),
        ('"time_s":3.0', '"time_s":1' + 400 * "0", "expected numbers"),
        ('"thermal:cpu"', "5", "source is 5; expected text"),
        ('"value":41.5', '"value":41.5,"reason":{}', "reason is {}; expected text"),
        ('{"readings"', 100_000 * '{"a":', "line 2 is not JSON .it is nested too deeply"),
    ],
    ids=["huge-value", "huge-time", "source", "reason", "deep"],
)
def test_a_line_of_absurd_json_is_an_error_that_names_it(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = write(tmp_path / "t.jsonl", [heat(41.5, 3.0)])
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(TelemetryError, match=message) as refused:
        list(read_telemetry(path))
    assert len(str(refused.value)) < 400 + len(str(path))


def test_what_stands_before_a_damaged_line_is_played_back_before_the_damage_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [heat(41.5, 3.0)], [heat(42.5, 4.0)])
    with path.open("a") as file:
        file.write("garbage\n{}\n")
    clock = VirtualClock()
    replay = Replay(read_telemetry(path), clock)
    assert [reading.value for reading in replay.read()] == [41.5]
    clock.now_s += 1.0
    assert [reading.value for reading in replay.read()] == [42.5]
    with pytest.raises(TelemetryError, match="line 4 is not JSON"):
        replay.read()
    assert replay.done
    assert replay.read() == [], "it is told once"
