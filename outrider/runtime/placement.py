"""Where the roles of a pair should run on a device, how they should draft, and what was refused and why.

`place` tries every graph that a role could have on every unit that could run it, alone and in pairs, prices each way
to draft (none, before each verify, beside it) by the planner's own formulas, and keeps what is best for the
objective among what fits in memory. Nothing is opened or run: seconds and joules are of `runtime.placement_costs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from outrider.contracts import Objective
from outrider.errors import UsageError
from outrider.runtime.memory_budget import PROCESS_MB, MemoryLimit, MemoryPlan, tokenizer_mb
from outrider.runtime.placement_costs import (
    Basis,
    Candidate,
    Drafting,
    Seat,
    draft_ceiling,
    drafting_ways,
    seat_basis,
    seat_ms,
)
from outrider.runtime.role_memory import CHUNK, SHORT_CHUNK, RoleMemory
from outrider.targets.core_sets import core_set, cores_of, unit_kind
from outrider.targets.device import Device

__all__ = ["PROCESS_MB", "DevicePlan", "MemoryLimit", "Option", "Refusal", "Request", "RolePlan", "place"]

PREFILL = 64  # the chunk of a prompt that static graphs are compiled for
MOST_SPLITS = 8  # ways to share out the cores of a unit that are tried


@dataclass(frozen=True)
class Request:
    """What is to be placed, where, and under which wishes.

    `candidates` are the graphs that there are, or could be made. `cores` are the usable ones of the unit cpu (None:
    not known, so that its cores are not shared out). `drafting` None leaves the way to the costs.
    """

    device: Device
    candidates: tuple[Candidate, ...]
    limit: MemoryLimit
    objective: Literal["speed", "energy"] = "speed"
    acceptance: float = 0.7
    acceptance_from: str = "assumed"
    cores: tuple[int, ...] | None = None
    target_unit: str | None = None
    draft_unit: str | None = None
    drafting: Drafting | None = None
    context: int | None = None  # a context that the target must hold

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.objective not in ("speed", "energy"):
            raise UsageError(f"objective {self.objective!r} is not known; known: speed, energy")
        if not 0.0 <= self.acceptance <= 1.0:
            raise UsageError(f"acceptance is {self.acceptance}; it is a share, from 0 to 1")
        if self.drafting not in (None, "none", "serial", "overlapped"):
            raise UsageError(f"drafting is {self.drafting!r}; known: none, serial, overlapped")


@dataclass(frozen=True)
class Refusal:
    """What cannot be, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class RolePlan:
    """Where and how one role runs, and what it takes. `step_ms` is a forward of one token; MB are estimates."""

    role: str
    unit: str
    backend: str
    profile: str
    precision: str
    threads: int | None
    context: int
    kv_type: str
    widths: tuple[int, ...] | None
    weights_mb: float
    kv_mb: float
    scratch_mb: float
    step_ms: float
    basis: Basis

    @property
    def memory_mb(self) -> float:
        """All of it."""
        return self.weights_mb + self.kv_mb + self.scratch_mb


@dataclass(frozen=True)
class Option:
    """One way to decode: the roles in their places, one drafting mode, and what it promises.

    `memory_mb` is the most that is held at any time, `chunk` the most tokens of a prompt that are run at once.
    """

    target: RolePlan
    draft: RolePlan | None
    mode: Drafting
    k: int
    tokens_s: float
    token_j: float
    memory_mb: float
    basis: Basis  # of the seconds
    energy_basis: Basis
    chunk: int = CHUNK

    @property
    def where(self) -> str:
        """The places, in words."""
        target = f"target on {self.target.unit} by {self.target.backend} ({self.target.precision})"
        if self.draft is None:
            return f"{target}, no draft model"
        return f"{target}, draft on {self.draft.unit} by {self.draft.backend} ({self.draft.precision})"


@dataclass(frozen=True)
class DevicePlan:
    """The best option, what else there was, and what was refused.

    `k_ceiling` is the largest draft that would pay at the acceptance of easy text; `options` has the chosen one
    first, the others by what the objective wants.
    """

    device: str
    objective: str
    limit: MemoryLimit
    acceptance: float
    acceptance_from: str
    chosen: Option
    k_ceiling: int
    options: tuple[Option, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...] = field(default=())


class _Tried(NamedTuple):
    """An option, the seats that it is made of, and all that it takes."""

    option: Option
    target: Seat
    draft: Seat | None
    memory: MemoryPlan


