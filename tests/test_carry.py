"""Carrying GGUF blocks: no second rounding where the kernel's format can hold them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from outrider.errors import ExportError
from outrider.export.bind import with_carried_minima
from outrider.quantize.carry import carried_scheme, carry, split_minima, with_sums
from outrider.quantize.ggml import GGML_TYPES, dequantize
from outrider.quantize.pack import pack, unpack
from outrider.quantize.schemes import BlockInt, Carry, PackedMatrix, RawBlocks

PLAIN = {"Q4_0": (4, 32), "Q5_0": (8, 32), "Q8_0": (8, 32), "Q6_K": (8, 16)}
WITH_MINIMUM = {"Q4_1": (4, 32), "Q4_K": (4, 32), "Q5_1": (8, 32), "Q5_K": (8, 32)}
HALF_FIELDS = {  # offsets of the float16 numbers in a block
    "Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208],
    "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2],
}  # fmt: skip


def raw_blocks(type_name: str, n: int = 12, k: int = 512, seed: int = 0) -> RawBlocks:
    """Random bytes with sane scales: every code, sign and sub-scale occurs."""
    rng = np.random.default_rng(seed)
    kind = GGML_TYPES[type_name]
    count = n * k // kind.block_elements
    data = rng.integers(0, 256, (count, kind.block_bytes)).astype(np.uint8)
    for index, offset in enumerate(HALF_FIELDS[type_name]):
        values = (rng.uniform(0.001, 0.01, count) * (-4 if index and type_name.endswith("1") else 1)).astype(
            "<f2"
        )
        data[:, offset : offset + 2] = values[:, None].view(np.uint8)
    return RawBlocks(type_name, (n, k), data.reshape(n, -1))


@pytest.mark.parametrize("type_name", PLAIN)
def test_blocks_without_a_minimum_are_carried_bit_for_bit(type_name: str) -> None:
    raw = raw_blocks(type_name)
    bits, block = PLAIN[type_name]
    source = dequantize(raw)
    for scheme in (BlockInt(bits, block, method="hqq"), Carry()):
        packed = pack(source, scheme, raw=[raw])
        assert packed.carried
        assert packed.correction is None
        assert (packed.scheme.bits, packed.scheme.block) == (bits, block)
        np.testing.assert_array_equal(unpack(packed), source)
        assert packed.details["relative_error"] == 0


@pytest.mark.parametrize("type_name", WITH_MINIMUM)
def test_minima_are_exact_as_a_correction(type_name: str) -> None:
    raw = raw_blocks(type_name)
    source = dequantize(raw)
    packed = pack(source, Carry(), raw=[raw])
    assert packed.carried
    assert packed.correction is not None
    assert (packed.scheme.bits, packed.scheme.block) == WITH_MINIMUM[type_name]
    assert packed.details["relative_error"] < 1e-6
    x = np.random.default_rng(1).standard_normal((3, raw.shape[1])).astype(np.float32)
    uncorrected = PackedMatrix(packed.scheme, packed.shape, packed.codes, packed.scales)
    sums = x.reshape(3, -1, packed.scheme.block).sum(axis=-1)
    y = x @ unpack(uncorrected).T + sums @ packed.correction.T
    np.testing.assert_allclose(y, x @ source.T, atol=1e-4 * np.abs(source).max() * raw.shape[1] ** 0.5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_with_block_sums_behind_its_inputs_holds_minima_far_below_the_sources_own_step(
    bits: Literal[4, 8],
) -> None:
    rng = np.random.default_rng(0)
    source = BlockInt(bits, 32)
    codes = rng.integers(0, 256, (12, 18, 4 * bits)).astype(np.uint8)
    scales = rng.uniform(-0.01, 0.01, (12, 18)).astype(np.float32)
    scales[0, :2] = 0  # blocks of one value
    correction = np.where(scales == 0, 0.01, scales * rng.uniform(-7, 7, scales.shape)).astype(np.float32)
    exact = PackedMatrix(source, (12, 576), codes, scales, correction=correction)
    split = split_minima(exact)
    assert split is not None
    kept, wide = split[0], with_sums(*split)
    step = np.sqrt(np.mean(np.square(scales)) / 12)  # of rounding to the source's codes
    wrong = unpack(kept) - unpack(exact)
    assert np.sqrt(np.mean(np.square(wrong))) < (0.1 if bits == 4 else 0.01) * step
    x = rng.standard_normal((3, 576)).astype(np.float32)
    behind = np.concatenate([x, x.reshape(3, 18, 32).sum(axis=-1), np.ones((3, 14), np.float32)], axis=1)
    assert wide.shape == (12, 576 + 18 + 14)  # a whole number of blocks
    np.testing.assert_allclose(behind @ unpack(wide).T, x @ unpack(kept).T, atol=1e-4)


def test_minima_that_no_zero_point_reaches_are_rounded_to_8_bits() -> None:
    raw = raw_blocks("Q4_1")  # minima up to forty steps below 0
    weight = dequantize(raw)
    exact = pack(weight, Carry(), raw=[raw])
    assert split_minima(exact) is None
    rounded, stored = with_carried_minima(
        weight, exact, Carry()
    )  # as the recipe rounds what it does not carry
    assert rounded is stored
    assert rounded.scheme == BlockInt(8, 32)
    assert not rounded.carried


def test_a_few_rows_that_no_zero_point_reaches_are_enough() -> None:
    scales = np.full((12, 4), 1.0, np.float32)
    correction = scales * 0.4
    scales[0], correction[0] = 0.001, 0.05  # as parts of a fused slot may differ
    codes = np.full((12, 4, 16), 0x3A, np.uint8)
    packed = PackedMatrix(BlockInt(4, 32), (12, 128), codes, scales, correction=correction)
    packed.correction[0, 1::2] = 0.03  # type: ignore[index]
    assert split_minima(packed) is None


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1"])
def test_a_scale_that_is_not_finite_is_a_damaged_checkpoint(type_name: str) -> None:
    raw = raw_blocks(type_name)
    raw.data[3, :2] = np.array([np.inf], "<f2").view(np.uint8)
    with pytest.raises(ExportError, match=f"a {type_name} block .* not finite"):
        carry([raw], Carry())


@pytest.mark.parametrize("type_name", WITH_MINIMUM)
def test_eight_bit_blocks_hold_minima_closely(type_name: str) -> None:
    raw = raw_blocks(type_name)
    packed = pack(dequantize(raw), Carry(minimum="round"), raw=[raw])
    assert packed.scheme == BlockInt(8, 32)
    assert not packed.carried
    assert packed.correction is None
    assert 0 < packed.details["relative_error"] < 0.006


def test_parts_of_one_slot_may_be_of_different_types() -> None:
    parts = [raw_blocks("Q4_K", 8), raw_blocks("Q6_K", 4), raw_blocks("Q4_K", 4, seed=3)]
    source = np.concatenate([dequantize(part) for part in parts])
    packed = carry(parts, Carry())
    assert packed is not None
    assert (packed.shape, packed.scheme.bits, packed.scheme.block) == ((16, 512), 8, 16)
    np.testing.assert_allclose(unpack(packed), source, rtol=1e-5, atol=1e-6)


def test_smaller_blocks_repeat_their_scale() -> None:
    raw = raw_blocks("Q4_0")
    packed = carry([raw], BlockInt(8, 16))
    assert packed is not None
    np.testing.assert_array_equal(unpack(packed), dequantize(raw))


def test_what_the_scheme_cannot_hold_is_rounded_again_and_says_so() -> None:
    raw = raw_blocks("Q8_0")
    for scheme in (BlockInt(4, 32), BlockInt(8, 128), BlockInt(8, 64)):
        packed = pack(dequantize(raw), scheme, raw=[raw])
        assert not packed.carried
        assert packed.details["relative_error"] > 0
    assert carried_scheme(["Q4_1"], BlockInt(4, 32)) is None
    assert carried_scheme(["Q4_0", "F32"], Carry()) is None
    assert carried_scheme([], Carry()) is None


def test_wide_blocks_are_rounded_only_when_asked() -> None:
    fast = Carry(otherwise=BlockInt(4, 64), wide="round", eight_bit=BlockInt(8, 128))
    for name in ("Q6_K", "Q8_0", "Q5_K"):
        raw = raw_blocks(name)
        packed = pack(dequantize(raw), fast, raw=[raw])
        assert packed.scheme == BlockInt(8, 128)
        assert not packed.carried
    assert carried_scheme(["Q4_K"], fast) == BlockInt(4, 32)
    assert pack(np.ones((2, 64), np.float32), fast).scheme == BlockInt(4, 64)


def test_parts_of_different_widths_are_refused() -> None:
    with pytest.raises(ExportError, match="differ in width"):
        carry([raw_blocks("Q4_0", 4, 512), raw_blocks("Q4_0", 4, 256)], Carry())


def test_a_weight_that_is_not_the_blocks_is_refused() -> None:
    with pytest.raises(ExportError, match="hold a"):
        pack(np.ones((3, 512), np.float32), Carry(), raw=[raw_blocks("Q4_0")])
