"""None, serial and overlapped side by side on simulated devices; every figure is simulated.

    python -m benchmarks.overlap.simulated [--repeats 4] [--known] [--json FILE]

What is drafted and accepted is the real Qwen2.5-Coder pair's (1.5B and 0.5B, `benchmarks/power/data`), time, joules and
heat are those of a device profile, whose figures are mostly assumed. Each mode decodes the same texts, one after
another, on a machine that starts cool. `--known`: the planner begins with the times of forwards, draft steps and a
draft's reading, which `outrider doctor --save` would have measured, here learned from drafts of two.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.summary import markdown_table
from outrider.runtime.planner import Planner
from outrider.runtime.profiling.rig import trace_rig
from outrider.runtime.rounds import Request
from outrider.runtime.stats import Stats
from outrider.targets.device import load_device
from outrider.targets.simulated import Machine
from outrider.targets.trace_model import TraceText, read_acceptance

__all__ = ["CATEGORIES", "PLACES", "Outcome", "simulate"]

TRACE = Path(__file__).parents[1] / "power" / "data" / "acceptance.jsonl"
PLACES = {  # device -> units of target and draft
    "snapdragon-8-gen3": ("gpu", "npu"),
    "iphone-16-pro": ("gpu", "npu"),
    "jetson-orin-nano": ("gpu", "cpu"),
}
CATEGORIES = {"code": "coding", "chat": "writing", "summary": "summarization"}
MODES: dict[str, dict[str, Any]] = {
    "none": {"k": 0},
    "serial": {"k": "auto", "drafting": "serial"},
    "overlapped": {"k": "auto", "drafting": "overlapped"},
    "auto": {"k": "auto"},
}


@dataclass(frozen=True)
class Outcome:
    """What one mode made of a category's texts on a device."""

    device: str
    category: str
    mode: str
    tokens_per_s: float
    joules_per_token: float
    peak_die_c: float
    k: float  # mean of the rounds
    overlapped: float  # share of the rounds
    wasted: float  # share of the draft steps that ran beside a verify


def learned(device: str, category: str, texts: Sequence[TraceText]) -> dict[str, Any]:
    """The times that a planner knows after every text of a category, drafted two at a time."""
    planner = Planner()
    simulate(device, category, {"k": 2, "drafting": "serial"}, texts, 1, planner)
    return {name: planner.to_dict()[name] for name in ("verify_s", "draft_s", "catch_up_s")}


def simulate(
    device: str,
    category: str,
    mode: dict[str, Any],
    texts: Sequence[TraceText],
    repeats: int,
    planner: Planner,
    name: str = "",
) -> Outcome:
    """Decode the texts of a category, `repeats` times in a row, with the options of a mode."""
    profile, (unit, draft_unit) = load_device(device), PLACES[device]
    machine = Machine(profile, seed=1)
    rig = trace_rig(profile, texts, machine, unit=unit, draft_unit=draft_unit)
    engine = rig.engine(planner, None)
    begin, chosen = rig.texts(), [text for text in texts if text.category == category]
    total, seconds, joules, drafted = Stats(), 0.0, 0.0, 0
    for _ in range(repeats * len(chosen)):
        text = begin(category)
        request = Request(max_new_tokens=text.max_tokens, stop_ids=text.stop_ids, drafter="model", **mode)
        rounds = engine.decode(text.prompt, request)
        next(rounds)  # the prompt
        start_s, start_j = machine.clock(), machine.energy_j
        for part in rounds:
            drafted += part.plan.k
        stats = part.stats
        seconds, joules = seconds + machine.clock() - start_s, joules + machine.energy_j - start_j
        total.output_tokens += stats.output_tokens - stats.first_tokens
        total.rounds += stats.rounds - 1
        total.overlapped_rounds += stats.overlapped_rounds
        total.ahead_steps += stats.ahead_steps
        total.wasted_steps += stats.wasted_steps
    return Outcome(
        device,
        category,
        name,
        total.output_tokens / seconds,
        joules / total.output_tokens,
        machine.peak.die_c,
        drafted / total.rounds,
        total.overlapped_rounds / total.rounds,
        total.wasted_steps / total.ahead_steps if total.ahead_steps else 0.0,
    )


def main() -> None:
    """Simulate everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=4, help="how often the texts of a category are decoded"
    )
    parser.add_argument("--device", action="append", choices=list(PLACES))
    parser.add_argument("--known", action="store_true", help="the planner begins with measured times")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts = read_acceptance(TRACE)
    outcomes = []
    for device, category in product(given.device or PLACES, CATEGORIES.values()):
        costs = learned(device, category, texts) if given.known else None
        for name, mode in MODES.items():
            outcomes.append(simulate(device, category, mode, texts, given.repeats, Planner(costs), name))
    head = [
        "device (simulated)",
        "text",
        "mode",
        "tokens/s",
        "J/token",
        "peak die °C",
        "k",
        "overlapped",
        "wasted",
    ]
    body = [
        [
            f"{o.device}, target {PLACES[o.device][0]}, draft {PLACES[o.device][1]}",
            o.category,
            o.mode,
            f"{o.tokens_per_s:.1f}",
            f"{o.joules_per_token:.3f}",
            f"{o.peak_die_c:.1f}",
            f"{o.k:.1f}",
            f"{o.overlapped:.0%}",
            f"{o.wasted:.0%}",
        ]
        for o in outcomes
    ]
    print(markdown_table(head, body))
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))


if __name__ == "__main__":
    main()
