"""What quantizing costs: perplexity, divergence and agreement with a float reference, acceptance of a pair.

Everything is teacher-forced: row i of the logits has seen tokens[: i + 1] and predicts tokens[i + 1]. Rows
come in chunks, so that a large vocabulary times a long text is never held at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from outrider.contracts import Float32Array, Graph, IntArray
from outrider.errors import ContextError, OutriderError, UsageError

__all__ = [
    "Acceptance",
    "GraphQuality",
    "Quality",
    "compare",
    "evaluation_text",
    "graph_quality",
    "logit_rows",
    "pair_acceptance",
]

CONFIDENT_GAP = 0.5  # in logits, between the reference's first and second choice
CHUNK_ROWS = 64


@dataclass(frozen=True)
class Quality:
    """A model against its float reference on one text."""

    perplexity_reference: float
    perplexity: float
    kl_mean: float  # nats a token, KL(reference || quantized)
    top1_agreement: float
    top1_agreement_confident: float | None  # where the reference's gap exceeds 0.5; None = nowhere
    tokens: int  # predicted tokens

    @property
    def perplexity_increase(self) -> float:
        """Relative increase of the perplexity: 0.03 is 3 % worse."""
        return self.perplexity / self.perplexity_reference - 1


@dataclass(frozen=True)
class Acceptance:
    """How often a target would take its draft's token, on the target's own text."""

    greedy_match: float  # both take their most likely token
    sum_min_pq: float  # mean of Σ min(p, q) at temperature 1
    tokens: int


@dataclass(frozen=True)
class GraphQuality:
    """A graph against its float reference, teacher-forced on the target's own text.

    `top1_agreement_clear` counts the `clear` positions, where the reference's best two logits are more than 0.5
    apart. For drafts, `sum_min_pq` is the mean of Σ min(p, q) with the target at temperature 1 and `greedy_match`
    how often both take the same token; beside them the same of the float draft, and the standard error of the mean
    difference `sum_min_pq_float - sum_min_pq`.
    """

    positions: int
    max_abs_error: float
    kl: float
    top1_agreement: float
    clear: int
    top1_agreement_clear: float | None  # None: no position is clear
    sum_min_pq: float | None = None
    sum_min_pq_float: float | None = None
    sum_min_pq_error: float | None = None
    greedy_match: float | None = None
    greedy_match_float: float | None = None


def evaluation_text() -> str:
    """The WikiText-2 excerpt on which quality is measured."""
    return files("outrider.quantize").joinpath("data/wikitext2_eval.txt").read_text(encoding="utf-8")


def compare(
    reference: Iterable[Float32Array],  # chunks of [R, V]
    quantized: Iterable[Float32Array],  # chunks of the same rows, [R, V']
    tokens: Sequence[int] | IntArray,  # [T]
    ids: IntArray | None = None,  # [V']
) -> Quality:
    """Measure one stream of logit rows against another over the tokens they read.

    A vocabulary padded to another size is cut to the smaller one. The last row predicts nothing and is left
    out. `ids` are those of the quantized columns where its head was trimmed: both sides are then
    distributions over these, and the perplexities are of the tokens among them. Raises UsageError when the streams
    disagree on the rows or hold fewer rows than tokens to predict.
    """
    targets = np.asarray(tokens, np.int64)[1:]
    if ids is not None:
        reference = (rows[:, ids] for rows in reference)
        targets = np.where(np.isin(targets, ids), np.searchsorted(ids, targets), -1)
    columns = [
        _compare_rows(ours, theirs, targets[start : start + len(ours)])
        for start, ours, theirs in _paired(reference, quantized, len(targets))
    ]
    nll_reference, nll, kl, same, confident = np.concatenate(columns, axis=1)  # each [T - 1]
    sure = confident > 0
    return Quality(
        perplexity_reference=float(np.exp(nll_reference[targets >= 0].mean())),
        perplexity=float(np.exp(nll[targets >= 0].mean())),
        kl_mean=float(kl.mean()),
        top1_agreement=float(same.mean()),
        top1_agreement_confident=float(same[sure].mean()) if sure.any() else None,
        tokens=len(targets),
    )


def pair_acceptance(
    target: Iterable[Float32Array],
    draft: Iterable[Float32Array],
    tokens: int,
    ids: IntArray | None = None,  # [V']
) -> Acceptance:
    """Acceptance of a pair from their logit rows over the target's own text of so many tokens.

    The last row counts too: it proposes the token after the text. `ids` are those of the columns of a draft whose
    head was trimmed; it gives all others probability 0. Raises UsageError as `compare` does.
    """
    columns = [
        _acceptance_rows(ours, theirs, ids)
        for _, ours, theirs in _paired(target, draft, tokens, common=ids is None)
    ]
    match, shared = np.concatenate(columns, axis=1)
    return Acceptance(float(match.mean()), float(shared.mean()), tokens)


def graph_quality(
    reference: Iterable[Float32Array],  # chunks of [R, V]
    ours: Iterable[Float32Array],  # chunks of the same rows, [R, V']
    target: Iterable[Float32Array] | None = None,  # of a draft: chunks of the target's rows, [R, V'']
    ids: IntArray | None = None,  # [V']
) -> GraphQuality:
    """A graph beside the float reference on the same rows; for a draft, also its acceptance by the target.

    `ids` are those of the columns of a draft whose head was trimmed; the reference is then trimmed alike.
    Raises UsageError when the streams disagree on the rows or hold none.
    """
    rows = [*_quality_rows(reference, ours, target, ids)]
    if not rows:
        raise UsageError("no rows of logits; nothing can be measured")
    error, kl, same, clear, *shared = np.concatenate(rows, axis=1)
    sure = clear > 0
    common = {
        "positions": len(kl),
        "max_abs_error": float(error.max()),
        "kl": float(kl.mean()),
        "top1_agreement": float(same.mean()),
        "clear": int(sure.sum()),
        "top1_agreement_clear": float(same[sure].mean()) if sure.any() else None,
    }
    if target is None:
        return GraphQuality(**common)  # type: ignore[arg-type]
    match, overlap, match_float, overlap_float = shared
    return GraphQuality(
        **common,  # type: ignore[arg-type]
        sum_min_pq=float(overlap.mean()),
        sum_min_pq_float=float(overlap_float.mean()),
        sum_min_pq_error=float((overlap_float - overlap).std() / np.sqrt(len(kl))),
        greedy_match=float(match.mean()),
        greedy_match_float=float(match_float.mean()),
    )


def _quality_rows(
    reference: Iterable[Float32Array],
    ours: Iterable[Float32Array],
    target: Iterable[Float32Array] | None,
    ids: IntArray | None,
) -> Iterator[NDArray[np.float64]]:
    """Per row: largest error, KL, equal choice, a clear one; of a draft: match and overlap, ours and in float."""
    pairs = zip(reference, ours, strict=True)
    targets = zip(pairs, target, strict=True) if target is not None else zip(pairs, repeat(None))
    for (exact, found), wanted in targets:
        vocab = min(exact.shape[1], found.shape[1])
        exact, found = (exact[:, :vocab], found[:, :vocab]) if ids is None else (exact[:, ids], found)
        if len(exact) != len(found) or (wanted is not None and len(wanted) != len(found)):
            raise UsageError(f"chunks of {len(exact)} and {len(found)} rows cannot be compared")
        compared = _compare_rows(exact, found, np.zeros(len(found), np.int64))[2:]
        columns = [np.abs(exact - found).max(axis=1)[None], compared]
        if wanted is not None:
            wanted = wanted if ids is not None else wanted[:, :vocab]
            columns += [_acceptance_rows(wanted, rows[:, : wanted.shape[1]], ids) for rows in (found, exact)]
        yield np.concatenate(columns)


def logit_rows(
    graph: Graph, tokens: Sequence[int] | IntArray, chunk: int = CHUNK_ROWS
) -> Iterator[Float32Array]:
    """Logits of every row of a text, a chunk at a time; a chunk is valid until the next one is asked for.

    Raises ContextError when the text is longer than the graph's context.
    """
    ids = np.asarray(tokens, np.int64)
    if len(ids) > graph.max_context:
        raise ContextError(f"{len(ids)} tokens do not fit a context of {graph.max_context}; evaluate fewer")
    graph.truncate(0)
    try:
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            logits = graph.forward(part, logits="all").logits
            if not isinstance(logits, np.ndarray):
                raise OutriderError(
                    f"the graph returned {type(logits).__name__} where all logits were asked for"
                )
            yield logits
            graph.commit(range(len(part)))
    finally:
        graph.truncate(0)


def _paired(
    left: Iterable[Float32Array], right: Iterable[Float32Array], rows: int, common: bool = True
) -> Iterator[tuple[int, Float32Array, Float32Array]]:
    """Chunks of both streams, `rows` in all, with the row each starts at; over their common vocabulary, or whole."""
    start = 0
    for ours, theirs in zip(left, right, strict=True):
        if len(ours) != len(theirs):
            raise UsageError(f"chunks of {len(ours)} and {len(theirs)} rows cannot be compared")
        count = min(len(ours), rows - start)
        vocab = min(ours.shape[1], theirs.shape[1]) if common else None
        if count > 0:
            yield start, ours[:count, :vocab], theirs[:count, :vocab]
        start += max(count, 0)
    if start < rows or rows < 1:
        raise UsageError(f"{start} rows of logits for {rows} tokens to predict; nothing can be measured")


def _compare_rows(reference: Float32Array, ours: Float32Array, targets: IntArray) -> NDArray[np.float64]:
    index = np.arange(len(targets))
    total_reference, total = _logsumexp(reference), _logsumexp(ours)  # [R]
    p = np.exp(reference - total_reference[:, None])
    divergence = np.einsum("rv,rv->r", p, reference - ours) - total_reference + total
    top = np.partition(reference, -2, axis=-1)[:, -2:]
    return np.stack(
        [
            total_reference - reference[index, targets],
            total - ours[index, targets],
            np.maximum(divergence, 0),
            reference.argmax(axis=-1) == ours.argmax(axis=-1),
            top[:, 1] - top[:, 0] > CONFIDENT_GAP,
        ]
    ).astype(np.float64)


def _acceptance_rows(target: Float32Array, draft: Float32Array, ids: IntArray | None) -> NDArray[np.float64]:
    p = np.exp(target - _logsumexp(target)[:, None])
    q = np.exp(draft - _logsumexp(draft)[:, None])
    choice = draft.argmax(axis=-1)
    match = target.argmax(axis=-1) == (choice if ids is None else ids[choice])
    p = p if ids is None else p[:, ids]
    return np.stack([match.astype(np.float64), np.minimum(p, q).sum(axis=-1, dtype=np.float64)])


def _logsumexp(rows: Float32Array) -> Float32Array:
    peak = rows.max(axis=-1)
    total: Float32Array = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=-1))
    return total
