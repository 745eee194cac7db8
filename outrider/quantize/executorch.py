"""Integers for ExecuTorch's delegates: signed codes around zero, one scale a group or a row.

The layout is torchao's `IntxUnpackedToInt8Tensor`: int8 codes [N, K] and scales [N, K / group]. XNNPACK packs
two 4-bit codes a byte and rounds the scales of groups to bfloat16, so they are rounded before the codes are
chosen. Activations are quantized per row (torchao's `8da4w`, `8da8w`): rows of a verify stay independent.

A GGUF file's own 4-bit blocks are carried: their codes as they are, and minima as a float matrix over the sums
of blocks of x. Blocks of more bits become 8-bit rows, where the delegate has a kernel for those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ExportError, UsageError
from outrider.quantize.carry import carried_scheme, carry
from outrider.quantize.layout import over_chunks, unpack_nibbles
from outrider.quantize.registry import named
from outrider.quantize.report import SlotReport
from outrider.quantize.schemes import Carry, RawBlocks

__all__ = [
    "EXECUTORCH_RECIPES",
    "GROUP_UNIT",
    "ExecutorchRecipe",
    "IntxScheme",
    "IntxWeight",
    "carry_slot",
    "check_quantized",
    "dequantize",
    "describe_slot",
    "executorch_recipe",
    "quantize",
]

FloatArray = NDArray[np.float32]
GROUP_UNIT = 32  # XNNPACK takes groups of a multiple of this
PEAKS = (7.0, 7.5, 8.0, 8.4, 6.6, 9.0)  # codes that a group's largest magnitude may map to, of 4 bits
SMALLEST = np.float32(2.0**-100)  # a scale has to be positive, normal and representable in bfloat16


@dataclass(frozen=True)
class IntxScheme:
    """Signed integers of 4 or 8 bits; `group` inputs share a scale, None = a whole row does.

    `method`: `rtn` maps the largest magnitude of a group to the end of the range, `mse` searches the scale;
    `carried` are a source's own blocks and no choice of a recipe.
    """

    bits: Literal[4, 8]
    group: int | None = None
    method: Literal["rtn", "mse", "carried"] = "rtn"

    def __post_init__(self) -> None:
        """Refuse what no delegate holds."""
        if self.bits not in (4, 8):
            raise UsageError(f"bits is {self.bits}; ExecuTorch weights hold 4 or 8 bits")
        if self.group is not None and (self.bits == 8 or self.group < 1 or self.group % GROUP_UNIT):
            raise UsageError(
                f"group is {self.group} at {self.bits} bits; XNNPACK takes multiples of {GROUP_UNIT} at 4 bits, "
                "and whole rows (None) at 8"
            )

    @property
    def name(self) -> str:
        """Such as `int4-b32-mse` or `int8-rows`."""
        parts = [f"int{self.bits}", "rows" if self.group is None else f"b{self.group}"]
        return "-".join(parts + ([self.method] if self.method != "rtn" else []))


@dataclass(frozen=True)
class ExecutorchRecipe:
    """A scheme for every slot, None = float32; `overrides` (glob pattern, scheme) win over the rest."""

    name: str
    linear: IntxScheme | None
    head: IntxScheme | None
    embedding: IntxScheme | None
    overrides: tuple[tuple[str, IntxScheme | None], ...] = ()

    def scheme_for(self, slot: str) -> IntxScheme | None:
        """The scheme of one slot."""
        for pattern, scheme in self.overrides:
            if fnmatchcase(slot, pattern):
                return scheme
        return {"head": self.head, "embedding": self.embedding}.get(slot, self.linear)


ROWS8, GROUPS4 = IntxScheme(8), IntxScheme(4, 32, "mse")
EXECUTORCH_RECIPES: dict[str, ExecutorchRecipe] = {
    recipe.name: recipe
    for recipe in (
        ExecutorchRecipe("fp32", None, None, None),
        ExecutorchRecipe("8da4w", GROUPS4, GROUPS4, ROWS8),
        ExecutorchRecipe("8da8w", ROWS8, ROWS8, ROWS8),
    )
}
"""Every named recipe."""


def executorch_recipe(name: str) -> ExecutorchRecipe:
    """The recipe of this name. Raises UsageError that lists the known names and the nearest one."""
    return named(EXECUTORCH_RECIPES, name, "ExecuTorch precision")


class IntxWeight(NamedTuple):
    """value = code * scale of its group, plus the minimum of its block of 32 where there are minima."""

    codes: NDArray[np.int8]  # [N, K]
    scales: FloatArray  # [N, K / group]
    minima: FloatArray | None = None  # [N, K / 32]


def carry_slot(
    weight: FloatArray,  # [N, K]
    scheme: IntxScheme,
    raw: Sequence[RawBlocks] | None,
    *,
    rows: bool = True,
) -> tuple[IntxScheme, IntxWeight] | None:
    """What a 4-bit scheme becomes for a source with blocks of its own, or None when it is quantized anew.

    Blocks of 4 bits are carried, wider ones become 8-bit rows if the delegate takes `rows`.
    """
    if not raw or scheme.group != GROUP_UNIT:
        return None
    target = carried_scheme([part.type_name for part in raw], Carry())
    if target is not None and target.bits == 4:
        return IntxScheme(4, GROUP_UNIT, "carried"), _carried(raw)
    return (ROWS8, quantize(weight, ROWS8)) if target is not None and rows else None


def _carried(raw: Sequence[RawBlocks]) -> IntxWeight:
    """A source's own 4-bit blocks. A negative scale turns its codes around: d c = |d| (-c - 1) + |d|."""
    packed = carry(raw, Carry())
    assert packed is not None
    assert packed.scales is not None
    N, K = packed.shape
    codes = unpack_nibbles(packed.codes.astype(np.uint8, copy=False), GROUP_UNIT).astype(np.int8) - np.int8(8)
    negative = packed.scales < 0  # [N, K / 32]
    codes = np.where(negative[..., None], np.int8(-1) - codes, codes)
    minima = packed.correction
    if negative.any():
        shift = np.where(negative, -packed.scales, np.float32(0))
        minima = shift if minima is None else minima + shift
    scales = _storable(np.abs(packed.scales), IntxScheme(4, GROUP_UNIT))
    return IntxWeight(codes.reshape(N, K), scales, minima)


