"""The scenarios that the governor is judged by; fixed before it was tuned.

Six devices, three ambient temperatures and four courses of acceptance (low, medium, high, switching), each
with a goal: the most tokens within a temperature limit, within a power cap, the least energy, the least product
of energy and time. Every scenario runs on a specimen that differs from its profile by up to 15 % (see
`simulated.perturbed`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.errors import UsageError
from outrider.targets.device import Device, load_device
from outrider.targets.scenario import Event, Scenario
from outrider.targets.trace_model import TraceText

__all__ = ["DEVICES", "Courses", "courses", "days", "phone_twenty_minutes", "suite"]

DEVICES = (
    "raspberry-pi-5",
    "jetson-orin-nano",
    "snapdragon-8-gen3",
    "iphone-16-pro",
    "tensor-g4",
    "mac-m2",
)
AMBIENTS_C = (15.0, 25.0, 38.0)
COURSES = ("low", "medium", "high", "switching")
GOALS = ("limit", "cap", "energy", "balanced")
MINUTES = (10, 14, 20)
SWITCH_S = 150.0  # of a switching course: how long one kind of text goes on

_CAPS_W = {
    "raspberry-pi-5": 4.8,
    "jetson-orin-nano": 9.5,
    "snapdragon-8-gen3": 4.5,
    "tensor-g4": 4.2,
    "mac-m2": 8.5,
}  # about 70 % of what plain decoding draws; a device without a meter has none
_LIMITS_C = {"raspberry-pi-5": 70.0, "jetson-orin-nano": 66.0, "mac-m2": 66.0}  # of the die, at 15 and 25 °C
_HOT_LIMITS_C = {"raspberry-pi-5": 78.0, "jetson-orin-nano": 75.0, "mac-m2": 75.0}  # the same at 38 °C
_SKIN_C = {15.0: 39.0, 25.0: 42.0, 38.0: 49.0}  # of a phone's case; at 38 °C an idle phone is near 44 °C


@dataclass(frozen=True)
class Courses:
    """Which categories of an acceptance trace stand for low, medium and high acceptance."""

    low: str
    medium: str
    high: str


def courses(texts: Sequence[TraceText], k: int = 4) -> Courses:
    """The categories with the fewest, the median and the most tokens a round of k, by their best drafter."""
    gain: dict[str, list[float]] = {}
    for text in texts:
        per_round = [_mean(1 + min(k, a) for a in run.accepted) for run in text.runs.values()]
        gain.setdefault(text.category, []).append(max(per_round))
    ranked = sorted(gain, key=lambda name: (_mean(gain[name]), name))
    if not ranked:
        raise UsageError("the acceptance trace holds no text")
    return Courses(ranked[0], ranked[len(ranked) // 2], ranked[-1])


def _mean(values: Iterator[float] | Sequence[float]) -> float:
    held = list(values)
    return sum(held) / len(held)


def suite(texts: Sequence[TraceText]) -> list[Scenario]:
    """All 72 scenarios, in a fixed order with fixed seeds."""
    kinds = courses(texts)
    found = []
    for d, device in enumerate(DEVICES):
        for a, ambient in enumerate(AMBIENTS_C):
            for c, course in enumerate(COURSES):
                goal = GOALS[(d + a + c) % len(GOALS)]
                minutes = MINUTES[(d + 2 * a + c) % len(MINUTES)]
                found.append(_scenario(device, ambient, course, goal, minutes, kinds))
    return found


def _scenario(
    device: str, ambient_c: float, course: str, goal: str, minutes: int, kinds: Courses
) -> Scenario:
    cap = _CAPS_W.get(device) if goal == "cap" else None
    goal = "limit" if goal == "cap" and cap is None else goal
    name = f"{device}/{ambient_c:g}C/{course}/{goal}"
    duration = 60.0 * minutes
    first, events = _course(course, duration, kinds)
    profile = load_device(device)
    return Scenario(
        name=name,
        device=device,
        duration_s=duration,
        ambient_c=ambient_c,
        seed=zlib.crc32(name.encode()),
        category=first,
        objective=goal if goal in ("energy", "balanced") else "latency",
        power_cap_w=cap,
        temp_limit_c=_die_limit(profile, ambient_c, goal),
        skin_limit_c=_skin_limit(profile, ambient_c),
        events=events,
    )


def _course(course: str, duration_s: float, kinds: Courses) -> tuple[str, tuple[Event, ...]]:
    """The category to begin with, and the switches."""
    if course != "switching":
        return str(getattr(kinds, course)), ()
    order = (kinds.high, kinds.low, kinds.medium)
    times = range(1, int(duration_s // SWITCH_S))
    return order[0], tuple(Event(SWITCH_S * i, category=order[i % len(order)]) for i in times)


def _die_limit(profile: Device, ambient_c: float, goal: str) -> float:
    table = _LIMITS_C if ambient_c < 30 else _HOT_LIMITS_C
    return table[profile.slug] if goal == "limit" and profile.slug in table else float(profile.temp_limit_c)


def _skin_limit(profile: Device, ambient_c: float) -> float | None:
    return None if profile.skin_limit_c is None else _SKIN_C[ambient_c]


def phone_twenty_minutes(texts: Sequence[TraceText]) -> Scenario:
    """A phone at 30 °C that decodes for twenty minutes: what heat costs, with and without a governor."""
    return Scenario(
        name="phone-20-minutes",
        device="snapdragon-8-gen3",
        duration_s=1200.0,
        ambient_c=30.0,
        seed=20,
        category=courses(texts).medium,
        temp_limit_c=95.0,
        skin_limit_c=43.0,
    )


def days(texts: Sequence[TraceText]) -> list[Scenario]:
    """Scripted days, compressed: sun and shade, a charger, other apps, and pauses."""
    kinds = courses(texts)
    phone = (
        Event(0.0, ask=True, category=kinds.medium),
        Event(300.0, ask=False),
        Event(420.0, ask=True, category=kinds.high, load_w=0.8, bandwidth_taken=0.15),
        Event(720.0, load_w=0.0, bandwidth_taken=0.0, ambient_c=33.0, category=kinds.low),
        Event(1020.0, ambient_c=24.0, charge_w=10.0, category=kinds.medium),
        Event(1320.0, charge_w=0.0, memory_taken_mb=7000.0, memory_pressure_percent=8.0),
        Event(1500.0, memory_taken_mb=0.0, memory_pressure_percent=0.0, category=kinds.high),
    )
    board = (
        Event(0.0, category=kinds.low),
        Event(300.0, ambient_c=35.0, category=kinds.high),
        Event(600.0, load_w=1.0, bandwidth_taken=0.25),
        Event(900.0, load_w=0.0, bandwidth_taken=0.0, ambient_c=22.0, category=kinds.medium),
    )
    return [
        Scenario("day/phone", "snapdragon-8-gen3", 1800.0, 24.0, 31, temp_limit_c=95.0, skin_limit_c=43.0,
                 battery_percent=60.0, battery_floor_percent=20.0, events=phone),
        Scenario("day/iphone", "iphone-16-pro", 1800.0, 24.0, 32, objective="balanced", temp_limit_c=95.0,
                 skin_limit_c=43.0, battery_percent=60.0, events=phone),
        Scenario("day/board", "raspberry-pi-5", 1200.0, 22.0, 33, power_cap_w=5.5, temp_limit_c=80.0,
                 events=board),
    ]  # fmt: skip
