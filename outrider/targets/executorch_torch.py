"""A loaded ExecuTorch program through the library's own Python interface, which needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import BackendError, MissingExtraError
from outrider.targets.executorch_shim.build import executorch_wheel
from outrider.targets.executorch_shim.program import SCALAR_TYPES, TensorSpec
from outrider.targets.executorch_threads import ThreadPool

__all__ = ["TorchProgram"]


class TorchProgram:
    """The same promises as `ShimProgram`, except that buffers cannot be reached and outputs are copies."""

    runtime = "torch"

    def __init__(self, path: Path, threads: int | None = None) -> None:
        wheel = executorch_wheel()
        try:
            import executorch.kernels.quantized  # noqa: F401  (registers what an 8-bit embedding runs on)
            import torch
            from executorch.runtime import Runtime
        except ImportError as error:
            name = getattr(error, "name", None) or "torch"
            raise MissingExtraError(name, "executorch") from error
        self._from_numpy = torch.from_numpy
        self._program: Any = Runtime.get().load_program(path)
        self._pool = ThreadPool(wheel, threads)
        self._methods: dict[str, Any] = {}

    def methods(self) -> tuple[str, ...]:
        """Every method's name."""
        return tuple(sorted(self._open().method_names))

    def tensors(self, method: str) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Inputs and outputs of a method, without loading it."""
        try:
            meta = self._open().metadata(method)
        except (RuntimeError, KeyError) as error:
            raise RuntimeError(f"no method {method}: {_one_line(error)}") from error
        inputs = [_spec(meta.input_tensor_meta(index)) for index in range(meta.num_inputs())]
        return inputs, [_spec(meta.output_tensor_meta(index)) for index in range(meta.num_outputs())]

    def load(self, method: str) -> None:
        """Prepare a method; `run` does it when it is due."""
        if method not in self._methods:
            with self._pool.mine():
                self._methods[method] = self._open().load_method(method)

    def run(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Run a method; the outputs are new arrays."""
        self.load(method)
        tensors = [self._from_numpy(array) for array in inputs]
        with self._pool.mine():
            outputs = self._methods[method].execute(tensors)
        return [output.numpy() for output in outputs]

    def buffer(self, method: str, name: str) -> NDArray[np.float32] | None:
        """Always None: `executorch.runtime` does not show the buffers of a method."""
        return None

    def close(self) -> None:
        """Let go of the program."""
        self._methods.clear()
        self._program = None

    def _open(self) -> Any:
        if self._program is None:
            raise BackendError("the program is closed")
        return self._program


def _spec(meta: Any) -> TensorSpec:
    code = int(meta.dtype())
    return SCALAR_TYPES.get(code, f"type {code}"), tuple(meta.sizes())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
