"""Overlapped against serial rounds on one placement, and against plain decoding on all cores; real graphs.

    python -m benchmarks.overlap BUNDLE [--draft-unit cpu:0] [--target-unit cpu:1] [--k 3] [--repeats 5]

Every prompt is decoded in turn: plain on all cores, then on the placement serially, overlapped (also without drafting
behind corrections in the time a draft has left) and as the planner chooses, in alternating order; ratios are medians
over prompts and repeats. Seconds begin after the first round, in which a draft model reads the prompt: fixed ways do
not pay for that, `auto` counts it when it chooses. `formula` is what a round should take by the forwards measured
beside each other in the same run: max(verify, k + 1 steps) where everything assumed came true, k steps and a verify
where not.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import outrider
from benchmarks.summary import machine, markdown_table, median_interval
from outrider.runtime.bench import Prompt, default_prompts, load_prompts
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.pipeline import Pipeline, Result
from outrider.runtime.rounds import Round
from outrider.runtime.stats import Stats

__all__ = ["Sample", "Way", "measure"]


@dataclass(frozen=True)
class Way:
    """A way to decode: on the placement or on all cores, with what options."""

    name: str
    placed: bool
    options: dict[str, Any]
    corrects: bool = True  # whether the draft may go on behind the likeliest correction


@dataclass(frozen=True)
class Sample:
    """One text: ms a token, and what its rounds were."""

    way: str
    prompt: int
    ms: float
    acceptance: float | None
    overlapped: float
    ready: float  # share of rounds whose draft was made beside the verify before
    wasted: float  # share of the draft steps made so
    verify_ms: float
    draft_ms: float  # of a round that was not ready
    formula_ms: float | None
    same_text: bool


def ways(k: int) -> list[Way]:
    """Plain first: the others are compared with its text."""
    fixed = {"k": k, "drafter": "model"}
    return [
        Way("plain, all cores", False, {"k": 0}),
        Way("plain, target's cores", True, {"k": 0}),
        Way(f"serial k={k}", True, {**fixed, "drafting": "serial"}),
        Way(f"overlapped k={k}", True, {**fixed, "drafting": "overlapped"}),
        Way("the same, no corrections", True, {**fixed, "drafting": "overlapped"}, corrects=False),
        Way("auto", True, {"k": "auto", "drafter": "model"}),
    ]


class Rounds:
    """Notes the rounds of a text, but for the first."""

    def __init__(self) -> None:
        self.seen: list[Round] = []

    def __call__(self, part: Round) -> None:
        """Note one."""
        self.seen.append(part)

    def means(self, k: int) -> tuple[float, float, float, float | None]:
        """Share of rounds that began ready; median seconds of a verify, of drafting, and of a round by the formula."""
        rounds = self.seen[1:]
        ready = [part for part in rounds if part.ready]
        verify_s = statistics.median([part.verify_s for part in rounds]) if rounds else 0.0
        fresh = [part.draft_s for part in rounds if not part.ready and part.drafted]
        draft_s = statistics.median(fresh) if fresh else 0.0
        share = len(ready) / len(rounds) if rounds else 0.0
        step_s = draft_s / k if k else 0.0
        formula = share * max(verify_s, (k + 1) * step_s) + (1 - share) * (draft_s + verify_s)
        return share, verify_s, draft_s, formula if k and draft_s else None


def _decode(
    pipeline: Pipeline, prompt: Prompt, options: dict[str, Any], tokens: int
) -> tuple[Result, Rounds]:
    pipeline.reset()
    rounds = Rounds()
    wanted = {"max_tokens": tokens, "on_round": rounds, "ignore_eos": True, **options}
    if prompt.raw or pipeline.template is None:
        return pipeline.generate(prompt.turns[0], **wanted), rounds
    return pipeline.chat([{"role": "user", "content": prompt.turns[0]}], **wanted), rounds


def _sample(way: Way, index: int, result: Result, rounds: Rounds, same: bool) -> Sample:
    stats: Stats = result.stats
    k = way.options["k"] if isinstance(way.options["k"], int) else 0
    ready, verify_s, draft_s, formula_s = rounds.means(k)
    after = stats.output_tokens - stats.first_tokens
    per_round = after / max(stats.rounds - 1, 1)
    return Sample(
        way.name,
        index,
        1e3 * stats.decode_s / after,
        stats.acceptance,
        stats.overlapped_rounds / stats.rounds,
        ready,
        stats.wasted_steps / stats.ahead_steps if stats.ahead_steps else 0.0,
        1e3 * verify_s,
        1e3 * draft_s,
        None if formula_s is None else 1e3 * formula_s / per_round,
        same,
    )


@contextmanager
def _corrections(allowed: bool) -> Iterator[None]:
    """Draft models as they are, or such as never draft behind a correction."""
    kept = ModelDrafter.corrects
    if not allowed:
        ModelDrafter.corrects = property(lambda _: False)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ModelDrafter.corrects = kept  # type: ignore[method-assign]


def measure(
    bundle: Path, units: tuple[str, str], prompts: Sequence[Prompt], k: int, tokens: int, repeats: int
) -> list[Sample]:
    """Decode every prompt in every way, `repeats` times; `units` are the draft's and the target's."""
    samples: list[Sample] = []
    with ExitStack() as stack:
        whole = stack.enter_context(outrider.load(bundle, draft=False, governor=False))
        placed = stack.enter_context(
            outrider.load(bundle, draft_unit=units[0], target_unit=units[1], governor=False)
        )
        _decode(placed, prompts[0], {"k": k, "drafter": "model"}, 16)  # warms up
        plan = ways(k)
        for repeat in range(repeats):
            for index, prompt in enumerate(prompts):
                plain: Result | None = None
                for way in plan if repeat % 2 == 0 else [plan[0], *reversed(plan[1:])]:
                    with _corrections(way.corrects):
                        result, rounds = _decode(placed if way.placed else whole, prompt, way.options, tokens)
                    plain = plain or result
                    samples.append(_sample(way, index, result, rounds, result.tokens == plain.tokens))
    return samples


def table(samples: Sequence[Sample], k: int) -> str:
    """One row a way; ratios are paired by prompt and repeat."""
    by_way = {way.name: [s for s in samples if s.way == way.name] for way in ways(k)}
    plain, serial = by_way["plain, all cores"], by_way[f"serial k={k}"]
    head = [
        "way",
        "ms/token",
        "x plain",
        "x serial",
        "acceptance",
        "overlapped",
        "ready",
        "wasted",
        "formula",
        "text",
    ]
    body = []
    for name, found in by_way.items():
        known = [s.acceptance for s in found if s.acceptance is not None]
        formulas = [s.formula_ms for s in found if s.formula_ms is not None]
        body.append(
            [
                name,
                f"{median_interval([s.ms for s in found]):.1f}",
                f"{median_interval([p.ms / s.ms for p, s in zip(plain, found, strict=True)]):.2f}",
                f"{median_interval([p.ms / s.ms for p, s in zip(serial, found, strict=True)]):.2f}",
                f"{statistics.fmean(known):.2f}" if known else "-",
                f"{statistics.fmean([s.overlapped for s in found]):.0%}",
                f"{statistics.fmean([s.ready for s in found]):.0%}",
                f"{statistics.fmean([s.wasted for s in found]):.0%}",
                f"{statistics.median(formulas):.1f} ms" if formulas else "-",
                "same" if all(s.same_text for s in found) else "near-ties",
            ]
        )
    return markdown_table(head, body)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--draft-unit", default="cpu:0")
    parser.add_argument("--target-unit", default="cpu:1")
    parser.add_argument("--prompts", type=Path, help="JSON lines (default: four short ones of our own)")
    parser.add_argument("--category", help="only prompts of this category")
    parser.add_argument("--limit", type=int, help="the first so many prompts")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    prompts = load_prompts(given.prompts) if given.prompts else default_prompts()
    prompts = [p for p in prompts if given.category in (None, p.category)][: given.limit]
    units = (given.draft_unit, given.target_unit)
    samples = measure(given.bundle, units, prompts, given.k, given.tokens, given.repeats)
    print(
        f"{machine()}; draft on {units[0]}, target on {units[1]}, {len(prompts)} prompts x {given.repeats}\n"
    )
    print(table(samples, given.k))
    if given.json:
        given.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=2))


if __name__ == "__main__":
    main()
