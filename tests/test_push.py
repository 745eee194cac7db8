"""A push copies what changed, proves it, and never leaves half a bundle that looks whole."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import BundleError, DeviceError, UsageError
from outrider.manifest import (
    FileEntry,
    GraphEntry,
    KvEntry,
    Manifest,
    RoleEntry,
    Source,
    TokenizerEntry,
    describe_file,
    read_manifest,
    verify,
    write_manifest,
)
from outrider.power.sensors.system import CommandResult
from outrider.runtime.push import FOLDER, Adb, commands, find_phone, push_bundle, selected
from tests.fake_adb import FakeAdb

GRAPHS = {
    "target/graph.onnx": ("target", "cpu"),
    "target/vulkan/model.pte": ("target", "gpu"),
    "draft/npu/w1.onnx": ("draft", "npu"),
    "draft/graph.onnx": ("draft", "cpu"),
}
NAME = "my bundle"  # a name that a shell must not split
PLACE = f"{FOLDER}/{NAME}"


def graph(name: str, unit: str, files: dict[str, FileEntry], target_sha256: str | None) -> GraphEntry:
    return GraphEntry(
        backend="onnxruntime",
        unit=unit,
        profile="split",
        files=files,
        widths=(1, 2),
        prefill_width=64,
        kv=KvEntry("float32", "BHSD", 1, 1, 8),
        max_context=32,
        vocab_size=30,
        recipe="int4",
        target_sha256=target_sha256,
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of four graphs for three units, in a folder with a space in its name."""
    folder = tmp_path / NAME
    for index, name in enumerate([*GRAPHS, "tokenizer.json"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes([index]) * (1000 + index))
    entries = {name: describe_file(folder / name) for name in [*GRAPHS, "tokenizer.json"]}
    target = entries["target/graph.onnx"].sha256
    roles: dict[str, list[GraphEntry]] = {"target": [], "draft": []}
    for name, (role, unit) in GRAPHS.items():
        roles[role].append(graph(name, unit, {name: entries[name]}, target if role == "draft" else None))
    manifest = Manifest(
        "0.1.0",
        (Source("target", "tiny"),),
        {role: RoleEntry(tuple(graphs)) for role, graphs in roles.items()},
        TokenizerEntry("0" * 64, {"tokenizer.json": entries["tokenizer.json"]}, (1,)),
        32,
        "snapdragon-8-gen3",
    )
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def adb(tmp_path: Path) -> FakeAdb:
    """A phone in a folder, and what runs adb's commands on it."""
    return FakeAdb.install(tmp_path / "bin")


def on_phone(adb: FakeAdb, place: str = PLACE) -> dict[str, bytes]:
    root = adb.path(place)
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_every_file_arrives_and_the_manifest_last(adb: FakeAdb, bundle: Path) -> None:
    pushed = push_bundle(bundle, run=adb)
    assert pushed.folder == PLACE
    assert set(pushed.copied) == {*GRAPHS, "tokenizer.json"}
    assert pushed.copied_bytes == sum((bundle / name).stat().st_size for name in pushed.copied)
    assert verify(adb.path(PLACE), full=True) == read_manifest(bundle)
    assert adb.pushes[-1] == f"{PLACE}/manifest.json.partial"
    assert len(adb.pushes) == 6
    assert set(on_phone(adb)) == {*GRAPHS, "tokenizer.json", "manifest.json"}
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in adb.path(PLACE).rglob("*"))
    assert adb.path(FOLDER).stat().st_mode & 0o111 == 0o111


def test_a_second_push_copies_nothing(adb: FakeAdb, bundle: Path) -> None:
    push_bundle(bundle, run=adb)
    before = len(adb.pushes)
    again = push_bundle(bundle, run=adb)
    assert (again.copied, again.copied_bytes, len(again.kept)) == ((), 0, 5)
    assert len(adb.pushes) == before


def test_what_changed_there_in_place_is_copied_again_though_its_size_is_the_same(
    adb: FakeAdb, bundle: Path
) -> None:
    push_bundle(bundle, run=adb)
    damaged = adb.path(f"{PLACE}/draft/graph.onnx")
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    assert push_bundle(bundle, run=adb).copied == ("draft/graph.onnx",)
    verify(adb.path(PLACE), full=True)


def test_files_that_are_not_part_of_the_bundle_are_told_and_left(adb: FakeAdb, bundle: Path) -> None:
    push_bundle(bundle, run=adb)
    adb.path(f"{PLACE}/draft/old.onnx").write_bytes(b"old")
    assert push_bundle(bundle, run=adb).strays == ("draft/old.onnx",)
    assert adb.path(f"{PLACE}/draft/old.onnx").exists()


