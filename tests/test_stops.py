"""Stop strings cut before anything of them is given out, wherever the pieces end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import UsageError
from outrider.runtime.stops import StopStrings

words = st.text("ab", min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read character by character; stop at the first that completes a stop string, longest first."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def run(stops: StopStrings, pieces: list[str]) -> list[str]:
    return [stops.feed(piece) for piece in pieces] + [stops.flush()]


@given(st.lists(st.text("abc", max_size=5), max_size=12), st.lists(words, max_size=3))
def test_the_cut_is_the_first_match_however_the_text_is_split(pieces: list[str], stops: list[str]) -> None:
    watcher = StopStrings(stops)
    text, found = reference("".join(pieces), stops)
    assert ("".join(run(watcher, pieces)), watcher.matched is not None) == (text, found)


@given(st.text("ab", max_size=30), st.lists(words, min_size=1, max_size=3))
def test_what_is_given_out_never_has_to_be_taken_back(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops)
    final, _ = reference(text, stops)
    shown = ""
    for character in text:
        shown += watcher.feed(character)
        assert final.startswith(shown)


def test_text_that_begins_no_stop_string_is_not_held_back() -> None:
    watcher = StopStrings(["END"])
    assert [watcher.feed(piece) for piece in ["abc", "xE", "y", "EN", "EN", "D later"]] == [
        "abc", "x", "Ey", "", "EN", "",
    ]  # fmt: skip
    assert watcher.matched == "END"
    assert watcher.feed("more") == watcher.flush() == ""


def test_a_single_string_is_one_stop_string() -> None:
    watcher = StopStrings("ab")
    assert watcher.feed("a") + watcher.feed("c") == "ac"
    assert watcher.matched is None


def test_without_stop_strings_everything_passes() -> None:
    assert run(StopStrings(), ["a", "", "b"]) == ["a", "", "b", ""]


@pytest.mark.parametrize("stops", ["", [""], ["a", 3]])
def test_an_empty_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(UsageError, match="stop string is"):
        StopStrings(stops)
