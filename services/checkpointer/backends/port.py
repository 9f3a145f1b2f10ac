"""What a way of parking must offer, whatever it drives: the CUDA driver, an engine's sleep mode, CRIU, a restart."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

from kybernate.messages import Outcome, SeatTarget
from services.checkpointer.backends.refusals import moves
from services.checkpointer.failures import JobGoal
from services.checkpointer.processes import ProcessIdentity


class Member(BaseModel):
    """One process of a seat that uses GPUs, and how many bytes it has on each (by UUID)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    who: ProcessIdentity
    gpu_bytes: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Bytes on all GPUs."""
        return sum(self.gpu_bytes.values())


class SeatProcesses(BaseModel):
    """What moves as one: all GPU processes of one seat's container. Journaled, so that a replay finds them again."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    target: SeatTarget
    group: str
    """Whose helper does the calls."""
    epoch: int
    root: ProcessIdentity | None
    """The container's first process; None when it is gone."""
    members: tuple[Member, ...]
    baseline: dict[str, int] = {}
    """Before a park: memory in use on each GPU that no other process accounts for; what must fall."""
    parked_on: tuple[str, ...] = ()
    """GPUs that its memory was on when it was parked; empty: those of the target."""
    hangs: int = 0
    """How often driver calls about this container hung before."""

    @property
    def at(self) -> tuple[str, ...]:
        """GPUs that ``members`` speak of."""
        return self.parked_on or self.target.gpus

    @property
    def reach(self) -> tuple[str, ...] | None:
        """GPUs where its memory may be; None: all that answer, since where it is to move may be beyond asking."""
        return None if self.moves else self.at

    @property
    def moves(self) -> dict[str, str]:
        """Old → new GPU, if it is to be restored elsewhere."""
        return moves(self.at, self.target.gpus)

    @property
    def owner(self) -> str:
        """Its name in reservations; no seat is in two halves at a time."""
        return self.target.seat

    def moved(self) -> "SeatProcesses":
        """The same after it was restored to the target's GPUs."""
        where = self.moves
        members = tuple(
            member.model_copy(update={"gpu_bytes": {where.get(gpu, gpu): n for gpu, n in member.gpu_bytes.items()}})
            for member in self.members
        )
        return self.model_copy(update={"members": members, "parked_on": self.target.gpus})

    @property
    def footprint(self) -> dict[str, int]:
        """Bytes by GPU over all members."""
        total = dict.fromkeys(self.at, 0)
        for member in self.members:
            for gpu, size in member.gpu_bytes.items():
                total[gpu] = total.get(gpu, 0) + size
        return total

    @property
    def memory_on(self) -> tuple[str, ...]:
        """GPUs that its memory is on, or was on when it was parked: those of its group where nobody saw any."""
        return tuple(gpu for gpu, size in self.footprint.items() if size) or self.at

    @property
    def vram_bytes(self) -> int:
        """Footprint over all GPUs."""
        return sum(self.footprint.values())


class NoProcessError(Exception):
    """The container of a seat has no process any more."""


class NoMemberError(Exception):
    """The container runs, but no process in it uses a GPU."""


class DriverUnreadableError(Exception):
    """The driver could not be asked; nothing is known."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can and needs."""

    frees_all_vram: bool
    needs_host_ram: bool
    migrates: bool
    multi_process: bool
    needs_cooperation: bool


@dataclass(slots=True)
class Ending:
    """How a half ended for one seat; ``seconds`` are wall seconds by step."""

    outcome: Outcome
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    vram_bytes: int = 0
    host_bytes: int = 0
    last_call_at: float | None = None
    gpus: tuple[str, ...] = ()
    """GPUs that its memory is on, or was on when it was parked; empty where that is not known."""
    move_refused: Literal["", "seat", "node"] = ""
    """It should have moved to other GPUs, and this seat, or any of this node, cannot."""
    failed: bool = False
    """It did not go as asked, and not because it was refused beforehand or found no room."""


class Note(Protocol):
    """Journals a step before it is done, and hangs."""

    async def __call__(self, step: str, pid: int | None, detail: str = "") -> None:
        """``step``: its name; ``pid``: the process that it is about; ``detail``: how, where that is not obvious."""
        ...


class Backend(Protocol):
    """One way of parking. No call raises for what the driver or the process did: that is an Ending."""

    capabilities: Capabilities

    async def probe(self) -> str | None:
        """None when it can work on this node, else why not."""
        ...

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        """The GPU processes of the target. Raises NoProcessError, NoMemberError or DriverUnreadableError."""
        ...

    def container(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        """The target's container without its GPU processes: enough to kill it when nobody knows them."""
        ...

    async def prepare(self, seat: SeatProcesses) -> SeatProcesses:
        """Look at what must be known before a park. Changes nothing."""
        ...

    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        """Take it out of VRAM."""
        ...

    async def activate(self, seat: SeatProcesses, note: Note) -> Ending:
        """Bring it back to VRAM."""
        ...

    async def replay(self, seat: SeatProcesses, intent: JobGoal, note: Note) -> Ending:
        """After a crash: bring an interrupted half to an end."""
        ...

    async def state(self, seat: SeatProcesses) -> Ending:
        """What its processes do now, by evidence. Changes nothing."""
        ...

    async def thaw(self, seat: SeatProcesses) -> None:
        """Let its processes run on so that they can end."""
        ...

    async def kill(self, seat: SeatProcesses, note: Note) -> Ending:
        """End its processes and prove that their VRAM is free."""
        ...
