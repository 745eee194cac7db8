"""The engine's side of the governor: it asks, obeys, pauses, and decodes on when the governor fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from outrider.contracts import Clock, Drafter, Objective
from outrider.errors import OutriderError
from outrider.power.governor import Directive, Level
from outrider.power.ledger import Ledger
from outrider.runtime.pacing import Pacer
from outrider.runtime.planner import LONGEST_PACE_S, Planner
from outrider.runtime.stats import Stats
from outrider.targets.freed_memory import return_freed_memory

__all__ = ["FALLBACK", "Governed"]

SLICE_S = 0.25  # of a pause, after which the sensors are looked at again
FIRST_CHUNK = 32  # tokens of a prompt under a limit, before it is known how long they take
LEAST_CHUNK = 16
CATCH_UP_SHARE = (
    0.4  # of the target's time for a token of a prompt, that the draft model takes, until measured
)
CHUNK_SHARE = 0.08  # of what the cap allows in a window, that a chunk of a prompt may take
WINDOW_S = 10.0
LEAST_WAIT_S = 0.002
RETRY_S = 60.0  # after a draft model could not be opened again

FALLBACK = Directive(
    Objective(), Level.WARM, k_max=1, flags=("governor=failed",), reason="the governor failed", overlap=False
)
"""What holds while the governor raises: drafts of one token at most."""

_log = logging.getLogger(__name__)


class _Work(NamedTuple):
    """Something that runs, and what the machine draws meanwhile."""

    seconds: float
    watts: float


class Governed:
    """Asks `pacer` for directives and carries out what they say about pauses and the draft model.

    Without a pacer nothing is asked and nothing pauses. A pacer that raises is logged once and answered by
    `FALLBACK`: the text goes on. `sleep` is what pauses call, in slices, with the sensors read in between. `take_back`
    is called before a draft is released: another thread may be at work in it.
    """

    def __init__(
        self,
        pacer: Pacer | None,
        drafters: Mapping[str, Drafter],
        clock: Clock = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        take_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._take_back = take_back
        self.pacer = pacer
        self.directive: Directive | None = None  # of this round
        self._drafters, self._clock, self._sleep = drafters, clock, sleep
        self._static_w = self._dynamic_w = 0.0
        self._token_s: float | None = None  # of a prompt
        self._last = _Work(0.0, 0.0)
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
        if directive.cap_w is not None and getattr(self.pacer, "ledger", None) is not None:
            directive = replace(
                directive, power_w=directive.cap_w
            )  # the ledger keeps it, by what is measured
        self.directive = directive
        stats.flags = directive.flags
        stats.level = str(max(directive.level, Level[(stats.level or "nominal").upper()]))
        return directive

    def saw(
        self, width: int, drafter: str | None, steps: int, odd: bool = False, seconds: float = 0.0
    ) -> None:
        """Tell the pacer what a round ran, and how long it took."""
        if self.pacer is None:
            return
        try:
            self.pacer.observe(width, drafter, steps, odd, seconds)
            if not odd and self._ledger() is not None:
                watts = self.pacer.work_w(width, drafter, steps, odd, seconds)
                self._last = _Work(seconds, watts)
        except Exception as error:
            self._fail(error)

    def saw_prompt(self, tokens: int, width: int, seconds: float) -> None:
        """Tell the pacer that so many tokens of a prompt ran."""
        self._token_s = seconds / tokens if seconds > 0.0 else self._token_s
        self.saw(width, None, 0, odd=True, seconds=seconds)

    def chunk(self, most: int, widths: tuple[int, ...] | None) -> int:
        """Tokens of a prompt to run at once: few where a limit must hold, so that none breaks it."""
        directive = self.directive
        if directive is None or (directive.power_w is None and directive.duty >= 1.0):
            return most
        if self._token_s is None:
            fitting = FIRST_CHUNK
        else:
            seconds = directive.burst_s
            if directive.cap_w is not None:
                window_j = directive.cap_w * WINDOW_S
                seconds = min(seconds, CHUNK_SHARE * window_j / max(self._prompt_w(), 1e-3))
            fitting = int(seconds / max(self._token_s, 1e-6))
        fitting = min(most, max(fitting, LEAST_CHUNK))
        if widths is None:
            return fitting
        return max((width for width in widths if width <= fitting), default=min(widths))

    def admit_catch_up(self, name: str, backlog: int, planner: Planner) -> float:
        """Wait until a draft model may run the tokens that it has not seen. Returns what was slept."""
        known_s = planner.to_dict()["catch_up_s"].get(name)
        if self._token_s is None:
            return 0.0
        share = CATCH_UP_SHARE if known_s is None else known_s / self._token_s
        return self.admit(max(2, round(share * backlog)))

    def admit(self, tokens: int) -> float:
        """Wait until a prompt's next tokens, or with 1 another round, keep the cap. Returns what was slept."""
        ledger = self._ledger()
        if ledger is None or self.pacer is None or self.directive is None:
            return 0.0
        slept_s = 0.0
        while slept_s < ledger.window_s:
            self.pacer.rest_until(self._now())
            work = self._next(tokens)
            cap_w = self._cap_w() or 0.0
            wait_s = ledger.wait_s(cap_w, work.seconds, work.watts, self.pacer.rest_w)
            hopeless = wait_s >= ledger.window_s - work.seconds  # no rest is long enough
            if wait_s < LEAST_WAIT_S or (hopeless and slept_s >= LONGEST_PACE_S):
                break
            part_s = min(wait_s, SLICE_S)
            self._sleep(part_s)
            slept_s += part_s
            self._look()
        return slept_s

    def pace_s(self, planned_s: float, worked_s: float, priced: bool) -> float:
        """The pause after a round: the plan's, or what the ledger says where the user's cap is what binds.

        What no plan priced (the last chunk of a prompt, a draft that catches up) is paced by what it took.
        """
        directive, ledger = self.directive, self._ledger()
        own_s = planned_s if priced else max(planned_s, self.rest_s(worked_s))
        if directive is None or ledger is None or self.pacer is None or directive.cap_w is None:
            return own_s
        if not priced:
            return max(planned_s, worked_s * (1.0 / directive.duty - 1.0))
        self.pacer.rest_until(self._now())
        cap_s = ledger.pace_s(directive.cap_w, self._last.seconds, self._last.watts, self.pacer.rest_w)
        return max(cap_s, worked_s * (1.0 / directive.duty - 1.0))

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
        if directive.power_w is not None and (directive.cap_w is None or self._ledger() is None):
            excess_j = worked_s * (self._prompt_w() - directive.power_w)
            spare_w = directive.power_w - self.pacer.rest_w
            rest_s = max(rest_s, excess_j / spare_w if spare_w > 0.0 else LONGEST_PACE_S)
        return min(rest_s, LONGEST_PACE_S)

    def _prompt_w(self) -> float:
        """Watts while a prompt runs: as measured or by the profile, else the most that rounds are said to draw."""
        known_w = getattr(self.pacer, "prompt_w", None)
        if known_w is not None and self.pacer is not None:
            return float(self.pacer.rest_w + known_w)
        return self._static_w + self._dynamic_w

    def _next(self, tokens: int) -> _Work:
        """What is expected of a chunk of a prompt, or with 1 token of a round like the last."""
        if tokens <= 1:
            return self._last
        return _Work((self._token_s or 0.0) * tokens, self._prompt_w())

    def _cap_w(self) -> float | None:
        """The user's cap, also where heat allows less."""
        policy = getattr(getattr(self.pacer, "governor", None), "policy", None)
        return (
            None
            if policy is None or self.directive is None or self.directive.power_w is None
            else (policy.power_cap_w)
        )

    def _ledger(self) -> Ledger | None:
        """What was drawn lately, where a cap is to be kept by it."""
        return getattr(self.pacer, "ledger", None) if self._cap_w() is not None else None

    def _now(self) -> float:
        return self.pacer.now_s if self.pacer is not None else 0.0

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
            self.pacer.follow()
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
        if not loaded:
            self._take_back()
        for name, drafter in self._drafters.items():
            move = getattr(drafter, "restore" if loaded else "release", None)
            if move is None or getattr(drafter, "loaded", not loaded) == loaded:
                continue
            if loaded and self._clock() < self._retry_s:
                continue
            try:
                move()
                if not loaded:
                    return_freed_memory()
            except (OutriderError, OSError, MemoryError) as error:
                self._retry_s = self._clock() + RETRY_S
                what = "brought back" if loaded else "released"
                _log.warning("the draft %r cannot be %s, next try in %g s: %s", name, what, RETRY_S, error)
