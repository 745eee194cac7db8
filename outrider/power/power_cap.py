"""Holding a power limit by what is measured: a trim of the planned power, or a duty without a plan."""

from __future__ import annotations

from outrider.power.tuning import Tuning

__all__ = ["PowerCap"]


class PowerCap:
    """Corrects a power limit by the mean power that came of it.

    Where rounds have energy figures, the planner paces for `limit * trim`; the trim takes away what these
    figures get wrong and never adds. Where they have none but power is measured, `duty` is the share of time
    that keeps the cap.
    """

    def __init__(self, cap_w: float | None, tuning: Tuning) -> None:
        self.cap_w = cap_w
        self.trim = 1.0
        self.duty = 1.0
        self.mean_w: float | None = None
        self._tuning = tuning
        self._unseen_s = 0.0

    def see(self, dt_s: float, power_w: float | None, energy_known: bool) -> None:
        """Take a reading of power. The first counts for the time before it too: it began with the work."""
        if self.cap_w is None:
            return
        if power_w is None:
            self._unseen_s += dt_s if self.mean_w is None else 0.0
            return
        dt_s = min(dt_s + self._unseen_s, self._tuning.longest_gap_s)
        self._unseen_s = 0.0
        weight = dt_s / (self._tuning.power_average_s + dt_s)
        self.mean_w = power_w if self.mean_w is None else self.mean_w + weight * (power_w - self.mean_w)
        step = dt_s / self._tuning.power_trim_s
        if energy_known:
            self.duty = 1.0
            spare = (self.cap_w - power_w) / self.cap_w
            self.trim = min(max(self.trim + step * spare, self._tuning.least_trim), 1.0)
        else:
            self.trim = 1.0
            spare = (self.cap_w - self.mean_w) / self.cap_w
            change = max(1.0 + step * spare, 0.5)
            self.duty = min(max(self.duty * change, self._tuning.least_duty), 1.0)
