"""The single writer: one inbox feeds the board, and its effects are made durable before they are carried out.

    inbox ─► board.handle ─► ledger (fsync) ─► tickets, jobs, events, roster, replies

All other tasks here only put messages into the inbox (bus, pods, start gate, engines, GPU processes) or read the state.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from kybernate.annotations import PREFER_GROUP
from kybernate.bus.port import Bus, BusDownError, BusError, NodeBus
from kybernate.clock import Clock, to_beat, wait_for, within
from kybernate.envelope import slug
from kybernate.lifecycle import boot_id
from kybernate.logs import OnceLogger, get_logger
from kybernate.messages import (
    AskJobs,
    Command,
    CommandReply,
    DrainAck,
    GroupDecided,
    JobProgress,
    JobReply,
    KillJob,
    NodeTrafficSignal,
    Presence,
    ReleaseJob,
    SeatAllocated,
    SeatEvent,
    SeatPinned,
    SeatUnpinned,
    SwitchJob,
    TrafficSignal,
)
from kybernate.node.run_files import Wish
from kybernate.seat import SeatState
from services.gpu_manager import publish
from services.gpu_manager.core import recovery, resting, view
from services.gpu_manager.core.allocations import HAS_PROCESS
from services.gpu_manager.core.board import Board
from services.gpu_manager.core.inputs import (
    BusChanged,
    FaultyGpusSeen,
    ForeignProcessesSeen,
    InputRefused,
    InvariantBroken,
    ModelTime,
    Now,
    Paused,
    Recovered,
    RecoveryBegun,
    StartCall,
    StartCalls,
    StartTicket,
    Tick,
    UnixTime,
    WallTime,
)
from services.gpu_manager.core.moves import names
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.core.state import Effect, NodeState
from services.gpu_manager.engines import EngineProbes
from services.gpu_manager.gpu_processes import GpuProcesses
from services.gpu_manager.inbox import BoardInbox
from services.gpu_manager.jobs import CheckpointerClient
from services.gpu_manager.ledger import Ledger, LedgerFile
from services.gpu_manager.pods import POLL_SECONDS, POLL_SOON_SECONDS, Pace, Pods, PodsError
from services.gpu_manager.publish import GateFiles, RosterWriter

log = get_logger()

GATE_SECONDS, QUIET_GATE_SECONDS, TEXT_SECONDS = 0.25, 1.0, 5.0
"""Wall: how often calls are looked for while a request waits for a start, and while none does; how often it is written
what they wait for."""
FOREIGN_SECONDS = 2.0
WISH_SECONDS = 10.0
"""Wall: how long a pending pod's wish for a group outlives the last read of the pod."""
EVIDENCE_SECONDS = 5.0
"""Wall: first time-out of the question about all processes."""
BUSY_SECONDS = 1.5
"""Wall: how long a command waits for the board before it is refused as busy; its sender waits 2 s."""
PAUSE_SECONDS = 3.0
"""Wall: no two messages are further apart while the process runs: without one there is a tick every second."""
BRIEF_SECONDS = 0.005
"""Wall: how long the loop itself waits for the ledger. Most records take 0.2 ms; to leave the loop costs as much."""
DURABLE = (StartTicket, SeatPinned, SeatUnpinned)
"""Effects that must not be forgotten even if the machine crashes right after they were carried out."""


