"""Device profiles: every figure has a source or says that it is assumed, and a wrong file names its field."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import UsageError
from outrider.targets.device import (
    DEVICES,
    Figure,
    Series,
    figures_of,
    load_device,
    parse_device,
    user_profile_path,
)
from outrider.targets.physics import steady_state, sustainable_power

FOLDER = Path(__import__("outrider.targets.device").__file__).parent / "targets" / "devices"
PI = (FOLDER / "raspberry-pi-5.toml").read_text(encoding="utf-8")
NAMED = {
    *("raspberry-pi-4", "raspberry-pi-5", "jetson-orin-nano", "jetson-orin-nx", "jetson-agx-orin"),
    *("jetson-thor", "snapdragon-8-gen3", "snapdragon-8-elite", "snapdragon-x-elite", "dimensity-9400"),
    *("tensor-g4", "iphone-15-pro", "iphone-16-pro", "iphone-17-pro"),
    *("mac-m1", "mac-m2", "mac-m3", "mac-m4", "host"),
}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


def test_the_devices_of_the_plan_are_all_there() -> None:
    assert set(DEVICES) == NAMED


@pytest.mark.parametrize("slug", DEVICES)
def test_every_figure_has_a_source_or_is_marked_assumed(slug: str) -> None:
    raw = tomllib.loads((FOLDER / f"{slug}.toml").read_text(encoding="utf-8"))
    bare = [
        (key, value)
        for table in [raw, *(t for t in raw.values() if isinstance(t, dict))]
        for key, value in table.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    assert bare == []
    figures = figures_of(load_device(slug))
    assert len(figures) > 25
    assert all(bool(figure.source) != figure.assumed for figure in figures.values())


@pytest.mark.parametrize("slug", DEVICES)
def test_no_source_is_a_path_or_an_empty_phrase(slug: str) -> None:
    for place, figure in figures_of(load_device(slug)).items():
        assert figure.assumed or len(figure.source) > 10, place
        assert not figure.source.startswith(("/", "http")), place


@pytest.mark.parametrize("slug", DEVICES)
def test_a_device_rests_and_works_within_what_physics_allows(slug: str) -> None:
    device = load_device(slug)
    rest = steady_state(device.network(), device.idle_w, 25.0)
    lowest = min((trip.at_c for trip in device.throttle.trips if trip.sensor == "die"), default=math.inf)
    assert rest.die_c < lowest
    assert device.static_w >= device.idle_w
    limit = device.skin_limit_c
    assert sustainable_power(device.network(), 25.0, device.temp_limit_c, limit) > device.static_w
    for unit in device.units.values():
        assert unit.bandwidth_gb_s <= device.memory.peak_gb_s
        assert all(rate.sustained_gops <= rate.peak_gops for rate in unit.rates.values())


@pytest.mark.parametrize("slug", [slug for slug in DEVICES if load_device(slug).battery_wh])
def test_a_day_of_decoding_is_not_free(slug: str) -> None:
    device = load_device(slug)
    assert device.battery_wh is not None
    assert 1.0 < device.battery_wh / device.sustained_w < 24.0  # hours at sustained power


def test_host_knows_nothing() -> None:
    assert all(figure.assumed for figure in figures_of(load_device("host")).values())
    assert load_device("host").meter == "none"


def test_a_device_without_a_power_sensor_says_none() -> None:
    assert load_device("iphone-16-pro").meter == "none"
    assert load_device("raspberry-pi-4").meter == "none"
    assert load_device("raspberry-pi-5").meter == "pmic"


def test_snapdragon_ids_are_those_of_the_compiler() -> None:
    soc = load_device("snapdragon-8-gen3").soc
    assert (soc.soc_model, soc.htp_arch) == (57, 75)


def test_rates_are_in_plain_units() -> None:
    rates = load_device("raspberry-pi-5").rates("cpu", "int8")
    assert rates.bytes_s == pytest.approx(11.1e9)
    assert rates.ops_s == pytest.approx(200e9)
    assert rates.launch_s == pytest.approx(1.5e-3)
    assert rates.j_byte == pytest.approx(25e-12)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown device 'pixel-9'; known: dimensity-9400, .*tensor-g4"):
        load_device("pixel-9")
    with pytest.raises(UsageError, match="has no unit 'npu'; known: cpu"):
        load_device("raspberry-pi-5").rates("npu")
    with pytest.raises(UsageError, match="cpu has no 'fp16'; known: int8, fp32"):
        load_device("raspberry-pi-5").rates("cpu", "fp16")


@pytest.mark.parametrize("name", ["", "../devices/host", "/etc/passwd", "devices/host"])
def test_a_slug_is_never_a_path(name: str) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        load_device(name)


def replaced(old: str, new: str) -> str:
    assert PI.count(old) >= 1, old
    return PI.replace(old, new, 1)


BROKEN: dict[str, tuple[Callable[[], str], str]] = {
    "missing field": (
        lambda: re.sub(r"^busy_w.*\n", "", PI, flags=re.M),
        r"mine\.toml: units\.cpu\.busy_w is missing",
    ),
    "missing table": (
        lambda: PI.replace("[power]", "[powder]"),
        r"mine\.toml: powder is an unknown field; known: slug, name",
    ),
    "misspelt field": (
        lambda: replaced("clock_mhz", "clock_mhs"),
        r"units\.cpu\.clock_mhs is an unknown field; known: .*clock_mhz",
    ),
    "wrong unit": (
        lambda: replaced("clock_mhz = { value = 2400", "clock_mhz = { value = 2400000000"),
        r"units\.cpu\.clock_mhz is 2\.4e\+09; expected 50 to 10000 \(MHz\): is the unit right\?",
    ),
    "negative": (
        lambda: replaced("static_w = { value = 1.9", "static_w = { value = -1.9"),
        r"power\.static_w is -1\.9; expected 0 to 500 \(W\)",
    ),
    "no source": (
        lambda: replaced("static_w = { value = 1.9, assumed = true }", "static_w = { value = 1.9 }"),
        r'power\.static_w: a figure has either a source = "\.\.\." or assumed = true',
    ),
    "source and assumed": (
        lambda: replaced("value = 1.9, assumed", 'value = 1.9, source = "guess", assumed'),
        r"power\.static_w: a figure has either",
    ),
    "bare number": (
        lambda: replaced("static_w = { value = 1.9, assumed = true }", "static_w = 1.9"),
        r"power\.static_w is 1\.9; write \{ value = 1\.9, source",
    ),
    "text for a number": (
        lambda: replaced("static_w = { value = 1.9", 'static_w = { value = "1.9"'),
        r"power\.static_w is '1\.9'; expected a finite number",
    ),
    "not a number": (
        lambda: replaced("static_w = { value = 1.9", "static_w = { value = nan"),
        r"power\.static_w is nan; expected a finite number",
    ),
    "no value": (
        lambda: replaced("static_w = { value = 1.9, ", "static_w = { "),
        r"power\.static_w\.value is missing",
    ),
    "extra in a figure": (
        lambda: replaced("static_w = { value = 1.9,", "static_w = { value = 1.9, unit = 'W',"),
        r"power\.static_w\.unit is an unknown field",
    ),
    "unknown meter": (
        lambda: replaced('meter = "pmic"', 'meter = "psu"'),
        r"sensors\.meter is 'psu'; known: 'none', 'battery'",
    ),
    "meter without precision": (
        lambda: replaced('meter = "pmic"', 'meter = "none"'),
        r"mine\.toml: sensors: meter is 'none'",
    ),
    "unknown unit to decode on": (
        lambda: replaced('decode_unit = "cpu"', 'decode_unit = "npu"'),
        r"decode_unit is 'npu'; units has cpu",
    ),
    "ladder that rises": (
        lambda: replaced("[1, 0.92, 0.83", "[1, 0.83, 0.92"),
        r"throttle\.clock_steps is \[1\.0, 0\.83, 0\.92.*expected shares that fall from 1",
    ),
    "ladders of two lengths": (
        lambda: replaced("memory_steps = { value = [1, 1,", "memory_steps = { value = [1,"),
        r"8 clock_steps and 7 memory_steps",
    ),
    "trip below the ladder": (
        lambda: replaced("level = 7", "level = 8"),
        r"a trip's level is 8; the ladder has 1 to 7",
    ),
    "trip at an impossible temperature": (
        lambda: replaced("at_c = { value = 80", "at_c = { value = 80000"),
        r"throttle\.trips\[0\]\.at_c is 80000; expected 30 to 125",
    ),
    "not TOML": (lambda: PI + "\n[", r"mine\.toml is not valid TOML"),
    "own slug": (lambda: 'slug = "x"\n' + PI, r"slug is the file's name"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_faulty_profile_names_file_and_field(case: str) -> None:
    text, message = BROKEN[case]
    with pytest.raises(UsageError, match=message):
        parse_device(text(), "mine", "mine.toml")


def test_a_battery_meter_needs_a_battery() -> None:
    text = (FOLDER / "tensor-g4.toml").read_text(encoding="utf-8")
    without = re.sub(r"\[battery\]\ncapacity_wh.*\n", "", text)
    with pytest.raises(UsageError, match="meter is 'battery', but there is no"):
        parse_device(without, "mine", "mine.toml")


def test_a_profile_loads_from_a_path_and_its_slug_is_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "my-board.toml"
    path.write_text(PI, encoding="utf-8")
    assert load_device(path).slug == "my-board"
    with pytest.raises(UsageError, match=r"nowhere\.toml cannot be read: No such file"):
        load_device(tmp_path / "nowhere.toml")


def test_a_profile_measured_here_wins_over_the_shipped_one_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = user_profile_path("raspberry-pi-5")
    path.parent.mkdir(parents=True)
    path.write_text(
        replaced(
            "static_w = { value = 1.9, assumed = true }", 'static_w = { value = 2.5, source = "measured" }'
        )
    )
    with caplog.at_level(logging.INFO, logger="outrider.targets.device"):
        device = load_device("raspberry-pi-5")
    assert device.static_w == 2.5
    assert "measured here" in caplog.text
    path.unlink()
    assert load_device("raspberry-pi-5").static_w == 1.9


def test_a_profile_measured_here_may_have_a_name_of_its_own() -> None:
    path = user_profile_path("my-laptop")
    path.parent.mkdir(parents=True)
    path.write_text(PI, encoding="utf-8")
    assert load_device("my-laptop").slug == "my-laptop"


def test_a_figure_is_a_float_that_remembers_its_source() -> None:
    figure = Figure(2.0, "data sheet")
    plain: Any = figure * 3
    assert type(plain) is float
    assert plain == 6.0
    assert figure.scaled(1.5, "specimen").source == "specimen"
    for twin in (copy.deepcopy(figure), pickle.loads(pickle.dumps(figure))):
        assert (twin, twin.source, twin.assumed) == (2.0, "data sheet", False)
    series = copy.deepcopy(Series((1.0, 0.5), assumed=True))
    assert (series, series.assumed) == ((1.0, 0.5), True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value = 1.55", "value = 1" + 400 * "0", r"power\.idle_w is 1000+; expected a finite number"),
        (
            "[units.cpu]",
            "deep = " + 100_000 * "[" + "\n[units.cpu]",
            "not valid TOML: it is nested too deeply",
        ),
        ('kind = "board"', 'kind = "board"\nmixed = [{ a = 1 }, 2]', "mixed is an unknown field"),
    ],
    ids=["huge", "deep", "mixed"],
)
def test_absurd_toml_is_an_error_that_names_the_file(old: str, new: str, message: str) -> None:
    assert old in PI
    with pytest.raises(UsageError, match=f"pi.toml.*{message}") as refused:
        parse_device(PI.replace(old, new, 1), "pi", "pi.toml")
    assert len(str(refused.value)) < 300
