"""Tokenizers rebuilt from GGUF metadata: known vectors, and small ones against the rules read literally."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from outrider.errors import TokenizerError
from outrider.export.gguf import GgufFile
from outrider.export.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf

VECTORS = json.loads((Path(__file__).parent / "data" / "tokenizer_vectors.json").read_text())["models"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ALPHABET = sorted(ByteLevel.alphabet())


def byte_level(pre: str, merges: tuple[str, ...] = ("a b",), **extra: Any) -> dict[str, Any]:
    """Metadata of a byte-level BPE with all bytes, the results of the merges, and two control tokens."""
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in merges), "<|im_end|>", "<|endoftext|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        **extra,
    }


def sentencepiece(pieces: dict[str, float], **extra: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece BPE: specials, user-defined runs of blanks, all bytes, pieces."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "\n\n", "   "]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, USER_DEFINED, USER_DEFINED]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    tokens += list(pieces)
    types += [NORMAL] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - len(pieces)) + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        **extra,
    }


def load(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_from_gguf(metadata).tokenizer_json)


def words(pre: str, text: str) -> list[str]:
    """How a pre-tokenizer cuts a text, in bytes' own characters turned back into text."""
    tokenizer = load(byte_level(pre))
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("vector", VECTORS["smollm2-135m-q4_1"], ids=lambda vector: repr(vector["text"])[:24])
def test_smollm2_encodes_and_decodes_every_known_string(smollm2: Tokenizer, vector: dict[str, Any]) -> None:
    assert smollm2.encode(vector["text"], add_special_tokens=False).ids == vector["ids"]
    assert smollm2.decode(vector["ids"], skip_special_tokens=False) == vector["text"]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    with GgufFile(smollm2_gguf) as file:
        return load(file.metadata)


