"""The text so far, as drafters see it: append-only, so that an index over it can grow with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

__all__ = ["Context", "common_prefix"]


class Context(Sequence[int]):
    """Tokens of one generation: `prompt_length` prompt tokens, then the committed output.

    Within one generation the same object only grows. Drafters may remember how far they have read it.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        self._tokens = [int(token) for token in prompt]
        self.prompt_length = len(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens (the engine's right alone)."""
        self._tokens.extend(tokens)


def common_prefix(first: Sequence[int], second: Sequence[int], start: int = 0) -> int:
    """How many leading tokens two sequences share, given that `start` of them are known to be equal."""
    end = min(len(first), len(second))
    if list(first[start:end]) == list(second[start:end]):
        return end
    return next(index for index in range(start, end) if first[index] != second[index])
