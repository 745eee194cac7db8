"""Before any work an export says what its graphs will take, and refuses or adapts a pair that cannot fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ExportError, UsageError
from outrider.export.budget import HTP_CONTEXT_MB, Budget, estimate, fit_budget
from outrider.export.config import ModelConfig
from outrider.export.device_plans import open_device, plan_graphs
from outrider.export.options import ExportOptions, RoleOptions
from outrider.manifest import read_manifest
from outrider.targets.device import Device, Figure
from outrider.targets.qnn_plugin import has_emulator

SMALL = ModelConfig("qwen2", 151936, 896, 24, 14, 2, 64, 4864, 32768, tie_embeddings=True)
LARGE = ModelConfig("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 32768, tie_embeddings=True)
HUGE = ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 131072)
LARGER = replace(HUGE, vocab_size=64000, num_layers=24, layer_types=())


def options(device: str = "snapdragon-8-gen3", **changes: Any) -> ExportOptions:
    draft = changes.pop("draft", RoleOptions("d"))
    return ExportOptions(RoleOptions("t"), Path("out"), draft, device, **changes)


def with_memory(slug: str, gb: float) -> Device:
    device = open_device(slug)
    return replace(device, memory=replace(device.memory, capacity_gb=Figure(gb, "a test")))


def fit(device: Device, asked: ExportOptions, target: ModelConfig = LARGE, draft: ModelConfig = SMALL) -> Any:
    return fit_budget(device, asked, {"target": target, "draft": draft})


def test_a_pair_that_fits_is_left_as_it_was_asked_for() -> None:
    asked = options()
    adapted, plans, budget = fit(open_device("snapdragon-8-gen3"), asked)
    assert adapted == asked
    assert plans == plan_graphs(open_device("snapdragon-8-gen3"), asked)
    assert (budget.fits, budget.notes) == (True, ())
    assert budget.limit_mb == 6000


def test_the_table_names_every_graph_its_parts_and_the_assumption() -> None:
    *_, budget = fit(open_device("snapdragon-8-gen3"), options())
    table = str(budget)
    for plan in (
        "target on gpu by executorch vulkan",
        "draft on npu by onnxruntime-qnn, a16w8, 1024 tokens *",
    ):
        assert plan in table
    assert re.search(
        r"together \d+ MB of 6000 MB that an app may take on snapdragon-8-gen3 \(assumed: 50% of 12 GB", table
    )
    assert len(table.splitlines()) == 1 + 7 + 1


def test_sizes_follow_shapes_and_recipes() -> None:
    asked = options(draft_context=1024)
    found = {
        (size.plan.role, size.plan.lowering, size.plan.unit): size
        for size in fit(open_device("snapdragon-8-gen3"), asked)[2].sizes
    }
    npu = found["draft", "npu", "npu"]
    products = (
        sum(rows * columns for rows, columns in [(1152, 896), (896, 896), (9728, 896), (896, 4864)]) * 24
        + 151936 * 896
    )
    assert npu.weights_mb == pytest.approx(products / 1e6)
    assert npu.tables_mb == pytest.approx(151936 * 896 / 1e6)
    assert npu.kv_mb == pytest.approx(2 * 24 * 2 * 64 * 1024 * 2 / 1e6)
    assert npu.memory_mb == npu.binaries_mb + npu.kv_mb + npu.tables_mb
    cpu = found["draft", "xnnpack", "cpu"]
    assert cpu.kv_mb == 2 * npu.kv_mb
    assert cpu.weights_mb < npu.weights_mb + npu.tables_mb
    four = fit(
        open_device("snapdragon-8-gen3"), replace(asked, draft=RoleOptions("d", npu_precision="a16w4"))
    )[2]
    assert four.preferred["draft"].weights_mb < 0.75 * npu.weights_mb
    trimmed = fit(open_device("snapdragon-8-gen3"), replace(asked, draft=RoleOptions("d", vocab=16384)))[2]
    saved = (151936 - 16384) * 896 / 1e6
    assert trimmed.preferred["draft"].weights_mb == pytest.approx(npu.weights_mb - saved)
    assert trimmed.preferred["draft"].tables_mb == npu.tables_mb


def test_a_draft_remembers_less_where_the_pair_would_not_fit() -> None:
    whole = fit(open_device("snapdragon-8-gen3"), options())[2].memory_mb
    half = fit(open_device("snapdragon-8-gen3"), options(draft_context=512))[2].memory_mb
    device = with_memory("snapdragon-8-gen3", 2 * (half + 0.3 * (whole - half)) / 1e3)
    adapted, plans, budget = fit(device, options())
    assert adapted.draft_context == 512
    assert {plan.max_context for plan in plans["draft"]} == {512}
    assert budget.fits
    assert "the draft remembers 512 tokens only" in str(budget)
    with pytest.raises(UsageError, match="this does not fit snapdragon-8-gen3"):
        fit(device, options(draft_context=1024))


def test_what_would_fit_is_named() -> None:
    device = with_memory("snapdragon-8-gen3", 5.0)
    with pytest.raises(UsageError) as refused:
        fit(device, options(max_context=32768))
    assert "MB, estimated" in str(refused.value)
    named = re.search(r"What would fit: --max-context (\d+)", str(refused.value))
    assert named
    assert fit(device, options(max_context=int(named[1])))[2].fits
    with pytest.raises(UsageError, match=r"What would fit: .*the target without --draft-model"):
        fit(with_memory("snapdragon-8-gen3", 3.0), options())


def test_nothing_that_fits_is_said_too() -> None:
    with pytest.raises(UsageError, match="Nothing of this size fits; take a smaller model"):
        fit(with_memory("raspberry-pi-4", 1.0), options("raspberry-pi-4"), target=HUGE)


def test_an_npu_graph_larger_than_one_context_is_refused_with_the_way_out() -> None:
    device = with_memory("snapdragon-8-gen3", 64)
    with pytest.raises(
        UsageError, match=r"What would fit: --npu-precision a16w4; or no graph for the NPU"
    ) as refused:
        fit(device, options(draft=RoleOptions("d")), draft=LARGER)
    assert f"more than the {HTP_CONTEXT_MB} MB" in str(refused.value)
    without = options(backends=("onnxruntime", "executorch"))
    assert fit(device, without, draft=LARGER)[2].fits


def test_the_machine_of_the_export_refuses_nothing() -> None:
    budget: Budget = fit(open_device("host"), options("host"), target=HUGE)[2]
    assert budget.limit_mb is None
    assert budget.fits
    assert "that an app may take" not in str(budget)


def test_estimates_of_onnx_graphs_are_near_what_is_written(quantized_bundle: Path) -> None:
    tiny = {
        "head_dim": 16, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "max_position": 512,
    }  # fmt: skip
    manifest = read_manifest(quantized_bundle)
    intermediate = 128
    for role, layers, precision in (("target", 2, "int4"), ("draft", 1, "int8")):
        graph = manifest.roles[role].graphs[0]
        config = ModelConfig(
            "llama",
            graph.vocab_size,
            num_layers=layers,
            intermediate_size=intermediate,
            **tiny,  # type: ignore[arg-type]
        )
        asked = ExportOptions(RoleOptions("t", "int4"), Path("o"), RoleOptions("d", "int8"), max_context=256)
        plan = next(plan for plan in plan_graphs(open_device("host"), asked)[role])
        assert plan.recipe == precision
        written = graph.files[f"{role}/graph.onnx.data"].bytes / 1e6
        assert estimate(plan, config, asked).weights_mb == pytest.approx(written, rel=0.35)


def test_the_budget_is_announced_before_the_first_graph_is_made(
    tiny_models: dict[str, Path], traced_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.export import role_graphs
    from outrider.export.bundle import export_bundle

    seen: list[str] = []

    def spying(lower: Callable[..., Any]) -> Callable[..., Any]:
        return lambda making: (seen.append(making.plan.folder), lower(making))[1]

    monkeypatch.setitem(role_graphs.LOWERINGS, "onnx", spying(role_graphs.LOWERINGS["onnx"]))
    asked = ExportOptions(
        RoleOptions(str(tiny_models["target"])), tmp_path / "bundle", max_context=64, evaluate=False
    )
    export_bundle(asked, announce=lambda budget: seen.append(str(budget)))
    assert [line.split(",")[0] for line in seen] == ["MB", "target"]


def test_what_an_export_takes_on_disk_counts_every_file_once_and_the_largest_scratch() -> None:
    """The GPU's ONNX graph shares its file with the CPU's, a Vulkan program comes twice, an NPU graph compiled too."""
    budget: Budget = fit(open_device("snapdragon-8-gen3"), options())[2]
    found = {
        (size.plan.role, size.plan.lowering, size.plan.unit): size
        for size in budget.sizes
        if (size.plan.role, size.plan.lowering, size.plan.unit) != ("target", "onnx", "gpu")
    }
    npu = found["draft", "npu", "npu"]
    vulkan = found["target", "vulkan", "gpu"]
    assert vulkan.disk_mb == 2 * vulkan.weights_mb
    assert npu.disk_mb == npu.weights_mb + npu.binaries_mb + npu.tables_mb
    assert npu.scratch_mb == pytest.approx(4 * npu.weights_mb)  # 8 bits of 32
    together = sum(size.disk_mb for size in found.values()) + npu.scratch_mb
    assert together < budget.disk_mb < 1.5 * together + 100


def test_a_disk_without_the_room_is_refused_before_the_first_graph_is_made(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shutil import disk_usage

    from outrider.export import budget, role_graphs
    from outrider.export.bundle import export_bundle

    used: Any = disk_usage(tmp_path)
    monkeypatch.setattr(budget, "disk_usage", lambda folder: used._replace(free=20_000_000))
    monkeypatch.setitem(role_graphs.LOWERINGS, "onnx", lambda making: pytest.fail("a graph was made"))
    asked = ExportOptions(RoleOptions(str(tiny_models["target"])), tmp_path / "bundle", max_context=64)
    seen: list[Budget] = []
    with pytest.raises(ExportError, match=r"needs up to 5\d MB on the disk of .*, which has 20 MB free"):
        export_bundle(asked, announce=seen.append)
    assert re.search(r"on disk up to 5\d MB, 20 MB are free", str(seen[0]))
    assert list(tmp_path.iterdir()) == []


def test_an_export_takes_no_more_of_its_disk_than_was_said(
    tiny_models: dict[str, Path], traced_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing elsewhere: a float model for calibration once filled /tmp."""
    from outrider.export import budget, npu_calibrate
    from outrider.export.bundle import export_bundle

    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn is not installed")
    if not has_emulator():
        pytest.skip("onnxruntime-qnn holds no emulator for this processor")
    for name in ("DISK_MARGIN", "SMALL_FILES_MB"):
        monkeypatch.setattr(budget, name, {"DISK_MARGIN": 1.0, "SMALL_FILES_MB": 0.0}[name])
    largest: list[float] = []

    def spying(*words: Any, **named: Any) -> Any:
        largest.append(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) / 1e6)
        return ranges(*words, **named)

    ranges = npu_calibrate.activation_ranges
    monkeypatch.setattr(npu_calibrate, "activation_ranges", spying)
    model = str(tiny_models["draft"])
    asked = ExportOptions(
        RoleOptions(model, "int8"),
        tmp_path / "bundle",
        RoleOptions(model, "int8"),
        "snapdragon-8-gen3",
        max_context=64,
        backends=("onnxruntime", "qnn"),
        evaluate=False,
    )
    seen: list[Budget] = []
    export_bundle(asked, announce=seen.append)
    weights = next(size.scratch_mb for size in seen[0].sizes if size.scratch_mb)
    assert weights < max(largest) < seen[0].disk_mb + 3  # MB of a graph, for a toy more than its weights


