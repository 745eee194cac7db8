"""Plain greedy decoding of Outrider, llama.cpp and onnxruntime-genai, side by side in one run.

    python -m benchmarks.speed [--bundle DIR] [--gguf MODEL.gguf] [--genai DIR ...]

Every engine lives in its own process with the same number of threads, and decodes the same prompt to the
same number of tokens. The processes take turns (ours, llama.cpp, genai, ours, ...), one at a time, in an
order that reverses every other repeat. A ratio is taken within a repeat, so that a slow moment of the
machine falls on both of its sides. Medians and their intervals are over repeats; the first repeat warms
up and is not counted. The perplexities beside the times are those of our bundle's export and, of the peers'
models, those of `benchmarks.perplexity`, which `--perplexity` runs where it has not been.

What is not given is fetched, exported and built first, so that `python -m benchmarks.speed` alone works.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import Worker
from benchmarks.options import at_least, genai_folder, gguf_file, named, new_file, told
from benchmarks.peers import PEERS, GenaiRecipe, build_recipes, install, installed_python, recipe_argument
from benchmarks.perplexity import Perplexity, known, measure_models
from benchmarks.summary import Median, describe, machine, markdown_table, median_interval
from outrider.errors import BackendError, UsageError
from outrider.manifest import read_manifest

__all__ = ["Row", "complaints", "format_table", "measure", "rows"]

PROMPT = (
    "Here is a long and detailed explanation of how the water cycle works, written for a curious child. "
    "It covers evaporation, condensation, rain, rivers and the sea, one after another.\n\n"
    "Once upon a time there was a little drop of water that lived in the sea. One sunny morning"
)
OURS = "outrider"
RECIPES = (GenaiRecipe(), GenaiRecipe("int8", 64))


@dataclass(frozen=True)
class Row:
    """One engine: ms per decoded token, and how many times faster Outrider was in the same repeats."""

    engine: str
    ms_per_token: Median
    tokens_per_s: float
    ours_faster: Median | None
    prompt_tokens: int
    tokens: int
    prompt_ms: float
    load_s: float
    resident_mb: float | None
    quality: Perplexity | None = None


def measure(
    workers: Mapping[str, Worker], request: Mapping[str, Any], repeats: int, pause_s: float
) -> list[dict[str, dict[str, Any]]]:
    """Ask every worker in turn, `repeats` times after one warm-up; one dict of answers per repeat."""
    names = list(workers)
    answers: list[dict[str, dict[str, Any]]] = []
    for repeat in range(repeats + 1):
        order = names if repeat % 2 == 0 else names[::-1]
        one: dict[str, dict[str, Any]] = {}
        for name in order:
            time.sleep(pause_s)
            one[name] = workers[name].ask(request)
        answers.append(one)
        shown = ", ".join(f"{name} {_ms(one[name]):.2f}" for name in names)
        print(f"{'warm-up' if repeat == 0 else f'repeat {repeat}'}: {shown} ms/token", file=sys.stderr)
    return answers[1:]


def _ms(answer: Mapping[str, Any]) -> float:
    if int(answer["tokens"]) < 2:
        raise BackendError(
            f"an engine decoded {answer['tokens']} tokens; what one takes needs two; see --prompt"
        )
    return 1e3 * float(answer["decode_s"]) / (int(answer["tokens"]) - 1)


def rows(
    answers: Sequence[Mapping[str, Mapping[str, Any]]],
    load_s: Mapping[str, float],
    quality: Mapping[str, Perplexity | None],
) -> list[Row]:
    """One row an engine; `quality` is what is known of its model."""
    table = []
    for name, load in load_s.items():
        mine = [one[name] for one in answers]
        per_token = median_interval([_ms(answer) for answer in mine])
        ratios = [_ms(one[name]) / _ms(one[OURS]) for one in answers if OURS in one]
        last = mine[-1]
        table.append(
            Row(
                engine=name,
                ms_per_token=per_token,
                tokens_per_s=1e3 / per_token.value,
                ours_faster=median_interval(ratios) if ratios and name != OURS else None,
                prompt_tokens=int(last["prompt_tokens"]),
                tokens=int(last["tokens"]),
                prompt_ms=median_interval([1e3 * float(answer["prompt_s"]) for answer in mine]).value,
                load_s=load,
                resident_mb=last["resident_mb"],
                quality=quality[name],
            )
        )
    return table


def format_table(table: Sequence[Row]) -> str:
    """The rows as Markdown."""
    head = [
        "engine",
        "ms/token",
        "tok/s",
        "ours is faster by",
        "perplexity",
        "prompt",
        "tokens",
        "prompt ms",
        "load s",
        "RSS MB",
    ]
    body = [
        [
            row.engine,
            f"{row.ms_per_token:.2f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.ours_faster:.2f} x" if row.ours_faster else "-",
            str(row.quality or "?"),
            str(row.prompt_tokens),
            str(row.tokens),
            f"{row.prompt_ms:.0f}",
            f"{row.load_s:.2f}",
            "-" if row.resident_mb is None else f"{row.resident_mb:.0f}",
        ]
        for row in table
    ]
    return markdown_table(head, body)


def complaints(table: Sequence[Row]) -> list[str]:
    """What makes the rows less than comparable."""
    notes = []
    if len({row.tokens for row in table}) > 1:
        notes.append("the engines did not decode the same number of tokens; choose another --prompt")
    if len({row.prompt_tokens for row in table}) > 1:
        notes.append("the engines did not see the same number of prompt tokens")
    references = [row.quality.reference for row in table if row.quality]
    if references and max(references) > 1.001 * min(references):
        notes.append("the perplexities are not beside the same float weights and tokens")
    return notes


def _encode(bundle: Path | None, genai: Sequence[Path], text: str) -> list[int]:
    """The prompt's token ids, from the tokenizer.json of our bundle or else of a genai folder."""
    from tokenizers import Tokenizer

    given = [folder for folder in [bundle, *genai] if folder]
    for folder in given:
        found = sorted(folder.rglob("tokenizer.json"))
        if found:
            tokenizer = Tokenizer.from_file(str(found[0]))
            return [int(i) for i in tokenizer.encode(text, add_special_tokens=False).ids]
    where = f"there is none in {', '.join(map(str, given))}" if given else "give --bundle or --genai"
    raise UsageError(f"the prompt needs a tokenizer.json; {where}")


