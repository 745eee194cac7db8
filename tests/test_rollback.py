"""Whatever was accepted, rejected, cancelled or cut, the caches equal a replay from scratch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Proposal, Sampling
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeGraph, random_logits

VOCAB = 6
LOGITS = random_logits(VOCAB, seed=1, order=None, scale=1.5)


class Scripted:
    """Random trees, right or wrong as hypothesis pleases; each node may be the target's own token."""

    name = "scripted"

    def __init__(self, script):
        self.script = iter(script)

    def propose(self, context, k, sampling, rng):
        tokens, parents, paths = [], [], []
        for parent_pick, right, wrong in next(self.script, [])[:k]:
            parent = parent_pick % (len(tokens) + 1) - 1
            path = (*context[:], *(paths[parent] if parent >= 0 else ()))
            token = int(LOGITS(path).argmax()) if right else wrong
            tokens.append(token)
            parents.append(parent)
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return Proposal(np.array(tokens, np.int64), np.array(parents, np.int64))

    def observe(self, committed, output, rows):
        pass

    def reset(self):
        pass


NODES = st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.integers(0, VOCAB - 1)), max_size=6)
SAMPLINGS = st.sampled_from(
    [Sampling(), Sampling(temperature=1.0, seed=7), Sampling(temperature=1.0, seed=7, mode="reject")]
)


def replayed(tokens):
    graph = FakeGraph(VOCAB, logits=LOGITS)
    for token in tokens:
        graph.forward([token])
        graph.commit([0])
    return graph.kv


@given(st.lists(NODES, min_size=1, max_size=12), SAMPLINGS, st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_random_trees_of_right_and_wrong_drafts_leave_the_cache_of_a_replay(script, sampling, rounds, chunk):
    graph = FakeGraph(VOCAB, logits=LOGITS)
    engine = Engine(graph, {"scripted": Scripted(script)}, prefill_chunk=chunk)
    prompt = [1, 2, 3, 0, 1]
    stream = engine.decode(prompt, Request(sampling, max_new_tokens=30, k=6))
    committed = list(prompt)
    for _, part in zip(range(rounds), stream, strict=False):
        committed.extend(part.tokens)
        assert graph.kv == replayed(committed[:-1])
        assert list(engine.cached) == committed[:-1]
    if sampling.mode == "match":
        request = Request(sampling, max_new_tokens=len(committed) - len(prompt), k=0)
        plain = Engine(FakeGraph(VOCAB, logits=LOGITS)).decode(prompt, request)
        assert committed[len(prompt) :] == [token for part in plain for token in part.tokens]


TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),  # new words of the user
        st.integers(0, 9),  # how many tokens of the old text are forgotten
        st.integers(1, 8),  # tokens to generate
        st.integers(1, 9),  # rounds before the consumer walks away
        st.sampled_from([0, 1, 3, "auto"]),
    ),
    min_size=1,
    max_size=5,
)


@given(TURNS, st.sampled_from(["model", "lookup", None]), st.integers(3, 40), SAMPLINGS)
@settings(max_examples=120, deadline=None)
def test_turns_edits_and_cancellations_leave_target_and_draft_consistent(turns, drafter, window, sampling):
    graph = FakeGraph(VOCAB, logits=LOGITS)
    draft = FakeGraph(VOCAB, max_context=window, seed=3)
    model = ModelDrafter(draft, min_confidence=0.0)
    engine = Engine(graph, {"model": model, "lookup": LookupDrafter()})
    text: list[int] = []
    for words, forgotten, n, rounds, k in turns:
        text = [*text[: max(0, len(text) - forgotten)], *words]
        for _, part in zip(
            range(rounds), engine.decode(text, Request(sampling, n, k=k, drafter=drafter)), strict=False
        ):
            text = [*text, *part.tokens]
            assert graph.kv == replayed(text[:-1])
            assert [place for _, place in draft.kv] == list(range(draft.length))
