"""Every error that Outrider raises on purpose.

    OutriderError
    ├── UsageError              an option or argument cannot be honoured            (exit code 2)
    ├── MissingExtraError       an optional library is absent; names the pip install
    ├── CheckpointError         a source checkpoint is unreadable, cut off or unknown
    │   └── FetchError          a download failed, or what came is not what was asked for
    ├── TokenizerError          a tokenizer cannot be rebuilt
    │   └── TokenizerMismatch   draft and target do not share a token map
    ├── ExportError             lowering or quantizing failed or changed nothing
    ├── BundleError             a bundle or its manifest is damaged or of another version
    ├── TraceError              a trace is damaged, of another version, or cannot be written
    ├── BackendError            a library cannot run a graph here
    ├── DeviceError             a phone cannot be reached, or does not take what is copied to it
    └── ContextError            a prompt or a generation does not fit the context

A message says what happened, the value seen, and what to do.
"""

from __future__ import annotations

import sys

__all__ = [
    "BackendError",
    "BundleError",
    "CheckpointError",
    "ContextError",
    "DeviceError",
    "ExportError",
    "FetchError",
    "MissingExtraError",
    "OutriderError",
    "TokenizerError",
    "TokenizerMismatch",
    "TraceError",
    "UsageError",
]


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose; the CLI prints it without a traceback."""

    exit_code = 1


class UsageError(OutriderError, ValueError):
    """An option, argument or combination of them cannot be honoured."""

    exit_code = 2


class MissingExtraError(OutriderError, ImportError):
    """An optional library is not installed; the message holds the exact `pip install`."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"{module!r} is not installed. It is part of an extra: pip install 'outrider[{extra}]'"
            + _why_no_wheel(module)
        )


def _why_no_wheel(module: str) -> str:
    """What keeps an extra from installing its library here; empty where nothing does."""
    if module != "coremltools":
        return ""
    import platform  # not above: `outrider.cli` can tell an interrupt only once the package is imported

    where = sys.platform, platform.machine().lower()
    built = where[0] == "darwin" or where in (("linux", "x86_64"), ("linux", "amd64"))
    if built and sys.version_info < (3, 14):
        return ""
    return (
        f". Here (Python {sys.version_info[0]}.{sys.version_info[1]} on {where[0]} {where[1]}) that installs nothing: "
        "coremltools 9 has wheels for Python up to 3.13 on macOS and on Linux x86-64 only; use one of those"
    )


class CheckpointError(OutriderError):
    """A source checkpoint is unreadable, cut off, or of an unknown kind."""


class FetchError(CheckpointError):
    """A download failed, or what came is not what was asked for."""


class TokenizerError(OutriderError):
    """A tokenizer cannot be rebuilt from what the checkpoint holds."""


class TokenizerMismatch(TokenizerError):  # noqa: N818  (named after the condition, as in the manifest)
    """Draft and target do not map ids to the same tokens."""


class ExportError(OutriderError):
    """Lowering or quantizing failed, or a recipe changed nothing."""


class BundleError(OutriderError):
    """A bundle or its manifest is damaged, incomplete, or of an unknown version."""


class TraceError(OutriderError):
    """A trace cannot be written, or is unreadable, damaged, of another version, or replays differently."""


class BackendError(OutriderError):
    """A library cannot load or run a graph on this machine."""


class DeviceError(OutriderError):
    """A phone cannot be reached, refuses, or has no room for what is copied to it."""


class ContextError(OutriderError, ValueError):
    """A prompt or a generation does not fit into the context."""
