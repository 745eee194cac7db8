"""INA monitors and tegrastats: rails in watts, and a total only where the board is known to have one."""

from __future__ import annotations

import errno

import pytest

from outrider.power.sensors.ina import Ina, board_total
from outrider.power.sensors.system import CommandResult
from outrider.power.sensors.tegrastats import Tegrastats, parse_tegrastats
from tests.boards import ina3221, nano_jetpack4, thor
from tests.sysfs import Board, board_fixture, only, reasons, values  # noqa: F401

ORIN_NANO = {"VDD_IN": (5040, 968), "VDD_CPU_GPU_CV": (5032, 160), "VDD_SOC": (5032, 288)}
AGX = {"VDD_GPU_SOC": (19_000, 200), "VDD_CPU_CV": (19_000, 100), "VIN_SYS_5V0": (5000, 900)}
AGX_SECOND = {"NC": (0, 0), "VDDQ_VDD2_1V8AO": (5000, 120)}


@pytest.mark.parametrize("driver", ["ina3221", "ina3221x"])
@pytest.mark.parametrize("inner", ["hwmon/hwmon3", ""])
@pytest.mark.parametrize("in_class", [True, False])
def test_rails_are_found_under_both_driver_names_and_at_both_depths(
    board: Board, driver: str, inner: str, in_class: bool
) -> None:
    board.add(ina3221("1-0040", ORIN_NANO, driver=driver, inner=inner, in_class=in_class))
    power = values(only(Ina.find(board.system)).read(), "power")
    assert power["ina:VDD_IN"] == pytest.approx(5.040 * 0.968)
    assert power["ina:total"] == power["ina:VDD_IN"]
    assert len(power) == 4


def test_power_is_volts_times_amperes_because_the_driver_has_no_power_file(board: Board) -> None:
    board.add(ina3221("1-0040", {"VDD_IN": (5000, 2000)}))
    assert values(only(Ina.find(board.system)).read(), "power")["ina:VDD_IN"] == pytest.approx(10.0)


def test_the_sum_of_shunt_voltages_and_unconnected_channels_are_no_rails(board: Board) -> None:
    board.add(ina3221("1-0041", AGX_SECOND))
    board.break_file("/sys/class/hwmon/hwmon3/in1_input", errno.EIO)
    readings = only(Ina.find(board.system)).read()
    assert {r.source for r in readings if r.scope == "rail"} == {"ina:VDDQ_VDD2_1V8AO"}


def test_a_channel_that_fails_gives_its_reason_and_keeps_the_rest(board: Board) -> None:
    board.add(ina3221("1-0040", ORIN_NANO))
    board.break_file("/sys/class/hwmon/hwmon3/curr3_input", errno.EIO)
    readings = only(Ina.find(board.system)).read()
    assert set(values(readings, "power")) == {"ina:VDD_IN", "ina:VDD_CPU_GPU_CV", "ina:total"}
    assert "bus did not answer" in reasons(readings, "power")["ina:VDD_SOC"]


def test_the_total_of_agx_orin_is_the_sum_of_its_rails_without_the_carriers(board: Board) -> None:
    board.add(ina3221("1-0040", AGX, hwmon=3) | ina3221("1-0041", AGX_SECOND, hwmon=4))
    power = values(only(Ina.find(board.system)).read(), "power")
    assert power["ina:total"] == pytest.approx(3.8 + 1.9 + 0.6)
    assert power["ina:VIN_SYS_5V0"] == pytest.approx(4.5)


def test_a_total_with_a_failed_rail_has_no_value(board: Board) -> None:
    board.add(ina3221("1-0040", AGX, hwmon=3) | ina3221("1-0041", AGX_SECOND, hwmon=4))
    board.break_file("/sys/class/hwmon/hwmon4/curr2_input", errno.EIO)
    readings = only(Ina.find(board.system)).read()
    assert "VDDQ_VDD2_1V8AO" in reasons(readings, "power")["ina:total"]


def test_rails_of_an_unknown_board_are_not_added_up(board: Board) -> None:
    board.add(ina3221("1-0040", {"SOLAR": (5000, 100), "LOAD": (5000, 90)}))
    readings = only(Ina.find(board.system)).read()
    assert "not known to make a whole board" in reasons(readings, "power")["ina:total"]
    assert set(values(readings, "power")) == {"ina:SOLAR", "ina:LOAD"}


