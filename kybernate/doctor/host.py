"""This process and this machine, from /proc, /sys and /dev. Reads only; ``root`` is another tree in tests."""

import os
from collections.abc import Iterable
from pathlib import Path

from kybernate.doctor.facts import HostFacts, TargetFacts
from kybernate.doctor.memory_limits import memory_limit, paths, unified_mount

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's constant PROC_PID_INIT_INO: the machine's own pid namespace, whatever container looks."""


def read_host(pids: Iterable[int], root: Path = Path("/")) -> HostFacts:
    """Everything that the checks need; ``pids``: the processes that use a GPU."""
    status = _fields(root / "proc/self/status")
    freezer = find_freezer(root, pids)
    gvisor = "gVisor" in _text(root / "proc/version")
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    module = _text(root / "proc/driver/nvidia/version")
    available = _fields(root / "proc/meminfo").get("MemAvailable", "").removesuffix("kB").strip()
    return HostFacts(
        uid=_uid(status),
        capabilities=int(status.get("CapEff", "0"), 16),
        ptrace_scope=int(scope) if scope.isdigit() else None,
        host_pids=None if gvisor else _link(root / "proc/self/ns/pid") == _INITIAL_PID_NAMESPACE,
        machine=os.uname().machine,
        gvisor=gvisor,
        open_module="Open Kernel Module" in module if module else None,
        cgroup=cgroup_version(root),
        freezer="" if freezer is None else f"/{freezer.relative_to(root)}",
        freezer_writable=freezer is not None and os.access(freezer, os.W_OK),
        nodes=read_nodes(root),
        available_bytes=int(available) * 1024 if available.isdigit() else None,
        targets=tuple(target for pid in pids if (target := read_target(root, pid)) is not None),
    )


def read_target(root: Path, pid: int) -> TargetFacts | None:
    """One process; None where /proc does not show it."""
    status = _fields(root / f"proc/{pid}/status")
    if not status:
        return None
    limit = memory_limit(root, pid)
    return TargetFacts(pid, status.get("Name", "?"), _uid(status), limit.cgroup, limit.limit_bytes, limit.free_bytes)


def cgroup_version(root: Path) -> str:
    """v2, v1, hybrid or none, by what is mounted at /sys/fs/cgroup."""
    base = root / "sys/fs/cgroup"
    unified = unified_mount(root)
    if unified == base:
        return "v2"
    if (base / "freezer").is_dir() or (base / "memory").is_dir():
        return "v1" if unified is None else "hybrid"
    return "none"


def find_freezer(root: Path, pids: Iterable[int]) -> Path | None:
    """The file that would freeze a container: of a process that uses a GPU, else of a pod, else of this process."""
    unified, v1 = unified_mount(root), root / "sys/fs/cgroup/freezer"
    pods = {"": "/kubepods.slice", "freezer": "/kubepods.slice"}, {"": "/kubepods", "freezer": "/kubepods"}
    for where in (*(paths(root, pid) for pid in pids), *pods, paths(root, "self")):
        found = [unified / where[""].lstrip("/") / "cgroup.freeze"] if unified and "" in where else []
        found += [v1 / where["freezer"].lstrip("/") / "freezer.state"] if "freezer" in where else []
        for file in found:
            if ".." not in file.parts and file.exists():
                return file
    return None


def read_nodes(root: Path) -> dict[str, str]:
    """/dev/nvidia* and whether each can be opened."""
    nodes = {}
    for node in sorted((root / "dev").glob("nvidia*")):
        if not node.is_dir():
            nodes[f"/{node.relative_to(root)}"] = "" if os.access(node, os.R_OK | os.W_OK) else "no permission"
    return nodes


def _uid(status: dict[str, str]) -> int:
    """The effective one."""
    return int(status["Uid"].split()[1]) if "Uid" in status else os.geteuid()


def _fields(file: Path) -> dict[str, str]:
    """Lines of ``Name: value``; empty where there is no such file."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in _text(file).splitlines())}


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _link(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""
