"""One process that uses the fake GPUs, and what the core tells its shell. Pure data."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Any

from kybernate.dev.fakes.gpu.codes import Code, State

RESIDUE_SHARE = 0.1
"""A process that holds at most this share of its own peak counts as asleep: engine sleep leaves a residue."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as the kernel says: pids come back, (pid, start time) does not."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Target:
    """What /proc says about the process that a checkpoint call names."""

    exists: bool = True
    zombie: bool = False
    stopped: bool = False
    """By SIGSTOP, a debugger or the cgroup freezer."""


@dataclass(frozen=True, slots=True)
class Call:
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

    call: Call
    ends_at: float
    code: Code = Code.SUCCESS
    kills: bool = False
    """The process dies at the end (an injected fault)."""


@dataclass(slots=True)
class Process:
    """A process since its attach."""

    pid: int
    start: int
    seat: str
    watch: bool = False
    state: State = State.RUNNING
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by GPU; an entry of 0 is a context without memory, as NVML shows it."""
    device_nodes: frozenset[str] | None = None
    """GPUs whose device nodes it has, by UUID; None: all of them. It cannot be restored to others."""
    communicator: str | None = None
    """Live NCCL communicator; processes that name the same one are its ranks."""
    ipc: bool = False
    """It shares memory by CUDA IPC."""
    managed: bool = False
    """It uses managed memory (UVM)."""
    restored: bool = False
    """It was restored at least once."""
    parked: dict[str, int] = field(default_factory=dict)
    """Bytes by GPU that lie in host memory."""
    peak_bytes: int = 0
    moved: dict[str, str] = field(default_factory=dict)
    """Its own name of a GPU → the GPU it was restored to."""
    requests: set[str] = field(default_factory=set)
    freezable: bool = False
    """Its requests may be frozen with it: a checkpoint while they are computed is no violation."""
    stopped: bool = False
    busy_until: float = 0.0
    """When the work that was submitted to the GPU ends; a lock waits for it."""
    operation: Operation | None = None
    verbs: deque[Call] = field(default_factory=deque)
    """Checkpoint calls that wait for the operation, or for SIGCONT."""
    blocked: deque[Call] = field(default_factory=deque)
    """Its own calls that wait until it runs again."""

    @property
    def used_bytes(self) -> int:
        """Memory on all GPUs."""
        return sum(self.memory.values())

    @property
    def asleep(self) -> bool:
        """Whether it holds nothing, or no more than a residue."""
        return self.used_bytes <= self.peak_bytes * RESIDUE_SHARE
