"""`record` leaves a valid trace however it ends, and `doctor` lists every source with its value or the fix."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outrider.cli import record as record_cli
from outrider.cli.doctor import UNITS, describe_telemetry
from outrider.cli.record import describe, sensors_of
from outrider.contracts import Clock, Quantity, Reading
from outrider.power.monitor import BLOCKED_S, Monitor, open_telemetry
from outrider.power.recorder import Coverage, Recorded, record
from outrider.power.sensors.adb import AdbPhone
from outrider.power.sensors.rapl import Rapl
from outrider.power.telemetry import TelemetryError, read_telemetry
from outrider.runtime.doctor import inspect_telemetry
from outrider.targets.fake import VirtualClock


class Zone:
    """A zone that is at 40 °C, or raises."""

    period_s = 0.02

    def __init__(
        self,
        name: str = "zone",
        value: Callable[[], float | None] = lambda: 40.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name, self.value, self.clock, self.reads = name, value, clock, 0

    def read(self) -> list[Reading]:
        self.reads += 1
        value = self.value()
        reason = "" if value is not None else "permission denied; sudo chmod a+r it"
        return [Reading(f"{self.name}:x", "temperature", value, "die", "instant", self.clock(), reason)]


class Studio:
    """A recording on a virtual clock: it moves when the recording sleeps, which lasts until the monitor's thread
    has read the sensors again, so that no load on this machine changes how many readings come."""

    def __init__(self, silent: bool = False) -> None:
        self.clock, self.slept = VirtualClock(), 0
        self.zones = [Zone("zone", clock=self.clock)]
        if silent:
            self.zones.append(Zone("locked", lambda: None, self.clock))
        self.monitor = Monitor(self.zones, self.clock, 0.02, sleep=lambda seconds: time.sleep(0.001))

    def sleep(self, seconds: float) -> None:
        self._wait(1 + self.slept)
        self.clock.advance(seconds)
        self.slept += 1
        self._wait(1 + self.slept)

    def _wait(self, reads: int) -> None:
        for _ in range(60_000):
            if self.monitor.reads >= reads * len(self.zones):
                return
            time.sleep(0.001)

    def record(self, path: Path, seconds: float | None) -> Recorded:
        return record(self.monitor, path, seconds, self.clock, self.sleep, tool="outrider test")


def test_a_recording_is_a_trace_that_plays_back(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    done = Studio().record(path, seconds=0.6)
    readings = [reading for batch in read_telemetry(path) for reading in batch]
    assert done.readings == len(readings)
    times = {round(reading.time_s, 3) for reading in readings}
    assert {0.0, 0.6} <= times <= {0.0, 0.2, 0.4, 0.6}, (
        "from first to last; how often in between is the thread's"
    )
    assert (done.sources, done.silent, done.path) == (1, {}, str(path))
    assert read_telemetry(path).header["tool"] == "outrider test"
    clock = VirtualClock()
    assert open_telemetry(path, clock).poll().die_c == 40


def test_what_could_not_be_read_is_counted_apart(tmp_path: Path) -> None:
    done = Studio(silent=True).record(tmp_path / "t.jsonl", seconds=0.2)
    assert done.sources == 1
    assert done.readings >= 2
    assert done.silent == {"locked:x": "permission denied; sudo chmod a+r it"}
    assert "1 more without any value" in describe(done)


def test_ctrl_c_is_a_normal_end(tmp_path: Path) -> None:
    studio = Studio()

    def sleep(seconds: float) -> None:
        studio.sleep(seconds)
        if studio.slept == 3:
            raise KeyboardInterrupt

    path = tmp_path / "t.jsonl"
    done = record(studio.monitor, path, None, studio.clock, sleep)
    assert done.readings == sum(len(batch) for batch in read_telemetry(path)) >= 4


def test_however_short_a_recording_is_every_sensor_is_asked_once(tmp_path: Path) -> None:
    """A machine so busy that the time is over before the monitor's thread has begun."""
    clock = VirtualClock()
    zones = [Zone("first", clock=clock), Zone("second", clock=clock)]
    begin = threading.Event()

    def read() -> float:
        begin.wait(60)
        return 40.0

    zones[0].value = read

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        if clock() > 0.15:
            begin.set()
        time.sleep(0.001)

    monitor = Monitor(zones, clock, 0.02, sleep=lambda seconds: time.sleep(0.001))
    done = record(monitor, tmp_path / "t.jsonl", 0.1, clock, sleep)
    assert done.sources == 2


