"""Simulated sensors show what the real device has, as coarse and slow as there, and say that they simulate."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from outrider.power.monitor import Monitor
from outrider.power.sensors.simulated import Simulated, simulated_sensors
from outrider.targets.device import DEVICES
from outrider.targets.physics import Temperatures
from outrider.targets.scenario import Event
from tests.simulated_rig import PHONE, PI, STEP, machine


@pytest.mark.parametrize("slug", DEVICES)
def test_a_device_shows_what_the_real_one_has_and_calls_it_simulated(slug: str) -> None:
    m = machine(slug)
    sensor = Simulated(m)
    sensor.read()
    m.idle(10.0)
    readings = sensor.read()
    assert {reading.method for reading in readings} == {"simulated"}
    assert all(reading.value is not None or reading.reason for reading in readings)
    shown = {reading.quantity for reading in readings if reading.value is not None}
    sensors = m.device.sensors
    assert ("power" in shown) == (m.device.meter != "none")
    assert ("headroom" in shown) == (sensors.headroom is not None)
    assert ("temperature" in shown) == (sensors.die is not None or sensors.skin is not None)
    assert ("clock" in shown) == sensors.clocks
    assert ("battery" in shown) == (m.device.battery is not None)


def value(readings: Iterable[object], quantity: str, scope: str | None = None) -> float | None:
    for r in readings:
        if r.quantity == quantity and scope in (None, r.scope):  # type: ignore[attr-defined]
            return r.value  # type: ignore[attr-defined,no-any-return]
    raise AssertionError(quantity)


def test_temperatures_come_in_the_steps_of_the_device() -> None:
    m = machine(PHONE)
    sensor, skins, dies = Simulated(m), [], []
    for _ in range(60):
        m.execute(None, STEP)
        m.idle(1.0)
        readings = sensor.read()
        skins.append(value(readings, "temperature", "skin") or 0.0)
        dies.append(value(readings, "temperature", "die") or 0.0)
    assert all(skin == pytest.approx(round(skin, 1)) for skin in skins)
    assert all(die == round(die) for die in dies)
    assert len(set(skins)) > 3


def test_a_device_without_a_meter_says_so_and_gives_no_figure() -> None:
    m = machine("iphone-16-pro")
    m.idle(5.0)
    (power,) = [r for r in Simulated(m).read() if r.quantity == "power"]
    assert power.value is None
    assert power.reason == "iPhone 16 Pro has no power sensor"


def test_power_is_the_mean_since_the_last_read() -> None:
    m = machine(PI)
    sensor = Simulated(m)
    (first,) = [r for r in sensor.read() if r.quantity == "power"]
    assert first.value is None
    for _ in range(40):
        m.execute(None, STEP)
        m.idle(0.1)
    mean = m.energy_j / m.elapsed_s
    assert value(sensor.read(), "power") == pytest.approx(mean, abs=0.3)


def test_a_figure_read_within_its_period_is_the_old_one() -> None:
    m = machine(PHONE)
    sensor = Simulated(m)
    m.idle(2.0)
    first = sensor.read()
    m.execute(None, STEP)
    assert sensor.read() == first
    m.idle(1.0)
    assert {r.time_s for r in sensor.read() if r.quantity == "temperature"} == {m.clock()}


def test_a_charging_battery_hides_the_power() -> None:
    m = machine(PHONE, events=(Event(5.0, charge_w=10.0),))
    sensor = Simulated(m)
    sensor.read()
    m.idle(6.0)
    readings = sensor.read()
    (power,) = [r for r in readings if r.quantity == "power"]
    assert power.value is None
    assert "unplug" in power.reason
    assert value(readings, "charging") == 1.0


def test_headroom_is_one_at_the_limit_and_coarse_on_an_iphone() -> None:
    m = machine("iphone-16-pro")
    sensor = Simulated(m)
    m.temperatures = Temperatures(60.0, 43.0)
    m.idle(1e-6)
    assert value(sensor.read(), "headroom") == pytest.approx(1.02)  # three steps of 0.34
    cold = machine("iphone-16-pro", ambient_c=5.0)
    assert value(Simulated(cold).read(), "headroom") == 0.0


def test_throttling_shows_in_the_clocks() -> None:
    m = machine(PHONE, ambient_c=38.0)
    for _ in range(2000):
        m.execute(None, STEP)
    readings = Simulated(m).read()
    limit, full = value(readings, "clock_limit"), value(readings, "clock_max")
    assert limit is not None
    assert full is not None
    assert limit / full == pytest.approx(m.clock_ratio)
    assert 0.0 < (value(readings, "throttle") or 0.0) <= 1.0


def test_a_monitor_finds_all_figures_fresh_at_their_own_pace() -> None:
    m = machine(PI, ambient_c=30.0)
    monitor = Monitor(simulated_sensors(m, seed=1), clock=m.clock)
    for _ in range(100):
        m.execute(None, STEP)
        state = monitor.poll()
    assert state.die_c == pytest.approx(m.temperatures.die_c, abs=2.0)
    assert state.power_method == "simulated"
    assert state.power_w == pytest.approx(m.power_w, abs=1.0)
    assert state.clock_ratio == pytest.approx(m.clock_ratio)
    assert state.memory_available_mb == pytest.approx(m.memory_available_mb)
    assert state.stale == ()


def test_an_apple_counter_grows_as_the_device_draws() -> None:
    m = machine("mac-m2")
    sensor = Simulated(m)
    m.idle(1.0)
    first = value(sensor.read(), "energy")
    m.idle(10.0)
    second = value(sensor.read(), "energy")
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(10.0 * m.idle_w)


def test_noise_is_fixed_by_the_seed() -> None:
    def shown(seed: int) -> list[float | None]:
        m = machine(PHONE)
        sensor = Simulated(m, seed)
        m.idle(2.0)
        return [r.value for r in sensor.read()]

    assert shown(1) == shown(1)
    assert any(shown(1) != shown(seed) for seed in range(2, 8))


@pytest.mark.parametrize("round_s", [0.04, 0.23, 0.31, 0.7])
def test_a_monitor_gets_a_sample_for_each_period_whenever_rounds_end(round_s: float) -> None:
    m = machine(PHONE)
    samples: set[float] = set()
    monitor = Monitor(simulated_sensors(m), m.clock)
    monitor.listeners.append(
        lambda rs: samples.update(r.time_s for r in rs if r.quantity == "memory_available")
    )
    while m.elapsed_s < 100.0:
        monitor.poll()
        m.idle(round_s)
    assert 99 <= len(samples) <= 101


def test_after_a_pause_there_is_one_new_figure_not_one_for_each_missed_period() -> None:
    m = machine(PHONE)
    sensor = Simulated(m, only=["system"])
    times = []
    for pause_s in (0.0, 30.4, 0.1, 0.1, 0.5):
        m.idle(pause_s)
        times.append(round(sensor.read()[0].time_s, 6))
    assert times == [0.0, 30.4, 30.4, 30.4, 31.1]
