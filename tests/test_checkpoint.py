"""Checkpoints: each family from a folder and from GGUF gives the same model; bad ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.errors import CheckpointError, TokenizerError, UsageError
from outrider.export.checkpoint import open_checkpoint
from outrider.quantize.ggml import dequantize

Writer = Callable[..., Path]
LAYERS, HIDDEN, HEADS, KV, VOCAB, FF, CONTEXT = 7, 64, 4, 2, 96, 128, 512
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {"sliding_window": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0},
}
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def hf_model(model_type: str, **extra: Any) -> Any:
    """A random transformers model of a family; every parameter non-trivial, biases and norms included."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        hidden_size=HIDDEN,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        **FAMILIES[model_type],
        **extra,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def as_converted(model: Any) -> tuple[str, dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Architecture, metadata and tensors as llama.cpp's converter writes them for a transformers model."""
    config = model.config
    arch = {"gemma3_text": "gemma3", "mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or HIDDEN // HEADS
    metadata: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": int(head_dim * getattr(config, "partial_rotary_factor", 1.0)),
    }
    if getattr(config, "sliding_window", None) and not arch.startswith("qwen"):
        metadata["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        metadata |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if arch == "gemma3":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensors[gguf_name(name, arch)] = convert(name, tensor.numpy(), arch)
    return arch, metadata, tensors


def gguf_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, slot = stem.split(".", 3)
    names = GGUF_NAMES | (GEMMA_NAMES if arch.startswith("gemma") else {})
    return f"blk.{layer}.{names[slot]}.{kind}"


def convert(name: str, values: NDArray[np.float32], arch: str) -> NDArray[np.float32]:
    """The converter's changes: Gemma's norms plus one; a llama head's rows (halves) become adjacent pairs."""
    if arch.startswith("gemma") and "norm" in name:
        return values + 1
    heads = {"q_proj": HEADS, "k_proj": KV}.get(name.split(".")[-2])
    if arch == "llama" and heads:
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return values


@pytest.fixture(scope="module", params=list(FAMILIES))
def both(
    request: pytest.FixtureRequest, write_gguf: Writer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, Path]:
    """A transformers model, its folder (several shards) and its GGUF file."""
    folder = tmp_path_factory.mktemp(request.param)
    model = hf_model(request.param)
    model.save_pretrained(folder, max_shard_size="200KB")
    arch, metadata, tensors = as_converted(model)
    return model, folder, write_gguf(folder / "model.gguf", arch, metadata, tensors)


def test_a_folder_gives_the_weights_of_transformers(both: tuple[Any, Path, Path]) -> None:
    model, folder, _ = both
    gemma = "gemma" in model.config.model_type
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config.layer_types == expected_layer_types(model.config)
        for name in checkpoint.names():
            if name in state:
                shift = 1 if gemma and "norm" in name else 0
                np.testing.assert_allclose(checkpoint.tensor(name), state[name] + shift, rtol=1e-6)
            assert checkpoint.raw(name) is None
        fused = {name for name in state if "qkv_proj" in name or "gate_up" in name}
        for name in fused:
            parts = ("q_proj", "k_proj", "v_proj") if "qkv" in name else ("gate_proj", "up_proj")
            slot = "qkv_proj" if "qkv" in name else "gate_up_proj"
            rows = [checkpoint.tensor(name.replace(slot, part)) for part in parts]
            np.testing.assert_array_equal(np.concatenate(rows), state[name])


def expected_layer_types(config: Any) -> tuple[str, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = (
        getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * LAYERS
    )
    return tuple(kind.removesuffix("_attention") for kind in kinds)


def test_gguf_and_folder_give_the_same_model(both: tuple[Any, Path, Path]) -> None:
    _, folder, gguf_path = both
    with open_checkpoint(folder) as ours, open_checkpoint(gguf_path) as theirs:
        assert ours.names() == theirs.names()
        for name in ours.names():
            np.testing.assert_array_equal(ours.tensor(name), theirs.tensor(name))
        for field in ours.config.__dataclass_fields__:
            if field in ("family", "rope_scaling"):
                continue  # GGUF calls Mistral llama; scaling has its own tests
            left, right = getattr(ours.config, field), getattr(theirs.config, field)
            if field == "attention_scale":
                left, right = ours.config.scale, theirs.config.scale
            assert left == pytest.approx(right) if isinstance(left, float) else left == right, field


def test_transformers_reads_the_same_llama_weights_from_gguf(write_gguf: Writer, tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = hf_model("llama")
    path = write_gguf(tmp_path / "llama.gguf", *as_converted(model))
    oracle = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.names():
            np.testing.assert_array_equal(checkpoint.tensor(name), oracle[name].numpy())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_raw_rows_are_put_in_the_order_of_the_decoder(write_gguf: Writer, tmp_path: Path, kind: str) -> None:
    arch, metadata, tensors = as_converted(hf_model("llama"))
    matrices: dict[str, Any] = {
        name: (kind, values) if values.ndim == 2 else values for name, values in tensors.items()
    }
    path = write_gguf(tmp_path / "q.gguf", arch, metadata, matrices)
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.names():
            raw = checkpoint.raw(name)
            if "norm" in name:
                assert raw is None
                continue
            assert raw is not None
            assert raw.type_name == kind
            np.testing.assert_array_equal(dequantize(raw), checkpoint.tensor(name))


def test_raw_rows_of_fused_matrices_are_cut(write_gguf: Writer, tmp_path: Path) -> None:
    arch, metadata, tensors = as_converted(hf_model("phi3"))
    fused: dict[str, Any] = {
        name: ("Q8_0", values) if "attn_qkv" in name or "ffn_up" in name else values
        for name, values in tensors.items()
    }
    path = write_gguf(tmp_path / "phi.gguf", arch, metadata, fused)
    with open_checkpoint(path) as checkpoint:
        for slot in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            name = f"model.layers.1.{slot}.weight"
            raw = checkpoint.raw(name)
            assert raw is not None
            np.testing.assert_array_equal(dequantize(raw), checkpoint.tensor(name))


def llama_gguf(write_gguf: Writer, path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    arch, base, weights = as_converted(hf_model("llama"))
    merged = {key: value for key, value in (base | metadata).items() if value is not None}
    kept = {key: value for key, value in (weights | tensors).items() if value is not None}
    return write_gguf(path, arch, merged, kept)


def test_rope_freqs_become_factors(write_gguf: Writer, tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = llama_gguf(write_gguf, tmp_path / "m.gguf", {}, {"rope_freqs.weight": factors})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.rope_scaling == {"rope_type": "factors", "factors": factors.tolist()}


def test_linear_rope_scaling_and_its_absence_are_read(write_gguf: Writer, tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    with open_checkpoint(llama_gguf(write_gguf, tmp_path / "a.gguf", linear, {})) as checkpoint:
        assert checkpoint.config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    none = {"rope.scaling.type": "none"}
    with open_checkpoint(llama_gguf(write_gguf, tmp_path / "b.gguf", none, {})) as checkpoint:
        assert checkpoint.config.rope_scaling is None


def test_long_rope_factors_are_read(write_gguf: Writer, tmp_path: Path) -> None:
    arch, metadata, tensors = as_converted(hf_model("phi3"))
    metadata |= {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.5}
    tensors["rope_factors_long.weight"] = np.full(4, 4, np.float32)
    tensors["rope_factors_short.weight"] = np.full(4, 2, np.float32)
    with open_checkpoint(write_gguf(tmp_path / "phi.gguf", arch, metadata, tensors)) as checkpoint:
        assert checkpoint.config.rope_scaling == {
            "rope_type": "longrope",
            "long_factor": [4.0] * 4,
            "short_factor": [2.0] * 4,
            "original_max_position_embeddings": 128,
            "attention_factor": 1.5,
        }


def test_the_source_names_every_file_with_its_hash(both: tuple[Any, Path, Path]) -> None:
    import hashlib

    _, folder, gguf_path = both
    with open_checkpoint(gguf_path) as checkpoint:
        data = gguf_path.read_bytes()
        assert checkpoint.source.kind == "gguf"
        assert checkpoint.source.files == {"model.gguf": (hashlib.sha256(data).hexdigest(), len(data))}
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.source.kind == "folder"
        assert "config.json" in checkpoint.source.files


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"attention.head_count": None}, {}, r"llama\.attention\.head_count is None"),
        ({"block_count": 0}, {}, r"block_count is 0"),
        ({"block_count": 2**32 - 1}, {}, r"block_count is 4294967295"),
        ({"attention.head_count_kv": 3}, {}, "cannot share 3 KV heads"),
        ({"feed_forward_length": 64}, {}, r"gate_proj\.weight has shape \(128, 64\)"),
        ({"block_count": 6}, {}, r"blk\.6\..*no place in a llama decoder of 6 layers"),
        ({"block_count": 8}, {}, r"lacks 9 of .*model\.layers\.7"),
        ({"expert_count": 8}, {}, "mixture of experts"),
        ({"split.count": 3}, {}, "one of 3 parts"),
        ({"rope.scaling.type": "strange", "rope.scaling.factor": 2.0}, {}, "strange"),
        ({"rope.freq_base": "many"}, {}, "makes sense.*many"),
        ({"attention.layer_norm_rms_epsilon": [1.0, 2.0]}, {}, "makes sense"),
        ({}, {"blk.0.attn_sinks.weight": np.ones(4)}, "attn_sinks"),
        ({}, {"mystery": np.ones(4)}, "mystery"),
        ({}, {"blk.0.attn_q.weight": None}, r"lacks 1 of .*q_proj"),
        ({}, {"token_embd.weight": None}, "token_embd"),
    ],
)
def test_a_gguf_file_that_contradicts_itself_is_refused(
    write_gguf: Writer, tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    path = llama_gguf(write_gguf, tmp_path / "bad.gguf", metadata, tensors)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_another_architecture_is_refused_with_the_known_ones(write_gguf: Writer, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, {"token_embd.weight": np.ones((2, 2))})
    with pytest.raises(CheckpointError, match=r"'mamba'.*llama.*qwen2.*gemma3"):
        open_checkpoint(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama folder in one safetensors file."""
    hf_model("llama").save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, r"'gpt_neox'.*llama.*phi3"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is above"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"hidden_act": "relu"}, "relu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"num_hidden_layers": 8}, "lacks"),
        ({"vocab_size": 97}, r"\(96, 64\).*\(97, 64\)"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_scaling": 7}, "makes sense"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_truncated_safetensors_are_refused_anywhere(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut off|empty|header"):
            open_checkpoint(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="200KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        open_checkpoint(tmp_path)


def test_damaged_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        open_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_folders_are_widened_exactly(tmp_path: Path, dtype: str) -> None:
    import torch

    model = hf_model("qwen2").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        for name in checkpoint.names():
            np.testing.assert_array_equal(checkpoint.tensor(name), model.state_dict()[name].float().numpy())


def test_the_configuration_of_transformers_5_is_read(folder: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e5}
    edit_config(folder, rope_theta=None, rope_scaling=None, rope_parameters=scaling)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config.rope_theta == 1e5
        assert checkpoint.config.rope_scaling == {"rope_type": "llama3", "factor": 8.0}


def test_a_multimodal_gemma_gives_its_language_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = hf_model("gemma3_text")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {
        f"language_model.{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["vision_tower.weight"] = next(iter(tensors.values())).clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        expected = model.state_dict()["model.norm.weight"].numpy() + 1
        np.testing.assert_allclose(checkpoint.tensor("model.norm.weight"), expected, rtol=1e-6)


def test_a_folder_brings_its_tokenizer(folder: Path, byte_level_bpe: Any) -> None:
    end, start = (byte_level_bpe.token_to_id(token) for token in ("<|end|>", "<|start|>"))
    byte_level_bpe.save(str(folder / "tokenizer.json"))
    table = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|stop|>", "chat_template": "in table"}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    edit_config(folder, eos_token_id=8)
    with open_checkpoint(folder) as checkpoint:
        files = checkpoint.tokenizer
    stop = byte_level_bpe.token_to_id("<|stop|>")
    assert files.eos_ids == tuple(sorted({7, 8, 9, end, stop}))  # <|end|> is a known end token
    assert (files.bos_id, files.add_bos) == (start, False)
    assert files.vocab_size == byte_level_bpe.get_vocab_size()
    assert files.chat_template == "in table"
    (folder / "chat_template.jinja").write_text("in a file")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tokenizer.chat_template == "in a file"


def test_bos_is_added_when_the_tokenizer_itself_adds_it(folder: Path, byte_level_bpe: Any) -> None:
    from tokenizers import Tokenizer, processors

    start = byte_level_bpe.token_to_id("<|start|>")
    tokenizer = Tokenizer.from_str(byte_level_bpe.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", start)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|start|>"}))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tokenizer.add_bos


def test_a_folder_without_tokenizer_json_opens_but_has_no_tokenizer(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint, pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        checkpoint.tokenizer  # noqa: B018


def test_what_is_no_model_is_refused_with_the_catalog(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no-such.*smollm2-135m-q4_1"):
        open_checkpoint("no-such")
    with pytest.raises(UsageError, match=r"missing\.gguf"):
        open_checkpoint(tmp_path / "missing.gguf")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(UsageError, match=r"config\.json.*x\.gguf"):
        open_checkpoint(tmp_path)


def test_a_revision_is_refused_where_it_means_nothing(folder: Path) -> None:
    with pytest.raises(UsageError, match="abc"):
        open_checkpoint(folder, revision="abc")


def test_smollm2_opens_as_the_model_it_is(smollm2_gguf: Path) -> None:
    with open_checkpoint(smollm2_gguf) as checkpoint:
        config = checkpoint.config
        assert (config.family, config.num_layers, config.hidden_size) == ("llama", 30, 576)
        assert (config.num_heads, config.num_kv_heads, config.rope_theta) == (9, 3, 1e5)
        assert config.tie_embeddings
        kinds = [checkpoint.raw(name) for name in checkpoint.names()]
    assert sum(raw is not None and raw.type_name == "Q4_1" for raw in kinds) == 210
