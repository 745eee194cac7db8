"""A device profile as TOML, for profiles that were measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError, UsageError
from outrider.records import replaced
from outrider.targets.device import Device, Figure, Series, parse_device

__all__ = ["device_toml", "write_device"]


def device_toml(device: Device, comment: str = "") -> str:
    """The text that `parse_device` reads back as the same device; its slug is the file's name."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()] + [""] * bool(comment)
    parts = {f.name: getattr(device, f.name) for f in fields(device) if f.name != "slug"}
    return "\n".join([*lines, *_table(parts, "")]).strip("\n") + "\n"


def write_device(device: Device, path: str | os.PathLike[str], comment: str = "") -> Path:
    """Write a profile whole or not at all, making its folder; returns the path.

    Raises OutriderError for figures that no profile may hold: what is written can be read again.
    """
    target, text = Path(path), device_toml(device, comment)
    try:
        parse_device(text, target.stem, device.slug)
    except UsageError as error:
        raise OutriderError(
            f"the profile is not kept, for it could not be read again: {error}. If it was measured, was the machine"
            " busy with something else, or is the model very small?"
        ) from None
    target.parent.mkdir(parents=True, exist_ok=True)
    with replaced(target) as stream:
        stream.write(text.encode("utf-8"))
    return target


def _table(parts: Mapping[str, Any], place: str) -> Iterator[str]:
    """The plain values of a table first, then the tables inside it."""
    inner = {name: part for name, part in parts.items() if _is_table(part)}
    yield from (
        f"{name} = {_value(part)}" for name, part in parts.items() if name not in inner and part is not None
    )
    for name, part in inner.items():
        where = f"{place}.{name}" if place else name
        for header, table in _headed(where, part):
            if not all(map(_is_table, table.values())):
                yield from ("", header)
            yield from _table(table, where)


def _is_table(part: Any) -> bool:
    rows = isinstance(part, tuple) and bool(part) and is_dataclass(part[0])
    return rows or isinstance(part, Mapping) or is_dataclass(part)


def _headed(where: str, part: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(part, tuple):
        yield from ((f"[[{where}]]", _parts(row)) for row in part)
    else:
        yield f"[{where}]", _parts(part)


def _parts(record: Any) -> Mapping[str, Any]:
    if isinstance(record, Mapping):
        return record
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _value(part: Any) -> str:
    if isinstance(part, Figure | Series):
        inside = f"[{', '.join(map(_number, part))}]" if isinstance(part, Series) else _number(part)
        origin = "assumed = true" if part.assumed else f"source = {_text(part.source)}"
        return f"{{ value = {inside}, {origin} }}"
    if isinstance(part, bool):
        return str(part).lower()
    if isinstance(part, str):
        return _text(part)
    if isinstance(part, tuple):
        return f"[{', '.join(map(_value, part))}]"
    return str(part)


def _number(value: float) -> str:
    return repr(int(value)) if float(value).is_integer() else repr(float(value))


def _text(text: str) -> str:
    plain = "".join(c if c.isprintable() else " " for c in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
