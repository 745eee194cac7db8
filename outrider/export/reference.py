"""The float32 oracle of a checkpoint, one layer in memory at a time.

All sequences go through layer 0, then through layer 1, and so on: a model larger than memory can be its own
reference, and nothing is written to disk. Logits come out in chunks of rows, because a vocabulary is wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.export.config import ModelConfig
from outrider.export.decoder import EagerPrimitives, Layer, Step, softcap
from outrider.export.rope import rope_tables
from outrider.export.slots import SlotWeights

__all__ = ["ROWS", "FloatReference"]

Float32Array = NDArray[np.float32]
Stream = tuple[torch.Tensor, torch.Tensor | None]  # residual and update [1, S, D], as layers take and return
ROWS = 64  # rows of logits at a time: 40 MB at a vocabulary of 152k


class FloatReference:
    """Teacher-forced logits of whole sequences in float32, from weights that are read layer by layer."""

    def __init__(self, weights: SlotWeights) -> None:
        self._weights = weights
        self._config = weights.config
        self._primitives = EagerPrimitives(weights)

    def final_states(
        self, sequences: Sequence[NDArray[np.int64]], progress: Callable[[float], None] | None = None
    ) -> list[torch.Tensor]:
        """The normed states [S, D] before the head, of every sequence; one pass over the layers."""
        streams = self.embed(sequences)
        for index in range(self._config.num_layers):
            self.run(self.layer(index), streams)
            if progress:
                progress((index + 1) / self._config.num_layers)
        return self.normed(streams)

    @torch.inference_mode()
    def embed(self, sequences: Sequence[NDArray[np.int64]]) -> list[Stream]:
        """Where the sequences enter the first layer."""
        embedding = self._primitives.embedding("embedding", self._config)
        scale = self._config.embedding_scale
        return [(embedding(torch.from_numpy(tokens)[None]) * scale, None) for tokens in sequences]

    def layer(self, index: int) -> Layer:
        """One layer with its weights, to be dropped after its `run`."""
        return Layer(index, self._config, self._primitives)

    @torch.inference_mode()
    def run(self, layer: Layer, streams: list[Stream]) -> None:
        """Take every stream through a layer, in place."""
        for place, (residual, update) in enumerate(streams):
            streams[place] = layer(residual, update, _step(self._config, residual.shape[1]))

    @torch.inference_mode()
    def normed(self, streams: Sequence[Stream]) -> list[torch.Tensor]:
        """What the head reads after the last layer, [S, D] of every sequence."""
        norm = self._primitives.add_norm("norm", self._config)
        return [norm(residual, update)[0][0] for residual, update in streams]

    @torch.inference_mode()
    def rows(self, states: Sequence[torch.Tensor]) -> Iterator[Float32Array]:
        """Logits [≤64, V] of all states in order, a chunk at a time; chunks never span two sequences."""
        head = self._primitives.linear("head", self._config)
        for state in states:
            for start in range(0, len(state), ROWS):
                logits = softcap(head(state[start : start + ROWS]), self._config.logit_softcap)
                yield logits.numpy()


def _step(config: ModelConfig, S: int) -> Step:
    """A forward from position 0 over an empty cache."""
    empty = torch.zeros(1, config.num_kv_heads, 0, config.head_dim)
    kinds = set(config.layer_types)
    rope = {kind: tuple(map(torch.from_numpy, rope_tables(config, kind, S))) for kind in kinds}
    mask = {kind: _causal(S, config.sliding_window if kind == "sliding" else None) for kind in kinds}
    return Step(rope, mask, [(empty, empty)] * config.num_layers)  # type: ignore[arg-type]


def _causal(S: int, window: int | None) -> torch.Tensor:
    """Additive mask [1, 1, S, S]: each row sees itself and what came before, within the window."""
    distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return torch.zeros(S, S).masked_fill(~seen, -torch.inf)[None, None]
