"""A graph that gives only the largest logits of a row leads to the text of whole rows, and to those where it must."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.contracts import Sampling, TopK, TopRows
from outrider.runtime.leading import enough
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.rounds import Engine, Request
from outrider.targets.cached_graph import top_rows
from outrider.targets.fake import FakeDrafter, FakeGraph, blend_logits, random_logits

VOCAB, TOP = 17, 6
LOGITS = random_logits(VOCAB, seed=1, order=None)
PROMPT = [3, 1, 4, 1, 5]


class Reducing(FakeGraph):
    """A graph that can give the 6 largest logits; `asked` lists what it was asked for."""

    top = TOP

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[Any] = []

    def forward(self, *arguments: Any, **options: Any) -> Any:
        self.asked.append(arguments[3] if len(arguments) > 3 else options.get("logits", "all"))
        return super().forward(*arguments, **options)


QUALITY = blend_logits(LOGITS, random_logits(VOCAB, seed=2), 0.3)


def rounds(graph: FakeGraph, sampling: Sampling, **options: Any) -> list[Any]:
    drafters = {
        "lookup": LookupDrafter(min_ngram=1),
        "tree": FakeDrafter(QUALITY, (2, 1), "deterministic" if sampling.greedy else "iid"),
    }
    request = Request(sampling, 40, **{"k": 4, "drafter": "tree", **options})
    return list(Engine(graph, drafters, vocab_limit=VOCAB - 1).decode(PROMPT, request))


@pytest.mark.parametrize("drafter", ["tree", "lookup"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.9, top_k=3, seed=5),
        Sampling(temperature=1.3, top_k=4, top_p=0.8, min_p=0.05, seed=6, mode="reject"),
    ],
    ids=["greedy", "top-k", "reject"],
)
def test_the_largest_logits_lead_to_the_text_and_margins_of_whole_rows(
    sampling: Sampling, drafter: str
) -> None:
    whole, reduced = Reducing(VOCAB, logits=LOGITS), Reducing(VOCAB, logits=LOGITS)
    whole.top = 0
    expected, found = (rounds(graph, sampling, drafter=drafter) for graph in (whole, reduced))
    assert [part.tokens for part in found] == [part.tokens for part in expected]
    assert [part.near_ties for part in found] == [part.near_ties for part in expected]
    again = [place for place, request in enumerate(reduced.asked) if place and request != TopK(TOP)]
    assert all(reduced.asked[place - 1] == TopK(TOP) for place in again)  # padding was among the largest
    assert len(again) < len(found) - 1  # and else they were enough
    assert TopK(TOP) not in whole.asked


@pytest.mark.parametrize(
    "ids", [None, [0, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 15, 16]], ids=["whole", "trimmed"]
)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.9, top_k=3, seed=5)], ids=["greedy", "top-k"]
)
def test_a_draft_is_the_same_from_its_largest_logits(sampling: Sampling, ids: list[int] | None) -> None:
    columns = None if ids is None else np.array(ids)
    proposed = []
    for top in (TOP, 0):
        graph = Reducing(VOCAB, logits=QUALITY, columns=columns)
        graph.top = top
        drafter = ModelDrafter(graph, VOCAB, vocab_ids=columns, known_ids=VOCAB)
        target = Engine(FakeGraph(VOCAB, logits=LOGITS), {"model": drafter})
        rounds = target.decode(PROMPT, Request(sampling, 40, k=4, drafter="model"))
        proposed.append([(part.tokens, part.drafted) for part in rounds])
        assert (TopK(TOP) in graph.asked) == (top > 0)
    assert proposed[0] == proposed[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": Sampling(temperature=0.7)},
        {"sampling": Sampling(temperature=0.7, top_k=TOP)},  # and one more is needed to see the cut
        {"sampling": Sampling(repetition_penalty=1.1)},
        {"sampling": Sampling(logit_bias={3: 1.0})},
        {"sampling": Sampling(banned_tokens=(2,))},
        {"sampling": Sampling(), "logprobs": 2},
    ],
    ids=["temperature", "large top-k", "penalty", "bias", "ban", "logprobs"],
)
def test_what_needs_whole_rows_asks_for_them(changes: dict[str, Any]) -> None:
    graph = Reducing(VOCAB, logits=LOGITS)
    rounds(graph, **changes)
    assert not any(isinstance(request, TopK) for request in graph.asked)


def test_ties_with_what_was_left_out_padding_and_nan_are_not_enough() -> None:
    logits = np.array([[0.0, 5.0, 4.0, 4.0, 1.0, 4.0, 2.0, 3.0]], np.float32)
    assert enough(top_rows(logits, 5), 2, 8, 8)
    assert not enough(top_rows(logits, 3), 2, 8, 8)  # a third 4.0 may have been left out
    assert enough(top_rows(logits, 8), 9, 8, 8)  # nothing was left out
    assert not enough(top_rows(logits, 5), 2, 8, 5)  # id 5 is padding and as large as the second
    assert enough(top_rows(logits, 5), 2, 8, 7)  # id 7 is padding too, and smaller
    assert not enough(top_rows(logits, 1), 2, 8, 8)
    broken = TopRows(np.array([[1, 2, 3]]), np.array([[5, 4, 1]], np.float32), np.array([np.nan], np.float32))
    assert not enough(broken, 2, 8, 8)


def test_a_row_that_ties_throughout_is_run_again_whole_and_gives_the_lowest_id() -> None:
    graph = Reducing(VOCAB, logits=lambda _: np.zeros(VOCAB, np.float32))
    found = rounds(graph, Sampling(), k=0)
    assert {token for part in found for token in part.tokens} == {0}
    assert [TopK(TOP), "last"] == graph.asked[1:3]
