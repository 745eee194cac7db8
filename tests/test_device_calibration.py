"""`outrider calibrate` finds what a device is, from time and energy, and says what it could not measure."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import outrider
from outrider.contracts import Reading
from outrider.errors import OutriderError
from outrider.power.monitor import Monitor
from outrider.power.sensors.simulated import simulated_sensors
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.planner import Planner
from outrider.runtime.profiling.calibrate import (
    Calibration,
    Plan,
    calibrate,
    measured_profile,
    read_bandwidth,
)
from outrider.targets.device import (
    DEVICES,
    Device,
    Figure,
    figures_of,
    load_device,
    parse_device,
    shipped_device,
    user_profile_path,
)
from outrider.targets.device_toml import device_toml, write_device
from outrider.targets.fake import FakeGraph, VirtualClock, random_logits
from outrider.targets.model_cost import DRAFT_COST, TARGET_COST
from outrider.targets.physics import roofline_time
from outrider.targets.simulated import Machine, SimulatedGraph, perturbed

PLAN = Plan(rest_s=20.0, seconds=12.0, rounds=2)


def run(device: Device, metered: bool = True, widths: tuple[int, ...] | None = None) -> Calibration:
    """Calibrate a simulated specimen with the sensors that it has, or with none."""
    m = Machine(device, jitter=0.0)
    target = SimulatedGraph(FakeGraph(64, 256, widths, logits=random_logits(64)), m, TARGET_COST)
    draft = ModelDrafter(SimulatedGraph(FakeGraph(64, 256, logits=random_logits(64)), m, DRAFT_COST), 64, 0.0)
    monitor = Monitor(simulated_sensors(m) if metered else [], clock=m.clock)
    return calibrate(
        target,
        {"model": draft},
        monitor,
        bundle="pair",
        date="2026-01-02",
        plan=PLAN,
        clock=m.clock,
        sleep=m.idle,
        bandwidth_gb_s=3.0,
        memory_gb=8.0,
    )


@pytest.fixture(scope="module")
def specimen() -> Device:
    return perturbed(load_device("raspberry-pi-5"), 11, 0.2)


@pytest.fixture(scope="module")
def found(specimen: Device) -> Calibration:
    return run(specimen)


def test_times_are_those_of_the_specimen(specimen: Device, found: Calibration) -> None:
    rates = specimen.rates()
    for width, seconds in found.costs.verify_s.items():
        assert seconds == pytest.approx(roofline_time(TARGET_COST.work(width, 64), rates), rel=0.02)
    draft_s = roofline_time(DRAFT_COST.work(1, 64), rates)
    assert found.costs.draft_s["model"] == pytest.approx(draft_s, rel=0.3)  # the first also catches up


def test_energy_above_rest_is_that_of_the_specimen(specimen: Device, found: Calibration) -> None:
    assert found.idle_w == pytest.approx(specimen.idle_w, rel=0.05)
    assert found.costs.energy is not None
    m = Machine(specimen, jitter=0.0)
    for width, joules in found.costs.energy.verify_j.items():
        began, before = m.clock(), m.energy_j
        m.execute(None, TARGET_COST.work(width, 64))
        above = m.energy_j - before - m.idle_w * (m.clock() - began)
        assert joules == pytest.approx(above, rel=0.05)
    assert set(found.costs.energy.draft_j) == {"model"}


def test_what_came_from_simulated_sensors_says_so(found: Calibration) -> None:
    assert found.method == "simulated"
    assert "simulated" in found.energy_from
    assert found.source == "simulated, outrider calibrate, 2026-01-02, bundle pair"


def test_the_profile_predicts_the_specimen(specimen: Device, found: Calibration) -> None:
    base = load_device("raspberry-pi-5")
    profile = measured_profile(found, base, TARGET_COST)
    for name in ("bandwidth_gb_s", "busy_w", "pj_per_op"):
        true, nominal, measured = (float(getattr(d.units["cpu"], name)) for d in (specimen, base, profile))
        assert abs(measured - true) < 0.25 * true or abs(measured - true) < abs(nominal - true), name
    rates = profile.rates()
    for width in (1, 9, 16):
        true_s = roofline_time(TARGET_COST.work(width, 64), specimen.rates())
        assert roofline_time(TARGET_COST.work(width, 64), rates) == pytest.approx(true_s, rel=0.05)
    assert profile.idle_w == pytest.approx(specimen.idle_w, rel=0.05)


def test_only_what_was_measured_changes_and_says_when_and_with_what(found: Calibration) -> None:
    base = load_device("raspberry-pi-5")
    before, after = figures_of(base), figures_of(measured_profile(found, base, TARGET_COST))
    changed = {place for place in after if after[place].source != before[place].source}
    assert "units.cpu.bandwidth_gb_s" in changed
    assert not [place for place in changed if place.startswith(("thermal", "throttle", "sensors"))]
    assert all("outrider calibrate, 2026-01-02, bundle pair" in after[place].source for place in changed)


def test_without_a_meter_times_are_measured_and_power_stays_as_it_was() -> None:
    found = run(load_device("raspberry-pi-5"), metered=False)
    assert found.costs.energy is None
    assert found.idle_w is None
    assert "no source of power or energy gave a figure" in found.no_meter
    base = load_device("host")
    profile = measured_profile(found, base, TARGET_COST)
    assert profile.power == base.power
    assert profile.meter == "none"
    assert profile.units["cpu"].busy_w.assumed
    assert not profile.units["cpu"].bandwidth_gb_s.assumed


def test_a_device_that_cannot_tell_its_power_says_why() -> None:
    found = run(load_device("iphone-16-pro"))
    assert found.costs.energy is None
    assert "iPhone 16 Pro has no power sensor" in found.no_meter


def test_a_host_with_a_meter_gets_one_in_its_profile(found: Calibration) -> None:
    profile = measured_profile(found, load_device("host"), TARGET_COST)
    assert profile.meter == "rail"
    assert profile.sensors.power is not None
    assert parse_device(device_toml(profile), "host", "host.toml").meter == "rail"


def test_a_sensor_that_fails_midway_leaves_no_energy_and_a_reason(specimen: Device) -> None:
    class Dying:
        name, period_s = "dying", 0.1

        def __init__(self, machine: Machine) -> None:
            self.machine = machine

        def read(self) -> list[Reading]:
            now = self.machine.clock()
            value = 5.0 if now < 15.0 else None
            return [Reading("dying", "power", value, "module", "instant", now, "" if value else "it broke")]

    m = Machine(specimen, jitter=0.0)
    target = SimulatedGraph(FakeGraph(64, 256, logits=random_logits(64)), m, TARGET_COST)
    monitor = Monitor([Dying(m)], clock=m.clock)
    found = calibrate(
        target, {}, monitor, bundle="b", date="d", plan=PLAN, clock=m.clock, sleep=m.idle, bandwidth_gb_s=1.0
    )
    assert found.costs.energy is None
    assert found.no_meter
    assert found.costs.verify_s


def test_compiled_widths_bound_what_is_measured() -> None:
    found = run(load_device("raspberry-pi-5"), metered=False, widths=(1, 5))
    assert set(found.costs.verify_s) == {1, 2, 3, 5}


def test_nothing_is_left_in_the_caches(specimen: Device) -> None:
    m = Machine(specimen, jitter=0.0)
    target = SimulatedGraph(FakeGraph(64, 256), m, TARGET_COST)
    monitor = Monitor([], clock=m.clock)
    calibrate(
        target, {}, monitor, bundle="b", date="d", plan=PLAN, clock=m.clock, sleep=m.idle, bandwidth_gb_s=1.0
    )
    assert target.length == 0
    assert monitor.listeners == []


def test_a_context_without_room_is_an_error(specimen: Device) -> None:
    m = Machine(specimen)
    with pytest.raises(OutriderError, match="context of 1 tokens is too short"):
        calibrate(
            FakeGraph(64, 1),
            {},
            Monitor([], clock=m.clock),
            bundle="b",
            date="d",
            clock=m.clock,
            sleep=m.idle,
        )


def test_bandwidth_is_bytes_over_the_best_pass() -> None:
    ticks = iter([0.0, 2.0, 10.0, 11.0])
    assert read_bandwidth(8000, 2, clock=lambda: next(ticks)) == pytest.approx(8000 / 1e9)


@pytest.mark.parametrize("slug", DEVICES)
def test_a_profile_written_as_toml_is_read_back_the_same(slug: str, tmp_path: Path) -> None:
    device = shipped_device(slug)
    path = write_device(device, tmp_path / "deep" / f"{slug}.toml", "one line\nand another")
    again = load_device(path)
    assert again == device
    assert {p: (f, f.source) for p, f in figures_of(again).items()} == {
        p: (f, f.source) for p, f in figures_of(device).items()
    }


def test_awkward_text_survives_toml() -> None:
    device = load_device("host")
    awkward = replace(
        device,
        name='a "b" \\ c\nd',
        memory=replace(device.memory, peak_gb_s=Figure(40.5, 'said "x"\t\\ ü')),
    )
    again = parse_device(device_toml(awkward), "host", "x.toml")
    assert again.name == 'a "b" \\ c d'
    assert again.memory.peak_gb_s.source == 'said "x" \\ ü'


def test_a_measured_profile_wins_when_it_is_asked_for_by_name(
    found: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    profile = measured_profile(found, shipped_device("raspberry-pi-5"), TARGET_COST)
    write_device(profile, user_profile_path("raspberry-pi-5"))
    assert load_device("raspberry-pi-5").idle_w == profile.idle_w
    assert shipped_device("raspberry-pi-5").idle_w == 1.55


def test_figures_that_no_profile_may_hold_are_not_written(tmp_path: Path) -> None:
    """As measured on a machine that was busy with something else: the profile could not be read again."""
    device = load_device("host")
    unit = device.units["cpu"]
    rates = {
        name: replace(rate, sustained_gops=Figure(0.008, "measured")) for name, rate in unit.rates.items()
    }
    slow = replace(device, units={"cpu": replace(unit, rates=rates)})
    with pytest.raises(OutriderError, match=r"not kept.*sustained_gops is 0\.008.*was the machine busy"):
        write_device(slow, tmp_path / "below" / "mine.toml")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def even_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by a millisecond whenever a calibration looks at it, however busy this machine is."""
    clock = VirtualClock()

    def look() -> float:
        clock.advance(0.001)
        return clock()

    even = partial(calibrate, clock=look, sleep=clock.advance)
    monkeypatch.setattr("outrider.runtime.profiling.calibrate.calibrate", even)


