"""What a measurement runs on: models, texts, a clock, a way to wait, and the sensors; real or simulated.

The same round engine, planner, governor and pacer run on both. On a simulated rig time, energy and heat come
from a `Machine` on a virtual clock; nothing of it was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.contracts import Clock, Costs, Drafter, Energy, Graph, Objective
from outrider.errors import ContextError, UsageError
from outrider.power.governor import Directive, Governor, Policy
from outrider.power.monitor import Monitor, open_telemetry
from outrider.power.sensors.simulated import Simulated
from outrider.power.state import State
from outrider.runtime.bench import Prompt, default_prompts
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.open_pacer import PLAIN_LENGTH, POLL_S
from outrider.runtime.pacing import Pacer
from outrider.runtime.planner import Planner
from outrider.runtime.rounds import Engine
from outrider.runtime.unmetered import unmetered
from outrider.targets.device import Device
from outrider.targets.model_cost import DRAFT_COST, TARGET_COST, ModelCost, model_cost, nominal_energy
from outrider.targets.physics import Work
from outrider.targets.simulated import HeldGraph, Machine, SimulatedGraph
from outrider.targets.trace_model import Stage, TraceDrafter, TraceModelDrafter, TraceTarget, TraceText
from outrider.targets.trace_model import cycle as cycle_texts

if TYPE_CHECKING:
    from outrider.manifest import RoleEntry
    from outrider.power.energy import EnergyModel
    from outrider.runtime.pipeline import Pipeline

__all__ = [
    "PLAYED_BACK",
    "FreeGovernor",
    "Rig",
    "Text",
    "Texts",
    "bundle_rig",
    "fitting_prompts",
    "host_rig",
    "trace_rig",
]

PLAYED_BACK = (
    "Power, heat and clocks were played back from a recorded trace (--telemetry): joules and temperatures are the"
    " trace's, not those of what ran."
)
DEFAULT_PREFILL = 512  # tokens of the prompt in one forward


class FreeGovernor(Governor):
    """Lets everything pass, so that the device is seen as it is; only the objective is the policy's."""

    def decide(self, state: State, costs: Costs | None = None) -> Directive:
        """The same directive, whatever the state."""
        return Directive(Objective(self.policy.objective))


@dataclass(frozen=True)
class Text:
    """One text to decode: its prompt, and how many tokens may follow."""

    prompt: Sequence[int]
    max_tokens: int | None
    stop_ids: frozenset[int] = frozenset()


Texts = Callable[[str | None], Text]


@dataclass
class Rig:
    """Parts for engines that all decode on one machine. `device` is what a governor knows of it.

    `texts()` gives a sequence that starts anew: a call of it, with a category or None, begins the next text.
    `notes` are what a reader of figures must know. `plain` is a plain forward, for estimates where nothing meters.
    `machine` is the simulated one, None on a real machine. `sleep` pauses; `monitor` reads the sensors when
    it is polled, or in a thread of its own. `target_mb` and `draft_mb` are what the models take. `apart` are the
    drafters that have a unit of their own.
    """

    target: Graph
    drafters: Mapping[str, Drafter]
    texts: Callable[[], Texts]
    monitor: Monitor
    clock: Clock
    sleep: Callable[[float], object]
    device: Device | None = None
    machine: Machine | None = None
    vocab_limit: int | None = None
    prefill_chunk: int = DEFAULT_PREFILL
    target_mb: float = 0.0
    draft_mb: float = 0.0
    prior: Energy | None = None
    plain: Work | None = None
    apart: frozenset[str] = frozenset()
    provenance: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    _energy_model: EnergyModel | None = None

    @property
    def simulated(self) -> bool:
        """True when time, energy and heat are a model's."""
        return self.machine is not None

    @property
    def energy_model(self) -> EnergyModel:
        """What is known of the joules of rounds; it learns over all runs on this rig."""
        from outrider.power.energy import EnergyModel

        if self._energy_model is None:
            self._energy_model = EnergyModel(self.prior, tuple(self.drafters))
        return self._energy_model

    def played_back(self, path: Path) -> Rig:
        """This rig with the sensors of a recorded trace in place of its own: what governs it sees that trace.

        Raises TelemetryError when the file is no telemetry trace.
        """
        told = {"telemetry": f"played back from {path.name}, not of what ran here"}
        return replace(
            self,
            monitor=open_telemetry(path, self.clock),
            provenance={**self.provenance, **told},
            notes=(*self.notes, PLAYED_BACK),
        )

    def pacer(self, policy: Policy, limits: Any = None, *, free: bool = False) -> Pacer:
        """A pacer with a governor of its own, under `policy`; `limits` stands in for the device's figures.

        A `free` one limits nothing, but serves the objective and learns what rounds take.
        """
        kind = FreeGovernor if free else Governor
        known = limits if limits is not None else self.device
        governor = kind(policy, known, target_mb=self.target_mb, draft_mb=self.draft_mb)
        stand_in = None
        if self.device is not None and self.plain is not None:
            stand_in = unmetered(self.device, self.plain)
        return Pacer(self.monitor, governor, self.energy_model, None, self.clock, POLL_S, stand_in)

    def engine(self, planner: Planner, pacer: Pacer | None) -> Engine:
        """An engine over the models, with an empty cache."""
        engine = Engine(
            self.target,
            self.drafters,
            planner,
            self.vocab_limit,
            self.prefill_chunk,
            clock=self.clock,
            pacer=pacer,
            sleep=self.sleep,  # type: ignore[arg-type]
            apart=self.apart,
            timeline=self.machine.lanes if self.machine is not None else None,
        )
        engine.reset()
        return engine

    def rest(self, seconds: float, step_s: float = 0.5) -> Iterator[State]:
        """Wait, and look at the sensors now and then."""
        end = self.clock() + seconds
        while (left := end - self.clock()) > 1e-9:
            self.sleep(min(left, step_s))
            yield self.monitor.poll()


