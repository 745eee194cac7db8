"""Overlapped decoding ends cleanly, wherever it is closed, interrupted or fails, and leaves nothing behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.overlap.soak import Faulty
from outrider.errors import BackendError, UsageError
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.overlap import Ahead
from outrider.runtime.rounds import Engine, Request, Round
from outrider.targets.fake import FakeGraph
from tests.overlapping import (
    LOGITS,
    PLAIN,
    PROMPT,
    VOCAB,
    draft_logits,
    draft_of,
    engine,
    no_thread_is_left,  # noqa: F401
    overlapped,
    refuse_inconsistent,
    text,
)


def rounds_of(made: Engine, n: int, request: Request | None = None) -> tuple[Generator[Round], list[int]]:
    """A text that is under way: its iterator after n rounds, and what they committed."""
    rounds = made.decode(PROMPT, request or overlapped())
    return rounds, text([next(rounds) for _ in range(n)])


def late_engine() -> Engine:
    """Its draft takes 5 ms a step, so that work ahead is under way between two rounds."""
    draft = Faulty(VOCAB, logits=LOGITS, late_s=0.005)
    return engine(draft=draft)


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_closing_the_iterator_in_the_middle_ends_the_thread_and_leaves_both_caches_usable(after: int) -> None:
    made = late_engine()
    rounds, committed = rounds_of(made, after)
    rounds.close()
    refuse_inconsistent(made, [*PROMPT, *committed])
    again = text(made.decode([*PROMPT, *committed], overlapped(60 - len(committed))))
    assert committed + again == PLAIN


def test_an_iterator_that_is_dropped_unclosed_ends_its_thread() -> None:
    made = late_engine()
    rounds, committed = rounds_of(made, 3)
    del rounds
    gc.collect()
    refuse_inconsistent(made, [*PROMPT, *committed])


@pytest.mark.parametrize("how", ["reset", "settle", "another text"])
def test_what_takes_the_engine_over_ends_the_work_ahead_of_the_text_before(how: str) -> None:
    made = late_engine()
    rounds, _ = rounds_of(made, 3)
    if how == "reset":
        made.reset()
        assert draft_of(made).length == 0
    elif how == "settle":
        made.settle()
    else:
        made.decode([2, 2], overlapped(9))  # not even begun
    assert [thread for thread in threading.enumerate() if thread.name == "outrider-draft"] == []
    if how == "settle":  # the text may go on
        assert PLAIN[-8:] == text(rounds)[-8:]
    else:
        with pytest.raises(UsageError, match="another generation"):
            next(rounds)
    assert text(made.decode(PROMPT, overlapped())) == PLAIN


def test_closing_an_older_text_does_not_disturb_the_one_that_took_over() -> None:
    made = late_engine()
    older, _ = rounds_of(made, 3)
    newer, committed = rounds_of(made, 3)
    older.close()
    assert committed + text(newer) == PLAIN


def until_it_fails(rounds: Iterator[Round], into: list[int]) -> None:
    """Take what is committed until an error comes."""
    for part in rounds:
        into.extend(part.tokens)


@pytest.mark.parametrize("at", range(3, 16, 2))
@pytest.mark.parametrize("error", [BackendError, KeyboardInterrupt, MemoryError])
def test_an_error_of_the_target_ends_the_text_and_the_thread_and_the_engine_goes_on(
    at: int, error: Any
) -> None:
    target = Faulty(VOCAB, logits=LOGITS, fails_at=at, error=error)
    made = engine(0.95, target=target, draft=Faulty(VOCAB, logits=draft_logits(0.95), late_s=0.001))
    committed: list[int] = []
    with pytest.raises(error, match="injected"):
        until_it_fails(made.decode(PROMPT, overlapped()), committed)
    assert committed == PLAIN[: len(committed)]
    refuse_inconsistent(made, [*PROMPT, *committed])
    assert text(made.decode(PROMPT, overlapped())) == PLAIN


def test_a_draft_that_fails_while_it_works_ahead_costs_speed_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failure in a step that serial decoding might not have run is no error of the text."""
    ends = set()
    for at in range(1, 24):
        made = engine(draft=Faulty(VOCAB, logits=LOGITS, fails_at=at))
        committed: list[int] = []
        caplog.clear()
        try:
            until_it_fails(made.decode(PROMPT, overlapped()), committed)
        except BackendError:
            ends.add("while it was waited for")
        else:
            assert committed == PLAIN
            assert ["drafted ahead: injected" in record.getMessage() for record in caplog.records] == [True]
            ends.add("ahead")
        refuse_inconsistent(made, [*PROMPT, *PLAIN])
        assert text(made.decode(PROMPT, overlapped())) == PLAIN
    assert ends == {"while it was waited for", "ahead"}


