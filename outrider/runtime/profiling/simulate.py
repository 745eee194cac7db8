"""A scripted day on a simulated device, under one policy or under several that are compared.

Every policy decodes the same texts with the real engine, planner, governor and pacer; only k differs. Fixed
policies keep the same constraints as the governed one, by pauses, and the device's own throttling acts on
all. Everything here is simulated: nothing was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from outrider.errors import UsageError
from outrider.power.governor import Policy
from outrider.power.report.simulation import PolicyRun, TimelinePoint
from outrider.runtime.pacing import Pacer
from outrider.runtime.planner import Planner
from outrider.runtime.profiling.rig import Rig, trace_rig
from outrider.runtime.rounds import Engine, Request, Round, refuse_k
from outrider.targets.device import Device, Figure, load_device
from outrider.targets.model_cost import DRAFT_COST, TARGET_COST, ModelCost
from outrider.targets.scenario import Scenario
from outrider.targets.simulated import Machine, perturbed
from outrider.targets.trace_model import TraceText

__all__ = [
    "FIXED_K",
    "Interrupted",
    "PolicyRun",
    "Rule",
    "TimelinePoint",
    "compare",
    "fixed_rules",
    "format_runs",
    "parse_rule",
    "run_policy",
]

FIXED_K = (1, 2, 3, 4, 6, 8)
CAP_WINDOW_S = 10.0
REST_STEP_S = 1.0
POINT_S = 1.0  # between points of a timeline


@dataclass(frozen=True)
class Rule:
    """How a policy chooses drafts. `paced` False: nothing but the device's own throttling holds it back."""

    k: int | Literal["auto"]
    drafter: str | None = None
    paced: bool = True

    @property
    def name(self) -> str:
        """As it is written: `plain`, `governed`, `k=4`, `model k=4`, with `unpaced` behind."""
        if self.k == 0:
            name = "plain"
        elif self.k == "auto":
            name = "governed" if self.paced else "auto"
        else:
            name = f"{self.drafter} k={self.k}" if self.drafter else f"k={self.k}"
        return name if self.paced or self.k == "auto" else f"{name} unpaced"


def parse_rule(text: str) -> Rule:
    """A rule from its name. Raises UsageError, naming what is known."""
    named = {"plain": Rule(0), "governed": Rule("auto"), "auto": Rule("auto", paced=False)}
    words = text.split()
    paced = words[-1:] != ["unpaced"]
    words = words if paced else words[:-1]
    if len(words) == 1 and words[0] in named and (paced or words == ["plain"]):
        return replace(named[words[0]], paced=paced and words != ["auto"])
    if words and len(words) <= 2 and words[-1].startswith("k=") and words[-1][2:].isdecimal():
        try:
            refuse_k(int(words[-1][2:]))
        except UsageError as error:
            raise UsageError(f"policies is {text!r}: {error}") from None
        return Rule(int(words[-1][2:]), words[0] if len(words) == 2 else None, paced)
    raise UsageError(
        f"unknown policy {text!r}; known: plain, governed, auto (ungoverned), k=N, DRAFTER k=N,"
        " and plain or a fixed k with 'unpaced' behind it"
    )


