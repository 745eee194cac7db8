"""An execution plan: constants folded, one step for each operation that remains, values freed after their last use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import BackendError
from outrider.targets.coreml_reference import ops_all  # noqa: F401  (registers the operations)
from outrider.targets.coreml_reference.constants import Array, Constant, Constants, computed, settle
from outrider.targets.coreml_reference.constexpr import CONSTEXPR
from outrider.targets.coreml_reference.folding import STATE_OPERATIONS, constant_outputs
from outrider.targets.coreml_reference.registry import Operation, lookup
from outrider.targets.coreml_reference.structure import Argument, MilFunctionDef, MilOperation
from outrider.targets.coreml_reference.types import MilType
from outrider.targets.coreml_reference.values import plain

__all__ = ["Plan", "check_operations", "make_plan"]

Values = dict[str, Array]
# what reads a few rows of a table leaves the table as it is stored
_LOOKUPS = {("gather", "x"), ("gather_nd", "x"), ("gather_along_axis", "x")}


@dataclass(frozen=True)
class _Name:
    """A parameter that is a value of this run, not a constant."""

    name: str


@dataclass(frozen=True)
class ComputeStep:
    """An operation with what is constant of its parameters; `given` names the rest."""

    operation: MilOperation
    entry: Operation
    constants: Mapping[str, Any]
    given: Mapping[str, _Name | tuple[Any, ...]]
    where: str

    def run(self, values: Values, buffers: Values) -> None:
        parameters = dict(self.constants)
        for name, each in self.given.items():
            if isinstance(each, _Name):
                parameters[name] = values[each.name]
            else:
                parameters[name] = [values[one.name] if isinstance(one, _Name) else one for one in each]
        outputs = self.operation.outputs
        results = computed(self.entry.compute, parameters, len(outputs), self.where)
        for (name, declared), result in zip(outputs, results, strict=True):
            values[name] = settle(result, declared, self.entry.rounds, self.where)


@dataclass(frozen=True)
class ReadStep:
    """`read_state`: the buffer as it is now."""

    operation: MilOperation
    state: str

    def run(self, values: Values, buffers: Values) -> None:
        values[self.operation.output] = buffers[self.state]


@dataclass(frozen=True)
class WriteStep:
    """`write_state`: the buffer becomes a value (no copy: values are never changed once made)."""

    operation: MilOperation
    state: str
    value: _Name | Array
    where: str

    def run(self, values: Values, buffers: Values) -> None:
        value = values[self.value.name] if isinstance(self.value, _Name) else self.value
        if value.shape != buffers[self.state].shape:
            raise BackendError(
                f"{self.where}: a value of shape {list(value.shape)} is written to the state {self.state!r} "
                f"of shape {list(buffers[self.state].shape)}"
            )
        buffers[self.state] = value


Step = ComputeStep | ReadStep | WriteStep


@dataclass(frozen=True)
class Plan:
    """What one prediction of a function runs: steps, and the values that nothing after each of them uses."""

    steps: tuple[Step, ...]
    unused_after: tuple[tuple[str, ...], ...]
    outputs: tuple[str, ...]
    constant_values: Mapping[str, Array]

    @property
    def made(self) -> dict[str, MilType]:
        """Every value that is computed in a run (not the constants), with its declared type."""
        return {name: declared for step in self.steps for name, declared in step.operation.outputs}

    def run(self, inputs: Values, buffers: Values, also: Sequence[str] = ()) -> Values:
        """The outputs, and the values named in `also`; empties `inputs`, and leaves the new state in `buffers`."""
        values, wanted = inputs, {*self.outputs, *also}
        kept = {name: array for name, array in {**self.constant_values, **inputs}.items() if name in wanted}
        with np.errstate(all="ignore"):  # fp16 overflows to infinity, as on a device
            for step, unused in zip(self.steps, self.unused_after, strict=True):
                step.run(values, buffers)
                for name, _ in step.operation.outputs:
                    if name in wanted:
                        kept[name] = values[name]
                for name in unused:
                    del values[name]
        return kept


def check_operations(function: MilFunctionDef) -> None:
    """Refuse a function with an operation, or a parameter of one, that is not known (BackendError, naming it)."""
    for operation in function.operations:
        if operation.type not in {"const", *CONSTEXPR, *STATE_OPERATIONS}:
            entry = lookup(operation.type, function=function.name, output=operation.output)
            entry.check_parameters(operation.inputs, function=function.name, output=operation.output)


def make_plan(function: MilFunctionDef, constants: Constants) -> Plan:
    """Fold what is constant and order what remains; BackendError for what cannot be computed."""
    known: dict[str, Constant] = {}
    steps: list[Step] = []
    for operation in function.operations:
        folded = constant_outputs(function.name, operation, known, constants)
        known.update(folded)
        if not folded:
            steps.append(_step(function, operation, known, constants))
    outputs = {name: constants.wide(known[name]) for name in function.outputs if name in known}
    return Plan(tuple(steps), _unused_after(function, steps), function.outputs, outputs)


def _step(
    function: MilFunctionDef, operation: MilOperation, known: Mapping[str, Constant], constants: Constants
) -> Step:
    where = f"function {function.name!r}: {operation.type!r} ({operation.output})"
    if operation.type in STATE_OPERATIONS:
        return _state_step(function, operation, known, constants, where)
    fixed: dict[str, Any] = {}
    given: dict[str, _Name | tuple[Any, ...]] = {}
    for name, argument in operation.inputs.items():
        kept_stored = (operation.type, name) in _LOOKUPS
        if isinstance(argument, tuple):
            given[name] = tuple(_resolved(one, kept_stored, known, constants) for one in argument)
            continue
        found = _resolved(argument, kept_stored, known, constants)
        if isinstance(found, _Name):
            given[name] = found
        else:
            fixed[name] = plain(found)
    entry = lookup(operation.type, function=function.name, output=operation.output)
    return ComputeStep(operation, entry, fixed, given, where)


def _state_step(
    function: MilFunctionDef,
    operation: MilOperation,
    known: Mapping[str, Constant],
    constants: Constants,
    where: str,
) -> Step:
    state = operation.inputs.get("input")
    if not isinstance(state, str) or state not in function.inputs or not function.inputs[state].state:
        raise BackendError(f"{where}: its input is no state of the function")
    if operation.type == "read_state":
        return ReadStep(operation, state)
    data = operation.inputs.get("data")
    if data is None or isinstance(data, tuple):
        raise BackendError(f"{where}: it is given no data to write")
    return WriteStep(operation, state, _resolved(data, False, known, constants), where)


def _resolved(
    argument: Argument, kept_stored: bool, known: Mapping[str, Constant], constants: Constants
) -> _Name | Array:
    if isinstance(argument, str) and argument not in known:
        return _Name(argument)
    constant = known[argument] if isinstance(argument, str) else constants.of(argument)
    return constants.stored(constant) if kept_stored else constants.wide(constant)


def _unused_after(function: MilFunctionDef, steps: Sequence[Step]) -> tuple[tuple[str, ...], ...]:
    """Per step, the values that it makes or uses and that no later step uses."""
    seen: set[str] = set()
    unused: list[tuple[str, ...]] = []
    states = {name for name, declared in function.inputs.items() if declared.state}
    for step in reversed(steps):
        names = {name for name, _ in step.operation.outputs}
        names |= {one for one in _value_names(step) if one not in states}
        unused.append(tuple(sorted(names - seen)))
        seen |= names
    return tuple(reversed(unused))


def _value_names(step: Step) -> list[str]:
    if isinstance(step, WriteStep):
        return [step.value.name] if isinstance(step.value, _Name) else []
    if isinstance(step, ReadStep):
        return []
    several = (each if isinstance(each, tuple) else (each,) for each in step.given.values())
    return [one.name for each in several for one in each if isinstance(one, _Name)]
