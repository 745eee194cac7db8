"""A row becomes the distribution that the options describe, quickly and with ties by lowest id."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Sampling
from outrider.errors import BackendError, UsageError
from outrider.runtime.sampling import (
    Distribution,
    Processor,
    distribution,
    draw,
    largest,
    least_probability,
    log_probabilities,
    probability,
    top_two,
)
from outrider.runtime.uniforms import Uniforms, draft_generator


def row_of(*values):
    return np.array(values, np.float32)


def dense(chances, size):
    out = np.zeros(size)
    out[np.arange(size) if chances.ids is None else chances.ids] = chances.probs
    return out


def slow(row, sampling):
    """The same truncation by sorting everything. [V]"""
    p = np.exp((row.astype(np.float64) - row.max()) / sampling.temperature)
    order = np.lexsort((np.arange(len(row)), -row))
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=40),
    st.sampled_from([0, 1, 2, 5, 100]),
    st.sampled_from([1.0, 0.93, 0.51, 0.07]),
    st.sampled_from([0.0, 0.013, 0.3]),
    st.sampled_from([0.31, 1.0, 2.7]),
)
@settings(max_examples=300, deadline=None)
def test_truncation_equals_sorting_everything_also_with_ties(values, top_k, top_p, min_p, temperature):
    row = np.array(values, np.float32) / 3
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(dense(distribution(row, sampling), len(row)), slow(row, sampling), atol=1e-6)


@pytest.mark.parametrize("size", [5000, 49152, 50001])
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 50, "top_p": 0.95},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_p": 0.9, "min_p": 0.05},
    ],
)
def test_large_rows_are_truncated_as_small_ones_are(size, scale, options):
    row = np.random.default_rng(1).normal(0, scale, size).astype(np.float32)
    sampling = Sampling(temperature=0.8, **options)
    np.testing.assert_allclose(dense(distribution(row, sampling), size), slow(row, sampling), atol=1e-6)


def test_ids_of_a_distribution_ascend_so_that_inverse_cdf_goes_in_id_order():
    row = np.random.default_rng(2).normal(size=3000).astype(np.float32)
    ids = distribution(row, Sampling(temperature=1.0, top_k=40)).ids
    assert (np.diff(ids) > 0).all()


@given(
    st.sampled_from([1, 7, 2047, 2049, 5000, 49152, 50001]),
    st.sampled_from([0.01, 1.0, 2.5, 6.0]),
    st.sampled_from([0.0, 3.0, 9.0, 20.0]),
    st.integers(0, 2**32 - 1),
    st.floats(0.001, 1.0) | st.just(0.0),
)
@settings(max_examples=150, deadline=None)
def test_least_probability_decides_as_the_whole_softmax_does(size, scale, lead, seed, least):
    rng = np.random.default_rng(seed)
    row = rng.normal(0, scale, size).astype(np.float32).round(int(rng.integers(0, 4)))  # rounded: ties
    row[rng.random(size) < 0.1] = -np.inf
    row[rng.integers(size)] = row.max(initial=0.0, where=np.isfinite(row)) + lead
    exact = 1.0 / np.exp(row - row.max()).sum()
    for bound in (least, float(exact), float(np.nextafter(exact, 2)), float(exact) * 0.999):
        assert least_probability(row, bound) == (row.argmax(), bool(exact >= bound))


@pytest.mark.parametrize("where", [0, 3000, 49999])
@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_nan_anywhere_in_a_row_is_an_error(where, options):
    row = np.zeros(50_000, np.float32)
    row[where] = np.nan
    with pytest.raises(BackendError, match="a logit of nan"):
        distribution(row, Sampling(temperature=1.0, **options))


def test_the_draft_s_stream_is_the_generator_of_its_seed_and_position():
    words = np.random.Philox(key=np.array([7, 1], np.uint64), counter=np.array([0, 12, 0, 0], np.uint64))
    expected = np.random.Generator(words)
    stream = draft_generator(7, 12)
    assert [stream.random() for _ in range(5)] == [expected.random() for _ in range(5)]


def test_greedy_takes_the_lowest_id_of_equals_and_reports_the_gap():
    assert top_two(row_of(1, 3, 3, 2)) == (1, 0.0)
    assert top_two(row_of(1, 4, 3, 2)) == (1, 1.0)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=2000), st.integers(1, 300))
@settings(max_examples=80, deadline=None)
def test_largest_equals_a_stable_sort(values, n):
    row = np.array(values, np.float32)
    np.testing.assert_array_equal(largest(row, n), np.argsort(-row, kind="stable")[:n])


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda p: sum(p) > 1e-3),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_never_takes_a_token_of_probability_zero(weights, uniform):
    probs = np.array(weights) / sum(weights)
    token, margin = draw(Distribution(None, probs), uniform)
    assert probs[token] > 0
    assert margin >= 0


def test_draw_over_a_large_vocabulary_equals_the_plain_running_sum():
    probs = np.random.default_rng(3).random(20_000) ** 8
    probs /= probs.sum()
    chances = Distribution(None, probs)
    cdf = np.cumsum(probs)
    for uniform in np.random.default_rng(4).random(200):
        token, margin = draw(chances, float(uniform))
        if margin > 1e-12:
            assert token == np.searchsorted(cdf, uniform, side="right")


def test_draw_reports_the_distance_to_the_nearer_edge_inside_the_unit_interval():
    chances = Distribution(np.array([3, 8]), np.array([0.25, 0.75]))
    assert draw(chances, 0.2) == (3, pytest.approx(0.05))
    assert draw(chances, 0.9) == (8, pytest.approx(0.65))
    assert draw(Distribution(None, np.ones(1)), 0.0) == (0, 1.0)


def test_a_near_tie_at_the_truncation_edge_is_slack():
    tied = distribution(row_of(2, 1, 1.0001, 0), Sampling(temperature=1.0, top_k=2))
    clear = distribution(row_of(2, 1, 1.5, 0), Sampling(temperature=1.0, top_k=2))
    assert tied.slack > 0.2
    assert clear.slack == 0.0


def test_probability_is_zero_outside_the_support():
    chances = Distribution(np.array([3, 8]), np.array([0.25, 0.75]))
    assert [probability(chances, token) for token in (2, 3, 8, 99)] == [0.0, 0.25, 0.75, 0.0]


def test_trap_14_padding_ids_never_get_probability():
    row = Processor(Sampling(), 3).row(row_of(1, 2, 0, 99, 98))
    assert len(row) == 3
    assert top_two(row)[0] == 1


def test_trap_12_min_p_changes_sampling_and_penalties_change_greedy():
    row = row_of(2.0, 1.9, -3.0)
    assert dense(distribution(row, Sampling(temperature=1.0, min_p=0.5)), 3)[2] == 0.0
    penalised = Processor(Sampling(repetition_penalty=1.5), 3, [0]).row(row)
    assert top_two(penalised)[0] == 1


def test_bias_and_bans_apply_before_everything():
    row = Processor(Sampling(logit_bias={2: 10.0}, banned_tokens=(0,)), 3).row(row_of(5, 1, 0))
    np.testing.assert_array_equal(row, row_of(-np.inf, 1, 10))


def test_penalties_count_repetition_in_all_and_presence_and_frequency_in_the_output():
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    processor = Processor(sampling, 4, [0, 0, 1])
    for token in (1, 2, 2):
        processor.push(token)
    np.testing.assert_allclose(processor.row(row_of(2, -2, 4, 1)), row_of(1, -4 - 0.75, 2 - 1.0, 1))


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12), st.integers(0, 12))
@settings(deadline=None)
def test_penalties_after_pushes_and_pops_equal_a_recount(prompt, output, undone):
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)
    kept = output[: max(0, len(output) - undone)]
    moved, fresh = Processor(sampling, 6, prompt), Processor(sampling, 6, prompt)
    for token in output:
        moved.push(token)
    for token in reversed(output[len(kept) :]):
        moved.pop(token)
    for token in kept:
        fresh.push(token)
    row = np.linspace(-1, 2, 6, dtype=np.float32)
    np.testing.assert_array_equal(moved.row(row), fresh.row(row))


def test_the_graphs_row_is_never_written_to():
    logits = row_of(1, 2, 3)
    Processor(Sampling(banned_tokens=(2,), repetition_penalty=2.0), 3, [1]).row(logits)
    np.testing.assert_array_equal(logits, row_of(1, 2, 3))


def test_an_unknown_id_is_refused():
    with pytest.raises(UsageError, match="names id 7"):
        Processor(Sampling(logit_bias={7: 1.0}), 5)


def test_banning_everything_and_nan_are_errors_that_say_so():
    with pytest.raises(UsageError, match="no token is left"):
        top_two(row_of(-np.inf, -np.inf))
    with pytest.raises(BackendError, match="nan"):
        top_two(row_of(1, np.nan))
    with pytest.raises(BackendError, match="nan"):
        distribution(row_of(1, np.nan), Sampling(temperature=1.0))


def test_log_probabilities_are_those_of_the_softmax_and_of_the_top():
    row = row_of(0, 1, 2, 3)
    expected = row - np.log(np.exp(row.astype(np.float64)).sum())
    result = log_probabilities(row, 1, 2, 0.0)
    assert result.logprob == pytest.approx(expected[1], abs=1e-6)
    assert [token for token, _ in result.top] == [3, 2]
    assert result.top[0][1] == pytest.approx(expected[3], abs=1e-6)


def test_extreme_temperatures_neither_overflow_nor_lose_the_best_token():
    row = row_of(80, -80, 79)
    assert dense(distribution(row, Sampling(temperature=1e-6, top_p=0.9)), 3)[0] == 1.0
    assert dense(distribution(row, Sampling(temperature=1e-6)), 3)[0] == 1.0
    assert dense(distribution(row, Sampling(temperature=1e-30)), 3)[0] == 1.0
    assert dense(distribution(row, Sampling(temperature=1e6)), 3) == pytest.approx([1 / 3] * 3, abs=1e-3)


def test_trap_21_a_position_owns_its_uniform_whatever_was_asked_before():
    forwards, backwards = Uniforms(5), Uniforms(5)
    ahead = [forwards(position) for position in range(600)]
    assert [backwards(position) for position in reversed(range(600))] == ahead[::-1]
    assert ahead != [Uniforms(6)(position) for position in range(600)]
    assert all(0.0 <= u < 1.0 for u in ahead)
    assert 0.45 < np.mean(ahead) < 0.55


def test_trap_21_the_draft_has_its_own_stream():
    assert draft_generator(5, 3).random() != Uniforms(5)(3)
    assert draft_generator(5, 3).random() == draft_generator(5, 3).random()
    assert draft_generator(5, 3).random() != draft_generator(5, 4).random()


def test_the_largest_seed_works():
    assert 0.0 <= Uniforms(2**64 - 1)(0) < 1.0
