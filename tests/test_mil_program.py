"""The Core ML evaluator runs what coremltools saved, as torch computes it, and refuses what does not fit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import BackendError, MissingExtraError
from outrider.targets.coreml_reference import MilProgram
from outrider.targets.coreml_reference import schema as schema_module
from tests.mil_packages import (
    SINGLE,
    TINY,
    ct,
    edit_model,
    grid,
    mb,
    program,
    spec,
    tiny_answer,
    tiny_package,
    types,
)

# coremltools leaves folders of its own to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
HALF = np.float16


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_package(tmp_path_factory.mktemp("saved") / "tiny.mlpackage")


@pytest.fixture
def package(saved: Path, tmp_path: Path) -> Path:
    """A copy of the tiny package that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "tiny.mlpackage"))


@pytest.mark.parametrize("system", ["iOS15", "iOS16", "iOS17", "iOS18", "iOS26"])
def test_a_package_for_each_system_computes_what_torch_does(system: str, tmp_path: Path) -> None:
    path = tiny_package(tmp_path / "tiny.mlpackage", getattr(ct.target, system))
    x = grid(1, 5, 16).astype(SINGLE)
    y = MilProgram.load(path).predict({"x": x})["y"]
    assert y.dtype == SINGLE
    assert np.abs(y - tiny_answer(x)).max() < 1e-3


def test_a_float32_program_is_as_exact_as_torch(tmp_path: Path) -> None:
    path = tiny_package(tmp_path / "tiny.mlpackage", compute_precision=ct.precision.FLOAT32)
    x = grid(1, 5, 16).astype(SINGLE)
    assert np.abs(MilProgram.load(path).predict({"x": x})["y"] - tiny_answer(x)).max() < 1e-6


def test_values_are_stored_in_fp16_and_overflow_as_there(tmp_path: Path) -> None:
    path = program(tmp_path / "p.mlpackage", [spec(3)], lambda x: mb.mul(x=x, y=x, name="y"))
    y = MilProgram.load(path).predict({"x": np.array([255, 256, 0.1], HALF)})["y"]
    assert y.dtype == HALF
    assert y.tolist() == [HALF(65025), np.inf, HALF(SINGLE(HALF(0.1)) ** 2)]


def test_sums_accumulate_in_float32(tmp_path: Path) -> None:
    """Added one by one in fp16, 4096 ones stop at 2048."""
    weight = np.ones((1, 4096), HALF)
    path = program(
        tmp_path / "p.mlpackage", [spec(1, 4096)], lambda x: mb.linear(x=x, weight=weight, name="y")
    )
    assert MilProgram.load(path).predict({"x": np.ones((1, 4096), HALF)})["y"].item() == 4096


@pytest.mark.parametrize(
    ("dimension", "fits", "unfit", "said"),
    [
        (ct.EnumeratedShapes([(1, 1, 16), (1, 5, 16), (1, 9, 16)]), (1, 5, 9), (2, 10), r"\[1, 9, 16\]"),
        ((1, ct.RangeDim(2, 9, default=5), 16), (2, 3, 9), (1, 10), r"\[1, 2\.\.9, 16\]"),
    ],
    ids=["enumerated", "range"],
)
def test_flexible_shapes_are_run_and_others_refused(
    dimension: Any, fits: tuple[int, ...], unfit: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    tiny = MilProgram.load(tiny_package(tmp_path / "p.mlpackage", shape=dimension))
    for rows in fits:
        x = grid(1, rows, 16).astype(SINGLE)
        assert np.abs(tiny.predict({"x": x})["y"] - tiny_answer(x)).max() < 1e-3
    for rows in unfit:
        with pytest.raises(BackendError, match=rf"'x' has shape \[1, {rows}, 16\].*{said}"):
            tiny.predict({"x": grid(1, rows, 16).astype(SINGLE)})


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, r"'main', input 'x' is not given: an array float32 \[1, 5, 16\]"),
        ({"x": grid(1, 5, 16)}, "'x' has dtype float16; it takes float32"),
        ({"x": grid(1, 4, 16).astype(SINGLE)}, r"'x' has shape \[1, 4, 16\]; it takes \[1, 5, 16\]"),
        ({"x": grid(1, 5, 16).astype(SINGLE), "z": grid(1)}, "has no input 'z'; its inputs: x"),
        ({"x": [1.0]}, "'x' is a list; give a numpy array"),
    ],
    ids=["missing", "dtype", "shape", "unknown", "no array"],
)
def test_inputs_that_do_not_fit_are_refused_by_name(inputs: dict[str, Any], said: str, saved: Path) -> None:
    with pytest.raises(BackendError, match=said):
        MilProgram.load(saved).predict(inputs)


