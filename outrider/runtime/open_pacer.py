"""Find the sensors of this machine, or a recorded trace, and join them with a governor for a pipeline."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from outrider.contracts import Energy, Reading
from outrider.errors import TraceError, UsageError
from outrider.manifest import GraphEntry
from outrider.power.governor import Governor, Policy
from outrider.runtime.decision_log import DecisionLog
from outrider.runtime.own_memory import OwnMemory
from outrider.runtime.pacing import Pacer
from outrider.runtime.unmetered import Unmetered, unmetered
from outrider.targets.model_cost import KV_BYTES

if TYPE_CHECKING:
    from outrider.power.monitor import Monitor
    from outrider.power.sensors.system import Sensor
    from outrider.runtime.memory_budget import MemoryPlan
    from outrider.targets.device import Device

__all__ = ["Governing", "footprint_mb", "open_pacer", "refuse_unmeasurable"]

PLAIN_LENGTH = 256  # tokens of context behind which a plain forward is typical
POLL_S = 0.05  # sensors are not looked at more often, however short the rounds

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Governing:
    """What a pipeline is to be governed by; the options of `outrider.load` from `objective` on.

    `governor` None: where a sensor tells how hot the machine is, or one of the other options is given. False:
    never. `device` is a profile's name or path. `telemetry` is a recorded trace, played back from now, or a
    monitor of one's own, which is not started or stopped here. `log` is a file for the decisions.
    """

    objective: Literal["latency", "energy", "balanced"] = "latency"
    power_cap_w: float | None = None
    temp_limit_c: float | None = None
    battery_floor_percent: float | None = None
    memory_limit_mb: float | None = None
    device: str | os.PathLike[str] | Device | None = None
    telemetry: str | os.PathLike[str] | Monitor | None = None
    log: str | os.PathLike[str] | None = None
    governor: bool | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range, and options beside `governor` False."""
        _ = self.policy
        if self.governor is False and self.given:
            raise UsageError(f"governor is off, but {self.given[0]} was given; leave one of them out")

    @property
    def policy(self) -> Policy:
        """The user's part of it. Raises UsageError for a value out of range."""
        return Policy(
            self.objective,
            self.power_cap_w,
            self.temp_limit_c,
            self.battery_floor_percent,
            self.memory_limit_mb,
        )

    @property
    def given(self) -> list[str]:
        """The options that ask for a governor, as the user knows them."""
        names = ["power_cap_w", "temp_limit_c", "battery_floor_percent", "memory_limit_mb", "device"]
        given = [name for name in [*names, "telemetry", "log"] if getattr(self, name) is not None]
        return given if self.objective == "latency" else ["objective", *given]


def open_pacer(
    governing: Governing,
    stack: ExitStack,
    drafters: Sequence[str] = (),
    graphs: Mapping[str, GraphEntry] | None = None,
    memory: MemoryPlan | None = None,
) -> Pacer | None:
    """A pacer as `governing` wants it, or None; what it opens is closed by `stack`.

    Where no sensor tells how hot the machine is, memory alone is watched, for the sake of a draft model.

    `graphs` are those of the bundle that will run, by role: with the device's profile they say what rounds should
    draw, until that is measured. `memory` says what is taken; without it, files and caches do.

    Raises UsageError for a limit that nothing on this machine can measure, and for an unknown device.
    """
    if governing.governor is False:
        return None
    device = _device(governing)
    monitor, owned = _monitor(governing)
    if owned:
        stack.callback(monitor.stop)  # before its first look, which opens files
    state = monitor.poll()
    readings = monitor.readings()
    refuse_unmeasurable(governing.policy, readings)
    if not (governing.governor or governing.given or _tells_heat(readings)):
        monitor.stop()
        return _watch_memory(governing, stack, graphs or {}, memory)
    if owned:
        monitor.start()
    from outrider.power.energy import EnergyModel

    target_mb, draft_mb = _taken_mb(graphs or {}, memory)
    governor = Governor(governing.policy, device, target_mb=target_mb, draft_mb=draft_mb)
    log = _open_log(governing, governor)
    energy_model = EnergyModel(_prior(device, graphs or {}, drafters), tuple(drafters))
    stand_in = _stand_in(device, graphs or {})
    watched = monitor if governing.memory_limit_mb is None else OwnMemory(monitor)
    pacer = Pacer(watched, governor, energy_model, log, time.monotonic, POLL_S, stand_in)
    stack.callback(pacer.close)
    _log.info("governed by %s: %s", governing.policy, state)
    return pacer


def _watch_memory(
    governing: Governing, stack: ExitStack, graphs: Mapping[str, GraphEntry], memory: MemoryPlan | None
) -> Pacer | None:
    """A pacer that releases the draft model under memory pressure; None without a draft, or where nothing tells."""
    from outrider.power.memory_governor import MemoryGovernor
    from outrider.power.monitor import Monitor

    sensors = memory_sensors() if "draft" in graphs else []
    if not sensors:
        return None
    target_mb, draft_mb = _taken_mb(graphs, memory)
    governor = MemoryGovernor(governing.policy, target_mb=target_mb, draft_mb=draft_mb)
    monitor = Monitor(sensors)
    stack.callback(monitor.stop)
    return Pacer(monitor, governor, clock=time.monotonic, least_s=POLL_S)


