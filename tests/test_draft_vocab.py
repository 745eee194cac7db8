"""A draft that keeps a part of its vocabulary: the right rows, the right ids, the same text, clear refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from outrider.contracts import Sampling
from outrider.errors import BundleError, CheckpointError, ExportError, UsageError
from outrider.export.checkpoint import open_checkpoint
from outrider.export.evaluate import PROBE
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights, slot_shape
from outrider.export.tokenizer_files import TokenizerFiles
from outrider.export.trim import TrimmedWeights, choose_ids, required_ids, token_counts
from outrider.manifest import parse_manifest, read_manifest
from outrider.quantize.quality import compare, pair_acceptance
from outrider.runtime.check import check_bundle
from outrider.runtime.context import Context
from outrider.runtime.load import draft_ids
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.proof import agreement
from outrider.runtime.uniforms import draft_generator
from outrider.runtime.vocab_map import VOCAB_MAP, read_vocab_map, write_vocab_map
from outrider.targets.fake import FakeGraph, random_logits
from tests.conftest import SPECIALS, TEXTS
from tests.families import FAMILIES, StateCheckpoint, checkpoint_of, oracle

VOCAB, KEPT = 12, np.array([1, 4, 5, 8, 11])
DRAFT_VOCAB = 290


@pytest.fixture(scope="module")
def tokenizer(byte_level_bpe: Any) -> TokenizerFiles:
    """The tiny tokenizer with its end token and a template that uses two of the three control tokens."""
    return TokenizerFiles(
        tokenizer_json=byte_level_bpe.to_str(),
        chat_template="{{ '<|start|>' }}{{ messages }}{{ '<|stop|>' }}",
        bos_id=1,
        add_bos=False,
        eos_ids=(0,),
        vocab_size=byte_level_bpe.get_vocab_size(),
        special_ids={name: index for index, name in enumerate(SPECIALS)},
    )


@lru_cache
def family_checkpoint(family: str) -> StateCheckpoint:
    """A tiny random model of a family."""
    return checkpoint_of(family, oracle(family))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40, unique=True).map(sorted))
@settings(deadline=None)
def test_a_map_comes_back_as_it_was_written(tmp_path_factory: Any, ids: list[int]) -> None:
    path = tmp_path_factory.mktemp("map") / VOCAB_MAP
    write_vocab_map(path, np.array(ids))
    assert path.stat().st_size == 4 * len(ids)
    assert int.from_bytes(path.read_bytes()[-4:], "little") == ids[-1]
    assert read_vocab_map(path, len(ids), ids[-1] + 1).tolist() == ids


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (np.array([1, 2, 9], "<i4").tobytes()[:-1], "11 bytes.*cut off"),
        (np.array([1, 2], "<i4").tobytes(), "2 ids for 3 logits"),
        (np.array([1, 9, 9], "<i4").tobytes(), "not ascending: 9 is followed by 9"),
        (np.array([5, 2, 9], "<i4").tobytes(), "not ascending: 5 is followed by 2"),
        (np.array([1, 2, 20], "<i4").tobytes(), "names id 20; the draft has 20 ids"),
        (np.array([-1, 2, 9], "<i4").tobytes(), "names id -1"),
        (b"", "0 ids for 3 logits"),
    ],
)
def test_a_damaged_map_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / VOCAB_MAP
    path.write_bytes(data)
    with pytest.raises(BundleError, match=said):
        read_vocab_map(path, 3, 20)


def test_a_missing_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        read_vocab_map(tmp_path / VOCAB_MAP, 3, 20)


def test_end_tokens_chat_tokens_and_every_byte_are_kept(
    tokenizer: TokenizerFiles, byte_level_bpe: Any
) -> None:
    kept = required_ids(tokenizer)
    tokens = {byte_level_bpe.id_to_token(int(index)) for index in kept}
    assert {"<|end|>", "<|start|>", "<|stop|>"} <= tokens
    assert len(tokens) == 256 + 3
    without = replace(tokenizer, chat_template=None)
    assert [byte_level_bpe.id_to_token(int(i)) for i in required_ids(without) if i < 3] == ["<|end|>"]


def test_named_bytes_and_ascii_are_kept_of_a_vocabulary_with_byte_fallback(byte_fallback_bpe: Any) -> None:
    vocab = byte_fallback_bpe.get_vocab()
    files = TokenizerFiles(byte_fallback_bpe.to_str(), None, 1, True, (2,), len(vocab))
    kept = set(required_ids(files).tolist())
    assert {vocab["</s>"], vocab["<0x00>"], vocab["<0xFF>"], vocab["▁"], vocab["z"], vocab["."]} <= kept
    assert not {vocab["▁the"], vocab["th"], vocab["é"], vocab["<unk>"]} & kept


@pytest.mark.parametrize("size", [260, 275, 300, 319])
def test_ids_are_ascending_as_many_as_asked_for_and_hold_what_is_required(
    tokenizer: TokenizerFiles, size: int
) -> None:
    ids = choose_ids(tokenizer, size, 328)
    assert len(ids) == size
    assert (np.diff(ids) > 0).all()
    assert set(required_ids(tokenizer).tolist()) <= set(ids.tolist())
    assert ids[-1] < 320  # rows that pad the embedding are no tokens


def test_what_a_target_writes_often_is_kept(tokenizer: TokenizerFiles) -> None:
    late = np.array([318, 317, 310])
    assert not set(late.tolist()) & set(choose_ids(tokenizer, 263, 328, []).tolist())
    chosen = choose_ids(tokenizer, 263, 328, [np.repeat(late, 50_000)])
    assert set(late.tolist()) <= set(chosen.tolist())


def test_without_a_text_the_lowest_ids_are_kept(tokenizer: TokenizerFiles) -> None:
    required = set(required_ids(tokenizer).tolist())
    rest = [index for index in range(320) if index not in required]
    chosen = choose_ids(tokenizer, len(required) + 5, 328, [])
    assert set(chosen.tolist()) - required == set(rest[:5])


def test_tokens_are_counted_in_texts_and_in_ids(tokenizer: TokenizerFiles, byte_level_bpe: Any) -> None:
    ids = byte_level_bpe.encode(TEXTS[0], add_special_tokens=False).ids
    counts = token_counts(tokenizer, [TEXTS[0], np.array(ids)], 328)
    assert counts.sum() == 2 * len(ids)
    assert counts[ids[0]] == 2 * ids.count(ids[0])


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (328, "328 tokens, so nothing is left out"),
        (1000, "nothing is left"),
        (259, "between 260"),
        (1, "between 260"),
        (325, "and 320"),
    ],
)
def test_an_impossible_size_is_refused(tokenizer: TokenizerFiles, size: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choose_ids(tokenizer, size, 328)


@pytest.mark.parametrize("family", FAMILIES)
def test_trimmed_logits_are_columns_of_the_whole_in_every_family(family: str) -> None:
    checkpoint = family_checkpoint(family)
    ids = np.array([0, 3, 17, 50, 95])
    weights = TrimmedWeights(checkpoint, ids)
    tokens = [np.random.default_rng(0).integers(0, 96, 9)]
    whole, part = FloatReference(SlotWeights(checkpoint)), FloatReference(weights)
    expected = next(whole.rows(whole.final_states(tokens)))[:, ids]
    np.testing.assert_allclose(next(part.rows(part.final_states(tokens))), expected, atol=1e-5)
    assert slot_shape(weights.config, "head") == (5, 64)
    assert slot_shape(weights.config, "embedding") == (96, 64)


@pytest.mark.parametrize("ids", [[], [3, 3], [4, 2], [-1, 2], [0, 96]])
def test_a_head_of_impossible_rows_is_refused(ids: list[int]) -> None:
    with pytest.raises(ExportError, match="ascending and below 96"):
        TrimmedWeights(family_checkpoint("llama"), np.array(ids, np.int64))


def test_a_configuration_cannot_trim_a_head_that_is_the_embedding() -> None:
    config = family_checkpoint("smollm").config
    with pytest.raises(CheckpointError, match="cannot be the embedding"):
        replace(config, head_rows=5)
    with pytest.raises(CheckpointError, match="head of 97 rows"):
        replace(config, tie_embeddings=False, head_rows=97)


def drafters(min_confidence: float = 0.0) -> tuple[ModelDrafter, ModelDrafter]:
    """A trimmed draft, and the whole one whose other logits are minus infinity."""
    logits = random_logits(VOCAB, seed=4, order=2)

    def masked(context: tuple[int, ...]) -> Any:
        row = np.full(VOCAB, -np.inf, np.float32)
        row[KEPT] = logits(context)[KEPT]
        return row

    trimmed = FakeGraph(VOCAB, logits=logits, columns=KEPT)
    return (
        ModelDrafter(trimmed, VOCAB, min_confidence, vocab_ids=KEPT, known_ids=VOCAB),
        ModelDrafter(FakeGraph(VOCAB, logits=masked), VOCAB, min_confidence),
    )


SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalties and bias": Sampling(
        repetition_penalty=1.4, frequency_penalty=0.3, logit_bias={4: 1.0, 2: 9.0}
    ),
    "match": Sampling(temperature=0.9, seed=3),
    "reject": Sampling(temperature=1.1, mode="reject"),
    "reject, truncated": Sampling(temperature=1.0, top_k=3, top_p=0.9, mode="reject"),
    "reject, min-p and bans": Sampling(temperature=1.0, min_p=0.2, banned_tokens=(5, 6), mode="reject"),
    "reject, penalties": Sampling(
        temperature=0.8,
        repetition_penalty=1.5,
        presence_penalty=0.4,
        logit_bias={8: -0.5, 0: 3.0},
        mode="reject",
    ),
}


@pytest.mark.parametrize("confidence", [0.0, 0.35])
@pytest.mark.parametrize("setting", SAMPLINGS)
def test_a_trimmed_draft_proposes_what_the_whole_one_would_without_the_other_tokens(
    setting: str, confidence: float
) -> None:
    trimmed, masked = drafters(confidence)
    sampling = SAMPLINGS[setting]
    context = Context([0, 2, 4, 6])
    for turn in range(12):
        ours, theirs = (
            drafter.propose(context, 4, sampling, draft_generator(7, turn)) for drafter in (trimmed, masked)
        )
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert set(ours.tokens.tolist()) <= set(KEPT.tolist())
        np.testing.assert_allclose(whole(ours), whole(theirs), atol=1e-6)
        context.extend([*ours.tokens[: turn % 3].tolist(), turn % VOCAB])


def whole(proposal: Any) -> Any:
    """q over all ids."""
    q = np.zeros((len(proposal), VOCAB))
    if proposal.q is not None:
        q[:, np.arange(VOCAB) if proposal.vocab_ids is None else proposal.vocab_ids] = proposal.q
    return q


def test_a_draft_all_of_whose_tokens_are_banned_proposes_none() -> None:
    trimmed, _ = drafters()
    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, mode="reject")):
        banned = replace(sampling, banned_tokens=tuple(KEPT.tolist()))
        assert len(trimmed.propose(Context([1, 2]), 3, banned, draft_generator(0, 0))) == 0


def test_a_trimmed_draft_reads_every_id_of_its_embedding_and_no_other() -> None:
    graph = FakeGraph(VOCAB, columns=KEPT)
    drafter = ModelDrafter(graph, 99, 0.0, vocab_ids=KEPT, known_ids=VOCAB)
    assert len(drafter.propose(Context([10, 0]), 2, Sampling(), draft_generator(0, 0))) == 2
    assert len(drafter.propose(Context([10, VOCAB]), 2, Sampling(), draft_generator(0, 0))) == 0


def test_ids_past_the_tokenizer_are_never_proposed() -> None:
    rows = np.zeros(VOCAB, np.float32)
    rows[11], rows[8] = 9.0, 5.0
    graph = FakeGraph(VOCAB, logits=lambda context: rows, columns=KEPT)
    drafter = ModelDrafter(graph, 11, 0.0, vocab_ids=KEPT, known_ids=VOCAB)
    assert drafter.propose(Context([1]), 1, Sampling(), draft_generator(0, 0)).tokens.tolist() == [8]


def test_a_map_of_another_length_than_the_logits_is_refused() -> None:
    with pytest.raises(UsageError, match="4 vocab_ids for a graph with 5 logits"):
        ModelDrafter(FakeGraph(VOCAB, columns=KEPT), vocab_ids=KEPT[:-1])
    with pytest.raises(UsageError, match="vocab_ids begin at 1"):
        ModelDrafter(FakeGraph(VOCAB, columns=KEPT), 1, vocab_ids=KEPT, known_ids=VOCAB)


def test_acceptance_counts_q_as_zero_outside_the_head() -> None:
    rng = np.random.default_rng(0)
    target, draft = rng.standard_normal((2, 6, VOCAB)).astype(np.float32)
    target[0, 3] = 9.0  # outside: no match, however sure the target is
    found = pair_acceptance([target], [draft[:, KEPT]], 6, KEPT)
    p = np.exp(target) / np.exp(target).sum(1, keepdims=True)
    q = np.zeros_like(p)
    q[:, KEPT] = np.exp(draft[:, KEPT]) / np.exp(draft[:, KEPT]).sum(1, keepdims=True)
    assert found.sum_min_pq == pytest.approx(np.minimum(p, q).sum(1).mean(), abs=1e-6)
    assert found.greedy_match == pytest.approx((p.argmax(1) == q.argmax(1)).mean())


def test_a_trimmed_graph_is_compared_with_the_same_columns_of_the_reference() -> None:
    rows = np.random.default_rng(1).standard_normal((7, VOCAB)).astype(np.float32)
    tokens = np.array([0, 1, 4, 2, 5, 8, 1])  # three of the six predicted tokens are not in the head
    quality = compare([rows], [rows[:, KEPT]], tokens, KEPT)
    inside = rows[:, KEPT] - np.log(np.exp(rows[:, KEPT]).sum(1, keepdims=True))
    losses = [-inside[i, list(KEPT).index(t)] for i, t in enumerate(tokens[1:]) if t in KEPT]
    assert (
        quality.perplexity == quality.perplexity_reference == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    )
    assert (quality.kl_mean, quality.top1_agreement) == (pytest.approx(0, abs=1e-6), 1.0)
    assert agreement(rows[:, KEPT], rows, KEPT).max_abs_error == 0
    assert agreement(rows[:, KEPT], rows).max_abs_error > 0


@pytest.fixture(scope="module")
def trimmed_bundle(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], trace_cache: Callable[..., None]
) -> Path:
    """A float target, and itself with a trimmed head as the draft; evaluated."""
    from outrider.export.bundle import ExportOptions, RoleOptions, export_bundle

    folder = tmp_path_factory.mktemp("trimmed") / "bundle"
    model = str(tiny_models["target"])
    draft = RoleOptions(model, "fp32", vocab=DRAFT_VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        trace_cache(patch)
        export_bundle(ExportOptions(RoleOptions(model, "fp32"), folder, draft=draft, max_context=256))
    return folder


def test_the_manifest_says_what_was_kept(trimmed_bundle: Path) -> None:
    graph = read_manifest(trimmed_bundle).roles["draft"].graphs[0]
    assert graph.vocab_map == f"draft/{VOCAB_MAP}"
    assert graph.vocab_map in graph.files
    assert (graph.vocab_size, graph.options["embedding_rows"]) == (DRAFT_VOCAB, 328)
    assert graph.files[graph.vocab_map].bytes == 4 * DRAFT_VOCAB
    assert read_manifest(trimmed_bundle).roles["target"].graphs[0].vocab_map is None


def test_the_quality_says_what_trimming_cost(trimmed_bundle: Path) -> None:
    """The draft is the target: what is left of its acceptance is the target's probability of what was kept."""
    pair = read_manifest(trimmed_bundle).quality["pair"]
    assert pair["draft_vocab"] == DRAFT_VOCAB
    assert pair["sum_min_pq_float_draft"] == pytest.approx(1, abs=1e-5)
    assert 0.5 < pair["sum_min_pq_trimmed_float_draft"] < 0.999
    assert pair["sum_min_pq"] == pytest.approx(pair["sum_min_pq_trimmed_float_draft"], abs=1e-4)
    assert pair["greedy_match"] == pytest.approx(pair["greedy_match_trimmed_float_draft"], abs=0.01)
    draft = read_manifest(trimmed_bundle).quality["draft"]
    assert draft["kl_mean"] == pytest.approx(0, abs=1e-5)
    assert draft["perplexity_increase"] == pytest.approx(0, abs=1e-4)


