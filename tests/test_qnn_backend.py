"""Static uint16 graphs for the Hexagon NPU: parity with a float model, the protocol's promises, and bad input.

Most run the QDQ files on ONNX Runtime's CPU kernels, which is fast; some on the emulated NPU of onnxruntime-qnn.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from outrider.contracts import Graph, TopK
from outrider.errors import BackendError, ContextError, MissingExtraError, UsageError
from outrider.export.npu import export_npu
from outrider.export.npu_context import compile_contexts
from outrider.quantize.npu_recipes import get_npu_recipe
from outrider.targets.npu_host import EmbeddingTable, KvCache, Scale, static_mask
from outrider.targets.qnn import NpuGraph, NpuMeta
from outrider.targets.qnn_plugin import (
    SocIds,
    binary_of,
    compiled_for,
    device_here,
    emulator_speaks_on_stderr,
    has_emulator,
    qnn_options,
    qnn_plugin,
)
from tests import families, npu_toy

emulated = pytest.mark.skipif(
    not has_emulator() or importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="the emulator is in the x86-64 wheel of onnxruntime-qnn only",
)
NEAR = 0.05  # in logits whose standard deviation is 3.7: what 16-bit activations cost


@pytest.fixture(scope="module")
def toy() -> npu_toy.FloatModel:
    return npu_toy.FloatModel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, toy: npu_toy.FloatModel) -> Path:
    place = tmp_path_factory.mktemp("toy")
    place.joinpath("meta.json").write_text(json.dumps(npu_toy.write(place, toy)))
    return place


@pytest.fixture(scope="module")
def meta(folder: Path) -> dict[str, Any]:
    return json.loads(folder.joinpath("meta.json").read_text())


@pytest.fixture
def load(folder: Path, meta: dict[str, Any]) -> Callable[..., NpuGraph]:
    def make(execution: str = "cpu", changes: dict[str, Any] | None = None, **options: Any) -> NpuGraph:
        options.setdefault("embedding", folder / "embedding.i8")
        described = {**meta, **(changes or {})}
        return NpuGraph.load(folder / "w1.onnx", described, execution=execution, threads=1, **options)

    return make


@pytest.mark.parametrize("execution", ["cpu", pytest.param("emulator", marks=emulated)])
def test_graph_equals_the_float_model_through_prefill_decode_tree_rollback_and_window(
    load: Callable[..., NpuGraph], toy: npu_toy.FloatModel, execution: str
) -> None:
    families.check_decoding(load(execution), toy.logits, NEAR)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """Lower a tiny family once: what was lowered, and the description that a bundle would give."""
    made: dict[str, tuple[Any, dict[str, Any]]] = {}

    def export(family: str) -> tuple[Any, dict[str, Any]]:
        if family not in made:
            weights = families.weights_of(family, families.oracle(family))
            texts = np.random.default_rng(0).integers(1, families.VOCAB, (64, 60)).tolist()
            lowered = export_npu(
                weights.config,
                weights,
                get_npu_recipe("a16w8"),
                tmp_path_factory.mktemp(family),
                max_context=families.CONTEXT,
                widths=(1, 2, 8),
                calibration=texts,
            )
            made[family] = lowered, {**lowered.meta, "functions": dict(lowered.functions)}
        return made[family]

    return export


@pytest.mark.parametrize(
    ("family", "execution"),
    [
        ("llama", "cpu"),
        ("qwen3", "cpu"),
        ("gemma3", "cpu"),
        pytest.param("gemma3", "emulator", marks=emulated),
    ],
)
def test_an_exported_family_stays_near_transformers_through_decoding_trees_and_windows(
    exported: Callable[[str], tuple[Any, dict[str, Any]]], family: str, execution: Any
) -> None:
    """8-bit weights and 16-bit activations move logits (standard deviation 0.8) by a tenth at most."""
    lowered, described = exported(family)
    graph = NpuGraph.load(
        lowered.files[0], described, embedding=lowered.embedding_file, execution=execution, threads=1
    )
    model = families.oracle(family)
    families.check_decoding(graph, lambda tokens: families.reference_logits(model, tokens), 0.1)


def test_it_is_a_graph_and_says_where_it_runs(load: Callable[..., NpuGraph]) -> None:
    graph = load()
    assert isinstance(graph, Graph)
    assert (graph.vocab_size, graph.max_context) == (npu_toy.V, npu_toy.M)
    assert (graph.widths, graph.hidden_layers) == (npu_toy.WIDTHS, ())
    assert (graph.via, graph.executed_artifact) == ("evaluator", True)
    assert graph.providers == ("CPUExecutionProvider",)
    assert [Path(path).name for path in graph.artifact] == ["w1.onnx"]


def test_rows_that_a_wide_graph_does_not_return_at_once_are_got_by_running_it_again(
    load: Callable[..., NpuGraph], toy: npu_toy.FloatModel
) -> None:
    graph = load()
    tokens = np.random.default_rng(1).integers(0, npu_toy.V, 12).tolist()
    expected = toy.logits(tokens)
    found = graph.forward(tokens).logits
    np.testing.assert_allclose(found, expected, atol=NEAR)
    for request, rows in (("last", [11]), ([3, 0, 7], [3, 0, 7]), ([5], [5])):
        np.testing.assert_array_equal(graph.forward(tokens, logits=request).logits, found[rows])
    top = graph.forward(tokens, logits=TopK(3)).logits
    np.testing.assert_array_equal(top.ids, np.argsort(-found, axis=1, kind="stable")[:, :3])
    assert graph.forward(tokens, logits="none").logits is None
    graph.commit(range(12))  # of the last of the runs above
    np.testing.assert_allclose(graph.forward([4]).logits, toy.logits([*tokens, 4])[-1:], atol=NEAR)


def test_a_row_depends_on_neither_width_nor_company(
    load: Callable[..., NpuGraph], meta: dict[str, Any]
) -> None:
    graph = load()
    graph.forward([11, 12, 13])
    graph.commit([0, 1, 2])
    step = meta["scales"]["logits"][0]
    alone = graph.forward([30]).logits[0]
    for pair in (([20], [90]), ([20, 21, 22, 23], [90, 80, 70, 60]), ([1] * 9, [95] * 15)):
        first, second = (graph.forward([30, *suffix], logits=[0]).logits[0] for suffix in pair)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, alone, atol=8 * step)


def test_a_forward_moves_nothing_and_uncommitted_rows_vanish(load: Callable[..., NpuGraph]) -> None:
    graph = load()
    graph.forward([1, 2, 3])
    graph.commit([0, 1])
    expected = graph.forward([7]).logits
    graph.forward([8, 8, 8, 8])
    assert graph.length == 2
    np.testing.assert_array_equal(graph.forward([7]).logits, expected)
    with pytest.raises(ValueError, match="not among the 1"):
        graph.commit([1])
    graph.commit([])
    with pytest.raises(ValueError, match="not among the 0"):
        graph.commit([0])


def test_rows_that_were_put_aside_come_back_bit_for_bit(load: Callable[..., NpuGraph]) -> None:
    families.check_rows_come_back(load())


def test_a_tree_on_an_empty_cache_and_a_forest_of_two_roots_keep_their_paths_apart(
    load: Callable[..., NpuGraph], toy: npu_toy.FloatModel
) -> None:
    graph = load()
    parents, tokens = [-1, 0, 0, 1, 2], [5, 6, 7, 8, 9]
    found = graph.forward(tokens, families.depths(parents), families.tree_mask(parents)).logits
    for node in range(5):
        path = [tokens[i] for i in families.path_to(parents, node)]
        np.testing.assert_allclose(found[node], toy.logits(path)[-1], atol=NEAR)
    graph.commit([0, 2, 4])
    np.testing.assert_allclose(graph.forward([3]).logits, toy.logits([5, 7, 9, 3])[-1:], atol=NEAR)
    graph.truncate(0)
    roots = graph.forward([5, 6], np.zeros(2, np.int64), np.eye(2, dtype=bool)).logits
    np.testing.assert_allclose(roots, [toy.logits([5])[0], toy.logits([6])[0]], atol=NEAR)


def test_tokens_beyond_width_context_or_vocabulary_are_refused_by_name(
    load: Callable[..., NpuGraph],
) -> None:
    graph = load()
    with pytest.raises(ValueError, match="17 tokens exceed the largest width of this graph, 16"):
        graph.forward([1] * 17)
    for _ in range(2):
        graph.forward([1] * 16, logits="none")
        graph.commit(range(16))
    with pytest.raises(ContextError, match=r"9 tokens after 32 .* exceed the context of 40"):
        graph.forward([1] * 9)
    graph.forward([1] * 8)
    graph.commit(range(8))
    assert graph.length == 40
    with pytest.raises(ContextError, match="position 40"):
        graph.forward([1])
    graph.truncate(39)
    with pytest.raises(ContextError, match="position 70"):
        graph.forward([1], positions=np.array([70]))
    graph.truncate(0)
    with pytest.raises(ValueError, match="token ids 5 to 96 were given; the embedding has 96 rows"):
        graph.forward([5, 96])
    with pytest.raises(ValueError, match=r"hidden layers \[0\] were not exported"):
        graph.forward([1], hidden=(0,))


def test_a_closed_graph_says_so_and_closes_twice(load: Callable[..., NpuGraph]) -> None:
    graph = load()
    graph.forward([1])
    graph.close()
    graph.close()
    with pytest.raises(BackendError, match="closed"):
        graph.forward([1])


def compile_for(folder: Path, name: str, W: int, ids: SocIds) -> str:
    """Compile a width for a SoC; returns the context model's name."""
    module, devices = qnn_plugin()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_provider_for_devices(devices, qnn_options(module, ids))
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_file_path", str(folder / name / f"w{W}.onnx"))
    (folder / name).mkdir(exist_ok=True)
    with emulator_speaks_on_stderr():
        ort.InferenceSession(str(folder / f"w{W}.onnx"), options)
    return f"{name}/w{W}.onnx"


