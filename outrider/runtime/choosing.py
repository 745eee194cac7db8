"""Who drafts how much in a round: what the planner may choose from, and drafters that first catch up with the text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from outrider.contracts import Clock, Drafter, Plan
from outrider.power.governor import Directive
from outrider.runtime.catch_up import CatchingUp
from outrider.runtime.context import Context
from outrider.runtime.costs import FAR_BEHIND
from outrider.runtime.evidence import promises
from outrider.runtime.governed import Governed
from outrider.runtime.overlap import Ahead, can_overlap
from outrider.runtime.planner import Modes, Planner
from outrider.runtime.request import Request
from outrider.runtime.turn import Run, Turn

__all__ = ["Choosing"]


class Choosing:
    """Has the planner choose within what both contexts, the widths, the request and the governor allow.

    `apart` are the drafters on another unit than the target's, `widest` the most tokens of a verify forward.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        apart: Collection[str],
        widest: int,
        governed: Governed,
        ahead: Ahead,
        clock: Clock,
    ) -> None:
        self.apart = frozenset(apart)
        self._able = {name for name, drafter in drafters.items() if can_overlap(drafter)}
        self._drafters, self._widest, self._ahead = drafters, widest, ahead
        self._catching_up = CatchingUp(drafters, governed, clock, ahead.drop)

    def overlapping(self, request: Request) -> frozenset[str]:
        """The drafters that may draft beside a verify forward, by what they can and what the request says."""
        able = self._able & ({request.drafter} if request.drafter else self._able)
        if request.drafting == "auto":
            able &= self.apart
        return frozenset(able if request.drafting != "serial" else ())

    def plan(self, run: Run, turn: Turn, planner: Planner) -> Plan:
        """The plan of a round, once its drafter has seen the text; `turn` gets what is known of the drafters."""
        if len(turn.pending) > 1:
            return Plan(None, 0, "none", reason="prefill")
        most = min(run.remaining, self._widest) - 1
        if run.request.k == 0 or most < 1:
            plan = Plan(None, 0, "none", reason="no draft fits" if run.request.k else "k is 0")
            return _paced(plan, turn.directive, planner)
        names = [run.request.drafter] if run.request.drafter else list(self._drafters)
        names = [name for name in names if getattr(self._drafters[name], "loaded", True)]
        turn.kinds = self._kinds(run.context, names)
        turn.backlogs = {name: self._backlog(name, run.context, 1) for name in turn.kinds}
        modes = self._modes(run.request, names)
        plan = self._chosen(run, turn, most, modes, planner)
        while plan.drafter is not None and not self._caught_up(run, turn, plan, planner):
            del turn.kinds[plan.drafter], turn.backlogs[plan.drafter]  # the others may draft this round
            plan = self._chosen(run, turn, most, modes, planner)
            if plan.drafter is None:
                plan = replace(plan, reason="catching up is too slow, or cannot be")
        return plan

    def _modes(self, request: Request, names: list[str]) -> Modes:
        able = frozenset(name for name in names if getattr(self._drafters[name], "corrects", False))
        serial = request.drafting != "overlapped"
        return Modes(self.overlapping(request), serial, self._catching_up.names, able)

    def _chosen(self, run: Run, turn: Turn, most: int, modes: Modes, planner: Planner) -> Plan:
        """The planner's choice, once it knows what a step takes of drafters that must run a prompt for a draft."""
        kinds, directive = turn.kinds, turn.directive
        if run.request.k != "auto":
            plan = Plan(None, 0, "none", reason="nothing to propose")
            name = next((name for name, kind in kinds.items() if promises(kind)), None)
            if name is not None:
                plan = Plan(name, min(run.request.k, most), reason="fixed k")
                plan = planner.with_mode(plan, kinds, directive, modes)
            return _paced(plan, directive, planner)
        while True:
            known = run.context, run.request.sampling, planner
            priced = self._catching_up.price(turn.caught, turn.backlogs, *known)
            plan = planner.plan(kinds, most, turn.backlogs, run.remaining, directive, modes)
            if self._must_slide(run.context, plan, turn.backlogs):
                continue
            if plan.k or not priced:
                return plan

    def _must_slide(self, context: Context, plan: Plan, backlogs: dict[str, int]) -> bool:
        """Whether the drafter has more to run before so long a draft than was thought; `backlogs` know it then."""
        known = backlogs.get(plan.drafter or "")
        if plan.drafter is None or known is None:
            return False
        backlogs[plan.drafter] = max(known, self._backlog(plan.drafter, context, plan.k))
        return backlogs[plan.drafter] > known

    def _caught_up(self, run: Run, turn: Turn, plan: Plan, planner: Planner) -> bool:
        """Whether the plan's drafter has run what it has not seen; False where it cannot, or that is too costly."""
        name = plan.drafter or ""
        turn.backlogs[name] = self._backlog(name, run.context, plan.k)
        if turn.backlogs[name] <= FAR_BEHIND:
            return True
        known = run.context, run.request.sampling, planner, run.request.k == "auto"
        return self._catching_up.run(turn.caught, plan, turn.backlogs, *known)

    def _backlog(self, name: str, context: Context, k: int) -> int:
        """Tokens that a drafter must run before k drafts; 0 when it keeps no such state, or is ahead."""
        ask = getattr(self._drafters[name], "backlog", None)
        if ask is None or self._ahead.ready(name, len(context)):
            return 0
        return int(ask(context, k))

    def _kinds(self, context: Context, names: list[str]) -> dict[str, str]:
        """The drafters that can propose now, with the kind of proposal (see `LookupDrafter.kind`)."""
        asked = ((name, getattr(self._drafters[name], "kind", lambda context: "")) for name in names)
        kinds = ((name, ask(context)) for name, ask in asked)
        return {name: kind for name, kind in kinds if kind is not None}


def _paced(plan: Plan, directive: Directive | None, planner: Planner) -> Plan:
    return plan if directive is None else planner.paced(plan, directive)
