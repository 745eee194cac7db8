"""What a round was and took, for those who want to know: its consumer, the statistics, the planner, the governor."""

from __future__ import annotations

from outrider.runtime.costs import FAR_BEHIND, snap
from outrider.runtime.governed import Governed
from outrider.runtime.planner import Observation, Planner
from outrider.runtime.request import FinishReason, Round
from outrider.runtime.turn import Run, Turn

__all__ = ["account", "report", "tell"]

Widths = tuple[int, ...] | None


def report(run: Run, turn: Turn, near_tie: float) -> Round:
    """The round as its consumer sees it, counted in the statistics."""
    decision, stats = turn.decision, run.stats
    near_ties = sum(margin < near_tie for margin in decision.margins)
    stats.rounds += 1
    stats.output_tokens += len(decision.tokens)
    stats.near_ties += near_ties
    stats.count_draft(len(turn.proposal), decision.evaluated, decision.accepted)
    stopped = decision.tokens[-1] in run.request.stop_ids
    finish: FinishReason | None = "stop" if stopped else "length" if run.remaining <= 0 else None
    logprobs = tuple(run.judge.logprobs) if run.request.logprobs is not None else None
    return Round(
        decision.tokens,
        finish,
        turn.plan,
        len(turn.proposal),
        decision.evaluated,
        decision.accepted,
        near_ties,
        logprobs,
        turn.draft_s,
        turn.verify_s,
        stats,
        turn.directive,
        turn.ready,
        turn.guess,
    )


def account(run: Run, turn: Turn, result: Round, planner: Planner, widths: Widths) -> None:
    """Times for the statistics and the planner; the first round, part of the prefill, teaches nothing."""
    caught, stats, worked = turn.caught, run.stats, turn.worked
    stats.count_ahead(turn.beside, turn.guess, worked)
    stats.paced_s += caught.slept_s
    if stats.rounds == 1:
        return
    stats.decode_s += turn.round_s + caught.seconds
    stats.draft_s += turn.draft_s + caught.seconds
    stats.verify_s += turn.verify_s
    if len(turn.pending) > 1:
        return
    planner.observe(
        Observation(
            turn.plan,
            result.drafted,
            result.evaluated,
            result.accepted,
            len(result.tokens),
            turn.round_s,
            turn.draft_s,
            turn.verify_s,
            snap(1 + result.drafted, widths),
            turn.kinds.get(turn.plan.drafter or "", ""),
            turn.backlog,
            cut=result.finish_reason is not None,
            ready=turn.ready,
            beside=turn.beside,
            guess=turn.guess,
            ahead_steps=worked.steps,
            ahead_s=worked.seconds,
            corrections=worked.corrections,
            corrected=worked.held,
        )
    )


def tell(turn: Turn, governed: Governed, widths: Widths) -> None:
    """Let the governor know what ran (a draft that stops short, one step for nothing) and what was unusual."""
    pending, drafted, worked = len(turn.pending), len(turn.proposal), turn.worked
    if pending > FAR_BEHIND:
        governed.saw_prompt(pending, snap(pending, widths), turn.round_s)
        return
    needed = max(0, min(turn.plan.k, drafted + 1) - worked.behind)
    steps = worked.steps + (needed if worked.held or not turn.ready else 0)
    governed.saw(snap(pending + drafted, widths), turn.plan.drafter, steps, turn.is_odd, turn.round_s)
