"""GPTQ: error compensation pays on correlated inputs, and its pieces are exact."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.errors import ExportError
from outrider.quantize.calibration import Moments, calibration_text, watch
from outrider.quantize.methods import inverse_factor
from outrider.quantize.pack import pack, unpack
from outrider.quantize.schemes import BlockInt


def correlated(rows: int, k: int, seed: int = 0, noise: float = 0.3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((k // 4, k)) * np.linspace(0.2, 2, k)
    return (rng.standard_normal((rows, k // 4)) @ mix + noise * rng.standard_normal((rows, k))).astype(
        np.float32
    )


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("k", [128, 144])
def test_outputs_are_closer_than_with_any_rounding(symmetric: bool, k: int) -> None:
    w = np.random.default_rng(1).standard_normal((48, k)).astype(np.float32)
    x = correlated(2000, k)
    stats = x.T @ x / np.float32(len(x))
    fresh = correlated(500, k)

    def output_error(method: str) -> float:
        packed = pack(w, BlockInt(4, 32, symmetric, method), stats=stats)
        return float(np.linalg.norm(fresh @ (w - unpack(packed)).T) / np.linalg.norm(fresh @ w.T))

    assert output_error("gptq") < 0.6 * min(output_error("rtn"), output_error("mse"))


def test_with_no_more_tokens_than_inputs_new_outputs_are_closer_than_with_rounding_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    k = tokens = 256
    monkeypatch.setattr("outrider.quantize.pack.TOKENS", tokens)
    w = np.random.default_rng(1).standard_normal((32, k)).astype(np.float32)
    x, fresh = correlated(tokens, k, noise=8.0), correlated(500, k, noise=8.0)[tokens:]
    stats = x.T @ x / np.float32(tokens)

    def output_error(method: str) -> float:
        wrong = w - unpack(pack(w, BlockInt(4, 64, method=method), stats=stats))
        return float(np.linalg.norm(fresh @ wrong.T))

    assert output_error("gptq") < 0.95 * output_error("mse")


def test_rows_do_not_depend_on_the_chunks_they_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.random.default_rng(1).standard_normal((30, 64)).astype(np.float32)
    x = correlated(300, 64)
    whole = pack(w, BlockInt(4, 32, method="gptq"), stats=x.T @ x, threads=1)
    monkeypatch.setattr("outrider.quantize.layout.CHUNK_VALUES", 400)
    split = pack(w, BlockInt(4, 32, method="gptq"), stats=x.T @ x, threads=2)
    assert (whole.codes != split.codes).mean() < 0.01  # products of other shapes may round a tie elsewhere


@pytest.mark.parametrize("k", [5, 64, 150])
def test_the_factor_is_that_of_the_inverse(k: int) -> None:
    x = np.random.default_rng(2).standard_normal((4 * k, k)).astype(np.float32)
    hessian = x.T @ x / np.float32(len(x))
    factor = inverse_factor(hessian, damping=0.0).astype(np.float64)
    assert np.allclose(factor, np.triu(factor))
    np.testing.assert_allclose(factor.T @ factor @ hessian, np.eye(k), atol=2e-3)


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    x = correlated(200, 64)
    x[:, 10:20] = 0
    w = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
    assert np.isfinite(unpack(pack(w, BlockInt(4, 32, method="gptq"), stats=x.T @ x))).all()


def test_statistics_of_another_width_are_refused() -> None:
    w = np.ones((4, 64), np.float32)
    with pytest.raises(ExportError, match="shape"):
        pack(w, BlockInt(4, 32, method="gptq"), stats=np.eye(32, dtype=np.float32))
    with pytest.raises(ExportError, match="needs calibration"):
        pack(w, BlockInt(4, 32, method="gptq"), stats=np.ones(64, np.float32))


def test_hooks_collect_the_moments_of_what_modules_read() -> None:
    torch = pytest.importorskip("torch")
    first, second = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)
    batches = [torch.randn(1, 7, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    moments = Moments(full=["first"])
    handles = [watch(moments, name, module) for name, module in (("first", first), ("second", second))]
    for batch in batches:
        second(first(batch))
    for handle in handles:
        handle.remove()
    second(first(batches[0]))
    got = moments.result()
    x = torch.cat(batches).reshape(-1, 6)
    hidden = first(x).detach().numpy()
    np.testing.assert_allclose(got["first"], (x.T @ x).numpy() / 21, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["second"], (hidden**2).mean(axis=0), rtol=1e-5)


def test_keys_of_a_weak_first_token_are_kept_and_those_of_others_stay_closer_than_with_rounding() -> None:
    k = 128
    w = np.random.default_rng(1).standard_normal((32, k)).astype(np.float32)
    x, fresh = correlated(500, k), correlated(1000, k)[500:]
    x[:, 7] *= 1e-2
    fresh[:, 7] *= 1e-2
    x[0] = np.eye(k, dtype=np.float32)[7]
    moments = Moments(full=["layers.0.qkv", "plain"], keys=["layers.0.qkv"])
    for slot in ("layers.0.qkv", "plain"):
        moments.add(slot, x[None])
    stats = moments.result()

    def errors(method: str, slot: str) -> tuple[float, float]:
        wrong = (w - unpack(pack(w, BlockInt(4, 64, method=method), stats=stats[slot]))).T
        return float(np.linalg.norm(x[0] @ wrong)), float(np.linalg.norm(fresh @ wrong))

    (first, others), by_strength = errors("gptq", "layers.0.qkv"), errors("gptq", "plain")
    assert first < 0.5 * by_strength[0]
    assert others < 0.8 * errors("mse", "plain")[1]


def test_no_activations_is_an_error() -> None:
    with pytest.raises(ExportError, match="no activations"):
        Moments().result()


def test_the_calibration_text_is_not_the_evaluation_text() -> None:
    from outrider.quantize.quality import evaluation_text

    calibration = calibration_text()
    assert len(calibration) > 50_000
    lines = [line for line in evaluation_text().splitlines() if len(line) > 40]
    assert not any(line in calibration for line in lines)