def _engines(options: argparse.Namespace) -> dict[str, tuple[str, Path, Path]]:
    """By the name of the row: engine, interpreter, model."""
    ours: dict[str, tuple[str, Path, Path]] = {}
    if OURS not in options.skip:
        ours[OURS] = ("outrider", Path(sys.executable), options.bundle)
    peers = {} if "llama.cpp" in options.skip else {"llama.cpp": ("llama.cpp", options.gguf)}
    peers |= {f"genai {name}": ("genai", folder) for name, folder in named(options.genai).items()}
    if not peers:
        return ours
    python = installed_python(options.peers)
    return ours | {name: (engine, python, model) for name, (engine, model) in peers.items()}


def _workers(options: argparse.Namespace, engines: Mapping[str, tuple[str, Path, Path]]) -> dict[str, Worker]:
    env = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if options.huge_pages else {}
    workers: dict[str, Worker] = {}
    try:
        for name, (engine, interpreter, model) in engines.items():
            workers[name] = Worker(engine, interpreter, model, options.threads, env)
    except BaseException:
        for worker in workers.values():
            worker.close()
        raise
    return workers


def _measure_unknown(options: argparse.Namespace, engines: Mapping[str, tuple[str, Path, Path]]) -> None:
    models = [model for name, (_, _, model) in engines.items() if name != OURS and known(model) is None]
    if models and options.gguf is None:
        raise UsageError("--perplexity needs the --gguf that the models were made from")
    if models:
        measure_models(options.gguf, models, installed_python(options.peers), options.threads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-q4_1", help="catalog name, for what is not given")
    parser.add_argument("--bundle", type=Path, help="our bundle (default: exported from the GGUF file)")
    parser.add_argument(
        "--export-options", type=shlex.split, default=[], help="for that export, as '--precision int4 ...'"
    )
    parser.add_argument("--gguf", type=gguf_file, help="the GGUF file (default: fetched)")
    parser.add_argument("--genai", type=genai_folder, nargs="*", help="made by `benchmarks.peers build`")
    parser.add_argument(
        "--genai-recipes", type=recipe_argument, nargs="*", default=RECIPES, help="else these are built"
    )
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for all of these")
    parser.add_argument("--peers", type=Path, default=PEERS, help="the peers' virtual environment")
    parser.add_argument("--skip", nargs="*", default=[], choices=[OURS, "llama.cpp", "genai"])
    parser.add_argument("--perplexity", action="store_true", help="first measure those that are not known")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=at_least(2), default=128)
    parser.add_argument("--repeats", type=at_least(1), default=7)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between engines")
    parser.add_argument("--huge-pages", action="store_true", help="glibc's huge pages, for every engine")
    parser.add_argument("--json", type=new_file, help="also write everything measured to this file")
    return parser


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; what cannot be measured is refused before anything is fetched or built."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if "genai" in options.skip:
        options.genai = []
    genai = options.genai_recipes if options.genai is None else options.genai
    if {OURS, "llama.cpp"} <= set(options.skip) and not genai:
        parser.error("no engine is left to measure; skip less, or give --genai")
    if not options.pause >= 0:
        parser.error(f"--pause {options.pause} is no time to wait")
    if options.bundle:
        read_manifest(options.bundle)
    return options


