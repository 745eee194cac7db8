"""Telemetry traces that ship with Outrider.

`throttling.jsonl` is a simulated Raspberry Pi 4 that overheats and recovers; `python -m benchmarks.throttling_trace`
makes it, and every reading in it says that it is simulated.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["THROTTLING", "THROTTLING_LIMIT_C"]

THROTTLING = Path(__file__).with_name("throttling.jsonl")
"""A little over two minutes in which the silicon crosses its limit and cools again."""

THROTTLING_LIMIT_C = 80.0
"""The limit that it crosses: where a Raspberry Pi begins to throttle."""
