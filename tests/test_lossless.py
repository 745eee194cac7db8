"""Speculation leaves the distribution of the text alone: enumeration against many seeded runs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from outrider.contracts import Sampling
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeDrafter, FakeGraph, blend_logits, random_logits

VOCAB, LENGTH, PROMPT = 4, 3, (1, 2, 0)
RUNS = 500
SMALLEST_P = 1e-4  # a right sampler fails one test in 10,000; the seeds are fixed

TARGET = random_logits(VOCAB, seed=3, order=2, scale=1.2)
SETTINGS = {
    "temperature": Sampling(temperature=1.0),
    "warm": Sampling(temperature=1.7),
    "top_k": Sampling(temperature=1.0, top_k=2),
    "top_p": Sampling(temperature=1.0, top_p=0.7),
    "min_p": Sampling(temperature=1.0, min_p=0.3),
    "penalties": Sampling(
        temperature=1.0, repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "bias": Sampling(temperature=1.0, logit_bias={0: 1.5, 2: -1.0}),
    "bans": Sampling(temperature=1.0, banned_tokens=(1,)),
    "all": Sampling(
        temperature=0.8,
        top_k=3,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={3: 0.5},
    ),
}


def disjoint(context):
    """Never drafts the target's two most likely tokens."""
    row = -TARGET(context)
    row[np.argsort(TARGET(context))[-2:]] = -1e4
    return row


DRAFTS = {
    "good": blend_logits(TARGET, random_logits(VOCAB, seed=9), 0.25),
    "bad": random_logits(VOCAB, seed=8, scale=2.0),
    "disjoint": disjoint,
}


