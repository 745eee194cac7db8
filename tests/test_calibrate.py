"""Calibration reaches an export: the moments are those of the float model, and packing profits from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import ExportError
from outrider.export.bundle import ExportOptions, RoleOptions, export_bundle
from outrider.export.calibrate import LayerMoments, calibrate, calibration_tokens
from outrider.export.checkpoint import open_checkpoint
from outrider.export.onnx import export_graph
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights, matrix_slots, slot_shape
from outrider.export.tokenizer_files import TokenizerFiles
from outrider.manifest import read_manifest
from outrider.quantize.pack import pack, unpack
from outrider.quantize.recipes import get_recipe
from outrider.quantize.schemes import BlockInt, Float, RawBlocks, Recipe
from tests import families

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("traced_once")
TEXTS = [np.arange(1, 31), np.arange(60, 95)]
GPTQ, MSE = BlockInt(4, 32, method="gptq"), BlockInt(4, 32, method="mse")
HOOKED = {
    "qkv": "self_attn.q_proj",
    "attn_out": "self_attn.o_proj",
    "gate_up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def oracle_moments(model: Any) -> dict[str, np.ndarray]:
    """What transformers' own layers read, by slot."""
    seen: dict[str, list[np.ndarray]] = {}

    def listen(slot: str, module: Any) -> None:
        module.register_forward_pre_hook(
            lambda _, given: seen.setdefault(slot, []).append(given[0][0].numpy())
        )

    for index, layer in enumerate(model.model.layers):
        for part, name in HOOKED.items():
            listen(f"layers.{index}.{part}", layer.get_submodule(name))
    listen("head", model.lm_head)
    with torch.no_grad():
        for tokens in TEXTS:
            model(torch.from_numpy(tokens)[None], use_cache=False)
    rows = {slot: np.concatenate(parts) for slot, parts in seen.items()}
    return {slot: x.T @ x / len(x) for slot, x in rows.items()}


@pytest.mark.parametrize("family", ["smollm", "gemma2", "qwen3"])
def test_moments_are_those_of_the_inputs_of_the_float_model(family: str) -> None:
    model = families.oracle(family)
    expected = oracle_moments(model)
    slots = list(expected)
    moments = LayerMoments(
        families.weights_of(family, model), {slot: not slot.endswith("qkv") for slot in slots}, TEXTS
    )
    for slot in slots:
        want = expected[slot] if not slot.endswith("qkv") else np.diagonal(expected[slot])
        np.testing.assert_allclose(moments[slot], want, atol=2e-4 * np.abs(want).max())


def test_moments_that_are_gone_are_an_error_and_others_are_absent() -> None:
    weights = families.weights_of("llama", families.oracle("llama"))
    moments = LayerMoments(weights, {"layers.0.down": False, "layers.1.down": False}, TEXTS)
    assert moments.get("layers.0.qkv") is None
    assert list(moments) == ["layers.0.down", "layers.1.down"]
    moments["layers.1.down"]
    with pytest.raises(ExportError, match=r"layers\.0\.down are gone"):
        moments["layers.0.down"]


def test_one_layer_is_run_when_its_first_slot_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    original = FloatReference.layer
    monkeypatch.setattr(
        FloatReference, "layer", lambda self, index: built.append(index) or original(self, index)
    )
    weights = families.weights_of("llama", families.oracle("llama"))
    moments = LayerMoments(weights, dict.fromkeys(matrix_slots(weights.config)[1:], False), TEXTS)
    steps = []
    for slot in matrix_slots(weights.config)[1:]:
        moments[slot]
        steps.append(len(built))
    assert steps == [1, 1, 1, 1, 2, 2, 2, 2, 2]


def tokenizer_of(byte_level_bpe: Any, **changes: Any) -> TokenizerFiles:
    values = {"chat_template": None, "bos_id": 1, "add_bos": False, "eos_ids": (0,), "vocab_size": 320}
    return TokenizerFiles(byte_level_bpe.to_str(), **{**values, **changes})


def test_the_calibration_text_comes_in_segments_with_a_bos_where_the_model_wants_one(
    byte_level_bpe: Any,
) -> None:
    plain = calibration_tokens(tokenizer_of(byte_level_bpe), 100)
    assert [len(part) for part in plain] == [100] * 20 + [48]
    begun = calibration_tokens(tokenizer_of(byte_level_bpe, add_bos=True), 100)
    assert all(part[0] == 1 and len(part) <= 100 for part in begun)
    np.testing.assert_array_equal(np.concatenate([part[1:] for part in begun]), np.concatenate(plain))


