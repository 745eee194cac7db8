"""What was drawn over the last ten seconds, and how long work must wait so that their mean keeps a cap.

A cap on mean power is kept over every window, not only in the long run: a prompt, a start or another app's
burst takes from what the rounds after it may draw, and time spent below the cap is room for them. What runs is
written down as estimated, since meters are late; a meter's figure replaces the estimate of its interval.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Ledger"]

_AHEAD_S = 3.0  # a steady pace levels the window out within this
_LEAST_SHARE = 0.2  # of the power above rest: a steady pace never falls below
_TRUST = 0.5  # of a difference between meter and estimate that is no larger than usual
_RUN = 4  # differences of one sign in a row that are no noise, each of a meter's interval
_UNSURE = 0.06  # of a cap, kept while nothing has been metered yet,
_SURE_S = 40.0  # and less and less until so much time has
_SPARE = 0.35  # of the usual difference between meter and estimate, kept below the cap
_POINTS = 64  # are forgotten at once, when they are older than two windows


class Ledger:
    """The joules drawn up to each moment, as estimated and then as metered, of the last windows.

    Times are of one monotonic clock and come in order. Before the first interval the machine is taken to have
    drawn what it drew in that one, which the first meter's figure may replace.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self.window_s = window_s
        self.extra_w = 0.0  # what the meter showed lately beyond the estimates: other apps, wrong figures
        self.metered_s = 0.0  # how much time a meter has told of
        self._noise_w = 0.0  # by how much meter and estimate differ, as a rule
        self._odd_w = 0.0  # by how much the last interval was off, if more than usual
        self._missed_w = 0.0  # by how much it was off at all,
        self._same = 0  # and how many in a row were off to that side
        self._before_w = 0.0
        self._times: list[float] = []  # a line through (time, joules)
        self._joules: list[float] = []

    @property
    def end_s(self) -> float | None:
        """Until when everything is written down; None before the first interval."""
        return self._times[-1] if self._times else None

    def add(self, begin_s: float, end_s: float, power_w: float) -> None:
        """Write down an interval at an estimated power; what is written already stays.

        Time that was left out counts as drawn at the same power.
        """
        watts = max(power_w + self.extra_w, 0.0)
        if not self._times:
            self._times, self._joules, self._before_w = [begin_s], [0.0], watts
        span_s = end_s - self._times[-1]
        if span_s > 0.0:
            self._times.append(end_s)
            self._joules.append(self._joules[-1] + watts * span_s)
            if self._times[_POINTS : _POINTS + 1] and self._times[_POINTS] < end_s - 2.0 * self.window_s:
                del self._times[:_POINTS], self._joules[:_POINTS]

    def meter(self, begin_s: float, end_s: float, joules: float, learn: float = 1.0) -> None:
        """Let a meter's figure replace the estimates of its interval, and learn what they missed.

        `learn` is how far what they missed says something of what comes, 0..1.
        """
        if not self._times or end_s <= begin_s or end_s > self._times[-1] + 1e-6:
            return
        begin_s = max(begin_s, self._times[0])
        first, last = self._point(begin_s), self._point(end_s)
        if last == first:
            return
        missed_j = joules - (self._joules[last] - self._joules[first])
        trust, gain = self._judge(missed_j / (end_s - begin_s), learn)
        missed_j *= trust
        self.metered_s += end_s - begin_s
        for i in range(first, len(self._times)):
            share = min((self._times[i] - begin_s) / (end_s - begin_s), 1.0)
            self._joules[i] += share * missed_j
        self.extra_w += gain * learn * min(end_s - begin_s, 1.0) * missed_j / (end_s - begin_s)

    def _judge(self, missed_w: float, learn: float) -> tuple[float, float]:
        """How much of what a meter says against the estimate is believed, and how much of that is learned.

        What is no more than usual is noise: half, and little, unless it is off to one side again and again, for noise
        goes both ways. More is believed, and learned when it comes twice. What says little of what comes (`learn`)
        says little of what is usual too.
        """
        usual_w, young = self._noise_w, self.metered_s <= self.window_s
        seen_w = abs(missed_w) if young else min(abs(missed_w), 3.0 * usual_w)
        self._noise_w += 0.1 * learn * (seen_w - usual_w) if usual_w > 0.0 else learn * seen_w
        if learn >= 0.5:
            self._same = self._same + 1 if missed_w * self._missed_w > 0.0 else 1
            self._missed_w = missed_w
        odd = abs(missed_w) > 2.5 * usual_w
        before, self._odd_w = self._odd_w, missed_w if odd and learn >= 0.5 else 0.0
        if young or before * self._odd_w > 0.0:
            return 1.0, 0.5
        if odd:
            return 1.0, 0.05
        return _TRUST, 0.5 if self._same >= _RUN else 0.05

    def _point(self, time_s: float) -> int:
        """The index of the point at a time, put in where there is none."""
        index = min(bisect_left(self._times, time_s - 1e-9), len(self._times) - 1)
        if abs(self._times[index] - time_s) > 1e-9 and time_s < self._times[index]:
            joules = self._until(time_s)
            self._times.insert(index, time_s)
            self._joules.insert(index, joules)
        return index

    def _until(self, time_s: float) -> float:
        """Joules up to a time, counted from the first point."""
        times, joules = self._times, self._joules
        if time_s <= times[0]:
            return joules[0] - (times[0] - time_s) * self._before_w
        index = bisect_left(times, time_s)
        if index >= len(times):
            return joules[-1]
        share = (time_s - times[index - 1]) / (times[index] - times[index - 1])
        return joules[index - 1] + share * (joules[index] - joules[index - 1])

    def joules(self, begin_s: float, end_s: float) -> float:
        """What was drawn from `begin_s` to `end_s`; nothing after the last interval."""
        return self._until(end_s) - self._until(begin_s) if self._times else 0.0

    def mean_w(self, seconds: float) -> float:
        """Mean power of the last seconds."""
        return self.joules(self._times[-1] - seconds, self._times[-1]) / seconds if self._times else 0.0

    def wait_s(self, cap_w: float, work_s: float, work_w: float, rest_w: float) -> float:
        """Seconds to rest before work, so that the window that ends with it keeps the cap; at most a window.

        Work that keeps no window, however long the rest, waits until resting gives no more room.
        """
        if not self._times:
            return 0.0
        now_s, rest_w = self._times[-1], rest_w + self.extra_w
        cap_w *= 1.0 - _UNSURE * max(0.0, 1.0 - self.metered_s / _SURE_S)
        cap_w -= _SPARE * self._noise_w
        needed_j = (work_w + self.extra_w) * min(work_s, self.window_s)

        def over_j(wait_s: float) -> float:
            begin_s = now_s + wait_s + work_s - self.window_s
            past_j = self.joules(begin_s, now_s) if begin_s < now_s else 0.0
            return past_j + rest_w * wait_s + needed_j - cap_w * self.window_s

        low, high = 0.0, max(self.window_s - work_s, 0.0)
        if over_j(low) <= 0.0:
            return 0.0
        for _ in range(12 if over_j(high) <= 0.0 else 0):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if over_j(middle) > 0.0 else (low, middle)
        return high

    def pace_s(self, cap_w: float, work_s: float, work_w: float, rest_w: float) -> float:
        """Rest after work so that the window fills up evenly: fast while there is room, slow after a burst."""
        if not self._times:
            return 0.0
        rest_w, work_w = rest_w + self.extra_w, work_w + self.extra_w
        kept_s = self.window_s - _AHEAD_S
        allowed_w = (cap_w * self.window_s - kept_s * self.mean_w(kept_s)) / _AHEAD_S
        allowed_w = max(allowed_w, rest_w + _LEAST_SHARE * max(cap_w - rest_w, 0.0))
        if work_w <= max(allowed_w, rest_w):
            return 0.0
        spare_w = allowed_w - rest_w
        return work_s * (work_w - allowed_w) / spare_w if spare_w > 0.0 else self.window_s
