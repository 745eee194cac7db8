"""Compile NPU graphs into context binaries of a SoC: what a phone loads without compiling.

The plugin writes one small ONNX file per width that names a binary. With shared contexts the widths of a device
lie in one binary and their weights in it once; a plugin that cannot share writes one binary per width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ExportError
from outrider.export.staging import disk_hint
from outrider.targets.qnn_plugin import (
    SocIds,
    binary_of,
    compiled_for,
    emulator_speaks_on_stderr,
    qnn_options,
    qnn_plugin,
    soc_of,
)

__all__ = ["Contexts", "compile_contexts"]

SHARING = {"enable_htp_weight_sharing": "1"}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Contexts:
    """What was compiled: by device and width, relative to the folder of the graphs; all files; sizes by device."""

    models: Mapping[str, Mapping[str, str]]  # slug -> width -> "slug/w1.onnx", for meta["contexts"]
    files: tuple[Path, ...]
    notes: Mapping[str, Any]  # slug -> {"binaries": {name: bytes}, "shared": bool}


def compile_contexts(
    place: Path,
    functions: Mapping[str, str],
    devices: Sequence[str] | Mapping[str, SocIds],
    progress: Progress | None = None,
) -> Contexts:
    """Compile every width of `functions` (width -> file in `place`) for each device, into `place/<device>/`.

    `devices` are slugs of shipped profiles, or any names with the ids of their chips. Raises UsageError for a device
    without a Hexagon NPU, MissingExtraError or BackendError without a usable onnxruntime-qnn, ExportError with QNN's
    message when it does not take a graph.
    """
    chips = dict(devices) if isinstance(devices, Mapping) else {slug: soc_of(slug) for slug in devices}
    plugin = qnn_plugin()
    models: dict[str, dict[str, str]] = {}
    files: list[Path] = []
    notes: dict[str, Any] = {}
    total = len(chips) * len(functions)
    for slug, ids in chips.items():
        folder = place / slug
        folder.mkdir(parents=True, exist_ok=True)

        def step(width: str, slug: str = slug) -> None:
            if progress:
                progress(
                    f"{slug} width {width}", len(models) * len(functions) + _index(functions, width), total
                )

        _compile(plugin, place, folder, functions, ids, step)
        models[slug] = {width: f"{slug}/{name}" for width, name in functions.items()}
        written = [folder / name for name in functions.values()]
        binaries = sorted({folder / _binary(path, ids) for path in written})
        files += [*written, *binaries]
        sizes = {path.name: path.stat().st_size for path in binaries}
        notes[slug] = {"binaries": sizes, "shared": len(binaries) < len(functions) or len(functions) == 1}
    return Contexts(models, tuple(files), notes)


def _index(functions: Mapping[str, str], width: str) -> int:
    return list(functions).index(width) + 1


def _compile(
    plugin: tuple[Any, list[Any]],
    place: Path,
    folder: Path,
    functions: Mapping[str, str],
    ids: SocIds,
    step: Callable[[str], None],
) -> None:
    """One session per width; the last one writes what all share, so they must live until then."""
    sessions = []
    last = list(functions)[-1]
    for width, name in functions.items():
        entries = {
            "session.disable_cpu_ep_fallback": "1",
            "ep.context_enable": "1",
            "ep.context_file_path": str(folder / name),
            "ep.context_embed_mode": "0",
        }
        if len(functions) > 1:
            entries["ep.share_ep_contexts"] = "1"
        if len(functions) > 1 and width == last:
            entries["ep.stop_share_ep_contexts"] = "1"
        (folder / name).unlink(missing_ok=True)
        sessions.append(_session(plugin, place / name, ids, entries))
        step(width)


def _session(plugin: tuple[Any, list[Any]], path: Path, ids: SocIds, entries: Mapping[str, str]) -> Any:
    import onnxruntime as ort

    module, devices = plugin
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    options.add_provider_for_devices(devices[:1], qnn_options(module, ids, SHARING))
    try:
        with emulator_speaks_on_stderr():
            return ort.InferenceSession(str(path), options)
    except Exception as error:
        way_out = "Without qnn among `--backends` the bundle is built for its other units"
        if "write" in str(error).lower():
            way_out = disk_hint(path.parent)
        raise ExportError(f"QNN cannot compile {path.name} for {ids}: {error} {way_out}") from error


def _binary(path: Path, ids: SocIds) -> str:
    """The binary that a compiled model names. Raises ExportError when the compiler wrote something else."""
    if not path.is_file():
        raise ExportError(f"QNN compiled for {ids} without an error, but did not write {path}")
    made, name = compiled_for(path), binary_of(path)
    if made != ids or name is None or not (path.parent / name).is_file():
        raise ExportError(
            f"{path} should be a context of {ids} beside its binary; it is one of {made} with {name}"
        )
    return name
