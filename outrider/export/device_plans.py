"""Which graphs a role of a bundle gets on a device, in the order in which they are preferred there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from outrider.errors import MissingExtraError, UsageError
from outrider.export.executorch_lower import vendor_partitioner
from outrider.manifest import Profile
from outrider.targets.device import DEVICES, Device, load_device

if TYPE_CHECKING:
    from outrider.export.options import ExportOptions

__all__ = [
    "BACKENDS",
    "EXECUTORCH_BACKENDS",
    "PROVIDER_OPTIONS",
    "GraphPlan",
    "Lowering",
    "check_extras",
    "device_backends",
    "exportable_devices",
    "open_device",
    "plan_graphs",
]

Lowering = Literal[
    "onnx", "cuda", "npu", "xnnpack", "vulkan", "coreml_draft", "coreml_target", "coreml_split"
]
BACKENDS = ("onnxruntime", "qnn", "executorch", "coreml")
EXECUTORCH_BACKENDS = ("xnnpack", "vulkan", "qualcomm", "mediatek", "samsung")
EXTRA_MODULES = {
    "onnxruntime": ("export", ("torch", "onnx", "onnxscript", "threadpoolctl")),
    "qnn": ("qnn", ("onnxruntime_qnn",)),
    "executorch": ("executorch", ("executorch", "torchao")),
    "coreml": ("coreml", ("coremltools",)),
}
FOLDERS = {"onnx": "", "coreml_draft": "coreml", "coreml_target": "coreml"}  # of a role; others by their name
DRAFT_WIDTHS = (1, 2, 64)  # a step, the catch-up after full acceptance, a chunk of the prompt
TARGET_WIDTHS = (1, 2, 3, 5, 9, 64)  # plain, k + 1 for k = 1, 2, 4, 8, a chunk of the prompt
GPU_WIDTHS = (1, 5, 64)  # fewer: ExecuTorch takes minutes to lower one, and k + 1 between them is padded
DRAFT_CONTEXT = 1024  # a static cache is read whole at every step
GPU_PROVIDERS = ("WebGpuExecutionProvider", "CPUExecutionProvider")
WINDOWS_GPU_PROVIDERS = ("DmlExecutionProvider", "CPUExecutionProvider")
CUDA_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
PROVIDER_OPTIONS = {  # the memory of a board is the CPU's too: take what is needed, not twice that
    "CUDAExecutionProvider": {"arena_extend_strategy": "kSameAsRequested"}
}


@dataclass(frozen=True)
class GraphPlan:
    """One graph to be made. Plans of a role with the same `artifact` share their files."""

    role: str
    backend: str  # that runs it
    unit: str
    profile: Profile
    recipe: str
    widths: tuple[int, ...]  # static ones; none: any width
    max_context: int
    lowering: Lowering
    preference: int = 0
    providers: tuple[str, ...] = ()  # of ONNX Runtime, where it is not for the CPU

    @property
    def folder(self) -> str:
        """Where in the bundle its files are."""
        inside = FOLDERS.get(self.lowering, self.lowering)
        return f"{self.role}/{inside}" if inside else self.role

    @property
    def artifact(self) -> tuple[object, ...]:
        """What decides the bytes of the files."""
        return self.lowering, self.profile, self.recipe, self.widths, self.max_context

    def __str__(self) -> str:
        """A line for people."""
        how = {"npu": "onnxruntime-qnn", "onnx": "onnxruntime", "cuda": "onnxruntime CUDA"}.get(
            self.lowering, f"executorch {self.lowering}"
        )
        if self.backend == "coreml":
            how = f"coreml {self.profile}"
        return f"{self.role} on {self.unit} by {how}, {self.recipe}"


def exportable_devices() -> tuple[str, ...]:
    """The slugs that something can be made for, `host` first."""
    return ("host", *(slug for slug in DEVICES if slug != "host"))


def open_device(name: str) -> Device:
    """The profile of a device. Raises UsageError for an unknown one, with the nearest names."""
    if name not in DEVICES and not name.endswith(".toml"):
        near = get_close_matches(name, exportable_devices(), n=2)
        hint = f". Did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"unknown device {name!r}; known: {', '.join(exportable_devices())}{hint}")
    return load_device(name)


def device_backends(device: Device) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a device gets without --backends, and what it can get."""
    if _is_apple(device):
        return ("coreml", "onnxruntime"), ("coreml", "onnxruntime")
    if _has_htp(device):
        return ("qnn", "executorch", "onnxruntime"), ("onnxruntime", "qnn", "executorch")
    android = ("executorch", "onnxruntime")
    return (android if device.kind == "phone" else ("onnxruntime",)), android


