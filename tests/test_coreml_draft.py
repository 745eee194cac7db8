"""The draft for the Neural Engine: a package of static functions, evaluated as shipped against the float oracle.

Evaluated results: `MilProgram` runs the saved file in numpy; no Neural Engine was asked.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outrider.export.coreml_graph as coreml_graph
from outrider.errors import ExportError, MissingExtraError, UsageError
from outrider.export.coreml import export_coreml_draft
from outrider.export.coreml_blob import BlobWriter
from outrider.export.coreml_graph import Layout
from outrider.export.coreml_package import PackageWriter, get_target
from outrider.export.coreml_program import MilFunction
from outrider.export.lowered import Lowered
from outrider.export.slots import SlotWeights
from outrider.export.trim import TrimmedWeights
from outrider.quantize.coreml_recipes import CoreMLRecipe, coreml_recipe
from outrider.targets.coreml import CoreMLGraph
from outrider.targets.coreml_reference import MilProgram, read_package
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


def weight_file(lowered: Lowered) -> Path:
    return next(path for path in lowered.files if path.name == "weight.bin")


def opened(lowered: Lowered) -> CoreMLGraph:
    return CoreMLGraph.load(
        package_of(lowered), lowered.meta, embedding=lowered.embedding_file, unit="npu", execution="evaluator"
    )


def logits_of(lowered: Lowered, tokens: list[int]) -> np.ndarray:
    """Teacher-forced, two tokens a forward."""
    graph, rows = opened(lowered), []
    for start in range(0, len(tokens), 2):
        part = tokens[start : start + 2]
        rows.append(graph.forward(part).logits.copy())
        graph.commit(range(len(part)))
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def model() -> Any:
    return families.oracle("llama")


@pytest.fixture(scope="module")
def weights(model: Any) -> SlotWeights:
    return families.weights_of("llama", model)


@pytest.fixture(scope="module")
def llama(weights: SlotWeights, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    metadata = {"outrider.role": "draft", "outrider.tokenizer_sha256": "abc"}
    return lower(weights, tmp_path_factory.mktemp("llama"), hidden_layers=(1, 0), metadata=metadata)


@pytest.fixture(scope="module")
def coremltools() -> Any:
    """Imported once: it warns about the versions of torch and scikit-learn beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coremltools
        from coremltools.converters.mil.frontend.milproto import load  # noqa: F401
    return coremltools


@pytest.mark.parametrize("family", families.FAMILIES)
def test_package_equals_the_float_oracle_through_prefill_decode_tree_rollback_and_window(
    family: str, tmp_path: Path
) -> None:
    model = families.oracle(family)
    graph = opened(lower(families.weights_of(family, model), tmp_path))
    assert graph.via == "evaluator"
    families.check_decoding(graph, lambda tokens: families.reference_logits(model, tokens), NEAR)