def test_the_command_measures_a_bundle_and_keeps_the_profile(
    float_bundle: Path,
    tmp_path: Path,
    even_time: None,
    monkeypatch: pytest.MonkeyPatch,
    run_main: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    code, out, err = run_main(
        "calibrate", str(float_bundle), "--seconds", "0.1", "--rest", "0.1", "--device", "mine"
    )
    assert code == 0, err
    assert str(user_profile_path("mine")) in out
    assert "target forward of  9" in out
    profile = load_device("mine")
    assert "bundle bundle" in profile.units["cpu"].bandwidth_gb_s.source
    assert "measured, outrider calibrate, " in profile.units["cpu"].bandwidth_gb_s.source
    assert profile.thermal.case_tau_s.assumed
    (times,) = (tmp_path / "timing").iterdir()
    assert f"times for later loads: {times}" in out
    with outrider.load(float_bundle) as pipeline:
        assert pipeline.engine.planner.costs == Planner(json.loads(times.read_text())["measured"]).costs


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_command_writes_where_it_is_told(
    float_bundle: Path,
    tmp_path: Path,
    even_time: None,
    monkeypatch: pytest.MonkeyPatch,
    run_main: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    words = ("calibrate", str(float_bundle), "--seconds", "0.1", "--rest", "0.1")
    code, out, err = run_main(*words, "-o", str(tmp_path / "mine.toml"), "--json")
    assert code == 0, err
    record = json.loads(out)
    assert record["profile"] == str(tmp_path / "mine.toml")
    assert record["calibration"]["bandwidth_gb_s"] > 0
    assert load_device(tmp_path / "mine.toml").kind == "host"
    assert not (tmp_path / "home").exists()
    code, _, err = run_main(*words, "-o", str(tmp_path / "mine.toml"))
    assert code == 2, "what is there stays"
    assert "mine.toml exists already; choose another name, or give --overwrite" in err
    assert run_main(*words, "-o", str(tmp_path / "mine.toml"), "--overwrite")[0] == 0
    monkeypatch.setattr("outrider.records.os.fsync", full_disk)
    code, out, err = run_main(*words, "-o", str(tmp_path / "full" / "mine.toml"))
    assert (code, err.splitlines()[-1]) == (
        1,
        f"outrider: {tmp_path}/full/mine.toml: No space left on device",
    )
    assert "target forward of  9" in out, "what was measured is shown even if it cannot be kept"
    assert run_main(*words, "-o", str(tmp_path / "mine.json"))[0] == 2
    for name in ("../mine", "..", ".", "", "a/b", ".hidden", "mine.toml"):
        code, _, err = run_main(*words, "--device", name)
        assert code == 2
        assert f"--device is {name!r}; give a plain name" in err
