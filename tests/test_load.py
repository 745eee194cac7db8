"""Loading places every role on the first graph that can run here, and says why others were passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.contracts import Graph
from outrider.errors import BackendError, BundleError, MissingExtraError, UsageError
from outrider.manifest import (
    GraphEntry,
    KvEntry,
    Manifest,
    RoleEntry,
    TokenizerEntry,
    describe_file,
    read_manifest,
    token_map_hash,
    write_manifest,
)
from outrider.power.monitor import Monitor
from outrider.runtime import backends
from outrider.runtime import load as loading
from outrider.runtime.load import RoleOptions
from outrider.runtime.memory_budget import PROCESS_MB, MemoryLimit, Room, room_here
from outrider.runtime.role_memory import SESSION_MB
from outrider.targets.fake import FakeGraph

VOCAB = 328
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"


def graph_entry(folder: Path, name: str, backend: str = "fake", **changes: Any) -> GraphEntry:
    (folder / name).write_bytes(name.encode())
    entry = GraphEntry(
        backend=backend,
        unit="cpu",
        profile="inplace",
        files={name: describe_file(folder / name)},
        widths=None,
        prefill_width=32,
        kv=KvEntry("float32", "BHSD", 1, 1, 8),
        max_context=200,
        vocab_size=VOCAB,
        recipe="none",
    )
    return replace(entry, **changes)


@pytest.fixture
def bundle(tmp_path: Path, byte_level_bpe: Any) -> Path:
    """A bundle of a target and its draft, both run by the fake backend."""
    (tmp_path / "tokenizer.json").write_text(byte_level_bpe.to_str())
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    target = graph_entry(tmp_path, "target.bin")
    draft = graph_entry(tmp_path, "draft.bin", target_sha256=target.files["target.bin"].sha256)
    tokenizer = TokenizerEntry(
        hash=token_map_hash(json.loads(byte_level_bpe.to_str())),
        files={name: describe_file(tmp_path / name) for name in ("tokenizer.json", "chat.jinja")},
        eos_ids=(0,),
        bos_id=1,
        chat_template="chat.jinja",
    )
    roles = {"target": RoleEntry((target,)), "draft": RoleEntry((draft,))}
    write_manifest(tmp_path, Manifest("0", (), roles, tokenizer, 200, "host"))
    return tmp_path


Opened = list[tuple[str, RoleOptions, FakeGraph]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """What the fake backend opened, with what options."""
    calls: Opened = []

    def open_fake(folder: Any, entry: GraphEntry, options: RoleOptions) -> Graph:
        graph = FakeGraph(entry.vocab_size, entry.max_context, seed=3)
        calls.append((entry.path, options, graph))
        return graph

    def open_broken(*_: Any) -> Graph:
        raise BackendError("there is no such chip")

    monkeypatch.setitem(loading.BACKENDS, "fake", open_fake)
    monkeypatch.setitem(loading.BACKENDS, "broken", open_broken)
    return calls


def edit(bundle: Path, change: Callable[[Manifest], Mapping[str, Any]]) -> None:
    manifest = read_manifest(bundle)
    write_manifest(bundle, replace(manifest, **change(manifest)))


def with_targets(bundle: Path, *graphs: GraphEntry) -> None:
    edit(bundle, lambda m: {"roles": {**m.roles, "target": RoleEntry((*m.roles["target"].graphs, *graphs))}})


def test_a_bundle_generates_and_chats(bundle: Path, opened: Opened) -> None:
    with outrider.load(bundle) as pipeline:
        result = pipeline.generate("the fox", max_tokens=12, ignore_eos=True)
        assert len(result.tokens) == 12
        assert pipeline.drafters == ("lookup", "model")
        tokens = pipeline.chat_tokens([{"role": "user", "content": "Hi"}])
        assert pipeline.tokenizer.decode(tokens, skip_special=False) == "<|start|>user:Hi<|end|>"
        assert pipeline.manifest == read_manifest(bundle)
    assert [graph.closed for _, _, graph in opened] == [True, True]


def test_a_template_gets_the_end_token_that_the_manifest_names(bundle: Path, opened: Opened) -> None:
    edit(bundle, lambda m: {"tokenizer": replace(m.tokenizer, eos_ids=(0, 2), eos_token="<|stop|>")})
    with outrider.load(bundle) as pipeline:
        assert pipeline.chat_tokens([{"role": "user", "content": "Hi"}])[-1] == 2


def test_the_text_is_the_same_with_every_drafter(bundle: Path, opened: Opened) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    with outrider.load(bundle) as pipeline, outrider.load(bundle, draft=False) as alone:
        plain = alone.generate("the fox", drafter=None, **options)
        for drafter in ("auto", "lookup", "model"):
            assert pipeline.generate("the fox", drafter=drafter, k=3, **options).tokens == plain.tokens
        assert pipeline.generate("the fox", drafter="model", k=3, **options).stats.accepted > 0
        assert alone.drafters == ("lookup",)


def test_ids_that_pad_the_vocabulary_are_never_chosen(bundle: Path, opened: Opened) -> None:
    with outrider.load(bundle) as pipeline:
        assert pipeline.engine.vocab_limit == pipeline.tokenizer.id_limit < VOCAB


def test_the_first_graph_by_preference_that_can_run_is_taken(bundle: Path, opened: Opened) -> None:
    with_targets(
        bundle,
        graph_entry(bundle, "npu.bin", backend="broken", preference=-2),
        graph_entry(bundle, "new.bin", backend="quantum", preference=-1),
        graph_entry(bundle, "late.bin", preference=5),
    )
    with outrider.load(bundle) as pipeline:
        target, draft = pipeline.placement
    assert (target.path, draft.path) == ("target.bin", "draft.bin")
    assert target.passed_over == (
        "npu.bin (broken, cpu): there is no such chip",
        "new.bin (quantum, cpu): this outrider has no backend 'quantum'; "
        "known: onnxruntime, executorch, coreml, fake, broken",
    )
    assert "passed over npu.bin" in str(target)
    assert draft.passed_over == ()


def test_a_backend_can_be_asked_for(bundle: Path, opened: Opened) -> None:
    with_targets(bundle, graph_entry(bundle, "first.bin", backend="broken", preference=-1))
    with outrider.load(bundle, target_backend="fake") as pipeline:
        assert pipeline.placement[0].passed_over == (
            "first.bin (broken, cpu): the backend 'fake' was asked for",
        )
    with pytest.raises(BackendError, match=r"no graph of the target.*no such chip.*'broken' was asked for"):
        outrider.load(bundle, target_backend="broken")
    with pytest.raises(UsageError, match="unknown backend 'tpu'; known: onnxruntime"):
        outrider.load(bundle, draft_backend="tpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Say which processor this is."""

    def pretend(name: str) -> None:
        monkeypatch.setattr(backends.platform, "machine", lambda: name)

    return pretend


