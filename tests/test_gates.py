"""A graph's figures equal their definitions, and its gate condemns what they rule out and no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from outrider.errors import UsageError
from outrider.export.device_plans import open_device, plan_graphs
from outrider.export.options import ExportOptions, RoleOptions
from outrider.quantize.coreml_recipes import COREML_RECIPES
from outrider.quantize.gates import GATES, Gate, gate_for, shortfalls
from outrider.quantize.quality import GraphQuality, graph_quality
from outrider.quantize.recipes import RECIPES

GATE = Gate("x", kl=0.1, top1_clear=0.99, sum_min_loss=0.02)
FINE = GraphQuality(500, 1.0, 0.01, 0.98, 400, 1.0, 0.79, 0.8, 0.001, 0.7, 0.7)


def rows(seed: int, count: int = 40, vocab: int = 11) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, vocab)) * 2).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_the_figures_of_a_draft_equal_their_definitions() -> None:
    reference, target = rows(0), rows(1)
    ours = reference + rows(2) * 0.1
    found = graph_quality(
        [reference[:24], reference[24:]], [ours[:24], ours[24:]], [target[:24], target[24:]]
    )
    p, q, exact = softmax(target), softmax(ours), softmax(reference)
    top = np.sort(reference, axis=1)
    clear = top[:, -1] - top[:, -2] > 0.5
    same = reference.argmax(1) == ours.argmax(1)
    assert found.positions == 40
    assert found.max_abs_error == pytest.approx(np.abs(ours - reference).max())
    assert found.kl == pytest.approx((exact * np.log(exact / q)).sum(1).mean(), rel=1e-4)
    assert found.top1_agreement == same.mean()
    assert (found.clear, found.top1_agreement_clear) == (clear.sum(), same[clear].mean())
    shared, floating = np.minimum(p, q).sum(1), np.minimum(p, exact).sum(1)
    assert found.sum_min_pq == pytest.approx(shared.mean(), rel=1e-5)
    assert found.sum_min_pq_float == pytest.approx(floating.mean(), rel=1e-5)
    assert found.sum_min_pq_error == pytest.approx((floating - shared).std() / np.sqrt(40), rel=1e-4)
    assert found.greedy_match == (target.argmax(1) == ours.argmax(1)).mean()
    assert found.greedy_match_float == (target.argmax(1) == reference.argmax(1)).mean()


def test_a_target_has_no_acceptance_and_a_flat_reference_no_clear_position() -> None:
    flat = np.zeros((5, 4), np.float32)
    found = graph_quality([flat], [flat])
    assert (found.clear, found.top1_agreement_clear, found.sum_min_pq) == (0, None, None)
    assert shortfalls(found, GATE) == []


def test_a_trimmed_draft_is_compared_over_its_own_ids() -> None:
    reference, target, ids = rows(0), rows(1), np.array([1, 4, 5, 9])
    found = graph_quality([reference], [reference[:, ids]], [target], ids)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.max_abs_error == 0
    assert found.sum_min_pq == found.sum_min_pq_float
    expected = np.minimum(softmax(target)[:, ids], softmax(reference[:, ids])).sum(1).mean()
    assert found.sum_min_pq == pytest.approx(expected, rel=1e-5)
    assert found.greedy_match == (target.argmax(1) == ids[reference[:, ids].argmax(1)]).mean()


def test_padding_of_one_vocabulary_is_cut() -> None:
    reference = rows(0)
    padded = np.concatenate([reference, np.full((40, 3), 99, np.float32)], axis=1)
    assert graph_quality([reference], [padded], [reference]).max_abs_error == 0
    assert graph_quality([padded], [reference], [padded]).max_abs_error == 0


def test_streams_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(UsageError, match="chunks of 40 and 39 rows cannot be compared"):
        graph_quality([rows(0)], [rows(0)[:39]])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        graph_quality([rows(0), rows(0)], [rows(0)])
    with pytest.raises(UsageError, match="no rows of logits"):
        graph_quality([], [])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kl": 0.11}, "KL 0.110 nats, at most 0.1"),
        ({"kl": float("nan")}, "KL nan nats"),
        ({"top1_agreement_clear": 0.97}, "top-1 agreement 0.970 at 400 clear positions, at least 0.99"),
        ({"sum_min_pq": 0.77}, "Σ min(p, q) 0.770, 0.030 below the float draft's, at most 0.02"),
    ],
)
def test_each_bound_condemns_with_its_figure(change: dict[str, float], named: str) -> None:
    assert shortfalls(FINE, GATE) == []
    (found,) = shortfalls(replace(FINE, **change), GATE)  # type: ignore[arg-type]
    assert named in found


@pytest.mark.parametrize("clear", [4, 30, 400, 2000])
def test_agreement_fails_only_where_chance_would_rarely_show_so_little(clear: int) -> None:
    for missed in range(min(clear, 60)):
        agreed = (clear - missed) / clear
        failed = bool(shortfalls(replace(FINE, clear=clear, top1_agreement_clear=agreed), GATE))
        assert failed == (binom.cdf(clear - missed, clear, 0.99) < 0.05)


def test_few_positions_do_not_condemn_a_draft_for_noise() -> None:
    loss = replace(FINE, sum_min_pq=0.77)
    assert shortfalls(replace(loss, sum_min_pq_error=0.05), GATE) == []
    assert shortfalls(replace(loss, sum_min_pq_error=0.002), GATE)


def test_the_gates_of_the_npu_are_the_ones_that_were_promised() -> None:
    assert (gate_for("a16w8").top1_clear, gate_for("a16w8").sum_min_loss) == (0.99, 0.02)
    assert gate_for("a16w4").sum_min_loss == 0.06
    assert gate_for("anything") is GATES[-1]


def test_the_gates_of_core_mls_palettes_are_the_ones_that_were_promised() -> None:
    assert gate_for("lut6").sum_min_loss == 0.03
    assert gate_for("lut4-mix").sum_min_loss == 0.10
    assert gate_for("lut4").sum_min_loss > gate_for("lut4-mix").sum_min_loss


def test_every_recipe_that_an_export_can_have_finds_its_gate() -> None:
    options = ExportOptions(RoleOptions("t"), __file__, RoleOptions("d"), "snapdragon-8-gen3")  # type: ignore[arg-type]
    planned = {
        plan.recipe
        for graphs in plan_graphs(open_device("snapdragon-8-gen3"), options).values()
        for plan in graphs
    }
    for recipe in {*planned, *RECIPES, *COREML_RECIPES, "a16w4", "8da8w"}:
        gate = gate_for(recipe)
        assert 0 < gate.kl <= 0.7
        assert 0.5 < gate.top1_clear < 1
