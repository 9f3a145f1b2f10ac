"""Checks of the machine's facts: rights, pid namespace, control groups, device nodes, memory. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterator

from kybernate.cuda import HOST_BYTES_PER_VRAM_BYTE
from kybernate.doctor.model import DriverFacts, Finding, HostFacts, TargetFacts, fail, ok, warn
from kybernate.sizes import format_bytes

SYS_PTRACE = 19
"""Number of CAP_SYS_PTRACE (linux/capability.h)."""


def check_host(driver: DriverFacts, host: HostFacts) -> Iterator[Finding]:
    """All checks that need no driver call; the fake driver needs no device nodes."""
    yield _machine(host)
    if not driver.fake:
        yield from _nodes(driver, host)
    yield _ptrace(host)
    yield _pids(driver, host)
    yield _freezer(host)
    yield from _limits(driver, host)
    if driver.gpus:
        yield from _host_memory(driver, host)
    yield ok("criu", "not needed: a parked process stays where it is, only its VRAM moves")


def _machine(host: HostFacts) -> Finding:
    if host.gvisor:
        text = "the kernel is gVisor's, which may deny the driver access to other processes"
        return warn("machine", text, "run the checkpointer outside of gVisor; see the line access")
    if host.machine != "x86_64":
        text = f"{host.machine}: NVIDIA documents checkpoints for x86_64 only"
        return warn("machine", text, "try it before you rely on it: make gpu-bench")
    return ok("machine", host.machine)


def _nodes(driver: DriverFacts, host: HostFacts) -> Iterator[Finding]:
    wanted = ["/dev/nvidiactl", "/dev/nvidia-uvm", *(f"/dev/nvidia{gpu.minor}" for gpu in driver.gpus)]
    missing = [node for node in wanted if node not in host.nodes]
    closed = [node for node in wanted if host.nodes.get(node)]
    if not host.nodes:
        yield fail("nodes", "no /dev/nvidia*", "load the kernel module (nvidia-smi does), or runtimeClass nvidia")
    elif missing or closed:
        text = "; ".join(
            [*(f"{node} is missing" for node in missing), *(f"{node}: {host.nodes[node]}" for node in closed)]
        )
        yield fail("nodes", text, "nvidia-modprobe -u -c 0 makes them; a container needs runtimeClass nvidia")
    else:
        yield ok("nodes", ", ".join(wanted))


def _ptrace(host: HostFacts) -> Finding:
    """The driver is assumed to need ptrace access: inferred, NVIDIA documents nothing."""
    if host.ptrace_scope == 3:
        text = "kernel.yama.ptrace_scope is 3: no process may attach to another"
        return warn("ptrace", text, "sysctl kernel.yama.ptrace_scope=1 takes a reboot to come back from 3")
    if host.capabilities >> SYS_PTRACE & 1:
        return ok("ptrace", "CAP_SYS_PTRACE: processes of every user")
    others = sorted({target.uid for target in host.targets} - {host.uid})
    if others:
        users = f"user{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        text = f"no CAP_SYS_PTRACE, and this is user {host.uid}: processes of {users} are out of reach"
        return fail("ptrace", text, "securityContext.capabilities.add: [SYS_PTRACE]")
    text = f"no CAP_SYS_PTRACE: only processes of user {host.uid}"
    if host.ptrace_scope:
        text += f", and kernel.yama.ptrace_scope is {host.ptrace_scope}"
    return warn("ptrace", text, "securityContext.capabilities.add: [SYS_PTRACE]")


def _pids(driver: DriverFacts, host: HostFacts) -> Finding:
    seen = {target.pid for target in host.targets}
    hidden = sorted({use.pid for use in driver.uses} - seen)
    if hidden:
        text = f"the driver names processes {', '.join(map(str, hidden))}, which this pid namespace does not show"
        return fail("pids", text, "hostPID: true")
    if host.host_pids:
        return ok("pids", "the machine's own pid namespace")
    text = "this is not the machine's pid namespace" if host.host_pids is False else "the pid namespace is unknown"
    return warn("pids", f"{text}: only its own processes can be parked", "hostPID: true")


def _freezer(host: HostFacts) -> Finding:
    if not host.freezer:
        text = f"cgroup {host.cgroup}, no freezer found: parked processes are stopped by SIGSTOP"
        return warn("cgroup", text, "mount the host's /sys/fs/cgroup")
    if not host.freezer_writable:
        text = f"cgroup {host.cgroup}; {host.freezer} is read-only: parked processes are stopped by SIGSTOP"
        return warn("cgroup", text, "mount the host's /sys/fs/cgroup writable; CAP_SYS_ADMIN")
    return ok("cgroup", f"cgroup {host.cgroup}; {host.freezer} is writable")


def _limits(driver: DriverFacts, host: HostFacts) -> Iterator[Finding]:
    """The copy of the VRAM is memory of the process, so it counts against the limit of its container."""
    vram: dict[int, int] = defaultdict(int)
    for use in driver.uses:
        vram[use.pid] += use.bytes
    by_cgroup: dict[str, list[TargetFacts]] = defaultdict(list)
    for target in host.targets:
        if vram[target.pid]:
            by_cgroup[target.cgroup].append(target)
    for cgroup, targets in sorted(by_cgroup.items()):
        yield _limit(cgroup, targets, sum(vram[target.pid] for target in targets))
    if any(not use.exact for use in driver.uses):
        text = "the driver does not report memory by process: the lines above count all that is used on its GPUs"
        need = f"{HOST_BYTES_PER_VRAM_BYTE} x VRAM in addition to the engine's own memory"
        yield warn("memory", text, f"check these limits yourself: {need}")


def _limit(cgroup: str, targets: list[TargetFacts], vram: int) -> Finding:
    who = ", ".join(f"{target.name} ({target.pid})" for target in targets)
    need = math.ceil(vram * HOST_BYTES_PER_VRAM_BYTE)
    if not cgroup:
        text = f"{who}: {format_bytes(vram)} of VRAM, the memory limit is not visible here"
        return warn("memory", text, "mount the host's /sys/fs/cgroup")
    limit, free = targets[0].limit_bytes, targets[0].free_bytes
    if limit is None or free is None:
        return ok("memory", f"{who}: {format_bytes(vram)} of VRAM, no memory limit")
    text = f"{who}: {format_bytes(vram)} of VRAM need {format_bytes(need)}; "
    text += f"its limit of {format_bytes(limit)} leaves {format_bytes(free)}"
    if free < need:
        return fail(
            "memory", text, f"raise the container's memory limit to at least {format_bytes(limit + need - free)}"
        )
    return ok("memory", text)


def _host_memory(driver: DriverFacts, host: HostFacts) -> Iterator[Finding]:
    total = sum(gpu.memory_bytes for gpu in driver.gpus)
    if host.available_bytes is None:
        yield warn("host memory", "MemAvailable is unknown", "is /proc mounted?")
        return
    need = math.ceil(total * HOST_BYTES_PER_VRAM_BYTE)
    available = f"{format_bytes(host.available_bytes)} available"
    text = f"{available}; {format_bytes(total)} of VRAM parked once need {format_bytes(need)}"
    if driver.fake:
        yield ok("host memory", f"{available}; fake VRAM needs none")
    elif host.available_bytes < need:
        remedy = "more RAM, fewer seats, or a smaller --gpu-memory-utilization: a park without room is refused"
        yield warn("host memory", text, remedy)
    else:
        yield ok("host memory", text)
    if not driver.fake:
        yield _huge_pages(host)


def _huge_pages(host: HostFacts) -> Finding:
    """The driver copies into ordinary memory, and asks for no huge pages itself (docs/dev/measurements, 2026-11-28)."""
    if host.huge_pages in ("madvise", "never"):
        text = f"transparent huge pages: {host.huge_pages}; with always a park took 0.7 of the time on an H100"
        return warn("huge pages", text, "echo always > /sys/kernel/mm/transparent_hugepage/enabled")
    return ok("huge pages", f"transparent huge pages: {host.huge_pages or 'none in this kernel'}")
