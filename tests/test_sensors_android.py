"""Two phones of different vendors, on themselves and through adb; each vendor's oddity gives a reason, not a figure."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.contracts import Reading
from outrider.power.monitor import Monitor, distill
from outrider.power.sensors import discover
from outrider.power.sensors.adb import AdbPhone, parse_files
from outrider.power.sensors.android import Kgsl, ThermalService, is_android, parse_thermalservice
from outrider.power.sensors.system import CommandResult, System
from tests.sysfs import Board, board_fixture, only, reasons, values  # noqa: F401

THERMAL = "/sys/class/thermal"
BATTERY = "/sys/class/power_supply/battery"
POLICY = "/sys/devices/system/cpu/cpufreq"
KGSL = "/sys/class/kgsl/kgsl-3d0"
MEMINFO = "MemTotal:       11611124 kB\nMemFree:          302948 kB\nMemAvailable:    4096000 kB"


def zones(table: dict[str, int | str]) -> dict[str, str | int]:
    tree: dict[str, str | int] = {}
    for number, (name, temp) in enumerate(table.items()):
        tree |= {f"{THERMAL}/thermal_zone{number}/type": name, f"{THERMAL}/thermal_zone{number}/temp": temp}
    return tree


def battery(current: int, status: str = "Discharging", volts: int = 3_900_000) -> dict[str, str | int]:
    return {
        f"{BATTERY}/type": "Battery",
        f"{BATTERY}/status": status,
        f"{BATTERY}/capacity": 71,
        f"{BATTERY}/current_now": current,
        f"{BATTERY}/voltage_now": volts,
        f"{BATTERY}/temp": 347,
    }


SNAPDRAGON = {
    **zones(
        {
            "aoss-0": 41800,
            "cpu-0-0-0": 52300,
            "cpuss-0": 51900,
            "gpuss-0": 47600,
            "nsphvx-0": 44900,
            "mdmss-0": 61000,
            "pm8550_tz": 63000,
            "skin-msm-therm": 38700,
            "battery": 34700,
            "soc": 71,
            "ibat-high": 1450,
            "vbat": 3900,
        }
    ),
    f"{THERMAL}/cooling_device0/type": "cpufreq-cpu0",
    f"{THERMAL}/cooling_device0/cur_state": 3,
    f"{THERMAL}/cooling_device0/max_state": 12,
    f"{THERMAL}/cooling_device1/type": "panel0-backlight",
    f"{THERMAL}/cooling_device1/cur_state": 200,
    f"{THERMAL}/cooling_device1/max_state": 255,
    f"{POLICY}/policy7/scaling_cur_freq": 2_400_000,
    f"{POLICY}/policy7/scaling_max_freq": 2_640_000,
    f"{POLICY}/policy7/cpuinfo_max_freq": 3_300_000,
    f"{KGSL}/gpuclk": 578_000_000,
    f"{KGSL}/max_gpuclk": 770_000_000,
    f"{KGSL}/gpu_available_frequencies": "903000000 770000000 578000000 231000000",
    f"{KGSL}/temp": 47_800,
    f"{KGSL}/gpu_busy_percentage": "83 %",
    **battery(812_500),  # µA, and positive while it discharges
    "/proc/meminfo": MEMINFO,
    "/system/build.prop": "ro.product.system.brand=qti",
}

EXYNOS = {
    **zones({"BIG": 58, "MID": 55, "LITTLE": 49, "G3D": 52, "NPU": 46, "battery": 347, "ac": 0}),
    f"{THERMAL}/cooling_device0/type": "thermal-cpufreq-0",
    f"{THERMAL}/cooling_device0/cur_state": 0,
    f"{THERMAL}/cooling_device0/max_state": 10,
    **battery(-930),  # mA
    "/proc/meminfo": MEMINFO,
    "/system/build.prop": "ro.product.system.brand=samsung",
}


def dump(
    status: int = 0,
    cached: Sequence[str] = (),
    current: Sequence[str] = (),
    thresholds: Sequence[str] = (),
    ready: str = "true",
) -> str:
    lines = ["IsStatusOverride: false", "ThermalEventListeners:", "\tcallbacks: 3", "\tkilled: false"]
    lines += [f"Thermal Status: {status}", "Cached temperatures:", *(f"\t{item}" for item in cached)]
    lines += [f"HAL Ready: {ready}"]
    if ready == "true":
        lines += ["HAL connection:", "\tThermal HAL AIDL 1 connected: yes"]
        lines += ["Current temperatures from HAL:", *(f"\t{item}" for item in current)]
        lines += [
            "Current cooling devices from HAL:",
            "\tCoolingDevice{mValue=1, mType=2, mName=cpufreq-cpu0}",
        ]
        lines += ["Temperature static thresholds from HAL:", *(f"\t{item}" for item in thresholds)]
    return "\n".join(lines) + "\n"


def temperature(value: float | str, kind: int, name: str, status: int = 0) -> str:
    return f"Temperature{{mValue={value}, mType={kind}, mName={name}, mStatus={status}}}"


def threshold(kind: int, name: str, levels: str) -> str:
    return (
        f"TemperatureThreshold{{mType={kind}, mName={name}, mHotThrottlingThresholds=[{levels}],"
        " mColdThrottlingThresholds=[NaN, NaN, NaN, NaN, NaN, NaN, NaN]}"
    )


PIXEL_LEVELS = "NaN, 39.0, 43.0, 45.0, 46.5, 52.0, 55.0"
PIXEL = dump(
    cached=[temperature(48.5, 3, "VIRTUAL-SKIN")],
    current=[
        temperature(63.2, 0, "BIG"),
        temperature(51.0, 1, "G3D"),
        temperature(49.0, 10, "TPU"),
        temperature(42.0, 3, "VIRTUAL-SKIN"),
        temperature(33.9, 2, "battery"),
        temperature(66.0, 8, "soc"),
        temperature(3.9, 6, "vbat"),
    ],
    thresholds=[
        threshold(3, "VIRTUAL-SKIN", PIXEL_LEVELS),
        threshold(0, "BIG", "NaN, NaN, NaN, 95.0, 100.0"),
    ],
)
SAMSUNG = dump(
    current=[
        temperature(44.0, 1, "TYPE_CPU"),  # its types count from 1
        temperature(34.4, 3, "TYPE_BATTERY"),
        temperature(35.3, 4, "TYPE_SKIN"),
        temperature(34.2, 5, "TYPE_USB_PORT"),
        temperature(-99.9, 6, "TYPE_POWER_AMPLIFIER"),
    ]
)


def service(board: Board, text: str | CommandResult) -> list[Reading]:
    board.answers["dumpsys thermalservice"] = text
    board.add({"/system/build.prop": "x"})
    return only(ThermalService.find(board.system)).read()


# The thermal service


def test_temperatures_get_the_scope_of_what_they_watch(board: Board) -> None:
    readings = service(board, PIXEL)
    scopes = {r.source: r.scope for r in readings if r.quantity == "temperature"}
    assert scopes == {
        "thermalservice:BIG": "die",
        "thermalservice:G3D": "die",
        "thermalservice:TPU": "die",
        "thermalservice:VIRTUAL-SKIN": "skin",
        "thermalservice:battery": "battery",
    }


def test_charge_voltage_and_current_limits_are_no_temperatures() -> None:
    """BCL sensors come as `Temperature` too: 66 is a percentage, 3.9 a voltage."""
    assert not {"soc", "vbat"} & set(parse_thermalservice(PIXEL).temperatures)


def test_cached_temperatures_do_not_count() -> None:
    assert parse_thermalservice(PIXEL).temperatures["VIRTUAL-SKIN"] == (42.0, "skin")
    only_cached = dump(cached=[temperature(48.5, 3, "VIRTUAL-SKIN")])
    assert parse_thermalservice(only_cached).temperatures == {}


def test_headroom_is_one_at_the_skins_severe_threshold_and_zero_30_degrees_below(board: Board) -> None:
    headroom = values(service(board, PIXEL), "headroom")
    assert headroom == {"thermalservice:VIRTUAL-SKIN": pytest.approx(1 - 3 / 30)}
    for celsius, expected in ((45.0, 1.0), (48.0, 1.1), (15.0, 0.0), (5.0, 0.0)):
        text = PIXEL.replace("mValue=42.0, mType=3", f"mValue={celsius}, mType=3")
        assert values(service(board, text), "headroom") == {
            "thermalservice:VIRTUAL-SKIN": pytest.approx(expected)
        }


@pytest.mark.parametrize("levels", ["NaN, 39.0, 43.0, NaN, 46.5, NaN, NaN", "NaN, 39.0", "", "x, y, z, w"])
def test_without_a_severe_threshold_there_is_no_headroom_of_the_skin(board: Board, levels: str) -> None:
    readings = service(board, PIXEL.replace(PIXEL_LEVELS, levels))
    assert values(readings, "headroom") == {}
    assert values(readings, "temperature")["thermalservice:VIRTUAL-SKIN"] == 42.0


def test_vendors_that_count_types_from_one_are_read_by_name(board: Board) -> None:
    readings = service(board, SAMSUNG)
    scopes = {r.source: r.scope for r in readings if r.value is not None and r.quantity == "temperature"}
    assert scopes["thermalservice:TYPE_CPU"] == "die"
    assert scopes["thermalservice:TYPE_BATTERY"] == "battery"
    assert scopes["thermalservice:TYPE_SKIN"] == "skin"
    state = distill(readings, readings[0].time_s)
    assert (state.die_c, state.skin_c) == (44.0, 35.3)


@pytest.mark.parametrize("value", ["NaN", "-99.9", "0.0", "125.0", "32767"])
def test_sentinels_of_the_hal_are_no_temperature(board: Board, value: str) -> None:
    text = dump(current=[temperature(value, 3, "SKIN")], thresholds=[threshold(3, "SKIN", PIXEL_LEVELS)])
    readings = service(board, text)
    assert values(readings, "temperature") == {}
    assert values(readings, "headroom") == {}
    assert "no temperature" in reasons(readings, "temperature")["thermalservice:SKIN"]


def test_status_none_proves_nothing(board: Board) -> None:
    """Phones throttled for 91 minutes at status 0."""
    readings = service(board, dump(0))
    assert values(readings, "headroom") == {}
    assert "proves nothing" in reasons(readings, "headroom")["thermalservice:status"]


def test_the_status_can_raise_headroom_and_never_lower_it(board: Board) -> None:
    bounds = [values(service(board, dump(n)), "headroom")["thermalservice:status"] for n in range(1, 7)]
    assert bounds == sorted(bounds)
    assert bounds[2] == 1.0
    cold = PIXEL.replace("mValue=42.0", "mValue=25.0").replace("Status: 0", "Status: 3")
    hot = PIXEL.replace("mValue=42.0", "mValue=46.5").replace("Status: 0", "Status: 1")
    for text, expected in ((cold, 1.0), (hot, 1.05)):
        readings = service(board, text)
        assert distill(readings, readings[0].time_s).headroom == pytest.approx(expected)


def test_a_status_that_does_not_exist_is_no_bound(board: Board) -> None:
    assert "known: 0 to 6" in reasons(service(board, dump(7)), "headroom")["thermalservice:status"]


def test_a_hal_that_is_not_ready_is_unsupported_not_a_format_error(board: Board) -> None:
    reason = reasons(service(board, dump(ready="false")), "headroom")["thermalservice:status"]
    assert "not ready" in reason
    assert "format" not in reason


def test_another_format_is_a_format_error_that_shows_what_came(board: Board) -> None:
    reason = reasons(service(board, "Thermals: fine\n"), "headroom")["thermalservice:status"]
    assert "format not known" in reason
    assert "Thermals: fine" in reason


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        ("Permission Denial: can't dump thermalservice from pid=1, uid=10234\n", "pm grant"),
        ("Can't find service: thermalservice\n", "Android 10"),
        (CommandResult(None, b"", "dumpsys is not installed"), "through adb"),
        (CommandResult(1, b"", "cmd: Failure"), "cmd: Failure"),
    ],
)
def test_a_service_that_cannot_be_read_says_what_to_do(
    board: Board, answer: str | CommandResult, fix: str
) -> None:
    readings = service(board, answer)
    assert len(readings) == 1
    assert fix in readings[0].reason


# Phones on themselves


def test_android_is_told_from_linux(board: Board) -> None:
    assert not is_android(board.system)
    assert ThermalService.find(board.system) == []
    board.add({"/system/build.prop": "x"})
    assert is_android(board.system)


def test_a_snapdragon_phone_as_a_whole(board: Board) -> None:
    board.add(SNAPDRAGON)
    board.answers["dumpsys thermalservice"] = dump(0)
    monitor = Monitor(discover(board.system), board.clock)
    for _ in range(40):
        state = monitor.poll()
        board.clock.advance(0.5)
    assert state.die_c == 52.3, "neither the modem's 61, nor the power chip's 63, nor the charge of 71 %"
    assert state.skin_c == 38.7
    assert state.throttle == 0.25, "of the CPU's cooler; the display's is none"
    assert state.clock_ratio == pytest.approx(0.8)
    assert (state.power_w, state.power_scope) == (pytest.approx(0.8125 * 3.9), "battery")
    assert state.charging is False
    assert state.memory_available_mb == pytest.approx(4096000 * 1.024 / 1e3)


def test_an_exynos_phone_in_degrees_and_milliamperes(board: Board) -> None:
    board.add(EXYNOS)
    board.answers["dumpsys thermalservice"] = SAMSUNG
    monitor = Monitor(discover(board.system), board.clock)
    for _ in range(40):
        state = monitor.poll()
        board.clock.advance(0.5)
    assert state.die_c == 58
    assert state.skin_c == 35.3
    assert state.throttle == 0.0
    assert state.power_w == pytest.approx(0.93 * 3.9)


def test_the_gpu_clock_its_cap_and_its_design(board: Board) -> None:
    board.add(SNAPDRAGON)
    readings = only(Kgsl.find(board.system)).read()
    assert values(readings, "clock") == {"kgsl:gpu": 578e6}
    assert values(readings, "clock_limit") == {"kgsl:gpu": 770e6}
    assert values(readings, "clock_max") == {"kgsl:gpu": 903e6}
    assert values(readings, "temperature") == {"kgsl:gpu": pytest.approx(47.8)}


def test_a_gpu_that_selinux_hides_gives_reasons(board: Board) -> None:
    board.add(SNAPDRAGON)
    sensor = only(Kgsl.find(board.system))
    for name in ("gpuclk", "max_gpuclk", "temp"):
        board.break_file(f"{KGSL}/{name}", errno.EACCES)
    board.remove(f"{KGSL}/gpu_available_frequencies")
    readings = sensor.read()
    assert [r.value for r in readings] == [None] * 4
    assert "permission denied" in readings[0].reason


# Phones through adb


TOYBOX = """\
/sys/class/thermal/thermal_zone0/type:cpu-0-0
/sys/class/thermal/thermal_zone0/temp:52300\r
grep: /sys/class/thermal/thermal_zone1/temp: Permission denied
/sys/class/devfreq/soc:qcom,l3-cdsp/cur_freq:1459200000
/proc/meminfo:MemTotal:       11611124 kB
/proc/meminfo:MemAvailable:    4096000 kB
grep: /sys/class/kgsl/kgsl-3d0/gpuclk: No such file or directory
"""


def test_files_come_apart_again_even_where_a_device_has_a_colon_in_its_name() -> None:
    assert parse_files(TOYBOX) == {
        "/sys/class/thermal/thermal_zone0/type": "cpu-0-0\n",
        "/sys/class/thermal/thermal_zone0/temp": "52300\n",
        "/sys/class/thermal/thermal_zone1/temp": "Permission denied\n",
        "/sys/class/devfreq/soc:qcom,l3-cdsp/cur_freq": "1459200000\n",
        "/proc/meminfo": "MemTotal:       11611124 kB\nMemAvailable:    4096000 kB\n",
    }


class Phone(Board):
    """A phone on a cable: `adb shell` runs the real `grep` over the tree, and the board's answers."""

    connected = True

    def shell(self, command: Sequence[str], timeout_s: float) -> CommandResult:
        self.commands.append(list(command))
        if command[0] != "adb":
            return CommandResult(None, b"", f"{command[0]} is not installed")
        if not self.connected:
            return CommandResult(1, b"", "adb: no devices/emulators found")
        words = list(command[command.index("shell") + 1 :])
        if not words[0].startswith("grep"):
            return self._run(words[0].split(), timeout_s)
        there = words[0].replace(" /", f" {self.root}/")
        done = subprocess.run(["sh", "-c", there], capture_output=True, check=False)
        return CommandResult(done.returncode, done.stdout.replace(str(self.root).encode(), b""))


