"""What goes wrong silently on the way to Core ML must not: each trap that was met is held against our own packages."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import errors
from outrider.errors import BackendError, ExportError, MissingExtraError, UsageError
from outrider.export.coreml import export_coreml_draft
from outrider.export.coreml_target import export_coreml_target
from outrider.export.lowered import Lowered
from outrider.export.slots import SlotWeights
from outrider.quantize.coreml_recipes import Blocks, Palette, coreml_recipe, with_coreml_overrides
from outrider.targets.ane_lint import PlannedOperation, lint_package
from outrider.targets.coreml import CoreMLGraph
from outrider.targets.coreml_reference import MilFunctionDef, MilProgram, read_package
from tests import families

CONTEXT = 32
MANIFEST = "Manifest.json"
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


@pytest.fixture(scope="module")
def llama() -> Any:
    return families.oracle("llama")


def draft(place: Path, weights: SlotWeights, recipe: str = "fp16", **options: Any) -> tuple[Path, Lowered]:
    """A draft's package of widths 1, 2 and 16, and what the export says of it."""
    wanted = {"max_context": CONTEXT, "widths": (1, 2, 16), **options}
    lowered = export_coreml_draft(weights.config, weights, coreml_recipe(recipe), place, **wanted)
    return place / "model.mlpackage", lowered


def target(place: Path, weights: SlotWeights, recipe: str = "fp16", **options: Any) -> tuple[Path, Lowered]:
    """A target's package with a cache of its own."""
    wanted = {"max_context": CONTEXT, **options}
    lowered = export_coreml_target(weights.config, weights, coreml_recipe(recipe), place, **wanted)
    return place / "model.mlpackage", lowered


def opened(package: Path, lowered: Lowered) -> CoreMLGraph:
    return CoreMLGraph.load(package, lowered.meta, embedding=lowered.embedding_file, execution="evaluator")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, llama: Any) -> tuple[Path, Lowered]:
    """The draft of a tiny Llama in half precision."""
    return draft(tmp_path_factory.mktemp("draft"), families.weights_of("llama", llama))


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory, llama: Any) -> tuple[Path, Lowered]:
    """The same model as a target."""
    return target(tmp_path_factory.mktemp("target"), families.weights_of("llama", llama))


@pytest.fixture
def damaged(exported: tuple[Path, Lowered], tmp_path: Path) -> tuple[Path, Lowered]:
    """A copy to take apart."""
    package, lowered = exported
    shutil.copytree(package, tmp_path / "model.mlpackage")
    return tmp_path / "model.mlpackage", lowered


def functions(package: Path) -> dict[str, MilFunctionDef]:
    return dict(read_package(package).functions)


def counts(package: Path) -> Counter[str]:
    """How many operations of each type there are, in all functions."""
    return Counter(step.type for function in functions(package).values() for step in function.operations)


# Compression


def test_a_block_that_does_not_divide_is_refused_where_coremltools_leaves_the_weight_as_it_is(
    tmp_path: Path, llama: Any
) -> None:
    weights = families.weights_of("llama", llama)  # 96 inputs of `down`: no multiple of 64
    recipe = with_coreml_overrides(coreml_recipe("int8"), (("*.down", Blocks(8, 64)),))
    with pytest.raises(ExportError, match=r"down has 96 inputs, and blocks of 64 do not divide them"):
        export_coreml_draft(weights.config, weights, recipe, tmp_path, max_context=CONTEXT, widths=(1,))


def test_a_palette_group_that_does_not_divide_is_refused(tmp_path: Path, llama: Any) -> None:
    weights = families.weights_of("llama", llama)
    recipe = with_coreml_overrides(coreml_recipe("lut6"), (("*.down", Palette(6, 24)),))
    with pytest.raises(ExportError, match=r"down has 64 rows"):
        export_coreml_draft(weights.config, weights, recipe, tmp_path, max_context=CONTEXT, widths=(1,))


@pytest.mark.parametrize(
    ("recipe", "operation"),
    [("lut6", "constexpr_lut_to_dense"), ("int8", "constexpr_blockwise_shift_scale")],
)
def test_every_product_of_a_compressed_draft_reads_a_compressed_weight(
    tmp_path: Path, llama: Any, recipe: str, operation: str
) -> None:
    package, lowered = draft(tmp_path, families.weights_of("llama", llama), recipe, widths=(1,))
    (function,) = functions(package).values()
    made = {step.output: step.type for step in function.operations}
    products = [step for step in function.operations if step.type == "conv"]
    assert {made[str(step.inputs["weight"])] for step in products} == {operation}
    assert len(products) == 2 * 7 + 1
    assert all(report.after != "fp16" for report in lowered.slots)


