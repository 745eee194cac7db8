"""Options and arguments that are paths, refused before any work begins where they cannot be honoured.

What is read must be there, be of the right kind, and be readable. What is written replaces nothing unless
--overwrite is given, and the folders above it are made where they are missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from outrider.errors import UsageError

__all__ = [
    "BundleFolder",
    "InputFile",
    "ModelName",
    "OutputFile",
    "OutputFolder",
    "bundle_argument",
    "name_of",
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
            fault: str | None = f"the path is empty; name a {self.name}"
            if os.fspath(value):
                _refuse_impossible(path)
                path = self.followed(path)
                fault = self.fault(path)
        except OSError as error:
            fault = f"{path}: {error.strerror}; choose another"
        if fault is not None:
            raise UsageError(f"{_spelled(param)}: {fault}")
        return path

    def followed(self, path: Path) -> Path:
        """The path to work with."""
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
        if not _is_text(Path(os.path.realpath(path))):
            return f"{os.path.realpath(path)} {NO_TEXT}"
        what = None
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
        elif not (path / "manifest.json").exists():
            what = "holds no manifest.json"
        return (
            _unreadable(path) if what is None else f"{path} {what}; give a folder made by `outrider export`"
        )


class _Output(_PathType):
    """What can be written to, or be made; what replaces it replaces what a link leads to, never the link."""

    def followed(self, path: Path) -> Path:
        """The end of a link, and of one in the middle that leads to what is not there yet."""
        if any(place.is_symlink() and not place.exists() for place in (path, *path.parents)):
            return Path(os.path.realpath(path))
        real = Path(os.path.realpath(path))
        return real if path.is_symlink() and (real.is_file() or real.is_dir()) else path  # else a device

    def fault(self, path: Path) -> str | None:
        """See `_PathType`."""
        return f"- stands for standard output; name a {self.name}" if os.fspath(path) == "-" else None


class OutputFile(_Output):
    """A file that can be written, in a folder that is there or can be made."""

    name = "file"

    def fault(self, path: Path) -> str | None:
        """See `_PathType`."""
        if path.is_dir():
            return f"{path} is a folder; name a file in it"
        return super().fault(path) or _unwritable(path)


class OutputFolder(_Output):
    """A folder that can be written to, or be made; for a bundle, one whose path the model libraries take."""

    name = "folder"

    def __init__(self, for_bundle: bool = False) -> None:
        self.for_bundle = for_bundle

    def fault(self, path: Path) -> str | None:
        """See `_PathType`."""
        if self.for_bundle and not _is_text(Path(os.path.realpath(path))):
            return f"{os.path.realpath(path)} {NO_TEXT}"
        return super().fault(path) or _unwritable(path / "file")


class ModelName(_PathType):
    """A model's file or folder, or its name in the catalog or on the hub: what it stands for, its reader finds out."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name as it was given. Raises UsageError that names the option."""
        if value:  # the reader of models says what to do about an empty name
            super().convert(value, param, ctx)
        return value

    def fault(self, path: Path) -> str | None:
        """See `_PathType`."""
        try:
            _refuse_impossible(path.expanduser())
        except RuntimeError:
            return f"{path}: there is no such user; give the whole path"
        return None if _is_text(path) else f"{path} is not UTF-8, as a manifest must be; give it another name"


NO_TEXT = "is not UTF-8, and onnx and onnxruntime take no other path; choose another"


def _is_text(path: Path) -> bool:
    """Whether a path can be encoded: bytes of the system's that are no UTF-8 come as lone surrogates."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def name_of(path: Path) -> str:
    """The last part of a path, as it can be written into a report."""
    return path.name.encode("utf-8", "backslashreplace").decode()


def _refuse_impossible(path: Path) -> None:
    """Raise OSError for what can never be opened: a name that is too long, a link to itself, a closed folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.stat()


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