@pytest.mark.parametrize("copies", [1, 3, 5])
def test_a_push_that_breaks_off_leaves_no_manifest_and_the_next_one_goes_on(
    adb: FakeAdb, bundle: Path, copies: int
) -> None:
    adb.tell(fails_at=copies)
    with pytest.raises(DeviceError, match=r"could not be copied.*No space left on device; free space"):
        push_bundle(bundle, run=adb)
    assert not adb.path(f"{PLACE}/manifest.json").exists()
    assert len(push_bundle(bundle, run=adb).copied) == 5 - (copies - 1)
    verify(adb.path(PLACE), full=True)


def test_a_push_that_breaks_off_over_an_old_bundle_takes_the_old_manifest_away(
    adb: FakeAdb, bundle: Path
) -> None:
    push_bundle(bundle, run=adb)
    (bundle / "tokenizer.json").write_bytes(b"another")
    entry = describe_file(bundle / "tokenizer.json")
    raw = json.loads((bundle / "manifest.json").read_text())
    raw["tokenizer"]["files"]["tokenizer.json"] = {"sha256": entry.sha256, "bytes": entry.bytes}
    (bundle / "manifest.json").write_text(json.dumps(raw))
    adb.tell(fails_at=7)
    with pytest.raises(DeviceError):
        push_bundle(bundle, run=adb)
    assert not adb.path(f"{PLACE}/manifest.json").exists()
    assert push_bundle(bundle, run=adb).copied == ("tokenizer.json",)
    verify(adb.path(PLACE), full=True)


def test_an_interrupt_leaves_no_manifest(adb: FakeAdb, bundle: Path) -> None:
    adb.tell(interrupted_at=2)
    with pytest.raises(KeyboardInterrupt):
        push_bundle(bundle, run=adb)
    assert len(adb.pushes) == 2
    assert "manifest.json" not in on_phone(adb)
    assert "target/graph.onnx" not in push_bundle(bundle, run=adb).copied
    verify(adb.path(PLACE), full=True)


def test_what_arrives_damaged_is_copied_once_more(adb: FakeAdb, bundle: Path) -> None:
    adb.tell(damage={"w1.onnx": 1})
    push_bundle(bundle, run=adb)
    assert adb.pushes.count(f"{PLACE}/draft/npu/w1.onnx") == 2
    verify(adb.path(PLACE), full=True)


def test_what_arrives_damaged_twice_is_an_error_that_names_both_hashes(adb: FakeAdb, bundle: Path) -> None:
    adb.tell(damage={"w1.onnx": 2})
    right = describe_file(bundle / "draft/npu/w1.onnx").sha256
    data = (bundle / "draft/npu/w1.onnx").read_bytes()
    wrong = hashlib.sha256(bytes([data[0] ^ 1]) + data[1:]).hexdigest()
    with pytest.raises(
        DeviceError, match=f"w1.onnx arrived with sha256 {wrong} twice.*{right}.*another cable"
    ):
        push_bundle(bundle, run=adb)
    assert "manifest.json" not in on_phone(adb)


def test_a_manifest_that_arrives_damaged_is_not_put_in_its_place(adb: FakeAdb, bundle: Path) -> None:
    adb.tell(damage={"manifest.json.partial": 1})
    with pytest.raises(DeviceError, match="manifest arrived damaged"):
        push_bundle(bundle, run=adb)
    assert "manifest.json" not in on_phone(adb)
    assert push_bundle(bundle, run=adb).copied == ()
    verify(adb.path(PLACE), full=True)


def test_a_phone_without_sha256sum_is_refused_before_anything_is_copied(adb: FakeAdb, bundle: Path) -> None:
    adb.tell(lacks=["sha256sum"])
    with pytest.raises(DeviceError, match="PHONE1 has no sha256sum"):
        push_bundle(bundle, run=adb)
    assert adb.pushes == []


@pytest.mark.parametrize("copies", [1, 4, 6])
def test_a_phone_that_is_unplugged_leaves_no_manifest_and_the_next_push_goes_on(
    adb: FakeAdb, bundle: Path, copies: int
) -> None:
    adb.tell(gone_at=copies)
    with pytest.raises(DeviceError, match=r"could not be copied to .*EOF"):
        push_bundle(bundle, run=adb)
    assert "manifest.json" not in on_phone(adb)
    with pytest.raises(DeviceError, match="no phone is there"):
        push_bundle(bundle, run=adb)
    adb.tell(phones={"PHONE1": "device"})
    assert len(push_bundle(bundle, run=adb).copied) == 5 - (copies - 1)
    verify(adb.path(PLACE), full=True)


