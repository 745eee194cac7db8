"""A bundle folder becomes a pipeline: check it, place each role where this machine can run it, join them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from outrider.contracts import Drafter, Graph, IntArray
from outrider.errors import BackendError, BundleError, MissingExtraError, UsageError
from outrider.manifest import GraphEntry, Manifest, RoleEntry, bundle_path, token_map_hash
from outrider.manifest import verify as verify_files
from outrider.runtime.backends import BACKENDS, RoleOptions, why_passed_over
from outrider.runtime.chat import ChatTemplate
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.memory_budget import MemoryPlan, choose_memory, room_here
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.open_pacer import Governing, open_pacer
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.placed import Placement
from outrider.runtime.planner import Planner
from outrider.runtime.role_memory import CHUNK
from outrider.runtime.rounds import Engine
from outrider.runtime.text import Tokenizer
from outrider.runtime.timing import known_costs, machine_line
from outrider.runtime.vocab_map import read_vocab_map
from outrider.targets.core_sets import be_nice, cores_of, refuse_shared, unit_kind

if TYPE_CHECKING:
    from outrider.power.monitor import Monitor
    from outrider.targets.device import Device

__all__ = ["BACKENDS", "Placement", "RoleOptions", "draft_ids", "load", "open_role", "open_tokenizer"]

FLOAT_NOISE = 1e-3  # in logits

_log = logging.getLogger(__name__)


def load(
    directory: str | os.PathLike[str],
    *,
    draft: bool = True,
    verify: Literal["size", "full"] = "size",
    threads: int | None = None,
    max_context: int | None = None,
    draft_context: int | None = None,
    target_backend: str | None = None,
    target_providers: Sequence[str] | None = None,
    target_provider_options: Mapping[str, Mapping[str, Any]] | None = None,
    draft_backend: str | None = None,
    draft_providers: Sequence[str] | None = None,
    draft_provider_options: Mapping[str, Mapping[str, Any]] | None = None,
    target_unit: str | None = None,
    draft_unit: str | None = None,
    nice: bool = False,
    objective: Literal["latency", "energy", "balanced"] = "latency",
    power_cap_w: float | None = None,
    temp_limit_c: float | None = None,
    battery_floor_percent: float | None = None,
    memory_limit_mb: float | None = None,
    device: str | os.PathLike[str] | Device | None = None,
    telemetry: str | os.PathLike[str] | Monitor | None = None,
    governor: bool | None = None,
    governor_log: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Load a bundle made by `outrider export`.

    Each role gets the first of its graphs, by preference, that this machine can run;
    `Pipeline.placement` says which, and why others were passed over. `draft` False leaves the draft model
    out, and drafting to n-gram lookup. `verify` "full" also hashes every file. `max_context` holds fewer
    tokens than the bundle allows, `draft_context` lets the draft remember the last tokens only (where the cache is part
    of the graph, as in all but `inplace` ones, that saves no memory).
    Providers are ONNX Runtime's, by name, with options per name. A unit is "cpu", "gpu" or "npu"; a graph that
    only an emulator can run here is passed over unless its unit is asked for. On Linux it can be a core set,
    "cpu:0" or "cpu:2-3": the role then has a thread on each of these cores, and they are its own. Without one, where
    Linux says that some cores are less than half as strong as others, a CPU's graphs have threads on the strong ones.
    `nice` lets this thread, and all that work for it, yield to what is in the foreground, for good: load and generate
    in a thread of your own then (on macOS it is the whole process).

    From `objective` on: what heat and power may ask of drafts and pauses (never of the text), `runtime.open_pacer.
    Governing`. By default drafts get shorter where a sensor tells heat; `governor` False turns that off.

    Before anything is opened, what it will take (`Pipeline.memory`) is held against what this machine has free now and
    against `memory_limit_mb`, resident memory of the whole process. Where it does not fit, prompts are read in shorter
    chunks, then the draft's context is halved, the draft left out, the context halved (but what was asked for).

    Raises BundleError for a damaged bundle, BackendError when no graph of a role can run here, UsageError
    for an option that cannot be honoured, and where not even the smallest plan fits into memory.
    """
    target_options = RoleOptions(
        target_backend, target_providers, target_provider_options, threads, target_unit, max_context
    )
    draft_options = RoleOptions(
        draft_backend, draft_providers, draft_provider_options, threads, draft_unit, draft_context
    )
    refuse_shared(target_unit, draft_unit)
    governing = Governing(
        objective,
        power_cap_w,
        temp_limit_c,
        battery_floor_percent,
        memory_limit_mb,
        device,
        telemetry,
        governor_log,
        governor,
    )
    manifest = _checked(directory, verify)
    roles = _roles(manifest, target_options, draft_options, draft)
    return _assemble(directory, manifest, roles, governing, nice)


