"""What a plan-maker that knew everything would do: the bound that the governor is measured against.

It knows the specimen's true figures, its true temperatures and what every drafter gets right at every
position. Every ten seconds it takes the best plan (plain, or a drafter and k, at some duty) that keeps the
scenario's limits: the most tokens, the fewest joules a token, or the least product of joules and seconds a
token. It shares the device's physics with the simulator, and nothing with planner and governor. It is greedy in
time and holds one plan for ten seconds, so a cleverer one may exist; all its figures are simulated.

With `foresight` False it knows all that but the text to come: it chooses by what each plan brings over all texts of
the category, and gets what the plan brings at the place where the text is. What it lacks of the other is what
only knowing the future brings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from outrider.targets.device import load_device
from outrider.targets.model_cost import DRAFT_COST, TARGET_COST, ModelCost
from outrider.targets.physics import (
    Rates,
    Temperatures,
    Work,
    dynamic_power,
    propagator,
    roofline_time,
    steady_state,
)
from outrider.targets.scenario import Scenario
from outrider.targets.simulated import CHARGE_LOSS, perturbed
from outrider.targets.trace_model import TraceText

__all__ = ["Choice", "Costing", "Course", "OraclePlan", "OracleResult", "oracle", "plans"]

WINDOW_S = 10.0
KS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)
_SLACK = 0.1  # °C or W, beyond a limit: what counts as breaking it
_DUTIES = np.linspace(0.0, 1.0, 11)
_FINER = np.linspace(-0.09, 0.09, 7)


@dataclass(frozen=True)
class OraclePlan:
    """Drafters in the order in which they are asked ((): plain), and k."""

    drafters: tuple[str, ...] = ()
    k: int = 0

    def __str__(self) -> str:
        return f"{'+'.join(self.drafters)} k={self.k}" if self.k else "plain"


@dataclass(frozen=True)
class Choice:
    """One window: the plan, its duty, and what came of it (all simulated)."""

    time_s: float
    plan: str
    duty: float
    tokens: float
    energy_j: float
    die_c: float
    skin_c: float
    level: int


@dataclass(frozen=True)
class OracleResult:
    """A whole run. `feasible` False: in some window even resting broke a limit."""

    tokens: float
    energy_j: float
    peak_die_c: float
    peak_skin_c: float
    feasible: bool
    timeline: tuple[Choice, ...]

    @property
    def j_per_token(self) -> float:
        """Joules a token, gross; inf without tokens."""
        return self.energy_j / self.tokens if self.tokens else inf


def plans(texts: Sequence[TraceText], ks: Sequence[int] = KS) -> list[OraclePlan]:
    """Plain, every drafter at every k, and lookup first with the model behind it."""
    names = sorted({name for text in texts for name in text.runs})
    teams: list[tuple[str, ...]] = [(name,) for name in names]
    teams += [("lookup", other) for other in names if other != "lookup" and "lookup" in names]
    return [OraclePlan(), *(OraclePlan(team, k) for team in teams for k in ks)]


@dataclass(frozen=True)
class Costing:
    """Where and at what cost the models run; drafters without a cost are free."""

    rates: Rates
    target: ModelCost = TARGET_COST
    drafts: Mapping[str, ModelCost] = field(default_factory=lambda: {"model": DRAFT_COST})


class Course:
    """The time and dynamic energy of one plan along the texts of a category, at one throttle level.

    `position` counts tokens over all the texts, lap after lap; `seconds` and `joules` are cumulative, linear
    within a round. A text is decoded as the engine does: the prompt's forward commits the first token, no draft
    reaches beyond the end.
    """

    def __init__(
        self,
        texts: Sequence[TraceText],
        plan: OraclePlan,
        costing: Costing,
        clock: float,
        memory: float,
        share: float,
    ) -> None:
        self._spend = _Spend(costing, clock, memory, share)
        points = [(0.0, 0.0, 0.0)]
        start = 0
        for text in texts:
            for position, seconds, joules in _text_rounds(text, plan, self._spend):
                points.append((start + position, points[-1][1] + seconds, points[-1][2] + joules))
            start += text.tokens
        self.position, self.seconds, self.joules = np.array(points).T
        self.lap = (float(self.position[-1]), float(self.seconds[-1]), float(self.joules[-1]))

    def ahead(self, position: float, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and dynamic joules of so many seconds of work from a position on."""
        tokens, lap_s, lap_j = self.lap
        rest = position % tokens
        from_s = float(np.interp(rest, self.position, self.seconds))
        from_j = float(np.interp(rest, self.position, self.joules))
        laps, end_s = np.divmod(from_s + seconds, lap_s)
        end = np.interp(end_s, self.seconds, self.position)
        end_j = np.interp(end_s, self.seconds, self.joules)
        return laps * tokens + end - rest, laps * lap_j + end_j - from_j

    def usual(self, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same over all the texts, whatever comes next."""
        tokens, lap_s, lap_j = self.lap
        return tokens * seconds / lap_s, lap_j * seconds / lap_s


class _Spend:
    """Seconds and joules of forwards at one state of the clocks, remembered by width and length."""

    def __init__(self, costing: Costing, clock: float, memory: float, share: float) -> None:
        self.costing = costing
        self._state = (clock, memory, share)

    def forward(self, cost: ModelCost, width: int, length: int) -> tuple[float, float]:
        """One forward of `width` tokens behind `length`."""
        clock, memory, share = self._state
        work: Work = cost.work(width, length)
        seconds = roofline_time(work, self.costing.rates, clock, memory, share)
        return seconds, seconds * dynamic_power(work, seconds, self.costing.rates, clock)


def _text_rounds(text: TraceText, plan: OraclePlan, spend: _Spend) -> list[tuple[int, float, float]]:
    """(position reached, seconds, dynamic joules) of every round of one text under one plan."""
    prefill = spend.forward(spend.costing.target, text.prompt_tokens, 0)
    rounds = [(1, *prefill)]
    position, seen = 1, dict.fromkeys(spend.costing.drafts, 0)
    while position < text.tokens:
        context = text.prompt_tokens + position
        name, drafted, right, tries = _draft(text, plan, position)
        seconds, joules = _draft_cost(name, tries, right, context, seen, spend)
        verify = spend.forward(spend.costing.target, 1 + drafted, context - 1)
        position += min(1 + right, text.tokens - position)
        rounds.append((position, seconds + verify[0], joules + verify[1]))
    return rounds


def _draft(text: TraceText, plan: OraclePlan, position: int) -> tuple[str | None, int, int, int]:
    """Who drafts at a position, how many tokens, how many right, and how many the model tried."""
    k = min(plan.k, text.tokens - position - 1)
    for name in plan.drafters if k > 0 else ():
        run = text.runs[name]
        if run.kind is not None and run.kind[position] is None:
            continue
        drafted = min(k, run.drafted[position])
        return name, drafted, min(drafted, run.accepted[position]), min(k, run.drafted[position] + 1)
    return None, 0, 0, 0


def _draft_cost(
    name: str | None, tries: int, right: int, context: int, seen: dict[str, int], spend: _Spend
) -> tuple[float, float]:
    """What a draft model spends: a forward over what it has not seen, then one a token."""
    cost = spend.costing.drafts.get(name or "")
    if name is None or cost is None or tries == 0:
        return 0.0, 0.0
    spent = [spend.forward(cost, context - seen[name], seen[name])]
    spent += [spend.forward(cost, 1, context + step - 1) for step in range(1, tries)]
    seen[name] = context + min(right, tries - 1)
    return sum(s for s, _ in spent), sum(j for _, j in spent)


@dataclass
class _Lanes:
    """Candidates of one window side by side: all arrays have one entry a lane."""

    plan: np.ndarray  # index into the plans
    duty: np.ndarray
    die: np.ndarray
    case: np.ndarray
    level: np.ndarray
    tokens: np.ndarray
    joules: np.ndarray
    peak_die: np.ndarray
    peak_case: np.ndarray


class _Run:
    """The state between windows, and what a window needs to know."""

    def __init__(self, scenario: Scenario, texts: Sequence[TraceText], costing: Costing | None) -> None:
        self.scenario, self.texts = scenario, texts
        self.foresight = True  # whether the next window's rates are those of the text to come
        self.device = perturbed(load_device(scenario.device), scenario.seed, scenario.spread)
        self.costing = costing or Costing(self.device.rates())
        self.plans = plans(texts)
        self.policy, self.network = self.device.throttle_policy(), self.device.network()
        self.idle_w, self.static_w = float(self.device.idle_w), float(self.device.static_w)
        self.ambient_c, self.load_w, self.taken, self.charge_w = scenario.ambient_c, 0.0, 0.0, 0.0
        start_w = max(self.idle_w, scenario.preheated_w)
        self.now = steady_state(self.network, start_w, scenario.ambient_c)
        self.level = 0
        self.cursor: dict[str | None, float] = {}
        self._courses: dict[tuple[Any, ...], Course] = {}
        self._pending = list(scenario.events)

    def apply_events(self, time_s: float) -> None:
        while self._pending and self._pending[0].at_s <= time_s + 1e-9:
            event = self._pending.pop(0)
            self.ambient_c = self.ambient_c if event.ambient_c is None else event.ambient_c
            self.load_w = self.load_w if event.load_w is None else event.load_w
            self.taken = self.taken if event.bandwidth_taken is None else event.bandwidth_taken
            self.charge_w = self.charge_w if event.charge_w is None else event.charge_w

    def course(self, category: str | None, plan: int, level: int) -> Course:
        key = (category, plan, level, self.taken)
        if key not in self._courses:
            texts = [text for text in self.texts if category in (None, text.category)]
            clock, memory = self.policy.clock_steps[level], self.policy.memory_steps[level]
            self._courses[key] = Course(
                texts, self.plans[plan], self.costing, clock, memory, 1.0 - self.taken
            )
        return self._courses[key]


def oracle(
    scenario: Scenario,
    texts: Sequence[TraceText],
    costing: Costing | None = None,
    *,
    foresight: bool = True,
) -> OracleResult:
    """Run a scenario with the best plan of every ten seconds, knowing everything (or all but the text). Simulated."""
    run = _Run(scenario, texts, costing)
    timeline: list[Choice] = []
    peak, feasible, time_s = run.now, True, 0.0
    while time_s < scenario.duration_s - 1e-9:
        run.apply_events(time_s)
        length = min(WINDOW_S, scenario.duration_s - time_s)
        category = scenario.category_at(time_s)
        run.foresight = foresight
        lanes, best, kept = _best_window(run, category, length, scenario.asked_at(time_s))
        if not foresight:
            run.foresight = True
            chosen = lanes.plan[best : best + 1], lanes.duty[best : best + 1]
            lanes, best = _simulate(run, category, length, *chosen), 0
        feasible &= kept
        run.now = Temperatures(float(lanes.die[best]), float(lanes.case[best]))
        run.level = int(lanes.level[best])
        run.cursor[category] = run.cursor.get(category, 0.0) + float(lanes.tokens[best])
        peak = Temperatures(
            max(peak.die_c, float(lanes.peak_die[best])), max(peak.case_c, float(lanes.peak_case[best]))
        )
        timeline.append(_choice(run, lanes, best, time_s))
        time_s += length
    tokens, energy = sum(c.tokens for c in timeline), sum(c.energy_j for c in timeline)
    return OracleResult(tokens, energy, peak.die_c, peak.case_c, feasible, tuple(timeline))


def _choice(run: _Run, lanes: _Lanes, best: int, time_s: float) -> Choice:
    duty = float(lanes.duty[best])
    return Choice(
        time_s,
        str(run.plans[int(lanes.plan[best])]) if duty else "rest",
        duty,
        float(lanes.tokens[best]),
        float(lanes.joules[best]),
        run.now.die_c,
        run.now.case_c,
        run.level,
    )


def _best_window(run: _Run, category: str | None, length: float, asked: bool) -> tuple[_Lanes, int, bool]:
    """The lanes of the last pass, the best of them, and whether it keeps the limits."""
    index = np.arange(len(run.plans))
    duties = _DUTIES if asked else _DUTIES[:1]
    coarse = _simulate(run, category, length, np.repeat(index, len(duties)), np.tile(duties, len(index)))
    best, kept = _pick(run, coarse, length)
    if not asked or coarse.duty[best] == 0.0:
        return coarse, best, kept
    near = _near(coarse, len(duties))
    finer = _simulate(run, category, length, *near(run, length))
    best, kept = _pick(run, finer, length)
    return finer, best, kept


def _near(coarse: _Lanes, duties: int) -> Any:
    """Lanes around the best duty of every plan."""

    def lanes(run: _Run, length: float) -> tuple[np.ndarray, np.ndarray]:
        score = _score(run, coarse, length).reshape(-1, duties)
        top = coarse.duty.reshape(-1, duties)[np.arange(len(score)), score.argmax(axis=1)]
        plan = np.repeat(np.arange(len(score)), len(_FINER))
        return plan, np.clip(np.repeat(top, len(_FINER)) + np.tile(_FINER, len(score)), 0.0, 1.0)

    return lanes


def _simulate(run: _Run, category: str | None, length: float, plan: np.ndarray, duty: np.ndarray) -> _Lanes:
    """Carry every lane through the window, from poll to poll."""
    n = len(plan)
    die, case = np.full(n, run.now.die_c), np.full(n, run.now.case_c)
    nothing = np.zeros(n)
    lanes = _Lanes(plan, duty, die, case, np.full(n, run.level), nothing, nothing, die, case)
    rates: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    done = 0.0
    while done < length - 1e-9:
        span = min(run.policy.poll_s, length - done)
        speed, watts = _lane_rates(run, category, lanes, length, rates)
        _advance(run, lanes, duty * speed, duty * watts + (1.0 - duty) * run.idle_w + run.load_w, span)
        done += span
    _rest_peak(run, lanes)
    return lanes


def _rest_peak(run: _Run, lanes: _Lanes) -> None:
    """Count the warmth that the die still gives to the case while the device rests: it is part of the bill."""
    net, watts = run.network, run.idle_w + run.load_w
    end_case = run.ambient_c + net.case_c_per_w * (watts + CHARGE_LOSS * run.charge_w)
    end_die = end_case + net.die_c_per_w * net.die_share * watts
    for seconds in (2.0, 5.0, 10.0):
        _, _, cd, cc = propagator(net, seconds)
        after = end_case + cd * (lanes.die - end_die) + cc * (lanes.case - end_case)
        lanes.peak_case = np.maximum(lanes.peak_case, after)


def _lane_rates(
    run: _Run,
    category: str | None,
    lanes: _Lanes,
    length: float,
    known: dict[int, tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens a second and watts of every lane while it works at its level: of the work that fits its duty."""
    for level in set(lanes.level.tolist()) - set(known):
        known[level] = _rates_at(run, category, lanes, length, level)
    speed, watts = np.empty(len(lanes.plan)), np.empty(len(lanes.plan))
    for level in set(lanes.level.tolist()):
        here = lanes.level == level
        speed[here], watts[here] = known[level][0][here], known[level][1][here]
    return speed, watts


def _rates_at(
    run: _Run, category: str | None, lanes: _Lanes, length: float, level: int
) -> tuple[np.ndarray, np.ndarray]:
    at = run.cursor.get(category, 0.0)
    work_s = np.maximum(lanes.duty * length, 1e-3)
    tokens, joules = np.empty(len(work_s)), np.empty(len(work_s))
    for plan in set(lanes.plan.tolist()):
        mine, course = lanes.plan == plan, run.course(category, plan, level)
        seconds = work_s[mine]
        tokens[mine], joules[mine] = course.ahead(at, seconds) if run.foresight else course.usual(seconds)
    return tokens / work_s, joules / work_s + run.static_w


def _advance(run: _Run, lanes: _Lanes, speed: np.ndarray, watts: np.ndarray, span: float) -> None:
    """One poll period at constant power: `physics.step_temperatures` and `next_level`, over lanes."""
    net = run.network
    dd, dc, cd, cc = propagator(net, span)
    end_case = run.ambient_c + net.case_c_per_w * (watts + CHARGE_LOSS * run.charge_w)
    end_die = end_case + net.die_c_per_w * net.die_share * watts
    die, case = lanes.die - end_die, lanes.case - end_case
    lanes.die, lanes.case = end_die + dd * die + dc * case, end_case + cd * die + cc * case
    lanes.tokens = lanes.tokens + speed * span
    lanes.joules = lanes.joules + watts * span
    lanes.peak_die = np.maximum(lanes.peak_die, lanes.die)
    lanes.peak_case = np.maximum(lanes.peak_case, lanes.case)
    if span >= run.policy.poll_s - 1e-9:
        lanes.level = _next_levels(run, lanes)


def _next_levels(run: _Run, lanes: _Lanes) -> np.ndarray:
    """`physics.next_level` for every lane."""
    levels = lanes.level
    hot, held = np.zeros(len(levels), bool), np.zeros(len(levels), int)
    for trip in run.policy.trips:
        sensed = lanes.die if trip.sensor == "die" else lanes.case
        hot |= (sensed >= trip.at_c) & (levels < trip.level)
        held = np.maximum(held, np.where(sensed > trip.at_c - trip.hysteresis_c, trip.level, 0))
    return levels + np.where(hot, 1, np.where(levels > held, -1, 0))


def _excess(run: _Run, lanes: _Lanes, length: float) -> np.ndarray:
    """How far each lane breaks a limit; heat that was there when the window began is nobody's fault."""
    s = run.scenario
    excess = np.zeros(len(lanes.plan))
    if s.power_cap_w is not None:
        excess += np.maximum(0.0, lanes.joules / length - s.power_cap_w)
    if s.temp_limit_c is not None:
        excess += np.maximum(0.0, lanes.peak_die - max(s.temp_limit_c, run.now.die_c))
    if s.skin_limit_c is not None:
        excess += np.maximum(0.0, lanes.peak_case - max(s.skin_limit_c, run.now.case_c))
    return excess


def _score(run: _Run, lanes: _Lanes, length: float) -> np.ndarray:
    """The higher the better: the goal within the limits; beyond them, and without tokens, far below."""
    with np.errstate(divide="ignore", invalid="ignore"):
        goal = {
            "latency": lanes.tokens / length,
            "energy": -lanes.joules / lanes.tokens,
            "balanced": -lanes.joules * length / lanes.tokens**2,
        }[run.scenario.objective]
    goal = np.where(lanes.tokens > 0, goal, 0.0 if run.scenario.objective == "latency" else -1e6)
    excess = _excess(run, lanes, length)
    return np.where(excess <= 1e-9, goal, -1e9 * (1.0 + excess))


def _pick(run: _Run, lanes: _Lanes, length: float) -> tuple[int, bool]:
    score = _score(run, lanes, length)
    best = int(score.argmax())
    return best, bool(_excess(run, lanes, length)[best] <= _SLACK)
