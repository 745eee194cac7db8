"""The stand-in for a bundle commits what its trace says, at the cost of the models it stands for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from outrider.contracts import Sampling
from outrider.errors import ContextError, TraceError, UsageError
from outrider.runtime.context import Context
from outrider.runtime.rounds import Request
from outrider.targets.model_cost import DRAFT_COST, TARGET_COST, ModelCost
from outrider.targets.physics import Work, roofline_time
from outrider.targets.trace_model import (
    WRONG,
    Stage,
    TraceDrafter,
    TraceModelDrafter,
    TraceRun,
    TraceTarget,
    TraceText,
    cycle,
    read_acceptance,
)
from tests.simulated_rig import TEXTS, Rig, machine


@pytest.mark.parametrize("k", [0, 1, 4, 15, "auto"])
def test_no_plan_changes_the_text(k: int | str) -> None:
    rig = Rig()
    for text in TEXTS:
        assert rig.decode(text, k=k) == [i % 3 for i in range(text.tokens)]


@pytest.mark.parametrize("k", [1, 3, 15])
def test_every_round_commits_what_the_trace_says_at_its_position(k: int) -> None:
    rig, text = Rig(), TEXTS[4]
    prompt, position = rig.stage.begin(text), 0
    request = Request(max_new_tokens=text.tokens, k=k, drafter="model")
    for round_ in rig.engine.decode(prompt, request):
        if position > 0 and round_.finish_reason is None:
            drafted = min(k, text.runs["model"].drafted[position], text.tokens - position - 1)
            assert round_.drafted == drafted
            assert round_.accepted == min(drafted, text.runs["model"].accepted[position])
        position += len(round_.tokens)
    assert position == text.tokens


def test_a_lookup_without_a_match_has_no_proposal() -> None:
    rig, text = Rig(), TEXTS[0]
    context = rig.stage.begin(text)
    drafter = rig.engine.drafters["lookup"]
    assert [drafter.kind([*context, *range(i)]) for i in range(4)] == [None, "4", "4", None]  # type: ignore[attr-defined]
    assert rig.engine.drafters["model"].kind(context) == ""  # type: ignore[attr-defined]


def test_a_draft_model_costs_a_forward_a_token_and_one_more_at_low_confidence() -> None:
    text = TraceText("x", 4, 8, {"model": TraceRun((2,) * 7 + (0,), (1,) * 7 + (0,))})
    stage, m = Stage(), machine()
    drafter = TraceDrafter("model", stage, m, ModelCost(1e9, 0.0))
    context = stage.begin(text)

    def forwards(tokens: int, k: int) -> int:
        began = m.clock()
        drafter.propose([*context, *range(tokens)], k, Sampling(), np.random.default_rng(0))
        return round((m.clock() - began) / roofline_time(Work(1e9, 0.0), m.rates()))

    assert [forwards(0, 1), forwards(1, 2), forwards(1, 3), forwards(1, 9), forwards(7, 3)] == [1, 2, 3, 3, 1]


def test_a_draft_model_runs_what_it_has_not_seen() -> None:
    text = TraceText("x", 10, 20, {"model": TraceRun((4,) * 20, (4,) * 16 + (0,) * 4)})
    stage, m = Stage(), machine()
    drafter = TraceDrafter("model", stage, m, DRAFT_COST)
    context = stage.begin(text)
    assert drafter.backlog(context) == 10
    assert drafter.propose(context, 4, Sampling(), np.random.default_rng(0)).tokens.tolist() == [0, 1, 2, 0]
    context += [0, 1, 2, 0, 1]  # all four, and the bonus token
    assert drafter.backlog(context) == 2  # the last draft was never run, nor the bonus
    context[10:] = [0] * 16
    drafter.propose(context, 4, Sampling(), np.random.default_rng(0))
    context += [1]  # nothing was right
    assert drafter.backlog(context) == 1
    assert TraceDrafter("lookup", stage).backlog(context) == 0
    drafter.reset()
    assert drafter.backlog(context) == len(context)


def test_two_prompts_in_a_row_share_no_prefix_so_that_each_is_prefilled() -> None:
    rig = Rig()
    rig.decode(TEXTS[0], k=0)
    prompt = rig.stage.begin(TEXTS[0])
    began = rig.machine.clock()
    next(rig.engine.decode(prompt, Request(max_new_tokens=4, k=0)))
    full = roofline_time(TARGET_COST.work(len(prompt), 0), rig.machine.rates())
    assert rig.machine.clock() - began == pytest.approx(full)


def test_wrong_drafts_are_the_token_that_the_target_never_chooses() -> None:
    stage = Stage()
    stage.begin(TraceText("x", 2, 6, {"model": TraceRun((3,) * 6, (1,) * 6)}))
    drafter = TraceDrafter("model", stage)
    tokens = drafter.propose([0, 3, 0], 3, Sampling(), np.random.default_rng(0)).tokens
    assert tokens.tolist() == [1, WRONG, WRONG]


def test_the_stand_in_refuses_what_a_trace_cannot_say() -> None:
    stage = Stage()
    target = TraceTarget(stage, max_context=8)
    with pytest.raises(UsageError, match="no text has begun"):
        target.forward([1])
    stage.begin(TEXTS[0])
    with pytest.raises(UsageError, match="chains only"):
        target.forward([1], mask=np.ones((1, 1), np.bool_))
    with pytest.raises(ContextError, match="exceed the context of 8"):
        target.forward([1] * 9)
    with pytest.raises(UsageError, match="no drafter 'heads'; known: model, lookup"):
        TraceDrafter("heads", stage).kind([0])
    with pytest.raises(UsageError, match="needs both a machine and a cost"):
        TraceDrafter("model", stage, machine())
    with pytest.raises(UsageError, match="no category 'poems'; known: code, edit, prose"):
        next(cycle(TEXTS, "poems"))


def write_trace(path: Path, texts: list[TraceText]) -> Path:
    lines: list[object] = [{"schema_version": 1, "kind": "acceptance"}]
    lines += [dataclasses.asdict(text) for text in texts]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def test_an_acceptance_trace_is_read_back(tmp_path: Path) -> None:
    assert read_acceptance(write_trace(tmp_path / "a.jsonl", TEXTS)) == TEXTS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "decode", "schema_version": 1}', "schema_version 1 and kind 'decode'"),
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is list"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(TraceError, match=message):
        read_acceptance(path)


def test_a_faulty_record_names_its_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.jsonl", TEXTS[:1])
    text = path.read_text()
    path.write_text(text.replace('"tokens": 96', '"tokens": 97'), encoding="utf-8")
    with pytest.raises(
        TraceError, match=r"a\.jsonl, line 2: run 'model' has \[96\] positions; the text has 97"
    ):
        read_acceptance(path)
    path.write_text(text.replace('"category"', '"kategory"'), encoding="utf-8")
    with pytest.raises(TraceError, match="line 2: kategory is an unknown field"):
        read_acceptance(path)
    with pytest.raises(TraceError, match="cannot read"):
        read_acceptance(tmp_path / "none.jsonl")
    write_trace(path, [])
    with pytest.raises(TraceError, match="holds no text"):
        read_acceptance(path)


@pytest.mark.parametrize("field", ["prompt_tokens", "tokens"])
def test_a_text_too_long_to_be_one_is_refused_before_it_fills_the_memory(field: str) -> None:
    sizes = {"prompt_tokens": 3, "tokens": 1, field: 10**9}
    with pytest.raises(UsageError, match=r"1000000000.*must be from 1 to 1000000"):
        TraceText("chat", runs={}, **sizes)


def test_kinds_for_no_position_are_refused() -> None:
    with pytest.raises(UsageError, match=r"run 'lookup' has \[0, 1\] positions"):
        TraceText("chat", 3, 1, {"lookup": TraceRun((1,), (0,), ())})


@pytest.mark.parametrize("right", [True, False], ids=["guessed right", "guessed wrong"])
def test_a_trace_model_that_works_ahead_drafts_what_it_would_have_drafted_and_runs_as_much(
    right: bool,
) -> None:
    """k = 2 at position 0: all right, then the guess; the round after it begins at position 3."""
    drafted = (15,) * 12
    accepted = (9 if right else 2,) * 12
    text = TraceText("test", 4, 12, {"model": TraceRun(drafted, accepted)})
    proposals, seconds = [], []
    for ahead in (False, True):
        stage, m = Stage(), machine()
        drafter = TraceModelDrafter("model", stage, m, DRAFT_COST)
        context = Context(stage.begin(text))
        rng = np.random.default_rng(0)
        first = drafter.propose(context, 2, Sampling(), rng)
        ran = list(drafter.assume(2, rng)) if ahead else []
        context.extend([*first.tokens.tolist(), 2])  # the third token of an answer is 2
        begin = m.clock()
        proposals.append(drafter.propose(context, 2, Sampling(), rng).tokens.tolist())
        seconds.append(m.clock() - begin)
        if ahead:
            assert (ran[0] == 2) == right
            assert ran[1:] == proposals[0]
    assert proposals[0] == proposals[1]
    assert seconds[1] == 0.0 if right else seconds[1] > 0.0