def quantize(
    weight: FloatArray,  # [N, K]
    scheme: IntxScheme,
    importance: FloatArray | None = None,  # [K], mean squares of the inputs
) -> IntxWeight:
    """Codes and scales of a weight. Raises ExportError when its groups do not divide K."""
    K = weight.shape[1]
    group = scheme.group or K
    if K % group:
        raise ExportError(
            f"groups of {group} do not divide the {K} inputs of a weight; choose 8da8w (one scale a row)"
        )

    def run(rows: slice) -> IntxWeight:
        blocks = np.ascontiguousarray(weight[rows], np.float32).reshape(-1, K // group, group)
        scales = _scales(blocks, scheme, importance)
        return IntxWeight(_codes(blocks, scales, scheme.bits).reshape(-1, K), scales)

    parts = over_chunks(run, (len(weight), K))
    return IntxWeight(*(np.concatenate([part[field] for part in parts]) for field in (0, 1)))


def dequantize(weight: IntxWeight) -> FloatArray:
    """The float32 values [N, K]."""
    N, K = weight.codes.shape
    blocks = weight.codes.reshape(N, weight.scales.shape[1], -1).astype(np.float32)
    blocks *= weight.scales[..., None]
    if weight.minima is not None:
        blocks += weight.minima[..., None]
    values: FloatArray = blocks.reshape(N, K)
    return values


def _scales(blocks: FloatArray, scheme: IntxScheme, importance: FloatArray | None) -> FloatArray:
    peak = np.abs(blocks).max(axis=-1)  # [n, B]
    if scheme.method == "rtn" or scheme.bits == 8:
        return _storable(peak / np.float32((1 << scheme.bits - 1) - 1), scheme)
    weights = _by_magnitude(blocks) if importance is None else importance.reshape(blocks.shape[1:])
    best_error = np.full(peak.shape, np.inf, np.float32)
    best: FloatArray = np.zeros_like(peak)
    for top in PEAKS:
        scale = _storable(_refit(blocks, _storable(peak / np.float32(top), scheme), weights), scheme)
        wrong = blocks - _codes(blocks, scale, scheme.bits) * scale[..., None]
        error = np.einsum("nbi,nbi->nb", wrong, wrong * weights)
        best = np.where(error < best_error, scale, best)
        best_error = np.minimum(error, best_error)
    return best


def _refit(blocks: FloatArray, scale: FloatArray, weights: FloatArray) -> FloatArray:
    """The least-squares scale of the codes that a scale gives."""
    weighed = _codes(blocks, scale, 4) * weights
    top = np.einsum("nbi,nbi->nb", blocks, weighed)
    bottom = np.einsum("nbi,nbi->nb", _codes(blocks, scale, 4), weighed)
    fitted: FloatArray = np.divide(top, bottom, out=scale.copy(), where=bottom > 0)
    return fitted


def _by_magnitude(blocks: FloatArray) -> FloatArray:
    # Without calibration larger weights count more; see quantize/methods.py for what that gains.
    squares = blocks * blocks
    weights: FloatArray = np.sqrt(squares + squares.mean(axis=(1, 2), keepdims=True))
    return weights


def _storable(scale: FloatArray, scheme: IntxScheme) -> FloatArray:
    """Positive scales; those of groups rounded to bfloat16 (nearest, ties to even)."""
    scale = np.maximum(scale, SMALLEST).astype(np.float32)
    if scheme.group is None:
        return scale
    bits = scale.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def _codes(blocks: FloatArray, scales: FloatArray, bits: int) -> NDArray[np.int8]:
    half = 1 << bits - 1
    codes = np.rint(blocks * np.reciprocal(scales)[..., None])
    return np.clip(codes, -half, half - 1).astype(np.int8)


def describe_slot(
    slot: str,
    weight: FloatArray,
    scheme: IntxScheme | None,
    packed: IntxWeight | None,
    raw: Sequence[RawBlocks] | None = None,
) -> SlotReport:
    """The report line of one weight; `packed` None means that it stayed in float32."""
    before = "+".join(dict.fromkeys(part.type_name for part in raw)) if raw else str(weight.dtype)
    if scheme is None or packed is None:
        size, error, after, reason = weight.nbytes, 0.0, "fp32", "left in float32: the recipe says so"
    else:
        wide = 2 if scheme.group else 4
        size = packed.codes.size * scheme.bits // 8 + packed.scales.size * wide
        size += 0 if packed.minima is None else packed.minima.nbytes
        lost, total = np.linalg.norm(weight - dequantize(packed)), np.linalg.norm(weight)
        error, after = float(lost / total) if total else float(lost), scheme.name
        reason = _reason(scheme, packed, raw)
    return SlotReport(
        slot=slot,
        shape=(weight.shape[0], weight.shape[1]),
        before=before,
        after=after,
        bytes_before=sum(part.data.nbytes for part in raw) if raw else weight.nbytes,
        bytes_after=int(size),
        relative_error=error,
        carried=scheme is not None and scheme.method == "carried",
        reason=reason,
    )


def _reason(scheme: IntxScheme, packed: IntxWeight, raw: Sequence[RawBlocks] | None) -> str:
    if scheme.method == "carried":
        minima = "" if packed.minima is None else ", minima as float32 over block sums"
        return f"the source's own blocks, scales in bfloat16{minima}"
    if raw and any(part.type_name.startswith("Q") for part in raw):
        return f"rounded a second time: {scheme.name} cannot hold these blocks"
    return "quantized"


def check_quantized(
    recipe: ExecutorchRecipe, slots: Sequence[SlotReport], expected: int, lowered: Mapping[str, int]
) -> None:
    """Refuse a recipe that changed nothing, or whose products did not all reach a delegate as integers.

    `expected` counts the products with integer weights; `lowered` says how many a delegate took (`delegated`)
    and how many were left to run in float (`left`). Raises ExportError.
    """
    schemes = [recipe.linear, recipe.head, recipe.embedding, *(scheme for _, scheme in recipe.overrides)]
    if all(scheme is None for scheme in schemes):
        return
    if all(slot.after == "fp32" for slot in slots):
        patterns = ", ".join(pattern for pattern, _ in recipe.overrides) or "none"
        raise ExportError(
            f"recipe {recipe.name!r} quantized none of {len(slots)} weights; overrides: {patterns}. "
            "Check them against the slot names, such as layers.0.down, head, embedding"
        )
    if lowered["delegated"] != expected or lowered["left"]:
        raise ExportError(
            f"recipe {recipe.name!r}: {lowered['delegated']} of {expected} quantized products reached the "
            f"delegate and {lowered['left']} run outside it in float; choose another precision or backend"
        )
