"""Texts of a made-up acceptance trace, for tests that simulate."""

from __future__ import annotations

import json
import random
from pathlib import Path

from outrider.targets.trace_model import TraceRun, TraceText


def made_up_texts(count: int = 4, tokens: int = 64, rate: float = 0.7, seed: int = 0) -> list[TraceText]:
    """A draft model that is right with `rate` at every position, and a lookup that seldom finds anything."""
    rng = random.Random(seed)
    texts = []
    for number in range(count):
        right = []
        for position in range(tokens):
            run = 0
            while run < min(15, tokens - position) and rng.random() < rate:
                run += 1
            right.append(run)
        kinds = [rng.choice([None, None, None, "4"]) for _ in range(tokens)]
        found = [0 if kind is None else 15 for kind in kinds]
        hits = [min(rng.choice([0, 2]), tokens - p) if k else 0 for p, k in enumerate(kinds)]
        runs = {
            "lookup": TraceRun(tuple(found), tuple(hits), tuple(kinds)),
            "model": TraceRun((15,) * tokens, tuple(right)),
        }
        texts.append(TraceText("even" if number % 2 == 0 else "odd", 20, tokens, runs))
    return texts


def write_texts(path: Path, texts: list[TraceText]) -> Path:
    """The same as an acceptance trace."""
    lines = [json.dumps({"schema_version": 1, "kind": "acceptance"})]
    for text in texts:
        runs = {
            name: {
                "drafted": run.drafted,
                "accepted": run.accepted,
                **({"kind": run.kind} if run.kind else {}),
            }
            for name, run in text.runs.items()
        }
        record = {"category": text.category, "prompt_tokens": text.prompt_tokens, "tokens": text.tokens}
        lines.append(json.dumps({**record, "runs": runs}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
