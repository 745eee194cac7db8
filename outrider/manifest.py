"""The bundle's `manifest.json`: what the graphs are, where they came from, and how to be sure of it.

The reader is strict: a field that is missing, of another type or unknown is a `BundleError` that names the
field and the file, and no path in a manifest may lead out of the bundle's folder. See `docs/formats.md`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from outrider.contracts import as_json
from outrider.errors import BundleError
from outrider.records import decode, replaced

__all__ = [
    "MANIFEST_NAME",
    "SCHEMA_VERSION",
    "FileEntry",
    "GraphEntry",
    "KvEntry",
    "Manifest",
    "RoleEntry",
    "Source",
    "Timing",
    "TokenizerEntry",
    "bundle_path",
    "describe_file",
    "file_sha256",
    "first_differing_id",
    "parse_manifest",
    "read_manifest",
    "token_map",
    "token_map_hash",
    "verify",
    "write_manifest",
]

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1

Via = Literal["artifact", "emulator", "evaluator", "reference-lowering"]
Profile = Literal["inplace", "split", "buffer", "state"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class FileEntry:
    """Identity of one file of the bundle."""

    sha256: str  # 64 hex digits
    bytes: int

    def __post_init__(self) -> None:
        """Refuse what cannot be a hash or a size."""
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise BundleError(f"sha256 is {self.sha256!r}; expected 64 lower-case hex digits")
        if self.bytes < 0:
            raise BundleError(f"bytes is {self.bytes}; a size cannot be negative")


@dataclass(frozen=True)
class Source:
    """Where the weights of one role came from."""

    role: str
    model: str  # hub id, catalog name or file name; never a path of the exporting machine
    revision: str | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)  # source file name -> hash


@dataclass(frozen=True)
class KvEntry:
    """The KV cache of a graph; `layers` keys and as many values of `heads` x `head_dim`."""

    dtype: str
    layout: str  # order of the dimensions, such as "BHSD"
    layers: int
    heads: int
    head_dim: int
    scale: float | None = None  # of a quantized cache

    def __post_init__(self) -> None:
        """Refuse an empty cache."""
        _at_least(1, layers=self.layers, heads=self.heads, head_dim=self.head_dim)


@dataclass(frozen=True)
class GraphEntry:
    """One exported graph of a role; the first file in `files` is the one that its backend opens.

    `widths` None means any width. `functions` names the entry point per width for backends that compile
    one each. `via` and `executed_artifact` say how it was proven (`via` None = never executed).
    `preference` orders the graphs of a role, lowest first. A forward reads all bytes of the files but
    `gathered_bytes` (of an embedding that no head shares: some rows of it), and multiplies every token with
    `weights` numbers; 0 and None where the export did not say.
    """

    backend: str
    unit: str
    profile: Profile
    files: Mapping[str, FileEntry]  # path inside the bundle -> identity
    widths: tuple[int, ...] | None
    prefill_width: int | None
    kv: KvEntry
    max_context: int
    vocab_size: int
    recipe: str
    preference: int = 0
    hidden_layers: tuple[int, ...] = ()
    functions: Mapping[str, str] = field(default_factory=dict)
    embedding_file: str | None = None
    vocab_map: str | None = None
    target_sha256: str | None = None  # of the target graph that this draft was made for
    via: Via | None = None
    executed_artifact: bool = False
    gathered_bytes: int = 0
    weights: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # for the backend, such as session options

    def __post_init__(self) -> None:
        """Refuse a graph that nothing could run."""
        _at_least(1, max_context=self.max_context, vocab_size=self.vocab_size)
        _at_least(0, gathered_bytes=self.gathered_bytes)
        _at_least(1, weights=1 if self.weights is None else self.weights)
        if not self.files:
            raise BundleError("files is empty; a graph has at least one file")
        if self.widths is not None and (not self.widths or min(self.widths) < 1):
            raise BundleError(f"widths is {self.widths}; expected null or a list of positive widths")
        if self.prefill_width is not None:
            _at_least(1, prefill_width=self.prefill_width)
        for name in (self.embedding_file, self.vocab_map):
            if name is not None and name not in self.files:
                raise BundleError(f"{name!r} is named by the graph but absent from its files")

    @property
    def path(self) -> str:
        """The file that the backend opens, relative to the bundle."""
        return next(iter(self.files))

    @property
    def identity(self) -> str:
        """The sha256 that a draft names its target by: of the first file, or of a Core ML package's weights.

        The first file of a package only lists the others, and is the same for all of them.
        """
        weights = (name for name in self.files if PurePosixPath(name).name == "weight.bin")
        return self.files[next(weights, self.path)].sha256


@dataclass(frozen=True)
class RoleEntry:
    """All graphs that can play one role."""

    graphs: tuple[GraphEntry, ...]

    def __post_init__(self) -> None:
        """Refuse a role that nobody can play."""
        if not self.graphs:
            raise BundleError("graphs is empty; a role has at least one graph")

    def by_preference(self) -> tuple[GraphEntry, ...]:
        """The graphs in the order in which `load` tries them."""
        return tuple(sorted(self.graphs, key=lambda graph: graph.preference))


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer of the pair. `hash` is the `token_map_hash` of its tokenizer.json."""

    hash: str
    files: Mapping[str, FileEntry]  # tokenizer.json, and the chat template where there is one
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    add_bos: bool = False
    chat_template: str | None = None  # a name in `files`
    eos_token: str | None = None  # what chat templates call by this name; None = the token of eos_ids[0]

    def __post_init__(self) -> None:
        """Refuse a template that is not among the files, and BOS without an id."""
        if "tokenizer.json" not in {PurePosixPath(name).name for name in self.files}:
            raise BundleError(f"files has no tokenizer.json, only {sorted(self.files)}")
        if self.chat_template is not None and self.chat_template not in self.files:
            raise BundleError(f"chat_template is {self.chat_template!r}, which is not in files")
        if self.add_bos and self.bos_id is None:
            raise BundleError("add_bos is true but bos_id is null")

    @property
    def path(self) -> str:
        """Where tokenizer.json is, relative to the bundle."""
        return next(name for name in self.files if PurePosixPath(name).name == "tokenizer.json")


