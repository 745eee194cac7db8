"""Where sensors look: a root folder, a clock, a way to run commands. Tests and adb bring their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.contracts import Clock, Reading

__all__ = ["CommandResult", "Runner", "Sensor", "System", "run_command"]


@dataclass(frozen=True)
class CommandResult:
    """What a command printed. `code` is None when it could not be started or did not end in time."""

    code: int | None
    out: bytes
    error: str = ""

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.out.decode("utf-8", "replace")


Runner = Callable[[Sequence[str], float], CommandResult]
"""(command line, seconds to wait at most) -> what it printed; never raises."""


def run_command(command: Sequence[str], timeout_s: float) -> CommandResult:
    """Run a command without a shell; every failure is a result."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        return CommandResult(None, b"", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return CommandResult(None, b"", f"{command[0]} did not answer within {timeout_s:g} s")
    except OSError as error:
        return CommandResult(None, b"", f"{command[0]}: {error.strerror or error}")
    return CommandResult(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace").strip())


@dataclass(frozen=True)
class System:
    """The machine that sensors read. `root` stands for `/`; `platform` is `sys.platform`'s name."""

    root: Path = Path("/")
    clock: Clock = time.monotonic
    run: Runner = run_command
    platform: str = sys.platform

    def path(self, absolute: str) -> Path:
        """A path of the machine, below `root`."""
        return self.root / absolute.lstrip("/")


class Sensor(Protocol):
    """One source of readings.

    `period_s` is how often a read brings something new. `read` never raises and never invents: what cannot
    be read is a `Reading` without a value, with the reason and what would fix it.
    """

    name: str
    period_s: float

    def read(self) -> list[Reading]:
        """The figures of now."""
        ...
