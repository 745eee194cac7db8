"""Core sets of this computer as units: `cpu:0`, `cpu:2-3`, `cpu:0,2-3`.

A library's own threads are pinned when it starts them. The thread that calls it works as one of them and is not,
so it is pinned for as long as a forward takes, and free again after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.errors import UsageError

__all__ = [
    "NICENESS",
    "be_nice",
    "big_cores",
    "core_set",
    "cores_of",
    "is_nice",
    "pinned",
    "refuse_shared",
    "unit_kind",
    "usable_cores",
]

NICENESS = 10
_BIG = 0.5  # of the strongest core's capacity: below that a core holds up those that wait for its share


def unit_kind(unit: str) -> str:
    """The kind of a unit: `cpu` for `cpu:2-3`."""
    return unit.partition(":")[0]


def cores_of(unit: str | None, cores: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """The cores of a core set, ascending; None for a unit without one. `cores` are another computer's.

    Raises UsageError for what is no core set, and for cores that are not there or that this process may not use.
    """
    kind, colon, text = (unit or "").partition(":")
    if not colon:
        return None
    if kind != "cpu":
        raise UsageError(f"unit {unit!r}: only the cpu has core sets, as cpu:0 or cpu:2-3")
    named = sorted({core for part in text.split(",") for core in _range(unit or "", part.strip())})
    usable = usable_cores() if cores is None else tuple(cores)
    absent = [core for core in named if core not in usable]
    if absent and cores is not None:
        raise UsageError(f"unit {unit!r}: there is no core {absent[0]}, only {core_set(usable)}")
    if absent:
        raise UsageError(
            f"unit {unit!r}: there is no core {absent[0]} that this process may use; it may use cpu:{_listed(usable)}"
        )
    return tuple(named)


def _range(unit: str, part: str) -> Sequence[int]:
    first, dash, last = part.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
        raise UsageError(
            f"unit {unit!r}: {part!r} is no core and no range; write cpu:0, cpu:2-3 or cpu:0,2-3"
        )
    if dash and int(last) - int(first) > 4096:
        raise UsageError(f"unit {unit!r}: {part!r} is more cores than any computer has")
    return range(int(first), int(last if dash else first) + 1)


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may use. Raises UsageError where the system cannot pin threads to cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("core sets need Linux: this system cannot pin a thread to a core; use the unit cpu")
    return tuple(sorted(os.sched_getaffinity(0)))


def big_cores(root: Path = Path("/"), cores: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """The cores that are at least half as strong as the strongest; None where all are, or where nothing tells.

    A forward waits for the last of its threads, so that one on a little core slows down those on big ones. Strength
    is Linux's `cpu_capacity` (Documentation/scheduler/sched-capacity.rst: 1024 is the strongest core of the machine at
    its full clock), below `root`. `cores` are those to choose from (default: all that this process may use).
    """
    usable = cores if cores is not None else usable_cores() if hasattr(os, "sched_setaffinity") else ()
    capacities = [_capacity(root, core) for core in usable]
    known = [capacity for capacity in capacities if capacity is not None]
    if not known or len(known) < len(capacities):
        return None
    big = tuple(core for core, capacity in zip(usable, known, strict=True) if capacity >= _BIG * max(known))
    return big if len(big) < len(usable) else None


def _capacity(root: Path, core: int) -> int | None:
    path = root / f"sys/devices/system/cpu/cpu{core}/cpu_capacity"
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def be_nice() -> None:
    """Let this thread, and all that it starts from now on, yield to what is in the foreground.

    At nice 10, and on Linux as a batch job where that is allowed, which never interrupts another that wakes up. Only
    root can take it back.
    Raises UsageError where the system has no priorities of this kind.
    """
    if not hasattr(os, "nice"):
        raise UsageError("nice needs a Unix: this system has no nice values; leave it out")
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    if hasattr(os, "sched_setscheduler"):
        with suppress(OSError):  # musl has no such call, a sandbox may deny it; the nice value holds
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def is_nice() -> bool:
    """Whether this thread was told to yield, by `be_nice` or from outside; what it starts is, too."""
    if not hasattr(os, "getpriority"):
        return False
    return os.getpriority(os.PRIO_PROCESS, 0) > 0


def core_set(cores: Sequence[int]) -> str:
    """The unit of these cores: `cpu:0-3,8`."""
    return f"cpu:{_listed(cores)}"


def _listed(cores: Sequence[int]) -> str:
    """Cores as a core set is written: 0-3,8."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def refuse_shared(target: str | None, draft: str | None) -> None:
    """Raise UsageError where two roles name core sets that share a core: each is one role's alone."""
    one, two = cores_of(target), cores_of(draft)
    shared = sorted(set(one or ()) & set(two or ()))
    if not shared:
        return
    left = [core for core in usable_cores() if core not in (one or ())]
    way_out = f"draft_unit 'cpu:{_listed(left)}' would do" if left else "give the target fewer cores"
    raise UsageError(
        f"target_unit {target!r} and draft_unit {draft!r} share core {shared[0]}, and a core set belongs to one role; "
        f"{way_out}, or name the unit cpu for both"
    )


@contextmanager
def pinned(cores: Sequence[int] | None) -> Iterator[None]:
    """Keep the calling thread on these cores while the block runs; None leaves it alone."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