@pytest.fixture(scope="module")
def compiled(folder: Path) -> dict[str, str]:
    return {str(W): compile_for(folder, "gen3", W, SocIds("57", "75")) for W in npu_toy.WIDTHS}


@emulated
def test_the_shipped_context_binary_runs_on_the_emulator_as_the_graph_that_it_was_compiled_from(
    load: Callable[..., NpuGraph], compiled: dict[str, str], folder: Path
) -> None:
    fresh = load("auto")
    shipped = load("auto", {"contexts": {"snapdragon-8-gen3": compiled}})
    tokens = list(range(3, 15))
    for graph in (fresh, shipped):
        graph.forward(tokens, logits="none")
        graph.commit(range(12))
    for more in ([4], [4, 90, 33, 7, 2]):
        np.testing.assert_array_equal(shipped.forward(more).logits, fresh.forward(more).logits)
    assert (fresh.via, shipped.via) == ("emulator", "emulator")
    assert fresh.providers == ("QNNExecutionProvider (emulator)",)
    assert shipped.executed_artifact
    assert {Path(path).parent.name for path in shipped.artifact} == {"gen3"}
    assert compiled_for(folder / compiled["1"]) == SocIds("57", "75")
    only_elite = load(
        "emulator", {"contexts": {"snapdragon-8-elite": compiled}}
    )  # none for the SoC of `meta`
    assert not only_elite.executed_artifact


