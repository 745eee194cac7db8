"""The scenario suite is wide and fixed, and the oracle is separate, exact and keeps the limits."""

from __future__ import annotations

import ast
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.power import oracle as oracle_module
from benchmarks.power.oracle import Costing, OraclePlan, OracleResult, oracle
from benchmarks.power.scenarios import DEVICES, courses, days, phone_twenty_minutes, suite
from outrider.runtime.profiling.simulate import profile_of
from outrider.runtime.rounds import Engine, Request
from outrider.targets.device import Device, load_device
from outrider.targets.model_cost import DRAFT_COST, TARGET_COST
from outrider.targets.scenario import Event, Scenario
from outrider.targets.simulated import Machine, SimulatedGraph, perturbed
from outrider.targets.trace_model import Stage, TraceDrafter, TraceRun, TraceTarget, TraceText, cycle


def texts_of(category: str, rate: float, seed: int, count: int = 5, tokens: int = 100) -> list[TraceText]:
    rng = random.Random(seed)
    found = []
    for i in range(count):
        hits = [rng.random() < rate for _ in range(tokens)]
        drafted = [min(15, tokens - at) for at in range(tokens)]
        accepted = [next((j for j in range(n) if not hits[at + j]), n) for at, n in enumerate(drafted)]
        run = TraceRun(tuple(drafted), tuple(accepted))
        sparse = TraceRun(run.drafted, run.accepted, tuple("4" if rng.random() < 0.2 else None for _ in hits))
        found.append(TraceText(category, 40 + 10 * i, tokens, {"lookup": sparse, "model": run}))
    return found


TEXTS = texts_of("prose", 0.4, 1) + texts_of("code", 0.7, 2) + texts_of("edit", 0.93, 3)
ALL = [*suite(TEXTS), phone_twenty_minutes(TEXTS), *days(TEXTS)]


class Rig:
    """The real engine on a simulated specimen, with nothing in charge of it."""

    def __init__(self, device: Device, scenario: Scenario) -> None:
        self.machine = Machine(device, scenario.ambient_c, 0, events=scenario.events, jitter=0.0)
        self.stage, self.tokens = Stage(), 0
        drafters = {
            "lookup": TraceDrafter("lookup", self.stage),
            "model": TraceDrafter("model", self.stage, self.machine, DRAFT_COST),
        }
        target = SimulatedGraph(TraceTarget(self.stage), self.machine, TARGET_COST)
        self.engine = Engine(target, drafters, clock=self.machine.clock)

    def decode(
        self, texts: list[TraceText], category: str, seconds: float, drafter: str | None, k: int, duty: float
    ) -> None:
        source = cycle(texts, category)
        while self.machine.elapsed_s < seconds:
            text = next(source)
            request = Request(max_new_tokens=text.tokens, k=k, drafter=drafter)
            began = self.machine.clock()
            for round_ in self.engine.decode(self.stage.begin(text), request):
                self.tokens += len(round_.tokens)
                self.machine.idle((self.machine.clock() - began) * (1.0 / duty - 1.0))
                began = self.machine.clock()
                if self.machine.elapsed_s >= seconds:
                    break


def test_the_suite_covers_devices_ambients_acceptance_and_goals() -> None:
    scenarios = suite(TEXTS)
    assert len(scenarios) >= 60
    assert len({s.name for s in scenarios}) == len(scenarios)
    assert len({s.seed for s in scenarios}) == len(scenarios)
    parts = [s.name.split("/") for s in scenarios]
    for column, least in ((0, 6), (1, 3), (2, 4), (3, 4)):
        assert len({part[column] for part in parts}) == least
    assert all(600.0 <= s.duration_s <= 1200.0 for s in scenarios)
    for device in DEVICES:
        goals = Counter(part[3] for part in parts if part[0] == device)
        assert min(goals.values()) >= 2


def test_the_suite_is_the_same_every_time() -> None:
    assert suite(TEXTS) == suite(list(reversed(TEXTS)))
    first = suite(TEXTS)[0]
    assert (first.name, first.seed) == ("raspberry-pi-5/15C/low/limit", 2463710123)


