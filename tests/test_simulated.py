"""The simulated device keeps its books, throttles, is fixed by its seed, and shows only what the real one has."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Sampling
from outrider.errors import ContextError, UsageError
from outrider.manifest import FileEntry, GraphEntry, KvEntry
from outrider.power.monitor import Monitor
from outrider.power.sensors.simulated import Simulated, simulated_sensors
from outrider.runtime.rounds import Engine, Request
from outrider.targets.device import DEVICES, figures_of, load_device
from outrider.targets.fake import FakeDrafter, FakeGraph, VirtualClock, random_logits
from outrider.targets.physics import Temperatures, Work, dynamic_power, roofline_time, stored_heat
from outrider.targets.scenario import SCENARIOS, Event, Scenario, load_scenario, read_scenario
from outrider.targets.simulated import (
    DRAFT_COST,
    TARGET_COST,
    Machine,
    ModelCost,
    SimulatedGraph,
    model_cost,
    perturbed,
)
from outrider.targets.trace_model import (
    WRONG,
    Stage,
    TraceDrafter,
    TraceRun,
    TraceTarget,
    TraceText,
    cycle,
    read_acceptance,
)

PI = "raspberry-pi-5"
PHONE = "snapdragon-8-gen3"
STEP = Work(1e9, 3e9)


def machine(slug: str = PI, **options: object) -> Machine:
    return Machine(load_device(slug), **{"jitter": 0.0, **options})  # type: ignore[arg-type]


def run_of(right: Iterable[bool], kind: bool = False) -> TraceRun:
    """A drafter that always drafts 15 tokens, of which those before the first wrong one count."""
    hits = list(right)
    drafted = [min(15, len(hits) - i) for i in range(len(hits))]
    accepted = [next((j for j in range(n) if not hits[i + j]), n) for i, n in enumerate(drafted)]
    kinds = tuple("4" if i % 3 else None for i in range(len(hits))) if kind else None
    return TraceRun(tuple(drafted), tuple(accepted), kinds)


def texts_of(category: str, rate: float, count: int = 4, tokens: int = 96, seed: int = 0) -> list[TraceText]:
    rng = random.Random(seed)
    return [
        TraceText(
            category,
            60 + 10 * i,
            tokens,
            {
                "model": run_of([rng.random() < rate for _ in range(tokens)]),
                "lookup": run_of([rng.random() < rate / 2 for _ in range(tokens)], kind=True),
            },
        )
        for i in range(count)
    ]


TEXTS = texts_of("prose", 0.45) + texts_of("code", 0.7, seed=1) + texts_of("edit", 0.92, seed=2)


class Rig:
    """The real engine over a simulated device and a trace."""

    def __init__(self, slug: str = PI, texts: list[TraceText] = TEXTS, **options: object) -> None:
        self.machine = machine(slug, **options)
        self.stage, self.texts, self.tokens = Stage(), texts, 0
        drafters = {
            "lookup": TraceDrafter("lookup", self.stage),
            "model": TraceDrafter("model", self.stage, self.machine, DRAFT_COST),
        }
        target = SimulatedGraph(TraceTarget(self.stage), self.machine, TARGET_COST)
        self.engine = Engine(target, drafters, clock=self.machine.clock)

    def decode(self, text: TraceText, **request: object) -> list[int]:
        prompt = self.stage.begin(text)
        wanted = Request(max_new_tokens=text.tokens, **request)  # type: ignore[arg-type]
        out = [token for round_ in self.engine.decode(prompt, wanted) for token in round_.tokens]
        self.tokens += len(out)
        return out

    def decode_for(self, seconds: float, category: str | None = None, **request: object) -> None:
        source = cycle(self.texts, category)
        while self.machine.elapsed_s < seconds:
            self.decode(next(source), **request)


def test_work_takes_the_time_and_energy_of_the_physics() -> None:
    m = machine()
    rates = m.rates("cpu", "int8")
    seconds = m.execute("cpu", STEP, "int8")
    assert seconds == pytest.approx(roofline_time(STEP, rates))
    assert m.clock() == pytest.approx(seconds)
    assert m.energy_j == pytest.approx(seconds * (m.static_w + dynamic_power(STEP, seconds, rates)))


def test_rest_costs_idle_power() -> None:
    m = machine()
    m.idle(100.0)
    assert m.elapsed_s == pytest.approx(100.0)
    assert m.energy_j == pytest.approx(100.0 * m.idle_w)
    assert m.busy_s == 0.0


def test_a_device_at_rest_stays_where_it_began() -> None:
    m = machine(ambient_c=22.0)
    before = m.temperatures
    m.idle(1000.0)
    assert m.temperatures.die_c == pytest.approx(before.die_c, abs=1e-6)


def test_all_energy_is_heat_that_is_stored_or_shed() -> None:
    m, shed_j = machine(PHONE), 0.0
    start = stored_heat(m.network, m.temperatures, 25.0)
    for i in range(3000):
        case, began = m.temperatures.case_c, m.clock()
        m.idle(0.03) if i % 3 == 0 else m.execute(None, STEP)
        shed_j += (m.clock() - began) * ((case + m.temperatures.case_c) / 2 - 25.0) / m.network.case_c_per_w
    stored_j = stored_heat(m.network, m.temperatures, 25.0) - start
    assert stored_j + shed_j == pytest.approx(m.energy_j, rel=1e-5)


def test_long_work_throttles_while_it_runs() -> None:
    m = machine(ambient_c=38.0)
    once = m.execute("cpu", Work(1e9, 60e9))
    m.execute("cpu", Work(400e9, 60_000e9))
    assert m.level > 0
    assert m.clock_ratio < 1.0
    assert m.execute("cpu", Work(1e9, 60e9)) > 1.2 * once


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.floats(0.001, 3.0), min_size=1, max_size=12))
def test_cutting_rest_into_pieces_changes_nothing(seed: int, cuts: list[float]) -> None:
    whole, pieces = machine(preheated_w=9.0, seed=seed), machine(preheated_w=9.0, seed=seed)
    whole.idle(sum(cuts))
    for seconds in cuts:
        pieces.idle(seconds)
    assert pieces.temperatures.die_c == pytest.approx(whole.temperatures.die_c, abs=1e-6)
    assert pieces.energy_j == pytest.approx(whole.energy_j)
    assert pieces.level == whole.level


def test_time_that_others_let_pass_counts_as_rest() -> None:
    m = machine()
    m.clock.advance(50.0)
    m.catch_up()
    assert m.energy_j == pytest.approx(50.0 * m.idle_w)
    assert m.clock() == pytest.approx(50.0)


def test_a_machine_may_begin_late_on_a_shared_clock() -> None:
    m = machine(clock=VirtualClock(1000.0), events=(Event(10.0, load_w=2.0),))
    m.idle(9.0)
    assert m.load_w == 0.0
    m.idle(2.0)
    assert m.load_w == 2.0
    assert m.elapsed_s == pytest.approx(11.0)


def test_an_event_comes_at_its_time_in_the_midst_of_work() -> None:
    m = machine(events=(Event(5.0, load_w=3.0, bandwidth_taken=0.5), Event(8.0, ambient_c=40.0)))
    free = machine()
    assert m.execute("cpu", Work(100e9, 1e9)) > free.execute("cpu", Work(100e9, 1e9))
    assert (m.load_w, m.bandwidth_taken, m.ambient_c) == (3.0, 0.5, 40.0)
    half_s = 5.0 + 2 * (free.clock() - 5.0)
    assert m.clock() == pytest.approx(half_s, rel=1e-3)


def test_a_battery_drains_by_what_is_drawn_and_fills_on_the_charger() -> None:
    m = machine(PHONE, battery=50.0, events=(Event(100.0, charge_w=20.0), Event(200.0, charge_w=0.0)))
    capacity_j = 3600.0 * m.device.battery_wh
    m.idle(100.0)
    assert m.battery == pytest.approx(50.0 - 100.0 * 100.0 * m.idle_w / capacity_j)
    low = m.battery
    m.idle(100.0)
    assert low is not None
    assert m.battery > low
    assert machine(PI).battery is None


def test_charging_warms_the_case() -> None:
    plain, charged = machine(PHONE), machine(PHONE, events=(Event(0.0, charge_w=15.0),))
    for m in (plain, charged):
        m.idle(600.0)
    assert charged.temperatures.case_c > plain.temperatures.case_c + 2.0


def test_models_and_other_apps_take_memory() -> None:
    m = machine(events=(Event(10.0, memory_taken_mb=2000.0, memory_pressure_percent=12.0),))
    free = m.memory_available_mb
    m.hold("draft", 658.0)
    assert m.memory_available_mb == pytest.approx(free - 658.0)
    m.idle(11.0)
    assert m.memory_available_mb == pytest.approx(free - 2658.0)
    assert m.memory_pressure_percent == 12.0
    m.release("draft")
    m.release("draft")
    assert m.memory_available_mb == pytest.approx(free - 2000.0)


def test_one_seed_gives_one_run_and_another_gives_another() -> None:
    def record(seed: int) -> tuple[float, float, float]:
        rig = Rig(seed=seed, jitter=0.02)
        rig.decode_for(60.0, k="auto")
        return rig.machine.clock(), rig.machine.energy_j, rig.machine.temperatures.die_c

    assert record(1) == record(1)
    assert record(1) != record(2)


def test_a_machine_refuses_a_unit_that_it_has_not() -> None:
    with pytest.raises(UsageError, match="no unit 'npu'; known: cpu"):
        machine().execute("npu", STEP)


def test_a_specimen_differs_within_the_spread_and_only_where_hardware_does() -> None:
    nominal, one = figures_of(load_device(PHONE)), figures_of(perturbed(load_device(PHONE), 7, 0.15))
    changed = {place for place in nominal if nominal[place] != one[place]}
    assert {
        "units.cpu.bandwidth_gb_s",
        "thermal.case_c_per_w",
        "power.static_w",
        "units.cpu.pj_per_op",
    } <= changed
    assert not changed & {"thermal.skin_limit_c", "throttle.trips[0].at_c", "battery.capacity_wh"}
    ratios = [float(one[p]) / float(nominal[p]) for p in changed]  # type: ignore[arg-type]
    assert all(0.85 <= ratio <= 1.15 for ratio in ratios)
    assert max(ratios) - min(ratios) > 0.1
    assert {one[place].source for place in changed} == {"simulated specimen 7"}


def test_a_specimen_is_fixed_by_its_seed() -> None:
    device = load_device(PHONE)
    assert figures_of(perturbed(device, 3)) == figures_of(perturbed(device, 3))
    assert figures_of(perturbed(device, 3)) != figures_of(perturbed(device, 4))
    assert figures_of(perturbed(device, 3, 0.0)) == figures_of(device)
    with pytest.raises(UsageError, match=r"spread is 1\.5"):
        perturbed(device, 3, 1.5)


def test_a_simulated_graph_gives_the_tokens_of_the_real_one() -> None:
    logits = random_logits(32)
    plain = Engine(FakeGraph(32, logits=logits))
    m = machine()
    graph = SimulatedGraph(FakeGraph(32, logits=logits), m, TARGET_COST)
    spec = Engine(graph, {"fake": FakeDrafter(logits)}, clock=m.clock)
    wanted = [t for r in plain.decode([1, 2, 3], Request(max_new_tokens=40, k=0)) for t in r.tokens]
    assert [t for r in spec.decode([1, 2, 3], Request(max_new_tokens=40, k=4)) for t in r.tokens] == wanted
    assert m.clock() > 0.0


def test_a_forward_costs_as_its_compiled_width_and_its_cache() -> None:
    m, cost = machine(), ModelCost(1e6, 1e9, kv_bytes=1e7)
    graph = SimulatedGraph(FakeGraph(32, widths=(1, 4, 8)), m, cost)

    def seconds(width: int) -> float:
        began = m.clock()
        graph.forward([1] * width)
        return m.clock() - began

    assert seconds(3) == pytest.approx(seconds(4))
    assert seconds(5) > seconds(4)
    graph.forward([1] * 8)
    before = cost.work(8, graph.length).bytes
    graph.commit(range(8))
    assert cost.work(8, graph.length).bytes == before + 8e7


def test_the_cost_of_a_graph_comes_from_its_manifest() -> None:
    files = {"t/graph.onnx": FileEntry("0" * 64, 1000), "t/graph.onnx.data": FileEntry("0" * 64, 9_000_000)}
    kv = KvEntry("float32", "BHSD", 28, 2, 128)
    entry = GraphEntry("onnxruntime", "cpu", "inplace", files, None, 512, kv, 2048, 100, "int4")
    cost = model_cost(entry)
    assert cost.weight_bytes == 9_001_000
    assert cost.kv_bytes == TARGET_COST.kv_bytes
    assert cost.ops == pytest.approx(2 * 9_001_000 * 8 / 4.5)
    with pytest.raises(UsageError, match="recipe 'ternary'; known: int4"):
        model_cost(dataclasses.replace(entry, recipe="ternary"))


@pytest.mark.parametrize("k", [0, 1, 4, 15, "auto"])
def test_no_plan_changes_the_text(k: int | str) -> None:
    rig = Rig()
    for text in TEXTS:
        assert rig.decode(text, k=k) == [i % 3 for i in range(text.tokens)]


@pytest.mark.parametrize("k", [1, 3, 15])
def test_every_round_commits_what_the_trace_says_at_its_position(k: int) -> None:
    rig, text = Rig(), TEXTS[4]
    prompt, position = rig.stage.begin(text), 0
    request = Request(max_new_tokens=text.tokens, k=k, drafter="model")
    for round_ in rig.engine.decode(prompt, request):
        if position > 0 and round_.finish_reason is None:
            drafted = min(k, text.runs["model"].drafted[position], text.tokens - position - 1)
            assert round_.drafted == drafted
            assert round_.accepted == min(drafted, text.runs["model"].accepted[position])
        position += len(round_.tokens)
    assert position == text.tokens


def test_a_lookup_without_a_match_has_no_proposal() -> None:
    rig, text = Rig(), TEXTS[0]
    context = rig.stage.begin(text)
    drafter = rig.engine.drafters["lookup"]
    assert [drafter.kind([*context, *range(i)]) for i in range(4)] == [None, "4", "4", None]  # type: ignore[attr-defined]
    assert rig.engine.drafters["model"].kind(context) == ""  # type: ignore[attr-defined]


def test_a_draft_model_costs_a_forward_a_token_and_one_more_at_low_confidence() -> None:
    text = TraceText("x", 4, 8, {"model": TraceRun((2,) * 7 + (0,), (1,) * 7 + (0,))})
    stage, m = Stage(), machine()
    drafter = TraceDrafter("model", stage, m, ModelCost(1e9, 0.0))
    context = stage.begin(text)

    def forwards(tokens: int, k: int) -> int:
        began = m.clock()
        drafter.propose([*context, *range(tokens)], k, Sampling(), np.random.default_rng(0))
        return round((m.clock() - began) / roofline_time(Work(1e9, 0.0), m.rates()))

    assert [forwards(0, 1), forwards(1, 2), forwards(1, 3), forwards(1, 9), forwards(7, 3)] == [1, 2, 3, 3, 1]


def test_a_draft_model_runs_what_it_has_not_seen() -> None:
    text = TraceText("x", 10, 20, {"model": TraceRun((4,) * 20, (4,) * 16 + (0,) * 4)})
    stage, m = Stage(), machine()
    drafter = TraceDrafter("model", stage, m, DRAFT_COST)
    context = stage.begin(text)
    assert drafter.backlog(context) == 10
    assert drafter.propose(context, 4, Sampling(), np.random.default_rng(0)).tokens.tolist() == [0, 1, 2, 0]
    context += [0, 1, 2, 0, 1]  # all four, and the bonus token
    assert drafter.backlog(context) == 2  # the last draft was never run, nor the bonus
    context[10:] = [0] * 16
    drafter.propose(context, 4, Sampling(), np.random.default_rng(0))
    context += [1]  # nothing was right
    assert drafter.backlog(context) == 1
    assert TraceDrafter("lookup", stage).backlog(context) == 0
    drafter.reset()
    assert drafter.backlog(context) == len(context)


def test_two_prompts_in_a_row_share_no_prefix_so_that_each_is_prefilled() -> None:
    rig = Rig()
    rig.decode(TEXTS[0], k=0)
    prompt = rig.stage.begin(TEXTS[0])
    began = rig.machine.clock()
    next(rig.engine.decode(prompt, Request(max_new_tokens=4, k=0)))
    full = roofline_time(TARGET_COST.work(len(prompt), 0), rig.machine.rates())
    assert rig.machine.clock() - began == pytest.approx(full)


def test_wrong_drafts_are_the_token_that_the_target_never_chooses() -> None:
    stage = Stage()
    stage.begin(TraceText("x", 2, 6, {"model": TraceRun((3,) * 6, (1,) * 6)}))
    drafter = TraceDrafter("model", stage)
    tokens = drafter.propose([0, 3, 0], 3, Sampling(), np.random.default_rng(0)).tokens
    assert tokens.tolist() == [1, WRONG, WRONG]


def test_the_stand_in_refuses_what_a_trace_cannot_say() -> None:
    stage = Stage()
    target = TraceTarget(stage, max_context=8)
    with pytest.raises(UsageError, match="no text has begun"):
        target.forward([1])
    stage.begin(TEXTS[0])
    with pytest.raises(UsageError, match="chains only"):
        target.forward([1], mask=np.ones((1, 1), np.bool_))
    with pytest.raises(ContextError, match="exceed the context of 8"):
        target.forward([1] * 9)
    with pytest.raises(UsageError, match="no drafter 'heads'; known: model, lookup"):
        TraceDrafter("heads", stage).kind([0])
    with pytest.raises(UsageError, match="needs both a machine and a cost"):
        TraceDrafter("model", stage, machine())
    with pytest.raises(UsageError, match="no category 'poems'; known: code, edit, prose"):
        next(cycle(TEXTS, "poems"))


def write_trace(path: Path, texts: list[TraceText]) -> Path:
    lines: list[object] = [{"schema_version": 1, "kind": "acceptance"}]
    lines += [dataclasses.asdict(text) for text in texts]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def test_an_acceptance_trace_is_read_back(tmp_path: Path) -> None:
    assert read_acceptance(write_trace(tmp_path / "a.jsonl", TEXTS)) == TEXTS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "decode", "schema_version": 1}', r"line 1: kind and schema_version are \('decode', 1\)"),
        ("{", "line 1: "),
        ("[]", "line 1: "),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_acceptance(path)


def test_a_faulty_record_names_its_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.jsonl", TEXTS[:1])
    text = path.read_text()
    path.write_text(text.replace('"tokens": 96', '"tokens": 97'), encoding="utf-8")
    with pytest.raises(
        UsageError, match=r"a\.jsonl, line 2: run 'model' has \[96\] positions; the text has 97"
    ):
        read_acceptance(path)
    path.write_text(text.replace('"category"', '"kategory"'), encoding="utf-8")
    with pytest.raises(UsageError, match="line 2: 'category' is missing"):
        read_acceptance(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_acceptance(tmp_path / "none.jsonl")
    write_trace(path, [])
    with pytest.raises(UsageError, match="holds no text"):
        read_acceptance(path)


def test_a_hot_phone_slows_down() -> None:
    cool, hot = Rig(PHONE, ambient_c=10.0), Rig(PHONE, ambient_c=38.0)
    for rig in (cool, hot):
        rig.decode_for(300.0, k=0)
    assert hot.machine.level > 0
    assert hot.tokens < 0.8 * cool.tokens
    assert hot.machine.peak.case_c > 43.0


def test_speculation_pays_where_drafts_are_right_and_not_where_they_are_wrong() -> None:
    def tokens(category: str, k: int) -> int:
        rig = Rig("jetson-orin-nano")
        rig.decode_for(60.0, category, k=k, drafter="model" if k else None)
        return rig.tokens

    assert tokens("edit", 4) > 1.2 * tokens("edit", 0)
    assert tokens("prose", 4) < tokens("prose", 0)


@pytest.mark.parametrize("slug", DEVICES)
def test_a_device_shows_what_the_real_one_has_and_calls_it_simulated(slug: str) -> None:
    m = machine(slug)
    sensor = Simulated(m)
    sensor.read()
    m.idle(10.0)
    readings = sensor.read()
    assert {reading.method for reading in readings} == {"simulated"}
    assert all(reading.value is not None or reading.reason for reading in readings)
    shown = {reading.quantity for reading in readings if reading.value is not None}
    sensors = m.device.sensors
    assert ("power" in shown) == (m.device.meter != "none")
    assert ("headroom" in shown) == (sensors.headroom is not None)
    assert ("temperature" in shown) == (sensors.die is not None or sensors.skin is not None)
    assert ("clock" in shown) == sensors.clocks
    assert ("battery" in shown) == (m.device.battery is not None)


def value(readings: Iterable[object], quantity: str, scope: str | None = None) -> float | None:
    for r in readings:
        if r.quantity == quantity and scope in (None, r.scope):  # type: ignore[attr-defined]
            return r.value  # type: ignore[attr-defined,no-any-return]
    raise AssertionError(quantity)


def test_temperatures_come_in_the_steps_of_the_device() -> None:
    m = machine(PHONE)
    sensor, skins, dies = Simulated(m), [], []
    for _ in range(60):
        m.execute(None, STEP)
        m.idle(1.0)
        readings = sensor.read()
        skins.append(value(readings, "temperature", "skin") or 0.0)
        dies.append(value(readings, "temperature", "die") or 0.0)
    assert all(skin == pytest.approx(round(skin, 1)) for skin in skins)
    assert all(die == round(die) for die in dies)
    assert len(set(skins)) > 3


def test_a_device_without_a_meter_says_so_and_gives_no_figure() -> None:
    m = machine("iphone-16-pro")
    m.idle(5.0)
    (power,) = [r for r in Simulated(m).read() if r.quantity == "power"]
    assert power.value is None
    assert power.reason == "iPhone 16 Pro has no power sensor"


def test_power_is_the_mean_since_the_last_read() -> None:
    m = machine(PI)
    sensor = Simulated(m)
    (first,) = [r for r in sensor.read() if r.quantity == "power"]
    assert first.value is None
    for _ in range(40):
        m.execute(None, STEP)
        m.idle(0.1)
    mean = m.energy_j / m.elapsed_s
    assert value(sensor.read(), "power") == pytest.approx(mean, abs=0.3)


def test_a_figure_read_within_its_period_is_the_old_one() -> None:
    m = machine(PHONE)
    sensor = Simulated(m)
    m.idle(2.0)
    first = sensor.read()
    m.execute(None, STEP)
    assert sensor.read() == first
    m.idle(1.0)
    assert {r.time_s for r in sensor.read() if r.quantity == "temperature"} == {m.clock()}


def test_a_charging_battery_hides_the_power() -> None:
    m = machine(PHONE, events=(Event(5.0, charge_w=10.0),))
    sensor = Simulated(m)
    sensor.read()
    m.idle(6.0)
    readings = sensor.read()
    (power,) = [r for r in readings if r.quantity == "power"]
    assert power.value is None
    assert "unplug" in power.reason
    assert value(readings, "charging") == 1.0


def test_headroom_is_one_at_the_limit_and_coarse_on_an_iphone() -> None:
    m = machine("iphone-16-pro")
    sensor = Simulated(m)
    m.temperatures = Temperatures(60.0, 43.0)
    m.idle(1e-6)
    assert value(sensor.read(), "headroom") == pytest.approx(1.02)  # three steps of 0.34
    cold = machine("iphone-16-pro", ambient_c=5.0)
    assert value(Simulated(cold).read(), "headroom") == 0.0


def test_throttling_shows_in_the_clocks() -> None:
    m = machine(PHONE, ambient_c=38.0)
    for _ in range(2000):
        m.execute(None, STEP)
    readings = Simulated(m).read()
    limit, full = value(readings, "clock_limit"), value(readings, "clock_max")
    assert limit is not None
    assert full is not None
    assert limit / full == pytest.approx(m.clock_ratio)
    assert 0.0 < (value(readings, "throttle") or 0.0) <= 1.0


def test_a_monitor_finds_all_figures_fresh_at_their_own_pace() -> None:
    m = machine(PI, ambient_c=30.0)
    monitor = Monitor(simulated_sensors(m, seed=1), clock=m.clock)
    for _ in range(100):
        m.execute(None, STEP)
        state = monitor.poll()
    assert state.die_c == pytest.approx(m.temperatures.die_c, abs=2.0)
    assert state.power_method == "simulated"
    assert state.power_w == pytest.approx(m.power_w, abs=1.0)
    assert state.clock_ratio == pytest.approx(m.clock_ratio)
    assert state.memory_available_mb == pytest.approx(m.memory_available_mb)
    assert state.stale == ()


def test_an_apple_counter_grows_as_the_device_draws() -> None:
    m = machine("mac-m2")
    sensor = Simulated(m)
    m.idle(1.0)
    first = value(sensor.read(), "energy")
    m.idle(10.0)
    second = value(sensor.read(), "energy")
    assert first is not None
    assert second is not None
    assert second - first == pytest.approx(10.0 * m.idle_w)


def test_noise_is_fixed_by_the_seed() -> None:
    def shown(seed: int) -> list[float | None]:
        m = machine(PHONE)
        sensor = Simulated(m, seed)
        m.idle(2.0)
        return [r.value for r in sensor.read()]

    assert shown(1) == shown(1)
    assert any(shown(1) != shown(seed) for seed in range(2, 8))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_shipped_scenario_loads_and_its_device_exists(name: str) -> None:
    assert load_scenario(name).device in DEVICES


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
