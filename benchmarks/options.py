"""What the benchmarks ask of their options, before anything is measured, and how a mistake is told."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path

from outrider.errors import OutriderError

__all__ = ["GENAI_CONFIG", "at_least", "genai_folder", "gguf_file", "named", "new_file", "told"]

GENAI_CONFIG = "genai_config.json"
Main = Callable[..., int]


def told(main: Main) -> Main:
    """A `main` whose user's mistakes are a line on stderr and an exit code, never a traceback."""

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except OutriderError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except subprocess.CalledProcessError as error:  # it has said why
            words = [error.cmd] if isinstance(error.cmd, str) else error.cmd
            print(f"error: {' '.join(map(str, words))} ended with {error.returncode}", file=sys.stderr)
        except OSError as error:
            print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1

    return run


def at_least(low: int) -> Callable[[str], int]:
    """For argparse: a whole number, and none below `low`."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too few; at least {low}")
        return value

    return number


def new_file(text: str) -> Path:
    """For argparse: a file that can be written when the measuring is over."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or lies in one that does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def gguf_file(text: str) -> Path:
    """For argparse: a file that begins as GGUF does."""
    try:
        with open(text, "rb") as stream:
            found = stream.read(4)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    if found != b"GGUF":
        raise argparse.ArgumentTypeError(f"{text} is no GGUF file: it begins with {found!r}")
    return Path(text)


def genai_folder(text: str) -> Path:
    """For argparse: a folder that onnxruntime-genai's builder made."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    if not (path / GENAI_CONFIG).is_file():
        raise argparse.ArgumentTypeError(f"{text} has no {GENAI_CONFIG}; `benchmarks.peers build` makes one")
    return path


def named(models: Iterable[Path]) -> dict[str, Path]:
    """Models by name: the shortest end of a path that is no other's. One that is given twice is there once."""
    whole = list(dict.fromkeys(map(_with_a_name, models)))
    return {_own_end(path, [other for other in whole if other != path]): path for path in whole}


def _with_a_name(path: Path) -> Path:
    """A link keeps the name that it was given; `.` and `..` have none."""
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def _own_end(path: Path, others: Sequence[Path]) -> str:
    ends = (slice(-length, None) for length in range(1, len(path.parts) + 1))
    return str(
        Path(*next(path.parts[end] for end in ends if all(o.parts[end] != path.parts[end] for o in others)))
    )
