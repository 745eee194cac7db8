"""A profile: what it sweeps, in what order, what it keeps when it is interrupted, and what joules it finds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.contracts import Clock, Reading, Sampling
from outrider.errors import UsageError
from outrider.power.energy import EnergyModel
from outrider.power.monitor import Monitor
from outrider.power.report.profile_trace import (
    ProfileError,
    ProfileTrace,
    ProfileWriter,
    RunEnergy,
    read_profile,
)
from outrider.power.report.summarise import summarise
from outrider.power.report.summary import read_summary
from outrider.power.sensors.system import System
from outrider.power.telemetry import TelemetryWriter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.planner import Planner
from outrider.runtime.profiling.profile import FILES, SETTLE_S, Cell, Options, cells_of, finish, profile
from outrider.runtime.profiling.provenance import merged, of_bundle, of_device, of_machine
from outrider.runtime.profiling.rig import PLAYED_BACK, Rig, Text, bundle_rig, host_rig, trace_rig
from outrider.runtime.profiling.run_meter import RunMeter, RunWork
from outrider.runtime.rounds import Request
from outrider.targets.device import load_device
from outrider.targets.fake import VirtualClock
from outrider.targets.model_cost import TARGET_COST
from outrider.targets.simulated import Machine
from tests.acceptance_texts import made_up_texts, write_texts
from tests.full_disk import FullDisk

TEXTS = made_up_texts()
SHORT = Options(ks=(2, "auto"), minutes=1.0, repeats=2, cool_down_s=300.0, idle_s=8.0, warm_up_s=3.0)


def rig(device: str = "jetson-orin-nano", seed: int = 0) -> Rig:
    known = load_device(device)
    machine = Machine(known, 25.0, seed)
    return replace(trace_rig(known, TEXTS, machine, seed=seed), provenance=of_device(known, 25.0, seed))


def swept(folder: Path, options: Options = SHORT, device: str = "jetson-orin-nano") -> ProfileTrace:
    return profile(rig(device), options, folder, "0.1")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> ProfileTrace:
    return swept(tmp_path_factory.mktemp("profile"))


def test_cells_are_plain_every_k_with_every_drafter_and_auto_for_every_objective() -> None:
    options = Options(ks=(0, 2, 4, "auto", 2), objectives=("latency", "energy"))
    found = cells_of(options, ["lookup", "model"])
    assert found == [
        Cell(0),
        Cell(2, "lookup"),
        Cell(2, "model"),
        Cell(4, "lookup"),
        Cell(4, "model"),
        Cell("auto", None, "latency"),
        Cell("auto", None, "energy"),
    ]
    assert cells_of(Options(ks=("auto",), drafters=("model",)), ["lookup", "model"])[1] == Cell(
        "auto", "model", "latency"
    )


def test_an_unknown_drafter_and_impossible_options_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown drafter 'heads'; this rig has: lookup"):
        cells_of(Options(drafters=("heads",)), ["lookup"])
    for wrong in ({"minutes": 0.0}, {"repeats": 0}, {"idle_s": -1.0}, {"ks": ()}):
        with pytest.raises(
            UsageError, match=next(iter(wrong)).rstrip("s") if "ks" in wrong else next(iter(wrong))
        ):
            Options(**wrong)  # type: ignore[arg-type]


def test_every_cell_runs_once_in_every_repetition_in_an_order_that_changes(trace: ProfileTrace) -> None:
    runs = [run for run in trace.runs if not run.warm_up]
    labels = [run.label for run in runs]
    cells = trace.header.settings.cells
    assert cells == ("plain", "lookup k=2", "model k=2", "any k=auto latency")
    assert Counter(labels) == dict.fromkeys(cells, 2)
    for repeat in range(2):
        assert {run.label for run in runs if run.repeat == repeat} == set(cells)
    assert labels != list(cells) * 2


def test_other_precisions_run_among_the_rest_and_are_told_apart(tmp_path: Path) -> None:
    known = load_device("jetson-orin-nano")
    machine = Machine(known, 25.0, 0)
    first = trace_rig(known, TEXTS, machine)
    heavy = trace_rig(known, TEXTS, machine, target_cost=replace(TARGET_COST, weight_bytes=4e9))
    options = replace(SHORT, ks=(2,), drafters=("lookup",), minutes=0.4)
    found = profile(first, options, tmp_path, "0.1", precisions={"fp16 target": heavy})
    cells = ("plain", "lookup k=2", "plain, fp16 target", "lookup k=2, fp16 target")
    runs = [run.label for run in found.runs if not run.warm_up]
    assert Counter(runs) == dict.fromkeys(cells, 2)
    assert runs != list(cells) * 2
    summary = finish(found, tmp_path)
    rates = {cell.label: cell.tokens_per_s.mean for cell in summary.cells}
    assert list(rates) == list(cells)
    assert rates["plain, fp16 target"] < 0.6 * rates["plain"]
    slow = next(cell for cell in summary.cells if cell.label == "plain, fp16 target")
    assert slow.precision == "fp16 target"
    assert slow.speedup is not None
    assert slow.speedup.mean == pytest.approx(rates["plain, fp16 target"] / rates["plain"], rel=0.02)
    costs = [sweep_costs(found, label) for label in ("plain", "plain, fp16 target")]
    assert costs[1] > 1.5 * costs[0], "a planner of one precision knows nothing of another's rounds"


def sweep_costs(trace: ProfileTrace, label: str) -> float:
    """Mean seconds of a forward in the rounds of a setting."""
    numbers = {run.run for run in trace.runs if run.label == label and not run.warm_up}
    return float(np.mean([line.verify_s for line in trace.rounds if line.run in numbers]))


def test_a_precision_of_the_draft_concerns_what_the_draft_model_does() -> None:
    found = cells_of(Options(ks=(2, "auto")), ["lookup", "model"], ["int8 draft"])
    others = [(cell.drafter, cell.k) for cell in found if cell.precision]
    assert others == [("model", 2), (None, "auto")]


def test_the_same_seed_gives_the_same_trace_and_another_another_order(tmp_path: Path) -> None:
    quick = replace(SHORT, minutes=0.2, idle_s=0.0, cool_down_s=0.0)
    traces = [swept(tmp_path / str(i), replace(quick, seed=seed)) for i, seed in enumerate((0, 0, 1))]
    first, again = ((tmp_path / str(i) / "profile.jsonl").read_bytes() for i in range(2))
    assert first == again
    assert [r.label for r in traces[2].runs] != [r.label for r in traces[0].runs]


def test_runs_take_their_share_of_the_minutes_and_end_whole(trace: ProfileTrace) -> None:
    measured = [run for run in trace.runs if not run.warm_up]
    assert all(run.whole and run.tokens > 10 for run in measured)
    assert all(run.end_s - run.begin_s == pytest.approx(60 / 8, abs=0.5) for run in measured)
    assert trace.end is not None
    assert trace.end.complete


def test_a_run_begins_as_cool_as_the_profile_did(trace: ProfileTrace) -> None:
    start_c = trace.samples[0].hottest_c
    assert start_c is not None
    for run in trace.runs:
        if not run.warm_up:
            assert run.cooled is True
            assert run.start_c is not None
            assert run.start_c <= start_c + 2.0 + 1.0  # a degree of noise


def test_a_gate_that_times_out_is_told(tmp_path: Path) -> None:
    found = swept(tmp_path, replace(SHORT, minutes=2.0, cool_down_s=0.5, idle_s=0.0), "snapdragon-8-gen3")
    assert False in {run.cooled for run in found.runs}


def test_rounds_and_samples_are_those_of_their_runs(trace: ProfileTrace) -> None:
    for run in trace.runs:
        mine = [line for line in trace.rounds if line.run == run.run]
        assert sum(line.tokens for line in mine) == run.tokens
        assert len(mine) == run.rounds
        assert all(run.begin_s < line.time_s <= run.end_s + 1e-6 for line in mine)
        assert sum(line.seconds + line.pause_s for line in mine) == pytest.approx(run.decode_s, abs=1e-3)
    times = [sample.time_s for sample in trace.samples]
    assert times == sorted(times)
    assert max(b - a for a, b in pairwise(times)) < 2.5


def test_joules_of_a_run_are_what_the_machine_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the simulated machine's own count; the meter sees it through a sensor with steps and noise."""
    mine = rig("jetson-orin-nano")
    assert mine.machine is not None
    spent: list[float] = []
    begin, end = RunMeter.begin, RunMeter.end

    def begun(self: RunMeter) -> None:
        spent.append(mine.machine.energy_j)  # type: ignore[union-attr]
        begin(self)

    def ended(self: RunMeter, *arguments: Any, **named: Any) -> Any:
        spent[-1] = mine.machine.energy_j - spent[-1]  # type: ignore[union-attr]
        return end(self, *arguments, **named)

    monkeypatch.setattr(RunMeter, "begin", begun)
    monkeypatch.setattr(RunMeter, "end", ended)
    found = profile(mine, replace(SHORT, minutes=2.0, idle_s=0.0, warm_up_s=0.0), tmp_path, "0.1")
    assert len(spent) == len(found.runs) == 8
    for run, joules in zip(found.runs, spent, strict=True):
        assert run.energy is not None
        assert run.energy.gross_j == pytest.approx(joules, rel=0.03)
        assert run.energy.method == "simulated"
        assert run.energy.trust == "simulated"


