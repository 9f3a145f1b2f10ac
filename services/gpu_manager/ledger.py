"""The node's ledger: what a manager must not forget, in one file that is always whole.

Written before anything that follows from it is said, and on disk (fsync) before a start ticket or a pin is. After a
restart it says who held what; evidence from the processes decides over it. Switches need no fsync here: the
checkpointer journals them, and a machine that crashed has no processes left. Losing it loses no seat: every live
process without park evidence then holds its group.
"""

import contextlib
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kybernate import files
from kybernate.seat import SeatState


class LedgerEntry(BaseModel):
    """One owned seat."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seat: str
    state: SeatState
    epoch: int
    lease: bool
    pod: str
    pod_uid: str
    container_id: str = ""
    seen_running: bool = False
    ticket: str = ""
    """The last start call that got a ticket."""
    inherited: bool = False
    """That was the owner before: its container may come beside this one's."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of its own group."""
    on: tuple[str, ...] = ()
    """UUIDs of the GPUs of the group that it is on, where that is another one."""
    fixed: str = ""
    """Why it is not moved to other groups any more."""
    vram_bytes: int = 0
    host_bytes: int = 0
    started: bool = False
    pinned: bool = False
    """By an operator."""
    endpoint: str | None = None
    annotations: dict[str, str] = Field(default_factory=dict)
    park_seconds: float = 2.0
    frozen_since: float = 0.0
    """Unix seconds since which requests in flight stand still with it; 0: none do."""
    frozen_until: float = 0.0
    parks: int = 0
    activate_seconds: float = 2.0
    activations: int = 0
    switch_seconds: float = 4.0


class Ledger(BaseModel):
    """All owned seats of a node, and the highest epoch that it gave out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    boot_id: str = ""
    epoch: int = 0
    seats: tuple[LedgerEntry, ...] = ()
    routers: dict[str, str] = Field(default_factory=dict)
    """Present routers, instance → incarnation: a successor must not forget one that it cannot hear."""
    move_seconds: float = 3.0
    """Learned: what activating a seat on another group costs beyond activating it."""


class LedgerFile:
    """The ledger on disk: one JSON line per change, and the last whole line is the truth.

    Appending keeps a change below 0.1 ms (replacing a file makes ext4 flush it); the file is begun anew when it grows.
    """

    def __init__(self, path: Path, *, longest_bytes: int = 4 * 2**20) -> None:
        self.path = path
        self._longest = longest_bytes
        self._handle: int | None = None
        self._size = 0
        self._written = b""
        self._durable = True

    def read(self) -> Ledger:
        """The last whole ledger, or an empty one. A file without one is set aside, not overwritten."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Ledger()
        for line in reversed(data.splitlines()):
            with contextlib.suppress(ValidationError):
                return Ledger.model_validate_json(line)
        os.replace(self.path, self.path.with_suffix(".unreadable"))
        return Ledger()

    def write(self, ledger: Ledger, *, durable: bool) -> None:
        """Append the ledger if it changed. It outlives this process; with ``durable`` also a crash of the machine."""
        line = ledger.model_dump_json().encode() + b"\n"
        if line != self._written:
            if self._handle is None or self._size + len(line) > self._longest:
                self._begin(line)
            else:
                os.write(self._handle, line)
                self._size += len(line)
                self._durable = False
            self._written = line
        if durable and not self._durable and self._handle is not None:
            os.fdatasync(self._handle)
            self._durable = True

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _begin(self, line: bytes) -> None:
        """A new file with this line only, whole and on disk before it takes the old one's place."""
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(self.path, line, durable=True, mode=0o600)
        self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        self._size, self._durable = len(line), True
