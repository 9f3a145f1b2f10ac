"""A model of the manager's shell around the real board: inbox → board → ledger → effects, and the start.

Written from docs/dev/architecture.md: the ledger is written before any effect of a message is carried out, jobs first,
and a manager that starts asks for evidence before it decides. ``crash_after`` ends the process between two durable
steps.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from tests.exploration import product
from tests.exploration.bus import ROSTER, Answer, Bus
from tests.exploration.kubelet import Clock, Kubelet
from tests.exploration.machine import Machine, ViolationError
from tests.exploration.product import (
    AskJobs,
    BusChanged,
    CommandReply,
    DrainAnnounced,
    EngineSeen,
    ForeignProcessesSeen,
    Group,
    InvariantBroken,
    JobReply,
    KillJob,
    Ledger,
    Now,
    Paused,
    ProcessState,
    Recovered,
    RecoveryBegun,
    ReleaseJob,
    RouterAskedOverHttp,
    SeatEvent,
    SeatRecord,
    SeatState,
    StartCalls,
    StartTicket,
    SwitchJob,
    Tick,
    TrafficSignal,
)
from tests.facts import contradictions
from tests.granted import against

RPC_SECONDS = 2.0
PAUSE_SECONDS = 3.0
"""As ``services.gpu_manager.manager.PAUSE_SECONDS``."""
OLDEST_NEWS_SECONDS = 30.0
"""A manager that starts publishes what the checkpointer answered then; the job may have gone on since."""
_JOBS = (SwitchJob, ReleaseJob, KillJob)


class CrashError(Exception):
    """The process ended here."""


@dataclass
class Question:
    """A request to the checkpointer that was not answered yet."""

    job: object
    sent: float
    known: RecoveryBegun | None = None
    """What was read at the start, if this is the question of the start."""


@dataclass
class Request:
    """A message on the node bus, and the answer to it."""

    number: int
    sender: int
    job: object
    reply: JobReply | None = None


@dataclass
class LedgerFile:
    """The ledger on disk: the last record, and the one before."""

    last: Ledger = field(default_factory=Ledger)
    before: Ledger = field(default_factory=Ledger)


@dataclass
class Manager:
    """One incarnation of the node's manager."""

    number: int
    groups: tuple[Group, ...]
    policy: str
    clock: Clock
    bus: Bus
    kubelet: Kubelet
    machine: Machine
    file: LedgerFile
    closed: dict[str, float]
    """The model's own record: seat → when its drain began."""
    inbox: deque[tuple[float, object, str]] = field(default_factory=deque)
    """(received at, message, "router|seat" that waits for an answer)."""
    questions: dict[int, Question] = field(default_factory=dict)
    dirty: dict[str, None] = field(default_factory=dict)
    """Seats whose row of the roster is to be written."""
    written: dict[str, object] = field(default_factory=dict)
    """By seat: the row that was written."""
    calling: StartCalls = field(default_factory=lambda: StartCalls({}))
    foreign: ForeignProcessesSeen = field(default_factory=lambda: ForeignProcessesSeen(()))
    listed: dict[tuple[str, str], int] = field(default_factory=dict)
    """(container, GPU) of processes of no seat, and in how many reads in a row."""
    listed_at: float = -1e9
    crash_after: int | None = None
    asked: int = 0
    beaten: float = -1e9
    broken: list[str] = field(default_factory=list)
    """Invariants that the board has found broken."""

    def __post_init__(self) -> None:
        self.board = product.new_board(self.groups, self.policy, self.url)
        self.ledger = self.file.last
        self.receive(BusChanged(self.bus.up.get(self.name, False)))
        self.handled = self.clock.wall
        self.recover()

    @property
    def name(self) -> str:
        return f"manager-{self.number}"

    @property
    def url(self) -> str:
        """Its pod has a separate address."""
        return f"http://{self.name}"

    @property
    def now(self) -> Now:
        return product.now_at(self.clock.wall, self.clock.unix)

    @property
    def _reachable(self) -> bool:
        return self.bus.led(self.name)

    @property
    def recovered(self) -> bool:
        return self.board.node.recovered

    def receive(self, message: object, asker: str = "") -> None:
        self.inbox.append((self.clock.wall, message, asker))

    # --- the one writer -------------------------------------------------------------------------------------------

    def handle(self) -> bool:
        """Take one message from the inbox. Raises CrashError after ``crash_after`` durable steps."""
        if not self.inbox or not self.recovered:
            return False
        arrived, message, asker = self.inbox.popleft()
        self.decide(message, asker, arrived)
        return True

    def tick(self) -> bool:
        """Time passed while nothing waited."""
        if not self.recovered or self.inbox:
            return False
        self.decide(Tick(), "", self.clock.wall)
        return True

    def decide(self, message: object, asker: str, arrived: float) -> None:
        """``arrived``: a router's silence counts up to the messages that were handled, and no pause without any."""
        now = replace(self.now, lag=self.clock.wall - arrived)
        if arrived > self.handled + PAUSE_SECONDS:
            self._carry_out(self.board.handle(Paused(), now), "")
        self.handled = arrived
        before = product.unhindered(self.board, now) if isinstance(message, Tick) else set()
        counted = len(product.counted(self.board))
        effects = self.board.handle(message, now)
        if differs := [*contradictions(self.board.node), *against()]:
            raise ViolationError("; ".join(differs))
        if before and (left := before & product.unhindered(self.board, now)):
            raise ViolationError(f"nothing keeps {left} from their groups, and a tick does not grant them")
        if effects:
            self._carry_out(effects, asker)
        if not isinstance(message, TrafficSignal):
            self._write()
        if len(product.counted(self.board)) > counted:
            self.beat()

    def beat(self) -> None:
        """Publish the presence, with the routers that the ledger has, too."""
        if self.bus.up.get(self.name):
            self.beaten, known = self.clock.wall, product.counted(self.board)
            for router in self._routers():
                self.bus.send(self.name, router, product.presence_of_manager(self.name, known), self.clock.wall)

    def _carry_out(self, effects: list[object], asker: str) -> None:
        others = [effect for effect in effects if not isinstance(effect, CommandReply)]
        if others:
            self._step()
            self._write()
        for effect in effects:
            if isinstance(effect, CommandReply) and asker and self.bus.up.get(self.name):
                router, seat = asker.split("|")
                self.bus.send(self.name, router, Answer(seat, effect), self.clock.wall)
        for effect in sorted(others, key=lambda effect: not isinstance(effect, SwitchJob)):
            self._step()
            self._publish(effect)

    def _write(self) -> None:
        record = product.ledger_of(self.board)
        if record != self.file.last:
            self.file.before, self.file.last = self.file.last, record

    def _step(self) -> None:
        """Between two durable steps."""
        if self.crash_after is not None:
            if self.crash_after == 0:
                raise CrashError
            self.crash_after -= 1

    def _publish(self, effect: object) -> None:
        if isinstance(effect, SeatEvent):
            self._note_truth(effect)
            self.dirty[effect.seat] = None
            if self.bus.up.get(self.name):
                for router in self._routers():
                    self.bus.send(self.name, router, effect, self.clock.wall)
        elif isinstance(effect, StartTicket):
            self.kubelet.write_ticket(effect)
        elif isinstance(effect, _JOBS):
            self.ask(effect)
        elif isinstance(effect, InvariantBroken):
            self.broken.append(effect.text)

    def _routers(self) -> list[str]:
        return [name for name, up in self.bus.up.items() if up and name.startswith("router")]

    def _note_truth(self, event: SeatEvent) -> None:
        """Promise 3: a seat published as parked has no byte on a GPU. Since when routers know of a drain."""
        if event.state is SeatState.DRAINING:
            self.closed[event.seat] = self.clock.wall
        elif event.state is SeatState.PARKED:
            engine = self.machine.of_pod(event.pod_uid)
            parked = engine is None or set(engine.members) == {ProcessState.CHECKPOINTED}
            if engine is not None and not parked and self.clock.wall - engine.parked_at > OLDEST_NEWS_SECONDS:
                raise ViolationError(f"{event.seat} is published as parked and its processes are {engine.members}")

    # --- what it asks and reads -----------------------------------------------------------------------------------

    def ask(self, job: object, known: RecoveryBegun | None = None) -> None:
        self.asked += 1
        self.questions[self.asked] = Question(job, self.clock.wall, known)
        self.bus.send(self.name, "checkpointer", Request(self.asked, self.number, job), self.clock.wall)

    def answered(self, request: Request) -> None:
        question = self.questions.pop(request.number, None)
        if question is not None:
            self._got(question, request.reply)

    def time_out(self, number: int) -> bool:
        question = self.questions.pop(number, None)
        if question is not None:
            self._got(question, None)
        return question is not None

    def late(self) -> list[int]:
        return [n for n, question in self.questions.items() if self.clock.wall - question.sent >= RPC_SECONDS]

    def _got(self, question: Question, reply: JobReply | None) -> None:
        if question.known is None:
            message = product.answered(question.job, reply, question.sent)
            if message is not None:
                self.receive(message)
        elif reply is None or not reply.accepted:
            self.recover(reply.highest_epoch if reply is not None else 0)
        else:
            self.look_first(question.known)
            effects = self.board.handle(Recovered(question.known, reply), self.now)
            self._carry_out(list(effects), "")
            self.dirty.update(dict.fromkeys(self.board.node.seats))

    def recover(self, seen: int = 0) -> None:
        """Read the pods, the ledger and the seat folders, then ask the checkpointer for evidence. ``seen``: the epoch
        above which it wants the question."""
        if not self.kubelet.api_up:
            return
        self.kubelet.watch_opened()
        rows = [row.record for row in self.bus.rows.values() if row.record is not None] if self._reachable else []
        known = product.read_for_recovery(self.ledger, self.kubelet.owners(), self.kubelet.tickets(), rows, seen)
        effects = self.board.handle(known, self.now)
        self.ask(next(effect for effect in effects if isinstance(effect, AskJobs)), known)

    def ask_regularly(self) -> bool:
        """Reports may be lost: ask about jobs and processes."""
        open_targets = [q.job for q in self.questions.values() if isinstance(q.job, AskJobs)]
        if not self.recovered or open_targets:
            return False
        found = product.questions(self.board, self.now, self.clock.wall - 1.0)
        for question in found:
            self.ask(question)
        return bool(found)

    def look_at_pods(self) -> bool:
        if self.recovered and self.kubelet.api_up:
            prove = product.unconfirmed(self.board, self.calling.calls)
            self.receive(self.kubelet.owners(prove))
        return self.recovered and self.kubelet.api_up

    def look_at_gpus(self) -> bool:
        """Read the process lists, as often as the shell."""
        if not self.recovered or self.clock.wall - self.listed_at < product.FOREIGN_SECONDS:
            return False
        before = self.foreign
        self._read_gpus(product.containers_of(self.board), product.PROCESS_READS)
        if self.foreign != before:
            self.receive(self.foreign)
        return self.foreign != before

    def look_first(self, known: RecoveryBegun) -> None:
        """Before its first decision one read counts."""
        self._read_gpus(product.containers_at_start(known), 1)
        self.board.handle(self.foreign, self.now)

    def _read_gpus(self, containers: set[str], reads: int) -> None:
        """Processes of no container count once they were listed in so many reads in a row."""
        self.listed_at = self.clock.wall
        listed = {use for use in self.machine.listed() if use[0] not in containers}
        self.listed = {use: self.listed.get(use, 0) + 1 for use in listed}
        self.foreign = product.foreign_processes(use for use, n in self.listed.items() if n >= reads)

    def look_at_gate(self) -> bool:
        found = self.kubelet.waiting_calls()
        if not self.recovered or found.calls == self.calling.calls:
            return False
        self.calling = found
        self.receive(found)
        return True

    def probe(self, seat: str) -> bool:
        """Ask one engine; it answers, refuses the connection, or is not reached."""
        probe = next((one for one in product.engine_probes(self.board) if one.seat == seat), None)
        if probe is None:
            return False
        uid = probe.endpoint.removeprefix("http://ip-").rpartition(":")[0]
        engine = self.machine.of_pod(uid)
        healthy, running = False, None  # not reached
        if uid in self.kubelet.pods and (engine is None or not engine.healthy):
            running = 0
        elif uid in self.kubelet.pods and engine is not None and engine.running:
            healthy, running = True, len(engine.requests) if probe.idle else None
        if probe.idle or healthy:
            self.receive(EngineSeen(seat, probe.container_id, healthy, running, self.clock.wall))  # type: ignore[arg-type]
        return probe.idle or healthy

    # --- the roster -----------------------------------------------------------------------------------------------

    def write_row(self) -> bool:
        """Write the row of one seat, as the seat is by then."""
        if not self.dirty or not self._reachable or not self.recovered:
            return False
        seat = next(iter(self.dirty))
        record = product.seat_row(self.board, seat, self.now)
        self.written[seat] = product.lasting(record)
        row = self.bus.delete(record.key) if record.state is SeatState.FREE else self.bus.put(record)
        for router in self._routers():
            self.bus.send(ROSTER, router, row, self.clock.wall)
        del self.dirty[seat]
        if record.state is SeatState.DRAINING:
            self.receive(DrainAnnounced(seat, record.epoch))
        return True

    def refresh(self) -> None:
        """Mark the rows that have changed without an event; before a recovery none is written."""
        for seat, row in product.rows_that_last(self.board, self.now).items():
            if row != self.written.get(seat):
                self.dirty[seat] = None

    def connected(self, up: bool) -> None:
        self.receive(BusChanged(up))
        if up and self.recovered:
            self.dirty.update(dict.fromkeys(self.board.node.seats))

    def over_http(self) -> tuple[SeatRecord, ...] | None:
        """A router without NATS asks for the seats."""
        if not self.recovered:
            return None
        self.receive(RouterAskedOverHttp())
        seats = self.board.node.seats.values()
        return tuple(product.seat_row(self.board, s.id, self.now) for s in seats if s.state is not SeatState.FREE)
