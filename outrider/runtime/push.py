"""Copy a bundle to a phone through `adb`: what changed, proven by the phone's own `sha256sum`.

The manifest goes last, and an old one is removed before anything is written over: whatever interrupts a push, a
folder without a manifest is no bundle, so a half-copied one is never taken for a whole one.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.errors import DeviceError, UsageError
from outrider.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    RoleEntry,
    bundle_path,
    file_sha256,
    read_manifest,
    verify,
    write_manifest,
)
from outrider.power.sensors.system import CommandResult, Runner, run_command

__all__ = ["FOLDER", "Adb", "Pushed", "find_phone", "push_bundle", "selected"]

FOLDER = "/data/local/tmp/outrider"
QUICK_S, HASH_S = 30.0, 600.0  # the longest that a small command may take, and a hash of some gigabytes
SLOWEST_MB_S = 1.0  # over the slowest cable; a copy that takes longer hangs
SPARE_KB = 64 * 1024  # to leave free on the phone
BATCH = 40  # files in one command line
Progress = Callable[[str, float], None]

_FIXES = (
    ("unauthorized", "unlock the phone and allow USB debugging for this computer, then again"),
    ("offline", "unplug the phone, plug it in again, and try `adb kill-server`"),
    (
        "no permissions",
        "this user may not open the phone's USB device: see `adb devices`; udev rules grant it",
    ),
    ("not found", "`adb devices` lists the phones that are there"),
    ("no space left", "free space on the phone, or push fewer graphs with --graphs"),
    ("read-only file system", "choose a --folder that adb may write, below /data/local/tmp"),
    ("permission denied", "choose a --folder that adb may write, below /data/local/tmp"),
    ("is not installed", "install Android's platform tools, which hold adb, and put them on the PATH"),
)


@dataclass(frozen=True)
class Pushed:
    """What a push did. `commands` run the bundle on the phone; `strays` are files there that are not part of it."""

    serial: str
    folder: str
    copied: tuple[str, ...]
    kept: tuple[str, ...]
    copied_bytes: int
    strays: tuple[str, ...]
    commands: tuple[str, ...]


class Adb:
    """One phone's adb. `run` starts commands on this computer."""

    def __init__(self, serial: str, run: Runner = run_command) -> None:
        self.serial, self._run = serial, run

    def shell(self, command: str, timeout_s: float = QUICK_S) -> str:
        """What a shell command printed there. Raises DeviceError when it failed."""
        result = self._run(["adb", "-s", self.serial, "shell", command], timeout_s)
        if result.code != 0:
            raise DeviceError(f"on the phone, `{command}` failed: {_why(result)}")
        return result.text.replace("\r\n", "\n")

    def copy(self, source: Path, target: str) -> None:
        """Copy one file there. Raises DeviceError when adb could not."""
        timeout_s = QUICK_S + source.stat().st_size / 1e6 / SLOWEST_MB_S
        result = self._run(["adb", "-s", self.serial, "push", str(source), target], timeout_s)
        if result.code != 0:
            raise DeviceError(f"{source.name} could not be copied to {target}: {_why(result)}")

    def free_kb(self, folder: str) -> int:
        """Free space of the file system that holds a folder, in kB of 1,024 bytes."""
        text = self.shell(f"df -k {shlex.quote(folder)}")
        numbers = re.search(r"\s(\d+)\s+(\d+)\s+(\d+)\s+\d+%", text)
        if numbers is None:
            raise DeviceError(
                f"`df -k` on the phone printed {text.strip()[-80:]!r}, which has no free space in it"
            )
        return int(numbers[3])

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file below a folder, by its path from there."""
        text = self.shell(f"cd {shlex.quote(folder)} && find . -type f -exec stat -c '%s %n' {{}} +")
        found = re.findall(r"^(\d+) \./(.+)$", text, re.M)
        return {name: int(size) for size, name in found}

    def refuse_unprovable(self) -> None:
        """Raise DeviceError for a phone that cannot hash what arrives there."""
        if not self.shell("command -v sha256sum || true").strip():
            raise DeviceError(
                f"the phone {self.serial} has no sha256sum, so nothing that is copied there could be proven; take a "
                "phone with a newer Android, or copy the folder with `adb push` and run `outrider check` there"
            )

    def hashes(self, folder: str, names: Sequence[str]) -> dict[str, str]:
        """SHA-256 of files below a folder, by name; one that cannot be read is missing."""
        found: dict[str, str] = {}
        for start in range(0, len(names), BATCH):
            files = shlex.join(names[start : start + BATCH])
            text = self.shell(f"cd {shlex.quote(folder)} && sha256sum {files} 2>/dev/null || true", HASH_S)
            found |= {name: digest for digest, name in re.findall(r"^([0-9a-f]{64}) [ *](.+)$", text, re.M)}
        return found


def find_phone(serial: str | None, run: Runner = run_command) -> Adb:
    """The phone to copy to: the one there is, or the one with this serial.

    Raises DeviceError when adb is absent, no phone is there, or it does not let this computer in; UsageError when
    several are there and none was chosen.
    """
    result = run(["adb", "devices"], QUICK_S)
    if result.code != 0:
        raise DeviceError(f"adb cannot list phones: {_why(result)}")
    phones = dict(re.findall(r"^(\S+)\t(.+?)\s*$", result.text, re.M))
    if serial is None and len(phones) > 1:
        raise UsageError(f"{len(phones)} phones are there: {', '.join(phones)}; choose one with --serial")
    if not phones:
        raise DeviceError(
            "no phone is there; plug one in and switch on USB debugging in its developer options"
        )
    chosen = next(iter(phones)) if serial is None else serial
    if chosen not in phones:
        raise DeviceError(f"no phone has the serial {chosen!r}; there are: {', '.join(phones)}")
    if phones[chosen] != "device":
        raise DeviceError(f"the phone {chosen} is {phones[chosen]}{_fix(phones[chosen])}")
    return Adb(chosen, run)


def selected(manifest: Manifest, units: Collection[str]) -> Manifest:
    """The manifest with the graphs for these units only; all of them when none is named.

    Raises UsageError for a unit that no graph is for, or when a role is left without a graph.
    """
    if not units:
        return manifest
    there = {graph.unit for role in manifest.roles.values() for graph in role.graphs}
    unknown = sorted(set(units) - there)
    if unknown:
        raise UsageError(
            f"--graphs {unknown[0]}: no graph of this bundle is for it; it has {', '.join(sorted(there))}"
        )
    roles = {}
    for name, role in manifest.roles.items():
        kept = tuple(graph for graph in role.graphs if graph.unit in units)
        if not kept:
            has = ", ".join(sorted({graph.unit for graph in role.graphs}))
            raise UsageError(f"--graphs {','.join(units)} leaves the {name} without a graph; it has: {has}")
        roles[name] = kept
    target = roles["target"][0]
    roles = {
        name: tuple(
            replace(graph, target_sha256=target.identity) if graph.target_sha256 else graph
            for graph in graphs
        )
        for name, graphs in roles.items()
    }
    return replace(manifest, roles={name: RoleEntry(graphs) for name, graphs in roles.items()})


def push_bundle(
    directory: Path,
    *,
    serial: str | None = None,
    folder: str = FOLDER,
    units: Collection[str] = (),
    run: Runner = run_command,
    progress: Progress | None = None,
) -> Pushed:
    """Copy a bundle into `folder`/<its name> on a phone, and prove every file there.

    Files that are there with the right hash stay. Raises BundleError for a damaged bundle, UsageError, DeviceError;
    after any of them, and after Ctrl-C, the folder on the phone has no manifest, and the next push goes on.
    """
    tell = progress or (lambda stage, part: None)
    if not folder.startswith("/"):
        raise UsageError(f"--folder is {folder!r}; it must be an absolute path on the phone")
    _refuse_apple(selected(read_manifest(directory), units))
    verify(directory, full=True, progress=lambda done, total: tell("hashes here", done / max(total, 1)))
    adb = find_phone(serial, run)
    adb.refuse_unprovable()
    manifest = selected(verify(directory), units)
    files = manifest.files()
    place = posixpath.join(folder, directory.resolve().name)
    folders = sorted({place, *(posixpath.join(place, posixpath.dirname(name)) for name in files)})
    adb.shell(f"mkdir -p {shlex.join(folders)}")
    with tempfile.TemporaryDirectory() as scratch:
        written = write_manifest(scratch, manifest)
        sizes = adb.sizes(place)
        changed = _changed(adb, place, files, sizes, tell)
        digest = file_sha256(written)
        if changed or adb.hashes(place, [MANIFEST_NAME]).get(MANIFEST_NAME) != digest:
            _refuse_too_large(adb, place, files, changed, sizes)
            adb.shell(f"rm -f {shlex.quote(posixpath.join(place, MANIFEST_NAME))}")
            _copy(adb, directory, place, {name: files[name] for name in changed}, tell)
            adb.shell(_readable(folder, place))
            _write_manifest(adb, written, place, digest)
    copied_bytes = sum(files[name].bytes for name in changed)
    kept = tuple(name for name in files if name not in changed)
    strays = tuple(sorted(set(sizes) - set(files) - {MANIFEST_NAME, f"{MANIFEST_NAME}.partial"}))
    return Pushed(adb.serial, place, tuple(changed), kept, copied_bytes, strays, commands(adb.serial, place))


def _refuse_apple(manifest: Manifest) -> None:
    """Raise UsageError for Core ML packages, which no phone that adb reaches can run."""
    packages = [
        f"{role}/coreml"
        for role, entry in manifest.roles.items()
        if any(graph.backend == "coreml" for graph in entry.graphs)
    ]
    if packages:
        raise UsageError(
            f"this bundle, for {manifest.device}, holds Core ML packages ({', '.join(packages)}), and adb reaches "
            "Android phones only. An iPhone gets them inside an app: add the folders to its Xcode project "
            "(docs/apple.md); a Mac gets a plain copy of the bundle. `--graphs cpu` pushes ONNX Runtime's graphs alone"
        )


def _readable(folder: str, place: str) -> str:
    """A command that lets apps, as Termux, read what lies in `place` and get there."""
    commands = f"chmod -R a+rX {shlex.quote(place)}", f"chmod a+x {shlex.quote(folder)}"
    return f"({'; '.join(commands)}) 2>/dev/null || true"


def _changed(
    adb: Adb, place: str, files: Mapping[str, FileEntry], sizes: Mapping[str, int], tell: Progress
) -> list[str]:
    """The files that the phone lacks or has otherwise."""
    same_size = [name for name, entry in files.items() if sizes.get(name) == entry.bytes]
    tell("hashes on the phone", 0.0)
    found = adb.hashes(place, same_size)
    return [name for name, entry in files.items() if found.get(name) != entry.sha256]


def _refuse_too_large(
    adb: Adb, place: str, files: Mapping[str, FileEntry], changed: Sequence[str], sizes: Mapping[str, int]
) -> None:
    needed = sum(files[name].bytes - sizes.get(name, 0) for name in changed) // 1024 + SPARE_KB
    free = adb.free_kb(place)
    if needed > free:
        raise DeviceError(
            f"the phone has {free / 1024:,.0f} MB free at {place}; this push needs {needed / 1024:,.0f} MB. Free space "
            "there, or push fewer graphs with --graphs"
        )


def _copy(adb: Adb, directory: Path, place: str, files: Mapping[str, FileEntry], tell: Progress) -> None:
    """Copy and prove; what arrived otherwise is copied once more."""
    total, done = sum(entry.bytes for entry in files.values()), 0
    for name, entry in files.items():
        for attempt in (1, 2):
            tell(f"copy {name}", done / max(total, 1))
            adb.copy(bundle_path(directory, name), posixpath.join(place, name))
            found = adb.hashes(place, [name]).get(name)
            if found == entry.sha256:
                break
            if attempt == 2:
                raise DeviceError(
                    f"{name} arrived with sha256 {found or 'none'} twice, the bundle says {entry.sha256}; try another "
                    "cable or port, and look at the phone's storage"
                )
        done += entry.bytes


def _write_manifest(adb: Adb, written: Path, place: str, digest: str) -> None:
    """Put the manifest there in one step, so that it is whole or absent."""
    target = posixpath.join(place, MANIFEST_NAME)
    adb.copy(written, f"{target}.partial")
    if adb.hashes(place, [f"{MANIFEST_NAME}.partial"]).get(f"{MANIFEST_NAME}.partial") != digest:
        raise DeviceError(f"the manifest arrived damaged at {target}.partial; push again")
    adb.shell(
        f"mv {shlex.quote(target + '.partial')} {shlex.quote(target)} && chmod a+r {shlex.quote(target)}"
    )


def commands(serial: str, place: str) -> tuple[str, ...]:
    """What to type to run the bundle on the phone; see docs/android.md, chapter 4, for what must be there first.

    The first two lines lead into the Debian inside Termux, the others are typed there.
    """
    debian = f"proot-distro login debian --bind {shlex.quote(posixpath.dirname(place))}"
    inside = shlex.quote(place)
    return (
        f"adb -s {shlex.quote(serial)} forward tcp:8022 tcp:8022",
        f"ssh -t -p 8022 127.0.0.1 {shlex.quote(debian)}",
        f"~/v/bin/outrider check {inside} --max-tokens 16",
        f"~/v/bin/outrider generate {inside} -p {shlex.quote('Why is the sky blue?')}",
    )


def _why(result: CommandResult) -> str:
    said = " ".join((result.error or result.text).split()) or f"exit code {result.code}"
    return said.removeprefix("adb: ").removeprefix("error: ") + _fix(said)


def _fix(said: str) -> str:
    return next((f"; {fix}" for sign, fix in _FIXES if sign in said.lower()), "")
