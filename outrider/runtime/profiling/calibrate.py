"""Measure this machine with a bundle: memory, forwards by width, draft steps, and what they take in energy.

Only what was measured replaces the figures of a profile; the rest stays as it was, assumed where it was assumed.
Time and energy are fitted to the roofline of `targets.physics`, so that a simulation of this machine follows them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from outrider.contracts import Clock, Costs, Drafter, Energy, Graph, Sampling
from outrider.errors import OutriderError
from outrider.power.meter import Measured, Meter
from outrider.power.monitor import Monitor
from outrider.runtime.leading import usual_request
from outrider.targets.device import Device, Figure, Memory, Rate, Sense, Unit
from outrider.targets.model_cost import ModelCost

__all__ = ["Calibration", "Plan", "calibrate", "measured_profile", "read_bandwidth"]

WIDTHS = (1, 2, 3, 5, 9, 16)
PREFIX = 64  # tokens in the cache while forwards are measured
DRAFT_STEPS = 4  # tokens of a measured proposal
_METERS: Mapping[str, Literal["rapl", "rail"]] = {
    "package": "rapl",
    "core": "rapl",
    "module": "rail",
    "device": "rail",
    "rail": "rail",
    "soc": "rail",
}  # by the scope of what was measured
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Plan:
    """How long to measure: rest, and each width and drafter in `rounds` stretches of `seconds` in all."""

    rest_s: float = 10.0
    seconds: float = 6.0
    rounds: int = 3


@dataclass(frozen=True)
class Calibration:
    """What was measured. Energy and `idle_w` are None without a meter, and `no_meter` says why.

    `bandwidth_gb_s` is a pass of one thread over an array in memory: a lower bound of what the units reach.
    `costs.energy.static_w` is the power at rest; what work takes comes on top. `energy_from` names the source of
    power and how far it is to be trusted.
    """

    bundle: str
    date: str
    bandwidth_gb_s: float
    costs: Costs
    idle_w: float | None = None
    idle_drift_w: float | None = None
    energy_from: str = ""
    scope: str = ""
    no_meter: str = ""
    memory_gb: float | None = None
    warnings: tuple[str, ...] = ()
    method: str = "instant"

    @property
    def source(self) -> str:
        """What a figure of a profile says of its origin."""
        how = "simulated" if self.method == "simulated" else "measured"
        return f"{how}, outrider calibrate, {self.date}, bundle {self.bundle}"


def read_bandwidth(nbytes: int = 256 << 20, passes: int = 5, clock: Clock = time.perf_counter) -> float:
    """GB/s of the best of some passes of one thread over an array too large for caches: a lower bound."""
    data = np.ones(nbytes // 8, np.uint64)
    best = 0.0
    for _ in range(passes):
        begin = clock()
        np.bitwise_or.reduce(data)
        best = max(best, data.nbytes / max(clock() - begin, 1e-9) / 1e9)
    return best


@dataclass
class _Stretches:
    """Seconds of every repeat of one kind of work, and the meter's windows over them."""

    run: Callable[[], int]  # does the work once; returns how many units of it (tokens of a draft)
    seconds: list[float] = field(default_factory=list)  # a unit
    done: list[int] = field(default_factory=list)  # units, by stretch
    measured: list[Measured] = field(default_factory=list)


