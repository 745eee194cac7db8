"""A folder that takes its place whole or not at all, and leaves what was there as it was when something breaks."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import ExportError, UsageError
from outrider.manifest import MANIFEST_NAME

__all__ = ["fresh_folder", "take_place"]


@contextmanager
def fresh_folder(output: Path, force: bool) -> Iterator[Path]:
    """A temporary folder that takes the place of `output` when the block ends well."""
    _refuse_existing(output, force)
    folder: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
        folder.chmod(0o755)
        yield folder
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
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".old", dir=output.parent))
    try:
        os.replace(output, aside / "bundle")
        os.replace(folder, output)
    except BaseException:
        if not output.exists() and (aside / "bundle").exists():
            os.replace(aside / "bundle", output)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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
    return ExportError(f"writing the bundle failed: {error}; nothing was written")