@dataclass(frozen=True)
class Timing:
    """Measured costs, with the machine that they hold for (`runtime.timing.machine_line`)."""

    machine: str
    measured: Mapping[
        str, Any
    ]  # what `runtime.planner.Planner` starts from: verify_s by width, draft_s by drafter


@dataclass(frozen=True)
class Manifest:
    """Everything that `load` must know about a bundle."""

    tool_version: str
    sources: tuple[Source, ...]
    roles: Mapping[str, RoleEntry]  # "target", "draft", ...
    tokenizer: TokenizerEntry
    max_context: int
    device: str
    quality: Mapping[str, Any] = field(default_factory=dict)  # per role, as `outrider export` measured it
    timing: Timing | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        """Refuse a bundle without a target, and paths that leave the bundle."""
        if "target" not in self.roles:
            raise BundleError(f"roles has no 'target', only {sorted(self.roles)}")
        trimmed = [graph.path for graph in self.roles["target"].graphs if graph.vocab_map is not None]
        if trimmed:
            raise BundleError(
                f"vocab_map of {trimmed[0]!r}: a target must have its whole vocabulary; only a draft may lack ids"
            )
        _at_least(1, max_context=self.max_context)
        for name in self.files():
            _refuse_unsafe(name)

    def files(self) -> dict[str, FileEntry]:
        """Every file of the bundle but the manifest; a file shared by graphs appears once."""
        found: dict[str, FileEntry] = {}
        for files in (*(g.files for r in self.roles.values() for g in r.graphs), self.tokenizer.files):
            for name, entry in files.items():
                if found.setdefault(name, entry) != entry:
                    raise BundleError(f"{name!r} is listed twice, with different hashes or sizes")
        return found


def _at_least(low: int, **values: int) -> None:
    for name, value in values.items():
        if value < low:
            raise BundleError(f"{name} is {value}; it must be at least {low}")


def _refuse_unsafe(name: str) -> None:
    parts = name.split("/")
    if not name or "\\" in name or ":" in name or "\0" in name or {"", ".", ".."} & set(parts):
        raise BundleError(f"path {name!r} is not a plain relative path inside the bundle")


def bundle_path(directory: str | os.PathLike[str], name: str) -> Path:
    """The file `name` of a bundle. Raises BundleError when the path, or a link on it, leaves the folder."""
    _refuse_unsafe(name)
    root = Path(directory).resolve()
    path = root / name
    if not path.resolve().is_relative_to(root):
        raise BundleError(f"{name!r} is a link that leaves the bundle {directory}; copy the file into it")
    return path