def test_stages_share_the_whole_and_waste_is_a_part_of_them(trace: ProfileTrace) -> None:
    for run in trace.runs:
        if run.warm_up:
            continue
        assert run.energy is not None
        stages = dict(run.energy.stages)
        wasted_draft, wasted_verify = stages.pop("wasted_draft", 0.0), stages.pop("wasted_verify", 0.0)
        assert sum(stages.values()) == pytest.approx(run.energy.gross_j, rel=1e-4)
        assert 0 <= wasted_draft <= stages.get("draft", 0.0) + 1e-9
        assert 0 <= wasted_verify <= stages["verify"]
        assert set(run.energy.attribution) == set(stages)
    drafting = next(run for run in trace.runs if run.label == "model k=2" and not run.warm_up)
    assert drafting.energy is not None
    assert drafting.energy.stages["draft"] > 0
    assert drafting.energy.stages["wasted_draft"] > 0


def test_idle_is_measured_before_and_after_with_the_models_in_memory(trace: ProfileTrace) -> None:
    idle_w = float(load_device("jetson-orin-nano").idle_w)
    assert trace.end is not None
    assert trace.end.idle_before_w == pytest.approx(idle_w, rel=0.1)
    assert trace.end.idle_after_w == pytest.approx(idle_w, rel=0.15)
    cell = summarise(trace).cells[0]
    assert cell.net_j_per_token is not None
    assert cell.energy_j_per_token is not None
    assert 0 < cell.net_j_per_token.mean < cell.energy_j_per_token.mean


