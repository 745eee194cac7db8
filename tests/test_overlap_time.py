"""What overlapping takes: the longer of verify and draft, on two units at once, with one outcome in simulation."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.overlap import Ahead
from outrider.runtime.planner import Planner
from outrider.runtime.rounds import Engine
from outrider.runtime.stats import Stats
from outrider.targets.device import load_device
from outrider.targets.fake import FakeGraph
from outrider.targets.model_cost import ModelCost
from outrider.targets.simulated import Machine, SimulatedGraph
from tests.overlapping import (
    LOGITS,
    PROMPT,
    VOCAB,
    Hurried,
    draft_logits,
    no_thread_is_left,  # noqa: F401
    overlapped,
    serial,
    text,
    timed,
)


@pytest.mark.parametrize(("draft_s", "verify_s"), [(0.125, 1.0), (0.25, 1.0), (0.5, 1.0)])
def test_on_two_units_a_round_takes_the_longer_of_verify_and_draft(draft_s: float, verify_s: float) -> None:
    made, _ = timed(draft_s, verify_s, 1.0)
    rounds = list(made.decode(PROMPT, overlapped(41)))
    full = [part for part in rounds if part.ready and part.drafted == 3][:-1]
    assert len(full) > 5
    for part in full:
        assert part.verify_s == verify_s
        assert part.draft_s == max(0.0, 4 * draft_s - verify_s)  # what was left to wait for


def corrected(draft_s: float, planner: Planner | None = None) -> tuple[Stats, float, list[int]]:
    """A text of overlapped rounds of k=2, whose verify takes 0.87 s."""
    made, clock = timed(draft_s, 1.0, 0.75, planner=planner)
    rounds = list(made.decode(PROMPT, overlapped(120, k=2)))
    return rounds[-1].stats, clock(), text(rounds)


def test_time_that_is_left_beside_a_verify_goes_to_the_likeliest_correction_and_is_won_back() -> None:
    stats, seconds, written = corrected(0.12)
    without, slower_s, expected = corrected(0.12, Hurried())
    assert written == expected
    assert stats.corrections > 20
    assert 5 < stats.corrections_held < stats.corrections
    assert without.corrections == 0
    assert seconds < slower_s - 0.8 * 0.12 * stats.corrections_held  # of the two steps that each has saved


def test_a_draft_without_a_whole_step_to_spare_prepares_for_no_correction() -> None:
    stats, _, _ = corrected(0.27)  # three steps are 0.81 s
    assert stats.overlapped_rounds > 20
    assert stats.corrections == 0


def test_a_simulation_with_threads_has_one_outcome() -> None:
    outcomes = set()
    for _ in range(3):
        made, clock = timed(0.3, 1.0, 0.8)
        rounds = list(made.decode(PROMPT, overlapped()))
        outcomes.add((clock(), tuple(part.draft_s for part in rounds), rounds[-1].stats.ahead_steps))
    assert len(outcomes) == 1
    made, clock = timed(0.3, 1.0, 0.8)
    list(made.decode(PROMPT, serial(overlapped())))
    assert next(iter(outcomes))[0] < clock()


def test_what_a_thread_sees_of_a_verdict_at_the_same_moment_is_not_the_scheduler_s_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft step is longer than the verify: the verdict comes when the guess does, and cancels what follows it."""
    from outrider.runtime.overlap import _Piece

    original, outcomes = _Piece._tell, []
    for late_s in (0.0, 0.01):

        def tell(piece: _Piece, timeline: Any, late_s: float = late_s) -> None:
            original(piece, timeline)
            time.sleep(late_s)

        monkeypatch.setattr(_Piece, "_tell", tell)
        made, clock = timed(1.5, 1.0, 0.8)
        rounds = list(made.decode(PROMPT, overlapped(30)))
        outcomes.append((clock(), rounds[-1].stats.ahead_steps))
    assert rounds[-1].stats.guesses > rounds[-1].stats.guesses_held > 0
    assert outcomes[0] == outcomes[1]


