"""The records that backends share with jobs and journal, and what both are called with."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from kybernate.messages import Outcome, SeatOutcome, SeatTarget
from services.checkpointer.core.answers import ModelAnswer
from services.checkpointer.core.refusals import moves
from services.checkpointer.processes import ProcessIdentity


class Member(BaseModel):
    """One process of a seat that uses GPUs, with its bytes on each GPU (by UUID)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    who: ProcessIdentity
    gpu_bytes: dict[str, int] = {}
    holds: bool = True
    """A *holder* has VRAM, or it is not known whether it has. False: it is *attached*: the driver knows it (it has a
    restore thread) and it holds no VRAM, like the API server of vLLM."""

    @property
    def total(self) -> int:
        """Bytes on all GPUs."""
        return sum(self.gpu_bytes.values())


class Reading(NamedTuple):
    """What the driver reported of all GPUs of a seat at one moment."""

    baseline: dict[str, int]
    """Bytes by GPU that no other process accounts for."""
    pids: frozenset[int]
    """The processes that it listed, the seat's own too."""


class SeatProcesses(BaseModel):
    """All GPU processes of one seat's container, parked and activated together. Journaled for replay after a crash."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    target: SeatTarget
    group: str
    """Key of the helper that makes the driver calls."""
    epoch: int
    root: ProcessIdentity | None = None
    """The container's first process; None when it is gone. The journal's lines leave None out."""
    members: tuple[Member, ...]
    baseline: dict[str, int] = {}
    """Bytes by GPU before the park that no other process accounts for; the park must free them."""
    reading: Reading | None = Field(default=None, exclude=True)
    """Of its GPUs when it was discovered, for the park that follows; None: it was not, just now, or a GPU failed."""
    parked_on: tuple[str, ...] = ()
    """GPUs that held its memory when it was parked; empty: those of the target."""
    residue_bytes: int = 0
    """What the processes keep while parked, as proven at their park, over all GPUs."""
    nothing: bool = False
    """It had nothing on any GPU when it was parked: whether it has now, only the driver knows."""
    hangs: int = 0
    """Number of driver calls about this container that hung before."""
    refusals: int = 0
    """Number of restores of this container that the driver refused, without a success since."""
    models: tuple[str, ...] = ()
    """Of engines that unload: the models in memory at its park, to be loaded again."""
    answers: tuple[ModelAnswer, ...] = ()
    """What its models answered before its first park."""
    health: int | None = None
    """The status that its health answered then; None: it did not."""
    unverified: str = ""
    """Why it answered no health then: nothing can be compared after a park."""
    unanswered: str = Field(default="", exclude=True)
    """Why it is not to be parked yet: it may compute the first test request."""

    @property
    def at(self) -> tuple[str, ...]:
        """GPUs that the sizes of ``members`` refer to."""
        return self.parked_on or self.target.gpus

    @property
    def reach(self) -> tuple[str, ...] | None:
        """GPUs that may hold its memory. None during a move: all GPUs that answer, as the destination may not."""
        return None if self.moves else self.at

    @property
    def moves(self) -> dict[str, str]:
        """Old → new GPU, if it is to be restored on other GPUs."""
        return moves(self.at, self.target.gpus)

    def moved(self) -> "SeatProcesses":
        """The same processes after their restore to the target's GPUs."""
        where = self.moves
        members = tuple(
            member.model_copy(update={"gpu_bytes": {where.get(gpu, gpu): n for gpu, n in member.gpu_bytes.items()}})
            for member in self.members
        )
        return self.model_copy(update={"members": members, "parked_on": self.target.gpus})

    @property
    def holders(self) -> tuple[Member, ...]:
        """Members that have VRAM, or may have."""
        return tuple(member for member in self.members if member.holds)

    @property
    def attached(self) -> frozenset[int]:
        """Indices of the members that have none."""
        return frozenset(index for index, member in enumerate(self.members) if not member.holds)

    @property
    def footprint(self) -> dict[str, int]:
        """Bytes by GPU, summed over all members."""
        total = dict.fromkeys(self.at, 0)
        for member in self.members:
            for gpu, size in member.gpu_bytes.items():
                total[gpu] = total.get(gpu, 0) + size
        return total

    @property
    def memory_on(self) -> tuple[str, ...]:
        """GPUs that hold its memory, or held it when it was parked; ``at`` if no sizes are known."""
        return tuple(gpu for gpu, size in self.footprint.items() if size) or self.at

    @property
    def vram_bytes(self) -> int:
        """Footprint over all GPUs."""
        return sum(self.footprint.values())


class NoProcessError(Exception):
    """The container of a seat has no process any more."""


class NoMemberError(Exception):
    """The container runs, but no process in it uses a GPU."""


class Ending(SeatOutcome):
    """Result of a half for one seat, or its state, as it comes about."""

    model_config = ConfigDict(frozen=False)

    def __init__(self, outcome: Outcome, reason: str = "", **more: Any) -> None:
        super().__init__(outcome=outcome, reason=reason, **more)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the seconds of what is done within."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - began


class Note(Protocol):
    """Journals a step before it is done; and each hang, as step ``StepTrouble.HUNG`` with the verb as its detail."""

    async def __call__(self, step: str, pid: int | None, detail: str = "") -> None:
        """``pid``: the process, None for the whole seat; ``detail``: the means, for steps that have several."""


@dataclass(frozen=True, slots=True)
class EngineReply:
    """An engine's answer over HTTP; ``body`` is its JSON, None if it is none."""

    status: int
    body: Any
    text: str


class EngineSilentError(Exception):
    """An engine did not answer; ``ended``: its container has ended."""

    def __init__(self, text: str, *, ended: bool = False) -> None:
        super().__init__(text)
        self.ended = ended
