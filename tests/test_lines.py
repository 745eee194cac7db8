"""A line of a trace is written whole or not at all, and what was cut off is read up to there."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.contracts import Plan
from outrider.errors import TraceError, UsageError
from outrider.lines import KINDS, LineWriter, read_lines
from tests.full_disk import FullDisk

HEADER = '{"schema_version":1,"kind":"decode"}\n'


def written(path: Path, *records: dict[str, Any]) -> Path:
    with LineWriter(path, "decode", {"seed": 3}) as writer:
        for record in records:
            writer.write(record)
    return path


def fill(writer: LineWriter) -> None:
    for step in range(99):
        writer.write({"step": step})


def records_of(source: Any, *kinds: str) -> list[dict[str, Any]]:
    return [record for _, record in read_lines(source, *(kinds or ("decode",)))]


def test_records_come_back_in_order_and_again(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", {"a": 1}, {"b": "é"})
    lines = read_lines(path, "telemetry", "decode")
    assert lines.header == {"schema_version": 1, "kind": "decode", "seed": 3}
    assert [record for _, record in lines] == [record for _, record in lines] == [{"a": 1}, {"b": "é"}]
    assert [where for where, _ in lines] == [f"{path}, line 2", f"{path}, line 3"]


def test_dataclasses_and_arrays_become_json(tmp_path: Path) -> None:
    record = {"plan": Plan("model", 2), "row": np.arange(3), "top": (np.float32(0.5), np.int64(7))}
    (found,) = records_of(written(tmp_path / "t.jsonl", record))
    assert found["plan"]["k"] == 2
    assert found["row"] == [0, 1, 2]
    assert found["top"] == [0.5, 7]


def test_a_line_is_on_its_way_to_the_disk_when_write_returns(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "t.jsonl", "decode", {})
    writer.write({"a": 1})
    assert records_of(tmp_path / "t.jsonl") == [{"a": 1}]
    writer.close()
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_ends_a_trace_with_a_whole_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for room in range(45, 200, 3):
        disk = FullDisk(room)
        writer = LineWriter(disk, kind, {})
        with pytest.raises(TraceError, match=r"No space left on device.*make room"):
            fill(writer)
        assert writer.error is not None
        writer.write({"step": "after"})  # does nothing
        path.write_bytes(disk.getvalue())
        assert disk.getvalue().endswith(b"\n")
        assert records_of(path, kind) == [{"step": step} for step in range(writer.records)]


def test_a_disk_without_room_for_a_header_keeps_nothing() -> None:
    disk = FullDisk(10)
    with pytest.raises(TraceError, match="No space left"):
        LineWriter(disk, "decode", {})
    assert disk.getvalue() == b""


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        TraceError, match=r"file/t\.jsonl: (File exists|Not a directory); choose another file"
    ):
        LineWriter(tmp_path / "file" / "t.jsonl", "decode", {})
    with pytest.raises(TraceError, match=r"t\.jsonl: No such file"):
        read_lines(tmp_path / "t.jsonl", "decode")


def test_an_unknown_kind_is_refused_and_lists_the_known() -> None:
    with pytest.raises(UsageError, match="telemetry, decode, acceptance, governor, profile"):
        LineWriter(io.BytesIO(), "dream", {})


def test_an_open_file_stays_its_owner_s() -> None:
    for file in (io.StringIO(), io.BytesIO()):
        with LineWriter(file, "decode", {}) as writer:
            writer.write({"a": 1})
        assert not file.closed
        assert len(file.getvalue().splitlines()) == 2


def test_nan_is_refused_where_it_is_not_allowed() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        LineWriter(io.BytesIO(), "telemetry", {}).write({"a": float("nan")})
    LineWriter(io.BytesIO(), "decode", {}, allow_nan=True).write({"a": -float("inf")})


def test_a_trace_cut_off_anywhere_in_its_last_line_is_read_up_to_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    data = (HEADER + '{"a":1}\n{"name":"Zoë 🚀"}\n').encode()
    begin = data.rindex(b"\n", 0, -1) + 1
    for end in range(begin + 1, len(data) - 1):
        path.write_bytes(data[:end])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert records_of(path) == [{"a": 1}]
        assert "t.jsonl is cut off in line 3" in caplog.text
    path.write_bytes(data[:-1])  # only the line break is missing: the line is whole
    assert records_of(path) == [{"a": 1}, {"name": "Zoë 🚀"}]


def test_damage_elsewhere_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for damage in ('{"a":\n{"b":1}\n', '{"a":\n'):
        path.write_text(HEADER + damage)
        with pytest.raises(TraceError, match=r"t\.jsonl, line 2 is not JSON"):
            records_of(path)
    path.write_text(HEADER + "\n[]\n")
    with pytest.raises(TraceError, match=r"t\.jsonl, line 3 is list, not an object"):
        records_of(path)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("", "is empty"),
        ('{"kind"', "line 1 is not JSON"),
        ("[]\n", "line 1 is list"),
        (
            '{"schema_version":2,"kind":"decode"}\n',
            "schema_version 2 and kind 'decode'; expected version 1 of decode",
        ),
        (
            '{"schema_version":1,"kind":"profile"}\n',
            "kind 'profile'.*as `outrider generate --trace` writes it",
        ),
        ('{"kind":"decode"}\n', "schema_version None"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, first: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(first)
    with pytest.raises(TraceError, match=message):
        read_lines(tmp_path / "t.jsonl", "decode")


def test_lines_without_a_file_are_read_the_same_way(caplog: pytest.LogCaptureFixture) -> None:
    lines = [HEADER.strip(), json.dumps({"a": 1}), '{"b']
    assert records_of(lines) == [{"a": 1}]
    assert "the trace is cut off in line 3" in caplog.text
    with pytest.raises(TraceError, match="the trace, line 2 is not JSON"):
        records_of([lines[0], lines[2], lines[1]])