def test_a_sensor_that_never_answers_does_not_hold_a_recording_for_ever(tmp_path: Path) -> None:
    clock, release = VirtualClock(), threading.Event()
    zone = Zone(value=lambda: 40.0 if release.wait(60) else None, clock=clock)
    monitor = Monitor([zone], clock, 0.02, sleep=lambda seconds: time.sleep(0.001))

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        if clock() > 0.1 + BLOCKED_S - 0.005:  # the last of it: the thread may end
            release.set()

    record(monitor, tmp_path / "t.jsonl", 0.1, clock, sleep)
    assert clock() == pytest.approx(0.1 + BLOCKED_S, abs=0.02)


def test_a_monitor_is_left_without_the_recordings_listeners(tmp_path: Path) -> None:
    studio = Studio()
    studio.record(tmp_path / "t.jsonl", seconds=0.2)
    assert studio.monitor.listeners == []


def test_a_disk_that_fills_up_ends_the_recording_with_an_error_and_a_valid_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    opened = Path.open

    def open_small(self: Path, *arguments: Any, **options: Any) -> Any:
        file = opened(self, *arguments, **options)
        return SmallFile(file) if arguments[:1] == ("wb",) else file

    monkeypatch.setattr(Path, "open", open_small)
    with pytest.raises(
        TelemetryError, match=r"t\.jsonl: No space left on device; what was written before is whole"
    ):
        record(Monitor([Zone()], interval_s=0.02), path, seconds=60.0)
    monkeypatch.undo()
    assert 0 < len(list(read_telemetry(path))) < 20
    assert path.read_bytes().endswith(b"\n")