def test_the_probe_holds_the_whole_vocabulary_and_check_compares_the_columns(trimmed_bundle: Path) -> None:
    with np.load(trimmed_bundle / "draft" / PROBE) as probe:
        assert probe["logits"].shape == (4, 328)
    found = check_bundle(trimmed_bundle, max_tokens=24)
    assert found.ok, found.problems
    draft = next(graph for graph in found.graphs if graph.role == "draft")
    assert draft.max_abs_error is not None
    assert draft.max_abs_error < 1e-3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=4)])
def test_a_bundle_with_a_trimmed_draft_writes_the_text_of_its_target(
    trimmed_bundle: Path, sampling: Sampling
) -> None:
    with outrider.load(trimmed_bundle, threads=1) as pipeline:
        plain = pipeline.generate("the quick brown", k=0, max_tokens=48, sampling=sampling, ignore_eos=True)
        pipeline.reset()
        drafted = pipeline.generate(
            "the quick brown", k=4, drafter="model", max_tokens=48, sampling=sampling, ignore_eos=True
        )
        drafter = pipeline.engine.drafters["model"]
        assert isinstance(drafter, ModelDrafter)
        assert drafter.vocab_ids is not None
        assert len(drafter.vocab_ids) == DRAFT_VOCAB
    assert drafted.tokens == plain.tokens
    assert drafted.stats.accepted > 0


