"""Mistakes on the command line: one line with the exit code of its kind; paths are refused up front, by one rule."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from outrider.cli.paths import BundleFolder, InputFile, OutputFile, OutputFolder, name_of
from outrider.cli.root import COMMANDS
from outrider.errors import MissingExtraError
from outrider.lines import LineWriter
from outrider.records import replaced

Run = Callable[..., tuple[int, str, str]]
KINDS = (BundleFolder, InputFile, OutputFile, OutputFolder)
PARAMETERS = [
    (name, parameter)
    for name in COMMANDS
    for parameter in importlib.import_module(f"outrider.cli.{name}").command.params
]
PATHS = [
    pytest.param(name, parameter, id=f"{name}-{parameter.name}")
    for name, parameter in PARAMETERS
    if isinstance(parameter.type, KINDS)
]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["check", "nowhere"], 2, "nowhere does not exist; give a folder"),
        (["check", "."], 2, ". holds no manifest.json; give a folder made by"),
        (["fetch", "no-such-model"], 2, "no-such-model"),
        (["plan", "-m", "x" * 300], 2, "outrider: --model: xxx"),
        (["plan", "-m", "~nobody-of-this-name/x"], 2, "outrider: --model: ~nobody-of-this-name/x"),
        (["export", "-m", "x" * 300, "-o", "out"], 2, "outrider: --model: xxx"),
        (["export", "-m", "x", "-md", "x" * 300, "-o", "out"], 2, "outrider: --draft-model: xxx"),
        (["export", "-m", "x\udcff", "-o", "out"], 2, "outrider: --model: x\\udcff is not UTF-8"),
        (["fetch", "gemma3-270m-q4_k_m"], 2, "--accept-license gemma"),
        (["export", "-m", "nowhere", "-o", "out"], 2, "no file, folder, hub id"),
        (["export", "-m", ".", "-o", "out"], 2, "has no config.json"),
        (["export", "-m", "x", "-o", "out", "--precision", "int5"], 2, "int5"),
        (["export", "-m", "x", "-o", "out", "--device", "toaster"], 2, "toaster"),
        (["export", "-m", "x", "-o", "out", "--widths", "1;2"], 2, "--widths is '1;2'"),
        (["export", "-m", "x", "-o", "out", "--draft-precision", "int8"], 2, "--draft-precision was given"),
        (["export", "-m", "x", "-o", "out", "--draft-override", "a=int8"], 2, "--draft-override was given"),
        (["export", "-m", "x", "-o", "out", "--draft-revision", "v1"], 2, "--draft-revision was given"),
        (["export", "-m", "x", "-o", "out", "--draft-context", "0"], 2, "--draft-context was given"),
    ],
)
def test_a_mistake_is_one_line_with_its_exit_code(
    run_main: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found, out, err = run_main(*words)
    assert (found, out) == (code, "")
    assert err.startswith("outrider: ")
    assert (message in err, "Traceback" in err) == (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["bench"], ["generate", "x", "--threads", "0"], ["nonsense"], ["check", "-n", "1"]]
)
def test_words_that_click_refuses_end_with_2_and_a_usage_line(run_main: Run, words: list[str]) -> None:
    code, out, err = run_main(*words)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: outrider")
    assert "Traceback" not in err


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: it holds a file, a folder that is no bundle, and a link to itself."""
    (tmp_path / "file").write_text("older")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


WRONG = {
    InputFile: {"": "the path is empty", "nowhere": "does not exist", "folder": "is a folder"},
    BundleFolder: {
        "": "the path is empty",
        "nowhere": "does not exist",
        "file": "is a file",
        "folder": "holds no",
    },
    OutputFile: {
        "": "the path is empty",
        "-": "standard output",
        "folder": "is a folder",
        "file/x": "not a folder",
    },
    OutputFolder: {
        "": "the path is empty",
        "-": "standard output",
        "file": "not a folder",
        "file/x/y": "not a folder",
    },
}


@pytest.mark.parametrize(("name", "parameter"), PATHS)
def test_a_path_that_cannot_be_honoured_is_refused_before_anything_else(
    run_main: Run, places: Path, name: str, parameter: click.Parameter
) -> None:
    option = [max(parameter.opts, key=len)] if isinstance(parameter, click.Option) else []
    spelled = option[0] if option else "BUNDLE"
    wrong = {**WRONG[type(parameter.type)], "x" * 300: "File name too long", "loop": os.strerror(errno.ELOOP)}
    if isinstance(parameter.type, BundleFolder) or getattr(parameter.type, "for_bundle", False):
        wrong["x\udcff"] = "x\\udcff is not UTF-8"
    for path, fault in wrong.items():
        code, out, err = run_main(name, *option, path)
        assert (code, out) == (2, "")
        assert err.startswith(f"outrider: {spelled}: ")
        assert fault in err
    assert sorted(path.name for path in places.iterdir()) == ["file", "folder", "loop"]


