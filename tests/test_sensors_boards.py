"""Whole machines: what `discover` finds on each, and that nothing there can stop it."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from outrider.contracts import Reading
from outrider.power.sensors import SOURCES, discover, sysfs
from outrider.power.sensors.system import Sensor, System
from tests import boards
from tests.sysfs import Board, board_fixture, reasons, values  # noqa: F401

TREES = {
    "pi4": boards.pi4, "pi5": boards.pi5, "orin_nano": boards.orin_nano, "agx_orin": boards.agx_orin,
    "thor": boards.thor, "nano_jetpack4": boards.nano_jetpack4, "intel_laptop": boards.intel_laptop,
    "amd_server": boards.amd_server, "container": boards.container,
}  # fmt: skip


def read_all(sensors: list[Sensor]) -> list[Reading]:
    return [reading for sensor in sensors for reading in sensor.read()]


def set_up(board: Board, name: str) -> list[Sensor]:
    board.add(TREES[name]())
    board.answers.update(boards.PI_ANSWERS)
    board.answers["vcgencmd pmic_read_adc"] = boards.pmic(dict.fromkeys(("VDD_CORE", "DDR_VDD2"), (1.0, 0.9)))
    return discover(board.system)


def names(sensors: list[Sensor]) -> set[str]:
    return {sensor.name for sensor in sensors}


def test_a_pi_4_has_no_power_and_says_nothing_of_it(board: Board) -> None:
    sensors = set_up(board, "pi4")
    assert names(sensors) == {"raspberrypi", "hwmon", "thermal", "cpufreq", "memory"}
    readings = read_all(sensors)
    assert values(readings, "power") == {}
    assert values(readings, "temperature") == pytest.approx(
        {"raspberrypi:soc": 51.1, "hwmon:cpu_thermal:temp1": 51.121, "thermal:cpu-thermal": 51.121}
    )
    assert "psi=1" in reasons(readings, "memory_pressure")["memory:pressure"]


def test_a_pi_5_that_throttles_shows_it_in_cooler_and_limit(board: Board) -> None:
    sensors = set_up(board, "pi5")
    assert "raspberrypi-pmic" in names(sensors)
    readings = read_all(sensors)
    assert values(readings, "throttle")["cooling:cpufreq-cpu0"] == pytest.approx(2 / 9)
    assert values(readings, "clock_limit")["cpufreq:policy0"] == 1.9e9
    assert "raspberrypi:pmic" in reasons(readings, "power")  # this answer has two of twelve rails


def test_an_orin_nano_is_read_through_sysfs_without_tegrastats(board: Board) -> None:
    sensors = set_up(board, "orin_nano")
    assert names(sensors) == {"ina", "hwmon", "thermal", "cpufreq", "memory"}
    readings = read_all(sensors)
    assert values(readings, "power")["ina:total"] == pytest.approx(4.87872)
    assert set(values(readings, "clock")) == {"cpufreq:policy0", "devfreq:17000000.gpu"}
    assert values(readings, "throttle")["cooling:cpu-throttle-alert"] == 0.0
    assert board.commands == []


@pytest.mark.parametrize(("name", "total"), [("agx_orin", 6.3), ("thor", 23.0), ("nano_jetpack4", 2.3)])
def test_other_jetsons_have_one_total(board: Board, name: str, total: float) -> None:
    readings = read_all(set_up(board, name))
    whole = [r for r in readings if r.quantity == "power" and r.scope in ("device", "module", "soc")]
    assert [r.value for r in whole] == [pytest.approx(total)]


def test_a_nanos_pmic_that_always_shows_100_degrees_is_no_die(board: Board) -> None:
    readings = read_all(set_up(board, "nano_jetpack4"))
    assert max(r.value or 0.0 for r in readings if r.quantity == "temperature" and r.scope == "die") < 40


def test_an_intel_laptop_has_counters_battery_and_throttle_times(board: Board) -> None:
    sensors = set_up(board, "intel_laptop")
    assert names(sensors) == {"rapl", "hwmon", "thermal", "cpufreq", "thermal-throttle", "memory", "battery"}
    readings = read_all(sensors)
    assert set(values(readings, "energy")) == {
        "rapl:package-0", "rapl:package-0/core", "rapl:package-0/uncore", "rapl:psys"
    }  # fmt: skip
    assert values(readings, "power") == {"battery:BAT0": pytest.approx(9.87)}


def test_an_amd_server_counts_its_socket_once(board: Board) -> None:
    sensors = set_up(board, "amd_server")
    read_all(sensors)
    board.clock.advance(1.0)
    for die in range(2):
        board.add({f"/sys/class/powercap/intel-rapl:{die}/energy_uj": 40_120_000_000 + die * 900})
    assert values(read_all(sensors), "power")["rapl:total"] == pytest.approx(120.0)


def test_a_container_without_anything_has_no_sensor(board: Board) -> None:
    assert set_up(board, "container") == []


@pytest.mark.parametrize("name", TREES)
def test_every_reading_has_a_value_or_a_reason_and_the_time_of_the_clock(board: Board, name: str) -> None:
    sensors = set_up(board, name)
    board.clock.advance(5.0)
    for reading in read_all(sensors):
        assert (reading.value is None) <= bool(reading.reason)
        assert reading.value is None or math.isfinite(reading.value)
        assert reading.time_s == 105.0


@pytest.mark.parametrize("name", TREES)
def test_sources_are_unique(board: Board, name: str) -> None:
    keys = [(reading.source, reading.quantity) for reading in read_all(set_up(board, name))]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.EAGAIN, errno.ENODEV])
@pytest.mark.parametrize("name", TREES)
def test_a_machine_on_which_every_read_fails_later_gives_reasons_only(
    board: Board, name: str, error: int
) -> None:
    sensors = set_up(board, name)
    board.answers.clear()
    for path in board.root.rglob("*"):
        board.broken[path.resolve()] = error
    readings = read_all(sensors)
    assert not [reading for reading in readings if reading.value is not None]
    assert all(reading.reason for reading in readings)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", TREES)
def test_find_never_raises(board: Board, name: str, error: int) -> None:
    board.add(TREES[name]())
    for path in board.root.rglob("*"):
        board.broken[path.resolve()] = error
    for sensor in discover(board.system):
        sensor.read()


@pytest.mark.parametrize("name", TREES)
def test_each_file_that_breaks_costs_only_the_figures_that_need_it(board: Board, name: str) -> None:
    sensors = set_up(board, name)
    whole = len([r for r in read_all(sensors) if r.value is not None])
    for path in sorted(path for path in board.root.rglob("*_input") if path.is_file()):
        board.broken = {path.resolve(): errno.EIO}
        left = len([r for r in read_all(sensors) if r.value is not None])
        assert whole - 2 <= left <= whole  # a rail, and the total that it is part of


@pytest.mark.parametrize("platform", ["darwin", "win32", "emscripten"])
def test_another_platform_is_not_searched_for_linux_files(board: Board, platform: str) -> None:
    board.add(boards.intel_laptop() | boards.pi5())
    system = System(board.root, board.clock, board.system.run, platform)
    mine = {"rapl", "ina", "hwmon", "thermal", "cpufreq", "memory", "battery", "raspberrypi", "tegrastats"}
    assert not names(discover(system)) & mine


def test_a_source_that_fails_in_its_search_does_not_stop_the_others(
    board: Board, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        @classmethod
        def find(cls, system: System) -> list[Sensor]:
            raise OSError(errno.EIO, "no luck")

    monkeypatch.setattr("outrider.power.sensors.SOURCES", (Broken, *SOURCES))
    assert names(set_up(board, "amd_server"))
    assert "no luck" in caplog.text


def test_this_very_machine_gives_values_or_reasons() -> None:
    for reading in read_all(discover()):
        assert reading.value is not None or reading.reason


def test_a_file_that_would_block_says_so_instead_of_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "temp"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        value, reason = sysfs.read_number(System(tmp_path), pipe)
    finally:
        os.close(writer)
    assert value is None
    assert "/temp has nothing to say now" in reason


def test_android_is_not_told_to_use_sudo(board: Board) -> None:
    board.add({"/system/build.prop": "", "/sys/class/thermal/thermal_zone0/temp": 1})
    board.break_file("/sys/class/thermal/thermal_zone0/temp", errno.EACCES)
    _, reason = sysfs.read_number(board.system, board.system.path("/sys/class/thermal/thermal_zone0/temp"))
    assert "adb can read it" in reason
    assert "sudo" not in reason


def test_names_are_made_unique_even_when_the_tie_breaker_ties() -> None:
    assert sysfs.labels(["a", "b", "a"]) == ["a@0", "b", "a@1"]
    assert sysfs.labels(["a", "a"], lambda index: "x") == ["a@x@0", "a@x@1"]


def test_numbers_in_names_sort_as_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        (tmp_path / f"zone{number}").mkdir()
    assert [path.name for path in sysfs.list_folder(tmp_path, "zone*")] == ["zone1", "zone2", "zone10"]


def test_a_file_whose_device_went_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel fails reads of what was open when a device went; the one that comes back is another file."""
    path = tmp_path / "temp"
    path.write_text("41000\n")
    kept = sysfs.KeptFile(path)
    assert kept.load() == b"41000\n"
    path.unlink()
    with monkeypatch.context() as gone:

        def fail(*_: object) -> bytes:
            raise OSError(errno.ENODEV, "No such device")

        gone.setattr("outrider.power.sensors.sysfs.os.pread", fail)
        with pytest.raises(OSError, match="No such device"):
            kept.load()
    path.write_text("52000\n")
    assert kept.load() == b"52000\n"
    kept.close()