def trace_rig(
    device: Device,
    texts: Sequence[TraceText],
    machine: Machine,
    *,
    target_cost: ModelCost = TARGET_COST,
    draft_cost: ModelCost = DRAFT_COST,
    unit: str | None = None,
    draft_unit: str | None = None,
    seed: int = 0,
) -> Rig:
    """A rig that decodes the texts of an acceptance trace on a simulated machine, without any model.

    `device` is the profile that the governor knows, `machine` the specimen that it runs on. The drafter
    "model" takes a draft's time and energy, any other (lookup) takes none.
    """
    stage = Stage()
    drafters: dict[str, Drafter] = {}
    for name in dict.fromkeys(name for text in texts for name in text.runs):
        costly = name == "model"
        drafters[name] = (TraceModelDrafter if costly else TraceDrafter)(
            name, stage, machine if costly else None, draft_cost if costly else None, draft_unit
        )
    machine.hold("target", target_cost.resident_mb)
    target = SimulatedGraph(TraceTarget(stage), machine, target_cost, unit)
    costs = {name: (draft_cost if name == "model" else None) for name in drafters}
    return Rig(
        target=target,
        drafters=_cheapest_first(drafters),
        texts=partial(_texts, stage, texts),
        monitor=Monitor([Simulated(machine, seed)], clock=machine.clock),
        clock=machine.clock,
        sleep=machine.idle,
        device=device,
        machine=machine,
        target_mb=target_cost.resident_mb,
        draft_mb=draft_cost.resident_mb if "model" in drafters else 0.0,
        prior=nominal_energy(device, target_cost, costs, unit, draft_unit),
        plain=target_cost.work(1, PLAIN_LENGTH),
        apart=frozenset(
            {"model"} if (draft_unit or device.decode_unit) != (unit or device.decode_unit) else ()
        ),
    )


def host_rig(pipeline: Pipeline, device: Device | None = None) -> Rig:
    """A rig that runs a loaded bundle on this machine, with the sensors that it has.

    `device` is what a governor should know of it. Start the rig's monitor before use, and stop it after.
    """
    from outrider.power.sensors import discover

    return Rig(
        target=pipeline.engine.target,
        drafters=pipeline.engine.drafters,
        texts=partial(_prompts, pipeline),
        monitor=Monitor(discover()),
        clock=time.monotonic,
        sleep=time.sleep,
        device=device,
        vocab_limit=pipeline.engine.vocab_limit,
        prefill_chunk=_prefill_chunk(pipeline),
    )


