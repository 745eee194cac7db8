"""The protobuf classes of Core ML models, without what the rest of coremltools imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from outrider.errors import MissingExtraError

__all__ = ["load_schema"]

_ALIAS = "outrider_coreml_proto"


def load_schema() -> Any:
    """The module `Model_pb2` of coremltools (`Model`, `Program` within it); MissingExtraError without coremltools.

    `import coremltools` also imports torch and scikit-learn where they are installed (8 s and 500 MB); the message
    classes need neither, so their folder is loaded as a package of its own unless coremltools is loaded anyway.
    """
    if "coremltools.proto" in sys.modules:
        return importlib.import_module("coremltools.proto.Model_pb2")
    if _ALIAS not in sys.modules:
        sys.modules[_ALIAS] = _load_folder()
    try:
        return importlib.import_module(f"{_ALIAS}.Model_pb2")
    except ImportError as error:
        raise MissingExtraError(error.name or "protobuf", "coreml") from error


def _load_folder() -> ModuleType:
    spec = importlib.util.find_spec("coremltools")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("coremltools", "coreml")
    folder = f"{spec.submodule_search_locations[0]}/proto"
    alias = importlib.util.spec_from_file_location(
        _ALIAS, f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    assert alias is not None
    return importlib.util.module_from_spec(alias)
