"""A scripted day under a policy: the real engine and governor on a simulated device."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from outrider.contracts import Reading, Sampling
from outrider.errors import BackendError, UsageError
from outrider.lines import read_lines
from outrider.power.report.simulation import Simulation, headline
from outrider.power.telemetry import TelemetryWriter
from outrider.power.tuning import Tuning
from outrider.runtime.profiling import simulate
from outrider.runtime.profiling.rig import trace_rig
from outrider.runtime.profiling.simulate import (
    PolicyRun,
    cap_violation,
    compare,
    fixed_rules,
    format_runs,
    parse_rule,
    run_policy,
)
from outrider.targets.device import load_device
from outrider.targets.model_cost import DRAFT_COST
from outrider.targets.scenario import Event, Scenario
from outrider.targets.simulated import LOAD_MB_PER_S, Machine
from outrider.targets.trace_model import TraceDrafter
from tests.acceptance_texts import made_up_texts, write_texts

TEXTS = made_up_texts()
PHONE = Scenario("a phone", "snapdragon-8-gen3", 60.0, seed=1)
BOARD = Scenario("a board", "raspberry-pi-5", 60.0, seed=1)
RAPL = Scenario("a laptop", "mac-m2", 40.0, seed=1)


@pytest.mark.parametrize(
    "name", ["plain", "governed", "auto", "k=4", "model k=2", "lookup k=8 unpaced", "plain unpaced"]
)
def test_a_rule_has_the_name_that_it_was_parsed_from(name: str) -> None:
    assert parse_rule(name).name == name


@pytest.mark.parametrize("name", ["", "best", "k=", "k=-1", "governed unpaced", "a b k=2", "k=auto"])
def test_an_unknown_policy_lists_the_known(name: str) -> None:
    with pytest.raises(UsageError, match="known: plain, governed, auto"):
        parse_rule(name)


def test_a_policy_that_no_round_could_verify_is_refused() -> None:
    with pytest.raises(UsageError, match="k is 999; a round verifies at most 127 drafted tokens"):
        parse_rule("lookup k=999")


def test_equal_arguments_give_equal_runs_and_another_seed_another() -> None:
    first, again = (run_policy(PHONE, "governed", TEXTS) for _ in range(2))
    assert first == again
    assert run_policy(replace(PHONE, seed=2), "governed", TEXTS) != first


def test_plain_decoding_commits_one_token_a_round() -> None:
    run = run_policy(PHONE, "plain", TEXTS)
    assert run.tokens == run.rounds > 500
    assert run.mean_k == 0.0
    assert run.seconds == pytest.approx(60.0, abs=0.5)
    assert run.tokens_per_s == pytest.approx(run.tokens / run.seconds)


def test_a_fixed_k_commits_what_the_trace_accepted() -> None:
    """Replayed by hand: every round of a text takes what is accepted at its place, and one token more."""
    run = run_policy(replace(PHONE, duration_s=200.0), "model k=3", TEXTS)
    rounds = tokens = 0
    for text in TEXTS:
        position = 1  # the first round runs the prompt
        rounds += 1
        while position < text.tokens:
            drafted = min(3, text.tokens - position - 1)
            position += min(text.runs["model"].accepted[position], drafted) + 1
            rounds += 1
        tokens += position
    assert run.tokens / run.rounds == pytest.approx(tokens / rounds, rel=0.02)


def test_unpaced_policies_draw_what_they_like_and_paced_ones_keep_the_cap() -> None:
    capped = replace(BOARD, power_cap_w=5.5, duration_s=120.0, spread=0.0)
    free = run_policy(capped, "k=4 unpaced", TEXTS)
    held = run_policy(capped, "k=4", TEXTS)
    assert free.energy_j / free.seconds > 5.5 * 1.1
    assert held.energy_j / held.seconds <= 5.5 * 1.03
    assert held.tokens < free.tokens
    assert held.mean_k == pytest.approx(free.mean_k, abs=0.1)
    assert free.cap_violation > 0.1


def test_the_device_s_own_throttling_acts_on_all() -> None:
    hot = replace(PHONE, ambient_c=38.0, preheated_w=2.5, duration_s=120.0)
    assert min(point.clock_ratio for point in run_policy(hot, "k=4 unpaced", TEXTS).timeline) < 1.0
    assert min(point.clock_ratio for point in run_policy(hot, "governed", TEXTS).timeline) < 1.0


def test_time_over_the_limit_is_counted_by_true_temperatures() -> None:
    hot = replace(PHONE, ambient_c=38.0, preheated_w=2.5, duration_s=120.0)
    run = run_policy(hot, "k=4 unpaced", TEXTS)
    assert run.peak_over_c > 0
    assert 10 < run.over_limit_s <= 121
    assert max(point.case_c for point in run.timeline) <= run.peak_case_c + 1e-9
    cool = run_policy(replace(PHONE, ambient_c=10.0, duration_s=20.0), "plain", TEXTS)
    assert cool.over_limit_s == 0
    assert cool.peak_over_c < 0


@pytest.mark.parametrize("limit_c", [60.0, 110.0])
def test_the_scenario_s_own_limits_take_the_place_of_the_device_s(limit_c: float) -> None:
    device = load_device("snapdragon-8-gen3")
    profile = simulate.profile_of(replace(PHONE, temp_limit_c=limit_c, skin_limit_c=None), device)
    assert profile.temp_limit_c == limit_c
    assert profile.skin_limit_c == device.skin_limit_c


def test_a_prompt_that_ends_after_the_day_costs_only_what_lies_within_it() -> None:
    """Two seconds of a prompt that takes longer: seconds and joules are those of the two."""
    slow = [replace(text, prompt_tokens=900) for text in TEXTS]
    run = run_policy(replace(BOARD, duration_s=2.0), "plain", slow)
    longer = run_policy(replace(BOARD, duration_s=4.0), "plain", slow)
    assert run.seconds == pytest.approx(2.0)
    assert run.energy_j == pytest.approx(longer.energy_j / 2.0, rel=0.05)


def test_nothing_is_decoded_and_no_joule_counted_while_nobody_asks() -> None:
    resting = replace(PHONE, events=(Event(20.0, ask=False), Event(50.0, ask=True)), duration_s=60.0)
    run = run_policy(resting, "governed", TEXTS)
    assert run.seconds == pytest.approx(30.0, abs=4.0)
    quiet = [point for point in run.timeline if 26 < point.time_s < 49]
    assert len(quiet) > 15
    assert not any(point.tokens for point in quiet)
    assert max(point.power_w for point in quiet) < 1.5


def test_the_kind_of_text_follows_the_scenario() -> None:
    only = [text for text in TEXTS if text.category == "even"]
    run = run_policy(replace(PHONE, category="even"), "model k=2", TEXTS)
    assert run.tokens == run_policy(PHONE, "model k=2", only).tokens
    with pytest.raises(UsageError, match="no category 'poem'; known: even, odd"):
        run_policy(replace(PHONE, category="poem"), "plain", TEXTS)


def test_a_drafter_that_the_trace_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown drafter 'heads'; the trace has: lookup, model"):
        run_policy(PHONE, "heads k=2", TEXTS)


def test_the_worst_ten_seconds_decide_about_a_cap() -> None:
    steady = [(t / 10, 4.4 * t / 10) for t in range(1000)]
    assert cap_violation(steady, 4.0) == pytest.approx(0.1)
    assert cap_violation(steady, 5.0) == 0.0
    assert cap_violation(steady, None) == 0.0
    spike = [(t / 10, 4.0 * t / 10 + 10.0 * min(max(t / 10 - 50, 0), 5)) for t in range(1000)]
    assert cap_violation(spike, 4.0) == pytest.approx(10 * 5 / 10 / 4, rel=0.01)
    assert cap_violation(steady[:50], 4.0) == 0.0


def test_best_fixed_is_the_fixed_k_with_the_most_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "FIXED_K", (1, 3))
    monkeypatch.setattr(simulate, "fixed_rules", lambda names: fixed_rules(names, (1, 3)))
    short = replace(PHONE, duration_s=20.0)
    best, plain = compare(short, ["best-fixed", "plain"], TEXTS)
    each = [run_policy(short, rule, TEXTS) for rule in fixed_rules(["lookup", "model"], (1, 3))]
    assert len(each) == 6
    assert best.tokens == max(run.tokens for run in each)
    assert best.policy in {run.policy for run in each}
    assert plain.policy == "plain"


def test_a_fixed_k_that_breaks_the_limit_is_not_the_best() -> None:
    good = a_run(tokens=100)
    assert (
        max(
            [good, a_run(tokens=200, peak_over_c=2.0), a_run(tokens=300, cap_violation=0.1)],
            key=simulate._merit,
        )
        == good
    )


def a_run(**changes: Any) -> PolicyRun:
    run = PolicyRun("k=1", 100, 50.0, 10.0, 50.0, 40.0, -3.0, 0.0, 0.0, 1, 80.0, 1.0, 60)
    return replace(run, **changes)


@pytest.mark.parametrize(
    ("limits", "told"), [({}, "the limits of the device"), ({"temp_limit_c": 70.0}, "70 °C of silicon")]
)
def test_an_answer_without_a_policy_that_keeps_the_limits_names_them(limits: Any, told: str) -> None:
    day = Scenario(name="day", device="raspberry-pi-4", duration_s=20.0, **limits)
    found = headline(Simulation(day, "pi", (a_run(peak_over_c=5.0),), {}, "0.1"))
    assert found == f"SIMULATED: Over 20 s, nothing that was tried keeps within {told}."


def test_a_table_says_first_that_it_is_simulated() -> None:
    text = format_runs(PHONE, [a_run(), a_run(tokens=0, battery_percent=None, mean_k=None)])
    lines = text.splitlines()
    assert lines[0] == "SIMULATED: a phone, snapdragon-8-gen3, 1 minutes"
    assert "s over limit" in lines[1]
    assert len(lines) == 4
    assert a_run().to_dict()["simulated"] is True


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "acceptance.jsonl", TEXTS)


@pytest.fixture
def day(tmp_path: Path) -> str:
    path = tmp_path / "day.toml"
    path.write_text('name = "a short day"\ndevice = "mac-m2"\nduration_s = 20.0\n')
    return str(path)


def test_what_was_simulated_is_printed_even_if_it_cannot_be_kept(
    run_main: Callable[..., Any], trace: Path, day: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, simulation: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("outrider.power.report.simulation.write_trace", full)
    words = ["--scenario", day, "--acceptance", str(trace), "--policies", "plain"]
    code, text, err = run_main("simulate", *words, "-o", str(tmp_path / "out"))
    assert (code, "simulation.jsonl: No space left" in err) == (1, True)
    assert "SIMULATED: a short day" in text
    assert "plain" in text


def test_the_command_compares_policies(
    run_main: Callable[..., Any], trace: Path, day: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, text, _ = run_main(
        "simulate",
        "--scenario",
        day,
        "--acceptance",
        str(trace),
        "--policies",
        "plain,k=2,governed",
        "-o",
        str(out),
    )
    assert code == 0
    assert text.startswith("SIMULATED: a short day, mac-m2")
    assert len(text.splitlines()) == 5
    record = json.loads((out / "summary.json").read_text())
    assert (record["kind"], record["simulated"], record["schema_version"]) == ("simulation-summary", True, 1)
    assert [run["policy"] for run in record["runs"]] == ["plain", "k=2", "governed"]
    most = max(record["runs"], key=lambda run: run["tokens"])
    assert record["headline"].startswith("SIMULATED: ")
    assert f"{most['policy']} makes {most['tokens']:,} tokens" in record["headline"]
    lines = list(read_lines(out / "simulation.jsonl", "simulation"))
    points = [line for _, line in lines if line["record"] == "point" and line["policy"] == "plain"]
    assert len(points) > 15
    assert sum(point["tokens"] for point in points) <= record["runs"][0]["tokens"]
    assert lines[-1][1] == {"record": "end", "complete": True}
    page = (out / "report.html").read_text()
    assert page.count("<h2>The course of ") == 3
    assert all("SIMULATED" in title for title in re.findall("<h[12]>(.*?)</", page))
    assert not re.search(r"https?://|//[a-z]|url\(|@import|src=|href=|<script", page)
    ElementTree.fromstring(page.partition("<main>")[2].partition("</main>")[0].join(("<main>", "</main>")))
    code, text, _ = run_main(
        "simulate", "--scenario", day, "--acceptance", str(trace), "--policies", "plain", "--device",
        "raspberry-pi-5", "--json",
    )  # fmt: skip
    (run,) = json.loads(text)
    assert run["simulated"] is True
    assert run["tokens_per_s"] < record["runs"][0]["tokens_per_s"]
    assert "timeline" not in run


def test_results_that_are_there_are_replaced_only_when_asked(
    run_main: Callable[..., Any], trace: Path, day: str, tmp_path: Path
) -> None:
    (tmp_path / "simulation.jsonl").write_text("older")
    words = ["simulate", "--scenario", day, "--acceptance", str(trace), "--policies", "plain"]
    code, out, err = run_main(*words, "-o", str(tmp_path))
    assert (code, out) == (2, "")
    assert "simulation.jsonl exists already; choose another name, or give --overwrite" in err
    assert (tmp_path / "simulation.jsonl").read_text() == "older"
    assert run_main(*words, "-o", str(tmp_path), "--overwrite")[0] == 0
    assert read_lines(tmp_path / "simulation.jsonl", "simulation").header["simulated"] is True


def test_a_recorded_trace_takes_the_place_of_the_simulated_sensors(
    run_main: Callable[..., Any], trace: Path, day: str, tmp_path: Path
) -> None:
    words = ["--scenario", day, "--acceptance", str(trace), "--policies", "governed", "--json"]
    with TelemetryWriter(tmp_path / "hot.jsonl", {"thermal:cpu": 1.0}) as hot:
        for second in range(30):
            hot([Reading("thermal:cpu", "temperature", 96.0, "die", "instant", float(second))])
    _, cool, _ = run_main("simulate", *words)
    _, warm, _ = run_main(
        "simulate", *words, "--telemetry", str(tmp_path / "hot.jsonl"), "-o", str(tmp_path / "out")
    )
    (before,), (after,) = json.loads(cool), json.loads(warm)
    assert before["level_changes"] == 0 < after["level_changes"]
    assert after["tokens"] < before["tokens"]
    assert after["peak_c"] < 90.0  # the machine's own
    assert "the recorded trace hot.jsonl" in (tmp_path / "out" / "report.html").read_text()
    code, _, err = run_main("simulate", *words, "--telemetry", str(tmp_path / "none.jsonl"))
    assert (code, "none.jsonl" in err) == (2, True)


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (
            "skin_limit_c = 43.0",
            "skin_limit_c is 43, but Raspberry Pi 5 has no sensor of the case's temperature",
        ),
        ("battery_floor_percent = 20.0", "battery_floor_percent is 20, but Raspberry Pi 5 has no battery"),
    ],
)
def test_a_limit_that_no_sensor_of_the_device_tells_is_refused(
    run_main: Callable[..., Any], trace: Path, tmp_path: Path, limit: str, told: str
) -> None:
    path = tmp_path / "limited.toml"
    path.write_text(f'name = "limited"\ndevice = "raspberry-pi-5"\nduration_s = 20.0\n{limit}\n')
    code, text, err = run_main("simulate", "--scenario", str(path), "--acceptance", str(trace))
    assert (code, text) == (2, "")
    assert told in err
    words = ["--device", "snapdragon-8-gen3", "--policies", "plain"]
    assert run_main("simulate", "--scenario", str(path), "--acceptance", str(trace), *words)[0] == 0


def test_a_limit_of_the_case_is_kept_by_an_estimate_where_nothing_tells_heat() -> None:
    day = Scenario("d", "iphone-16-pro", 5.0, temp_limit_c=95.0, skin_limit_c=43.0, battery_floor_percent=9.0)
    assert run_policy(day, "plain", TEXTS).tokens > 0


@pytest.mark.parametrize(
    ("policies", "kept"),
    [("plain,k=2,governed", ["plain", "k=2"]), ("plain,k=2,best-fixed", ["plain", "k=2"])],
)
def test_ctrl_c_keeps_the_policies_that_are_finished(
    run_main: Callable[..., Any],
    trace: Path,
    day: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policies: str,
    kept: list[str],
) -> None:
    original, begun = simulate.run_policy, []

    def run(*arguments: Any, **options: Any) -> PolicyRun:
        begun.append(arguments)
        if len(begun) == (3 if "governed" in policies else 5):  # in the middle of best-fixed
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(simulate, "run_policy", run)
    words = ["--scenario", day, "--acceptance", str(trace), "--policies", policies, "-o", str(tmp_path)]
    code, text, err = run_main("simulate", *words)
    assert code == 130
    assert "Interrupted: partial, with 2 of 3 policies finished." in err
    record = json.loads((tmp_path / "summary.json").read_text())
    assert "interrupted; so far" in record["headline"]
    assert (record["partial"], [run["policy"] for run in record["runs"]]) == (True, kept)
    assert [line.split()[0] for line in text.splitlines()[2:]] == kept


def test_ctrl_c_before_any_policy_is_finished_writes_nothing(
    run_main: Callable[..., Any], trace: Path, day: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> PolicyRun:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "run_policy", run)
    words = ["--scenario", day, "--acceptance", str(trace), "-o", str(tmp_path / "out")]
    code, text, _ = run_main("simulate", *words)
    assert (code, text) == (130, "")
    assert not (tmp_path / "out").exists()


def test_the_command_records_acceptance_from_a_bundle(
    run_main: Callable[..., Any], float_bundle: Path, tmp_path: Path
) -> None:
    day = tmp_path / "moment.toml"  # a tiny model does hundreds of rounds a second
    day.write_text('device = "mac-m2"\nduration_s = 1.0\n')
    code, text, _ = run_main(
        "simulate",
        str(float_bundle),
        "--scenario",
        str(day),
        "--policies",
        "plain,model k=3",
        "-n",
        "16",
        "--threads",
        "1",
    )
    assert code == 0
    plain, model = (line.split() for line in text.splitlines()[2:])
    assert plain[0] == "plain"
    assert model[:2] == ["model", "k=3"]


def test_a_damaged_trace_is_named_by_line(run_main: Callable[..., Any], trace: Path, day: str) -> None:
    trace.write_text(trace.read_text()[:-20] + "\n")
    code, _, said = run_main("simulate", "--scenario", day, "--acceptance", str(trace))
    assert code == 1
    assert f"{trace}, line 5" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "plain,best"], "unknown policy 'best'"),
        (["--policies", ","], "--policies is ','; give at least one, such as governed"),
        (["--device", "toaster"], "unknown device 'toaster'"),
        (["--threads", "2"], "--threads concerns a bundle"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    run_main: Callable[..., Any], trace: Path, day: str, words: list[str], message: str
) -> None:
    code, _, said = run_main("simulate", "--scenario", day, "--acceptance", str(trace), *words)
    assert code == 2
    assert message in said


def test_texts_must_come_from_somewhere_and_from_one_place(
    run_main: Callable[..., Any], trace: Path, day: str, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").touch()
    for words in ([], [str(tmp_path), "--acceptance", str(trace)]):
        code, _, said = run_main("simulate", *words, "--scenario", day)
        assert code == 2
        assert "either a bundle or an acceptance trace" in said


def test_memory_pressure_takes_the_draft_model_and_gives_it_back() -> None:
    events = (Event(20.0, memory_taken_mb=6900.0), Event(60.0, memory_taken_mb=0.0))
    run = run_policy(replace(PHONE, duration_s=120.0, events=events), "model k=4", TEXTS)

    def drafted(begin_s: float, end_s: float) -> float:
        return sum(point.k or 0.0 for point in run.timeline if begin_s <= point.time_s < end_s)

    assert drafted(0.0, 20.0) > 0
    assert drafted(24.0, 60.0) == 0
    assert drafted(60.0 + Tuning().memory_return_s + 4.0, 120.0) > 0


def test_a_released_draft_costs_its_memory_and_the_time_to_load_it_again() -> None:
    device = load_device(PHONE.device)
    machine = Machine(device, jitter=0.0)
    rig = trace_rig(device, TEXTS, machine)
    drafter = rig.drafters["model"]
    assert isinstance(drafter, TraceDrafter)
    free_mb = machine.memory_available_mb
    drafter.release()
    drafter.release()
    assert machine.memory_available_mb == pytest.approx(free_mb + DRAFT_COST.resident_mb)
    with pytest.raises(BackendError, match="released"):
        drafter.propose([1], 4, Sampling(), np.random.default_rng(0))
    before_s, before_j = machine.elapsed_s, machine.energy_j
    drafter.restore()
    drafter.restore()
    assert machine.memory_available_mb == pytest.approx(free_mb)
    spent_s = machine.elapsed_s - before_s
    assert spent_s == pytest.approx(DRAFT_COST.resident_mb / LOAD_MB_PER_S)
    assert machine.energy_j - before_j == pytest.approx(spent_s * machine.static_w)
