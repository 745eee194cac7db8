"""Weights as Core ML stores them: what each scheme keeps, what a MIL program reads back, what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from outrider.errors import ExportError, UsageError
from outrider.quantize.coreml import compress, constexpr
from outrider.quantize.coreml_recipes import (
    COREML_RECIPES,
    Blocks,
    CoreMLRecipe,
    Palette,
    check_compressed,
    check_tied,
    coreml_recipe,
    needed_moments,
    parse_coreml_overrides,
    parse_coreml_scheme,
    scheme_name,
    with_coreml_overrides,
)
from outrider.quantize.ggml import dequantize
from outrider.quantize.palettes import compensate_palettes, fit_palettes, look_up
from outrider.quantize.schemes import RawBlocks

N, K = 64, 128
SLOT = "layers.0.down"


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    """A matrix with a few outliers."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((N, K)) * 0.05
    values[rng.integers(0, N, 20), rng.integers(0, K, 20)] *= 8
    return values.astype(np.float32)


@pytest.fixture(scope="module")
def moment() -> np.ndarray:
    """The second moment of correlated inputs of very different sizes."""
    rng = np.random.default_rng(4)
    inputs = rng.standard_normal((600, K)) @ (rng.standard_normal((K, K)) * 0.2)
    inputs *= np.exp(rng.standard_normal(K))
    return (inputs.T @ inputs / len(inputs)).astype(np.float32)


def output_error(weight: np.ndarray, found: np.ndarray, moment: np.ndarray) -> float:
    """The mean squared error of the products with inputs of this moment."""
    wrong = (weight - found).astype(np.float64)
    return float(np.einsum("nk,kl,nl->", wrong, moment, wrong, optimize=True))


def raw_of(weight: np.ndarray, kind: str) -> RawBlocks:
    """The blocks that gguf makes of a weight."""
    gguf = pytest.importorskip("gguf")
    data = gguf.quants.quantize(weight, getattr(gguf.GGMLQuantizationType, kind))
    return RawBlocks(kind, weight.shape, data)


@pytest.mark.parametrize(
    ("name", "worst", "bits"),
    [
        ("fp16", 3e-4, 16),
        ("int8", 0.02, 8.2),
        ("lut6", 0.04, 7.1),
        ("lut4", 0.12, 4.3),
        ("int4-b32", 0.11, 4.51),
        ("int4-b32-asym", 0.1, 4.7),
    ],
)
def test_a_scheme_keeps_a_weight_to_its_bits(
    weight: np.ndarray, name: str, worst: float, bits: float
) -> None:
    found = compress(COREML_RECIPES[name], SLOT, weight)
    error = np.linalg.norm(found.values() - weight) / np.linalg.norm(weight)
    assert error < worst
    assert found.report.relative_error == pytest.approx(error, rel=1e-4, abs=1e-8)
    assert found.nbytes * 8 / weight.size <= bits
    assert found.report.bytes_after == found.nbytes
    assert found.report.after == scheme_name(COREML_RECIPES[name].linear)
    assert found.report.shape == found.shape == (N, K)


@pytest.mark.parametrize("name", ["int8", "lut6", "lut4"])
def test_compensation_beats_weighing_and_weighing_beats_neither(
    weight: np.ndarray, moment: np.ndarray, name: str
) -> None:
    recipe = COREML_RECIPES[name]
    plain, weighed, compensated = (
        output_error(weight, compress(recipe, SLOT, weight, moment=known).values(), moment)
        for known in (None, moment.diagonal().copy(), moment)
    )
    assert compensated < 0.8 * weighed
    assert weighed <= plain * 1.02