def counter(path: Path) -> Path:
    """y = the sum of all x so far, kept in a state; z = x's row of a table at the index given (may be out of range)."""

    def body(x: Any, index: Any, total: Any) -> Any:
        updated = mb.add(x=mb.read_state(input=total), y=x)
        kept = mb.coreml_update_state(state=total, value=updated)
        return mb.mul(x=kept, y=HALF(2), name="y"), mb.gather(x=x, indices=index, axis=0, name="z")

    states = mb.StateTensorSpec((4,), dtype=types.fp16)
    return program(path, [spec(4), spec(1, dtype=types.int32), states], body)


def counted(function: Any, value: float, state: Any, index: int = 0) -> list[float]:
    return function.predict({"x": np.full(4, value, HALF), "index": np.array([index], np.int32)}, state)[
        "y"
    ].tolist()


def test_a_state_outlives_a_prediction_and_is_its_owners_alone(tmp_path: Path) -> None:
    sums = MilProgram.load(counter(tmp_path / "p.mlpackage"))
    one, other = sums.make_state(), sums.make_state()
    assert counted(sums, 1, one) == [2] * 4
    assert counted(sums, 0.5, one) == [3] * 4
    assert counted(sums, 4, other) == [8] * 4
    assert one.read("total").tolist() == [1.5] * 4
    assert one.read("total").dtype == HALF
    one.write("total", np.array([1, 2, 3, 4], HALF))
    assert counted(sums, 1, one) == [4, 6, 8, 10]
    one.reset()
    assert counted(sums, 1, one) == [2] * 4


def test_a_prediction_that_fails_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    sums = MilProgram.load(counter(tmp_path / "p.mlpackage"))
    state = sums.make_state()
    counted(sums, 1, state)
    with pytest.raises(BackendError, match=r"'main': 'gather' \(z\).*7"):
        counted(sums, 1, state, index=7)
    assert state.read("total").tolist() == [1] * 4


def test_a_state_is_asked_for_and_checked(saved: Path, tmp_path: Path) -> None:
    sums, tiny = MilProgram.load(counter(tmp_path / "p.mlpackage")), MilProgram.load(saved)
    with pytest.raises(BackendError, match=r"'main' keeps state \(total\)"):
        counted(sums, 1, None)
    with pytest.raises(BackendError, match="does not belong to function 'main', whose states are: total"):
        counted(sums, 1, tiny.make_state())
    with pytest.raises(BackendError, match="whose states are: none"):
        tiny.predict({"x": grid(1, 5, 16).astype(SINGLE)}, sums.make_state())
    state = sums.make_state()
    with pytest.raises(BackendError, match=r"'total' is float16 \[4\], and float16 \[5\]"):
        state.write("total", np.zeros(5, HALF))
    with pytest.raises(BackendError, match="no state 'sum'; there are: total"):
        state.read("sum")


