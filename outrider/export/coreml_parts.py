"""What both Core ML exports need: which slots a mixed recipe keeps wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.export.calibrate import LayerMoments
from outrider.export.damage import slot_damages
from outrider.export.slots import SlotWeights, matrix_slots, slot_shape
from outrider.quantize.coreml import Compressed, compress
from outrider.quantize.coreml_recipes import CoreMLRecipe, Overrides, needed_moments
from outrider.quantize.sensitivity import choose_overrides

__all__ = ["sensitive_slots"]

TEXTS, TOKENS = 3, 64  # that slots are ranked on
RANKING_TOKENS = 2048  # that errors are compensated for while slots are ranked
Progress = Callable[[str, int, int], None]


def sensitive_slots(
    weights: SlotWeights,
    recipe: CoreMLRecipe,
    calibration: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> Overrides:
    """The layers' slots that get the recipe's `wide` scheme, so that the others cost at most its `max_damage`.

    Empty without such a limit. Raises ExportError without text to measure on.
    """
    if recipe.max_damage is None:
        return ()
    if not any(calibration):
        raise ExportError(
            f"recipe {recipe.name!r} ranks slots by their damage on a text; give calibration prompts"
        )
    config = weights.config
    slots = [slot for slot in matrix_slots(config)[1:-1] if recipe.scheme_for(slot) == recipe.linear]
    inputs = {slot: slot_shape(config, slot)[1] for slot in slots}
    held = sorted(calibration, key=len, reverse=True)[:TEXTS]
    # Errors are compensated for the other texts: on those that they were compensated for, they look too small.
    others = [ids for ids in calibration if not any(ids is text for text in held)] or list(calibration)
    moments = LayerMoments(weights, needed_moments(recipe, inputs), _first_tokens(others))

    def pack(slot: str, weight: NDArray[np.float32]) -> Compressed:
        return compress(recipe, slot, weight, moment=moments.get(slot))

    texts = [np.asarray(ids[:TOKENS], np.int64) for ids in held]
    report = (lambda part: progress("sensitivity", round(100 * part), 100)) if progress else None
    damages = slot_damages(weights, pack, texts, slots=slots, progress=report)
    chosen = choose_overrides(damages, max_damage=recipe.max_damage)
    return tuple((slot, recipe.wide) for slot, _ in chosen)


def _first_tokens(sequences: Sequence[Sequence[int]]) -> list[NDArray[np.int64]]:
    """Whole sequences from the first on, until they hold enough tokens to rank by."""
    kept: list[NDArray[np.int64]] = []
    for sequence in sequences:
        if sum(map(len, kept)) >= RANKING_TOKENS:
            break
        kept.append(np.asarray(sequence, np.int64))
    return kept
