"""What the weights' products alone take: a bound on the decoding speed of any graph that is made of them.

    python -m benchmarks.products BUNDLE [--genai DIR ...] [--threads 2] [--repeats 30]

From each graph only the nodes `MatMulNBits` are kept, each with an input of its width and with its output returned, so
that nothing waits for anything else. The models run in turn, in one process, with the same session options.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import at_least, genai_folder, named, told
from benchmarks.summary import Median, describe, machine, markdown_table, median_interval
from outrider.errors import UsageError
from outrider.manifest import bundle_path, read_manifest
from outrider.targets.huge_pages import new_memory_on_huge_pages
from outrider.targets.onnx_session import ENTRIES

__all__ = ["measure", "only_products"]

OPERATOR = "MatMulNBits"


def only_products(graph_file: Path, folder: Path) -> Path:
    """Write a graph of the products of another into `folder`, over the same weights (hard links)."""
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load(graph_file, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == OPERATOR]
    if not nodes:
        raise UsageError(f"{graph_file} has no {OPERATOR}: it is not a graph of 4- or 8-bit blocks")
    inputs, outputs = {}, []
    for node in nodes:
        sizes = {attribute.name: attribute.i for attribute in node.attribute}
        inputs[sizes["K"]] = node.input[0] = f"x{sizes['K']}"
        if len(node.input) > 5:
            del node.input[5:]  # the bias: no weight of a product
        outputs.append(
            helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, [1, "width", sizes["N"]])
        )
    read = {name for node in nodes for name in node.input}
    weights = [tensor for tensor in model.graph.initializer if tensor.name in read]
    for name in {
        entry.value for tensor in weights for entry in tensor.external_data if entry.key == "location"
    }:
        _link(graph_file.parent / name, folder / name)
    xs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "width", K]) for K, name in inputs.items()
    ]
    graph = helper.make_graph(nodes, "products", xs, outputs, weights)
    written = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    onnx.save(written, folder / "products.onnx")
    return folder / "products.onnx"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system
        target.write_bytes(source.read_bytes())


def measure(graphs: Mapping[str, Path], threads: int, repeats: int) -> dict[str, Median]:
    """Milliseconds of one row through every product, by name; the graphs run in turn."""
    runs = {name: _runner(path, threads) for name, path in graphs.items()}
    took: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 3):
        for name, run in list(runs.items())[:: -1 if repeat % 2 else 1]:
            begin = time.perf_counter()
            run()
            if repeat >= 3:
                took[name].append(1e3 * (time.perf_counter() - begin))
    return {name: median_interval(samples) for name, samples in took.items()}


def _runner(path: Path, threads: int) -> Callable[[], None]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    for name, value in ENTRIES.items():
        options.add_session_config_entry(name, value)
    with new_memory_on_huge_pages():
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    binding, rng = session.io_binding(), np.random.default_rng(0)
    held: list[Any] = []
    for value in session.get_inputs():
        x = rng.standard_normal((1, 1, value.shape[-1])).astype(np.float32)
        held.append(ort.OrtValue.ortvalue_from_numpy(x))
        binding.bind_ortvalue_input(value.name, held[-1])
    for value in session.get_outputs():
        held.append(ort.OrtValue.ortvalue_from_numpy(np.zeros((1, 1, value.shape[-1]), np.float32)))
        binding.bind_ortvalue_output(value.name, held[-1])

    def run() -> None:
        assert held
        session.run_with_iobinding(binding)

    return run


@told
def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the products of every model take."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--genai", type=genai_folder, nargs="*", default=[], help="folders of onnxruntime-genai"
    )
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--repeats", type=at_least(1), default=30)
    args = parser.parse_args(arguments)
    [(name, bundle)] = named([args.bundle]).items()
    sources = {f"outrider {name}": _target(bundle)}
    genai = named(args.genai).items()
    sources |= {f"onnxruntime-genai {name}": folder / "model.onnx" for name, folder in genai}
    where = machine()
    with tempfile.TemporaryDirectory(dir=bundle.parent) as temporary:
        graphs = {}
        for number, (name, path) in enumerate(sources.items()):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            graphs[name] = only_products(path, folder)
        found = measure(graphs, args.threads, args.repeats)
    rows = [[name, f"{median:.2f}"] for name, median in found.items()]
    print(markdown_table(["products of", "ms, median [interval]"], rows))
    print(f"\n{describe(where)}, {args.threads} threads")
    return 0


def _target(bundle: Path) -> Path:
    graphs = [graph.path for graph in read_manifest(bundle).roles["target"].by_preference()]
    onnx = [path for path in graphs if path.endswith(".onnx")]
    if not onnx:
        raise UsageError(f"{bundle} has no ONNX graph of its target, only {', '.join(graphs)}")
    return bundle_path(bundle, onnx[0])


if __name__ == "__main__":
    sys.exit(main())
