"""`outrider chat`: a conversation on the terminal; the KV cache is kept between turns."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.generate import summary
from outrider.cli.options import (
    decoding_options,
    governing_options,
    loading_options,
    open_pipeline,
    parse_k,
    sampling_from,
)
from outrider.cli.paths import bundle_argument, overwrite_option, refuse_replacing

if TYPE_CHECKING:
    from outrider.runtime.pipeline import Pipeline

__all__ = ["command"]


@click.command(name="chat")
@bundle_argument
@click.option("--system", help="Begin the conversation with this system message.")
@decoding_options
@loading_options
@governing_options
@overwrite_option
def command(bundle: Path, system: str | None, **options: Any) -> None:
    """Talk to BUNDLE. An empty line or Ctrl-D ends; Ctrl-C stops the answer, not the conversation."""
    messages = [{"role": "system", "content": system}] if system else []
    refuse_replacing(options)
    wanted = {"sampling": sampling_from(options), "k": parse_k(options.pop("k"))}
    with open_pipeline(bundle, options) as pipeline:
        request = {**wanted, **options}
        while text := _ask():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(pipeline, messages, request)})
            request["trace"] = _next_trace(options["trace"])


def _next_trace(path: Path | None) -> Path | None:
    """Where the next answer is traced: t.jsonl, t-2.jsonl, t-3.jsonl, never a file that is there."""
    if path is None or not path.is_file():  # a device takes any number of traces
        return path
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(name for name in names if not name.exists())


def _ask() -> str:
    try:
        return str(click.prompt(">", default="", show_default=False, prompt_suffix=" "))
    except click.Abort:
        return ""


def _answer(pipeline: Pipeline, messages: list[dict[str, str]], request: dict[str, Any]) -> str:
    pieces: list[str] = []
    stats = None
    stream = pipeline.chat_stream(messages, **request)
    try:
        for chunk in stream:
            pieces.append(chunk.text)
            click.echo(chunk.text, nl=False)
            stats = chunk.stats or stats
    except KeyboardInterrupt:
        stream.close()
        click.echo(" [stopped]", nl=False)
    click.echo()
    if stats is not None:
        click.echo(summary(stats), err=True)
    return "".join(pieces)
