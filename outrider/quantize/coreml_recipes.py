"""What Core ML may store of a weight, as schemes and as named recipes that assign them to slots.

The Neural Engine reads palettes and integers with one scale per output channel; integers in blocks are a format
of the GPU (Apple, "Optimizing Weights", coremltools 9 guide).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, cast

from outrider.errors import ExportError, UsageError
from outrider.quantize.calibration import GPTQ_INPUTS
from outrider.quantize.registry import named
from outrider.quantize.report import SlotReport

__all__ = [
    "COREML_RECIPES",
    "Blocks",
    "CoreMLRecipe",
    "CoreMLScheme",
    "Overrides",
    "Palette",
    "check_compressed",
    "check_tied",
    "coreml_recipe",
    "needed_moments",
    "parse_coreml_overrides",
    "parse_coreml_scheme",
    "scheme_name",
    "with_coreml_overrides",
]

PALETTE_BITS = (1, 2, 3, 4, 6, 8)  # index types of iOS 18
PALETTE_ROWS = (
    8  # share a table; fewer slow the Neural Engine down, and 16 cost SmolLM2 more than the 1 % of bytes
)
BLOCK_SIZES = (32, 64, 128)
KNOWN = "fp16, lut4, lut6, lut4-g8 (rows that share a table), int8, int8-b32, int4-b32, int4-b32-asym"


@dataclass(frozen=True)
class Palette:
    """A table of 2^bits half-precision values for every `group` rows, and an index a weight."""

    bits: int
    group: int

    def __post_init__(self) -> None:
        """Refuse what Core ML has no type for."""
        if self.bits not in PALETTE_BITS:
            raise UsageError(f"a palette of {self.bits} bits; Core ML has indices of {PALETTE_BITS}")
        if self.group < 1:
            raise UsageError(f"{self.group} rows share a palette; it takes at least one")


@dataclass(frozen=True)
class Blocks:
    """Integers with a half-precision scale for every `block` inputs, or for a whole row (None).

    Symmetric codes are signed and have no offset; others are unsigned with a whole offset a block. `carried` are a
    source's own blocks and no choice of a recipe.
    """

    bits: Literal[4, 8]
    block: int | None = None
    symmetric: bool = True
    carried: bool = False

    def __post_init__(self) -> None:
        """Refuse what Core ML has no type for, and what is not built here."""
        if self.bits not in (4, 8):
            raise UsageError(f"bits is {self.bits}; Core ML's integers hold 4 or 8 bits")
        if self.block not in (None, *BLOCK_SIZES) or (self.bits == 4 and self.block is None):
            raise UsageError(
                f"block is {self.block} at {self.bits} bits; known: {', '.join(map(str, BLOCK_SIZES))}, "
                "and at 8 bits whole rows"
            )
        if not self.symmetric and self.bits == 8:
            raise UsageError("8-bit weights are symmetric here; an offset gains nothing")


CoreMLScheme = Palette | Blocks
Overrides = tuple[tuple[str, CoreMLScheme | None], ...]


@dataclass(frozen=True)
class CoreMLRecipe:
    """A scheme for every slot, None = half precision; `overrides` (glob pattern, scheme) win over the rest.

    With `max_damage`, the export finds the slots that get `wide` instead, until what the others cost is predicted
    to be at most so many nats a token (`sensitivity.choose_overrides`).
    """

    name: str
    linear: CoreMLScheme | None
    head: CoreMLScheme | None
    embedding: CoreMLScheme | None
    overrides: Overrides = ()
    wide: CoreMLScheme | None = None
    max_damage: float | None = None

    def __post_init__(self) -> None:
        """Refuse a limit without the scheme that it needs."""
        if self.max_damage is not None and self.wide is None:
            raise UsageError(f"recipe {self.name!r} limits damage and has no wide scheme to do it with")

    def scheme_for(self, slot: str) -> CoreMLScheme | None:
        """The scheme of one slot."""
        for pattern, scheme in self.overrides:
            if fnmatchcase(slot, pattern):
                return scheme
        return {"head": self.head, "embedding": self.embedding}.get(slot, self.linear)

    @property
    def compresses(self) -> bool:
        """Whether any slot is meant to leave half precision."""
        schemes = [self.linear, self.head, self.embedding, *(scheme for _, scheme in self.overrides)]
        return any(scheme is not None for scheme in schemes)


def _recipe(
    name: str, linear: CoreMLScheme | None, head: CoreMLScheme | None, wide: float | None = None
) -> CoreMLRecipe:
    return CoreMLRecipe(name, linear, head, head, wide=None if wide is None else LUT6, max_damage=wide)


LUT4, LUT6, ROWS8, BLOCKS8 = Palette(4, PALETTE_ROWS), Palette(6, PALETTE_ROWS), Blocks(8), Blocks(8, 32)
COREML_RECIPES: dict[str, CoreMLRecipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("fp16", None, None),
        _recipe("lut6", LUT6, LUT6),
        _recipe("lut4", LUT4, LUT6),
        _recipe("lut4-mix", LUT4, LUT6, wide=0.05),
        _recipe("int8", ROWS8, ROWS8),
        _recipe("int4-b32", Blocks(4, 32), BLOCKS8),
        _recipe("int4-b32-asym", Blocks(4, 32, symmetric=False), BLOCKS8),
    )
}
"""Every named recipe."""


def coreml_recipe(name: str) -> CoreMLRecipe:
    """The recipe of this name. Raises UsageError that lists the known names and the nearest one."""
    return named(COREML_RECIPES, name, "Core ML precision")


def with_coreml_overrides(recipe: CoreMLRecipe, overrides: Overrides) -> CoreMLRecipe:
    """The recipe with more overrides, which win over its own."""
    return replace(recipe, overrides=(*overrides, *recipe.overrides)) if overrides else recipe


def scheme_name(scheme: CoreMLScheme | None) -> str:
    """The text that `parse_coreml_scheme` reads back, such as `lut4-g8` or `int4-b32-asym`."""
    if scheme is None:
        return "fp16"
    if isinstance(scheme, Palette):
        return f"lut{scheme.bits}-g{scheme.group}"
    parts = [f"int{scheme.bits}", *([] if scheme.block is None else [f"b{scheme.block}"])]
    return "-".join([*parts, *([] if scheme.symmetric or scheme.carried else ["asym"])])


def parse_coreml_scheme(text: str) -> CoreMLScheme | None:
    """The scheme of a name. Raises UsageError with the known forms."""
    if text == "fp16":
        return None
    if match := re.fullmatch(r"lut(\d+)(?:-g(\d+))?", text):
        bits = int(match[1])
        return Palette(bits, int(match[2]) if match[2] else PALETTE_ROWS)
    if match := re.fullmatch(r"int([48])(?:-b(\d+))?(-asym)?", text):
        block = int(match[2]) if match[2] else 32 if match[1] == "4" else None
        return Blocks(cast(Literal[4, 8], int(match[1])), block, symmetric=match[3] is None)
    raise UsageError(f"unknown Core ML scheme {text!r}; known: {KNOWN}")


def parse_coreml_overrides(text: str) -> Overrides:
    """Overrides from `pattern=scheme,pattern=scheme`, as in `layers.*.down=lut6,head=int8`."""
    pairs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        pattern, equals, scheme = (part.strip() for part in item.partition("="))
        if not equals or not pattern:
            raise UsageError(f"override {item!r} is not pattern=scheme, as in layers.*.down=lut6")
        pairs.append((pattern, parse_coreml_scheme(scheme)))
    return tuple(pairs)


def needed_moments(recipe: CoreMLRecipe, inputs: Mapping[str, int]) -> dict[str, bool]:
    """Which slots (with so many inputs each) use the moment of what they read, and whether all of it.

    For `export.calibrate.LayerMoments`. Inverting the moment of more than `GPTQ_INPUTS` would take gigabytes.
    """
    needed: dict[str, bool] = {}
    for slot, K in inputs.items():
        scheme = recipe.scheme_for(slot)
        if scheme is not None:
            compensated = isinstance(scheme, Palette) or scheme.block is None
            needed[slot] = compensated and K <= GPTQ_INPUTS
    return needed


def check_tied(recipe: CoreMLRecipe) -> None:
    """Refuse a recipe under which a head and the embedding that is the same matrix would be stored twice."""
    head, embedding = recipe.scheme_for("head"), recipe.scheme_for("embedding")
    if head != embedding:
        raise UsageError(
            f"recipe {recipe.name!r} stores the head as {scheme_name(head)} and the embedding as "
            f"{scheme_name(embedding)}, but this model has one matrix for both: give both the same scheme"
        )


def check_compressed(recipe: CoreMLRecipe, reports: Sequence[SlotReport]) -> None:
    """Refuse a result that is not what the recipe says.

    Raises ExportError for a slot left in half precision against the recipe, a slot compressed against it, and a
    recipe that changed nothing.
    """
    for report in reports:
        asked = recipe.scheme_for(report.slot)
        if (asked is None) != (report.after == "fp16"):
            raise ExportError(
                f"{report.slot} became {report.after}, and recipe {recipe.name!r} says {scheme_name(asked)}"
            )
    if recipe.compresses and all(report.after == "fp16" for report in reports):
        patterns = ", ".join(pattern for pattern, _ in recipe.overrides) or "none"
        raise ExportError(
            f"recipe {recipe.name!r} compressed none of {len(reports)} weights; overrides: {patterns}. "
            "Check them against the slot names, such as layers.0.down, head, embedding"
        )
