"""A core set is a unit: its role's threads run there and nowhere else, and mistakes in it are said in plain words."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider
from outrider.contracts import Graph
from outrider.errors import BackendError, UsageError
from outrider.runtime.backends import RoleOptions
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.timing import machine_line
from outrider.targets import core_sets
from outrider.targets.cached_graph import CachedGraph
from outrider.targets.core_sets import cores_of, pinned, refuse_shared, unit_kind
from outrider.targets.onnx_session import SPINNING, affinities, roaming

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="only Linux pins threads to cores"
)
HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
two_cores = pytest.mark.skipif(len(HERE) < 2, reason="this process may use one core only")
PROMPT = [11, 5, 23, 8, 41]


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process could use the cores 0 to 7."""
    monkeypatch.setattr(core_sets, "usable_cores", lambda: tuple(range(8)))


@pytest.mark.parametrize(
    ("unit", "cores"),
    [
        ("cpu:0", (0,)),
        ("cpu:2-3", (2, 3)),
        ("cpu:0,2-3", (0, 2, 3)),
        ("cpu: 5 , 1", (1, 5)),
        ("cpu:1,1-2", (1, 2)),
        ("cpu", None),
        ("npu", None),
        (None, None),
    ],
)
def test_a_core_set_is_written_as_cores_and_ranges(
    many_cores: None, unit: str | None, cores: tuple[int, ...] | None
) -> None:
    assert cores_of(unit) == cores


@given(st.sets(st.integers(0, 40), min_size=1))
def test_any_set_of_cores_can_be_written_and_is_read_back(chosen: set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_sets, "usable_cores", lambda: tuple(range(41)))
        written = core_sets._listed(sorted(chosen))
        assert cores_of(f"cpu:{written}") == tuple(sorted(chosen))


@pytest.mark.parametrize(
    "unit", ["cpu:", "cpu:x", "cpu:1-", "cpu:-1", "cpu:3-1", "cpu:0,", "cpu:0--1", "cpu:1.5"]
)
def test_what_is_no_core_set_is_refused_with_what_one_looks_like(many_cores: None, unit: str) -> None:
    with pytest.raises(UsageError, match="cpu:2-3"):
        RoleOptions(unit=unit).cores  # noqa: B018


def test_a_core_that_does_not_exist_is_named_with_those_that_do(many_cores: None) -> None:
    with pytest.raises(UsageError, match=r"no core 8 .* may use cpu:0-7"):
        cores_of("cpu:7-9")
    with pytest.raises(UsageError, match="more cores than any computer"):
        cores_of("cpu:0-99999999")


def test_only_the_cpu_has_core_sets() -> None:
    with pytest.raises(UsageError, match="only the cpu has core sets"):
        RoleOptions(unit="gpu:0").cores  # noqa: B018
    with pytest.raises(UsageError, match="unknown unit 'tpu:0'"):
        RoleOptions(unit="tpu:0")
    assert unit_kind("cpu:2-3") == unit_kind("cpu") == "cpu"


def test_a_system_that_cannot_pin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(UsageError, match="need Linux"):
        cores_of("cpu:0")


def test_two_roles_on_one_core_are_refused_with_a_draft_unit_that_would_do(many_cores: None) -> None:
    with pytest.raises(UsageError, match=r"share core 2.*draft_unit 'cpu:0,4-7' would do"):
        refuse_shared("cpu:1-3", "cpu:2")
    with pytest.raises(UsageError, match="give the target fewer cores"):
        refuse_shared("cpu:0-7", "cpu:2")
    for target, draft in [("cpu:0", "cpu:1"), ("cpu", "cpu:1"), (None, "cpu:0"), ("cpu:0", "npu")]:
        refuse_shared(target, draft)


def test_more_threads_than_cores_are_refused(many_cores: None) -> None:
    with pytest.raises(UsageError, match=r"threads is 3, but 'cpu:4-5' has 2 cores"):
        RoleOptions(unit="cpu:4-5", threads=3)
    assert RoleOptions(unit="cpu:4-5", threads=1).cores == (4, 5)


def test_the_callers_core_is_the_first_and_the_librarys_threads_have_the_others() -> None:
    entry = "session.intra_op_thread_affinities"
    assert affinities((2, 3, 5)) == {entry: "4;6"}  # counted from 1
    assert affinities((2, 3, 5), threads=2) == {entry: "4"}
    assert affinities((2,)) == affinities(None) == {}


