"""What a drafter has not seen of a text, run piece by piece: what it costs is known before all of it is paid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from outrider.contracts import Clock, Drafter, Plan, Sampling
from outrider.runtime.costs import FAR_BEHIND, FIRST_PIECE, NO_MORE
from outrider.runtime.governed import Governed
from outrider.runtime.planner import Planner

__all__ = ["CatchUp", "CatchingUp", "Caught"]

LARGEST_PIECE = 512


@runtime_checkable
class CatchUp(Protocol):
    """A drafter that can run what it has not seen of a text apart from its draft."""

    def catch_up(self, context: Sequence[int], k: int, sampling: Sampling, most: int) -> int:
        """Run at most so many tokens of what is before a draft of k, all but the last; returns how many ran.

        Where `most` is 1 it takes as long as a draft step.
        """
        ...


@dataclass
class Caught:
    """What catching up took in a round: seconds of work, and seconds that were slept to keep a limit."""

    seconds: float = 0.0
    slept_s: float = 0.0

    @property
    def all_s(self) -> float:
        """Both; the pauses for it are among them."""
        return self.seconds + self.slept_s


class CatchingUp:
    """Prices and runs the catch-ups of some drafters; `governed` paces them between their pieces.

    `take_back` is called before a drafter is used: another thread may be at work in it.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        governed: Governed,
        clock: Clock,
        take_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._governed, self._clock, self._take_back = governed, clock, take_back
        self._drafters = drafters
        self.names = frozenset(name for name, drafter in drafters.items() if isinstance(drafter, CatchUp))
        """The drafters that catch up piece by piece."""

    def price(
        self,
        caught: Caught,
        backlogs: dict[str, int],
        context: Sequence[int],
        sampling: Sampling,
        planner: Planner,
    ) -> bool:
        """Let the planner know a draft step of those that are behind, at the price of one; False where none was run.

        Without it their first draft would be measured, with a prompt in it, and that only after all of it. `backlogs`
        is what each has not seen.
        """
        far = [name for name, n in backlogs.items() if name in self.names and n > NO_MORE]
        wanted = [name for name in far if planner.wants_price(name, len(backlogs) == 1)]
        known = False
        for name in wanted:
            ran, seconds = self._run(name, context, 1, sampling, 1, caught)
            if ran:  # not an id that it lacks
                planner.price_step(name, seconds)
                known = True
            backlogs[name] -= ran
        return known

    def run(
        self,
        caught: Caught,
        plan: Plan,
        backlogs: dict[str, int],
        context: Sequence[int],
        sampling: Sampling,
        planner: Planner,
        free: bool,
    ) -> bool:
        """Bring the plan's drafter up to the last token; False where its price speaks against it, or it cannot.

        `free`: the planner chose, and may choose otherwise. A drafter that cannot catch up apart from its draft waits
        until a power cap allows both.
        """
        name = plan.drafter or ""
        if name not in self.names:
            caught.slept_s += self._governed.admit_catch_up(name, backlogs[name], planner)
            return True
        known = not free or planner.knows_catch_up(name)
        largest, behind = LARGEST_PIECE if known else FIRST_PIECE, backlogs[name]
        while (backlog := backlogs[name]) > 1:
            size = min(backlog, largest, self._governed.chunk(LARGEST_PIECE, None))
            caught.slept_s += self._governed.admit_catch_up(name, size, planner)
            ran, seconds = self._run(name, context, plan.k, sampling, size, caught)
            if not ran:
                return not free or backlogs[name] < behind
            planner.saw_catch_up(name, ran, seconds, backlog)
            backlogs[name] -= ran
            if not known and backlogs[name] > FAR_BEHIND and not planner.pays_on(name, backlogs[name]):
                return False
            largest = LARGEST_PIECE
        return True

    def _run(
        self, name: str, context: Sequence[int], k: int, sampling: Sampling, most: int, caught: Caught
    ) -> tuple[int, float]:
        """One piece, with the pause after it; returns its tokens and seconds."""
        self._take_back()
        begin = self._clock()
        ran = cast(CatchUp, self._drafters[name]).catch_up(context, k, sampling, most)
        ended = self._clock()
        seconds = ended - begin
        caught.seconds += seconds
        self._governed.saw(1, None, 0, odd=True, seconds=seconds)
        caught.slept_s += self._governed.pause(self._governed.rest_s(seconds), ended)
        return ran, seconds
