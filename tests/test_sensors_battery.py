"""Batteries: the sign from the status, the unit from several samples, the sum only of packs that work."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.power.sensors.battery import Battery, current_unit, volts
from tests.boards import intel_laptop
from tests.sysfs import Board, board_fixture, only, reasons, values  # noqa: F401

SUPPLY = "/sys/class/power_supply"


def pack(name: str = "battery", **files: int | str) -> dict[str, int | str]:
    files = {"type": "Battery", "status": "Discharging", "capacity": 80, **files}
    return {f"{SUPPLY}/{name}/{file}": text for file, text in files.items()}


def power(board: Board, sensor: Battery, **files: int | str) -> float | None:
    board.add(pack(**files))
    return values(sensor.read(), "power").get("battery:battery")


def test_a_laptop_gives_microwatts(board: Board) -> None:
    board.add(intel_laptop())
    readings = only(Battery.find(board.system)).read()
    assert values(readings, "power") == {"battery:BAT0": pytest.approx(9.87)}
    assert values(readings, "battery") == {"battery:BAT0": 71.0}
    assert values(readings, "charging") == {"battery:BAT0": 0.0}
    assert {r.scope for r in readings} == {"battery"}


@pytest.mark.parametrize("current", [-900_000, 900_000, -900, 900])
def test_the_sign_comes_from_the_status_and_the_unit_from_the_load(board: Board, current: int) -> None:
    board.add(pack(current_now=current, voltage_now=4_000_000))
    sensor = only(Battery.find(board.system))
    assert [power(board, sensor) for _ in range(2)] == [None, None]
    assert power(board, sensor) == pytest.approx(3.6)
    assert power(
        board, sensor, status="Charging", current_now=current, voltage_now=4_000_000
    ) == pytest.approx(-3.6)


def test_the_guess_of_the_unit_is_recorded_in_the_reading(board: Board) -> None:
    board.add(pack(current_now=-850, voltage_now=4_000_000))
    sensor = only(Battery.find(board.system))
    first = sensor.read()
    assert "1 of 3 samples" in reasons(first, "power")["battery:battery"]
    sensor.read()
    told = next(r for r in sensor.read() if r.quantity == "power")
    assert "taken for mA" in told.reason
    assert "3 samples" in told.reason


def test_the_unit_once_judged_stays(board: Board) -> None:
    board.add(pack(current_now=500_000, voltage_now=4_000_000))
    sensor = only(Battery.find(board.system))
    for _ in range(3):
        sensor.read()
    idle = power(board, sensor, current_now=1000, voltage_now=4_000_000)
    assert idle == pytest.approx(0.004)


def test_samples_of_zero_and_of_charging_do_not_judge_the_unit(board: Board) -> None:
    board.add(pack(current_now=0, voltage_now=4_000_000))
    sensor = only(Battery.find(board.system))
    for _ in range(5):
        sensor.read()
    board.add(pack(current_now=100, voltage_now=4_000_000, status="Charging"))  # a trickle in µA
    for _ in range(5):
        sensor.read()
    assert "0 of 3" in reasons(sensor.read(), "power")["battery:battery"]


@given(
    st.lists(st.floats(0.3, 20.0), min_size=3, max_size=15),
    st.floats(3.4, 20.0),
    st.sampled_from([1e-6, 1e-3]),
)
def test_any_load_of_a_phone_or_laptop_tells_microamperes_from_milliamperes(
    watts: list[float], volt: float, scale: float
) -> None:
    unit = current_unit([(round(-w / volt / scale), volt) for w in watts])
    assert unit is not None
    assert unit.scale == scale


def test_currents_that_no_unit_makes_possible_have_none() -> None:
    assert current_unit([(1.0, 4.0)] * 3) is None
    assert current_unit([(1e12, 4.0)] * 3) is None
    assert current_unit([(900_000.0, 4.0)] * 2) is None


@pytest.mark.parametrize(
    ("raw", "volt"), [(4_123_000, 4.123), (4123, 4.123), (12_000_000, 12.0), (0, None), (4, None)]
)
def test_volts_are_told_from_microvolts_and_millivolts(raw: float, volt: float | None) -> None:
    assert volts(raw) == (None if volt is None else pytest.approx(volt))


@pytest.mark.parametrize("status", ["Full", "Not charging", "Unknown"])
def test_a_battery_that_rests_does_not_show_the_load(board: Board, status: str) -> None:
    board.add(pack(status=status, power_now=0))
    assert "does not see" in reasons(only(Battery.find(board.system)).read(), "power")["battery:battery"]


def test_zero_watts_while_discharging_is_no_figure(board: Board) -> None:
    board.add(pack(power_now=0))
    assert "reads 0 W" in reasons(only(Battery.find(board.system)).read(), "power")["battery:battery"]


def test_a_power_that_no_pack_gives_is_no_figure(board: Board) -> None:
    board.add(pack(power_now=9_000_000_000))
    assert "not possible" in reasons(only(Battery.find(board.system)).read(), "power")["battery:battery"]


@pytest.mark.parametrize(
    ("status", "online", "fed"),
    [
        ("Charging", 0, 1.0),
        ("Full", 0, 1.0),
        ("Discharging", 1, 0.0),
        ("Not charging", 1, 1.0),
        ("Unknown", 0, 0.0),
    ],
)
def test_whether_a_supply_feeds_the_machine(board: Board, status: str, online: int, fed: float) -> None:
    board.add(pack(status=status) | {f"{SUPPLY}/AC/type": "Mains", f"{SUPPLY}/AC/online": online})
    assert values(only(Battery.find(board.system)).read(), "charging") == {"battery:battery": fed}


def test_an_unknown_status_without_a_supply_is_unknown(board: Board) -> None:
    board.add(pack(status="Unknown"))
    assert "'Unknown'" in reasons(only(Battery.find(board.system)).read(), "charging")["battery:battery"]


def test_the_battery_of_a_mouse_and_an_empty_bay_are_not_the_machines(board: Board) -> None:
    board.add(pack("hidpp_battery_0", scope="Device") | pack("BAT1", present=0))
    assert Battery.find(board.system) == []


def test_two_packs_are_added_up_and_one_may_rest(board: Board) -> None:
    board.add(pack("BAT0", power_now=5_000_000) | pack("BAT1", status="Unknown", power_now=0))
    sensor = only(Battery.find(board.system))
    assert values(sensor.read(), "power")["battery:total"] == 5.0
    board.add(pack("BAT1", power_now=2_000_000))
    assert values(sensor.read(), "power")["battery:total"] == 7.0
    board.break_file(f"{SUPPLY}/BAT1/power_now", errno.ENODEV)
    assert "is gone" in reasons(sensor.read(), "power")["battery:total"]


def test_temperature_is_in_tenths(board: Board) -> None:
    board.add(pack(temp=312))
    assert values(only(Battery.find(board.system)).read(), "temperature") == {
        "battery:battery": pytest.approx(31.2)
    }
    board.add(pack(temp=-2732))
    assert reasons(only(Battery.find(board.system)).read(), "temperature")


def test_a_pack_that_vanishes_gives_reasons(board: Board) -> None:
    board.add(pack(power_now=5_000_000))
    sensor = only(Battery.find(board.system))
    for name in ("power_now", "capacity", "status"):
        board.remove(f"{SUPPLY}/battery/{name}")
    readings = sensor.read()
    assert not any(r.value is not None for r in readings)
    assert all(r.reason for r in readings)


@pytest.mark.parametrize("capacity", [-1, 101, "unknown"])
def test_an_impossible_charge_is_no_figure(board: Board, capacity: int | str) -> None:
    board.add(pack(capacity=capacity))
    assert reasons(only(Battery.find(board.system)).read(), "battery")
