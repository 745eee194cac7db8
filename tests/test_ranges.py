"""Ranges of activations: statistics, rules, integers that cover them, and the calibration run itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.errors import ExportError, UsageError
from outrider.quantize import ranges
from outrider.quantize.ranges import (
    Affine,
    Feed,
    Range,
    activation_ranges,
    affine,
    chosen_range,
    dequantize,
    observe,
    quantize,
    row_axes,
)

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("low", "high"), [(-3.7, 9.1), (0.5, 2.0), (-4.0, -1.0), (0.0, 0.0), (-1e-8, 3e4)])
def test_zero_is_exact_and_the_range_is_covered(low: float, high: float, bits: int) -> None:
    encoding = affine(low, high, bits)
    assert dequantize(quantize(np.zeros(3), encoding), encoding).tolist() == [0, 0, 0]
    assert encoding.range.low <= min(low, 0) + encoding.scale * 0.51
    assert encoding.range.high >= max(high, 0) - encoding.scale * 0.51
    assert np.float32(encoding.scale) == encoding.scale


def test_codes_are_those_of_quantize_linear(tmp_path: Path) -> None:
    """ONNX Runtime's own operator is the oracle, saturation and ties included."""
    import onnxruntime

    encoding = affine(-1.5, 2.5, 16)
    nodes = [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])]
    constants = [
        numpy_helper.from_array(np.float32(encoding.scale), "scale"),
        numpy_helper.from_array(np.uint16(encoding.zero_point), "zero"),
    ]
    model = graph(nodes, constants, {"x": [1000]}, {"y": TensorProto.UINT16})
    x = np.random.default_rng(0).normal(0, 2, 1000).astype(np.float32)
    x[:200] = (np.arange(200) + 0.5) * np.float32(encoding.scale)  # ties
    expected = onnxruntime.InferenceSession(model).run(None, {"x": x})[0]
    found = quantize(x, encoding)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, expected)
    inside = (x > -1.5) & (x < 2.5)
    assert np.abs(dequantize(found, encoding) - x)[inside].max() <= encoding.scale * 0.501


def test_what_is_no_range_or_no_encoding_is_refused() -> None:
    for low, high in [(1.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))]:
        with pytest.raises(ExportError, match="no range"):
            Range(low, high)
    with pytest.raises(ExportError, match="zero point 70000"):
        Affine(0.1, 70000)
    with pytest.raises(ExportError, match="bits is 4"):
        affine(0, 1, 4)


def test_statistics_in_parts_are_those_of_the_whole() -> None:
    """Parts of very different magnitude: the histogram stretches without losing a value."""
    rng = np.random.default_rng(1)
    parts = [rng.normal(0, scale, 5000).astype(np.float32) for scale in (1e-3, 40, 1, 3e3)]
    running = None
    for part in parts:
        running = observe(running, part)
    assert running is not None
    whole = observe(None, np.concatenate(parts))
    assert (running.low, running.high, running.limit) == (whole.low, whole.high, whole.limit)
    assert running.counts.sum() == 20000
    assert np.abs(np.cumsum(running.counts) - np.cumsum(whole.counts)).max() <= 3  # values on an edge


def test_minmax_clips_nothing_and_a_percentile_drops_the_tails_on_both_sides() -> None:
    rng = np.random.default_rng(2)
    values = np.concatenate([rng.uniform(-1, 1, 100_000), [500.0], [-300.0]]).astype(np.float32)
    seen = observe(None, values)
    assert chosen_range(seen) == Range(-300, 500)
    found = chosen_range(seen, "percentile", coverage=0.999)
    assert -1.3 < found.low < -0.9
    assert 0.9 < found.high < 1.3
    assert chosen_range(seen, "percentile", coverage=1.0) == Range(-300, 500)


def test_least_squares_clips_for_8_bits_what_16_bits_can_hold() -> None:
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.normal(0, 1, 200_000), rng.normal(0, 1, 20) * 12]).astype(np.float32)
    seen = observe(None, values)

    def lost(found: Range, bits: int) -> float:
        encoding = affine(found.low, found.high, bits)
        return float(np.square(dequantize(quantize(values, encoding), encoding) - values).mean())

    plain, narrow = chosen_range(seen), chosen_range(seen, "mse", bits=8)
    tried = min(
        lost(Range(low, high), 8) for low in np.linspace(-18, -4, 15) for high in np.linspace(4, 20, 17)
    )
    assert lost(narrow, 8) < min(1.05 * tried, 0.8 * lost(plain, 8))
    wide = chosen_range(seen, "mse", bits=16)
    assert lost(wide, 16) <= lost(plain, 16) * 1.05
    assert wide.high - wide.low > 0.9 * (plain.high - plain.low)


def test_a_rule_or_a_coverage_that_does_not_exist_is_refused() -> None:
    seen = observe(None, np.arange(5.0))
    with pytest.raises(UsageError, match="known: minmax, percentile, mse"):
        chosen_range(seen, "entropy")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="coverage is 99"):
        chosen_range(seen, "percentile", coverage=99.9)


