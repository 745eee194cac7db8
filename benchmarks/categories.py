"""Plain decoding against every fixed k and `--k auto`, per category of prompts, on a bundle.

    python -m benchmarks.categories BUNDLE --per-category 3 --max-tokens 128

Every prompt (the first turn of it, as a chat) runs under every setting before the next one starts, in an
order that rotates from prompt to prompt. The prompt's KV rows are kept between the settings, which changes
nothing that is counted: speeds begin after the first round. The drafters forget everything between runs,
and the planner of `auto` starts from what the bundle or `outrider doctor --save` has measured on this machine, if
anything, and sees only its own rounds. Speed-ups are of pooled seconds per token within a
category; the interval beside `auto` is of the median over its prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import outrider
from benchmarks.summary import describe, machine, markdown_table, median_interval
from outrider.runtime.bench import Prompt, Setting, load_prompts
from outrider.runtime.pipeline import Pipeline
from outrider.runtime.planner import Planner

__all__ = ["Sample", "run", "summarize"]

DATA = Path(__file__).with_name("data")
PLAIN = Setting(None, 0)


@dataclass(frozen=True)
class Sample:
    """One prompt decoded under one setting."""

    category: str
    prompt: int
    setting: str
    seconds: float  # after the first round
    tokens: int  # after the first round
    rounds: int
    evaluated: int
    accepted: int
    near_ties: int
    same_text: bool  # as the plain run of this prompt


def run(
    pipeline: Pipeline, prompts: Sequence[Prompt], settings: Sequence[Setting], max_tokens: int
) -> Iterator[Sample]:
    """Decode every prompt under every setting; yields samples as they come, those of a prompt together."""
    known = pipeline.engine.planner.to_dict()
    planners = {True: Planner(known), False: Planner(known)}
    for index, prompt in enumerate(prompts):
        tokens = pipeline.chat_tokens([{"role": "user", "content": prompt.turns[0]}])
        pipeline.reset()
        pipeline.generate(tokens, max_tokens=1, k=0)
        turn = index % len(settings)
        results = {}
        for setting in [*settings[turn:], *settings[:turn]]:
            for drafter in pipeline.engine.drafters.values():
                drafter.reset()
            pipeline.engine.planner = planners[setting.k == "auto"]
            results[setting] = pipeline.generate(
                tokens, max_tokens=max_tokens, k=setting.k, drafter=setting.drafter
            )
        for setting in settings:
            stats = results[setting].stats
            yield Sample(
                category=prompt.category,
                prompt=index,
                setting=setting.label,
                seconds=stats.decode_s,
                tokens=stats.output_tokens - stats.first_tokens,
                rounds=stats.rounds,
                evaluated=stats.evaluated,
                accepted=stats.accepted,
                near_ties=stats.near_ties,
                same_text=results[setting].tokens == results[PLAIN].tokens,
            )


def summarize(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One record per category and setting, `all` (the mean over the categories) last."""
    cells: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        cells.setdefault((sample.category, sample.setting), []).append(sample)
    records = [
        _record(name, setting, cell, cells[name, PLAIN.label]) for (name, setting), cell in cells.items()
    ]
    labels = dict.fromkeys(record["setting"] for record in records)
    for label in labels:
        mine = [record for record in records if record["setting"] == label]
        speedups = [record["speedup"] for record in mine if record["speedup"] is not None]
        records.append(
            {
                "category": "all",
                "setting": label,
                "prompts": sum(record["prompts"] for record in mine),
                "speedup": statistics.fmean(speedups) if speedups else None,
                "same_text": all(record["same_text"] for record in mine),
                "near_ties": sum(record["near_ties"] for record in mine),
            }
        )
    return records


def _record(category: str, setting: str, cell: list[Sample], plain: list[Sample]) -> dict[str, Any]:
    pairs = [(a, b) for a, b in zip(cell, plain, strict=True) if a.tokens and b.tokens]
    ratios = [(b.seconds / b.tokens) / (a.seconds / a.tokens) for a, b in pairs]
    evaluated = sum(sample.evaluated for sample in cell)
    mine, theirs = _per_token(a for a, _ in pairs), _per_token(b for _, b in pairs)
    return {
        "category": category,
        "setting": setting,
        "prompts": len(cell),
        "speedup": theirs / mine if pairs else None,
        "median": asdict(median_interval(ratios)) if ratios else None,
        "ms_per_token": 1e3 * mine if pairs else None,
        "acceptance": sum(sample.accepted for sample in cell) / evaluated if evaluated else None,
        "same_text": all(sample.same_text for sample in cell),
        "near_ties": sum(sample.near_ties for sample in cell),
    }


def _per_token(samples: Iterable[Sample]) -> float:
    kept = list(samples)
    return sum(sample.seconds for sample in kept) / max(1, sum(sample.tokens for sample in kept))


