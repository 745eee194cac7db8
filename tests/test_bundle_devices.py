"""A bundle for a SoC holds several graphs a role, each proven the closest way there is here, or it is not written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import outrider
from outrider.cli.check import describe
from outrider.errors import BackendError, BundleError, ExportError, UsageError
from outrider.export import role_graphs
from outrider.export.lowered import Lowered
from outrider.export.role_graphs import LOWERINGS, Making
from outrider.manifest import read_manifest, verify, write_manifest
from outrider.quantize.gates import Gate
from outrider.runtime import backends, check_graph
from outrider.runtime.check import Check, check_bundle
from outrider.runtime.check_graph import GraphCheck
from outrider.runtime.closest import graph_key, open_closest
from outrider.targets.qnn_plugin import has_emulator

Export = Callable[..., Any]
Models = dict[str, Path]
emulated = pytest.mark.skipif(
    not has_emulator(), reason="the emulator is in the x86-64 wheel of onnxruntime-qnn"
)


def lower_as_onnx(making: Making) -> Lowered:
    """A stand-in for a lowering that takes long: the same decoder as ONNX, in a file of the plan's kind."""
    plan = making.plan
    onnx = replace(plan, lowering="onnx", profile="split", widths=(1, 4))
    options = replace(making.options, profile="split", widths=(1, 4))
    lowered = LOWERINGS["onnx"](replace(making, plan=onnx, options=options))
    if plan.lowering != "vulkan":
        return lowered
    reference = making.place / "reference.pte"
    shutil.copyfile(lowered.files[0], reference)
    description = {"file": reference.name, "widths": [1, 4], "methods": {}}
    meta = {**lowered.meta, "delegate": "vulkan", "reference": description}
    return replace(lowered, files=(*lowered.files, reference), meta=meta)


def open_as_onnx(directory: Any, graph: Any, options: Any) -> Any:
    return backends.BACKENDS["onnxruntime"](
        directory, replace(graph, backend="onnxruntime", profile="split"), options
    )


@pytest.fixture(scope="module")
def without_executorch() -> Iterator[None]:
    """Lowering by ExecuTorch takes minutes even for a tiny model; its own tests run it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("xnnpack", "vulkan"):
            patch.setitem(role_graphs.LOWERINGS, name, lower_as_onnx)
        patch.setitem(backends.BACKENDS, "executorch", open_as_onnx)
        yield


@pytest.fixture(scope="module")
def soc_bundle(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: Models,
    export_tiny: Export,
    without_executorch: None,
) -> Path:
    """A float target, itself as the draft, for a Snapdragon: the NPU's graphs are real. Copy it before a change."""
    folder = tmp_path_factory.mktemp("soc") / "bundle"
    pair = (tiny_models["target"], "fp32"), (tiny_models["target"], "fp32")
    export_tiny(folder, *pair, device="snapdragon-8-gen3", max_context=128, allow_quality=False)
    return folder


@pytest.fixture(scope="module")
def checked(soc_bundle: Path) -> Check:
    return check_bundle(soc_bundle, max_tokens=12, quick=True, threads=1)


def graphs_of(result: Check, role: str) -> list[GraphCheck]:
    return [graph for graph in result.graphs if graph.role == role]


@emulated
def test_a_soc_bundle_holds_all_planned_graphs_and_no_stray_file(soc_bundle: Path) -> None:
    manifest = verify(soc_bundle, full=True)
    kinds = {
        role: [(graph.path, graph.unit, graph.profile) for graph in entry.by_preference()]
        for role, entry in manifest.roles.items()
    }
    assert kinds == {
        "target": [
            ("target/vulkan/graph.onnx", "gpu", "split"),
            ("target/graph.onnx", "gpu", "inplace"),
            ("target/xnnpack/graph.onnx", "cpu", "buffer"),
            ("target/graph.onnx", "cpu", "inplace"),
        ],
        "draft": [
            ("draft/npu/w1.onnx", "npu", "split"),
            ("draft/xnnpack/graph.onnx", "cpu", "buffer"),
            ("draft/graph.onnx", "cpu", "inplace"),
        ],
    }
    there = {path.relative_to(soc_bundle).as_posix() for path in soc_bundle.rglob("*") if path.is_file()}
    assert there == {"manifest.json", *manifest.files()}
    assert manifest.device == "snapdragon-8-gen3"


