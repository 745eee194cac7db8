"""Which slots keep 8 bits: damages measured a layer at a time are those of whole models, and the choice is greedy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from outrider.errors import UsageError
from outrider.export.damage import slot_damages
from outrider.export.reference import FloatReference
from outrider.export.slots import SlotWeights, matrix_slots
from outrider.quantize.channels import ChannelMatrix, pack_channels
from outrider.quantize.sensitivity import (
    SlotDamage,
    choose_overrides,
    predicted_damage,
    sensitivity_table,
)
from tests import families


class Replaced(SlotWeights):
    """A model in which some matrices are others."""

    def __init__(self, weights: SlotWeights, matrices: Mapping[str, np.ndarray]) -> None:
        self.__dict__.update(weights.__dict__)
        self.matrices = matrices

    def matrix(self, slot: str) -> np.ndarray:
        return self.matrices[slot] if slot in self.matrices else super().matrix(slot)


def texts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(11)
    return [rng.integers(1, families.VOCAB, length) for length in lengths]


def to_four_bits(slot: str, weight: np.ndarray) -> ChannelMatrix:
    return pack_channels(weight, 4, "rtn")


def log_probabilities(weights: SlotWeights, sequences: list[np.ndarray]) -> torch.Tensor:
    reference = FloatReference(weights)
    rows = np.concatenate([rows.copy() for rows in reference.rows(reference.final_states(sequences))])
    return torch.log_softmax(torch.from_numpy(rows), dim=-1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_damage_is_that_of_a_whole_model_with_this_slot_rounded(family: str) -> None:
    weights, sequences = families.weights_of(family, families.oracle(family)), texts(70, 9)
    asked: list[str] = []

    def pack(slot: str, weight: np.ndarray) -> ChannelMatrix:
        asked.append(slot)
        np.testing.assert_array_equal(weight, weights.matrix(slot))
        return to_four_bits(slot, weight)

    slots = matrix_slots(weights.config)[1:]
    found = slot_damages(weights, pack, sequences, slots=slots)
    assert asked == slots == [slot.slot for slot in found]
    exact = log_probabilities(weights, sequences)
    for slot in found:
        packed = to_four_bits(slot.slot, weights.matrix(slot.slot))
        other = log_probabilities(Replaced(weights, {slot.slot: packed.values()}), sequences)
        expected = float((exact.exp() * (exact - other)).sum(-1).mean())
        assert slot.damage == pytest.approx(expected, rel=0.01, abs=1e-6), slot.slot
        assert slot.low_bytes == packed.nbytes
        assert slot.high_bytes == packed.codes.size + packed.scales.nbytes


def test_without_slots_every_matrix_of_the_layers_is_measured_and_progress_is_told() -> None:
    weights = families.weights_of("llama", families.oracle("llama"))
    told: list[float] = []
    found = slot_damages(weights, to_four_bits, texts(8), progress=told.append)
    assert [slot.slot for slot in found] == matrix_slots(weights.config)[1:-1]
    assert told == [0.5, 1.0]


def test_unknown_slots_and_no_text_are_refused() -> None:
    weights = families.weights_of("llama", families.oracle("llama"))
    with pytest.raises(UsageError, match=r"layers\.9\.qkv.*slots are layers\.0\.qkv to head"):
        slot_damages(weights, to_four_bits, texts(8), slots=["layers.9.qkv"])
    with pytest.raises(UsageError, match="no tokens"):
        slot_damages(weights, to_four_bits, [])


FOUND = [
    SlotDamage("layers.0.qkv", 0.02, 100, 200),  # 2.0e-4 a byte
    SlotDamage("layers.0.down", 0.03, 500, 1000),  # 0.6e-4
    SlotDamage("layers.1.qkv", 0.001, 100, 200),  # 0.1e-4
    SlotDamage("layers.1.down", 0.06, 500, 1000),  # 1.2e-4
]


def test_slots_are_taken_by_damage_per_byte_until_the_limit() -> None:
    qkv, down0, down1 = ("layers.0.qkv", 8), ("layers.0.down", 8), ("layers.1.down", 8)
    assert choose_overrides(FOUND, count=1) == (qkv,)
    assert choose_overrides(FOUND, count=2) == (qkv, down1)
    assert choose_overrides(FOUND, count=0) == ()
    assert choose_overrides(FOUND, max_damage=0.04) == (qkv, down1)
    assert choose_overrides(FOUND, max_damage=0.03) == (qkv, down0, down1)
    assert choose_overrides(FOUND, max_damage=1) == ()
    assert len(choose_overrides(FOUND, max_damage=0)) == 4
    # the next slot by damage does not fit any more, a small one behind it does
    assert choose_overrides(FOUND, extra_bytes=300) == (qkv, ("layers.1.qkv", 8))
    assert choose_overrides(FOUND, extra_bytes=600) == (qkv, down1)


@pytest.mark.parametrize("limits", [{}, {"count": 1, "extra_bytes": 5}, {"max_damage": -0.1}])
def test_exactly_one_limit_is_needed(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="exactly one of max_damage, extra_bytes, count"):
        choose_overrides(FOUND, **limits)  # type: ignore[arg-type]


def test_the_table_marks_what_is_kept_and_predicts_what_remains() -> None:
    overrides = choose_overrides(FOUND, count=2)
    assert predicted_damage(FOUND, overrides) == pytest.approx(0.031)
    lines = sensitivity_table(FOUND, overrides).splitlines()
    assert lines[0].split() == ["qkv", "down"]
    assert lines[1].split() == ["layers.0", "20.00*", "30.00"]
    assert lines[2].split() == ["layers.1", "1.00", "60.00*"]
    assert "2 of 4 slots in 8 bits" in lines[3]
    assert "0.0310 nats a token of 0.1110" in lines[3]


def test_a_damage_that_is_no_divergence_and_bits_that_save_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="damage of head is nan"):
        SlotDamage("head", float("nan"), 1, 2)
    with pytest.raises(UsageError, match="head takes 2 bytes"):
        SlotDamage("head", 0.1, 2, 2)