def test_weights_of_inputs_that_matter_are_kept_better(weight: np.ndarray) -> None:
    importance = np.where(np.arange(K) < K // 2, 100.0, 1.0).astype(np.float32)
    for name in ("lut4", "int4-b32-asym", "int4-b32"):
        plain = compress(COREML_RECIPES[name], SLOT, weight).values() - weight
        weighed = compress(COREML_RECIPES[name], SLOT, weight, moment=importance).values() - weight
        assert np.sum(weighed**2 * importance) <= np.sum(plain**2 * importance) * 1.001, name


@pytest.mark.parametrize("bits", [4, 6])
def test_palettes_are_as_good_as_those_of_coremltools(weight: np.ndarray, bits: int) -> None:
    kmeans = pytest.importorskip("coremltools.models.neural_network.quantization_utils")
    ours = theirs = 0.0
    for start in range(0, N, 16):
        rows = weight[start : start + 16]
        table, codes = kmeans._get_kmeans_lookup_table_and_weight(bits, rows, force_kmeans1d=True)
        theirs += float(np.sum((rows - table.reshape(-1)[codes.reshape(rows.shape)]) ** 2))
        ours += float(np.sum((rows - look_up(fit_palettes(rows, bits, 16))) ** 2))
    assert ours <= theirs * 1.02  # theirs is exact, without weights


def test_a_palette_of_few_values_is_exact() -> None:
    values = np.array([-1.0, -0.25, 0.0, 0.5, 2.0], np.float32)
    weight = values[np.random.default_rng(0).integers(0, 5, (16, 64))]
    np.testing.assert_array_equal(look_up(fit_palettes(weight, 4, 8)), weight)
    zeros = np.zeros((8, 64), np.float32)
    np.testing.assert_array_equal(look_up(fit_palettes(zeros, 4, 8)), zeros)


def test_compensation_takes_the_nearest_entry_where_inputs_are_independent(weight: np.ndarray) -> None:
    found = look_up(compensate_palettes(weight, 4, 8, np.eye(K, dtype=np.float32)))
    tables = fit_palettes(weight, 4, 8).tables.astype(np.float32)
    nearest = np.abs(weight.reshape(8, -1, 1) - tables[:, None, :]).min(axis=2).reshape(weight.shape)
    np.testing.assert_allclose(np.abs(weight - found), nearest, atol=1e-6)


@pytest.mark.parametrize(("kind", "error"), [("Q4_0", 0.0), ("Q4_1", 1e-3), ("Q8_0", 0.0)])
def test_blocks_of_a_gguf_file_are_carried(weight: np.ndarray, kind: str, error: float) -> None:
    raw = raw_of(weight, kind)
    source = dequantize(raw)
    found = compress(COREML_RECIPES["int4-b32"], SLOT, source, raw=[raw])
    assert found.report.carried
    assert np.linalg.norm(found.values() - source) <= error * np.linalg.norm(source)
    assert (found.scales > 0).all()
    assert found.report.before == kind
    assert found.scheme.bits == (8 if kind == "Q8_0" else 4)


def test_blocks_of_four_bits_are_carried_where_eight_were_asked_for_too(weight: np.ndarray) -> None:
    raw = raw_of(weight, "Q4_0")
    found = compress(COREML_RECIPES["int4-b32"], "head", dequantize(raw), raw=[raw])
    assert (found.report.after, found.report.carried) == ("int4-b32", True)
    np.testing.assert_array_equal(found.values(), dequantize(raw))


def test_superblocks_of_a_gguf_file_are_carried() -> None:
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (16, 144), np.uint8)
    data[:, :4] = (
        rng.uniform(1e-3, 4e-3, (16, 2)).astype(np.float16).view(np.uint8)
    )  # scales of the superblock
    raw = RawBlocks("Q4_K", (16, 256), data)
    source = dequantize(raw)
    found = compress(COREML_RECIPES["int4-b32"], SLOT, source, raw=[raw])
    assert found.report.carried
    assert found.scales.shape == (16, 8)
    assert np.linalg.norm(found.values() - source) <= 1e-3 * np.linalg.norm(source)