def memory_sensors() -> list[Sensor]:
    """What tells how much memory there is on this machine; they are files of the kernel, quick to read."""
    from outrider.power.sensors.memory import Memory
    from outrider.power.sensors.system import System

    return Memory.find(System())


def _taken_mb(graphs: Mapping[str, GraphEntry], memory: MemoryPlan | None) -> tuple[float, float]:
    """What is in memory with the draft model released, and what that one takes."""
    if memory is not None:
        return memory.without_draft_mb, memory.draft.memory_mb if memory.draft is not None else 0.0
    sizes = {role: footprint_mb(graph) for role, graph in graphs.items()}
    return sizes.get("target", 0.0), sizes.get("draft", 0.0)


def _device(governing: Governing) -> Any:
    if governing.device is None or not isinstance(governing.device, str | os.PathLike):
        return governing.device
    from outrider.targets.device import load_device

    return load_device(os.fspath(governing.device))


def _stand_in(device: Any, graphs: Mapping[str, GraphEntry]) -> Unmetered | None:
    """Estimates for a device that has no meter; None without its profile, or where a graph's size is not known."""
    from outrider.targets.device import Device
    from outrider.targets.model_cost import model_cost

    if not isinstance(device, Device) or "target" not in graphs:
        return None
    target = graphs["target"]
    unit = target.unit if target.unit in device.units else None
    try:
        return unmetered(device, model_cost(target).work(1, PLAIN_LENGTH), unit)
    except UsageError:
        return None  # `_prior` has said so


def _prior(device: Any, graphs: Mapping[str, GraphEntry], drafters: Sequence[str]) -> Energy | None:
    """Joules of rounds by the device's profile; None without one, or where a graph's size is not known."""
    from outrider.targets.device import Device
    from outrider.targets.model_cost import model_cost, nominal_energy

    if not isinstance(device, Device) or "target" not in graphs:
        return None
    try:
        costs = {role: model_cost(graph) for role, graph in graphs.items()}
    except UsageError as error:
        _log.warning("no energy is assumed before it is measured: %s", error)
        return None
    units = {role: graph.unit if graph.unit in device.units else None for role, graph in graphs.items()}
    drafts = {name: costs.get("draft") if name == "model" else None for name in drafters}
    return nominal_energy(device, costs["target"], drafts, units["target"], units.get("draft"))


def _monitor(governing: Governing) -> tuple[Monitor, bool]:
    """The monitor, and whether its sensors are to be read in a thread of its own."""
    from outrider.power.monitor import Monitor, open_telemetry
    from outrider.power.sensors import discover

    given = governing.telemetry
    if given is None:
        return Monitor(discover()), True
    if isinstance(given, str | os.PathLike):
        return open_telemetry(os.fspath(given)), False
    if not hasattr(given, "poll"):
        raise UsageError(f"telemetry is {given!r}; give the path of a trace, or a monitor")
    return given, False


def _tells_heat(readings: Sequence[Reading]) -> bool:
    """However old they are by now: on a busy machine, reading all sensors once may take longer than they hold."""
    from outrider.power.monitor import distill

    state = distill(readings, 0.0, {reading.source: math.inf for reading in readings})
    return any(value is not None for value in (state.die_c, state.skin_c, state.headroom, state.throttle))


def refuse_unmeasurable(policy: Policy, readings: Sequence[Reading]) -> None:
    """Raise UsageError for a limit that nothing measures: it would be dropped in silence.

    Of a trace, the first readings count.
    """
    told = {reading.quantity for reading in readings if reading.value is not None}
    needs = [
        ("power_cap_w", {"power", "energy"}, "power"),
        ("temp_limit_c", {"temperature"}, "temperature"),
        ("battery_floor_percent", {"battery"}, "the charge of a battery"),
    ]
    for name, quantities, what in needs:
        value = getattr(policy, name)
        if value is not None and not quantities & told:
            silent = [r for r in readings if r.quantity in quantities and r.reason]
            why = f" ({silent[0].source}: {silent[0].reason})" if silent else ""
            raise UsageError(
                f"{name} is {value:g}, but nothing here tells {what}{why}; leave it out, or see"
                " `outrider doctor` for what would fix it"
            )


def _open_log(governing: Governing, governor: Governor) -> DecisionLog | None:
    if governing.log is None:
        return None
    try:
        return DecisionLog(os.fspath(governing.log), governor, every_s=0.0)
    except TraceError as error:
        raise UsageError(f"the decision log: {error}") from None


def footprint_mb(graph: GraphEntry) -> float:
    """MB that a graph takes: its files and its KV cache."""
    files = sum(entry.bytes for entry in graph.files.values())
    kv = graph.kv
    cache = 2 * kv.layers * kv.heads * kv.head_dim * graph.max_context * KV_BYTES.get(kv.dtype, 4)
    return (files + cache) / 1e6
