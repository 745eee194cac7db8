"""Give the peers what they need: their own virtual environment, and models made from the same GGUF file.

    python -m benchmarks.peers install
    python -m benchmarks.peers build --gguf MODEL.gguf --out DIR --recipe int4-b32 int8-b128 int4-b32-k_quant_mixed

llama.cpp (`xllamacpp`) reads the GGUF file itself. onnxruntime-genai wants a folder of its own making, so
the dequantized weights are written as a Hugging Face folder and handed to its model builder (`-e cpu`), once
for each recipe. The builder needs another transformers than Outrider's exporter does; that is why the peers
live in an environment of their own, which borrows only torch from the product's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import GENAI_CONFIG, gguf_file, told
from outrider.errors import ExportError, UsageError
from outrider.export.checkpoint import Checkpoint, open_checkpoint

__all__ = [
    "GenaiRecipe",
    "build_genai",
    "build_recipes",
    "install",
    "installed_python",
    "peers_python",
    "write_hf_folder",
]

PEERS = Path(".peers")
PACKAGES = ("xllamacpp", "onnxruntime-genai", "onnx-ir", "transformers>=5")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "smollm": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
MODEL_TYPES = {"llama": "llama", "smollm": "llama", "qwen2": "qwen2"}
PRECISIONS = ("int4", "int8")
BLOCK_SIZES = (16, 32, 64, 128, 256)
RECIPE_FORM = "PRECISION[-bBLOCK][-ALGORITHM][-asym][-untied]"
RECIPE_NAME = re.compile(r"(\w+)(?:-b(\d+))?(?:-(?!asym|untied)(\w+))?(-asym)?(-untied)?")
ALGORITHMS = {  # by name: what the builder's --extra_options say
    "default": (),
    "rtn": ("algo_config=rtn",),
    "k_quant": ("algo_config=k_quant",),
    "rtn_last": ("algo_config=rtn_last",),
    "rtn_mixed": ("algo_config=rtn", "matmul_mixed_precision=last_matmul:int8,mixed_layers:int8"),
    "k_quant_last": ("algo_config=k_quant_last",),
    "k_quant_mixed": ("algo_config=k_quant_mixed",),
}


@dataclass(frozen=True)
class GenaiRecipe:
    """How onnxruntime-genai's model builder quantizes: precision, block size, algorithm, zero points.

    `*_last` keep 8 bits in the head, `*_mixed` also in the layers that the builder takes for the sensitive ones.
    A model that ties its embedding to its head is built so, at the head's bits if they are int4's; `untied` is a
    float embedding of its own.
    """

    precision: str = "int4"
    block_size: int = 32
    algorithm: str = "default"
    symmetric: bool = True
    untied: bool = False

    def __post_init__(self) -> None:
        """Refuse what the builder does not know."""
        for what, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("block size", self.block_size, BLOCK_SIZES),
            ("algorithm", self.algorithm, ALGORITHMS),
        ):
            if value not in known:
                raise ValueError(f"unknown {what} {value!r}; known: {', '.join(map(str, known))}")

    @classmethod
    def parse(cls, name: str) -> GenaiRecipe:
        """The recipe of a name such as int8-b128 or int4-b32-k_quant_mixed-asym; what is left out is the default.

        Raises ValueError.
        """
        found = RECIPE_NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"{name!r} is no recipe; write {RECIPE_FORM}")
        precision, block, algorithm, asymmetric, untied = found.groups()
        return cls(precision, int(block or 32), algorithm or "default", not asymmetric, bool(untied))

    @property
    def name(self) -> str:
        """What `parse` reads, in one spelling; also the name of the folder."""
        algorithm = [] if self.algorithm == "default" else [self.algorithm]
        switches = [word for word, on in (("asym", not self.symmetric), ("untied", self.untied)) if on]
        return "-".join([self.precision, f"b{self.block_size}", *algorithm, *switches])

    @property
    def builder_arguments(self) -> list[str]:
        """The part of the builder's command line that it decides."""
        extra = [f"block_size={self.block_size}", *ALGORITHMS[self.algorithm]]
        extra += [] if self.symmetric else ["is_symmetric=false"]
        extra += ["shared_embeddings=false"] if self.untied else []
        return ["-p", self.precision, "--extra_options", *extra]


