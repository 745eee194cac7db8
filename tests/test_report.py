"""What a profile's trace says, and how its report shows it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.power.report import svg
from outrider.power.report.intervals import interval, mean_between, paired_ratio, retention, students_t
from outrider.power.report.page import render, write_report
from outrider.power.report.profile_trace import (
    End,
    Header,
    ProfileError,
    ProfileTrace,
    ProfileWriter,
    RoundLine,
    Run,
    RunEnergy,
    Sample,
    Settings,
    read_profile,
)
from outrider.power.report.summarise import summarise
from outrider.power.report.summary import read_summary, write_summary
from tests.full_disk import FullDisk

CELLS = [(None, "0", 8.0, 4.0), ("model", "2", 11.0, 5.5), ("model", "4", 10.0, 7.0)]
"""Drafter, k, tokens a second, watts."""


def energy(watts: float, seconds: float) -> RunEnergy:
    joules = watts * seconds
    stages = {"prefill": 0.05 * joules, "draft": 0.25 * joules, "verify": 0.6 * joules, "other": 0.1 * joules}
    stages["wasted_draft"] = 0.1 * joules
    trust, source = "module or device input", "hwmon:VDD_IN"
    return RunEnergy(joules, "module", "instant", trust, source, stages, {}, 400, 399, 0.3, 0.1, 0.99, 0.5)


def a_trace(
    *,
    metered: bool = True,
    thermometer: bool = True,
    simulated: bool = False,
    run_s: float = 80.0,
    repeats: int = 3,
    **settings: Any,
) -> ProfileTrace:
    """Runs of three settings one after another; rates fall by a fifth from the first half to the second."""
    samples, rounds, runs, now = [], [], [], 0.0
    for repeat in range(repeats):
        for number, (drafter, k, rate, watts) in enumerate(CELLS):
            run, begin, drafted = len(runs), now, int(k)
            rate *= 1 + 0.02 * repeat
            while now < begin + run_s:
                slow = 0.8 if now - begin > run_s / 2 else 1.0
                kept = 1 + drafted // 2
                seconds = kept / (rate * slow)
                now += seconds
                rounds.append(RoundLine(run, now, seconds, drafter, int(k), drafted, drafted, kept - 1, kept))
                hot = 50.0 + 10 * number + 15 * (now - begin) / run_s
                samples.append(
                    Sample(
                        now,
                        watts if metered else None,
                        hot if thermometer else None,
                        clock_ratio=0.8 if slow < 1 else 1.0,
                    )
                )
            mine = [line for line in rounds if line.run == run]
            tokens = sum(line.tokens for line in mine)
            runs.append(
                Run(
                    run, drafter, k, None, repeat, begin, now, tokens, now - begin, 40, 0.5, len(mine),
                    sum(line.drafted for line in mine), sum(line.evaluated for line in mine),
                    sum(line.accepted for line in mine), 2,
                    energy=energy(watts, now - begin) if metered else None,
                )
            )  # fmt: skip
            now += 10.0
    provenance = {"device": "a board", "os": "Linux 6.6", "model": "sha256 abc"}
    header = Header(
        Settings(run_s, repeats, **settings), tool_version="0.1", provenance=provenance, simulated=simulated
    )
    no_meter = "" if metered else "rapl: permission denied; run as root"
    end = End(True, idle_before_w=1.5, idle_after_w=1.52, sampler_share=0.004, no_meter=no_meter)
    return ProfileTrace(header, tuple(samples), tuple(rounds), tuple(runs), end)


class Page(HTMLParser):
    """Tags, attributes and visible text of a page; knows which tags stay open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "hr", "img", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(part) for part in re.findall(r"<svg.*?</svg>", text, re.S)]


