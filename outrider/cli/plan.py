"""`outrider plan`: where the roles of a pair should run on a device, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import FiniteRange, Unit, json_option, print_json
from outrider.cli.paths import BundleFolder, ModelName
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.manifest import Manifest
    from outrider.runtime.placement import DevicePlan, Option, RolePlan
    from outrider.runtime.placement_costs import Candidate
    from outrider.targets.device import Device

__all__ = ["command", "describe"]

MOST_ROWS = 12


@click.command(name="plan")
@click.argument("bundle", type=BundleFolder(), required=False)
@click.option(
    "--model",
    "-m",
    type=ModelName(),
    help="Plan for this target in place of a bundle: a catalog name, .gguf, folder or hub id.",
)
@click.option("--draft-model", "-md", type=ModelName(), help="Plan for this draft beside it.")
@click.option(
    "--device",
    default="host",
    show_default=True,
    help="Plan for this device: a name of `outrider devices`, or a TOML file.",
)
@click.option(
    "--objective",
    type=click.Choice(["speed", "energy"]),
    default="speed",
    show_default=True,
    help="Choose for tokens per second (speed) or joules per token (energy).",
)
@click.option(
    "--memory-limit",
    "memory_limit_mb",
    type=FiniteRange(min=0, min_open=True),
    metavar="MB",
    help="Take at most so many MB (default: what the device lets an app take, here what is free now).",
)
@click.option(
    "--acceptance",
    type=FiniteRange(0, 1),
    metavar="SHARE",
    help="Expect this share of drafted tokens to be accepted (default: as the export measured it, else 0.7).",
)
@click.option("--target-unit", type=Unit(), help="Put the target on this unit.")
@click.option("--draft-unit", type=Unit(), help="Put the draft on this unit, as cpu:0.")
@click.option(
    "--drafting",
    type=click.Choice(["auto", "none", "serial", "overlapped"]),
    default="auto",
    show_default=True,
    help="Draft not at all, before each verify, beside it, or as it pays (auto).",
)
@click.option("--precision", help="Plan for the target in this recipe (default: int4; needs --model).")
@click.option(
    "--draft-precision", help="Plan for the draft in this recipe (default: int4; needs --draft-model)."
)
@click.option(
    "--max-context",
    type=click.IntRange(min=16),
    help="Hold so many tokens (default: 2048, or fewer where that does not fit).",
)
@click.option("--npu-target", is_flag=True, help="Consider a target on the NPU too (needs --model).")
@json_option
def command(bundle: Path | None, as_json_text: bool, **given: Any) -> None:
    """Choose unit, backend, precision, threads, drafting, widths and context for each role, and say why.

    Nothing is run, and no weights are downloaded. Every figure is marked: calibrated, where `outrider calibrate` or
    an export measured it on this machine, or modelled from the device's profile.
    """
    from outrider.export.device_plans import open_device
    from outrider.manifest import read_manifest
    from outrider.runtime.placement import Request, place
    from outrider.runtime.placement_sources import limit_on, measured_acceptance, unit_cores

    device = open_device(given["device"])
    manifest = read_manifest(bundle) if bundle is not None else None
    candidates = _candidates(device, manifest, given)
    acceptance = given["acceptance"]
    share, source = measured_acceptance(manifest) if acceptance is None else (acceptance, "as given")
    plan = place(
        Request(
            device,
            candidates,
            limit_on(device, given["memory_limit_mb"]),
            given["objective"],
            share,
            source,
            unit_cores(device),
            given["target_unit"],
            given["draft_unit"],
            None if given["drafting"] == "auto" else given["drafting"],
            given["max_context"],
        )
    )
    if as_json_text:
        print_json(plan)
    else:
        click.echo(describe(plan))


def _candidates(device: Device, manifest: Manifest | None, given: dict[str, Any]) -> tuple[Candidate, ...]:
    """The graphs of the bundle, or those that an export of the models would make."""
    if (manifest is None) == (given["model"] is None):
        raise UsageError("give either a bundle or a target model (--model)")
    if manifest is not None:
        from outrider.runtime.placement_sources import bundle_candidates

        names = ("draft_model", "precision", "draft_precision", "npu_target")
        stray = next((name for name in names if given[name]), None)
        if stray is not None:
            raise UsageError(
                f"--{stray.replace('_', '-')} concerns models; the graphs of a bundle are made already"
            )
        return bundle_candidates(manifest, here=device.kind == "host", context=given["max_context"])
    return _of_models(device, given)


def _of_models(device: Device, given: dict[str, Any]) -> tuple[Candidate, ...]:
    from outrider.export.checkpoint import model_config
    from outrider.export.options import ExportOptions, RoleOptions
    from outrider.export.placement import model_candidates

    if given["draft_precision"] and not given["draft_model"]:
        raise UsageError("--draft-precision was given, but no --draft-model; give both or neither")
    draft = None
    if given["draft_model"] is not None:
        draft = RoleOptions(given["draft_model"], given["draft_precision"] or "int4")
    options = ExportOptions(
        RoleOptions(given["model"], given["precision"] or "int4"),
        Path("bundle"),
        draft,
        device.slug,
        given["max_context"] or 2048,
        npu_target=given["npu_target"],
    )
    models = {"target": given["model"], "draft": given["draft_model"]}
    configs = {role: model_config(name) for role, name in models.items() if name is not None}
    return model_candidates(device, options, configs)


def describe(plan: DevicePlan) -> str:
    """The plan, what it was chosen from, and what was refused."""
    chosen = plan.chosen
    lines = [
        f"{plan.device}, for {plan.objective}; {plan.limit.mb:.0f} MB {plan.limit.how}; acceptance "
        f"{plan.acceptance:.2f} ({plan.acceptance_from})",
        "",
        f"{'role':7}{'unit':9}{'backend':13}{'precision':11}{'threads':>7}{'context':>9}  {'KV':9}{'widths':18}"
        f"{'weights':>8}{'KV MB':>7}{'scratch':>8}{'ms':>8}  figures",
        *(_role_line(role) for role in (chosen.target, chosen.draft) if role is not None),
        f"together {chosen.memory_mb:.0f} MB at most, with the process itself (modelled)",
        "",
        *_drafting_lines(plan),
        "",
        f"{'':2}{'target on':24}{'draft on':24}{'drafting':12}{'k':>3}{'tokens/s':>10}{'J/token':>9}{'MB':>7}"
        "  time, energy",
        *(_option_line(option, option is chosen) for option in plan.options[:MOST_ROWS]),
    ]
    if len(plan.options) > MOST_ROWS:
        lines.append(f"  and {len(plan.options) - MOST_ROWS} more that promise less (--json has all)")
    lines += ["", "refused:"] * bool(plan.refused)
    lines += [f"  {refusal.what}: {refusal.why}" for refusal in plan.refused]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def _role_line(role: RolePlan) -> str:
    widths = "any" if role.widths is None else ",".join(map(str, role.widths))
    return (
        f"{role.role:7}{role.unit:9}{role.backend:13}{role.precision:11}{role.threads or '-':>7}{role.context:9}  "
        f"{role.kv_type:9}{widths:18}{role.weights_mb:8.0f}{role.kv_mb:7.0f}{role.scratch_mb:8.0f}"
        f"{role.step_ms:8.2f}  {role.basis}"
    )


def _drafting_lines(plan: DevicePlan) -> list[str]:
    chosen = plan.chosen
    if chosen.draft is None:
        how = "drafting: none by a model"
    else:
        how = f"drafting: {chosen.mode}, k = {chosen.k}, at most {plan.k_ceiling}"
    promise = f"{chosen.tokens_s:.1f} tokens/s ({chosen.basis}), {chosen.token_j:.3f} J/token ({chosen.energy_basis})"
    return [f"{how}: {promise}"]


def _option_line(option: Option, chosen: bool) -> str:
    target, draft = (
        "-" if role is None else f"{role.unit} {role.backend}" for role in (option.target, option.draft)
    )
    return (
        f"{'*' if chosen else '':2}{target:24}{draft:24}{option.mode:12}{option.k:3}{option.tokens_s:10.1f}"
        f"{option.token_j:9.3f}{option.memory_mb:7.0f}  {option.basis}, {option.energy_basis}"
    )
