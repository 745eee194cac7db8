"""Overlapped rounds: while the target verifies a round, the draft works on the next one, on a thread of its own.

The draft assumes that all of its tokens are accepted and that the target's own token after them is the one that
it would have drafted next, one round deep at most; PEARL (arXiv 2408.11850) drafts beside the verify in this way.
Where that comes true, the next round begins with its draft ready; where not, the work is dropped and the draft
rewinds. In time that is left then it may draft behind the likeliest correction too (`runtime.corrections`), so that one
rejection finds its draft ready as well. Either way a round proposes what it would have proposed without it, so the text
is the same.

From the start of a piece of work to its end, the drafter and its graph belong to the thread. `Ahead.settle` and
`Ahead.drop` take them back, before anything else may touch them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from outrider.contracts import Clock, Drafter, Proposal
from outrider.runtime.corrections import Correcting, Correction
from outrider.runtime.uniforms import draft_generator
from outrider.runtime.verify import Decision

__all__ = ["Ahead", "OverlapDrafter", "Timeline", "Worked", "can_overlap"]

_log = logging.getLogger(__name__)


@runtime_checkable
class OverlapDrafter(Protocol):
    """A drafter that can work on the next round while its last proposal is verified."""

    def assume(self, k: int, rng: np.random.Generator) -> Generator[int, None, None]:
        """Draft on as if the last proposal and one more guessed token were committed.

        Yields the guess, then up to k drafts, each after one step. Runs on another thread, must read no context,
        and keeps what it drafted for the next `propose`, which uses it if it came true.
        """
        ...


def can_overlap(drafter: Drafter) -> bool:
    """Whether a drafter can draft beside a verify forward."""
    return isinstance(drafter, OverlapDrafter)


class Timeline(Protocol):
    """What a virtual time must know of the threads that share it (`targets.lanes.Lanes`); real time needs nothing."""

    def begin(self) -> None:
        """Another thread starts to work."""
        ...

    def end(self) -> None:
        """This thread's work has ended."""
        ...

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let time pass until this holds, by another thread's doing."""
        ...

    def notify(self) -> None:
        """What another thread waits for may hold now; that one goes on first."""
        ...


class Worked(NamedTuple):
    """Assumed work that ended: draft steps, the seconds that they took, and how many of them were for nothing.

    Of `corrections` that were drafted behind and put to the test, `held` came true, with `behind` steps done.
    """

    steps: int = 0
    seconds: float = 0.0
    wasted: int = 0
    corrections: int = 0
    held: int = 0
    behind: int = 0


