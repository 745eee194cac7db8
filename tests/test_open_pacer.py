"""A pipeline finds its sensors, or a recorded trace, and refuses limits that nothing can measure."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from outrider.contracts import Costs, Reading
from outrider.errors import OutriderError, UsageError
from outrider.manifest import FileEntry, GraphEntry, KvEntry
from outrider.power import sensors
from outrider.power.governor import Directive, Level
from outrider.power.monitor import Monitor
from outrider.power.telemetry import TelemetryWriter
from outrider.runtime import open_pacer as opening
from outrider.runtime.decision_log import replay_decisions
from outrider.runtime.open_pacer import Governing, footprint_mb, open_pacer
from outrider.targets.device import load_device
from outrider.targets.fake import VirtualClock


def reading(quantity, value, time_s=0.0, scope="die", reason=""):
    return Reading(f"test:{quantity}", quantity, value, scope, "instant", time_s, reason)


class Thermometer:
    """A sensor that says what it is told; the long period keeps its word fresh however busy this machine is."""

    name = "test"

    def __init__(self, *readings, clock=lambda: 0.0, period_s=1e4):
        self.readings, self.clock, self.period_s = readings, clock, period_s
        self.closed = False

    def read(self):
        return [replace(reading, time_s=self.clock()) for reading in self.readings]

    def close(self):
        self.closed = True


@pytest.fixture
def machine(monkeypatch):
    """Lets a test say what sensors this machine has."""

    def have(*found):
        monkeypatch.setattr(sensors, "discover", lambda: list(found))

    return have


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened


def trace(tmp_path, *batches):
    path = tmp_path / "telemetry.jsonl"
    with TelemetryWriter(path, interval_s=1e4) as writer:  # fresh for long, as above
        for batch in batches:
            writer(batch)
    return path


def live(quantity, value, scope="die"):
    return Thermometer(reading(quantity, value, scope=scope), clock=time.monotonic)


def test_a_machine_without_a_heat_sensor_is_not_governed(machine, stack):
    machine(Thermometer(reading("memory_available", 4000.0, scope="memory")))
    assert open_pacer(Governing(), stack) is None


def test_where_nothing_tells_heat_memory_alone_is_watched_for_a_draft(machine, stack, monkeypatch):
    machine()
    sensor = Thermometer(reading("memory_available", 100.0, scope="device"), clock=time.monotonic)
    monkeypatch.setattr(opening, "memory_sensors", lambda: [sensor])
    pair = {"target": graph_of(), "draft": graph_of()}
    assert open_pacer(Governing(), stack, graphs={"target": graph_of()}) is None
    assert open_pacer(Governing(governor=False), stack, graphs=pair) is None
    directive = open_pacer(Governing(), stack, graphs=pair).directive(Costs({1: 0.1}))
    assert directive == Directive(
        draft_loaded=False, flags=("telemetry=none", "memory=low"), reason="only memory is watched"
    )


@pytest.mark.parametrize(("quantity", "value"), [("temperature", 50.0), ("throttle", 0.0), ("headroom", 0.2)])
def test_a_machine_with_a_heat_sensor_is_governed_unless_told_otherwise(machine, stack, quantity, value):
    machine(live(quantity, value))
    assert open_pacer(Governing(), stack) is not None
    assert open_pacer(Governing(governor=False), stack) is None


def test_what_was_read_too_long_ago_to_hold_still_says_that_there_is_a_heat_sensor(machine, stack):
    """A machine so busy that reading its sensors took minutes."""
    late = Thermometer(reading("temperature", 50.0), clock=lambda: time.monotonic() - 300.0, period_s=0.05)
    machine(late)
    assert open_pacer(Governing(), stack) is not None


def test_a_heat_sensor_that_has_no_value_is_none(machine, stack):
    machine(Thermometer(reading("temperature", None, reason="permission denied")))
    assert open_pacer(Governing(), stack) is None


def test_sensors_are_read_in_a_thread_that_ends_with_the_pipeline(machine):
    thermometer = live("temperature", 50.0)
    machine(thermometer)
    before = threading.active_count()
    with ExitStack() as stack:
        open_pacer(Governing(), stack)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_an_explicit_wish_governs_a_machine_without_sensors(machine, stack):
    machine()
    pacer = open_pacer(Governing(objective="energy"), stack)
    directive = pacer.directive(Costs({1: 0.1}))
    assert directive.objective.kind == "energy"
    assert "telemetry=none" in directive.flags


@pytest.mark.parametrize(
    ("option", "value", "missing"),
    [
        ("power_cap_w", 4.0, "power"),
        ("temp_limit_c", 70.0, "temperature"),
        ("battery_floor_percent", 20.0, "battery"),
    ],
)
def test_a_limit_that_nothing_measures_is_refused_with_the_reason(machine, stack, option, value, missing):
    why = "add your user to group video"
    sensor = Thermometer(
        *(reading(name, None, reason=why) for name in ("power", "temperature", "battery")),
        reading("memory_available", 4000.0, scope="memory"),
    )
    machine(sensor)
    with pytest.raises(UsageError, match=f"{option} is {value:g}.*{missing}.*{why}"):
        open_pacer(Governing(**{option: value}), stack)
    stack.close()
    assert sensor.closed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power_cap_w": -1.0}, "power_cap_w is -1.0"),
        ({"temp_limit_c": 300.0}, "temp_limit_c is 300.0"),
        ({"battery_floor_percent": 150.0}, "battery_floor_percent is 150.0"),
        ({"memory_limit_mb": 0.0}, "memory_limit_mb is 0.0"),
        ({"objective": "speed"}, "'speed'.*latency, energy, balanced"),
        ({"governor": False, "power_cap_w": 4.0}, "power_cap_w was given"),
        ({"governor": False, "objective": "energy"}, "objective was given"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Governing(**options)


def test_an_unknown_device_is_refused(machine, stack):
    machine()
    with pytest.raises(UsageError, match="raspberry-pi-99"):
        open_pacer(Governing(device="raspberry-pi-99"), stack)


def test_a_devices_limits_are_heeded(machine, stack):
    machine(live("temperature", 79.0))
    pacer = open_pacer(Governing(device="raspberry-pi-5"), stack)
    assert pacer.directive(Costs({1: 0.1})).level >= Level.HOT


def test_a_recorded_trace_stands_in_for_the_sensors(tmp_path, stack):
    path = trace(tmp_path, [reading("temperature", 69.9)])
    pacer = open_pacer(Governing(temp_limit_c=70.0, telemetry=path), stack)
    directive = pacer.directive(Costs({1: 0.1}))
    assert directive.level == Level.HOT
    assert threading.active_count() == 1 or "outrider-monitor" not in {t.name for t in threading.enumerate()}


def test_a_file_that_is_no_trace_is_one_clear_error(tmp_path, stack):
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    with pytest.raises(OutriderError, match=r"notes\.txt"):
        open_pacer(Governing(telemetry=path), stack)


def test_a_monitor_of_ones_own_is_used_as_it_is(stack):
    clock = VirtualClock()
    monitor = Monitor([Thermometer(reading("temperature", 40.0))], clock)
    assert open_pacer(Governing(telemetry=monitor), stack).monitor is monitor


def test_the_decision_log_is_written_and_can_be_decided_again(tmp_path):
    path = trace(tmp_path, [reading("temperature", 69.9)])
    log = tmp_path / "log.jsonl"
    with ExitStack() as stack:
        pacer = open_pacer(Governing(temp_limit_c=70.0, telemetry=path, log=log), stack)
        pacer.directive(Costs({1: 0.1}))
        governor = pacer.governor
    fresh = type(governor)(governor.policy)
    assert list(replay_decisions(log, lambda header: fresh)) == []


def test_a_log_that_cannot_be_written_is_refused(tmp_path, stack, machine):
    machine()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="decision log"):
        open_pacer(Governing(log=tmp_path / "file" / "log.jsonl"), stack)


def graph_of(**changes):
    return GraphEntry(
        backend="onnxruntime",
        unit="cpu",
        profile="inplace",
        files={"a": FileEntry("0" * 64, 3_000_000), "b": FileEntry("0" * 64, 1_000_000)},
        widths=None,
        prefill_width=None,
        kv=KvEntry("float32", "BHSD", 2, 4, 8),
        max_context=1000,
        vocab_size=10,
        recipe="int4",
        **changes,
    )


def test_a_device_s_profile_says_what_rounds_should_draw_before_any_was_measured(machine, stack):
    machine(live("temperature", 40.0))
    pacer = open_pacer(
        Governing(device="raspberry-pi-5"),
        stack,
        ("lookup", "model"),
        {"target": graph_of(), "draft": graph_of(gathered_bytes=2_000_000)},
    )
    energy = pacer.energy({1: 0.1})
    assert energy.static_w == pytest.approx(float(load_device("raspberry-pi-5").static_w))
    assert energy.draft_j["lookup"] == 0.0
    assert 0.0 < energy.draft_j["model"] < energy.verify_j[1] < energy.verify_j[8]
    assert pacer.governor.draft_mb == pytest.approx(footprint_mb(graph_of()))


def test_no_energy_is_assumed_without_a_profile_or_for_weights_of_unknown_size(machine, stack, caplog):
    machine(live("temperature", 40.0))
    pacer = open_pacer(Governing(), stack, ("lookup",), {"target": graph_of()})
    assert pacer.energy({1: 0.1}) is None
    strange = {"target": replace(graph_of(), recipe="ternary")}
    pacer = open_pacer(Governing(device="raspberry-pi-5"), stack, ("lookup",), strange)
    assert pacer.energy({1: 0.1}) is None
    assert "ternary" in caplog.text


def test_the_footprint_is_files_and_cache():
    assert footprint_mb(graph_of()) == pytest.approx(4.0 + 2 * 2 * 4 * 8 * 1000 * 4 / 1e6)
