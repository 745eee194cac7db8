"""The round loop as an app writes it: `docs/android.md` and `docs/apple.md`, step by step, in Python and numpy.

Nothing here imports the product. A port to another language is right when it decides a `decode` trace as
`redecide` does, and when its graphs return what the trace holds. Names are those of the document.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Run = Callable[[int, Mapping[str, Array]], Mapping[str, Array]]
"""(width, inputs by name) -> outputs by name: the app's own call into its runtime."""

MASKED = -1e4  # of float graphs; integer graphs say their own


# Random numbers: one for each position of the text


def philox(key: Sequence[int], counter: Sequence[int]) -> list[int]:
    """Four 64-bit words of Philox4x64-10."""
    word = (1 << 64) - 1
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 1 << 64)
        high1, low1 = divmod(0xCA5A826395121157 * c2, 1 << 64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & word, (k1 + 0xBB67AE8584CAA73B) & word
    return [c0, c1, c2, c3]


def uniform_of(seed: int, position: int) -> float:
    """The uniform of a position, in [0, 1)."""
    return (philox((seed, 0), (position + 1, 0, 0, 0))[0] >> 11) * 2.0**-53


# Decisions


def draw(ids: Sequence[int], probs: Sequence[float], uniform: float) -> int:
    """Inverse CDF in the order of the ids."""
    aim, reached = uniform * math.fsum(probs), 0.0
    for token, p in zip(ids, probs, strict=True):
        reached += p
        if aim < reached:
            return token
    return max(token for token, p in zip(ids, probs, strict=True) if p > 0)


def reject(p: dict[int, float], drafted: int, q: Mapping[int, float], uniform: float) -> tuple[int, bool]:
    """Keep the drafted token with probability min(1, p / q), else draw from what p has more than q."""
    ratio = p.get(drafted, 0.0) / q[drafted]
    if uniform < ratio:
        return drafted, True
    left = {token: max(0.0, mass - q.get(token, 0.0)) for token, mass in p.items()}
    total = math.fsum(left.values())
    if total > 1e-12:
        p = {token: mass / total for token, mass in left.items()}
    ids = sorted(p)
    return draw(ids, [p[token] for token in ids], min((uniform - ratio) / (1 - ratio), 1 - 2**-53)), False


def redecide(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Decide every round of a chain-drafting `decode` trace again; the text. Asserts that nothing differs."""
    header, *rounds = lines
    sampling, text = header["sampling"], list(header["prompt"])
    for record in rounds:
        assert record["position"] == len(text)
        drafted = record["proposal"]["tokens"]
        assert record["proposal"]["parents"] == list(range(-1, len(drafted) - 1))
        committed: list[int] = []
        for depth, row in enumerate(record["rows"]):
            assert row["row"] == depth
            token, accepted = _decide(row, record["proposal"], sampling, len(text) + depth, depth)
            committed.append(token)
            assert (row["token"], row["node"]) == (token, depth if accepted else -1)
            if not accepted or token in header["stop_ids"]:
                break
        assert committed == record["tokens"]
        text += committed
    return text[len(header["prompt"]) :]


def _decide(
    row: Mapping[str, Any],
    proposal: Mapping[str, Any],
    sampling: Mapping[str, Any],
    position: int,
    depth: int,
) -> tuple[int, bool]:
    """The token of one row, and whether it is the drafted one."""
    drafted = proposal["tokens"][depth] if depth < len(proposal["tokens"]) else None
    if sampling["temperature"] == 0:
        top = row["top"]
        token = min(zip([-value for value in top["values"]], top["ids"], strict=True))[
            1
        ]  # equals: the lower id
        return token, token == drafted
    uniform = uniform_of(sampling["seed"], position)
    assert row["uniform"] == uniform
    probs = row["chances"]["probs"]
    ids = row["chances"]["ids"] or list(range(len(probs)))
    if sampling["mode"] == "match" or drafted is None:
        token = draw(ids, probs, uniform)
        return token, token == drafted
    q_row = proposal["q"][depth]
    q_ids = proposal["vocab_ids"] or list(range(len(q_row)))
    total = math.fsum(q_row)
    q = {token: mass / total for token, mass in zip(q_ids, q_row, strict=True)}
    return reject(dict(zip(ids, probs, strict=True)), drafted, q, uniform)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A trace, the header first."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_vocab_map(path: Path) -> list[int]:
    """The id of each of a draft's logits: raw little-endian int32."""
    return np.fromfile(path, "<i4").tolist()  # type: ignore[no-any-return]


# Graphs with static widths


def visible(P: int, S: int, W: int, M: int, window: int | None) -> Array:
    """[W, M + W] of a chain: S tokens behind P cached ones, in a width of W over a cache of M."""
    allowed = np.zeros((W, M + W), bool)
    for row in range(S):
        first = 0 if window is None else max(0, P + row - window + 1)
        allowed[row, first:P] = True
        allowed[row, M + max(0, first - P) : M + row + 1] = True
    for row in range(S, W):
        allowed[row, M + row] = True
    return allowed


class FloatGraph:
    """An ONNX graph of the `split` profile for a CPU or GPU: float keys and values, a row each."""

    def __init__(self, meta: Mapping[str, Any], run: Run) -> None:
        self.meta, self.run = meta, run
        shape = (1, meta["kv_heads"], meta["max_context"], meta["head_dim"])
        names = [f"{part}_{layer}" for layer in range(meta["layers"]) for part in ("key", "value")]
        self.past = {name: np.zeros(shape, np.float32) for name in names}
        self.length = 0

    def forward(self, tokens: Sequence[int]) -> Array:
        """Logits [S, V'] of tokens behind the committed ones."""
        S, M = len(tokens), self.meta["max_context"]
        W = min(width for width in self.meta["widths"] if width >= S)
        feeds: dict[str, Array] = {
            "tokens": np.zeros((1, W), np.int64),
            "positions": np.zeros((1, W), np.int64),
            "rows": np.arange(S),
        }
        feeds["tokens"][0, :S] = tokens
        feeds["positions"][0, :S] = self.length + np.arange(S)
        for name in self.meta["masks"]:
            window = self.meta["sliding_window"] if name == "sliding" else None
            allowed = visible(self.length, S, W, M, window)
            feeds[f"mask_{name}"] = np.where(allowed, 0, MASKED).astype(np.float32)[None, None]
        feeds |= {f"past_{name}": values for name, values in self.past.items()}
        self.present = self.run(W, feeds)
        return self.present["logits"][0]

    def commit(self, count: int) -> None:
        """Keep the first rows of the last forward."""
        for name, values in self.past.items():
            values[:, :, self.length : self.length + count] = self.present[f"present_{name}"][:, :, :count]
        self.length += count


class IntegerGraph:
    """The graphs of an NPU: integers with one scale a tensor, keys transposed, embedding and RoPE outside."""

    def __init__(self, meta: Mapping[str, Any], embedding: Path, run: Run) -> None:
        self.meta, self.run, self.length = meta, run, 0
        V, D, block = (meta["embedding"][name] for name in ("rows", "columns", "block"))
        self.codes = np.memmap(embedding, np.int8, "r", 0, (V, D))
        self.scales = np.memmap(embedding, "<f2", "r", meta["embedding"]["scales_offset"], (V, D // block))
        G, d, M = meta["kv_heads"], meta["head_dim"], meta["max_context"]
        self.past: dict[str, Array] = {}
        for layer in range(meta["layers"]):
            for name, shape in ((f"key_{layer}", (1, G, d, M)), (f"value_{layer}", (1, G, M, d))):
                zero = meta["scales"][f"past_{name}"][1]
                self.past[name] = np.full(shape, zero, self.dtype(f"past_{name}"))

    def dtype(self, name: str) -> str:
        """The element type of a tensor."""
        return str(self.meta.get("dtypes", {}).get(name, "uint16"))

    def quantize(self, name: str, values: Array) -> Array:
        """round(value / scale) + zero point, to even at halves, within the type."""
        scale, zero = self.meta["scales"][name]
        edges = np.iinfo(self.dtype(name))
        integers = np.rint(values.astype(np.float32) / np.float32(scale)) + zero
        return np.clip(integers, edges.min, edges.max).astype(edges.dtype)

    def forward(self, tokens: Sequence[int], rows: Sequence[int]) -> Array:
        """Logits [R, V'] of some rows of S tokens behind the committed ones."""
        S, M = len(tokens), self.meta["max_context"]
        W = min(width for width in self.meta["widths"] if width >= S)
        ids = [*tokens, *[tokens[-1]] * (W - S)]
        positions = self.length + np.minimum(np.arange(W), S - 1)
        block = self.meta["embedding"]["block"]
        x = self.codes[ids].astype(np.float32) * np.repeat(self.scales[ids].astype(np.float32), block, axis=1)
        feeds: dict[str, Array] = {"x": self.quantize("x", x)[None]}
        for kind, table in self.meta["rope"].items():
            angles = positions[:, None] * np.array(table["inv_freq"])  # float64
            for name, values in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                feeds[f"{name}_{kind}"] = self.quantize(f"{name}_{kind}", values * table["scale"])[None, None]
        for name in self.meta["masks"]:
            window = self.meta["sliding_window"] if name == "sliding" else None
            allowed = visible(self.length, S, W, M, window)
            mask = np.where(allowed, 0.0, self.meta["masked"])
            feeds[f"mask_{name}"] = self.quantize(f"mask_{name}", mask)[None, None]
        feeds |= {f"past_{name}": values for name, values in self.past.items()}
        R = self.meta["rows"][str(W)]
        feeds["rows"] = np.array([*rows, *[0] * (R - len(rows))], np.int32)
        self.present = self.run(W, feeds)
        scale, zero = self.meta["scales"]["logits"]
        logits = self.present["logits"][0, : len(rows)].astype(np.float32)
        return (logits - np.float32(zero)) * np.float32(scale)

    def commit(self, count: int) -> None:
        """Copy the integers of the first rows of the last forward into the cache: no conversion."""
        at = slice(self.length, self.length + count)
        for name, values in self.past.items():
            new = self.present[f"present_{name}"]
            if name.startswith("key"):
                values[:, :, :, at] = new[:, :, :, :count]
            else:
                values[:, :, at] = new[:, :, :count]
        self.length += count


def rope_rows(record: Mapping[str, Any], positions: Array) -> tuple[Array, Array]:
    """Cosines and sines [n, rotary / 2] of positions, in half precision."""
    angles = positions[:, None] * np.array(record["inv_freq"])  # float64
    cos, sin = ((turned(angles) * record["scale"]).astype(np.float32) for turned in (np.cos, np.sin))
    return cos.astype(np.float16), sin.astype(np.float16)


class HalfGraph:
    """A Core ML package of the `split` profile: half precision, channels first, embedding and RoPE outside."""

    def __init__(self, meta: Mapping[str, Any], embedding: Path, run: Run) -> None:
        self.meta, self.run, self.length = meta, run, 0
        table = meta["embedding"]
        V, D = table["rows"], table["columns"]
        self.scales: Array | None = None
        if table["dtype"] == "float16":
            self.rows = np.memmap(embedding, "<f2", "r", 0, (V, D))
        else:
            self.rows = np.memmap(embedding, np.int8, "r", 0, (V, D))
            self.scales = np.memmap(embedding, "<f2", "r", table["scales_offset"], (V, D // table["block"]))
        shape = (1, meta["kv_heads"] * meta["head_dim"], 1, meta["max_context"])
        names = [f"{part}_{layer}" for layer in range(meta["layers"]) for part in ("key", "value")]
        self.past = {name: np.zeros(shape, np.float16) for name in names}

    def embedded(self, ids: Sequence[int]) -> Array:
        """Rows [W, D] of the table."""
        if self.scales is None:
            return self.rows[ids]
        scales = np.repeat(self.scales[ids].astype(np.float32), self.meta["embedding"]["block"], axis=1)
        return (self.rows[ids].astype(np.float32) * scales).astype(np.float16)

    def forward(self, tokens: Sequence[int], row: int = -1) -> Array:
        """Logits [R, V'] of S tokens behind the committed ones: of all, or of `row` where a width returns one."""
        S, M = len(tokens), self.meta["max_context"]
        W = min(width for width in self.meta["widths"] if width >= S)
        ids = [*tokens, *[tokens[-1]] * (W - S)]
        feeds: dict[str, Array] = {"x": columns(self.embedded(ids))}
        positions = self.length + np.minimum(np.arange(W), S - 1)
        for kind, record in self.meta["rope"].items():
            cos, sin = rope_rows(record, positions)
            feeds |= {f"cos_{kind}": columns(cos), f"sin_{kind}": columns(sin)}
        for name in self.meta["masks"]:
            window = self.meta["sliding_window"] if name == "sliding" else None
            mask = np.where(visible(self.length, S, W, M, window), 0.0, self.meta["masked"])
            feeds[f"mask_{name}"] = columns(mask.astype(np.float16))  # keys on the channel axis
        feeds |= {f"past_{name}": values for name, values in self.past.items()}
        R = self.meta["rows"][str(W)]
        if R < W:
            feeds["select"] = (np.arange(W) == row % S).astype(np.float16)[None, None, :, None]
        self.present = self.run(W, feeds)
        pieces = [self.present[f"logits_{index}"] for index in range(len(self.meta["head"]))]
        return np.concatenate(pieces, axis=1)[0, :, 0, : min(S, R)].T.astype(np.float32)

    def commit(self, count: int) -> None:
        """Copy the first columns of the last forward into the cache."""
        for name, values in self.past.items():
            values[..., self.length : self.length + count] = self.present[f"present_{name}"][..., :count]
        self.length += count


def columns(rows: Array) -> Array:
    """[W, C] -> [1, C, 1, W]."""
    return np.ascontiguousarray(rows.T)[None, :, None]


class StateGraph:
    """A Core ML package of the `state` profile: it keeps its own cache, and a commit only moves `length`."""

    def __init__(
        self, meta: Mapping[str, Any], run: Callable[[Mapping[str, Array]], Mapping[str, Array]]
    ) -> None:
        self.meta, self.run, self.length = meta, run, 0

    def forward(self, tokens: Sequence[int]) -> Array:
        """Logits [S, V] of tokens behind the committed ones; at most as many as one call takes."""
        S, M, P = len(tokens), self.meta["max_context"], self.length
        W = min(width for width in self.meta["widths"] or (S,) if width >= S)
        taken = np.minimum(np.arange(W), S - 1)
        feeds: dict[str, Array] = {
            "tokens": np.array(tokens, np.int32)[taken][None],
            "begin": np.array([P], np.int32),
        }
        for kind, record in self.meta["rope"].items():
            feeds[f"cos_{kind}"], feeds[f"sin_{kind}"] = rope_rows(record, P + taken)
        for name in self.meta["masks"]:
            window = self.meta["sliding_window"] if name == "sliding" else None
            allowed = np.zeros((W, M), bool)
            for row in range(S):
                allowed[row, 0 if window is None else max(0, P + row - window + 1) : P + row + 1] = True
            allowed[np.arange(S, W), P + np.arange(S, W)] = True  # padding sees its own row
            feeds[f"mask_{name}"] = np.where(allowed, 0.0, self.meta["masked"]).astype(np.float16)[None, None]
        most = self.meta["rows"]
        if most is None:
            return self.run(feeds)["logits"][0, :S].astype(np.float32)
        parts = []
        for begin in range(0, S, most):  # a call may return fewer rows than it takes tokens: then once more
            feeds["rows"] = np.arange(begin, min(S, begin + most), dtype=np.int32)
            parts.append(self.run(feeds)["logits"][0].astype(np.float32))
        return np.concatenate(parts)

    def commit(self, count: int) -> None:
        """Keep the first rows of the last forward; what follows them is written over."""
        self.length += count


# The loop


def greedy_rounds(
    prompt: Sequence[int],
    target: FloatGraph | StateGraph,
    draft: FloatGraph | HalfGraph,
    vocab_map: Sequence[int],
    vocab_limit: int,
    k: int,
    count: int,
) -> tuple[list[int], int]:
    """`count` tokens after the prompt, drafted k at a time, and how many drafted tokens were accepted."""
    text, accepted = list(prompt), 0
    _prefill(target, prompt[:-1])
    _prefill(draft, prompt[:-1])
    while len(text) < len(prompt) + count:
        drafted: list[int] = []
        behind = text[draft.length :]  # the last token; after full acceptance the one before it as well
        while len(drafted) < k:
            column = int(draft.forward(behind)[-1].argmax())
            draft.commit(len(behind))
            drafted.append(vocab_map[column])
            behind = drafted[-1:]
        rows = target.forward([text[-1], *drafted])
        own = [int(row[:vocab_limit].argmax()) for row in rows]  # what follows only pads the embedding
        kept = 0
        while kept < k and own[kept] == drafted[kept]:
            kept += 1
        target.commit(1 + kept)  # the last token of the text, and the drafted ones that were kept
        text += own[: kept + 1]  # the kept ones are the target's own, and one more of its own
        draft.length = min(draft.length, len(text) - 1)  # rows of rejected tokens are written over
        accepted += kept
    return text[len(prompt) : len(prompt) + count], accepted


def _prefill(graph: FloatGraph | HalfGraph | StateGraph, tokens: Sequence[int]) -> None:
    widest = max(graph.meta["widths"] or (64,))
    for start in range(0, len(tokens), widest):
        chunk = tokens[start : start + widest]
        graph.forward(chunk)
        graph.commit(len(chunk))