@emulated
def test_on_an_npu_every_width_is_opened_at_load_and_weights_in_one_binary_are_shared(
    load: Callable[..., NpuGraph],
    compiled: dict[str, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The emulator stands in for the chip, and separate binaries for one: it cannot open shared weights."""
    entries: list[dict[str, str]] = []
    options = ort.SessionOptions

    class Recorded(options):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            entries.append({})

        def add_session_config_entry(self, name: str, value: str) -> None:
            entries[-1][name] = value
            super().add_session_config_entry(name, value)

    expected = load("emulator").forward([5, 6]).logits
    assert {binary_of(folder / name) for name in compiled.values()} == {
        f"w{W}_qnn.bin" for W in npu_toy.WIDTHS
    }
    monkeypatch.setattr(ort, "SessionOptions", Recorded)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    for shared in (False, True):
        if shared:
            monkeypatch.setattr("outrider.targets.qnn.binary_of", lambda path: "one.bin")
        entries.clear()
        graph = load("auto", {"contexts": {"snapdragon-8-gen3": compiled}})
        assert (graph.via, graph.providers, graph.executed_artifact) == (
            "artifact",
            ("QNNExecutionProvider",),
            True,
        )
        assert len(graph.artifact) == len(entries) == len(npu_toy.WIDTHS)
        assert [entry.get("ep.share_ep_contexts") for entry in entries] == ["1" if shared else None] * 4
        assert [entry.get("ep.stop_share_ep_contexts") for entry in entries] == [None] * 3 + (
            ["1"] if shared else [None]
        )
        np.testing.assert_array_equal(graph.forward([5, 6]).logits, expected)
        graph.close()


@emulated
def test_a_context_binary_of_another_soc_is_refused_with_both(
    load: Callable[..., NpuGraph], compiled: dict[str, str]
) -> None:
    there = {"contexts": {"snapdragon-8-elite": compiled}}
    with pytest.raises(
        BackendError,
        match=r"another SoC \(soc_model 57, htp_arch 75\) than snapdragon-8-elite \(soc_model 69, htp_arch 79\)",
    ):
        load("emulator", there, device="snapdragon-8-elite")


@emulated
def test_the_emulator_runs_the_graph_where_widths_share_a_binary_and_does_not_call_that_the_artifact(
    load: Callable[..., NpuGraph], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = {str(W): f"w{W}.onnx" for W in npu_toy.WIDTHS}
    contexts = compile_contexts(folder, names, ["snapdragon-8-gen3"])
    assert len({binary_of(folder / name) for name in contexts.models["snapdragon-8-gen3"].values()}) == 1
    graph = load("emulator", {"contexts": contexts.models})
    np.testing.assert_array_equal(graph.forward([5, 6]).logits, load("emulator").forward([5, 6]).logits)
    assert not graph.executed_artifact
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@emulated
def test_a_context_model_that_cannot_be_opened_gives_way_to_the_graph_that_it_was_compiled_from(
    load: Callable[..., NpuGraph],
    compiled: dict[str, str],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = {}
    for width, name in compiled.items():
        broken = folder / f"broken{width}.onnx"
        broken.write_bytes((folder / name).read_bytes()[:300])
        names[width] = broken.name
    graph = load("emulator", {"contexts": {"snapdragon-8-gen3": names}})
    assert graph.forward([1]).logits.shape == (1, npu_toy.V)
    assert not graph.executed_artifact
    assert "compiling" in caplog.text
    assert "broken1.onnx" in caplog.text


@emulated
def test_the_emulator_prints_nothing_where_the_text_belongs(folder: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path; from outrider.targets.qnn import NpuGraph\n"
        "f = Path(sys.argv[1]); meta = json.loads((f / 'meta.json').read_text())\n"
        "g = NpuGraph.load(f / 'w1.onnx', meta, embedding=f / 'embedding.i8', execution='emulator')\n"
        "print('before'); g.forward([1, 2]); g.close(); print('after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "before\nafter\n"


@emulated
@pytest.mark.parametrize(
    ("soc_model", "htp_arch", "message"),
    [
        ("999", "75", r"knows no such chip \(soc_model 999, htp_arch 75\)"),
        ("SM8650", "75", r"soc_model is 'SM8650'; it is a number, known: .*snapdragon-8-gen3 \(57, 75\)"),
        ("57", "99", "htp_arch is '99'; known: 68, 69, 73, 75"),
        ("57", "79", "soc_model 57 has htp_arch 75, but 79 was given"),
    ],
)
def test_ids_of_a_soc_that_does_not_exist_are_refused(
    load: Callable[..., NpuGraph], soc_model: str, htp_arch: str, message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        load("emulator", {"soc_model": soc_model, "htp_arch": htp_arch})


def test_unknown_words_and_devices_are_usage_errors(load: Callable[..., NpuGraph]) -> None:
    with pytest.raises(UsageError, match="execution is 'gpu'; known: auto, npu, emulator, cpu"):
        load("gpu")
    with pytest.raises(UsageError, match=r"'raspberry-pi-5' has no Hexagon NPU .* snapdragon-8-gen3"):
        load("cpu", device="raspberry-pi-5")


def test_the_npu_is_not_asked_for_on_a_machine_of_the_other_kind(
    load: Callable[..., NpuGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine, word in (("x86_64", "npu"), ("aarch64", "emulator")):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        with pytest.raises(BackendError, match=f"as '{word}', but onnxruntime-qnn has"):
            load(word)


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where nobody has registered the plugin."""
    monkeypatch.setattr(ort, "get_ep_devices", list)


def fake_wheel(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    module = types.ModuleType("onnxruntime_qnn")
    vars(module).update(__version__="2.7.0", **attributes)
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", module)


def test_an_absent_wheel_is_named_with_its_extra(
    load: Callable[..., NpuGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'outrider\[qnn\]'"):
        qnn_plugin()
    load("cpu").close()  # needs no wheel


def test_a_wheel_from_before_the_plugin_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(monkeypatch)
    with pytest.raises(BackendError, match=r"onnxruntime-qnn 2\.7\.0 is no plugin yet, it is too old"):
        qnn_plugin()
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)  # it was installed as onnxruntime itself
    monkeypatch.setattr(metadata, "version", lambda name: "1.24.1")
    with pytest.raises(BackendError, match=r"onnxruntime-qnn 1\.24\.1 is no plugin yet"):
        qnn_plugin()


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (
            "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.35' not found (required by libonnxruntime.so)",
            r"needs glibc 2\.35, this system has 2\.31; take a newer system",
        ),
        (
            "cannot open shared object file",
            "cannot be opened: cannot open shared object file; install it again",
        ),
    ],
)
def test_a_library_that_the_system_cannot_open_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, no_devices: None, reason: str, message: str
) -> None:
    def refuse(name: str, path: str) -> None:
        raise RuntimeError(reason)

    fake_wheel(monkeypatch, get_library_path=lambda: "libqnn.so")
    monkeypatch.setattr(ort, "register_execution_provider_library", refuse)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.31"))
    with pytest.raises(BackendError, match=message):
        qnn_plugin()


def test_a_plugin_without_a_device_is_told(monkeypatch: pytest.MonkeyPatch, no_devices: None) -> None:
    fake_wheel(monkeypatch, get_library_path=lambda: "libqnn.so")
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda name, path: None)
    with pytest.raises(BackendError, match="finds no NPU here"):
        qnn_plugin()


