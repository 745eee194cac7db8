"""Which weights keep 8 bits in a 4-bit model: those that do the most damage for the bytes they save.

The damage of a slot is measured with that slot alone in few bits (`export.damage`), as the divergence of the
next-token distribution from the float model's. Such divergences nearly add up over slots, as long as the sum is
small, so what is left after some slots went back to 8 bits can be predicted and held below a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from outrider.errors import UsageError

__all__ = ["SlotDamage", "choose_overrides", "predicted_damage", "sensitivity_table"]


@dataclass(frozen=True)
class SlotDamage:
    """What few bits in one slot cost, and what more of them would."""

    slot: str
    damage: float  # nats a token, KL(float || this slot alone in few bits)
    low_bytes: int  # of the slot in few bits
    high_bytes: int  # of the slot in 8 bits

    def __post_init__(self) -> None:
        """Refuse a damage that is no number, and bits that save nothing."""
        if not isfinite(self.damage) or self.damage < 0:
            raise UsageError(
                f"the damage of {self.slot} is {self.damage}; it is a divergence of 0 or more nats"
            )
        if not 0 < self.low_bytes < self.high_bytes:
            raise UsageError(
                f"{self.slot} takes {self.low_bytes} bytes in few bits and {self.high_bytes} in 8"
            )

    @property
    def extra_bytes(self) -> int:
        """What 8 bits cost more."""
        return self.high_bytes - self.low_bytes


def choose_overrides(
    found: Sequence[SlotDamage],
    *,
    max_damage: float | None = None,
    extra_bytes: int | None = None,
    count: int | None = None,
) -> tuple[tuple[str, int], ...]:
    """The slots to keep in 8 bits, as overrides (slot, 8) in the order of `found`.

    Slots are taken by damage per extra byte, until one of three limits: the damage of the slots that remain is
    at most `max_damage` nats, the next slot would exceed `extra_bytes` (smaller ones behind it may still fit), or
    `count` slots are taken. Raises UsageError unless exactly one limit is given.
    """
    limits = {"max_damage": max_damage, "extra_bytes": extra_bytes, "count": count}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if len(given) != 1 or min(given.values(), default=0) < 0:
        raise UsageError(f"give exactly one of {', '.join(limits)}, 0 or more; got {given or 'none'}")
    chosen: set[str] = set()
    remaining = sum(slot.damage for slot in found)
    spent = 0
    for slot in sorted(found, key=lambda slot: slot.damage / slot.extra_bytes, reverse=True):
        if (max_damage is not None and remaining <= max_damage) or len(chosen) == count:
            break
        if extra_bytes is not None and spent + slot.extra_bytes > extra_bytes:
            continue
        chosen.add(slot.slot)
        remaining -= slot.damage
        spent += slot.extra_bytes
    return tuple((slot.slot, 8) for slot in found if slot.slot in chosen)


def predicted_damage(found: Sequence[SlotDamage], overrides: Sequence[tuple[str, int]]) -> float:
    """The sum of the damages of the slots without an override, in nats a token."""
    kept = {slot for slot, _ in overrides}
    return sum(slot.damage for slot in found if slot.slot not in kept)


def sensitivity_table(found: Sequence[SlotDamage], overrides: Sequence[tuple[str, int]]) -> str:
    """Rows by layer and columns by part, damages in thousandths of a nat, `*` where 8 bits are kept."""
    kept = {slot for slot, _ in overrides}
    cells: dict[str, dict[str, str]] = {}
    parts: dict[str, None] = {}
    for slot in found:
        row, _, part = slot.slot.rpartition(".")
        parts[part] = None
        cells.setdefault(row, {})[part] = f"{1e3 * slot.damage:.2f}{'*' if slot.slot in kept else ' '}"
    width = max([10, *(len(row) for row in cells)])
    lines = ["".join([" " * width, *(f"{part:>12}" for part in parts)])]
    lines += [
        "".join([f"{row:{width}}", *(f"{columns.get(part, ''):>12}" for part in parts)])
        for row, columns in cells.items()
    ]
    bytes_kept = sum(slot.extra_bytes for slot in found if slot.slot in kept)
    return "\n".join(
        [
            *lines,
            f"{len(kept)} of {len(found)} slots in 8 bits (*), {bytes_kept / 1e6:.1f} MB more; the others together: "
            f"{predicted_damage(found, overrides):.4f} nats a token of {predicted_damage(found, ()):.4f}",
        ]
    )
