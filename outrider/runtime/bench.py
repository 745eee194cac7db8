"""Measure a pipeline as llama-bench users expect, with the plain row of the same run beside every other.

Prompts run one after another; for each, every setting is measured in turn (paired and interleaved), so that a
machine that slows down slows all of them. Speed-ups are medians over prompts of the ratio to the plain run.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import ContextError, UsageError
from outrider.records import parsed
from outrider.runtime.stats import Stats

if TYPE_CHECKING:
    from outrider.contracts import Sampling
    from outrider.runtime.pipeline import Pipeline, Result
    from outrider.runtime.request import Drafting

__all__ = [
    "BenchRow",
    "Prompt",
    "Setting",
    "bench",
    "bench_prefill",
    "default_prompts",
    "format_rows",
    "load_prompts",
]

_log = logging.getLogger(__name__)

FIELDS = ("fuel", "toll", "repair", "wash", "tyre", "parking", "insurance", "tax")


@dataclass(frozen=True)
class Prompt:
    """One benchmark prompt: the user's turns, or a raw text to continue."""

    category: str
    turns: tuple[str, ...]
    raw: bool = False  # continue the text as it is, without a chat template


@dataclass(frozen=True)
class BenchRow:
    """One line of the table; speeds are decode tokens per second, `None` = not measured."""

    test: str
    category: str
    drafter: str | None
    k: str
    n: int
    acceptance: float | None
    tokens_per_round: float | None
    tokens_per_s: float
    tokens_per_s_sd: float | None  # None: of a single sample there is none
    speedup: float | None
    energy_j_per_token: float | None = None
    identical_text: bool | None = None  # the same tokens as the plain run of the same prompts
    near_ties: int = 0
    drafting: str | None = None
    overlapped: float | None = None  # the share of rounds that were


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read JSON lines of `{"turns": [...]}` or `{"prompt": ...}`; `limit` keeps that many a category."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompt file {path}: {error}") from error
    prompts = [_parse(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UsageError(f"{path} holds no prompts; expected JSON lines with 'turns' or 'prompt'")
    return prompts if limit is None else _first_of_each(prompts, limit)


def default_prompts() -> list[Prompt]:
    """Four short instructions: one each that mostly repeats its input, summarizes, explains, and programs."""
    listing = "\n".join(f"    {name}_total = sum(row['{name}'] for row in rows)" for name in FIELDS)
    passage = " ".join(f"In {year} the harbour handled {year - 1500} ships." for year in range(1990, 2002))
    return [
        Prompt("edit", (f"Rename the variable rows to records and repeat the whole program:\n{listing}",)),
        Prompt("summary", (f"Summarize this text in two sentences: {passage}",)),
        Prompt("explain", ("Explain how a sundial works.",)),
        Prompt("code", ("Write a Python function that checks whether a string is a palindrome.",)),
    ]


def bench_prefill(pipeline: Pipeline, tokens: int, repeats: int) -> BenchRow:
    """Prompt processing: tokens per second of a prompt of this many tokens, from an empty cache."""
    ids = (pipeline.tokenizer.encode(default_prompts()[0].turns[0]) * (tokens // 16 + 1))[:tokens]
    rates = []
    for _ in range(repeats + 1):
        pipeline.reset()
        rates.append(pipeline.generate(ids, max_tokens=1, k=0).stats.prompt_tokens_per_s or 0.0)
    rates = rates[1:]  # the first warms up
    spread = statistics.stdev(rates) if len(rates) > 1 else None
    return BenchRow(
        f"pp{tokens}", "prompt", None, "0", repeats, None, None, statistics.fmean(rates), spread, None
    )


def _parse(line: str, path: Path, number: int) -> Prompt:
    try:
        record = parsed(json.loads, line)
        category = str(record.get("category", path.stem))
        raw = "turns" not in record
        turns = [record["prompt"]] if raw else record["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"{turns!r:.40} is not text")
        return Prompt(category, tuple(turns), raw)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{path}:{number}: not a JSON object with 'turns' (a list of texts) or 'prompt' (a text): {error}"
        ) from error


def _first_of_each(prompts: Iterable[Prompt], limit: int) -> list[Prompt]:
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if seen[prompt.category] <= limit:
            kept.append(prompt)
    return kept


@dataclass(frozen=True)
class Setting:
    """A way to decode: a drafter's name (None = plain), k, and when it drafts."""

    drafter: str | None
    k: int | Literal["auto"]
    drafting: Drafting = "auto"

    @property
    def label(self) -> str:
        """The name of the row."""
        mode = "" if self.drafting == "auto" else f" {self.drafting}"
        return "plain" if self.drafter is None else f"{self.drafter} k={self.k}{mode}"


@dataclass
class _Samples:
    rates: list[float]
    ratios: list[float]
    evaluated: int = 0
    accepted: int = 0
    rounds: int = 0
    tokens: int = 0
    near_ties: int = 0
    overlapped: int = 0
    identical: bool = True


def bench(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    *,
    max_tokens: int = 128,
    repeats: int = 1,
    sampling: Sampling | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[BenchRow]:
    """Decode every prompt under every setting, plain first, and return one row a setting and category.

    The turns of a prompt are a conversation, as in Spec-Bench (Xia et al., arXiv 2401.07851); its rate is that
    of all its answers together.
    """
    plan = [Setting(None, 0), *(s for s in settings if s.drafter is not None)]
    samples: dict[tuple[str, Setting], _Samples] = {}
    for done, (prompt, repeat) in enumerate([(p, r) for p in prompts for r in range(repeats)]):
        plain: Answers | None = None
        order = plan if repeat % 2 == 0 else [plan[0], *reversed(plan[1:])]
        for setting in order:
            answers = _run(pipeline, prompt, setting, max_tokens, sampling, plain)
            plain = plain or answers
            cell = samples.setdefault((prompt.category, setting), _Samples([], []))
            _record(cell, answers, plain)
        if progress:
            progress(done + 1, len(prompts) * repeats)
    return _rows(samples, plan)


@dataclass(frozen=True)
class Answers:
    """What one run made of a prompt: the answer to every turn, and the turns' counters added up."""

    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    stats: Stats


def _run(
    pipeline: Pipeline,
    prompt: Prompt,
    setting: Setting,
    max_tokens: int,
    sampling: Sampling | None,
    plain: Answers | None = None,
) -> Answers:
    """Answer the turns one after another as a conversation, the KV cache kept between them.

    The history holds the answers of the `plain` run, so that every setting sees the same prompts even where a
    near-tie made its own answer another one. A later turn that does not fit the context is left out.
    """
    pipeline.reset()
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "sampling": sampling,
        "k": setting.k,
        "drafter": setting.drafter or "auto",
        "drafting": setting.drafting,
    }
    results: list[Result] = []
    for turn in range(len(prompt.turns)):
        said = plain.texts if plain else [result.text for result in results]
        try:
            results.append(_answer(pipeline, prompt, said[:turn], options))
        except ContextError as error:
            if turn == 0:
                raise
            _log.warning("%s: turns from %d on are left out: %s", prompt.category, turn + 1, error)
            break
    tokens = tuple(token for result in results for token in result.tokens)
    return Answers(tuple(result.text for result in results), tokens, _added([r.stats for r in results]))


def _answer(pipeline: Pipeline, prompt: Prompt, said: Sequence[str], options: Mapping[str, Any]) -> Result:
    """The answer to the turn that follows what was `said`; without a template the texts are joined."""
    turns = prompt.turns[: len(said) + 1]
    if prompt.raw or pipeline.template is None:
        spoken = [f"{turn}{answer}" for turn, answer in zip(turns, said, strict=False)]
        return pipeline.generate("\n\n".join([*spoken, turns[-1]]), **options)
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(said, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return pipeline.chat(messages, **options)


def _added(parts: Sequence[Stats]) -> Stats:
    """The counters and seconds of several generations as those of one."""
    total = Stats()
    for name, start in vars(Stats()).items():
        if isinstance(start, int | float):
            setattr(total, name, sum(getattr(part, name) for part in parts))
    return total


def _record(cell: _Samples, answers: Answers, plain: Answers) -> None:
    stats = answers.stats
    cell.near_ties += stats.near_ties
    cell.identical &= list(answers.tokens) == list(plain.tokens)
    rate = stats.decode_tokens_per_s
    if rate is None:
        return
    cell.rates.append(rate)
    if plain.stats.decode_tokens_per_s:
        cell.ratios.append(rate / plain.stats.decode_tokens_per_s)
    cell.evaluated += stats.evaluated
    cell.accepted += stats.accepted
    cell.rounds += stats.rounds
    cell.overlapped += stats.overlapped_rounds
    cell.tokens += len(answers.tokens)


def _rows(samples: dict[tuple[str, Setting], _Samples], plan: Sequence[Setting]) -> list[BenchRow]:
    categories = list(dict.fromkeys(category for category, _ in samples))
    rows = [_row(c, s, samples[c, s]) for c in categories for s in plan if samples[c, s].rates]
    if len(categories) > 1:
        pools = {s: _pool([samples[c, s] for c in categories]) for s in plan}
        rows += [_row("all", setting, pool) for setting, pool in pools.items() if pool.rates]
    return rows


def _pool(cells: Sequence[_Samples]) -> _Samples:
    total = _Samples([], [])
    for cell in cells:
        total.rates += cell.rates
        total.ratios += cell.ratios
        total.identical &= cell.identical
        for name in ("evaluated", "accepted", "rounds", "tokens", "near_ties", "overlapped"):
            setattr(total, name, getattr(total, name) + getattr(cell, name))
    return total


def _row(category: str, setting: Setting, cell: _Samples) -> BenchRow:
    plain = setting.drafter is None
    return BenchRow(
        test="tg plain" if plain else "tg spec",
        category=category,
        drafter=setting.drafter,
        k=str(setting.k),
        n=len(cell.rates),
        acceptance=cell.accepted / cell.evaluated if cell.evaluated else None,
        tokens_per_round=cell.tokens / cell.rounds if cell.rounds else None,
        tokens_per_s=statistics.fmean(cell.rates),
        tokens_per_s_sd=statistics.stdev(cell.rates) if len(cell.rates) > 1 else None,
        speedup=1.0 if plain else statistics.median(cell.ratios) if cell.ratios else None,
        identical_text=None if plain else cell.identical,
        near_ties=cell.near_ties,
        drafting=None if plain else setting.drafting,
        overlapped=cell.overlapped / cell.rounds if cell.rounds and not plain else None,
    )


def format_rows(rows: Sequence[BenchRow], style: Literal["md", "csv", "json"]) -> str:
    """The rows as a Markdown table, CSV or JSON."""
    names = [f.name for f in fields(BenchRow)]
    records = [{name: getattr(row, name) for name in names} for row in rows]
    if style == "json":
        return json.dumps(records, indent=2)
    if style == "csv":
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return buffer.getvalue().rstrip("\n")
    return _markdown(rows)


def _markdown(rows: Sequence[BenchRow]) -> str:
    head = [
        "test",
        "category",
        "drafter",
        "k",
        "drafting",
        "n",
        "acceptance",
        "tok/round",
        "tok/s",
        "speed-up",
        "same text",
    ]
    body = [
        [
            row.test,
            row.category,
            row.drafter or "-",
            row.k,
            _drafting(row),
            str(row.n),
            "-" if row.acceptance is None else f"{row.acceptance:.2f}",
            "-" if row.tokens_per_round is None else f"{row.tokens_per_round:.2f}",
            _mean(row),
            "-" if row.speedup is None else f"{row.speedup:.2f}",
            _same_text(row),
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) + " |"
        for r in [head, *body]
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _mean(row: BenchRow) -> str:
    spread = "" if row.tokens_per_s_sd is None else f" ± {row.tokens_per_s_sd:.1f}"
    return f"{row.tokens_per_s:.1f}{spread}"


def _drafting(row: BenchRow) -> str:
    if row.drafting is None:
        return "-"
    return f"{row.drafting} ({row.overlapped:.0%} overlapped)" if row.overlapped else row.drafting


def _same_text(row: BenchRow) -> str:
    if row.identical_text is None:
        return "-"
    if row.identical_text:
        return "yes"
    return f"near-tie ({row.near_ties})" if row.near_ties else "NO"