def test_a_phone_that_is_unplugged_while_it_hashes_is_named(adb: FakeAdb, bundle: Path) -> None:
    def unplugged(command: Any, timeout_s: float) -> Any:
        if "sha256sum" in command[-1] and "command -v" not in command[-1]:
            adb.tell(phones={})
        return adb(command, timeout_s)

    with pytest.raises(DeviceError, match=r"'PHONE1' not found; `adb devices` lists"):
        push_bundle(bundle, run=unplugged)


def test_too_little_space_is_told_before_anything_is_copied(adb: FakeAdb, bundle: Path) -> None:
    adb.tell(free_kb=64 * 1024)
    with pytest.raises(DeviceError, match=r"has 64 MB free at .*needs 64 MB.*--graphs"):
        push_bundle(bundle, run=adb)
    assert adb.pushes == []


def test_a_damaged_bundle_is_not_pushed(adb: FakeAdb, bundle: Path) -> None:
    (bundle / "draft/graph.onnx").write_bytes(b"y" * 1003)
    with pytest.raises(BundleError, match=r"draft/graph\.onnx"):
        push_bundle(bundle, run=adb)
    assert adb.calls == []


def test_a_folder_that_may_not_be_written_is_an_error_with_a_way_out(adb: FakeAdb, bundle: Path) -> None:
    adb.tell(unwritable=["/data/system"])
    with pytest.raises(DeviceError, match=r"Permission denied; choose a --folder"):
        push_bundle(bundle, run=adb, folder="/data/system/x")


def test_a_relative_folder_is_refused(bundle: Path) -> None:
    with pytest.raises(UsageError, match="must be an absolute path"):
        push_bundle(bundle, folder="outrider")


@pytest.mark.parametrize(
    ("phones", "serial", "error", "said"),
    [
        ({}, None, DeviceError, "no phone is there; plug one in"),
        ({"A": "unauthorized"}, None, DeviceError, "the phone A is unauthorized; unlock the phone and allow"),
        ({"A": "offline"}, "A", DeviceError, "is offline; unplug"),
        (
            {"A": "no permissions (missing udev rules?); see [http://example.com]"},
            None,
            DeviceError,
            "no permissions.*udev rules",
        ),
        (
            {"A": "device", "B": "device"},
            None,
            UsageError,
            "2 phones are there: A, B; choose one with --serial",
        ),
        ({"A": "device"}, "C", DeviceError, "no phone has the serial 'C'; there are: A"),
    ],
)
def test_a_phone_that_cannot_be_used_is_named_with_a_way_out(
    adb: FakeAdb, bundle: Path, phones: dict[str, str], serial: str | None, error: type[Exception], said: str
) -> None:
    adb.tell(phones=phones)
    with pytest.raises(error, match=said):
        push_bundle(bundle, run=adb, serial=serial)
    assert adb.pushes == []


def test_one_of_several_phones_can_be_chosen(adb: FakeAdb, bundle: Path) -> None:
    adb.tell(phones={"A": "unauthorized", "B:5555": "device"})
    assert push_bundle(bundle, run=adb, serial="B:5555").serial == "B:5555"
    assert all(call[:2] == ["-s", "B:5555"] for call in adb.calls if call != ["devices"])


def test_without_adb_the_error_says_what_to_install(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="adb is not installed; install Android's platform tools"):
        push_bundle(bundle)


def test_an_adb_that_hangs_or_prints_nonsense_is_an_error() -> None:
    def hangs(command: Any, timeout_s: float) -> CommandResult:
        return CommandResult(None, b"", f"adb did not answer within {timeout_s:g} s")

    with pytest.raises(DeviceError, match="did not answer"):
        find_phone(None, hangs)
    nonsense = Adb("A", lambda command, timeout_s: CommandResult(0, b"no such thing"))
    with pytest.raises(DeviceError, match="no free space in it"):
        nonsense.free_kb("/data")
    assert nonsense.hashes("/data", ["a"]) == {}


def test_output_with_carriage_returns_and_odd_names_is_read() -> None:
    digest = "a" * 64
    lines = f"{digest}  draft/a b.onnx\r\n{digest}  c.onnx\r\n".encode()
    adb = Adb("A", lambda command, timeout_s: CommandResult(0, lines))
    assert adb.hashes("/data", ["draft/a b.onnx", "c.onnx"]) == {"draft/a b.onnx": digest, "c.onnx": digest}
    sizes = Adb("A", lambda command, timeout_s: CommandResult(0, b"12 ./draft/a b.onnx\r\n3 ./c.onnx\r\n"))
    assert sizes.sizes("/data") == {"draft/a b.onnx": 12, "c.onnx": 3}


