"""Rebuild a tokenizer of the `tokenizers` library from the metadata of a GGUF file.

Two kinds exist. `gpt2` is byte-level BPE: merges are listed, and `tokenizer.ggml.pre` names how text is cut
into words first. `llama` is SentencePiece BPE (Kudo & Richardson 2018): no merges, only a score per token;
the pair whose merged token scores highest is merged first. As every merged token has one score, a merge
list ordered by that score gives the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.errors import TokenizerError
from outrider.export.tokenizer_files import TokenizerFiles, known_end_ids

__all__ = ["PRE_TOKENIZERS", "tokenizer_from_gguf"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"  # SentencePiece's visible space
MODELS = ("gpt2", "llama")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

Json = dict[str, Any]


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _words(digits: str) -> str:
    """The word pattern that Llama 3 and Qwen 2 share, with their own rule for digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


PRE_TOKENIZERS: dict[str, list[Json]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "qwen2": [_split(_words(r"\p{N}")), _byte_level(use_regex=False)],
    "llama-bpe": [_split(_words(r"\p{N}{1,3}")), _byte_level(use_regex=False)],
}
"""`tokenizer.ggml.pre` -> how byte-level BPE cuts text into words."""

ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "gpt2": "gpt-2"}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Rebuild the tokenizer. Raises TokenizerError when its kind is unknown or the metadata is incomplete."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in MODELS:
        raise TokenizerError(f"tokenizer.ggml.model is {kind!r}; known: {', '.join(MODELS)}")
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, len(tokens))
    if len(set(tokens)) != len(tokens):
        raise TokenizerError("tokenizer.ggml.tokens lists a token twice; ids would be ambiguous")
    parts = _byte_bpe(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(tokens, types)),
        "post_processor": None,
        **parts,
    }
    return _files(metadata, tokens, types, json.dumps(document, ensure_ascii=False))


def _files(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], tokenizer_json: str
) -> TokenizerFiles:
    special = {token: index for index, token in enumerate(tokens) if types[index] == CONTROL}
    bos_id, eos_id = (_id(metadata, name, len(tokens)) for name in ("bos_token_id", "eos_token_id"))
    llama = metadata["tokenizer.ggml.model"] == "llama" or _pre(metadata) == "llama-bpe"
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_id=bos_id,
        add_bos=bos_id is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", llama)),
        eos_ids=known_end_ids(special, (_id(metadata, key, len(tokens)) for key in END_KEYS)),
        vocab_size=len(tokens),
        pad_id=_id(metadata, "padding_token_id", len(tokens)),
        unk_id=_id(metadata, "unknown_token_id", len(tokens)),
        eos_token=None if eos_id is None else tokens[eos_id],
        special_ids=special,
    )


def _list(metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise TokenizerError(f"the file holds no list tokenizer.ggml.{name}; its tokenizer cannot be rebuilt")
    if length is not None and len(values) != length:
        raise TokenizerError(f"tokenizer.ggml.{name} has {len(values)} entries for {length} tokens")
    return values


def _id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is not None and not 0 <= value < vocab_size:
        raise TokenizerError(f"tokenizer.ggml.{name} is {value}; the vocabulary has {vocab_size} tokens")
    return value


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> Iterator[Json]:
    """Tokens that are matched in the raw text before anything else: control and user-defined ones."""
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, USER_DEFINED) and token:
            yield {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == CONTROL,
            }


def _pre(metadata: Mapping[str, Any]) -> str:
    name = str(metadata.get("tokenizer.ggml.pre"))
    return ALIASES.get(name, name)


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
        **options,
    }


def _byte_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Json:
    name = _pre(metadata)
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(f"pre-tokenizer {name!r} is unknown; known: {', '.join(PRE_TOKENIZERS)}")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for merge in _list(metadata, "merges", str):
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise TokenizerError(f"merge {merge!r} does not join two tokens of the vocabulary into a third")
        merges.append((left, right))
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=name == "llama-bpe"),
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Json:
    scores = _list(metadata, "scores", float, len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    visible = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": SPACE}, visible] if prefix else [visible],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocab,
            _merges_by_score(tokens, types, scores, vocab),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the best-scored result first, ties by the lower id."""
    normal = [index for index, kind in enumerate(types) if kind == NORMAL]
    normal.sort(key=lambda index: (-scores[index], index))
    merges: list[tuple[str, str]] = []
    for index in normal:
        token = tokens[index]
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges.extend(pair for pair in pairs if pair[0] in vocab and pair[1] in vocab)
    return merges
