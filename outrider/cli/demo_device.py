"""`outrider demo --device`: a bundle for a phone's chip, whose draft is proven on the NPU's emulator."""

from __future__ import annotations

import time
from dataclasses import replace
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

BACKENDS = ("onnxruntime", "qnn")
CONTEXT, DRAFT_CONTEXT = 512, 256  # short: the emulator multiplies the whole cache at every step
TOKENS = 8  # of the text that the emulated draft helps to write
DRAFTED = 3
PROMPT = "The lighthouse keeper"


def demo_device(
    device: str, pair: Pair, bundle: Path, mirror: str | None, force: bool, bar: ProgressBar
) -> None:
    """Export for a device, show how each graph was proven, and decode with the draft on the emulated NPU.

    Raises OutriderError when the text is not the target's own; MissingExtraError without onnxruntime-qnn.
    """
    from outrider.targets.qnn_plugin import has_emulator

    began = time.monotonic()
    if not has_emulator():
        raise OutriderError(
            "this demo needs the NPU's emulator, which onnxruntime-qnn has for x86-64 only; `outrider export --device "
            f"{device}` makes the bundle here"
        )
    _bundle(device, pair, bundle, mirror, force, bar)
    _proof(bundle)
    _decode(bundle, bar)
    click.echo(f"\n   All of it took {time.monotonic() - began:.0f} s")


def _bundle(device: str, pair: Pair, bundle: Path, mirror: str | None, force: bool, bar: ProgressBar) -> None:
    from outrider.cli.demo import indent, usable
    from outrider.cli.export import describe
    from outrider.export.bundle import export_bundle

    click.echo(f"1. Fetch and export for {device}: the draft for its NPU, both for its CPU")
    click.echo("   (without ExecuTorch's graphs, which take minutes more; `outrider export` makes them)")
    if not force and usable(bundle, pair, device):
        click.echo(f"   {bundle} is there from an earlier run (--force exports again)\n")
        return
    begin = time.monotonic()
    report = export_bundle(_options(device, pair, bundle, mirror), bar, lambda b: click.echo(indent(str(b))))
    bar.close()
    click.echo(indent(describe(replace(report, quality={}))))
    click.echo(f"   exported, compiled and measured in {time.monotonic() - begin:.0f} s\n")


def _options(device: str, pair: Pair, bundle: Path, mirror: str | None) -> ExportOptions:
    from outrider.export.bundle import ExportOptions, RoleOptions
    from outrider.export.options import Extent

    return ExportOptions(
        target=RoleOptions(pair.target, pair.precision),
        draft=RoleOptions(pair.draft, pair.draft_precision),
        output=bundle,
        device=device,
        max_context=CONTEXT,
        draft_context=DRAFT_CONTEXT,
        backends=BACKENDS,
        extent=Extent(wikitext=256, own=128),
        allow_quality=True,  # the stand-in draft is coarse on purpose
        mirror=mirror,
        force=True,
    )


def _proof(bundle: Path) -> None:
    """How each graph was proven, and the draft on the NPU's own arithmetic beside the float draft."""
    from outrider.cli.export import proof_line
    from outrider.manifest import read_manifest

    click.echo("2. Proof: every graph beside the float weights, on text of the target's own")
    records = read_manifest(bundle).quality["graphs"]
    for name, record in records.items():
        click.echo(f"   {name}: {proof_line(record)}".replace("\n", "\n   "))
    click.echo("")


def _decode(bundle: Path, bar: ProgressBar) -> None:
    """A few tokens with the emulated draft; raises OutriderError when they are not the target's own."""
    import outrider

    click.echo("3. Decode: the emulated NPU drafts, the CPU checks")
    with outrider.load(bundle, draft=False) as alone:
        plain = alone.generate(PROMPT, k=0, max_tokens=TOKENS, ignore_eos=True)
    with outrider.load(bundle, draft_unit="npu") as pipeline:
        counted = _count_steps(pipeline, bar)
        begin = time.monotonic()
        drafted = pipeline.generate(PROMPT, k=DRAFTED, drafter="model", max_tokens=TOKENS, ignore_eos=True)
        seconds = time.monotonic() - begin
    bar.close()
    click.echo(f"   {PROMPT}{drafted.text}")
    if drafted.tokens != plain.tokens:
        raise OutriderError(
            f"with the emulated draft the text is {drafted.text!r}, alone it is {plain.text!r}"
        )
    stats = drafted.stats
    click.echo(
        f"   {len(drafted.tokens)} tokens, identical to plain decoding; {stats.accepted} of {stats.evaluated} checked "
        f"drafts accepted\n   EMULATED: {len(counted)} steps of the NPU took {seconds:.0f} s here; its real speed is "
        "not known"
    )


def _count_steps(pipeline: Any, bar: ProgressBar) -> list[int]:
    """The widths of the draft's forwards, as they come."""
    graph: Graph = pipeline.engine.drafters["model"].graph
    widths: list[int] = []
    forward = graph.forward

    def counting(tokens: Any, *arguments: Any, **options: Any) -> Any:
        widths.append(len(tokens))
        bar("emulated steps of the draft", min(1.0, len(widths) / (2 * TOKENS)))
        return forward(tokens, *arguments, **options)

    graph.forward = counting  # type: ignore[method-assign]
    return widths