@pytest.fixture
def phone(tmp_path: Path) -> Phone:
    return Phone(tmp_path)


def host(phone: Phone) -> System:
    return System(Path("/"), phone.clock, phone.shell, "linux")


def test_a_phone_through_adb_is_seen_as_it_sees_itself(phone: Phone) -> None:
    phone.add(SNAPDRAGON)
    phone.answers["dumpsys thermalservice"] = PIXEL
    local = Monitor(discover(phone.system), phone.clock)
    distant = Monitor([AdbPhone("0A1B2C", host(phone))], phone.clock)
    for _ in range(20):
        seen, expected = distant.poll(), local.poll()
        phone.clock.advance(1.0)
    distant.stop()
    assert seen == expected
    assert seen.die_c == 63.2
    assert all(
        command[:4] == ["adb", "-s", "0A1B2C", "shell"] for command in phone.commands if command[0] == "adb"
    )


def test_the_host_is_never_taken_for_the_phone(phone: Phone) -> None:
    """The phone hides its memory; the host has some, which must not be told."""
    phone.add(zones({"cpu-0-0": 52300}))
    sensor = AdbPhone(None, host(phone))
    readings = sensor.read()
    sensor.close()
    assert values(readings, "temperature") == {"thermal:cpu-0-0": 52.3}
    assert values(readings, "memory_available") == {}


