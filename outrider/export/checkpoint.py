"""One way to open a model, whatever it is: a GGUF file, a folder, a hub id or a catalog name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError, UsageError
from outrider.export.catalog import CATALOG
from outrider.export.config import ModelConfig
from outrider.export.fetch import Progress, cached, fetch, sha256_of
from outrider.export.folder import read_json, tokenizer_from_folder
from outrider.export.gguf import GgufFile, refuse_unsupported
from outrider.export.gguf_model import config_from_gguf, weight_map_from_gguf
from outrider.export.gguf_tokenizer import tokenizer_from_gguf
from outrider.export.hub import hub_file, hub_folder
from outrider.export.huggingface import config_from_json, weight_map_from_names
from outrider.export.safetensors import SafetensorsStore, shards_of
from outrider.export.tokenizer_files import TokenizerFiles
from outrider.export.weights import (
    TensorStore,
    View,
    apply_view,
    check_shapes,
    expected_shapes,
    view_raw,
)
from outrider.quantize.schemes import RawBlocks

__all__ = ["Checkpoint", "Source", "TokenizerFiles", "model_config", "open_checkpoint"]

Origin = tuple[str, str, str | None]  # kind, id, revision of a Source

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint came from. `files` holds, per file name, its sha256 and bytes."""

    kind: str  # "gguf", "folder", "hub" or "catalog"
    id: str
    revision: str | None
    files: Mapping[str, tuple[str, int]]


class Checkpoint:
    """An open checkpoint: configuration, tokenizer, and one tensor at a time under Hugging Face's names.

    Nothing of a weight is read before it is asked for. Use as a context manager or call `close`.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        views: Mapping[str, View],
        store: TensorStore,
        tokenizer: Callable[[], TokenizerFiles],
        origin: Origin,
        paths: Mapping[str, Path],
    ) -> None:
        check_shapes(config, views, store, origin[1])
        self.config = config
        self._views, self._store, self._tokenizer = views, store, tokenizer
        self._origin, self._paths = origin, paths

    def names(self) -> list[str]:
        """The tensors of the decoder in the order of the forward pass."""
        return list(expected_shapes(self.config))

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The float32 values of one tensor; norm weights are effective multipliers."""
        view = self._view(name)
        return apply_view(view, self._store.tensor(view.stored))

    def raw(self, name: str) -> RawBlocks | None:
        """The quantized bytes of a matrix, rows in the decoder's order; None when it is stored as float."""
        view = self._view(name)
        stored = self._store.raw(view.stored)
        return None if stored is None else view_raw(view, stored)

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer. Raises TokenizerError when the checkpoint holds none that is known."""
        return self._tokenizer()

    @cached_property
    def source(self) -> Source:
        """Where it came from; the files are hashed the first time this is read."""
        kind, identity, revision = self._origin
        files = {name: (sha256_of(path), path.stat().st_size) for name, path in self._paths.items()}
        return Source(kind, identity, revision, files)

    def close(self) -> None:
        """Release the files. Closing twice is allowed."""
        self._store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _view(self, name: str) -> View:
        if name not in self._views:
            raise CheckpointError(f"{self._origin[1]} has no tensor {name!r}; see names()")
        return self._views[name]


def open_checkpoint(
    model: str | Path,
    *,
    revision: str | None = None,
    mirror: str | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Open a `.gguf` path, a folder (config.json, *.safetensors, tokenizer.json), a catalog name or a hub id.

    An existing path comes first, then the catalog, then the hub. `revision` names a commit, branch or tag
    of a hub id and is refused for anything else. `mirror` and `progress` are those of `fetch`. Raises
    UsageError for a name that stands for nothing, CheckpointError (FetchError for downloads) saying what is
    wrong and what to do.
    """
    if not str(model):
        raise UsageError("the name of a model is empty; give a file, a folder, a hub id or a catalog name")
    name, path = str(model), Path(model).expanduser()
    on_hub = not path.exists() and name not in CATALOG
    if revision is not None and not on_hub:
        raise UsageError(f"revision {revision!r} applies to a hub id; {name!r} is none")
    if path.is_dir():
        return _open_folder(path, ("folder", path.resolve().name, None))
    if path.exists():
        return _open_gguf(path, ("gguf", path.name, None))
    if name in CATALOG:
        found = fetch(name, mirror=mirror, progress=progress)
        opener = _open_folder if found.is_dir() else _open_gguf
        return opener(found, ("catalog", name, found.name if found.is_dir() else None))
    if not _on_hub(name):
        raise UsageError(
            f"{name!r} is no file, folder, hub id (owner/name) or catalog name; "
            f"the catalog has: {', '.join(CATALOG)}"
        )
    folder, commit = hub_folder(name, revision)
    return _open_folder(folder, ("hub", name, commit))


def model_config(model: str | Path) -> ModelConfig:
    """The configuration of whatever `open_checkpoint` opens; of the hub, `config.json` alone is downloaded.

    Raises as `open_checkpoint`, and UsageError for a GGUF file of the catalog that was not fetched before.
    """
    name = str(model)
    entry = None if Path(model).expanduser().exists() else CATALOG.get(name)
    if entry is not None and entry.nbytes is not None and cached(entry) is None:
        raise UsageError(
            f"{name} is not here yet, and this downloads no weights; `outrider fetch {name}` does"
            f" ({entry.nbytes / 1e6:.0f} MB)"
        )
    repo, revision = (name, None) if entry is None else (entry.hub_repo or "", entry.hub_revision)
    if (entry is not None and entry.nbytes is not None) or not _on_hub(repo):
        with open_checkpoint(model) as checkpoint:
            return checkpoint.config
    path = hub_file(repo, "config.json", revision)
    with _sound(path):
        return config_from_json(read_json(path), str(path))


def _on_hub(name: str) -> bool:
    """Whether a name can only be a hub id."""
    path = Path(name).expanduser()
    return not path.exists() and bool(HUB_ID.fullmatch(name)) and path.suffix != ".gguf"


def _open_folder(folder: Path, origin: Origin) -> Checkpoint:
    if not (folder / "config.json").is_file():
        gguf = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"give one of its GGUF files: {', '.join(gguf[:5])}" if gguf else "it is no model folder"
        raise UsageError(f"{folder} has no config.json; {hint}")
    path = folder / "config.json"
    with _sound(path):
        config = config_from_json(read_json(path), str(path))
    shards = shards_of(folder)
    store = SafetensorsStore(shards)
    files = [folder / name for name in ("config.json", "tokenizer.json")] + shards
    try:
        return Checkpoint(
            config=config,
            views=weight_map_from_names(store.names(), config),
            store=store,
            tokenizer=lambda: tokenizer_from_folder(folder),
            origin=origin,
            paths={path.name: path for path in files if path.is_file()},
        )
    except BaseException:
        store.close()
        raise


def _open_gguf(path: Path, origin: Origin) -> Checkpoint:
    file = GgufFile(path)
    try:
        with _sound(path):
            config = config_from_gguf(file)
        refuse_unsupported(file)
        return Checkpoint(
            config=config,
            views=weight_map_from_gguf(file, config),
            store=file,
            tokenizer=lambda: tokenizer_from_gguf(file.metadata),
            origin=origin,
            paths={path.name: path},
        )
    except BaseException:
        file.close()
        raise


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """A value of the wrong kind in a file is the file's fault: say which file, without a traceback."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} describes no model that makes sense ({error}); get it again") from None