def graph(nodes: Any, constants: Any, inputs: dict[str, list[int]], outputs: dict[str, int]) -> bytes:
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
            constants,
        ),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    return model.SerializeToString()


WEIGHT = np.random.default_rng(4).normal(0, 1, (8, 6)).astype(np.float32)


def layers(width: int) -> bytes:
    """h = x W, folded = the halves of h below each other, y = relu(h); a constant is computed on the way."""
    nodes = [
        helper.make_node("Neg", ["w"], ["minus"]),
        helper.make_node("MatMul", ["x", "minus"], ["h"]),
        helper.make_node("Reshape", ["h", "split"], ["parts"]),
        helper.make_node("Transpose", ["parts"], ["turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["turned", "shape"], ["folded"]),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(WEIGHT, "w"),
        numpy_helper.from_array(np.array([1, width, 2, 3]), "split"),
        numpy_helper.from_array(np.array([1, 2 * width, 3]), "shape"),
    ]
    return graph(nodes, constants, {"x": [1, width, 8]}, {"y": TensorProto.FLOAT})


def batches(width: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.normal(0, 1 + i, (1, width, 8)).astype(np.float32) for i in range(count)]


def test_ranges_are_those_of_every_tensor_that_depends_on_an_input() -> None:
    xs = batches(4, 3)
    found = activation_ranges(layers(4), [{"x": x} for x in xs])
    assert set(found) == {"x", "h", "parts", "turned", "folded", "y"}
    h = np.concatenate([x @ -WEIGHT for x in xs])
    for name, expected in {"x": np.concatenate(xs), "h": h, "y": np.maximum(h, 0), "folded": h}.items():
        assert found[name].low == pytest.approx(expected.min(), rel=1e-5)
        assert found[name].high == pytest.approx(expected.max(), rel=1e-5)
    wider = activation_ranges(layers(4), [{"x": x} for x in xs], margin=0.5)
    assert wider["h"].high == pytest.approx(1.5 * found["h"].high)
    assert wider["y"].low == 0


def test_small_batches_of_tensors_find_the_same_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = [{"x": x} for x in batches(4, 3)]
    passes = []
    original = ranges._session
    monkeypatch.setattr(ranges, "_session", lambda *a: (passes.append(1), original(*a))[1])
    told: list[float] = []
    small = activation_ranges(layers(4), feeds, memory_mb=200e-6, progress=told.append)
    assert len(passes) > 2
    assert told[-1] == 1.0
    assert sorted(told) == told
    passes.clear()
    assert activation_ranges(layers(4), feeds) == small
    assert len(passes) == 1
    with pytest.raises(UsageError, match=r"passes over the calibration runs.*an iterator gives one"):
        activation_ranges(layers(4), iter(feeds), memory_mb=200e-6)


def test_a_one_pass_generator_is_enough_when_everything_fits() -> None:
    def once() -> Iterator[dict[str, np.ndarray]]:
        yield from ({"x": x} for x in batches(4, 2))

    assert set(activation_ranges(layers(4), once(), watch=["y"])) == {"y"}


def test_rows_that_do_not_count_do_not_widen_a_range_even_where_heads_are_folded_into_them() -> None:
    x = batches(4, 1)[0]
    x[0, 0] = 1e4  # the sink
    x[0, 3] = -1e5  # padding
    axes = row_axes(layers(2), layers(4), (2, 4))
    assert axes == {"x": 1, "h": 1, "parts": 1, "turned": 2, "folded": 1, "y": 1}
    feed = Feed({"x": x}, np.array([False, True, True, False]))
    found = activation_ranges(layers(4), [feed], axes=axes)
    plain = activation_ranges(layers(2), [{"x": x[:, 1:3]}])
    for name in plain:
        assert found[name].low == pytest.approx(plain[name].low, abs=1e-5), name
        assert found[name].high == pytest.approx(plain[name].high, abs=1e-5), name


def test_external_data_is_found_beside_the_file(tmp_path: Path) -> None:
    model = onnx.load_model_from_string(layers(4))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=128)
    feeds = [{"x": x} for x in batches(4, 2)]
    assert activation_ranges(tmp_path / "m.onnx", feeds) == activation_ranges(layers(4), feeds)


def test_values_that_are_not_finite_names_that_are_unknown_and_runs_without_rows_are_refused() -> None:
    x = batches(4, 1)[0]
    with pytest.raises(ExportError, match=r"x: an activation of the calibration run is -inf.*bounded"):
        activation_ranges(layers(4), [{"x": np.where(x > 1, -np.inf, x).astype(np.float32)}])
    with pytest.raises(UsageError, match="no tensors wrong"):
        activation_ranges(layers(4), [{"x": x}], watch=["h", "wrong"])
    with pytest.raises(ExportError, match="saw no activations"):
        activation_ranges(layers(4), [])
    nothing = Feed({"x": x}, np.zeros(4, bool))
    with pytest.raises(ExportError, match="saw no activations"):
        activation_ranges(layers(4), [nothing], axes={"x": 1, "h": 1}, watch=["x", "h"])
