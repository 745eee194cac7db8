"""Write a multifunction `.mlpackage`: one weight file, one specification, a manifest; the same bytes every time.

Follows Apple's public protocol buffers (MIL.proto, Model.proto, FeatureTypes.proto) and the layout that coremltools
writes. The weight file is written as weights come, so that one is in memory at a time, and functions that read a
weight refer to the same place in it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError, UsageError
from outrider.export.coreml_blob import BlobWriter
from outrider.export.coreml_program import MilFunction, MilOperation, Shape, Small
from outrider.targets.coreml_reference.schema import load_schema

__all__ = [
    "TARGETS",
    "DeploymentTarget",
    "PackageWriter",
    "StoredWeight",
    "get_target",
]

MODEL, WEIGHTS = "model.mlmodel", "weights"
AUTHOR = "com.apple.CoreML"
WEIGHT_FILE = "weight.bin"
INLINE = 10  # smaller arrays stand in the specification
PROTO_TYPES = {"fp16": "FLOAT16"}  # the others are called as here
NAMESPACE = uuid.UUID("6f1c6a5e-6d0a-5a0b-9f53-3b8c5d7a2e11")  # of the manifest's identifiers


@dataclass(frozen=True)
class DeploymentTarget:
    """The oldest system that a package runs on, as Core ML numbers it."""

    name: str
    specification: int
    opset: str


TARGETS = {
    target.name: target
    for target in (DeploymentTarget("ios18", 9, "CoreML8"), DeploymentTarget("ios26", 10, "CoreML9"))
}
"""Every deployment target; ios18 is macOS 15 too, ios26 macOS 26. Older ones know no functions."""


def get_target(name: str) -> DeploymentTarget:
    """The deployment target of this name. Raises UsageError that lists the known ones."""
    if name not in TARGETS:
        raise UsageError(f"deployment target {name!r} is not known; known: {', '.join(TARGETS)}")
    return TARGETS[name]


def schema(name: str) -> Any:
    """One of coremltools' protobuf modules. Raises MissingExtraError where it is not installed."""
    return import_module(f"{load_schema().__package__}.{name}")


@dataclass(frozen=True)
class StoredWeight:
    """A weight as an operation of a program: `const`, or one that Core ML decompresses when it loads."""

    operation: str
    values: Mapping[str, Any]  # parameter -> MIL_pb2.Value