def test_a_unit_can_be_asked_for(bundle: Path, opened: Opened) -> None:
    with_targets(bundle, graph_entry(bundle, "gpu.bin", unit="gpu", preference=5))
    with outrider.load(bundle, target_unit="gpu") as pipeline:
        assert pipeline.placement[0].path == "gpu.bin"
        assert pipeline.placement[0].passed_over == ("target.bin (fake, cpu): the unit 'gpu' was asked for",)
        assert opened[0][1].unit == "gpu"
        assert opened[1][1].unit is None
    with pytest.raises(BackendError, match=r"no graph of the draft can run here.*the unit 'npu' was asked"):
        outrider.load(bundle, draft_unit="npu")
    with pytest.raises(UsageError, match="unknown unit 'tpu'; known: cpu, gpu, npu"):
        outrider.load(bundle, draft_unit="tpu")
    with pytest.raises(UsageError, match="draft_unit was given, but draft=False"):
        outrider.load(bundle, draft=False, draft_unit="cpu")


def test_an_npu_graph_that_only_an_emulator_can_run_is_opened_where_it_is_asked_for(
    bundle: Path, opened: Opened, machine: Callable[[str], None]
) -> None:
    with_targets(bundle, graph_entry(bundle, "npu.bin", unit="npu", preference=-1))
    machine("x86_64")
    with outrider.load(bundle) as pipeline:
        assert pipeline.placement[0].path == "target.bin"
        assert "no Hexagon NPU here" in pipeline.placement[0].passed_over[0]
        assert "--target-unit npu" in pipeline.placement[0].passed_over[0]
    with outrider.load(bundle, target_unit="npu") as pipeline:
        assert pipeline.placement[0].path == "npu.bin"
    machine("aarch64")
    with outrider.load(bundle) as pipeline:
        assert pipeline.placement[0].path == "npu.bin"


