"""Text that a model writes itself, to calibrate it on: many answers at once, as branches of one tree.

Error compensation fits thousands of weights a row, and a few thousand tokens of foreign text are soon learned by
heart. What a draft will read is what models write, and the model at hand writes as much of it as is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.errors import UsageError
from outrider.export.decoder import Decoder, EagerPrimitives, Step
from outrider.export.rope import rope_tables
from outrider.export.slots import SlotWeights

__all__ = ["own_text"]

IntArray = NDArray[np.int64]
PREFILL = 512  # rows of prompts in one forward


@torch.inference_mode()
def own_text(
    weights: SlotWeights,
    prompts: Sequence[IntArray],
    tokens: int,
    *,
    end_ids: Collection[int] = (),
    temperature: float = 0.7,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> list[IntArray]:
    """Every prompt with up to `tokens` sampled tokens behind it, until one of `end_ids`.

    The whole model is in memory in float32. All answers grow together: their rows share one cache, and a mask
    lets each see its own. The same seed gives the same text. Raises UsageError without prompts or tokens.
    """
    if not prompts or min(map(len, prompts)) < 1 or tokens < 1 or temperature <= 0:
        raise UsageError(
            f"{len(prompts)} prompts, {tokens} tokens, temperature {temperature}: a text needs some of each"
        )
    batch = _Batch(weights, sum(map(len, prompts)) + len(prompts) * tokens)
    texts = [prompt.tolist() for prompt in prompts]
    last = batch.read_prompts(prompts)
    rng = np.random.default_rng(seed)
    alive = list(range(len(prompts)))
    for step in range(tokens):
        drawn = [_draw(last[row], temperature, rng) for row in range(len(alive))]
        for index, token in zip(alive, drawn, strict=True):
            texts[index].append(token)
        kept = [(index, token) for index, token in zip(alive, drawn, strict=True) if token not in end_ids]
        alive = [index for index, _ in kept]
        if progress:
            progress((step + 1) / tokens)
        if not kept or step + 1 == tokens:
            break
        positions = [len(texts[index]) - 1 for index in alive]
        last = batch.forward([token for _, token in kept], alive, positions, range(len(alive)))
    return [np.asarray(text, np.int64) for text in texts]


class _Batch:
    """A decoder over one cache whose rows belong to several sequences."""

    def __init__(self, weights: SlotWeights, rows: int) -> None:
        self.config = c = weights.config
        self.decoder = Decoder(c, EagerPrimitives(weights)).eval()
        shape = (1, c.num_kv_heads, rows, c.head_dim)
        self.cache = [(torch.empty(shape), torch.empty(shape)) for _ in range(c.num_layers)]
        self.owner = np.zeros(0, np.int64)  # [M], which sequence a row belongs to
        self.position = np.zeros(0, np.int64)  # [M]
        self.rope = {
            kind: tuple(map(torch.from_numpy, rope_tables(c, kind, c.max_position)))
            for kind in set(c.layer_types)
        }

    def read_prompts(self, prompts: Sequence[IntArray]) -> list[NDArray[np.float32]]:
        """The logits [V] after each prompt; prompts go in together, about `PREFILL` tokens at a time."""
        last: list[NDArray[np.float32]] = []
        group: list[int] = []
        for index in range(len(prompts)):
            group.append(index)
            sizes = [len(prompts[i]) for i in group]
            if sum(sizes) < PREFILL and index + 1 < len(prompts):
                continue
            tokens = [int(token) for i in group for token in prompts[i]]
            owners = np.repeat(group, sizes).tolist()
            positions = [place for size in sizes for place in range(size)]
            last += self.forward(tokens, owners, positions, (np.cumsum(sizes) - 1).tolist())
            group = []
        return last

    def forward(
        self, tokens: Sequence[int], owners: Sequence[int], positions: Sequence[int], rows: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        """Logits [V] of the chosen rows; the new rows are kept in the cache."""
        M, S = len(self.owner), len(tokens)
        self.owner = np.concatenate([self.owner, np.asarray(owners)])
        self.position = np.concatenate([self.position, np.asarray(positions)])
        place = torch.from_numpy(self.position[M:])
        step = Step(
            rope={kind: (cos[place], sin[place]) for kind, (cos, sin) in self.rope.items()},
            mask={kind: self._mask(M, kind) for kind in self.rope},
            past=[(key[:, :, :M], value[:, :, :M]) for key, value in self.cache],
        )
        logits, _ = self.decoder(torch.tensor([list(tokens)]), torch.tensor(list(rows)), step)
        for (key, value), (new_key, new_value) in zip(self.cache, step.present, strict=True):
            key[:, :, M : M + S], value[:, :, M : M + S] = new_key, new_value
        return list(logits[0].numpy())

    def _mask(self, M: int, kind: str) -> torch.Tensor:
        """Additive mask [1, 1, S, M + S]: each row sees its own sequence up to itself, within the window."""
        distance = self.position[M:, None] - self.position[None, :]
        seen = (self.owner[M:, None] == self.owner[None, :]) & (distance >= 0)
        if kind == "sliding" and self.config.sliding_window is not None:
            seen &= distance < self.config.sliding_window
        return torch.zeros(seen.shape).masked_fill(torch.from_numpy(~seen), -torch.inf)[None, None]


def _draw(logits: NDArray[np.float32], temperature: float, rng: np.random.Generator) -> int:
    """A token by its probability, by the inverse of the cumulative distribution in the order of ids."""
    scaled = (logits - logits.max()).astype(np.float64) / temperature
    total = np.cumsum(np.exp(scaled))
    return int(np.searchsorted(total, rng.random() * total[-1], side="right"))
