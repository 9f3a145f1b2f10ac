"""The manager's shell with a bus in memory and an obedient checkpointer."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import pytest
from pydantic import BaseModel

from kybernate.clock import Clock
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.envelope import Message
from kybernate.machine import GpuProcess
from kybernate.messages import AskJobs, JobReply, NodeTrafficSignal, ReleaseJob, SeatProgress, TrafficSignal
from kybernate.node.run_files import GpuFaults
from kybernate.seat import SeatState as S
from services.gpu_manager import jobs
from services.gpu_manager import manager as shell
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.engines import EngineProbes
from services.gpu_manager.gpu_processes import GpuProcesses
from services.gpu_manager.ledger import Ledger, LedgerEntry, LedgerFile
from services.gpu_manager.manager import Manager
from services.gpu_manager.pods import PodsError
from services.gpu_manager.publish import GateFiles
from tests.manager.test_foreign import Processes, proc
from tests.manager.world import World
from tests.until import until

Handler = Callable[[Message], Awaitable[BaseModel]]


class NoPods:
    """Kubelet knows no pod with a seat."""

    settled_seconds = 0.0

    def on_change(self, notify: Callable[[], None]) -> None:
        pass

    async def seats(self, prove: Collection[str] = ()) -> Owners:
        return Owners()

    async def run(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        pass


def leftover(world: World, number: int) -> LedgerEntry:
    """A parked seat of a pod that is gone by now."""
    seat = world.seat(0, number)
    return LedgerEntry(
        seat=seat,
        state=S.PARKED,
        epoch=3,
        lease=False,
        pod=f"d/p{number}",
        pod_uid=f"u{number}",
        container_id=f"process://{number + 1}",
        seen_running=True,
    )


def look(job: AskJobs, outcome: str) -> JobReply:
    """The same answer for every asked seat."""
    seats = tuple(
        SeatProgress(seat=t.seat, pod_uid=t.pod_uid, container_id=t.container_id, outcome=outcome)  # type: ignore[arg-type]
        for t in job.targets
    )
    return JobReply(accepted=True, seats=seats)


def sees(outcome: str) -> Handler:
    """A checkpointer that answers this about every seat."""

    async def ask(job: Message) -> JobReply:
        return look(job, outcome)

    return ask


sees_parked = sees("parked")


async def taken(_: Message) -> JobReply:
    return JobReply(accepted=True)


@asynccontextmanager
async def running(
    world: World,
    folder: Path,
    ask: Handler = sees_parked,
    release: Handler = taken,
    *,
    gpus: Processes | None = None,
    known: tuple[LedgerEntry, ...] | None = None,
    pods: NoPods | None = None,
    clock: Clock = Clock(),  # noqa: B008
) -> AsyncIterator[Manager]:
    """A manager that has started with what is known of seats: without it, of two deleted parked pods."""
    known = (leftover(world, 0), leftover(world, 1)) if known is None else known
    file = LedgerFile(folder / "ledger")
    file.write(Ledger(epoch=3, seats=known), durable=True)
    file.close()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(MemoryBus.connect(server := MemoryServer()))
        node = await stack.enter_async_context(MemoryBus.connect(server))
        await stack.enter_async_context(node.serve(AskJobs.pattern(node="n1"), ask))
        await stack.enter_async_context(node.serve(ReleaseJob.pattern(node="n1"), release))
        ledger = LedgerFile(folder / "ledger")
        stack.callback(ledger.close)
        manager = Manager(
            board=world.new_board(),
            bus=bus,
            node_bus=bus,
            pods=pods or NoPods(),
            gate=GateFiles(folder),
            ledger=ledger,
            clock=clock,
            engines=EngineProbes(await stack.enter_async_context(aiohttp.ClientSession())),
            gpu_processes=GpuProcesses(gpus, folder, folder) if gpus is not None else None,  # type: ignore[arg-type]
        )
        task = asyncio.create_task(manager.run())
        try:
            await until(lambda: manager.node.recovered, what="the board is recovered")
            yield manager
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_checkpointer_that_answers_one_question_after_the_other_is_waited_for_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process about which the driver does not answer takes it a minute, and the questions before that of a manager
    that asks again are answered first."""
    monkeypatch.setattr(shell, "EVIDENCE_SECONDS", 0.02)
    monkeypatch.setattr(shell, "LONGEST_SECONDS", 0.1, raising=False)
    turn = asyncio.Lock()

    async def ask(job: Message) -> JobReply:
        async with turn:
            await asyncio.sleep(0.15)
        return look(job, "gone")

    async with running(World(), tmp_path, ask) as manager:
        assert manager.node.recovered


async def test_a_manager_knows_the_faulty_gpus_before_it_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its first decisions move seats to a GPU that is not there."""
    monkeypatch.setattr(shell, "FOREIGN_SECONDS", 1e9)
    GpuFaults(faults={"GPU-1": "XID 79"}).write(tmp_path)

    async with running(World(), tmp_path) as manager:
        assert manager.node.faulty == {"GPU-1": "XID 79"}


async def test_a_manager_knows_the_foreign_processes_before_it_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it gives a ticket beside an engine whose pod was deleted by force before the ledger was lost."""
    world, found = World(), GpuProcess(4711, "GPU-0", 1)
    proc(tmp_path, found.pid, parent=0)

    monkeypatch.setattr(shell, "FOREIGN_SECONDS", 1e9)
    async with running(world, tmp_path, gpus=Processes(found)) as manager:
        assert [one.pid for one in manager.node.foreign] == [found.pid]

    monkeypatch.setattr(shell, "FOREIGN_SECONDS", 0.01)
    async with running(world, tmp_path, gpus=(gpus := Processes(found))) as manager:
        assert [one.pid for one in manager.node.foreign] == [found.pid]
        gpus.found, asked = None, gpus.asked
        await until(lambda: gpus.asked > asked + 1, what="the driver has not answered, and is asked again")
        assert [one.pid for one in manager.node.foreign] == [found.pid]
        gpus.found = ()
        await until(lambda: not manager.node.foreign, what="the process has ended")


