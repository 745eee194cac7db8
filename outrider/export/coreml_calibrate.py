"""What real text tells before a Core ML package is written: errors to compensate for, and what half precision holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UsageError
from outrider.export.calibrate import LayerMoments
from outrider.export.coreml_parts import sensitive_slots
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights, matrix_slots, slot_shape
from outrider.quantize.coreml_recipes import CoreMLRecipe, needed_moments, with_coreml_overrides

__all__ = ["fitted_recipe", "slot_moments", "stream_scale"]

PEAK = 30000.0  # of values that a short text reaches, in half precision, which ends at 65,504
TEXTS, TOKENS = 2, 64  # an attention sink shows at the first tokens of any text
Texts = Sequence[Sequence[int]]
Progress = Callable[[str, int, int], None]


def fitted_recipe(
    weights: SlotWeights, recipe: CoreMLRecipe, calibration: Texts, progress: Progress | None = None
) -> CoreMLRecipe:
    """The recipe with the slots that it has to keep wide for its `max_damage`.

    Raises UsageError where it sets such a limit and there is no text to measure on.
    """
    if recipe.max_damage is None:
        return recipe
    if not calibration:
        raise UsageError(f"recipe {recipe.name!r} measures damage, which needs calibration text")
    return with_coreml_overrides(recipe, sensitive_slots(weights, recipe, calibration, progress))


def slot_moments(
    weights: SlotWeights, recipe: CoreMLRecipe, calibration: Texts
) -> Mapping[str, NDArray[np.float32]]:
    """Second moments of what each weight reads, a layer at a time as they are asked for; none without text."""
    inputs = {slot: slot_shape(weights.config, slot)[1] for slot in matrix_slots(weights.config)[1:]}
    needed = needed_moments(recipe, inputs)
    if not calibration or not needed:
        return {}
    return LayerMoments(weights, needed, [np.asarray(ids, np.int64) for ids in calibration])


def stream_scale(weights: SlotWeights, calibration: Texts) -> float:
    """A power of two that brings the residual stream into half precision, 1 where it already fits.

    Gemma's residual streams reach beyond 65,504, the largest number of half precision.
    """
    if not calibration:
        return 1.0
    texts = [np.asarray(ids[:TOKENS], np.int64) for ids in sorted(calibration, key=len)[-TEXTS:]]
    reference = FloatReference(weights)
    streams = reference.embed(texts)
    peak = max(float(residual.abs().max()) for residual, _ in streams)
    for index in range(weights.config.num_layers):
        reference.run(reference.layer(index), streams)
        totals = (residual if update is None else residual + update for residual, update in streams)
        peak = max(peak, *(float(total.abs().max()) for total in totals))
    return 1.0 if peak < PEAK else float(2.0 ** -np.ceil(np.log2(peak / PEAK)))
