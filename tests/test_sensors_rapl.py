"""RAPL counters: wraps, resets, permissions, twins and mirrors never make a false figure."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.power.sensors.rapl import Rapl, _step_j
from tests.sysfs import Board, board_fixture, only, reasons, values  # noqa: F401

CLASS = "/sys/class/powercap"
RANGE_UJ = 262_143_328_850


def zone(number: str, name: str, energy_uj: int, range_uj: int = RANGE_UJ) -> dict[str, str | int]:
    folder = f"{CLASS}/{number}"
    return {
        f"{folder}/name": name,
        f"{folder}/energy_uj": energy_uj,
        f"{folder}/max_energy_range_uj": range_uj,
    }


def step(board: Board, seconds: float, counters: Mapping[str, int]) -> None:
    board.clock.advance(seconds)
    board.add({f"{CLASS}/{number}/energy_uj": value for number, value in counters.items()})


def test_energy_is_in_joules_and_power_is_the_mean_between_two_reads(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 5_000_000))
    sensor = only(Rapl.find(board.system))
    first = sensor.read()
    assert values(first, "energy") == {"rapl:package-0": 5.0}
    assert values(first, "power") == {}
    step(board, 0.5, {"intel-rapl:0": 12_500_000})
    second = sensor.read()
    assert values(second, "energy")["rapl:package-0"] == pytest.approx(12.5)
    assert values(second, "power")["rapl:package-0"] == pytest.approx(15.0)
    assert {r.method for r in second} == {"counter"}


def test_a_wrap_is_undone(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", RANGE_UJ - 3_000_000))
    sensor = only(Rapl.find(board.system))
    before = values(sensor.read(), "energy")["rapl:package-0"]
    step(board, 1.0, {"intel-rapl:0": 7_000_000})
    after = sensor.read()
    assert values(after, "energy")["rapl:package-0"] - before == pytest.approx(10.0)
    assert values(after, "power")["rapl:package-0"] == pytest.approx(10.0)


@pytest.mark.parametrize("range_text", ["", "0", "-1", "unknown"])
def test_a_wrap_of_unknown_range_drops_the_sample_and_energy_never_falls(
    board: Board, range_text: str
) -> None:
    board.add(zone("intel-rapl:0", "package-0", 9_000_000))
    board.add({f"{CLASS}/intel-rapl:0/max_energy_range_uj": range_text})
    sensor = only(Rapl.find(board.system))
    sensor.read()
    step(board, 1.0, {"intel-rapl:0": 1_000_000})
    dropped = sensor.read()
    assert "went backwards" in reasons(dropped, "energy")["rapl:package-0"]
    assert values(dropped, "power") == {}
    step(board, 1.0, {"intel-rapl:0": 3_000_000})
    assert values(sensor.read(), "energy")["rapl:package-0"] == pytest.approx(11.0)


def test_a_counter_reset_after_suspend_drops_the_sample_and_counts_on(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 100_000_000_000))
    sensor = only(Rapl.find(board.system))
    start = values(sensor.read(), "energy")["rapl:package-0"]
    step(board, 1.0, {"intel-rapl:0": 50_000})
    assert "reset" in reasons(sensor.read(), "energy")["rapl:package-0"]
    step(board, 1.0, {"intel-rapl:0": 8_050_000})
    after = sensor.read()
    assert values(after, "energy")["rapl:package-0"] - start == pytest.approx(8.0)
    assert values(after, "power")["rapl:package-0"] == pytest.approx(8.0)


def test_an_interval_in_which_two_wraps_fit_is_dropped(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 1_000_000, range_uj=65_712_999_613))
    sensor = only(Rapl.find(board.system))
    sensor.read()
    step(board, 600.0, {"intel-rapl:0": 9_000_000})
    assert "read it every 66 s" in reasons(sensor.read(), "energy")["rapl:package-0"]


def test_a_counter_that_may_not_be_read_says_how_to_allow_it(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 1))
    board.break_file(f"{CLASS}/intel-rapl:0/energy_uj", errno.EACCES)
    readings = only(Rapl.find(board.system)).read()
    assert values(readings, "energy") == {}
    assert (
        "sudo chmod a+r /sys/class/powercap/intel-rapl*/energy_uj"
        in reasons(readings, "energy")["rapl:package-0"]
    )
    assert "permission denied" in reasons(readings, "energy")["rapl:total"]


def test_one_unreadable_domain_does_not_stop_the_others(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 1_000_000) | zone("intel-rapl:0:0", "core", 500_000))
    board.break_file(f"{CLASS}/intel-rapl:0:0/energy_uj", errno.EIO)
    readings = only(Rapl.find(board.system)).read()
    assert values(readings, "energy") == {"rapl:package-0": 1.0}
    assert "rapl:package-0/core" in reasons(readings, "energy")


def test_a_domain_that_vanishes_gives_a_reason_and_comes_back(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 1_000_000))
    sensor = only(Rapl.find(board.system))
    sensor.read()
    board.clock.advance(1)
    board.remove(f"{CLASS}/intel-rapl:0/energy_uj")
    assert "is gone" in reasons(sensor.read(), "energy")["rapl:package-0"]
    step(board, 1.0, {"intel-rapl:0": 9_000_000})
    assert values(sensor.read(), "power")["rapl:package-0"] == pytest.approx(4.0)


def test_scopes_are_never_summed(board: Board) -> None:
    board.add(
        zone("intel-rapl:0", "package-0", 0)
        | zone("intel-rapl:0:0", "core", 0)
        | zone("intel-rapl:0:1", "uncore", 0)
        | zone("intel-rapl:0:2", "dram", 0)
    )
    sensor = only(Rapl.find(board.system))
    sensor.read()
    step(
        board, 1.0, {"intel-rapl:0": 10_000_000, "intel-rapl:0:0": 6_000_000, "intel-rapl:0:1": 1_000_000,
                     "intel-rapl:0:2": 2_000_000}
    )  # fmt: skip
    readings = sensor.read()
    power = values(readings, "power")
    assert power["rapl:total"] == pytest.approx(
        12.0
    )  # package and DRAM; core and uncore are inside the package
    assert {r.source: r.scope for r in readings} == {
        "rapl:package-0": "package", "rapl:package-0/core": "core", "rapl:package-0/uncore": "rail",
        "rapl:package-0/dram": "memory", "rapl:total": "soc",
    }  # fmt: skip


def test_the_mmio_twin_of_a_package_is_the_same_counter(board: Board) -> None:
    board.add(
        zone("intel-rapl-mmio:0", "package-0", 1_000_000) | zone("intel-rapl:0", "package-0", 2_000_000)
    )
    assert values(only(Rapl.find(board.system)).read(), "energy") == {"rapl:package-0": 2.0}


def test_a_package_that_only_mmio_shows_is_read(board: Board) -> None:
    board.add(zone("intel-rapl-mmio:0", "package-0", 1_000_000))
    assert values(only(Rapl.find(board.system)).read(), "energy") == {"rapl:package-0": 1.0}


def test_two_domains_of_one_name_in_one_control_type_stay_two(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 1_000_000) | zone("intel-rapl:1", "package-0", 9_000_000))
    assert len(values(only(Rapl.find(board.system)).read(), "energy")) == 2


def test_psys_is_the_total_wherever_its_number_puts_it(board: Board) -> None:
    board.add(zone("intel-rapl:1", "psys", 0) | zone("intel-rapl:0", "package-0", 0))
    sensor = only(Rapl.find(board.system))
    sensor.read()
    step(board, 1.0, {"intel-rapl:1": 20_000_000, "intel-rapl:0": 12_000_000})
    readings = sensor.read()
    assert values(readings, "power")["rapl:total"] == pytest.approx(20.0)
    assert next(r.scope for r in readings if r.source == "rapl:total") == "device"


def test_a_psys_that_stands_still_is_not_the_total(board: Board) -> None:
    board.add(zone("intel-rapl:1", "psys", 77) | zone("intel-rapl:0", "package-0", 0))
    sensor = only(Rapl.find(board.system))
    sensor.read()
    step(board, 1.0, {"intel-rapl:0": 12_000_000})
    assert values(sensor.read(), "power")["rapl:total"] == pytest.approx(12.0)


def test_dies_that_mirror_one_socket_counter_count_once(board: Board) -> None:
    dies = {f"intel-rapl:{n}": f"package-0-die-{n}" for n in range(2)}
    for n, (number, name) in enumerate(dies.items()):
        board.add(zone(number, name, 40_000_000_000 + 900 * n))
    sensor = only(Rapl.find(board.system))
    sensor.read()
    step(board, 1.0, {"intel-rapl:0": 40_068_000_000, "intel-rapl:1": 40_068_001_100})
    readings = sensor.read()
    assert values(readings, "power") == {
        "rapl:package-0-die-0": pytest.approx(68.0),
        "rapl:total": pytest.approx(68.0),
    }
    assert "same counter as rapl:package-0-die-0" in reasons(readings, "energy")["rapl:package-0-die-1"]


def test_two_sockets_that_meet_by_chance_stay_two(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 10_000_000) | zone("intel-rapl:1", "package-1", 60_000_000))
    sensor = only(Rapl.find(board.system))
    sensor.read()
    step(board, 1.0, {"intel-rapl:0": 90_000_000, "intel-rapl:1": 90_000_000})
    assert values(sensor.read(), "power")["rapl:total"] == pytest.approx(80.0 + 30.0)


def test_a_socket_that_was_taken_for_a_mirror_brings_no_past_into_the_total(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 500_000_000) | zone("intel-rapl:1", "package-1", 500_100_000))
    sensor = only(Rapl.find(board.system))
    totals = []
    for joules in (0, 10, 20, 30):
        totals += [value for key, value in values(sensor.read(), "energy").items() if key == "rapl:total"]
        step(
            board,
            1.0,
            {
                "intel-rapl:0": 500_000_000 + joules * 1_000_000,
                "intel-rapl:1": 500_100_000 + joules * 2_000_000,
            },
        )
    assert totals == sorted(totals)
    assert max(after - before for before, after in itertools.pairwise(totals)) <= 30.0


def test_the_total_has_no_value_while_a_part_has_none(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 0) | zone("intel-rapl:1", "package-1", 5_000_000))
    sensor = only(Rapl.find(board.system))
    sensor.read()
    step(board, 1.0, {"intel-rapl:0": 10_000_000, "intel-rapl:1": 25_000_000})
    sensor.read()
    board.break_file(f"{CLASS}/intel-rapl:1/energy_uj", errno.EIO)
    step(board, 1.0, {"intel-rapl:0": 20_000_000})
    readings = sensor.read()
    assert "rapl:package-1" in reasons(readings, "energy")["rapl:total"]
    assert set(values(readings, "power")) == {"rapl:package-0"}


def test_two_reads_within_one_update_do_not_divide_by_nothing(board: Board) -> None:
    board.add(zone("intel-rapl:0", "package-0", 0))
    sensor = only(Rapl.find(board.system))
    sensor.read()
    assert values(sensor.read(), "power") == {}
    step(board, 1.0, {"intel-rapl:0": 7_000_000})
    sensor.read()
    step(board, 0.0, {"intel-rapl:0": 7_000_900})
    assert values(sensor.read(), "power")["rapl:package-0"] == pytest.approx(7.0)


@given(
    st.lists(st.floats(0.0, 400.0), min_size=1, max_size=30),
    st.floats(0.0, 1.0),
    st.sampled_from([65_712.0, 262_143.0]),
)
def test_undone_wraps_give_back_the_true_joules(steps: list[float], start: float, range_j: float) -> None:
    raw = true = start * range_j
    total = raw
    for joules in steps:
        last, true = raw, true + joules
        raw = true % range_j
        step_j, reason = _step_j(last, raw, 1.0, range_j)
        assert not reason
        assert step_j is not None
        assert step_j >= 0.0
        total += step_j
    assert total == pytest.approx(true, abs=1e-6)


def test_a_machine_without_powercap_has_no_sensor(board: Board) -> None:
    assert Rapl.find(board.system) == []
