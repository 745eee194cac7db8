"""A folder that takes its place whole or not at all, and leaves what was there as it was when something breaks.

A process that is killed cannot clean up after itself. Its unfinished folder is locked as long as it lives (`flock`),
so the next export into the same place takes away what dead ones left, and refuses to run beside a living one.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

from outrider.errors import ExportError, UsageError
from outrider.manifest import MANIFEST_NAME

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: nothing is locked, so nothing of others is taken away
    fcntl = None

__all__ = ["disk_hint", "fresh_folder", "take_place"]

UNFINISHED, ASIDE = ".partial", ".old"


@contextmanager
def fresh_folder(output: Path, force: bool) -> Iterator[Path]:
    """A temporary folder that takes the place of `output` when the block ends well."""
    output = Path(os.path.realpath(output))  # "." has no name of its own, and a link stays what it is
    folder: Path | None = None
    with ExitStack() as stack:
        try:
            _refuse_impossible(output)
            output.parent.mkdir(parents=True, exist_ok=True)
            with _locked(output.parent) as sure:  # so that no new folder is seen before it is locked
                if sure:
                    _take_away_unfinished(output)
                _refuse_existing(output, force)
                folder = _beside(output, UNFINISHED)
                stack.enter_context(_locked(folder))
            folder.chmod(0o755)
            yield folder
            _refuse_existing(output, force)  # somebody else may have put something there meanwhile
            take_place(folder, output)
        except OSError as error:
            raise _disk_error(error, output) from error
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def take_place(folder: Path, output: Path) -> None:
    """Move `folder` to `output`; what was there is removed afterwards, or put back if the move fails."""
    if not output.exists():
        os.replace(folder, output)
        return
    aside = _beside(output, ASIDE)
    try:
        os.replace(output, aside / "bundle")
        os.replace(folder, output)
    except BaseException:
        if not output.exists() and (aside / "bundle").exists():
            os.replace(aside / "bundle", output)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _beside(output: Path, suffix: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=suffix, dir=output.parent))


def _take_away_unfinished(output: Path) -> None:
    """Remove what killed exports into `output` left beside it, and put back what one had moved aside.

    Raises UsageError when one is still running.
    """
    for left in _left_beside(output, UNFINISHED):
        try:
            with _locked(left, wait=False):
                shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            raise UsageError(
                f"another export into {output} is running; wait for it, or choose another folder"
            ) from None
    for left in _left_beside(output, ASIDE):
        if not output.exists() and (left / "bundle").exists():
            os.replace(left / "bundle", output)
        shutil.rmtree(left, ignore_errors=True)


def _left_beside(output: Path, suffix: str) -> list[Path]:
    name = re.compile(re.escape(f".{output.name}.") + r"[a-z0-9_]{8}" + re.escape(suffix))
    return [path for path in output.parent.iterdir() if name.fullmatch(path.name) and path.is_dir()]


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a folder; False where its file system has none.

    Raises BlockingIOError when another process has it and `wait` is False.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    finally:
        os.close(descriptor)


def _flock(descriptor: int, operation: int) -> bool:
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have no locks
        return False
    return True


def _refuse_impossible(output: Path) -> None:
    """What could not be renamed over at the end, however the export goes."""
    if output.is_symlink():
        raise UsageError(f"{output} is a link that leads to itself; choose another folder")
    if output.is_mount() or output == Path.cwd():
        what = "a file system of its own" if output.is_mount() else "the folder that this runs in"
        raise UsageError(
            f"{output} is {what}, which a bundle cannot take the place of; choose {output / 'bundle'}"
        )


def disk_hint(place: Path) -> str:
    """What may be wrong where a library says no more than that it could not write into `place`."""
    return f"Its disk may be full or may not be written to: {shutil.disk_usage(place).free / 1e6:.0f} MB are free"


def _refuse_existing(output: Path, force: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise UsageError(f"{output} exists and is not a bundle; choose another folder")
    if not force:
        raise UsageError(f"{output} already holds a bundle; --force replaces it")


def _disk_error(error: OSError, output: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ExportError(
            f"the disk of {output.parent} is full; nothing was written. Free space, then again"
        )
    where = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else Path()
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and where.is_relative_to(output.parent):
        return ExportError(f"{output.parent} may not be written to ({error.strerror}); choose another folder")
    return ExportError(f"writing the bundle failed: {error}; nothing was written")