def test_carried_minima_stand_where_a_block_is_constant_or_has_no_scale() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    weight[1, :32], weight[2] = -0.375, 0.0
    raw = raw_of(weight, "Q4_1")
    source = dequantize(raw)
    found = compress(COREML_RECIPES["int4-b32"], SLOT, source, raw=[raw]).values()
    np.testing.assert_array_equal(found[1, :32], np.full(32, -0.375, np.float32))
    np.testing.assert_array_equal(found[2], np.zeros(64, np.float32))
    np.testing.assert_allclose(found, source, atol=3e-3)


def test_parts_of_different_types_are_carried_together_and_wider_ones_get_eight_bits(
    weight: np.ndarray,
) -> None:
    recipe = COREML_RECIPES["int4-b32"]
    parts = [raw_of(weight, "Q4_0"), raw_of(weight, "Q4_1")]
    source = np.concatenate([dequantize(part) for part in parts])
    assert compress(recipe, SLOT, source, raw=parts).report.carried
    wide = [raw_of(weight, "Q4_0"), raw_of(weight, "Q5_1")]
    source = np.concatenate([dequantize(part) for part in wide])
    report = compress(recipe, SLOT, source, raw=wide).report
    assert (report.after, report.carried) == ("int8-b32", False)
    assert report.relative_error < 0.01
    assert "more than 4" in report.reason


