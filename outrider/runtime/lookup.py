"""Drafting by looking up: what followed the last time that the text read like this?

Prompt lookup decoding (Saxena 2023; LLMA, arXiv 2304.04487) with an index that grows with the text. It
costs microseconds, so it pays wherever output repeats prompt or output: edits, summaries, code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.contracts import Output, Proposal, Sampling
from outrider.errors import UsageError
from outrider.runtime.context import common_prefix

__all__ = ["LookupDrafter"]

_LONGEST_COMPARED = 32
_MOST_CANDIDATES = 8


class LookupDrafter:
    """Proposes the continuation of the longest earlier match of the text's end.

    Suffixes of `max_ngram` down to `min_ngram` tokens are looked up. Among up to eight earlier places of
    the longest n-gram, the one whose match reaches back furthest wins, then the most recent. When a draft
    runs into the end of the text, the lookup goes on from the drafted tokens.
    """

    name = "lookup"

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UsageError(f"min_ngram {min_ngram} and max_ngram {max_ngram} must be 1 <= min <= max")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.reset()

    def reset(self) -> None:
        """Forget the index."""
        self._read: list[int] = []  # tokens indexed so far
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in range(self.max_ngram + 1)]
        self._earlier: dict[int, int] = {}  # place -> place of the same longest n-gram before it
        self._source: Sequence[int] | None = None
        self._found: tuple[int, tuple[int, int]] = (-1, (-1, 0))

    def kind(self, context: Sequence[int]) -> str | None:
        """The length of the match behind the next proposal ("2", "4", "8", "32", ...); None: no match."""
        _, matched = self._find(context)
        if matched < self.min_ngram:
            return None
        return str(
            matched if matched < 4 else 4 if matched < 8 else 8 if matched < 16 else 16 + 16 * (matched >= 32)
        )

    def propose(
        self, context: Sequence[int], k: int, sampling: Sampling, rng: np.random.Generator
    ) -> Proposal:
        """A chain of at most k tokens; empty when nothing matches."""
        place, _ = self._find(context)
        drafted: list[int] = []
        text = self._read
        while place >= 0 and len(drafted) < k:
            drafted.extend(text[place : place + k - len(drafted)])
            place = self._place_of([*text[len(text) - self.max_ngram :], *drafted])
        tokens = np.array(drafted, np.int64)
        return Proposal(tokens, np.arange(-1, len(tokens) - 1))

    def observe(self, committed: Sequence[int], output: Output | None, rows: Sequence[int]) -> None:
        """Nothing to do: the index reads the context when it is asked."""

    def _find(self, context: Sequence[int]) -> tuple[int, int]:
        """Where the best match continues (-1: none) and how many tokens match."""
        self._sync(context)
        if self._found[0] != len(self._read):
            place = self._place_of(self._read)
            self._found = (len(self._read), self._longest(place) if place >= 0 else (-1, 0))
        return self._found[1]

    def _sync(self, context: Sequence[int]) -> None:
        """Index what was appended since; start over when this is another text."""
        if context is not self._source:
            if common_prefix(self._read, context) < len(self._read):
                self.reset()
            self._source = context
        for token in context[len(self._read) :]:
            self._index(len(self._read))
            self._read.append(token)

    def _index(self, place: int) -> None:
        """Remember `place` as what follows the n-grams that end just before it."""
        for n in range(self.min_ngram, min(self.max_ngram, place) + 1):
            key = tuple(self._read[place - n : place])
            if n == self.max_ngram and key in self._places[n]:
                self._earlier[place] = self._places[n][key]
            self._places[n][key] = place

    def _place_of(self, text: list[int]) -> int:
        """The latest place that follows the longest known suffix of `text`, or -1."""
        for n in range(min(self.max_ngram, len(text)), self.min_ngram - 1, -1):
            place = self._places[n].get(tuple(text[len(text) - n :]), -1)
            if place >= 0:
                return place
        return -1

    def _longest(self, place: int) -> tuple[int, int]:
        """The best of the places that share the longest n-gram, and the length of its match."""
        best, reach = place, self._matched(place)
        for _ in range(_MOST_CANDIDATES - 1):
            place = self._earlier.get(place, -1)
            if place < 0 or reach == _LONGEST_COMPARED:
                break
            matched = self._matched(place)
            if matched > reach:
                best, reach = place, matched
        return best, reach

    def _matched(self, place: int) -> int:
        """How many tokens before `place` equal the end of the text, up to 32."""
        text, end = self._read, len(self._read)
        most = min(place, _LONGEST_COMPARED)
        return next((n for n in range(most) if text[place - 1 - n] != text[end - 1 - n]), most)
