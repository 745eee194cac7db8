"""Constant folding: which values of a function are known before it runs, and how each is made from what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import BackendError
from outrider.targets.coreml_reference.constants import Array, Constant, Constants, computed, settle_stored
from outrider.targets.coreml_reference.constexpr import CONSTEXPR
from outrider.targets.coreml_reference.registry import lookup
from outrider.targets.coreml_reference.structure import MilOperation
from outrider.targets.coreml_reference.values import plain

__all__ = ["STATE_OPERATIONS", "constant_outputs"]

STATE_OPERATIONS = {"read_state", "write_state"}
Given = Constant | tuple[Constant, ...]


def constant_outputs(
    function: str, operation: MilOperation, known: Mapping[str, Constant], constants: Constants
) -> dict[str, Constant]:
    """The outputs that are known before a run: of const, of constexpr, of what has only such inputs; else none."""
    if operation.type == "const":
        if "val" not in operation.attributes:
            raise BackendError(f"function {function!r}: the const {operation.output!r} has no value")
        return {operation.output: constants.of(operation.attributes["val"])}
    names = [argument for argument in operation.arguments() if isinstance(argument, str)]
    unknown = [name for name in names if name not in known]
    if operation.type in CONSTEXPR:
        if unknown:
            raise BackendError(
                f"function {function!r}: {operation.type!r} ({operation.output}) takes constants only, "
                f"and {unknown[0]!r} is none"
            )
    elif unknown or operation.type in STATE_OPERATIONS or operation.type.startswith("random_"):
        return {}
    given: dict[str, Given] = {}
    for name, argument in {**operation.inputs, **operation.attributes}.items():
        several = argument if isinstance(argument, tuple) else (argument,)
        found = tuple(known[one] if isinstance(one, str) else constants.of(one) for one in several)
        given[name] = found if isinstance(argument, tuple) else found[0]
    fold = _Fold(function, operation, given, constants)
    return {
        name: Constant((*fold.key, index), declared, fold.maker(index))
        for index, (name, declared) in enumerate(operation.outputs)
    }


@dataclass(frozen=True)
class _Fold:
    """An operation on constants, computed when one of its outputs is first asked for (anew for each: few have two)."""

    function: str
    operation: MilOperation
    given: Mapping[str, Given]
    constants: Constants

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same operation on the same constants, in whatever function it stands."""
        keys = ((name, _key_of(self.given[name])) for name in sorted(self.given))
        return ("made", self.operation.type, *keys)

    def maker(self, index: int) -> Callable[[], Array]:
        """What makes one output in its stored form."""
        return lambda: self._make(index)

    def _make(self, index: int) -> Array:
        operation = self.operation
        where = f"function {self.function!r}: {operation.type!r} ({operation.output})"
        if operation.type in CONSTEXPR:
            compute = CONSTEXPR[operation.type]
            parameters = {
                name: self._formed(each, lambda one: one.make()) for name, each in self.given.items()
            }
        else:
            compute = lookup(operation.type, function=self.function, output=operation.output).compute
            parameters = {name: self._formed(each, self.constants.wide) for name, each in self.given.items()}
        results = computed(compute, parameters, len(operation.outputs), where)
        return settle_stored(results[index], operation.outputs[index][1], where)

    @staticmethod
    def _formed(given: Given, form: Callable[[Constant], Array]) -> Any:
        return [form(each) for each in given] if isinstance(given, tuple) else plain(form(given))


def _key_of(given: Given) -> tuple[Any, ...]:
    return tuple(each.key for each in given) if isinstance(given, tuple) else given.key
