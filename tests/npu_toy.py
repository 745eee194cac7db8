"""A two-layer decoder as static uint16 QDQ graphs, written by hand: what the NPU backend is tested with.

`FloatModel.logits` is the float model in plain numpy; the graphs are its operators one for one, with a scale
on every activation. One layer attends to everything, the other through a window of `WINDOW` positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

D, H, G, HEAD, L, V, M, WINDOW = 32, 4, 2, 8, 2, 96, 40, 6
KINDS = ("full", "sliding")  # of the layers
THETA = {"full": 10000.0, "sliding": 100.0}
MASKED = -40.0
STEP = 32  # of the embedding's grid: one part in so many
MARGIN = 1.2  # on calibrated ranges: other texts reach a little further
WIDTHS = (1, 2, 8, 16)
SOC_MODEL, HTP_ARCH = "57", "75"
KEEP_SCALE = {"Reshape", "Transpose", "Slice", "Concat", "Gather"}  # what moves numbers only


def inv_freq(kind: str) -> NDArray[np.float64]:
    return THETA[kind] ** (-np.arange(0, HEAD, 2) / HEAD)


class FloatModel:
    """Random weights, and the float logits of plain sequences."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
            values = rng.standard_normal((rows, columns)) * gain / rows**0.5
            scale = np.abs(values).max(axis=0) / 127  # exact in 8 bits, so that activations alone err
            return (np.round(values / scale) * scale).astype(np.float32)

        self.embedding = rng.standard_normal((V, D)).astype(np.float32)
        self.embedding = np.round(self.embedding * STEP).clip(-127, 127) / STEP  # exact in 8 bits
        self.layers = [
            {
                "q": matrix(D, H * HEAD, 2.0),
                "k": matrix(D, G * HEAD, 2.0),
                "v": matrix(D, G * HEAD),
                "o": matrix(H * HEAD, D),
                "up": matrix(D, 2 * D),
                "down": matrix(2 * D, D),
            }
            for _ in range(L)
        ]
        self.head = matrix(D, V, 2.0)

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """[S, V]"""
        S = len(tokens)
        x = self.embedding[tokens].astype(np.float64)
        distance = np.arange(S)[:, None] - np.arange(S)[None]
        for kind, w in zip(KINDS, self.layers, strict=True):
            seen = (distance >= 0) & (distance < (WINDOW if kind == "sliding" else S))
            q, k, v = (
                (x @ w[name]).reshape(S, -1, HEAD).transpose(1, 0, 2) for name in ("q", "k", "v")
            )  # [heads, S, d]
            q, k = rotate(q, kind) / HEAD**0.5, rotate(k, kind)
            k, v = (np.repeat(part, H // G, axis=0) for part in (k, v))
            scores = np.where(seen, q @ k.transpose(0, 2, 1), -np.inf)
            chance = np.exp(scores - scores.max(-1, keepdims=True))
            chance /= chance.sum(-1, keepdims=True)
            x = x + (chance @ v).transpose(1, 0, 2).reshape(S, -1) @ w["o"]
            x = x + 1 / (1 + np.exp(-x @ w["up"])) @ w["down"]
        return (x @ self.head).astype(np.float32)


def rotate(x: NDArray[Any], kind: str) -> NDArray[Any]:
    angles = np.arange(x.shape[1])[:, None] * inv_freq(kind)
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class FloatGraph:
    """The float ONNX graph of one width."""

    def __init__(self, model: FloatModel, W: int) -> None:
        self.W, self.R = W, W if W <= 8 else 1
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, NDArray[Any]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {"x": (1, W, D)}
        self.outputs: dict[str, tuple[int, ...]] = {"logits": (1, self.R, V)}
        for kind in KINDS:
            self.shapes[f"mask_{kind}"] = (1, 1, W, M + W)
            self.shapes[f"cos_{kind}"] = self.shapes[f"sin_{kind}"] = (1, 1, W, HEAD // 2)
        x = "x"
        for layer, (kind, weights) in enumerate(zip(KINDS, model.layers, strict=True)):
            x = self._layer(layer, kind, weights, x)
        picked = self.op("Gather", [x, "rows"], "picked", axis=1)
        self.op("MatMul", [picked, self.weight("head", model.head)], "logits")

    def op(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [name], name=f"n_{name}", **attributes))
        return name

    def weight(self, name: str, values: NDArray[np.float32]) -> str:
        self.constants[f"W_{name}"] = values
        return f"W_{name}"

    def ints(self, *values: int) -> str:
        name = "i_" + "_".join(str(v).replace("-", "m") for v in values)
        self.constants[name] = np.array(values, np.int64)
        return name

    def reshape(self, x: str, name: str, *shape: int) -> str:
        return self.op("Reshape", [x, self.ints(*shape)], name)

    def slice(self, x: str, name: str, start: int, end: int, axis: int) -> str:
        return self.op("Slice", [x, self.ints(start), self.ints(end), self.ints(axis)], name)

    def _rope(self, x: str, kind: str) -> str:
        half = HEAD // 2
        first, second = self.slice(x, f"{x}_a", 0, half, 3), self.slice(x, f"{x}_b", half, HEAD, 3)
        uses = {"ac": (first, "cos"), "bs": (second, "sin"), "bc": (second, "cos"), "as": (first, "sin")}
        parts = {
            name: self.op("Mul", [part, f"{table}_{kind}"], f"{x}_{name}")
            for name, (part, table) in uses.items()
        }
        turned = [
            self.op("Sub", [parts["ac"], parts["bs"]], f"{x}_r1"),
            self.op("Add", [parts["bc"], parts["as"]], f"{x}_r2"),
        ]
        return self.op("Concat", turned, f"{x}_rope", axis=3)

    def _layer(self, layer: int, kind: str, w: dict[str, NDArray[np.float32]], x: str) -> str:
        W, name = self.W, f"l{layer}"
        scaled = {**w, "q": w["q"] / np.float32(HEAD**0.5)}
        heads = {}
        for part, count in (("q", H), ("k", G), ("v", G)):
            flat = self.op("MatMul", [x, self.weight(f"{name}_{part}", scaled[part])], f"{name}_{part}flat")
            split = self.reshape(flat, f"{name}_{part}split", 1, W, count, HEAD)
            heads[part] = self.op("Transpose", [split], f"{name}_{part}", perm=[0, 2, 1, 3])
        q, key = self._rope(heads["q"], kind), self._rope(heads["k"], kind)
        keys = self.op("Transpose", [key], f"present_key_{layer}", perm=[0, 1, 3, 2])
        values = self.op("Identity", [heads["v"]], f"present_value_{layer}")
        self.outputs[keys], self.outputs[values] = (1, G, HEAD, W), (1, G, W, HEAD)
        past_key, past_value = f"past_key_{layer}", f"past_value_{layer}"
        self.shapes[past_key], self.shapes[past_value] = (1, G, HEAD, M), (1, G, M, HEAD)
        all_keys = self.op("Concat", [past_key, keys], f"{name}_keys", axis=3)
        all_values = self.op("Concat", [past_value, values], f"{name}_values", axis=2)
        folded = self.reshape(q, f"{name}_folded", 1, G, H // G * W, HEAD)
        scores = self.op("MatMul", [folded, all_keys], f"{name}_scores")
        wide = self.reshape(scores, f"{name}_wide", 1, H, W, M + W)
        masked = self.op("Add", [wide, f"mask_{kind}"], f"{name}_masked")
        chance = self.op("Softmax", [masked], f"{name}_chance", axis=-1)
        chance = self.reshape(chance, f"{name}_chancef", 1, G, H // G * W, M + W)
        context = self.op("MatMul", [chance, all_values], f"{name}_context")
        context = self.reshape(context, f"{name}_contexth", 1, H, W, HEAD)
        context = self.op("Transpose", [context], f"{name}_contextt", perm=[0, 2, 1, 3])
        context = self.reshape(context, f"{name}_contextf", 1, W, H * HEAD)
        update = self.op("MatMul", [context, self.weight(f"{name}_o", w["o"])], f"{name}_update")
        x = self.op("Add", [x, update], f"{name}_x")
        up = self.op("MatMul", [x, self.weight(f"{name}_up", w["up"])], f"{name}_upped")
        act = self.op("Sigmoid", [up], f"{name}_act")
        down = self.op("MatMul", [act, self.weight(f"{name}_down", w["down"])], f"{name}_downed")
        return self.op("Add", [x, down], f"{name}_out")

    def activations(self) -> list[str]:
        return [*self.shapes, *(node.output[0] for node in self.nodes)]


def model_of(graph: FloatGraph, nodes: list[Any], kind: int, outputs: dict[str, Any], constants: Any) -> Any:
    inputs = [helper.make_tensor_value_info(n, kind, s) for n, s in graph.shapes.items()]
    inputs.append(helper.make_tensor_value_info("rows", TensorProto.INT32, (graph.R,)))
    out = [helper.make_tensor_value_info(n, kind, s) for n, s in outputs.items()]
    proto = helper.make_graph(nodes, "toy", inputs, out, constants)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def tensors(values: dict[str, NDArray[Any]]) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(array, name) for name, array in values.items()]


def calibrate(model: FloatModel, sequences: list[list[int]]) -> dict[str, tuple[float, float]]:
    """The range of every activation while the float graph reads each sequence in one piece."""
    W = max(WIDTHS)
    graph = FloatGraph(model, W)
    outputs = dict.fromkeys(node.output[0] for node in graph.nodes)
    made = model_of(graph, graph.nodes, TensorProto.FLOAT, outputs, tensors(graph.constants))
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {name: np.zeros(shape, np.float32) for name, shape in graph.shapes.items()}
    distance = np.arange(W)[:, None] - np.arange(W)[None]
    for kind in KINDS:
        reach = WINDOW if kind == "sliding" else W
        mask = np.full((W, M + W), MASKED, np.float32)
        mask[:, M:] = np.where((distance >= 0) & (distance < reach), 0, MASKED)
        feeds[f"mask_{kind}"][0, 0] = mask
        angles = np.arange(W)[:, None] * inv_freq(kind)
        feeds[f"cos_{kind}"][0, 0], feeds[f"sin_{kind}"][0, 0] = np.cos(angles), np.sin(angles)
    ranges: dict[str, tuple[float, float]] = {}
    for index, tokens in enumerate(sequences):
        feeds["x"][0] = model.embedding[tokens]
        feeds["rows"] = np.array([index % W], np.int32)
        found = dict(zip(outputs, session.run(list(outputs), feeds), strict=True))
        for name, values in {**feeds, **found}.items():
            low, high = ranges.get(name, (0.0, 0.0))
            ranges[name] = (min(low, float(values.min())), max(high, float(values.max())))
    ranges = {name: (MARGIN * low, MARGIN * high) for name, (low, high) in ranges.items()}
    for kind in KINDS:
        ranges[f"cos_{kind}"] = ranges[f"sin_{kind}"] = (-1.0, 1.0)
        ranges[f"mask_{kind}"] = (MASKED, 0.0)
    ranges |= {n: (0.0, 1.0) for n in ranges if n.endswith("_act")}
    ranges |= {n: (0.0, 1.0) for n in ranges if "_chance" in n}
    return {**ranges, "x": (float(model.embedding.min()), float(model.embedding.max()))}


def scales_of(graph: FloatGraph, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
    """Scale and zero point of every activation; what only moves numbers keeps one scale on both sides."""
    leader = {name: name for name in graph.activations()}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for node in graph.nodes:
        if node.op_type in KEEP_SCALE | {"Identity"}:
            for name in node.input:
                if name in leader:
                    leader[find(name)] = find(node.output[0])
    groups: dict[str, list[str]] = {}
    for name in leader:
        groups.setdefault(find(name), []).append(name)
    scales = {}
    for names in groups.values():
        low = min(0.0, *(ranges[name][0] for name in names if name[:5] != "past_"))
        high = max(0.0, *(ranges[name][1] for name in names if name[:5] != "past_"))
        scale = np.float32((high - low or 1.0) / 65535)
        for name in names:
            scales[name] = (float(scale), round(-low / float(scale)))
    return scales


def quantized(graph: FloatGraph, scales: dict[str, tuple[float, int]]) -> onnx.ModelProto:
    """The QDQ model: uint16 activations, int8 weights per output channel."""
    nodes, constants = [], {}
    for name, values in graph.constants.items():
        if not name.startswith("W_"):
            constants[name] = values
            continue
        scale = (np.abs(values).max(axis=0) / 127).astype(np.float32)
        constants[f"{name}_q"] = np.round(values / scale).astype(np.int8)
        constants[f"{name}_s"], constants[f"{name}_z"] = scale, np.zeros(len(scale), np.int8)
        weight = [f"{name}_q", f"{name}_s", f"{name}_z"]
        nodes.append(helper.make_node("DequantizeLinear", weight, [name], axis=1))

    def pair(name: str) -> list[str]:
        scale, zero = scales[name]
        constants[f"{name}_s"], constants[f"{name}_z"] = np.float32(scale), np.uint16(zero)
        return [f"{name}_s", f"{name}_z"]

    def as_int16(name: str) -> str:
        """Without this the HTP reads the other operand of a product of two activations with 8 bits."""
        scale, zero = scales[name]
        constants[f"{name}_is"] = np.float32(scale * max(zero, 65535 - zero) / 32767)
        constants[f"{name}_iz"] = np.int16(0)
        pair16 = [f"{name}_is", f"{name}_iz"]
        nodes.append(helper.make_node("QuantizeLinear", [f"{name}_f", *pair16], [f"{name}_i"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_i", *pair16], [f"{name}_if"]))
        return f"{name}_if"

    nodes += [
        helper.make_node("DequantizeLinear", [name, *pair(name)], [f"{name}_f"]) for name in graph.shapes
    ]
    for node in graph.nodes:
        (name,) = node.output
        inputs = [f"{i}_f" if i in scales else i for i in node.input]
        if node.op_type == "MatMul" and all(i in scales for i in node.input):
            inputs[0] = as_int16(node.input[0])
        raw = helper.make_node(node.op_type, inputs, [f"{name}_raw"], name=node.name)
        raw.attribute.extend(node.attribute)
        nodes.append(raw)
        nodes.append(helper.make_node("QuantizeLinear", [f"{name}_raw", *pair(name)], [name]))
        nodes.append(helper.make_node("DequantizeLinear", [name, *pair(name)], [f"{name}_f"]))
    return model_of(graph, nodes, TensorProto.UINT16, graph.outputs, tensors(constants))


def write(folder: Path, model: FloatModel) -> dict[str, Any]:
    """Write w<W>.onnx and the embedding; returns the meta that belongs to them."""
    ranges = calibrate(model, np.random.default_rng(5).integers(0, V, (64, max(WIDTHS))).tolist())
    for W in WIDTHS:
        graph = FloatGraph(model, W)
        scales = scales_of(graph, ranges)
        onnx.save(quantized(graph, scales), folder / f"w{W}.onnx")
        edges = {name: list(scales[name]) for name in (*graph.shapes, *graph.outputs)}
    (folder / "embedding.i8").write_bytes(
        np.round(model.embedding * STEP).astype(np.int8).tobytes() + np.full(V, 1 / STEP, "<f2").tobytes()
    )
    return {
        "profile": "split",
        "widths": list(WIDTHS),
        "max_context": M,
        "vocab_size": V,
        "hidden_size": D,
        "layers": L,
        "kv_heads": G,
        "head_dim": HEAD,
        "hidden_layers": [],
        "masks": list(KINDS),
        "sliding_window": WINDOW,
        "scales": edges,
        "masked": MASKED,
        "rope": {kind: {"inv_freq": inv_freq(kind).tolist(), "scale": 1.0} for kind in KINDS},
        "rows": {str(W): FloatGraph(model, W).R for W in WIDTHS},
        "functions": {str(W): f"w{W}.onnx" for W in WIDTHS},
        "embedding": {
            "dtype": "int8",
            "rows": V,
            "columns": D,
            "block": D,
            "scale_dtype": "float16",
            "scales_offset": V * D,
        },
        "soc_model": SOC_MODEL,
        "htp_arch": HTP_ARCH,
    }
