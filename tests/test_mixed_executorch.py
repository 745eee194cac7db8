"""Bundles whose roles run by different libraries: an ExecuTorch draft or target beside an ONNX one.

`test_mixed_pairs.py` holds the engine to the same promise with graphs that it opens itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch", reason="executorch is not installed")

import outrider
from outrider.cli.options import _UNSET
from outrider.cli.profile import _pipelines
from outrider.contracts import Sampling

PROMPT = "the quick brown fox"
SAMPLINGS = {
    "greedy": Sampling(),
    "match": Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3),
}
PAIRS = [("onnxruntime", "executorch"), ("executorch", "onnxruntime"), ("executorch", "executorch")]


@pytest.fixture(scope="module")
def bundle(
    tmp_path_factory: pytest.TempPathFactory,
    write_model: Callable[..., Path],
    export_tiny: Callable[..., Any],
) -> Path:
    """A target and an unrelated draft, each as ONNX and as .pte."""
    folder = tmp_path_factory.mktemp("mixed")
    target = write_model(folder / "target", layers=1, vocab=328, seed=0)
    draft = write_model(folder / "draft", layers=1, vocab=336, seed=1)
    backends = ("executorch", "onnxruntime")
    export_tiny(
        folder / "bundle",
        (target, "int8"),
        (draft, "int8"),
        backends=backends,
        max_context=64,
        evaluate=False,
    )
    return folder / "bundle"


@pytest.fixture(scope="module")
def plain(bundle: Path) -> Callable[[str, str], str]:
    """The text of a target alone, by its backend and sampling."""
    found: dict[tuple[str, str], str] = {}

    def text(backend: str, sampling: str) -> str:
        if (backend, sampling) not in found:
            with outrider.load(bundle, target_backend=backend, draft=False) as pipeline:
                for name, value in SAMPLINGS.items():
                    found[backend, name] = generate(pipeline, value, k=0).text
        return found[backend, sampling]

    return text


def generate(pipeline: Any, sampling: Sampling, **options: Any) -> Any:
    return pipeline.generate(PROMPT, sampling=sampling, max_tokens=32, ignore_eos=True, **options)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("target", "draft"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_text_is_the_targets_own_whichever_library_drafts(
    bundle: Path, plain: Callable[[str, str], str], target: str, draft: str, sampling: str
) -> None:
    expected = plain(target, sampling)
    with outrider.load(bundle, target_backend=target, draft_backend=draft, threads=1) as pipeline:
        assert [placed.backend for placed in pipeline.placement] == [target, draft]
        for k, drafting in ((1, "serial"), (3, "serial"), (1, "overlapped")):
            found = generate(pipeline, SAMPLINGS[sampling], k=k, drafter="model", drafting=drafting)
            assert found.text == expected
            assert found.stats.evaluated > 0
            assert (found.stats.overlapped_rounds > 0) == (drafting == "overlapped")


def test_a_prompt_longer_than_the_widest_forward_is_read_in_chunks(bundle: Path) -> None:
    words = " fox dog" * 12
    with outrider.load(bundle, target_backend="executorch", draft_backend="executorch") as pipeline:
        widest = max(pipeline.engine.target.widths)
        assert len(pipeline.tokenizer.encode(words)) < 60
        assert pipeline.placement[0].prefill_width is not None
        assert pipeline.placement[0].prefill_width <= widest
        found = pipeline.generate(words, max_tokens=8, ignore_eos=True, k=2, drafter="model")
    with outrider.load(bundle, target_backend="executorch", draft=False) as pipeline:
        assert pipeline.generate(words, max_tokens=8, ignore_eos=True, k=0).text == found.text


ALONE = """
import sys, outrider
with outrider.load(sys.argv[1], target_backend="executorch", draft=False) as pipeline:
    print(pipeline.machine)
print([name for name in ("torch", "onnxruntime") if name in sys.modules])
"""


def test_an_executorch_pipeline_loads_no_other_library(bundle: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(bundle)]
    machine, loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert loaded == "[]"
    assert ", executorch 1" in machine
    assert "onnxruntime" not in machine


def test_a_profile_finds_the_precisions_that_a_bundle_holds(bundle: Path) -> None:
    with ExitStack() as stack:
        options = {**_UNSET, "precisions": "all"}
        found, notes = _pipelines(bundle, options, stack)
        backends = {name: [placed.backend for placed in one.placement] for name, one in found.items()}
    assert notes == ()
    assert backends == {
        "": ["executorch", "executorch"],
        "int8 target": ["onnxruntime", "executorch"],
        "int8 draft": ["executorch", "onnxruntime"],
    }
