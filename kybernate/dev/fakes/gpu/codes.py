"""Result codes and process states of the CUDA driver's checkpoint API, as far as the fake uses them."""

from enum import IntEnum, StrEnum


class Code(IntEnum):
    """Numbers of ``CUresult``."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    """The process does not use CUDA, or is a zombie."""
    OPERATING_SYSTEM = 304
    """No such process; also every restore after one that ran out of memory."""
    ILLEGAL_STATE = 401
    """Not in the state that the call needs; nothing was changed."""
    NOT_READY = 600
    """The lock timed out; the process goes on running."""
    NOT_SUPPORTED = 801
    """CUDA IPC, managed memory, a GPU whose device node the process does not have."""
    UNKNOWN = 999
    """A restore that failed on a live NCCL communicator."""


class State(StrEnum):
    """``CUprocessState``: RUNNING → lock → LOCKED → checkpoint → CHECKPOINTED → restore → LOCKED → unlock → RUNNING."""

    RUNNING = "RUNNING"
    LOCKED = "LOCKED"
    CHECKPOINTED = "CHECKPOINTED"
    FAILED = "FAILED"
    """For good: a restore ran out of memory. Only killing the process frees what it still holds."""
