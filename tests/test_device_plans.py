"""A device gets the graphs that it can use, in order of preference; what cannot be made is refused by name."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ExportError, MissingExtraError, UsageError
from outrider.export import device_plans, role_graphs
from outrider.export.device_plans import (
    GraphPlan,
    check_extras,
    exportable_devices,
    open_device,
    plan_graphs,
)
from outrider.export.options import ExportOptions, RoleOptions
from outrider.quantize.coreml_recipes import Palette
from outrider.targets.device import DEVICES

SNAPDRAGONS = {
    "snapdragon-8-gen3": (57, 75),
    "snapdragon-8-elite": (69, 79),
    "snapdragon-x-elite": (60, 73),
}

APPLES = [*(f"iphone-{n}-pro" for n in (15, 16, 17)), *(f"mac-m{n}" for n in (1, 2, 3, 4))]


def options(device: str = "host", **changes: Any) -> ExportOptions:
    draft = changes.pop("draft", RoleOptions("d"))
    return ExportOptions(RoleOptions("t"), Path("out"), draft, device, **changes)


def plans(device: str, **changes: Any) -> dict[str, tuple[GraphPlan, ...]]:
    return plan_graphs(open_device(device), options(device, **changes))


def kinds(graphs: tuple[GraphPlan, ...]) -> list[tuple[str, str]]:
    return [(plan.lowering, plan.unit) for plan in graphs]


@pytest.mark.parametrize("device", SNAPDRAGONS)
def test_a_snapdragon_gets_the_draft_on_its_npu_the_target_on_its_gpu_and_both_on_its_cpu(
    device: str,
) -> None:
    found = plans(device)
    assert kinds(found["draft"]) == [("npu", "npu"), ("xnnpack", "cpu"), ("onnx", "cpu")]
    assert kinds(found["target"]) == [("vulkan", "gpu"), ("onnx", "gpu"), ("xnnpack", "cpu"), ("onnx", "cpu")]
    for graphs in found.values():
        assert [plan.preference for plan in graphs] == list(range(len(graphs)))
    npu = found["draft"][0]
    assert (npu.backend, npu.profile, npu.recipe, npu.widths) == ("onnxruntime", "split", "a16w8", (1, 2, 64))
    assert npu.max_context == 1024
    assert {plan.max_context for plan in found["target"]} == {2048}
    assert found["target"][0].widths == (1, 5, 64)


@pytest.mark.parametrize(("device", "ids"), SNAPDRAGONS.items())
def test_the_ids_that_qualcomm_compiles_for_are_in_the_profiles(device: str, ids: tuple[int, int]) -> None:
    soc = open_device(device).soc
    assert (soc.soc_model, soc.htp_arch) == ids


def test_the_onnx_graph_of_the_gpu_is_the_cpus_file_with_providers_of_its_own() -> None:
    target = plans("snapdragon-8-gen3")["target"]
    gpu, cpu = target[1], target[3]
    assert gpu.artifact == cpu.artifact
    assert gpu.folder == cpu.folder == "target"
    assert gpu.providers[0] == "WebGpuExecutionProvider"
    assert cpu.providers == ()
    assert len({plan.artifact for plan in target}) == 3


def test_a_jetson_gets_graphs_of_its_own_for_cuda_and_the_cpus_behind_them() -> None:
    found = plans("jetson-orin-nano")
    for graphs in found.values():
        assert kinds(graphs) == [("cuda", "gpu"), ("onnx", "cpu")]
        assert graphs[0].artifact != graphs[1].artifact
        assert graphs[0].providers == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert str(found["target"][0]) == "target on gpu by onnxruntime CUDA, int4"
    assert found["target"][0].folder == "target/cuda"
    assert kinds(plans("jetson-thor", profile="split")["draft"]) == [("onnx", "cpu")]


@pytest.mark.parametrize("device", ["host", "raspberry-pi-5", "raspberry-pi-4"])
def test_a_board_gets_one_onnx_graph_per_role_as_before(device: str) -> None:
    found = plans(device)
    assert [kinds(graphs) for graphs in found.values()] == [[("onnx", "cpu")]] * 2
    assert found["target"][0].profile == "inplace"
    assert kinds(plans(device, backends=("executorch", "onnxruntime"))["draft"]) == [
        ("xnnpack", "cpu"),
        ("onnx", "cpu"),
    ]


@pytest.mark.parametrize("device", ["dimensity-9400", "tensor-g4"])
def test_another_phone_gets_no_hexagon_graph(device: str) -> None:
    found = plans(device)
    assert kinds(found["draft"]) == [("xnnpack", "cpu"), ("onnx", "cpu")]
    with pytest.raises(UsageError, match=f"{device} has no use for the backend 'qnn'; it has: executorch"):
        plans(device, backends=("qnn",))


def test_every_known_device_is_planned() -> None:
    assert set(exportable_devices()) == set(DEVICES)
    for device in DEVICES:
        assert plans(device)["target"]


@pytest.mark.parametrize("device", APPLES)
def test_an_apple_device_gets_the_draft_on_its_neural_engine_the_target_on_its_gpu_and_both_on_its_cpu(
    device: str,
) -> None:
    found = plans(device)
    assert kinds(found["draft"]) == [("coreml_draft", "npu"), ("onnx", "cpu")]
    assert kinds(found["target"]) == [("coreml_target", "gpu"), ("onnx", "cpu")]
    draft, target = found["draft"][0], found["target"][0]
    assert (draft.backend, draft.profile, draft.recipe, draft.widths) == (
        "coreml",
        "split",
        "lut6",
        (1, 2, 64),
    )
    assert (draft.folder, draft.max_context) == ("draft/coreml", 1024)
    assert (target.profile, target.recipe, target.widths) == ("state", "int4-b32", (1, 2, 3, 5, 9, 64))
    assert (target.folder, target.max_context) == ("target/coreml", 2048)
    assert str(draft) == "draft on npu by coreml split, lut6"


def test_what_core_ml_is_told_reaches_the_plans() -> None:
    found = plans(
        "iphone-16-pro",
        split_target=True,
        draft_widths=(1, 4),
        widths=(1, 5),
        draft=RoleOptions("d", coreml_precision="lut4"),
    )
    assert kinds(found["target"])[:2] == [("coreml_target", "gpu"), ("coreml_split", "gpu")]
    assert [plan.folder for plan in found["target"]] == ["target/coreml", "target/coreml_split", "target"]
    assert [plan.widths for plan in found["target"]] == [(1, 5), (1, 5), ()]
    assert (found["draft"][0].recipe, found["draft"][0].widths) == ("lut4", (1, 4))
    scheme_for = RoleOptions("d", coreml_overrides="head=lut6-g16").coreml_scheme("draft").scheme_for
    assert (scheme_for("head"), scheme_for("layers.0.down")) == (Palette(6, 16), Palette(6, 8))


@pytest.mark.parametrize(
    ("device", "changes", "message"),
    [
        ("host", {"split_target": True}, "--split-target was given, but nothing is made for Core ML on host"),
        ("host", {"deployment_target": "ios26"}, "--deployment-target was given, but nothing"),
        (
            "snapdragon-8-gen3",
            {"draft": RoleOptions("d", coreml_precision="lut4")},
            "--coreml-draft-precision",
        ),
        (
            "iphone-16-pro",
            {"npu_target": True},
            "--npu-target: a target for Apple devices is made for the GPU",
        ),
        (
            "iphone-16-pro",
            {"backends": ("qnn",)},
            "iphone-16-pro has no use for the backend 'qnn'; it has: coreml",
        ),
        (
            "iphone-16-pro",
            {"backends": ("onnxruntime",), "deployment_target": "ios18"},
            "--deployment-target",
        ),
        (
            "raspberry-pi-5",
            {"draft_widths": (1, 2)},
            "no graph of the draft for raspberry-pi-5 has static widths",
        ),
    ],
)
def test_what_no_graph_of_a_device_honours_is_refused(
    device: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plans(device, **changes)


def test_an_unknown_device_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"'snapdragon-8-gen4'; known: host, .*Did you mean snapdragon-8-gen3"
    ):
        open_device("snapdragon-8-gen4")


def test_backends_choose_a_subset() -> None:
    found = plans("snapdragon-8-gen3", backends=("onnxruntime", "qnn"))
    assert kinds(found["draft"]) == [("npu", "npu"), ("onnx", "cpu")]
    assert kinds(found["target"]) == [("onnx", "gpu"), ("onnx", "cpu")]
    with pytest.raises(
        UsageError, match="unknown backend 'mlx'; known: onnxruntime, qnn, executorch, coreml"
    ):
        plans("snapdragon-8-gen3", backends=("mlx",))
    with pytest.raises(UsageError, match="snapdragon-8-gen3 has no use for the backend 'coreml'"):
        plans("snapdragon-8-gen3", backends=("coreml",))
    with pytest.raises(UsageError, match="leaves the target without a graph for snapdragon-8-gen3"):
        plans("snapdragon-8-gen3", backends=("qnn",))
    only = plans("snapdragon-8-gen3", backends=("qnn",), npu_target=True)
    assert kinds(only["target"]) == [("npu", "npu")]
    assert only["target"][0].widths == (1, 2, 3, 5, 9, 64)


def test_one_executorch_backend_can_be_named() -> None:
    found = plans("snapdragon-8-gen3", executorch_backend="xnnpack")
    assert ("vulkan", "gpu") not in kinds(found["target"])
    assert ("xnnpack", "cpu") in kinds(found["target"])
    found = plans("snapdragon-8-gen3", executorch_backend="vulkan")
    assert [plan.lowering for plan in found["draft"]] == ["npu", "onnx"]
    with pytest.raises(
        UsageError, match="--executorch-backend xnnpack was given, but --backends has no executorch"
    ):
        plans("snapdragon-8-gen3", executorch_backend="xnnpack", backends=("onnxruntime",))
    with pytest.raises(UsageError, match="unknown ExecuTorch backend 'opencl'; known: xnnpack, vulkan"):
        plans("snapdragon-8-gen3", executorch_backend="opencl")


@pytest.mark.parametrize(
    ("vendor", "sdk"),
    [("qualcomm", "QNN_SDK_ROOT"), ("mediatek", "mtk_converter"), ("samsung", "EXYNOS_AI_LITECORE_ROOT")],
)
def test_a_vendors_backend_names_the_sdk_that_is_missing(vendor: str, sdk: str) -> None:
    with pytest.raises(ExportError, match=f"lowering to '{vendor}' through ExecuTorch needs .*{sdk}"):
        plans("snapdragon-8-gen3", executorch_backend=vendor)


def test_the_static_cache_of_a_draft_is_shorter_unless_told_otherwise() -> None:
    assert plans("snapdragon-8-gen3", max_context=512)["draft"][0].max_context == 512
    assert [plan.max_context for plan in plans("snapdragon-8-gen3")["draft"]] == [1024, 2048, 2048]
    given = plans("snapdragon-8-gen3", draft_context=1536)["draft"]
    assert [plan.max_context for plan in given] == [1536, 1536, 1536]


def test_widths_are_refused_where_no_graph_has_any() -> None:
    with pytest.raises(UsageError, match="widths belong to the split profile"):
        plans("host", widths=(1, 2))
    assert plans("snapdragon-8-gen3", widths=(1, 4))["target"][0].widths == (1, 4)
    assert plans("host", profile="split")["target"][0].widths == (1, 2, 3, 5, 9, 64)


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("onnxruntime_qnn", "qnn"),
        ("executorch", "executorch"),
        ("torchao", "executorch"),
        ("torch", "export"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_install_before_any_work(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = device_plans.find_spec
    monkeypatch.setattr(
        device_plans, "find_spec", lambda name: None if name == module else there(name) or object()
    )
    wanted = [plan for graphs in plans("snapdragon-8-gen3").values() for plan in graphs]
    with pytest.raises(MissingExtraError, match=rf"'{module}' is not installed.*outrider\[{extra}\]"):
        check_extras(wanted)


def test_where_coremltools_has_no_wheel_the_missing_extra_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    there = device_plans.find_spec
    monkeypatch.setattr(
        device_plans, "find_spec", lambda name: None if name == "coremltools" else there(name) or object()
    )
    wanted = [plan for graphs in plans("iphone-16-pro").values() for plan in graphs]
    for machine, said in (
        ("x86_64", r"outrider\[coreml\]'$"),
        ("aarch64", "on linux aarch64.* installs nothing"),
    ):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        with pytest.raises(MissingExtraError, match=said):
            check_extras(wanted)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("outrider.errors.sys.version_info", (3, 14, 0))
    with pytest.raises(MissingExtraError, match=r"Python 3\.14 .* wheels for Python up to 3\.13"):
        check_extras(wanted)


def test_a_library_that_nothing_needs_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"onnxruntime_qnn", "executorch", "torchao"}
    monkeypatch.setattr(device_plans, "find_spec", lambda name: None if name in absent else object())
    check_extras([plan for graphs in plans("host").values() for plan in graphs])


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="deployment target 'ios17' is not known; known: ios18, ios26"):
        options(deployment_target="ios17")
    with pytest.raises(UsageError, match=r"draft_widths are \(0, 1\); each must be at least 1"):
        options(draft_widths=(0, 1))
    with pytest.raises(
        UsageError, match=r"draft_widths are \(1, 4096\); no forward is wider than max_context"
    ):
        options(draft_widths=(1, 4096))
    assert options(draft_widths=(64, 1, 1)).draft_widths == (1, 64)
    with pytest.raises(UsageError, match="draft_context is 4096, more than max_context, 2048"):
        options(draft_context=4096)
    with pytest.raises(UsageError, match="draft_context is 8; it must be at least 16"):
        options(draft_context=8)
    with pytest.raises(UsageError, match="draft_context was given, but no draft model"):
        options(draft_context=64, draft=None)
    with pytest.raises(UsageError, match="kv_cache is 'int4'; known: float32, int8"):
        options(kv_cache="int4")
    with pytest.raises(UsageError, match="kv_cache is 'int8', which `split` graphs cannot have"):
        options(kv_cache="int8", profile="split")
    with pytest.raises(UsageError, match="graphs of an NPU return no hidden states; leave one out"):
        options(npu_target=True, hidden_layers=(0,))
    with pytest.raises(UsageError, match="only a draft's head can be trimmed"):
        replace(options(), target=RoleOptions("t", vocab=100))


@pytest.mark.parametrize(("machine", "arm"), [("x86_64", False), ("aarch64", True), ("arm64", True)])
def test_graphs_are_written_for_arm_but_for_a_host_that_is_none(
    machine: str, arm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    found = {name: role_graphs._is_arm(name) for name in DEVICES}
    assert found == {name: arm if name == "host" else True for name in found}
