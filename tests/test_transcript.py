"""A transcript gives out each token once, with its text, and never takes one back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.runtime.text import Tokenizer
from outrider.runtime.transcript import Transcript


@pytest.fixture
def tokenizer(byte_level_bpe: Any) -> Tokenizer:
    return Tokenizer(byte_level_bpe)


def test_a_stop_token_that_is_a_word_has_no_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ab")
    transcript = Transcript(tokenizer, [])
    transcript.push(tokens, accepted=1, ends_with_stop_id=True)
    transcript.finish()
    piece = transcript.take(final=True)
    assert (piece.text, piece.tokens, piece.from_draft) == ("a", tuple(tokens), 1)


def test_a_token_that_was_given_out_is_not_dropped_by_a_later_cut(tokenizer: Tokenizer) -> None:
    special = 2
    transcript = Transcript(tokenizer, [], ["stop"])
    transcript.push(tokenizer.encode("ab"), accepted=0)
    transcript.push([special], accepted=0)  # has no text, and is given out before the stop string begins
    assert transcript.take().tokens[-1] == special
    assert transcript.push(tokenizer.encode("stop"), accepted=0)
    assert transcript.take(final=True).tokens == ()
    assert len(transcript) == 3


def test_tokens_of_a_held_back_text_wait_for_it(tokenizer: Tokenizer) -> None:
    transcript = Transcript(tokenizer, [], ["xyz"])
    transcript.push(tokenizer.encode("ax"), accepted=2)
    first = transcript.take()
    assert (first.text, len(first.tokens), first.from_draft) == ("a", 1, 1)
    transcript.push(tokenizer.encode("b"), accepted=0)
    second = transcript.take()
    assert (second.text, len(second.tokens), second.from_draft) == ("xb", 2, 1)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rounds=st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=5), max_size=8),
    stops=st.lists(st.sampled_from(["a", "th", "🦊", "\n", "er"]), max_size=2),
)
def test_pieces_add_up_however_the_tokens_were_grouped(
    tokenizer: Tokenizer, rounds: list[list[int]], stops: list[str]
) -> None:
    def run(groups: list[list[int]]) -> tuple[str, list[int], bool]:
        transcript = Transcript(tokenizer, [], stops)
        pieces = []
        for group in groups:
            if transcript.push(group, accepted=len(group)):
                break
            pieces.append(transcript.take())
        else:
            transcript.finish()
        pieces.append(transcript.take(final=True))
        tokens = [token for piece in pieces for token in piece.tokens]
        assert len(tokens) == len(transcript) == sum(piece.from_draft for piece in pieces)
        return "".join(piece.text for piece in pieces), tokens, transcript.matched is not None

    tokens = [token for group in rounds for token in group]
    text, kept, matched = run(rounds)
    full = tokenizer.decode(tokens)
    cuts = [full.index(stop) for stop in stops if stop in full]
    assert matched == bool(cuts)
    assert text == (full[: min(cuts)] if cuts else full)
    assert kept == tokens[: len(kept)]
    assert tokenizer.decode(kept).startswith(text)
    assert run([[token] for token in tokens])[0] == text
