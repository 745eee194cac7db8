"""Rows of which a graph gave only the largest logits: when they are enough to decide a token, and what of them decides.

The result is the one that the whole row gives, to the last bit: what was left out is smaller than all that decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.contracts import (
    BoolArray,
    Float32Array,
    Graph,
    IntArray,
    LogitsRequest,
    Output,
    Sampling,
    TopK,
    TopRows,
)
from outrider.errors import BackendError
from outrider.runtime.sampling import Distribution

__all__ = ["enough", "forward_rows", "leading", "named", "needed", "usual_request"]


def needed(sampling: Sampling) -> int:
    """How many of a row's largest logits decide its token and margin; 0 where all of them do."""
    if sampling.greedy:
        return 2
    return sampling.top_k + 1 if sampling.top_k else 0  # the first that is cut tells how near the cut was


def usual_request(graph: Graph) -> LogitsRequest:
    """What greedy decoding asks of a graph, for those who time a verify."""
    most = getattr(graph, "top", 0)
    return TopK(most) if most >= needed(Sampling()) else "all"


def forward_rows(
    graph: Graph,
    wanted: int,
    vocab_limit: int,
    tokens: Sequence[int] | IntArray,
    positions: IntArray | None = None,
    mask: BoolArray | None = None,
    logits: LogitsRequest = "last",
) -> tuple[Output, Float32Array | TopRows]:
    """A forward and its rows: only the largest logits of each where the graph picks them itself and they decide.

    `wanted` as from `needed`. Where they turn out not to decide, the forward runs again for whole rows. Raises
    BackendError for a graph that returns no rows.
    """
    most = getattr(graph, "top", 0)  # of graphs that reduce their rows on the device
    if (logits == "all" or len(tokens) == 1) and 0 < wanted <= most:
        output = graph.forward(tokens, positions, mask, TopK(most))
        rows = output.logits
        if isinstance(rows, TopRows) and enough(rows, wanted, graph.vocab_size, vocab_limit):
            return output, rows
    output = graph.forward(tokens, positions, mask, logits)
    if not isinstance(output.logits, np.ndarray):
        raise BackendError("the graph returned no logits where rows were asked for")
    return output, output.logits


def enough(rows: TopRows, wanted: int, vocab_size: int, vocab_limit: int) -> bool:
    """Whether the `wanted` largest ids below `vocab_limit` of every row are there, with all that tie with the last."""
    n = rows.ids.shape[1]
    if n < min(wanted, vocab_size) or not np.isfinite(rows.logsumexp).all():
        return False
    last = rows.values[:, min(wanted, n) - 1]
    whole = n == vocab_size or bool((last > rows.values[:, -1]).all())
    padding = (rows.ids >= vocab_limit) & (rows.values >= last[:, None])
    return whole and not padding.any()


def leading(rows: TopRows, row: int, wanted: int) -> tuple[IntArray, Float32Array]:
    """The ids that decide a row, ascending, and their logits."""
    values = rows.values[row]
    kept = np.flatnonzero(values >= values[min(wanted, len(values)) - 1])
    kept = kept[np.argsort(rows.ids[row, kept])]
    return rows.ids[row, kept], values[kept]


def named(chances: Distribution, ids: IntArray) -> Distribution:
    """A distribution over columns as one over the ids that they stand for."""
    return Distribution(ids if chances.ids is None else ids[chances.ids], chances.probs, chances.slack)
