"""The likeliest correction: which draft a target will reject, and what it will take in its place.

Where a draft has time left beside a verify forward, it drafts the round after that outcome too. To draft for likely
outcomes of a verify is the idea of Saguaro (speculative speculative decoding); here it is one outcome, and the lead of
a draft over its runner-up says which.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from outrider.contracts import Float32Array, TopRows

__all__ = ["Correcting", "Correction", "Doubt", "KeepsRows", "doubt", "likeliest"]


class Correction(NamedTuple):
    """What a target may decide: it accepts so many drafts, and takes this token behind them."""

    accepted: int
    token: int


class Doubt(NamedTuple):
    """How far a drafted token was ahead of the next likely one, in logits, and the column of that one."""

    lead: float
    runner_up: int


@runtime_checkable
class Correcting(Protocol):
    """A drafter that can draft behind a correction of its last proposal, once `assume` has ended."""

    @property
    def corrects(self) -> bool:
        """Whether it can, with the graph that it has."""
        ...

    def correct(self, k: int) -> Generator[Correction | int, None, None]:
        """Draft on as if the likeliest correction were committed.

        Yields that, before any work, and then up to k drafts, each after one step. Runs where `assume` does. What it
        drafted until it is closed is kept for the next `propose`, beside what `assume` left.
        """
        ...


@runtime_checkable
class KeepsRows(Protocol):
    """A graph that can hand out rows of its cache, and take them back."""

    @property
    def keeps_rows(self) -> bool:
        """Whether its cache is in reach."""
        ...

    def keep(self, start: int) -> object:
        """A copy of the committed rows from `start` on."""
        ...

    def bring_back(self, kept: object) -> None:
        """Commit what `keep` returned again, behind the same rows."""
        ...


def doubt(row: Float32Array | TopRows, column: int) -> Doubt | None:
    """The doubt about a column of a processed row [V]; None where there is no other. Equals: the lowest id."""
    if isinstance(row, TopRows):
        others = [(float(v), int(i)) for v, i in zip(row.values[0], row.ids[0], strict=True) if i != column]
        mine = [float(v) for v, i in zip(row.values[0], row.ids[0], strict=True) if i == column]
        return Doubt(mine[0] - others[0][0], others[0][1]) if others and mine else None
    sides = ((row[:column], 0), (row[column + 1 :], column + 1))
    found = [offset + int(side.argmax()) for side, offset in sides if len(side)]
    if not found:
        return None
    best = max(found, key=lambda other: (row[other], -other))
    return Doubt(float(row[column] - row[best]), best) if np.isfinite(row[best]) else None


def likeliest(doubts: Sequence[Doubt | None]) -> int | None:
    """The place of the least lead; None where one of the doubts is not known."""
    leads = [found.lead for found in doubts if found is not None]
    return leads.index(min(leads)) if leads and len(leads) == len(doubts) else None
