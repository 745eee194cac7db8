"""Engines in processes of their own: what the benchmarks ask, and `worker.py` answers."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Worker"]


class Worker:
    """An engine in a process of its own (`worker.py`), asked over a pipe; with `score`, for what tokens cost it."""

    def __init__(
        self,
        engine: str,
        python: Path,
        model: Path,
        threads: int,
        env: Mapping[str, str] | None = None,
        score: bool = False,
    ) -> None:
        self._name = f"{engine} on {model.name}"
        script = Path(__file__).with_name("worker.py")
        command = [python, script, engine, model, "--threads", str(threads), *(["--score"] if score else [])]
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `close`)
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.load_s = float(self._answer()["load_s"])

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `_answer` says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._complaints.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._complaints.seek(0)
            raise SystemExit(f"{self._name} ended:\n{self._complaints.read()[-2000:]}")
        return dict(json.loads(line))
