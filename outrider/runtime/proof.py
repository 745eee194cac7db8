"""What can be proven about one graph: its logits against the float reference, and row independence.

Pure functions over a `Graph`; `check.py` applies them to a bundle. A verify row may depend only on the
committed prefix and its own ancestors; a graph whose rows feel later rows is not a lossless target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.contracts import Float32Array, Graph, IntArray
from outrider.targets.graph_meta import GraphMeta

__all__ = [
    "Agreement",
    "RowIndependence",
    "agreement",
    "narrow_widths",
    "probe_rows",
    "row_independence",
    "sample_rows",
]

WIDTHS = (1, 2, 3, 5, 8)


@dataclass(frozen=True)
class Agreement:
    """Logits [R, V] against a reference: largest difference, share of equal argmax, mean KL(ref || ours)."""

    max_abs_error: float
    top1_agreement: float
    kl: float


@dataclass(frozen=True)
class RowIndependence:
    """How far the logits of a row moved, in logits, and their spread (standard deviation over the vocabulary).

    `suffix`: the same width, other later tokens: anything but 0 means that rows see each other.
    `width`: the same tokens at other widths, where kernels may add in another order. With 8-bit activations
    that noise grows from layer to layer; 0 means that the text cannot depend on the draft at all.
    """

    suffix: float
    width: float
    spread: float


def agreement(ours: Float32Array, reference: Float32Array, ids: IntArray | None = None) -> Agreement:
    """Compare logits [R, V] with a reference [R, V']; padding columns past the narrower one are left out.

    `ids` [V] are those of our columns where the head was trimmed: the reference's same columns are compared.
    """
    reference = reference if ids is None else reference[:, ids]
    V = min(ours.shape[1], reference.shape[1])
    p, q = _log_softmax(reference[:, :V]), _log_softmax(ours[:, :V])
    return Agreement(
        max_abs_error=float(np.abs(ours[:, :V] - reference[:, :V]).max()),
        top1_agreement=float((p.argmax(1) == q.argmax(1)).mean()),
        kl=float(np.maximum((np.exp(p) * (p - q)).sum(1), 0.0).mean()),
    )


def narrow_widths(graph: Graph) -> tuple[int, ...]:
    """The static widths whose runs return all rows: a function for a chunk of the prompt may return one."""
    described = getattr(graph, "meta", None)
    return described.all_rows_widths if isinstance(described, GraphMeta) else graph.widths or ()


def sample_rows(
    graph: Graph,
    tokens: IntArray,  # [S]
    rows: Sequence[int],
    tell: Callable[[str, float], None] | None = None,
) -> Float32Array:
    """Logits [R, V] of some rows of a short text, in the widest steps that return all rows.

    `tell(stage, part)` is called after each step; the stage says how long the first took.
    """
    graph.truncate(0)
    step = max(narrow_widths(graph), default=len(tokens))
    starts = range(0, len(tokens), step)
    found, begin, wanted, stage = [], time.monotonic(), set(rows), ""
    for done, start in enumerate(starts, 1):
        chunk = tokens[start : start + step]
        here = [row - start for row in range(start, start + len(chunk)) if row in wanted]
        output = graph.forward(chunk, logits=here or "none")
        if here:
            assert isinstance(output.logits, np.ndarray)
            found.append(output.logits.copy())
        graph.commit(range(len(chunk)))
        stage = stage or f"{len(starts)} steps of {time.monotonic() - begin:.1f} s"
        if tell:
            tell(stage, done / len(starts))
    graph.truncate(0)
    return np.concatenate(found)


def probe_rows(graph: Graph, tokens: IntArray, rows: Sequence[int]) -> Float32Array:
    """Logits [R, V] of some rows of `tokens`, run from an empty cache in whatever widths the graph has."""
    graph.truncate(0)
    widest = max(graph.widths) if graph.widths else len(tokens)
    found = []
    for start in range(0, len(tokens), widest):
        chunk = tokens[start : start + widest]
        wanted = [row - start for row in rows if start <= row < start + len(chunk)]
        output = graph.forward(chunk, logits=wanted or "none")
        if wanted:
            assert isinstance(output.logits, np.ndarray)
            found.append(output.logits.copy())
        graph.commit(range(len(chunk)))
    graph.truncate(0)
    return np.concatenate(found)


def row_independence(graph: Graph, tokens: IntArray) -> RowIndependence:
    """Run one prefix at every width with two different suffixes and compare each row with what it was alone.

    `tokens`, at least 5, are a prefix, up to 8 tokens to verify, and as many that are the other suffix.
    """
    count = min(max(WIDTHS), (len(tokens) - 1) // 2)
    prefix, verify, other = tokens[: -2 * count], tokens[-2 * count : -count], tokens[-count:]
    widest = min(count, max(graph.widths or WIDTHS))
    widths = sorted({width for width in (*WIDTHS, *(graph.widths or ())) if width <= widest})
    alone = _rows_one_by_one(graph, prefix, verify)
    spread = float(alone.std(axis=1).mean())
    by_suffix = by_width = 0.0
    for width in widths:
        first = _verify(graph, prefix, verify[:width])
        by_width = max(by_width, float(np.abs(first - alone[:width]).max()))
        for kept in range(1, width):
            mixed = np.concatenate([verify[:kept], other[kept:width]])
            second = _verify(graph, prefix, mixed)
            by_suffix = max(by_suffix, float(np.abs(second[:kept] - first[:kept]).max()))
    graph.truncate(0)
    return RowIndependence(by_suffix, by_width, spread)


def _rows_one_by_one(graph: Graph, prefix: IntArray, tokens: IntArray) -> Float32Array:
    _prefill(graph, prefix)
    rows = []
    for token in tokens:
        logits = graph.forward([int(token)], logits="all").logits
        assert isinstance(logits, np.ndarray)
        rows.append(logits[0].copy())
        graph.commit([0])
    return np.stack(rows)  # [S, V]


def _verify(graph: Graph, prefix: IntArray, tokens: IntArray) -> Float32Array:
    if graph.length != len(prefix):
        _prefill(graph, prefix)
    logits = graph.forward(tokens, logits="all").logits
    assert isinstance(logits, np.ndarray)
    return logits.copy()


def _prefill(graph: Graph, prefix: IntArray) -> None:
    graph.truncate(0)
    widest = max(graph.widths) if graph.widths else len(prefix)
    for start in range(0, len(prefix), widest):
        chunk = prefix[start : start + widest]
        graph.forward(chunk, logits="none")
        graph.commit(range(len(chunk)))


def _log_softmax(logits: Float32Array) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
