"""A bundle folder becomes a pipeline: check it, place each role where this machine can run it, join them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from outrider.contracts import Drafter, Graph
from outrider.errors import BackendError, BundleError, MissingExtraError, UsageError
from outrider.manifest import GraphEntry, Manifest, RoleEntry, bundle_path, token_map_hash
from outrider.manifest import verify as verify_files
from outrider.runtime.chat import ChatTemplate
from outrider.runtime.lookup import LookupDrafter
from outrider.runtime.model_drafter import ModelDrafter
from outrider.runtime.open_pacer import Governing, footprint_mb, open_pacer
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.planner import Planner
from outrider.runtime.rounds import Engine
from outrider.runtime.text import Tokenizer
from outrider.runtime.timing import known_costs, machine_line

if TYPE_CHECKING:
    from outrider.power.monitor import Monitor
    from outrider.targets.device import Device

__all__ = ["BACKENDS", "Placement", "RoleOptions", "load", "open_role", "open_tokenizer"]

DEFAULT_PREFILL = 512  # tokens of the prompt in one forward
FLOAT_NOISE = 1e-3  # in logits

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoleOptions:
    """How one role is to be run: by which backend, on which execution providers in order, how many threads.

    `provider_options` are by provider name. None leaves the choice to the bundle and the backend.
    """

    backend: str | None = None
    providers: Sequence[str] | None = None
    provider_options: Mapping[str, Mapping[str, Any]] | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown backend and an impossible number of threads."""
        if self.backend is not None and self.backend not in BACKENDS:
            raise UsageError(f"unknown backend {self.backend!r}; known: {', '.join(BACKENDS)}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads is {self.threads}; it must be at least 1")


@dataclass(frozen=True)
class Placement:
    """Where a role runs, and why the graphs that its bundle prefers were passed over."""

    role: str
    backend: str
    unit: str
    profile: str
    path: str
    prefill_width: int | None = None
    providers: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line, and one more for each graph passed over."""
        where = f"{self.backend} on {', '.join(self.providers) or self.unit}"
        lines = [f"{self.role}: {self.path} ({self.profile}) by {where}"]
        return "\n  passed over ".join([*lines, *self.passed_over])


def load(
    directory: str | os.PathLike[str],
    *,
    draft: bool = True,
    verify: Literal["size", "full"] = "size",
    threads: int | None = None,
    max_context: int | None = None,
    target_backend: str | None = None,
    target_providers: Sequence[str] | None = None,
    target_provider_options: Mapping[str, Mapping[str, Any]] | None = None,
    draft_backend: str | None = None,
    draft_providers: Sequence[str] | None = None,
    draft_provider_options: Mapping[str, Mapping[str, Any]] | None = None,
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
    tokens than the bundle allows (the memory of the cache stays: its length is part of the graph).
    Providers are ONNX Runtime's, by name, with options per name.

    From `objective` on: what heat and power may ask of drafts and pauses (never of the text); see
    `runtime.open_pacer.Governing`. By default drafts get shorter where a sensor says that the machine is hot;
    `governor` False turns that off. Under `memory_limit_mb` a draft model that does not fit is left out.

    Raises BundleError for a damaged bundle, BackendError when no graph of a role can run here, UsageError
    for an option that cannot be honoured.
    """
    roles = {
        "target": RoleOptions(target_backend, target_providers, target_provider_options, threads),
        "draft": RoleOptions(draft_backend, draft_providers, draft_provider_options, threads),
    }
    if verify not in ("size", "full"):
        raise UsageError(f"verify is {verify!r}; known: size, full")
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
    manifest = _checked(directory, full=verify == "full")
    if not draft or "draft" not in manifest.roles:
        _refuse_options(roles.pop("draft"), "draft=False" if not draft else "the bundle has no draft model")
    return _assemble(directory, manifest, roles, governing, _context(manifest, max_context))


