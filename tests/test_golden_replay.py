"""What docs/android.md and docs/apple.md tell an app to compute is what the product computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import outrider
from outrider.contracts import Sampling
from outrider.export.bundle import ExportOptions, RoleOptions, export_bundle
from outrider.export.coreml import export_coreml_draft
from outrider.export.coreml_target import export_coreml_target
from outrider.manifest import read_manifest
from outrider.quantize.coreml_recipes import coreml_recipe
from outrider.runtime.rounds import Request
from outrider.runtime.trace import TraceWriter
from outrider.runtime.uniforms import Uniforms
from outrider.targets.coreml import CoreMLGraph
from outrider.targets.coreml_profiles import CoreMLMeta
from outrider.targets.coreml_reference import MilProgram
from outrider.targets.npu_host import open_embedding
from outrider.targets.qnn import CPU_ENTRIES, NpuGraph
from tests import coreml_toy, families, npu_toy
from tests import golden_loop as app

PROMPT = "the quick brown fox"
TOKENS = 40


@pytest.fixture(scope="module")
def bundle(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], trace_cache: Callable[..., None]
) -> Path:
    """A float target of static widths, and itself with a trimmed head as the draft."""
    folder = tmp_path_factory.mktemp("golden") / "bundle"
    model = str(tiny_models["target"])
    options = ExportOptions(
        RoleOptions(model, "fp32"),
        folder,
        draft=RoleOptions(model, "fp32", vocab=290),
        max_context=256,
        profile="split",
        widths=(1, 2, 5),
        evaluate=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        trace_cache(patch)
        export_bundle(options)
    return folder


def traced(bundle: Path, path: Path, sampling: Sampling) -> list[dict[str, Any]]:
    """A trace of rounds that draft four tokens."""
    with outrider.load(bundle, threads=1) as pipeline:
        ids = pipeline.tokenizer.encode(PROMPT)
        header = {
            "prompt": ids,
            "vocab_limit": pipeline.engine.vocab_limit,
            "stop_ids": [],
            "sampling": sampling,
        }
        request = Request(sampling, max_new_tokens=TOKENS, k=4, drafter="model")
        with TraceWriter(path, **header, max_new_tokens=TOKENS) as writer:
            for _ in pipeline.engine.decode(ids, request, trace=writer):
                pass
    return app.read_lines(path)


SAMPLINGS = {
    "greedy": Sampling(),
    "match": Sampling(temperature=0.9, seed=11),
    "match, truncated": Sampling(temperature=1.1, top_k=20, top_p=0.9, seed=2**63 + 5),
    "reject": Sampling(temperature=0.8, seed=4, mode="reject"),
    "reject, truncated": Sampling(temperature=1.0, top_p=0.95, min_p=0.01, seed=5, mode="reject"),
}


@pytest.mark.parametrize("setting", SAMPLINGS)
def test_every_round_of_a_trace_is_decided_the_same_by_the_documented_arithmetic(
    bundle: Path, tmp_path: Path, setting: str
) -> None:
    lines = traced(bundle, tmp_path / "trace.jsonl", SAMPLINGS[setting])
    text = app.redecide(lines)
    assert len(text) == TOKENS
    assert text == [token for record in lines[1:] for token in record["tokens"]]
    verdicts = [
        row["node"] >= 0
        for record in lines[1:]
        for row in record["rows"][: len(record["proposal"]["tokens"])]
    ]
    assert any(verdicts)
    assert not all(verdicts)


def test_a_trace_that_was_changed_is_found_out(bundle: Path, tmp_path: Path) -> None:
    lines = traced(bundle, tmp_path / "trace.jsonl", SAMPLINGS["reject"])
    place = next(index for index, record in enumerate(lines[1:], 1) if record["path"])
    lines[place]["rows"][0]["token"] += 1
    with pytest.raises(AssertionError):
        app.redecide(lines)


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_the_uniform_of_a_position_is_the_documented_philox_word(seed: int) -> None:
    product = Uniforms(seed)
    for position in (0, 1, 2, 255, 256, 300, 70_001):
        assert app.uniform_of(seed, position) == product(position)


def graph_of(bundle: Path, role: str) -> app.FloatGraph:
    """A role's graph by its manifest, run by ONNX Runtime alone."""
    entry = read_manifest(bundle).roles[role].graphs[0]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(bundle / entry.path), options, ["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]

    def run(width: int, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(zip(names, session.run(None, dict(feeds)), strict=True))

    meta = {
        "widths": entry.widths,
        "max_context": entry.max_context,
        "layers": entry.kv.layers,
        "kv_heads": entry.kv.heads,
        "head_dim": entry.kv.head_dim,
        "masks": entry.options["masks"],
        "sliding_window": entry.options["sliding_window"],
    }
    return app.FloatGraph(meta, run)


def test_an_app_s_own_loop_writes_the_text_of_the_trace(bundle: Path, tmp_path: Path) -> None:
    lines = traced(bundle, tmp_path / "trace.jsonl", Sampling())
    entry = read_manifest(bundle).roles["draft"].graphs[0]
    assert entry.vocab_map is not None
    vocab_map = app.read_vocab_map(bundle / entry.vocab_map)
    text, accepted = app.greedy_rounds(
        lines[0]["prompt"],
        graph_of(bundle, "target"),
        graph_of(bundle, "draft"),
        vocab_map,
        lines[0]["vocab_limit"],
        k=4,
        count=TOKENS,
    )
    assert text == [token for record in lines[1:] for token in record["tokens"]]
    assert accepted > TOKENS / 4


def test_the_rows_of_a_trace_are_what_the_target_returns_for_its_proposals(
    bundle: Path, tmp_path: Path
) -> None:
    lines = traced(bundle, tmp_path / "trace.jsonl", Sampling())
    target, text = graph_of(bundle, "target"), list(lines[0]["prompt"])
    app._prefill(target, text[:-1])
    for record in lines[1:]:
        logits = target.forward([text[-1], *record["proposal"]["tokens"]])
        for row in record["rows"]:
            top = row["top"]
            np.testing.assert_allclose(logits[row["row"], top["ids"]], top["values"], atol=1e-4)
        target.commit(1 + len(record["path"]))
        text += record["tokens"]


def test_the_arithmetic_around_an_npu_graph_is_the_documented_one(tmp_path: Path) -> None:
    """Embedding, RoPE rows, masks with a window, keys and values: bit for bit what the backend computes."""
    meta = npu_toy.write(tmp_path, npu_toy.FloatModel())
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    for name, value in CPU_ENTRIES.items():
        options.add_session_config_entry(name, value)
    sessions = {
        width: ort.InferenceSession(str(tmp_path / name), options, ["CPUExecutionProvider"])
        for width, name in meta["functions"].items()
    }

    def run(width: int, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        session = sessions[str(width)]
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))

    ours = app.IntegerGraph(meta, tmp_path / "embedding.i8", run)
    product = NpuGraph.load(
        tmp_path / "w1.onnx", meta, embedding=tmp_path / "embedding.i8", execution="cpu", threads=1
    )
    tokens = np.random.default_rng(3).integers(0, npu_toy.V, 26).tolist()
    place = 0
    for count, kept in ((11, 11), (1, 1), (2, 2), (7, 3), (5, 5), (1, 1)):
        chunk = tokens[place : place + count]
        rows = [count - 1] if count > 8 else list(range(count))
        expected = product.forward(chunk, logits=rows).logits
        np.testing.assert_array_equal(ours.forward(chunk, rows), expected)
        ours.commit(kept)
        product.commit(range(kept))
        place += kept
    assert ours.length == place > npu_toy.WINDOW


CHUNKS = ((11, 11), (1, 1), (2, 2), (7, 3), (5, 5), (1, 1))  # tokens of a forward, and how many are kept


def test_the_arithmetic_around_a_core_ml_draft_is_the_documented_one(tmp_path: Path) -> None:
    """Embedding, RoPE rows, masks with a window, keys and values: bit for bit what the backend computes."""
    toy, meta = npu_toy.FloatModel(), coreml_toy.meta("split")
    path = coreml_toy.write_embedding(tmp_path / "embedding.f16", toy)
    record = CoreMLMeta.from_json(meta)
    product = CoreMLGraph(record, coreml_toy.ToyProgram(toy, meta), open_embedding(path, meta["embedding"]))
    program = coreml_toy.ToyProgram(toy, meta)
    ours = app.HalfGraph(meta, path, lambda width, feeds: program.run(meta["functions"][str(width)], feeds))
    tokens, place = np.random.default_rng(3).integers(0, npu_toy.V, 26).tolist(), 0
    for count, kept in CHUNKS:
        chunk = tokens[place : place + count]
        rows = [count - 1] if count > 8 else list(range(count))
        np.testing.assert_array_equal(ours.forward(chunk), product.forward(chunk, logits=rows).logits)
        ours.commit(kept)
        product.commit(range(kept))
        place += kept
    assert ours.length == place > npu_toy.WINDOW


@pytest.mark.parametrize(("widths", "most"), [(None, 3), ([2, 7, 12], None), ([1, 16], 8)])
def test_the_arithmetic_around_a_core_ml_target_is_the_documented_one(widths: Any, most: int | None) -> None:
    toy, meta = npu_toy.FloatModel(), coreml_toy.meta("state", widths=widths, rows=most)
    product = CoreMLGraph(CoreMLMeta.from_json(meta), coreml_toy.ToyProgram(toy, meta), None)
    program = coreml_toy.ToyProgram(toy, meta)
    ours = app.StateGraph(meta, lambda feeds: program.run("main", feeds))
    tokens, place = np.random.default_rng(3).integers(0, npu_toy.V, 26).tolist(), 0
    for count, kept in CHUNKS:
        chunk = tokens[place : place + count]
        np.testing.assert_array_equal(ours.forward(chunk), product.forward(chunk).logits)
        ours.commit(kept)
        product.commit(range(kept))
        place += kept
    assert ours.length == place > npu_toy.WINDOW


def test_an_app_s_loop_over_core_ml_packages_writes_the_target_s_own_text(tmp_path: Path) -> None:
    """Draft and target as they are exported, opened by nothing of the product but the evaluator."""
    weights = families.weights_of("llama", families.oracle("llama"))
    sizes = {"max_context": families.CONTEXT, "calibration": ()}
    made = {
        "draft": export_coreml_draft(
            weights.config, weights, coreml_recipe("lut4"), tmp_path / "draft", widths=(1, 2, 16), **sizes
        ),
        "target": export_coreml_target(
            weights.config, weights, coreml_recipe("fp16"), tmp_path / "target", **sizes
        ),
    }
    programs = {role: MilProgram.load(tmp_path / role / "model.mlpackage") for role in made}
    state = programs["target"].make_state()
    meta, embedding = made["draft"].meta, made["draft"].embedding_file
    assert embedding is not None
    draft = app.HalfGraph(
        meta, embedding, lambda width, feeds: programs["draft"].predict(feeds, function=f"w{width}")
    )
    target = app.StateGraph(made["target"].meta, lambda feeds: programs["target"].predict(feeds, state))
    prompt, count = [3, 17, 50, 9, 77, 12, 40], 24
    ids = list(range(families.VOCAB))
    text, accepted = app.greedy_rounds(prompt, target, draft, ids, families.VOCAB, k=3, count=count)
    alone = CoreMLGraph.load(
        tmp_path / "target" / "model.mlpackage", made["target"].meta, execution="evaluator"
    )
    own = list(prompt)
    while len(own) < len(prompt) + count:
        logits = alone.forward(own[alone.length :], logits="last").logits
        alone.commit(range(len(own) - alone.length))
        own.append(int(logits[-1].argmax()))
    assert text == own[len(prompt) :]
    assert accepted > 0
