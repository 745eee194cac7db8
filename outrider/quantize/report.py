"""Say of every weight what a recipe did to it, and refuse one that did nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.quantize.calibration import GPTQ_INPUTS
from outrider.quantize.recipes import format_scheme
from outrider.quantize.schemes import AnyScheme, Float, PackedMatrix, RawBlocks, Recipe

__all__ = ["SlotReport", "check_changed", "describe"]


@dataclass(frozen=True)
class SlotReport:
    """What became of one weight. `reason` says why it was left in floating point, or how it was changed."""

    slot: str
    shape: tuple[int, int]
    before: str  # the source's types, such as "Q4_K+Q6_K" or "float32"
    after: str  # a scheme, as `recipes.parse_scheme` reads it
    bytes_before: int
    bytes_after: int  # 0 when it shares the bytes of another slot, as `bytes_before` then is
    relative_error: float  # ||W - Ŵ|| / ||W|| against the (dequantized) source
    carried: bool
    reason: str


def describe(
    slot: str,
    weight: NDArray[np.floating],
    packed: PackedMatrix,
    asked: AnyScheme,
    raw: Sequence[RawBlocks] | None = None,
    calibrated: bool = False,
) -> SlotReport:
    """The report line of one packed weight: `asked` is the recipe's scheme, `raw` its source blocks."""
    return SlotReport(
        slot=slot,
        shape=packed.shape,
        before="+".join(dict.fromkeys(part.type_name for part in raw)) if raw else str(weight.dtype),
        after=format_scheme(packed.scheme),
        bytes_before=sum(part.data.nbytes for part in raw) if raw else weight.nbytes,
        bytes_after=packed.nbytes,
        relative_error=packed.details.get("relative_error", 0.0),
        carried=packed.carried,
        reason=_reason(packed, asked, raw, calibrated),
    )


def check_changed(reports: Sequence[SlotReport], recipe: Recipe) -> None:
    """Refuse a recipe that asked for integers and left every weight in floating point.

    Raises ExportError. A recipe whose every scheme is floating point changes nothing on purpose.
    """
    schemes = [recipe.linear, recipe.head, recipe.embedding, *(scheme for _, scheme in recipe.overrides)]
    if all(isinstance(scheme, Float) for scheme in schemes):
        return
    if all(report.after in ("fp32", "fp16") for report in reports):
        patterns = ", ".join(pattern for pattern, _ in recipe.overrides) or "none"
        raise ExportError(
            f"recipe {recipe.name!r} quantized none of {len(reports)} weights; overrides: {patterns}. "
            "Check them against the slot names, such as layers.0.down, head, embedding"
        )


def _reason(packed: PackedMatrix, asked: AnyScheme, raw: Sequence[RawBlocks] | None, calibrated: bool) -> str:
    if packed.carried:
        how = "" if packed.correction is None else ", minima as zero points and a correction"
        return f"the source's own blocks{how}"
    if isinstance(packed.scheme, Float):
        return f"left in {packed.scheme.dtype}: the recipe says so"
    again = raw and any(part.type_name.startswith("Q") for part in raw)
    how = f"rounded a second time: {format_scheme(asked)} cannot hold these blocks" if again else "quantized"
    method = getattr(packed.scheme, "method", None)
    if calibrated and method in ("mse", "gptq"):
        how += "; calibrated"
    if method == "mse" and getattr(asked, "method", None) == "gptq":
        how += f"; mse, as gptq takes no embedding and at most {GPTQ_INPUTS} inputs"
    return how
