"""Two generations of Macs: what a release does not tell is missing with a reason, and nothing hangs on a name."""

from __future__ import annotations

import plistlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.contracts import Reading
from outrider.power.monitor import Monitor, distill
from outrider.power.sensors import discover
from outrider.power.sensors.apple import (
    Powermetrics,
    ThermalState,
    _Process,
    cocoa_thermal_state,
    energy_of,
    parse_samples,
    readings_of,
)
from outrider.power.sensors.system import System
from outrider.targets.fake import VirtualClock
from tests.sysfs import reasons, values

DATA = Path(__file__).parent / "data/apple"
M1 = (DATA / "m1_macos12.plist").read_bytes()
M5 = (DATA / "m5max_macos26.plist").read_bytes()


def sample(data: bytes, **changes: Any) -> dict[str, Any]:
    """A sample with keys of `processor` changed, or taken away (None)."""
    ((found,), rest) = parse_samples(data)
    assert rest == b""
    for key, value in changes.items():
        if value is None:
            found["processor"].pop(key, None)
        else:
            found["processor"][key] = value
    return found


def scopes(readings: Sequence[Reading]) -> dict[str, str]:
    return {r.source: r.scope for r in readings if r.quantity == "power"}


# Parsing


def test_samples_end_with_nul_and_the_last_may_be_partial() -> None:
    samples, rest = parse_samples(M1 + b"\0" + M5 + b"\0" + M1[:700])
    assert [s["hw_model"] for s in samples] == ["MacBookAir10,1", "Mac17,7"]
    assert rest == M1[:700]
    more, rest = parse_samples(rest + M1[700:] + b"\0")
    assert [s["hw_model"] for s in more] == ["MacBookAir10,1"]
    assert rest == b""


def test_the_only_sample_of_a_single_shot_needs_no_nul() -> None:
    assert len(parse_samples(M5)[0]) == 1
    assert len(parse_samples(M5 + b"\n\0")[0]) == 1


@given(st.lists(st.integers(1, 4000), max_size=12))
def test_however_the_pipe_cuts_it_every_sample_is_read_once(cuts: list[int]) -> None:
    stream = (M1 + b"\0") * 2 + (M5 + b"\0")
    found, rest, start = [], b"", 0
    for size in [*cuts, len(stream)]:
        samples, rest = parse_samples(rest + stream[start : start + size])
        found += samples
        start += size
    assert len(found) == 3
    assert rest == b""


@pytest.mark.parametrize("damage", [b"", b"\n", b"Unable to get power", b"<plist><dict><key>", b"<plist/>"])
def test_what_is_no_sample_is_left_out(damage: bytes) -> None:
    samples, _ = parse_samples(damage + b"\0" + M1 + b"\0")
    assert len(samples) == 1


# Figures


def test_an_m1_tells_energies_and_no_combined_power() -> None:
    """macOS 12: combined power is what the units used over the true length of the interval."""
    readings = readings_of(sample(M1), 5.0)
    assert values(readings, "power") == {
        "powermetrics:chip": pytest.approx((9.519 + 0.501) / 1.002),
        "powermetrics:cpu": pytest.approx(9.519 / 1.002),
        "powermetrics:gpu": pytest.approx(0.501 / 1.002),
        "powermetrics:ane": 0.0,
    }
    assert energy_of(sample(M1)) == pytest.approx(10.02)


def test_an_m5_tells_combined_power_in_milliwatts() -> None:
    readings = readings_of(sample(M5), 5.0)
    assert values(readings, "power")["powermetrics:chip"] == pytest.approx(36.2005)
    assert energy_of(sample(M5)) == pytest.approx(36.2)


def test_the_chips_figure_is_chosen_and_its_parts_are_not_added() -> None:
    readings = readings_of(sample(M5), 5.0)
    assert scopes(readings) == {
        "powermetrics:chip": "soc",
        "powermetrics:cpu": "rail",
        "powermetrics:gpu": "rail",
        "powermetrics:ane": "rail",
    }
    state = distill(readings, 5.0)
    assert (state.power_w, state.power_scope) == (pytest.approx(36.2005), "soc")


def test_apples_powers_are_labelled_as_estimates() -> None:
    assert {r.method for r in readings_of(sample(M5), 5.0) if r.quantity == "power"} == {"estimated"}


def test_package_and_dram_energy_may_vanish() -> None:
    """They did in macOS 13."""
    whole, without = sample(M1), sample(M1, package_energy=None, dram_energy=None)
    assert readings_of(whole, 5.0) == readings_of(without, 5.0)


