"""Text to tokens, and tokens back to text as they arrive, without ever splitting a character.

Decoding works on bytes: every token stands for some bytes, and an incremental UTF-8 decoder holds back
the beginning of a character until its other bytes come. Byte-level BPE and SentencePiece-style
vocabularies (with `<0xNN>` byte tokens) are known; both end in the same byte stream.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.errors import TokenizerError, UsageError

__all__ = ["Detokenizer", "Tokenizer"]

PROMPT_TAIL = 8  # tokens of the prompt that can still matter: a character has at most four bytes
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Tokenizer:
    """A `tokenizers` tokenizer with its stop ids and its rule for the first token.

    `eos_ids` is every id that ends a generation. `add_bos` prepends `bos_id` to prompts that do not begin
    with it. Safe to use from several threads.
    """

    def __init__(
        self, backend: Any, *, eos_ids: Iterable[int] = (), bos_id: int | None = None, add_bos: bool = False
    ) -> None:
        self.backend = backend
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        self.add_bos = add_bos
        backend.no_padding()
        backend.no_truncation()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._to_bytes, self.strip = _byte_rule(_decoder_steps(backend.decoder))
        self._bytes: dict[int, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **options: Any) -> Tokenizer:
        """Read a tokenizer.json. Raises TokenizerError when it is missing, damaged or of an unknown kind."""
        import tokenizers

        if not Path(path).is_file():
            raise TokenizerError(f"{path} does not exist; a bundle holds its tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from None
        return cls(backend, **options)

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def id_limit(self) -> int:
        """One more than the largest id that is a token; rows from there on only pad an embedding."""
        limit: int = max(len(self), *(index + 1 for index in self.special_ids), 0)
        while limit and self.token(limit - 1) in ("", f"[PAD{limit - 1}]"):
            limit -= 1
        return limit

    def encode(self, text: str, *, special: bool = True, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        With `special` False, text that spells a special token ("<|im_end|>") stays text. `add_bos`
        overrides the tokenizer's own rule; BOS is never doubled. Raises UsageError for text that is not
        valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds a lone surrogate at position {error.start}; it is not valid Unicode"
            ) from None
        with self._lock:
            self.backend.encode_special_tokens = not special
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def token(self, index: int) -> str:
        """The vocabulary's own spelling of a token; "" for ids that pad the embedding."""
        return self.backend.id_to_token(int(index)) or ""

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token adds to the text, special tokens included."""
        found = self._bytes.get(index)
        if found is None:
            found = self._bytes[index] = self._to_bytes(self.token(index))
        return found

    def decode(self, tokens: Iterable[int], *, prompt: Sequence[int] = (), skip_special: bool = True) -> str:
        """The text of `tokens` where they follow `prompt`; what `stream` yields, in one piece."""
        stream = self.stream(prompt, skip_special=skip_special)
        return "".join([stream.feed(token) for token in tokens]) + stream.flush()

    def stream(self, prompt: Sequence[int] = (), *, skip_special: bool = True) -> Detokenizer:
        """An incremental decoder for the tokens that follow `prompt`."""
        return Detokenizer(self, prompt, skip_special=skip_special)


class Detokenizer:
    """Turns tokens into text one by one; the pieces add up to `Tokenizer.decode` of all of them.

    A character whose bytes are spread over tokens comes with its last byte. The end of the prompt is
    fed first, so that a leading space is kept inside a text and a character begun there is completed.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strip if len(prompt) <= PROMPT_TAIL else 0
        for token in prompt[-PROMPT_TAIL:]:
            self.feed(int(token))

    def feed(self, token: int) -> str:
        """The text that this token completes, "" while a character is unfinished."""
        return "" if token in self._skip else self._unspaced(self._decoder.decode(self._token_bytes(token)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD when the tokens end inside a character."""
        return self._unspaced(self._decoder.decode(b"", final=True))

    def _unspaced(self, text: str) -> str:
        if not self._strip or not text:
            return text
        kept = text[min(self._strip, len(text) - len(text.lstrip(" "))) :]
        self._strip = self._strip - (len(text) - len(kept)) if not kept else 0
        return kept


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    spec = json.loads(decoder.__getstate__())  # the decoder's part of tokenizer.json
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


def _byte_rule(steps: Sequence[Mapping[str, Any]]) -> tuple[Callable[[str], bytes], int]:
    """How a decoder of tokenizer.json spells bytes, and how many leading spaces of a text it drops."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, 0
    if not kinds or set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise TokenizerError(
            f"unknown tokenizer decoder {kinds or None}; known: ByteLevel, Metaspace, "
            "and a Sequence of Replace, ByteFallback, Fuse and Strip"
        )
    replacements = dict(_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace"))
    strip = sum(_leading_spaces(step) for step in steps)
    return _pieces(replacements, "ByteFallback" in kinds), strip


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if "String" not in step["pattern"]:
        raise TokenizerError(f"tokenizer decoder replaces {step['pattern']}; only plain strings are known")
    return step["pattern"]["String"], step["content"]


def _leading_spaces(step: Mapping[str, Any]) -> int:
    if step["type"] == "Metaspace":
        return int(step.get("prepend_scheme", "always") != "never")
    if step["type"] != "Strip":
        return 0
    if step["content"] != " " or step["stop"]:
        raise TokenizerError(f"tokenizer decoder strips {step}; only leading spaces are known")
    return int(step["start"])


def _pieces(replacements: Mapping[str, str], byte_fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        match = _BYTE_TOKEN.match(token) if byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in replacements.items():
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")

    return to_bytes


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019); visible Latin-1 is itself."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token with text of its own, such as one that holds a space
        return token.encode("utf-8", "replace")
