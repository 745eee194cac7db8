"""Recipes by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from outrider.errors import UsageError

__all__ = ["named"]

T = TypeVar("T")


def named(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of this name. Raises UsageError that lists the known names and the nearest one."""
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"unknown {what} {name!r}; known: {', '.join(table)}.{hint}")