def points_of(drawing: ElementTree.Element) -> list[tuple[float, float]]:
    """Every corner that a drawing names."""
    found = []
    for node in drawing.iter():
        given = node.attrib
        for x, y in (("x", "y"), ("x1", "y1"), ("x2", "y2"), ("cx", "cy")):
            if x in given:
                found.append((float(given[x]), float(given[y])))
        if node.tag == "rect":
            right, low = float(given["x"]) + float(given["width"]), float(given["y"]) + float(given["height"])
            found.append((right, low))
        for pair in given.get("points", "").split():
            x_text, y_text = pair.split(",")
            found.append((float(x_text), float(y_text)))
    return found


def test_the_answer_names_the_best_setting_and_plain_decoding() -> None:
    found = summarise(a_trace())
    assert found.headline.startswith("This pair sustains 10.1 tokens/s at k = 2 with model; without")
    assert "without speculation 7.3" in found.headline
    assert "The fewest joules a token" in found.headline


def test_a_cap_passes_over_what_breaks_it() -> None:
    found = summarise(a_trace(power_cap_w=5.0))
    assert [cell.holds_cap for cell in found.cells] == [True, False, False]
    assert found.headline.startswith("Within 5 W this pair sustains 7.3 tokens/s without speculation.")
    assert "k = 2" in summarise(a_trace(power_cap_w=6.0)).headline


def test_a_temperature_limit_passes_over_what_breaks_it() -> None:
    found = summarise(a_trace(temp_limit_c=70.0))
    assert [cell.holds_limit for cell in found.cells] == [True, False, False]
    assert "Within 70 °C" in found.headline
    assert found.cells[0].over_limit_s == 0.0
    assert found.cells[2].over_limit_s is not None
    assert 3 * 40 < found.cells[2].over_limit_s < 3 * 80
    assert "Nothing that was tried keeps within 20 °C" in summarise(a_trace(temp_limit_c=20.0)).headline


@pytest.mark.parametrize("mode", [1.0, 0.55])
def test_a_power_mode_that_caps_the_clock_for_good_is_no_throttling(mode: float) -> None:
    trace = a_trace()
    samples = tuple(
        replace(s, clock_ratio=(s.clock_ratio or 1.0) * mode, throttle=None) for s in trace.samples
    )
    steady = tuple(replace(s, clock_ratio=mode) for s in samples)
    throttled = summarise(replace(trace, samples=samples)).cells[0].throttled_after_s
    assert throttled == pytest.approx(40.0, abs=1.0)
    assert summarise(replace(trace, samples=steady)).cells[0].throttled_after_s is None


def test_retention_and_the_onset_of_throttling_are_those_of_the_runs() -> None:
    plain = summarise(a_trace()).cells[0]
    assert plain.retention == pytest.approx(0.8, abs=0.01)
    assert plain.throttled_after_s == pytest.approx(40.0, abs=1.0)
    short = summarise(a_trace(run_s=40.0))
    assert short.cells[0].retention is None
    assert "This pair reaches" in short.headline
    assert any("too short for retention" in note for note in short.notes)


def test_joules_a_token_leave_prefill_out_and_keep_the_sign_of_net() -> None:
    cell = summarise(a_trace()).cells[1]
    assert cell.energy_j_per_token is not None
    assert cell.energy_j_per_token.mean == pytest.approx(0.95 * 5.5 / cell.tokens_per_s.mean, rel=1e-3)
    assert cell.stage_j_per_token is not None
    assert cell.stage_j_per_token["wasted_draft"] < cell.stage_j_per_token["draft"]
    trace = a_trace()
    assert cell.net_j_per_token is not None
    idle_j = 1.51 * (80.0 - 0.5) / 80.0 / cell.tokens_per_s.mean
    assert cell.net_j_per_token.mean == pytest.approx(cell.energy_j_per_token.mean - idle_j, rel=1e-2)
    busy = replace(trace, end=replace(trace.end, idle_before_w=30.0))
    net = summarise(busy).cells[0].net_j_per_token
    assert net is not None
    assert net.mean < 0
    assert any("Idle power moved" in note for note in summarise(busy).notes)


