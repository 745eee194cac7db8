"""A governor of memory alone, for machines where no sensor tells how hot they are."""

from __future__ import annotations

from math import isfinite

from outrider.contracts import Costs
from outrider.power.governor import Directive, Governor
from outrider.power.state import State, credible

__all__ = ["MemoryGovernor"]


class MemoryGovernor(Governor):
    """Lets the draft model be released and taken back (`power.draft_memory`), and narrows nothing else."""

    def decide(self, state: State, costs: Costs | None = None) -> Directive:
        """Whether the draft model may be in memory. A state shown twice changes nothing."""
        if isfinite(state.time_s) and (self._time_s is None or state.time_s > self._time_s):
            self._time_s = state.time_s
            self._memory.see(credible(state))
        loaded = self._memory.loaded
        flags = () if loaded else (f"memory={self._memory.why}",)
        return Directive(
            draft_loaded=loaded, flags=("telemetry=none", *flags), reason="only memory is watched"
        )
