"""Delegates that are lowered once and filled with the weights of every layer.

The passes of a delegate take seconds, and a decoder's layers differ in their constants only. A program for
XNNPACK names every constant by the SHA-256 of its bytes, so a copy for other weights is the same program with
other names. What a constant's bytes are is checked on the one that was lowered: a template whose constants
are not all found under the names that we compute is refused.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.errors import ExportError
from outrider.export.executorch_lower import DelegateParts, delegate_of, trace
from outrider.export.executorch_parts import QuantizedProducts
from outrider.quantize.layout import pack_nibbles

__all__ = ["Delegate", "Inputs", "Template"]

Shape = tuple[int | None, ...]  # None = the number of tokens


@dataclass(frozen=True)
class Inputs:
    """Example tensors of a part, the dimension that counts tokens in each (None: fixed), and its limit."""

    examples: tuple[Tensor, ...]
    dynamic: tuple[int | None, ...]
    limit: int

    def shapes(self) -> tuple[dict[int, Any], ...]:
        """What torch.export wants."""
        if not any(dim is not None for dim in self.dynamic):
            return ({},) * len(self.dynamic)
        width = torch.export.Dim("width", min=1, max=self.limit)
        return tuple({} if dim is None else {dim: width} for dim in self.dynamic)


class Delegate(nn.Module):
    """A lowered part; `forward` takes and returns what the part does."""

    def __init__(
        self,
        lowered: nn.Module,
        order: Sequence[int | str],
        outputs: Sequence[int],
        constants: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.lowered, self.outputs = lowered, tuple(outputs)
        self.order = tuple(name if isinstance(name, int) else name.replace(".", "__") for name in order)
        for name, tensor in constants.items():
            self.register_buffer(name.replace(".", "__"), tensor.detach())

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Tensors in, tensors out."""
        found = self.lowered(
            *(inputs[place] if isinstance(place, int) else getattr(self, place) for place in self.order)
        )
        return tuple(found[index] for index in self.outputs)


class Template:
    """One lowered part, from a copy with random weights, so that no two constants share a name."""

    def __init__(self, part: nn.Module, inputs: Inputs) -> None:
        example = scrambled(part)
        program = trace(example, inputs.examples, inputs.shapes())
        self.found = delegate_of(program)
        self._shapes = shape_program(inputs, self.found, dict(_named(example)) | self.found.scalars)
        self._owned = used_constants(program) - set(self.found.order)
        self._names = {name: key for name, key, _ in constants(example, self._owned)}
        self._store = self.found.lowered.named_data_store_output
        known, stored = set(self._names.values()), set(self._store.pte_data)
        if known != stored:
            missing = [name for name, key in self._names.items() if key not in stored]
            raise ExportError(
                f"this version of executorch stores {len(known - stored)} constants in a form that is not known "
                f"({', '.join(missing[:2])}) and {len(stored - known)} that no slot names; install executorch 1.5"
            )

    @property
    def report(self) -> dict[str, Any]:
        """What the delegate holds."""
        return self.found.report

    def fill(self, part: nn.Module) -> Delegate:
        """The delegate of a part of the same structure with other weights."""
        from executorch.exir._serialize._named_data_store import NamedDataStore
        from executorch.exir.lowered_backend_module import LoweredBackendModule

        source = self.found.lowered
        store, program = NamedDataStore(), bytes(source.processed_bytes)
        for name, key, data in constants(part, self._owned):
            alignment = self._store.pte_data[self._names[name]].alignment
            store.add_named_data(key, data, alignment)
            program = program.replace(self._names[name].encode(), key.encode())
        lowered = LoweredBackendModule(
            self._shapes,
            source.backend_id,
            program,
            source.compile_specs,
            store.get_named_data_store_output(),
        )
        lowered.meta = {"debug_handle_map": {}}
        outside = {name for name in self.found.order if isinstance(name, str)} - set(self.found.scalars)
        values = {name: tensor for name, tensor in _named(part) if name in outside}
        return Delegate(lowered, self.found.order, self.found.outputs, values | self.found.scalars)


def used_constants(program: Any) -> set[str]:
    """The parameters and buffers that a traced part reads."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return {name for node, name in names.items() if nodes[node].users}


def constants(part: nn.Module, used: set[str]) -> Iterator[tuple[str, str, bytes]]:
    """Name, key and bytes of every constant that is used, as XNNPACK's serializer stores them."""
    for prefix, module in part.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        for name, tensor in own.items():
            values = tensor.detach()
            path, mark = f"{prefix}.{name}".lstrip("."), ""
            if name.startswith("zeros_") or path not in used:
                continue
            if isinstance(module, QuantizedProducts) and name.startswith("codes_"):
                data = _code_bytes(values, module.scheme.bits)
            elif isinstance(module, QuantizedProducts) and name.startswith("scales_"):
                mark = "scale_"
                data = raw_bytes(values if module.scheme.group is None else values.to(torch.bfloat16))
            else:
                data = raw_bytes(values)
            yield path, mark + hashlib.sha256(data).hexdigest(), data


def _code_bytes(codes: Tensor, bits: int) -> bytes:
    if bits == 8:
        return raw_bytes(codes)
    return pack_nibbles((codes.numpy() + np.int8(8)).astype(np.uint8)).tobytes()


def raw_bytes(values: Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    values = values.contiguous()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy().tobytes()


FIXED = ("mean", "ones", "turn")  # the same in every layer


def scrambled(part: nn.Module) -> nn.Module:
    """A copy with random weights of the same shapes and kinds."""
    generator = torch.Generator().manual_seed(0)
    memo = {id(tensor): _random(tensor, generator) for name, tensor in _named(part) if not _fixed(name)}
    return copy.deepcopy(part, memo)


def _named(part: nn.Module) -> list[tuple[str, Tensor]]:
    return [*part.named_parameters(), *part.named_buffers()]


def _fixed(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in FIXED or last.startswith("zeros_")


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype == torch.int8:
        return torch.randint(-8, 8, tensor.shape, dtype=torch.int8, generator=generator)
    values = torch.rand(tensor.shape, generator=generator) + 0.5
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


class _Shapes(nn.Module):
    """Tensors of the right shapes, which is all that tracing around a delegate asks of it."""

    def __init__(self, counted: tuple[int, int] | None, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.counted, self.shapes = counted, shapes

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Zeros."""
        width = 0 if self.counted is None else inputs[self.counted[0]].shape[self.counted[1]]
        return tuple(
            inputs[0].new_zeros([width if size is None else size for size in shape]) for shape in self.shapes
        )


def shape_program(inputs: Inputs, found: DelegateParts, constants: Mapping[str, Tensor]) -> Any:
    """The program that stands for a delegate in passes over what is around it."""
    examples = tuple(
        inputs.examples[place] if isinstance(place, int) else constants[place] for place in found.order
    )
    dynamic = tuple(inputs.dynamic[place] if isinstance(place, int) else None for place in found.order)
    counted = next(((index, dim) for index, dim in enumerate(dynamic) if dim is not None), None)
    ordered = Inputs(examples, dynamic, inputs.limit)
    return trace(_Shapes(counted, found.shapes), examples, (ordered.shapes(),))