def peers_python(folder: Path = PEERS) -> Path:
    """The interpreter of the peers' environment; `install` makes it."""
    return folder.absolute() / "bin" / "python"


def installed_python(folder: Path = PEERS) -> Path:
    """The same, of an environment that is there. Raises UsageError."""
    python = peers_python(folder)
    if not python.exists():
        raise UsageError(f"{folder} has no bin/python; `python -m benchmarks.peers install` makes it")
    return python


def install(folder: Path = PEERS) -> Path:
    """Make the peers' environment where it does not exist, and return its interpreter."""
    python = peers_python(folder)
    if folder.is_file():
        raise UsageError(f"{folder} is a file; --peers is a folder for a virtual environment")
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
        raise UsageError(f"no genai peer for family {config.family!r}; known: {', '.join(ARCHITECTURES)}")
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


def build_recipes(gguf: Path, out: Path, recipes: Sequence[GenaiRecipe], python: Path) -> list[Path]:
    """Build onnxruntime-genai folders `out`/<recipe> from a GGUF file, each whole or not at all; what is there stays.

    Raises UsageError for one that is there and not whole, ExportError when the builder fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    folders = [out / recipe.name for recipe in recipes]
    missing = {folder: recipe for folder, recipe in zip(folders, recipes, strict=True) if not folder.exists()}
    for folder in folders:
        if folder not in missing and not (folder / GENAI_CONFIG).exists():
            raise UsageError(f"{folder} has no {GENAI_CONFIG}: a build that failed; delete it")
    if not missing:
        return folders
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        weights = Path(temporary) / "hf"
        with open_checkpoint(gguf) as checkpoint:
            write_hf_folder(checkpoint, weights)
        for folder, recipe in missing.items():
            build_genai(weights, Path(temporary) / recipe.name, recipe, python)
            (Path(temporary) / recipe.name).rename(folder)
    return folders


def build_genai(weights: Path, out: Path, recipe: GenaiRecipe, python: Path) -> None:
    """Have the builder make the folder `out` from a Hugging Face folder; Raises ExportError with what it said."""
    command: list[str | Path] = [python, "-m", "onnxruntime_genai.models.builder", "-i", weights, "-o", out]
    command += ["-e", "cpu", "-c", weights.with_name("cache"), *recipe.builder_arguments]
    done = subprocess.run(command, env=_builder_env(python), capture_output=True, text=True, check=False)
    if done.returncode or not (out / GENAI_CONFIG).exists():
        raise ExportError(f"the genai builder failed on {recipe.name}:\n{done.stderr[-2000:]}")


def _builder_env(python: Path) -> dict[str, str]:
    """The peers' own packages first, then torch and what else only the product's environment has."""
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    return {**os.environ, "PYTHONPATH": os.pathsep.join([own, sysconfig.get_path("purelib")])}


@told
def main(arguments: Sequence[str] | None = None) -> int:
    """`install` or `build`."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--peers", type=Path, default=PEERS, help="the peers' virtual environment")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install")
    build = commands.add_parser("build")
    build.add_argument("--gguf", type=gguf_file, required=True)
    build.add_argument("--out", type=Path, required=True, help="one folder a recipe is made here")
    build.add_argument(
        "--recipe",
        type=recipe_argument,
        nargs="+",
        default=[GenaiRecipe()],
        help=f"{RECIPE_FORM}; algorithms: {', '.join(ALGORITHMS)}",
    )
    options = parser.parse_args(arguments)
    if options.command == "install":
        print(install(options.peers))
        return 0
    for folder in build_recipes(options.gguf, options.out, options.recipe, installed_python(options.peers)):
        print(folder)
    return 0


def recipe_argument(name: str) -> GenaiRecipe:
    """For argparse, which shows the message of this error only."""
    try:
        return GenaiRecipe.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
