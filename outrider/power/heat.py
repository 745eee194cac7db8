"""One watched temperature: how near its limit it is, and how much work or power keeps it there."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.power.thermal_model import ThermalPrior
from outrider.power.tuning import Gains, Tuning

__all__ = ["Regulator", "ThermalEstimate", "Watch", "thermal_prior"]

_PROFILE_SPREAD = 0.4  # how wrong the constants of a device profile may be, as a share


def thermal_prior(device: Any, body: bool) -> ThermalPrior | None:
    """What a device profile says of its heat, as its silicon or its `body` feels it; None: nothing."""
    thermal = getattr(device, "thermal", None)
    if thermal is None:
        return None
    case = float(thermal.case_c_per_w), float(thermal.case_tau_s)
    die = (0.1 * case[0], 0.1 * case[1]) if body else (float(thermal.die_c_per_w), float(thermal.die_tau_s))
    return ThermalPrior(*die, *case, spread=_PROFILE_SPREAD)


class ThermalEstimate(Protocol):
    """What a `Watch` asks of a thermal model (`power.thermal_model.ThermalModel`); None: not known yet."""

    @property
    def identified(self) -> bool:
        """Whether data, not a guess, say what a watt does."""
        ...

    def observe(self, time_s: float, temp_c: float, power_w: float) -> None:
        """Learn from a reading."""
        ...

    def sustainable_w(self, limit_c: float) -> float | None:
        """The power that ends at the limit."""
        ...

    def budget_w(self, limit_c: float, horizon_s: float) -> float | None:
        """The constant power that reaches the limit no sooner than after the horizon."""
        ...

    def time_to(self, limit_c: float, power_w: float) -> float | None:
        """Seconds until the limit at this power; None when it is never reached."""
        ...


class Regulator:
    """A proportional-integral law that does not wind up: the share of full work that holds a target.

    It integrates only within the band, and not while the output is against a stop in the error's direction.
    """

    def __init__(self, gains: Gains, least: float) -> None:
        self.gains, self.least = gains, least
        self.integral = 0.0

    def step(self, dt_s: float, error_c: float) -> float:
        """The share of time to work, from `least` to 1, when the temperature is `error_c` below its target."""
        gains = self.gains
        share = gains.start_duty + gains.per_c * error_c + self.integral
        against_stop = (share >= 1.0 and error_c > 0.0) or (share <= self.least and error_c < 0.0)
        if abs(error_c) <= gains.band_c and not against_stop:
            self.integral += gains.per_c * error_c * dt_s / gains.integral_s
        return min(max(share, self.least), 1.0)


class Watch:
    """A temperature with its limit; `assumed`: nobody named the limit, so it is not held, only heeded.

    `model` counts once it is identified, or from the start where it is `trusted` (it began with a profile of
    the device). Until then `sustained_w` says what the limit allows, and without that only duty can hold it.
    `see` takes the readings in order of time; the properties are of the last one. A temperature that is
    gone (None) leaves duty and budget where they were.
    """

    def __init__(
        self,
        limit_c: float,
        gains: Gains,
        tuning: Tuning,
        assumed: bool = False,
        sustained_w: float | None = None,
        model: ThermalEstimate | None = None,
        trusted: bool = False,
    ) -> None:
        self.limit_c, self.assumed = limit_c, assumed
        self.shift_c = 0.0  # by which the target is moved for now
        self.temp_c: float | None = None
        self.duty = 1.0
        self.budget_w: float | None = None
        self.time_to_limit_s: float | None = None  # None: not coming
        self.ambient_c = tuning.ambient_c
        self._gains, self._tuning = gains, tuning
        self._sustained_w, self._model, self._trusted = sustained_w, model, trusted
        self._shown_s: float | None = None  # when the model was last shown a reading
        self._joules = self._seconds = 0.0  # since then
        self._predicted_s: float | None = None  # when the time to the limit was last told
        self._regulator = Regulator(gains, tuning.least_duty)
        self._trim = 0.0  # of the budget, as a share of the sustained power
        self._planner: ThermalEstimate | None = None  # what planned the last budget
        self._slope = 0.0  # °C/s, smoothed
        self._first_s: float | None = None
        self._last: tuple[float, float] | None = None  # time and temperature of the last reading

    @property
    def target_c(self) -> float:
        """Where the temperature is held."""
        return self.limit_c - self._gains.margin_c + self.shift_c

    def used(self, ease_c: float = 0.0) -> float | None:
        """Headroom used: 0 at ambient, 1 at the limit; `ease_c` is added to the temperature."""
        if self.temp_c is None:
            return None
        return (self.temp_c + ease_c - self.ambient_c) / max(self.limit_c - self.ambient_c, 1.0)

    def see(self, time_s: float, temp_c: float | None, power_w: float | None, in_watts: bool) -> None:
        """Take a reading; `in_watts` says that the plan can keep a power budget, else it keeps a duty."""
        self.temp_c = temp_c
        if temp_c is None:
            self.time_to_limit_s = None
            return
        dt_s = self._step_of(time_s, temp_c)
        self._show_model(time_s, temp_c, power_w, dt_s)
        self._predict(time_s, temp_c, power_w)
        if self.assumed:
            return
        error_c = self.target_c - temp_c - self._slope * self._gains.lead_s
        self.budget_w = self._budget(dt_s, error_c, power_w) if in_watts else None
        if self.budget_w is None:
            self.duty = self._regulator.step(dt_s, error_c)
        else:
            self.duty = 1.0

    def _show_model(self, time_s: float, temp_c: float, power_w: float | None, dt_s: float) -> None:
        """Let the model learn, now and then, from the temperature and the mean power since the last time."""
        if self._model is None or power_w is None:
            return
        self._joules += power_w * dt_s
        self._seconds += dt_s
        if self._shown_s is not None and time_s - self._shown_s < self._tuning.model_period_s:
            return
        mean_w = self._joules / self._seconds if self._seconds > 0.0 else power_w
        self._model.observe(time_s, temp_c, max(mean_w, 0.0))
        self._shown_s, self._joules, self._seconds = time_s, 0.0, 0.0

    def _known(self) -> ThermalEstimate | None:
        """The model, where it can be believed."""
        return self._model if self._model is not None and (self._trusted or self._model.identified) else None

    def _predict(self, time_s: float, temp_c: float, power_w: float | None) -> None:
        """Seconds until the limit, by the model at the power of now, else by the slope; now and then."""
        if self._predicted_s is not None and time_s - self._predicted_s < self._tuning.model_period_s:
            return
        self._predicted_s = time_s
        model = self._known()
        if temp_c >= self.limit_c:
            self.time_to_limit_s = 0.0
        elif model is not None and power_w is not None and power_w >= 0.0:
            self.time_to_limit_s = model.time_to(self.limit_c, power_w)
        else:
            self.time_to_limit_s = (self.limit_c - temp_c) / self._slope if self._slope > 0.01 else None

    def _step_of(self, time_s: float, temp_c: float) -> float:
        """Seconds since the last reading (0 after a gap), with the slope and ambient brought up to date."""
        if self._first_s is None:
            self._first_s, self.ambient_c = time_s, self._cool(temp_c)
        elif time_s - self._first_s <= self._tuning.ambient_window_s:
            self.ambient_c = min(self.ambient_c, self._cool(temp_c))
        last, self._last = self._last, (time_s, temp_c)
        dt_s = time_s - last[0] if last else 0.0
        if last is None or not 0.0 < dt_s <= self._tuning.longest_gap_s:
            self._last = last if last and dt_s <= 0.0 else self._last
            self._slope = 0.0 if dt_s > 0.0 else self._slope
            return 0.0
        weight = dt_s / (self._gains.lead_s + dt_s)
        self._slope += weight * ((temp_c - last[1]) / dt_s - self._slope)
        return dt_s

    def _cool(self, temp_c: float) -> float:
        return temp_c if temp_c <= self._tuning.cool_c else self._tuning.ambient_c

    def _budget(self, dt_s: float, error_c: float, power_w: float | None) -> float | None:
        """Watts that hold the target: the model's (else the kernel's rule), corrected by what came of it."""
        gains, model = self._gains, self._known()
        sustained = (model.sustainable_w(self.target_c) if model else None) or self._sustained_w
        if sustained is None or sustained <= 0.0:
            return None
        planned = model.budget_w(self.target_c, gains.horizon_s) if model else None
        if planned is None:
            share = (1.0 - (self.used() or 0.0)) / (1.0 - self._tuning.warm_at)
            planned = sustained * (1.0 + (self._tuning.boost - 1.0) * max(share, 0.0))
        near = error_c <= gains.band_c
        if near and model is not self._planner and self.budget_w is not None:
            self._trim = (self.budget_w - planned) / sustained  # another planner goes on from where this was
        self._planner = model
        binding = power_w is not None and power_w >= 0.9 * (self.budget_w or planned)
        if abs(error_c) <= gains.band_c and (error_c < 0.0 or binding):
            self._trim += gains.per_c * error_c * dt_s / gains.integral_s
        self._trim = min(max(self._trim, -0.5), 0.5)
        budget = planned + sustained * (self._trim + gains.per_c * min(error_c, 0.0))
        if near and self.budget_w is not None:
            budget = min(budget, self.budget_w + sustained * gains.rise_per_s * dt_s)
        return max(budget, self._tuning.least_duty * sustained)
