"""The Core ML package for an Apple GPU: its state, its widths and its weights, run by the evaluator."""

from __future__ import annotations

import gc
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="coremltools writes Core ML packages")

from outrider.errors import ExportError, UsageError
from outrider.export import coreml_target
from outrider.export.coreml_target import export_coreml_target
from outrider.export.lowered import Lowered
from outrider.export.slots import SlotWeights
from outrider.quantize.coreml import compress
from outrider.quantize.coreml_recipes import (
    COREML_RECIPES,
    CoreMLRecipe,
    parse_coreml_overrides,
    with_coreml_overrides,
)
from outrider.targets.coreml import CoreMLGraph

from .families import (
    CONTEXT,
    FAMILIES,
    VOCAB,
    check_decoding,
    depths,
    oracle,
    path_to,
    reference_logits,
    tree_mask,
    weights_of,
)

TOLERANCE = 0.02  # of half precision, on logits of up to 4


def export(weights: SlotWeights, place: Path, recipe: str | CoreMLRecipe = "fp16", **options: Any) -> Lowered:
    """A package over the whole context."""
    named = COREML_RECIPES[recipe] if isinstance(recipe, str) else recipe
    options = {"max_context": CONTEXT} | options
    return export_coreml_target(weights.config, weights, named, place, **options)


def opened(lowered: Lowered) -> CoreMLGraph:
    """The evaluator on a package."""
    return CoreMLGraph.load(lowered.files[0].parent, lowered.meta, unit="gpu", execution="evaluator")


@pytest.fixture(scope="module")
def model() -> Any:
    """A tied model of two layers."""
    return oracle("smollm")


@pytest.fixture(scope="module")
def weights(model: Any) -> SlotWeights:
    """Its weights."""
    return weights_of("smollm", model)


