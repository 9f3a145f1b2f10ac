"""Numbers of the driver's header ``cuda.h``: results of calls and states of processes. Pure."""

from enum import IntEnum


class Result(IntEnum):
    """``CUresult``, as far as initialization and checkpointing are known to answer."""

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
    """Not in the state that the call needs; nothing was changed."""
    NOT_FOUND = 500
    NOT_READY = 600
    """The lock timed out; the process goes on running."""
    LAUNCH_FAILED = 719
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    SYSTEM_NOT_READY = 802
    """A daemon that the system needs (NVSwitch: the fabric manager) is not up yet."""
    SYSTEM_DRIVER_MISMATCH = 803
    """Library and kernel module are of different versions."""
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
    UNKNOWN = 999


class State(IntEnum):
    """``CUprocessState``: RUNNING → lock → LOCKED → checkpoint → CHECKPOINTED → restore → LOCKED → unlock → RUNNING."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    """Cannot be corrected; only killing the process frees what it holds."""
    CHECKPOINTING = 4
    """Since CUDA 13.4: the caller is moving the bytes (custom storage)."""
    RESTORING = 5
    """Since CUDA 13.4: the caller is moving the bytes (custom storage)."""


_RESULTS = {int(code): code.name for code in Result}
_STATES = {int(state): state.name for state in State}


def result_name(code: int) -> str:
    """SUCCESS, OUT_OF_MEMORY …; a number that is not in the table is ``RESULT_<number>``."""
    return _RESULTS.get(code, f"RESULT_{code}")


def state_name(number: int) -> str:
    """RUNNING, LOCKED …; a number that is not in the table is ``STATE_<number>``."""
    return _STATES.get(number, f"STATE_{number}")
