"""Recipes for integer accelerators: weights with one scale per output channel, activations in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import get_args

from outrider.errors import UsageError
from outrider.quantize.calibration import GPTQ_INPUTS
from outrider.quantize.channels import ChannelMethod
from outrider.quantize.registry import named

__all__ = ["NPU_RECIPES", "NpuRecipe", "get_npu_recipe", "parse_npu_overrides", "with_npu_overrides"]

BITS = (4, 8)
Overrides = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class NpuRecipe:
    """Bits of the weights by slot; activations are uint16 with one static scale per tensor.

    `overrides` (glob pattern, bits): the first match wins, before the defaults. `method` is how weights are
    rounded, see `channels.pack_channels`; compensating errors pays at 8 bits too: in SmolLM2-135M it more than
    halves what 8-bit weights cost. 4-bit rows get a whole multiplier for every `block` inputs. With `max_damage`,
    the export finds the slots that must keep 8 bits, until what the others cost is predicted to be at most
    so many nats a token (`sensitivity.choose_overrides`).
    """

    name: str
    linear: int
    head: int = 8
    method: ChannelMethod = "gptq"
    overrides: Overrides = ()
    block: int | None = None
    max_damage: float | None = None

    def __post_init__(self) -> None:
        """Refuse bits that no accelerator multiplies with."""
        for bits in (self.linear, self.head, *(bits for _, bits in self.overrides)):
            if bits not in BITS:
                raise UsageError(f"recipe {self.name!r} asks for {bits}-bit weights; an NPU takes 4 or 8")
        if self.method not in get_args(ChannelMethod):
            raise UsageError(f"method is {self.method!r}; known: {', '.join(get_args(ChannelMethod))}")

    def bits_for(self, slot: str) -> int:
        """How many bits the weights of a slot get."""
        for pattern, bits in self.overrides:
            if fnmatchcase(slot, pattern):
                return bits
        return self.head if slot == "head" else self.linear

    def block_for(self, slot: str, inputs: int) -> int | None:
        """How many inputs share a multiplier, None where a row has one scale."""
        fits = self.block is not None and self.bits_for(slot) == 4 and inputs % self.block == 0
        return self.block if fits else None

    def method_for(self, inputs: int) -> ChannelMethod:
        """How weights of so many inputs are rounded: `mse` where inverting their moment would take gigabytes."""
        return "mse" if self.method == "gptq" and inputs > GPTQ_INPUTS else self.method


NPU_RECIPES: dict[str, NpuRecipe] = {
    recipe.name: recipe
    for recipe in (NpuRecipe("a16w8", 8), NpuRecipe("a16w4", 4, block=16, max_damage=0.02))
}
"""Every named recipe of this kind."""


def get_npu_recipe(name: str) -> NpuRecipe:
    """The recipe of this name. Raises UsageError that lists the known names and the nearest one."""
    return named(NPU_RECIPES, name, "NPU precision")


def with_npu_overrides(recipe: NpuRecipe, overrides: Overrides) -> NpuRecipe:
    """The recipe with more overrides, which win over its own."""
    return replace(recipe, overrides=(*overrides, *recipe.overrides)) if overrides else recipe


def parse_npu_overrides(text: str) -> Overrides:
    """Overrides from `pattern=bits,pattern=bits`, as in `layers.0.down=int8,layers.*.qkv=int4`."""
    pairs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        pattern, _, kind = (part.strip() for part in item.partition("="))
        if not pattern or kind not in ("int4", "int8"):
            raise UsageError(
                f"override {item!r} is not pattern=int4 or pattern=int8, as in layers.*.down=int8"
            )
        pairs.append((pattern, int(kind[3:])))
    return tuple(pairs)
