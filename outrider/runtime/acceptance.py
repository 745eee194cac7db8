"""What drafters would have got right at every position of a text: a trace from which any plan can be simulated.

For greedy decoding, what a round commits depends only on where it starts and how much is drafted. So two
numbers for each position and drafter, how many tokens it drafts when asked for `DRAFT_LENGTH` and how many of
them are the target's own, say what any sequence of plans would have done on this text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.contracts import Drafter, Sampling
from outrider.runtime.context import Context, common_prefix

if TYPE_CHECKING:
    from outrider.runtime.bench import Prompt
    from outrider.runtime.pipeline import Pipeline

__all__ = ["DRAFT_LENGTH", "record_acceptance", "runs"]

DRAFT_LENGTH = 15


def record_acceptance(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    max_tokens: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Records of an `acceptance` trace (`docs/formats.md`), one a prompt: plain greedy text, then every drafter.

    Only the first turn of a prompt is answered: every text starts from an empty cache, so that simulations may
    take them in any order. `progress(done, total)` counts prompts.
    """
    for index, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt.turns[0]}]
        tokens = pipeline.tokenizer.encode(prompt.turns[0]) if prompt.raw else pipeline.chat_tokens(messages)
        answer = pipeline.generate(tokens, max_tokens=max_tokens, k=0).tokens
        drafters = pipeline.engine.drafters
        yield {
            "category": prompt.category,
            "prompt_tokens": len(tokens),
            "tokens": len(answer),
            "runs": {name: runs(drafter, tokens, answer) for name, drafter in drafters.items()},
        }
        if progress is not None:
            progress(index + 1, len(prompts))


def runs(drafter: Drafter, prompt: Sequence[int], answer: Sequence[int]) -> Mapping[str, list[Any]]:
    """For every position of a greedy answer: tokens drafted, how many of them were right, the kind of proposal."""
    drafter.reset()
    context = Context(prompt)
    ask = getattr(drafter, "kind", None)
    propose = _asked(drafter) if ask else _followed(drafter)
    out: dict[str, list[Any]] = {"drafted": [], "accepted": []} | ({"kind": []} if ask else {})
    for position, token in enumerate(answer):
        if ask:
            out["kind"].append(ask(context))
        drafted = propose(context)
        out["drafted"].append(len(drafted))
        out["accepted"].append(common_prefix(drafted, answer[position : position + len(drafted)]))
        context.extend([token])
    return out


def _asked(drafter: Drafter, k: int = DRAFT_LENGTH) -> Callable[[Context], list[int]]:
    """Proposals of a drafter that is asked anew at every position."""
    sampling, rng = Sampling(), np.random.default_rng(0)
    return lambda context: [int(token) for token in drafter.propose(context, k, sampling, rng).tokens]


def _followed(drafter: Drafter) -> Callable[[Context], list[int]]:
    """The same of a model, which drafts the same tokens from anywhere on the path that it drafted.

    So it is asked for twice as many, and again only where the text leaves that path or the path gets short.
    """
    ask = _asked(drafter, 2 * DRAFT_LENGTH)
    path: list[int] = []
    ended = False  # the path ends because the model was not sure enough

    def propose(context: Context) -> list[int]:
        nonlocal path, ended
        follows = bool(path) and len(context) > context.prompt_length and path[0] == context[-1]
        path = path[1:] if follows else []
        if not follows or (len(path) < DRAFT_LENGTH and not ended):
            path = ask(context)
            ended = len(path) < 2 * DRAFT_LENGTH
        return path[:DRAFT_LENGTH]

    return propose
