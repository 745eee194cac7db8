"""The onnxruntime-qnn plugin: registered once per process, its devices, and the SoC that it compiles for.

On Snapdragons it drives the Hexagon NPU. Its x86-64 build holds Qualcomm's emulator of that NPU instead, which is
slow. The emulator accepts SoC ids that do not exist, and runs binaries of any SoC, so both are checked here.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from outrider.errors import BackendError, MissingExtraError, UsageError
from outrider.targets.device import DEVICES, Device, shipped_device

__all__ = [
    "QNN",
    "SocIds",
    "binary_of",
    "compiled_for",
    "device_here",
    "device_of",
    "emulator_speaks_on_stderr",
    "has_emulator",
    "ids_of",
    "qnn_options",
    "qnn_plugin",
    "soc_name",
    "soc_of",
]

QNN = "QNNExecutionProvider"
HTP_ARCHS = ("68", "69", "73", "75", "79", "81")
"""The generations of the Hexagon NPU that the plugin compiles for (QnnHtpDevice.h of the QNN SDK)."""


@dataclass(frozen=True)
class SocIds:
    """A chip as Qualcomm's compiler names it: decimal numbers as strings."""

    soc_model: str
    htp_arch: str

    def __post_init__(self) -> None:
        """Raises BackendError for ids that the compiler would take silently and get wrong."""
        if not re.fullmatch(r"[1-9]\d*", self.soc_model):
            raise BackendError(f"soc_model is {self.soc_model!r}; it is a number, known: {_known_socs()}")
        if self.htp_arch not in HTP_ARCHS:
            raise BackendError(f"htp_arch is {self.htp_arch!r}; known: {', '.join(HTP_ARCHS)}")
        belongs = {ids[0]: ids[1] for ids in _socs().values()}.get(self.soc_model)
        if belongs is not None and belongs != self.htp_arch:
            raise BackendError(
                f"soc_model {self.soc_model} has htp_arch {belongs}, but {self.htp_arch} was given; "
                f"known: {_known_socs()}"
            )

    def __str__(self) -> str:
        return f"soc_model {self.soc_model}, htp_arch {self.htp_arch}"


@cache
def _socs() -> dict[str, tuple[str, str]]:
    """Device slug -> soc_model and htp_arch, of the devices whose profile has both."""
    found = {}
    for slug in DEVICES:
        soc = shipped_device(slug).soc
        if soc.soc_model is not None and soc.htp_arch is not None:
            found[slug] = (str(int(soc.soc_model)), str(int(soc.htp_arch)))
    return found


def _known_socs() -> str:
    return ", ".join(f"{slug} ({model}, {arch})" for slug, (model, arch) in _socs().items())


def soc_of(slug: str) -> SocIds:
    """The ids of a device. Raises UsageError for a device without a Hexagon NPU or an unknown one."""
    if slug not in _socs():
        raise UsageError(f"device {slug!r} has no Hexagon NPU that is known here; known: {_known_socs()}")
    return SocIds(*_socs()[slug])


def ids_of(device: Device) -> SocIds:
    """The ids in a device's profile, which may be a file of the user's.

    Raises UsageError where it has none, BackendError for ids that the compiler would get wrong.
    """
    soc = device.soc
    if soc.soc_model is None or soc.htp_arch is None:
        raise UsageError(
            f"device {device.slug!r} has no Hexagon NPU that is known here; known: {_known_socs()}"
        )
    return SocIds(str(int(soc.soc_model)), str(int(soc.htp_arch)))


def device_of(ids: SocIds) -> str | None:
    """The slug of the device with these ids, None when no profile has them."""
    return next((slug for slug, known in _socs().items() if known == (ids.soc_model, ids.htp_arch)), None)


def soc_name(root: Path = Path("/")) -> str | None:
    """The chip of this machine as its kernel names it, such as "SM8650"; None where nothing tells.

    Read from /sys/devices/soc0/machine (drivers/soc/qcom/socinfo.c of Linux).
    """
    try:
        return (root / "sys/devices/soc0/machine").read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def device_here(root: Path = Path("/")) -> str | None:
    """The slug of the device whose chip this machine has, None where nothing tells."""
    name = soc_name(root)
    return next((slug for slug in _socs() if shipped_device(slug).soc.name == name), None)


