"""Opening a `.mlpackage` folder: manifest, model description, ML program, and the weight files it points at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import BackendError
from outrider.targets.coreml_reference.blob import BlobFile
from outrider.targets.coreml_reference.features import FeatureSpec, features_of
from outrider.targets.coreml_reference.schema import load_schema
from outrider.targets.coreml_reference.structure import MilFunctionDef, MilOperation, functions_of
from outrider.targets.coreml_reference.values import BlobPointer, Literal

__all__ = ["SPECIFICATIONS", "FunctionFeatures", "Package", "WeightFiles", "read_package"]

# version of the model format -> the system that introduced it
SPECIFICATIONS = {6: "iOS 15", 7: "iOS 16", 8: "iOS 17", 9: "iOS 18", 10: "iOS 26"}
PROGRAM_VERSION = 1
MANIFEST_VERSION = "1.0.0"
_WEIGHTS_PREFIX = "@model_path/"


@dataclass(frozen=True)
class FunctionFeatures:
    """What a model describes of one function."""

    inputs: Mapping[str, FeatureSpec]
    outputs: Mapping[str, FeatureSpec]
    states: Mapping[str, FeatureSpec]


@dataclass(frozen=True)
class Package:
    """A `.mlpackage` as read: nothing of it has been computed, and no weight decoded."""

    path: Path
    model_file: Path
    specification_version: int
    functions: Mapping[str, MilFunctionDef]
    features: Mapping[str, FunctionFeatures]
    default_function: str
    metadata: Mapping[str, str]


class WeightFiles:
    """The weight files of a package, each mapped when first needed."""

    def __init__(self, model_file: Path) -> None:
        self._folder = model_file.parent
        self._files: dict[str, BlobFile] = {}

    def __getitem__(self, name: str) -> BlobFile:
        if name not in self._files:
            self._files[name] = BlobFile(self._path(name))
        return self._files[name]

    def _path(self, name: str) -> Path:
        relative = Path(name.removeprefix(_WEIGHTS_PREFIX))
        if not name.startswith(_WEIGHTS_PREFIX) or ".." in relative.parts or relative.is_absolute():
            raise BackendError(
                f"{self._folder}: the program keeps weights at {name!r}, outside of its package"
            )
        return self._folder / relative


def read_package(path: str | Path) -> Package:
    """Read a `.mlpackage` and check that its parts belong together.

    Raises BackendError for a folder that is no such package, is damaged, of an unknown version, or points outside of
    its weight files; MissingExtraError without coremltools (for its protobuf classes).
    """
    path = Path(path)
    model_file = _model_file(path)
    model = _parse(model_file)
    functions = functions_of(model.mlProgram)
    features = _features(model.description, functions, model_file)
    _check_features(functions, features, model_file)
    weights = WeightFiles(model_file)
    for literal in _literals(functions):
        if isinstance(literal.content, BlobPointer):
            weights[literal.content.file].check(literal.content.offset, literal.type)
    default = model.description.defaultFunctionName or (
        "main" if "main" in functions else next(iter(functions))
    )
    if default not in functions:
        raise BackendError(
            f"{model_file}: the default function {default!r} is none of {', '.join(functions)}"
        )
    metadata = dict(model.description.metadata.userDefined)
    return Package(path, model_file, model.specificationVersion, functions, features, default, metadata)


def _model_file(path: Path) -> Path:
    """The file that the manifest calls the root model."""
    manifest = path / "Manifest.json"
    try:
        content = json.loads(manifest.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise BackendError(f"{path} is no .mlpackage folder: it has no Manifest.json") from None
    except (OSError, ValueError) as error:
        raise BackendError(f"{manifest} cannot be read: {error}") from error
    try:
        version = content["fileFormatVersion"]
        relative = Path(content["itemInfoEntries"][content["rootModelIdentifier"]]["path"])
    except (KeyError, TypeError) as error:
        raise BackendError(f"{manifest} has no entry for {error}: it is damaged or was edited") from error
    if version != MANIFEST_VERSION:
        raise BackendError(
            f"{manifest}: manifest version {version!r}; the evaluator reads {MANIFEST_VERSION}"
        )
    if relative.is_absolute() or ".." in relative.parts:
        raise BackendError(f"{manifest}: the root model {str(relative)!r} lies outside of the package")
    return path / "Data" / relative


def _parse(model_file: Path) -> Any:
    schema = load_schema()
    model = schema.Model()
    try:
        model.ParseFromString(model_file.read_bytes())
    except OSError as error:
        raise BackendError(f"{model_file}: the package's model cannot be read: {error}") from error
    except Exception as error:  # protobuf's DecodeError; its class depends on the implementation
        raise BackendError(f"{model_file} is no Core ML model: {error}. It is cut off or damaged") from error
    if model.specificationVersion not in SPECIFICATIONS:
        known = ", ".join(f"{version} ({system})" for version, system in SPECIFICATIONS.items())
        raise BackendError(
            f"{model_file}: specification version {model.specificationVersion}; the evaluator reads {known}"
        )
    if model.WhichOneof("Type") != "mlProgram":
        kind = model.WhichOneof("Type") or "model without content"
        raise BackendError(f"{model_file} is a {kind}; only an ML program can be evaluated")
    if model.mlProgram.version != PROGRAM_VERSION:
        raise BackendError(
            f"{model_file}: ML program version {model.mlProgram.version}; the evaluator reads {PROGRAM_VERSION}"
        )
    return model


def _features(
    description: Any, functions: Mapping[str, MilFunctionDef], where: Path
) -> dict[str, FunctionFeatures]:
    described = {each.name: (each.input, each.output, each.state) for each in description.functions}
    if not described:  # a model of one function describes it at the top
        name = "main" if "main" in functions else next(iter(functions))
        described = {name: (description.input, description.output, description.state)}
    features = {}
    for name in functions:
        if name not in described:
            raise BackendError(f"{where}: the function {name!r} has no description: the model was edited")
        kinds = (features_of(kind, f"{where}, function {name!r}") for kind in described[name])
        features[name] = FunctionFeatures(*kinds)
    missing = sorted(described.keys() - functions.keys())
    if missing:
        raise BackendError(f"{where} describes a function {missing[0]!r} that its program does not have")
    return features


def _check_features(
    functions: Mapping[str, MilFunctionDef], features: Mapping[str, FunctionFeatures], where: Path
) -> None:
    """Description and program name the same inputs, states and outputs, with the same element types."""
    for name, function in functions.items():
        described = features[name]
        taken = {**described.inputs, **described.states}
        for kind, own, other in (
            ("inputs", set(function.inputs), set(taken)),
            ("outputs", set(function.outputs), set(described.outputs)),
        ):
            if own != other:
                raise BackendError(
                    f"{where}, function {name!r}: program and description differ in the {kind} "
                    f"{', '.join(sorted(own ^ other))}: the model was edited"
                )
        for key, declared in function.inputs.items():
            spec = taken[key]
            same_shape = not spec.shape or declared.fits(spec.shape)
            if spec.dtype != declared.dtype or not same_shape or declared.state != (key in described.states):
                raise BackendError(
                    f"{where}, function {name!r}: input {key!r} is {declared} in the program and {spec.dtype} "
                    f"{list(spec.shape)} in the description: the model was edited"
                )


def _literals(functions: Mapping[str, MilFunctionDef]) -> Iterator[Literal]:
    for function in functions.values():
        for operation in function.operations:
            yield from _own_literals(operation)


def _own_literals(operation: MilOperation) -> Iterator[Literal]:
    yield from operation.attributes.values()
    yield from (argument for argument in operation.arguments() if isinstance(argument, Literal))
