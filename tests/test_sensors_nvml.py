"""A card is available when a read succeeds, not when NVML starts; what it does not tell has a reason."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest

from outrider.power.monitor import Monitor
from outrider.power.sensors import nvml as module
from outrider.power.sensors.nvml import Nvml
from outrider.power.sensors.system import System, run_command
from outrider.targets.fake import VirtualClock
from tests.sysfs import Board, board_fixture, only, reasons, values  # noqa: F401


class NVMLError(Exception):
    """As the library's own, whose subclasses are made by number."""


class NVMLErrorNotSupported(NVMLError):  # noqa: N818  (the library's name is NVMLError_NotSupported)
    def __str__(self) -> str:
        return "Not Supported"


class FakeNvml(types.SimpleNamespace):
    """`pynvml` with cards of given figures; a figure of None is not supported."""

    def __init__(self, *cards: dict[str, float | None], starts: bool = True) -> None:
        super().__init__()
        self.cards, self.starts, self.inits = cards, starts, 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.inits += 1
        if not self.starts:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, float | None]:  # noqa: N802
        return self.cards[index]

    def __getattr__(self, name: str) -> Any:
        figures = {
            "nvmlDeviceGetTotalEnergyConsumption": "energy_mj",
            "nvmlDeviceGetPowerUsage": "power_mw",
            "nvmlDeviceGetTemperature": "temperature",
            "nvmlDeviceGetClockInfo": "clock_mhz",
            "nvmlDeviceGetMaxClockInfo": "max_mhz",
            "nvmlDeviceGetCurrentClocksThrottleReasons": "reasons",
        }
        if name not in figures:
            raise AttributeError(name)

        def ask(card: dict[str, Any], *_: Any) -> Any:
            value = card.get(figures[name])
            if isinstance(value, Exception):
                raise value
            if value is None:
                raise NVMLErrorNotSupported
            return value

        return ask


CARD: dict[str, float | None] = {
    "energy_mj": 1_234_567,
    "power_mw": 55_000,
    "temperature": 61,
    "clock_mhz": 1530,
    "max_mhz": 1980,
    "reasons": 0,
}


def sensor(board: Board, library: Any) -> Nvml:
    return Nvml(board.system, library)


def test_millijoules_megahertz_and_degrees_get_our_units(board: Board) -> None:
    readings = sensor(board, FakeNvml(CARD)).read()
    assert values(readings, "energy") == {"nvml:0": pytest.approx(1234.567)}
    assert values(readings, "temperature") == {"nvml:0": 61}
    assert values(readings, "clock") == {"nvml:0": 1.53e9}
    assert values(readings, "throttle") == {"nvml:0": 0.0}
    assert {r.method for r in readings if r.quantity == "energy"} == {"counter"}


def test_the_counter_is_preferred_to_a_power_that_is_a_mean_over_a_second(board: Board) -> None:
    assert values(sensor(board, FakeNvml(CARD)).read(), "power") == {}
    old = {**CARD, "energy_mj": None}
    assert values(sensor(board, FakeNvml(old)).read(), "power") == {"nvml:0": 55.0}


def test_power_follows_from_the_counter() -> None:
    clock, card = VirtualClock(), dict(CARD)
    monitor = Monitor([Nvml(System(clock=clock), FakeNvml(card))], clock)
    for _ in range(20):
        state = monitor.poll()
        clock.advance(0.2)
        card["energy_mj"] = (card["energy_mj"] or 0) + 40 * 200
    assert (state.power_w, state.power_scope, state.power_method) == (
        pytest.approx(40.0),
        "package",
        "counter",
    )


def test_on_tegra_nvml_starts_and_tells_nothing(board: Board) -> None:
    """Init succeeds and there is one device, and every query is NotSupported."""
    readings = sensor(board, FakeNvml({})).read()
    assert readings
    assert all(reading.value is None for reading in readings)
    assert "INA" in reasons(readings, "power")["nvml:0"]


