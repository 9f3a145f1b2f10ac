"""The node's ledger: what a manager must not forget, in one file that is always whole.

It is written before any effect of a message is carried out, and is on disk (fsync) before a start ticket or a pin is
published. After a restart it tells which seat held what; evidence from the processes overrides it. Switches need no
fsync here: the checkpointer journals them, and a machine that crashed has no processes left. Losing the ledger loses no
seat: every live process without park evidence then holds its group.
"""

import contextlib
import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from kybernate import files
from kybernate.logs import get_logger
from kybernate.seat import LEDGER_FORMAT, SeatState
from services.gpu_manager.failures import Failures


@dataclass(slots=True)
class Costs:
    """Learned costs of one seat, in model seconds, and how many measurements they rest on."""

    park_seconds: float = 2.0
    """From drained until its VRAM was free, as the node saw it."""
    parks: int = 0
    activate_seconds: float = 2.0
    """From then until it served."""
    activations: int = 0
    switch_seconds: float = 4.0
    """From the decision until it served."""
    cold_seconds: float = 0.0
    """The same of a start, where a restart parked it for lack of host memory; 0: not measured."""
    verify_seconds: float = 0.0
    """Of that, the proofs and the comparison of its models' answers."""


@dataclass(slots=True)
class Durable:
    """What survives a restart of the manager, of one seat: the seat, the ledger and the recovery share this record."""

    container_id: str = ""
    """The container that holds or held VRAM for it; a new one means a new start."""
    restarts: int = 0
    """How often its pod's container had been started again when that one ran."""
    ticket: str = ""
    """The last start call that got a ticket."""
    closed: tuple[str, ...] = ()
    """Groups on which that start could not be: a GPU was gone, or the container was made without it."""
    backend: str = ""
    """The backend that it was demoted to; empty: its pod's."""
    fixed: str = ""
    """Why it is not moved to other groups any more: the driver refused it."""
    vram_bytes: int = 0
    """Footprint at its last park, over all its GPUs; 0: it was not parked yet."""
    residue_bytes: int = 0
    """VRAM that its processes keep while parked, over all its GPUs."""
    measured: bool = False
    """The present container was parked, so its residue is known."""
    reserved_bytes: int | None = None
    """VRAM that its lease reserves over all its GPUs, 0: all of it; None: it has no lease, or one from before this was
    kept."""
    spilled: str = ""
    """Why a restart parks it, or its copy is dropped: host memory is short, its start gave way, or its engine starts on
    another group. Until it is active again."""
    started: bool = False
    """It has been active at least once since its pod came."""
    pinned: bool = False
    """By an operator; a pod's own pin is an annotation."""
    way: str = ""
    """How it came to its group from group ``came_from``; both empty: it is where its engine was started, at home."""
    came_from: str = ""
    waited: float = 0.0
    """Model seconds: the longest wait before each visit since it came to its group, summed."""
    costs: Costs = field(default_factory=Costs)
    failed: Failures = field(default_factory=Failures)

    def copy(self) -> "Durable":
        """A copy that does not follow the original."""
        return replace(self, costs=replace(self.costs))


@dataclass(slots=True)
class OperatorOrder:
    """What an operator ordered: a drain in force, a move that goes on or why it failed."""

    op: str
    """Its name; older releases remembered each by one."""
    verb: Literal["migrate", "drain", "resume"]
    target: str = ""
    """A seat or a group; empty: the node."""
    to: str = ""
    """Of a move: the group."""
    purpose: str = ""
    """Of a drain."""
    gpus: tuple[str, ...] = ()
    """Of the drain of a group: UUIDs, since groups change with the configuration."""
    actor: str = ""
    cause: str = ""
    begun: float = 0.0
    """Unix seconds."""
    outcome: str = ""
    """``failed``, of a move; older releases wrote others."""
    reason: str = ""
    """Why it failed."""

    @property
    def scope(self) -> str:
        """The GPUs of a drain, for people."""
        return f"group {self.target}" if self.target else "the node"


FLAT = {name: ("rehearsal", name) for name in ("demoted", "unverified", "failures")} | {
    "host_taken_bytes": ("host_memory", "taken_bytes"),
    "host_bytes": ("host_memory", "parked_bytes"),
    "host_active_bytes": ("host_memory", "active_bytes"),
}
"""Field of a seat up to release 843f10d5 → the rider that has it now, and its name there. Written for one release."""


