"""Committed tokens becoming the text that a reader sees, in the order and at the moment it is safe."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.runtime.sampling import TokenLogprob
from outrider.runtime.stops import StopStrings
from outrider.runtime.text import Tokenizer

__all__ = ["Piece", "Transcript"]


@dataclass(frozen=True)
class Piece:
    """Text that became safe to show, and the tokens that end in it."""

    text: str
    tokens: tuple[int, ...]
    from_draft: int  # how many of `tokens` were drafted
    logprobs: tuple[TokenLogprob, ...]


class Transcript:
    """Feeds committed tokens through the detokenizer and the stop strings, and gives out pieces.

    A token is given out with the last of its text. At a stop string the text is cut before it, and the
    tokens whose text lies wholly after the cut are dropped; `len` counts the tokens that stay.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: str | Iterable[str] = ()) -> None:
        self._stream = tokenizer.stream(prompt)
        self._stops = StopStrings(stops)
        self._tokens: list[int] = []
        self._drafted: list[bool] = []
        self._logprobs: list[TokenLogprob] = []
        self._ends: list[int] = []  # characters of text after each token
        self._shown = 0  # characters given out or ready
        self._ready = ""
        self._given = 0  # tokens given out

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(
        self,
        tokens: Sequence[int],
        accepted: int,
        logprobs: Sequence[TokenLogprob] | None = None,
        ends_with_stop_id: bool = False,
    ) -> bool:
        """Add a round's tokens, the first `accepted` of them drafted; True when a stop string was found.

        A stop token has no text, whatever the vocabulary calls it.
        """
        for index, token in enumerate(tokens):
            silent = ends_with_stop_id and index == len(tokens) - 1
            self._tokens.append(token)
            self._drafted.append(index < accepted)
            if logprobs is not None:
                self._logprobs.append(logprobs[index])
            self._add_text("" if silent else self._stream.feed(token))
            if self.matched:
                self._cut()
                return True
        return False

    def finish(self) -> bool:
        """The text ends here: nothing is held back any more. True when its end completed a stop string."""
        tail = self._stream.flush()
        if self._ends:
            self._ends[-1] += len(tail)
        self._show(self._stops.feed(tail))
        if self.matched:
            self._cut()
            return True
        self._show(self._stops.flush())
        return False

    def take(self, final: bool = False) -> Piece:
        """What became safe since the last call; with `final` every token that stays."""
        count = len(self._tokens) if final else bisect_right(self._ends, self._shown)
        span = slice(self._given, max(self._given, count))
        piece = Piece(
            self._ready, tuple(self._tokens[span]), sum(self._drafted[span]), tuple(self._logprobs[span])
        )
        self._given, self._ready = span.stop, ""
        return piece

    def _add_text(self, text: str) -> None:
        self._ends.append((self._ends[-1] if self._ends else 0) + len(text))
        self._show(self._stops.feed(text))

    def _show(self, text: str) -> None:
        self._ready += text
        self._shown += len(text)

    def _cut(self) -> None:
        """Drop the tokens that begin after the cut, but none that was given out."""
        kept = bisect_left(self._ends, self._shown) + 1 if self._shown else 0
        kept = max(kept, self._given)
        for kind in (self._tokens, self._drafted, self._logprobs, self._ends):
            del kind[kept:]
