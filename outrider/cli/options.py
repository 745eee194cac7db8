"""Options and printing that several commands share."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from outrider.cli.paths import InputFile, OutputFile, telemetry_option
from outrider.contracts import as_json
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.contracts import Sampling
    from outrider.runtime.bench import Prompt
    from outrider.runtime.pipeline import Pipeline
    from outrider.runtime.request import Drafting

__all__ = [
    "Finite",
    "FiniteRange",
    "ProgressBar",
    "Unit",
    "decoding_options",
    "governing_options",
    "json_option",
    "listed",
    "loading_from",
    "loading_options",
    "open_pipeline",
    "parse_drafting",
    "parse_k",
    "print_json",
    "prompt_options",
    "prompts_from",
    "refuse_loading",
    "sampling_from",
]

F = TypeVar("F", bound=Callable[..., Any])


class Finite(click.types.FloatParamType):
    """A float; NaN and infinity are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error that names the option."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class FiniteRange(click.FloatRange):
    """A float within bounds; NaN, which no bound keeps out, and infinity are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error that names the option."""
        return super().convert(Finite().convert(value, param, ctx), param, ctx)


class Unit(click.ParamType):  # type: ignore[type-arg]
    """`cpu`, `gpu`, `npu`, or a core set of the CPU as `cpu:2-3`."""

    name = "unit"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """What help shows."""
        return "[cpu|gpu|npu|cpu:CORES]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The unit as it is written; whether there are such cores, loading knows."""
        if value not in ("cpu", "gpu", "npu") and not str(value).startswith("cpu:"):
            self.fail(f"{value!r} is not one of 'cpu', 'gpu', 'npu', or a core set as 'cpu:0'.", param, ctx)
        return str(value)


json_option = click.option("--json", "as_json_text", is_flag=True, help="Print JSON instead of text.")

_LOADING = [
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        help="Run each graph on this many threads (default: one for each core but weak ones).",
    ),
    click.option(
        "--target-provider",
        multiple=True,
        help="Run the target on this ONNX Runtime execution provider; repeat it for fallbacks, in order.",
    ),
    click.option(
        "--draft-provider",
        multiple=True,
        help="Run the draft on this ONNX Runtime execution provider; repeat it for fallbacks, in order.",
    ),
    click.option(
        "--target-unit",
        type=Unit(),
        help="Run the target on this unit, with a graph that was made for it (default: the first that can run);"
        " cpu:2-3 are these cores of it, for the target alone.",
    ),
    click.option(
        "--draft-unit",
        type=Unit(),
        help="Run the draft on this unit, as cpu:0; npu is emulated, slowly, where there is none.",
    ),
    click.option(
        "--target-backend",
        type=click.Choice(["onnxruntime", "executorch", "coreml"]),
        help="Run the target by this library (default: the first that can).",
    ),
    click.option(
        "--draft-backend",
        type=click.Choice(["onnxruntime", "executorch", "coreml"]),
        help="Run the draft by this library (default: the first that can).",
    ),
    click.option("--no-draft", is_flag=True, help="Leave the draft model out; n-gram lookup still drafts."),
    click.option("--nice", is_flag=True, help="Yield the CPU to whatever else is running."),
    click.option(
        "--max-context",
        type=click.IntRange(min=2),
        help="Hold at most so many tokens, in a cache of that size where the graph allows it.",
    ),
    click.option(
        "--draft-context",
        type=click.IntRange(min=2),
        help="Let the draft model remember the last so many tokens only.",
    ),
    click.option(
        "--verify",
        type=click.Choice(["size", "full"]),
        default="size",
        show_default=True,
        help="Check the sizes of the bundle's files, or hash them in full.",
    ),
]

