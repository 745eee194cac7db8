"""Costs measured earlier start the planner on the same machine, and nowhere else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outrider
from outrider.contracts import Costs
from outrider.manifest import Timing, read_manifest
from outrider.runtime.doctor import measure_reading
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.placed import Placement
from outrider.runtime.planner import Planner
from outrider.runtime.timing import known_costs, store_timing, timing_of
from outrider.targets.fake import FakeGraph, VirtualClock

HERE = "a processor, 2 cores, 2 threads, onnxruntime 1"
MEASURED = Costs({1: 0.010, 5: 0.014}, {"lookup": 1e-5, "model": 0.002})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def bundle(quantized_bundle: Path) -> tuple[Any, tuple[Placement, ...]]:
    """Manifest, without a timing of its own, and placement."""
    placement = tuple(
        Placement(role, "onnxruntime", "cpu", "inplace", f"{role}/graph.onnx") for role in ("target", "draft")
    )
    return replace(read_manifest(quantized_bundle), timing=None), placement


def test_what_the_export_measured_starts_the_planner_on_the_same_machine(quantized_bundle: Path) -> None:
    manifest = read_manifest(quantized_bundle)
    assert manifest.timing is not None
    assert manifest.timing.machine == manifest.quality["machine"]
    with outrider.load(quantized_bundle) as pipeline:
        assert pipeline.machine == manifest.timing.machine
        assert pipeline.engine.planner.costs == Planner(manifest.timing.measured).costs
        assert {"lookup", "model"} == set(pipeline.engine.planner.costs.draft_s)
        assert pipeline.engine.planner.knows_catch_up("model")
        assert not pipeline.engine.planner.knows_catch_up("lookup")


def test_with_other_threads_nothing_is_known(
    quantized_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with outrider.load(quantized_bundle, threads=7) as pipeline:
        assert pipeline.engine.planner.costs.verify_s == {}
    assert "7 threads" in caplog.text
    assert "not used" in caplog.text


def test_doctor_saves_what_later_loads_start_from(
    quantized_bundle: Path, home: Path, run_main: Callable[..., Any]
) -> None:
    before = (quantized_bundle / "manifest.json").read_bytes()
    code, out, _ = run_main("doctor", str(quantized_bundle), "--threads", "1", "--save")
    (file,) = (home / "timing").iterdir()
    assert code == 0
    assert out.endswith(f"saved to {file}\n")
    record = json.loads(file.read_text())
    with outrider.load(quantized_bundle, threads=1) as pipeline:
        assert pipeline.engine.planner.costs == Planner(record["measured"]).costs
        assert pipeline.engine.planner.costs.verify_s
        assert pipeline.engine.planner.knows_catch_up("model")
        assert pipeline.generate("the fox", max_tokens=8, k="auto").tokens
    assert (quantized_bundle / "manifest.json").read_bytes() == before


def test_costs_that_cannot_be_saved_are_still_shown(
    quantized_bundle: Path, home: Path, run_main: Callable[..., Any]
) -> None:
    home.mkdir(exist_ok=True)
    (home / "timing").write_text("no folder")
    code, out, err = run_main("doctor", str(quantized_bundle), "--threads", "1", "--save")
    assert code != 0
    assert "timing" in err
    assert "pays above acceptance" in out
    assert "saved to" not in out


def test_what_a_draft_takes_to_read_is_seconds_a_token_without_its_own_step(
    quantized_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    monkeypatch.setattr("outrider.runtime.doctor.time", SimpleNamespace(perf_counter=clock))
    with outrider.load(quantized_bundle) as pipeline:
        draft = FakeGraph(100, 512, costs_s={1: 0.004, 512: 0.004 + 511 * 0.0003}, clock=clock)
        pipeline.engine.drafters["model"] = ModelDrafter(draft)
        assert measure_reading(pipeline) == {"model": pytest.approx(0.0003)}
        assert draft.length == 0


def test_save_without_a_bundle_is_a_mistake(run_main: Callable[..., Any]) -> None:
    code, _, err = run_main("doctor", "--save")
    assert code == 2
    assert "--save keeps the costs of a BUNDLE" in err


def test_the_side_file_comes_before_the_manifest(bundle: Any) -> None:
    manifest, placement = bundle
    old = Timing(HERE, {"verify_s": {"1": 1.0}, "draft_s": {}})
    manifest = replace(manifest, timing=old)
    assert known_costs(manifest, placement, HERE) == old.measured
    store_timing(manifest, placement, timing_of(MEASURED, HERE))
    found = known_costs(manifest, placement, HERE)
    assert Planner(found).costs == MEASURED
    store_timing(manifest, placement, timing_of(MEASURED, "another machine"))
    assert known_costs(manifest, placement, HERE) == old.measured


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: text.replace('"timing"', '"telemetry"'),
        lambda text: text.replace('"schema_version": 1', '"schema_version": 9'),
        lambda text: text.replace("0.01", "-0.01"),
        lambda text: text.replace("0.01", '"fast"'),
        lambda text: text.replace('"5"', '"wide"'),
        lambda text: text.replace('"verify_s"', '"verify"'),
        lambda text: text.replace('"catch_up_s": {}', '"catch_up_s": 3'),
        lambda text: text.replace('"catch_up_s": {}', '"catch_up_s": {"model": "fast"}'),
        lambda text: text.replace('"draft_s"', '"overlapped": [1], "draft_s"'),
        lambda text: text.replace('"draft_s"', '"overlapped": {"verify_s": {"wide": 1}}, "draft_s"'),
        lambda text: text.replace('"draft_s"', '"overhead_s": "0", "draft_s"'),
    ],
)
def test_a_damaged_side_file_is_left_alone_with_a_warning(
    bundle: Any, caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
) -> None:
    manifest, placement = bundle
    path = store_timing(manifest, placement, timing_of(MEASURED, HERE))
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    assert known_costs(manifest, placement, HERE) is None
    assert "not used" in caplog.text
