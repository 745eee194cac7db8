"""A loaded ExecuTorch program through the shim: arrays in and out by pointer, no torch."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import BackendError
from outrider.targets.executorch_shim.build import Wheel, built_shim, executorch_wheel
from outrider.targets.executorch_threads import ThreadPool
from outrider.targets.huge_pages import new_memory_on_huge_pages

__all__ = ["ShimProgram", "TensorSpec"]

MAX_RANK = 8  # kMaxRank of shim.cpp
SCALAR_TYPES = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    6: "float32",
    7: "float64",
    11: "bool",
}
CODES = {np.dtype(name): code for code, name in SCALAR_TYPES.items()}
TensorSpec = tuple[str, tuple[int, ...]]
"""dtype by numpy's name, and the largest sizes."""

_I32, _I64 = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int64)
_HANDLE, _NAME, _INT = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "error": (_NAME, []),
    "open": (_HANDLE, [_NAME]),
    "close": (None, [_HANDLE]),
    "num_methods": (_INT, [_HANDLE]),
    "method_name": (_NAME, [_HANDLE, _INT]),
    "arity": (_INT, [_HANDLE, _NAME, _I32, _I32]),
    "tensor": (_INT, [_HANDLE, _NAME, _INT, _INT, _I32, _I32, _I64]),
    "load": (_INT, [_HANDLE, _NAME]),
    "run": (_INT, [_HANDLE, _INT, _INT, ctypes.POINTER(ctypes.c_void_p), _I32, _I32, _I64]),
    "outputs": (_INT, [_HANDLE, _INT, ctypes.POINTER(ctypes.c_void_p), _I32, _I64]),
    "buffer": (ctypes.c_void_p, [_HANDLE, _INT, _NAME, _I32, _I64]),
}