_GOVERNING = [
    click.option(
        "--objective",
        type=click.Choice(["latency", "energy", "balanced"]),
        default="latency",
        show_default=True,
        help="Choose drafts for tokens per second (latency), joules per token (energy), or both (balanced).",
    ),
    click.option(
        "--power-cap",
        "power_cap_w",
        type=float,
        metavar="W",
        help="Keep mean power below so many watts, by cheaper drafts and by pauses.",
    ),
    click.option(
        "--temp-limit",
        "temp_limit_c",
        type=float,
        metavar="C",
        help="Keep the hottest silicon below so many °C.",
    ),
    click.option(
        "--battery-floor",
        "battery_floor_percent",
        type=float,
        metavar="PERCENT",
        help="Save energy while the battery is at this charge or below and not charging.",
    ),
    click.option(
        "--memory-limit",
        "memory_limit_mb",
        type=float,
        metavar="MB",
        help="Keep the whole process within so many MB of memory: with a shorter context of the draft, without the "
        "draft, or with a shorter context, as it needs.",
    ),
    click.option(
        "--device",
        metavar="NAME|FILE",
        help="Take limits and thermal constants from this device profile (see `outrider devices`).",
    ),
    telemetry_option,
    click.option(
        "--governor-log",
        type=OutputFile(),
        help="Write every decision of the governor to this file.",
    ),
    click.option(
        "--no-governor", is_flag=True, help="Read no sensors, and never shorten drafts because of heat."
    ),
]

_DECODING = [
    click.option(
        "--max-tokens",
        "-n",
        type=click.IntRange(min=1),
        default=256,
        show_default=True,
        help="Generate at most so many tokens.",
    ),
    click.option(
        "--num-draft-tokens",
        "--k",
        "k",
        default="auto",
        show_default=True,
        help="Draft so many tokens a round; auto chooses it every round, 0 never drafts.",
    ),
    click.option(
        "--drafter",
        default="auto",
        show_default=True,
        help="Draft by model, by lookup, by either (auto), or not at all (none).",
    ),
    click.option(
        "--drafting",
        type=click.Choice(["auto", "serial", "overlapped"]),
        default="auto",
        show_default=True,
        help="Draft before each verify (serial), beside it too (overlapped), or as it pays on two units (auto).",
    ),
    click.option(
        "--temp",
        "temperature",
        type=float,
        default=0.0,
        show_default=True,
        help="Sample at this temperature; 0 takes the most likely token.",
    ),
    click.option("--top-k", type=int, default=0, help="Sample from the k most likely tokens only; 0 is off."),
    click.option(
        "--top-p",
        type=float,
        default=1.0,
        help="Sample from the most likely tokens that hold this share together; 1 is off.",
    ),
    click.option(
        "--min-p",
        type=float,
        default=0.0,
        help="Drop tokens below this share of the most likely one; 0 is off.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="Divide the logits of tokens that were there by this; 1 is off.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="Draw the same text again for the same seed."
    ),
    click.option(
        "--mode",
        type=click.Choice(["match", "reject"]),
        default="match",
        show_default=True,
        help="Accept drafts by this rule, both lossless: match gives a seed the same text with and without a draft,"
        " reject the same distribution at higher acceptance.",
    ),
    click.option("--stop", multiple=True, help="Stop before this text; may be given several times."),
    click.option(
        "--trace",
        type=OutputFile(),
        help="Write every decision of the decoding to this file; a chat's second answer to FILE-2, and so on.",
    ),
]

_PROMPTS = [
    click.option(
        "--prompts",
        type=InputFile(),
        help="Read prompts from these JSON lines, with 'turns' or 'prompt' (default: four short ones of our own).",
    ),
    click.option(
        "--per-category",
        type=click.IntRange(min=1),
        help="Take only the first so many prompts of each category.",
    ),
    click.option(
        "--max-tokens",
        "-n",
        type=click.IntRange(min=2),
        default=128,
        show_default=True,
        help="Generate at most so many tokens an answer.",
    ),
]


