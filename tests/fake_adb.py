"""An `adb` that keeps a phone in a folder: as a `Runner` in the process, or as a program on the PATH.

`devices`, `push` and `shell` behave as adb and toybox do; what a shell command says about /data is done in the
phone's folder. `plan.json` there holds the phones and their states, the free space, which files arrive damaged how
often, which programs are missing, and after how many copies something happens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = f"""#!{sys.executable} -IS
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pathlib import Path
from tests.fake_adb import FakeAdb
done = FakeAdb(Path(__file__).parent, program=True)(["adb", *sys.argv[1:]], 60.0)
sys.stdout.buffer.write(done.out)
print(done.error, file=sys.stderr)
sys.exit(done.code)
"""


class Answer(NamedTuple):
    """What `outrider.power.sensors.system.CommandResult` holds; the program starts faster without importing it."""

    code: int
    out: bytes
    error: str = ""

    @property
    def text(self) -> str:
        """Standard output."""
        return self.out.decode()


class FakeAdb:
    """Runs adb's command lines on a phone that is a folder."""

    def __init__(self, folder: Path, program: bool = False) -> None:
        self.folder, self.program = folder, program

    @classmethod
    def install(cls, folder: Path) -> FakeAdb:
        """A phone with room, and the program `adb` beside it."""
        (folder / "phone/data/local/tmp").mkdir(parents=True)
        plan = {
            "phones": {"PHONE1": "device"},
            "free_kb": 10_000_000,
            "damage": {},
            "unwritable": [],
            "copies": 0,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "adb").write_text(PROGRAM)
        (folder / "adb").chmod(0o755)
        return cls(folder)

    @property
    def search_path(self) -> str:
        """A PATH that finds the program first."""
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"

    @property
    def plan(self) -> dict[str, Any]:
        """What happens next."""
        plan: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        return plan

    def tell(self, **changes: Any) -> None:
        """Change the plan."""
        (self.folder / "plan.json").write_text(json.dumps({**self.plan, **changes}))

    def path(self, absolute: str) -> Path:
        """A file of the phone."""
        return self.folder / "phone" / absolute.lstrip("/")

    @property
    def calls(self) -> list[list[str]]:
        """Every command line so far, without `adb`."""
        log = self.folder / "calls.log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def pushes(self) -> list[str]:
        """What was copied, in order, by its path on the phone."""
        return [call[-1] for call in self.calls if "push" in call]

    def __call__(self, command: Sequence[str], timeout_s: float) -> Answer:
        """Run one command line."""
        words = list(command[1:])
        with open(self.folder / "calls.log", "a") as log:
            log.write(json.dumps(words) + "\n")
        phones = self.plan["phones"]
        if words == ["devices"]:
            lines = [f"{serial}\t{state}" for serial, state in phones.items()]
            return Answer(0, "\n".join(["List of devices attached", *lines, "", ""]).encode())
        serial, verb, rest = words[1], words[2], words[3:]
        if phones.get(serial) != "device":
            return Answer(1, b"", f"adb: device '{serial}' not found")
        return self._shell(rest[0]) if verb == "shell" else self._push(Path(rest[0]), rest[1])

    def _shell(self, command: str) -> Answer:
        plan = self.plan
        if command.startswith("df -k"):
            head = "Filesystem     1K-blocks     Used Available Use% Mounted on"
            line = f"/dev/block/dm-5 229482476 52482476 {plan['free_kb']}  24% /data/user/0"
            return Answer(0, f"{head}\n{line}\n".encode())
        for name in plan["unwritable"]:
            if command.startswith("mkdir") and name in command:
                return Answer(1, b"", f"mkdir: '{name}': Permission denied")
        for name in plan.get("lacks", []):  # programs that the phone does not have
            command = command.replace(name, f"no-{name}")
        local = command.replace("/data/", f"{self.folder}/phone/data/")
        done = subprocess.run(["sh", "-c", local], capture_output=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr.decode().strip())

    def _push(self, source: Path, target: str) -> Answer:
        plan, data, path = self.plan, source.read_bytes(), self.path(target)
        copies = plan["copies"] + 1
        self.tell(copies=copies)
        if copies == plan.get("gone_at"):  # its cable is pulled in the middle of a copy
            path.write_bytes(data[: len(data) // 2])
            self.tell(phones={})
            return Answer(1, b"", f"adb: error: failed to read copy response: EOF from {source}")
        if copies == plan.get("fails_at"):
            said = f"adb: error: failed to copy '{source}' to '{target}': remote No space left on device"
            return Answer(1, b"", said)
        if copies == plan.get("interrupted_at"):
            path.write_bytes(data[: len(data) // 2])
            self._interrupt()
        if plan["damage"].get(path.name, 0) > 0:
            self.tell(damage={**plan["damage"], path.name: plan["damage"][path.name] - 1})
            data = bytes([data[0] ^ 1]) + data[1:]
        path.write_bytes(data)
        return Answer(0, f"{source}: 1 file pushed, 0 skipped. 30.1 MB/s\n".encode())

    def _interrupt(self) -> None:
        """Ctrl-C: the process that asked for the copy gets it."""
        if not self.program:
            raise KeyboardInterrupt
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
