"""How much each weight alone costs in few bits: the divergence from the float model, a layer in memory at a time.

Every slot is a *variant* of the model in which it alone is rounded. A variant leaves the float model at its slot's
layer, and from there all variants go through the layers together: half the work of running each as a whole,
and no more than one layer of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.errors import UsageError
from outrider.export.decoder import Layer, softcap
from outrider.export.reference import ROWS, FloatReference, Stream
from outrider.export.slots import SlotWeights, matrix_slots, slot_shape
from outrider.quantize.sensitivity import SlotDamage

__all__ = ["slot_damages"]

FloatArray = NDArray[np.float32]
PARTS = ("qkv", "attn_out", "gate_up", "down")


class Rounded(Protocol):
    """A weight in few bits."""

    @property
    def nbytes(self) -> int:
        """Bytes that ship."""
        ...

    def values(self) -> FloatArray:
        """The float32 weight [N, K] that is left."""
        ...


Pack = Callable[[str, FloatArray], Rounded]


@torch.inference_mode()
def slot_damages(
    weights: SlotWeights,
    pack: Pack,
    sequences: Sequence[NDArray[np.int64]],
    *,
    slots: Collection[str] | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[SlotDamage]:
    """The damage of each slot rounded alone, in the order of the forward pass; all layers' matrices by default.

    `pack(slot, weight [N, K])` rounds; it is called once a slot, in that order. A few hundred tokens are enough to
    rank slots. Raises UsageError for slots that the model does not have, or without a token.
    """
    known = matrix_slots(weights.config)[1:]
    wanted = known[:-1] if slots is None else [slot for slot in known if slot in slots]
    if slots is not None and (unknown := sorted(set(slots) - set(known))):
        raise UsageError(
            f"no damage of {', '.join(unknown[:3])}: the model's slots are {known[0]} to {known[-1]}"
        )
    if not sum(map(len, sequences)):
        raise UsageError("the damage of rounding is measured on text, and there are no tokens")
    reference = FloatReference(weights)
    streams = reference.embed(sequences)
    variants: dict[str, list[Stream]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for index in range(weights.config.num_layers):
        layer = reference.layer(index)
        for variant in variants.values():
            reference.run(layer, variant)
        for slot, packed in _rounded(layer, index, wanted, pack):
            variants[slot] = list(streams)
            reference.run(layer, variants[slot])
            sizes[slot] = _sizes(weights, slot, packed)
        reference.run(layer, streams)
        if progress:
            progress((index + 1) / weights.config.num_layers)
    found = _divergences(reference, streams, variants)
    if "head" in wanted:
        packed = pack("head", weights.matrix("head"))
        found["head"] = _head_divergence(reference, weights, streams, packed)
        sizes["head"] = _sizes(weights, "head", packed)
    return [SlotDamage(slot, found[slot], *sizes[slot]) for slot in wanted]


def _rounded(layer: Layer, index: int, wanted: Collection[str], pack: Pack) -> Iterator[tuple[str, Rounded]]:
    """Each wanted slot of a layer, while the layer holds its rounded weight."""
    for part in PARTS:
        slot = f"layers.{index}.{part}"
        if slot not in wanted:
            continue
        linear = getattr(layer, part)
        exact = linear.weight.data
        packed = pack(slot, exact.numpy())
        linear.weight.data = torch.from_numpy(packed.values())
        yield slot, packed
        linear.weight.data = exact


def _sizes(weights: SlotWeights, slot: str, packed: Rounded) -> tuple[int, int]:
    N, K = slot_shape(weights.config, slot)
    return packed.nbytes, N * K + 4 * N


def _divergences(
    reference: FloatReference, streams: list[Stream], variants: dict[str, list[Stream]]
) -> dict[str, float]:
    """Mean KL of every variant to the float model."""
    states = reference.normed(streams)
    exact = [_log_softmax(rows) for rows in reference.rows(states)]  # chunks of [R, V]
    everything = [state for variant in variants.values() for state in reference.normed(variant)]
    chunks = reference.rows(everything)
    total = sum(len(state) for state in states)
    return {slot: sum(_divergence(rows, next(chunks)) for rows in exact) / total for slot in variants}


def _head_divergence(
    reference: FloatReference, weights: SlotWeights, streams: list[Stream], packed: Rounded
) -> float:
    rounded = torch.from_numpy(packed.values())
    states = reference.normed(streams)
    total = 0.0
    chunks = reference.rows(states)
    for state in states:
        for start in range(0, len(state), ROWS):
            logits = softcap(state[start : start + ROWS] @ rounded.T, weights.config.logit_softcap)
            total += _divergence(_log_softmax(next(chunks)), logits.numpy())
    return total / sum(len(state) for state in states)


def _divergence(exact: torch.Tensor, logits: FloatArray) -> float:
    """The sum over rows of KL(exact || softmax(logits))."""
    kl = (exact.exp() * (exact - _log_softmax(logits))).sum(dim=-1)
    return float(kl.clamp(min=0).sum())


def _log_softmax(logits: FloatArray) -> torch.Tensor:
    return torch.log_softmax(torch.from_numpy(logits), dim=-1)
