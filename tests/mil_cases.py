"""One case of a MIL operation: parameters, and what PyTorch or a hand-made value says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.targets.coreml_reference import ops_all as ops_all  # fills the table
from outrider.targets.coreml_reference.registry import lookup

RNG = np.random.default_rng(5)


@dataclass(frozen=True)
class Case:
    """`expected` is a value (a tuple of them for several outputs), or a function of torch tensors by parameter name."""

    operation: str
    label: str
    expected: Any
    parameters: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.operation}: {self.label}"


def case(operation: str, label: str, expected: Any, **parameters: Any) -> Case:
    return Case(operation, label, expected, parameters)


def grid(*shape: int, low: float = -2, high: float = 2) -> np.ndarray:
    """float32 values that half precision holds exactly; of an even number of them around 0 none is 0."""
    count = int(np.prod(shape))
    values = low + (high - low) * (RNG.permutation(count) + 0.5) / count
    return values.reshape(shape).astype(np.float16).astype(np.float32)


def whole(*shape: int, low: int = -9, high: int = 10) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(np.int32)


def flags(*shape: int) -> np.ndarray:
    return RNG.random(shape) < 0.5


def run(operation: str, **parameters: Any) -> Any:
    """What the evaluator computes, with inf and nan as values, as its executor runs it."""
    with np.errstate(all="ignore"):
        return lookup(operation, function="test", output="y").compute(**parameters)


def check(one: Case, tolerance: float = 2e-5) -> None:
    """The operation gives what is expected, and the same whether a value is stored in half or full precision."""
    found = outputs(run(one.operation, **one.parameters))
    wanted = outputs(expectation(one))
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype.kind == theirs.dtype.kind, f"{ours.dtype} where {theirs.dtype} is meant"
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    halves = outputs(run(one.operation, **{name: halved(value) for name, value in one.parameters.items()}))
    for half, ours in zip(halves, found, strict=True):
        np.testing.assert_allclose(half, ours, rtol=1e-6, atol=1e-6)


def expectation(one: Case) -> Any:
    if not callable(one.expected):
        return one.expected
    return one.expected(**{name: tensor(value) for name, value in one.parameters.items()})


def tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    return [tensor(part) for part in value] if isinstance(value, list) else value


def halved(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return value.astype(np.float16)
    return [halved(part) for part in value] if isinstance(value, list) else value


def outputs(result: Any) -> list[np.ndarray]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part.numpy() if isinstance(part, torch.Tensor) else np.asarray(part) for part in parts]
