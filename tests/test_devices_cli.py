"""`outrider devices` lists the profiles and says of each figure where it is from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from outrider.cli.root import cli
from outrider.errors import UsageError
from outrider.targets.device import DEVICES, figures_of, load_device, user_profile_path


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))


def outrider(*words: str) -> Result:
    return CliRunner().invoke(cli, ["devices", *words], prog_name="outrider")


def test_every_device_has_its_line() -> None:
    lines = outrider().stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(DEVICES)]] == list(DEVICES)
    (phone,) = [line for line in lines if line.startswith("iphone-16-pro")]
    assert "8 GB" in phone
    assert "none" in phone


def test_a_device_shows_every_figure_with_its_source_or_assumed() -> None:
    text = outrider("raspberry-pi-5").stdout
    for place, figure in figures_of(load_device("raspberry-pi-5")).items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"{place} ")]
        assert line.endswith("assumed" if figure.assumed else figure.source)


def test_json_holds_the_same() -> None:
    record = json.loads(outrider("raspberry-pi-5", "--json").stdout)
    figures = record["figures"]
    assert set(figures) == set(figures_of(load_device("raspberry-pi-5")))
    assert figures["power.idle_w"]["value"] == 1.55
    assert "source" in figures["power.idle_w"]
    assert figures["power.static_w"] == {"value": 1.9, "assumed": True}
    assert figures["throttle.clock_steps"]["value"][0] == 1.0
    listed = json.loads(outrider("--json").stdout)
    assert [device["slug"] for device in listed] == list(DEVICES)
    assert all(device["assumed"] <= device["figures"] for device in listed)


def test_an_unknown_device_lists_the_known_ones() -> None:
    failed = outrider("walkman")
    assert isinstance(failed.exception, UsageError)
    assert "known: dimensity-9400" in str(failed.exception)


def test_a_profile_that_was_measured_here_is_marked() -> None:
    shipped = outrider().stdout
    assert "measured here" not in shipped
    path = user_profile_path("host")
    path.parent.mkdir(parents=True)
    source = Path(__import__("outrider.targets.device").__file__).parent / "targets/devices/host.toml"
    path.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    (line,) = [line for line in outrider().stdout.splitlines() if line.startswith("host")]
    assert line.endswith("measured here")
    assert f"measured here: {path}" in outrider("host").stdout


def test_a_profile_is_shown_from_a_path(tmp_path: Path) -> None:
    assert isinstance(outrider(str(tmp_path / "none.toml")).exception, UsageError)
