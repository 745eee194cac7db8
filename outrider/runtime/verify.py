"""Which drafted tokens survive: the acceptance rules, as pure functions.

Two rules are lossless for sampling. `match` draws the target's own token at each node and goes on while
a drafted child equals it. `reject` is speculative rejection sampling (Leviathan et al., arXiv 2211.17192;
Chen et al., arXiv 2302.01318), for siblings applied in turn on what the earlier ones left over
(SpecInfer, arXiv 2305.09781; recursive rejection sampling, arXiv 2402.14160). Greedy decoding is the
one-hot case of `match`.

Row r of a verify forward is the root (r = 0: the last committed token) or drafted node r - 1, and holds
the target's prediction of what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.contracts import Proposal
from outrider.runtime.sampling import Distribution, draw, probability

__all__ = ["Decision", "Step", "depths", "match_child", "reject_child", "tree_mask", "walk"]

Float64Array = NDArray[np.float64]

_TINY_RESIDUAL = 1e-12


@dataclass(frozen=True)
class Step:
    """The verdict at one row: the committed token, the drafted node that equals it (-1: none), its margin.

    `margin` is how far the deciding numbers were from deciding otherwise (logits or probability).
    """

    token: int
    node: int
    margin: float


@dataclass(frozen=True)
class Decision:
    """What a round commits.

    `tokens` are the accepted drafts and then the target's own token (correction or bonus); `path` the
    accepted nodes; `evaluated` how many depths had a draft that was tested; `cut` is True when a stop
    token or the limit ended the walk before the target's rules did.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    evaluated: int
    margins: tuple[float, ...]
    cut: bool

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens."""
        return len(self.path)


def walk(
    proposal: Proposal,
    judge: Callable[[int, list[int]], Step],
    stop_ids: Collection[int] = (),
    limit: int | None = None,
) -> Decision:
    """Walk from the root along accepted drafts; `judge(row, candidates)` decides each row.

    Rows are judged in order and only while they matter, so that `judge` may extend a prefix (penalties)
    with each token that it returns. The walk ends after a token of `stop_ids` or `limit` tokens.
    """
    tokens: list[int] = []
    path: list[int] = []
    margins: list[float] = []
    evaluated, row, cut = 0, 0, False
    parents = proposal.parents.tolist()
    while not cut:
        candidates = [node for node, parent in enumerate(parents) if parent == row - 1]
        step = judge(row, candidates)
        tokens.append(step.token)
        margins.append(step.margin)
        evaluated += bool(candidates)
        cut = step.token in stop_ids or len(tokens) == limit
        if step.node < 0:
            break
        path.append(step.node)
        row = step.node + 1
    return Decision(tuple(tokens), tuple(path), evaluated, tuple(margins), cut)


def match_child(token: int, candidates: Sequence[int], tokens: Sequence[int]) -> int:
    """The first candidate node whose drafted token equals the target's own, or -1."""
    return next((node for node in candidates if tokens[node] == token), -1)


def reject_child(target: Distribution, candidates: Sequence[int], proposal: Proposal, uniform: float) -> Step:
    """Rejection sampling among sibling drafts at one row, with one uniform for all its decisions.

    Candidate c, drawn from q, is accepted with probability min(1, p(c) / q(c)); otherwise p becomes
    norm(max(0, p - q)) and the next sibling is tried. After a rejection the uniform is rescaled from
    [ratio, 1) to [0, 1), where it is uniform again and independent of the verdict. When all are
    rejected, the token is drawn from what is left of p.
    """
    margin = 1.0
    for tried, node in enumerate(candidates):
        token = int(proposal.tokens[node])
        q = _draft_distribution(proposal, node, candidates[:tried])
        drawn_with = probability(q, token)
        if drawn_with <= 0.0:
            raise ValueError(
                f"drafted token {token} has probability 0 in its own q; q is not what was drawn from"
            )
        ratio = probability(target, token) / drawn_with
        margin = min(margin, abs(uniform - ratio))
        if uniform < ratio:
            return Step(token, node, margin)
        target = _residual(target, q)
        uniform = min((uniform - ratio) / (1.0 - ratio), np.nextafter(1.0, 0.0))
    token, edge = draw(target, uniform)
    return Step(token, -1, min(margin, edge))


def _draft_distribution(proposal: Proposal, node: int, earlier: Sequence[int]) -> Distribution:
    """What the token of `node` was drawn from; siblings drawn before are out under `without_replacement`."""
    if proposal.q is None:
        return Distribution(np.array([proposal.tokens[node]], np.int64), np.ones(1))
    weights = proposal.q[node].astype(np.float64)  # [V']
    if proposal.rule == "without_replacement" and len(earlier):
        drawn = proposal.tokens[np.asarray(earlier)]
        weights[drawn if proposal.vocab_ids is None else np.searchsorted(proposal.vocab_ids, drawn)] = 0.0
    return Distribution(proposal.vocab_ids, weights / weights.sum())


def _residual(p: Distribution, q: Distribution) -> Distribution:
    """norm(max(0, p - q)) on p's support; p itself when rounding left nothing (p and q are equal)."""
    left = np.maximum(p.probs - _aligned(p, q), 0.0)
    total = float(left.sum())
    return p if total <= _TINY_RESIDUAL else Distribution(p.ids, left / total, p.slack)


def _aligned(p: Distribution, q: Distribution) -> Float64Array:
    """q's probabilities at p's ids; 0 where q has no such id."""
    ids = np.arange(len(p.probs)) if p.ids is None else p.ids
    if q.ids is None:
        inside = ids < len(q.probs)
        return np.where(inside, q.probs[np.where(inside, ids, 0)], 0.0)
    index = np.minimum(np.searchsorted(q.ids, ids), len(q.ids) - 1)
    return np.where(q.ids[index] == ids, q.probs[index], 0.0)


def depths(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Depth of every node, 1 for children of the root. [n] -> [n]"""
    depth = np.empty(len(parents), np.int64)
    for node, parent in enumerate(parents):
        depth[node] = 1 if parent < 0 else depth[parent] + 1
    return depth


def tree_mask(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Ancestor-or-self mask over the nodes. [n] -> [n, n]"""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask
