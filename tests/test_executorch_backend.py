"""ExecuTorch programs by the C++ shim and by torch: parity, rollback, the promises of the protocol, the build."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("executorch", reason="executorch is not installed")

from outrider.contracts import Graph, TopK, TopRows
from outrider.errors import BackendError, ContextError, UsageError
from outrider.targets.executorch import ExecutorchGraph
from outrider.targets.executorch_shim import build, program
from outrider.targets.executorch_shim.build import built_shim, executorch_wheel
from outrider.targets.executorch_threads import _pool
from tests import families
from tests.pte import TinyPte, tiny_pte

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # torchao and executorch warn about themselves when imported
RUNTIMES = ("shim", "torch")
LLAMA = ("llama", "fp32", "buffer", (16,), (0,))
QUANTIZED = ("llama", "8da4w")
SPLIT = ("gemma3", "fp32", "split", (1, 8))
QUANTIZED_SPLIT = ("llama", "8da4w", "split", (8,))  # every width takes half a minute to lower
EVERY = pytest.mark.parametrize("made", [LLAMA, SPLIT], ids=["buffer", "split"])


def load(made: tuple[Any, ...] | TinyPte, runtime: str = "shim", **changes: Any) -> ExecutorchGraph:
    pte = made if isinstance(made, TinyPte) else tiny_pte(*made)
    threads = changes.pop("threads", 1)
    return ExecutorchGraph.load(pte.path, {**pte.meta, **changes}, threads=threads, runtime=runtime)


def without_names(made: tuple[Any, ...]) -> dict[str, Any]:
    """A description that makes the cache of a buffer program unreachable, as it is through torch."""
    return {"cache": [f"absent.{name}" for name in tiny_pte(*made).meta["cache"]]}


@pytest.mark.parametrize("runtime", RUNTIMES)
@EVERY
def test_graph_equals_transformers_through_prefill_decode_tree_rollback_and_window(
    made: tuple[Any, ...], runtime: str
) -> None:
    model = tiny_pte(*made).model
    tolerance = 1e-4 if made[0] == "llama" else 1e-3
    families.check_decoding(
        load(made, runtime), lambda tokens: families.reference_logits(model, tokens), tolerance
    )


def test_a_cache_that_cannot_be_reached_is_rolled_back_by_running_the_path_again() -> None:
    model = tiny_pte(*LLAMA).model
    graph = load(LLAMA, **without_names(LLAMA))
    assert graph._runner._cache[0] is None
    assert not graph.keeps_rows
    with pytest.raises(BackendError, match="out of reach: ExecuTorch holds it"):
        graph.keep(0)
    families.check_decoding(graph, lambda tokens: families.reference_logits(model, tokens), 1e-4)


def test_running_again_refuses_rows_that_are_no_whole_path() -> None:
    graph = load(LLAMA, **without_names(LLAMA))
    graph.forward([5, 6, 7])
    with pytest.raises(ValueError, match=r"rows \[2\] are not whole paths"):
        graph.commit([2])


def test_the_shim_reaches_the_cache_by_the_names_that_the_export_gives() -> None:
    graph = load(LLAMA)
    assert all(part is not None for part in graph._runner._cache)
    assert len(graph._runner._cache) == 2 * graph.meta.layers


@EVERY
def test_rows_that_were_put_aside_come_back_bit_for_bit(made: tuple[Any, ...]) -> None:
    families.check_rows_come_back(load(made))


@EVERY
def test_a_tree_on_an_empty_cache_uses_the_positions_it_was_given(made: tuple[Any, ...]) -> None:
    model = tiny_pte(*made).model
    graph = load(made)
    parents, tokens = [-1, 0, 0, 1, 2], [5, 6, 7, 8, 9]
    output = graph.forward(tokens, families.depths(parents), families.tree_mask(parents), logits=[4, 0, 3])
    for row, node in enumerate([4, 0, 3]):
        path = [tokens[i] for i in families.path_to(parents, node)]
        np.testing.assert_allclose(output.logits[row], families.reference_logits(model, path)[-1], atol=1e-3)
    graph.commit([0, 2, 4])
    expected = families.reference_logits(model, [5, 7, 9, 3])[-1]
    np.testing.assert_allclose(graph.forward([3]).logits[0], expected, atol=1e-3)


def test_hidden_states_come_from_the_layers_that_were_exported() -> None:
    graph = load(LLAMA)
    with torch.no_grad():
        states = tiny_pte(*LLAMA).model(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    output = graph.forward([1, 2, 3], logits="none", hidden=(0,))
    np.testing.assert_allclose(output.hidden[0], states[1][0].numpy(), atol=1e-4)
    assert output.logits is None
    with pytest.raises(ValueError, match=r"hidden layers \[1\] were not exported"):
        graph.forward([1], hidden=(1,))


@EVERY
def test_only_the_rows_asked_for_are_returned(made: tuple[Any, ...]) -> None:
    graph = load(made)
    tokens = [4, 3, 2, 1, 9]
    everything = graph.forward(tokens).logits.copy()
    for request, rows in (("last", [4]), ([3, 0], [3, 0]), ([2], [2])):
        np.testing.assert_array_equal(graph.forward(tokens, logits=request).logits, everything[rows])
    assert graph.forward(tokens, logits="none").logits is None
    top = graph.forward(tokens, logits=TopK(3)).logits
    assert isinstance(top, TopRows)
    np.testing.assert_array_equal(top.ids, np.argsort(-everything, axis=1, kind="stable")[:, :3])


@EVERY
def test_a_forward_does_not_move_the_length_and_uncommitted_rows_vanish(made: tuple[Any, ...]) -> None:
    graph = load(made)
    assert isinstance(graph, Graph)
    graph.forward([1, 2, 3])
    graph.commit([0, 1])
    expected = graph.forward([7]).logits.copy()
    graph.forward([8, 8, 8, 8])
    assert graph.length == 2
    np.testing.assert_array_equal(graph.forward([7]).logits, expected)
    with pytest.raises(ValueError, match="not among the 1"):
        graph.commit([1])


@pytest.mark.parametrize(
    "made", [LLAMA, QUANTIZED, SPLIT, QUANTIZED_SPLIT], ids=["fp32", "8da4w", "split", "8da4w-split"]
)
def test_rows_do_not_depend_on_width_or_later_rows(made: tuple[Any, ...]) -> None:
    graph = load(made)
    graph.forward([11, 12, 13])
    graph.commit([0, 1, 2])
    suffixes = ([20, 21, 22, 23, 24, 25], [90, 80, 70, 60, 50, 40])
    rows = [
        graph.forward([30, *suffix[:extra]]).logits[0].copy()
        for extra in (0, 1, 2, 4, 6)
        for suffix in suffixes
    ]
    for row in rows[1:]:
        np.testing.assert_allclose(row, rows[0], atol=2e-5 * np.abs(rows[0]).max(), rtol=0)


STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, families.VOCAB - 1)), min_size=1, max_size=6),
        st.integers(0, 6),  # the node whose path is kept
        st.booleans(),  # or nothing is
        st.integers(0, 3),  # how many tokens are forgotten afterwards
    ),
    min_size=1,
    max_size=6,
)


@given(STEPS)
@settings(max_examples=15, deadline=None)
def test_random_trees_kept_and_rejected_leave_the_logits_of_a_replay_in_both_runtimes(steps: Any) -> None:
    graphs = [_opened(QUANTIZED, runtime) for runtime in RUNTIMES]
    text: list[int] = []
    for graph in graphs:
        graph.truncate(0)
    for nodes, kept, nothing, forgotten in steps:
        parents = [parent % (index + 1) - 1 for index, (parent, _) in enumerate(nodes)]
        tokens = [token for _, token in nodes]
        path = [] if nothing else families.path_to(parents, kept % len(nodes))
        places = len(text) + families.depths(parents)
        found = [graph.forward(tokens, places, families.tree_mask(parents)).logits.copy() for graph in graphs]
        np.testing.assert_array_equal(*found)
        text = [*text, *(tokens[node] for node in path)]
        text = text[: max(0, len(text) - forgotten)]
        for graph in graphs:
            graph.commit(path)
            graph.truncate(len(text))
    replay = _opened(QUANTIZED, "shim", copy=1)
    replay.truncate(0)
    for token in text:
        replay.forward([token])
        replay.commit([0])
    expected = replay.forward([3, 1]).logits.copy()
    for graph in graphs:
        found = graph.forward([3, 1]).logits
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


_graphs: dict[Any, ExecutorchGraph] = {}


def _opened(made: tuple[Any, ...], runtime: str, copy: int = 0) -> ExecutorchGraph:
    key = (made, runtime, copy)
    if key not in _graphs:
        _graphs[key] = load(made, runtime)
    return _graphs[key]


def test_tokens_beyond_width_or_context_are_refused_by_name() -> None:
    graph = load(LLAMA)
    with pytest.raises(ValueError, match="17 tokens exceed the largest width of this graph, 16"):
        graph.forward([1] * 17)
    for _ in range(6):
        graph.forward([1] * 10, logits="none")
        graph.commit(range(10))
    with pytest.raises(ContextError, match=r"5 tokens after 60 .* exceed the context of 64"):
        graph.forward([1] * 5)
    expected = families.reference_logits(tiny_pte(*LLAMA).model, [1] * 64)[-4:]
    np.testing.assert_allclose(graph.forward([1] * 4).logits, expected, atol=1e-4)
    with pytest.raises(ValueError, match="cannot truncate to 61"):
        graph.truncate(61)


@pytest.mark.parametrize(
    ("made", "wrong", "said"),
    [
        (LLAMA, {"vocab_size": 7}, "has vocab_size 96, the manifest says 7"),
        (LLAMA, {"max_context": 99}, "has max_context 64, the manifest says 99"),
        (LLAMA, {"hidden_size": 4}, "has hidden_size 64, the manifest says 4"),
        (LLAMA, {"hidden_layers": [0, 1]}, "has 2 outputs, the manifest says 3"),
        (LLAMA, {"kv_heads": 3}, r"cache has the shape \(1, 2, 64, 16\), the manifest says \(1, 3, 64, 16\)"),
        (LLAMA, {"masks": ["full", "sliding"], "methods": {}}, "has 5 inputs, the manifest says 6"),
        (LLAMA, {"profile": "split", "widths": [4]}, "no method 'forward_w4'; it has forward"),
        (LLAMA, {"profile": "state"}, "profile 'state' is not known; known: buffer, split"),
        (SPLIT, {"widths": [1, 3, 8]}, "no method 'forward_w3'; it has forward_w1, forward_w8"),
        (SPLIT, {"head_dim": 5}, "has head_dim 32, the manifest says 5"),
        (SPLIT, {"layers": 3}, "outputs, the manifest says 7"),
        (SPLIT, {"widths": []}, "names no widths"),
    ],
)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_description_of_another_graph_is_refused_at_load_with_both_values(
    made: tuple[Any, ...], wrong: dict[str, Any], said: str, runtime: str
) -> None:
    if "kv_heads" in wrong and runtime == "torch":
        load(made, runtime, **wrong).close()  # torch's interface does not show the cache
        return
    with pytest.raises(BackendError, match=said):
        load(made, runtime, **wrong)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_missing_foreign_and_damaged_files_are_backend_errors(tmp_path: Path, runtime: str) -> None:
    pte = tiny_pte(*LLAMA)
    whole = pte.path.read_bytes()
    files = {
        "absent.pte": (None, "absent.pte does not exist"),
        "text.pte": (b"no program", "text.pte is not an ExecuTorch program"),
        "onnx.pte": (bytes(64), "onnx.pte is not an ExecuTorch program"),
        "cut.pte": (
            whole[: len(whole) // 2],
            rf"cut off: it has {len(whole) // 2} bytes and needs {len(whole)}",
        ),
        "hole.pte": (whole[:200] + bytes(4000) + whole[4200:], "cannot load .*hole.pte.*damaged"),
    }
    for name, (data, said) in files.items():
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(BackendError, match=said):
            ExecutorchGraph.load(path, pte.meta, runtime=runtime)
    with pytest.raises(BackendError, match="lacks 'max_context'"):
        ExecutorchGraph.load(pte.path, {k: v for k, v in pte.meta.items() if k != "max_context"})
    with pytest.raises(UsageError, match="runtime is 'c'; known: auto, shim, torch"):
        ExecutorchGraph.load(pte.path, pte.meta, runtime="c")  # type: ignore[arg-type]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_closed_graph_says_so_closes_twice_and_its_arrays_stay_readable(runtime: str) -> None:
    graph = load(LLAMA, runtime)
    logits = graph.forward([1, 2]).logits
    kept = logits.copy()
    graph.close()
    graph.close()
    with pytest.raises(BackendError, match="closed"):
        graph.forward([1])
    np.testing.assert_array_equal(logits, kept)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_graphs_with_different_numbers_of_threads_keep_their_own(runtime: str) -> None:
    wheel = executorch_wheel()
    graphs = [load(QUANTIZED, runtime, threads=n) for n in (1, None)]
    limit, most = _pool(wheel, os.getpid())
    used: list[int] = []

    def spy(number: int) -> int:
        used.append(number)
        return limit(number)

    for graph in graphs:
        graph._program._pool._limit = spy
    tokens = [4, 5, 6, 7, 8, 9]
    found = [graph.forward(tokens).logits.copy() for graph in (*graphs, graphs[0])]
    assert used == [1, min(most, len(os.sched_getaffinity(0))), 1]
    np.testing.assert_array_equal(found[0], found[1])
    with pytest.raises(BackendError, match=f"threads is {most + 1}, but ExecuTorch's pool has"):
        load(QUANTIZED, runtime, threads=most + 1)


def test_two_graphs_in_two_threads_get_what_they_get_alone() -> None:
    graphs = [load(LLAMA), load(QUANTIZED, threads=None)]
    alone = [graph.forward([1, 2, 3, 4]).logits.copy() for graph in graphs]
    same: list[bool] = []

    def repeat(graph: ExecutorchGraph, expected: np.ndarray) -> None:
        same.extend(np.array_equal(graph.forward([1, 2, 3, 4]).logits, expected) for _ in range(30))

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(graphs, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 60


ALONE = """
import json, os, sys
import numpy as np
from outrider.errors import BackendError
from outrider.targets.executorch import ExecutorchGraph

