"""A function of a Core ML ML Program, in half precision, as plain records: operations, shapes, small constants.

Shapes are followed here and every parameter is named as in Apple's MIL operator set, so that `coreml_package.py`
only has to write what stands here. Nothing of coremltools is needed to lay a function out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.errors import ExportError

__all__ = ["MilFunction", "MilOperation", "Shape", "Small"]

Shape = tuple[int, ...]
Small = bool | int | str | float | tuple[int, ...]  # a float stands for a half-precision scalar
PRODUCT = "nchw,nwhu->nchu"  # contracts the last axis of one tensor with the second of another


@dataclass(frozen=True)
class MilOperation:
    """One operation: what it reads by parameter (tensors, constants or weights by name), and its outputs' shapes."""

    kind: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, Shape]


@dataclass
class MilFunction:
    """A function with static shapes. Tensors are float16 and known by name, weights are filled in elsewhere."""

    inputs: dict[str, Shape] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    operations: list[MilOperation] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)  # of every tensor, inputs and weights too
    small: dict[str, Small] = field(default_factory=dict)  # constants that parameters have

    def declare(self, name: str, shape: Shape) -> str:
        """An input of the function."""
        self.inputs[name] = self.shapes[name] = shape
        return name

    def weight(self, name: str, shape: Shape) -> str:
        """A constant whose values are not known here."""
        self.shapes[name] = shape
        return name

    def constant(self, value: Small) -> str:
        """The name of a small constant; equal ones are one."""
        if isinstance(value, tuple):
            name = "ints_" + "_".join(str(number) for number in value).replace("-", "m")
        elif isinstance(value, float):
            name = f"half_{np.float16(value).view(np.uint16):04x}"
        else:
            stem = "".join(letter if letter.isalnum() else "_" for letter in str(value).lower())
            name = f"{type(value).__name__}_{stem}"
        self.small[name] = value
        return name

    def add(self, kind: str, inputs: Mapping[str, str | Sequence[str]], outputs: Mapping[str, Shape]) -> None:
        """Append an operation. Raises ExportError for a name that was used before."""
        for name, shape in outputs.items():
            if name in self.shapes:
                raise ExportError(f"two tensors of a Core ML function are called {name!r}")
            self.shapes[name] = shape
        named = {key: (value,) if isinstance(value, str) else tuple(value) for key, value in inputs.items()}
        self.operations.append(MilOperation(kind, named, dict(outputs)))

    def one(self, kind: str, inputs: Mapping[str, str | Sequence[str]], output: str, shape: Shape) -> str:
        """Append an operation with one output; returns it."""
        self.add(kind, inputs, {output: shape})
        return output

    def unary(self, kind: str, x: str, output: str, **parameters: Small) -> str:
        """An operation on each number."""
        named = {key: self.constant(value) for key, value in parameters.items()}
        return self.one(kind, {"x": x, **named}, output, self.shapes[x])

    def binary(self, kind: str, x: str | float, y: str | float, output: str) -> str:
        """An operation on pairs of numbers, which broadcasts."""
        names = [self.constant(value) if isinstance(value, float) else value for value in (x, y)]
        shape = np.broadcast_shapes(*(self.shapes.get(name, ()) for name in names))
        return self.one(kind, {"x": names[0], "y": names[1]}, output, shape)

    def reduce(self, kind: str, x: str, axis: int, output: str) -> str:
        """An operation over an axis, which keeps it with length 1."""
        shape = tuple(1 if place == axis else size for place, size in enumerate(self.shapes[x]))
        inputs = {"x": x, "axes": self.constant((axis,)), "keep_dims": self.constant(True)}
        return self.one(kind, inputs, output, shape)

    def reshape(self, x: str, shape: Shape, output: str) -> str:
        """The same values in another shape."""
        if int(np.prod(shape)) != int(np.prod(self.shapes[x])):
            raise ExportError(f"{x!r} of shape {self.shapes[x]} cannot have the shape {shape}")
        return self.one("reshape", {"x": x, "shape": self.constant(shape)}, output, shape)

    def transpose(self, x: str, order: Shape, output: str) -> str:
        """The same values with permuted axes."""
        shape = tuple(self.shapes[x][axis] for axis in order)
        return self.one("transpose", {"x": x, "perm": self.constant(order)}, output, shape)

    def split(self, x: str, sizes: Sequence[int], axis: int, outputs: Sequence[str]) -> list[str]:
        """Parts of an axis in order; no operation where there is one part."""
        if len(sizes) == 1:
            return [x]
        shape = self.shapes[x]
        if sum(sizes) != shape[axis]:
            raise ExportError(f"{x!r} of shape {shape} cannot be cut into {tuple(sizes)} along axis {axis}")
        shapes = {
            name: (*shape[:axis], size, *shape[axis + 1 :]) for name, size in zip(outputs, sizes, strict=True)
        }
        inputs = {"x": x, "split_sizes": self.constant(tuple(sizes)), "axis": self.constant(axis)}
        self.add("split", inputs, shapes)
        return list(outputs)

    def joined(self, parts: Sequence[str], axis: int, output: str) -> str:
        """Tensors behind one another along an axis; no operation where there is one."""
        if len(parts) == 1:
            return parts[0]
        shape = list(self.shapes[parts[0]])
        shape[axis] = sum(self.shapes[part][axis] for part in parts)
        inputs = {"values": parts, "axis": self.constant(axis), "interleave": self.constant(False)}
        return self.one("concat", inputs, output, tuple(shape))

    def product(self, x: str, y: str, output: str) -> str:
        """[N, C, H, W] by [N, W, H, U] -> [N, C, H, U]: channels by columns, which stay where they are."""
        left, right = self.shapes[x], self.shapes[y]
        if left[3] != right[1] or left[0] != right[0] or left[2] != right[2]:
            raise ExportError(f"{x!r} {left} and {y!r} {right} have no product")
        inputs = {"values": (x, y), "equation": self.constant(PRODUCT)}
        return self.one("einsum", inputs, output, (left[0], left[1], left[2], right[3]))

    def convolution(self, x: str, weight: str, bias: str | None, output: str) -> str:
        """A linear layer: [1, K, 1, W] by a weight [N, K, 1, 1] -> [1, N, 1, W]."""
        N, K = self.shapes[weight][:2]
        if self.shapes[x][1] != K:
            raise ExportError(f"{x!r} has {self.shapes[x][1]} channels; {weight!r} reads {K}")
        inputs: dict[str, str] = {"x": x, "weight": weight}
        if bias is not None:
            inputs["bias"] = bias
        plain: dict[str, Small] = {
            "strides": (1, 1),
            "pad_type": "valid",
            "pad": (0, 0, 0, 0),
            "dilations": (1, 1),
            "groups": 1,
        }
        inputs |= {key: self.constant(value) for key, value in plain.items()}
        return self.one("conv", inputs, output, (1, N, *self.shapes[x][2:]))

    def softmax(self, x: str, axis: int, output: str) -> str:
        """Weights that sum to one along an axis."""
        return self.one("softmax", {"x": x, "axis": self.constant(axis)}, output, self.shapes[x])