def test_no_scenario_caps_what_its_device_cannot_measure() -> None:
    capped = [s for s in ALL if s.power_cap_w is not None]
    assert capped
    assert all(load_device(s.device).meter != "none" for s in capped)


@pytest.mark.parametrize("scenario", ALL, ids=lambda s: s.name)
def test_events_come_at_window_edges_and_categories_exist(scenario: Scenario) -> None:
    assert all(event.at_s % oracle_module.WINDOW_S == 0 for event in scenario.events)
    known = {text.category for text in TEXTS}
    assert {scenario.category_at(t) for t in range(0, int(scenario.duration_s), 10)} <= known


def test_courses_rank_categories_by_what_a_round_commits() -> None:
    found = courses(TEXTS)
    assert (found.low, found.medium, found.high) == ("prose", "code", "edit")


def test_the_governors_profile_is_nominal_but_for_the_limits() -> None:
    scenario = phone_twenty_minutes(TEXTS)
    nominal = load_device(scenario.device)
    profile = profile_of(scenario, nominal)
    assert profile.units == nominal.units
    assert profile.power == nominal.power
    assert profile.skin_limit_c == scenario.skin_limit_c
    assert profile.temp_limit_c == scenario.temp_limit_c


def test_the_oracle_shares_no_code_with_planner_and_governor() -> None:
    tree = ast.parse(Path(str(oracle_module.__file__)).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name for name in modules if name and "outrider" in name} == {
        "outrider.targets.device",
        "outrider.targets.model_cost",
        "outrider.targets.physics",
        "outrider.targets.scenario",
        "outrider.targets.simulated",
        "outrider.targets.trace_model",
    }


