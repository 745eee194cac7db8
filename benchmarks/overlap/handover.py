"""What it takes to hand a draft to the thread that works ahead, and to take it back.

    python -m benchmarks.overlap.handover [--times 2000] [--verify-ms 5]

`out` is from `Ahead.start` to the first instruction of the work, while its caller goes on into a forward; `back` from
the end of the work to the caller that waits for it; `idle` is what `settle` takes when the work ended long before.
The forward is a sleep: like a library's, it leaves the interpreter to the other thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.summary import Median, machine, median_interval
from outrider.runtime.overlap import Ahead

__all__ = ["HandOver", "measure"]


@dataclass
class _Noting:
    """Works for so long, and notes when it began and ended."""

    seconds: float
    began: float = 0.0
    ended: float = 0.0

    def assume(self, k: int, rng: object) -> Generator[int, None, None]:
        """One guess, after a while."""
        self.began = time.perf_counter()
        time.sleep(self.seconds)
        yield 0
        self.ended = time.perf_counter()


@dataclass
class HandOver:
    """Seconds of every hand-over that was measured."""

    out: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    def medians_us(self) -> dict[str, Median]:
        """Medians in µs."""
        return {name: median_interval([1e6 * s for s in values]) for name, values in vars(self).items()}


def measure(times: int, verify_s: float) -> HandOver:
    """Hand over so many times, in turn to work that is shorter and longer than what its owner does meanwhile."""
    found, ahead = HandOver(), Ahead()
    for number in range(times):
        late = number % 2 == 0
        work: Any = _Noting(2 * verify_s if late else 0.0)
        begin = time.perf_counter()
        ahead.start("noting", work, 0, 1, 1)
        time.sleep(verify_s)
        asked = time.perf_counter()
        ahead.settle()
        taken = time.perf_counter()
        found.out.append(work.began - begin)
        (found.back if late else found.idle).append(taken - (work.ended if late else asked))
    ahead.close()
    return found


def main() -> None:
    """Measure, and print medians in µs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--verify-ms", type=float, default=5.0)
    given = parser.parse_args()
    medians = measure(given.times, given.verify_ms / 1e3).medians_us()
    print(
        json.dumps(
            {"machine": machine(), "us": {name: f"{value:.1f}" for name, value in medians.items()}}, indent=2
        )
    )


if __name__ == "__main__":
    main()