@emulated
def test_the_plugin_is_registered_once_a_process() -> None:
    assert qnn_plugin()[1]
    assert qnn_plugin()[1]


def test_the_soc_of_a_machine_is_what_its_kernel_says(tmp_path: Path) -> None:
    assert device_here(tmp_path) is None
    machine = tmp_path / "sys/devices/soc0/machine"
    machine.parent.mkdir(parents=True)
    for name, slug in (
        ("SM8650\n", "snapdragon-8-gen3"),
        ("SM8750\n", "snapdragon-8-elite"),
        ("MT6991\n", None),
    ):
        machine.write_text(name)
        assert device_here(tmp_path) == slug


TABLE = {
    "dtype": "int8", "scale_dtype": "float16", "rows": 96, "columns": 32, "block": 32, "scales_offset": 96 * 32,
}  # fmt: skip
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "profile": ({"profile": "inplace"}, "profile 'inplace' .* is not for an NPU"),
    "vocab_size": ({"vocab_size": 95}, r"has logits uint16\[1, 1, 96\], the manifest says uint16\[1, 1, 95\]"),
    "head_dim": ({"head_dim": 4}, r"has past_key_0 uint16\[1, 2, 8, 40\], the manifest says uint16\[1, 2, 4, 40\]"),
    "max_context": ({"max_context": 64}, r"mask_full uint16\[1, 1, 1, 41\], .* uint16\[1, 1, 1, 65\]"),
    "hidden_size": ({"hidden_size": 16}, "has rows of 32, the graph reads 16"),
    "layers": ({"layers": 1}, r"has past_key_1 uint16\[1, 2, 8, 40\], the manifest says none"),
    "masks": ({"masks": ["full"]}, "has mask_sliding .* the manifest says none"),
    "rows": ({"rows": {"1": 2, "2": 2, "8": 8, "16": 1}}, r"has rows int32\[1\], the manifest says int32\[2\]"),
    "widths": ({"widths": [1, 2, 4]}, "width 4 was not given a file"),
    "functions": ({"functions": {}}, r"width 1 was not given a file \(there are: none\)"),
    "contexts": (
        {"contexts": {"snapdragon-8-gen3": {"1": "gen3/w1.onnx"}}},
        "width 2 was not compiled for snapdragon-8-gen3",
    ),
    "missing": ({"functions": {str(W): f"v{W}.onnx" for W in npu_toy.WIDTHS}}, "v1.onnx does not exist"),
    "scale": ({"scales": {"x": [0.1, 0]}}, "no scale for 'cos_full'"),
    "impossible": ({"scales": {"x": [0.0, 0]}}, "scale 0.0 with zero point 0 is impossible"),
    "hidden_layers": ({"hidden_layers": [0]}, r"hidden_layers is \(0,\), but graphs of an NPU return no hidden"),
    "odd scale": ({"scales": {"x": "oops"}}, "description cannot be read"),
    "odd sizes": ({"widths": 4}, "description cannot be read"),
    "blocks of nothing": (
        {"embedding": {**TABLE, "block": 0}},
        "block 0 is impossible",
    ),
    "odd rows": ({"embedding": {**TABLE, "rows": None}}, "of the embedding cannot be read"),
    "embedding": ({"embedding": {"rows": 5}}, "description of the embedding lacks 'columns'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_description_of_another_graph_or_with_gaps_is_refused_with_what_is_there(
    load: Callable[..., NpuGraph], case: str
) -> None:
    changes, message = WRONG[case]
    with pytest.raises(BackendError, match=message):
        load("cpu", changes)


