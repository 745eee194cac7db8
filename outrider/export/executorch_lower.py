"""From exported programs to a .pte: delegates, memory plan, and a report of what no delegate took."""

from __future__ import annotations

import logging
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import ExportError, MissingExtraError, UsageError

__all__ = ["BACKENDS", "lower", "quiet", "vendor_partitioner"]

Program = Any  # torch.export.ExportedProgram


def _xnnpack() -> list[Any]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return [XnnpackPartitioner()]


def _vulkan() -> list[Any]:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    return [VulkanPartitioner()]


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
    """ExecuTorch and torchao warn about their own internals at import and in every pass."""
    names = ("torchao", "executorch", "torch.export", "root", "torch.utils._pytree")
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def lower(programs: Mapping[str, Program], backend: str, path: Path, *, buffers: bool) -> dict[str, Any]:
    """Write the methods to a .pte and say what became of their operators, by method.

    `buffers`: the programs update mutable buffers, which must happen in place. Every report holds
    `delegates`, `delegated` (operators in them), `products` (integer products in them), `left` (operator ->
    how many run on no delegate) and `float_products` (integer weights that run in float, outside).
    Raises ExportError when a whole cache would be copied, MissingExtraError without executorch.
    """
    try:
        from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.exir.passes import MemoryPlanningPass
    except ImportError as error:
        raise MissingExtraError("executorch", "executorch") from error
    edge = to_edge_transform_and_lower(
        dict(programs),
        partitioner=BACKENDS[backend](),
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    inside = {name: _inside(edge.exported_program(name).graph_module) for name in programs}
    plan = MemoryPlanningPass(alloc_graph_input=False)
    lowered = edge.to_executorch(
        ExecutorchBackendConfig(
            extract_delegate_segments=True,
            memory_planning_pass=plan,
            do_quant_fusion_and_const_prop=True,  # else an 8-bit embedding has no kernel
            run_reinplace_pass=buffers,  # else every cache is copied whole, twice a layer
        )
    )
    report = {name: inside[name] | _outside(lowered.exported_program(name).graph_module) for name in programs}
    for name, method in report.items():
        if buffers and any(op.startswith("aten.copy_") for op in method["left"]):
            raise ExportError(
                f"method {name!r} copies whole caches ({method['left']}); index_copy_ was not updated in place"
            )
    with path.open("wb") as file:
        lowered.write_to_file(file)
    return report


def _inside(module: Any) -> dict[str, Any]:
    """What the delegates of a program hold."""
    from executorch.exir.lowered_backend_module import get_lowered_submodules

    delegates = [lowered for _, lowered, _ in get_lowered_submodules(module)]
    nodes = [node for lowered in delegates for node in _operators(lowered.original_module.graph)]
    names = Counter(_name(node) for node in nodes)
    return {
        "delegates": len(delegates),
        "delegated": sum(names.values()),
        "products": sum(_integer_product(node) for node in nodes),
    }


def _outside(module: Any) -> dict[str, Any]:
    """What runs on no delegate."""
    nodes = _operators(module.graph)
    left = Counter(_name(node) for node in nodes)
    floats = sum(count for name, count in left.items() if "dequantize_affine" in name)
    return {"left": dict(sorted(left.items())), "float_products": floats}


SKIPPED = ("alloc", "executorch_call_delegate", "free", "view")  # memory plan and calls, not computation


def _operators(graph: Any) -> list[Any]:
    calls = [
        node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem
    ]
    return [node for node in calls if getattr(node.target, "__name__", "") not in SKIPPED]


def _name(node: Any) -> str:
    """Such as `aten.index_put_` or `torchao.dequantize_affine`."""
    name = str(getattr(node.target, "__name__", node.target))
    space = getattr(node.target, "namespace", "") or "aten"
    parts = name.split(".")
    return parts[0] + "." + parts[1] if parts[0] == space else f"{space}.{parts[0]}"


def _integer_product(node: Any) -> bool:
    """A product whose weight is dequantized from constant integers."""
    if "linear" not in _name(node):
        return False
    weight = node.args[1]
    return weight.op == "call_function" and "dequantize" in _name(weight)
