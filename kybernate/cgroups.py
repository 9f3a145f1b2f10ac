"""Control groups, versions 1 and 2: the one of a container or process, its processes, its freezer, its memory limits.

The container's id alone names its control group: a static pod has another UID on its node than in the API, and kubelet
with ``cgroupsPerQOS: false`` makes no group of a pod.

Version 2 has one hierarchy (``0::/path`` in /proc/<pid>/cgroup), version 1 one per controller, and many machines have
both. Paths are those of the host: the checkpointer must see the host's processes and the host's /sys/fs/cgroup.
"""

import contextlib
import glob
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SYS_CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest number of pages; no machine has this much memory."""

MAX_DEPTH = 8
"""Levels below the root at which a container is looked for: kubepods is at level 1 to 3, within kind a few deeper."""
MAX_FOUND = 1024
"""How many folders that had to be searched for are remembered."""


CONTAINER = re.compile("[0-9a-f]{64}")
"""An id of a container, as containerd, CRI-O and docker give it: no other name says which container is meant."""


class HiddenProcessesError(Exception):
    """Processes cannot be seen here, so that none found proves nothing: of another pid namespace, or another user's."""


HIDDEN = "{} hides the processes of other users (hidepid): run the checkpointer as root"


class HiddenLimitsError(Exception):
    """A control group's files are not mounted here, so its limits are unknown."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The control group of one container or process."""

    path: str
    """As in /proc/<pid>/cgroup."""
    container: str
    """Id of the container; empty for the control group of a process."""
    folder: Path | None
    """The folder with its ``cgroup.procs``; None if /sys/fs/cgroup does not show it."""
    freezer: Path | None
    """The file that freezes it: ``cgroup.freeze`` of version 2, ``freezer.state`` of version 1; None without one."""
    memory: Path | None
    """The folder in which its memory is accounted; None if /sys/fs/cgroup does not show it."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """One memory limit and the bytes left below it."""

    where: str
    """Path of the control group that has the limit."""
    limit: int
    free: int


def pids(proc: Path = PROC) -> list[int]:
    """Every process that is visible in this pid namespace."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def membership(text: str) -> dict[str, str]:
    """Parse the lines of /proc/<pid>/cgroup, ``number:controllers:path``: the path by controller of version 1. The
    empty name is version 2, and the first."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        names, _, path = line.partition(":")[2].partition(":")
        found |= dict.fromkeys(names.split(","), path)
    return dict(sorted(found.items(), key=lambda one: one[0] != ""))


def container_path(path: str, container: str) -> str | None:
    """``path`` up to the part that names the container by its id; else None.

    Known forms: ``…/<id>``, ``…/cri-containerd-<id>.scope`` (``crio-<id>.scope``, ``docker-<id>.scope``), and
    ``….slice:cri-containerd:<id>``, which containerd writes when it and the kubelet disagree about systemd.
    ``crio-conmon-<id>.scope`` is the container's monitor, not its own.
    """
    parts = path.split("/")
    ends = (end for end, part in enumerate(parts, 1) if container in part and _names(part, container))
    return next(("/".join(parts[:end]) for end in ends), None)


def _names(part: str, container: str) -> bool:
    found = re.fullmatch(rf"(?:(?P<runtime>[a-z0-9-]+)-)?{re.escape(container)}(?:\.scope)?", part.rpartition(":")[2])
    return CONTAINER.fullmatch(container) is not None and found is not None and "conmon" not in (found["runtime"] or "")


@dataclass(frozen=True)
class Cgroups:
    """The control groups of this machine; tests pass other folders."""

    root: Path = SYS_CGROUP
    proc: Path = PROC

    @property
    def version(self) -> str:
        """``v2``, ``v1``, ``hybrid`` or ``none``, by what is mounted at the root."""
        if (self.root / "cgroup.controllers").exists():
            return "v2"
        if not ((self.root / "freezer").is_dir() or (self.root / "memory").is_dir()):
            return "none"
        return "hybrid" if (self.root / "unified" / "cgroup.controllers").exists() else "v1"

    def of(self, pid: int | str) -> dict[str, str]:
        """The control groups of a process, or of ``self``, as ``membership`` has them; none when it is gone. Raises
        HiddenProcessesError."""
        try:
            return membership(read(f"{self.proc}/{pid}/cgroup"))
        except (FileNotFoundError, ProcessLookupError):
            return {}
        except PermissionError as error:
            raise HiddenProcessesError(HIDDEN.format(self.proc)) from error

    def of_process(self, pid: int | str) -> Cgroup | None:
        """The control group of a process, or of ``self``; None when it is gone or in none."""
        place = self.of(pid)
        return self.at(place) if place else None

    def find(self, container: str) -> Cgroup | None:
        """The control group of a container; None when no process is in it. Raises HiddenProcessesError.

        Of several that bear its name the topmost: a container may make control groups of any name below its own.
        """
        places: list[dict[str, str]] = []
        hidden = not (self.proc / "1").exists()  # hidepid=2
        for pid in pids(self.proc):
            try:
                place = self.of(pid)
            except HiddenProcessesError:  # hidepid=1
                hidden = True
                continue
            paths = {
                name: found for name, path in place.items() if (found := container_path(path, container)) is not None
            }
            if paths:
                places.append(paths)
        topmost = min(places, key=lambda paths: min(path.count("/") for path in paths.values()), default=None)
        if topmost is None and hidden:
            raise HiddenProcessesError(HIDDEN.format(self.proc))
        return None if topmost is None else self.at(topmost, container)

    def names_containers(self) -> bool:
        """True if some process is in a control group that a container's id names. Raises HiddenProcessesError."""
        return any(CONTAINER.search(path) for pid in pids(self.proc) for path in self.of(pid).values())

    def pids(self, cgroup: Cgroup) -> list[int]:
        """The processes in it and below it. Raises HiddenProcessesError."""
        if cgroup.folder is None:
            return [
                pid
                for pid in pids(self.proc)
                if any(container_path(path, cgroup.container) for path in self.of(pid).values())
            ]
        found: list[int] = []
        for folder, _, files in os.walk(cgroup.folder):
            if "cgroup.procs" in files:
                with contextlib.suppress(OSError):  # it is gone, or threaded: then its parent lists them
                    found += [int(pid) for pid in read(f"{folder}/cgroup.procs").split()]
        if 0 in found:
            text = (
                f"processes in {cgroup.path} belong to another pid namespace; run the checkpointer with hostPID: true"
            )
            raise HiddenProcessesError(text)
        return found

    def frozen(self, pid: int) -> bool:
        """True if the control group of the process, or one above, is frozen or freezing."""
        place = self.of(pid)
        if "" in place and _values(self._unified(place[""]) / "cgroup.events").get("frozen") == "1":
            return True
        freezer = place.get("freezer")
        return freezer is not None and read_text(self._below("freezer", freezer) / "freezer.state") in (
            "FROZEN",
            "FREEZING",
        )

    def memory_rooms(self, cgroup: Cgroup) -> Iterator[MemoryRoom]:
        """Its own memory limit and every limit above it. Raises HiddenLimitsError."""
        if cgroup.folder is None:
            raise HiddenLimitsError(
                f"{self.root} does not show {cgroup.path}, so its memory limit is unknown; mount the host's "
                "/sys/fs/cgroup there"
            )
        folder = cgroup.memory
        while folder is not None and (folder == self.root or self.root in folder.parents):
            room = _memory_room(folder, "/" + str(folder.relative_to(self.root)).removeprefix("."))
            if room is not None:
                yield room
            folder = folder.parent

    def memory_bytes(self, cgroup: Cgroup) -> int | None:
        """Memory that its processes cannot give back: anonymous pages, and shared ones, as which pinned buffers count.
        None where it cannot be read."""
        stat = {} if cgroup.memory is None else _values(cgroup.memory / "memory.stat")
        for names in (("anon", "shmem"), ("total_rss", "total_shmem")):
            if names[0] in stat:
                return sum(int(stat.get(name, 0)) for name in names)
        return None

    def at(self, paths: Mapping[str, str], container: str = "") -> Cgroup:
        """The control group with these paths by controller of version 1; the empty name is version 2.

        Version 2 comes first, but a hybrid machine has its controllers in version 1.
        """
        folders = {
            name: folder
            for name, path in paths.items()
            if (folder := self._unified(path) if name == "" else self._below(name, path)).is_dir()
        }
        freezers = [folders[""] / "cgroup.freeze"] if "" in folders else []
        freezers += [folders["freezer"] / "freezer.state"] if "freezer" in folders else []
        return Cgroup(
            path=next(iter(paths.values())),
            container=container,
            folder=next((folders[name] for name in ("", "freezer", "memory", *folders) if name in folders), None),
            freezer=next((file for file in freezers if file.exists()), None),
            memory=folders.get("memory", folders.get("")),
        )

    def _unified(self, path: str) -> Path:
        """Version 2 is mounted at the root, or in ``unified`` beside version 1."""
        mount = self.root if os.path.exists(f"{self.root}/cgroup.controllers") else self.root / "unified"
        return _place(mount, path)

    def _below(self, controller: str, path: str) -> Path:
        return _place(self.root / controller.removeprefix("name="), path)


