"""The checkpoint API through ctypes on ``libcuda.so.1``: needs no package and is light to import.

The structs are the driver's ABI since CUDA 12.8 (GPU pairs since 13.0): 64 bytes each, reserved fields zero.
"""

import ctypes
from collections.abc import Callable, Sequence

LIBRARY = "libcuda.so.1"
GpuPairs = Sequence[tuple[bytes, bytes]]
"""(old, new) UUID of every GPU that the kernel driver shows, 16 bytes each."""


class CudaUnavailableError(Exception):
    """The driver cannot be called; the text says what is missing and what to do."""


class GpuPair(ctypes.Structure):
    """``CUcheckpointGpuPair``."""

    _fields_ = (("old", ctypes.c_uint8 * 16), ("new", ctypes.c_uint8 * 16))


class LockArgs(ctypes.Structure):
    """``CUcheckpointLockArgs``."""

    _fields_ = (("timeout_ms", ctypes.c_uint32), ("reserved", ctypes.c_uint8 * 60))


class PlainArgs(ctypes.Structure):
    """``CUcheckpointCheckpointArgs`` without custom storage, and ``CUcheckpointUnlockArgs``."""

    _fields_ = (("reserved", ctypes.c_uint64 * 8),)


class RestoreArgs(ctypes.Structure):
    """``CUcheckpointRestoreArgs`` without custom storage."""

    _fields_ = (
        ("pairs", ctypes.POINTER(GpuPair)),
        ("pairs_count", ctypes.c_uint32),
        ("reserved", ctypes.c_uint8 * 52),
    )


class CheckpointApi:
    """The checkpoint API of the driver library in this process. Calls block, possibly for ever, without the GIL.

    Failures are ``CUresult`` numbers, not exceptions. CudaUnavailableError means that the library lacks the function.
    """

    binding = f"ctypes on {LIBRARY}"
    """For messages."""

    def __init__(self) -> None:
        """Load the library, not initialized. Raises CudaUnavailableError naming what is missing."""
        try:
            self._lib = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaUnavailableError(
                f"no CUDA driver library: {error}; install the NVIDIA driver, or give this container runtimeClass "
                "nvidia and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            ) from error

    def init(self) -> int:
        """``cuInit(0)``: takes seconds on a large machine. Creates no context."""
        return int(self._function("cuInit")(ctypes.c_uint(0)))

    def driver_version(self) -> tuple[int, int]:
        """(result, newest CUDA version that the driver knows: 13000 is 13.0). Needs no init."""
        version = ctypes.c_int(0)
        return int(self._function("cuDriverGetVersion")(ctypes.byref(version))), version.value

    def state(self, pid: int) -> tuple[int, int]:
        """(result, state number or -1). Blocks while a checkpoint or restore of the process is under way."""
        return self._read("cuCheckpointProcessGetState", pid)

    def restore_tid(self, pid: int) -> tuple[int, int]:
        """(result, thread id or -1). Succeeds only for processes that use CUDA."""
        return self._read("cuCheckpointProcessGetRestoreThreadId", pid)

    def lock(self, pid: int, timeout_ms: int = 0) -> int:
        """RUNNING → LOCKED. ``timeout_ms`` (wall, 0 is none) bounds the wait for submitted work only."""
        return self._do("cuCheckpointProcessLock", pid, LockArgs(timeout_ms=timeout_ms))

    def checkpoint(self, pid: int) -> int:
        """LOCKED → CHECKPOINTED: memory moves to the host, the GPUs are released."""
        return self._do("cuCheckpointProcessCheckpoint", pid, PlainArgs())

    def restore(self, pid: int, pairs: GpuPairs | None = None) -> int:
        """CHECKPOINTED → LOCKED. ``pairs`` moves it to other GPUs; driver 580 or newer."""
        arguments = RestoreArgs()
        array = (GpuPair * len(pairs or ()))()  # referenced until the call is over
        for entry, (old, new) in zip(array, pairs or (), strict=True):
            entry.old[:] = old
            entry.new[:] = new
        if pairs:
            arguments.pairs = array
            arguments.pairs_count = len(array)
        return self._do("cuCheckpointProcessRestore", pid, arguments)

    def unlock(self, pid: int) -> int:
        """LOCKED → RUNNING."""
        return self._do("cuCheckpointProcessUnlock", pid, PlainArgs())

    def _read(self, name: str, pid: int) -> tuple[int, int]:
        value = ctypes.c_int(-1)
        code = int(self._function(name)(ctypes.c_int(pid), ctypes.byref(value)))
        return code, value.value if code == 0 else -1

    def _do(self, name: str, pid: int, arguments: ctypes.Structure) -> int:
        return int(self._function(name)(ctypes.c_int(pid), ctypes.byref(arguments)))

    def _function(self, name: str) -> Callable[..., int]:
        try:
            function: Callable[..., int] = getattr(self._lib, name)  # all return CUresult, an int
        except AttributeError as error:
            raise CudaUnavailableError(
                f"{LIBRARY} has no {name}; the driver must be 570 or newer (580 recommended)"
            ) from error
        return function
