"""Tiny models and tokenizers that tests build for themselves, and the one real model that they may fetch."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# No example fails because the machine was busy, and every run tries the same examples; new ones are tried with
# `pytest --hypothesis-profile=default`.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails the run")


def pytest_configure(config: pytest.Config) -> None:
    """Heed Ctrl-C, which nohup and background jobs have ignored: what tests start inherits that, and waits for it.

    And give all processes of a run one folder for what is too costly to make in each.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = os.environ["OUTRIDER_TEST_RUN"] = tempfile.mkdtemp(prefix="outrider-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="module", autouse=True)
def _what_is_old_is_not_walked_again() -> None:
    """A collection of garbage looks at all that is alive: seconds each, with what torch and its compilers keep."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """CI installs every extra: what is skipped there was not tested, and a green run would hide it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line("--no-skips: there are skipped tests; -rs names them", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


TEXTS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "def add(a, b):\n    return a + b\n",
    "Grüße aus Köln; 東京は晴れ 🦊🦊 — naïve café",
]
SPECIALS = ["<|end|>", "<|start|>", "<|stop|>"]


@pytest.fixture(scope="session")
def byte_level_bpe() -> Any:
    """A byte-level BPE of 256 bytes, three special tokens first, and a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback_bpe() -> Any:
    """A SentencePiece-style BPE: "▁" for spaces, `<0xNN>` for bytes without a piece, first space stripped."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"abcdefghijklmnopqrstuvwxyz.,", "é", "th", "the", "▁the"]
    merges = [("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for the real model is marked `weights`."""
    for item in items:
        if "smollm2_gguf" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.weights)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct Q4_1, fetched once into the cache by the product's own catalog."""
    from outrider.export.fetch import fetch

    return fetch("smollm2-135m-q4_1")


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """A writer of small GGUF files on the `gguf` package (an implementation independent of ours).

    `write(path, arch, metadata, tensors)`: metadata keys without a dot before them belong to the architecture
    unless they start with general, tokenizer or split; a tensor is a float array, stored as F32, or a pair of
    a ggml type name and an array: quantized when it is float, stored as it is when it is uint8.
    """
    import gguf

    def write(
        path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any], order: str = "little"
    ) -> Path:
        endian = gguf.GGUFEndian.LITTLE if order == "little" else gguf.GGUFEndian.BIG
        writer = gguf.GGUFWriter(path, arch, endianess=endian)
        for key, value in metadata.items():
            whole = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{key}"
            _add_value(writer, whole, value)
        for name, tensor in tensors.items():
            if isinstance(tensor, tuple):
                kind = gguf.GGMLQuantizationType[tensor[0]]
                data = tensor[1] if tensor[1].dtype == np.uint8 else gguf.quants.quantize(tensor[1], kind)
                writer.add_tensor(name, data, raw_dtype=kind)
            else:
                writer.add_tensor(name, np.asarray(tensor, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add_value(writer: Any, key: str, value: Any) -> None:
    """Numbers as llama.cpp's converter writes them: uint32 and float32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def write_model(byte_level_bpe: Any) -> Callable[..., Path]:
    """A writer of tiny random llamas as folders: config.json, safetensors, tokenizer, chat template."""
    import torch
    import transformers

    def write(folder: Path, *, layers: int, vocab: int, seed: int, tokenizer: Any = None) -> Path:
        config = transformers.LlamaConfig(**TINY, num_hidden_layers=layers, vocab_size=vocab)
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).eval().float()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(torch.randn_like(tensor) * (0.1 if tensor.ndim > 1 else 0.3))
            model.lm_head.weight.mul_(4)  # sure enough of itself that a draft dares to propose
        model.save_pretrained(folder)
        (tokenizer or byte_level_bpe).save(str(folder / "tokenizer.json"))
        names = {"eos_token": SPECIALS[0], "bos_token": SPECIALS[1], "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def tiny_models(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]
) -> dict[str, Path]:
    """A target of two layers and an unrelated draft of one, whose vocabulary is padded further."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "target": write_model(folder / "target", layers=2, vocab=328, seed=0),
        "draft": write_model(folder / "draft", layers=1, vocab=336, seed=1),
    }


@pytest.fixture(scope="session")
def trace_cache() -> Callable[[pytest.MonkeyPatch], None]:
    """What makes a patch trace and lower each structure once a session: it takes seconds, whatever the weights."""
    import onnx

    import outrider.export.executorch as executorch
    import outrider.export.onnx as lowering

    traced: dict[str, bytes] = {}
    original = lowering.trace

    def trace(*arguments: Any) -> Any:
        key = repr(arguments)
        if key not in traced:
            traced[key] = original(*arguments).SerializeToString()
        return onnx.ModelProto.FromString(traced[key])

    templates: dict[str, Any] = {}

    class Lowering(executorch.Lowering):
        """Shares its templates, in which weights are filled, with all of the same kind, sizes and shapes."""

        def __init__(self, config: Any, *sizes: Any, **options: Any) -> None:
            super().__init__(config, *sizes, **options)
            known = {
                name: value for name, value in vars(config).items() if name not in ("vocab_size", "head_rows")
            }
            self.key = repr((known, sizes, options))

        def delegate(self, part: Any) -> Any:
            shapes = [tuple(tensor.shape) for tensor in part.state_dict().values()]
            self.templates = templates.setdefault(f"{self.key} {shapes}", {})
            return super().delegate(part)

    def share(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(lowering, "trace", trace)
        patch.setattr(executorch, "Lowering", Lowering)

    return share


@pytest.fixture(autouse=True)
def calm_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much memory this machine has free at the moment decides no test."""
    from outrider.runtime import memory_budget, open_pacer, placement_sources

    monkeypatch.setattr(open_pacer, "memory_sensors", list)
    for module in (memory_budget, placement_sources):
        monkeypatch.setattr(module, "available_here", lambda: None)


@pytest.fixture
def traced_once(trace_cache: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports inside this test share the traces of the session."""
    trace_cache(monkeypatch)


@pytest.fixture(scope="session")
def export_tiny(trace_cache: Callable[..., None]) -> Callable[..., Any]:
    """`export_bundle` of a (folder, precision) or two of them, with a context of 256 and shared traces.

    Random weights lose more to 4 bits than trained ones do, so the gates of the recipes are off.
    """
    from outrider.export.bundle import ExportOptions, RoleOptions, export_bundle

    def export(
        output: Path, target: tuple[Path, str], draft: tuple[Path, str] | None = None, **options: Any
    ) -> Any:
        roles = [RoleOptions(str(role[0]), role[1]) for role in (target, draft) if role is not None]
        progress = options.pop("progress", None)
        wanted = {"max_context": 256, "allow_quality": True, "draft": roles[1] if draft else None, **options}
        with pytest.MonkeyPatch.context() as patch:
            trace_cache(patch)
            return export_bundle(ExportOptions(roles[0], output, **wanted), progress)

    return export


@pytest.fixture(scope="session")
def float_bundle(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], export_tiny: Callable[..., Any]
) -> Path:
    """A float32 target and itself as the draft, evaluated. Read it; copy it before a change."""
    folder = tmp_path_factory.mktemp("float") / "bundle"
    target = (tiny_models["target"], "fp32")
    export_tiny(folder, target, target)
    return folder


@pytest.fixture(scope="session")
def quantized_bundle(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], export_tiny: Callable[..., Any]
) -> Path:
    """An INT4 target and an unrelated INT8 draft, evaluated. Read it; copy it before a change."""
    folder = tmp_path_factory.mktemp("quantized") / "bundle"
    export_tiny(folder, (tiny_models["target"], "int4"), (tiny_models["draft"], "int8"))
    return folder


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command line as the installed script runs it: `run_main(*words)` -> exit code, stdout, stderr."""
    from outrider.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["outrider", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, out, err

    return run
