"""The real shells of a manager and a router on virtual time, with a bus in memory and the ledger in a folder.

Real: ``Manager`` with its inbox, jobs, ledger file and roster writer, ``NodePresence``, ``RosterSync``, ``Dispatcher``.
Played: pods that stay, engines that compute nothing, a checkpointer that takes every job. What goes wrong: a ledger's
write is slow (its disk hangs for seconds), fails, or both; a row's put takes seconds, or its answer is lost; the
manager's or the router's nats-server loses its routes, and the connection stays, or it is lost; the manager is killed.

What must hold: nothing leaves the manager before the ledger on the disk says it; no router is sure that a seat is
active while it is being parked; in the end every row, and what the router knows, is what the manager decided.
"""

import asyncio
import contextlib
import errno
import random
import selectors
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast
from unittest import mock

import aiohttp
from pydantic import BaseModel

from kybernate.bus.port import Bucket, BusError, NoAnswerError
from kybernate.clock import Clock
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.envelope import Message
from kybernate.lifecycle import boot_id
from kybernate.messages import (
    ActivateSeat,
    AskJobs,
    Command,
    CommandReply,
    JobProgress,
    JobReply,
    JobStatus,
    ParkSeat,
    PinSeat,
    Presence,
    SeatEvent,
    SeatProgress,
    SwitchJob,
    UnpinSeat,
)
from kybernate.presence import NodePresence
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState
from services.gpu_manager.core import recovery
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.engines import EngineProbes
from services.gpu_manager.ledger import Ledger, LedgerFile
from services.gpu_manager.manager import Manager
from services.gpu_manager.publish import GateFiles, record
from services.router.core.traffic import Traffic
from services.router.core.upstreams import Rank
from services.router.dispatch import Dispatcher
from services.router.engines import EnginePools
from services.router.roster_sync import RosterSync
from services.router.settings import RouterSettings
from tests.exploration.machine import ViolationError
from tests.manager.world import World, status

COMMANDS: tuple[type[Command], ...] = (*(ActivateSeat,) * 5, ParkSeat, PinSeat, UnpinSeat, UnpinSeat)
FAULTS = ("slow", "fail", "both", "put", "answer", "part", "cut", "kill")
SLOW_PUT_SECONDS = 1.5
CALM_SECONDS = 120.0
"""Virtual seconds without faults, after which everything must agree."""


# --- virtual time -----------------------------------------------------------------------------------------------------


class VirtualTime(selectors.DefaultSelector):
    """The clock of a run. It moves on when the event loop would wait, unless a thread is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10_000.0
        self.working = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0.002 if self.working else 0)
        if not ready and not self.working and timeout is not None:
            self.now += timeout
        return ready if ready or timeout is not None or self.working else super().select(1.0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which stands still while a thread of ``asyncio.to_thread`` works."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__(clock)
        self._virtual = clock

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """Count the thread, also one whose task was cancelled, and the way of its result into the loop. Other
        executors count by themselves."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)

        def over(_: object = None) -> None:
            self._virtual.working -= 1

        def work() -> Any:
            try:
                return func(*args)
            finally:
                self.call_soon_threadsafe(over)

        self._virtual.working += 2
        result = super().run_in_executor(executor, work)
        result.add_done_callback(over)
        return result


def run(work: Callable[[VirtualTime], Awaitable[None]]) -> None:
    """Run on a loop in virtual time; ``time.monotonic`` and ``time.time`` show it, too."""
    clock = VirtualTime()

    def monotonic() -> float:
        return clock.now

    def unix() -> float:
        return 1.8e9 + clock.now

    with (
        mock.patch.object(time, "monotonic", monotonic),
        mock.patch.object(time, "time", unix),
        asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner,
    ):
        runner.run(cast(Any, work(clock)))


# --- what goes wrong --------------------------------------------------------------------------------------------------


