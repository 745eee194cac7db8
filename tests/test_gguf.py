"""The GGUF reader: an independent reader agrees, and damaged files are named, never trusted."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import CheckpointError, OutriderError
from outrider.export.checkpoint import open_checkpoint
from outrider.export.gguf import GgufFile, refuse_unsupported

Writer = Callable[..., Path]
LLAMA: dict[str, Any] = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
}


def llama_tensors(seed: int = 0) -> dict[str, Any]:
    """A llama model of one layer, its matrices in Q8_0."""
    rng = np.random.default_rng(seed)
    matrices = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    matrices |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    tensors: dict[str, Any] = {
        "token_embd.weight": rng.normal(size=(3, 32)),
        "output_norm.weight": np.ones(32),
    }
    for name, shape in matrices.items():
        tensors[f"blk.0.{name}.weight"] = ("Q8_0", rng.normal(size=shape).astype(np.float32))
    for name in ("attn_norm", "ffn_norm"):
        tensors[f"blk.0.{name}.weight"] = rng.normal(size=32)
    return tensors


@pytest.fixture(scope="session")
def llama_file(write_gguf: Writer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    return write_gguf(path, "llama", LLAMA, llama_tensors())


def test_metadata_and_tensors_equal_those_of_the_gguf_package(llama_file: Path) -> None:
    theirs = gguf.GGUFReader(llama_file)
    with GgufFile(llama_file) as ours:
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF."):
                assert ours.metadata[key] == field.contents(), key
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(ours.tensor(tensor.name), expected)


def test_smollm2_decodes_to_the_same_bits_as_the_gguf_package(smollm2_gguf: Path) -> None:
    theirs = gguf.GGUFReader(smollm2_gguf)
    with GgufFile(smollm2_gguf) as ours:
        assert len(ours.tensors) == 272
        for tensor in theirs.tensors:
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(ours.tensor(tensor.name), expected)


def test_every_kind_of_metadata_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -7, "uint32": 2**32 - 1}
    values |= {"int32": -9, "uint64": 2**63, "int64": -5}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e-300)
    writer.add_bool("bool", True)
    writer.add_string("string", "ü🦊")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("strings", ["a", "", "ß"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = values | {"f32": 0.5, "f64": 1e-300, "bool": True, "string": "ü🦊"}
    expected |= {"numbers": [1, 2, 3], "strings": ["a", "", "ß"]}
    with GgufFile(path) as file:
        assert {key: file.metadata[key] for key in expected} == expected


def test_a_file_cut_off_anywhere_is_refused_with_the_place(llama_file: Path, tmp_path: Path) -> None:
    whole = llama_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [1, 4, 8, 20, 24, 60, 200, 700, 1500, len(whole) // 2, len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf.*(at byte \d+|no GGUF file|bytes)"):
            GgufFile(cut)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="empty"):
        GgufFile(tmp_path / "empty.gguf")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), value=st.integers(0, 255), length=st.floats(0, 1), cut=st.booleans())
def test_no_damaged_byte_or_length_causes_anything_but_our_own_errors(
    llama_file: Path, tmp_path: Path, place: float, value: int, length: float, cut: bool
) -> None:
    data = bytearray(llama_file.read_bytes())
    header = 2000  # covers the header, the metadata and the tensor table
    data[int(place * min(header, len(data) - 1))] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data[: int(length * len(data))] if cut else data)
    try:
        with open_checkpoint(path) as checkpoint:
            for name in checkpoint.names():
                checkpoint.tensor(name)
            checkpoint.tokenizer  # noqa: B018
    except OutriderError:
        pass


def header(version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04" + bytes(40), "no GGUF file"),
        (header(version=1), "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (header(tensors=2**60), "2?claims \\d+ tensors"),
        (header(pairs=1) + struct.pack("<Q", 2**62) + bytes(20), r"needs \d+ bytes but"),
        (header(pairs=1) + string("k") + struct.pack("<I", 77) + bytes(8), "unknown value type 77"),
        (header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 5, 2**61), "metadata 'k' needs"),
        (header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**40), "claims"),
        (header(pairs=1) + string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, "nests"),
        (header(pairs=1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(20), "not UTF-8"),
        (header(tensors=1) + string("t") + struct.pack("<I", 9) + bytes(40), "9 dimensions"),
        (header(tensors=1) + string("t") + struct.pack("<IQIQ", 1, 32, 99, 0), "number 99"),
        (header(tensors=1) + string("t") + struct.pack("<IQIQ", 1, 33, 8, 0), "Q8_0 blocks cannot hold"),
        (header(tensors=1) + string("t") + struct.pack("<IQIQ", 1, 0, 0, 0), "shape \\(0,\\)"),
        (header(tensors=1) + string("t") + struct.pack("<IQIQ", 1, 2**40, 0, 0), "needs 4398046511104 bytes"),
        (header(tensors=1) + string("t") + struct.pack("<IQIQ", 1, 4, 0, 3) + bytes(64), "misaligned"),
    ],
)
def test_lengths_and_kinds_that_cannot_be_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)


def test_a_tensor_of_a_type_that_cannot_be_decoded_is_named(write_gguf: Writer, tmp_path: Path) -> None:
    raw = np.zeros((4, 136), np.uint8)
    path = write_gguf(tmp_path / "iq.gguf", "llama", {}, {"token_embd.weight": ("IQ4_XS", raw)})
    with GgufFile(path) as file, pytest.raises(CheckpointError, match=r"IQ4_XS.*Q6_K"):
        refuse_unsupported(file)


def test_nothing_is_read_of_a_tensor_before_it_is_asked_for(llama_file: Path) -> None:
    with GgufFile(llama_file) as file:
        rows = file.raw("blk.0.attn_q.weight")
        assert rows is not None
        assert not rows.data.flags.owndata
        assert file.raw("output_norm.weight") is None
        del rows


def test_closing_twice_and_with_a_live_view_is_allowed(llama_file: Path) -> None:
    file = GgufFile(llama_file)
    rows = file.raw("blk.0.attn_q.weight")
    assert rows is not None
    file.close()
    assert rows.data.sum() > 0
    del rows
    file.close()
    file.close()
