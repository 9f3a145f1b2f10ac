"""A model of a router's shell around the real traffic core: presence, roster, events, calls.

Written from docs/dev/bus.md and decision 003: a router that a manager lists reads which seats are active after that;
what it forwards arrives at the engine that has the pod's address.
"""

from collections import deque
from dataclasses import dataclass, field

from tests.exploration import product
from tests.exploration.bus import Answer, Bus, Row
from tests.exploration.kubelet import Clock
from tests.exploration.machine import Machine, ViolationError
from tests.exploration.product import DRAIN_SECONDS, DrainAck, Presence, SeatEvent, SeatRecord, Traffic, routing

PRESENCE_SECONDS = 2.0
SIGNAL_SECONDS = 1.0


@dataclass
class Router:
    """One incarnation of one router."""

    instance: str
    number: int
    clock: Clock
    bus: Bus
    machine: Machine
    closed: dict[str, float]
    """Seat → when its drain began."""
    models: dict[int, str] = field(default_factory=dict)
    """Calls that are not over, by number."""
    forwarded: dict[int, str] = field(default_factory=dict)
    """Of these, the ones at an engine: number → pod UID."""
    served: list[str] = field(default_factory=list)
    """Models whose calls were answered."""
    outcomes: dict[int, str] = field(default_factory=dict)
    querying: list[tuple[str, str, float]] = field(default_factory=list)
    """Questions to managers over HTTP: (node, address, sent at)."""
    commands: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Commands that are not answered: seat → (key, sent at)."""
    reads: float | None = None
    """A reading of the roster is under way; the presence before it was published then."""
    wants_read: bool = True
    beaten: float = -1e9
    signalled: float = -1e9
    levels: set[tuple[str, str | None]] = field(default_factory=set)
    calls: int = 0
    seq: int = 0
    revisions: dict[str, int] = field(default_factory=dict)
    inputs: deque[routing.Input] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.traffic: Traffic = product.new_traffic(self.instance, self.name)

    @property
    def name(self) -> str:
        return f"router-{self.instance}-{self.number}"

    @property
    def up(self) -> bool:
        return self.bus.up.get(self.name, False)

    # --- the bus --------------------------------------------------------------------------------------------------

    def beat(self, manager: str) -> None:
        """Publish the presence."""
        if self.up:
            self.beaten = wall = self.clock.wall
            presence = Presence(cause="p", component="router", instance=self.instance, incarnation=self.name, sent=wall)
            self._to_manager(manager, presence)

    def read(self, manager: str) -> bool:
        """Begin or end a reading of the roster; between, rows may be written."""
        if not self.bus.led(self.name) or not (self.wants_read or self.reads is not None):
            return False
        if self.reads is None:
            self.wants_read, self.reads = False, self.clock.wall
            self.beat(manager)
        else:
            at, self.reads = self.reads, None
            self.feed(routing.RosterRead(at, self._rows(), frozenset(self.bus.rows)), manager)
        return True

    def _rows(self) -> tuple[SeatRecord, ...]:
        rows = [row for row in self.bus.rows.values() if self._newer(row)]
        return tuple(row.record for row in rows if row.record is not None)

    def _newer(self, row: Row) -> bool:
        if row.revision < self.revisions.get(row.key, 0):
            return False
        self.revisions[row.key] = row.revision
        return True

    def take(self, message: object, manager: str) -> None:
        """A message from the bus."""
        if isinstance(message, SeatEvent | Presence):
            self.feed(message, manager)
        elif isinstance(message, Row):
            if not self._newer(message):
                return
            self.feed(message.record if message.record is not None else routing.SeatMissing(message.key), manager)
        elif isinstance(message, Answer) and message.seat in self.commands:
            self.feed(routing.ActivationAnswered(self.commands.pop(message.seat)[0], message.reply), manager)

    def lost(self, manager: str) -> None:
        self.reads, self.revisions = None, {}
        self.feed(routing.BusLost(), manager)

    def _to_manager(self, manager: str, message: object) -> None:
        if self.up and self.bus.up.get(manager):
            self.bus.send(self.name, manager, message, self.clock.wall)

    # --- calls ----------------------------------------------------------------------------------------------------

    def call(self, model: str, manager: str) -> int:
        self.calls += 1
        self.models[self.calls] = model
        self.feed(routing.CallArrived(self.calls, model, f"req-{self.name}-{self.calls}"), manager)
        return self.calls

    def finish(self, call: int, manager: str) -> bool:
        """The engine has answered, or (held) the caller goes away."""
        if call not in self.models:
            return False
        uid = self.forwarded.get(call)
        if uid is not None:
            engine = self.machine.of_pod(uid)
            if engine is not None and not engine.running:
                return False  # frozen or locked: no answer comes
            self.served.append(self.models[call])
        self._over(call, "answered" if uid is not None else "gone")
        self.feed(routing.CallEnded(call), manager)
        return True

    def _over(self, call: int, outcome: str) -> None:
        uid = self.forwarded.pop(call, None)
        engine = self.machine.of_pod(uid) if uid is not None else None
        if engine is not None:
            engine.requests.discard((self.name, call))
        del self.models[call]
        if call in self.outcomes:
            raise ViolationError(f"call {call} of {self.name} ends twice: {self.outcomes[call]}, {outcome}")
        self.outcomes[call] = outcome

    def broken(self, manager: str) -> None:
        """Connections to engines that are gone break: the calls fail before or after the first byte."""
        for call, uid in list(self.forwarded.items()):
            engine = self.machine.of_pod(uid)
            if call in self.forwarded and (engine is None or (self.name, call) not in engine.requests):
                self._over(call, "failed")
                self.feed(routing.CallEnded(call), manager)

    # --- the core -------------------------------------------------------------------------------------------------

    def wake(self, manager: str) -> bool:
        due = self.traffic.alarms.at
        if due is None or due > self.clock.wall:
            return False
        self.feed(routing.TimePassed(), manager)
        return True

    def feed(self, message: routing.Input, manager: str) -> None:
        """Feed the core and perform its effects; what follows from them is fed after them, as tasks of the shell do."""
        self.inputs.append(message)
        if len(self.inputs) > 1:
            return
        while self.inputs:
            for effect in list(self.traffic.handle(self.inputs[0], self.clock.wall)):
                self._perform(effect, manager)
            self.inputs.popleft()

    def _perform(self, effect: routing.Effect, manager: str) -> None:
        match effect:
            case routing.Forward():
                self._forward(effect, manager)
            case routing.Reject():
                if effect.request in self.models:
                    if effect.request in self.forwarded:
                        raise ViolationError(f"call {effect.request} is forwarded and rejected ({effect.code})")
                    self._over(effect.request, effect.code)
            case routing.Cut():
                if effect.request in self.models:
                    self._check_cut(effect)
                    self._over(effect.request, effect.code)
                    self.feed(routing.CallEnded(effect.request), manager)
            case routing.RequestActivation():
                self.commands[effect.command.seat] = (effect.key, self.clock.wall)
                self._to_manager(manager, effect.command)
            case routing.QueryManager():
                self.querying.append((effect.node, effect.url, self.clock.wall))
            case routing.LevelChanged():
                self.levels.add((effect.model, effect.key))
                self.signal(effect.model, effect.key, manager)
            case routing.Resync():
                self.wants_read = True
            case DrainAck():
                self._to_manager(manager, effect)
            case _:
                pass

    def _check_cut(self, effect: routing.Cut) -> None:
        """Promise 3: an eviction lets requests in flight finish, until the drain deadline."""
        engine = self.machine.of_pod(self.forwarded.get(effect.request, ""))
        if engine is not None and effect.code == "seat_evicted":
            since = self.clock.wall - self.closed.get(engine.seat, self.clock.wall)
            if since < DRAIN_SECONDS:
                raise ViolationError(f"a call to {engine.seat} is cut {since:.1f} s after its drain began")

    def _forward(self, effect: routing.Forward, manager: str) -> None:
        uid = effect.endpoint.removeprefix("http://ip-").rpartition(":")[0]
        if self.models.get(effect.request) is None or effect.request in self.forwarded:
            raise ViolationError(f"call {effect.request} of {self.name} is forwarded twice, or after its end")
        if self.machine.request(uid, (self.name, effect.request)):
            self.forwarded[effect.request] = uid
        else:
            self.feed(routing.CallReturned(effect.request), manager)

    def signal(self, model: str, key: str | None, manager: str) -> None:
        if key is not None and key not in self.traffic.table.upstreams:
            return
        self.seq += 1
        self._to_manager(manager, product.signal_of(self.traffic, model, key, self.clock.wall, self.name, self.seq))

    def signals(self, manager: str) -> None:
        """Repeat the levels that are not zero."""
        self.signalled = self.clock.wall
        for model, key in list(self.levels):
            if product.is_busy(self.traffic, model, key, self.clock.wall):
                self.signal(model, key, manager)
            else:
                self.levels.discard((model, key))

    def manager_answered(self, node: str, sent: float, records: tuple[SeatRecord, ...] | None, manager: str) -> None:
        away = records is None and self.bus.led(self.name)
        if away:
            self.feed(routing.RosterRead(None, self._rows(), frozenset()), manager)
        self.feed(routing.ManagerAnswered(node, sent, records, away), manager)
