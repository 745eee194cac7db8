"""The host side of Core ML packages: what they are given, what is kept, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from outrider.contracts import Graph, TopK
from outrider.errors import BackendError, ContextError, MissingExtraError, UsageError
from outrider.export.coreml import export_coreml_draft
from outrider.export.prove import text_rows
from outrider.quantize.coreml_recipes import coreml_recipe
from outrider.runtime.proof import narrow_widths
from outrider.targets import coreml_programs
from outrider.targets.coreml import CoreMLGraph, refuse_another_graph
from outrider.targets.coreml_profiles import CoreMLMeta, Forward, forwards
from outrider.targets.coreml_programs import open_program
from outrider.targets.coreml_reference import MilProgram
from outrider.targets.coreml_reference.schema import load_schema
from outrider.targets.npu_host import open_embedding
from tests import coreml_toy, families, npu_toy

NEAR = 0.02  # half precision of rows, cosines, keys and logits, beside float logits of standard deviation 2
PROFILES = ["split", "state"]
Load = Callable[..., CoreMLGraph]


@pytest.fixture(scope="module")
def toy() -> npu_toy.FloatModel:
    return npu_toy.FloatModel()


@pytest.fixture
def load(toy: npu_toy.FloatModel, tmp_path: Path) -> Load:
    def make(profile: str, **changes: Any) -> CoreMLGraph:
        described = coreml_toy.meta(profile, **changes)
        record = CoreMLMeta.from_json(described)
        path = coreml_toy.write_embedding(tmp_path / "embedding.f16", toy)
        table = open_embedding(path, described["embedding"]) if profile == "split" else None
        return CoreMLGraph(record, coreml_toy.ToyProgram(toy, described), table)

    return make


def calls(graph: CoreMLGraph) -> list[int]:
    return graph._runner.program.calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("profile", PROFILES)
def test_graph_equals_the_float_model_through_prefill_decode_tree_rollback_and_window(
    load: Load, toy: npu_toy.FloatModel, profile: str
) -> None:
    families.check_decoding(load(profile), toy.logits, NEAR)


@pytest.mark.parametrize(("widths", "most_rows"), [(None, None), (None, 1), ([1, 16], 3), ([2, 7, 9], None)])
def test_a_stateful_graph_may_take_any_width_or_a_few_and_return_some_rows_or_all(
    load: Load, toy: npu_toy.FloatModel, widths: Any, most_rows: int | None
) -> None:
    graph = load("state", widths=widths, rows=most_rows)
    families.check_decoding(graph, toy.logits, NEAR)
    assert set(calls(graph)) <= set(widths or range(npu_toy.M))


@pytest.mark.parametrize("profile", PROFILES)
def test_it_is_a_graph_and_says_who_runs_it(load: Load, profile: str) -> None:
    graph = load(profile)
    assert isinstance(graph, Graph)
    assert (graph.vocab_size, graph.max_context) == (npu_toy.V, npu_toy.M)
    assert (graph.widths, graph.hidden_layers) == (coreml_toy.WIDTHS, coreml_toy.HIDDEN)
    assert (graph.via, graph.executed_artifact, graph.providers) == ("evaluator", True, ("toy",))


@pytest.mark.parametrize("profile", PROFILES)
def test_any_rows_of_a_wide_forward_are_returned_in_the_order_asked_for(
    load: Load, toy: npu_toy.FloatModel, profile: str
) -> None:
    graph = load(profile)
    tokens = np.random.default_rng(1).integers(0, npu_toy.V, 12).tolist()
    expected = toy.logits(tokens)
    found = graph.forward(tokens).logits.copy()
    np.testing.assert_allclose(found, expected, atol=NEAR)
    for request, rows in (("last", [11]), ([3, 0, 7], [3, 0, 7]), ([5], [5]), ([], [])):
        np.testing.assert_array_equal(graph.forward(tokens, logits=request).logits, found[rows])
    top = graph.forward(tokens, logits=TopK(3)).logits
    np.testing.assert_array_equal(top.ids, np.argsort(-found, axis=1, kind="stable")[:, :3])
    before = len(calls(graph))
    assert graph.forward(tokens, logits="none").logits is None
    assert calls(graph)[before:] == [16]
    graph.commit(range(12))
    np.testing.assert_allclose(graph.forward([4]).logits, toy.logits([*tokens, 4])[-1:], atol=NEAR)


def test_a_text_is_evaluated_in_functions_that_return_all_rows_not_in_one_that_runs_again_for_each(
    load: Load, toy: npu_toy.FloatModel
) -> None:
    graph = load("split")
    text = np.random.default_rng(2).integers(0, npu_toy.V, 23)
    found = np.concatenate(list(text_rows(graph, text)))
    np.testing.assert_allclose(found, toy.logits(text.tolist()), atol=NEAR)
    assert narrow_widths(graph) == (1, 2, 8)
    assert calls(graph) == [8, 8, 8]


@pytest.mark.parametrize("profile", PROFILES)
def test_hidden_states_are_those_of_the_tokens_without_padding(load: Load, profile: str) -> None:
    graph = load(profile)
    tokens = [3, 1, 4, 1, 5]
    whole = graph.forward(tokens, hidden=(0,)).hidden[0].copy()
    assert whole.shape == (5, npu_toy.D)
    graph.commit([])
    for end in (1, 2, 3):
        part = graph.forward(tokens[:end], hidden=(0,)).hidden[0]
        np.testing.assert_allclose(part, whole[:end], atol=NEAR)
    with pytest.raises(ValueError, match=r"hidden layers \[1\] were not exported"):
        graph.forward([1], hidden=(1,))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_row_depends_on_neither_later_rows_nor_padding(load: Load, profile: str) -> None:
    graph = load(profile)
    graph.forward([11, 12, 13])
    graph.commit([0, 1, 2])
    for pair in (([20], [90]), ([20, 21, 22, 23], [90, 80, 70, 60]), ([1] * 9, [95] * 15)):
        first, second = (graph.forward([30, *suffix], logits=[0]).logits[0].copy() for suffix in pair)
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_tree_on_an_empty_cache_and_a_forest_keep_their_paths_apart(
    load: Load, toy: npu_toy.FloatModel, profile: str
) -> None:
    graph = load(profile)
    parents, tokens = [-1, 0, 0, 1, 2], [5, 6, 7, 8, 9]
    found = graph.forward(tokens, families.depths(parents), families.tree_mask(parents)).logits.copy()
    for node in range(5):
        path = [tokens[i] for i in families.path_to(parents, node)]
        np.testing.assert_allclose(found[node], toy.logits(path)[-1], atol=NEAR)
    graph.commit([0, 2, 4])
    np.testing.assert_allclose(graph.forward([3]).logits, toy.logits([5, 7, 9, 3])[-1:], atol=NEAR)
    graph.truncate(0)
    roots = graph.forward([5, 6], np.zeros(2, np.int64), np.eye(2, dtype=bool)).logits
    np.testing.assert_allclose(roots, [toy.logits([5])[0], toy.logits([6])[0]], atol=NEAR)


def test_a_stateful_graph_runs_a_scattered_path_again_and_refuses_rows_that_are_no_path(load: Load) -> None:
    graph = load("state")
    parents = [-1, 0, 0, 1]
    where = (families.depths(parents), families.tree_mask(parents))
    graph.forward([5, 6, 7, 8], *where)
    graph.commit([0, 1])
    assert calls(graph) == [8, 8]  # four rows and the three of all logits that one call takes, padded to 8
    graph.truncate(0)
    graph.forward([5, 6, 7, 8], *where, logits="last")
    before = len(calls(graph))
    graph.commit([0, 2])
    assert calls(graph)[before:] == [2]
    graph.truncate(0)
    graph.forward([5, 6, 7, 8], *where)
    with pytest.raises(ValueError, match=r"rows \[0, 3\] are not whole paths from a root"):
        graph.commit([0, 3])


@pytest.mark.parametrize("profile", PROFILES)
def test_the_last_rows_of_the_cache_can_be_used_whatever_the_widths_are(
    load: Load, toy: npu_toy.FloatModel, profile: str
) -> None:
    graph = load(profile)
    tokens = np.random.default_rng(2).integers(0, npu_toy.V, npu_toy.M).tolist()
    for start in (0, 16):
        graph.forward(tokens[start : start + 16], logits="none")
        graph.commit(range(16))
    graph.forward(tokens[32:35], logits="none")
    graph.commit(range(3))
    found = graph.forward(tokens[35:]).logits.copy()  # five rows in five: padding to 8 would not fit
    np.testing.assert_allclose(found, toy.logits(tokens)[35:], atol=NEAR)
    graph.commit(range(5))
    assert graph.length == npu_toy.M
    with pytest.raises(ContextError, match="position 40"):
        graph.forward([1])


def test_calls_near_the_end_of_the_cache_need_no_padding() -> None:
    assert [*forwards(5, 100, (1, 2, 8))] == [Forward(0, 5, 8)]
    assert [*forwards(5, 7, (1, 2, 8))] == [Forward(0, 2, 2), Forward(2, 2, 2), Forward(4, 1, 1)]
    assert [*forwards(3, 3, ())] == [Forward(0, 3, 3)]
    with pytest.raises(
        ContextError, match="1 rows of the cache are left; the smallest width of this graph is 2"
    ):
        list(forwards(3, 3, (2, 8)))


@pytest.mark.parametrize("profile", PROFILES)
def test_what_cannot_be_run_is_refused_by_name(load: Load, profile: str) -> None:
    graph = load(profile)
    with pytest.raises(ValueError, match="17 tokens exceed the largest width of this graph, 16"):
        graph.forward([1] * 17)
    with pytest.raises(ValueError, match="token ids 5 to 96 were given; the embedding has 96 rows"):
        graph.forward([5, 96])
    graph.forward([1])
    with pytest.raises(ValueError, match="not among the 1"):
        graph.commit([1])
    program = graph._runner.program  # type: ignore[attr-defined]
    graph.close()
    graph.close()
    assert program.closed
    with pytest.raises(BackendError, match="closed"):
        graph.forward([1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"functions": {"1": "w1", "2": "w2", "16": "w16"}},
            "width 8 was given no function .there are: 1, 2, 16",
        ),
        ({"rows": {"1": 1}}, "width 2 was given no number of rows"),
        ({"head": [60, 30]}, "the pieces of the head have 90 columns, the vocabulary 96"),
        ({"widths": None}, "names no widths"),
        ({"profile": "inplace"}, "profile 'inplace' is not one of Core ML's: split, state"),
        ({"masked": "low"}, "description cannot be read"),
        ({"rope": {"full": {}}}, "description lacks 'inv_freq'"),
    ],
)
def test_a_description_edited_by_hand_is_an_error_that_names_the_field(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        CoreMLMeta.from_json(coreml_toy.meta("split", **changes))


def test_a_package_of_another_graph_is_refused_by_the_first_tensor_that_differs(
    toy: npu_toy.FloatModel,
) -> None:
    program = coreml_toy.ToyProgram(toy, coreml_toy.meta("split"))
    same = CoreMLMeta.from_json(coreml_toy.meta("split"))
    refuse_another_graph(same, program, Path("a.mlpackage"))
    longer = CoreMLMeta.from_json(coreml_toy.meta("split", max_context=48))
    with pytest.raises(
        BackendError, match=r"'w1' has mask_full \[1, 41, 1, 1\], the manifest says \[1, 49, 1, 1\]"
    ):
        refuse_another_graph(longer, program, Path("a.mlpackage"))
    without = CoreMLMeta.from_json(coreml_toy.meta("split", hidden_layers=[]))
    with pytest.raises(BackendError, match=r"'w1' has hidden_0 \[1, 32, 1, 1\], the manifest says none"):
        refuse_another_graph(without, program, Path("a.mlpackage"))
    other = coreml_toy.meta("split", functions={str(W): f"v{W}" for W in coreml_toy.WIDTHS})
    with pytest.raises(BackendError, match="has no function 'v1'; it has w1, w2, w8, w16"):
        refuse_another_graph(CoreMLMeta.from_json(other), program, Path("a.mlpackage"))


def test_a_split_graph_without_its_table_is_an_error(toy: npu_toy.FloatModel, tmp_path: Path) -> None:
    described = coreml_toy.meta("split")
    record = CoreMLMeta.from_json(described)
    with pytest.raises(BackendError, match="has no embedding file"):
        CoreMLGraph(record, coreml_toy.ToyProgram(toy, described), None)
    path = coreml_toy.write_embedding(tmp_path / "e", toy)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(BackendError, match=r"has 6142 bytes; a table of 96 x 32 in float16 has 6144"):
        open_embedding(path, described["embedding"])
    with pytest.raises(BackendError, match="lacks 'columns'"):
        open_embedding(path, {"dtype": "float16", "rows": 5})
    with pytest.raises(BackendError, match=r"rows 0, columns 3 is impossible"):
        open_embedding(path, {"dtype": "float16", "rows": 0, "columns": 3})


def test_what_opens_a_package_is_named_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendError, match=r"gone\.mlpackage does not exist"):
        CoreMLGraph.load(tmp_path / "gone.mlpackage", coreml_toy.meta("state"))
    with pytest.raises(UsageError, match="execution is 'fast'; known: auto, coreml, evaluator"):
        open_program(tmp_path, "fast", "cpu")
    with pytest.raises(UsageError, match="unit is 'ane'; known: npu, gpu, cpu"):
        CoreMLGraph.load(tmp_path, coreml_toy.meta("state"), unit="ane")
    monkeypatch.setattr(coreml_programs.sys, "platform", "linux")
    with pytest.raises(BackendError, match="Core ML was asked for, but it is part of macOS and iOS"):
        open_program(tmp_path, "coreml", "cpu")
    monkeypatch.setattr(coreml_programs.sys, "platform", "darwin")
    monkeypatch.setitem(coreml_programs.sys.modules, "coremltools", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'outrider\[coreml\]'"):
        open_program(tmp_path, "auto", "npu")


class FakeModel:
    """Core ML's Python model as far as it is used: single precision only in, one evaluator behind."""

    made: ClassVar[list[tuple[str, str, str | None]]] = []

    def __init__(
        self, path: str, compute_units: Any = None, function_name: str | None = None, **more: Any
    ) -> None:
        assert not more
        FakeModel.made.append((type(self).__name__, compute_units, function_name))
        self.program = MilProgram.load(path.removesuffix("c"), function_name)
        self.path = path

    def get_compiled_model_path(self) -> str:
        return f"{self.path}c"

    def make_state(self) -> Any:
        return self.program.make_state()

    def predict(self, data: dict[str, Any], state: Any = None) -> dict[str, Any]:
        assert all(array.dtype in (np.float32, np.int32) for array in data.values())
        wanted = {
            name: np.float16 if spec.dtype == "fp16" else np.int32
            for name, spec in self.program.inputs.items()
        }
        found = self.program.predict(
            {name: array.astype(wanted[name]) for name, array in data.items()}, state
        )
        return {name: array.astype(np.float32) for name, array in found.items()}


