"""Exported graphs under ONNX Runtime: parity of every family and profile, the promises of the protocol."""

from __future__ import annotations

import platform
import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.contracts import Graph, TopK, TopRows
from outrider.errors import BackendError, ContextError, ExportError
from outrider.export.cache_int8 import quantize_cache
from outrider.export.onnx import GraphReport, export_graph
from outrider.quantize.recipes import get_recipe
from outrider.quantize.schemes import BlockInt, DynamicInt8, Float, Recipe
from outrider.targets.onnxruntime import OnnxGraph, top_rows
from tests import families

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("traced_once")
WIDTHS = (1, 4, 8, 16)
FLOAT = Recipe("float32", Float(), Float(), Float())
PROFILES = ("inplace", "split")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GraphReport]:
    """Export a tiny model once for each set of arguments."""
    made: dict[Any, GraphReport] = {}

    def make(family: str, profile: str, recipe: Recipe = FLOAT, **options: Any) -> GraphReport:
        key = (family, profile, recipe, tuple(sorted(options.items())))
        if key not in made:
            weights = families.weights_of(family, families.oracle(family))
            path = tmp_path_factory.mktemp(family) / "graph.onnx"
            made[key] = export_graph(
                weights.config,
                weights,
                recipe,
                profile,
                path,
                max_context=families.CONTEXT,
                widths=WIDTHS,
                **options,
            )
        return made[key]

    return make


def load(report: GraphReport) -> OnnxGraph:
    return OnnxGraph.load(report.path, report.meta, threads=1)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_graph_equals_transformers_through_prefill_decode_tree_rollback_and_window(
    export: Callable[..., GraphReport], family: str, profile: str
) -> None:
    model = families.oracle(family)
    graph = load(export(family, profile))
    families.check_decoding(graph, lambda tokens: families.reference_logits(model, tokens), 1e-4)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": 7},
        {"layers": 9},
        {"kv_heads": 3},
        {"head_dim": 5},
        {"max_context": 99},
        {"hidden_size": 4},
        {"masks": ["full", "sliding"]},
        {"hidden_layers": [0]},
        {"profile": None},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_description_of_another_graph_is_refused_at_load_with_both_values(
    export: Callable[..., GraphReport], profile: str, wrong: dict[str, Any]
) -> None:
    report = export("llama", profile, hidden_layers=(1,))
    (name, value), *_ = wrong.items()
    if name == "max_context" and profile == "inplace":  # its cache has no fixed length
        OnnxGraph.load(report.path, {**report.meta, name: value}, threads=1).close()
        return
    value = value or next(other for other in PROFILES if other != profile)
    found = report.meta[name]
    said = tuple(value) if isinstance(value, list) else value
    expected = re.escape(f"has {name} {tuple(found) if isinstance(found, list) else found}, ")
    with pytest.raises(BackendError, match=expected + re.escape(f"the manifest says {said};")):
        OnnxGraph.load(report.path, {**report.meta, name: value}, threads=1)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_tree_on_an_empty_cache_uses_the_positions_it_was_given(
    export: Callable[..., GraphReport], family: str, profile: str
) -> None:
    model = families.oracle(family)
    graph = load(export(family, profile, hidden_layers=(1,)))
    parents, tokens = [-1, 0, 0, 1, 2], [5, 6, 7, 8, 9]
    output = graph.forward(
        tokens, families.depths(parents), families.tree_mask(parents), logits=[4, 0, 3], hidden=(1,)
    )
    for row, node in enumerate([4, 0, 3]):
        path = [tokens[i] for i in families.path_to(parents, node)]
        np.testing.assert_allclose(output.logits[row], families.reference_logits(model, path)[-1], atol=1e-4)
    assert output.hidden[1].shape == (5, graph.meta.hidden_size)
    graph.commit([0, 2, 4])
    expected = families.reference_logits(model, [5, 7, 9, 3])[-1]
    np.testing.assert_allclose(graph.forward([3]).logits[0], expected, atol=1e-4)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_forest_of_two_roots_on_an_empty_cache_keeps_them_apart(
    export: Callable[..., GraphReport], profile: str
) -> None:
    model = families.oracle("llama")
    graph = load(export("llama", profile))
    found = graph.forward([5, 6], np.zeros(2, np.int64), np.eye(2, dtype=bool)).logits
    for row, token in enumerate([5, 6]):
        np.testing.assert_allclose(found[row], families.reference_logits(model, [token])[0], atol=1e-4)