def format_summary(records: Sequence[dict[str, Any]]) -> str:
    """The speed-ups as Markdown, one line a category, with auto against the best fixed k."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        table.setdefault(record["category"], {})[record["setting"]] = record
    labels = [label for label in table["all"] if label != PLAIN.label]
    fixed = [PLAIN.label, *(label for label in labels if not label.endswith("auto"))]
    head = [
        "category",
        "n",
        "plain ms/tok",
        *labels,
        "auto, median",
        "best fixed",
        "auto / best",
        "same text",
    ]
    return markdown_table(head, [_line(name, row, labels, fixed) for name, row in table.items()])


def _line(name: str, row: dict[str, dict[str, Any]], labels: list[str], fixed: list[str]) -> list[str]:
    plain = row[PLAIN.label].get("ms_per_token")
    best = max(fixed, key=lambda label: row[label]["speedup"] or 0.0)
    auto = next((row[label] for label in labels if label.endswith("auto")), None)
    median = auto.get("median") if auto else None
    ratio = (
        auto["speedup"] / row[best]["speedup"] if auto and auto["speedup"] and row[best]["speedup"] else None
    )
    return [
        name,
        str(row[PLAIN.label]["prompts"]),
        "-" if plain is None else f"{plain:.1f}",
        *["-" if row[label]["speedup"] is None else f"{row[label]['speedup']:.2f}" for label in labels],
        "-" if median is None else f"{median['value']:.2f} [{median['low']:.2f}, {median['high']:.2f}]",
        best,
        "-" if ratio is None else f"{ratio:.2f}",
        _same_text([row[label] for label in labels]),
    ]


def _same_text(records: Sequence[dict[str, Any]]) -> str:
    if all(record["same_text"] for record in records):
        return "yes"
    ties = sum(record["near_ties"] for record in records if not record["same_text"])
    return f"but for near-ties ({ties})" if ties else "NO"


def settings_of(pipeline: Pipeline, drafters: Sequence[str], ks: Sequence[int]) -> list[Setting]:
    """Plain, every drafter at every fixed k, then auto over these drafters."""
    chosen = list(drafters) or list(pipeline.drafters)
    unknown = [name for name in chosen if name not in pipeline.drafters]
    if unknown:
        raise SystemExit(f"this bundle has no drafter {unknown[0]!r}; it has {', '.join(pipeline.drafters)}")
    if len(chosen) == len(pipeline.drafters):
        automatic = [Setting("auto", "auto")]
    else:
        automatic = [Setting(name, "auto") for name in chosen[:1]]
    return [PLAIN, *(Setting(name, k) for name in chosen for k in ks), *automatic]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.categories",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path)
    files = [DATA / "spec_bench_dev.jsonl", DATA / "edit_dev.jsonl"]
    parser.add_argument("--prompts", type=Path, nargs="+", default=files)
    parser.add_argument("--category", nargs="*", help="only these")
    parser.add_argument("--per-category", type=int, help="the first prompts of each (default: all)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--k", type=int, nargs="*", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument(
        "--drafter", nargs="*", default=[], help="model or lookup (default: all of the bundle)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=Path, help="write every sample to this file as it comes")
    parser.add_argument("--json", type=Path, help="also write the summary to this file")
    return parser


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    prompts = [p for path in options.prompts for p in load_prompts(path, options.per_category)]
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    missing = [name for name in options.category or [] if name not in known]
    if missing:
        raise SystemExit(f"no category {missing[0]!r}; known: {', '.join(known)}")
    return [prompt for prompt in prompts if not options.category or prompt.category in options.category]


def _collect(samples: Iterable[Sample], total: int, log: IO[str] | None) -> list[Sample]:
    kept = []
    for sample in samples:
        kept.append(sample)
        if log:
            log.write(json.dumps(asdict(sample)) + "\n")
            log.flush()
        print(f"\r{len(kept)}/{total} {sample.category:<20}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit code 1 when a text differs from the plain one without a near-tie."""
    options = _parser().parse_args(arguments)
    prompts, before = _prompts(options), machine()
    with outrider.load(
        options.bundle, threads=options.threads, draft=options.drafter != ["lookup"]
    ) as pipeline:
        settings = settings_of(pipeline, options.drafter, options.k)
        log = options.samples.open("w") if options.samples else None
        total = len(prompts) * len(settings)
        samples = _collect(run(pipeline, prompts, settings, options.max_tokens), total, log)
    records = summarize(samples)
    print(format_summary(records))
    print(f"\n{describe(before)}; {options.threads} threads; {options.max_tokens} tokens at most")
    if options.json:
        options.json.write_text(json.dumps({"machine": before, "rows": records}, indent=1))
    return 1 if any(not sample.same_text and not sample.near_ties for sample in samples) else 0


if __name__ == "__main__":
    sys.exit(main())
