"""Whole PyTorch models, converted by coremltools, compute in the evaluator what they compute in PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.targets.coreml_reference import MilProgram
from tests.mil_packages import IOS18, convert, ct, traced

# coremltools leaves folders of its own to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
    # torch's own norms look at sizes while they are traced
    pytest.mark.filterwarnings("ignore:Converting a tensor"),
]
SINGLE = np.float32


class Network(nn.Module):
    """Convolutions of every kind, norms, pools, and images made larger."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.slope = nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.PReLU(16)
        self.same, self.dilated = nn.Conv2d(16, 16, 3, padding="same"), nn.Conv2d(16, 16, 3, dilation=2)
        self.groups, self.instance = nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, affine=True)
        self.local, self.head = nn.LocalResponseNorm(3), nn.Linear(16, 10)
        self.larger = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1)
        for parameter in (self.norm.running_mean, self.slope.weight):
            nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.same(self.slope(self.depthwise(F.silu(self.norm(self.first(x))))))
        x = self.local(F.hardswish(self.instance(x)) + self.groups(x))
        pooled = F.avg_pool2d(x, 2)
        largest = F.max_pool2d(x, 3, 2, 1, ceil_mode=True)
        mean = F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
        x = F.pad(F.pixel_shuffle(torch.cat([largest, mean], 1), 2), (1, 2, 1, 0), "reflect")
        x = F.leaky_relu(torch.cat([x, x], 1), 0.1)
        x = F.interpolate(self.larger(F.hardsigmoid(self.dilated(x))), scale_factor=2, mode="nearest")
        halves = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        corners = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        chosen = F.adaptive_avg_pool2d(pooled, 1).flatten(1) + F.relu6(pooled).amax((2, 3))
        return self.head(chosen), torch.relu(halves - corners).mean((2, 3)).softmax(-1), F.elu(x)


class Attention(nn.Module):
    """Four heads; grouped ones share the keys and values of a pair."""

    def __init__(self, D: int = 32, kv_heads: int = 4) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = 4, kv_heads, D // 4
        self.query, self.out = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.key, self.value = nn.Linear(D, kv_heads * self.d), nn.Linear(D, kv_heads * self.d)

    def forward(self, x: Tensor, mask: Tensor, rope: tuple[Tensor, Tensor] | None = None) -> Tensor:
        B, S, _ = x.shape
        q = self.query(x).view(B, S, self.heads, self.d).transpose(1, 2)
        k, v = (part(x).view(B, S, self.kv_heads, self.d).transpose(1, 2) for part in (self.key, self.value))
        if rope is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            q, k = rotated(q, *rope), rotated(k, *rope).repeat_interleave(2, 1)
            scores = (q @ k.transpose(-1, -2) / math.sqrt(self.d)).masked_fill(~mask, float("-inf"))
            attended = scores.softmax(-1) @ v.repeat_interleave(2, 1)
        return self.out(attended.transpose(1, 2).reshape(B, S, -1))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Encoder(nn.Module):
    """Two blocks with LayerNorm and GELU; token 0 is padding that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(50, 32), nn.Embedding(16, 32), nn.Linear(32, 50)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        mask = (tokens != 0)[:, None, None, :]
        for layer, attention in enumerate(self.attentions):
            x = x + attention(self.norms[2 * layer](x), mask)
            x = x + self.down(F.gelu(self.up(self.norms[2 * layer + 1](x))))
        return self.head(x)


class Decoder(nn.Module):
    """Two blocks with RMSNorm, rotary positions, grouped queries, a gated MLP and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.attentions = nn.ModuleList(Attention(kv_heads=2) for _ in range(2))
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.scale = nn.Parameter(torch.rand(32) + 0.5)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1, 0.01, 0.001]))

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale

    def forward(self, tokens: Tensor) -> Tensor:
        x, positions = self.tokens(tokens), torch.arange(tokens.shape[1])
        angles = positions[:, None].float() * self.frequencies
        causal = positions[:, None] >= positions[None, :]
        for attention in self.attentions:
            x = x + attention(self.norm(x), causal, (angles.cos(), angles.sin()))
            x = x + self.down(F.silu(self.gate(self.norm(x))) * self.up(self.norm(x)))
        return self.norm(x) @ self.tokens.weight.T


def compare(path: Path, model: nn.Module, given: dict[str, Tensor], tolerance: float) -> None:
    with torch.no_grad():
        wanted = model(*given.values())
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    found = MilProgram.load(path).predict({name: value.numpy() for name, value in given.items()})
    for ours, theirs in zip(found.values(), wanted, strict=True):
        assert ours.shape == tuple(theirs.shape)
        assert np.abs(ours - theirs.numpy()).max() <= tolerance * theirs.abs().max().item()


PRECISIONS = {"fp32": (ct.precision.FLOAT32, 2e-6), "fp16": (ct.precision.FLOAT16, 5e-3)}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_convolutional_network(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind, tolerance = PRECISIONS[precision]
    model, image = Network().eval(), torch.randn(1, 3, 24, 20)
    inputs = [ct.TensorType(name="image", shape=image.shape, dtype=SINGLE)]
    outputs = [ct.TensorType(name=name, dtype=SINGLE) for name in ("classes", "shares", "picture")]
    path = tmp_path / "network.mlpackage"
    convert(path, traced(model, image), inputs=inputs, outputs=outputs, compute_precision=kind)
    compare(path, model, {"image": image}, tolerance)


@pytest.mark.parametrize(
    ("kind", "target", "precision"),
    [(Encoder, IOS18, "fp16"), (Decoder, IOS18, "fp16"), (Decoder, ct.target.iOS15, "fp32")],
)
def test_a_transformer_with_any_number_of_tokens(
    kind: type[nn.Module], target: Any, precision: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    computed, tolerance = PRECISIONS[precision]
    model, tokens = kind().eval(), torch.randint(1, 50, (1, 7), dtype=torch.int32)
    tokens[0, 5:] = 0
    inputs = [ct.TensorType(name="tokens", shape=(1, ct.RangeDim(1, 16, default=7)), dtype=np.int32)]
    outputs = [ct.TensorType(name="logits", dtype=SINGLE)]
    path = tmp_path / "transformer.mlpackage"
    convert(path, traced(model, tokens), target, inputs=inputs, outputs=outputs, compute_precision=computed)
    for count in (7, 1, 3):
        compare(path, model, {"tokens": tokens[:, :count]}, tolerance)
