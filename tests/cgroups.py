"""A cgroup of one's own with a memory limit, where this process may make one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


@contextmanager
def memory_cgroup(limit_mb: float) -> Iterator[Path | None]:
    """A folder whose `cgroup.procs` takes processes; None where none can be made. It is removed in the end."""
    folder = _make(round(limit_mb * 1e6))
    try:
        yield folder
    finally:
        if folder is not None:
            _remove(folder)


def _make(limit: int) -> Path | None:
    for parent, files in _parents():
        folder = parent / f"outrider-test-{os.getpid()}"
        try:
            if files[0] == "memory.max":
                (parent / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / files[0]).write_text(str(limit))
            if (folder / files[1]).exists():  # without swap accounting it is not there
                (folder / files[1]).write_text("0" if files[1] == "memory.swap.max" else str(limit))
        except OSError:
            _remove(folder)
            continue
        return folder
    return None


def _parents() -> Iterator[tuple[Path, tuple[str, str]]]:
    """This process's own memory cgroup, of version 1 and 2, and the files that limit one."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield MOUNT / "memory" / own.strip("/"), ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        elif not controllers:
            yield MOUNT / own.strip("/"), ("memory.max", "memory.swap.max")


def _remove(folder: Path) -> None:
    """A cgroup is busy until its last process has been reaped."""
    for _ in range(100):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return
