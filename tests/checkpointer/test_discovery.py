"""Which processes are members and what counts as evidence, with a driver that reports what real ones report."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kybernate.messages import SeatTarget
from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls, StepFailedError, Timeouts
from services.checkpointer.backends.evidence import Discovery, Evidence
from services.checkpointer.backends.host import open_host
from services.checkpointer.backends.port import DriverUnreadableError, Member, NoMemberError, SeatProcesses
from services.checkpointer.processes import ProcessIdentity, identify

GPU = "GPU-a"
PATIENCE = Timeouts(settle_seconds=0.05, settle_floor_wall_seconds=0.05)


@dataclass
class Driver:
    """Replaces the helper pool."""

    cuda: set[int] = field(default_factory=set)
    uses: list[dict[str, Any]] = field(default_factory=list)
    used: int = 0
    state: str = "RUNNING"
    tid_code: int = 3
    asked: list[tuple[str, int]] = field(default_factory=list)

    async def call(self, key: str, verb: str, *, deadline: float, **arguments: Any) -> dict[str, Any]:
        pid = arguments.get("pid", 0)
        self.asked.append((verb, pid))
        ok = {"code": 0, "name": "SUCCESS"}
        match verb:
            case "processes":
                return {**ok, "processes": self.uses}
            case "memory" | "usage":
                return {**ok, "memory": {GPU: (self.used, 1000)}, "processes": self.uses}
            case "state":
                return {**ok, "state": self.state}
        return {**ok, "tid": pid} if pid in self.cuda else {"code": self.tid_code, "name": "NO"}

    def uses_gpu(self, pid: int, size: int | None) -> None:
        """``size``: None if the driver does not report it; the helper then returns all memory in use on the GPU."""
        exact = size is not None
        self.uses.append({"pid": pid, "gpu": GPU, "bytes": size if exact else self.used, "exact": exact})


@dataclass
class Stand:
    driver: Driver
    root: ProcessIdentity
    child: ProcessIdentity

    @property
    def target(self) -> SeatTarget:
        return SeatTarget(seat="s00", pod_uid="u", container_id=f"process://{self.root.pid}", gpus=(GPU,))

    def __post_init__(self) -> None:
        self.calls = DriverCalls(self.driver, PATIENCE)  # type: ignore[arg-type]
        self.host = open_host(Path("nowhere"), 1.0)
        self.evidence = Evidence(self.calls, self.host.freezer)

    async def find(self) -> SeatProcesses:
        return await Discovery(self.calls, self.host).find(self.target, "G0", 1)


@asynccontextmanager
async def stand() -> AsyncIterator[Stand]:
    """A container: a shell and its child."""
    shell = await asyncio.create_subprocess_exec(
        "sh", "-c", "sleep 60 & echo $!; wait", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert shell.stdout is not None
    child, root = identify(int(await shell.stdout.readline())), identify(shell.pid)
    assert child is not None
    assert root is not None
    try:
        yield Stand(Driver(), root, child)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        await shell.communicate()


async def test_members_are_those_with_a_restore_thread_also_without_memory() -> None:
    async with stand() as it:
        it.driver.cuda = {it.child.pid}
        it.driver.uses_gpu(it.child.pid, 0)
        it.driver.uses_gpu(1, 500)
        unit = await it.find()
        assert [member.who for member in unit.members] == [it.child]
        assert unit.vram_bytes == 0


async def test_a_process_without_memory_in_the_drivers_list_is_no_evidence_against_a_park() -> None:
    async with stand() as it:
        it.driver.cuda, it.driver.state = {it.child.pid}, "CHECKPOINTED"
        it.driver.uses_gpu(it.child.pid, 100)
        unit = await it.find()
        it.driver.uses = []
        it.driver.uses_gpu(it.child.pid, 0)
        await it.evidence.prove(unit)
        it.driver.uses_gpu(it.child.pid, None)
        with pytest.raises(StepFailedError, match="still lists"):
            await it.evidence.prove(unit)


@pytest.mark.parametrize("listed", [True, False])
async def test_without_sizes_from_the_driver_a_seat_gets_all_memory_that_no_other_process_accounts_for(
    listed: bool,
) -> None:
    async with stand() as it:
        it.driver.cuda, it.driver.used = {it.child.pid}, 700
        it.driver.uses_gpu(1, 300)
        if listed:
            it.driver.uses_gpu(it.child.pid, None)
        unit = await it.find()
        assert unit.footprint == {GPU: 400}
        baseline = unit.model_copy(update={"baseline": await it.evidence.baseline(unit)})
        it.driver.state, it.driver.used = "CHECKPOINTED", 345
        it.driver.uses = it.driver.uses[:1]
        with pytest.raises(StepFailedError, match="fell by 355 of 400"):
            await it.evidence.prove(baseline)
        it.driver.used = 330
        await it.evidence.prove(baseline)


async def test_a_seat_without_gpu_processes_differs_from_one_that_the_driver_cannot_report() -> None:
    async with stand() as it:
        with pytest.raises(NoMemberError):
            await it.find()
        it.driver.uses_gpu(it.child.pid, 100)
        with pytest.raises(NoMemberError):
            await it.find()
        it.driver.tid_code = 304
        with pytest.raises(DriverUnreadableError, match="restore_tid of pid"):
            await it.find()


async def test_no_driver_call_is_made_about_a_frozen_process_without_a_record() -> None:
    async with stand() as it:
        it.driver.cuda = {it.child.pid}
        living = lambda: [it.root, it.child]  # noqa: E731
        await it.host.freezer.freeze(None, living)
        with pytest.raises(DriverUnreadableError, match="frozen and its GPU processes are not on record"):
            await it.find()
        assert not [call for call in it.driver.asked if call[1]]
        await it.host.freezer.thaw(None, living)
        assert len((await it.find()).members) == 1


async def test_a_process_that_ends_during_the_state_request_does_not_make_the_seat_lost() -> None:
    """Otherwise the start of a manager would kill a healthy engine."""
    async with stand() as it:
        it.driver.cuda = {it.child.pid}
        unit = await it.find()
        ended = Member(who=ProcessIdentity(pid=it.child.pid, start=it.child.start - 1))
        unit = unit.model_copy(update={"members": (*unit.members, ended)})
        backend = DriverBackend(it.calls, it.host, it.evidence)
        assert (await backend.state(unit)).outcome == "active"
        parked = unit.model_copy(update={"parked_on": (GPU,)})
        assert (await backend.state(parked)).outcome == "lost"
