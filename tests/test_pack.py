"""Packing weights: the kernel's layout, the methods' promises, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ExportError, UsageError
from outrider.quantize.layout import over_chunks, pack_nibbles, unpack_nibbles
from outrider.quantize.pack import pack, unpack
from outrider.quantize.schemes import BlockInt, DynamicInt8, Float, PackedMatrix


def weight(n: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, k)) * 0.05 + 0.01).astype(np.float32)


def run_kernel(packed: PackedMatrix, x: np.ndarray, accuracy_level: int = 1) -> np.ndarray:
    """y = x Ŵᵀ by ONNX Runtime's own MatMulNBits."""
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    n, k = packed.shape
    scheme = packed.scheme
    assert isinstance(scheme, BlockInt)
    assert packed.scales is not None
    parts = {"B": packed.codes, "scales": packed.scales.reshape(-1)}
    if packed.zero_points is not None:
        parts["zeros"] = packed.zero_points.reshape(-1)
    node = helper.make_node(
        "MatMulNBits",
        ["x", *parts],
        ["y"],
        domain="com.microsoft",
        K=k,
        N=n,
        bits=scheme.bits,
        block_size=scheme.block,
        accuracy_level=accuracy_level,
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, n])],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in parts.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("k", [96, 256, 300])
def test_the_kernel_reads_what_unpack_says(bits: int, symmetric: bool, block: int, k: int) -> None:
    w = weight(24, k)
    packed = pack(w, BlockInt(bits=bits, block=block, symmetric=symmetric))
    x = np.random.default_rng(1).standard_normal((5, k)).astype(np.float32)
    np.testing.assert_allclose(run_kernel(packed, x), x @ unpack(packed).T, rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", ["rtn", "mse", "hqq"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_method_stays_within_its_step(method: str, symmetric: bool, bits: int) -> None:
    w = weight(40, 200)
    packed = pack(w, BlockInt(bits=bits, block=32, symmetric=symmetric, method=method))
    error = packed.details["relative_error"]
    assert error == pytest.approx(np.linalg.norm(w - unpack(packed)) / np.linalg.norm(w), rel=1e-4)
    assert error < {4: 0.11, 8: 0.007}[bits]
    assert packed.codes.shape == (40, 7, 32 * bits // 8)
    assert packed.codes.dtype == np.uint8


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_searching_the_scale_beats_rounding(symmetric: bool) -> None:
    w = weight(64, 512)
    schemes = {method: BlockInt(4, 64, symmetric, method) for method in ("rtn", "mse")}
    error = {method: pack(w, scheme).details["relative_error"] for method, scheme in schemes.items()}
    assert error["mse"] < 0.97 * error["rtn"]


def test_importance_moves_the_error_to_the_inputs_that_matter_less() -> None:
    w = weight(64, 256)
    importance = np.where(np.arange(256) % 4 == 0, 100.0, 1.0).astype(np.float32)
    scheme = BlockInt(4, 32, method="mse")

    def weighted(packed: PackedMatrix) -> float:
        return float((((w - unpack(packed)) ** 2) * importance).sum())

    assert weighted(pack(w, scheme, stats=importance)) < 0.8 * weighted(pack(w, scheme))


def test_zeros_and_constants_are_held_exactly() -> None:
    w = np.zeros((4, 64), np.float32)
    w[2] = 0.375
    mse = BlockInt(4, method="mse")
    for scheme in (BlockInt(4), BlockInt(4, symmetric=False), BlockInt(8), mse, DynamicInt8()):
        np.testing.assert_allclose(unpack(pack(w, scheme)), w, rtol=1e-6)


def test_float_and_row_int8_schemes_keep_their_shapes() -> None:
    w = weight(8, 50)
    assert pack(w, Float()).codes.dtype == np.float32
    np.testing.assert_array_equal(unpack(pack(w, Float())), w)
    half = pack(w, Float("float16"))
    assert half.nbytes == w.size * 2
    rows = pack(w, DynamicInt8())
    assert rows.codes.dtype == np.int8
    assert rows.codes.shape == (8, 50)
    assert rows.details["relative_error"] < 0.01


def test_threads_and_chunks_do_not_change_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(100, 96)
    whole = pack(w, BlockInt(4, 32, False), threads=1)
    monkeypatch.setattr("outrider.quantize.layout.CHUNK_VALUES", 700)
    split = pack(w, BlockInt(4, 32, False), threads=3)
    np.testing.assert_array_equal(whole.codes, split.codes)
    np.testing.assert_array_equal(whole.zero_points, split.zero_points)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_nibbles_round_trip(n: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 16, (n, count)).astype(np.uint8)
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(codes), count), codes)


def test_what_cannot_be_packed_is_refused() -> None:
    w = weight(4, 32)
    w[1, 2] = np.nan
    with pytest.raises(ExportError, match="1 values"):
        pack(w, BlockInt())
    with pytest.raises(ExportError, match="non-empty matrix"):
        pack(np.zeros(3, np.float32), BlockInt())
    with pytest.raises(ExportError, match="overflows float16"):
        pack(np.full((2, 2), 1e6, np.float32), Float("float16"))
    with pytest.raises(ExportError, match="calibration"):
        pack(weight(4, 32), BlockInt(method="gptq"))
    with pytest.raises(UsageError, match="known block sizes"):
        BlockInt(block=48)


def test_matrix_products_inside_chunks_run_on_one_thread_and_the_limit_ends_with_them() -> None:
    from threadpoolctl import threadpool_info, threadpool_limits

    def threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    shape = (64, 1 << 16)  # eight chunks
    with threadpool_limits(2, user_api="blas"):
        inside = over_chunks(lambda rows: threads(), shape, 2) + over_chunks(lambda rows: threads(), shape, 1)
        assert inside == [{1}] * 16
        assert threads() == {2}