@pytest.mark.parametrize(
    "name", ["scales", "masked", "rope", "rows", "functions", "embedding", "max_context"]
)
def test_a_field_that_is_missing_is_named(meta: dict[str, Any], name: str) -> None:
    with pytest.raises(BackendError, match=f"lacks '{name}'"):
        NpuMeta.from_json({key: value for key, value in meta.items() if key != name})


def test_an_embedding_file_that_is_missing_or_cut_is_refused(
    load: Callable[..., NpuGraph], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(BackendError, match=r"absent\.i8 does not exist"):
        load(embedding=tmp_path / "absent.i8")
    with pytest.raises(BackendError, match="has no embedding file"):
        load(embedding=None)
    cut = tmp_path / "cut.i8"
    cut.write_bytes((folder / "embedding.i8").read_bytes()[:-4])
    with pytest.raises(BackendError, match=r"has 3260 bytes; a table of 96 x 32 in blocks of 32 has 3264"):
        load(embedding=cut)


def test_a_damaged_graph_is_refused_with_its_path(folder: Path, meta: dict[str, Any], tmp_path: Path) -> None:
    for W in npu_toy.WIDTHS:
        (tmp_path / f"w{W}.onnx").write_bytes((folder / f"w{W}.onnx").read_bytes()[:900])
    with pytest.raises(BackendError, match=r"cannot open .*w1\.onnx \(cpu\).*damaged"):
        NpuGraph.load(tmp_path / "w1.onnx", meta, embedding=folder / "embedding.i8", execution="cpu")


def test_a_scale_rounds_and_saturates_as_onnx_does() -> None:
    rng = np.random.default_rng(0)
    for dtype, kind in (
        ("uint16", TensorProto.UINT16),
        ("int16", TensorProto.INT16),
        ("uint8", TensorProto.UINT8),
    ):
        zero = 0 if dtype == "int16" else 130
        scale = Scale(0.25, zero, dtype)
        values = np.concatenate([np.arange(-40, 40) * 0.125, rng.normal(0, 9000, 200)]).astype(np.float32)
        constants = [
            numpy_helper.from_array(np.float32(scale.scale), "s"),
            numpy_helper.from_array(np.array(zero, dtype), "z"),
        ]
        node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])
        graph = helper.make_graph(
            [node],
            "q",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [len(values)])],
            [helper.make_tensor_value_info("q", kind, [len(values)])],
            constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        (expected,) = session.run(None, {"x": values})
        found = scale.quantize(values)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        inside = np.abs(values) < 20
        np.testing.assert_allclose(
            scale.dequantize(found)[inside], np.clip(values, -32.5, None)[inside], atol=0.126
        )


