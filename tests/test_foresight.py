"""What would end an export after minutes of work is refused before the first graph is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import outrider
from outrider.errors import BackendError, ExportError, OutriderError, UsageError
from outrider.export import foresight, role_graphs
from outrider.export.bundle import ExportOptions, RoleOptions, export_bundle
from outrider.targets.qnn_plugin import has_emulator

Models = dict[str, Path]
SOC = "snapdragon-8-gen3"
DEVICES = Path(outrider.__file__).parent / "targets" / "devices"


@pytest.fixture(autouse=True)
def nothing_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that begins is a failure."""

    def begun(*_: Any) -> Any:
        raise AssertionError("a graph was made before the mistake was found")

    for name in role_graphs.LOWERINGS:
        monkeypatch.setitem(role_graphs.LOWERINGS, name, begun)


def refused(models: Models, folder: Path, **changes: Any) -> OutriderError:
    """What an export for a Snapdragon says, of a tiny pair whose draft goes to the NPU."""
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn is not installed")
    if not has_emulator():
        pytest.skip("onnxruntime-qnn holds no emulator for this processor")
    target, draft = (RoleOptions(str(models[role]), "int8") for role in ("target", "draft"))
    options = {"device": SOC, "backends": ("onnxruntime", "qnn"), "max_context": 64, **changes}
    with pytest.raises(OutriderError) as error:
        export_bundle(ExportOptions(target, folder / "bundle", draft, **options))
    assert list(folder.iterdir()) == []
    return error.value


CALIBRATION = [
    (b"one\ntwo\nthree\n", "holds 3 prompts of"),
    (b"", "holds 0 prompts of 0 tokens"),
    (b"\n \n\n" * 20, "holds 0 prompts of 0 tokens"),
    ("Grüße aus Köln\n".encode("latin-1") * 40, "is no text in UTF-8"),
    (bytes(range(256)), "is no text in UTF-8"),
    (b'{"prompt": "a"}\n{"no": 1}\n', "line 2: expected"),
]


@pytest.mark.parametrize(("data", "said"), CALIBRATION)
def test_a_calibration_file_that_cannot_be_used(
    tiny_models: Models, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, data: bytes, said: str
) -> None:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_bytes(data)
    error = refused(tiny_models, tmp_path, calibration=path)
    assert isinstance(error, UsageError)
    assert said in str(error)
    path.unlink()
    assert "No such file" in str(refused(tiny_models, tmp_path, calibration=path))


def test_a_wheel_that_is_too_old(
    tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ModuleType("onnxruntime_qnn")
    old.__spec__, old.__version__ = ModuleSpec("onnxruntime_qnn", None), "1.22.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", old)
    error = refused(tiny_models, tmp_path)
    assert isinstance(error, BackendError)
    assert "onnxruntime-qnn 1.22.0 is no plugin yet, it is too old: pip install -U" in str(error)


def test_a_chip_of_the_users_own_profile_that_nothing_compiles_for(
    tiny_models: Models, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("devices") / "my-phone.toml"
    path.write_text((DEVICES / f"{SOC}.toml").read_text().replace("{ value = 75,", "{ value = 70,"))
    error = refused(tiny_models, tmp_path, device=str(path))
    assert "htp_arch is '70'; known: 68, 69, 73, 75" in str(error)


def test_an_unknown_executorch_precision(tiny_models: Models, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="executorch is not installed")
    target = RoleOptions(str(tiny_models["target"]), executorch_precision="8da5w")
    with pytest.raises(UsageError, match="unknown ExecuTorch precision '8da5w'"):
        export_bundle(ExportOptions(target, tmp_path / "bundle", backends=("executorch",), max_context=64))


@pytest.mark.parametrize(
    ("changes", "graph"),
    [
        ({"backends": ("executorch",), "executorch_backend": "vulkan"}, "target on gpu by executorch vulkan"),
        ({"backends": ("qnn",), "npu_target": True}, "target on npu by onnxruntime-qnn"),
        ({"backends": ("coreml",), "device": "mac-m4"}, "target on gpu by coreml"),
    ],
)
def test_a_target_that_nothing_here_can_run(
    tiny_models: Models,
    tmp_path: Path,
    changes: dict[str, Any],
    graph: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foresight, "has_coreml", lambda: False)
    options = {"device": SOC, "max_context": 64, **changes}
    asked = ExportOptions(RoleOptions(str(tiny_models["target"])), tmp_path / "bundle", **options)
    with pytest.raises(
        UsageError, match=rf"no graph that can be measured on this computer \({graph}.*--no-ev"
    ):
        export_bundle(asked)
    with pytest.raises(AssertionError, match="a graph was made"):
        export_bundle(replace(asked, evaluate=False))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_layers": (0, 2)}, "hidden_layers has 2; the target has layers 0 to 1"),
        ({"widths": (1, 65), "profile": "split"}, r"no forward is wider than max_context, which is 64"),
    ],
)
def test_layers_and_widths_that_cannot_be(
    tiny_models: Models, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    assert said in str(refused(tiny_models, tmp_path, **changes))


def test_widths_are_a_set() -> None:
    assert ExportOptions(RoleOptions("t"), Path("o"), widths=(64, 5, 1, 5)).widths == (1, 5, 64)


UNUSED = [
    ("--npu-precision", ["--npu-precision", "a16w4"]),
    ("--npu-target", ["--npu-target"]),
    ("--calibration", ["--calibration", "prompts.txt"]),
    ("--executorch-precision", ["--executorch-precision", "8da8w"]),
    ("--npu-precision", ["--device", SOC, "--backends", "onnxruntime", "--npu-precision", "a16w8"]),
    ("--precision", ["--device", SOC, "--backends", "executorch", "--precision", "int8"]),
    ("--profile", ["--device", SOC, "--backends", "executorch", "--profile", "split"]),
    ("--override", ["--device", SOC, "--backends", "executorch", "--override", "head=int8-b64"]),
    (
        "--draft-precision",
        ["--device", SOC, "-md", "d", "--backends", "qnn,executorch", "--draft-precision", "int8"],
    ),
]


@pytest.mark.parametrize(("option", "words"), UNUSED)
def test_an_option_that_no_planned_graph_reads(
    run_main: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    words: list[str],
) -> None:
    """Refused before the model is even looked for."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").touch()
    code, _, err = run_main("export", "-m", "no-such-model", "-o", str(tmp_path / "b"), *words)
    assert code == 2
    assert f"outrider: {option} was given, but no graph of this export reads it (they are: target on" in err


def test_an_option_that_one_planned_graph_reads_is_taken(
    run_main: Callable[..., Any], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.touch()
    words = [
        "--device",
        SOC,
        "-md",
        "d",
        "--npu-precision",
        "a16w4",
        "--calibration",
        str(prompts),
        "--precision",
        "int8",
    ]
    code, _, err = run_main("export", "-m", "no-such-model", "-o", str(tmp_path / "b"), *words)
    assert code == 2
    assert "'no-such-model' is no file" in err


def test_a_palette_that_does_not_divide_a_weight_is_refused_before_any_work(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """The tiny target has 328 ids."""
    stages: list[str] = []
    target = RoleOptions(str(tiny_models["target"]), "int8")
    asked = ExportOptions(
        target,
        tmp_path / "bundle",
        draft=replace(target, coreml_overrides="head=lut6-g16"),
        device="iphone-16-pro",
        max_context=256,
    )
    with pytest.raises(
        ExportError, match=r"head has 328 rows, and a palette for every 16 .* lut6-g<divisor>"
    ):
        export_bundle(asked, lambda stage, part: stages.append(stage))
    assert stages == []
