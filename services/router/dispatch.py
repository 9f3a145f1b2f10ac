"""The async shell around the core: feeds inputs to ``Traffic`` and performs its effects. The only writer of traffic."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import aiohttp

from kybernate.bus.port import Bus, BusError
from kybernate.logs import get_logger
from kybernate.messages import CommandReply, DrainAck
from kybernate.roster import SeatRecord
from services.router.core import step
from services.router.core.traffic import Traffic

ACTIVATE_TIMEOUT_SECONDS = 2.0
QUERY_TIMEOUT_SECONDS = 2.0


class SeatCutError(Exception):
    """The seat of a forwarded call is evicted or lost; ``code`` is the reason."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class CallTicket:
    """Connects a call's handler to the dispatcher. ``with ticket:`` raises SeatCutError if the seat is cut."""

    __slots__ = ("_cancelling", "_future", "_task", "accepted_at", "cause", "cut_code", "decided", "request")

    def __init__(self, request: int, cause: str) -> None:
        self.request = request
        self.cause = cause
        self.accepted_at: float | None = None
        """Unix seconds at which the manager accepted the activation that this call requested."""
        self.cut_code: str | None = None
        self.decided: step.Forward | step.Reject | None = None
        """The decision that ``outcome`` has not returned yet."""
        self._future: asyncio.Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    def decide(self, outcome: step.Forward | step.Reject) -> None:
        """Set the decision, which wakes the task that waits in ``outcome``."""
        self.decided = outcome
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def outcome(self, timeout: float | None = None) -> step.Forward | step.Reject | None:
        """Wait for the next decision; None if there is none within ``timeout`` wall seconds."""
        if self.decided is None:
            self._future = asyncio.get_running_loop().create_future()
            if timeout is None:
                await self._future
            else:
                await asyncio.wait([self._future], timeout=timeout)
        outcome, self.decided, self._future = self.decided, None, None
        return outcome

    def cut(self, code: str) -> None:
        """Abort the call at its seat."""
        if self.cut_code is None:
            self.cut_code = code
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> Self:
        """Run the call at its seat; works like ``asyncio.timeout``, with ``cut`` instead of a clock."""
        if self.cut_code is not None:
            raise SeatCutError(self.cut_code)
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        code = self.cut_code
        if code is None or task is None:
            return
        if task.uncancel() <= self._cancelling and kind is not None:
            raise SeatCutError(code) from error

    def renew(self) -> None:
        """Clear the cut, because the call waits again."""
        self.cut_code = None


