"""Speculative decoding for phones, boards and laptops: export a pair of models, prove it, run it.

    import outrider

    pipeline = outrider.load("bundle")
    print(pipeline.generate("Once upon a time", max_tokens=64).text)

Importing this package loads no model library; each comes with the first call that needs it.
"""

from __future__ import annotations

from importlib import import_module

from outrider.errors import (
    BackendError,
    BundleError,
    CheckpointError,
    ContextError,
    DeviceError,
    ExportError,
    FetchError,
    MissingExtraError,
    OutriderError,
    TokenizerError,
    TokenizerMismatch,
    TraceError,
    UsageError,
)

TYPE_CHECKING = False  # as typing's, whose import takes as long as all of the rest

if TYPE_CHECKING:
    from typing import Any

    from outrider.contracts import Sampling
    from outrider.runtime.aio import AsyncPipeline
    from outrider.runtime.load import load
    from outrider.runtime.pipeline import Chunk, Pipeline, Result
    from outrider.runtime.stats import Stats

__all__ = [
    "AsyncPipeline",
    "BackendError",
    "BundleError",
    "CheckpointError",
    "Chunk",
    "ContextError",
    "DeviceError",
    "ExportError",
    "FetchError",
    "MissingExtraError",
    "OutriderError",
    "Pipeline",
    "Result",
    "Sampling",
    "Stats",
    "TokenizerError",
    "TokenizerMismatch",
    "TraceError",
    "UsageError",
    "load",
]

_HOMES = {
    "AsyncPipeline": "outrider.runtime.aio",
    "Chunk": "outrider.runtime.pipeline",
    "Pipeline": "outrider.runtime.pipeline",
    "Result": "outrider.runtime.pipeline",
    "Sampling": "outrider.contracts",
    "Stats": "outrider.runtime.stats",
    "load": "outrider.runtime.load",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; `__version__` comes from the installed package."""
    if name == "__version__":
        from importlib.metadata import version

        return version("outrider")
    if name not in _HOMES:
        raise AttributeError(
            f"module 'outrider' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
