"""Small Core ML packages that tests build with coremltools, and the tools to damage them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ct = pytest.importorskip("coremltools")

from coremltools.converters.mil import Builder as mb  # noqa: E402, N813
from coremltools.converters.mil.mil import types  # noqa: E402

IOS18 = ct.target.iOS18
SINGLE = np.float32
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
__all__ = [
    "IOS18",
    "MODEL",
    "SINGLE",
    "TINY",
    "WEIGHTS",
    "convert",
    "ct",
    "edit_manifest",
    "edit_model",
    "grid",
    "mb",
    "operation_of",
    "program",
    "spec",
    "tiny_answer",
    "tiny_package",
    "traced",
    "types",
]


def grid(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers that fp16 holds exactly."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def spec(*shape: int, dtype: Any = types.fp16) -> Any:
    return mb.TensorSpec(shape, dtype)


def program(
    path: Path, inputs: Sequence[Any], body: Callable[..., Any], target: Any = IOS18, **options: Any
) -> Path:
    """Save the package of a MIL function as it is written, without coremltools' passes: `body` returns the outputs."""
    built = mb.program(input_specs=list(inputs), opset_version=target)(body)
    return convert(path, built, target, pass_pipeline=ct.PassPipeline.EMPTY, **options)


def traced(module: Any, *examples: Any) -> Any:
    """A torch module as coremltools takes it for flexible shapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is going, and coremltools wants it
        return torch.jit.trace(module.eval(), examples)


def convert(path: Path, source: Any, target: Any = IOS18, **options: Any) -> Path:
    """Convert a MIL program or a torch model (with `inputs` and `outputs`) and save it; fp16 unless told otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # coremltools warns of torch's version, and of what it imports
        model = ct.convert(source, convert_to="mlprogram", minimum_deployment_target=target,
                           skip_model_load=True, **options)  # fmt: skip
        model.save(str(path))
    return path


def edit_model(path: Path, change: Callable[[Any], Any]) -> Path:
    """Rewrite the model of a package after `change` has had its way with the protobuf message."""
    from coremltools.proto import Model_pb2

    model = Model_pb2.Model()
    model.ParseFromString((path / MODEL).read_bytes())
    change(model)
    (path / MODEL).write_bytes(model.SerializeToString())
    return path


def edit_manifest(path: Path, **changes: Any) -> Path:
    manifest = path / "Manifest.json"
    content = {**json.loads(manifest.read_text()), **changes}
    manifest.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def operation_of(model: Any, kind: str) -> Any:
    block = next(iter(model.mlProgram.functions["main"].block_specializations.values()))
    return next(each for each in block.operations if each.type == kind)


class Tiny(torch.nn.Module):
    """A linear, an activation, a 1×1 convolution and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(16, 24), torch.nn.Conv2d(24, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.first(x))  # [1, S, 24]
        return self.second(hidden.transpose(1, 2).unsqueeze(2)).softmax(1)  # [1, 8, 1, S]


TINY = Tiny().eval()


def tiny_package(path: Path, target: Any = IOS18, shape: Any = (1, 5, 16), **options: Any) -> Path:
    inputs = [ct.TensorType(name="x", shape=shape, dtype=options.pop("dtype", SINGLE))]
    return convert(
        path,
        traced(TINY, torch.zeros(1, 5, 16)),
        target,
        inputs=inputs,
        outputs=[ct.TensorType(name="y", dtype=SINGLE)],
        **options,
    )


def tiny_answer(x: np.ndarray) -> np.ndarray:
    return TINY(torch.from_numpy(x.astype(SINGLE))).detach().numpy()