def _roles(
    manifest: Manifest, target: RoleOptions, draft: RoleOptions, with_draft: bool
) -> dict[str, RoleOptions]:
    """The roles to open. Raises UsageError for options of a draft that is not among them, and for contexts."""
    roles = {"target": target}
    if with_draft and "draft" in manifest.roles:
        roles["draft"] = draft
    else:
        _refuse_options(draft, "the bundle has no draft model" if with_draft else "draft=False")
    _check_contexts(manifest, roles)
    return roles


def _assemble(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    roles: dict[str, RoleOptions],
    governing: Governing,
    nice: bool,
) -> Pipeline:
    """Open what a pipeline needs, and join it; whatever fails closes what was opened."""
    memory = _fit_memory(manifest, roles, governing.memory_limit_mb)
    with ExitStack() as stack:
        drafting = ["lookup", *(["model"] if "draft" in roles else [])]
        expected = {role: _expected(manifest, role, options) for role, options in roles.items()}
        pacer = open_pacer(governing, stack, drafting, expected, memory)
        tokenizer = open_tokenizer(directory, manifest)
        if nice:  # for good: not before all is checked, but before the first thread of a graph
            be_nice()
        graphs, placement = _open_roles(directory, manifest, roles, stack)

        def reopen() -> Graph:
            return open_role(directory, "draft", manifest.roles["draft"], roles["draft"])[0]

        trimmed = _trimmed_head(directory, manifest, placement[-1]) if "draft" in roles else {}
        drafters = _drafters(graphs.get("draft"), reopen, _chunk(placement[-1], memory), tokenizer, trimmed)
        stack.callback(_close_drafters, drafters)
        machine = machine_line(placement, roles["target"].threads)
        engine = Engine(
            graphs["target"],
            drafters,
            vocab_limit=min(tokenizer.id_limit, graphs["target"].vocab_size),
            prefill_chunk=_chunk(placement[0], memory),
            near_tie=_near_tie(manifest),
            planner=Planner(known_costs(manifest, placement, machine)),
            pacer=pacer,
            apart=("model",) if _apart(placement) else (),
        )
        stack.callback(engine.settle)
        template = _template(directory, manifest, tokenizer)
        return Pipeline(
            engine,
            tokenizer,
            template,
            manifest=manifest,
            placement=placement,
            machine=machine,
            memory=memory,
            owned=stack.pop_all(),
        )


def _open_roles(
    directory: str | os.PathLike[str], manifest: Manifest, roles: Mapping[str, RoleOptions], stack: ExitStack
) -> tuple[dict[str, Graph], list[Placement]]:
    """The graphs by role, which `stack` will close, and where they run."""
    graphs: dict[str, Graph] = {}
    placement = []
    for role, options in roles.items():
        graphs[role], placed = open_role(directory, role, manifest.roles[role], options)
        stack.callback(graphs[role].close)
        placement.append(placed)
    return graphs, placement


def open_role(
    directory: str | os.PathLike[str],
    role: str,
    entry: RoleEntry,
    options: RoleOptions,
) -> tuple[Graph, Placement]:
    """Open the first graph of a role, by preference, that can run here under `options`.

    Raises BackendError with the reason for every graph when none can, BundleError when a file is damaged.
    """
    passed: list[str] = []
    for graph in entry.by_preference():
        reason = why_passed_over(role, graph, options)
        level = logging.INFO  # of what is as it should be; that a backend fails is worth a warning
        if reason is None:
            try:
                opened = BACKENDS[graph.backend](directory, graph, options)
            except (BackendError, MissingExtraError) as error:
                reason, level = str(error), logging.WARNING
            else:
                opened.max_context = min(opened.max_context, options.context or opened.max_context)
                return opened, _placed(role, graph, opened, passed, options)
        passed.append(f"{graph.path} ({graph.backend}, {graph.unit}): {reason}")
        _log.log(level, "%s: passed over %s", role, passed[-1])
    way_out = "; draft=False decodes without it" if role == "draft" else ""
    raise BackendError(f"no graph of the {role} can run here{way_out}. " + "; ".join(passed))