def test_jetpack_4_gives_milliwatts_through_iio_and_its_input_rail_is_the_total(board: Board) -> None:
    board.add(nano_jetpack4())
    power = values(only(Ina.find(board.system)).read(), "power")
    assert power == pytest.approx(
        {"ina:POM_5V_IN": 2.3, "ina:POM_5V_GPU": 0.08, "ina:POM_5V_CPU": 0.44, "ina:total": 2.3}
    )


def test_thors_ina238_gives_microwatts_and_is_the_total(board: Board) -> None:
    board.add(thor())
    power = values(only(Ina.find(board.system)).read(), "power")
    assert power["ina:VIN"] == pytest.approx(23.0)
    assert power["ina:total"] == power["ina:VIN"]
    assert not any("ucsi" in source for source in power)


def test_an_unlabelled_ina238_of_another_board_is_no_total(board: Board) -> None:
    tree = {name: text for name, text in thor().items() if "device-tree" not in name}
    board.add(tree)
    readings = only(Ina.find(board.system)).read()
    assert "ina:VIN" not in values(readings, "power")
    assert reasons(readings, "power")["ina:total"]


@pytest.mark.parametrize("kind", ["crit", "max"])
def test_an_over_current_alarm_is_throttling_with_cool_silicon(board: Board, kind: str) -> None:
    board.add(ina3221("1-0040", ORIN_NANO))
    alarm = f"/sys/class/hwmon/hwmon3/curr1_{kind}_alarm"
    board.add({alarm: 0})
    sensor = only(Ina.find(board.system))
    assert values(sensor.read(), "throttle") == {f"ina:VDD_IN:{kind}_alarm": 0.0}
    board.add({alarm: 1})
    assert values(sensor.read(), "throttle") == {f"ina:VDD_IN:{kind}_alarm": 1.0}


def test_rails_of_one_name_are_told_apart_by_their_monitors_address(board: Board) -> None:
    board.add(ina3221("1-0040", {"A": (5000, 100)}, hwmon=3) | ina3221("1-0041", {"A": (5000, 200)}, hwmon=4))
    power = values(only(Ina.find(board.system)).read(), "power")
    assert power == pytest.approx({"ina:A@1-0040": 0.5, "ina:A@1-0041": 1.0})


def test_a_monitor_that_vanishes_gives_reasons(board: Board) -> None:
    board.add(ina3221("1-0040", {"VDD_IN": (5000, 100)}))
    sensor = only(Ina.find(board.system))
    board.remove("/sys/class/hwmon/hwmon3/in1_input")
    assert "is gone" in reasons(sensor.read(), "power")["ina:total"]


def test_the_input_rail_wins_over_its_parts() -> None:
    rails = dict.fromkeys(("VDD_GPU_SOC", "VDD_CPU_CV", "VDDQ_VDD2_1V8AO"), (1.0, ""))
    assert board_total(rails) == ((3.0, ""), "VDDQ_VDD2_1V8AO + VDD_CPU_CV + VDD_GPU_SOC")
    assert board_total({**rails, "VDD_IN": (9.0, "")}) == ((9.0, ""), "VDD_IN")
    assert board_total({"VDD_SOC": (1.0, "")}) is None


JETPACK6 = (
    "09-25-2023 14:31:34 RAM 3679/15388MB (lfb 61x4MB) SWAP 0/7694MB (cached 0MB) CPU [2%@729,off,1%@1510,0%@729] "
    "EMC_FREQ 3%@3199 GR3D_FREQ 10%@1300 NVENC off VIC_FREQ 729 APE 174 CV0@-256C CPU@48.5C Tboard@36C SOC2@44.968C "
    "tj@48.5C VDD_IN 4833mW/4900mW VDD_CPU_GPU_CV 482mW/482mW VDD_SOC 1451mW/1451mW"
)
JETPACK7 = (
    "RAM 1/2MB (lfb 1x4MB) CPU [0%@1113] GR3D_FREQ 0%@[1300,1300] cpu@52.968C/52.968C VIN 23000mW/23000mW"
)
JETPACK4 = (
    "RAM 1980/3964MB (lfb 2x2MB) IRAM 0/252kB(lfb 252kB) CPU [12%@1224,6%@1224,off,off] EMC_FREQ 0% GR3D_FREQ 0% "
    "PLL@26C CPU@29.5C PMIC@100C GPU@28C AO@34C thermal@28.75C POM_5V_IN 2000/2100 POM_5V_GPU 0/0 POM_5V_CPU 280/300"
)


