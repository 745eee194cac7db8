"""What rounds cost in seconds: measured by width and drafter, and kept up to date as they run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from outrider.contracts import Costs, Energy

__all__ = ["PRIOR_SLOPE", "CostEstimates", "by_width", "snap", "verify_time"]

FIRST_PIECE = 32  # tokens of a first catch-up, after which the price of one is known
FAR_BEHIND = 8  # tokens that a drafter must run first: from here on that is a catch-up, not part of its step
NO_MORE = 2  # tokens that a drafter has not seen after any round: a last draft and the bonus
PRIOR_DRAFT = 0.25  # a draft step, as a share of a plain step, until it is measured
_SHORTEST_S = 1e-9  # a forward takes time, whatever a coarse clock says
PRIOR_SLOPE = 0.25  # a verify token more, as a share of a plain step, until widths are measured
_UNPROVEN = 1.2  # times what is expected of a width, that its first forward is believed to take
_CATCH_UP_SHARE = 0.2  # a token of a draft's catch-up, as a share of its draft step, until measured


def verify_time(verify_s: Mapping[int, float], width: int) -> float:
    """Seconds of a verify forward, between the measured widths and beyond them; never falls with width."""
    return _read(_monotone(verify_s), width)


def _read(curve: list[tuple[int, float]], width: int) -> float:
    """Interpolate a monotone curve; one point is continued with the prior slope."""
    if len(curve) == 1:
        ((known, seconds),) = curve
        base = seconds / (1.0 + PRIOR_SLOPE * (known - 1))
        return base * (1.0 + PRIOR_SLOPE * (width - 1))
    if width <= curve[0][0]:
        return curve[0][1]
    for (w0, t0), (w1, t1) in pairwise(curve):
        if width <= w1:
            return t0 + (t1 - t0) * (width - w0) / (w1 - w0)
    (w0, t0), (w1, t1) = curve[-2:]
    slope = max((t1 - t0) / (w1 - w0), (t1 - curve[0][1]) / (w1 - curve[0][0]))
    return t1 + slope * (width - w1)


def _monotone(measured: Mapping[int, float]) -> list[tuple[int, float]]:
    """The non-decreasing curve nearest to the measurements (pool adjacent violators)."""
    pools: list[tuple[list[int], float]] = []
    for width in sorted(measured):
        widths, seconds = [width], measured[width]
        while pools and pools[-1][1] > seconds:
            earlier, mean = pools.pop()
            seconds = (mean * len(earlier) + seconds * len(widths)) / (len(earlier) + len(widths))
            widths = earlier + widths
        pools.append((widths, seconds))
    return [(width, seconds) for widths, seconds in pools for width in widths]


def by_width(measured: Mapping[int, float], widths: tuple[int, ...] | None, k_max: int) -> list[float]:
    """Seconds or joules of a verify forward for k = 0..k_max drafts, from what was measured by width."""
    curve = _monotone(measured)
    return [_read(curve, snap(k + 1, widths)) for k in range(k_max + 1)]


def snap(width: int, widths: tuple[int, ...] | None) -> int:
    """The compiled width that a forward of `width` tokens runs at."""
    return width if widths is None else min((w for w in widths if w >= width), default=width)


class CostEstimates:
    """Moving averages of a verify forward by width, a draft step and a catch-up token by drafter.

    What runs for the first time may have to load or set up something, and what seems too slow is not run again: a first
    figure counts as little more than was expected, and after the second the lesser of the two counts.
    `stored` is what `to_dict` returned earlier.
    """

    _alpha = 0.2
    _coupling = 0.7  # how far widths that were not run follow one that was

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self.verify_s = {int(width): float(s) for width, s in stored.get("verify_s", {}).items()}
        self.draft_s = {str(name): float(s) for name, s in stored.get("draft_s", {}).items()}
        self.catch_up_s = {str(name): float(s) for name, s in stored.get("catch_up_s", {}).items()}
        self.overhead_s = float(stored.get("overhead_s", 0.0))
        self._measured_at: dict[int, int] = {}
        self._rounds = 0
        self._first: dict[int | str, float] = {}  # figures of widths and drafters that ran once

    def costs(self, energy: Energy | None = None) -> Costs:
        """The current estimates as the record that plans are chosen by."""
        return Costs(dict(self.verify_s), dict(self.draft_s), self.overhead_s, energy)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "verify_s": {str(width): s for width, s in sorted(self.verify_s.items())},
            "draft_s": dict(self.draft_s),
            "catch_up_s": dict(self.catch_up_s),
            "overhead_s": self.overhead_s,
        }

    def plain_s(self, widths: tuple[int, ...] | None) -> float:
        """Seconds of a round that drafts nothing."""
        return verify_time(self.verify_s, snap(1, widths)) + self.overhead_s

    def catch_up_token_s(self, name: str, plain_s: float) -> float:
        """Seconds of one token that a drafter must run before it can draft; a prior until that is measured."""
        return self.catch_up_s.get(name, _CATCH_UP_SHARE * self.draft_s.get(name, PRIOR_DRAFT * plain_s))

    def learn_verify(self, width: int, seconds: float, overhead_s: float) -> float:
        """Move the estimate of a width, and the others with it, the more the longer they were not run.

        So heat, a longer context or a busy machine, seen at one width, reach them all. Returns the step, as a share.
        """
        self._rounds += 1
        self.overhead_s = self._ema(self.overhead_s, overhead_s)
        seconds = max(seconds, _SHORTEST_S)
        known = self.verify_s.get(width)
        self._measured_at[width] = self._rounds
        if known is None or width in self._first:
            expected = _UNPROVEN * verify_time(self.verify_s, width) if self.verify_s else seconds
            self.verify_s[width] = self._begun(width, seconds, expected)
            return 0.0
        step = self._alpha * (min(max(seconds / known, 0.5), 2.0) - 1.0)
        self._move(step, width)
        return step

    def is_new(self, key: int | str) -> bool:
        """Whether this width or drafter ran only once."""
        return key in self._first

    def _begun(self, key: int | str, seconds: float, expected: float) -> float:
        """What to believe after a first figure, and after a second."""
        if key in self._first:
            return min(self._first.pop(key), seconds)
        self._first[key] = seconds
        return min(seconds, expected)

    def follow(self, step: float) -> None:
        """Move all estimates as others moved by so much, the more the longer their widths were not run."""
        self._rounds += 1
        self._move(step)

    def _move(self, step: float, width: int | None = None) -> None:
        for other in self.verify_s:
            age = self._rounds - self._measured_at.get(other, 0)
            share = 1.0 if other == width else self._coupling * age / (age + 2)
            self.verify_s[other] *= 1.0 + share * step

    def learn_draft(self, name: str, steps: int, seconds: float, backlog: int) -> float:
        """Learn a draft step, or the catch-up of a drafter that was far behind; returns its seconds."""
        steps = max(steps, 1)
        if backlog <= FAR_BEHIND:
            known, step_s = self.draft_s.get(name, 0.0), max(seconds, 0.0) / steps
            if known <= 0.0 or name in self._first:
                expected = PRIOR_DRAFT * verify_time(self.verify_s, 1) if self.verify_s else step_s
                self.draft_s[name] = self._begun(name, step_s, expected)
            else:
                self.draft_s[name] = self._ema(known, step_s)
            return 0.0
        catch_up_s = max(0.0, seconds - steps * self.draft_s.get(name, 0.0))
        self.learn_catch_up(name, backlog, catch_up_s)
        return catch_up_s

    def learn_catch_up(self, name: str, tokens: int, seconds: float) -> None:
        """Learn what a token takes of those that a drafter runs before it can draft."""
        self.catch_up_s[name] = self._ema(self.catch_up_s.get(name, 0.0), seconds / tokens)

    def _ema(self, known: float, seconds: float) -> float:
        """Moving average that a single outlier moves little; the first value is taken as it is."""
        seconds = max(seconds, 0.0)
        if known <= 0.0:
            return seconds
        return known + self._alpha * (min(max(seconds, 0.5 * known), 2.0 * known) - known)
