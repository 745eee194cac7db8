"""The Neural Engine's rules: each finds its own trap and nothing in a program that keeps to all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.cli.check import describe
from outrider.cli.export import _notes
from outrider.contracts import as_json
from outrider.runtime.check import Check
from outrider.runtime.check_graph import GraphCheck
from outrider.targets import ane_lint
from outrider.targets.ane_lint import Finding, PlannedOperation, lint, plan_findings, report_of
from outrider.targets.ane_rules import RULES
from outrider.targets.coreml_reference.structure import Argument, MilFunctionDef, MilOperation
from outrider.targets.coreml_reference.types import MilType
from outrider.targets.coreml_reference.values import BlobPointer, Literal
from outrider.targets.mil_outline import Flexibility, FunctionOutline

Shape = tuple[int | None, ...]
Given = Argument | tuple[Argument, ...]


def fp16(*shape: int | None, state: bool = False) -> MilType:
    return MilType("fp16", shape, state)


def step(
    kind: str, inputs: Mapping[str, Given], output: str, returned: MilType, **attributes: Literal
) -> MilOperation:
    return MilOperation(kind, output, inputs, ((output, returned),), attributes)


def const(name: str, value: object, dtype: str) -> MilOperation:
    array = np.array(value, {"fp16": np.float16, "int32": np.int32, "bool": np.bool_}[dtype])
    return step(
        "const", {}, name, MilType(dtype, array.shape), val=Literal(MilType(dtype, array.shape), array)
    )


def weight(name: str, kind: MilType) -> MilOperation:
    return step("const", {}, name, kind, val=Literal(kind, BlobPointer("@model_path/weights/weight.bin", 64)))


def outline(
    inputs: Mapping[str, MilType],
    *operations: MilOperation,
    outputs: tuple[str, ...] = (),
    flexible: Mapping[str, Flexibility] | None = None,
) -> FunctionOutline:
    return FunctionOutline(MilFunctionDef("w64", "CoreML8", inputs, operations, outputs), flexible or {})


def found(function: FunctionOutline) -> list[tuple[str, str, str]]:
    """(rule, severity, place) of every finding."""
    return [(finding.rule, finding.severity, finding.operation) for finding in lint([function])]


X = fp16(1, 64, 1, 64)


def convolution(x: str = "x", name: str = "y", channels: int = 64) -> tuple[MilOperation, ...]:
    return (
        weight(f"{name}_w", fp16(channels, 64, 1, 1)),
        step("conv", {"x": x, "weight": f"{name}_w"}, name, fp16(1, channels, 1, 64)),
    )


def test_a_program_that_keeps_to_every_rule_has_no_findings() -> None:
    clean = outline(
        {"x": X, "mask": X},
        *convolution(),
        step("add", {"x": "y", "y": "mask"}, "z", X),
        const("axis", 1, "int32"),
        step("softmax", {"x": "z", "axis": "axis"}, "p", X),
        outputs=("p",),
    )
    assert found(clean) == []


def test_rank_six_is_an_error_and_rank_five_is_not() -> None:
    six, five = fp16(1, 1, 1, 1, 64, 64), fp16(1, 1, 1, 64, 64)
    function = outline(
        {"x": X}, step("reshape", {"x": "x"}, "a", five), step("reshape", {"x": "a"}, "b", six)
    )
    assert found(function) == [("rank", "error", "b")]


def test_a_range_of_shapes_is_an_error_in_the_input_and_where_it_spreads_to() -> None:
    open_shape = fp16(1, 64, 1, None)
    function = outline(
        {"x": open_shape}, step("add", {"x": "x", "y": "x"}, "y", open_shape), flexible={"x": "range"}
    )
    assert found(function) == [("range-shape", "error", "x"), ("range-shape", "error", "y")]


def test_enumerated_shapes_are_a_warning_once_for_each_input() -> None:
    open_shape = fp16(1, 64, 1, None)
    function = outline(
        {"x": open_shape}, step("add", {"x": "x", "y": "x"}, "y", open_shape), flexible={"x": "enumerated"}
    )
    assert found(function) == [("enumerated-shape", "warning", "x")]


@pytest.mark.parametrize("dtype", ["fp32", "int32", "int64", "fp64"])
def test_an_activation_of_another_type_than_it_computes_in_is_an_error(dtype: str) -> None:
    function = outline({"x": X}, step("exp", {"x": "x"}, "y", MilType(dtype, X.shape)), outputs=("y",))
    assert ("dtype", "error", "y") in found(function)


def test_a_float32_input_that_is_only_cast_is_a_warning() -> None:
    outside = MilType("fp32", X.shape)
    function = outline(
        {"x": outside},
        step("cast", {"x": "x"}, "h", X),
        step("cast", {"x": "h"}, "y", outside),
        outputs=("y",),
    )
    assert found(function) == [("boundary-dtype", "warning", "x"), ("boundary-dtype", "warning", "y")]


def test_a_float32_input_that_is_computed_with_is_an_error() -> None:
    outside = MilType("fp32", X.shape)
    function = outline({"x": outside}, step("add", {"x": "x", "y": "x"}, "y", outside), outputs=("y",))
    assert found(function) == [("dtype", "error", "x"), ("dtype", "error", "y")]


def test_a_head_that_is_not_split_is_an_error_by_its_result_and_its_weight() -> None:
    long = found(outline({"x": X}, *convolution(channels=16385)))
    assert long == [("axis-length", "error", "y"), ("axis-length", "error", "y")]
    assert found(outline({"x": X}, *convolution(channels=16384))) == []


def test_a_long_axis_outside_of_products_is_a_warning() -> None:
    function = outline({"x": fp16(1, 8, 1, 32768)}, step("relu", {"x": "x"}, "y", X))
    assert found(function) == [("axis-length", "warning", "y")]


@pytest.mark.parametrize(
    ("width", "severity"), [(1, "info"), (2, "info"), (5, "warning"), (31, "warning"), (32, None)]
)
def test_a_short_last_axis_is_told_and_only_a_note_at_one_or_two_tokens(width: int, severity: str) -> None:
    kind = fp16(1, 64, 1, width)
    function = outline({"x": kind}, step("relu", {"x": "x"}, "y", kind))
    assert (
        found(function) == [] if severity is None else [("narrow", severity, "x"), ("narrow", severity, "y")]
    )


def test_a_singleton_last_axis_in_a_function_for_many_tokens_is_a_warning() -> None:
    function = outline({"x": X}, step("reduce_mean", {"x": "x"}, "y", fp16(1, 64, 1, 1)))
    assert found(function) == [("narrow", "warning", "y")]


def test_an_input_whose_rows_do_not_fill_64_bytes_is_a_warning_and_an_intermediate_is_not() -> None:
    odd = fp16(1, 64, 1, 100)
    function = outline(
        {"x": odd}, step("relu", {"x": "x"}, "h", odd), step("relu", {"x": "h"}, "y", X), outputs=("y",)
    )
    assert found(function) == [("alignment", "warning", "x")]


def test_a_product_of_another_layout_is_a_warning() -> None:
    flat = fp16(64, 64)
    function = outline({"x": flat}, step("matmul", {"x": "x", "y": "x"}, "y", flat))
    assert found(function) == [("layout", "warning", "y")]


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("gather", "gather"),
        ("gather_along_axis", "gather"),
        ("gather_nd", "gather"),
        ("scatter_along_axis", "gather"),
        ("topk", "topk"),
        ("lstm", "recurrent"),
        ("non_zero", "data-sized"),
    ],
)
def test_an_operation_that_leaves_it_is_an_error(kind: str, rule: str) -> None:
    assert found(outline({"x": X}, step(kind, {"x": "x"}, "y", X))) == [(rule, "error", "y")]


def test_a_state_is_a_warning_and_an_error_where_it_is_not_aligned() -> None:
    aligned = outline({"x": X, "cache": fp16(1, 4, 256, 64, state=True)})
    assert found(aligned) == [("state", "warning", "cache")]
    odd = outline({"x": X, "cache": fp16(1, 4, 256, 40, state=True)})
    assert found(odd) == [("state", "warning", "cache"), ("state-alignment", "error", "cache")]


def test_a_write_where_a_tensor_says_is_a_warning_and_at_a_constant_place_it_is_not() -> None:
    begin = const("begin", [0, 0, 0, 8], "int32")
    fixed = {"x": "x", "update": "x", "begin": "begin"}
    assert found(outline({"x": X}, begin, step("slice_update", fixed, "y", X))) == []
    moved = {"x": "x", "update": "x", "begin": "at"}
    function = outline({"x": X, "at": MilType("int16", (64,))}, step("slice_update", moved, "y", X))
    assert ("indexed-write", "warning", "y") in found(function)


@pytest.mark.parametrize(
    ("scales", "blockwise"),
    [
        ((64, 1, 1, 1), False),
        ((1, 1, 1, 1), False),
        ((64, 4, 1, 1), True),
        ((1, 4, 1, 1), True),
        ((8, 1, 1, 1), True),
    ],
)
def test_scales_of_blocks_are_an_error_and_scales_of_channels_are_not(
    scales: tuple[int, ...], blockwise: bool
) -> None:
    function = outline(
        {"x": X},
        weight("codes", MilType("int4", (64, 128, 1, 1))),
        weight("scales", MilType("fp16", scales)),
        step(
            "constexpr_blockwise_shift_scale",
            {"data": "codes", "scale": "scales"},
            "w",
            fp16(64, 128, 1, 1),
        ),
    )
    assert found(function) == ([("blockwise-scale", "error", "w")] if blockwise else [])


@pytest.mark.parametrize(("groups", "warned"), [(1, False), (4, False), (8, False), (16, True), (64, True)])
def test_lookup_tables_for_fewer_than_eight_channels_are_a_warning(groups: int, warned: bool) -> None:
    function = outline(
        {"x": X},
        weight("codes", MilType("uint4", (64, 128, 1, 1))),
        weight("tables", fp16(groups, 1, 1, 1, 16, 1)),
        step("constexpr_lut_to_dense", {"indices": "codes", "lut": "tables"}, "w", fp16(64, 128, 1, 1)),
    )
    assert found(function) == ([("lut-groups", "warning", "w")] if warned else [])


@pytest.mark.parametrize(("axis", "warned"), [(1, False), (-3, False), (3, True), (-1, True), (2, True)])
def test_softmax_along_another_axis_than_channels_is_a_warning(axis: int, warned: bool) -> None:
    along = const("axis", axis, "int32")
    function = outline({"x": X}, along, step("softmax", {"x": "x", "axis": "axis"}, "y", X))
    assert found(function) == ([("softmax-axis", "warning", "y")] if warned else [])


def test_what_has_a_better_form_there_is_a_warning() -> None:
    function = outline(
        {"x": X},
        weight("w", fp16(64, 64)),
        step("linear", {"x": "x", "weight": "w"}, "a", X),
        step("matmul", {"x": "a", "y": "w"}, "b", X),
        step("matmul", {"x": "a", "y": "x"}, "c", X),
        step("silu", {"x": "c"}, "d", X),
        step("scaled_dot_product_attention", {"query": "d", "key": "d", "value": "d"}, "e", X),
    )
    assert found(function) == [
        ("silu", "warning", "d"),
        ("linear", "warning", "a"),
        ("linear", "warning", "b"),
        ("fused-attention", "warning", "e"),
    ]


def test_minus_infinity_in_a_constant_is_an_error_where_something_reads_it() -> None:
    masked = const("masked", [0.0, -np.inf], "fp16")
    read = outline({"x": X}, masked, step("add", {"x": "x", "y": "masked"}, "y", X))
    assert found(read) == [("infinity", "error", "masked")]
    finite = const("masked", [0.0, -40000.0], "fp16")
    assert found(outline({"x": X}, finite, step("add", {"x": "x", "y": "masked"}, "y", X))) == []


def test_every_rule_has_a_name_of_its_own_and_a_public_source() -> None:
    names = [rule.id for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(rule.source.startswith("https://") for rule in RULES)


def test_the_document_lists_every_rule_with_its_severity_and_source() -> None:
    document = (Path(__file__).parents[1] / "docs" / "apple.md").read_text()
    rows = [line for line in document.splitlines() if line.startswith("| `")]
    for rule in RULES:
        (row,) = (row for row in rows if row.startswith(f"| `{rule.id}` | {rule.severity} | {rule.says} |"))
        assert f"({rule.source})" in row


PLAN = (
    PlannedOperation("w1", "a", "conv", "npu", ("cpu", "npu")),
    PlannedOperation("w1", "b", "gather", "cpu", ("cpu",)),
    PlannedOperation("w1", "c", "add", "cpu", ("cpu", "npu")),
    PlannedOperation("w1", "d", "const", None, ()),
)


def test_core_ml_s_plan_is_an_error_where_the_neural_engine_cannot_and_a_warning_where_it_would_not() -> None:
    kinds = [(finding.rule, finding.severity, finding.operation) for finding in plan_findings(PLAN)]
    assert kinds == [("compute-plan", "error", "b"), ("compute-plan", "warning", "c")]


class MLCPUComputeDevice: ...


class MLNeuralEngineComputeDevice: ...


def test_operations_of_coremltools_plan_are_read_by_function_with_their_units() -> None:
    cpu, npu = MLCPUComputeDevice(), MLNeuralEngineComputeDevice()

    def operation(kind: str, name: str, blocks: tuple[SimpleNamespace, ...] = ()) -> SimpleNamespace:
        return SimpleNamespace(operator_name=kind, outputs=[SimpleNamespace(name=name)], blocks=blocks)

    conv, gather, held = operation("ios18.conv", "a"), operation("gather", "b"), operation("const", "w")
    outer = operation("cond", "c", (SimpleNamespace(operations=[gather]),))
    usages = {
        "a": SimpleNamespace(preferred_compute_device=npu, supported_compute_devices=[cpu, npu]),
        "b": SimpleNamespace(preferred_compute_device=cpu, supported_compute_devices=[cpu]),
    }
    block = SimpleNamespace(block=SimpleNamespace(operations=[held, conv, outer]))
    plan = SimpleNamespace(
        model_structure=SimpleNamespace(program=SimpleNamespace(functions={"w1": block})),
        get_compute_device_usage_for_mlprogram_operation=lambda step: usages.get(step.outputs[0].name),
    )
    assert ane_lint.planned_operations(plan) == [
        PlannedOperation("w1", "a", "conv", "npu", ("cpu", "npu")),
        PlannedOperation("w1", "b", "gather", "cpu", ("cpu",)),
    ]


@pytest.mark.parametrize(
    ("system", "version", "can"),
    [("linux", "", False), ("darwin", "14.3.1", False), ("darwin", "14.4", True), ("darwin", "26.0", True)],
)
def test_the_plan_is_asked_for_on_macos_14_4_and_later(
    monkeypatch: pytest.MonkeyPatch, system: str, version: str, can: bool
) -> None:
    monkeypatch.setattr(ane_lint.sys, "platform", system)
    monkeypatch.setattr(ane_lint.platform, "mac_ver", lambda: (version, ("", "", ""), ""))
    assert (ane_lint.no_plan_here() == "") is can


def test_findings_are_grouped_by_rule_with_the_most_severe_first() -> None:
    def finding(rule: str, severity: str, place: str, function: str = "w1") -> Finding:
        return Finding(rule, severity, function, place, "why", "https://x")  # type: ignore[arg-type]

    report = report_of(
        (
            *(finding("narrow", "info", f"n{index}") for index in range(5)),
            finding("gather", "error", "g", "w2"),
            finding("narrow", "warning", "m"),
        ),
        operations=9,
    )
    groups = [(group.rule, group.severity, group.count, group.functions) for group in report.rules]
    assert groups == [
        ("gather", "error", 1, ("w2",)),
        ("narrow", "warning", 1, ("w1",)),
        ("narrow", "info", 5, ("w1",)),
    ]
    assert report.rules[2].examples == ("n0: why", "n1: why", "n2: why")
    assert [finding.operation for finding in report.findings] == ["g", "m"]
    assert (report.count("error"), report.count("warning"), report.count("info")) == (1, 1, 5)


def test_an_export_s_report_has_the_headline_and_every_error() -> None:
    gathered = Finding("gather", "error", "w2", "g", "gather", "https://a")
    found = report_of((gathered, Finding("narrow", "info", "w1", "n", "short", "https://b")), operations=7)
    lines = _notes({"neural_engine": [found.headline(), *found.errors()]})
    assert lines == [
        "  Neural Engine: 7 operations looked over by known rules: 1 errors, 0 warnings, 1 notes",
        "  Neural Engine: error gather: w2, g: gather (https://a)",
    ]


def test_a_folder_that_is_no_package_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ane_lint.BackendError, match=r"no \.mlpackage folder"):
        ane_lint.lint_package(tmp_path)


def checked(*findings: Finding) -> Check:
    """A bundle's verdict with one graph for the Neural Engine, for which these were found."""
    lint_report = report_of(findings, operations=40, plan_note="no Mac")
    graph = GraphCheck(
        "draft", "coreml", "npu", "split", "draft/coreml/model.mlpackage/Manifest.json", "lut6", "evaluator",
        True, lint=lint_report,
    )  # fmt: skip
    return Check(True, (graph,), ())