def test_a_file_that_adb_may_not_read_has_a_reason(phone: Phone) -> None:
    phone.add(zones({"cpu-0-0": 52300, "gpuss-0": 1}))
    phone.remove(f"{THERMAL}/thermal_zone1/temp")
    phone.system.path(f"{THERMAL}/thermal_zone1/temp").mkdir()
    sensor = AdbPhone(None, host(phone))
    readings = sensor.read()
    sensor.close()
    assert "directory" in reasons(readings, "temperature")["thermal:gpuss-0"]


def test_a_phone_that_is_unplugged_gives_its_reason_and_no_old_figures(phone: Phone) -> None:
    phone.add(SNAPDRAGON)
    monitor = Monitor([AdbPhone(None, host(phone))], phone.clock)
    assert monitor.poll().die_c == 52.3
    phone.connected = False
    for _ in range(9):
        phone.clock.advance(1.0)
        state = monitor.poll()
    assert (state.die_c, state.skin_c, state.memory_available_mb) == (None, None, None)
    assert "temperature" in state.stale
    (report,) = [r for r in monitor.readings() if r.source == "adb:phone"]
    assert "plug a phone in" in report.reason
    phone.connected = True
    phone.clock.advance(1.0)
    assert monitor.poll().die_c == 52.3
    monitor.stop()