def open_tokenizer(directory: str | os.PathLike[str], manifest: Manifest) -> Tokenizer:
    """The tokenizer of a bundle."""
    entry = manifest.tokenizer
    return Tokenizer.from_file(
        bundle_path(directory, entry.path), eos_ids=entry.eos_ids, bos_id=entry.bos_id, add_bos=entry.add_bos
    )


def _checked(directory: str | os.PathLike[str], verify: str) -> Manifest:
    """The manifest of a bundle whose files are as it says, and whose roles belong together."""
    if verify not in ("size", "full"):
        raise UsageError(f"verify is {verify!r}; known: size, full")
    manifest = verify_files(directory, full=verify == "full")
    if verify == "full":
        _check_token_map(directory, manifest)
    targets = {graph.identity for graph in manifest.roles["target"].graphs}
    for role, entry in manifest.roles.items():
        for graph in entry.graphs:
            if graph.target_sha256 is not None and graph.target_sha256 not in targets:
                raise BundleError(
                    f"{graph.path}, the {role}, was made for the target with sha256 {graph.target_sha256}, "
                    "which is not in this bundle; export the pair again"
                )
    return manifest


def _check_token_map(directory: str | os.PathLike[str], manifest: Manifest) -> None:
    path = bundle_path(directory, manifest.tokenizer.path)
    found = token_map_hash(json.loads(path.read_text(encoding="utf-8")))
    if found != manifest.tokenizer.hash:
        raise BundleError(
            f"{path.name} has the token map {found}, the manifest says {manifest.tokenizer.hash}"
        )


def _check_contexts(manifest: Manifest, roles: Mapping[str, RoleOptions]) -> None:
    """Raise UsageError for a context that the bundle cannot hold."""
    longest = {"target": manifest.max_context}
    if "draft" in roles:
        longest["draft"] = max(graph.max_context for graph in manifest.roles["draft"].graphs)
    for role, options in roles.items():
        wanted, name = options.context, "max_context" if role == "target" else "draft_context"
        if wanted is not None and not (isinstance(wanted, Integral) and 1 < wanted <= longest[role]):
            raise UsageError(
                f"{name} is {wanted!r}; this bundle was exported for 2 to {longest[role]} tokens"
            )


def _expected(manifest: Manifest, role: str, options: RoleOptions) -> GraphEntry:
    """The graph that `open_role` will open, if its backend does not fail."""
    graphs = manifest.roles[role].by_preference()
    return next((graph for graph in graphs if why_passed_over(role, graph, options) is None), graphs[0])


def _fit_memory(manifest: Manifest, roles: dict[str, RoleOptions], limit_mb: float | None) -> MemoryPlan:
    """The plan that there is room for, by the graphs expected here; `roles` are made to follow it."""
    graphs = {role: _expected(manifest, role, options) for role, options in roles.items()}
    wishes = {role: options.context for role, options in roles.items()}
    plan = choose_memory(graphs, wishes, room_here(limit_mb))
    _log.info("memory: %s", plan)
    for note in plan.notes:
        _log.warning("memory: %s", note)
    if plan.draft is None:
        roles.pop("draft", None)
    for role, options in roles.items():
        planned = plan.target if role == "target" or plan.draft is None else plan.draft
        if planned.context < graphs[role].max_context:
            roles[role] = replace(options, context=planned.context)
    return plan


def _chunk(placed: Placement, memory: MemoryPlan) -> int:
    """Tokens of a prompt in one forward."""
    width = placed.prefill_width or CHUNK
    return min(width, memory.chunk) if placed.profile == "inplace" and memory.chunk < CHUNK else width


