"""An acceptance trace foretells what any fixed plan does on the same text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outrider.contracts import Sampling
from outrider.lines import read_lines
from outrider.runtime.acceptance import DRAFT_LENGTH, runs
from outrider.runtime.context import Context, common_prefix
from outrider.runtime.evidence import promises
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeGraph, blend_logits, random_logits

VOCAB = 12
TARGET = random_logits(VOCAB, seed=1)
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]


def draft_model() -> ModelDrafter:
    return ModelDrafter(FakeGraph(VOCAB, logits=blend_logits(TARGET, random_logits(VOCAB, seed=2), 0.4)))


def answer_of(length: int) -> list[int]:
    engine = Engine(FakeGraph(VOCAB, logits=TARGET))
    rounds = engine.decode(PROMPT, Request(max_new_tokens=length, k=0))
    return [token for part in rounds for token in part.tokens]


@pytest.mark.parametrize("make", [LookupDrafter, draft_model])
@pytest.mark.parametrize("k", [1, 2, 4, 7, DRAFT_LENGTH])
def test_the_trace_foretells_every_round_of_a_fixed_k(make, k):
    answer = answer_of(60)
    foretold = runs(make(), PROMPT, answer)
    drafter = make()
    engine = Engine(FakeGraph(VOCAB, logits=TARGET), {drafter.name: drafter})
    position, drafting = 0, 0
    for part in engine.decode(PROMPT, Request(max_new_tokens=60, k=k)):
        room = min(k, 60 - position - 1)
        if position and room > 0:
            room *= promises((foretold.get("kind") or {position: ""})[position] or "")
            assert part.drafted == min(room, foretold["drafted"][position])
            assert part.accepted == min(room, foretold["accepted"][position])
            drafting += part.drafted > 0
        position += len(part.tokens)
    assert position == 60
    assert drafting > 0


@pytest.mark.parametrize("share", [0.0, 0.15, 0.4])
def test_a_model_that_is_followed_gives_what_a_model_that_is_asked_everywhere_gives(share):
    answer = answer_of(80)
    mixed = blend_logits(TARGET, random_logits(VOCAB, seed=2), share)
    drafter = ModelDrafter(FakeGraph(VOCAB, logits=mixed), min_confidence=0.45)
    found = runs(drafter, PROMPT, answer)
    context, fresh = Context(PROMPT), np.random.default_rng(0)
    for position, token in enumerate(answer):
        drafter.reset()
        tokens = drafter.propose(context, DRAFT_LENGTH, Sampling(), fresh).tokens.tolist()
        assert found["drafted"][position] == len(tokens)
        assert found["accepted"][position] == common_prefix(tokens, answer[position : position + len(tokens)])
        context.extend([token])
    assert len(set(found["drafted"])) > 1


def test_lookup_names_the_kind_of_each_proposal_and_none_where_nothing_matches():
    found = runs(LookupDrafter(), PROMPT, answer_of(40))
    assert all(
        (kind is None) == (drafted == 0)
        for kind, drafted in zip(found["kind"], found["drafted"], strict=True)
    )
    assert {None, "2"} <= set(found["kind"])


def test_the_command_writes_a_trace_that_can_be_read(tmp_path: Path, float_bundle: Path, run_main):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["the fox"], "category": "fox"}\n{"prompt": "the quick brown fox"}\n')
    words = ["-o", str(tmp_path / "a.jsonl"), "-n", "8", "--prompts", str(prompts)]
    code, out, err = run_main("acceptance", str(float_bundle), *words)
    assert code == 0, err
    assert "2 answers, drafters lookup, model" in out
    trace = read_lines(tmp_path / "a.jsonl", "acceptance")
    rows = [record for _, record in trace]
    assert trace.header["models"]
    assert len(rows) == 2
    for row in rows:
        assert row["runs"]["lookup"]["kind"]
        assert len(row["runs"]["model"]["drafted"]) == row["tokens"] <= 8
        first = row["runs"]["model"]["accepted"]
        assert first == row["runs"]["model"]["drafted"], "the draft is the target itself"
    recorded = (tmp_path / "a.jsonl").read_bytes()
    code, _, err = run_main("acceptance", str(float_bundle), *words)
    assert code == 2
    assert "a.jsonl exists already; choose another name, or give --overwrite" in err
    assert (tmp_path / "a.jsonl").read_bytes() == recorded
    assert run_main("acceptance", str(float_bundle), *words, "--overwrite")[0] == 0


def test_a_path_that_gets_short_is_gone_on_with():
    answer = answer_of(70)
    found = runs(ModelDrafter(FakeGraph(VOCAB, logits=TARGET), min_confidence=0.0), PROMPT, answer)
    assert found["drafted"] == [DRAFT_LENGTH] * 70
    assert found["accepted"] == [min(DRAFT_LENGTH, 70 - position) for position in range(70)]
