"""Lowering for the Hexagon NPU: what the files hold, what keeps 16 bits accurate, and compiled contexts.

Parity of further families, trees and rollback is in `test_qnn_backend.py`.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections import Counter
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import outrider.export.npu_scales as npu_scales
from outrider.errors import ExportError, MissingExtraError, UsageError
from outrider.export.lowered import Lowered
from outrider.export.npu import export_npu
from outrider.export.npu_context import compile_contexts
from outrider.export.npu_embedding import extremes, write_embedding
from outrider.export.npu_graph import lay_out
from outrider.export.npu_scales import HIDDEN, Scale, choose_scales, top_of
from outrider.quantize.npu_recipes import (
    NPU_RECIPES,
    NpuRecipe,
    get_npu_recipe,
    parse_npu_overrides,
    with_npu_overrides,
)
from outrider.quantize.ranges import Range
from outrider.targets.npu_host import EmbeddingTable
from outrider.targets.qnn import NpuGraph
from outrider.targets.qnn_plugin import binary_of, compiled_for, has_emulator, soc_of
from tests import families

emulated = pytest.mark.skipif(
    not has_emulator() or importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="the emulator is in the x86-64 wheel of onnxruntime-qnn only",
)
TEXTS = np.random.default_rng(0).integers(1, families.VOCAB, (32, 60)).tolist()
WIDTHS = (1, 2, 8)
NEAR = 0.1  # in logits of standard deviation 0.8: what 8-bit weights and 16-bit activations cost


def lower(
    model: Any, place: Path, recipe: str | NpuRecipe = "a16w8", family: str = "llama", **options: Any
) -> Lowered:
    weights = families.weights_of(family, model)
    chosen = get_npu_recipe(recipe) if isinstance(recipe, str) else recipe
    wanted = {"max_context": families.CONTEXT, "widths": WIDTHS, "calibration": TEXTS, **options}
    return export_npu(weights.config, weights, chosen, place, **wanted)


def opened(lowered: Lowered, execution: Any = "cpu") -> NpuGraph:
    described = {**lowered.meta, "functions": dict(lowered.functions)}
    return NpuGraph.load(
        lowered.files[0], described, embedding=lowered.embedding_file, execution=execution, threads=1
    )


def logits_of(graph: NpuGraph, tokens: list[int]) -> np.ndarray:
    """Teacher-forced, in forwards of 8, so that the second one reads what the first left in the cache."""
    graph.truncate(0)
    rows = []
    for start in range(0, len(tokens), 8):
        part = tokens[start : start + 8]
        rows.append(graph.forward(part).logits.copy())
        graph.commit(range(len(part)))
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lower(families.oracle("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "phi3"])
def test_bias_softcap_and_partial_rotation_come_through(family: str, tmp_path: Path) -> None:
    model = families.oracle(family)
    if family == "qwen2":  # biases of keys are the largest numbers in a Qwen2 layer
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.bias.normal_().mul_(8)
    graph = opened(lower(model, tmp_path, family=family))
    tokens = TEXTS[0][:20]
    wrong = np.abs(logits_of(graph, tokens) - families.reference_logits(model, tokens))
    assert wrong.max() < 2 * NEAR  # one of 1,920 may be further off than NEAR
    assert wrong.mean() < NEAR / 4


@emulated
def test_the_emulated_npu_computes_what_the_cpu_does_at_eight_and_at_four_bits(
    llama: Lowered, tmp_path: Path
) -> None:
    """Norms over heads included: behind a transposition, the compiler of plugin 2.7 gets them wrong."""
    four = replace(get_npu_recipe("a16w4"), max_damage=None)
    qwen3 = lower(families.oracle("qwen3"), tmp_path, four, "qwen3")
    assert "int4-b16" in {slot.after for slot in qwen3.slots}
    for lowered in (llama, qwen3):
        tokens = TEXTS[1][:12]
        on_cpu = logits_of(opened(lowered), tokens)
        emulated_rows = logits_of(opened(lowered, "emulator"), tokens)
        np.testing.assert_allclose(emulated_rows, on_cpu, atol=0.02, rtol=0)


def test_every_second_operand_of_a_product_of_activations_is_int16(llama: Lowered) -> None:
    """The compiler would silently multiply with 8 bits of a uint16 one."""
    model = onnx.load(str(llama.files[0]), load_external_data=False)
    made_by = {output: node for node in model.graph.node for output in node.output}
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    assert len(products) == 4 * 2
    for node in products:
        assert kinds[made_by[node.input[1]].input[2]] == onnx.TensorProto.INT16


def test_inputs_and_outputs_are_integers_of_static_shape_with_one_scale_for_past_and_present(
    llama: Lowered,
) -> None:
    model = onnx.load(str(llama.files[1]), load_external_data=False)
    onnx.checker.check_model(str(llama.files[1]))
    types = {v.name: v.type.tensor_type for v in (*model.graph.input, *model.graph.output)}
    assert types.pop("rows").elem_type == onnx.TensorProto.INT32
    named = {"uint16": onnx.TensorProto.UINT16, "int16": onnx.TensorProto.INT16}
    assert {n: t.elem_type for n, t in types.items()} == {
        n: named[k] for n, k in llama.meta["dtypes"].items()
    }
    assert all(dim.dim_value > 0 for kind in types.values() for dim in kind.shape.dim)
    for name in (f"{part}_{layer}" for layer in range(2) for part in ("key", "value")):
        assert llama.meta["scales"][f"past_{name}"] == llama.meta["scales"][f"present_{name}"]
        assert llama.meta["dtypes"][f"past_{name}"] == "int16"
        assert llama.meta["scales"][f"past_{name}"][1] == 0


def test_all_widths_read_one_data_file_in_which_every_weight_lies_once(
    llama: Lowered, tmp_path: Path
) -> None:
    narrow = lower(families.oracle("llama"), tmp_path, widths=(1,))
    sizes = [lowered.files[-2].stat().st_size for lowered in (narrow, llama)]
    assert sizes[1] < 1.02 * sizes[0]
    for path in llama.files[:3]:
        external = [
            t for t in onnx.load(str(path), load_external_data=False).graph.initializer if t.external_data
        ]
        places = {entry.value for t in external for entry in t.external_data if entry.key == "location"}
        assert places == {"weights.data"}


def with_a_sink(size: float) -> Any:
    """A llama in which token 5, and no other, drives one neuron of layer 0, and with it one channel, far out."""
    model = families.oracle("llama")
    first = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[5, 0] = 10 * model.model.embed_tokens.weight.abs().max()
        first.self_attn.o_proj.weight[0] = 0
        for weight in (first.mlp.gate_proj.weight, first.mlp.up_proj.weight):
            weight[3] = 0
            weight[3, 0] = 4
        first.mlp.down_proj.weight[0] = 0
        first.mlp.down_proj.weight[0, 3] = size
    return model


SINK = [5, *(token if token != 5 else 6 for token in TEXTS[2][:19])]
SINK_TEXTS = [[5, *(token if token != 5 else 6 for token in text[1:])] for text in TEXTS]


@pytest.mark.parametrize("execution", ["cpu", pytest.param("emulator", marks=emulated)])
def test_an_attention_sink_costs_the_other_tokens_no_accuracy(tmp_path: Path, execution: str) -> None:
    model = with_a_sink(60)
    lowered = lower(model, tmp_path, calibration=SINK_TEXTS)
    assert lowered.notes["massive"] == ["layers.0.down"]
    assert {slot.slot for slot in lowered.slots if slot.after == "fp16"} == {"layers.0.down"}
    found = logits_of(opened(lowered, execution), SINK)
    np.testing.assert_allclose(found, families.reference_logits(model, SINK), atol=NEAR, rtol=0)


def test_without_half_precision_an_attention_sink_would_drown_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_a_sink(60)
    monkeypatch.setattr(npu_scales, "COARSE", np.inf)
    lowered = lower(model, tmp_path, calibration=SINK_TEXTS)
    assert lowered.notes["massive"] == []
    found = logits_of(opened(lowered), SINK)
    assert np.abs(found - families.reference_logits(model, SINK)).max() > 2 * NEAR


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=emulated)])
def test_a_residual_stream_beyond_half_precision_is_shrunk(family: str, tmp_path: Path) -> None:
    """All that enters the stream is 30,000 times larger; norms take that out again, but not an infinity."""
    model = families.oracle(family)
    with torch.no_grad():
        if family == "llama":
            model.model.embed_tokens.weight.mul_(3e4)
        for layer in model.model.layers:
            if family == "llama":
                layer.self_attn.o_proj.weight.mul_(3e4)
                layer.mlp.down_proj.weight.mul_(3e4)
            else:
                layer.post_attention_layernorm.weight.add_(1).mul_(3e4).sub_(1)
                layer.post_feedforward_layernorm.weight.add_(1).mul_(3e4).sub_(1)
    lowered = lower(model, tmp_path, family=family)
    assert 2**-12 < lowered.notes["stream"] < 1
    tokens = TEXTS[3][:12]
    execution = "emulator" if has_emulator() and importlib.util.find_spec("onnxruntime_qnn") else "cpu"
    found = logits_of(opened(lowered, execution), tokens)
    np.testing.assert_allclose(found, families.reference_logits(model, tokens), atol=1.5 * NEAR, rtol=0)


def test_the_mask_hides_any_score_and_takes_no_more_of_the_scale_than_that() -> None:
    weights = families.weights_of("llama", families.oracle("llama"))
    graph = lay_out(weights.config, weights, max_context=32, width=2, rows=2)
    ranges = {name: Range(-1.0, 1.0) for name in graph.activations()}
    for name, scores in graph.masked.items():
        ranges[scores], ranges[top_of(name)] = Range(-300.0, 40.0), Range(3.0, 40.0)
    scales, masked = choose_scales(graph, ranges)
    for name in graph.masked:
        lowest = -scales[name].zero_point * scales[name].scale
        assert 40.0 + masked <= lowest + 0.01  # the largest score of all, masked, is as low as a code can be
        assert np.exp(lowest - 3.0) < 1e-8  # and weighs nothing beside the lowest row maximum
        assert scales[name].scale < 1.1 * (40.0 + HIDDEN) / 65535 * 1.05


def test_scales_cover_zero_and_round_to_the_nearest_code() -> None:
    scale = Scale.of_range(2.0, 6.0)
    assert scale.zero_point == 0
    assert scale.encode(np.array([0.0, 6.0, 9.0])).tolist() == [0, 65535, 65535]
    signed = Scale.of_range(-3.0, 1.0, signed=True)
    assert signed.zero_point == 0
    assert signed.encode(np.array([-3.0, 0.0])).tolist() == [-32767, 0]
    with pytest.raises(ExportError, match="scale of nan"):
        Scale(float("nan"), 0)


def test_every_slot_is_reported_once_with_its_bits(tmp_path: Path) -> None:
    recipe = replace(get_npu_recipe("a16w4"), max_damage=None)
    recipe = with_npu_overrides(recipe, parse_npu_overrides("layers.1.*=int8"))
    lowered = lower(families.oracle("llama"), tmp_path, recipe)
    assert Counter(slot.after for slot in lowered.slots) == {
        "int8-b32": 1,  # the embedding
        "int4-b16": 4,
        "int8-channel": 4 + 1,  # the second layer, and the head
    }
    assert len({slot.slot for slot in lowered.slots}) == len(lowered.slots)
    by_slot = {slot.slot: slot for slot in lowered.slots}
    assert by_slot["layers.0.down"].bytes_after < 0.6 * by_slot["layers.1.down"].bytes_after


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (0.0, [f"layers.{n}.{part}" for n in range(2) for part in ("qkv", "attn_out", "gate_up", "down")]),
        (99.0, []),
    ],
)
def test_slots_keep_eight_bits_until_what_the_others_cost_is_within_the_limit(
    limit: float, kept: list[str], tmp_path: Path
) -> None:
    recipe = replace(get_npu_recipe("a16w4"), max_damage=limit)
    lowered = lower(families.oracle("llama"), tmp_path, recipe, widths=(1,))
    assert lowered.notes["overrides"] == dict.fromkeys(kept, 8)
    assert {slot.slot for slot in lowered.slots if slot.after == "int8-channel"} == {*kept, "head"}


def test_a_slot_that_the_user_decided_on_is_left_to_him(tmp_path: Path) -> None:
    recipe = replace(get_npu_recipe("a16w4"), max_damage=0.0, overrides=(("layers.0.*", 4),))
    lowered = lower(families.oracle("qwen2"), tmp_path, recipe, "qwen2", widths=(1,))
    after = {slot.slot: slot.after for slot in lowered.slots}
    assert after["layers.0.qkv"] == "int4-channel"  # its product has a bias, so it takes no blocks
    assert after["layers.0.down"] == "int4-b16"
    assert after["layers.1.down"] == "int8-channel"


def test_recipes_refuse_what_an_npu_does_not_have() -> None:
    assert NPU_RECIPES["a16w4"].bits_for("head") == 8
    assert NPU_RECIPES["a16w4"].bits_for("layers.0.qkv") == 4
    with pytest.raises(UsageError, match=r"unknown NPU precision 'a16w5'; known: a16w8, a16w4"):
        get_npu_recipe("a16w5")
    with pytest.raises(UsageError, match="3-bit"):
        NpuRecipe("tiny", 3)
    with pytest.raises(UsageError, match="method is 'hqq'"):
        NpuRecipe("other", 8, method="hqq")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"'head=fp16' is not pattern=int4"):
        parse_npu_overrides("layers.*.qkv=int8, head=fp16")


def test_too_little_text_to_calibrate_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 12 tokens; ranges need at least 64"):
        lower(families.oracle("llama"), tmp_path, calibration=[[1, 2, 3, 4]] * 3)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_of_the_embedding_come_back_scaled_within_half_a_step(family: str, tmp_path: Path) -> None:
    weights = families.weights_of(family, families.oracle(family))
    table, meta, report = write_embedding(weights.config, weights, tmp_path / "embedding.i8")
    exact = weights.matrix("embedding") * np.float32(weights.config.embedding_scale)
    again = EmbeddingTable(tmp_path / "embedding.i8", meta).rows(np.arange(len(exact)))
    steps = np.abs(exact.reshape(len(exact), -1, meta["block"])).max(axis=2) / 127
    wrong = np.abs(again - exact).reshape(len(exact), -1, meta["block"]).max(axis=2)
    assert (wrong <= 0.51 * steps + 1e-6).all()
    assert extremes(table) == (again.min(), again.max())
    assert 0 < report.relative_error < 0.01


@emulated
def test_the_widths_of_a_device_share_one_binary_that_was_compiled_for_it(
    llama: Lowered, tmp_path: Path
) -> None:
    place = llama.files[0].parent
    devices = ["snapdragon-8-gen3", "snapdragon-x-elite"]
    told: list[tuple[str, int, int]] = []
    contexts = compile_contexts(place, llama.functions, devices, lambda *step: told.append(step))
    assert [step[1:] for step in told] == [(n, 6) for n in range(1, 7)]
    assert len(contexts.files) == 2 * (3 + 1)
    assert all(path.is_file() for path in contexts.files)
    for slug in devices:
        models = [place / contexts.models[slug][str(width)] for width in WIDTHS]
        assert {compiled_for(path) for path in models} == {soc_of(slug)}
        assert {binary_of(path) for path in models} == set(contexts.notes[slug]["binaries"])
        assert contexts.notes[slug]["shared"]


@emulated
def test_what_qnn_does_not_take_is_an_error_with_its_reason(llama: Lowered, tmp_path: Path) -> None:
    place = llama.files[0].parent
    model = onnx.load(str(place / "w1.onnx"))
    for node in model.graph.node:
        if node.op_type == "Softmax":
            node.op_type = "Hardmax"
    onnx.save(model, tmp_path / "w1.onnx")
    with pytest.raises(ExportError, match=r"QNN cannot compile w1.onnx for soc_model 57, htp_arch 75: .*CPU"):
        compile_contexts(tmp_path, {"1": "w1.onnx"}, ["snapdragon-8-gen3"])


@emulated
def test_a_binary_that_cannot_be_written_whole_is_an_error_that_speaks_of_the_disk(
    llama: Lowered, tmp_path: Path
) -> None:
    """A limit on the size of files cuts a write off where a full disk would."""
    resource = pytest.importorskip("resource", reason="this system has no limits of that kind")
    for path in llama.files:
        shutil.copy(path, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(ExportError, match=r"(?s)write.*Its disk may be full .*MB are free"):
            compile_contexts(tmp_path, {"1": "w1.onnx"}, ["snapdragon-8-gen3"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_contexts_of_unknown_devices_or_without_the_wheel_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"'iphone-16-pro' has no Hexagon NPU.*snapdragon-8-gen3 \(57, 75\)"):
        compile_contexts(tmp_path, {"1": "w1.onnx"}, ["iphone-16-pro"])

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'outrider\[qnn\]'"):
        compile_contexts(tmp_path, {"1": "w1.onnx"}, ["snapdragon-8-gen3"])