def test_handing_over_needs_no_polling() -> None:
    """A piece of work is begun and its end noticed without a sleep in between: many in little time."""

    class Quick:
        name = "quick"

        def assume(self, k: int, rng: object) -> Generator[int, None, None]:
            yield from range(k)

    ahead = Ahead(time.perf_counter)
    quick: Any = Quick()
    for _ in range(200):
        assert ahead.start("quick", quick, 0, 5, 3)
        ahead.settle()
    worked = ahead.collect()
    ahead.close()
    assert worked.steps == worked.wasted >= 200  # none came true: each ends with the step that it is in


PHONE_TARGET = ModelCost(1.2e9, 3e9)
PHONE_DRAFT = ModelCost(0.1e9, 0.2e9)


def on_a_phone(
    units: tuple[str, str], drafting: str, draft: ModelCost = PHONE_DRAFT
) -> tuple[Stats, Machine, list[int]]:
    """Decode on two units, target's and draft's, of a simulated phone."""
    machine = Machine(load_device("snapdragon-8-gen3"), seed=3)
    target = SimulatedGraph(FakeGraph(VOCAB, logits=LOGITS), machine, PHONE_TARGET, units[0])
    model = ModelDrafter(
        SimulatedGraph(FakeGraph(VOCAB, logits=draft_logits(0.9)), machine, draft, units[1]),
        min_confidence=0.0,
    )
    made = Engine(target, {"model": model}, clock=machine.clock, sleep=machine.idle, timeline=machine.lanes)
    rounds = list(made.decode(PROMPT, overlapped(80, drafting=drafting)))
    return rounds[-1].stats, machine, text(rounds)


def test_two_simulated_units_work_at_once_with_one_outcome() -> None:
    serial_stats, alone, expected = on_a_phone(("gpu", "npu"), "serial")
    outcomes = {
        (round(machine.clock(), 9), round(machine.energy_j, 6), stats.corrections_held, tuple(written))
        for stats, machine, written in (on_a_phone(("gpu", "npu"), "overlapped") for _ in range(3))
    }
    assert len(outcomes) == 1
    ((seconds, _, held, written),) = outcomes
    assert list(written) == expected
    assert seconds < alone.clock()
    assert held > 0
    assert serial_stats.overlapped_rounds == 0


def test_simulated_units_share_the_bandwidth_of_their_memory() -> None:
    """A draft that streams much slows the target's verify down beside it; one that computes much does not."""
    greedy_for_memory, computing = ModelCost(0.4e9, 1e6), ModelCost(1e6, 40e9)
    verify_s = {}
    for name, draft in [("streams", greedy_for_memory), ("computes", computing)]:
        for drafting in ("serial", "overlapped"):
            stats, _, _ = on_a_phone(("gpu", "npu"), drafting, draft)
            verify_s[name, drafting] = stats.verify_s / (stats.rounds - 1)
    assert verify_s["streams", "overlapped"] > 1.05 * verify_s["streams", "serial"]
    assert verify_s["computes", "overlapped"] == pytest.approx(verify_s["computes", "serial"], rel=0.02)


def test_on_one_simulated_unit_forwards_take_turns_and_draw_no_more_than_one_after_another() -> None:
    machine = Machine(load_device("snapdragon-8-gen3"), jitter=0.0)
    work = PHONE_TARGET.work(4)
    alone_s = machine.execute("gpu", work)
    alone_j = machine.energy_j
    machine = Machine(load_device("snapdragon-8-gen3"), jitter=0.0)
    machine.lanes.begin()

    ended: list[bool] = []

    def beside() -> None:
        machine.execute("gpu", work)
        ended.append(True)
        machine.lanes.end()

    thread = threading.Thread(target=beside)
    thread.start()
    machine.execute("gpu", work)
    machine.lanes.wait(lambda: bool(ended))
    thread.join()
    assert machine.elapsed_s == pytest.approx(2 * alone_s, rel=1e-6)
    assert machine.energy_j == pytest.approx(2 * alone_j, rel=1e-6)