class LedgerEntry(BaseModel):
    """One owned seat."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seat: str
    state: SeatState
    epoch: int
    lease: bool
    pod: str
    """``namespace/name``."""
    pod_uid: str
    annotations: dict[str, str] = Field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of its home group."""
    on: tuple[str, ...] = ()
    """UUIDs of the GPUs of the group that it is on, where that is another one."""
    copied: tuple[str, ...] = ()
    """UUIDs of the GPUs that its copy came from, while it moves."""
    seen_running: bool = False
    """It has a process."""
    inherited: bool = False
    """Its open ticket may be that of the owner before."""
    unlocated: bool = False
    """As in ``Facts``."""
    conflict: bool = False
    """As in ``Facts``."""
    riders: dict[str, Any] = Field(default_factory=dict)
    """What riders remember of it, by their names. Those of a later release are kept."""
    durable: Durable = Field(default_factory=Durable)
    """On disk its fields stand beside the entry's own, as every release reads them."""

    @model_validator(mode="before")
    @classmethod
    def _from_flat(cls, data: Any) -> Any:
        if not isinstance(data, dict) or isinstance(data.get("durable"), Durable):
            return data
        if "durable" in data:
            raise ValueError("a release before 843f10d5 wrote it, whose fields are elsewhere")
        riders = {rider: {**known} for rider, known in data.get("riders", {}).items()}
        for flat, (rider, own) in ((flat, FLAT[flat]) for flat in FLAT if flat in data):
            riders.setdefault(rider, {})[own] = data[flat]
        return {**data, "durable": {**data, "costs": data}, "riders": riders}

    @model_serializer(mode="wrap")
    def _to_flat(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = dump(self)
        durable = data.pop("durable")
        costs, riders = durable.pop("costs"), data["riders"]
        flat = {flat: riders[rider][own] for flat, (rider, own) in FLAT.items() if own in riders.get(rider, {})}
        return {**data, **durable, **costs, **flat}


class Ledger(BaseModel):
    """All owned seats of a node, and the highest epoch that it gave out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    boot_id: str = ""
    epoch: int = 0
    seq: int = 0
    """The highest ``seq`` of an event; 0 in the ledger of a manager that did not keep it."""
    seats: tuple[LedgerEntry, ...] = ()
    routers: dict[str, str] = Field(default_factory=dict)
    """Present routers, instance → incarnation: a successor must not forget one that is off the bus."""
    more_routers: tuple[tuple[str, str], ...] = ()
    """(instance, incarnation) of present routers whose instance ``routers`` has with another incarnation."""
    move_seconds: float = 3.0
    """Learned: what activating a seat on another group costs beyond activating it."""
    orders: tuple[OperatorOrder, ...] = ()
    """Of operators."""
    drains: tuple[str, ...] = ()
    """Names of the drains among them."""
    format: int = LEDGER_FORMAT
    lost: bool = Field(default=False, exclude=True)
    """It could not be read, or not its last record, or a later release wrote it: it may lack a ticket or a move."""


class LedgerFile:
    """The ledger on disk: one JSON line per change, and the last whole line is the truth.

    Each line carries a checksum of its bytes, so a damaged line is skipped and never read as another state.
    Appending keeps a change below 0.1 ms (replacing a file makes ext4 flush it); the file is begun anew when it grows,
    and by each process at its first change.
    """

    def __init__(self, path: Path, *, longest_bytes: int = 4 * 2**20) -> None:
        self.path = path
        self._longest = longest_bytes
        self._handle: int | None = None
        self._size = 0
        self._written = b""
        self._entries: dict[str, tuple[LedgerEntry, str]] = {}
        """Entries of the last line and their JSON, by seat: a change leaves most as they are."""
        self._durable = True
        self._reported = False

    def read(self) -> Ledger:
        """The last whole ledger, or an empty one. A file without one is set aside, not overwritten."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Ledger(lost=True)
        lines, damaged = data.split(b"\n"), list[int]()
        for number in range(len(lines), 0, -1):
            line = lines[number - 1]
            if _intact(line):
                with contextlib.suppress(ValidationError):
                    found = Ledger.model_validate_json(line)
                    if damaged:
                        self._tell("ledger.damaged", damaged, used=number, epoch=found.epoch, meaning=_FORGOTTEN)
                    newer = found.format > LEDGER_FORMAT
                    if newer:
                        self._tell("ledger.newer", [number], format=found.format, known=LEDGER_FORMAT, meaning=_NEWER)
                    return found.model_copy(update={"lost": newer or bool(damaged)})
            damaged += [number] if line else []
        aside = self.path.with_suffix(".unreadable")
        os.replace(self.path, aside)
        self._tell("ledger.unreadable", damaged, kept_as=str(aside), meaning=_LOST)
        return Ledger(lost=True)

    def _tell(self, event: str, damaged: list[int], **data: object) -> None:
        """Log once which lines (from 1) are damaged and what follows."""
        if not self._reported:
            self._reported = True
            get_logger().warning(event, file=str(self.path), lines=sorted(damaged), **data)

    def write(self, ledger: Ledger, *, durable: bool) -> None:
        """Append the ledger if it changed. It outlives this process; with ``durable`` also a crash of the machine.

        Raises OSError when that cannot be promised (full disk, broken disk); the last good line is then still readable.
        """
        line = self._line(ledger)
        try:
            with files.named(self.path):
                if line != self._written:
                    if self._handle is None or self._size + len(line) > self._longest:
                        self._begin(line)
                    else:
                        files.append(self._handle, line)
                        self._size, self._durable = self._size + len(line), False
                    self._written = line
                if durable and not self._durable and self._handle is not None:
                    os.fdatasync(self._handle)
                    self._durable = True
        except OSError:
            self.close()  # what the disk holds is not known (a second fsync would succeed): the next write begins anew
            self._written = b""
            raise

    def _line(self, ledger: Ledger) -> bytes:
        """One JSON object with the checksum of the rest of the line as its first key."""
        known = self._entries
        self._entries = {
            entry.seat: was if (was := known.get(entry.seat)) and was[0] is entry else (entry, entry.model_dump_json())
            for entry in ledger.seats
        }
        seats = ",".join(text for _, text in self._entries.values())
        rest = f'{ledger.model_dump_json(exclude={"seats"})[1:-1]},"seats":[{seats}]}}'.encode()
        return _CHECKED + _checksum(rest) + b'",' + rest + b"\n"

    def close(self) -> None:
        """Close the file."""
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


_FORGOTTEN = (
    "what was decided after the line that is used is forgotten: evidence of the processes decides, pins may be older"
)
_NEWER = "a later release wrote it: evidence of the processes decides where seats are and which of them start"
_LOST = "nothing is remembered: evidence of the processes and the tickets in the seat folders decide; pins are lost"

_CHECKED = b'{"checksum":"'
_DIGITS = 16


def _intact(line: bytes) -> bool:
    """Whether a line is as it was written."""
    begin = len(_CHECKED) + _DIGITS + 2
    return line[:begin] == _CHECKED + _checksum(line[begin:]) + b'",'


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGITS // 2).hexdigest().encode()