def place(request: Request) -> DevicePlan:
    """The plan that serves the objective best within the memory limit.

    Raises UsageError where a wish or the limit leaves none, with the smallest plan that would work.
    """
    _check_units(request)
    seats, refused = _seats(request)
    tried, more = _options(request, seats)
    refused += more
    if not tried:
        raise UsageError(_nothing(request, _what_is_missing(request, seats), refused))
    best, *others = sorted(tried, key=lambda found: _cost(found.option, request.objective))
    ceiling = _ceiling(request, best)
    chosen = _with_widths(best, ceiling)
    return DevicePlan(
        request.device.slug,
        request.objective,
        request.limit,
        request.acceptance,
        request.acceptance_from,
        chosen,
        ceiling,
        (chosen, *(found.option for found in others)),
        tuple(refused),
        _notes(request, chosen),
    )


def _cost(option: Option, objective: str) -> float:
    """What the objective wants least of; drafts must promise the planner's margin, and again to overlap."""
    cost = option.token_j if objective == "energy" else 1.0 / option.tokens_s
    return cost * Objective().margin ** ("none", "serial", "overlapped").index(option.mode)


def _what_is_missing(request: Request, seats: Mapping[str, Sequence[Seat]]) -> str:
    slug = request.device.slug
    if not seats["target"]:
        return f"no graph of the target can run on {slug}"
    if request.drafting not in (None, "none") and not seats["draft"]:
        return f"drafting is {request.drafting!r}, but no graph of a draft model can run on {slug}"
    if request.drafting == "overlapped":
        return f"drafting is 'overlapped', but no two units of {slug} have room for one role each"
    return f"nothing fits into the {request.limit.mb:.0f} MB {request.limit.how}"


def _check_units(request: Request) -> None:
    """Raise UsageError for a unit, or a core of it, that the device has not, and for cores that two roles claim."""
    wishes = {"target_unit": request.target_unit, "draft_unit": request.draft_unit}
    claimed: set[int] = set()
    for name, unit in wishes.items():
        kind = unit_kind(unit or "")
        if unit is not None and kind not in request.device.units:
            why = f"{name} is {unit!r}; {request.device.slug} has {', '.join(request.device.units)}"
            raise UsageError(_nothing(request, why))
        if unit is None or ":" not in unit:
            continue
        cores = _cores_named(request, unit)
        if shared := claimed & set(cores):
            why = f"target_unit and draft_unit share core {min(shared)}, and a core set belongs to one role"
            raise UsageError(_nothing(request, why))
        claimed |= set(cores)
    both = request.device.units.get(request.target_unit or "")
    if request.target_unit == request.draft_unit and both is not None and both.exclusive:
        why = f"{request.target_unit} of {request.device.slug} holds one role at a time, and both were put there"
        raise UsageError(_nothing(request, why))


def _cores_named(request: Request, unit: str) -> tuple[int, ...]:
    if request.cores is None:
        why = f"unit {unit!r}: the profile of {request.device.slug} does not say how many alike cores it has"
        raise UsageError(_nothing(request, why))
    try:
        return cores_of(unit, request.cores) or ()
    except UsageError as error:
        raise UsageError(_nothing(request, str(error))) from None


def _seats(request: Request) -> tuple[dict[str, list[Seat]], list[Refusal]]:
    """The candidates of each role on units that have a backend for them."""
    seats: dict[str, list[Seat]] = {"target": [], "draft": []}
    refused: dict[str, str] = {}
    for candidate in request.candidates:
        why = _why_not(request, candidate)
        if why is not None:
            refused.setdefault(candidate.name, why)  # of the longest context
            continue
        wish = request.target_unit if candidate.role == "target" else request.draft_unit
        unit = wish if wish is not None and ":" in wish else candidate.unit
        seats[candidate.role].append(_seat(request, candidate, unit))
    seated = {seat.candidate.name for of_role in seats.values() for seat in of_role}  # with another context
    return seats, [Refusal(what, why) for what, why in refused.items() if what not in seated]


def _why_not(request: Request, candidate: Candidate) -> str | None:
    """Why a graph has no place on this device under these wishes."""
    slug, wish = (
        request.device.slug,
        request.target_unit if candidate.role == "target" else request.draft_unit,
    )
    unit = request.device.units.get(candidate.unit)
    if unit is None:
        return f"{slug} has no {candidate.unit}, only {', '.join(request.device.units)}"
    if candidate.backend not in unit.backends:
        there = f"only {', '.join(unit.backends)}" if unit.backends else "and no other backend"
        return f"the profile of {slug} has no {candidate.backend} on its {candidate.unit}, {there}"
    if wish is not None and unit_kind(wish) != candidate.unit:
        return f"the unit {wish!r} was asked for"
    if request.context is not None and candidate.role == "target" and candidate.context < request.context:
        return f"it holds {candidate.context} tokens, {request.context} were asked for"
    return None