path, meta = sys.argv[1], json.loads(sys.argv[2])
graph = ExecutorchGraph.load(path, meta, threads=1, runtime="shim")
logits = graph.forward([1, 2, 3, 4]).logits.copy()
print(json.dumps({"heavy": [name for name in ("torch", "executorch", "onnxruntime") if name in sys.modules]}))
print(json.dumps({"logits": logits.tolist()}))
print(json.dumps({"resident_mb": int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6}), flush=True)
child = os.fork()
if child == 0:
    try:
        graph.forward([1])
    except BackendError as error:
        print(json.dumps({"after fork": str(error)}), flush=True)
    again = ExecutorchGraph.load(path, meta, threads=1, runtime="shim")
    os._exit(0 if np.array_equal(again.forward([1, 2, 3, 4]).logits, logits) else 1)
print(json.dumps({"child": os.waitpid(child, 0)[1]}))
"""


def test_the_shim_needs_no_torch_little_memory_and_a_fork_opens_its_own_graph() -> None:
    pte = tiny_pte(*QUANTIZED)
    command = [sys.executable, "-c", ALONE, str(pte.path), json.dumps(pte.meta)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = {name: value for line in done.stdout.splitlines() for name, value in json.loads(line).items()}
    assert said["heavy"] == []
    np.testing.assert_array_equal(said["logits"], load(QUANTIZED).forward([1, 2, 3, 4]).logits)
    assert said["resident_mb"] < 150
    assert "opened before a fork" in said["after fork"]
    assert said["child"] == 0
    assert done.stderr == ""  # ExecuTorch's own chatter is kept away


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and a process that has not loaded a shim yet."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    program.library.cache_clear()
    yield tmp_path / "home" / "executorch-shim"
    program.library.cache_clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes CXX a script that does this when it is asked to compile; $OUT is the file to write."""

    def make(action: str) -> None:
        script = tmp_path / "compiler"
        find = 'while [ "$1" != "-o" ]; do shift; done; OUT="$2"'
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\n{find}\n{action}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(script))

    return make


