"""The round engine: draft, verify in one target forward, commit; for any Graph and any Drafter.

What is committed is the target's own text: the drafter and the plan decide how fast it comes, never
what it is. The last committed token is not in the target's KV cache; it is folded into the next verify
forward as its first row, which saves one target forward a round.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from outrider.contracts import (
    BoolArray,
    Drafter,
    Float32Array,
    Graph,
    IntArray,
    LogitsRequest,
    Output,
    Proposal,
    TopRows,
)
from outrider.errors import BackendError, ContextError, UsageError
from outrider.runtime import accounts
from outrider.runtime import trace as tracing
from outrider.runtime.choosing import Choosing
from outrider.runtime.context import Context, common_prefix
from outrider.runtime.costs import snap
from outrider.runtime.governed import LEAST_CHUNK, Governed
from outrider.runtime.judge import Judge
from outrider.runtime.overlap import Ahead, Timeline
from outrider.runtime.pacing import Pacer
from outrider.runtime.planner import Planner
from outrider.runtime.request import FinishReason, Request, Round, refuse_k
from outrider.runtime.stats import Stats
from outrider.runtime.turn import NO_DRAFT, Run, Turn
from outrider.runtime.uniforms import draft_generator
from outrider.runtime.verify import depths, tree_mask, walk

__all__ = ["Engine", "FinishReason", "Request", "Round", "refuse_k"]

Progress = Callable[[int, int], None]


class Engine:
    """Decodes with one target and any drafters, and keeps the target's KV cache from call to call.

    `vocab_limit` is the size of the tokenizer: ids from there on are padding of the graph's vocabulary
    and never chosen. `near_tie` is the float noise of a logit, below which a decision counts as a near
    tie. `planner` chooses k where a request says "auto" (default: a fresh one). `pacer` brings heat and power
    into its choice; pauses that hold a limit call `sleep`. The engine owns neither the graphs nor the
    drafters' graphs: `close` them where they were opened, after `settle`.

    `apart` names the drafters that run on another unit than the target: where a request leaves it open, they may
    draft beside a verify forward. `timeline` is for graphs that share a virtual time.

    It decodes one text at a time: a text that begins ends the one before, and where another thread is in the middle of
    a round, both are refused. `at_work` is held by whoever runs the graphs; hold it to close them.
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
        self._widest = max(target.widths) if target.widths else target.max_context
        self._chunk = min(prefill_chunk, self._widest)
        self._near_tie = near_tie
        self._clock = clock
        self._ahead = Ahead(clock, timeline)
        self._governed = Governed(pacer, self.drafters, clock, sleep, self._ahead.drop)
        self._choosing = Choosing(self.drafters, apart, self._widest, self._governed, self._ahead, clock)
        self._lock, self._process = threading.RLock(), os.getpid()
        self._cached: list[int] = []  # tokens of the target's KV rows
        self._ticket = 0

    @property
    def at_work(self) -> threading.RLock:
        """Held by whoever runs the graphs; a new one after a fork, where the thread that holds it may not be."""
        if self._process != os.getpid():
            self._lock, self._process = threading.RLock(), os.getpid()
        return self._lock

    @property
    def cached(self) -> tuple[int, ...]:
        """The tokens whose KV rows the target holds."""
        return tuple(self._cached[: self.target.length])

    def reset(self) -> None:
        """Forget all context, in the target and in the drafters; waits for a round that another thread is in."""
        with self.at_work:
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
        equal to a prefix of prompt and committed tokens. Raises UsageError for an empty prompt, an unknown id or
        drafter, and while another thread decodes; ContextError when the prompt leaves no room for a token.
        """
        request = request or Request()
        self._check(prompt, request)
        with self._alone():
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
        run = Run(request, context, judge, Stats(prompt_tokens=len(prompt)), limit, self._ticket, trace)
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
        if request.drafting == "overlapped" and not self._choosing.overlapping(request):
            raise UsageError(
                "drafting is 'overlapped', and no drafter that was asked for can draft beside the target: a draft"
                " model can, lookup takes no time. Leave the option out, or load a draft model"
            )
        if self.target.widths and request.k != "auto" and request.k >= self._widest:
            raise UsageError(
                f"k is {request.k}; the target is compiled for widths {self.target.widths}, so k can be"
                f" at most {self._widest - 1}"
            )

    def _rounds(self, run: Run, progress: Progress | None) -> Generator[Round, None, None]:
        started = self._clock()
        with self._alone(run):
            self.planner.begin(self.target.widths)
            self._prefill(run, progress)
        run.stats.prefill_s = self._clock() - started
        try:
            yield from self._until_finished(run, started)
        finally:
            if run.ticket == self._ticket:
                self.settle()

    def _until_finished(self, run: Run, started: float) -> Generator[Round, None, None]:
        finish: FinishReason | None = None
        while finish is None:
            begin, priced = self._clock(), bool(self.planner.costs.verify_s)
            with self._alone(run):
                result, turn = self._round(run)
            finish = result.finish_reason
            ended = self._clock()
            if run.stats.rounds == 1:
                run.stats.ttft_s = ended - started
                run.stats.first_tokens = len(result.tokens)
            worked_s = ended - begin - turn.caught.all_s
            pace_s = self._governed.pace_s(turn.plan.pace_s, worked_s, priced and not turn.is_odd)
            yield result
            if finish is None:
                run.stats.paced_s += self._governed.pause(pace_s, ended)
                run.stats.paced_s += self._governed.admit(1)

    def _round(self, run: Run) -> tuple[Round, Turn]:
        begin = self._clock()
        turn = Turn(run.context[self.target.length :], self._governed.ask(self.planner, run.stats))
        turn.plan = self._choosing.plan(run, turn, self.planner)
        drafting = self._clock()
        turn.proposal = proposal = self._propose(run, turn)
        turn.beside = self._look_ahead(run, turn)
        verifying = self._clock()
        output, rows = self._verify(turn.pending, proposal, run.judge)
        turn.draft_s, turn.verify_s = verifying - drafting, self._clock() - verifying
        position = len(run.context)
        run.judge.begin(rows, position, proposal)
        turn.decision = walk(proposal, run.judge, run.request.stop_ids, run.remaining)
        turn.guess = self._ahead.judge(proposal, turn.decision)
        self._keep(run, turn, output)
        if run.trace is not None:
            run.trace.round(position, proposal, run.judge.judged, turn.decision, turn.plan)
        result = accounts.report(run, turn, self._near_tie)
        self._ahead.settle_missed()
        turn.worked = self._ahead.collect()
        turn.round_s = self._clock() - begin - turn.caught.all_s
        accounts.account(run, turn, result, self.planner, self.target.widths)
        accounts.tell(turn, self._governed, self.target.widths)
        return result, turn

    def _propose(self, run: Run, turn: Turn) -> Proposal:
        """The draft of the plan: made now, or beside the last verify."""
        plan = turn.plan
        turn.ready = plan.k > 0 and self._ahead.ready(plan.drafter, len(run.context))
        if turn.ready:
            self._ahead.settle()
        else:
            self._ahead.drop()
        if plan.drafter is None or plan.k == 0:
            return NO_DRAFT
        sampling = run.request.sampling
        rng = draft_generator(sampling.seed, len(run.context))
        proposal = self.drafters[plan.drafter].propose(run.context, plan.k, sampling, rng)
        most = min(plan.node_budget or plan.k, self._widest - 1)
        if len(proposal) > most:
            raise BackendError(
                f"drafter {plan.drafter!r} proposed {len(proposal)} tokens; it was asked for {most}"
            )
        return proposal

    def _look_ahead(self, run: Run, turn: Turn) -> bool:
        """Start to draft the next round, as if this one were accepted whole; False where that is not to be."""
        plan, drafted = turn.plan, len(turn.proposal)
        if plan.mode != "overlapped" or plan.drafter is None or not 0 < drafted == plan.k:
            return False
        start = len(run.context) + drafted + 1
        k = min(plan.k, min(run.limit - start, self._widest) - 1)
        drafter, seed = self.drafters[plan.drafter], run.request.sampling.seed
        return self._ahead.start(plan.drafter, drafter, seed, start, k, plan.beside_s)

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
        positions, mask = (None, None)
        if not proposal.is_chain:
            positions, mask = _tree(self.target.length, len(pending), proposal)
        wanted: LogitsRequest = "all" if last == 0 else range(last, last + 1 + n)
        return judge.ask(self.target, tokens, positions, mask, wanted)

    def _keep(self, run: Run, turn: Turn, output: Output) -> None:
        """Commit the KV rows of all committed tokens but the last, which becomes the next anchor."""
        pending, decision = turn.pending, turn.decision
        path = decision.path[: len(decision.tokens) - 1]
        rows = [*range(len(pending)), *(len(pending) + node for node in path)]
        self._commit([*pending, *decision.tokens[:-1]], rows)
        run.context.extend(decision.tokens)
        if turn.plan.drafter is not None:
            self.drafters[turn.plan.drafter].observe(decision.tokens, output, rows)

    @contextmanager
    def _alone(self, run: Run | None = None) -> Iterator[None]:
        """The graphs, for one step of a text that no other has taken over."""
        at_work = self.at_work
        if not at_work.acquire(blocking=False):
            raise UsageError(
                "another thread is at work with this engine, which decodes one text at a time: wait for it, or load"
                " the bundle once more"
            )
        try:
            if run is not None and run.ticket != self._ticket:
                raise UsageError("another generation has started on this engine; this one cannot go on")
            yield
        finally:
            at_work.release()

    def _prefill(self, run: Run, progress: Progress | None) -> None:
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
            self._governed.saw_prompt(len(chunk), snap(len(chunk), widths), ended - begin)
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


def _tree(start: int, pending: int, proposal: Proposal) -> tuple[IntArray, BoolArray]:
    """Positions by depth, and the mask in which nodes see the pending tokens and their own ancestors."""
    n = len(proposal)
    positions = np.concatenate([np.arange(pending), pending - 1 + depths(proposal.parents)]) + start
    mask = np.tri(pending + n, dtype=np.bool_)
    mask[pending:, pending:] = tree_mask(proposal.parents)
    return positions, mask