def _seat(request: Request, candidate: Candidate, unit: str) -> Seat:
    """A candidate on a unit, or on some of its cores."""
    cores = request.cores if candidate.unit == "cpu" else None
    if cores is None or ":" not in unit:
        return Seat(candidate, unit, 1.0, len(cores) if cores else None)
    named = cores_of(unit, cores) or cores
    return Seat(candidate, unit, len(named) / len(cores), len(named))


def _options(request: Request, seats: Mapping[str, Sequence[Seat]]) -> tuple[list[_Tried], list[Refusal]]:
    """Everything that fits: with the longest context of the target that does, and then of the draft."""
    fitting: list[_Tried] = []
    refused: dict[str, str] = {}
    too_large: dict[str, str] = {}
    for target in _longest_first(seats["target"]):
        if fitting and target.candidate.context < fitting[0].option.target.context:
            break
        for found in _of_target(request, target, seats["draft"], refused):
            why = request.limit.what_refuses(found.memory)
            if why is None:
                fitting.append(found)
            else:
                need = f"it takes {found.memory.peak_mb:.0f} MB with {target.candidate.context} tokens"
                too_large[found.option.where] = f"{need}; the limit is {why}"
    there = {found.option.where for found in fitting}
    refused |= {where: why for where, why in too_large.items() if where not in there}
    return _longest_drafts(fitting), [Refusal(what, why) for what, why in refused.items()]


def _of_target(
    request: Request, target: Seat, drafts: Sequence[Seat], refused: dict[str, str]
) -> Iterator[_Tried]:
    """The target alone, and with every draft that remembers no more than it does."""
    if request.drafting in (None, "none"):
        yield from _priced(request, target, None)
    for draft in _longest_first(drafts):
        if request.drafting != "none" and draft.candidate.context <= target.candidate.context:
            yield from _together(request, target, draft, refused)


def _longest_first(seats: Iterable[Seat]) -> list[Seat]:
    return sorted(seats, key=lambda seat: -seat.candidate.context)


def _longest_drafts(fitting: Sequence[_Tried]) -> list[_Tried]:
    """Of options that differ in the draft's context only, the one that remembers most: the first."""
    kept: dict[tuple[object, ...], _Tried] = {}
    for found in fitting:
        kept.setdefault((found.option.where, found.option.target.profile, found.option.mode), found)
    return list(kept.values())


def _together(request: Request, target: Seat, draft: Seat, refused: dict[str, str]) -> Iterator[_Tried]:
    """A pair on the units of its graphs, and where that is one cpu, on every way to share out its cores."""
    if target.unit == draft.unit and request.device.units[unit_kind(target.unit)].exclusive:
        refused[f"both roles on {target.unit}"] = "it holds one role at a time"
        return
    one_cpu = unit_kind(target.unit) == unit_kind(draft.unit) == "cpu"
    named = [":" in seat.unit for seat in (target, draft)]
    if one_cpu and sum(named) == 1 and "cpu" not in (request.target_unit, request.draft_unit):
        yield from _given_the_rest(request, target, draft, refused)
        return
    yield from _priced(request, target, draft)
    if one_cpu and not any(named) and "cpu" not in (request.target_unit, request.draft_unit):
        for ours, theirs in _splits(request.cores or ()):
            yield from _priced(request, _on(request, target, ours), _on(request, draft, theirs))


def _given_the_rest(request: Request, target: Seat, draft: Seat, refused: dict[str, str]) -> Iterator[_Tried]:
    """One role was given cores by name: the other one gets what is left."""
    cores = request.cores or ()
    named = cores_of(target.unit if ":" in target.unit else draft.unit, cores) or ()
    left = tuple(core for core in cores if core not in named)
    if not left:
        refused["target and draft on core sets"] = "one role was given all cores"
        return
    if ":" in target.unit:
        draft = _on(request, draft, left)
    else:
        target = _on(request, target, left)
    yield from _priced(request, target, draft)


def _on(request: Request, seat: Seat, cores: Sequence[int]) -> Seat:
    return _seat(request, seat.candidate, core_set(cores))


