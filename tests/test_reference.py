"""The float reference, one layer in memory at a time, equals transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.export import reference as module
from outrider.export.reference import ROWS, FloatReference
from tests import families


def texts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(11)
    return [rng.integers(1, families.VOCAB, length) for length in lengths]


def whole(reference: FloatReference, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Logits [S, V] of every sequence."""
    states = reference.final_states(sequences)
    return [np.concatenate([rows.copy() for rows in reference.rows([state])]) for state in states]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3"])
def test_logits_equal_those_of_transformers(family: str) -> None:
    """40 tokens cross the sliding window of 12 of the Gemma models."""
    model = families.oracle(family)
    sequences = texts(40, 7)
    found = whole(FloatReference(families.weights_of(family, model)), sequences)
    for logits, tokens in zip(found, sequences, strict=True):
        expected = families.reference_logits(model, tokens.tolist())
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
        assert expected.std() > 0.1


def test_sequences_do_not_see_each_other() -> None:
    reference = FloatReference(families.weights_of("gemma3", families.oracle("gemma3")))
    first, second = texts(30, 20)
    both = whole(reference, [first, second])
    np.testing.assert_array_equal(both[1], whole(reference, [second])[0])


def test_chunks_of_rows_never_span_two_sequences() -> None:
    reference = FloatReference(families.weights_of("llama", families.oracle("llama")))
    states = reference.final_states(texts(ROWS + 6, 5))
    assert [rows.shape for rows in reference.rows(states)] == [(n, families.VOCAB) for n in (ROWS, 6, 5)]


def test_a_layer_is_built_once_for_all_sequences_and_progress_counts_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[int] = []
    original = module.Layer

    def layer(index: int, *arguments: Any) -> Any:
        built.append(index)
        return original(index, *arguments)

    monkeypatch.setattr(module, "Layer", layer)
    told: list[float] = []
    reference = FloatReference(families.weights_of("llama", families.oracle("llama")))
    reference.final_states(texts(5, 6, 7), told.append)
    assert built == [0, 1]
    assert told == [0.5, 1.0]
