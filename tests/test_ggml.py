"""Block formats of ggml, against the `gguf` package as an independent decoder."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.errors import CheckpointError
from outrider.quantize.ggml import GGML_TYPES, SUPPORTED_TYPES, blocks, dequantize, type_by_id
from outrider.quantize.schemes import RawBlocks

INTEGER_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
HALVES = {  # byte offsets of the float16 numbers in a block
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
ROWS = 5


def random_blocks(name: str, seed: int = 0) -> RawBlocks:
    """Every bit of the codes random, the float16 numbers of ordinary size."""
    rng = np.random.default_rng(seed)
    kind = GGML_TYPES[name]
    stored = rng.integers(0, 256, (ROWS * 4, kind.block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        numbers = rng.normal(size=(len(stored), 1)).astype("<f2")
        stored[:, at : at + 2] = numbers.view(np.uint8)
    return RawBlocks(name, (ROWS, 4 * kind.block_elements), stored.reshape(ROWS, -1))


def by_gguf(raw: RawBlocks) -> NDArray[np.float32]:
    return gguf.quants.dequantize(raw.data, gguf.GGMLQuantizationType[raw.type_name])


@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_random_bytes_decode_to_the_same_bits_as_the_gguf_package(name: str) -> None:
    raw = random_blocks(name)
    np.testing.assert_array_equal(dequantize(raw), by_gguf(raw))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights_decode_near_the_original(name: str) -> None:
    weights = np.random.default_rng(1).normal(size=(ROWS, 128)).astype(np.float32)
    data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name]).view(np.uint8)
    values = dequantize(RawBlocks(name, weights.shape, data))
    np.testing.assert_array_equal(values, gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name]))
    worst = {"F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2, "Q5_0": 0.2, "Q5_1": 0.15}.get(name, 0.35)
    assert np.abs(values - weights).max() < worst


def test_float32_decodes_to_itself() -> None:
    weights = np.random.default_rng(2).normal(size=(ROWS, 7)).astype(np.float32)
    assert np.array_equal(dequantize(RawBlocks("F32", (ROWS, 7), weights.view(np.uint8))), weights)


@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_value_is_scale_times_code_minus_offset_plus_minimum(name: str) -> None:
    raw = random_blocks(name, seed=3)
    part = blocks(raw)
    codes = part.codes.astype(np.float64) - part.offset  # [N, nb, bs]
    values = codes * part.scales[..., None]
    if part.minimums is not None:
        values += part.minimums[..., None]
    assert part.codes.dtype == np.uint8
    assert part.codes.shape[2] == (16 if name == "Q6_K" else 32)
    np.testing.assert_allclose(values.reshape(raw.shape), by_gguf(raw), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_codes_use_no_more_bits_than_the_type_says(name: str) -> None:
    bits = int(name[1])
    codes = blocks(random_blocks(name)).codes
    assert codes.max() == 2**bits - 1
    assert codes.min() == 0


def test_large_weights_are_decoded_in_pieces_to_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q4_K")
    whole = dequantize(raw)
    monkeypatch.setattr("outrider.quantize.ggml.ROWS_BYTES", 1)
    assert np.array_equal(dequantize(raw), whole)


@pytest.mark.parametrize("name", GGML_TYPES)
def test_type_table_agrees_with_the_gguf_package(name: str) -> None:
    known = gguf.GGMLQuantizationType[name]
    kind = GGML_TYPES[name]
    assert (kind.type_id, kind.block_elements, kind.block_bytes) == (
        known.value,
        *gguf.GGML_QUANT_SIZES[known],
    )
    assert type_by_id(known.value) is kind


def test_unsupported_and_unknown_types_are_refused_with_the_supported_ones() -> None:
    kind = GGML_TYPES["IQ4_XS"]
    raw = RawBlocks("IQ4_XS", (1, kind.block_elements), np.zeros((1, kind.block_bytes), np.uint8))
    for refuse in (dequantize, blocks):
        with pytest.raises(CheckpointError, match=r"IQ4_XS.*Q4_K"):
            refuse(raw)
    with pytest.raises(CheckpointError, match=r"99.*Q4_K"):
        type_by_id(99)
    assert "IQ4_XS" not in SUPPORTED_TYPES


@pytest.mark.parametrize("name", ["F32", *INTEGER_TYPES])
def test_bytes_that_do_not_fit_the_shape_are_refused(name: str) -> None:
    kind = GGML_TYPES[name]
    data = np.zeros((2, kind.block_bytes + 1), np.uint8)
    with pytest.raises(CheckpointError, match=name):
        dequantize(RawBlocks(name, (2, kind.block_elements), data))
