"""ONNX Runtime sessions over the file of a graph, and what such a file says about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from outrider.errors import BackendError
from outrider.targets.core_sets import is_nice
from outrider.targets.huge_pages import new_memory_on_huge_pages

__all__ = ["CPU", "Sessions", "affinities", "described", "roaming"]

CPU = "CPUExecutionProvider"


def described(session: Any) -> dict[str, Any]:
    """What the inputs and outputs of a graph say about it; names are those of `GraphMeta`."""
    inputs = {value.name: value.shape for value in session.get_inputs()}
    outputs = {value.name: value.shape for value in session.get_outputs()}
    cache = [shape for name, shape in inputs.items() if name.startswith("past_key_")]
    _, heads, context, head_dim = cache[0] if cache else (1, None, None, None)
    hidden = {
        int(name.removeprefix("hidden_")): shape for name, shape in outputs.items() if "hidden_" in name
    }
    sizes = {
        "kv_heads": heads,
        "head_dim": head_dim,
        "max_context": context,
        "vocab_size": outputs.get("logits", [None])[-1],
        "top": outputs.get("top_ids", [0])[-1],
        "hidden_size": next((shape[-1] for shape in hidden.values()), None),
    }
    return {
        "profile": "inplace" if "seqlens_k" in inputs else "split",
        "layers": len(cache),
        "chains": "positions" not in inputs,
        "masks": tuple(name.removeprefix("mask_") for name in inputs if name.startswith("mask_")),
        "hidden_layers": tuple(hidden),
        **{name: size for name, size in sizes.items() if isinstance(size, int)},  # others are not fixed
    }


ENTRIES = {
    "session.force_spinning_stop": "1",  # the threads of an idle graph must not take the cores of a busy one
    "session.use_device_allocator_for_initializers": "1",  # weights apart from scratch memory
}


SPINNING = "session.intra_op.allow_spinning"
_AFFINITIES = "session.intra_op_thread_affinities"  # processors are counted from 1


def affinities(cores: Sequence[int] | None, threads: int | None = None) -> dict[str, str]:
    """The entry that keeps a session's own threads on cores, one each; the first core is the caller's."""
    own = [] if cores is None else cores[1 : threads or len(cores)]
    return {_AFFINITIES: ";".join(str(core + 1) for core in own)} if own else {}


def roaming(cores: Sequence[int]) -> dict[str, str]:
    """The entry that keeps as many threads as there are cores on these, each on any; the caller is one of them."""
    allowed = ",".join(str(core + 1) for core in cores)
    return {_AFFINITIES: ";".join([allowed] * (len(cores) - 1))} if len(cores) > 1 else {}


class Sessions:
    """The sessions of one file: one for any shape on a CPU, else one for each static shape."""

    def __init__(
        self,
        path: Path,
        max_context: int,
        threads: int | None,
        providers: Sequence[str],
        provider_options: Sequence[Mapping[str, str]] | None,
        entries: Mapping[str, str],
    ) -> None:
        self.path, self.max_context, self.threads, self.entries = path, max_context, threads, entries
        self.providers, self.provider_options = list(providers), provider_options
        self.static = any(name != CPU for name in providers)
        self.closed = False
        self._open: dict[tuple[int, int] | None, Any] = {}
        missing = [name for name in providers if name not in ort.get_available_providers()]
        if missing:
            known = ", ".join(ort.get_available_providers())
            raise BackendError(
                f"execution provider {missing[0]} is not in this ONNX Runtime; it has: {known}"
            )
        if not path.is_file():
            raise BackendError(f"{path} does not exist; export the bundle again or fetch it whole")

    def get(self, shape: tuple[int, int] | None) -> Any:
        """The session for (S, R): the same for any shape unless shapes must be static."""
        shape = shape if self.static else None
        if shape not in self._open:
            self._open[shape] = self._make(shape)
        return self._open[shape]

    def close(self) -> None:
        """Drop every session."""
        self._open.clear()
        self.closed = True

    def _make(self, shape: tuple[int, int] | None) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.inter_op_num_threads = 1
        if self.threads:
            options.intra_op_num_threads = self.threads
        spinning = (
            {SPINNING: "0"} if is_nice() else {}
        )  # who waits for a crowded core takes it from who has work
        for name, value in {**ENTRIES, **spinning, **self.entries}.items():
            options.add_session_config_entry(name, value)
        if shape is not None:
            sizes = {"width": shape[0], "picked": shape[1], "columns": self.max_context + shape[0]}
            for name, size in sizes.items():
                options.add_free_dimension_override_by_name(name, size)
        try:
            with new_memory_on_huge_pages():
                return ort.InferenceSession(
                    str(self.path), options, providers=self.providers, provider_options=self.provider_options
                )
        except Exception as error:
            raise BackendError(
                f"ONNX Runtime {ort.__version__} cannot load {self.path}: {error}; "
                "the file may be damaged (run `outrider check`) or need a newer ONNX Runtime"
            ) from error
