"""What an export writes: structure, files, reports, and the arithmetic of every scheme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch

from outrider.errors import ExportError, UsageError
from outrider.export.onnx import export_graph
from outrider.export.slots import SlotWeights, matrix_slots
from outrider.quantize.pack import pack, unpack
from outrider.quantize.schemes import BlockInt, DynamicInt8, Float, PackedMatrix, RawBlocks, Recipe
from outrider.targets.onnxruntime import OnnxGraph
from tests import families
from tests.test_decoder import EagerGraph

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("traced_once")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


class Rounded(SlotWeights):
    """The weights that a recipe leaves, for an eager decoder to compute with."""

    def __init__(self, weights: SlotWeights, recipe: Recipe) -> None:
        self.config, self._weights, self._recipe = weights.config, weights, recipe

    def matrix(self, slot: str) -> np.ndarray:
        scheme = self._recipe.scheme_for(slot)
        return unpack(pack(self._weights.matrix(slot), scheme, raw=self._weights.raw(slot)))

    def bias(self, slot: str) -> np.ndarray | None:
        return self._weights.bias(slot)

    def vector(self, slot: str) -> np.ndarray:
        return self._weights.vector(slot)


def weights(family: str, **changes: Any) -> SlotWeights:
    return families.weights_of(family, families.oracle(family, **changes))


def export(slots: SlotWeights, recipe: Recipe, path: Path, profile: Any = "inplace", **options: Any) -> Any:
    return export_graph(
        slots.config, slots, recipe, profile, path / "graph.onnx", max_context=64, widths=(8,), **options
    )


def logits(report: Any, tokens: Sequence[int] = TOKENS) -> np.ndarray:
    return OnnxGraph.load(report.path, report.meta, threads=1).forward(tokens).logits


def blocks(bits: Any, block: int = 32, **options: Any) -> BlockInt:
    return BlockInt(bits, block, accuracy_level=1, **options)


SCHEMES = {
    "4-bit": Recipe("r", blocks(4), blocks(8), blocks(8)),
    "4-bit asymmetric": Recipe(
        "r", blocks(4, symmetric=False), blocks(4, symmetric=False), blocks(8, symmetric=False)
    ),
    "4-bit embedding": Recipe("r", blocks(4, 16), blocks(4, 64), blocks(4, 16, symmetric=False)),
    "ragged blocks": Recipe("r", blocks(4, 128), blocks(8, 128), blocks(8, 128)),
    "float16": Recipe("r", Float("float16"), Float("float16"), Float("float16")),
    "mixed": Recipe(
        "r", blocks(4), Float(), Float(), (("layers.1.*", Float("float16")), ("*.down", blocks(8)))
    ),
}


@pytest.mark.parametrize("profile", ["inplace", "split"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("recipe", SCHEMES.values(), ids=SCHEMES)
def test_a_bound_graph_computes_what_the_rounded_weights_compute(
    recipe: Recipe, family: str, profile: str, tmp_path: Path
) -> None:
    slots = weights(family)
    shared = (
        replace(recipe, embedding=recipe.head) if family == "qwen2" and recipe.head == blocks(8) else recipe
    )
    expected = EagerGraph(Rounded(slots, shared)).forward(TOKENS).logits
    found = logits(export(slots, recipe, tmp_path, profile))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def test_zero_points_that_are_said_change_no_logit_and_every_4_bit_product_has_them(tmp_path: Path) -> None:
    """Arm's kernels for symmetric 4-bit blocks round activations by row, those with zero points by block."""
    slots, recipe = weights("llama"), Recipe("r", BlockInt(4, 64), BlockInt(8, 32), BlockInt(8, 32))
    found = []
    for said in (False, True):
        report = export(slots, recipe, tmp_path, said_zeros=said)
        found.append(logits(report))
        products = [node for node in onnx.load(report.path).graph.node if node.op_type == "MatMulNBits"]
        bits = {node.name: next(a.i for a in node.attribute if a.name == "bits") for node in products}
        with_zeros = [node.name for node in products if len(node.input) > 3 and node.input[3]]
        assert with_zeros == [name for name, n in bits.items() if said and n == 4]
    np.testing.assert_allclose(found[1], found[0], atol=1e-4 * np.abs(found[0]).max())