def _close_drafters(drafters: Mapping[str, Drafter]) -> None:
    for drafter in drafters.values():
        close = getattr(drafter, "close", None)
        if close is not None:
            close()


def _near_tie(manifest: Manifest) -> float:
    """The gap, in logits, below which this target's choice may turn on the width of the forward.

    Two logits that each move by `row_deviation` (measured at export) can swap when they are within twice that.
    """
    moved = manifest.quality.get("target", {}).get("row_deviation", 0.0)
    return max(FLOAT_NOISE, 2.0 * float(moved))


def _refuse_options(options: RoleOptions, why: str) -> None:
    given = [f.name for f in fields(options) if f.name != "threads" and getattr(options, f.name) is not None]
    if given:
        raise UsageError(f"draft_{given[0]} was given, but {why}; leave it out")


def _apart(placement: Sequence[Placement]) -> bool:
    """Whether target and draft have units of their own, so that both can work at once."""
    units = [placed.unit for placed in placement]
    if len(units) < 2 or any(placed.emulated for placed in placement):
        return False
    if {placed.backend for placed in placement} == {"executorch"}:
        return False  # its programs take turns: they share one pool of threads
    kinds = {unit_kind(unit) for unit in units}
    return len(kinds) > 1 or all(cores_of(unit) is not None for unit in units)


def _placed(
    role: str, graph: GraphEntry, opened: Graph, passed: Sequence[str], options: RoleOptions
) -> Placement:
    providers = tuple(getattr(opened, "providers", ()))
    return Placement(
        role,
        graph.backend,
        graph.unit if options.cores is None else options.unit or graph.unit,
        graph.profile,
        graph.path,
        graph.prefill_width,
        providers,
        tuple(passed),
        getattr(opened, "via", "artifact") != "artifact",
    )


def _template(
    directory: str | os.PathLike[str], manifest: Manifest, tokenizer: Tokenizer
) -> ChatTemplate | None:
    name = manifest.tokenizer.chat_template
    if name is None:
        return None
    end = tokenizer.token(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
    begin = tokenizer.token(tokenizer.bos_id) if tokenizer.bos_id is not None else ""
    special = {"bos_token": begin, "eos_token": manifest.tokenizer.eos_token or end}
    return ChatTemplate(bundle_path(directory, name).read_text(encoding="utf-8"), special)


def draft_ids(directory: str | os.PathLike[str], graph: GraphEntry) -> IntArray | None:
    """The ids of the columns of a trimmed head [V'], or None where the head is whole.

    Raises BundleError for a map that is damaged or belongs to another graph.
    """
    rows = graph.options.get("embedding_rows")
    if not (rows is None or (isinstance(rows, int) and rows > 0)):
        raise BundleError(
            f"embedding_rows of {graph.path} is {rows!r}, no number of ids; export the bundle again"
        )
    if graph.vocab_map is None:
        if rows is not None and graph.vocab_size < rows:
            raise BundleError(
                f"{graph.path} has {graph.vocab_size} logits for {rows} ids and no vocab_map that says which they are; "
                "export the bundle again"
            )
        return None
    return read_vocab_map(bundle_path(directory, graph.vocab_map), graph.vocab_size, rows)


def _trimmed_head(
    directory: str | os.PathLike[str], manifest: Manifest, placed: Placement
) -> Mapping[str, Any]:
    """What a drafter must know about the head of the graph that was opened."""
    graph = next(graph for graph in manifest.roles["draft"].graphs if graph.path == placed.path)
    ids = draft_ids(directory, graph)
    return {} if ids is None else {"vocab_ids": ids, "known_ids": graph.options.get("embedding_rows")}


def _drafters(
    draft: Graph | None,
    reopen: Callable[[], Graph],
    chunk: int,
    tokenizer: Tokenizer,
    trimmed: Mapping[str, Any],
) -> dict[str, Drafter]:
    """What can draft, the cheapest first: with a fixed k the first that has a proposal is asked."""
    drafters: dict[str, Drafter] = {"lookup": LookupDrafter()}
    if draft is not None:
        drafters["model"] = ModelDrafter(
            draft, tokenizer.id_limit, prefill_chunk=chunk, reopen=reopen, **trimmed
        )
    return drafters
