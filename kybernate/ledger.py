"""The node's ledger: what a manager must not forget, in one file that is always whole.

Written with fsync and rename before a grant becomes visible. After a restart it says who held what; evidence from
the processes decides over it. Losing it loses no seat: every live process without park evidence then holds its group.
"""

import contextlib
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of its group."""
    vram_bytes: int = 0
    host_bytes: int = 0
    started: bool = False
    pinned: bool = False
    """By an operator."""
    endpoint: str | None = None
    annotations: dict[str, str] = Field(default_factory=dict)
    park_seconds: float = 2.0
    activate_seconds: float = 2.0
    switch_seconds: float = 4.0


class Ledger(BaseModel):
    """All owned seats of a node, and the highest epoch that it gave out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    boot_id: str = ""
    epoch: int = 0
    seats: tuple[LedgerEntry, ...] = ()


class LedgerFile:
    """The ledger on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: bytes | None = None

    def read(self) -> Ledger:
        """The last whole ledger, or an empty one. An unreadable file is set aside, not overwritten."""
        try:
            return Ledger.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return Ledger()
        except ValidationError:
            os.replace(self.path, self.path.with_suffix(".unreadable"))
            return Ledger()

    def write(self, ledger: Ledger) -> None:
        """Make it durable; nothing is written when nothing changed."""
        data = ledger.model_dump_json().encode()
        if data == self._written:
            return
        write_durably(self.path, data)
        self._written = data


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file so that after a crash it is the old one or the new one, whole, and the new one is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def boot_id() -> str:
    """This boot of the machine; empty where the kernel does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