def test_a_cap_is_kept_by_every_setting_and_stands_in_the_answer(tmp_path: Path) -> None:
    options = replace(SHORT, minutes=2.0, power_cap_w=7.0, ks=(3, "auto"), drafters=("model",))
    free = summarise(swept(tmp_path / "free", replace(options, power_cap_w=None)))
    held = summarise(swept(tmp_path / "held", options))
    assert max(cell.power_w.mean for cell in free.cells if cell.power_w) > 7.0 * 1.03
    assert [cell.holds_cap for cell in held.cells] == [True] * 3
    assert held.headline.startswith("SIMULATED: Within 7 W this pair reaches ")
    assert "without speculation" in held.headline


def test_a_device_without_a_meter_has_no_joules_and_says_why(tmp_path: Path) -> None:
    summary = finish(swept(tmp_path, replace(SHORT, minutes=0.5), "raspberry-pi-4"), tmp_path)
    assert not summary.metered
    assert summary.error_budget is None
    assert "no power sensor" in summary.no_meter
    assert "J/token" not in (tmp_path / "report.html").read_text()


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    mine = rig()
    begun = 0

    def texts() -> Callable[[str | None], Text]:
        begin = original()

        def one(category: str | None) -> Text:
            nonlocal begun
            begun += 1
            if begun == 12:
                raise KeyboardInterrupt
            return begin(category)

        return one

    original = mine.texts
    mine.texts = texts
    found = profile(mine, SHORT, tmp_path, "0.1")
    assert found.partial
    assert found.end is not None
    assert found.end.reason == "interrupted"
    assert found.end.idle_before_w is not None
    assert found.runs[-1].whole is False
    summary = finish(found, tmp_path)
    assert summary.partial
    assert summary.headline.startswith("SIMULATED: Interrupted; so far: ")
    assert "Interrupted" in (tmp_path / "report.html").read_text()