def test_a_mask_has_two_levels_by_ancestry_and_by_distance_in_positions() -> None:
    out = np.zeros((4, 8 + 4), np.uint16)
    tree = families.tree_mask([-1, 0, 0])
    positions = np.array([0, 1, 2, 3, 4, 4])  # three committed, a root and two children beside each other
    static_mask(out, tree, positions, 3, 3, (7, 65535))
    assert set(np.unique(out)) == {7, 65535}
    seen = (out == 65535).astype(int).tolist()
    assert seen == [
        [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],  # padding sees itself, so that no row is empty
    ]


def test_the_cache_begins_as_zeros_and_takes_rows_in_the_order_given() -> None:
    scales = {"past_key_0": Scale(0.5, 9), "past_value_0": Scale(0.5, 4)}
    cache = KvCache(1, 2, 3, 6, scales)
    assert set(np.unique(cache.keys[0])) == {9}
    assert set(np.unique(cache.values[0])) == {4}
    keys = np.arange(24, dtype=np.uint16).reshape(1, 2, 3, 4)
    values = np.arange(24, dtype=np.uint16).reshape(1, 2, 4, 3)
    cache.commit(1, np.array([3, 0]), [keys], [values])
    np.testing.assert_array_equal(cache.keys[0][..., 1:3], keys[..., [3, 0]])
    np.testing.assert_array_equal(cache.values[0][:, :, 1:3], values[:, :, [3, 0]])
    assert (cache.keys[0][..., [0, 3, 4, 5]] == 9).all()


def test_embedding_rows_are_codes_times_the_scale_of_their_block(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (5, 8)).astype(np.int8)
    scales = np.random.default_rng(1).uniform(0.1, 2, (5, 2)).astype("<f2")
    path = tmp_path / "table"
    path.write_bytes(codes.tobytes() + scales.tobytes())
    kinds = {"dtype": "int8", "scale_dtype": "float16"}
    described = {"rows": 5, "columns": 8, "block": 4, "scales_offset": 40, **kinds}
    table = EmbeddingTable(path, described)
    expected = (codes.reshape(5, 2, 4) * scales.astype(np.float32)[..., None]).reshape(5, 8)
    np.testing.assert_array_equal(table.rows(np.array([4, 0, 4])), expected[[4, 0, 4]])
    with pytest.raises(BackendError, match="holds int4 with float16 scales"):
        EmbeddingTable(path, {**described, "dtype": "int4"})