def test_smollm2_stops_at_the_end_of_a_turn_and_of_a_text(smollm2_gguf: Path) -> None:
    with GgufFile(smollm2_gguf) as file:
        files = tokenizer_from_gguf(file.metadata)
    assert files.eos_ids == (0, 2)
    assert (files.bos_id, files.add_bos, files.vocab_size) == (1, False, 49152)
    assert files.chat_template is not None
    assert "<|im_start|>" in files.chat_template


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["Don", "'t", " pay", " 12345", " !!", "\n\n ", " x", "\n"]),
        ("smollm", ["Don", "'t", " pay", " ", "1", "2", "3", "4", "5", " !!", "\n\n ", " x", "\n"]),
        ("qwen2", ["Don", "'t", " pay", " ", "1", "2", "3", "4", "5", " !!\n\n", " ", " x", "\n"]),
        ("llama-bpe", ["Don", "'t", " pay", " ", "123", "45", " !!\n\n", " ", " x", "\n"]),
    ],
)
def test_each_pre_tokenizer_cuts_contractions_digits_and_spaces_its_own_way(
    pre: str, expected: list[str]
) -> None:
    assert words(pre, "Don't pay 12345 !!\n\n  x\n") == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokenizers_lose_nothing(pre: str) -> None:
    tokenizer = load(byte_level(pre, ("a b", "ab c", "Ġ t", "Ġt h")))
    for vector in VECTORS["smollm2-135m-q4_1"]:
        ids = tokenizer.encode(vector["text"], add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == vector["text"]


def test_merges_apply_in_their_order() -> None:
    tokenizer = load(byte_level("gpt-2", ("b c", "a b", "ab c")))
    assert tokenizer.encode("abc").tokens == ["a", "bc"]
    assert load(byte_level("gpt-2", ("a b", "b c", "ab c"))).encode("abc").tokens == ["abc"]


def test_llama3_takes_a_word_that_is_a_token_whole() -> None:
    assert load(byte_level("llama-bpe", ("b c", "a b", "ab c"))).encode("abc").tokens == ["abc"]


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    metadata = sentencepiece({"▁": -3.0, "a": -4.0})
    tokenizer = load(metadata)
    encoded = tokenizer.encode("a<end_of_turn>\n\n   a", add_special_tokens=False)
    assert encoded.tokens == ["a", "<end_of_turn>", "\n\n", "   ", "a"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "a\n\n   a"


@pytest.mark.parametrize(
    ("pre", "extra", "expected"),
    [
        ("smollm", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_bos_is_added_as_the_file_or_else_the_family_says(
    pre: str, extra: dict[str, Any], expected: bool
) -> None:
    metadata = byte_level(pre, **extra) | {"tokenizer.ggml.bos_token_id": 1}
    assert tokenizer_from_gguf(metadata).add_bos is expected


def test_eos_ids_hold_declared_ids_and_known_end_tokens() -> None:
    metadata = sentencepiece({"▁": -1.0}, **{"tokenizer.ggml.eot_token_id": 0})
    assert tokenizer_from_gguf(metadata).eos_ids == (0, 1, 4)


def reference_sentencepiece(metadata: dict[str, Any], text: str) -> list[str]:
    """SentencePiece's rule, read literally: merge the leftmost best-scored pair while there is one."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    score = dict(zip(tokens, scores, strict=True))
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-score[symbols[i] + symbols[i + 1]], i)
            for i in range(len(symbols) - 1)
            if symbols[i] + symbols[i + 1] in score
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    pieces = [[symbol] if symbol in score else _bytes(symbol) for symbol in symbols]
    return [piece for group in pieces for piece in group]


def _bytes(symbol: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in symbol.encode()]


def test_sentencepiece_merges_by_score_on_random_vocabularies() -> None:
    rng = random.Random(0)
    for _ in range(60):
        pieces = {letter: -100.0 - index for index, letter in enumerate("▁abc")}
        for rank in range(14):
            left, right = rng.choice(list(pieces)), rng.choice(list(pieces))
            pieces.setdefault(left + right, -float(rank) if rng.random() < 0.5 else -50.0 + rank)
        metadata = sentencepiece(pieces)
        tokenizer = load(metadata)
        for _ in range(10):
            text = "".join(rng.choices("abc é", weights=[5, 5, 3, 3, 1], k=12)).replace("   ", " ")
            tokens = tokenizer.encode(text, add_special_tokens=False).tokens
            assert tokens == reference_sentencepiece(metadata, text), (text, pieces)


def test_sentencepiece_falls_back_to_bytes_and_decodes_them() -> None:
    tokenizer = load(sentencepiece({"▁": -1.0, "a": -2.0}))
    encoded = tokenizer.encode("a é🦊", add_special_tokens=False)
    assert encoded.tokens == ["a", "▁", *_bytes("é"), *_bytes("🦊")]
    assert tokenizer.decode(encoded.ids) == "a é🦊"


def test_a_space_prefix_is_added_and_taken_off_again() -> None:
    tokenizer = load(sentencepiece({"▁": -1.0, "a": -2.0}, **{"tokenizer.ggml.add_space_prefix": True}))
    encoded = tokenizer.encode("a a", add_special_tokens=False)
    assert encoded.tokens == ["▁", "a", "▁", "a"]
    assert tokenizer.decode(encoded.ids) == "a a"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "falcon"}, r"falcon.*gpt-2.*llama-bpe"),
        ({"tokenizer.ggml.pre": None}, r"None.*smollm"),
        ({"tokenizer.ggml.model": "t5"}, r"t5.*gpt2"),
        ({"tokenizer.ggml.model": None}, r"None.*gpt2"),
        ({"tokenizer.ggml.tokens": None}, "tokens"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "a zz"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab'"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "5000"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(byte_level("smollm") | change)


def test_a_token_listed_twice_is_refused() -> None:
    metadata = byte_level("smollm")
    metadata["tokenizer.ggml.tokens"][1] = metadata["tokenizer.ggml.tokens"][0]
    with pytest.raises(TokenizerError, match="twice"):
        tokenizer_from_gguf(metadata)
