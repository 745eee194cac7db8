"""One function of a Core ML program as a lint looks at it: types by name, what is a weight, small constants.

Nothing is evaluated and no weight is decoded; a weight is known by its type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.targets.coreml_reference.package import FunctionFeatures, read_package
from outrider.targets.coreml_reference.structure import MilFunctionDef, MilOperation
from outrider.targets.coreml_reference.types import MilType
from outrider.targets.coreml_reference.values import BlobPointer
from outrider.targets.coreml_reference.values import Literal as Constant

__all__ = ["FunctionOutline", "read_outlines"]

Flexibility = Literal["enumerated", "range"]


@dataclass(frozen=True)
class FunctionOutline:
    """A function's program, and the inputs that take more than one shape (and how they say which)."""

    program: MilFunctionDef
    flexible: Mapping[str, Flexibility]

    @property
    def name(self) -> str:
        """The function's name in its package."""
        return self.program.name

    @cached_property
    def types(self) -> Mapping[str, MilType]:
        """The type of every named value."""
        made = {name: kind for step in self.program.operations for name, kind in step.outputs}
        return {**self.program.inputs, **made}

    @cached_property
    def weights(self) -> frozenset[str]:
        """The names of constants and of what is unpacked from them."""
        held = (step for step in self.program.operations if _holds_constants(step))
        return frozenset(name for step in held for name, _ in step.outputs)

    @cached_property
    def steps(self) -> tuple[MilOperation, ...]:
        """The operations that compute something when the function runs."""
        return tuple(step for step in self.program.operations if not _holds_constants(step))

    @cached_property
    def constants(self) -> Mapping[str, NDArray[Any]]:
        """Constants by name that stand in the program itself, not in its weight file."""
        held = ((step.output, _array(step.attributes.get("val"))) for step in self.program.operations)
        return {name: array for name, array in held if array is not None}

    def activations(self) -> Iterator[tuple[str, MilType]]:
        """Every value that is given, or computed, when the function runs; states are not among them."""
        yield from ((name, kind) for name, kind in self.program.inputs.items() if not kind.state)
        for step in self.steps:
            yield from step.outputs

    def operand(self, step: MilOperation, parameter: str) -> MilType | None:
        """The type of what an operation reads as a parameter; None where it is left out or several are read."""
        given = step.inputs.get(parameter, step.attributes.get(parameter))
        if given is None or isinstance(given, tuple):
            return None
        return self.types[given] if isinstance(given, str) else given.type

    def constant(self, step: MilOperation, parameter: str) -> Any:
        """The value of a parameter that is a scalar constant of the program; None otherwise."""
        given = step.inputs.get(parameter)
        value = self.constants.get(given) if isinstance(given, str) else None
        if isinstance(given, Constant):
            value = _array(given)
        return value.reshape(-1)[0].item() if value is not None and value.size == 1 else None

    def is_constant(self, step: MilOperation, parameter: str) -> bool:
        """Whether a parameter is left out, or known before the function runs."""
        given = step.inputs.get(parameter, ())
        several = given if isinstance(given, tuple) else (given,)
        return all(not isinstance(name, str) or name in self.weights for name in several)


def read_outlines(package: Path) -> list[FunctionOutline]:
    """The functions of a `.mlpackage`. Raises BackendError for one that cannot be read."""
    read = read_package(package)
    return [
        FunctionOutline(function, _flexible(read.features[name])) for name, function in read.functions.items()
    ]


def _flexible(features: FunctionFeatures) -> dict[str, Flexibility]:
    found: dict[str, Flexibility] = {}
    for name, spec in features.inputs.items():
        if any(low != high for low, high in spec.ranges):
            found[name] = "range"
        elif len(set(spec.enumerated)) > 1:
            found[name] = "enumerated"
    return found


def _holds_constants(step: MilOperation) -> bool:
    return step.type == "const" or step.type.startswith("constexpr_")


def _array(value: Constant | None) -> NDArray[Any] | None:
    """The numbers of a constant that stand in the program itself."""
    if value is None or isinstance(value.content, BlobPointer) or value.content.dtype == np.object_:
        return None
    return value.content
