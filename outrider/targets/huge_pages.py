"""Move a session's weights onto huge pages: reading them is what a decode step waits for.

With 4 kB pages a step over hundreds of megabytes misses the TLB at every page; on a virtual machine that cost a
third of the memory bandwidth. Linux can collapse existing memory into 2 MB pages (`MADV_COLLAPSE`, since 6.1).
Elsewhere, or when the kernel refuses, nothing happens.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Region", "collapse", "new_memory_on_huge_pages", "parse_regions"]

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
PAGE = 2 << 20
SMALLEST = 4 * PAGE  # smaller regions are not worth a system call
RESIDENT = 0.9  # share of a region that must be in memory, so that empty caches are not filled

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Region:
    """A private anonymous mapping of this process, in bytes."""

    start: int
    end: int
    resident: int


def parse_regions(smaps: str) -> list[Region]:
    """The writable private mappings without a file, the heap too, from the text of `/proc/<pid>/smaps`."""
    regions: list[Region] = []
    bounds: tuple[int, int] | None = None
    for line in smaps.splitlines():
        fields = line.split()
        if fields and "-" in fields[0] and not fields[0].endswith(":"):
            low, _, high = fields[0].partition("-")
            anonymous = (
                fields[1].startswith("rw") and fields[1].endswith("p") and fields[5:] in ([], ["[heap]"])
            )
            bounds = (int(low, 16), int(high, 16)) if anonymous else None
        elif bounds and fields[:1] == ["Rss:"]:
            regions.append(Region(*bounds, 1024 * int(fields[1])))
    return regions


@contextmanager
def new_memory_on_huge_pages() -> Iterator[None]:
    """Collapse what the block allocated and filled, if this system can."""
    before = {region.start: region.end - region.start for region in _regions()}
    yield
    grown = (
        region for region in _regions() if region.end - region.start > before.get(region.start, 0) + SMALLEST
    )
    done = sum(collapse(region) for region in grown)
    _log.info("%.0f MB are on huge pages", done / 1e6)


def _regions() -> list[Region]:
    if sys.platform != "linux":
        return []
    try:
        return parse_regions(Path("/proc/self/smaps").read_text(encoding="utf-8"))
    except OSError:
        return []


def collapse(region: Region) -> int:
    """Put a region that is resident onto huge pages; returns the bytes moved, 0 where that is not possible."""
    start, end = -(-region.start // PAGE) * PAGE, region.end // PAGE * PAGE
    size = region.end - region.start
    if size < SMALLEST or region.resident < RESIDENT * size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(start, end - start, MADV_HUGEPAGE) or libc.madvise(start, end - start, MADV_COLLAPSE):
        return 0
    return end - start