class FaultyLedger(LedgerFile):
    """A ledger on a disk that hangs or is full. ``trouble``: of the next write, slow and failing."""

    def __init__(self, path: Path, clock: VirtualTime) -> None:
        super().__init__(path)
        self._clock = clock
        self.slow = self.fails = False

    def write(self, ledger: Ledger, *, durable: bool) -> None:
        """Write in a thread, as the manager does."""
        slow, fails, self.slow, self.fails = self.slow, self.fails, False, False
        self._clock.working += 1
        try:
            if slow:
                _rest(0.02)  # longer than the manager's loop waits for it
                self._clock.now += 6.0
            if fails:
                self.close()
                raise OSError(errno.ENOSPC, "no space left")
            super().write(ledger, durable=durable)
        finally:
            self._clock.working -= 1


_rest = time.sleep


class CutBus(MemoryBus):
    """A client whose nats-server may have lost its routes, and whose puts may take long."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.parted = False
        self.put_seconds = 0.0
        self.lose_answer = False
        self.check: Callable[[Message], None] = lambda _: None

    async def publish(self, message: Message) -> None:
        self.check(message)
        if not self.parted:
            await super().publish(message)

    async def request(self, message: Message, reply: type[Any], *, timeout: float) -> Any:
        if self.parted:
            await asyncio.sleep(timeout)
            raise NoAnswerError("cut off")
        return await super().request(message, reply, timeout=timeout)

    async def bucket(self, name: str) -> Bucket:
        await self._led()
        return cast(Bucket, _CutBucket(self, await super().bucket(name)))

    async def _led(self) -> None:
        if self.parted:
            await asyncio.sleep(5.0)
            raise NoAnswerError("no leader")


class _CutBucket:
    def __init__(self, bus: CutBus, bucket: Bucket) -> None:
        self._bus, self._bucket = bus, bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    async def put(self, key: str, value: bytes) -> int:
        await asyncio.sleep(self._bus.put_seconds)
        await self._bus._led()
        revision = await self._bucket.put(key, value)
        if self._bus.lose_answer:
            self._bus.lose_answer = False
            raise NoAnswerError("the answer was lost")
        return revision

    async def entries(self, node: str = "") -> Any:
        await self._bus._led()
        return await self._bucket.entries(node)


class Pools:
    """Connections to engines: there are none."""

    def disconnect(self, key: str) -> None: ...

    def prepare(self, *_: object) -> None: ...


class Engines(EngineProbes):
    """They are healthy and compute nothing."""

    async def _answer(self, _: object) -> tuple[bool, int | None, str]:
        await asyncio.sleep(0.05)
        return True, 0, ""


class StayingPods:
    """The pods of the world, unchanged."""

    settled_seconds = 0.0

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    def on_change(self, notify: Callable[[], None]) -> None: ...

    async def seats(self, prove: Collection[str] = ()) -> Owners:
        return self._owners

    async def run(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None: ...


# --- the node ---------------------------------------------------------------------------------------------------------


@dataclass
class Shells:
    """One manager and one router, and what is true beside them."""

    folder: Path
    clock: VirtualTime
    rng: random.Random
    server: MemoryServer = field(default_factory=MemoryServer)
    node: World = field(default_factory=World)
    parked: dict[str, bool] = field(default_factory=dict)
    """By seat: what the checkpointer has done with its process."""
    done: dict[str, JobStatus] = field(default_factory=dict)
    manager: Manager | None = None
    broken: list[str] = field(default_factory=list)
    steps: int = 0
    kills: int = 0
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.node.boot()
        a, b = self.node.fill("a", "b")
        self.parked = {a: True, b: False}
        file = LedgerFile(self.folder / "ledger")
        file.write(recovery.ledger(self.node.node, boot_id()), durable=True)
        file.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The buses, the router and the checkpointer, until the end of the run."""
        async with AsyncExitStack() as stack:
            self.bus, self.far = CutBus(self.server), CutBus(self.server)
            for bus in (self.bus, self.far):
                self.server.buses.append(bus)
                bus.check_connection()
            self.bus.check = self._leaves
            socket = MemoryServer()
            self.node_bus = await stack.enter_async_context(MemoryBus.connect(socket))
            self.worker = await stack.enter_async_context(MemoryBus.connect(socket))
            for kind, handler in ((AskJobs, self._asked), (SwitchJob, self._taken)):
                await stack.enter_async_context(self.worker.serve(kind.pattern(node="n1"), handler))
            self.traffic = Traffic(RouterSettings(instance="router-0"), "i1")
            none = cast(aiohttp.ClientSession, None)
            dispatcher = Dispatcher(self.traffic, self.far, none, cast(EnginePools, Pools()))
            sync = RosterSync(self.far, dispatcher, self._router_presence)
            self.tasks = [asyncio.create_task(job) for job in (
                dispatcher.run(), sync.presence(), sync.read(), sync.watch(), sync.listen()
            )]  # fmt: skip
            try:
                yield
            finally:
                await dispatcher.close()
                await _end(self.tasks)

    def _router_presence(self) -> Presence:
        return Presence(cause="p", component="router", instance="router-0", incarnation="i1")

    # --- the manager ------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Managers, each until it ends of a fault."""
        while True:
            ledger = FaultyLedger(self.folder / "ledger", self.clock)
            manager = Manager(
                board=self.node.new_board(), bus=self.bus, node_bus=self.node_bus, ledger=ledger, clock=Clock(),
                pods=StayingPods(self.node.owners()), gate=GateFiles(self.folder),
                engines=Engines(cast(aiohttp.ClientSession, None)),
            )  # fmt: skip
            self.manager, self.ledger = manager, ledger
            presence = NodePresence(self.bus, instance="m", node="n1", lock="l", routers=manager.counted)
            manager.on_router = presence.at_once.set
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(presence.keep())
                    group.create_task(presence.claim(1.0))
                    group.create_task(self._until_killed())
                    group.create_task(manager.run())
            except* (OSError, KilledError):
                self.kills += 1
            finally:
                manager._writer.shutdown()
                ledger.close()
                self.bus._callbacks.clear()
            await asyncio.sleep(1.0)

    def _on_disk(self) -> Ledger:
        return LedgerFile(self.folder / "ledger").read()

    def _leaves(self, message: Message) -> None:
        """An event leaves the manager."""
        if not isinstance(message, SeatEvent) or self.manager is None:
            return
        entry = next((one for one in self._on_disk().seats if one.seat == message.seat), None)
        if message.state is not SeatState.FREE and (entry is None or entry.epoch < message.epoch):
            self.broken.append(f"{message.seat} is {message.state} at {message.epoch}, and the ledger has {entry}")

    async def _taken(self, job: Message) -> BaseModel:
        assert isinstance(job, SwitchJob)
        if self._on_disk().epoch < job.epoch:
            self.broken.append(f"job {job.op} of epoch {job.epoch} is not in the ledger")
        if job.op not in self.done:
            for target in job.park:
                self._parks(target.seat)
            asyncio.get_running_loop().call_later(self.rng.uniform(0.1, 3.0), self._ends, job)
        return JobReply(accepted=True)

    def _parks(self, seat: str) -> None:
        upstream = next((one for one in self.traffic.table.upstreams.values() if one.record.seat == seat), None)
        now = self.clock.now
        if upstream is not None and upstream.rank(now, self.traffic.trust.sure("n1", now)) is Rank.OPEN:
            self.broken.append(f"{seat} is being parked, and the router would send to it")

    def _ends(self, job: SwitchJob) -> None:
        self.done[job.op] = status(job)
        self.parked |= {target.seat: True for target in job.park}
        if job.activate is not None:
            self.parked[job.activate.seat] = False
        with contextlib.suppress(BusError):
            self.worker.publish_nowait(JobProgress(cause="job", node="n1", status=self.done[job.op]))

    async def _asked(self, job: Message) -> BaseModel:
        assert isinstance(job, AskJobs)
        seats = tuple(
            SeatProgress(
                seat=one.seat, pod_uid=one.pod_uid, container_id=one.container_id,
                outcome="parked" if self.parked.get(one.seat) else "active",
            )
            for one in job.targets
        )  # fmt: skip
        jobs = tuple(self.done[op] for op in job.ops if op in self.done)
        return JobReply(accepted=True, seats=seats, jobs=jobs)

    # --- a run ------------------------------------------------------------------------------------------------------

    async def act(self) -> None:
        """One random action, then some virtual time."""
        rng, self.steps = self.rng, self.steps + 1
        match rng.choice(("command",) * 12 + ("heal",) * 3 + FAULTS):
            case "command":
                asyncio.get_running_loop().create_task(self._command(rng.choice(COMMANDS), rng.choice([*self.parked])))
            case "slow" | "both" | "fail" as how:
                self.ledger.slow, self.ledger.fails = how != "fail", how != "slow"
            case "put":
                self.bus.put_seconds = rng.choice((0.0, 0.5, 3.0))
            case "answer":
                self.bus.lose_answer = True
            case "part":
                rng.choice((self.bus, self.far)).parted = True
            case "heal":
                self.heal()
            case "cut":
                bus = rng.choice((self.bus, self.far))
                bus.cut()
                await asyncio.sleep(rng.choice((0.1, 9.0)))
                bus.restore()
            case "kill":
                self.killed.set()
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.3, 2.0, 12.0)))
        if self.broken:
            raise ViolationError(self.broken[0])

    async def _until_killed(self) -> NoReturn:
        self.killed.clear()
        await self.killed.wait()
        raise KilledError

    async def _command(self, kind: type[Command], seat: str) -> None:
        command = kind(cause="op", node="n1", seat=seat, actor="operator")  # type: ignore[call-arg]
        with contextlib.suppress(BusError):
            await self.far.request(command, CommandReply, timeout=2.0)

    def heal(self) -> None:
        """Both servers have their routes again: what was published meanwhile is gone, and rows arrive."""
        for bus in (self.bus, self.far):
            bus.parted, bus.put_seconds = False, 0.0

    async def settle(self) -> None:
        """Nothing goes wrong any more, only puts take their time: after a last switch everything must agree soon."""
        self.heal()
        self.ledger.slow = self.ledger.fails = False
        for kind, seat in [(UnpinSeat, seat) for seat in self.parked] + [(ActivateSeat, seat) for seat in self.parked]:
            await asyncio.sleep(30.0)
            self.bus.put_seconds = SLOW_PUT_SECONDS
            await self._command(kind, seat)
        await asyncio.sleep(CALM_SECONDS)
        manager = self.manager
        assert manager is not None
        if not manager.node.recovered:
            raise ViolationError("the manager does not recover")
        rows = {entry.key: SeatRecord.model_validate_json(entry.value or b"") for entry in
                await (await self.far.bucket(BUCKET)).entries()}  # fmt: skip
        for seat in self.parked:
            mine = record(manager.node, manager.node.seats[seat], manager.now())
            facts = mine.state, mine.epoch, mine.pinned
            row, known = rows.get(mine.key), self.traffic.table.upstreams.get(mine.key)
            if row is None or (row.state, row.epoch, row.pinned) != facts:
                raise ViolationError(f"{seat} is {facts}, and its row says {row}")
            if known is None or (known.record.state, known.record.epoch) != facts[:2]:
                raise ViolationError(f"{seat} is {facts}, and the router knows {known and known.record}")
        if not self.traffic.trust.sure("n1", self.clock.now):
            raise ViolationError("the manager lists the router, and the router is not sure")


class KilledError(Exception):
    """The manager was killed."""


async def _end(tasks: list["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def search(explore: Callable[[int, Path], object], runs: int, folder: Path) -> None:
    """Explore with the seeds below ``runs``, each in its own folder. Raises ViolationError."""
    for seed in range(runs):
        (folder / str(seed)).mkdir()
        explore(seed, folder / str(seed))


def explore(seed: int, folder: Path, actions: int = 60) -> Mapping[str, int]:
    """One run. Raises ViolationError."""
    totals: dict[str, int] = {}

    async def work(clock: VirtualTime) -> None:
        shells = Shells(folder, clock, random.Random(seed))
        async with shells.open():
            life = asyncio.create_task(shells.live())
            try:
                await asyncio.sleep(10.0)
                for _ in range(actions):
                    await shells.act()
                    if life.done():
                        await life
                await shells.settle()
            finally:
                await _end([life])
        totals.update(steps=shells.steps, ends=shells.kills, jobs=len(shells.done))

    run(work)
    return totals
