"""Graphs for CUDA, by the CPU's kernels: chains and trees, float16 beside float32, logits that the graph reduces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from outrider.contracts import Sampling, TopK, TopRows
from outrider.errors import BackendError, ExportError, UsageError
from outrider.export.onnx import GraphReport, export_graph
from outrider.export.onnx_form import CUDA, GraphForm, as_half
from outrider.quantize.recipes import get_recipe
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeDrafter
from outrider.targets.onnxruntime import OnnxGraph, top_rows
from tests import families

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("traced_once")
FAMILY = "gemma3"  # two ropes, normed heads, a sliding window in every other layer
EXACT = GraphForm(chains=True, top=8)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GraphReport]:
    """Export the tiny model once for each form and recipe."""
    made: dict[Any, GraphReport] = {}

    def make(form: GraphForm, recipe: str) -> GraphReport:
        if (form, recipe) not in made:
            weights = families.weights_of(FAMILY, families.oracle(FAMILY))
            path = tmp_path_factory.mktemp("device") / "graph.onnx"
            options: dict[str, Any] = {"max_context": families.CONTEXT, "hidden_layers": (1,), "form": form}
            made[form, recipe] = export_graph(
                weights.config, weights, get_recipe(recipe), "inplace", path, **options
            )
        return made[form, recipe]

    return make


def load(report: GraphReport) -> OnnxGraph:
    return OnnxGraph.load(report.path, report.meta, threads=1)


def test_a_graph_of_chains_equals_transformers_through_trees_rollback_and_window(
    export: Callable[..., GraphReport],
) -> None:
    graph, model = load(export(EXACT, "fp32")), families.oracle(FAMILY)
    names = [value.name for value in graph._sessions.get(None).get_inputs()]
    assert not [name for name in names if name.startswith(("mask", "positions"))]
    families.check_decoding(graph, lambda tokens: families.reference_logits(model, tokens), 1e-4)
    with pytest.raises(ValueError, match=r"knows positions by itself: \[40\] do not follow"):
        graph.forward([1], positions=np.array([40]))
    with pytest.raises(ValueError, match="trees only"):
        graph.forward(
            [1, 2, 3],
            graph.length + np.arange(3),
            np.array([[True, False, False], [False, True, False], [True, True, True]]),
        )


def test_the_largest_logits_and_states_are_those_of_the_whole_rows_in_chains_and_trees(
    export: Callable[..., GraphReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = load(export(EXACT, "fp32"))
    assert graph.top == 8
    parents = [-1, 0, 0, 1, 2]
    shapes = [(None, None), (families.depths(parents), families.tree_mask(parents))]
    for positions, mask in shapes:
        whole = graph.forward([5, 6, 7, 8, 9], positions, mask, hidden=(1,))
        expected = top_rows(whole.logits.copy(), 5)
        found = graph.forward([5, 6, 7, 8, 9], positions, mask, TopK(5), hidden=(1,))
        assert isinstance(found.logits, TopRows)
        np.testing.assert_array_equal(found.logits.ids, expected.ids)
        np.testing.assert_array_equal(found.logits.values, expected.values)
        np.testing.assert_allclose(found.logits.logsumexp, expected.logsumexp, atol=1e-5)
        np.testing.assert_array_equal(found.hidden[1], whole.hidden[1])
        graph.commit([])
        assert graph.length == 0
    assert graph.forward([5, 6], logits=TopK(9)).logits.ids.shape == (2, 9)  # more than the graph picks
    graph.forward([5, 6, 7, 8, 9], positions, mask)
    monkeypatch.setattr(graph._runner, "_forward", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(BackendError, match="failed to keep 2 rows after 0: out of memory"):
        graph.commit([0, 2])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=4, seed=2)])
def test_text_from_reduced_logits_is_the_text_from_whole_rows(
    export: Callable[..., GraphReport], sampling: Sampling
) -> None:
    texts = []
    for top in (8, 0):
        graph = load(export(EXACT, "fp32"))
        graph.top = top
        guess = FakeDrafter(lambda context: np.eye(families.VOCAB, dtype=np.float32)[context[-1]], (2, 1))
        request = Request(sampling, 24, k=3)
        texts.append([part.tokens for part in Engine(graph, {"fake": guess}).decode([3, 1, 4], request)])
    assert texts[0] == texts[1]


def test_the_form_of_cuda_computes_in_float16_near_the_float32_graph(
    export: Callable[..., GraphReport],
) -> None:
    exact, half = load(export(EXACT, "int4-b32")), export(CUDA, "int4-b32")
    assert half.meta["dtypes"] == {"past_key_0": "float16"}
    assert half.meta["top"] == 64
    graph = load(half)
    kinds = {value.name: value.type for value in graph._sessions.get(None).get_inputs()}
    assert kinds["past_key_0"] == "tensor(float16)"
    tokens = [5, 6, 7, 8, 9, 10, 11]
    exact.forward(tokens[:4])
    graph.forward(tokens[:4])
    for each in (exact, graph):
        each.commit(range(4))
    wanted = exact.forward(tokens[4:], logits="last").logits
    found = graph.forward(tokens[4:], logits="last").logits
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=0.03 * np.abs(wanted).max())


@pytest.mark.parametrize("wrong", [{"top": 0}, {"chains": False}, {"dtypes": {"past_key_0": "float17"}}])
def test_a_description_of_another_form_is_refused(
    export: Callable[..., GraphReport], wrong: dict[str, Any]
) -> None:
    report = export(EXACT, "fp32")
    with pytest.raises(BackendError, match="export the bundle again"):
        OnnxGraph.load(report.path, {**report.meta, **wrong}, threads=1)


def test_what_cuda_cannot_have_is_refused(tmp_path: Path) -> None:
    weights = families.weights_of("llama", families.oracle("llama"))
    given: dict[str, Any] = {"path": tmp_path / "graph.onnx", "max_context": 64, "form": CUDA}
    with pytest.raises(UsageError, match=r"int8-dynamic.*CUDA has no kernel"):
        export_graph(weights.config, weights, get_recipe("int8-dynamic"), **given)
    with pytest.raises(UsageError, match="has the profile inplace, not 'split'"):
        export_graph(weights.config, weights, get_recipe("int4"), "split", widths=(1,), **given)
    with pytest.raises(ExportError, match=r"layers\.0\.norm has a value of 7e"):
        as_half(np.array([7e4, -np.inf], np.float32), "layers.0.norm")