def calibrate(
    target: Graph,
    drafters: Mapping[str, Drafter],
    monitor: Monitor,
    *,
    bundle: str,
    date: str,
    plan: Plan | None = None,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    bandwidth_gb_s: float | None = None,
    memory_gb: float | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measure forwards by width and draft steps, in turn and several times over, with rest before and after.

    `monitor` is polled between forwards (or samples in a thread of its own). The cache holds `PREFIX` tokens,
    and is emptied in the end. Raises OutriderError when the target's context has no room for that.
    """
    plan = plan or Plan()
    meter = Meter(clock, monitor.periods)
    monitor.listeners.append(meter)
    work = _works(target, drafters)
    tell = progress or (lambda stage, share: None)
    try:
        before = _rest(meter, monitor, plan.rest_s, clock, sleep)
        for turn in range(plan.rounds):
            for index, (name, stretch) in enumerate(work.items()):
                _stretch(name, stretch, plan.seconds / plan.rounds, meter, monitor, clock)
                tell("measuring", (turn * len(work) + index + 1) / (plan.rounds * len(work)))
        after = _rest(meter, monitor, plan.rest_s, clock, sleep)
    finally:
        monitor.listeners.remove(meter)
        target.truncate(0)
        for drafter in drafters.values():
            drafter.reset()
    found = Calibration(
        bundle=bundle,
        date=date,
        bandwidth_gb_s=read_bandwidth() if bandwidth_gb_s is None else bandwidth_gb_s,
        costs=_times(work),
        memory_gb=memory_gb,
    )
    return _with_energy(found, work, before, after)


def _works(target: Graph, drafters: Mapping[str, Drafter]) -> dict[str, _Stretches]:
    """What is measured: "verify:<width>" and "draft:<name>", after filling the target's cache."""
    prefix = min(PREFIX, target.max_context // 2)
    widest = min(target.max_context - prefix, max(target.widths or WIDTHS))
    widths = [width for width in WIDTHS if width <= widest]
    if not widths or prefix < 1:
        raise OutriderError(f"the target's context of {target.max_context} tokens is too short to measure in")
    tokens = np.arange(prefix + max(widths)) % 97 + 1
    tokens = np.minimum(tokens, target.vocab_size - 1)
    target.truncate(0)
    step = max(target.widths or (prefix,))
    for start in range(0, prefix, step):
        chunk = tokens[start : min(start + step, prefix)]
        target.forward(chunk, logits="none")
        target.commit(range(len(chunk)))
    work = {f"verify:{w}": _Stretches(partial(_forward, target, tokens[prefix : prefix + w])) for w in widths}
    context = tokens[:prefix].tolist()
    return work | {
        f"draft:{name}": _Stretches(partial(_propose, drafter, context)) for name, drafter in drafters.items()
    }


def _forward(target: Graph, tokens: np.ndarray) -> int:
    target.forward(tokens, logits=usual_request(target))
    return 1


def _propose(drafter: Drafter, context: list[int]) -> int:
    proposal = drafter.propose(context, DRAFT_STEPS, Sampling(), np.random.default_rng(0))
    return max(1, len(proposal))


def _rest(
    meter: Meter, monitor: Monitor, seconds: float, clock: Clock, sleep: Callable[[float], object]
) -> Measured:
    monitor.poll()
    with meter.window("rest"):
        end = clock() + seconds
        while (left := end - clock()) > 1e-6:
            sleep(min(left, monitor.interval_s))
            monitor.poll()
    return meter.measure("rest")


def _stretch(
    name: str, stretch: _Stretches, seconds: float, meter: Meter, monitor: Monitor, clock: Clock
) -> None:
    """Do one kind of work for a while; the first repeat warms up, outside the window."""
    stretch.run()
    monitor.poll()
    units = 0
    meter.begin(name)
    begin = clock()
    while units < 3 or clock() - begin < seconds:
        started = clock()
        done = stretch.run()
        stretch.seconds.append((clock() - started) / done)
        units += done
        monitor.poll()
    meter.end(name)
    stretch.done.append(units)
    stretch.measured.append(meter.measure(name))


def _times(work: Mapping[str, _Stretches]) -> Costs:
    """Median seconds of every kind of work."""
    medians = {name: statistics.median(stretch.seconds) for name, stretch in work.items()}
    verify = {int(n.removeprefix("verify:")): s for n, s in medians.items() if n.startswith("verify:")}
    drafts = {n.removeprefix("draft:"): s for n, s in medians.items() if n.startswith("draft:")}
    return Costs(verify, drafts)


def _with_energy(
    found: Calibration, work: Mapping[str, _Stretches], before: Measured, after: Measured
) -> Calibration:
    """Add joules above rest where a meter gave them; else the reason why not."""
    windows = [measured for stretch in work.values() for measured in stretch.measured]
    missing = next((m for m in (before, after, *windows) if m.energy_j is None), None)
    rests = [m.mean_w for m in (before, after) if m.mean_w is not None]
    if missing is not None or len(rests) < 2 or before.budget is None:
        reason = missing.reason if missing is not None else "rest could not be measured"
        return replace(found, no_meter=f"{reason}; so no energy was measured")
    idle_w = sum(rests) / 2
    joules = {name: _joules_above(stretch, idle_w) for name, stretch in work.items()}
    verify = {w: joules[f"verify:{w}"] for w in found.costs.verify_s}
    drafts = {name: joules[f"draft:{name}"] for name in found.costs.draft_s}
    told = {warning for m in (before, after, *windows) for warning in m.warnings}
    if any(value < 0.0 for value in joules.values()):
        told.add("some work drew less than rest: other programs ran, or the meter is too coarse")
    return replace(
        found,
        costs=replace(found.costs, energy=Energy(idle_w, verify, drafts)),
        idle_w=idle_w,
        idle_drift_w=rests[1] - rests[0],
        energy_from=f"{before.budget.source} ({before.budget.trust})",
        scope=before.budget.scope,
        warnings=tuple(sorted(told)),
        method=before.budget.method,
    )


def _joules_above(stretch: _Stretches, idle_w: float) -> float:
    """Joules of one unit of work above rest; negative when less was drawn than at rest."""
    joules = sum((m.energy_j or 0.0) - idle_w * m.seconds for m in stretch.measured)
    return joules / sum(stretch.done)


def measured_profile(found: Calibration, base: Device, cost: ModelCost, unit: str | None = None) -> Device:
    """`base` with what was measured in place: bandwidth, arithmetic and launch of a unit, and its power.

    `cost` is what a forward of the target moves and computes; the rates are what explains the measured
    times with it. Without a meter all figures of power stay as they were.
    """
    name = unit or base.decode_unit
    fitted = _fit_time(found.costs.verify_s, cost, 1e-3 * base.units[name].launch_ms)
    units = {**base.units, name: _timed(found, base.units[name], fitted)}
    memory = _memory(found, base.memory, max(found.bandwidth_gb_s, fitted.bytes_s / 1e9))
    device = replace(base, memory=memory, units=units)
    return device if found.idle_w is None else _with_power(found, device, cost, name)


def _timed(found: Calibration, unit: Unit, fitted: _Roofline) -> Unit:
    """A unit with its measured rates; a peak that was passed is no peak."""
    gops = fitted.ops_s / 1e9
    reached = _figure(gops, f"{found.source}: the sustained rate; the peak is higher")
    rates = {
        precision: Rate(
            peak_gops=rate.peak_gops if rate.peak_gops >= gops else reached,
            sustained_gops=_figure(gops, f"{found.source}: {fitted.how}"),
        )
        for precision, rate in unit.rates.items()
    }
    bandwidth = _figure(fitted.bytes_s / 1e9, f"{found.source}: bytes of the graph over time at width 1")
    return replace(unit, bandwidth_gb_s=bandwidth, rates=rates)


def _memory(found: Calibration, memory: Memory, best_gb_s: float) -> Memory:
    reached = _figure(best_gb_s, f"{found.source}: what was reached; the peak is higher")
    size = (
        None if found.memory_gb is None else _figure(found.memory_gb, f"{found.source}: the system's figure")
    )
    return Memory(
        capacity_gb=memory.capacity_gb if size is None else size,
        peak_gb_s=memory.peak_gb_s if memory.peak_gb_s >= best_gb_s else reached,
        measured_gb_s=_figure(best_gb_s, f"{found.source}: a lower bound"),
    )


def _with_power(found: Calibration, device: Device, cost: ModelCost, name: str) -> Device:
    """The device with its measured power, and a meter where the profile had none."""
    assert found.idle_w is not None
    busy_w, op_j = _fit_energy(found.costs, cost, 1e-12 * device.power.dram_pj_per_byte)
    source = f"{found.source}: {found.energy_from}"
    idle = _figure(found.idle_w, f"{source}, at rest")
    unit = replace(device.units[name], busy_w=_figure(busy_w, source), pj_per_op=_figure(1e12 * op_j, source))
    sensors = device.sensors
    if sensors.meter == "none" and found.scope in _METERS:
        assumed = Sense(Figure(0.01, assumed=True), Figure(0.05, assumed=True), Figure(0.5, assumed=True))
        sensors = replace(sensors, meter=_METERS[found.scope], power=assumed)
    return replace(
        device,
        power=replace(device.power, idle_w=idle, static_w=idle),
        units={**device.units, name: unit},
        sensors=sensors,
    )


def _figure(value: float, source: str) -> Figure:
    """Four digits: more were not measured."""
    return Figure(float(f"{value:.4g}"), source)


@dataclass(frozen=True)
class _Roofline:
    bytes_s: float
    ops_s: float
    how: str


def _fit_time(verify_s: Mapping[int, float], cost: ModelCost, launch_s: float) -> _Roofline:
    """Bandwidth from the narrowest forward, arithmetic from the widths where time grows.

    While time does not grow, arithmetic hides behind memory and only its lower bound is known.
    """
    widths = sorted(verify_s)
    narrow, wide = widths[0], widths[-1]
    launch_s = min(launch_s, 0.5 * verify_s[narrow])
    bytes_s = cost.work(narrow, PREFIX).bytes / (verify_s[narrow] - launch_s)
    bound = verify_s[wide] > 1.25 * verify_s[narrow]
    how = f"operations over time at width {wide}" + ("" if bound else "; a lower bound, memory was slower")
    return _Roofline(bytes_s, cost.ops * wide / (verify_s[wide] - launch_s), how)


def _fit_energy(costs: Costs, cost: ModelCost, byte_j: float) -> tuple[float, float]:
    """(busy power, joules an operation) by least squares over widths; neither is below 0.

    The energy of a byte is not told apart from busy power by widths, so the profile's is taken.
    """
    assert costs.energy is not None
    widths = sorted(costs.energy.verify_j)
    joules = [max(0.0, costs.energy.verify_j[w] - byte_j * cost.work(w, PREFIX).bytes) for w in widths]
    rows = np.array([[costs.verify_s[w], cost.ops * w] for w in widths])
    return _non_negative(rows, np.array(joules))


def _non_negative(rows: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """The best pair of coefficients that are not negative."""
    scale = np.abs(rows).max(axis=0)
    both = np.linalg.lstsq(rows / scale, values, rcond=None)[0] / scale
    if (both >= 0.0).all():
        return float(both[0]), float(both[1])
    alone = [max(0.0, float(column @ values / (column @ column))) for column in rows.T]
    errors = [float(((rows[:, i] * alone[i] - values) ** 2).sum()) for i in range(2)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