def test_an_interrupt_while_the_engine_waits_for_the_draft_is_raised_once_the_draft_is_free() -> None:
    made = engine(draft=Faulty(VOCAB, logits=LOGITS, late_s=0.02))
    made.drafters["model"].graph.late_s = 0.02  # type: ignore[attr-defined]
    seen = 0

    def interrupted(ready: Callable[[], bool]) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            raise KeyboardInterrupt

    class Timeline:
        """Real time, but for a Ctrl-C in the second wait."""

        def begin(self) -> None: ...
        def end(self) -> None: ...
        def notify(self) -> None: ...
        def wait(self, ready: Callable[[], bool]) -> None:
            interrupted(ready)

    made._ahead = made._choosing._ahead = Ahead(timeline=Timeline())
    with pytest.raises(KeyboardInterrupt):
        list(made.decode(PROMPT, overlapped()))
    assert seen >= 2
    assert made._ahead._piece is None
    assert text(made.decode(PROMPT, overlapped())) == PLAIN


def test_an_interrupt_in_the_draft_s_thread_is_raised_where_the_text_is_read() -> None:
    for at in range(3, 9):
        made = engine(draft=Faulty(VOCAB, logits=LOGITS, fails_at=at, error=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(made.decode(PROMPT, overlapped()))
        refuse_inconsistent(made, [*PROMPT, *PLAIN])
        assert text(made.decode(PROMPT, overlapped())) == PLAIN


def test_after_it_was_closed_on_its_own_thread_work_ahead_begins_anew() -> None:
    ahead = Ahead()

    class Collecting(ModelDrafter):
        def assume(self, k: int, rng: np.random.Generator) -> Any:
            ahead.close()  # as a collector of garbage does that runs on this thread
            yield from range(k)

    drafter = Collecting(FakeGraph(VOCAB, logits=LOGITS))
    for _ in range(3):
        assert ahead.start("model", drafter, 0, 10, 3)
        ahead.settle()
    ahead.close()
    assert ahead.collect().steps == 3  # each ends with the step that it is in


def test_two_threads_that_wait_for_the_same_work_both_go_on() -> None:
    """A process ends while a thread of its own, which nobody joins, waits for a draft."""
    ahead, go = Ahead(), threading.Event()

    class Unsure(ModelDrafter):
        def assume(self, k: int, rng: np.random.Generator) -> Any:
            go.wait()
            yield from ()

    assert ahead.start("model", Unsure(FakeGraph(VOCAB, logits=LOGITS)), 0, 10, 3)
    waiting = [threading.Thread(target=end, daemon=True) for end in (ahead.settle, ahead.close)]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)  # in which both come to wait: with less, the test is only weaker
    go.set()
    for thread in waiting:
        thread.join(60)
    assert not any(thread.is_alive() for thread in waiting)


ABANDONED = """
import os, threading
from benchmarks.overlap.soak import Faulty
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.rounds import Engine, Request
drafter = ModelDrafter(Faulty(13, late_s=0.05), min_confidence=0.0)
request = Request(max_new_tokens=60, k=3, drafter="model", drafting="overlapped")
rounds = Engine(Faulty(13), {"model": drafter}).decode([1, 2, 3], request)
for _ in range(3):
    next(rounds)
assert any(thread.name == "outrider-draft" for thread in threading.enumerate())
child = os.fork()
if child == 0:
    rounds.close()
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


def test_a_text_left_in_the_middle_keeps_neither_a_fork_nor_the_end_of_the_process_waiting() -> None:
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", ABANDONED], check=True, timeout=600, cwd=root)
