"""The summary of a profile as a record: what `summary.json` holds; see docs/formats.md."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.contracts import as_json
from outrider.lines import SCHEMA_VERSION, check_header
from outrider.power.report.intervals import Interval
from outrider.power.report.profile_trace import ProfileError, Settings
from outrider.records import decode, parsed, replaced

__all__ = ["Cell", "ErrorBudget", "Summary", "read_summary", "write_summary"]

KIND = "profile-summary"


@dataclass(frozen=True)
class Cell:
    """One setting, over its repetitions. Energy figures are None where nothing measures power.

    `energy_j_per_token` is gross joules of decoding (without prefill, where stages can be told apart), a
    decoded token. `speedup` is the geometric mean over repetitions of the ratio to plain decoding.
    `stage_j_per_token` splits the gross joules; `wasted_draft` is a part of `draft`.
    """

    label: str
    drafter: str | None
    k: str
    objective: str | None
    tokens_per_s: Interval
    tokens: int
    seconds: float
    speedup: Interval | None = None
    energy_j_per_token: Interval | None = None
    net_j_per_token: Interval | None = None
    power_w: Interval | None = None
    peak_c: float | None = None
    mean_k: float | None = None
    acceptance: float | None = None
    tokens_per_round: float | None = None
    prompt_tokens_per_s: float | None = None
    retention: float | None = None
    throttled_after_s: float | None = None
    over_limit_s: float | None = None
    holds_cap: bool | None = None
    holds_limit: bool | None = None
    stage_j_per_token: Mapping[str, float] | None = None
    precision: str | None = None  # such as "8da4w target"; None: what the bundle prefers

    @property
    def allowed(self) -> bool:
        """False when it broke the cap or the limit."""
        return self.holds_cap is not False and self.holds_limit is not False


@dataclass(frozen=True)
class ErrorBudget:
    """How far to trust the joules: by what method, from which part, from how many samples.

    `coverage` is the least of any run; `edge_share` the most that the edges of a run's window may be wrong by.
    """

    method: str
    trust: str
    scope: str
    source: str
    samples_expected: int | None
    samples_got: int | None
    fewest_in_a_run: int | None
    largest_gap_s: float | None
    period_s: float | None
    coverage: float
    edge_share: float | None
    sampler_share: float | None
    idle_before_w: float | None
    idle_after_w: float | None


@dataclass(frozen=True)
class Summary:
    """The whole profile; `headline` is the plain answer."""

    headline: str
    simulated: bool
    partial: bool
    cells: tuple[Cell, ...]
    settings: Settings
    provenance: Mapping[str, str]
    tool_version: str
    error_budget: ErrorBudget | None = None
    no_meter: str = ""
    power_seen: bool = False  # a sensor told power, whether or not that was enough for joules
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION
    kind: Literal["profile-summary"] = "profile-summary"

    @property
    def metered(self) -> bool:
        """True when any cell has joules."""
        return any(cell.energy_j_per_token is not None for cell in self.cells)


def write_summary(summary: Summary, path: str | os.PathLike[str]) -> None:
    """Write `summary.json`, whole or not at all. Raises ProfileError when it cannot be written."""
    text = json.dumps(as_json(summary), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with replaced(path) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror or error}; free some space") from None


def read_summary(path: str | os.PathLike[str]) -> Summary:
    """Read a summary, strictly. Raises ProfileError naming the file and the field."""
    name = Path(path).name
    try:
        record = parsed(json.loads, Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"cannot read the summary {path}: {error}") from None
    check_header(record if isinstance(record, dict) else {}, (KIND,), name, ProfileError)
    summary: Summary = decode(Summary, record, f"{name}: summary", ProfileError)
    return summary