def test_a_full_disk_ends_it_with_a_clear_error_and_a_readable_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    write = ProfileWriter.write

    def full(self: ProfileWriter, record: Any) -> None:
        nonlocal written
        written += 1
        if written == 400:
            self._file.close()
            self._file = FullDisk(10)
        write(self, record)

    monkeypatch.setattr(ProfileWriter, "write", full)
    with pytest.raises(ProfileError, match="No space left"):
        swept(tmp_path)
    found = read_profile(tmp_path / "profile.jsonl")
    assert found.partial
    assert len(found.samples) + len(found.rounds) + len(found.runs) == 399


def test_the_folder_holds_trace_summary_and_report(tmp_path: Path, trace: ProfileTrace) -> None:
    summary = finish(trace, tmp_path / "new" / "folder")
    assert read_summary(tmp_path / "new" / "folder" / "summary.json") == summary
    text = (tmp_path / "new" / "folder" / "report.html").read_text()
    assert text.count("<svg") == 2
    assert "SIMULATED" in text
    with pytest.raises(UsageError, match="cannot be made"):
        finish(trace, tmp_path / "new" / "folder" / "report.html")


def test_planners_start_from_costs_that_were_measured_before(trace: ProfileTrace) -> None:
    """The first rounds of an auto run would otherwise all be plain."""
    auto = [run.run for run in trace.runs if run.label.startswith("any k=auto") and not run.warm_up]
    first = [line for line in trace.rounds if line.run == auto[0]][:4]
    assert any(line.drafted for line in first)


@pytest.fixture
def pipeline(float_bundle: Path) -> Iterator[Any]:
    with outrider.load(float_bundle, threads=1, governor=False) as loaded:
        yield loaded


def test_a_simulated_device_decodes_the_bundle_s_own_text(pipeline: Any) -> None:
    known = load_device("raspberry-pi-5")
    machine = Machine(known, 25.0, 0)
    simulated = bundle_rig(known, pipeline, machine)
    text = simulated.texts()(None)
    request = Request(max_new_tokens=24, stop_ids=text.stop_ids, k=3, drafter="model")
    engine = simulated.engine(Planner(), None)
    tokens = [token for done in engine.decode(text.prompt, request) for token in done.tokens]
    pipeline.reset()
    expected = pipeline.generate(text.prompt, max_tokens=24, k=0).tokens
    assert tuple(tokens) == tuple(expected)
    assert machine.elapsed_s > 0


def test_a_simulated_bundle_s_draft_can_be_released_and_loaded_again(pipeline: Any) -> None:
    known = load_device("raspberry-pi-5")
    machine = Machine(known, 25.0, 0)
    empty_mb = machine.memory_available_mb
    simulated = bundle_rig(known, pipeline, machine)
    taken_mb = simulated.target_mb + simulated.draft_mb
    assert machine.memory_available_mb == pytest.approx(empty_mb - taken_mb)
    drafter = simulated.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    drafter.release()
    assert not drafter.loaded
    assert machine.memory_available_mb == pytest.approx(empty_mb - simulated.target_mb)
    before_s = machine.elapsed_s
    drafter.restore()
    assert machine.elapsed_s > before_s
    text = simulated.texts()(None)
    drafter.propose(text.prompt, 3, Sampling(), np.random.default_rng(0))
    assert drafter.graph.length >= len(text.prompt), "the real graph is still open"


class Timed:
    """A graph whose forward takes 5 ms of a virtual clock, so that no figure depends on the load of this machine."""

    def __init__(self, graph: Any, clock: VirtualClock) -> None:
        self._graph, self._clock = graph, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        self._clock.advance(0.005)
        return self._graph.forward(*arguments, **options)


