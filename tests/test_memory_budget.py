"""What a bundle takes is known before it is opened, and the largest plan that fits is the one that is opened."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.errors import BackendError, UsageError
from outrider.manifest import (
    FileEntry,
    GraphEntry,
    KvEntry,
    Manifest,
    RoleEntry,
    TokenizerEntry,
    describe_file,
    token_map_hash,
    write_manifest,
)
from outrider.power.governor import Policy
from outrider.runtime import memory_budget
from outrider.runtime.backends import BACKENDS
from outrider.runtime.memory_budget import (
    CODE_MB,
    PROCESS_MB,
    MemoryLimit,
    MemoryPlan,
    Room,
    asked_limit,
    choose_memory,
    held_mb,
)
from outrider.targets.fake import FakeGraph
from tests.cgroups import memory_cgroup

HUNGRY = Path(__file__).with_name("hungry.py")
ROWS = KvEntry("float32", "BHSD", 10, 4, 64, None)  # 20,480 bytes a token: 42 MB for 2,048
TARGET_MB, DRAFT_MB, CACHE_MB, TOKENS = 60, 40, 42, 2048


def graph(name: str, megabytes: int, **changes: Any) -> GraphEntry:
    entry = GraphEntry(
        backend="onnxruntime",
        unit="cpu",
        profile="inplace",
        files={name: FileEntry("0" * 64, megabytes * 1_000_000)},
        widths=None,
        prefill_width=1,
        kv=ROWS,
        max_context=TOKENS,
        vocab_size=328,
        recipe="int4",
    )
    return replace(entry, **changes)


SMOL = graph(
    "target.bin",
    104,
    kv=KvEntry("float32", "BHSD", 30, 3, 64),
    weights=134_479_872,
    prefill_width=512,
    options={"hidden_size": 576},
    vocab_size=49152,
)
PAIR = {"target": graph("target.bin", TARGET_MB), "draft": graph("draft.bin", DRAFT_MB)}
ALONE_MB = PROCESS_MB + TARGET_MB + CACHE_MB


def at_most(limit_mb: float) -> Room:
    return Room(0.0, MemoryLimit(limit_mb, "of the memory limit"), None)


def plan(limit_mb: float | None = None, free_mb: float | None = None, **wishes: int) -> MemoryPlan:
    limit = None if limit_mb is None else MemoryLimit(limit_mb, "of the memory limit")
    free = None if free_mb is None else MemoryLimit(free_mb, "that the machine has free now", 128.0)
    return choose_memory(PAIR, wishes, Room(20.0, limit, free))


@pytest.mark.parametrize(
    ("beyond_alone_mb", "draft", "context", "said"),
    [
        (98, 2048, 2048, ()),
        (77, 1024, 2048, ("the draft remembers 1024 of 2048 tokens",)),
        (61, 256, 2048, ("the draft remembers 256 of 2048 tokens",)),
        (1, None, 2048, ("the draft model is left out, n-gram lookup still drafts",)),
        (-36, None, 256, ("the draft model is left out", "the context is 256 of 2048 tokens")),
    ],
)
def test_the_next_smaller_plan_is_taken_and_said(
    beyond_alone_mb: float, draft: int | None, context: int, said: tuple[str, ...]
) -> None:
    found = plan(ALONE_MB + beyond_alone_mb)
    assert (found.draft and found.draft.context, found.target.context) == (draft, context)
    assert found.peak_mb <= ALONE_MB + beyond_alone_mb
    assert len(found.notes) == len(said)
    assert all(note.startswith(start) for note, start in zip(found.notes, said, strict=True))
    reserve_mb = 128 if draft else 0  # that a draft must leave free, or it would be released at once
    free = plan(free_mb=ALONE_MB + beyond_alone_mb - 20 + reserve_mb)
    assert (free.target, free.draft) == (found.target, found.draft)


def test_prompts_are_read_in_shorter_chunks_before_the_draft_loses_anything() -> None:
    """The shapes of SmolLM2-135M: a gate projection of 1,536 rows, found from the number of weights."""
    pair = {"target": SMOL, "draft": SMOL}
    whole = choose_memory(pair, {}, Room(0.0, None, None))
    assert whole.target.scratch_mb == pytest.approx(4e-6 * (512 * 10 * 1536 + 16 * 49152))
    short = choose_memory(pair, {}, at_most(whole.peak_mb - 1))
    assert (short.chunk, short.draft and short.draft.context) == (128, 2048)
    assert whole.peak_mb - short.peak_mb == pytest.approx(2 * 4e-6 * 384 * 10 * 1536)
    assert short.notes[0].startswith("prompts are read 128 tokens at a time")
    alone = choose_memory({"target": SMOL}, {}, Room(0.0, None, None))
    without = choose_memory(pair, {}, at_most(alone.peak_mb))  # long chunks are worth more than nothing
    assert (without.chunk, without.draft, len(without.notes)) == (512, None, 1)
    least = choose_memory(pair, {}, at_most(alone.peak_mb - 1))
    assert (least.chunk, least.draft, least.target.context) == (128, None, 2048)
    assert [note.partition(":")[0] for note in least.notes] == [
        "the draft model is left out, n-gram lookup still drafts",
        "prompts are read 128 tokens at a time",
    ]
    static = {role: replace(SMOL, profile="split") for role in pair}  # chunks stay as they were compiled
    assert choose_memory(static, {}, at_most(whole.peak_mb - 1)).chunk == 512


def test_a_draft_that_would_come_close_to_the_limit_of_the_process_is_not_planned() -> None:
    """The governor would release it as soon as its cache is full: prompts are read in shorter chunks, and it fits."""
    whole = choose_memory({"target": SMOL, "draft": SMOL}, {"draft": 2048}, Room(0.0, None, None))
    for share, chunk in ((0.975, 128), (0.965, 512)):
        limit = asked_limit(whole.steady_mb / share, "of the memory limit")
        found = choose_memory({"target": SMOL, "draft": SMOL}, {"draft": 2048}, Room(0.0, limit, None))
        assert (found.draft is not None, found.chunk) == (True, chunk)


@pytest.mark.parametrize("mb", ["12", True, float("nan"), -5.0, 0, None, 1e12, [500]], ids=repr)
def test_what_is_no_amount_of_memory_is_refused_with_the_value(mb: Any) -> None:
    with pytest.raises(UsageError, match=r"memory_limit is .*" + re.escape(repr(mb))):
        asked_limit(mb, "of the memory limit")
    if mb is not None:
        with pytest.raises(UsageError, match=r"memory_limit_mb is .*" + re.escape(repr(mb))):
            Policy(memory_limit_mb=mb)


def test_numbers_of_numpy_are_amounts_of_memory() -> None:
    assert asked_limit(np.float32(512), "of the memory limit").mb == 512
    assert Policy(memory_limit_mb=np.int64(512)).memory_limit_mb == 512


def test_macos_tells_what_a_process_holds_by_its_task_s_information(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for its C library: nobody has run this on a Mac yet."""

    def proc_pidinfo(process: int, flavor: int, argument: Any, buffer: Any, size: int) -> int:
        assert (process, flavor, argument.value, size) == (os.getpid(), 4, 0, 96)
        buffer[0], buffer[1] = 9_000_000_000, 250_000_000  # virtual, resident
        return size

    monkeypatch.setattr(memory_budget.sys, "platform", "darwin")
    for told, held in ((proc_pidinfo, 250.0), (lambda *_: 0, 0.0)):
        library = type("C", (), {"proc_pidinfo": staticmethod(told)})
        monkeypatch.setattr(memory_budget.ctypes, "CDLL", lambda _, library=library: library)
        assert held_mb() == held


