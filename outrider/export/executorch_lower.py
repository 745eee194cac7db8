"""From exported programs to a .pte: delegates, memory plan, and a report of what no delegate took."""

from __future__ import annotations

import logging
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ExportError, UsageError

__all__ = [
    "BACKENDS",
    "DelegateParts",
    "delegate_of",
    "lower",
    "quiet",
    "to_edge",
    "trace",
    "vendor_partitioner",
    "write_program",
]

Program = Any  # torch.export.ExportedProgram


def _xnnpack() -> list[Any]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return [XnnpackPartitioner()]


def _vulkan() -> list[Any]:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    # The 8-bit table stays with the CPU, which reads single rows: Vulkan would expand it to float, every time.
    return [VulkanPartitioner(nn_module_blocklist=["QuantizedEmbedding"])]


def _portable() -> list[Any]:
    return []


BACKENDS: dict[str, Callable[[], list[Any]]] = {
    "xnnpack": _xnnpack,
    "vulkan": _vulkan,
    "portable": _portable,
}
"""Partitioners that lower on any host; `portable` leaves everything to the reference kernels."""

VENDORS = {
    "qualcomm": "the Qualcomm AI Engine Direct SDK (QAIRT), unpacked, with QNN_SDK_ROOT naming its folder",
    "mediatek": "the NeuroPilot Express SDK for ExecuTorch: its wheels mtk_converter and mtk_neuron",
    "samsung": "the Exynos AI LiteCore SDK: its folder in EXYNOS_AI_LITECORE_ROOT and its Python binding built",
    "nxp": "the eIQ Neutron SDK: its wheels eiq_neutron_sdk and eiq_nsys",
    "openvino": "OpenVINO and its weight compressor: pip install openvino nncf",
    "arm": "the TOSA tools and Vela: pip install tosa-tools ethos-u-vela",
}
"""Backends that ExecuTorch knows and that need what cannot be fetched here."""


def vendor_partitioner(name: str) -> Any:
    """Raise ExportError that says which SDK lowering for a vendor's accelerator needs.

    UsageError for a name that is none. No vendor path is built in: it could not be tried on this side, and
    ONNX Runtime's QNN provider reaches Qualcomm's NPU without an SDK.
    """
    if name not in VENDORS:
        known = ", ".join([*BACKENDS, *VENDORS])
        raise UsageError(f"unknown ExecuTorch backend {name!r}; known: {known}")
    instead = "; use --device, which reaches the NPU through onnxruntime-qnn" if name == "qualcomm" else ""
    raise ExportError(
        f"lowering to {name!r} through ExecuTorch needs {VENDORS[name]}. It is not part of the executorch "
        f"wheel, and this version does not drive it{instead}. Backends that need no SDK: {', '.join(BACKENDS)}"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """ExecuTorch, its delegates and torchao log and warn about their own internals, at import and in every pass.

    torch's structured trace goes too: as long as it has a handler, writing to it doubles the time of an export.
    """
    root, traced = logging.getLogger(), logging.getLogger("torch.__trace")
    level, disabled, kept = root.level, root.manager.disable, [list(root.handlers), list(traced.handlers)]
    logging.disable(logging.ERROR)
    traced.handlers.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:], traced.handlers[:] = kept


