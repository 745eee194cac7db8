"""A draft's head that keeps only its most frequent tokens (FR-Spec, Zhao et al., arXiv 2502.14856).

A draft reads its whole head for every token that it proposes, most of it for tokens that hardly ever occur. The
rows of the rest are left out: the draft then never proposes those tokens (q = 0), which costs acceptance and
never the text. A target is never trimmed. The embedding keeps every row, since any token may be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.contracts import IntArray
from outrider.errors import ExportError, UsageError
from outrider.export.slots import SlotWeights, Tensors
from outrider.export.tokenizer_files import TokenizerFiles
from outrider.manifest import token_map
from outrider.quantize.calibration import calibration_text
from outrider.quantize.schemes import RawBlocks

__all__ = ["TrimmedWeights", "check_size", "choose_ids", "required_ids", "token_counts"]

PRIOR_TOKENS, PRIOR_SHIFT = 60_000, 2_000
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def choose_ids(
    tokenizer: TokenizerFiles, size: int, rows: int, texts: Iterable[str | IntArray] | None = None
) -> IntArray:
    """The `size` ids that a trimmed head of a draft with `rows` embedding rows keeps, ascending.

    First what must not be missing (`required_ids`), then by frequency: how often a token occurs in `texts`, on top
    of what its id says. A text is a string, or ids that a target wrote; None is the calibration text that comes
    with the package.

    Raises UsageError when `size` is not below `rows`, or too small for what must be kept.
    """
    known, required = _known_and_required(tokenizer, size, rows)
    score = prior(rows) + token_counts(tokenizer, [calibration_text()] if texts is None else texts, rows)
    score[required] = np.inf
    ranked = known[np.argsort(-score[known], kind="stable")]
    return np.sort(ranked[:size])


def check_size(tokenizer: TokenizerFiles, size: int, rows: int) -> None:
    """Raise UsageError when a draft with `rows` embedding rows cannot be trimmed to `size`."""
    _known_and_required(tokenizer, size, rows)


def _known_and_required(tokenizer: TokenizerFiles, size: int, rows: int) -> tuple[IntArray, IntArray]:
    """The ids that can be kept and those that must, of a size that is possible."""
    tokens = token_map(json.loads(tokenizer.tokenizer_json))
    known = np.array([index for index in tokens if index < rows], np.int64)
    required = required_ids(tokenizer)
    required = required[required < rows]
    if size >= rows:
        raise UsageError(
            f"--draft-vocab is {size}; the draft's vocabulary has {rows} tokens, so nothing is left out"
        )
    if not len(required) < size <= len(known):
        raise UsageError(
            f"--draft-vocab is {size}; it must be between {len(required) + 1} (end-of-text and chat tokens and single "
            f"bytes are always kept) and {min(len(known), rows - 1)}"
        )
    return known, required


def prior(rows: int) -> NDArray[np.float64]:
    """How often a text of `PRIOR_TOKENS` tokens would hold each id, by Zipf's law with Mandelbrot's shift. [rows]

    A BPE tokenizer numbers its merges in the order in which they were frequent in the text it was trained on. Where
    the shift and the weight lie within a factor of four hardly changes what is kept from 4,096 ids on.
    """
    weights = 1.0 / (np.arange(rows) + PRIOR_SHIFT)
    expected: NDArray[np.float64] = PRIOR_TOKENS * weights / weights.sum()
    return expected


def required_ids(tokenizer: TokenizerFiles) -> IntArray:
    """What every head keeps, ascending: end tokens, the chat template's control tokens, the single bytes."""
    template = tokenizer.chat_template or ""
    tokens = token_map(json.loads(tokenizer.tokenizer_json))
    ids = set(tokenizer.eos_ids)
    ids |= {index for content, index in tokenizer.special_ids.items() if content in template}
    return np.array(sorted(ids | _bytes(tokens)), np.int64)


def _bytes(tokens: dict[int, str]) -> set[int]:
    """Tokens by which any text can be written: `<0xNN>` and ASCII, or the letters that stand for bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    named = {index for index, token in tokens.items() if BYTE_TOKEN.fullmatch(token)}
    letters = {chr(code) for code in range(32, 127)} | {"▁"} if named else set(ByteLevel.alphabet())
    return named | {index for index, token in tokens.items() if token in letters}


def token_counts(tokenizer: TokenizerFiles, texts: Iterable[str | IntArray], rows: int) -> IntArray:
    """How often each id below `rows` occurs in the texts. [rows]"""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_str(tokenizer.tokenizer_json)
    counts = np.zeros(rows, np.int64)
    for text in texts:
        ids = encoder.encode(text, add_special_tokens=False).ids if isinstance(text, str) else text
        kept = np.asarray(ids, np.int64)
        counts += np.bincount(kept[kept < rows], minlength=rows)
    return counts


class TrimmedWeights(SlotWeights):
    """The weights of a checkpoint whose `head` has the rows `ids` only, in this order.

    Its `config` says so (`head_rows`), and that the head is a matrix of its own, also where the checkpoint's is the
    embedding. Every lowering that asks for the slot `head` gets the trimmed one.
    """

    def __init__(self, checkpoint: Tensors, ids: IntArray) -> None:
        super().__init__(checkpoint)
        whole = self.config
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= whole.vocab_size or (np.diff(ids) <= 0).any():
            raise ExportError(f"ids of a trimmed head must be ascending and below {whole.vocab_size}")
        self.ids = ids
        self._tied = whole.tie_embeddings
        self.config = replace(whole, tie_embeddings=False, head_rows=len(ids))

    def parts(self, slot: str) -> tuple[str, ...]:
        """The stems of the checkpoint's tensors that make up a slot, in row order."""
        return super().parts("embedding" if slot == "head" and self._tied else slot)

    def matrix(self, slot: str) -> NDArray[np.float32]:
        """The float32 weight [N, K] of a slot."""
        matrix = super().matrix(slot)
        return matrix[self.ids] if slot == "head" else matrix

    def raw(self, slot: str) -> list[RawBlocks] | None:
        """The source's own blocks of every part, of the head the rows kept; None unless all parts have some."""
        found = super().raw(slot)
        return [self._rows(part) for part in found] if slot == "head" and found else found

    def _rows(self, part: RawBlocks) -> RawBlocks:
        return RawBlocks(part.type_name, (len(self.ids), part.shape[1]), part.data[self.ids])
