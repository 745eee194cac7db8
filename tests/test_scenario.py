"""Scenarios come from TOML, strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import UsageError
from outrider.targets.device import DEVICES
from outrider.targets.scenario import SCENARIOS, Scenario, load_scenario, read_scenario


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_shipped_scenario_loads_its_device_exists_and_it_is_long_enough_to_get_hot(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.device in DEVICES
    assert scenario.duration_s >= 1200


def test_the_scenarios_cover_heat_a_cap_a_charger_other_apps_memory_and_a_rest() -> None:
    found = [load_scenario(name) for name in SCENARIOS]
    events = [event for scenario in found for event in scenario.events]
    assert any(scenario.power_cap_w for scenario in found)
    for field in ("ambient_c", "load_w", "bandwidth_taken", "charge_w", "memory_taken_mb"):
        assert any(getattr(event, field) for event in events), field
    assert any(event.ask is False for event in events)


def test_a_scenario_is_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "walk.toml"
    path.write_text(
        'device = "tensor-g4"\nduration_s = 600.0\ncategory = "code"\n'
        '[[events]]\nat_s = 60.0\nambient_c = 35.0\n[[events]]\nat_s = 90.0\ncategory = "prose"\nask = false\n'
    )
    scenario = read_scenario(path)
    assert (scenario.name, scenario.ambient_c, len(scenario.events)) == ("walk", 25.0, 2)
    assert [scenario.category_at(t) for t in (0.0, 89.0, 90.0)] == ["code", "code", "prose"]
    assert [scenario.asked_at(t) for t in (0.0, 100.0)] == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('device = "x"', r"walk\.toml: duration_s is missing"),
        ('device = "x"\nduration_s = -1.0', r"duration_s is -1\.0; expected 0\.001"),
        (
            'device = "x"\nduration_s = 1.0\nambience = 3',
            r"ambience is an unknown field; known: name, device",
        ),
        ('device = "x"\nduration_s = 1.0\nobjective = "speed"', r"objective 'speed' is not known"),
        (
            'device = "x"\nduration_s = 9.0\n[[events]]\nat_s = 1.0\nbandwidth_taken = 2.0',
            r"bandwidth_taken is 2\.0",
        ),
        (
            'device = "x"\nduration_s = 9.0\n[[events]]\nat_s = 5.0\n[[events]]\nat_s = 1.0',
            r"put them in order",
        ),
        (
            'device = "x"\nduration_s = 9.0\n[[events]]\nat_s = 5.0\n[[events]]\nat_s = 9.0',
            r"an event is at 9 s, but duration_s is 9; it would never happen",
        ),
        ("device = ", r"walk\.toml is not valid TOML"),
    ],
)
def test_a_faulty_scenario_names_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "walk.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_scenario(path)


def test_an_unknown_scenario_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown scenario 'nap'; known: "):
        load_scenario("nap")
    with pytest.raises(UsageError, match="cannot be read"):
        load_scenario("nowhere.toml")
    assert Scenario("x", "host", 1.0).category_at(0.5) is None


@pytest.mark.parametrize("duration", ["1" + 400 * "0", "nan", "inf", 100_000 * "["])
def test_absurd_numbers_and_nesting_are_errors_that_name_the_file(tmp_path: Path, duration: str) -> None:
    path = tmp_path / "walk.toml"
    path.write_text(f'device = "tensor-g4"\nduration_s = {duration}\n')
    with pytest.raises(UsageError, match=r"walk\.toml"):
        read_scenario(path)
