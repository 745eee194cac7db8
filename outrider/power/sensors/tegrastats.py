"""NVIDIA's `tegrastats`, for Jetson boards whose power monitors cannot be reached through sysfs.

The line's form changes from release to release, so it is read token by token, and a token that is not understood
gives nothing. Forms: JetPack 4 to 7 release notes of the Jetson developer guides.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from outrider.contracts import Quantity, Reading, Scope
from outrider.power.sensors.ina import Ina, board_total
from outrider.power.sensors.sysfs import PLAUSIBLE_C, Figure, is_linux
from outrider.power.sensors.system import CommandResult, Sensor, System

__all__ = ["Tegrastats", "Token", "parse_tegrastats"]

_PROGRAMS = ("/usr/bin/tegrastats", "/home/nvidia/tegrastats", "/home/ubuntu/tegrastats")
_INTERVAL_MS = 200
_WAIT_S = 1.0
_TEMPERATURE = re.compile(r"([A-Za-z][\w-]*)@(-?[0-9]+(?:\.[0-9]+)?)C(?:/.*)?$")
_POWER = re.compile(r"([0-9]+)(?:mW)?/[0-9]+(?:mW)?$")
_CLOCK = re.compile(r"[0-9]+%@\[?([0-9]+(?:,[0-9]+)*)\]?$")
_CORE = re.compile(r"[0-9]+%@([0-9]+)$")
_NAME = re.compile(r"[A-Z][A-Z0-9_]*$")
_FIXED = ("PMIC",)
"""Sensors that show their alarm threshold instead of a temperature."""


class Token(NamedTuple):
    """One figure of a line: °C, W or Hz."""

    name: str
    quantity: Quantity
    value: float


def parse_tegrastats(line: str) -> list[Token]:
    """Temperatures, powers and clocks of one line; what is off, unknown or without a figure is left out."""
    words = line.split()
    tokens: list[Token] = []
    low, high = PLAUSIBLE_C  # a sensor that is off shows -256C
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if match := _TEMPERATURE.match(word):
            temp_c = float(match[2])
            if low <= temp_c <= high and match[1] not in _FIXED:
                tokens.append(Token(match[1], "temperature", temp_c))
        elif _NAME.match(word):
            tokens += _named(word, following)
    return tokens


def _named(name: str, value: str) -> list[Token]:
    if match := _POWER.match(value):
        return [Token(name, "power", int(match[1]) / 1000)]
    if name.endswith("_FREQ") and (match := _CLOCK.match(value)):
        fastest = max(map(int, match[1].split(",")))
        return [Token(name.removesuffix("_FREQ"), "clock", fastest * 1e6)] if fastest else []
    if name == "CPU" and value.startswith("["):
        cores = enumerate(value.strip("[]").split(","))
        return [
            Token(f"CPU{number}", "clock", int(match[1]) * 1e6)
            for number, text in cores
            if (match := _CORE.match(text))
        ]
    return []


class Tegrastats:
    """Rails, module total, temperatures and clocks, one line of tegrastats a read.

    Each read starts tegrastats for as long as its first line takes (`timeout` ends it, so nothing stays
    behind), which is why it is slow and only used where `Ina` finds nothing.
    """

    name = "tegrastats"
    period_s = 2.0

    def __init__(self, system: System, program: str = "tegrastats") -> None:
        self._system = system
        self._program = program
        self._known: dict[tuple[str, Quantity], Scope] = {}

    @classmethod
    def find(cls, system: System) -> list[Sensor]:
        """One sensor if tegrastats is installed and no power monitor is in sysfs."""
        if not is_linux(system) or Ina.find(system):
            return []
        there = [program for program in _PROGRAMS if system.path(program).exists()]
        return [cls(system, there[0])] if there else []

    def read(self) -> list[Reading]:
        """The figures of one line. A figure that earlier lines had and this one lacks has a reason."""
        command = ["timeout", f"{3 * _INTERVAL_MS / 1000:g}", self._program, "--interval", str(_INTERVAL_MS)]
        result = self._system.run(command, 3 * _WAIT_S)
        now = self._system.clock()
        lines = [line for line in result.text.splitlines() if "@" in line]
        if not lines:
            return [Reading("tegrastats:total", "power", None, "module", "instant", now, _failure(result))]
        tokens = parse_tegrastats(lines[0])
        found = {(token.name, token.quantity): token.value for token in tokens}
        self._known |= {key: _SCOPES.get(key[1], "die") for key in found}
        readings = [
            Reading(f"tegrastats:{name}", quantity, found.get((name, quantity)), scope, "instant", now,
                    "" if (name, quantity) in found else "tegrastats no longer shows it: the unit is off")
            for (name, quantity), scope in self._known.items()
        ]  # fmt: skip
        return [*readings, _total(tokens, now)]


_SCOPES: dict[Quantity, Scope] = {"power": "rail"}


def _total(tokens: list[Token], now: float) -> Reading:
    rails: dict[str, Figure] = {
        token.name: (token.value, "") for token in tokens if token.quantity == "power"
    }
    (value, reason), names = board_total(rails) or ((None, ""), "")
    if value is None:
        reason = reason or f"its rails ({', '.join(rails) or 'none'}) are not known to make a whole board"
    return Reading("tegrastats:total", "power", value, "module", "instant", now, reason or names)


def _failure(result: CommandResult) -> str:
    if result.error:
        return f"tegrastats: {result.error}"
    return f"tegrastats printed {result.text[:60]!r} instead of a line of figures"