@pytest.mark.parametrize("profile", PROFILES)
def test_hidden_states_come_from_the_layers_that_were_exported(
    export: Callable[..., GraphReport], profile: str
) -> None:
    graph = load(export("llama", profile, hidden_layers=(0,)))
    tokens = [1, 2, 3]
    output = graph.forward(tokens, logits="none", hidden=(0,))
    with torch.no_grad():
        states = families.oracle("llama")(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    np.testing.assert_allclose(output.hidden[0], states[1][0].numpy(), atol=1e-4)
    assert output.logits is None
    assert set(output.hidden) == {0}
    with pytest.raises(ValueError, match=r"hidden layers \[1\] were not exported"):
        graph.forward(tokens, hidden=(1,))


@pytest.mark.parametrize("profile", PROFILES)
def test_only_the_rows_asked_for_are_returned(export: Callable[..., GraphReport], profile: str) -> None:
    graph = load(export("llama", profile))
    tokens = [4, 3, 2, 1, 9]
    everything = graph.forward(tokens).logits.copy()
    for request, rows in (("last", [4]), ([3, 0], [3, 0]), ([2], [2])):
        np.testing.assert_allclose(graph.forward(tokens, logits=request).logits, everything[rows], atol=1e-5)
    assert graph.forward(tokens, logits="none").logits is None
    top = graph.forward(tokens, logits=TopK(3)).logits
    assert isinstance(top, TopRows)
    np.testing.assert_array_equal(top.ids, np.argsort(-everything, axis=1, kind="stable")[:, :3])


def test_top_rows_order_ties_by_id_and_sum_over_the_whole_vocabulary() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)
    found = top_rows(logits, 2)
    assert found.ids.tolist() == [[1, 2], [0, 1]]
    assert top_rows(logits, 1).ids.tolist() == [[1], [0]]
    np.testing.assert_allclose(found.logsumexp, np.log(np.exp(logits).sum(1)), rtol=1e-6)
    assert top_rows(logits, 9).ids.shape == (2, 5)
    assert top_rows(np.zeros((0, 5), np.float32), 2).ids.shape == (0, 2)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_forward_does_not_move_the_length_and_uncommitted_rows_vanish(
    export: Callable[..., GraphReport], profile: str
) -> None:
    graph = load(export("llama", profile))
    assert isinstance(graph, Graph)
    graph.forward([1, 2, 3])
    graph.commit([0, 1])
    expected = graph.forward([7]).logits.copy()
    graph.forward([8, 8, 8, 8])
    assert graph.length == 2
    np.testing.assert_allclose(graph.forward([7]).logits, expected, atol=1e-6)
    with pytest.raises(ValueError, match="not among the 1"):
        graph.commit([1])
    graph.commit([])
    with pytest.raises(ValueError, match="not among the 0"):
        graph.commit([0])


@pytest.mark.parametrize("profile", PROFILES)
def test_rows_that_were_put_aside_come_back_bit_for_bit(
    export: Callable[..., GraphReport], profile: str
) -> None:
    graph = load(export("llama", profile))
    families.check_rows_come_back(graph)
    with pytest.raises(ValueError, match="holds 5 tokens"):
        graph.keep(6)
    with pytest.raises(ValueError, match="not what `keep`"):
        graph.bring_back([1])
    with pytest.raises(ValueError, match="from 3 on do not follow the 5"):
        graph.bring_back(graph.keep(3))


BLOCKS = {
    "4-bit": BlockInt(4, 32),
    "8-bit": BlockInt(8, 32),
    "4-bit float activations": BlockInt(4, 32, accuracy_level=1),
}


def earlier_rows_by_company(graph: OnnxGraph) -> list[np.ndarray]:
    """The first rows of a verify, at several widths and with two suffixes of very different activations."""
    graph.forward([11, 12, 13])
    graph.commit([0, 1, 2])
    suffixes = ([20, 21, 22, 23, 24, 25], [90, 80, 70, 60, 50, 40])
    return [
        graph.forward([30, *suffix[:extra]]).logits[0].copy()
        for extra in (0, 1, 2, 4, 6)
        for suffix in suffixes
    ]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("scheme", BLOCKS.values(), ids=BLOCKS)
def test_rows_of_block_quantized_graphs_do_not_depend_on_width_or_later_rows(
    export: Callable[..., GraphReport], scheme: BlockInt, profile: str
) -> None:
    recipe = Recipe("blocks", scheme, BlockInt(8, 32), BlockInt(8, 32))
    rows = earlier_rows_by_company(load(export("llama", profile, recipe)))
    for row in rows[1:]:
        np.testing.assert_allclose(row, rows[0], atol=2e-5 * np.abs(rows[0]).max())


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="these kernels are known to be exact on x86-64 only"
)
@pytest.mark.parametrize("name", ["int4", "int4-b32", "int8", "int8-b32"])
def test_rows_of_exact_recipes_are_equal_bit_for_bit_at_every_width(
    export: Callable[..., GraphReport], name: str
) -> None:
    rows = earlier_rows_by_company(load(export("llama", "inplace", get_recipe(name))))
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


def test_rows_of_dynamic_int8_graphs_depend_on_their_company(export: Callable[..., GraphReport]) -> None:
    recipe = Recipe("dynamic", DynamicInt8(), DynamicInt8(), BlockInt(8, 32))
    rows = earlier_rows_by_company(load(export("llama", "inplace", recipe)))
    spread = max(float(np.abs(row - rows[0]).max()) for row in rows[1:])
    assert spread > 1e-3 * np.abs(rows[0]).max()


