"""ExecuTorch without torch against ExecuTorch through torch and ONNX Runtime: ms a forward by width, and memory.

    outrider export -m smollm2-135m-q4_1 --precision int4 --max-context 512 --backends executorch,onnxruntime --output B
    python -m benchmarks.executorch B

The target's graphs of one bundle in one process, after the same context, interleaved in alternating order;
ratios are of the two forwards of one repeat. Resident memory is that of a process of its own that has run
a prompt and some steps, through the graph alone and through `outrider.load`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.summary import Median, describe, machine, markdown_table, median_interval
from outrider.contracts import Graph
from outrider.manifest import GraphEntry, bundle_path, read_manifest
from outrider.runtime.backends import graph_meta

__all__ = ["Memory", "Row", "measure", "resident"]

CONTEXT = 64  # committed tokens before what is timed
BASE = "shim"


@dataclass(frozen=True)
class Row:
    """A width: ms by engine, and how many times the shim's time the others take, repeat by repeat."""

    width: int
    ms: Mapping[str, Median]
    times_shim: Mapping[str, Median]


@dataclass(frozen=True)
class Memory:
    """Resident MB of a process, beside the MB of the model's file."""

    what: str
    resident_mb: float
    peak_mb: float
    model_mb: float
    torch: bool


def graphs_of(bundle: Path) -> dict[str, GraphEntry]:
    """The target's graph of each backend that runs on a CPU here."""
    entries = read_manifest(bundle).roles["target"].by_preference()
    found = {graph.backend: graph for graph in reversed(entries) if graph.unit == "cpu"}
    missing = {"executorch", "onnxruntime"} - set(found)
    if missing:
        raise SystemExit(f"{bundle} has no {', '.join(missing)} graph of its target: see --help")
    return found


def open_graphs(bundle: Path, threads: int) -> dict[str, Graph]:
    """The same target by three engines."""
    from outrider.targets.executorch import ExecutorchGraph
    from outrider.targets.onnxruntime import OnnxGraph

    entries = graphs_of(bundle)
    pte, onnx = entries["executorch"], entries["onnxruntime"]
    where, meta = bundle_path(bundle, pte.path), graph_meta(pte)
    return {
        "shim": ExecutorchGraph.load(where, meta, threads=threads, runtime="shim"),
        "executorch.runtime": ExecutorchGraph.load(where, meta, threads=threads, runtime="torch"),
        "onnxruntime": OnnxGraph.load(bundle_path(bundle, onnx.path), graph_meta(onnx), threads=threads),
    }


def measure(graphs: Mapping[str, Graph], widths: Sequence[int], repeats: int) -> list[Row]:
    """Time forwards of every width by every engine in turn."""
    prompt = np.random.default_rng(0).integers(100, 4000, CONTEXT + max(widths))
    for graph in graphs.values():
        chunk = min(CONTEXT, *(graph.widths or (CONTEXT,))[-1:])
        for start in range(0, CONTEXT, chunk):
            graph.forward(prompt[start : start + chunk], logits="none")
            graph.commit(range(min(chunk, CONTEXT - start)))
    rows = []
    for width in widths:
        tokens = prompt[CONTEXT : CONTEXT + width]
        seconds: dict[str, list[float]] = {name: [] for name in graphs}
        for repeat in range(repeats + 3):
            names = list(graphs) if repeat % 2 else list(graphs)[::-1]
            for name in names:
                graphs[name].forward(tokens)  # back from another engine: caches and clocks are its own again
                start = time.perf_counter()
                graphs[name].forward(tokens)
                seconds[name].append(time.perf_counter() - start)
        ms = {name: [1e3 * value for value in values[3:]] for name, values in seconds.items()}
        ratios = {
            name: median_interval([other / base for other, base in zip(values, ms[BASE], strict=True)])
            for name, values in ms.items()
            if name != BASE
        }
        rows.append(Row(width, {name: median_interval(values) for name, values in ms.items()}, ratios))
    return rows


ALONE = """
import json, sys
from pathlib import Path

how, bundle, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
if how == "graph":
    from outrider.targets.executorch import ExecutorchGraph

    graph = ExecutorchGraph.load(sys.argv[4], json.loads(sys.argv[5]), threads=threads, runtime="shim")
    graph.forward([1] * 32)
    graph.commit(range(32))
    for _ in range(16):
        graph.forward([2])
        graph.commit([0])
else:
    import outrider

    pipeline = outrider.load(bundle, target_backend="executorch", draft=False, threads=threads)
    pipeline.generate("The water cycle begins with", max_tokens=32, ignore_eos=True)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found = {name: int(status[name].split()[0]) / 1000 * 1.024 for name in ("VmRSS", "VmHWM")}
print(json.dumps({**found, "torch": "torch" in sys.modules}))
"""


def resident(bundle: Path, threads: int) -> list[Memory]:
    """Memory of processes that run the .pte through the shim and have not seen torch."""
    entry = graphs_of(bundle)["executorch"]
    path = bundle_path(bundle, entry.path)
    found = []
    for how, what in (("graph", "the graph alone"), ("pipeline", "outrider.load")):
        command = [sys.executable, "-c", ALONE, how, str(bundle), str(threads)]
        command += [str(path), json.dumps(graph_meta(entry))]
        said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        size = path.stat().st_size / 1e6
        found.append(Memory(what, said["VmRSS"], said["VmHWM"], size, said["torch"]))
    return found


def format_rows(rows: Sequence[Row]) -> str:
    """Times as Markdown: how much longer each other engine takes than the shim."""
    others = list(rows[0].times_shim)
    head = ["width", *(f"{name}, ms" for name in rows[0].ms), *(f"{name} / {BASE}" for name in others)]
    body = [
        [
            str(row.width),
            *(f"{value:.2f}" for value in row.ms.values()),
            *(f"{row.times_shim[name]:.2f}" for name in others),
        ]
        for row in rows
    ]
    return markdown_table(head, body)


def format_memory(rows: Sequence[Memory]) -> str:
    """Memory as Markdown."""
    head = ["process", "resident, MB", "peak, MB", "model file, MB", "resident beyond the model, MB", "torch"]
    body = [
        [
            row.what,
            *(f"{value:.0f}" for value in (row.resident_mb, row.peak_mb, row.model_mb)),
            f"{row.resident_mb - row.model_mb:.0f}",
            "loaded" if row.torch else "no",
        ]
        for row in rows
    ]
    return markdown_table(head, body)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.executorch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args(arguments)
    before = machine()
    memory = resident(options.bundle, options.threads)
    rows = measure(open_graphs(options.bundle, options.threads), options.widths, options.repeats)
    print(format_rows(rows), format_memory(memory), sep="\n\n")
    print(f"\n{describe(before)}; {options.threads} threads; median [interval] of {options.repeats}")
    if options.json:
        record: dict[str, Any] = {"machine": before, "rows": [asdict(row) for row in rows]}
        record["memory"] = [asdict(row) for row in memory]
        options.json.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
