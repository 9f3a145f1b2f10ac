"""Constants of the CUDA driver's interface: result codes, process states, capabilities by version, UUIDs. Pure."""

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

HOST_BYTES_PER_VRAM_BYTE = 1.1
"""A checkpoint takes this much: copy, page tables and buffers. A margin above the
bytes themselves, which the driver copies into ordinary memory of the process."""

FREED_SHARE = 0.9
"""Park evidence: memory in use must fall by this share of the footprint. NVML counts the whole GPU,
and a little of it moves with other processes and the driver."""

_PREFIX = "GPU-"
_BYTES = 16


class CudaResult(IntEnum):
    """``CUresult``: the codes that initialization and checkpoint calls are known to return."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    """At a restore: terminal. At a checkpoint of a process on a MIG instance: MIG is not supported."""
    NOT_INITIALIZED = 3
    """The process does not use CUDA, or is a zombie."""
    DEINITIALIZED = 4
    STUB_LIBRARY = 34
    """The toolkit's link-time libcuda was loaded, not the driver's."""
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_CONTEXT = 201
    ECC_UNCORRECTABLE = 214
    OPERATING_SYSTEM = 304
    """No such process, or no access to it; also every restore after one that ran out of memory."""
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    """The process is not in the state that the call requires; nothing changed."""
    NOT_FOUND = 500
    NOT_READY = 600
    """The lock timed out; the process keeps running."""
    LAUNCH_FAILED = 719
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    SYSTEM_NOT_READY = 802
    """A required daemon (NVSwitch: the fabric manager) is not running yet."""
    SYSTEM_DRIVER_MISMATCH = 803
    """Library and kernel module are of different versions."""
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
    UNKNOWN = 999


class CudaState(IntEnum):
    """``CUprocessState``: RUNNING → lock → LOCKED → checkpoint → CHECKPOINTED → restore → LOCKED → unlock → RUNNING."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    """Not recoverable; only a kill of the process frees its memory."""
    CHECKPOINTING = 4
    """Since CUDA 13.4: the caller is moving the bytes (custom storage)."""
    RESTORING = 5
    """Since CUDA 13.4: the caller is moving the bytes (custom storage)."""


_INIT_REMEDIES: dict[int, str] = {
    CudaResult.STUB_LIBRARY: "this is the toolkit's link-time libcuda; take it out of LD_LIBRARY_PATH",
    CudaResult.NO_DEVICE: "make the GPUs visible here: NVIDIA_VISIBLE_DEVICES=all, runtimeClass nvidia; see nvidia-smi",
    CudaResult.SYSTEM_NOT_READY: "start the fabric manager (NVSwitch machines)",
    CudaResult.SYSTEM_DRIVER_MISMATCH: (
        "library and kernel module differ in version: reboot the node, or restart this container"
    ),
    CudaResult.COMPAT_NOT_SUPPORTED_ON_DEVICE: "take the CUDA compatibility library out of LD_LIBRARY_PATH",
    CudaResult.UNKNOWN: "is the kernel module loaded? see nvidia-smi and the kernel log",
}
_RESULTS = {int(code): code.name for code in CudaResult}
_STATES = {int(state): state.name for state in CudaState}


def result_name(code: int) -> str:
    """SUCCESS, OUT_OF_MEMORY …; an unknown number is ``RESULT_<number>``."""
    return _RESULTS.get(code, f"RESULT_{code}")


def init_remedy(code: int) -> str:
    """What to do where ``cuInit`` answers this."""
    return _INIT_REMEDIES.get(code, "see nvidia-smi and the kernel log")


def state_name(number: int) -> str:
    """RUNNING, LOCKED …; an unknown number is ``STATE_<number>``."""
    return _STATES.get(number, f"STATE_{number}")


class Support(NamedTuple):
    """Capabilities of a driver version."""

    checkpoint: bool
    gpu_map: bool
    launch_job: bool
    custom_storage: bool


def support(cuda_version: int) -> Support:
    """Capabilities of a driver that reports ``cuda_version`` (13000 is 13.0), its bugs not considered."""
    return Support(
        checkpoint=cuda_version >= 12080,  # driver 570
        gpu_map=cuda_version >= 13000,  # driver 580: restore to other GPUs
        launch_job=cuda_version >= 13010,  # driver 590: several processes as one job
        custom_storage=cuda_version >= 13040,  # the caller moves the bytes; states CHECKPOINTING and RESTORING
    )


def cuda_text(cuda_version: int) -> str:
    """13020 → ``13.2``."""
    return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"


def why_no_checkpoint(cuda_version: int, driver: str = "") -> str | None:
    """The reason why there is no checkpoint API; None if there is. ``driver``: 550.54.15, if known."""
    if support(cuda_version).checkpoint:
        return None
    who = f"driver {driver.partition('.')[0]}" if driver else f"the driver (CUDA {cuda_text(cuda_version)})"
    return f"{who} has no checkpoint API; needs 570 or newer (580 recommended)"


def uuid_bytes(uuid: str) -> bytes:
    """``GPU-01234567-89ab-…`` → 16 bytes. Raises ValueError, also for MIG instances, which cannot be checkpointed."""
    try:
        raw = bytes.fromhex(uuid.removeprefix(_PREFIX).replace("-", ""))
    except ValueError:
        raw = b""
    if len(raw) != _BYTES or not uuid.startswith(_PREFIX):
        raise ValueError(f"{uuid!r} is not the UUID of a whole GPU; it has the form GPU- and 32 hexadecimal digits")
    return raw


def gpu_pairs(moves: Mapping[str, str]) -> list[tuple[bytes, bytes]] | None:
    """Old → new UUID as pairs; None if nothing moves: then the driver is called without a map.

    Raises ValueError unless it is a permutation: ``cuCheckpointProcessRestore`` answers a partial map with
    CUDA_ERROR_INVALID_VALUE (NVIDIA/cuda-checkpoint issue 35).
    """
    if sorted(moves) != sorted(moves.values()):
        raise ValueError("a GPU map must name every GPU once as old and once as new")
    pairs = [(uuid_bytes(old), uuid_bytes(new)) for old, new in moves.items()]
    return None if all(old == new for old, new in pairs) else pairs
