"""The shell around the decisions: feeds ``Traffic`` and does what it says. The only writer of traffic."""

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
from services.router import happenings as h
from services.router.traffic import Traffic
from services.router.upstream import Upstreams

WAKE_TIMEOUT_SECONDS = 2.0
ASK_TIMEOUT_SECONDS = 2.0


class SeatCutError(Exception):
    """The seat of a forwarded call is taken away; ``code`` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Ticket:
    """One call between its handler and the dispatcher. ``with ticket.cuttable():`` may raise SeatCutError."""

    __slots__ = ("_cancelling", "_future", "_outcome", "_task", "accepted_at", "cause", "cut_code", "request")

    def __init__(self, request: int, cause: str) -> None:
        self.request = request
        self.cause = cause
        self.accepted_at: float | None = None
        """Unix seconds at which the manager accepted the activation that this call asked for."""
        self.cut_code: str | None = None
        self._outcome: h.Forward | h.Reject | None = None
        self._future: asyncio.Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    @property
    def decided(self) -> h.Forward | h.Reject | None:
        """The decision, if there is one already."""
        return self._outcome

    def decide(self, outcome: h.Forward | h.Reject) -> None:
        """The decision, for whoever waits in ``outcome``."""
        self._outcome = outcome
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def outcome(self, timeout: float | None = None) -> h.Forward | h.Reject | None:
        """The next decision; None when there is none within ``timeout`` wall seconds."""
        if self._outcome is None:
            self._future = asyncio.get_running_loop().create_future()
            if timeout is None:
                await self._future
            else:
                await asyncio.wait([self._future], timeout=timeout)
        outcome, self._outcome, self._future = self._outcome, None, None
        return outcome

    def cut(self, code: str) -> None:
        """Take the seat away from the call."""
        if self.cut_code is None:
            self.cut_code = code
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> Self:
        """While the call runs at a seat; works like ``asyncio.timeout``, with ``cut`` instead of a clock."""
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
        """It waits again: forget that it was cut."""
        self.cut_code = None


class Dispatcher:
    """Runs effects. ``async with`` ends its tasks."""

    def __init__(self, traffic: Traffic, bus: Bus, upstreams: Upstreams, http: aiohttp.ClientSession) -> None:
        self.traffic = traffic
        self.on_level: Callable[[str, str | None, bool], None] = lambda *_: None
        self.on_resync: Callable[[], None] = lambda: None
        self._bus = bus
        self._upstreams = upstreams
        self._http = http
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._acks: asyncio.Queue[DrainAck] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False

    def arrive(
        self, model: str, cause: str, *, size: int = 0, kind: h.Kind = "call", hold_seconds: float | None = None
    ) -> Ticket:
        """A call arrives; its ticket tells what becomes of it. ``hold_seconds`` in wall seconds."""
        ticket = Ticket(next(self._numbers), cause)
        self._tickets[ticket.request] = ticket
        self.feed(h.Arrived(ticket.request, model, cause, size, kind, hold_seconds))
        if self._stopping and ticket.decided is None:
            self._turn_away(ticket)
        return ticket

    def end(self, ticket: Ticket) -> None:
        """The call is over, whichever way."""
        if self._tickets.pop(ticket.request, None) is not None:
            self.feed(h.Ended(ticket.request))

    def forget(self, ticket: Ticket) -> None:
        """Nobody waits for the outcome any more; the call itself goes on (a permit runs until it expires)."""
        self._tickets.pop(ticket.request, None)

    def feed(self, happening: h.Happening) -> None:
        """Tell the decisions what happened and do what they say."""
        for effect in self.traffic.handle(happening, time.monotonic()):
            self._perform(effect)
        self._arm()

    async def run(self) -> None:
        """Send drain acknowledgements, in order."""
        while True:
            ack = await self._acks.get()
            try:
                await self._bus.publish(ack)
            except BusError:
                continue  # it is said again each second, and at the next reading of the roster

    def stop(self) -> None:
        """The router ends: those who wait may ask another one, or this one a moment later."""
        self._stopping = True
        for ticket in list(self._tickets.values()):
            self._turn_away(ticket)

    async def close(self) -> None:
        """End what was begun."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _turn_away(self, ticket: Ticket) -> None:
        text = "this router is being stopped; try again"
        ticket.decide(h.Reject(ticket.request, 503, "router_stopping", text, 1))

    def _perform(self, effect: h.Effect) -> None:
        if isinstance(effect, h.LevelChanged):
            self.on_level(effect.model, effect.key, effect.edge)
        elif isinstance(effect, h.Forward | h.Reject):
            if (ticket := self._tickets.get(effect.request)) is not None:
                ticket.decide(effect)
        elif isinstance(effect, h.Cut):
            if (ticket := self._tickets.get(effect.request)) is not None:
                ticket.cut(effect.code)
        elif isinstance(effect, DrainAck):
            self._acks.put_nowait(effect)
        elif isinstance(effect, h.Wake):
            self._spawn(self._wake(effect))
        elif isinstance(effect, h.AskManager):
            self._spawn(self._ask(effect))
        elif isinstance(effect, h.Disconnect):
            self._upstreams.disconnect(effect.key)
        else:
            self.on_resync()

    async def _wake(self, effect: h.Wake) -> None:
        reply: CommandReply | None = None
        try:
            reply = await self._bus.request(effect.command, CommandReply, timeout=WAKE_TIMEOUT_SECONDS)
        except BusError as error:
            get_logger().info("activation.unanswered", seat=effect.command.seat, error=str(error))
        ticket = self._tickets.get(effect.request)
        if reply is not None and reply.accepted and ticket is not None and ticket.accepted_at is None:
            ticket.accepted_at = time.time()
        if reply is not None and not reply.accepted:
            get_logger().info("activation.refused", seat=effect.command.seat, code=reply.code, reason=reply.reason)
        self.feed(h.Replied(effect.key, reply))

    async def _ask(self, effect: h.AskManager) -> None:
        asked_at = time.monotonic()
        records: tuple[SeatRecord, ...] | None = None
        try:
            timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_SECONDS)
            async with self._http.get(f"{effect.url}/v1/seats", timeout=timeout) as answer:
                answer.raise_for_status()
                rows = (await answer.json())["seats"]
                records = tuple(SeatRecord.model_validate(row) for row in rows)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            get_logger().info("manager.unanswered", node=effect.node, url=effect.url, error=repr(error))
        self.feed(h.ManagerSaid(effect.node, asked_at, records))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _arm(self) -> None:
        """Have a Tick when the decisions want one."""
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
        self.feed(h.Tick())