def test_only_the_graphs_for_the_units_asked_for_are_copied(adb: FakeAdb, bundle: Path) -> None:
    push_bundle(bundle, run=adb, units=("npu", "gpu"))
    assert set(on_phone(adb)) == {
        "target/vulkan/model.pte",
        "draft/npu/w1.onnx",
        "tokenizer.json",
        "manifest.json",
    }
    there = verify(adb.path(PLACE), full=True)
    target, draft = (there.roles[role].graphs for role in ("target", "draft"))
    assert [graph.unit for graph in (*target, *draft)] == ["gpu", "npu"]
    assert draft[0].target_sha256 == target[0].files[target[0].path].sha256


def test_a_wider_push_adds_what_a_narrower_one_left_out(adb: FakeAdb, bundle: Path) -> None:
    push_bundle(bundle, run=adb, units=("cpu",))
    wider = push_bundle(bundle, run=adb)
    assert set(wider.copied) == {"target/vulkan/model.pte", "draft/npu/w1.onnx"}
    assert verify(adb.path(PLACE), full=True) == read_manifest(bundle)


def test_units_that_leave_a_role_without_a_graph_are_refused(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    with pytest.raises(UsageError, match=r"--graphs npu leaves the target without a graph; it has: cpu, gpu"):
        selected(manifest, ("npu",))
    with pytest.raises(UsageError, match=r"--graphs dsp: no graph.*it has cpu, gpu, npu"):
        selected(manifest, ("cpu", "dsp"))
    assert selected(manifest, ()) is manifest


def test_core_ml_packages_are_refused_with_the_way_to_a_phone_of_apple(adb: FakeAdb, bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text().replace('"snapdragon-8-gen3"', '"iphone-16-pro"')
    raw = json.loads(text)
    graphs = raw["roles"]["draft"]["graphs"]
    npu = next(entry for entry in graphs if entry["unit"] == "npu")
    npu["backend"] = "coreml"
    (bundle / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(
        UsageError, match=r"for iphone-16-pro, holds Core ML packages .draft/coreml.*Xcode project"
    ):
        push_bundle(bundle, run=adb)
    assert adb.pushes == []
    assert set(push_bundle(bundle, run=adb, units=("cpu",)).copied) >= {
        "target/graph.onnx",
        "draft/graph.onnx",
    }


def test_the_command_prints_what_to_type_on_the_phone(
    adb: FakeAdb, bundle: Path, run_main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", adb.search_path)
    code, out, err = run_main("push", str(bundle), "--graphs", "cpu, npu")
    assert code == 0, err
    assert f"{PLACE} on PHONE1: 4 files copied (0.0 MB), 0 were there already; every SHA-256 is right" in out
    assert f"ssh -t -p 8022 127.0.0.1 'proot-distro login debian --bind {FOLDER}'" in out
    assert f"~/v/bin/outrider check '{PLACE}' --max-tokens 16" in out
    assert "adb -s PHONE1 forward tcp:8022 tcp:8022" in out
    adb.tell(phones={})
    code, _, err = run_main("push", str(bundle))
    assert code == 1
    assert "outrider: no phone is there" in err


def test_the_lines_to_type_survive_two_shells() -> None:
    """ssh hands its words to a second shell, and folders may have spaces."""
    forward, login, check, generate = commands("S 1", "/data/local/tmp/my bundles/a b")
    assert shlex.split(forward)[:3] == ["adb", "-s", "S 1"]
    remote = shlex.split(login)
    assert remote[:-1] == ["ssh", "-t", "-p", "8022", "127.0.0.1"]
    assert shlex.split(remote[-1])[-2:] == ["--bind", "/data/local/tmp/my bundles"]
    assert "/data/local/tmp/my bundles/a b" in shlex.split(check)
    assert shlex.split(generate)[-1] == "Why is the sky blue?"


def test_ctrl_c_during_a_copy_ends_the_command_with_a_message_and_no_manifest(
    adb: FakeAdb, bundle: Path
) -> None:
    adb.tell(interrupted_at=1)
    words = [sys.executable, "-m", "outrider", "push", str(bundle), "--json"]
    done = subprocess.run(
        words, env={**os.environ, "PATH": adb.search_path}, capture_output=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert b"outrider: interrupted" in done.stderr
    assert b"Traceback" not in done.stderr
    assert on_phone(adb) == {"target/graph.onnx": (bundle / "target/graph.onnx").read_bytes()[:500]}
