"""Which seats the driver does not park, and which it does not move to other GPUs: rules, and the reasons as text. Pure.

Parking or moving these seats makes the driver fail late or lose the processes, so they are refused before anything is
touched. Some of the causes leave no trace outside the process; docs/dev/checkpointer.md lists what counts as evidence.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal


class Allowance(StrEnum):
    """Refusals that an operator may lift for a node or a pod, after a trial on that stack."""

    SEVERAL_GPUS = "several-gpus"
    SEVERAL_PROCESSES = "several-processes"
    NCCL = "nccl"
    MANAGED_MEMORY = "managed-memory"
    FILE_LOCKS = "file-locks"


KILL_HANGS_ON_DRIVER = 595
"""The end of a live process that was once restored hung the machine, 4 of 4 (open module, cuda-checkpoint #53)."""


def kill_hangs(driver: "DriverInfo", kernel_module: str) -> bool:
    """True if processes must be checkpointed before they end (H2). ``kernel_module``: its version text; empty if
    unknown, which counts as the open one."""
    return driver.major == KILL_HANGS_ON_DRIVER and (not kernel_module or "Open Kernel Module" in kernel_module)


def comma_list(text: str) -> frozenset[str]:
    """Split a comma-separated list."""
    return frozenset(part.strip() for part in text.split(",") if part.strip())


MANAGED_MEMORY_SWITCHES = ("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "TF_FORCE_UNIFIED_MEMORY")
"""Environment variables that make llama.cpp, and TensorFlow and JAX, allocate managed memory."""
NCCL_THREADS = ("pt_nccl_", "NCCL ")
"""Prefixes of threads of a live communicator: PyTorch's watchdog, and NCCL's threads (NCCL_SET_THREAD_NAME=1)."""
NCCL_ABORTS_ON_DRIVER = 595
"""A process group of one GPU aborts on 595 and survives on 580 (H7). Newer ones: vLLM with one was parked and restored
by NVIDIA's agent (ai-dynamo/snapshot #108)."""
ARM = ("aarch64", "arm64")
MPS_SERVER = "nvidia-cuda-mps"
OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """Version and capabilities of the driver, from a helper's ``describe``."""

    version: str = ""
    """``580.95.05``; empty if unknown."""
    gpu_map: bool = False
    mig: Mapping[str, bool] | None = None

    @property
    def major(self) -> int:
        """580; 0 if unknown."""
        first = self.version.partition(".")[0]
        return int(first) if first.isdigit() else 0


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One GPU process as /proc shows it."""

    pid: int
    uvm_mappings: int = 0
    """Mappings of /dev/nvidia-uvm: at most one in a CUDA process, more in one with managed memory (gpunap: 2 and 5)."""
    threads: frozenset[str] = frozenset()
    environment: Mapping[str, str] | None = None

    @property
    def communicates(self) -> bool:
        """True if a thread proves a live NCCL communicator."""
        return any(name.startswith(NCCL_THREADS) for name in self.threads)


def driver_from(reply: Mapping[str, Any]) -> DriverInfo:
    """Parse a helper's reply to ``describe``."""
    can = reply.get("capabilities") or {}
    return DriverInfo(
        version=str(reply.get("driver") or ""),
        gpu_map=bool(can.get("gpu_map")),
        mig=dict(reply.get("mig") or {}),
    )


def park_refusal(
    gpus: Sequence[str],
    driver: DriverInfo,
    processes: Sequence[ProcessFacts],
    neighbours: Collection[str],
    allowed: Collection[str],
    machine: str = "x86_64",
) -> str | None:
    """The reason why a seat on these GPUs is not parked; None if it can be.

    ``processes``: those that hold VRAM. ``neighbours``: names of all processes that use these GPUs. ``allowed``:
    allowances that hold for this pod. ``machine``: of the host, as ``uname -m`` names it.
    """
    if machine in ARM:  # cuda-checkpoint #51
        return f"this host is {machine}: its driver locks processes and cannot checkpoint them; use backend restart"
    if parts := [gpu for gpu in gpus if gpu.startswith("MIG-") or (driver.mig or {}).get(gpu)]:
        return f"{', '.join(parts)}: MIG is not supported by the driver's checkpoint; switch MIG off or park by restart"
    if any(name.startswith(MPS_SERVER) for name in neighbours):
        return "MPS serves these GPUs, which the driver's checkpoint does not support; stop nvidia-cuda-mps-control"
    if Allowance.MANAGED_MEMORY not in allowed and (why := _managed(processes)) is not None:
        return why
    return _together(gpus, driver, processes, allowed)


def _managed(processes: Sequence[ProcessFacts]) -> str | None:
    """The reason against managed memory; None if nothing shows any."""
    for process in processes:
        environment = process.environment or {}
        switches = [name for name in MANAGED_MEMORY_SWITCHES if environment.get(name, "").lower() not in OFF]
        if switches:
            what = f"({', '.join(switches)})"
        elif process.uvm_mappings > 1:
            what = f"({process.uvm_mappings} mappings of /dev/nvidia-uvm)"
        else:
            continue
        return (
            f"pid {process.pid} uses managed memory {what}, which cannot be checkpointed: have the engine allocate "
            "none, or allow managed-memory after a trial"
        )
    return None


def _together(
    gpus: Sequence[str], driver: DriverInfo, processes: Sequence[ProcessFacts], allowed: Collection[str]
) -> str | None:
    """The reason against parking GPUs or processes that communicate with each other; None if there is none."""
    several = len(gpus) > 1 or len(processes) > 1
    pids = [process.pid for process in processes]
    ranks = [process.pid for process in processes if process.communicates]
    if ranks and several and Allowance.NCCL not in allowed:
        return (
            f"pids {ranks} use NCCL in a seat of {len(gpus)} GPUs and {len(pids)} processes; live communicators do not "
            "survive a checkpoint: use backend restart, or allow nccl if the engine destroys them before"
        )
    if ranks and driver.major == NCCL_ABORTS_ON_DRIVER and Allowance.NCCL not in allowed:
        return (
            f"pid {ranks[0]} has an NCCL process group, which aborts on driver {driver.version}; install driver 580, "
            "or allow nccl after a trial"
        )
    if len(gpus) > 1 and Allowance.SEVERAL_GPUS not in allowed:
        return (
            f"it has {len(gpus)} GPUs, and only seats of one GPU are parked through the driver; use backend restart, "
            "or allow several-gpus after a trial on this stack"
        )
    if len(pids) > 1 and Allowance.SEVERAL_PROCESSES not in allowed:
        return (
            f"it has {len(pids)} processes with VRAM ({pids}), which may share memory by CUDA IPC, and a checkpoint "
            "breaks both ends of that; allow several-processes if they do not"
        )
    return None


NEEDS_DRIVER = "restoring to another GPU needs driver 580 or newer"


@dataclass(frozen=True, slots=True)
class MoveRefusal:
    """Why a seat cannot move to other GPUs, and whether that holds for this seat or for the whole node."""

    reason: str
    whose: Literal["seat", "node"] = "seat"


def moves(parked_on: Sequence[str], target: Sequence[str]) -> dict[str, str]:
    """Old → new GPU UUID, in the groups' order; empty if the seat stays on its GPUs."""
    return {} if set(parked_on) == set(target) else dict(zip(parked_on, target, strict=False))


def permutation(everyone: Iterable[str], wanted: Mapping[str, str]) -> dict[str, str] | None:
    """The map for the driver's restore: every GPU of the machine once on each side, the moved ones swapped.

    None if nothing moves: then the driver gets no map. Raises ValueError for a GPU in ``wanted`` that does not answer.
    """
    if not wanted:
        return None
    found = sorted(gpu for gpu in everyone if not gpu.startswith("MIG-"))
    if missing := sorted({*wanted, *wanted.values()} - set(found)):
        raise ValueError(f"{', '.join(missing)} does not answer; those that do are {', '.join(found) or 'none'}")
    back = {new: old for old, new in wanted.items()}
    return {gpu: wanted.get(gpu, back.get(gpu, gpu)) for gpu in found}


def move_refusal(
    parked_on: Sequence[str], processes: int, allowed: Collection[str], *, driver_can: bool, driver: str
) -> MoveRefusal | None:
    """The reason why a seat does not move from the GPUs that it was parked on; None if no rule forbids it.

    Several GPUs or processes need the allowances of their park: after a move NCCL looks up the old PCI address (H12).
    """
    if not driver_can:
        return MoveRefusal(f"{NEEDS_DRIVER}, this is {driver or 'older'}", "node")
    several = (
        (len(parked_on), "GPUs", Allowance.SEVERAL_GPUS),
        (processes, "GPU processes", Allowance.SEVERAL_PROCESSES),
    )
    for count, what, needed in several:
        if count > 1 and needed not in allowed:
            text = f"it has {count} {what}, and only seats of one move; allow {needed} after a trial on this stack"
            return MoveRefusal(text)
    return None