def test_contexts_that_were_asked_for_are_kept_and_what_cannot_be_names_the_smallest_plan() -> None:
    assert plan(ALONE_MB + 77, draft=2048).draft is None
    assert plan(target=512).draft == plan(target=512, draft=1024).draft
    with pytest.raises(
        UsageError, match=r"into the 151 MB of the memory limit.*: 187 MB at most: .*2048 tokens"
    ):
        plan(151, target=2048)
    assert plan(151).target.context == 256
    with pytest.raises(
        UsageError, match=r"150 MB that the machine .* beside 20 MB .*a max_context below 2048"
    ):
        plan(free_mb=150, target=2048)


def test_a_description_edited_by_hand_is_refused_in_words() -> None:
    broken = graph("target.bin", TARGET_MB, options={"hidden_size": "wide"})
    with pytest.raises(BackendError, match=r"description cannot be read .*'wide'.*export the bundle again"):
        choose_memory({"target": broken}, {}, Room(0.0, None, None))


def test_a_process_that_holds_more_already_has_less_room() -> None:
    held_mb = 400.0
    found = choose_memory(PAIR, {}, Room(held_mb, None, None))
    assert found.process_mb == held_mb + CODE_MB
    with pytest.raises(UsageError, match="of the memory limit"):
        choose_memory(PAIR, {}, Room(held_mb, MemoryLimit(held_mb, "of the memory limit"), None))


