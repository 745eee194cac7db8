"""The command line: the library's results, one-line errors with exit codes, no traceback, quick help."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import outrider
from outrider.cli.generate import summary
from outrider.cli.root import COMMANDS, cli
from outrider.contracts import Reading
from outrider.manifest import verify
from outrider.power.telemetry import TelemetryWriter
from outrider.runtime.stats import Stats

FOX = "the quick brown fox jumps over"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
Run = Callable[..., tuple[int, str, str]]


def invoke(*words: str, **options: Any) -> Result:
    """The command inside this process, on click's runner."""
    return CliRunner().invoke(cli, list(words), prog_name="outrider", **options)


@contextmanager
def started(words: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Python as a process of its own, its output as text; it is gone afterwards, whatever happened."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen([sys.executable, *words], env=ENVIRONMENT, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def error_line(err: str) -> str:
    """The one line of an error that Outrider raised."""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("outrider: ")]
    return line


def test_help_lists_every_command_and_imports_no_library() -> None:
    code = (
        "import sys\nfrom outrider.cli import main\nsys.argv = ['outrider', '--help']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE)
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert (
        not {"numpy", "torch", "transformers", "onnx", "onnxruntime", "tokenizers", "jinja2", "tqdm"} & loaded
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does_in_a_whole_sentence(name: str) -> None:
    import click

    command = cli.get_command(click.Context(cli), name)
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    helps = {option.name: option.help or "" for option in options}
    assert not [name for name, text in helps.items() if not text[:1].isupper() or not text.endswith(".")]
    assert not [name for name, text in helps.items() if len(text.split()) < 4 and name != "as_json_text"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_without_a_model_library(name: str) -> None:
    code = (
        f"import sys\nfrom outrider.cli import main\nsys.argv = ['outrider', '{name}', '--help']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"Usage: outrider {name} ")
    loaded = {word.split(".")[0] for word in done.stderr.split()}
    assert not {"torch", "transformers", "onnx", "onnxruntime", "tokenizers"} & loaded


def test_the_version_is_the_package_s(run_main: Run) -> None:
    assert run_main("--version") == (0, f"outrider, version {outrider.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the prompt by --prompt or by --prompt-file"),
        (["-p", "x", "--prompt-file", os.devnull], "give the prompt by"),
        (["--prompt-file", "nowhere"], "--prompt-file: nowhere does not exist"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "x", "--k", "many"], "--k is 'many'; expected auto or a whole number"),
        (["-p", "x", "--k", "999"], "--k is 999; a round verifies at most 127 drafted tokens"),
        (["-p", "x", "--k", "²"], "k is '²'"),
        (["-p", "x", "--k", "-1"], "k is '-1'"),
        (["-p", "x", "--drafter", "oracle"], "oracle"),
        (["-p", "x", "--temp", "-1"], "--temp is -1.0; it must be finite and at least 0.0"),
        (["-p", "x", "--top-p", "0"], "--top-p is 0.0; it must be between 1e-09 and 1.0"),
        (["-p", "x", "--logprobs", "2"], "--logprobs are printed by --json only"),
        (["-p", "x", "--no-draft", "--drafter", "model"], "model"),
        (["-p", "x", "--target-provider", "Cuda"], "unknown execution provider 'Cuda'; known: "),
        (
            ["-p", "x", "--no-draft", "--draft-provider", "CPUExecutionProvider"],
            "--draft-provider was given, but --no-draft",
        ),
        (["-p", "x", "--power-cap", "-4"], "--power-cap is -4.0"),
        (["-p", "x", "--temp-limit", "7"], "--temp-limit is 7.0"),
        (["-p", "x", "--battery-floor", "101"], "--battery-floor is 101.0"),
        (["-p", "x", "--device", "toaster"], "toaster"),
        (
            ["-p", "x", "--no-governor", "--temp-limit", "70"],
            "--no-governor is given, but --temp-limit was given",
        ),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(
    run_main: Run,
    quantized_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main("generate", str(quantized_bundle), "--threads", "1", *words)
    assert (code, out) == (2, "")
    assert message in error_line(err)


def test_a_prompt_beyond_the_context_is_one_line(run_main: Run, quantized_bundle: Path) -> None:
    code, _, err = run_main("generate", str(quantized_bundle), "-p", "x " * 500, "--threads", "1")
    assert code == 1
    assert "256" in error_line(err)


@pytest.mark.parametrize(
    "options", [[], ["--k", "3", "--drafter", "model"], ["--k", "0"], ["--drafter", "lookup"]]
)
def test_generate_prints_the_text_of_the_library(quantized_bundle: Path, options: list[str]) -> None:
    with outrider.load(quantized_bundle, threads=1) as pipeline:
        expected = pipeline.generate(FOX, max_tokens=32, k=0).text
    words = ["generate", str(quantized_bundle), "-p", FOX, "-n", "32", "--threads", "1", *options]
    done = invoke(*words)
    assert done.exit_code == 0
    assert done.stdout == expected + "\n"
    assert re.match(r"\[\d+ tokens in \d+ rounds", done.stderr)


def test_sampling_options_reach_the_library(quantized_bundle: Path) -> None:
    sampling = outrider.Sampling(
        temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=5
    )
    with outrider.load(quantized_bundle, threads=1) as pipeline:
        expected = pipeline.generate(FOX, max_tokens=24, sampling=sampling, stop="e").text
        plain = pipeline.generate(FOX, max_tokens=24, stop="e").text
    flags = ["--temp", "0.7", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--seed", "5"]
    flags += ["--repetition-penalty", "1.2", "--stop", "e", "-n", "24", "--threads", "1"]
    done = invoke("generate", str(quantized_bundle), "-p", FOX, *flags)
    assert done.stdout == expected + "\n"
    assert expected != plain


@pytest.mark.parametrize("option", ["--trace", "--governor-log"])
def test_a_file_that_is_there_is_replaced_only_when_asked(
    run_main: Run, quantized_bundle: Path, tmp_path: Path, option: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("older")
    words = ["generate", str(quantized_bundle), "-p", FOX, "-n", "2", "--threads", "1", option, str(path)]
    code, out, err = run_main(*words)
    assert (code, out) == (2, "")
    assert "t.jsonl exists already; choose another name, or give --overwrite" in error_line(err)
    assert path.read_text() == "older"
    assert run_main(*words, "--overwrite")[0] == 0
    assert json.loads(path.read_text().splitlines()[0])["schema_version"] == 1


def test_every_answer_of_a_chat_has_a_trace_of_its_own(quantized_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "t-2.jsonl").write_text("older")
    words = ["chat", str(quantized_bundle), "-n", "2", "--threads", "1", "--trace", str(tmp_path / "t.jsonl")]
    assert invoke(*words, input="Hi\nAgain\nMore\n\n").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"t{n}.jsonl" for n in ("-2", "-3", "-4", "")]
    assert (tmp_path / "t-2.jsonl").read_text() == "older"


def test_generate_chat_and_files_and_standard_input(quantized_bundle: Path, tmp_path: Path) -> None:
    with outrider.load(quantized_bundle, threads=1) as pipeline:
        expected = pipeline.chat([{"role": "user", "content": FOX}], max_tokens=16).text
    (tmp_path / "prompt.txt").write_text(FOX, encoding="utf-8")
    words = ["generate", str(quantized_bundle), "--chat", "-n", "16", "--threads", "1"]
    assert invoke(*words, "--prompt-file", str(tmp_path / "prompt.txt")).stdout == expected + "\n"
    assert invoke(*words, "-p", "-", input=FOX).stdout == expected + "\n"


def test_generate_json_is_the_whole_result(quantized_bundle: Path) -> None:
    with outrider.load(quantized_bundle, threads=1) as pipeline:
        expected = pipeline.generate(FOX, max_tokens=12, logprobs=2)
    words = ["generate", str(quantized_bundle), "-p", FOX, "-n", "12", "--threads", "1", "--json"]
    record = json.loads(invoke(*words, "--logprobs", "2").stdout)
    assert record["text"] == expected.text
    assert record["tokens"] == list(expected.tokens)
    assert record["finish_reason"] == expected.finish_reason
    assert len(record["logprobs"]) == len(record["tokens"])
    assert len(record["logprobs"][0]["top"]) == 2
    assert record["stats"]["output_tokens"] == len(record["tokens"])
    assert json.loads(invoke(*words).stdout)["logprobs"] is None


def test_generate_under_recorded_heat_gives_the_same_text_and_a_decision_log(
    quantized_bundle: Path, tmp_path: Path
) -> None:
    with TelemetryWriter(tmp_path / "hot.jsonl") as writer:
        for i in range(100):
            writer([Reading("die", "temperature", 69.9, "die", "instant", 0.5 * i)])
    words = ["generate", str(quantized_bundle), "-p", FOX, "-n", "24", "--threads", "1"]
    heat = ["--telemetry", str(tmp_path / "hot.jsonl"), "--temp-limit", "70", "--objective", "energy"]
    done = invoke(*words, *heat, "--governor-log", str(tmp_path / "log.jsonl"))
    free = invoke(*words, "--no-governor")
    assert done.stdout == free.stdout
    assert re.search(r"(; paused \d+\.\d s to keep its limits)?; level (hot|critical)\]", done.stderr)
    assert "level" not in free.stderr
    header, first, *_ = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert (header["kind"], header["policy"]["objective"]) == ("governor", "energy")
    assert first["directive"]["level"] == "hot"


def test_generate_writes_a_trace(quantized_bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    words = ["generate", str(quantized_bundle), "-p", FOX, "-n", "8", "--threads", "1", "--trace", str(trace)]
    assert invoke(*words).exit_code == 0
    assert json.loads(trace.read_text().splitlines()[0])["kind"] == "decode"


def test_the_summary_warns_of_a_cap_that_no_pause_can_keep() -> None:
    _, warning = summary(Stats(rounds=1, level="nominal", flags=("power_cap=below_rest",))).splitlines()
    assert "warning: the power cap is below what the device draws at rest" in warning
    assert "warning" not in summary(Stats(rounds=1, flags=("limit=assumed",)))


@pytest.mark.parametrize(
    ("stats", "told"),
    [
        (Stats(rounds=1), "[0 tokens in 1 rounds]"),
        (Stats(rounds=1, level="nominal", paced_s=0.01), "[0 tokens in 1 rounds]"),
        (
            Stats(rounds=1, level="hot", paced_s=3.24),
            "[0 tokens in 1 rounds; paused 3.2 s to keep its limits; level hot]",
        ),
        (
            Stats(rounds=1, level="nominal", paced_s=3.24),
            "[0 tokens in 1 rounds; paused 3.2 s to keep its limits]",
        ),
    ],
)
def test_the_summary_tells_what_the_governor_did_when_it_did_something(stats: Stats, told: str) -> None:
    assert summary(stats) == told


def test_chat_answers_each_line_and_keeps_the_conversation(quantized_bundle: Path) -> None:
    with outrider.load(quantized_bundle, threads=1) as pipeline:
        messages = [{"role": "system", "content": "Be brief."}]
        answers = []
        for text in ("the fox", "the dog"):
            messages.append({"role": "user", "content": text})
            answers.append(pipeline.chat(messages, max_tokens=12).text)
            messages.append({"role": "assistant", "content": answers[-1]})
    words = ["chat", str(quantized_bundle), "--system", "Be brief.", "-n", "12", "--threads", "1"]
    for ending in ("\n", ""):
        done = invoke(*words, input="the fox\nthe dog\n" + ending)
        assert done.exit_code == 0
        assert done.stdout.count("> ") >= 3
        first, second = (done.stdout.find(answer) for answer in answers)
        assert 0 <= first < second


def test_check_prints_the_verdict(quantized_bundle: Path) -> None:
    done = invoke("check", str(quantized_bundle), "-n", "8", "--threads", "1")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "ok"
    assert "target: target/graph.onnx, int4, onnxruntime on cpu, inplace: executed as it is" in done.stdout


def test_bench_prints_a_table_csv_and_json(quantized_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"category": "c", "turns": ["the fox"]}\n{"prompt": "the dog"}\n'
    )
    words = ["bench", str(quantized_bundle), "--prompts", str(tmp_path / "prompts.jsonl"), "--threads", "1"]
    words += ["-n", "8", "-pp", "32", "-r", "2", "--k", "2,auto"]
    table = invoke(*words).stdout.splitlines()
    assert table[0].startswith("target: target/graph.onnx (inplace) by onnxruntime on CPUExecutionProvider")
    assert [line.split("|")[1].strip() for line in table[4:6]] == ["pp32", "tg plain"]
    records = json.loads(invoke(*words, "--json", "--drafter", "lookup").stdout)
    assert [(r["test"], r["category"], r["drafter"], r["k"]) for r in records[:4]] == [
        ("pp32", "prompt", None, "0"),
        ("tg plain", "c", None, "0"),
        ("tg spec", "c", "lookup", "2"),
        ("tg spec", "c", "lookup", "auto"),
    ]
    assert {r["category"] for r in records} == {"prompt", "c", "prompts", "all"}
    assert invoke(*words, "-o", "csv").stdout.startswith("test,category,drafter,k,n,")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-draft", "--drafter", "model"], "unknown drafter 'model'; this bundle has lookup"),
        (["--k", ""], "--k is ''; give at least one, such as 2 or auto"),
        (["--drafting", ","], "--drafting is ','; give at least one, such as auto"),
    ],
)
def test_bench_refuses_what_it_could_not_measure(
    run_main: Run, quantized_bundle: Path, words: list[str], message: str
) -> None:
    code, _, err = run_main("bench", str(quantized_bundle), "--threads", "1", *words)
    assert code == 2
    assert message in error_line(err)


def test_doctor_speaks_of_the_machine_and_of_a_bundle(quantized_bundle: Path) -> None:
    machine = invoke("doctor")
    assert machine.exit_code == 0
    assert "CPUExecutionProvider" in machine.stdout
    record = json.loads(invoke("doctor", str(quantized_bundle), "--threads", "1", "--json").stdout)
    assert {row["drafter"] for row in record["break_even"]} == {"lookup", "model"}
    assert record["costs"]["verify_s"]["1"] > 0
    text = invoke("doctor", str(quantized_bundle), "--threads", "1").stdout
    assert "pays above acceptance" in text
    assert "target: target/graph.onnx" in text


def test_export_prints_what_became_of_the_weights_and_the_quality(
    tiny_models: dict[str, Path], traced_once: None, tmp_path: Path
) -> None:
    words = [
        "export",
        "-m",
        str(tiny_models["target"]),
        "-o",
        str(tmp_path / "bundle"),
        "--max-context",
        "256",
    ]
    done = invoke(*words, "--precision", "int8")
    assert done.exit_code == 0
    assert "target against its float reference:" in done.stdout
    assert "kl_mean" in done.stdout
    assert "qkv" in done.stdout
    verify(tmp_path / "bundle", full=True)
    again = invoke(*words, "--precision", "int8", "--no-evaluate", "--force", "--json")
    assert again.exit_code == 0
    report = json.loads(again.stdout)
    assert set(report["graphs"]) == {"target"}
    assert report["quality"] == {}


def test_a_bundle_that_is_there_is_refused_with_2(
    run_main: Run, tiny_models: dict[str, Path], quantized_bundle: Path
) -> None:
    code, _, err = run_main("export", "-m", str(tiny_models["target"]), "-o", str(quantized_bundle))
    assert code == 2
    assert "--force replaces it" in error_line(err)


def test_fetch_lists_the_catalog(run_main: Run) -> None:
    code, out, _ = run_main("fetch", "--json")
    assert code == 0
    assert "smollm2-135m-q4_1" in {row["name"] for row in json.loads(out)}


SLOW = """
import sys, time
from outrider.cli import main
from outrider.cli.options import ProgressBar
from outrider.runtime.rounds import Engine
shown, one_round = ProgressBar.__call__, Engine._round
def show(self, stage, fraction):
    shown(self, stage, fraction)
    time.sleep(60)
def slow(self, run):
    time.sleep(0.05)
    return one_round(self, run)
ProgressBar.__call__, Engine._round = show, slow
main()
"""
"""The command line, with a minute between the steps of an export and 50 ms between rounds."""


def interrupt(process: subprocess.Popen[str]) -> str:
    """What a process that was told to stop said last."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert error_line(err) == "outrider: interrupted"
    return err


def test_ctrl_c_while_generating_ends_with_130_and_no_traceback(quantized_bundle: Path) -> None:
    words = ["-c", SLOW, "generate", str(quantized_bundle), "-p", FOX, "--k", "0", "--threads", "1"]
    with started(words) as process:
        assert process.stdout is not None
        assert process.stdout.read(3)  # the first characters are out: it is generating
        assert "tokens in" not in interrupt(process)


def test_ctrl_c_while_exporting_leaves_nothing(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model, output = str(tiny_models["draft"]), str(tmp_path / "bundle")
    with started(["-c", SLOW, "export", "-m", model, "-o", output, "--max-context", "64"]) as process:
        assert process.stderr is not None
        assert any("target: quantize" in line for line in iter(process.stderr.readline, ""))
        assert any(path.name.endswith(".partial") for path in tmp_path.iterdir())
        interrupt(process)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_is_told_to_end_leaves_nothing(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model, output = str(tiny_models["draft"]), str(tmp_path / "bundle")
    with started(["-c", SLOW, "export", "-m", model, "-o", output, "--max-context", "64"]) as process:
        assert process.stderr is not None
        assert any("target: quantize" in line for line in iter(process.stderr.readline, ""))
        process.terminate()
        _, err = process.communicate(timeout=240)
    assert (process.returncode, "Traceback" in err) == (128 + signal.SIGTERM, False)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_traceback(quantized_bundle: Path) -> None:
    words = ["-m", "outrider", "generate", str(quantized_bundle), "-p", FOX, "-n", "200", "--threads", "1"]
    read, write = os.pipe()
    os.close(read)
    with started(words, stdout=write) as process:
        os.close(write)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 1
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_an_error_of_the_disk_is_one_line(
    run_main: Run, quantized_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error", "graph.onnx")

    monkeypatch.setattr("outrider.runtime.load.verify_files", fails)
    code, _, err = run_main("generate", str(quantized_bundle), "-p", "x")
    assert code == 1
    assert error_line(err) == "outrider: graph.onnx: Input/output error"