def test_a_release_that_tells_no_power_gives_a_reason_that_lists_what_it_tells() -> None:
    bare = sample(M1, cpu_energy=None, gpu_energy=None, ane_energy=None)
    readings = readings_of(bare, 5.0)
    assert values(readings, "power") == {}
    assert "it tells clusters, dram_energy" in reasons(readings, "power")["powermetrics:chip"]
    assert energy_of(bare) is None


def test_a_gpus_energy_alone_is_not_the_chips() -> None:
    assert energy_of(sample(M1, cpu_energy=None)) is None


@pytest.mark.parametrize("names", [("E-Cluster", "P-Cluster"), ("M0", "S"), ("P0", "E0"), ("", "")])
def test_clusters_are_told_apart_by_their_clocks_never_by_name(names: tuple[str, str]) -> None:
    renamed = sample(M5)
    for cluster, name in zip(renamed["processor"]["clusters"], names, strict=True):
        cluster["name"] = name
    readings = readings_of(renamed, 5.0)
    assert readings == readings_of(sample(M5), 5.0)
    assert values(readings, "clock_max") == {"powermetrics:cluster-1": 4.6e9, "powermetrics:gpu": 1.58e9}


def test_a_gpus_hertz_are_megahertz() -> None:
    assert values(readings_of(sample(M5), 5.0), "clock")["powermetrics:gpu"] == pytest.approx(1.18525e9)


def test_a_throttled_busy_cluster_shows_in_the_clock_ratio() -> None:
    """3.68 of 4.6 GHz, while the GPU is at 1.185 of 1.58."""
    assert distill(readings_of(sample(M5), 5.0), 5.0).clock_ratio == pytest.approx(1.18525 / 1.58)


def test_a_unit_at_rest_is_not_taken_for_throttled() -> None:
    """The M1's GPU runs at 396 of 1278 MHz because it idles, and its slow cluster is left to the system."""
    assert set(values(readings_of(sample(M1), 5.0), "clock_max")) == {"powermetrics:cluster-1"}


@pytest.mark.parametrize("processor", [None, 7, {}, {"clusters": None}, {"clusters": [3, {}]}])
@pytest.mark.parametrize("gpu", [None, {}, {"freq_hz": "fast", "dvfm_states": [1]}])
def test_any_key_may_be_missing_or_of_another_kind(processor: Any, gpu: Any) -> None:
    readings = readings_of({"processor": processor, "gpu": gpu, "elapsed_ns": 0}, 5.0)
    assert [r.source for r in readings] == ["powermetrics:chip", "powermetrics:pressure"]
    assert all(r.value is None and r.reason for r in readings)


@pytest.mark.parametrize(
    ("word", "bound"), [("Moderate", 0.8), ("Heavy", 1.0), ("Trapping", 1.2), ("Sleeping", 1.3)]
)
def test_thermal_pressure_is_a_lower_bound_of_headroom(word: str, bound: float) -> None:
    changed = sample(M1)
    changed["thermal_pressure"] = word
    assert values(readings_of(changed, 5.0), "headroom") == {"powermetrics:pressure": bound}


@pytest.mark.parametrize(
    ("word", "reason"), [("Nominal", "proves nothing"), ("Toasty", "known: nominal, moderate")]
)
def test_nominal_and_unknown_pressure_prove_nothing(word: str, reason: str) -> None:
    """An M3 Max slowed down at nominal pressure."""
    changed = sample(M1)
    changed["thermal_pressure"] = word
    readings = readings_of(changed, 5.0)
    assert values(readings, "headroom") == {}
    assert reason in reasons(readings, "headroom")["powermetrics:pressure"]


# The running sensor


class Pipe:
    """A `powermetrics` that prints what a test puts in."""

    def __init__(self) -> None:
        self.waiting: list[bytes | None] = []
        self.commands: list[list[str]] = []
        self.closed = 0

    def open(self, command: Sequence[str]) -> Pipe:
        self.commands.append(list(command))
        return self

    def read(self) -> bytes | None:
        printed, self.waiting = self.waiting, []
        return None if None in printed else b"".join(part for part in printed if part)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(50.0)


def powermetrics(clock: VirtualClock, pipe: Pipe, is_root: bool = True) -> Powermetrics:
    return Powermetrics(System(clock=clock, platform="darwin"), pipe.open, is_root)


def test_samples_are_told_as_they_come_and_joules_are_counted(clock: VirtualClock) -> None:
    pipe = Pipe()
    monitor = Monitor([powermetrics(clock, pipe)], clock)
    joules = []
    for text in (b"", M5[:300], M5[300:] + b"\0", M5 + b"\0" + M5 + b"\0"):
        pipe.waiting.append(text)
        state = monitor.poll()
        joules += [r.value for r in monitor.readings() if r.quantity == "energy"]
        clock.advance(1.0)
    assert state.power_w == pytest.approx(36.2005)
    assert joules == pytest.approx([36.2, 3 * 36.2])
    assert pipe.commands == [
        ["powermetrics", "-f", "plist", "--samplers", "cpu_power,gpu_power,thermal", "-i", "1000"]
    ]
    monitor.stop()
    assert pipe.closed == 1