def test_tokens_beyond_width_or_context_are_refused_by_name(export: Callable[..., GraphReport]) -> None:
    split, inplace = load(export("llama", "split")), load(export("llama", "inplace"))
    with pytest.raises(ValueError, match="17 tokens exceed the largest width of this graph, 16"):
        split.forward([1] * 17)
    inplace.forward([1] * 60, logits="none")
    inplace.commit(range(60))
    with pytest.raises(ContextError, match=r"5 tokens after 60 .* exceed the context of 64"):
        inplace.forward([1] * 5)
    with pytest.raises(ContextError, match="position 70"):
        inplace.forward([1], positions=np.array([70]))
    inplace.forward([1] * 4)
    with pytest.raises(ValueError, match="at least one token"):
        inplace.forward([])
    with pytest.raises(ValueError, match=r"rows \[4\] were asked for"):
        inplace.forward([1], logits=[4])
    with pytest.raises(ValueError, match="cannot truncate to 61"):
        inplace.truncate(61)


def test_missing_damaged_and_unknown_are_backend_errors(
    export: Callable[..., GraphReport], tmp_path: Path
) -> None:
    report = export("llama", "inplace")
    with pytest.raises(BackendError, match=r"absent.onnx does not exist"):
        OnnxGraph.load(tmp_path / "absent.onnx", report.meta)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(report.path.read_bytes()[:500])
    with pytest.raises(BackendError, match=r"cannot load .*broken.onnx.*damaged"):
        OnnxGraph.load(broken, report.meta)
    alone = tmp_path / "graph.onnx"
    alone.write_bytes(report.path.read_bytes())
    with pytest.raises(BackendError, match=r"cannot load .*graph.onnx"):
        OnnxGraph.load(alone, report.meta)
    with pytest.raises(BackendError, match="NoSuchExecutionProvider is not in this ONNX Runtime; it has"):
        OnnxGraph.load(report.path, report.meta, providers=("NoSuchExecutionProvider",))
    with pytest.raises(BackendError, match="lacks 'max_context'"):
        OnnxGraph.load(report.path, {k: v for k, v in report.meta.items() if k != "max_context"})
    with pytest.raises(BackendError, match="profile 'state'"):
        OnnxGraph.load(report.path, {**report.meta, "profile": "state"})


def test_a_graph_says_so_in_a_fork_and_when_it_is_closed_closes_twice_and_lets_go_of_its_cache(
    export: Callable[..., GraphReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    for profile in PROFILES:
        graph = load(export("llama", profile))
        graph.forward([1])
        with monkeypatch.context() as child:
            child.setattr("outrider.targets.cached_graph.os.getpid", lambda: -1)
            with pytest.raises(BackendError, match="opened before a fork"):
                graph.forward([1])
        cache = weakref.ref(graph._runner.cache)  # type: ignore[attr-defined]
        graph.close()
        graph.close()
        assert cache() is None
        with pytest.raises(BackendError, match="closed"):
            graph.forward([1])


def logits_of(graph: OnnxGraph, *chunks: NDArray[np.int64]) -> NDArray[np.float32]:
    """The rows of a text that is run in these chunks [S, V]."""
    graph.truncate(0)
    rows = []
    for chunk in chunks:
        rows.append(np.array(graph.forward(chunk).logits))
        graph.commit(range(len(chunk)))
    return np.concatenate(rows)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_of_8_bits_stays_close_and_its_rows_depend_on_the_prefix_alone(
    export: Callable[..., GraphReport], family: str, tmp_path: Path
) -> None:
    report = export(family, "inplace")
    rng = np.random.default_rng(0)
    text = rng.integers(1, report.meta["vocab_size"], 48)
    expected = logits_of(load(report), text)
    spread = float(expected.std())

    for path in report.files:
        shutil.copy(path, tmp_path / path.name)
    copy = replace(report, path=tmp_path / report.path.name)
    with pytest.raises(ExportError, match="no text to set the scales"):
        quantize_cache(copy, [text[:0]])
    more = rng.integers(1, report.meta["vocab_size"], 100)
    graph = load(quantize_cache(copy, [text[:0], text, more]))  # an empty sequence ends nothing
    assert graph._runner.cache.dtype == np.int8  # type: ignore[attr-defined]
    rounded = logits_of(graph, text)
    off = np.abs(rounded - expected)
    assert 0.0 < off.max() < 0.2 * spread
    assert off.mean() < 0.03 * spread

    singly = logits_of(graph, text[:32], *(text[i : i + 1] for i in range(32, 48)))
    np.testing.assert_allclose(singly, rounded, atol=0.02 * spread)
    graph.truncate(32)
    first, second = (
        graph.forward([*text[32:34], *suffix]).logits[:2].copy() for suffix in ([1, 2, 3], [4, 5, 6])
    )
    np.testing.assert_array_equal(first, second)
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    branches = graph.forward([text[32], 5, text[33]], np.array([32, 33, 33]), tree).logits
    np.testing.assert_allclose(branches[2], rounded[33], atol=0.02 * spread)
