"""`outrider acceptance`: record what a bundle's drafters get right, to simulate any plan from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outrider.cli.options import ProgressBar, loading_options, open_pipeline, prompt_options, prompts_from
from outrider.cli.paths import (
    OutputFile,
    bundle_argument,
    overwrite_option,
    refuse_existing,
    without_telemetry,
)

__all__ = ["command"]


@click.command(name="acceptance")
@bundle_argument
@click.option(
    "--output",
    "-o",
    "out",
    type=OutputFile(),
    required=True,
    help="Write the trace to this file.",
)
@without_telemetry("acceptance is recorded with nothing that governs")
@overwrite_option
@prompt_options
@loading_options
def command(bundle: Path, out: Path, overwrite: bool, max_tokens: int, **options: Any) -> None:
    """Record an acceptance trace of BUNDLE: what each drafter gets right at every position of real answers.

    `outrider simulate --acceptance` and `outrider profile --device NAME --acceptance` take it in place of a bundle.
    """
    from outrider.lines import LineWriter
    from outrider.runtime.acceptance import record_acceptance

    refuse_existing(out, overwrite)
    prompts = prompts_from(options)
    bar = ProgressBar()
    with open_pipeline(bundle, options) as pipeline:
        manifest = pipeline.manifest
        models = {source.role: source.model for source in manifest.sources} if manifest else {}
        with LineWriter(out, "acceptance", {"models": models, "max_tokens": max_tokens}) as trace:
            for record in record_acceptance(
                pipeline, prompts, max_tokens, lambda done, total: bar("recording", done / total)
            ):
                trace.write(record)
        bar.close()
    click.echo(f"{out}: {len(prompts)} answers, drafters {', '.join(pipeline.drafters)}")
