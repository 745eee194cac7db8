"""Thermal zones, coolers and clocks: units judged, rubbish refused, only what slows a unit counts as throttling."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from outrider.power.sensors.cpufreq import Cpufreq, IntelThrottle
from outrider.power.sensors.sysfs import load, read_number
from outrider.power.sensors.system import System
from outrider.power.sensors.thermal import Thermal, Trip, unit_of
from tests.boards import CPUS, THERMAL, coolers, devfreq, intel_laptop, orin_nano, policy, zones
from tests.sysfs import Board, board_fixture, only, reasons, values  # noqa: F401

ZONE = f"{THERMAL}/thermal_zone0"


def temperatures(board: Board, sensor: Thermal, *raws: int | str) -> list[float | None]:
    result = []
    for raw in raws:
        board.add({f"{ZONE}/temp": raw})
        result.append(next(r.value for r in sensor.read() if r.quantity == "temperature"))
    return result


@pytest.mark.parametrize("raw", [48_500, 485])
def test_milli_degrees_and_tenths_are_told_apart(board: Board, raw: int) -> None:
    board.add(zones({"cpu-0": raw}))
    assert values(only(Thermal.find(board.system)).read(), "temperature") == pytest.approx(
        {"thermal:cpu-0": 48.5}
    )


def test_whole_degrees_are_taken_as_such(board: Board) -> None:
    board.add(zones({"skin": 39}))
    assert values(only(Thermal.find(board.system)).read(), "temperature") == {"thermal:skin": 39.0}


def test_a_zone_in_tenths_stays_in_tenths_at_100_degrees(board: Board) -> None:
    board.add(zones({"cpu": 800}))
    sensor = only(Thermal.find(board.system))
    assert temperatures(board, sensor, 800, 980, 1000, 1020) == pytest.approx([80.0, 80.0, 98.0, 100.0])


def test_a_zone_in_milli_degrees_stays_so_near_freezing(board: Board) -> None:
    board.add(zones({"cpu": 2000}))
    sensor = only(Thermal.find(board.system))
    assert temperatures(board, sensor, 2000, 900, -500, -1500) == pytest.approx([2.0, 0.9, 0.9, -0.5])


def test_a_unit_that_has_become_impossible_is_judged_again(board: Board) -> None:
    board.add(zones({"cpu": 60}))
    sensor = only(Thermal.find(board.system))
    assert temperatures(board, sensor, 60, 45_000, 45_000)[-1] == 45.0


@pytest.mark.parametrize("raw", [0, -650_788_984, -256_000, -32_768_000, 200_000, 1_000_000, 2_147_483_647])
def test_sentinels_are_no_temperature(board: Board, raw: int) -> None:
    board.add(zones({"cpu": raw}))
    assert (
        "off or not connected"
        in reasons(only(Thermal.find(board.system)).read(), "temperature")["thermal:cpu"]
    )
    assert unit_of(raw) is None


def test_a_zone_that_goes_to_0_was_switched_off(board: Board) -> None:
    board.add(zones({"cpu": 50_000}))
    assert temperatures(board, only(Thermal.find(board.system)), 50_000, 0, 50_000) == [50.0, None, 50.0]


@pytest.mark.parametrize("raw", [-650_788_984, 85_000, 1000])
def test_one_spike_does_not_get_through(board: Board, raw: int) -> None:
    board.add(zones({"cpu-thermal": 50_000}))
    sensor = only(Thermal.find(board.system))
    told = temperatures(board, sensor, 50_000, 50_100, raw, 50_200, 50_300)
    assert all(value is None or 50.0 <= value <= 50.3 for value in told)


def test_a_spike_in_the_second_sample_does_not_get_through(board: Board) -> None:
    board.add(zones({"cpu-thermal": 50_000}))
    assert temperatures(board, only(Thermal.find(board.system)), 50_000, 85_000, 50_100) == [50.0, 50.0, 50.1]


def test_a_real_rise_is_told_one_sample_later(board: Board) -> None:
    board.add(zones({"cpu-thermal": 50_000}))
    sensor = only(Thermal.find(board.system))
    assert temperatures(board, sensor, 50_000, 50_000, 70_000, 70_000)[-1] == 70.0


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EIO, errno.EACCES, errno.ENODATA])
def test_a_zone_that_cannot_be_read_does_not_stop_the_others(board: Board, error: int) -> None:
    board.add(zones({"cpu-thermal": 48_000, "cv0-thermal": 0}))
    board.break_file(f"{THERMAL}/thermal_zone1/temp", error)
    readings = only(Thermal.find(board.system)).read()
    assert values(readings, "temperature") == {"thermal:cpu-thermal": 48.0}
    assert "thermal_zone1/temp" in reasons(readings, "temperature")["thermal:cv0-thermal"]


def test_a_powered_down_zone_says_so(board: Board) -> None:
    board.add(zones({"cv0-thermal": 1}))
    board.break_file(f"{ZONE}/temp", errno.EAGAIN)
    assert (
        "powered down"
        in reasons(only(Thermal.find(board.system)).read(), "temperature")["thermal:cv0-thermal"]
    )


def test_a_zone_that_vanishes_gives_a_reason(board: Board) -> None:
    board.add(zones({"cpu": 50_000}))
    sensor = only(Thermal.find(board.system))
    board.remove(f"{ZONE}/temp")
    assert "is gone" in reasons(sensor.read(), "temperature")["thermal:cpu"]


def test_zones_are_found_by_name_where_listing_is_denied(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.add(zones({"cpu-0-0": 50_000, "skin-therm": 37_000}))
    monkeypatch.setattr("outrider.power.sensors.thermal.list_folder", lambda folder, pattern="*": [])
    found = values(only(Thermal.find(board.system)).read(), "temperature")
    assert found == {"thermal:cpu-0-0": 50.0, "thermal:skin-therm": 37.0}


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("cpu-thermal", "die"), ("x86_pkg_temp", "die"), ("tj-thermal", "die"), ("BIG", "die"), ("G3D", "die"),
        ("cpuss-0-usr", "die"), ("gpuss-1", "die"), ("VIRTUAL-SKIN", "skin"), ("skin-therm", "skin"),
        ("battery", "battery"), ("PMIC-Die", "device"), ("Tboard_tegra", "device"), ("acpitz", "device"),
        ("usb-therm", "device"), ("wlan", "device"), ("charger_therm0", "device"),
    ],
)  # fmt: skip
def test_a_zones_scope_follows_its_name(board: Board, name: str, scope: str) -> None:
    board.add(zones({name: 40_000}))
    assert [r.scope for r in only(Thermal.find(board.system)).read()] == [scope]


def test_zones_of_one_name_stay_apart(board: Board) -> None:
    board.add(zones({"acpitz": 30_000}))
    board.add({f"{THERMAL}/thermal_zone10/type": "acpitz", f"{THERMAL}/thermal_zone10/temp": 31_000})
    board.add({f"{THERMAL}/thermal_zone2/type": "acpitz", f"{THERMAL}/thermal_zone2/temp": 32_000})
    assert values(only(Thermal.find(board.system)).read(), "temperature") == {
        "thermal:acpitz@0": 30.0, "thermal:acpitz@1": 32.0, "thermal:acpitz@2": 31.0,
    }  # fmt: skip


def test_trip_points_leave_out_the_rubbish_of_drivers(board: Board) -> None:
    board.add(orin_nano())
    for number, (kind, temp) in enumerate([("critical", -32_768_000), ("active", 0), ("hot", 104_000)], 1):
        board.add({f"{ZONE}/trip_point_{number}_type": kind, f"{ZONE}/trip_point_{number}_temp": temp})
    trips = only(Thermal.find(board.system)).trips()
    assert trips == {"thermal:cpu-thermal": [Trip("passive", 99.0), Trip("hot", 104.0)]}


def test_a_cooler_of_a_compute_unit_is_throttling_and_a_fan_is_not(board: Board) -> None:
    states = {"thermal-cpufreq-0": (3, 12), "thermal-devfreq-0": (0, 5), "Processor": (1, 3), "pwm-fan": (3, 4),
              "Fan": (1, 1), "LCD": (2, 9), "iwlwifi": (1, 9), "hot-surface-alert": (1, 1),
              "cpu-throttle-alert": (1, 2), "intel_powerclamp": (-1, 50)}  # fmt: skip
    board.add(coolers(states))
    assert values(only(Thermal.find(board.system)).read(), "throttle") == pytest.approx(
        {"cooling:thermal-cpufreq-0": 0.25, "cooling:thermal-devfreq-0": 0.0, "cooling:Processor": 1 / 3,
         "cooling:cpu-throttle-alert": 0.5, "cooling:intel_powerclamp": 0.0}
    )  # fmt: skip


def test_a_cooler_without_states_or_unreadable_has_a_reason(board: Board) -> None:
    board.add(coolers({"cpufreq-cpu0": (0, 0), "cpufreq-cpu4": (1, 4)}))
    board.break_file(f"{THERMAL}/cooling_device1/cur_state", errno.EIO)
    assert set(reasons(only(Thermal.find(board.system)).read(), "throttle")) == {
        "cooling:cpufreq-cpu0", "cooling:cpufreq-cpu4",
    }  # fmt: skip


def test_a_cooler_s_highest_state_is_kept_until_it_cannot_be_right(board: Board) -> None:
    board.add(coolers({"cpufreq-cpu0": (1, 4)}))
    sensor, cooler = only(Thermal.find(board.system)), f"{THERMAL}/cooling_device0"
    shares = []
    for state, most in ((1, 4), (2, 4), (6, 8), (8, 8)):  # the driver was loaded again with more states
        board.add({f"{cooler}/cur_state": state, f"{cooler}/max_state": most})
        shares += values(sensor.read(), "throttle").values()
    assert shares == [0.25, 0.5, 0.75, 1.0]
    board.add({f"{cooler}/cur_state": 9, f"{cooler}/max_state": 0})
    assert reasons(sensor.read(), "throttle") == {"cooling:cpufreq-cpu0": "has no states"}


def test_clocks_are_in_hertz_and_a_thermal_cap_shows_in_the_limit(board: Board) -> None:
    board.add(policy(0, 600_000, 1_900_000, 2_400_000))
    readings = only(Cpufreq.find(board.system)).read()
    assert {r.quantity: r.value for r in readings} == {"clock": 6e8, "clock_limit": 1.9e9, "clock_max": 2.4e9}
    assert {r.source for r in readings} == {"cpufreq:policy0"}


def test_the_hardwares_own_clock_comes_before_the_requested_one(board: Board) -> None:
    board.add(
        policy(0, 2_400_000, 2_400_000, 2_400_000) | {f"{CPUS}/cpufreq/policy0/cpuinfo_cur_freq": 1_000_000}
    )
    assert values(only(Cpufreq.find(board.system)).read(), "clock") == {"cpufreq:policy0": 1e9}
    board.break_file(f"{CPUS}/cpufreq/policy0/cpuinfo_cur_freq", errno.EACCES)
    assert values(only(Cpufreq.find(board.system)).read(), "clock") == {"cpufreq:policy0": 2.4e9}


def test_a_clock_whose_file_is_another_after_a_failure_is_found_again(board: Board) -> None:
    board.add(policy(0, 2_400_000, 2_400_000, 2_400_000))
    sensor, asked = only(Cpufreq.find(board.system)), f"{CPUS}/cpufreq/policy0/scaling_cur_freq"
    assert values(sensor.read(), "clock") == {"cpufreq:policy0": 2.4e9}
    board.add({asked: "<unknown>"})
    assert values(sensor.read(), "clock") == {}
    board.add({f"{CPUS}/cpufreq/policy0/cpuinfo_cur_freq": 1_000_000})
    assert values(sensor.read(), "clock") == {"cpufreq:policy0": 1e9}


@pytest.mark.parametrize(
    "text", ["41000", "41000\n", "4\n" * 10, "x" * 63 + "\n", "y" * 64 + "\n", "z\n" * 90_000]
)
def test_a_small_file_is_read_whole(tmp_path: Path, text: str) -> None:
    path = tmp_path / "temp"
    path.write_text(text)
    assert load(path) == text.encode()


def test_a_policy_without_some_of_its_files_gives_the_others(board: Board) -> None:
    board.add(
        {
            f"{CPUS}/cpufreq/policy4/scaling_max_freq": 1_000_000,
            f"{CPUS}/cpufreq/policy4/scaling_cur_freq": "<unknown>",
        }
    )
    readings = only(Cpufreq.find(board.system)).read()
    assert values(readings, "clock_limit") == {"cpufreq:policy4": 1e9}
    assert "no number" in reasons(readings, "clock")["cpufreq:policy4"]
    assert "is gone" in reasons(readings, "clock_max")["cpufreq:policy4"]


def test_old_kernels_show_clocks_by_cpu(board: Board) -> None:
    board.add({f"{CPUS}/cpu3/cpufreq/scaling_cur_freq": 1_000_000})
    assert values(only(Cpufreq.find(board.system)).read(), "clock") == {"cpufreq:cpu3": 1e9}


def test_gpus_show_clocks_and_votes_for_bandwidth_are_no_clocks(board: Board) -> None:
    board.add(devfreq("17000000.gpu", 306_000_000, 510_000_000, "306000000 624750000"))
    board.add(
        devfreq("soc:qcom,gpubw", 762, 7980, "762 7980")
        | devfreq("soc:qcom,cpu0-cpu-l3-lat", 300, 400, "300")
    )
    readings = only(Cpufreq.find(board.system)).read()
    assert {r.quantity: r.value for r in readings} == {
        "clock": 3.06e8,
        "clock_limit": 5.1e8,
        "clock_max": 6.2475e8,
    }


def test_a_gpu_that_is_off_has_no_clock(board: Board) -> None:
    board.add(devfreq("gpu-gpc-0", 0, 510_000_000, ""))
    readings = only(Cpufreq.find(board.system)).read()
    assert "the unit is off" in reasons(readings, "clock")["devfreq:gpu-gpc-0"]
    assert "lists no frequency" in reasons(readings, "clock_max")["devfreq:gpu-gpc-0"]


def throttle_ms(board: Board, cpu: int, kind: str, ms: int) -> None:
    board.add({f"{CPUS}/cpu{cpu}/thermal_throttle/{kind}_throttle_total_time_ms": ms})


def test_intels_throttled_time_is_a_share_of_the_time_since_the_last_read(board: Board) -> None:
    board.add(intel_laptop())
    sensor = only(IntelThrottle.find(board.system))
    board.clock.advance(2.0)
    throttle_ms(board, 1, "core", 120 + 500)
    assert values(sensor.read(), "throttle") == {"throttle:core": 0.25, "throttle:package": 0.0}
    board.clock.advance(1.0)
    assert values(sensor.read(), "throttle") == {"throttle:core": 0.0, "throttle:package": 0.0}


def test_intels_counts_serve_where_the_kernel_has_no_times(board: Board) -> None:
    board.add({f"{CPUS}/cpu0/thermal_throttle/core_throttle_count": 7})
    sensor = only(IntelThrottle.find(board.system))
    assert values(sensor.read(), "throttle") == {"throttle:core": 0.0}
    board.add({f"{CPUS}/cpu0/thermal_throttle/core_throttle_count": 9})
    assert values(sensor.read(), "throttle") == {"throttle:core": 1.0}


def test_counts_that_start_again_are_no_throttling(board: Board) -> None:
    board.add({f"{CPUS}/cpu0/thermal_throttle/core_throttle_count": 7})
    sensor = only(IntelThrottle.find(board.system))
    board.add({f"{CPUS}/cpu0/thermal_throttle/core_throttle_count": 0})
    assert "started again" in reasons(sensor.read(), "throttle")["throttle:core"]
    board.remove(f"{CPUS}/cpu0/thermal_throttle/core_throttle_count")
    assert "is gone" in reasons(sensor.read(), "throttle")["throttle:core"]


def test_a_file_without_end_is_a_reason_and_does_not_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / "temp").symlink_to("/dev/zero")
    value, reason = read_number(System(root=tmp_path), tmp_path / "temp")
    assert value is None
    assert "/temp cannot be read: File too large" in reason