def trace(module: Any, arguments: tuple[Any, ...], shapes: Any = None) -> Program:
    """The exported program of a module; `shapes` are torch.export's dynamic ones."""
    import torch

    program = torch.export.export(
        module,
        arguments,
        dynamic_shapes=shapes,
        strict=False,
        # Reshapes ask whether min(64, 128 S) S == 64 S, which holds for every S, but is not simplified.
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    for node in list(program.graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target):
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    return program


def to_edge(programs: Mapping[str, Program], backend: str) -> Any:
    """Programs in ExecuTorch's edge dialect, lowered to the delegates of a backend."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    return to_edge_transform_and_lower(
        dict(programs),
        partitioner=BACKENDS[backend](),
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )


def lower(programs: Mapping[str, Program], backend: str, path: Path) -> dict[str, Any]:
    """Write the methods to a .pte and say what became of their operators, by method.

    Every report holds `delegates`, `delegated` (operators in them), `products` (integer products in them),
    `left` (operator -> how many run on no delegate) and `float_products` (integer weights that run in float).
    """
    edge = to_edge(programs, backend)
    inside = {name: inside_report(edge.exported_program(name).graph_module) for name in programs}
    outside = write_program(edge, path, buffers=False)
    return {name: inside[name] | outside[name] for name in programs}


def write_program(edge: Any, path: Path, *, buffers: bool) -> dict[str, Any]:
    """Plan the memory, write the .pte, and say what runs on no delegate, by method.

    `buffers`: the programs update mutable buffers, which must happen in place. Raises ExportError when a
    whole cache would be copied instead.
    """
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    lowered = edge.to_executorch(
        ExecutorchBackendConfig(
            extract_delegate_segments=True,
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
            do_quant_fusion_and_const_prop=True,  # else an 8-bit embedding has no kernel
            run_reinplace_pass=buffers,  # else every cache is copied whole, twice a layer
            emit_mutable_buffer_names=buffers,  # a host that can name a cache moves rows of it
        )
    )
    report = {name: _outside(lowered.exported_program(name).graph_module) for name in lowered.methods}
    for name, method in report.items():
        if buffers and any(op.startswith("aten.copy_") for op in method["left"]):
            raise ExportError(
                f"method {name!r} copies whole caches ({method['left']}); index_copy_ was not updated in place"
            )
    with path.open("wb") as file:
        lowered.write_to_file(file)
    return report


@dataclass(frozen=True)
class DelegateParts:
    """The one delegate of a part: where its inputs come from, and its outputs as indices into the part's.

    An input is an index into the part's inputs, or the name of a constant: XNNPACK owns the weights of
    products, and takes what elementary operators read from outside. `scalars` are such constants that no
    parameter of the part names. `shapes` are those of the delegate's outputs, None = the number of tokens.
    """

    lowered: Any
    order: tuple[int | str, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int | None, ...], ...]
    scalars: dict[str, Any]
    report: dict[str, Any]


def delegate_of(program: Program) -> DelegateParts:
    """Lower a part for XNNPACK. Raises ExportError unless one delegate takes all of it."""
    from executorch.exir.lowered_backend_module import get_lowered_submodules

    lowered_program = to_edge({"forward": program}, "xnnpack").exported_program()
    module, signature = lowered_program.graph_module, lowered_program.graph_signature
    delegates = get_lowered_submodules(module)
    left = Counter(_name(node) for node in _operators(module.graph))
    if len(delegates) != 1 or left:
        raise ExportError(
            f"XNNPACK took a part of the decoder in {len(delegates)} pieces and left {dict(left)}; "
            "this version of executorch partitions otherwise than 1.5"
        )
    _, lowered, call = delegates[0]
    inputs = list(signature.user_inputs)
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    named |= signature.inputs_to_lifted_tensor_constants
    order = tuple(
        inputs.index(node.name) if node.name in inputs else named[node.name] for node in call.args[1:]
    )
    values = {**lowered_program.constants, **lowered_program.state_dict}
    known = {*program.state_dict}
    return DelegateParts(
        lowered=lowered,
        order=order,
        outputs=tuple(node.args[1] for node in module.graph.output_node().args[0]),
        shapes=tuple(_sizes(value) for value in call.meta["val"]),
        scalars={name: values[name] for name in order if isinstance(name, str) and name not in known},
        report=inside_report(module),
    )


def _tensor() -> type:
    import torch

    return torch.Tensor


def _sizes(value: Any) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def inside_report(module: Any) -> dict[str, Any]:
    """What the delegates of a program hold."""
    from executorch.exir.lowered_backend_module import get_lowered_submodules

    delegates = [lowered for _, lowered, _ in get_lowered_submodules(module)]
    return {
        "delegates": len(delegates),
        "delegated": sum(len(_operators(lowered.original_module.graph)) for lowered in delegates),
        "products": sum(_integer_products(lowered) for lowered in delegates),
    }


def _outside(module: Any) -> dict[str, Any]:
    """What runs on no delegate."""
    nodes = _operators(module.graph)
    left = Counter(_name(node) for node in nodes)
    floats = sum(count for name, count in left.items() if "dequantize_affine" in name)
    return {"left": dict(sorted(left.items())), "float_products": floats}


SKIPPED = ("alloc", "executorch_call_delegate", "free", "view")  # memory plan and calls, not computation


def _operators(graph: Any) -> list[Any]:
    """What computes tensors; sizes and assertions about them cost nothing."""
    calls = [
        node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem
    ]
    calls = [node for node in calls if getattr(node.target, "__name__", "") not in SKIPPED]
    return [node for node in calls if isinstance(node.meta.get("val"), (_tensor(), tuple, list))]


def _name(node: Any) -> str:
    """Such as `aten.index_put_` or `torchao.dequantize_affine`."""
    name = str(getattr(node.target, "__name__", node.target))
    space = getattr(node.target, "namespace", "") or "aten"
    parts = name.split(".")
    return parts[0] + "." + parts[1] if parts[0] == space else f"{space}.{parts[0]}"


VULKAN_PRODUCT = re.compile(rb"et_vk\.linear_\w*q4gsw\.default")  # the operator's name at every call


def _integer_products(lowered: Any) -> int:
    """Products with constant integer weights: for XNNPACK a pattern of operators, for Vulkan an operator."""
    if lowered.backend_id == "VulkanBackend":
        return len(VULKAN_PRODUCT.findall(lowered.processed_bytes))
    products = [node for node in _operators(lowered.original_module.graph) if "linear" in _name(node)]
    weights = [node.args[1] for node in products]
    return sum(weight.op == "call_function" and "dequantize" in _name(weight) for weight in weights)