@emulated
def test_the_npu_graph_says_all_that_its_backend_must_know(soc_bundle: Path) -> None:
    npu = read_manifest(soc_bundle).roles["draft"].by_preference()[0]
    assert npu.functions == {"1": "w1.onnx", "2": "w2.onnx", "64": "w64.onnx"}
    assert npu.embedding_file == "draft/npu/embedding.i8"
    assert (npu.kv.dtype, npu.recipe, npu.widths) == ("int16", "a16w8", (1, 2, 64))
    assert (npu.options["soc_model"], npu.options["htp_arch"]) == ("57", "75")
    compiled = npu.options["contexts"]["snapdragon-8-gen3"]
    assert set(compiled) == {"1", "2", "64"}
    assert {f"draft/npu/{name}" for name in compiled.values()} <= set(npu.files)
    assert any(name.endswith(".bin") for name in npu.files)
    assert npu.gathered_bytes == npu.files[npu.embedding_file].bytes


@emulated
def test_no_byte_is_stored_twice_for_the_gpu_providers(soc_bundle: Path) -> None:
    target = read_manifest(soc_bundle).roles["target"]
    gpu, cpu = (graph for graph in target.by_preference() if graph.path == "target/graph.onnx")
    assert gpu.files == cpu.files
    assert gpu.options["providers"][0] == "WebGpuExecutionProvider"
    assert "providers" not in cpu.options


@emulated
def test_the_manifest_records_how_each_graph_was_proven_and_what_its_drafts_are_worth(
    soc_bundle: Path,
) -> None:
    manifest = read_manifest(soc_bundle)
    records = manifest.quality["graphs"]
    entries = [graph for entry in manifest.roles.values() for graph in entry.graphs]
    assert set(records) == {graph_key(graph) for graph in entries}
    for graph in entries:
        record = records[graph_key(graph)]
        assert (record["via"], record["executed_artifact"]) == (graph.via, graph.executed_artifact)
        assert record["passed"]
    proven = {key: record["via"] for key, record in records.items()}
    assert proven["draft/npu/w1.onnx"] == "emulator"
    assert proven["target/vulkan/graph.onnx"] == "reference-lowering"
    assert proven["target/graph.onnx (gpu)"] == "reference-lowering"
    assert proven["target/graph.onnx"] == proven["draft/graph.onnx"] == "artifact"
    npu = records["draft/npu/w1.onnx"]
    assert npu["positions"] < 20 < npu["evaluator"]["positions"]
    for figures in (npu, npu["evaluator"]):
        assert abs(figures["sum_min_pq_float"] - figures["sum_min_pq"]) < 0.05
        assert figures["sum_min_pq_float"] > 0.99  # the float draft is the target itself
    assert records["draft/graph.onnx"]["sum_min_pq"] == pytest.approx(1, abs=1e-4)


@emulated
def test_check_runs_every_graph_and_names_what_it_could_not_run_itself(checked: Check) -> None:
    assert checked.ok, checked.problems
    assert [(graph.path, graph.via) for graph in graphs_of(checked, "target")] == [
        ("target/vulkan/graph.onnx", "reference-lowering"),
        ("target/graph.onnx", "reference-lowering"),
        ("target/xnnpack/graph.onnx", "artifact"),
        ("target/graph.onnx", "artifact"),
    ]
    draft = graphs_of(checked, "draft")
    assert [graph.via for graph in draft] == ["emulator", "artifact", "artifact"]
    assert not graphs_of(checked, "target")[0].executed_artifact
    for graph in draft:
        assert graph.quality is not None
        assert graph.quality.sum_min_pq_float is not None
    text = describe(checked)
    assert "draft/npu/w1.onnx, a16w8, onnxruntime on npu, split: executed on an EMULATED unit" in text
    assert "the same program lowered for the CPU; the delegate itself runs on Android only" in text
    assert "not by WebGpuExecutionProvider" in text


