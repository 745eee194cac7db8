"""Bench rows: every figure paired with the plain run of the same prompt, and prompt files of both shapes."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outrider
from outrider.errors import ContextError, UsageError
from outrider.runtime import bench as module
from outrider.runtime.bench import (
    BenchRow,
    Prompt,
    Setting,
    bench,
    bench_prefill,
    default_prompts,
    format_rows,
    load_prompts,
)
from outrider.runtime.stats import Stats

REQUIRED = {
    *("test", "category", "drafter", "k", "n", "acceptance", "tokens_per_round", "tokens_per_s"),
    *("tokens_per_s_sd", "speedup", "energy_j_per_token"),
}
PROMPTS = [
    Prompt("chat", ("Say it again and again.",)),
    Prompt("raw", ("the quick brown fox jumps over the quick brown",), raw=True),
]


@pytest.fixture(scope="module")
def rows(float_bundle: Path) -> list[BenchRow]:
    """A real run: a draft equal to its target, and lookup."""
    settings = [Setting("model", 3), Setting("lookup", 2), Setting("lookup", "auto")]
    with outrider.load(float_bundle, threads=1) as pipeline:
        return bench(pipeline, PROMPTS, settings, max_tokens=24, repeats=2)


def row(rows: list[BenchRow], category: str, drafter: str | None, k: str) -> BenchRow:
    (found,) = [r for r in rows if (r.category, r.drafter, r.k) == (category, drafter, k)]
    return found


def test_there_is_a_row_for_every_setting_category_and_for_all(rows: list[BenchRow]) -> None:
    settings = [(None, "0"), ("model", "3"), ("lookup", "2"), ("lookup", "auto")]
    expected = [(category, *setting) for category in ("chat", "raw", "all") for setting in settings]
    assert [(r.category, r.drafter, r.k) for r in rows] == expected
    assert [r.test for r in rows[:2]] == ["tg plain", "tg spec"]
    assert [r.n for r in rows] == [2] * 8 + [4] * 4


def test_figures_of_a_real_run_are_those_of_decoding(rows: list[BenchRow]) -> None:
    plain, model = row(rows, "raw", None, "0"), row(rows, "raw", "model", "3")
    assert (plain.speedup, plain.acceptance, plain.tokens_per_round) == (1.0, None, 1.0)
    assert plain.identical_text is None
    assert model.acceptance == 1.0
    assert model.tokens_per_round is not None
    assert 1.5 < model.tokens_per_round <= 4
    for one in rows:
        assert one.tokens_per_s > 0
        assert one.speedup is not None
        assert one.speedup > 0
        assert one.energy_j_per_token is None
        assert one.drafter is None or one.identical_text is True


def fake_run(
    rates: dict[Any, list[float | None]], texts: dict[Any, tuple[int, ...]], calls: list[Any]
) -> Any:
    """In place of a decode: the next rate of the setting (None: ended in its first round)."""

    def run(pipeline: Any, prompt: Prompt, setting: Setting, *_: Any) -> Any:
        calls.append((prompt.category, setting.label))
        rate = rates[setting.label].pop(0)
        tokens = texts.get(setting.label, (1,) * 11)
        stats = Stats(output_tokens=11, first_tokens=1, rounds=5, evaluated=8, accepted=6)
        stats.decode_s = 10 / rate if rate else 0.0
        return SimpleNamespace(stats=stats, tokens=tokens)

    return run


def measure(monkeypatch: pytest.MonkeyPatch, rates: dict[Any, list[float | None]], **given: Any) -> Any:
    calls: list[Any] = []
    monkeypatch.setattr(module, "_run", fake_run(rates, given.pop("texts", {}), calls))
    settings = [Setting(*label) for label in given.pop("settings", [("model", 2)])]
    found = bench(SimpleNamespace(), given.pop("prompts", PROMPTS[:1]), settings, **given)  # type: ignore[arg-type]
    return found, calls


def test_a_speedup_is_the_median_of_paired_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine slows down in between: means would say 1.13, the pairs say 2."""
    rates: dict[Any, list[float | None]] = {"plain": [100, 10, 10], "model k=2": [100, 20, 25]}
    (plain, model), _ = measure(monkeypatch, rates, repeats=3)
    assert model.speedup == pytest.approx(2.0)
    assert model.tokens_per_s == pytest.approx(statistics.fmean([100, 20, 25]))
    assert model.tokens_per_s_sd == pytest.approx(statistics.stdev([100, 20, 25]))
    assert model.acceptance == 0.75
    assert plain.speedup == 1.0


