"""Raspberry Pi: bits that are true now against bits that were once, rails that are not everything, errors on stdout."""

from __future__ import annotations

import pytest

from outrider.power.sensors.raspberrypi import RAILS, PiFirmware, PiPmic, RaspberryPi, parse_pmic
from outrider.power.sensors.system import CommandResult
from tests.boards import PI_ANSWERS, pi4, pi5, pmic
from tests.sysfs import Board, board_fixture, only, reasons, values  # noqa: F401

ALL_RAILS = dict.fromkeys(RAILS, (0.5, 1.0))
THROTTLED = "vcgencmd get_throttled"


@pytest.fixture(name="pi")
def pi_fixture(board: Board) -> Board:
    board.add(pi4())
    board.answers.update(PI_ANSWERS)
    return board


def bits(pi: Board, sensor: PiFirmware, word: int) -> set[str]:
    """What is held back when the firmware shows `word`."""
    pi.answers[THROTTLED] = f"throttled={word:#x}\n"
    held = values(sensor.read(), "throttle")
    assert len(held) == 4
    return {source.partition(":")[2] for source, value in held.items() if value == 1.0}


def test_bits_of_now_are_told(pi: Board) -> None:
    sensor = PiFirmware(pi.system)
    assert bits(pi, sensor, 0x50005) == {"under_voltage", "throttled"}
    assert bits(pi, sensor, 0x5000A) == {"frequency_capped", "soft_temp_limit"}


def test_what_happened_before_the_sensor_began_is_not_told(pi: Board) -> None:
    assert bits(pi, PiFirmware(pi.system), 0x50000) == set()


def test_what_happened_between_two_reads_is_told_once(pi: Board) -> None:
    sensor = PiFirmware(pi.system)  # begins at 0x50000
    assert bits(pi, sensor, 0xD0000) == {"soft_temp_limit"}
    assert bits(pi, sensor, 0xD0000) == set()


def test_sticky_bits_that_someone_cleared_count_again(pi: Board) -> None:
    sensor = PiFirmware(pi.system)
    assert bits(pi, sensor, 0x0) == set()
    assert bits(pi, sensor, 0x40000) == {"throttled"}


def test_the_real_clock_comes_from_the_firmware(pi: Board) -> None:
    readings = PiFirmware(pi.system).read()
    assert values(readings, "clock") == {"raspberrypi:arm": 1500345728.0}
    assert values(readings, "temperature") == {"raspberrypi:soc": 51.1}


@pytest.mark.parametrize(
    "answer",
    [
        "VCHI initialization failed\n",
        "Can't open device file: /dev/vcio\nTry creating a device file with: sudo mknod /dev/vcio c 100 0\n",
    ],
)
def test_an_error_on_standard_output_is_no_answer_and_names_the_group(pi: Board, answer: str) -> None:
    pi.answers = dict.fromkeys(PI_ANSWERS, answer)
    readings = PiFirmware(pi.system).read()
    assert not any(r.value is not None for r in readings)
    assert all("add your user to the group video" in r.reason for r in readings)


def test_a_missing_device_node_is_told_apart_from_a_missing_permission(pi: Board) -> None:
    pi.answers = dict.fromkeys(PI_ANSWERS, "Can't open device file: /dev/vcio\n")
    pi.remove("/dev/vcio")
    assert all("--device /dev/vcio" in r.reason for r in PiFirmware(pi.system).read())


def test_a_missing_vcgencmd_says_how_to_get_it(pi: Board) -> None:
    pi.answers = {}
    assert all("apt install" in r.reason for r in PiFirmware(pi.system).read())


def test_a_command_that_the_firmware_does_not_know_says_so(pi: Board) -> None:
    pi.answers["vcgencmd measure_temp"] = 'error=1 error_msg="Command not registered"\n'
    readings = PiFirmware(pi.system).read()
    assert "does not know it" in reasons(readings, "temperature")["raspberrypi:soc"]
    assert values(readings, "clock")


def test_a_clock_of_zero_is_no_clock(pi: Board) -> None:
    pi.answers["vcgencmd measure_clock arm"] = "frequency(0)=0\n"
    assert reasons(PiFirmware(pi.system).read(), "clock")


@pytest.mark.parametrize("folder", ["soc/soc:firmware", "soc@107c000000/soc@107c000000:firmware"])
def test_sysfs_tells_the_bits_where_vcgencmd_fails(pi: Board, folder: str) -> None:
    pi.answers[THROTTLED] = "VCHI initialization failed\n"
    path = f"/sys/devices/platform/{folder}/get_throttled"
    pi.add({path: "50000"})
    sensor = PiFirmware(pi.system)
    pi.add({path: "50004"})
    assert values(sensor.read(), "throttle")["raspberrypi:throttled"] == 1.0


def test_a_firmware_that_stops_answering_gives_reasons_and_loses_no_event(pi: Board) -> None:
    sensor = PiFirmware(pi.system)
    pi.answers[THROTTLED] = CommandResult(None, b"", "vcgencmd did not answer within 2 s")
    assert "did not answer" in reasons(sensor.read(), "throttle")["raspberrypi:throttled"]
    assert bits(pi, sensor, 0xD0000) == {"soft_temp_limit"}


def test_the_rails_of_a_pi_5_are_added_up_and_say_what_is_not_in_them(pi: Board) -> None:
    pi.answers["vcgencmd pmic_read_adc"] = pmic(ALL_RAILS)
    readings = PiPmic(pi.system).read()
    power = values(readings, "power")
    assert len(power) == 13
    assert power["raspberrypi:pmic"] == pytest.approx(12 * 0.5)
    total = next(r for r in readings if r.source == "raspberrypi:pmic")
    assert total.scope == "module"
    assert "5 V" in total.reason


def test_rails_with_only_a_voltage_are_no_rails() -> None:
    assert set(parse_pmic(pmic(ALL_RAILS))) == set(RAILS)


def test_no_total_when_a_rail_is_missing(pi: Board) -> None:
    text = pmic(ALL_RAILS)
    pi.answers["vcgencmd pmic_read_adc"] = "\n".join(
        line for line in text.splitlines() if "HDMI_V" not in line
    )
    readings = PiPmic(pi.system).read()
    assert "voltage of HDMI" in reasons(readings, "power")["raspberrypi:pmic"]
    assert len(values(readings, "power")) == 11


def test_a_pmic_that_refuses_gives_the_reason(pi: Board) -> None:
    pi.answers["vcgencmd pmic_read_adc"] = "VCHI initialization failed\n"
    assert "group video" in reasons(PiPmic(pi.system).read(), "power")["raspberrypi:pmic"]


def test_only_the_fifth_generation_is_asked_for_its_rails(board: Board) -> None:
    board.add(pi4())
    assert [sensor.name for sensor in RaspberryPi.find(board.system)] == ["raspberrypi"]
    board.add(pi5())
    assert [sensor.name for sensor in RaspberryPi.find(board.system)] == ["raspberrypi", "raspberrypi-pmic"]


def test_another_board_is_never_asked(board: Board) -> None:
    board.add({"/proc/device-tree/model": "Radxa ROCK 5B\0"})
    assert RaspberryPi.find(board.system) == []
    assert board.commands == []
