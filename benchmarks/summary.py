"""Medians with intervals, and tables; shared by the benchmarks."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

__all__ = ["Median", "describe", "machine", "markdown_table", "median_interval"]


@dataclass(frozen=True)
class Median:
    """A median between two order statistics; `coverage` is the chance that they enclose the true one."""

    value: float
    low: float
    high: float
    coverage: float
    n: int

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def median_interval(samples: Sequence[float], wanted: float = 0.95) -> Median:
    """The median and its distribution-free interval: the closest order statistics with `wanted` coverage.

    Few samples cannot reach it; then the interval is the whole range and `coverage` says what that is worth.
    """
    ordered = sorted(samples)
    n = len(ordered)
    if n == 0:
        raise ValueError("a median needs at least one sample")
    cut = 0
    while 2 * (cut + 1) < n and _coverage(n, cut + 1) >= wanted:
        cut += 1
    return Median(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut], _coverage(n, cut), n)


def _coverage(n: int, cut: int) -> float:
    """P(x[cut] <= median <= x[n-1-cut]) for n independent samples (a sign test turned round)."""
    return max(0.0, 1.0 - 2 * sum(comb(n, i) for i in range(cut + 1)) / 2**n)


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [list(head), *[list(row) for row in body]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def machine() -> dict[str, Any]:
    """What this ran on: processor, cores that may be used, load before the run, system."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def describe(what: dict[str, Any]) -> str:
    """One line about the machine, for under a table."""
    load = what["load_1min"]
    return f"{what['cpu']}, {what['cores']} cores, {what['system']}, load {load} before the run"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
