"""A Core ML package that is damaged, or edited by hand, is refused by the evaluator for what is wrong in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import BackendError
from outrider.targets.coreml_reference import MilProgram, read_package
from tests.mil_packages import (
    MODEL,
    SINGLE,
    WEIGHTS,
    edit_manifest,
    edit_model,
    grid,
    operation_of,
    tiny_package,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_package(tmp_path_factory.mktemp("saved") / "tiny.mlpackage")


@pytest.fixture
def package(saved: Path, tmp_path: Path) -> Path:
    """A copy of the tiny package that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "tiny.mlpackage"))


def pointer_of(model: Any) -> Any:
    """The blob pointer of the first weight."""
    block = next(iter(model.mlProgram.functions["main"].block_specializations.values()))
    values = (each.attributes["val"] for each in block.operations if each.type == "const")
    return next(each for each in values if each.WhichOneof("value") == "blobFileValue").blobFileValue


def rename_operation(model: Any) -> None:
    operation_of(model, "silu").type = "swoosh"


def rename_parameter(model: Any) -> None:
    silu = operation_of(model, "silu")
    silu.inputs["gain"].CopyFrom(silu.inputs["x"])


def drop_parameter(model: Any) -> None:
    del operation_of(model, "linear").inputs["weight"]


def use_what_nothing_makes(model: Any) -> None:
    operation_of(model, "silu").inputs["x"].arguments[0].name = "lost"


def rename_output(model: Any) -> None:
    model.description.output[0].name = "z"


def widen_input(model: Any) -> None:
    model.description.input[0].type.multiArrayType.shape[1] = 6


def ask_for_another_opset(model: Any) -> None:
    model.mlProgram.functions["main"].opset = "CoreML99"


def add_function(model: Any) -> None:
    model.mlProgram.functions["second"].CopyFrom(model.mlProgram.functions["main"])


def make_neural_network(model: Any) -> None:
    model.neuralNetwork.SetInParent()


def move_pointer(by: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        pointer_of(model).offset += by

    return change


def point_outside(model: Any) -> None:
    pointer_of(model).fileName = "@model_path/../../secrets.bin"


def enlarge_weight(model: Any) -> None:
    block = next(iter(model.mlProgram.functions["main"].block_specializations.values()))
    for each in block.operations:
        if each.type == "const" and each.attributes["val"].WhichOneof("value") == "blobFileValue":
            each.attributes["val"].type.tensorType.dimensions[0].constant.size += 1
            return


def set_version(number: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.specificationVersion = number

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rename_operation, r"does not know the operation 'swoosh' \(function 'main', output '[^']+'\)"),
        (rename_parameter, r"'silu' \(.*\) is given 'gain', and the evaluator knows: x"),
        (drop_parameter, r"'linear' \(.*\) is not given 'weight'"),
        (use_what_nothing_makes, r"'silu' \(.*\) uses 'lost', which nothing before it makes"),
        (rename_output, "differ in the outputs y, z: the model was edited"),
        (widen_input, r"'x' is fp32\[1, 5, 16\] in the program and fp32 \[1, 6, 16\] in the description"),
        (ask_for_another_opset, "asks for opset 'CoreML99' and has bodies for: CoreML8"),
        (add_function, "the function 'second' has no description"),
        (make_neural_network, "is a neuralNetwork; only an ML program"),
        (move_pointer(8), "where no value can lie"),
        (move_pointer(64), "where no value begins"),
        (move_pointer(2**40), "where no value can lie.*cut off, or belongs to another model"),
        (enlarge_weight, "bytes, and .* needs .*do not belong together"),
        (point_outside, "outside of its package"),
        (set_version(99), r"specification version 99; the evaluator reads 6 \(iOS 15\).*10 \(iOS 26\)"),
        (set_version(5), "specification version 5"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_an_edited_model_is_refused_for_what_is_wrong_in_it(
    change: Callable[[Any], None], said: str, package: Path
) -> None:
    with pytest.raises(BackendError, match=said):
        MilProgram.load(edit_model(package, change))


def test_a_type_that_was_edited_shows_when_the_value_is_made(package: Path) -> None:
    def shorten(model: Any) -> None:
        operation_of(model, "silu").outputs[0].type.tensorType.dimensions[1].constant.size = 4

    edited = MilProgram.load(edit_model(package, shorten))
    with pytest.raises(
        BackendError, match=r"'silu' .* gave shape \[1, 5, 24\], and the program declares fp16\[1, 4"
    ):
        edited.predict({"x": grid(1, 5, 16).astype(SINGLE)})


def cut(file: str, keep: int | float) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        data = (package / file).read_bytes()
        (package / file).write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])

    return damage


def overwrite(file: str, at: int, new: bytes) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        data = bytearray((package / file).read_bytes())
        data[at : at + len(new)] = new
        (package / file).write_bytes(data)

    return damage


def move_root_model(package: Path) -> None:
    manifest = package / "Manifest.json"
    manifest.write_text(manifest.read_text().replace("com.apple.CoreML/model", "../../elsewhere/model"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "is no .mlpackage folder: it has no Manifest.json"),
        (lambda package: (package / "Manifest.json").write_text("{"), "Manifest.json cannot be read"),
        (
            lambda package: edit_manifest(package, rootModelIdentifier=None),
            "has no entry for 'rootModelIdentifier'",
        ),
        (lambda package: edit_manifest(package, rootModelIdentifier="other"), "has no entry for 'other'"),
        (lambda package: edit_manifest(package, fileFormatVersion="2.0.0"), "manifest version '2.0.0'"),
        (lambda package: (package / MODEL).unlink(), "model cannot be read"),
        (move_root_model, "lies outside of the package"),
        (cut(MODEL, 0), "specification version 0"),
        (cut(MODEL, 0.7), "is no Core ML model.*cut off or damaged"),
        (
            lambda package: (package / WEIGHTS).unlink(),
            r"weight\.bin: the program keeps weights in this file",
        ),
        (cut(WEIGHTS, 0), "cannot be mapped"),
        (cut(WEIGHTS, 20), "a weight file of 20 bytes is cut off"),
        (cut(WEIGHTS, -64), r"ends at byte \d+, and the file has \d+: it is cut off"),
        (overwrite(WEIGHTS, 4, b"\x01"), "weight file version 1; the evaluator reads version 2"),
        (overwrite(WEIGHTS, 64 + 4, b"\x63"), "element type number 99"),
        (overwrite(WEIGHTS, 64 + 4, b"\x02"), "holds fp32, and the program declares fp16"),
    ],
)
def test_a_damaged_package_is_refused_for_what_is_wrong_with_it(
    damage: Callable[[Path], Any], said: str, package: Path
) -> None:
    damage(package)
    with pytest.raises(BackendError, match=said):
        MilProgram.load(package)


def test_a_program_can_be_read_though_it_cannot_be_run(package: Path) -> None:
    """What a lint needs: operations of every kind as records, with their types."""
    read = read_package(edit_model(package, rename_operation))
    operations = read.functions["main"].operations
    (unknown,) = (each for each in operations if each.type == "swoosh")
    assert unknown.outputs[0][1].shape == (1, 5, 24)
    assert unknown.outputs[0][1].dtype == "fp16"
