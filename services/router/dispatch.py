"""The async shell around the core: feeds inputs to ``Traffic`` and performs its effects. The only writer of traffic."""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

import aiohttp

from kybernate.bus.port import Bus, BusError
from kybernate.lifecycle import cancelled, spawn
from kybernate.logs import OnceLogger, get_logger
from kybernate.messages import CommandReply, DrainAck
from kybernate.roster import SeatRecord
from services.router.core import step
from services.router.core.traffic import Traffic
from services.router.engines import EnginePools

ACTIVATE_TIMEOUT_SECONDS = 2.0
QUERY_TIMEOUT_SECONDS = 1.0
MOST_REJECTS = 64
"""In one turn of the loop, about 5 ms."""


class Ticket(Protocol):
    """A call, as the dispatcher sees it: it numbers the call, and tells it the decisions within ``feed``."""

    request: int
    cause: str
    waiting: bool
    """False once it was decided, until the call waits again."""
    accepted_at: float | None
    """Unix seconds at which the manager accepted the activation that this call requested."""

    def decide(self, outcome: step.Forward | step.Reject) -> None:
        """Take the decision."""

    def cut(self, code: str) -> None:
        """End the call at its seat, which is evicted or lost: ``code`` is the reason."""


class WaitingTicket:
    """A ticket whose decision a task awaits."""

    def __init__(self, cause: str) -> None:
        self.request, self.cause, self.waiting = 0, cause, True
        self.accepted_at: float | None = None
        self.outcome: asyncio.Future[step.Forward | step.Reject] = asyncio.get_running_loop().create_future()

    def decide(self, outcome: step.Forward | step.Reject) -> None:
        """Set the decision, which wakes the task that waits for it."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def cut(self, code: str) -> None:
        """Do nothing: a permit ends with its seat."""


class Dispatcher:
    """Performs the core's effects. ``run`` is a job; ``close`` ends its tasks."""

    def __init__(self, traffic: Traffic, bus: Bus, http: aiohttp.ClientSession, pools: EnginePools) -> None:
        self.traffic = traffic
        self.on_level: Callable[[str, str | None, bool], None] = lambda *_: None
        self.on_resync: Callable[[], None] = lambda: None
        self.read_node: Callable[[str], Awaitable[None]]
        """Reads the rows of a node anew. Raises BusError."""
        self._bus, self._http, self._pools = bus, http, pools
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._acks: asyncio.Queue[DrainAck] = asyncio.Queue()
        self._inputs: deque[step.Input] = deque()
        self._feeding = False
        self._rejects: deque[step.Reject] = deque()
        """Those that are delivered in later turns of the loop."""
        self._delivered = 0
        """Rejects in this turn."""
        self._timer: asyncio.TimerHandle | None = None
        self._unanswered: dict[tuple[str, str], OnceLogger] = {}
        """Who does not answer, by (kind, name): logged once, not at each try of an outage."""
        self.stopping = False
        """True once ``stop`` was called."""

    @property
    def tickets(self) -> Collection[Ticket]:
        """Those of the calls that have not ended."""
        return self._tickets.values()

    def arrive(
        self,
        ticket: Ticket,
        model: str,
        *,
        kind: step.Kind = "call",
        hold_seconds: float | None = None,
        by: str = "",
        priority: int = 0,
        tenant: str = "",
    ) -> None:
        """Feed a new call, whose ticket receives the decisions. ``hold_seconds`` in wall seconds."""
        ticket.request = next(self._numbers)
        self._tickets[ticket.request] = ticket
        self.feed(step.CallArrived(ticket.request, model, ticket.cause, kind, hold_seconds, by, priority, tenant))
        if self.stopping:
            self._reject_stopping(ticket)

    def again(self, ticket: Ticket, *, suspect: bool, taken: bool) -> None:
        """Let a forwarded call wait again. ``suspect``: its engine failed; ``taken``: it had taken the request."""
        ticket.waiting = True
        if self.stopping:
            self._reject_stopping(ticket)
        else:
            self.feed(step.CallReturned(ticket.request, suspect, taken))

    def end(self, ticket: Ticket, *, answered: bool | None = None) -> None:
        """End the call: it was answered, or it failed, or its caller disconnected (see CallEnded)."""
        if self._tickets.pop(ticket.request, None) is not None:
            self.feed(step.CallEnded(ticket.request, answered))

    def forget(self, ticket: Ticket) -> None:
        """Drop the ticket without ending the call: a permit stays in flight until it expires."""
        self._tickets.pop(ticket.request, None)

    def feed(self, message: step.Input) -> None:
        """Feed an input to the core and perform its effects; what they feed comes after them."""
        self._inputs.append(message)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._inputs:
                for effect in self.traffic.handle(self._inputs.popleft(), time.monotonic()):
                    self._perform(effect)
        finally:
            self._feeding = False
            self._arm()

    async def run(self) -> None:
        """Send drain acknowledgements, in order."""
        while True:
            ack = await self._acks.get()
            with contextlib.suppress(BusError):  # it is repeated each second, and at the next reading of the roster
                await self._bus.publish(ack)

    def stop(self) -> None:
        """Reject all waiting calls, because the router stops; their callers can retry at another router."""
        self.stopping = True
        for ticket in list(self._tickets.values()):
            self._reject_stopping(ticket)

    async def close(self) -> None:
        """Cancel the timer and all tasks."""
        if self._timer is not None:
            self._timer.cancel()
        await cancelled(*self._tasks)

    def _reject_stopping(self, ticket: Ticket) -> None:
        if ticket.waiting:
            ticket.waiting = False
            ticket.decide(step.Reject(ticket.request, 503, "router_stopping", "this router is being stopped", 1))

    def _perform(self, effect: step.Effect) -> None:
        if isinstance(effect, step.LevelChanged):
            self.on_level(effect.model, effect.key, effect.edge)
        elif isinstance(effect, step.Forward):
            if (ticket := self._tickets.get(effect.request)) is not None:
                ticket.waiting = False
                ticket.decide(effect)
        elif isinstance(effect, step.Reject):
            self._rejects.append(effect)
            self._deliver()
        elif isinstance(effect, step.Cut):
            if (ticket := self._tickets.get(effect.request)) is not None:
                ticket.cut(effect.code)
        elif isinstance(effect, DrainAck):
            self._acks.put_nowait(effect)
        elif isinstance(effect, step.RequestActivation):
            spawn(self._tasks, self._request_activation(effect))
        elif isinstance(effect, step.QueryManager):
            spawn(self._tasks, self._query_manager(effect))
        elif isinstance(effect, step.Disconnect):
            self._pools.disconnect(effect.key)
        elif isinstance(effect, step.Prepare):
            self._pools.prepare(effect.key, effect.endpoint, effect.count)
        else:
            self.on_resync()

    def _deliver(self) -> None:
        """Tell calls that they are rejected: some in each turn of the loop, since thousands may end together."""
        if not self._delivered:
            asyncio.get_running_loop().call_soon(self._deliver_more)
        while self._rejects and self._delivered < MOST_REJECTS:
            effect = self._rejects.popleft()
            self._delivered += 1
            ticket = self._tickets.get(effect.request)
            if ticket is not None and ticket.waiting:
                ticket.waiting = False
                ticket.decide(effect)

    def _deliver_more(self) -> None:
        self._delivered = 0
        if self._rejects:
            self._deliver()

    async def _request_activation(self, effect: step.RequestActivation) -> None:
        reply: CommandReply | None = None
        command = effect.command
        try:
            reply = await self._bus.request(command, CommandReply, timeout=ACTIVATE_TIMEOUT_SECONDS)
        except BusError as error:
            self._no_answer("activation", command.seat).log(seat=command.seat, error=str(error))
        else:
            self._answered("activation", command.seat)
        ticket = self._tickets.get(effect.request)
        if reply is not None and reply.accepted and ticket is not None:
            ticket.accepted_at = ticket.accepted_at or reply.at or time.time()
        elif reply is not None and not reply.accepted:
            get_logger().info("activation.refused", seat=effect.command.seat, code=reply.code, reason=reply.reason)
        self.feed(step.ActivationAnswered(effect.key, reply))

    async def _query_manager(self, effect: step.QueryManager) -> None:
        sent_at = time.monotonic()
        try:
            timeout = aiohttp.ClientTimeout(total=QUERY_TIMEOUT_SECONDS)
            async with self._http.get(f"{effect.url}/v1/seats", timeout=timeout) as response:
                response.raise_for_status()
                rows = (await response.json())["seats"]
                records = tuple(SeatRecord.model_validate(row) for row in rows)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            self._no_answer("manager", effect.node).log(node=effect.node, url=effect.url, error=repr(error))
            self.feed(step.ManagerAnswered(effect.node, sent_at, None, away=await self._leader_answers(effect.node)))
        else:
            self._answered("manager", effect.node)
            self.feed(step.ManagerAnswered(effect.node, sent_at, records))

    async def _leader_answers(self, node: str) -> bool:
        try:
            await self.read_node(node)
        except BusError:
            return False
        return True

    def _no_answer(self, who: str, name: str) -> OnceLogger:
        return self._unanswered.setdefault((who, name), OnceLogger(f"{who}.unanswered", level="info"))

    def _answered(self, who: str, name: str) -> None:
        if (once := self._unanswered.pop((who, name), None)) is not None:
            once.clear()

    def _arm(self) -> None:
        """Schedule TimePassed for the next alarm of the core."""
        at = self.traffic.alarms.at
        if self._timer is not None and (at is None or self._timer.when() > at):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and at is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(step.TimePassed())
