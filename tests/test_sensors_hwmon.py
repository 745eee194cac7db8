"""hwmon chips: units, identity by name, channels that fail, over-current events."""

from __future__ import annotations

import errno

import pytest

from outrider.power.sensors.hwmon import Hwmon
from tests.boards import HWMON, amd_server, intel_laptop, orin_nano
from tests.sysfs import Board, Link, board_fixture, only, reasons, values  # noqa: F401


def chip(number: int, name: str, **files: int | str) -> dict[str, int | str]:
    return {f"{HWMON}/hwmon{number}/{file}": text for file, text in {"name": name, **files}.items()}


def test_units_are_milli_degrees_microwatts_and_microjoules(board: Board) -> None:
    board.add(chip(0, "amdgpu", temp1_input=45_500, power1_input=12_345_678, energy1_input=2_500_000))
    readings = only(Hwmon.find(board.system)).read()
    assert values(readings, "temperature") == pytest.approx({"hwmon:amdgpu:temp1": 45.5})
    assert values(readings, "power") == pytest.approx({"hwmon:amdgpu:power1": 12.345678})
    assert values(readings, "energy") == pytest.approx({"hwmon:amdgpu:energy1": 2.5})
    assert {r.method for r in readings if r.quantity == "energy"} == {"counter"}


def test_a_chip_is_known_by_its_name_whatever_its_number(board: Board) -> None:
    board.add(chip(7, "coretemp", temp1_input=50_000, temp1_label="Package id 0"))
    assert values(only(Hwmon.find(board.system)).read(), "temperature") == {
        "hwmon:coretemp:Package id 0": 50.0
    }


def test_chips_of_one_name_are_told_apart_by_their_device(board: Board) -> None:
    for number, name in ((0, "nvme1"), (1, "nvme0")):
        board.add(chip(number, "nvme", temp1_input=40_000 + number))
        board.add(
            {
                f"/sys/devices/pci/{name}/model": "x",
                f"{HWMON}/hwmon{number}/device": Link(f"/sys/devices/pci/{name}"),
            }
        )
    found = values(only(Hwmon.find(board.system)).read(), "temperature")
    assert found == pytest.approx({"hwmon:nvme@nvme1:temp1": 40.0, "hwmon:nvme@nvme0:temp1": 40.001})


@pytest.mark.parametrize(
    "error", [errno.EAGAIN, errno.EIO, errno.ENODATA, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL]
)
def test_a_channel_that_fails_gives_a_reason_and_stops_no_other(board: Board, error: int) -> None:
    board.add(chip(0, "coretemp", temp1_input=50_000, temp2_input=51_000))
    sensor = only(Hwmon.find(board.system))
    board.break_file(f"{HWMON}/hwmon0/temp1_input", error)
    readings = sensor.read()
    assert values(readings, "temperature") == {"hwmon:coretemp:temp2": 51.0}
    assert "/sys/class/hwmon/hwmon0/temp1_input" in reasons(readings, "temperature")["hwmon:coretemp:temp1"]


@pytest.mark.parametrize("text", ["", "n/a", "nan", "inf", "4 5"])
def test_a_file_without_a_number_gives_a_reason(board: Board, text: str) -> None:
    board.add(chip(0, "coretemp", temp1_input=text))
    assert (
        "no number" in reasons(only(Hwmon.find(board.system)).read(), "temperature")["hwmon:coretemp:temp1"]
    )


@pytest.mark.parametrize("raw", [-650_788_984, -128_000, 255_000])
def test_a_temperature_that_no_part_has_is_not_told(board: Board, raw: int) -> None:
    board.add(chip(0, "coretemp", temp1_input=raw))
    assert (
        "no working part"
        in reasons(only(Hwmon.find(board.system)).read(), "temperature")["hwmon:coretemp:temp1"]
    )


