"""The evaluator's public face: load a package, predict with one of its functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from outrider.errors import BackendError
from outrider.targets.coreml_reference.constants import Array, Constants
from outrider.targets.coreml_reference.features import FeatureSpec, check_inputs
from outrider.targets.coreml_reference.package import FunctionFeatures, Package, WeightFiles, read_package
from outrider.targets.coreml_reference.plan import Plan, Values, check_operations, make_plan
from outrider.targets.coreml_reference.state import MilState
from outrider.targets.coreml_reference.structure import MilFunctionDef
from outrider.targets.coreml_reference.types import DTYPES

__all__ = ["MilFunction", "MilProgram"]


class MilFunction:
    """One function of a program, ready to predict; its plan is made at the first prediction."""

    def __init__(self, definition: MilFunctionDef, features: FunctionFeatures, constants: Constants) -> None:
        self.definition = definition
        self._features = features
        self._constants = constants
        self._plan: Plan | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """The function's name in the package."""
        return self.definition.name

    @property
    def inputs(self) -> Mapping[str, FeatureSpec]:
        """What a prediction takes, by name."""
        return self._features.inputs

    @property
    def outputs(self) -> Mapping[str, FeatureSpec]:
        """What a prediction gives, by name (the shape of a flexible output is empty)."""
        return self._features.outputs

    @property
    def states(self) -> Mapping[str, FeatureSpec]:
        """The buffers that a prediction reads and writes, by name."""
        return self._features.states

    def make_state(self) -> MilState:
        """New buffers, all zero."""
        return MilState(self.states)

    def prepare(self) -> None:
        """Decode the constants and make the plan, which the first prediction does otherwise."""
        self._planned()

    def close(self) -> None:
        """Let go of the plan; no prediction after that."""
        self._plan, self._closed = None, True

    def predict(
        self, inputs: Mapping[str, Array], state: MilState | None = None, *, also: Sequence[str] = ()
    ) -> dict[str, Array]:
        """The outputs by name, in the element types that the package describes (float16 for nearly all).

        `also` names values inside of the program to return beside them, for finding where two programs part.
        A state changes only when the whole prediction succeeds. Raises BackendError for inputs or a state that do
        not fit, and for an operation that cannot be computed with what it is given.
        """
        plan = self._planned()
        given = check_inputs(self.inputs, inputs, self.name)
        types = self._types(plan, also)
        buffers = self._buffers(state)
        values = plan.run({name: _widened(array) for name, array in given.items()}, buffers, also)
        if state is not None:
            state.buffers.update(buffers)
        return {name: values[name].astype(dtype) for name, dtype in types.items()}

    def _planned(self) -> Plan:
        if self._closed:
            raise BackendError(f"the program of function {self.name!r} is closed")
        if self._plan is None:
            self._plan = make_plan(self.definition, self._constants)
        return self._plan

    def _types(self, plan: Plan, also: Sequence[str]) -> dict[str, np.dtype[Any]]:
        """Element types of what a prediction returns."""
        types = {name: DTYPES[self.outputs[name].dtype] for name in self.definition.outputs}
        made = plan.made if also else {}
        for name in also:
            if name not in made:
                raise BackendError(f"function {self.name!r} computes no value {name!r} in a run")
            types[name] = DTYPES[made[name].dtype]
        return types

    def _buffers(self, state: MilState | None) -> Values:
        if state is None:
            if self.states:
                raise BackendError(
                    f"function {self.name!r} keeps state ({', '.join(self.states)}): give predict one of make_state()"
                )
            return {}
        if state.specs != dict(self.states):
            have = ", ".join(self.states) or "none"
            raise BackendError(
                f"the state does not belong to function {self.name!r}, whose states are: {have}"
            )
        return dict(state.buffers)


class MilProgram:
    """A Core ML package that runs here: each function evaluated in numpy, fp16 storage with float32 accumulation.

    Follows the MIL specification as coremltools 9 writes it. Every intermediate value is rounded to the type that the
    program declares; matrix products and reductions accumulate in float32, which a Neural Engine need not do, so
    results agree with a device within fp16 noise, not bit by bit.
    """

    def __init__(self, package: Package, function: str | None = None) -> None:
        self.package = package
        self._constants = Constants(WeightFiles(package.model_file))
        self.functions: Mapping[str, MilFunction] = {
            name: MilFunction(definition, package.features[name], self._constants)
            for name, definition in package.functions.items()
        }
        self._default = self.function(function or package.default_function)

    @classmethod
    def load(cls, path: str | Path, function: str | None = None) -> MilProgram:
        """Open a `.mlpackage` folder; `function` is what `predict` runs when not told (default: the package's own).

        Raises BackendError for a package that is damaged, of an unknown version, or holds an operation that the
        evaluator does not know; MissingExtraError without coremltools, whose protobuf classes read it.
        """
        package = read_package(path)
        for definition in package.functions.values():
            check_operations(definition)
        return cls(package, function)

    def function(self, name: str) -> MilFunction:
        """One function by name; BackendError lists those that there are."""
        if name not in self.functions:
            have = ", ".join(self.functions)
            raise BackendError(f"{self.package.path} has no function {name!r}; it has: {have}")
        return self.functions[name]

    @property
    def inputs(self) -> Mapping[str, FeatureSpec]:
        """The inputs of the default function."""
        return self._default.inputs

    @property
    def outputs(self) -> Mapping[str, FeatureSpec]:
        """The outputs of the default function."""
        return self._default.outputs

    @property
    def states(self) -> Mapping[str, FeatureSpec]:
        """The states of the default function."""
        return self._default.states

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the package says of itself under user-defined keys."""
        return self.package.metadata

    @property
    def constant_bytes(self) -> int:
        """Bytes of memory that the constants of all functions used so far take."""
        return self._constants.nbytes

    def make_state(self) -> MilState:
        """New buffers for the default function, all zero."""
        return self._default.make_state()

    def predict(
        self,
        inputs: Mapping[str, Array],
        state: MilState | None = None,
        *,
        function: str | None = None,
        also: Sequence[str] = (),
    ) -> dict[str, Array]:
        """The outputs of one function (the default one if not named) by name; see `MilFunction.predict`."""
        chosen = self._default if function is None else self.function(function)
        return chosen.predict(inputs, state, also=also)

    def close(self) -> None:
        """Let go of the decoded constants and of the mapped files; no prediction after that."""
        for function in self.functions.values():
            function.close()
        self._constants.close()

    def __enter__(self) -> MilProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _widened(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == np.float16 else array
