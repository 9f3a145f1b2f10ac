"""Result codes and process states of the driver, one process that uses the fake GPUs, and calls. Pure."""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from signal import SIGKILL
from typing import Any


class Code(IntEnum):
    """Numbers of ``CUresult``."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    """The process does not use CUDA, or is a zombie."""
    INVALID_DEVICE = 101
    """It has no device node of that GPU."""
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
    """For good: a fatal XID, or a restore on a live communicator. Only killing it frees what it still holds."""


RESIDUE_SHARE = 0.1
"""A process that holds at most this share of its peak counts as asleep: engine sleep leaves a residue."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as the kernel says: pids come back, (pid, start time) does not."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class CallTarget:
    """What /proc says about the process that a checkpoint call names."""

    exists: bool = True
    zombie: bool = False
    stopped: bool = False
    """By SIGSTOP, a debugger or the cgroup freezer."""


@dataclass(frozen=True, slots=True)
class DriverCall:
    """A call that may have to wait. The token says where its answer goes."""

    token: Hashable
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Effect: send this to the caller."""

    token: Hashable
    code: Code
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kill:
    """Effect: end this process with a signal."""

    pid: int
    signal: int = SIGKILL


@dataclass(frozen=True, slots=True)
class Tell:
    """Effect: tell this process, which asked for it at attach, its new state."""

    pid: int
    state: State


Effect = Answer | Kill | Tell


class RefusedError(Exception):
    """A call is answered with a code other than SUCCESS."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


@dataclass(slots=True)
class Operation:
    """A verb that takes time."""

    call: DriverCall
    ends_at: float
    code: Code = Code.SUCCESS
    kills: bool = False
    """The process dies at the end (an injected fault)."""
    copied_at: float = 0.0
    """When its bytes are copied; what else it does follows."""
    speed: float = 1.0
    """Of its copy, as a part of full speed."""


@dataclass(slots=True)
class CudaProcess:
    """A process since its attach."""

    pid: int
    start: int
    seat: str
    watch: bool = False
    state: State = State.RUNNING
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by GPU; an entry of 0 is a context without memory, as NVML shows it."""
    device_nodes: frozenset[str] | None = None
    """GPUs whose device nodes it has, by UUID; None: all of them. It can use no others, nor be restored to them."""
    communicator: str | None = None
    """Live NCCL communicator; processes that name the same one are its ranks."""
    ipc: bool = False
    """It shares memory by CUDA IPC."""
    managed: bool = False
    """It uses managed memory (UVM)."""
    initialized_only: bool = False
    """It called cuInit and has no context: NVML lists it with 0 bytes, a lock answers NOT_INITIALIZED (llm-d #148)."""
    dead: bool = False
    """A checkpoint of it failed: its state reads RUNNING, and each call that it makes fails (gpunap, driver 595)."""
    spent: bool = False
    """A restore of it ran out of memory: it stays CHECKPOINTED and every later restore fails (cuda-checkpoint #44)."""
    stale: bool = False
    """It has a context of the process that it was forked from: no restore succeeds (vLLM #42873)."""
    restored: bool = False
    """It was restored at least once."""
    parked: dict[str, int] = field(default_factory=dict)
    """Bytes by GPU that lie in host memory."""
    peak_bytes: int = 0
    moved: dict[str, str] = field(default_factory=dict)
    """Its own name of a GPU → the GPU it was restored to."""
    requests: set[str] = field(default_factory=set)
    stopped: bool = False
    busy_until: float = 0.0
    """When the work that was submitted to the GPU ends; a lock waits for it."""
    operation: Operation | None = None
    verbs: deque[DriverCall] = field(default_factory=deque)
    """Checkpoint calls that wait for the operation, or for SIGCONT."""
    blocked: deque[DriverCall] = field(default_factory=deque)
    """Its own calls that wait until it runs again."""

    @property
    def used_bytes(self) -> int:
        """Memory on all GPUs."""
        return sum(self.memory.values())

    @property
    def asleep(self) -> bool:
        """Whether it holds nothing, or no more than a residue."""
        return self.used_bytes <= self.peak_bytes * RESIDUE_SHARE


def integer(arguments: dict[str, Any], name: str, default: int | None = None) -> int:
    """An argument that is a number of at least 0."""
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RefusedError(Code.INVALID_VALUE, f"{name}={value!r}; give a whole number of at least 0")
    return value


def text(arguments: dict[str, Any], name: str, default: str | None = None) -> str:
    """An argument that is a text and not empty."""
    value = arguments.get(name) or default
    if not isinstance(value, str):
        raise RefusedError(Code.INVALID_VALUE, f"{name}={value!r}; give a text")
    return value


def texts(arguments: dict[str, Any], name: str) -> list[str]:
    """An argument that is a list of texts."""
    value = arguments.get(name)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RefusedError(Code.INVALID_VALUE, f"{name}={value!r}; give a list of texts")
    return value


def gpu_permutation(arguments: dict[str, Any], gpus: Iterable[str]) -> dict[str, str]:
    """The ``gpu_map`` of a restore. As on real drivers it must name every GPU of the machine once on each side."""
    everyone = sorted(gpus)
    moves = arguments.get("gpu_map")
    if moves is None:
        return dict(zip(everyone, everyone, strict=True))
    if not isinstance(moves, dict) or sorted(moves) != everyone or sorted(map(str, moves.values())) != everyone:
        raise RefusedError(Code.INVALID_VALUE, f"gpu_map must be a permutation of all GPUs: {', '.join(everyone)}")
    return moves