def test_check_prints_every_error_with_its_source_and_the_rest_by_rule() -> None:
    errors = [Finding("gather", "error", "w2", f"g{index}", "gather", "https://a") for index in range(5)]
    notes = [Finding("narrow", "info", "w1", f"n{index}", "short", "https://b") for index in range(9)]
    text = describe(checked(*errors, *notes))
    assert "40 operations looked over by known rules: 5 errors, 0 warnings, 9 notes" in text
    assert all(f"error gather: w2, g{index}: gather (https://a)" in text for index in range(5))
    assert "9 x note narrow in w1" in text
    assert "Core ML was not asked: no Mac" in text
    assert text.splitlines()[-1] == "ok, but 5 places of a graph for the Neural Engine are known to leave it"


def test_check_is_plainly_ok_without_errors() -> None:
    warning = Finding("narrow", "warning", "w64", "y", "short", "https://b")
    assert describe(checked(warning)).splitlines()[-1] == "ok"


def test_the_lint_is_part_of_check_s_json() -> None:
    told = Finding("gather", "error", "w2", "g", "gather", "https://a")
    noted = Finding("narrow", "info", "w1", "n", "short", "https://b")
    lint_json = as_json(checked(told, noted))["graphs"][0]["lint"]
    assert [finding["rule"] for finding in lint_json["findings"]] == ["gather"]
    assert [(rule["rule"], rule["count"]) for rule in lint_json["rules"]] == [("gather", 1), ("narrow", 1)]
    assert json.loads(json.dumps(lint_json)) == lint_json