@emulated
def test_quick_samples_the_emulator_only_and_tells_how_long_it_takes(soc_bundle: Path) -> None:
    stages: list[str] = []
    result = check_bundle(
        soc_bundle, max_tokens=8, quick=True, threads=1, progress=lambda stage, part: stages.append(stage)
    )
    npu, other, _ = graphs_of(result, "draft")
    assert npu.quality is not None
    assert other.quality is not None
    assert npu.quality.positions < other.quality.positions
    assert any("draft on the emulated npu: 6 steps of " in stage for stage in stages)


@emulated
def test_quick_writes_one_short_text_with_an_emulated_draft_and_whole_ones_without(soc_bundle: Path) -> None:
    result = check_bundle(soc_bundle, max_tokens=12, quick=True, threads=1, draft_unit="npu")
    assert result.ok, result.problems
    found = [(text.drafter, text.k, text.tokens) for text in result.texts]
    lookup = [entry for entry in found if entry[0] == "lookup"]
    assert found == [*lookup, ("model", "2", 8)]
    assert len(lookup) == 6
    assert max(tokens for *_, tokens in lookup) == 12


@emulated
def test_an_emulated_draft_leaves_the_text_as_it_is(soc_bundle: Path) -> None:
    with outrider.load(soc_bundle, threads=1) as pipeline:
        placed = {place.role: place for place in pipeline.placement}
        assert placed["draft"].path == "draft/xnnpack/graph.onnx"
        assert "no Hexagon NPU here" in placed["draft"].passed_over[0]
        plain = pipeline.generate("the fox", k=0, max_tokens=10).tokens
    with outrider.load(soc_bundle, threads=1, draft_unit="npu") as pipeline:
        assert pipeline.placement[1].emulated
        drafted = pipeline.generate("the fox", k=3, drafter="model", max_tokens=10)
    assert drafted.tokens == plain
    assert drafted.stats.accepted > 0


@emulated
def test_a_stand_in_that_is_missing_is_an_error_that_names_it(soc_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(soc_bundle, tmp_path / "bundle"))
    manifest = read_manifest(bundle)
    graphs = []
    for graph in manifest.roles["target"].graphs:
        files = {name: entry for name, entry in graph.files.items() if not name.endswith("reference.pte")}
        graphs.append(replace(graph, files=files))
    roles = {**manifest.roles, "target": replace(manifest.roles["target"], graphs=tuple(graphs))}
    write_manifest(bundle, replace(manifest, roles=roles))
    with pytest.raises(BundleError, match=r"'target/vulkan/reference\.pte' is named by the graph"):
        check_bundle(bundle, max_tokens=8, quick=True, threads=1)


def test_a_graph_below_its_gate_is_not_written_unless_that_is_allowed(
    tiny_models: Models, export_tiny: Export, tmp_path: Path
) -> None:
    """Random weights at 4 bits agree with the float ones in fewer choices than any recipe's gate allows."""
    target = (tiny_models["target"], "int4")
    with pytest.raises(
        ExportError, match=r"(?s)target/graph\.onnx \(int4\): top-1 agreement 0\.\d+ at .*--allow-quality"
    ):
        export_tiny(tmp_path / "bundle", target, allow_quality=False)
    assert list(tmp_path.iterdir()) == []
    export_tiny(tmp_path / "bundle", target, allow_quality=True)
    record = read_manifest(tmp_path / "bundle").quality["graphs"]["target/graph.onnx"]
    assert (record["passed"], record["allowed"]) == (False, True)
    assert "top-1 agreement" in record["below"][0]