@two_cores
def test_a_thread_is_pinned_while_it_works_and_free_again_whatever_happens() -> None:
    def fail() -> None:
        with pinned(HERE[:1]):
            inside.append(os.sched_getaffinity(0))
            thread = threading.Thread(target=lambda: os.sched_setaffinity(0, HERE[1:2]))
            thread.start()
            thread.join()
            inside.append(os.sched_getaffinity(0))  # what another thread does is its own affair
            raise ValueError("inside")

    inside: list[set[int]] = []
    with pytest.raises(ValueError, match="inside"):
        fail()
    assert inside == [{HERE[0]}, {HERE[0]}]
    assert os.sched_getaffinity(0) == set(HERE)
    with pinned(None):
        assert os.sched_getaffinity(0) == set(HERE)


def spied(graph: Graph, seen: set[tuple[str, frozenset[int]]]) -> None:
    """Note where the forwards of a graph run."""
    assert isinstance(graph, CachedGraph)
    run = graph._runner.run

    def noting(*args: Any) -> Any:
        seen.add((threading.current_thread().name, frozenset(os.sched_getaffinity(0))))
        return run(*args)

    graph._runner.run = noting  # type: ignore[method-assign]


def draft_of(pipeline: Pipeline) -> Graph:
    drafter = pipeline.engine.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    return drafter.graph


@two_cores
def test_each_role_runs_on_its_own_cores_and_the_text_is_the_same(float_bundle: Path) -> None:
    with outrider.load(float_bundle, governor=False) as pipeline:
        plain = pipeline.generate(PROMPT, max_tokens=24, k=0, ignore_eos=True).tokens
    one, two = f"cpu:{HERE[0]}", f"cpu:{HERE[1]}"
    with outrider.load(float_bundle, draft_unit=one, target_unit=two, governor=False) as pipeline:
        assert {placed.role: placed.unit for placed in pipeline.placement} == {"target": two, "draft": one}
        assert all(f"on {placed.unit}" in str(placed) for placed in pipeline.placement)
        target_at: set[tuple[str, frozenset[int]]] = set()
        draft_at: set[tuple[str, frozenset[int]]] = set()
        spied(pipeline.engine.target, target_at)
        spied(draft_of(pipeline), draft_at)
        options: dict[str, Any] = {"max_tokens": 24, "drafter": "model", "ignore_eos": True}
        for drafting in ("serial", "overlapped", "auto"):
            for k in (2, "auto"):
                result = pipeline.generate(PROMPT, k=k, drafting=drafting, **options)
                assert result.tokens == plain
                if drafting == "overlapped" and k == 2:
                    assert result.stats.overlapped_rounds > 0
        assert {cores for _, cores in target_at} == {frozenset(HERE[1:2])}
        assert {cores for _, cores in draft_at} == {frozenset(HERE[:1])}
        assert {name for name, _ in target_at} == {"MainThread"}
        assert {name for name, _ in draft_at} == {"MainThread", "outrider-draft"}
    assert os.sched_getaffinity(0) == set(HERE)
    assert all(thread.name != "outrider-draft" for thread in threading.enumerate())


@two_cores
def test_a_core_set_of_two_has_a_thread_on_each(float_bundle: Path) -> None:
    before = set(os.listdir("/proc/self/task"))
    with outrider.load(
        float_bundle, target_unit=f"cpu:{HERE[0]},{HERE[1]}", draft=False, governor=False
    ) as pipeline:
        started = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
        assert {HERE[1]} in [os.sched_getaffinity(task) for task in started]
        at: set[tuple[str, frozenset[int]]] = set()
        spied(pipeline.engine.target, at)
        assert len(pipeline.generate(PROMPT, max_tokens=4, k=0, ignore_eos=True).tokens) == 4
        assert at == {("MainThread", frozenset(HERE[:1]))}


@two_cores
def test_auto_overlaps_only_where_both_roles_have_cores_of_their_own(float_bundle: Path) -> None:
    one, two = f"cpu:{HERE[0]}", f"cpu:{HERE[1]}"
    for units, apart in [
        ((two, one), {"model"}),
        ((None, None), set()),
        ((two, None), set()),
        (("cpu", one), set()),
    ]:
        with outrider.load(
            float_bundle, target_unit=units[0], draft_unit=units[1], governor=False
        ) as pipeline:
            assert pipeline.engine._choosing.apart == apart


