"""Lookup finds what was said before; a draft model keeps its cache, window and q right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Sampling
from outrider.errors import UsageError
from outrider.runtime.context import Context, common_prefix
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.sampling import distribution
from outrider.runtime.uniforms import Uniforms, draft_generator
from outrider.targets.fake import FakeGraph, random_logits

GREEDY = Sampling()
RNG = np.random.default_rng(0)


def look_up(tokens, k=4, **options):
    return LookupDrafter(**options).propose(Context(tokens), k, GREEDY, RNG).tokens.tolist()


def test_lookup_continues_the_longest_earlier_match():
    assert look_up([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3]) == [4, 5, 9, 2]


def test_lookup_drafts_what_most_of_equal_matches_went_on_with_and_of_equals_the_earliest():
    assert look_up([1, 2, 5, 0, 1, 2, 6, 8, 1, 2, 6, 9, 3, 1, 2], k=2) == [6, 8]
    assert look_up([1, 2, 5, 0, 1, 2, 6, 0, 3, 1, 2], k=2) == [5, 0]


def test_lookup_prefers_the_place_whose_match_reaches_back_further():
    text = [7, 8, 1, 2, 3, 4, 50, 0, 9, 1, 2, 3, 4, 60, 0, 7, 8, 1, 2, 3, 4]
    assert look_up(text, k=1) == [50]


def test_a_miss_is_an_empty_proposal_and_no_kind():
    drafter = LookupDrafter()
    context = Context([1, 2, 3, 4])
    assert drafter.kind(context) is None
    assert len(drafter.propose(context, 4, GREEDY, RNG)) == 0


def test_lookup_goes_on_from_drafted_tokens_at_the_end_of_the_text():
    assert look_up([5, 1, 2, 3, 1, 2, 3, 1, 2, 3], k=8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_the_kind_is_the_length_of_the_match():
    words = list(range(10, 50))
    kinds = [
        LookupDrafter().kind(Context([*words, 99, *words[10 : 10 + n]])) for n in (1, 2, 3, 4, 7, 8, 16, 30)
    ]
    assert kinds == ["1", "2", "3", "4", "4", "8", "16", "16"]
    assert LookupDrafter().kind(Context([*words, 99, *words[:35]])) == "32"


def test_places_that_agree_make_a_match_count_for_more_and_places_that_disagree_for_nothing():
    def kind(*followers):
        text = [token for number, after in enumerate(followers) for token in (1, 2, after, 100 + number)]
        return LookupDrafter().kind(Context([*text, 1, 2]))

    assert [kind(5), kind(5, 5), kind(*[5] * 4), kind(*[5] * 20)] == ["2", "4", "8", "16"]
    assert [kind(5, 6), kind(5, 5, 6), kind(5, 6, 7), kind(5, 5, 5, 6)] == ["0", "2", "0", "4"]


def slow_lookup(tokens):
    """What most of the latest eight places of the longest match went on with, by comparing everywhere."""
    reaches = {}
    for place in range(1, len(tokens)):
        reach = 0
        while reach < min(place, 32) and tokens[place - 1 - reach] == tokens[-1 - reach]:
            reach += 1
        reaches[place] = reach
    latest = [place for place, reach in reaches.items() if reach >= min(4, max(reaches.values()))][-8:]
    longest = max((reaches[place] for place in latest), default=0)
    votes = [tokens[place] for place in latest if reaches[place] == longest > 0]
    return [max(votes, key=votes.count)] if votes else []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 5))
@settings(deadline=None)
def test_an_index_that_grew_with_the_text_equals_one_built_at_once(tokens, step):
    grown, context = LookupDrafter(), Context(tokens[:1])
    for start in range(1, len(tokens), step):
        context.extend(tokens[start : start + step])
        grown.kind(context)
    again = LookupDrafter().propose(Context(tokens), 5, GREEDY, RNG)
    np.testing.assert_array_equal(grown.propose(context, 5, GREEDY, RNG).tokens, again.tokens)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
@settings(deadline=None)
def test_the_first_drafted_token_is_the_choice_of_the_longest_matches(tokens):
    assert look_up(tokens, k=1) == slow_lookup(tokens)


def test_lookup_starts_over_with_another_text():
    drafter = LookupDrafter()
    drafter.kind(Context([1, 2, 3, 1, 2]))
    assert drafter.kind(Context([4, 5, 6, 1, 2])) is None


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (3, 0)])
def test_impossible_ngrams_are_refused(longest, shortest):
    with pytest.raises(UsageError, match="min_ngram"):
        LookupDrafter(longest, shortest)


VOCAB = 12
LOGITS = random_logits(VOCAB, seed=1, order=None)


def model(max_context=64, min_confidence=0.0, **options):
    return ModelDrafter(
        FakeGraph(VOCAB, max_context, logits=LOGITS, **options), min_confidence=min_confidence
    )


def greedy_after(tokens, n):
    out = []
    for _ in range(n):
        out.append(int(LOGITS((*tokens, *out)).argmax()))
    return out


def test_a_model_drafts_its_own_greedy_continuation_as_a_deterministic_chain():
    proposal = model().propose(Context([1, 2]), 4, GREEDY, RNG)
    assert proposal.tokens.tolist() == greedy_after([1, 2], 4)
    assert proposal.q is None
    assert proposal.is_chain


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)), max_size=8
    ),
    st.integers(1, 5),
    st.lists(st.integers(1, 4), max_size=2),
)
@settings(deadline=None)
def test_after_any_accepts_and_rejections_the_draft_sees_exactly_the_context(history, k, pieces):
    drafter, context = model(max_context=200), Context([1, 2, 3])
    for agreed, others in history:
        for most in pieces:
            behind = drafter.backlog(context)
            assert drafter.catch_up(context, k, GREEDY, most) <= most
            assert drafter.backlog(context) <= max(1, behind - most)
        drafted = drafter.propose(context, k, GREEDY, RNG).tokens.tolist()
        assert drafted == greedy_after(context[:], k)
        context.extend([*drafted[:agreed], *others])
    assert drafter.propose(context, k, GREEDY, RNG).tokens.tolist() == greedy_after(context[:], k)


def test_a_new_conversation_keeps_the_common_prefix_of_the_drafts_cache():
    drafter = model()
    drafter.propose(Context([1, 2, 3, 4]), 2, GREEDY, RNG)
    drafter.graph.forwards.clear()
    drafter.propose(Context([1, 2, 3, 5]), 1, GREEDY, RNG)
    assert drafter.graph.forwards == [1]


def test_what_a_graph_held_before_it_was_given_to_a_draft_is_no_part_of_its_text():
    used = model()
    used.propose(Context([5, 4, 3]), 2, GREEDY, RNG)
    drafter = ModelDrafter(used.graph, min_confidence=0.0)
    assert drafter.propose(Context([1, 2]), 4, GREEDY, RNG).tokens.tolist() == greedy_after([1, 2], 4)


def test_a_short_draft_context_slides_and_drafts_from_the_recent_text():
    drafter, context = model(max_context=8), Context([1] * 5)
    for _ in range(10):
        behind, before = drafter.backlog(context, 3), len(drafter.graph.forwards)
        drafted = drafter.propose(context, 3, GREEDY, RNG).tokens.tolist()
        assert sum(drafter.graph.forwards[before:]) == behind + len(drafted) - 1
        seen = drafter.graph.tokens[: drafter.graph.length - (len(drafted) - 1)]
        assert context[len(context) - len(seen) :] == seen
        assert drafted == greedy_after(seen, len(drafted))
        context.extend([5, 2])


def test_backlog_counts_what_must_be_run_first():
    drafter, context = model(), Context([1, 2, 3, 4])
    assert drafter.backlog(context) == 4
    drafter.propose(context, 2, GREEDY, RNG)
    context.extend([7])
    assert drafter.backlog(context) == 1
    context.extend([7, 7])
    assert drafter.backlog(context) == 3


def test_low_confidence_stops_before_the_draw():
    flat = ModelDrafter(
        FakeGraph(VOCAB, logits=lambda context: np.zeros(VOCAB, np.float32)), min_confidence=0.3
    )
    for sampling in (GREEDY, Sampling(temperature=1.0), Sampling(temperature=1.0, mode="reject")):
        assert len(flat.propose(Context([1]), 4, sampling, RNG)) == 0


def test_low_confidence_does_not_look_at_the_drawn_token():
    """A row that is sure enough drafts its unlikely tokens too, as often as q says (trap 2)."""
    row = np.log(np.array([0.6, 0.4] + [1e-9] * (VOCAB - 2))).astype(np.float32)
    sampling = Sampling(temperature=1.0, mode="reject")
    drafter = ModelDrafter(FakeGraph(VOCAB, logits=lambda context: row), min_confidence=0.5)
    drawn = [
        drafter.propose(Context([1]), 1, sampling, draft_generator(0, position)).tokens[0]
        for position in range(800)
    ]
    assert np.mean(drawn) == pytest.approx(0.4, abs=0.05)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2, "temperature": 0.5}])
def test_trap_2_q_is_exactly_what_each_token_was_drawn_from(options):
    sampling = Sampling(**{"temperature": 1.0, "mode": "reject", **options})
    proposal = model().propose(Context([1, 2]), 4, sampling, draft_generator(3, 2))
    assert proposal.rule == "iid"
    for i, token in enumerate(proposal.tokens):
        row = LOGITS((1, 2, *proposal.tokens[:i].tolist()))
        chances = distribution(row, sampling)
        expected = np.zeros(VOCAB)
        expected[np.arange(VOCAB) if chances.ids is None else chances.ids] = chances.probs
        got = np.zeros(VOCAB)
        got[np.arange(VOCAB) if proposal.vocab_ids is None else proposal.vocab_ids] = proposal.q[i]
        np.testing.assert_allclose(got, expected, atol=1e-6)
        assert got[token] > 0


def test_in_match_mode_the_draft_draws_with_the_targets_uniforms():
    sampling = Sampling(temperature=1.0, seed=11)
    first = model().propose(Context([1, 2]), 3, sampling, np.random.default_rng(1))
    second = model().propose(Context([1, 2]), 3, sampling, np.random.default_rng(2))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    cdf = np.cumsum(np.exp(LOGITS((1, 2)).astype(np.float64)))
    assert first.tokens[0] == np.searchsorted(cdf / cdf[-1], Uniforms(11)(2), side="right")


def test_trap_14_a_token_that_the_draft_lacks_makes_it_pass():
    assert len(model().propose(Context([1, VOCAB, 2]), 3, GREEDY, RNG)) == 0


def test_a_static_draft_prefills_in_its_widest_steps():
    drafter = model(widths=(1, 4))
    drafter.propose(Context([1] * 10), 1, GREEDY, RNG)
    assert drafter.graph.forwards == [4, 4, 2]


def test_context_grows_and_slices():
    context = Context([1, 2])
    context.extend([3])
    assert (context[0], context[1:], len(context), context.prompt_length) == (1, [2, 3], 3, 2)


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_prefix_is_the_longest(first, second):
    n = common_prefix(first, second)
    assert first[:n] == second[:n]
    assert n == min(len(first), len(second)) or first[n] != second[n]
