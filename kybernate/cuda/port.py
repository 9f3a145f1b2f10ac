"""The interface to the CUDA driver's checkpoint API, as ``ctypes_api`` implements it."""

from collections.abc import Sequence
from typing import Protocol

GpuPairs = Sequence[tuple[bytes, bytes]]
"""(old, new) UUID of every GPU that the kernel driver shows, 16 bytes each."""


class CudaUnavailableError(Exception):
    """The driver cannot be called; the text says what is missing and what to do."""


class CheckpointApi(Protocol):
    """The checkpoint API of the driver library in this process. Calls block, possibly for ever.

    Failures are ``CUresult`` numbers, not exceptions. CudaUnavailableError means that the library lacks the function.
    """

    binding: str
    """Name of the binding, for messages."""

    def init(self) -> int:
        """``cuInit(0)``: takes seconds on a large machine. Creates no context."""

    def driver_version(self) -> tuple[int, int]:
        """(result, newest CUDA version that the driver knows: 13000 is 13.0). Needs no init."""

    def state(self, pid: int) -> tuple[int, int]:
        """(result, state number or -1). Blocks while a checkpoint or restore of the process is under way."""

    def restore_tid(self, pid: int) -> tuple[int, int]:
        """(result, thread id or -1). Succeeds only for processes that use CUDA."""

    def lock(self, pid: int, timeout_ms: int = 0) -> int:
        """RUNNING → LOCKED. ``timeout_ms`` (wall, 0 is none) bounds the wait for submitted work only."""

    def checkpoint(self, pid: int) -> int:
        """LOCKED → CHECKPOINTED: memory moves to the host, the GPUs are released."""

    def restore(self, pid: int, pairs: GpuPairs | None = None) -> int:
        """CHECKPOINTED → LOCKED. ``pairs`` moves it to other GPUs; driver 580 or newer."""

    def unlock(self, pid: int) -> int:
        """LOCKED → RUNNING."""
