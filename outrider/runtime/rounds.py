"""The round engine: draft, verify in one target forward, commit; for any Graph and any Drafter.

What is committed is the target's own text: the drafter and the plan decide how fast it comes, never
what it is. The last committed token is not in the target's KV cache; it is folded into the next verify
forward as its first row, which saves one target forward a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.contracts import (
    Drafter,
    Float32Array,
    Graph,
    IntArray,
    LogitsRequest,
    Output,
    Plan,
    Proposal,
    TopRows,
)
from outrider.errors import BackendError, ContextError, UsageError
from outrider.power.governor import Directive
from outrider.runtime import trace as tracing
from outrider.runtime.catch_up import CatchingUp, Caught
from outrider.runtime.context import Context, common_prefix
from outrider.runtime.costs import FAR_BEHIND
from outrider.runtime.governed import LEAST_CHUNK, Governed
from outrider.runtime.judge import Judge
from outrider.runtime.overlap import Ahead, Timeline, Worked, can_overlap
from outrider.runtime.pacing import Pacer
from outrider.runtime.planner import Modes, Observation, Planner
from outrider.runtime.request import FinishReason, Request, Round, refuse_k
from outrider.runtime.stats import Stats
from outrider.runtime.uniforms import draft_generator
from outrider.runtime.verify import Decision, depths, tree_mask, walk

__all__ = ["Engine", "FinishReason", "Request", "Round", "refuse_k"]

Progress = Callable[[int, int], None]

_NO_TOKENS = np.empty(0, np.int64)
_NOTHING = Proposal(_NO_TOKENS, _NO_TOKENS)


@dataclass
class _Run:
    """The state of one generation."""

    request: Request
    context: Context
    judge: Judge
    stats: Stats
    limit: int  # length that the context may reach
    ticket: int
    trace: tracing.TraceWriter | None
    kinds: dict[str, str] = field(default_factory=dict)  # of this round's possible proposals, by drafter
    backlogs: dict[str, int] = field(default_factory=dict)
    ready: bool = False  # the draft of this round was made beside the last verify
    beside: bool = False  # assumed work ran beside this round's verify
    guess: bool | None = None  # whether its guess came true
    caught: Caught = field(default_factory=Caught)  # up by a drafter in this round, before it drafted
    odd: bool = False  # whether the last round did more than a plan knows: a chunk, a draft that catches up

    @property
    def remaining(self) -> int:
        return self.limit - len(self.context)


class Engine:
    """Decodes with one target and any drafters, and keeps the target's KV cache from call to call.

    `vocab_limit` is the size of the tokenizer: ids from there on are padding of the graph's vocabulary
    and never chosen. `near_tie` is the float noise of a logit, below which a decision counts as a near
    tie. `planner` chooses k where a request says "auto" (default: a fresh one). `pacer` brings heat and power
    into its choice; pauses that hold a limit call `sleep`. The engine owns neither the graphs nor the
    drafters' graphs: `close` them where they were opened, after `settle`.

    `apart` names the drafters that run on another unit than the target: where a request leaves it open, they may
    draft beside a verify forward. `timeline` is for graphs that share a virtual time.
    """

    def __init__(
        self,
        target: Graph,
        drafters: Mapping[str, Drafter] | None = None,
        planner: Planner | None = None,
        vocab_limit: int | None = None,
        prefill_chunk: int = 512,
        near_tie: float = 1e-3,
        clock: Callable[[], float] = time.perf_counter,
        pacer: Pacer | None = None,
        sleep: Callable[[float], None] = time.sleep,
        apart: Collection[str] = (),
        timeline: Timeline | None = None,
    ) -> None:
        if vocab_limit is not None and not 0 < vocab_limit <= target.vocab_size:
            raise UsageError(f"vocab_limit is {vocab_limit}; the target has {target.vocab_size} ids")
        self.target = target
        self.drafters = dict(drafters or {})
        self.planner = planner or Planner()
        self.vocab_limit = vocab_limit or target.vocab_size
        self._widest = max(target.widths) if target.widths else None
        self._chunk = min(prefill_chunk, self._widest or prefill_chunk)
        self._near_tie = near_tie
        self._clock = clock
        self._apart = frozenset(apart)
        self._ahead = Ahead(clock, timeline)
        self._governed = Governed(pacer, self.drafters, clock, sleep, self._ahead.drop)
        self._catching_up = CatchingUp(self.drafters, self._governed, clock, self._ahead.drop)
        self._cached: list[int] = []  # tokens of the target's KV rows
        self._ticket = 0

    @property
    def cached(self) -> tuple[int, ...]:
        """The tokens whose KV rows the target holds."""
        return tuple(self._cached[: self.target.length])

    def reset(self) -> None:
        """Forget all context, in the target and in the drafters."""
        self.settle()
        self._ticket += 1
        self._cached.clear()
        self.target.truncate(0)
        for drafter in self.drafters.values():
            drafter.reset()

    def settle(self) -> None:
        """End what a generation that was not closed still drafts ahead, and its thread; the drafters are free then."""
        self._ahead.close()

    def decode(
        self,
        prompt: Sequence[int],
        request: Request | None = None,
        progress: Progress | None = None,
        trace: tracing.TraceWriter | None = None,
    ) -> Generator[Round, None, None]:
        """Generate after `prompt` [S]; yields a `Round` for every target forward that committed tokens.

        The longest prefix shared with what the KV cache holds is not run again. `progress(done, total)`
        is called after every chunk of the prompt. Closing the iterator at any point leaves the KV cache
        equal to a prefix of prompt and committed tokens. Raises UsageError for an empty prompt or an
        unknown id or drafter, ContextError when the prompt leaves no room for a token.
        """
        request = request or Request()
        self._check(prompt, request)
        self.settle()
        self._ticket += 1
        room = self.target.max_context
        limit = room if request.max_new_tokens is None else min(room, len(prompt) + request.max_new_tokens)
        context = Context(prompt)
        judge = Judge(
            request.sampling,
            self.vocab_limit,
            context[:],
            self._near_tie,
            request.logprobs,
            record=trace is not None,
        )
        run = _Run(request, context, judge, Stats(prompt_tokens=len(prompt)), limit, self._ticket, trace)
        return self._rounds(run, progress)

    def _check(self, prompt: Sequence[int], request: Request) -> None:
        if len(prompt) == 0:
            raise UsageError("the prompt is empty; give at least one token")
        strange = next((token for token in prompt if not 0 <= token < self.target.vocab_size), None)
        if strange is not None:
            raise UsageError(
                f"prompt token {strange} is not in the vocabulary of {self.target.vocab_size} ids"
            )
        if len(prompt) >= self.target.max_context:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens; the context holds {self.target.max_context}, and at"
                " least one must be free. Shorten the prompt, or allow a longer one at loading (max_context,"
                " memory_limit_mb) up to what was exported, or export for more"
            )
        if request.drafter is not None and request.drafter not in self.drafters:
            known = ", ".join(self.drafters) or "none"
            raise UsageError(f"unknown drafter {request.drafter!r}; this engine has: {known}")
        if request.drafting == "overlapped" and not self._overlapping(request):
            raise UsageError(
                "drafting is 'overlapped', and no drafter that was asked for can draft beside the target: a draft"
                " model can, lookup takes no time. Leave the option out, or load a draft model"
            )
        if self._widest and request.k != "auto" and request.k >= self._widest:
            raise UsageError(
                f"k is {request.k}; the target is compiled for widths {self.target.widths}, so k can be"
                f" at most {self._widest - 1}"
            )

    def _rounds(self, run: _Run, progress: Progress | None) -> Generator[Round, None, None]:
        started = self._clock()
        self.planner.begin(self.target.widths)
        self._prefill(run, progress)
        run.stats.prefill_s = self._clock() - started
        try:
            yield from self._until_finished(run, started)
        finally:
            if run.ticket == self._ticket:
                self.settle()

    def _until_finished(self, run: _Run, started: float) -> Generator[Round, None, None]:
        finish: FinishReason | None = None
        while finish is None:
            if run.ticket != self._ticket:
                raise UsageError("another generation has started on this engine; this one cannot go on")
            begin, priced = self._clock(), bool(self.planner.costs.verify_s)
            result = self._round(run)
            finish = result.finish_reason
            ended = self._clock()
            if run.stats.rounds == 1:
                run.stats.ttft_s = ended - started
                run.stats.first_tokens = len(result.tokens)
            worked_s = ended - begin - run.caught.all_s
            pace_s = self._governed.pace_s(result.plan.pace_s, worked_s, priced and not run.odd)
            yield result
            if finish is None:
                run.stats.paced_s += self._governed.pause(pace_s, ended)
                run.stats.paced_s += self._governed.admit(1)

    def _prefill(self, run: _Run, progress: Progress | None) -> None:
        """Run the prompt up to its last chunk, which the first round folds in."""
        prompt, total = run.context, len(run.context)
        self._reuse(prompt)
        run.stats.reused_tokens = self.target.length
        if total - self.target.length > LEAST_CHUNK:
            self._governed.ask(self.planner, run.stats)
        widths = self.target.widths
        while total - (start := self.target.length) > (size := self._governed.chunk(self._chunk, widths)):
            self._governed.admit(size)
            chunk = prompt[start : start + size]
            begin = self._clock()
            self.target.forward(chunk, logits="none")
            self._commit(chunk, range(len(chunk)))
            ended = self._clock()
            self._governed.saw_prompt(len(chunk), self._width(len(chunk)), ended - begin)
            self._governed.pause(self._governed.rest_s(ended - begin), ended)
            if progress is not None:
                progress(self.target.length, total)
            self._governed.ask(self.planner, run.stats)
        self._governed.admit(total - self.target.length)
        if progress is not None:
            progress(total, total)

    def _reuse(self, prompt: Context) -> None:
        """Keep the KV rows of the longest common prefix; the prompt's last token is always run."""
        del self._cached[self.target.length :]
        keep = min(common_prefix(self._cached, prompt), len(prompt) - 1, len(self._cached))
        if keep < self.target.length:
            self.target.truncate(keep)
        del self._cached[keep:]

    def _commit(self, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """Commit rows; the list goes first, so that an interrupt between the two is seen by `_reuse`."""
        self._cached.extend(tokens)
        self.target.commit(rows)

    def _round(self, run: _Run) -> Round:
        begin = self._clock()
        context = run.context
        pending = context[self.target.length :]  # committed, not in the KV cache: the anchor, or a last chunk
        directive = self._governed.ask(self.planner, run.stats)
        run.caught = Caught()
        plan = self._catch_up(run, self._plan(run, len(pending), directive), directive)
        drafting = self._clock()
        proposal = self._propose(run, plan)
        run.beside = self._look_ahead(run, plan, proposal)
        verifying = self._clock()
        output, rows = self._verify(pending, proposal, run.judge)
        verified = self._clock()
        position = len(context)
        run.judge.begin(rows, position, proposal)
        decision = walk(proposal, run.judge, run.request.stop_ids, run.remaining)
        run.guess = self._ahead.judge(proposal, decision)
        self._keep(run, pending, plan, decision, output)
        if run.trace is not None:
            run.trace.round(position, proposal, run.judge.judged, decision, plan)
        result = self._report(run, plan, len(proposal), decision, verifying - drafting, verified - verifying)
        self._ahead.settle_missed()
        worked = self._ahead.collect()
        run.stats.count_ahead(run.beside, run.guess, worked)
        round_s = self._clock() - begin - run.caught.all_s
        self._account(run, result, len(pending), round_s, worked)
        self._tell(run, result, len(pending), round_s, worked)
        return result

    def _keep(self, run: _Run, pending: list[int], plan: Plan, decision: Decision, output: Output) -> None:
        """Commit the KV rows of all committed tokens but the last, which becomes the next anchor."""
        path = decision.path[: len(decision.tokens) - 1]
        rows = [*range(len(pending)), *(len(pending) + node for node in path)]
        self._commit([*pending, *decision.tokens[:-1]], rows)
        run.context.extend(decision.tokens)
        if plan.drafter is not None:
            self.drafters[plan.drafter].observe(decision.tokens, output, rows)

    def _report(
        self, run: _Run, plan: Plan, drafted: int, decision: Decision, draft_s: float, verify_s: float
    ) -> Round:
        near_ties = sum(margin < self._near_tie for margin in decision.margins)
        run.stats.rounds += 1
        run.stats.output_tokens += len(decision.tokens)
        run.stats.near_ties += near_ties
        run.stats.count_draft(drafted, decision.evaluated, decision.accepted)
        stopped = decision.tokens[-1] in run.request.stop_ids
        finish: FinishReason | None = "stop" if stopped else "length" if run.remaining <= 0 else None
        logprobs = tuple(run.judge.logprobs) if run.request.logprobs is not None else None
        return Round(
            decision.tokens,
            finish,
            plan,
            drafted,
            decision.evaluated,
            decision.accepted,
            near_ties,
            logprobs,
            draft_s,
            verify_s,
            run.stats,
            self._governed.directive,
            run.ready,
            run.guess,
        )

    def _plan(self, run: _Run, pending: int, directive: Directive | None) -> Plan:
        """Who drafts how much now, within what both contexts, the widths, the request and the governor allow."""
        request = run.request
        run.kinds, run.backlogs = {}, {}
        if pending > 1:
            return Plan(None, 0, "none", reason="prefill")
        most = min(run.remaining - 1, (self._widest or self.target.max_context) - 1)
        if request.k == 0 or most < 1:
            plan = Plan(None, 0, "none", reason="no draft fits" if request.k else "k is 0")
            return self._paced(plan, directive)
        names = [request.drafter] if request.drafter else list(self.drafters)
        names = [name for name in names if getattr(self.drafters[name], "loaded", True)]
        run.kinds = self._kinds(run.context, names)
        run.backlogs = {name: self._backlog(name, run.context) for name in run.kinds}
        serial = request.drafting != "overlapped"
        able = frozenset(name for name in names if getattr(self.drafters[name], "corrects", False))
        modes = Modes(self._overlapping(request), serial, self._catching_up.names, able)
        if request.k == "auto":
            return self._chosen(run, most, directive, modes)
        plan = Plan(None, 0, "none", reason="nothing to propose")
        if run.kinds:
            plan = Plan(next(iter(run.kinds)), min(request.k, most), reason="fixed k")
            plan = self.planner.with_mode(plan, run.kinds, directive, modes)
        return self._paced(plan, directive)

    def _overlapping(self, request: Request) -> frozenset[str]:
        """The drafters that may draft beside a verify forward, by what they can and what the request says."""
        able = {name for name, drafter in self.drafters.items() if can_overlap(drafter)}
        able &= {request.drafter} if request.drafter else able
        if request.drafting == "auto":
            able &= self._apart
        return frozenset(able if request.drafting != "serial" else ())

    def _backlog(self, name: str, context: Context) -> int:
        """Tokens that a drafter must run before it can propose; 0 when it keeps no such state, or is ahead."""
        ask = getattr(self.drafters[name], "backlog", None)
        if ask is None or self._ahead.ready(name, len(context)):
            return 0
        return int(ask(context))

    def _chosen(self, run: _Run, most: int, directive: Directive | None, modes: Modes) -> Plan:
        """The planner's choice, once it knows what a step takes of drafters that must run a prompt for a draft."""
        while True:
            sampling = run.request.sampling
            priced = self._catching_up.price(run.caught, run.backlogs, run.context, sampling, self.planner)
            plan = self.planner.plan(run.kinds, most, run.backlogs, run.remaining, directive, modes)
            if plan.k or not priced:
                return plan

    def _catch_up(self, run: _Run, plan: Plan, directive: Directive | None) -> Plan:
        """The plan, once its drafter has run what it has not seen; a plain one where that turns out too costly."""
        if plan.drafter is None or run.backlogs.get(plan.drafter, 0) <= FAR_BEHIND:
            return plan
        known = run.context, run.request.sampling, self.planner, run.request.k == "auto"
        if self._catching_up.run(run.caught, plan, run.backlogs, *known):
            return plan
        return self._paced(Plan(None, 0, "none", reason="catching up is too slow"), directive)

    def _paced(self, plan: Plan, directive: Directive | None) -> Plan:
        return plan if directive is None else self.planner.paced(plan, directive)

    def _kinds(self, context: Context, names: list[str]) -> dict[str, str]:
        """The drafters that can propose now, with the kind of proposal (see `LookupDrafter.kind`)."""
        kinds = {}
        for name in names:
            ask = getattr(self.drafters[name], "kind", None)
            kind = "" if ask is None else ask(context)
            if kind is not None:
                kinds[name] = kind
        return kinds

    def _propose(self, run: _Run, plan: Plan) -> Proposal:
        run.ready = plan.k > 0 and self._ahead.ready(plan.drafter, len(run.context))
        if run.ready:
            self._ahead.settle()
        else:
            self._ahead.drop()
        if plan.drafter is None or plan.k == 0:
            return _NOTHING
        sampling = run.request.sampling
        rng = draft_generator(sampling.seed, len(run.context))
        proposal = self.drafters[plan.drafter].propose(run.context, plan.k, sampling, rng)
        most = plan.node_budget or plan.k
        if len(proposal) > (self._widest or self.target.max_context) - 1 or len(proposal) > most:
            raise BackendError(
                f"drafter {plan.drafter!r} proposed {len(proposal)} tokens; it was asked for {most}"
            )
        return proposal

    def _look_ahead(self, run: _Run, plan: Plan, proposal: Proposal) -> bool:
        """Start to draft the next round, as if this one were accepted whole; False where that is not to be."""
        if plan.mode != "overlapped" or plan.drafter is None or not 0 < len(proposal) == plan.k:
            return False
        start = len(run.context) + len(proposal) + 1
        most = min(run.limit - start, self._widest or self.target.max_context) - 1
        drafter, seed = self.drafters[plan.drafter], run.request.sampling.seed
        return self._ahead.start(plan.drafter, drafter, seed, start, min(plan.k, most), plan.beside_s)

    def _verify(
        self, pending: Sequence[int], proposal: Proposal, judge: Judge
    ) -> tuple[Output, Float32Array | TopRows]:
        """One target forward over pending tokens and drafts; logits [1 + n, V] of anchor and drafts."""
        n = len(proposal)
        last = len(pending) - 1
        if n == 0:
            return judge.ask(self.target, pending, None, None, "last")
        # An id that the target lacks has probability 0: judged as drafted, but run as another token.
        known = np.where(proposal.tokens < self.target.vocab_size, proposal.tokens, 0)
        tokens = np.concatenate([np.asarray(pending, np.int64), known])
        positions, mask = (None, None) if proposal.is_chain else self._tree(len(pending), proposal)
        wanted: LogitsRequest = "all" if last == 0 else range(last, last + 1 + n)
        return judge.ask(self.target, tokens, positions, mask, wanted)

    def _tree(self, pending: int, proposal: Proposal) -> tuple[IntArray, np.ndarray]:
        """Positions by depth, and the mask in which nodes see the pending tokens and their own ancestors."""
        start = self.target.length
        n = len(proposal)
        positions = np.concatenate([np.arange(pending), pending - 1 + depths(proposal.parents)]) + start
        mask = np.tri(pending + n, dtype=np.bool_)
        mask[pending:, pending:] = tree_mask(proposal.parents)
        return positions, mask

    def _account(self, run: _Run, result: Round, pending: int, round_s: float, worked: Worked) -> None:
        """Times for the statistics and the planner; the first round, part of the prefill, teaches nothing."""
        caught = run.caught
        run.stats.paced_s += caught.slept_s
        if run.stats.rounds == 1:
            return
        run.stats.decode_s += round_s + caught.seconds
        run.stats.draft_s += result.draft_s + caught.seconds
        run.stats.verify_s += result.verify_s
        if pending > 1:
            return
        self.planner.observe(
            Observation(
                result.plan,
                result.drafted,
                result.evaluated,
                result.accepted,
                len(result.tokens),
                round_s,
                result.draft_s,
                result.verify_s,
                self._width(1 + result.drafted),
                run.kinds.get(result.plan.drafter or "", ""),
                run.backlogs.get(result.plan.drafter or "", 0),
                cut=result.finish_reason is not None,
                ready=run.ready,
                beside=run.beside,
                guess=run.guess,
                ahead_steps=worked.steps,
                ahead_s=worked.seconds,
                corrections=worked.corrections,
                corrected=worked.held,
            )
        )

    def _tell(self, run: _Run, result: Round, pending: int, round_s: float, worked: Worked) -> None:
        """Let the governor know what ran (a draft that stops short, one step for nothing) and what was unusual."""
        drafter = result.plan.drafter
        run.odd = pending > 1 or run.backlogs.get(drafter or "", 0) > FAR_BEHIND
        if pending > FAR_BEHIND:
            self._governed.saw_prompt(pending, self._width(pending), round_s)
        else:
            needed = max(0, min(result.plan.k, result.drafted + 1) - worked.behind)
            steps = worked.steps + (needed if worked.held or not run.ready else 0)
            self._governed.saw(self._width(pending + result.drafted), drafter, steps, run.odd, round_s)

    def _width(self, tokens: int) -> int:
        """The compiled width that a forward of so many tokens runs at."""
        return min((width for width in self.target.widths or () if width >= tokens), default=tokens)
