"""Exporting makes a whole bundle or nothing, and refuses what it cannot do before it starts."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import outrider
from outrider.errors import (
    ExportError,
    MissingExtraError,
    OutriderError,
    TokenizerMismatch,
    UsageError,
)
from outrider.export.bundle import ExportOptions, RoleOptions, export_bundle
from outrider.manifest import MANIFEST_NAME, read_manifest, verify
from outrider.quantize.quality import evaluation_text
from outrider.runtime.check import check_bundle
from outrider.runtime.proof import row_independence

Export = Callable[..., Any]
Models = dict[str, Path]


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def breaking_at(stage: str, error: BaseException) -> Callable[[str, float], None]:
    """Progress that raises once a stage is half done."""

    def progress(name: str, part: float) -> None:
        if name.startswith(stage) and part >= 0.5:
            raise error

    return progress


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_holds_what_its_manifest_says_and_no_more(quantized_bundle: Path) -> None:
    manifest = verify(quantized_bundle, full=True)
    assert {MANIFEST_NAME, *manifest.files()} == set(contents(quantized_bundle))
    assert {role: entry.graphs[0].recipe for role, entry in manifest.roles.items()} == {
        "target": "int4",
        "draft": "int8",
    }
    assert manifest.max_context == 256
    assert [source.role for source in manifest.sources] == ["target", "draft"]


def test_a_draft_names_its_target_and_may_pad_its_vocabulary_further(quantized_bundle: Path) -> None:
    target, draft = (read_manifest(quantized_bundle).roles[role].graphs[0] for role in ("target", "draft"))
    assert draft.target_sha256 == target.files[target.path].sha256
    assert (target.vocab_size, draft.vocab_size) == (328, 336)
    with outrider.load(quantized_bundle, threads=1) as pipeline:
        assert pipeline.generate("the fox", k=3, drafter="model", max_tokens=8).tokens


def test_no_path_of_the_machine_gets_into_a_bundle(quantized_bundle: Path, tiny_models: Models) -> None:
    package = Path(outrider.__file__).parent.parent
    secrets = [
        str(quantized_bundle.parent),
        str(tiny_models["target"].parent),
        str(package),
        str(Path.home()),
    ]
    for name, data in contents(quantized_bundle).items():
        if not name.endswith(".data"):
            found = [secret for secret in secrets if len(secret) > 1 and secret.encode() in data]
            assert not found, f"{name} holds {found}"
    text = (quantized_bundle / MANIFEST_NAME).read_text()
    assert not re.search(r'"/|\\\\|[A-Z]:/', text)


def test_graphs_are_valid_and_keep_their_weights_outside(quantized_bundle: Path) -> None:
    for role in ("target", "draft"):
        path = quantized_bundle / role / "graph.onnx"
        onnx.checker.check_model(str(path))
        assert path.stat().st_size < 20_000 < path.with_name("graph.onnx.data").stat().st_size


def test_an_export_without_evaluation_has_neither_quality_nor_probe(
    tiny_models: Models, export_tiny: Export, tmp_path: Path
) -> None:
    report = export_tiny(tmp_path / "bundle", (tiny_models["target"], "int8"), evaluate=False)
    assert report.quality == {}
    assert not list((tmp_path / "bundle").rglob("*.npz"))
    assert "draft" not in read_manifest(tmp_path / "bundle").roles


BREAKS = [
    pytest.param(RuntimeError("no"), "target: quantize", RuntimeError, id="exception"),
    pytest.param(KeyboardInterrupt(), "target: quantize", KeyboardInterrupt, id="ctrl-c"),
    pytest.param(KeyboardInterrupt(), "draft: quantize", KeyboardInterrupt, id="ctrl-c-in-the-draft"),
    pytest.param(KeyboardInterrupt(), "target: float reference", KeyboardInterrupt, id="ctrl-c-evaluating"),
    pytest.param(OSError(errno.ENOSPC, "full"), "target: quantize", ExportError, id="full-disk"),
]


@pytest.mark.parametrize(("error", "stage", "expected"), BREAKS)
def test_an_export_that_breaks_leaves_nothing(
    tiny_models: Models,
    export_tiny: Export,
    tmp_path: Path,
    error: BaseException,
    stage: str,
    expected: type[BaseException],
) -> None:
    pair = (tiny_models["target"], "int4"), (tiny_models["draft"], "int8")
    with pytest.raises(expected):
        export_tiny(tmp_path / "bundle", *pair, progress=breaking_at(stage, error))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["pathlib.Path.write_text", "numpy.savez", "outrider.manifest.replaced"])
def test_a_full_disk_is_said_and_leaves_nothing(
    tiny_models: Models, export_tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(where, full_disk)
    with pytest.raises(ExportError, match=r"disk of .* is full; nothing was written"):
        export_tiny(tmp_path / "bundle", (tiny_models["target"], "int4"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", [full_disk, interrupt])
def test_an_existing_bundle_survives_a_replacement_that_breaks(
    tiny_models: Models,
    export_tiny: Export,
    quantized_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[..., Any],
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(quantized_bundle, bundle)
    before = contents(bundle)
    monkeypatch.setattr("numpy.savez", broken)
    with pytest.raises((ExportError, KeyboardInterrupt)):
        export_tiny(bundle, (tiny_models["target"], "int8"), force=True)
    assert contents(bundle) == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_force_replaces_a_bundle_whole(
    tiny_models: Models, export_tiny: Export, quantized_bundle: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(quantized_bundle, bundle)
    with pytest.raises(UsageError, match="already holds a bundle; --force replaces it"):
        export_tiny(bundle, (tiny_models["target"], "int8"), evaluate=False)
    export_tiny(bundle, (tiny_models["target"], "int8"), evaluate=False, force=True)
    assert set(read_manifest(bundle).roles) == {"target"}
    assert not (bundle / "draft").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_bundle_is_never_touched(
    tiny_models: Models, export_tiny: Export, tmp_path: Path, force: bool
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_bytes(b"text")
    for name in ("photos", "file"):
        with pytest.raises(UsageError, match="exists and is not a bundle; choose another folder"):
            export_tiny(tmp_path / name, (tiny_models["target"], "int4"), force=force)
    assert contents(tmp_path) == {"photos/cat.jpg": b"cat", "file": b"text"}


def test_an_empty_folder_becomes_the_bundle(tiny_models: Models, export_tiny: Export, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    export_tiny(tmp_path / "bundle", (tiny_models["target"], "int8"), evaluate=False)
    verify(tmp_path / "bundle", full=True)


def test_a_draft_of_another_tokenizer_is_refused_by_its_first_differing_id(
    tiny_models: Models,
    export_tiny: Export,
    write_model: Callable[..., Path],
    byte_level_bpe: Any,
    tmp_path: Path,
) -> None:
    from tokenizers import Tokenizer

    table = json.loads(byte_level_bpe.to_str())
    swapped = {
        piece: {300: 301, 301: 300}.get(index, index) for piece, index in table["model"]["vocab"].items()
    }
    first = next(piece for piece, index in table["model"]["vocab"].items() if index == 300)
    second = next(piece for piece, index in table["model"]["vocab"].items() if index == 301)
    table["model"]["vocab"] = swapped
    other = Tokenizer.from_str(json.dumps(table))
    draft = write_model(tmp_path / "draft", layers=1, vocab=328, seed=2, tokenizer=other)
    expected = re.escape(f"id 300 is {first!r} in the target and {second!r} in the draft")
    with pytest.raises(TokenizerMismatch, match=expected):
        export_tiny(tmp_path / "bundle", (tiny_models["target"], "int4"), (draft, "int4"))
    assert not (tmp_path / "bundle").exists()


def test_what_would_not_be_lossless_or_is_unknown_is_refused(
    tiny_models: Models, export_tiny: Export, tmp_path: Path
) -> None:
    target, out = tiny_models["target"], tmp_path / "bundle"
    with pytest.raises(UsageError, match="target"):
        export_tiny(out, (target, "int8-dynamic"))
    with pytest.raises(UsageError, match=r"'int5'.*int4"):
        export_tiny(out, (target, "int5"))
    with pytest.raises(UsageError, match="unknown device 'toaster'; known: host, "):
        export_tiny(out, (target, "int4"), device="toaster")
    with pytest.raises(UsageError, match="max_context is 513; the model was made for 512"):
        export_tiny(out, (target, "int4"), max_context=513)
    with pytest.raises(UsageError, match="max_context is 8; it must be at least 16"):
        export_tiny(out, (target, "int4"), max_context=8)
    with pytest.raises(UsageError, match="widths belong to the split profile"):
        export_tiny(out, (target, "int4"), widths=(1, 2))
    with pytest.raises(UsageError, match="hidden_layers has 2; the target has layers 0 to 1"):
        export_tiny(out, (target, "int4"), hidden_layers=(2,))
    with pytest.raises(UsageError, match="no file, folder, hub id"):
        export_tiny(out, (Path("nowhere"), "int4"))
    role = RoleOptions(str(target), "int4", overrides="layers.*.dwn=int8")
    with pytest.raises(UsageError, match=r"'layers\.\*\.dwn' matches no slot of the target"):
        export_bundle(ExportOptions(role, out, max_context=256))
    assert list(tmp_path.iterdir()) == []


def test_a_draft_may_have_what_a_target_may_not(
    tiny_models: Models, export_tiny: Export, tmp_path: Path
) -> None:
    pair = (tiny_models["target"], "fp32"), (tiny_models["target"], "int8-dynamic")
    export_tiny(tmp_path / "bundle", *pair, evaluate=False)
    assert read_manifest(tmp_path / "bundle").roles["draft"].graphs[0].recipe == "int8-dynamic"


def test_a_damaged_checkpoint_leaves_nothing(
    tiny_models: Models, export_tiny: Export, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_models["target"], model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(OutriderError, match="safetensors"):
        export_tiny(tmp_path / "bundle", (model, "int4"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_real_model_exports_checks_and_decodes_the_same_text_bit_for_bit(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    target = RoleOptions(str(smollm2_gguf), "int4")
    export_bundle(ExportOptions(target, tmp_path / "bundle", max_context=512, evaluate=False))
    result = check_bundle(tmp_path / "bundle", max_tokens=16)
    assert [problem for problem in result.problems if "no probe" not in problem] == []
    assert len(result.texts) == 6
    with outrider.load(tmp_path / "bundle") as pipeline:
        tokens = np.asarray(pipeline.tokenizer.encode(evaluation_text()[:400])[:64])
        found = row_independence(pipeline.engine.target, tokens)
        assert found.spread > 1
        assert found.suffix == 0
        if platform.machine() == "x86_64":  # elsewhere the kernels are others; `check` measures them
            assert found.width == 0
            assert [text.first_difference for text in result.texts] == [None] * 6
        pipeline.reset()
        question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        assert "Paris" in pipeline.chat(question, max_tokens=16).text


def test_an_old_bundle_is_put_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.export import staging

    output, folder = tmp_path / "bundle", tmp_path / ".new"
    for place, word in ((output, "old"), (folder, "new")):
        place.mkdir()
        (place / "word").write_text(word)
    moves: list[Path] = []
    replace = os.replace

    def second_fails(source: Path, target: Path) -> None:
        moves.append(source)
        if len(moves) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(staging.os, "replace", second_fails)
    with pytest.raises(KeyboardInterrupt):
        staging.take_place(folder, output)
    assert (output / "word").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".new", "bundle"]


@pytest.mark.parametrize("module", ["torch", "onnx", "onnxscript", "threadpoolctl"])
def test_a_missing_extra_is_named_with_its_pip_install(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError, match=rf"'{module}' is not installed.*pip install 'outrider\[export\]'"
    ):
        export_bundle(ExportOptions(RoleOptions("absent.gguf"), tmp_path / "bundle"))
    assert list(tmp_path.iterdir()) == []
