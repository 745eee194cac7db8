"""The acceptance rules, each against its exact law."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Proposal
from outrider.runtime.sampling import Distribution
from outrider.runtime.verify import Step, depths, match_child, reject_child, tree_mask, walk

GRID = (np.arange(1500) + 0.5) / 1500


def chain(*tokens):
    return Proposal(np.array(tokens, np.int64), np.arange(-1, len(tokens) - 1))


def siblings(tokens, q, rule):
    rows = None if q is None else np.array(q, np.float32)
    return Proposal(np.array(tokens, np.int64), np.full(len(tokens), -1), rows, rule=rule)


def sparse(p):
    ids = np.flatnonzero(p)
    return Distribution(ids, np.asarray(p, np.float64)[ids])


def law(p, proposal):
    """The distribution of the committed token, integrated over the uniform. [V]"""
    candidates = list(range(len(proposal)))
    tokens = [reject_child(sparse(p), candidates, proposal, float(u)).token for u in GRID]
    return np.bincount(tokens, minlength=len(p)) / len(GRID)


P = np.array([0.5, 0.3, 0.2, 0.0])
DRAFTS = {
    "good": np.array([0.4, 0.3, 0.2, 0.1]),
    "equal": P,
    "bad": np.array([0.05, 0.05, 0.2, 0.7]),
    "disjoint": np.array([0.0, 0.0, 0.0, 1.0]),
    "narrow": np.array([0.0, 0.0, 0.6, 0.4]),
}


def drafts_of(q, n, rule):
    """Every draft of n siblings with its probability, and the q row of each."""
    for tokens in itertools.product(range(len(q)), repeat=n):
        chance, left, rows = 1.0, q.copy(), []
        for token in tokens:
            rows.append(left / left.sum())
            chance *= rows[-1][token]
            if rule == "without_replacement":
                left = np.where(np.arange(len(q)) == token, 0.0, left)
                if not left.sum():
                    break
        if chance > 0:
            yield chance, siblings(tokens[: len(rows)], rows, rule)


SIBLINGS = [(draft, "iid", n) for draft in DRAFTS for n in (1, 2)] + [
    (draft, "without_replacement", n)
    for draft, q in DRAFTS.items()
    for n in (1, 2, 3)
    if n <= np.count_nonzero(q)
]


@pytest.mark.parametrize(("draft", "rule", "n"), SIBLINGS)
def test_trap_16_siblings_tried_in_turn_leave_p_alone(draft, rule, n):
    total = sum(chance * law(P, proposal) for chance, proposal in drafts_of(DRAFTS[draft], n, rule))
    np.testing.assert_allclose(total, P, atol=3e-3)


@pytest.mark.parametrize("tokens", [[0], [3], [1, 2], [2, 3, 0]])
def test_trap_3_and_16_deterministic_children_leave_p_alone(tokens):
    np.testing.assert_allclose(law(P, siblings(tokens, None, "deterministic")), P, atol=3e-3)


def test_trap_16_a_shared_q_for_siblings_without_replacement_is_read_as_the_rule_says():
    """The same answer whether q rows were renormalised by the drafter or repeated."""
    q = DRAFTS["bad"]
    for _, renormalised in drafts_of(q, 2, "without_replacement"):
        repeated = siblings(renormalised.tokens, [q, q], "without_replacement")
        np.testing.assert_array_equal(law(P, renormalised), law(P, repeated))


def test_trap_1_acceptance_is_the_sum_of_minima():
    q = DRAFTS["bad"]
    accepted = sum(
        chance * np.mean([reject_child(sparse(P), [0], proposal, float(u)).node == 0 for u in GRID])
        for chance, proposal in drafts_of(q, 1, "iid")
    )
    assert accepted == pytest.approx(np.minimum(P, q).sum(), abs=1e-3)


def test_trap_2_q_over_a_sub_vocabulary_leaves_p_alone():
    ids, q = np.array([1, 3]), np.array([0.6, 0.4], np.float32)
    total = np.zeros(4)
    for column, token in enumerate(ids):
        proposal = Proposal(np.array([token]), np.array([-1]), q[None], ids, "iid")
        total += q[column] * law(P, proposal)
    np.testing.assert_allclose(total, P, atol=3e-3)


def test_trap_4_p_equal_to_q_never_divides_by_nothing():
    p = np.full(3, 1 / 3)
    proposal = siblings([0], [np.full(3, 1 / 3)], "iid")
    for uniform in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        step = reject_child(sparse(p), [0], proposal, uniform)
        assert step.token in (0, 1, 2)


def test_trap_4_probability_zero_is_never_accepted_even_at_uniform_zero():
    step = reject_child(sparse(P), [0], siblings([3], [DRAFTS["bad"]], "iid"), 0.0)
    assert step.node == -1
    assert step.token != 3


def test_trap_4_a_token_that_its_own_q_lacks_is_a_broken_drafter():
    with pytest.raises(ValueError, match="probability 0 in its own q"):
        reject_child(sparse(P), [0], siblings([3], [[0.5, 0.5, 0.0, 0.0]], "iid"), 0.5)


def test_trap_5_the_residual_stays_on_the_targets_support():
    proposal = siblings([3], [DRAFTS["disjoint"]], "iid")
    assert law(P, proposal)[3] == 0.0


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_random_p_and_q_leave_p_alone(seed):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(4, 0.5)), rng.dirichlet(np.full(4, 0.5))
    total = sum(chance * law(p, proposal) for chance, proposal in drafts_of(q, 1, "iid"))
    np.testing.assert_allclose(total, p, atol=3e-3)


def judge_of(choices, proposal):
    tokens = proposal.tokens.tolist()
    return lambda row, candidates: Step(choices[row], match_child(choices[row], candidates, tokens), 1.0)


def test_trap_6_row_i_judges_draft_i_and_a_bonus_comes_only_after_full_acceptance():
    proposal = chain(5, 6, 7)
    full = walk(proposal, judge_of([5, 6, 7, 8], proposal))
    assert (full.tokens, full.accepted, full.evaluated) == ((5, 6, 7, 8), 3, 3)
    partial = walk(proposal, judge_of([5, 9, 7, 8], proposal))
    assert (partial.tokens, partial.accepted, partial.evaluated) == ((5, 9), 1, 2)


def test_trap_17_drafts_after_the_first_rejection_are_not_evaluated():
    proposal = chain(1, 2, 3, 4)
    decision = walk(proposal, judge_of([9, 2, 3, 4, 5], proposal))
    assert (decision.evaluated, decision.accepted) == (1, 0)


def test_trap_9_the_walk_is_cut_at_the_first_stop_token():
    proposal = chain(5, 6, 7)
    decision = walk(proposal, judge_of([5, 6, 7, 8], proposal), stop_ids={6})
    assert decision.tokens == (5, 6)
    assert decision.cut


def test_trap_10_the_walk_is_cut_at_the_limit():
    proposal = chain(5, 6, 7)
    decision = walk(proposal, judge_of([5, 6, 7, 8], proposal), limit=2)
    assert decision.tokens == (5, 6)
    assert decision.cut


def test_trap_16_a_tree_is_followed_to_the_child_that_equals_the_sample():
    proposal = Proposal(np.array([5, 6, 7, 8]), np.array([-1, -1, 0, 1]))
    decision = walk(proposal, judge_of({0: 6, 2: 8, 4: 1}, proposal))
    assert decision.tokens == (6, 8, 1)
    assert decision.path == (1, 3)


def test_an_empty_proposal_is_a_plain_step():
    proposal = chain()
    decision = walk(proposal, judge_of([4], proposal))
    assert (decision.tokens, decision.evaluated) == ((4,), 0)


def test_trap_16_mask_is_ancestor_or_self_and_position_is_depth():
    parents = np.array([-1, -1, 0, 2, 1])
    np.testing.assert_array_equal(depths(parents), [1, 1, 2, 3, 2])
    ancestors = [[0], [1], [0, 2], [0, 2, 3], [1, 4]]
    np.testing.assert_array_equal(
        tree_mask(parents), [[column in row for column in range(5)] for row in ancestors]
    )
