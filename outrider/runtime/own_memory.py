"""Telemetry that also tells what this process holds: no trace, and no sensor of another machine, can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.contracts import Reading
from outrider.power.monitor import Monitor
from outrider.power.state import State
from outrider.runtime.memory_budget import held_mb

__all__ = ["OwnMemory"]


class OwnMemory:
    """What a pacer asks of a monitor, with `State.memory_resident_mb` as `held` says at every look.

    A look takes some 10 µs.
    """

    def __init__(self, monitor: Monitor, held: Callable[[], float] = held_mb) -> None:
        self.monitor, self._held = monitor, held

    def poll(self) -> State:
        """The machine now, and this process."""
        return replace(self.monitor.poll(), memory_resident_mb=self._held() or None)

    def readings(self) -> Sequence[Reading]:
        """The monitor's."""
        return self.monitor.readings()