def _assemble(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    roles: dict[str, RoleOptions],
    governing: Governing,
    context: int | None,
) -> Pipeline:
    """Open what a pipeline needs, and join it; whatever fails closes what was opened."""
    _leave_out_what_does_not_fit(manifest, roles, governing.memory_limit_mb)
    with ExitStack() as stack:
        drafting = ["lookup", *(["model"] if "draft" in roles else [])]
        preferred = {role: manifest.roles[role].by_preference()[0] for role in roles}
        pacer = open_pacer(governing, stack, drafting, preferred)
        tokenizer = open_tokenizer(directory, manifest)
        graphs: dict[str, Graph] = {}
        placement = []
        for role, options in roles.items():
            graphs[role], placed = open_role(directory, role, manifest.roles[role], options, context)
            stack.callback(graphs[role].close)
            placement.append(placed)

        def reopen() -> Graph:
            return open_role(directory, "draft", manifest.roles["draft"], roles["draft"], context)[0]

        drafters = _drafters(graphs.get("draft"), reopen, placement[-1], tokenizer)
        stack.callback(_close_drafters, drafters)
        machine = machine_line(placement, roles["target"].threads)
        engine = Engine(
            graphs["target"],
            drafters,
            vocab_limit=min(tokenizer.id_limit, graphs["target"].vocab_size),
            prefill_chunk=placement[0].prefill_width or DEFAULT_PREFILL,
            near_tie=_near_tie(manifest),
            planner=Planner(known_costs(manifest, placement, machine)),
            pacer=pacer,
        )
        template = _template(directory, manifest, tokenizer)
        return Pipeline(
            engine,
            tokenizer,
            template,
            manifest=manifest,
            placement=placement,
            machine=machine,
            owned=stack.pop_all(),
        )


def open_role(
    directory: str | os.PathLike[str],
    role: str,
    entry: RoleEntry,
    options: RoleOptions,
    max_context: int | None = None,
) -> tuple[Graph, Placement]:
    """Open the first graph of a role, by preference, that can run here under `options`.

    Raises BackendError with the reason for every graph when none can, BundleError when a file is damaged.
    """
    passed: list[str] = []
    for graph in entry.by_preference():
        reason = _unwanted(graph, options)
        if reason is None:
            try:
                opened = BACKENDS[graph.backend](directory, graph, options)
            except (BackendError, MissingExtraError) as error:
                reason = str(error)
            else:
                opened.max_context = min(opened.max_context, max_context or opened.max_context)
                return opened, _placed(role, graph, opened, passed)
        passed.append(f"{graph.path} ({graph.backend}, {graph.unit}): {reason}")
        _log.warning("%s: passed over %s", role, passed[-1])
    way_out = "; draft=False decodes without it" if role == "draft" else ""
    raise BackendError(f"no graph of the {role} can run here{way_out}. " + "; ".join(passed))


def open_tokenizer(directory: str | os.PathLike[str], manifest: Manifest) -> Tokenizer:
    """The tokenizer of a bundle."""
    entry = manifest.tokenizer
    return Tokenizer.from_file(
        bundle_path(directory, entry.path), eos_ids=entry.eos_ids, bos_id=entry.bos_id, add_bos=entry.add_bos
    )


def _checked(directory: str | os.PathLike[str], full: bool) -> Manifest:
    """The manifest of a bundle whose files are as it says, and whose roles belong together."""
    manifest = verify_files(directory, full=full)
    if full:
        _check_token_map(directory, manifest)
    targets = {graph.files[graph.path].sha256 for graph in manifest.roles["target"].graphs}
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


def _context(manifest: Manifest, wanted: int | None) -> int | None:
    if wanted is not None and not 1 < wanted <= manifest.max_context:
        raise UsageError(
            f"max_context is {wanted}; this bundle was exported for 2 to {manifest.max_context} tokens"
        )
    return wanted


