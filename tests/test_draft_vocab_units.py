"""A trimmed draft on every kind of graph: whatever runs its head, columns are ids, and the text is the target's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("executorch", reason="executorch is not installed")
pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn is not installed")

import outrider
from outrider.contracts import Graph, Sampling
from outrider.errors import BundleError
from outrider.export.bundle import ExportOptions, RoleOptions, export_bundle
from outrider.export.checkpoint import open_checkpoint
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights
from outrider.manifest import GraphEntry, read_manifest
from outrider.runtime.backends import BACKENDS
from outrider.runtime.backends import RoleOptions as Running
from outrider.runtime.closest import open_closest, open_evaluator
from outrider.runtime.load import draft_ids
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.rounds import Engine, Request
from outrider.runtime.vocab_map import VOCAB_MAP
from outrider.targets.qnn_plugin import has_emulator

if not has_emulator():
    pytest.skip("onnxruntime-qnn holds no emulator for this processor", allow_module_level=True)

DRAFT_VOCAB = 290
PROMPT = [300, 5, 17, 2, 310, 44]
GRAPHS = ["npu, emulated", "npu, by the CPU", "executorch", "onnx"]
SAMPLINGS = {
    "greedy": Sampling(),
    "match": Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> str:
    """One layer: each lowering takes seconds even so."""
    return str(write_model(tmp_path_factory.mktemp("model") / "tiny", layers=1, vocab=328, seed=0))


@pytest.fixture(scope="module")
def bundle(
    tmp_path_factory: pytest.TempPathFactory, model: str, trace_cache: Callable[[pytest.MonkeyPatch], None]
) -> Path:
    """A float target for a Snapdragon, and its own weights with fewer rows of the head as the draft."""
    folder = tmp_path_factory.mktemp("trimmed") / "bundle"
    draft = RoleOptions(model, "fp32", executorch_precision="fp32", vocab=DRAFT_VOCAB)
    target = RoleOptions(model, "fp32", executorch_precision="fp32")
    asked = ExportOptions(
        target,
        folder,
        draft,
        "snapdragon-8-gen3",
        max_context=64,
        executorch_backend="xnnpack",
        evaluate=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        trace_cache(patch)
        export_bundle(asked)
    return folder


def entry_of(bundle: Path, kind: str, role: str = "draft") -> GraphEntry:
    place = {"executorch": "xnnpack", "onnx": "graph.onnx"}.get(kind, "npu/")
    graphs = read_manifest(bundle).roles[role].graphs
    return next(graph for graph in graphs if place in graph.path and graph.unit != "gpu")


@contextmanager
def opened(bundle: Path, kind: str) -> Iterator[Graph]:
    """The draft's graph of a kind."""
    entry = entry_of(bundle, kind)
    by_cpu = kind == "npu, by the CPU"
    graph = open_evaluator(bundle, entry, 1) if by_cpu else open_closest(bundle, "draft", entry, 1).graph
    try:
        yield graph
    finally:
        graph.close()


@pytest.mark.parametrize("kind", GRAPHS)
def test_columns_are_those_of_the_float_models_logits(bundle: Path, model: str, kind: str) -> None:
    ids = draft_ids(bundle, entry_of(bundle, kind))
    assert ids is not None
    with open_checkpoint(model) as checkpoint:
        reference = FloatReference(SlotWeights(checkpoint))
        exact = next(reference.rows(reference.final_states([np.array(PROMPT[:2])])))[:, ids]
    with opened(bundle, kind) as graph:
        found = graph.forward(PROMPT[:2]).logits
        assert isinstance(found, np.ndarray)
        assert found.shape == (2, DRAFT_VOCAB)
        spread = exact.std(axis=1, keepdims=True)
        assert np.abs((found - exact) / spread).max() < (0.2 if "npu" in kind else 1e-3)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_the_text_is_the_targets_own_and_only_kept_ids_are_drafted(
    bundle: Path, kind: str, sampling: str
) -> None:
    entry = entry_of(bundle, kind)
    ids = draft_ids(bundle, entry)
    assert ids is not None
    target = BACKENDS["onnxruntime"](bundle, entry_of(bundle, "onnx", "target"), Running(threads=1))
    request = Request(SAMPLINGS[sampling], max_new_tokens=24, k=0)
    plain = [token for part in Engine(target).decode(PROMPT, request) for token in part.tokens]
    with opened(bundle, kind) as graph:
        drafter = ModelDrafter(
            graph, min_confidence=0.0, vocab_ids=ids, known_ids=entry.options["embedding_rows"]
        )
        target.truncate(0)
        parts = list(Engine(target, {"model": drafter}).decode(PROMPT, Request(SAMPLINGS[sampling], 24, k=3)))
    target.close()
    assert [token for part in parts for token in part.tokens] == plain
    assert parts[-1].stats.accepted > 0
    assert set(plain) - set(ids.tolist()) or parts[-1].stats.acceptance > 0.8


def edited(bundle: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose manifest names other things for the draft's NPU graph."""
    copy = Path(shutil.copytree(bundle, folder / "bundle"))
    raw = json.loads((copy / "manifest.json").read_text())
    change(next(graph for graph in raw["roles"]["draft"]["graphs"] if graph["unit"] == "npu"))
    (copy / "manifest.json").write_text(json.dumps(raw))
    return copy


def test_a_draft_whose_map_was_left_out_is_no_draft_of_the_first_ids(bundle: Path, tmp_path: Path) -> None:
    def forget(graph: dict[str, Any]) -> None:
        graph["vocab_map"] = None
        del graph["files"][f"draft/{VOCAB_MAP}"]

    with pytest.raises(BundleError, match="has 290 logits for 328 ids and no vocab_map"):
        outrider.load(edited(bundle, tmp_path, forget), draft_unit="npu")


@pytest.mark.parametrize("name", ["w3.onnx", "../npu/w1.onnx", "../../../outside.onnx", "/etc/passwd"])
@pytest.mark.parametrize("where", ["functions", "contexts"])
def test_a_width_whose_model_is_not_among_the_files_is_refused(
    bundle: Path, tmp_path: Path, name: str, where: str
) -> None:
    """Files that the manifest does not list are hashed by nobody."""

    def change(graph: dict[str, Any]) -> None:
        compiled = graph["options"]["contexts"]["snapdragon-8-gen3"]
        (graph["functions"] if where == "functions" else compiled)["2"] = name

    copy = edited(bundle, tmp_path, change)
    (tmp_path / "outside.onnx").write_bytes(b"not mine")
    with pytest.raises(BundleError, match=r"is named by draft/npu/w1\.onnx but absent from its files"):
        outrider.load(copy, draft_unit="npu")