class Library:
    """The shim's functions with their types; `call.open(...)` is `outrider_et_open`."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            for name, (result, arguments) in SIGNATURES.items():
                function = getattr(library, f"outrider_et_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        except (OSError, AttributeError) as error:
            raise BackendError(
                f"the ExecuTorch shim {path} cannot be loaded: {error}; delete it to have it built again"
            ) from error

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def reason(self) -> str:
        """Why the last call failed, as one line."""
        return " ".join(self.error().decode(errors="replace").split())


@functools.lru_cache(maxsize=4)
def library(wheel: Wheel) -> Library:
    """The shim of a wheel, built and loaded once in a process."""
    return Library(built_shim(wheel))


class _Method:
    """What is passed to `run` again and again for one loaded method."""

    def __init__(self, number: int, inputs: int, outputs: int) -> None:
        self.number, self.inputs, self.outputs = number, inputs, outputs
        self.arrays: list[NDArray[Any] | None] = [
            None
        ] * inputs  # kept alive while the runtime points at them
        self.data = (ctypes.c_void_p * max(1, inputs))()
        self.dtypes = (ctypes.c_int32 * max(1, inputs))()
        self.ranks = (ctypes.c_int32 * max(1, inputs))()
        self.sizes = (ctypes.c_int64 * (MAX_RANK * max(1, inputs)))()
        self.found = (ctypes.c_void_p * max(1, outputs))()
        self.found_ranks = (ctypes.c_int32 * max(1, outputs))()
        self.found_sizes = (ctypes.c_int64 * (MAX_RANK * max(1, outputs)))()

    def bind(self, index: int, array: NDArray[Any]) -> None:
        """Point an input at an array; the same array again costs nothing."""
        if self.arrays[index] is array:
            return
        if not array.flags.c_contiguous:
            raise ValueError(f"input {index} is not contiguous")
        self.arrays[index] = array
        self.data[index], self.ranks[index] = array.ctypes.data, array.ndim
        self.dtypes[index] = CODES[array.dtype]
        start = index * MAX_RANK
        self.sizes[start : start + array.ndim] = list(array.shape)


class _Handle:
    """Owns a program in the shim; it is freed when neither a graph nor an array over its memory is left."""

    def __init__(self, shim: Library, address: int) -> None:
        self.shim, self.address, self.owner, self._process = shim, address, os.getpid(), os.getpid

    def __del__(self) -> None:
        if self.owner == self._process():  # a fork has no threads that could end what delegates run
            self.shim.close(self.address)


class ShimProgram:
    """A program behind the shim. Not for several threads at once; a fork must open its own."""

    runtime = "shim"

    def __init__(self, path: Path, threads: int | None = None) -> None:
        wheel = executorch_wheel()
        self._shim = library(wheel)
        address = self._shim.open(os.fsencode(path))
        if not address:
            raise RuntimeError(self._shim.reason())
        self._handle: _Handle | None = _Handle(self._shim, address)
        self._pool = ThreadPool(wheel, threads)
        self._loaded: dict[str, _Method] = {}
        self._views: dict[tuple[int, int, tuple[int, ...]], NDArray[Any]] = {}

    @property
    def address(self) -> int:
        """The handle for calls; raises BackendError after `close` or in another process."""
        if self._handle is None:
            raise BackendError("the program is closed")
        if self._handle.owner != os.getpid():
            raise BackendError("the graph was opened before a fork; open it again in this process")
        return self._handle.address

    def methods(self) -> tuple[str, ...]:
        """Every method's name."""
        count = self._shim.num_methods(self.address)
        return tuple(self._shim.method_name(self.address, index).decode() for index in range(count))

    def tensors(self, method: str) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Inputs and outputs of a method, without loading it."""
        counts = (ctypes.c_int32 * 2)()
        second = ctypes.cast(ctypes.byref(counts, 4), _I32)
        self._ok(self._shim.arity(self.address, method.encode(), counts, second))
        inputs = [self._tensor(method, 0, index) for index in range(counts[0])]
        return inputs, [self._tensor(method, 1, index) for index in range(counts[1])]

    def load(self, method: str) -> None:
        """Prepare a method: delegates pack their weights. `run` does it when it is due."""
        if method in self._loaded:
            return
        inputs, outputs = self.tensors(method)
        with self._pool.mine(), new_memory_on_huge_pages():
            number = self._shim.load(self.address, method.encode())
        self._ok(number)
        self._loaded[method] = _Method(number, len(inputs), len(outputs))

    def run(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Run a method; the outputs are views that its next run overwrites."""
        self.load(method)
        m = self._loaded[method]
        for index, array in enumerate(inputs):
            m.bind(index, array)
        with self._pool.mine():
            status = self._shim.run(self.address, m.number, len(inputs), m.data, m.dtypes, m.ranks, m.sizes)
        self._ok(status)
        self._ok(self._shim.outputs(self.address, m.number, m.found, m.found_ranks, m.found_sizes))
        return [self._output(m, index) for index in range(m.outputs)]

    def buffer(self, method: str, name: str) -> NDArray[np.float32] | None:
        """A float32 mutable buffer of a method as an array over its memory; None when no such name was kept."""
        self.load(method)
        rank, sizes = (ctypes.c_int32 * 1)(), (ctypes.c_int64 * MAX_RANK)()
        found = self._shim.buffer(self.address, self._loaded[method].number, name.encode(), rank, sizes)
        return self._view(found, tuple(sizes[: rank[0]])) if found else None

    def close(self) -> None:
        """Let go of the program; its memory goes when no array looks into it any more."""
        self._loaded.clear()
        self._views.clear()
        self._handle = None

    def _ok(self, status: int) -> None:
        if status < 0:
            raise RuntimeError(self._shim.reason())

    def _tensor(self, method: str, output: int, index: int) -> TensorSpec:
        numbers, sizes = (ctypes.c_int32 * 2)(), (ctypes.c_int64 * MAX_RANK)()
        rank = ctypes.cast(ctypes.byref(numbers, 4), _I32)
        self._ok(self._shim.tensor(self.address, method.encode(), output, index, numbers, rank, sizes))
        return SCALAR_TYPES.get(numbers[0], f"type {numbers[0]}"), tuple(sizes[: numbers[1]])

    def _output(self, m: _Method, index: int) -> NDArray[Any]:
        start = index * MAX_RANK
        shape = tuple(m.found_sizes[start : start + m.found_ranks[index]])
        address = m.found[index] or 0
        key = (m.number, address, shape)
        if key not in self._views:
            self._views[key] = self._view(address, shape)
        return self._views[key]

    def _view(self, address: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        size = int(np.prod(shape))
        memory = (ctypes.c_float * max(1, size)).from_address(address)
        memory._owner = self._handle  # type: ignore[attr-defined]  # views outlive `close` safely
        flat: NDArray[np.float32] = np.ctypeslib.as_array(memory)[:size]
        return flat.reshape(shape)
