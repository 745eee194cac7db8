"""Every constant of the governor, in one record: what it does, and where its value comes from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from outrider.errors import UsageError

__all__ = ["Gains", "Tuning"]


@dataclass(frozen=True)
class Gains:
    """How one temperature is held at its target.

    `lead_s`: the temperature is judged where its slope will have brought it by then. `per_c`: the share of
    full work given up for each °C above the target. `integral_s`: how fast a lasting error is integrated.
    `start_duty`: the share of work at the target before anything was learned. `band_c`: errors beyond it are
    not integrated. `horizon_s`: a power budget must keep the target for so long. `rise_per_s`: within the
    band a budget rises by this share of the sustained power at most, however the model changes its mind. `burst_s`:
    work may go on for so long without a pause.
    """

    lead_s: float
    per_c: float
    integral_s: float
    margin_c: float
    start_duty: float = 0.5
    band_c: float = 3.0
    horizon_s: float = 10.0
    rise_per_s: float = 0.02
    burst_s: float = 0.5


@dataclass(frozen=True)
class Tuning:
    """Constants of the governor (temperatures in °C, times in s; h is headroom used, 0 = ambient, 1 = limit).

    Levels rise at `warm_at`, `hot_at` and `critical_at` of h or of the vendor's headroom, at once. They fall
    one at a time, when what holds them up has been `hysteresis_c` (of vendor headroom:
    `hysteresis_headroom`) below for `dwell_s`, and only while at most `most_changes` changes lie in the last
    `changes_window_s`, so that a noisy plateau cannot make more than two changes more than that. Phones release at
    1.9 °C, a Raspberry Pi's fan at 5 °C. Critical ends `critical_hysteresis_c` (`critical_hysteresis_headroom`)
    below: regulators hold a temperature close below its limit, so that two degrees would never come.

    A throttle share above 0 is warm, from `throttle_hot` hot. A clock below `clock_warm` of the best seen is
    warm, below `clock_hot` hot unless the silicon is cool (h below `clock_cool`), once it lasts `clock_hold_s`:
    idle cores run slow too. `ambient_c` stands for ambient unless the readings of the first
    `ambient_window_s` are at most `cool_c`.

    `trip_margin_c` is kept from a device's limit (a profile's limit is to be kept, no trip point). Where neither
    user nor device names a limit, `assumed_die_limit_c` and `assumed_skin_limit_c` stand in; a guess never
    raises the level above warm.

    Without a thermal model the power budget falls from `boost` times the sustained power at `warm_at` to the
    sustained power at h = 1, as the kernel's power allocator does; above the target it falls by `per_c` of it
    for each °C. `die` and `skin` hold the two temperatures. A thermal model is shown a reading and asked for
    the time to the limit every `model_period_s`. From the level `saving_level` on (0 nominal .. 3 critical,
    4 never) the objective is energy.

    A device that throttles at its body's limit is let touch it (`power.trip_touch`) from `touch_from_c` below,
    aiming `touch_c` above the usual target, until the clock has not fallen for `touch_settled_s`, or not at all in
    `touch_trip_s` at the trip, or the trip is not reached in `touch_longest_s`. After `touch_judged_s` its
    joules are compared. `touch_cool_c` below, throttling has let go.

    Without energy figures hot drafts at most `hot_share` of the cool k, critical at most `critical_k`.
    `least_duty` is the least share of time worked; critical without a regulator works `critical_duty`.
    `power_average_s` averages the measured power, `power_trim_s` is how fast its error is integrated, down
    to `least_trim` of what was asked. `longest_gap_s`: readings further apart say nothing of slopes.

    The draft model is released when less than `memory_reserve_mb` is available, when all tasks wait for
    memory more than `pressure_percent` of the time, when a limit of memory was reached with less than the reserve and
    `memory_return_mb` available, or when the process holds all but `limit_share` of its own limit. It comes back when
    `memory_return_mb` more than its size and the reserve was available, with pressure at most `calm_percent` and twice
    `limit_share` of the limit to spare, for `memory_return_s`.
    A battery at its floor must gain `battery_hysteresis_percent` to leave it.
    """

    warm_at: float = 0.75
    hot_at: float = 0.88
    critical_at: float = 1.0
    hysteresis_c: float = 2.0
    hysteresis_headroom: float = 0.05
    critical_hysteresis_c: float = 0.5
    critical_hysteresis_headroom: float = 0.015
    dwell_s: float = 12.0
    most_changes: int = 2
    changes_window_s: float = 60.0
    throttle_hot: float = 0.5
    clock_warm: float = 0.85
    clock_hot: float = 0.6
    clock_cool: float = 0.5
    clock_hold_s: float = 2.0
    ambient_c: float = 25.0
    cool_c: float = 40.0
    ambient_window_s: float = 5.0
    trip_margin_c: float = 0.0
    assumed_die_limit_c: float = 85.0
    assumed_skin_limit_c: float = 45.0
    boost: float = 3.0
    die: Gains = field(default_factory=lambda: Gains(lead_s=2.0, per_c=0.15, integral_s=15.0, margin_c=0.4))
    skin: Gains = field(
        default_factory=lambda: Gains(
            lead_s=10.0, per_c=0.5, integral_s=120.0, margin_c=0.05, band_c=1.0, horizon_s=20.0, burst_s=3.0
        )
    )
    model_period_s: float = 1.0
    touch_from_c: float = 0.3
    touch_c: float = 0.4
    touch_settled_s: float = 8.0
    touch_trip_s: float = 20.0
    touch_longest_s: float = 300.0
    touch_judged_s: float = 60.0
    touch_cool_c: float = 3.0
    saving_level: int = 3
    hot_share: float = 0.5
    critical_k: int = 1
    least_duty: float = 0.05
    critical_duty: float = 0.6
    power_average_s: float = 2.0
    power_trim_s: float = 3.0
    least_trim: float = 0.5
    longest_gap_s: float = 5.0
    memory_reserve_mb: float = 128.0
    memory_return_mb: float = 256.0
    memory_return_s: float = 30.0
    pressure_percent: float = 5.0
    calm_percent: float = 1.0
    limit_share: float = 0.03
    battery_hysteresis_percent: float = 1.0

    def __post_init__(self) -> None:
        """Refuse thresholds out of order and times that cannot pass."""
        if not 0.0 < self.warm_at < self.hot_at < self.critical_at:
            raise UsageError(
                f"levels rise at {self.warm_at}, {self.hot_at}, {self.critical_at}; they must ascend from above 0"
            )
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not value >= 0:
                raise UsageError(f"{f.name} is {value}; it must be at least 0")
