"""Letting the temperature touch the trip of a device that throttles at its very limit.

Where heat is short and not speed, tokens come at the rate of (power that the limit allows) / (joules a token).
At a lower clock and voltage a token takes fewer joules, but no app may set a phone's clock; the system lowers it
at its trip and, thanks to hysteresis, keeps it low while the temperature stays close below. So a plateau is
begun by touching the trip once. Whether it paid is measured, and what did not pay is undone and not tried again.
"""

from __future__ import annotations

from enum import Enum

from outrider.power.tuning import Tuning

__all__ = ["TripTouch"]


class _Stage(Enum):
    COOL = "cool"
    TOUCHING = "touching"
    JUDGING = "judging"
    SETTLED = "settled"
    LEAVING = "leaving"
    REFUSED = "refused"


class TripTouch:
    """Shifts the target of one temperature: up to the trip for a moment, or away from it where it did not pay.

    `active` says that the device throttles at the limit that is watched. `step` takes how far below the limit
    the temperature is, the clock, and the joules of a plain token (None: unknown, then nothing is tried).
    """

    def __init__(self, active: bool, tuning: Tuning) -> None:
        self._tuning = tuning
        self._stage = _Stage.COOL if active else _Stage.REFUSED
        self._since_s = 0.0  # of the stage, or of the last drop of the clock
        self._at_trip_s = self._seen_s = (
            0.0  # time spent at the trip in this stage; when that was last counted
        )
        self._before: tuple[float, float] = (1.0, 0.0)  # clock and joules before the touch
        self._clock = 1.0  # the lowest since

    def step(self, time_s: float, below_c: float, clock: float | None, plain_j: float | None) -> float:
        """°C by which the target is to be moved now."""
        tuning = self._tuning
        if clock is None or plain_j is None:
            return 0.0
        if self._stage is _Stage.COOL and below_c <= tuning.touch_from_c:
            self._begin(_Stage.TOUCHING, time_s)
            self._before, self._clock = (clock, plain_j), clock
        elif self._stage is _Stage.TOUCHING:
            self._touch(time_s, below_c, clock)
        elif self._stage is _Stage.JUDGING and time_s - self._since_s >= tuning.touch_judged_s:
            paid = plain_j <= self._before[1]
            self._begin(_Stage.SETTLED if paid else _Stage.LEAVING, time_s)
        elif self._stage is _Stage.LEAVING and clock >= 0.99 * self._before[0]:
            self._begin(_Stage.REFUSED, time_s)
        elif self._stage in (_Stage.JUDGING, _Stage.SETTLED) and below_c > tuning.touch_cool_c:
            self._begin(_Stage.COOL, time_s)
        shifts = {_Stage.TOUCHING: tuning.touch_c, _Stage.LEAVING: -tuning.touch_cool_c}
        return shifts.get(self._stage, 0.0)

    def _touch(self, time_s: float, below_c: float, clock: float) -> None:
        """Stay until the clock has fallen and falls no more, or does not fall at the trip, or that is not reached."""
        if clock < 0.99 * self._clock:
            self._clock, self._since_s = clock, time_s
        self._at_trip_s += time_s - self._seen_s if below_c <= 0.0 else 0.0
        self._seen_s = time_s
        tuning = self._tuning
        if self._clock < 0.99 * self._before[0]:
            if time_s - self._since_s >= tuning.touch_settled_s:
                self._begin(_Stage.JUDGING, time_s)
        elif self._at_trip_s >= tuning.touch_trip_s or time_s - self._since_s >= tuning.touch_longest_s:
            self._begin(_Stage.SETTLED, time_s)

    def _begin(self, stage: _Stage, time_s: float) -> None:
        self._stage, self._since_s = stage, time_s
        self._at_trip_s, self._seen_s = 0.0, time_s