def fixed_rules(drafters: Sequence[str], ks: Sequence[int] = FIXED_K) -> list[Rule]:
    """Every fixed k, with each drafter alone and, where there are several, with whichever proposes first."""
    names: list[str | None] = [*drafters] if len(drafters) == 1 else [None, *drafters]
    return [Rule(k, name) for name in names for k in ks]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while policies were compared; `runs` are those that were finished, each whole."""

    def __init__(self, runs: list[PolicyRun]) -> None:
        super().__init__()
        self.runs = runs


def run_policy(
    scenario: Scenario,
    policy: str | Rule,
    acceptance: Sequence[TraceText],
    *,
    device: Device | None = None,
    target_cost: ModelCost = TARGET_COST,
    draft_cost: ModelCost = DRAFT_COST,
    jitter: float = 0.01,
    timeline: bool = True,
    telemetry: Path | None = None,
) -> PolicyRun:
    """Live through a scenario under a policy.

    `policy` is a rule or its name (`parse_rule`); `acceptance` are the texts of an acceptance trace; `device`
    replaces the scenario's; what is paced sees the recorded `telemetry`, if there is one, instead of the simulated
    sensors. The specimen that runs differs from the profile by the scenario's `spread`; the
    governor knows the profile alone. Equal arguments give equal runs.
    """
    rule = parse_rule(policy) if isinstance(policy, str) else policy
    known = device or load_device(scenario.device)
    if telemetry is None:
        refuse_unsensed(scenario, known)
    specimen = perturbed(known, scenario.seed, scenario.spread) if scenario.spread else known
    machine = Machine(
        specimen,
        scenario.ambient_c,
        scenario.seed,
        events=scenario.events,
        battery=scenario.battery_percent,
        preheated_w=scenario.preheated_w,
        jitter=jitter,
    )
    rig = trace_rig(
        known, acceptance, machine, target_cost=target_cost, draft_cost=draft_cost, seed=scenario.seed
    )
    if rule.drafter is not None and rule.drafter not in rig.drafters:
        raise UsageError(f"unknown drafter {rule.drafter!r}; the trace has: {', '.join(rig.drafters)}")
    if telemetry is not None:
        rig = rig.played_back(telemetry)
    return _Day(scenario, rule, rig, known, timeline).live()


def refuse_unsensed(scenario: Scenario, device: Device) -> None:
    """Raise UsageError for a limit that no sensor of the device tells: a governor could not keep it.

    Where nothing tells heat or power (an iPhone), the case is estimated from the profile.
    """
    senses = device.sensors
    estimated = senses.die is None and senses.power is None
    missing = {
        "temp_limit_c": senses.die is None and not estimated and "no sensor of the die's temperature",
        "skin_limit_c": senses.skin is None and not estimated and "no sensor of the case's temperature",
        "battery_floor_percent": device.battery is None and "no battery",
    }
    for name, lack in missing.items():
        value = getattr(scenario, name)
        if value is not None and lack:
            raise UsageError(
                f"scenario {scenario.name}: {name} is {value:g}, but {device.name} has {lack};"
                " leave it out, or take another device"
            )


def policy_of(scenario: Scenario) -> Policy:
    """What the governor is told of a scenario's constraints."""
    return Policy(
        objective=scenario.objective,  # type: ignore[arg-type]
        power_cap_w=scenario.power_cap_w,
        battery_floor_percent=scenario.battery_floor_percent,
    )


def profile_of(scenario: Scenario, device: Device) -> Device:
    """What a governor knows of the device: its profile, with the scenario's limits in place of its own."""
    named = {"die_limit_c": scenario.temp_limit_c, "skin_limit_c": scenario.skin_limit_c}
    given = {
        name: Figure(limit, f"scenario {scenario.name}") for name, limit in named.items() if limit is not None
    }
    return replace(device, thermal=replace(device.thermal, **given))


