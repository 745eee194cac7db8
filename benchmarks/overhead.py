"""What a round costs outside the graphs: planning, drafting's sampling, acceptance, bookkeeping, text.

    python -m benchmarks.overhead                    # engine over in-memory graphs, V = 49152 and 152064
    python -m benchmarks.overhead --bundle DIR       # the public API over real graphs

The time inside the graphs (`FakeGraph.forward`; with a bundle, ONNX Runtime's own run calls) is taken off
the time that the consumer waits for the rounds after the first. With a bundle that leaves the backend's
binding of inputs and the streaming of text in what is counted; in memory there is no text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import outrider
from benchmarks.summary import Median, describe, machine, markdown_table, median_interval
from outrider.contracts import Drafter, Output, Sampling
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.rounds import Engine, Request
from outrider.targets.fake import FakeGraph, blend_logits, random_logits

__all__ = ["Case", "Row", "measure"]

PROMPT = "The water cycle, explained to a curious child, begins with a drop of water in the sea. It"


@dataclass(frozen=True)
class Case:
    """One way to decode whose overhead is measured."""

    name: str
    sampling: Sampling
    k: int
    drafter: str | None


def cases(drafters: Sequence[str]) -> list[Case]:
    """Greedy and sampled, plain and at k = 4."""
    greedy = Sampling()
    match = Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=1)
    reject = Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=1, mode="reject")
    found = [Case("greedy, plain", greedy, 0, None), Case("top-k 50 top-p 0.95, plain", match, 0, None)]
    for name in drafters:
        found.append(Case(f"greedy, {name} k=4", greedy, 4, name))
        found.append(Case(f"top-k 50 top-p 0.95 match, {name} k=4", match, 4, name))
        found.append(Case(f"top-k 50 top-p 0.95 reject, {name} k=4", reject, 4, name))
    return found


class Stopwatch:
    """Adds up the seconds spent inside the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


@dataclass(frozen=True)
class Row:
    """Milliseconds a round outside the graphs, over repeats of `rounds` rounds."""

    case: str
    vocab_size: int
    ms_per_round: Median
    rounds: int
    tokens_per_round: float


def measure(rounds: Iterator[Any], watch: Stopwatch) -> tuple[float, int]:
    """Seconds outside the graphs and number of rounds, both after the first item of `rounds`."""
    next(rounds)
    inside, start = watch.seconds, time.perf_counter()
    count = sum(1 for _ in rounds)
    return time.perf_counter() - start - (watch.seconds - inside), count


class _TimedFake(FakeGraph):
    """A fake graph whose forwards are taken off."""

    watch: Stopwatch

    def forward(self, *arguments: Any, **options: Any) -> Output:
        """The forward of `FakeGraph`, timed."""
        timed: Output = self.watch.wrap(super().forward)(*arguments, **options)
        return timed


def in_memory(vocab_size: int, tokens: int, repeats: int) -> list[Row]:
    """The engine alone, over fake graphs with a draft that mostly agrees."""
    watch = Stopwatch()
    good = random_logits(vocab_size, seed=1, order=1, scale=4.0)  # order 1: the text soon repeats itself
    other = random_logits(vocab_size, seed=2, order=1, scale=4.0)
    target = _TimedFake(vocab_size, max_context=tokens + 64, logits=good)
    draft = _TimedFake(vocab_size, max_context=tokens + 64, logits=blend_logits(good, other, 0.05))
    target.watch = draft.watch = watch
    drafters: dict[str, Drafter] = {
        "model": ModelDrafter(draft, min_confidence=0.0),
        "lookup": LookupDrafter(),
    }
    engine = Engine(target, drafters)
    rows = []
    for case in cases(list(drafters)):
        request = Request(sampling=case.sampling, max_new_tokens=tokens, k=case.k, drafter=case.drafter)

        def decode(request: Request = request) -> Iterator[Any]:
            engine.reset()
            return engine.decode(list(range(1, 33)), request)

        rows.append(_repeat(case, vocab_size, decode, watch, tokens, repeats))
    return rows


def on_bundle(folder: Path, tokens: int, repeats: int, threads: int) -> list[Row]:
    """The public API over a bundle's own graphs; what ONNX Runtime's run calls take is taken off."""
    import onnxruntime

    watch = Stopwatch()
    session = onnxruntime.InferenceSession
    originals = {name: getattr(session, name) for name in ("run", "run_with_iobinding")}
    for name, function in originals.items():
        setattr(session, name, watch.wrap(function))
    try:
        with outrider.load(folder, threads=threads) as pipeline:
            vocab_size = pipeline.engine.target.vocab_size
            rows = []
            for case in cases(pipeline.drafters):
                options = {"sampling": case.sampling, "k": case.k, "drafter": case.drafter}

                def decode(options: dict[str, Any] = options) -> Iterator[Any]:
                    pipeline.reset()
                    return pipeline.stream(PROMPT, max_tokens=tokens, ignore_eos=True, **options)

                rows.append(_repeat(case, vocab_size, decode, watch, tokens, repeats))
            return rows
    finally:
        for name, function in originals.items():
            setattr(session, name, function)


def _repeat(
    case: Case,
    vocab_size: int,
    decode: Callable[[], Iterator[Any]],
    watch: Stopwatch,
    tokens: int,
    repeats: int,
) -> Row:
    measure(decode(), watch)
    samples = [measure(decode(), watch) for _ in range(repeats)]
    per_round = median_interval([1e3 * seconds / max(1, count) for seconds, count in samples])
    count = samples[-1][1]
    print(f"V={vocab_size} {case.name}: {per_round:.3f} ms a round", file=sys.stderr)
    return Row(case.name, vocab_size, per_round, count, tokens / (count + 1))


def format_rows(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    head = ["V", "case", "ms a round outside the graphs", "rounds", "tokens/round"]
    body = [
        [str(r.vocab_size), r.case, f"{r.ms_per_round:.3f}", str(r.rounds), f"{r.tokens_per_round:.2f}"]
        for r in rows
    ]
    return markdown_table(head, body)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--vocab", type=int, nargs="*", default=[49152, 152064])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    before = machine()
    if options.bundle:
        rows = on_bundle(options.bundle, options.tokens, options.repeats, options.threads)
    else:
        rows = [row for size in options.vocab for row in in_memory(size, options.tokens, options.repeats)]
    print(format_rows(rows))
    kind = "real graphs" if options.bundle else "in-memory graphs (simulated model, real engine)"
    print(f"\n{describe(before)}; {kind}; median [interval] of {options.repeats}")
    if options.json:
        record = {"machine": before, "graphs": kind, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