def found(line: str, quantity: str) -> dict[str, float]:
    return {token.name: token.value for token in parse_tegrastats(line) if token.quantity == quantity}


def test_a_line_of_jetpack_6_with_a_date_is_read() -> None:
    assert found(JETPACK6, "power") == pytest.approx(
        {"VDD_IN": 4.833, "VDD_CPU_GPU_CV": 0.482, "VDD_SOC": 1.451}
    )
    assert found(JETPACK6, "temperature") == {"CPU": 48.5, "Tboard": 36.0, "SOC2": 44.968, "tj": 48.5}
    assert found(JETPACK6, "clock") == {
        "CPU0": 729e6,
        "CPU2": 1510e6,
        "CPU3": 729e6,
        "EMC": 3199e6,
        "GR3D": 1300e6,
    }


def test_a_sensor_that_is_off_is_not_256_degrees_below_zero() -> None:
    assert "CV0" not in found(JETPACK6, "temperature")


def test_bracketed_gpu_clocks_and_lower_case_sensors_of_jetpack_7_are_read() -> None:
    assert found(JETPACK7, "clock")["GR3D"] == 1300e6
    assert found("GR3D_FREQ 4%@[1000,990,1000] GR3D2_FREQ 0%@76", "clock") == {"GR3D": 1e9, "GR3D2": 76e6}
    assert found(JETPACK7, "temperature") == {"cpu": 52.968}


def test_jetpack_4_powers_come_without_a_unit_and_its_pmic_shows_no_temperature() -> None:
    assert found(JETPACK4, "power") == pytest.approx(
        {"POM_5V_IN": 2.0, "POM_5V_GPU": 0.0, "POM_5V_CPU": 0.28}
    )
    assert "PMIC" not in found(JETPACK4, "temperature")
    assert found(JETPACK4, "clock") == {"CPU0": 1224e6, "CPU1": 1224e6}


@pytest.mark.parametrize(
    "token", ["GR3D_FREQ ?@new", "GR3D_FREQ 0%", "EMC_FREQ", "VDD_X 4W/4W", "CPU [?]", "RAM 1/2MB"]
)
def test_a_token_of_unknown_form_gives_nothing_not_zero(token: str) -> None:
    assert parse_tegrastats(token) == []


def test_one_line_is_asked_of_a_tegrastats_that_is_ended_again(board: Board) -> None:
    board.add({"/usr/bin/tegrastats": ""})
    board.answers["tegrastats"] = CommandResult(124, f"{JETPACK6}\n{JETPACK6[:40]}".encode())
    readings = only(Tegrastats.find(board.system)).read()
    assert values(readings, "power")["tegrastats:total"] == pytest.approx(4.833)
    assert board.commands == [["timeout", "0.6", "/usr/bin/tegrastats", "--interval", "200"]]


def test_a_figure_that_a_later_line_lacks_gets_a_reason(board: Board) -> None:
    board.add({"/usr/bin/tegrastats": ""})
    sensor = only(Tegrastats.find(board.system))
    board.answers["tegrastats"] = "GPU@40C VDD_IN 100mW/100mW\n"
    sensor.read()
    board.answers["tegrastats"] = "GPU@-256C VDD_IN 100mW/100mW\n"
    assert reasons(sensor.read(), "temperature") == {
        "tegrastats:GPU": "tegrastats no longer shows it: the unit is off"
    }


@pytest.mark.parametrize(
    "answer", [CommandResult(None, b"", "timeout is not installed"), CommandResult(1, b"no")]
)
def test_a_tegrastats_that_fails_gives_the_reason(board: Board, answer: CommandResult) -> None:
    board.add({"/usr/bin/tegrastats": ""})
    board.answers["tegrastats"] = answer
    assert (answer.error or "'no'") in reasons(only(Tegrastats.find(board.system)).read(), "power")[
        "tegrastats:total"
    ]


def test_tegrastats_is_only_used_where_sysfs_has_no_monitor(board: Board) -> None:
    board.add({"/usr/bin/tegrastats": ""} | ina3221("1-0040", ORIN_NANO))
    assert Tegrastats.find(board.system) == []