def test_a_draft_s_embedding_is_no_part_of_the_package_and_is_stored_as_its_description_says(
    tmp_path: Path, llama: Any
) -> None:
    weights = families.weights_of("llama", llama)
    for recipe, dtype in (("fp16", "float16"), ("lut4", "int8")):
        package, lowered = draft(tmp_path / recipe, weights, recipe, widths=(1,))
        assert lowered.meta["embedding"]["dtype"] == dtype
        assert "gather" not in counts(package)
        table = opened(package, lowered)._runner.embedding  # type: ignore[attr-defined]
        expected = weights.matrix("embedding")[[3, 5]]
        np.testing.assert_allclose(table.rows(np.array([3, 5])), expected, atol=np.abs(expected).max() / 100)


def test_a_target_s_embedding_is_compressed_as_its_recipe_says_and_reported(
    tmp_path: Path, llama: Any
) -> None:
    package, lowered = target(tmp_path, families.weights_of("llama", llama), "int4-b32")
    (report,) = (report for report in lowered.slots if report.slot == "embedding")
    (function,) = functions(package).values()
    gathers = [step for step in function.operations if step.type == "gather"]
    tables = {str(step.inputs["x"]) for step in gathers} & {
        name
        for step in function.operations
        for name, kind in step.outputs
        if kind.shape == (families.VOCAB, 64)
    }
    assert report.after == "int8-b32"
    assert len(tables) == 1
    (made,) = (step for step in function.operations if step.output in tables)
    assert made.type == "constexpr_blockwise_shift_scale"


# What a frontend does on its own


def test_several_rows_are_written_into_a_state_at_once_and_rolled_back_by_writing_over(
    stateful: tuple[Path, Lowered], llama: Any
) -> None:
    graph = opened(*stateful)
    families.check_decoding(graph, lambda tokens: families.reference_logits(llama, tokens), 0.05)


def test_a_state_is_written_in_slices_and_never_scattered(stateful: tuple[Path, Lowered]) -> None:
    found = counts(stateful[0])
    assert found["slice_update"] == 2 * 2  # keys and values of two layers
    assert not [name for name in found if name.startswith("scatter")]


def test_no_program_holds_what_only_training_needs(
    exported: tuple[Path, Lowered], stateful: tuple[Path, Lowered]
) -> None:
    for package, _ in (exported, stateful):
        assert not [name for name in counts(package) if "dropout" in name or "random" in name]


def test_inputs_and_outputs_have_the_names_that_the_description_promises(
    exported: tuple[Path, Lowered], stateful: tuple[Path, Lowered]
) -> None:
    caches = {f"{part}_{layer}" for part in ("key", "value") for layer in range(2)}
    for name, function in functions(exported[0]).items():
        selecting = {"select"} if name == "w16" else set()
        assert set(function.outputs) == {"logits_0", *(f"present_{cache}" for cache in caches)}
        assert set(function.inputs) == {
            "x", "cos_full", "sin_full", "mask_full", *(f"past_{cache}" for cache in caches), *selecting
        }  # fmt: skip
    (function,) = functions(stateful[0]).values()
    states = {f"{part}_{layer}" for part in ("keys", "values") for layer in range(2)}
    assert set(function.outputs) == {"logits"}
    assert {name for name, kind in function.inputs.items() if kind.state} == states
    assert {"tokens", "begin", "cos_full", "sin_full", "mask_full"} <= set(function.inputs)


# Half precision


def test_no_program_computes_cosines(exported: tuple[Path, Lowered], stateful: tuple[Path, Lowered]) -> None:
    for package, _ in (exported, stateful):
        assert not {"cos", "sin", "range_1d"} & counts(package).keys()


def test_cosines_and_sines_are_right_at_far_positions(exported: tuple[Path, Lowered]) -> None:
    """Computed in half precision they are off by 0.47 at position 1,500 and by more than 1 at 8,191."""
    from outrider.targets.coreml_profiles import CoreMLMeta

    described = {**exported[1].meta, "max_context": 8192}
    cos, sin = CoreMLMeta.from_json(described).rope["full"]
    inverse = np.array(described["rope"]["full"]["inv_freq"])
    for position in (1, 1500, 4095, 8191):
        angles = position * inverse
        np.testing.assert_allclose(cos[position], np.cos(angles), atol=2**-11)
        np.testing.assert_allclose(sin[position], np.sin(angles), atol=2**-11)


