"""Integers with one scale per output channel: what they hold, and that the better methods are better."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.errors import ExportError, UsageError
from outrider.quantize.channels import ChannelMatrix, code_range, pack_channels, search_scales
from outrider.quantize.methods import compensate_rows, inverse_factor


def heavy_tailed(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, (n, k)).astype(np.float32)


def correlated(rows: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((k // 4, k)) * np.linspace(0.2, 2, k)
    return (rng.standard_normal((rows, k // 4)) @ mix + 0.3 * rng.standard_normal((rows, k))).astype(
        np.float32
    )


def moment_of(x: np.ndarray) -> np.ndarray:
    return x.T @ x / np.float32(len(x))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("method", ["rtn", "mse", "gptq"])
def test_codes_stay_in_range_and_rebuild_the_weight(bits: int, method: str) -> None:
    w = heavy_tailed(33, 70)
    packed = pack_channels(w, bits, method, moment=moment_of(correlated(400, 70)))
    low, high = code_range(bits)
    assert packed.codes.dtype == np.int8
    assert low <= packed.codes.min() < 0 < packed.codes.max() <= high
    assert packed.scales.shape == (33,)
    values = packed.codes * packed.scales[:, None]
    np.testing.assert_array_equal(packed.values(), values)
    assert packed.relative_error == pytest.approx(np.linalg.norm(w - values) / np.linalg.norm(w), rel=1e-4)
    assert packed.relative_error < (0.35 if bits == 4 else 0.02)
    assert packed.nbytes == 33 * 70 * bits // 8 + 33 * 4


def test_round_to_nearest_is_within_half_a_step_and_clips_nothing() -> None:
    w = heavy_tailed(20, 50)
    packed = pack_channels(w, 4, "rtn")
    assert (np.abs(w - packed.values()) <= packed.scales[:, None] * 0.5001).all()
    # the side that reaches further decides; the negative one has a code more
    rows = np.array([[-8.0, 3.0], [-3.0, 7.0]], np.float32)
    np.testing.assert_array_equal(pack_channels(rows, 4, "rtn").scales, [1, 1])


def test_weights_on_the_grid_are_kept_exactly_by_every_method() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(-8, 8, (16, 64)).astype(np.float32)
    codes[:, 0] = -8
    w = codes * np.linspace(0.1, 2, 16, dtype=np.float32)[:, None]
    for method in ("rtn", "mse", "gptq"):
        packed = pack_channels(w, 4, method, moment=moment_of(correlated(300, 64)))
        assert packed.relative_error < 1e-6, method
        np.testing.assert_array_equal(packed.codes, codes)


def test_the_searched_scale_loses_less_than_the_peak() -> None:
    w = heavy_tailed(40, 256)
    importance = np.random.default_rng(2).uniform(0.1, 10, 256).astype(np.float32)

    def lost(method: str, moment: np.ndarray | None) -> float:
        wrong = w - pack_channels(w, 4, method, moment=moment).values()
        return float((wrong**2 * importance).sum())

    assert lost("mse", importance) < 0.75 * lost("rtn", None)
    assert lost("mse", importance) < lost("mse", None)


def test_compensation_brings_outputs_closer_than_any_rounding() -> None:
    w = heavy_tailed(48, 144)
    moment, fresh = moment_of(correlated(2000, 144)), correlated(500, 144, seed=0)

    def output_error(method: str) -> float:
        wrong = w - pack_channels(w, 4, method, moment=moment).values()
        return float(np.linalg.norm(fresh @ wrong.T) / np.linalg.norm(fresh @ w.T))

    assert output_error("gptq") < 0.6 * min(output_error("rtn"), output_error("mse"))


@pytest.mark.parametrize("k", [40, 300])
def test_the_reported_loss_is_the_output_error_that_scales_are_compared_by(k: int) -> None:
    w, moment = heavy_tailed(9, k), moment_of(correlated(4 * k, k))
    scales = search_scales(w, 4)
    codes, loss = compensate_rows(w, scales[:, None], inverse_factor(moment, damping=0.0), 4)
    wrong = (w - codes * scales[:, None]).astype(np.float64)
    np.testing.assert_allclose(loss, np.einsum("nk,kj,nj->n", wrong, moment, wrong), rtol=0.02)


@pytest.mark.parametrize("method", ["rtn", "mse", "gptq"])
def test_blocks_have_whole_multipliers_and_lose_less_than_one_scale_a_row(method: str) -> None:
    w = heavy_tailed(40, 192) * np.repeat(np.random.default_rng(6).uniform(0.2, 2, (40, 12)), 16, axis=1)
    w, moment = w.astype(np.float32), moment_of(correlated(2000, 192))

    def output_error(block: int | None) -> float:
        packed = pack_channels(w, 4, method, block=block, moment=moment)
        wrong = w - packed.values()
        return float(np.sqrt(np.einsum("nk,kj,nj->", wrong, moment, wrong)))

    assert output_error(16) < output_error(64) < output_error(None)
    packed = pack_channels(w, 4, method, block=16, moment=moment)
    assert packed.multipliers is not None
    assert packed.multipliers.shape == (40, 12)
    assert packed.block == 16
    assert packed.nbytes == 40 * 192 // 2 + 40 * 4 + 40 * 12
    assert 1 <= packed.multipliers.min() < packed.multipliers.max() == 16
    scale = np.repeat(packed.scales[:, None] * packed.multipliers, 16, axis=1)
    np.testing.assert_allclose(packed.values(), packed.codes * scale, rtol=1e-6)
    assert packed.relative_error == pytest.approx(
        np.linalg.norm(w - packed.values()) / np.linalg.norm(w), rel=1e-4
    )


def test_blocks_that_do_not_divide_a_row_and_multipliers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ExportError, match="blocks of 32 do not fit rows of 48"):
        pack_channels(heavy_tailed(4, 48), 4, block=32)
    with pytest.raises(ExportError, match="known: 16, 32, 64"):
        pack_channels(heavy_tailed(4, 48), 4, block=24)
    codes, scales = np.zeros((2, 32), np.int8), np.ones(2, np.float32)
    with pytest.raises(ExportError, match=r"outside 1\.\.16"):
        ChannelMatrix(4, codes, scales, "rtn", 0.0, np.full((2, 2), 17, np.uint8))
    with pytest.raises(ExportError, match="do not fit codes"):
        ChannelMatrix(4, codes, scales, "rtn", 0.0, np.ones((2, 3), np.uint8))


def test_rows_do_not_depend_on_the_chunks_they_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    w, moment = heavy_tailed(30, 64), moment_of(correlated(300, 64))
    whole = pack_channels(w, 4, "gptq", moment=moment, threads=1)
    monkeypatch.setattr("outrider.quantize.layout.CHUNK_VALUES", 400)
    split = pack_channels(w, 4, "gptq", moment=moment, threads=2)
    assert (whole.codes != split.codes).mean() < 0.01  # products of other shapes may round a tie elsewhere


def test_rows_of_zeros_and_inputs_that_are_never_used_do_no_harm() -> None:
    w = heavy_tailed(8, 32)
    w[3], w[4, :16] = 0, 0
    x = correlated(100, 32)
    x[:, 10:20] = 0
    for method in ("rtn", "mse", "gptq"):
        packed = pack_channels(w, 4, method, moment=moment_of(x))
        assert np.isfinite(packed.values()).all()
        np.testing.assert_array_equal(packed.values()[3], 0)
        blocks = pack_channels(w, 4, method, block=16, moment=moment_of(x)).values()
        np.testing.assert_array_equal(blocks[3], 0)
        assert np.abs(blocks[4] - w[4]).max() < np.abs(w[4]).max() / 3


def test_what_cannot_be_packed_is_refused_with_a_reason() -> None:
    w = np.ones((4, 8), np.float32)
    with pytest.raises(ExportError, match="non-empty matrix"):
        pack_channels(w[0], 4)
    with pytest.raises(ExportError, match="1 values of a weight are not finite"):
        pack_channels(np.where(np.arange(32).reshape(4, 8) == 5, np.nan, w), 4)
    with pytest.raises(ExportError, match=r"needs the second moment \[8, 8\].*got none"):
        pack_channels(w, 4, "gptq")
    with pytest.raises(ExportError, match=r"shape \(4,\)"):
        pack_channels(w, 4, "mse", moment=np.ones(4, np.float32))
    with pytest.raises(UsageError, match="bits is 3"):
        pack_channels(w, 3)
    with pytest.raises(UsageError, match=r"known: rtn, mse, gptq"):
        pack_channels(w, 4, "hqq")  # type: ignore[arg-type]


def test_a_matrix_of_codes_out_of_range_or_scales_that_are_not_positive_cannot_be_made() -> None:
    codes, scales = np.full((2, 3), 7, np.int8), np.ones(2, np.float32)
    with pytest.raises(ExportError, match=r"leave -8\.\.7"):
        ChannelMatrix(4, codes + np.int8(1), scales, "rtn", 0.0)
    with pytest.raises(ExportError, match="not positive"):
        ChannelMatrix(4, codes, scales * 0, "rtn", 0.0)
    with pytest.raises(ExportError, match="do not make a matrix"):
        ChannelMatrix(4, codes, scales[:1], "rtn", 0.0)
