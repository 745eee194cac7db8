"""Frozen dataclasses from JSON, strictly, and files that are written whole or not at all."""

from __future__ import annotations

import math
import os
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin, get_type_hints

from outrider.errors import UsageError

__all__ = ["decode", "is_finite", "is_real", "is_whole", "parsed", "replaced"]

_MAPPINGS = (Mapping, dict)
_UNIONS = (Union, types.UnionType)


def parsed(parse: Callable[..., Any], text: str | bytes) -> Any:
    """What `json.loads` or `tomllib.loads` makes of a text; every failure is a ValueError, deep nesting too."""
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_finite(value: object) -> bool:
    """True for a number that a float can hold: neither NaN nor infinite, and no bool."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits
        return False


def is_real(value: object) -> bool:
    """True for a number that a user may give, NaN and infinity among them, of numpy too; no bool, no text."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """True for a whole number, of numpy too; no bool, no text."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def decode(kind: Any, value: Any, where: str, error: type[Exception]) -> Any:
    """Turn parsed JSON into `kind`: a dataclass, or a type built of the kinds that JSON knows.

    `where` names the place in messages and grows on the way down ("manifest.json: kv.heads"). Raises
    `error` for a missing, unknown or mistyped field, and puts `where` before what a dataclass refuses.
    """
    if is_dataclass(kind):
        return _decode_record(kind, value, where, error)
    origin = get_origin(kind)
    if origin in _UNIONS:
        return _decode_optional(kind, value, where, error)
    if origin is Literal:
        if value not in get_args(kind) or isinstance(value, bool):
            raise error(f"{where} is {value!r}; known: {', '.join(map(repr, get_args(kind)))}")
        return value
    if origin is tuple:
        item = get_args(kind)[0]
        _expect(list, value, where, error)
        return tuple(decode(item, part, f"{where}[{i}]", error) for i, part in enumerate(value))
    if origin in _MAPPINGS:
        item = get_args(kind)[1]
        _expect(dict, value, where, error)
        return {key: decode(item, part, _inside(where, key), error) for key, part in value.items()}
    if kind is not Any:
        _expect(kind, value, where, error)
    return float(value) if kind is float else value


def _decode_record(kind: Any, value: Any, where: str, error: type[Exception]) -> Any:
    _expect(dict, value, where, error)
    hints = _hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise error(f"{_inside(where, unknown[0])} is an unknown field; known: {', '.join(hints)}")
    missing = [name for name in _required(kind) if name not in value]
    if missing:
        raise error(f"{_inside(where, missing[0])} is missing")
    parts = {name: decode(hints[name], part, _inside(where, name), error) for name, part in value.items()}
    try:
        return kind(**parts)
    except (error, UsageError) as refused:
        raise error(f"{where}: {refused}") from None


def _decode_optional(kind: Any, value: Any, where: str, error: type[Exception]) -> Any:
    (inner,) = [option for option in get_args(kind) if option is not type(None)]
    return None if value is None else decode(inner, value, where, error)


def _expect(kind: type, value: Any, where: str, error: type[Exception]) -> None:
    right = is_finite(value) if kind is float else isinstance(value, kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise error(f"{where} is {value!r:.80}; expected {_NAMES.get(kind, f'a {kind.__name__.lower()}')}")


_NAMES = {
    str: "a string",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def _inside(where: str, key: str) -> str:
    return f"{where}.{key}" if ": " in where else f"{where}: {key}"


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _required(kind: Any) -> list[str]:
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a stream whose bytes become `path` when the block ends, and nothing when it fails."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = os.fspath(
                target
            )  # a write knows no name, and the temporary one tells nobody anything
        raise
