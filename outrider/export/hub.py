"""Downloads from the Hugging Face hub, through the user's own hub cache and settings.

`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` are honoured by `huggingface_hub` itself. One short
request comes first, because its downloads retry an unreachable hub for half a minute before they give up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import FetchError

__all__ = ["HubUnavailable", "hub_file", "hub_folder"]

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
WEIGHTS = "model*.safetensors"
HERE = "give a model folder or a .gguf file that is here"
CONNECT = f"connect, or {HERE}"


class HubUnavailable(FetchError):  # noqa: N818  (named after the condition)
    """The hub cannot be reached, or does not give this file to this user; `reason` says so without the remedy."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason


def hub_file(repo: str, name: str, revision: str | None) -> Path:
    """Download one file into the hub cache and return its path. Raises HubUnavailable within seconds."""
    import huggingface_hub

    try:
        _probe(repo, revision)
    except HubUnavailable:
        cached = huggingface_hub.try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        raise
    with _as_unavailable(repo):
        return Path(huggingface_hub.hf_hub_download(repo, name, revision=revision))


def hub_folder(repo: str, revision: str | None) -> tuple[Path, str]:
    """Download a repository's configuration, tokenizer and safetensors; return the folder and the commit.

    Without the hub, what the hub cache holds of the repository is used. Raises HubUnavailable.
    """
    import huggingface_hub

    try:
        reached = _probe(repo, revision)
    except HubUnavailable as error:
        return _cached_folder(repo, revision, error)
    wanted = _wanted(repo, [sibling.rfilename for sibling in reached.siblings or ()])
    with _as_unavailable(repo):
        # by the name of the revision, not by its commit: only so does the cache learn what the name means
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))
    return folder, folder.name


def _wanted(repo: str, names: Sequence[str]) -> list[str]:
    from fnmatch import fnmatchcase

    weights = [name for name in names if fnmatchcase(name, WEIGHTS) and "/" not in name]
    if not weights:
        gguf = [name for name in names if name.endswith(".gguf")]
        hint = (
            f"it holds GGUF files: download one ({', '.join(gguf[:5])}) and give its path"
            if gguf
            else "only safetensors and GGUF weights are read"
        )
        raise FetchError(f"{repo} on the hub has no {WEIGHTS}; {hint}")
    return [*weights, *(name for name in names if name in SMALL_FILES)]


def _cached_folder(repo: str, revision: str | None, error: HubUnavailable) -> tuple[Path, str]:
    import huggingface_hub

    try:
        cached = huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        raise error from None
    log.warning("%s; using the copy in the hub cache", error.reason)
    return Path(cached), Path(cached).name


def _probe(repo: str, revision: str | None) -> Any:
    """One request that must be answered within seconds: the repository's commit and file names."""
    import huggingface_hub

    with _as_unavailable(repo):
        return huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=TIMEOUT_S)


@contextmanager
def _as_unavailable(repo: str) -> Iterator[None]:
    """Turn every way a request can fail into HubUnavailable with its reason in one line."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        yield
    except OfflineModeIsEnabled:
        raise HubUnavailable(
            f"HF_HUB_OFFLINE is set, so {repo} is not asked for on the hub", f"unset it, or {HERE}"
        ) from None
    except GatedRepoError:
        raise HubUnavailable(
            f"{repo} is gated: accept its licence on its page of the hub, then set HF_TOKEN"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise HubUnavailable(
            f"the hub has no repository {repo!r} that this user may read; check the name, or set HF_TOKEN"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise HubUnavailable(f"cannot get {repo} from the hub ({_reason(error)})", CONNECT) from None
    except (
        Exception
    ) as error:  # huggingface_hub raises its HTTP client's own: httpx's from 1.x on, httpx2's from 2.x
        client = type(error).__module__.partition(".")[0].rstrip("0123456789")
        if client not in ("httpx", "httpcore", "requests", "urllib"):
            raise
        raise HubUnavailable(f"cannot get {repo} from the hub ({_reason(error)})", CONNECT) from None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    for known in (
        "Name or service not known",
        "Temporary failure in name resolution",
        "timed out",
        "refused",
    ):
        if known in text:
            return known
    return f"{type(error).__name__}: {text[:160]}"
