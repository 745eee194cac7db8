"""The examples of docs/mil-evaluator.md run as they stand, one after another."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DOCUMENT = Path(__file__).parents[1] / "docs" / "mil-evaluator.md"


def test_the_examples_run_and_print_what_the_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("coremltools")
    monkeypatch.chdir(tmp_path)
    text = DOCUMENT.read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # coremltools warns of torch's version, and of what it imports
            exec(compile(block, str(DOCUMENT), "exec"), names)
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"```\n(\{'x'.*?)```", text, re.DOTALL)
    assert shown.splitlines()[-1] in printed
    assert np.array_equal(names["outputs"]["summed"], np.ones((1, 4)))
    assert "state-alignment" in printed
