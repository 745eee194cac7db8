"""A reference evaluator for Core ML packages: runs the MIL program of a saved `.mlpackage` in numpy, on any system.

    program = MilProgram.load("model.mlpackage")
    outputs = program.predict({"x": x})                      # {"y": float16 array}
    state = program.make_state()                             # of a stateful program
    outputs = program.predict({"tokens": tokens}, state)

Strict: what it does not know is an error that names it. `read_package` gives the program as records, uncomputed.
"""

from outrider.targets.coreml_reference.features import FeatureSpec
from outrider.targets.coreml_reference.package import Package, read_package
from outrider.targets.coreml_reference.program import MilFunction, MilProgram
from outrider.targets.coreml_reference.registry import known_operations, operation
from outrider.targets.coreml_reference.state import MilState
from outrider.targets.coreml_reference.structure import MilFunctionDef, MilOperation

__all__ = [
    "FeatureSpec",
    "MilFunction",
    "MilFunctionDef",
    "MilOperation",
    "MilProgram",
    "MilState",
    "Package",
    "known_operations",
    "operation",
    "read_package",
]
