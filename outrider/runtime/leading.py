"""Rows of which a graph gave only the largest logits: when they are enough to decide a token, and what of them decides.

The result is the one that the whole row gives, to the last bit: what was left out is smaller than all that decides.
"""

from __future__ import annotations

import numpy as np

from outrider.contracts import Float32Array, IntArray, Sampling, TopRows
from outrider.runtime.sampling import Distribution

__all__ = ["enough", "leading", "named", "needed"]


def needed(sampling: Sampling) -> int:
    """How many of a row's largest logits decide its token and margin; 0 where all of them do."""
    if sampling.greedy:
        return 2
    return sampling.top_k + 1 if sampling.top_k else 0  # the first that is cut tells how near the cut was


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