def _leave_out_what_does_not_fit(
    manifest: Manifest, roles: dict[str, RoleOptions], limit_mb: float | None
) -> None:
    """Take a draft that exceeds the limit beside the target out of `roles`, by the preferred graphs."""
    if limit_mb is None:
        return
    sizes = {role: footprint_mb(manifest.roles[role].by_preference()[0]) for role in roles}
    if sizes["target"] > limit_mb:
        raise UsageError(
            f"memory_limit_mb is {limit_mb:g}, but the target alone takes {sizes['target']:.0f} MB; raise it, or"
            " export with a smaller recipe or context"
        )
    if "draft" in sizes and sizes["target"] + sizes["draft"] > limit_mb:
        _log.warning(
            "the draft model (%.0f MB) is left out: beside the target (%.0f MB) it exceeds the limit of %g MB",
            sizes["draft"],
            sizes["target"],
            limit_mb,
        )
        del roles["draft"]


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


def _unwanted(graph: GraphEntry, options: RoleOptions) -> str | None:
    if graph.backend not in BACKENDS:
        return f"this outrider has no backend {graph.backend!r}; known: {', '.join(BACKENDS)}"
    if options.backend not in (None, graph.backend):
        return f"the backend {options.backend!r} was asked for"
    return None


def _placed(role: str, graph: GraphEntry, opened: Graph, passed: Sequence[str]) -> Placement:
    providers = tuple(getattr(opened, "providers", ()))
    return Placement(
        role,
        graph.backend,
        graph.unit,
        graph.profile,
        graph.path,
        graph.prefill_width,
        providers,
        tuple(passed),
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


def _drafters(
    draft: Graph | None, reopen: Callable[[], Graph], placed: Placement, tokenizer: Tokenizer
) -> dict[str, Drafter]:
    """What can draft, the cheapest first: with a fixed k the first that has a proposal is asked."""
    drafters: dict[str, Drafter] = {"lookup": LookupDrafter()}
    if draft is not None:
        chunk = placed.prefill_width or DEFAULT_PREFILL
        drafters["model"] = ModelDrafter(draft, tokenizer.id_limit, prefill_chunk=chunk, reopen=reopen)
    return drafters


def _open_onnxruntime(directory: str | os.PathLike[str], graph: GraphEntry, options: RoleOptions) -> Graph:
    """Open a graph with ONNX Runtime, on the CPU unless providers are named."""
    from outrider.targets.onnxruntime import OnnxGraph

    providers = tuple(options.providers or ("CPUExecutionProvider",))
    _refuse_unknown_providers(providers)
    given = options.provider_options or {}
    stray = sorted(set(given) - set(providers))
    if stray:
        raise UsageError(f"provider options for {stray[0]!r}, which is not among {', '.join(providers)}")
    return OnnxGraph.load(
        bundle_path(directory, graph.path),
        _onnx_meta(graph),
        threads=options.threads,
        providers=providers,
        provider_options=[{key: str(v) for key, v in given.get(name, {}).items()} for name in providers],
        session_options=graph.options.get("session_options"),
    )


def _refuse_unknown_providers(providers: Sequence[str]) -> None:
    """A name that no build of ONNX Runtime has is a mistake; one that this build lacks is the machine's."""
    import onnxruntime

    known = dict.fromkeys([*onnxruntime.get_all_providers(), *onnxruntime.get_available_providers()])
    for name in providers:
        if name not in known:
            raise UsageError(f"unknown execution provider {name!r}; known: {', '.join(known)}")


def _onnx_meta(graph: GraphEntry) -> dict[str, Any]:
    """What `targets.onnxruntime` must know; what the manifest has no field for is among the options."""
    return {
        **graph.options,
        "profile": graph.profile,
        "widths": graph.widths,
        "max_context": graph.max_context,
        "vocab_size": graph.vocab_size,
        "layers": graph.kv.layers,
        "kv_heads": graph.kv.heads,
        "head_dim": graph.kv.head_dim,
        "hidden_layers": graph.hidden_layers,
    }


Opener = Callable[[str | os.PathLike[str], GraphEntry, RoleOptions], Graph]

BACKENDS: dict[str, Opener] = {"onnxruntime": _open_onnxruntime}
"""Backend name -> what opens one of its graphs; raises BackendError or MissingExtraError if it cannot."""
