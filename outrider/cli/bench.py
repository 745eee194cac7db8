"""`outrider bench`: prefill, plain and speculative decoding, side by side in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import (
    ProgressBar,
    governing_options,
    json_option,
    listed,
    loading_options,
    open_pipeline,
    parse_drafting,
    parse_k,
    prompt_options,
    prompts_from,
)
from outrider.cli.paths import bundle_argument, overwrite_option, refuse_replacing
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.runtime.bench import Setting
    from outrider.runtime.pipeline import Pipeline
    from outrider.runtime.request import Drafting

__all__ = ["command"]


@click.command(name="bench")
@bundle_argument
@prompt_options
@click.option(
    "--prompt-tokens",
    "-pp",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Measure prefill with so many tokens.",
)
@click.option(
    "--num-draft-tokens",
    "--k",
    "ks",
    default="2,4,auto",
    show_default=True,
    help="Measure these k, with commas between.",
)
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    help="Measure model or lookup only; may be given several times (default: all there are).",
)
@click.option(
    "--drafting",
    default="auto",
    show_default=True,
    help="Measure drafting before each verify (serial), beside it too (overlapped), or as it pays (auto); with"
    " commas between.",
)
@click.option(
    "--repeats",
    "-r",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Measure everything so many times.",
)
@click.option(
    "--format",
    "-o",
    "style",
    type=click.Choice(["md", "csv", "json"]),
    default="md",
    show_default=True,
    help="Print the rows as this.",
)
@loading_options
@governing_options
@overwrite_option
@json_option
def command(bundle: Path, style: str, as_json_text: bool, **options: Any) -> None:
    """Measure BUNDLE: prefill, plain and speculative decoding.

    Every speculative row stands beside the plain row of the same prompts and run.
    """
    from outrider.runtime.bench import bench, bench_prefill, format_rows

    style = "json" if as_json_text else style
    prompts = prompts_from(options)
    ks = [parse_k(part) for part in listed(options.pop("ks"), "--k", "2 or auto")]
    modes = [parse_drafting(part) for part in listed(options.pop("drafting"), "--drafting", "auto")]
    drafters, repeats = options.pop("drafters"), options.pop("repeats")
    tokens, prompt_tokens = options.pop("max_tokens"), options.pop("prompt_tokens")
    bar = ProgressBar()
    refuse_replacing(options)
    with open_pipeline(bundle, options, governor=False) as pipeline:
        if style == "md":
            click.echo("\n".join(map(str, pipeline.placement)))
        settings = _settings(pipeline, drafters, ks, modes)
        rows = [bench_prefill(pipeline, prompt_tokens, repeats)]
        rows += bench(
            pipeline,
            prompts,
            settings,
            max_tokens=tokens,
            repeats=repeats,
            progress=lambda done, total: bar("measuring", done / total),
        )
        bar.close()
    click.echo(format_rows(rows, style))  # type: ignore[arg-type]


def _settings(
    pipeline: Pipeline, drafters: tuple[str, ...], ks: list[int | str], modes: list[Drafting]
) -> list[Setting]:
    from outrider.runtime.bench import Setting
    from outrider.runtime.overlap import can_overlap

    known = list(pipeline.engine.drafters)
    for name in drafters:
        if name not in known:
            raise UsageError(f"unknown drafter {name!r}; this bundle has {', '.join(known)}")
    chosen = drafters or tuple(known)
    able = {name: can_overlap(pipeline.engine.drafters[name]) for name in chosen}
    if drafters and "overlapped" in modes and not any(able.values()):
        raise UsageError(f"{', '.join(drafters)} cannot draft beside the target; leave --drafting out")
    return [
        Setting(name, k, mode)  # type: ignore[arg-type]
        for name in chosen
        for k in ks
        for mode in modes
        if k != 0 and (able[name] or mode != "overlapped")
    ]