def test_large_key_biases_of_qwen2_stay_accurate(tmp_path: Path) -> None:
    model = families.oracle("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_().mul_(40)
    found = logits_of(lower(families.weights_of("qwen2", model), tmp_path), TEXTS[0][:20])
    np.testing.assert_allclose(found, families.reference_logits(model, TEXTS[0][:20]), atol=3 * NEAR, rtol=0)


def test_hidden_states_are_the_residual_stream_behind_a_layer(llama: Lowered, model: Any) -> None:
    tokens = TEXTS[1][:9]
    found = opened(llama).forward(tokens, hidden=(0, 1)).hidden
    with torch.no_grad():
        states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    np.testing.assert_allclose(found[0], states[1][0].numpy(), atol=NEAR, rtol=0)
    assert np.abs(found[1] - found[0]).max() > 0.1


def test_coremltools_reads_the_package_and_accepts_every_operation(llama: Lowered, coremltools: Any) -> None:
    """Its reader builds each operation anew: types, parameters and shapes pass its own checks."""
    from coremltools.converters.mil.frontend.milproto.load import load

    before = [path.read_bytes() for path in llama.files]
    opened = coremltools.models.MLModel(str(package_of(llama)), skip_model_load=True)
    assert [path.read_bytes() for path in llama.files] == before  # it writes the manifest anew
    spec = opened.get_spec()
    assert spec.specificationVersion == 9
    assert spec.description.defaultFunctionName == "w1"
    program = load(spec, specification_version=9, file_weights_dir=opened.weights_dir)
    assert set(program.functions) == {"w1", "w2", "w16"}
    for described in spec.description.functions:
        function = program.functions[described.name]
        shapes = {value.name: tuple(value.shape) for value in (*function.inputs.values(), *function.outputs)}
        said = {
            value.name: tuple(value.type.multiArrayType.shape)
            for value in (*described.input, *described.output)
        }
        assert shapes == said
    assert opened.user_defined_metadata["outrider.role"] == "draft"


def test_package_says_what_it_is(llama: Lowered) -> None:
    told = read_package(package_of(llama)).metadata
    assert told["outrider.role"] == "draft"
    assert told["outrider.tokenizer_sha256"] == "abc"
    assert told["outrider.widths"] == "1,2,16"
    assert json.loads(told["outrider.meta"]) == llama.meta


def test_everything_is_static_half_precision_of_four_axes_and_channels_first(llama: Lowered) -> None:
    package = read_package(package_of(llama))
    for definition in package.functions.values():
        for operation in definition.operations:
            assert operation.type not in ("gather", "linear", "matmul", "read_state", "silu")
            for _, kind in operation.outputs:
                assert operation.type == "const" or (kind.dtype == "fp16" and len(kind.shape) == 4)
                assert None not in kind.shape
    shapes = {name: value.shape for name, value in MilProgram.load(package_of(llama), "w16").inputs.items()}
    M = families.CONTEXT
    assert shapes["x"] == (1, 64, 1, 16)
    assert shapes["select"] == (1, 1, 16, 1)
    assert shapes["mask_full"] == (1, M + 16, 1, 16)
    assert shapes["past_key_1"] == (1, 32, 1, M)


def test_functions_of_all_widths_read_the_same_weights(
    llama: Lowered, weights: SlotWeights, tmp_path: Path
) -> None:
    single = lower(weights, tmp_path, widths=(2,), hidden_layers=(1, 0))
    assert weight_file(single).read_bytes() == weight_file(llama).read_bytes()


def test_an_export_has_the_same_bytes_every_time(
    llama: Lowered, weights: SlotWeights, tmp_path: Path
) -> None:
    metadata = {"outrider.role": "draft", "outrider.tokenizer_sha256": "abc"}
    again = lower(weights, tmp_path, hidden_layers=(1, 0), metadata=metadata)
    for first, second in zip(llama.files, again.files, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_weight_file_is_byte_for_byte_what_coremltools_writes(coremltools: Any, tmp_path: Path) -> None:
    from coremltools.libmilstoragepython import _BlobStorageWriter

    rng = np.random.default_rng(1)
    values = {"fp16": rng.normal(size=(5, 7)).astype(np.float16), "int8": rng.integers(-128, 128, (3, 11))}
    values |= {f"uint{bits}": rng.integers(0, 1 << bits, (3, 7)) for bits in (1, 2, 3, 4, 6, 8)}
    values["int4"] = rng.integers(-8, 8, (3, 7))
    theirs = _BlobStorageWriter(str(tmp_path / "theirs"))
    ours = BlobWriter(tmp_path / "ours")
    for kind, array in values.items():
        codes = array if kind == "fp16" else array.astype(np.int8 if kind[0] == "i" else np.uint8)
        flat = codes.reshape(-1)
        write = getattr(theirs, f"write_{kind}_data")
        assert ours.add(codes, kind) == write(flat.view(np.uint16) if kind == "fp16" else flat)
    ours.close()
    del theirs, write
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def evaluated(function: MilFunction, vectors: dict[str, np.ndarray], place: Path) -> MilProgram:
    with PackageWriter(place / "part.mlpackage") as writer:
        for name, vector in vectors.items():
            writer.store_half(name, vector)
        writer.finish({"main": function}, get_target("ios18"), {})
    return MilProgram.load(place / "part.mlpackage")


def test_norm_keeps_its_accuracy_from_the_smallest_numbers_to_the_end_of_half_precision(
    weights: SlotWeights, tmp_path: Path
) -> None:
    """The square of 256 is infinite in half precision; an attention sink has 25,000 in one channel."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(6, 64)) * np.array([1, 300, 20000, 1e-2, 1e-4, 0])[:, None]
    rows[0, 5], rows[2] = 60000, np.clip(rows[2], -60000, 60000)
    layout = Layout(weights.config, weights, M=8, W=6, stream=1.0)
    layout.f.declare("x", (1, 64, 1, 6))
    layout.f.outputs = [layout.norm("x", "norm", "y", 1)]
    program = evaluated(layout.f, layout.graph.vectors, tmp_path)
    x = rows.T[None, :, None].astype(np.float16)
    found = program.predict({"x": x})["y"][0, :, 0].T.astype(np.float64)
    exact = x[0, :, 0].T.astype(np.float64)
    power = np.square(exact).mean(axis=1, keepdims=True) + weights.config.norm_eps
    wanted = exact / np.sqrt(power) * weights.vector("norm")
    np.testing.assert_allclose(found, wanted, rtol=4e-3, atol=2e-6)


def test_a_residual_stream_beyond_half_precision_is_kept_smaller(tmp_path: Path) -> None:
    model = families.oracle("gemma3")
    with torch.no_grad():  # the last norm before the stream: its multipliers are the scale of the update
        model.model.layers[0].post_feedforward_layernorm.weight.add_(40000)
    weights = families.weights_of("gemma3", model)
    tokens = TEXTS[0][:10]
    fits = lower(weights, tmp_path / "fits", calibration=TEXTS[:1], hidden_layers=(1,))
    assert fits.notes["stream"] == 0.125
    wanted = families.reference_logits(model, tokens)
    np.testing.assert_allclose(logits_of(fits, tokens), wanted, atol=NEAR, rtol=0)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(logits_of(lower(weights, tmp_path / "plain"), tokens), wanted, atol=NEAR)


def test_head_of_some_rows_is_split_into_pieces(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coreml_graph, "HEAD_ROWS", 32)
    kept = np.arange(1, 81)
    lowered = lower(TrimmedWeights(families.checkpoint_of("llama", model), kept), tmp_path)
    assert lowered.meta["head"] == [32, 32, 16]
    assert lowered.meta["vocab_size"] == 80
    wanted = families.reference_logits(model, TEXTS[0][:8])[:, kept]
    np.testing.assert_allclose(logits_of(lowered, TEXTS[0][:8]), wanted, atol=NEAR, rtol=0)


@pytest.mark.parametrize(
    ("recipe", "after", "share", "near"), [("int8", "int8", 0.55, 0.03), ("lut6", "lut6-g8", 0.85, 0.12)]
)
def test_compressed_weights_are_smaller_and_near(  # tables of 64 values weigh much in so small a model
    recipe: str,
    after: str,
    share: float,
    near: float,
    llama: Lowered,
    weights: SlotWeights,
    model: Any,
    tmp_path: Path,
) -> None:
    lowered = lower(weights, tmp_path, recipe)
    assert {slot.after for slot in lowered.slots if slot.slot != "embedding"} == {after}
    assert weight_file(lowered).stat().st_size < share * weight_file(llama).stat().st_size
    wrong = np.abs(logits_of(lowered, TEXTS[0][:20]) - families.reference_logits(model, TEXTS[0][:20]))
    assert 0 < wrong.mean() < near


def test_a_mixed_recipe_keeps_the_slots_wide_that_cost_most(weights: SlotWeights, tmp_path: Path) -> None:
    mixed = replace(coreml_recipe("lut4-mix"), max_damage=0.005)
    lowered = lower(weights, tmp_path, mixed, calibration=TEXTS, widths=(2,))
    kinds = {slot.slot: slot.after for slot in lowered.slots if slot.slot.startswith("layers")}
    assert set(kinds.values()) == {"lut4-g8", "lut6-g8"}
    assert lowered.notes["overrides"] == {slot: kind for slot, kind in kinds.items() if kind == "lut6-g8"}


def test_what_cannot_be_exported_is_refused(
    weights: SlotWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="'ios17' is not known; known: ios18, ios26"):
        lower(weights, tmp_path, target="ios17")
    with pytest.raises(UsageError, match="calibration"):
        lower(weights, tmp_path, "lut4-mix")
    with pytest.raises(UsageError, match="at least one positive width"):
        lower(weights, tmp_path, widths=())
    huge = families.oracle("llama")
    with torch.no_grad():
        huge.model.norm.weight.mul_(1e6)
    with pytest.raises(ExportError, match="float16 ends at 65504"):
        lower(families.weights_of("llama", huge), tmp_path)
    for name in [name for name in sys.modules if name.startswith(("coremltools", "outrider_coreml_proto"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(MissingExtraError, match=r"outrider\[coreml\]"):
        lower(weights, tmp_path)


def test_newer_systems_get_their_operator_set(weights: SlotWeights, tmp_path: Path) -> None:
    lowered = lower(weights, tmp_path, target="ios26", widths=(2,))
    program = read_package(package_of(lowered))
    assert program.specification_version == 10
    assert lowered.meta["target"] == "ios26"
    assert logits_of(lowered, TEXTS[0][:2]).shape == (2, families.VOCAB)