def timed_rig(pipeline: Any, sensor: Callable[[VirtualClock], Any] | None = None) -> Rig:
    """A rig of this machine with a clock that forwards alone move; its own sensors, or one made for that clock."""
    clock, mine = VirtualClock(), host_rig(pipeline)
    monitor = mine.monitor if sensor is None else Monitor([sensor(clock)], clock, interval_s=0.02)
    target = Timed(pipeline.engine.target, clock)

    def sleep(seconds: float) -> None:
        steps = max(1, round(seconds / 0.02))
        for _ in range(steps):
            clock.advance(seconds / steps)
            monitor.poll()

    return replace(mine, target=target, monitor=monitor, clock=clock, sleep=sleep)


def test_a_real_machine_is_profiled_with_the_sensors_that_it_has(pipeline: Any, tmp_path: Path) -> None:
    mine = replace(timed_rig(pipeline), provenance=merged(of_machine(1), of_bundle(pipeline)))
    options = Options(ks=(2,), minutes=0.01, repeats=1, warm_up_s=0.0, cool_down_s=0.0, idle_s=0.0)
    with mine.monitor:
        found = profile(mine, options, tmp_path, "0.1")
    summary = finish(found, tmp_path)
    assert not summary.simulated
    assert "SIMULATED" not in (tmp_path / "report.html").read_text()
    assert [cell.label for cell in summary.cells] == ["plain", "lookup k=2", "model k=2"]
    assert found.end is not None
    assert found.end.sampler_share is not None
    assert found.header.provenance["target"].startswith("target, fp32, onnxruntime on CPU")


class Steady:
    """A power sensor that reads five watts, fifty times a second."""

    name = "steady"
    period_s = 0.02

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def read(self) -> list[Reading]:
        return [Reading("steady:in", "power", 5.0, "module", "instant", self.clock())]


class Quiet(Steady):
    """A power sensor that may not be read."""

    name = "quiet"

    def read(self) -> list[Reading]:
        why = "permission denied; sudo chmod a+r it"
        return [Reading("quiet:in", "power", None, "module", "instant", self.clock(), why)]


def test_a_real_meter_gives_joules_a_token(pipeline: Any, tmp_path: Path) -> None:
    mine = timed_rig(pipeline, Steady)
    options = Options(ks=(2,), drafters=("lookup",), minutes=0.03, repeats=1, warm_up_s=0.0, idle_s=0.4)
    summary = finish(profile(mine, options, tmp_path, "0.1"), tmp_path)
    for cell in summary.cells:
        assert cell.power_w is not None
        assert cell.energy_j_per_token is not None
        assert cell.power_w.mean == pytest.approx(5.0, rel=1e-6)
        assert cell.energy_j_per_token.mean == pytest.approx(5.0 / cell.tokens_per_s.mean, rel=0.02)
        assert cell.net_j_per_token is not None
        assert cell.net_j_per_token.mean == pytest.approx(0.0, abs=1e-6)
    assert summary.error_budget is not None
    assert summary.error_budget.trust == "module or device input"
    assert summary.headline.startswith("This pair reaches ")


def test_joules_of_a_recorded_trace_are_said_to_be_its_own(pipeline: Any, tmp_path: Path) -> None:
    with TelemetryWriter(tmp_path / "old.jsonl", {"steady:in": 0.02}) as writer:
        for step in range(2000):
            writer([Reading("steady:in", "power", 7.0, "module", "instant", 0.02 * step)])
    mine = timed_rig(pipeline, Quiet)
    played = mine.played_back(tmp_path / "old.jsonl")
    mine.monitor = played.monitor  # what its pauses look at
    options = Options(ks=(0,), minutes=0.03, repeats=1, warm_up_s=0.0, idle_s=0.0)
    summary = finish(profile(played, options, tmp_path, "0.1"), tmp_path)
    (cell,) = summary.cells
    assert cell.power_w is not None
    assert cell.power_w.mean == pytest.approx(7.0)
    assert summary.error_budget is not None
    assert summary.error_budget.method == "replayed"
    assert summary.provenance["telemetry"].startswith("played back from old.jsonl")
    assert PLAYED_BACK in summary.notes
    assert "read from a recorded trace" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (
            {"power_cap_w": 6.0},
            r"power_cap_w is 6, but nothing here tells power \(quiet:in: permission denied",
        ),
        ({"temp_limit_c": 70.0}, r"temp_limit_c is 70, but nothing here tells temperature; leave it out"),
    ],
)
def test_a_limit_that_nothing_here_measures_is_refused_as_generate_does(
    pipeline: Any, tmp_path: Path, limit: dict[str, float], told: str
) -> None:
    mine = timed_rig(pipeline, Quiet)
    with pytest.raises(UsageError, match=told):
        profile(mine, replace(SHORT, **limit), tmp_path / "out", "0.1")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists(), "nothing is begun"
    assert mine.clock() == pytest.approx(SETTLE_S, abs=0.2), "a sensor gets this long to speak"


