"""Second moments of what the weights of a checkpoint read, from its float decoder, a layer at a time.

`bind` asks for the slots in the order of the forward pass. Each layer is run over the calibration text when
its first slot is asked for, so that the moments of one layer are in memory, and no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.export.bind import slot_scheme
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights, matrix_slots
from outrider.export.tokenizer_files import TokenizerFiles
from outrider.quantize.calibration import TOKENS, Moments, calibration_text, needed_moment, watch
from outrider.quantize.schemes import Recipe

__all__ = ["LayerMoments", "calibrate", "calibration_tokens"]

FloatArray = NDArray[np.float32]
SEGMENT = 512  # tokens of one teacher-forced sequence


def calibrate(
    weights: SlotWeights, recipe: Recipe, tokenizer: TokenizerFiles, max_context: int
) -> LayerMoments:
    """The moments that a recipe uses on this checkpoint, over the calibration text: for `export_graph`.

    Nothing is computed before it is read, and nothing at all where every slot is carried, rounded to nearest
    or left in floating point.
    """
    needed: dict[str, bool] = {}
    for slot in matrix_slots(weights.config)[1:]:
        types = [part.type_name for part in weights.raw(slot) or ()]
        moment = needed_moment(slot_scheme(recipe, weights.config, slot), types)
        if moment is not None:
            needed[slot] = moment == "full"
    sequences = calibration_tokens(tokenizer, min(SEGMENT, max_context)) if needed else []
    keys = [slot for slot, whole in needed.items() if whole and slot.endswith(".qkv")]
    return LayerMoments(weights, needed, sequences, keys)


def calibration_tokens(tokenizer: TokenizerFiles, segment: int) -> list[NDArray[np.int64]]:
    """The first tokens of the calibration text as sequences, each with a BOS where the model wants one."""
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_str(tokenizer.tokenizer_json).encode(
        calibration_text(), add_special_tokens=False
    )
    ids = np.asarray(encoded.ids[:TOKENS], np.int64)
    begin = np.asarray([tokenizer.bos_id] if tokenizer.add_bos else [], np.int64)
    step = segment - len(begin)
    return [np.concatenate([begin, ids[start : start + step]]) for start in range(0, len(ids), step)]


class LayerMoments(Mapping[str, FloatArray]):
    """Moments by slot, [K, K] or their diagonal [K], each to be read once, in the order of the forward pass.

    Raises ExportError when a slot of an earlier layer is read.
    """

    def __init__(
        self,
        weights: SlotWeights,
        needed: Mapping[str, bool],  # slot -> whether the whole moment is needed
        sequences: Sequence[NDArray[np.int64]],
        keys: Collection[str] = (),  # slots whose tokens count as `Moments` says
    ) -> None:
        self._needed = needed
        self._layers = _layer_moments(weights, needed, sequences, keys)
        self._current: dict[str, FloatArray] = {}

    def __getitem__(self, slot: str) -> FloatArray:
        if slot not in self._needed:
            raise KeyError(slot)
        while slot not in self._current:
            self._current = {}
            found = next(self._layers, None)
            if found is None:
                raise ExportError(f"the moments of {slot} are gone; read them in the order of the layers")
            self._current = found
        return self._current[slot]

    def __iter__(self) -> Iterator[str]:
        return iter(self._needed)

    def __len__(self) -> int:
        return len(self._needed)


def _layer_moments(
    weights: SlotWeights,
    needed: Mapping[str, bool],
    sequences: Sequence[NDArray[np.int64]],
    keys: Collection[str],
) -> Iterator[dict[str, FloatArray]]:
    """The moments of every layer, then that of the head."""
    full = [slot for slot, whole in needed.items() if whole]
    reference = FloatReference(weights)
    streams = reference.embed(sequences)
    for index in range(weights.config.num_layers):
        layer, moments = reference.layer(index), Moments(full, keys)
        for part in ("qkv", "attn_out", "gate_up", "down"):
            if f"layers.{index}.{part}" in needed:
                watch(moments, f"layers.{index}.{part}", getattr(layer, part))
        reference.run(layer, streams)
        del layer  # while the layer is packed, its float weights are not needed
        yield moments.result()
    moments = Moments(full)
    for state in reference.normed(streams):
        moments.add("head", state.numpy())
    yield moments.result()
