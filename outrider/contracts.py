"""The protocols and small records that the rooms of Outrider share.

Shapes: S tokens of a forward, R rows whose logits were asked for, V vocabulary, D hidden size,
n proposed tokens. Everything is batch 1. Nothing here imports more than numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UsageError

__all__ = [
    "Clock",
    "Costs",
    "Drafter",
    "Energy",
    "Float32Array",
    "Graph",
    "IntArray",
    "Limits",
    "LogitsRequest",
    "Objective",
    "Output",
    "Plan",
    "Proposal",
    "Reading",
    "Sampling",
    "TopK",
    "TopRows",
]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Float32Array = NDArray[np.float32]
Clock = Callable[[], float]
"""Monotonic seconds: `time.monotonic`, or a virtual clock in simulations and tests."""


@dataclass(frozen=True)
class TopK:
    """Ask a graph for the n largest logits of every row instead of the whole row."""

    n: int


@dataclass(frozen=True)
class TopRows:
    """The largest logits of some rows; ties are ordered by the lower id first."""

    ids: IntArray  # [R, n]
    values: Float32Array  # [R, n]
    logsumexp: Float32Array  # [R], over the whole vocabulary


LogitsRequest = Literal["all", "last", "none"] | Sequence[int] | TopK
"""Which rows of a forward need logits: all S, the last, none, chosen row indices, or all as `TopK`."""


@dataclass(frozen=True)
class Output:
    """What a forward returned. `logits` may be a view that the next forward overwrites."""

    logits: Float32Array | TopRows | None  # [R, V]
    hidden: Mapping[int, Float32Array] = field(default_factory=dict)  # layer -> [S, D]


@runtime_checkable
class Graph(Protocol):
    """One model with its KV cache on one unit.

    `forward` runs S tokens after the committed prefix and never moves `length`. `commit(rows)` keeps the
    KV rows with these indices of the last forward, in this order, and moves `length` by their number;
    rows that are not committed are dropped by the next forward. `truncate(length)` forgets a tail.
    """

    vocab_size: int
    max_context: int
    widths: tuple[int, ...] | None  # the S that are compiled; None = any
    hidden_layers: tuple[int, ...]  # layers that can be asked for in `hidden`

    @property
    def length(self) -> int:
        """Tokens committed to the KV cache."""
        ...

    def forward(
        self,
        tokens: Sequence[int] | IntArray,  # [S]
        positions: IntArray | None = None,  # [S]; None = length, length+1, ...
        mask: BoolArray | None = None,  # [S, S] ancestor-or-self; None = causal
        logits: LogitsRequest = "all",
        hidden: tuple[int, ...] = (),
        features: Float32Array | None = None,  # [S, F], for heads that read the target's hidden states
    ) -> Output:
        """Run S tokens. Raises ValueError when S exceeds the largest width, ContextError past max_context."""
        ...

    def commit(self, rows: Sequence[int] | IntArray) -> None:
        """Keep these rows of the last forward, in this order."""
        ...

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        ...

    def close(self) -> None:
        """Free the graph; closing twice is allowed."""
        ...


def _bounds(low: float, high: float) -> str:
    if high != float("inf"):
        return f"between {low} and {high}"
    return "finite" if low == -high else f"finite and at least {low}"


@dataclass(frozen=True)
class Sampling:
    """How the target's next token is chosen; the drafter may read it to raise acceptance.

    `temperature` 0 is greedy (over the *processed* logits: penalties and bias count). `top_k` 0, `top_p` 1
    and `min_p` 0 are off. Order of processing: bias and bans, repetition/presence/frequency penalty,
    temperature, top-k, top-p, min-p. `mode` names the lossless acceptance rule: `match` samples the
    target and accepts while the draft equals it (a seed gives the same text with and without a draft),
    `reject` is rejection sampling (higher acceptance, same distribution).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: tuple[int, ...] = ()
    seed: int = 0
    mode: Literal["match", "reject"] = "match"

    def __post_init__(self) -> None:
        """Refuse values outside their range, naming the option and the value seen."""
        bounds = {
            "temperature": (self.temperature, 0.0, float("inf")),
            "top_k": (self.top_k, 0, float("inf")),
            "top_p": (self.top_p, 1e-9, 1.0),
            "min_p": (self.min_p, 0.0, 1.0),
            "repetition_penalty": (self.repetition_penalty, 1e-6, float("inf")),
            "presence_penalty": (self.presence_penalty, -float("inf"), float("inf")),
            "frequency_penalty": (self.frequency_penalty, -float("inf"), float("inf")),
            "seed": (self.seed, 0, 2**64 - 1),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high or value == float("inf"):
                raise UsageError(f"{name} is {value}; it must be {_bounds(low, high)}")
        if self.temperature and not 1e-30 <= self.temperature <= 1e30:  # logits over it are float32
            raise UsageError(f"temperature is {self.temperature}; it must be 0 or between 1e-30 and 1e+30")
        if self.mode not in ("match", "reject"):
            raise UsageError(f"mode is {self.mode!r}; known modes: match, reject")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens; a chain when parents are -1, 0, 1, ..., else a tree (parents before children).

    `q[i]` is exactly the distribution that token i was drawn from, over `vocab_ids` where given, else over
    0..V'-1; None means one-hot (a deterministic draft).
    """

    tokens: IntArray  # [n]
    parents: IntArray  # [n], -1 = child of the last committed token
    q: Float32Array | None = None  # [n, V'] or None = one-hot
    vocab_ids: IntArray | None = None  # [V'] ids of q's columns, ascending
    rule: Literal["iid", "without_replacement", "deterministic"] = "deterministic"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True when every token follows the one before it."""
        return bool(np.array_equal(self.parents, np.arange(-1, len(self.tokens) - 1)))


class Drafter(Protocol):
    """Anything that proposes tokens. It must keep its own state consistent with `context`."""

    name: str

    def propose(
        self, context: Sequence[int], k: int, sampling: Sampling, rng: np.random.Generator
    ) -> Proposal:
        """Propose at most k tokens to follow `context` (an append-only view; do not copy it)."""
        ...

    def observe(self, committed: Sequence[int], output: Output | None, rows: Sequence[int]) -> None:
        """Learn what a round committed: the tokens, the verify output, and the rows of the accepted path."""
        ...

    def reset(self) -> None:
        """Forget all context (a new conversation)."""
        ...


@dataclass(frozen=True)
class Plan:
    """What the next round does. No plan changes the text."""

    drafter: str | None
    k: int
    mode: Literal["none", "serial", "overlapped"] = "serial"
    node_budget: int | None = None
    placement: Mapping[str, str] = field(default_factory=dict)
    pace_s: float = 0.0
    draft_loaded: bool = True
    reason: str = ""
    beside_s: float = 0.0  # of an overlapped round's verify: what its draft leaves of it goes to a correction


@dataclass(frozen=True)
class Energy:
    """Joules of a round beside its time: `static_w` is drawn while the device works, whatever runs.

    `verify_j` (a verify forward, by width) and `draft_j` (a draft step, by drafter) come on top of it. A
    round of T seconds thus takes static_w * T + verify_j[k + 1] + k * draft_j. `idle_w` is drawn in a pause
    (None: as much as `static_w`).
    """

    static_w: float
    verify_j: Mapping[int, float]
    draft_j: Mapping[str, float] = field(default_factory=dict)
    idle_w: float | None = None

    @property
    def pause_w(self) -> float:
        """Watts while nothing runs."""
        return self.static_w if self.idle_w is None else self.idle_w


@dataclass(frozen=True)
class Costs:
    """Measured seconds: a verify forward by width, a draft step by drafter, the rest of a round.

    `energy` is None where nothing measures it, which is so on most hosts. `overlapped` holds the same of rounds in
    which draft and target ran at once: what they take beside each other, and what it takes to hand over.
    """

    verify_s: Mapping[int, float]
    draft_s: Mapping[str, float] = field(default_factory=dict)
    overhead_s: float = 0.0
    energy: Energy | None = None
    overlapped: Costs | None = None


@dataclass(frozen=True)
class Objective:
    """What a plan is chosen for.

    `latency`: the most tokens per second; `energy`: the fewest joules per token; `balanced`: the least
    product of the two, seconds times joules per token. Without measured energy all three mean `latency`.
    `margin`: speculation must promise to be this much better than plain decoding.
    """

    kind: Literal["latency", "energy", "balanced"] = "latency"
    margin: float = 1.02

    def __post_init__(self) -> None:
        """Refuse an unknown kind, and a margin that would prefer losing."""
        if self.kind not in ("latency", "energy", "balanced"):
            raise UsageError(f"objective {self.kind!r} is not known; known: latency, energy, balanced")
        if not self.margin >= 1.0:
            raise UsageError(f"margin is {self.margin}; it must be at least 1")


@dataclass(frozen=True)
class Limits:
    """What a plan may do. Text decides the first group, heat and power the second.

    `k_max` is the largest k and `widths` are the compiled ones (None: any). A drafter's `catch_up_s` must be
    spent before its first token, to be earned back within `horizon` tokens; `risk_s` is what it may lose
    if its whole draft is rejected (absent: anything). `plain_allowed` False asks for the best plan that
    drafts (a probe).

    `power_w` bounds mean power and `duty` the share of time that may be worked, both by pacing.
    `reference` holds the costs of the cool state: k is never more than `k_share` (rounded up) of what they
    would give for latency, so that heat never raises k. `drafters` are those that may be used (None: all).

    `overlap` are the drafters that may draft beside a verify forward; `serial_allowed` False refuses to draft before
    one. `k_min` is the least k of a plan that drafts.
    """

    k_max: int
    widths: tuple[int, ...] | None = None
    catch_up_s: Mapping[str, float] = field(default_factory=dict)
    horizon: int = 128
    risk_s: Mapping[str, float] = field(default_factory=dict)
    plain_allowed: bool = True
    power_w: float | None = None
    duty: float = 1.0
    reference: Costs | None = None
    k_share: float = 1.0
    drafters: frozenset[str] | None = None
    overlap: frozenset[str] = frozenset()
    serial_allowed: bool = True
    k_min: int = 0


Quantity = Literal[
    "power",  # W, what is drawn now; discharging a battery is positive
    "energy",  # J, a counter that only grows (wraps are undone by the sensor)
    "temperature",  # °C
    "headroom",  # 1 = the vendor's threshold of severe throttling, 0 = far below
    "throttle",  # 0..1, how far the system holds a unit back now; 0 = not at all
    "clock",  # Hz, what a unit runs at
    "clock_limit",  # Hz, what it may run at now
    "clock_max",  # Hz, what it can run at by design
    "battery",  # %
    "charging",  # 1 or 0
    "memory_available",  # MB that can be used without swapping
    "memory_limit",  # MB that this process may use (cgroup)
    "memory_used",  # MB that count against the limit
    "memory_pressure",  # %, time in which all tasks waited for memory, over 10 s
    "memory_events",  # how often a limit of memory was reached, a counter that only grows (cgroup)
]

Scope = Literal[
    "core", "package", "die", "skin", "rail", "module", "soc", "device", "battery", "memory", "process"
]
Method = Literal["counter", "integrated", "instant", "estimated", "simulated", "replayed"]


@dataclass(frozen=True)
class Reading:
    """One figure that a source gave, or the reason why it gave none; never a made-up zero.

    `source` is stable from run to run ("thermal:cpu-thermal", "rapl:package-0"). `value` is in the unit of
    `quantity`; None means that `reason` says what happened and what would fix it. `time_s` is monotonic: when
    the figure was true, not when it was asked for.
    """

    source: str
    quantity: Quantity
    value: float | None
    scope: Scope
    method: Method
    time_s: float
    reason: str = ""


def as_json(record: Any) -> Any:
    """Turn a record of dataclasses, numpy scalars and arrays into what `json` can write."""
    from dataclasses import fields, is_dataclass

    if is_dataclass(record) and not isinstance(record, type):
        return {f.name: as_json(getattr(record, f.name)) for f in fields(record)}
    if isinstance(record, Mapping):
        return {str(key): as_json(value) for key, value in record.items()}
    if isinstance(record, np.ndarray):
        return record.tolist()
    if isinstance(record, np.generic):
        return record.item()
    if isinstance(record, list | tuple):
        return [as_json(item) for item in record]
    return record
