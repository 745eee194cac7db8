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

    `progress(done, total)` counts prompts.
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
    context, sampling, rng = Context(prompt), Sampling(), np.random.default_rng(0)
    ask = getattr(drafter, "kind", None)
    out: dict[str, list[Any]] = {"drafted": [], "accepted": []} | ({"kind": []} if ask else {})
    for position, token in enumerate(answer):
        kind = ask(context) if ask else ""
        if ask:
            out["kind"].append(kind)
        proposal = () if kind is None else drafter.propose(context, DRAFT_LENGTH, sampling, rng).tokens
        drafted = [int(draft) for draft in proposal]
        out["drafted"].append(len(drafted))
        out["accepted"].append(common_prefix(drafted, answer[position : position + len(drafted)]))
        context.extend([token])
    return out