def test_what_an_emulator_runs_is_labelled(bundle: Path, opened: Opened, monkeypatch: Any) -> None:
    monkeypatch.setattr(FakeGraph, "via", "emulator", raising=False)
    with outrider.load(bundle) as pipeline:
        assert pipeline.placement[0].emulated
        assert "EMULATED" in str(pipeline.placement[0])


def test_a_vulkan_graph_is_passed_over_because_only_android_has_a_runtime_for_it(
    bundle: Path, opened: Opened
) -> None:
    vulkan = graph_entry(bundle, "v.pte", unit="gpu", preference=-1, options={"delegate": "vulkan"})
    with_targets(bundle, vulkan)
    with outrider.load(bundle) as pipeline:
        assert pipeline.placement[0].path == "target.bin"
        assert "ExecuTorch's Android library only" in pipeline.placement[0].passed_over[0]
    with pytest.raises(BackendError, match=r"v\.pte .*Android library only"):
        outrider.load(bundle, target_unit="gpu")


def test_providers_that_are_named_rule_out_graphs_that_are_not_for_them(
    bundle: Path, opened: Opened, machine: Callable[[str], None]
) -> None:
    machine("aarch64")
    gpu = {"unit": "gpu", "options": {"providers": ["WebGpuExecutionProvider", "CPUExecutionProvider"]}}
    with_targets(
        bundle,
        graph_entry(bundle, "a.pte", backend="executorch", preference=-3),
        graph_entry(bundle, "npu.bin", unit="npu", preference=-2),
        graph_entry(bundle, "gpu.bin", preference=-1, **gpu),
    )
    with outrider.load(bundle, target_providers=["CPUExecutionProvider"]) as pipeline:
        assert pipeline.placement[0].path == "target.bin"
        executorch, npu, webgpu = pipeline.placement[0].passed_over
    assert "which is ONNX Runtime's" in executorch
    assert npu.endswith("this graph is for QNNExecutionProvider")
    assert webgpu.endswith("this graph is for WebGpuExecutionProvider")
    with outrider.load(bundle, target_providers=["WebGpuExecutionProvider"]) as pipeline:
        assert pipeline.placement[0].path == "gpu.bin"


def test_a_graph_that_a_missing_extra_would_run_is_passed_over_with_the_install(
    bundle: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any) -> Graph:
        raise MissingExtraError("executorch", "executorch")

    monkeypatch.setitem(loading.BACKENDS, "executorch", absent)
    with_targets(bundle, graph_entry(bundle, "x.pte", backend="executorch", preference=-1))
    with outrider.load(bundle) as pipeline:
        assert pipeline.placement[0].path == "target.bin"
        assert "pip install 'outrider[executorch]'" in pipeline.placement[0].passed_over[0]


def alone(monkeypatch: pytest.MonkeyPatch, free_mb: float | None = None, held_mb: float = 0.0) -> None:
    """A process of the usual size on a machine with so much free memory."""

    def room(limit_mb: float | None) -> Room:
        free = None if free_mb is None else MemoryLimit(free_mb, "that the machine has free now", 128.0)
        return replace(room_here(limit_mb), held_mb=held_mb, free=free)

    monkeypatch.setattr(loading, "room_here", room)


