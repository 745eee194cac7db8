"""A target, or a pair of models, becomes a folder that decodes: graphs, tokenizer, probe, quality, manifest.

Everything is written into a temporary folder beside the destination and renamed at the end, so that an error,
a full disk or Ctrl-C leaves either the old bundle or none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import TokenizerMismatch, UsageError
from outrider.export.budget import Budget, fit_budget, refuse_full_disk, with_free_space
from outrider.export.checkpoint import Checkpoint, TokenizerFiles, open_checkpoint
from outrider.export.device_plans import GraphPlan, check_extras, open_device, plan_graphs
from outrider.export.foresight import (
    check_shapes,
    check_texts,
    check_tools,
    refuse_unmeasurable,
    refuse_unused,
)
from outrider.export.options import ExportOptions, RoleOptions
from outrider.export.slots import matrix_slots
from outrider.export.staging import fresh_folder
from outrider.export.trim import check_size
from outrider.manifest import (
    Manifest,
    RoleEntry,
    Source,
    TokenizerEntry,
    describe_file,
    first_differing_id,
    token_map_hash,
    write_manifest,
)
from outrider.quantize.recipes import check_overrides, parse_overrides
from outrider.targets.device import load_device

if TYPE_CHECKING:
    from outrider.export.lowered import Lowered

__all__ = ["ExportOptions", "ExportReport", "RoleOptions", "export_bundle", "refuse_mismatch"]

Progress = Callable[[str, float], None]  # stage, fraction done


@dataclass
class ExportReport:
    """What an export did: per role what each lowering wrote, by its folder, and the measured quality."""

    output: Path
    graphs: dict[str, dict[str, Lowered]] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)


def export_bundle(
    options: ExportOptions,
    progress: Progress | None = None,
    announce: Callable[[Budget], None] | None = None,
) -> ExportReport:
    """Export a bundle. Raises OutriderError with what to do; on an error the destination stays as it was.

    `announce` is given the budget of the graphs before any of them is made.
    """
    roles = {"target": options.target, **({"draft": options.draft} if options.draft else {})}
    for role, role_options in roles.items():
        role_options.recipe(role)
    device = open_device(options.device)
    plans = plan_graphs(device, options)
    refuse_unused([name for name in ("calibration", "npu_target") if getattr(options, name)], plans)
    if options.evaluate:
        refuse_unmeasurable(plans)
    every = [plan for graphs in plans.values() for plan in graphs]
    check_extras(every)
    check_tools(every, device)
    with ExitStack() as stack:
        folder = stack.enter_context(fresh_folder(options.output, options.force))
        checkpoints: dict[str, Checkpoint] = {
            role: stack.enter_context(
                open_checkpoint(role_options.model, revision=role_options.revision, mirror=options.mirror)
            )
            for role, role_options in roles.items()
        }
        _check(checkpoints, options)
        check_texts(every, checkpoints, options)
        check_shapes(every, checkpoints, options)
        configs = {role: checkpoint.config for role, checkpoint in checkpoints.items()}
        options, plans, budget = fit_budget(device, options, configs)
        budget = with_free_space(budget, folder)
        if announce:
            announce(budget)
        refuse_full_disk(budget, options.output)
        report = ExportReport(options.output)
        manifest = _make(folder, plans, checkpoints, options, report, progress)
        write_manifest(folder, manifest)
        if options.evaluate:
            from outrider.export.evaluate import evaluate_bundle

            allow, extent = options.allow_quality, options.extent
            manifest = evaluate_bundle(folder, manifest, checkpoints, progress, allow, extent)
            report.quality = dict(manifest.quality)
            write_manifest(folder, manifest)
    return report


def _check(checkpoints: Mapping[str, Checkpoint], options: ExportOptions) -> None:
    """Refuse what these checkpoints cannot be, before anything is written."""
    if "draft" in checkpoints:
        refuse_mismatch(checkpoints["target"].tokenizer, checkpoints["draft"].tokenizer)
    _check_layers(checkpoints["target"], options.hidden_layers)
    for role, checkpoint in checkpoints.items():
        _check_context(checkpoint, options.max_context)
        overrides = parse_overrides(options.of(role).overrides)
        check_overrides(overrides, matrix_slots(checkpoint.config), role)
        vocab = options.of(role).vocab
        if vocab is not None:
            check_size(checkpoint.tokenizer, vocab, checkpoint.config.vocab_size)


def _make(
    folder: Path,
    plans: Mapping[str, tuple[GraphPlan, ...]],
    checkpoints: Mapping[str, Checkpoint],
    options: ExportOptions,
    report: ExportReport,
    progress: Progress | None,
) -> Manifest:
    """Write tokenizer and graphs, and say in a manifest what they are."""
    from outrider.export.role_graphs import make_role

    tokenizer = _write_tokenizer(folder, checkpoints["target"].tokenizer)
    entries: dict[str, RoleEntry] = {}
    for role, checkpoint in checkpoints.items():
        entries[role], report.graphs[role] = make_role(folder, plans[role], checkpoint, options, progress)
    return Manifest(
        tool_version=version("outrider"),
        sources=tuple(_source(role, checkpoint) for role, checkpoint in checkpoints.items()),
        roles=_name_target(entries),
        tokenizer=tokenizer,
        max_context=options.max_context,
        device=load_device(options.device).slug,  # never a path of this machine
    )


def refuse_mismatch(target: TokenizerFiles, draft: TokenizerFiles) -> None:
    """Raise TokenizerMismatch naming the first id that the two tokenizers give to different tokens."""
    difference = first_differing_id(json.loads(target.tokenizer_json), json.loads(draft.tokenizer_json))
    if difference is not None:
        index, ours, theirs = difference
        raise TokenizerMismatch(
            f"target and draft have different tokenizers: id {index} is {ours!r} in the target and "
            f"{theirs!r} in the draft. A draft must share the target's tokenizer; without --draft-model "
            "the bundle drafts by lookup"
        )


def _check_context(checkpoint: Checkpoint, max_context: int) -> None:
    trained = checkpoint.config.max_position
    if max_context > trained:
        raise UsageError(f"max_context is {max_context}; the model was made for {trained} positions")


def _check_layers(target: Checkpoint, hidden_layers: Sequence[int]) -> None:
    layers = target.config.num_layers
    wrong = [layer for layer in hidden_layers if not 0 <= layer < layers]
    if wrong:
        raise UsageError(f"hidden_layers has {wrong[0]}; the target has layers 0 to {layers - 1}")


def _write_tokenizer(folder: Path, tokenizer: TokenizerFiles) -> TokenizerEntry:
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    names = ["tokenizer.json"]
    if tokenizer.chat_template is not None:
        names.append("chat_template.jinja")
        (folder / names[1]).write_text(tokenizer.chat_template, encoding="utf-8")
    return TokenizerEntry(
        hash=token_map_hash(json.loads(tokenizer.tokenizer_json)),
        files={name: describe_file(folder / name) for name in names},
        eos_ids=tokenizer.eos_ids,
        bos_id=tokenizer.bos_id,
        add_bos=tokenizer.add_bos,
        chat_template=names[1] if tokenizer.chat_template is not None else None,
        eos_token=tokenizer.eos_token,
    )


def _source(role: str, checkpoint: Checkpoint) -> Source:
    source = checkpoint.source
    hashes = {name: sha256 for name, (sha256, _) in source.files.items()}
    return Source(role, source.id, source.revision, hashes)


def _name_target(entries: Mapping[str, RoleEntry]) -> dict[str, RoleEntry]:
    """Tell the draft which target graph it was made for."""
    target = entries["target"].graphs[0].identity
    named = dict(entries)
    if "draft" in named:
        graphs = tuple(replace(graph, target_sha256=target) for graph in named["draft"].graphs)
        named["draft"] = RoleEntry(graphs)
    return named