def test_settings_are_interleaved_and_their_order_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[Any, list[float | None]] = {name: [10.0] * 2 for name in ("plain", "model k=2", "lookup k=4")}
    _, calls = measure(monkeypatch, rates, settings=[("model", 2), ("lookup", 4)], repeats=2)
    names = [name for _, name in calls]
    assert names == ["plain", "model k=2", "lookup k=4", "plain", "lookup k=4", "model k=2"]


def test_a_single_sample_has_no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[Any, list[float | None]] = {"plain": [10.0], "model k=2": [20.0]}
    found, _ = measure(monkeypatch, rates)
    assert [row.tokens_per_s_sd for row in found] == [None, None]
    assert "±" not in format_rows(found, "md")
    assert json.loads(format_rows(found, "json"))[0]["tokens_per_s_sd"] is None
    rates = {"plain": [10.0, 10.0], "model k=2": [20.0, 20.0]}
    found, _ = measure(monkeypatch, rates, repeats=2)
    assert "| 20.0 ± 0.0 |" in format_rows(found, "md")


def test_a_text_that_differs_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[Any, list[float | None]] = {"plain": [10.0], "model k=2": [10.0]}
    found, _ = measure(monkeypatch, rates, texts={"model k=2": (1, 2)})
    assert found[1].identical_text is False
    assert format_rows(found, "md").splitlines()[-1].endswith("| NO        |")