def _prepare(options: argparse.Namespace) -> None:
    """Fetch, export and build what was not given and is not there yet."""
    export = options.bundle is None and OURS not in options.skip
    recipes = options.genai_recipes if options.genai is None else []
    folder = options.work / (options.gguf.stem if options.gguf else options.model)
    folder.mkdir(parents=True, exist_ok=True)
    if options.gguf is None and (export or recipes or "llama.cpp" not in options.skip):
        from outrider.export.fetch import fetch

        options.gguf = fetch(options.model)
    if export:
        options.bundle = folder / "bundle"
        if not (options.bundle / "manifest.json").exists():
            command = [sys.executable, "-m", "outrider", "export", "--model", str(options.gguf)]
            command += ["-o", str(options.bundle), *options.export_options]
            subprocess.run(command, check=True, stdout=sys.stderr)
    if recipes:
        options.genai = build_recipes(options.gguf, folder / "genai", recipes, install(options.peers))
    options.genai = options.genai or []


@told
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit code 1 when the rows are not comparable."""
    options = _parsed(arguments)
    _prepare(options)
    engines = _engines(options)
    ids = _encode(options.bundle, options.genai, options.prompt)
    if options.perplexity:
        _measure_unknown(options, engines)
    quality = {name: known(model) for name, (_, _, model) in engines.items()}
    before = machine()
    workers = _workers(options, engines)
    try:
        request = {"tokens": ids, "max_tokens": options.max_tokens}
        answers = measure(workers, request, options.repeats, options.pause)
        table = rows(answers, {name: worker.load_s for name, worker in workers.items()}, quality)
    finally:
        for worker in workers.values():
            worker.close()
    notes = complaints(table)
    print(format_table(table))
    print(f"\n{describe(before)}; {options.threads} threads each; median [interval] of {options.repeats}")
    print("".join(f"note: {note}\n" for note in notes), end="")
    if options.json:
        record = {"machine": before, "rows": [asdict(row) for row in table], "samples": answers}
        options.json.write_text(json.dumps({**record, "notes": notes}, indent=1))
    return 1 if notes else 0


if __name__ == "__main__":
    sys.exit(main())