def test_a_speedup_is_paired_with_the_plain_run_of_the_same_repetition() -> None:
    cell = summarise(a_trace()).cells[1]
    assert cell.speedup is not None
    assert cell.speedup.mean == pytest.approx(11 / 8, rel=0.02)
    assert cell.speedup.half is not None
    assert cell.tokens_per_s.half is not None
    assert cell.speedup.half / cell.speedup.mean < cell.tokens_per_s.half / cell.tokens_per_s.mean


def test_an_interrupted_run_counts_only_where_there_is_no_whole_one() -> None:
    trace = a_trace(repeats=2)
    cut = [replace(run, whole=run.run not in (3, 5), tokens=run.tokens // 2) for run in trace.runs]
    cut[2] = replace(cut[2], whole=False)
    found = summarise(replace(trace, runs=tuple(cut), end=None))
    assert [cell.tokens_per_s.n for cell in found.cells] == [1, 2, 2]
    assert found.partial
    assert found.headline.startswith("Interrupted; so far: ")


def test_too_little_of_a_meter_is_not_told_as_none() -> None:
    why = "pmic covers only 42% of the window, too little for a total"
    seen = a_trace()
    runs = tuple(replace(run, energy=None) for run in seen.runs)
    found = summarise(replace(seen, runs=runs, end=End(True, no_meter=why)))
    assert not found.metered
    assert f"Power is measured here, but not enough of any run for joules ({why})" in found.headline
    assert "No power is measured" not in found.headline
    assert f"No joules: {why}; --minutes makes runs longer." in found.notes
    assert "No power meter answered" not in Page(render(found, seen)).text


def test_without_a_meter_there_are_no_joules_and_it_is_said() -> None:
    found = summarise(a_trace(metered=False, power_cap_w=4.0))
    page = Page(render(found, a_trace(metered=False)))
    assert "No power is measured here" in found.headline
    assert "Within" not in found.headline
    assert found.error_budget is None
    assert "J/token" not in page.text
    assert "No power meter answered" in page.text
    assert "rapl: permission denied; run as root" in page.text
    assert "nothing says whether 4 W were kept" in page.text
    heads = [attributes for tag, attributes in page.tags if tag == "th"]
    assert len(heads) == 10


def test_without_a_thermometer_no_temperature_is_shown() -> None:
    text = render(summarise(a_trace(thermometer=False)), a_trace(thermometer=False))
    assert "temperature (°C)" not in text
    assert "No temperature is known" in text


def test_simulated_stands_in_title_answer_and_every_plot() -> None:
    trace = a_trace(simulated=True)
    text = render(summarise(trace), trace)
    assert re.search(r"<title>SIMULATED: ", text)
    assert re.search(r'class="answer">SIMULATED: ', text)
    titles = [drawing.find("title") for drawing in drawings(text)]
    assert len(titles) == 2
    assert all(title is not None and "SIMULATED" in str(title.text) for title in titles)
    assert "SIMULATED" not in render(summarise(a_trace()), a_trace())


def test_whatever_comes_from_a_file_is_escaped() -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>&'
    trace = a_trace(temp_limit_c=60.0)
    header = replace(trace.header, provenance={"device": evil, evil: evil}, tool_version=evil)
    runs = tuple(replace(r, drafter=evil if r.drafter else None, objective=evil) for r in trace.runs)
    end = End(True, notes=(evil,), no_meter=evil)
    hostile = replace(trace, header=header, runs=runs, end=end)
    text = render(summarise(hostile), hostile)
    page = Page(text)
    assert not {"script", "img", "iframe", "object", "a", "link"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "&quot;&gt;&lt;script&gt;" in text
    assert drawings(text)


def test_the_page_asks_for_nothing_from_outside() -> None:
    text = render(summarise(a_trace()), a_trace())
    assert not re.search(r"https?://|//[a-z]|url\(|@import|src=|href=", text)
    assert "default-src 'none'" in text


def test_the_page_is_well_formed_and_fit_for_a_phone_and_the_dark() -> None:
    page = Page(render(summarise(a_trace(power_cap_w=6.0)), a_trace(power_cap_w=6.0)))
    assert page.open == []
    names = [attributes.get("name") for tag, attributes in page.tags if tag == "meta"]
    assert "viewport" in names
    text = render(summarise(a_trace()))
    assert "prefers-color-scheme:dark" in text
    assert "overflow-x:auto" in text
    for drawing in drawings(text):
        first = [child.tag for child in drawing][:2]
        assert first == ["title", "desc"]
        assert drawing.attrib["role"] == "img"
        ids = {node.attrib["id"] for node in drawing if "id" in node.attrib}
        assert set(drawing.attrib["aria-labelledby"].split()) == ids


@pytest.mark.parametrize("metered", [True, False])
@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_nothing_is_drawn_outside_a_plot(metered: bool, repeats: int) -> None:
    trace = a_trace(metered=metered, repeats=repeats, temp_limit_c=99.0, power_cap_w=20.0)
    found = drawings(render(summarise(trace), trace))
    assert len(found) == 2
    for drawing in found:
        _, _, width, height = map(float, drawing.attrib["viewBox"].split())
        points = points_of(drawing)
        assert len(points) > 15
        assert all(0 <= x <= width + 0.1 and 0 <= y <= height + 0.1 for x, y in points)


def test_a_long_trace_makes_a_small_page() -> None:
    trace = a_trace(run_s=600.0, repeats=5)
    assert len(trace.samples) > 40_000
    text = render(summarise(trace), trace)
    assert len(text) < 250_000


def test_thinning_keeps_peaks() -> None:
    points = [(float(i), math.sin(i / 50)) for i in range(10_000)]
    points[5003] = (5003.0, 9.0)
    kept = svg.thin(points)
    assert len(kept) <= 400
    assert (5003.0, 9.0) in kept
    assert kept == sorted(kept, key=lambda point: point[0])
    assert svg.thin(points[:50], 50) == points[:50]


def test_nothing_is_drawn_across_what_is_not_known() -> None:
    known = [(float(i), 1.0 + i % 7) for i in range(3000)]
    points: list[tuple[float, float | None]] = [*known[:1000], (1000.0, None), *known[2000:]]
    text = svg.timeline([svg.Line("power", "W", points)], [], "title", "description", "name")
    (drawing,) = drawings(text)
    lines = [node.attrib["points"].split() for node in drawing.iter("polyline")]
    assert len(lines) == 2
    last, first = float(lines[0][-1].split(",")[0]), float(lines[1][0].split(",")[0])
    assert first - last > 50


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 10.0, [0, 5, 10]), (0.0, 0.09, [0, 0.05, 0.1]), (41.0, 78.0, [40, 50, 60, 70, 80])],
)
def test_ticks_are_round_numbers_that_span(low: float, high: float, expected: list[float]) -> None:
    assert svg.ticks(low, high) == pytest.approx(expected)