def bundle_rig(
    device: Device, pipeline: Pipeline, machine: Machine, *, seed: int = 0, placed: bool = False
) -> Rig:
    """A rig that runs a loaded bundle for its tokens, and a simulated machine for time, energy and heat.

    Those are of the graphs that the bundle prefers, or, `placed`, of the ones that were loaded here.
    """
    costs = {role: model_cost(entry.by_preference()[0]) for role, entry in _roles(pipeline).items()}
    if placed:
        graphs = {one.role: (one.path, one.unit) for one in pipeline.placement}
        costs |= {
            role: model_cost(graph)
            for role, entry in _roles(pipeline).items()
            for graph in entry.graphs
            if graphs.get(role) == (graph.path, graph.unit)
        }
    drafters = dict(pipeline.engine.drafters)
    drafter = drafters.get("model")
    if isinstance(drafter, ModelDrafter):
        graph = HeldGraph(drafter.graph, machine, costs["draft"], "draft")
        drafters["model"] = ModelDrafter(
            graph, drafter.vocab_limit, drafter.min_confidence, _prefill_chunk(pipeline), graph.reopen
        )
    known = {name: costs.get("draft") if name == "model" else None for name in drafters}
    return Rig(
        target=HeldGraph(pipeline.engine.target, machine, costs["target"], "target"),
        drafters=drafters,
        texts=partial(_prompts, pipeline),
        monitor=Monitor([Simulated(machine, seed)], clock=machine.clock),
        clock=machine.clock,
        sleep=machine.idle,
        device=device,
        machine=machine,
        vocab_limit=pipeline.engine.vocab_limit,
        prefill_chunk=_prefill_chunk(pipeline),
        target_mb=costs["target"].resident_mb,
        draft_mb=costs["draft"].resident_mb if "model" in drafters else 0.0,
        prior=nominal_energy(device, costs["target"], known),
        plain=costs["target"].work(1, PLAIN_LENGTH),
    )


def _roles(pipeline: Pipeline) -> Mapping[str, RoleEntry]:
    if pipeline.manifest is None:
        raise UsageError("this pipeline was not loaded from a bundle; its models' sizes are not known")
    return pipeline.manifest.roles


def _prefill_chunk(pipeline: Pipeline) -> int:
    placed = pipeline.placement[0].prefill_width if pipeline.placement else None
    return placed or DEFAULT_PREFILL


def fitting_prompts(pipeline: Pipeline, room: int = 32) -> list[Prompt]:
    """The built-in prompts that leave room for so many tokens in the context of this bundle.

    They are raw where it has no chat template. Only their first turn is decoded, each from an empty cache: runs
    of a measurement must be alike. Raises ContextError when none fits.
    """
    most = pipeline.engine.target.max_context - room
    known = [replace(prompt, raw=pipeline.template is None) for prompt in default_prompts()]
    fitting = [prompt for prompt in known if len(_tokens(pipeline, prompt)) <= most]
    if not fitting:
        raise ContextError(
            f"the context of {pipeline.engine.target.max_context} tokens holds none of the built-in prompts;"
            " export with a larger --max-context"
        )
    return fitting


def _tokens(pipeline: Pipeline, prompt: Prompt) -> list[int]:
    if prompt.raw:
        return pipeline.tokenizer.encode(prompt.turns[0])
    return pipeline.chat_tokens([{"role": "user", "content": prompt.turns[0]}])


def _prompts(pipeline: Pipeline, max_tokens: int = 128) -> Texts:
    """The built-in prompts in turn."""
    order = cycle([_tokens(pipeline, prompt) for prompt in fitting_prompts(pipeline)])
    stop_ids = frozenset(pipeline.tokenizer.eos_ids)

    def begin(category: str | None) -> Text:
        return Text(next(order), max_tokens, stop_ids)

    return begin


def _cheapest_first(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """In the order of a loaded bundle: with a fixed k the first that has a proposal is asked."""
    return dict(sorted(drafters.items(), key=lambda item: item[0] == "model"))


def _texts(stage: Stage, texts: Sequence[TraceText]) -> Texts:
    rounds: dict[str | None, Iterator[TraceText]] = {}

    def begin(category: str | None) -> Text:
        if category not in rounds:
            rounds[category] = cycle_texts(texts, category)
        text = next(rounds[category])
        return Text(stage.begin(text), text.tokens)

    return begin