class FakeCompiled(FakeModel):
    pass


def fake_coremltools() -> Any:
    """A module in the place of coremltools on a Mac."""

    def load_spec(path: str) -> Any:
        model = load_schema().Model()
        model.ParseFromString(next(Path(path).rglob("model.mlmodel")).read_bytes())
        return model

    units = {name: name for name in ("CPU_AND_NE", "CPU_AND_GPU", "CPU_ONLY")}
    return SimpleNamespace(
        ComputeUnit=units,
        utils=SimpleNamespace(load_spec=load_spec),
        models=SimpleNamespace(MLModel=FakeModel, CompiledMLModel=FakeCompiled),
    )


def exported(family: str, place: Path, recipe: str = "fp16") -> tuple[Any, dict[str, Any]]:
    weights = families.weights_of(family, families.oracle(family))
    lowered = export_coreml_draft(
        weights.config, weights, coreml_recipe(recipe), place, max_context=families.CONTEXT, widths=(1, 2, 8)
    )
    return lowered, {**lowered.meta, "functions": dict(lowered.functions)}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_an_exported_family_stays_near_transformers_through_decoding_trees_and_windows(
    tmp_path: Path, family: str
) -> None:
    lowered, described = exported(family, tmp_path)
    graph = CoreMLGraph.load(lowered.files[0].parent, described, embedding=lowered.embedding_file)
    assert (graph.via, graph.execution) == ("evaluator", "evaluator")
    model = families.oracle(family)
    families.check_decoding(graph, lambda tokens: families.reference_logits(model, tokens), 0.02)
    graph.close()


def test_on_a_mac_core_ml_compiles_a_package_once_and_runs_it_on_the_unit_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered, described = exported("llama", tmp_path)
    monkeypatch.setattr(coreml_programs.sys, "platform", "darwin")
    monkeypatch.setitem(coreml_programs.sys.modules, "coremltools", fake_coremltools())
    monkeypatch.setattr(FakeModel, "made", [])
    graph = CoreMLGraph.load(lowered.files[0].parent, described, embedding=lowered.embedding_file, unit="npu")
    assert (graph.via, graph.executed_artifact, graph.providers) == (
        "artifact",
        True,
        ("Core ML CPU_AND_NE",),
    )
    model = families.oracle("llama")
    families.check_decoding(graph, lambda tokens: families.reference_logits(model, tokens), 0.02)
    assert sorted(FakeModel.made, key=lambda made: made[0] == "FakeCompiled") == [
        ("FakeModel", "CPU_AND_NE", "w8"),
        ("FakeCompiled", "CPU_AND_NE", "w1"),
    ]
    graph.close()
