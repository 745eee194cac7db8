"""The draft for the Neural Engine: a package of static functions, evaluated as shipped against the float oracle.

Evaluated results: `MilProgram` runs the saved file in numpy; no Neural Engine was asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.export.coreml import export_coreml_draft
from outrider.export.lowered import Lowered
from outrider.export.slots import SlotWeights
from outrider.quantize.coreml_recipes import CoreMLRecipe, coreml_recipe
from outrider.targets.coreml import CoreMLGraph
from tests import families

TEXTS = np.random.default_rng(0).integers(1, families.VOCAB, (8, 60)).tolist()
WIDTHS = (1, 2, 16)
NEAR = 0.02  # half precision, beside logits of standard deviation 0.8


def lower(weights: SlotWeights, place: Path, recipe: str | CoreMLRecipe = "fp16", **options: Any) -> Lowered:
    chosen = coreml_recipe(recipe) if isinstance(recipe, str) else recipe
    wanted = {"max_context": families.CONTEXT, "widths": WIDTHS, **options}
    return export_coreml_draft(weights.config, weights, chosen, place, **wanted)


def package_of(lowered: Lowered) -> Path:
    return lowered.files[0].parent


def opened(lowered: Lowered) -> CoreMLGraph:
    return CoreMLGraph.load(
        package_of(lowered), lowered.meta, embedding=lowered.embedding_file, unit="npu", execution="evaluator"
    )


def logits_of(graph: CoreMLGraph, tokens: list[int]) -> np.ndarray:
    """Teacher-forced, two tokens a forward."""
    graph.truncate(0)
    rows = []
    for start in range(0, len(tokens), 2):
        part = tokens[start : start + 2]
        rows.append(graph.forward(part).logits.copy())
        graph.commit(range(len(part)))
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def model() -> Any:
    return families.oracle("llama")


@pytest.fixture(scope="module")
def llama(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    weights = families.weights_of("llama", model)
    metadata = {"outrider.role": "draft", "outrider.tokenizer_sha256": "abc"}
    return lower(weights, tmp_path_factory.mktemp("llama"), hidden_layers=(0, 1), metadata=metadata)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_package_equals_the_float_oracle_through_prefill_decode_tree_rollback_and_window(
    family: str, tmp_path: Path
) -> None:
    model = families.oracle(family)
    graph = opened(lower(families.weights_of(family, model), tmp_path))
    assert graph.via == "evaluator"
    families.check_decoding(graph, lambda tokens: families.reference_logits(model, tokens), NEAR)