class SmallFile:
    """A file on a disk with room for 1,000 bytes."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 1000

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(28, os.strerror(28))
        part = bytes(data)[: self.room]
        self.room -= len(part)
        return int(self.file.write(part))

    def truncate(self, size: int) -> None:
        self.file.truncate(size)

    def close(self) -> None:
        self.file.close()


def coverage(times: Sequence[float | None], period_s: float = 1.0, end_s: float | None = None) -> Coverage:
    count = Coverage({"a": period_s})
    for step, time_s in enumerate(times):
        value = None if time_s is None else 40.0
        count([Reading("a", "temperature", value, "die", "instant", step if time_s is None else time_s)])
    if end_s is not None:
        count.end(end_s)
    return count


def test_a_gap_is_more_than_three_periods_without_a_value() -> None:
    assert coverage([0.0, 1.0, 4.0]).gaps == 0
    gapped = coverage([0.0, 1.0, 4.1, 5.0])
    assert (gapped.gaps, gapped.longest_gap) == (1, (pytest.approx(3.1), "a"))


def test_reads_without_a_value_do_not_fill_a_gap() -> None:
    assert coverage([0.0, None, None, None, None, 5.0]).gaps == 1


def test_a_source_that_vanished_for_good_is_a_gap_until_the_end() -> None:
    gapped = coverage([0.0, 1.0], end_s=60.0)
    assert (gapped.gaps, gapped.longest_gap) == (1, (59.0, "a"))


# The command


def test_record_prints_one_line_and_makes_the_trace(run_main: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    code, out, err = run_main("record", "-o", str(path), "--seconds", "0.3", "--interval", "0.05")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert "readings of" in out
    assert "gaps" in out
    header = read_telemetry(path).header
    assert header["interval_s"] == 0.05
    assert set(header) == {"schema_version", "kind", "interval_s", "tool", "machine", "started"}


@pytest.mark.parametrize("words", [(), ("--adb",), ("--adb", "0A1B")])
def test_an_older_trace_is_never_lost_unasked(
    run_main: Callable[..., Any], tmp_path: Path, words: tuple[str, ...]
) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text("older")
    code, _, err = run_main("record", "-o", str(path), "--seconds", "0.1", *words)
    assert code == 2
    assert f"{path} exists already; choose another name, or give --overwrite" in err
    assert path.read_text() == "older"


def test_an_older_trace_is_replaced_when_asked(run_main: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text("older")
    code, _, err = run_main("record", "-o", str(path), "--seconds", "0.1", "--overwrite")
    assert code == 0, err
    assert read_telemetry(path).header["kind"] == "telemetry"


def test_a_trace_is_not_written_into_a_file_called_dash(
    run_main: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run_main("record", "-o", "-", "--seconds", "0.1")
    assert code == 2
    assert "- stands for standard output; name a file" in err
    assert list(tmp_path.iterdir()) == []


def test_record_as_json(run_main: Callable[..., Any], tmp_path: Path) -> None:
    code, out, _ = run_main("record", "-o", str(tmp_path / "t.jsonl"), "--seconds", "0.1", "--json")
    assert code == 0
    assert {"path", "seconds", "readings", "sources", "gaps", "overhead_share"} <= set(json.loads(out))


@pytest.mark.parametrize("words", [(), ("-o", "x", "--seconds", "0"), ("-o", "x", "--interval", "0")])
def test_wrong_options_are_usage_errors(run_main: Callable[..., Any], words: tuple[str, ...]) -> None:
    code, _, err = run_main("record", *words)
    assert code == 2
    assert "Traceback" not in err


def test_a_full_disk_is_a_message_and_exit_code_1(run_main: Callable[..., Any]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    code, _, err = run_main("record", "-o", "/dev/full", "--seconds", "1")
    assert code == 1
    assert "No space left on device; make room" in err
    assert "Traceback" not in err


def test_a_machine_without_any_source_is_told_so(
    run_main: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_cli, "sensors_of", lambda adb: [])
    code, _, err = run_main("record", "-o", str(tmp_path / "t.jsonl"))
    assert code == 1
    assert "outrider doctor" in err
    assert not (tmp_path / "t.jsonl").exists()


def test_a_recording_without_a_single_value_fails_and_says_why(
    run_main: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_cli, "sensors_of", lambda adb: [Zone("locked", lambda: None)])
    code, out, err = run_main("record", "-o", str(tmp_path / "t.jsonl"), "--seconds", "0.1")
    assert (code, out) == (1, "")
    assert "locked:x: permission denied; sudo chmod a+r it" in err


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_trace_is_valid_whether_it_is_ended_or_killed(tmp_path: Path, end: signal.Signals) -> None:
    path = tmp_path / "t.jsonl"
    command = [sys.executable, "-m", "outrider", "record", "-o", str(path), "--interval", "0.02"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 120
        while (not path.exists() or path.read_bytes().count(b"\n") < 4) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(end)
        out, err = process.communicate(timeout=120)
    assert len(list(read_telemetry(path))) >= 3
    if end == signal.SIGINT:
        assert process.returncode == 0, err
        assert b"readings of" in out


def test_adb_chooses_a_phone() -> None:
    for wanted in ("any", "0A1B"):
        (sensor,) = sensors_of(wanted)
        assert isinstance(sensor, AdbPhone)
        sensor.close()


# doctor


def test_doctor_lists_values_then_reasons_and_what_is_not_there() -> None:
    sensors = [Zone("locked", lambda: None), Zone("open")]
    sensors[1].period_s = 1e4  # what it says stays fresh
    found = inspect_telemetry(sensors, sleep=lambda seconds: None, kinds=(Rapl,))
    assert [reading.source for reading in found.readings] == ["open:x", "locked:x"]
    assert found.state.die_c == 40
    assert found.absent == ("rapl",)
    text = describe_telemetry(found)
    assert "open:x" in text
    assert "40 °C (die, instant)" in text
    assert "not readable: permission denied; sudo chmod a+r it" in text
    assert "not on this machine: rapl" in text
    assert "seen as: die 40 °C, unknown skin" in text


def test_doctor_waits_for_a_source_that_says_nothing_at_first() -> None:
    class Late(Zone):
        def read(self) -> list[Reading]:
            self.reads = getattr(self, "reads", 0) + 1
            return super().read() if self.reads >= 3 else []

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(0.06)

    found = inspect_telemetry([Late()], sleep=sleep, kinds=())
    assert [reading.value for reading in found.readings] == [40.0]
    assert len(slept) == 2


def test_doctor_says_when_there_is_no_source_at_all() -> None:
    text = describe_telemetry(inspect_telemetry([], sleep=lambda seconds: None, kinds=()))
    assert "no source was found" in text
    assert "unknown die" in text


def test_every_quantity_has_a_unit() -> None:
    assert set(UNITS) == set(Quantity.__args__)


def test_doctor_as_text_and_json(run_main: Callable[..., Any]) -> None:
    code, out, _ = run_main("doctor")
    assert code == 0
    assert "telemetry" in out
    assert "not on this machine" in out
    code, out, _ = run_main("doctor", "--json")
    found = json.loads(out)["telemetry"]
    assert {"readings", "state", "absent"} == set(found)
    assert all(reading["value"] is not None or reading["reason"] for reading in found["readings"])


@pytest.mark.parametrize("option", ["--seconds", "--interval"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_no_number_without_end_is_taken_and_an_older_trace_stays(
    tmp_path: Path, option: str, value: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("older")
    done = CliRunner().invoke(record_cli.command, ["-o", str(path), option, value])
    assert done.exit_code == 2
    assert f"{value} is not a finite number" in done.output
    assert path.read_text() == "older"


@pytest.mark.parametrize("command", ["export", "calibrate", "acceptance"])
def test_a_command_for_which_a_recorded_trace_would_mean_nothing_says_why(
    run_main: Callable[..., Any], command: str
) -> None:
    code, _, err = run_main(command, "--telemetry", "trace.jsonl")
    assert code == 2
    assert "; leave --telemetry out" in err
