"""Text of a model's own: answers that grow together are those that grow alone."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.errors import UsageError
from outrider.export import own_text as module
from outrider.export.own_text import own_text
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights
from tests import families

COLD = 1e-4  # so cold that every draw is the most likely token


def greedy(weights: SlotWeights, prompt: np.ndarray, tokens: int) -> list[int]:
    ids = prompt.tolist()
    reference = FloatReference(weights)
    for _ in range(tokens):
        state = reference.final_states([np.asarray(ids)])[0][-1:]
        ids.append(int(next(iter(reference.rows([state]))).argmax()))
    return ids


def prompts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(1, families.VOCAB, length) for length in lengths]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_without_temperature_every_answer_is_the_greedy_one(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 12 is crossed (gemma3), and prompts go in by more than one forward."""
    monkeypatch.setattr(module, "PREFILL", 10)
    weights = families.weights_of(family, families.oracle(family))
    asked = prompts(6, 3, 9, 1)
    found = own_text(weights, asked, 12, temperature=COLD)
    for text, prompt in zip(found, asked, strict=True):
        assert text.tolist() == greedy(weights, prompt, 12)


def test_an_answer_stops_at_an_end_id_and_the_others_go_on() -> None:
    weights = families.weights_of("llama", families.oracle("llama"))
    asked = prompts(6, 3)
    whole = own_text(weights, asked, 10, temperature=COLD)
    end = next(token for token in whole[0][6:] if token not in whole[1][3:])
    told: list[float] = []
    first, second = own_text(weights, asked, 10, temperature=COLD, end_ids=[int(end)], progress=told.append)
    stop = 6 + whole[0][6:].tolist().index(end)
    assert first.tolist() == whole[0][: stop + 1].tolist()
    assert second.tolist() == whole[1].tolist()
    assert told == sorted(told)


def test_draws_follow_the_distribution_and_a_seed_repeats_them() -> None:
    weights = families.weights_of("llama", families.oracle("llama"))
    prompt = prompts(2)[0]
    state = FloatReference(weights).final_states([prompt])[0][-1:]
    logits = next(iter(FloatReference(weights).rows([state])))[0].astype(np.float64) / 2.0
    p = np.exp(logits - logits.max())
    p /= p.sum()
    found = own_text(weights, [prompt] * 600, 1, temperature=2.0, seed=5)
    counts = np.bincount([text[-1] for text in found], minlength=families.VOCAB)
    assert np.abs(counts / 600 - p).max() < 5 * np.sqrt(p.max() / 600)
    assert p.max() < 0.5
    again = own_text(weights, [prompt] * 600, 1, temperature=2.0, seed=5)
    assert [text[-1] for text in again] == [text[-1] for text in found]
    other = own_text(weights, [prompt] * 50, 1, temperature=2.0, seed=6)
    assert [text[-1] for text in other] != [text[-1] for text in found[:50]]


def test_nothing_to_write_is_refused() -> None:
    weights = families.weights_of("llama", families.oracle("llama"))
    for asked, tokens, temperature in [([], 5, 1.0), (prompts(3), 0, 1.0), (prompts(3), 5, 0.0)]:
        with pytest.raises(UsageError, match="a text needs some of each"):
            own_text(weights, asked, tokens, temperature=temperature)
