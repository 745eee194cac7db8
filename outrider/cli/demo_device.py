"""`outrider demo --device`: a bundle for a phone's chip, whose draft is proven without that chip.

A Snapdragon's draft runs on the emulator of its NPU; an Apple device's by our evaluator of Core ML programs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.cli.demo import Pair
    from outrider.cli.options import ProgressBar
    from outrider.contracts import Graph
    from outrider.export.options import ExportOptions

__all__ = ["demo_device"]


@dataclass(frozen=True)
class Kind:
    """What is made for a kind of device, and how it is told."""

    backends: tuple[str, ...]
    made: str
    aside: str
    drafts: str
    unit: str
    label: str


SNAPDRAGON = Kind(
    ("onnxruntime", "qnn"),
    "the draft for its NPU, both for its CPU",
    "without ExecuTorch's graphs, which take minutes more; `outrider export` makes them",
    "the emulated NPU drafts, the CPU checks",
    "the NPU",
    "EMULATED",
)
APPLE = Kind(
    ("onnxruntime", "coreml"),
    "the draft for its Neural Engine, the target for its GPU, both for its CPU",
    "as Core ML packages, which our evaluator runs where no Core ML is",
    "the Neural Engine's package drafts, the CPU checks",
    "the Neural Engine's package",
    "EVALUATED",
)
CONTEXT, DRAFT_CONTEXT = 512, 256  # short: the emulator multiplies the whole cache at every step
TOKENS = 8  # of the text that the emulated draft helps to write
DRAFTED = 3
PROMPT = "The lighthouse keeper"


def demo_device(
    device: str, pair: Pair, bundle: Path, mirror: str | None, force: bool, bar: ProgressBar
) -> None:
    """Export for a device, show how each graph was proven, and decode with the draft of its accelerator.

    Raises OutriderError when the text is not the target's own; MissingExtraError without the device's library.
    """
    from outrider.export.device_plans import device_backends, open_device
    from outrider.targets.qnn_plugin import has_emulator

    began = time.monotonic()
    kind = APPLE if "coreml" in device_backends(open_device(device))[1] else SNAPDRAGON
    if kind is SNAPDRAGON and not has_emulator():
        raise OutriderError(
            "this demo needs the NPU's emulator, which onnxruntime-qnn has for x86-64 only; `outrider export --device "
            f"{device}` makes the bundle here"
        )
    _bundle(device, kind, pair, bundle, mirror, force, bar)
    _proof(bundle)
    _decode(kind, bundle, bar)
    click.echo(f"\n   All of it took {time.monotonic() - began:.0f} s")


def _bundle(
    device: str, kind: Kind, pair: Pair, bundle: Path, mirror: str | None, force: bool, bar: ProgressBar
) -> None:
    from outrider.cli.demo import indent, usable
    from outrider.cli.export import describe
    from outrider.export.bundle import export_bundle

    click.echo(f"1. Fetch and export for {device}: {kind.made}\n   ({kind.aside})")
    if not force and usable(bundle, pair, device):
        click.echo(f"   {bundle} is there from an earlier run (--force exports again)\n")
        return
    begin = time.monotonic()
    options = _options(device, kind, pair, bundle, mirror)
    report = export_bundle(options, bar, lambda budget: click.echo(indent(str(budget))))
    bar.close()
    click.echo(indent(describe(replace(report, quality={}))))
    click.echo(f"   exported, compiled and measured in {time.monotonic() - begin:.0f} s\n")


def _options(device: str, kind: Kind, pair: Pair, bundle: Path, mirror: str | None) -> ExportOptions:
    from outrider.export.bundle import ExportOptions, RoleOptions
    from outrider.export.options import Extent

    return ExportOptions(
        target=RoleOptions(pair.target, pair.precision),
        draft=RoleOptions(pair.draft, pair.draft_precision),
        output=bundle,
        device=device,
        max_context=CONTEXT,
        draft_context=DRAFT_CONTEXT,
        backends=kind.backends,
        extent=Extent(wikitext=256, own=128),
        allow_quality=True,  # the stand-in draft is coarse on purpose
        mirror=mirror,
        force=True,
    )


def _proof(bundle: Path) -> None:
    """How each graph was proven, and the accelerator's graphs beside the float weights."""
    from outrider.cli.export import proof_line
    from outrider.manifest import read_manifest

    click.echo("2. Proof: every graph beside the float weights, on text of the target's own")
    records = read_manifest(bundle).quality["graphs"]
    for name, record in records.items():
        click.echo(f"   {name}: {proof_line(record)}".replace("\n", "\n   "))
    click.echo("")


def _decode(kind: Kind, bundle: Path, bar: ProgressBar) -> None:
    """A few tokens with the accelerator's draft; raises OutriderError when they are not the target's own."""
    import outrider

    click.echo(f"3. Decode: {kind.drafts}")
    with outrider.load(bundle, draft=False) as alone:
        plain = alone.generate(PROMPT, k=0, max_tokens=TOKENS, ignore_eos=True)
    with outrider.load(bundle, draft_unit="npu") as pipeline:
        counted = _count_steps(pipeline, bar)
        emulated = pipeline.placement[1].emulated
        begin = time.monotonic()
        drafted = pipeline.generate(PROMPT, k=DRAFTED, drafter="model", max_tokens=TOKENS, ignore_eos=True)
        seconds = time.monotonic() - begin
    bar.close()
    click.echo(f"   {PROMPT}{drafted.text}")
    if drafted.tokens != plain.tokens:
        raise OutriderError(
            f"with the accelerator's draft the text is {drafted.text!r}, alone it is {plain.text!r}"
        )
    stats = drafted.stats
    click.echo(
        f"   {len(drafted.tokens)} tokens, identical to plain decoding; {stats.accepted} of {stats.evaluated} checked "
        "drafts accepted"
    )
    took = f"{len(counted)} steps of {kind.unit} took {seconds:.1f} s here"
    click.echo(f"   {kind.label}: {took}; its real speed is not known" if emulated else f"   {took}")


def _count_steps(pipeline: Any, bar: ProgressBar) -> list[int]:
    """The widths of the draft's forwards, as they come."""
    graph: Graph = pipeline.engine.drafters["model"].graph
    widths: list[int] = []
    forward = graph.forward

    def counting(tokens: Any, *arguments: Any, **options: Any) -> Any:
        widths.append(len(tokens))
        bar("steps of the draft", min(1.0, len(widths) / (2 * TOKENS)))
        return forward(tokens, *arguments, **options)

    graph.forward = counting  # type: ignore[method-assign]
    return widths
