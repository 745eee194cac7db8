"""A cache of 8 bits for `inplace` graphs of the CPU: a quarter of the memory, and of what long contexts stream.

ONNX Runtime's GroupQueryAttention can keep keys and values as int8 with one fixed scale for each channel of each head
(onnxruntime#28576 and #28578; used here with 1.32). A row is rounded as it is written, by scales that were set once
from text: it depends on no other row, so that speculation stays lossless.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.export.onnx import GraphReport
from outrider.targets.graph_meta import GraphMeta
from outrider.targets.onnx_profiles import InplaceRunner, cache_names
from outrider.targets.onnx_session import CPU, Sessions

__all__ = ["CALIBRATION_TOKENS", "quantize_cache"]

CALIBRATION_TOKENS = 2048
HEADROOM = 1.1  # beyond the largest value of the text that scales are set by; what exceeds it is clipped
SCALES = {"k": 12, "v": 13}  # inputs of GroupQueryAttention


def quantize_cache(report: GraphReport, sequences: Sequence[NDArray[np.int64]]) -> GraphReport:
    """Rewrite a graph so that its cache is int8, with scales from these token sequences; its weights stay.

    Raises ExportError for a graph that has no such operator, or without text.
    """
    scales = _scales(report, sequences)
    _rewrite(report.path, scales)
    return replace(report, meta={**report.meta, "dtypes": {"past_key_0": "int8"}})


def _scales(report: GraphReport, sequences: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
    """Of keys and values of every layer [2 L, 1, G, 1, d], from what the float graph keeps of the text."""
    meta = GraphMeta.from_json(report.meta)
    runner = InplaceRunner(meta, Sessions(report.path, meta.max_context, None, [CPU], None, {}))
    largest = np.zeros((2 * meta.layers, 1, meta.kv_heads, 1, meta.head_dim), np.float32)
    for tokens in _first(sequences, meta.max_context):
        positions = np.arange(len(tokens))
        runner.run(tokens, positions, None, positions[-1:])
        seen = np.abs(runner.cache[:, :, :, : len(tokens)]).max(axis=3, keepdims=True)
        np.maximum(largest, seen, out=largest)
    runner.close()
    if not largest.any():
        raise ExportError("there is no text to set the scales of an 8-bit cache by")
    scales: NDArray[np.float32] = np.maximum(HEADROOM * largest / 127, np.float32(1e-8)).astype(np.float32)
    return scales


def _first(sequences: Iterable[NDArray[np.int64]], most: int) -> Iterable[NDArray[np.int64]]:
    left = CALIBRATION_TOKENS
    for sequence in sequences:
        tokens = np.asarray(sequence[: min(most, left)], np.int64)
        left -= len(tokens)
        if len(tokens):
            yield tokens


def _rewrite(path: Path, scales: NDArray[np.float32]) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(str(path), load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    names = cache_names(len(nodes))
    if not nodes or len(names) != len(scales):
        raise ExportError(f"{path} has {len(nodes)} GroupQueryAttention for {len(scales) // 2} layers")
    for name, values in zip(names, scales, strict=True):
        model.graph.initializer.append(numpy_helper.from_array(values, f"cache.{name}.scale"))
    for layer, node in enumerate(nodes):
        inputs = [*node.input, *[""] * (max(SCALES.values()) + 1 - len(node.input))]
        for part, place in SCALES.items():
            inputs[place] = f"cache.{'key' if part == 'k' else 'value'}_{layer}.scale"
            node.attribute.append(helper.make_attribute(f"{part}_quant_type", "PER_CHANNEL"))
        node.input[:] = inputs
        node.attribute.append(helper.make_attribute("kv_cache_bit_width", 8))
    outside: list[Any] = [*model.graph.input, *model.graph.output]
    for value in outside:
        if value.name.startswith(("past_", "present_")):
            value.type.tensor_type.elem_type = TensorProto.INT8
    onnx.save(model, str(path))
