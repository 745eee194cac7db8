"""Drafting by looking up: what followed the last times that the text read like this?

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
_MOST_PLACES = 8
_CLASSES = (32, 16, 8, 4, 3, 2, 1)


class LookupDrafter:
    """Proposes what most often followed the longest earlier match of the text's end.

    Suffixes of `max_ngram` down to `min_ngram` tokens are looked up. Up to eight of the latest places whose match
    reaches back furthest have a vote each on the next token, and those that were outvoted have none on the tokens after
    it. Of equally many votes those of the earliest place count: that is the source, and the later ones are copies of it
    from which the text has already gone on in another way.
    """

    name = "lookup"

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UsageError(f"min_ngram {min_ngram} and max_ngram {max_ngram} must be 1 <= min <= max")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.reset()

    def reset(self) -> None:
        """Forget the index."""
        self._read: list[int] = []  # tokens indexed so far
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(self.max_ngram + 1)]
        self._earlier: list[dict[int, int]] = [{} for _ in self._latest]  # place -> the one before it
        self._source: Sequence[int] | None = None
        self._found: tuple[int, list[int], int] = (-1, [], 0)

    def kind(self, context: Sequence[int]) -> str | None:
        """What the next proposal is worth: "0", "1", "2", "3", "4", "8", "16" or "32"; None: no match.

        That is the length of the match, times the places that vote for its first token less those that vote against it:
        two that agree are as good as one whose match is twice as long.
        """
        places, matched = self._find(context)
        if not places:
            return None
        tokens = [self._read[place] for place in places]
        majority = 2 * tokens.count(_most_votes(tokens)) - len(tokens)
        return next((str(bound) for bound in _CLASSES if matched * majority >= bound), "0")

    def propose(
        self, context: Sequence[int], k: int, sampling: Sampling, rng: np.random.Generator
    ) -> Proposal:
        """A chain of at most k tokens; empty when nothing matches."""
        places, _ = self._find(context)
        text, drafted = self._read, list[int]()
        while places and len(drafted) < k:
            tokens = [text[p] if p < len(text) else drafted[p - len(text)] for p in places]
            drafted.append(_most_votes(tokens))
            places = [p + 1 for p, token in zip(places, tokens, strict=True) if token == drafted[-1]]
        return Proposal(np.array(drafted, np.int64), np.arange(-1, len(drafted) - 1))

    def observe(self, committed: Sequence[int], output: Output | None, rows: Sequence[int]) -> None:
        """Nothing to do: the index reads the context when it is asked."""

    def _find(self, context: Sequence[int]) -> tuple[list[int], int]:
        """Where the longest matches go on, the earliest first, and how many tokens match."""
        self._sync(context)
        if self._found[0] != len(self._read):
            self._found = (len(self._read), *self._longest(*self._places()))
        return self._found[1:]

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
            if key in self._latest[n]:
                self._earlier[n][place] = self._latest[n][key]
            self._latest[n][key] = place

    def _places(self) -> tuple[list[int], int]:
        """The latest places that follow the longest known n-gram at the text's end, and its n."""
        text = self._read
        for n in range(min(self.max_ngram, len(text)), self.min_ngram - 1, -1):
            place = self._latest[n].get(tuple(text[len(text) - n :]))
            places: list[int] = []
            while place is not None and len(places) < _MOST_PLACES:
                places.append(place)
                place = self._earlier[n].get(place)
            if places:
                return places[::-1], n
        return [], 0

    def _longest(self, places: list[int], n: int) -> tuple[list[int], int]:
        """Those of the places whose match reaches back furthest, and how far; a shorter n-gram is all that matches."""
        if n < self.max_ngram:
            return places, n
        reaches = [self._matched(place) for place in places]
        furthest = max(reaches)
        return [p for p, reach in zip(places, reaches, strict=True) if reach == furthest], furthest

    def _matched(self, place: int) -> int:
        """How many tokens before `place` equal the end of the text, up to 32."""
        text, end = self._read, len(self._read)
        most = min(place, _LONGEST_COMPARED)
        return next((n for n in range(most) if text[place - 1 - n] != text[end - 1 - n]), most)


def _most_votes(tokens: list[int]) -> int:
    """The token that most places name; the first of equals."""
    return tokens[0] if len(tokens) == 1 else max(tokens, key=tokens.count)