@dataclass
class _Day:
    """One policy's way through a scenario."""

    scenario: Scenario
    rule: Rule
    rig: Rig
    device: Device
    keep_timeline: bool
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    asked_s: float = 0.0
    asked_j: float = 0.0
    over_s: float = 0.0
    peak_over_c: float = -np.inf
    changes: int = 0
    level: str = "nominal"
    looked_s: float = 0.0
    points: list[TimelinePoint] = field(default_factory=list)
    course: list[tuple[float, float]] = field(default_factory=list)  # time, joules
    _since: tuple[float, float, int, int, int] = (0.0, 0.0, 0, 0, 0)  # of the last point

    def live(self) -> PolicyRun:
        """From the first second to the last."""
        machine = self._machine
        self.profile = profile_of(self.scenario, self.device)
        pacer = self.rig.pacer(policy_of(self.scenario), self.profile) if self.rule.paced else None
        engine = self.rig.engine(Planner(), pacer)
        self._begin = self.rig.texts()
        self.course.append((machine.elapsed_s, machine.energy_j))
        machine.on_step = lambda: self.course.append((machine.elapsed_s, machine.energy_j))
        self._look()
        while (now := machine.elapsed_s) < self.scenario.duration_s - 1e-6:
            if self.scenario.asked_at(now):
                self._decode(engine)
            else:
                self._rest(pacer)
        return self._result()

    @property
    def _machine(self) -> Machine:
        assert self.rig.machine is not None, "a day is lived on a simulated machine"
        return self.rig.machine

    def _decode(self, engine: Engine) -> None:
        """One text, or what of it fits."""
        machine = self._machine
        text = self._begin(self.scenario.category_at(machine.elapsed_s))
        request = Request(max_new_tokens=text.max_tokens, k=self.rule.k, drafter=self.rule.drafter)
        begin_s, begin_j = machine.elapsed_s, machine.energy_j
        with closing(engine.decode(text.prompt, request)) as rounds:
            for done in rounds:
                self._count(done)
                if machine.elapsed_s >= self.scenario.duration_s:
                    break
        end_s, end_j = machine.elapsed_s, machine.energy_j
        if end_s > self.scenario.duration_s:  # nobody asks any more: a slow prompt may end a minute later
            end_s = self.scenario.duration_s
            end_j = float(np.interp(end_s, *np.array(self.course).T))
        self.asked_s += end_s - begin_s
        self.asked_j += end_j - begin_j

    def _count(self, done: Round) -> None:
        self.tokens += len(done.tokens)
        self.rounds += 1
        self.drafted += done.drafted
        if done.directive is not None:
            level = str(done.directive.level)
            self.changes += level != self.level
            self.level = level
        self._look()

    def _rest(self, pacer: Pacer | None) -> None:
        machine = self._machine
        machine.idle(min(REST_STEP_S, self.scenario.duration_s - machine.elapsed_s))
        if pacer is not None:
            pacer.poll()
        self._look()

    def _look(self) -> None:
        """Take note of the machine's true state."""
        now = self._machine.elapsed_s
        before, self.looked_s = self.looked_s, now
        over_c = self._over_c()
        self.peak_over_c = max(self.peak_over_c, over_c)
        self.over_s += (now - before) if over_c > 0.0 else 0.0
        if self.keep_timeline and (not self.points or now - self._since[0] >= POINT_S):
            self._add_point(now)

    def _over_c(self) -> float:
        """How far the hotter of die and case is above its limit."""
        hot, limits = self._machine.temperatures, self.profile
        pairs = ((hot.die_c, limits.temp_limit_c), (hot.case_c, limits.skin_limit_c))
        return max((c - limit for c, limit in pairs if limit is not None), default=-np.inf)

    def _add_point(self, now: float) -> None:
        machine, (then, joules, tokens, drafted, rounds) = self._machine, self._since
        ran = self.rounds - rounds
        self.points.append(
            TimelinePoint(
                time_s=now,
                die_c=machine.temperatures.die_c,
                case_c=machine.temperatures.case_c,
                power_w=(machine.energy_j - joules) / (now - then) if now > then else machine.power_w,
                clock_ratio=machine.clock_ratio,
                k=(self.drafted - drafted) / ran if ran else None,
                tokens=self.tokens - tokens,
                level=self.level,
            )
        )
        self._since = (now, machine.energy_j, self.tokens, self.drafted, self.rounds)

    def _result(self) -> PolicyRun:
        machine = self._machine
        return PolicyRun(
            policy=self.rule.name,
            tokens=self.tokens,
            energy_j=self.asked_j,
            seconds=self.asked_s,
            peak_c=machine.peak.die_c,
            peak_case_c=machine.peak.case_c,
            peak_over_c=float(self.peak_over_c),
            over_limit_s=self.over_s,
            cap_violation=cap_violation(self.course, self.scenario.power_cap_w),
            level_changes=self.changes,
            battery_percent=machine.battery,
            mean_k=self.drafted / self.rounds if self.rounds else None,
            rounds=self.rounds,
            timeline=tuple(self.points),
        )


