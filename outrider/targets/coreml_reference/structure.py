"""A MIL program as plain records: functions, operations, arguments. What the evaluator plans from and a lint reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import BackendError
from outrider.targets.coreml_reference.types import MilType, type_of
from outrider.targets.coreml_reference.values import Literal, literal_of

__all__ = ["Argument", "MilFunctionDef", "MilOperation", "functions_of"]

Argument = str | Literal
"""What an operation is given: the name of a value, or a constant."""
# parameters that are lists even when one value is given
_LIST_PARAMETERS = {"values"}


@dataclass(frozen=True)
class MilOperation:
    """One operation: parameters by MIL's names (a tuple where MIL takes several values), outputs with their types."""

    type: str
    name: str
    inputs: Mapping[str, Argument | tuple[Argument, ...]]
    outputs: tuple[tuple[str, MilType], ...]
    attributes: Mapping[str, Literal]

    @property
    def output(self) -> str:
        """The first output's name, or the operation's own where it has none (`write_state`)."""
        return self.outputs[0][0] if self.outputs else self.name

    def arguments(self) -> tuple[Argument, ...]:
        """Every argument, lists opened."""
        found: list[Argument] = []
        for given in self.inputs.values():
            found.extend(given if isinstance(given, tuple) else (given,))
        return tuple(found)


@dataclass(frozen=True)
class MilFunctionDef:
    """One function of a program: inputs (states among them), operations in order, names of its outputs."""

    name: str
    opset: str
    inputs: Mapping[str, MilType]
    operations: tuple[MilOperation, ...]
    outputs: tuple[str, ...]


def functions_of(program: Any) -> dict[str, MilFunctionDef]:
    """The functions of a `Program` message, by name; BackendError for one that is not well formed."""
    if not program.functions:
        raise BackendError("the model's ML program has no function")
    return {name: _function(name, program.functions[name]) for name in sorted(program.functions)}


def _function(name: str, function: Any) -> MilFunctionDef:
    if function.opset not in function.block_specializations:
        have = ", ".join(function.block_specializations) or "none"
        raise BackendError(f"function {name!r} asks for opset {function.opset!r} and has bodies for: {have}")
    block = function.block_specializations[function.opset]
    inputs = {
        each.name: type_of(each.type, f"function {name!r}, input {each.name!r}") for each in function.inputs
    }
    operations = tuple(_operation(name, operation) for operation in block.operations)
    _check_names(name, inputs, operations, tuple(block.outputs))
    return MilFunctionDef(name, function.opset, inputs, operations, tuple(block.outputs))


def _operation(function: str, message: Any) -> MilOperation:
    first = message.outputs[0].name if message.outputs else "no output"
    where = f"function {function!r}, operation {message.type!r} ({first})"
    if message.blocks:
        raise BackendError(f"{where}: the evaluator has no control flow, and this operation holds blocks")
    inputs = {name: _arguments(name, argument, where) for name, argument in message.inputs.items()}
    outputs = tuple((each.name, type_of(each.type, where)) for each in message.outputs)
    return MilOperation(message.type, _label(message, first), inputs, outputs, _constants(message, where))


def _label(message: Any, default: str) -> str:
    strings = message.attributes["name"].immediateValue.tensor.strings.values if message.attributes else ()
    return str(strings[0]) if strings else default


def _constants(message: Any, where: str) -> dict[str, Literal]:
    """The attributes that hold values: `val` of a const, and the parameters of a constexpr before iOS 18."""
    if message.type != "const" and not message.type.startswith("constexpr_"):
        return {}
    given = message.attributes.items()
    return {name: literal_of(value, where) for name, value in given if name != "name"}


def _arguments(parameter: str, argument: Any, where: str) -> Argument | tuple[Argument, ...]:
    given = tuple(_argument(binding, f"{where}, {parameter}") for binding in argument.arguments)
    if not given:
        raise BackendError(f"{where}: the parameter {parameter!r} is given nothing")
    return given if len(given) > 1 or parameter in _LIST_PARAMETERS else given[0]


def _argument(binding: Any, where: str) -> Argument:
    if binding.WhichOneof("binding") == "name":
        return str(binding.name)
    return literal_of(binding.value, where)


def _check_names(
    function: str,
    inputs: Mapping[str, MilType],
    operations: tuple[MilOperation, ...],
    outputs: tuple[str, ...],
) -> None:
    """Every value is made once, before it is used."""
    made = set(inputs)
    for operation in operations:
        for argument in operation.arguments():
            if isinstance(argument, str) and argument not in made:
                raise BackendError(
                    f"function {function!r}: {operation.type!r} ({operation.output}) uses {argument!r}, "
                    "which nothing before it makes: the program was edited or is damaged"
                )
        for name, _ in operation.outputs:
            if name in made:
                raise BackendError(f"function {function!r}: {name!r} is made twice: the program is damaged")
            made.add(name)
    for name in outputs:
        if name not in made:
            raise BackendError(f"function {function!r}: nothing makes its output {name!r}")
