"""What forwards of a graph take on a unit that has not run it, and what each way to draft then promises.

Seconds and joules follow `targets.physics` at the full clock and the rates of a device's profile: calibrated where
`outrider calibrate` measured them, modelled where anything else says them. Rounds are priced by `runtime.prices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from outrider.contracts import Costs, Energy, Limits, Objective
from outrider.runtime.prices import Acceptance, PlannedRound, Prices
from outrider.runtime.role_memory import CHUNK, RoleMemory
from outrider.targets.core_sets import unit_kind
from outrider.targets.device import Device, Figure
from outrider.targets.model_cost import ModelCost
from outrider.targets.physics import Rates, Work, dynamic_power, roofline_time
from outrider.targets.simulated import DRAM_SHARE

__all__ = [
    "K_MAX",
    "Basis",
    "Candidate",
    "Drafting",
    "Seat",
    "Way",
    "draft_ceiling",
    "drafting_ways",
    "round_costs",
    "seat_basis",
    "seat_ms",
]

Basis = Literal["modelled", "calibrated"]
Drafting = Literal["none", "serial", "overlapped"]

K_MAX = 15
LENGTH = 256  # tokens of context behind which a forward is typical
EASY_TEXT = 0.95  # acceptance of a text that the draft knows by heart, assumed: bounds what is compiled for
CALIBRATED = ("measured, outrider calibrate", "simulated, outrider calibrate")


@dataclass(frozen=True)
class Candidate:
    """A graph that a role has, or could be given: what runs it where, what it computes, and what it takes in memory.

    `made` says that the graph is there already, so that its widths are fixed. `measured` are seconds
    of this very graph on the whole unit (of verify forwards for a target, a step for a draft), where they are known.
    `short_scratch_mb` is the scratch where prompts are read in shorter chunks (None: it is the same).
    """

    role: str
    backend: str
    unit: str
    profile: str
    recipe: str
    widths: tuple[int, ...] | None
    context: int
    kv_type: str
    cost: ModelCost
    weights_mb: float
    kv_mb: float
    scratch_mb: float
    vocab_size: int = 0
    made: bool = False
    measured: tuple[tuple[int, float], ...] = ()  # (width, seconds)
    loading_mb: float = 0.0
    short_scratch_mb: float | None = None

    def memory(self, chunk: int = CHUNK) -> RoleMemory:
        """What it takes, with prompts in chunks of so many tokens."""
        short = chunk < CHUNK and self.short_scratch_mb is not None
        scratch = self.short_scratch_mb if short else self.scratch_mb
        return RoleMemory(self.context, self.weights_mb, self.kv_mb, scratch or 0.0, self.loading_mb)

    @property
    def memory_mb(self) -> float:
        """All of it, once its cache is full."""
        return self.memory().memory_mb

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.role} on {self.unit} by {self.backend} ({self.recipe}, {self.profile})"

    def work(self, width: int) -> Work:
        """A forward; a static cache is read whole, whatever it holds."""
        return self.cost.work(width, LENGTH if self.widths is None else self.context)


@dataclass(frozen=True)
class Seat:
    """A candidate on a unit, or on a `share` of its cores."""

    candidate: Candidate
    unit: str
    share: float = 1.0
    threads: int | None = None


class Way(NamedTuple):
    """One way to draft, at its best k."""

    mode: Drafting
    k: int
    tokens_s: float
    token_j: float
    basis: Basis
    energy_basis: Basis


def _precision(device: Device, candidate: Candidate) -> str | None:
    """The rates of a unit that a recipe computes at: those it is named after, else the unit's first."""
    rates = device.units[candidate.unit].rates
    return next((name for name in rates if candidate.recipe.startswith(name)), None)


def _rates(device: Device, seat: Seat) -> Rates:
    """A unit's rates; some of its cores reach and draw their share of them (assumed)."""
    rates = device.rates(seat.candidate.unit, _precision(device, seat.candidate))
    share = seat.share
    return replace(
        rates, bytes_s=share * rates.bytes_s, ops_s=share * rates.ops_s, busy_w=share * rates.busy_w
    )


def seat_basis(device: Device, seat: Seat) -> tuple[Basis, Basis]:
    """Whether seconds, and joules, come from a calibration of this device or from a model."""
    unit, power = device.units[seat.candidate.unit], device.power
    rate = unit.rates[_precision(device, seat.candidate) or next(iter(unit.rates))]
    whole = seat.share == 1.0
    time = (whole and bool(seat.candidate.measured)) or _calibrated(
        unit.bandwidth_gb_s, rate.sustained_gops, whole=whole
    )
    energy = _calibrated(unit.busy_w, unit.pj_per_op, power.static_w, whole=whole)
    return "calibrated" if time else "modelled", "calibrated" if energy else "modelled"


def _calibrated(*figures: Figure, whole: bool) -> bool:
    return whole and all(figure.source.startswith(CALIBRATED) for figure in figures)


def _seconds(
    device: Device, seat: Seat, width: int, bandwidth_share: float = 1.0, measured: bool = True
) -> float:
    known = dict(seat.candidate.measured) if measured and seat.share == 1.0 else {}
    if width in known:
        return known[width]
    return roofline_time(seat.candidate.work(width), _rates(device, seat), bandwidth_share=bandwidth_share)


def seat_ms(device: Device, seat: Seat) -> float:
    """Milliseconds of a forward of one token."""
    return 1e3 * _seconds(device, seat, _snapped(seat, 1))