def test_core_ml_graphs_are_sized_by_their_recipes_and_hold_half_precision_caches() -> None:
    sizes = fit(open_device("iphone-16-pro"), options("iphone-16-pro", max_context=1024))[2].sizes
    draft, cpu = (size for size in sizes if size.plan.role == "draft")
    target = next(size for size in sizes if size.plan.role == "target")
    products = (
        sum(rows * columns for rows, columns in [(1152, 896), (896, 896), (9728, 896), (896, 4864)]) * 24
        + 151936 * 896
    )
    assert draft.weights_mb == pytest.approx(products * 6 / 8 / 1e6)
    assert draft.tables_mb == pytest.approx(151936 * 896 / 1e6)  # 8-bit rows that the app looks up
    assert 2 * draft.kv_mb == cpu.kv_mb
    assert target.tables_mb == 0
    half = fit(
        open_device("iphone-16-pro"),
        options("iphone-16-pro", draft=RoleOptions("d", coreml_precision="fp16"), split_target=True),
    )[2].sizes
    found = {size.plan.lowering: size for size in half if size.plan.backend == "coreml"}
    assert found["coreml_draft"].weights_mb == pytest.approx(products * 2 / 1e6)
    assert found["coreml_draft"].tables_mb == pytest.approx(2 * 151936 * 896 / 1e6)
    assert found["coreml_split"].tables_mb == pytest.approx(151936 * 1536 / 1e6)


def test_fewer_bits_for_core_ml_are_among_what_would_fit() -> None:
    asked = options("iphone-16-pro", draft=RoleOptions("d", coreml_precision="fp16"))
    whole = fit(open_device("iphone-16-pro"), asked)[2].memory_mb
    with pytest.raises(UsageError, match=r"What would fit: .*--coreml-draft-precision lut4"):
        fit(with_memory("iphone-16-pro", 2 * 0.75 * whole / 1e3), asked)
