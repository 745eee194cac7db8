"""The physics of a device that decodes: time, energy, heat and throttling, as free functions.

Time follows the roofline (Williams et al. 2009): a forward takes as long as its bytes or its operations,
whichever is slower. Dynamic energy falls with the square of the voltage, which follows the clock down to a
floor. Heat is a network of two poles, the die over the case over the air, which has a closed form while
power is constant. Throttling steps clocks down a ladder at trip points with hysteresis, one step a poll,
as Linux's step-wise thermal governor does.

Everything takes floats; the functions without a branch also take arrays of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Network",
    "Rates",
    "Temperatures",
    "ThrottlePolicy",
    "Trip",
    "Work",
    "battery_percent",
    "dynamic_power",
    "next_level",
    "propagator",
    "roofline_time",
    "steady_state",
    "step_temperatures",
    "stored_heat",
    "sustainable_power",
    "voltage_ratio",
]


@dataclass(frozen=True)
class Work:
    """What one forward moves and computes: bytes of weights and KV cache, and operations (2 a multiply-add)."""

    bytes: float
    ops: float


@dataclass(frozen=True)
class Rates:
    """One compute unit at its full clock: what it reaches, and what that takes.

    `busy_w` is drawn while the unit works, whatever it waits for; `j_byte` and `j_op` come on top.
    `voltage_floor` is the lowest voltage, as a share of that at the full clock.
    """

    bytes_s: float
    ops_s: float
    launch_s: float
    busy_w: float
    j_byte: float
    j_op: float
    voltage_floor: float = 0.6


def voltage_ratio(clock: float, floor: float) -> float:
    """Voltage at a clock, both as shares of the full ones: proportional, down to the floor."""
    return max(clock, floor)


def roofline_time(
    work: Work, rates: Rates, clock: float = 1.0, memory_clock: float = 1.0, bandwidth_share: float = 1.0
) -> float:
    """Seconds of a forward: the slower of memory and arithmetic, and what it takes to start it.

    Arithmetic slows with the unit's clock; memory with its own, and by what others leave of it.
    """
    memory_s = work.bytes / (rates.bytes_s * memory_clock * bandwidth_share)
    return max(memory_s, work.ops / (rates.ops_s * clock)) + rates.launch_s / clock


def dynamic_power(work: Work, seconds: float, rates: Rates, clock: float = 1.0) -> float:
    """Mean watts of a forward of so many seconds, above what the device draws anyway.

    Energy an operation goes with V², busy power with f V²; a byte of DRAM costs the same at any clock.
    """
    squared = voltage_ratio(clock, rates.voltage_floor) ** 2
    joules = work.bytes * rates.j_byte + work.ops * rates.j_op * squared
    return rates.busy_w * clock * squared + joules / seconds


@dataclass(frozen=True)
class Network:
    """Two poles: resistances in °C/W, times in s (τ = R C of each pole by itself).

    Of all power, `die_share` warms the die, the rest the case (display, radio, charging, converters).
    """

    die_c_per_w: float
    die_tau_s: float
    case_c_per_w: float
    case_tau_s: float
    die_share: float = 1.0

    @property
    def die_j_per_c(self) -> float:
        """Heat capacity of the die."""
        return self.die_tau_s / self.die_c_per_w

    @property
    def case_j_per_c(self) -> float:
        """Heat capacity of the case."""
        return self.case_tau_s / self.case_c_per_w


@dataclass(frozen=True)
class Temperatures:
    """Die and case, °C."""

    die_c: float
    case_c: float


def steady_state(network: Network, power_w: float, ambient_c: float, case_w: float = 0.0) -> Temperatures:
    """Where constant power ends up; `case_w` is heat that only the case gets (a charging battery)."""
    case = ambient_c + network.case_c_per_w * (power_w + case_w)
    return Temperatures(case + network.die_c_per_w * network.die_share * power_w, case)


def propagator(network: Network, seconds: float) -> tuple[float, float, float, float]:
    """The matrix exp(A t) by which (die, case), as distances from the steady state, shrink in t seconds.

    A = [[-a, a], [b, -(b + c)]] with a = 1/(R1 C1), b = 1/(R1 C2), c = 1/(R2 C2). Its eigenvalues are real,
    negative and distinct, so exp(A t) = (e^{xt} (A - y) - e^{yt} (A - x)) / (x - y).
    """
    a = 1.0 / network.die_tau_s
    b = 1.0 / (network.die_c_per_w * network.case_j_per_c)
    c = 1.0 / network.case_tau_s
    middle = -0.5 * (a + b + c)
    spread = math.sqrt(middle * middle - a * c)
    x, y = middle + spread, middle - spread
    ex, ey = math.exp(x * seconds), math.exp(y * seconds)
    scale, shift = (ex - ey) / (x - y), (x * ey - y * ex) / (x - y)
    return shift - a * scale, a * scale, b * scale, shift - (b + c) * scale


def step_temperatures(
    network: Network,
    now: Temperatures,
    power_w: float,
    ambient_c: float,
    seconds: float,
    case_w: float = 0.0,
) -> Temperatures:
    """The temperatures after `seconds` of constant power, exactly."""
    end = steady_state(network, power_w, ambient_c, case_w)
    dd, dc, cd, cc = propagator(network, seconds)
    die, case = now.die_c - end.die_c, now.case_c - end.case_c
    return Temperatures(end.die_c + dd * die + dc * case, end.case_c + cd * die + cc * case)


def stored_heat(network: Network, now: Temperatures, ambient_c: float) -> float:
    """Joules held above ambient."""
    return network.die_j_per_c * (now.die_c - ambient_c) + network.case_j_per_c * (now.case_c - ambient_c)


def sustainable_power(
    network: Network, ambient_c: float, die_limit_c: float | None, case_limit_c: float | None = None
) -> float:
    """The constant power at which the first of the limits is reached and none passed; inf without limits."""
    die_c_per_w = network.case_c_per_w + network.die_share * network.die_c_per_w
    bounds = [(die_limit_c, die_c_per_w), (case_limit_c, network.case_c_per_w)]
    return min(((limit - ambient_c) / r for limit, r in bounds if limit is not None), default=math.inf)


@dataclass(frozen=True)
class Trip:
    """From `at_c` on a sensor, clocks go down, to `level` at most; below `at_c - hysteresis_c` it lets go."""

    sensor: Literal["die", "skin"]
    at_c: float
    hysteresis_c: float
    level: int


@dataclass(frozen=True)
class ThrottlePolicy:
    """How the system protects itself: every `poll_s` it looks, and moves one level of the ladder at most.

    Level i runs at `clock_steps[i]` and `memory_steps[i]`, shares of the full clocks; level 0 is unthrottled.
    """

    poll_s: float
    clock_steps: tuple[float, ...]
    memory_steps: tuple[float, ...]
    trips: tuple[Trip, ...]


def next_level(policy: ThrottlePolicy, level: int, now: Temperatures) -> int:
    """The level after a poll: one deeper above a trip, one back when no trip holds it, else the same."""
    deepest_held = 0
    for trip in policy.trips:
        temperature = now.die_c if trip.sensor == "die" else now.case_c
        if temperature >= trip.at_c and level < trip.level:
            return level + 1
        if temperature > trip.at_c - trip.hysteresis_c:
            deepest_held = max(deepest_held, trip.level)
    return level - 1 if level > deepest_held else level


def battery_percent(stored_j: float, capacity_j: float) -> float:
    """How full a battery is, 0..100."""
    return 100.0 * min(1.0, max(0.0, stored_j / capacity_j))
