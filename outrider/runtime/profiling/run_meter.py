"""Joules of runs and of their stages, from what a monitor reads while they go on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outrider.contracts import Energy
from outrider.power.energy import Activity, EnergyModel, stage_estimates
from outrider.power.meter import Measured, Meter, Window
from outrider.power.report.profile_trace import RunEnergy
from outrider.power.stages import Drafted, split_stages, wasted
from outrider.runtime.profiling.rig import Rig
from outrider.runtime.rounds import Round

__all__ = ["RunMeter", "RunWork"]

LONGEST_TAIL_S = 2.5
KEEP_S = 60.0  # of readings that no open window needs


@dataclass
class RunWork:
    """What ran in a window: when which stage ran, and how much of it."""

    stretches: list[tuple[str, float, float]] = field(default_factory=list)  # stage, begin, end
    drafted: list[Drafted] = field(default_factory=list)
    prompts: Counter[int] = field(default_factory=Counter)  # tokens of a first forward -> how many
    verify: Counter[int] = field(default_factory=Counter)  # width -> forwards
    draft: Counter[str] = field(default_factory=Counter)  # drafter -> steps

    def prefill(self, begin: float, end: float, tokens: int) -> None:
        """Add a prompt, with the round that it ends in."""
        self.stretches.append(("prefill", begin, end))
        self.prompts[tokens] += 1

    def round(self, done: Round, begin: float) -> None:
        """Add a round that began at `begin`, its pause not counted; planning is left to "other"."""
        verify_s = begin + done.draft_s
        width = done.drafted + 1
        if done.plan.drafter is not None and done.drafted:
            self.stretches.append(("draft", begin, verify_s))
            self.draft[done.plan.drafter] += done.drafted
            self.drafted.append(Drafted(done.plan.drafter, done.drafted, done.accepted, width))
        self.stretches.append(("verify", verify_s, verify_s + done.verify_s))
        self.verify[width] += 1

    def estimates(self, energy: Energy, seconds: float) -> dict[str, float]:
        """Joules by stage as an energy model has them, of a window of so many seconds."""
        spent = dict.fromkeys(("prefill", "draft", "verify"), 0.0)
        for stage, begin, end in self.stretches:
            spent[stage] += end - begin
        rest_s = max(0.0, seconds - sum(spent.values()))
        work = {
            "prefill": Activity(spent["prefill"], verify=self.prompts),
            "draft": Activity(spent["draft"], draft=self.draft),
            "verify": Activity(spent["verify"], verify=self.verify),
            "other": Activity(rest_s),
        }
        return stage_estimates(energy, work)

    @property
    def widths(self) -> list[int]:
        """Widths of forwards that an energy model is asked for."""
        return sorted({*self.prompts, *self.verify, *range(1, max(self.verify, default=1) + 1)})


class RunMeter:
    """One window at a time over the sensors of a rig."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._meter = Meter(rig.clock, rig.monitor.periods, keep_s=KEEP_S)
        self._why_none = ""
        self._any = False
        rig.monitor.listeners.append(self._meter.feed)

    def begin(self) -> None:
        """Begin a window."""
        self._meter.begin("run")

    def end(
        self,
        work: RunWork | None = None,
        tail: bool = True,
        warm_up: bool = False,
        model: EnergyModel | None = None,
    ) -> RunEnergy | None:
        """The joules since `begin`, and of the stages of `work`; None where nothing tells them.

        With a `tail` it rests until a sensor has spoken once more, so that the last moments count too. What a
        `warm_up` took, or rest (no `work`), says nothing of whether runs have joules (`why_none`). `model` is of what
        ran, where that is not what the rig runs.
        """
        window = self._meter.end("run")
        if tail:
            self._wait()
        measured = self._meter.measure(window)
        if measured.energy_j is None:
            self._why_none = measured.reason
            return None
        self._any |= work is not None and not warm_up
        return self._energy(measured, window, work or RunWork(), model or self._rig.energy_model)

    def why_none(self) -> str:
        """Why no run has joules; empty where one has."""
        return "" if self._any else self._why_none

    def _wait(self) -> None:
        periods = [self._rig.monitor.interval_s, *self._rig.monitor.periods.values()]
        for _ in self._rig.rest(min(max(periods), LONGEST_TAIL_S)):
            pass

    def _energy(self, measured: Measured, window: Window, work: RunWork, model: EnergyModel) -> RunEnergy:
        budget, gross = measured.budget, measured.energy_j
        assert budget is not None, "a measured window has an error budget"
        assert gross is not None, "and joules"
        joules, how = self._split(measured, window, work, model)
        return RunEnergy(
            gross_j=gross,
            scope=budget.scope,
            method=budget.method,
            trust=budget.trust,
            source=budget.source,
            stages=joules,
            attribution=how,
            samples_expected=budget.samples_expected,
            samples_got=budget.samples_got,
            largest_gap_s=budget.largest_gap_s,
            period_s=budget.period_s,
            coverage=budget.coverage,
            edge_j=budget.edge_j,
        )

    def _split(
        self, measured: Measured, window: Window, work: RunWork, model: EnergyModel
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Joules by stage with what speculation lost of them, and how each was found."""
        if not work.stretches:
            return {}, {}
        energy = model.energy(work.widths)
        estimates = None if energy is None else work.estimates(energy, window.seconds)
        stages = split_stages(measured, work.stretches, estimates, self._meter.energy_between)
        lost = wasted(stages, work.drafted, energy)
        joules = dict(stages.joules)
        if "draft" in joules:
            joules["wasted_draft"] = lost.draft_j
        if lost.verify_j is not None and work.drafted:
            joules["wasted_verify"] = lost.verify_j
        return joules, {stage: str(way) for stage, way in stages.attribution.items()}
