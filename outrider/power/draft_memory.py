"""Whether the draft model may stay in memory."""

from __future__ import annotations

from outrider.power.state import State
from outrider.power.tuning import Tuning

__all__ = ["DraftMemory"]


class DraftMemory:
    """Releases the draft model under memory pressure, and lets it back when there is room for a while.

    `loaded` says whether it may be there, `why` what it was released for: "limit" (it never fits beside
    the target), "near_limit" (the process grew close to its limit), "low" or "pressure". Without memory readings
    nothing changes.
    """

    def __init__(self, tuning: Tuning, draft_mb: float, target_mb: float, limit_mb: float | None) -> None:
        self._tuning, self._draft_mb, self._limit_mb = tuning, draft_mb, limit_mb
        self._fits = limit_mb is None or target_mb + draft_mb <= limit_mb
        self.loaded = self._fits
        self.why = "" if self._fits else "limit"
        self._roomy_s: float | None = None  # since when there is room
        self._events: float | None = None  # how often a limit had been reached at the last look

    def see(self, state: State) -> None:
        """Take a state."""
        pressed = self._is_pressed(state)
        if not self._fits:
            return
        if self.loaded:
            self.why = self._why_release(state, pressed)
            self.loaded = not self.why
        else:
            self._take_back(state, pressed)

    def _is_pressed(self, state: State) -> bool:
        """Whether a limit was reached since the last look, and not only by pages of files, which the kernel drops."""
        events, before = state.memory_events, self._events
        if events is None:
            return False
        self._events = events
        ample = self._tuning.memory_reserve_mb + self._tuning.memory_return_mb
        available = state.memory_available_mb
        return before is not None and events > before and (available is None or available < ample)

    def _why_release(self, state: State, pressed: bool) -> str:
        tuning, available = self._tuning, state.memory_available_mb
        if pressed or (state.memory_pressure_percent or 0.0) > tuning.pressure_percent:
            return "pressure"
        if available is not None and available < tuning.memory_reserve_mb:
            return "low"
        return "" if self._has_spare(state, tuning.limit_share) else "near_limit"

    def _has_spare(self, state: State, share: float, more_mb: float = 0.0) -> bool:
        """Whether the process, holding so much more, would leave this share of its limit."""
        held_mb = state.memory_resident_mb
        if self._limit_mb is None or held_mb is None:
            return True
        return held_mb + more_mb <= (1.0 - share) * self._limit_mb

    def _take_back(self, state: State, pressed: bool) -> None:
        tuning, available = self._tuning, state.memory_available_mb
        needed = self._draft_mb + tuning.memory_reserve_mb + tuning.memory_return_mb
        calm = not pressed and (state.memory_pressure_percent or 0.0) <= tuning.calm_percent
        roomy = available is None or available >= needed
        spare = self._has_spare(state, 2.0 * tuning.limit_share, self._draft_mb)
        if not (self._is_told(state) and calm and roomy and spare):
            self._roomy_s = None
        elif self._roomy_s is None:
            self._roomy_s = state.time_s
        elif state.time_s - self._roomy_s >= tuning.memory_return_s:
            self.loaded, self.why, self._roomy_s = True, "", None

    def _is_told(self, state: State) -> bool:
        """Whether anybody says that what it was released for is over."""
        by_reason = {
            "pressure": (state.memory_pressure_percent, state.memory_events),
            "near_limit": (state.memory_resident_mb,),
        }
        told = (state.memory_available_mb, *by_reason.get(self.why, ()))
        return any(value is not None for value in told)
