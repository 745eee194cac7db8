"""Random numbers that belong to a position of the text, not to the order of events.

A counter-based generator (Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) keyed by (seed, stream) with the position as counter: how many tokens were drafted, rejected
or cancelled before cannot change the uniform of a position.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.random  # here, for it takes as long as a few tokens: not in the middle of a first draft

__all__ = ["DRAFT_STREAM", "TARGET_STREAM", "Uniforms", "draft_generator"]

TARGET_STREAM = 0
DRAFT_STREAM = 1

_BLOCK = 256
_WORDS = 4  # a Philox counter yields four 64-bit words; a position owns one counter


class Uniforms:
    """`uniforms(position)` is a float64 in [0, 1): the same for a (seed, stream, position), always."""

    def __init__(self, seed: int, stream: int = TARGET_STREAM) -> None:
        self._key = np.array([seed, stream], dtype=np.uint64)
        self._start = -1
        self._block: list[float] = []

    def __call__(self, position: int) -> float:
        start = position - position % _BLOCK
        if start != self._start:
            words = np.random.Philox(key=self._key, counter=start).random_raw(_BLOCK * _WORDS)
            self._block = ((words[::_WORDS] >> np.uint64(11)) * 2.0**-53).tolist()
            self._start = start
        return self._block[position - start]


def draft_generator(seed: int, position: int) -> np.random.Generator:
    """The draft's own stream for a round that starts at `position`; independent of the target's."""
    return cast(np.random.Generator, _MadeWhenUsed(seed, position))


class _MadeWhenUsed:
    """A `np.random.Generator`: making one takes as long as drafting a token by lookup, and few drafts need it."""

    def __init__(self, seed: int, position: int) -> None:
        self._at = (seed, position)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._generator, name)

    @cached_property
    def _generator(self) -> np.random.Generator:
        seed, position = self._at
        key = np.array([seed, DRAFT_STREAM], np.uint64)
        return np.random.Generator(
            np.random.Philox(key=key, counter=np.array([0, position, 0, 0], np.uint64))
        )
