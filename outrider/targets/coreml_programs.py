"""Who runs a Core ML package: Core ML itself on macOS, our evaluator of its program elsewhere.

Both open the functions of one package when they are first needed, and hold one state for all calls.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import BackendError, MissingExtraError, UsageError

__all__ = ["COMPUTE_UNITS", "EXECUTIONS", "EvaluatedProgram", "NativeProgram", "Program", "open_program"]

Arrays = Mapping[str, NDArray[Any]]
Shape = tuple[int | None, ...]  # None: a dimension that a call chooses
Execution = Literal["coreml", "evaluator"]

EXECUTIONS: Mapping[str, str] = {"coreml": "artifact", "evaluator": "evaluator"}
"""Who runs a package -> how that proves it (`via` of the manifest)."""
COMPUTE_UNITS = {"npu": "CPU_AND_NE", "gpu": "CPU_AND_GPU", "cpu": "CPU_ONLY"}
"""The unit of a graph -> what Core ML is asked to use."""


class Program(Protocol):
    """An opened package. What a call returns belongs to the caller."""

    execution: Execution
    provider: str  # for people

    def functions(self) -> tuple[str, ...]:
        """Every function's name."""
        ...

    def tensors(self, function: str) -> dict[str, Shape]:
        """Inputs, outputs and states of a function, with their shapes."""
        ...

    def run(self, function: str, inputs: Arrays) -> Arrays:
        """The outputs of a function by name; states of the package are read and written."""
        ...

    def close(self) -> None:
        """Let go of the package."""
        ...


class EvaluatedProgram:
    """A package run by `coreml_reference.MilProgram`: the shipped file, in numpy."""

    execution: Execution = "evaluator"
    provider = "Core ML program, evaluated"

    def __init__(self, path: Path) -> None:
        from outrider.targets.coreml_reference import MilProgram

        self._program = MilProgram.load(path)
        self._state: Any = None

    def functions(self) -> tuple[str, ...]:
        """Every function's name."""
        return tuple(self._program.functions)

    def tensors(self, function: str) -> dict[str, Shape]:
        """Inputs, outputs and states of a function, with their shapes."""
        found = self._program.function(function)
        kinds = (found.inputs, found.outputs, found.states)
        return {name: _evaluated_shape(value) for values in kinds for name, value in values.items()}

    def run(self, function: str, inputs: Arrays) -> Arrays:
        """The outputs of a function by name; one state serves all of them."""
        found = self._program.function(function)
        if found.states and self._state is None:
            self._state = found.make_state()
        outputs: Arrays = found.predict(inputs, self._state)
        return outputs

    def close(self) -> None:
        """Let go of the package; closing twice is allowed."""
        self._program.close()
        self._state = None


class NativeProgram:
    """A package run by Core ML on `unit`; its first function is compiled, the others open what that left."""

    execution: Execution = "coreml"

    def __init__(self, path: Path, unit: str) -> None:
        try:
            import coremltools
        except ImportError:
            raise MissingExtraError("coremltools", "coreml") from None
        self.path, self._tools = path, coremltools
        self.provider = f"Core ML {COMPUTE_UNITS[unit]}"
        self._units = coremltools.ComputeUnit[COMPUTE_UNITS[unit]]
        self._spec = coremltools.utils.load_spec(str(path))
        self._first: Any = None  # owns the compiled folder
        self._open: dict[str, Any] = {}
        self._state: Any = None

    def functions(self) -> tuple[str, ...]:
        """Every function's name."""
        return tuple(self._spec.mlProgram.functions)

    def tensors(self, function: str) -> dict[str, Shape]:
        """Inputs, outputs and states of a function, with their shapes."""
        described = self._spec.description
        found = next((entry for entry in described.functions if entry.name == function), described)
        values = (*found.input, *found.output, *found.state)
        return {value.name: _shape_of(value) for value in values}

    def run(self, function: str, inputs: Arrays) -> Arrays:
        """The outputs of a function by name; one state serves all of them."""
        model = self._model(function)
        # The Python binding takes no half precision: Core ML narrows single precision on its way in.
        given = {
            name: array.astype(np.float32) if array.dtype == np.float16 else array
            for name, array in inputs.items()
        }
        outputs: Arrays = model.predict(given, self._state)
        return outputs

    def close(self) -> None:
        """Let go of the package; closing twice is allowed."""
        self._open, self._state, self._first = {}, None, None

    def _model(self, function: str) -> Any:
        if function not in self._open:
            self._open[function] = self._compiled(function)
            if self.states(function) and self._state is None:
                self._state = self._open[function].make_state()
        return self._open[function]

    def states(self, function: str) -> tuple[str, ...]:
        """The names of a function's states."""
        described = self._spec.description
        found = next((entry for entry in described.functions if entry.name == function), described)
        return tuple(value.name for value in found.state)

    def _compiled(self, function: str) -> Any:
        name = function if len(self.functions()) > 1 else None
        if self._first is None:
            self._first = self._tools.models.MLModel(
                str(self.path), compute_units=self._units, function_name=name
            )
            return self._first
        folder = self._first.get_compiled_model_path()
        return self._tools.models.CompiledMLModel(folder, compute_units=self._units, function_name=name)


def _shape_of(value: Any) -> Shape:
    """The shape of a described value."""
    kind = value.type.WhichOneof("Type")
    array = value.type.stateType.arrayType if kind == "stateType" else value.type.multiArrayType
    enumerated = [tuple(entry.shape) for entry in array.enumeratedShapes.shapes]
    ranges = [(bound.lowerBound, bound.upperBound) for bound in array.shapeRange.sizeRanges]
    return _open_shape(tuple(array.shape), enumerated, ranges)


def _evaluated_shape(feature: Any) -> Shape:
    """The shape of a `coreml_reference.features.FeatureSpec`."""
    return _open_shape(feature.shape, feature.enumerated, feature.ranges)


def _open_shape(
    shape: Sequence[int], enumerated: Sequence[Sequence[int]], ranges: Sequence[tuple[int, int | None]]
) -> Shape:
    """A dimension that may differ is None."""
    if enumerated:
        sizes = [set(found) for found in zip(*enumerated, strict=True)]
        return tuple(found.pop() if len(found) == 1 else None for found in sizes)
    return tuple(low if low == high else None for low, high in ranges) or tuple(shape)


def open_program(path: Path, execution: str, unit: str) -> Program:
    """Open a package. `execution` "auto" takes Core ML on macOS, else the evaluator.

    Raises MissingExtraError without coremltools; BackendError for a package that is missing or damaged, or for
    Core ML where there is none; UsageError for an unknown word.
    """
    if execution not in ("auto", *EXECUTIONS):
        raise UsageError(f"execution is {execution!r}; known: auto, {', '.join(EXECUTIONS)}")
    if execution == "coreml" and sys.platform != "darwin":
        raise BackendError("Core ML was asked for, but it is part of macOS and iOS; the evaluator runs here")
    if not path.is_dir():
        raise BackendError(f"{path} does not exist; export the bundle again or fetch it whole")
    native = execution == "coreml" or (execution == "auto" and sys.platform == "darwin")
    try:
        return NativeProgram(path, unit) if native else EvaluatedProgram(path)
    except RuntimeError as error:
        raise BackendError(f"Core ML cannot open {path}: {error}; run `outrider check`") from error