def test_dynamic_int8_is_close_to_the_float_weights(tmp_path: Path) -> None:
    slots = weights("qwen2")
    report = export(slots, Recipe("r", DynamicInt8(), DynamicInt8(), Float()), tmp_path)
    expected = EagerGraph(slots).forward(TOKENS).logits
    error = np.linalg.norm(logits(report) - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 0.05
    assert report.operators["DynamicQuantizeMatMul"] == 2 * 4 + 1


@pytest.mark.parametrize(("family", "bits"), [("llama", 4), ("llama", 8), ("smollm", 8)])
def test_minima_are_carried_by_zero_points_and_sums_of_the_inputs_blocks(
    family: str, bits: Literal[4, 8], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    corrections: list[np.ndarray] = []

    def with_correction(weight: np.ndarray, scheme: Any, **options: Any) -> PackedMatrix:
        packed = pack(weight, scheme)
        assert packed.scales is not None
        corrections.append(packed.scales * rng.uniform(-4, 4, packed.scales.shape).astype(np.float32))
        return replace(packed, correction=corrections[-1])

    class Corrected(Rounded):
        def matrix(self, slot: str) -> np.ndarray:
            rounded = super().matrix(slot)
            return rounded + np.repeat(made[slot], 32, axis=1)[:, : rounded.shape[1]]

    monkeypatch.setattr("outrider.export.bind.pack", with_correction)
    slots = weights(
        family, num_hidden_layers=1
    )  # the head of smollm is tied, and has minima in a form of its own
    recipe = Recipe("r", blocks(bits), blocks(bits), blocks(8))
    report = export(slots, recipe, tmp_path)
    for node in onnx.load(report.path, load_external_data=False).graph.node:
        sizes = {attribute.name: attribute.i for attribute in node.attribute}
        assert node.op_type != "MatMulNBits" or sizes["K"] % sizes["block_size"] == 0, (
            "as Arm's kernels want it"
        )
    made = dict(zip([slot.slot for slot in report.slots], corrections, strict=True))
    expected = EagerGraph(Corrected(slots, recipe)).forward(TOKENS).logits
    plain = EagerGraph(Rounded(slots, recipe)).forward(TOKENS).logits
    missed, error = np.abs(plain - expected).max(), np.abs(logits(report) - expected).max()
    assert error < 0.03 * missed, (error, missed)
    last = OnnxGraph.load(report.path, report.meta, threads=1).forward(TOKENS, logits="last").logits
    np.testing.assert_allclose(
        last, logits(report)[-1:], atol=1e-5
    )  # a head that reads fewer rows than there are


def test_an_8_bit_tied_head_and_embedding_share_one_set_of_bytes(tmp_path: Path) -> None:
    slots = weights("smollm")
    report = export(slots, Recipe("r", blocks(4), blocks(8), blocks(8, 16)), tmp_path)
    model = onnx.load(report.path, load_external_data=False)
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}.get("offset")
        for tensor in model.graph.initializer
    }
    head = next(
        node for node in model.graph.node if node.op_type == "MatMulNBits" and node.output[0] == "logits"
    )
    lookup = next(node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    assert places[head.input[1]] == places[lookup.input[0]] is not None
    assert head.input[2] == lookup.input[2]
    by_slot = {slot.slot: slot for slot in report.slots}
    assert by_slot["head"].bytes_after == 0
    assert report.gathered_bytes == 0, "the head streams them"
    assert "shares" in by_slot["head"].reason


def test_a_tied_head_that_is_stored_apart_counts_its_source_once(tmp_path: Path) -> None:
    report = export(weights("smollm"), Recipe("r", blocks(4), blocks(4), blocks(8)), tmp_path)
    by_slot = {slot.slot: slot for slot in report.slots}
    assert by_slot["embedding"].bytes_before > 0 == by_slot["head"].bytes_before
    assert by_slot["head"].bytes_after > 0


def test_no_float_matrix_is_left_in_a_quantized_graph(tmp_path: Path) -> None:
    for family in ("smollm", "qwen2", "gemma3"):
        slots = weights(family)
        report = export(slots, Recipe("r", blocks(4), blocks(8), blocks(8)), tmp_path)
        model = onnx.load(report.path, load_external_data=False)
        floats = [
            t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 2
        ]
        scales = [t for t in floats if t.name.endswith(".scales") or t.name.startswith("rope.")]
        assert [t.name for t in floats if t not in scales] == []
        assert "MatMul" not in report.operators


def test_the_report_accounts_for_every_slot_and_the_checker_passes(tmp_path: Path) -> None:
    slots = weights("llama")
    report = export(slots, Recipe("r", blocks(4), blocks(8), blocks(8)), tmp_path)
    onnx.checker.check_model(str(report.path))
    assert [slot.slot for slot in report.slots] == matrix_slots(slots.config)
    for slot in report.slots:
        assert 0 < slot.bytes_after < slot.bytes_before
        assert 0 < slot.relative_error < 0.2
        assert not slot.carried
    assert sum(slot.bytes_after for slot in report.slots) <= report.data_path.stat().st_size
    sizes = {slot.slot: slot.shape[0] * slot.shape[1] for slot in report.slots}
    assert 0 < report.gathered_bytes < report.data_path.stat().st_size
    assert report.weights == sum(sizes.values()) - sizes["embedding"]


def test_a_decode_step_takes_few_nodes(tmp_path: Path) -> None:
    slots = weights("smollm", num_hidden_layers=4)
    report = export(slots, Recipe("r", blocks(4), blocks(8), blocks(8)), tmp_path)
    assert sum(report.operators.values()) <= 12 * 4 + 12
    assert report.operators["GroupQueryAttention"] == 4


def test_large_tensors_start_on_pages_and_nothing_names_this_machine(tmp_path: Path) -> None:
    slots = weights("smollm")
    report = export(slots, Recipe("r", Float(), Float(), Float()), tmp_path)
    model = onnx.load(report.path, load_external_data=False)
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if int(place.get("length", 0)) >= 4096:
            assert int(place["offset"]) % 4096 == 0, tensor.name
    content = report.path.read_bytes()
    assert b"/outrider/" not in content
    assert b"stack_trace" not in content


class Counting(families.StateCheckpoint):
    """Notes how many tensors are asked for between two packings."""

    def raw(self, name: str) -> RawBlocks | None:
        self.asked = [*getattr(self, "asked", []), name]
        return None


def test_weights_are_read_one_slot_at_a_time_in_the_order_of_the_graph(tmp_path: Path) -> None:
    model = families.oracle("llama")
    plain = families.checkpoint_of("llama", model)
    checkpoint = Counting(plain.config, plain.state)
    seen: list[tuple[str, int, int]] = []
    report = export(
        SlotWeights(checkpoint),
        Recipe("r", blocks(4), blocks(8), blocks(8)),
        tmp_path,
        progress=lambda *step: seen.append(step),
    )
    slots = [slot.slot for slot in report.slots]
    assert seen == [(slot, i + 1, len(slots)) for i, slot in enumerate(slots)]
    parts = [f"{stem}.weight" for slot in slots for stem in SlotWeights(checkpoint).parts(slot)]
    assert checkpoint.asked == parts


def test_requests_that_cannot_be_honoured_are_refused(tmp_path: Path) -> None:
    slots = weights("llama")
    recipe = Recipe("r", Float(), Float(), Float())
    with pytest.raises(UsageError, match="known ONNX profiles: inplace, split"):
        export(slots, recipe, tmp_path, "state")
    with pytest.raises(UsageError, match="at least one positive width"):
        export_graph(slots.config, slots, recipe, "split", tmp_path / "g.onnx", max_context=64)
    with pytest.raises(UsageError, match="positions for 2 to 128"):
        export_graph(slots.config, slots, recipe, "inplace", tmp_path / "g.onnx", max_context=4096)
    with pytest.raises(UsageError, match=r"hidden layers \[7\]"):
        export(slots, recipe, tmp_path, hidden_layers=(0, 7))
    with pytest.raises(ExportError, match="embedding cannot be DynamicInt8"):
        export(slots, Recipe("r", Float(), Float(), DynamicInt8()), tmp_path)
    assert not (tmp_path / "g.onnx").exists()