def compiled_for(path: Path) -> SocIds | None:
    """The SoC that a compiled context model (EPContext) was made for, None when the file does not tell.

    The plugin writes "v2:<backend>:<sdk>:<blob>:<htp_arch>:<soc_model>:..." into the model's metadata.
    """
    found = re.search(rb"v2:\d+:[\d.]+:[\d.]+:(\d+):(\d+):", path.read_bytes())
    if found is None:
        return None
    arch, model = (part.decode("ascii") for part in found.groups())
    try:
        return SocIds(model, arch)
    except BackendError as error:
        raise BackendError(f"{path} was compiled for no SoC that exists: {error}; export again") from None


def binary_of(path: Path) -> str | None:
    """The name of the binary that a compiled context model refers to, None when it holds it itself."""
    found = re.search(rb"ep_cache_context.{1,12}?([\w.\-]+\.bin)", path.read_bytes(), re.DOTALL)
    return None if found is None else found[1].decode("ascii")


def has_emulator() -> bool:
    """Whether the plugin for this processor holds the emulator instead of a driver."""
    return platform.machine().lower() in ("x86_64", "amd64")


def qnn_plugin() -> tuple[Any, list[Any]]:
    """The `onnxruntime_qnn` module and its devices; registers its library when nobody has.

    Raises MissingExtraError without the wheel, BackendError when it is too old or cannot be opened here.
    """
    import onnxruntime as ort

    module = _wheel()
    if not _devices(ort):
        try:
            ort.register_execution_provider_library(QNN, module.get_library_path())
        except Exception as error:
            raise BackendError(_why_it_cannot_be_opened(module, str(error))) from error
    devices = _devices(ort)
    if not devices:
        raise BackendError(
            f"onnxruntime-qnn {module.__version__} finds no NPU here and holds no emulator for "
            f"{platform.machine()}; the CPU graphs of the bundle run everywhere"
        )
    return module, devices


def _wheel() -> Any:
    try:
        import onnxruntime_qnn
    except ImportError:
        try:
            version = metadata.version("onnxruntime-qnn")
        except metadata.PackageNotFoundError:
            raise MissingExtraError("onnxruntime_qnn", "qnn") from None
        raise BackendError(_too_old(version)) from None
    if not hasattr(onnxruntime_qnn, "get_library_path"):
        raise BackendError(_too_old(getattr(onnxruntime_qnn, "__version__", "of an unknown version")))
    return onnxruntime_qnn


def _too_old(version: str) -> str:
    return f"onnxruntime-qnn {version} is no plugin yet, it is too old: pip install -U 'outrider[qnn]'"


def _devices(ort: Any) -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == QNN]


def _why_it_cannot_be_opened(module: Any, reason: str) -> str:
    needed = re.search(r"GLIBC_([\d.]+)", reason)
    if needed is not None:
        here = platform.libc_ver()[1] or "an unknown version"
        return (
            f"onnxruntime-qnn {module.__version__} needs glibc {needed[1].rstrip('.')}, this system has {here}; take "
            "a newer system (Ubuntu 22.04, Debian 12), or the CPU graphs of the bundle"
        )
    return (
        f"the library of onnxruntime-qnn {module.__version__} cannot be opened: {reason}; "
        "install it again (pip install -U 'outrider[qnn]')"
    )


def qnn_options(module: Any, ids: SocIds | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The provider options of a session on the NPU or its emulator; without ids the chip itself is asked."""
    options = {"backend_path": module.get_qnn_htp_path()}
    if ids is not None:
        options |= {"soc_model": ids.soc_model, "htp_arch": ids.htp_arch}
    return {**options, **(more or {})}


@contextmanager
def emulator_speaks_on_stderr() -> Iterator[None]:
    """The emulator prints a line to C's stdout, where the text of a generation belongs: send it to stderr."""
    if not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None)
    if sys.stdout is not None:
        sys.stdout.flush()
    libc.fflush(None)
    try:
        kept = os.dup(1)
    except OSError:  # there is no stdout to keep clean
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
