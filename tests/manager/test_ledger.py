"""The ledger on a full, a failing and a damaging disk: it is the state before or after, never another one."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from kybernate.bus.port import BusError
from kybernate.messages import CommandReply, DrainNode, PinSeat, Presence
from kybernate.seat import LEDGER_FORMAT
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery
from services.gpu_manager.core.facts import Promise, Residence
from services.gpu_manager.core.inputs import (
    ForeignProcessesSeen,
    Now,
    StartCall,
    StartCalls,
    StartTicket,
    Tick,
    UnixTime,
    WallTime,
)
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.core.state import Effect
from services.gpu_manager.ledger import _CHECKED, Durable, Ledger, LedgerEntry, LedgerFile, _checksum
from services.gpu_manager.manager import Manager
from services.gpu_manager.publish import GateFiles
from tests.manager.test_manager import running, sees
from tests.manager.world import World, booted
from tests.until import until


def ledger(epoch: int) -> Ledger:
    seats = tuple(
        LedgerEntry(
            seat=f"1x-742563.s{number:02}",
            state=S.PARKED if number else S.ACTIVE,
            epoch=epoch + number,
            lease=not number,
            pod=f"default/m{number}",
            pod_uid=f"u-{number}",
            annotations={"kyb.ai/model": f"m{number}"},
            gpus=("GPU-0",),
            durable=Durable(container_id=f"containerd://{number}", ticket=f"call-{epoch}"),
        )
        for number in range(3)
    )
    return Ledger(boot_id="b", epoch=epoch, seq=1_800_000_000_000_000 + epoch, seats=seats)


FULL = """
import resource, sys
from pathlib import Path
from services.gpu_manager.ledger import LedgerFile
from tests.manager.test_ledger import ledger

def written(path, begin, room):
    file = LedgerFile(path)
    for epoch in (1, 2, 3):
        file.write(ledger(epoch), durable=True)
    size = path.stat().st_size
    new = LedgerFile(path) if begin else file
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room if begin else size + room, before[1]))
    try:
        new.write(ledger(50), durable=True)
        yield "durable"
    except OSError:
        yield "raised"
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    yield from (LedgerFile(path).read().epoch, path.stat().st_size == size)
    new.write(ledger(60), durable=True)
    yield LedgerFile(path).read().epoch

for begin in (False, True):
    for room in (0, 300):
        print(*written(Path(sys.argv[1]) / f"{begin}-{room}", begin, room))
"""
"""A disk with room for a part of a record only, made by the limit for the size of files; then there is room again."""


def test_a_record_that_a_full_disk_takes_in_part_is_no_record(tmp_path: Path) -> None:
    """Appended, and as the first one of a file that is begun anew."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]

    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()

    assert printed == ["raised 3 True 60"] * 4, "the ledger is as before, and goes on once there is room"