def _joules(device: Device, seat: Seat, width: int) -> float:
    """Joules of a forward above what the device draws anyway."""
    seconds, work = _seconds(device, seat, width), seat.candidate.work(width)
    return seconds * dynamic_power(work, seconds, _rates(device, seat))


def _snapped(seat: Seat, width: int) -> int:
    """The width that a forward of so many tokens runs at."""
    return min((w for w in seat.candidate.widths or () if w >= width), default=width)


def round_costs(device: Device, target: Seat, draft: Seat | None) -> Costs:
    """Seconds and joules of verify forwards and draft steps, alone and (on units of their own) beside each other."""
    widths = sorted({_snapped(target, k + 1) for k in range(K_MAX + 1)})
    if target.candidate.measured and target.share == 1.0:
        widths = sorted(width for width, _ in target.candidate.measured)
    verify_s = {width: _seconds(device, target, width) for width in widths}
    verify_j = {width: _joules(device, target, width) for width in widths}
    static_w, idle_w = float(device.static_w), float(device.idle_w)
    if draft is None:
        return Costs(verify_s, energy=Energy(static_w, verify_j, {}, idle_w))
    one = _snapped(draft, 1)
    steps_s, steps_j = {"model": _seconds(device, draft, one)}, {"model": _joules(device, draft, one)}
    energy = Energy(static_w, verify_j, steps_j, idle_w)
    beside = _beside(device, target, draft, widths) if _apart(target, draft) else None
    return Costs(verify_s, steps_s, energy=energy, overlapped=beside)


def _apart(target: Seat, draft: Seat) -> bool:
    """Whether both can work at once; `runtime.load` has the same rule for graphs that are open."""
    if target.candidate.backend == draft.candidate.backend == "executorch":
        return False  # its programs take turns: they share one pool of threads
    kinds = unit_kind(target.unit), unit_kind(draft.unit)
    return kinds[0] != kinds[1] or (":" in target.unit and ":" in draft.unit)


def _beside(device: Device, target: Seat, draft: Seat, widths: list[int]) -> Costs:
    """The same while both work: what they ask of the memory beyond its bandwidth is cut by the same factor.

    The simulated `Machine` cuts it so too.
    """
    one = _snapped(draft, 1)
    draft_s, draft_bytes = _seconds(device, draft, one), draft.candidate.work(one).bytes
    fastest = max(1e9 * device.units[seat.candidate.unit].bandwidth_gb_s for seat in (target, draft))
    there = max(DRAM_SHARE * 1e9 * device.memory.peak_gb_s, fastest)
    verify_s, slowed_s = {}, draft_s
    for width in widths:
        alone_s = _seconds(device, target, width)
        asked = target.candidate.work(width).bytes / alone_s + draft_bytes / draft_s
        share = min(1.0, there / asked)
        slower = _slowdown(device, target, width, share)
        verify_s[width] = alone_s * slower
        slowed_s = max(slowed_s, draft_s * _slowdown(device, draft, one, share))
    return Costs(verify_s, {"model": slowed_s})


def _slowdown(device: Device, seat: Seat, width: int, share: float) -> float:
    """How much longer a forward takes with a share of its bandwidth."""
    alone = _seconds(device, seat, width, measured=False)
    return _seconds(device, seat, width, share, measured=False) / alone


def drafting_ways(
    device: Device, target: Seat, draft: Seat | None, objective: str, acceptance: float
) -> Iterator[Way]:
    """No draft where none is given; else drafting before each verify, and beside it where units allow that.

    Each at the k that serves the objective ("speed" or "energy") best.
    """
    costs = round_costs(device, target, draft)
    limits = Limits(K_MAX, target.candidate.widths)
    seats = [target, *([draft] if draft is not None else [])]
    bases = [seat_basis(device, seat) for seat in seats]
    time, energy = (_both([basis[i] for basis in bases]) for i in (0, 1))
    speed, joules = (Prices(costs, Objective(kind), limits, K_MAX) for kind in ("latency", "energy"))
    if draft is None:
        fast, cheap = (prices.round(None, 0, 1.0, *prices.fixed(None, 0)) for prices in (speed, joules))
        yield Way("none", 0, 1.0 / fast.cost, cheap.cost, time, energy)
        return
    for mode in ("serial", "overlapped"):
        if mode == "overlapped" and costs.overlapped is None:
            continue
        fast_rounds, cheap_rounds = (_rounds(prices, mode, acceptance) for prices in (speed, joules))
        best = min(cheap_rounds if objective == "energy" else fast_rounds, key=lambda planned: planned.cost)
        fast, cheap = fast_rounds[best.k - 1], cheap_rounds[best.k - 1]
        yield Way(
            "serial" if mode == "serial" else "overlapped", best.k, 1.0 / fast.cost, cheap.cost, time, energy
        )


def _both(bases: list[Basis]) -> Basis:
    """A figure is calibrated only if all that it is made of is."""
    return "calibrated" if set(bases) == {"calibrated"} else "modelled"


def _rounds(prices: Prices, mode: str, acceptance: float) -> list[PlannedRound]:
    """The rounds of k = 1, 2, ..."""
    seen = Acceptance({"model": (acceptance,)})
    return list((prices.overlapped if mode == "overlapped" else prices.drafted)("model", seen))


def draft_ceiling(device: Device, target: Seat, draft: Seat, objective: str, mode: Drafting) -> int:
    """The k that is best where text is easy: what is longer never pays."""
    if mode == "none":
        return 0
    ways = drafting_ways(device, target, draft, objective, EASY_TEXT)
    return next(way.k for way in ways if way.mode == mode)
