"""The `outrider` command. Imports here are few: an interrupt during them could not be told in a line."""

from __future__ import annotations

import sys

__all__ = ["is_interrupt", "main"]


def main() -> None:
    """Run the command line; an interrupt is a line and exit code 130, also while modules are imported."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict":  # paths are bytes: not all of them are text
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        from outrider.cli.root import run

        code = run()
    except BaseException as error:
        if not is_interrupt(error):
            raise
        if sys.stderr.isatty():
            print(file=sys.stderr)  # behind the terminal's ^C
        print("outrider: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def is_interrupt(error: BaseException) -> bool:
    """Whether an error came of Ctrl-C: libraries that are interrupted while they are imported raise ImportError."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, KeyboardInterrupt):
            return True
        if one is not None and one not in seen:
            seen.append(one)
            waiting += [one.__cause__, one.__context__]
    return False
