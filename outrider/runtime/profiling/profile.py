"""Sweep k, drafters and objectives on one machine, and keep everything that was seen on the way.

A profile is runs: a cell (a way to draft) decodes the same texts for the same time, in every repetition once,
in random order, plain decoding among them. Between runs the machine cools down to where it began, as far as
a thermometer can tell. Under a power cap or a temperature limit every cell is governed, fixed k by pauses
alone; without either nothing holds the device back but itself. What comes of it is a raw trace;
`power.report` makes figures of that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from outrider.contracts import Objective
from outrider.errors import UsageError
from outrider.power.governor import Policy
from outrider.power.report.page import write_report
from outrider.power.report.profile_trace import (
    End,
    Header,
    Line,
    ProfileTrace,
    ProfileWriter,
    RoundLine,
    Run,
    Sample,
    Settings,
    label_of,
    read_profile,
)
from outrider.power.report.summarise import summarise
from outrider.power.report.summary import Summary, write_summary
from outrider.power.state import State
from outrider.runtime.open_pacer import refuse_unmeasurable
from outrider.runtime.planner import Planner
from outrider.runtime.profiling.rig import Rig, Text
from outrider.runtime.profiling.run_meter import RunMeter, RunWork
from outrider.runtime.rounds import Request, Round

__all__ = ["FILES", "TRACE", "Cell", "Options", "cells_of", "finish", "profile"]

GATE_C = 2.0  # the machine has cooled down when it is so near to where it began
SAMPLE_S = 0.1  # between samples in the trace, at least
SAME_S = 1.0  # the same between samples in which nothing is new
SETTLE_S = 3.0  # of rest before an idle baseline: sensors show means of what went before
FILES = TRACE, SUMMARY, REPORT = "profile.jsonl", "summary.json", "report.html"

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Cell:
    """A way to draft: a fixed k with one drafter, or "auto" with any, for an objective.

    `precision` names another rig of the sweep; None: the first, with the graphs that the bundle prefers.
    """

    k: int | Literal["auto"]
    drafter: str | None = None
    objective: Literal["latency", "energy", "balanced"] | None = None
    precision: str | None = None


PLAIN = Cell(0)


@dataclass(frozen=True)
class Options:
    """What to sweep and for how long. `minutes` is the decoding time of the whole profile, shared by all runs.

    Objectives concern k = "auto" alone: a fixed k has nothing to choose. `cool_down_s` is the longest wait
    of a gate between runs, `idle_s` the length of the idle baseline before and after.
    """

    ks: tuple[int | Literal["auto"], ...] = (0, 1, 2, 4, "auto")
    drafters: tuple[str, ...] = ()
    objectives: tuple[Literal["latency", "energy", "balanced"], ...] = ("latency",)
    minutes: float = 10.0
    repeats: int = 3
    seed: int = 0
    power_cap_w: float | None = None
    temp_limit_c: float | None = None
    warm_up_s: float = 5.0
    cool_down_s: float = 120.0
    idle_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse values outside their range, naming the option and the value seen."""
        bounds = {
            "minutes": (self.minutes, 0.001, 24 * 60.0),
            "repeats": (self.repeats, 1, 1000),
            "warm_up_s": (self.warm_up_s, 0.0, 3600.0),
            "cool_down_s": (self.cool_down_s, 0.0, 86_400.0),
            "idle_s": (self.idle_s, 0.0, 3600.0),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise UsageError(f"{name} is {value}; it must be between {low:g} and {high:g}")
        _ = self.policy  # refuses what cannot be kept
        if not self.ks:
            raise UsageError("no k is given; give at least one, such as 2 or auto")

    @property
    def policy(self) -> Policy:
        """What every run must keep. Raises UsageError for what no machine can."""
        return Policy(power_cap_w=self.power_cap_w, temp_limit_c=self.temp_limit_c)


def cells_of(options: Options, known: Sequence[str], precisions: Sequence[str] = ()) -> list[Cell]:
    """The cells of a sweep: plain decoding first, every fixed k with each drafter, auto for each objective.

    All of them again for each other precision; there those alike that the precision of a draft does not touch
    (plain, lookup) are left out. Raises UsageError for a drafter that is not among `known`.
    """
    for name in options.drafters:
        if name not in known:
            raise UsageError(f"unknown drafter {name!r}; this rig has: {', '.join(known) or 'none'}")
    drafters = options.drafters or tuple(known)
    only = drafters[0] if len(drafters) == 1 else None
    cells = [PLAIN]
    for k in options.ks:
        if k == "auto":
            cells += [Cell("auto", only, objective) for objective in options.objectives]
        elif k > 0:
            cells += [Cell(k, name) for name in drafters]
    base = list(dict.fromkeys(cells))
    others = [replace(cell, precision=name) for name in precisions for cell in base if _touches(name, cell)]
    return base + others


def _touches(precision: str, cell: Cell) -> bool:
    return not precision.endswith(" draft") or cell.drafter == "model" or cell.k == "auto"


def profile(
    rig: Rig,
    options: Options,
    folder: Path,
    tool_version: str,
    progress: Progress | None = None,
    precisions: Mapping[str, Rig] | None = None,
) -> ProfileTrace:
    """Sweep, and write `profile.jsonl` into `folder`, line by line; returns what was written.

    `precisions` are rigs of the same bundle on the same machine with other graphs, by name; their runs are mixed
    with the others'.
    An interrupt (Ctrl-C) ends it early: what was measured is kept, and the trace says that it is partial.
    Raises UsageError for a drafter that is not there, and on a real machine for a cap or a limit that nothing
    measures; ProfileError when the disk is full.
    """
    cells = cells_of(options, list(rig.drafters), list(precisions or ()))
    if not rig.simulated:
        _refuse_unmeasurable(rig, options.policy)
    _make(folder)
    run_s = 60.0 * options.minutes / (len(cells) * options.repeats)
    settings = Settings(
        run_s=run_s,
        repeats=options.repeats,
        seed=options.seed,
        power_cap_w=options.power_cap_w,
        temp_limit_c=options.temp_limit_c,
        cells=tuple(_label(cell) for cell in cells),
        warm_up_s=options.warm_up_s,
        cool_down_s=options.cool_down_s,
    )
    header = Header(settings, tool_version, rig.provenance, rig.simulated)
    with ProfileWriter(folder / TRACE, header) as writer:
        _Sweep(rig, precisions or {}, options, cells, run_s, writer, progress).run()
    return read_profile(folder / TRACE)


def finish(trace: ProfileTrace, folder: Path) -> Summary:
    """Write `summary.json` and `report.html` into a folder, the trace's own or another."""
    _make(folder)
    summary = summarise(trace)
    write_summary(summary, folder / SUMMARY)
    write_report(folder / REPORT, summary, trace)
    return summary


def _refuse_unmeasurable(rig: Rig, policy: Policy) -> None:
    """As `generate` does it; sensors that are read in a thread, or slowly, get a moment to speak first."""
    end = rig.clock() + SETTLE_S
    while True:
        rig.monitor.poll()
        try:
            return refuse_unmeasurable(policy, rig.monitor.readings())
        except UsageError:
            if rig.clock() >= end:
                raise
        rig.sleep(0.1)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {folder} cannot be made: {error.strerror or error}") from None


def _label(cell: Cell) -> str:
    return label_of(cell.drafter, str(cell.k), cell.objective, cell.precision)


class _Sweep:
    """One profile under way: its rig, its clock from zero, and the open trace."""

    def __init__(
        self,
        rig: Rig,
        precisions: Mapping[str, Rig],
        options: Options,
        cells: Sequence[Cell],
        run_s: float,
        writer: ProfileWriter,
        progress: Progress | None,
    ) -> None:
        self.rig, self.options, self.cells, self.run_s = rig, options, cells, run_s
        self.writer, self.progress = writer, progress
        shared = {"monitor": rig.monitor, "clock": rig.clock, "sleep": rig.sleep}
        self.rigs: dict[str | None, Rig] = {None: rig}
        self.rigs |= {name: replace(other, **shared) for name, other in precisions.items()}  # type: ignore[arg-type]
        self.meter = RunMeter(rig)
        self.runs = 0
        self.start_c: float | None = None
        self.costs: dict[
            str | None, dict[str, object]
        ] = {}  # that planners have measured so far, by precision
        self._zero_s = rig.clock()
        self._last: Sample | None = None
        if rig.machine is not None:  # sensors are read while a forward runs, as a monitor's thread does
            rig.machine.on_step = rig.monitor.poll

    def run(self) -> None:
        """Baseline, warm-up, every cell in every repetition, baseline; always an end line."""
        end = End(False, "interrupted")
        before: float | None = None
        try:
            self.start_c = self._sample(self.rig.monitor.poll()).hottest_c
            before = self._idle()
            self._warm_up()
            self._repeat()
            end = End(True, idle_after_w=self._idle())
        except KeyboardInterrupt:
            end = End(False, "interrupted")
        except Exception as error:
            end = End(False, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._write(
                replace(
                    end,
                    idle_before_w=before,
                    sampler_share=None if self.rig.simulated else self.rig.monitor.overhead_share,
                    no_meter=self.meter.why_none(),
                    notes=self.rig.notes,
                )
            )

    def _repeat(self) -> None:
        order = random.Random(self.options.seed)
        done, total = 0, len(self.cells) * self.options.repeats
        for repeat in range(self.options.repeats):
            for cell in order.sample(list(self.cells), len(self.cells)):
                self._tell("measuring", done / total)
                cooled = self._cool_down()
                self._decode(cell, repeat, self.run_s, cooled=cooled)
                done += 1

    def _warm_up(self) -> None:
        """Every drafter once, untimed: caches, clocks and the planner's costs."""
        if self.options.warm_up_s <= 0:
            return
        self._tell("warming up", 0.0)
        first = [PLAIN, *(Cell(2, name) for name in self.rig.drafters)]
        cells = [replace(cell, precision=name) for name in self.rigs for cell in first]
        for cell in cells:
            self._decode(cell, 0, self.options.warm_up_s / len(cells), warm_up=True)

    def _idle(self) -> float | None:
        """Mean power at rest, with the models in memory; None where nothing measures it."""
        if self.options.idle_s <= 0:
            return None
        self._tell("idle baseline", 0.0)
        for state in self.rig.rest(SETTLE_S):
            self._sample(state)
        self.meter.begin()
        for state in self.rig.rest(self.options.idle_s):
            self._sample(state)
        taken = self.meter.end()
        return None if taken is None else taken.gross_j / self.options.idle_s

    def _cool_down(self) -> bool | None:
        """Wait until the machine is where it began; None without a thermometer, False when it took too long."""
        if self.start_c is None or self.options.cool_down_s <= 0:
            return None
        state = self.rig.monitor.poll()
        if self._cool(state):
            return True
        return any(self._cool(later) for later in self.rig.rest(self.options.cool_down_s))

    def _cool(self, state: State) -> bool:
        hottest = self._sample(state).hottest_c
        return hottest is not None and self.start_c is not None and hottest <= self.start_c + GATE_C

    def _decode(
        self, cell: Cell, repeat: int, seconds: float, *, warm_up: bool = False, cooled: bool | None = None
    ) -> None:
        """One run: text after text until its time is over. An interrupt still leaves its line."""
        run = _RunCounter(self, cell, repeat, warm_up, cooled)
        try:
            while run.elapsed_s < seconds:
                run.text(seconds)
        except BaseException:
            run.whole = False
            raise
        finally:
            self._write(run.line())
            self.runs += 1

    def planner(self, cell: Cell) -> Planner:
        """A planner that starts from the costs seen so far, and from no acceptance at all."""
        return Planner(dict(self.costs.get(cell.precision, {})), Objective(cell.objective or "latency"))

    def now(self) -> float:
        """Seconds since the profile began."""
        return self.rig.clock() - self._zero_s

    def _sample(self, state: State) -> Sample:
        sample = Sample(
            self.now(),
            state.power_w,
            state.die_c,
            state.skin_c,
            state.clock_ratio,
            state.throttle,
            state.battery_percent,
        )
        last = self._last
        since_s = math.inf if last is None else sample.time_s - last.time_s
        same = last is not None and replace(last, time_s=sample.time_s) == sample
        if since_s >= (SAME_S if same else SAMPLE_S):
            self._last = sample
            self._write(sample)
        return sample

    def _write(self, line: Line) -> None:
        self.writer.add(line)

    def _tell(self, stage: str, share: float) -> None:
        if self.progress is not None:
            self.progress(stage, share)


class _RunCounter:
    """What one run counts while it goes on."""

    def __init__(self, sweep: _Sweep, cell: Cell, repeat: int, warm_up: bool, cooled: bool | None) -> None:
        rig, options = sweep.rigs[cell.precision], sweep.options
        self._rig = rig
        self.sweep, self.cell, self.repeat, self.warm_up, self.cooled = sweep, cell, repeat, warm_up, cooled
        self.whole = True
        self.start_c = sweep._sample(rig.monitor.poll()).hottest_c
        policy = Policy(cell.objective or "latency", options.power_cap_w, options.temp_limit_c)
        self._planner = sweep.planner(cell)
        free = options.power_cap_w is None and options.temp_limit_c is None
        self._engine = rig.engine(self._planner, rig.pacer(policy, free=free))
        self._next = rig.texts()
        self._work = RunWork()
        self._counts = dict.fromkeys(("tokens", "prompt", "rounds", "drafted", "evaluated", "accepted"), 0)
        self._decode_s = self._prefill_s = 0.0
        self._texts = 0
        self.begin_s = sweep.now()
        sweep.meter.begin()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self.sweep.now() - self.begin_s

    def text(self, seconds: float) -> None:
        """Decode one text, or as much of it as the run has time for."""
        text = self._next(None)
        self._texts += 1
        request = Request(
            max_new_tokens=text.max_tokens, stop_ids=text.stop_ids, k=self.cell.k, drafter=self.cell.drafter
        )
        begin = self.sweep.rig.clock()
        paused = 0.0
        with closing(self._engine.decode(text.prompt, request)) as rounds:
            for done in rounds:
                end = self.sweep.rig.clock()
                pause_s = done.stats.paced_s - paused
                paused = done.stats.paced_s
                self._count(done, text, begin, end, pause_s)
                begin = end
                if self.elapsed_s >= seconds:
                    break
        self.sweep.costs[self.cell.precision] = dict(self._planner.to_dict())

    def _count(self, done: Round, text: Text, begin: float, end: float, pause_s: float) -> None:
        if done.stats.rounds == 1:
            self._prefill_s += end - begin
            self._counts["prompt"] += len(text.prompt)
            self._work.prefill(begin, end, len(text.prompt))
        else:
            self._decode_s += end - begin
            for name, count in (
                ("tokens", len(done.tokens)),
                ("rounds", 1),
                ("drafted", done.drafted),
                ("evaluated", done.evaluated),
                ("accepted", done.accepted),
            ):
                self._counts[name] += count
            self._work.round(done, begin + pause_s)
            self._write_round(done, end, end - begin - pause_s, pause_s)
        self.sweep._sample(self.sweep.rig.monitor.poll())

    def _write_round(self, done: Round, end: float, seconds: float, pause_s: float) -> None:
        self.sweep._write(
            RoundLine(
                run=self.sweep.runs,
                time_s=end - self.sweep._zero_s,
                seconds=seconds,
                drafter=done.plan.drafter,
                k=done.plan.k,
                drafted=done.drafted,
                evaluated=done.evaluated,
                accepted=done.accepted,
                tokens=len(done.tokens),
                draft_s=done.draft_s,
                verify_s=done.verify_s,
                pause_s=pause_s,
            )
        )

    def line(self) -> Run:
        """The run's line in the trace; ends its energy window."""
        counts, end_s = self._counts, self.sweep.now()
        energy = self.sweep.meter.end(
            self._work, tail=self.whole, warm_up=self.warm_up, model=self._rig.energy_model
        )
        return Run(
            run=self.sweep.runs,
            drafter=self.cell.drafter,
            k=str(self.cell.k),
            objective=self.cell.objective,
            precision=self.cell.precision,
            repeat=self.repeat,
            begin_s=self.begin_s,
            end_s=end_s,
            tokens=counts["tokens"],
            decode_s=self._decode_s,
            prompt_tokens=counts["prompt"],
            prefill_s=self._prefill_s,
            rounds=counts["rounds"],
            drafted=counts["drafted"],
            evaluated=counts["evaluated"],
            accepted=counts["accepted"],
            texts=self._texts,
            warm_up=self.warm_up,
            whole=self.whole,
            cooled=self.cooled,
            start_c=self.start_c,
            energy=energy,
        )