@pytest.mark.parametrize(
    ("bits", "held"), [(0x01, 0.0), (0x02, 0.0), (0x04, 0.25), (0x20, 0.25), (0x40, 0.25)]
)
def test_a_low_clock_is_throttling_only_with_such_a_reason(board: Board, bits: int, held: float) -> None:
    """0x01 is idle, 0x02 the clocks that an application asked for."""
    card = {**CARD, "clock_mhz": 1500, "max_mhz": 2000, "reasons": bits}
    assert values(sensor(board, FakeNvml(card)).read(), "throttle") == {"nvml:0": pytest.approx(held)}


def test_an_idle_cards_low_clock_is_no_sign_of_heat(board: Board) -> None:
    card = {**CARD, "clock_mhz": 210, "reasons": 0x01}
    clock = board.clock
    assert Monitor([sensor(board, FakeNvml(card))], clock).poll().clock_ratio is None


def test_one_card_that_fails_does_not_hide_another(board: Board) -> None:
    lost: dict[str, Any] = dict.fromkeys(CARD, NVMLError("Unknown Error"))
    readings = sensor(board, FakeNvml(lost, CARD)).read()
    assert values(readings, "temperature") == {"nvml:1": 61}
    assert reasons(readings, "temperature") == {"nvml:0": "NVML: Unknown Error"}


def test_a_card_that_was_lost_is_looked_for_again(board: Board) -> None:
    library = FakeNvml({**CARD, "temperature": NVMLError("GPU is lost")})  # type: ignore[dict-item]
    lost = sensor(board, library)
    lost.read()
    library.cards = (CARD,)
    assert values(lost.read(), "temperature") == {"nvml:0": 61}
    assert library.inits == 2


def test_without_the_bindings_the_reason_is_the_pip_install(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    (reading,) = sensor(board, None).read()
    assert reading.value is None
    assert "pip install 'outrider[nvml]'" in reading.reason


def test_without_the_driver_the_reason_says_so_and_it_is_tried_again(board: Board) -> None:
    library = FakeNvml(CARD, starts=False)
    waiting = sensor(board, library)
    (reading,) = waiting.read()
    assert "driver" in reading.reason
    library.starts = True
    assert values(waiting.read(), "temperature") == {"nvml:0": 61}


def test_the_bindings_are_taken_from_the_installed_library(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.importlib, "import_module", lambda name: {"pynvml": FakeNvml(CARD)}[name])
    assert values(sensor(board, None).read(), "temperature") == {"nvml:0": 61}


def test_the_card_of_this_machine_is_not_taken_for_that_of_another(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert Nvml.find(System(tmp_path, run=run_command)) == []


def test_a_machine_that_shows_a_card_has_a_source_readable_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib, "import_module", lambda name: FakeNvml(starts=False))
    monkeypatch.setattr(module, "_NODES", ("/dev/null",))
    (reading,) = only(Nvml.find(System())).read()
    assert "driver" in reading.reason
    monkeypatch.setattr(module, "_NODES", ("/dev/no-such-card",))
    assert Nvml.find(System()) == []
    monkeypatch.setattr(module.importlib, "import_module", lambda name: FakeNvml(CARD))
    assert len(Nvml.find(System())) == 1


def test_the_library_of_the_extra_has_what_is_asked_of_it() -> None:
    pynvml = pytest.importorskip("pynvml", reason="the extra nvml is not installed")
    source = Path(module.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r"\.(nvml[A-Z]\w+)", source)) | {"nvmlDeviceGetCurrentClocksEventReasons"}
    assert len(names) >= 9
    assert not [name for name in names if not hasattr(pynvml, name)]
    assert (pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_CLOCK_SM) == (
        module._NVML_TEMPERATURE_GPU,
        module._NVML_CLOCK_SM,
    )
    reasons = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    bits = [getattr(pynvml, f"nvmlClocksThrottleReason{name}") for name in reasons]
    assert sum(bits) == module._HELD_BACK


def test_a_machine_without_nvidia_s_driver_gets_a_reason_from_the_real_library() -> None:
    pytest.importorskip("pynvml", reason="the extra nvml is not installed")
    if any(Path(node).exists() for node in module._NODES):
        pytest.skip("this machine has an NVIDIA device")
    (reading,) = Nvml(System()).read()
    assert reading.value is None
    assert "NVML" in reading.reason