def test_a_part_of_a_record_is_cut_off_before_the_write_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LedgerFile(tmp_path / "ledger")
    file.write(ledger(1), durable=True)
    good, write = (tmp_path / "ledger").read_bytes(), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: write(handle, data[: len(data) // 2]))
        with pytest.raises(OSError, match="No space left"):
            file.write(ledger(2), durable=True)

    assert (tmp_path / "ledger").read_bytes() == good


@pytest.mark.parametrize("begun", [False, True])
def test_an_error_of_the_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    file = LedgerFile(tmp_path / "ledger")
    if begun:
        file.write(ledger(1), durable=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")  # the kernel names no file

    with monkeypatch.context() as patch:
        patch.setattr(os, "write" if begun else "fsync", full)
        with pytest.raises(OSError, match="No space left") as error:
            file.write(ledger(2), durable=True)
    assert error.value.filename == str(tmp_path / "ledger")


def test_a_failed_fsync_is_not_made_good_by_a_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an fsync that failed the kernel may drop the pages and report success to the next one."""
    file = LedgerFile(tmp_path / "ledger")
    file.write(ledger(1), durable=True)
    inode = (tmp_path / "ledger").stat().st_ino

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="Input/output"):
            file.write(ledger(2), durable=True)
    file.write(ledger(2), durable=True)

    assert (tmp_path / "ledger").stat().st_ino != inode, "written anew as a whole"
    assert LedgerFile(tmp_path / "ledger").read() == ledger(2)


def test_a_durable_record_is_synced_before_the_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "ledger", []
    fsync, fdatasync = os.fsync, os.fdatasync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    monkeypatch.setattr(os, "fdatasync", lambda handle: (synced.append(os.fstat(handle).st_size), fdatasync(handle)))
    file = LedgerFile(path)

    file.write(ledger(1), durable=False)
    assert len(synced) == 2, "the new file and then its folder"
    assert synced[0] != str(path), "before it takes the old one's place"
    assert synced[1] == str(tmp_path)
    file.write(ledger(2), durable=False)
    assert len(synced) == 2
    file.write(ledger(2), durable=True)

    assert synced[2:] == [path.stat().st_size]


def test_a_damaged_ledger_is_read_as_the_state_before_or_after_or_not_at_all(tmp_path: Path) -> None:
    path, chance = tmp_path / "ledger", random.Random(12)
    file = LedgerFile(path)
    for epoch in (1, 2):
        file.write(ledger(epoch), durable=False)
    whole = path.read_bytes()
    last = whole.index(b"\n") + 1
    flips = [{chance.randrange(last * 8, len(whole) * 8)} for _ in range(3000)]
    flips += [{chance.randrange(len(whole) * 8) for _ in range(chance.randint(1, 6))} for _ in range(1000)]
    found = []
    for bits in flips:
        data = bytearray(whole)
        for bit in bits:
            data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        found.append(LedgerFile(path).read())

    before = ledger(1).model_copy(update={"lost": True})
    assert all(one in (before, ledger(2)) for one in found[:3000])
    assert all(one in (before, ledger(2), Ledger(lost=True)) for one in found)


def test_what_is_read_tells_whether_a_ticket_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    assert LedgerFile(path).read().lost
    file = LedgerFile(path)
    for epoch in (1, 2):
        file.write(ledger(epoch), durable=False)
    assert not LedgerFile(path).read().lost
    path.write_bytes(path.read_bytes()[:-40])

    found = LedgerFile(path).read()

    assert (found.epoch, found.lost) == (1, True)
    path.write_text("damaged")
    assert LedgerFile(path).read().lost


def test_a_ledger_of_a_later_format_is_believed_as_one_whose_end_is_damaged(tmp_path: Path) -> None:
    LedgerFile(tmp_path / "ledger").write(ledger(1).model_copy(update={"format": LEDGER_FORMAT + 1}), durable=True)

    with structlog.testing.capture_logs() as logs:
        found = LedgerFile(tmp_path / "ledger").read()

    assert (found.seats, found.lost) == (ledger(1).seats, True)
    assert [(line["event"], line["format"], line["known"]) for line in logs] == [
        ("ledger.newer", LEDGER_FORMAT + 1, LEDGER_FORMAT)
    ]


@pytest.mark.parametrize("lines", ["last", "all"])
def test_damaged_lines_are_named_in_the_log_with_what_follows(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "ledger"
    file = LedgerFile(path)
    for epoch in (1, 2, 3):
        file.write(ledger(epoch), durable=False)
    first, *others = path.read_bytes().splitlines(keepends=True)
    kept = first if lines == "last" else first[:40] + b"#" + first[41:]
    path.write_bytes(damaged := kept + b"".join(line[:40] + b"#" + line[41:] for line in others))

    with structlog.testing.capture_logs() as logs:
        again = LedgerFile(path)
        assert again.read().epoch == (1 if lines == "last" else 0)
        again.read()

    (line,) = logs
    if lines == "last":
        assert (line["event"], line["lines"], line["used"], line["epoch"]) == ("ledger.damaged", [2, 3], 1, 1)
        assert "forgotten" in line["meaning"]
    else:
        assert (line["event"], line["lines"]) == ("ledger.unreadable", [1, 2, 3])
        assert Path(line["kept_as"]).read_bytes() == damaged


def test_the_same_ledger_is_written_once(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "ledger")
    for _ in range(2):
        file.write(Ledger(epoch=1), durable=False)

    assert (tmp_path / "ledger").read_bytes().count(b"\n") == 1


def test_a_long_ledger_is_begun_anew(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "ledger", longest_bytes=300)
    for epoch in range(1, 100):
        file.write(Ledger(epoch=epoch), durable=epoch % 7 == 0)
    file.close()

    assert (tmp_path / "ledger").stat().st_size <= 300
    assert LedgerFile(tmp_path / "ledger").read().epoch == 99


@pytest.mark.parametrize("checked", [True, False])
def test_a_ledger_of_a_release_long_before_counts_as_lost(tmp_path: Path, *, checked: bool) -> None:
    """Releases before 843f10d5 had no checksums, or a seat's own fields in a record: it is not read without them."""
    known = json.loads(ledger(1).model_dump_json())
    if checked:
        known["seats"] = [seat | {"durable": {"container_id": seat.pop("container_id")}} for seat in known["seats"]]
    rest = json.dumps(known).encode()[1:]
    begin = _CHECKED + _checksum(rest) + b'",' if checked else b"{"
    (tmp_path / "ledger").write_bytes(begin + rest + b"\n")

    assert LedgerFile(tmp_path / "ledger").read() == Ledger(lost=True)


@asynccontextmanager
async def with_a_pod(folder: Path) -> AsyncIterator[tuple[Manager, str]]:
    """A manager and a seat that a pod waits for."""
    world = World()
    seat = world.seat(0, 0)

    async def owners(_: object = ()) -> Owners:
        return world.owners()

    (folder / "seats" / seat).mkdir(parents=True)  # the plugin's: tickets are written there
    async with running(world, folder, sees("gone")) as manager:
        await until(lambda: manager.node.seats[seat].state is S.FREE, what="the seat of the deleted pod is free")
        world.boot()
        world.pod(seat, "a")
        manager.pods.seats = owners  # type: ignore[method-assign]
        await manager.receive(world.owners())
        await until(lambda: manager.node.seats[seat].pod is not None, what="the pod owns the seat")
        await manager.until_recorded()
        assert runs()
        yield manager, seat


async def calls(manager: Manager, seat: str) -> None:
    """The start gate is asked for the seat."""
    unix = manager.now().unix
    await manager.receive(StartCalls({seat: StartCall("call-1", unix, UnixTime(unix + 25))}))


@asynccontextmanager
async def with_a_full_disk(folder: Path) -> AsyncIterator[tuple[Manager, str]]:
    """The same; from now on no record can be written."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with with_a_pod(folder) as (manager, seat):
        manager.ledger.write = full  # type: ignore[method-assign]
        yield manager, seat


def runs() -> bool:
    """Whether the manager's task goes on."""
    return any(getattr(task.get_coro(), "__qualname__", "") == "Manager.run" for task in asyncio.all_tasks())


async def test_a_ticket_that_the_ledger_could_not_record_is_not_published(tmp_path: Path) -> None:
    async with with_a_full_disk(tmp_path) as (manager, seat):
        await calls(manager, seat)
        await until(lambda: not runs(), what="the manager has ended")

        assert manager.node.seats[seat].state is S.STARTING, "the board gave a ticket"
        assert not list(tmp_path.rglob("ticket.json"))


async def test_a_pin_that_the_ledger_could_not_record_is_not_confirmed(tmp_path: Path) -> None:
    async with with_a_full_disk(tmp_path) as (manager, seat):
        pin = PinSeat(cause="c", node="n1", seat=seat, actor="me")

        with pytest.raises(BusError):
            await manager.bus.request(pin, CommandReply, timeout=1.0)

        assert manager.node.seats[seat].durable.pinned, "the board took it"
        assert not runs(), "and ended with its manager"


def follow(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of what the manager makes durable and publishes from now on."""
    order: list[str] = []
    write, fdatasync, ticket = manager.ledger.write, os.fdatasync, manager.gate.write_ticket

    def record(found: Ledger, *, durable: bool) -> None:
        order.append("record")
        write(found, durable=durable)

    monkeypatch.setattr(manager.ledger, "write", record)
    monkeypatch.setattr(os, "fdatasync", lambda handle: (order.append("sync"), fdatasync(handle)))
    monkeypatch.setattr(manager.gate, "write_ticket", lambda one: (order.append("ticket"), ticket(one)))
    return order


async def test_the_record_of_a_ticket_is_on_disk_before_the_ticket_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_a_pod(tmp_path) as (manager, seat):
        order = follow(manager, monkeypatch)
        await calls(manager, seat)
        await until(lambda: "ticket" in order, what="the ticket is published")

        before = order[: order.index("ticket")]
        assert before[-2:] == ["record", "sync"]
        (entry,) = [one for one in LedgerFile(tmp_path / "ledger").read().seats if one.seat == seat]
        assert (entry.state, entry.lease, entry.durable.ticket) == (S.STARTING, True, "call-1")


@pytest.mark.parametrize("ordered", [False, True], ids=["pin", "drain"])
async def test_the_record_of_a_command_is_on_disk_before_it_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ordered: bool
) -> None:
    async with with_a_pod(tmp_path) as (manager, seat):
        order = follow(manager, monkeypatch)
        pin = PinSeat(cause="c", node="n1", seat=seat, actor="me")
        drain = DrainNode(cause="c", node="n1", group="G0", purpose="maintenance", actor="me")

        assert (await manager.bus.request(drain if ordered else pin, CommandReply, timeout=30.0)).accepted

        assert order[:2] == ["record", "sync"]
        written = LedgerFile(tmp_path / "ledger").read()
        if ordered:
            assert [one.target for one in written.orders] == ["G0"]
        else:
            assert [one.durable.pinned for one in written.seats if one.seat == seat] == [True]


async def test_a_router_that_appears_is_in_the_ledger(tmp_path: Path) -> None:
    async with with_a_pod(tmp_path) as (manager, _):
        await manager.receive(Presence(cause="p", component="router", instance="router-1", incarnation="x"))

        await until(
            lambda: LedgerFile(tmp_path / "ledger").read().routers.get("router-1") == "x",
            what="the next manager knows the router",
        )


def entry(folder: Path, seat: str) -> LedgerEntry:
    """What the ledger has of a seat now."""
    return next(one for one in LedgerFile(folder / "ledger").read().seats if one.seat == seat)


async def test_a_container_that_runs_is_in_the_ledger_before_it_serves(tmp_path: Path) -> None:
    """The board changes nothing else then, so no message leaves. Without the container's ID the next manager could not
    ask whether the processes of a pod deleted meanwhile have ended, and would give their GPUs away."""
    async with with_a_pod(tmp_path) as (manager, seat):
        await calls(manager, seat)
        await until(lambda: manager.node.seats[seat].state is S.STARTING, what="its start has a ticket")
        owners = await manager.pods.seats()
        runs = Owners(
            tuple(replace(pod, container_id="process://9", running=True) for pod in owners.pods), owners.listed
        )

        async def seen(_: object = ()) -> Owners:
            return runs

        manager.pods.seats = seen  # type: ignore[method-assign]
        await manager.receive(runs)

        await until(lambda: entry(tmp_path, seat).durable.container_id, what="its container is in the ledger")
        assert entry(tmp_path, seat).state is S.STARTING
        assert entry(tmp_path, seat).seen_running


async def test_what_changes_nothing_is_not_written(tmp_path: Path) -> None:
    """An idle node writes nothing, however many routers it has."""
    writes: list[float] = []
    async with with_a_pod(tmp_path) as (manager, _):
        owners = await manager.pods.seats()
        router = Presence(cause="p", component="router", instance="router-1", incarnation="x")
        manager.observe_write = writes.append
        for message in [router, Tick(), owners, StartCalls({}), ForeignProcessesSeen(())] * 20:
            await manager.receive(message)
        await manager.receive(router.model_copy(update={"instance": "router-2"}))
        await until(
            lambda: LedgerFile(tmp_path / "ledger").read().routers == {"router-1": "x", "router-2": "x"},
            what="the last message is handled",
        )
        assert len(writes) < 20


async def test_what_must_not_be_forgotten_is_synced_though_an_earlier_record_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_a_pod(tmp_path) as (manager, seat):
        order, handle = follow(manager, monkeypatch), manager.board.handle
        await manager.receive(Presence(cause="p", component="router", instance="router-1", incarnation="x"))
        await until(lambda: "record" in order, what="a record is in the file")

        def ticket(message: object, now: Now) -> list[Effect]:
            ticket = StartTicket(seat, "call-1", "u", 1, WallTime(time.monotonic() + 30))
            return [ticket] if message == "a ticket" else handle(message, now)

        monkeypatch.setattr(manager.board, "handle", ticket)
        await manager.receive("a ticket")
        await until(lambda: "ticket" in order, what="the ticket is published")

        assert order == ["record", "record", "sync", "ticket"]


CHANGES: dict[str, Callable[[ManagedSeat], None]] = {
    "its state": lambda seat: seat.know(replace(seat.facts, promise=Promise.HANDS_OFF)),
    "its epoch": lambda seat: setattr(seat, "epoch", seat.epoch + 1),
    "its lease": lambda seat: seat.know(replace(seat.facts, residence=Residence.NOWHERE)),
    "its pod": lambda seat: setattr(seat, "pod", replace(seat.pod, uid="another")),
    "annotations": lambda seat: setattr(seat, "pod", replace(seat.pod, annotations={"kyb.ai/pin": "true"})),
    "its VRAM": lambda seat: setattr(seat.durable, "vram_bytes", seat.durable.vram_bytes + 1),
    "its costs": lambda seat: setattr(seat.durable.costs, "parks", seat.durable.costs.parks + 1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_of_an_entry_is_in_the_next_record(what: str) -> None:
    world = booted()
    (other,), (seat,) = world.fill("a"), world.fill("b", group=1)
    last = recovery.ledger(world.node, "boot")
    assert recovery.ledger(world.node, "boot", last) is last

    CHANGES[what](world.node.seats[seat])
    found = recovery.ledger(world.node, "boot", last)

    assert found == recovery.ledger(world.node, "boot") != last
    before, after = ({one.seat: one for one in each.seats} for each in (last, found))
    assert after[other] is before[other]


async def test_a_manager_without_its_ledger_reads_the_tickets_in_the_seat_folders(tmp_path: Path) -> None:
    world = World()
    seat = world.seat(0, 2)
    GateFiles(tmp_path).seats.joinpath(seat).mkdir(parents=True)
    GateFiles(tmp_path).write_ticket(StartTicket(seat, "call-1", "uid-a", 7, WallTime(time.monotonic() + 30)))

    async with running(world, tmp_path, sees("gone")) as manager:
        assert manager.node.seats[seat].lease, "a container may come of it"