def test_students_t_agrees_with_scipy() -> None:
    from scipy import stats

    for degrees in (1, 2, 5, 30, 31, 60, 1000):
        assert students_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-4)


def test_an_interval_of_one_value_is_unknown_and_of_none_absent() -> None:
    one = interval([3.0])
    assert one is not None
    assert (one.mean, one.low, one.half, one.n) == (3.0, None, None, 1)
    assert interval([]) is None
    three = interval([1.0, 2.0, 3.0])
    assert three is not None
    assert three.half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)


def test_a_paired_ratio_is_symmetric() -> None:
    there, back = paired_ratio([(2, 1), (8, 2)]), paired_ratio([(1, 2), (2, 8)])
    assert there is not None
    assert back is not None
    assert there.mean == pytest.approx(math.sqrt(8))
    assert there.mean * back.mean == pytest.approx(1.0)


def test_rates_in_a_window_count_rounds_on_its_edge_by_share() -> None:
    events = [(0.0, 2.0, 4.0), (2.0, 4.0, 8.0)]
    assert mean_between(events, 1.0, 3.0) == pytest.approx(3.0)
    assert mean_between(events, 9.0, 10.0) is None
    assert retention(events) is None


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    trace = a_trace(repeats=1)
    path = tmp_path / "profile.jsonl"
    with ProfileWriter(path, trace.header) as writer:
        for line in (*trace.samples, *trace.rounds, *trace.runs, trace.end):
            assert line is not None
            writer.add(line)
    back = read_profile(path)
    assert back.header == trace.header
    assert back.runs[0].label == "plain"
    assert len(back.samples) == len(trace.samples)
    assert summarise(back).headline == summarise(trace).headline
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "profile"