def _splits(cores: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """(target's, draft's) cores: the draft gets the first ones, from one core to half of them."""
    for count in range(1, min(len(cores) // 2, MOST_SPLITS) + 1):
        yield cores[count:], cores[:count]


def _priced(request: Request, target: Seat, draft: Seat | None) -> Iterator[_Tried]:
    """The ways to draft with the roles in these places, each at its best k."""
    memory = _memory(request, target.candidate, None if draft is None else draft.candidate)
    ours = _role_plan(request.device, target, memory.target)
    theirs = (
        None if draft is None or memory.draft is None else _role_plan(request.device, draft, memory.draft)
    )
    for way in drafting_ways(request.device, target, draft, request.objective, request.acceptance):
        if request.drafting in (None, way.mode):
            promise = (
                way.mode,
                way.k,
                way.tokens_s,
                way.token_j,
                memory.peak_mb,
                way.basis,
                way.energy_basis,
            )
            yield _Tried(Option(ours, theirs, *promise, memory.chunk), target, draft, memory)


def _memory(request: Request, target: Candidate, draft: Candidate | None) -> MemoryPlan:
    """What a pair takes in all, with prompts in shorter chunks where it does not fit otherwise."""
    whole = _memory_plan(target, draft, CHUNK)
    if request.limit.what_refuses(whole) is None:
        return whole
    short = _memory_plan(target, draft, SHORT_CHUNK)
    return short if short.peak_mb < whole.peak_mb else whole


def _memory_plan(target: Candidate, draft: Candidate | None, chunk: int) -> MemoryPlan:
    tokenizer = tokenizer_mb(target.vocab_size)
    theirs = None if draft is None else draft.memory(chunk)
    return MemoryPlan(PROCESS_MB, tokenizer, target.memory(chunk), theirs, chunk)


def _role_plan(device: Device, seat: Seat, memory: RoleMemory) -> RolePlan:
    candidate = seat.candidate
    return RolePlan(
        candidate.role,
        seat.unit,
        candidate.backend,
        candidate.profile,
        candidate.recipe,
        seat.threads,
        candidate.context,
        candidate.kv_type,
        candidate.widths,
        memory.weights_mb,
        memory.kv_mb,
        memory.scratch_mb,
        seat_ms(device, seat),
        seat_basis(device, seat)[0],
    )


def _ceiling(request: Request, best: _Tried) -> int:
    """The largest k that pays where text is easy, in the mode that was chosen."""
    if best.draft is None:
        return 0
    mode = best.option.mode
    return max(best.option.k, draft_ceiling(request.device, best.target, best.draft, request.objective, mode))


def _with_widths(best: _Tried, ceiling: int) -> Option:
    """The widths that are worth compiling for static graphs that are still to be made; others stay as they are."""
    target = best.option.target
    if target.widths is None or best.target.candidate.made:
        return best.option
    widths = {1, PREFILL, ceiling + 1, *(k + 1 for k in (1, 2, 4, 8) if k < ceiling)}
    return replace(best.option, target=replace(target, widths=tuple(sorted(widths))))


def _notes(request: Request, chosen: Option) -> tuple[str, ...]:
    notes = []
    if request.cores is None and "cpu" in request.device.units:
        notes.append(f"the cores of {request.device.slug} differ or are not known, and were not shared out")
    if chosen.target.context < max(c.context for c in request.candidates if c.role == "target"):
        notes.append(f"the context is {chosen.target.context} tokens only, so that it fits")
    if chosen.chunk < CHUNK:
        notes.append(f"prompts are read {chosen.chunk} tokens at a time, so that it fits")
    if chosen.draft is None and any(c.role == "draft" for c in request.candidates):
        notes.append("the draft model stays out: it does not pay or does not fit; n-gram lookup still drafts")
    return tuple(notes)


def _nothing(request: Request, why: str, refused: Sequence[Refusal] = ()) -> str:
    """What is wrong, and the smallest plan that would work without the wishes that stand in its way."""
    lines = [why]
    lines += [f"  {refusal.what}: {refusal.why}" for refusal in refused]
    return "\n".join([*lines, f"the smallest plan that would work: {_smallest(request)}"])


def _smallest(request: Request) -> str:
    """The target alone, where it takes least; with a change to the profile where no backend would run it."""
    free = replace(request, target_unit=None, draft_unit=None, drafting="none", context=None)
    seats, _ = _seats(free)
    targets = [seat.candidate for seat in seats["target"]]
    extra = ""
    if not targets:
        targets = [c for c in request.candidates if c.role == "target"]
        if not targets:
            return "none, for there is no graph of a target"
    least = min(targets, key=lambda c: _memory_plan(c, None, SHORT_CHUNK).peak_mb)
    if not seats["target"]:
        extra = f", once units.{least.unit}.backends of the profile has {least.backend}"
    return (
        f"the target on {least.unit} by {least.backend} ({least.recipe}), {least.context} tokens, no draft model, "
        f"{_memory_plan(least, None, SHORT_CHUNK).peak_mb:.0f} MB{extra}"
    )