@pytest.mark.parametrize(
    ("result", "fix"),
    [
        (CommandResult(None, b"", "adb is not installed"), "platform tools"),
        (CommandResult(1, b"", "error: device unauthorized."), "allow USB debugging"),
        (CommandResult(1, b"", "adb: device offline"), "unplug"),
        (CommandResult(1, b"", "adb: more than one device/emulator"), "--adb SERIAL"),
        (CommandResult(1, b"", "adb: device 'X' not found"), "adb devices"),
        (CommandResult(None, b"", "adb did not answer within 4 s"), "within 4 s"),
        (CommandResult(0, b"", ""), "said nothing"),
    ],
)
def test_adbs_complaints_come_with_what_to_do(phone: Phone, result: CommandResult, fix: str) -> None:
    sensor = AdbPhone("X", System(Path("/"), phone.clock, lambda command, timeout: result, "linux"))
    (reading,) = sensor.read()
    sensor.close()
    assert reading.value is None
    assert fix in reading.reason


def test_a_reader_that_fails_on_the_copy_stops_no_other(
    phone: Phone, monkeypatch: pytest.MonkeyPatch
) -> None:
    phone.add(SNAPDRAGON)
    monkeypatch.setattr(Kgsl, "read", lambda self: 1 / 0)
    sensor = AdbPhone(None, host(phone))
    readings = sensor.read()
    sensor.close()
    assert values(readings, "temperature")["thermal:cpu-0-0-0"] == 52.3
    assert "ZeroDivisionError" in reasons(readings, "power")["adb:kgsl"]


def test_a_file_that_vanishes_on_the_phone_vanishes_from_the_copy(phone: Phone) -> None:
    phone.add(zones({"cpu-0-0": 52300, "gpuss-0": 47000}))
    sensor = AdbPhone(None, host(phone))
    assert len(values(sensor.read(), "temperature")) == 2
    phone.remove(f"{THERMAL}/thermal_zone1/temp")
    phone.clock.advance(1.0)
    readings = sensor.read()
    sensor.close()
    assert values(readings, "temperature") == {"thermal:cpu-0-0": 52.3}
    assert "gone" in reasons(readings, "temperature")["thermal:gpuss-0"]
