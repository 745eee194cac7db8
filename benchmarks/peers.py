"""Give the peers what they need: their own virtual environment, and models made from the same GGUF file.

    python -m benchmarks.peers install
    python -m benchmarks.peers build --gguf MODEL.gguf --out DIR --block-size 32 64

llama.cpp (`xllamacpp`) reads the GGUF file itself. onnxruntime-genai wants a folder of its own making, so
the dequantized weights are written as a Hugging Face folder and handed to its model builder (`-p int4 -e
cpu`). The builder needs another transformers than Outrider's exporter does; that is why the peers live in
an environment of their own, which borrows only torch from the product's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np

from outrider.export.checkpoint import Checkpoint, open_checkpoint

__all__ = ["build_genai", "install", "peers_python", "write_hf_folder"]

PEERS = Path(".peers")
PACKAGES = ("xllamacpp", "onnxruntime-genai", "onnx-ir", "transformers>=5")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "smollm": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
MODEL_TYPES = {"llama": "llama", "smollm": "llama", "qwen2": "qwen2"}


def peers_python(folder: Path = PEERS) -> Path:
    """The interpreter of the peers' environment; `install` makes it."""
    return folder.absolute() / "bin" / "python"


def install(folder: Path = PEERS) -> Path:
    """Make the peers' environment where it does not exist, and return its interpreter."""
    python = peers_python(folder)
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return python


def write_hf_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the weights as float16 safetensors with the config and tokenizer that transformers expects."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: checkpoint.tensor(name).astype(np.float16) for name in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    files = checkpoint.tokenizer
    (folder / "config.json").write_text(json.dumps(_hf_config(checkpoint), indent=2))
    (folder / "tokenizer.json").write_text(files.tokenizer_json, encoding="utf-8")
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": files.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def _hf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config, files = checkpoint.config, checkpoint.tokenizer
    if config.family not in ARCHITECTURES:
        raise SystemExit(f"no genai peer for family {config.family!r}; known: {', '.join(ARCHITECTURES)}")
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": MODEL_TYPES[config.family],
        "torch_dtype": "float16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": files.bos_id if files.bos_id is not None else files.eos_ids[0],
        "eos_token_id": list(files.eos_ids),
        "pad_token_id": files.pad_id if files.pad_id is not None else files.eos_ids[0],
    }


def build_genai(gguf: Path, out: Path, block_size: int, python: Path) -> Path:
    """Build the onnxruntime-genai folder `out` from a GGUF file; an existing one is kept."""
    if (out / "genai_config.json").exists():
        return out
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        with open_checkpoint(gguf) as checkpoint:
            write_hf_folder(checkpoint, Path(temporary) / "hf")
        command = [
            str(python),
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            f"{temporary}/hf",
            "-o",
            str(out),
        ]
        command += ["-p", "int4", "-e", "cpu", "-c", f"{temporary}/cache"]
        command += ["--extra_options", f"block_size={block_size}"]
        done = subprocess.run(command, env=_builder_env(python), capture_output=True, text=True, check=False)
    if done.returncode or not (out / "genai_config.json").exists():
        raise SystemExit(f"the genai builder failed on {gguf.name}:\n{done.stderr[-2000:]}")
    return out


def _builder_env(python: Path) -> dict[str, str]:
    """The peers' own packages first, then torch and what else only the product's environment has."""
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    return {**os.environ, "PYTHONPATH": os.pathsep.join([own, sysconfig.get_path("purelib")])}


def main(arguments: list[str] | None = None) -> int:
    """`install` or `build`."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--peers", type=Path, default=PEERS, help="the peers' virtual environment")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install")
    build = commands.add_parser("build")
    build.add_argument("--gguf", type=Path, required=True)
    build.add_argument(
        "--out", type=Path, required=True, help="one folder block<N> per block size is made here"
    )
    build.add_argument("--block-size", type=int, nargs="+", default=[32])
    options = parser.parse_args(arguments)
    if options.command == "install":
        print(install(options.peers))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for size in options.block_size:
        print(build_genai(options.gguf, options.out / f"block{size}", size, peers_python(options.peers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