def test_a_cap_is_taken_where_power_is_measured(pipeline: Any, tmp_path: Path) -> None:
    mine = timed_rig(pipeline, Steady)
    options = Options(ks=(0,), minutes=0.005, repeats=1, warm_up_s=0.0, idle_s=0.0, power_cap_w=6.0)
    assert profile(mine, options, tmp_path, "0.1").header.settings.power_cap_w == 6.0


def test_a_rest_that_was_measured_is_no_reason_to_be_silent_about_runs_that_were_not() -> None:
    clock = VirtualClock()
    monitor = SimpleNamespace(listeners=[], periods={"slow:in": 1.0}, interval_s=1.0)
    rig = SimpleNamespace(clock=clock, monitor=monitor, rest=lambda s: (), energy_model=EnergyModel())
    meter = RunMeter(rig)  # type: ignore[arg-type]

    def window(seconds: float, heard_s: float, **options: Any) -> RunEnergy | None:
        meter.begin()
        begin = clock()
        for i in range(int(heard_s * 10) + 1):
            monitor.listeners[0]([Reading("slow:in", "power", 5.0, "module", "instant", begin + i / 10)])
        clock.advance(seconds)
        return meter.end(**options)

    assert window(10.0, 10.0) is not None, "the idle baseline"
    assert meter.why_none() == ""
    assert window(20.0, 1.0, work=RunWork()) is None
    assert window(10.0, 10.0, work=RunWork(), warm_up=True) is not None
    assert meter.why_none().startswith("slow:in covers only "), meter.why_none()
    assert window(10.0, 10.0, work=RunWork()) is not None
    assert meter.why_none() == ""


def test_without_a_bound_nothing_but_the_device_holds_a_setting_back(tmp_path: Path) -> None:
    hot = replace(SHORT, ks=(4,), drafters=("model",), minutes=8.0, repeats=1, cool_down_s=0.0)
    free = swept(tmp_path / "free", hot, "snapdragon-8-gen3")
    assert not any(line.pause_s for line in free.rounds)
    assert min(sample.clock_ratio or 1.0 for sample in free.samples) < 1.0
    bound = swept(tmp_path / "bound", replace(hot, temp_limit_c=41.0), "snapdragon-8-gen3")
    assert sum(line.pause_s for line in bound.rounds) > 10
    summary = summarise(free)
    assert summary.cells[1].throttled_after_s or summary.cells[0].throttled_after_s


def test_provenance_names_models_by_hash_and_neither_paths_nor_what_is_unknown(
    pipeline: Any, tmp_path: Path
) -> None:
    found = merged(of_machine(2, System(root=tmp_path)), of_bundle(pipeline))
    assert len(found["target sha256"].split()[0]) == 64
    assert found["threads"] == "2"
    assert "clock governor" not in found
    assert "board" not in found
    assert "unknown" not in found.values()


