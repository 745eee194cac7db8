"""The memory cgroups of this process: what their limits leave, how often one was reached, how long their tasks wait.

Formats: Linux, admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst, accounting/psi.rst. Bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.power.sensors.sysfs import Figure, read_number, read_text, shown, try_text
from outrider.power.sensors.system import System

__all__ = ["Limit", "full_stalls", "memory_cgroups", "reached", "stalls", "tightest"]

_NO_LIMIT = 2**60
"""Version 1 shows no limit as the largest page-aligned number."""
_FILE_PAGES = ("active_file", "inactive_file")
_FULL = re.compile(r"^full avg10=([0-9.]+)", re.MULTILINE)
_FAILURES = ("memory.failcnt", "memory.memsw.failcnt")  # the second, with swap, stays 0 on Linux 6.18
_EVENT = re.compile(r"^(?:high|max) ([0-9]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Limit:
    """Bytes of one cgroup; `used` without the pages of files."""

    limit: float
    used: float

    @property
    def free(self) -> float:
        """What it leaves; below 0 where it is overdrawn."""
        return self.limit - self.used


def memory_cgroups(system: System) -> list[list[Path]]:
    """The process's own memory cgroup and all above it, of every hierarchy; version 2 has no controller in its name."""
    found = []
    for line in (read_text(system.path("/proc/self/cgroup")) or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if hierarchy == "0" and not controllers:
            bases = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            bases = ["/sys/fs/cgroup/memory"]
        else:
            continue
        found += [list(_upwards(system.path(base), own)) for base in bases]
    return found


def _upwards(base: Path, own: str) -> Iterator[Path]:
    """From the process's folder to the mount. In a container the path may be the host's, and not be there."""
    parts = [part for part in own.split("/") if part]
    if ".." in parts or not base.joinpath(*parts).is_dir():
        parts = []
    for depth in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:depth])


def tightest(system: System, cgroups: Sequence[Sequence[Path]]) -> Limit | None:
    """The limit that leaves least; None where nothing is limited."""
    limits = [limit for folders in cgroups for folder in folders if (limit := _limit(system, folder))]
    return min(limits, key=lambda limit: limit.free, default=None)


def _limit(system: System, folder: Path) -> Limit | None:
    """The limit of one cgroup and what counts against it.

    `memory.high` counts as a limit too: above it the kernel stalls the process to take memory back.
    """
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    found = [read_number(system, folder / name)[0] for name in names]
    limits = [limit for limit in found if limit is not None and limit < _NO_LIMIT]
    used = [read_number(system, folder / name)[0] for name in ("memory.current", "memory.usage_in_bytes")]
    in_use = next((value for value in used if value is not None), None)
    if not limits or in_use is None:
        return None
    stat = read_text(folder / "memory.stat") or ""
    listed = re.findall(r"^((?:total_)?(?:in)?active_file) ([0-9]+)", stat, re.MULTILINE)
    pages = {name: float(size) for name, size in listed}
    cache = sum(pages.get(f"total_{name}", pages.get(name, 0.0)) for name in _FILE_PAGES)
    return Limit(min(limits), max(in_use - cache, 0.0))


def reached(system: System, cgroups: Sequence[Sequence[Path]]) -> Figure:
    """How often the limits of this process's cgroups were reached since these were made, all levels together.

    Version 2 counts `high` and `max`, version 1 what failed at a limit. What other cgroups below the same limit did to
    limits of their own is not in it: above the process's own level only `memory.events.local` counts (Linux 5.2).
    """
    total, why = None, ""
    for folders in cgroups:
        for level, folder in enumerate(folders):
            count, reason = _events(system, folder, own=level == 0)
            if count is not None:
                total = (total or 0.0) + count
            why = why or reason
    if total is None:
        return None, why or "no cgroup of this process counts how often a limit of its memory was reached"
    return total, ""


def _events(system: System, folder: Path, *, own: bool) -> Figure:
    """Of one level; without a reason where it has no such file."""
    names = ("memory.events.local", "memory.events") if own else ("memory.events.local",)
    for path in (folder / name for name in names):
        if path.exists():
            text, reason = try_text(system, path)
            counts = _EVENT.findall(text or "")
            if text is not None and not counts:
                reason = f"{shown(system, path)} holds {text[:40]!r}, without counts of high and max"
            return (float(sum(map(int, counts))), "") if counts else (None, reason)
    failures = [read_number(system, path) for name in _FAILURES if (path := folder / name).exists()]
    known = [count for count, _ in failures if count is not None]
    return (sum(known), "") if known else (None, "".join(reason for _, reason in failures[:1]))


def stalls(system: System, cgroups: Sequence[Sequence[Path]]) -> Figure:
    """The share of the last 10 s (%) in which all tasks of the process's own cgroup waited for memory."""
    own = (folders[0] / "memory.pressure" for folders in cgroups)
    path = next((path for path in own if path.exists()), None)
    if path is None:
        return None, "the cgroup of this process has no memory.pressure (version 1, or Linux without psi=1)"
    text, reason = try_text(system, path)
    return (None, reason) if text is None else full_stalls(system, path, text)


def full_stalls(system: System, path: Path, text: str, scale: float = 1.0) -> Figure:
    """The share of time in a file of pressure, over 10 s (%)."""
    match = _FULL.search(text)
    if match is None:
        return None, f"{shown(system, path)} holds {text[:40]!r}, without a line of full stalls"
    return float(match[1]) * scale, ""
