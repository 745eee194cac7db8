"""The peers' side of the benchmarks: recipes, what tokens cost them, and what is shown beside their times."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peers, products, speed
from benchmarks import perplexity as measuring
from benchmarks.options import named
from benchmarks.peers import ALGORITHMS, BLOCK_SIZES, PRECISIONS, GenaiRecipe, build_recipes
from benchmarks.perplexity import Perplexity, keep, known, perplexity, with_targets
from benchmarks.speed import complaints, format_table, rows
from benchmarks.worker import negative_log_likelihood
from outrider.errors import BackendError, ExportError, UsageError


def test_every_recipe_is_read_from_its_own_name() -> None:
    every = [
        GenaiRecipe(precision, block, algorithm, symmetric, untied)
        for precision in PRECISIONS
        for block in BLOCK_SIZES
        for algorithm in ALGORITHMS
        for symmetric in (True, False)
        for untied in (True, False)
    ]
    assert [GenaiRecipe.parse(recipe.name) for recipe in every] == every
    assert len({tuple(recipe.builder_arguments) for recipe in every}) == len(every)
    assert GenaiRecipe.parse("int8-untied") == GenaiRecipe("int8", untied=True)
    assert GenaiRecipe.parse("int4-asym") == GenaiRecipe(symmetric=False)
    assert GenaiRecipe.parse("int4-k_quant_mixed") == GenaiRecipe(algorithm="k_quant_mixed")


def test_a_recipe_is_the_builder_s_command_line() -> None:
    recipe = GenaiRecipe.parse("int4-b64-rtn_mixed-asym-untied")
    assert recipe.builder_arguments == [
        *("-p", "int4", "--extra_options", "block_size=64", "algo_config=rtn"),
        *("matmul_mixed_precision=last_matmul:int8,mixed_layers:int8", "is_symmetric=false"),
        "shared_embeddings=false",
    ]


@pytest.mark.parametrize(
    "name", ["int3", "int4-b48", "int4-b32-hqq", "int4-b32-b64", "int4-asym-b32", "int4-", ""]
)
def test_a_recipe_that_the_builder_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"known:|is no recipe"):
        GenaiRecipe.parse(name)


def test_a_token_costs_the_log_of_its_probability_and_rows_behind_the_last_target_nothing() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1.0, 1.0, 1.0]], np.float32)) + 300
    assert negative_log_likelihood(logits, [1, 2]) == pytest.approx([np.log(4), -np.log(0.7)], rel=1e-4)


def test_the_last_row_of_a_segment_predicts_the_first_token_of_the_next() -> None:
    assert with_targets([np.array([1, 2, 3]), np.array([4, 5])]) == [
        {"tokens": [1, 2, 3], "targets": [2, 3, 4]},
        {"tokens": [4, 5], "targets": [5]},
    ]


def test_the_error_of_a_perplexity_is_that_of_the_paired_differences() -> None:
    rng = np.random.default_rng(0)
    reference = rng.exponential(3.0, 2047)
    found = perplexity(reference + 0.01 + rng.normal(0, 0.1, 2047), reference)
    assert found.reference == pytest.approx(np.exp(reference.mean()))
    assert found.error == pytest.approx(
        0.1 / 2047**0.5, rel=0.1
    )  # not that of the text, thirty times as wide
    assert found.increase == pytest.approx(0.01, abs=4 * 0.1 / 2047**0.5)


def test_costs_of_different_tokens_are_not_compared() -> None:
    with pytest.raises(ValueError, match="3 and 4 tokens"):
        perplexity(np.ones(3), np.ones(4))


def model_at(path: Path, kind: str, weights: bytes = b"GGUF") -> Path:
    path.mkdir(parents=True) if kind == "folder" else None
    (path / "model.onnx.data" if kind == "folder" else path).write_bytes(weights)
    return path


FOUND = Perplexity(15.5, 15.0, 0.001, 2047)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_was_measured_is_found_beside_the_weights_it_was_measured_on_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    model = model_at(tmp_path / "model", kind)
    assert known(model) is None
    keep(model, FOUND)
    assert known(model) == FOUND
    assert capsys.readouterr().err == ""
    weights = model / "model.onnx.data" if kind == "folder" else model
    before = weights.stat()
    weights.write_bytes(b"FUGG")  # as long
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert known(model) is None
    assert "not of the weights" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["cut", "list", "old", "text", "zero", "folder"])
def test_a_damaged_record_is_ignored_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    model = model_at(tmp_path / "model.gguf", "file")
    keep(model, FOUND)
    place = tmp_path / "model.gguf.perplexity.json"
    record = json.loads(place.read_text())
    place.unlink()
    changed = {"list": [], "old": record["found"]}
    changed["text"] = {**record, "found": {**record["found"], "perplexity": "15"}}
    changed["zero"] = {**record, "found": {**record["found"], "reference": 0}}
    if change == "folder":
        place.mkdir()
    else:
        place.write_text(json.dumps(changed[change]) if change in changed else json.dumps(record)[:-9])
    assert known(model) is None
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{place} is ignored: ")


def test_what_cannot_be_kept_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_at(tmp_path / "model.gguf", "file")
    (tmp_path / "model.gguf.perplexity.json").mkdir()
    keep(model, FOUND)
    [line] = capsys.readouterr().err.splitlines()
    assert "model.gguf.perplexity.json is not kept: " in line


def test_what_tokens_cost_the_float_weights_is_read_again_for_the_same_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, segments, computed = model_at(tmp_path / "m.gguf", "file"), [np.arange(3)], list[Path]()

    def compute(gguf: Path, _: object) -> np.ndarray:
        computed.append(gguf)
        return np.array([1.0, len(computed)])

    monkeypatch.setattr(measuring, "_computed", compute)
    for expected in (1, 1):
        assert measuring._float_costs(model, segments).tolist() == [1, expected]
    os.utime(model, ns=(0, 1))
    assert measuring._float_costs(model, segments).tolist() == [1, 2]
    kept = tmp_path / "m.gguf.float-costs.npz"
    kept.write_bytes(kept.read_bytes()[:-40])
    assert measuring._float_costs(model, segments).tolist() == [1, 3]


def test_the_quality_of_our_bundle_is_that_of_its_manifest(tmp_path: Path) -> None:
    target = {"perplexity": 15.15, "perplexity_reference": 15.0, "tokens": 2047, "kl_mean": 0.1}
    (tmp_path / "manifest.json").write_text(json.dumps({"quality": {"target": target}}))
    assert known(tmp_path) == Perplexity(15.15, 15.0, None, 2047)
    for nothing in ({"quality": {}}, {"quality": {"target": {"perplexity": 1}}}, []):
        (tmp_path / "manifest.json").write_text(json.dumps(nothing))
        assert known(tmp_path) is None


def answer(decode_s: float) -> dict[str, Any]:
    return {"decode_s": decode_s, "tokens": 11, "prompt_tokens": 3, "prompt_s": 0.1, "resident_mb": None}


def test_a_speed_is_shown_with_its_perplexity_and_more_than_three_percent_are_named() -> None:
    answers = [{"outrider": answer(0.1), "genai a": answer(0.05), "genai b": answer(0.2)}] * 5
    quality = {
        "outrider": Perplexity(10.1, 10, None, 9),
        "genai a": Perplexity(12, 10, 0.1, 9),
        "genai b": None,
    }
    table = rows(answers, dict.fromkeys(quality, 1.0), quality)
    assert complaints(table) == []
    assert [row.ours_faster and row.ours_faster.value for row in table] == pytest.approx([None, 0.5, 2.0])
    ours, fast, unknown = format_table(table).splitlines()[2:]
    assert "10.10 (+1.0%)" in ours
    assert "12.00 (+20.0%, too much)" in fast
    assert "| ?" in unknown


def test_perplexities_beside_different_float_weights_are_not_comparable() -> None:
    answers = [{"outrider": answer(0.1), "genai": answer(0.1)}]
    quality = {"outrider": Perplexity(10.1, 10, None, 9), "genai": Perplexity(15.2, 15, 0.1, 9)}
    [note] = complaints(rows(answers, dict.fromkeys(quality, 1.0), quality))
    assert "same float weights" in note


def test_a_single_token_has_no_speed() -> None:
    with pytest.raises(BackendError, match="decoded 1 tokens"):
        rows([{"outrider": {**answer(0.1), "tokens": 1}}], {"outrider": 1.0}, {"outrider": None})


def test_models_of_one_name_are_told_apart_and_every_model_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a/int4", "b/int4", "b/int8", "c/b/int4"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "int4")
    found = named(Path(path) for path in (".", "../../b/int4", "../int4", "../../c/b/int4", "../../b/int8"))
    assert found == {
        "a/int4": tmp_path / "a/int4",
        f"{tmp_path.name}/b/int4": tmp_path / "b/int4",
        "c/b/int4": tmp_path / "c/b/int4",
        "int8": tmp_path / "b/int8",
    }


MISTAKES: list[tuple[Callable[[list[str]], int], str, int, str]] = [
    (speed.main, "--max-tokens 1", 2, "at least 2"),
    (speed.main, "--repeats 0", 2, "at least 1"),
    (speed.main, "--pause -1", 2, "no time to wait"),
    (speed.main, "--skip outrider llama.cpp genai", 2, "no engine is left"),
    (speed.main, "--skip outrider llama.cpp --genai", 2, "no engine is left"),
    (speed.main, "--bundle nowhere", 1, "nowhere/manifest.json does not exist"),
    (speed.main, "--gguf nowhere.gguf", 2, "nowhere.gguf: No such file"),
    (speed.main, "--gguf text", 2, "text is no GGUF file"),
    (speed.main, "--export-options '", 2, "--export-options"),
    (speed.main, "--json nowhere/x.json", 2, "nowhere/x.json is a folder, or lies in one"),
    (
        speed.main,
        "--skip outrider --gguf x.gguf --genai genai --peers nowhere",
        2,
        "nowhere has no bin/python",
    ),
    (measuring.main, "--gguf nowhere.gguf", 2, "nowhere.gguf: No such file"),
    (measuring.main, "--gguf x.gguf --genai nowhere", 2, "nowhere does not exist"),
    (measuring.main, "--gguf x.gguf --genai .", 2, ". has no genai_config.json"),
    (measuring.main, "--gguf x.gguf --json nowhere/x.json", 2, "nowhere/x.json is a folder, or lies in one"),
    (measuring.main, "--gguf x.gguf --skip llama.cpp", 2, "nothing is left"),
    (measuring.main, "--gguf x.gguf --peers nowhere", 2, "nowhere has no bin/python"),
    (products.main, "nowhere", 1, "nowhere/manifest.json does not exist"),
    (products.main, ". --genai nowhere", 2, "nowhere does not exist"),
    (products.main, ". --repeats 0", 2, "at least 1"),
    (peers.main, "build --gguf nowhere.gguf --out .", 2, "nowhere.gguf: No such file"),
    (peers.main, "--peers nowhere build --gguf x.gguf --out .", 2, "nowhere has no bin/python"),
    (peers.main, "--peers x.gguf install", 2, "x.gguf is a file"),
]


@pytest.mark.parametrize(("main", "arguments", "code", "says"), MISTAKES)
def test_a_mistake_is_a_line_before_anything_is_measured(
    main: Callable[[list[str]], int],
    arguments: str,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.gguf").write_bytes(b"GGUF")
    Path("text").write_text("text")
    Path("genai").mkdir()
    Path("genai/genai_config.json").write_text("{}")
    try:
        ended: object = main(arguments.split())
    except SystemExit as left:  # argparse's way
        ended = left.code
    assert ended == code
    printed = capsys.readouterr()
    assert says in printed.err.splitlines()[-1]
    assert printed.out == ""


BUILDER = """
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
out.mkdir()
(out / "genai_config.json").write_text("{}")
sys.exit("no room left" if out.name == "int8-b32" else 0)
"""


def test_a_build_that_fails_leaves_no_folder_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lib/onnxruntime_genai/models"
    package.mkdir(parents=True)
    (package / "builder.py").write_text(BUILDER)
    monkeypatch.setattr(peers, "open_checkpoint", nullcontext)
    monkeypatch.setattr(peers, "write_hf_folder", lambda _, folder: folder.mkdir())
    monkeypatch.setattr(peers, "_builder_env", lambda _: {**os.environ, "PYTHONPATH": str(tmp_path / "lib")})
    out, recipes = tmp_path / "out", [GenaiRecipe(), GenaiRecipe("int8")]
    with pytest.raises(ExportError, match=r"failed on int8-b32:\nno room left"):
        build_recipes(tmp_path / "x.gguf", out, recipes, Path(sys.executable))
    assert [path.name for path in out.iterdir()] == ["int4-b32"]
    assert build_recipes(tmp_path / "x.gguf", out, recipes[:1], Path("no python: it is there")) == [
        out / "int4-b32"
    ]
    (out / "int4-b32/genai_config.json").unlink()
    with pytest.raises(UsageError, match="delete it"):
        build_recipes(tmp_path / "x.gguf", out, recipes, Path(sys.executable))
