"""The quality in a manifest is measured: exact for float, worse for quantized, acceptance of the real pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.contracts import Graph
from outrider.export.checkpoint import open_checkpoint
from outrider.export.evaluate import PROBE
from outrider.export.prove import text_rows
from outrider.export.reference import ROWS, FloatReference
from outrider.export.slots import SlotWeights
from outrider.manifest import read_manifest
from outrider.quantize.quality import evaluation_text
from outrider.targets.fake import FakeGraph, random_logits


def reference_rows(model: Path, tokens: np.ndarray) -> np.ndarray:
    with open_checkpoint(model) as checkpoint:
        reference = FloatReference(SlotWeights(checkpoint))
        return np.concatenate([rows.copy() for rows in reference.rows(reference.final_states([tokens]))])


def test_a_float_bundle_loses_nothing(float_bundle: Path) -> None:
    quality = read_manifest(float_bundle).quality
    for role in ("target", "draft"):
        assert quality[role]["kl_mean"] == pytest.approx(0, abs=1e-5)
        assert quality[role]["top1_agreement"] == 1.0
        assert quality[role]["perplexity_increase"] == pytest.approx(0, abs=1e-4)
        assert quality[role]["tokens"] == 2047


def test_a_draft_equal_to_its_target_is_always_accepted(float_bundle: Path) -> None:
    pair = read_manifest(float_bundle).quality["pair"]
    assert pair["greedy_match"] == pair["greedy_match_float_draft"] == 1.0
    assert pair["sum_min_pq"] == pytest.approx(1, abs=1e-5)
    assert pair["sum_min_pq_float_draft"] == pytest.approx(1, abs=1e-5)


def test_quantized_figures_are_finite_and_worse(quantized_bundle: Path) -> None:
    quality = read_manifest(quantized_bundle).quality
    parts = [quality[name] for name in ("target", "draft", "pair")]
    assert all(math.isfinite(value) for part in parts for value in part.values())
    target, draft = quality["target"], quality["draft"]
    assert 1e-3 < draft["kl_mean"] < target["kl_mean"] < 1
    assert 0 < target["top1_agreement"] < draft["top1_agreement"] < 1
    assert target["perplexity"] != target["perplexity_reference"]


def test_an_unrelated_draft_is_hardly_accepted(quantized_bundle: Path) -> None:
    pair = read_manifest(quantized_bundle).quality["pair"]
    assert pair["greedy_match"] < 0.2
    assert 0 < pair["sum_min_pq"] < 0.2
    assert pair["sum_min_pq"] != pair["sum_min_pq_float_draft"]


def test_the_stored_quality_is_that_of_the_wikitext_excerpt(
    quantized_bundle: Path, tiny_models: dict[str, Path]
) -> None:
    """The target's perplexity, computed here again from its own graph, a token at a time."""
    quality = read_manifest(quantized_bundle).quality["target"]
    with outrider.load(quantized_bundle, threads=1) as pipeline:
        graph = pipeline.engine.target
        ids = np.asarray(pipeline.tokenizer.encode(evaluation_text())[:2048])
        losses: list[float] = []
        for start in range(0, len(ids), graph.max_context):
            segment = ids[start : start + graph.max_context]
            logits = graph.forward(segment).logits
            assert isinstance(logits, np.ndarray)
            log_p = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
            log_p -= logits.max(1, keepdims=True)
            following = ids[start + 1 : start + len(segment) + 1]  # the next segment's first token counts
            losses += (-log_p[np.arange(len(following)), following]).tolist()
    assert len(losses) == quality["tokens"]
    assert quality["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_the_acceptance_is_measured_on_the_targets_own_text_without_the_prompts(float_bundle: Path) -> None:
    """Four answers of 128 tokens, each token predicted once, and one prediction after each answer's end."""
    assert read_manifest(float_bundle).quality["pair"]["tokens"] == 4 * 128 + 4


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_probe_holds_logits_of_the_float_checkpoint(
    quantized_bundle: Path, tiny_models: dict[str, Path], role: str
) -> None:
    entry = read_manifest(quantized_bundle).roles[role].graphs[0]
    assert f"{role}/{PROBE}" in entry.files
    with np.load(quantized_bundle / role / PROBE) as probe:
        expected = reference_rows(tiny_models[role], probe["tokens"])[probe["rows"]]
        np.testing.assert_allclose(probe["logits"], expected, atol=1e-4)
        assert len(set(probe["rows"].tolist())) == 4


def test_a_graph_that_was_evaluated_says_so(
    quantized_bundle: Path, tiny_models: dict[str, Path], export_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    for entry in read_manifest(quantized_bundle).roles.values():
        assert (entry.graphs[0].via, entry.graphs[0].executed_artifact) == ("artifact", True)
    export_tiny(tmp_path / "plain", (tiny_models["target"], "int8"), evaluate=False)
    manifest = read_manifest(tmp_path / "plain")
    graph = manifest.roles["target"].graphs[0]
    assert (graph.via, graph.executed_artifact, dict(manifest.quality)) == (None, False, {})


@pytest.mark.parametrize("widths", [None, (1, 5), (1, 64), (3,), (1, 200)])
def test_rows_come_in_the_reference_s_chunks_whatever_the_widths(widths: tuple[int, ...] | None) -> None:
    model = random_logits(13, 0)
    graph: Graph = FakeGraph(13, max_context=256, logits=model, widths=widths)
    text = np.random.default_rng(0).integers(0, 13, 2 * ROWS + 7)
    chunks = [rows.copy() for rows in text_rows(graph, text)]
    assert [len(rows) for rows in chunks] == [ROWS, ROWS, 7]
    expected = np.stack([model(tuple(text[: i + 1].tolist())) for i in range(len(text))])
    np.testing.assert_allclose(np.concatenate(chunks), expected, rtol=1e-6)


@pytest.mark.parametrize("widths", [(1, 3), (1, 2, 5, 64)])
def test_a_split_target_is_evaluated_at_its_own_widths(
    tiny_models: dict[str, Path], export_tiny: Callable[..., Any], tmp_path: Path, widths: tuple[int, ...]
) -> None:
    options = {"profile": "split", "widths": widths}
    report = export_tiny(tmp_path / "bundle", (tiny_models["target"], "fp32"), **options)
    assert report.quality["target"]["kl_mean"] == pytest.approx(0, abs=1e-5)


def test_the_smallest_context_can_be_evaluated(
    tiny_models: dict[str, Path], export_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    report = export_tiny(tmp_path / "bundle", (tiny_models["target"], "fp32"), max_context=16)
    assert report.quality["target"]["kl_mean"] == pytest.approx(0, abs=1e-5)
