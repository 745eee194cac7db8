"""Run as a script: load a bundle whose graphs take the memory that its manifest says, decode, and tell the peak."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any


def main(bundle: str, limit_mb: str, cgroup: str, careless: str) -> None:
    """Everything but the arguments is imported inside the cgroup, whose memory it is counted as."""
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    import numpy as np

    import outrider
    from outrider.runtime import load
    from outrider.runtime.backends import held_context
    from outrider.runtime.memory_budget import Room
    from outrider.targets.fake import FakeGraph

    def open_hungry(folder: Any, entry: Any, options: Any) -> FakeGraph:
        context = held_context(entry, options.context)
        kv = entry.kv
        graph = FakeGraph(entry.vocab_size, context, seed=3)
        numbers = 2 * kv.layers * kv.heads * kv.head_dim * context
        weights = sum(file.bytes for file in entry.files.values())
        graph.held = np.ones(numbers, np.float32), np.ones(weights, np.uint8)  # type: ignore[attr-defined]
        return graph

    load.BACKENDS["onnxruntime"] = open_hungry  # type: ignore[assignment]
    if careless:
        load.room_here = lambda _: Room(0.0, None, None)
    with outrider.load(bundle, memory_limit_mb=float(limit_mb) if limit_mb else None) as pipeline:
        result = pipeline.generate("the fox", max_tokens=24, ignore_eos=True)
        drafters, context = pipeline.drafters, pipeline.engine.target.max_context
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kb = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak_kb is not None
    found = {"drafters": drafters, "context": context, "tokens": result.tokens}
    print(json.dumps({**found, "peak_mb": int(peak_kb[1]) * 1024 / 1e6}))


if __name__ == "__main__":
    main(*sys.argv[1:])