def test_what_waited_in_the_pipe_is_not_told_as_new(clock: VirtualClock) -> None:
    pipe = Pipe()
    sensor = powermetrics(clock, pipe)
    pipe.waiting.append(M5 + b"\0")
    assert values(sensor.read(), "power")
    clock.advance(60.0)
    pipe.waiting.append(M1 + b"\0")
    assert sensor.read() == []
    clock.advance(1.0)
    pipe.waiting.append(M5 + b"\0")
    readings = sensor.read()
    assert values(readings, "energy")["powermetrics:chip"] == pytest.approx(36.2 + 10.02 + 36.2)


def test_without_root_the_reason_says_how_and_nothing_is_started(clock: VirtualClock) -> None:
    pipe = Pipe()
    (reading,) = powermetrics(clock, pipe, is_root=False).read()
    assert reading.value is None
    assert "sudo" in reading.reason
    assert pipe.commands == []


def test_a_powermetrics_that_ends_is_started_again(clock: VirtualClock) -> None:
    pipe = Pipe()
    sensor = powermetrics(clock, pipe)
    pipe.waiting.append(None)
    (reading,) = sensor.read()
    assert "has ended" in reading.reason
    pipe.waiting.append(M5 + b"\0")
    assert values(sensor.read(), "power")
    assert len(pipe.commands) == 2


def test_a_powermetrics_that_is_not_there_is_a_reason(clock: VirtualClock) -> None:
    def missing(command: Sequence[str]) -> Pipe:
        raise FileNotFoundError(2, "No such file or directory")

    sensor = Powermetrics(System(clock=clock, platform="darwin"), missing, True)
    (reading,) = sensor.read()
    assert "cannot be started: No such file" in reading.reason


def test_a_real_process_is_read_without_waiting_for_it() -> None:
    script = "import sys,time; sys.stdout.write('a'); sys.stdout.flush(); sys.stdin.read(); time.sleep(60)"
    process = _Process([sys.executable, "-c", script])
    try:
        found = b""
        while not found:
            part = process.read()
            assert part is not None
            found += part
        assert found == b"a"
        assert process.read() == b""
    finally:
        process.close()


def test_a_real_process_that_ended_says_so() -> None:
    process = _Process([sys.executable, "-c", "print('x', end='')"])
    found = []
    while (part := process.read()) is not None:
        found.append(part)
    process.close()
    assert b"".join(found) == b"x"


# The thermal state


@pytest.mark.parametrize(("state", "bound"), [(1, 0.8), (2, 1.0), (3, 1.2)])
def test_the_thermal_state_is_a_lower_bound_of_headroom(
    clock: VirtualClock, state: int, bound: float
) -> None:
    sensor = ThermalState(System(clock=clock), lambda: state)
    assert values(sensor.read(), "headroom") == {"thermalstate": bound}


@pytest.mark.parametrize(("state", "reason"), [(0, "proves nothing"), (4, "known: 0 to 3"), (-1, "known")])
def test_nominal_and_unknown_states_prove_nothing(clock: VirtualClock, state: int, reason: str) -> None:
    readings = ThermalState(System(clock=clock), lambda: state).read()
    assert reason in reasons(readings, "headroom")["thermalstate"]


def test_a_machine_without_foundation_has_a_reason_not_nominal(clock: VirtualClock) -> None:
    def missing() -> int:
        raise OSError("Foundation is not on this machine")

    readings = ThermalState(System(clock=clock), missing).read()
    assert "Foundation is not" in reasons(readings, "headroom")["thermalstate"]


def test_cocoa_knows_one_of_four_states_and_elsewhere_is_an_oserror() -> None:
    if sys.platform == "darwin":
        assert 0 <= cocoa_thermal_state() <= 3
        return
    with pytest.raises(OSError, match="Foundation"):
        cocoa_thermal_state()


def test_only_a_mac_has_these_sources(tmp_path: Path) -> None:
    names = {sensor.name for sensor in discover(System(tmp_path, platform="darwin"))}
    assert names == {"powermetrics", "thermalstate"}
    assert discover(System(tmp_path, platform="linux")) == []


def test_the_fixtures_are_property_lists() -> None:
    assert plistlib.loads(M1)["hw_model"] == "MacBookAir10,1"