@pytest.mark.parametrize("size", [300.0, 8000.0])
def test_a_norm_of_numbers_whose_squares_leave_half_precision_is_right(
    tmp_path: Path, llama: Any, size: float
) -> None:
    """The square of 256 is infinite in half precision; a residual stream reaches thousands."""
    checkpoint = families.checkpoint_of("llama", llama)
    checkpoint.state["model.embed_tokens.weight"] *= size
    weights = SlotWeights(checkpoint)
    tokens = [3, 50, 9, 77, 12]
    large = families.oracle("llama")
    large.model.embed_tokens.weight.data.mul_(size)
    reference = families.reference_logits(large, tokens)
    for make in (draft, target):
        graph = opened(*make(tmp_path / make.__name__, weights))
        logits = graph.forward(tokens).logits
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(logits, reference, atol=0.02 * np.abs(reference).max())
        graph.close()


# The Neural Engine


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_draft_of_each_family_keeps_to_every_rule_of_the_neural_engine_that_is_an_error(
    tmp_path: Path, family: str
) -> None:
    weights = families.weights_of(family, families.oracle(family))
    package, _ = draft(tmp_path, weights, "lut6", max_context=64, widths=(1, 32))
    report = lint_package(package)
    assert report.operations > 100
    assert [finding for finding in report.findings if finding.severity == "error"] == []


def test_a_gpu_s_format_is_an_error_on_the_neural_engine(tmp_path: Path, llama: Any) -> None:
    weights = families.weights_of("llama", llama)
    recipe = with_coreml_overrides(coreml_recipe("int8"), (("layers.1.down", Blocks(8, 32)),))
    export_coreml_draft(weights.config, weights, recipe, tmp_path, max_context=CONTEXT, widths=(1, 32))
    found = [one for one in lint_package(tmp_path / "model.mlpackage").findings if one.severity == "error"]
    assert {(one.rule, one.function) for one in found} == {
        ("blockwise-scale", "w1"),
        ("blockwise-scale", "w32"),
    }


def test_core_ml_s_own_plan_joins_the_rules_and_its_silence_is_told(exported: tuple[Path, Lowered]) -> None:
    plan = [
        PlannedOperation("w1", "layers_0_query", "conv", "npu", ("cpu", "npu")),
        PlannedOperation("w1", "logits_0", "conv", "cpu", ("cpu",)),
    ]
    report = lint_package(exported[0], planner=lambda package: plan)
    assert report.planned
    assert report.plan_note == "Core ML's plan says nothing of w16, w2"
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert [(one.rule, one.function, one.operation) for one in errors] == [("compute-plan", "w1", "logits_0")]


def test_a_mac_that_cannot_plan_leaves_the_rules_and_says_why(exported: tuple[Path, Lowered]) -> None:
    def planner(package: Path) -> list[PlannedOperation]:
        raise BackendError("Core ML has no plan")

    report = lint_package(exported[0], planner=planner)
    assert (report.planned, report.plan_note) == (False, "Core ML has no plan")
    assert report.count("info") > 0


def test_a_package_for_the_gpu_does_not_pass_for_one_of_the_neural_engine(
    stateful: tuple[Path, Lowered],
) -> None:
    found = {finding.rule for finding in lint_package(stateful[0]).findings if finding.severity == "error"}
    assert {"range-shape", "gather", "dtype", "state-alignment"} <= found  # states of 16 numbers a row


# Damage


def change_model(package: Path, change: Any) -> None:
    """Rewrite the model's specification."""
    from outrider.targets.coreml_reference.schema import load_schema

    model = load_schema().Model()
    model.ParseFromString((package / MODEL).read_bytes())
    change(model)
    (package / MODEL).write_bytes(model.SerializeToString())


def rename_operation(model: Any) -> None:
    block = next(iter(model.mlProgram.functions["w1"].block_specializations.values()))
    next(step for step in block.operations if step.type == "softmax").type = "softplus_of_a_kind"


def test_an_operation_that_the_evaluator_does_not_know_is_named(damaged: tuple[Path, Lowered]) -> None:
    change_model(damaged[0], rename_operation)
    with pytest.raises(BackendError, match="softplus_of_a_kind"):
        opened(*damaged)


def rename_input(model: Any) -> None:
    model.mlProgram.functions["w1"].inputs[0].name = "y"


