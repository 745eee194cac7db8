"""What it could win to draft behind the likeliest correction too, in the time that a draft has left beside a verify.

    python -m benchmarks.overlap.corrections BUNDLE [--draft-unit cpu:0] [--target-unit cpu:1] [--k 1 2 3 4]

Texts are decoded overlapped, and every draft is noted with its runner-up and the lead over it. The prediction: of
the k drafts and the guess after them, the one with the least lead is rejected, and the target takes its runner-up.
How often that holds is a share of the rounds (`held`); `any place` is the share in which the target took the runner-up
of whichever draft it rejected. What a held one could save are the whole steps that fit between the end of the k + 1
assumed steps and that of the verify, by what forwards take beside each other in the same run; `x` is the rate that
this would give, over the rate without. Nothing is charged for moving the draft's cache back and forth, whose cost is
measured apart: copied rows, and rows that run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import outrider
from benchmarks.summary import machine, markdown_table
from outrider.contracts import BoolArray, Graph, IntArray, LogitsRequest, Output
from outrider.runtime.bench import Prompt, load_prompts
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.rounds import Round
from outrider.targets.cached_graph import CachedGraph

__all__ = ["Noted", "Prices", "Watched", "gain"]

DATA = Path(__file__).parents[1] / "data"


class Watched:
    """A draft's graph that notes, by position, the two most likely next tokens and the lead of the first."""

    def __init__(self, inner: Graph) -> None:
        self.inner = inner
        self.seen: dict[int, tuple[int, int, float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(
        self,
        tokens: Sequence[int] | IntArray,
        positions: IntArray | None = None,
        mask: BoolArray | None = None,
        logits: LogitsRequest = "all",
        **options: Any,
    ) -> Output:
        """Run it, and note the last row."""
        place = self.inner.length + len(tokens)
        output = self.inner.forward(tokens, positions, mask, logits, **options)
        if isinstance(output.logits, np.ndarray) and len(output.logits):
            row = output.logits[-1]
            two = np.argpartition(row, -2)[-2:]
            second, best = two[np.argsort(row[two], kind="stable")]
            self.seen[place] = int(best), int(second), float(row[best] - row[second])
        return output


@dataclass(frozen=True)
class Noted:
    """A round: its category, drafts asked for and accepted, what the target took next, and the drafts' doubts."""

    category: str
    k: int
    accepted: int
    took: int
    runners_up: tuple[int, ...]  # of the drafts, and of the guess where it was made
    leads: tuple[float, ...]
    ready: bool
    rejected: bool  # one of the drafts, or the guess

    @property
    def predicted(self) -> bool:
        """Whether the draft with the least lead was rejected for its runner-up."""
        place = int(np.argmin(self.leads))
        return self.rejected and place == self.accepted and self.runners_up[place] == self.took

    @property
    def any_place(self) -> bool:
        """Whether the rejected one was, whatever its lead."""
        return (
            self.rejected and self.accepted < len(self.leads) and self.runners_up[self.accepted] == self.took
        )


@dataclass(frozen=True)
class Prices:
    """Seconds of forwards while both graphs work, and of what a draft's cache would need."""

    verify_s: dict[int, float]  # by width
    step_s: float
    rerun_s: dict[int, float]  # by tokens that run again
    copy_s: float  # of eight rows of the cache, out and back


def _timed(graph: Graph, width: int, n: int) -> float:
    graph.truncate(0)
    graph.forward(list(range(11, 75)), logits="none")
    graph.commit(range(64))
    times = []
    for _ in range(n):
        begin = time.perf_counter()
        graph.forward(list(range(100, 100 + width)), logits="all" if width > 1 else "last")
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _beside(busy: Graph, graph: Graph, width: int, n: int, busy_width: int) -> float:
    """The median of forwards while the other graph runs all the time."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            _timed(busy, busy_width, 5)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return _timed(graph, width, n)
    finally:
        done.set()
        thread.join()


def prices(target: Graph, draft: Graph, ks: Sequence[int], n: int = 9) -> Prices:
    """Measure everything, each graph beside the other."""
    verify_s = {k + 1: _beside(draft, target, k + 1, n, 1) for k in ks}
    step_s = _beside(target, draft, 1, 3 * n, 4)
    rerun_s = {width: _beside(target, draft, width, n, 4) for width in (4, 6, 8)}
    return Prices(verify_s, step_s, rerun_s, _copy_s(draft))


def _copy_s(graph: Graph, rows: int = 8) -> float:
    """Seconds to copy rows of a cache out and back, where it is the host's memory."""
    cache = (
        getattr(getattr(graph, "_runner", None), "cache", None) if isinstance(graph, CachedGraph) else None
    )
    if cache is None:
        return float("nan")
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        kept = cache[:, :, :, 64 : 64 + rows].copy()
        cache[:, :, :, 64 : 64 + rows] = kept
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def record(
    pipeline: Pipeline, prompts: Sequence[Prompt], ks: Sequence[int], tokens: int, longest: int
) -> dict[int, list[Noted]]:
    """Decode overlapped with every k, and note the rounds in which all k drafts came."""
    drafter = pipeline.engine.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    watched = Watched(drafter.graph)
    pipeline.engine.drafters["model"] = ModelDrafter(watched, drafter.vocab_limit, drafter.min_confidence)  # type: ignore[arg-type]
    noted: dict[int, list[Noted]] = {k: [] for k in ks}
    for prompt in prompts:
        ids = pipeline.chat_tokens([{"role": "user", "content": prompt.turns[0]}])
        for k in ks if len(ids) <= longest else ():
            watched.seen.clear()
            places = [len(ids)]

            def note(
                part: Round, k: int = k, places: list[int] = places, category: str = prompt.category
            ) -> None:
                found = _noted(part, places[0], k, watched, category)
                noted[k].extend([found] if found else [])
                places[0] += len(part.tokens)

            pipeline.generate(
                ids, max_tokens=tokens, k=k, drafter="model", drafting="overlapped", on_round=note
            )
    return noted


def _noted(part: Round, start: int, k: int, watched: Watched, category: str) -> Noted | None:
    """A round behind `start` tokens; None where it did not draft k tokens, or ended the text."""
    if not part.drafted == part.plan.k == k or part.finish_reason is not None:
        return None
    doubts = [doubt for i in range(k + 1) if (doubt := watched.seen.get(start + i)) is not None]
    if len(doubts) < k:
        return None
    runners_up, leads = tuple(second for _, second, _ in doubts), tuple(lead for _, _, lead in doubts)
    rejected = part.accepted < k or part.guess is False
    return Noted(category, k, part.accepted, part.tokens[-1], runners_up, leads, part.ready, rejected)


def gain(noted: Sequence[Noted], costs: Prices, k: int) -> dict[str, float]:
    """What the prediction is worth: shares of rounds, steps that fit, and the ratio of rates."""
    verify_s, step_s = costs.verify_s[k + 1], costs.step_s
    fits = max(0, min(k, int((verify_s - (k + 1) * step_s) / step_s)))
    ready = statistics.fmean([n.ready for n in noted])
    round_s = ready * max(verify_s, (k + 1) * step_s) + (1 - ready) * (k * step_s + verify_s)
    held = statistics.fmean([n.predicted for n in noted])
    anywhere = statistics.fmean([n.any_place for n in noted])
    return {
        "rounds": len(noted),
        "ready": ready,
        "rejected": statistics.fmean([n.rejected for n in noted]),
        "held": held,
        "any place": anywhere,
        "steps that fit": fits,
        "x": round_s / (round_s - held * fits * step_s),
        "x, were all steps to fit": round_s / (round_s - held * k * step_s),
    }


def main() -> None:
    """Record, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--draft-unit", default="cpu:0")
    parser.add_argument("--target-unit", default="cpu:1")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--longest", type=int, default=300, help="leave longer prompts out")
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--prompts", type=Path, default=DATA / "spec_bench_dev.jsonl")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    prompts = load_prompts(given.prompts, given.per_category)
    units = {"draft_unit": given.draft_unit, "target_unit": given.target_unit}
    with outrider.load(given.bundle, governor=False, **units) as pipeline:
        drafter = pipeline.engine.drafters["model"]
        assert isinstance(drafter, ModelDrafter)
        costs = prices(pipeline.engine.target, drafter.graph, given.k)
        rows = record(pipeline, prompts, given.k, given.tokens, given.longest)
    print(f"{machine()}; {units}; {len(prompts)} prompts\n")
    print(json.dumps(asdict(costs), indent=1), "\n")
    found = {k: gain(noted, costs, k) for k, noted in rows.items()}
    head = ["k", *next(iter(found.values()))]
    print(markdown_table(head, [[str(k), *(f"{v:.3g}" for v in row.values())] for k, row in found.items()]))
    if given.json:
        kept = {"prices": asdict(costs), "rounds": [asdict(n) for noted in rows.values() for n in noted]}
        given.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