def test_check_condemns_a_graph_below_its_gate_unless_the_export_allowed_it(
    tiny_models: Models, export_tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_tiny(tmp_path / "bundle", (tiny_models["target"], "int4"))
    monkeypatch.setattr(check_graph, "gate_for", lambda recipe: Gate(recipe, 0.7, 0.999, 0.1))
    assert check_bundle(tmp_path / "bundle", max_tokens=8, threads=1).ok
    manifest = tmp_path / "bundle" / "manifest.json"
    text = json.loads(manifest.read_text())
    del text["quality"]["graphs"]["target/graph.onnx"]["allowed"]
    manifest.write_text(json.dumps(text))
    result = check_bundle(tmp_path / "bundle", max_tokens=8, threads=1)
    assert not result.ok
    assert "below the gate of int4: top-1 agreement" in result.problems[0]


def test_a_graph_that_cannot_be_run_is_never_simply_ok(
    tiny_models: Models, export_tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any) -> Any:
        raise BackendError("no runtime for it here")

    monkeypatch.setitem(role_graphs.LOWERINGS, "xnnpack", lower_as_onnx)
    monkeypatch.setitem(backends.BACKENDS, "executorch", absent)
    pair = (tiny_models["target"], "fp32"), (tiny_models["target"], "fp32")
    options = {"backends": ("executorch", "onnxruntime"), "max_context": 64}
    with pytest.raises(ExportError, match="it could not be run here: no runtime for it here"):
        export_tiny(tmp_path / "bundle", *pair, allow_quality=False, **options)
    export_tiny(tmp_path / "bundle", *pair, **options)
    result = check_bundle(tmp_path / "bundle", max_tokens=8, threads=1)
    first = graphs_of(result, "target")[0]
    assert (first.via, first.executed_artifact, first.note) == (None, False, "no runtime for it here")
    assert result.ok
    assert (
        describe(result).splitlines()[-1].startswith("ok, but not executed here, so not proven here: target ")
    )


def test_a_lowering_that_fails_leaves_nothing(
    tiny_models: Models, export_tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(making: Making) -> Lowered:
        raise ExportError("the delegate does not take it")

    monkeypatch.setitem(role_graphs.LOWERINGS, "npu", broken)
    pair = (tiny_models["target"], "int8"), (tiny_models["target"], "int8")
    with pytest.raises(ExportError, match="the delegate does not take it"):
        export_tiny(tmp_path / "bundle", *pair, device="snapdragon-8-gen3", backends=("onnxruntime", "qnn"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["one", "two", "three"],
            r"holds 3 prompts of \d+ tokens together; activation ranges need at least 8",
        ),
        (['{"prompt": "a"}', '{"no": 1}'], "line 2: expected"),
        ([], "holds 0 prompts of 0 tokens"),
    ],
)
def test_a_calibration_file_that_says_too_little_is_refused(
    tiny_models: Models, export_tiny: Export, tmp_path: Path, lines: list[str], message: str
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(lines))
    pair = (tiny_models["target"], "int8"), (tiny_models["target"], "int8")
    options = {"device": "snapdragon-8-gen3", "backends": ("onnxruntime", "qnn"), "calibration": path}
    with pytest.raises(UsageError, match=message):
        export_tiny(tmp_path / "out" / "bundle", *pair, **options)


@emulated
def test_a_device_file_of_the_users_own_is_compiled_for_by_its_name_and_its_path_is_not_told(
    tiny_models: Models, export_tiny: Export, tmp_path: Path
) -> None:
    shipped = Path(outrider.__file__).parent / "targets" / "devices" / "snapdragon-8-gen3.toml"
    own = Path(shutil.copy(shipped, tmp_path / "my-phone.toml"))
    pair = (tiny_models["draft"], "int8"), (tiny_models["draft"], "int8")
    backends = ("onnxruntime", "qnn")
    bundle = tmp_path / "bundle"
    export_tiny(bundle, *pair, device=str(own), backends=backends, max_context=64, evaluate=False)
    assert str(tmp_path) not in (bundle / "manifest.json").read_text()
    manifest = verify(bundle, full=True)
    npu = manifest.roles["draft"].by_preference()[0]
    assert (manifest.device, list(npu.options["contexts"])) == ("my-phone", ["my-phone"])
    assert any(name.startswith("draft/npu/my-phone/") and name.endswith(".bin") for name in npu.files)
    with outrider.load(bundle, draft_unit="npu", threads=1) as pipeline:
        sessions = pipeline.engine.drafters["model"].graph._sessions  # type: ignore[attr-defined]
        assert {path.parent.name for path in sessions.compiled.values()} == {"my-phone"}


@emulated
def test_the_demo_of_a_device_proves_its_draft_and_leaves_the_text_alone(
    tiny_models: Models, traced_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.cli import demo
    from outrider.cli.root import cli

    model = str(tiny_models["target"])
    monkeypatch.setitem(demo.PAIRS, "smollm2", demo.Pair(model, "fp32", model, "fp32", "a tiny pair"))
    words = ["demo", "--device", "snapdragon-8-gen3", "-o", str(tmp_path / "bundle")]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    for said in (
        "draft on npu by onnxruntime-qnn, a16w8, 256 tokens *",
        "draft/npu/w1.onnx: emulator; ",
        "by the evaluator: CPU kernels; ",
        "8 tokens, identical to plain decoding",
        "EMULATED: ",
        "All of it took ",
    ):
        assert said in done.output
    with pytest.raises(UsageError, match="unknown device 'toaster'"):
        CliRunner().invoke(cli, [*words[:1], "--device", "toaster"], catch_exceptions=False)


def test_the_report_says_what_no_delegate_took_and_how_large_the_compiled_graphs_are() -> None:
    from outrider.cli.export import describe as describe_export
    from outrider.export.bundle import ExportReport

    notes = {
        "delegation": {"forward_w1": {"delegates": 2, "delegated": 40, "left": {"aten.embedding": 1}}},
        "compiled": {"snapdragon-8-gen3": {"binaries": {"w1_qnn.bin": 2_500_000}, "shared": True}},
        "overrides": {"layers.0.down": 8},
        "massive": ["layers.1.down"],
        "operators": {"MatMul": 9},
    }
    text = describe_export(
        ExportReport(Path("out"), {"draft": {"draft/npu": Lowered((), {}, (), notes=notes)}})
    )
    assert "forward_w1: 2 delegates with 40 operators; on no delegate: aten.embedding 1" in text
    assert "compiled for snapdragon-8-gen3: w1_qnn.bin 2.5 MB, shared by all widths" in text
    assert "more bits for the sensitive: layers.0.down" in text
    assert "half precision, for their range: layers.1.down" in text
    assert "MatMul" not in text


def test_a_jetsons_cuda_graph_is_passed_over_without_cuda_and_agrees_with_the_cpus_graph(
    tmp_path: Path, tiny_models: Models, export_tiny: Export
) -> None:
    folder, wish = tmp_path / "bundle", {"device": "jetson-orin-nano", "max_context": 128, "evaluate": False}
    export_tiny(folder, (tiny_models["target"], "int4"), **wish)
    gpu = verify(folder, full=True).roles["target"].by_preference()[0]
    assert (gpu.path, gpu.unit, gpu.kv.dtype) == ("target/cuda/graph.onnx", "gpu", "float16")
    assert gpu.options["provider_options"]["CUDAExecutionProvider"] == {
        "arena_extend_strategy": "kSameAsRequested"
    }
    with outrider.load(folder, threads=1) as pipeline:
        (reason,) = pipeline.placement[0].passed_over
        assert "no CUDAExecutionProvider" in reason
        exact = pipeline.engine.target.forward([5, 6, 7, 8]).logits.copy()
    opened = open_closest(folder, "target", gpu, threads=1)
    found = opened.graph.forward([5, 6, 7, 8]).logits
    opened.graph.close()
    assert (opened.via, opened.executed_artifact) == ("reference-lowering", False)
    assert np.abs(found - exact).max() < 0.05 * np.abs(exact).max()