def file_sha256(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hex, read in pieces; `progress` gets the bytes of each."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
            if progress:
                progress(len(piece))
    return digest.hexdigest()


def describe_file(path: str | os.PathLike[str]) -> FileEntry:
    """The identity of a file as the manifest records it."""
    return FileEntry(file_sha256(path), os.path.getsize(path))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise BundleError(f"the field {key!r} appears twice")
        record[key] = value
    return record


def parse_manifest(text: str, where: str = MANIFEST_NAME) -> Manifest:
    """Read a manifest from JSON. Raises BundleError naming `where` and the field."""
    try:
        raw = json.loads(text, object_pairs_hook=_unique_keys)
    except BundleError as error:
        raise BundleError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{where} is not valid JSON ({error}); it may be cut off: export again") from None
    if not isinstance(raw, dict):
        raise BundleError(f"{where} holds a {type(raw).__name__}, not an object")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise BundleError(
            f"{where}: schema_version is {version!r}, this outrider reads {SCHEMA_VERSION}; "
            "export again or install the version that wrote it"
        )
    manifest: Manifest = decode(Manifest, raw, where, BundleError)
    return manifest


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read and validate the manifest of a bundle folder. Raises BundleError; opens no other file."""
    path = Path(directory) / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BundleError(
            f"{path} does not exist; is {directory} a folder made by `outrider export`?"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from None
    return parse_manifest(text, str(path))


def _check_size(directory: str | os.PathLike[str], name: str, entry: FileEntry) -> Path:
    path = bundle_path(directory, name)
    if not path.is_file():
        raise BundleError(f"{name!r} is missing from the bundle {directory}; copy or export it again")
    size = path.stat().st_size
    if size != entry.bytes:
        raise BundleError(
            f"{name!r} has {size} bytes, the manifest says {entry.bytes}; the copy is cut off or was changed"
        )
    return path


def verify(
    directory: str | os.PathLike[str], *, full: bool = False, progress: Progress | None = None
) -> Manifest:
    """Check that a bundle's files are there with the right sizes, and with `full` their SHA-256.

    Returns the manifest. `progress(done, total)` counts bytes hashed. Raises BundleError naming the first
    file that is wrong.
    """
    manifest = read_manifest(directory)
    files = manifest.files()
    paths = {name: _check_size(directory, name, entry) for name, entry in files.items()}
    if full:
        tick = _counter(progress, sum(entry.bytes for entry in files.values()))
        for name, path in paths.items():
            found = file_sha256(path, tick)
            if found != files[name].sha256:
                raise BundleError(
                    f"{name!r} has sha256 {found}, the manifest says {files[name].sha256}; "
                    "the file was changed: copy or export it again"
                )
    return manifest


def _counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def tick(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(done, total)

    return tick


def write_manifest(directory: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Write `manifest.json` into a folder, whole or not at all; returns its path.

    Raises BundleError when a measured value is not finite: JSON has no word for it.
    """
    try:
        text = json.dumps(as_json(manifest), indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise BundleError(
            f"the manifest cannot be written: {error} (a measured value is not finite)"
        ) from None
    with replaced(Path(directory) / MANIFEST_NAME) as stream:
        stream.write(text.encode("ascii"))
    return Path(directory) / MANIFEST_NAME


def token_map(tokenizer_json: Mapping[str, Any]) -> dict[int, str]:
    """The ids of a parsed tokenizer.json and their token strings, added tokens included.

    Rows that converters invent to fill an embedding ("[PAD151700]" with id 151700) are no tokens.
    """
    vocabulary = tokenizer_json.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [piece, score] in id order
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    tokens = {index: piece for piece, index in vocabulary.items()}
    tokens |= {added["id"]: added["content"] for added in tokenizer_json.get("added_tokens", [])}
    return {index: piece for index, piece in sorted(tokens.items()) if piece != f"[PAD{index}]"}


def token_map_hash(tokenizer_json: Mapping[str, Any]) -> str:
    """SHA-256 over the map from id to token string; the size of the embedding has no part in it."""
    digest = hashlib.sha256()
    for index, piece in token_map(tokenizer_json).items():
        digest.update(json.dumps([index, piece], ensure_ascii=True).encode("ascii") + b"\n")
    return digest.hexdigest()


def first_differing_id(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> tuple[int, str | None, str | None] | None:
    """The first id that two parsed tokenizer.json give to different tokens, with both tokens, or None.

    Ids past the end of the shorter map are no difference: a draft that lacks them never proposes them.
    """
    ours, theirs = token_map(a), token_map(b)
    end = min(max(ours, default=-1), max(theirs, default=-1))
    for index in sorted(set(ours) | set(theirs)):
        if index <= end and ours.get(index) != theirs.get(index):
            return index, ours.get(index), theirs.get(index)
    return None
