"""The profiles give back the runs that were published of the devices.

Some of their figures were inferred from these very runs, so this holds profiles and physics together; it does
not prove either right.
"""

from __future__ import annotations

import pytest

from outrider.targets.device import load_device
from outrider.targets.model_cost import ModelCost
from outrider.targets.simulated import Machine

LLAMA_1B_Q4 = ModelCost(0.80e9, 2.5e9, 32_768)
LLAMA_3B_INT4 = ModelCost(1.80e9, 6.4e9, 114_688)
LLAMA_8B_INT4 = ModelCost(4.50e9, 16e9, 131_072)
QWEN_1_5B_4BIT = ModelCost(0.87e9, 3.09e9, 28_672)


def decode(machine: Machine, cost: ModelCost, seconds: float, context: int = 200) -> tuple[float, float]:
    """Tokens a second and joules a token of plain decoding for a while."""
    began, before, tokens = machine.clock(), machine.energy_j, 0
    while machine.clock() - began < seconds:
        machine.execute(None, cost.work(1, context))
        tokens += 1
    return tokens / (machine.clock() - began), (machine.energy_j - before) / tokens


def test_a_raspberry_pi_5_decodes_a_1b_model_as_fast_and_at_the_energy_that_was_measured() -> None:
    speed, joules = decode(Machine(load_device("raspberry-pi-5"), 22.0, jitter=0.0), LLAMA_1B_Q4, 60.0)
    assert speed == pytest.approx(13.9, rel=0.1)
    assert joules == pytest.approx(0.43, rel=0.1)


def test_a_jetson_orin_nano_decodes_an_8b_model_nearly_as_fast_as_its_vendor_says() -> None:
    speed, _ = decode(Machine(load_device("jetson-orin-nano"), 22.0, jitter=0.0), LLAMA_8B_INT4, 30.0)
    assert speed == pytest.approx(19.1, rel=0.15)


def test_an_iphone_16_pro_begins_at_40_tokens_a_second_and_loses_almost_half() -> None:
    machine = Machine(load_device("iphone-16-pro"), 22.0, jitter=0.0)
    cold, _ = decode(machine, QWEN_1_5B_4BIT, 60.0)
    decode(machine, QWEN_1_5B_4BIT, 300.0)
    warm, _ = decode(machine, QWEN_1_5B_4BIT, 60.0)
    assert cold == pytest.approx(40.0, rel=0.1)
    assert warm == pytest.approx(22.6, rel=0.2)


def test_an_iphone_17_pro_sustains_a_3b_model() -> None:
    machine = Machine(load_device("iphone-17-pro"), 22.0, jitter=0.0)
    speed, joules = decode(machine, LLAMA_3B_INT4, 600.0, context=300)
    assert speed == pytest.approx(20.0, rel=0.25)
    assert joules == pytest.approx(0.26, rel=0.3)
    assert machine.energy_j / machine.elapsed_s == pytest.approx(4.5, rel=0.15)