class Stored(families.StateCheckpoint):
    """Says that every matrix is stored in blocks of one ggml type, all of whose values are zero."""

    def raw(self, name: str) -> RawBlocks:
        N, K = self.state[name].shape
        return RawBlocks("Q4_0", (N, K), np.zeros((N, K // 32 * 18), np.uint8))


@pytest.mark.parametrize(
    ("scheme", "carried"), [(GPTQ, True), (MSE, True), (BlockInt(4, 64, method="mse"), False)], ids=str
)
def test_carried_slots_need_no_calibration(scheme: BlockInt, carried: bool, byte_level_bpe: Any) -> None:
    plain = families.checkpoint_of("llama", families.oracle("llama", vocab_size=320))
    moments = calibrate(
        SlotWeights(Stored(plain.config, plain.state)),
        Recipe("r", scheme, Float(), Float()),
        tokenizer_of(byte_level_bpe),
        64,
    )
    assert (len(moments) == 0) == carried


def output_errors(model: Any, packed: Mapping[str, np.ndarray], weights: SlotWeights) -> dict[str, float]:
    """Mean squared error of each product over the texts, relative to the product."""
    moments = oracle_moments(model)

    def energy(slot: str, matrix: np.ndarray) -> float:
        return float(np.einsum("nk,kl,nl->", matrix, moments[slot], matrix))

    return {
        slot: energy(slot, weights.matrix(slot) - values) / energy(slot, weights.matrix(slot))
        for slot, values in packed.items()
    }


def exported(
    weights: SlotWeights, scheme: BlockInt, stats: Any, folder: Path
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The weights that an export writes for the layers, and the slots that it calls calibrated."""
    recipe, kept = Recipe("r", scheme, Float(), Float()), list[np.ndarray]()

    def keep(weight: np.ndarray, *given: Any, **options: Any) -> Any:
        packed = pack(weight, *given, **options)
        kept.append(unpack(packed))
        return packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.export.bind.pack", keep)
        report = export_graph(
            weights.config, weights, recipe, path=folder / "graph.onnx", max_context=64, stats=stats
        )
    written = dict(zip(matrix_slots(weights.config), kept, strict=False))  # a tied head is not packed
    layers = {slot: values for slot, values in written.items() if slot.startswith("layers.")}
    return layers, [slot.slot for slot in report.slots if slot.reason == "quantized; calibrated"]


def test_an_export_with_moments_computes_closer_products(tmp_path: Path) -> None:
    model = families.oracle("smollm")
    weights = families.weights_of("smollm", model)
    layers = [slot for slot in matrix_slots(weights.config) if slot.startswith("layers.")]
    mean = {}
    for name, scheme in (("plain", MSE), ("weighed", MSE), ("gptq", GPTQ)):
        needed = dict.fromkeys(layers, scheme is GPTQ)
        stats = None if name == "plain" else LayerMoments(weights, needed, TEXTS)
        packed, calibrated = exported(weights, scheme, stats, tmp_path)
        assert calibrated == ([] if name == "plain" else layers)
        mean[name] = np.mean(list(output_errors(model, packed, weights).values()))
    assert mean["gptq"] < 0.8 * mean["weighed"]
    assert mean["weighed"] < mean["plain"]


def test_gptq_of_a_wide_slot_and_of_an_embedding_gives_way_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_level_bpe: Any
) -> None:
    monkeypatch.setattr("outrider.quantize.calibration.GPTQ_INPUTS", 64)  # `down` reads 96
    weights = families.weights_of("llama", families.oracle("llama", vocab_size=320))
    recipe = Recipe("r", GPTQ, GPTQ, GPTQ)
    stats = calibrate(weights, recipe, tokenizer_of(byte_level_bpe), 64)
    report = export_graph(
        weights.config, weights, recipe, path=tmp_path / "graph.onnx", max_context=64, stats=stats
    )
    for slot in report.slots:
        wide = slot.slot == "embedding" or slot_shape(weights.config, slot.slot)[1] > 64
        assert slot.after == ("int4-b32-mse" if wide else "int4-b32-gptq"), slot.slot
        assert ("gptq takes no embedding" in slot.reason) == wide
        assert ("calibrated" in slot.reason) == (slot.slot != "embedding")


@pytest.fixture(scope="module")
def tiny(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), layers=1, vocab=320, seed=0)


def test_int4_gptq_exports_a_bundle_from_a_folder(tiny: Path, tmp_path: Path) -> None:
    options = ExportOptions(
        RoleOptions(str(tiny), "int4-gptq"), tmp_path / "bundle", max_context=64, evaluate=False
    )
    report = export_bundle(options)
    (lowered,) = report.graphs["target"].values()
    by_slot = {slot.slot: slot for slot in lowered.slots}
    linear = [slot for name, slot in by_slot.items() if name.startswith("layers.")]
    assert {slot.after.split("-")[2] for slot in linear} == {"gptq"}
    assert all(slot.reason == "quantized; calibrated" for slot in linear)
    assert by_slot["head"].reason == "quantized"


def test_the_bundle_names_the_end_token_that_the_model_declares(tiny: Path, tmp_path: Path) -> None:
    declared = json.loads((tiny / "tokenizer_config.json").read_text())["eos_token"]
    options = ExportOptions(
        RoleOptions(str(tiny), "fp32"), tmp_path / "bundle", max_context=64, evaluate=False
    )
    export_bundle(options)
    assert read_manifest(tmp_path / "bundle").tokenizer.eos_token == declared
    with open_checkpoint(tiny) as checkpoint:
        assert checkpoint.tokenizer.eos_token == declared


def test_recipes_that_round_to_nearest_run_no_layer(tiny: Path) -> None:
    with open_checkpoint(tiny) as checkpoint:
        for name in ("fp32", "int8", "int4-hqq", "carry"):
            moments = calibrate(SlotWeights(checkpoint), get_recipe(name), checkpoint.tokenizer, 64)
            assert len(moments) == 0, name