@dataclass
class Manager:
    """One node's manager. ``run`` it until cancelled."""

    board: Board
    bus: Bus
    node_bus: NodeBus
    pods: Pods
    gate: GateFiles
    ledger: LedgerFile
    clock: Clock
    engines: EngineProbes
    gpu_processes: GpuProcesses | None = None
    """Reads the processes on the GPUs; None: foreign ones are not detected."""
    inbox: BoardInbox = field(default_factory=BoardInbox)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while all that the board has decided is in the ledger: only then its state may leave the node."""
    _recorded: Ledger | None = None
    """The last record of the ledger."""
    _stood_still: bool = False
    """The last write of the ledger took as long as a pause."""
    recording_since: WallTime | None = None
    """The ledger is being written since then."""
    look_now: asyncio.Event = field(default_factory=asyncio.Event)
    """Pods may have changed."""
    calling: Mapping[str, StartCall] = field(default_factory=dict)
    """Calls that wait at the start gate, by seat."""
    boot_id: str = field(default_factory=boot_id)
    roster: RosterWriter = field(init=False)
    jobs: CheckpointerClient = field(init=False)
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="ledger"))
    observe: Callable[[Effect], None] = lambda _: None
    """Called with every effect that was carried out."""
    observe_write: Callable[[float], None] = lambda _: None
    """Called with the wall seconds of every write of the ledger."""
    on_router: Callable[[], None] = lambda: None
    """Called when another router counts: the next presence lists it."""
    unread: str = ""
    """Why the owners of the seats are not known at present; empty: they are."""
    problems: set[str] = field(default_factory=set)
    """Logged problems of pods' annotations."""

    def __post_init__(self) -> None:
        self.recorded.set()
        self.jobs = CheckpointerClient(self.node_bus, self.receive)
        self.roster = RosterWriter(self.bus, self.now, self.node, self.receive, self.until_recorded)

    @property
    def node(self) -> NodeState:
        """The board's state, to read."""
        return self.board.node

    def now(self, arrived: float | None = None) -> Now:
        """This instant, for a message that arrived then."""
        wall = self.clock.wall()
        lag = 0.0 if arrived is None else wall - arrived
        return Now(WallTime(wall), ModelTime(self.clock.to_model(wall)), UnixTime(time.time()), lag)

    async def receive(self, message: object) -> None:
        """Put something into the inbox. Waits while too much waits there."""
        await self.inbox.receive(message)

    def _bus_changed(self, connected: bool) -> None:
        self.inbox.put(BusChanged(connected))

    async def run(self) -> None:
        """Listen from the first moment, recover, then decide; until cancelled."""
        self.bus.on_change(self._bus_changed)
        self.pods.on_change(self.look_now.set)
        async with asyncio.TaskGroup() as group:
            for job in (self._listen_cluster, self._listen_node, self._answer, self.roster.run, self.pods.run):
                group.create_task(job(), name=job.__name__)
            await self._recover(group)
            for job in (self._watch_pods, self._watch_gate, self._ask_checkpointer, self._watch_gpu_processes):
                group.create_task(job(), name=job.__name__)
            await self._decide(group)

    # --- the one writer -----------------------------------------------------------------------------------------------

    async def _decide(self, group: asyncio.TaskGroup) -> None:
        handled = self.clock.wall()
        while True:
            message, reply, arrived = await self._next()
            if arrived > handled + PAUSE_SECONDS or self._stood_still:
                self._stood_still = False
                await self._carry_out(self.board.handle(Paused(), self.now(arrived)), None, group)
            handled = arrived
            routers = len(self.node.routers.sent)
            effects = self.board.handle(message, self.now(arrived))
            await self._carry_out(effects, reply, group, one_of_many=isinstance(message, TrafficSignal))
            if len(self.node.routers.sent) > routers:
                self.on_router()
            self.engines.follow(view.engine_probes(self.node), group, self.receive)

    async def _carry_out(
        self,
        effects: list[Effect],
        reply: asyncio.Future[CommandReply] | None,
        group: asyncio.TaskGroup,
        *,
        one_of_many: bool = False,
    ) -> None:
        """Everything only after the ledger knows, the reply first. A ledger that cannot be written ends the manager.

        ``one_of_many``: what such a message changes without an effect, the next one records.
        """
        others = [effect for effect in effects if not isinstance(effect, CommandReply)]
        ordered = [one.order for one in effects if isinstance(one, CommandReply) and one.order is not None]
        if others or not one_of_many:
            await self._record(durable=bool(ordered) or any(isinstance(effect, DURABLE) for effect in others))
        for effect in effects:
            if isinstance(effect, CommandReply) and reply is not None and not reply.done():
                reply.set_result(effect)
        for order in ordered:
            self.roster.refresh()
            log.info("operation.ordered", **order.model_dump(exclude_defaults=True))
        for effect in sorted(others, key=lambda effect: not isinstance(effect, SwitchJob)):  # what takes longest first
            await self._publish(effect, group)
        if others:
            await asyncio.sleep(0)  # messages leave before they are logged
        for effect in others:
            _log(effect)
            self.observe(effect)

    async def _record(self, *, durable: bool = False) -> None:
        """Write the ledger if it changed, also without any effect: a container that runs, a router. An idle node
        writes nothing.

        In a thread: a disk that hangs stops the board, and not presence, health and the buses.
        """
        last, entry = self._recorded, recovery.ledger(self.node, self.boot_id, self._recorded)
        if entry is last and not durable:
            return
        began = self.recording_since = self.now().wall
        self._recorded = entry
        writing = self._writer.submit(lambda: self.ledger.write(entry, durable=durable))
        try:
            writing.result(BRIEF_SECONDS)
        except TimeoutError:
            self.recorded.clear()
            await _until_done(asyncio.wrap_future(writing))
            self.recorded.set()
            await asyncio.sleep(0)  # publishers that waited run before the board decides again
        seconds = self.now().wall - began
        self.observe_write(seconds)
        self._stood_still = seconds > PAUSE_SECONDS
        self.recording_since = None

    def counted(self) -> dict[str, float]:
        """The routers of ``Presence.routers``; none before they are in the ledger, which a successor reads."""
        return self.node.routers.counted() if self.recorded.is_set() else {}

    async def until_recorded(self) -> None:
        """Return when the state is in the ledger, before anything else runs."""
        while not self.recorded.is_set():
            await self.recorded.wait()

    async def _next(self) -> tuple[object, asyncio.Future[CommandReply] | None, float]:
        if len(self.inbox):
            return await self.inbox.get()
        seconds = view.next_wake(self.node, self.now())
        tick = asyncio.get_running_loop().call_later(seconds, self.inbox.put, Tick())
        try:
            return await self.inbox.get()
        finally:
            tick.cancel()

    async def _publish(self, effect: Effect, group: asyncio.TaskGroup) -> None:
        match effect:
            case SeatEvent():
                try:
                    await self.bus.publish(effect)
                except BusDownError:
                    log.warning("event.publish_failed", seat=effect.seat, state=str(effect.state), epoch=effect.epoch)
                self.roster.changed(effect.seat)
            case GroupDecided():
                with contextlib.suppress(BusDownError):  # the log has it
                    await self.bus.publish(effect)
            case StartTicket():
                self.gate.write_ticket(effect)
                self.look_now.set()
            case SwitchJob() | ReleaseJob() | KillJob():
                group.create_task(self.jobs.send(effect), name=f"send {type(effect).__name__}")

    # --- messages into the inbox --------------------------------------------------------------------------------------

    async def _listen_cluster(self) -> None:
        node = self.node.name
        patterns = (
            NodeTrafficSignal.pattern(node=node),
            replace(TrafficSignal.pattern(), last=self._has_model),
            Presence.pattern(component="router"),
            DrainAck.pattern(node=node),
            SeatAllocated.pattern(node=node),
        )
        async with self.bus.subscribe(*patterns) as messages:
            await self.receive(BusChanged(self.bus.connected))
            async for message in messages:
                if isinstance(message, SeatAllocated):
                    self.look_now.set()
                elif not isinstance(message, TrafficSignal) or self._concerns(message):
                    await self.receive(message)

    def _has_model(self, token: str) -> bool:
        """True for the subject token of a model that a seat of this node serves."""
        return any(slug(seat.model) == token for seat in self.node.seats.values() if seat.model)

    def _concerns(self, signal: TrafficSignal) -> bool:
        if signal.seat is not None:
            return signal.seat in self.node.seats
        return any(seat.model == signal.model for seat in self.node.seats.values())

    async def _listen_node(self) -> None:
        async with self.node_bus.subscribe(JobProgress.pattern(node=self.node.name)) as messages:
            async for message in messages:
                await self.receive(message)

    async def _answer(self) -> None:
        async with self.bus.serve(Command.pattern(node=self.node.name), self._command):
            await asyncio.Event().wait()

    async def _command(self, message: object) -> CommandReply:
        future: asyncio.Future[CommandReply] = asyncio.get_running_loop().create_future()
        if not self.node.recovered:
            text = "the manager has just started"
            return CommandReply(accepted=False, code="not-ready", reason=text, retry_after_seconds=1.0)
        key = self.inbox.put(message, future)

        def give_up() -> None:
            if self.inbox.withdraw(key):
                reason = f"{self.stalled() or 'too much waits'}; ask again"
                future.set_result(CommandReply(accepted=False, code="busy", reason=reason))

        timer = asyncio.get_running_loop().call_later(BUSY_SECONDS, give_up)
        try:
            return await future  # no task in between: the answer leaves together with the events that follow
        finally:
            timer.cancel()

    def stalled(self) -> str | None:
        """Why the board stands still; None while it does not."""
        since = self.recording_since
        seconds = 0.0 if since is None else self.now().wall - since
        return f"the ledger is being written for {seconds:.1f} s: is its disk broken?" if seconds > 1.0 else None

    async def _watch_pods(self) -> None:
        pace, pending, failed = Pace(self.pods.settled_seconds), False, OnceLogger("pods.read_failed")
        while True:
            seats = self.node.seats.values()
            starting = any(seat.state is SeatState.STARTING for seat in seats)
            unknown = any(seat.state is SeatState.FREE for seat in seats if seat.id in self.calling)
            pause = to_beat(POLL_SOON_SECONDS if starting or unknown else POLL_SECONDS)
            changed = await wait_for(self.look_now, pause)
            self.look_now.clear()
            self.roster.refresh()
            self._log_problems()
            missed = any(seat.pod_misses for seat in seats if seat.pod is not None)
            if not pace.due(self.clock.wall(), changing=changed or starting or self._unsettled() or missed or pending):
                continue
            try:
                owners = await self.pods.seats(self._unconfirmed())
                self.unread = ""
                failed.clear()
                self.gate.write_wishes(self._wishes(owners))
                await self.receive(owners)
                pending = bool(owners.pending)
            except PodsError as error:
                self.unread = str(error)
                failed.log(error=self.unread)
                pending = True

    def _unsettled(self) -> bool:
        """True while reads of the pods may change what a call at the start gate means: of a seat that is known to wait
        there, they do not."""
        return any(self.node.seats[seat].acts_as is not SeatState.WAITING for seat in self.calling)

    def _unconfirmed(self) -> frozenset[str]:
        """Seats whose call at the start gate may be another pod's, where it matters (``allocations._at_gate``)."""
        return frozenset(
            seat.id
            for seat in self.node.seats.values()
            if seat.acts_as in (*HAS_PROCESS, SeatState.LOST)
            and (call := self.calling.get(seat.id)) is not None
            and not (seat.gate.call == call and seat.gate.confirmed >= 2)
        )

    def _log_problems(self) -> None:
        """Log annotations that cannot be used, once each."""
        found = {text for seat in self.node.seats.values() for text in seat.terms.problems}
        for text in sorted(found - self.problems):
            log.warning("pod.annotation_unusable", reason=text, meaning="it counts as absent")
        self.problems = found

    def _wishes(self, owners: Owners) -> tuple[Wish, ...]:
        """The wishes of pending pods for groups, by their annotation. Sorted, so that equal wishes compare equal."""
        unix = time.time()
        until = (unix // WISH_SECONDS + 2) * WISH_SECONDS  # in steps: an unchanged wish is not written each second
        found = [
            Wish(id=pod.uid, group=group.name, resource=resource, until=until, why=f"{PREFER_GROUP} of {pod.pod}")
            for pod in owners.pending
            for group in self.node.setup.groups
            if names(pod.prefers, group, self.node.name) and (resource := group.profile.resource) in pod.resources
        ]
        return tuple(sorted(found, key=lambda wish: wish.id))

    async def _watch_gate(self) -> None:
        known: StartCalls | None = None
        due = self.now().wall
        while True:
            found = StartCalls(self.gate.calls(self.node.seats))
            self.calling = found.calls
            if found != known:
                known = found
                if self._unsettled():
                    self.look_now.set()
                await self.receive(found)
            if (now := self.now()).wall >= due:
                due = now.wall + TEXT_SECONDS
                self.gate.write_texts(publish.gate_texts(self.node, now))
            comes = (seat for seat in self.node.seats.values() if seat.facts.at_home)
            asked = any(view.asked(self.node, seat) for seat in comes)
            await asyncio.sleep(to_beat(GATE_SECONDS if asked else QUIET_GATE_SECONDS))

    async def _watch_gpu_processes(self) -> None:
        known: ForeignProcessesSeen | None = None
        while True:
            await asyncio.sleep(to_beat(FOREIGN_SECONDS))
            faults = self.gate.faulty_gpus(self.node.faulty)
            if faults != self.node.faulty:
                await self.receive(FaultyGpusSeen(faults))
            containers = {seat.durable.container_id for seat in self.node.seats.values() if seat.durable.container_id}
            if self.gpu_processes is None:
                continue
            rest = resting.containers(self.node)
            places, began = view.places(self.node), self.now().wall
            found = await self.gpu_processes.read(containers, places, resting=rest, began=began)
            if found is not None and (found != known or found.strays or resting.awake(self.node, found)):
                known = found
                await self.receive(found)

    async def _ask_checkpointer(self) -> None:
        await self.jobs.ask_regularly(
            lambda since: view.checkpointer_questions(self.node, self.now(), self.now().wall + -since)
        )

    # --- recovery -----------------------------------------------------------------------------------------------------

    async def _recover(self, group: asyncio.TaskGroup) -> None:
        """Learn from kubelet, the ledger and the checkpointer before anything is granted; ask until they answer."""
        ledger, timeout, seen = self.ledger.read(), EVIDENCE_SECONDS, 0
        while True:
            began = self.clock.wall()
            try:
                owners = await self.pods.seats()
                began = self.clock.wall()
                tickets = self.gate.tickets(self.node.seats)
                published = await self.roster.published()
                begun = RecoveryBegun(owners, ledger, published, tickets, seen)
                effects = self.board.handle(begun, self.now())
                question = next(effect for effect in effects if isinstance(effect, AskJobs))
                reply = await self.node_bus.request(question, JobReply, timeout=timeout)
                if reply.accepted:
                    break
                seen = reply.highest_epoch
                log.info("manager.fences_again", epoch=question.epoch, reason=reply.reason)
            except (PodsError, BusError) as error:
                if self.clock.wall() >= began + timeout:
                    timeout *= 2  # it answers questions in turn, and one about hung processes for minutes
                log.info("manager.waits", error=str(error) or repr(error))
                await asyncio.sleep(0.25)
        self.board.handle(FaultyGpusSeen(self.gate.faulty_gpus({})), self.now())
        await self._read_gpus({pod.container_id or "" for pod in owners.pods}, ledger)
        await self._carry_out(self.board.handle(Recovered(begun, reply), self.now()), None, group)
        self.roster.all_changed()
        log.info("manager.recovered", seats=len(owners.pods), jobs=len(reply.jobs), epoch=self.node.epoch)

    async def _read_gpus(self, containers: set[str], ledger: Ledger) -> None:
        """Tell the board of foreign processes before its first decision, as of one read: an engine may run whose pod
        was deleted by force and whose ledger was lost. A driver that does not answer is read later."""
        known = containers | {entry.durable.container_id for entry in ledger.seats}
        with contextlib.suppress(TimeoutError):
            async with within(EVIDENCE_SECONDS):
                found = await self.gpu_processes.read(known, reads=1) if self.gpu_processes is not None else None
            if found is not None:
                self.board.handle(found, self.now())
                log.info("manager.read_gpus", foreign=[(one.gpu, one.pid, one.name) for one in found.processes])


async def _until_done(writing: asyncio.Future[None]) -> None:
    """Await a write that takes long; also when cancelled: the next manager of this process writes the same file."""
    try:
        await asyncio.wait([writing])
    finally:
        await asyncio.wait([writing])
    writing.result()


def _log(effect: Effect) -> None:
    if isinstance(effect, GroupDecided):
        facts = {"op": effect.op, "victim": effect.victim, "incoming": effect.incoming, "cause": effect.cause}
        what = {name: value for name, value in facts.items() if value}
        log.info("group.decided", group=effect.group, decision=effect.decision, why=effect.reason, **what)
    elif isinstance(effect, InvariantBroken):
        log.error("invariant.broken", gpu=effect.gpu, reason=effect.text, meaning="nothing new is granted on this GPU")
    elif isinstance(effect, InputRefused):
        log.warning("input.refused", reason=effect.text, meaning="it changed nothing")
    elif isinstance(effect, SeatEvent):
        log.info(
            f"seat.{effect.subject.rsplit('.', 1)[-1]}",
            seat=effect.seat,
            model=effect.model,
            cause=effect.cause,
            epoch=effect.epoch,
            **({"reason": effect.reason} if effect.reason else {}),
            **({"seconds": {k: round(v, 4) for k, v in effect.seconds.items()}} if effect.seconds else {}),
        )