@pytest.fixture
def hungry_bundle(tmp_path: Path, byte_level_bpe: Any) -> Path:
    """A pair whose fake graphs, opened by `hungry.py`, really take what they say; its files are holes."""
    (tmp_path / "tokenizer.json").write_text(byte_level_bpe.to_str())
    for entry in PAIR.values():
        for name, file in entry.files.items():
            with (tmp_path / name).open("wb") as hole:
                hole.truncate(file.bytes)
    files = {"tokenizer.json": describe_file(tmp_path / "tokenizer.json")}
    words = TokenizerEntry(token_map_hash(json.loads(byte_level_bpe.to_str())), files, eos_ids=(0,))
    roles = {role: RoleEntry((entry,)) for role, entry in PAIR.items()}
    write_manifest(tmp_path, Manifest("0", (), roles, words, TOKENS, "host"))
    return tmp_path


def hungry(
    bundle: Path, limit_mb: float | None, cgroup: Path | None, careless: bool = False, growing: bool = False
) -> Any:
    """What `hungry.py` prints, or the signal that killed it."""
    words = [str(bundle), str(limit_mb or ""), str(cgroup or ""), "careless" * careless, "growing" * growing]
    done = subprocess.run([sys.executable, str(HUNGRY), *words], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return signal.Signals(-done.returncode)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_resident_memory_stays_within_the_limit_and_a_smaller_plan_saves_from_being_killed(
    hungry_bundle: Path,
) -> None:
    """Under a real cgroup where one can be made; else resident memory is watched only."""
    limit_mb = ALONE_MB + 10.0
    free = hungry(hungry_bundle, None, None, careless=True)
    assert free["peak_mb"] > 1.05 * limit_mb
    with memory_cgroup(1.05 * limit_mb) as cgroup:
        held = hungry(hungry_bundle, limit_mb, cgroup)
        assert held["peak_mb"] <= 1.05 * limit_mb
        assert (held["drafters"], held["context"]) == (["lookup"], TOKENS)
        assert held["tokens"] == free["tokens"]
        if cgroup is not None:
            assert hungry(hungry_bundle, None, cgroup, careless=True) == signal.SIGKILL
            now = hungry(hungry_bundle, None, cgroup)
            assert (now["drafters"], now["tokens"]) == (["lookup"], free["tokens"])


def test_a_process_that_outgrows_its_plan_gives_the_draft_up_before_its_limit(
    hungry_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_mb = 300.0  # all of it is planned to take 285
    held = hungry(hungry_bundle, limit_mb, None, growing=True)
    assert held["drafters"] == ["lookup", "model"]
    assert "memory=near_limit" in held["flags"]
    assert held["peak_mb"] <= 1.05 * limit_mb
    assert held["left_mb"] + DRAFT_MB + CACHE_MB > 1.05 * limit_mb  # what it would have grown to
    monkeypatch.setitem(
        BACKENDS, "onnxruntime", lambda _, entry, options: FakeGraph(entry.vocab_size, TOKENS, seed=3)
    )
    with outrider.load(hungry_bundle, governor=False) as pipeline:
        assert (
            tuple(held["tokens"]) == pipeline.generate("the fox", max_tokens=24, ignore_eos=True, k=1).tokens
        )


FREED = """
import numpy as np
from outrider.runtime.memory_budget import held_mb
from outrider.targets.freed_memory import return_freed_memory
kept = []
for _ in range(2):  # freed blocks of this size are from the heap the second time; a last one is in the way
    blocks = [np.ones(2**18, np.float32) for _ in range(60)]
    kept.append(np.ones(2**18, np.float32))
    del blocks
before_mb = held_mb()
print(return_freed_memory(), before_mb - held_mb())
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed, and can be told"
)
def test_what_glibc_keeps_of_freed_matrices_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    returned, fell_mb = done.stdout.split()
    assert returned == "True"
    assert float(fell_mb) > 30.0
