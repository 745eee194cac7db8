"""What `outrider export` can be told, refused where it cannot be honoured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outrider.errors import UsageError
from outrider.quantize.coreml_recipes import (
    CoreMLRecipe,
    coreml_recipe,
    parse_coreml_overrides,
    with_coreml_overrides,
)
from outrider.quantize.recipes import check_role, get_recipe, parse_overrides, with_overrides

if TYPE_CHECKING:
    from outrider.quantize.schemes import Recipe

__all__ = ["WHOLE", "ExportOptions", "Extent", "RoleOptions"]

LEAST_CONTEXT = 16
COREML_DEFAULTS = {"draft": "lut6", "target": "int4-b32"}
DEPLOYMENT_TARGETS = ("ios18", "ios26")


@dataclass(frozen=True)
class Extent:
    """How much text a bundle is measured on, in tokens: of WikiText-2, and that the target writes itself."""

    wikitext: int = 2048
    own: int = 512


WHOLE = Extent()


@dataclass(frozen=True)
class RoleOptions:
    """What one role of a bundle is made from, and how; a precision for each kind of graph it may get."""

    model: str
    precision: str = "int4"  # of ONNX graphs for CPUs and GPUs
    overrides: str = ""  # "pattern=scheme,..." as in `quantize.recipes.parse_overrides`
    revision: str | None = None
    npu_precision: str = "a16w8"
    executorch_precision: str = "8da4w"
    vocab: int | None = None  # rows of a draft's head; None = all
    coreml_precision: str | None = None  # None: what suits the unit of the role
    coreml_overrides: str = ""  # "pattern=scheme,..." as in `coreml_recipes.parse_coreml_overrides`

    def recipe(self, role: str) -> Recipe:
        """The recipe of ONNX graphs, refused where a target may not have it."""
        recipe = with_overrides(get_recipe(self.precision), parse_overrides(self.overrides))
        check_role(recipe, role)
        return recipe

    def coreml_recipe(self, role: str) -> str:
        """The name of the recipe of Core ML graphs: palettes for the Neural Engine, blocks for the GPU."""
        return self.coreml_precision or COREML_DEFAULTS[role]

    def coreml_scheme(self, role: str) -> CoreMLRecipe:
        """The recipe of Core ML graphs, with the overrides that were given."""
        recipe = coreml_recipe(self.coreml_recipe(role))
        return with_coreml_overrides(recipe, parse_coreml_overrides(self.coreml_overrides))


@dataclass(frozen=True)
class ExportOptions:
    """Everything that `outrider export` can be told.

    `backends` (of `device_plans.BACKENDS`) and `executorch_backend` leave the choice to the device where they are
    not given. `calibration` is a file of prompts, one a line, for activation ranges. `allow_quality` ships a graph
    that is below its recipe's gate, and the manifest says so.
    """

    target: RoleOptions
    output: Path
    draft: RoleOptions | None = None
    device: str = "host"
    max_context: int = 2048
    profile: Literal["inplace", "split"] = "inplace"  # of ONNX graphs for CPUs and GPUs
    widths: tuple[int, ...] = ()  # of the target's graphs with static widths
    hidden_layers: tuple[int, ...] = ()  # of the target
    evaluate: bool = True
    force: bool = False
    mirror: str | None = None
    backends: tuple[str, ...] = ()
    executorch_backend: str | None = None
    draft_context: int | None = None
    npu_target: bool = False
    calibration: Path | None = None
    allow_quality: bool = False
    extent: Extent = WHOLE
    deployment_target: str | None = None  # of Core ML graphs; None: ios18, which is macOS 15 too
    draft_widths: tuple[int, ...] = ()  # of the draft's graphs with static widths
    split_target: bool = False  # also a Core ML target whose cache the app keeps
    kv_cache: Literal["float32", "int8"] = "float32"  # of ONNX graphs for CPUs

    def __post_init__(self) -> None:
        """Refuse what cannot be honoured."""
        for name, context in (("max_context", self.max_context), ("draft_context", self.draft_context)):
            if context is not None and context < LEAST_CONTEXT:
                raise UsageError(f"{name} is {context}; it must be at least {LEAST_CONTEXT}")
        if self.draft_context is not None and self.draft_context > self.max_context:
            raise UsageError(
                f"draft_context is {self.draft_context}, more than max_context, {self.max_context}"
            )
        if self.draft is None and self.draft_context is not None:
            raise UsageError("draft_context was given, but no draft model; give both or neither")
        if self.target.vocab is not None:
            raise UsageError("a target keeps its whole vocabulary; only a draft's head can be trimmed")
        if self.npu_target and self.hidden_layers:
            raise UsageError(
                "npu_target and hidden_layers were given, but graphs of an NPU return no hidden states; leave one out"
            )
        for name, widths in (("widths", self.widths), ("draft_widths", self.draft_widths)):
            if widths and min(widths) < 1:
                raise UsageError(f"{name} are {widths}; each must be at least 1")
            if widths and max(widths) > self.max_context:
                raise UsageError(
                    f"{name} are {widths}; no forward is wider than max_context, which is {self.max_context}"
                )
            object.__setattr__(self, name, tuple(sorted(set(widths))))
        if self.deployment_target not in (None, *DEPLOYMENT_TARGETS):
            raise UsageError(
                f"deployment target {self.deployment_target!r} is not known; known: {', '.join(DEPLOYMENT_TARGETS)}"
            )
        if self.kv_cache not in ("float32", "int8"):
            raise UsageError(f"kv_cache is {self.kv_cache!r}; known: float32, int8")
        if self.kv_cache == "int8" and self.profile == "split":
            raise UsageError("kv_cache is 'int8', which `split` graphs cannot have; leave profile out")
        if self.profile == "split" and not self.widths:
            object.__setattr__(self, "widths", (1, 2, 3, 5, 9, 64))

    def of(self, role: str) -> RoleOptions:
        """The options of a role that is there."""
        options = self.draft if role == "draft" else self.target
        assert options is not None
        return options
