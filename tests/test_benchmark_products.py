"""The bound that a step's products alone give."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

from benchmarks.products import OPERATOR, measure, only_products
from outrider.errors import UsageError
from outrider.manifest import read_manifest


def test_every_product_of_a_graph_is_kept_and_waits_for_no_other(
    quantized_bundle: Path, tmp_path: Path
) -> None:
    bundle = shutil.copytree(
        quantized_bundle, tmp_path / "bundle"
    )  # onnx's checker refuses files with hard links
    graph = bundle / read_manifest(bundle).roles["target"].graphs[0].path
    whole = [node for node in onnx.load(graph).graph.node if node.op_type == OPERATOR]
    path = only_products(graph, tmp_path)
    alone = onnx.load(path, load_external_data=False)
    assert len(alone.graph.node) == len(alone.graph.output) == len(whole) > 0
    assert {node.input[1] for node in alone.graph.node} == {node.input[1] for node in whole}
    inputs = {value.name for value in alone.graph.input}
    assert all(node.input[0] in inputs for node in alone.graph.node)
    found = measure({"a": path, "b": path}, threads=1, repeats=3)
    assert all(median.n == 3 and median.value > 0 for median in found.values())


def test_a_graph_without_blocks_has_no_such_bound(float_bundle: Path, tmp_path: Path) -> None:
    graph = float_bundle / read_manifest(float_bundle).roles["target"].graphs[0].path
    with pytest.raises(UsageError, match="no MatMulNBits"):
        only_products(graph, tmp_path)
