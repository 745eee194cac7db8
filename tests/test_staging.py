"""A bundle takes its place whole or not at all, whatever ends the export, and whoever else writes there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ExportError, UsageError
from outrider.export import staging
from outrider.export.staging import fresh_folder
from outrider.manifest import MANIFEST_NAME

HOLD = """
import sys, time
from pathlib import Path
from outrider.export.staging import fresh_folder
with fresh_folder(Path(sys.argv[1]), False) as folder:
    (folder / "weights").write_bytes(b"half")
    print(folder, flush=True)
    time.sleep(600)
"""


def holding(output: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process in the middle of an export into `output`, and its unfinished folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def write_bundle(folder: Path, word: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST_NAME).write_text(word)


def test_what_a_killed_export_left_is_taken_away_by_the_next_one(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    process, left = holding(output)
    process.kill()
    process.communicate()
    assert (left / "weights").exists()
    with fresh_folder(output, False) as folder:
        write_bundle(folder, "new")
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_two_exports_into_one_folder_do_not_run_at_once(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    process, other = holding(output)
    try:
        with pytest.raises(UsageError, match=r"another export into .*bundle is running; wait for it"):
            fresh_folder(output, True).__enter__()
        assert (other / "weights").read_bytes() == b"half"
        with fresh_folder(tmp_path / "another", False) as folder:
            write_bundle(folder, "new")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    theirs = [".bundle.x.abcdefgh.partial", ".bundle.notes.partial", "bundle.abcdefgh.partial"]
    for name in theirs:
        (tmp_path / name).mkdir()
    with fresh_folder(tmp_path / "bundle", False) as folder:
        write_bundle(folder, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", *theirs}


def test_a_bundle_that_was_moved_aside_when_its_export_was_killed_comes_back(tmp_path: Path) -> None:
    """Killed between the two moves of a replacement, when nothing is in the bundle's place."""
    write_bundle(tmp_path / "old", "old")
    aside = tmp_path / ".bundle.abcdefgh.old"
    aside.mkdir()
    os.replace(tmp_path / "old", aside / "bundle")
    with pytest.raises(UsageError, match="already holds a bundle; --force replaces it"):
        fresh_folder(tmp_path / "bundle", False).__enter__()
    assert (tmp_path / "bundle" / MANIFEST_NAME).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_what_was_put_there_during_the_export_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    block = fresh_folder(output, False)
    write_bundle(block.__enter__(), "new")
    write_bundle(output, "of somebody else")
    with pytest.raises(UsageError, match="already holds a bundle; --force replaces it"):
        block.__exit__(None, None, None)
    assert (output / MANIFEST_NAME).read_text() == "of somebody else"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_place_that_no_folder_can_take_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is the folder that this runs in.*choose .*bundle"):
        fresh_folder(Path(), False).__enter__()
    with pytest.raises(UsageError, match="is a file system of its own"):
        fresh_folder(Path("/"), False).__enter__()


@pytest.mark.parametrize("way", ["link", "there/../link"])
def test_a_link_stays_and_what_it_leads_to_becomes_the_bundle(tmp_path: Path, way: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "link").symlink_to("../real")
    (tmp_path / "there").symlink_to("a/b")  # so there/.. is a, as for the system
    (tmp_path / "link").symlink_to("real")
    with fresh_folder(tmp_path / way, False) as folder:
        write_bundle(folder, "new")
    assert (tmp_path / way).is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link", "real", "there"]
    assert (tmp_path / "real" / MANIFEST_NAME).read_text() == "new"


def test_a_link_to_itself_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="is a link that leads to itself; choose another folder"):
        fresh_folder(tmp_path / "loop", True).__enter__()
    assert (tmp_path / "loop").is_symlink()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(**named: Any) -> str:
        raise OSError(number, os.strerror(number), str(named["dir"] / ".bundle.abcdefgh.partial"))

    monkeypatch.setattr(staging.tempfile, "mkdtemp", refused)
    with pytest.raises(ExportError, match=rf"{tmp_path} may not be written to \(.*\); choose another folder"):
        fresh_folder(tmp_path / "bundle", False).__enter__()


def test_an_error_of_a_file_elsewhere_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    block = fresh_folder(tmp_path / "bundle", False)
    block.__enter__()
    error = PermissionError(errno.EACCES, "Permission denied", "/models/weights.safetensors")
    with pytest.raises(ExportError, match=r"writing the bundle failed: .*/models/weights"):
        block.__exit__(type(error), error, None)
    assert list(tmp_path.iterdir()) == []


def test_without_locks_nothing_of_others_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {tmp_path / ".bundle.abcdefgh.partial", tmp_path / ".bundle.abcdefgh.old"}
    for path in left:
        path.mkdir()
    monkeypatch.setattr(staging, "fcntl", None)
    with fresh_folder(tmp_path / "bundle", False) as folder:
        write_bundle(folder, "new")
    assert left < set(tmp_path.iterdir())
    shutil.rmtree(tmp_path / "bundle")

    class NoLocks:
        LOCK_EX, LOCK_NB = 2, 4

        def flock(self, *_: int) -> None:
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr(staging, "fcntl", NoLocks())
    with fresh_folder(tmp_path / "bundle", False) as folder:
        write_bundle(folder, "new")
    assert left < set(tmp_path.iterdir())