def test_without_a_compiler_the_error_says_what_to_install_and_auto_goes_through_torch(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendError, match=r"there is none on the PATH; install one .*apt install g\+\+"):
        load(QUANTIZED, "shim")
    with caplog.at_level(logging.WARNING):
        graph = load(QUANTIZED, "auto")
    assert graph.runtime == "torch"
    assert (
        "ExecuTorch runs through torch: running ExecuTorch without torch needs a C++17 compiler"
        in caplog.text
    )
    monkeypatch.setitem(sys.modules, "executorch.runtime", None)
    with pytest.raises(BackendError, match=r"needs a C\+\+17 compiler.*Through torch: .*is not installed"):
        load(QUANTIZED, "auto")
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    with pytest.raises(BackendError, match="CXX is 'no-such-compiler -v', which is not there"):
        load(QUANTIZED, "shim")


def test_a_shim_that_was_built_runs_where_the_compiler_is_gone(
    own_cache: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler('echo built > "$OUT"')
    made = built_shim(executorch_wheel())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert built_shim(executorch_wheel()) == made


def test_a_damaged_shim_is_built_again_and_one_of_another_source_is_left_alone(
    own_cache: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler('echo built > "$OUT"')
    first = built_shim(executorch_wheel())
    assert built_shim(executorch_wheel()) == first
    first.write_bytes(b"cut")
    assert built_shim(executorch_wheel()) == first
    assert first.read_bytes() == b"built\n"
    source = tmp_path / "shim.cpp"
    source.write_text("other", encoding="utf-8")
    monkeypatch.setattr(build, "SOURCE", source)
    assert built_shim(executorch_wheel()) != first
    assert len(list(own_cache.iterdir())) == 2


def test_processes_that_build_at_once_all_get_a_whole_shim(
    own_cache: Path, compiler: Callable[[str], None]
) -> None:
    compiler('printf half > "$OUT"; sleep 0.2; echo built > "$OUT"')
    made: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: made.append(built_shim(executorch_wheel()).read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [b"built\n"] * 4
    assert len(list(own_cache.iterdir())) == 1


def test_what_a_compiler_complains_about_and_what_cannot_be_loaded_or_written_are_backend_errors(
    own_cache: Path, compiler: Callable[[str], None]
) -> None:
    compiler('echo "shim.cpp:1: fatal error: module.h: no such thing" >&2; exit 1')
    with pytest.raises(BackendError, match=r"could not build .*fatal error: module.h.*C\+\+17"):
        load(QUANTIZED)
    assert list(own_cache.iterdir()) == []
    compiler('echo built > "$OUT"')
    with pytest.raises(BackendError, match=r"shim .* cannot be loaded: .*delete it to have it built again"):
        load(QUANTIZED)
    for path in own_cache.iterdir():
        path.unlink()
    own_cache.rmdir()
    own_cache.write_text("in the way")
    with pytest.raises(BackendError, match=r"cannot be written to .*OUTRIDER_HOME"):
        load(QUANTIZED)


def test_a_wheel_without_libraries_is_refused_and_none_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from outrider.errors import MissingExtraError

    (tmp_path / "executorch").mkdir()
    (tmp_path / "executorch" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "executorch", raising=False)
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(BackendError, match=r"executorch 9.9 in .* has no lib/ or include/ folder"):
        executorch_wheel()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtraError, match=r"pip install 'outrider\[executorch\]'"):
        executorch_wheel()