def widen_input(model: Any) -> None:
    for entry in model.description.functions:
        entry.input[0].type.multiArrayType.shape[-1] += 1


def drop_function(model: Any) -> None:
    del model.mlProgram.functions["w2"]


@pytest.mark.parametrize("change", [rename_input, widen_input, drop_function])
def test_a_program_that_was_edited_by_hand_is_an_error(damaged: tuple[Path, Lowered], change: Any) -> None:
    change_model(damaged[0], change)
    with pytest.raises(BackendError, match=r"edited|does not|do not|manifest says"):
        opened(*damaged)


@pytest.mark.parametrize("name", [MANIFEST, MODEL, WEIGHTS])
@pytest.mark.parametrize("how", ["missing", "cut off", "empty"])
def test_a_file_that_is_missing_or_cut_off_is_an_error_that_names_it(
    damaged: tuple[Path, Lowered], name: str, how: str
) -> None:
    path = damaged[0] / name
    content = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(content[: len(content) // 2 if how == "cut off" else 0])
    with pytest.raises(BackendError, match=rf"{path.name}|\.mlpackage"):
        opened(*damaged)


def test_a_manifest_that_points_outside_of_the_package_is_refused(damaged: tuple[Path, Lowered]) -> None:
    path = damaged[0] / MANIFEST
    content = json.loads(path.read_text())
    content["itemInfoEntries"][content["rootModelIdentifier"]]["path"] = "../../../elsewhere.mlmodel"
    path.write_text(json.dumps(content))
    with pytest.raises(BackendError, match="outside"):
        opened(*damaged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"functions": {"1": "w1", "2": "w2"}}, "width 16 was given no function"),
        ({"functions": {"1": "w1", "2": "w3", "16": "w16"}}, "no function 'w3'"),
        ({"widths": [1, 2, 4, 16]}, "width 4 was given no function"),
    ],
)
def test_a_width_without_a_function_is_an_error(
    exported: tuple[Path, Lowered], changes: dict[str, Any], message: str
) -> None:
    package, lowered = exported
    described = {**lowered.meta, **changes}
    with pytest.raises(BackendError, match=message):
        CoreMLGraph.load(package, described, embedding=lowered.embedding_file, execution="evaluator")


def test_a_function_that_is_not_there_is_an_error_that_lists_those_that_are(
    exported: tuple[Path, Lowered],
) -> None:
    with pytest.raises(BackendError, match=r"no function 'w7'; it has: w1, w16, w2"):
        MilProgram.load(exported[0], "w7")


def test_a_system_that_no_package_is_made_for_is_refused(tmp_path: Path, llama: Any) -> None:
    with pytest.raises(UsageError, match=r"'ios17' is not known; known: ios18, ios26"):
        draft(tmp_path, families.weights_of("llama", llama), target="ios17")


# Without coremltools


def test_without_coremltools_an_export_says_how_to_get_it(
    tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = ("coremltools", "outrider_coreml_proto")
    for name in [name for name in sys.modules if name.split(".")[0] in loaded]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'outrider\[coreml\]'"):
        draft(tmp_path, families.weights_of("llama", llama))


@pytest.mark.parametrize(
    ("system", "machine", "python", "there"),
    [
        ("linux", "x86_64", (3, 11), True),
        ("darwin", "arm64", (3, 13), True),
        ("linux", "aarch64", (3, 11), False),
        ("linux", "x86_64", (3, 14), False),
        ("darwin", "arm64", (3, 14), False),
        ("win32", "AMD64", (3, 11), False),
    ],
)
def test_where_coremltools_has_no_wheel_the_error_says_so_and_the_extra_asks_for_none(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, python: tuple[int, int], there: bool
) -> None:
    from packaging.requirements import Requirement

    monkeypatch.setattr(errors.sys, "platform", system)
    monkeypatch.setattr(errors.sys, "version_info", (*python, 0))
    monkeypatch.setattr("platform.machine", lambda: machine)
    message = str(MissingExtraError("coremltools", "coreml"))
    assert "pip install 'outrider[coreml]'" in message
    assert ("installs nothing" in message) is not there
    monkeypatch.undo()
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in extras["optional-dependencies"]["coreml"]]
    here = {
        "sys_platform": system,
        "platform_machine": machine,
        "python_version": ".".join(map(str, python)),
        "platform_system": {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}[system],
    }
    asked = [one for one in wanted if one.marker is None or one.marker.evaluate(here)]
    assert bool(asked) is there
    assert all(not one.specifier.contains("4.0") for one in wanted)