def test_one_spike_does_not_get_through(board: Board) -> None:
    board.add(chip(0, "cpu_thermal", temp1_input=50_000))
    sensor = only(Hwmon.find(board.system))
    told = []
    for raw in (50_000, 50_100, 85_000, 50_200):
        board.add(chip(0, "cpu_thermal", temp1_input=raw))
        told += values(sensor.read(), "temperature").values()
    assert max(told) < 50.3


def test_a_chip_that_vanishes_gives_reasons(board: Board) -> None:
    board.add(chip(0, "coretemp", temp1_input=50_000))
    sensor = only(Hwmon.find(board.system))
    board.remove(f"{HWMON}/hwmon0/temp1_input")
    assert "is gone" in reasons(sensor.read(), "temperature")["hwmon:coretemp:temp1"]


def test_a_power_that_is_only_a_mean_is_read(board: Board) -> None:
    board.add(
        chip(0, "amdgpu", power1_average=9_000_000) | chip(1, "power_meter", power1_average=150_000_000)
    )
    readings = only(Hwmon.find(board.system)).read()
    assert values(readings, "power") == {"hwmon:amdgpu:power1": 9.0, "hwmon:power_meter:power1": 150.0}
    assert {r.source: r.scope for r in readings} == {
        "hwmon:amdgpu:power1": "rail",
        "hwmon:power_meter:power1": "device",
    }


def test_batteries_mains_and_usb_ports_are_not_rails_of_the_board(board: Board) -> None:
    board.add(intel_laptop())
    board.add(chip(9, "ucsi_source_psy_1_0008", power1_input=15_000_000))
    assert values(only(Hwmon.find(board.system)).read(), "power") == {}


def test_tdie_stands_for_tctl_and_a_disk_is_no_die(board: Board) -> None:
    board.add(amd_server())
    readings = only(Hwmon.find(board.system)).read()
    dies = {r.source: r.value for r in readings if r.scope == "die"}
    assert dies == {"hwmon:k10temp:Tdie": 54.5}
    assert {r.source: r.scope for r in readings if "nvme" in r.source} == {
        "hwmon:nvme@hwmon1:temp1": "device",
        "hwmon:nvme@hwmon2:temp1": "device",
    }


def throttle(board: Board, sensor: Hwmon, **counts: int) -> dict[str, float]:
    board.add({f"{HWMON}/hwmon4/{name}_event_cnt": count for name, count in counts.items()})
    return values(sensor.read(), "throttle")


def test_over_current_events_count_from_when_the_sensor_began(board: Board) -> None:
    board.add(orin_nano())
    sensor = only(Hwmon.find(board.system))
    source = "hwmon:soctherm_oc:oc"
    assert throttle(board, sensor) == {f"{source}1": 0.0, f"{source}2": 0.0, f"{source}3": 0.0}
    assert throttle(board, sensor, oc3=40)[f"{source}3"] == 1.0
    assert throttle(board, sensor, oc3=40)[f"{source}3"] == 0.0


def test_an_over_current_event_that_throttles_nothing_is_no_throttling(board: Board) -> None:
    board.add(orin_nano() | {f"{HWMON}/hwmon4/oc2_throt_en": 0})
    sensor = only(Hwmon.find(board.system))
    assert throttle(board, sensor, oc2=99)["hwmon:soctherm_oc:oc2"] == 0.0


def test_an_event_counter_that_was_unreadable_tells_nothing_of_the_gap(board: Board) -> None:
    board.add(orin_nano())
    sensor = only(Hwmon.find(board.system))
    board.break_file(f"{HWMON}/hwmon4/oc1_event_cnt", errno.EIO)
    assert "oc1" in str(reasons(sensor.read(), "throttle"))
    board.broken.clear()
    assert "first count" in reasons(sensor.read(), "throttle")["hwmon:soctherm_oc:oc1"]
    assert values(sensor.read(), "throttle")["hwmon:soctherm_oc:oc1"] == 0.0


def test_a_machine_without_chips_has_no_sensor(board: Board) -> None:
    assert Hwmon.find(board.system) == []
