"""ExecuTorch export: parity of the families, what is quantized and carried, and traps that would go unseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("executorch", reason="executorch is not installed")

from outrider.errors import ExportError, UsageError
from outrider.export.decoder import Decoder, Layer, Step
from outrider.export.executorch import export_pte
from outrider.export.executorch_buffer import Middle
from outrider.export.executorch_delegates import Inputs, Template
from outrider.export.executorch_lower import (
    delegate_of,
    quiet,
    to_edge,
    trace,
    vendor_partitioner,
    write_program,
)
from outrider.export.executorch_parts import ExecutorchPrimitives, QuantizedEmbedding
from outrider.export.rope import rope_tables
from outrider.export.slots import SlotWeights
from outrider.quantize.executorch import (
    EXECUTORCH_RECIPES,
    ExecutorchRecipe,
    IntxScheme,
    carry_slot,
    check_quantized,
    dequantize,
    describe_slot,
    executorch_recipe,
    quantize,
)
from outrider.quantize.schemes import RawBlocks
from outrider.runtime.proof import row_independence
from outrider.targets.executorch import ExecutorchGraph
from tests import families
from tests.pte import tiny_pte

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # torchao and executorch warn about themselves when imported
GROUPS, ROWS = IntxScheme(4, 32, "mse"), IntxScheme(8)
RECIPE = EXECUTORCH_RECIPES["8da4w"]


def graph_of(family: str, precision: str = "fp32", **options: Any) -> ExecutorchGraph:
    made = tiny_pte(family, precision, **options)
    return ExecutorchGraph.load(made.path, made.meta, threads=1, runtime="torch")


def tiny_weights(family: str = "llama", **changes: Any) -> SlotWeights:
    return families.weights_of(family, families.oracle(family, **changes))


def random_weight(rows: int = 24, columns: int = 128, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def raw_blocks(weight: np.ndarray, kind: str) -> tuple[RawBlocks, np.ndarray]:
    """A weight as GGUF stores it (by the `gguf` package), and the values that it then has."""
    stored = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(weight, stored)
    return RawBlocks(kind, weight.shape, data), gguf.quants.dequantize(data, stored)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_biases_and_head_norms_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = families.oracle(family, num_hidden_layers=1)
    weights = families.weights_of(family, model)
    made = export_pte(
        weights.config, weights, executorch_recipe("fp32"), tmp_path, max_context=64, widths=(16,)
    )
    graph = ExecutorchGraph.load(made.files[0], made.meta, threads=1, runtime="torch")
    families.check_decoding(graph, lambda ids: families.reference_logits(model, ids), 1e-4)


def test_two_masks_a_window_and_the_tanh_form_of_gelu_are_those_of_transformers() -> None:
    model = tiny_pte("gemma3").model
    families.check_decoding(graph_of("gemma3"), lambda ids: families.reference_logits(model, ids), 1e-4)


def test_everything_but_lookups_and_cache_writes_runs_in_one_delegate_a_layer_and_two_more() -> None:
    made = tiny_pte("llama", "8da4w")
    report = made.notes["delegation"]["forward"]
    assert report["delegates"] == 2 + 2
    assert report["products"] == 2 * 7 + 1
    assert report["left"] == {
        "aten.index_put_": 4,
        "aten.index_select": 3,
        "aten.squeeze_copy": 1,
        "aten.unsqueeze_copy": 2,
        "quantized_decomposed.embedding_byte": 1,
    }


def eager_logits(weights: SlotWeights, recipe: ExecutorchRecipe, tokens: Sequence[int]) -> np.ndarray:
    """The same quantized decoder in torch, which rounds activations and weights as the delegate should."""
    config, S = weights.config, len(tokens)
    with torch.no_grad():
        decoder = Decoder(config, ExecutorchPrimitives(weights, recipe, pieces=False))
        cos, sin = map(torch.from_numpy, rope_tables(config, "full", S))
        mask = torch.full((S, S), -1e4).triu(1)[None, None]
        empty = torch.zeros(1, config.num_kv_heads, 0, config.head_dim)
        step = Step({"full": (cos, sin)}, {"full": mask}, [(empty, empty)] * config.num_layers)
        logits: torch.Tensor = decoder(torch.tensor([list(tokens)]), None, step)[0][0]
    return logits.numpy()


def test_quantized_products_compute_what_their_integers_say() -> None:
    tokens = np.random.default_rng(1).integers(1, families.VOCAB, 12).tolist()
    expected = eager_logits(tiny_weights(), RECIPE, tokens)
    exact = families.reference_logits(families.oracle("llama"), tokens)
    found = graph_of("llama", "8da4w").forward(tokens).logits
    assert np.abs(found - expected).mean() < 0.05 * np.abs(expected - exact).mean()


def test_rows_of_a_quantized_verify_do_not_depend_on_later_rows_or_width() -> None:
    tokens = np.random.default_rng(2).integers(1, families.VOCAB, 24)
    proof = row_independence(graph_of("llama", "8da4w"), tokens)
    assert proof.suffix == 0.0
    assert proof.width < 1e-4 * proof.spread


def middle_of(weights: SlotWeights, recipe: ExecutorchRecipe) -> Middle:
    primitives = ExecutorchPrimitives(weights, recipe, pieces=True)
    return Middle(Layer(0, weights.config, primitives), Layer(1, weights.config, primitives))


def middle_inputs(weights: SlotWeights, M: int = 8, S: int = 3) -> Inputs:
    c = weights.config
    cache, table = torch.zeros(1, c.num_kv_heads, M, c.head_dim), torch.zeros(S, 1, c.head_dim)
    query = torch.zeros(1, c.num_heads, S, c.head_dim)
    examples = (torch.zeros(1, S, c.hidden_size), query, cache, cache.clone(), torch.zeros(1, S, M), table)
    return Inputs((*examples, table.clone()), (1, 2, None, None, 1, 0, 0), 4)


def test_a_filled_delegate_is_byte_for_byte_the_one_that_a_lowering_of_its_own_would_give() -> None:
    first, second = (families.weights_of("qwen2", families.oracle("qwen2", seed)) for seed in (0, 5))
    for weights in (first, second):  # biases, codes, scales and minima
        weights.raw = lambda slot, own=weights: [raw_blocks(own.matrix(slot), "Q4_1")[0]]  # type: ignore[method-assign]
    inputs = middle_inputs(first)
    with quiet(), torch.no_grad():
        filled = Template(middle_of(first, RECIPE), inputs).fill(middle_of(second, RECIPE))
        own = delegate_of(trace(middle_of(second, RECIPE), inputs.examples, inputs.shapes()))
    assert bytes(filled.lowered.processed_bytes) == bytes(own.lowered.processed_bytes)
    stores = [module.named_data_store_output for module in (filled.lowered, own.lowered)]
    left, right = (
        {key: store.buffers[entry.buffer_index] for key, entry in store.pte_data.items()} for store in stores
    )
    assert left == right


class Cache(nn.Module):
    """A buffer that is written, and read behind the write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 2, 16, 4))

    def forward(self, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        self.rows.index_copy_(2, slots, new)
        return self.rows.sum(-1)


def test_a_cache_that_would_be_copied_whole_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import executorch.exir as exir

    with quiet(), torch.no_grad():
        program = trace(Cache(), (torch.arange(3), torch.ones(1, 2, 3, 4)))
        report = write_program(to_edge({"forward": program}, "portable"), tmp_path / "a.pte", buffers=True)
        assert report["forward"]["left"]["aten.index_put_"] == 1
        assert not [name for name in report["forward"]["left"] if "copy_" in name]
        config = exir.ExecutorchBackendConfig
        off = lambda **options: config(**{**options, "run_reinplace_pass": False})  # noqa: E731
        monkeypatch.setattr(exir, "ExecutorchBackendConfig", off)
        with pytest.raises(ExportError, match="copies whole caches"):
            write_program(to_edge({"forward": program}, "portable"), tmp_path / "b.pte", buffers=True)


def test_an_8_bit_table_has_a_kernel_only_when_quantized_operators_are_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import executorch.exir as exir

    with quiet(), torch.no_grad():
        program = trace(QuantizedEmbedding(quantize(random_weight(), ROWS)), (torch.tensor([[1, 2]]),))
        report = write_program(to_edge({"forward": program}, "portable"), tmp_path / "a.pte", buffers=False)
        assert report["forward"]["left"] == {"quantized_decomposed.embedding_byte": 1}
        config = exir.ExecutorchBackendConfig
        off = lambda **options: config(**{**options, "do_quant_fusion_and_const_prop": False})  # noqa: E731
        monkeypatch.setattr(exir, "ExecutorchBackendConfig", off)
        with pytest.raises(RuntimeError, match="Missing out variants"):
            write_program(to_edge({"forward": program}, "portable"), tmp_path / "b.pte", buffers=False)


def test_vulkan_takes_everything_but_the_table_in_one_delegate_and_widths_share_their_weights(
    tmp_path: Path,
) -> None:
    weights = tiny_weights(num_hidden_layers=1)
    lowered = export_pte(
        weights.config,
        weights,
        RECIPE,
        tmp_path,
        backend="vulkan",
        profile="split",
        max_context=64,
        widths=(1, 5),
    )
    for report in lowered.notes["delegation"].values():
        assert report["delegates"] == 1
        assert report["products"] == 7 + 1
        assert report["left"] == {"quantized_decomposed.embedding_byte": 1}
    assert lowered.functions == {"1": "forward_w1", "5": "forward_w5"}
    program = lowered.files[0].read_bytes()
    assert program.count(weights.vector("norm").tobytes()) == 1
    assert program.count(b"et_vk.rms_norm.default") == 2 * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "vulkan", "profile": "split", "widths": (1,), "recipe": "8da8w"}, "4-bit groups only"),
        ({"backend": "vulkan"}, "use split for vulkan"),
        ({"profile": "inplace"}, "known ExecuTorch profiles: buffer, split"),
        ({"profile": "split"}, "needs at least one positive width"),
        ({"widths": (65,)}, "takes widths of 1 to 64"),
        ({"max_context": 4096}, "max_context is 4096"),
        ({"hidden_layers": (2,)}, r"hidden layers \[2\] do not exist"),
        ({"backend": "metal"}, "unknown ExecuTorch backend 'metal'; known: xnnpack, vulkan"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_any_work(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    weights, options = tiny_weights(), {"max_context": 64, **changes}
    recipe = executorch_recipe(options.pop("recipe", "8da4w"))
    with pytest.raises(UsageError, match=message):
        export_pte(weights.config, weights, recipe, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("vendor", "sdk"),
    [("qualcomm", "QNN_SDK_ROOT"), ("mediatek", "mtk_converter"), ("samsung", "EXYNOS_AI_LITECORE_ROOT")],
)
def test_a_vendor_backend_says_which_sdk_is_missing(vendor: str, sdk: str) -> None:
    with pytest.raises(ExportError, match=sdk):
        vendor_partitioner(vendor)


def test_a_recipe_that_changes_nothing_or_stays_in_float_is_an_error() -> None:
    weight = random_weight()
    quantized = describe_slot("head", weight, ROWS, quantize(weight, ROWS))
    untouched = describe_slot("head", weight, None, None)
    check_quantized(RECIPE, [quantized], 1, {"delegated": 1, "left": 0})
    check_quantized(EXECUTORCH_RECIPES["fp32"], [untouched], 0, {"delegated": 0, "left": 0})
    useless = replace(RECIPE, overrides=(("*", None),))
    with pytest.raises(ExportError, match=r"quantized none of 1 weights; overrides: \*"):
        check_quantized(useless, [untouched], 0, {"delegated": 0, "left": 0})
    with pytest.raises(ExportError, match="0 of 1 quantized products reached the delegate and 1 run outside"):
        check_quantized(RECIPE, [quantized], 1, {"delegated": 0, "left": 1})


def test_scales_of_groups_are_positive_and_representable_in_bfloat16() -> None:
    weight = random_weight()
    weight[3] = 0.0
    weight[5, :32] = np.float32(1e-42)
    for method in ("rtn", "mse"):
        packed = quantize(weight, IntxScheme(4, 32, method))  # type: ignore[arg-type]
        assert packed.codes.min() >= -8
        assert packed.codes.max() <= 7
        assert (packed.scales > 0).all()
        rounded = torch.from_numpy(packed.scales).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(rounded, packed.scales)
        np.testing.assert_array_equal(dequantize(packed)[3], 0.0)


def test_searched_scales_beat_the_largest_magnitude_and_torchaos_choice() -> None:
    from torchao.quantization import IntxUnpackedToInt8Tensor

    weight = random_weight(64, 256)

    def error(values: np.ndarray) -> float:
        return float(np.linalg.norm(values - weight) / np.linalg.norm(weight))

    theirs = (
        IntxUnpackedToInt8Tensor.from_hp(torch.from_numpy(weight), (1, 32), torch.int4).dequantize().numpy()
    )
    searched = error(dequantize(quantize(weight, GROUPS)))
    assert searched < 0.97 * error(dequantize(quantize(weight, IntxScheme(4, 32))))
    assert searched < 0.97 * error(theirs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_4_bit_blocks_are_carried_up_to_the_rounding_of_their_scales(kind: str) -> None:
    weight = random_weight()
    raw, exact = raw_blocks(weight, kind)
    carried = carry_slot(exact, GROUPS, [raw])
    assert carried is not None
    scheme, packed = carried
    assert (scheme.name, scheme.bits) == ("int4-b32-carried", 4)
    assert (packed.scales > 0).all()
    largest = np.abs(exact).reshape(len(exact), -1, 32).max(axis=-1, keepdims=True)
    wrong = np.abs(dequantize(packed) - exact).reshape(len(exact), -1, 32)
    assert (wrong <= largest * 2.0**-8).all()
    report = describe_slot("head", exact, scheme, packed, [raw])
    assert report.carried
    assert report.relative_error < 0.004


def test_wider_blocks_become_8_bit_rows_where_the_delegate_has_a_kernel_for_them() -> None:
    raw, exact = raw_blocks(random_weight(), "Q8_0")
    carried = carry_slot(exact, GROUPS, [raw])
    assert carried is not None
    assert carried[0] == ROWS
    assert carry_slot(exact, GROUPS, [raw], rows=False) is None
    assert carry_slot(exact, ROWS, [raw]) is None
    assert carry_slot(exact, GROUPS, None) is None


def test_a_stand_in_for_vulkan_has_the_integers_that_vulkan_would_have() -> None:
    weights = tiny_weights()
    weights.raw = lambda slot: [raw_blocks(weights.matrix(slot), "Q8_0")[0]]  # type: ignore[method-assign]
    found = {}
    for rows in (True, False):
        primitives = ExecutorchPrimitives(weights, RECIPE, pieces=True, rows=rows)
        primitives.linear("layers.0.down", weights.config)
        found[rows] = primitives.slots[0].after
    assert found == {True: "int8-rows", False: "int4-b32-mse"}


def test_minima_of_carried_blocks_meet_the_float_sums_of_their_inputs() -> None:
    from outrider.export.executorch_parts import QuantizedProducts

    raw, exact = raw_blocks(random_weight() + np.float32(0.5), "Q4_1")
    carried = carry_slot(exact, GROUPS, [raw])
    assert carried is not None
    x = torch.from_numpy(random_weight(5, 128, seed=3))[None]
    with quiet(), torch.no_grad():
        found = QuantizedProducts([carried[1]], [None], carried[0])(x)
    expected = x[0].numpy() @ exact.T
    assert np.abs(found[0].numpy() - expected).max() < 0.02 * np.abs(expected).max()


def test_recipes_and_schemes_are_refused_by_name_and_by_what_the_delegate_holds() -> None:
    with pytest.raises(UsageError, match=r"known: fp32, 8da4w, 8da8w. Did you mean '8da4w'"):
        executorch_recipe("8da4")
    with pytest.raises(UsageError, match="bits is 3"):
        IntxScheme(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="multiples of 32"):
        IntxScheme(4, 48)
    with pytest.raises(UsageError, match="whole rows"):
        IntxScheme(8, 32)
    with pytest.raises(ExportError, match="groups of 32 do not divide the 40 inputs"):
        quantize(random_weight(4, 40), GROUPS)
