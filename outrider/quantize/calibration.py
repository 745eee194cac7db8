"""Second moments of the activations that meet each weight, for calibrated quantization.

`X^T X / rows` over a calibration text is all that GPTQ needs of the data, and its diagonal weighs the
errors of the `mse` search.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError
from outrider.quantize.carry import carried_scheme, rounded_scheme
from outrider.quantize.schemes import AnyScheme, BlockInt, Carry

if TYPE_CHECKING:
    import torch

__all__ = [
    "GPTQ_INPUTS",
    "TOKENS",
    "Moments",
    "calibrated_scheme",
    "calibration_text",
    "needed_moment",
    "watch",
]

FloatArray = NDArray[np.float32]

TOKENS = 2048  # of calibration text
FIRST_TOKEN = 50  # tokens that the first counts for where keys are computed: attention rests on it
GPTQ_INPUTS = 4096  # a second moment of so many inputs takes 64 MB, inverting it several times that


def calibrated_scheme(scheme: AnyScheme, inputs: int | None) -> AnyScheme:
    """The scheme with `mse` in place of `gptq` where a weight reads more than `GPTQ_INPUTS` values, or none.

    `inputs` is None for an embedding, which is looked up and not multiplied.
    """
    if isinstance(scheme, Carry):
        otherwise, eight_bit = _calibrated(scheme.otherwise, inputs), _calibrated(scheme.eight_bit, inputs)
        return replace(scheme, otherwise=otherwise, eight_bit=eight_bit)
    return _calibrated(scheme, inputs) if isinstance(scheme, BlockInt) else scheme


def _calibrated(scheme: BlockInt, inputs: int | None) -> BlockInt:
    wide = inputs is None or inputs > GPTQ_INPUTS
    return replace(scheme, method="mse") if scheme.method == "gptq" and wide else scheme


def needed_moment(scheme: AnyScheme, types: Sequence[str]) -> Literal["full", "diagonal"] | None:
    """The moment that packing a source of these ggml types (none = float) uses: none where it is carried."""
    if isinstance(scheme, Carry | BlockInt) and carried_scheme(types, scheme) is not None:
        return None
    if isinstance(scheme, Carry):
        scheme = rounded_scheme(types, scheme)
    if not isinstance(scheme, BlockInt):
        return None
    return "full" if scheme.method == "gptq" else "diagonal" if scheme.method == "mse" else None


class Moments:
    """Running second moments per slot: [K, K] for the slots of `full`, the diagonal [K] for others.

    In the slots of `keys` all tokens count alike, however strong, and the first of every sequence `FIRST_TOKEN` times.
    """

    def __init__(self, full: Collection[str] = (), keys: Collection[str] = ()) -> None:
        self._full, self._keys = full, keys
        self._sums: dict[str, FloatArray] = {}
        self._rows: dict[str, int] = {}

    def add(self, slot: str, activations: FloatArray) -> None:
        """Count activations [..., K] of a sequence that entered the slot."""
        x = np.asarray(activations, np.float32).reshape(-1, activations.shape[-1])
        if slot in self._keys:
            x = x * np.sqrt(_key_weights(x))
        moment = x.T @ x if slot in self._full else np.einsum("rk,rk->k", x, x)
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


def _key_weights(x: FloatArray) -> FloatArray:
    """What each token [S, K] of a sequence counts [S, 1], one on the average.

    The first token, on which attention rests, reads less than a quarter of the others' strength in SmolLM2's layers 12
    to 27, so that GPTQ would spoil its keys to make up for errors of others. With only `qkv` of these layers rounded
    the mean KL, simulated in floating point, is 0.110 with tokens by their strength, 0.022 so, and 0.047 by `mse`.
    """
    weights = 1 / np.maximum(np.einsum("sk,sk->s", x, x), np.float32(1e-20))
    weights[0] *= FIRST_TOKEN
    weights *= len(x) / weights.sum()
    return np.asarray(weights[:, None], np.float32)


def calibration_text() -> str:
    """The WikiText-2 excerpt to calibrate on; it does not overlap the evaluation text."""
    return files("outrider.quantize").joinpath("data/wikitext2_calibration.txt").read_text(encoding="utf-8")


def watch(moments: Moments, slot: str, module: torch.nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Count whatever enters the module, until the handle is removed: for models that are built in layers."""

    def hook(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        moments.add(slot, inputs[0].detach().float().cpu().numpy())

    return module.register_forward_pre_hook(hook)
