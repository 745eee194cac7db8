"""Weights of Core ML packages are decoded as coremltools wrote them: the blob file, and every compressed form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import BackendError
from outrider.targets.coreml_reference import MilProgram
from outrider.targets.coreml_reference import constexpr as decode
from outrider.targets.coreml_reference.blob import BlobFile, unpack_bits
from outrider.targets.coreml_reference.types import MilType
from tests.mil_packages import IOS18, WEIGHTS, convert, ct, grid, mb, program, spec, traced, types

pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
HALF = np.float16
RNG = np.random.default_rng(7)
WRITERS = {
    "fp32": ("float", -4, 4, np.float32), "fp16": ("fp16", -4, 4, np.float16),
    "int32": ("int32", -(2**31), 2**31, np.int32), "uint32": ("uint32", 0, 2**32, np.uint32),
    "int16": ("int16", -(2**15), 2**15, np.int16), "uint16": ("uint16", 0, 2**16, np.uint16),
    "int8": ("int8", -128, 128, np.int8), "uint8": ("uint8", 0, 256, np.uint8),
    "int4": ("int4", -8, 8, np.int8), "uint6": ("uint6", 0, 64, np.uint8), "uint4": ("uint4", 0, 16, np.uint8),
    "uint3": ("uint3", 0, 8, np.uint8), "uint2": ("uint2", 0, 4, np.uint8), "uint1": ("uint1", 0, 2, np.uint8),
}  # fmt: skip


def test_every_element_type_of_a_weight_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """37 elements: no type below 8 bits ends on a byte."""
    writers = pytest.importorskip("coremltools.libmilstoragepython")
    path = tmp_path / "weight.bin"
    writer, written = writers._BlobStorageWriter(str(path)), {}
    for dtype, (name, low, high, kind) in WRITERS.items():
        values = (RNG.random(37) * (high - low) + low).astype(kind)
        raw = values.view(np.uint16) if dtype == "fp16" else values
        written[dtype] = values, getattr(writer, f"write_{name}_data")(raw)
    del writer
    file = BlobFile(path)
    for dtype, (values, offset) in written.items():
        read = file.read(offset, MilType(dtype, (37,)))
        assert read.dtype == values.dtype
        assert np.array_equal(read, values), dtype


@given(bits=st.integers(1, 7), values=st.lists(st.integers(0, 255), max_size=40), signed=st.booleans())
def test_packed_elements_of_any_width_are_unpacked(bits: int, values: list[int], signed: bool) -> None:
    low = -(1 << (bits - 1)) if signed else 0
    elements = [low + value % (1 << bits) for value in values]
    stream = sum((value & ((1 << bits) - 1)) << (bits * at) for at, value in enumerate(elements))
    size = (len(elements) * bits + 7) // 8
    packed = np.frombuffer(stream.to_bytes(size, "little"), np.uint8)
    assert unpack_bits(packed, bits, len(elements), signed=signed).tolist() == elements


def unsigned(bits: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 1 << bits, shape).astype(np.uint8)


def typed(values: np.ndarray, name: str) -> np.ndarray:
    """An array that coremltools takes for a sub-byte type."""
    kind = getattr(types, f"np_{name}_dtype", None) or np.dtype(name)
    return values.astype(kind)


def decoded(path: Path, build: Callable[[], Any]) -> tuple[np.ndarray, np.ndarray]:
    """A compressed constant as the evaluator reads it from the saved package, and as coremltools decompresses it."""
    expected: list[np.ndarray] = []

    def body(x: Any) -> Any:
        weight = build()
        value = weight.op.materialized_val_inference()
        expected.append(value[1] if isinstance(value, tuple) else value)
        return mb.add(x=x, y=weight, name="y")

    shape: list[tuple[int, ...]] = []
    mb.program(input_specs=[], opset_version=IOS18)(lambda: shape.append(build().shape) or mb.const(val=0.0))
    saved = program(path, [spec(*shape[0])], body)
    y = MilProgram.load(saved).predict({"x": np.zeros(shape[0], HALF)})["y"]
    return y, expected[0]


def lut(bits: int, *blocks: int, size: int = 1) -> np.ndarray:
    return grid(*blocks, 1 << bits, size, seed=bits)


BLOCKWISE = [
    ("int4", np.int8, -8, 8, (8, 12), (8, 3), None),
    ("int4", np.int8, -8, 8, (8, 12), (2, 1), "int4"),
    ("uint4", np.uint8, 0, 16, (8, 12), (8, 4), "uint4"),
    ("int8", np.int8, -128, 128, (8, 12), (8, 1), None),
    ("uint8", np.uint8, 0, 256, (8, 12), (1, 12), "uint8"),
    ("int8", np.int8, -128, 128, (8, 12, 1, 1), (8, 6, 1, 1), "float16"),
]


@pytest.mark.parametrize(("dtype", "kind", "low", "high", "shape", "blocks", "offset"), BLOCKWISE)
def test_block_wise_scales_and_offsets(
    dtype: str, kind: Any, low: int, high: int, shape: Any, blocks: Any, offset: str | None, tmp_path: Path
) -> None:
    data = typed(RNG.integers(low, high, shape).astype(kind), dtype)
    given, first = {"data": data, "scale": grid(*blocks, seed=2)}, 0
    if offset is not None:
        integers = RNG.integers(low, high, blocks).astype(kind)
        given["offset"], first = typed(integers, offset), int(integers.reshape(-1)[0])
    found, expected = decoded(tmp_path / "p.mlpackage", lambda: mb.constexpr_blockwise_shift_scale(**given))
    assert np.array_equal(found, expected)
    assert found[0, 0].item() == HALF(
        (float(data[0, 0].item()) - first) * np.float32(given["scale"][(0,) * len(shape)])
    )


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("groups", [(1, 1), (4, 1), (2, 3)], ids=str)
def test_palettes_of_every_width_by_group(bits: int, groups: tuple[int, int], tmp_path: Path) -> None:
    indices, table = typed(unsigned(bits, 8, 12), f"uint{bits}"), lut(bits, *groups)
    found, expected = decoded(
        tmp_path / "p.mlpackage", lambda: mb.constexpr_lut_to_dense(indices=indices, lut=table)
    )
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_palettes_of_vectors(axis: int, tmp_path: Path) -> None:
    indices, table = typed(unsigned(2, 4, 6), "uint2"), lut(2, 2, 1, size=3)
    found, expected = decoded(
        tmp_path / "p.mlpackage",
        lambda: mb.constexpr_lut_to_dense(indices=indices, lut=table, vector_axis=np.int32(axis)),
    )
    assert np.array_equal(found, expected)


def sparse() -> tuple[np.ndarray, int]:
    mask = (RNG.random((8, 12)) < 0.4).astype(np.uint8)
    return mask, int(mask.sum())


def test_sparse_weights(tmp_path: Path) -> None:
    mask, count = sparse()
    values = grid(count, seed=3)
    found, expected = decoded(
        tmp_path / "p.mlpackage",
        lambda: mb.constexpr_sparse_to_dense(nonzero_data=values, mask=typed(mask, "uint1")),
    )
    assert np.array_equal(found, expected)
    assert np.array_equal(found[mask != 0], values)


def test_sparse_weights_from_a_palette(tmp_path: Path) -> None:
    mask, count = sparse()
    indices, table = unsigned(2, count), lut(2, 2, 1)

    def build() -> Any:
        both = mb.constexpr_lut_to_sparse(
            indices_mask=typed(mask, "uint1"), indices_nonzero_data=typed(indices, "uint2"), lut=table
        )
        return mb.constexpr_sparse_to_dense(nonzero_data=both[1], mask=both[0])

    dense = np.zeros(mask.shape, HALF)
    rows, columns = np.nonzero(mask)
    dense[rows, columns] = table[rows // 4, 0, indices, 0]
    assert np.array_equal(loaded(tmp_path, build, mask.shape), dense)


def test_sparse_weights_with_scales(tmp_path: Path) -> None:
    mask, count = sparse()
    values, scale = RNG.integers(-8, 8, count).astype(np.int8), grid(1, 12, seed=4)

    def build() -> Any:
        both = mb.constexpr_sparse_blockwise_shift_scale(
            data_mask=typed(mask, "uint1"), nonzero_data=typed(values, "int4"), scale=scale
        )
        return mb.constexpr_sparse_to_dense(nonzero_data=both[1], mask=both[0])

    dense = np.zeros(mask.shape, HALF)
    dense[mask != 0] = values * scale[0, np.nonzero(mask)[1]]
    assert np.array_equal(loaded(tmp_path, build, mask.shape), dense)


def loaded(place: Path, build: Callable[[], Any], shape: tuple[int, ...]) -> np.ndarray:
    saved = program(place / "p.mlpackage", [spec(*shape)], lambda x: mb.add(x=x, y=build(), name="y"))
    return MilProgram.load(saved).predict({"x": np.zeros(shape, HALF)})["y"]


def test_scales_of_scales_are_decoded_through(tmp_path: Path) -> None:
    """A palette in int8 with block-wise scales on top of it, as joint compression writes."""
    indices = typed(unsigned(4, 8, 12), "uint4")
    table = RNG.integers(-128, 128, (1, 1, 16, 1)).astype(np.int8)
    scale = grid(8, 1, seed=5)

    def build() -> Any:
        palette = mb.constexpr_lut_to_dense(indices=indices, lut=table)
        return mb.constexpr_blockwise_shift_scale(data=palette, scale=scale)

    expected = (table[0, 0, :, 0][indices.astype(int)] * scale.astype(np.float32)).astype(HALF)
    assert np.array_equal(loaded(tmp_path, build, (8, 12)), expected)


@pytest.mark.parametrize("target", ["iOS16", "iOS18"])
@pytest.mark.parametrize("form", ["affine", "palette", "sparse"])
def test_what_coremltools_compresses_is_run_with_the_weights_it_says(
    form: str, target: str, tmp_path: Path
) -> None:
    import coremltools.optimize.coreml as cto
    import torch

    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 64, bias=False)
    x = grid(3, 64)
    path = convert(
        tmp_path / "p.mlpackage", traced(linear, torch.zeros(3, 64)), getattr(ct.target, target),
        inputs=[ct.TensorType(name="x", shape=(3, 64), dtype=HALF)], outputs=[ct.TensorType(name="y", dtype=HALF)],
    )  # fmt: skip
    compress, config = {
        "affine": (
            cto.linear_quantize_weights,
            cto.OpLinearQuantizerConfig(mode="linear", weight_threshold=0),
        ),
        "palette": (
            cto.palettize_weights,
            cto.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=0),
        ),
        "sparse": (cto.prune_weights, cto.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=0)),
    }[form]
    model = ct.models.MLModel(str(path), skip_model_load=True)
    small = compress(model, cto.OptimizationConfig(global_config=config))
    small.save(str(tmp_path / "small.mlpackage"))
    plain = cto.decompress_weights(small)
    plain.save(str(tmp_path / "plain.mlpackage"))
    results = [
        MilProgram.load(tmp_path / f"{name}.mlpackage").predict({"x": x})["y"] for name in ("small", "plain")
    ]
    kinds = [
        each.type
        for each in MilProgram.load(tmp_path / "small.mlpackage").function("main").definition.operations
    ]
    assert any(kind.startswith("constexpr_") for kind in kinds)
    assert np.array_equal(*results)
    exact = MilProgram.load(path).predict({"x": x})["y"]
    assert 0 < np.abs(results[0] - exact).max() < 2


def test_a_compressed_table_that_is_looked_up_stays_in_fp16(tmp_path: Path) -> None:
    data, scale = RNG.integers(-128, 128, (400, 32)).astype(np.int8), grid(400, 1)

    def body(ids: Any) -> Any:
        table = mb.constexpr_blockwise_shift_scale(data=data, scale=scale)
        return mb.gather(x=table, indices=ids, axis=0, name="y")

    looked = MilProgram.load(program(tmp_path / "p.mlpackage", [spec(2, dtype=types.int32)], body))
    rows = looked.predict({"ids": np.array([399, 7], np.int32)})["y"]
    assert np.array_equal(rows, (data[[399, 7]] * scale[[399, 7]].astype(np.float32)).astype(HALF))
    assert looked.constant_bytes < 400 * 32 * 2 + 100


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda: decode.lut_to_dense(unsigned(2, 4, 6), lut(2, 3, 1)), "do not divide indices"),
        (lambda: decode.lut_to_dense(unsigned(2, 4, 6), lut(2, 1)), "need two axes more"),
        (lambda: decode.lut_to_dense(unsigned(2, 4), lut(2, 1, size=2)), "need a vector_axis"),
        (
            lambda: decode.blockwise_shift_scale(unsigned(4, 4, 48), grid(4, 5)),
            r"scales \[4, 5\] do not divide",
        ),
        (
            lambda: decode.blockwise_shift_scale(unsigned(4, 4, 4), grid(4, 1), grid(1, 4)),
            "do not match scales",
        ),
        (lambda: decode.sparse_to_dense(grid(3), np.ones((2, 2))), "3 values are given for 4 set bits"),
        (lambda: decode.cast(grid(3), "fp16"), "only fp32 is defined"),
        (lambda: decode.lut_to_dense(unsigned(8, 3), grid(16), shape=(4,)), "3 bytes of indices do not fill"),
    ],
)
def test_compressed_constants_that_do_not_fit_together_are_refused(compute: Any, said: str) -> None:
    with pytest.raises(BackendError, match=said):
        compute()


def test_a_whole_weight_file_is_not_copied(tmp_path: Path) -> None:
    """Values of 8 bits and more are views of the mapping."""
    path = program(
        tmp_path / "p.mlpackage", [spec(2, 32)], lambda x: mb.linear(x=x, weight=grid(64, 32), name="y")
    )
    read = BlobFile(path / WEIGHTS).read(64, MilType("fp16", (64, 32)))
    assert not read.flags.owndata
    assert not read.flags.writeable
