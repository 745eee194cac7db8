"""A prompt decoded again and again while recorded heat is played back: what becomes of k, and that the text stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.contracts import Clock
from outrider.errors import UsageError
from outrider.power.governor import Level
from outrider.power.monitor import Monitor
from outrider.runtime.rounds import Engine, Request, Round

__all__ = ["HeatReplay", "Stretch", "Tempo", "replay_heat"]


class Tempo:
    """A clock that stands at 0 until `start`, and then runs `speed` times as fast as `base`."""

    def __init__(self, base: Clock = time.monotonic) -> None:
        self._base = base
        self._began_s: float | None = None
        self.speed = 1.0

    def start(self, speed: float) -> None:
        """Let time run. Raises UsageError unless it runs forward."""
        if not speed > 0.0:
            raise UsageError(f"speed is {speed}; it must be above 0")
        self._began_s, self.speed = self._base(), speed

    def __call__(self) -> float:
        return 0.0 if self._began_s is None else self.speed * (self._base() - self._began_s)


@dataclass
class Stretch:
    """Rounds in a row that ran at one level.

    Times `begin_s` and `end_s` and temperatures are the trace's, `seconds` are those that really passed, pauses
    included. `ks` holds the planned k of every round that drafted; `work` is the least share of time that the
    governor let it work.
    """

    level: Level
    begin_s: float
    end_s: float
    low_c: float | None = None
    high_c: float | None = None
    seconds: float = 0.0
    rounds: int = 0
    tokens: int = 0
    work: float = 1.0
    ks: list[int] = field(default_factory=list)

    @property
    def k_most(self) -> int:
        """The largest k; 0 when nothing was drafted."""
        return max(self.ks, default=0)

    @property
    def k_mean(self) -> float | None:
        """The mean k of rounds that drafted."""
        return sum(self.ks) / len(self.ks) if self.ks else None

    @property
    def tokens_per_s(self) -> float | None:
        """Committed tokens a second, pauses included."""
        return self.tokens / self.seconds if self.seconds > 0.0 else None

    def add(self, round_: Round, end_s: float, die_c: float | None, seconds: float) -> None:
        """Count a round that ended at `end_s` of the trace and took `seconds`."""
        self.end_s = end_s
        self.seconds += seconds
        self.rounds += 1
        self.tokens += len(round_.tokens)
        if round_.drafted:
            self.ks.append(round_.plan.k)
        if round_.directive is not None:
            self.work = min(self.work, round_.directive.duty)
        if die_c is not None:
            self.low_c = die_c if self.low_c is None else min(self.low_c, die_c)
            self.high_c = die_c if self.high_c is None else max(self.high_c, die_c)


@dataclass
class HeatReplay:
    """What a replay showed. `difference` is the first (text, token), both from 0, that was not the plain one."""

    stretches: list[Stretch] = field(default_factory=list)
    texts: int = 0
    tokens: int = 0
    difference: tuple[int, int] | None = None

    @property
    def ks(self) -> tuple[int, int, int]:
        """The largest k at first, at the hottest level, and at last."""
        if not self.stretches:
            return 0, 0, 0
        hottest = max(stretch.level for stretch in self.stretches)
        most = (stretch.k_most for stretch in self.stretches if stretch.level == hottest)
        return self.stretches[0].k_most, max(most), self.stretches[-1].k_most

    @property
    def fell(self) -> bool:
        """Whether heat shortened drafts."""
        first, hottest, _ = self.ks
        return hottest < first

    @property
    def came_back(self) -> bool:
        """Whether drafts are longer again than the half that a hot machine is allowed."""
        first, hottest, last = self.ks
        return last > max(hottest, first / 2)


def replay_heat(
    engine: Engine,
    prompt: Sequence[int],
    request: Request,
    plain: Sequence[int],
    monitor: Monitor,
    tell: Callable[[Stretch], object] = lambda stretch: None,
    now: Clock = time.perf_counter,
) -> HeatReplay:
    """Decode `prompt` until the trace that `monitor` replays has ended, comparing every token with `plain`.

    The engine must be governed by the same monitor. `tell` gets each stretch when it is over; `now` is the time
    that really passes. The last text is cut off where the trace ends. Raises UsageError for an engine that
    nothing governs.
    """
    replay = HeatReplay()
    while not _ended(monitor):
        seen, before_s = 0, now()
        for round_ in engine.decode(prompt, request):
            _add(replay, round_, monitor, now() - before_s, tell)
            before_s = now()
            _compare(replay, round_.tokens, plain, seen)
            seen += len(round_.tokens)
            if _ended(monitor):
                break
        else:
            if seen < len(plain):
                replay.difference = replay.difference or (replay.texts, seen)
        replay.texts += 1
    if replay.stretches:
        tell(replay.stretches[-1])
    return replay


def _ended(monitor: Monitor) -> bool:
    return all(getattr(sensor, "done", True) for sensor in monitor.sensors)


def _add(
    replay: HeatReplay, round_: Round, monitor: Monitor, seconds: float, tell: Callable[[Stretch], object]
) -> None:
    """Count a round in the stretch of its level."""
    if round_.directive is None:
        raise UsageError("nothing governs this engine; load the bundle with telemetry=monitor")
    state, level = monitor.poll(), round_.directive.level
    if not replay.stretches or replay.stretches[-1].level != level:
        begin_s = 0.0
        if replay.stretches:
            tell(replay.stretches[-1])
            begin_s = replay.stretches[-1].end_s
        replay.stretches.append(Stretch(level, begin_s, state.time_s))
    replay.stretches[-1].add(round_, state.time_s, state.die_c, seconds)


def _compare(replay: HeatReplay, tokens: Sequence[int], plain: Sequence[int], seen: int) -> None:
    """Count the tokens of a round, `seen` of the text before it, and note the first that differs."""
    replay.tokens += len(tokens)
    if replay.difference is None:
        expected = [*plain[seen : seen + len(tokens)], *[None] * len(tokens)]
        wrong = (i for i, token in enumerate(tokens) if token != expected[i])
        index = next(wrong, None)
        replay.difference = None if index is None else (replay.texts, seen + index)
