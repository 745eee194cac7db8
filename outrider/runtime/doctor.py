"""What this machine has, what each extra would add, and whether speculation can pay here for a bundle."""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.contracts import Costs, Graph, Reading, Sampling
from outrider.power.monitor import Monitor
from outrider.power.sensors import SOURCES
from outrider.power.sensors.system import Sensor
from outrider.power.state import State
from outrider.runtime.costs import verify_time
from outrider.runtime.leading import usual_request
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.planner import expected_tokens
from outrider.runtime.timing import cores, processor

if TYPE_CHECKING:
    from outrider.runtime.pipeline import Pipeline

__all__ = [
    "BreakEven",
    "Machine",
    "Telemetry",
    "break_even",
    "inspect_machine",
    "inspect_telemetry",
    "measure_costs",
    "measure_reading",
]

EXTRAS = {
    "export": ("torch", "turns checkpoints into bundles"),
    "executorch": ("executorch", "makes and runs .pte graphs"),
    "coreml": ("coremltools", "makes Core ML packages, runs them on macOS, and evaluates them elsewhere"),
    "qnn": ("onnxruntime_qnn", "makes and runs graphs for Hexagon NPUs, on x86-64 in an emulator"),
    "nvml": ("pynvml", "reads NVIDIA graphics cards"),
    "dev": ("pytest", "runs the tests"),
}
WIDTHS = (1, 2, 3, 5, 9)
PREFIX = 64  # tokens in the cache while costs are measured
SETTLE_S = (0.3, 1.5)  # a power is the mean between two reads; powermetrics prints once a second
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Machine:
    """What was found here; `None` where the system does not say."""

    system: str
    processor: str
    cores: int
    memory_gb: float | None
    onnxruntime: str
    providers: tuple[str, ...]
    extras: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Telemetry:
    """What the sensors say: every source with a value or the reason why not, and the state that follows.

    `absent` names the kinds of source that this machine does not have.
    """

    readings: tuple[Reading, ...]
    state: State
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class BreakEven:
    """The conditional acceptance above which drafting k tokens beats plain decoding; None = it never does."""

    drafter: str
    k: int
    round_ms: float
    acceptance: float | None


def inspect_machine() -> Machine:
    """Read what this machine is from the system and the installed libraries."""
    import onnxruntime

    return Machine(
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        processor=processor(),
        cores=cores(),
        memory_gb=_memory_gb(),
        onnxruntime=onnxruntime.__version__,
        providers=tuple(onnxruntime.get_available_providers()),
        extras={name: _extra(name) for name in EXTRAS},
    )


def _memory_gb() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, OSError, ValueError):
        return None


def _extra(name: str) -> str:
    module, adds = EXTRAS[name]
    if importlib.util.find_spec(module) is not None:
        return f"installed: {adds}"
    return f"absent: pip install 'outrider[{name}]' {adds}"


def inspect_telemetry(
    sensors: Sequence[Sensor],
    sleep: Callable[[float], object] = time.sleep,
    kinds: Sequence[Any] = SOURCES,
) -> Telemetry:
    """Read every sensor until each has said something, at most three times.

    Of `kinds`, those that none of the sensors is of are named as absent.
    """
    monitor = Monitor(sensors, interval_s=0.05)
    heard: list[Reading] = []
    monitor.listeners.append(heard.extend)
    state = monitor.poll()
    try:
        for pause_s in SETTLE_S[: 1 if len(heard) >= len(sensors) else 2]:
            sleep(pause_s)
            state = monitor.poll()
    finally:
        monitor.stop()
    absent = {_name(kind) for kind in kinds if not any(isinstance(sensor, kind) for sensor in sensors)}
    readings = sorted(monitor.readings(), key=lambda reading: (reading.value is None, reading.source))
    return Telemetry(tuple(readings), state, tuple(sorted(absent)))


def _name(kind: Any) -> str:
    return str(getattr(kind, "name", kind.__name__.lower()))


