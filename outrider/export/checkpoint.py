"""One way to open a model, whatever it is: a GGUF file, a folder, a hub id or a catalog name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError
from outrider.export.config import ModelConfig
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

__all__ = ["Checkpoint", "Source", "TokenizerFiles", "open_checkpoint"]

HASH_CHUNK = 1 << 20

Progress = Callable[[str, int, int], None]
"""Called as progress(what, bytes done, bytes in all) while something is downloaded."""


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
        origin: tuple[str, str, str | None],  # kind, id, revision
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
        """The float32 values of one tensor. Norm weights are effective multipliers. Raises CheckpointError."""
        view = self._view(name)
        return apply_view(view, self._store.tensor(view.stored))

    def raw(self, name: str) -> RawBlocks | None:
        """The quantized bytes of a matrix with its rows in the decoder's order; None when it is stored as float."""
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
    """Open a model by `.gguf` path, folder (config.json, *.safetensors, tokenizer.json), catalog name or hub id.

    An existing path comes first, then the catalog, then the hub. `revision` names a hub commit, branch or
    tag. Raises CheckpointError (FetchError for downloads) saying what is wrong and what to do.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return _open_gguf(path, ("gguf", path.name, None))
    raise CheckpointError(f"{str(model)!r} is neither a GGUF file nor a folder")


def _open_gguf(path: Path, origin: tuple[str, str, str | None]) -> Checkpoint:
    from outrider.export.gguf import GgufFile, refuse_unsupported
    from outrider.export.gguf_model import config_from_gguf, weight_map_from_gguf
    from outrider.export.gguf_tokenizer import tokenizer_from_gguf

    file = GgufFile(path)
    try:
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


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(HASH_CHUNK):
            digest.update(piece)
    return digest.hexdigest()
