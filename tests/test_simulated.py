"""The simulated device keeps its books, throttles, is fixed by its seed, and shows only what the real one has."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import UsageError
from outrider.manifest import FileEntry, GraphEntry, KvEntry
from outrider.runtime.rounds import Engine, Request
from outrider.targets.device import figures_of, load_device
from outrider.targets.fake import FakeDrafter, FakeGraph, VirtualClock, random_logits
from outrider.targets.model_cost import TARGET_COST, ModelCost, model_cost
from outrider.targets.physics import Work, dynamic_power, roofline_time, stored_heat
from outrider.targets.scenario import Event
from outrider.targets.simulated import SimulatedGraph, perturbed
from outrider.targets.trace_model import Stage, TraceTarget
from tests.simulated_rig import PHONE, PI, STEP, Rig, machine


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


def test_rows_of_an_embedding_take_memory_but_no_time() -> None:
    files = {"t/graph.onnx": FileEntry("0" * 64, 1000), "t/graph.onnx.data": FileEntry("0" * 64, 9_000_000)}
    kv = KvEntry("float32", "BHSD", 28, 2, 128)
    entry = GraphEntry("onnxruntime", "cpu", "inplace", files, None, 512, kv, 2048, 100, "int4")
    cost = model_cost(dataclasses.replace(entry, gathered_bytes=2_000_000, weights=11_000_000))
    assert cost.weight_bytes == 7_001_000
    assert cost.ops == 22_000_000
    assert cost.resident_mb == pytest.approx(9.001)


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


def test_rows_that_are_put_aside_come_back_in_the_time_of_a_copy() -> None:
    m, kv_bytes = machine(PHONE), 24_576.0
    graph = SimulatedGraph(FakeGraph(7), m, ModelCost(1e6, 1e6, kv_bytes))
    graph.forward([1, 2, 3, 4])
    graph.commit(range(4))
    begin = m.clock()
    kept = graph.keep(1)
    graph.truncate(1)
    graph.bring_back(kept)
    assert graph.length == 4
    moved = 2 * 2 * 3 * kv_bytes  # read and written, out and back
    assert m.clock() - begin == pytest.approx(moved / (0.8e9 * m.device.memory.peak_gb_s))
    assert not SimulatedGraph(TraceTarget(Stage()), m, ModelCost(1e6, 1e6)).keeps_rows