def test_a_memory_limit_counts_the_graphs_that_can_run_here(
    bundle: Path, opened: Opened, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("x86_64")
    (bundle / "huge.bin").write_bytes(b"x" * 3_000_000)
    huge = replace(
        graph_entry(bundle, "npu.bin", unit="npu", preference=-1),
        files={name: describe_file(bundle / name) for name in ("npu.bin", "huge.bin")},
    )
    edit(bundle, lambda m: {"roles": {**m.roles, "draft": RoleEntry((*m.roles["draft"].graphs, huge))}})
    alone(monkeypatch)
    with outrider.load(bundle, memory_limit_mb=(PROCESS_MB + SESSION_MB + 1) / 0.97) as pipeline:
        assert pipeline.drafters == ("lookup", "model")


def test_a_failed_load_closes_what_it_opened(bundle: Path, opened: Opened) -> None:
    draft = graph_entry(bundle, "draft.bin", backend="broken")
    edit(bundle, lambda m: {"roles": {**m.roles, "draft": RoleEntry((draft,))}})
    with pytest.raises(
        BackendError, match=r"no graph of the draft can run here; draft=False decodes without"
    ):
        outrider.load(bundle)
    assert [(path, graph.closed) for path, _, graph in opened] == [("target.bin", True)]
    with outrider.load(bundle, draft=False) as pipeline:
        assert len(pipeline.placement) == 1


def test_options_reach_the_role_that_they_name(bundle: Path, opened: Opened) -> None:
    options = {
        "target_providers": ["A"],
        "target_provider_options": {"A": {"x": 1}},
        "draft_providers": ["B"],
    }
    with outrider.load(bundle, threads=2, **options):  # type: ignore[arg-type]
        pass
    assert [call[1] for call in opened] == [
        RoleOptions(None, ["A"], {"A": {"x": 1}}, 2),
        RoleOptions(None, ["B"], None, 2),
    ]


def test_options_for_a_draft_that_is_not_loaded_are_refused(bundle: Path, opened: Opened) -> None:
    with pytest.raises(UsageError, match="draft_providers was given, but draft=False"):
        outrider.load(bundle, draft=False, draft_providers=["CPUExecutionProvider"])
    edit(bundle, lambda m: {"roles": {"target": m.roles["target"]}})
    with pytest.raises(UsageError, match="draft_backend was given, but the bundle has no draft model"):
        outrider.load(bundle, draft_backend="fake")
    with outrider.load(bundle) as pipeline:
        assert pipeline.drafters == ("lookup",)


def test_a_smaller_context_can_be_asked_for(bundle: Path, opened: Opened) -> None:
    with outrider.load(bundle, max_context=64) as pipeline:
        assert [graph.max_context for _, _, graph in opened] == [64, 64]
        result = pipeline.generate([5] * 60, max_tokens=None, ignore_eos=True)
        assert (len(result.tokens), result.finish_reason) == (4, "length")
    for wrong in (1, 201, 99.5, "64"):
        with pytest.raises(
            UsageError, match=f"max_context is {wrong!r}; this bundle was exported for 2 to 200"
        ):
            outrider.load(bundle, max_context=wrong)


def test_other_impossible_options_are_refused(bundle: Path, opened: Opened) -> None:
    for threads in (0, "2", True, 1.5, 1025, 10**14):
        with pytest.raises(UsageError, match=f"threads is {threads!r}; it must be a whole number"):
            outrider.load(bundle, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown unit 3"):
        outrider.load(bundle, target_unit=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="telemetry is 5; give the path of a trace, or a monitor"):
        outrider.load(bundle, telemetry=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="verify is 'none'; known: size, full"):
        outrider.load(bundle, verify="none")  # type: ignore[arg-type]


def test_a_changed_file_is_found_by_size_or_by_the_full_check(bundle: Path, opened: Opened) -> None:
    (bundle / "target.bin").write_bytes(b"TARGET.BIN")
    outrider.load(bundle).close()
    with pytest.raises(BundleError, match=r"'target\.bin' has sha256"):
        outrider.load(bundle, verify="full")
    (bundle / "target.bin").write_bytes(b"short")
    with pytest.raises(BundleError, match=r"'target\.bin' has 5 bytes"):
        outrider.load(bundle)


def test_a_token_map_of_another_model_is_found_by_the_full_check(bundle: Path, opened: Opened) -> None:
    edit(bundle, lambda m: {"tokenizer": replace(m.tokenizer, hash="0" * 64)})
    with pytest.raises(BundleError, match="token map"):
        outrider.load(bundle, verify="full")


def test_a_draft_made_for_another_target_is_refused(bundle: Path, opened: Opened) -> None:
    draft = graph_entry(bundle, "draft.bin", target_sha256="f" * 64)
    edit(bundle, lambda m: {"roles": {**m.roles, "draft": RoleEntry((draft,))}})
    with pytest.raises(BundleError, match=r"draft\.bin, the draft, was made for the target with sha256 fff"):
        outrider.load(bundle)


def test_a_folder_that_is_no_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json does not exist"):
        outrider.load(tmp_path / "nowhere")


def test_a_file_that_onnxruntime_cannot_read_is_passed_over_with_its_reason(bundle: Path) -> None:
    entry = graph_entry(bundle, "target.bin", backend="onnxruntime")
    described = replace(entry, options={"hidden_size": 8, "masks": ["full"], "sliding_window": None})
    edit(bundle, lambda m: {"roles": {"target": RoleEntry((described,))}})
    with pytest.raises(BackendError, match=r"no graph of the target can run here\. target\.bin"):
        outrider.load(bundle)
    with pytest.raises(BackendError, match="execution provider VitisAIExecutionProvider is not in this ONNX"):
        outrider.load(bundle, target_providers=["VitisAIExecutionProvider"])
    with pytest.raises(UsageError, match=r"unknown execution provider 'NoProvider'; known: .*CPUExecution"):
        outrider.load(bundle, target_providers=["NoProvider"])
    with pytest.raises(UsageError, match="provider options for 'Other', which is not among CPUExecution"):
        outrider.load(bundle, target_provider_options={"Other": {}})


def heat_trace(path: Path, *temps: float) -> Path:
    """A telemetry trace of one thermometer, a reading every half second."""
    from outrider.contracts import Reading
    from outrider.power.telemetry import TelemetryWriter

    with TelemetryWriter(path) as writer:
        for i, temp in enumerate(temps):
            writer([Reading("die", "temperature", temp, "die", "instant", 0.5 * i)])
    return path


def test_heat_and_caps_change_drafts_and_pauses_and_never_the_text(bundle: Path, opened: Opened) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "seed": 3, "temperature": 0.9}
    trace = heat_trace(bundle / "hot.jsonl", *[69.9] * 100)
    with outrider.load(bundle, governor=False) as pipeline:
        free = pipeline.generate("the fox", **options)
    with outrider.load(bundle, temp_limit_c=70.0, telemetry=trace, governor_log=bundle / "log") as pipeline:
        held = pipeline.generate("the fox", **options)
    assert held.tokens == free.tokens
    assert free.stats.level is None
    assert held.stats.level == "hot"
    assert held.stats.paced_s > 0.0
    assert '"kind":"governor"' in (bundle / "log").read_text()


def big(role: RoleEntry) -> RoleEntry:
    """The same graph with a cache of some 2 MB."""
    return RoleEntry(tuple(replace(graph, kv=replace(graph.kv, head_dim=1250)) for graph in role.graphs))


def test_a_draft_beyond_the_memory_limit_is_left_out_and_a_target_is_refused(
    bundle: Path, opened: Opened, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    edit(bundle, lambda m: {"roles": {name: big(role) for name, role in m.roles.items()}})
    with outrider.load(bundle, memory_limit_mb=PROCESS_MB + 24) as pipeline:
        assert pipeline.drafters == ("lookup", "model")
        assert pipeline.memory is not None
        assert pipeline.memory.peak_mb == pytest.approx(
            PROCESS_MB + 2 * 2 + SESSION_MB + 18 * 4e-6 * VOCAB, abs=0.4
        )
    with outrider.load(bundle, memory_limit_mb=PROCESS_MB + 3) as pipeline:
        assert pipeline.drafters == ("lookup",)
    assert "left out, n-gram lookup still drafts: all of it would take 104 of the 88 MB" in caplog.text
    with pytest.raises(
        UsageError, match=r"does not fit into the 86 MB .* would work: 87 MB at most: process 85"
    ):
        outrider.load(bundle, memory_limit_mb=PROCESS_MB + 1)


def test_a_load_that_is_refused_leaves_the_process_as_it_was(
    bundle: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nice value cannot be taken back; nothing of a pipeline may work without it, either."""
    done: list[int] = []
    monkeypatch.setattr(loading, "be_nice", lambda: done.append(len(opened)))
    alone(monkeypatch)
    refused: list[dict[str, Any]] = [
        {"memory_limit_mb": 12.0},
        {"memory_limit_mb": "12"},
        {"max_context": 10**6},
        {"power_cap_w": 5.0, "telemetry": Monitor([])},  # nothing tells power
    ]
    for options in refused:
        with pytest.raises(UsageError):
            outrider.load(bundle, nice=True, **options)
    assert (done, opened) == ([], [])
    with outrider.load(bundle, nice=True):
        assert (done, len(opened)) == ([0], 2)


def test_what_the_machine_has_free_now_bounds_the_plan_and_a_draft_must_leave_a_reserve(
    bundle: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(bundle, lambda m: {"roles": {name: big(role) for name, role in m.roles.items()}})
    alone(monkeypatch, free_mb=60 + 128, held_mb=100)
    with outrider.load(bundle, governor=False) as pipeline:
        assert pipeline.drafters == ("lookup", "model")
    alone(monkeypatch, free_mb=37 + 128, held_mb=100)
    with outrider.load(bundle, governor=False) as pipeline:
        assert pipeline.drafters == ("lookup",)
    alone(monkeypatch, free_mb=35, held_mb=100)
    with pytest.raises(
        UsageError, match=r"the 35 MB that the machine has free now, beside 100 MB that it holds"
    ):
        outrider.load(bundle, governor=False)


def test_the_draft_may_remember_less_than_the_target(bundle: Path, opened: Opened) -> None:
    """Its window slides: the text is the target's, far behind what the draft remembers."""
    options: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "drafter": "model", "k": 3}
    with outrider.load(bundle, governor=False) as whole, outrider.load(bundle, draft_context=16) as short:
        assert short.generate("the fox", **options).tokens == whole.generate("the fox", **options).tokens
    assert [call[1].context for call in opened] == [None, None, None, 16]
    assert opened[-1][2].max_context == 16
    with pytest.raises(UsageError, match="draft_context is 201; this bundle was exported for 2 to 200"):
        outrider.load(bundle, draft_context=201)
    with pytest.raises(UsageError, match="draft_context was given, but draft=False"):
        outrider.load(bundle, draft=False, draft_context=16)


def test_a_draft_that_memory_pressure_drove_out_is_opened_again(bundle: Path, opened: Opened) -> None:
    with outrider.load(bundle, governor=False) as pipeline:
        drafter: Any = pipeline.engine.drafters["model"]
        before = pipeline.generate("the fox", max_tokens=20, ignore_eos=True, drafter="model", k=3)
        drafter.release()
        away = pipeline.generate("the fox", max_tokens=20, ignore_eos=True, drafter="model", k=3)
        drafter.restore()
        back = pipeline.generate("the fox", max_tokens=20, ignore_eos=True, drafter="model", k=3)
    assert before.tokens == away.tokens == back.tokens
    assert (away.stats.drafted, back.stats.drafted > 0) == (0, True)
    assert [path for path, _, _ in opened] == ["target.bin", "draft.bin", "draft.bin"]
    assert all(graph.closed for _, _, graph in opened)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power_cap_w": -2.0}, "power_cap_w is -2.0"),
        ({"temp_limit_c": 1000.0}, "temp_limit_c is 1000.0"),
        ({"objective": "speed"}, "known: latency, energy, balanced"),
        ({"governor": False, "temp_limit_c": 70.0}, "governor is off"),
        ({"device": "toaster"}, "toaster"),
    ],
)
def test_governing_options_that_cannot_be_honoured_are_refused(
    bundle: Path, opened: Opened, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        outrider.load(bundle, **options)
    assert all(graph.closed for _, _, graph in opened)