def test_the_command_profiles_a_simulated_device(run_main: Callable[..., Any], tmp_path: Path) -> None:
    acceptance = write_texts(tmp_path / "acceptance.jsonl", TEXTS)
    words = ["profile", "--device", "jetson-orin-nano", "--acceptance", str(acceptance), "--minutes", "0.6"]
    words += ["--repeats", "1", "--k", "2", "--drafter", "lookup", "-o", str(tmp_path / "out")]
    code, text, _ = run_main(*words)
    assert code == 0
    assert text.startswith("SIMULATED: This pair reaches ")
    assert "J/token" in text
    assert all((tmp_path / "out" / name).is_file() for name in FILES)
    trace = tmp_path / "out" / "profile.jsonl"
    measured = trace.read_bytes()
    code, _, said = run_main(*words)
    assert code == 2
    assert f"{trace} exists already; choose another name, or give --overwrite" in said
    assert trace.read_bytes() == measured
    for name in ("report.html", "summary.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("older")
        code, _, said = run_main(*words[:-1], str(tmp_path / name))
        assert (code, f"{name} exists already" in said) == (2, True)
    code, text, _ = run_main(*words, "--json", "--overwrite")
    assert json.loads(text)["simulated"] is True
    code, text, _ = run_main(
        "profile", "--trace", str(tmp_path / "out" / "profile.jsonl"), "-o", str(tmp_path / "b")
    )
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["report.html", "summary.json"]
    assert run_main("profile", "--trace", str(trace), "-o", str(trace.parent))[0] == 0, "it is its own report"
    other = tmp_path / "other.jsonl"
    other.write_bytes(trace.read_bytes())
    code, _, said = run_main("profile", "--trace", str(other), "-o", str(trace.parent))
    assert (code, "exists already" in said) == (2, True), "a report must not lie beside another run's trace"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a bundle, or an acceptance trace"),
        (["--acceptance", "A"], "can only be simulated; name a device"),
        (["--acceptance", "A", "--device", "toaster"], "unknown device 'toaster'"),
        (["--acceptance", "A", "--device", "mac-m1", "--no-draft"], "--no-draft concerns a bundle"),
        (["--acceptance", "A", "--device", "mac-m1", "--k", "x"], "k is 'x'"),
        (["--acceptance", "A", "--device", "mac-m1", "--drafter", "heads"], "unknown drafter 'heads'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    run_main: Callable[..., Any], tmp_path: Path, words: list[str], message: str
) -> None:
    acceptance = write_texts(tmp_path / "a.jsonl", TEXTS)
    code, _, said = run_main("profile", *(str(acceptance) if word == "A" else word for word in words))
    assert code == 2
    assert message in said


def test_a_bundle_and_an_acceptance_trace_exclude_each_other(
    run_main: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("manifest.json", "x"):
        (tmp_path / name).touch()
    words = (str(tmp_path), "--acceptance", str(tmp_path / "x"), "--device", "mac-m1")
    code, _, said = run_main("profile", *words)
    assert code == 2
    assert "not both" in said


@pytest.mark.parametrize(
    "limit", [{"power_cap_w": float("nan")}, {"power_cap_w": 0.0}, {"temp_limit_c": -5.0}]
)
def test_a_limit_that_cannot_be_kept_is_refused_before_anything_is_measured(limit: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(limit))} is"):
        Options(**limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("ambient_c", [float("nan"), 1e9, -300.0])
def test_no_device_is_simulated_in_air_that_cannot_be(ambient_c: float) -> None:
    with pytest.raises(UsageError, match=r"ambient is .* between -40 and 70"):
        Machine(load_device("raspberry-pi-5"), ambient_c)


def test_prompts_longer_than_three_periods_of_the_power_sensor_do_not_cost_the_joules(tmp_path: Path) -> None:
    long = [replace(text, prompt_tokens=400) for text in TEXTS]  # some 6 s of prompt on this board
    known = load_device("raspberry-pi-5")
    slow = trace_rig(known, long, Machine(known, 25.0, 0))
    trace = profile(slow, Options(ks=(0,), minutes=1.0, repeats=1, idle_s=8.0), tmp_path, "test")
    (run,) = [run for run in trace.runs if not run.warm_up]
    assert run.prefill_s / run.texts > 3.0
    assert run.energy is not None
    assert run.energy.coverage > 0.98
    assert run.energy.gross_j == pytest.approx(6.0 * (run.end_s - run.begin_s), rel=0.3)