@pytest.fixture(scope="module")
def two_functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` takes a row and `three` takes three, through one palettized matrix and one plain one."""
    place = tmp_path_factory.mktemp("two")
    first, second = grid(64, 48, seed=1), grid(32, 64, seed=2)
    indices = np.random.default_rng(3).integers(0, 16, (32, 64)).astype(np.uint8)
    table = grid(1, 1, 16, 1, seed=4)

    def body(x: Any) -> Any:
        hidden = mb.relu(x=mb.linear(x=x, weight=first))
        packed = mb.constexpr_lut_to_dense(indices=indices.astype(types.np_uint4_dtype), lut=table)
        return mb.add(x=mb.linear(x=hidden, weight=second), y=mb.linear(x=hidden, weight=packed), name="y")

    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, rows in (("one", 1), ("three", 3)):
        path = program(place / f"{name}.mlpackage", [spec(rows, 48)], body)
        descriptor.add_function(str(path), src_function_name="main", target_function_name=name)
    descriptor.default_function_name = "three"
    ct.utils.save_multifunction(descriptor, str(place / "both.mlpackage"))
    return place / "both.mlpackage"


def test_every_function_of_a_package_runs(two_functions: Path) -> None:
    both, x = MilProgram.load(two_functions), grid(3, 48)
    assert sorted(both.functions) == ["one", "three"]
    whole = both.predict({"x": x})["y"]  # [3, 32]
    rows = [both.predict({"x": x[row : row + 1]}, function="one")["y"] for row in range(3)]
    assert np.abs(whole - np.concatenate(rows)).max() < 0.1  # of about 90: fp16 noise
    assert np.array_equal(MilProgram.load(two_functions, "one").predict({"x": x[:1]})["y"], rows[0])
    for absent in (lambda: both.predict({}, function="two"), lambda: MilProgram.load(two_functions, "two")):
        with pytest.raises(BackendError, match="has no function 'two'; it has: one, three"):
            absent()


def test_functions_share_their_weights_in_memory(two_functions: Path) -> None:
    both = MilProgram.load(two_functions)
    both.function("one").prepare()
    alone = both.constant_bytes
    assert alone >= 4 * (64 * 48 + 2 * 32 * 64)
    both.function("three").prepare()
    assert both.constant_bytes == alone


def test_a_table_that_is_only_looked_up_takes_no_memory(tmp_path: Path) -> None:
    table = grid(500, 32)
    path = program(
        tmp_path / "p.mlpackage",
        [spec(3, dtype=types.int32)],
        lambda ids: mb.gather(x=table, indices=ids, axis=0, name="y"),
    )
    looked = MilProgram.load(path)
    assert np.array_equal(looked.predict({"ids": np.array([3, 499, 0], np.int32)})["y"], table[[3, 499, 0]])
    assert looked.constant_bytes < 100


def test_values_are_freed_after_their_last_use(tmp_path: Path) -> None:
    """Thirty arrays of 1 MB one after another never take more than a few at once."""

    def body(x: Any) -> Any:
        for _ in range(30):
            x = mb.sin(x=x)
        return mb.reduce_max(x=x, axes=[0], keep_dims=True, name="y")

    chain, x = MilProgram.load(program(tmp_path / "p.mlpackage", [spec(2**18)], body)), grid(2**18)
    chain.function("main").prepare()
    tracemalloc.start()
    chain.predict({"x": x})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * 2**20


def test_values_inside_of_a_program_can_be_looked_at(saved: Path) -> None:
    tiny, x = MilProgram.load(saved), grid(1, 5, 16).astype(SINGLE)
    linear = next(each for each in tiny.function("main").definition.operations if each.type == "linear")
    inside = tiny.predict({"x": x}, also=(linear.output,))[linear.output]
    expected = TINY.first(torch.from_numpy(x)).detach().numpy()
    assert inside.dtype == HALF
    assert np.abs(inside - expected).max() < 5e-3
    with pytest.raises(BackendError, match="computes no value 'nothing'"):
        tiny.predict({"x": x}, also=("nothing",))
    constant = next(each for each in tiny.function("main").definition.operations if each.type == "const")
    with pytest.raises(BackendError, match=f"computes no value '{constant.output}'"):
        tiny.predict({"x": x}, also=(constant.output,))


def test_what_depends_on_constants_alone_is_computed_once(tmp_path: Path) -> None:
    table = grid(8, 4)

    def body(x: Any) -> Any:
        turned = mb.transpose(x=mb.sqrt(x=mb.abs(x=table)), perm=[1, 0])
        return mb.linear(x=x, weight=turned, name="y")

    loaded = MilProgram.load(program(tmp_path / "p.mlpackage", [spec(2, 8)], body))
    kept = [each.type for each in loaded.function("main").definition.operations if each.type != "const"]
    assert kept == ["abs", "sqrt", "transpose", "linear"]  # coremltools folded nothing
    x = grid(2, 8, seed=1)
    expected = x.astype(SINGLE) @ np.sqrt(np.abs(table.astype(SINGLE))).astype(HALF).astype(SINGLE)
    assert np.abs(loaded.predict({"x": x})["y"] - expected).max() < 0.01
    plan = loaded.function("main")._planned()
    assert [step.operation.type for step in plan.steps] == ["linear"]


def test_a_closed_program_predicts_no_more(saved: Path) -> None:
    with MilProgram.load(saved) as tiny:
        tiny.predict({"x": grid(1, 5, 16).astype(SINGLE)})
    assert tiny.constant_bytes == 0
    with pytest.raises(BackendError, match="closed"):
        tiny.predict({"x": grid(1, 5, 16).astype(SINGLE)})


def test_metadata_of_the_package_is_read(package: Path) -> None:
    def label(model: Any) -> None:
        model.description.metadata.userDefined["outrider.role"] = "draft"

    assert MilProgram.load(edit_model(package, label)).metadata["outrider.role"] == "draft"


def test_without_coremltools_the_extra_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "coremltools.proto")
    monkeypatch.delitem(sys.modules, schema_module._ALIAS, raising=False)
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(MissingExtraError, match=r"outrider\[coreml\]"):
        MilProgram.load(saved)


def test_reading_a_package_loads_neither_torch_nor_coremltools(saved: Path) -> None:
    code = (
        "import sys; from outrider.targets.coreml_reference import MilProgram\n"
        f"MilProgram.load({str(saved)!r}); print(*{{'torch', 'coremltools'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_message_classes_load_beside_coremltools_own(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "coremltools.proto")
    assert MilProgram.load(saved).functions.keys() == {"main"}
    assert schema_module._ALIAS in sys.modules
