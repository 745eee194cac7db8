"""Traces of generations (see `outrider.lines`), and the replay that proves a `decode` trace.

Header of `decode`: `sampling` (all fields), `vocab_limit`, `prompt`, `stop_ids`, `max_new_tokens`; other keys
are free.

`decode` round: `position` (of the first token to commit), `plan` (drafter, k, mode, reason), `proposal` (tokens,
parents, rule, `vocab_ids` and `q` as lists or null), `rows`, `tokens`, `path`, `evaluated`, `cut`. A row, one
for each decision in order: `row`, `top` (ids, values and logsumexp of the processed logits), `uniform` or
null, `chances` (ids and probs of what was drawn from; null when greedy or above 4096 ids), `token`, `node`.

`acceptance` records come from `outrider.runtime.acceptance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from outrider.contracts import Plan, Proposal, Sampling
from outrider.errors import TraceError
from outrider.lines import LineWriter, read_lines
from outrider.runtime.judge import Judged
from outrider.runtime.sampling import Distribution, draw, largest
from outrider.runtime.uniforms import Uniforms
from outrider.runtime.verify import Decision, Step, match_child, reject_child, walk

__all__ = ["Replay", "TraceWriter", "replay"]

_TOP = 16
_LARGEST_SUPPORT = 4096


class TraceWriter(LineWriter):
    """Writes a `decode` trace."""

    def __init__(self, target: str | Path | TextIO, **header: Any) -> None:
        super().__init__(target, "decode", header, allow_nan=True)  # a bias of minus infinity is a ban

    def round(
        self, position: int, proposal: Proposal, judged: Sequence[Judged], decision: Decision, plan: Plan
    ) -> None:
        """Append one round of a `decode` trace."""
        self.write(
            {
                "position": position,
                "plan": {"drafter": plan.drafter, "k": plan.k, "mode": plan.mode, "reason": plan.reason},
                "proposal": proposal,
                "rows": [_row_record(row) for row in judged],
                "tokens": decision.tokens,
                "path": decision.path,
                "evaluated": decision.evaluated,
                "cut": decision.cut,
            }
        )


def _row_record(judged: Judged) -> dict[str, Any]:
    row = judged.processed
    ids = largest(row, _TOP)
    ids = ids[np.isfinite(row[ids])]
    top = float(row.max())
    logsumexp = top + float(np.log(np.exp(row.astype(np.float64) - top).sum()))
    chances = judged.chances
    small = chances is not None and len(chances.probs) <= _LARGEST_SUPPORT
    return {
        "row": judged.row,
        "top": {"ids": ids, "values": row[ids], "logsumexp": logsumexp},
        "uniform": judged.uniform,
        "chances": {"ids": chances.ids, "probs": chances.probs} if small and chances else None,
        "token": judged.step.token,
        "node": judged.step.node,
    }


@dataclass(frozen=True)
class Replay:
    """What a replay went through: rounds decided again, rounds without enough recorded to decide, tokens."""

    rounds: int
    skipped: int
    tokens: tuple[int, ...]


def replay(source: str | Path | Iterable[str]) -> Replay:
    """Decide every round of a `decode` trace again from its rows; raises TraceError at a difference.

    Uniforms are derived again from seed and position. Rounds that were drawn from more ids than a trace
    keeps are counted as skipped.
    """
    trace = read_lines(source, "decode")
    header = trace.header
    sampling = Sampling(**_sampling_fields(header["sampling"]))
    uniforms = Uniforms(sampling.seed)
    stop_ids = frozenset(header.get("stop_ids", ()))
    tokens: list[int] = []
    skipped = rounds = 0
    for _, record in trace:
        rounds += 1
        tokens.extend(record["tokens"])
        if not sampling.greedy and any(row["chances"] is None for row in record["rows"]):
            skipped += 1
            continue
        _replay_round(record, sampling, uniforms, stop_ids, rounds)
    return Replay(rounds, skipped, tuple(tokens))


def _sampling_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(stored)
    fields["logit_bias"] = {int(token): bias for token, bias in fields.get("logit_bias", {}).items()}
    fields["banned_tokens"] = tuple(fields.get("banned_tokens", ()))
    return fields


def _replay_round(
    record: Mapping[str, Any], sampling: Sampling, uniforms: Uniforms, stop_ids: frozenset[int], number: int
) -> None:
    proposal = _proposal(record["proposal"])
    rows = {row["row"]: row for row in record["rows"]}
    decided = 0

    def judge(row: int, candidates: list[int]) -> Step:
        nonlocal decided
        if row not in rows:
            raise TraceError(f"round {number}: the replay reaches row {row}, which the trace never decided")
        step = _decide(rows[row], sampling, uniforms(record["position"] + decided), proposal, candidates)
        decided += 1
        return step

    limit = len(record["tokens"]) if record["cut"] else None
    decision = walk(proposal, judge, stop_ids, limit)
    for name, value in (("tokens", list(decision.tokens)), ("path", list(decision.path))):
        if value != record[name]:
            raise TraceError(
                f"round {number}: the trace has {name} {record[name]}, the replay decides {value}"
            )


def _decide(
    row: Mapping[str, Any], sampling: Sampling, uniform: float, proposal: Proposal, candidates: list[int]
) -> Step:
    drafted = proposal.tokens.tolist()
    if sampling.greedy:
        top = row["top"]
        best = min(zip((-value for value in top["values"]), top["ids"], strict=True))[1]
        return Step(best, match_child(best, candidates, drafted), 0.0)
    if row["uniform"] != uniform:
        raise TraceError(
            f"row {row['row']}: the trace has uniform {row['uniform']}, seed and position give {uniform}"
        )
    stored = row["chances"]
    ids = None if stored["ids"] is None else np.array(stored["ids"], np.int64)
    chances = Distribution(ids, np.array(stored["probs"], np.float64))
    if sampling.mode == "reject":
        return reject_child(chances, candidates, proposal, uniform)
    token, _ = draw(chances, uniform)
    return Step(token, match_child(token, candidates, drafted), 0.0)


def _proposal(stored: Mapping[str, Any]) -> Proposal:
    q, ids = stored["q"], stored["vocab_ids"]
    return Proposal(
        np.array(stored["tokens"], np.int64),
        np.array(stored["parents"], np.int64),
        None if q is None else np.array(q, np.float32),
        None if ids is None else np.array(ids, np.int64),
        stored["rule"],
    )
