"""Public modules say what is public, and mean it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import outrider

PACKAGE = Path(outrider.__file__).parent
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.name.startswith("_") and "cli" not in path.parts
]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_lists_its_public_names_and_every_one_exists(path: Path) -> None:
    module = importlib.import_module(name_of(path))
    assert isinstance(module.__all__, list)
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_public_function_and_class_has_a_docstring(path: Path) -> None:
    public = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    assert not [node.name for node in public if not ast.get_docstring(node)]


def test_the_package_offers_its_verbs_and_records() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name).__name__ == name
    assert {"load", "Pipeline", "Result", "Chunk", "Stats", "Sampling", "OutriderError"} <= set(
        outrider.__all__
    )
    assert set(outrider.__all__) <= set(dir(outrider))


def test_every_error_of_the_tree_is_offered() -> None:
    from outrider import errors

    assert set(errors.__all__) <= set(outrider.__all__)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="public names: AsyncPipeline"):
        outrider.lod  # noqa: B018


def test_the_version_is_that_of_the_installed_package() -> None:
    from importlib.metadata import version

    assert outrider.__version__ == version("outrider")