def test_no_path_escapes_the_rule() -> None:
    """What takes a path has one of our types; click's own would take an empty one for the current folder."""
    assert not [(name, p.name) for name, p in PARAMETERS if isinstance(p.type, click.Path | click.File)]
    named = [
        "bundle",
        "output",
        "out",
        "telemetry",
        "trace",
        "governor_log",
        "prompts",
        "prompt_file",
        "calibration",
    ]
    shown = [(n, p) for n, p in PARAMETERS if p.name in named and not getattr(p, "hidden", False)]
    assert [(n, p.name) for n, p in shown if not isinstance(p.type, KINDS)] == []


@pytest.mark.parametrize(
    ("kind", "mode", "fault"),
    [(InputFile(), os.R_OK, "may not be read"), (OutputFile(), os.W_OK, "may not be written to")],
)
def test_missing_permissions_are_told(
    places: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, mode: int, fault: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, asked: asked != mode)
    assert fault in kind.fault(Path("file"))
    monkeypatch.undo()
    assert kind.fault(places / "file") is None


def test_what_is_written_may_be_a_device_or_in_folders_that_are_not_there_yet(places: Path) -> None:
    assert OutputFile().fault(Path(os.devnull)) is None
    assert OutputFile().fault(Path("a/b/c")) is None
    with LineWriter(places / "a" / "b" / "c", "decode", {}):
        pass
    assert (places / "a" / "b" / "c").is_file()


@pytest.mark.parametrize("kind", [OutputFile(), OutputFolder()])
def test_an_output_replaces_what_a_link_leads_to_and_not_the_link(places: Path, kind: Any) -> None:
    (places / "dangling").symlink_to("gone")
    real = Path(os.path.realpath(places))
    assert kind.convert("dangling", None, None) == real / "gone"
    assert kind.convert("dangling/new", None, None) == real / "gone" / "new"
    assert kind.convert("new", None, None) == Path("new")
    (places / "device").symlink_to(os.devnull)
    assert kind.followed(Path("device")) == Path("device"), "a link to a pipe leads to no file"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["simulate", "--scenario", "board-cap", "--acceptance", "file"], 1),
        (["profile", "--device", "raspberry-pi-5", "--acceptance", "file"], 1),
        (["profile", "--trace", "file"], 1),
        (["devices", "settings.toml"], 2),
        (["simulate", "--scenario", "settings.toml"], 2),
        (["simulate", "--scenario", "board-cap", "--policies", "k=999", "--acceptance", "file"], 1),
    ],
)
def test_what_a_program_wrote_is_damaged_with_1_and_what_people_write_is_wrong_with_2(
    run_main: Run, places: Path, words: list[str], code: int
) -> None:
    (places / "settings.toml").write_text("x = [")
    assert run_main(*words)[0] == code


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as failed, replaced(tmp_path / "host.toml"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert failed.value.filename == str(tmp_path / "host.toml")


def test_output_that_cannot_be_printed_is_a_line_that_says_so() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "outrider", "devices"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (
        1,
        "outrider: standard output, or a temporary file: No space left on device\n",
    )


@pytest.mark.parametrize("how", [["-m", "outrider"], ["-c", "from outrider.cli import main; main()"]])
def test_ctrl_c_while_the_program_is_still_being_imported_is_told_in_a_line(
    tmp_path: Path, how: list[str]
) -> None:
    (tmp_path / "click.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGINT)})\n")
    done = subprocess.run(
        [sys.executable, *how, "devices"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "outrider: interrupted\n")


@pytest.mark.parametrize(
    "hidden", [ImportError("initialization failed"), MissingExtraError("onnx", "export")]
)
def test_ctrl_c_that_a_library_turned_into_an_error_of_its_own_is_told_in_a_line(
    run_main: Run, monkeypatch: pytest.MonkeyPatch, hidden: Exception
) -> None:
    def interrupted(*_: Any) -> Any:
        try:
            raise ImportError from KeyboardInterrupt()
        except ImportError:
            raise hidden from None

    monkeypatch.setattr("outrider.targets.device.load_device", interrupted)
    assert run_main("devices", "host") == (130, "", "outrider: interrupted\n")


def test_a_path_that_is_no_text_is_printed_all_the_same(
    run_main: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.root.run", lambda: click.echo("q\udcff.jsonl: 3 readings"))
    assert run_main() == (0, "q\\udcff.jsonl: 3 readings\n", "")
    assert name_of(Path("a/q\udcff.jsonl")) == "q\\udcff.jsonl"


def test_what_is_imported_before_an_interrupt_can_be_told_is_next_to_nothing() -> None:
    code = "import sys\nbefore = set(sys.modules)\nimport outrider.cli\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[1])  # fmt: skip
    assert not {"typing", "platform", "click", "logging"} & set(done.stdout.split())


@pytest.mark.parametrize("words", [("export", "-m", "no-such/model", "-o", "made"), ("demo",)])
def test_the_runtime_alone_names_what_an_export_needs(words: tuple[str, ...], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv = ['outrider', *{words!r}]\n"
        "from outrider.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("pip install 'outrider[export]'")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
