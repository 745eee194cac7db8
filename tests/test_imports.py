"""Imports point one way, and what runs on a device never needs what exports on a host."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import outrider

PACKAGE = Path(outrider.__file__).parent
HEAVY = {"torch", "transformers", "onnx", "onnxscript", "coremltools", "executorch"}
RANKS = {
    "errors": 0, "contracts": 1, "folders": 1, "lines": 1, "records": 1, "manifest": 2, "targets": 3,
    "quantize": 3, "power": 4, "runtime": 5, "export": 5, "distill": 5, "__init__": 6, "cli": 7, "__main__": 8,
}  # fmt: skip
DEVICE_ROOMS = sorted(RANKS.keys() - {"quantize", "export", "distill", "__init__", "cli", "__main__"})


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def own_imports(path: Path) -> Iterator[str]:
    """Every module of Outrider that a file imports, inside functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "outrider")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outrider":
            deeper = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from deeper if node.module == "outrider" else [str(node.module)]


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(module_name(path))
    assert room in RANKS, f"{room} has no place in the order of rooms"
    wrong = [name for name in own_imports(path) if RANKS[room_of(name)] > RANKS[room]]
    assert not wrong, f"{room} imports {wrong}"


def test_importing_outrider_loads_nothing_but_itself_and_the_standard_library() -> None:
    loaded = {name.split(".")[0] for name in loaded_after("import outrider") - loaded_after("pass")}
    assert loaded - set(sys.stdlib_module_names) <= {"outrider"}


@pytest.mark.parametrize("room", DEVICE_ROOMS)
def test_a_device_room_imports_without_a_host_library(room: str) -> None:
    modules = [module_name(path) for path in sorted(PACKAGE.rglob("*.py"))]
    mine = [name for name in modules if room_of(name) == room]
    assert mine
    loaded = loaded_after("\n".join(f"import {name}" for name in mine))
    assert not HEAVY & {name.split(".")[0] for name in loaded}


def test_public_names_come_without_a_model_library() -> None:
    loaded = loaded_after("import outrider\n[getattr(outrider, name) for name in outrider.__all__]")
    assert not (HEAVY | {"onnxruntime", "tokenizers"}) & loaded
