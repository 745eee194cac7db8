"""`outrider generate`: complete a prompt with a bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.options import (
    decoding_options,
    governing_options,
    json_option,
    loading_options,
    open_pipeline,
    parse_k,
    print_json,
    sampling_from,
)
from outrider.cli.paths import InputFile, bundle_argument, overwrite_option, refuse_replacing
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.runtime.pipeline import Pipeline
    from outrider.runtime.stats import Stats

__all__ = ["command", "summary"]

LEAST_PAUSE_S = 0.05  # in all, below which it would print as 0.0


@click.command(name="generate")
@bundle_argument
@click.option("--prompt", "-p", help="Complete this text; - reads it from standard input.")
@click.option("--prompt-file", type=InputFile(), help="Read the prompt from a file.")
@click.option("--chat", "as_chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option(
    "--logprobs",
    type=click.IntRange(min=0),
    help="Give so many alternatives for each token, with log probabilities; needs --json.",
)
@decoding_options
@loading_options
@governing_options
@overwrite_option
@json_option
def command(bundle: Path, as_json_text: bool, **options: Any) -> None:
    """Complete a prompt with BUNDLE. The text is the target's own, whatever drafts."""
    prompt = _prompt(options.pop("prompt"), options.pop("prompt_file"))
    as_chat = options.pop("as_chat")
    if options["logprobs"] is not None and not as_json_text:
        raise UsageError("--logprobs are printed by --json only; give both")
    refuse_replacing(options)
    wanted = {"sampling": sampling_from(options), "k": parse_k(options.pop("k"))}
    with open_pipeline(bundle, options) as pipeline:
        request = {**wanted, **options}
        content: Any = [{"role": "user", "content": prompt}] if as_chat else prompt
        if as_json_text:
            result = (pipeline.chat if as_chat else pipeline.generate)(content, **request)
            print_json(result)
        else:
            _print_stream(pipeline, content, as_chat, request)


def _prompt(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise UsageError("give the prompt by --prompt or by --prompt-file")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompt file {file}: {error}") from error
    return sys.stdin.read() if text == "-" else text or ""


def _print_stream(pipeline: Pipeline, content: Any, as_chat: bool, request: dict[str, Any]) -> None:
    stats = None
    for chunk in (pipeline.chat_stream if as_chat else pipeline.stream)(content, **request):
        click.echo(chunk.text, nl=False)
        stats = chunk.stats or stats
    click.echo()
    if stats is not None:
        click.echo(summary(stats), err=True)


def summary(stats: Stats) -> str:
    """One line of what a generation did, and another where its power cap cannot be kept."""
    from outrider.power.governor import BELOW_REST

    parts = [f"{stats.output_tokens} tokens in {stats.rounds} rounds"]
    if stats.decode_tokens_per_s:
        parts.append(f"{stats.decode_tokens_per_s:.1f} tokens/s")
    if stats.prompt_tokens_per_s:
        parts.append(f"prompt {stats.prompt_tokens} at {stats.prompt_tokens_per_s:.0f} tokens/s")
    if stats.acceptance is not None:
        parts.append(f"acceptance {stats.acceptance:.2f} ({stats.accepted} of {stats.evaluated})")
    if stats.overlapped_rounds:
        held = f"{stats.guesses_held} of {stats.guesses} guesses held"
        wasted = f"{stats.wasted_steps} of {stats.ahead_steps} draft steps for nothing"
        right = f"{stats.corrections_held} of {stats.corrections} corrections, " if stats.corrections else ""
        parts.append(f"{stats.overlapped_rounds} rounds overlapped ({held}, {right}{wasted})")
    if stats.paced_s >= LEAST_PAUSE_S:
        parts.append(f"paused {stats.paced_s:.1f} s to keep its limits")
    if stats.level not in (None, "nominal"):
        parts.append(f"level {stats.level}")
    line = "[" + "; ".join(parts) + "]"
    if BELOW_REST in stats.flags:
        line += "\n[warning: the power cap is below what the device draws at rest; no pause can keep it]"
    return line
