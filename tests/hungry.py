"""Run as a script: load a bundle whose graphs take the memory that its manifest says, decode, and tell the peak.

A growing target takes more than that: 12 MB at each of its first forwards.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

GROWTHS, GROWTH_MB = 8, 12
LONGER_THAN_A_LOOK_S = 0.06


def main(bundle: str, limit_mb: str, cgroup: str, careless: str, growing: str) -> None:
    """Everything but the arguments is imported inside the cgroup, whose memory it is counted as."""
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    import numpy as np

    import outrider
    from outrider.power.monitor import Monitor
    from outrider.runtime import load
    from outrider.runtime.backends import held_context
    from outrider.runtime.memory_budget import Room, held_mb
    from outrider.targets.fake import FakeGraph

    class HungryGraph(FakeGraph):
        held: list[Any]
        growths = 0

        def forward(self, *args: Any, **options: Any) -> Any:
            if self.growths:
                self.growths -= 1
                self.held.append(np.ones(GROWTH_MB * 1_000_000, np.uint8))
                time.sleep(LONGER_THAN_A_LOOK_S)
            return super().forward(*args, **options)

        def close(self) -> None:
            self.held = []
            super().close()

    def open_hungry(folder: Any, entry: Any, options: Any) -> FakeGraph:
        context = held_context(entry, options.context)
        kv = entry.kv
        graph = HungryGraph(entry.vocab_size, context, seed=3)
        numbers = 2 * kv.layers * kv.heads * kv.head_dim * context
        weights = sum(file.bytes for file in entry.files.values())
        graph.held = [np.ones(numbers, np.float32), np.ones(weights, np.uint8)]
        graph.growths = GROWTHS if growing and entry.path == "target.bin" else 0
        return graph

    load.BACKENDS["onnxruntime"] = open_hungry  # type: ignore[assignment]
    if careless:
        load.room_here = lambda _: Room(0.0, None, None)
    limit = float(limit_mb) if limit_mb else None
    quiet = Monitor([]) if growing else None  # what else the machine is short of does not count
    with outrider.load(bundle, memory_limit_mb=limit, telemetry=quiet) as pipeline:
        result = pipeline.generate("the fox", max_tokens=24, ignore_eos=True, k=1)
        drafters, context = pipeline.drafters, pipeline.engine.target.max_context
        left_mb = held_mb()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kb = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak_kb is not None
    found = {
        "drafters": drafters,
        "context": context,
        "tokens": result.tokens,
        "flags": result.stats.flags,
        "left_mb": left_mb,
    }
    print(json.dumps({**found, "peak_mb": int(peak_kb[1]) * 1024 / 1e6}))


if __name__ == "__main__":
    main(*sys.argv[1:])