class Dispatcher:
    """Performs the core's effects. ``run`` is a job; ``close`` ends its tasks."""

    def __init__(
        self, traffic: Traffic, bus: Bus, http: aiohttp.ClientSession, disconnect: Callable[[str], None]
    ) -> None:
        self.traffic = traffic
        self.on_level: Callable[[str, str | None, bool], None] = lambda *_: None
        self.on_resync: Callable[[], None] = lambda: None
        self.on_forward: Callable[[step.Forward], None] = lambda _: None
        self._bus, self._http, self._disconnect = bus, http, disconnect
        self._tickets: dict[int, CallTicket] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._acks: asyncio.Queue[DrainAck] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self.stopping = False
        """True once ``stop`` was called."""

    def arrive(
        self,
        model: str,
        cause: str,
        *,
        kind: step.Kind = "call",
        hold_seconds: float | None = None,
        priority: int = 0,
    ) -> CallTicket:
        """Feed a new call and return its ticket, which receives the decisions. ``hold_seconds`` in wall seconds."""
        ticket = CallTicket(next(self._numbers), cause)
        self._tickets[ticket.request] = ticket
        self.feed(step.CallArrived(ticket.request, model, cause, kind, hold_seconds, priority))
        if self.stopping and ticket.decided is None:
            self._reject_stopping(ticket)
        return ticket

    def end(self, ticket: CallTicket, *, answered: bool | None = None) -> None:
        """End the call: it was answered, or it failed, or its caller disconnected (see CallEnded)."""
        if self._tickets.pop(ticket.request, None) is not None:
            self.feed(step.CallEnded(ticket.request, answered))

    def forget(self, ticket: CallTicket) -> None:
        """Drop the ticket without ending the call: a permit stays in flight until it expires."""
        self._tickets.pop(ticket.request, None)

    def feed(self, message: step.Input) -> None:
        """Feed an input to the core and perform its effects."""
        for effect in self.traffic.handle(message, time.monotonic()):
            self._perform(effect)
        self._arm()

    async def run(self) -> None:
        """Send drain acknowledgements, in order."""
        while True:
            ack = await self._acks.get()
            try:
                await self._bus.publish(ack)
            except BusError:
                continue  # it is repeated each second, and at the next reading of the roster

    def stop(self) -> None:
        """Reject all waiting calls, because the router stops; their callers can retry at another router."""
        self.stopping = True
        for ticket in list(self._tickets.values()):
            self._reject_stopping(ticket)

    async def close(self) -> None:
        """Cancel the timer and all tasks."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reject_stopping(self, ticket: CallTicket) -> None:
        text = "this router is being stopped; try again"
        ticket.decide(step.Reject(ticket.request, 503, "router_stopping", text, 1))

    def _perform(self, effect: step.Effect) -> None:
        if isinstance(effect, step.LevelChanged):
            self.on_level(effect.model, effect.key, effect.edge)
        elif isinstance(effect, step.Forward | step.Reject):
            if isinstance(effect, step.Forward):
                self.on_forward(effect)
            if (ticket := self._tickets.get(effect.request)) is not None:
                ticket.decide(effect)
        elif isinstance(effect, step.Cut):
            if (ticket := self._tickets.get(effect.request)) is not None:
                ticket.cut(effect.code)
        elif isinstance(effect, DrainAck):
            self._acks.put_nowait(effect)
        elif isinstance(effect, step.RequestActivation):
            self._spawn(self._request_activation(effect))
        elif isinstance(effect, step.QueryManager):
            self._spawn(self._query_manager(effect))
        elif isinstance(effect, step.Disconnect):
            self._disconnect(effect.key)
        else:
            self.on_resync()

    async def _request_activation(self, effect: step.RequestActivation) -> None:
        reply: CommandReply | None = None
        try:
            reply = await self._bus.request(effect.command, CommandReply, timeout=ACTIVATE_TIMEOUT_SECONDS)
        except BusError as error:
            get_logger().info("activation.unanswered", seat=effect.command.seat, error=str(error))
        ticket = self._tickets.get(effect.request)
        if reply is not None and reply.accepted and ticket is not None:
            ticket.accepted_at = ticket.accepted_at or reply.at or time.time()
        elif reply is not None and not reply.accepted:
            get_logger().info("activation.refused", seat=effect.command.seat, code=reply.code, reason=reply.reason)
        self.feed(step.ActivationAnswered(effect.key, reply))

    async def _query_manager(self, effect: step.QueryManager) -> None:
        sent_at = time.monotonic()
        records: tuple[SeatRecord, ...] | None = None
        try:
            timeout = aiohttp.ClientTimeout(total=QUERY_TIMEOUT_SECONDS)
            async with self._http.get(f"{effect.url}/v1/seats", timeout=timeout) as response:
                response.raise_for_status()
                rows = (await response.json())["seats"]
                records = tuple(SeatRecord.model_validate(row) for row in rows)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            get_logger().info("manager.unanswered", node=effect.node, url=effect.url, error=repr(error))
        self.feed(step.ManagerAnswered(effect.node, sent_at, records))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _arm(self) -> None:
        """Schedule TimePassed for the next alarm of the core."""
        at = self.traffic.next_at()
        if self._timer is not None:
            if at is not None and self._timer.when() <= at and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(step.TimePassed())
