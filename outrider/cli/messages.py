"""Errors of the library said in the words of the command line."""

from __future__ import annotations

import re

import click

__all__ = ["in_options"]

PHRASES = {
    "governor is off": "--no-governor is given",
    "draft=False": "--no-draft",
    "target_providers": "--target-provider",
    "draft_providers": "--draft-provider",
    "max_new_tokens": "--max-tokens",
}
"""What has no option of its own name, and what to call it instead."""

_UNITS = r"(?:_(?:s|w|c|mb|percent))?"
_HERE = r"(?:^|(?<=but ))"  # a word without an underscore may be prose anywhere else
_TOLD = r"(?= is | are | was given)"


def in_options(message: str, command: click.Command) -> str:
    """A message with the parameters that it names replaced by the options of `command` that set them.

    `power_cap_w is -1.0; ...` becomes `--power-cap is -1.0; ...`. What `command` has no option for stays.
    """
    for name, option in _names(command).items():
        plain = re.escape(name) + _UNITS
        pattern = rf"(?<![-.\w]){plain}(?![\w=])" if "_" in name else rf"{_HERE}{plain}{_TOLD}"
        message = re.sub(pattern, option, message)
    for phrase, instead in PHRASES.items():
        if any(instead.split()[0] in parameter.opts for parameter in command.params):
            message = re.sub(rf"(?<![-\w]){re.escape(phrase)}(?!\w)", instead, message)
    return message


def _names(command: click.Command) -> dict[str, str]:
    """What the library calls the options of a command: by parameter, and by every long spelling."""
    found: dict[str, str] = {}
    for parameter in command.params:
        long = [option for option in parameter.opts if option.startswith("--")]
        if not long:
            continue
        found.update({option.lstrip("-").replace("-", "_"): option for option in long})
        if parameter.name is not None:
            found.setdefault(re.sub(_UNITS + "$", "", parameter.name), long[0])
    return found