def _place(mount: Path, path: str) -> Path:
    """The folder of a control group.

    Read from within a control group namespace (unprivileged containers of version 2 have one), a path outside of it
    begins with one ``/..`` per level up to the common parent. The names of the levels in between are missing, so the
    rest of the path is searched for below the mount.
    """
    if not path.startswith("/.."):
        return mount / path.lstrip("/")
    rest = re.sub(r"^(/\.\.)+", "", path).lstrip("/")
    if not rest:
        return mount / path.lstrip("/")
    known = _found.get((mount, rest))
    if known is None or not known.is_dir():
        pattern = glob.escape(rest)
        folders = (folder for depth in range(MAX_DEPTH) for folder in mount.glob("*/" * depth + pattern))
        known = next(folders, None)
        if known is None:
            return mount / path.lstrip("/")
        _found[mount, rest] = known
        while len(_found) > MAX_FOUND:
            del _found[next(iter(_found))]
    return known


_found: dict[tuple[Path, str], Path] = {}
"""Folders found by a search; a control group never moves."""


def _memory_room(folder: Path, where: str) -> MemoryRoom | None:
    """The limit of one control group; None without one. Clean page cache counts as free: the kernel drops it first.

    ``memory.high`` counts as a limit: the kernel kills no process above it, but throttles the copy until its deadline
    passes.
    """
    for limit_files, use_file, prefix, dirty in (
        (("memory.max", "memory.high"), "memory.current", "", ("file_dirty", "file_writeback")),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", ("total_dirty", "total_writeback")),
    ):
        limits = [int(word) for file in limit_files if (word := read_text(folder / file)).isdigit()]
        limit, use = min(limits, default=UNLIMITED), read_text(folder / use_file)
        if not use.isdigit() or limit >= UNLIMITED:
            continue
        stat = _values(folder / "memory.stat")
        cache = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
        clean = max(0, cache - sum(int(stat.get(name, 0)) for name in dirty))
        return MemoryRoom(where, limit, max(0, limit - max(0, int(use) - clean)))
    return None


def _values(file: Path) -> dict[str, str]:
    """Those of a file of ``name value`` lines."""
    return dict(line.split(maxsplit=1) for line in read_text(file).splitlines() if " " in line)


def read(file: str | Path) -> str:
    """The text of a file in /proc or /sys. A switch reads a hundred of them, and ``open`` makes eight system calls for
    each, this four. Raises OSError."""
    handle = os.open(file, os.O_RDONLY)
    try:
        pieces = []
        while piece := os.read(handle, 1 << 14):
            pieces.append(piece)
    finally:
        os.close(handle)
    return b"".join(pieces).decode(errors="replace")


def read_text(file: str | Path) -> str:
    """Return its text without surrounding space; empty if it cannot be read: control groups and processes end."""
    try:
        return read(file).strip()
    except OSError:
        return ""
