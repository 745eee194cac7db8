"""Quality figures against formulas written out plainly, over arrays and over graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from outrider.errors import ContextError, UsageError
from outrider.quantize.quality import (
    compare,
    evaluation_text,
    logit_rows,
    pair_acceptance,
)
from outrider.targets.fake import FakeGraph, random_logits

VOCAB = 11


def rows(count: int, seed: int, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, VOCAB)) * scale).astype(np.float32)


def chunks(array: np.ndarray, size: int = 4) -> Iterator[np.ndarray]:
    for start in range(0, len(array), size):
        yield array[start : start + size]


def softmax(row: np.ndarray) -> np.ndarray:
    exponent = np.exp(row.astype(np.float64) - row.max())
    return exponent / exponent.sum()


def test_figures_equal_their_definitions() -> None:
    reference, ours = rows(13, 0), rows(13, 0) + rows(13, 1, 0.5)
    tokens = np.random.default_rng(2).integers(0, VOCAB, 13)
    quality = compare(chunks(reference), chunks(ours), tokens)
    p, q = [softmax(row) for row in reference[:-1]], [softmax(row) for row in ours[:-1]]
    following = tokens[1:]
    nll = [-math.log(q[i][token]) for i, token in enumerate(following)]
    nll_reference = [-math.log(p[i][token]) for i, token in enumerate(following)]
    kl = [float((a * np.log(a / b)).sum()) for a, b in zip(p, q, strict=True)]
    same = [a.argmax() == b.argmax() for a, b in zip(p, q, strict=True)]
    ordered = np.sort(reference[:-1], axis=-1)
    confident = ordered[:, -1] - ordered[:, -2] > 0.5
    assert quality.tokens == 12
    assert quality.perplexity == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)
    assert quality.perplexity_reference == pytest.approx(math.exp(np.mean(nll_reference)), rel=1e-5)
    increase = math.exp(np.mean(nll) - np.mean(nll_reference)) - 1
    assert quality.perplexity_increase == pytest.approx(increase, abs=1e-5)
    assert quality.kl_mean == pytest.approx(np.mean(kl), rel=1e-4)
    assert quality.top1_agreement == np.mean(same)
    assert 0 < confident.sum() < 12
    assert quality.top1_agreement_confident == np.mean(np.array(same)[confident])


def test_a_model_against_itself_loses_nothing() -> None:
    reference, tokens = rows(9, 0), np.arange(9)
    quality = compare(chunks(reference), chunks(reference), tokens)
    assert quality.perplexity == quality.perplexity_reference
    assert quality.kl_mean == pytest.approx(0, abs=1e-6)
    assert quality.top1_agreement == 1


def test_no_confident_row_is_none_and_not_a_number() -> None:
    flat = np.zeros((4, VOCAB), np.float32)
    assert compare([flat], [flat], [0, 1, 2, 3]).top1_agreement_confident is None


def test_the_size_of_chunks_does_not_matter() -> None:
    reference, ours, tokens = rows(17, 0), rows(17, 1), np.arange(17) % VOCAB
    results = [compare(chunks(reference, size), chunks(ours, size), tokens) for size in (1, 5, 16, 17)]
    for result in results[1:]:
        assert result.perplexity == pytest.approx(results[0].perplexity, rel=1e-6)
        assert result.top1_agreement == results[0].top1_agreement


def test_a_padded_vocabulary_is_cut_to_the_common_part() -> None:
    reference, tokens = rows(6, 0), np.arange(6)
    padded = np.concatenate([reference, np.full((6, 5), 3, np.float32)], axis=1)
    assert compare([reference], [padded], tokens).kl_mean == pytest.approx(0, abs=1e-6)
    assert pair_acceptance([padded], [reference], 6).sum_min_pq == pytest.approx(1, abs=1e-6)


def test_streams_that_disagree_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be compared"):
        compare([rows(4, 0)], [rows(3, 0)], np.arange(4))
    with pytest.raises(UsageError, match="3 rows of logits for 7"):
        compare([rows(3, 0)], [rows(3, 0)], np.arange(8))
    with pytest.raises(UsageError, match="nothing can be measured"):
        compare([rows(1, 0)], [rows(1, 0)], [5])


def test_acceptance_equals_its_definition() -> None:
    target, draft = rows(10, 3), rows(10, 4)
    got = pair_acceptance(chunks(target), chunks(draft), 10)
    shared = [np.minimum(softmax(a), softmax(b)).sum() for a, b in zip(target, draft, strict=True)]
    assert got.sum_min_pq == pytest.approx(np.mean(shared), rel=1e-5)
    assert got.greedy_match == np.mean(target.argmax(-1) == draft.argmax(-1))
    assert got.tokens == 10
    assert 0 < got.greedy_match < 1


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_graph_reads_a_text_over_its_own_cache(chunk: int) -> None:
    model = random_logits(VOCAB, 0, order=None)
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 50)]
    graph = FakeGraph(VOCAB, logits=model)
    graph.forward([1, 2])
    graph.commit([0, 1])  # what was there before does not count
    found = [part.copy() for part in logit_rows(graph, tokens, chunk)]
    expected = np.stack([model(tuple(tokens[: i + 1])) for i in range(50)])
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)
    assert {len(part) for part in found[:-1]} <= {chunk}
    assert graph.length == 0


def test_a_text_beyond_the_context_is_refused() -> None:
    with pytest.raises(ContextError, match="9 tokens do not fit a context of 8"):
        list(logit_rows(FakeGraph(VOCAB, max_context=8), list(range(9))))


def test_the_evaluation_text_ships_and_is_long_enough() -> None:
    assert len(evaluation_text()) > 16_000
