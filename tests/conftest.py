"""Tiny models and tokenizers that tests build for themselves; nothing here is downloaded."""

from __future__ import annotations

from typing import Any

import pytest

TEXTS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "def add(a, b):\n    return a + b\n",
    "Grüße aus Köln; 東京は晴れ 🦊🦊 — naïve café",
]
SPECIALS = ["<|end|>", "<|start|>", "<|stop|>"]


@pytest.fixture(scope="session")
def byte_level_bpe() -> Any:
    """A byte-level BPE of 256 bytes, three special tokens first, and a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback_bpe() -> Any:
    """A SentencePiece-style BPE: "▁" for spaces, `<0xNN>` for bytes without a piece, first space stripped."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"abcdefghijklmnopqrstuvwxyz.,", "é", "th", "the", "▁the"]
    merges = [("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