def test_mistakes_in_units_are_refused_before_a_graph_is_opened(
    float_bundle: Path, run_main: Callable[..., tuple[int, str, str]]
) -> None:
    for options, words in [
        ({"target_unit": "cpu:4097"}, "no core 4097"),
        ({"target_unit": f"cpu:{HERE[0]}", "draft_unit": f"cpu:{HERE[0]}"}, "share core"),
        ({"target_unit": f"cpu:{HERE[0]}", "threads": 2}, "threads is 2"),
    ]:
        with pytest.raises(UsageError, match=words):
            outrider.load(float_bundle, **options)  # type: ignore[arg-type]
    for unit, words in [
        ("cpu:4097", "no core 4097"),
        ("dsp", "'dsp' is not one of"),
        ("cpu:b", "no core and no range"),
    ]:
        code, _, errors = run_main("generate", str(float_bundle), "-p", "a", "--target-unit", unit)
        assert code == 2
        assert words in errors
        assert "Traceback" not in errors


def test_executorch_cannot_keep_its_threads_on_a_core_set_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.runtime import backends

    monkeypatch.setattr(core_sets, "usable_cores", lambda: (0, 1))
    with pytest.raises(BackendError, match=r"cannot be kept on cpu:0-1"):
        backends._open_executorch(Path(), None, RoleOptions(unit="cpu:0-1"))  # type: ignore[arg-type]


def test_a_pinned_forward_returns_what_a_free_one_does(float_bundle: Path) -> None:
    with outrider.load(float_bundle, draft=False, governor=False) as free:
        expected = np.array(free.engine.target.forward(PROMPT).logits)
    with outrider.load(float_bundle, target_unit=f"cpu:{HERE[0]}", draft=False, governor=False) as held:
        np.testing.assert_allclose(held.engine.target.forward(PROMPT).logits, expected, atol=1e-4)


def test_the_command_line_overlaps_and_says_what_came_of_it(
    float_bundle: Path, run_main: Callable[..., tuple[int, str, str]]
) -> None:
    words = ("generate", str(float_bundle), "-p", "one two", "-n", "16", "--k", "2")
    code, written, said = run_main(*words, "--drafter", "model", "--drafting", "overlapped", "--no-governor")
    assert code == 0
    assert "rounds overlapped (" in said
    assert run_main(*words, "--drafting", "serial", "--no-governor")[1] == written
    code, _, errors = run_main(*words, "--drafter", "lookup", "--drafting", "overlapped", "--no-governor")
    assert code == 2
    assert "can draft beside the target" in errors


def test_bench_compares_ways_to_draft(
    float_bundle: Path, tmp_path: Path, run_main: Callable[..., tuple[int, str, str]]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two"}\n')
    words = (
        "bench",
        str(float_bundle),
        "--prompts",
        str(prompts),
        "-r",
        "1",
        "-n",
        "16",
        "-pp",
        "16",
        "--k",
        "2",
    )
    words = (*words, "--json")
    code, out, errors = run_main(*words, "--drafter", "model", "--drafting", "serial,overlapped")
    assert code == 0, errors
    rows = [row for row in json.loads(out) if row["drafting"] is not None]
    assert {row["drafting"] for row in rows} == {"serial", "overlapped"}
    assert all((row["overlapped"] > 0) == (row["drafting"] == "overlapped") for row in rows)
    assert all(row["identical_text"] for row in rows)
    code, _, errors = run_main(*words, "--drafting", "both")
    assert code == 2
    assert "auto, serial, overlapped" in errors


def capacities(root: Path, values: dict[int, int]) -> Path:
    """A machine whose kernel says how strong its cores are."""
    for core, capacity in values.items():
        folder = root / f"sys/devices/system/cpu/cpu{core}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")
    return root


RK3588 = dict.fromkeys(range(4), 414) | dict.fromkeys(range(4, 8), 1024)
PHONE = {
    0: 379,
    1: 379,
    2: 823,
    3: 823,
    4: 823,
    5: 768,
    6: 768,
    7: 1024,
}  # 1 + 3 + 2 + 2, as a Snapdragon 8 Gen 3's