def _apply(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


loading_options = _apply(_LOADING)
decoding_options = _apply(_DECODING)
governing_options = _apply(_GOVERNING)
prompt_options = _apply(_PROMPTS)


def open_pipeline(bundle: Path, options: dict[str, Any], *, governor: bool | None = None) -> Pipeline:
    """Load a bundle with the shared loading and governing options, which are taken out of `options`.

    `governor` holds unless a governing option was given; see `outrider.load`. A command without governing
    options measures or proves something, and is not governed.
    """
    import outrider

    return outrider.load(
        bundle,
        threads=options.pop("threads"),
        target_providers=options.pop("target_provider") or None,
        draft_providers=options.pop("draft_provider") or None,
        **{name: options.pop(name) for name in (*_PLACING, *_CONTEXTS)},
        draft=not options.pop("no_draft"),
        nice=options.pop("nice"),
        verify=options.pop("verify"),
        **_governing_from(options, governor),
    )


def _governing_from(options: dict[str, Any], governor: bool | None) -> dict[str, Any]:
    names = ("objective", "power_cap_w", "temp_limit_c", "battery_floor_percent", "memory_limit_mb")
    found = {
        name: options.pop(name) for name in (*names, "device", "telemetry", "governor_log") if name in options
    }
    asked = any(
        value is not None for name, value in found.items() if (name, value) != ("objective", "latency")
    )
    off = options.pop("no_governor", not found)
    return {**found, "governor": False if off else None if asked else governor}


_PLACING = ("target_unit", "draft_unit", "target_backend", "draft_backend")
_CONTEXTS = ("max_context", "draft_context")
_UNSET = {
    "threads": None,
    "target_provider": (),
    "draft_provider": (),
    **dict.fromkeys((*_PLACING, *_CONTEXTS)),
    "no_draft": False,
    "nice": False,
    "verify": "size",
}


def loading_from(options: dict[str, Any]) -> dict[str, Any]:
    """The loading options alone, taken out of `options`."""
    return {name: options.pop(name) for name in _UNSET}


def refuse_loading(options: dict[str, Any], why: str) -> None:
    """Refuse loading options where no bundle is loaded, and take them out of `options`."""
    for name, value in loading_from(options).items():
        if value != _UNSET[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} concerns a bundle, and {why} loads none; leave it out"
            )


def sampling_from(options: dict[str, Any]) -> Sampling:
    """A `Sampling` from the shared decoding options, which are taken out of `options`."""
    from outrider.contracts import Sampling

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "mode")
    return Sampling(**{name: options.pop(name) for name in names})


def prompts_from(options: dict[str, Any]) -> list[Prompt]:
    """The prompts that `prompt_options` name, whose options but --max-tokens are taken out of `options`."""
    from outrider.runtime.bench import default_prompts, load_prompts

    file, limit = options.pop("prompts"), options.pop("per_category")
    return load_prompts(file, limit) if file else default_prompts()


def listed(text: str, option: str, example: str) -> list[str]:
    """The parts of a value with commas between. Raises UsageError where there is none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f"{option} is {text!r}; give at least one, such as {example}")
    return parts


def parse_k(text: str) -> int | str:
    """`auto` or a whole number from 0."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise UsageError(f"k is {text!r}; expected auto or a whole number from 0")
    from outrider.runtime.rounds import refuse_k

    refuse_k(int(text))
    return int(text)


def parse_drafting(text: str) -> Drafting:
    """`auto`, `serial` or `overlapped`."""
    if text not in ("auto", "serial", "overlapped"):
        raise UsageError(f"drafting is {text!r}; known: auto, serial, overlapped")
    return cast("Drafting", text)


def print_json(record: Any) -> None:
    """Print a record as JSON; paths become text."""
    click.echo(json.dumps(as_json(record), indent=2, ensure_ascii=False, default=str))


class ProgressBar:
    """A progress bar on standard error, where that is a terminal; else one line a stage."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that `stage` is `fraction` (0..1) done."""
        if stage != self._stage:
            self.close()
            self._stage = stage
            if not sys.stderr.isatty():
                click.echo(f"  {stage} ...", err=True)
                return
            from tqdm import tqdm

            self._bar = tqdm(total=100, desc=stage, file=sys.stderr, leave=False, bar_format="{l_bar}{bar}|")
        if self._bar is not None:
            self._bar.update(max(0.0, 100 * fraction - self._bar.n))

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
