"""Run ExecuTorch programs (.pte), without torch where the system has a compiler.

`runtime` "shim" drives the libraries of the executorch wheel through a small C++ file that is compiled once;
"torch" uses `executorch.runtime`, which imports torch; "auto" prefers the shim. Both run the same kernels.

ExecuTorch has one thread pool per process: graphs in one process run one after another, each with its own number
of threads. A graph must not be used by two threads at once, nor after a fork (open it again there).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from outrider.errors import BackendError, MissingExtraError, UsageError
from outrider.targets.cached_graph import CachedGraph
from outrider.targets.executorch_profiles import RUNNERS, Program, described
from outrider.targets.executorch_shim.program import ShimProgram
from outrider.targets.executorch_torch import TorchProgram
from outrider.targets.graph_meta import GraphMeta, reading_description

__all__ = ["ExecutorchGraph", "RuntimeName"]

RuntimeName = Literal["auto", "shim", "torch"]
PROGRAMS: dict[str, type[ShimProgram] | type[TorchProgram]] = {"shim": ShimProgram, "torch": TorchProgram}
HEADER = struct.Struct("<4x4s4sI3Q")  # identifier, magic, length, program's bytes, segments' offset and bytes
FULL_HEADER = 32  # a header of this length says how many bytes the segments have
WAY_OUT = "the file may be damaged (run `outrider check`) or be made for another executorch"

_log = logging.getLogger(__name__)


class ExecutorchGraph(CachedGraph):
    """A `contracts.Graph` over a .pte. Make one with `load`."""

    def __init__(self, meta: GraphMeta, options: Mapping[str, Any], program: Program) -> None:
        super().__init__(meta, RUNNERS[meta.profile](meta, options, program), "ExecuTorch")
        self._program = program

    @classmethod
    def load(
        cls,
        path: str | Path,
        meta: Mapping[str, Any],
        *,
        threads: int | None = None,
        runtime: RuntimeName = "auto",
    ) -> ExecutorchGraph:
        """Open a program. `threads` None uses every processor that this process may use.

        Raises BackendError when the file is missing, damaged or another graph than `meta` describes, when no
        runtime can be used, or for more threads than there are processors; MissingExtraError without executorch.
        """
        path, record = Path(path), GraphMeta.from_json(meta)
        if runtime not in ("auto", *PROGRAMS):
            raise UsageError(f"runtime is {runtime!r}; known: auto, {', '.join(PROGRAMS)}")
        if record.profile not in RUNNERS:
            raise BackendError(
                f"{path}: profile {record.profile!r} is not known; known: {', '.join(RUNNERS)}"
            )
        check_file(path)
        program: Program | None = None
        try:
            program = open_program(path, threads, runtime)
            record.refuse_another_graph(described(program, record, meta, path), path)
            with reading_description():
                return cls(record, meta, program)
        except RuntimeError as error:
            _close(program)
            raise BackendError(f"ExecuTorch cannot load {path}: {error}; {WAY_OUT}") from error
        except BackendError:
            _close(program)
            raise

    @property
    def runtime(self) -> str:
        """What runs it: "shim" or "torch"."""
        return self._program.runtime


def open_program(path: Path, threads: int | None, runtime: RuntimeName) -> Program:
    """The program by the runtime asked for; "auto" falls back to torch, and logs why, where there is no shim.

    Raises RuntimeError for a file that ExecuTorch refuses.
    """
    if runtime != "auto":
        return PROGRAMS[runtime](path, threads)
    try:
        return ShimProgram(path, threads)
    except BackendError as error:
        reason = error
    try:
        program = TorchProgram(path, threads)
    except (BackendError, MissingExtraError) as error:
        raise BackendError(f"{reason}. Through torch: {error}") from error
    _log.warning("ExecuTorch runs through torch: %s", reason)
    return program


def check_file(path: Path) -> None:
    """Raise BackendError for a file that is missing, is no ExecuTorch program, or is shorter than it says."""
    if not path.is_file():
        raise BackendError(f"{path} does not exist; export the bundle again or fetch it whole")
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or head[4:6] != b"ET":
        raise BackendError(f"{path} is not an ExecuTorch program (it starts with {head[:8]!r})")
    _, magic, length, program, offset, segments = HEADER.unpack(head)
    if magic != b"eh00":
        return
    needed = max(program, offset + segments if length >= FULL_HEADER and offset else 0)
    size = path.stat().st_size
    if size < needed:
        raise BackendError(
            f"{path} is cut off: it has {size} bytes and needs {needed}; fetch or export it again"
        )


def _close(program: Program | None) -> None:
    if program is not None:
        program.close()
