"""The single writer: one inbox feeds the board; what the board says is made durable and then said.

    inbox ─► board.handle ─► ledger (fsync) ─► tickets, jobs, events, roster, replies

Everything else here is an ear (bus, pods, start gate, engines, time) that puts into the inbox, or a mouth.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from kybernate.annotations import PREFER_GROUP
from kybernate.bus.port import Bus, BusDownError, BusError
from kybernate.clock import Clock
from kybernate.logs import OnceLogger, get_logger
from kybernate.messages import (
    Command,
    CommandReply,
    DrainAck,
    JobProgress,
    KillJob,
    Presence,
    ReleaseJob,
    RetargetJob,
    SeatAllocated,
    SeatEvent,
    SeatPinned,
    SeatUnpinned,
    SwitchJob,
    TrafficSignal,
)
from kybernate.node.known_gpus import boot_id
from kybernate.node.wishes import Wish
from kybernate.seat import SeatState
from services.gpu_manager import due, showing
from services.gpu_manager.board import Board, Effect
from services.gpu_manager.engines import Engines
from services.gpu_manager.foreign import Watch
from services.gpu_manager.gate import Gate
from services.gpu_manager.inputs import (
    BusChanged,
    Decided,
    Now,
    PodsSeen,
    Recovered,
    StartCall,
    StartCalls,
    Stranger,
    StrangersSeen,
    Tick,
    Ticket,
)
from services.gpu_manager.jobs import LONGEST_SECONDS, Jobs
from services.gpu_manager.ledger import LedgerFile
from services.gpu_manager.owners import HAS_PROCESS
from services.gpu_manager.pods import POLL_SECONDS, POLL_SOON_SECONDS, Pace, Pods, PodsError
from services.gpu_manager.roster_writer import RosterWriter
from services.gpu_manager.seat_pod import Owners
from services.gpu_manager.terms import terms

log = get_logger()

GATE_SECONDS = 0.05
STRANGER_SECONDS = 2.0
WISH_SECONDS = 10.0
"""Wall: how long a pending pod's wish for a group outlives the last look at the pod."""
EVIDENCE_SECONDS = 5.0
"""Wall: how long a look at all processes is waited for at first."""
DURABLE = (Ticket, SeatPinned, SeatUnpinned)
"""What must not be forgotten even if the machine crashes right after it was said."""


