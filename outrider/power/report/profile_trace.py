"""The raw trace of `outrider profile` (see `outrider.lines`): samples, rounds and runs.

Times are seconds since the profile began, on the clock of the device (virtual where it is simulated).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from outrider.contracts import as_json
from outrider.errors import TraceError
from outrider.lines import LineWriter, read_lines
from outrider.records import decode

__all__ = [
    "End",
    "Header",
    "ProfileError",
    "ProfileTrace",
    "ProfileWriter",
    "RoundLine",
    "Run",
    "RunEnergy",
    "Sample",
    "Settings",
    "label_of",
    "read_profile",
]


class ProfileError(TraceError):
    """A profile's trace or summary is unreadable, of another version, or cannot be written."""


@dataclass(frozen=True)
class Settings:
    """What the profile was asked for."""

    run_s: float  # decoding time of one run
    repeats: int
    seed: int = 0
    power_cap_w: float | None = None
    temp_limit_c: float | None = None
    cells: tuple[str, ...] = ()  # labels, in the order asked for
    warm_up_s: float = 0.0
    cool_down_s: float = 0.0  # the longest wait of a cool-down gate


@dataclass(frozen=True)
class Header:
    """The first line. `provenance` says on what, with what; `simulated` names the device model, if any."""

    settings: Settings
    tool_version: str
    provenance: Mapping[str, str]
    simulated: bool


@dataclass(frozen=True)
class Sample:
    """The machine at one moment; None: not known then."""

    time_s: float
    power_w: float | None = None
    die_c: float | None = None
    skin_c: float | None = None
    clock_ratio: float | None = None
    throttle: float | None = None
    battery_percent: float | None = None

    @property
    def hottest_c(self) -> float | None:
        """The hottest place that is known."""
        return max((c for c in (self.die_c, self.skin_c) if c is not None), default=None)


@dataclass(frozen=True)
class RoundLine:
    """One round that ended at `time_s`. `seconds` is its work, `pause_s` the pacing before it."""

    run: int
    time_s: float
    seconds: float
    drafter: str | None
    k: int
    drafted: int
    evaluated: int
    accepted: int
    tokens: int
    draft_s: float = 0.0
    verify_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True)
class RunEnergy:
    """Gross joules of a run, from which part of the machine, by what method, and how far to trust them.

    Stages: prefill, draft, verify, and other (pauses among it) share the whole; wasted_draft and wasted_verify
    are parts of draft and verify. `attribution` says how each got its share: by timestamps, by the energy
    model, or by time. `edge_j` bounds what the window's edges may be wrong by.
    """

    gross_j: float
    scope: str
    method: str
    trust: str = ""
    source: str = ""
    stages: Mapping[str, float] = field(default_factory=dict)
    attribution: Mapping[str, str] = field(default_factory=dict)
    samples_expected: int | None = None
    samples_got: int | None = None
    largest_gap_s: float | None = None
    period_s: float | None = None
    coverage: float = 1.0
    edge_j: float | None = None


def label_of(drafter: str | None, k: str, objective: str | None, precision: str | None) -> str:
    """The name of a setting; `plain` alone is plain decoding in the precision that the bundle prefers."""
    name = "plain" if drafter is None and k == "0" else f"{drafter or 'any'} k={k}"
    return " ".join([name, *([objective] if objective else [])]) + (f", {precision}" if precision else "")


@dataclass(frozen=True)
class Run:
    """One run of a cell: decoding text after text for a while.

    `tokens` were committed after the first round of their text, in `decode_s` seconds, pauses included; the
    time before is `prefill_s`, for `prompt_tokens`. `cooled` False: the gate before it timed out.
    """

    run: int
    drafter: str | None
    k: str
    objective: str | None
    repeat: int
    begin_s: float
    end_s: float
    tokens: int
    decode_s: float
    prompt_tokens: int
    prefill_s: float
    rounds: int
    drafted: int
    evaluated: int
    accepted: int
    texts: int
    warm_up: bool = False
    whole: bool = True  # False: interrupted
    cooled: bool | None = None
    start_c: float | None = None
    energy: RunEnergy | None = None
    precision: str | None = None  # such as "8da4w target"; None: what the bundle prefers

    @property
    def label(self) -> str:
        """The name of the cell."""
        return label_of(self.drafter, self.k, self.objective, self.precision)

    @property
    def tokens_per_s(self) -> float | None:
        """Decode rate, pauses included; None where too little was decoded to tell."""
        return self.tokens / self.decode_s if self.tokens and self.decode_s > 0 else None


@dataclass(frozen=True)
class End:
    """The last line: why the profile ended, and what belongs to the whole of it."""

    complete: bool
    reason: str = ""
    idle_before_w: float | None = None
    idle_after_w: float | None = None
    sampler_share: float | None = None  # of one core
    no_meter: str = ""  # why no run has joules
    notes: tuple[str, ...] = ()


_KINDS: dict[str, Any] = {"sample": Sample, "round": RoundLine, "run": Run, "end": End}
_NAMES = {kind: name for name, kind in _KINDS.items()}
Line = Sample | RoundLine | Run | End


@dataclass(frozen=True)
class ProfileTrace:
    """A whole trace. `end` is None when it was cut off."""

    header: Header
    samples: tuple[Sample, ...] = ()
    rounds: tuple[RoundLine, ...] = ()
    runs: tuple[Run, ...] = ()
    end: End | None = None

    @property
    def partial(self) -> bool:
        """True when the profile did not come to its end."""
        return self.end is None or not self.end.complete


class ProfileWriter(LineWriter):
    """Appends lines to a trace: whatever happens next, what was measured is kept.

    Raises ProfileError when the file cannot be written; what was written before stays readable.
    """

    def __init__(self, target: str | os.PathLike[str] | BinaryIO, header: Header) -> None:
        super().__init__(target, "profile", as_json(header), ProfileError)

    def add(self, line: Line) -> None:
        """Append one line."""
        self.write({"record": _NAMES[type(line)], **_rounded(as_json(line))})


def _rounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with six digits after the point: microseconds, microwatts."""
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in record.items()}


def read_profile(path: str | os.PathLike[str]) -> ProfileTrace:
    """Read a trace; one that is cut off is read up to there, with a warning.

    Raises ProfileError for a file that is no profile, of another version, or damaged inside.
    """
    lines = read_lines(path, "profile", failure=ProfileError)
    header = {name: value for name, value in lines.header.items() if name not in ("schema_version", "kind")}
    known: Header = decode(Header, header, f"{lines.name}: header", ProfileError)
    found: dict[type, list[Any]] = {kind: [] for kind in _KINDS.values()}
    for where, record in lines:
        name = record.pop("record", None)
        if name not in _KINDS:
            raise ProfileError(f"{where}: record is {name!r}; known: {', '.join(_KINDS)}")
        found[_KINDS[name]].append(decode(_KINDS[name], record, f"{where}: {name}", ProfileError))
    ends = found[End]
    return ProfileTrace(
        known, tuple(found[Sample]), tuple(found[RoundLine]), tuple(found[Run]), ends[-1] if ends else None
    )
