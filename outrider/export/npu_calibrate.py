"""Ranges of an NPU graph's activations, from its float form over real text.

One graph reads whole sequences over an empty cache, so that no state goes from one run to the next; its tensors
have the names of those of every width.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UsageError
from outrider.export.config import ModelConfig
from outrider.export.npu_graph import NpuGraph, Numerics, lay_out
from outrider.export.npu_qdq import write_float
from outrider.export.npu_scales import size_of, top_of
from outrider.export.rope import rope_tables
from outrider.export.slots import SlotWeights
from outrider.quantize.ranges import Range, activation_ranges

__all__ = ["MIN_TOKENS", "calibrate_ranges"]

WIDTH = 256  # tokens of one calibration sequence
MIN_TOKENS = 64
MEMORY_MB = 1500  # of exposed tensors at a time
MASKED = np.float32(-1e4)  # in float, nothing needs to be bounded
Embed = Callable[[NDArray[np.int64]], NDArray[np.float32]]  # [S] -> [S, D]


def calibrate_ranges(
    config: ModelConfig,
    weights: SlotWeights,
    embed: Embed,
    sequences: Sequence[Sequence[int]],
    *,
    max_context: int,
    numerics: Numerics | None = None,
    progress: Callable[[float], None] | None = None,
    scratch: Path | None = None,
) -> dict[str, Range]:
    """The range of every activation over real text, and of the largest score of each row before a softmax.

    The float model is written below the folder `scratch`, by default the system's for temporary files, and removed.
    Raises UsageError when there is too little text to see ranges.
    """
    tokens = sum(len(sequence) for sequence in sequences)
    if tokens < MIN_TOKENS:
        raise UsageError(
            f"the calibration text has {tokens} tokens; ranges need at least {MIN_TOKENS}, better a few thousand"
        )
    width = min(WIDTH, max_context, max(len(sequence) for sequence in sequences))
    graph = lay_out(
        config, weights, max_context=max_context, width=width, rows=width, cache=1, numerics=numerics
    )
    feeds = [calibration_inputs(config, graph, embed(ids), max_context) for ids in _chunks(sequences, width)]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "float.onnx"
        write_float(graph, weights, path)
        return activation_ranges(path, feeds, watch=_watched(graph), memory_mb=MEMORY_MB, progress=progress)


def _watched(graph: NpuGraph) -> list[str]:
    """Tensors whose range does not follow from the graph, and the row statistics that `write_float` adds."""
    known = graph.fixed.keys() | graph.vectors.keys() | graph.masked.keys()
    outputs = [node.output for node in graph.nodes if node.output not in known]
    outputs = [name for name in outputs if not name.startswith("mask_")]
    return [*outputs, *map(top_of, graph.masked), *map(size_of, sorted(graph.sized))]


def _chunks(sequences: Sequence[Sequence[int]], width: int) -> list[NDArray[np.int64]]:
    """Sequences of exactly `width` tokens; short ones are repeated, so that no row is padding."""
    chunks = []
    for sequence in sequences:
        for start in range(0, len(sequence), width):
            piece = np.asarray(sequence[start : start + width], np.int64)
            if len(piece) == width or start == 0:
                chunks.append(np.resize(piece, width))
    return chunks


def calibration_inputs(
    config: ModelConfig, graph: NpuGraph, x: NDArray[np.float32], max_context: int
) -> dict[str, NDArray[Any]]:
    """The inputs of one forward over an empty cache, for embedding rows x [W, D]."""
    W = len(x)
    distance = np.arange(W)[:, None] - np.arange(W)[None, :]
    inputs: dict[str, NDArray[Any]] = {"x": x[None], "rows": np.arange(W, dtype=np.int32)}
    for kind in sorted(set(config.layer_types)):
        for part, table in zip(("cos", "sin"), rope_tables(config, kind, max_context), strict=True):
            inputs[f"{part}_{kind}"] = table[None, None, :W]
    for name, value in graph.inputs.items():
        if name.startswith("mask_"):
            window = config.sliding_window if name == "mask_sliding" else None
            seen = (distance >= 0) & (distance < (window or W))
            mask = np.full(value.shape, MASKED)
            mask[..., value.shape[-1] - W :] = np.where(seen, np.float32(0), MASKED)
            inputs[name] = mask
        elif name.startswith("past_"):
            inputs[name] = np.zeros(value.shape, np.float32)
    return inputs
