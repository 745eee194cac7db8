"""The temperature of a body that no sensor gives, from what was drawn and what little the system says.

Some phones tell a thermal state in a few steps and nothing else. Many guesses of the air, of the heat path and of
the temperature are carried along with the estimated power, as the device's profile says that heat goes; whatever
the system says (a step of headroom, clocks that were held back) makes those that contradict it unlikely. This is
a particle filter (Gordon, Salmond and Smith 1993). It is an estimate and flagged so wherever it is used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UsageError

FloatArray = NDArray[np.float64]

__all__ = ["BodyEstimate"]

_GUESSES = 800
_FEWEST = 0.3  # of the guesses that must count for something, before they are drawn again
_SOFT_C = 0.4  # by how much a bound may be missed
_PATH_SPREAD = 0.12  # of °C per watt; estimated watts are as wrong as that
_TIME_SPREAD = 0.15
_WARM_C = 1.5  # above rest at the start, on average: nobody knows what ran before
_LONGEST_STEP_S = 120.0


class BodyEstimate:
    """Follows one temperature from (time, watts) and bounds.

    `c_per_w` and `tau_s` are the profile's; `rest_w` is drawn at rest. The air is taken to be near
    `ambient_c`. Equal calls give equal answers. Raises UsageError for constants that are not positive.
    """

    def __init__(
        self,
        c_per_w: float,
        tau_s: float,
        rest_w: float,
        ambient_c: float = 25.0,
        ambient_spread_c: float = 8.0,
    ) -> None:
        if not (c_per_w > 0.0 and tau_s > 0.0 and rest_w >= 0.0):
            raise UsageError(
                f"c_per_w {c_per_w} and tau_s {tau_s} must be above 0, rest_w {rest_w} not below"
            )
        self._rng = rng = np.random.default_rng(0)
        self._air: FloatArray = rng.normal(ambient_c, ambient_spread_c, _GUESSES)  # [N] °C
        self._path: FloatArray = c_per_w * np.exp(rng.normal(0.0, _PATH_SPREAD, _GUESSES))  # [N] °C/W
        self._tau: FloatArray = tau_s * np.exp(rng.normal(0.0, _TIME_SPREAD, _GUESSES))  # [N] s
        self._body: FloatArray = (
            self._air + self._path * rest_w + rng.exponential(_WARM_C, _GUESSES)
        )  # [N] °C
        self._weight: FloatArray = np.full(_GUESSES, 1.0 / _GUESSES)  # [N]
        self._time_s: float | None = None

    def step(self, time_s: float, power_w: float) -> None:
        """Go on to a time, at the mean power since the last one."""
        dt_s = 0.0 if self._time_s is None else min(max(time_s - self._time_s, 0.0), _LONGEST_STEP_S)
        self._time_s = time_s
        end = self._air + self._path * power_w
        self._body = end + (self._body - end) * np.exp(-dt_s / self._tau)

    def bound(self, low_c: float, high_c: float) -> None:
        """Take in that the temperature is between two bounds now.

        Said again and again it is news once: only what has come to contradict it counts less.
        """
        soft = np.maximum(low_c - self._body, self._body - high_c) / _SOFT_C
        fits = np.exp(-np.square(np.maximum(soft, 0.0)))
        total = float((weights := self._weight * fits).sum())
        if total < 1e-6:  # every guess is wrong: the nearest are moved to the bound
            self._body = np.clip(self._body, low_c, high_c)
            return
        self._weight = weights / total
        if 1.0 / float(np.square(self._weight).sum()) < _FEWEST * _GUESSES:
            self._draw_again()

    def _draw_again(self) -> None:
        """As many guesses, all alike in weight, each near one that was likely."""
        chosen = self._rng.choice(_GUESSES, _GUESSES, p=self._weight)
        normal = self._rng.normal
        self._air = self._air[chosen] + normal(0.0, 0.3, _GUESSES)
        self._path = self._path[chosen] * np.exp(normal(0.0, 0.02, _GUESSES))
        self._tau = self._tau[chosen] * np.exp(normal(0.0, 0.03, _GUESSES))
        self._body = self._body[chosen] + normal(0.0, 0.1, _GUESSES)
        self._weight = np.full(_GUESSES, 1.0 / _GUESSES)

    @property
    def temp_c(self) -> float:
        """The mean of the guesses."""
        return float(self._weight @ self._body)

    @property
    def spread_c(self) -> float:
        """Their standard deviation."""
        return float(np.sqrt(self._weight @ np.square(self._body - self.temp_c)))

    @property
    def ambient_c(self) -> float:
        """The air, as the guesses have it."""
        return float(self._weight @ self._air)