def cap_violation(
    course: Sequence[tuple[float, float]], cap_w: float | None, window_s: float = CAP_WINDOW_S
) -> float:
    """By how much of the cap the worst mean over `window_s` exceeds it, from (time, joules) so far."""
    if cap_w is None or len(course) < 2:
        return 0.0
    times, joules = np.array(course).T
    ends = times[times >= times[0] + window_s]
    if not len(ends):
        return 0.0
    spent = np.interp(ends, times, joules) - np.interp(ends - window_s, times, joules)
    return max(0.0, float(spent.max()) / window_s / cap_w - 1.0)


def compare(
    scenario: Scenario,
    policies: Sequence[str],
    acceptance: Sequence[TraceText],
    *,
    device: Device | None = None,
    progress: Callable[[str, float], None] | None = None,
    **options: Any,
) -> list[PolicyRun]:
    """One run a policy, in order; `best-fixed` tries every fixed k and gives the one with the most tokens.

    Of the fixed ones those that keep limit and cap (within 1 °C and 3 %) come before those that do not.
    `options` are those of `run_policy`.
    Raises Interrupted at Ctrl-C; a `best-fixed` of which not every k was tried is not among its runs.
    """
    drafters = list(dict.fromkeys(name for text in acceptance for name in text.runs))
    jobs: list[tuple[str, Rule]] = []
    for name in policies:
        rules = fixed_rules(drafters) if name == "best-fixed" else [parse_rule(name)]
        jobs += [(name, rule) for rule in rules]
    found: dict[str, list[PolicyRun]] = {}
    for number, (name, rule) in enumerate(jobs):
        if progress is not None:
            progress("simulating", number / len(jobs))
        try:
            found.setdefault(name, []).append(
                run_policy(scenario, rule, acceptance, device=device, **options)
            )
        except KeyboardInterrupt:
            unfinished = {name for name, _ in jobs[number:]}
            done = {name: runs for name, runs in found.items() if name not in unfinished}
            raise Interrupted(_best(done)) from None
    return _best(found)


def _best(found: Mapping[str, Sequence[PolicyRun]]) -> list[PolicyRun]:
    """Of each policy's runs the one that counts."""
    return [max(runs, key=_merit) for runs in found.values()]


def _merit(run: PolicyRun) -> tuple[bool, int]:
    return run.holds, run.tokens


def format_runs(scenario: Scenario, runs: Sequence[PolicyRun]) -> str:
    """A table of policies; its first line says that it is simulated."""
    head = ["policy", "tokens", "tokens/s", "J/token", "mean k", "peak °C", "case °C", "s over limit"]
    head += ["cap broken by", "battery %", "level changes"]
    rows = [_row(run) for run in runs]
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in [head, *rows]]
    title = f"SIMULATED: {scenario.name}, {scenario.device}, {scenario.duration_s / 60:.0f} minutes"
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _row(run: PolicyRun) -> list[str]:
    return [
        run.policy,
        str(run.tokens),
        f"{run.tokens_per_s:.2f}",
        "-" if run.j_per_token is None else f"{run.j_per_token:.3f}",
        "-" if run.mean_k is None else f"{run.mean_k:.1f}",
        f"{run.peak_c:.1f}",
        f"{run.peak_case_c:.1f}",
        f"{run.over_limit_s:.0f}",
        f"{run.cap_violation:.1%}",
        "-" if run.battery_percent is None else f"{run.battery_percent:.1f}",
        str(run.level_changes),
    ]
