"""Streaming text is the decoded text, whole characters at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import TokenizerError, UsageError
from outrider.runtime.text import Tokenizer

relaxed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
token_ids = st.lists(st.integers(0, 300), max_size=40)


@pytest.fixture
def byte_level(byte_level_bpe: Any) -> Tokenizer:
    return Tokenizer(byte_level_bpe)


@pytest.fixture
def fallback(byte_fallback_bpe: Any) -> Tokenizer:
    return Tokenizer(byte_fallback_bpe, eos_ids=(2,), bos_id=1, add_bos=True)


def pieces_of(tokenizer: Tokenizer, tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = tokenizer.stream(prompt or [])
    return [stream.feed(token) for token in tokens] + [stream.flush()]


@relaxed
@given(text=unicode_text)
def test_streamed_pieces_add_up_to_the_text_and_never_split_a_character(
    byte_level: Tokenizer, text: str
) -> None:
    pieces = pieces_of(byte_level, byte_level.encode(text, special=False))
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@relaxed
@given(text=unicode_text)
def test_byte_fallback_streams_the_same_text(fallback: Tokenizer, text: str) -> None:
    text = text.replace("▁", "_")
    pieces = pieces_of(fallback, fallback.encode(text, special=False, add_bos=False))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@relaxed
@given(tokens=token_ids)
def test_any_tokens_stream_as_the_tokenizers_library_decodes_them(
    byte_level: Tokenizer, tokens: list[int]
) -> None:
    assert "".join(pieces_of(byte_level, tokens)) == byte_level.backend.decode(tokens)
    assert byte_level.decode(tokens, skip_special=False) == byte_level.backend.decode(
        tokens, skip_special_tokens=False
    )


@relaxed
@given(text=unicode_text, cut=st.integers(0, 200))
def test_a_continuation_completes_what_the_prompt_began(byte_level: Tokenizer, text: str, cut: int) -> None:
    tokens = byte_level.encode(text, special=False)
    prompt, rest = tokens[:cut], tokens[cut:]
    before = byte_level.stream()
    shown = "".join([before.feed(token) for token in prompt])
    assert shown + "".join(pieces_of(byte_level, rest, prompt)) == text


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_at_the_start_of_a_text(
    fallback: Tokenizer,
) -> None:
    the = fallback.backend.token_to_id("▁the")
    assert fallback.decode([the, the]) == "the the"
    assert fallback.decode([the], prompt=fallback.encode("the")) == " the"
    assert fallback.decode([the], prompt=[1]) == "the"  # after BOS alone a text begins
    assert fallback.decode([the], prompt=fallback.encode("the " * 20)) == " the"


def test_an_emoji_comes_with_its_last_byte(byte_level: Tokenizer) -> None:
    tokens = [byte_level.backend.token_to_id(character) for character in "ðŁ¥Ĳ"]  # 🥐, a token for each byte
    assert pieces_of(byte_level, tokens) == ["", "", "", "🥐", ""]
    assert pieces_of(byte_level, tokens[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_are_hidden_or_shown(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("<|start|>fox<|end|>")
    assert tokens[0] == 1
    assert tokens[-1] == 0
    assert byte_level.decode(tokens) == "fox"
    assert byte_level.decode(tokens, skip_special=False) == "<|start|>fox<|end|>"


def test_text_that_spells_a_special_token_can_stay_text(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("<|end|>", special=False)
    assert 0 not in tokens
    assert byte_level.decode(tokens) == "<|end|>"
    assert byte_level.encode("<|end|>") == [0]


def test_bos_is_added_once(fallback: Tokenizer) -> None:
    assert fallback.encode("a")[0] == 1
    assert fallback.encode("<s>a").count(1) == 1
    assert 1 not in fallback.encode("a", add_bos=False)


def test_an_id_that_only_pads_the_embedding_has_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode([9999]) == ""


def test_a_lone_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(UsageError, match="lone surrogate at position 2"):
        byte_level.encode("ab\ud800")


def test_an_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"model"')
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_an_unknown_decoder_is_refused_with_the_known_ones() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece(vocab={"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match=r"WordPiece.*known: ByteLevel"):
        Tokenizer(backend)


def test_a_metaspace_decoder_is_read() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.Metaspace()
    assert Tokenizer(backend).decode([0, 1, 0]) == backend.decode([0, 1, 0]) == "ab a"


def test_padding_tokens_of_a_converter_do_not_count(byte_level: Tokenizer) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "[PAD2]": 2, "[PAD3]": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    assert Tokenizer(backend).id_limit == 2
    assert byte_level.id_limit == len(byte_level)
