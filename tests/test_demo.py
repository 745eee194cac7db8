"""What the demonstrations ask the export for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cli import demo, demo_device
from outrider.cli.options import ProgressBar


class AskedError(Exception):
    """Carries what an export was asked for."""


@pytest.mark.parametrize("device", [None, "snapdragon-8-gen3", "iphone-16-pro"])
def test_a_demo_ships_its_coarse_draft_below_the_gate(
    device: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in draft is rounded so coarsely that no gate passes it; without leave the demo ends in an error."""

    def export(options: Any, *rest: Any) -> None:
        raise AskedError(options)

    monkeypatch.setattr("outrider.export.bundle.export_bundle", export)
    monkeypatch.setattr("outrider.export.fetch.fetch", lambda *arguments, **options: Path(__file__))
    pair = demo.PAIRS["smollm2"]
    kind = demo_device.APPLE if device == "iphone-16-pro" else demo_device.SNAPDRAGON
    first = () if device is None else (device, kind)
    make = demo._bundle if device is None else demo_device._bundle
    arguments: tuple[Any, ...] = (pair, tmp_path) if device else (tmp_path, pair)
    with pytest.raises(AskedError) as asked:
        make(*first, *arguments, None, True, ProgressBar())
    (options,) = asked.value.args
    assert options.allow_quality
    assert device is None or options.backends == kind.backends
    assert options.draft.precision == pair.draft_precision
