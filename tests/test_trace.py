"""A decode trace holds enough to decide every round again, and a changed one is caught."""

from __future__ import annotations

import io
import json

import pytest

from outrider.contracts import Sampling
from outrider.errors import TraceError
from outrider.runtime.rounds import Engine, Request
from outrider.runtime.trace import TraceWriter, replay
from outrider.targets.fake import FakeDrafter, FakeGraph, blend_logits, random_logits

VOCAB = 9
LOGITS = random_logits(VOCAB, seed=1)
DRAFT = blend_logits(LOGITS, random_logits(VOCAB, seed=2), 0.4)
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy with penalties": Sampling(repetition_penalty=1.4, logit_bias={2: 1.0}),
    "match": Sampling(temperature=0.9, top_p=0.9, seed=5),
    "reject": Sampling(temperature=1.1, seed=5, mode="reject"),
    "reject, truncated": Sampling(temperature=0.9, top_k=4, frequency_penalty=0.3, seed=5, mode="reject"),
}


def traced(sampling, branching=(2, 1), rule="iid", path=None, vocab=VOCAB, logits=LOGITS):
    """The lines of a trace and the text that it traced."""
    target = path or io.StringIO()
    request = Request(sampling, max_new_tokens=25, k=4, stop_ids=frozenset({8}))
    writer = TraceWriter(target, sampling=sampling, stop_ids=[8], prompt=[1, 2], vocab_limit=vocab)
    engine = Engine(FakeGraph(vocab, logits=logits), {"draft": FakeDrafter(DRAFT, branching, rule)})
    with writer:
        tokens = [token for part in engine.decode([1, 2], request, trace=writer) for token in part.tokens]
    return (None if path else target.getvalue().splitlines()), tokens


@pytest.mark.parametrize("branching", [(1,), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_replay_decides_every_round_again(name, branching):
    lines, tokens = traced(SAMPLINGS[name], branching)
    result = replay(lines)
    assert result.tokens == tuple(tokens)
    assert (result.rounds, result.skipped) == (len(lines) - 1, 0)


def test_a_trace_in_a_file_replays(tmp_path):
    path = tmp_path / "trace.jsonl"
    _, tokens = traced(SAMPLINGS["match"], path=path)
    assert replay(path).tokens == tuple(tokens)


def changed(lines, number, change):
    record = json.loads(lines[number])
    change(record)
    return [*lines[:number], json.dumps(record), *lines[number + 1 :]]


def flip_top(record):
    record["rows"][0]["top"]["ids"] = record["rows"][0]["top"]["ids"][::-1]


def move_uniform(record):
    record["rows"][0]["uniform"] /= 2


def other_token(record):
    record["tokens"][0] = (record["tokens"][0] + 1) % VOCAB


def shift_chances(record):
    probs = record["rows"][0]["chances"]["probs"]
    record["rows"][0]["chances"]["probs"] = [0.0] * (len(probs) - 1) + [1.0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("greedy", flip_top),
        ("greedy", other_token),
        ("match", move_uniform),
        ("match", other_token),
        ("match", shift_chances),
        ("reject", move_uniform),
    ],
)
def test_a_changed_trace_fails_its_replay(name, change):
    lines, _ = traced(SAMPLINGS[name])
    with pytest.raises(TraceError):
        replay(changed(lines, 2, change))


def test_rows_too_wide_to_keep_are_counted_as_skipped():
    wide = random_logits(5000, seed=3)
    lines, _ = traced(Sampling(temperature=1.0), vocab=5000, logits=wide)
    assert replay(lines).skipped == len(lines) - 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "empty"),
        (["[]"], "not an object"),
        (['{"schema_version": 99, "kind": "decode"}'], "99"),
        (['{"schema_version": 1, "kind": "dream"}'], "dream"),
        (['{"schema_version": 1, "kind": "acceptance"}'], "acceptance"),
        (['{"schema_version": 1, "kind": "decode", "sampling": {}}', '{"posi\n'], "line 2"),
    ],
)
def test_a_damaged_or_foreign_trace_is_refused_with_the_reason(lines, words):
    with pytest.raises(TraceError, match=words):
        replay(lines)


def test_a_trace_that_was_cut_off_replays_up_to_there():
    lines, tokens = traced(SAMPLINGS["match"])
    result = replay([*lines[:-1], lines[-1][:-5]])
    assert result.rounds == len(lines) - 2
    assert result.tokens == tuple(tokens)[: len(result.tokens)]
