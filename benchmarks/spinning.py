"""What threads that spin cost between rounds, and what they win within a forward.

    python -m benchmarks.spinning BUNDLE [--threads 2] [--repeats 5]

ONNX Runtime's threads may spin while they wait for work. `stop` lets them spin within a forward and never after it
(`session.force_spinning_stop`, what outrider does), `spin` leaves them as the library would, `sleep` forbids it
(`session.intra_op.allow_spinning`, what outrider does under --nice). Each way decodes steps back to back, and steps
with a pause after each, in alternating order; CPU seconds are those of the process. `pair` has a second graph of the
same file take turns with it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.summary import machine, markdown_table, median_interval
from outrider.manifest import bundle_path, verify
from outrider.runtime.backends import graph_meta
from outrider.targets.onnxruntime import OnnxGraph

__all__ = ["WAYS", "measure"]

WAYS = {
    "stop": {},
    "spin": {"session.force_spinning_stop": "0"},
    "sleep": {"session.intra_op.allow_spinning": "0"},
}
PAUSE_S = 0.05
STEPS = 40


def _steps(graphs: Sequence[OnnxGraph], pause_s: float) -> tuple[float, float, float]:
    """Seconds of a step, CPU seconds of one, and CPU seconds of a pause after it."""
    for graph in graphs:
        graph.truncate(0)
    worked_s = worked_cpu_s = rested_cpu_s = 0.0
    for step in range(STEPS):
        graph = graphs[step % len(graphs)]
        begin, cpu = time.perf_counter(), time.process_time()
        graph.forward([11 + step], logits="last")
        graph.commit([0])
        worked_s += time.perf_counter() - begin
        ran = time.process_time()
        worked_cpu_s += ran - cpu
        if pause_s:
            time.sleep(pause_s)
            rested_cpu_s += time.process_time() - ran
    return worked_s / STEPS, worked_cpu_s / STEPS, rested_cpu_s / STEPS


def measure(
    load: Callable[[dict[str, str]], OnnxGraph], repeats: int
) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """What steps took, by way and by what went on: `back to back`, `pauses`, `pair`."""
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    with ExitStack() as stack:
        graphs = {}
        for way, entries in WAYS.items():
            graphs[way] = [load(entries) for _ in range(2)]
            for graph in graphs[way]:
                stack.callback(graph.close)
            _steps(graphs[way], 0.0)
        for repeat in range(repeats):
            for way in list(WAYS) if repeat % 2 == 0 else list(reversed(WAYS)):
                both = graphs[way]
                for what, chosen, pause_s in (
                    ("back to back", both[:1], 0.0),
                    ("pauses", both[:1], PAUSE_S),
                    ("pair", both, 0.0),
                ):
                    found.setdefault((what, way), []).append(_steps(chosen, pause_s))
                    time.sleep(0.1)  # what still spins is not the next one's
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    entry = verify(given.bundle).roles["target"].by_preference()[0]

    def load(entries: dict[str, str]) -> OnnxGraph:
        path = bundle_path(given.bundle, entry.path)
        return OnnxGraph.load(path, graph_meta(entry), threads=given.threads, session_options=entries)

    found = measure(load, given.repeats)
    head = ["", "way", "steps/s", "x stop", "CPU ms a step", f"CPU ms a pause of {1e3 * PAUSE_S:.0f} ms"]
    body = []
    for (what, way), samples in sorted(found.items()):
        base = found[what, "stop"]
        body.append(
            [
                what,
                way,
                f"{median_interval([1 / s for s, _, _ in samples]):.1f}",
                f"{median_interval([b[0] / s[0] for b, s in zip(base, samples, strict=True)]):.2f}",
                f"{median_interval([1e3 * cpu for _, cpu, _ in samples]):.1f}",
                f"{median_interval([1e3 * cpu for _, _, cpu in samples]):.2f}" if what == "pauses" else "-",
            ]
        )
    print(f"{machine()}; {given.threads} threads, {STEPS} steps x {given.repeats}\n")
    print(markdown_table(head, body))


if __name__ == "__main__":
    main()
