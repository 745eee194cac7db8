"""The `split` profile: caches come in, new rows go out; as one decoder for an accelerator, or as pieces.

XNNPACK's stand-in for an accelerator's program is made of the pieces of `executorch_buffer`: they are lowered
once for all layers, where a whole decoder takes minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.export.config import ModelConfig
from outrider.export.decoder import Decoder, Step
from outrider.export.executorch_buffer import Pieces, whole_tables
from outrider.export.executorch_parts import ExecutorchPrimitives
from outrider.export.onnx import mask_kinds

__all__ = ["PieceProgram", "SplitProgram"]


class SplitProgram(nn.Module):
    """The decoder with flat inputs, over caches that come in and new rows that go out."""

    def __init__(
        self,
        config: ModelConfig,
        primitives: ExecutorchPrimitives,
        max_context: int,
        hidden_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.kinds = mask_kinds(config, max_context)
        self.masks = sorted(set(self.kinds.values()))
        self.decoder = Decoder(config, primitives, hidden_layers)

    def forward(
        self, tokens: Tensor, tables: list[Tensor], masks: list[Tensor], past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Logits [1, W, V], hidden states [1, W, D], then new keys and values [1, G, W, d] of every layer."""
        pairs = zip(tables[::2], tables[1::2], strict=True)
        rope = dict(zip(sorted(self.kinds), pairs, strict=True))
        named = dict(zip(self.masks, masks, strict=True))
        mask = {kind: named[name] for kind, name in self.kinds.items()}
        step = Step(rope, mask, list(zip(past[::2], past[1::2], strict=True)))
        logits, hidden = self.decoder(tokens, None, step)
        return (logits, *hidden, *(tensor for pair in step.present for tensor in pair))


class PieceProgram(nn.Module):
    """The same inputs and outputs over pieces, which read past and new rows as one cache."""

    def __init__(
        self, config: ModelConfig, pieces: Pieces, max_context: int, hidden_layers: Sequence[int]
    ) -> None:
        super().__init__()
        self.config, self.pieces, self.hidden_layers = config, pieces, tuple(hidden_layers)
        self.kinds = mask_kinds(config, max_context)
        self.masks = sorted(set(self.kinds.values()))

    def forward(
        self, tokens: Tensor, tables: list[Tensor], masks: list[Tensor], past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Logits [1, W, V], hidden states [1, W, D], then new keys and values [1, G, W, d] of every layer."""
        present: list[Tensor] = []

        def update(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            present.extend([key, value])
            return torch.cat([past[2 * layer], key], dim=2), torch.cat([past[2 * layer + 1], value], dim=2)

        rope = {}
        for index, kind in enumerate(sorted(self.kinds)):
            cos, sin = whole_tables(self.config, tables[2 * index][0, 0], tables[2 * index + 1][0, 0])
            rope[kind] = (cos.unsqueeze(1), sin.unsqueeze(1))
        flat = dict(zip(self.masks, (mask.squeeze(0) for mask in masks), strict=True))
        mask = {kind: flat[name] for kind, name in self.kinds.items()}
        states = self.pieces(tokens, rope, mask, update)
        hidden = [states[layer] for layer in self.hidden_layers]
        return (self.pieces.logits(states[-1]), *hidden, *present)