@pytest.fixture(scope="module")
def lowered(weights: SlotWeights, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """Its package in half precision, with hidden states."""
    return export(
        weights, tmp_path_factory.mktemp("fp16"), hidden_layers=(0, 1), metadata={"outrider.role": "target"}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_as_transformers_does(family: str, tmp_path: Path) -> None:
    model = oracle(family)
    graph = opened(export(weights_of(family, model), tmp_path))
    check_decoding(graph, lambda tokens: reference_logits(model, tokens), TOLERANCE)
    graph.close()


def test_weights_pass_through_no_other_folder(
    weights: SlotWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []
    make = tempfile.mkdtemp

    def recorded(*arguments: Any, **options: Any) -> str:
        folders.append(Path(make(*arguments, **options)))
        return str(folders[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", recorded)
    made = export(weights, tmp_path)
    assert len(folders) >= 2  # ours, and coremltools' in it
    assert all(folder.is_relative_to(tmp_path) for folder in folders)
    assert [path.name for path in tmp_path.iterdir()] == [made.files[0].parent.name]


@pytest.mark.filterwarnings(
    "ignore:Implicitly cleaning up:ResourceWarning"
)  # coremltools', after its own error
def test_a_package_that_cannot_be_written_whole_is_an_error_that_speaks_of_the_disk(
    weights: SlotWeights, tmp_path: Path
) -> None:
    """A limit on the size of files cuts a write off where a full disk would."""
    resource = pytest.importorskip("resource", reason="this system has no limits of that kind")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(ExportError, match=r"cannot write .*Its disk may be full .*MB are free"):
            export(weights, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()


def test_rows_do_not_depend_on_later_rows_or_on_the_width(lowered: Lowered) -> None:
    graph = opened(lowered)
    graph.forward([5, 6, 7])
    graph.commit(range(3))
    first = graph.forward([9, 8]).logits.copy()
    for width in (3, 5, 9, 33):
        for filler in (1, 60):
            found = graph.forward([9, 8] + [filler] * (width - 2)).logits[:2]
            np.testing.assert_allclose(found, first, atol=2e-3, rtol=0)  # another product of another size
    graph.close()


def test_a_tree_sees_its_ancestors_and_a_rejected_branch_leaves_no_trace(
    model: Any, lowered: Lowered
) -> None:
    graph = opened(lowered)
    prefix, drafted, parents = [3, 1, 4, 1, 5], [9, 2, 6, 5], [-1, 0, 0, 1]
    graph.forward(prefix)
    graph.commit(range(5))
    found = graph.forward(drafted, 5 + depths(parents), tree_mask(parents)).logits
    for node in range(4):
        path = [drafted[index] for index in path_to(parents, node)]
        np.testing.assert_allclose(found[node], reference_logits(model, prefix + path)[-1], atol=TOLERANCE)
    graph.commit([0])
    after = graph.forward([7, 7]).logits
    np.testing.assert_allclose(after, reference_logits(model, [*prefix, 9, 7, 7])[-2:], atol=TOLERANCE)
    graph.close()


def test_hidden_states_and_chosen_rows_come_out(model: Any, lowered: Lowered) -> None:
    import torch

    tokens = [1, 2, 3, 4, 5, 6]
    with torch.no_grad():
        states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    graph = opened(lowered)
    found = graph.forward(tokens, logits=[4, 1], hidden=(0,))
    np.testing.assert_allclose(found.logits, reference_logits(model, tokens)[[4, 1]], atol=TOLERANCE)
    np.testing.assert_allclose(found.hidden[0], states[1][0].numpy(), atol=TOLERANCE)
    graph.close()


@pytest.mark.parametrize("recipe", ["lut4", "int8", "int4-b32-asym"])
def test_a_compressed_package_computes_with_what_its_weights_stand_for(
    weights: SlotWeights, recipe: str, tmp_path: Path
) -> None:
    class Stored(SlotWeights):
        """What the recipe leaves of every matrix."""

        def matrix(self, slot: str) -> np.ndarray:
            source = "embedding" if slot == "head" else slot
            return compress(COREML_RECIPES[recipe], source, weights.matrix(slot)).values()

    small = export(weights, tmp_path / "small", recipe)
    same = export(Stored(weights._checkpoint), tmp_path / "same")
    tokens = np.random.default_rng(0).integers(1, VOCAB, 30).tolist()
    found, expected = (opened(each).forward(tokens).logits for each in (small, same))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    kinds = small.notes["operations"]
    assert sum(count for kind, count in kinds.items() if kind.startswith("constexpr_")) == 9
    assert not any(kind.startswith("constexpr_") for kind in same.notes["operations"])
    assert small.files[-1].stat().st_size < same.files[-1].stat().st_size


def test_a_tied_matrix_is_in_the_package_once(weights: SlotWeights, lowered: Lowered, tmp_path: Path) -> None:
    untied = replace(weights.config, tie_embeddings=False)
    checkpoint = weights._checkpoint
    twice = type(checkpoint)(
        untied, {**checkpoint.state, "lm_head.weight": checkpoint.state["model.embed_tokens.weight"]}
    )
    other = export(SlotWeights(twice), tmp_path, hidden_layers=(0, 1))
    matrix = 2 * untied.vocab_size * untied.hidden_size
    extra = other.files[-1].stat().st_size - lowered.files[-1].stat().st_size
    assert matrix <= extra <= matrix + coreml_target.ALIGNMENT
    head = lowered.slots[-1]
    assert (head.slot, head.bytes_after, head.reason) == ("head", 0, "the embedding's own bytes")


def test_the_package_says_what_it_is_and_is_the_same_every_time(
    weights: SlotWeights, lowered: Lowered, tmp_path: Path
) -> None:
    import coremltools as ct

    ct.converters.mil.Builder.name_count["shape"] += 1  # another program was begun in this process
    again = export(weights, tmp_path, hidden_layers=(0, 1), metadata={"outrider.role": "target"})
    spec = ct.models.utils.load_spec(str(lowered.files[0].parent))
    described = dict(spec.description.metadata.userDefined)
    assert described["outrider.role"] == "target"
    assert described["outrider.widths"] == "1,2,3,5,9,64"
    assert json.loads(described["outrider.meta"]) == json.loads(json.dumps(lowered.meta))
    assert spec.specificationVersion == 9
    assert [state.name for state in spec.description.state] == ["keys_0", "values_0", "keys_1", "values_1"]
    for first, second in zip(lowered.files, again.files, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_ios26_is_a_newer_specification(weights: SlotWeights, tmp_path: Path) -> None:
    import coremltools as ct

    newer = export(weights, tmp_path, target="ios26")
    assert ct.models.utils.load_spec(str(newer.files[0].parent)).specificationVersion == 10
    graph = opened(newer)
    assert graph.forward([1, 2]).logits.shape == (2, VOCAB)
    graph.close()


def test_activations_whose_squares_leave_half_precision_are_normed_right(tmp_path: Path) -> None:
    model = oracle("smollm", tie_word_embeddings=False)
    weights = weights_of("smollm", model)
    for slot in ("model.embed_tokens.weight",):
        weights._checkpoint.state[slot] *= 3000.0
    import torch

    with torch.no_grad():
        model.model.embed_tokens.weight *= 3000.0
    graph = opened(export(weights, tmp_path))
    tokens = [4, 9, 16, 25]
    found = graph.forward(tokens).logits
    np.testing.assert_allclose(found, reference_logits(model, tokens), atol=TOLERANCE)
    graph.close()


def test_a_product_beyond_half_precision_is_shrunk_where_text_shows_it(tmp_path: Path) -> None:
    import torch

    model = oracle("smollm", tie_word_embeddings=False)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 1e5
    weights = weights_of("smollm", model)
    texts = [np.random.default_rng(0).integers(1, VOCAB, 40).tolist()]
    made = export(weights, tmp_path, calibration=texts)
    assert made.notes["stream"] < 1
    graph = opened(made)
    expected = reference_logits(model, texts[0])
    np.testing.assert_allclose(graph.forward(texts[0]).logits, expected, atol=0.05)
    graph.close()


def test_a_mixed_recipe_keeps_slots_wide_until_the_rest_costs_little(
    weights: SlotWeights, tmp_path: Path
) -> None:
    texts = [np.random.default_rng(seed).integers(1, VOCAB, 40).tolist() for seed in range(5)]
    strict = replace(COREML_RECIPES["lut4-mix"], max_damage=0.01)  # a random model is hurt by little
    made = export(weights, tmp_path, strict, calibration=texts)
    kept = made.notes["overrides"]
    assert 1 <= len(kept) < 8
    assert set(kept.values()) == {"lut6-g8"}
    after = {slot.slot: slot.after for slot in made.slots}
    assert all(after[slot] == "lut6-g8" for slot in kept)
    with pytest.raises(UsageError, match="needs calibration text"):
        export(weights, tmp_path / "none", "lut4-mix")


def test_what_cannot_be_exported_is_said(weights: SlotWeights, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one matrix for both"):
        export(weights, tmp_path, with_coreml_overrides(COREML_RECIPES["int8"], (("head", None),)))
    blocks = with_coreml_overrides(COREML_RECIPES["int8"], parse_coreml_overrides("layers.*.down=int4-b64"))
    with pytest.raises(ExportError, match="blocks of 64 do not divide"):
        export(weights, tmp_path, blocks)
    with pytest.raises(UsageError, match="ios17"):
        export(weights, tmp_path, target="ios17")
    with pytest.raises(UsageError, match="hidden layers"):
        export(weights, tmp_path, hidden_layers=(2,))


def test_a_package_with_other_weights_than_the_recipe_says_is_refused(
    weights: SlotWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(mb: Any, weight: Any, name: str) -> Any:
        return mb.const(val=weight.values().astype(np.float16), name=name)

    monkeypatch.setattr(coreml_target, "constexpr", half)
    with pytest.raises(ExportError, match="holds 0 compressed weights, and 9 were compressed"):
        export(weights, tmp_path, "int8")