@pytest.mark.parametrize(
    ("machine", "usable", "big"),
    [
        (dict.fromkeys(range(4), 1024), range(4), None),  # a Pi 5
        (RK3588, range(8), (4, 5, 6, 7)),
        (PHONE, range(8), (2, 3, 4, 5, 6, 7)),
        (PHONE, range(2), None),  # a process that may use the little ones only
        (PHONE, (0, 7), (7,)),
        ({0: 1024}, range(2), None),  # one of them tells nothing
        ({}, range(4), None),
    ],
)
def test_threads_are_for_cores_of_at_least_half_the_strength_of_the_strongest(
    machine: dict[int, int], usable: Any, big: tuple[int, ...] | None, tmp_path: Path
) -> None:
    assert core_sets.big_cores(capacities(tmp_path, machine), tuple(usable)) == big


def test_a_capacity_that_is_no_number_tells_nothing(tmp_path: Path) -> None:
    root = capacities(tmp_path, RK3588)
    (root / "sys/devices/system/cpu/cpu3/cpu_capacity").write_text("strong\n")
    assert core_sets.big_cores(root, tuple(range(8))) is None


def test_as_many_threads_as_big_cores_are_free_to_move_among_them() -> None:
    assert roaming((4, 5, 7)) == {"session.intra_op_thread_affinities": "5,6,8;5,6,8"}
    assert roaming((4,)) == {}


@two_cores
def test_where_one_core_is_big_everything_runs_there_unless_threads_are_asked_for(
    float_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.runtime import backends

    monkeypatch.setattr(backends, "big_cores", lambda: tuple(HERE[1:2]))
    with outrider.load(float_bundle, draft=False, governor=False) as pipeline:
        at: set[tuple[str, frozenset[int]]] = set()
        spied(pipeline.engine.target, at)
        pipeline.generate(PROMPT, max_tokens=4, k=0)
        assert at == {("MainThread", frozenset(HERE[1:2]))}
        assert pipeline.engine.target._sessions.threads == 1  # type: ignore[attr-defined]
    for options in ({"threads": 2}, {"target_unit": f"cpu:{HERE[0]}"}):
        with outrider.load(float_bundle, draft=False, governor=False, **options) as pipeline:  # type: ignore[arg-type]
            assert pipeline.engine.target.cores != tuple(HERE[1:2])  # type: ignore[attr-defined]


def test_a_nice_pipeline_has_its_threads_yield_and_leaves_other_threads_alone(
    float_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        core_sets, "NICENESS", 1
    )  # enough to see: at 10 a busy machine would let the test starve
    seen: dict[int, tuple[int, int]] = {}
    before = set(os.listdir("/proc/self/task"))
    mine = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    spins: set[str] = set()

    def work() -> None:
        with outrider.load(float_bundle, threads=2, nice=True, governor=False) as pipeline:
            session = pipeline.engine.target._sessions.get(None)  # type: ignore[attr-defined]
            spins.add(session.get_session_options().get_session_config_entry(SPINNING))
            options: dict[str, Any] = {"k": 2, "drafter": "model", "drafting": "overlapped", "max_tokens": 12}
            for _ in pipeline.stream(PROMPT, ignore_eos=True, **options):
                for task in map(int, set(os.listdir("/proc/self/task")) - before):
                    seen[task] = os.getpriority(os.PRIO_PROCESS, task), os.sched_getscheduler(task)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert spins == {"0"}
    assert len(seen) >= 4  # the caller, a thread of each graph, and the draft's
    assert set(seen.values()) == {(max(1, mine[0]), os.SCHED_BATCH)}
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)) == mine


def test_where_the_system_denies_batch_jobs_a_nice_value_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise OSError(38, "Function not implemented")  # as of musl

    monkeypatch.setattr(core_sets, "NICENESS", 1)
    monkeypatch.setattr(os, "sched_setscheduler", denied)
    seen: list[tuple[bool, str]] = []

    def work() -> None:
        core_sets.be_nice()
        seen.append((core_sets.is_nice(), machine_line([], 2)))

    thread = threading.Thread(target=work)
    before = machine_line([], 2)
    thread.start()
    thread.join()
    assert seen[0][0]
    if not core_sets.is_nice():  # what was timed under it says nothing of other runs
        assert seen[0][1] != before