async def test_a_driver_that_does_not_answer_keeps_no_manager_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hung(Processes):
        async def processes(self) -> tuple[GpuProcess, ...]:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(shell, "EVIDENCE_SECONDS", 0.2)
    away = Processes()
    away.found = None
    for gpus in (Hung(), away):
        async with running(World(), tmp_path, gpus=gpus) as manager:
            assert manager.node.recovered


async def test_a_manager_that_stood_still_while_the_driver_answered_knows_the_foreign_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, a debugger: the answer and the end of its time are seen at once."""

    class Answered(Processes):
        async def processes(self) -> tuple[GpuProcess, ...]:
            asyncio.get_running_loop().call_soon(time.sleep, 0.3)
            await asyncio.sleep(0.01)
            return await super().processes()

    monkeypatch.setattr(shell, "EVIDENCE_SECONDS", 0.1)
    monkeypatch.setattr(shell, "FOREIGN_SECONDS", 1e9)
    found = GpuProcess(4711, "GPU-0", 1)
    proc(tmp_path, found.pid, parent=0)
    async with running(World(), tmp_path, gpus=Answered(found)) as manager:
        assert [one.pid for one in manager.node.foreign] == [found.pid]


async def test_a_seat_that_cannot_be_looked_at_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ASK_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(jobs, "ASK_SECONDS", 0.05)
    world = World()
    stuck, ended = world.seat(0, 0), world.seat(0, 1)

    async def ask(job: Message) -> JobReply:
        if job.cause == "recovery":
            return look(job, "parked")
        if any(target.seat == stuck for target in job.targets):
            await asyncio.sleep(0.5)
            return look(job, "quarantined")
        return look(job, "gone")

    async with running(world, tmp_path, ask) as manager:
        await until(lambda: manager.node.seats[ended].state is S.FREE, what="the seat whose engine ended is free")

        assert manager.node.seats[stuck].state is S.RELEASING


async def test_a_release_that_came_too_late_is_asked_for_again_with_a_higher_epoch(tmp_path: Path) -> None:
    world = World()
    highest = 4_000_000_000_000
    accepted: set[str] = set()

    async def release(job: Message) -> JobReply:
        if job.epoch <= highest:
            return JobReply(accepted=False, code="stale-epoch", reason="go above", highest_epoch=highest)
        accepted.add(job.target.seat)
        return JobReply(accepted=True)

    async with running(world, tmp_path, release=release):
        await until(
            lambda: accepted == {world.seat(0, 0), world.seat(0, 1)},
            what="both seats are accepted",
            saw=lambda: accepted,
        )


async def test_a_manager_decides_nothing_before_its_question_has_fenced(tmp_path: Path) -> None:
    world = World()
    highest = 4_000_000_000_000
    asked: list[int] = []

    async def ask(job: Message) -> JobReply:
        asked.append(job.epoch)
        if job.epoch and job.epoch <= highest:
            return JobReply(accepted=False, code="stale-epoch", reason="go above", highest_epoch=highest)
        return look(job, "parked")

    async with running(world, tmp_path, ask) as manager:
        fenced = next(epoch for epoch in asked if epoch > highest)

    assert asked.index(fenced) == 1, "it goes above what the refusal says"
    assert manager.node.epoch >= fenced


class LostPods(NoPods):
    """The rights to read pods were withdrawn, say."""

    async def seats(self, prove: Collection[str] = ()) -> Owners:
        raise PodsError("GET /api/v1/pods: HTTP 403")


async def test_a_manager_says_that_it_cannot_read_its_pods_until_it_can(tmp_path: Path) -> None:
    async with running(World(), tmp_path) as manager:
        manager.pods = LostPods()
        await until(lambda: manager.unread == "GET /api/v1/pods: HTTP 403", what="the failure is known")
        manager.pods = NoPods()
        await until(lambda: manager.unread == "", what="and its end")


async def test_a_manager_receives_the_levels_of_its_node_and_of_its_models_only(tmp_path: Path) -> None:
    world = World()
    async with running(world, tmp_path, sees("gone")) as manager:
        seat = world.seat(0, 0)

        def level(source: str) -> dict[str, Any]:
            return {"cause": "c", "source": source, "model": "m", "waiting": 1, "seat": seat, "ttl_seconds": 60.0}

        await manager.bus.publish(NodeTrafficSignal(**level("of another node"), node="n2"))
        await manager.bus.publish(TrafficSignal(**level("of a model without a seat here")))
        await manager.bus.publish(NodeTrafficSignal(**level("of this node"), node="n1"))
        levels = manager.node.levels.places
        await until(lambda: ("seat", seat) in levels, what="the level of this node")

        assert [source for source, _ in levels["seat", seat]] == ["of this node"]


async def test_the_board_knows_whether_its_bus_is_connected(tmp_path: Path) -> None:
    async with running(World(), tmp_path) as manager:
        await until(lambda: manager.node.bus_up, what="the bus is connected")
        bus = manager.bus

        bus.cut()
        await until(lambda: not manager.node.bus_up, what="the loss is known")
        bus.restore()
        await until(lambda: manager.node.bus_up, what="and the return")
