"""The engine's side of the governor: it asks, obeys, pauses, and decodes on when the governor fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from outrider.contracts import Clock, Drafter, Objective
from outrider.errors import OutriderError
from outrider.power.governor import Directive, Level
from outrider.runtime.pacing import Pacer
from outrider.runtime.planner import LONGEST_PACE_S, Planner
from outrider.runtime.stats import Stats

__all__ = ["FALLBACK", "Governed"]

SLICE_S = 0.25  # of a pause, after which the sensors are looked at again
RETRY_S = 60.0  # after a draft model could not be opened again

FALLBACK = Directive(
    Objective(), Level.WARM, k_max=1, flags=("governor=failed",), reason="the governor failed"
)
"""What holds while the governor raises: drafts of one token at most."""

_log = logging.getLogger(__name__)


class Governed:
    """Asks `pacer` for directives and carries out what they say about pauses and the draft model.

    Without a pacer nothing is asked and nothing pauses. A pacer that raises is logged once and answered by
    `FALLBACK`: the text goes on. `sleep` is what pauses call, in slices, with the sensors read in between.
    """

    def __init__(
        self,
        pacer: Pacer | None,
        drafters: Mapping[str, Drafter],
        clock: Clock = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.pacer = pacer
        self.directive: Directive | None = None  # of this round
        self._drafters, self._clock, self._sleep = drafters, clock, sleep
        self._static_w = self._dynamic_w = 0.0
        self._failed = False
        self._retry_s = float("-inf")

    def ask(self, planner: Planner, stats: Stats) -> Directive | None:
        """The directive of the next round, with the draft model released or brought back as it says."""
        if self.pacer is None:
            return None
        try:
            self._price(planner)
            directive = self.pacer.directive(planner.costs)
        except Exception as error:  # a governor must not cost anyone their text
            directive = self._fail(error)
        self._hold_drafts(directive.draft_loaded)
        self.directive = directive
        stats.level = str(max(directive.level, Level[(stats.level or "nominal").upper()]))
        return directive

    def saw(self, width: int, drafter: str | None, steps: int, odd: bool = False) -> None:
        """Tell the pacer what a round ran."""
        if self.pacer is None:
            return
        try:
            self.pacer.observe(width, drafter, steps, odd)
        except Exception as error:
            self._fail(error)

    def pause(self, pace_s: float, since_s: float) -> float:
        """Sleep until `pace_s` after `since_s`; what the caller did meanwhile counts. Returns what was slept."""
        left_s = min(pace_s, LONGEST_PACE_S)
        left_s = slept_s = max(0.0, left_s - max(0.0, self._clock() - since_s))
        while left_s > 0.0:
            part_s = min(left_s, SLICE_S)
            self._sleep(part_s)
            left_s -= part_s
            self._look()
        return slept_s

    def rest_s(self, worked_s: float) -> float:
        """The pause after work that no plan priced, such as a chunk of a prompt, by the last directive."""
        directive = self.directive
        if directive is None or self.pacer is None:
            return 0.0
        rest_s = worked_s * (1.0 / directive.duty - 1.0)
        if directive.power_w is not None:
            measured_w = max(self.pacer.state.power_w or 0.0, self.pacer.odd_w) - self._static_w
            dynamic_j = worked_s * max(measured_w, self._dynamic_w)
            spare_w = directive.power_w - self._static_w
            rest_s = max(rest_s, dynamic_j / spare_w - worked_s if spare_w > 0.0 else LONGEST_PACE_S)
        return min(rest_s, LONGEST_PACE_S)

    def _price(self, planner: Planner) -> None:
        """Tell the planner what rounds cost in joules, and note the most that work draws."""
        if self.pacer is None:
            return
        verify_s = planner.costs.verify_s
        planner.energy = energy = self.pacer.energy(verify_s)
        if energy is not None:
            self._static_w = energy.static_w
            powers = (energy.verify_j[w] / s for w, s in verify_s.items() if s > 0.0 and w in energy.verify_j)
            self._dynamic_w = max(powers, default=0.0)

    def _look(self) -> None:
        if self.pacer is None:
            return
        try:
            self.pacer.poll()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> Directive:
        if not self._failed:
            _log.warning("the governor failed and is ignored until it recovers: %r", error)
            _log.debug("where it failed", exc_info=error)
            self._failed = True
        return FALLBACK

    def _hold_drafts(self, loaded: bool) -> None:
        """Release what can be released, or bring it back; a draft that cannot be opened is tried again later."""
        for name, drafter in self._drafters.items():
            move = getattr(drafter, "restore" if loaded else "release", None)
            if move is None or (loaded and self._clock() < self._retry_s):
                continue
            try:
                move()
            except (OutriderError, OSError, MemoryError) as error:
                self._retry_s = self._clock() + RETRY_S
                _log.warning(
                    "the draft %r cannot be brought back, next try in %g s: %s", name, RETRY_S, error
                )