@dataclass(eq=False)
class _Piece:
    """Assumed work in flight. The thread writes all but what its owner found, and wakes its owner."""

    name: str
    work: Generator[int, None, None]
    start: int  # length of the text if everything comes true
    after: Generator[Correction | int, None, None] | None = None  # in time that is left
    until_s: float = 0.0  # of the clock, from its start on
    cancelled: bool = False
    came_true: bool = False
    judged: bool = False
    corrected: bool = False  # what came true is the correction
    correction: Correction | None = None  # that is drafted behind
    later: int = 0  # steps behind it
    guess: int | None = None
    guessed: bool = False  # `guess` is final
    finished: bool = False
    steps: int = 0
    seconds: float = 0.0
    error: BaseException | None = None
    wake: SimpleQueue[None] = field(default_factory=SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `judged` and `correction`

    def run(self, clock: Clock, timeline: Timeline | None) -> None:
        """Draft until it is done or cancelled, and tell the guess as soon as it is made."""
        begin = clock()
        try:
            for token in self.work:
                self.steps += 1
                if self.steps == 1:
                    self.guess, self.guessed = token, True
                    self._tell(timeline)
                if self.cancelled:
                    break
            self.work.close()
            if self.after is not None and not self.cancelled:
                self._correct(self.after, clock, begin)
        except (
            BaseException
        ) as error:  # its owner knows what that means for the text, and must not wait for ever
            self.error = error
        self.seconds = clock() - begin
        self.guessed = self.finished = True
        self.wake.put(None)  # and the timeline learns that its thread has ended

    def _correct(self, after: Generator[Correction | int, None, None], clock: Clock, begin: float) -> None:
        """Draft behind a correction, while whole steps fit into the time that is left."""
        step_s = (clock() - begin) / max(self.steps, 1)
        for item in after:
            if not isinstance(item, Correction):
                self.steps, self.later = self.steps + 1, self.later + 1
            if self.cancelled or self.judged or clock() + step_s > begin + self.until_s:
                break
            if isinstance(item, Correction) and not self._foretell(item):
                break
        after.close()

    def _foretell(self, correction: Correction) -> bool:
        """Say what is drafted behind; False where the verdict was first: it was not put to the test then."""
        with self.lock:
            self.correction = None if self.judged else correction
        return self.correction is not None

    def _tell(self, timeline: Timeline | None) -> None:
        self.wake.put(None)
        if timeline is not None:
            timeline.notify()


class Ahead:
    """At most one piece of assumed work, on a thread that lives from the first piece to `close`.

    A drafter that fails in assumed work is logged, and drafts as usual from then on, where its errors are raised;
    it works ahead again after `close`. `timeline` is for threads that share a virtual time. After a fork there is no
    such thread in the child: what it was at is forgotten there.
    """

    def __init__(self, clock: Clock = time.perf_counter, timeline: Timeline | None = None) -> None:
        self._clock, self._timeline = clock, timeline
        self._thread: threading.Thread | None = None
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()  # of this thread
        self._process = os.getpid()
        self._piece: _Piece | None = None
        self._failed: set[str] = set()
        self._worked = Worked()
        _OPEN.add(self)

    def ready(self, name: str | None, length: int) -> bool:
        """Whether the draft of this drafter behind a text of so many tokens is done, or under way."""
        piece = self._piece
        return piece is not None and piece.name == name and piece.came_true and piece.start == length

    def start(
        self, name: str, drafter: Drafter, seed: int, start: int, k: int, beside_s: float = 0.0
    ) -> bool:
        """Let a drafter assume a text of `start` tokens and draft k behind it; False where that cannot be.

        What then is left of `beside_s` goes to the likeliest correction.
        """
        if k < 1 or name in self._failed or not isinstance(drafter, OverlapDrafter):
            return False
        self.drop()
        after = drafter.correct(k) if beside_s > 0.0 and isinstance(drafter, Correcting) else None
        piece = _Piece(name, drafter.assume(k, draft_generator(seed, start)), start, after, beside_s)
        if self._thread is None:
            self._pieces, self._process = SimpleQueue(), os.getpid()
            serve = partial(_serve, self._pieces, self._clock, self._timeline)
            self._thread = threading.Thread(target=serve, name="outrider-draft", daemon=True)
            self._thread.start()
        if self._timeline is not None:
            self._timeline.begin()
        self._piece = piece
        try:
            self._pieces.put(piece)
        except (
            BaseException
        ):  # an interrupt just before it or just after: it must be served, and is served once
            self._pieces.put(piece)
            raise
        return True

    def judge(self, proposal: Proposal, decision: Decision) -> bool | None:
        """Whether the guess came true; None: it was not put to the test. What did not come true is cancelled."""
        piece = self._piece
        if piece is None:
            return None
        place, token, whole = decision.accepted, decision.tokens[-1], decision.accepted == len(proposal)
        if decision.cut:
            piece.cancelled = True
            return None
        if whole and not piece.guessed:
            self._wait(piece, lambda: piece.guessed)
        right = whole and piece.guess == token
        with piece.lock:
            piece.judged = True
        piece.corrected = not right and piece.correction == (place, token)
        piece.came_true = right or piece.corrected
        piece.cancelled = not piece.came_true
        if piece.corrected:
            piece.start -= len(proposal) - place
        return None if piece.guess is None or not whole else right

    def settle_missed(self) -> None:
        """Wait until the drafter is free, unless what it assumed came true."""
        if self._piece is not None and not self._piece.came_true:
            self.drop()

    def settle(self) -> None:
        """Wait until the drafter is free; what came true is drafted to its end."""
        self._forget_after_fork()
        piece = self._piece
        if piece is None:
            return
        try:
            self._wait(piece, lambda: piece.finished)
        finally:
            if piece.finished:
                self._settled(piece)

    def drop(self) -> None:
        """Take the drafter back, with the step that it is in, and forget what came true."""
        if self._piece is not None:
            self._piece.cancelled, self._piece.came_true = True, False
        self.settle()

    def collect(self) -> Worked:
        """What assumed work has ended since the last call."""
        worked, self._worked = self._worked, Worked()
        return worked

    def close(self) -> None:
        """End work and thread; another `start` begins anew. Closing twice is allowed."""
        self._forget_after_fork()
        thread, pieces = self._thread, self._pieces
        try:
            if thread is not threading.current_thread():
                self.drop()
            elif self._piece is not None:  # collected as garbage from there: nobody may wait for himself
                self._piece.cancelled = True
        finally:
            self._thread = None
            self._failed.clear()
            pieces.put(None)
            if thread not in (None, threading.current_thread()) and thread.ident is not None:
                thread.join()

    def _forget_after_fork(self) -> None:
        if self._process != os.getpid():
            self._piece = self._thread = None
            self._process = os.getpid()

    def _settled(self, piece: _Piece) -> None:
        self._piece = None
        used = piece.later if piece.corrected else piece.steps - piece.later
        if not piece.came_true or piece.error is not None:
            used = 0
        tried = piece.judged and piece.correction is not None
        worked = self._worked
        self._worked = Worked(
            worked.steps + piece.steps,
            worked.seconds + piece.seconds,
            worked.wasted + piece.steps - used,
            worked.corrections + tried,
            worked.held + piece.corrected,
            worked.behind + (piece.later if piece.corrected else 0),
        )
        if piece.error is not None and not isinstance(piece.error, Exception):
            raise piece.error
        if piece.error is not None:
            self._failed.add(piece.name)
            _log.warning("drafter %r failed while it drafted ahead: %s", piece.name, piece.error)
            _log.debug("where it failed", exc_info=piece.error)

    def _wait(self, piece: _Piece, ready: Callable[[], bool]) -> None:
        """Wait for the thread. An interrupt cancels the work and is raised at its end: nothing may be left running."""
        interrupt: KeyboardInterrupt | None = None
        while not ready():
            try:
                if self._timeline is not None:
                    self._timeline.wait(ready)
                piece.wake.get()
            except KeyboardInterrupt as error:
                piece.cancelled, interrupt = True, error
        if piece.finished:  # at the end of the process another thread may wait for the same piece
            piece.wake.put(None)
        if interrupt is not None:
            raise interrupt


_OPEN: weakref.WeakSet[Ahead] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """An iterator that is collected when the interpreter is gone would wait for a thread that is gone as well."""
    for ahead in list(_OPEN):
        ahead.close()


def _serve(pieces: SimpleQueue[_Piece | None], clock: Clock, timeline: Timeline | None) -> None:
    while (piece := pieces.get()) is not None:
        if piece.finished:
            continue
        piece.run(clock, timeline)
        if timeline is not None:
            timeline.end()