@pytest.mark.parametrize(
    ("slug", "plan", "ambient_c"),
    [
        ("raspberry-pi-5", OraclePlan(), 25.0),
        ("raspberry-pi-5", OraclePlan(("model",), 4), 38.0),
        ("jetson-orin-nano", OraclePlan(("lookup",), 5), 25.0),
        ("snapdragon-8-gen3", OraclePlan(("model",), 2), 30.0),
        ("iphone-16-pro", OraclePlan(("model",), 8), 25.0),
    ],
    ids=str,
)
def test_the_oracles_arithmetic_is_that_of_the_engine_on_the_machine(
    slug: str, plan: OraclePlan, ambient_c: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = Scenario("one", slug, 240.0, ambient_c, seed=5, category="code")
    said = one_plan(monkeypatch, scenario, TEXTS, plan, 1.0)
    rig = Rig(perturbed(load_device(slug), 5), scenario)
    rig.decode(TEXTS, "code", 240.0, plan.drafters[0] if plan.k else None, plan.k, 1.0)
    assert said.tokens / 240.0 == pytest.approx(rig.tokens / rig.machine.elapsed_s, rel=0.03)
    assert said.energy_j / 240.0 == pytest.approx(rig.machine.energy_j / rig.machine.elapsed_s, rel=0.02)
    assert said.peak_die_c == pytest.approx(rig.machine.peak.die_c, abs=2.5)
    assert said.peak_skin_c == pytest.approx(rig.machine.peak.case_c, abs=0.5)


def one_plan(
    monkeypatch: pytest.MonkeyPatch, scenario: Scenario, texts: list[TraceText], plan: OraclePlan, duty: float
) -> OracleResult:
    """What the oracle says of one plan at one duty."""
    monkeypatch.setattr(oracle_module, "plans", lambda texts: [plan])
    monkeypatch.setattr(oracle_module, "_DUTIES", np.array([duty]))
    monkeypatch.setattr(oracle_module, "_FINER", np.zeros(1))
    return oracle(scenario, texts)


def test_the_oracle_pays_for_prompts_in_full_at_any_duty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of two windows at this duty, and short answers: whoever skips a share of a prompt shows."""
    texts = [replace(text, prompt_tokens=600) for text in texts_of("code", 0.7, 2, tokens=30)]
    scenario = Scenario("one", "raspberry-pi-5", 240.0, 25.0, seed=5, category="code")
    said = one_plan(monkeypatch, scenario, texts, OraclePlan(), 0.4)
    rig = Rig(perturbed(load_device("raspberry-pi-5"), 5), scenario)
    rig.decode(texts, "code", 240.0, None, 0, 0.4)
    assert said.tokens / 240.0 == pytest.approx(rig.tokens / rig.machine.elapsed_s, rel=0.05)


def test_the_oracle_keeps_its_limits() -> None:
    for scenario in (phone_twenty_minutes(TEXTS), suite(TEXTS)[0], suite(TEXTS)[7]):
        result = oracle(scenario, TEXTS)
        assert result.feasible
        assert result.peak_skin_c <= (scenario.skin_limit_c or 200.0) + 0.1
        assert result.peak_die_c <= (scenario.temp_limit_c or 200.0) + 0.1


def test_the_oracle_keeps_a_power_cap_in_every_window() -> None:
    scenario = next(s for s in suite(TEXTS) if s.power_cap_w is not None)
    result = oracle(scenario, TEXTS)
    assert result.tokens > 0
    assert scenario.power_cap_w is not None
    assert all(c.energy_j / 10.0 <= scenario.power_cap_w + 0.1 for c in result.timeline)


@pytest.mark.parametrize("slug", ["raspberry-pi-5", "snapdragon-8-gen3"])
def test_no_fixed_plan_beats_the_oracle_at_its_own_goal(slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for goal in ("latency", "energy", "balanced"):
        scenario = Scenario("free", slug, 120.0, 15.0, seed=9, category="code", objective=goal)
        best = oracle(scenario, TEXTS)
        for plan in (
            OraclePlan(),
            OraclePlan(("model",), 2),
            OraclePlan(("model",), 7),
            OraclePlan(("lookup",), 4),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(oracle_module, "plans", lambda texts, one=plan: [one])
                fixed = oracle(scenario, TEXTS)
            score = {
                "latency": lambda r: -r.tokens,
                "energy": lambda r: r.j_per_token,
                "balanced": lambda r: r.energy_j / r.tokens**2,
            }[goal]
            assert (
                score(best) <= 1.01 * score(fixed)
                if goal != "latency"
                else score(best) <= 0.99 * score(fixed)
            )


def test_the_oracle_drafts_more_where_drafts_are_right() -> None:
    modelled = [replace(text, runs={"model": text.runs["model"]}) for text in TEXTS]

    def mean_k(category: str) -> float:
        scenario = Scenario("free", "jetson-orin-nano", 120.0, seed=1, category=category)
        names = [choice.plan for choice in oracle(scenario, modelled).timeline]
        return sum(int(name.partition("k=")[2] or 0) for name in names) / len(names)

    assert mean_k("prose") < mean_k("code") < mean_k("edit")


def test_the_oracle_rests_when_nobody_asks() -> None:
    events = (Event(60.0, ask=False), Event(120.0, ask=True))
    scenario = Scenario("pause", "raspberry-pi-5", 180.0, category="code", events=events)
    timeline = oracle(scenario, TEXTS).timeline
    assert {c.plan for c in timeline[6:12]} == {"rest"}
    assert sum(c.tokens for c in timeline[6:12]) == 0
    assert all(c.tokens > 0 for c in (*timeline[:6], *timeline[12:]))


def test_other_apps_slow_and_warm_the_oracle_too() -> None:
    calm = Scenario("x", "raspberry-pi-5", 120.0, category="code", seed=4)
    busy = replace(calm, events=(Event(0.0, load_w=2.0, bandwidth_taken=0.4),))
    assert oracle(busy, TEXTS).tokens < 0.8 * oracle(calm, TEXTS).tokens
    assert oracle(busy, TEXTS).peak_die_c > oracle(calm, TEXTS).peak_die_c


def test_a_free_drafter_costs_nothing_and_a_costly_one_is_left_alone() -> None:
    scenario = Scenario("x", "raspberry-pi-5", 60.0, category="edit", seed=4, spread=0.0)
    rates = load_device("raspberry-pi-5").rates()
    free = oracle(scenario, TEXTS, Costing(rates, drafts={}))
    dear = oracle(scenario, TEXTS, Costing(rates, drafts={"model": TARGET_COST}))
    assert free.tokens > 1.5 * dear.tokens
    assert all("model" in c.plan for c in free.timeline)
