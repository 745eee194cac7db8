"""What a bundle needs of a tokenizer, whatever checkpoint it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["END_TOKENS", "TokenizerFiles", "known_end_ids"]

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|eot|>",
    "<end_of_turn>",
    "</s>",
    "<eos>",
)
"""Control tokens by which the known families end a turn or a text."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer: the JSON of the `tokenizers` library, its chat template and its special ids.

    Encode with `add_special_tokens=False` and put `bos_id` in front when `add_bos` is set. `eos_ids` is every
    token that ends a turn or a text, ascending; `eos_token` is the one that the model declares, which chat
    templates know by this name. `vocab_size` counts the tokens, not the embedding's rows.
    """

    tokenizer_json: str
    chat_template: str | None
    bos_id: int | None
    add_bos: bool
    eos_ids: tuple[int, ...]
    vocab_size: int
    pad_id: int | None = None
    unk_id: int | None = None
    eos_token: str | None = None
    special_ids: Mapping[str, int] = field(default_factory=dict)  # content -> id of every control token


def known_end_ids(special_ids: Mapping[str, int], declared: Iterable[int | None]) -> tuple[int, ...]:
    """The declared end ids together with the well-known end tokens among the control tokens, ascending."""
    known = {special_ids[token] for token in END_TOKENS if token in special_ids}
    return tuple(sorted(known | {index for index in declared if index is not None}))