def written(tmp_path: Path) -> Path:
    path = tmp_path / "profile.jsonl"
    with ProfileWriter(path, a_trace(repeats=1).header) as writer:
        writer.add(Sample(0.5, 3.0))
        writer.add(Sample(0.6, 3.1))
    return path


def test_a_trace_cut_off_in_a_line_is_read_up_to_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text()[:-7])
    found = read_profile(path)
    assert [sample.time_s for sample in found.samples] == [0.5]
    assert found.partial
    assert "cut off in line 3" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"time_s":0.5,', "", r"profile\.jsonl, line 2: sample\.time_s is missing"),
        (
            '"power_w":3.0',
            '"power_w":"hot"',
            r"profile\.jsonl, line 2: sample\.power_w is 'hot'; expected a finite number",
        ),
        (
            '"record":"sample"',
            '"record":"what"',
            r"profile\.jsonl, line 2: record is 'what'; known: sample, round",
        ),
        ('{"record":"sample"', "{{", r"profile\.jsonl, line 2 is not JSON"),
        ('"kind":"profile"', '"kind":"decode"', "kind 'decode'; expected version 1 of profile"),
        ('"schema_version":1', '"schema_version":9', "schema_version 9"),
        ('"run_s":80.0,', "", r"profile\.jsonl: header\.settings\.run_s is missing"),
    ],
)
def test_a_damaged_trace_is_refused_by_line_and_field(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = written(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ProfileError, match=message):
        read_profile(path)


def test_a_full_disk_is_a_clear_error_and_what_was_written_stays(tmp_path: Path) -> None:
    disk = FullDisk(len(written(tmp_path).read_bytes()) - 5)
    writer = ProfileWriter(disk, a_trace(repeats=1).header)
    writer.add(Sample(0.5, 3.0))
    with pytest.raises(ProfileError, match=r"No space left on device.*make room"):
        writer.add(Sample(0.6, 3.1))
    (tmp_path / "second.jsonl").write_bytes(disk.getvalue())
    assert [sample.time_s for sample in read_profile(tmp_path / "second.jsonl").samples] == [0.5]


def test_a_summary_comes_back_and_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    found = summarise(a_trace())
    write_summary(found, path)
    assert read_summary(path) == found
    record = json.loads(path.read_text())
    assert record["schema_version"] == 1
    del record["cells"][1]["tokens_per_s"]["mean"]
    path.write_text(json.dumps(record))
    with pytest.raises(
        ProfileError, match=r"summary\.json: summary\.cells\[1\]\.tokens_per_s\.mean is missing"
    ):
        read_summary(path)


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, summarise(a_trace()), a_trace())
    assert path.read_text().endswith("</html>\n")
    with pytest.raises(ProfileError, match="cannot be written"):
        write_report(tmp_path / "absent" / "report.html", summarise(a_trace()))


def test_a_profile_in_which_nothing_ran_says_so() -> None:
    empty = replace(a_trace(), runs=(), rounds=(), samples=(), end=None)
    found = summarise(empty)
    assert found.headline.startswith("Interrupted; so far: Nothing was measured.")
    assert "Nothing was measured" in Page(render(found, empty)).text
