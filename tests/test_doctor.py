"""Costs are measured on the bundle itself, and break-even figures follow from them by arithmetic."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.contracts import Costs
from outrider.runtime import doctor as module
from outrider.runtime.doctor import break_even, inspect_machine, measure_costs
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.planner import expected_tokens
from outrider.runtime.rounds import Engine
from outrider.runtime.text import Tokenizer
from outrider.targets.fake import FakeDrafter, FakeGraph, random_logits

FLAT = Costs({1: 0.010, 2: 0.010, 3: 0.010, 5: 0.010, 9: 0.010}, {"model": 0.002})


def only(costs: Costs, k: int) -> Any:
    (row,) = break_even(costs, (k,))
    return row


def test_one_draft_pays_above_its_share_of_a_plain_step() -> None:
    """A round of 1 draft costs 2 + 10 ms and commits 1 + a tokens; plain: 10 ms a token. Break-even a = 0.2."""
    row = only(FLAT, 1)
    assert row.round_ms == pytest.approx(12.0)
    assert row.acceptance == pytest.approx(0.2, abs=1e-6)


def test_two_drafts_break_even_where_a_plus_its_square_pays_for_them() -> None:
    """1 + a + a² = 1.4: a = (√2.6 - 1) / 2."""
    assert only(FLAT, 2).acceptance == pytest.approx((math.sqrt(1 + 4 * 0.4) - 1) / 2, abs=1e-6)


def test_a_wider_verify_is_part_of_the_price() -> None:
    """Width 2 costs 13 ms: 1 + a = 1.5 with a draft of 2 ms."""
    costs = Costs({1: 0.010, 2: 0.013}, {"model": 0.002})
    assert only(costs, 1).acceptance == pytest.approx(0.5, abs=1e-6)


def test_a_draft_as_dear_as_the_target_never_pays() -> None:
    costs = Costs({1: 0.010, 2: 0.010, 3: 0.010}, {"model": 0.010})
    assert [row.acceptance for row in break_even(costs, (1, 2))] == [None, None]
    dearer = Costs({1: 0.010, 9: 0.100}, {"free": 0.0})
    assert only(dearer, 8).acceptance is None


def test_free_drafts_over_a_flat_verify_always_pay() -> None:
    assert only(Costs({1: 0.010, 9: 0.010}, {"lookup": 0.0}), 8).acceptance == pytest.approx(0, abs=1e-6)


def test_at_break_even_both_ways_commit_as_fast() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        base, step = rng.uniform(0.005, 0.05), rng.uniform(0, 0.004)
        costs = Costs(
            {w: base + step * (w - 1) for w in (1, 2, 3, 5, 9)}, {"model": float(rng.uniform(0, 0.01))}
        )
        for row in break_even(costs):
            if row.acceptance is not None:
                tokens_per_s = expected_tokens((row.acceptance,), row.k) / (row.round_ms / 1e3)
                assert tokens_per_s == pytest.approx(1 / base, rel=1e-5)


def test_every_drafter_gets_a_row_for_every_k() -> None:
    costs = Costs(FLAT.verify_s, {"lookup": 1e-5, "model": 0.002})
    assert [(row.drafter, row.k) for row in break_even(costs, (1, 4))] == [
        ("lookup", 1),
        ("lookup", 4),
        ("model", 1),
        ("model", 4),
    ]


def test_costs_of_a_bundle_are_positive_and_cover_widths_and_drafters(quantized_bundle: Path) -> None:
    told: list[float] = []
    with outrider.load(quantized_bundle, threads=1) as pipeline:
        costs = measure_costs(pipeline, repeats=2, progress=lambda stage, part: told.append(part))
        assert pipeline.engine.target.length == 0
        assert pipeline.generate("the fox", max_tokens=4).tokens
    assert set(costs.verify_s) == set(module.WIDTHS)
    assert set(costs.draft_s) == {"lookup", "model"}
    assert min(*costs.verify_s.values(), *costs.draft_s.values()) > 0
    assert told == pytest.approx([1 / 3, 2 / 3, 1])


class TickingGraph(FakeGraph):
    """A graph whose forward takes (10 + S) ms of a clock of its own."""

    now = 0.0

    def forward(self, tokens: Any, *arguments: Any, **options: Any) -> Any:
        TickingGraph.now += 0.010 + 0.001 * len(tokens)
        return super().forward(tokens, *arguments, **options)


def pipeline_of(graph: Any, byte_level_bpe: Any) -> Pipeline:
    drafter = FakeDrafter(random_logits(120, 1))
    return Pipeline(Engine(graph, {"fake": drafter}), Tokenizer(byte_level_bpe))


@pytest.mark.parametrize(("widths", "context"), [(None, 512), ((3, 64), 512), ((1, 4), 64), (None, 16)])
def test_each_width_gets_its_own_time(
    byte_level_bpe: Any, monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...] | None, context: int
) -> None:
    monkeypatch.setattr(module.time, "perf_counter", lambda: TickingGraph.now)
    graph = TickingGraph(120, context, logits=random_logits(120, 0), widths=widths)
    costs = measure_costs(pipeline_of(graph, byte_level_bpe), repeats=3)
    assert costs.verify_s == pytest.approx({width: 0.010 + 0.001 * width for width in costs.verify_s})
    expected = {None: (1, 2, 3, 5, 9), (3, 64): (1, 2, 3, 5, 9), (1, 4): (1, 2, 3)}[widths]
    assert tuple(costs.verify_s) == (expected if context > 16 else (1, 2, 3, 5))


def test_a_small_context_can_be_measured(
    tiny_models: dict[str, Path], export_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    pair = (tiny_models["target"], "fp32"), (tiny_models["target"], "fp32")
    export_tiny(tmp_path / "bundle", *pair, max_context=16, evaluate=False)
    with outrider.load(tmp_path / "bundle", threads=1) as pipeline:
        assert set(measure_costs(pipeline, repeats=1).verify_s) == {1, 2, 3, 5}


def test_the_machine_is_described_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = inspect_machine()
    assert machine.cores >= 1
    assert machine.memory_gb is None or machine.memory_gb > 0.1
    assert "CPUExecutionProvider" in machine.providers
    assert machine.extras["export"].startswith("installed")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'outrider[export]'" in inspect_machine().extras["export"]


def test_every_extra_is_known_to_doctor_and_installed_by_ci() -> None:
    root = Path(outrider.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert set(module.EXTRAS) == extras
    installed = re.search(r"-e '\.\[(.*)\]'", (root / "Makefile").read_text(encoding="utf-8"))
    assert installed is not None
    assert set(installed[1].split(",")) == extras
