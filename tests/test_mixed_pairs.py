"""Pairs of two backends in one process: the text is the target's own, whoever drafts and however it rounds.

Pairs of ExecuTorch and ONNX Runtime alone are in `test_mixed_executorch.py`.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

import outrider
from outrider.contracts import Graph, Sampling
from outrider.export.npu import export_npu
from outrider.export.onnx import export_graph
from outrider.quantize.npu_recipes import get_npu_recipe
from outrider.quantize.recipes import get_recipe
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.rounds import Engine, Request
from outrider.targets.onnxruntime import OnnxGraph
from outrider.targets.qnn import NpuGraph
from outrider.targets.qnn_plugin import has_emulator
from tests import families
from tests.pte import tiny_pte

pytestmark = pytest.mark.usefixtures("traced_once")
emulated = pytest.mark.skipif(
    not has_emulator() or importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="the emulator is in the x86-64 wheel of onnxruntime-qnn only",
)
EMULATOR = pytest.param("emulator", marks=emulated)
PROMPT = [5, 9, 2, 7, 7, 1, 8, 3]
FEW = 4  # ids of the vocabulary whose texts are enumerated
SMALLEST_P = 1e-4  # a right sampler fails one test in 10,000; the seeds are fixed


@dataclass(frozen=True)
class Model:
    """A tiny random llama; `seed` 1 is unrelated to `seed` 0."""

    seed: int
    vocab: int = families.VOCAB

    @property
    def oracle(self) -> Any:
        """By transformers; its head is loud enough to prefer some tokens."""
        model = families.oracle("llama", self.seed, vocab_size=self.vocab)
        model.lm_head.weight.data *= 2
        return model


@pytest.fixture(scope="module")
def open_graph(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Model], Graph]:
    """Export a model once for a backend: "onnx" (float32 on the CPU), or as static QDQ graphs: "qdq" by the CPU's
    kernels, "emulator" on the emulated NPU."""
    made: dict[tuple[str, Model], Any] = {}

    def exported(kind: str, model: Model) -> Any:
        if (kind, model) not in made:
            weights = families.weights_of("llama", model.oracle)
            place = tmp_path_factory.mktemp(kind)
            size = {"max_context": families.CONTEXT}
            if kind == "onnx":
                made[kind, model] = export_graph(
                    weights.config, weights, get_recipe("fp32"), path=place / "graph.onnx", **size
                )
            else:
                texts = np.random.default_rng(0).integers(0, model.vocab, (32, 60)).tolist()
                made[kind, model] = export_npu(
                    weights.config,
                    weights,
                    get_npu_recipe("a16w8"),
                    place,
                    widths=(1, 2, 8),
                    calibration=texts,
                    **size,
                )
        return made[kind, model]

    def open_one(backend: str, model: Model) -> Graph:
        if backend == "onnx":
            report = exported("onnx", model)
            return OnnxGraph.load(report.path, report.meta, threads=1)
        lowered = exported("npu", model)
        execution: Any = "cpu" if backend == "qdq" else backend
        return NpuGraph.load(
            lowered.files[0],
            {**lowered.meta, "functions": dict(lowered.functions)},
            embedding=lowered.embedding_file,
            execution=execution,
            threads=1,
        )

    return open_one


def text(engine: Engine, request: Request) -> list[int]:
    return [token for part in engine.decode(PROMPT, request) for token in part.tokens]


def drafting(target: Graph, draft: Graph) -> Engine:
    return Engine(target, {"model": ModelDrafter(draft, min_confidence=0.0)})


@pytest.mark.parametrize("draft", ["qdq", EMULATOR])
@pytest.mark.parametrize("seed", [0, 1], ids=["same model", "unrelated model"])
def test_greedy_text_with_a_quantized_draft_is_the_targets_own(
    open_graph: Callable[[str, Model], Graph], draft: str, seed: int
) -> None:
    request = Request(max_new_tokens=40, k=0)
    plain = text(Engine(open_graph("onnx", Model(0))), request)
    engine = drafting(open_graph("onnx", Model(0)), open_graph(draft, Model(seed)))
    for k in (1, 4):
        parts = list(engine.decode(PROMPT, replace(request, k=k)))
        assert [token for part in parts for token in part.tokens] == plain
        if seed == 0:  # it does draft, and what it drafts is nearly always what the float target says
            assert parts[-1].stats.acceptance > 0.8
        else:
            assert parts[-1].stats.acceptance < 0.5


@pytest.mark.parametrize("target", ["qdq", EMULATOR])
def test_greedy_text_of_a_quantized_target_is_its_own_whoever_drafts(
    open_graph: Callable[[str, Model], Graph], target: str
) -> None:
    request = Request(max_new_tokens=30, k=0)
    plain = text(Engine(open_graph(target, Model(0))), request)
    for draft in ("onnx", "qdq"):
        engine = drafting(open_graph(target, Model(0)), open_graph(draft, Model(0)))
        assert text(engine, replace(request, k=3)) == plain


@emulated
def test_an_emulated_draft_leaves_the_text_of_an_executorch_target_alone(
    open_graph: Callable[[str, Model], Graph],
) -> None:
    pytest.importorskip("executorch", reason="executorch is not installed")
    from outrider.targets.executorch import ExecutorchGraph

    pte = tiny_pte("llama", "8da4w")

    def target() -> Graph:
        return ExecutorchGraph.load(pte.path, pte.meta, threads=1)

    request = Request(max_new_tokens=24, k=0)
    parts = list(drafting(target(), open_graph("emulator", Model(0))).decode(PROMPT, replace(request, k=3)))
    assert [token for part in parts for token in part.tokens] == text(Engine(target()), request)
    assert parts[-1].stats.accepted > 0


@pytest.mark.parametrize("draft", ["qdq", EMULATOR])
def test_match_gives_the_seeded_plain_text_with_a_quantized_draft(
    open_graph: Callable[[str, Model], Graph], draft: str
) -> None:
    plain = Engine(open_graph("onnx", Model(0)))
    engine = drafting(open_graph("onnx", Model(0)), open_graph(draft, Model(1)))
    for seed in range(3):
        sampling = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=seed)
        request = Request(sampling, max_new_tokens=16, k=0)
        expected = text(plain, request)
        assert text(engine, replace(request, k=2 + seed)) == expected


@emulated
def test_a_bundle_for_a_snapdragon_drafts_on_the_emulated_npu_where_it_is_asked_for(
    tmp_path: Path, tiny_models: dict[str, Path], export_tiny: Callable[..., Any]
) -> None:
    role = (tiny_models["target"], "fp32")
    backends = ("onnxruntime", "qnn")
    device = "snapdragon-8-gen3"
    export_tiny(tmp_path / "bundle", role, role, device=device, backends=backends, evaluate=False)
    options = {"max_tokens": 24, "ignore_eos": True}
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        with outrider.load(tmp_path / "bundle", draft=False) as plain:
            expected = plain.generate("the quick brown fox", sampling=sampling, k=0, **options)
        with outrider.load(tmp_path / "bundle", draft_unit="npu") as pipeline:
            target, draft = pipeline.placement
            found = pipeline.generate(
                "the quick brown fox", sampling=sampling, k=3, drafter="model", **options
            )
        assert (target.unit, draft.unit, draft.profile) == ("cpu", "npu", "split")
        assert "emulator" in str(draft)
        assert found.text == expected.text
        assert found.stats.acceptance > 0.8


def chances(model: Any, sampling: Sampling, length: int) -> np.ndarray:
    """The probability of every text of so many tokens after the prompt, by transformers. [FEW ** length]"""
    prompt = [token % FEW for token in PROMPT]
    found = []
    for tokens in itertools.product(range(FEW), repeat=length):
        rows = families.reference_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1].astype(np.float64)
        p = np.exp((rows - rows.max(axis=1, keepdims=True)) / sampling.temperature)
        p /= p.sum(axis=1, keepdims=True)
        found.append(p[np.arange(length), list(tokens)].prod())
    return np.array(found)


def p_value(engine: Engine, sampling: Sampling, expected: np.ndarray, k: int, runs: int) -> float:
    """Chi-square of so many seeded texts against the enumeration; cells below 5 expected are pooled."""
    prompt = [token % FEW for token in PROMPT]
    length = round(np.log(len(expected)) / np.log(FEW))
    counts = np.zeros(len(expected))
    for seed in range(runs):
        request = Request(replace(sampling, seed=seed), max_new_tokens=length + 1, k=k)
        tokens = [token for part in engine.decode(prompt, request) for token in part.tokens][:length]
        counts[sum(token * FEW ** (length - 1 - i) for i, token in enumerate(tokens))] += 1
    due = runs * expected
    rare = due < 5
    cells = [*zip(counts[~rare], due[~rare], strict=True)]
    if due[rare].sum() > 1:
        cells.append((counts[rare].sum(), due[rare].sum()))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


@pytest.mark.parametrize(
    ("draft", "length", "runs"), [("qdq", 2, 250), pytest.param("emulator", 2, 120, marks=emulated)]
)
def test_reject_with_a_quantized_draft_has_the_targets_distribution(
    open_graph: Callable[[str, Model], Graph], draft: str, length: int, runs: int
) -> None:
    target, other = Model(0, FEW), Model(1, FEW)
    sampling = Sampling(temperature=1.0, mode="reject")
    engine = drafting(open_graph("onnx", target), open_graph(draft, other))
    expected = chances(target.oracle, sampling, length)
    assert p_value(engine, sampling, expected, length, runs) > SMALLEST_P
    # The draft's own distribution is so far off that the test would notice it.
    assert p_value(Engine(open_graph("qdq", other)), sampling, expected, 0, runs) < SMALLEST_P


@pytest.mark.parametrize("draft", ["onnx", "qdq", EMULATOR])
def test_two_libraries_overlap_and_write_what_they_write_one_after_another(
    open_graph: Callable[[str, Model], Graph], draft: str
) -> None:
    request = Request(max_new_tokens=40, k=3, drafting="overlapped")
    engine = drafting(open_graph("onnx", Model(0)), open_graph(draft, Model(0)))
    parts = list(engine.decode(PROMPT, request))
    serial = drafting(open_graph("onnx", Model(0)), open_graph(draft, Model(0)))
    assert [token for part in parts for token in part.tokens] == text(
        serial, replace(request, drafting="serial")
    )
    assert parts[-1].stats.guesses_held > 3
    engine.settle()
