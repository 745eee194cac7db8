"""What the manifest says about a graph: the record that every backend opens one with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import BackendError

__all__ = ["GraphMeta", "reading_description"]

SIZES = ("max_context", "vocab_size", "hidden_size", "layers", "kv_heads", "head_dim")


@contextmanager
def reading_description() -> Iterator[None]:
    """Raise BackendError for what a manifest lacks or has in another form; it may have been edited by hand."""
    try:
        yield
    except KeyError as missing:
        raise BackendError(f"the graph's description lacks {missing}; export the bundle again") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise BackendError(
            f"the graph's description cannot be read ({error}); export the bundle again"
        ) from None


@dataclass(frozen=True)
class GraphMeta:
    """What the manifest says about a graph; `from_json` reads it."""

    profile: str
    widths: tuple[int, ...] | None
    max_context: int
    vocab_size: int
    hidden_size: int
    layers: int
    kv_heads: int
    head_dim: int
    hidden_layers: tuple[int, ...]
    masks: tuple[str, ...]
    sliding_window: int | None
    chains: bool = False  # it knows positions by itself and reads no mask: a tree runs path by path
    top: int = 0  # how many of the largest logits of each row it returns apart
    cache_dtype: str = "float32"
    all_rows_widths: tuple[
        int, ...
    ] = ()  # static widths whose runs return the logits of all rows, not of one

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GraphMeta:
        """Read the record; raises BackendError when a field is missing or has another form."""
        with reading_description():
            widths = tuple(values["widths"]) if values["widths"] is not None else None
            rows = values.get("rows")
            rows = rows if isinstance(rows, Mapping) else {}
            return cls(
                profile=str(values["profile"]),
                widths=widths,
                all_rows_widths=tuple(
                    width for width in widths or () if int(rows.get(str(width), width)) == width
                ),
                hidden_layers=tuple(values["hidden_layers"]),
                masks=tuple(values["masks"]),
                sliding_window=values["sliding_window"],
                chains=bool(values.get("chains", False)),
                top=int(values.get("top", 0)),
                cache_dtype=np.dtype(values.get("dtypes", {}).get("past_key_0", "float32")).name,
                **{name: int(values[name]) for name in SIZES},
            )

    def refuse_another_graph(self, described: Mapping[str, Any], path: Path) -> None:
        """Raise BackendError naming the first field in which an opened graph's own description differs."""
        for name, found in described.items():
            said = getattr(self, name)
            if found != said:
                raise BackendError(
                    f"{path} has {name} {found}, the manifest says {said}; they do not belong together: "
                    "export the bundle again"
                )