def test_an_answer_too_short_to_time_makes_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one setting has no rate in any category; its text is compared all the same."""
    rates: dict[Any, list[float | None]] = {"plain": [10.0, 10.0], "model k=2": [None, None]}
    found, _ = measure(monkeypatch, rates, prompts=PROMPTS)
    assert [(r.category, r.drafter) for r in found] == [("chat", None), ("raw", None), ("all", None)]
    rates = {"plain": [10.0, 10.0], "model k=2": [None, 5.0]}
    found, _ = measure(monkeypatch, rates, repeats=2, texts={"model k=2": (1, 2)})
    assert (found[1].n, found[1].speedup, found[1].identical_text) == (1, 0.5, False)


def spoken(pipeline: Any) -> list[list[str]]:
    """What every chat from now on is asked, message by message."""
    heard: list[list[str]] = []
    original = pipeline.chat

    def chat(messages: Any, **options: Any) -> Any:
        heard.append([message["content"] for message in messages])
        return original(messages, **options)

    pipeline.chat = chat
    return heard


def test_turns_are_a_conversation_with_the_model_s_own_answers(float_bundle: Path) -> None:
    prompt = Prompt("two", ("Say it.", "And again."))
    with outrider.load(float_bundle, threads=1) as pipeline:
        first = pipeline.chat([{"role": "user", "content": "Say it."}], k=0, max_tokens=12)
        heard = spoken(pipeline)
        rows = bench(pipeline, [prompt], [Setting("model", 3)], max_tokens=12)
    conversation = [["Say it."], ["Say it.", first.text, "And again."]]
    assert heard == conversation * 2
    assert rows[1].identical_text is True
    assert rows[1].acceptance == 1.0
    assert rows[0].tokens_per_round == 1.0


def test_every_setting_sees_the_plain_run_s_answers(float_bundle: Path) -> None:
    """Also where its own answer differs: figures are paired over the same prompts."""
    prompt = Prompt("two", ("Say it.", "And again."))
    with outrider.load(float_bundle, threads=1) as pipeline:
        heard = spoken(pipeline)
        plain = module.Answers(("what plain said",), (1, 2), Stats())
        answers = module._run(pipeline, prompt, Setting("lookup", 2), 8, None, plain)
    assert heard[1] == ["Say it.", "what plain said", "And again."]
    assert len(answers.texts) == 2
    assert answers.stats.output_tokens == len(answers.tokens)


def test_without_a_template_the_turns_and_answers_are_one_text(float_bundle: Path) -> None:
    prompts: list[str] = []
    with outrider.load(float_bundle, threads=1) as pipeline:
        pipeline.template = None
        original = pipeline.generate

        def generate(text: Any, **options: Any) -> Any:
            prompts.append(text)
            return original(text, **options)

        pipeline.generate = generate  # type: ignore[method-assign]
        answers = module._run(pipeline, Prompt("two", ("One", "Two")), Setting(None, 0), 4, None)
    assert prompts == ["One", f"One{answers.texts[0]}\n\nTwo"]


def test_a_later_turn_that_does_not_fit_is_left_out_and_logged(
    float_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with outrider.load(float_bundle, threads=1) as pipeline:
        answers = module._run(pipeline, Prompt("long", ("Hi.", "x " * 400)), Setting(None, 0), 8, None)
        with pytest.raises(ContextError):
            module._run(pipeline, Prompt("long", ("x " * 400,)), Setting(None, 0), 8, None)
    assert len(answers.texts) == 1
    assert "long: turns from 2 on are left out" in caplog.text


def test_progress_counts_prompts_and_repeats(float_bundle: Path) -> None:
    told: list[tuple[int, int]] = []
    with outrider.load(float_bundle, threads=1) as pipeline:
        bench(pipeline, PROMPTS, [], max_tokens=4, repeats=2, progress=lambda *done: told.append(done))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("tokens", [5, 200])
def test_prefill_is_measured_on_a_prompt_of_that_many_tokens(float_bundle: Path, tokens: int) -> None:
    with outrider.load(float_bundle, threads=1) as pipeline:
        forwards: list[int] = []
        original = pipeline.generate

        def generate(ids: Any, **options: Any) -> Any:
            result = original(ids, **options)
            forwards.append(result.stats.prompt_tokens - result.stats.reused_tokens)
            return result

        pipeline.generate = generate  # type: ignore[method-assign]
        found = bench_prefill(pipeline, tokens, repeats=2)
    assert forwards == [tokens] * 3
    assert (found.test, found.n, found.drafter) == (f"pp{tokens}", 2, None)
    assert found.tokens_per_s > 0


def test_a_bundle_without_a_chat_template_continues_the_text(float_bundle: Path) -> None:
    with outrider.load(float_bundle, threads=1) as pipeline:
        pipeline.template = None
        found = bench(pipeline, PROMPTS[:1], [Setting("lookup", 2)], max_tokens=8)
    assert len(found) == 2


def test_both_shapes_of_prompt_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    lines = [
        {"category": "writing", "turns": ["First.", "Second."], "question_id": 81},
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    assert load_prompts(path) == [
        Prompt("writing", ("First.", "Second.")),
        Prompt("mixed", ("def f():\n",), raw=True),
    ]


def test_the_repository_s_prompt_files_are_read() -> None:
    folder = Path(__file__).parent.parent / "benchmarks" / "data"
    assert len(load_prompts(folder / "spec_bench_dev.jsonl")) == 74
    assert len({p.category for p in load_prompts(folder / "spec_bench_dev.jsonl", 1)}) == 13
    assert all(prompt.raw for prompt in load_prompts(folder / "humaneval_dev.jsonl"))


def test_a_limit_keeps_the_first_of_each_category(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [{"category": c, "turns": [f"{c}{i}"]} for i in range(3) for c in "ab"]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [prompt.turns[0] for prompt in load_prompts(path, 2)] == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '"text"',
        "{}",
        '{"turns": "one text"}',
        '{"turns": []}',
        '{"turns": [1]}',
        '{"prompt": null}',
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(UsageError, match=r"p\.jsonl:3: not a JSON object with 'turns'"):
        load_prompts(path)


def test_a_prompt_file_that_is_missing_empty_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the prompt file"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="holds no prompts"):
        load_prompts(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read the prompt file"):
        load_prompts(tmp_path / "binary")


def test_json_rows_have_the_promised_fields(rows: list[BenchRow]) -> None:
    records = json.loads(format_rows(rows, "json"))
    assert len(records) == len(rows)
    for record in records:
        assert set(record) >= REQUIRED
        assert record["energy_j_per_token"] is None


def test_csv_and_markdown_hold_the_same_rows(rows: list[BenchRow]) -> None:
    records = list(csv.DictReader(io.StringIO(format_rows(rows, "csv"))))
    assert set(records[0]) >= REQUIRED
    assert [record["k"] for record in records] == [r.k for r in rows]
    assert float(records[0]["tokens_per_s"]) == rows[0].tokens_per_s
    table = format_rows(rows, "md").splitlines()
    assert len(table) == len(rows) + 2
    assert len({line.count("|") for line in table}) == 1
    assert len({len(line) for line in table}) == 1
    cells = [cell.strip() for cell in table[3].split("|")[1:-1]]
    assert cells[:6] == ["tg spec", "chat", "model", "3", "auto", "2"]
    assert cells[-1] == "yes"


def test_default_prompts_are_of_four_kinds() -> None:
    assert [prompt.category for prompt in default_prompts()] == ["edit", "summary", "explain", "code"]
