"""Telemetry traces that ship with Outrider.

`throttling.jsonl` is a simulated Raspberry Pi 4 that overheats and recovers; `python -m benchmarks.throttling_trace`
makes it, and every reading in it says that it is simulated.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["THROTTLING", "THROTTLING_DEVICE"]

THROTTLING = Path(__file__).with_name("throttling.jsonl")
"""A little over two minutes in which the silicon crosses its limit and cools again."""

THROTTLING_DEVICE = "raspberry-pi-4"
"""The profile whose limits the trace crosses."""
