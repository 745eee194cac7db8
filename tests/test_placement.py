"""A placement is the best of what fits by the planner's own formulas, and says why everything else is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.contracts import Limits, Objective
from outrider.errors import UsageError
from outrider.export.budget import estimate
from outrider.export.config import ModelConfig
from outrider.export.device_plans import plan_graphs
from outrider.export.options import ExportOptions, RoleOptions
from outrider.export.placement import model_candidates
from outrider.manifest import FileEntry, GraphEntry, KvEntry, RoleEntry, read_manifest
from outrider.runtime import placement_sources
from outrider.runtime.memory_budget import Room, asked_limit, choose_memory
from outrider.runtime.placement import PROCESS_MB, MemoryLimit, place
from outrider.runtime.placement_costs import K_MAX, Candidate, Seat, drafting_ways, round_costs, seat_basis
from outrider.runtime.placement_sources import available_now, bundle_candidates, limit_on, unit_cores
from outrider.runtime.planner import Acceptance, choose, expected_tokens
from outrider.targets.core_sets import cores_of
from outrider.targets.device import Figure, load_device
from outrider.targets.model_cost import model_cost
from outrider.targets.simulated import DRAM_SHARE
from tests import placement_pairs as pairs
from tests.placement_pairs import DRAFT, PLENTY, TARGET, request

PI = load_device("raspberry-pi-5")
SMALL = ModelConfig("qwen2", 151936, 896, 24, 14, 2, 64, 4864, 32768, tie_embeddings=True)
LARGE = ModelConfig("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 32768, tie_embeddings=True)
UNBOUND = Room(0.0, None, None)
SMALLEST = "the smallest plan that would work: the target on cpu by onnxruntime"


@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(("objective", "kind"), [("speed", "latency"), ("energy", "energy")])
@pytest.mark.parametrize("gb_s", [4.0, 17.0, 60.0])
def test_mode_and_k_are_those_that_the_planner_would_choose_on_these_units(
    acceptance: float, objective: str, kind: str, gb_s: float
) -> None:
    device = pairs.with_gpu(PI, gb_s)
    target, draft = Seat(pairs.on(TARGET, "gpu"), "gpu"), Seat(DRAFT, "cpu")
    asked = replace(
        request(device, acceptance=acceptance, objective=objective, cores=None),
        candidates=(target.candidate, draft.candidate),
    )
    limits = Limits(K_MAX, overlap=frozenset({"model"}))
    believed = Acceptance({"model": (acceptance,)})
    planned = choose(round_costs(device, target, draft), believed, Objective(kind), limits)  # type: ignore[arg-type]
    chosen = place(asked).chosen
    assert (chosen.mode, chosen.k) == (planned.mode, planned.k)


def test_a_serial_round_is_worth_its_tokens_over_its_forwards() -> None:
    target, draft = Seat(TARGET, "cpu"), Seat(DRAFT, "cpu")
    costs = round_costs(PI, target, draft)
    (way,) = drafting_ways(PI, target, draft, "speed", 0.8)
    seconds = costs.verify_s[way.k + 1] + way.k * costs.draft_s["model"]
    assert way.tokens_s == pytest.approx(expected_tokens((0.8,), way.k) / seconds)
    assert costs.energy is not None
    joules = costs.energy.static_w * seconds + costs.energy.verify_j[way.k + 1]
    joules += way.k * costs.energy.draft_j["model"]
    assert way.token_j == pytest.approx(joules / expected_tokens((0.8,), way.k))


def test_the_first_option_is_the_best_one_and_energy_may_want_another() -> None:
    device = pairs.with_unit(pairs.with_gpu(PI, 16.0), "gpu", busy_w=Figure(60.0, "a test"))
    more = pairs.on(TARGET, "gpu")
    fast, cheap = (place(request(device, more, objective=wish)) for wish in ("speed", "energy"))
    assert fast.chosen.target.unit == "gpu"
    assert cheap.chosen.target.unit == "cpu"
    assert cheap.chosen.token_j < fast.chosen.token_j
    assert fast.chosen.tokens_s > cheap.chosen.tokens_s
    for plan in (fast, cheap):
        assert plan.options[0] is plan.chosen


def test_core_sets_of_a_pair_share_no_core_and_leave_none_idle() -> None:
    options = place(request()).options
    split = [option for option in options if ":" in option.target.unit and option.draft is not None]
    assert {option.mode for option in split} == {"serial", "overlapped"}
    for option in split:
        assert option.draft is not None
        ours, theirs = cores_of(option.target.unit, range(4)), cores_of(option.draft.unit, range(4))
        assert ours is not None
        assert theirs is not None
        assert sorted(ours + theirs) == [0, 1, 2, 3]
        assert (option.target.threads, option.draft.threads) == (len(ours), len(theirs))


def test_a_draft_on_the_same_whole_unit_is_never_overlapped() -> None:
    options = place(request(cores=None)).options
    assert {option.mode for option in options} == {"none", "serial"}


def test_a_unit_that_was_named_for_one_role_leaves_the_other_cores_to_the_other() -> None:
    plan = place(request(draft_unit="cpu:3", drafting="overlapped"))
    assert plan.chosen.draft is not None
    assert (plan.chosen.target.unit, plan.chosen.draft.unit) == ("cpu:0-2", "cpu:3")
    whole = place(request(target_unit="cpu", draft_unit="cpu"))
    assert {option.target.unit for option in whole.options} == {"cpu"}


def test_two_units_ask_for_no_more_than_the_memory_gives() -> None:
    device = pairs.with_gpu(PI, 16.0)
    costs = round_costs(device, Seat(pairs.on(TARGET, "gpu"), "gpu"), Seat(DRAFT, "cpu"))
    assert costs.overlapped is not None
    moved = TARGET.work(1).bytes / costs.overlapped.verify_s[1]
    moved += DRAFT.work(1).bytes / costs.overlapped.draft_s["model"]
    there = max(DRAM_SHARE * 1e9 * device.memory.peak_gb_s, 16e9)
    assert moved == pytest.approx(there, rel=0.02)
    assert all(costs.overlapped.verify_s[width] >= alone for width, alone in costs.verify_s.items())


def test_a_draft_that_does_not_fit_is_left_out_and_named() -> None:
    alone = PROCESS_MB + TARGET.memory_mb
    plan = place(request(limit=MemoryLimit(alone + 100, "of a test"), acceptance=0.99))
    assert (plan.chosen.mode, plan.chosen.draft, plan.k_ceiling) == ("none", None, 0)
    assert plan.chosen.memory_mb == pytest.approx(alone)
    assert any("draft on cpu" in refusal.what and "the limit is" in refusal.why for refusal in plan.refused)
    assert any("lookup still drafts" in note for note in plan.notes)


def test_a_draft_remembers_less_before_it_is_left_out_and_the_target_after_that() -> None:
    short = replace(DRAFT, context=512, kv_mb=12.5)
    both = PROCESS_MB + TARGET.memory_mb + short.memory_mb
    plan = place(request("raspberry-pi-5", short, limit=MemoryLimit(both + 1, "of a test"), acceptance=0.95))
    assert plan.chosen.draft is not None
    assert (plan.chosen.target.context, plan.chosen.draft.context) == (2048, 512)
    shorter = replace(TARGET, context=512, kv_mb=29)
    tight = MemoryLimit(PROCESS_MB + shorter.memory_mb + 1, "of a test")
    plan = place(request("raspberry-pi-5", shorter, limit=tight))
    assert plan.chosen.target.context == 512
    assert any("512 tokens only" in note for note in plan.notes)
    with pytest.raises(UsageError, match="512 tokens, no draft model, 2573 MB"):
        place(request("raspberry-pi-5", shorter, limit=tight, context=2048))


def test_a_bundle_is_planned_to_take_what_loading_it_would_take(tmp_path: Path) -> None:
    """Chunks of prompts, contexts and what is held while a graph is opened: all of it is counted in one place."""
    manifest = read_manifest(pairs.write_pair(tmp_path / "pair"))
    graphs = {
        role: replace(entry.graphs[0], options={"hidden_size": 896}) for role, entry in manifest.roles.items()
    }
    roles = {role: RoleEntry((graph,)) for role, graph in graphs.items()}
    candidates = bundle_candidates(replace(manifest, roles=roles), here=False)
    found = set()
    least = choose_memory({"target": graphs["target"]}, {"target": 256}, UNBOUND)
    for limit_mb in range(int(least.peak_mb) - 25, 900, 30):
        limit = asked_limit(limit_mb, "of a test")
        loaded = choose_memory(graphs, {}, Room(0.0, limit, None))
        drafting = "none" if loaded.draft is None else "serial"
        chosen = place(replace(request(limit=limit, drafting=drafting), candidates=candidates)).chosen
        assert (chosen.memory_mb, chosen.chunk) == (pytest.approx(loaded.peak_mb), loaded.chunk)
        for ours, theirs in ((chosen.target, loaded.target), (chosen.draft, loaded.draft)):
            assert (ours and (ours.context, ours.scratch_mb)) == (
                theirs and (theirs.context, theirs.scratch_mb)
            )
        found.add((loaded.target.context, loaded.draft and loaded.draft.context, loaded.chunk))
    assert {(1024, 1024, 512), (1024, 1024, 128), (1024, None, 512), (256, None, 128)} < found


def test_every_option_is_within_the_limit() -> None:
    for megabytes in (2700, 3000, 3800, 5000):
        plan = place(request(limit=MemoryLimit(megabytes, "of a test")))
        assert all(option.memory_mb <= megabytes for option in plan.options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_unit": "cpu:9"}, "there is no core 9, only cpu:0-3"),
        ({"target_unit": "cpu:0-1", "draft_unit": "cpu:1"}, "share core 1"),
        ({"target_unit": "npu"}, "target_unit is 'npu'; raspberry-pi-5 has cpu"),
        ({"limit": MemoryLimit(500, "of a test")}, "nothing fits into the 500 MB"),
        ({"drafting": "overlapped", "cores": None}, "no two units of raspberry-pi-5"),
        ({"target_unit": "cpu:1", "cores": None}, "does not say how many alike cores"),
    ],
)
def test_a_wish_that_cannot_be_names_the_smallest_plan_that_would_work(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        place(request(**changes))  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert f"{SMALLEST} (int4), 2048 tokens, no draft model, {PROCESS_MB + TARGET.memory_mb:.0f} MB" in str(
        caught.value
    )


def test_two_roles_on_an_exclusive_unit_are_refused() -> None:
    device = pairs.with_unit(pairs.with_gpu(PI, 30.0), "gpu", exclusive=True)
    more = (pairs.on(TARGET, "gpu"), pairs.on(DRAFT, "gpu"))
    with pytest.raises(UsageError, match="gpu of raspberry-pi-5 holds one role at a time") as caught:
        place(request(device, *more, target_unit="gpu", draft_unit="gpu"))
    assert SMALLEST in str(caught.value)
    plan = place(request(device, *more))
    assert not any(o.draft is not None and o.target.unit == o.draft.unit == "gpu" for o in plan.options)
    assert any(refusal.what == "both roles on gpu" for refusal in plan.refused)


def test_a_unit_without_a_backend_is_refused_with_the_line_that_its_profile_lacks() -> None:
    device = pairs.with_unit(PI, "cpu", backends=())
    with pytest.raises(UsageError, match="has no onnxruntime on its cpu, and no other backend") as caught:
        place(request(device))
    assert "once units.cpu.backends of the profile has onnxruntime" in str(caught.value)
    with_other = place(request(PI, pairs.on(TARGET, "cpu", "executorch", recipe="8da4w")))
    assert any("no executorch on its cpu" in refusal.why for refusal in with_other.refused)


def test_a_figure_is_calibrated_only_where_this_device_was_measured() -> None:
    seat = Seat(TARGET, "cpu")
    assert seat_basis(PI, seat) == ("modelled", "modelled")
    source = "measured, outrider calibrate, 2026-11-30, bundle b"
    cpu = PI.units["cpu"]
    rates = {name: replace(rate, sustained_gops=Figure(90.0, source)) for name, rate in cpu.rates.items()}
    timed = pairs.with_unit(PI, "cpu", bandwidth_gb_s=Figure(9.0, source), rates=rates)
    assert seat_basis(timed, seat) == ("calibrated", "modelled")
    assert seat_basis(timed, replace(seat, unit="cpu:0", share=0.25)) == ("modelled", "modelled")
    known = replace(TARGET, measured=((1, 0.08), (3, 0.1)))
    assert seat_basis(PI, Seat(known, "cpu")) == ("calibrated", "modelled")
    assert round_costs(PI, Seat(known, "cpu"), None).verify_s == {1: 0.08, 3: 0.1}


def test_static_graphs_to_be_made_get_the_widths_that_pay_and_made_ones_keep_theirs() -> None:
    static = replace(TARGET, widths=(1, 2, 3, 5, 9, 64), profile="split")
    for made in (False, True):
        asked = replace(request(), candidates=(replace(static, made=made), DRAFT))
        plan = place(asked)
        widths = plan.chosen.target.widths
        assert widths is not None
        if made:
            assert widths == static.widths
        else:
            assert {1, plan.k_ceiling + 1, 64} <= set(widths)
            assert max(set(widths) - {64}) == plan.k_ceiling + 1
        assert plan.k_ceiling >= plan.chosen.k


def test_a_static_cache_is_read_whole() -> None:
    static = replace(TARGET, widths=(1, 64))
    assert static.work(1).bytes - TARGET.work(1).bytes == pytest.approx((2048 - 256) * TARGET.cost.kv_bytes)


@pytest.mark.parametrize("slug", ["raspberry-pi-5", "iphone-16-pro", "snapdragon-8-gen3"])
def test_models_are_sized_as_an_export_would_size_them(slug: str) -> None:
    device = load_device(slug)
    options = ExportOptions(RoleOptions("t"), Path("out"), RoleOptions("d"), slug)
    configs = {"target": LARGE, "draft": SMALL}
    found = model_candidates(device, options, configs)
    for role, plans in plan_graphs(device, options).items():
        for plan in plans:
            size = estimate(plan, configs[role], options)
            same = [c for c in found if _shape(c) == (role, plan.backend, plan.unit, plan.max_context)]
            assert any(c.weights_mb + c.kv_mb == pytest.approx(size.memory_mb) for c in same)
    assert {c.context for c in found if c.role == "target"} == {2048, 1024, 512, 256}
    assert all(0 < c.cost.weight_bytes <= 1e6 * c.weights_mb * (1 + 1e-9) for c in found)


def _shape(candidate: Candidate) -> tuple[object, ...]:
    return candidate.role, candidate.backend, candidate.unit, candidate.context


def test_the_table_of_embeddings_of_an_npu_s_graph_is_not_streamed() -> None:
    sizes = {
        "w1.onnx": 40_000,
        "weights.data": 500_000_000,
        "embedding.i8": 136_000_000,
        "w1_qnn.bin": 510_000_000,
    }
    files = {f"draft/npu/{name}": FileEntry("0" * 64, size) for name, size in sizes.items()}
    entry = GraphEntry(
        "onnxruntime",
        "npu",
        "split",
        files,
        (1, 2, 64),
        64,
        KvEntry("int16", "BHSD", 24, 2, 64),
        1024,
        151936,
        "a16w8",
        embedding_file="draft/npu/embedding.i8",
        gathered_bytes=136_000_000,
        weights=494_000_000,
    )
    cost = model_cost(entry)
    assert cost.weight_bytes == 500_000_000
    assert cost.kv_bytes == 2 * 24 * 2 * 64 * 2
    assert cost.resident_mb == pytest.approx(636)


def test_a_device_s_share_and_this_machine_s_free_memory_are_the_default_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert available_now(PI).mb == pytest.approx(0.8e3 * PI.memory_gb)
    host = load_device("host")
    assert "assumed" in available_now(host).how  # where nothing tells
    free = MemoryLimit(300.0, "that the machine has free now", 128.0)
    monkeypatch.setattr(placement_sources, "available_here", lambda: free)
    assert available_now(host) == limit_on(host, None) == limit_on(host, 4000.0) == free
    assert limit_on(host, 200.0) == asked_limit(200.0, "of --memory-limit")
    assert limit_on(PI, 4000.0) == asked_limit(4000.0, "of --memory-limit")


def test_cores_are_shared_out_only_where_they_are_known_to_be_alike() -> None:
    assert unit_cores(PI) == (0, 1, 2, 3)
    assert unit_cores(load_device("snapdragon-8-gen3")) is None
    plan = place(request("snapdragon-8-gen3", limit=PLENTY, cores=None))
    assert any("were not shared out" in note for note in plan.notes)


@pytest.mark.parametrize(
    "changes", [{"objective": "fame"}, {"acceptance": 1.5}, {"drafting": "sideways"}], ids=str
)
def test_a_request_out_of_range_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        request(**changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="memory_limit"):
        MemoryLimit(0.0, "of a test")
