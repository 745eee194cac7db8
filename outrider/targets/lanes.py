"""A virtual time that several threads share: it moves only while every one of them waits.

So a simulation with threads has one outcome, whatever the scheduler of the real machine does (a conservative
discrete-event simulation: Chandy and Misra 1979).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["Lanes"]

Job = TypeVar("Job")


class Lanes(Generic[Job]):
    """Threads with work to do in virtual time; `step` lets time pass until a job is done, and returns that job.

    It is called with the jobs of all lanes, that of the thread which made this first. Fulfils
    `runtime.overlap.Timeline`.
    """

    def __init__(self, step: Callable[[Sequence[Job]], Job]) -> None:
        self._step = step
        self._changed = threading.Condition()
        self._running = 1
        self._owner = threading.get_ident()
        self._jobs: list[tuple[int, Job]] = []  # with their threads; the owner's first
        self._waiting: list[Callable[[], bool]] = []

    @property
    def mine(self) -> bool:
        """Whether this is the thread that made the lanes."""
        return threading.get_ident() == self._owner

    def begin(self) -> None:
        """Another thread starts to work."""
        with self._changed:
            self._running += 1

    def end(self) -> None:
        """This thread's work has ended."""
        with self._changed:
            self._running -= 1
            self._drive()

    def notify(self) -> None:
        """What another thread waits for may hold now; then that one goes on first, until it waits for time again.

        Or the scheduler would decide what this thread sees of what that one does at the same moment.
        """
        with self._changed:
            self._changed.notify_all()
            while self._running > 1 or any(ready() for ready in self._waiting):
                self._changed.wait()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let time pass until this holds, by another thread's doing."""
        with self._changed:
            self._running -= 1
            self._waiting.append(ready)
            try:
                self._drive()
                while not ready():
                    self._changed.wait()
            finally:
                self._waiting.remove(ready)
                self._running += 1

    def run(self, job: Job) -> None:
        """Do a job, in as much time as it takes beside those of the other threads."""
        thread = threading.get_ident()
        with self._changed:
            place = 0 if self.mine else len(self._jobs)
            self._jobs.insert(place, (thread, job))
            self._running -= 1
            self._drive()
            while any(pending is job for _, pending in self._jobs):
                self._changed.wait()

    def _drive(self) -> None:
        """Let time pass while nobody can go on without that."""
        while self._running == 0 and self._jobs and not any(ready() for ready in self._waiting):
            done = self._step([job for _, job in self._jobs])
            self._jobs = [entry for entry in self._jobs if entry[1] is not done]
            self._running += 1
        self._changed.notify_all()
