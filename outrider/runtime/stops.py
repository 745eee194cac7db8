"""Stop strings that may span tokens: found before any character of them is given out."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.errors import UsageError

__all__ = ["StopStrings"]


class StopStrings:
    """Watches a text that arrives in pieces and gives out what can no longer belong to a stop string.

    The stop string whose last character comes first wins, the longest of those that end together; so the
    cut does not depend on how the text was split into pieces.
    """

    def __init__(self, stops: str | Iterable[str] = ()) -> None:
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise UsageError(f"stop string is {stop!r}; expected text of at least one character")
        self.matched: str | None = None
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that is safe to give out. Once `matched` is set, everything later is dropped."""
        if self.matched is not None:
            return ""
        if not self.stops:
            return piece
        text = self._held + piece
        cut, self.matched = _first_match(text, self.stops)
        self._held = "" if self.matched else text[len(text) - _open_end(text, self.stops) :]
        return text[:cut] if self.matched else text[: len(text) - len(self._held)]

    def flush(self) -> str:
        """What was held back, when the text ends without completing a stop string."""
        held, self._held = self._held, ""
        return held


def _first_match(text: str, stops: Iterable[str]) -> tuple[int, str | None]:
    starts = [(text.find(stop), stop) for stop in stops]
    ends = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    _, cut, stop = min(ends, default=(0, 0, None))
    return cut, stop


def _open_end(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    return max(
        (n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
        default=0,
    )
