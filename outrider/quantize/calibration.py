"""Second moments of the activations that meet each weight, for calibrated quantization.

`X^T X / rows` over a calibration text is all that GPTQ needs of the data, and its diagonal weighs the
errors of the `mse` search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError

if TYPE_CHECKING:
    import torch

__all__ = ["Moments", "calibration_text", "collect_moments", "watch"]

FloatArray = NDArray[np.float32]


class Moments:
    """Running second moments per slot. `diagonal` keeps [K] instead of [K, K] a slot."""

    def __init__(self, diagonal: bool = False) -> None:
        self._diagonal = diagonal
        self._sums: dict[str, FloatArray] = {}
        self._rows: dict[str, int] = {}

    def add(self, slot: str, activations: FloatArray) -> None:
        """Count activations [..., K] that entered the slot."""
        x = np.asarray(activations, np.float32).reshape(-1, activations.shape[-1])
        moment = np.einsum("rk,rk->k", x, x) if self._diagonal else x.T @ x
        if slot in self._sums:
            self._sums[slot] += moment
        else:
            self._sums[slot] = moment
        self._rows[slot] = self._rows.get(slot, 0) + len(x)

    def result(self) -> dict[str, FloatArray]:
        """The mean second moment of every slot. Raises ExportError when nothing was counted."""
        if not self._sums:
            raise ExportError("calibration saw no activations; give it at least one batch of tokens")
        return {slot: total / np.float32(self._rows[slot]) for slot, total in self._sums.items()}


def calibration_text() -> str:
    """The WikiText-2 excerpt to calibrate on; it does not overlap the evaluation text."""
    return files("outrider.quantize").joinpath("data/wikitext2_calibration.txt").read_text(encoding="utf-8")


def watch(moments: Moments, slot: str, module: torch.nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Count whatever enters the module, until the handle is removed: for models that are built in layers."""

    def hook(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        moments.add(slot, inputs[0].detach().float().cpu().numpy())

    return module.register_forward_pre_hook(hook)


def collect_moments(
    modules: Mapping[str, torch.nn.Module],
    run: Callable[[Any], object],
    batches: Iterable[Any],
    diagonal: bool = False,
) -> dict[str, FloatArray]:
    """Second moments of the first input of each module (slot -> module) while `run` reads the batches.

    A full moment of width K takes 4 K² bytes: for wide models collect a few layers at a time, or `diagonal`.
    """
    import torch

    moments = Moments(diagonal)
    handles = [watch(moments, slot, module) for slot, module in modules.items()]
    try:
        with torch.no_grad():
            for batch in batches:
                run(batch)
    finally:
        for handle in handles:
            handle.remove()
    return moments.result()
