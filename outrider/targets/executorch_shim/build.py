"""Build the shim once with the system's compiler and keep it in the user's cache folder.

A built shim is a single file whose name holds what it was built from and the hash of its own bytes: a damaged or
half-written one is recognised and built again, and processes that build at once cannot disturb each other.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import BackendError, MissingExtraError
from outrider.folders import cache_folder

__all__ = ["Wheel", "built_shim", "executorch_wheel"]

SOURCE = Path(__file__).with_name("shim.cpp")
COMPILERS = ("c++", "g++", "clang++")
LIBRARIES = ("kernels_optimized", "kernels_quantized", "backend_xnnpack", "threadpool")
HEADER = "include/executorch/extension/module/module.h"
NO_UNUSED = "-Wl,--no-as-needed"  # kernels register themselves when they are loaded: nothing names them

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    """Where the executorch wheel is installed, and its version."""

    folder: Path
    version: str

    @property
    def libraries(self) -> Path:
        """The folder of its shared libraries."""
        return self.folder / "lib"


def executorch_wheel() -> Wheel:
    """The installed wheel, found without importing it (which could import torch).

    Raises MissingExtraError when it is not installed, BackendError when it has no libraries or headers.
    """
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("executorch", "executorch")
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        version = importlib.metadata.version("executorch")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtraError("executorch", "executorch") from None
    if not (folder / HEADER).is_file() or not list((folder / "lib").glob("libexecutorch.*")):
        raise BackendError(
            f"executorch {version} in {folder} has no lib/ or include/ folder to build against; "
            "install the wheel of version 1.5 or newer: pip install 'executorch>=1.5,<2'"
        )
    return Wheel(folder, version)


def built_shim(wheel: Wheel) -> Path:
    """The shim for this wheel and compiler, built if it is not in the cache yet.

    Without a compiler, one that another compiler built for this wheel will do. Raises BackendError when there
    is neither, when compiling fails, or when the cache cannot be written.
    """
    folder, key = cache_folder() / "executorch-shim", shim_key(wheel)
    try:
        compiler = find_compiler()
    except BackendError:
        found = _whole_shim(folder, f"{key}-*.so")
        if found is None:
            raise
        return found
    name = f"{key}-{compiler_key(compiler)}"
    return _whole_shim(folder, f"{name}-*.so") or _build(wheel, compiler, folder, name)


def _whole_shim(folder: Path, pattern: str) -> Path | None:
    return next((path for path in sorted(folder.glob(pattern)) if _is_whole(path)), None)


def find_compiler() -> list[str]:
    """The command of a C++ compiler: `CXX`, else the first of `COMPILERS` on the path."""
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [named] if named else [[name] for name in COMPILERS]
    for command in candidates:
        program = shutil.which(command[0])
        if program:
            return [program, *command[1:]]
    where = f"CXX is {shlex.join(named)!r}, which is not there" if named else "there is none on the PATH"
    raise BackendError(
        f"running ExecuTorch without torch needs a C++17 compiler once, and {where}; install one "
        "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install; "
        "Termux: pkg install clang), or install torch and use runtime='torch'"
    )


def shim_key(wheel: Wheel) -> str:
    """What any built shim depends on: the wheel and its place, the source, the machine."""
    parts = [str(wheel), SOURCE.read_text(encoding="utf-8"), platform.machine(), *_flags(wheel)]
    return _short_hash("\0".join(parts).encode())


def compiler_key(compiler: list[str]) -> str:
    """The compiler's command and version."""
    said = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    return _short_hash("\0".join(compiler).encode() + said)


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _flags(wheel: Wheel) -> list[str]:
    include = wheel.folder / "include"
    return [
        *("-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-deprecated-declarations"),
        f"-I{include}",
        f"-I{include}/executorch/runtime/core/portable_type/c10",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        f"-L{wheel.libraries}",
        "-lexecutorch",
        *([NO_UNUSED] if sys.platform.startswith("linux") else []),
        *(f"-lexecutorch_{name}" for name in LIBRARIES),
        f"-Wl,-rpath,{wheel.libraries}",
    ]


def _build(wheel: Wheel, compiler: list[str], folder: Path, name: str) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as scratch:
            made = Path(scratch) / "shim.so"
            _compile([*compiler, str(SOURCE), "-o", str(made), *_flags(wheel)])
            final = folder / f"{name}-{_short_hash(made.read_bytes())}.so"
            os.replace(made, final)
    except OSError as error:
        raise BackendError(
            f"the ExecuTorch shim cannot be written to {folder}: {error}; make the folder writable, or set "
            "OUTRIDER_HOME to another one"
        ) from error
    for damaged in (path for path in folder.glob(f"{name}-*.so") if not _is_whole(path)):
        damaged.unlink(missing_ok=True)
    return final


def _compile(command: list[str]) -> None:
    _log.info("building the ExecuTorch shim: %s", shlex.join(command))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        shown = "; ".join((said or done.stderr.splitlines())[:3])
        raise BackendError(
            f"{command[0]} could not build the ExecuTorch shim: {shown}; it needs C++17 "
            "(g++ 9 or clang 10 and newer); CXX names another compiler"
        )


def _is_whole(path: Path) -> bool:
    """Whether a built shim still has the bytes that its name promises."""
    try:
        return path.stem.rpartition("-")[2] == _short_hash(path.read_bytes())
    except OSError:
        return False
