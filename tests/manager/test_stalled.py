"""The board stands still, since its ledger's disk hangs: what goes on, what waits, what is dropped."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kybernate.http.server import HttpServer
from kybernate.messages import CommandReply, JobProgress, JobStatus, PinSeat, Presence, TrafficSignal
from kybernate.node.host_memory import HostMemory
from kybernate.policy import KybBalanced
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState as S
from services.gpu_manager import inbox as inbox_module
from services.gpu_manager import manager as manager_module
from services.gpu_manager.core.inputs import (
    BusChanged,
    DrainAnnounced,
    Now,
    Paused,
    Tick,
)
from services.gpu_manager.core.state import Effect
from services.gpu_manager.http import routes
from services.gpu_manager.inbox import BoardInbox
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.manager import Manager
from tests.manager.test_ledger import calls, runs, with_a_pod
from tests.manager.world import World, booted
from tests.until import until


class SlowDisk:
    """Writes of what must not be forgotten wait until ``turns``; others may come between at any time."""

    def __init__(self, manager: Manager) -> None:
        self._write, self.turns, self.reached = manager.ledger.write, threading.Event(), threading.Event()
        self.error: OSError | None = None
        """It fails in the end."""
        self.turns.set()
        manager.ledger.write = self.write  # type: ignore[method-assign]

    def write(self, ledger: Ledger, *, durable: bool) -> None:
        if durable:
            if not self.turns.is_set():
                self.reached.set()
            self.turns.wait()
            if self.error is not None:
                raise self.error
        self._write(ledger, durable=durable)


@asynccontextmanager
async def with_a_slow_disk(folder: Path) -> AsyncIterator[tuple[Manager, str, SlowDisk]]:
    """A manager and a seat that a pod waits for."""
    async with with_a_pod(folder) as (manager, seat):
        disk = SlowDisk(manager)
        try:
            yield manager, seat, disk
        finally:
            disk.turns.set()


async def test_while_the_disk_hangs_the_loop_goes_on_and_nothing_unrecorded_leaves_the_node(tmp_path: Path) -> None:
    async with with_a_slow_disk(tmp_path) as (manager, seat, disk):
        bucket = await manager.bus.bucket(BUCKET)

        async def published() -> S | None:
            rows = [SeatRecord.model_validate_json(entry.value or b"") for entry in await bucket.entries()]
            return next((row.state for row in rows if row.seat == seat), None)

        async def waits() -> bool:
            return await published() is S.WAITING

        await until(waits, what="the roster has the seat")
        app = web.Application()
        app.add_routes(routes(manager, GuardedPolicy("kyb-balanced", KybBalanced()), HostMemory()))
        async with (
            HttpServer(app, "127.0.0.1", 0) as server,
            aiohttp.ClientSession() as http,
            asyncio.TaskGroup() as group,
        ):
            disk.turns.clear()
            await calls(manager, seat)
            await until(disk.reached.is_set, what="the ledger is being written")

            async def state() -> str:
                async with http.get(f"{server.url}/v1/pods/uid-a") as answer:
                    return str((await answer.json())["state"])

            asked = group.create_task(state())
            manager.roster.changed(seat)
            pin = PinSeat(cause="c", node="n1", seat=seat, actor="me")

            refused = await manager.bus.request(pin, CommandReply, timeout=20.0)

            assert (refused.code, "ledger is being written" in refused.reason) == ("busy", True)
            assert manager.node.seats[seat].state is S.STARTING, "the board gave a ticket"
            assert await published() is S.WAITING
            assert not asked.done()
            assert not list(tmp_path.rglob("ticket.json"))
            assert manager.stalled() is not None
            disk.turns.set()
            assert await asked == "starting"
            await until(lambda: list(tmp_path.rglob("ticket.json")), what="the ticket")
            assert manager.stalled() is None
            assert not manager.node.seats[seat].durable.pinned, "a command that was refused as busy is not carried out"


async def test_a_command_is_confirmed_only_when_it_is_on_disk(tmp_path: Path) -> None:
    async with with_a_slow_disk(tmp_path) as (manager, seat, disk):
        disk.turns.clear()
        pin = PinSeat(cause="c", node="n1", seat=seat, actor="me")
        asked = asyncio.create_task(manager.bus.request(pin, CommandReply, timeout=20.0))
        await until(disk.reached.is_set, what="the ledger is being written")
        await asyncio.sleep(0.05)
        assert not asked.done()
        disk.turns.set()
        assert (await asked).accepted


async def test_a_write_that_takes_long_and_fails_ends_the_manager_before_the_ticket(tmp_path: Path) -> None:
    async with with_a_slow_disk(tmp_path) as (manager, seat, disk):
        disk.turns.clear()
        disk.error = OSError(5, "Input/output error")
        await calls(manager, seat)
        await until(disk.reached.is_set, what="the ledger is being written")
        await asyncio.sleep(3 * manager_module.BRIEF_SECONDS)
        disk.turns.set()

        await until(lambda: not runs(), what="the manager has ended")
        assert manager.node.seats[seat].state is S.STARTING, "the board gave a ticket"
        assert not list(tmp_path.rglob("ticket.json"))


async def test_three_seconds_between_two_arrivals_are_a_pause_however_long_they_are_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_a_slow_disk(tmp_path) as (manager, _, _disk):
        handled: list[object] = []
        handle, next_one = manager.board.handle, manager._next
        arrived = manager.now().wall
        gaps = [1.0, 2.9, 2.9, 3.1, 2.9]

        async def scripted() -> tuple[object, None, float]:
            nonlocal arrived
            if not gaps:
                monkeypatch.setattr(manager, "_next", next_one)
                await asyncio.Event().wait()
            arrived += gaps.pop(0)
            return Tick(), None, arrived

        monkeypatch.setattr(
            manager.board, "handle", lambda message, now: handled.append(message) or handle(message, now)
        )
        monkeypatch.setattr(manager, "_next", scripted)
        await until(lambda: not gaps, what="all messages are taken")
        await until(lambda: len(handled) >= 6, what="and handled")

        assert handled[-6:] == [Tick(), Tick(), Tick(), Paused(), Tick(), Tick()]


async def test_a_message_counts_from_its_arrival_and_a_gap_without_any_as_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_a_slow_disk(tmp_path) as (manager, seat, disk):
        handled: list[tuple[object, Now]] = []
        handle = manager.board.handle

        def recorded(message: object, now: Now) -> list[Effect]:
            handled.append((message, now))
            return handle(message, now)

        monkeypatch.setattr(manager.board, "handle", recorded)
        disk.turns.clear()
        await calls(manager, seat)
        await until(disk.reached.is_set, what="the ledger is being written")
        presence = Presence(cause="p", component="router", instance="r", incarnation="a")
        await manager.receive(presence)
        arrived = manager.now().wall
        await asyncio.sleep(0.01)
        disk.turns.set()
        await until(lambda: presence in [message for message, _ in handled], what="the presence is handled")
        (now,) = [now for message, now in handled if message is presence]
        assert now.handled <= arrived < now.wall

        monkeypatch.setattr(manager_module, "PAUSE_SECONDS", -1.0)
        begun = len(handled)
        await until(lambda: Paused() in [one for one, _ in handled[begun:]], what="a message comes after a pause")


@pytest.fixture(name="draining")
def draining_world() -> tuple[World, str]:
    """A seat that drains: one of two routers is quiet, the engine is idle."""
    world = booted()
    world.router("router-1")
    a, b = world.fill("a", "b")
    world.beat()
    world.wish(a)
    world.quiet(b)
    assert (world.state(b), len(world.node.routers.present)) == (S.DRAINING, 2)
    return world, b


def late(world: World, message: object, lag: float) -> None:
    world.board.handle(message, replace(world.now, lag=lag))


def test_a_router_whose_presence_waits_in_the_inbox_is_waited_for(draining: tuple[World, str]) -> None:
    """The ledger was being written for 12 s: all that arrived meanwhile is handled in the order in which it came."""
    world, seat = draining
    presence = Presence(cause="p", component="router", instance="router-1", incarnation="a")
    world.wall += 12.0

    late(world, signal(1), 11.9)
    assert world.node.switches["G0"].drain.quiet is None, "router-1 may be forwarding"
    late(world, presence, 9.0)
    late(world, signal(2), 0.5)
    late(world, presence, 0.4)
    world.tick(1)
    world.idle(seat)

    assert world.state(seat) is S.DRAINING, "router-1 has not acknowledged"
    world.tick(9)
    world.idle(seat)
    assert world.state(seat) is not S.DRAINING, "silent for 10 s"


def test_a_pause_of_the_process_makes_no_router_silent(draining: tuple[World, str]) -> None:
    """Its presences are unread in the socket, as are those of routers that came meanwhile."""
    world, seat = draining
    world.wall += 14.0

    world.receive(Paused())
    world.ack(seat, router="router-1")
    world.tick(1)
    world.idle(seat)
    assert world.state(seat) is S.DRAINING, "a third router may have come"
    world.router("router-2")
    world.tick(3)
    world.idle(seat)
    assert world.state(seat) is S.DRAINING
    assert len(world.node.routers.present) == 3
    world.ack(seat, router="router-2")
    world.tick(1)
    world.idle(seat)
    assert world.state(seat) is S.PARKING


def signal(number: int) -> TrafficSignal:
    return TrafficSignal(cause="c", source="r", model="m", seq=number)


def status(op: str, number: int) -> JobProgress:
    return JobProgress(cause=str(number), node="n1", status=JobStatus(op=op, epoch=number, group="G0"))


async def everything(inbox: BoardInbox) -> list[object]:
    return [(await inbox.get())[0] for _ in range(len(inbox))]


async def test_the_oldest_levels_are_dropped_and_counted_and_a_job_keeps_its_last_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox_module, "LEVELS", 2)
    inbox = BoardInbox()
    sent = [signal(1), status("a", 1), signal(2), status("b", 1), BusChanged(False), signal(3), status("a", 2)]
    for message in sent:
        await inbox.receive(message)

    assert await everything(inbox) == [sent[2], sent[3], sent[4], sent[5], sent[6]]
    assert inbox.dropped == 1


async def test_a_message_that_must_not_be_lost_waits_for_room_and_levels_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox_module, "OTHERS", 2)
    inbox = BoardInbox()
    first, second, third = (DrainAnnounced(seat, 1) for seat in "abc")
    await inbox.receive(first)
    await inbox.receive(second)
    waiting, level = asyncio.create_task(inbox.receive(third)), signal(1)
    await inbox.receive(level)
    await asyncio.sleep(0)
    assert len(inbox) == 3

    assert (await inbox.get())[0] == first
    await waiting

    assert await everything(inbox) == [second, level, third]


@pytest.mark.parametrize("seed", range(20))
async def test_in_any_order_of_senders_only_levels_and_replaced_statuses_are_lost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "LEVELS", 5)
    monkeypatch.setattr(inbox_module, "OTHERS", 3)
    chance, inbox = random.Random(seed), BoardInbox()
    answers = [DrainAnnounced(str(number), 1) for number in range(60)]
    got: list[object] = []

    async def send() -> None:
        for answer in answers:
            for number in range(chance.randrange(4)):
                inbox.put(signal(number))
            presence = Presence(cause="p", component="router", instance="r", incarnation=answer.seat)
            await inbox.receive(presence)
            inbox.put(status(chance.choice("ab"), int(answer.seat)))
            await inbox.receive(answer)
            assert len(inbox) <= 5 + 3 + 2

    sender = asyncio.create_task(send())
    while not (sender.done() and not len(inbox)):
        if len(inbox) and chance.random() < 0.5:
            got.append((await inbox.get())[0])
        await asyncio.sleep(0)
    await sender

    assert [one for one in got if isinstance(one, DrainAnnounced)] == answers
    last = {one.status.op: one.status.epoch for one in got if isinstance(one, JobProgress)}
    assert max(last.values()) == 59
    assert inbox.dropped == 0 or len(got) < 60 * 6