def oracle(context, output, sampling):
    """The processed distribution of the next token, written down plainly in float64."""
    row = TARGET(tuple(context)).astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    row[list(sampling.banned_tokens)] = -np.inf
    for token in set(context):
        row[token] *= sampling.repetition_penalty if row[token] < 0 else 1 / sampling.repetition_penalty
        count = output.count(token)
        row[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    p = np.exp((row - row.max()) / sampling.temperature)
    p /= p.sum()
    order = sorted(range(VOCAB), key=lambda token: (-p[token], token))
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0.0
        p /= p.sum()
    reached = np.cumsum([0.0] + [p[token] for token in order])[:-1]
    p[[token for token, before in zip(order, reached, strict=True) if before >= sampling.top_p]] = 0.0
    p[p < sampling.min_p * p.max()] = 0.0
    return p / p.sum()


def enumerate_texts(sampling):
    """The probability of every text of LENGTH tokens. [VOCAB ** LENGTH]"""
    chances = []
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        p = 1.0
        for i, token in enumerate(text):
            p *= oracle([*PROMPT, *text[:i]], list(text[:i]), sampling)[token] if p else 0.0
        chances.append(p)
    return np.array(chances)


def run(engine, sampling, k, **options):
    request = Request(sampling, max_new_tokens=LENGTH, k=k, **options)
    return [token for part in engine.decode(PROMPT, request) for token in part.tokens]


def p_value(engine, sampling, k):
    """Chi-square of RUNS seeded texts against the enumeration; cells below 5 expected are pooled."""
    expected = RUNS * enumerate_texts(sampling)
    counts = np.zeros(len(expected))
    for seed in range(RUNS):
        text = run(engine, replace(sampling, seed=seed), k)
        counts[sum(token * VOCAB ** (LENGTH - 1 - i) for i, token in enumerate(text))] += 1
    assert counts[expected == 0].sum() == 0, "a text of probability zero was generated"
    rare = expected < 5
    pooled = [(counts[rare].sum(), expected[rare].sum())] if expected[rare].sum() > 1 else []
    cells = [*zip(counts[~rare], expected[~rare], strict=True), *pooled]
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    return chi2.sf(statistic, len(cells) - 1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_plain_sampling_has_the_enumerated_distribution(setting):
    assert p_value(Engine(FakeGraph(VOCAB, logits=TARGET)), SETTINGS[setting], 0) > SMALLEST_P


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_reject_with_a_chain_has_the_enumerated_distribution(setting, draft):
    engine = Engine(FakeGraph(VOCAB, logits=TARGET), {"draft": FakeDrafter(DRAFTS[draft], (1,), "iid")})
    assert p_value(engine, replace(SETTINGS[setting], mode="reject"), 2) > SMALLEST_P


@pytest.mark.parametrize("rule", ["iid", "without_replacement", "deterministic"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("setting", ["temperature", "all"])
def test_reject_with_a_tree_has_the_enumerated_distribution(setting, draft, rule):
    engine = Engine(FakeGraph(VOCAB, logits=TARGET), {"draft": FakeDrafter(DRAFTS[draft], (2, 1), rule)})
    # LENGTH - 1 nodes would leave no second level: one token more may come, and is cut.
    assert p_value(TreeEngine(engine), replace(SETTINGS[setting], mode="reject"), 4) > SMALLEST_P


class TreeEngine:
    """Decodes more tokens than are compared, so that a whole tree fits below every compared token."""

    def __init__(self, engine):
        self.engine = engine

    def decode(self, prompt, request):
        left = LENGTH
        for part in self.engine.decode(prompt, replace(request, max_new_tokens=LENGTH + 2)):
            yield replace(part, tokens=part.tokens[:left])
            left -= len(part.tokens)
            if left <= 0:
                return


@pytest.mark.parametrize("setting", ["temperature", "top_k", "penalties", "all"])
def test_reject_with_a_draft_model_has_the_enumerated_distribution(setting):
    draft = FakeGraph(VOCAB + 2, logits=lambda context: np.append(DRAFTS["good"](context), [9.0, 9.0]))
    drafter = ModelDrafter(draft, vocab_limit=VOCAB, min_confidence=0.4)
    engine = Engine(FakeGraph(VOCAB, logits=TARGET), {"model": drafter})
    assert p_value(TreeEngine(engine), replace(SETTINGS[setting], mode="reject"), 3) > SMALLEST_P


TRIMMED = {"some": np.array([0, 2, 3]), "one": np.array([1]), "two": np.array([1, 3])}


def trimmed_model(ids, min_confidence=0.4):
    """A draft model whose head has these ids only."""
    graph = FakeGraph(VOCAB, logits=DRAFTS["good"], columns=ids)
    return ModelDrafter(graph, VOCAB, min_confidence, vocab_ids=ids, known_ids=VOCAB)


class TrimmedDrafter(FakeDrafter):
    """Drafts trees over a part of the vocabulary: q and its ids as a trimmed head gives them."""

    def __init__(self, logits, ids, branching, rule):
        super().__init__(lambda context: logits(context)[ids], branching, rule)
        self.ids = ids

    def _children(self, context, n, rng):
        return [(int(self.ids[column]), q) for column, q in super()._children(context, n, rng)]

    def propose(self, context, k, sampling, rng):
        return replace(super().propose(context, k, sampling, rng), vocab_ids=self.ids)


@pytest.mark.parametrize(
    ("setting", "kept"), [("penalties", "some"), ("bans", "two"), ("all", "some"), ("all", "one")]
)
def test_reject_with_a_trimmed_draft_model_has_the_enumerated_distribution(setting, kept):
    engine = Engine(FakeGraph(VOCAB, logits=TARGET), {"model": trimmed_model(TRIMMED[kept])})
    assert p_value(TreeEngine(engine), replace(SETTINGS[setting], mode="reject"), 3) > SMALLEST_P


@pytest.mark.parametrize("rule", ["iid", "without_replacement", "deterministic"])
def test_reject_with_a_tree_of_a_trimmed_draft_has_the_enumerated_distribution(rule):
    drafter = TrimmedDrafter(DRAFTS["good"], TRIMMED["two"], (2, 1), rule)
    engine = Engine(FakeGraph(VOCAB, logits=TARGET), {"draft": drafter})
    assert p_value(TreeEngine(engine), replace(SETTINGS["temperature"], mode="reject"), 4) > SMALLEST_P


@pytest.mark.parametrize("kept", TRIMMED)
@pytest.mark.parametrize("setting", [*SETTINGS, "greedy"])
def test_match_with_a_trimmed_draft_gives_the_seeded_plain_text_exactly(setting, kept):
    sampling = SETTINGS.get(setting, Sampling(repetition_penalty=1.3))
    plain = Engine(FakeGraph(VOCAB, logits=TARGET))
    drafting = Engine(FakeGraph(VOCAB, logits=TARGET), {"model": trimmed_model(TRIMMED[kept], 0.0)})
    for seed in range(12):
        request = Request(replace(sampling, seed=seed), max_new_tokens=12, k=0)
        expected = [token for part in plain.decode(PROMPT, request) for token in part.tokens]
        for k in (1, 3, 6):
            parts = list(drafting.decode(PROMPT, replace(request, k=k)))
            assert [token for part in parts for token in part.tokens] == expected
            assert parts[-1].stats.drafted > 0 or set(TRIMMED[kept]) <= set(sampling.banned_tokens)


def test_the_chi_square_notices_a_trimmed_q_that_hides_what_it_lacks():
    """Claiming the whole draft's q for tokens drawn from a part of it is found out."""

    class Untold(TrimmedDrafter):
        def propose(self, context, k, sampling, rng):
            told = FakeDrafter.propose(self, context, k, sampling, rng)
            row = DRAFTS["good"](tuple(context[:])).astype(np.float64)
            q = np.exp(row - row.max()).astype(np.float32)
            return replace(told, q=np.stack([q] * len(told)))

    drafter = Untold(DRAFTS["good"], TRIMMED["two"], (1,), "iid")
    engine = Engine(FakeGraph(VOCAB, logits=TARGET), {"draft": drafter})
    assert p_value(TreeEngine(engine), replace(SETTINGS["temperature"], mode="reject"), 1) < SMALLEST_P


def test_the_chi_square_notices_a_biased_rule():
    """The test above would fail for a sampler that is off by a little (a power check)."""
    engine = Engine(FakeGraph(VOCAB, logits=blend_logits(TARGET, DRAFTS["bad"], 0.2)))
    assert p_value(engine, SETTINGS["temperature"], 0) < SMALLEST_P


@pytest.mark.parametrize("branching", [(1,), (2, 1), (2, 2, 1)])
@pytest.mark.parametrize("rule", ["iid", "without_replacement", "deterministic"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("setting", [*SETTINGS, "greedy"])
def test_match_gives_the_seeded_plain_text_exactly(setting, draft, rule, branching):
    sampling = SETTINGS.get(setting, Sampling(repetition_penalty=1.3))
    plain = Engine(FakeGraph(VOCAB, logits=TARGET))
    drafting = Engine(FakeGraph(VOCAB, logits=TARGET), {"draft": FakeDrafter(DRAFTS[draft], branching, rule)})
    for seed in range(12):
        request = Request(replace(sampling, seed=seed), max_new_tokens=12, k=0)
        expected = [token for part in plain.decode(PROMPT, request) for token in part.tokens]
        for k in (1, 3, 6):
            parts = drafting.decode(PROMPT, replace(request, k=k))
            assert [token for part in parts for token in part.tokens] == expected


def test_a_draft_that_shares_the_uniforms_is_accepted_more_often_than_sum_p_q():
    """Correlated drawing: an identical draft model is always accepted under `match`."""
    engine = Engine(
        FakeGraph(VOCAB, logits=TARGET),
        {"model": ModelDrafter(FakeGraph(VOCAB, logits=TARGET), min_confidence=0.0)},
    )
    *_, last = engine.decode(PROMPT, Request(Sampling(temperature=1.0, seed=5), max_new_tokens=60, k=4))
    assert last.stats.acceptance == 1.0
