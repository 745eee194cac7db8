"""Pairs with Core ML packages, run by the evaluator: the text is the target's own, whoever drafts and how it rounds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import outrider
from outrider.cli.check import describe
from outrider.contracts import Graph, Sampling
from outrider.errors import BackendError, BundleError
from outrider.export.coreml import export_coreml_draft
from outrider.export.coreml_target import export_coreml_target
from outrider.export.onnx import export_graph
from outrider.manifest import GraphEntry, read_manifest, verify
from outrider.quantize.coreml_recipes import coreml_recipe
from outrider.quantize.recipes import get_recipe
from outrider.runtime import backends
from outrider.runtime.check import Check, check_bundle
from outrider.runtime.closest import graph_key
from outrider.runtime.rounds import Engine, Request
from outrider.targets import coreml_programs
from outrider.targets.coreml import CoreMLGraph
from outrider.targets.coreml_reference import read_package
from outrider.targets.onnxruntime import OnnxGraph
from tests import families
from tests.test_coreml_backend import FakeModel, fake_coremltools
from tests.test_mixed_pairs import FEW, PROMPT, SMALLEST_P, Model, chances, drafting, p_value, text

pytestmark = pytest.mark.usefixtures("traced_once")
OpenGraph = Callable[[str, Model], Graph]
EXPORTS: dict[str, Any] = {"split": export_coreml_draft, "state": export_coreml_target}
WIDTHS = (1, 2, 5, 8)


@pytest.fixture(scope="module")
def open_graph(tmp_path_factory: pytest.TempPathFactory) -> OpenGraph:
    """Export a model once: "onnx" (float32), or in half precision for Core ML as "split" or "state"."""
    made: dict[tuple[str, Model], Any] = {}

    def exported(kind: str, model: Model) -> Any:
        if (kind, model) not in made:
            weights = families.weights_of("llama", model.oracle)
            place = tmp_path_factory.mktemp(kind)
            size = {"max_context": families.CONTEXT}
            if kind == "onnx":
                made[kind, model] = export_graph(
                    weights.config, weights, get_recipe("fp32"), path=place / "graph.onnx", **size
                )
            else:
                recipe = coreml_recipe("fp16")
                made[kind, model] = EXPORTS[kind](
                    weights.config, weights, recipe, place, widths=WIDTHS, **size
                )
        return made[kind, model]

    def open_one(kind: str, model: Model) -> Graph:
        lowered = exported(kind, model)
        if kind == "onnx":
            return OnnxGraph.load(lowered.path, lowered.meta, threads=1)
        package = next(path for path in lowered.files if path.name == "Manifest.json").parent
        described = {**lowered.meta, "functions": dict(lowered.functions)}
        return CoreMLGraph.load(package, described, embedding=lowered.embedding_file, execution="evaluator")

    return open_one


@pytest.mark.parametrize("seed", [0, 1], ids=["same model", "unrelated model"])
@pytest.mark.parametrize(
    ("target", "draft"), [("onnx", "split"), ("split", "onnx"), ("state", "onnx"), ("state", "split")]
)
def test_greedy_text_of_a_pair_is_the_targets_own(
    open_graph: OpenGraph, target: str, draft: str, seed: int
) -> None:
    request = Request(max_new_tokens=24, k=0)
    plain = text(Engine(open_graph(target, Model(0))), request)
    engine = drafting(open_graph(target, Model(0)), open_graph(draft, Model(seed)))
    for k in (1, 4):
        parts = list(engine.decode(PROMPT, replace(request, k=k)))
        assert [token for part in parts for token in part.tokens] == plain
        if seed == 0:
            assert parts[-1].stats.acceptance > 0.8
        else:
            assert parts[-1].stats.acceptance < 0.5


@pytest.mark.parametrize(("target", "draft"), [("onnx", "split"), ("state", "onnx")])
def test_match_gives_the_seeded_plain_text(open_graph: OpenGraph, target: str, draft: str) -> None:
    plain = Engine(open_graph(target, Model(0)))
    engine = drafting(open_graph(target, Model(0)), open_graph(draft, Model(1)))
    for seed in range(3):
        sampling = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=seed)
        request = Request(sampling, max_new_tokens=12, k=0)
        expected = text(plain, request)
        assert text(engine, replace(request, k=2 + seed)) == expected


@pytest.mark.parametrize(("target", "draft"), [("onnx", "split"), ("state", "onnx")])
def test_reject_has_the_targets_distribution(open_graph: OpenGraph, target: str, draft: str) -> None:
    ours, other = Model(0, FEW), Model(1, FEW)
    sampling = Sampling(temperature=1.0, mode="reject")
    engine = drafting(open_graph(target, ours), open_graph(draft, other))
    expected = chances(ours.oracle, sampling, 2)
    assert p_value(engine, sampling, expected, 2, 150) > SMALLEST_P
    # The draft's own distribution is so far off that the test would notice it.
    assert p_value(Engine(open_graph("onnx", other)), sampling, expected, 0, 150) < SMALLEST_P


def test_on_a_mac_core_ml_keeps_one_state_for_all_forwards(
    open_graph: OpenGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_graph("state", Model(0)).close()  # exports it
    monkeypatch.setattr(coreml_programs.sys, "platform", "darwin")
    monkeypatch.setitem(coreml_programs.sys.modules, "coremltools", fake_coremltools())
    monkeypatch.setattr(FakeModel, "made", [])
    real = CoreMLGraph.load

    def on_the_gpu(path: Any, meta: Any, **options: Any) -> CoreMLGraph:
        return real(path, meta, unit="gpu", **{**options, "execution": "auto"})

    monkeypatch.setattr(CoreMLGraph, "load", on_the_gpu)
    graph = open_graph("state", Model(0))
    assert (graph.via, graph.providers) == ("artifact", ("Core ML CPU_AND_GPU",))  # type: ignore[attr-defined]
    oracle = Model(0).oracle
    families.check_decoding(graph, lambda tokens: families.reference_logits(oracle, tokens), 0.03)
    assert FakeModel.made == [("FakeModel", "CPU_AND_GPU", None)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    """A tiny llama whose vocabulary palettes divide."""
    return write_model(tmp_path_factory.mktemp("model"), layers=1, vocab=336, seed=0)


@pytest.fixture(scope="module")
def apple_bundle(
    tmp_path_factory: pytest.TempPathFactory, model: Path, export_tiny: Callable[..., Any]
) -> Path:
    """A float target and itself as the draft, for an iPhone, with a target whose cache the app keeps as well."""
    folder = tmp_path_factory.mktemp("apple") / "bundle"
    role = (model, "fp32")
    options = {"split_target": True, "max_context": 128, "widths": (1, 2, 5, 16), "draft_widths": (1, 2, 16)}
    export_tiny(folder, role, role, device="iphone-16-pro", **options)
    return folder


def entry(bundle: Path, role: str, profile: str) -> GraphEntry:
    graphs = read_manifest(bundle).roles[role].by_preference()
    return next(graph for graph in graphs if (graph.backend, graph.profile) == ("coreml", profile))


def package(bundle: Path, graph: GraphEntry) -> Path:
    return (bundle / graph.path).parent


def test_an_apple_bundle_holds_all_planned_graphs_and_no_stray_file(apple_bundle: Path) -> None:
    manifest = verify(apple_bundle, full=True)
    kinds = {
        role: [(graph.path, graph.unit, graph.profile) for graph in roles.by_preference()]
        for role, roles in manifest.roles.items()
    }
    assert kinds == {
        "target": [
            ("target/coreml/model.mlpackage/Manifest.json", "gpu", "state"),
            ("target/coreml_split/model.mlpackage/Manifest.json", "gpu", "split"),
            ("target/graph.onnx", "cpu", "inplace"),
        ],
        "draft": [
            ("draft/coreml/model.mlpackage/Manifest.json", "npu", "split"),
            ("draft/graph.onnx", "cpu", "inplace"),
        ],
    }
    there = {path.relative_to(apple_bundle).as_posix() for path in apple_bundle.rglob("*") if path.is_file()}
    assert there == {"manifest.json", *manifest.files()}
    draft = entry(apple_bundle, "draft", "split")
    assert draft.functions == {"1": "w1", "2": "w2", "16": "w16"}
    assert (draft.kv.dtype, draft.kv.layout, draft.recipe) == ("float16", "BC1S", "lut6")
    assert draft.embedding_file is not None
    assert draft.gathered_bytes == draft.files[draft.embedding_file].bytes


def test_a_draft_names_its_target_by_the_weights_of_the_package(apple_bundle: Path, tmp_path: Path) -> None:
    """The first file of every package is the same, so its hash would let a draft of any target pass."""
    draft, target = entry(apple_bundle, "draft", "split"), entry(apple_bundle, "target", "state")
    weights = next(name for name in target.files if name.endswith("weight.bin"))
    assert draft.target_sha256 == target.identity == target.files[weights].sha256
    bundle = Path(shutil.copytree(apple_bundle, tmp_path / "bundle"))
    text = (bundle / "manifest.json").read_text()
    wrong = target.files[target.path].sha256
    (bundle / "manifest.json").write_text(
        text.replace(f'"target_sha256": "{target.identity}"', f'"target_sha256": "{wrong}"')
    )
    with pytest.raises(BundleError, match="was made for the target with sha256"):
        outrider.load(bundle)


def test_a_package_says_itself_what_it_is_for(apple_bundle: Path) -> None:
    manifest = read_manifest(apple_bundle)
    for role, profile in (("draft", "split"), ("target", "state"), ("target", "split")):
        said = read_package(package(apple_bundle, entry(apple_bundle, role, profile))).metadata
        assert said["outrider.role"] == role
        assert said["outrider.tokenizer_sha256"] == manifest.tokenizer.hash
        assert said["outrider.widths"] == ("1,2,16" if role == "draft" else "1,2,5,16")


def test_the_manifest_records_that_the_shipped_packages_were_evaluated(apple_bundle: Path) -> None:
    manifest = read_manifest(apple_bundle)
    records = manifest.quality["graphs"]
    for roles in manifest.roles.values():
        for graph in roles.graphs:
            record = records[graph_key(graph)]
            assert (graph.via, graph.executed_artifact) == (record["via"], record["executed_artifact"])
            assert graph.executed_artifact
            assert graph.via == ("evaluator" if graph.backend == "coreml" else "artifact")
            assert record["positions"] > 100


def test_without_core_ml_a_package_is_passed_over_unless_its_unit_is_asked_for(apple_bundle: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    with outrider.load(apple_bundle, threads=1) as pipeline:
        target, draft = pipeline.placement
        assert (target.backend, draft.backend) == ("onnxruntime", "onnxruntime")
        assert "no Core ML here" in draft.passed_over[0]
        assert "--draft-unit npu" in draft.passed_over[0]
        assert "--target-unit gpu" in target.passed_over[0]
        plain = pipeline.generate("the fox", k=0, **options).tokens
    with outrider.load(apple_bundle, threads=1, draft_unit="npu") as pipeline:
        target, draft = pipeline.placement
        assert (target.emulated, draft.emulated) == (False, True)
        assert (draft.backend, draft.profile, draft.providers) == (
            "coreml",
            "split",
            ("Core ML program, evaluated",),
        )
        drafted = pipeline.generate("the fox", k=3, drafter="model", **options)
    assert drafted.tokens == plain
    assert drafted.stats.accepted > 0


def test_a_pair_of_packages_writes_what_its_target_writes_alone(apple_bundle: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    units: dict[str, Any] = {"target_unit": "gpu", "threads": 1}
    with outrider.load(apple_bundle, draft=False, **units) as pipeline:
        assert pipeline.placement[0].profile == "state"
        plain = pipeline.generate("the fox", k=0, **options).tokens
    with outrider.load(apple_bundle, draft_backend="coreml", **units) as pipeline:
        assert [placed.backend for placed in pipeline.placement] == ["coreml", "coreml"]
        drafted = pipeline.generate("the fox", k=3, drafter="model", **options)
    assert drafted.tokens == plain


@pytest.fixture(scope="module")
def checked(apple_bundle: Path) -> Check:
    return check_bundle(apple_bundle, max_tokens=8, threads=1)


def test_check_evaluates_every_package(checked: Check) -> None:
    assert checked.ok, checked.problems
    assert [(graph.backend, graph.profile, graph.via) for graph in checked.graphs] == [
        ("coreml", "state", "evaluator"),
        ("coreml", "split", "evaluator"),
        ("onnxruntime", "inplace", "artifact"),
        ("coreml", "split", "evaluator"),
        ("onnxruntime", "inplace", "artifact"),
    ]
    for graph in checked.graphs:
        assert graph.executed_artifact
        assert graph.row_independence is not None
        assert graph.row_independence.suffix == 0
    assert "executed by the evaluator, not on its unit" in describe(checked)


def test_a_damaged_package_is_an_error_that_names_what_is_wrong(apple_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(apple_bundle, tmp_path / "bundle"))
    draft = entry(bundle, "draft", "split")
    weights = next(bundle / name for name in draft.files if name.endswith("weight.bin"))
    stored = weights.read_bytes()
    weights.unlink()
    with pytest.raises(BundleError, match=r"weight\.bin' is missing from the bundle"):
        outrider.load(bundle, draft_unit="npu")
    weights.write_bytes(stored)
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace('"2": "w2"', '"2": "w3"'))
    with pytest.raises(BackendError, match=r"has no function 'w3'; it has w1, w16, w2"):
        outrider.load(bundle, draft_unit="npu")
    (bundle / "manifest.json").write_text(text.replace('"2": "w2",', ""))
    with pytest.raises(BackendError, match=r"width 2 was given no function .there are: 1, 16."):
        outrider.load(bundle, draft_unit="npu")


def test_on_a_mac_packages_come_first(apple_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def note(directory: Any, graph: GraphEntry, options: Any) -> Graph:
        opened.append(f"{graph.unit} {graph.profile}")
        raise BackendError("this is no Mac after all")

    monkeypatch.setattr(backends, "has_coreml", lambda: True)
    monkeypatch.setitem(backends.BACKENDS, "coreml", note)
    with outrider.load(apple_bundle, threads=1) as pipeline:
        assert opened == ["gpu state", "gpu split", "npu split"]
        assert [placed.backend for placed in pipeline.placement] == ["onnxruntime", "onnxruntime"]


def test_the_demo_of_an_iphone_proves_its_draft_and_leaves_the_text_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.cli import demo
    from outrider.cli.root import cli

    pair = demo.Pair(str(model), "fp32", str(model), "fp32", "a tiny pair")
    monkeypatch.setitem(demo.PAIRS, "smollm2", pair)
    words = ["demo", "--device", "iphone-16-pro", "-o", str(tmp_path / "bundle")]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    for said in (
        "draft on npu by coreml split, lut6, 256 tokens *",
        "draft/coreml/model.mlpackage/Manifest.json: evaluator; ",
        "8 tokens, identical to plain decoding",
        "EVALUATED: ",
        "All of it took ",
    ):
        assert said in done.output
