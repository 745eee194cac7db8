"""How a weight matrix may be stored: schemes, recipes that assign them to slots, and the packed result.

A *slot* is a place in a decoder that holds one weight: `embedding`, `layers.3.qkv`, `layers.3.attn_out`,
`layers.3.gate_up`, `layers.3.down`, `head`. Fused slots (qkv, gate_up) are row-wise concatenations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UsageError

__all__ = [
    "AnyScheme",
    "BlockInt",
    "Carry",
    "DynamicInt8",
    "Float",
    "PackedMatrix",
    "RawBlocks",
    "Recipe",
    "Scheme",
]

BLOCK_SIZES = (16, 32, 64, 128, 256)
METHODS = ("rtn", "mse", "hqq", "gptq")


@dataclass(frozen=True)
class Float:
    """Keep floating point."""

    dtype: Literal["float32", "float16"] = "float32"


@dataclass(frozen=True)
class BlockInt:
    """Integer blocks along K with one scale each (`MatMulNBits`); activations stay row-independent.

    `method`: `rtn` round to nearest, `mse` a per-block search of the scale, `hqq` half-quadratic
    quantization (Badri & Shaji 2023), `gptq` error compensation from calibration data (Frantar et al. 2022).
    `accuracy_level` 4 quantizes activations per row and block to int8 inside the kernel, 1 keeps float32.
    """

    bits: Literal[4, 8] = 4
    block: int = 32
    symmetric: bool = True
    method: Literal["rtn", "mse", "hqq", "gptq"] = "rtn"
    accuracy_level: int = 4

    def __post_init__(self) -> None:
        """Refuse what no kernel holds."""
        if self.bits not in (4, 8):
            raise UsageError(f"bits is {self.bits}; block-wise weights hold 4 or 8 bits")
        if self.block not in BLOCK_SIZES:
            raise UsageError(f"block is {self.block}; known block sizes: {BLOCK_SIZES}")
        if self.method not in METHODS:
            raise UsageError(f"method is {self.method!r}; known methods: {', '.join(METHODS)}")


@dataclass(frozen=True)
class DynamicInt8:
    """INT8 weights per output channel, activations quantized per tensor at run time: for drafts only.

    One activation scale for a whole forward couples the rows of a verify, so a target may not use it.
    """


Scheme = Float | BlockInt | DynamicInt8


@dataclass(frozen=True)
class Carry:
    """Follow the source's own blocks where it has some; `otherwise` is the scheme of float sources.

    Blocks without a minimum (Q4_0, Q5_0, Q8_0, Q6_K) are carried exactly. For blocks with one (Q4_1, Q5_1,
    Q4_K, Q5_K) `minimum` chooses: `correction` keeps it by zero points and columns for block sums, `round`
    rounds again into `eight_bit` (error about 1/60 of the source's own step at block 32).
    With `wide` set to `round`, sources of more than 4 bits are rounded into `eight_bit` too: a kernel reads
    8-bit blocks of 128 up to twice as fast as the blocks of 16 that Q6_K would need.
    """

    otherwise: BlockInt = field(default_factory=lambda: BlockInt(bits=8, block=32))
    minimum: Literal["correction", "round"] = "correction"
    wide: Literal["exact", "round"] = "exact"
    eight_bit: BlockInt = field(default_factory=lambda: BlockInt(bits=8, block=32))

    def __post_init__(self) -> None:
        """Refuse unknown ways."""
        if self.minimum not in ("correction", "round"):
            raise UsageError(f"minimum is {self.minimum!r}; known ways: correction, round")
        if self.wide not in ("exact", "round"):
            raise UsageError(f"wide is {self.wide!r}; known ways: exact, round")


AnyScheme = Scheme | Carry


@dataclass(frozen=True)
class Recipe:
    """A scheme for every slot: `overrides` (glob pattern, scheme), first match wins, before the defaults."""

    name: str
    linear: AnyScheme
    head: AnyScheme
    embedding: AnyScheme
    overrides: tuple[tuple[str, AnyScheme], ...] = ()

    def scheme_for(self, slot: str) -> AnyScheme:
        """The scheme of one slot."""
        for pattern, scheme in self.overrides:
            if fnmatchcase(slot, pattern):
                return scheme
        return {"head": self.head, "embedding": self.embedding}.get(slot, self.linear)


@dataclass(frozen=True)
class RawBlocks:
    """A weight as a GGUF file stores it: ggml type name and its bytes, row by row."""

    type_name: str  # "Q4_1", "Q6_K", ...
    shape: tuple[int, int]  # (N, K)
    data: NDArray[np.uint8]  # [N, bytes per row]


@dataclass(frozen=True)
class PackedMatrix:
    """A weight [N, K] under a scheme, in the layout of the kernel that reads it.

    For `BlockInt`: `codes` uint8 [N, blocks, block*bits/8] (low nibble first), `scales` float32 [N, blocks],
    `zero_points` uint8 ([N, blocks] for 8 bits, [N, ceil(blocks/2)] for 4, low nibble first) or None for
    the middle value. For `Float`: `codes` [N, K]. For `DynamicInt8`: `codes` int8 [N, K],
    `scales` [N]. `correction` float32 [N, blocks], if any, is added exactly:
    y += block_sums(x) @ correction.T
    """

    scheme: Scheme
    shape: tuple[int, int]
    codes: NDArray[np.generic]
    scales: NDArray[np.float32] | None = None
    zero_points: NDArray[np.uint8] | None = None
    correction: NDArray[np.float32] | None = None
    carried: bool = False  # no second rounding: the codes are the source's own
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that ships."""
        parts = (self.codes, self.scales, self.zero_points, self.correction)
        return sum(part.nbytes for part in parts if part is not None)