def plan_graphs(device: Device, options: ExportOptions) -> dict[str, tuple[GraphPlan, ...]]:
    """The graphs of every role, in order of preference.

    Raises UsageError for backends that the device has not, ExportError for a vendor's SDK that is absent.
    """
    backends = _chosen_backends(device, options)
    delegates = _delegates(device, options, backends)
    plans: dict[str, tuple[GraphPlan, ...]] = {}
    for role in ("target", *(["draft"] if options.draft else [])):
        wish = _Wish(role, device, options, backends, delegates)
        found = [plan for planner in PLANNERS for plan in planner(wish)]
        if not found:
            raise UsageError(
                f"--backends {','.join(backends)} leaves the {role} without a graph for {device.slug}; add "
                "onnxruntime, or --npu-target for a target on the NPU"
            )
        plans[role] = tuple(replace(plan, preference=place) for place, plan in enumerate(found))
    _refuse_unused(device, options, plans)
    return plans


def _refuse_unused(device: Device, options: ExportOptions, plans: Mapping[str, Sequence[GraphPlan]]) -> None:
    """Raise UsageError for an option that none of the planned graphs honours."""
    if options.widths and not any(plan.widths for plan in plans["target"]):
        raise UsageError("widths belong to the split profile; an inplace graph runs any width")
    if options.draft_widths and not any(plan.widths for plan in plans.get("draft", ())):
        raise UsageError(
            f"--draft-widths was given, but no graph of the draft for {device.slug} has static widths"
        )
    if options.npu_target and _is_apple(device):
        raise UsageError("--npu-target: a target for Apple devices is made for the GPU; leave it out")
    if any(plan.backend == "coreml" for graphs in plans.values() for plan in graphs):
        return
    asked = {
        "--coreml-precision": options.target.coreml_precision,
        "--coreml-draft-precision": options.draft and options.draft.coreml_precision,
        "--coreml-override": options.target.coreml_overrides,
        "--coreml-draft-override": options.draft and options.draft.coreml_overrides,
        "--deployment-target": options.deployment_target,
        "--split-target": options.split_target,
    }
    stray = next((name for name, value in asked.items() if value), None)
    if stray is not None:
        raise UsageError(f"{stray} was given, but nothing is made for Core ML on {device.slug}")


@dataclass(frozen=True)
class _Wish:
    """A role of an export, and what may run it."""

    role: str
    device: Device
    options: ExportOptions
    backends: tuple[str, ...]
    delegates: tuple[str, ...]

    @property
    def context(self) -> int:
        """Of a graph whose cost follows what its cache holds: all that was asked for."""
        return self._given or self.options.max_context

    @property
    def static_context(self) -> int:
        """Of a graph whose cache is read whole at every step."""
        longest = DRAFT_CONTEXT if self.role == "draft" else self.options.max_context
        return self._given or min(self.options.max_context, longest)

    @property
    def _given(self) -> int | None:
        return self.options.draft_context if self.role == "draft" else None

    @property
    def static_widths(self) -> tuple[int, ...]:
        """What a graph of static widths is compiled for."""
        if self.role == "draft":
            return self.options.draft_widths or DRAFT_WIDTHS
        return self.options.widths or TARGET_WIDTHS


def check_extras(plans: Sequence[GraphPlan]) -> None:
    """Raise MissingExtraError for the first library that a plan needs and that is not installed."""
    needed = dict.fromkeys(["onnxruntime", *(_extra_of(plan) for plan in plans)])
    for name in needed:
        extra, modules = EXTRA_MODULES[name]
        for module in modules:
            if not _installed(module):
                raise MissingExtraError(module, extra)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that fails; None in sys.modules
        return False


def _extra_of(plan: GraphPlan) -> str:
    return "qnn" if plan.lowering == "npu" else plan.backend


def _is_apple(device: Device) -> bool:
    return any("coreml" in unit.backends for unit in device.units.values())


def _has_htp(device: Device) -> bool:
    return device.soc.soc_model is not None and device.soc.htp_arch is not None


def _has_cuda(device: Device) -> bool:
    return device.kind == "board" and "gpu" in device.units and "onnxruntime" in device.units["gpu"].backends


def _accelerated(device: Device) -> bool:
    return not _is_apple(device) and (device.kind == "phone" or _has_htp(device))


