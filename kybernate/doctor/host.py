"""Reads the facts about this process and machine from /proc, /sys and /dev; tests pass another ``root``."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kybernate.cgroups import Cgroups, HiddenLimitsError, read_text
from kybernate.doctor.model import HostFacts, TargetFacts

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's constant PROC_PID_INIT_INO: the machine's own pid namespace, as seen from any container."""


def read_host(pids: Iterable[int], root: Path = Path("/")) -> HostFacts:
    """The facts for the checks; ``pids``: the processes that use a GPU."""
    status = _fields(root / "proc/self/status")
    cgroups = Cgroups(root / "sys/fs/cgroup", root / "proc")
    freezer = find_freezer(cgroups, pids)
    gvisor = "gVisor" in read_text(root / "proc/version")
    scope = read_text(root / "proc/sys/kernel/yama/ptrace_scope")
    module = read_text(root / "proc/driver/nvidia/version")
    available = _fields(root / "proc/meminfo").get("MemAvailable", "").removesuffix("kB").strip()
    return HostFacts(
        uid=_uid(status),
        capabilities=int(status.get("CapEff", "0"), 16),
        ptrace_scope=int(scope) if scope.isdigit() else None,
        host_pids=None if gvisor else _link(root / "proc/self/ns/pid") == _INITIAL_PID_NAMESPACE,
        machine=os.uname().machine,
        gvisor=gvisor,
        open_module="Open Kernel Module" in module if module else None,
        cgroup=cgroups.version,
        freezer="" if freezer is None else f"/{freezer.relative_to(root)}",
        freezer_writable=freezer is not None and os.access(freezer, os.W_OK),
        nodes=read_nodes(root),
        available_bytes=int(available) * 1024 if available.isdigit() else None,
        huge_pages=read_text(root / "sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0],
        targets=tuple(target for pid in pids if (target := read_target(root, cgroups, pid)) is not None),
    )


def read_target(root: Path, cgroups: Cgroups, pid: int) -> TargetFacts | None:
    """One process with the tightest memory limit over it; None if /proc does not show it."""
    status = _fields(root / f"proc/{pid}/status")
    if not status:
        return None
    facts = TargetFacts(pid, status.get("Name", "?"), _uid(status), cgroup="")
    cgroup = cgroups.of_process(pid)
    if cgroup is None or cgroup.memory is None:
        return facts
    try:
        room = min(cgroups.memory_rooms(cgroup), key=lambda room: (room.free, room.limit), default=None)
    except HiddenLimitsError:
        return facts
    known = replace(facts, cgroup=str(cgroup.memory))
    return known if room is None else replace(known, limit_bytes=room.limit, free_bytes=room.free)


def find_freezer(cgroups: Cgroups, pids: Iterable[int]) -> Path | None:
    """The file that would freeze a container: of a process that uses a GPU, else of a pod, else of this process."""
    pods = (cgroups.at({"": path, "freezer": path}) for path in ("/kubepods.slice", "/kubepods"))
    for cgroup in (*(cgroups.of_process(pid) for pid in pids), *pods, cgroups.of_process("self")):
        if cgroup is not None and cgroup.freezer is not None:
            return cgroup.freezer
    return None


def read_nodes(root: Path) -> dict[str, str]:
    """Each /dev/nvidia* → "" if it can be opened, else the reason."""
    nodes = {}
    for node in sorted((root / "dev").glob("nvidia*")):
        if not node.is_dir():
            nodes[f"/{node.relative_to(root)}"] = "" if os.access(node, os.R_OK | os.W_OK) else "no permission"
    return nodes


def _uid(status: dict[str, str]) -> int:
    """The effective user id."""
    return int(status["Uid"].split()[1]) if "Uid" in status else os.geteuid()


def _fields(file: Path) -> dict[str, str]:
    """Lines of ``Name: value``; empty if the file does not exist."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in read_text(file).splitlines())}


def _link(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""