@dataclass
class Manager:
    """One node's manager. ``run`` it until cancelled."""

    board: Board
    bus: Bus
    node_bus: Bus
    pods: Pods
    gate: Gate
    ledger: LedgerFile
    clock: Clock
    engines: Engines
    strangers: Watch | None = None
    """Looks for foreign processes on the GPUs; None: nobody does."""
    inbox: asyncio.Queue[tuple[object, asyncio.Future[CommandReply] | None]] = field(default_factory=asyncio.Queue)
    look_now: asyncio.Event = field(default_factory=asyncio.Event)
    """Pods may have changed."""
    calling: Mapping[str, StartCall] = field(default_factory=dict)
    """Calls that wait at the start gate, by seat."""
    boot_id: str = field(default_factory=boot_id)
    roster: RosterWriter = field(init=False)
    jobs: Jobs = field(init=False)
    problems: set[str] = field(default_factory=set)
    """What was said about annotations of pods."""
    steering: dict[str, Wish] = field(default_factory=dict)
    """Wishes for groups that were told to ``steer``, by id."""

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.board, self.node_bus, self.now, self.hear)
        self.roster = RosterWriter(self.bus, self.now, self.board, self.hear)

    def now(self) -> Now:
        """This instant."""
        wall = self.clock.wall()
        return Now(wall=wall, model=self.clock.to_model(wall), unix=time.time())

    async def hear(self, message: object) -> None:
        """Put something into the inbox."""
        self.inbox.put_nowait((message, None))

    async def run(self) -> None:
        """Listen from the first moment, recover, then decide; until cancelled."""
        self.bus.on_change(lambda up: self.inbox.put_nowait((BusChanged(up), None)))
        self.pods.on_change(self.look_now.set)
        async with asyncio.TaskGroup() as group:
            for job in (self._listen_cluster, self._listen_node, self._answer, self.roster.run, self.pods.run):
                group.create_task(job(), name=job.__name__)
            await self._recover(group)
            for job in (self._watch_pods, self._watch_gate, self.jobs.ask_about, self._watch_strangers):
                group.create_task(job(), name=job.__name__)
            await self._decide(group)

    # --- the one writer -----------------------------------------------------------------------------------------

    async def _decide(self, group: asyncio.TaskGroup) -> None:
        while True:
            message, reply = await self._next()
            await self._carry_out(self.board.handle(message, self.now()), reply, group)
            if isinstance(message, Presence):
                self.ledger.write(showing.ledger(self.board, self.boot_id), durable=False)
            self.engines.follow(due.probes(self.board), group, self.hear)

    async def _carry_out(
        self, effects: list[Effect], reply: asyncio.Future[CommandReply] | None, group: asyncio.TaskGroup
    ) -> None:
        """Answer at once; everything else only after the ledger knows."""
        told = [effect for effect in effects if not isinstance(effect, CommandReply)]
        for effect in effects:
            if isinstance(effect, CommandReply) and reply is not None and not reply.done():
                reply.set_result(effect)
        if told:
            durable = any(isinstance(effect, DURABLE) for effect in told)
            self.ledger.write(showing.ledger(self.board, self.boot_id), durable=durable)
        for effect in sorted(told, key=lambda effect: not isinstance(effect, SwitchJob)):  # what takes longest first
            await self._say(effect, group)
        if told:
            await asyncio.sleep(0)  # what was said goes out before it is logged
        for effect in told:
            _log(effect)

    async def _next(self) -> tuple[object, asyncio.Future[CommandReply] | None]:
        if not self.inbox.empty():
            return self.inbox.get_nowait()
        try:
            async with asyncio.timeout(due.next_wake(self.board, self.now())):
                return await self.inbox.get()
        except TimeoutError:
            return Tick(), None

    async def _say(self, effect: Effect, group: asyncio.TaskGroup) -> None:
        match effect:
            case SeatEvent():
                self.roster.changed(effect.seat)
                try:
                    await self.bus.publish(effect)
                except BusDownError:
                    log.warning("event.unsent", seat=effect.seat, state=str(effect.state), epoch=effect.epoch)
            case Ticket():
                self.gate.write_ticket(effect)
                self.look_now.set()
            case SwitchJob():
                group.create_task(self.jobs.send_switch(effect), name=f"job {effect.op}")
            case RetargetJob():
                group.create_task(self.jobs.send_retarget(effect), name=f"retarget {effect.op}")
            case ReleaseJob() | KillJob():
                group.create_task(self.jobs.send_ending(effect), name=f"end {effect.target.seat}")

    # --- ears ---------------------------------------------------------------------------------------------------

    async def _listen_cluster(self) -> None:
        node = self.board.node
        patterns = (
            TrafficSignal.pattern(),
            Presence.pattern(component="router"),
            DrainAck.pattern(node=node),
            SeatAllocated.pattern(node=node),
        )
        async with self.bus.subscribe(*patterns) as messages:
            await self.hear(BusChanged(self.bus.connected))
            async for message in messages:
                if isinstance(message, SeatAllocated):
                    self.look_now.set()
                elif not isinstance(message, TrafficSignal) or self._concerns(message):
                    await self.hear(message)

    def _concerns(self, signal: TrafficSignal) -> bool:
        if signal.seat is not None:
            return signal.seat in self.board.rows
        return any(row.model == signal.model for row in self.board.rows.values())

    async def _listen_node(self) -> None:
        async with self.node_bus.subscribe(JobProgress.pattern(node=self.board.node)) as messages:
            async for message in messages:
                await self.hear(message)

    async def _answer(self) -> None:
        async with self.bus.serve(Command.pattern(node=self.board.node), self._command):
            await asyncio.Event().wait()

    async def _command(self, message: object) -> CommandReply:
        future: asyncio.Future[CommandReply] = asyncio.get_running_loop().create_future()
        if not self.board.recovered:
            return CommandReply(accepted=False, code="not-ready", reason="the manager has just started")
        self.inbox.put_nowait((message, future))
        return await future

    async def _watch_pods(self) -> None:
        pace, pending, failed = Pace(self.pods.settled_seconds), False, OnceLogger("pods.read_failed")
        while True:
            rows = self.board.rows.values()
            starting = any(row.state is SeatState.STARTING for row in rows)
            unknown = any(row.state is SeatState.FREE for row in rows if row.seat in self.calling)
            try:
                async with asyncio.timeout(POLL_SOON_SECONDS if starting or unknown else POLL_SECONDS):
                    await self.look_now.wait()
            except TimeoutError:
                pass
            changed = self.look_now.is_set()
            self.look_now.clear()
            self.roster.refresh()
            missed = any(row.misses for row in self.board.rows.values() if row.pod is not None)
            if not pace.due(self.clock.wall(), changing=bool(changed or starting or self.calling or missed or pending)):
                continue
            try:
                owners = await self.pods.seats(self._unconfirmed())
                failed.clear()
                self.gate.write_wishes(self._wishes(owners))
                self._say_problems(owners)
                await self.hear(PodsSeen(owners))
                pending = bool(owners.pending or self.steering)
            except PodsError as error:
                failed.log(error=str(error))
                pending = True

    def _unconfirmed(self) -> frozenset[str]:
        """Seats with a process, at whose start gate a call waits that may be another pod's (``owners._at_gate``)."""
        return frozenset(
            row.seat
            for row in self.board.rows.values()
            if row.state in HAS_PROCESS
            and (call := self.calling.get(row.seat)) is not None
            and not (row.call == call and row.confirmed >= 2)
        )

    def _say_problems(self, owners: Owners) -> None:
        """Annotations that cannot be used, once each."""
        found = {text for pod in owners.pods for text in terms(pod, self.board.tiers).problems}
        for text in sorted(found - self.problems):
            log.warning("pod.annotation_unusable", reason=text, meaning="it counts as not written")
        self.problems = found

    def steer(self, wish: Wish) -> None:
        """The next fitting seat should be on this group until the wish lapses: for a pod that replaces another one."""
        self.steering[wish.id] = wish
        self.look_now.set()

    def _wishes(self, owners: Owners) -> tuple[Wish, ...]:
        """Of pending pods, by their annotation, and those that ``steer`` was told. Sorted, so that equal is equal."""
        unix = time.time()
        self.steering = {key: wish for key, wish in self.steering.items() if wish.until > unix}
        until = (unix // WISH_SECONDS + 2) * WISH_SECONDS  # in steps: an unchanged wish is not written each second
        found = [
            Wish(id=pod.uid, group=group, resource=resource, until=until, why=f"{PREFER_GROUP} of {pod.pod}")
            for pod in owners.pending
            if (group := pod.group_on(self.board.node))
            for resource in sorted({g.profile.resource for g in self.board.groups if g.name == group})
            if resource in pod.resources
        ]
        return tuple(sorted((*found, *self.steering.values()), key=lambda wish: wish.id))

    async def _watch_gate(self) -> None:
        known: StartCalls | None = None
        while True:
            found = StartCalls(self.gate.calls(self.board.rows))
            self.calling = found.calls
            if found != known:
                known = found
                self.look_now.set()
                await self.hear(found)
            self.gate.write_texts(showing.gate_texts(self.board, self.now()))
            await asyncio.sleep(GATE_SECONDS)

    async def _watch_strangers(self) -> None:
        known: tuple[Stranger, ...] = ()
        while True:
            await asyncio.sleep(STRANGER_SECONDS)
            containers = {row.container_id for row in self.board.rows.values() if row.container_id}
            found = await self.strangers.look(containers) if self.strangers is not None else known
            if found is not None and found != known:
                known = found
                await self.hear(StrangersSeen(found))

    # --- recovery -----------------------------------------------------------------------------------------------

    async def _recover(self, group: asyncio.TaskGroup) -> None:
        """Learn from kubelet, the ledger and the checkpointer before anything is granted; ask until they answer."""
        ledger, timeout = self.ledger.read(), EVIDENCE_SECONDS
        while True:
            began = self.clock.wall()
            try:
                owners = await self.pods.seats()
                began = self.clock.wall()
                reply = await self.jobs.evidence(ledger, owners.pods, timeout)
                break
            except (PodsError, BusError) as error:
                if self.clock.wall() >= began + timeout:
                    timeout = min(timeout * 2, LONGEST_SECONDS)
                log.info("manager.waits", error=str(error) or repr(error))
                await asyncio.sleep(0.25)
        recovered = Recovered(owners, ledger, reply)
        await self._carry_out(self.board.handle(recovered, self.now()), None, group)
        self.roster.all_changed()
        log.info("manager.recovered", seats=len(owners.pods), jobs=len(reply.jobs), epoch=self.board.epoch)


def _log(effect: Effect) -> None:
    match effect:
        case SeatEvent():
            _log_event(effect)
        case Decided():
            log.info("group.decided", group=effect.group, why=effect.text)


def _log_event(event: SeatEvent) -> None:
    log.info(
        f"seat.{event.subject.rsplit('.', 1)[-1]}",
        seat=event.seat,
        model=event.model,
        cause=event.cause,
        epoch=event.epoch,
        **({"reason": event.reason} if event.reason else {}),
        **({"seconds": {k: round(v, 4) for k, v in event.seconds.items()}} if event.seconds else {}),
    )
