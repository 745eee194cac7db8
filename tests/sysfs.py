"""A machine that tests make up: files under a folder, commands with fixed answers, a clock that tests move."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from outrider.contracts import Reading
from outrider.power.sensors import sysfs
from outrider.power.sensors.system import CommandResult, Sensor, System
from outrider.targets.fake import VirtualClock


class Link(str):
    """The content of a symbolic link: an absolute path on the machine."""

    __slots__ = ()


class Board:
    """A machine below `root`. `break_file` makes reading a file fail as a kernel does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = VirtualClock(100.0)
        self.answers: dict[str, CommandResult | str] = {}
        self.commands: list[list[str]] = []
        self.broken: dict[Path, int] = {}
        self.system = System(root, self.clock, self._run, "linux")

    def add(self, tree: Mapping[str, str | int]) -> Board:
        """Write files (a newline is added) and links."""
        for name, content in tree.items():
            path = self.system.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Link):
                path.symlink_to(self.system.path(content))
            else:
                path.write_text(f"{content}\n")
        return self

    def remove(self, name: str) -> None:
        self.system.path(name).unlink()

    def break_file(self, name: str, error: int) -> None:
        self.broken[self.system.path(name).resolve()] = error

    def _run(self, command: Sequence[str], timeout_s: float) -> CommandResult:
        self.commands.append(list(command))
        words = [word.rpartition("/")[2] for word in command]
        for start in range(len(words)):
            answer = self.answers.get(" ".join(words[start:]), self.answers.get(words[start]))
            if answer is not None:
                return answer if isinstance(answer, CommandResult) else CommandResult(0, answer.encode())
        return CommandResult(None, b"", f"{command[0]} is not installed")


@pytest.fixture(name="board")
def board_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    machine = Board(tmp_path)
    load = sysfs.load

    def load_or_fail(path: Path) -> bytes:
        error = machine.broken.get(path.resolve())
        if error is not None:
            raise OSError(error, errno.errorcode[error])
        return load(path)

    kept = sysfs.KeptFile.load

    def kept_or_fail(self: sysfs.KeptFile) -> bytes:
        error = machine.broken.get(self.path.resolve())
        if error is not None:
            self.close()
            raise OSError(error, errno.errorcode[error])
        return kept(self)

    monkeypatch.setattr(sysfs, "load", load_or_fail)
    monkeypatch.setattr(sysfs.KeptFile, "load", kept_or_fail)
    return machine


def only(sensors: Sequence[Sensor]) -> Sensor:
    (sensor,) = sensors
    return sensor


def values(readings: Sequence[Reading], quantity: str) -> dict[str, float]:
    """Source -> value of what could be read."""
    return {r.source: r.value for r in readings if r.quantity == quantity and r.value is not None}


def reasons(readings: Sequence[Reading], quantity: str) -> dict[str, str]:
    """Source -> reason of what could not; every one must have a reason."""
    failed = {r.source: r.reason for r in readings if r.quantity == quantity and r.value is None}
    assert all(failed.values())
    return failed