class PackageWriter:
    """One package: store weights and vectors by name, then finish it with the functions that read them.

    A context manager, which closes the weight file whatever happens.
    """

    def __init__(self, place: Path) -> None:
        """`place` is the package's folder. Raises MissingExtraError without coremltools."""
        self.mil = schema("MIL_pb2")
        self.place, self.data = place, place / "Data" / AUTHOR
        (self.data / WEIGHTS).mkdir(parents=True, exist_ok=True)
        self._blob = BlobWriter(self.data / WEIGHTS / WEIGHT_FILE)
        self.stored: dict[str, StoredWeight] = {}

    def __enter__(self) -> PackageWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._blob.close()

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file of the package, the manifest first."""
        return (
            self.place / "Manifest.json",
            self.data / MODEL,
            self.data / WEIGHTS / WEIGHT_FILE,
        )

    def store(self, name: str, operation: str, parameters: Mapping[str, tuple[NDArray[Any], str]]) -> None:
        """Keep a weight: arrays and their MIL types by parameter. `const` has the one parameter `val`."""
        values = {key: self.value(array, kind) for key, (array, kind) in parameters.items()}
        self.stored[name] = StoredWeight(operation, values)

    def store_half(self, name: str, array: NDArray[np.floating[Any]]) -> None:
        """Keep a weight in half precision. Raises ExportError for values beyond it."""
        largest = float(np.abs(array).max(initial=0.0))
        if not largest <= float(np.finfo(np.float16).max):
            raise ExportError(f"{name} reaches {largest:g}; float16 ends at 65504")
        self.store(name, "const", {"val": (array.astype(np.float16), "fp16")})

    def value(self, array: NDArray[Any], kind: str) -> Any:
        """The proto of an array, whose data goes to the weight file unless it is tiny."""
        value = self.mil.Value(type=tensor_type(self.mil, array.shape, PROTO_TYPES.get(kind, kind.upper())))
        if array.size < INLINE and kind in ("fp16", "int8", "uint8"):
            value.immediateValue.tensor.bytes.values = np.ascontiguousarray(array).tobytes()
            return value
        value.blobFileValue.fileName = f"@model_path/{WEIGHTS}/{WEIGHT_FILE}"
        value.blobFileValue.offset = self._blob.add(array, kind)
        return value

    def finish(
        self, functions: Mapping[str, MilFunction], target: DeploymentTarget, metadata: Mapping[str, str]
    ) -> tuple[Path, ...]:
        """Write specification and manifest; the first function is the default. Returns all files."""
        self._blob.close()
        model = schema("Model_pb2").Model(specificationVersion=target.specification)
        model.description.defaultFunctionName = next(iter(functions))
        model.description.metadata.userDefined.update(metadata)
        model.mlProgram.version = 1
        for name, function in functions.items():
            self._describe(model.description.functions.add(), name, function)
            self._write(model.mlProgram.functions[name], function, target.opset)
        (self.data / MODEL).write_bytes(model.SerializeToString(deterministic=True))
        # In the form that Core ML's own library gives it whenever it opens a package, so that its hash stays.
        text = json.dumps(manifest(), indent=4, sort_keys=True) + "\n"
        self.files[0].write_text(text, encoding="utf-8")
        return self.files

    def _describe(self, proto: Any, name: str, function: MilFunction) -> None:
        """What a caller gives and gets: half-precision arrays."""
        features = schema("FeatureTypes_pb2")
        proto.name = name
        for place, names in ((proto.input, function.inputs), (proto.output, function.outputs)):
            for feature in names:
                array = place.add(name=feature).type.multiArrayType
                array.shape.extend(function.shapes[feature])
                array.dataType = features.ArrayFeatureType.ArrayDataType.FLOAT16

    def _write(self, proto: Any, function: MilFunction, opset: str) -> None:
        """The function's block: each constant and weight right before its first reader."""
        for name, shape in function.inputs.items():
            proto.inputs.add(name=name, type=tensor_type(self.mil, shape, "FLOAT16"))
        proto.opset = opset
        block = proto.block_specializations[opset]
        written: set[str] = set()
        for operation in function.operations:
            for name in (name for names in operation.inputs.values() for name in names):
                if name in written:
                    continue
                written.add(name)
                if name in function.small:
                    self._constant(block, name, function.small[name])
                elif name in self.stored:
                    self._weight(block, name, function.shapes[name])
            self._operation(block, operation)
        block.outputs.extend(function.outputs)

    def _constant(self, block: Any, name: str, value: Small) -> None:
        proto = block.operations.add(type="const")
        content = small_value(self.mil, value)
        self._named(proto, name, content.type)
        proto.attributes["val"].CopyFrom(content)

    def _weight(self, block: Any, name: str, shape: Shape) -> None:
        weight = self.stored[name]
        proto = block.operations.add(type=weight.operation)
        self._named(proto, name, tensor_type(self.mil, shape, "FLOAT16"))
        for key, value in weight.values.items():
            if weight.operation == "const":
                proto.attributes[key].CopyFrom(value)
            else:
                proto.inputs[key].arguments.add().value.CopyFrom(value)

    def _operation(self, block: Any, operation: MilOperation) -> None:
        proto = block.operations.add(type=operation.kind)
        for key, names in operation.inputs.items():
            for name in names:
                proto.inputs[key].arguments.add(name=name)
        outputs = list(operation.outputs.items())
        self._named(proto, outputs[0][0], tensor_type(self.mil, outputs[0][1], "FLOAT16"))
        for name, shape in outputs[1:]:
            proto.outputs.add(name=name, type=tensor_type(self.mil, shape, "FLOAT16"))

    def _named(self, proto: Any, name: str, kind: Any) -> None:
        """An operation has the name of its first output."""
        proto.attributes["name"].CopyFrom(small_value(self.mil, name))
        proto.outputs.add(name=name, type=kind)


def tensor_type(mil: Any, shape: Iterable[int], kind: str) -> Any:
    """The MIL type of an array of a kind such as FLOAT16; rank 0 is a scalar."""
    sizes = tuple(shape)
    value = mil.ValueType()
    value.tensorType.dataType = mil.DataType.Value(kind)
    value.tensorType.rank = len(sizes)
    for size in sizes:
        value.tensorType.dimensions.add().constant.size = size
    return value


def small_value(mil: Any, value: Small) -> Any:
    """A scalar or a list of integers, which stands in the specification."""
    if isinstance(value, tuple):
        proto = mil.Value(type=tensor_type(mil, (len(value),), "INT32"))
        proto.immediateValue.tensor.ints.values.extend(value)
        return proto
    kinds = {bool: ("BOOL", "bools"), int: ("INT32", "ints"), str: ("STRING", "strings")}
    if isinstance(value, float):
        proto = mil.Value(type=tensor_type(mil, (), "FLOAT16"))
        proto.immediateValue.tensor.bytes.values = np.float16(value).tobytes()
        return proto
    kind, field = kinds[type(value)]
    proto = mil.Value(type=tensor_type(mil, (), kind))
    getattr(proto.immediateValue.tensor, field).values.append(value)
    return proto


def manifest() -> dict[str, Any]:
    """What stands in a package's `Manifest.json`; its identifiers do not change from one export to the next."""
    items = {
        MODEL: ("CoreML Model Specification", f"{AUTHOR}/{MODEL}"),
        WEIGHTS: ("CoreML Model Weights", f"{AUTHOR}/{WEIGHTS}"),
    }
    names = {name: str(uuid.uuid5(NAMESPACE, name)).upper() for name in items}
    entries = {
        names[name]: {"author": AUTHOR, "description": description, "name": name, "path": path}
        for name, (description, path) in items.items()
    }
    return {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": entries,
        "rootModelIdentifier": names[MODEL],
    }
