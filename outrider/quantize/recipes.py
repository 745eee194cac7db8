"""Named recipes, the text form of schemes, and overrides by pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, cast

from outrider.errors import UsageError
from outrider.quantize.registry import named
from outrider.quantize.schemes import (
    BLOCK_SIZES,
    METHODS,
    AnyScheme,
    BlockInt,
    Carry,
    DynamicInt8,
    Float,
    Recipe,
)

__all__ = [
    "RECIPES",
    "check_overrides",
    "check_role",
    "format_scheme",
    "get_recipe",
    "parse_overrides",
    "parse_scheme",
    "with_overrides",
]

Overrides = tuple[tuple[str, AnyScheme], ...]

INT8 = BlockInt(8, 64)
# With 4-bit blocks of 32 and 8-bit blocks up to 64, ONNX Runtime's kernels give a row the same result bit for
# bit at every width, so that no draft can change the text; longer blocks are faster, but only equal to 1e-6.
EMBEDDING = BlockInt(8, 32)  # read one row a token: bytes do not matter, accuracy does


def _uniform(name: str, linear: AnyScheme, head: AnyScheme = INT8, overrides: Overrides = ()) -> Recipe:
    return Recipe(name, linear, head, EMBEDDING, overrides)


def _float(name: str, scheme: Float) -> Recipe:
    return Recipe(name, scheme, scheme, scheme)


def _attention_and_down(scheme: AnyScheme) -> Overrides:
    return tuple((f"layers.*.{part}", scheme) for part in ("qkv", "attn_out", "down"))


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _float("fp32", Float()),
        _float("fp16", Float("float16")),
        _uniform("int8", INT8),
        _uniform("int8-b128", BlockInt(8, 128), BlockInt(8, 128)),
        _uniform("int8-b32", BlockInt(8, 32), BlockInt(8, 32)),
        _uniform("int8-dynamic", DynamicInt8()),
        _uniform("int4", Carry(BlockInt(4, 32, method="mse"), wide="round", eight_bit=INT8)),
        _uniform("int4-b32", BlockInt(4, 32, method="mse")),
        _uniform("int4-b64", BlockInt(4, 64, method="mse")),
        _uniform("int4-b128", BlockInt(4, 128, method="mse")),
        _uniform("int4-hqq", BlockInt(4, 64, symmetric=False, method="hqq")),
        _uniform("int4-gptq", BlockInt(4, 64, method="gptq")),
        _uniform("int4-mixed", BlockInt(4, 64, method="mse"), overrides=_attention_and_down(INT8)),
        Recipe("carry", Carry(EMBEDDING), Carry(EMBEDDING), Carry(EMBEDDING)),
    )
}
"""Every named recipe."""


def get_recipe(name: str) -> Recipe:
    """The recipe of this name. Raises UsageError that lists the known names and the nearest one."""
    return named(RECIPES, name, "precision")


def with_overrides(recipe: Recipe, overrides: Overrides) -> Recipe:
    """The recipe with more overrides, which win over its own."""
    return replace(recipe, overrides=(*overrides, *recipe.overrides)) if overrides else recipe


def check_role(recipe: Recipe, role: str) -> None:
    """Refuse per-tensor activation scales in a target, whose rows must not depend on each other."""
    schemes = [recipe.linear, recipe.head, recipe.embedding, *(scheme for _, scheme in recipe.overrides)]
    if role == "target" and any(isinstance(scheme, DynamicInt8) for scheme in schemes):
        raise UsageError(
            f"recipe {recipe.name!r} quantizes activations with one scale per forward (int8-dynamic), "
            "which lets rows of a verify change each other: it is for drafts only. Choose int8 for the target"
        )


def check_overrides(overrides: Overrides, slots: Sequence[str], role: str) -> None:
    """Refuse a pattern that matches no slot of the model, and schemes that a slot cannot have."""
    for pattern, scheme in overrides:
        found = [slot for slot in slots if fnmatchcase(slot, pattern)]
        if not found:
            kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", slot) for slot in slots))
            near = get_close_matches(pattern, dict.fromkeys([*kinds, *slots]), n=3)
            hint = f". Did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(
                f"override {pattern!r} matches no slot of the {role}, which has {', '.join(kinds)}{hint}"
            )
        if isinstance(scheme, DynamicInt8) and "embedding" in found:
            raise UsageError(
                f"override {pattern!r} gives the embedding int8-dynamic: a lookup has no activation to quantize"
            )


def parse_scheme(text: str) -> AnyScheme:
    """The scheme that a text names.

    `fp32`, `fp16`, `int8-dynamic`, `carry`, `carry-fast`, `carry-round`, or `int4` / `int8` with any of
    `-b<block>`, `-<method>`, `-asym` and `-level<accuracy level>` after it, as in `int4-b64-hqq-asym`.
    """
    if text in _FIXED:
        return _FIXED[text]
    match = re.fullmatch(r"int([48])((?:-[a-z0-9]+)*)", text)
    if match is None:
        known = f"{', '.join(_FIXED)}, int4..., int8..."
        raise UsageError(f"unknown scheme {text!r}; known: {known}, for example int4-b64-hqq-asym")
    bits = cast(Literal[4, 8], int(match[1]))
    scheme = BlockInt(bits, 32 if bits == 4 else 128)
    for part in match[2].split("-")[1:]:
        scheme = _with_part(scheme, part, text)
    return scheme


def _with_part(scheme: BlockInt, part: str, text: str) -> BlockInt:
    if part in METHODS:
        return replace(scheme, method=cast(Literal["rtn", "mse", "hqq", "gptq"], part))
    if part == "asym":
        return replace(scheme, symmetric=False)
    if part[0] == "b" and part[1:].isdigit():
        return replace(scheme, block=int(part[1:]))
    if part.startswith("level") and part[5:].isdigit():
        return replace(scheme, accuracy_level=int(part[5:]))
    raise UsageError(
        f"unknown part {part!r} of scheme {text!r}; known: asym, level<0..4>, {', '.join(METHODS)}, "
        + ", ".join(f"b{block}" for block in BLOCK_SIZES)
    )


def format_scheme(scheme: AnyScheme) -> str:
    """The text that `parse_scheme` reads back (a `Carry` keeps only its two ways)."""
    for text, fixed in _FIXED.items():
        if scheme == fixed:
            return text
    if isinstance(scheme, Carry):
        return _carry_name(scheme)
    if not isinstance(scheme, BlockInt):
        raise UsageError(f"scheme {scheme!r} has no name")
    method = "" if scheme.method == "rtn" else f"-{scheme.method}"
    asym = "" if scheme.symmetric else "-asym"
    level = "" if scheme.accuracy_level == 4 else f"-level{scheme.accuracy_level}"
    return f"int{scheme.bits}-b{scheme.block}{method}{asym}{level}"


def _carry_name(scheme: Carry) -> str:
    if scheme.minimum == "round":
        return "carry-round"
    return "carry" if scheme.wide == "exact" else "carry-fast"


_FIXED: dict[str, AnyScheme] = {
    "fp32": Float(),
    "fp16": Float("float16"),
    "int8-dynamic": DynamicInt8(),
    "carry": Carry(),
    "carry-fast": Carry(wide="round", eight_bit=INT8),
    "carry-round": Carry(minimum="round", wide="round", eight_bit=INT8),
}


def parse_overrides(text: str) -> Overrides:
    """Overrides from `pattern=scheme,pattern=scheme`, as in `layers.*.down=int8-b128,head=fp16`."""
    pairs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        pattern, equals, scheme = item.partition("=")
        if not equals or not pattern.strip():
            raise UsageError(f"override {item!r} is not pattern=scheme, as in layers.*.down=int8-b128")
        pairs.append((pattern.strip(), parse_scheme(scheme.strip())))
    return tuple(pairs)
