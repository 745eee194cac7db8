"""Options and arguments that are paths, refused before any work begins where they cannot be honoured.

What is read must be there, be of the right kind, and be readable. What is written replaces nothing unless
--overwrite is given, and the folders above it are made where they are missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from outrider.errors import UsageError

__all__ = [
    "BundleFolder",
    "InputFile",
    "OutputFile",
    "OutputFolder",
    "bundle_argument",
    "overwrite_option",
    "refuse_existing",
    "refuse_replacing",
    "telemetry_option",
    "without_telemetry",
]

F = TypeVar("F", bound=Callable[..., Any])


class _PathType(click.ParamType):  # type: ignore[type-arg]
    """A path whose kind and permissions are right; what it holds, its reader finds out."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises UsageError that names the option."""
        path = Path(value)
        try:
            fault = self.fault(path) if os.fspath(value) else f"the path is empty; name a {self.name}"
        except OSError as error:  # a name that is too long, a link to itself
            fault = f"{path}: {error.strerror}"
        if fault is not None:
            raise UsageError(f"{_spelled(param)}: {fault}")
        return path

    def fault(self, path: Path) -> str | None:
        """What is wrong with the path and what to do, if anything."""
        raise NotImplementedError


class InputFile(_PathType):
    """A file that is there and can be read; a device or a pipe is one too."""

    name = "file"

    def fault(self, path: Path) -> str | None:
        """See `_PathType`."""
        if path.is_dir():
            return f"{path} is a folder; name a file"
        return _unreadable(path) if path.exists() else f"{path} does not exist"


class BundleFolder(_PathType):
    """A folder with a manifest."""

    name = "folder"

    def fault(self, path: Path) -> str | None:
        """See `_PathType`."""
        what = None
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
        elif not (path / "manifest.json").exists():
            what = "holds no manifest.json"
        return (
            _unreadable(path) if what is None else f"{path} {what}; give a folder made by `outrider export`"
        )


class OutputFile(_PathType):
    """A file that can be written, in a folder that is there or can be made."""

    name = "file"

    def fault(self, path: Path) -> str | None:
        """See `_PathType`."""
        if os.fspath(path) == "-":
            return "- stands for standard output; name a file"
        if path.is_dir():
            return f"{path} is a folder; name a file in it"
        return _unwritable(path)


class OutputFolder(_PathType):
    """A folder that can be written to, or be made."""

    name = "folder"

    def fault(self, path: Path) -> str | None:
        """See `_PathType`."""
        return _unwritable(path / "file")


def _spelled(param: click.Parameter | None) -> str:
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return "a path" if param is None else param.human_readable_name


def _unreadable(path: Path) -> str | None:
    return None if os.access(path, os.R_OK) else f"{path} may not be read; change its permissions"


def _unwritable(path: Path) -> str | None:
    """Why a file cannot be written: it is protected, or what is nearest above it is, or is no folder."""
    there = next((place for place in (path, *path.absolute().parents) if place.exists()), path)
    if there != path and not there.is_dir():
        return f"{there} is a file, not a folder; choose another place"
    return None if os.access(there, os.W_OK) else f"{there} may not be written to; choose another place"


bundle_argument = click.argument("bundle", type=BundleFolder())
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace files that are there already.")
telemetry_option = click.option(
    "--telemetry",
    type=InputFile(),
    help="Play back a trace of `outrider record` in place of the machine's sensors.",
)


def without_telemetry(why: str) -> Callable[[F], F]:
    """Refuse --telemetry, with the reason, for a command in which it would mean nothing true."""

    def refuse(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise UsageError(f"{why}; leave --telemetry out")

    return click.option("--telemetry", hidden=True, expose_value=False, callback=refuse)


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Refuse to replace a file unless --overwrite is given; a device such as /dev/null holds nothing to lose."""
    if not overwrite and path.is_file():
        raise UsageError(f"{path} exists already; choose another name, or give --overwrite")


def refuse_replacing(options: dict[str, Any]) -> None:
    """The same for --trace and --governor-log; --overwrite is taken out of `options`."""
    overwrite = options.pop("overwrite")
    for name in ("trace", "governor_log"):
        if options.get(name) is not None:
            refuse_existing(options[name], overwrite)
