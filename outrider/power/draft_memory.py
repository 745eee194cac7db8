"""Whether the draft model may stay in memory."""

from __future__ import annotations

from outrider.power.state import State
from outrider.power.tuning import Tuning

__all__ = ["DraftMemory"]


class DraftMemory:
    """Releases the draft model under memory pressure, and lets it back when there is room for a while.

    `loaded` says whether it may be there, `why` what it was released for: "limit" (it never fits beside
    the target), "low" or "pressure". Without memory readings nothing changes.
    """

    def __init__(self, tuning: Tuning, draft_mb: float, target_mb: float, limit_mb: float | None) -> None:
        self._tuning, self._draft_mb = tuning, draft_mb
        self._fits = limit_mb is None or target_mb + draft_mb <= limit_mb
        self.loaded = self._fits
        self.why = "" if self._fits else "limit"
        self._roomy_s: float | None = None  # since when there is room

    def see(self, state: State) -> None:
        """Take a state."""
        if not self._fits:
            return
        if self.loaded:
            self._release(state)
        else:
            self._take_back(state)

    def _release(self, state: State) -> None:
        available, pressure = state.memory_available_mb, state.memory_pressure_percent
        if pressure is not None and pressure > self._tuning.pressure_percent:
            self.why = "pressure"
        elif available is not None and available < self._tuning.memory_reserve_mb:
            self.why = "low"
        self.loaded = not self.why

    def _take_back(self, state: State) -> None:
        tuning, available = self._tuning, state.memory_available_mb
        needed = self._draft_mb + tuning.memory_reserve_mb + tuning.memory_return_mb
        pressure = state.memory_pressure_percent
        told = available is not None or (self.why == "pressure" and pressure is not None)
        calm = (pressure or 0.0) <= tuning.calm_percent
        if not (told and calm) or (available is not None and available < needed):
            self._roomy_s = None
        elif self._roomy_s is None:
            self._roomy_s = state.time_s
        elif state.time_s - self._roomy_s >= tuning.memory_return_s:
            self.loaded, self.why, self._roomy_s = True, "", None