def measure_costs(pipeline: Pipeline, repeats: int = 5, progress: Progress | None = None) -> Costs:
    """Median seconds of a verify forward per width and of a draft step per drafter, on this machine.

    Everything is measured in turn, `repeats` times over, so that a change of speed touches all alike.
    """
    target = pipeline.engine.target
    prefix = min(PREFIX, target.max_context // 2)
    tokens = np.arange(PREFIX + max(WIDTHS)) % 97 + 1
    widest = min(target.max_context - prefix, max(target.widths or WIDTHS))
    widths = [width for width in WIDTHS if width <= widest]  # a width between compiled ones is padded
    verify: dict[int, list[float]] = {width: [] for width in widths}
    drafts: dict[str, list[float]] = {name: [] for name in pipeline.engine.drafters}
    verify_forward = partial(target.forward, logits=usual_request(target))
    pipeline.reset()
    _prefill(target, tokens[:prefix])
    for repeat in range(repeats + 1):
        for width in widths:
            verify[width].append(_seconds(partial(verify_forward, tokens[prefix : prefix + width])))
        for name, drafter in pipeline.engine.drafters.items():
            drafts[name].append(_draft_step(drafter, tokens[: prefix + 1 + repeat], repeat))
        if progress:
            progress("measuring", (repeat + 1) / (repeats + 1))
    pipeline.reset()
    return Costs(
        {width: statistics.median(seconds[1:]) for width, seconds in verify.items()},
        {name: statistics.median(seconds[1:]) for name, seconds in drafts.items()},
    )


def measure_reading(pipeline: Pipeline, repeats: int = 3) -> dict[str, float]:
    """Median seconds of a token that a drafter must read before its first draft, by drafter; lookup reads nothing."""
    found = {}
    for name, drafter in pipeline.engine.drafters.items():
        if not isinstance(drafter, ModelDrafter):
            continue
        tokens = np.arange(min(PREFIX, drafter.graph.max_context // 2) + 1) % 97 + 1
        read = []
        for _ in range(repeats + 1):
            drafter.reset()
            whole_s, step_s = (_draft_one(drafter, context.tolist()) for context in (tokens[:-1], tokens))
            read.append(max(0.0, whole_s - step_s) / max(1, len(tokens) - 2))
        found[name] = statistics.median(read[1:])
        drafter.reset()
    return found


def _draft_one(drafter: ModelDrafter, context: list[int]) -> float:
    return _seconds(partial(drafter.propose, context, 1, Sampling(), np.random.default_rng(0)))


def _prefill(graph: Graph, tokens: np.ndarray) -> None:
    widest = max(graph.widths) if graph.widths else len(tokens)
    for start in range(0, len(tokens), widest):
        chunk = tokens[start : start + widest]
        graph.forward(chunk, logits="none")
        graph.commit(range(len(chunk)))


def _draft_step(drafter: Any, context: np.ndarray, seed: int) -> float:
    """Seconds a drafted token, over a proposal of four."""
    rng = np.random.default_rng(seed)
    begin = time.perf_counter()
    proposal = drafter.propose(context.tolist(), 4, Sampling(), rng)
    return (time.perf_counter() - begin) / max(1, len(proposal))


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def break_even(costs: Costs, ks: Sequence[int] = (1, 2, 4, 8)) -> list[BreakEven]:
    """For every drafter and k: the acceptance at which a round of k drafts equals plain decoding."""
    plain_s = verify_time(costs.verify_s, 1)
    found = []
    for drafter, draft_s in costs.draft_s.items():
        for k in ks:
            round_s = k * draft_s + verify_time(costs.verify_s, k + 1)
            found.append(BreakEven(drafter, k, 1e3 * round_s, _acceptance_for(round_s / plain_s, k)))
    return found


def _acceptance_for(tokens: float, k: int) -> float | None:
    """The conditional acceptance at which a round of k drafts commits so many tokens, by bisection."""
    if tokens >= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens((middle,), k) >= tokens else (middle, high)
    return high
