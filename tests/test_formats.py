"""What users write and read by hand is documented field by field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import outrider
from outrider.lines import KINDS
from outrider.manifest import GraphEntry
from outrider.power.report.profile_trace import End, Header, RoundLine, Run, RunEnergy, Sample
from outrider.targets.device import Device, Figure
from outrider.targets.scenario import Scenario

DOCUMENT = Path(outrider.__file__).parents[1] / "docs" / "formats.md"
INTERNAL = {"slug", "label"}  # of the file's name; of a record's own fields


def records_of(kind: Any) -> Iterator[Any]:
    """A dataclass, and those that its fields are made of."""
    if is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from records_of(hint)
    for part in get_args(kind):
        yield from records_of(part)


@pytest.fixture(scope="module")
def documented() -> set[str]:
    return set(
        re.findall(r"[a-z][a-z0-9_]*", " ".join(re.findall(r"`([^`]*)`", DOCUMENT.read_text("utf-8"))))
    )


@pytest.mark.parametrize(
    "kind",
    [Device, Scenario, GraphEntry, Header, Sample, RoundLine, Run, RunEnergy, End],
    ids=lambda k: k.__name__,
)
def test_every_field_of_a_file_is_documented(kind: type, documented: set[str]) -> None:
    names = {f.name for record in records_of(kind) if record is not Figure for f in fields(record)}
    assert len(names) > 4
    assert not names - INTERNAL - documented


def test_every_kind_of_trace_is_documented() -> None:
    headings = re.findall(r"^### `(\w+)`", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    assert set(KINDS) <= set(headings)