def read_back(build: Any) -> np.ndarray:
    """The value of a constant that `build` adds to a MIL program, as coremltools decompresses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ct = pytest.importorskip("coremltools")
        from coremltools.converters.mil import Builder

        made = []

        @Builder.program(input_specs=[Builder.TensorSpec((1, 4))], opset_version=ct.target.iOS18)
        def program(x: Any) -> Any:
            made.append(build(Builder))
            return Builder.identity(x=x)

    (var,) = made
    value = var.val if var.val is not None else var.op.materialized_val_inference()
    return np.asarray(value, np.float32)


@pytest.mark.parametrize("name", list(COREML_RECIPES))
@pytest.mark.parametrize("convolution", [False, True])
def test_a_program_reads_back_what_was_stored(weight: np.ndarray, name: str, convolution: bool) -> None:
    found = compress(COREML_RECIPES[name], SLOT, weight)
    value = read_back(lambda mb: constexpr(mb, found, "weight", convolution=convolution))
    assert value.shape == ((N, K, 1, 1) if convolution else (N, K))
    np.testing.assert_allclose(value.reshape(N, K), found.values(), atol=2e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_program_reads_back_carried_blocks(weight: np.ndarray, kind: str) -> None:
    raw = raw_of(weight, kind)
    found = compress(COREML_RECIPES["int4-b32"], SLOT, dequantize(raw), raw=[raw])
    value = read_back(lambda mb: constexpr(mb, found, "weight"))
    np.testing.assert_allclose(value, dequantize(raw), atol=2e-3)


@pytest.mark.parametrize("name", list(COREML_RECIPES))
def test_rows_and_factors_of_a_weight_are_those_of_its_values(weight: np.ndarray, name: str) -> None:
    found = compress(COREML_RECIPES[name], SLOT, weight)
    np.testing.assert_array_equal(found.rows(16, 48).values(), found.values()[16:48])
    np.testing.assert_allclose(found.scaled(0.125).values(), found.values() * 0.125, atol=1e-6)
    assert found.scaled(1.0) is found


def test_a_block_that_does_not_divide_is_an_error() -> None:
    weight = np.ones((16, 48), np.float32)
    for name in ("int4-b32", "int4-b32-asym"):
        with pytest.raises(ExportError, match="48 inputs, and blocks of 32 do not divide"):
            compress(COREML_RECIPES[name], SLOT, weight)
    with pytest.raises(ExportError, match="12 rows, and a palette for every 8"):
        compress(COREML_RECIPES["lut4"], SLOT, np.ones((12, 48), np.float32))
    with pytest.raises(ExportError, match="cut through palettes of 8"):
        compress(COREML_RECIPES["lut4"], SLOT, weight).rows(4, 16)


def test_values_beyond_half_precision_are_an_error() -> None:
    with pytest.raises(ExportError, match="70000; half precision ends"):
        compress(COREML_RECIPES["fp16"], SLOT, np.full((2, 32), 70000, np.float32))
    with pytest.raises(ExportError, match="not finite"):
        compress(COREML_RECIPES["int8"], SLOT, np.full((2, 32), np.nan, np.float32))


def test_a_recipe_that_changed_nothing_or_something_else_is_an_error(weight: np.ndarray) -> None:
    half = compress(COREML_RECIPES["fp16"], SLOT, weight).report
    packed = compress(COREML_RECIPES["lut4"], SLOT, weight).report
    check_compressed(COREML_RECIPES["fp16"], [half])
    check_compressed(COREML_RECIPES["lut4"], [packed])
    with pytest.raises(ExportError, match=r"layers.0.down became fp16, and recipe 'lut4' says lut4-g8"):
        check_compressed(COREML_RECIPES["lut4"], [half])
    with pytest.raises(ExportError, match=r"became lut4-g8, and recipe 'fp16' says fp16"):
        check_compressed(COREML_RECIPES["fp16"], [packed])
    all_kept = with_coreml_overrides(COREML_RECIPES["lut4"], (("layers.*", None),))
    with pytest.raises(ExportError, match=r"compressed none of 1 weights; overrides: layers.\*"):
        check_compressed(all_kept, [half])


def test_a_tied_matrix_is_not_stored_twice() -> None:
    for recipe in COREML_RECIPES.values():
        check_tied(recipe)
    with pytest.raises(UsageError, match="head as int8 and the embedding as fp16"):
        check_tied(with_coreml_overrides(COREML_RECIPES["int8"], (("embedding", None),)))


@pytest.mark.parametrize(
    "text", ["fp16", "lut4-g8", "lut6-g16", "lut6-g4", "int8", "int8-b32", "int4-b64", "int4-b32-asym"]
)
def test_names_of_schemes_are_read_back(text: str) -> None:
    assert scheme_name(parse_coreml_scheme(text)) == text


def test_short_names_have_defaults() -> None:
    assert parse_coreml_scheme("lut4") == Palette(4, 8)
    assert parse_coreml_scheme("lut6") == Palette(6, 8)
    assert parse_coreml_scheme("int4") == Blocks(4, 32)


@pytest.mark.parametrize("text", ["lut5", "int4-b48", "int8-asym", "int2", "lut4-g0", "int8-b16", ""])
def test_schemes_that_core_ml_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_coreml_scheme(text)


def test_overrides_win_by_their_order_and_need_both_halves() -> None:
    overrides = parse_coreml_overrides("layers.0.*=int8, layers.*.down=lut6,head=fp16")
    recipe = with_coreml_overrides(coreml_recipe("lut4"), overrides)
    assert recipe.scheme_for("layers.0.down") == Blocks(8)
    assert recipe.scheme_for("layers.1.down") == Palette(6, 8)
    assert recipe.scheme_for("layers.1.qkv") == Palette(4, 8)
    assert recipe.scheme_for("head") is None
    with pytest.raises(UsageError, match="not pattern=scheme"):
        parse_coreml_overrides("head")


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Did you mean 'lut6'"):
        coreml_recipe("lut66")
    with pytest.raises(UsageError, match="no wide scheme"):
        CoreMLRecipe("mixed", Palette(4, 8), None, None, max_damage=0.1)


def test_moments_are_asked_for_where_they_are_used() -> None:
    inputs = {"layers.0.qkv": 64, "layers.0.down": 5000, "head": 64}
    assert needed_moments(COREML_RECIPES["lut4"], inputs) == {
        "layers.0.qkv": True,
        "layers.0.down": False,
        "head": True,
    }
    assert needed_moments(COREML_RECIPES["int4-b32"], inputs) == dict.fromkeys(inputs, False)
    assert needed_moments(COREML_RECIPES["fp16"], inputs) == {}
