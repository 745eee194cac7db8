"""The command line names its own options where the library names parameters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.cli.messages import in_options
from outrider.cli.root import COMMANDS
from outrider.errors import UsageError


def command(name: str) -> Any:
    return importlib.import_module(f"outrider.cli.{name}").command


@pytest.mark.parametrize(
    ("name", "message", "said"),
    [
        ("generate", "power_cap_w is 6, but nothing here", "--power-cap is 6, but nothing here"),
        ("generate", "memory_limit_mb is 0; it must", "--memory-limit is 0; it must"),
        ("generate", "k is 9; so k can be at most 3", "--k is 9; so k can be at most 3"),
        ("generate", "max_new_tokens is 0", "--max-tokens is 0"),
        (
            "generate",
            "governor is off, but objective was given",
            "--no-governor is given, but --objective was given",
        ),
        ("generate", "the prompt is empty; the mode is odd", "the prompt is empty; the mode is odd"),
        ("generate", "my_top_k is 3", "my_top_k is 3"),
        ("generate", "graphs[0].max_context is 'many'", "graphs[0].max_context is 'many'"),
        ("profile", "cool_down_s is -1.0; it must", "--cool-down is -1.0; it must"),
        ("bench", "k is 999; a round", "--k is 999; a round"),
        ("export", "widths are (-1,); each", "--widths are (-1,); each"),
        ("simulate", "scenario x: power_cap_w is -1", "scenario x: power_cap_w is -1"),
        ("fetch", "temp_limit_c is 3", "temp_limit_c is 3"),
    ],
)
def test_parameters_are_named_as_the_options_of_the_command(name: str, message: str, said: str) -> None:
    assert in_options(message, command(name)) == said


@pytest.mark.parametrize("name", COMMANDS)
def test_a_message_in_options_stays_as_it_is(name: str) -> None:
    for parameter in command(name).params:
        for option in parameter.opts:
            message = f"{option} is 3, but {option} was given"
            assert in_options(message, command(name)) == message


def test_from_python_the_parameter_is_named() -> None:
    with pytest.raises(UsageError, match=r"^power_cap_w is -4\.0"):
        outrider.load("nowhere", power_cap_w=-4.0)


def test_the_command_line_names_the_option(run_main: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    code, _, err = run_main("bench", str(tmp_path), "--power-cap", "-4")
    assert code == 2
    assert err.startswith("outrider: --power-cap is -4.0; it must be a number between")