def test_a_map_that_does_not_fit_its_graph_stops_the_load(trimmed_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(trimmed_bundle, copy)
    path = copy / "draft" / VOCAB_MAP
    ids = np.frombuffer(path.read_bytes(), "<i4").copy()
    ids[[0, 1]] = ids[[1, 0]]
    path.write_bytes(ids.tobytes())
    with pytest.raises(BundleError, match="not ascending"):
        outrider.load(copy)
    outrider.load(copy, draft=False).close()


@pytest.mark.parametrize("rows", [0, -1, "many", [328], True])
def test_a_number_of_ids_that_is_none_is_refused(trimmed_bundle: Path, rows: Any) -> None:
    graph = read_manifest(trimmed_bundle).roles["draft"].graphs[0]
    wrong = replace(graph, options={**graph.options, "embedding_rows": rows})
    with pytest.raises(BundleError, match=r"embedding_rows of draft/graph|names id"):
        draft_ids(trimmed_bundle, wrong)


def test_a_trimmed_graph_whose_map_was_left_out_is_refused(trimmed_bundle: Path) -> None:
    """Its columns would be taken for the first ids, and nearly nothing that it drafts would be accepted."""
    graph = read_manifest(trimmed_bundle).roles["draft"].graphs[0]
    with pytest.raises(BundleError, match="has 290 logits for 328 ids and no vocab_map"):
        draft_ids(trimmed_bundle, replace(graph, vocab_map=None))


def test_a_target_with_a_vocabulary_map_is_refused(trimmed_bundle: Path) -> None:
    raw = json.loads((trimmed_bundle / "manifest.json").read_text())
    raw["roles"]["target"]["graphs"][0]["files"][f"draft/{VOCAB_MAP}"] = raw["roles"]["draft"]["graphs"][0][
        "files"
    ][f"draft/{VOCAB_MAP}"]
    raw["roles"]["target"]["graphs"][0]["vocab_map"] = f"draft/{VOCAB_MAP}"
    with pytest.raises(BundleError, match="a target must have its whole vocabulary"):
        parse_manifest(json.dumps(raw))


@pytest.mark.parametrize(
    ("precision", "profile"), [("int4", "split"), ("int8", "inplace"), ("int8-dynamic", "inplace")]
)
def test_a_quantized_trimmed_graph_gives_columns_of_the_whole_one(
    tiny_models: dict[str, Path], tmp_path: Path, traced_once: None, profile: Any, precision: str
) -> None:
    """Row-wise quantization: what is left of a head is quantized as it was in the whole."""
    from outrider.export.onnx import export_graph
    from outrider.quantize.recipes import get_recipe
    from outrider.targets.onnxruntime import OnnxGraph

    ids = np.sort(np.random.default_rng(0).permutation(328)[:DRAFT_VOCAB])
    rows = []
    with open_checkpoint(str(tiny_models["target"])) as checkpoint:
        for name, weights in (("whole", SlotWeights(checkpoint)), ("part", TrimmedWeights(checkpoint, ids))):
            report = export_graph(
                weights.config,
                weights,
                get_recipe(precision),
                profile,
                tmp_path / f"{name}.onnx",
                max_context=256,
                widths=(1, 4) if profile == "split" else (),
            )
            graph = OnnxGraph.load(report.path, report.meta, threads=1)
            logits = graph.forward([300, 5, 17, 2]).logits
            assert isinstance(logits, np.ndarray)
            rows.append(logits.copy())
            graph.close()
    assert rows[1].shape == (4, len(ids))
    np.testing.assert_allclose(rows[1], rows[0][:, ids], atol=2e-3 if precision != "int8-dynamic" else 0.2)


def test_carried_blocks_of_a_tied_gguf_head_are_kept_row_by_row() -> None:
    from outrider.quantize.schemes import RawBlocks

    rng = np.random.default_rng(0)
    raw = RawBlocks("Q8_0", (96, 64), rng.integers(0, 255, (96, 68), dtype=np.uint8))

    class Blocks:
        config = family_checkpoint("smollm").config

        def tensor(self, name: str) -> Any:
            return np.zeros((96, 64), np.float32)

        def raw(self, name: str) -> RawBlocks:
            assert name == "model.embed_tokens.weight"
            return raw

    weights = TrimmedWeights(Blocks(), np.array([2, 50]))
    head, embedding = weights.raw("head"), weights.raw("embedding")
    assert head is not None
    assert embedding is not None
    assert head[0].shape == (2, 64)
    np.testing.assert_array_equal(head[0].data, raw.data[[2, 50]])
    assert embedding[0] is raw


def test_the_command_line_passes_the_size_on_and_refuses_it_without_a_draft(
    run_main: Any, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model = str(tiny_models["target"])
    code, _, err = run_main("export", "-m", model, "-o", str(tmp_path / "b"), "--draft-vocab", "300")
    assert code == 2
    assert "--draft-vocab was given, but no --draft-model" in err
    code, _, err = run_main(
        "export",
        "-m",
        model,
        "-md",
        model,
        "-o",
        str(tmp_path / "b"),
        "--max-context",
        "64",
        "--draft-vocab",
        "5",
    )
    assert code == 2
    assert "--draft-vocab is 5; it must be between 259" in err
    assert not (tmp_path / "b").exists()
