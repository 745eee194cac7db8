"""A target, or a pair of models, becomes a folder that decodes: graphs, tokenizer, probe, quality, manifest.

Everything is written into a temporary folder beside the destination and renamed at the end, so that an error,
a full disk or Ctrl-C leaves either the old bundle or none.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import ExportError, MissingExtraError, TokenizerMismatch, UsageError
from outrider.export.checkpoint import Checkpoint, TokenizerFiles, open_checkpoint
from outrider.export.slots import SlotWeights, matrix_slots
from outrider.manifest import (
    MANIFEST_NAME,
    FileEntry,
    GraphEntry,
    KvEntry,
    Manifest,
    RoleEntry,
    Source,
    TokenizerEntry,
    describe_file,
    first_differing_id,
    token_map_hash,
    write_manifest,
)
from outrider.quantize.recipes import (
    check_overrides,
    check_role,
    get_recipe,
    parse_overrides,
    with_overrides,
)

if TYPE_CHECKING:
    from outrider.export.onnx import GraphReport
    from outrider.quantize.schemes import Recipe

__all__ = ["DEVICES", "ExportOptions", "ExportReport", "RoleOptions", "export_bundle", "refuse_mismatch"]

DEVICES = ("host",)
PREFILL_WIDTH = 512
BACKEND_ONLY = (
    "hidden_size",
    "masks",
    "sliding_window",
)  # of a graph's description; the manifest has the rest
Progress = Callable[[str, float], None]  # stage, fraction done


@dataclass(frozen=True)
class RoleOptions:
    """What one role of a bundle is made from, and how."""

    model: str
    precision: str = "int4"
    overrides: str = ""  # "pattern=scheme,..." as in `quantize.recipes.parse_overrides`
    revision: str | None = None

    def recipe(self, role: str) -> Recipe:
        """The recipe, refused where a target may not have it."""
        recipe = with_overrides(get_recipe(self.precision), parse_overrides(self.overrides))
        check_role(recipe, role)
        return recipe


@dataclass(frozen=True)
class ExportOptions:
    """Everything that `outrider export` can be told."""

    target: RoleOptions
    output: Path
    draft: RoleOptions | None = None
    device: str = "host"
    max_context: int = 2048
    profile: Literal["inplace", "split"] = "inplace"
    widths: tuple[int, ...] = ()  # of the split profile
    hidden_layers: tuple[int, ...] = ()  # of the target
    evaluate: bool = True
    force: bool = False
    mirror: str | None = None

    def __post_init__(self) -> None:
        """Refuse a device or a context that cannot be honoured."""
        if self.device not in DEVICES:
            raise UsageError(f"unknown device {self.device!r}; known: {', '.join(DEVICES)}")
        if self.max_context < 16:
            raise UsageError(f"max_context is {self.max_context}; it must be at least 16")
        if self.widths and self.profile == "inplace":
            raise UsageError("widths belong to the split profile; an inplace graph runs any width")
        if self.profile == "split" and not self.widths:
            object.__setattr__(self, "widths", (1, 2, 3, 5, 9, 64))


@dataclass
class ExportReport:
    """What an export did: per role the slots of its graph, and the measured quality."""

    output: Path
    graphs: dict[str, GraphReport] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)


def export_bundle(options: ExportOptions, progress: Progress | None = None) -> ExportReport:
    """Export a bundle. Raises OutriderError with what to do; on an error the destination stays as it was."""
    _require_extra()
    roles = {"target": options.target, **({"draft": options.draft} if options.draft else {})}
    recipes = {role: role_options.recipe(role) for role, role_options in roles.items()}
    with ExitStack() as stack:
        folder = stack.enter_context(_fresh_folder(options.output, options.force))
        checkpoints: dict[str, Checkpoint] = {
            role: stack.enter_context(
                open_checkpoint(role_options.model, revision=role_options.revision, mirror=options.mirror)
            )
            for role, role_options in roles.items()
        }
        if "draft" in checkpoints:
            refuse_mismatch(checkpoints["target"].tokenizer, checkpoints["draft"].tokenizer)
        for role, checkpoint in checkpoints.items():
            _check_context(checkpoint, options.max_context)
            check_overrides(parse_overrides(roles[role].overrides), matrix_slots(checkpoint.config), role)
        report = ExportReport(options.output)
        tokenizer = _write_tokenizer(folder, checkpoints["target"].tokenizer)
        entries: dict[str, RoleEntry] = {}
        for role, checkpoint in checkpoints.items():
            entry, report.graphs[role] = _export_role(
                folder, role, checkpoint, recipes[role], options, progress
            )
            entries[role] = RoleEntry((entry,))
        manifest = Manifest(
            tool_version=version("outrider"),
            sources=tuple(_source(role, checkpoint) for role, checkpoint in checkpoints.items()),
            roles=_name_target(entries),
            tokenizer=tokenizer,
            max_context=options.max_context,
            device=options.device,
        )
        write_manifest(folder, manifest)
        if options.evaluate:
            from outrider.export.evaluate import evaluate_bundle

            manifest = evaluate_bundle(folder, manifest, checkpoints, progress)
            report.quality = dict(manifest.quality)
            write_manifest(folder, manifest)
    return report


def _require_extra() -> None:
    """Raise MissingExtraError for the first library of the extra that is not installed."""
    for module in ("torch", "onnx", "onnxscript", "threadpoolctl"):
        try:
            import_module(module)
        except ImportError as error:
            raise MissingExtraError(module, "export") from error


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


@contextmanager
def _fresh_folder(output: Path, force: bool) -> Iterator[Path]:
    """A temporary folder that takes the place of `output` when the block ends well."""
    _refuse_existing(output, force)
    folder: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
        folder.chmod(0o755)
        yield folder
        _take_place(folder, output)
    except OSError as error:
        raise _disk_error(error, output) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _take_place(folder: Path, output: Path) -> None:
    """Move `folder` to `output`; what was there is removed afterwards, or put back if the move fails."""
    if not output.exists():
        os.replace(folder, output)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".old", dir=output.parent))
    try:
        os.replace(output, aside / "bundle")
        os.replace(folder, output)
    except BaseException:
        if not output.exists() and (aside / "bundle").exists():
            os.replace(aside / "bundle", output)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _refuse_existing(output: Path, force: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise UsageError(f"{output} exists and is not a bundle; choose another folder")
    if not force:
        raise UsageError(f"{output} already holds a bundle; --force replaces it")


def _disk_error(error: OSError, output: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ExportError(
            f"the disk of {output.parent} is full; nothing was written. Free space, then again"
        )
    return ExportError(f"writing the bundle failed: {error}; nothing was written")


def _check_context(checkpoint: Checkpoint, max_context: int) -> None:
    trained = checkpoint.config.max_position
    if max_context > trained:
        raise UsageError(f"max_context is {max_context}; the model was made for {trained} positions")


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


def _export_role(
    folder: Path,
    role: str,
    checkpoint: Checkpoint,
    recipe: Recipe,
    options: ExportOptions,
    progress: Progress | None,
) -> tuple[GraphEntry, GraphReport]:
    from outrider.export.calibrate import calibrate
    from outrider.export.onnx import export_graph

    place = folder / role
    place.mkdir()
    config, weights = checkpoint.config, SlotWeights(checkpoint)
    report = export_graph(
        config,
        weights,
        recipe,
        options.profile,
        place / "graph.onnx",
        max_context=options.max_context,
        widths=options.widths,
        hidden_layers=options.hidden_layers if role == "target" else (),
        stats=calibrate(weights, recipe, checkpoint.tokenizer, options.max_context),
        progress=lambda _, done, total: progress(f"{role}: quantize", done / total) if progress else None,
    )
    entry = GraphEntry(
        backend="onnxruntime",
        unit="cpu",
        profile=options.profile,
        files={f"{role}/{path.name}": describe_file(path) for path in report.files},
        widths=options.widths or None,
        prefill_width=max(options.widths) if options.widths else PREFILL_WIDTH,
        kv=KvEntry("float32", "BHSD", config.num_layers, config.num_kv_heads, config.head_dim),
        max_context=options.max_context,
        vocab_size=config.vocab_size,
        recipe=recipe.name,
        hidden_layers=tuple(report.meta["hidden_layers"]),
        gathered_bytes=report.gathered_bytes,
        weights=report.weights,
        options={name: report.meta[name] for name in BACKEND_ONLY},
    )
    return entry, report


def _name_target(entries: Mapping[str, RoleEntry]) -> dict[str, RoleEntry]:
    """Tell the draft which target graph it was made for."""
    target: FileEntry = next(iter(entries["target"].graphs[0].files.values()))
    named = dict(entries)
    if "draft" in named:
        graphs = tuple(replace(graph, target_sha256=target.sha256) for graph in named["draft"].graphs)
        named["draft"] = RoleEntry(graphs)
    return named
