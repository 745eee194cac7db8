"""Joules of runs and of their stages, from what a monitor reads while they go on."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.power.meter import Measured, Meter, Window
from outrider.power.profile_trace import RunEnergy
from outrider.runtime.rig import Rig

__all__ = ["RunMeter", "Stage"]

LONGEST_TAIL_S = 2.5
KEEP_S = 60.0  # of readings that no open window needs
Stage = tuple[str, float, float]
"""Name, begin and end, in seconds on the rig's clock."""


class RunMeter:
    """One window at a time over the sensors of a rig."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._meter = Meter(rig.clock, rig.monitor.periods, keep_s=KEEP_S)
        self._begin_s = 0.0
        self._why_none = ""
        self._any = False
        rig.monitor.listeners.append(self._meter.feed)

    def begin(self) -> None:
        """Begin a window."""
        self._begin_s = self._rig.clock()
        self._meter.begin("run")

    def end(self, stages: Sequence[Stage] = (), tail: bool = True) -> RunEnergy | None:
        """The joules since `begin`, and of stages in it; None where nothing tells them.

        With a `tail` it rests until a sensor has spoken once more, so that the last moments count too.
        """
        window = self._meter.end("run")
        if tail:
            self._wait()
        measured = self._meter.measure(window)
        if measured.energy_j is None:
            self._why_none = measured.reason
            return None
        self._any = True
        return self._energy(measured, window, stages)

    def why_none(self) -> str:
        """Why there is no meter; empty where there is one."""
        return "" if self._any else self._why_none

    def _wait(self) -> None:
        periods = [self._rig.monitor.interval_s, *self._rig.monitor.periods.values()]
        for _ in self._rig.rest(min(max(periods), LONGEST_TAIL_S)):
            pass

    def _energy(self, measured: Measured, window: Window, stages: Sequence[Stage]) -> RunEnergy:
        budget, gross = measured.budget, measured.energy_j
        assert budget is not None, "a measured window has an error budget"
        assert gross is not None, "and joules"
        return RunEnergy(
            gross_j=gross,
            scope=budget.scope,
            method=budget.method,
            trust=budget.trust,
            source=budget.source,
            stages=self._split(budget.source, stages, gross),
            samples_expected=budget.samples_expected,
            samples_got=budget.samples_got,
            largest_gap_s=budget.largest_gap_s,
            period_s=budget.period_s,
            coverage=budget.coverage,
            edge_j=budget.edge_j,
        )

    def _split(self, source: str, stages: Sequence[Stage], gross_j: float) -> dict[str, float]:
        """Joules by stage, by the time in which they were drawn; what no stage has is "other"."""
        totals: dict[str, float] = {}
        for name, begin, end in stages:
            part = self._meter.energy_between(source, begin, end)
            if part is not None and end > begin:
                totals[name] = totals.get(name, 0.0) + part.joules
        if totals:
            named = sum(joules for name, joules in totals.items() if name != "wasted_draft")
            totals["other"] = gross_j - named
        return totals
