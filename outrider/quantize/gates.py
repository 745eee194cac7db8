"""What a quantized graph must reach beside its float reference before it ships, by recipe.

A graph fails where its figures rule out that it meets the gate: had it met it, chance would show figures as bad as
these in less than one of twenty cases. So few positions, as of a slow emulator, condemn only what is clearly wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

from outrider.quantize.quality import GraphQuality

__all__ = ["GATES", "Gate", "gate_for", "shortfalls"]

CHANCE = 0.05
ONE_SIDED = 1.645  # standard errors that a mean is off by chance in one of twenty cases


@dataclass(frozen=True)
class Gate:
    """Bounds of a recipe (a glob pattern): KL in nats, agreement where the reference is clear, loss of Σ min(p, q)."""

    recipe: str
    kl: float
    top1_clear: float
    sum_min_loss: float


GATES: tuple[Gate, ...] = (
    Gate("fp32", 0.001, 0.999, 0.005),
    Gate("fp16", 0.01, 0.995, 0.01),
    Gate("a16w8", 0.1, 0.99, 0.02),
    Gate("a16w4", 0.3, 0.95, 0.06),
    Gate("lut6", 0.1, 0.98, 0.03),
    Gate("lut4-mix", 0.4, 0.93, 0.1),
    Gate("lut4", 0.7, 0.85, 0.2),
    Gate("8da8w", 0.1, 0.98, 0.03),
    Gate("8da4w", 0.4, 0.93, 0.08),
    Gate("int8*", 0.2, 0.97, 0.03),
    Gate("*", 0.7, 0.9, 0.1),
)
"""The first whose pattern matches holds."""


def gate_for(recipe: str) -> Gate:
    """The gate of a recipe."""
    return next(gate for gate in GATES if fnmatchcase(recipe, gate.recipe))


def shortfalls(quality: GraphQuality, gate: Gate) -> list[str]:
    """Which bounds the figures rule out, each with the figure and the bound; none = it passes."""
    found = []
    if not quality.kl <= gate.kl:  # NaN is no pass
        found.append(f"KL {quality.kl:.3f} nats, at most {gate.kl:g}")
    agreed = quality.top1_agreement_clear
    if (
        agreed is not None
        and _chance_of_so_few(round(agreed * quality.clear), quality.clear, gate.top1_clear) < CHANCE
    ):
        found.append(
            f"top-1 agreement {agreed:.3f} at {quality.clear} clear positions, at least {gate.top1_clear:g}"
        )
    if quality.sum_min_pq is not None and quality.sum_min_pq_float is not None:
        loss = quality.sum_min_pq_float - quality.sum_min_pq
        if not loss - ONE_SIDED * (quality.sum_min_pq_error or 0.0) <= gate.sum_min_loss:
            found.append(
                f"Σ min(p, q) {quality.sum_min_pq:.3f}, {loss:.3f} below the float draft's, at most "
                f"{gate.sum_min_loss:g}"
            )
    return found


def _chance_of_so_few(hits: int, trials: int, rate: float) -> float:
    """P(X <= hits) of a binomial of `trials` at `rate`."""
    misses = trials - hits
    fewer = math.fsum(math.comb(trials, k) * (1 - rate) ** k * rate ** (trials - k) for k in range(misses))
    return 1.0 - fewer
