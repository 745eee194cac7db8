"""The governor's decisions as JSON lines, and the replay that decides them again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from outrider.contracts import Costs, Energy, as_json
from outrider.errors import TraceError
from outrider.lines import LineWriter, read_lines
from outrider.power.governor import Directive, Governor, Policy
from outrider.power.state import State
from outrider.power.tuning import Tuning
from outrider.records import decode

__all__ = ["DecisionLog", "Difference", "read_policy", "replay_decisions"]

_log = logging.getLogger(__name__)


class DecisionLog:
    """Writes decisions to a path or an open text file: changes of level, flags and draft always, else one
    every `every_s` seconds. With 0 every state is written, and `replay_decisions` can decide them all again.

    A disk that refuses ends the log with a warning; decoding goes on.
    """

    def __init__(self, target: str | Path | TextIO, governor: Governor, every_s: float = 1.0) -> None:
        self.every_s = every_s
        self._last: tuple[float, Any] | None = None  # time and gist of the last line
        self._shown_s: float | None = None  # time of the last state
        header = {
            "policy": governor.policy,
            "tuning": governor.tuning,
            "device": getattr(governor.device, "slug", None),
            "target_mb": governor.target_mb,
            "draft_mb": governor.draft_mb,
            "every_s": every_s,
        }
        self._writer = LineWriter(target, "governor", header, allow_nan=True)  # nothing here may stop a text

    def add(self, state: State, costs: Costs | None, directive: Directive) -> None:
        """Write a decision, if it says something new; a state that was shown before is not written again."""
        if self._writer.error is not None or state.time_s == self._shown_s:
            return
        self._shown_s = state.time_s
        gist = (directive.level, directive.flags, directive.draft_loaded)
        if self._last and gist == self._last[1] and state.time_s - self._last[0] < self.every_s:
            return
        self._last = (state.time_s, gist)
        energy = costs.energy if costs is not None else None
        record = {
            "time_s": state.time_s,
            "state": state,
            "static_w": None if energy is None else energy.static_w,
            "idle_w": None if energy is None else energy.idle_w,
            "directive": directive.to_dict(),
        }
        try:
            self._writer.write(record)
        except TraceError as error:
            _log.warning("the decision log ends here: %s", error)

    def close(self) -> None:
        """Close the file, if this log opened it; closing twice is allowed."""
        self._writer.close()


@dataclass(frozen=True)
class Difference:
    """A decision that came out differently: what the log says, and what was decided now."""

    time_s: float
    logged: dict[str, Any]
    decided: dict[str, Any]


def read_policy(header: Mapping[str, Any]) -> tuple[Policy, Tuning]:
    """The policy and the tuning of a log's header. Raises TraceError for unknown or missing fields."""
    policy = decode(Policy, header.get("policy"), "decision log: policy", TraceError)
    tuning = decode(Tuning, header.get("tuning"), "decision log: tuning", TraceError)
    assert isinstance(policy, Policy)
    assert isinstance(tuning, Tuning)
    return policy, tuning


def replay_decisions(
    source: str | Path, governor_of: Callable[[Mapping[str, Any]], Governor]
) -> Iterator[Difference]:
    """Decide every state of a log again, with the governor that `governor_of` makes from its header.

    Yields what differs. Raises TraceError for a damaged log, and for one that left states out.
    """
    trace = read_lines(source, "governor")
    if trace.header.get("every_s") != 0:
        raise TraceError(
            f"{trace.name} has every_s {trace.header.get('every_s')!r}; only a log that holds every state"
            " (every_s = 0) can be decided again"
        )
    governor = governor_of(trace.header)
    for where, record in trace:
        state = decode(State, record.get("state"), f"{where}: state", TraceError)
        static_w = record.get("static_w")
        energy = None if static_w is None else Energy(static_w, {}, idle_w=record.get("idle_w"))
        decided = as_json(governor.decide(state, Costs({1: 1.0}, energy=energy)).to_dict())
        if decided != record.get("directive"):
            yield Difference(state.time_s, record["directive"], decided)