def _chosen_backends(device: Device, options: ExportOptions) -> tuple[str, ...]:
    default, possible = device_backends(device)
    for name in options.backends:
        if name not in BACKENDS:
            raise UsageError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")
        if name not in possible:
            raise UsageError(
                f"{device.slug} has no use for the backend {name!r}; it has: {', '.join(possible)}"
            )
    return options.backends or default


def _delegates(device: Device, options: ExportOptions, backends: Sequence[str]) -> tuple[str, ...]:
    """The ExecuTorch delegates to lower to: both on a device with a GPU, XNNPACK elsewhere, or the one named."""
    wanted = options.executorch_backend
    if wanted is None:
        return ("vulkan", "xnnpack") if _accelerated(device) else ("xnnpack",)
    if wanted not in EXECUTORCH_BACKENDS:
        raise UsageError(f"unknown ExecuTorch backend {wanted!r}; known: {', '.join(EXECUTORCH_BACKENDS)}")
    if "executorch" not in backends:
        raise UsageError(f"--executorch-backend {wanted} was given, but --backends has no executorch")
    if wanted not in ("xnnpack", "vulkan"):
        vendor_partitioner(wanted)
    return (wanted,)


def _npu(wish: _Wish) -> Iterator[GraphPlan]:
    if "qnn" not in wish.backends or (wish.role == "target" and not wish.options.npu_target):
        return
    recipe = wish.options.of(wish.role).npu_precision
    widths, context = wish.static_widths, wish.static_context
    yield GraphPlan(wish.role, "onnxruntime", "npu", "split", recipe, widths, context, "npu")


def _coreml(wish: _Wish) -> Iterator[GraphPlan]:
    """The draft on the Neural Engine; the target on the GPU, with its cache inside, or kept by the app."""
    if "coreml" not in wish.backends:
        return
    recipe = wish.options.of(wish.role).coreml_recipe(wish.role)
    made = partial(GraphPlan, wish.role, "coreml")
    shape = recipe, wish.static_widths, wish.static_context
    if wish.role == "draft":
        yield made("npu", "split", *shape, "coreml_draft")
        return
    yield made("gpu", "state", *shape, "coreml_target")
    if wish.options.split_target:
        yield made("gpu", "split", *shape, "coreml_split")


def _vulkan(wish: _Wish) -> Iterator[GraphPlan]:
    if wish.role != "target" or "executorch" not in wish.backends or "vulkan" not in wish.delegates:
        return
    recipe = wish.options.of(wish.role).executorch_precision
    widths, context = wish.options.widths or GPU_WIDTHS, wish.static_context
    yield GraphPlan(wish.role, "executorch", "gpu", "split", recipe, widths, context, "vulkan")


def _onnx_gpu(wish: _Wish) -> Iterator[GraphPlan]:
    """The target's ONNX graph a second time, for providers of a GPU."""
    if wish.role == "target" and _accelerated(wish.device):
        providers = GPU_PROVIDERS if wish.device.kind == "phone" else WINDOWS_GPU_PROVIDERS
        for plan in _onnx(wish):
            yield replace(plan, unit="gpu", providers=providers)


def _cuda(wish: _Wish) -> Iterator[GraphPlan]:
    """A graph of its own for CUDA: float16 over the weights that the CPU's has, its cache on the GPU."""
    if "onnxruntime" in wish.backends and _has_cuda(wish.device) and wish.options.profile == "inplace":
        recipe, unit = wish.options.of(wish.role).precision, "gpu"
        made = partial(GraphPlan, wish.role, "onnxruntime", unit, "inplace", recipe, (), wish.context)
        yield made("cuda", providers=CUDA_PROVIDERS)


def _xnnpack(wish: _Wish) -> Iterator[GraphPlan]:
    if "executorch" in wish.backends and "xnnpack" in wish.delegates:
        recipe = wish.options.of(wish.role).executorch_precision
        yield GraphPlan(wish.role, "executorch", "cpu", "buffer", recipe, (), wish.context, "xnnpack")


def _onnx(wish: _Wish) -> Iterator[GraphPlan]:
    if "onnxruntime" in wish.backends:
        profile, recipe = wish.options.profile, wish.options.of(wish.role).precision
        widths = wish.options.widths if profile == "split" else ()
        yield GraphPlan(wish.role, "onnxruntime", "cpu", profile, recipe, widths, wish.context, "onnx")


PLANNERS: tuple[Callable[[_Wish], Iterator[GraphPlan]], ...] = (
    _npu,
    _coreml,
    _vulkan,
    _onnx_gpu,
    _cuda,
    _xnnpack,
    _onnx,
)
"""In order of preference."""
