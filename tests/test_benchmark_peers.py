"""The peers' side of the benchmarks: recipes, what tokens cost them, and what is shown beside their times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import ALGORITHMS, BLOCK_SIZES, PRECISIONS, GenaiRecipe
from benchmarks.perplexity import Perplexity, keep, known, perplexity, with_targets
from benchmarks.speed import complaints, format_table, rows
from benchmarks.worker import negative_log_likelihood


def test_every_recipe_is_read_from_its_own_name() -> None:
    every = [
        GenaiRecipe(precision, block, algorithm, symmetric, untied)
        for precision in PRECISIONS
        for block in BLOCK_SIZES
        for algorithm in ALGORITHMS
        for symmetric in (True, False)
        for untied in (True, False)
    ]
    assert [GenaiRecipe.parse(recipe.name) for recipe in every] == every
    assert len({tuple(recipe.builder_arguments) for recipe in every}) == len(every)
    assert GenaiRecipe.parse("int8-untied") == GenaiRecipe("int8", untied=True)
    assert GenaiRecipe.parse("int4-asym") == GenaiRecipe(symmetric=False)
    assert GenaiRecipe.parse("int4-k_quant_mixed") == GenaiRecipe(algorithm="k_quant_mixed")


def test_a_recipe_is_the_builder_s_command_line() -> None:
    recipe = GenaiRecipe.parse("int4-b64-rtn_mixed-asym-untied")
    assert recipe.builder_arguments == [
        *("-p", "int4", "--extra_options", "block_size=64", "algo_config=rtn"),
        *("matmul_mixed_precision=last_matmul:int8,mixed_layers:int8", "is_symmetric=false"),
        "shared_embeddings=false",
    ]


@pytest.mark.parametrize(
    "name", ["int3", "int4-b48", "int4-b32-hqq", "int4-b32-b64", "int4-asym-b32", "int4-", ""]
)
def test_a_recipe_that_the_builder_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"known:|is no recipe"):
        GenaiRecipe.parse(name)


def test_a_token_costs_the_log_of_its_probability_and_rows_behind_the_last_target_nothing() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1.0, 1.0, 1.0]], np.float32)) + 300
    assert negative_log_likelihood(logits, [1, 2]) == pytest.approx([np.log(4), -np.log(0.7)], rel=1e-4)


def test_the_last_row_of_a_segment_predicts_the_first_token_of_the_next() -> None:
    assert with_targets([np.array([1, 2, 3]), np.array([4, 5])]) == [
        {"tokens": [1, 2, 3], "targets": [2, 3, 4]},
        {"tokens": [4, 5], "targets": [5]},
    ]


def test_the_error_of_a_perplexity_is_that_of_the_paired_differences() -> None:
    rng = np.random.default_rng(0)
    reference = rng.exponential(3.0, 2047)
    found = perplexity(reference + 0.01 + rng.normal(0, 0.1, 2047), reference)
    assert found.reference == pytest.approx(np.exp(reference.mean()))
    assert found.error == pytest.approx(
        0.1 / 2047**0.5, rel=0.1
    )  # not that of the text, thirty times as wide
    assert found.increase == pytest.approx(0.01, abs=4 * 0.1 / 2047**0.5)


def test_costs_of_different_tokens_are_not_compared() -> None:
    with pytest.raises(ValueError, match="3 and 4 tokens"):
        perplexity(np.ones(3), np.ones(4))


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_was_measured_is_found_beside_the_model(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model"
    model.mkdir() if kind == "folder" else model.write_bytes(b"")
    assert known(model) is None
    keep(model, Perplexity(15.5, 15.0, 0.001, 2047))
    assert known(model) == Perplexity(15.5, 15.0, 0.001, 2047)


def test_the_quality_of_our_bundle_is_that_of_its_manifest(tmp_path: Path) -> None:
    target = {"perplexity": 15.15, "perplexity_reference": 15.0, "tokens": 2047, "kl_mean": 0.1}
    (tmp_path / "manifest.json").write_text(json.dumps({"quality": {"target": target}}))
    assert known(tmp_path) == Perplexity(15.15, 15.0, None, 2047)
    (tmp_path / "manifest.json").write_text(json.dumps({"quality": {}}))
    assert known(tmp_path) is None


def answer(decode_s: float) -> dict[str, Any]:
    return {"decode_s": decode_s, "tokens": 11, "prompt_tokens": 3, "prompt_s": 0.1, "resident_mb": None}


def test_a_speed_is_shown_with_its_perplexity_and_more_than_three_percent_are_named() -> None:
    answers = [{"outrider": answer(0.1), "genai a": answer(0.05), "genai b": answer(0.2)}] * 5
    quality = {
        "outrider": Perplexity(10.1, 10, None, 9),
        "genai a": Perplexity(12, 10, 0.1, 9),
        "genai b": None,
    }
    table = rows(answers, dict.fromkeys(quality, 1.0), quality)
    assert complaints(table) == []
    assert [row.ours_faster and row.ours_faster.value for row in table] == pytest.approx([None, 0.5, 2.0])
    ours, fast, unknown = format_table(table).splitlines()[2:]
    assert "10.10 (+1.0%)" in ours
    assert "12.00 (+20.0%, too much)" in fast
    assert "| ?" in unknown


def test_perplexities_beside_different_float_weights_are_not_comparable() -> None:
    answers = [{"outrider": answer(0.1), "genai": answer(0.1)}]
    quality = {"outrider": Perplexity(10.1, 10, None, 9), "genai": Perplexity(15.2, 15, 0.1, 9)}
    [note] = complaints(rows(answers, dict.fromkeys(quality, 1.0), quality))
    assert "same float weights" in note
