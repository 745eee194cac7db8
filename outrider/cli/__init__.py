"""The `outrider` command. Imports here are few: an interrupt during them could not be told in a line."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; an interrupt is a line and exit code 130, also while modules are imported."""
    try:
        from outrider.cli.root import run

        code = run()
    except KeyboardInterrupt:
        print("outrider: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
