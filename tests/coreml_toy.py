"""The two-layer decoder of `npu_toy` behind the inputs and outputs of Core ML packages, in plain numpy.

What the host side of the Core ML backend is tested with: it takes what a package would take, and complains about any
other dtype or shape. `FloatModel.logits` is what must come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.targets.coreml_profiles import CoreMLMeta
from tests.npu_toy import HEAD, KINDS, THETA, WINDOW, D, FloatModel, G, H, L, M, V

WIDTHS = (1, 2, 8, 16)
HEAD_PIECES = (60, V - 60)
MASKED = -40000.0
HIDDEN = (0,)
__all__ = ["ToyProgram", "meta", "write_embedding"]


def meta(profile: str, /, **changes: Any) -> dict[str, Any]:
    """The description that belongs to `ToyProgram`."""
    rope = {
        k: {"inv_freq": (THETA[k] ** (-np.arange(0, HEAD, 2) / HEAD)).tolist(), "scale": 1.0} for k in KINDS
    }
    common = {
        "profile": profile,
        "widths": list(WIDTHS),
        "max_context": M,
        "vocab_size": V,
        "hidden_size": D,
        "layers": L,
        "kv_heads": G,
        "head_dim": HEAD,
        "hidden_layers": list(HIDDEN),
        "masks": list(KINDS),
        "sliding_window": WINDOW,
        "masked": MASKED,
        "rope": rope,
    }
    split = {
        "rows": {str(W): W if W <= 8 else 1 for W in WIDTHS},
        "head": list(HEAD_PIECES),
        "functions": {str(W): f"w{W}" for W in WIDTHS},
        "embedding": {"dtype": "float16", "rows": V, "columns": D},
    }
    return {**common, **(split if profile == "split" else {"rows": 3}), **changes}


def write_embedding(path: Path, model: FloatModel) -> Path:
    """The table of the host; its values are exact in half precision."""
    path.write_bytes(model.embedding.astype("<f2").tobytes())
    return path


class ToyProgram:
    """Computes in float64 what it is given; `calls` keeps the name and width of each run."""

    execution: Any = "evaluator"
    provider = "toy"

    def __init__(self, model: FloatModel, description: Mapping[str, Any]) -> None:
        self.model, self.meta = model, CoreMLMeta.from_json(description)
        self.calls: list[int] = []
        self.keys, self.values = (np.full((L, 1, G, M, HEAD), np.nan, np.float16) for _ in range(2))
        self.closed = False

    def functions(self) -> tuple[str, ...]:
        return tuple(self.meta.functions.values()) or ("main",)

    def tensors(self, function: str) -> dict[str, Any]:
        return self.meta.tensors(None if function == "main" else int(function[1:]))

    def run(self, function: str, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if function == "main":
            return self._state(inputs)
        W = int(function[1:])
        self.calls.append(W)
        returned = ("present", "logits", "hidden")
        expected = {n: s for n, s in self.meta.tensors(W).items() if not n.startswith(returned)}
        assert {name: array.shape for name, array in inputs.items()} == expected
        assert all(array.dtype == np.float16 for array in inputs.values())
        assert all(np.isfinite(array).all() for array in inputs.values())
        return self._split(W, inputs)

    def _split(self, W: int, given: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        out: dict[str, NDArray[Any]] = {}

        def columns(name: str) -> NDArray[Any]:  # [1, C, 1, W] -> [W, C]
            return given[name][0, :, 0].T.astype(np.float64)

        def attended(layer: int, key: NDArray[Any], value: NDArray[Any]) -> Any:  # [G, W, d] each
            both = []
            for part, new in (("key", key), ("value", value)):
                half = new.transpose(0, 2, 1).reshape(1, G * HEAD, 1, W).astype(np.float16)
                out[f"present_{part}_{layer}"] = half
                past = given[f"past_{part}_{layer}"]
                rows = np.concatenate([past, half], axis=3)[0, :, 0].astype(np.float64)
                both.append(rows.reshape(G, HEAD, M + W).transpose(0, 2, 1))
            return both

        x, states = self._layers(
            columns("x"),
            {kind: (columns(f"cos_{kind}"), columns(f"sin_{kind}")) for kind in KINDS},
            {kind: columns(f"mask_{kind}") for kind in KINDS},
            attended,
        )
        if "select" in given:
            select = given["select"][0, 0, :, 0].astype(np.float64)
            assert sorted(select) == [0] * (W - 1) + [1]
            x = select[None] @ x
        logits = x @ self.model.head  # [R, V]
        begin = 0
        for piece, size in enumerate(HEAD_PIECES):
            out[f"logits_{piece}"] = logits[:, begin : begin + size].T[None, :, None].astype(np.float16)
            begin += size
        return {**out, **{f"hidden_{n}": states[n].T[None, :, None].astype(np.float16) for n in HIDDEN}}

    def _state(self, given: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        S, begin = given["tokens"].shape[1], int(given["begin"][0])
        self.calls.append(S)
        assert S in (self.meta.widths or range(M + 1))
        assert begin + S <= M
        whole = ("tokens", "begin", "rows")
        for name, shape in self.meta.tensors().items():
            if name.startswith(("keys", "values", "logits", "hidden")):
                continue
            array = given[name]
            assert array.dtype == (np.int32 if name in whole else np.float16)
            assert all(size in (None, found) for size, found in zip(shape, array.shape, strict=True)), name
        assert given["tokens"].shape[0] == 1

        def attended(layer: int, key: NDArray[Any], value: NDArray[Any]) -> Any:
            both = []
            for cache, new in ((self.keys, key), (self.values, value)):
                cache[layer, 0, :, begin : begin + S] = new.astype(np.float16)
                both.append(np.nan_to_num(cache[layer, 0].astype(np.float64), nan=1e3))
            return both

        x, states = self._layers(
            self.model.embedding[given["tokens"][0]].astype(np.float64),
            {k: (given[f"cos_{k}"].astype(np.float64), given[f"sin_{k}"].astype(np.float64)) for k in KINDS},
            {kind: given[f"mask_{kind}"][0, 0].astype(np.float64) for kind in KINDS},
            attended,
        )
        if "rows" in given:
            assert 1 <= len(given["rows"]) <= (self.meta.most_rows or 0)
            x = x[given["rows"]]
        found = {"logits": (x @ self.model.head)[None].astype(np.float16)}
        return {**found, **{f"hidden_{n}": states[n][None].astype(np.float16) for n in HIDDEN}}

    def _layers(self, x: Any, rope: Any, masks: Any, attended: Any) -> tuple[Any, list[Any]]:
        """x [W, D] after the layers, and after each of them."""
        states = []
        for layer, (kind, w) in enumerate(zip(KINDS, self.model.layers, strict=True)):
            q, k, v = ((x @ w[name]).reshape(len(x), -1, HEAD).transpose(1, 0, 2) for name in ("q", "k", "v"))
            key, value = attended(layer, _turned(k, *rope[kind]), v)
            key, value = (np.repeat(part, H // G, axis=0) for part in (key, value))
            scores = _turned(q, *rope[kind]) / HEAD**0.5 @ key.transpose(0, 2, 1) + masks[kind]
            chance = np.exp(scores - scores.max(-1, keepdims=True))
            chance /= chance.sum(-1, keepdims=True)
            x = x + (chance @ value).transpose(1, 0, 2).reshape(len(x), -1) @ w["o"]
            x = x + 1 / (1 + np.exp(-x @ w["up"])) @ w["down"]
            states.append(x)
        return x, states

    def close(self) -> None:
        self.closed = True


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
